/* qk_norm.c - RMSNorm of queries, keys and, in some families, values, in place in the q | k | v rows. A row consists of
 * groups that are normalised separately: every head of q, of k and of v, or all of q and all of k. A group is as wide
 * as its weight. */
#include "kernels/cpu/norm.h"

#include <string.h>

static int64_t groups(int64_t n, const struct attn_shape *shape, struct tensor w)
{
    return n * shape->head_dim / w.shape[0];
}

void CPU(qk_norm_fwd)(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd, struct tensor wq,
                      struct tensor wk, struct tensor wv, const struct attn_shape *shape, const struct norm *norm)
{
    if (dev->dry_run) return;
    const int64_t n_group = rstd.shape[1], n_q = groups(shape->n_head, shape, wq);
    const int64_t n_qk = n_q + groups(shape->n_kv, shape, wk);
    bool round = norm_rounds(dev, norm);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < qkv.shape[0]; t++) {
        real *y = real_row(qkv, t), *x = real_row(raw, t);
        memcpy(x, y, (size_t)raw.shape[1] * sizeof(*x));
        for (int64_t g = 0; g < n_group; g++) {
            struct tensor w = g < n_q ? wq : g < n_qk ? wk : wv;
            real_row(rstd, t)[g] = norm_row_fwd(y, x, w.data, w.shape[0], norm->eps, round);
            x += w.shape[0];
            y += w.shape[0];
        }
    }
}

void CPU(qk_norm_bwd)(struct device *dev, struct tensor dqkv, struct tensor raw, struct tensor rstd, struct tensor wq,
                      struct tensor wk, struct tensor wv, const struct attn_shape *shape)
{
    if (dev->dry_run) return;
    const int64_t n_group = rstd.shape[1], n_q = groups(shape->n_head, shape, wq);
    const int64_t n_qk = n_q + groups(shape->n_kv, shape, wk);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < dqkv.shape[0]; t++) {
        real *d = real_row(dqkv, t);
        const real *x = real_row(raw, t);
        for (int64_t g = 0; g < n_group; g++) {
            struct tensor w = g < n_q ? wq : g < n_qk ? wk : wv;
            norm_row_bwd(d, d, x, real_row(rstd, t)[g], w.data, w.shape[0], false);
            x += w.shape[0];
            d += w.shape[0];
        }
    }
}
