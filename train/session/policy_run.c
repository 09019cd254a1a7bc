/* policy_run.c - see policy_run.h. The position in the data determines the generation (train/policy/generation.h) of a
 * step: in an epoch each generation occurs n_iteration times in a row (struct loader_options). */
#include "train/session/policy_run.h"

#include <math.h>

/* The generation of the next step: rows first .. first + n - 1. step: the number of the next step within the
 * generation; 0: the generation begins. */
struct place {
    int64_t first, n, step;
};

static struct place place_of(const struct training *t)
{
    const struct config *c = t->run.cfg;
    const int64_t n = policy_generation_rows(c), step = t->state.pos.index / c->train.grad_accum;
    if (config_is_online(c)) return (struct place){.n = n, .step = t->state.step % t->online.set.n_step};
    const int64_t steps = c->objective.steps_per_generation * c->objective.num_iterations;
    return (struct place){.first = step / steps * n, .n = n, .step = step % steps};
}

/* The rows that have the next step's generation; documents_of: their documents. */
static const struct rollouts *rows_of(const struct training *t)
{
    return config_is_online(t->run.cfg) ? &t->online.rows : &t->run.rollouts;
}

static const struct dataset *documents_of(const struct training *t)
{
    return config_is_online(t->run.cfg) ? &t->online.docs : &t->run.train;
}

/* The number of tokens in all generations up to this one: prompts, and tokens of completions that the model wrote. The
 * rows of earlier batches of online RL are not in memory: t->state has the number of their tokens, after the first step
 * of a batch with those of this batch. */
static double tokens_so_far(const struct training *t, const struct place *p)
{
    const struct rollouts *r = rows_of(t);
    const bool online = config_is_online(t->run.cfg);
    double before = 0, all = 0;
    if (online && p->step) return (double)t->state.rollout_tokens;
    for (int64_t i = 0; i < r->n; i++) {
        const struct rollout row = rollouts_row(r, i);
        double n = (double)row.n_prompt;
        for (int64_t k = 0; k < row.n_completion; k++) n += row.mask[k];
        all += n;
        if (i < p->first + p->n) before += n;
    }
    return online ? (double)t->state.rollout_tokens + all : (double)t->state.pos.epoch * all + before;
}

int policy_run_open(struct training *t, struct err *err)
{
    const struct run *r = &t->run;
    const bool online = config_is_online(r->cfg);
    float *old_nll, *reference_nll;
    if (!policy_is(r->cfg) || !t->from.found) return 0;
    const struct place p = place_of(t);
    if (!p.step || (!online && p.first + p.n > r->train.n_docs)) return 0;
    if (online && online_batch(&t->online, t->state.step, t->state.pos, NULL, err)) return -1;
    const struct rollouts *rows = rows_of(t);
    const struct dataset *ds = documents_of(t);
    const int64_t n_label = generation_labels(ds, p.first, p.n);
    const struct generation_needs needs = generation_needs(r->cfg);
    if (checkpoint_generation_load(t->from.path, n_label, &old_nll, &reference_nll, err)) return -1;
    const bool lacks = n_label && ((needs.old && !old_nll) || (needs.reference && !reference_nll));
    if (!lacks) generation_continue(&t->generation, r, ds, rows, p.first, p.n, old_nll, reference_nll);
    mem_free(old_nll);
    mem_free(reference_nll);
    t->generation.stats.n_token = tokens_so_far(t, &p);
    if (!lacks) return 0;
    return err_set(err,
                   "%s is within a generation and lacks its log-probabilities: continue from another checkpoint "
                   "(train.resume = DIRECTORY)",
                   t->from.path);
}

/* For objective.top_entropy_quantile and entropy_coef: finds the least entropy with which a token has loss, and the
 * share of these tokens. */
static void find_entropy(struct training *t, const struct batch *b, const struct step_counts *counts)
{
    const int64_t n = t->run.cfg->train.grad_accum;
    const double quantile = t->run.cfg->objective.top_entropy_quantile;
    int64_t n_kept = counts->labels;
    t->entropy.from = 0;
    if (quantile < 1) {
        struct model_pass *passes = mem_array(n, sizeof(*passes));
        for (int64_t i = 0; i < n; i++) passes[i] = training_pass(t, i, counts);
        t->entropy.from = generation_entropy(&t->run, b, passes, n, quantile, &n_kept);
        mem_free(passes);
    }
    t->entropy.share = 1 / (double)MT_MAX(n_kept, 1);
}

void policy_run_begin(struct training *t, struct batch *b, const struct step_counts *counts)
{
    struct run *r = &t->run;
    struct generation *g = &t->generation;
    if (!policy_is(r->cfg)) return;
    const struct place p = place_of(t);
    if (!p.step || g->first != p.first || !g->n) {
        generation_begin(g, r, documents_of(t), rows_of(t), p.first, p.n);
        g->stats.n_token = tokens_so_far(t, &p);
    }
    for (int64_t i = 0; i < r->cfg->train.grad_accum; i++) {
        generation_batch(&b[i], r, rows_of(t));
        generation_attach(g, r->cfg, counts, &b[i]);
    }
    find_entropy(t, b, counts);
}

struct objective_means policy_run_parts(const struct training *t, struct model_sums *sum, int64_t n_label)
{
    const struct model *m = &t->run.model;
    struct objective_means e = {.n = 0};
    struct comm *all = t->run.par.all;
    for (int k = 0; k < POLICY_EXTREMES; k++) sum->policy_most[k] = comm_host_max(all, sum->policy_most[k]);
    for (int k = 0; k < IMPORTANCE_EXTREMES; k++) sum->importance_most[k] = comm_host_max(all, sum->importance_most[k]);
    generation_parts(&e, &t->generation);
    m->objective->parts(&e, m, sum, n_label);
    return e;
}

struct checkpoint_generation policy_run_saved(const struct training *t)
{
    const struct generation *g = &t->generation;
    if (!policy_is(t->run.cfg) || !g->n || !place_of(t).step) return (struct checkpoint_generation){.n_label = 0};
    return (struct checkpoint_generation){
        .n_label = g->label_off[g->n], .old_nll = g->old_nll, .reference_nll = g->reference_nll};
}
