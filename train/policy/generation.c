/* generation.c - see generation.h. */
#include "train/policy/generation.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/rollout/rollout_choices.h"
#include "train/objective/micro_batch.h"

/* ---- what is needed ---- */

static bool corrects(const struct policy_settings *s, const struct rollouts *rows)
{
    return !s->old_of_rows && s->is_mode != CFG_IS_NONE && rows->n_logprobs > 0;
}

struct generation_needs generation_needs(const struct config *c)
{
    const struct policy_settings s = policy_settings(c);
    const bool again = s.n_step > 1 || s.n_iteration > 1;
    return (struct generation_needs){.old = !s.old_of_rows && (again || s.reward_kl > 0),
                                     .reference = s.reward_kl > 0 || (s.loss.beta > 0 && s.n_iteration > 1)};
}

static int64_t labels_of(const struct dataset *ds, int64_t d)
{
    int64_t n = 0;
    for (int64_t i = ds->doc_off[d]; i < ds->doc_off[d + 1]; i++) n += ds->mask[i];
    return n;
}

int64_t generation_labels(const struct dataset *ds, int64_t first, int64_t n)
{
    int64_t n_label = 0;
    for (int64_t i = 0; i < n; i++) n_label += labels_of(ds, first + i);
    return n_label;
}

/* The sampler's nll of every label; NaN: unknown. */
static float *sampler_of(const struct generation *g, const struct dataset *ds, const struct rollouts *rows)
{
    float *out = mem_array(g->label_off[g->n] + 1, sizeof(*out));
    for (int64_t i = 0, at = 0; i < g->n; i++) {
        const struct rollout row = rollouts_row(rows, g->first + i);
        const uint8_t *mask = ds->mask + ds->doc_off[g->first + i] + row.n_prompt;
        for (int64_t t = 0; t < row.n_completion; t++)
            if (mask[t]) out[at++] = -row.logprobs[t];
    }
    return out;
}

/* ---- passes ---- */

void generation_batch(struct batch *b, const struct run *r, const struct rollouts *rows)
{
    micro_batch_share(b, &r->model, r->cfg->objective.num_generations);
    rollout_choices(b, rows);
}

/* The place in `all`, an array of g, of the first label of document `doc`. */
static float *at_label(float *all, const struct generation *g, int64_t doc)
{
    return all ? all + g->label_off[doc - g->first] : NULL;
}

static void score_batch(struct run *r, const struct generation *g, const struct batch *b, struct generation_needs needs)
{
    struct model *m = &r->model;
    const struct model_pass pass = {.objective = needs.reference,
                                    .wants_reference = needs.reference,
                                    .unquantised = m->qat.waiting,
                                    .choices = b->choices ? CHOICES_GIVEN : CHOICES_OWN};
    const struct model_batch mb = micro_batch_of(b);
    const int64_t doc = b->answer_doc[0];
    model_begin(m, &mb, &pass);
    if (needs.reference) model_policy_reference(m, at_label(g->reference_nll, g, doc));
    if (needs.old) model_fwd(m);
    if (needs.old) model_policy_values(m, at_label(g->old_nll, g, doc), NULL);
    model_end(m);
    progress();
}

/* Sums over the ranks: only one rank has the value of a label, the others have 0. */
static void gather(struct comm *all, float *values, int64_t n)
{
    if (!values || all->world == 1 || !n) return;
    float *of = mem_array(n * all->world, sizeof(*of));
    comm_host_gather(all, of, values, n * (int64_t)sizeof(*values));
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < all->world; k++)
            if (of[k * n + i] != 0) values[i] = of[k * n + i];
    mem_free(of);
}

/* Computes the log-probabilities. The ranks divide the micro-batches; each gets the same number (run_check_ranks). */
static void score(struct run *r, const struct generation *g, const struct dataset *ds, const struct rollouts *rows,
                  struct generation_needs needs)
{
    struct comm *all = r->par.all;
    const int64_t size = r->cfg->train.micro_batch, n = g->n / size;
    int64_t *docs = mem_array(size, sizeof(*docs));
    for (int64_t i = all->rank; i < n; i += all->world) {
        struct batch b;
        for (int64_t k = 0; k < size; k++) docs[k] = g->first + i * size + k;
        batch_open(&b, ds, docs, size);
        generation_batch(&b, r, rows);
        score_batch(r, g, &b, needs);
        batch_free(&b);
    }
    mem_free(docs);
    gather(all, g->old_nll, g->label_off[g->n]);
    gather(all, g->reference_nll, g->label_off[g->n]);
}

/* ---- rewards ---- */

static void subtract_kl(struct generation *g, double *reward, double beta)
{
    double total = 0;
    for (int64_t i = 0; i < g->n; i++) {
        double sum = 0;
        for (int64_t k = g->label_off[i]; k < g->label_off[i + 1]; k++)
            sum += (double)g->reference_nll[k] - (double)g->old_nll[k];
        reward[i] -= beta * sum;
        total += sum;
    }
    g->stats.reward_kl = total / (double)MT_MAX(g->label_off[g->n], 1);
}

static void advantages_of(struct generation *g, const struct policy_settings *s, const struct rollouts *rows)
{
    double *reward = mem_array(g->n, sizeof(*reward));
    memcpy(reward, rows->reward + g->first, (size_t)g->n * sizeof(*reward));
    g->stats.reward = advantages_stats(reward, g->n, &s->advantage);
    g->stats.reward_kl = NAN;
    if (s->reward_kl > 0) {
        subtract_kl(g, reward, s->reward_kl);
        g->stats.reward.zero_std = advantages_stats(reward, g->n, &s->advantage).zero_std;
    }
    advantages_compute(g->advantage, reward, g->n, &s->advantage);
    mem_free(reward);
}

static void count_rewards(struct generation *g, const struct rollouts *rows)
{
    g->stats.n_named = rows->named.n;
    for (int64_t k = 0; k < rows->named.n; k++) {
        const struct moments m = moments_of(rows->named.of[k] + g->first, g->n, 1);
        struct generation_reward *to = &g->stats.named[k];
        snprintf(to->mean_name, sizeof(to->mean_name), "rewards/%s/mean", rows->named.names[k]);
        snprintf(to->std_name, sizeof(to->std_name), "rewards/%s/std", rows->named.names[k]);
        to->mean = m.mean;
        to->std = m.std;
    }
}

struct spread {
    int64_t n;
    double sum, min, max;
};

static void spread_add(struct spread *s, double v)
{
    s->min = s->n ? fmin(s->min, v) : v;
    s->max = s->n ? fmax(s->max, v) : v;
    s->sum += v;
    s->n++;
}

static void count_lengths(struct generation *g, const struct rollouts *rows)
{
    struct spread all = {0}, ended = {0};
    int64_t n_truncated = 0;
    for (int64_t i = 0; i < g->n; i++) {
        const struct rollout row = rollouts_row(rows, g->first + i);
        int64_t n = 0;
        for (int64_t t = 0; t < row.n_completion; t++) n += row.mask[t];
        spread_add(&all, (double)n);
        if (!row.truncated) spread_add(&ended, (double)n);
        n_truncated += row.truncated;
    }
    const struct spread *of[] = {&all, &ended};
    for (int k = 0; k < 2; k++) {
        double *out = k ? g->stats.terminated : g->stats.length;
        out[0] = of[k]->n ? of[k]->sum / (double)of[k]->n : 0;
        out[1] = of[k]->min;
        out[2] = of[k]->max;
    }
    g->stats.truncated = (double)n_truncated / (double)g->n;
}

/* ---- a generation ---- */

static void open_rows(struct generation *g, const struct dataset *ds, int64_t first, int64_t n)
{
    generation_free(g);
    g->first = first;
    g->n = n;
    g->label_off = mem_array(n + 1, sizeof(*g->label_off));
    g->advantage = mem_array(n, sizeof(*g->advantage));
    for (int64_t i = 0; i < n; i++) g->label_off[i + 1] = g->label_off[i] + labels_of(ds, first + i);
}

static void complete(struct generation *g, const struct config *c, const struct dataset *ds,
                     const struct rollouts *rows)
{
    const struct policy_settings s = policy_settings(c);
    if (s.old_of_rows) g->old_nll = sampler_of(g, ds, rows);
    if (corrects(&s, rows)) g->sampler_nll = sampler_of(g, ds, rows);
    advantages_of(g, &s, rows);
    count_lengths(g, rows);
    count_rewards(g, rows);
}

static float *copy_of(const float *values, int64_t n)
{
    float *copy = mem_array(n + 1, sizeof(*copy));
    if (values && n) memcpy(copy, values, (size_t)n * sizeof(*copy));
    return copy;
}

void generation_continue(struct generation *g, const struct run *r, const struct dataset *ds,
                         const struct rollouts *rows, int64_t first, int64_t n, const float *old_nll,
                         const float *reference_nll)
{
    const struct generation_needs needs = generation_needs(r->cfg);
    open_rows(g, ds, first, n);
    if (needs.old) g->old_nll = copy_of(old_nll, g->label_off[n]);
    if (needs.reference) g->reference_nll = copy_of(reference_nll, g->label_off[n]);
    complete(g, r->cfg, ds, rows);
}

void generation_begin(struct generation *g, struct run *r, const struct dataset *ds, const struct rollouts *rows,
                      int64_t first, int64_t n)
{
    const struct generation_needs needs = generation_needs(r->cfg);
    open_rows(g, ds, first, n);
    if (needs.old) g->old_nll = copy_of(NULL, g->label_off[n]);
    if (needs.reference) g->reference_nll = copy_of(NULL, g->label_off[n]);
    if (needs.old || needs.reference) score(r, g, ds, rows, needs);
    complete(g, r->cfg, ds, rows);
}

void generation_free(struct generation *g)
{
    mem_free(g->label_off);
    mem_free(g->advantage);
    mem_free(g->old_nll);
    mem_free(g->reference_nll);
    mem_free(g->sampler_nll);
    *g = (struct generation){.n = 0};
}
