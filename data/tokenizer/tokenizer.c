/* tokenizer.c - tokenizer.json -> ids. The pipeline has the order of Hugging Face's library:
 *
 *   text -> cut at the added tokens with normalized:false -> normalizer -> cut at those with normalized:true
 *        -> pre_tokenizer (split.c) -> byte-pair encoding of each piece (bpe.c)
 *
 * Both cuts take the leftmost match, and of those the longest. `truncation` and `padding` of the file are settings of
 * that library's calls; `decoder` and `post_processor` come after the ids. Only the type of post_processor is checked.
 * The normalizer also makes Metaspace's changes of the text; no step lies between the two, because vocabularies of
 * characters may have no added tokens with normalized:true. */
#include "data/tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/tokenizer/added.h"
#include "data/tokenizer/added_config.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/normalize.h"
#include "data/tokenizer/split.h"

#define MAX_FILE   ((int64_t)1 << 30)
#define MAX_CONFIG ((int64_t)64 << 20)
#define MAX_ADDED  (1 << 16)
#define MAX_TEXT   (INT32_MAX / 4) /* bytes: byte ranges are 32-bit, and form C can be three times as long */

#define CONVERT                                                                                                        \
    "write tokenizer.json with transformers: AutoTokenizer.from_pretrained(DIR, "                                      \
    "trust_remote_code=True).save_pretrained(DIR)"

enum { RAW, NORMALIZED, CUTS }; /* where added tokens are searched: before and after the normalizer */

struct tokenizer {
    struct bpe bpe;
    struct split *split;
    struct normalizer normalizer;
    struct added_list added; /* until the sets are built */
    struct added_set sets[CUTS];
    const struct added **by_id; /* [n_by_id] of both sets; NULL: the id is of no added token */
    int64_t n_by_id;
    bool cuts; /* long texts are cut as Kimi's tokenizer cuts them: encode_parts */
    uint64_t hash;
};

/* ---- loading ---- */

/* Checks that the id is that of the vocabulary entry with this text or, without one, unused. */
static int check_added_id(const struct bpe *bpe, struct json item, const struct added *a, struct err *err)
{
    const int32_t other = bpe_text_id(bpe, a->text, a->size);
    const struct bpe_token *t = a->id < bpe->n_ids && bpe->tokens[a->id].bytes ? &bpe->tokens[a->id] : NULL;
    bool same = t && (other == a->id || (t->size == a->size && !memcmp(t->bytes, a->text, (size_t)a->size)));
    if (same || (other < 0 && !t)) return 0;
    return json_error(item, err, "id %d and content \"%.64s\" contradict model.vocab", a->id, a->text);
}

/* Loads an added token. taken: [BPE_MAX_ID] ids of the added tokens so far. */
static int load_added(struct tokenizer *tok, struct json item, bool *taken, struct err *err)
{
    struct added a;
    int64_t id;
    if (json_get_i64(item, "id", 0, BPE_MAX_ID - 1, &id, err) || added_read(&a, item, true, err)) return -1;
    a.id = (int32_t)id;
    added_list_push(&tok->added, a);
    if (check_added_id(&tok->bpe, item, &a, err)) return -1;
    if (taken[id]) return json_error(item, err, "id %lld is taken by another added token", (long long)id);
    taken[id] = true;
    if (a.normalized && tok->bpe.chars)
        return json_error(json_find(item, "normalized"), err, "is not supported together with byte_fallback");
    return 0;
}

static int load_all_added(struct tokenizer *tok, struct json root, struct err *err)
{
    struct json list = json_find(root, "added_tokens");
    if (!json_given(list)) return 0;
    if (json_get_array(root, "added_tokens", &list, err)) return -1;
    int64_t n = json_count(list);
    if (n > MAX_ADDED) return json_error(list, err, "more than %d tokens", MAX_ADDED);
    bool *taken = mem_array(BPE_MAX_ID, sizeof(*taken));
    int rc = 0;
    for (int64_t i = 0; !rc && i < n; i++) rc = load_added(tok, json_at(list, i), taken, err);
    mem_free(taken);
    return rc;
}

/* Normalizes the text of a token that is searched in normalized text. */
static int normalize_added(const struct tokenizer *tok, struct added *a, struct err *err)
{
    struct normal n = {0};
    int64_t room = NORMALIZER_GROWTH * a->size + NORMALIZER_FREE;
    const int rc = normalizer_run(&tok->normalizer, &n, a->text, a->size, false, &room, err);
    if (!rc && n.text) {
        mem_free(a->text);
        a->text = mem_strndup(n.text, n.size);
        a->size = n.size;
    }
    normal_free(&n);
    return rc;
}

/* Hashes the added tokens, which may come from another file than the vocabulary. */
static void hash_added(struct tokenizer *tok)
{
    for (int64_t i = 0; i < tok->added.n; i++) {
        const struct added *a = &tok->added.items[i];
        const bool flags[8] = {a->special, a->normalized, a->lstrip, a->rstrip, a->single_word};
        tok->hash = rng_bytes(tok->hash ^ (uint64_t)(uint32_t)a->id, a->text, a->size);
        tok->hash = rng_bytes(tok->hash, (const char *)flags, sizeof(flags));
    }
}

static void index_ids(struct tokenizer *tok)
{
    tok->n_by_id = tok->added.max_id + 1;
    tok->by_id = mem_array(tok->n_by_id, sizeof(*tok->by_id));
    for (int i = 0; i < CUTS; i++)
        for (int64_t k = 0; k < tok->sets[i].n; k++) tok->by_id[tok->sets[i].items[k].id] = &tok->sets[i].items[k];
}

static int build_added(struct tokenizer *tok, struct err *err)
{
    struct added_list *list = &tok->added;
    struct added *items[CUTS];
    int64_t n[CUTS] = {0};
    int rc = 0;
    hash_added(tok);
    for (int i = 0; i < CUTS; i++) items[i] = mem_array(list->n, sizeof(struct added));
    for (int64_t i = 0; i < list->n; i++) {
        struct added *a = &list->items[i];
        if (a->normalized && !rc) rc = normalize_added(tok, a, err);
        items[a->normalized][n[a->normalized]++] = *a;
    }
    list->n = 0; /* the sets own the texts now, also after an error */
    for (int i = 0; i < CUTS; i++)
        if (added_build(&tok->sets[i], items[i], n[i], rc ? NULL : err)) rc = -1;
    if (!rc) index_ids(tok);
    added_list_free(list);
    return rc;
}

static bool replaces_spaces(const struct normalizer *z)
{
    for (int64_t i = 0; i < z->n_steps; i++)
        if (z->steps[i].kind == NORMALIZE_REPLACE && !strcmp(z->steps[i].from, " ")) return true;
    return false;
}

/* Loads the pre_tokenizer, and adds the steps of Metaspace after those of the normalizer. */
static int load_split(struct tokenizer *tok, struct json j, struct err *err)
{
    tok->split = split_load(j, err);
    if (!tok->split) return -1;
    enum split_kind kind = split_kind(tok->split);
    if (tok->bpe.chars == (kind == SPLIT_BYTE_LEVEL))
        return json_error(j, err,
                          tok->bpe.chars ? "byte_fallback needs Metaspace, a Split of spaces, or null"
                                         : "byte-level vocabularies need a ByteLevel");
    if (kind == SPLIT_SPACES && !replaces_spaces(&tok->normalizer))
        return json_error(j, err, "cuts at spaces: supported only after a normalizer that replaces spaces");
    if (kind < SPLIT_META_NEVER) return 0;
    struct normalizer_step step = {.kind = NORMALIZE_REPLACE, .from = " ", .to = SPLIT_SPACE};
    if (normalizer_add(&tok->normalizer, j, &step, err)) return -1;
    if (kind == SPLIT_META_NEVER) return 0;
    step = (struct normalizer_step){.kind = NORMALIZE_PREPEND, .to = SPLIT_SPACE, .only_missing = true};
    step.only_first = kind == SPLIT_META_FIRST;
    return normalizer_add(&tok->normalizer, j, &step, err);
}

/* Accepts ByteLevel, which only changes offsets, and TemplateProcessing, whose tokens are not added
 * (tokenizer_encode). */
static int check_post_processor(struct json j, struct err *err)
{
    const char *type;
    struct json inner;
    if (!json_given(j)) return 0;
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

/* Loads a tokenizer. config: that of tokenizer_config.json, or absent. */
static int load_all(struct tokenizer *tok, struct json root, const struct json_part parts[2], struct json config,
                    struct err *err)
{
    struct json model;
    struct err why;
    if (json_get_object(root, "model", &model, err) || bpe_load(&tok->bpe, model, parts[0], parts[1], err)) return -1;
    if (normalizer_load(&tok->normalizer, json_find(root, "normalizer"), tok->bpe.chars, err)) return -1;
    if (load_split(tok, json_find(root, "pre_tokenizer"), err)) return -1;
    if (check_post_processor(json_find(root, "post_processor"), err)) return -1;
    if (load_all_added(tok, root, err) || added_config_decoder(&tok->added, &tok->bpe, false, config, err) ||
        added_config_named(&tok->added, &tok->bpe, config, err))
        return -1;
    return build_added(tok, &why) ? json_error(json_find(root, "added_tokens"), err, "%s", why.msg) : 0;
}

static struct tokenizer *parse(const char *text, int64_t size, const char *name, struct json config, struct err *err)
{
    static const char *const large[] = {"vocab", "merges"};
    struct json_part parts[MT_LEN(large)];
    struct json_doc *doc = json_scan_without(text, size, name, "model", large, parts, MT_LEN(large), err);
    if (!doc) return NULL;
    struct tokenizer *tok = mem_alloc(sizeof(*tok));
    tok->hash = rng_bytes(rng_key((uint64_t)size, "tokenizer"), text, size);
    if (load_all(tok, json_root(doc), parts, config, err)) {
        tokenizer_free(tok);
        tok = NULL;
    }
    json_free(doc);
    return tok;
}

struct tokenizer *tokenizer_parse(const char *text, int64_t size, const char *name, struct err *err)
{
    return parse(text, size, name, (struct json){0}, err);
}

static struct tokenizer *load(const char *path, struct json config, struct err *err)
{
    int64_t size;
    char *text = file_read(path, MAX_FILE, &size, err);
    if (!text) return NULL;
    struct tokenizer *tok = parse(text, size, path, config, err);
    mem_free(text);
    return tok;
}

/* ---- Kimi's tiktoken.model ---- */

#define RESERVED  256 /* ids after the ranks, all of them tokens */
#define KIMI_WORD "[\\\\p{Lu}\\\\p{Lt}\\\\p{Lm}\\\\p{Lo}\\\\p{M}&&[^\\\\p{Han}]]"
#define KIMI_END  "[\\\\p{Ll}\\\\p{Lm}\\\\p{Lo}\\\\p{M}&&[^\\\\p{Han}]]"

/* What a tokenizer.json would have. */
static const char kimi_split[] =
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"behavior\": \"Isolated\", \"pattern\": "
    "{\"Regex\": \"[\\\\p{Han}]+"
    "|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?" KIMI_WORD "*" KIMI_END "+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    "|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?" KIMI_WORD "+" KIMI_END "*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    "|\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"}}, "
    "{\"type\": \"ByteLevel\", \"use_regex\": false}]}";

/* Adds <|reserved_token_ID|> for the ids that tokenizer_config.json does not name. Texts are cut at named tokens first,
 * since the reserved ones are `normalized`. */
static int add_reserved(struct tokenizer *tok, const char *path, struct err *err)
{
    const int64_t begin = tok->bpe.n_ids;
    bool named[RESERVED] = {0};
    for (int64_t id = 0; id < begin; id++)
        if (!tok->bpe.tokens[id].bytes) return err_set(err, "%s: rank %lld is missing", path, (long long)id);
    for (int64_t i = 0; i < tok->added.n; i++) {
        const int64_t at = tok->added.items[i].id - begin;
        if (at >= 0 && at < RESERVED) named[at] = true;
    }
    for (int64_t i = 0; i < RESERVED; i++) {
        char name[40];
        struct added a = {.id = (int32_t)(begin + i), .special = true, .normalized = true};
        if (named[i]) continue;
        a.size = snprintf(name, sizeof(name), "<|reserved_token_%d|>", a.id);
        a.text = mem_strdup(name);
        added_list_push(&tok->added, a);
    }
    return 0;
}

static int load_ranks(struct tokenizer *tok, const char *path, struct json config, struct err *err)
{
    int64_t size;
    char *text = file_read(path, MAX_FILE, &size, err);
    if (!text) return -1;
    tok->cuts = true;
    tok->hash = rng_bytes(rng_key((uint64_t)size, "tiktoken"), text, size);
    int rc = bpe_load_ranks(&tok->bpe, text, size, path, err);
    mem_free(text);
    struct json_doc *split = rc ? NULL : json_parse(kimi_split, (int64_t)strlen(kimi_split), "Kimi's pattern", err);
    if (!split || load_split(tok, json_root(split), err) ||
        added_config_decoder(&tok->added, &tok->bpe, true, config, err) || add_reserved(tok, path, err) ||
        added_config_named(&tok->added, &tok->bpe, config, err))
        rc = -1;
    json_free(split);
    if (!rc && build_added(tok, err)) rc = err_prefix(err, "%s", path);
    return rc;
}

/* The pattern of a tiktoken.model is in the Python code of its model: only Kimi's class is known. */
static struct tokenizer *open_ranks(const char *path, struct json config, struct err *err)
{
    const char *class = "";
    if (json_opt_str(config, "tokenizer_class", &class, err)) return NULL;
    if (strcmp(class, "TikTokenTokenizer")) {
        err_set(err, "%s: tokenizer_class \"%.64s\" is not supported, only Kimi's TikTokenTokenizer; " CONVERT, path,
                class);
        return NULL;
    }
    struct tokenizer *tok = mem_alloc(sizeof(*tok));
    if (!load_ranks(tok, path, config, err)) return tok;
    tokenizer_free(tok);
    return NULL;
}

/* ---- a checkpoint's directory ---- */

/* The error for a directory without a supported tokenizer: names the one that is there. */
static struct tokenizer *no_tokenizer(const char *dir, struct err *err)
{
    static const char *const other[] = {".tiktoken",   "tokenizer.model", ".spm",
                                        "tekken.json", "vocab.json",      "vocab.txt"};
    char **names;
    int64_t n;
    if (file_list(dir, &names, &n, err)) return NULL;
    err_set(err, "%s/tokenizer.json is missing: model.path needs the tokenizer of its model", dir);
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < MT_LEN(other); k++) {
            if (!str_ends(names[i], other[k])) continue;
            err_set(err, "%s/tokenizer.json is missing, and %s is not read; " CONVERT, dir, names[i]);
        }
    file_list_free(names, n);
    return NULL;
}

struct tokenizer *tokenizer_open(const char *dir, struct err *err)
{
    char json[MT_PATH], ranks[MT_PATH], path[MT_PATH];
    struct json_doc *doc = NULL;
    struct tokenizer *tok = NULL;
    if (file_in(json, dir, "tokenizer.json", err) || file_in(ranks, dir, "tiktoken.model", err) ||
        file_in(path, dir, "tokenizer_config.json", err) ||
        (file_exists(path) && !(doc = json_load(path, MAX_CONFIG, err))))
        return NULL;
    struct json config = doc ? json_root(doc) : (struct json){0};
    if (file_exists(json))
        tok = load(json, config, err);
    else
        tok = file_exists(ranks) ? open_ranks(ranks, config, err) : no_tokenizer(dir, err);
    json_free(doc);
    return tok;
}

struct tokenizer *tokenizer_load(const char *path, struct err *err) { return load(path, (struct json){0}, err); }

void tokenizer_free(struct tokenizer *tok)
{
    if (!tok) return;
    bpe_free(&tok->bpe);
    split_free(tok->split);
    added_list_free(&tok->added);
    for (int i = 0; i < CUTS; i++) added_free(&tok->sets[i]);
    mem_free(tok->by_id);
    mem_free(tok);
}

/* ---- lookups ---- */

uint64_t tokenizer_hash(const struct tokenizer *tok) { return tok->hash; }

int32_t tokenizer_id(const struct tokenizer *tok, const char *content)
{
    int64_t size = (int64_t)strlen(content);
    for (int64_t id = 0; id < tok->n_by_id; id++)
        if (tok->by_id[id] && !strcmp(tok->by_id[id]->text, content)) return (int32_t)id;
    return size ? bpe_find(&tok->bpe, (const uint8_t *)content, size) : -1;
}

static const struct added *find_added(const struct tokenizer *tok, int32_t id)
{
    return id >= 0 && id < tok->n_by_id ? tok->by_id[id] : NULL;
}

bool tokenizer_is_special(const struct tokenizer *tok, int32_t id)
{
    const struct added *a = find_added(tok, id);
    return a && a->special;
}

bool tokenizer_is_added(const struct tokenizer *tok, int32_t id) { return find_added(tok, id) != NULL; }

bool tokenizer_has_ranks(const struct tokenizer *tok) { return tok->cuts; }

char *tokenizer_item(const struct tokenizer *tok, int32_t id)
{
    int64_t size;
    const char *bytes = tokenizer_bytes(tok, id, &size);
    if (!bytes || find_added(tok, id)) return bytes ? mem_strndup(bytes, size) : NULL;
    return bpe_printable((const uint8_t *)bytes, size);
}

bool tokenizer_split(const struct tokenizer *tok, int32_t id, int64_t at, int32_t *left, int32_t *right)
{
    return bpe_split(&tok->bpe, id, at, left, right);
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
    const int64_t *plain; /* [n_plain] bytes of the whole text that are in no special token */
    int64_t n_plain;
    const struct normal *normal; /* of the section; NULL: its text is not changed */
    struct added_matches found[CUTS];
    int64_t section; /* where the section begins in the whole text */
    int64_t room;    /* bytes that normalized text may still have */
    struct split_work *split;
    struct bpe_work bpe;
    const char *text; /* what is being split */
    int64_t offset;   /* in the text, added to the byte ranges of the tokens */
    struct token_list *out;
};

static void push_added(struct token_list *out, const struct added_match *m, int64_t offset)
{
    token_list_reserve(out, 1);
    out->ids[out->count] = m->token->id;
    out->begin[out->count] = (int32_t)(offset + m->begin);
    out->end[out->count++] = (int32_t)(offset + m->end);
}

static int encode_piece(void *ctx, int64_t begin, int64_t end, struct err *err)
{
    struct encoder *e = ctx;
    return bpe_encode(&e->tok->bpe, &e->bpe, (const uint8_t *)e->text + begin, end - begin, e->offset + begin, e->out,
                      err);
}

static bool has_plain(const struct encoder *e, int64_t begin, int64_t end)
{
    int64_t low = 0, high = e->n_plain;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (e->plain[middle] < begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low < e->n_plain && e->plain[low] < end;
}

/* Removes the matches of special tokens that are plain text; offset: of the matches' text in the whole text. */
static void drop_plain(const struct encoder *e, struct added_matches *found, int64_t offset)
{
    int64_t kept = 0;
    for (int64_t i = 0; e->n_plain && i < found->n; i++) {
        const struct added_match *m = &found->items[i];
        const struct normal *n = e->normal;
        const int64_t begin = n ? n->begin[m->begin] : m->begin, end = n ? n->end[m->end - 1] : m->end;
        if (!m->token->special || !has_plain(e, offset + begin, offset + end)) found->items[kept++] = *m;
    }
    if (e->n_plain) found->n = kept;
}

static int encode_section(struct encoder *e, const char *text, int64_t size, int64_t offset, struct err *err);

/* Encodes the text between two tokens of the second cut. */
static int encode_pieces(struct encoder *e, const char *text, int64_t size, int64_t offset, struct err *err)
{
    e->text = text;
    e->offset = offset;
    return split_run(e->tok->split, e->split, text, size, encode_piece, e, err);
}

/* Cuts a text at added tokens, and encodes the text between them. offset is added to byte ranges. */
static int encode_cut(struct encoder *e, int cut, const char *text, int64_t size, int64_t offset, struct err *err)
{
    struct added_matches *found = &e->found[cut];
    added_find(&e->tok->sets[cut], text, size, e->special, found);
    drop_plain(e, found, e->normal ? e->section : offset);
    for (int64_t done = 0, i = 0; i <= found->n; i++) {
        const struct added_match *m = i < found->n ? &found->items[i] : NULL;
        const int64_t n = (m ? m->begin : size) - done;
        if (cut == RAW ? encode_section(e, text + done, n, offset + done, err)
                       : encode_pieces(e, text + done, n, offset + done, err))
            return -1;
        if (!m) return 0;
        push_added(e->out, m, offset);
        done = m->end;
    }
    return 0;
}

/* Python's str.isspace. */
static bool is_python_space(const char *s) { return utf8_is_space(s) || ((uint8_t)*s >= 0x1c && (uint8_t)*s <= 0x1f); }

/* Encodes a text in parts. Kimi's tokenizer cuts a text after MOST characters, and such a part after every LONGEST
 * characters that are all white space, or all other characters: no token reaches over a cut. */
static int encode_parts(struct encoder *e, const char *text, int64_t size, int64_t offset, struct err *err)
{
    enum { MOST = 400000, LONGEST = 25000 };
    int64_t begin = 0, in_part = 0, run = 0;
    bool space = false;
    for (int64_t i = 0; i < size; i += utf8_character(text + i, size - i)) {
        const bool now = is_python_space(text + i), part = in_part == MOST;
        run = part || now != space || !in_part ? 1 : run + 1;
        in_part = part ? 1 : in_part + 1;
        space = now;
        if (!part && run <= LONGEST) continue;
        if (encode_cut(e, NORMALIZED, text + begin, i - begin, offset + begin, err)) return -1;
        begin = i;
        run = 1;
    }
    return encode_cut(e, NORMALIZED, text + begin, size - begin, offset + begin, err);
}

/* Encodes the text between two tokens of the first cut. */
static int encode_section(struct encoder *e, const char *text, int64_t size, int64_t offset, struct err *err)
{
    struct normal n = {0};
    int64_t first = e->out->count;
    if (!size) return 0;
    if (e->tok->cuts) return encode_parts(e, text, size, offset, err);
    int rc = normalizer_run(&e->tok->normalizer, &n, text, size, offset == 0, &e->room, err);
    if (!rc && !n.text) rc = encode_cut(e, NORMALIZED, text, size, offset, err);
    if (!rc && n.text) {
        e->normal = &n;
        e->section = offset;
        rc = encode_cut(e, NORMALIZED, n.text, n.size, 0, err);
        e->normal = NULL;
        for (int64_t i = first; i < e->out->count; i++) {
            e->out->begin[i] = (int32_t)(offset + n.begin[e->out->begin[i]]);
            e->out->end[i] = (int32_t)(offset + n.end[e->out->end[i] - 1]);
        }
    }
    normal_free(&n);
    return rc;
}

static int encode(struct encoder *e, const char *text, int64_t size, struct err *err)
{
    if (size > MAX_TEXT) return err_set(err, "a text of %lld bytes is too long", (long long)size);
    int64_t bad = utf8_invalid_at(text, size);
    if (bad >= 0) return err_set(err, "not valid UTF-8 at byte %lld of the text", (long long)bad);
    int64_t before = e->out->count;
    e->split = split_work_new();
    e->room = NORMALIZER_GROWTH * size + NORMALIZER_FREE;
    int rc = encode_cut(e, RAW, text, size, 0, err);
    if (rc) e->out->count = before;
    split_work_free(e->split);
    bpe_work_free(&e->bpe);
    for (int i = 0; i < CUTS; i++) added_matches_free(&e->found[i]);
    return rc;
}

int tokenizer_encode(const struct tokenizer *tok, const char *text, int64_t size, bool special, struct token_list *out,
                     struct err *err)
{
    struct encoder e = {.tok = tok, .special = special, .out = out};
    return encode(&e, text, size, err);
}

int tokenizer_encode_plain(const struct tokenizer *tok, const char *text, int64_t size, const int64_t *plain,
                           int64_t n_plain, struct token_list *out, struct err *err)
{
    struct encoder e = {.tok = tok, .special = true, .plain = plain, .n_plain = n_plain, .out = out};
    return encode(&e, text, size, err);
}

void tokenizer_specials(const struct tokenizer *tok, const char *text, int64_t size, struct token_list *out)
{
    struct added_matches found = {0};
    out->count = 0;
    for (int i = 0; i < CUTS; i++) {
        added_find(&tok->sets[i], text, size, true, &found);
        for (int64_t k = 0; k < found.n; k++)
            if (found.items[k].token->special) push_added(out, &found.items[k], 0);
    }
    added_matches_free(&found);
}
