/* training.c - what the state of a training run decides. */
#include "train/session/training.h"

bool training_is_first(const struct training *t) { return t->run.par.all->rank == 0; }

struct model_pass training_pass(const struct training *t, int64_t i, const struct step_counts *n)
{
    const uint64_t seed = (uint64_t)t->run.cfg->train.seed, step = (uint64_t)t->state.step;
    struct model_pass pass = {.backward = true,
                              .objective = true,
                              .unquantised = t->run.model.qat.waiting,
                              .aux_share = 1 / (double)t->run.cfg->train.grad_accum,
                              .dropout_key = rng_u64(rng_u64(rng_key(seed, "dropout"), step), (uint64_t)i),
                              .entropy_from = t->entropy.from,
                              .entropy_share = t->entropy.share,
                              .noise_alpha = t->run.cfg->train.neftune_alpha,
                              .noise_key = rng_u64(rng_u64(rng_key(seed, "neftune"), step), (uint64_t)i),
                              .last = !t->run.model.grad_sums.part.ndim &&
                                      i + t->run.par.all->world >= t->run.cfg->train.grad_accum};
    run_objective_scale(&pass, t->run.cfg, n);
    return pass;
}

bool training_evaluation_due(const struct training *t, const struct train_state *state)
{
    const struct config *cfg = t->run.cfg;
    const int64_t s = state->step;
    if (s == state->eval_step) return false; /* the evaluation was made before the run stopped at this step */
    if (s == 0) return cfg->eval.at_start;
    if (s == t->schedule.total_steps) return cfg->eval.at_end;
    return cfg->eval.every && s % cfg->eval.every == 0;
}

bool training_out_of_patience(const struct training *t, const struct train_state *state)
{
    const int64_t patience = t->run.cfg->eval.patience;
    return patience && state->n_worse >= patience;
}

struct training_path training_path(const struct training *t, const char *name)
{
    struct training_path p;
    struct err err;
    if (file_in(p.s, t->run.cfg->output.dir, name, &err)) MT_REQUIRE(false, "%s", err.msg);
    return p;
}
