/* run_rollouts.c - recorded rollouts as the training data of a run. */
#include <math.h>
#include <string.h>

#include "data/eos_ids.h"
#include "data/rollout/rollout_documents.h"
#include "data/rollout/rollout_rows.h"
#include "model/layers/choices.h"
#include "train/objective/policy.h"
#include "train/run/run.h"

/* For objective.old = rows: checks that every token with loss has a log-probability. */
static int check_old(const struct run *r, struct err *err)
{
    for (int64_t i = 0; i < r->rollouts.n; i++) {
        const struct rollout row = rollouts_row(&r->rollouts, i);
        for (int64_t t = 0; t < row.n_completion; t++)
            if (row.mask[t] && isnan(row.logprobs[t]))
                return err_set(err,
                               "row %lld has no log-probability of token %lld of its completion, which objective.old = "
                               "rows reads: write `logprobs`, or set trainer",
                               (long long)(i + 1), (long long)t);
    }
    return 0;
}

/* Checks `routing`: either all rows have the sampler's experts, or none has. *n: rows that have them. */
static int check_routing(const struct run *r, int64_t *n, struct err *err)
{
    int64_t without = -1;
    *n = 0;
    for (int64_t i = 0; i < r->rollouts.n; i++) {
        *n += r->rollouts.routing[i] != NULL;
        if (!r->rollouts.routing[i] && without < 0) without = i;
    }
    if (!*n || without < 0) return 0;
    return err_set(err,
                   "%lld of %lld rows have `routing`, and row %lld does not: sample all rows with `generate "
                   "--routing`, or remove `routing` from all",
                   (long long)*n, (long long)r->rollouts.n, (long long)(without + 1));
}

static int check_rows(const struct run *r, struct err *err)
{
    const struct config *c = r->cfg;
    const int64_t n = policy_generation_rows(c), rows = r->rollouts.n;
    const bool is_set = c->objective.is_mode != CFG_IS_AUTO && c->objective.is_mode != CFG_IS_NONE;
    if (rollouts_check_groups(&r->rollouts, c->objective.num_generations, err)) return -1;
    if (rows % n)
        return err_set(err,
                       "%lld rows are not whole generations of %lld (train.micro_batch * train.grad_accum * "
                       "objective.steps_per_generation): %lld are left: change one of these keys, or the rows",
                       (long long)rows, (long long)n, (long long)(rows % n));
    if (is_set && !r->rollouts.n_logprobs)
        log_warn("objective.is_mode has no effect: no row has log-probabilities of the sampler");
    return c->objective.old == CFG_OLD_ROWS ? check_old(r, err) : 0;
}

static bool has_reward(const struct rollouts *r)
{
    for (int64_t i = 0; i < r->n; i++)
        if (!isnan(r->reward[i])) return true;
    return false;
}

int run_open_rollouts(struct run *r, struct err *err)
{
    const struct config *c = r->cfg;
    struct eos_ids ends;
    const bool trains = policy_is(c); /* false: the rows are ordinary texts (config_without_teacher) */
    if (eos_ids_load(&ends, r->model_dir, err)) return -1;
    const struct rollout_options opt = {.vocab = r->arch.vocab,
                                        .seq_len = trains ? c->data.seq_len : INT64_MAX,
                                        .end_ids = ends.ids,
                                        .n_end = ends.n,
                                        .n_layer = choices_layers(&r->arch),
                                        .n_top = r->arch.top_k,
                                        .n_exp = r->arch.n_exp,
                                        .max_rows = c->data.max_samples};
    r->rollouts.n_routing = opt.n_layer * opt.n_top;
    if (rollout_rows_load(&r->rollouts, r->train_files, &opt, err) || (trains && check_rows(r, err))) return -1;
    int64_t n_routing;
    if (check_routing(r, &n_routing, err)) return -1;
    if (n_routing) log_info("rollouts: experts are those of the sampler (`routing`)");
    rollout_documents(&r->train, &r->rollouts, c->objective.mask_truncated);
    if (!trains) run_cut_documents(&r->train, c->data.seq_len);
    log_info("rollouts: %lld rows, %lld with log-probabilities of the sampler", (long long)r->rollouts.n,
             (long long)r->rollouts.n_logprobs);
    if (trains && !has_reward(&r->rollouts))
        log_warn("no row of data.train has a reward, so all advantages are 0: score the rows first (moetrain rewards)");
    return 0;
}
