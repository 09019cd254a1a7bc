/* chat_tools.c - JSON as Python writes it, and function schemas as TypeScript types, both as in harmony's chat
 * template.
 *
 * The template's oddities are part of the format, since the model was served with them: line breaks and blanks inside
 * nested objects and oneOf, an array type of more than 50 characters becoming any[], a default before its comma. */
#include "data/chat_tools.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INDENT "                " /* the template's own, printed before a property's type */

void chat_put_bytes(struct chat_text *t, const char *text, int64_t size)
{
    if (t->size + size + 1 > t->cap) {
        int64_t cap = MT_MAX(2 * t->cap, t->size + size + 1024);
        t->text = mem_grow(t->text, t->cap, cap, 1);
        t->cap = cap;
    }
    memcpy(t->text + t->size, text, (size_t)size);
    t->size += size;
    t->text[t->size] = 0;
}

void chat_put(struct chat_text *t, const char *text) { chat_put_bytes(t, text, (int64_t)strlen(text)); }

bool chat_truthy(struct json j)
{
    bool yes = false;
    double number = 0;
    const char *text;
    int64_t size = 0;
    switch (json_type(j)) {
    case JSON_ABSENT:
    case JSON_NULL: return false;
    case JSON_BOOL: return !json_bool(j, &yes, NULL) && yes;
    case JSON_INT:
    case JSON_REAL: return !json_f64(j, &number, NULL) && number != 0;
    case JSON_STRING: return !json_str(j, &text, &size, NULL) && size > 0;
    case JSON_ARRAY:
    case JSON_OBJECT: break;
    }
    return json_count(j) > 0;
}

/* ---- JSON ---- */

void chat_put_quoted(struct chat_text *t, const char *s, int64_t size)
{
    chat_put(t, "\"");
    for (int64_t i = 0, done = 0; i <= size; i++) {
        unsigned char c = i < size ? (unsigned char)s[i] : 0;
        if (i < size && c >= 32 && c != '"' && c != '\\') continue;
        chat_put_bytes(t, s + done, i - done);
        done = i + 1;
        if (i == size) break;
        char escape[8];
        const char *at = c ? strchr("\bb\tt\nn\ff\rr\"\"\\\\", c) : NULL; /* each character before its letter */
        if (at)
            snprintf(escape, sizeof(escape), "\\%c", at[1]);
        else
            snprintf(escape, sizeof(escape), "\\u%04x", c);
        chat_put(t, escape);
    }
    chat_put(t, "\"");
}

/* The shortest digits that read back, written out between 1e-4 and 1e16 and with an exponent outside, as Python does.
 */
void chat_put_float(struct chat_text *t, double v)
{
    char text[64];
    int digits = 0;
    if (!isfinite(v)) {
        chat_put(t, isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
        return;
    }
    do snprintf(text, sizeof(text), "%.*e", digits++, v);
    while (digits < 17 && strtod(text, NULL) != v);
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16) snprintf(text, sizeof(text), "%.*f", MT_MAX(digits - 1 - exponent, 1), v);
    chat_put(t, text);
}

static int put_number(struct chat_text *t, struct json j, struct err *err)
{
    int64_t i;
    double f;
    char text[32];
    if (json_type(j) == JSON_REAL) {
        if (json_f64(j, &f, err)) return -1;
        chat_put_float(t, f);
        return 0;
    }
    if (json_i64(j, INT64_MIN, INT64_MAX, &i, err)) return -1;
    snprintf(text, sizeof(text), "%lld", (long long)i);
    chat_put(t, text);
    return 0;
}

static int put_object(struct chat_text *t, struct json j, struct err *err)
{
    const char *key;
    struct json value;
    chat_put(t, "{");
    for (int64_t i = 0; json_member(j, i, &key, &value); i++) {
        if (i) chat_put(t, ", ");
        chat_put_quoted(t, key, (int64_t)strlen(key));
        chat_put(t, ": ");
        if (chat_put_json(t, value, err)) return -1;
    }
    chat_put(t, "}");
    return 0;
}

int chat_put_json(struct chat_text *t, struct json j, struct err *err)
{
    const char *s;
    int64_t size;
    switch (json_type(j)) {
    case JSON_ABSENT: return json_error(j, err, "is missing");
    case JSON_NULL: chat_put(t, "null"); return 0;
    case JSON_BOOL: chat_put(t, chat_truthy(j) ? "true" : "false"); return 0;
    case JSON_INT:
    case JSON_REAL: return put_number(t, j, err);
    case JSON_STRING:
        if (json_str(j, &s, &size, err)) return -1;
        chat_put_quoted(t, s, size);
        return 0;
    case JSON_OBJECT: return put_object(t, j, err);
    case JSON_ARRAY: break;
    }
    chat_put(t, "[");
    for (int64_t i = 0; i < json_count(j); i++) {
        if (i) chat_put(t, ", ");
        if (chat_put_json(t, json_at(j, i), err)) return -1;
    }
    chat_put(t, "]");
    return 0;
}

/* ---- types ---- */

static int put_string(struct chat_text *t, struct json j, struct err *err)
{
    const char *s;
    int64_t size;
    if (json_str(j, &s, &size, err)) return -1;
    chat_put_bytes(t, s, size);
    return 0;
}

/* str() of a scalar. */
static int put_scalar(struct chat_text *t, struct json j, struct err *err)
{
    switch (json_type(j)) {
    case JSON_NULL: chat_put(t, "None"); return 0;
    case JSON_BOOL: chat_put(t, chat_truthy(j) ? "True" : "False"); return 0;
    case JSON_INT:
    case JSON_REAL: return put_number(t, j, err);
    default: return put_string(t, j, err);
    }
}

static int put_joined(struct chat_text *t, struct json list, const char *separator, struct err *err)
{
    if (json_type(list) != JSON_ARRAY) return json_error(list, err, "must be an array");
    for (int64_t i = 0; i < json_count(list); i++) {
        if (i) chat_put(t, separator);
        if (put_scalar(t, json_at(list, i), err)) return -1;
    }
    return 0;
}

/* j is the string `text`. */
static bool is(struct json j, const char *text)
{
    const char *s;
    int64_t size;
    return json_type(j) == JSON_STRING && !json_str(j, &s, &size, NULL) && (size_t)size == strlen(text) &&
           !memcmp(s, text, (size_t)size);
}

/* 1 when spec.required lists name, 0 when not, -1 when it is no list. */
static int is_required(struct json spec, const char *name, struct err *err)
{
    struct json list = json_find(spec, "required");
    if (!chat_truthy(list)) return 0;
    if (json_type(list) != JSON_ARRAY) return json_error(list, err, "must be an array");
    for (int64_t i = 0; i < json_count(list); i++)
        if (is(json_at(list, i), name)) return 1;
    return 0;
}

static int put_type(struct chat_text *t, struct json spec, struct err *err);

static int put_array_type(struct chat_text *t, struct json items, struct err *err)
{
    static const char *const simple[][2] = {
        {"string", "string"}, {"number", "number"}, {"integer", "number"}, {"boolean", "boolean"}};
    struct json type = json_find(items, "type");
    int64_t begin = t->size, chars = 0;
    if (!chat_truthy(items)) {
        chat_put(t, "any[]");
        return 0;
    }
    for (int64_t i = 0; i < MT_LEN(simple); i++) {
        if (!is(type, simple[i][0])) continue;
        chat_put(t, simple[i][1]); /* whatever enum says */
        chat_put(t, "[]");
        return 0;
    }
    if (put_type(t, items, err)) return -1;
    for (int64_t i = begin; i < t->size; i++) chars += (t->text[i] & 0xc0) != 0x80;
    if (chars > 50 || !strcmp(t->text + begin, "object | object")) {
        t->size = begin;
        chat_put(t, "any");
    }
    chat_put(t, "[]");
    return 0;
}

static int put_one_of(struct chat_text *t, struct json variants, struct err *err)
{
    if (json_type(variants) != JSON_ARRAY) return json_error(variants, err, "must be an array");
    int64_t n = json_count(variants); /* the template means to write "any" for several objects, but never does */
    for (int64_t i = 0; i < n; i++) {
        struct json v = json_at(variants, i), text = json_find(v, "description"), value = json_find(v, "default");
        if (put_type(t, v, err)) return -1;
        if (chat_truthy(text)) {
            chat_put(t, "// ");
            if (put_string(t, text, err)) return -1;
        }
        if (json_type(value) != JSON_ABSENT) {
            chat_put(t, INDENT "    // default: ");
            if (chat_put_json(t, value, err)) return -1;
        }
        if (i + 1 < n) chat_put(t, " | \n");
    }
    return 0;
}

static int put_object_type(struct chat_text *t, struct json spec, struct err *err)
{
    struct json properties = json_find(spec, "properties"), value;
    const char *name;
    if (!chat_truthy(properties)) {
        chat_put(t, "object");
        return 0;
    }
    if (json_type(properties) != JSON_OBJECT) return json_error(properties, err, "must be an object");
    chat_put(t, "{\n");
    for (int64_t i = 0; json_member(properties, i, &name, &value); i++) {
        int required = is_required(spec, name, err);
        if (required < 0) return -1;
        chat_put(t, name);
        chat_put(t, required ? ": \n" INDENT : "?: \n" INDENT);
        if (put_type(t, value, err)) return -1;
        if (i + 1 < json_count(properties)) chat_put(t, ", ");
    }
    chat_put(t, "}");
    return 0;
}

static int put_string_type(struct chat_text *t, struct json spec, struct err *err)
{
    struct json values = json_find(spec, "enum");
    if (!chat_truthy(values)) {
        chat_put(t, chat_truthy(json_find(spec, "nullable")) ? "string | null" : "string");
        return 0;
    }
    chat_put(t, "\"");
    if (put_joined(t, values, "\" | \"", err)) return -1;
    chat_put(t, "\"");
    return 0;
}

/* The type of a JSON schema; what is no object has none. */
static int put_type(struct chat_text *t, struct json spec, struct err *err)
{
    struct json type = json_find(spec, "type"), one_of = json_find(spec, "oneOf");
    if (is(type, "array")) {
        if (put_array_type(t, json_find(spec, "items"), err)) return -1;
        if (chat_truthy(json_find(spec, "nullable"))) chat_put(t, " | null");
        return 0;
    }
    if (json_type(type) == JSON_ARRAY && json_count(type) > 0) return put_joined(t, type, " | ", err);
    if (chat_truthy(one_of)) return put_one_of(t, one_of, err);
    if (is(type, "string")) return put_string_type(t, spec, err);
    if (is(type, "object")) return put_object_type(t, spec, err);
    if (is(type, "number") || is(type, "integer"))
        chat_put(t, "number");
    else
        chat_put(t, is(type, "boolean") ? "boolean" : "any");
    return 0;
}

/* ---- functions ---- */

static int put_parameter(struct chat_text *t, struct json parameters, const char *name, struct json spec,
                         struct err *err)
{
    struct json text = json_find(spec, "description"), value = json_find(spec, "default");
    if (chat_truthy(text)) {
        chat_put(t, "// ");
        if (put_string(t, text, err)) return -1;
        chat_put(t, "\n");
    }
    int required = is_required(parameters, name, err);
    if (required < 0) return -1;
    chat_put(t, name);
    chat_put(t, required ? ": " : "?: ");
    if (put_type(t, spec, err)) return -1;
    if (json_type(value) != JSON_ABSENT) {
        bool choice = chat_truthy(json_find(spec, "enum")), one_of = chat_truthy(json_find(spec, "oneOf"));
        chat_put(t, !choice && one_of ? "// default: " : ", // default: ");
        if (choice || one_of ? put_string(t, value, err) : chat_put_json(t, value, err)) return -1;
    }
    chat_put(t, ",\n");
    return 0;
}

static int put_function(struct chat_text *t, struct json tool, struct err *err)
{
    struct json f, value;
    const char *name, *text, *key;
    if (json_get_object(tool, "function", &f, err)) return -1;
    if (json_get_str(f, "description", &text, err) || json_get_str(f, "name", &name, err)) return -1;
    chat_put(t, "// ");
    chat_put(t, text);
    chat_put(t, "\ntype ");
    chat_put(t, name);
    struct json parameters = json_find(f, "parameters"), properties = json_find(parameters, "properties");
    if (!chat_truthy(properties)) {
        chat_put(t, " = () => any;\n\n");
        return 0;
    }
    if (json_type(properties) != JSON_OBJECT) return json_error(properties, err, "must be an object");
    chat_put(t, " = (_: {\n");
    for (int64_t i = 0; json_member(properties, i, &key, &value); i++)
        if (put_parameter(t, parameters, key, value, err)) return -1;
    chat_put(t, "}) => any;\n\n");
    return 0;
}

int chat_put_tools(struct chat_text *t, struct json tools, struct err *err)
{
    chat_put(t, "# Tools\n\n## functions\n\nnamespace functions {\n\n");
    for (int64_t i = 0; i < json_count(tools); i++)
        if (put_function(t, json_at(tools, i), err)) return -1;
    chat_put(t, "} // namespace functions");
    return 0;
}
