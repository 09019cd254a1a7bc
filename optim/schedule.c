/* schedule.c - the learning rate of a step. */
#include "optim/schedule.h"

#include <math.h>

/* Returns the share of lr - min_lr that is left. done: share of the steps after the warm-up that are done; decayed:
 * share of WSD's decay steps. */
static double rest_of(const struct schedule *s, double done, double decayed)
{
    const double pi = 3.14159265358979323846;
    switch (s->kind) {
    case SCHEDULE_COSINE: return 0.5 * (1 + cos(pi * done));
    case SCHEDULE_LINEAR: return 1 - done;
    case SCHEDULE_CONSTANT: return 1;
    case SCHEDULE_WSD: return 1 - decayed;
    case SCHEDULE_POLYNOMIAL: return pow(1 - done, s->power);
    case SCHEDULE_RESTARTS: return done < 1 ? 0.5 * (1 + cos(pi * fmod((double)s->cycles * done, 1))) : 0;
    }
    return 1;
}

/* Position of `step` between `first` (0) and the last step (1), clamped. */
static double share(const struct schedule *s, int64_t step, int64_t first)
{
    if (s->total_steps <= first) return 0;
    return fmin(fmax((double)(step - first) / (double)(s->total_steps - first), 0), 1);
}

double schedule_lr(const struct schedule *s, int64_t step)
{
    const int64_t warmup = MT_MAX(s->warmup_steps, 1); /* there is always a first step at the full rate */
    if (step < warmup) return s->lr * (double)step / (double)warmup;
    const double decayed = share(s, step, MT_MAX(warmup, s->total_steps - s->decay_steps));
    const double rest = rest_of(s, share(s, step, warmup), decayed);
    return s->lr * (s->min_lr_ratio + (1 - s->min_lr_ratio) * rest);
}
