/* linear.c - a frozen dense projection with bias, residual and an adapter of up to three segments; adapters of several
 * sequences; DoRA; a block-diagonal product.
 *
 * gemm.c tiles the product with W. The adapter's products run over blocks of rows (ROWS). Its gradients, which sum over
 * all rows, run over blocks of columns (COLS): two threads never add to the same sum. */
#include "kernels/cpu/gemm.h"

#include <omp.h>

#include "kernels/format/quant.h"

enum { ROWS = 128, COLS = 64 };

static real *data_of(struct tensor x) { return x.data; }

/* dst = dropout(src) for rows t.. and columns col.. of x; dst and src point to the block and may be equal. */
static void drop(real *dst, int64_t ldd, const real *src, int64_t lds, int64_t t, int64_t n_row, int64_t col,
                 int64_t n_col, int64_t n_in, const struct lora *lora)
{
    real keep = 1 / (1 - (real)lora->dropout);
    for (int64_t i = 0; i < n_row; i++) {
        uint64_t counter = (uint64_t)((t + i) * n_in + col);
        for (int64_t j = 0; j < n_col; j++) {
            bool kept = rng_uniform(lora->dropout_key, counter + (uint64_t)j) >= (double)lora->dropout;
            dst[i * ldd + j] = kept ? src[i * lds + j] * keep : 0;
        }
    }
}

/* Scratch for one block of dropped x per thread; absent without dropout. */
static struct tensor drop_scratch(struct device *dev, const struct lora *lora, int64_t n_col)
{
    if (!lora->r || lora->dropout <= 0) return (struct tensor){0};
    return arena_tensor_3d(&dev->work, DT_REAL, dev->n_threads, ROWS, n_col);
}

/* Adds bias, residual and adapter of rows t .. t+n-1 to y, which is x W^T. */
static void add_rows(const struct device *dev, struct tensor y, struct tensor xa, struct tensor x, struct tensor bias,
                     struct tensor res, const struct lora *lora, int64_t t, int64_t n, real *dropped)
{
    for (int64_t i = t; i < t + n && (bias.ndim || res.ndim); i++) {
        real *yt = real_row(y, i);
        const real *rt = res.ndim ? real_row(res, i) : NULL;
        const float *b = bias.data;
        if (bias.ndim)
            for (int64_t c = 0; c < y.shape[1]; c++) yt[c] += (real)b[c];
        if (res.ndim)
            for (int64_t c = 0; c < y.shape[1]; c++) yt[c] += rt[c];
    }
    if (!lora->r) return;
    const real *in = real_row(x, t), *b = data_of(lora->b);
    int64_t n_in = x.shape[1], ldi = x.ld;
    if (dropped) {
        drop(dropped, n_in, in, ldi, t, n, 0, n_in, n_in, lora);
        in = dropped;
        ldi = n_in;
    }
    gemm_rows(dev, n, xa.shape[1], n_in, 1, in, ldi, data_of(lora->a), lora->a.ld, 0, real_row(xa, t), xa.ld);
    for (int s = 0; s < lora->n_seg && lora_added(lora); s++) {
        gemm_rows(dev, n, lora->seg_cols[s], lora->r, (real)lora->scale[s], real_row(xa, t) + s * lora->r, xa.ld, b,
                  lora->b.ld, 1, real_row(y, t) + lora->seg_first[s], y.ld);
        b += lora->seg_cols[s] * lora->b.ld;
    }
}

void CPU(linear_fwd)(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *proj,
                     struct tensor res)
{
    const struct lora *lora = &proj->lora;
    int64_t n_row = x.shape[0], mark = arena_mark(&dev->work);
    const struct weight w = proj_weight(dev, proj, (struct tensor){0});
    gemm_fwd(dev, y.data, y.ld, x.data, x.ld, n_row, &w);
    struct tensor dropped = drop_scratch(dev, lora, w.n_in);
    if (!dev->dry_run) {
#pragma omp parallel for num_threads(dev->n_threads)
        for (int64_t t = 0; t < n_row; t += ROWS) {
            real *buf = dropped.ndim ? real_row(dropped, omp_get_thread_num() * ROWS) : NULL;
            add_rows(dev, y, xa, x, proj->bias, res, lora, t, MT_MIN(ROWS, n_row - t), buf);
        }
    }
    arena_release(&dev->work, mark);
}

/* Adds the adapter l, of experts that of expert e, to row y. */
static void add_member(const struct device *dev, real *y, real *xa, const real *x, const struct lora *l, int64_t e)
{
    const struct tensor a = l->a, b = l->b;
    const int64_t n_in = a.shape[a.ndim - 1];
    const real *of_b = data_of(b) + e * b.shape[b.ndim - 2] * b.ld;
    gemm_rows(dev, 1, l->n_seg * l->r, n_in, 1, x, n_in, data_of(a) + e * a.shape[a.ndim - 2] * a.ld, a.ld, 0, xa,
              l->n_seg * l->r);
    for (int s = 0; s < l->n_seg; of_b += l->seg_cols[s++] * b.ld)
        gemm_rows(dev, 1, l->seg_cols[s], l->r, (real)l->scale[s], xa + s * l->r, l->r, of_b, b.ld, 1,
                  y + l->seg_first[s], l->seg_cols[s]);
}

void CPU(lora_rows)(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *proj,
                    const struct route *r, bool by_token)
{
    const struct lora_set *set = proj->rows.set;
    const int32_t *group = proj->rows.group.data, *slots = r ? r->row_slot.data : NULL, *idx = r ? r->idx.data : NULL;
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t m = 0; m < y.shape[0]; m++) {
        const int64_t slot = r ? slots[m] : m, t = r ? slot / r->idx.shape[1] : m;
        const struct lora *l = &set->of[group[t]];
        if (group[t] == set->n || !l->r) continue;
        add_member(dev, real_row(y, m), real_row(xa, m), real_row(x, by_token ? t : m), l, r ? idx[slot] : 0);
    }
}

/* Rows t .. t+n-1 of dxa = scale * dy B, and of dx += dropout(dxa A) where dx is needed. */
static void bwd_rows(struct tensor dx, struct tensor dxa, struct tensor dy, const struct lora *lora, int64_t t,
                     int64_t n, real *dropped)
{
    const real *b = data_of(lora->b);
    for (int s = 0; s < lora->n_seg; s++) {
        gemm_serial(false, false, n, lora->r, lora->seg_cols[s], (real)lora->scale[s],
                    real_row(dy, t) + lora->seg_first[s], dy.ld, b, lora->b.ld, 0, real_row(dxa, t) + s * lora->r,
                    dxa.ld);
        b += lora->seg_cols[s] * lora->b.ld;
    }
    if (!dx.ndim || !lora_added(lora)) return;
    int64_t n_in = dx.shape[1];
    real *out = dropped ? dropped : real_row(dx, t);
    int64_t ldo = dropped ? n_in : dx.ld;
    gemm_serial(false, false, n, n_in, dxa.shape[1], 1, real_row(dxa, t), dxa.ld, data_of(lora->a), lora->a.ld,
                dropped ? 0 : 1, out, ldo);
    if (!dropped) return;
    drop(out, n_in, out, n_in, t, n, 0, n_in, n_in, lora);
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < n_in; c++) real_row(dx, t + i)[c] += out[i * n_in + c];
}

/* Columns col .. of grad a += dxa^T dropout(x). */
static void grad_a(const struct lora_grad *grad, struct tensor dxa, struct tensor x, const struct lora *lora,
                   int64_t col, real *dropped)
{
    int64_t n_row = x.shape[0], n_col = MT_MIN(COLS, x.shape[1] - col), step = dropped ? ROWS : MT_MAX(n_row, 1);
    for (int64_t t = 0; t < n_row; t += step) {
        int64_t n = MT_MIN(step, n_row - t), ldi = x.ld;
        const real *in = real_row(x, t) + col;
        if (dropped) {
            drop(dropped, n_col, in, ldi, t, n, col, n_col, x.shape[1], lora);
            in = dropped;
            ldi = n_col;
        }
        gemm_serial(true, false, dxa.shape[1], n_col, n, 1, real_row(dxa, t), dxa.ld, in, ldi, 1,
                    data_of(grad->a) + col, grad->a.ld);
    }
}

/* Rows row .. of grad b += scale * dy^T xa, within the segment they belong to. */
static void grad_b(const struct lora_grad *grad, struct tensor dy, struct tensor xa, const struct lora *lora,
                   int64_t row)
{
    int64_t base = 0;
    for (int s = 0; s < lora->n_seg; base += lora->seg_cols[s++]) {
        int64_t first = MT_MAX(row, base), end = MT_MIN(row + COLS, base + lora->seg_cols[s]);
        if (first >= end) continue;
        gemm_serial(true, false, end - first, lora->r, dy.shape[0], (real)lora->scale[s],
                    data_of(dy) + lora->seg_first[s] + first - base, dy.ld, data_of(xa) + s * lora->r, xa.ld, 1,
                    real_row(grad->b, first), grad->b.ld);
    }
}

void CPU(linear_bwd)(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor xa,
                     const struct proj *proj)
{
    const struct lora *lora = &proj->lora;
    int64_t n_row = dy.shape[0], mark = arena_mark(&dev->work);
    const struct weight w = dx.ndim ? proj_weight(dev, proj, (struct tensor){0}) : proj->w;
    if (dx.ndim) gemm_bwd(dev, dx.data, dx.ld, dy.data, dy.ld, n_row, &w, false);
    arena_release(&dev->work, mark);
    if (!lora->r) return;
    struct tensor dxa = arena_tensor_2d(&dev->work, DT_REAL, n_row, lora->n_seg * lora->r);
    struct tensor dropped = drop_scratch(dev, lora, MT_MAX(w.n_in, COLS));
    if (!dev->dry_run && n_row) {
#pragma omp parallel num_threads(dev->n_threads)
        {
            real *buf = dropped.ndim ? real_row(dropped, omp_get_thread_num() * ROWS) : NULL;
#pragma omp for
            for (int64_t t = 0; t < n_row; t += ROWS) bwd_rows(dx, dxa, dy, lora, t, MT_MIN(ROWS, n_row - t), buf);
#pragma omp for nowait
            for (int64_t col = 0; col < w.n_in; col += COLS) grad_a(&proj->grad, dxa, x, lora, col, buf);
#pragma omp for
            for (int64_t row = 0; row < lora->b.shape[0]; row += COLS) grad_b(&proj->grad, dy, xa, lora, row);
        }
    }
    arena_release(&dev->work, mark);
}

/* ---- DoRA (struct dora) */

enum { NORM_COLS = 256 };

/* The segment of the adapter that row i of b belongs to; *base: its first row of b. */
static int segment_of(const struct lora *l, int64_t i, int64_t *base)
{
    int s = 0;
    for (*base = 0; i >= *base + l->seg_cols[s];) *base += l->seg_cols[s++];
    return s;
}

/* |w + scale b A|, a [r, n_in] and b [r] the masters. */
static double row_norm(const float *w, const real *a, const real *b, int64_t r, real scale, int64_t n_in)
{
    double sum = 0;
    for (int64_t first = 0; first < n_in; first += NORM_COLS) {
        const int64_t n = MT_MIN(NORM_COLS, n_in - first);
        real v[NORM_COLS] = {0};
        for (int64_t k = 0; k < r; k++)
            for (int64_t c = 0; c < n; c++) v[c] += b[k] * a[k * n_in + first + c];
        for (int64_t c = 0; c < n; c++) {
            const double x = (double)((real)w[first + c] + scale * v[c]);
            sum += x * x;
        }
    }
    return sqrt(sum);
}

void CPU(row_norm)(struct device *dev, struct tensor norm, const struct proj *proj)
{
    const struct lora *l = &proj->lora;
    const int64_t n_in = proj->w.n_in, mark = arena_mark(&dev->work);
    const struct tensor rows = arena_tensor_2d(&dev->work, DT_F32, dev->n_threads, n_in);
    if (!dev->dry_run) {
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t i = 0; i < norm.shape[0]; i++) {
            int64_t base;
            const int s = segment_of(l, i, &base);
            float *w = (float *)rows.data + omp_get_thread_num() * n_in;
            quant_decode(w, &proj->w, 0, (l->seg_first[s] + i - base) * n_in, n_in, 1);
            ((real *)norm.data)[i] =
                (real)row_norm(w, (const real *)l->master_a.data + s * l->r * n_in,
                               (const real *)l->master_b.data + i * l->r, l->r, (real)l->scale[s], n_in);
        }
    }
    arena_release(&dev->work, mark);
}

/* m / norm of row i of b; a row of zeros stays one. */
static real gain(const struct dora *d, int64_t i)
{
    const real norm = ((const real *)d->norm.data)[i];
    return norm > 0 ? ((const real *)d->m.data)[i] / norm : 0;
}

void CPU(dora_fwd)(struct device *dev, struct tensor y, const struct proj *proj, struct tensor res)
{
    const struct lora *l = &proj->lora;
    const float *bias = proj->bias.data;
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < y.shape[0]; t++) {
        real *row = real_row(y, t);
        int64_t at = 0;
        for (int s = 0; s < l->n_seg; at += l->seg_cols[s++])
            for (int64_t i = 0; i < l->seg_cols[s]; i++) row[l->seg_first[s] + i] *= gain(&proj->dora, at + i);
        for (int64_t c = 0; c < y.shape[1]; c++)
            row[c] += (bias ? (real)bias[c] : 0) + (res.ndim ? real_row(res, t)[c] : 0);
    }
}

void CPU(dora_bwd)(struct device *dev, struct tensor z, struct tensor dy, const struct proj *proj)
{
    const struct lora *l = &proj->lora;
    const struct dora *d = &proj->dora;
    real *grad = d->grad.data;
    if (dev->dry_run) return;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t c = 0; c < z.shape[1]; c++) {
        int64_t at = -1, base = 0; /* row of b */
        double sum = 0;
        for (int s = 0; s < l->n_seg; base += l->seg_cols[s++])
            if (c >= l->seg_first[s] && c < l->seg_first[s] + l->seg_cols[s]) at = base + c - l->seg_first[s];
        const real g = at < 0 ? 1 : gain(d, at);
        for (int64_t t = 0; t < z.shape[0]; t++) {
            sum += (double)real_row(z, t)[c] * (double)real_row(dy, t)[c];
            real_row(z, t)[c] = g * real_row(dy, t)[c];
        }
        const real norm = at < 0 ? 0 : ((const real *)d->norm.data)[at];
        if (norm > 0 && grad) grad[at] += (real)(sum / (double)norm);
    }
}

/* ---- a block-diagonal product: the columns of every group times its own frozen matrix ---- */

void CPU(group_linear_fwd)(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    for (int64_t g = 0; g < w->n_exp; g++) {
        const struct weight of_group = weight_matrix(w, g);
        gemm_fwd(dev, tensor_cols(y, g * w->n_out, w->n_out).data, y.ld, tensor_cols(x, g * w->n_in, w->n_in).data,
                 x.ld, x.shape[0], &of_group);
    }
}

void CPU(group_linear_bwd)(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w)
{
    for (int64_t g = 0; g < w->n_exp; g++) {
        const struct weight of_group = weight_matrix(w, g);
        gemm_bwd(dev, tensor_cols(dx, g * w->n_in, w->n_in).data, dx.ld, tensor_cols(dy, g * w->n_out, w->n_out).data,
                 dy.ld, dy.shape[0], &of_group, false);
    }
}
