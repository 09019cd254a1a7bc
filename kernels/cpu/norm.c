/* norm.c - RMSNorm of one vector and of every row of the residual stream. One thread computes a row. */
#include "kernels/cpu/norm.h"

real norm_row_fwd(real *y, const real *x, const float *w, int64_t n, float eps, bool round)
{
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    real r = 1 / real_sqrt(sum / (real)n + (real)eps);
    if (round) {
        for (int64_t i = 0; i < n; i++) y[i] = (real)bf16_to_f32(f32_to_bf16((float)(x[i] * r))) * (real)w[i];
    } else {
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * r * (real)w[i];
    }
    return r;
}

void norm_row_bwd(real *dx, const real *dy, const real *x, real rstd, const float *w, int64_t n, bool accumulate)
{
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += dy[i] * (real)w[i] * x[i];
    real mean = sum * rstd / (real)n; /* of g * xhat */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) dx[i] = (accumulate ? dx[i] : 0) + rstd * (dy[i] * (real)w[i] - x[i] * rstd * mean);
}

void CPU(rmsnorm_fwd)(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w,
                      const struct norm *norm)
{
    if (dev->dry_run) return;
    bool round = norm_rounds(dev, norm);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++)
        ((real *)rstd.data)[t] = norm_row_fwd(real_row(y, t), real_row(x, t), w.data, x.shape[1], norm->eps, round);
}

void CPU(rmsnorm_bwd)(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                      struct tensor w)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++)
        norm_row_bwd(real_row(dx, t), real_row(dy, t), real_row(x, t), ((const real *)rstd.data)[t], w.data, x.shape[1],
                     true);
}
