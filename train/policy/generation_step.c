/* generation_step.c - the inputs of the losses of an optimizer step, from its generation; metrics of the generation. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/objective/micro_batch.h"
#include "train/policy/generation.h"

/* The factor of the losses of a row with n labels. */
static double scale_of(const struct policy_settings *s, const struct step_counts *counts, int64_t n)
{
    const double rows = (double)MT_MAX(counts->units, 1);
    switch (s->mean) {
    case POLICY_PER_ROW: return 1 / (rows * (double)MT_MAX(n, 1));
    case POLICY_PER_LENGTH: return 1 / (rows * s->max_length);
    case POLICY_PER_TOKEN: return 1 / (double)MT_MAX(counts->labels, 1);
    case POLICY_PER_SUM: break;
    }
    return 1 / rows;
}

/* Numbers of the labels of b; its rows are adjacent in g. */
static float *labels(const float *all, const struct generation *g, const struct batch *b)
{
    if (!all) return NULL;
    float *out = mem_array(b->n_label + 1, sizeof(*out));
    for (int64_t a = 0; a < b->n_answer; a++) {
        const int64_t from = g->label_off[b->answer_doc[a] - g->first], n = b->answer_cu[a + 1] - b->answer_cu[a];
        memcpy(out + b->answer_cu[a], all + from, (size_t)n * sizeof(*out));
    }
    return out;
}

void generation_attach(const struct generation *g, const struct config *c, const struct step_counts *counts,
                       struct batch *b)
{
    const struct policy_settings s = policy_settings(c);
    b->row_values = mem_array(b->n_answer * POLICY_VALUES + 1, sizeof(*b->row_values));
    for (int64_t a = 0; a < b->n_answer; a++) {
        const int64_t row = b->answer_doc[a] - g->first;
        double *v = b->row_values + a * POLICY_VALUES;
        MT_REQUIRE(row >= 0 && row < g->n, "row %lld of a generation of %lld", (long long)row, (long long)g->n);
        v[POLICY_ADVANTAGE] = g->advantage[row];
        v[POLICY_SCALE] = scale_of(&s, counts, b->answer_cu[a + 1] - b->answer_cu[a]);
        v[POLICY_WEIGHT] = 1;
    }
    b->old_nll = labels(g->old_nll, g, b);
    b->reference_nll = s.loss.beta > 0 ? labels(g->reference_nll, g, b) : NULL;
    b->sampler_nll = labels(g->sampler_nll, g, b);
}

/* ---- the tokens of highest entropy ---- */

/* Completions with the same beginning have tokens whose entropies differ only by rounding. The tolerance keeps these
 * tokens on one side of the threshold.
 */
#define TIE 1e-5

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Linear between the two nearest of n sorted values. */
static double quantile_of(const float *sorted, int64_t n, double q)
{
    const double at = q * (double)(n - 1), low = floor(at);
    const int64_t i = (int64_t)low;
    const double a = (double)sorted[i], b = (double)sorted[MT_MIN(i + 1, n - 1)];
    return a + (at - low) * (b - a);
}

double generation_entropy(struct run *r, const struct batch *b, const struct model_pass *passes, int64_t n,
                          double quantile, int64_t *n_kept)
{
    struct comm *all = r->par.all;
    int64_t n_label = 0;
    for (int64_t i = 0; i < n; i++) n_label += b[i].n_label;
    float *entropy = mem_array(n_label + 1, sizeof(*entropy)), *nll = mem_array(n_label + 1, sizeof(*nll));
    for (int64_t i = 0, at = 0; i < n; at += b[i++].n_label) {
        struct model_pass pass = passes[i];
        const struct model_batch mb = micro_batch_of(&b[i]);
        if (i % all->world != all->rank) continue;
        pass.backward = pass.objective = pass.last = false;
        pass.choices = b[i].choices ? CHOICES_GIVEN : CHOICES_OWN;
        model_begin(&r->model, &mb, &pass);
        model_fwd(&r->model);
        model_policy_values(&r->model, nll, entropy + at);
        model_end(&r->model);
        progress();
    }
    mem_free(nll);
    if (all->world > 1) { /* zero on all ranks but one */
        float *of = mem_array((n_label + 1) * all->world, sizeof(*of));
        comm_host_gather(all, of, entropy, (n_label + 1) * (int64_t)sizeof(*entropy));
        for (int64_t i = 0; i < n_label; i++)
            for (int k = 0; k < all->world; k++)
                if (of[k * (n_label + 1) + i] != 0) entropy[i] = of[k * (n_label + 1) + i];
        mem_free(of);
    }
    qsort(entropy, (size_t)n_label, sizeof(*entropy), ascending);
    double from = n_label ? quantile_of(entropy, n_label, 1 - quantile) : 0;
    from -= TIE * fmax(1, fabs(from));
    *n_kept = 0;
    for (int64_t i = 0; i < n_label; i++) *n_kept += (double)entropy[i] >= from;
    mem_free(entropy);
    return from;
}

/* ---- metrics ---- */

void generation_parts(struct objective_means *e, const struct generation *g)
{
    static const char *const lengths[] = {"completions/mean_length", "completions/min_length",
                                          "completions/max_length"};
    static const char *const ended[] = {"completions/mean_terminated_length", "completions/min_terminated_length",
                                        "completions/max_terminated_length"};
    const struct generation_stats *s = &g->stats;
    objective_put(e, "reward", "reward", "%.4g", s->reward.mean, 1);
    objective_put(e, "reward_std", NULL, "%.4g", s->reward.std, 1);
    objective_put(e, "frac_reward_zero_std", NULL, "%.4g", s->reward.zero_std, 1);
    for (int64_t i = 0; i < s->n_named; i++) {
        objective_put(e, s->named[i].mean_name, NULL, "%.4g", s->named[i].mean, 1);
        objective_put(e, s->named[i].std_name, NULL, "%.4g", s->named[i].std, 1);
    }
    for (int i = 0; i < 3; i++) objective_put(e, lengths[i], NULL, "%.4g", s->length[i], 1);
    for (int i = 0; i < 3; i++) objective_put(e, ended[i], NULL, "%.4g", s->terminated[i], 1);
    objective_put(e, "completions/clipped_ratio", NULL, "%.4g", s->truncated, 1);
    objective_put(e, "num_tokens", NULL, "%.0f", s->n_token, 1);
    if (!isnan(s->reward_kl)) objective_put(e, "kl", "kl", "%.3g", s->reward_kl, 1);
}
