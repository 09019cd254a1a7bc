/* header_scan.c - see header_scan.h. A tree of JSON takes ten times as long: half a second for a model of 90,000
 * tensors. */
#include "data/header_scan.h"

#include <string.h>

#include "kernels/base.h"

static void skip_space(struct header_scan *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\t' || *s->at == '\r')) s->at++;
}

static bool take(struct header_scan *s, char c)
{
    skip_space(s);
    const bool is = s->at < s->end && *s->at == c;
    s->at += is;
    return is;
}

static bool take_text(struct header_scan *s, struct header_text *t)
{
    if (!take(s, '"')) return false;
    t->at = s->at;
    while (s->at < s->end && *s->at >= ' ' && *s->at <= '~' && *s->at != '"' && *s->at != '\\') s->at++;
    t->n = s->at - t->at;
    return s->at < s->end && *s->at++ == '"';
}

static bool is(const struct header_text *t, const char *word)
{
    return t->n == (int64_t)strlen(word) && !memcmp(t->at, word, (size_t)t->n);
}

static bool take_number(struct header_scan *s, int64_t *v)
{
    skip_space(s);
    const char *first = s->at;
    for (*v = 0; s->at < s->end && *s->at >= '0' && *s->at <= '9' && s->at - first < 19; s->at++)
        *v = *v * 10 + (*s->at - '0');
    const int64_t n = s->at - first;
    return n > 0 && n < 19 && (n == 1 || *first != '0');
}

/* Reads a list of numbers and returns its length; -1: it is not such a list, or has more than `most`. */
static int take_numbers(struct header_scan *s, int64_t *v, int most)
{
    if (!take(s, '[')) return -1;
    if (take(s, ']')) return 0;
    for (int n = 0; n < most && take_number(s, &v[n]); n++) {
        if (take(s, ']')) return n + 1;
        if (!take(s, ',')) return -1;
    }
    return -1;
}

static bool take_tensor(struct header_scan *s, struct header_entry *e)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    int seen = 0;
    for (int i = 0; i < 3; i++) {
        struct header_text key;
        if (!take(s, i ? ',' : '{') || !take_text(s, &key) || !take(s, ':')) return false;
        if (is(&key, "dtype") && take_text(s, &e->dtype))
            seen |= DTYPE;
        else if (is(&key, "shape") && (e->ndim = take_numbers(s, e->shape, MT_LEN(e->shape))) >= 0)
            seen |= SHAPE;
        else if (is(&key, "data_offsets") && take_numbers(s, e->offsets, 2) == 2)
            seen |= OFFSETS;
        else
            return false;
    }
    return seen == (DTYPE | SHAPE | OFFSETS) && take(s, '}');
}

/* Finds the end of an object without objects and lists in it; the reader of JSON checks what is in it. */
static bool take_object(struct header_scan *s, struct header_text *t)
{
    bool in_text = false;
    if (!take(s, '{')) return false;
    for (t->at = s->at - 1; s->at < s->end; s->at++) {
        if (*s->at == '"') in_text = !in_text;
        if (in_text) {
            s->at += *s->at == '\\';
            continue;
        }
        if (*s->at == '{' || *s->at == '[') return false;
        if (*s->at != '}') continue;
        t->n = ++s->at - t->at;
        return true;
    }
    return false;
}

enum header_kind header_scan_next(struct header_scan *s, struct header_entry *e)
{
    if (!s->begun && !take(s, '{')) return SCAN_OTHER;
    if (take(s, '}')) {
        skip_space(s);
        return s->at == s->end ? SCAN_END : SCAN_OTHER;
    }
    if (s->begun && !take(s, ',')) return SCAN_OTHER;
    s->begun = true;
    if (!take_text(s, &e->name) || !take(s, ':')) return SCAN_OTHER;
    if (is(&e->name, "__metadata__")) return take_object(s, &e->metadata) ? SCAN_METADATA : SCAN_OTHER;
    return take_tensor(s, e) ? SCAN_TENSOR : SCAN_OTHER;
}
