/* chat_rules.h - what a chat template takes: roles, lists of text parts, calls without content. */
#ifndef MT_CHAT_RULES_H
#define MT_CHAT_RULES_H

#include "data/chat/chat_template.h"

/* Names of other programs (OpenAI, Llama, ShareGPT, LLaMA-Factory, axolotl, ms-swift) for the four roles. */
struct chat_alias {
    const char *name, *role;
    bool call;  /* the content is a call, {name, arguments} as JSON or as its text */
    bool token; /* some chat formats use this name: it is kept if the template writes it */
};
const struct chat_alias *chat_rules_alias(const char *role);

enum { CHAT_ROLES = 4, CHAT_ALIASES = 24 };
extern const char *const chat_roles[CHAT_ROLES]; /* user, assistant, system, tool */
int64_t chat_rules_role_index(const char *role); /* CHAT_ROLES: another role */

struct chat_rules {
    enum chat_arguments arguments; /* the form of a call's arguments */
    bool keeps[CHAT_ALIASES];      /* the template knows this alias */
    bool any_role;                 /* it copies any role, or has a default */
    bool writes[CHAT_ROLES];       /* it writes messages of this role */
    bool takes_parts[CHAT_ROLES];  /* the content may be a list of text parts */
    bool takes_number[CHAT_ROLES]; /* the content may be a number */
    bool null_content, no_content; /* an answer that is a call may have null, or "", as its content */
    bool null_result;              /* a tool's result may be null */
    bool function_call;            /* the template reads `function_call` of a message */
    bool parallel;                 /* a message may have two calls */
    bool call_type;                /* a call needs `type` */
    bool bare_tools;               /* a tool may be {name, ...}, without `function` around it */
};
/* Finds the rules by rendering short conversations with t. */
void chat_rules_find(struct chat_rules *rules, const struct chat_template *t);
/* The role to write in place of `role`. */
const char *chat_rules_role(const struct chat_rules *rules, const char *role);
/* Sets names to the roles that the template writes and returns their number; 0: any role. */
int chat_rules_roles(const struct chat_rules *rules, const char *names[CHAT_ROLES + CHAT_ALIASES]);

#endif
