/* jinja_value.c - values of the Jinja engine, with Python's truth, equality, str(), repr() and json.dumps. */
#define _GNU_SOURCE /* memmem */
#include "data/chat/jinja/jinja_value.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory and errors ---- */

#define CHUNK (64 * 1024)

struct jinja_chunk {
    struct jinja_chunk *before;
    int64_t size, used;
    _Alignas(16) char bytes[];
};

void *jinja_alloc(struct jinja_arena *arena, int64_t bytes)
{
    struct jinja_chunk *c = arena->last;
    int64_t padded;
    MT_REQUIRE(i64_add(bytes, 15, &padded), "allocation of %lld bytes", (long long)bytes);
    padded &= ~(int64_t)15;
    if (!c || padded > c->size - c->used) {
        int64_t size = MT_MAX(padded, CHUNK);
        c = mem_alloc((int64_t)sizeof(*c) + size);
        c->size = size;
        c->before = arena->last;
        arena->last = c;
    }
    void *p = c->bytes + c->used;
    c->used += padded;
    return p;
}

char *jinja_copy(struct jinja_arena *arena, const char *s, int64_t size)
{
    char *copy = jinja_alloc(arena, size + 1);
    if (size) memcpy(copy, s, (size_t)size);
    return copy;
}

void jinja_arena_free(struct jinja_arena *arena)
{
    while (arena->last) {
        struct jinja_chunk *c = arena->last;
        arena->last = c->before;
        mem_free(c);
    }
}

struct value jinja_fail(struct jinja_state *st, const char *fmt, ...)
{
    char text[900];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (!st->failed) err_set(st->err, "%s:%d: %s", st->name, st->line, text);
    st->failed = true;
    return value_undefined("", 0);
}

bool jinja_charge(struct jinja_state *st, int64_t n)
{
    st->work -= MT_MIN(n, st->work + 1);
    if (st->work < 0) jinja_fail(st, "the template exceeded its work limit and was stopped");
    return !st->failed;
}

bool jinja_charge_scan(struct jinja_state *st, int64_t bytes) { return jinja_charge(st, 1 + bytes / JINJA_SCAN); }

void *jinja_new(struct jinja_state *st, int64_t bytes)
{
    st->memory -= MT_MIN(bytes, st->memory + 1);
    if (st->memory < 0) {
        char limit[32];
        jinja_fail(st, "the template needs more than its memory limit of %s", str_bytes(limit, JINJA_MEMORY));
    }
    return jinja_alloc(&st->arena, bytes);
}

/* ---- making values ---- */

struct value value_none(void) { return (struct value){.kind = VALUE_NONE}; }
struct value value_bool(bool truth) { return (struct value){.kind = VALUE_BOOL, .truth = truth}; }
struct value value_int(int64_t i) { return (struct value){.kind = VALUE_INT, .i = i}; }
struct value value_float(double f) { return (struct value){.kind = VALUE_FLOAT, .f = f}; }
struct value value_view(const char *s, int64_t size)
{
    return (struct value){.kind = VALUE_STRING, .s = s, .size = size};
}
struct value value_undefined(const char *name, int64_t size)
{
    return (struct value){.kind = VALUE_UNDEFINED, .s = name, .size = size};
}

struct value value_string(struct jinja_state *st, const char *s, int64_t size)
{
    if (!jinja_charge(st, size)) return value_undefined("", 0);
    char *copy = jinja_new(st, size + 1);
    if (size) memcpy(copy, s, (size_t)size);
    return value_view(copy, size);
}

struct value value_take(struct jinja_state *st, struct text_buf *t)
{
    struct value v = value_string(st, t->text, t->size);
    text_free(t);
    return v;
}

struct value value_list(struct jinja_state *st, bool tuple)
{
    struct value v = {.kind = VALUE_LIST, .list = jinja_new(st, sizeof(struct list))};
    v.list->tuple = tuple;
    return v;
}

struct value value_dict(struct jinja_state *st)
{
    return (struct value){.kind = VALUE_DICT, .dict = jinja_new(st, sizeof(struct dict))};
}

/* Makes a larger copy; the smaller one stays in the arena. */
static struct value *grow(struct jinja_state *st, const struct value *old, int64_t count, int64_t cap)
{
    struct value *v = jinja_new(st, cap * (int64_t)sizeof(*v));
    if (count) memcpy(v, old, (size_t)count * sizeof(*v));
    return v;
}

void list_add(struct jinja_state *st, struct list *l, struct value v)
{
    if (!jinja_charge(st, 1)) return;
    if (l->count == l->cap) {
        l->cap = 2 * l->cap + 4;
        if (!jinja_charge(st, l->cap * (int64_t)sizeof(v))) return;
        l->items = grow(st, l->items, l->count, l->cap);
    }
    l->items[l->count++] = v;
}

static bool equal_at(struct jinja_state *st, struct value a, struct value b, int depth);

/* Python's hash(key) fails for lists and dicts, also inside a tuple. */
static bool may_be_key(struct jinja_state *st, struct value key, int depth)
{
    const bool tuple = key.kind == VALUE_LIST && key.list->tuple;
    if (key.kind == VALUE_LIST || (key.kind == VALUE_DICT && !key.dict->is_namespace)) {
        if (!tuple) return jinja_fail(st, "a %s cannot be a key", value_kind_name(key)), false;
        if (depth > JINJA_NEST) return jinja_fail(st, "a key nests too deeply"), false;
    }
    for (int64_t i = 0; tuple && i < key.list->count; i++)
        if (!jinja_charge(st, 1) || !may_be_key(st, key.list->items[i], depth + 1)) return false;
    return true;
}

/* depth: number of lists and dicts around this dict, when comparing. */
static struct value *dict_find(struct jinja_state *st, const struct dict *d, struct value key, int depth)
{
    if (key.kind == VALUE_STRING) { /* nearly all keys */
        for (int64_t i = 0; i < d->count && jinja_charge(st, 1 + key.size / 16); i++)
            if (d->keys[i].kind == VALUE_STRING && d->keys[i].size == key.size &&
                (!key.size || !memcmp(d->keys[i].s, key.s, (size_t)key.size)))
                return &d->values[i];
        return NULL;
    }
    if (!may_be_key(st, key, 0)) return NULL;
    for (int64_t i = 0; i < d->count && jinja_charge(st, 1); i++)
        if (equal_at(st, d->keys[i], key, depth)) return &d->values[i];
    return NULL;
}

const struct value *dict_get(struct jinja_state *st, const struct dict *d, struct value key)
{
    return dict_find(st, d, key, 0);
}

void dict_set(struct jinja_state *st, struct dict *d, struct value key, struct value v)
{
    struct value *old = dict_find(st, d, key, 0);
    if (st->failed) return;
    if (old) {
        *old = v;
        return;
    }
    if (d->count == d->cap) {
        d->cap = 2 * d->cap + 4;
        if (!jinja_charge(st, 2 * d->cap * (int64_t)sizeof(v))) return;
        d->keys = grow(st, d->keys, d->count, d->cap);
        d->values = grow(st, d->values, d->count, d->cap);
    }
    d->keys[d->count] = key;
    d->values[d->count++] = v;
}

static struct value json_number(struct jinja_state *st, struct json j)
{
    struct err err;
    int64_t i;
    double f;
    const char *wide = json_wide(j);
    if (wide) {
        struct value v = value_float(strtod(wide, NULL));
        v.digits = strpbrk(wide, "Ny") ? NULL : wide;
        return v;
    }
    if (json_type(j) == JSON_INT)
        return json_i64(j, INT64_MIN, INT64_MAX, &i, &err) ? jinja_fail(st, "%s", err.msg) : value_int(i);
    return json_f64(j, &f, &err) ? jinja_fail(st, "%s", err.msg) : value_float(f);
}

struct value value_json(struct jinja_state *st, struct json j)
{
    struct err err;
    struct value v = value_none();
    const char *s;
    int64_t size;
    struct json item;
    /* a JSON node costs about as much as four template nodes */
    if (!jinja_charge(st, 4)) return value_undefined("", 0);
    switch (json_type(j)) {
    case JSON_ABSENT: return value_undefined("value", 5);
    case JSON_NULL: return v;
    case JSON_BOOL: return value_bool(json_truthy(j));
    case JSON_INT:
    case JSON_REAL: return json_number(st, j);
    case JSON_STRING: return json_str(j, &s, &size, &err) ? jinja_fail(st, "%s", err.msg) : value_view(s, size);
    case JSON_ARRAY:
        v = value_list(st, false);
        for (int64_t i = 0; i < json_count(j) && !st->failed; i++) list_add(st, v.list, value_json(st, json_at(j, i)));
        return v;
    case JSON_OBJECT: v = value_dict(st);
    }
    for (int64_t i = 0; !st->failed && json_member(j, i, &s, &item); i++)
        dict_set(st, v.dict, value_view(s, (int64_t)strlen(s)), value_json(st, item));
    return v;
}

/* ---- reading values ---- */

bool value_absent(struct value v) { return v.kind == VALUE_UNDEFINED && !v.s; }

bool value_is(struct value v, const char *text)
{
    return v.kind == VALUE_STRING && v.size == (int64_t)strlen(text) && !memcmp(v.s, text, (size_t)v.size);
}

const char *value_kind_name(struct value v)
{
    static const char *const names[] = {"undefined", "None", "bool", "int",  "float",
                                        "str",       "list", "dict", "loop", "function"};
    return names[v.kind];
}

bool value_number(struct value v, double *f)
{
    if (v.kind == VALUE_BOOL)
        *f = v.truth;
    else if (v.kind == VALUE_INT)
        *f = (double)v.i;
    else if (v.kind == VALUE_FLOAT)
        *f = v.f;
    else
        return false;
    return true;
}

bool value_truth(struct value v)
{
    switch (v.kind) {
    case VALUE_UNDEFINED:
    case VALUE_NONE: return false;
    case VALUE_BOOL: return v.truth;
    case VALUE_INT: return v.i != 0;
    case VALUE_FLOAT: return v.f != 0;
    case VALUE_STRING: return v.size > 0;
    case VALUE_LIST: return v.list->count > 0;
    case VALUE_DICT: return v.dict->is_namespace || v.dict->count > 0;
    case VALUE_LOOP:
    case VALUE_CALLABLE: break;
    }
    return true;
}

static bool equal_at(struct jinja_state *st, struct value a, struct value b, int depth)
{
    double x, y;
    if (depth > JINJA_NEST) return jinja_fail(st, "lists nest too deeply to be compared"), false;
    if (!jinja_charge(st, 1)) return false;
    if (a.kind == VALUE_INT && b.kind == VALUE_INT) return a.i == b.i;
    if (value_number(a, &x) && value_number(b, &y)) return x == y;
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case VALUE_STRING:
        return a.size == b.size && jinja_charge(st, a.size / 16) && (!a.size || !memcmp(a.s, b.s, (size_t)a.size));
    case VALUE_LIST:
        if (a.list->tuple != b.list->tuple || a.list->count != b.list->count) return false;
        for (int64_t i = 0; i < a.list->count; i++)
            if (!equal_at(st, a.list->items[i], b.list->items[i], depth + 1)) return false;
        return true;
    case VALUE_DICT:
        if (a.dict == b.dict) return true;
        if (a.dict->is_namespace || b.dict->is_namespace || a.dict->count != b.dict->count) return false;
        for (int64_t i = 0; i < a.dict->count; i++) {
            const struct value *other = dict_find(st, b.dict, a.dict->keys[i], depth + 1);
            if (!other || !equal_at(st, a.dict->values[i], *other, depth + 1)) return false;
        }
        return true;
    case VALUE_LOOP: return a.loop == b.loop;
    case VALUE_CALLABLE: return a.callable == b.callable;
    default: return true; /* undefined, none */
    }
}

bool value_equal(struct jinja_state *st, struct value a, struct value b) { return equal_at(st, a, b, 0); }

int value_order(struct jinja_state *st, struct value a, struct value b)
{
    double x, y;
    if (a.kind == VALUE_INT && b.kind == VALUE_INT) return (a.i > b.i) - (a.i < b.i);
    if (value_number(a, &x) && value_number(b, &y)) return (x > y) - (x < y);
    if (a.kind == VALUE_STRING && b.kind == VALUE_STRING) { /* the order of UTF-8 bytes is that of code points */
        int64_t n = MT_MIN(a.size, b.size);
        int order = jinja_charge(st, 1 + n / 16) && n ? memcmp(a.s, b.s, (size_t)n) : 0;
        return order ? order : (a.size > b.size) - (a.size < b.size);
    }
    if (a.kind == VALUE_UNDEFINED || b.kind == VALUE_UNDEFINED) {
        struct value v = a.kind == VALUE_UNDEFINED ? a : b;
        jinja_fail(st, "'%.*s' is undefined", (int)v.size, v.s);
        return 0;
    }
    jinja_fail(st, "%s and %s cannot be ordered", value_kind_name(a), value_kind_name(b));
    return 0;
}

int64_t value_find(struct jinja_state *st, struct value text, struct value what, int64_t from)
{
    if (what.size > text.size - from) return -1;
    if (!what.size) return from;
    const char *begin = text.s + from, *at = memmem(begin, (size_t)(text.size - from), what.s, (size_t)what.size);
    const int64_t read = (at ? at - begin : text.size - from) + what.size; /* memmem is linear in both */
    if (!jinja_charge_scan(st, read)) return -1;
    return at ? at - text.s : -1;
}

bool value_contains(struct jinja_state *st, struct value container, struct value item)
{
    if (container.kind == VALUE_STRING) {
        if (item.kind != VALUE_STRING)
            return jinja_fail(st, "'in <string>' requires a string, not %s", value_kind_name(item)), false;
        return value_find(st, container, item, 0) >= 0;
    }
    if (container.kind == VALUE_DICT) return dict_get(st, container.dict, item) != NULL;
    const struct list *l = value_items(st, container);
    for (int64_t i = 0; l && i < l->count; i++)
        if (value_equal(st, l->items[i], item)) return true;
    return false;
}

const struct list *value_items(struct jinja_state *st, struct value v)
{
    if (v.kind == VALUE_LIST) return v.list;
    struct value l = value_list(st, false);
    if (v.kind == VALUE_DICT && !v.dict->is_namespace) {
        for (int64_t i = 0; i < v.dict->count; i++) list_add(st, l.list, v.dict->keys[i]);
    } else if (v.kind == VALUE_STRING) {
        for (int64_t i = 0, n; i < v.size && !st->failed; i += n) {
            n = utf8_size(v.s + i, v.size - i);
            list_add(st, l.list, value_view(v.s + i, n));
        }
    } else if (v.kind != VALUE_UNDEFINED) {
        jinja_fail(st, "%s cannot be iterated over", value_kind_name(v));
    }
    return l.list;
}

int64_t value_length(struct jinja_state *st, struct value v)
{
    if (v.kind == VALUE_STRING) return jinja_charge(st, v.size / 8) ? utf8_count(v.s, v.size) : 0;
    if (v.kind == VALUE_LIST) return v.list->count;
    if (v.kind == VALUE_DICT && !v.dict->is_namespace) return v.dict->count;
    if (v.kind != VALUE_UNDEFINED) jinja_fail(st, "%s has no length", value_kind_name(v));
    return 0;
}

/* ---- text ---- */

static bool may_print(struct jinja_state *st, int depth)
{
    if (depth <= JINJA_NEST) return jinja_charge(st, JINJA_ITEM);
    jinja_fail(st, "lists nest too deeply to be printed");
    return false;
}

static void put_int(struct text_buf *t, int64_t i)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)i);
    text_put(t, text);
}

/* Characters beyond ASCII that repr() escapes: controls, formats, private ones, blanks. Python also escapes unassigned
 * characters, which depend on its version of Unicode; here they count as printable. */
static bool is_hidden(int32_t c)
{
    static const int32_t ranges[][2] = {{0x80, 0xa0},       {0xad, 0xad},        {0x600, 0x605},     {0x61c, 0x61c},
                                        {0x6dd, 0x6dd},     {0x70f, 0x70f},      {0x890, 0x891},     {0x8e2, 0x8e2},
                                        {0x1680, 0x1680},   {0x180e, 0x180e},    {0x2000, 0x200f},   {0x2028, 0x202f},
                                        {0x205f, 0x206f},   {0x3000, 0x3000},    {0xe000, 0xf8ff},   {0xfeff, 0xfeff},
                                        {0xfff9, 0xfffb},   {0x110bd, 0x110bd},  {0x110cd, 0x110cd}, {0x13430, 0x1343f},
                                        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a},  {0xe0001, 0xe0001}, {0xe0020, 0xe007f},
                                        {0xf0000, 0xffffd}, {0x100000, 0x10fffd}};
    for (int64_t i = 0; i < MT_LEN(ranges); i++)
        if (c >= ranges[i][0] && c <= ranges[i][1]) return true;
    return false;
}

/* Chooses quotes as Python does. */
static void put_repr(struct text_buf *t, struct value v)
{
    bool single = v.size && memchr(v.s, '\'', (size_t)v.size), two = v.size && memchr(v.s, '"', (size_t)v.size);
    const char quote = single && !two ? '"' : '\'';
    text_put_bytes(t, &quote, 1);
    for (int64_t i = 0, n; i < v.size; i += n) {
        n = utf8_size(v.s + i, v.size - i);
        const int32_t c = utf8_code(v.s + i, v.size - i);
        const char *at =
            c && (c < 32 || c == '\\') ? strchr("\tt\nn\rr\\\\", c) : NULL; /* pairs: the character, then its letter */
        char escape[16];
        if (at || c == quote)
            snprintf(escape, sizeof(escape), "\\%c", at ? at[1] : quote);
        else if (c < 32 || c == 127 || is_hidden(c))
            snprintf(escape, sizeof(escape), c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
        else
            snprintf(escape, sizeof(escape), "%.*s", (int)n, v.s + i);
        text_put(t, escape);
    }
    text_put_bytes(t, &quote, 1);
}

static void print_at(struct jinja_state *st, struct text_buf *t, struct value v, bool quoted, int depth)
{
    if (!may_print(st, depth)) return;
    switch (v.kind) {
    case VALUE_UNDEFINED: return;
    case VALUE_NONE: text_put(t, "None"); return;
    case VALUE_BOOL: text_put(t, v.truth ? "True" : "False"); return;
    case VALUE_INT: put_int(t, v.i); return;
    case VALUE_FLOAT:
        if (v.digits && jinja_charge(st, (int64_t)strlen(v.digits)))
            text_put(t, v.digits);
        else if (jinja_charge(st, JINJA_FLOAT))
            text_put_float(t, v.f);
        return;
    case VALUE_STRING:
        if (!jinja_charge(st, quoted ? 4 * v.size : v.size)) return; /* an escape has four bytes */
        if (quoted)
            put_repr(t, v);
        else
            text_put_bytes(t, v.s ? v.s : "", v.size);
        return;
    case VALUE_LIST:
        text_put(t, v.list->tuple ? "(" : "[");
        for (int64_t i = 0; i < v.list->count && !st->failed; i++) {
            if (i) text_put(t, ", ");
            print_at(st, t, v.list->items[i], true, depth + 1);
        }
        text_put(t, !v.list->tuple ? "]" : v.list->count == 1 ? ",)" : ")");
        return;
    case VALUE_DICT:
        if (v.dict->is_namespace) break;
        text_put(t, "{");
        for (int64_t i = 0; i < v.dict->count && !st->failed; i++) {
            if (i) text_put(t, ", ");
            print_at(st, t, v.dict->keys[i], true, depth + 1);
            text_put(t, ": ");
            print_at(st, t, v.dict->values[i], true, depth + 1);
        }
        text_put(t, "}");
        return;
    case VALUE_LOOP:
    case VALUE_CALLABLE: break;
    }
    jinja_fail(st, "a %s cannot be converted to text", v.kind == VALUE_DICT ? "namespace" : value_kind_name(v));
}

void value_print(struct jinja_state *st, struct text_buf *t, struct value v, bool quoted)
{
    print_at(st, t, v, quoted, 0);
}

struct value value_str(struct jinja_state *st, struct value v)
{
    struct text_buf t = {0};
    if (v.kind == VALUE_STRING) return v;
    value_print(st, &t, v, false);
    return value_take(st, &t);
}

static void put_line(struct jinja_state *st, struct text_buf *t, int64_t indent, int depth)
{
    if (indent < 0 || !jinja_charge(st, indent * depth + 1)) return;
    text_put(t, "\n");
    for (int64_t i = 0; i < indent * depth; i++) text_put(t, " ");
}

/* Writes a JSON string. An escape makes at most six bytes of one byte. */
static void tojson_string(struct jinja_state *st, struct text_buf *t, struct value v)
{
    const int64_t before = t->size;
    if (!jinja_charge(st, v.size)) return;
    text_put_quoted(t, v.s, v.size);
    jinja_charge(st, MT_MAX(0, t->size - before - v.size));
}

static void put_separator(struct jinja_state *st, struct text_buf *t, struct value separator, const char *usual)
{
    if (separator.kind != VALUE_STRING)
        text_put(t, usual);
    else if (jinja_charge(st, separator.size))
        text_put_bytes(t, separator.s, separator.size);
}

static void tojson_at(struct jinja_state *st, struct text_buf *t, struct value v, const struct tojson *how, int depth);

static void tojson_items(struct jinja_state *st, struct text_buf *t, struct value v, const struct tojson *how,
                         int depth)
{
    bool dict = v.kind == VALUE_DICT;
    int64_t n = dict ? v.dict->count : v.list->count;
    text_put(t, dict ? "{" : "[");
    for (int64_t i = 0; i < n && !st->failed; i++) {
        if (i) put_separator(st, t, how->item, how->indent < 0 ? ", " : ",");
        put_line(st, t, how->indent, depth + 1);
        if (dict) {
            struct value key = v.dict->keys[i];
            if (key.kind != VALUE_STRING)
                jinja_fail(st, "tojson: a key is not a string");
            else
                tojson_string(st, t, key);
            put_separator(st, t, how->key, ": ");
        }
        tojson_at(st, t, dict ? v.dict->values[i] : v.list->items[i], how, depth + 1);
    }
    if (n) put_line(st, t, how->indent, depth);
    text_put(t, dict ? "}" : "]");
}

static void tojson_at(struct jinja_state *st, struct text_buf *t, struct value v, const struct tojson *how, int depth)
{
    if (!may_print(st, depth)) return;
    switch (v.kind) {
    case VALUE_NONE: text_put(t, "null"); return;
    case VALUE_BOOL: text_put(t, v.truth ? "true" : "false"); return;
    case VALUE_FLOAT:
        if (!v.digits && !isfinite(v.f)) {
            text_put(t, isnan(v.f) ? "NaN" : v.f > 0 ? "Infinity" : "-Infinity");
            return;
        }
        print_at(st, t, v, false, depth);
        return;
    case VALUE_INT: print_at(st, t, v, false, depth); return;
    case VALUE_STRING: tojson_string(st, t, v); return;
    case VALUE_LIST: tojson_items(st, t, v, how, depth); return;
    case VALUE_DICT:
        if (v.dict->is_namespace) break;
        tojson_items(st, t, v, how, depth);
        return;
    case VALUE_UNDEFINED: jinja_fail(st, "tojson: '%.*s' is undefined", (int)v.size, v.s); return;
    case VALUE_LOOP:
    case VALUE_CALLABLE: break;
    }
    jinja_fail(st, "tojson: a %s cannot be written as JSON", v.kind == VALUE_DICT ? "namespace" : value_kind_name(v));
}

void value_tojson(struct jinja_state *st, struct text_buf *t, struct value v, const struct tojson *how)
{
    tojson_at(st, t, v, how, 0);
}

/* ---- UTF-8; malformed text counts byte by byte ---- */

int64_t utf8_size(const char *s, int64_t size)
{
    const unsigned char c = (unsigned char)s[0];
    int64_t n = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    return MT_MIN(n, size);
}

int32_t utf8_code(const char *s, int64_t size)
{
    int64_t n = utf8_size(s, size);
    int32_t code = (unsigned char)s[0];
    if (n > 1) code &= 0xff >> (n + 1);
    for (int64_t i = 1; i < n; i++) code = code << 6 | (s[i] & 0x3f);
    return code;
}

bool utf8_space(int32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

int64_t utf8_count(const char *s, int64_t size)
{
    int64_t n = 0;
    for (int64_t i = 0; i < size; i++) n += (s[i] & 0xc0) != 0x80;
    return n;
}
