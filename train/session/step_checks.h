/* step_checks.h - what a run says about a loss that is not finite. */
#ifndef MT_STEP_CHECKS_H
#define MT_STEP_CHECKS_H

#include "train/state/checkpoint.h"
#include "train/config/config.h"

/* Warns of the first skipped step; loss is that of the step. */
void step_checks_skipped(const struct config *cfg, const struct train_state *s, double loss);
/* Warns of a held-out loss that is not finite, at this step. */
void step_checks_evaluation(const struct config *cfg, const struct train_state *s);
/* After a skipped step: 0 when the run goes on. Else the error with which it ends; bad: the first tensor of the step
 * that was not finite. */
int step_checks_check(const struct config *cfg, const struct train_state *s, int64_t total_steps, const char *bad,
                      struct err *err) MT_CHECK;

#endif
