/* mla.c - latent attention: the packed q | k | v from queries, latent keys and values, and the shared rotated key. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/rope.h"

/* A pair of rotated columns in the inputs; in q | k | v it is always columns i and i + G/2. */
struct pair {
    int64_t lo, hi;
};
static struct pair pair_of(const struct mla_shape *s, int64_t i)
{
    return s->interleaved ? (struct pair){2 * i, 2 * i + 1} : (struct pair){i, i + s->rope / 2};
}

/* y = x rotated, from the order of the inputs to that of q | k | v. */
static void rotate(const struct mla_shape *s, real *y, const real *x, const float *angle)
{
    const int64_t half = s->rope / 2;
    for (int64_t i = 0; i < half; i++) {
        const struct pair p = pair_of(s, i);
        const real c = (real)angle[i], n = (real)angle[half + i];
        y[i] = x[p.lo] * c - x[p.hi] * n;
        y[i + half] = x[p.hi] * c + x[p.lo] * n;
    }
}

/* The way back: dx from dy; with add, dx +=. */
static void rotate_back(const struct mla_shape *s, real *dx, const real *dy, const float *angle, bool add)
{
    const int64_t half = s->rope / 2;
    for (int64_t i = 0; i < half; i++) {
        const struct pair p = pair_of(s, i);
        const real c = (real)angle[i], n = (real)angle[half + i];
        const real lo = dy[i] * c + dy[i + half] * n, hi = dy[i + half] * c - dy[i] * n;
        dx[p.lo] = add ? dx[p.lo] + lo : lo;
        dx[p.hi] = add ? dx[p.hi] + hi : hi;
    }
}

static void copy(real *y, const real *x, int64_t n) { memcpy(y, x, (size_t)n * sizeof(*y)); }

/* Multiplies a head's query by the factor of its position. */
static void scale_query(const struct mla_shape *s, real *q, struct tensor pos, int64_t t)
{
    if (!(s->beta > 0)) return;
    const int64_t times = ((const int32_t *)pos.data)[t] / s->beta_len;
    const real factor = (real)(1 + (double)s->beta * log(1 + (double)times));
    for (int64_t i = 0; i < s->nope + s->rope; i++) q[i] *= factor;
}

void CPU(mla_qkv_fwd)(struct device *dev, struct tensor qkv, struct tensor q, struct tensor kv, struct tensor k_rope,
                      struct tensor pos, struct tensor table, const struct mla_shape *s)
{
    if (dev->dry_run) return;
    const int64_t n = s->nope, width = n + s->rope;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < qkv.shape[0]; t++) {
        const float *angle = rope_angles(pos, table, t);
        for (int64_t h = 0; h < s->n_head; h++) {
            const real *from_q = real_row(q, t) + h * width, *from_kv = real_row(kv, t) + h * (n + s->value);
            real *to_q = real_row(qkv, t) + h * width, *to_k = to_q + s->n_head * width;
            copy(to_q, from_q, n);
            rotate(s, to_q + n, from_q + n, angle);
            scale_query(s, to_q, pos, t);
            copy(to_k, from_kv, n);
            rotate(s, to_k + n, real_row(k_rope, t), angle);
            copy(real_row(qkv, t) + 2 * s->n_head * width + h * s->value, from_kv + n, s->value);
        }
    }
}

void CPU(mla_qkv_bwd)(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dk_rope,
                      struct tensor dqkv, struct tensor pos, struct tensor table, const struct mla_shape *s)
{
    if (dev->dry_run) return;
    const int64_t n = s->nope, width = n + s->rope;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < dqkv.shape[0]; t++) {
        const float *angle = rope_angles(pos, table, t);
        for (int64_t h = 0; h < s->n_head; h++) {
            real *to_q = real_row(dq, t) + h * width, *to_kv = real_row(dkv, t) + h * (n + s->value);
            const real *from_q = real_row(dqkv, t) + h * width, *from_k = from_q + s->n_head * width;
            copy(to_q, from_q, n);
            rotate_back(s, to_q + n, from_q + n, angle, false);
            scale_query(s, to_q, pos, t);
            copy(to_kv, from_k, n);
            rotate_back(s, real_row(dk_rope, t), from_k + n, angle, h > 0);
            copy(to_kv + n, real_row(dqkv, t) + 2 * s->n_head * width + h * s->value, s->value);
        }
    }
}
