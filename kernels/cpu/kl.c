/* kl.c - the loss head of a distillation, and the likeliest tokens that a teacher writes. Only one chunk of labelled
 * rows has logits at a time; the student's logits are replaced in place by their gradient. Sums over the vocabulary run
 * in blocks, and in double between them. Student and teacher go through the same arithmetic: equal logits give kl = 0
 * and no gradient, exactly. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/loss.h"

#define BLOCK 1024

struct student {
    real *z; /* [n] logits; after the row its gradient */
    int64_t n, id;
    real max, log1, log_t; /* log of sum exp(z - max), and of sum exp((z - max) / T) */
    real inv_t, own, cap;  /* own: logit of the label */
    real ce, kl;           /* factors of the gradients: scale * alpha, scale * (1 - alpha) * T */
    bool gradient;
};

static struct student student_open(real *z, int64_t n, int64_t id, const struct teacher *t, real scale, real cap,
                                   real *nll, int32_t *hit)
{
    MT_REQUIRE(id >= 0 && id < n, "label %lld of a vocabulary of %lld", (long long)id, (long long)n);
    struct student s = {.z = z, .n = n, .id = id, .max = loss_max(z, n), .own = z[id], .cap = cap};
    const real one = 1;
    s.inv_t = one / (real)t->temperature;
    s.ce = scale * (real)t->alpha;
    s.kl = scale * (one - (real)t->alpha) * (real)t->temperature;
    s.log1 = loss_log_sum(z, n, s.max, 1);
    s.log_t = t->temperature == 1.0f ? s.log1 : loss_log_sum(z, n, s.max, s.inv_t);
    *nll = s.log1 + (s.max - z[id]);
    *hit = loss_first(z, n, s.max) == id;
    return s;
}

/* a (log a - log b) - a + b, given d = log a - log b; never negative. Summed over two distributions it is the KL
 * divergence, as a and b have the same sum. Where a and b are close, an error of d enters in second order only. */
static inline real divergence_of(real a, real b, real d)
{
#ifdef MT_F64
    return d < -600 ? a * (d - 1) + b : a * (d + expm1(-d)); /* expm1 overflows from 710 on */
#else
    const float series =
        d * d * (0.5f - d * (1 / 6.0f - d * (1 / 24.0f - d * (1 / 120.0f - d * (1 / 720.0f - d / 5040)))));
    return fabsf(d) < 0.25f ? a * series : a * (d - 1) + b;
#endif
}

/* sum q (log q - log p); reverse: sum p (log p - log q). y [n]: the teacher's logits. */
static double divergence(const struct student *s, const real *y, real max_y, real log_y, bool reverse)
{
    const real *z = s->z, max = s->max, log_t = s->log_t, inv_t = s->inv_t;
    double total = 0;
    for (int64_t first = 0; first < s->n; first += BLOCK) {
        const int64_t end = MT_MIN(s->n, first + BLOCK);
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < end; i++) {
            const real lp = (z[i] - max) * inv_t - log_t, lq = (y[i] - max_y) * inv_t - log_y;
            const real p = real_exp(lp), q = real_exp(lq);
            sum += reverse ? divergence_of(p, q, lp - lq) : divergence_of(q, p, lq - lp);
        }
        total += (double)sum;
    }
    return total;
}

static void kl_row(struct student *s, const real *y, bool reverse, real *kl)
{
    const real max_y = loss_max(y, s->n), log_y = loss_log_sum(y, s->n, max_y, s->inv_t);
    const real max = s->max, log1 = s->log1, log_t = s->log_t, inv_t = s->inv_t, ce = s->ce, factor = s->kl;
    const double sum = divergence(s, y, max_y, log_y, reverse);
    const real mean = (real)sum;
    real *z = s->z;
    *kl = mean;
    if (!s->gradient) return;
#pragma omp simd
    for (int64_t i = 0; i < s->n; i++) {
        const real lp = (z[i] - max) * inv_t - log_t, lq = (y[i] - max_y) * inv_t - log_y, p = real_exp(lp);
        const real g = reverse ? p * ((lp - lq) - mean) : p - real_exp(lq);
        z[i] = (ce * real_exp((z[i] - max) - log1) + factor * g) * loss_slope(z[i], s->cap);
    }
    z[s->id] -= ce * loss_slope(s->own, s->cap);
}

/* q (log q - log p) - q + p, as divergence_of; p where q is 0 in double. */
static double bucket_divergence(double lq, double lp)
{
    const double q = exp(lq), d = lq - lp;
    if (d < -600) return (q > 0 ? q * (d - 1) : 0) + exp(lp); /* expm1 overflows from 710 on */
    return q * (d + expm1(-d));
}

/* The teacher's distribution: ids[k] with log-probability lq[k], and one bucket with the rest. Moves the logits of the
 * ids to own [n_top] and replaces them by -inf, so that the row has only the bucket. */
static void topk_row(struct student *s, const int32_t *ids, const real *lq, real *own, int64_t n_top, real *kl)
{
    const real max = s->max, log1 = s->log1, log_t = s->log_t, inv_t = s->inv_t, ce = s->ce, factor = s->kl;
    real *z = s->z;
    double known = 0, sum = 0;
    while (n_top && ids[n_top - 1] < 0) n_top--;
    for (int64_t k = 0; k < n_top; k++) {
        MT_REQUIRE(ids[k] >= 0 && ids[k] < s->n, "id %d of a vocabulary of %lld", ids[k], (long long)s->n);
        own[k] = z[ids[k]];
        z[ids[k]] = -INFINITY;
        known += exp((double)lq[k]);
        sum += bucket_divergence((double)lq[k], (double)((own[k] - max) * inv_t - log_t));
    }
    const real max_rest = loss_max(z, s->n);
    const bool rest = n_top < s->n && max_rest > -INFINITY; /* there are other ids */
    const real log_rest = rest ? loss_log_sum(z, s->n, max_rest, inv_t) : 0;
    const double left = rest ? fmax(0, 1 - known) : 0;
    const double p_rest = rest ? (double)((max_rest - max) * inv_t + (log_rest - log_t)) : 0; /* its log */
    if (left > 0) sum += bucket_divergence(log(left), p_rest);
    /* each bucket_divergence includes - q + p: adds the sum of q and subtracts the sum of p, which differ by
     * rounding */
    *kl = (real)(sum + (known + left) - (rest && !(left > 0) ? 1 - exp(p_rest) : 1));
    if (!s->gradient) return;
    const real mass = (real)(known + left), bucket = (real)left;
    if (rest)
#pragma omp simd
        for (int64_t i = 0; i < s->n; i++) {
            const real p = real_exp((z[i] - max) * inv_t - log_t),
                       share = real_exp((z[i] - max_rest) * inv_t - log_rest);
            z[i] =
                (ce * real_exp((z[i] - max) - log1) + factor * (p * mass - bucket * share)) * loss_slope(z[i], s->cap);
        }
    for (int64_t k = 0; k < n_top; k++) {
        const real p = real_exp((own[k] - max) * inv_t - log_t);
        z[ids[k]] =
            (ce * real_exp((own[k] - max) - log1) + factor * (p * mass - real_exp(lq[k]))) * loss_slope(own[k], s->cap);
    }
    z[s->id] -= ce * loss_slope(s->own, s->cap);
}

/* Losses and gradients of labels first .. first+n-1, whose logits are the n rows of `logits`. of_teacher: the teacher's
 * logits; for a teacher given by ids, scratch for the student's logits of these ids. */
static void kl_rows(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit, struct tensor logits,
                    struct tensor of_teacher, struct tensor ids, const struct teacher *t, real scale, real cap,
                    bool gradient, int64_t first, int64_t n)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = first + i;
        struct student s = student_open(real_row(logits, i), logits.shape[1], ((const int32_t *)ids.data)[at], t, scale,
                                        cap, (real *)nll.data + at, (int32_t *)hit.data + at);
        s.gradient = gradient;
        if (t->hidden.ndim)
            kl_row(&s, real_row(of_teacher, i), t->kind == KL_REVERSE, (real *)kl.data + at);
        else
            topk_row(&s, (const int32_t *)t->id.data + at * t->id.ld, real_row(t->logprob, at), real_row(of_teacher, i),
                     t->id.shape[1], (real *)kl.data + at);
    }
}

void CPU(linear_kl)(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit, struct tensor dx,
                    struct tensor x, const struct weight *w, float cap, struct tensor rows, struct tensor ids,
                    const struct teacher *t, float scale, int64_t chunk)
{
    const int64_t n_label = rows.shape[0], most = MT_MIN(chunk, n_label), mark = arena_mark(&dev->work);
    struct tensor logits = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_out);
    struct tensor of_teacher = arena_tensor_2d(&dev->work, DT_REAL, most, t->hidden.ndim ? w->n_out : t->id.shape[1]);
    struct tensor part = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_in); /* rows of x, then of dx */
    if (dx.ndim) loss_zero_rows(dev, dx);
    for (int64_t first = 0; first < loss_end(dev, n_label, chunk); first += chunk) {
        const int64_t n = MT_MIN(chunk, n_label - first);
        const int32_t *row = tensor_rows(rows, first, n).data;
        loss_move_rows(dev, part, x, row, n, false);
        gemm_fwd(dev, logits.data, w->n_out, part.data, w->n_in, n, w);
        loss_cap(dev, logits, n, cap);
        if (t->hidden.ndim) {
            gemm_fwd(dev, of_teacher.data, w->n_out, tensor_rows(t->hidden, first, n).data, t->hidden.ld, n, w);
            loss_cap(dev, of_teacher, n, cap);
        }
        kl_rows(dev, nll, kl, hit, logits, of_teacher, ids, t, (real)scale, (real)cap, dx.ndim, first, n);
        if (!dx.ndim) continue;
        gemm_bwd(dev, part.data, w->n_in, logits.data, w->n_out, n, w, false);
        loss_move_rows(dev, dx, part, row, n, true);
    }
    arena_release(&dev->work, mark);
}

/* ---- the likeliest tokens ---- */

/* The k-th largest of n values, with a heap whose root is the least of the k largest so far. */
static real kth_largest(const real *v, int64_t n, real *heap, int64_t k)
{
    int64_t size = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t at;
        if (size < k) {
            for (at = size++; at && heap[(at - 1) / 2] > v[i]; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
            heap[at] = v[i];
        } else if (v[i] > heap[0]) {
            for (at = 0; 2 * at + 1 < k;) {
                int64_t child = 2 * at + 1;
                if (child + 1 < k && heap[child + 1] < heap[child]) child++;
                if (heap[child] >= v[i]) break;
                heap[at] = heap[child];
                at = child;
            }
            heap[at] = v[i];
        }
    }
    return heap[0];
}

static void choose_row(const real *z, int64_t n, real inv_t, int32_t *id, real *logprob, int64_t k)
{
    const real max = loss_max(z, n), total = loss_log_sum(z, n, max, inv_t), least = kth_largest(z, n, logprob, k);
    int64_t equal = k, found = 0; /* how many of the values equal to `least` are chosen */
    for (int64_t i = 0; i < n; i++) equal -= z[i] > least;
    for (int64_t i = 0; i < n && found < k; i++) {
        if (!(z[i] > least) && !(z[i] == least && equal-- > 0)) continue;
        id[found] = (int32_t)i;
        logprob[found++] = (z[i] - max) * inv_t - total;
    }
    for (; found < k; found++) { /* logits that are not a number */
        id[found] = -1;
        logprob[found] = NAN;
    }
}

void CPU(linear_topk)(struct device *dev, struct tensor id, struct tensor logprob, struct tensor x,
                      const struct weight *w, float cap, struct tensor rows, float temperature, int64_t chunk)
{
    const int64_t n_label = rows.shape[0], most = MT_MIN(chunk, n_label), mark = arena_mark(&dev->work);
    struct tensor logits = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_out);
    struct tensor part = arena_tensor_2d(&dev->work, DT_REAL, most, w->n_in);
    const real one = 1, inv_t = one / (real)temperature;
    for (int64_t first = 0; first < loss_end(dev, n_label, chunk); first += chunk) {
        const int64_t n = MT_MIN(chunk, n_label - first);
        loss_move_rows(dev, part, x, tensor_rows(rows, first, n).data, n, false);
        gemm_fwd(dev, logits.data, w->n_out, part.data, w->n_in, n, w);
        loss_cap(dev, logits, n, cap);
        if (dev->dry_run) continue;
#pragma omp parallel for num_threads(dev->n_threads)
        for (int64_t i = 0; i < n; i++)
            choose_row(real_row(logits, i), w->n_out, inv_t, (int32_t *)id.data + (first + i) * id.ld,
                       real_row(logprob, first + i), id.shape[1]);
    }
    arena_release(&dev->work, mark);
}
