/* schedule.h - the learning rate as a pure function of the step. */
#ifndef MT_SCHEDULE_H
#define MT_SCHEDULE_H

#include "kernels/base.h"

enum schedule_kind {
    SCHEDULE_COSINE,
    SCHEDULE_LINEAR,
    SCHEDULE_CONSTANT,
    SCHEDULE_WSD, /* warm-up, constant, then linear decay (arXiv:2404.06395) */
    SCHEDULE_POLYNOMIAL,
    SCHEDULE_RESTARTS /* cosine, begun again (arXiv:1608.03983) */
};
struct schedule {
    enum schedule_kind kind;
    double lr, min_lr_ratio; /* the decay ends at lr * min_lr_ratio */
    int64_t warmup_steps, total_steps;
    int64_t decay_steps; /* WSD: the last steps, in which the rate falls; fewer if the warm-up leaves fewer */
    double power;        /* POLYNOMIAL: exponent of the share of steps that is left */
    int64_t cycles;      /* RESTARTS: number of cosine decays, each from lr */
};
/* Rate of optimizer step 1..total_steps. Warm-up: lr * step / warmup_steps up to step warmup_steps, which has the full
 * rate, as has step 1 without warm-up. Then the decay by kind, to lr * min_lr_ratio at total_steps. */
double schedule_lr(const struct schedule *s, int64_t step);

#endif
