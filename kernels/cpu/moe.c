/* moe.c - the experts: products over rows in expert order, adapters, the activation between them, the combine.
 *
 * A task is one tile of output columns of one expert, so that an expert with most of the rows still uses all threads. A
 * thread decodes the tile's part of the packed weight once, into scratch, and multiplies it with all rows of the
 * expert. Every output element is written by one task, and tasks do not depend on the threads: results are bitwise
 * equal for any number of threads. An expert without rows is skipped before decoding, and its gradients are
 * unchanged. */
#include <omp.h>
#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/glu.h"
#include "kernels/format/minifloat.h"

enum {
    TILE = 64,  /* output columns of a task: a multiple of MXFP4's 32 */
    ROWS = 128, /* rows of a task of the thin products with an adapter */
    LANES = 8,  /* partial sums of a dot product in a vector */
};

#define I32(t) ((const int32_t *)(t).data)

static real *expert(struct tensor x, int64_t e) { return (real *)x.data + e * x.shape[1] * x.ld; }

/* A buffer per thread for the tile of a weight, `depth` being its inner dimension. */
static struct tensor tile_buffers(struct device *dev, int64_t depth)
{
    return arena_tensor_2d(&dev->work, DT_REAL, dev->n_threads, TILE * depth);
}

/* out[m] = x[token of row m].  out [M,D], x [T,D] */
static void gather(struct device *dev, struct tensor out, struct tensor x, const struct route *r)
{
    int64_t top_k = r->idx.shape[1];
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t m = 0; m < out.shape[0]; m++) {
        int64_t t = I32(r->row_slot)[m] / top_k;
        memcpy(real_row(out, m), real_row(x, t), (size_t)out.shape[1] * sizeof(real));
    }
}

/* out[t] = res[t] + sum over ascending j of gate[t,j] y[slot_row[t,j]]; an absent res is 0, absent gates are 1. */
static void sum_slots(struct device *dev, struct tensor out, struct tensor res, struct tensor gate, struct tensor y,
                      const struct route *r)
{
    int64_t top_k = r->idx.shape[1], n = out.shape[1];
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t t = 0; t < out.shape[0]; t++) {
        real *sum = real_row(out, t);
        memset(sum, 0, (size_t)n * sizeof(real));
        for (int64_t j = 0; j < top_k; j++) {
            const real *row = real_row(y, I32(r->slot_row)[t * top_k + j]);
            real weight = gate.ndim ? real_row(gate, t)[j] : 1;
            for (int64_t i = 0; i < n; i++) sum[i] += weight * row[i];
        }
        const real *rest = res.ndim ? real_row(res, t) : NULL;
        for (int64_t i = 0; rest && i < n; i++) sum[i] += rest[i];
    }
}

/* out[m] = A_e x[m] (forward) or B_e^T x[m] (backward), the thin product of an adapter.  out [M,R] */
static void lora_thin(struct device *dev, struct tensor out, struct tensor x, struct tensor factor, bool backward,
                      const struct route *r)
{
#pragma omp parallel for schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t m = 0; m < x.shape[0]; m += ROWS) {
        int64_t stop = MT_MIN(m + ROWS, x.shape[0]);
        for (int64_t e = 0; e < factor.shape[0]; e++) {
            int64_t first = MT_MAX(m, I32(r->offs)[e]), end = MT_MIN(stop, I32(r->offs)[e + 1]);
            if (first >= end) continue;
            if (backward)
                gemm_serial(false, false, end - first, out.shape[1], x.shape[1], 1, real_row(x, first), x.ld,
                            expert(factor, e), factor.ld, 0, real_row(out, first), out.ld);
            else
                gemm_rows(dev, end - first, out.shape[1], x.shape[1], 1, real_row(x, first), x.ld, expert(factor, e),
                          factor.ld, 0, real_row(out, first), out.ld);
        }
    }
}

/* x rounded as the FP8 products of p read it (struct proj_fp8), in scratch; x itself if p has no FP8 products. */
static struct tensor fp8_rows(struct device *dev, struct tensor x, const struct proj *p, const struct route *r)
{
    const float *step = p->fp8.step.data;
    if (!p->fp8.step.ndim) return x;
    const struct tensor y = arena_tensor_2d(&dev->work, DT_REAL, x.shape[0], x.shape[1]);
    if (dev->dry_run) return y;
#pragma omp parallel for schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t m = 0; m < x.shape[0]; m++) {
        const real *from = real_row(x, m);
        real *to = real_row(y, m);
        float most = 0;
        int64_t e = 0;
        while (I32(r->offs)[e + 1] <= m) e++;
        for (int64_t i = 0; i < x.shape[1]; i++) {
            const float a = fabsf((float)from[i]);
            most = a > most || isnan(a) ? a : most;
            if (isnan(a)) break;
        }
        const float row_step = e4m3_row_step(most);
        for (int64_t i = 0; i < x.shape[1]; i++)
            to[i] = step[e] > 0 ? (real)e4m3_row_value((float)from[i], row_step) : from[i];
    }
    return y;
}

/* y[m] = W_e x[m] + bias_e + scale B_e xa[m].  y [M,out], x [M,in], xa [M,R] */
static void experts_fwd(struct device *dev, struct tensor y, struct tensor buffers, struct tensor x, struct tensor xa,
                        const struct route *r, const struct proj *proj, const struct weight *w)
{
    const struct lora *lora = &proj->lora;
    const struct tensor bias = proj->bias;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t e = 0; e < w->n_exp; e++) {
        for (int64_t col = 0; col < w->n_out; col += TILE) {
            int64_t first = I32(r->offs)[e], n = I32(r->offs)[e + 1] - first, n_col = MT_MIN(TILE, w->n_out - col);
            if (n == 0) continue;
            real *tile = real_row(buffers, omp_get_thread_num()), *out = real_row(y, first) + col;
            const float *b = bias.ndim ? (const float *)bias.data + e * bias.ld + col : NULL;
            for (int64_t m = 0; m < n; m++) {
                for (int64_t i = 0; i < n_col; i++) out[m * y.ld + i] = b ? b[i] : 0;
            }
            weight_tile(w, e, col, n_col, 0, w->n_in, tile, w->n_in);
            gemm_rows(dev, n, n_col, w->n_in, 1, real_row(x, first), x.ld, tile, w->n_in, 1, out, y.ld);
            if (lora_added(lora))
                gemm_rows(dev, n, n_col, lora->r, lora->scale[0], real_row(xa, first), xa.ld,
                          expert(lora->b, e) + col * lora->b.ld, lora->b.ld, 1, out, y.ld);
        }
    }
}

/* dx[m] = dy[m] W_e + scale dyb[m] A_e.  dx [M,in], dy [M,out], dyb [M,R] = dy B */
static void experts_bwd(struct device *dev, struct tensor dx, struct tensor buffers, struct tensor dy,
                        struct tensor dyb, const struct route *r, const struct weight *w, const struct lora *lora)
{
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t e = 0; e < w->n_exp; e++) {
        for (int64_t col = 0; col < w->n_in; col += TILE) {
            int64_t first = I32(r->offs)[e], n = I32(r->offs)[e + 1] - first, n_col = MT_MIN(TILE, w->n_in - col);
            if (n == 0) continue;
            real *tile = real_row(buffers, omp_get_thread_num()), *out = real_row(dx, first) + col;
            weight_tile(w, e, 0, w->n_out, col, n_col, tile, TILE);
            gemm_serial(false, false, n, n_col, w->n_out, 1, real_row(dy, first), dy.ld, tile, TILE, 0, out, dx.ld);
            if (lora_added(lora))
                gemm_serial(false, false, n, n_col, lora->r, lora->scale[0], real_row(dyb, first), dyb.ld,
                            expert(lora->a, e) + col, lora->a.ld, 1, out, dx.ld);
        }
    }
}

/* grad_e += scale p^T q over the rows of e, in their order.  grad [E,P,Q], p [M,P], q [M,Q] */
static void lora_grad_acc(struct device *dev, struct tensor grad, struct tensor p, struct tensor q, real scale,
                          const struct route *r)
{
#pragma omp parallel for collapse(3) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t e = 0; e < grad.shape[0]; e++) {
        for (int64_t i = 0; i < grad.shape[1]; i += TILE) {
            for (int64_t j = 0; j < grad.shape[2]; j += TILE) {
                int64_t first = I32(r->offs)[e], n = I32(r->offs)[e + 1] - first;
                if (n == 0) continue;
                gemm_serial(true, false, MT_MIN(TILE, grad.shape[1] - i), MT_MIN(TILE, grad.shape[2] - j), n, scale,
                            real_row(p, first) + i, p.ld, real_row(q, first) + j, q.ld, 1,
                            expert(grad, e) + i * grad.ld + j, grad.ld);
            }
        }
    }
}

void CPU(moe_up_fwd)(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa, struct tensor x,
                     const struct route *r, const struct proj *up, const struct glu *glu)
{
    const struct lora *lora = &up->lora;
    int64_t mark = arena_mark(&dev->work), n_row = act.shape[0];
    const struct weight w = proj_weight(dev, up, r->offs);
    struct tensor rows = arena_tensor_2d(&dev->work, DT_REAL, n_row, w.n_in), buffers = tile_buffers(dev, w.n_in);
    if (!dev->dry_run) gather(dev, rows, x, r);
    const struct tensor read = fp8_rows(dev, rows, up, r);
    if (!dev->dry_run) {
        if (lora->r > 0) lora_thin(dev, xa, rows, lora->a, false, r);
        experts_fwd(dev, pre, buffers, read, xa, r, up, &w);
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t m = 0; m < n_row; m++) glu_row_fwd(real_row(act, m), real_row(pre, m), act.shape[1], glu);
    }
    arena_release(&dev->work, mark);
}

/* h of one row as its quantiser reads it: an activation. */
static void act_row(const struct device *dev, real *h, const real *pre, int64_t n, const struct glu *glu)
{
    glu_row_fwd(h, pre, n, glu);
    for (int64_t i = 0; dev->round_bf16 && i < n; i++) h[i] = (real)bf16_to_f32(f32_to_bf16((float)h[i]));
}

void CPU(glu_quant_fwd)(struct device *dev, struct tensor act, struct tensor pre, const struct glu *glu,
                        const struct input_quant *in)
{
    const struct tensor rows = tensor_3d(act.data, act.dtype, 1, act.shape[0], act.shape[1]);
    if (dev->dry_run) return;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t m = 0; m < act.shape[0]; m++) act_row(dev, real_row(act, m), real_row(pre, m), act.shape[1], glu);
    CPU(fake_quant)(dev, rows, rows, in->amax, &in->format);
}

void CPU(moe_down_fwd)(struct device *dev, struct tensor y, struct tensor ha, struct tensor act, const struct route *r,
                       const struct proj *down)
{
    int64_t mark = arena_mark(&dev->work);
    const struct weight w = y.ndim ? proj_weight(dev, down, r->offs) : down->w;
    struct tensor buffers = tile_buffers(dev, w.n_in);
    const struct tensor read = y.ndim ? fp8_rows(dev, act, down, r) : act;
    if (!dev->dry_run) {
        if (down->lora.r > 0) lora_thin(dev, ha, act, down->lora.a, false, r);
        if (y.ndim) experts_fwd(dev, y, buffers, read, ha, r, down, &w);
    }
    arena_release(&dev->work, mark);
}

void CPU(gather)(struct device *dev, struct tensor y, struct tensor x, struct tensor rows, int64_t share)
{
    const int64_t bytes = x.shape[1] * dtype_size(x.dtype);
    if (dev->dry_run) return;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t i = 0; i < y.shape[0]; i++)
        memcpy((char *)y.data + i * bytes, (const char *)x.data + I32(rows)[i] / share * bytes, (size_t)bytes);
}

void CPU(moe_combine_fwd)(struct device *dev, struct tensor out, struct tensor res, struct tensor y,
                          const struct route *r)
{
    if (!dev->dry_run) sum_slots(dev, out, res, r->gate, y, r);
}

static real dot(const real *a, const real *b, int64_t n)
{
    real lane[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int64_t k = 0; k < LANES; k++) lane[k] += a[i + k] * b[i + k];
    }
    for (; i < n; i++) lane[0] += a[i] * b[i];
    for (int64_t k = 0; k < LANES; k++) sum += lane[k];
    return sum;
}

/* For down_row_bwd, which computes h, dgate and dpre of row m from g = dLoss/dh without the gate. Then it multiplies
 * the row of the adapter's thin operands by the gate, since dout does not contain it. */
struct down_rows {
    struct tensor dpre, dgate, act, pre, g, dy, dyb, ha_gated, ha, bias;
    struct tensor exact; /* [threads, F]: h before it is quantised, where it is */
    const struct input_quant *in;
};
static void down_row_bwd(const struct device *dev, const struct down_rows *a, const struct route *r,
                         const struct glu *glu, int64_t m)
{
    const bool quantised = a->in->format.bits;
    int64_t slot = I32(r->row_slot)[m], top_k = r->idx.shape[1], width = a->act.shape[1];
    real gate = real_row(r->gate, slot / top_k)[slot % top_k];
    real *h = real_row(a->act, m), *g = real_row(a->g, m);
    const real *pre = real_row(a->pre, m), *dy = real_row(a->dy, m);

    if (!quantised) glu_row_fwd(h, pre, width, glu);
    real dgate = dot(h, g, width);
    if (a->bias.ndim) {
        const float *b = (const float *)a->bias.data + I32(r->idx)[slot] * a->bias.ld;
        real sum = 0;
        for (int64_t i = 0; i < a->dy.shape[1]; i++) sum += b[i] * dy[i];
        dgate += sum;
    }
    real_row(a->dgate, slot / top_k)[slot % top_k] = dgate;

    if (quantised) {
        const float most = *(const float *)a->in->amax.data;
        real *exact = real_row(a->exact, omp_get_thread_num());
        act_row(dev, exact, pre, width, glu);
        for (int64_t i = 0; i < width; i++)
            if (!fakequant_passes((float)exact[i], most)) g[i] = 0;
    }
    glu_row_bwd(real_row(a->dpre, m), pre, g, gate, width, glu);
    for (int64_t i = 0; i < a->dyb.shape[1]; i++) {
        real_row(a->dyb, m)[i] *= gate;
        real_row(a->ha_gated, m)[i] = gate * real_row(a->ha, m)[i];
    }
}

void CPU(moe_down_bwd)(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act,
                       struct tensor dout, struct tensor pre, struct tensor ha, const struct route *r,
                       const struct proj *down, const struct glu *glu)
{
    const struct lora *lora = &down->lora;
    int64_t mark = arena_mark(&dev->work), n_row = dpre.shape[0];
    const struct weight w = proj_weight(dev, down, r->offs);
    struct tensor dy = arena_tensor_2d(&dev->work, DT_REAL, n_row, w.n_out);
    struct tensor g = arena_tensor_2d(&dev->work, DT_REAL, n_row, w.n_in);
    struct tensor dyb = arena_tensor_2d(&dev->work, DT_REAL, n_row, lora->r);
    struct tensor ha_gated = arena_tensor_2d(&dev->work, DT_REAL, n_row, lora->r);
    struct tensor exact = arena_tensor_2d(&dev->work, DT_REAL, down->in.format.bits ? dev->n_threads : 0, w.n_in);
    struct tensor buffers = tile_buffers(dev, w.n_out);
    if (!dev->dry_run) gather(dev, dy, dout, r);
    const struct tensor read = fp8_rows(dev, dy, down, r);
    if (!dev->dry_run) {
        struct down_rows rows = {dpre, dgate, act, pre, g, dy, dyb, ha_gated, ha, down->bias, exact, &down->in};
        if (lora->r > 0) lora_thin(dev, dyb, dy, lora->b, true, r);
        experts_bwd(dev, g, buffers, read, dyb, r, &w, lora);
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t m = 0; m < n_row; m++) down_row_bwd(dev, &rows, r, glu, m);
        if (lora->r > 0 && down->grad.a.ndim) {
            lora_grad_acc(dev, down->grad.a, dyb, act, lora->scale[0], r);
            lora_grad_acc(dev, down->grad.b, dy, ha_gated, lora->scale[0], r);
        }
    }
    arena_release(&dev->work, mark);
}

void CPU(moe_up_bwd)(struct device *dev, struct tensor dx, struct tensor dpre, struct tensor x, struct tensor xa,
                     const struct route *r, const struct proj *up)
{
    const struct lora *lora = &up->lora;
    int64_t mark = arena_mark(&dev->work), n_row = dpre.shape[0];
    const struct weight w = proj_weight(dev, up, r->offs);
    struct tensor rows = arena_tensor_2d(&dev->work, DT_REAL, n_row, w.n_in); /* of x, then of dx */
    struct tensor dyb = arena_tensor_2d(&dev->work, DT_REAL, n_row, lora->r);
    struct tensor buffers = tile_buffers(dev, w.n_out), none = {0};
    const struct tensor read = fp8_rows(dev, dpre, up, r);
    if (!dev->dry_run) {
        if (lora->r > 0) lora_thin(dev, dyb, dpre, lora->b, true, r);
        if (lora->r > 0 && up->grad.a.ndim) {
            gather(dev, rows, x, r);
            lora_grad_acc(dev, up->grad.a, dyb, rows, lora->scale[0], r);
            lora_grad_acc(dev, up->grad.b, dpre, xa, lora->scale[0], r);
        }
        experts_bwd(dev, rows, buffers, read, dyb, r, &w, lora);
        sum_slots(dev, dx, none, none, rows, r);
    }
    arena_release(&dev->work, mark);
}
