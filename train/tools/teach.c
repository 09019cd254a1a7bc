/* teach.c - see teach.h. Writes a row of JSONL for each document, in order: input_ids, loss_mask, temperature, and
 * topk_ids and topk_logprobs, with an entry per token (null for tokens without loss). */
#include "train/tools/teach.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/text.h"
#include "train/adapter/adapter_dir.h"
#include "train/launch/process.h"
#include "train/run/run.h"

struct teach {
    struct run run;
    struct file_writer out;
    struct text_buf row;
    int64_t n_top;
    double temperature;
    int32_t *id;    /* [labels of a micro-batch, n_top] */
    float *logprob; /* likewise */
    double start, told;
    int64_t tokens;
};

static void put_number(struct text_buf *t, const char *format, double v)
{
    char text[64];
    snprintf(text, sizeof(text), format, v);
    text_put(t, text);
}

/* Writes an entry per token: a list, or null for a token without loss. label: place of the document's first label. */
static void put_top(struct teach *t, const char *key, const uint8_t *mask, int64_t n, int64_t label, bool ids)
{
    struct text_buf *row = &t->row;
    text_put(row, key);
    for (int64_t i = 0; i < n; i++) {
        if (i) text_put(row, ", ");
        if (!mask[i]) text_put(row, "null");
        for (int64_t k = label * t->n_top; mask[i] && k < (label + 1) * t->n_top; k++) {
            text_put(row, k % t->n_top ? ", " : "[");
            put_number(row, ids ? "%.0f" : "%.9g", ids ? (double)t->id[k] : (double)t->logprob[k]);
        }
        if (mask[i]) text_put(row, "]");
        label += mask[i];
    }
    text_put(row, "]");
}

static int put_document(struct teach *t, const struct dataset *ds, int64_t d, int64_t label, struct err *err)
{
    const int64_t first = ds->doc_off[d], n = ds->doc_off[d + 1] - first;
    struct text_buf *row = &t->row;
    row->size = 0;
    text_put(row, "{\"input_ids\": [");
    for (int64_t i = 0; i < n; i++) put_number(row, i ? ", %.0f" : "%.0f", (double)ds->ids[first + i]);
    text_put(row, "], \"loss_mask\": [");
    for (int64_t i = 0; i < n; i++) text_put(row, ds->mask[first + i] ? (i ? ", 1" : "1") : i ? ", 0" : "0");
    put_number(row, "], \"temperature\": %.17g", t->temperature);
    put_top(t, ", \"topk_ids\": [", ds->mask + first, n, label, true);
    put_top(t, ", \"topk_logprobs\": [", ds->mask + first, n, label, false);
    text_put(row, "}\n");
    return file_writer_put(&t->out, row->text, row->size, err);
}

static void tell(struct teach *t, const struct dataset *ds, int64_t done)
{
    char speed[32], left[32];
    const double now = clock_ms(), s = (now - t->start) / 1e3;
    if (done < ds->n_docs && now - t->told < 1e4) return;
    t->told = now;
    log_info("%lld of %lld documents, %s tokens/s, left %s", (long long)done, (long long)ds->n_docs,
             str_count(speed, (int64_t)((double)t->tokens / s)),
             str_seconds(left, s * (double)(ds->n_tokens - t->tokens) / (double)MT_MAX(t->tokens, 1)));
}

/* Documents first .. first+n-1 as a micro-batch. */
static int teach_batch(struct teach *t, const struct dataset *ds, int64_t first, int64_t n, struct err *err)
{
    const struct model_pass pass = {.backward = false};
    struct model *m = &t->run.model;
    struct batch b;
    int64_t *docs = mem_array(n, sizeof(*docs)), label = 0;
    int rc = 0;
    for (int64_t i = 0; i < n; i++) docs[i] = first + i;
    batch_open(&b, ds, docs, n);
    mem_free(docs);
    const struct model_batch mb = {.n_tok = b.n_tok,
                                   .n_seq = b.n_seq,
                                   .n_label = b.n_label,
                                   .max_len = b.max_len,
                                   .tok = b.tok,
                                   .pos = b.pos,
                                   .cu = b.cu,
                                   .label_row = b.label_row,
                                   .label_id = b.label_id};
    model_begin(m, &mb, &pass);
    model_fwd(m);
    model_topk(m, t->n_top, t->temperature, t->id, t->logprob);
    model_end(m);
    t->tokens += b.n_tok;
    for (int64_t d = first; d < first + n && !rc; d++) {
        rc = put_document(t, ds, d, label, err);
        for (int64_t i = ds->doc_off[d]; i < ds->doc_off[d + 1]; i++) label += ds->mask[i];
    }
    for (int64_t i = 0; i < b.n_label * t->n_top && !rc; i++)
        if (t->id[i] < 0 || !(t->logprob[i] < 1))
            rc = err_set(err, "the model's logits are not finite: check its weights, and the adapter");
    batch_free(&b);
    return rc;
}

static int teach_all(struct teach *t, const struct dataset *ds, struct err *err)
{
    const int64_t most = t->run.plan.n_tok;
    t->id = mem_array(most * t->n_top, sizeof(*t->id));
    t->logprob = mem_array(most * t->n_top, sizeof(*t->logprob));
    t->start = t->told = clock_ms();
    for (int64_t first = 0, n; first < ds->n_docs; first += n) {
        for (n = 1; first + n < ds->n_docs && ds->doc_off[first + n + 1] - ds->doc_off[first] <= most;) n++;
        if (teach_batch(t, ds, first, n, err)) return -1;
        tell(t, ds, first + n);
    }
    return 0;
}

/* The directory of the usual file is made later. */
static int check_usual(const char *out, struct err *err)
{
    return file_exists(out) ? err_set(err, "%s exists: delete it, or name another file with --out", out) : 0;
}

/* The keys that a run on the rows needs. */
static void tell_how_to_train(const struct teach *t, const struct dataset *ds, const char *out, const char *of,
                              bool eval)
{
    char temperature[64] = "";
    if (t->temperature < 1 || t->temperature > 1)
        snprintf(temperature, sizeof(temperature), "distill.temperature = %.17g, ", t->temperature);
    log_info("%s: the %lld likeliest tokens for %lld labelled tokens, of %s; train on it with distill.teacher = rows, "
             "%sdistill.topk = %lld, data.%s = %s",
             out, (long long)t->n_top, (long long)dataset_targets(ds), of, temperature, (long long)t->n_top,
             eval ? "eval" : "train", out);
}

/* A teacher uses unquantised weights, as the teachers `base` and `adapter` do in training. */
static void without_quantisation(struct config *cfg)
{
    char format[32];
    if (cfg->quant.weights == CFG_QUANT_NONE) return;
    config_choice(QUANT_FORMATS, cfg->quant.weights, format);
    log_warn("quant.weights = %s does not apply to teach: the rows are those of weights that are not quantised",
             format);
    cfg->quant.weights = CFG_QUANT_NONE;
}

/* Writes the rows of all documents. After an error or a signal there is no file. */
static int write_rows(struct teach *t, const struct dataset *ds, const char *out, struct err *err)
{
    struct err unused;
    if (file_writer_open(&t->out, out, err)) return -1;
    process_delete_on_signal(t->out.tmp);
    const int rc = teach_all(t, ds, err);
    const int closed = file_writer_close(&t->out, !rc, rc ? &unused : err);
    process_delete_on_signal(NULL);
    return rc || closed ? -1 : 0;
}

/* A teacher's rows have one answer for each prompt. */
static int check_answers(const struct config *cfg, struct err *err)
{
    if (cfg->data.answers == DATA_PREFERENCE && !cfg->data.columns[0])
        return err_set(err, "teach writes one answer for each prompt, and objective.kind reads pairs: for the chosen "
                            "answers add --set data.columns=prompt=prompt,completion=chosen");
    if (cfg->data.answers == DATA_LABELLED && !cfg->data.columns[0])
        return err_set(err, "teach writes answers without labels, and objective.kind = kto reads labels: keep the rows "
                            "whose `label` is true, remove the key, and add --set objective.kind=sft");
    return 0;
}

/* Reads the data without a teacher, because they have no teacher's tokens yet. Then sets distill.teacher = rows, so
 * that the plan includes memory for the likeliest tokens. */
static int teach(struct teach *t, const struct teach_options *o, struct config *cfg, struct err *err)
{
    struct run *r = &t->run;
    char adapter[MT_PATH], usual[MT_PATH];
    const char *out = o->out ? o->out : usual;
    t->temperature = cfg->distill.temperature;
    const int64_t topk = cfg->distill.topk;
    config_without_teacher(cfg);
    if (check_answers(cfg, err)) return -1;
    cfg->data.answers = 0;
    without_quantisation(cfg);
    if (!o->base && adapter_dir_of(adapter, o->adapter, cfg, "--base", err)) return -1;
    if (str_format(usual, sizeof(usual), err, "output.dir", "%s/%s.jsonl", cfg->output.dir,
                   o->eval ? "teacher-eval" : "teacher"))
        return -1;
    if (o->out ? file_check_new(out, err) : check_usual(out, err)) return -1;
    if (run_open_headers(r, cfg, err) || run_open_data(r, !o->eval, err)) return -1;
    const struct dataset *ds = o->eval ? &r->eval : &r->train;
    if (!ds->n_docs) return err_set(err, "--eval: nothing is held out: set data.eval, or data.eval_split");
    t->n_top = MT_MIN(topk, r->arch.vocab);
    snprintf(cfg->distill.teacher, sizeof(cfg->distill.teacher), "rows");
    cfg->distill.topk = t->n_top;
    if (run_open_model(r, o->base ? NULL : adapter, PLAN_EVAL, err)) return -1;
    if (!o->out && file_make_dirs(cfg->output.dir, err)) return -1;
    if (write_rows(t, ds, out, err)) return -1;
    tell_how_to_train(t, ds, out, o->base ? "the base model" : adapter, o->eval);
    return 0;
}

int teach_run(const struct teach_options *o, struct config *cfg, struct err *err)
{
    struct teach *t = mem_alloc(sizeof(*t));
    const int rc = teach(t, o, cfg, err);
    run_close(&t->run);
    text_free(&t->row);
    mem_free(t->id);
    mem_free(t->logprob);
    mem_free(t);
    return rc;
}
