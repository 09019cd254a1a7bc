/* rope.c - rotary embedding, half-split: rotates the pair (i, i + W/2) of a head by the angle of its position. */
#include "kernels/cpu/rope.h"

/* cos and sin include the attention factor. */
void rope_row(real *row, struct tensor pos, struct tensor table, int64_t t, int64_t n_head, int64_t stride,
              real direction)
{
    const int64_t half = table.shape[1] / 2;
    const float *cosine = rope_angles(pos, table, t), *sine = cosine + half;
    for (int64_t h = 0; h < n_head; h++) {
        real *lo = row + h * stride, *hi = lo + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            real c = (real)cosine[i], s = direction * (real)sine[i], a = lo[i], b = hi[i];
            lo[i] = a * c - b * s;
            hi[i] = b * c + a * s;
        }
    }
}

static void rotate(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table, int64_t n_head,
                   int64_t head_dim, real direction)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < qkv.shape[0]; t++) rope_row(real_row(qkv, t), pos, table, t, n_head, head_dim, direction);
}

void CPU(rope_fwd)(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table, int64_t n_head,
                   int64_t head_dim)
{
    rotate(dev, qkv, pos, table, n_head, head_dim, 1);
}

void CPU(rope_bwd)(struct device *dev, struct tensor dqkv, struct tensor pos, struct tensor table, int64_t n_head,
                   int64_t head_dim)
{
    rotate(dev, dqkv, pos, table, n_head, head_dim, -1);
}
