/* policy_run.h - online RL over recorded rollouts in a training run: which generation a step is of, what its loss
 * reads, what a checkpoint keeps. Other objectives: nothing to do. */
#ifndef MT_POLICY_RUN_H
#define MT_POLICY_RUN_H

#include "train/session/training.h"

/* After the checkpoint is loaded: a run that continues within a generation takes its values from there. */
int policy_run_open(struct training *t, struct err *err) MT_CHECK;
/* Before the passes of a step over its micro-batches b: begins a generation where one begins, and gives b what the loss
 * reads. t->state is that before the step. */
void policy_run_begin(struct training *t, struct batch *b, const struct step_counts *counts);
/* What is logged of the step with the sums *sum, whose largest values become those of all ranks. */
struct objective_means policy_run_parts(const struct training *t, struct model_sums *sum, int64_t n_label);
/* Of the state now; empty between generations. */
struct checkpoint_generation policy_run_saved(const struct training *t);

#endif
