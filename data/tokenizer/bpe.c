/* bpe.c - byte-pair encoding of bytes or characters.
 *
 * Byte-level vocabularies are written in a printable alphabet of 256 characters, one per byte. They are mapped back at
 * load, so that text needs no mapping: a token is a string of bytes, and a merge joins two of them.
 *
 * Vocabularies of characters (byte_fallback) are used as they are. A character outside the vocabulary becomes its
 * bytes, whose tokens <0x00> to <0xFF> take part in no merge. All 256 byte tokens are required, so no text is unknown,
 * and unk_token and fuse_unk have no effect. If no token contains U+2581 (a space) after another character, no merge
 * crosses it, and pieces are cut before U+2581, which keeps them short.
 *
 * A piece starts as one symbol per byte or character. The adjacent pair with the lowest rank (the leftmost of equals)
 * is replaced by its merge until no pair has one. A short piece scans its cached ranks for the minimum; a long one
 * keeps them in a heap.
 *
 * Invariant: tokens with `whole` set encode to themselves by their merges (each is checked at load, or the file sets
 * ignore_merges), so a piece that equals one needs no merging. */
#include "data/tokenizer/bpe.h"

#include <string.h>

#include "data/tokenizer/split.h"

#define NO_RANK     UINT32_MAX
#define SHORT       64 /* from this many bytes on, use the heap */
#define SPACE_BYTES 3  /* of SPLIT_SPACE */

struct bpe_symbol {
    int32_t id;         /* -1: merged into its left neighbour */
    int32_t prev, next; /* positions; -1 at the ends */
    uint32_t rank;      /* of the merge with next */
    int32_t merged;     /* id of the merged token */
};

/* ---- hash tables ---- */

static uint64_t mix(uint64_t x)
{
    x *= 0x9e3779b97f4a7c15u;
    return x ^ (x >> 32);
}

static uint32_t hash_bytes(const uint8_t *p, int64_t size)
{
    uint64_t h = (uint64_t)size, word;
    for (; size > 8; p += 8, size -= 8) {
        memcpy(&word, p, 8);
        h = mix(h ^ word);
    }
    word = 0;
    if (size >= 4) { /* two overlapping halves */
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + size - 4, 4);
        word = (uint64_t)high << 32 | low;
    } else if (size > 0)
        word = (uint64_t)p[0] << 16 | (uint64_t)p[size / 2] << 8 | p[size - 1];
    return (uint32_t)mix(h ^ mix(word));
}

/* The slot that holds these bytes, or the free one for them. */
static struct bpe_slot *find_slot(const struct bpe *b, const uint8_t *bytes, int64_t size, uint32_t hash)
{
    for (uint64_t i = hash;; i++) {
        struct bpe_slot *s = &b->slots[i & b->slot_mask];
        if (s->id < 0) return s;
        if (s->hash != hash) continue;
        const struct bpe_token *t = &b->tokens[s->id];
        if (t->size == size && !memcmp(t->bytes, bytes, (size_t)size)) return s;
    }
}

int32_t bpe_find(const struct bpe *b, const uint8_t *bytes, int64_t size)
{
    return find_slot(b, bytes, size, hash_bytes(bytes, size))->id;
}

static struct bpe_merge *find_merge(const struct bpe *b, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (uint64_t i = mix(pair);; i++) {
        struct bpe_merge *m = &b->merges[i & b->merge_mask];
        if (m->pair == pair || m->pair == UINT64_MAX) return m;
    }
}

static uint64_t table_mask(int64_t count) /* at most half full */
{
    uint64_t n = 16;
    while (n < 2 * (uint64_t)count) n *= 2;
    return n - 1;
}

/* ---- encoding ---- */

static inline void push(struct token_list *out, int32_t id, int64_t begin, int64_t end)
{
    out->ids[out->count] = id;
    out->begin[out->count] = (int32_t)begin;
    out->end[out->count] = (int32_t)end;
    out->count++;
}

/* Merges ids[0..n) in place, n <= SHORT; returns the remaining number. */
static int64_t merge_short(const struct bpe *b, int32_t *ids, int64_t n)
{
    uint32_t rank[SHORT]; /* of the pair (i, i+1) */
    int32_t merged[SHORT];
    for (int64_t i = 0; i + 1 < n; i++) {
        const struct bpe_merge *m = find_merge(b, ids[i], ids[i + 1]);
        rank[i] = m->rank;
        merged[i] = m->id;
    }
    while (n > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        ids[best] = merged[best];
        n--;
        for (int64_t i = best + 1; i < n; i++) ids[i] = ids[i + 1];
        for (int64_t i = best; i + 1 < n; i++) { /* the pair that began in the merged symbol begins here now */
            rank[i] = rank[i + 1];
            merged[i] = merged[i + 1];
        }
        for (int64_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const struct bpe_merge *m = find_merge(b, ids[i], ids[i + 1]);
            rank[i] = m->rank;
            merged[i] = m->id;
        }
    }
    return n;
}

static void heap_push(uint64_t *heap, int64_t *n, uint64_t key)
{
    int64_t i = (*n)++;
    for (; i > 0 && heap[(i - 1) / 2] > key; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, int64_t *n)
{
    uint64_t top = heap[0], last = heap[--*n];
    int64_t i = 0;
    for (int64_t child = 1; child < *n; child = 2 * i + 1) {
        if (child + 1 < *n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* Looks up the merge of the symbol at `pos` with the next one and pushes it. A heap entry is stale if its rank is no
 * longer that of its position: symbols only grow, so an old rank never returns. */
static void queue_pair(const struct bpe *b, struct bpe_work *w, int64_t *n_heap, int32_t pos)
{
    struct bpe_symbol *s = &w->symbols[pos];
    s->rank = NO_RANK;
    if (s->next < 0) return;
    const struct bpe_merge *m = find_merge(b, s->id, w->symbols[s->next].id);
    s->rank = m->rank;
    s->merged = m->id;
    if (m->rank != NO_RANK) heap_push(w->heap, n_heap, (uint64_t)m->rank << 32 | (uint32_t)pos);
}

/* Merges w->symbols[0..n) in time n log n. Position 0 is never merged to the left, so the result begins there. */
static void merge_long(const struct bpe *b, struct bpe_work *w, int64_t n)
{
    struct bpe_symbol *s = w->symbols;
    int64_t n_heap = 0;
    for (int64_t i = 0; i < n; i++) queue_pair(b, w, &n_heap, (int32_t)i);
    while (n_heap > 0) {
        uint64_t top = heap_pop(w->heap, &n_heap);
        int32_t pos = (int32_t)(top & 0xffffffffu);
        if (s[pos].rank != top >> 32) continue;
        int32_t gone = s[pos].next;
        s[pos].id = s[pos].merged;
        s[pos].next = s[gone].next;
        if (s[gone].next >= 0) s[s[gone].next].prev = pos;
        s[gone].rank = NO_RANK;
        queue_pair(b, w, &n_heap, pos);
        if (s[pos].prev >= 0) queue_pair(b, w, &n_heap, s[pos].prev);
    }
}

void bpe_work_free(struct bpe_work *w)
{
    mem_free(w->symbols);
    mem_free(w->heap);
    *w = (struct bpe_work){0};
}

static int no_token(uint8_t byte, int64_t at, struct err *err)
{
    return err_set(err, "the tokenizer has no token for byte 0x%02x at byte %lld of the text", byte, (long long)at);
}

/* The initial symbol of the valid UTF-8 at p, -1 when there is none; returns its bytes. */
static inline int64_t next_symbol(const struct bpe *b, const uint8_t *p, int32_t *id)
{
    if (b->chars) { /* inside a character that is not in the vocabulary, look-ups fail too */
        int64_t n = *p < 0xc0 ? 1 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : 4;
        *id = bpe_find(b, p, n);
        if (*id >= 0) return n;
    }
    *id = b->byte_id[*p];
    return 1;
}

static int encode_short(const struct bpe *b, const uint8_t *piece, int64_t size, int64_t offset, struct token_list *out,
                        struct err *err)
{
    int32_t ids[SHORT];
    int64_t n = 0;
    for (int64_t i = 0; i < size; n++) {
        int64_t used = next_symbol(b, piece + i, &ids[n]);
        if (ids[n] < 0) return no_token(piece[i], offset + i, err);
        i += used;
    }
    n = merge_short(b, ids, n);
    for (int64_t i = 0; i < n; i++) {
        int64_t end = offset + b->tokens[ids[i]].size;
        push(out, ids[i], offset, end);
        offset = end;
    }
    return 0;
}

static int encode_long(const struct bpe *b, struct bpe_work *w, const uint8_t *piece, int64_t size, int64_t offset,
                       struct token_list *out, struct err *err)
{
    if (size > w->cap) {
        bpe_work_free(w);
        w->symbols = mem_array(size, sizeof(*w->symbols));
        w->heap =
            mem_array(2 * size, sizeof(*w->heap)); /* one entry per symbol at first; a merge pops one and pushes two */
        w->cap = size;
    }
    int64_t n = 0;
    for (int64_t i = 0; i < size; n++) {
        int32_t id;
        int64_t used = next_symbol(b, piece + i, &id);
        if (id < 0) return no_token(piece[i], offset + i, err);
        i += used;
        w->symbols[n] = (struct bpe_symbol){.id = id, .prev = (int32_t)n - 1, .next = i < size ? (int32_t)n + 1 : -1};
    }
    merge_long(b, w, n);
    for (int32_t i = 0; i >= 0; i = w->symbols[i].next) {
        int64_t end = offset + b->tokens[w->symbols[i].id].size;
        push(out, w->symbols[i].id, offset, end);
        offset = end;
    }
    return 0;
}

/* Start of the first U+2581 in text[from..size) that follows another character, or size. */
static int64_t next_cut(const uint8_t *text, int64_t from, int64_t size)
{
    for (int64_t i = from + 1; i + SPACE_BYTES <= size; i++)
        if (text[i] == 0xe2 && !memcmp(text + i, SPLIT_SPACE, SPACE_BYTES) &&
            (i - from < SPACE_BYTES || memcmp(text + i - SPACE_BYTES, SPLIT_SPACE, SPACE_BYTES)))
            return i;
    return size;
}

static int encode_part(const struct bpe *b, struct bpe_work *w, const uint8_t *piece, int64_t size, int64_t offset,
                       struct token_list *out, struct err *err)
{
    token_list_reserve(out, size);
    int32_t id = bpe_find(b, piece, size);
    if (id >= 0 && b->tokens[id].whole) {
        push(out, id, offset, offset + size);
        return 0;
    }
    if (size <= SHORT) return encode_short(b, piece, size, offset, out, err);
    return encode_long(b, w, piece, size, offset, out, err);
}

int bpe_encode(const struct bpe *b, struct bpe_work *w, const uint8_t *piece, int64_t size, int64_t offset,
               struct token_list *out, struct err *err)
{
    for (int64_t i = 0, end; i < size; i = end) {
        end = b->cut ? next_cut(piece, i, size) : size;
        if (encode_part(b, w, piece + i, end - i, offset + i, out, err)) return -1;
    }
    return 0;
}

/* ---- loading ---- */

/* Printable bytes stand for themselves in the alphabet; the other 68 are U+0100 and following, in order. */
static bool printable(int byte) { return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad); }

static int64_t unprintable(uint8_t *out, const char *text, int64_t size)
{
    int64_t n = 0;
    for (int64_t i = 0; i < size; i++) {
        int c = (uint8_t)text[i];
        if (c >= 0x80) { /* two bytes of UTF-8 reach U+07FF; the alphabet ends at U+0143 */
            if (c >= 0xe0 || i + 1 >= size) return -1;
            c = (c & 0x1f) << 6 | ((uint8_t)text[++i] & 0x3f);
        }
        if (c >= 256 + 68 || (c < 256 && !printable(c))) return -1;
        if (c >= 256) { /* bytes 00-20 are the first 33, 7f-a0 the next 34, ad the last */
            int k = c - 256;
            c = k < 33 ? k : k < 67 ? k - 33 + 0x7f : 0xad;
        }
        out[n++] = (uint8_t)c;
    }
    return n;
}

char *bpe_printable(const uint8_t *bytes, int64_t size)
{
    char *text = mem_alloc(2 * size + 1), *to = text;
    for (int64_t i = 0; i < size; i++) {
        int c = bytes[i];
        if (!printable(c)) c = 256 + (c < 0x21 ? c : c == 0xad ? 67 : c - 0x7f + 33);
        if (c >= 0x80) *to++ = (char)(0xc0 | c >> 6);
        *to++ = (char)(c >= 0x80 ? 0x80 | (c & 0x3f) : c);
    }
    *to = 0;
    return text;
}

/* The bytes of a vocabulary entry, mapped back from the printable alphabet if byte-level. out has room for `size`.
 * Returns their number, or -1 for a character outside the alphabet. */
static int64_t item_bytes(const struct bpe *b, uint8_t *out, const char *text, int64_t size)
{
    if (!b->chars) return unprintable(out, text, size);
    memcpy(out, text, (size_t)size);
    return size;
}

int32_t bpe_text_id(const struct bpe *b, const char *text, int64_t size)
{
    uint8_t *bytes = mem_alloc(size);
    const int64_t n = item_bytes(b, bytes, text, size);
    const int32_t id = n > 0 ? bpe_find(b, bytes, n) : -1;
    mem_free(bytes);
    return id;
}

/* Checks that unsupported options are absent, null, false or empty in the file. */
static int check_options(struct bpe *b, struct json model, bool *ignore_merges, struct err *err)
{
    static const char *const refused[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token",
                                          "fuse_unk"};
    const char *type = "BPE";
    if (json_opt_str(model, "type", &type, err)) return -1;
    if (strcmp(type, "BPE")) return json_error(model, err, "type \"%s\" is not supported, only \"BPE\" is", type);
    if (json_opt_bool(model, "byte_fallback", &b->chars, err)) return -1;
    for (int64_t i = 0; i < (b->chars ? 3 : MT_LEN(refused)); i++) { /* unk_token, fuse_unk: no effect */
        struct json v = json_find(model, refused[i]);
        enum json_type t = json_type(v);
        bool on = true;
        const char *text = "?";
        int64_t size = 1;
        if (t == JSON_BOOL && json_get_bool(model, refused[i], &on, err)) return -1;
        if (t == JSON_STRING && json_str(v, &text, &size, err)) return -1;
        if (t == JSON_ABSENT || t == JSON_NULL || !on || !size) continue;
        return json_error(v, err,
                          "this option of byte-pair encoding is not supported, it must be null, false or empty");
    }
    if (json_opt_bool(model, "ignore_merges", ignore_merges, err)) return -1;
    if (*ignore_merges && b->chars)
        return json_error(json_find(model, "ignore_merges"), err, "is not supported together with byte_fallback");
    return 0;
}

/* The byte of a token <0xNN> in a vocabulary of characters, or -1. */
static int byte_of(const struct bpe *b, const char *key, int64_t size)
{
    static const char digits[] = "0123456789ABCDEF";
    if (!b->chars || size != 6 || memcmp(key, "<0x", 3) || key[5] != '>') return -1;
    const char *high = memchr(digits, key[3], 16), *low = memchr(digits, key[4], 16);
    return high && low ? (int)(high - digits) * 16 + (int)(low - digits) : -1;
}

static struct bpe_token *token_at(struct bpe *b, int64_t id)
{
    b->tokens = mem_reserve(b->tokens, &b->cap_ids, id + 1, sizeof(*b->tokens));
    b->n_ids = MT_MAX(b->n_ids, id + 1);
    return &b->tokens[id];
}

static int add_token(struct bpe *b, struct json_scan *s, struct err *err)
{
    int64_t id, size = s->key_size;
    uint8_t *bytes = b->blob + b->blob_size;
    int byte = byte_of(b, s->key, size);
    int64_t n = byte >= 0 ? 1 : item_bytes(b, bytes, s->key, size);
    if (byte >= 0) bytes[0] = (uint8_t)byte;
    if (n < 0) memcpy(bytes, s->key, (size_t)size); /* the text of an added token: merges never give it */
    if (json_scan_i64(s, 0, BPE_MAX_ID - 1, &id, err)) return -1;
    struct bpe_token *t = token_at(b, id);
    if (t->bytes) return json_scan_error(s, err, "id %lld is taken by another token", (long long)id);
    if (byte >= 0 && b->byte_id[byte] >= 0) return json_scan_error(s, err, "is a duplicate");
    /* text never becomes a byte's token through its characters */
    *t = (struct bpe_token){.bytes = bytes, .size = (int32_t)(n < 0 ? size : n), .text = n > 0 && byte < 0};
    b->blob_size += t->size;
    if (byte >= 0 || (n == 1 && !b->chars)) b->byte_id[bytes[0]] = (int32_t)id;
    b->cut = b->cut && !(t->text && next_cut(bytes, 0, n) < n);
    return 0;
}

/* Makes the table of bytes -> id, after all tokens are known. Error: two ids have the same text. */
static int index_tokens(struct bpe *b, struct err *err)
{
    b->slot_mask = table_mask(b->n_ids);
    b->slots = mem_array((int64_t)b->slot_mask + 1, sizeof(*b->slots));
    for (uint64_t i = 0; i <= b->slot_mask; i++) b->slots[i].id = -1;
    for (int64_t id = 0; id < b->n_ids; id++) {
        const struct bpe_token *t = &b->tokens[id];
        if (!t->text) continue;
        uint32_t hash = hash_bytes(t->bytes, t->size);
        struct bpe_slot *slot = find_slot(b, t->bytes, t->size, hash);
        if (slot->id >= 0) return err_set(err, "ids %d and %lld have the same text", slot->id, (long long)id);
        *slot = (struct bpe_slot){hash, (int32_t)id};
    }
    return 0;
}

static int load_vocab(struct bpe *b, struct json model, struct json_part part, struct err *err)
{
    struct json vocab;
    struct json_scan s;
    if (json_get_object(model, "vocab", &vocab, err)) return -1;
    for (int i = 0; i < 256; i++) b->byte_id[i] = -1;
    b->cut = b->chars;
    int status = json_scan_open(&s, part, vocab, err);
    while (!status && (status = json_scan_next(&s, err)) == 1) status = add_token(b, &s, err);
    json_scan_close(&s);
    struct err why;
    if (status) return -1;
    if (index_tokens(b, &why)) return json_error(vocab, err, "%s", why.msg);
    for (int i = 0; b->chars && i < 256; i++)
        if (b->byte_id[i] < 0)
            return json_error(vocab, err, "byte_fallback needs the token <0x%02X>, which is missing", i);
    return 0;
}

/* Reads the two parts of "a b" or ["a", "b"] as bytes, concatenated after the blob (which has room: see bpe_load). */
static int read_merge(const struct bpe *b, struct json_scan *s, int64_t *n_left, int64_t *n_right, struct err *err)
{
    uint8_t *bytes = b->blob + b->blob_size;
    const char *text;
    int64_t size, strings = 0;
    *n_right = -1;
    if (!json_scan_is_array(s)) {
        if (json_scan_str(s, &text, &size, err)) return -1;
        const char *space = memchr(text, ' ', (size_t)size);
        if (!space) return json_scan_error(s, err, "has no space between its parts");
        *n_left = item_bytes(b, bytes, text, space - text);
        if (*n_left > 0) *n_right = item_bytes(b, bytes + *n_left, space + 1, text + size - space - 1);
    } else {
        int more;
        if (json_scan_array(s, err)) return -1;
        while ((more = json_scan_next(s, err)) == 1) {
            if (json_scan_str(s, &text, &size, err)) return -1;
            if (strings == 0) *n_left = item_bytes(b, bytes, text, size);
            if (strings == 1 && *n_left > 0) *n_right = item_bytes(b, bytes + *n_left, text, size);
            strings++;
        }
        if (more) return -1;
        if (strings != 2) return json_scan_error(s, err, "is neither \"a b\" nor [\"a\", \"b\"]");
    }
    if (*n_right > 0) return 0;
    return json_scan_error(s, err, "a part is %s", b->chars ? "empty" : "not a string of the byte-level alphabet");
}

static int add_merge(const struct bpe *b, struct json_scan *s, struct bpe_merge *m, struct err *err)
{
    const uint8_t *bytes = b->blob + b->blob_size;
    int64_t n_left = 0, n_right = 0;
    if (read_merge(b, s, &n_left, &n_right, err)) return -1;
    int32_t left = bpe_find(b, bytes, n_left), right = bpe_find(b, bytes + n_left, n_right);
    int32_t id = bpe_find(b, bytes, n_left + n_right);
    if (left < 0 || right < 0 || id < 0)
        return json_scan_error(s, err, "%s not in the vocabulary", id < 0 ? "its result is" : "a part of it is");
    *m = (struct bpe_merge){(uint64_t)(uint32_t)left << 32 | (uint32_t)right, (uint32_t)s->index, id};
    return 0;
}

static int read_merges(struct bpe *b, struct json merges, struct json_part part, struct bpe_merge **list, int64_t *n,
                       struct err *err)
{
    struct json_scan s;
    int64_t cap = 0;
    int status = json_scan_open(&s, part, merges, err);
    while (!status && (status = json_scan_next(&s, err)) == 1) {
        *list = mem_reserve(*list, &cap, *n + 1, sizeof(**list));
        status = add_merge(b, &s, &(*list)[*n], err);
        ++*n;
    }
    json_scan_close(&s);
    return status;
}

/* Takes the list over. */
static void index_merges(struct bpe *b, struct bpe_merge *list, int64_t n)
{
    b->merge_mask = table_mask(n);
    b->merges = mem_array((int64_t)b->merge_mask + 1, sizeof(*b->merges));
    for (uint64_t i = 0; i <= b->merge_mask; i++) b->merges[i] = (struct bpe_merge){UINT64_MAX, NO_RANK, -1};
    for (int64_t i = 0; i < n; i++) /* of duplicate pairs the later rank counts */
        *find_merge(b, (int32_t)(list[i].pair >> 32), (int32_t)(list[i].pair & UINT32_MAX)) = list[i];
    mem_free(list);
}

static int load_merges(struct bpe *b, struct json model, struct json_part part, struct err *err)
{
    struct json merges;
    struct bpe_merge *list = NULL;
    int64_t n = 0;
    if (json_get_array(model, "merges", &merges, err)) return -1;
    int status = read_merges(b, merges, part, &list, &n, err);
    index_merges(b, list, status ? 0 : n);
    return status;
}

/* Sets `whole` where the invariant above holds; it is not set for any token yet, so bpe_encode merges. */
static void prove_whole(struct bpe *b, bool ignore_merges)
{
    struct token_list list = {0};
    struct bpe_work work = {0};
    for (uint64_t i = 0; i <= b->slot_mask; i++) {
        int32_t id = b->slots[i].id;
        if (id < 0) continue;
        struct bpe_token *t = &b->tokens[id];
        list.count = 0;
        bool merged = !bpe_encode(b, &work, t->bytes, t->size, 0, &list, NULL) && list.count == 1 && list.ids[0] == id;
        t->whole = merged || ignore_merges;
    }
    token_list_free(&list);
    bpe_work_free(&work);
}

int bpe_load(struct bpe *b, struct json model, struct json_part vocab, struct json_part merges, struct err *err)
{
    bool ignore_merges = false;
    *b = (struct bpe){.blob = mem_alloc(vocab.size + merges.size)};
    if (check_options(b, model, &ignore_merges, err) || load_vocab(b, model, vocab, err) ||
        load_merges(b, model, merges, err)) {
        bpe_free(b);
        return -1;
    }
    prove_whole(b, ignore_merges);
    return 0;
}

/* ---- tiktoken.model ---- */

#define RANK_WORK ((int64_t)1 << 31) /* bytes looked up for the parts of all tokens; Kimi-K2's file needs 1e7 */

/* Decodes base64[0..size) to out; its number of bytes, or -1. */
static int64_t decode_base64(uint8_t *out, const char *base64, int64_t size)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    int64_t n = 0, padding = 0;
    uint32_t bits = 0;
    while (padding < 2 && size && base64[size - 1] == '=') size--, padding++;
    if ((size + padding) % 4 || !size) return -1;
    for (int64_t i = 0; i < size; i++) {
        const char *digit = memchr(digits, base64[i], 64);
        if (!digit) return -1;
        bits = bits << 6 | (uint32_t)(digit - digits);
        if (i % 4) out[n++] = (uint8_t)(bits >> (6 - 2 * (i % 4)));
    }
    return n;
}

/* Adds the token of one line, without the line's end. */
static int add_rank(struct bpe *b, const char *line, int64_t size, struct err *err)
{
    const char *space = memchr(line, ' ', (size_t)size);
    uint8_t *bytes = b->blob + b->blob_size;
    int64_t n = space ? decode_base64(bytes, line, space - line) : -1, rank = 0;
    const char *digit = space ? space + 1 : line, *end = line + size;
    if (n < 0 || digit == end) return err_set(err, "is not \"BASE64 RANK\"");
    for (; digit < end && rank < BPE_MAX_ID; digit++) {
        if (*digit < '0' || *digit > '9') return err_set(err, "is not \"BASE64 RANK\"");
        rank = 10 * rank + (*digit - '0');
    }
    if (rank >= BPE_MAX_ID) return err_set(err, "the rank is above %d", BPE_MAX_ID - 1);
    struct bpe_token *t = token_at(b, rank);
    if (t->bytes) return err_set(err, "rank %lld is taken by another token", (long long)rank);
    *t = (struct bpe_token){.bytes = bytes, .size = (int32_t)n, .text = true};
    b->blob_size += n;
    if (n == 1) b->byte_id[bytes[0]] = (int32_t)rank;
    return 0;
}

bool bpe_split(const struct bpe *b, int32_t id, int64_t at, int32_t *left, int32_t *right)
{
    const struct bpe_token *t = &b->tokens[id];
    *left = bpe_find(b, t->bytes, at);
    *right = *left < 0 ? -1 : bpe_find(b, t->bytes + at, t->size - at);
    return *right >= 0;
}

/* Makes the merges: every split of a token into two tokens is a merge with the rank of the token. */
static int merges_of_ranks(struct bpe *b, struct err *err)
{
    struct bpe_merge *list = NULL;
    int64_t n = 0, cap = 0, work = 0;
    for (int64_t id = 0; id < b->n_ids; id++) {
        const struct bpe_token *t = &b->tokens[id];
        work += (int64_t)t->size * t->size;
        for (int64_t i = 1; i < t->size && work <= RANK_WORK; i++) {
            int32_t left, right;
            if (!bpe_split(b, (int32_t)id, i, &left, &right)) continue;
            list = mem_reserve(list, &cap, n + 1, sizeof(*list));
            list[n++] = (struct bpe_merge){(uint64_t)(uint32_t)left << 32 | (uint32_t)right, (uint32_t)id, (int32_t)id};
        }
    }
    index_merges(b, list, work > RANK_WORK ? 0 : n);
    return work > RANK_WORK ? err_set(err, "the tokens are too long") : 0;
}

int bpe_load_ranks(struct bpe *b, const char *text, int64_t size, const char *name, struct err *err)
{
    int64_t line = 0;
    int rc = 0;
    *b = (struct bpe){.blob = mem_alloc(size)};
    for (int i = 0; i < 256; i++) b->byte_id[i] = -1;
    for (int64_t at = 0, end; at < size && !rc; at = end + 1) {
        const char *lf = memchr(text + at, '\n', (size_t)(size - at));
        end = lf ? lf - text : size;
        const int64_t n = end - at - (end > at && text[end - 1] == '\r');
        line++;
        if (n > 0 && add_rank(b, text + at, n, err)) rc = err_prefix(err, "%s:%lld", name, (long long)line);
    }
    if (!rc && !b->n_ids) rc = err_set(err, "%s: has no tokens", name);
    if (!rc && (index_tokens(b, err) || merges_of_ranks(b, err))) rc = err_prefix(err, "%s", name);
    if (rc)
        bpe_free(b);
    else
        prove_whole(b, true);
    return rc;
}

void bpe_free(struct bpe *b)
{
    mem_free(b->tokens);
    mem_free(b->blob);
    mem_free(b->slots);
    mem_free(b->merges);
    *b = (struct bpe){0};
}
