/* plan_advice.h - the errors of a plan that does not fit, with what to change; for plan.c. */
#ifndef MT_PLAN_ADVICE_H
#define MT_PLAN_ADVICE_H

#include "train/plan/plan_sums.h"

/* Call it when no options fit: the error says what takes the memory and suggests changes. p is the choice with the
 * lowest peak; fills p->host_needed and p->helps. Returns -1. */
int plan_too_large(struct plan *p, const struct plan_request *q, struct err *err) MT_CHECK;
/* Error: a fixed train.offload takes more host memory than there is. */
int plan_check_host(const struct plan *p, const struct plan_request *q, struct err *err) MT_CHECK;

#endif
