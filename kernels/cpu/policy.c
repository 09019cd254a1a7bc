/* policy.c - the loss head of a policy: log-probabilities at a temperature and entropies of labelled tokens; the losses
 * of completions. One chunk of rows has logits at a time; their gradient overwrites them. */
#include "kernels/policy_value.h"

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/loss.h"

#define BLOCK 1024

/* What the gradient of a row of logits is computed from. */
struct logit_row {
    real *z;
    int64_t n, id;
    real max, inv_t, log_sum, entropy, cap;
};

/* sum p u for u = (z - max) / T, with log_sum = log sum exp(u). */
static real mean_logit(const struct logit_row *r)
{
    const real *z = r->z, max = r->max, inv_t = r->inv_t, log_sum = r->log_sum;
    double total = 0;
    for (int64_t first = 0; first < r->n; first += BLOCK) {
        const int64_t end = MT_MIN(r->n, first + BLOCK);
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < end; i++) {
            const real u = (z[i] - max) * inv_t, p = real_exp(u - log_sum);
            sum += p > 0 ? p * u : 0;
        }
        total += (double)sum;
    }
    return (real)total;
}

/* The logits become their gradient, ce * dnll/dz + h * dH/dz. */
static void write_gradient(const struct logit_row *r, real ce, real h)
{
    real *z = r->z;
    const real max = r->max, inv_t = r->inv_t, log_sum = r->log_sum, entropy = r->entropy, cap = r->cap;
    const real of_label = loss_slope(z[r->id], cap);
#pragma omp simd
    for (int64_t i = 0; i < r->n; i++) {
        const real lp = (z[i] - max) * inv_t - log_sum, p = real_exp(lp);
        z[i] = inv_t * p * (ce - (p > 0 ? h * (lp + entropy) : 0)) * loss_slope(z[i], cap);
    }
    z[r->id] -= inv_t * ce * of_label;
}

static void policy_row(struct logit_row *r, real *nll, real *entropy, int32_t *hit)
{
    MT_REQUIRE(r->id >= 0 && r->id < r->n, "label %lld of a vocabulary of %lld", (long long)r->id, (long long)r->n);
    r->max = loss_max(r->z, r->n);
    r->log_sum = loss_log_sum(r->z, r->n, r->max, r->inv_t);
    r->entropy = r->log_sum - mean_logit(r);
    *nll = r->log_sum + (r->max - r->z[r->id]) * r->inv_t;
    *entropy = r->entropy;
    *hit = loss_first(r->z, r->n, r->max) == r->id;
}

static void policy_rows(struct device *dev, struct tensor nll, struct tensor entropy, struct tensor hit,
                        struct tensor logits, struct tensor ids, struct tensor weight, real inv_t, real cap,
                        bool gradient, int64_t first, int64_t n)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = first + i;
        const real *w = weight.ndim ? real_row(weight, at) : NULL;
        struct logit_row r = {.z = real_row(logits, i),
                              .n = logits.shape[1],
                              .id = ((const int32_t *)ids.data)[at],
                              .inv_t = inv_t,
                              .cap = cap};
        policy_row(&r, (real *)nll.data + at, (real *)entropy.data + at, (int32_t *)hit.data + at);
        if (gradient) write_gradient(&r, w ? w[0] : 1, w ? w[1] : 0);
    }
}

void CPU(linear_policy)(struct device *dev, struct tensor nll, struct tensor entropy, struct tensor hit,
                        struct tensor dx, struct tensor x, const struct weight *w, float cap, struct tensor rows,
                        struct tensor ids, struct tensor weight, float temperature, int64_t chunk)
{
    const int64_t n_label = rows.shape[0], most = MT_MIN(chunk, n_label), mark = arena_mark(&dev->work);
    const struct tensor logits = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_out);
    const struct tensor part = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_in); /* rows of x, then of dx */
    const real one = 1, inv_t = one / (real)temperature;
    if (dx.ndim) loss_zero_rows(dev, dx);
    for (int64_t first = 0; first < loss_end(dev, n_label, chunk); first += chunk) {
        const int64_t n = MT_MIN(chunk, n_label - first);
        const int32_t *row = tensor_rows(rows, first, n).data;
        loss_move_rows(dev, part, x, row, n, false);
        gemm_fwd(dev, logits.data, w->n_out, part.data, w->n_in, n, w);
        loss_cap(dev, logits, n, cap);
        policy_rows(dev, nll, entropy, hit, logits, ids, weight, inv_t, (real)cap, dx.ndim, first, n);
        if (!dx.ndim) continue;
        gemm_bwd(dev, part.data, w->n_in, logits.data, w->n_out, n, w, false);
        loss_move_rows(dev, dx, part, row, n, true);
    }
    arena_release(&dev->work, mark);
}

/* ---- the losses of completions ---- */

static struct policy_token token(const struct policy_tokens *t, int64_t i)
{
    const double logp = -(double)((const real *)t->nll.data)[i];
    return (struct policy_token){.logp = logp,
                                 .old = t->old.ndim ? -(double)((const real *)t->old.data)[i] : logp,
                                 .reference = t->reference.ndim ? -(double)((const real *)t->reference.data)[i] : logp,
                                 .entropy = (double)((const real *)t->entropy.data)[i],
                                 .weight = t->weight.ndim ? (double)((const real *)t->weight.data)[i] : 1};
}

void CPU(policy)(struct device *dev, struct tensor part, struct tensor weight, const struct policy *p,
                 const struct policy_tokens *t, struct tensor values, const struct answers *a)
{
    if (dev->dry_run) return;
    const int32_t *cu = a->cu.data;
    real *w = weight.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < part.shape[0]; i++) {
        const double *value = (const double *)values.data + i * POLICY_VALUES;
        double *out = (double *)part.data + i * POLICY_PARTS;
        struct policy_row row = {
            .advantage = value[POLICY_ADVANTAGE], .scale = value[POLICY_SCALE], .weight = value[POLICY_WEIGHT]};
        for (int k = 0; k < POLICY_PARTS; k++) out[k] = 0;
        for (int64_t k = cu[i]; k < cu[i + 1]; k++) {
            const struct policy_token one = token(t, k);
            policy_row_add(&row, p, &one);
        }
        for (int64_t k = cu[i]; k < cu[i + 1]; k++) {
            const struct policy_token one = token(t, k);
            const struct policy_share s = policy_share(p, &row, &one);
            policy_part_add(out, p, &s, &one);
            w[2 * k] = (real)s.dnll;
            w[2 * k + 1] = (real)s.dentropy;
        }
        policy_part_end(out, p, &row);
    }
}

void CPU(importance)(struct device *dev, struct tensor part, struct tensor weight, struct tensor values,
                     const struct importance *p, struct tensor nll, struct tensor sampler, const struct answers *a)
{
    if (dev->dry_run) return;
    const int32_t *cu = a->cu.data;
    const real *old = nll.data, *by_sampler = sampler.data;
    real *w = weight.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < part.shape[0]; i++) {
        double *out = (double *)part.data + i * IMPORTANCE_PARTS, sum = 0;
        for (int k = 0; k < IMPORTANCE_PARTS; k++) out[k] = 0;
        for (int64_t k = cu[i]; k < cu[i + 1]; k++) {
            const double d = importance_add(out, (double)old[k], (double)by_sampler[k]);
            sum += d;
            if (p->by_row) continue;
            const double of_label = importance_weight(p, d);
            importance_add_weight(out, p, of_label);
            w[k] = (real)of_label;
        }
        const double of_row = p->by_row ? importance_weight(p, sum) : 1;
        ((double *)values.data)[i * POLICY_VALUES + POLICY_WEIGHT] = of_row;
        if (!p->by_row) continue;
        importance_add_weight(out, p, of_row);
        for (int64_t k = cu[i]; k < cu[i + 1]; k++) w[k] = (real)of_row;
    }
}

void CPU(policy_sum)(struct device *dev, struct tensor sums, struct tensor most, struct tensor part)
{
    if (dev->dry_run) return;
    const int64_t n_sum = sums.shape[0], n_most = most.shape[0];
    double *sum = sums.data, *largest = most.data;
    for (int64_t i = 0; i < part.shape[0]; i++) {
        const double *of = (const double *)part.data + i * (n_sum + n_most);
        for (int64_t k = 0; k < n_sum; k++) sum[k] += of[k];
        for (int64_t k = 0; k < n_most; k++) largest[k] = fmax(largest[k], of[n_sum + k]);
    }
}

void CPU(scale_rows)(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight)
{
    if (dev->dry_run) return;
    const int32_t *row = rows.data;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < rows.shape[0]; i++)
        for (int64_t c = 0; c < dx.shape[1]; c++) real_row(dx, row[i])[c] *= *real_row(weight, i);
}
