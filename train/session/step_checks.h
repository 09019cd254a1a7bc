/* step_checks.h - warnings and errors about steps: values that are not finite, divergence, memory, chunks. */
#ifndef MT_STEP_CHECKS_H
#define MT_STEP_CHECKS_H

#include "train/session/training.h"

/* Finds the first tensor of a step that is not finite: runs the n micro-batches b again, one at a time. All ranks call
 * it. counts: of the step. */
void step_checks_find_bad(struct training *t, const struct batch *b, int64_t n, const struct step_counts *counts,
                          char bad[64]);
/* Call it after a step: warns if the step used more device memory than the limit, or if unbalanced routing needed more
 * chunks. */
void step_checks_device(struct training *t, int64_t used_bytes);
/* Warns of the first skipped step, and of divergence. loss: of the step. Only the first rank calls it. */
void step_checks_loss(struct training *t, bool skipped, double loss);
/* Call it after a skipped step. 0: the run continues. Error: too many steps were skipped, and the run must end. bad:
 * the first tensor of the step that was not finite. */
int step_checks_skipped(const struct training *t, const char *bad, struct err *err) MT_CHECK;
/* Warns of a held-out loss that is not finite, at this step. */
void step_checks_evaluation(const struct training *t);

#endif
