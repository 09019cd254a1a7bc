/* proj.c - the matrices that products of a projection read: decoded, or fake-quantised with the adapter merged (struct
 * proj_quant). This arithmetic is f32 in both compilations (real.h), so that they decode and quantise the same values.
 *
 * A task is a band of rows of one expert. Blocks of the formats run along a row, so tasks are independent. */
#include <omp.h>
#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/format/quant.h"

enum { BAND = 16, COLS = 256 };

/* w[i] += scale * sum over r of b[r] a[r, i], the sum in ascending r.  a has rows of n_in, b is a row of B. */
static void merge_row(float *w, const real *a, int64_t lda, const real *b, int64_t r, float scale, int64_t n_in)
{
    for (int64_t first = 0; first < n_in; first += COLS) {
        float sum[COLS] = {0}, times[COLS];
        const int64_t n = MT_MIN(COLS, n_in - first);
        for (int64_t k = 0; k < r; k++) {
            const real *row = a + k * lda + first;
            const float bk = (float)b[k];
            for (int64_t i = 0; i < n; i++) sum[i] = fmaf(bk, (float)row[i], sum[i]);
        }
        for (int64_t i = 0; i < n; i++) times[i] = fl_mul(scale, sum[i]);
        for (int64_t i = 0; i < n; i++) w[first + i] = fl_add(w[first + i], times[i]);
    }
}

/* M_e, or W_e where nothing is merged: rows row .. row+n-1 of expert e.  m [n, in] */
static void merged_rows(float *m, const struct proj *p, int64_t e, int64_t row, int64_t n)
{
    const struct weight *w = &p->w;
    const struct lora *l = &p->lora;
    quant_decode(m, w, e, row * w->n_in, n * w->n_in, 1);
    if (!l->r || !l->merged) return;
    const real *a = (const real *)l->master_a.data + e * l->n_seg * l->r * w->n_in, *b = l->master_b.data;
    if (w->n_exp > 1) b += e * w->n_out * l->r;
    for (int s = 0; s < l->n_seg; b += l->seg_cols[s++] * l->r, a += l->r * w->n_in)
        for (int64_t i = MT_MAX(row, l->seg_first[s]); i < MT_MIN(row + n, l->seg_first[s] + l->seg_cols[s]); i++)
            merge_row(m + (i - row) * w->n_in, a, w->n_in, b + (i - l->seg_first[s]) * l->r, l->r, l->scale[s],
                      w->n_in);
}

static int part_of(const struct proj_quant *q, int64_t row)
{
    int i = 0;
    while (row >= q->part_rows[i]) row -= q->part_rows[i++];
    return i;
}

static void quantise_row(float *x, const struct proj_quant *q, float amax, int64_t n_in)
{
    const struct fakequant *f = &q->format;
    const int64_t block = f->block ? f->block : n_in;
    const float top = f->kind == FQ_NVFP4 ? fakequant_global(f, amax) : amax;
    for (int64_t i = 0; i < n_in; i += block) {
        float most = 0;
        for (int64_t j = 0; j < block && f->block; j++) most = fmaxf(most, fabsf(x[i + j]));
        const struct fakequant_scale s = fakequant_scale(f, top, most);
        for (int64_t j = i; j < i + block; j++) x[j] = fakequant_value(f, &s, fakequant_round(f, &s, x[j]));
    }
}

static void quantised_rows(float *y, const struct proj *p, int64_t e, int64_t row, int64_t n)
{
    const struct proj_quant *q = &p->quant;
    const float *amax = q->amax.data;
    merged_rows(y, p, e, row, n);
    for (int64_t i = 0; i < n; i++)
        quantise_row(y + i * p->w.n_in, q, amax ? amax[e * q->n_part + part_of(q, row + i)] : 0, p->w.n_in);
}

void CPU(decode)(struct device *dev, struct tensor y, const struct proj *proj, struct tensor offs)
{
    const struct weight *w = &proj->w;
    const int32_t *at = offs.data;
    if (dev->dry_run) return;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
    for (int64_t e = 0; e < w->n_exp; e++)
        for (int64_t row = 0; row < w->n_out; row += BAND) {
            const int64_t n = MT_MIN(BAND, w->n_out - row);
            float *out = (float *)y.data + (e * w->n_out + row) * w->n_in;
            if (at && at[e] == at[e + 1]) continue;
            if (proj->quant.format.bits)
                quantised_rows(out, proj, e, row, n);
            else
                quant_decode(out, w, e, row * w->n_in, n * w->n_in, 1);
        }
}

/* A NaN has larger bits than any number. */
static uint32_t largest_bits(const float *x, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) most = MT_MAX(most, float_bits(x[i]) & 0x7fffffffu);
    return most;
}

void CPU(proj_amax)(struct device *dev, struct tensor amax, const struct proj *proj)
{
    const struct weight *w = &proj->w;
    const struct proj_quant *q = &proj->quant;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor rows = arena_tensor_2d(&dev->work, DT_F32, dev->n_threads, BAND * w->n_in);
    struct tensor most = arena_tensor_2d(&dev->work, DT_I32, w->n_exp, w->n_out); /* of each row */
    if (!dev->dry_run) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
        for (int64_t e = 0; e < w->n_exp; e++)
            for (int64_t row = 0; row < w->n_out; row += BAND) {
                float *m = (float *)rows.data + omp_get_thread_num() * BAND * w->n_in;
                const int64_t n = MT_MIN(BAND, w->n_out - row);
                merged_rows(m, proj, e, row, n);
                for (int64_t i = 0; i < n; i++)
                    ((uint32_t *)most.data)[e * w->n_out + row + i] = largest_bits(m + i * w->n_in, w->n_in);
            }
        memset(amax.data, 0, (size_t)tensor_bytes(amax));
        for (int64_t e = 0; e < w->n_exp; e++)
            for (int64_t row = 0; row < w->n_out; row++) {
                uint32_t *out = (uint32_t *)amax.data + e * q->n_part + part_of(q, row);
                *out = MT_MAX(*out, ((const uint32_t *)most.data)[e * w->n_out + row]);
            }
    }
    arena_release(&dev->work, mark);
}

struct weight CPU(proj_weight)(struct device *dev, const struct proj *proj, struct tensor offs)
{
    const struct weight *w = &proj->w;
    if (!proj->quant.format.bits) return *w;
    const struct tensor y = arena_tensor_3d(&dev->work, DT_F32, w->n_exp, w->n_out, w->n_in);
    CPU(decode)(dev, y, proj, offs);
    return (struct weight){.format = WF_F32, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = y.data};
}
