/* message.c - see message.h. */
#include "train/models/message.h"

#include <stdio.h>
#include <string.h>

#define DSML "｜DSML｜"

/* What encloses calls. */
static const struct {
    const char *open, *close;
} marks[] = {
    [MESSAGE_JSON] = {"<tool_call>", "</tool_call>"},
    [MESSAGE_XML] = {"<tool_call>", "</tool_call>"},
    [MESSAGE_ARG_KEY] = {"<tool_call>", "</tool_call>"},
    [MESSAGE_DSML] = {"<" DSML "tool_calls>", "</" DSML "tool_calls>"},
    [MESSAGE_INVOKE] = {"<minimax:tool_call>", "</minimax:tool_call>"},
    [MESSAGE_PYTHON] = {"<|tool_call_start|>", "<|tool_call_end|>"},
    [MESSAGE_GEMMA] = {"<|tool_call>", "<tool_call|>"},
};

/* ---- rules ---- */

static bool has(const char *text, const char *part) { return text && strstr(text, part); }

struct message_rules message_rules_of(const struct chat_template *t)
{
    const char *text = t ? chat_template_text(t) : NULL;
    if (chat_template_is_deepseek(t)) return (struct message_rules){.calls = MESSAGE_DSML, .think = true};
    struct message_rules r = {.think = has(text, "</think>")};
    if (has(text, "<|channel|>") && has(text, "<|message|>")) return (struct message_rules){.calls = MESSAGE_HARMONY};
    if (has(text, marks[MESSAGE_GEMMA].open))
        return (struct message_rules){.calls = MESSAGE_GEMMA, .think = has(text, "<channel|>")};
    if (has(text, marks[MESSAGE_INVOKE].open)) r.calls = MESSAGE_INVOKE;
    if (has(text, marks[MESSAGE_PYTHON].open)) r.calls = MESSAGE_PYTHON;
    if (has(text, "<tool_call>"))
        r.calls = has(text, "<arg_key>") ? MESSAGE_ARG_KEY : has(text, "<function=") ? MESSAGE_XML : MESSAGE_JSON;
    return r;
}

const char *message_calls_text(enum message_calls calls)
{
    static const char *const texts[] = {
        [MESSAGE_PLAIN] = "the chat template has no form of tool calls that serve knows: calls stay in the content",
        [MESSAGE_HARMONY] = "tool calls and reasoning of gpt-oss",
        [MESSAGE_JSON] = "tool calls as JSON in <tool_call>",
        [MESSAGE_XML] = "tool calls as <function=NAME> in <tool_call>",
        [MESSAGE_ARG_KEY] = "tool calls as <arg_key> in <tool_call>",
        [MESSAGE_DSML] = "tool calls of DeepSeek V4",
        [MESSAGE_INVOKE] = "tool calls of MiniMax-M2",
        [MESSAGE_PYTHON] = "tool calls of LFM2",
        [MESSAGE_GEMMA] = "tool calls and reasoning of Gemma-4"};
    return texts[calls];
}

/* ---- parts of a text ---- */

struct part {
    const char *at, *end;
};

static struct part part_of(const char *at, const char *end) { return (struct part){at, end}; }

/* Where `mark` begins in the part; NULL: nowhere. */
static const char *find(struct part p, const char *mark)
{
    const size_t n = strlen(mark);
    for (const char *at = p.at; at + n <= p.end; at++)
        if (*at == *mark && !memcmp(at, mark, n)) return at;
    return NULL;
}

static bool begins(struct part p, const char *mark)
{
    const size_t n = strlen(mark);
    return (size_t)(p.end - p.at) >= n && !memcmp(p.at, mark, n);
}

/* The end of the part p without the beginning of a `mark` that may stand there. */
static const char *without_begun(struct part p, const char *mark)
{
    const size_t n = strlen(mark);
    for (const char *at = p.end - MT_MIN((size_t)(p.end - p.at), n - 1); at < p.end; at++)
        if (!memcmp(at, mark, (size_t)(p.end - at))) return at;
    return p.end;
}

static struct part trimmed(struct part p)
{
    while (p.at < p.end && text_is_space(*p.at)) p.at++;
    while (p.end > p.at && text_is_space(p.end[-1])) p.end--;
    return p;
}

static void put(struct text_buf *to, struct part p) { text_put_bytes(to, p.at, p.end - p.at); }

static struct message_call *add_call(struct message *m)
{
    m->calls = mem_reserve(m->calls, &m->cap_call, m->n_call + 1, sizeof(*m->calls));
    struct message_call *c = &m->calls[m->n_call++];
    c->name.size = c->arguments.size = 0;
    text_put(&c->name, "");
    text_put(&c->arguments, "");
    return c;
}

/* ---- one call ---- */

/* {"name": .., "arguments": {..}}; arguments may be JSON in a string. */
static bool read_json_call(struct message *m, struct part p)
{
    const char *name, *text;
    struct err err;
    struct json_doc *doc = json_parse_row(p.at, p.end - p.at, JSON_ROW_VALUES, "call", &err);
    if (!doc) return false;
    struct json j = json_root(doc), arguments = json_find(j, "arguments");
    int64_t size;
    bool fine = json_type(j) == JSON_OBJECT && !json_get_str(j, "name", &name, &err);
    if (fine && !json_given(arguments)) arguments = json_find(j, "parameters");
    if (fine) {
        struct message_call *c = add_call(m);
        text_put(&c->name, name);
        if (json_type(arguments) == JSON_STRING && !json_str(arguments, &text, &size, &err))
            text_put_bytes(&c->arguments, text, size);
        else if (!json_given(arguments) || text_put_json(&c->arguments, arguments, &err))
            text_put(&c->arguments, "{}");
    }
    json_free(doc);
    return fine;
}

/* Whether the schema of tools says that argument `key` of function `name` is a string. */
static bool is_string(struct json tools, struct part name, struct part key)
{
    char text[128];
    for (int64_t i = 0; i < json_count(tools); i++) {
        const struct json tool = json_at(tools, i);
        const struct json f = json_has(tool, "function") ? json_find(tool, "function") : tool;
        const char *word = "";
        if (json_opt_str(f, "name", &word, NULL) || strlen(word) != (size_t)(name.end - name.at) ||
            memcmp(word, name.at, strlen(word)) != 0)
            continue;
        snprintf(text, sizeof(text), "%.*s", (int)(key.end - key.at), key.at);
        const struct json schema = json_find(json_find(json_find(f, "parameters"), "properties"), text);
        if (json_type(json_find(schema, "type")) != JSON_STRING) return false;
        return !json_opt_str(schema, "type", &word, NULL) && !strcmp(word, "string");
    }
    return false;
}

/* Appends a member. Its value is the JSON doc, which it frees, or if doc is NULL `value` as a string. */
static void put_value(struct text_buf *to, struct part key, struct part value, struct json_doc *doc)
{
    struct err err;
    char *copy = mem_strndup(key.at, key.end - key.at);
    text_put_key(to, copy);
    if (!doc || text_put_json(to, json_root(doc), &err)) text_put_quoted(to, value.at, value.end - value.at);
    json_free(doc);
    mem_free(copy);
}

/* Appends a value that is written without quotes: as a string if the schema says so or if it is not JSON, else as
 * JSON. */
static void put_argument(struct text_buf *to, const struct message_input *in, struct part name, struct part key,
                         struct part value)
{
    struct err err;
    struct json_doc *doc = is_string(in->tools, name, key)
                               ? NULL
                               : json_parse_row(value.at, value.end - value.at, JSON_ROW_VALUES, "argument", &err);
    put_value(to, key, value, doc);
}

/* <function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function> */
static bool read_xml_call(struct message *m, const struct message_input *in, struct part p)
{
    static const char function[] = "<function=", parameter[] = "<parameter=", end[] = "</parameter>";
    if (!begins(p, function)) return false;
    const char *close = find(p, ">");
    if (!close) return false;
    const struct part name = trimmed(part_of(p.at + sizeof(function) - 1, close));
    struct message_call *c = add_call(m);
    put(&c->name, name);
    text_put(&c->arguments, "{");
    p.at = close + 1;
    for (const char *at; (at = find(p, parameter));) {
        const char *key_end = find(part_of(at, p.end), ">");
        const char *value_end = key_end ? find(part_of(key_end, p.end), end) : NULL;
        if (!value_end) break;
        struct part value = part_of(key_end + 1, value_end);
        if (value.at < value.end && *value.at == '\n') value.at++;
        if (value.at < value.end && value.end[-1] == '\n') value.end--;
        put_argument(&c->arguments, in, name, part_of(at + sizeof(parameter) - 1, key_end), value);
        p.at = value_end + sizeof(end) - 1;
    }
    text_put(&c->arguments, "}");
    return true;
}

/* NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value> ... */
static bool read_key_call(struct message *m, const struct message_input *in, struct part p)
{
    static const char key[] = "<arg_key>", key_end[] = "</arg_key>", value[] = "<arg_value>",
                      value_end[] = "</arg_value>";
    const char *at = find(p, key);
    const struct part name = trimmed(part_of(p.at, at ? at : p.end));
    if (name.at == name.end || find(name, "\n") || find(name, " ")) return false;
    struct message_call *c = add_call(m);
    put(&c->name, name);
    text_put(&c->arguments, "{");
    while (at) {
        const char *k = find(part_of(at, p.end), key_end), *v = k ? find(part_of(k, p.end), value) : NULL;
        const char *end = v ? find(part_of(v, p.end), value_end) : NULL;
        if (!end) break;
        put_argument(&c->arguments, in, name, trimmed(part_of(at + sizeof(key) - 1, k)),
                     part_of(v + sizeof(value) - 1, end));
        at = find(part_of(end, p.end), key);
    }
    text_put(&c->arguments, "}");
    return true;
}

/* Reads a tag from its name's first character on: NAME"...>. *name: NAME; *after: what follows >. False: p is something
 * else. */
static bool read_tag(struct part *name, bool *string, const char **after, struct part p)
{
    const char *close = find(p, ">"), *quote = find(p, "\"");
    if (!close || !quote || quote > close) return false;
    *string = find(part_of(quote, close), "string=\"true\"") != NULL;
    *after = close + 1;
    *name = part_of(p.at, quote);
    return true;
}

/* Reads calls of this form; with INVOKE, without DSML and string:
 * <DSML invoke name="NAME"><DSML parameter name="KEY" string="true|false">VALUE</DSML parameter>..</DSML invoke>.. */
static bool read_dsml_calls(struct message *m, const struct message_input *in, struct part p)
{
    const bool dsml = in->rules.calls == MESSAGE_DSML;
    const char *const invoke = dsml ? "<" DSML "invoke name=\"" : "<invoke name=\"",
                      *const invoke_end = dsml ? "</" DSML "invoke>" : "</invoke>",
                      *const parameter = dsml ? "<" DSML "parameter name=\"" : "<parameter name=\"",
                      *const parameter_end = dsml ? "</" DSML "parameter>" : "</parameter>";
    bool string, any = false;
    struct part name, key;
    struct err err;
    for (const char *at; (at = find(p, invoke)); any = true) {
        const char *end = find(part_of(at, p.end), invoke_end), *body;
        if (!end || !read_tag(&name, &string, &body, part_of(at + strlen(invoke), end))) break;
        struct message_call *c = add_call(m);
        put(&c->name, name);
        text_put(&c->arguments, "{");
        for (const char *k; (k = find(part_of(body, end), parameter));) {
            const char *value, *value_end = find(part_of(k, end), parameter_end);
            if (!value_end || !read_tag(&key, &string, &value, part_of(k + strlen(parameter), value_end))) break;
            const struct part v = part_of(value, value_end);
            if (dsml)
                put_value(&c->arguments, key, v,
                          string ? NULL : json_parse_row(v.at, v.end - v.at, JSON_ROW_VALUES, "argument", &err));
            else
                put_argument(&c->arguments, in, name, key, v);
            body = value_end + strlen(parameter_end);
        }
        text_put(&c->arguments, "}");
        p.at = end + strlen(invoke_end);
    }
    return any;
}

/* Appends a quoted text as a JSON string and returns what follows it; NULL: the quotation has no end. Gemma-4's
 * quotation mark is <|"|>. */
static const char *put_quotation(struct text_buf *to, struct part p)
{
    static const char mark[] = "<|\"|>";
    struct text_buf plain = {0};
    const char *at = p.at + 1;
    if (*p.at == '<') {
        if (!begins(p, mark)) return NULL;
        p.at += sizeof(mark) - 1;
        at = find(p, mark);
        if (!at) return NULL;
        text_put_quoted(to, p.at, at - p.at);
        return at + sizeof(mark) - 1;
    }
    for (; at < p.end && *at != *p.at; at++) {
        char c = *at;
        if (c == '\\' && at + 1 < p.end) {
            c = *++at;
            c = (char)(c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c);
        }
        text_put_bytes(&plain, &c, 1);
    }
    text_put_quoted(to, plain.size ? plain.text : "", plain.size);
    text_free(&plain);
    return at < p.end ? at + 1 : NULL;
}

static bool in_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || (c && strchr("_.+-", c));
}

/* Appends a name or a number: as a key if : or = follows, otherwise as a value. Returns what follows. */
static const char *put_word(struct text_buf *to, struct part p)
{
    static const char *const values[][2] = {{"True", "true"}, {"False", "false"}, {"None", "null"}};
    struct part word = part_of(p.at, p.at);
    while (word.end < p.end && in_word(*word.end)) word.end++;
    const char *next = word.end;
    while (next < p.end && text_is_space(*next)) next++;
    if (next < p.end && (*next == ':' || *next == '=')) {
        text_put_quoted(to, word.at, word.end - word.at);
        text_put(to, ":");
        return next + 1;
    }
    for (int i = 0; i < MT_LEN(values); i++)
        if ((size_t)(word.end - word.at) == strlen(values[i][0]) && begins(word, values[i][0])) {
            text_put(to, values[i][1]);
            return word.end;
        }
    put(to, word);
    return word.end;
}

/* Reads the members up to the bracket `stop`, in the syntax of Python or of Gemma-4, as the call's arguments. Returns
 * what follows the bracket; NULL: p has another syntax. */
static const char *read_members(struct message *m, struct part name, struct part p, char stop)
{
    struct text_buf text = {0};
    struct err err;
    int depth = 0;
    text_put(&text, "{");
    while (p.at && p.at < p.end && (depth || *p.at != stop)) {
        const char c = *p.at;
        if (c == '\'' || c == '"' || c == '<') {
            p.at = put_quotation(&text, p);
        } else if (in_word(c)) {
            p.at = put_word(&text, p);
        } else {
            depth += (c == '{' || c == '[') - (c == '}' || c == ']');
            text_put_bytes(&text, p.at++, 1);
        }
    }
    text_put(&text, "}");
    const bool ended = p.at && p.at < p.end;
    struct json_doc *doc = ended ? json_parse_row(text.text, text.size, JSON_ROW_VALUES, "call", &err) : NULL;
    if (doc) {
        struct message_call *c = add_call(m);
        put(&c->name, name);
        if (text_put_json(&c->arguments, json_root(doc), &err)) text_put(&c->arguments, "{}");
    }
    text_free(&text);
    json_free(doc);
    return doc ? p.at + 1 : NULL;
}

/* call:NAME{KEY:VALUE,..} */
static bool read_gemma_call(struct message *m, struct part p)
{
    static const char call[] = "call:";
    const char *body = find(p, "{");
    if (!begins(p, call) || !body) return false;
    return read_members(m, trimmed(part_of(p.at + sizeof(call) - 1, body)), part_of(body + 1, p.end), '}') != NULL;
}

/* [NAME(KEY=VALUE, ..), ..] */
static bool read_python_calls(struct message *m, struct part p)
{
    const int64_t before = m->n_call;
    if (!begins(p, "[")) return false;
    p = trimmed(part_of(p.at + 1, p.end));
    while (p.at < p.end && *p.at != ']') {
        const char *body = find(p, "(");
        p.at = body ? read_members(m, trimmed(part_of(p.at, body)), part_of(body + 1, p.end), ')') : NULL;
        if (!p.at) {
            m->n_call = before;
            return false;
        }
        p = trimmed(p);
        if (p.at < p.end && *p.at == ',') p = trimmed(part_of(p.at + 1, p.end));
    }
    return m->n_call > before;
}

static bool read_call(struct message *m, const struct message_input *in, struct part p)
{
    p = trimmed(p);
    switch (in->rules.calls) {
    case MESSAGE_JSON: return read_json_call(m, p);
    case MESSAGE_XML: return read_xml_call(m, in, p);
    case MESSAGE_ARG_KEY: return read_key_call(m, in, p);
    case MESSAGE_DSML:
    case MESSAGE_INVOKE: return read_dsml_calls(m, in, p);
    case MESSAGE_PYTHON: return read_python_calls(m, p);
    case MESSAGE_GEMMA: return read_gemma_call(m, p);
    case MESSAGE_PLAIN:
    case MESSAGE_HARMONY: break;
    }
    return false;
}

/* ---- <think> and enclosed calls ---- */

/* Reasoning at the start; returns what follows. */
static struct part take_reasoning(struct message *m, const struct message_input *in, struct part p)
{
    const bool gemma = in->rules.calls == MESSAGE_GEMMA;
    const char *const open = gemma ? "<|channel>thought\n" : "<think>", *const close =
                                                                            gemma ? "<channel|>" : "</think>";
    struct part text = p;
    while (text.at < text.end && text_is_space(*text.at)) text.at++;
    const bool opened = begins(text, open);
    if (!opened && !in->think_open) { /* a mark may still begin */
        if (!in->whole && text.end - text.at < (int64_t)strlen(open) && without_begun(text, open) == text.at)
            p.at = p.end;
        return p;
    }
    if (opened) text.at += strlen(open);
    const char *end = find(text, close);
    struct part reasoning = part_of(text.at, end ? end : in->whole ? text.end : without_begun(text, close));
    put(&m->reasoning, trimmed(reasoning));
    if (!end) return part_of(p.end, p.end);
    text.at = end + strlen(close);
    while (text.at < text.end && text_is_space(*text.at)) text.at++;
    return text;
}

static void parse_marked(struct message *m, const struct message_input *in, struct part p)
{
    const bool calls = in->wants_calls && in->rules.calls != MESSAGE_PLAIN;
    const char *const open = calls ? marks[in->rules.calls].open : "", *const close =
                                                                           calls ? marks[in->rules.calls].close : "";
    const char *at;
    if (in->rules.think) p = take_reasoning(m, in, p);
    while (calls && (at = find(p, open))) {
        const char *body = at + strlen(open), *end = find(part_of(body, p.end), close);
        struct part before = part_of(p.at, at);
        if (!end && !in->whole) {
            p.end = at; /* its end is not there yet */
            break;
        }
        while (before.end > before.at && text_is_space(before.end[-1])) before.end--;
        if (!read_call(m, in, part_of(body, end ? end : p.end))) break; /* not a call: content */
        put(&m->content, before);
        p.at = end ? end + strlen(close) : p.end;
        while (p.at < p.end && text_is_space(*p.at)) p.at++;
    }
    if (calls && !in->whole) p.end = without_begun(p, open);
    while (calls && !in->whole && p.end > p.at && text_is_space(p.end[-1])) p.end--; /* a call may follow */
    put(&m->content, p);
}

/* ---- harmony ---- */

static bool is_word(struct part p, const char *word)
{
    return (size_t)(p.end - p.at) == strlen(word) && !memcmp(p.at, word, strlen(word));
}

/* The word after a mark in a header, up to a blank or another mark. */
static struct part word_after(struct part header, const char *mark)
{
    const char *at = find(header, mark);
    if (!at) return part_of(header.end, header.end);
    struct part word = part_of(at + strlen(mark), at + strlen(mark));
    while (word.end < header.end && !text_is_space(*word.end) && *word.end != '<') word.end++;
    return word;
}

static void put_paragraph(struct text_buf *to, struct part p)
{
    if (to->size && p.at < p.end) text_put(to, "\n");
    put(to, p);
}

/* A message of a channel; `open`: its end is not there yet. */
static void take_channel(struct message *m, const struct message_input *in, struct part header, struct part body,
                         bool open)
{
    static const char functions[] = "functions.";
    const struct part channel = word_after(header, "<|channel|>");
    struct part to = word_after(header, "to=");
    if (begins(to, functions)) to.at += sizeof(functions) - 1;
    if (to.at < to.end && in->wants_calls) {
        if (open && !in->whole) return;
        struct message_call *c = add_call(m);
        put(&c->name, to);
        put(&c->arguments, trimmed(body));
        return;
    }
    put_paragraph(is_word(channel, "analysis") ? &m->reasoning : &m->content, body);
}

static void parse_harmony(struct message *m, const struct message_input *in, struct part p)
{
    static const char *const ends[] = {"<|end|>", "<|call|>", "<|return|>", "<|start|>"};
    static const char start[] = "<|start|>", channel[] = "<|channel|>", message[] = "<|message|>";
    if (!begins(p, channel) && !begins(p, start) && !begins(p, " to=")) { /* no header: all is content */
        if (in->whole || (without_begun(p, channel) != p.at && p.end - p.at >= 11)) put(&m->content, p);
        return;
    }
    while (p.at < p.end) {
        const char *body = find(p, message), *end = NULL;
        if (!body) return;
        const struct part header = part_of(p.at, body);
        p.at = body + sizeof(message) - 1;
        const char *least = p.end;
        for (int i = 0; i < MT_LEN(ends); i++) {
            const char *at = find(p, ends[i]);
            if (at && (!end || at < end)) end = at;
            const char *begun = without_begun(p, ends[i]);
            if (!in->whole && begun < least) least = begun;
        }
        take_channel(m, in, header, part_of(p.at, end ? end : least), !end);
        p.at = end ? end : p.end;
        if (begins(p, "<|end|>"))
            p.at += 7;
        else if (begins(p, "<|call|>"))
            p.at += 8;
        else if (begins(p, "<|return|>"))
            p.at += 10;
    }
}

void message_parse(struct message *m, const struct message_input *in, const char *text, int64_t size)
{
    m->content.size = m->reasoning.size = m->n_call = 0;
    text_put(&m->content, "");
    text_put(&m->reasoning, "");
    if (in->rules.calls == MESSAGE_HARMONY)
        parse_harmony(m, in, part_of(text, text + size));
    else
        parse_marked(m, in, part_of(text, text + size));
}

/* ---- the form of an answer ---- */

static bool has_special(const struct tokenizer *tok, struct part p)
{
    struct token_list found = {0};
    tokenizer_specials(tok, p.at, p.end - p.at, &found);
    const bool any = found.count > 0;
    token_list_free(&found);
    return any;
}

/* Neither a mark of the template's form nor a special token. */
static bool is_plain(const struct message_rules *r, const struct tokenizer *tok, const struct text_buf *t)
{
    const char *const all[] = {"<think>",    "</think>",           "<|channel>",
                               "<channel|>", marks[r->calls].open, marks[r->calls].close};
    const struct part p = part_of(t->text, t->text + t->size);
    for (int i = r->think ? 0 : 4; i < (r->calls == MESSAGE_PLAIN ? 4 : MT_LEN(all)); i++)
        if (find(p, all[i])) return false;
    return !has_special(tok, p);
}

/* <|channel|>NAME, before or after it a recipient, then a type (json, or <|constrain|>json). */
static bool reads_header(const struct tokenizer *tok, struct part header, struct part *channel, struct part *to)
{
    static const char mark[] = "<|channel|>", constrain[] = "<|constrain|>";
    const char *at = find(header, mark);
    if (!at || (at > header.at && !begins(header, " to="))) return false;
    struct part rest = part_of(at + sizeof(mark) - 1, header.end);
    *channel = word_after(header, mark);
    *to = word_after(header, "to=");
    const char *type = find(rest, constrain);
    return !has_special(tok, part_of(header.at, at)) && !has_special(tok, part_of(rest.at, type ? type : rest.end)) &&
           !(type && has_special(tok, part_of(type + sizeof(constrain) - 1, rest.end))) &&
           (is_word(*channel, "analysis") || is_word(*channel, "commentary") || is_word(*channel, "final"));
}

static bool is_object(struct part p)
{
    struct err err;
    struct json_doc *doc = json_parse_row(p.at, p.end - p.at, JSON_ROW_VALUES, "call", &err);
    const bool yes = doc && json_type(json_root(doc)) == JSON_OBJECT;
    json_free(doc);
    return yes;
}

static bool is_harmony(const struct tokenizer *tok, struct part p)
{
    static const char message[] = "<|message|>", end[] = "<|end|>", next[] = "<|start|>assistant";
    for (;;) {
        struct part channel, to;
        const char *body = find(p, message);
        if (!body || !reads_header(tok, part_of(p.at, body), &channel, &to)) return false;
        body += sizeof(message) - 1;
        const char *close = find(part_of(body, p.end), end);
        const struct part text = trimmed(part_of(body, close ? close : p.end));
        const bool final = is_word(channel, "final"), call = to.at < to.end;
        if (has_special(tok, text) || (final && call)) return false;
        if (!close) return final ? text.at < text.end : call && is_object(text);
        p.at = close + sizeof(end) - 1;
        if (final || call || !begins(p, next)) return false;
        p.at += sizeof(next) - 1;
    }
}

static int64_t count(struct part p, const char *mark)
{
    int64_t n = 0;
    for (const char *at; (at = find(p, mark)); p.at = at + strlen(mark)) n++;
    return n;
}

bool message_is_formed(const struct message_input *in, const struct tokenizer *tok, const char *text, int64_t size)
{
    struct message_input all = *in;
    struct message m = {.n_call = 0};
    all.whole = all.wants_calls = true;
    const struct part p = part_of(text, text + size);
    if (in->rules.calls == MESSAGE_HARMONY) return is_harmony(tok, p);
    message_parse(&m, &all, text, size);
    const bool closed = !m.n_call || count(p, marks[in->rules.calls].open) == count(p, marks[in->rules.calls].close);
    const bool formed = closed && is_plain(&in->rules, tok, &m.content) && is_plain(&in->rules, tok, &m.reasoning) &&
                        (m.n_call || !text_is_blank(m.content.text, m.content.size));
    message_free(&m);
    return formed;
}

void message_free(struct message *m)
{
    for (int64_t i = 0; i < m->cap_call; i++) {
        text_free(&m->calls[i].name);
        text_free(&m->calls[i].arguments);
    }
    mem_free(m->calls);
    text_free(&m->content);
    text_free(&m->reasoning);
    *m = (struct message){.n_call = 0};
}
