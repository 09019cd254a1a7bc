/* preference.c - DPO, IPO, SimPO, ORPO and KTO. The loss of a pair or a row is a function of the answers'
 * log-probabilities, summed over labels (kernels/preference_value.h). The loss head is frozen: its pass gives
 * log-probability and unweighted gradient of every label, and the derivatives of the loss then weight the gradient's
 * rows. */
#include "model/model.h"

static struct tensor push(struct model *m, const int32_t *host, int64_t n)
{
    const struct tensor t = arena_tensor_1d(&m->dev->work, DT_I32, n);
    if (!m->dev->dry_run) device_upload(m->dev, t.data, host, tensor_bytes(t));
    return t;
}

/* 0, 1, .. n-1 */
static struct tensor push_count(struct model *m, int64_t n)
{
    int32_t *host = mem_array(n + 1, sizeof(*host));
    for (int64_t i = 0; i < n; i++) host[i] = (int32_t)i;
    const struct tensor t = push(m, host, n);
    mem_free(host);
    return t;
}

static void run_reference(struct model *m, int64_t n_tok)
{
    struct device *dev = m->dev;
    const int64_t mark = arena_mark(&dev->work), n_label = m->label_row.shape[0];
    const struct tensor nll = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label), absent = {0};
    const struct tensor hit = arena_tensor_1d(&dev->work, DT_I32, n_label), rows = push_count(m, n_label);
    const struct tensor hidden = model_reference(m, n_tok);
    op_linear_ce(dev, nll, hit, absent, hidden, &m->weights.head, m->arch.logit_cap, rows, m->label_id, 0, m->ce_chunk);
    op_answer_sums(dev, m->reference_logps, nll, &m->answers);
    arena_release(&dev->work, mark);
}

static bool has_reference(const struct model *m)
{
    return m->preference.kind != PREFERENCE_SIMPO && m->preference.kind != PREFERENCE_ORPO;
}

static void begin(struct model *m, const struct model_batch *b)
{
    struct device *dev = m->dev;
    MT_REQUIRE(dev->dry_run || b->answer_cu, "a micro-batch without answers");
    m->answers = (struct answers){push(m, b->answer_cu, b->n_answer + 1), push(m, b->answer_first, b->n_answer)};
    m->good = m->preference.kind == PREFERENCE_KTO ? push(m, b->good, b->n_answer) : (struct tensor){0};
    m->reference_logps = (struct tensor){0};
    if (!has_reference(m)) return;
    m->reference_logps = arena_tensor_2d(&dev->work, DT_F64, b->n_answer, 2);
    if (b->reference)
        device_upload(dev, m->reference_logps.data, b->reference, tensor_bytes(m->reference_logps));
    else
        run_reference(m, b->n_tok);
}

static struct preference of_pass(const struct model *m)
{
    struct preference p = m->preference;
    p.scale = m->pass.loss_scale;
    p.sft_scale = p.sft_weight * m->pass.sft_scale;
    p.baseline = m->pass.baseline;
    if (m->pass.measures_baseline) p.kind = PREFERENCE_KL;
    return p;
}

static struct tensor loss(struct model *m, struct tensor nll, struct tensor hit)
{
    struct device *dev = m->dev;
    const int64_t n_answer = m->answers.first.shape[0];
    const struct preference p = of_pass(m);
    const struct tensor logps = arena_tensor_2d(&dev->work, DT_F64, n_answer, 2);
    const struct tensor weight = arena_tensor_2d(&dev->work, dev->stat_dtype, n_answer, 2);
    op_linear_ce(dev, nll, hit, m->dfinal, m->final_norm, &m->weights.head, m->arch.logit_cap, m->label_row,
                 m->label_id, 1, m->ce_chunk);
    op_answer_sums(dev, logps, nll, &m->answers);
    op_preference(dev, tensor_rows(m->sums, SUM_PREFERENCE, PREFERENCE_SUMS), weight, &p, logps, m->reference_logps,
                  m->good, &m->answers);
    if (m->dfinal.ndim) op_scale_labels(dev, m->dfinal, m->label_row, weight, &m->answers);
    return (struct tensor){0};
}

/* The sums of the chosen, and of the rejected answers. */
static const double *chosen(const struct model_sums *t) { return t->preference; }
static const double *rejected(const struct model_sums *t) { return t->preference + PREFERENCE_SIDE; }

/* The number of pairs; with KTO, of rows. */
static double units(const struct model *m, const struct model_sums *t)
{
    const double n = chosen(t)[PREFERENCE_ANSWERS];
    return m->preference.kind == PREFERENCE_KTO ? n + rejected(t)[PREFERENCE_ANSWERS] : n;
}

static double value(const struct model *m, const struct model_sums *t, int64_t n_label)
{
    (void)n_label;
    const double sft = m->preference.sft_weight, n = units(m, t);
    double mean = t->preference[PREFERENCE_LOSS] / (n > 0 ? n : 1);
    if (sft > 0) mean -= sft * chosen(t)[PREFERENCE_TOTAL] / chosen(t)[PREFERENCE_TOKENS];
    return mean;
}

static void parts(struct objective_means *e, const struct model *m, const struct model_sums *t, int64_t n_label)
{
    (void)n_label;
    const double *c = chosen(t), *r = rejected(t), n_c = c[PREFERENCE_ANSWERS], n_r = r[PREFERENCE_ANSWERS];
    const bool kto = m->preference.kind == PREFERENCE_KTO, orpo = m->preference.kind == PREFERENCE_ORPO;
    e->eval_names = true;
    objective_put(e, "rewards/chosen", NULL, "%.4g", c[PREFERENCE_REWARD], n_c);
    objective_put(e, "rewards/rejected", NULL, "%.4g", r[PREFERENCE_REWARD], n_r);
    objective_put(e, "rewards/margins", "margin", "%.4g", c[PREFERENCE_REWARD] / n_c - r[PREFERENCE_REWARD] / n_r,
                  n_c > 0 && n_r > 0);
    if (!kto) objective_put(e, "rewards/accuracies", "right", "%.3g", t->preference[PREFERENCE_RIGHT], n_c);
    objective_put(e, "logps/chosen", NULL, "%.4g", c[PREFERENCE_LOGP], n_c);
    objective_put(e, "logps/rejected", NULL, "%.4g", r[PREFERENCE_LOGP], n_r);
    objective_put(e, "logps/chosen_per_token", NULL, "%.4g", c[PREFERENCE_TOTAL], c[PREFERENCE_TOKENS]);
    objective_put(e, "logps/rejected_per_token", NULL, "%.4g", r[PREFERENCE_TOTAL], r[PREFERENCE_TOKENS]);
    if (orpo) objective_put(e, "nll_loss", NULL, "%.4g", t->preference[PREFERENCE_NLL], n_c);
    if (kto) objective_put(e, "kl", "kl", "%.4g", t->preference[PREFERENCE_RATIO], units(m, t));
}

const struct objective objective_preference = {
    .compares = true, .begin = begin, .loss = loss, .value = value, .parts = parts};
