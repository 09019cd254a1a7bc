/* ops_loss.c - the wrappers op_* of the head: losses, distributions, their sums over a step. */
#include "kernels/ops/ops_check.h"

/* Checks what both loss heads write and read. */
static void want_head(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x,
                      const struct weight *w, struct tensor rows, struct tensor ids, int64_t chunk)
{
    const int64_t n_label = rows.shape[0], n_tok = x.shape[0];
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(nll, dev->stat_dtype, n_label);
    WANT(hit, DT_I32, n_label);
    WANT_OPT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    WANT(rows, DT_I32, n_label);
    WANT(ids, DT_I32, n_label);
    MT_REQUIRE(chunk > 0, "a chunk of %lld rows", (long long)chunk);
}

void op_linear_ce(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x,
                  const struct weight *w, float cap, struct tensor rows, struct tensor ids, float scale, int64_t chunk)
{
    const int64_t n_label = rows.shape[0];
    want_head(dev, nll, hit, dx, x, w, rows, ids, chunk);
    count_dense(dev, n_label, w->n_out, w->n_in);              /* x W^T */
    if (dx.ndim) count_dense(dev, n_label, w->n_out, w->n_in); /* dlogits W */
    MOVES(dev, nll, hit, rows, ids, dx, tensor_rows(x, 0, n_label));
    moves_weight(dev, w, n_label);
    RUN(0, linear_ce, nll, hit, dx, x, w, cap, rows, ids, scale, chunk);
    round_act(dev, dx);
}

static void want_teacher(struct device *dev, const struct teacher *t, int64_t n_label, int64_t n_in)
{
    const int64_t n_top = t->id.ndim == 2 ? t->id.shape[1] : 0;
    WANT_OPT(t->hidden, dev->act_dtype, n_label, n_in);
    WANT_OPT(t->id, DT_I32, n_label, n_top);
    WANT_OPT(t->logprob, dev->stat_dtype, n_label, n_top);
    MT_REQUIRE(!t->hidden.ndim == !!t->id.ndim && !t->id.ndim == !t->logprob.ndim,
               "a teacher has hidden states, or ids with log probabilities");
    MT_REQUIRE(t->kind == KL_FORWARD || t->hidden.ndim, "the reverse KL needs the whole distribution");
    MT_REQUIRE(t->alpha >= 0 && t->alpha <= 1 && t->temperature > 0, "alpha %g, temperature %g", (double)t->alpha,
               (double)t->temperature);
}

void op_linear_kl(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit, struct tensor dx,
                  struct tensor x, const struct weight *w, float cap, struct tensor rows, struct tensor ids,
                  const struct teacher *teacher, float scale, int64_t chunk)
{
    const int64_t n_label = rows.shape[0];
    want_head(dev, nll, hit, dx, x, w, rows, ids, chunk);
    WANT(kl, dev->stat_dtype, n_label);
    want_teacher(dev, teacher, n_label, w->n_in);
    count_dense(dev, n_label, w->n_out, w->n_in);                           /* x W^T */
    if (teacher->hidden.ndim) count_dense(dev, n_label, w->n_out, w->n_in); /* hidden W^T */
    if (dx.ndim) count_dense(dev, n_label, w->n_out, w->n_in);              /* dlogits W */
    MOVES(dev, nll, kl, hit, rows, ids, dx, tensor_rows(x, 0, n_label), teacher->hidden, teacher->id, teacher->logprob);
    moves_weight(dev, w, n_label);
    RUN(0, linear_kl, nll, kl, hit, dx, x, w, cap, rows, ids, teacher, scale, chunk);
    round_act(dev, dx);
}

void op_linear_topk(struct device *dev, struct tensor id, struct tensor logprob, struct tensor x,
                    const struct weight *w, float cap, struct tensor rows, float temperature, int64_t chunk)
{
    int64_t n_label = rows.shape[0], n_top = id.ndim == 2 ? id.shape[1] : 0;
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(id, DT_I32, n_label, n_top);
    WANT(logprob, dev->stat_dtype, n_label, n_top);
    WANT(x, dev->act_dtype, x.shape[0], w->n_in);
    WANT(rows, DT_I32, n_label);
    MT_REQUIRE(chunk > 0 && temperature > 0 && n_top >= 1 && n_top <= w->n_out, "%lld of %lld logits, temperature %g",
               (long long)n_top, (long long)w->n_out, (double)temperature);
    count_dense(dev, n_label, w->n_out, w->n_in);
    MOVES(dev, id, logprob, rows, tensor_rows(x, 0, n_label));
    moves_weight(dev, w, n_label);
    RUN(0, linear_topk, id, logprob, x, w, cap, rows, temperature, chunk);
}

void op_loss_sum(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit, struct tensor kl)
{
    int64_t n = nll.shape[0];
    WANT(out, DT_F64, 3);
    WANT(nll, dev->stat_dtype, n);
    WANT(hit, DT_I32, n);
    WANT_OPT(kl, dev->stat_dtype, n);
    MOVES(dev, nll, hit, kl);
    RUN(0, loss_sum, out, nll, hit, kl);
}

static int64_t want_answers(const struct answers *a)
{
    const int64_t n = a->first.shape[0];
    WANT(a->cu, DT_I32, n + 1);
    WANT(a->first, DT_I32, n);
    return n;
}

void op_answer_sums(struct device *dev, struct tensor logps, struct tensor nll, const struct answers *a)
{
    WANT(logps, DT_F64, want_answers(a), 2);
    WANT(nll, dev->stat_dtype, nll.shape[0]);
    MOVES(dev, logps, nll, a->cu, a->first);
    RUN(0, answer_sums, logps, nll, a);
}

void op_preference(struct device *dev, struct tensor sums, struct tensor weight, const struct preference *p,
                   struct tensor logps, struct tensor reference, struct tensor good, const struct answers *a)
{
    const int64_t n = want_answers(a);
    const bool rows = p->kind == PREFERENCE_KTO || p->kind == PREFERENCE_KL;
    WANT(sums, DT_F64, PREFERENCE_SUMS);
    WANT(weight, dev->stat_dtype, n, 2);
    WANT(logps, DT_F64, n, 2);
    WANT_OPT(reference, DT_F64, n, 2);
    WANT_OPT(good, DT_I32, n);
    MT_REQUIRE(rows == !!good.ndim && (rows || n % 2 == 0), "%lld answers of kind %d", (long long)n, (int)p->kind);
    MOVES(dev, weight, logps, reference, good);
    RUN(0, preference, sums, weight, p, logps, reference, good, a);
}

void op_scale_labels(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight,
                     const struct answers *a)
{
    const int64_t n_label = rows.shape[0];
    WANT(dx, dev->act_dtype, dx.shape[0], dx.shape[1]);
    WANT(rows, DT_I32, n_label);
    WANT(weight, dev->stat_dtype, want_answers(a), 2);
    MOVES(dev, tensor_rows(dx, 0, n_label), tensor_rows(dx, 0, n_label), rows);
    RUN(0, scale_labels, dx, rows, weight, a);
    round_act(dev, dx);
}

void op_aux_sum(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    int64_t n_exp = aux->count.shape[0];
    WANT(out, DT_F64, 1);
    WANT(aux->count, dev->stat_dtype, n_exp);
    WANT(aux->prob, dev->stat_dtype, n_exp);
    MOVES(dev, aux->count, aux->prob);
    RUN(0, aux_sum, out, aux, factor);
}

void op_head_logits(struct device *dev, struct tensor logits, struct tensor x, const struct weight *w, float cap)
{
    const int64_t n = x.shape[0];
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(logits, dev->stat_dtype, n, w->n_out);
    WANT(x, dev->act_dtype, n, w->n_in);
    MT_REQUIRE(logits.ld % 8 == 0, "rows of logits %lld apart", (long long)logits.ld);
    count_dense(dev, n, w->n_out, w->n_in);
    MOVES(dev, logits, x);
    moves_weight(dev, w, n);
    RUN(0, head_logits, logits, x, w, cap);
}

void op_sample(struct device *dev, const struct sampled *out, struct tensor logits, struct tensor rows,
               struct tensor edits)
{
    const int64_t n = logits.shape[0], n_vocab = logits.shape[1], n_top = out->top_id.ndim ? out->top_id.shape[1] : 0;
    MT_REQUIRE(sizeof(struct sample_row) == SAMPLE_ROW_WORDS * sizeof(int32_t) &&
                   sizeof(struct sample_edit) == SAMPLE_EDIT_WORDS * sizeof(int32_t),
               "rows of %zu bytes, edits of %zu", sizeof(struct sample_row), sizeof(struct sample_edit));
    WANT(out->token, DT_I32, n);
    WANT(out->logprob, dev->stat_dtype, n, 3);
    WANT_OPT(out->top_id, DT_I32, n, n_top);
    WANT_OPT(out->top_logprob, dev->stat_dtype, n, n_top);
    WANT(logits, dev->stat_dtype, n, n_vocab);
    WANT(rows, DT_I32, n, SAMPLE_ROW_WORDS);
    if (edits.ndim) WANT(edits, DT_I32, edits.shape[0], SAMPLE_EDIT_WORDS);
    MT_REQUIRE(logits.ld % 8 == 0 && contiguous(rows) && (!edits.ndim || contiguous(edits)),
               "rows of logits %lld apart, of parameters %lld", (long long)logits.ld, (long long)rows.ld);
    MT_REQUIRE(!out->top_id.ndim == !out->top_logprob.ndim && n_top <= MT_MIN(n_vocab, SAMPLE_TOP),
               "%lld tokens of %lld", (long long)n_top, (long long)n_vocab);
    MOVES(dev, out->token, out->logprob, out->top_id, out->top_logprob, logits, rows, edits);
    RUN(0, sample, out, logits, rows, edits);
}
