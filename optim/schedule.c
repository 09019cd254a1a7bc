/* schedule.c - the learning rate of a step. */
#include "optim/schedule.h"

#include <math.h>

double schedule_lr(const struct schedule *s, int64_t step)
{
    const double pi = 3.14159265358979323846;
    int64_t warmup = MT_MAX(s->warmup_steps, 1); /* there is always a first step at the full rate */
    if (step < warmup) return s->lr * (double)step / (double)warmup;
    double progress = 0; /* progress of the decay, 0 to 1 */
    if (s->total_steps > warmup) progress = (double)(step - warmup) / (double)(s->total_steps - warmup);
    progress = fmin(progress, 1);
    double rest = 1; /* remaining fraction of lr - min_lr */
    if (s->kind == SCHEDULE_COSINE) rest = 0.5 * (1 + cos(pi * progress));
    if (s->kind == SCHEDULE_LINEAR) rest = 1 - progress;
    return s->lr * (s->min_lr_ratio + (1 - s->min_lr_ratio) * rest);
}
