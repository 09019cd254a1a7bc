/* chat_tools.c - function schemas as TypeScript types, as in harmony's chat template.
 *
 * The template's quirks are reproduced, since the model was trained with them: line breaks and blanks inside nested
 * objects and oneOf, an array type of more than 50 characters becoming any[], a default before its comma. */
#include "data/chat/chat_tools.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INDENT "                " /* the template's text, printed before a property's type */

/* ---- types ---- */

static int put_string(struct text_buf *t, struct json j, struct err *err)
{
    const char *s;
    int64_t size;
    if (json_str(j, &s, &size, err)) return -1;
    text_put_bytes(t, s, size);
    return 0;
}

/* str() of a scalar. */
static int put_scalar(struct text_buf *t, struct json j, struct err *err)
{
    switch (json_type(j)) {
    case JSON_NULL: text_put(t, "None"); return 0;
    case JSON_BOOL: text_put(t, json_truthy(j) ? "True" : "False"); return 0;
    case JSON_INT:
    case JSON_REAL: return text_put_number(t, j, err);
    default: return put_string(t, j, err);
    }
}

static int put_joined(struct text_buf *t, struct json list, const char *separator, struct err *err)
{
    if (json_type(list) != JSON_ARRAY) return json_error(list, err, "must be an array");
    for (int64_t i = 0; i < json_count(list); i++) {
        if (i) text_put(t, separator);
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

/* 1 when spec.required lists name, 0 when not, -1 when it is not a list. */
static int is_required(struct json spec, const char *name, struct err *err)
{
    struct json list = json_find(spec, "required");
    if (!json_truthy(list)) return 0;
    if (json_type(list) != JSON_ARRAY) return json_error(list, err, "must be an array");
    for (int64_t i = 0; i < json_count(list); i++)
        if (is(json_at(list, i), name)) return 1;
    return 0;
}

static int put_type(struct text_buf *t, struct json spec, struct err *err);

static int put_array_type(struct text_buf *t, struct json items, struct err *err)
{
    static const char *const simple[][2] = {
        {"string", "string"}, {"number", "number"}, {"integer", "number"}, {"boolean", "boolean"}};
    struct json type = json_find(items, "type");
    int64_t begin = t->size, chars = 0;
    if (!json_truthy(items)) {
        text_put(t, "any[]");
        return 0;
    }
    for (int64_t i = 0; i < MT_LEN(simple); i++) {
        if (!is(type, simple[i][0])) continue;
        text_put(t, simple[i][1]); /* whatever enum contains */
        text_put(t, "[]");
        return 0;
    }
    if (put_type(t, items, err)) return -1;
    for (int64_t i = begin; i < t->size; i++) chars += (t->text[i] & 0xc0) != 0x80;
    if (chars > 50 || !strcmp(t->text + begin, "object | object")) {
        t->size = begin;
        text_put(t, "any");
    }
    text_put(t, "[]");
    return 0;
}

static int put_one_of(struct text_buf *t, struct json variants, struct err *err)
{
    if (json_type(variants) != JSON_ARRAY) return json_error(variants, err, "must be an array");
    int64_t n = json_count(variants); /* the template means to write "any" for several objects, but never does */
    for (int64_t i = 0; i < n; i++) {
        struct json v = json_at(variants, i), text = json_find(v, "description"), value = json_find(v, "default");
        if (put_type(t, v, err)) return -1;
        if (json_truthy(text)) {
            text_put(t, "// ");
            if (put_string(t, text, err)) return -1;
        }
        if (json_type(value) != JSON_ABSENT) {
            text_put(t, INDENT "    // default: ");
            if (text_put_json(t, value, err)) return -1;
        }
        if (i + 1 < n) text_put(t, " | \n");
    }
    return 0;
}

static int put_object_type(struct text_buf *t, struct json spec, struct err *err)
{
    struct json properties = json_find(spec, "properties"), value;
    const char *name;
    if (!json_truthy(properties)) {
        text_put(t, "object");
        return 0;
    }
    if (json_type(properties) != JSON_OBJECT) return json_error(properties, err, "must be an object");
    text_put(t, "{\n");
    for (int64_t i = 0; json_member(properties, i, &name, &value); i++) {
        int required = is_required(spec, name, err);
        if (required < 0) return -1;
        text_put(t, name);
        text_put(t, required ? ": \n" INDENT : "?: \n" INDENT);
        if (put_type(t, value, err)) return -1;
        if (i + 1 < json_count(properties)) text_put(t, ", ");
    }
    text_put(t, "}");
    return 0;
}

static int put_string_type(struct text_buf *t, struct json spec, struct err *err)
{
    struct json values = json_find(spec, "enum");
    if (!json_truthy(values)) {
        text_put(t, json_truthy(json_find(spec, "nullable")) ? "string | null" : "string");
        return 0;
    }
    text_put(t, "\"");
    if (put_joined(t, values, "\" | \"", err)) return -1;
    text_put(t, "\"");
    return 0;
}

/* The type of a JSON schema; a value that is not an object has none. */
static int put_type(struct text_buf *t, struct json spec, struct err *err)
{
    struct json type = json_find(spec, "type"), one_of = json_find(spec, "oneOf");
    if (is(type, "array")) {
        if (put_array_type(t, json_find(spec, "items"), err)) return -1;
        if (json_truthy(json_find(spec, "nullable"))) text_put(t, " | null");
        return 0;
    }
    if (json_type(type) == JSON_ARRAY && json_count(type) > 0) return put_joined(t, type, " | ", err);
    if (json_truthy(one_of)) return put_one_of(t, one_of, err);
    if (is(type, "string")) return put_string_type(t, spec, err);
    if (is(type, "object")) return put_object_type(t, spec, err);
    if (is(type, "number") || is(type, "integer"))
        text_put(t, "number");
    else
        text_put(t, is(type, "boolean") ? "boolean" : "any");
    return 0;
}

/* ---- functions ---- */

static int put_parameter(struct text_buf *t, struct json parameters, const char *name, struct json spec,
                         struct err *err)
{
    struct json text = json_find(spec, "description"), value = json_find(spec, "default");
    if (json_truthy(text)) {
        text_put(t, "// ");
        if (put_string(t, text, err)) return -1;
        text_put(t, "\n");
    }
    int required = is_required(parameters, name, err);
    if (required < 0) return -1;
    text_put(t, name);
    text_put(t, required ? ": " : "?: ");
    if (put_type(t, spec, err)) return -1;
    if (json_type(value) != JSON_ABSENT) {
        bool choice = json_truthy(json_find(spec, "enum")), one_of = json_truthy(json_find(spec, "oneOf"));
        text_put(t, !choice && one_of ? "// default: " : ", // default: ");
        if (choice || one_of ? put_string(t, value, err) : text_put_json(t, value, err)) return -1;
    }
    text_put(t, ",\n");
    return 0;
}

static int put_function(struct text_buf *t, struct json tool, struct err *err)
{
    struct json f, value;
    const char *name, *text, *key;
    if (json_get_object(tool, "function", &f, err)) return -1;
    if (json_get_str(f, "description", &text, err) || json_get_str(f, "name", &name, err)) return -1;
    text_put(t, "// ");
    text_put(t, text);
    text_put(t, "\ntype ");
    text_put(t, name);
    struct json parameters = json_find(f, "parameters"), properties = json_find(parameters, "properties");
    if (!json_truthy(properties)) {
        text_put(t, " = () => any;\n\n");
        return 0;
    }
    if (json_type(properties) != JSON_OBJECT) return json_error(properties, err, "must be an object");
    text_put(t, " = (_: {\n");
    for (int64_t i = 0; json_member(properties, i, &key, &value); i++)
        if (put_parameter(t, parameters, key, value, err)) return -1;
    text_put(t, "}) => any;\n\n");
    return 0;
}

int chat_tools_put(struct text_buf *t, struct json tools, struct err *err)
{
    text_put(t, "# Tools\n\n## functions\n\nnamespace functions {\n\n");
    for (int64_t i = 0; i < json_count(tools); i++)
        if (put_function(t, json_at(tools, i), err)) return -1;
    text_put(t, "} // namespace functions");
    return 0;
}
