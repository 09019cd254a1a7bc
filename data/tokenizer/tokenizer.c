/* tokenizer.c - tokenizer.json -> ids. The pipeline has the order of Hugging Face's library:
 *
 *   text -> cut at the added tokens with normalized:false -> normalizer -> cut at those with normalized:true
 *        -> pre_tokenizer (split.c) -> byte-pair encoding of each piece (bpe.c)
 *
 * Both cuts take the leftmost match, and of those the longest. `truncation` and `padding` of the file are settings of
 * that library's calls; `decoder` and `post_processor` come after the ids. Only the type of post_processor is checked.
 * Metaspace's changes of the text are done by the normalizer, as no step is between the two: vocabularies of characters
 * may have no added tokens with normalized:true. */
#include "data/tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "data/json.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/normalize.h"
#include "data/tokenizer/split.h"

#define MAX_FILE  ((int64_t)1 << 30)
#define MAX_ADDED (1 << 16)
#define MAX_TEXT  (INT32_MAX / 4) /* bytes: byte ranges are 32-bit, and form C can be three times as long */

struct added {
    char *text;
    int64_t size;
    int32_t id;
    bool special;
};

/* Added tokens that are searched together. */
struct added_set {
    struct added *items; /* [n] sorted by bytes: tokens with a common prefix are neighbours, the shortest first */
    int64_t n;
    bool first[256]; /* first bytes of the tokens */
};

struct tokenizer {
    struct bpe bpe;
    struct split *split;
    struct normalizer normalizer;
    struct added_set raw, normalized; /* searched before and after the normalizer */
    uint64_t hash;
};

/* ---- loading ---- */

static int compare_added(const void *a, const void *b)
{
    const struct added *x = a, *y = b;
    int order = memcmp(x->text, y->text, (size_t)MT_MIN(x->size, y->size));
    return order ? order : (x->size > y->size) - (x->size < y->size);
}

/* The id must be that of the vocabulary's item with this text, or, when there is none, an unused id. */
static int check_added_id(const struct bpe *bpe, struct json item, const char *text, int64_t size, int64_t id,
                          struct err *err)
{
    uint8_t *bytes = mem_alloc(size);
    int64_t n = bpe_bytes(bpe, bytes, text, size);
    int32_t other = n > 0 ? bpe_find(bpe, bytes, n) : -1;
    const struct bpe_token *t = id < bpe->n_ids && bpe->tokens[id].bytes ? &bpe->tokens[id] : NULL;
    bool same = t && (other == id || (t->size == size && !memcmp(t->bytes, text, (size_t)size)));
    mem_free(bytes);
    if (same || (other < 0 && !t)) return 0;
    return json_error(item, err, "id %lld and content \"%.64s\" contradict model.vocab", (long long)id, text);
}

/* taken: [BPE_MAX_ID] ids of the added tokens so far. */
static int load_added(struct tokenizer *tok, struct json item, bool *taken, struct err *err)
{
    static const char *const refused[] = {"single_word", "lstrip", "rstrip"};
    int64_t id, size;
    bool on = false, normalized, special;
    const char *text;
    if (json_get_i64(item, "id", 0, BPE_MAX_ID - 1, &id, err)) return -1;
    if (json_str(json_find(item, "content"), &text, &size, err)) return -1;
    if (json_get_bool(item, "normalized", &normalized, err) || json_get_bool(item, "special", &special, err)) return -1;
    for (int64_t i = 0; i < MT_LEN(refused); i++) {
        if (json_opt_bool(item, refused[i], &on, err)) return -1;
        if (on) return json_error(json_find(item, refused[i]), err, "is not supported, it must be false");
    }
    if (size == 0) return json_error(item, err, "the content is empty");
    if (check_added_id(&tok->bpe, item, text, size, id, err)) return -1;
    if (taken[id]) return json_error(item, err, "id %lld is taken by another added token", (long long)id);
    taken[id] = true;
    if (normalized && tok->bpe.chars)
        return json_error(json_find(item, "normalized"), err, "is not supported together with byte_fallback");
    struct normal n = {0};
    if (normalized && normalizer_run(&tok->normalizer, &n, text, size, false, err)) {
        normal_free(&n);
        return -1;
    }
    struct added_set *set = normalized ? &tok->normalized : &tok->raw;
    struct added *a = &set->items[set->n++];
    *a = (struct added){.size = n.text ? n.size : size, .id = (int32_t)id, .special = special};
    a->text = mem_alloc(a->size + 1);
    memcpy(a->text, n.text ? n.text : text, (size_t)a->size);
    normal_free(&n);
    return 0;
}

static int load_all_added(struct tokenizer *tok, struct json root, struct err *err)
{
    struct json list = json_find(root, "added_tokens");
    if (json_type(list) == JSON_ABSENT || json_type(list) == JSON_NULL) return 0;
    if (json_get_array(root, "added_tokens", &list, err)) return -1;
    int64_t n = json_count(list);
    if (n > MAX_ADDED) return json_error(list, err, "more than %d tokens", MAX_ADDED);
    struct added_set *sets[] = {&tok->raw, &tok->normalized};
    for (int i = 0; i < 2; i++) sets[i]->items = mem_array(n, sizeof(struct added));
    bool *taken = mem_array(BPE_MAX_ID, sizeof(*taken));
    int rc = 0;
    for (int64_t i = 0; !rc && i < n; i++) rc = load_added(tok, json_at(list, i), taken, err);
    mem_free(taken);
    if (rc) return -1;
    for (int i = 0; i < 2; i++) {
        struct added *items = sets[i]->items;
        qsort(items, (size_t)sets[i]->n, sizeof(*items), compare_added);
        for (int64_t k = 0; k < sets[i]->n; k++) {
            sets[i]->first[(uint8_t)items[k].text[0]] = true;
            if (k > 0 && !compare_added(&items[k - 1], &items[k]))
                return json_error(list, err, "\"%.64s\" is a duplicate", items[k].text);
        }
    }
    return 0;
}

/* The pre_tokenizer; after the normalizer, the steps that Metaspace adds. */
static int load_split(struct tokenizer *tok, struct json j, struct err *err)
{
    tok->split = split_load(j, err);
    if (!tok->split) return -1;
    enum split_kind kind = split_kind(tok->split);
    if (tok->bpe.chars == (kind == SPLIT_BYTE_LEVEL))
        return json_error(j, err,
                          tok->bpe.chars ? "byte_fallback needs Metaspace or null"
                                         : "byte-level vocabularies need a ByteLevel");
    if (kind < SPLIT_META_NEVER) return 0;
    struct normalizer_step step = {.kind = NORMALIZE_REPLACE, .from = " ", .to = SPLIT_SPACE};
    if (normalizer_add(&tok->normalizer, j, &step, err)) return -1;
    if (kind == SPLIT_META_NEVER) return 0;
    step = (struct normalizer_step){.kind = NORMALIZE_PREPEND, .to = SPLIT_SPACE, .only_missing = true};
    step.only_first = kind == SPLIT_META_FIRST;
    return normalizer_add(&tok->normalizer, j, &step, err);
}

/* ByteLevel only changes offsets, TemplateProcessing adds tokens at the ends: see tokenizer_encode. */
static int check_post_processor(struct json j, struct err *err)
{
    const char *type;
    struct json inner;
    if (json_type(j) == JSON_ABSENT || json_type(j) == JSON_NULL) return 0;
    if (json_get_str(j, "type", &type, err)) return -1;
    if (!strcmp(type, "ByteLevel") || !strcmp(type, "TemplateProcessing")) return 0;
    if (strcmp(type, "Sequence"))
        return json_error(j, err,
                          "post-processor \"%s\" is not supported (use ByteLevel, TemplateProcessing, "
                          "Sequence)",
                          type);
    if (json_get_array(j, "processors", &inner, err)) return -1;
    for (int64_t i = 0; i < json_count(inner); i++)
        if (check_post_processor(json_at(inner, i), err)) return -1;
    return 0;
}

static uint64_t content_hash(const char *text, int64_t size)
{
    uint64_t h = rng_key((uint64_t)size, "tokenizer"), word;
    for (int64_t i = 0; i < size; i += 8) {
        word = 0;
        memcpy(&word, text + i, (size_t)MT_MIN(8, size - i));
        h = (h ^ word) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static int load_all(struct tokenizer *tok, struct json root, const struct json_part parts[2], struct err *err)
{
    struct json model;
    if (json_get_object(root, "model", &model, err) || bpe_load(&tok->bpe, model, parts[0], parts[1], err)) return -1;
    if (normalizer_load(&tok->normalizer, json_find(root, "normalizer"), tok->bpe.chars, err)) return -1;
    if (load_split(tok, json_find(root, "pre_tokenizer"), err)) return -1;
    if (check_post_processor(json_find(root, "post_processor"), err)) return -1;
    return load_all_added(tok, root, err);
}

struct tokenizer *tokenizer_parse(const char *text, int64_t size, const char *name, struct err *err)
{
    static const char *const large[] = {"vocab", "merges"};
    struct json_part parts[MT_LEN(large)];
    struct json_doc *doc = json_parse_without(text, size, name, "model", large, parts, MT_LEN(large), err);
    if (!doc) return NULL;
    struct tokenizer *tok = mem_alloc(sizeof(*tok));
    tok->hash = content_hash(text, size);
    if (load_all(tok, json_root(doc), parts, err)) {
        tokenizer_free(tok);
        tok = NULL;
    }
    json_free(doc);
    return tok;
}

struct tokenizer *tokenizer_load(const char *path, struct err *err)
{
    int64_t size;
    char *text = file_read(path, MAX_FILE, &size, err);
    if (!text) return NULL;
    struct tokenizer *tok = tokenizer_parse(text, size, path, err);
    mem_free(text);
    return tok;
}

void tokenizer_free(struct tokenizer *tok)
{
    if (!tok) return;
    bpe_free(&tok->bpe);
    split_free(tok->split);
    struct added_set *sets[] = {&tok->raw, &tok->normalized};
    for (int i = 0; i < 2; i++) {
        for (int64_t k = 0; k < sets[i]->n; k++) mem_free(sets[i]->items[k].text);
        mem_free(sets[i]->items);
    }
    mem_free(tok);
}

/* ---- lookups ---- */

uint64_t tokenizer_hash(const struct tokenizer *tok) { return tok->hash; }

int32_t tokenizer_id(const struct tokenizer *tok, const char *content)
{
    const struct added_set *sets[] = {&tok->raw, &tok->normalized};
    int64_t size = (int64_t)strlen(content);
    for (int i = 0; i < 2; i++)
        for (int64_t k = 0; k < sets[i]->n; k++)
            if (!strcmp(sets[i]->items[k].text, content)) return sets[i]->items[k].id;
    return size ? bpe_find(&tok->bpe, (const uint8_t *)content, size) : -1;
}

static const struct added *find_added(const struct tokenizer *tok, int32_t id)
{
    const struct added_set *sets[] = {&tok->raw, &tok->normalized};
    for (int i = 0; i < 2; i++)
        for (int64_t k = 0; k < sets[i]->n; k++)
            if (sets[i]->items[k].id == id) return &sets[i]->items[k];
    return NULL;
}

bool tokenizer_is_special(const struct tokenizer *tok, int32_t id)
{
    const struct added *a = find_added(tok, id);
    return a && a->special;
}

bool tokenizer_marks_spaces(const struct tokenizer *tok) { return tok->bpe.chars; }

const char *tokenizer_bytes(const struct tokenizer *tok, int32_t id, int64_t *size)
{
    const struct added *a = find_added(tok, id);
    if (a) return *size = a->size, a->text;
    const struct bpe_token *t = id >= 0 && id < tok->bpe.n_ids ? &tok->bpe.tokens[id] : NULL;
    *size = t ? t->size : 0;
    return t ? (const char *)t->bytes : NULL;
}

/* ---- encoding ---- */

struct encoder {
    const struct tokenizer *tok;
    bool special;
    struct split_work *split;
    struct bpe_work bpe;
    const char *text; /* what is being split */
    int64_t offset;   /* in the text, added to the byte ranges of the tokens */
    struct token_list *out;
};

/* The longest token of the set that is a prefix of text[0..size), or NULL. */
static const struct added *longest_added(const struct added_set *set, const char *text, int64_t size)
{
    const struct added *best = NULL, *lo = set->items, *hi = lo + set->n;
    for (int64_t depth = 0; lo < hi; depth++) {
        if (lo->size == depth) best = lo++;
        if (depth == size) break;
        const struct added *ends[2]; /* of tokens with a byte here that is below text[depth], and not above it */
        for (int i = 0; i < 2; i++) {
            const struct added *a = lo, *b = hi;
            while (a < b) {
                const struct added *middle = a + (b - a) / 2;
                if ((uint8_t)middle->text[depth] < (uint8_t)text[depth] + i)
                    a = middle + 1;
                else
                    b = middle;
            }
            ends[i] = a;
        }
        lo = ends[0];
        hi = ends[1];
    }
    return best;
}

/* The first added token at or after *at, which is moved to it (or to the end), or NULL. */
static const struct added *next_added(const struct added_set *set, bool special, const char *text, int64_t size,
                                      int64_t *at)
{
    while (*at < size) {
        const struct added *a = set->first[(uint8_t)text[*at]] ? longest_added(set, text + *at, size - *at) : NULL;
        if (a && (special || !a->special)) return a;
        *at += a ? a->size : 1; /* a special token that counts as text hides tokens that begin inside it */
    }
    return NULL;
}

static void push_added(struct token_list *out, const struct added *a, int64_t begin)
{
    token_list_reserve(out, 1);
    out->ids[out->count] = a->id;
    out->begin[out->count] = (int32_t)begin;
    out->end[out->count++] = (int32_t)(begin + a->size);
}

static int encode_piece(void *ctx, int64_t begin, int64_t end, struct err *err)
{
    struct encoder *e = ctx;
    return bpe_encode(&e->tok->bpe, &e->bpe, (const uint8_t *)e->text + begin, end - begin, e->offset + begin, e->out,
                      err);
}

/* Normalized text: the second cut, then pieces. Byte ranges are those of this text plus offset. */
static int encode_normalized(struct encoder *e, const char *text, int64_t size, int64_t offset, struct err *err)
{
    for (int64_t done = 0, at = 0; done < size; done = at) {
        const struct added *a = next_added(&e->tok->normalized, e->special, text, size, &at);
        e->text = text + done;
        e->offset = offset + done;
        if (split_run(e->tok->split, e->split, e->text, at - done, encode_piece, e, err)) return -1;
        if (a) push_added(e->out, a, offset + at);
        at += a ? a->size : 0;
    }
    return 0;
}

/* Text between two tokens of the first cut. */
static int encode_section(struct encoder *e, const char *text, int64_t size, int64_t offset, struct err *err)
{
    struct normal n = {0};
    int64_t first = e->out->count;
    int rc = normalizer_run(&e->tok->normalizer, &n, text, size, offset == 0, err);
    if (!rc && !n.text) rc = encode_normalized(e, text, size, offset, err);
    if (!rc && n.text) {
        rc = encode_normalized(e, n.text, n.size, 0, err);
        for (int64_t i = first; i < e->out->count; i++) {
            e->out->begin[i] = (int32_t)(offset + n.begin[e->out->begin[i]]);
            e->out->end[i] = (int32_t)(offset + n.end[e->out->end[i] - 1]);
        }
    }
    normal_free(&n);
    return rc;
}

static int encode_text(struct encoder *e, const char *text, int64_t size, struct err *err)
{
    for (int64_t done = 0, at = 0; done < size; done = at) {
        const struct added *a = next_added(&e->tok->raw, e->special, text, size, &at);
        if (encode_section(e, text + done, at - done, done, err)) return -1;
        if (a) push_added(e->out, a, at);
        at += a ? a->size : 0;
    }
    return 0;
}

int tokenizer_encode(const struct tokenizer *tok, const char *text, int64_t size, bool special, struct token_list *out,
                     struct err *err)
{
    if (size > MAX_TEXT) return err_set(err, "a text of %lld bytes is too long", (long long)size);
    int64_t bad = utf8_invalid_at(text, size);
    if (bad >= 0) return err_set(err, "not valid UTF-8 at byte %lld of the text", (long long)bad);
    struct encoder e = {.tok = tok, .special = special, .split = split_work_new(), .out = out};
    int64_t before = out->count;
    int rc = encode_text(&e, text, size, err);
    if (rc) out->count = before;
    split_work_free(e.split);
    bpe_work_free(&e.bpe);
    return rc;
}
