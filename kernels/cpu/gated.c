/* gated.c - outputs with a gate: RMSNorm(x) silu(z) for every head; RMSNorm(x silu(z)) for groups of columns; attention
 * times sigmoid(gate), and the split of its projection, with norm and RoPE of queries and keys. One thread computes a
 * row. */
#include "kernels/cpu/norm.h"
#include "kernels/cpu/rope.h"

#include <string.h>

static inline real sigmoid(real x) { return 1 / (1 + real_exp(-x)); }

void CPU(gated_norm_fwd)(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor z,
                         struct tensor w, const struct norm *norm)
{
    if (dev->dry_run) return;
    const int64_t n_head = rstd.shape[1], dim = w.shape[0];
    const bool round = norm_rounds(dev, norm);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        real *out = real_row(y, t);
        const real *gate = real_row(z, t);
        for (int64_t h = 0; h < n_head; h++)
            real_row(rstd, t)[h] = norm_row_fwd(out + h * dim, real_row(x, t) + h * dim, w.data, dim, norm->eps, round);
        for (int64_t i = 0; i < n_head * dim; i++) out[i] *= gate[i] * sigmoid(gate[i]);
    }
}

void CPU(gated_norm_bwd)(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy, struct tensor x,
                         struct tensor rstd, struct tensor z, struct tensor w)
{
    if (dev->dry_run) return;
    const int64_t n_head = rstd.shape[1], dim = w.shape[0];
    const float *weight = w.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        for (int64_t h = 0; h < n_head; h++) {
            const real *in = real_row(x, t) + h * dim, *d = real_row(dy, t) + h * dim, *gate = real_row(z, t) + h * dim;
            real *g = real_row(dx, t) + h * dim, *dgate = real_row(dz, t) + h * dim, r = real_row(rstd, t)[h];
            for (int64_t i = 0; i < dim; i++) {
                const real s = sigmoid(gate[i]);
                dgate[i] = d[i] * in[i] * r * (real)weight[i] * s * (1 + gate[i] * (1 - s));
                g[i] = d[i] * gate[i] * s;
            }
            norm_row_bwd(g, g, in, r, weight, dim, false);
        }
    }
}

void CPU(silu_norm_fwd)(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor z,
                        struct tensor w, const struct norm *norm)
{
    if (dev->dry_run) return;
    const int64_t n_group = rstd.shape[1], dim = w.shape[0] / n_group;
    const bool round = norm_rounds(dev, norm);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        real *out = real_row(y, t);
        const real *in = real_row(x, t), *gate = real_row(z, t);
        for (int64_t i = 0; i < n_group * dim; i++) out[i] = in[i] * gate[i] * sigmoid(gate[i]);
        for (int64_t g = 0; g < n_group; g++)
            real_row(rstd, t)[g] =
                norm_row_fwd(out + g * dim, out + g * dim, (const float *)w.data + g * dim, dim, norm->eps, round);
    }
}

/* With v = x silu(z): RMSNorm's backward needs v and gives dv. dz holds v until then. */
void CPU(silu_norm_bwd)(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy, struct tensor x,
                        struct tensor rstd, struct tensor z, struct tensor w)
{
    if (dev->dry_run) return;
    const int64_t n_group = rstd.shape[1], dim = w.shape[0] / n_group;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        const real *in = real_row(x, t), *gate = real_row(z, t);
        real *g = real_row(dx, t), *v = real_row(dz, t);
        for (int64_t i = 0; i < n_group * dim; i++) v[i] = in[i] * gate[i] * sigmoid(gate[i]);
        for (int64_t k = 0; k < n_group; k++)
            norm_row_bwd(g + k * dim, real_row(dy, t) + k * dim, v + k * dim, real_row(rstd, t)[k],
                         (const float *)w.data + k * dim, dim, false);
        for (int64_t i = 0; i < n_group * dim; i++) {
            const real s = sigmoid(gate[i]), of_v = g[i];
            v[i] = of_v * in[i] * s * (1 + gate[i] * (1 - s));
            g[i] = of_v * gate[i] * s;
        }
    }
}

/* Copies q, k and v between a row of `wide` and one of `qkv`. */
static void copy_row(real *qkv, real *wide, const struct attn_shape *s, bool to_qkv)
{
    const int64_t dim = s->head_dim;
    for (int64_t h = 0; h <= s->n_head; h++) { /* after the queries: k and v, which are contiguous in both */
        const size_t bytes = (size_t)(h < s->n_head ? dim : 2 * s->n_kv * dim) * sizeof(real);
        real *a = qkv + h * dim, *b = wide + h * 2 * dim;
        memcpy(to_qkv ? a : b, to_qkv ? b : a, bytes);
    }
}

void CPU(attn_split_fwd)(struct device *dev, struct tensor qkv, struct tensor rstd, struct tensor wide,
                         struct tensor wq, struct tensor wk, struct tensor pos, struct tensor table,
                         const struct attn_shape *shape, const struct norm *norm)
{
    if (dev->dry_run) return;
    const int64_t n_head = shape->n_head + shape->n_kv, dim = shape->head_dim;
    const bool round = norm_rounds(dev, norm);
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < wide.shape[0]; t++) {
        real *row = real_row(qkv, t);
        copy_row(row, real_row(wide, t), shape, true);
        for (int64_t h = 0; h < n_head; h++)
            real_row(rstd, t)[h] =
                norm_row_fwd(row + h * dim, row + h * dim, (h < shape->n_head ? wq : wk).data, dim, norm->eps, round);
        rope_row(row, pos, table, t, n_head, dim, 1);
    }
}

void CPU(attn_split_bwd)(struct device *dev, struct tensor dwide, struct tensor dqkv, struct tensor wide,
                         struct tensor rstd, struct tensor wq, struct tensor wk, struct tensor pos, struct tensor table,
                         const struct attn_shape *shape)
{
    if (dev->dry_run) return;
    const int64_t n_head = shape->n_head, dim = shape->head_dim;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < dwide.shape[0]; t++) {
        real *row = real_row(dwide, t);
        copy_row(real_row(dqkv, t), row, shape, false);
        rope_row(row, pos, table, t, n_head, 2 * dim, -1);
        rope_row(row + 2 * n_head * dim, pos, table, t, shape->n_kv, dim, -1);
        for (int64_t h = 0; h < n_head + shape->n_kv; h++) {
            const int64_t at = (h < n_head ? 2 * h : n_head + h) * dim;
            norm_row_bwd(row + at, row + at, real_row(wide, t) + at, real_row(rstd, t)[h], (h < n_head ? wq : wk).data,
                         dim, false);
        }
    }
}

void CPU(attn_gate_fwd)(struct device *dev, struct tensor y, struct tensor o, struct tensor wide,
                        const struct attn_shape *shape)
{
    if (dev->dry_run) return;
    const int64_t dim = shape->head_dim;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < o.shape[0]; t++)
        for (int64_t h = 0; h < shape->n_head; h++) {
            const real *gate = real_row(wide, t) + (2 * h + 1) * dim, *in = real_row(o, t) + h * dim;
            real *out = real_row(y, t) + h * dim;
            for (int64_t i = 0; i < dim; i++) out[i] = in[i] * sigmoid(gate[i]);
        }
}

void CPU(attn_gate_bwd)(struct device *dev, struct tensor dout, struct tensor dwide, struct tensor dy, struct tensor o,
                        struct tensor wide, const struct attn_shape *shape)
{
    if (dev->dry_run) return;
    const int64_t dim = shape->head_dim;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < o.shape[0]; t++)
        for (int64_t h = 0; h < shape->n_head; h++) {
            const real *gate = real_row(wide, t) + (2 * h + 1) * dim, *in = real_row(o, t) + h * dim,
                       *d = real_row(dy, t) + h * dim;
            real *dgate = real_row(dwide, t) + (2 * h + 1) * dim, *g = real_row(dout, t) + h * dim;
            for (int64_t i = 0; i < dim; i++) {
                const real s = sigmoid(gate[i]);
                dgate[i] = d[i] * in[i] * s * (1 - s);
                g[i] = d[i] * s;
            }
        }
}
