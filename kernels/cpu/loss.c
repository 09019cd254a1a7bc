/* loss.c - fused linear cross-entropy; losses over whole answers. Only one chunk of labelled rows has logits at a time;
 * the softmax replaces them in place by their gradient. */
#include "kernels/cpu/loss.h"

#include "kernels/cpu/gemm.h"
#include "kernels/preference_value.h"

void loss_move_rows(struct device *dev, struct tensor dst, struct tensor src, const int32_t *rows, int64_t n,
                    bool scatter)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i++) {
        int64_t n_tok = scatter ? dst.shape[0] : src.shape[0];
        MT_REQUIRE(rows[i] >= 0 && rows[i] < n_tok, "row %d of %lld", rows[i], (long long)n_tok);
        const real *from = real_row(src, scatter ? i : rows[i]);
        real *to = real_row(dst, scatter ? rows[i] : i);
        for (int64_t c = 0; c < src.shape[1]; c++) to[c] = from[c];
    }
}

void loss_zero_rows(struct device *dev, struct tensor x)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++)
        for (int64_t c = 0; c < x.shape[1]; c++) real_row(x, t)[c] = 0;
}

void loss_cap(struct device *dev, struct tensor z, int64_t n, float cap)
{
    if (dev->dry_run || !(cap > 0)) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < z.shape[1]; c++)
            real_row(z, i)[c] = (real)cap * real_tanh(real_row(z, i)[c] / (real)cap);
}

real loss_max(const real *logits, int64_t n)
{
    real max = logits[0];
#pragma omp simd reduction(max : max)
    for (int64_t i = 1; i < n; i++) max = logits[i] > max ? logits[i] : max;
    return max;
}

int64_t loss_first(const real *logits, int64_t n, real value)
{
    int64_t first = 0;
    while (first < n && logits[first] != value) first++;
    return first;
}

real loss_log_sum(const real *v, int64_t n, real max, real inv_t)
{
    double total = 0;
    for (int64_t first = 0; first < n; first += 1024) {
        const int64_t end = MT_MIN(n, first + 1024);
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < end; i++) sum += real_exp((v[i] - max) * inv_t);
        total += (double)sum;
    }
    return (real)log(total);
}

/* logits become exp(logit - max); *total is their sum. Returns its log. Sums in blocks, in double: a vocabulary has up
 * to 2^18 tokens. */
static real softmax_row(real *logits, int64_t n, real max, double *total)
{
    *total = 0;
    for (int64_t first = 0; first < n; first += 1024) {
        int64_t end = MT_MIN(n, first + 1024);
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < end; i++) {
            logits[i] = real_exp(logits[i] - max);
            sum += logits[i];
        }
        *total += (double)sum;
    }
    return (real)log(*total);
}

/* scale * (softmax - onehot) for capped logits, times the slope of the cap. Computes the exponentials again. */
static void capped_gradient(real *logits, int64_t n, int64_t id, real scale, real cap, real max, real log_sum)
{
    for (int64_t i = 0; i < n; i++) {
        const real p = real_exp((logits[i] - max) - log_sum);
        logits[i] = scale * (i == id ? p - 1 : p) * loss_slope(logits[i], cap);
    }
}

/* nll and hit of one row; its logits become scale * (softmax - onehot), times the slope of their cap. */
static void loss_row(real *logits, int64_t n, int64_t id, real scale, real cap, real *nll, int32_t *hit)
{
    MT_REQUIRE(id >= 0 && id < n, "label %lld of a vocabulary of %lld", (long long)id, (long long)n);
    const real max = loss_max(logits, n), own = logits[id];
    *hit = loss_first(logits, n, max) == id;
    if (cap > 0) {
        const real log_sum = loss_log_sum(logits, n, max, 1);
        *nll = log_sum + (max - own);
        capped_gradient(logits, n, id, scale, cap, max, log_sum);
        return;
    }
    double sum;
    *nll = softmax_row(logits, n, max, &sum) + (max - own); /* max - label's logit first: both may be large */
    real factor = (real)((double)scale / sum);
    for (int64_t i = 0; i < n; i++) logits[i] *= factor;
    logits[id] -= scale;
}

static void loss_rows(struct device *dev, real *nll, int32_t *hit, struct tensor logits, const int32_t *ids, int64_t n,
                      real scale, real cap)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i++)
        loss_row(real_row(logits, i), logits.shape[1], ids[i], scale, cap, &nll[i], &hit[i]);
}

void CPU(linear_ce)(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x,
                    const struct weight *w, float cap, struct tensor rows, struct tensor ids, float scale,
                    int64_t chunk)
{
    int64_t n_label = rows.shape[0], most = MT_MIN(chunk, n_label);
    int64_t mark = arena_mark(&dev->work);
    struct tensor logits = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_out);
    struct tensor part = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_in); /* rows of x, then of dx */
    if (dx.ndim) loss_zero_rows(dev, dx);
    for (int64_t first = 0; first < loss_end(dev, n_label, chunk); first += chunk) {
        int64_t n = MT_MIN(chunk, n_label - first);
        const int32_t *row = tensor_rows(rows, first, n).data;
        loss_move_rows(dev, part, x, row, n, false);
        gemm_fwd(dev, logits.data, w->n_out, part.data, w->n_in, n, w);
        loss_cap(dev, logits, n, cap);
        loss_rows(dev, tensor_rows(nll, first, n).data, tensor_rows(hit, first, n).data, logits,
                  tensor_rows(ids, first, n).data, n, (real)scale, (real)cap);
        if (!dx.ndim) continue;
        gemm_bwd(dev, part.data, w->n_in, logits.data, w->n_out, n, w, false);
        loss_move_rows(dev, dx, part, row, n, true);
    }
    arena_release(&dev->work, mark);
}

/* ---- whole answers ---- */

void CPU(answer_sums)(struct device *dev, struct tensor logps, struct tensor nll, const struct answers *a)
{
    if (dev->dry_run) return;
    const int32_t *cu = a->cu.data, *first = a->first.data;
    const real *x = nll.data;
    double *out = logps.data;
    for (int64_t i = 0; i < logps.shape[0]; i++) {
        double prompt = 0, completion = 0;
        for (int64_t k = cu[i]; k < first[i]; k++) prompt -= (double)x[k];
        for (int64_t k = first[i]; k < cu[i + 1]; k++) completion -= (double)x[k];
        out[2 * i] = completion;
        out[2 * i + 1] = prompt + completion;
    }
}

/* Answer i. */
static struct preference_answer answer(struct tensor logps, struct tensor reference, const struct answers *a, int64_t i)
{
    const int32_t *cu = a->cu.data, *first = a->first.data;
    const double *logp = logps.data, *of_reference = reference.data;
    return (struct preference_answer){.logp = logp[2 * i],
                                      .all = logp[2 * i + 1],
                                      .reference = reference.ndim ? of_reference[2 * i] : 0,
                                      .n = cu[i + 1] - first[i],
                                      .n_all = cu[i + 1] - cu[i]};
}

void CPU(preference)(struct device *dev, struct tensor sums, struct tensor weight, const struct preference *p,
                     struct tensor logps, struct tensor reference, struct tensor good, const struct answers *a)
{
    if (dev->dry_run) return;
    const int64_t per_unit = good.ndim ? 1 : 2;
    for (int64_t i = 0; i < logps.shape[0]; i += per_unit) {
        struct preference_answer of[2];
        for (int64_t k = 0; k < per_unit; k++) of[k] = answer(logps, reference, a, i + k);
        const struct preference_unit u =
            good.ndim ? preference_row(p, of, ((const int32_t *)good.data)[i]) : preference_pair(p, of);
        for (int64_t k = 0; k < 2 * per_unit; k++) ((real *)weight.data)[2 * i + k] = (real)u.weight[k / 2][k % 2];
        for (int k = 0; k < PREFERENCE_SUMS; k++) ((double *)sums.data)[k] += u.sum[k];
    }
}

void CPU(scale_labels)(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight,
                       const struct answers *a)
{
    if (dev->dry_run) return;
    const int32_t *cu = a->cu.data, *first = a->first.data, *row = rows.data;
    const real *w = weight.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < weight.shape[0]; i++)
        for (int64_t k = cu[i]; k < cu[i + 1]; k++)
            for (int64_t c = 0; c < dx.shape[1]; c++) real_row(dx, row[k])[c] *= w[2 * i + (k < first[i])];
}
