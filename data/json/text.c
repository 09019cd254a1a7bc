/* text.c - see text.h. */
#include "data/json/text.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void text_free(struct text_buf *t)
{
    mem_free(t->text);
    mem_free(t->spans);
    *t = (struct text_buf){0};
}

void text_span(struct text_buf *t, int64_t begin, int64_t end)
{
    t->spans = mem_reserve(t->spans, &t->cap_spans, t->n_spans + 1, sizeof(*t->spans));
    t->spans[t->n_spans][0] = begin;
    t->spans[t->n_spans++][1] = end;
}

void text_trim(const char **text, int64_t *size)
{
    while (*size && text_is_space(**text)) ++*text, --*size;
    while (*size && text_is_space((*text)[*size - 1])) --*size;
}

bool text_is_blank(const char *text, int64_t size)
{
    text_trim(&text, &size);
    return !size;
}

bool text_is_blank_json(struct json j)
{
    const char *s;
    int64_t size;
    return json_str(j, &s, &size, NULL) ? !json_truthy(j) : text_is_blank(s, size);
}

void text_put_bytes(struct text_buf *t, const char *text, int64_t size)
{
    t->text = mem_reserve(t->text, &t->cap, t->size + size + 1, 1);
    if (size) memcpy(t->text + t->size, text, (size_t)size); /* text may be NULL */
    t->size += size;
    t->text[t->size] = 0;
}

void text_put_base64(struct text_buf *t, const void *data, int64_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *from = data;
    t->text = mem_reserve(t->text, &t->cap, t->size + (n + 2) / 3 * 4 + 1, 1);
    for (int64_t i = 0; i < n; i += 3) {
        const uint32_t v = (uint32_t)from[i] << 16 | (i + 1 < n ? (uint32_t)from[i + 1] << 8 : 0) |
                           (i + 2 < n ? (uint32_t)from[i + 2] : 0);
        for (int k = 0; k < 4; k++) t->text[t->size++] = i + k <= n ? digits[v >> (18 - 6 * k) & 63] : '=';
    }
    t->text[t->size] = 0;
}

void text_put(struct text_buf *t, const char *text) { text_put_bytes(t, text, (int64_t)strlen(text)); }

void text_put_quoted(struct text_buf *t, const char *s, int64_t size)
{
    text_put(t, "\"");
    for (int64_t i = 0, done = 0; i <= size; i++) {
        unsigned char c = i < size ? (unsigned char)s[i] : 0;
        if (i < size && c >= 32 && c != '"' && c != '\\') continue;
        text_put_bytes(t, s + done, i - done);
        done = i + 1;
        if (i == size) break;
        char escape[8];
        const char *at = c ? strchr("\bb\tt\nn\ff\rr\"\"\\\\", c) : NULL; /* pairs: the character, then its letter */
        if (at)
            snprintf(escape, sizeof(escape), "\\%c", at[1]);
        else
            snprintf(escape, sizeof(escape), "\\u%04x", c);
        text_put(t, escape);
    }
    text_put(t, "\"");
}

void text_put_string(struct text_buf *t, const char *s) { text_put_quoted(t, s, (int64_t)strlen(s)); }

void text_put_comma(struct text_buf *t)
{
    if (!strchr("[{", t->text[t->size - 1])) text_put(t, ", ");
}

void text_put_key(struct text_buf *t, const char *key)
{
    text_put_comma(t);
    if (!key) return;
    text_put_string(t, key);
    text_put(t, ": ");
}

/* Removes the zeros at the end of the digits of "1.2300e+05"; returns how many digits remain. */
static int shorten(char *text)
{
    char *point = strchr(text, '.'), *exponent = strchr(text, 'e'), *end = exponent;
    while (end[-1] == '0') end--;
    const int digits = (int)(end - point);
    if (end == point + 1) end--;
    memmove(end, exponent, strlen(exponent) + 1);
    return digits;
}

/* Writes the shortest digits that read back to the same value; with an exponent outside 1e-4 to 1e16, as in Python. */
void text_put_float(struct text_buf *t, double v)
{
    char text[64];
    int digits = fabs(v) < DBL_MIN ? 0 : 14; /* subnormal numbers have fewer digits than 15 */
    if (!isfinite(v)) {
        text_put(t, isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
        return;
    }
    do snprintf(text, sizeof(text), "%.*e", digits++, v);
    while (digits < 17 && strtod(text, NULL) != v);
    if (digits == 15) digits = shorten(text); /* at most 15 digits: these, and zeros after them */
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16) snprintf(text, sizeof(text), "%.*f", MT_MAX(digits - 1 - exponent, 1), v);
    text_put(t, text);
}

int text_put_number(struct text_buf *t, struct json j, struct err *err)
{
    int64_t i;
    double f;
    char text[32];
    if (json_wide(j)) {
        text_put(t, json_wide(j));
        return 0;
    }
    if (json_type(j) == JSON_REAL) {
        if (json_f64(j, &f, err)) return -1;
        text_put_float(t, f);
        return 0;
    }
    if (json_i64(j, INT64_MIN, INT64_MAX, &i, err)) return -1;
    snprintf(text, sizeof(text), "%lld", (long long)i);
    text_put(t, text);
    return 0;
}

int text_put_json(struct text_buf *t, struct json j, struct err *err)
{
    const bool object = json_type(j) == JSON_OBJECT;
    const char *s;
    int64_t size;
    struct json value;
    switch (json_type(j)) {
    case JSON_ABSENT: return json_error(j, err, "is missing");
    case JSON_NULL: text_put(t, "null"); return 0;
    case JSON_BOOL: text_put(t, json_truthy(j) ? "true" : "false"); return 0;
    case JSON_INT:
    case JSON_REAL: return text_put_number(t, j, err);
    case JSON_STRING:
        if (json_str(j, &s, &size, err)) return -1;
        text_put_quoted(t, s, size);
        return 0;
    case JSON_OBJECT:
    case JSON_ARRAY: break;
    }
    text_put(t, object ? "{" : "[");
    for (int64_t i = 0; json_item(j, i, &s, &value); i++) {
        text_put_key(t, s);
        if (text_put_json(t, value, err)) return -1;
    }
    text_put(t, object ? "}" : "]");
    return 0;
}
