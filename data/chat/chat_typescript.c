/* chat_typescript.c - function schemas as TypeScript types, as the tokenizer of Kimi-K2.5 and K2.6 gives them to the
 * chat template.
 *
 * A schema is checked as a whole before it is written: references need definitions that come before them, and a
 * reference to "#" makes the parameters an interface. What the tokenizer cannot write is an error. */
#include "data/chat/chat_typescript.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DEFINITIONS 1024

/* The definitions ($defs) of one function. */
struct scope {
    struct {
        const char *name;
        struct json schema;
    } defs[MAX_DEFINITIONS];
    int64_t n;
    bool self; /* "#" is referred to */
};

static void put_indented(struct text_buf *t, int64_t depth, const char *text)
{
    for (int64_t i = 0; i < depth; i++) text_put(t, "  ");
    text_put(t, text);
}

static bool is(struct json j, const char *text)
{
    const char *s;
    int64_t size;
    return json_type(j) == JSON_STRING && !json_str(j, &s, &size, NULL) && (size_t)size == strlen(text) &&
           !memcmp(s, text, (size_t)size);
}

static bool is_list(struct json j) { return json_type(j) == JSON_ARRAY; }

/* Writes Python's str() of a value that is no list and no object. */
static int put_str(struct text_buf *t, struct json j, struct err *err)
{
    const char *s;
    int64_t size;
    switch (json_type(j)) {
    case JSON_NULL: text_put(t, "None"); return 0;
    case JSON_BOOL: text_put(t, json_truthy(j) ? "True" : "False"); return 0;
    case JSON_INT:
    case JSON_REAL: return text_put_number(t, j, err);
    case JSON_STRING:
        if (json_str(j, &s, &size, err)) return -1;
        text_put_bytes(t, s, size);
        return 0;
    default: return json_error(j, err, "must be a text, a number or a boolean");
    }
}

/* ---- checks ---- */

static int check_type(struct scope *s, struct json schema, struct err *err);

/* The name after the last slash of a reference. */
static const char *reference_name(const char *reference)
{
    const char *slash = strrchr(reference, '/');
    return slash ? slash + 1 : reference;
}

static int check_reference(struct scope *s, struct json schema, struct err *err)
{
    const char *text;
    if (json_get_str(schema, "$ref", &text, err)) return -1;
    if (!strcmp(text, "#")) {
        s->self = true;
        return 0;
    }
    const char *name = reference_name(text);
    for (int64_t i = 0; i < s->n && !strncmp(text, "#/$defs/", 8); i++)
        if (!strcmp(s->defs[i].name, name) && json_type(s->defs[i].schema) == JSON_OBJECT) return 0;
    return json_error(schema, err, "\"%.64s\" is no definition that comes before it", text);
}

/* Adds the definitions; a name that is already defined gets the new schema. */
static int define(struct scope *s, struct json defs, struct err *err)
{
    const char *name;
    struct json schema;
    if (!json_truthy(defs)) return 0;
    if (json_type(defs) != JSON_OBJECT) return json_error(defs, err, "must be an object");
    for (int64_t i = 0; json_member(defs, i, &name, &schema); i++) {
        int64_t at = 0;
        while (at < s->n && strcmp(s->defs[at].name, name)) at++;
        if (at == MAX_DEFINITIONS) return json_error(defs, err, "more than %d definitions", MAX_DEFINITIONS);
        s->defs[at].name = name;
        s->defs[at].schema = schema;
        s->n += at == s->n;
    }
    return 0;
}

static int check_required(struct json schema, struct err *err)
{
    const struct json list = json_find(schema, "required");
    if (!json_has(schema, "required")) return 0;
    if (!is_list(list)) return json_error(list, err, "must be a list");
    for (int64_t i = 0; i < json_count(list); i++)
        if (is_list(json_at(list, i)) || json_type(json_at(list, i)) == JSON_OBJECT)
            return json_error(list, err, "must be a list of names");
    return 0;
}

static int check_object(struct scope *s, struct json schema, struct err *err)
{
    const struct json more = json_find(schema, "additionalProperties"), properties = json_find(schema, "properties");
    const char *name;
    struct json property;
    if (define(s, json_find(schema, "$defs"), err)) return -1;
    if (json_type(more) == JSON_OBJECT && check_type(s, more, err)) return -1;
    if (!json_has(schema, "properties")) return 0;
    if (json_type(properties) != JSON_OBJECT) return json_error(properties, err, "must be an object");
    if (check_required(schema, err)) return -1;
    for (int64_t i = 0; json_member(properties, i, &name, &property); i++)
        if (check_type(s, property, err)) return -1;
    return 0;
}

/* Refuses values of another type than the schema's. */
static int check_enum(struct json schema, struct err *err)
{
    const struct json list = json_find(schema, "enum");
    struct json type = json_find(schema, "type");
    if (!is_list(list)) return json_error(list, err, "must be a list");
    if (is_list(type)) {
        const int64_t n = json_count(type);
        const bool null_first = is(json_at(type, 0), "null");
        if (n < 1 || n > 2 || (n == 2 && !null_first && !is(json_at(type, 1), "null")))
            return json_error(type, err, "is not supported");
        type = json_at(type, n == 2 && null_first ? 1 : 0);
    }
    for (int64_t i = 0; i < json_count(list); i++) {
        const struct json value = json_at(list, i);
        const enum json_type t = json_type(value);
        const bool whole = t == JSON_INT || t == JSON_BOOL; /* a boolean of Python is an integer */
        if (t == JSON_NULL) continue;
        if ((is(type, "string") && t != JSON_STRING) || (is(type, "number") && !whole && t != JSON_REAL) ||
            (is(type, "integer") && !whole) || (is(type, "boolean") && t != JSON_BOOL))
            return json_error(value, err, "is not of the type of the schema");
    }
    return 0;
}

static const char *const union_names[][2] = {{"string", "string"},   {"number", "number"}, {"integer", "number"},
                                             {"boolean", "boolean"}, {"null", "null"},     {"object", "{}"},
                                             {"array", "Array<any>"}};

static const char *union_name(struct json type)
{
    for (int64_t i = 0; i < MT_LEN(union_names); i++)
        if (is(type, union_names[i][0])) return union_names[i][1];
    return NULL;
}

/* Checks a list of schemas, or of names of types. */
static int check_each(struct scope *s, struct json list, bool schemas, struct err *err)
{
    if (!is_list(list)) return json_error(list, err, "must be a list");
    for (int64_t i = 0; i < json_count(list); i++) {
        if (schemas && check_type(s, json_at(list, i), err)) return -1;
        if (!schemas && !union_name(json_at(list, i))) return json_error(list, err, "has an unknown type");
    }
    return 0;
}

static int check_type(struct scope *s, struct json schema, struct err *err)
{
    const struct json type = json_find(schema, "type"), items = json_find(schema, "items");
    if (json_type(schema) == JSON_BOOL) return 0;
    if (json_type(schema) != JSON_OBJECT) return json_error(schema, err, "is no schema");
    if (json_has(schema, "$ref")) return check_reference(s, schema, err);
    if (json_has(schema, "anyOf")) return check_each(s, json_find(schema, "anyOf"), true, err);
    if (json_has(schema, "enum")) return check_enum(schema, err);
    if (is_list(type)) return check_each(s, type, false, err);
    if (is(type, "object")) return check_object(s, schema, err);
    if (is(type, "array")) return json_truthy(items) ? check_type(s, items, err) : 0;
    if (json_type(type) == JSON_STRING || json_count(schema) == 0) return 0;
    return json_error(schema, err, "has no type");
}

/* ---- writing ---- */

static int put_type(struct text_buf *t, struct json schema, int64_t depth, struct err *err);

/* Writes the description with "// " before each line that is not empty. */
static int put_description(struct text_buf *t, struct json schema, int64_t depth, struct err *err)
{
    const struct json j = json_find(schema, "description");
    const char *s;
    int64_t size;
    if (!json_truthy(j)) return 0;
    if (json_str(j, &s, &size, err)) return -1;
    for (const char *line = s, *end = s + size; line <= end;) {
        const char *lf = memchr(line, '\n', (size_t)(end - line));
        const int64_t n = (lf ? lf : end) - line;
        if (n) put_indented(t, depth, "// ");
        text_put_bytes(t, line, n);
        text_put(t, "\n");
        line += n + 1;
    }
    return 0;
}

/* Writes the limits of a schema. rows: the keys that each type shows, sorted. */
static int put_limits(struct text_buf *t, struct json schema, int64_t depth, struct err *err)
{
    static const struct {
        const char *type, *keys[3];
    } rows[] = {{"string", {"maxLength", "minLength", "pattern"}},
                {"number", {"maximum", "minimum"}},
                {"integer", {"maximum", "minimum"}},
                {"array", {"maxItems", "minItems"}}};
    bool any = false;
    if (json_has(schema, "$ref") || json_has(schema, "anyOf") || json_has(schema, "enum")) return 0;
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        for (int64_t k = 0; k < MT_LEN(rows[i].keys) && is(json_find(schema, "type"), rows[i].type); k++) {
            const char *key = rows[i].keys[k];
            if (!key || !json_has(schema, key)) continue;
            put_indented(t, any ? 0 : depth, any ? ", " : "// ");
            text_put(t, key);
            text_put(t, ": ");
            if (put_str(t, json_find(schema, key), err)) return -1;
            any = true;
        }
    if (any) text_put(t, "\n");
    return 0;
}

static int put_comments(struct text_buf *t, struct json schema, int64_t depth, struct err *err)
{
    return put_description(t, schema, depth, err) || put_limits(t, schema, depth, err) ? -1 : 0;
}

static int put_property(struct text_buf *t, const char *name, struct json schema, bool optional, int64_t depth,
                        struct err *err)
{
    const struct json value = json_find(schema, "default");
    const enum json_type type = json_type(value);
    if (put_comments(t, schema, depth, err)) return -1;
    if (json_given(value)) {
        put_indented(t, depth, "// Default: ");
        if (type == JSON_BOOL ? put_str(t, value, err) : text_put_json(t, value, err)) return -1;
        text_put(t, "\n");
    }
    put_indented(t, depth, name);
    text_put(t, optional ? "?: " : ": ");
    return put_type(t, schema, depth, err);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The names in `required`, sorted; mem_free the list, not the names. */
static const char **required_names(struct json schema, int64_t *n)
{
    const struct json list = json_find(schema, "required");
    const char **names = mem_array(json_count(list) + 1, sizeof(*names));
    int64_t size;
    *n = 0;
    for (int64_t i = 0; is_list(list) && i < json_count(list); i++)
        if (json_type(json_at(list, i)) == JSON_STRING && !json_str(json_at(list, i), &names[*n], &size, NULL)) ++*n;
    qsort(names, (size_t)*n, sizeof(*names), compare_names);
    return names;
}

/* Writes the required properties, or with `optional` the others; any: all properties in one list. */
static int put_properties(struct text_buf *t, struct json schema, bool optional, bool any, int64_t *n_put,
                          int64_t depth, struct err *err)
{
    const char *name;
    struct json property;
    int64_t n;
    int rc = 0;
    const char **required = required_names(schema, &n);
    for (int64_t i = 0; !rc && json_member(json_find(schema, "properties"), i, &name, &property); i++) {
        const bool may = !bsearch(&name, required, (size_t)n, sizeof(*required), compare_names);
        if (!any && may != optional) continue;
        text_put(t, (*n_put)++ ? ",\n" : "\n");
        rc = put_property(t, name, property, may, depth, err);
    }
    mem_free(required);
    return rc;
}

static int put_object(struct text_buf *t, struct json schema, int64_t depth, struct err *err)
{
    const struct json more = json_find(schema, "additionalProperties");
    int64_t n = 0;
    text_put(t, "{");
    if (put_properties(t, schema, false, false, &n, depth + 1, err) ||
        put_properties(t, schema, true, false, &n, depth + 1, err))
        return -1;
    if (json_given(more)) {
        text_put(t, n++ ? ",\n" : "\n");
        put_indented(t, depth + 1, "[k: string]: ");
        if (json_type(more) == JSON_BOOL)
            text_put(t, json_truthy(more) ? "any" : "never");
        else if (json_type(more) != JSON_OBJECT)
            return json_error(more, err, "must be a schema or a boolean");
        else if (put_type(t, more, depth + 1, err))
            return -1;
    }
    if (n) text_put(t, "\n");
    put_indented(t, n ? depth : 0, "}");
    return 0;
}

static int put_array(struct text_buf *t, struct json schema, int64_t depth, struct err *err)
{
    const struct json items = json_find(schema, "items");
    if (!json_truthy(items)) {
        text_put(t, "Array<any>");
        return 0;
    }
    text_put(t, "Array<\n");
    const int64_t begin = t->size;
    if (put_comments(t, items, depth + 1, err)) return -1;
    const bool lines = t->size > begin;
    if (lines)
        put_indented(t, depth + 1, "");
    else
        t->size--; /* no line break */
    if (put_type(t, items, lines ? depth + 1 : depth, err)) return -1;
    if (lines) text_put(t, "\n");
    put_indented(t, lines ? depth : 0, ">");
    return 0;
}

static int put_enum(struct text_buf *t, struct json list, struct err *err)
{
    for (int64_t i = 0; i < json_count(list); i++) {
        const bool quoted = json_type(json_at(list, i)) == JSON_STRING;
        if (i) text_put(t, " | ");
        if (quoted) text_put(t, "\"");
        if (put_str(t, json_at(list, i), err)) return -1;
        if (quoted) text_put(t, "\"");
    }
    return 0;
}

static int put_any_of(struct text_buf *t, struct json list, int64_t depth, struct err *err)
{
    for (int64_t i = 0; i < json_count(list); i++) {
        if (i) text_put(t, " | ");
        if (put_type(t, json_at(list, i), depth, err)) return -1;
    }
    return 0;
}

static int put_type(struct text_buf *t, struct json schema, int64_t depth, struct err *err)
{
    const struct json type = json_find(schema, "type");
    const char *reference;
    if (json_type(schema) == JSON_BOOL) {
        text_put(t, json_truthy(schema) ? "any" : "null");
        return 0;
    }
    if (json_has(schema, "$ref")) {
        if (json_get_str(schema, "$ref", &reference, err)) return -1;
        text_put(t, strcmp(reference, "#") ? reference_name(reference) : "parameters");
        return 0;
    }
    if (json_has(schema, "anyOf")) return put_any_of(t, json_find(schema, "anyOf"), depth, err);
    if (json_has(schema, "enum")) return put_enum(t, json_find(schema, "enum"), err);
    for (int64_t i = 0; is_list(type) && i < json_count(type); i++) {
        if (i) text_put(t, " | ");
        text_put(t, union_name(json_at(type, i)));
    }
    if (is_list(type)) return 0;
    if (is(type, "object")) return put_object(t, schema, depth, err);
    if (is(type, "array")) return put_array(t, schema, depth, err);
    if (json_count(schema) && !is(type, "integer")) return put_str(t, type, err);
    text_put(t, json_count(schema) ? "number" : "any");
    return 0;
}

/* ---- functions ---- */

/* Writes the parameters as an interface, and the definitions. */
static int put_interfaces(struct text_buf *t, struct scope *s, struct json parameters, struct err *err)
{
    const int64_t n_defs = s->n; /* definitions inside of definitions can be referred to, but are not written */
    const bool self = s->self;
    int64_t n = 0;
    if (self) {
        text_put(t, "interface parameters {");
        if (put_properties(t, parameters, false, true, &n, 1, err)) return -1;
        text_put(t, n ? "\n}\n" : "}\n");
    }
    struct json *schemas = mem_array(n_defs + 1, sizeof(*schemas));
    int rc = 0;
    for (int64_t i = 0; i < n_defs; i++) schemas[i] = s->defs[i].schema;
    for (int64_t i = 0; i < n_defs && !rc; i++) {
        rc = json_type(schemas[i]) == JSON_OBJECT ? check_type(s, schemas[i], err)
                                                  : json_error(schemas[i], err, "is no schema");
        if (!rc) rc = put_description(t, schemas[i], 0, err);
        if (rc) break;
        text_put(t, "interface ");
        text_put(t, s->defs[i].name);
        text_put(t, " ");
        rc = put_type(t, schemas[i], 0, err);
        text_put(t, "\n");
    }
    mem_free(schemas);
    return rc;
}

static int put_function(struct text_buf *t, struct scope *s, struct json function, struct err *err)
{
    struct json parameters = json_find(function, "parameters");
    if (json_type(function) != JSON_OBJECT) return json_error(function, err, "must be an object");
    if (!json_truthy(parameters)) parameters = (struct json){0};
    if (json_truthy(parameters) && json_type(parameters) != JSON_OBJECT)
        return json_error(parameters, err, "must be an object");
    s->n = 0;
    s->self = false;
    if (check_object(s, parameters, err)) return -1;
    const bool self = s->self;
    if (put_interfaces(t, s, parameters, err) || put_description(t, function, 0, err)) return -1;
    text_put(t, "type ");
    if (!json_has(function, "name"))
        text_put(t, "function");
    else if (put_str(t, json_find(function, "name"), err))
        return -1;
    text_put(t, " = (_: ");
    if (self)
        text_put(t, "parameters");
    else if (put_object(t, parameters, 0, err))
        return -1;
    text_put(t, ") => any;\n");
    return 0;
}

int chat_typescript_put(struct text_buf *t, struct json tools, struct err *err)
{
    static const char head[] = "# Tools\n\n## functions\nnamespace functions {\n";
    struct scope *s = mem_array(1, sizeof(*s));
    bool any = false;
    int rc = is_list(tools) ? 0 : json_error(tools, err, "must be a list");
    for (int64_t i = 0; !rc && i < json_count(tools); i++) {
        const struct json tool = json_at(tools, i), function = json_find(tool, "function");
        if (json_type(tool) != JSON_OBJECT) rc = json_error(tool, err, "must be an object");
        if (rc || !is(json_find(tool, "type"), "function") || !json_truthy(function)) continue;
        if (!any) text_put(t, head);
        any = true;
        rc = put_function(t, s, function, err);
    }
    if (any) text_put(t, "}\n");
    if (!t->text) text_put(t, "");
    mem_free(s);
    return rc;
}

/* ---- sorting ---- */

struct member {
    const char *key;
    struct json value;
};

static int compare_members(const void *a, const void *b)
{
    return strcmp(((const struct member *)a)->key, ((const struct member *)b)->key);
}

static int put_sorted(struct text_buf *t, struct json j, struct err *err)
{
    const int64_t n = json_count(j);
    const bool list = is_list(j);
    int rc = 0;
    if (!list && json_type(j) != JSON_OBJECT) return text_put_json(t, j, err);
    struct member *members = mem_array(n + 1, sizeof(*members));
    for (int64_t i = 0; json_item(j, i, &members[i].key, &members[i].value); i++) {
    }
    if (!list) qsort(members, (size_t)n, sizeof(*members), compare_members);
    text_put(t, list ? "[" : "{");
    for (int64_t i = 0; i < n && !rc; i++) {
        text_put_key(t, members[i].key);
        rc = put_sorted(t, members[i].value, err);
    }
    text_put(t, list ? "]" : "}");
    mem_free(members);
    return rc;
}

struct json_doc *chat_typescript_sorted(struct json value, struct err *err)
{
    struct text_buf t = {0};
    struct json_doc *doc = put_sorted(&t, value, err) ? NULL : json_parse(t.text, t.size, "tools", err);
    text_free(&t);
    return doc;
}
