/* chat_row.c - rewrites a conversation for its chat template. */
#include "data/chat/chat_row.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

struct writer {
    struct text_buf *t;
    const struct chat_row_options *opt;
    struct chat_row_counts *counts;
    struct json messages;
};

/* ---- keys that say loss ---- */

/* Whether a word of the key is one of these; words as in "loss_mask" or "isMasked". */
static bool says_loss(const char *key)
{
    static const char *const words[] = {"loss",   "losses",   "mask",    "masks",
                                        "masked", "unmasked", "masking", "trainable"};
    char word[16];
    for (size_t n = 0;; key++) {
        const bool letter = isalpha((unsigned char)*key);
        if (n && (!letter || (isupper((unsigned char)*key) && islower((unsigned char)key[-1])))) {
            word[MT_MIN(n, sizeof(word) - 1)] = 0;
            if (str_in(word, words, MT_LEN(words))) return true;
            n = 0;
        }
        if (!*key) return false;
        if (letter && n + 1 < sizeof(word)) word[n] = (char)tolower((unsigned char)*key);
        n += letter;
    }
}

int chat_row_check_loss(struct json object, bool message, struct err *err)
{
    static const char *const known[] = {"train", "training", "train_detail", "loss", "loss_weight", "loss_scale"};
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(object, i, &key, &value); i++) {
        if (message && str_in(key, known, MT_LEN(known))) continue;
        if (!says_loss(key) && !(message && !strncmp(key, "train", 5))) continue;
        if (json_type(value) == JSON_NULL || !strcmp(key, "attention_mask")) continue;
        return json_error(object, err,
                          "has `%.60s`, which seems to say which tokens carry loss, but moetrain does not know this "
                          "key: write `train` (true or false) in a message, or remove the key",
                          key);
    }
    return 0;
}

/* ---- values ---- */

static int put_without_nulls(struct writer *w, struct json value, struct err *err)
{
    const char *key;
    struct json member;
    const bool array = json_type(value) == JSON_ARRAY;
    if (!array && json_type(value) != JSON_OBJECT) return text_put_json(w->t, value, err);
    text_put(w->t, array ? "[" : "{");
    for (int64_t i = 0; json_item(value, i, &key, &member); i++) {
        const bool null = key && json_type(member) == JSON_NULL;
        w->counts->nulls += null;
        if (null) continue;
        text_put_key(w->t, key);
        if (put_without_nulls(w, member, err)) return -1;
    }
    text_put(w->t, array ? "]" : "}");
    return 0;
}

/* ---- calls ---- */

enum kind { GOOD, EMPTY, BAD }; /* of a call's arguments; EMPTY: no value */

static enum kind arguments_kind(struct json arguments)
{
    const char *s;
    int64_t size;
    struct err why;
    if (!json_given(arguments)) return EMPTY;
    if (json_type(arguments) == JSON_OBJECT) return GOOD;
    if (json_str(arguments, &s, &size, NULL)) return BAD;
    if (text_is_blank(s, size)) return EMPTY;
    struct json_doc *doc = json_parse(s, size, "arguments", &why);
    const enum json_type type = doc ? json_type(json_root(doc)) : JSON_ABSENT;
    json_free(doc);
    return type == JSON_OBJECT ? GOOD : type == JSON_NULL ? EMPTY : BAD;
}

/* Whether the arguments are a string, the JSON of an object, while the template takes objects. */
static bool is_object_text(const struct chat_rules *rules, struct json arguments)
{
    return rules->arguments == CHAT_ARGUMENTS_OBJECT && json_type(arguments) == JSON_STRING;
}

static bool call_is_plain(const struct chat_rules *rules, struct json call)
{
    const struct json function = json_find(call, "function");
    return json_type(json_find(function, "name")) == JSON_STRING && (!rules->call_type || json_has(call, "type")) &&
           arguments_kind(json_find(function, "arguments")) == GOOD &&
           !is_object_text(rules, json_find(function, "arguments"));
}

static bool calls_are_plain(const struct chat_rules *rules, struct json calls)
{
    bool plain = json_type(calls) == JSON_ARRAY && json_count(calls);
    for (int64_t i = 0; plain && i < json_count(calls); i++) plain = call_is_plain(rules, json_at(calls, i));
    return plain;
}

/* Whether a value of `tool_calls` or `function_call` has a call, or something else that becomes an error. False: null,
 * empty lists, blank text. */
static bool has_calls(struct json calls)
{
    const char *s;
    int64_t size;
    struct err why;
    if (json_type(calls) == JSON_ARRAY) {
        for (int64_t i = 0; i < json_count(calls); i++)
            if (!json_given(json_at(calls, i)) || has_calls(json_at(calls, i))) return true;
        return false;
    }
    if (json_str(calls, &s, &size, NULL)) return json_truthy(calls);
    if (text_is_blank(s, size)) return false;
    struct json_doc *doc = json_parse(s, size, "calls", &why);
    const bool has = !doc || has_calls(json_root(doc));
    json_free(doc);
    return has;
}

static int put_function(struct writer *w, struct json function, struct err *err)
{
    const char *key, *name, *text;
    int64_t size;
    struct json value, arguments = json_find(function, "arguments");
    if (json_get_str(function, "name", &name, err)) return -1;
    if (!json_given(arguments)) arguments = json_find(function, "parameters"); /* as ms-swift reads calls */
    const enum kind kind = arguments_kind(arguments);
    if (kind == BAD)
        return json_error(arguments, err,
                          "the arguments of a call must be an object, or the JSON of an object as a "
                          "string");
    text_put(w->t, "{");
    for (int64_t i = 0; json_member(function, i, &key, &value); i++) {
        if (json_type(value) == JSON_NULL || !strcmp(key, "arguments") || value.node == arguments.node) continue;
        if (!strcmp(key, "id") || !strcmp(key, "type")) continue; /* of the call */
        text_put_key(w->t, key);
        if (text_put_json(w->t, value, err)) return -1;
    }
    text_put_key(w->t, "arguments");
    if (kind == EMPTY) text_put(w->t, "{}");
    if (kind == GOOD && is_object_text(w->opt->rules, arguments)) {
        if (json_str(arguments, &text, &size, err)) return -1;
        text_put_bytes(w->t, text, size);
    } else if (kind == GOOD && put_without_nulls(w, arguments, err)) {
        return -1;
    }
    text_put(w->t, "}");
    return 0;
}

/* Writes one of `tool_calls`. A call without `function` is the function itself: {name, arguments}. */
static int put_call(struct writer *w, struct json call, struct err *err)
{
    const struct json of = json_find(call, "function"), function = json_truthy(of) ? of : call;
    const bool bare = function.node == call.node;
    const char *key;
    struct json value;
    text_put_comma(w->t);
    text_put(w->t, "{");
    if ((bare || w->opt->rules->call_type) && !json_given(json_find(call, "type")))
        text_put(w->t, "\"type\": \"function\"");
    for (int64_t i = 0; json_member(call, i, &key, &value); i++) {
        if (json_type(value) == JSON_NULL || (bare && strcmp(key, "id") && strcmp(key, "type"))) continue;
        text_put_key(w->t, key);
        if (strcmp(key, "function") ? text_put_json(w->t, value, err) : put_function(w, value, err)) return -1;
    }
    if (bare) text_put_key(w->t, "function");
    if (bare && put_function(w, function, err)) return -1;
    text_put(w->t, "}");
    return 0;
}

/* Writes a call, a list of calls, or JSON text of these. */
static int put_call_list(struct writer *w, struct json calls, struct err *err)
{
    const char *s;
    int64_t size;
    struct json_doc *doc;
    struct err why;
    if (json_type(calls) == JSON_OBJECT) return put_call(w, calls, err);
    if (json_type(calls) == JSON_ARRAY) {
        for (int64_t i = 0; i < json_count(calls); i++)
            if (put_call_list(w, json_at(calls, i), err)) return -1;
        return 0;
    }
    if (json_str(calls, &s, &size, NULL) || !(doc = json_parse(s, size, "calls", &why)))
        return json_error(calls, err,
                          "is not JSON of a call, {\"name\": ..., \"arguments\": ...}, or of a list of calls");
    const enum json_type type = json_type(json_root(doc));
    int rc = type == JSON_OBJECT || type == JSON_ARRAY ? put_call_list(w, json_root(doc), &why)
                                                       : json_error(calls, &why, "is not JSON of a call");
    json_free(doc);
    return rc ? json_error(calls, err, "%s", why.msg) : 0;
}

/* ---- messages ---- */

static const struct chat_alias *call_alias(const struct writer *w, struct json message)
{
    const char *role;
    if (json_get_str(message, "role", &role, NULL)) return NULL;
    const struct chat_alias *alias = chat_rules_alias(role);
    return alias && alias->call && strcmp(chat_rules_role(w->opt->rules, role), role) ? alias : NULL;
}

static bool is_media(struct json part)
{
    static const char *const words[] = {"image", "video", "audio", "input_image", "input_audio"};
    const char *type;
    for (int64_t i = 0; i < MT_LEN(words); i++) {
        if (!json_get_str(part, "type", &type, NULL) ? !strncmp(type, words[i], strlen(words[i]))
                                                     : json_truthy(json_find(part, words[i])))
            return true;
    }
    return false;
}

static bool flattens(const struct chat_rules *rules, const char *role, struct json content)
{
    if (json_type(content) != JSON_ARRAY) return false;
    const int64_t r = chat_rules_role_index(role);
    bool flags = false, media = false, typed = true; /* flags: a part that switches its loss */
    for (int64_t i = 0; i < json_count(content); i++) {
        const struct json part = json_at(content, i);
        flags = flags || json_has(part, "train") || json_has(part, "weight");
        media = media || is_media(part);
        typed = typed && json_has(part, "type") && !json_has(part, "value"); /* LLaMA-Factory's key for `text` */
    }
    if (!typed && !media && !strcmp(role, "tool")) return false; /* a result that is a list */
    return r == CHAT_ROLES || !rules->takes_parts[r] || flags || media || !typed;
}

/* The text of a part; 0: it has none. */
static bool part_text(struct json part, const char **s, int64_t *size)
{
    const char *type;
    if (json_type(part) == JSON_STRING) return !json_str(part, s, size, NULL);
    if (!json_get_str(part, "type", &type, NULL) && strcmp(type, "text")) return false;
    return !json_str(json_find(part, "text"), s, size, NULL) || !json_str(json_find(part, "value"), s, size, NULL);
}

static int64_t characters(const char *s, int64_t size)
{
    int64_t n = 0;
    for (int64_t i = 0; i < size; i++) n += (s[i] & 0xc0) != 0x80;
    return n;
}

/* Writes `train_detail` of the joined text, as axolotl makes it of parts with `train` or `weight`. */
static int put_part_details(struct writer *w, struct json parts, struct err *err)
{
    int64_t at = 0, size;
    const char *s;
    bool any = false, train;
    double weight;
    char number[96];
    struct text_buf details = {0};
    text_put(&details, "[");
    for (int64_t i = 0; i < json_count(parts); i++) {
        const struct json part = json_at(parts, i);
        if (!part_text(part, &s, &size) || !size) continue;
        train = true, weight = 1;
        if (json_opt_f64(part, "weight", &weight, err) || json_opt_bool(part, "train", &train, err)) goto fail;
        any = any || json_given(json_find(part, "train")) || json_given(json_find(part, "weight"));
        if (!json_given(json_find(part, "train"))) train = weight != 0;
        snprintf(number, sizeof(number), "%s{\"begin_offset\": %lld, \"end_offset\": %lld, \"train\": %s}",
                 details.size > 1 ? ", " : "", (long long)at, (long long)(at + characters(s, size) - 1),
                 train ? "true" : "false");
        text_put(&details, number);
        at += characters(s, size);
    }
    if (any) {
        text_put_key(w->t, "train_detail");
        text_put_bytes(w->t, details.text, details.size);
        text_put(w->t, "]");
    }
    text_free(&details);
    return 0;
fail:
    text_free(&details);
    return -1;
}

static int put_flat(struct writer *w, struct json parts, struct err *err)
{
    struct text_buf joined = {0};
    const char *s, *type;
    int64_t size;
    text_put(&joined, "");
    for (int64_t i = 0; i < json_count(parts); i++) {
        const struct json part = json_at(parts, i);
        if (part_text(part, &s, &size)) {
            text_put_bytes(&joined, s, size);
            continue;
        }
        w->counts->lost++;
        if (w->opt->lossy) continue;
        text_free(&joined);
        if (json_get_str(part, "type", &type, NULL)) type = "?";
        if (is_media(part))
            return json_error(
                part, err,
                "is a part of type \"%.40s\": images, audio and video are not trained; data.dropped = warn "
                "leaves such parts out",
                type);
        return json_error(part, err,
                          "is a part of type \"%.40s\", and the chat template takes only text here: write text parts, "
                          "and reasoning as `reasoning_content`; data.dropped = warn leaves such parts out",
                          type);
    }
    text_put_key(w->t, "content");
    text_put_quoted(w->t, joined.text, joined.size);
    text_free(&joined);
    return put_part_details(w, parts, err);
}

/* The content to write for an answer that is a call: null or "" if the template needs it; NULL: the content
 * unchanged. */
static const char *call_content(const struct writer *w, struct json content)
{
    const struct chat_rules *rules = w->opt->rules;
    const char *s;
    int64_t size = 1;
    const bool none = !json_given(content);
    if (!none && (json_str(content, &s, &size, NULL) || size)) return NULL;
    if (none && !rules->null_content) return "\"\"";
    if (!none && !rules->no_content && rules->null_content) return "null";
    return NULL;
}

/* A message that only has a role, apart from null members. */
static bool says_nothing(struct json message)
{
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(message, i, &key, &value); i++)
        if (strcmp(key, "role") && json_type(value) != JSON_NULL) return false;
    return true;
}

static bool is_number(struct json j) { return json_type(j) == JSON_INT || json_type(j) == JSON_REAL; }

static bool takes_number(const struct writer *w, const char *role)
{
    const int64_t r = chat_rules_role_index(role);
    return r < CHAT_ROLES && w->opt->rules->takes_number[r];
}

static int put_content(struct writer *w, const char *role, struct json message, bool calls, struct err *err)
{
    const struct json content = json_find(message, "content");
    const char *other = calls ? call_content(w, content) : NULL;
    if (flattens(w->opt->rules, role, content)) return put_flat(w, content, err);
    const bool tool = !strcmp(role, "tool"), null = tool && w->opt->rules->null_result;
    if (!other && !json_given(content) && !calls && (tool || !strcmp(role, "assistant")))
        other = null && json_type(content) == JSON_NULL ? "null" : "\"\"";
    if (!other && says_nothing(message)) return json_error(message, err, "has no content");
    if (!other && json_type(content) == JSON_ABSENT) return 0;
    text_put_key(w->t, "content");
    if (other) text_put(w->t, other);
    if (other) return 0;
    if (is_number(content) && !takes_number(w, role)) {
        text_put(w->t, "\"");
        if (text_put_number(w->t, content, err)) return -1;
        text_put(w->t, "\"");
        return 0;
    }
    if (json_type(content) == JSON_ARRAY && !tool) return put_without_nulls(w, content, err);
    return text_put_json(w->t, content, err);
}

static bool same_value(struct json a, struct json b, const char *key)
{
    struct text_buf x = {0}, y = {0};
    struct err why;
    a = json_find(a, key), b = json_find(b, key);
    bool same = !json_given(a) && !json_given(b);
    if (!same && json_given(a) && json_given(b) && !text_put_json(&x, a, &why) && !text_put_json(&y, b, &why))
        same = x.size == y.size && !memcmp(x.text, y.text, (size_t)x.size);
    text_free(&x);
    text_free(&y);
    return same;
}

/* Whether message i is a call that may join the message `first`: their other keys, such as `loss`, have equal
 * values. */
static bool joins(const struct writer *w, struct json first, int64_t i)
{
    const struct json message = json_at(w->messages, i);
    const char *key;
    struct json value;
    if (!w->opt->rules->parallel || !call_alias(w, message)) return false;
    for (int64_t k = 0; json_member(message, k, &key, &value); k++)
        if (strcmp(key, "role") && strcmp(key, "content") && !same_value(first, message, key)) return false;
    return true;
}

/* Writes the calls of message *i. If the template writes several calls of a message, also writes those of the following
 * messages that are only a call, and moves *i to the last of these. */
static int put_calls(struct writer *w, int64_t *i, struct err *err)
{
    const struct json message = json_at(w->messages, *i);
    const struct json calls = json_find(message, "tool_calls"), call = json_find(message, "function_call");
    const bool alias = call_alias(w, message), function = has_calls(call) && !w->opt->rules->function_call;
    const bool takes = joins(w, message, *i + 1), given = has_calls(calls);
    if (!given && !alias && !function && !takes) return 0;
    text_put_key(w->t, "tool_calls");
    text_put(w->t, "[");
    if (given && put_call_list(w, calls, err)) return -1;
    if (function && put_call_list(w, call, err)) return -1;
    if (alias && put_call_list(w, json_find(message, "content"), err)) return -1;
    for (; joins(w, message, *i + 1); ++*i)
        if (put_call_list(w, json_find(json_at(w->messages, *i + 1), "content"), err)) return -1;
    text_put(w->t, "]");
    return 0;
}

/* Writes message *i and moves *i to the last message whose calls it includes (put_calls). */
static int put_message(struct writer *w, int64_t *i, struct err *err)
{
    const struct json message = json_at(w->messages, *i);
    const bool alias = call_alias(w, message);
    const char *key, *role, *own;
    struct json value;
    if (json_get_str(message, "role", &own, err)) return -1;
    role = chat_rules_role(w->opt->rules, own);
    const bool answer = !strcmp(role, "assistant");
    const bool calls = alias || has_calls(json_find(message, "tool_calls")) ||
                       has_calls(json_find(message, "function_call")) || (answer && joins(w, message, *i + 1));
    text_put_comma(w->t);
    text_put(w->t, "{");
    text_put_key(w->t, "role");
    text_put_string(w->t, role);
    if (alias) {
        text_put_key(w->t, "content");
        text_put(w->t, w->opt->rules->null_content && !w->opt->rules->no_content ? "null" : "\"\"");
    } else if (put_content(w, role, message, calls, err)) {
        return -1;
    }
    for (int64_t k = 0; json_member(message, k, &key, &value); k++) {
        static const char *const written[] = {"role", "content", "tool_calls"};
        if (json_type(value) == JSON_NULL || (answer && str_in(key, written, MT_LEN(written))) ||
            (!answer && str_in(key, written, 2)) || (!strcmp(key, "tool_calls") && !has_calls(value)) ||
            (answer && !strcmp(key, "function_call") && !w->opt->rules->function_call))
            continue;
        text_put_key(w->t, key);
        if (text_put_json(w->t, value, err)) return -1;
    }
    if (answer && put_calls(w, i, err)) return -1;
    text_put(w->t, "}");
    return 0;
}

/* ---- tools ---- */

/* Whether a tool is {name, ...} while the template needs {type, function}. */
static bool is_bare_tool(const struct chat_rules *rules, struct json tool)
{
    return !rules->bare_tools && json_has(tool, "name") && !json_truthy(json_find(tool, "function"));
}

/* Writes a tool, or its JSON as text, or a list of tools. */
static int put_tools(struct writer *w, struct json tools, struct err *err)
{
    const char *s;
    int64_t size;
    struct err why;
    if (json_type(tools) == JSON_OBJECT) {
        const bool wraps = is_bare_tool(w->opt->rules, tools);
        text_put_comma(w->t);
        if (wraps) text_put(w->t, "{\"type\": \"function\", \"function\": ");
        if (put_without_nulls(w, tools, err)) return -1;
        if (wraps) text_put(w->t, "}");
        return 0;
    }
    if (json_type(tools) == JSON_STRING) {
        if (json_str(tools, &s, &size, err)) return -1;
        if (!size) return 0;
        struct json_doc *doc = json_parse(s, size, "tools", &why);
        const enum json_type type = doc ? json_type(json_root(doc)) : JSON_ABSENT;
        int rc = type == JSON_NULL ? 0
                 : type == JSON_OBJECT || type == JSON_ARRAY
                     ? put_tools(w, json_root(doc), &why)
                     : json_error(tools, &why, "is a string that is not valid JSON of a tool or of a list of tools");
        json_free(doc);
        return rc ? err_set(err, "%s", why.msg) : 0;
    }
    if (json_type(tools) != JSON_ARRAY) return json_error(tools, err, "must be a list of tools, a tool, or its JSON");
    for (int64_t i = 0; i < json_count(tools); i++)
        if (put_tools(w, json_at(tools, i), err)) return -1;
    return 0;
}

static bool tools_are_plain(const struct chat_rules *rules, struct json tools)
{
    if (!json_given(tools)) return true;
    if (json_type(tools) != JSON_ARRAY || json_has_null(tools)) return false;
    for (int64_t i = 0; i < json_count(tools); i++)
        if (json_type(json_at(tools, i)) != JSON_OBJECT || is_bare_tool(rules, json_at(tools, i))) return false;
    return true;
}

/* ---- the row ---- */

/* Whether the template takes the message as it is. */
static bool is_plain(const struct writer *w, struct json message)
{
    const char *role, *key;
    struct json value, content = {0};
    bool calls = false;
    if (json_get_str(message, "role", &role, NULL)) return false;
    if (chat_rules_role(w->opt->rules, role) != role) return false;
    for (int64_t i = 0; json_member(message, i, &key, &value); i++) {
        if (!strcmp(key, "content")) content = value;
        if (!strcmp(key, "function_call") && !w->opt->rules->function_call) return false;
        if (strcmp(key, "tool_calls")) continue;
        calls = true;
        if (!calls_are_plain(w->opt->rules, value)) return false;
    }
    if (calls && call_content(w, content)) return false;
    if (is_number(content)) return takes_number(w, role);
    if (json_type(content) == JSON_ARRAY) return !flattens(w->opt->rules, role, content);
    return json_type(content) == JSON_STRING;
}

int chat_row_rewrite(struct json_doc **doc, struct chat_row_counts *counts, struct json row,
                     const struct chat_row_options *opt, struct err *err)
{
    static const char *const kept[] = {"documents", "chat_template_kwargs"};
    struct text_buf t = {0};
    struct writer w = {.t = &t, .opt = opt, .counts = counts};
    const struct json tools = json_find(row, "tools"), functions = json_find(row, "functions"); /* OpenAI's older key */
    *doc = NULL;
    *counts = (struct chat_row_counts){0};
    if (json_get_array(row, "messages", &w.messages, err)) return -1;
    bool plain = tools_are_plain(opt->rules, tools) && !json_truthy(functions) && !json_has_null(w.messages);
    for (int64_t i = 0; i < json_count(w.messages); i++) {
        if (chat_row_check_loss(json_at(w.messages, i), true, err)) return -1;
        plain = plain && is_plain(&w, json_at(w.messages, i));
    }
    if (plain) return 0;
    int rc = 0;
    text_put(&t, "{\"messages\": [");
    for (int64_t i = 0; !rc && i < json_count(w.messages); i++) rc = put_message(&w, &i, err);
    text_put(&t, "]");
    const int64_t before = t.size;
    if (!rc && (json_given(tools) || json_truthy(functions))) {
        text_put(&t, ", \"tools\": [");
        if (json_given(tools)) rc = put_tools(&w, tools, err);
        if (!rc && json_truthy(functions)) rc = put_tools(&w, functions, err);
        if (t.text[t.size - 1] == '[' && json_type(tools) != JSON_ARRAY)
            t.size = before; /* a text without tools */
        else
            text_put(&t, "]");
    }
    for (int64_t i = 0; !rc && i < MT_LEN(kept); i++) {
        if (!json_given(json_find(row, kept[i]))) continue;
        text_put_key(&t, kept[i]);
        rc = text_put_json(&t, json_find(row, kept[i]), err);
    }
    text_put(&t, "}");
    if (!rc && !(*doc = json_parse(t.text, t.size, json_name(row), err))) rc = -1;
    text_free(&t);
    return rc;
}
