/* chat.c - harmony, the chat format of gpt-oss: the same text as its published Jinja template, written in C.
 *
 * A message is <|start|>{header}<|message|>{content}<|end|>. The template always writes a system message, a developer
 * message when there are instructions or tools, and then the conversation. An earlier answer shows only its final
 * message; the last one also shows its reasoning and ends in <|return|>. The reasoning before a tool call is kept until
 * a final answer follows. */
#include "data/chat/chat.h"

#include <string.h>

#include "data/chat/chat_dropped.h"
#include "data/chat/chat_tools.h"

struct chat {
    struct text_buf *out;
    const struct chat_options *opt;
    struct json messages;
    int64_t n;           /* number of messages */
    const char *call;    /* last function called; NULL: none since the last final answer */
    bool in_answer;      /* the text ends in an assistant message that may continue */
    int64_t answer_from; /* start of the span of the current assistant message */
};

/* ---- the assistant's messages and their spans ---- */

/* "<|start|>assistant": belongs to the prompt in an answer's first message, to the model's text in later ones. */
static void open_answer(struct chat *c)
{
    c->answer_from = c->out->size;
    text_put(c->out, "<|start|>assistant");
    if (!c->in_answer) c->answer_from = c->out->size;
}

static void close_answer(struct chat *c, const char *end)
{
    struct text_buf *t = c->out;
    text_put(t, end);
    c->in_answer = !strcmp(end, "<|end|>");
    if (t->n_spans > 0 && t->spans[t->n_spans - 1][1] == c->answer_from) {
        t->spans[t->n_spans - 1][1] = t->size;
        return;
    }
    text_span(t, c->answer_from, t->size);
}

static void put_answer(struct chat *c, const char *channel, const char *text, int64_t size, const char *end)
{
    open_answer(c);
    text_put(c->out, "<|channel|>");
    text_put(c->out, channel);
    text_put(c->out, "<|message|>");
    text_put_bytes(c->out, text, size);
    close_answer(c, end);
}

/* ---- messages ---- */

struct text {
    const char *s; /* NULL: absent */
    int64_t size;
};

static int get_text(struct json message, const char *key, struct text *out, struct err *err)
{
    struct json j = json_find(message, key);
    *out = (struct text){0};
    if (!json_given(j)) return 0;
    if (json_type(j) == JSON_ARRAY) /* the published template fails: it appends the list to a text */
        return json_error(j, err,
                          "must be a string, not an array: the template of gpt-oss takes no list of parts; write their "
                          "texts as one string");
    return json_str(j, &out->s, &out->size, err);
}

static bool has_tool_calls(struct json message) { return json_truthy(json_find(message, "tool_calls")); }

static bool has_role(struct json message, const char *role)
{
    const char *s;
    return !json_get_str(message, "role", &s, NULL) && !strcmp(s, role);
}

static int refuse_marks(struct json message, struct text text, struct err *err)
{
    static const char *const marks[] = {"<|channel|>analysis<|message|>", "<|channel|>final<|message|>"};
    for (int64_t m = 0; m < MT_LEN(marks); m++) {
        int64_t n = (int64_t)strlen(marks[m]);
        for (int64_t i = 0; i + n <= text.size; i++)
            if (text.s[i] == '<' && !memcmp(text.s + i, marks[m], (size_t)n))
                return json_error(message, err,
                                  "holds \"%s\": put the reasoning into `thinking` and the answer into "
                                  "`content`, without harmony's marks",
                                  marks[m]);
    }
    return 0;
}

static int put_arguments(struct chat *c, struct json call, struct err *err)
{
    struct json arguments = json_find(call, "arguments");
    const char *s;
    int64_t size;
    if (json_type(arguments) != JSON_STRING) return text_put_json(c->out, arguments, err);
    if (json_str(arguments, &s, &size, err)) return -1;
    struct json_doc *doc = json_parse(s, size, "arguments", err);
    int rc = doc ? text_put_json(c->out, json_root(doc), err)
                 : json_error(arguments, err, "is a string that is not valid JSON");
    json_free(doc);
    return rc;
}

static int put_tool_call(struct chat *c, struct json message, int64_t index, struct text content, struct text thinking,
                         struct err *err)
{
    struct json calls = json_find(message, "tool_calls"), call = json_at(calls, 0),
                function = json_find(call, "function");
    const char *type = "json";
    bool answered = false; /* a final answer follows: the template drops this reasoning */
    if (json_type(calls) == JSON_ARRAY && json_count(calls) > 1) return chat_dropped_calls(message, err);
    if (json_count(calls) != 1) return json_error(calls, err, "must be an array of one call");
    if (content.size && thinking.size)
        return json_error(message, err,
                          "has content and thinking with a tool call: put the reasoning into one of the two");
    for (int64_t i = index + 1; i < c->n; i++) {
        struct json later = json_at(c->messages, i);
        answered |= has_role(later, "assistant") && !has_tool_calls(later);
    }
    struct text reasoning = content.size ? content : thinking;
    if (reasoning.size && !answered) put_answer(c, "analysis", reasoning.s, reasoning.size, "<|end|>");
    if (json_truthy(function)) call = function;
    if (json_get_str(call, "name", &c->call, err) || json_opt_str(call, "content_type", &type, err)) return -1;
    open_answer(c);
    text_put(c->out, " to=functions.");
    text_put(c->out, c->call);
    text_put(c->out, "<|channel|>commentary ");
    text_put(c->out, type);
    text_put(c->out, "<|message|>");
    if (put_arguments(c, call, err)) return -1;
    close_answer(c, "<|call|>");
    return 0;
}

const char *chat_reasoning_key(struct json message, const char *own)
{
    const char *const keys[] = {own, "thinking", "reasoning_content", "reasoning"};
    for (int64_t i = 0; i < MT_LEN(keys); i++)
        if (json_truthy(json_find(message, keys[i]))) return keys[i];
    return own;
}

static int put_assistant(struct chat *c, struct json message, int64_t index, struct err *err)
{
    struct text content, thinking;
    if (get_text(message, "content", &content, err) ||
        get_text(message, chat_reasoning_key(message, "thinking"), &thinking, err))
        return -1;
    if (refuse_marks(message, content, err) || refuse_marks(message, thinking, err)) return -1;
    if (has_tool_calls(message)) return put_tool_call(c, message, index, content, thinking, err);
    if (!content.s && json_truthy(json_find(message, "refusal"))) return chat_dropped_part(message, "refusal", err);
    if (!content.s) return json_error(message, err, "has neither content nor tool_calls");
    bool last = index == c->n - 1 && !c->opt->generation_prompt;
    if (last && thinking.s) put_answer(c, "analysis", thinking.s, thinking.size, "<|end|>");
    put_answer(c, "final", content.s, content.size, last ? "<|return|>" : "<|end|>");
    c->call = NULL;
    return 0;
}

static int put_user(struct chat *c, struct json message, int64_t index, struct err *err)
{
    struct text content;
    (void)index;
    if (get_text(message, "content", &content, err)) return -1;
    if (!content.s) return json_error(message, err, "has no content");
    text_put(c->out, "<|start|>user<|message|>");
    text_put_bytes(c->out, content.s, content.size);
    text_put(c->out, "<|end|>");
    c->in_answer = false;
    return 0;
}

static int put_tool(struct chat *c, struct json message, int64_t index, struct err *err)
{
    (void)index;
    if (!c->call) return json_error(message, err, "is a tool's result without a preceding call");
    text_put(c->out, "<|start|>functions.");
    text_put(c->out, c->call);
    text_put(c->out, " to=assistant<|channel|>commentary<|message|>");
    if (text_put_json(c->out, json_find(message, "content"), err)) return -1;
    text_put(c->out, "<|end|>");
    c->in_answer = false;
    return 0;
}

static int put_message(struct chat *c, struct json message, int64_t index, struct err *err)
{
    static const struct {
        const char *role;
        int (*put)(struct chat *c, struct json message, int64_t index, struct err *err);
    } rows[] = {{"user", put_user}, {"assistant", put_assistant}, {"tool", put_tool}};
    const char *role;
    if (json_get_str(message, "role", &role, err)) return -1;
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        if (!strcmp(role, rows[i].role)) return rows[i].put(c, message, index, err);
    if (!strcmp(role, "system") || !strcmp(role, "developer"))
        return json_error(message, err,
                          "role \"%s\" is allowed only in the first message: move its text there, or write it as a "
                          "message of the user (the published template leaves it out)",
                          role);
    return json_error(message, err, "role \"%s\" is unknown (use system, developer, user, assistant or tool)", role);
}

/* ---- the messages before the conversation ---- */

static void put_system(struct chat *c, bool tools)
{
    const struct chat_options *o = c->opt;
    const char *identity = "You are ChatGPT, a large language model trained by OpenAI.";
    const char *parts[] = {
        "<|start|>system<|message|>",
        o->model_identity ? o->model_identity : identity,
        "\nKnowledge cutoff: 2024-06\nCurrent date: ",
        o->date ? o->date : CHAT_DATE,
        "\n\nReasoning: ",
        o->reasoning_effort ? o->reasoning_effort : "medium",
        "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.",
        tools ? "\nCalls to these tools must go to the commentary channel: 'functions'." : "",
        "<|end|>"};
    for (int64_t i = 0; i < MT_LEN(parts); i++) text_put(c->out, parts[i]);
}

/* *first: index of the first message of the conversation. */
static int put_developer(struct chat *c, struct json tools, int64_t *first, struct err *err)
{
    struct json message = json_at(c->messages, 0);
    struct text text = {0};
    *first = c->n > 0 && (has_role(message, "system") || has_role(message, "developer"));
    if (*first && get_text(message, "content", &text, err)) return -1;
    if (!text.size && !json_truthy(tools)) return 0;
    text_put(c->out, "<|start|>developer<|message|>");
    if (text.size) {
        text_put(c->out, "# Instructions\n\n");
        text_put_bytes(c->out, text.s, text.size);
        text_put(c->out, "\n\n");
    }
    if (json_truthy(tools) && chat_tools_put(c->out, tools, err)) return -1;
    text_put(c->out, "<|end|>");
    return 0;
}

static int render(struct chat *c, struct json tools, struct err *err)
{
    if (json_truthy(tools) && json_type(tools) != JSON_ARRAY) return json_error(tools, err, "must be an array");
    put_system(c, json_truthy(tools));
    int64_t first;
    if (put_developer(c, tools, &first, err)) return -1;
    for (int64_t i = first; i < c->n; i++)
        if (put_message(c, json_at(c->messages, i), i, err)) return -1;
    if (c->opt->generation_prompt) text_put(c->out, "<|start|>assistant");
    return 0;
}

/* The variables of the published template that a row sets for itself. */
static int get_own(struct chat_options *o, struct json row, struct err *err)
{
    const struct json own = json_find(row, "chat_template_kwargs");
    if (!json_truthy(own)) return 0;
    if (json_type(own) != JSON_OBJECT) return json_error(own, err, "must be an object");
    if (json_truthy(json_find(own, "builtin_tools")))
        return json_error(own, err, "builtin_tools: set data.chat_template to the checkpoint's chat_template.jinja");
    return json_opt_str(own, "reasoning_effort", &o->reasoning_effort, err) ||
                   json_opt_str(own, "model_identity", &o->model_identity, err)
               ? -1
               : 0;
}

int chat_render_harmony(struct text_buf *out, struct json row, const struct chat_options *opt, struct err *err)
{
    struct chat_options own = *opt;
    struct chat c = {.out = out, .opt = &own};
    struct json tools = json_find(row, "tools");
    struct json_doc *doc = NULL;
    const char *text;
    int64_t before = out->size, spans_before = out->n_spans, size;
    if (json_get_array(row, "messages", &c.messages, err) || get_own(&own, row, err)) return -1;
    c.n = json_count(c.messages);
    if (c.n == 0) return json_error(c.messages, err, "is empty");
    c.n = MT_MAX(0, c.n - opt->leave_out);
    if (json_type(tools) == JSON_STRING) {
        if (json_str(tools, &text, &size, err)) return -1;
        doc = json_parse(text, size, "tools", err);
        if (!doc) return json_error(tools, err, "is a string that is not valid JSON");
        tools = json_root(doc);
    }
    int rc = render(&c, tools, err);
    if (rc) {
        out->size = before;
        out->n_spans = spans_before;
    }
    json_free(doc);
    return rc;
}
