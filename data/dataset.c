/* dataset.c - JSONL rows -> token ids and loss mask.
 *
 * Each row becomes a sample: one text, the byte spans of it that carry loss, and whether eos follows. The text is
 * tokenised once, as a whole, and a token is a target when it overlaps a span: tokenising prompt and answer apart would
 * give other ids than the model meets when it is used. The result can be kept in a cache file named after the hash of
 * everything it depends on; a cache that does not verify is as good as none. */
#include "data/dataset.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "data/chat.h"
#include "data/file.h"
#include "data/json.h"

#define BAD_SHOWN   5 /* bad rows told in words */
#define BAD_PERCENT 1 /* more than this is an error */
#define FNV_START   14695981039346656037u
#define CACHE_MAGIC "MTDATA01" /* raise the number when rows turn into other ids than before */

/* What a row says. Text and spans belong to the row's JSON document or to the builder. */
struct sample {
    const char *text;
    int64_t size;
    const int64_t (*spans)[2]; /* [n_spans] bytes [begin, end) with loss, ascending */
    int64_t n_spans;
    bool eos; /* append eos, with loss */
};

struct builder {
    struct dataset *ds;
    const struct tokenizer *tok;
    const struct dataset_options *opt;
    struct err first_bad;
    /* reused from row to row */
    struct token_list list;
    struct chat_text chat;
    char *joined; /* prompt and completion */
    int64_t joined_cap;
    int64_t span[2];
};

/* FNV-1a, continued from h. */
static uint64_t hash_bytes(uint64_t h, const void *data, int64_t size)
{
    const uint8_t *p = data;
    for (int64_t i = 0; i < size; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

static uint64_t hash_i64(uint64_t h, int64_t x) { return hash_bytes(h, &x, sizeof(x)); }

static uint64_t dataset_hash(const struct dataset *ds)
{
    const int64_t counts[] = {ds->n_docs, ds->n_tokens, ds->n_rows, ds->n_bad, ds->n_overlong, ds->n_unlabelled};
    uint64_t h = hash_bytes(FNV_START, counts, sizeof(counts));
    if (!ds->n_docs) return h;
    h = hash_bytes(h, ds->doc_off, (ds->n_docs + 1) * (int64_t)sizeof(*ds->doc_off));
    h = hash_bytes(h, ds->ids, ds->n_tokens * (int64_t)sizeof(*ds->ids));
    return hash_bytes(h, ds->mask, ds->n_tokens);
}

static void dataset_reserve(struct dataset *ds, int64_t docs, int64_t tokens)
{
    if (docs > ds->cap_docs) {
        int64_t cap = MT_MAX(docs, 2 * ds->cap_docs);
        ds->doc_off = mem_grow(ds->doc_off, ds->cap_docs ? ds->cap_docs + 1 : 0, cap + 1, sizeof(*ds->doc_off));
        ds->cap_docs = cap;
    }
    if (tokens > ds->cap_tokens) {
        int64_t cap = MT_MAX(tokens, 2 * ds->cap_tokens);
        ds->ids = mem_grow(ds->ids, ds->cap_tokens, cap, sizeof(*ds->ids));
        ds->mask = mem_grow(ds->mask, ds->cap_tokens, cap, sizeof(*ds->mask));
        ds->cap_tokens = cap;
    }
}

/* ---- row -> sample */

static int row_prompt_completion(struct builder *b, struct json row, struct sample *s, struct err *err)
{
    const char *prompt, *completion;
    int64_t n_prompt, n_completion, size;
    if (json_str(json_find(row, "prompt"), &prompt, &n_prompt, err)) return -1;
    if (json_str(json_find(row, "completion"), &completion, &n_completion, err)) return -1;
    MT_REQUIRE(i64_add(n_prompt, n_completion, &size), "a row of more than 2^63 bytes");
    if (size > b->joined_cap) {
        b->joined = mem_grow(b->joined, b->joined_cap, 2 * size, 1);
        b->joined_cap = 2 * size;
    }
    if (n_prompt) memcpy(b->joined, prompt, (size_t)n_prompt);
    if (n_completion) memcpy(b->joined + n_prompt, completion, (size_t)n_completion);
    b->span[0] = n_prompt;
    b->span[1] = size;
    *s = (struct sample){.text = b->joined, .size = size, .spans = &b->span, .n_spans = 1, .eos = true};
    return 0;
}

/* Marks that a tokenizer does not know would be read as ordinary text, and the model would learn to write them so. */
static int check_harmony(const struct tokenizer *tok, struct json row, struct err *err)
{
    static const char *const marks[] = {"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"};
    for (int i = 0; i < MT_LEN(marks); i++)
        if (tokenizer_id(tok, marks[i]) < 0)
            return json_error(row, err,
                              "messages are rendered in gpt-oss's harmony format, but the tokenizer has no %s; "
                              "write the model's own template into prompt and completion",
                              marks[i]);
    return 0;
}

static int row_messages(struct builder *b, struct json row, struct sample *s, struct err *err)
{
    const struct chat_options chat = {.date = b->opt->chat_date};
    b->chat.size = b->chat.n_spans = 0;
    if (check_harmony(b->tok, row, err) || chat_render_harmony(&b->chat, row, &chat, err)) return -1;
    *s = (struct sample){.text = b->chat.text, .size = b->chat.size, .n_spans = b->chat.n_spans};
    s->spans = (const int64_t(*)[2])b->chat.spans;
    return 0;
}

static int row_text(struct builder *b, struct json row, struct sample *s, struct err *err)
{
    *s = (struct sample){.spans = &b->span, .n_spans = 1, .eos = true};
    if (json_str(json_find(row, "text"), &s->text, &s->size, err)) return -1;
    b->span[0] = 0;
    b->span[1] = s->size;
    return 0;
}

static int row_sample(struct builder *b, struct json row, struct sample *s, struct err *err)
{
    if (json_type(row) != JSON_OBJECT) return json_error(row, err, "a row must be an object, {...}");
    enum data_format format = b->opt->format;
    if (format == DATA_AUTO) {
        if (json_has(row, "messages"))
            format = DATA_MESSAGES;
        else if (json_has(row, "prompt") && json_has(row, "completion"))
            format = DATA_PROMPT_COMPLETION;
        else if (json_has(row, "text"))
            format = DATA_TEXT;
        else
            return json_error(row, err, "none of `messages`, `prompt` with `completion`, `text` is there");
    }
    if (format == DATA_TEXT) return row_text(b, row, s, err);
    if (format == DATA_MESSAGES ? row_messages(b, row, s, err) : row_prompt_completion(b, row, s, err)) return -1;
    if (b->opt->loss_on == LOSS_ALL) {
        b->span[0] = 0;
        b->span[1] = s->size;
        s->spans = &b->span;
        s->n_spans = 1;
    }
    return 0;
}

/* ---- sample -> document */

/* A token is a target when it overlaps a span. */
static void mark_targets(uint8_t *mask, const struct token_list *list, const struct sample *s)
{
    int64_t span = 0;
    for (int64_t i = 0; i < list->count; i++) {
        while (span < s->n_spans && s->spans[span][1] <= list->begin[i]) span++;
        mask[i] = span < s->n_spans && s->spans[span][0] < list->end[i];
    }
}

static int document_add(struct builder *b, const struct sample *s, struct err *err)
{
    struct dataset *ds = b->ds;
    struct token_list *list = &b->list;
    if (s->eos && b->opt->eos < 0) return err_set(err, "eos must follow, but the tokenizer names no such token");
    list->count = 0;
    if (tokenizer_encode(b->tok, s->text, s->size, true, list, err)) return -1;

    int64_t n = list->count + s->eos, kept = MT_MIN(n, b->opt->seq_len), targets = 0;
    if (kept < n) ds->n_overlong++;
    if (kept < n && b->opt->overlong == OVERLONG_DROP) return 0;

    dataset_reserve(ds, ds->n_docs + 1, ds->n_tokens + n + 1);
    int32_t *ids = ds->ids + ds->n_tokens;
    uint8_t *mask = ds->mask + ds->n_tokens;
    if (list->count) memcpy(ids, list->ids, (size_t)list->count * sizeof(*ids));
    mark_targets(mask, list, s);
    if (s->eos) {
        ids[n - 1] = b->opt->eos;
        mask[n - 1] = 1;
    }
    mask[0] = 0; /* nothing stands before the first token to predict it from */

    for (int64_t i = 0; i < kept; i++) targets += mask[i];
    if (!targets) {
        ds->n_unlabelled++;
        return 0;
    }
    ds->n_tokens += kept;
    ds->doc_off[++ds->n_docs] = ds->n_tokens;
    return 0;
}

/* The first token from `begin` on that has no row in the model's embedding, or -1. */
static int64_t first_outside(const struct dataset *ds, int64_t begin, int64_t vocab)
{
    for (int64_t i = begin; i < ds->n_tokens; i++) {
        if (ds->ids[i] < 0 || ds->ids[i] >= vocab) return i;
    }
    return -1;
}

/* ---- files */

static int row_add(struct builder *b, const char *line, int64_t size, const char *where, struct err *err)
{
    struct sample s;
    struct json_doc *doc = json_parse(line, size, where, err);
    if (!doc) return -1;
    int status = row_sample(b, json_root(doc), &s, err);
    if (!status && document_add(b, &s, err)) status = err_prefix(err, "%s", where);
    json_free(doc);
    return status;
}

static void row_bad(struct builder *b, const struct err *why)
{
    if (!b->ds->n_bad++) b->first_bad = *why;
    if (b->ds->n_bad <= BAD_SHOWN) log_warn("%s; the row is skipped", why->msg);
    if (b->ds->n_bad == BAD_SHOWN + 1) log_warn("more bad rows follow, they are counted only");
}

static bool is_blank(const char *line, int64_t size)
{
    for (int64_t i = 0; i < size; i++) {
        if (!isspace((unsigned char)line[i])) return false;
    }
    return true;
}

static int read_file(struct builder *b, const char *path, struct err *err)
{
    struct dataset *ds = b->ds;
    char *line, where[MT_PATH + 32];
    int64_t size;
    int status;
    struct line_reader *reader = line_reader_open(path, err);
    if (!reader) return -1;
    while ((status = line_reader_next(reader, &line, &size, err)) == 1) {
        struct err why;
        int64_t before = ds->n_tokens;
        if (is_blank(line, size)) continue;
        snprintf(where, sizeof(where), "%s:%lld", path, (long long)line_reader_line(reader));
        ds->n_rows++;
        if (row_add(b, line, size, where, &why)) row_bad(b, &why);
        int64_t bad = first_outside(ds, before, b->opt->vocab);
        if (bad < 0) continue;
        status =
            err_set(err, "%s: token id %d is outside the model's vocabulary of %lld: the tokenizer is not the model's",
                    where, ds->ids[bad], (long long)b->opt->vocab);
        break;
    }
    line_reader_close(reader);
    return status;
}

/* Copies the next of comma-separated paths, blanks around it left out, and moves *list past it; 0 at the end. */
static int next_path(const char **list, char path[MT_PATH], struct err *err)
{
    const char *p = *list + strspn(*list, ", \t");
    size_t n = strcspn(p, ",");
    *list = p + n;
    while (n && isspace((unsigned char)p[n - 1])) n--;
    if (n >= MT_PATH) return err_set(err, "a path of %zu bytes is too long: %.60s...", n, p);
    memcpy(path, p, n);
    path[n] = 0;
    return n > 0;
}

static int check_rows(const struct builder *b, const char *files, struct err *err)
{
    const struct dataset *ds = b->ds;
    if (ds->n_bad * 100 > ds->n_rows * BAD_PERCENT) {
        return err_set(err, "%lld of %lld rows are bad, more than the %d %% that may be skipped; the first is %s",
                       (long long)ds->n_bad, (long long)ds->n_rows, BAD_PERCENT, b->first_bad.msg);
    }
    if (ds->n_docs) return 0;
    return err_set(err,
                   "%s: nothing to train on: %lld rows, %lld of them longer than seq_len = %lld (%s), %lld without "
                   "a token to learn",
                   files, (long long)ds->n_rows, (long long)ds->n_overlong, (long long)b->opt->seq_len,
                   b->opt->overlong == OVERLONG_DROP ? "dropped" : "cut", (long long)ds->n_unlabelled);
}

static int read_files(struct dataset *ds, const char *files, const struct tokenizer *tok,
                      const struct dataset_options *opt, struct err *err)
{
    struct builder b = {.ds = ds, .tok = tok, .opt = opt};
    char path[MT_PATH];
    const char *rest = files;
    int status;
    while ((status = next_path(&rest, path, err)) == 1) {
        if ((status = read_file(&b, path, err))) break;
    }
    if (!status) status = check_rows(&b, files, err);
    token_list_free(&b.list);
    chat_text_free(&b.chat);
    mem_free(b.joined);
    return status;
}

/* ---- cache: header, then doc_off, ids, mask as they lie in memory. The dataset's own hash is the checksum. */

struct cache_header {
    char magic[8];
    uint64_t key, hash;
    int64_t n_docs, n_tokens, n_rows, n_bad, n_overlong, n_unlabelled;
};

/* Of everything the result depends on: files' bytes, tokenizer, options. */
static int cache_key(uint64_t *key, const char *files, const struct tokenizer *tok, const struct dataset_options *opt,
                     struct err *err)
{
    const int64_t numbers[] = {opt->format, opt->loss_on, opt->overlong, opt->seq_len, opt->eos, opt->vocab};
    uint64_t h = hash_bytes(FNV_START, numbers, sizeof(numbers));
    h = hash_i64(h, (int64_t)tokenizer_hash(tok));
    if (opt->chat_date) h = hash_bytes(h, opt->chat_date, (int64_t)strlen(opt->chat_date) + 1);
    char path[MT_PATH];
    int more;
    while ((more = next_path(&files, path, err)) == 1) {
        struct file_map map;
        if (file_map_open(&map, path, err)) return -1;
        h = hash_i64(hash_bytes(h, map.data, map.size), map.size);
        file_map_close(&map);
    }
    *key = h;
    return more;
}

static bool cache_valid(const struct dataset *ds, const struct dataset_options *opt)
{
    for (int64_t d = 0; d < ds->n_docs; d++) {
        int64_t n = ds->doc_off[d + 1] - ds->doc_off[d];
        if (n < 2 || n > opt->seq_len) return false;
    }
    return !ds->doc_off[0] && ds->doc_off[ds->n_docs] == ds->n_tokens && first_outside(ds, 0, opt->vocab) < 0 &&
           dataset_hash(ds) == ds->hash;
}

static bool cache_parse(struct dataset *ds, struct file_map map, uint64_t key, const struct dataset_options *opt)
{
    struct cache_header h;
    if (map.size < (int64_t)sizeof(h)) return false;
    memcpy(&h, map.data, sizeof(h));
    if (memcmp(h.magic, CACHE_MAGIC, sizeof(h.magic)) || h.key != key) return false;
    if (h.n_docs < 1 || h.n_docs >= map.size || h.n_tokens < 1 || h.n_tokens >= map.size) return false;
    int64_t off_bytes = (h.n_docs + 1) * (int64_t)sizeof(*ds->doc_off);
    int64_t ids_bytes = h.n_tokens * (int64_t)sizeof(*ds->ids);
    if (map.size != (int64_t)sizeof(h) + off_bytes + ids_bytes + h.n_tokens) return false;

    const uint8_t *p = map.data + sizeof(h);
    dataset_reserve(ds, h.n_docs, h.n_tokens);
    memcpy(ds->doc_off, p, (size_t)off_bytes);
    memcpy(ds->ids, p + off_bytes, (size_t)ids_bytes);
    memcpy(ds->mask, p + off_bytes + ids_bytes, (size_t)h.n_tokens);
    ds->n_docs = h.n_docs;
    ds->n_tokens = h.n_tokens;
    ds->n_rows = h.n_rows;
    ds->n_bad = h.n_bad;
    ds->n_overlong = h.n_overlong;
    ds->n_unlabelled = h.n_unlabelled;
    ds->hash = h.hash;
    return cache_valid(ds, opt);
}

/* False, with ds empty, when there is no such file or anything in it is not as it should be. */
static bool cache_read(struct dataset *ds, const char *path, uint64_t key, const struct dataset_options *opt)
{
    struct file_map map;
    if (!file_exists(path) || file_map_open(&map, path, NULL)) return false;
    bool good = cache_parse(ds, map, key, opt);
    file_map_close(&map);
    if (!good) dataset_free(ds);
    return good;
}

static int cache_write(const struct dataset *ds, const char *dir, const char *path, uint64_t key, struct err *err)
{
    const struct cache_header h = {CACHE_MAGIC, key,       ds->hash,       ds->n_docs,      ds->n_tokens,
                                   ds->n_rows,  ds->n_bad, ds->n_overlong, ds->n_unlabelled};
    const struct file_part parts[] = {
        {&h, sizeof(h)},
        {ds->doc_off, (ds->n_docs + 1) * (int64_t)sizeof(*ds->doc_off)},
        {ds->ids, ds->n_tokens * (int64_t)sizeof(*ds->ids)},
        {ds->mask, ds->n_tokens},
    };
    if (file_make_dirs(dir, err)) return -1;
    return file_write_parts(path, parts, MT_LEN(parts), err);
}

/* ---- the whole */

static void warn_left_out(const struct dataset *ds, const char *files, const struct dataset_options *opt)
{
    long long rows = ds->n_rows, seq_len = opt->seq_len;
    if (ds->n_bad) log_warn("%s: %lld of %lld rows are bad and were skipped", files, (long long)ds->n_bad, rows);
    if (ds->n_overlong) {
        log_warn("%s: %lld of %lld rows are longer than seq_len = %lld and were %s", files, (long long)ds->n_overlong,
                 rows, seq_len, opt->overlong == OVERLONG_DROP ? "dropped" : "cut at their end");
    }
    if (ds->n_unlabelled) {
        log_warn("%s: %lld of %lld rows have no token to learn within seq_len = %lld and were dropped", files,
                 (long long)ds->n_unlabelled, rows, seq_len);
    }
}

int dataset_load(struct dataset *ds, const char *files, const struct tokenizer *tok, const struct dataset_options *opt,
                 struct err *err)
{
    MT_REQUIRE(opt->seq_len > 0 && opt->vocab > 0, "seq_len %lld, vocab %lld", (long long)opt->seq_len,
               (long long)opt->vocab);
    char path[MT_PATH];
    uint64_t key = 0;
    *ds = (struct dataset){0};
    if (opt->cache_dir) {
        if (cache_key(&key, files, tok, opt, err)) return -1;
        if (str_format(path, sizeof(path), err, "the path of the data cache", "%s/%016llx.bin", opt->cache_dir,
                       (unsigned long long)key))
            return -1;
    }
    if (!opt->cache_dir || !cache_read(ds, path, key, opt)) {
        struct err why;
        if (read_files(ds, files, tok, opt, err)) {
            dataset_free(ds);
            return -1;
        }
        ds->hash = dataset_hash(ds);
        if (opt->cache_dir && cache_write(ds, opt->cache_dir, path, key, &why)) {
            log_warn("%s; the data are tokenised anew in each run", why.msg);
        }
    }
    warn_left_out(ds, files, opt);
    return 0;
}

/* Appends document d of another dataset. */
static void copy_document(struct dataset *to, const struct dataset *from, int64_t d)
{
    int64_t begin = from->doc_off[d], n = from->doc_off[d + 1] - begin;
    dataset_reserve(to, to->n_docs + 1, to->n_tokens + n);
    memcpy(to->ids + to->n_tokens, from->ids + begin, (size_t)n * sizeof(*to->ids));
    memcpy(to->mask + to->n_tokens, from->mask + begin, (size_t)n);
    to->n_tokens += n;
    to->doc_off[++to->n_docs] = to->n_tokens;
}

int dataset_split(struct dataset *ds, struct dataset *held, double fraction, uint64_t seed, struct err *err)
{
    *held = (struct dataset){0};
    if (!(fraction > 0)) return 0;
    int64_t n = ds->n_docs, want = fraction < 1 ? MT_MAX(1, (int64_t)(fraction * (double)n + 0.5)) : n;
    if (want >= n) {
        return err_set(err, "holding out %g of %lld documents leaves none to train on: lower eval_split or add data",
                       fraction, (long long)n);
    }
    /* Selection sampling: each document with probability (wanted yet) / (documents yet). */
    struct dataset rest = {
        .n_rows = ds->n_rows, .n_bad = ds->n_bad, .n_overlong = ds->n_overlong, .n_unlabelled = ds->n_unlabelled};
    uint64_t key = rng_key(seed, "held-out documents");
    for (int64_t d = 0; d < n; d++) {
        bool take = rng_uniform(key, (uint64_t)d) * (double)(n - d) < (double)(want - held->n_docs);
        copy_document(take ? held : &rest, ds, d);
    }
    rest.hash = dataset_hash(&rest);
    held->hash = dataset_hash(held);
    dataset_free(ds);
    *ds = rest;
    return 0;
}

int64_t dataset_targets(const struct dataset *ds)
{
    int64_t n = 0;
    for (int64_t i = 0; i < ds->n_tokens; i++) n += ds->mask[i];
    return n;
}

void dataset_free(struct dataset *ds)
{
    mem_free(ds->doc_off);
    mem_free(ds->ids);
    mem_free(ds->mask);
    *ds = (struct dataset){0};
}
