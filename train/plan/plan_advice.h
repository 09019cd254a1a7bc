/* plan_advice.h - of plan.c: the errors of a plan that does not fit, with what to change. */
#ifndef MT_PLAN_ADVICE_H
#define MT_PLAN_ADVICE_H

#include "train/plan/plan_sums.h"

/* No options fit: the error says what takes the memory. Each thing that it suggests needs less, by a plan with that
 * change alone. p is the choice with the lowest peak; fills p->host_needed and p->helps. Returns -1. */
int plan_too_large(struct plan *p, const struct plan_request *q, struct err *err) MT_CHECK;
/* Error: a fixed train.offload takes more host memory than there is. */
int plan_check_host(const struct plan *p, const struct plan_request *q, struct err *err) MT_CHECK;

#endif
