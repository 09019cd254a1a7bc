/* chat_dropped.c - marks the parts of a row, to find those that a chat template omits. */
#define _GNU_SOURCE /* memmem */
#include "data/chat/chat_dropped.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define MARK "zq%lldqz" /* letters and digits, which no template rewrites */

void chat_marks_free(struct chat_marks *m)
{
    text_free(&m->row);
    mem_free(m->items);
    *m = (struct chat_marks){0};
}

static const char *mark_of(struct chat_marks *m, int64_t message, const char *what, char text[32])
{
    m->items = mem_reserve(m->items, &m->cap, m->n + 1, sizeof(*m->items));
    m->items[m->n] = (struct chat_mark){message, what, false};
    snprintf(text, 32, MARK, (long long)m->n++);
    return text;
}

/* memmem is fast for needles of up to 256 bytes, which it hashes. */
static const char *find(const struct text_buf *t, int64_t from, const char *s, int64_t size)
{
    const char *at = t->text + from, *end = t->text + t->size;
    const size_t head = (size_t)MT_MIN(size, 256);
    for (; (at = memmem(at, (size_t)(end - at), s, head)); at++)
        if (end - at >= size && !memcmp(at, s, (size_t)size)) return at;
    return NULL;
}

void chat_marks_find(struct chat_marks *m, const struct text_buf *text)
{
    const char *at = text->text, *end = at + text->size;
    while (at < end && (at = memmem(at, (size_t)(end - at), "zq", 2))) {
        int64_t i = 0, digits = 0;
        for (at += 2; at < end && isdigit((unsigned char)*at) && digits < 18; at++, digits++) i = 10 * i + (*at - '0');
        if (digits && end - at >= 2 && at[0] == 'q' && at[1] == 'z' && i < m->n) m->items[i].found = true;
    }
}

/* ---- the copy */

static int put_marked(struct chat_marks *m, struct json string, const char *mark, struct err *err)
{
    if (text_put_json(&m->row, string, err)) return -1;
    m->row.size--;
    text_put(&m->row, mark);
    text_put(&m->row, "\"");
    return 0;
}

static bool is_scalar(struct json j)
{
    return json_type(j) == JSON_INT || json_type(j) == JSON_REAL || json_type(j) == JSON_BOOL;
}

/* Writes a number, true or false as a string, with the mark. */
static int put_scalar(struct chat_marks *m, struct json value, const char *mark, struct err *err)
{
    text_put(&m->row, "\"");
    if (text_put_json(&m->row, value, err)) return -1;
    text_put(&m->row, mark);
    text_put(&m->row, "\"");
    return 0;
}

/* Writes a string or an object with the mark at the end of each string, except values of `type` and `id`. Copies other
 * values. */
static int put_strings(struct chat_marks *m, struct json value, const char *mark, struct err *err)
{
    const char *key;
    struct json member;
    if (json_type(value) == JSON_STRING) return put_marked(m, value, mark, err);
    if (json_type(value) != JSON_OBJECT) return text_put_json(&m->row, value, err);
    text_put(&m->row, "{");
    for (int64_t i = 0; json_member(value, i, &key, &member); i++) {
        text_put_key(&m->row, key);
        const bool fixed = !strcmp(key, "type") || !strcmp(key, "id");
        if (fixed ? text_put_json(&m->row, member, err) : put_strings(m, member, mark, err)) return -1;
    }
    text_put(&m->row, "}");
    return 0;
}

/* Writes a list with a mark in each item; copies a value that is no list. */
static int put_items(struct chat_marks *m, struct json list, int64_t message, const char *what, struct err *err)
{
    char mark[32];
    if (json_type(list) != JSON_ARRAY) return text_put_json(&m->row, list, err);
    text_put(&m->row, "[");
    for (int64_t i = 0; i < json_count(list); i++) {
        const struct json item = json_at(list, i);
        const int64_t at = m->row.size + (i > 0 ? 2 : 0);
        text_put_comma(&m->row);
        if (put_strings(m, item, mark_of(m, message, what, mark), err)) return -1;
        if (!json_has(item, "type") && !strstr(m->row.text + at, mark)) m->n--; /* no text: numbers */
    }
    text_put(&m->row, "]");
    return 0;
}

/* Writes arguments with one more member, which has the mark. */
static int put_arguments(struct chat_marks *m, struct json arguments, const char *mark, struct err *err)
{
    struct text_buf *t = &m->row, inner = {0};
    const char *s;
    int64_t size;
    const bool string = !json_str(arguments, &s, &size, NULL);
    while (string && size && text_is_space(*s)) s++, size--;
    if (string ? !size || *s != '{' : json_type(arguments) != JSON_OBJECT) {
        m->n--; /* nothing to mark */
        return text_put_json(t, arguments, err);
    }
    if (!string && text_put_json(&inner, arguments, err)) return -1;
    if (string) text_put_bytes(&inner, s, size);
    struct text_buf marked = {0};
    int64_t rest = 1;
    while (rest < inner.size && text_is_space(inner.text[rest])) rest++;
    text_put(&marked, "{\"");
    text_put(&marked, mark);
    text_put(&marked, rest < inner.size && inner.text[rest] == '}' ? "\": \"\"" : "\": \"\", ");
    text_put_bytes(&marked, inner.text + rest, inner.size - rest);
    if (string)
        text_put_quoted(t, marked.text, marked.size);
    else
        text_put_bytes(t, marked.text, marked.size);
    text_free(&marked);
    text_free(&inner);
    return 0;
}

/* Writes a call, or the function of a call, with marks in its name and in its arguments. */
static int put_call(struct chat_marks *m, struct json call, int64_t message, const char *what, struct err *err)
{
    const char *key;
    struct json value;
    char mark[32];
    if (json_type(call) != JSON_OBJECT) return text_put_json(&m->row, call, err);
    text_put(&m->row, "{");
    for (int64_t i = 0; json_member(call, i, &key, &value); i++) {
        text_put_key(&m->row, key);
        int rc;
        if (!strcmp(key, "function"))
            rc = put_call(m, value, message, what, err);
        else if (!strcmp(key, "name") && json_type(value) == JSON_STRING)
            rc = put_marked(m, value, mark_of(m, message, what, mark), err);
        else if (!strcmp(key, "arguments"))
            rc = put_arguments(m, value, mark_of(m, message, what, mark), err);
        else
            rc = text_put_json(&m->row, value, err);
        if (rc) return -1;
    }
    text_put(&m->row, "}");
    return 0;
}

static int put_calls(struct chat_marks *m, struct json calls, int64_t message, const char *what, struct err *err)
{
    if (json_type(calls) != JSON_ARRAY) return put_call(m, calls, message, what, err);
    text_put(&m->row, "[");
    for (int64_t i = 0; i < json_count(calls); i++) {
        text_put_comma(&m->row);
        if (put_call(m, json_at(calls, i), message, what, err)) return -1;
    }
    text_put(&m->row, "]");
    return 0;
}

/* Writes a content that is an object, with the mark at the end of its strings or, without strings, in an additional
 * member. */
static int put_content_object(struct chat_marks *m, struct json content, const char *mark, struct err *err)
{
    const int64_t at = m->row.size;
    if (put_strings(m, content, mark, err)) return -1;
    if (strstr(m->row.text + at, mark)) return 0;
    m->row.size = at;
    return put_arguments(m, content, mark, err);
}

static int put_message(struct chat_marks *m, struct json message, int64_t index, struct err *err)
{
    const char *key;
    struct json value;
    char mark[32];
    text_put(&m->row, "{");
    for (int64_t i = 0; json_member(message, i, &key, &value); i++) {
        text_put_key(&m->row, key);
        const bool content = !strcmp(key, "content"), refusal = !strcmp(key, "refusal");
        int rc;
        if (text_is_blank_json(value) && !(content && is_scalar(value)))
            rc = text_put_json(&m->row, value, err);
        else if ((content || refusal) && json_type(value) == JSON_STRING)
            rc = put_marked(m, value, mark_of(m, index, content ? "content" : "refusal", mark), err);
        else if (content && is_scalar(value))
            rc = put_scalar(m, value, mark_of(m, index, "content", mark), err);
        else if (content && json_type(value) == JSON_ARRAY)
            rc = put_items(m, value, index, "a part of `content`", err);
        else if (content && json_type(value) == JSON_OBJECT)
            rc = put_content_object(m, value, mark_of(m, index, "content", mark), err);
        else if (!strcmp(key, "tool_calls"))
            rc = put_calls(m, value, index, "tool_calls", err);
        else if (!strcmp(key, "function_call"))
            rc = put_calls(m, value, index, "function_call", err);
        else
            rc = text_put_json(&m->row, value, err);
        if (rc) return -1;
    }
    text_put(&m->row, "}");
    return 0;
}

int chat_marks_put(struct chat_marks *m, struct json row, int64_t n, struct err *err)
{
    const struct json messages = json_find(row, "messages"), documents = json_find(row, "documents"),
                      kwargs = json_find(row, "chat_template_kwargs"), tools = json_find(row, "tools");
    m->n = m->row.size = 0;
    text_put(&m->row, "{\"messages\": [");
    for (int64_t i = 0; i < json_count(messages); i++) {
        const struct json message = json_at(messages, i);
        text_put_comma(&m->row);
        if (i < n && json_type(message) == JSON_OBJECT ? put_message(m, message, i, err)
                                                       : text_put_json(&m->row, message, err))
            return -1;
    }
    text_put(&m->row, "]");
    if (json_type(tools) != JSON_ABSENT) {
        text_put_key(&m->row, "tools");
        if (put_calls(m, tools, -1, "tools", err)) return -1;
    }
    if (json_type(documents) != JSON_ABSENT) {
        text_put_key(&m->row, "documents");
        if (put_items(m, documents, -1, "documents", err)) return -1;
    }
    if (json_type(kwargs) != JSON_ABSENT) {
        text_put_key(&m->row, "chat_template_kwargs");
        if (text_put_json(&m->row, kwargs, err)) return -1;
    }
    text_put(&m->row, "}");
    return 0;
}

/* ---- rows that need no marks ---- */

/* Adds to the hash: the keys of an object that have values, its role, and the types of the items of lists. */
static uint64_t hash_keys(uint64_t h, struct json object)
{
    const char *key, *text;
    struct json value;
    int64_t size;
    for (int64_t i = 0; json_member(object, i, &key, &value); i++) {
        const enum json_type type = json_type(value);
        if (!json_truthy(value)) continue;
        h = rng_bytes(h, key, (int64_t)strlen(key));
        h = rng_bytes(h, &type, sizeof(type));
        if (!strcmp(key, "role") && !json_str(value, &text, &size, NULL)) h = rng_bytes(h, text, size);
        for (int64_t k = 0; type == JSON_ARRAY && k < MT_MIN(json_count(value), 3); k++) {
            const struct json item = json_at(value, k);
            const enum json_type of = json_type(item);
            h = rng_bytes(h, &of, sizeof(of));
            if (!json_get_str(item, "type", &text, NULL)) h = rng_bytes(h, text, (int64_t)strlen(text));
        }
    }
    return h;
}

void chat_dropped_shapes(uint64_t *shapes, struct json row)
{
    const struct json messages = json_find(row, "messages"), kwargs = json_find(row, "chat_template_kwargs");
    const int64_t n = json_count(messages);
    const bool given[] = {json_truthy(json_find(row, "tools")), json_truthy(json_find(row, "documents"))};
    uint64_t all = rng_bytes(1, given, sizeof(given)), before = 0;
    if (json_truthy(kwargs)) all = hash_keys(all, kwargs);
    if (n) all = hash_keys(all, json_at(messages, n - 1));
    for (int64_t i = 0; i < n; i++) shapes[i] = hash_keys(all, json_at(messages, i));
    for (int64_t i = 0; i < n; i++) {
        const uint64_t own = shapes[i], next = i + 1 < n ? shapes[i + 1] : 0;
        shapes[i] = rng_u64(rng_u64(rng_u64(own, before), next), i == 0);
        before = own;
    }
}

/* Moves s past the reasoning at its start: past the last </think>. */
static void skip_reasoning(const char **s, int64_t *size)
{
    static const char mark[] = "</think>";
    const char *end;
    while ((end = memmem(*s, (size_t)*size, mark, sizeof(mark) - 1))) {
        end += sizeof(mark) - 1;
        *size -= end - *s;
        *s = end;
    }
}

bool chat_dropped_text_in(const struct text_buf *text, int64_t *at, struct json message)
{
    const char *s, *hit;
    int64_t size;
    if (json_str(json_find(message, "content"), &s, &size, NULL)) return !is_scalar(json_find(message, "content"));
    skip_reasoning(&s, &size);
    text_trim(&s, &size);
    if (!size) return true;
    hit = find(text, *at, s, size);
    if (!hit) { /* a tool's result may be written as JSON */
        struct text_buf quoted = {0};
        text_put_quoted(&quoted, s, size);
        size = quoted.size - 2;
        hit = find(text, *at, quoted.text + 1, size);
        text_free(&quoted);
    }
    if (hit) *at = hit - text->text + size;
    return hit;
}

int chat_dropped_part(struct json message, const char *what, struct err *err)
{
    const char *role;
    if (json_get_str(message, "role", &role, NULL)) role = "?";
    return json_error(message, err, "the chat template does not write `%s` of this message of role \"%.40s\", %s", what,
                      role, CHAT_DROPPED_ADVICE);
}

int chat_dropped_calls(struct json message, struct err *err)
{
    const struct json calls = json_find(message, "tool_calls");
    return json_error(
        calls, err,
        "has %lld calls, and the chat template writes only one: give each call a message, followed by its "
        "result",
        (long long)json_count(calls));
}
