/* questions.c - see questions.h. */
#include "train/answers/questions.h"

#include <string.h>

#include "data/bad_rows.h"
#include "train/generate/answer_text.h"
#include "train/models/message.h"

static struct question *add(struct questions *qs)
{
    qs->items = mem_reserve(qs->items, &qs->cap, qs->n + 1, sizeof(*qs->items));
    qs->items[qs->n] = (struct question){.reference = NULL};
    return &qs->items[qs->n++];
}

static void set_reference(struct question *q, const char *text, int64_t size)
{
    q->reference = mem_strndup(text, size);
    q->reference_size = size;
}

/* ---- held-out documents ---- */

static bool is_end(const struct prompt *p, int32_t id)
{
    for (int64_t i = 0; i < p->n_ends; i++)
        if (p->ends[i] == id) return true;
    return false;
}

/* The text of an answer's tokens, up to its end token, without reasoning. */
static void decode_reference(struct question *q, const struct run *r, const int32_t *ids, int64_t n)
{
    struct answer_text text = {.tok = r->tok};
    struct message m = {.n_call = 0};
    const struct message_input in = {.rules = message_rules_of(r->chat), .think_open = q->opened, .whole = true};
    answer_text_begin(&text);
    for (int64_t i = 0; i < n && !is_end(&q->r.prompt, ids[i]); i++) (void)answer_text_add(&text, ids[i]);
    answer_text_end(&text);
    message_parse(&m, &in, text.text.text, text.text.size);
    set_reference(q, m.content.text, m.content.size);
    message_free(&m);
    answer_text_free(&text);
}

static int add_document(struct questions *qs, const struct run *r, int64_t d, const struct row_defaults *defaults,
                        struct err *err)
{
    const struct dataset *ds = &r->eval;
    const int64_t first = ds->doc_off[d], n = ds->doc_off[d + 1] - first;
    const uint8_t *mask = ds->mask + first;
    int64_t end = n, begin;
    char name[64];
    while (end && !mask[end - 1]) end--;
    for (begin = end; begin && mask[begin - 1]; begin--) {
    }
    if (begin <= 1)
        return err_set(err,
                       "held-out document %lld has no prompt: all its tokens carry loss; eval --generate needs "
                       "conversations or prompts with answers",
                       (long long)d);
    struct question *q = add(qs);
    struct row_request *row = &q->r;
    if (prompt_document(&row->prompt, r, ds->ids + first, begin, err)) return -1;
    snprintf(name, sizeof(name), "%lld", (long long)d);
    row->id = mem_strdup(name);
    row->ends = mem_array(MT_MAX(row->prompt.n_ends, 1), sizeof(*row->ends)); /* a question may move in its list */
    memcpy(row->ends, row->prompt.ends, (size_t)row->prompt.n_ends * sizeof(*row->ends));
    row->q = (struct sample_request){.n = defaults->n,
                                     .params = defaults->params,
                                     .ids = row->prompt.ids.ids,
                                     .n_ids = begin,
                                     .end_ids = row->ends,
                                     .n_end_ids = row->prompt.n_ends};
    row->q.params.seed = (uint64_t)row_request_seed(defaults, d);
    q->opened = prompt_opens_reasoning(&row->prompt, r->tok);
    decode_reference(q, r, ds->ids + first + begin, end - begin);
    if (begin + row->q.params.max_tokens <= r->arch.max_len) return 0;
    return err_set(err,
                   "held-out document %lld: %lld tokens of prompt and --tokens %lld are over the model's %lld: lower "
                   "--tokens",
                   (long long)d, (long long)begin, (long long)row->q.params.max_tokens, (long long)r->arch.max_len);
}

/* Rejected answers of pairs, and answers of labelled rows with label false, are no references. */
static bool is_reference(const struct dataset *ds, int64_t d)
{
    return !(ds->pairs && d % 2) && !(ds->good && !ds->good[d]);
}

int questions_held_out(struct questions *qs, const struct run *r, const struct row_defaults *d, int64_t most,
                       struct err *err)
{
    if (r->eval.n_overlong)
        log_warn("%lld held-out documents are longer than data.seq_len: truncated references lack their ends",
                 (long long)r->eval.n_overlong);
    for (int64_t i = 0; i < r->eval.n_docs && qs->n < most; i++)
        if (is_reference(&r->eval, i) && add_document(qs, r, i, d, err)) return -1;
    return qs->n ? 0
                 : err_set(err, "nothing to evaluate on: every held-out answer has a label that says that it is bad");
}

/* ---- rows ---- */

/* A string, or the JSON of another value. */
static int reference_of(struct question *q, struct json value, struct err *err)
{
    struct text_buf text = {0};
    const char *s;
    int64_t size;
    int rc = 0;
    if (!json_given(value)) return 0;
    if (json_type(value) == JSON_STRING)
        rc = json_str(value, &s, &size, err);
    else
        rc = text_put_json(&text, value, err);
    if (!rc && json_type(value) == JSON_STRING)
        set_reference(q, s, size);
    else if (!rc)
        set_reference(q, text.text, text.size);
    text_free(&text);
    return rc;
}

static struct json reference_in(struct json row, const char *key)
{
    const struct json messages = json_find(row, "messages");
    const struct json last = json_at(messages, MT_MAX(json_count(messages) - 1, 0));
    const char *role = "";
    if (key) return json_find(row, key);
    if (json_has(row, "completion")) return json_find(row, "completion");
    if (json_count(messages) && !json_opt_str(last, "role", &role, NULL) && !strcmp(role, "assistant"))
        return json_find(last, "content");
    return (struct json){.node = NULL};
}

static int read_row(struct question *q, const struct run *r, struct json row, const char *key, int64_t number,
                    const struct row_defaults *d, const char *name, struct err *err)
{
    if (row_request_read(&q->r, r, row, number, d, name, err)) return -1;
    q->opened = prompt_opens_reasoning(&q->r.prompt, r->tok);
    if (reference_of(q, reference_in(row, key), err)) return err_prefix(err, "%s", name);
    return q->r.q.params.max_tokens ? 0 : err_set(err, "%s: max_tokens = 0: there is no answer", name);
}

static int add_row(struct questions *qs, const struct run *r, const char *line, int64_t size, const char *key,
                   const struct row_defaults *d, const char *name, struct err *err)
{
    const int64_t number = qs->n;
    struct json_doc *doc = row_parse(line, size, name, err);
    const int rc = doc ? read_row(add(qs), r, json_root(doc), key, number, d, name, err) : -1;
    json_free(doc);
    return rc;
}

int questions_read(struct questions *qs, const struct run *r, const char *path, const char *key,
                   const struct row_defaults *d, int64_t most, struct err *err)
{
    char *line, name[MT_PATH + 32];
    int64_t size, n = 0;
    int rc = 0;
    struct err why;
    struct line_reader *reader = line_reader_open(path, err);
    if (!reader) return -1;
    struct bad_rows *bad = mem_array(1, sizeof(*bad));
    while (n < most && (rc = line_reader_next(reader, &line, &size, err)) > 0) {
        if (!size) continue;
        n++;
        snprintf(name, sizeof(name), "%s:%lld", path, (long long)line_reader_line(reader));
        if (add_row(qs, r, line, size, key, d, name, &why) && !bad_rows_add(bad, &why)) break;
    }
    line_reader_close(reader);
    rc = rc < 0 || bad_rows_check(bad, n, path, err) ? -1 : 0;
    mem_free(bad);
    return rc || n ? rc : err_set(err, "%s has no rows", path);
}

void questions_free(struct questions *qs)
{
    for (int64_t i = 0; i < qs->n; i++) {
        row_request_free(&qs->items[i].r);
        mem_free(qs->items[i].reference);
        text_free(&qs->items[i].line);
    }
    mem_free(qs->items);
    *qs = (struct questions){.n = 0};
}
