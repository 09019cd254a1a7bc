/* policy.c - online RL over completions: GRPO, Dr. GRPO, DAPO, GSPO, RLOO, CISPO. The loss of a completion is a
 * function of its labels' log-probabilities (kernels/policy_value.h). The loss head is frozen: its pass gives
 * log-probability, entropy and unweighted gradient of every label, and the derivatives of the loss then weight the
 * gradient's rows. With entropy_coef the head runs twice: first for the values, then for the gradient, with weights per
 * label for log-probability and entropy. */
#include "model/model.h"

static struct tensor push_i32(struct model *m, const int32_t *host, int64_t n)
{
    const struct tensor t = arena_tensor_1d(&m->dev->work, DT_I32, n);
    if (!m->dev->dry_run) device_upload(m->dev, t.data, host, tensor_bytes(t));
    return t;
}

/* Uploads a number per label; an absent tensor if host is NULL. A dry run always allocates it. */
static struct tensor push_labels(struct model *m, const float *host)
{
    struct device *dev = m->dev;
    const int64_t n = m->label_row.shape[0];
    if (!dev->dry_run && !host) return (struct tensor){0};
    const struct tensor t = arena_tensor_1d(&dev->work, dev->stat_dtype, n);
    if (dev->dry_run || !n) return t;
    if (dev->stat_dtype == DT_F32) {
        device_upload(dev, t.data, host, tensor_bytes(t));
        return t;
    }
    double *wide = mem_array(n, sizeof(*wide));
    for (int64_t i = 0; i < n; i++) wide[i] = (double)host[i];
    device_upload(dev, t.data, wide, tensor_bytes(t));
    mem_free(wide);
    return t;
}

/* Runs the loss head at the policy's temperature; dx may be absent, and so may be weight. */
static void head(struct model *m, struct tensor nll, struct tensor entropy, struct tensor hit, struct tensor dx,
                 struct tensor x, struct tensor rows, struct tensor weight)
{
    op_linear_policy(m->dev, nll, entropy, hit, dx, x, &m->weights.head, m->arch.logit_cap, rows, m->label_id, weight,
                     (float)m->policy.temperature, m->ce_chunk);
}

/* Runs the forward pass of the reference; returns nll of every label. */
static struct tensor run_reference(struct model *m, int64_t n_tok)
{
    struct device *dev = m->dev;
    const int64_t n_label = m->label_row.shape[0];
    const struct tensor nll = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label), absent = {0};
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor entropy = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    const struct tensor hit = arena_tensor_1d(&dev->work, DT_I32, n_label);
    int32_t *count = mem_array(n_label + 1, sizeof(*count));
    for (int64_t i = 0; i < n_label; i++) count[i] = (int32_t)i;
    const struct tensor rows = push_i32(m, count, n_label);
    mem_free(count);
    head(m, nll, entropy, hit, absent, model_reference(m, n_tok), rows, absent);
    arena_release(&dev->work, mark);
    return nll;
}

static void begin(struct model *m, const struct model_batch *b)
{
    struct device *dev = m->dev;
    const bool reads = m->policy.beta > 0 || m->pass.wants_reference;
    MT_REQUIRE(dev->dry_run || b->answer_cu, "a micro-batch without completions");
    m->answers =
        (struct answers){push_i32(m, b->answer_cu, b->n_answer + 1), push_i32(m, b->answer_first, b->n_answer)};
    m->row_values = arena_tensor_2d(&dev->work, DT_F64, b->n_answer, POLICY_VALUES);
    if (!dev->dry_run && b->row_values)
        device_upload(dev, m->row_values.data, b->row_values, tensor_bytes(m->row_values));
    m->policy_tokens = (struct policy_tokens){.old = push_labels(m, b->old_nll)};
    m->sampler_nll = push_labels(m, b->sampler_nll);
    if (reads)
        m->policy_tokens.reference = b->reference_nll ? push_labels(m, b->reference_nll) : run_reference(m, b->n_tok);
}

/* The importance weights of the labels; an absent tensor without the sampler's log-probabilities. nll: by the old
 * model. */
static struct tensor importance(struct model *m, struct tensor nll)
{
    struct device *dev = m->dev;
    if (!m->sampler_nll.ndim) return (struct tensor){0};
    const struct tensor weight = arena_tensor_1d(&dev->work, dev->stat_dtype, nll.shape[0]);
    const struct tensor part = arena_tensor_2d(&dev->work, DT_F64, m->answers.first.shape[0], IMPORTANCE_PARTS);
    op_importance(dev, part, weight, m->row_values, &m->policy.importance, nll, m->sampler_nll, &m->answers);
    op_policy_sum(dev, tensor_rows(m->sums, SUM_IMPORTANCE, IMPORTANCE_SUMS),
                  tensor_rows(m->sums, SUM_IMPORTANCE_MOST, IMPORTANCE_EXTREMES), part);
    return weight;
}

static struct tensor loss(struct model *m, struct tensor nll, struct tensor hit)
{
    struct device *dev = m->dev;
    const int64_t n_label = m->label_row.shape[0], n_row = m->answers.first.shape[0];
    const bool two_passes = m->policy.entropy_scale > 0 || m->policy.entropy_scale < 0;
    const struct tensor absent = {0};
    const struct tensor entropy = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    const struct tensor weight = arena_tensor_2d(&dev->work, dev->stat_dtype, n_label, 2);
    const struct tensor part = arena_tensor_2d(&dev->work, DT_F64, n_row, POLICY_PARTS);
    struct policy p = m->policy;
    struct policy_tokens t = m->policy_tokens;
    p.entropy_from = m->pass.entropy_from;
    p.entropy_scale *= m->pass.entropy_share;
    t.nll = nll;
    t.entropy = entropy;
    head(m, nll, entropy, hit, two_passes ? absent : m->dfinal, m->final_norm, m->label_row, absent);
    t.weight = importance(m, t.old.ndim ? t.old : nll);
    op_policy(dev, part, weight, &p, &t, m->row_values, &m->answers);
    op_policy_sum(dev, tensor_rows(m->sums, SUM_POLICY, POLICY_SUMS),
                  tensor_rows(m->sums, SUM_POLICY_MOST, POLICY_EXTREMES), part);
    if (!m->dfinal.ndim) return absent;
    if (two_passes)
        head(m, nll, entropy, hit, m->dfinal, m->final_norm, m->label_row, weight);
    else
        op_scale_rows(dev, m->dfinal, m->label_row, weight);
    return absent;
}

static double value(const struct model *m, const struct model_sums *t, int64_t n_label)
{
    (void)m;
    (void)n_label;
    return t->policy[POLICY_LOSS];
}

static void importance_parts(struct objective_means *e, const struct model_sums *t, double cap)
{
    const double *s = t->importance, *most = t->importance_most, n = s[IMPORTANCE_WEIGHTS];
    if (!(n > 0)) return;
    objective_put(e, "sampling/importance_sampling_ratio/min", NULL, "%.4g", cap - most[IMPORTANCE_BELOW_MOST], 1);
    objective_put(e, "sampling/importance_sampling_ratio/mean", NULL, "%.4g", s[IMPORTANCE_WEIGHT], n);
    objective_put(e, "sampling/importance_sampling_ratio/max", NULL, "%.4g", most[IMPORTANCE_WEIGHT_MOST], 1);
    objective_put(e, "sampling/sampling_logp_difference/mean", NULL, "%.4g", s[IMPORTANCE_DIFFERENCE],
                  fmax(s[IMPORTANCE_KNOWN], 1));
    objective_put(e, "sampling/sampling_logp_difference/max", NULL, "%.4g", most[IMPORTANCE_DIFFERENCE_MOST], 1);
}

/* The largest values are those of this rank until policy_run.c has compared the ranks. */
static void parts(struct objective_means *e, const struct model *m, const struct model_sums *t, int64_t n_label)
{
    const double *s = t->policy, n = s[POLICY_TOKENS], units = s[POLICY_UNITS], *most = t->policy_most;
    (void)n_label;
    objective_put(e, "entropy", "entropy", "%.3g", s[POLICY_ENTROPY], n);
    if (m->policy.beta > 0) objective_put(e, "kl", "kl", "%.3g", s[POLICY_KL_SUM], n);
    objective_put(e, "clip_ratio/low_mean", NULL, "%.4g", s[POLICY_LOW], units);
    objective_put(e, "clip_ratio/low_min", NULL, "%.4g", 1 - most[POLICY_NOT_LOW_MOST], units > 0);
    objective_put(e, "clip_ratio/high_mean", NULL, "%.4g", s[POLICY_HIGH], units);
    objective_put(e, "clip_ratio/high_max", NULL, "%.4g", most[POLICY_HIGH_MOST], units > 0);
    objective_put(e, "clip_ratio/region_mean", NULL, "%.4g", s[POLICY_LOW] + s[POLICY_HIGH], units);
    if (m->policy.detached) objective_put(e, "cispo_clip_ratio", NULL, "%.4g", s[POLICY_HIGH], units);
    objective_put(e, "ratio/mean", NULL, "%.6g", s[POLICY_RATIO], units);
    objective_put(e, "ratio/min", NULL, "%.6g", 1 / most[POLICY_INVERSE_MOST], units > 0);
    objective_put(e, "ratio/max", NULL, "%.6g", most[POLICY_RATIO_MOST], units > 0);
    importance_parts(e, t, m->policy.importance.cap);
}

const struct objective objective_policy = {
    .compares = true, .begin = begin, .loss = loss, .value = value, .parts = parts};
