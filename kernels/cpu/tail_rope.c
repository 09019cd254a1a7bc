/* tail_rope.c - rotary embedding of the last columns of every head as adjacent pairs, after RMSNorm without a weight.
 */
#include "kernels/cpu/rope.h"

/* y = factor * x, its last n columns rotated; direction: 1, or -1 by the negative angle. */
static void rotate(real *y, const real *x, real factor, int64_t dim, const float *angle, int64_t n, real direction)
{
    const int64_t first = dim - n, half = n / 2;
    for (int64_t c = 0; c < first; c++) y[c] = factor * x[c];
    for (int64_t i = 0; i < half; i++) {
        const real c = (real)angle[i], s = direction * (real)angle[half + i];
        const real lo = factor * x[first + 2 * i], hi = factor * x[first + 2 * i + 1];
        y[first + 2 * i] = lo * c - hi * s;
        y[first + 2 * i + 1] = hi * c + lo * s;
    }
}

void CPU(tail_rope_fwd)(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor pos,
                        struct tensor table, const struct tail_rope *r)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < y.shape[0]; t++) {
        const float *angle = rope_angles(pos, table, t);
        for (int64_t h = 0; h < r->n_head; h++) {
            const real *from = real_row(x, t) + h * r->head_dim;
            real factor = 1, sum = 0;
            if (rstd.ndim) {
                for (int64_t c = 0; c < r->head_dim; c++) sum += from[c] * from[c];
                factor = 1 / real_sqrt(sum / (real)r->head_dim + (real)r->eps);
                real_row(rstd, t)[h] = factor;
            }
            rotate(real_row(y, t) + h * r->head_dim, from, factor, r->head_dim, angle, table.shape[1],
                   r->inverse ? -1 : 1);
        }
    }
}

/* dx = rstd (dx - xhat mean(dx xhat)), xhat = x rstd */
static void norm_bwd(real *dx, const real *x, real rstd, int64_t n)
{
    real sum = 0;
    for (int64_t c = 0; c < n; c++) sum += dx[c] * x[c];
    const real mean = sum * rstd / (real)n;
    for (int64_t c = 0; c < n; c++) dx[c] = rstd * (dx[c] - x[c] * rstd * mean);
}

void CPU(tail_rope_bwd)(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                        struct tensor pos, struct tensor table, const struct tail_rope *r)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < dx.shape[0]; t++) {
        const float *angle = rope_angles(pos, table, t);
        for (int64_t h = 0; h < r->n_head; h++) {
            real *to = real_row(dx, t) + h * r->head_dim;
            rotate(to, real_row(dy, t) + h * r->head_dim, 1, r->head_dim, angle, table.shape[1], r->inverse ? 1 : -1);
            if (rstd.ndim) norm_bwd(to, real_row(x, t) + h * r->head_dim, real_row(rstd, t)[h], r->head_dim);
        }
    }
}
