/* schedule.h - the learning rate as a pure function of the step. */
#ifndef MT_SCHEDULE_H
#define MT_SCHEDULE_H

#include "kernels/base.h"

enum schedule_kind { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT };
struct schedule {
    enum schedule_kind kind;
    double lr, min_lr_ratio; /* the decay ends at lr * min_lr_ratio */
    int64_t warmup_steps, total_steps;
};
/* Rate of optimizer step 1..total_steps. Warm-up: lr * step / warmup_steps (never 0) up to step warmup_steps, which has
 * the full rate; without warm-up step 1 has it. Then cosine or linear decay to lr * min_lr_ratio at total_steps. */
double schedule_lr(const struct schedule *s, int64_t step);

#endif
