/* norm.c - RMSNorm, the weight multiplied in before any rounding. A row is one thread's. */
#include "kernels/cpu/real.h"

void CPU(rmsnorm_fwd)(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w,
                      float eps)
{
    if (dev->measuring) return;
    int64_t n_row = x.shape[0], n = x.shape[1];
    const float *weight = w.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < n_row; t++) {
        const real *xt = real_row(x, t);
        real *yt = real_row(y, t), sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += xt[i] * xt[i];
        real r = 1 / real_sqrt(sum / (real)n + (real)eps);
        for (int64_t i = 0; i < n; i++) yt[i] = xt[i] * r * (real)weight[i];
        ((real *)rstd.data)[t] = r;
    }
}

void CPU(rmsnorm_bwd)(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                      struct tensor w)
{
    if (dev->measuring) return;
    int64_t n_row = x.shape[0], n = x.shape[1];
    const float *weight = w.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < n_row; t++) {
        const real *xt = real_row(x, t), *dyt = real_row(dy, t);
        real *dxt = real_row(dx, t), r = ((const real *)rstd.data)[t], sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += dyt[i] * (real)weight[i] * xt[i];
        real mean = sum * r / (real)n; /* of g * xhat */
        for (int64_t i = 0; i < n; i++) dxt[i] += r * (dyt[i] * (real)weight[i] - xt[i] * r * mean);
    }
}
