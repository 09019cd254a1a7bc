/* dataset.c - rows -> token ids and loss mask.
 *
 * Each row becomes samples (rows.h): a text, its byte spans that carry loss, and whether eos follows. A text is
 * tokenised as a whole, and a token is a target if it overlaps a span. Only preference rows divide a text, if their
 * prompt would otherwise have other tokens than at inference (encode). The result can be kept in a cache file named
 * after the hash of everything it depends on; a cache file that fails its check is ignored. */
#include "data/dataset.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/dataset/dataset_notes.h"
#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "data/source/source_list.h"

#define BAD_SHOWN     5    /* bad rows that are shown */
#define SPECIAL_SHOWN 3    /* rows that spell special tokens, which are shown */
#define BAD_PERCENT   1    /* more than this is an error */
#define BAD_JUDGED    1000 /* bad rows at which reading may stop early */
#define FNV_START     14695981039346656037u
#define CACHE_MAGIC   "MTDATA19" /* raise the number when rows give other ids than before */

struct builder {
    struct dataset *ds;
    const struct tokenizer *tok;
    const struct dataset_options *opt;
    struct err first_bad;
    int64_t bytes, bytes_done; /* size of all files; of those already read */
    int64_t judged;            /* bad rows at the last check */
    int64_t last_row;          /* number of rows at which the entry ends (max_rows) */
    /* reused from row to row */
    struct row_reader rows;
    struct token_list list, prompt; /* prompt: of an answer, alone */
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
    if (ds->counts.n_unshown) h = hash_i64(h, ds->counts.n_unshown);
    if (ds->topk.n_top) h = hash_i64(h, (int64_t)topk_hash(&ds->topk));
    if (!ds->n_docs) return h;
    h = hash_bytes(h, ds->doc_off, (ds->n_docs + 1) * (int64_t)sizeof(*ds->doc_off));
    h = hash_bytes(h, ds->doc_row, ds->n_docs * (int64_t)sizeof(*ds->doc_row));
    h = hash_bytes(h, ds->ids, ds->n_tokens * (int64_t)sizeof(*ds->ids));
    if (ds->pairs) h = hash_i64(h, 2);
    if (ds->good) h = hash_bytes(h, ds->good, ds->n_docs);
    return hash_bytes(h, ds->mask, ds->n_tokens);
}

int64_t dataset_per_unit(const struct dataset *ds) { return ds->pairs ? 2 : 1; }

int64_t dataset_units(const struct dataset *ds) { return ds->n_docs / dataset_per_unit(ds); }

static void dataset_begin(struct dataset *ds, const struct dataset_options *opt)
{
    *ds = (struct dataset){.topk.n_top = opt->tokens.n_top,
                           .pairs = opt->format == DATA_PREFERENCE,
                           .good = opt->format == DATA_LABELLED ? mem_alloc(1) : NULL};
}

static void dataset_reserve(struct dataset *ds, int64_t docs, int64_t tokens)
{
    if (docs > ds->cap_docs) {
        int64_t cap = MT_MAX(docs, 2 * ds->cap_docs);
        ds->doc_off = mem_grow(ds->doc_off, ds->cap_docs ? ds->cap_docs + 1 : 0, cap + 1, sizeof(*ds->doc_off));
        ds->doc_row = mem_grow(ds->doc_row, ds->cap_docs, cap, sizeof(*ds->doc_row));
        if (ds->good) ds->good = mem_grow(ds->good, ds->cap_docs + 1, cap + 1, 1);
        ds->cap_docs = cap;
    }
    if (tokens > ds->cap_tokens) {
        int64_t cap = MT_MAX(tokens, 2 * ds->cap_tokens);
        ds->ids = mem_grow(ds->ids, ds->cap_tokens, cap, sizeof(*ds->ids));
        ds->mask = mem_grow(ds->mask, ds->cap_tokens, cap, sizeof(*ds->mask));
        ds->cap_tokens = cap;
    }
}

/* ---- sample -> document */

static void mark_targets(uint8_t *mask, const struct token_list *list, const struct row_sample *s)
{
    int64_t span = 0;
    for (int64_t i = 0; i < list->count; i++) {
        while (span < s->n_spans && s->spans[span][1] <= list->begin[i]) span++;
        mask[i] = span < s->n_spans && s->spans[span][0] < list->end[i];
    }
}

/* Adds the tokens of text[from..size) to b->list. */
static int encode_rest(struct builder *b, const struct row_sample *s, int64_t from, struct err *err)
{
    struct token_list *list = &b->list;
    const int64_t first = list->count;
    int64_t *plain = mem_array(s->n_plain + 1, sizeof(*plain)), n_plain = 0;
    for (int64_t i = 0; i < s->n_plain; i++)
        if (s->plain[i] >= from) plain[n_plain++] = s->plain[i] - from;
    const int rc = tokenizer_encode_plain(b->tok, s->text + from, s->size - from, plain, n_plain, list, err);
    for (int64_t i = first; !rc && i < list->count; i++) list->begin[i] += (int32_t)from, list->end[i] += (int32_t)from;
    mem_free(plain);
    return rc;
}

/* Tokenises a text. Inference tokenises the prompt of an answer alone: if the whole text has other tokens for the
 * prompt, prompt and completion are tokenised separately. */
static int encode(struct builder *b, const struct row_sample *s, struct err *err)
{
    struct token_list *list = &b->list, *prompt = &b->prompt;
    int64_t n_plain = 0, n;
    list->count = prompt->count = 0;
    if (tokenizer_encode_plain(b->tok, s->text, s->size, s->plain, s->n_plain, list, err)) return -1;
    if (!s->boundary) return 0;
    while (n_plain < s->n_plain && s->plain[n_plain] < s->boundary) n_plain++;
    if (tokenizer_encode_plain(b->tok, s->text, s->boundary, s->plain, n_plain, prompt, err)) return -1;
    n = prompt->count;
    if (n < list->count && list->begin[n] >= s->boundary &&
        !memcmp(list->ids, prompt->ids, (size_t)n * sizeof(*list->ids)))
        return 0;
    list->count = 0;
    if (tokenizer_encode_plain(b->tok, s->text, s->boundary, s->plain, n_plain, list, err)) return -1;
    return encode_rest(b, s, s->boundary, err);
}

/* Appends ids and mask of a text to the data set; returns their number, or -1. */
static int64_t add_text(struct builder *b, const struct row_sample *s, struct err *err)
{
    struct dataset *ds = b->ds;
    struct token_list *list = &b->list;
    if (s->eos && b->opt->eos < 0) return err_set(err, "eos must follow, but the tokenizer names no such token");
    if (encode(b, s, err)) return -1;
    int64_t n = list->count;
    dataset_reserve(ds, ds->n_docs + 1, ds->n_tokens + n + 2);
    int32_t *ids = ds->ids + ds->n_tokens;
    uint8_t *mask = ds->mask + ds->n_tokens;
    if (n) memcpy(ids, list->ids, (size_t)n * sizeof(*ids));
    mark_targets(mask, list, s);
    if (s->eos && !(n && ids[n - 1] == b->opt->eos && mask[n - 1])) { /* many rows end with it already */
        ids[n] = b->opt->eos;
        mask[n++] = 1;
    }
    mask[0] = 0; /* no token precedes the first one to predict it */
    return n;
}

static int64_t add_tokens(struct builder *b, const struct token_row *t)
{
    struct dataset *ds = b->ds;
    dataset_reserve(ds, ds->n_docs + 1, ds->n_tokens + t->n + 1);
    memcpy(ds->ids + ds->n_tokens, t->ids, (size_t)t->n * sizeof(*ds->ids));
    memcpy(ds->mask + ds->n_tokens, t->mask, (size_t)t->n);
    return t->n;
}

static int document_add(struct builder *b, const struct row_sample *s, struct err *err)
{
    struct dataset *ds = b->ds;
    progress();
    const int64_t n = s->tokens ? add_tokens(b, s->tokens) : add_text(b, s, err);
    if (n < 0) return -1;
    const int64_t kept = MT_MIN(n, b->opt->seq_len);
    int64_t targets = 0;
    if (kept < n) ds->n_overlong++;
    if (kept < n && b->opt->overlong == OVERLONG_DROP) return 0;
    for (int64_t i = 0; i < kept; i++) targets += ds->mask[ds->n_tokens + i];
    if (!targets) {
        ds->n_unlabelled++;
        return 0;
    }
    if (s->tokens) topk_add(&ds->topk, s->tokens->topk_id, s->tokens->topk_logprob, targets);
    ds->n_tokens += kept;
    ds->doc_row[ds->n_docs] = ds->n_rows - 1;
    ds->doc_off[++ds->n_docs] = ds->n_tokens;
    return 0;
}

/* ---- units of preference rows */

static bool is_preference(enum data_format format) { return format == DATA_PREFERENCE || format == DATA_LABELLED; }

/* Adds the answer that b->rows has read. 1: it is too long or has no token with loss. */
static int answer_add(struct builder *b, struct err *err)
{
    struct dataset *ds = b->ds;
    if (!b->rows.n) return 1;
    int64_t n = add_text(b, &b->rows.samples[0], err), first = 0;
    if (n < 0) return -1;
    uint8_t *mask = ds->mask + ds->n_tokens;
    const bool plain = b->opt->loss_on == LOSS_ALL; /* `check` compares passes: no objective reads the pairs */
    if (plain) n = MT_MIN(n, b->opt->seq_len);
    if (plain) memset(mask + 1, 1, (size_t)MT_MAX(n - 1, 0));
    while (first < n && !mask[first]) first++;
    if (n > b->opt->seq_len) ds->n_overlong++;
    if (first == n || n > b->opt->seq_len) return 1;
    for (int64_t i = 1; i < first && b->opt->prompt_loss && !b->rows.worse; i++) mask[i] = 2;
    ds->n_tokens += n;
    if (ds->good) ds->good[ds->n_docs] = b->rows.good;
    ds->doc_row[ds->n_docs] = ds->n_rows - 1;
    ds->doc_off[++ds->n_docs] = ds->n_tokens;
    return 0;
}

static bool same_documents(const struct dataset *ds, int64_t a, int64_t b)
{
    const int64_t n = ds->doc_off[a + 1] - ds->doc_off[a];
    return n == ds->doc_off[b + 1] - ds->doc_off[b] &&
           !memcmp(ds->ids + ds->doc_off[a], ds->ids + ds->doc_off[b], (size_t)n * sizeof(*ds->ids));
}

static void count_texts(struct builder *b, const char *where);

/* Adds all answers of a row, or none. */
static int unit_add(struct builder *b, struct json row, const char *where, struct err *err)
{
    struct dataset *ds = b->ds;
    const int64_t n_docs = ds->n_docs, n_tokens = ds->n_tokens, n_overlong = ds->n_overlong;
    int rc = 0;
    progress();
    for (int64_t i = 0; !rc && i < dataset_per_unit(ds); i++) {
        b->rows.worse = i > 0;
        if (row_read(&b->rows, row, err)) rc = -1;
        if (!rc) count_texts(b, where);
        if (!rc && (rc = answer_add(b, err)) < 0) (void)err_prefix(err, "%s", where);
    }
    if (!rc) {
        ds->counts.n_identical += ds->pairs && same_documents(ds, n_docs, n_docs + 1);
        return 0;
    }
    ds->n_docs = n_docs;
    ds->n_tokens = n_tokens;
    const bool overlong = ds->n_overlong > n_overlong;
    ds->counts.n_tied += rc > 0 && b->rows.tied;
    if (rc > 0 && !overlong) ds->n_unlabelled++, ds->counts.n_unanswered += !b->rows.tied;
    return rc < 0 ? -1 : 0;
}

/* Index of the first token from `begin` on whose id is >= vocab, or -1. */
static int64_t first_outside(const struct dataset *ds, int64_t begin, int64_t vocab)
{
    for (int64_t i = begin; i < ds->n_tokens; i++) {
        if (ds->ids[i] < 0 || ds->ids[i] >= vocab) return i;
    }
    return -1;
}

/* ---- files */

static void show_special(const struct builder *b, const char *where)
{
    int64_t size;
    const char *text = tokenizer_bytes(b->tok, b->rows.special, &size);
    log_warn("%s: the contents spell %lld special token%s, such as %.*s", where, (long long)b->rows.n_special,
             str_plural(b->rows.n_special), (int)MT_MIN(size, 64), text);
}

/* Adds the counts of the row that was read, which are logged at the end. */
static void count_texts(struct builder *b, const char *where)
{
    const struct chat_samples *chat = &b->rows.chat.samples;
    b->ds->counts.n_unshown += chat->n_unshown;
    b->ds->counts.n_empty += chat->n_empty;
    b->ds->counts.n_appended += chat->n_appended;
    b->ds->counts.n_unended += chat->n_unended;
    b->ds->counts.n_blank += chat->n_blank;
    b->ds->counts.n_unprompted += chat->n_unprompted;
    b->ds->counts.n_nulls += b->rows.chat.n_nulls;
    if (b->rows.chat.lost && b->ds->counts.n_dropped++ < BAD_SHOWN) log_warn("%s", b->rows.chat.why.msg);
    if (b->rows.n_special && b->ds->counts.n_special++ < SPECIAL_SHOWN) show_special(b, where);
}

static int row_add(struct builder *b, struct json row, const char *where, struct err *err)
{
    if (is_preference(b->opt->format)) return unit_add(b, row, where, err);
    if (row_read(&b->rows, row, err)) return -1;
    if (!b->rows.n) b->ds->n_unlabelled++, b->ds->counts.n_unanswered++;
    count_texts(b, where);
    for (int64_t i = 0; i < b->rows.n; i++)
        if (document_add(b, &b->rows.samples[i], err)) return err_prefix(err, "%s", where);
    return 0;
}

static void row_bad(struct builder *b, const struct err *why)
{
    if (!b->ds->n_bad++) b->first_bad = *why;
    if (b->ds->n_bad <= BAD_SHOWN) log_warn("%s; the row is skipped", why->msg);
    if (b->ds->n_bad == BAD_SHOWN + 1) log_warn("further bad rows are counted, not shown");
}

/* Finishes one row, whose ids begin at `before`; -1: an error that ends the reading. */
static int row_done(struct builder *b, const char *where, bool good, const struct err *why, int64_t before,
                    struct err *err)
{
    if (!good && (b->rows.fatal || b->opt->tokens.n_top)) return err_set(err, "%s", why->msg);
    if (!good) row_bad(b, why);
    int64_t bad = first_outside(b->ds, before, b->opt->vocab);
    if (bad < 0) return 0;
    return err_set(err, "%s: token id %d is outside the model's vocabulary of %lld: use the tokenizer of this model",
                   where, b->ds->ids[bad], (long long)b->opt->vocab);
}

/* The limit of JSON values in a row. A row of a teacher has two lists with n_top entries per token. */
static int64_t row_values(const struct builder *b)
{
    return b->opt->tokens.n_top ? 64 * JSON_ROW_VALUES : JSON_ROW_VALUES;
}

/* Whether the JSON of a line seems to continue on the next line: it ends in an open bracket or a comma. */
static bool goes_on(const char *line, int64_t size)
{
    while (size && text_is_space(line[size - 1])) size--;
    return size && memchr("{[,", line[size - 1], 3);
}

/* Adds one row, which is bad for the reason *why if not `good`; -1: an error that ends the reading. */
static int add_row(struct builder *b, const struct row_text *row, bool good, struct err *why, struct err *err)
{
    const int64_t before = b->ds->n_tokens;
    struct json_doc *doc = NULL;
    b->ds->n_rows++;
    if (good) {
        doc = json_parse_row(row->text, row->size, row_values(b), row->where, why);
        if (!doc && row->last_if_bad) return err_set(err, "%s", why->msg);
        if (!doc && row->line && goes_on(row->text, row->size)) {
            const struct err json = *why;
            (void)err_set(why, "%s; a row must be one line, or the file one array of rows", json.msg);
        }
        good = doc && !row_add(b, json_root(doc), row->where, why);
        json_free(doc);
    }
    return row_done(b, row->where, good, why, before, err);
}

/* Stops early when too many rows are bad, from 1000 bad rows on. The bytes read so far give an estimate of the number
 * of rows. */
static int judge(struct builder *b, int64_t position, struct err *err)
{
    const struct dataset *ds = b->ds;
    const double read = (double)(b->bytes_done + position);
    const double rows = (double)ds->n_rows * MT_MAX(1.0, (double)b->bytes / MT_MAX(read, 1.0));
    if (ds->n_bad < BAD_JUDGED || b->judged == ds->n_bad) return 0;
    b->judged = ds->n_bad;
    if (ds->n_bad < ds->n_rows && (double)ds->n_bad * 100 <= rows * BAD_PERCENT) return 0;
    return err_set(err,
                   "%lld of the first %lld rows are bad, above the limit of %d %% of all rows; the first "
                   "is %s",
                   (long long)ds->n_bad, (long long)ds->n_rows, BAD_PERCENT, b->first_bad.msg);
}

/* Warns that a file has no rows: other files of the list may have rows. */
static void tell_empty(const char *path)
{
    const enum source_kind kind = source_list_kind(path);
    const bool table = kind == SOURCE_CSV || kind == SOURCE_TSV;
    log_warn("%s: no %s", path, kind == SOURCE_TEXT ? "text" : table ? "rows below a header" : "rows");
}

static int read_file(struct builder *b, const char *path, struct err *err)
{
    const int64_t before = b->ds->n_rows;
    struct row_text row = {0};
    struct err why;
    int status = 0, more;
    struct row_source *source = row_source_open(path, b->opt->sample_by, err);
    if (!source) return -1;
    while (!status && b->ds->n_rows < b->last_row && (more = row_source_next(source, &row, &why)) != 0) {
        if (more < 0) status = err_set(err, "%s", why.msg);
        if (!status) status = add_row(b, &row, more == 1, &why, err);
        if (!status) status = judge(b, row_source_position(source), err);
    }
    b->bytes_done += row_source_position(source);
    row_source_close(source);
    if (!status && b->ds->n_rows == before && before < b->last_row) tell_empty(path);
    return status;
}

/* Appends document d of another data set, or of the same one. */
static void copy_document(struct dataset *to, const struct dataset *from, int64_t d)
{
    int64_t begin = from->doc_off[d], n = from->doc_off[d + 1] - begin;
    dataset_reserve(to, to->n_docs + 1, to->n_tokens + n);
    memcpy(to->ids + to->n_tokens, from->ids + begin, (size_t)n * sizeof(*to->ids));
    memcpy(to->mask + to->n_tokens, from->mask + begin, (size_t)n);
    topk_copy(&to->topk, &from->topk, d);
    if (to->good) to->good[to->n_docs] = from->good[d];
    to->n_tokens += n;
    to->doc_row[to->n_docs] = from->doc_row[d];
    to->doc_off[++to->n_docs] = to->n_tokens;
}

/* Selection sampling: takes each of n documents with probability (still wanted) / (still left). */
static bool take(uint64_t key, int64_t d, int64_t n, int64_t wanted)
{
    return rng_uniform(key, (uint64_t)d) * (double)(n - d) < (double)wanted;
}

static void copy_unit(struct dataset *to, const struct dataset *from, int64_t unit)
{
    const int64_t n = dataset_per_unit(from);
    for (int64_t d = unit * n; d < (unit + 1) * n; d++) copy_document(to, from, d);
}

/* An empty data set of the same kind, with the counts. */
static struct dataset dataset_like(const struct dataset *ds)
{
    struct dataset like = *ds;
    like.doc_off = like.doc_row = NULL;
    like.ids = NULL;
    like.mask = NULL;
    like.good = ds->good ? mem_alloc(1) : NULL;
    like.topk = (struct topk){.n_top = ds->topk.n_top};
    like.n_docs = like.n_tokens = like.cap_docs = like.cap_tokens = 0;
    return like;
}

/* Repeats or samples a file's units, those from `first` on, according to its weight. */
static void weigh(struct dataset *ds, int64_t first, double weight)
{
    int64_t n = dataset_units(ds) - first, whole = (int64_t)weight;
    int64_t wanted = (int64_t)((weight - (double)whole) * (double)n + 0.5);
    uint64_t key = rng_key(0, "documents of a weighted file");
    if (weight == 1) return;
    struct dataset kept = dataset_like(ds);
    for (int64_t u = 0; u < first; u++) copy_unit(&kept, ds, u);
    for (int64_t round = 0; round < whole; round++)
        for (int64_t u = 0; u < n; u++) copy_unit(&kept, ds, first + u);
    for (int64_t u = 0, left = wanted; u < n; u++) {
        if (!take(key, u, n, left)) continue;
        copy_unit(&kept, ds, first + u);
        left--;
    }
    dataset_free(ds);
    *ds = kept;
}

static int check_rows(const struct builder *b, const char *files, struct err *err)
{
    const struct dataset *ds = b->ds;
    if (ds->n_bad * 100 > ds->n_rows * BAD_PERCENT) {
        return err_set(err, "%lld of %lld rows are bad, above the limit of %d %%; the first is %s",
                       (long long)ds->n_bad, (long long)ds->n_rows, BAD_PERCENT, b->first_bad.msg);
    }
    if (ds->n_rows && row_columns_found(&b->rows, err)) return err_prefix(err, "%s", files);
    if (ds->n_docs) return 0;
    if (!ds->n_rows) return err_set(err, "%s: no rows: expected a conversation or a text in each row", files);
    if (ds->counts.n_unanswered == ds->n_rows - ds->n_bad)
        return err_set(err,
                       "%s: no row has an answer with loss (%lld row%s): write answers as messages of role "
                       "\"assistant\" that are not empty, or check data.loss_on and the keys that remove loss (train, "
                       "weight, loss)",
                       files, (long long)ds->n_rows, str_plural(ds->n_rows));
    if (ds->counts.n_tied == ds->n_rows - ds->n_bad)
        return err_set(err, "%s: in every row all answers have the same rating: nothing to train on", files);
    return err_set(
        err,
        "%s: no document has a token with loss: %lld row%s, %lld of them longer than seq_len = %lld (%s), %lld without "
        "an answer: raise data.seq_len, or check data.loss_on",
        files, (long long)ds->n_rows, str_plural(ds->n_rows), (long long)ds->n_overlong, (long long)b->opt->seq_len,
        b->opt->overlong == OVERLONG_DROP || is_preference(b->opt->format) ? "dropped" : "truncated",
        (long long)ds->counts.n_unanswered);
}

static int add_bytes(struct builder *b, const char *path, struct err *err)
{
    struct source_files files;
    int rc = source_files_find(&files, path, err);
    for (int64_t i = 0; !rc && i < files.n; i++) b->bytes += file_size(files.paths[i]);
    source_files_free(&files);
    return rc;
}

/* Reads the files of one entry of the list, to all of whose documents the weight applies. */
static int read_source(struct builder *b, const char *path, double weight, struct err *err)
{
    struct dataset *ds = b->ds;
    struct source_files files;
    const int64_t first = dataset_units(ds), before = ds->n_rows;
    b->last_row = b->opt->max_rows ? ds->n_rows + b->opt->max_rows : INT64_MAX;
    int rc = source_files_find(&files, path, err);
    for (int64_t i = 0; !rc && i < files.n; i++) rc = read_file(b, files.paths[i], err);
    source_files_free(&files);
    if (rc) return rc;
    if (ds->n_rows == b->last_row)
        log_info("%s: read up to data.max_samples = %lld", path, (long long)b->opt->max_rows);
    const int64_t n = dataset_units(ds) - first;
    if (!n && ds->n_rows > before)
        log_warn("%s: none of its %lld row%s gives a document", path, (long long)(ds->n_rows - before),
                 str_plural(ds->n_rows - before));
    weigh(ds, first, weight);
    if (!n || dataset_units(ds) > first) return 0;
    return err_set(err, "%s: the weight after * selects none of %lld document%s: raise it, or leave the file out", path,
                   (long long)n, str_plural(n));
}

static int read_files(struct dataset *ds, const char *files, const struct tokenizer *tok,
                      const struct dataset_options *opt, struct err *err)
{
    const struct row_options rows = {.format = opt->format,
                                     .columns = opt->columns,
                                     .loss_on = is_preference(opt->format) ? LOSS_ASSISTANT : opt->loss_on,
                                     .chat = opt->chat,
                                     .whole = opt->whole,
                                     .dropped = opt->dropped,
                                     .special_text = opt->special_text,
                                     .chat_date = opt->chat_date,
                                     .system = opt->system,
                                     .tokens = {opt->tokens.n_top, opt->vocab, opt->tokens.temperature}};
    struct builder b = {.ds = ds, .tok = tok, .opt = opt, .rows = {.opt = &rows, .tok = tok}};
    char path[MT_PATH];
    const char *rest = files;
    double weight;
    int status;
    dataset_begin(ds, opt);
    while ((status = source_list_next(&rest, path, &weight, err)) == 1 && !(status = add_bytes(&b, path, err)))
        continue;
    for (rest = files; !status && (status = source_list_next(&rest, path, &weight, err)) == 1;)
        status = read_source(&b, path, weight, err);
    if (!status) status = check_rows(&b, files, err);
    token_list_free(&b.list);
    token_list_free(&b.prompt);
    row_reader_free(&b.rows);
    return status;
}

/* ---- cache: header, then doc_off, doc_row, ids, mask, good as in memory. The dataset's hash is the checksum. */

struct cache_header {
    char magic[8];
    uint64_t key, hash;
    int64_t n_docs, n_tokens, n_rows, n_bad, n_overlong, n_unlabelled;
    struct dataset_counts counts;
};

/* Adds a file to the hash, and its kind: the same bytes may be read as a text or as rows. */
static int hash_file(uint64_t *h, const char *path, struct err *err)
{
    struct file_map map;
    if (file_map_open(&map, path, err)) return -1;
    *h = hash_i64(*h, source_list_kind(path));
    *h = hash_i64(hash_bytes(*h, map.data, map.size), map.size);
    file_map_close(&map);
    return 0;
}

/* Hashes all that the result depends on: the files' bytes, tokenizer, options. */
static int cache_key(uint64_t *key, const char *files, const struct tokenizer *tok, const struct dataset_options *opt,
                     struct err *err)
{
    const int64_t numbers[] = {opt->format,       opt->loss_on,   opt->overlong, opt->seq_len,
                               opt->eos,          opt->vocab,     opt->whole,    opt->dropped,
                               opt->special_text, opt->sample_by, opt->max_rows, (int64_t)chat_template_hash(opt->chat),
                               opt->prompt_loss};
    uint64_t h = hash_bytes(FNV_START, numbers, sizeof(numbers));
    h = hash_i64(h, (int64_t)tokenizer_hash(tok));
    if (opt->chat_date) h = hash_bytes(h, opt->chat_date, (int64_t)strlen(opt->chat_date) + 1);
    if (opt->system) h = hash_bytes(h, opt->system, (int64_t)strlen(opt->system) + 1);
    if (opt->columns) h = hash_bytes(h, opt->columns, (int64_t)strlen(opt->columns) + 1);
    char path[MT_PATH];
    double weight;
    int more;
    while ((more = source_list_next(&files, path, &weight, err)) == 1) {
        struct source_files found;
        int rc = source_files_find(&found, path, err);
        h = hash_bytes(h, &weight, sizeof(weight));
        for (int64_t i = 0; !rc && i < found.n; i++) rc = hash_file(&h, found.paths[i], err);
        if (!rc && found.n != 1) h = hash_i64(h, found.n);
        source_files_free(&found);
        if (rc) return -1;
    }
    *key = h;
    return more;
}

static bool cache_valid(const struct dataset *ds, const struct dataset_options *opt)
{
    for (int64_t d = 0; d < ds->n_docs; d++) {
        int64_t n = ds->doc_off[d + 1] - ds->doc_off[d];
        if (n < 2 || n > opt->seq_len || ds->doc_row[d] < 0 || ds->doc_row[d] >= ds->n_rows) return false;
    }
    return (!ds->pairs || ds->n_docs % 2 == 0) && !ds->doc_off[0] && ds->doc_off[ds->n_docs] == ds->n_tokens &&
           first_outside(ds, 0, opt->vocab) < 0 && dataset_hash(ds) == ds->hash;
}

static bool cache_parse(struct dataset *ds, struct file_map map, uint64_t key, const struct dataset_options *opt)
{
    struct cache_header h;
    if (map.size < (int64_t)sizeof(h)) return false;
    memcpy(&h, map.data, sizeof(h));
    if (memcmp(h.magic, CACHE_MAGIC, sizeof(h.magic)) || h.key != hash_bytes(key, &h.counts, sizeof(h.counts)))
        return false;
    if (h.n_docs < 1 || h.n_docs >= map.size || h.n_tokens < 1 || h.n_tokens >= map.size) return false;
    int64_t off_bytes = (h.n_docs + 1) * (int64_t)sizeof(*ds->doc_off);
    int64_t ids_bytes = h.n_tokens * (int64_t)sizeof(*ds->ids);
    int64_t row_bytes = h.n_docs * (int64_t)sizeof(*ds->doc_row);
    const int64_t good_bytes = opt->format == DATA_LABELLED ? h.n_docs : 0;
    if (map.size != (int64_t)sizeof(h) + off_bytes + row_bytes + ids_bytes + h.n_tokens + good_bytes) return false;

    const uint8_t *p = map.data + sizeof(h);
    dataset_begin(ds, opt);
    dataset_reserve(ds, h.n_docs, h.n_tokens);
    memcpy(ds->doc_off, p, (size_t)off_bytes);
    memcpy(ds->doc_row, p + off_bytes, (size_t)row_bytes);
    memcpy(ds->ids, p + off_bytes + row_bytes, (size_t)ids_bytes);
    memcpy(ds->mask, p + off_bytes + row_bytes + ids_bytes, (size_t)h.n_tokens);
    if (ds->good) memcpy(ds->good, p + off_bytes + row_bytes + ids_bytes + h.n_tokens, (size_t)good_bytes);
    ds->n_docs = h.n_docs;
    ds->n_tokens = h.n_tokens;
    ds->n_rows = h.n_rows;
    ds->n_bad = h.n_bad;
    ds->n_overlong = h.n_overlong;
    ds->n_unlabelled = h.n_unlabelled;
    ds->counts = h.counts;
    ds->hash = h.hash;
    return cache_valid(ds, opt);
}

/* Reads ds from its cache file. False, with ds empty: the file is missing or fails a check. */
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
    struct cache_header h = {.key = hash_bytes(key, &ds->counts, sizeof(ds->counts)),
                             .hash = ds->hash,
                             .n_docs = ds->n_docs,
                             .n_tokens = ds->n_tokens,
                             .n_rows = ds->n_rows,
                             .n_bad = ds->n_bad,
                             .n_overlong = ds->n_overlong,
                             .n_unlabelled = ds->n_unlabelled,
                             .counts = ds->counts};
    memcpy(h.magic, CACHE_MAGIC, sizeof(h.magic));
    const struct file_part parts[] = {
        {&h, sizeof(h)},
        {ds->doc_off, (ds->n_docs + 1) * (int64_t)sizeof(*ds->doc_off)},
        {ds->doc_row, ds->n_docs * (int64_t)sizeof(*ds->doc_row)},
        {ds->ids, ds->n_tokens * (int64_t)sizeof(*ds->ids)},
        {ds->mask, ds->n_tokens},
        {ds->good, ds->good ? ds->n_docs : 0},
    };
    if (file_make_dirs(dir, err)) return -1;
    return file_write_parts(path, parts, MT_LEN(parts), err);
}

/* ---- the whole data set */

const char *dataset_hub_hint(const char *path)
{
    const char *slash = strchr(path, '/');
    if (!slash || slash == path || !slash[1] || path[0] == '.' || path[0] == '~') return "";
    return "; for a data set on huggingface.co write hub:OWNER/NAME";
}

/* Checks that the files of one entry can be read; logs which files a folder or pattern has. */
static int check_source(const char *path, struct err *err)
{
    struct err why;
    struct source_files files;
    int rc = source_files_find(&files, path, err);
    for (int64_t i = 0; !rc && i < files.n; i++)
        if (file_check_kind(files.paths[i], false, &why))
            rc = err_set(err, "%s%s", why.msg, dataset_hub_hint(path));
        else
            rc = file_check_holes(files.paths[i], err);
    if (!rc && strcmp(files.paths[0], path) != 0)
        log_info("%s: %lld file%s, from %s to %s", path, (long long)files.n, str_plural(files.n), files.paths[0],
                 files.paths[files.n - 1]);
    if (!rc && files.n_texts)
        log_info("%s: %lld text file%s left out beside files of rows: name a pattern, such as *.txt, to read texts",
                 path, (long long)files.n_texts, files.n_texts == 1 ? " is" : "s are");
    source_files_free(&files);
    return rc;
}

/* Checks all files, before all their bytes are hashed. */
static int check_files(const char *files, struct err *err)
{
    char path[MT_PATH];
    double weight;
    int status;
    while ((status = source_list_next(&files, path, &weight, err)) == 1)
        if (check_source(path, err)) return -1;
    return status;
}

int dataset_load(struct dataset *ds, const char *files, const struct tokenizer *tok, const struct dataset_options *opt,
                 struct err *err)
{
    MT_REQUIRE(opt->seq_len > 0 && opt->vocab > 0, "seq_len %lld, vocab %lld", (long long)opt->seq_len,
               (long long)opt->vocab);
    char path[MT_PATH];
    uint64_t key = 0;
    const bool cached = opt->cache_dir && !opt->tokens.n_top;
    *ds = (struct dataset){0};
    if (check_files(files, err)) return -1;
    if (cached) {
        if (cache_key(&key, files, tok, opt, err)) return -1;
        if (str_format(path, sizeof(path), err, "the path of the data cache", "%s/%016llx.bin", opt->cache_dir,
                       (unsigned long long)key))
            return -1;
    }
    if (!cached || !cache_read(ds, path, key, opt)) {
        struct err why;
        if (read_files(ds, files, tok, opt, err)) {
            dataset_free(ds);
            return -1;
        }
        ds->hash = dataset_hash(ds);
        if (cached && cache_write(ds, opt->cache_dir, path, key, &why)) {
            log_warn("%s; without this cache each run tokenises the data again", why.msg);
        }
    }
    dataset_notes(ds, files, opt);
    return 0;
}

/* Chooses the rows to hold out, among those with documents: [n_rows] 1 yes, -1 no; *n is the number of rows with
 * documents. */
static int8_t *choose_rows(const struct dataset *ds, double fraction, uint64_t seed, int64_t *n, int64_t *want)
{
    int8_t *held = mem_array(ds->n_rows, sizeof(*held));
    uint64_t key = rng_key(seed, "held-out documents");
    *n = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) {
        *n += !held[ds->doc_row[d]];
        held[ds->doc_row[d]] = -1;
    }
    *want = fraction < 1 ? MT_MAX(1, (int64_t)(fraction * (double)*n + 0.5)) : *n;
    for (int64_t row = 0, i = 0, left = *want; row < ds->n_rows; row++) {
        if (!held[row] || !take(key, i++, *n, left)) continue;
        held[row] = 1;
        left--;
    }
    return held;
}

int dataset_split(struct dataset *ds, struct dataset *held, double fraction, uint64_t seed, struct err *err)
{
    *held = (struct dataset){0};
    if (!(fraction > 0)) return 0;
    int64_t n, want;
    int8_t *out = choose_rows(ds, fraction, seed, &n, &want);
    if (want >= n) {
        mem_free(out);
        return err_set(err, "holding out %g of %lld documents leaves none to train on: lower eval_split or add data",
                       fraction, (long long)ds->n_docs);
    }
    struct dataset rest = dataset_like(ds);
    rest.counts = (struct dataset_counts){0};
    *held = dataset_like(&rest);
    held->n_bad = held->n_overlong = held->n_unlabelled = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) copy_document(out[ds->doc_row[d]] > 0 ? held : &rest, ds, d);
    held->n_rows = ds->n_rows; /* doc_row counts all rows */
    rest.hash = dataset_hash(&rest);
    held->hash = dataset_hash(held);
    mem_free(out);
    dataset_free(ds);
    *ds = rest;
    return 0;
}

int64_t dataset_targets(const struct dataset *ds)
{
    int64_t n = 0;
    for (int64_t i = 0; i < ds->n_tokens; i++) n += ds->mask[i] == 1;
    return n;
}

void dataset_free(struct dataset *ds)
{
    mem_free(ds->doc_off);
    mem_free(ds->doc_row);
    mem_free(ds->ids);
    mem_free(ds->mask);
    mem_free(ds->good);
    mem_free(ds->reference);
    topk_free(&ds->topk);
    *ds = (struct dataset){0};
}
