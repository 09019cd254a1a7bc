/* step_checks.h - warnings and errors about steps: values that are not finite, divergence, memory, chunks. */
#ifndef MT_STEP_CHECKS_H
#define MT_STEP_CHECKS_H

#include "train/session/training.h"

/* Writes to bad the name of the step's first tensor with a value that is not finite: runs the step's n micro-batches b
 * again, one at a time. All ranks call it. */
void step_checks_find_bad(struct training *t, const struct batch *b, int64_t n, const struct step_counts *counts,
                          char bad[64]);
/* Call it after a step. Reports, each at most once, that the step used more device memory than train.memory_gb, or that
 * unbalanced routing cut a layer into more chunks than planned. */
void step_checks_device(struct training *t, int64_t used_bytes);
/* Warns of the first skipped step, and of divergence. loss: the step's loss. Only the first rank calls it. */
void step_checks_loss(struct training *t, bool skipped, double loss);
/* Warns, once, if the importance weights of all completions of a step are 0. sum: of all ranks. Only the first rank
 * calls it. */
void step_checks_importance(struct training *t, const struct model_sums *sum);
/* Call it after a skipped step. 0: the run continues. Error: too many steps were skipped, and the run must end. bad:
 * the tensor that step_checks_find_bad found. */
int step_checks_skipped(const struct training *t, const char *bad, struct err *err) MT_CHECK;
/* Warns if this step's held-out loss is not finite. */
void step_checks_evaluation(const struct training *t);

#endif
