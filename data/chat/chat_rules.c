/* chat_rules.c - what a chat template takes, found by rendering short conversations. */
#include "data/chat/chat_rules.h"

#include <stdio.h>
#include <string.h>

const char *const chat_roles[CHAT_ROLES] = {"user", "assistant", "system", "tool"};

static const struct chat_alias aliases[] = {
    {"human", "user", false, false},          {"gpt", "assistant", false, false},
    {"chatgpt", "assistant", false, false},   {"bot", "assistant", false, false},
    {"model", "assistant", false, false},     {"tool_call", "assistant", true, false},
    {"tool_calls", "assistant", true, false}, {"function_call", "assistant", true, false},
    {"tool_response", "tool", false, false},  {"function_response", "tool", false, false},
    {"observations", "tool", false, false},   {"tool_results", "tool", false, true},
    {"environment", "tool", false, true},     {"observation", "tool", false, true},
    {"function", "tool", false, true},        {"ipython", "tool", false, true},
    {"developer", "system", false, true},
};
_Static_assert(MT_LEN(aliases) <= CHAT_ALIASES, "chat_rules.keeps is too small");

int64_t chat_rules_role_index(const char *role) { return str_index(role, chat_roles, CHAT_ROLES); }

const struct chat_alias *chat_rules_alias(const char *role)
{
    for (int64_t i = 0; i < MT_LEN(aliases); i++)
        if (!strcmp(aliases[i].name, role)) return &aliases[i];
    return NULL;
}

const char *chat_rules_role(const struct chat_rules *rules, const char *role)
{
    const struct chat_alias *alias = chat_rules_alias(role);
    return alias && !rules->keeps[alias - aliases] ? alias->role : role;
}

int chat_rules_roles(const struct chat_rules *rules, const char *names[CHAT_ROLES + CHAT_ALIASES])
{
    int n = 0;
    if (rules->any_role) return 0;
    for (int i = 0; i < CHAT_ROLES; i++)
        if (rules->writes[i]) names[n++] = chat_roles[i];
    for (int i = 0; i < MT_LEN(aliases); i++)
        if (rules->keeps[i]) names[n++] = aliases[i].name;
    return n;
}

#define DIGITS         "7310731"
#define MARK           "zq" DIGITS "qz"
#define USER           "{\"role\": \"user\", \"content\": \"Ready?\"}"
#define ANSWER         "{\"role\": \"assistant\", \"content\": \"Yes\"}"
#define ID             "\"id\": \"callabcde\", \"type\": \"function\""
#define NAMED(name)    "\"function\": {\"name\": \"" name "\", \"arguments\": {\"a\": 1}}}"
#define FUNCTION(name) "{" ID ", " NAMED(name)
#define UNTYPED        "{\"id\": \"callabcde\", " NAMED(MARK)
#define TOOL                                                                                                           \
    "{\"name\": \"" MARK "\", \"description\": \"d\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}"
#define CALL(content, calls) "{\"role\": \"assistant\", \"content\": " content ", \"tool_calls\": [" calls "]}"
#define RESULT               "{\"role\": \"tool\", \"tool_call_id\": \"callabcde\", \"content\": \"Go\"}"

/* The text of these messages; false: the template refuses them. */
static bool text_of(struct text_buf *out, const struct chat_template *t, const char *messages)
{
    const struct chat_options opt = {0};
    struct text_buf row = {0};
    struct err err;
    text_put(&row, "{\"messages\": [");
    text_put(&row, messages);
    text_put(&row, "]}");
    struct json_doc *doc = json_parse(row.text, row.size, "messages", &err);
    MT_REQUIRE(doc, "%s", err.msg);
    out->size = out->n_spans = 0;
    text_put(out, "");
    const bool good = !chat_template_render(out, t, json_root(doc), &opt, &err);
    json_free(doc);
    text_free(&row);
    return good;
}

static bool writes(const struct chat_template *t, const char *messages, const char *text)
{
    struct text_buf out = {0};
    const bool yes = text_of(&out, t, messages) && strstr(out.text, text);
    text_free(&out);
    return yes;
}

/* Whether the template writes the content of a message of this role, at one of its usual positions. */
static bool writes_role(const struct chat_template *t, const char *role, const char *content)
{
    static const char *const around[][2] = {{"", ", " USER ", " ANSWER},
                                            {"", ", " ANSWER},
                                            {USER ", " ANSWER ", ", ", " ANSWER},
                                            {USER ", " CALL("\"\"", FUNCTION("f")) ", ", ", " ANSWER},
                                            {USER ", " CALL("null", FUNCTION("f")) ", ", ", " ANSWER}};
    char text[1536];
    for (int64_t i = 0; i < MT_LEN(around); i++) {
        snprintf(text, sizeof(text),
                 "%s{\"role\": \"%s\", \"name\": \"f\", \"tool_call_id\": \"callabcde\", \"content\": %s}%s",
                 around[i][0], role, content, around[i][1]);
        struct text_buf out = {0};
        /* a template that prints a list by str() does not take parts */
        const bool yes = text_of(&out, t, text) && strstr(out.text, DIGITS) && !strstr(out.text, "'type'");
        text_free(&out);
        if (yes) return true;
    }
    return false;
}

/* Whether the template writes the call of this message, and no "None" or "null" for its content. */
static bool writes_call(const struct chat_template *t, const char *message)
{
    char text[1024];
    struct text_buf out = {0};
    snprintf(text, sizeof(text), USER ", %s, " RESULT ", " ANSWER, message);
    const bool yes =
        text_of(&out, t, text) && strstr(out.text, MARK) && !strstr(out.text, "None") && !strstr(out.text, "null");
    text_free(&out);
    return yes;
}

void chat_rules_find(struct chat_rules *rules, const struct chat_template *t)
{
    const bool any = writes_role(t, "zqrole", "\"" MARK "\"");
    *rules = (struct chat_rules){.arguments = chat_template_arguments(t),
                                 .any_role = any,
                                 .null_content = writes_call(t, CALL("null", FUNCTION(MARK))),
                                 .no_content = writes_call(t, CALL("\"\"", FUNCTION(MARK)))};
    for (int64_t i = 0; i < MT_LEN(aliases); i++)
        rules->keeps[i] = (aliases[i].token || !any) && writes_role(t, aliases[i].name, "\"" MARK "\"");
    for (int64_t i = 0; i < CHAT_ROLES; i++) rules->writes[i] = any || writes_role(t, chat_roles[i], "\"" MARK "\"");
    for (int64_t i = 0; i < CHAT_ROLES; i++)
        rules->takes_parts[i] = writes_role(t, chat_roles[i], "[{\"type\": \"text\", \"text\": \"" MARK "\"}]");
    for (int64_t i = 0; i < CHAT_ROLES; i++) rules->takes_number[i] = writes_role(t, chat_roles[i], DIGITS);
    rules->call_type = !writes_call(t, CALL("\"\"", UNTYPED)) && !writes_call(t, CALL("null", UNTYPED));
    rules->null_result =
        writes(t, USER ", " CALL("\"\"", FUNCTION("f")) ", {\"role\": \"tool\", \"content\": null}", "null");
    rules->bare_tools = writes(t, USER "], \"tools\": [" TOOL, MARK); /* text_of ends the list */
    rules->function_call = writes_call(t, "{\"role\": \"assistant\", \"content\": \"\", \"function_call\": {\"name\": "
                                          "\"" MARK "\", \"arguments\": {}}}");
    rules->parallel = writes(t, USER ", " CALL("\"\"", FUNCTION("f") ", " FUNCTION(MARK)) ", " RESULT, MARK) ||
                      writes(t, USER ", " CALL("null", FUNCTION("f") ", " FUNCTION(MARK)) ", " RESULT, MARK);
}
