/* chat_template.h - a checkpoint's chat template: messages -> the same text as transformers. */
#ifndef MT_CHAT_TEMPLATE_H
#define MT_CHAT_TEMPLATE_H

#include "data/chat/chat.h"
#include "data/chat/chat_arguments.h"

struct chat_template; /* read-only after load: threads may share it */

#define CHAT_TEMPLATE_FILE "chat_template.jinja"
#define CHAT_TEMPLATES_DIR "additional_chat_templates"

/* Loads the template of a checkpoint's directory, and the template "tool_use" for rows with tools, in the order of
 * transformers 5: chat_template.jinja and additional_chat_templates/NAME.jinja; else `chat_template` of
 * tokenizer_config.json, a string or a list of {name, template}; else that of chat_template.json. `file`, if neither
 * NULL nor empty, replaces them; it may be a name of chat_named.h. *out is NULL, without an error, if there is none. */
int chat_template_load(struct chat_template **out, const char *dir, const char *file, struct err *err) MT_CHECK;
/* The rules of DeepSeek V4's encoder (chat_deepseek.h), whose checkpoints have no template. */
struct chat_template *chat_template_deepseek(void);
/* kwargs: a JSON object of variables that the template reads, in place of those set before. A row's
 * chat_template_kwargs override them. After this call only one thread at a time may use the template. */
int chat_template_set_kwargs(struct chat_template *t, const char *kwargs, struct err *err) MT_CHECK;
/* The checks of chat_template_set_kwargs that need no template. */
int chat_template_check_kwargs(const char *kwargs, struct err *err) MT_CHECK;
void chat_template_free(struct chat_template *t);           /* NULL is fine */
uint64_t chat_template_hash(const struct chat_template *t); /* of the text and the special tokens; 0: NULL */

bool chat_template_has_generation(const struct chat_template *t); /* the template has {% generation %}; false: NULL */
bool chat_template_is_deepseek(const struct chat_template *t);    /* false: NULL */
const char *chat_template_eos(const struct chat_template *t);     /* eos_token, or NULL */
const char *chat_template_text(const struct chat_template *t);    /* the text for rows without tools; NULL: none */
/* The template's text if transformers would not find it, because it is from `file` or chat_template.json; else NULL. */
const char *chat_template_foreign(const struct chat_template *t);
/* Adds a stop token: a token other than eos_token that ends generation, from the checkpoint's eos_token_id. */
void chat_template_add_stop(struct chat_template *t, const char *token, int64_t size);
/* Whether text[0..size) ends with a stop token. */
bool chat_template_stop_before(const struct chat_template *t, const char *text, int64_t size);
/* Size of the stop token at the start of text[0..size); 0: none. */
int64_t chat_template_stop_at(const struct chat_template *t, const char *text, int64_t size);
/* Renders short conversations to find what the template writes after an answer, and which form of a tool call's
 * arguments it takes; chat_template_render then uses that form. Call it after chat_template_add_stop and
 * chat_template_set_kwargs. NULL is fine. */
void chat_template_probe(struct chat_template *t);
enum chat_arguments chat_template_arguments(const struct chat_template *t); /* the form that probe found */
/* The stop token that begins a user's message (`tool`: a tool result) after an answer, if nothing else ends the answer
 * (GLM-4.5: "<|user|>", "<|observation|>"). NULL: the template ends answers itself, or no stop token follows them. */
const char *chat_template_next_role(const struct chat_template *t, bool tool, int64_t *size);
/* No token follows an answer that is the last message, and no stop token begins the next message. */
bool chat_template_never_ends(const struct chat_template *t);

/* Renders an answer that is the last message; returns where its content ends in `out`. */
int64_t chat_template_end(struct text_buf *out, const struct chat_template *t);

/* Appends the row's text, as transformers' apply_chat_template writes it, and the spans of {% generation %}. The rules
 * of DeepSeek V4 give a span for each answer, and do not set opt->places. A message's `thinking` is also
 * `reasoning_content` for the template, and the reverse. `tools` may be its JSON as a string; members of
 * `chat_template_kwargs` are variables too, unless null. */
int chat_template_render(struct text_buf *out, const struct chat_template *t, struct json row,
                         const struct chat_options *opt, struct err *err) MT_CHECK;

#endif
