/* normalize.c - the UTF-8 check, NFC, Prepend and Replace with alignment. The only user of utf8proc: Unicode 14.
 *
 * NFC works on segments. A character that is neither a mark (general category M) nor a Hangul vowel or trailing
 * consonant never composes with the preceding text and is not reordered. So a text is cut before each such character
 * and every segment normalized separately. All bytes of a normalized segment map to the whole original segment, nearly
 * always one character. */
#include "data/tokenizer/normalize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#define MAX_SEGMENT                                                                                                    \
    1024                /* characters: canonical ordering is quadratic in them, and Unicode asks for no more than 32   \
                         */
#define MAX_EXPANSION 4 /* characters in the longest canonical decomposition of one */

/* Eight bytes at a time while they are ASCII. */
static int64_t skip_ascii(const char *text, int64_t i, int64_t size)
{
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, text + i, sizeof(word));
        if (word & 0x8080808080808080u) break;
    }
    return i;
}

int64_t utf8_character(const char *text, int64_t left)
{
    const uint8_t *s = (const uint8_t *)text;
    uint8_t low = 0x80, high = 0xbf; /* bounds of the second byte (Unicode, table 3-7) */
    int64_t n = 1;
    if (s[0] < 0x80) return 1;
    if (s[0] >= 0xc2 && s[0] <= 0xdf) n = 2;
    if (s[0] >= 0xe0 && s[0] <= 0xef) n = 3;
    if (s[0] >= 0xf0 && s[0] <= 0xf4) n = 4;
    if (s[0] == 0xe0) low = 0xa0;
    if (s[0] == 0xed) high = 0x9f;
    if (s[0] == 0xf0) low = 0x90;
    if (s[0] == 0xf4) high = 0x8f;
    if (n == 1 || (left > 1 && (s[1] < low || s[1] > high))) return 0;
    for (int64_t i = 2; i < MT_MIN(n, left); i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return n <= left ? n : -1;
}

int64_t utf8_invalid_at(const char *text, int64_t size)
{
    for (int64_t i = skip_ascii(text, 0, size); i < size;) {
        int64_t n = utf8_character(text + i, size - i);
        if (n <= 0) return i;
        i += n;
        if (n == 1) i = skip_ascii(text, i, size);
    }
    return -1;
}

static utf8proc_int32_t code_point(const char *s)
{
    utf8proc_int32_t c;
    return utf8proc_iterate((const utf8proc_uint8_t *)s, 4, &c) > 0 ? c : 0;
}

bool utf8_is_space(const char *s)
{
    const utf8proc_int32_t c = code_point(s);
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

/* Word characters are alphabetic ones, marks, decimal digits, connectors and joiners (Unicode TR 18). The only
 * alphabetic symbols are circled and squared letters. */
bool utf8_is_word(const char *s)
{
    const utf8proc_int32_t c = code_point(s);
    const utf8proc_category_t k = utf8proc_category(c);
    return (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_NL) || k == UTF8PROC_CATEGORY_PC || c == 0x200c ||
           c == 0x200d || (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
           (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
}

void normal_free(struct normal *n)
{
    mem_free(n->text);
    mem_free(n->begin);
    mem_free(n->end);
    *n = (struct normal){0};
}

static void append(struct normal *n, const char *text, int64_t size, int64_t begin, int64_t end)
{
    if (n->size + size > n->cap) {
        int64_t cap = MT_MAX(2 * n->cap, n->size + size + 64);
        n->text = mem_grow(n->text, n->cap, cap, 1);
        n->begin = mem_grow(n->begin, n->cap, cap, sizeof(*n->begin));
        n->end = mem_grow(n->end, n->cap, cap, sizeof(*n->end));
        n->cap = cap;
    }
    memcpy(n->text + n->size, text, (size_t)size);
    for (int64_t i = n->size; i < n->size + size; i++) {
        n->begin[i] = (int32_t)begin;
        n->end[i] = (int32_t)end;
    }
    n->size += size;
}

static bool starts_segment(utf8proc_int32_t c)
{
    if (c < 0x300) return true;
    if (c >= 0x1160 && c <= 0x11ff) return false;
    utf8proc_category_t category = utf8proc_category(c);
    return category != UTF8PROC_CATEGORY_MN && category != UTF8PROC_CATEGORY_MC && category != UTF8PROC_CATEGORY_ME;
}

/* End of the segment that begins at i; *single: it is one character that has no decomposition. */
static int64_t segment_end(const char *text, int64_t i, int64_t size, bool *single)
{
    utf8proc_int32_t c;
    int64_t end = i + utf8proc_iterate((const utf8proc_uint8_t *)text + i, size - i, &c);
    *single = c < 0x300 || (c >= 0xac00 && c <= 0xd7a3) || utf8proc_get_property(c)->decomp_seqindex == UINT16_MAX;
    while (end < size) {
        int64_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + end, size - end, &c);
        if (starts_segment(c)) break;
        *single = false;
        end += n;
    }
    return end;
}

static int normalize_segment(struct normal *n, const char *text, int64_t begin, int64_t end, struct err *err)
{
    utf8proc_int32_t chars[MAX_SEGMENT * MAX_EXPANSION + 1]; /* reencoding writes a NUL after them */
    const utf8proc_option_t options = UTF8PROC_STABLE | UTF8PROC_COMPOSE;
    utf8proc_ssize_t count = -1, size = -1;
    if (end - begin <= 4 * MAX_SEGMENT)
        count = utf8proc_decompose((const utf8proc_uint8_t *)text + begin, end - begin, chars,
                                   MAX_SEGMENT * MAX_EXPANSION, options);
    if (count >= 0 && count <= MAX_SEGMENT * MAX_EXPANSION) size = utf8proc_reencode(chars, count, options);
    if (size < 0)
        return err_set(err, "text cannot be normalized: too many combining marks from byte %lld on", (long long)begin);
    append(n, (const char *)chars, size, begin, end);
    return 0;
}

int nfc_make(struct normal *n, const char *text, int64_t size, struct err *err)
{
    n->size = 0;
    int64_t i = 0;
    while (i < size && (uint8_t)text[i] < 0xcc) i++; /* characters below U+0300 are in form C */
    bool changed = false;
    int64_t begin = 0, end = 0;
    for (; begin < size && i < size; begin = end) {
        bool single;
        end = segment_end(text, begin, size, &single);
        int64_t before = n->size;
        if (single)
            append(n, text + begin, end - begin, begin, end);
        else if (normalize_segment(n, text, begin, end, err))
            return -1;
        changed =
            changed || n->size - before != end - begin || memcmp(n->text + before, text + begin, (size_t)(end - begin));
    }
    if (!changed) normal_free(n);
    return 0;
}

/* Whether a segment has too many marks: utf8proc orders them in time quadratic in their number. */
static bool has_long_segment(const char *text, int64_t size)
{
    utf8proc_int32_t c;
    for (int64_t at = 0, marks = 0; at < size;) {
        at += utf8proc_iterate((const utf8proc_uint8_t *)text + at, size - at, &c);
        marks = starts_segment(c) ? 0 : marks + 1;
        if (marks > MAX_SEGMENT) return true;
    }
    return false;
}

char *nfkc_copy(const char *text, int64_t size, bool fold, int64_t *copied)
{
    const utf8proc_option_t options =
        UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT | (fold ? UTF8PROC_CASEFOLD : 0);
    utf8proc_uint8_t *made = NULL;
    *copied = 0;
    if (has_long_segment(text, size)) return NULL;
    const utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, size, &made, options);
    MT_REQUIRE(n >= 0, "%s", utf8proc_errmsg(n));
    char *copy = mem_strndup((const char *)made, n);
    free(made);
    *copied = n;
    return copy;
}

/* ---- Prepend and Replace ---- */

static void prepend(struct normal *n, const char *text, int64_t size, const char *to)
{
    append(n, to, (int64_t)strlen(to), 0, utf8_character(text, size));
    for (int64_t i = 0; i < size; i++) append(n, text + i, 1, i, i + 1);
}

static int too_large(struct err *err)
{
    return err_set(err, "the normalizer makes more than %d bytes of each byte of the text: use another tokenizer.json",
                   NORMALIZER_GROWTH);
}

/* Replaces matches, of overlapping ones the leftmost. Without a match n->text stays NULL. */
static int replace(struct normal *n, const char *text, int64_t size, const char *from, const char *to, int64_t room,
                   struct err *err)
{
    int64_t n_from = (int64_t)strlen(from), n_to = (int64_t)strlen(to);
    bool found = false;
    for (int64_t i = 0; i < size;) {
        bool here = text[i] == from[0] && n_from <= size - i && !memcmp(text + i, from, (size_t)n_from);
        int64_t used = here ? n_from : 1;
        append(n, here ? to : text + i, here ? n_to : 1, i, i + used);
        if (n->size > room) return too_large(err);
        found = found || here;
        i += used;
    }
    if (!found) normal_free(n);
    return 0;
}

/* ---- the normalizer of a tokenizer.json ---- */

int normalizer_add(struct normalizer *z, struct json j, const struct normalizer_step *step, struct err *err)
{
    if (z->n_steps == NORMALIZER_STEPS) return json_error(j, err, "more than %d normalizers", NORMALIZER_STEPS);
    z->steps[z->n_steps++] = *step;
    return 0;
}

/* Loads a string of a step. Empty strings are refused: removed bytes would belong to no token. */
static int load_string(struct json j, const char *key, char *out, struct err *err)
{
    const char *text;
    if (json_get_str(j, key, &text, err)) return -1;
    if (!*text || strlen(text) >= NORMALIZER_BYTES)
        return json_error(json_find(j, key), err, "must have 1 to %d bytes", NORMALIZER_BYTES - 1);
    snprintf(out, NORMALIZER_BYTES, "%s", text);
    return 0;
}

int normalizer_load(struct normalizer *z, struct json j, bool spaces, struct err *err)
{
    struct normalizer_step step = {.kind = NORMALIZE_NFC};
    struct json inner;
    const char *type;
    if (!json_given(j)) return 0;
    if (json_get_str(j, "type", &type, err)) return -1;
    if (!strcmp(type, "Sequence")) {
        if (json_get_array(j, "normalizers", &inner, err)) return -1;
        for (int64_t i = 0; i < json_count(inner); i++)
            if (normalizer_load(z, json_at(inner, i), spaces, err)) return -1;
        return 0;
    }
    if (spaces && !strcmp(type, "Prepend")) {
        step.kind = NORMALIZE_PREPEND;
        if (load_string(j, "prepend", step.to, err)) return -1;
    } else if (spaces && !strcmp(type, "Replace")) {
        step.kind = NORMALIZE_REPLACE;
        if (json_get_object(j, "pattern", &inner, err)) return -1;
        if (!json_has(inner, "String")) return json_error(inner, err, "only a \"String\" is supported");
        if (load_string(inner, "String", step.from, err) || load_string(j, "content", step.to, err)) return -1;
    } else if (strcmp(type, "NFC"))
        return json_error(j, err, "normalizer \"%s\" is not supported (use NFC, Sequence%s)", type,
                          spaces ? ", Prepend, Replace" : "; with byte_fallback Prepend, Replace");
    return normalizer_add(z, j, &step, err);
}

static int run_step(const struct normalizer_step *step, struct normal *n, const char *text, int64_t size, bool first,
                    int64_t room, struct err *err)
{
    if (step->kind == NORMALIZE_NFC) return nfc_make(n, text, size, err);
    if (step->kind == NORMALIZE_REPLACE) return replace(n, text, size, step->from, step->to, room, err);
    int64_t n_to = (int64_t)strlen(step->to);
    bool there = n_to <= size && !memcmp(text, step->to, (size_t)n_to);
    if (size > 0 && !(step->only_first && !first) && !(step->only_missing && there)) prepend(n, text, size, step->to);
    return 0;
}

int normalizer_run(const struct normalizer *z, struct normal *n, const char *text, int64_t size, bool first,
                   int64_t *room, struct err *err)
{
    int64_t largest = 0; /* the largest size after a step; a later step may shrink the text */
    for (int64_t i = 0; i < z->n_steps; i++) {
        struct normal next = {0};
        int rc = run_step(&z->steps[i], &next, n->text ? n->text : text, n->text ? n->size : size, first, *room, err);
        if (!rc && next.size > *room) rc = too_large(err);
        if (rc) normal_free(&next);
        if (rc) return -1;
        if (!next.text) continue;
        for (int64_t k = 0; n->text && k < next.size; k++) {
            next.begin[k] = n->begin[next.begin[k]];
            next.end[k] = n->end[next.end[k] - 1];
        }
        normal_free(n);
        *n = next;
        largest = MT_MAX(largest, n->size);
    }
    *room -= largest;
    return 0;
}

const char *normalizer_library(char name[64])
{
    snprintf(name, 64, "utf8proc %s", utf8proc_version());
    return name;
}
