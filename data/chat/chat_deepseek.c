/* chat_deepseek.c - DeepSeek V4's encoder, in C.
 *
 * First, messages become turns: consecutive user and tool messages are one user turn. Then each turn is written. With
 * `thinking` (default: off), answers after the last user turn have their reasoning; earlier ones have it if
 * drop_thinking is false or there are tools. A user turn ends with the tokens that begin the answer. */
#include "data/chat/chat_deepseek.h"

#include <string.h>

#define THINK     "<think>"
#define UNTHINK   "</think>"
#define REASONING "reasoning_content"
#define DSML      "｜DSML｜"

enum role { SYSTEM, USER, DEVELOPER, REMINDER, ASSISTANT };

struct turn {
    enum role role;
    int64_t from, to;  /* messages [from, to): one message, or consecutive user and tool messages */
    struct json first; /* the message `from` */
    const char *task;  /* NULL: none */
};

struct chat {
    struct text_buf *out;
    struct json messages, tools;
    struct turn *turns;   /* [n] */
    int64_t n, last_user; /* -1: there is none */
    bool thinking, drop, effort;
};

/* ---- pieces */

/* Appends a string; nothing when it is absent. */
static int put_text(struct chat *c, struct json message, const char *key, struct err *err)
{
    const struct json j = json_find(message, key);
    const char *s;
    int64_t size;
    if (!json_given(j)) return 0;
    if (json_type(j) == JSON_ARRAY)
        return json_error(j, err, "must be a string, not an array: write the texts of its parts as one string");
    if (json_str(j, &s, &size, err)) return -1;
    text_put_bytes(c->out, s, size);
    return 0;
}

static int put_tools(struct chat *c, struct json tools, struct err *err)
{
    if (json_type(tools) != JSON_ARRAY) return json_error(tools, err, "must be an array");
    text_put(c->out, "\n\n## Tools\n\n"
                     "You have access to a set of tools to help answer the user's question. You can invoke tools by "
                     "writing a \"<" DSML "tool_calls>\" block like the following:\n\n"
                     "<" DSML "tool_calls>\n"
                     "<" DSML "invoke name=\"$TOOL_NAME\">\n"
                     "<" DSML "parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</" DSML
                     "parameter>\n...\n"
                     "</" DSML "invoke>\n"
                     "<" DSML "invoke name=\"$TOOL_NAME2\">\n...\n"
                     "</" DSML "invoke>\n"
                     "</" DSML "tool_calls>\n\n"
                     "String parameters should be specified as is and set `string=\"true\"`. For all other types "
                     "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
                     "`string=\"false\"`.\n\n"
                     "If thinking_mode is enabled (triggered by " THINK "), you MUST output your complete reasoning "
                     "inside " THINK "..." UNTHINK " BEFORE any tool calls or final response.\n\n"
                     "Otherwise, output directly after " UNTHINK " with tool calls or final response.\n\n"
                     "### Available Tool Schemas\n\n");
    for (int64_t i = 0; i < json_count(tools); i++) {
        struct json function;
        if (json_get_object(json_at(tools, i), "function", &function, err)) return -1;
        if (i) text_put(c->out, "\n");
        if (text_put_json(c->out, function, err)) return -1;
    }
    text_put(c->out, "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
                     "calls.\n");
    return 0;
}

/* ---- the roles */

/* Writes tools and the response format, after the text of a system or developer message. */
static int put_instructions(struct chat *c, const struct turn *t, struct err *err)
{
    const struct json format = json_find(t->first, "response_format");
    struct json tools = json_find(t->first, "tools");
    if (t->from == 0 && json_truthy(c->tools)) tools = c->tools;
    if (json_truthy(tools) && put_tools(c, tools, err)) return -1;
    if (!json_truthy(format)) return 0;
    text_put(c->out, "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n");
    return text_put_json(c->out, format, err);
}

/* Writes a tool's result: a string, a list of parts, or any JSON. */
static int put_result(struct chat *c, struct json message, struct err *err)
{
    const struct json content = json_find(message, "content");
    const bool plain = !json_given(content) || json_type(content) == JSON_STRING;
    text_put(c->out, "<tool_result>");
    if (plain ? put_text(c, message, "content", err)
              : json_type(content) != JSON_ARRAY && text_put_json(c->out, content, err))
        return -1;
    for (int64_t i = 0; json_type(content) == JSON_ARRAY && i < json_count(content); i++) {
        const struct json part = json_at(content, i);
        const char *type;
        if (i) text_put(c->out, "\n\n");
        if (json_get_str(part, "type", &type, err)) return -1;
        if (strcmp(type, "text")) return json_error(part, err, "type \"%s\" is not supported, only text is", type);
        if (put_text(c, part, "text", err)) return -1;
    }
    text_put(c->out, "</tool_result>");
    return 0;
}

/* Index among the calls before message `at` of the call that a tool message answers; 0 when none matches. */
static int64_t call_of(const struct chat *c, int64_t at, struct json result)
{
    const char *id, *of;
    struct json calls = {0};
    if (json_get_str(result, "tool_call_id", &id, NULL)) return 0;
    while (at-- > 0 && !json_truthy(calls = json_find(json_at(c->messages, at), "tool_calls"))) {
    }
    for (int64_t i = json_count(calls); i-- > 0;) {
        const struct json call = json_at(calls, i);
        if ((!json_get_str(call, "id", &of, NULL) || !json_get_str(json_find(call, "function"), "id", &of, NULL)) &&
            !strcmp(id, of))
            return i;
    }
    return 0;
}

static bool is_tool(struct json message)
{
    const char *role;
    return !json_get_str(message, "role", &role, NULL) && !strcmp(role, "tool");
}

/* Writes the messages of a turn, separated by blank lines; the k-th result answers the k-th call. */
static int put_user(struct chat *c, const struct turn *t, struct err *err)
{
    struct result {
        int64_t at, call;
    } *results = mem_array(t->to - t->from, sizeof(*results));
    int64_t n = 0, next = 0;
    int rc = 0;
    for (int64_t i = t->from; i < t->to; i++) {
        if (!is_tool(json_at(c->messages, i))) continue;
        const int64_t call = call_of(c, t->from, json_at(c->messages, i));
        int64_t k = n++;
        for (; k > 0 && results[k - 1].call > call; k--) results[k] = results[k - 1];
        results[k] = (struct result){i, call};
    }
    text_put(c->out, "<｜User｜>");
    for (int64_t i = t->from; i < t->to && !rc; i++) {
        const struct json message = json_at(c->messages, i);
        if (i > t->from) text_put(c->out, "\n\n");
        rc = is_tool(message) ? put_result(c, json_at(c->messages, results[next++].at), err)
                              : put_text(c, message, "content", err);
    }
    mem_free(results);
    return rc;
}

static int put_members(struct chat *c, struct json arguments, struct err *err)
{
    const char *key, *s;
    int64_t size;
    struct json value;
    if (json_type(arguments) != JSON_OBJECT) return json_error(arguments, err, "must be an object");
    for (int64_t i = 0; json_member(arguments, i, &key, &value); i++) {
        const bool text = json_type(value) == JSON_STRING;
        text_put(c->out, i ? "\n<" DSML "parameter name=\"" : "<" DSML "parameter name=\"");
        text_put(c->out, key);
        text_put(c->out, text ? "\" string=\"true\">" : "\" string=\"false\">");
        if (!text && text_put_json(c->out, value, err)) return -1;
        if (text && json_str(value, &s, &size, err)) return -1;
        if (text) text_put_bytes(c->out, s, size);
        text_put(c->out, "</" DSML "parameter>");
    }
    return 0;
}

/* Writes a call's arguments: an object, or its JSON as a string. Other strings become the value of one parameter,
 * `arguments`. */
static int put_arguments(struct chat *c, struct json arguments, struct err *err)
{
    const char *s;
    int64_t size;
    struct err why;
    if (json_type(arguments) != JSON_STRING) return put_members(c, arguments, err);
    if (json_str(arguments, &s, &size, err)) return -1;
    struct json_doc *doc = json_parse(s, size, "arguments", &why);
    if (doc) {
        const int rc = put_members(c, json_root(doc), &why);
        json_free(doc);
        return rc ? json_error(arguments, err, "%s", why.msg) : 0;
    }
    text_put(c->out, "<" DSML "parameter name=\"arguments\" string=\"true\">");
    text_put_bytes(c->out, s, size);
    text_put(c->out, "</" DSML "parameter>");
    return 0;
}

static int put_calls(struct chat *c, struct json calls, struct err *err)
{
    const char *name;
    if (json_type(calls) != JSON_ARRAY) return json_error(calls, err, "must be an array");
    text_put(c->out, "\n\n<" DSML "tool_calls>\n");
    for (int64_t i = 0; i < json_count(calls); i++) {
        const struct json call = json_at(calls, i), of = json_find(call, "function"),
                          function = json_truthy(of) ? of : call;
        if (json_get_str(function, "name", &name, err)) return -1;
        text_put(c->out, "<" DSML "invoke name=\"");
        text_put(c->out, name);
        text_put(c->out, "\">\n");
        if (put_arguments(c, json_find(function, "arguments"), err)) return -1;
        text_put(c->out, "\n</" DSML "invoke>\n");
    }
    text_put(c->out, "</" DSML "tool_calls>");
    return 0;
}

/* The two parts of a message's content "<think>reasoning</think>answer". The message has no field reasoning_content. */
struct inline_reasoning {
    const char *text, *answer; /* without the newlines around both */
    int64_t size, answer_size;
};
/* false: the content has another form, and in->answer is NULL. */
static bool inline_reasoning(struct json message, struct inline_reasoning *in)
{
    const char *s, *end, *mark;
    int64_t size;
    *in = (struct inline_reasoning){.answer = NULL};
    if (json_given(json_find(message, chat_reasoning_key(message, REASONING)))) return false;
    if (json_str(json_find(message, "content"), &s, &size, NULL)) return false;
    for (end = s + size; s < end && text_is_space(*s); s++) {
    }
    if (end - s < (int64_t)strlen(THINK) || memcmp(s, THINK, strlen(THINK)) != 0) return false;
    s += strlen(THINK);
    mark = strstr(s, UNTHINK);
    if (!mark) return false;
    in->answer = mark + strlen(UNTHINK);
    while (s < mark && *s == '\n') s++;
    while (mark > s && mark[-1] == '\n') mark--;
    while (in->answer < end && *in->answer == '\n') in->answer++;
    in->text = s, in->size = mark - s, in->answer_size = end - in->answer;
    return true;
}

static int put_answer(struct chat *c, int64_t k, struct err *err)
{
    const struct turn *t = &c->turns[k];
    const struct json calls = json_find(t->first, "tool_calls");
    const bool for_task = k > 0 && c->turns[k - 1].task;
    const int64_t begin = c->out->size;
    struct inline_reasoning in = {.answer = NULL};
    bool open = false;
    inline_reasoning(t->first, &in);
    if (c->thinking && !for_task && (!c->drop || k > c->last_user)) {
        text_put_bytes(c->out, in.answer ? in.text : "", in.size);
        if (put_text(c, t->first, chat_reasoning_key(t->first, REASONING), err)) return -1;
        text_put(c->out, UNTHINK);
    }
    if (in.answer) text_put_bytes(c->out, in.answer, in.answer_size);
    if (!in.answer && put_text(c, t->first, "content", err)) return -1;
    if (json_opt_bool(t->first, "wo_eos", &open, err)) return -1;
    if (json_truthy(calls) && put_calls(c, calls, err)) return -1;
    if (!open) text_put(c->out, DEEPSEEK_EOS);
    text_span(c->out, begin, c->out->size);
    return 0;
}

/* ---- turns */

/* Writes what an answer after turn k begins with, if k is the last turn or an answer or a reminder follows. */
static void put_header(struct chat *c, int64_t k)
{
    const struct turn *t = &c->turns[k];
    if (k + 1 < c->n && t[1].role != ASSISTANT && t[1].role != REMINDER) return;
    if (t->task && strcmp(t->task, "action")) {
        text_put(c->out, "<｜");
        text_put(c->out, t->task);
        text_put(c->out, "｜>");
    } else if (t->task) {
        text_put(c->out,
                 c->thinking ? "<｜Assistant｜>" THINK "<｜action｜>" : "<｜Assistant｜>" UNTHINK "<｜action｜>");
    } else if (t->role == USER || t->role == DEVELOPER) {
        const bool think = c->thinking && (!c->drop || k >= c->last_user);
        text_put(c->out, think ? "<｜Assistant｜>" THINK : "<｜Assistant｜>" UNTHINK);
    }
}

static int put_turn(struct chat *c, int64_t k, struct err *err)
{
    const struct turn *t = &c->turns[k];
    switch (t->role) {
    case ASSISTANT: return put_answer(c, k, err);
    case USER: return put_user(c, t, err);
    case REMINDER: text_put(c->out, "<｜latest_reminder｜>"); return put_text(c, t->first, "content", err);
    case SYSTEM: return put_text(c, t->first, "content", err) ? -1 : put_instructions(c, t, err);
    case DEVELOPER: break;
    }
    if (!json_truthy(json_find(t->first, "content"))) return json_error(t->first, err, "has no content");
    text_put(c->out, "<｜User｜>");
    return put_text(c, t->first, "content", err) ? -1 : put_instructions(c, t, err);
}

static int get_task(struct json message, const char **task, struct err *err)
{
    static const char *const tasks[] = {"action", "query", "authority", "domain", "title", "read_url"};
    *task = NULL;
    if (json_opt_str(message, "task", task, err)) return -1;
    for (int64_t i = 0; *task && i < MT_LEN(tasks); i++)
        if (!strcmp(*task, tasks[i])) return 0;
    return *task ? json_error(message, err, "task \"%s\" is unknown", *task) : 0;
}

static int add_message(struct chat *c, int64_t i, struct err *err)
{
    static const char *const roles[] = {"system", "user", "developer", "latest_reminder", "assistant", "tool"};
    const struct json message = json_at(c->messages, i);
    const char *role, *task;
    int64_t r = 0;
    if (json_get_str(message, "role", &role, err) || get_task(message, &task, err)) return -1;
    while (r < MT_LEN(roles) && strcmp(role, roles[r])) r++;
    if (r == MT_LEN(roles))
        return json_error(message, err,
                          "role \"%s\" is unknown (use system, user, developer, latest_reminder, assistant or tool)",
                          role);
    const bool tool = r > ASSISTANT;
    struct turn *last = c->n ? &c->turns[c->n - 1] : NULL;
    if (tool) r = USER, task = NULL;
    if (r == USER && last && last->role == USER && (tool || !last->task))
        last->to = i + 1;
    else
        c->turns[c->n++] = (struct turn){.role = (enum role)r, .from = i, .to = i + 1, .first = message, .task = task};
    if (r != USER && json_truthy(json_find(message, "tools"))) c->drop = false;
    return 0;
}

static void find_last_user(struct chat *c)
{
    c->last_user = c->n - 1;
    while (c->last_user >= 0 && c->turns[c->last_user].role != USER && c->turns[c->last_user].role != DEVELOPER)
        c->last_user--;
}

/* Drops the developer messages of earlier turns. Called when the reasoning of these turns is dropped too. */
static void drop_developers(struct chat *c)
{
    int64_t kept = 0;
    find_last_user(c);
    for (int64_t k = 0; k < c->n; k++)
        if (c->turns[k].role != DEVELOPER || k >= c->last_user) c->turns[kept++] = c->turns[k];
    c->n = kept;
}

/* ---- the whole */

static int get_mode(struct chat *c, struct json kwargs, struct err *err)
{
    const char *mode = NULL, *effort = NULL;
    if (json_opt_bool(kwargs, "enable_thinking", &c->thinking, err) ||
        json_opt_bool(kwargs, "thinking", &c->thinking, err) || json_opt_str(kwargs, "thinking_mode", &mode, err) ||
        json_opt_bool(kwargs, "drop_thinking", &c->drop, err) || json_opt_str(kwargs, "reasoning_effort", &effort, err))
        return -1;
    if (mode && strcmp(mode, "thinking") && strcmp(mode, "chat"))
        return json_error(kwargs, err, "thinking_mode \"%s\": must be \"thinking\" or \"chat\"", mode);
    if (effort && strcmp(effort, "max") && strcmp(effort, "high"))
        return json_error(kwargs, err, "reasoning_effort \"%s\": must be \"high\" or \"max\"", effort);
    if (mode) c->thinking = !strcmp(mode, "thinking");
    if (effort) c->effort = !strcmp(effort, "max");
    return 0;
}

int chat_deepseek_check(struct json kwargs, struct err *err)
{
    static const char *const names[] = {"thinking", "enable_thinking", "thinking_mode", "drop_thinking",
                                        "reasoning_effort"};
    struct chat c = {0};
    struct json value;
    const char *key;
    for (int64_t i = 0; json_member(kwargs, i, &key, &value); i++) {
        bool known = false;
        for (int k = 0; k < MT_LEN(names); k++) known = known || !strcmp(key, names[k]);
        if (!known)
            return err_set(err,
                           "DeepSeek-V4's chat format does not read the variable \"%s\"; it reads %s, %s, %s, %s, %s",
                           key, names[0], names[1], names[2], names[3], names[4]);
    }
    return get_mode(&c, kwargs, err);
}

static int render(struct chat *c, int64_t n, struct err *err)
{
    if (json_truthy(c->tools)) c->drop = false;
    for (int64_t i = 0; i < n; i++)
        if (add_message(c, i, err)) return -1;
    if (c->thinking && c->drop) drop_developers(c);
    find_last_user(c);
    text_put(c->out, DEEPSEEK_BOS);
    if (c->thinking && c->effort)
        text_put(c->out, "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
                         "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
                         "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
                         "edge cases, and adversarial scenarios.\n"
                         "Explicitly write out your entire deliberation process, documenting every intermediate step, "
                         "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
                         "unchecked.\n\n");
    const bool placed = c->n && (c->turns[0].role == SYSTEM || c->turns[0].role == DEVELOPER);
    if (json_truthy(c->tools) && !placed && put_tools(c, c->tools, err)) return -1;
    for (int64_t k = 0; k < c->n; k++) {
        if (put_turn(c, k, err)) return -1;
        put_header(c, k);
    }
    return 0;
}

int chat_deepseek_render(struct text_buf *out, struct json row, struct json tools, struct json kwargs,
                         const struct chat_options *opt, struct err *err)
{
    struct chat c = {.out = out, .tools = tools, .drop = true};
    const struct json own = json_find(row, "chat_template_kwargs");
    const int64_t before = out->size, spans_before = out->n_spans;
    if (json_get_array(row, "messages", &c.messages, err) || get_mode(&c, kwargs, err) || get_mode(&c, own, err))
        return -1;
    const int64_t n = json_count(c.messages);
    if (n == 0) return json_error(c.messages, err, "is empty");
    c.turns = mem_array(n, sizeof(*c.turns));
    const int rc = render(&c, MT_MAX(0, n - opt->leave_out), err);
    mem_free(c.turns);
    if (rc) {
        out->size = before;
        out->n_spans = spans_before;
    }
    return rc;
}
