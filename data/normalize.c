/* normalize.c - the UTF-8 check and NFC with alignment. The only user of utf8proc, which knows Unicode 14.
 *
 * NFC works on segments: a character that is neither a mark (general category M) nor a Hangul vowel or trailing
 * consonant never composes with what stands before it, nor is it reordered, so a text can be cut before each of these
 * and every segment normalized on its own. All bytes of a normalized segment come from the whole original segment: that
 * is the alignment, and for nearly every text a segment is one character. */
#include "data/normalize.h"

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

/* Bytes of the character at s, of which `left` bytes are there; 0 when it is not valid. */
static int64_t utf8_length(const uint8_t *s, int64_t left)
{
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
    if (n == 1 || n > left || s[1] < low || s[1] > high) return 0;
    for (int64_t i = 2; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return n;
}

int64_t utf8_invalid_at(const char *text, int64_t size)
{
    for (int64_t i = skip_ascii(text, 0, size); i < size;) {
        int64_t n = utf8_length((const uint8_t *)text + i, size - i);
        if (n == 0) return i;
        i += n;
        if (n == 1) i = skip_ascii(text, i, size);
    }
    return -1;
}

void nfc_free(struct nfc *n)
{
    mem_free(n->text);
    mem_free(n->begin);
    mem_free(n->end);
    *n = (struct nfc){0};
}

static void append(struct nfc *n, const char *text, int64_t size, int64_t begin, int64_t end)
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

static int normalize_segment(struct nfc *n, const char *text, int64_t begin, int64_t end, struct err *err)
{
    utf8proc_int32_t chars[MAX_SEGMENT * MAX_EXPANSION + 1]; /* reencoding writes a NUL behind them */
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

int nfc_make(struct nfc *n, const char *text, int64_t size, struct err *err)
{
    n->size = 0;
    int64_t i = 0;
    while (i < size && (uint8_t)text[i] < 0xcc) i++; /* below U+0300: in form C */
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
    if (!changed) nfc_free(n);
    return 0;
}
