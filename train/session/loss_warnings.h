/* loss_warnings.h - what a run says about a loss that is not finite. */
#ifndef MT_LOSS_WARNINGS_H
#define MT_LOSS_WARNINGS_H

#include "train/state/checkpoint.h"
#include "train/config/config.h"

/* Warns of the first skipped step; loss is that of the step. */
void loss_warnings_skipped(const struct config *cfg, const struct train_state *s, double loss);
/* Warns of a held-out loss that is not finite, at this step. */
void loss_warnings_evaluation(const struct config *cfg, const struct train_state *s);
/* After a skipped step: 0 when the run goes on. Else the error with which it ends; bad: the first tensor of the step
 * that was not finite. */
int loss_warnings_check(const struct config *cfg, const struct train_state *s, int64_t total_steps, const char *bad,
                        struct err *err) MT_CHECK;

#endif
