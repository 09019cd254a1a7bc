/* json_rewrite.c - see json_rewrite.h. Published files hold int(1e30), Infinity, and halves of surrogate pairs, mostly
 * under keys that moetrain does not use. */
#include "data/json/json_rewrite.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

struct copy {
    const char *at, *end;
    char *out;
    int64_t size, cap;
    bool changed;
};

static void put(struct copy *c, const char *text, int64_t n)
{
    c->out = mem_reserve(c->out, &c->cap, c->size + n, 1);
    memcpy(c->out + c->size, text, (size_t)n);
    c->size += n;
}

static void put_marked(struct copy *c, const char *begin, const char *text, int64_t n)
{
    put(c, begin, (int64_t)strlen(begin));
    put(c, text, n);
    put(c, "\"", 1);
    c->changed = true;
}

/* -0.5e+3 */
static bool is_number(const char *s)
{
    static const char digits[] = "0123456789";
    s += *s == '-';
    size_t run = strspn(s, digits);
    if (!run || (*s == '0' && run > 1)) return false;
    s += run;
    if (*s == '.') {
        if (!(run = strspn(s + 1, digits))) return false;
        s += 1 + run;
    }
    if (*s == 'e' || *s == 'E') {
        s += 1 + (s[1] == '-' || s[1] == '+');
        if (!(run = strspn(s, digits))) return false;
        s += run;
    }
    return !*s;
}

/* The name of a number that neither int64 nor double holds: its digits, Infinity or -Infinity. NULL: another number, or
 * no number. */
static const char *wide_name(const char *number)
{
    if (!is_number(number)) return NULL;
    errno = 0;
    if (strpbrk(number, ".eE")) return !isinf(strtod(number, NULL)) ? NULL : *number == '-' ? "-Infinity" : "Infinity";
    (void)strtoll(number, NULL, 10);
    return errno == ERANGE ? number : NULL;
}

static bool begins(const struct copy *c, const char *word)
{
    const size_t n = strlen(word);
    return (size_t)(c->end - c->at) >= n && !memcmp(c->at, word, n);
}

static void copy_number(struct copy *c)
{
    static const char *const words[] = {"NaN", "Infinity", "-Infinity"};
    const char *begin = c->at, *name = NULL;
    for (int64_t i = 0; i < MT_LEN(words) && !name; i++)
        if (begins(c, words[i])) name = words[i];
    if (name) {
        c->at += strlen(name);
        put_marked(c, "\"\\u0000#", name, (int64_t)strlen(name));
        return;
    }
    while (c->at < c->end && *c->at && strchr("+-.0123456789eE", *c->at)) c->at++;
    const int64_t n = MT_MAX(c->at - begin, 1); /* of another word: its first letter */
    c->at = begin + n;
    char *number = mem_strndup(begin, n);
    if ((name = wide_name(number)))
        put_marked(c, "\"\\u0000#", name, (int64_t)strlen(name));
    else
        put(c, begin, n);
    mem_free(number);
}

/* The 16 bits of the escape \uXXXX at s, or -1. */
static int unit_at(const char *s, const char *end)
{
    int value = 0;
    if (end - s < 6 || s[0] != '\\' || s[1] != 'u') return -1;
    for (int i = 2; i < 6; i++) {
        static const char digits[] = "0123456789abcdefABCDEF";
        const char *d = s[i] ? strchr(digits, s[i]) : NULL;
        if (!d) return -1;
        value = value * 16 + (int)(d - digits) - (d - digits > 15 ? 6 : 0);
    }
    return value;
}

static bool is_high(int unit) { return unit >= 0xd800 && unit <= 0xdbff; }
static bool is_low(int unit) { return unit >= 0xdc00 && unit <= 0xdfff; }

/* Bytes of the character, escape or pair of escapes at s. *half: half of a pair; *nul: \u0000. */
static int64_t character(const char *s, const char *end, bool *half, bool *nul)
{
    const int unit = unit_at(s, end);
    *half = *nul = false;
    if (unit < 0) return *s == '\\' && end - s > 1 ? 2 : 1;
    if (is_high(unit) && is_low(unit_at(s + 6, end))) return 12;
    *half = is_high(unit) || is_low(unit);
    *nul = unit == 0;
    return 6;
}

static bool is_key(const char *after, const char *end)
{
    while (after < end && strchr(" \t\r\n", *after)) after++;
    return after < end && *after == ':';
}

static void copy_string(struct copy *c)
{
    const char *close = c->at + 1;
    bool half, nul, any_half = false, any_nul = false;
    for (; close < c->end && *close != '"'; any_half |= half, any_nul |= nul)
        close += character(close, c->end, &half, &nul);
    const bool key = is_key(MT_MIN(close + 1, c->end), c->end);
    put(c, "\"", 1);
    if (any_half && !key)
        put(c, "\\u0000?", 7);
    else if (!key && unit_at(c->at + 1, c->end) == 0)
        put(c, "\\u0000=", 7);
    for (c->at++; c->at < MT_MIN(close, c->end);) {
        const int64_t n = character(c->at, c->end, &half, &nul);
        if (half || (nul && key))
            put(c, REPLACEMENT, 3);
        else
            put(c, c->at, n);
        c->at += n;
    }
    c->changed |= any_half || (any_nul && key);
    if (c->at < c->end) put(c, c->at++, 1);
}

int64_t json_rewrite(const char *text, int64_t size, char **out)
{
    struct copy c = {.at = text, .end = text + size};
    while (c.at < c.end) {
        if (*c.at == '"')
            copy_string(&c);
        else if (*c.at && strchr("-0123456789NI", *c.at))
            copy_number(&c);
        else
            put(&c, c.at++, 1);
    }
    *out = c.out;
    return c.changed ? c.size : 0;
}
