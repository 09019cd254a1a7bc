/* run_evaluate.c - one micro-batch, and the evaluation of the held-out data. */
#include <math.h>
#include <string.h>

#include "train/objective/micro_batch.h"
#include "train/objective/policy.h"
#include "train/objective/run_objective.h"
#include "train/run/run.h"

#define ASK_EVERY 8 /* a rank's micro-batches between two exchanges of the stop flag in an evaluation */

struct loader_options run_loader_options(const struct config *cfg, bool train)
{
    const bool policy = policy_is(cfg);
    const bool online = config_is_online(cfg); /* its positions count prompts */
    return (struct loader_options){.seq_len = cfg->data.seq_len,
                                   .micro_batch = online ? 1 : cfg->train.micro_batch,
                                   .packing = cfg->data.packing && !run_objective(cfg)->format && !online,
                                   .pairs = run_objective(cfg)->format == DATA_PREFERENCE,
                                   .shuffle = train && cfg->data.shuffle && (!policy || online),
                                   .generation = policy && !online ? policy_generation_rows(cfg) : 0,
                                   .n_iteration = cfg->objective.num_iterations,
                                   .seed = (uint64_t)cfg->train.seed};
}

void run_forward(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    const struct model_batch mb = micro_batch_of(b);
    struct model_pass of_batch = *pass;
    if (b->choices) of_batch.choices = CHOICES_GIVEN;
    model_begin(&r->model, &mb, &of_batch);
    model_fwd(&r->model);
    model_loss(&r->model);
}

void run_micro_batch(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    run_forward(r, b, pass);
    if (pass->backward) model_bwd(&r->model);
}

/* Runs a pass of an evaluation without tokens, because other ranks of the group still have a micro-batch, whose rows
 * may need this rank's experts. Like them it runs the reference only if its log-probabilities are not cached. */
static void run_empty(struct run *r, const struct model_pass *pass)
{
    static double none[1];
    struct batch b = micro_batch_none();
    if (r->eval.reference) b.reference = none;
    run_micro_batch(r, &b, pass);
    model_end(&r->model);
}

/* Takes n micro-batches, which an objective needs at once. */
static void take(const struct run *r, struct loader *l, struct batch *b, int64_t n, struct step_counts *counts)
{
    const int64_t shares = micro_batch_shares(&r->model);
    for (int64_t k = 0; k < n; k++) micro_batch_next(&b[k], l, NULL, shares, counts);
}

/* Evaluates the micro-batches first .. first + n - 1 of n_all. False: stop() was true on a rank. */
static bool evaluate_some(struct run *r, const struct batch *b, int64_t first, int64_t n, int64_t n_all,
                          bool (*stop)(void))
{
    const struct run_objective *o = run_objective(r->cfg);
    struct comm *ranks = r->par.all;
    const struct model_pass pass = {.objective = true,
                                    .baseline = o->before_step ? o->before_step(&r->model, b, n) : 0};
    for (int64_t i = first; i < first + n; i++) {
        if (i % ranks->world == ranks->rank) {
            run_micro_batch(r, &b[i - first], &pass);
            model_end(&r->model);
        }
        if (i + 1 == n_all && r->par.ep->world > 1 && ranks->rank > i % ranks->world) run_empty(r, &pass);
        /* All ranks stop after the same micro-batch; several ranks exchange the stop flag at intervals. */
        if (stop && (i + 1) % (ranks->world == 1 ? 1 : ASK_EVERY * ranks->world) == 0 &&
            comm_host_max(ranks, stop()) > 0)
            return false;
    }
    return true;
}

/* Perplexity of all labelled tokens. With a preference objective it is that of the chosen answers only, because
 * rejected answers should become unlikely. */
static double perplexity(const struct objective_means *parts, double nll)
{
    for (int i = 0; i < parts->n; i++)
        if (!strcmp(parts->of[i].name, "logps/chosen_per_token") && isfinite(parts->of[i].mean))
            return exp(-parts->of[i].mean);
    return exp(nll);
}

bool run_evaluate(struct run *r, struct eval_metrics *out, bool (*stop)(void))
{
    const struct loader_options opt = run_loader_options(r->cfg, false);
    /* KTO computes its baseline over as many micro-batches as a step has. */
    const int64_t most = run_objective(r->cfg)->before_step ? r->cfg->train.grad_accum : 1;
    struct loader *l = loader_open(&r->eval, &opt, (struct loader_pos){0, 0});
    struct batch *b = mem_array(most, sizeof(*b));
    struct step_counts counts = {0};
    int64_t n = loader_epoch_batches(l, 0);
    const double start = clock_ms();
    struct model_sums sum;
    bool stopped = false;
    if (r->cfg->eval.max_batches) n = MT_MIN(n, r->cfg->eval.max_batches);
    model_clear(&r->model);
    for (int64_t i = 0; i < n && !stopped; i += most) {
        const int64_t some = MT_MIN(most, n - i);
        take(r, l, b, some, &counts);
        stopped = !evaluate_some(r, b, i, some, n, stop);
        for (int64_t k = 0; k < some; k++) batch_free(&b[k]);
    }
    loader_close(l);
    mem_free(b);
    model_sum(&r->model);
    model_read(&r->model, &sum);
    const double labels = (double)MT_MAX(counts.labels, 1);
    out->tokens = counts.labels;
    out->loss = model_objective(&r->model, &sum, counts.labels);
    out->parts = model_parts(&r->model, &sum, counts.labels);
    out->perplexity = perplexity(&out->parts, sum.nll / labels);
    out->accuracy = (double)sum.n_hit / labels;
    out->ms = clock_ms() - start;
    return !stopped;
}
