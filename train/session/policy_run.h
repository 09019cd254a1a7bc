/* policy_run.h - online RL in a training run: the generation (train/policy/generation.h) of a step, the inputs of its
 * loss, what a checkpoint keeps. With other objectives the functions do nothing. */
#ifndef MT_POLICY_RUN_H
#define MT_POLICY_RUN_H

#include "train/session/training.h"

/* Call it after the checkpoint is loaded: a run that continues within a generation takes its log-probabilities from the
 * checkpoint. */
int policy_run_open(struct training *t, struct err *err) MT_CHECK;
/* Call it before the passes of a step over its micro-batches b, with t->state as before the step. Begins a generation
 * if the step is its first, and attaches the inputs of the loss to b. */
void policy_run_begin(struct training *t, struct batch *b, const struct step_counts *counts);
/* The metrics of the step with the sums *sum, in which it replaces largest values by those of all ranks. */
struct objective_means policy_run_parts(const struct training *t, struct model_sums *sum, int64_t n_label);
/* What a checkpoint of the current state keeps; empty between generations. */
struct checkpoint_generation policy_run_saved(const struct training *t);

#endif
