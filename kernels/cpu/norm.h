/* norm.h - RMSNorm of one vector, shared by the norms of the residual stream and of queries and keys. */
#ifndef MT_CPU_NORM_H
#define MT_CPU_NORM_H

#include "kernels/cpu/real.h"

#define norm_row_fwd CPU(norm_row_fwd)
#define norm_row_bwd CPU(norm_row_bwd)

/* y = x * rstd * w over n values; returns rstd. round: x * rstd is rounded to bf16 before the weight. */
real norm_row_fwd(real *y, const real *x, const float *w, int64_t n, float eps, bool round);
/* dx (= or += by accumulate) rstd * (g - xhat * mean(g * xhat)), g = dy * w; dx may be dy. */
void norm_row_bwd(real *dx, const real *dy, const real *x, real rstd, const float *w, int64_t n, bool accumulate);

/* Whether x * rstd is rounded separately: requested, and activations are rounded to bf16. */
static inline bool norm_rounds(const struct device *dev, const struct norm *norm)
{
    return dev->round_bf16 && norm->round_twice;
}

#endif
