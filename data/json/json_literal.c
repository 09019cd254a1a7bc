/* json_literal.c - see json_literal.h. */
#include "data/json/json_literal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64

struct literal {
    const char *p, *end;
    struct text_buf *out;
    int depth;
};

static char skip(struct literal *l)
{
    while (l->p < l->end && text_is_space(*l->p)) l->p++;
    return l->p < l->end ? *l->p : 0;
}

static bool take(struct literal *l, const char *word)
{
    const size_t n = strlen(word);
    if ((size_t)(l->end - l->p) < n || memcmp(l->p, word, n) != 0) return false;
    l->p += n;
    return true;
}

/* ---- texts */

/* A code point of n hexadecimal digits, as an escape of JSON. */
static bool put_code(struct literal *l, int n)
{
    char digits[9] = "", text[16];
    if (l->end - l->p < n) return false;
    memcpy(digits, l->p, (size_t)n);
    if (strspn(digits, "0123456789abcdefABCDEF") != (size_t)n) return false;
    l->p += n;
    const unsigned long c = strtoul(digits, NULL, 16);
    if (c > 0x10ffff) return false;
    if (c < 0x10000)
        snprintf(text, sizeof(text), "\\u%04lx", c);
    else
        snprintf(text, sizeof(text), "\\u%04lx\\u%04lx", 0xd800 + ((c - 0x10000) >> 10), 0xdc00 + (c & 0x3ff));
    text_put(l->out, text);
    return true;
}

static bool put_escape(struct literal *l)
{
    static const char *const same = "\\\"nrtbf"; /* escapes of JSON too */
    char text[3] = "\\";
    if (l->p == l->end) return false;
    const char c = *l->p++;
    switch (c) {
    case 'x': return put_code(l, 2);
    case 'u': return put_code(l, 4);
    case 'U': return put_code(l, 8);
    case 'a': text_put(l->out, "\\u0007"); return true;
    case 'v': text_put(l->out, "\\u000b"); return true;
    case '\'': text_put(l->out, "'"); return true;
    case '/': text_put(l->out, "/"); return true;
    default: break;
    }
    if (!c || !strchr(same, c)) return false;
    text[1] = c;
    text_put(l->out, text);
    return true;
}

static bool put_text(struct literal *l)
{
    const char quote = *l->p++, *from = l->p;
    text_put(l->out, "\"");
    for (;; from = l->p) {
        while (l->p < l->end && *l->p != quote && *l->p != '\\' && *l->p != '"' && (unsigned char)*l->p >= 32) l->p++;
        text_put_bytes(l->out, from, l->p - from);
        if (l->p == l->end) return false;
        const char c = *l->p++;
        char escape[8];
        if (c == quote) break;
        if (c == '\\') {
            if (!put_escape(l)) return false;
            continue;
        }
        snprintf(escape, sizeof(escape), c == '"' ? "\\\"" : "\\u%04x", (unsigned char)c);
        text_put(l->out, escape);
    }
    text_put(l->out, "\"");
    return true;
}

/* ---- values */

static bool put_value(struct literal *l);

static bool put_number(struct literal *l)
{
    const char *from = l->p;
    while (l->p < l->end && (isdigit((unsigned char)*l->p) || strchr("+-.eE", *l->p))) l->p++;
    if (l->p == from || l->p[-1] == '-' || *from == '+' || *from == '.') return false;
    text_put_bytes(l->out, from, l->p - from);
    if (l->p[-1] == '.') text_put(l->out, "0"); /* numpy prints 1. */
    return true;
}

static bool put_word(struct literal *l)
{
    static const char *const words[][2] = {
        {"True", "true"}, {"False", "false"}, {"None", "null"}, {"true", "true"},    {"false", "false"},
        {"null", "null"}, {"nan", "NaN"},     {"NaN", "NaN"},   {"inf", "Infinity"}, {"-inf", "-Infinity"}};
    for (int64_t i = 0; i < MT_LEN(words); i++)
        if (take(l, words[i][0])) {
            text_put(l->out, words[i][1]);
            return true;
        }
    return put_number(l);
}

/* array([...], dtype=object) */
static bool put_array(struct literal *l)
{
    if (skip(l) != '[' || !put_value(l)) return false;
    if (skip(l) == ',') {
        l->p++;
        skip(l);
        if (!take(l, "dtype=")) return false;
        while (l->p < l->end && *l->p != ')') l->p++;
    }
    return take(l, ")");
}

static bool put_items(struct literal *l, char close)
{
    const bool object = close == '}';
    l->p++;
    text_put(l->out, object ? "{" : "[");
    for (char c; (c = skip(l)) != close;) {
        if (!c) return false;
        text_put_comma(l->out);
        if (object) {
            if ((c != '\'' && c != '"') || !put_text(l) || skip(l) != ':') return false;
            l->p++;
            text_put(l->out, ": ");
        }
        if (!put_value(l)) return false;
        if (skip(l) == ',') l->p++;
    }
    l->p++;
    text_put(l->out, object ? "}" : "]");
    return true;
}

static bool put_value(struct literal *l)
{
    const char c = skip(l);
    if (c == '\'' || c == '"') return put_text(l);
    if (c != '[' && c != '(' && c != '{' && c != 'a') return put_word(l);
    if (l->depth >= MAX_DEPTH) return false;
    l->depth++;
    const bool good = c == 'a' ? take(l, "array(") && put_array(l)
                               : put_items(l, c == '['   ? ']'
                                              : c == '(' ? ')'
                                                         : '}');
    l->depth--;
    return good;
}

bool json_literal(struct text_buf *out, const char *text, int64_t size)
{
    struct literal l = {.p = text, .end = text + size, .out = out};
    const int64_t before = out->size;
    const char c = skip(&l);
    if ((c == '[' || c == '(' || c == '{' || c == 'a') && put_value(&l) && !skip(&l)) return true;
    out->size = before;
    return false;
}
