/* adamw_value.h - the AdamW update of one value in fp32, with the same bits on a GPU and on its host's CPU.
 *
 * Products are added by fmaf, so that no compiler chooses which products to fuse. While gradients are 0, m decays to a
 * denormal, where rounding stops the decay. CPUs take ten times as long for denormals, so m is then set to 0. */
#ifndef MT_ADAMW_VALUE_H
#define MT_ADAMW_VALUE_H

#include <float.h>

#include "kernels/format/minifloat.h"
#include "kernels/ops/ops.h"

MT_BOTH float adamw_decay(const struct adamw_step *s) { return fmaf(-s->lr, s->weight_decay, 1); }

/* p, m, v in place; decay: adamw_decay */
MT_BOTH void adamw_value(float *p, float *m, float *v, float g, const struct adamw_step *s, float decay)
{
    g *= s->grad_scale;
    *m = fmaf(s->beta1, *m, (1 - s->beta1) * g);
    *m = fabsf(*m) < FLT_MIN ? 0 : *m;
    *v = fmaf(s->beta2, *v, (1 - s->beta2) * g * g);
    *p = fmaf(decay, *p, -(s->lr * (*m / s->correction1) / (sqrtf(*v / s->correction2) + s->eps)));
}

#endif
