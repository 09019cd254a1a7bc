/* optim.c - the adapters' flat arrays: norm, AdamW, copy into the working precision; sums of a step. All loops run over
 * blocks of fixed size, so results do not depend on the number of threads. */
#include "kernels/adamw8_code.h"
#include "kernels/cpu/real.h"

#include <string.h>

enum { BLOCK = 16384, LANES = 8 };

/* Sum of squares, with eight partial sums that the compiler can vectorise; counts values that are not finite. */
static double block_sumsq(const real *g, int64_t n, int64_t *n_bad)
{
    double lane[LANES] = {0}, sum = 0;
    int64_t i = 0, bad = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int64_t k = 0; k < LANES; k++) lane[k] += (double)g[i + k] * (double)g[i + k];
    }
    for (; i < n; i++) lane[0] += (double)g[i] * (double)g[i];
    for (i = 0; i < n; i++) bad += !isfinite(g[i]);
    for (int64_t k = 0; k < LANES; k++) sum += lane[k];
    *n_bad = bad;
    return sum;
}

void CPU(sumsq)(struct device *dev, struct tensor out, struct tensor g)
{
    int64_t mark = arena_mark(&dev->work), n = tensor_count(g), n_block = (n + BLOCK - 1) / BLOCK;
    struct tensor sums = arena_tensor_1d(&dev->work, DT_F64, n_block);
    struct tensor bad = arena_tensor_1d(&dev->work, DT_I64, n_block);
    if (!dev->dry_run) {
        double *sum = sums.data, *result = out.data;
        int64_t *n_bad = bad.data;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
        for (int64_t b = 0; b < n_block; b++) {
            int64_t first = b * BLOCK;
            sum[b] = block_sumsq((const real *)g.data + first, MT_MIN(BLOCK, n - first), &n_bad[b]);
        }
        result[0] = result[1] = 0;
        for (int64_t b = 0; b < n_block; b++) {
            result[0] += sum[b];
            result[1] += (double)n_bad[b];
        }
    }
    arena_release(&dev->work, mark);
}

void CPU(clear)(struct device *dev, struct tensor x)
{
    for (int64_t i = 0; i < x.shape[0] && !dev->dry_run; i++)
        memset(real_row(x, i), 0, (size_t)x.shape[1] * sizeof(real));
}

void CPU(add_in_order)(struct device *dev, struct tensor y, struct tensor x)
{
    const int64_t n = y.shape[0], n_row = x.shape[0];
    const bool is_f64 = y.dtype == DT_F64;
    if (dev->dry_run) return;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i++)
        for (int64_t p = 0; p < n_row; p++)
            if (is_f64)
                ((double *)y.data)[i] += ((const double *)x.data)[p * n + i];
            else
                ((real *)y.data)[i] += ((const real *)x.data)[p * n + i];
}

static void adamw_block(real *p, real *m, real *v, const real *grad, int64_t n, const struct adamw_step *s)
{
    real b1 = s->beta1, b2 = s->beta2, decay = 1 - (real)s->lr * s->weight_decay, scale = s->grad_scale;
    for (int64_t i = 0; i < n; i++) {
        real g = grad[i] * scale;
        m[i] = b1 * m[i] + (1 - b1) * g;
        v[i] = b2 * v[i] + (1 - b2) * g * g;
        p[i] = decay * p[i] - s->lr * (m[i] / s->correction1) / (real_sqrt(v[i] / s->correction2) + s->eps);
    }
}

void CPU(adamw)(struct device *dev, struct tensor p, struct tensor m, struct tensor v, struct tensor g,
                const struct adamw_step *step)
{
    if (dev->dry_run) return;
    int64_t n = tensor_count(p);
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i += BLOCK) {
        adamw_block((real *)p.data + i, (real *)m.data + i, (real *)v.data + i, (const real *)g.data + i,
                    MT_MIN(BLOCK, n - i), step);
    }
}

static void adamw8_block(real *p, uint8_t *const code[2], float *const scale[2], const float *map, const real *g,
                         int64_t n, const struct adamw_step *s)
{
    real state[2][ADAMW8_BLOCK];
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < n; i++) state[k][i] = (real)map[256 * k + code[k][i]] * (real)*scale[k];
    adamw_block(p, state[0], state[1], g, n, s);
    for (int k = 0; k < 2; k++) {
        float most = 0;
        for (int64_t i = 0; i < n; i++) most = fmaxf(most, fabsf((float)state[k][i]));
        *scale[k] = adamw8_scale(most);
        for (int64_t i = 0; i < n; i++) code[k][i] = (uint8_t)adamw8_code(map + 256 * k, (float)state[k][i], *scale[k]);
    }
}

void CPU(adamw8)(struct device *dev, struct tensor p, const struct adamw8_states *states, struct tensor g,
                 const struct adamw_step *step)
{
    const int64_t n = p.shape[0];
    if (dev->dry_run) return;
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i += ADAMW8_BLOCK) {
        uint8_t *const code[2] = {(uint8_t *)states->code[0].data + i, (uint8_t *)states->code[1].data + i};
        float *const scale[2] = {(float *)states->scale[0].data + i / ADAMW8_BLOCK,
                                 (float *)states->scale[1].data + i / ADAMW8_BLOCK};
        adamw8_block((real *)p.data + i, code, scale, states->map.data, (const real *)g.data + i,
                     MT_MIN(ADAMW8_BLOCK, n - i), step);
    }
}

void CPU(cast)(struct device *dev, struct tensor dst, struct tensor src)
{
    if (dev->dry_run) return;
    int64_t n = tensor_count(dst);
#pragma omp parallel for schedule(static) num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i += BLOCK) {
        memcpy((real *)dst.data + i, (const real *)src.data + i, (size_t)MT_MIN(BLOCK, n - i) * sizeof(real));
    }
}

/* ---- sums of a step: loss, hits, KL, auxiliary loss, rows and gates of every expert */

void CPU(loss_sum)(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit, struct tensor kl)
{
    if (dev->dry_run) return;
    double *sum = out.data;
    for (int64_t i = 0; i < nll.shape[0]; i++) {
        sum[0] += (double)((const real *)nll.data)[i];
        sum[1] += ((const int32_t *)hit.data)[i];
        if (kl.ndim) sum[2] += (double)((const real *)kl.data)[i];
    }
}

void CPU(aux_sum)(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    if (dev->dry_run) return;
    const real *count = aux->count.data, *prob = aux->prob.data;
    double sum = 0;
    for (int64_t i = 0; i < aux->count.shape[0]; i++) sum += (double)count[i] * (double)prob[i];
    *(double *)out.data += factor * sum;
}

void CPU(expert_sums)(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r)
{
    if (dev->dry_run) return;
    const int32_t *first = r->offs.data, *slot = r->row_slot.data;
    const real *gate = r->gate.data;
    for (int64_t e = 0; e < rows.shape[0]; e++) {
        double sum = 0;
        for (int64_t i = first[e]; i < first[e + 1]; i++) sum += (double)gate[slot[i]];
        ((double *)rows.data)[e] += first[e + 1] - first[e];
        ((double *)gates.data)[e] += sum;
    }
}
