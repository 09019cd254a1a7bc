/* verify_schema.c - see verify_schema.h. */
#include "train/reward/verify_schema.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer/search.h"
#include "train/reward/same_json.h"

enum { SCHEMA_BYTES = 1 << 20, DEPTH = 512 };

/* The form of a keyword's value. SCHEMAS: an object whose values are schemas; LIST: an array of schemas. */
enum form { NOTE, TYPE, ANY, VALUES, NAMES, COUNT, NUMBER, FLAG, PATTERN, SCHEMA, SCHEMAS, LIST, REF };
static const struct keyword {
    const char *name;
    enum form form;
} keywords[] = {
    {"type", TYPE},
    {"enum", VALUES},
    {"const", ANY},
    {"properties", SCHEMAS},
    {"required", NAMES},
    {"additionalProperties", SCHEMA},
    {"minProperties", COUNT},
    {"maxProperties", COUNT},
    {"items", SCHEMA},
    {"minItems", COUNT},
    {"maxItems", COUNT},
    {"uniqueItems", FLAG},
    {"minLength", COUNT},
    {"maxLength", COUNT},
    {"pattern", PATTERN},
    {"minimum", NUMBER},
    {"maximum", NUMBER},
    {"exclusiveMinimum", NUMBER},
    {"exclusiveMaximum", NUMBER},
    {"anyOf", LIST},
    {"allOf", LIST},
    {"oneOf", LIST},
    {"not", SCHEMA},
    {"$ref", REF},
    {"$defs", SCHEMAS},
    {"definitions", SCHEMAS},
    {"$schema", NOTE},
    {"$id", NOTE},
    {"$comment", NOTE},
    {"title", NOTE},
    {"description", NOTE},
    {"default", NOTE},
    {"examples", NOTE},
    {"deprecated", NOTE},
};
static const char *const types[] = {"null", "boolean", "integer", "number", "string", "array", "object"};

struct schema {
    struct json_doc *doc;
    struct {
        const char *text; /* of the document */
        struct search *search;
    } * patterns; /* [n] */
    int64_t n, cap, steps;
};

/* ---- opening ---- */

static int check(struct schema *s, struct json schema, const char *name, struct err *err);

/* The schema that a $ref names; absent: none. */
static struct json referred(const struct schema *s, const char *ref)
{
    static const char *const heads[] = {"#/$defs/", "#/definitions/"}, *const keys[] = {"$defs", "definitions"};
    if (!strcmp(ref, "#")) return json_root(s->doc);
    for (int i = 0; i < MT_LEN(heads); i++)
        if (!strncmp(ref, heads[i], strlen(heads[i])))
            return json_find(json_find(json_root(s->doc), keys[i]), ref + strlen(heads[i]));
    return (struct json){.node = NULL};
}

static bool is_type(const char *name)
{
    for (int i = 0; i < MT_LEN(types); i++)
        if (!strcmp(name, types[i])) return true;
    return false;
}

/* Whether all elements of v are texts. types_only: and names of types. */
static bool are_texts(struct json v, bool types_only)
{
    const char *text;
    for (int64_t i = 0; i < json_count(v); i++) {
        const struct json one = json_at(v, i);
        int64_t size;
        if (json_type(one) != JSON_STRING || json_str(one, &text, &size, NULL) || (types_only && !is_type(text)))
            return false;
    }
    return true;
}

static int check_members(struct schema *s, struct json of, const char *name, struct err *err)
{
    const char *key;
    struct json value;
    for (int64_t i = 0; json_item(of, i, &key, &value); i++)
        if (check(s, value, name, err)) return -1;
    return 0;
}

static int add_pattern(struct schema *s, struct json v, const char *name, struct err *err)
{
    const char *text;
    int64_t size;
    if (json_str(v, &text, &size, err)) return -1;
    s->patterns = mem_reserve(s->patterns, &s->cap, s->n + 1, sizeof(*s->patterns));
    s->patterns[s->n].text = text;
    return (s->patterns[s->n++].search = search_open(text, name, err)) ? 0 : -1;
}

/* Whether a value has the form; the caller checks the schemas in it. */
static bool has_form(const struct schema *s, enum form form, struct json v)
{
    const enum json_type t = json_type(v);
    const char *text = "";
    int64_t n;
    double number;
    if (form == TYPE && t == JSON_STRING) return !json_str(v, &text, &n, NULL) && is_type(text);
    if (form == TYPE || form == NAMES) return t == JSON_ARRAY && are_texts(v, form == TYPE);
    if (form == VALUES) return t == JSON_ARRAY;
    if (form == COUNT) return t == JSON_INT && !json_i64(v, 0, INT64_MAX, &n, NULL);
    if (form == NUMBER) return (t == JSON_INT || t == JSON_REAL) && !json_f64(v, &number, NULL);
    if (form == FLAG) return t == JSON_BOOL;
    if (form == PATTERN) return t == JSON_STRING;
    if (form == SCHEMAS) return t == JSON_OBJECT;
    if (form == LIST) return t == JSON_ARRAY && json_count(v) > 0;
    if (form == REF)
        return t == JSON_STRING && !json_str(v, &text, &n, NULL) && json_type(referred(s, text)) != JSON_ABSENT;
    return true;
}

static int check_keyword(struct schema *s, const char *key, struct json v, const char *name, struct err *err)
{
    static const char *const forms[] = {[TYPE] = "a type, or a list of types",
                                        [VALUES] = "a list",
                                        [NAMES] = "a list of texts",
                                        [COUNT] = "a whole number from 0",
                                        [NUMBER] = "a number",
                                        [FLAG] = "true or false",
                                        [PATTERN] = "a text",
                                        [SCHEMAS] = "an object",
                                        [LIST] = "a list that is not empty",
                                        [REF] = "\"#\", \"#/$defs/NAME\" or \"#/definitions/NAME\" of a schema there"};
    int k = 0;
    while (k < MT_LEN(keywords) && strcmp(keywords[k].name, key)) k++;
    if (k == MT_LEN(keywords))
        return err_set(err, "%s: the schema has \"%.60s\" (`%s`), which moetrain does not check: remove it", name, key,
                       v.path);
    const enum form form = keywords[k].form;
    if (!has_form(s, form, v)) return err_set(err, "%s: the schema's `%s`: expected %s", name, v.path, forms[form]);
    if (form == PATTERN) return add_pattern(s, v, name, err);
    if (form == SCHEMA) return check(s, v, name, err);
    return form == SCHEMAS || form == LIST ? check_members(s, v, name, err) : 0;
}

static int check(struct schema *s, struct json schema, const char *name, struct err *err)
{
    const char *key;
    struct json value;
    if (json_type(schema) == JSON_BOOL) return 0;
    if (json_type(schema) != JSON_OBJECT)
        return err_set(err, "%s: the schema's `%s`: expected a schema, an object or true or false", name, schema.path);
    for (int64_t i = 0; json_member(schema, i, &key, &value); i++)
        if (check_keyword(s, key, value, name, err)) return -1;
    return 0;
}

struct schema *schema_open(const char *path, const char *name, struct err *err)
{
    struct schema *s = mem_alloc(sizeof(*s));
    s->doc = json_load(path, SCHEMA_BYTES, err);
    if (s->doc && !check(s, json_root(s->doc), name, err)) return s;
    if (!s->doc) (void)err_prefix(err, "%s", name);
    schema_close(s);
    return NULL;
}

void schema_close(struct schema *s)
{
    if (!s) return;
    for (int64_t i = 0; i < s->n; i++) search_close(s->patterns[i].search);
    mem_free(s->patterns);
    json_free(s->doc);
    mem_free(s);
}

/* ---- values ---- */

static bool accepts(struct schema *s, struct json schema, struct json v, int depth);

/* A number, as near as a double is. */
static double number_of(struct json v)
{
    double x = 0;
    if (json_wide(v)) return strtod(json_wide(v), NULL);
    return json_f64(v, &x, NULL) ? (double)NAN : x;
}

static bool is_of(struct json v, const char *type)
{
    static const char *const names[] = {
        [JSON_NULL] = "null",     [JSON_BOOL] = "boolean", [JSON_INT] = "integer",  [JSON_REAL] = "number",
        [JSON_STRING] = "string", [JSON_ARRAY] = "array",  [JSON_OBJECT] = "object"};
    const enum json_type t = json_type(v);
    if (!strcmp(type, names[t])) return true;
    if (t == JSON_INT) return !strcmp(type, "number");
    return t == JSON_REAL && !strcmp(type, "integer") && number_of(v) == floor(number_of(v)); /* 1.0 */
}

static bool fits_type(struct json type, struct json v)
{
    const char *text;
    int64_t n;
    if (json_type(type) == JSON_STRING) return !json_str(type, &text, &n, NULL) && is_of(v, text);
    for (int64_t i = 0; i < json_count(type); i++)
        if (!json_str(json_at(type, i), &text, &n, NULL) && is_of(v, text)) return true;
    return false;
}

static bool is_one_of(struct schema *s, struct json list, struct json v)
{
    for (int64_t i = 0; i < json_count(list); i++) {
        s->steps += json_count(v) + 1;
        if (same_json(json_at(list, i), v)) return true;
    }
    return false;
}

static bool fits_members(struct schema *s, struct json schema, struct json v, int depth)
{
    const struct json known = json_find(schema, "properties"), required = json_find(schema, "required");
    const struct json others = json_find(schema, "additionalProperties");
    const char *key;
    int64_t n;
    struct json value;
    for (int64_t i = 0; i < json_count(required); i++)
        if (json_str(json_at(required, i), &key, &n, NULL) || !json_has(v, key)) return false;
    for (int64_t i = 0; json_member(v, i, &key, &value); i++) {
        const struct json of = json_has(known, key) ? json_find(known, key) : others;
        if (json_type(of) != JSON_ABSENT && !accepts(s, of, value, depth)) return false;
    }
    return true;
}

static bool fits_items(struct schema *s, struct json schema, struct json v, int depth)
{
    const struct json items = json_find(schema, "items"), unique = json_find(schema, "uniqueItems");
    bool all = false;
    if (json_type(unique) == JSON_BOOL && json_bool(unique, &all, NULL)) return false;
    for (int64_t i = 0; i < json_count(v); i++) {
        if (json_type(items) != JSON_ABSENT && !accepts(s, items, json_at(v, i), depth)) return false;
        for (int64_t k = 0; all && k < i; k++)
            if ((s->steps += json_count(json_at(v, i)) + 1) > SCHEMA_STEPS || same_json(json_at(v, k), json_at(v, i)))
                return false;
    }
    return true;
}

static bool in_bounds(struct json schema, const char *least, const char *most, double n)
{
    const struct json a = json_find(schema, least), b = json_find(schema, most);
    return (json_type(a) == JSON_ABSENT || n >= number_of(a)) && (json_type(b) == JSON_ABSENT || n <= number_of(b));
}

static bool fits_text(struct schema *s, struct json schema, struct json v)
{
    const struct json pattern = json_find(schema, "pattern");
    const char *text, *want;
    int64_t size, n, chars = 0;
    if (json_str(v, &text, &size, NULL)) return false; /* half of a surrogate pair */
    for (int64_t i = 0; i < size; i++) chars += (text[i] & 0xc0) != 0x80;
    if (!in_bounds(schema, "minLength", "maxLength", (double)chars)) return false;
    if (json_type(pattern) == JSON_ABSENT || json_str(pattern, &want, &n, NULL)) return true;
    int64_t i = 0;
    while (i < s->n && strcmp(s->patterns[i].text, want)) i++;
    return i < s->n && search_any(s->patterns[i].search, text, size) == SEARCH_FOUND;
}

static bool fits_number(struct json schema, struct json v)
{
    const struct json above = json_find(schema, "exclusiveMinimum"), below = json_find(schema, "exclusiveMaximum");
    const double x = number_of(v);
    return in_bounds(schema, "minimum", "maximum", x) && (json_type(above) == JSON_ABSENT || x > number_of(above)) &&
           (json_type(below) == JSON_ABSENT || x < number_of(below));
}

static bool fits_value(struct schema *s, struct json schema, struct json v, int depth)
{
    const double n = (double)json_count(v);
    switch (json_type(v)) {
    case JSON_OBJECT:
        return in_bounds(schema, "minProperties", "maxProperties", n) && fits_members(s, schema, v, depth);
    case JSON_ARRAY: return in_bounds(schema, "minItems", "maxItems", n) && fits_items(s, schema, v, depth);
    case JSON_STRING: return fits_text(s, schema, v);
    case JSON_INT:
    case JSON_REAL: return fits_number(schema, v);
    default: return true;
    }
}

static int64_t n_accepting(struct schema *s, struct json list, struct json v, int depth)
{
    int64_t n = 0;
    for (int64_t i = 0; i < json_count(list); i++) n += accepts(s, json_at(list, i), v, depth);
    return n;
}

static bool fits_combined(struct schema *s, struct json schema, struct json v, int depth)
{
    const struct json any = json_find(schema, "anyOf"), all = json_find(schema, "allOf");
    const struct json one = json_find(schema, "oneOf"), none = json_find(schema, "not"),
                      ref = json_find(schema, "$ref");
    const char *name;
    int64_t n;
    if (json_type(any) != JSON_ABSENT && !n_accepting(s, any, v, depth)) return false;
    if (n_accepting(s, all, v, depth) != json_count(all)) return false;
    if (json_type(one) != JSON_ABSENT && n_accepting(s, one, v, depth) != 1) return false;
    if (json_type(none) != JSON_ABSENT && accepts(s, none, v, depth)) return false;
    return json_type(ref) == JSON_ABSENT ||
           (!json_str(ref, &name, &n, NULL) && accepts(s, referred(s, name), v, depth));
}

static bool accepts(struct schema *s, struct json schema, struct json v, int depth)
{
    const struct json type = json_find(schema, "type"), of = json_find(schema, "enum"), is = json_find(schema, "const");
    bool flag = false;
    if (++s->steps > SCHEMA_STEPS || depth == DEPTH) {
        s->steps = (int64_t)SCHEMA_STEPS + 1; /* also below a `not` */
        return false;
    }
    if (json_type(schema) == JSON_BOOL) return !json_bool(schema, &flag, NULL) && flag;
    return (json_type(type) == JSON_ABSENT || fits_type(type, v)) &&
           (json_type(of) == JSON_ABSENT || is_one_of(s, of, v)) &&
           (json_type(is) == JSON_ABSENT || same_json(is, v)) && fits_value(s, schema, v, depth + 1) &&
           fits_combined(s, schema, v, depth + 1);
}

bool schema_accepts(struct schema *s, struct json value)
{
    s->steps = 0;
    const bool fits = accepts(s, json_root(s->doc), value, 0);
    return fits && s->steps <= SCHEMA_STEPS;
}
