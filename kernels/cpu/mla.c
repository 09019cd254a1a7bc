/* mla.c - latent attention: the packed q | k | v from queries, latent keys and values, and the shared rotated key.
 * Decoding does not expand keys and values: it maps queries to the latent space, and weighted sums of latents to values
 * of heads. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/rope.h"

/* A pair of rotated columns in the inputs; in q | k | v it is always columns i and i + G/2. */
struct pair {
    int64_t lo, hi;
};
static struct pair pair_of(const struct mla_shape *s, int64_t i)
{
    return s->interleaved ? (struct pair){2 * i, 2 * i + 1} : (struct pair){i, i + s->rope / 2};
}

/* y = x rotated. x has the order of columns of the inputs, y that of q | k | v. */
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

/* Multiplies n values of a head's query by the factor of its position. */
static void scale_query(const struct mla_shape *s, real *q, int64_t n, struct tensor pos, int64_t t)
{
    if (!(s->beta > 0)) return;
    const int64_t times = ((const int32_t *)pos.data)[t] / s->beta_len;
    const real factor = (real)(1 + (double)s->beta * log(1 + (double)times));
    for (int64_t i = 0; i < n; i++) q[i] *= factor;
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
            scale_query(s, to_q, width, pos, t);
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
            scale_query(s, to_q, width, pos, t);
            copy(to_kv, from_k, n);
            rotate_back(s, real_row(dk_rope, t), from_k + n, angle, h > 0);
            copy(to_kv + n, real_row(dqkv, t) + 2 * s->n_head * width + h * s->value, s->value);
        }
    }
}

/* ---- decoding: a thread computes a head, with its decoded rows of kv_b and its rows of the adapter */

/* What a product with a head's rows of kv_b needs: n of them from row `first` of the matrix on. */
struct rows {
    const struct lora *lora;
    const real *w, *b; /* [n, L], [n, R] */
    real *u;           /* [T, R] */
    int64_t n, n_in, n_tok;
};

static int64_t scratch_reals(const struct proj *p, int64_t n, int64_t n_tok)
{
    return n * p->w.n_in + n_tok * p->lora.r;
}

static struct rows rows_of(const struct proj *p, const struct weight *w, int64_t first, int64_t n, int64_t n_tok,
                           real *scratch)
{
    const struct lora *l = &p->lora;
    weight_tile(w, 0, first, n, 0, w->n_in, scratch, w->n_in);
    return (struct rows){.lora = l,
                         .w = scratch,
                         .b = l->r ? (const real *)l->b.data + first * l->b.ld : NULL,
                         .u = scratch + n * w->n_in,
                         .n = n,
                         .n_in = w->n_in,
                         .n_tok = n_tok};
}

/* y [T, L] = x [T, n] M, `step` tokens at a time */
static void times_rows(const struct rows *m, int64_t step, real *y, int64_t ldy, const real *x, int64_t ldx)
{
    const struct lora *l = m->lora;
    for (int64_t t = 0; t < m->n_tok; t += step, y += step * ldy, x += step * ldx) {
        const int64_t n = MT_MIN(step, m->n_tok - t);
        gemm_serial(false, false, n, m->n_in, m->n, 1, x, ldx, m->w, m->n_in, 0, y, ldy);
        if (!lora_added(l)) continue;
        gemm_serial(false, false, n, l->r, m->n, (real)l->scale[0], x, ldx, m->b, l->b.ld, 0, m->u, l->r);
        gemm_serial(false, false, n, m->n_in, l->r, 1, m->u, l->r, l->a.data, l->a.ld, 1, y, ldy);
    }
}

/* y [T, n] = x [T, L] M^T */
static void times_columns(const struct rows *m, int64_t step, real *y, int64_t ldy, const real *x, int64_t ldx)
{
    const struct lora *l = m->lora;
    for (int64_t t = 0; t < m->n_tok; t += step, y += step * ldy, x += step * ldx) {
        const int64_t n = MT_MIN(step, m->n_tok - t);
        gemm_serial(false, true, n, m->n, m->n_in, 1, x, ldx, m->w, m->n_in, 0, y, ldy);
        if (!lora_added(l)) continue;
        gemm_serial(false, true, n, l->r, m->n_in, (real)l->scale[0], x, ldx, l->a.data, l->a.ld, 0, m->u, l->r);
        gemm_serial(false, true, n, m->n, l->r, 1, m->u, l->r, m->b, l->b.ld, 1, y, ldy);
    }
}

/* Tokens per product. 1 with steady_rows, as OpenBLAS chooses the order of sums by the number of rows. */
static int64_t step_of(const struct device *dev, int64_t n_tok) { return dev->steady_rows ? 1 : MT_MAX(n_tok, 1); }

void CPU(mla_absorb)(struct device *dev, struct tensor y, struct tensor q, struct tensor pos, const struct proj *kv_b,
                     const struct mla_shape *s)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = q.shape[0], n_in = kv_b->w.n_in;
    const struct weight w = proj_weight(dev, kv_b, (struct tensor){0});
    const struct tensor scratch =
        arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, scratch_reals(kv_b, s->nope, n_tok));
    if (!dev->dry_run) {
#pragma omp parallel for num_threads(dev->n_threads)
        for (int64_t h = 0; h < s->n_head; h++) {
            const struct rows m =
                rows_of(kv_b, &w, h * (s->nope + s->value), s->nope, n_tok, real_row(scratch, omp_get_thread_num()));
            real *to = real_row(y, 0) + h * (n_in + s->rope);
            const real *from = real_row(q, 0) + h * (s->nope + s->rope);
            times_rows(&m, step_of(dev, n_tok), to, y.ld, from, q.ld);
            for (int64_t t = 0; t < n_tok; t++) {
                copy(to + t * y.ld + n_in, from + t * q.ld + s->nope, s->rope);
                scale_query(s, to + t * y.ld, n_in + s->rope, pos, t);
            }
        }
    }
    arena_release(&dev->work, mark);
}

void CPU(mla_values)(struct device *dev, struct tensor o, struct tensor z, const struct proj *kv_b,
                     const struct mla_shape *s)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = z.shape[0], n_in = kv_b->w.n_in;
    const struct weight w = proj_weight(dev, kv_b, (struct tensor){0});
    const struct tensor scratch =
        arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, scratch_reals(kv_b, s->value, n_tok));
    if (!dev->dry_run) {
#pragma omp parallel for num_threads(dev->n_threads)
        for (int64_t h = 0; h < s->n_head; h++) {
            const struct rows m = rows_of(kv_b, &w, h * (s->nope + s->value) + s->nope, s->value, n_tok,
                                          real_row(scratch, omp_get_thread_num()));
            times_columns(&m, step_of(dev, n_tok), real_row(o, 0) + h * s->value, o.ld, real_row(z, 0) + h * n_in,
                          z.ld);
        }
    }
    arena_release(&dev->work, mark);
}
