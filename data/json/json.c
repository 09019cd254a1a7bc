/* json.c - a thin layer over jansson: parse, typed getters whose errors name file and key, and a small writer. */
#include "data/json/json.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json_rewrite.h"

/* jansson's json_type and JSON_* are renamed here to avoid clashes. Its json_is_*() macros would mix both sets, so this
 * file uses only our json_type(). */
#define json_type   JANSSON_TYPE
#define JSON_OBJECT JANSSON_OBJECT
#define JSON_ARRAY  JANSSON_ARRAY
#define JSON_STRING JANSSON_STRING
#define JSON_REAL   JANSSON_REAL
#define JSON_NULL   JANSSON_NULL
#include <jansson.h>
#undef json_type
#undef JSON_OBJECT
#undef JSON_ARRAY
#undef JSON_STRING
#undef JSON_REAL
#undef JSON_NULL

#define MAX_DEPTH 256
#define N_CURSORS 8

/* Position of the last json_member of an object, so that iterating over it is linear. */
struct cursor {
    const void *node;
    int64_t i;
    void *iter;
};

struct json_doc {
    char *name;
    json_t *root;
    bool marked;                      /* strings with a json_mark stand for values that jansson does not have */
    struct cursor cursors[N_CURSORS]; /* latest first, one for each object of a nested iteration */
};

/* ---- reading ---- */

/* Refuses nesting beyond MAX_DEPTH and too many values before jansson, which recurses without a limit, sees them. */
static int check_size(const char *text, int64_t size, int64_t max_values, const char *name, struct err *err)
{
    int depth = 0;
    int64_t values = 1;
    bool in_string = false;
    for (int64_t i = 0; i < size; i++) {
        char c = text[i];
        if (c == '"') in_string = !in_string;
        if (in_string)
            i += c == '\\'; /* the next byte is escaped */
        else if (c == '{' || c == '[') {
            values++;
            if (++depth > MAX_DEPTH)
                return err_set(err, "%s: not valid JSON: byte %" PRId64 ": nested deeper than %d levels", name, i,
                               MAX_DEPTH);
        } else if (c == '}' || c == ']')
            depth--;
        else
            values += c == ',' || c == ':';
    }
    if (values <= max_values) return 0;
    return err_set(err, "%s: %" PRId64 " JSON values, more than the %" PRId64 " allowed in one text", name, values,
                   max_values);
}

/* jansson does not check every allocation (a failed one may truncate a string or trip an assertion), so its allocator
 * never returns NULL. */
static void *never_null(size_t n) { return mem_alloc((int64_t)MT_MIN(n, (size_t)INT64_MAX)); }
static void use_our_memory(void) { json_set_alloc_funcs(never_null, mem_free); }

static json_t *load(const char *text, int64_t size, size_t flags, json_error_t *e)
{
    json_t *root = json_loadb(text, (size_t)size, flags | JSON_ALLOW_NUL | JSON_DECODE_ANY, e);
    for (char *p = e->text; !root && *p; p++) /* jansson quotes the file; a message is one line */
        if ((unsigned char)*p < 32) *p = ' ';
    return root;
}

/* Parses what Python's json reads and jansson does not. With any_keys the last of duplicate keys counts, with a
 * warning. e->position is -1 if the error is in the rewritten copy. */
static json_t *load_as_python(struct json_doc *doc, const char *text, int64_t size, bool any_keys, json_error_t *e)
{
    json_error_t again;
    char *copy = NULL;
    json_t *root = NULL;
    const int64_t n = json_rewrite(text, size, &copy);
    doc->marked = n > 0;
    if (n && !(root = load(copy, n, JSON_REJECT_DUPLICATES, &again))) {
        *e = again;
        e->position = -1; /* of the copy */
    }
    if (!root && any_keys && strstr(e->text, "duplicate object key") &&
        (root = load(n ? copy : text, n ? n : size, 0, &again)))
        log_warn("%s: line %d: %s: the last one counts, as in Python", doc->name, e->line, e->text);
    mem_free(copy);
    return root;
}

/* Writes "line 2, byte 17: ". `lines` false: without the line, as a text of one line is often a row of a file, whose
 * line is in `name`. */
static const char *place_of(char text[64], const json_error_t *e, int64_t mark, bool lines)
{
    int n = lines ? snprintf(text, 64, "line %d%s", e->line, e->position < 0 ? ": " : ", ") : 0;
    text[n] = 0;
    if (e->position >= 0) snprintf(text + n, 64 - (size_t)n, "byte %lld: ", (long long)(e->position + mark));
    return text;
}

static struct json_doc *parse(const char *text, int64_t size, int64_t max_values, bool any_keys, const char *name,
                              struct err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    json_error_t e;
    unsigned byte;
    char place[64];
    const int64_t mark = size >= 3 && !memcmp(text, "\xef\xbb\xbf", 3) ? 3 : 0; /* of UTF-8, as some editors write it */
    text += mark;
    size -= mark;
    if (size > INT32_MAX) { /* jansson counts bytes in an int */
        err_set(err, "%s: larger than 2 GiB", name);
        return NULL;
    }
    pthread_once(&once, use_our_memory);
    if (check_size(text, size, max_values, name, err)) return NULL;
    struct json_doc *doc = mem_alloc(sizeof(*doc));
    doc->name = mem_strdup(name);
    if ((doc->root = load(text, size, JSON_REJECT_DUPLICATES, &e))) return doc;
    if ((doc->root = load_as_python(doc, text, size, any_keys, &e))) return doc;
    if (sscanf(e.text, "unable to decode byte 0x%x", &byte) == 1)
        err_set(err, "%s is not UTF-8 (byte 0x%02x): convert the file, as with iconv -f WINDOWS-1252 -t UTF-8", name,
                byte);
    else
        err_set(err, "%s: not valid JSON: %s%s", name,
                place_of(place, &e, mark, memchr(text, '\n', (size_t)size) != NULL), e.text);
    json_free(doc);
    return NULL;
}

struct json_doc *json_parse(const char *text, int64_t size, const char *name, struct err *err)
{
    return parse(text, size, JSON_VALUES, false, name, err);
}

struct json_doc *json_parse_row(const char *text, int64_t size, int64_t max_values, const char *name, struct err *err)
{
    return parse(text, size, max_values, false, name, err);
}

struct json_doc *json_load(const char *path, int64_t max_bytes, struct err *err)
{
    int64_t size;
    char *text = file_read(path, max_bytes, &size, err);
    if (!text) return NULL;
    struct json_doc *doc = parse(text, size, JSON_VALUES, true, path, err);
    mem_free(text);
    return doc;
}

struct json_doc *json_load_in(const char *dir, const char *name, int64_t max_bytes, struct err *err)
{
    char path[MT_PATH];
    return file_in(path, dir, name, err) ? NULL : json_load(path, max_bytes, err);
}

void json_free(struct json_doc *doc)
{
    if (!doc) return;
    json_decref(doc->root); /* accepts NULL */
    mem_free(doc->name);
    mem_free(doc);
}

struct json json_root(const struct json_doc *doc) { return (struct json){.node = doc->root, .doc = doc}; }

static enum json_mark mark_of(struct json j)
{
    if (!j.doc->marked || json_typeof((const json_t *)j.node) != JANSSON_STRING) return JSON_MARK_NONE;
    const char *s = json_string_value(j.node);
    return json_string_length(j.node) > 1 && !*s ? (enum json_mark)s[1] : JSON_MARK_NONE;
}

const char *json_wide(struct json j)
{
    return j.node && mark_of(j) == JSON_MARK_NUMBER ? json_string_value(j.node) + 2 : NULL;
}

const char *json_name(struct json j) { return j.doc->name; }

enum json_type json_type(struct json j)
{
    if (!j.node) return JSON_ABSENT;
    if (json_wide(j)) return JSON_REAL;
    switch (json_typeof((const json_t *)j.node)) {
    case JANSSON_OBJECT: return JSON_OBJECT;
    case JANSSON_ARRAY: return JSON_ARRAY;
    case JANSSON_STRING: return JSON_STRING;
    case JSON_INTEGER: return JSON_INT;
    case JANSSON_REAL: return JSON_REAL;
    case JSON_TRUE:
    case JSON_FALSE: return JSON_BOOL;
    case JANSSON_NULL: break;
    }
    return JSON_NULL;
}

/* The child `node` of j under `key`; a path longer than the buffer is truncated. */
static struct json child(const struct json *j, const char *key, const void *node)
{
    struct json c; /* not zeroed: this is called for every member of every row */
    size_t n = strlen(j->path);
    c.node = node;
    c.doc = j->doc;
    memcpy(c.path, j->path, n);
    if (n && n + 1 < sizeof(c.path)) c.path[n++] = '.';
    while (*key && n + 1 < sizeof(c.path)) c.path[n++] = *key++;
    c.path[n] = 0;
    return c;
}

struct json json_find(struct json j, const char *key)
{
    const void *node = json_type(j) == JSON_OBJECT ? json_object_get(j.node, key) : NULL;
    return child(&j, key, node);
}

bool json_given(struct json j) { return json_type(j) != JSON_ABSENT && json_type(j) != JSON_NULL; }

bool json_has(struct json j, const char *key) { return json_find(j, key).node != NULL; }

int64_t json_count(struct json j)
{
    enum json_type t = json_type(j);
    if (t == JSON_ARRAY) return (int64_t)json_array_size(j.node);
    return t == JSON_OBJECT ? (int64_t)json_object_size(j.node) : 0;
}

struct json json_at(struct json j, int64_t i)
{
    struct json c = {.doc = j.doc};
    if (json_type(j) == JSON_ARRAY && i >= 0) c.node = json_array_get(j.node, (size_t)i);
    size_t n = strlen(j.path);
    memcpy(c.path, j.path, n);
    snprintf(c.path + n, sizeof(c.path) - n, "[%" PRId64 "]", i);
    return c;
}

static bool has_null(json_t *node)
{
    const char *key;
    json_t *value;
    size_t i;
    json_array_foreach(node, i, value) if (has_null(value)) return true;
    json_object_foreach(node, key, value) if (json_typeof(value) == JANSSON_NULL || has_null(value)) return true;
    return false;
}

bool json_has_null(struct json j) { return j.node && has_null((json_t *)(uintptr_t)j.node); }

/* The document's cursor on an object, moved to the front; a new one starts at the first member. */
static struct cursor *cursor_of(struct json_doc *doc, const void *node)
{
    struct cursor *c = doc->cursors, found = {.node = node, .iter = json_object_iter((json_t *)(uintptr_t)node)};
    int at = 0;
    while (at < N_CURSORS - 1 && c[at].node != node) at++;
    if (c[at].node == node) found = c[at];
    memmove(c + 1, c, (size_t)at * sizeof(*c));
    c[0] = found;
    return c;
}

bool json_member(struct json j, int64_t i, const char **key, struct json *value)
{
    if (json_type(j) != JSON_OBJECT || i < 0 || i >= json_count(j)) return false;
    json_t *node = (json_t *)(uintptr_t)j.node;
    struct cursor *c = cursor_of((struct json_doc *)(uintptr_t)j.doc, node);
    if (i < c->i) *c = (struct cursor){.node = node, .iter = json_object_iter(node)};
    for (; c->i < i; c->i++) c->iter = json_object_iter_next(node, c->iter);
    *key = json_object_iter_key(c->iter);
    *value = child(&j, *key, json_object_iter_value(c->iter));
    return true;
}

bool json_item(struct json j, int64_t i, const char **key, struct json *value)
{
    *key = NULL;
    if (json_type(j) != JSON_ARRAY) return json_member(j, i, key, value);
    if (i >= json_count(j)) return false;
    *value = json_at(j, i);
    return true;
}

/* ---- typed values ---- */

int json_error(struct json j, struct err *err, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (!j.path[0]) return err_set(err, "%s: %s", j.doc->name, text);
    return err_set(err, "%s: key `%s`: %s", j.doc->name, j.path, text);
}

static int wrong_type(struct json j, const char *wanted, struct err *err)
{
    static const char *const names[] = {
        [JSON_NULL] = "null",       [JSON_BOOL] = "a boolean", [JSON_INT] = "an integer",  [JSON_REAL] = "a number",
        [JSON_STRING] = "a string", [JSON_ARRAY] = "an array", [JSON_OBJECT] = "an object"};
    if (!j.node) return json_error(j, err, "is missing; it must be %s", wanted);
    return json_error(j, err, "must be %s, not %s", wanted, names[json_type(j)]);
}

int json_str(struct json j, const char **out, int64_t *size, struct err *err)
{
    if (json_type(j) != JSON_STRING) return wrong_type(j, "a string", err);
    if (mark_of(j) == JSON_MARK_HALF) return json_error(j, err, "has half of a surrogate pair, which is no character");
    const int64_t skip = mark_of(j) == JSON_MARK_TEXT ? 2 : 0;
    *out = json_string_value(j.node) + skip;
    *size = (int64_t)json_string_length(j.node) - skip;
    return 0;
}

int json_i64(struct json j, int64_t min, int64_t max, int64_t *out, struct err *err)
{
    int64_t v;
    const char *wide = json_wide(j);
    if (wide && strpbrk(wide, "Ny")) return json_error(j, err, "must be an integer, not %s", wide);
    if (wide) return json_error(j, err, "%.40s is not between %" PRId64 " and %" PRId64, wide, min, max);
    if (json_type(j) == JSON_INT)
        v = json_integer_value(j.node);
    else if (json_type(j) == JSON_REAL) { /* 150000.0 is an integer too; above 2^53 a double does not identify one */
        double d = json_real_value(j.node);
        if (!(fabs(d) <= 0x1p53) || d != floor(d)) return json_error(j, err, "must be an integer, not %g", d);
        v = (int64_t)d;
    } else
        return wrong_type(j, "an integer", err);
    if (v < min || v > max)
        return json_error(j, err, "%" PRId64 " is not between %" PRId64 " and %" PRId64, v, min, max);
    *out = v;
    return 0;
}

int json_f64(struct json j, double *out, struct err *err)
{
    if (json_type(j) != JSON_INT && json_type(j) != JSON_REAL) return wrong_type(j, "a number", err);
    const char *wide = json_wide(j);
    const double value = wide ? strtod(wide, NULL) : json_number_value(j.node);
    if (!isfinite(value)) return json_error(j, err, "must be a number that fits in 64 bits, not %.40s", wide);
    *out = value;
    return 0;
}

int json_bool(struct json j, bool *out, struct err *err)
{
    if (json_type(j) != JSON_BOOL) return wrong_type(j, "true or false", err);
    *out = json_typeof((const json_t *)j.node) == JSON_TRUE;
    return 0;
}

static int get_str(struct json j, const char **out, struct err *err)
{
    const char *s = "";
    int64_t size = 0;
    if (json_str(j, &s, &size, err)) return -1;
    if ((int64_t)strlen(s) != size) return json_error(j, err, "contains a NUL character");
    *out = s;
    return 0;
}

int json_get_i64(struct json j, const char *key, int64_t min, int64_t max, int64_t *out, struct err *err)
{
    return json_i64(json_find(j, key), min, max, out, err);
}

int json_get_f64(struct json j, const char *key, double *out, struct err *err)
{
    return json_f64(json_find(j, key), out, err);
}

int json_get_bool(struct json j, const char *key, bool *out, struct err *err)
{
    return json_bool(json_find(j, key), out, err);
}

int json_get_str(struct json j, const char *key, const char **out, struct err *err)
{
    return get_str(json_find(j, key), out, err);
}

int json_get_object(struct json j, const char *key, struct json *out, struct err *err)
{
    *out = json_find(j, key);
    return json_type(*out) == JSON_OBJECT ? 0 : wrong_type(*out, "an object", err);
}

int json_get_array(struct json j, const char *key, struct json *out, struct err *err)
{
    *out = json_find(j, key);
    return json_type(*out) == JSON_ARRAY ? 0 : wrong_type(*out, "an array", err);
}

int json_opt_i64(struct json j, const char *key, int64_t min, int64_t max, int64_t *out, struct err *err)
{
    struct json v = json_find(j, key);
    return json_given(v) ? json_i64(v, min, max, out, err) : 0;
}

int json_opt_f64(struct json j, const char *key, double *out, struct err *err)
{
    struct json v = json_find(j, key);
    return json_given(v) ? json_f64(v, out, err) : 0;
}

int json_opt_bool(struct json j, const char *key, bool *out, struct err *err)
{
    struct json v = json_find(j, key);
    return json_given(v) ? json_bool(v, out, err) : 0;
}

int json_opt_flag(struct json j, const char *key, bool *out, struct err *err)
{
    struct json v = json_find(j, key);
    if (json_type(v) == JSON_NULL) *out = false;
    return json_given(v) ? json_bool(v, out, err) : 0;
}

int json_opt_str(struct json j, const char *key, const char **out, struct err *err)
{
    struct json v = json_find(j, key);
    return json_given(v) ? get_str(v, out, err) : 0;
}

/* ---- writing ---- */

static void put(struct json_out *o, const char *text, int64_t n)
{
    o->text = mem_reserve(o->text, &o->cap, o->size + n + 1, 1);
    memcpy(o->text + o->size, text, (size_t)n);
    o->size += n;
    o->text[o->size] = 0;
}

static void put_text(struct json_out *o, const char *text) { put(o, text, (int64_t)strlen(text)); }

int json_utf8_length(const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) return 1;
    int n = s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : 0;
    for (int i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f)) return 0;
    if ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0;
    return n;
}

static void put_string(struct json_out *o, const char *s)
{
    put_text(o, "\"");
    while (*s) {
        unsigned char c = (unsigned char)*s;
        char escape[8];
        int n = json_utf8_length(s);
        if (n == 0)
            put_text(o, "\xef\xbf\xbd"); /* U+FFFD for an invalid byte */
        else if (c == '"' || c == '\\') {
            snprintf(escape, sizeof(escape), "\\%c", c);
            put_text(o, escape);
        } else if (c < 32) {
            const char *at = strchr("\bb\tt\nn\ff\rr", c); /* pairs: the control character, then its letter */
            if (at)
                snprintf(escape, sizeof(escape), "\\%c", at[1]);
            else
                snprintf(escape, sizeof(escape), "\\u%04x", c);
            put_text(o, escape);
        } else
            put(o, s, n);
        s += n ? n : 1;
    }
    put_text(o, "\"");
}

static void new_line(struct json_out *o)
{
    if (!o->indent) return;
    put_text(o, "\n");
    for (int i = 0; i < o->depth; i++) put_text(o, "  ");
}

/* Writes what precedes a value: comma, line break, key. */
static void begin(struct json_out *o, const char *key)
{
    if (o->depth > 0) {
        if (o->comma) put_text(o, ",");
        new_line(o);
    }
    if (key) {
        put_string(o, key);
        put_text(o, o->indent ? ": " : ":");
    }
    o->comma = true;
}

void json_out_open(struct json_out *o, const char *key, char bracket)
{
    begin(o, key);
    put(o, &bracket, 1);
    o->depth++;
    o->comma = false;
}

void json_out_close(struct json_out *o, char bracket)
{
    o->depth--;
    if (o->comma) new_line(o); /* {} and [] stay on one line */
    put(o, &bracket, 1);
    o->comma = true;
}

void json_out_str(struct json_out *o, const char *key, const char *value)
{
    begin(o, key);
    if (value)
        put_string(o, value);
    else
        put_text(o, "null");
}

void json_out_i64(struct json_out *o, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%" PRId64, value);
    begin(o, key);
    put_text(o, text);
}

/* Writes the fewest digits that read back as the value; 60 is neither 6e+01 nor 60.0. */
static void shortest(char text[32], double value)
{
    snprintf(text, 32, "null");
    if (value == floor(value) && fabs(value) < 1e15 && value != 0) {
        snprintf(text, 32, "%.0f", value);
        return;
    }
    for (int digits = 1; digits <= 17 && isfinite(value); digits++) {
        snprintf(text, 32, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    if (value == 0 && signbit(value)) snprintf(text, 32, "-0.0"); /* "-0" would be read back as an integer */
}

void json_out_f64(struct json_out *o, const char *key, double value)
{
    char text[32];
    shortest(text, value);
    begin(o, key);
    put_text(o, text);
}

void json_out_real(struct json_out *o, const char *key, double value)
{
    char text[32];
    shortest(text, value);
    if (isfinite(value) && !strpbrk(text, ".e")) strcat(text, ".0");
    begin(o, key);
    put_text(o, text);
}

void json_out_raw(struct json_out *o, const char *key, const char *text)
{
    begin(o, key);
    put_text(o, text);
}

void json_out_bool(struct json_out *o, const char *key, bool value) { json_out_raw(o, key, value ? "true" : "false"); }

void json_out_free(struct json_out *o)
{
    mem_free(o->text);
    *o = (struct json_out){0};
}

char *json_out_take(struct json_out *o)
{
    char *text = mem_strndup(o->text, o->size);
    json_out_free(o);
    return text;
}

const char *json_library(char name[64])
{
    snprintf(name, 64, "jansson %s", JANSSON_VERSION);
    return name;
}

bool json_truthy(struct json j)
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
    case JSON_REAL: return json_wide(j) || (!json_f64(j, &number, NULL) && number != 0);
    case JSON_STRING: return !json_str(j, &text, &size, NULL) && size > 0;
    case JSON_ARRAY:
    case JSON_OBJECT: break;
    }
    return json_count(j) > 0;
}
