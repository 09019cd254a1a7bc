/* json_scan.c - see json_scan.h. A tokenizer.json has half a million merges, whose tree would take most of the load
 * time and ten times the file's memory.
 *
 * The cut looks only at strings and brackets. json_parse checks the rest of the text, and the scan checks a part by the
 * whole grammar, so all of the text is checked. If the cut finds something unexpected, json_parse reads the whole
 * text. */
#include "data/tokenizer/json_scan.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "data/tokenizer/normalize.h"

static void skip_blanks(struct json_scan *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\r' || *s->at == '\t')) s->at++;
}

static bool at_char(const struct json_scan *s, char c) { return s->at < s->end && *s->at == c; }

/* ---- strings ---- */

static int hex4(const char *p, const char *end)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    int value = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        const char *d = p[i] ? strchr(digits, p[i]) : NULL;
        if (!d) return -1;
        value = value * 16 + (int)(d - digits) - (d - digits > 15 ? 6 : 0);
    }
    return value;
}

static int64_t put_utf8(char *out, int c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    int64_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int64_t i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)(0xf00 >> n | c);
    return n;
}

/* Decodes the escape at s->at into out and moves s->at past it; returns the bytes written (at most 4), or -1. */
static int64_t unescape(struct json_scan *s, char *out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (s->end - s->at < 2) return -1;
    char name = s->at[1];
    s->at += 2;
    const char *simple = name ? strchr(names, name) : NULL;
    if (simple) {
        *out = values[simple - names];
        return 1;
    }
    int c = name == 'u' ? hex4(s->at, s->end) : -1;
    if (c < 0 || (c >= 0xdc00 && c <= 0xdfff)) return -1;
    s->at += 4;
    if (c < 0xd800 || c > 0xdbff) return put_utf8(out, c);
    int low = s->end - s->at >= 6 && s->at[0] == '\\' && s->at[1] == 'u' ? hex4(s->at + 2, s->end) : -1;
    if (low < 0xdc00 || low > 0xdfff) return -1;
    s->at += 6;
    return put_utf8(out, 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00));
}

/* Reads the string at s->at, a quote: in place, or with its escapes resolved in s->text. */
static int read_string(struct json_scan *s, const char **out, int64_t *size)
{
    const char *begin = ++s->at;
    while (s->at < s->end && *s->at != '"' && *s->at != '\\' && (unsigned char)*s->at >= 32) s->at++;
    if (at_char(s, '"')) {
        *out = begin;
        *size = s->at++ - begin;
        return 0;
    }
    int64_t n = s->at - begin;
    for (bool copied = false;; copied = true) {
        s->text = mem_reserve(s->text, &s->cap, n + 4, 1);
        if (!copied) memcpy(s->text, begin, (size_t)n);
        if (s->at == s->end || (unsigned char)*s->at < 32) return -1;
        if (*s->at == '"') break;
        int64_t used = 1;
        if (*s->at == '\\')
            used = unescape(s, s->text + n);
        else
            s->text[n] = *s->at++;
        if (used < 0) return -1;
        n += used;
    }
    s->at++;
    *out = s->text;
    *size = n;
    return 0;
}

/* ---- the cut ---- */

/* Moves past the value at s->at, looking at strings and brackets only. */
static int skip_value(struct json_scan *s)
{
    const char *begin = s->at;
    int64_t depth = 0;
    for (; s->at < s->end; s->at++) {
        char c = *s->at;
        if (c == '"') {
            for (s->at++; s->at < s->end && *s->at != '"'; s->at++) s->at += *s->at == '\\';
            if (s->at >= s->end) return -1;
        } else if (c == '{' || c == '[')
            depth++;
        else if (c == '}' || c == ']') {
            if (depth == 0) break; /* of the enclosing value */
            if (--depth == 0) {
                s->at++;
                return 0;
            }
        } else if (c == ',' && depth == 0)
            break;
    }
    return s->at > begin && s->at < s->end ? 0 : -1;
}

struct cut {
    const char *const *keys;
    struct json_part *parts;
    int64_t n;
    const char *done; /* the text before it is in `rest` */
    char *rest;
    int64_t rest_size;
};

static void keep(struct cut *c, const char *until)
{
    memcpy(c->rest + c->rest_size, c->done, (size_t)(until - c->done));
    c->rest_size += until - c->done;
    c->done = until;
}

static bool same(const char *key, int64_t size, const char *name)
{
    return (int64_t)strlen(name) == size && !memcmp(key, name, (size_t)size);
}

/* Moves past the value of `key` at s->at, an object or array, and cuts it out if it is a part. */
static int cut_value(struct json_scan *s, struct cut *c, const char *key, int64_t size)
{
    const char *begin = s->at;
    bool bracket = at_char(s, '{') || at_char(s, '[');
    if (skip_value(s)) return -1;
    for (int64_t i = 0; bracket && i < c->n; i++) {
        if (!same(key, size, c->keys[i])) continue;
        c->parts[i] = (struct json_part){begin, s->at - begin};
        keep(c, begin + 1);
        c->done = s->at - 1;
    }
    return 0;
}

/* Iterates the object at s->at: with `parent` the root, with NULL the parent object. */
static int cut_object(struct json_scan *s, struct cut *c, const char *parent)
{
    const char *key;
    int64_t size;
    if (!at_char(s, '{')) return -1;
    for (s->at++;; s->at++) {
        skip_blanks(s);
        if (!at_char(s, '"') || read_string(s, &key, &size)) return -1;
        bool inside = parent && same(key, size, parent);
        skip_blanks(s);
        if (!at_char(s, ':')) return -1;
        s->at++;
        skip_blanks(s);
        if (inside && at_char(s, '{') ? cut_object(s, c, NULL) : parent ? skip_value(s) : cut_value(s, c, key, size))
            return -1;
        skip_blanks(s);
        if (at_char(s, '}')) break;
        if (!at_char(s, ',')) return -1;
    }
    s->at++;
    return 0;
}

struct json_doc *json_scan_without(const char *text, int64_t size, const char *name, const char *parent,
                                   const char *const *keys, struct json_part *parts, int64_t n, struct err *err)
{
    if (size >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) text += 3, size -= 3; /* as json_parse does */
    struct json_scan s = {.at = text, .end = text + size};
    struct cut c = {.keys = keys, .parts = parts, .n = n, .done = text, .rest = mem_alloc(size)};
    struct json_doc *doc = NULL;
    for (int64_t i = 0; i < n; i++) parts[i] = (struct json_part){0};
    skip_blanks(&s);
    if (!cut_object(&s, &c, parent)) {
        keep(&c, s.end);
        doc = json_parse(c.rest, c.rest_size, name, err);
    }
    mem_free(c.rest);
    json_scan_close(&s);
    if (doc) return doc;
    for (int64_t i = 0; i < n; i++) parts[i] = (struct json_part){0};
    return json_parse(text, size, name, err); /* reports the error with its position in the original text */
}

/* ---- the scan ---- */

int json_scan_open(struct json_scan *s, struct json_part part, struct json where, struct err *err)
{
    *s = (struct json_scan){.at = part.text, .end = part.text + part.size, .where = where, .first = true};
    if (!part.text) return json_error(where, err, "is missing, or written with escapes in its key");
    if (utf8_invalid_at(part.text, part.size) >= 0) return json_error(where, err, "is not valid UTF-8");
    s->index = -1;
    s->depth = 1;
    s->at++;
    return 0;
}

void json_scan_close(struct json_scan *s) { mem_free(s->text); }

int json_scan_error(const struct json_scan *s, struct err *err, const char *fmt, ...)
{
    char text[512], key[80];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (!s->key) return json_error(json_at(s->where, s->index), err, "%s", text);
    snprintf(key, sizeof(key), "%.*s", (int)MT_MIN(s->key_size, (int64_t)sizeof(key) - 1), s->key);
    return json_error(json_find(s->where, key), err, "%s", text);
}

static int broken(const struct json_scan *s, struct err *err)
{
    return json_scan_error(s, err, "not valid JSON from here: %.*s", (int)MT_MIN(s->end - s->at, (int64_t)20), s->at);
}

/* s->at is past the opening bracket, which decides whether items have keys: only the outermost may be an object. */
int json_scan_next(struct json_scan *s, struct err *err)
{
    bool object = s->depth == 1 && s->end[-1] == '}';
    skip_blanks(s);
    if (at_char(s, object ? '}' : ']')) {
        s->at++;
        s->depth--;
        s->first = false;
        if (s->depth > 0 || s->at == s->end) return 0;
        return broken(s, err);
    }
    if (!s->first && !at_char(s, ',')) return broken(s, err);
    s->at += !s->first;
    s->first = false;
    s->index += s->depth == 1;
    skip_blanks(s);
    if (!object) return 1;
    s->key = NULL;
    if (!at_char(s, '"') || read_string(s, &s->key, &s->key_size)) return broken(s, err);
    skip_blanks(s);
    if (!at_char(s, ':')) return broken(s, err);
    s->at++;
    skip_blanks(s);
    return 1;
}

bool json_scan_is_array(const struct json_scan *s) { return at_char(s, '['); }

static int wrong_type(const struct json_scan *s, const char *wanted, struct err *err)
{
    static const struct {
        char first;
        const char *name;
    } rows[] = {{'"', "a string"}, {'[', "an array"},  {'{', "an object"},
                {'n', "null"},     {'t', "a boolean"}, {'f', "a boolean"}};
    const char *name = s->at < s->end && strchr("-0123456789", *s->at) ? "a number" : NULL;
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        if (at_char(s, rows[i].first)) name = rows[i].name;
    if (!name) return broken(s, err);
    return json_scan_error(s, err, "must be %s, not %s", wanted, name);
}

int json_scan_array(struct json_scan *s, struct err *err)
{
    if (!at_char(s, '[')) return wrong_type(s, "an array", err);
    s->at++;
    s->depth++;
    s->first = true;
    return 0;
}

int json_scan_str(struct json_scan *s, const char **out, int64_t *size, struct err *err)
{
    if (!at_char(s, '"')) return wrong_type(s, "a string", err);
    return read_string(s, out, size) ? broken(s, err) : 0;
}

int json_scan_i64(struct json_scan *s, int64_t min, int64_t max, int64_t *out, struct err *err)
{
    const char *begin = s->at;
    bool negative = at_char(s, '-');
    int64_t value = 0;
    for (s->at += negative; s->at < s->end && *s->at >= '0' && *s->at <= '9'; s->at++)
        if (value < INT64_MAX / 10 - 1) value = 10 * value + (*s->at - '0');
    int64_t digits = s->at - begin - negative;
    bool whole = digits > 0 && (digits == 1 || begin[negative] != '0');
    if (!whole || at_char(s, '.') || at_char(s, 'e') || at_char(s, 'E')) {
        s->at = begin;
        return wrong_type(s, "an integer", err);
    }
    if (negative) value = -value;
    if (value < min || value > max)
        return json_scan_error(s, err, "%.*s is not between %lld and %lld", (int)MT_MIN(s->at - begin, (int64_t)20),
                               begin, (long long)min, (long long)max);
    *out = value;
    return 0;
}
