/* policy.cu - the loss head of a policy: log-probabilities at a temperature and entropies of labelled tokens, in
 * chunks; the losses of completions; the head's gradient, with the weights that follow from these losses.
 * Math:     ops.h, kernels/policy_value.h. u = (z - max) / T, S = sum e^u, H = log S - sum e^u u / S; dlogits =
 *           (p (a - b (log p + H)) - a onehot) / T for the weights a, b of a label.
 * Shapes:   as linear_ce. Scratch: logits [chunk, V] f32, dlogits in bf16 from the start of the same rows; x and then
 *           dx of the chunk [chunk, D] bf16. part [completions, 12] f64; nll, entropy, old, reference, weight [N] f32.
 * Needs:    as linear_ce. A label outside the vocabulary gives a NaN loss.
 * Grid:     head_kernel: 512 threads per row, a pass for maximum, arg max and sums, one for the gradient.
 *           policy_kernel, importance_kernel: a block per completion, two passes over its tokens. policy_sum: one
 *           block.
 * Bound:    head_kernel: memory, 4 N V bytes read for the loss, 4 N V read and 2 N V written for the gradient.
 * Numerics: f32 logits and sums of a row in a fixed order; everything after that in f64. dlogits rounded to bf16. */
#include "kernels/cuda/parts/loss.cuh"
#include "kernels/policy_value.h"

/* ---- the head ---- */

/* Of some logits: maximum, its first index, sums of e^u and of e^u u for u = (z - max) / T. */
struct sums {
    float max, one, mean;
    int id;
};

/* The sums relative to a new maximum; down = (max - new max) / T <= 0. */
static __device__ __forceinline__ struct sums lower(struct sums s, float down)
{
    const float e = exp2f(down * LOG2_E);
    s.mean = e > 0 ? e * (s.mean + s.one * down) : 0;
    s.one *= e;
    return s;
}

static __device__ __forceinline__ struct sums merge(struct sums a, struct sums b, float inv_t)
{
    struct sums c;
    c.max = fmaxf(a.max, b.max);
    c.id = a.max > b.max ? a.id : b.max > a.max ? b.id : min(a.id, b.id);
    a = lower(a, (a.max - c.max) * inv_t);
    b = lower(b, (b.max - c.max) * inv_t);
    c.one = a.one + b.one;
    c.mean = a.mean + b.mean;
    return c;
}

static __device__ __forceinline__ struct sums sum_row(const float *row, int n, float inv_t)
{
    struct sums all = {-FLT_MAX, 0, 0, INT32_MAX}; /* finite: exp(-inf - max) is 0 from the start */
    for (int g = threadIdx.x; g < (n + VECTOR - 1) / VECTOR; g += THREADS) {
        float v[VECTOR], max = all.max;
        load_group(v, row, g, n);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            if (v[j] > max) all.id = g * VECTOR + j;
            max = fmaxf(max, v[j]);
        }
        all = lower(all, (all.max - max) * inv_t);
        all.max = max;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const float u = (v[j] - max) * inv_t, e = exp2f(u * LOG2_E);
            all.one += e;
            if (e > 0) all.mean += e * u;
        }
    }
    return merge_block(all, [&](struct sums a, struct sums b) { return merge(a, b, inv_t); });
}

/* In place, as in loss.cu: a step reads its groups, all threads wait, and it writes. a, b: weights of the label. */
static __device__ __forceinline__ void write_gradient(float *row, int n, int id, float max, float log_sum,
                                                      float entropy, float inv_t, float inv_cap, float a, float b)
{
    const int n_group = (n + VECTOR - 1) / VECTOR;
    uint4 *out = (uint4 *)row;
    for (int first = 0; first < n_group; first += THREADS) {
        const int g = first + threadIdx.x;
        uint4 words;
        if (g < n_group) {
            float v[VECTOR];
            load_group(v, row, g, n);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const float lp = (v[j] - max) * inv_t - log_sum, p = exp2f(lp * LOG2_E);
                const float slope = cap_slope(v[j], inv_cap);
                v[j] = inv_t * p * (a - (p > 0 ? b * (lp + entropy) : 0));
                if (g * VECTOR + j == id) v[j] -= inv_t * a;
                v[j] *= slope;
            }
            words = bf16_pack8(v);
        }
        __syncthreads();
        if (g < n_group) out[g] = words;
    }
}

/* weight [2] of each row, ld_weight apart; NULL: 1 and 0 */
static __global__ void __launch_bounds__(THREADS)
    head_kernel(float *nll, float *entropy, int32_t *hit, float *logits, int64_t ld, int n, const int32_t *ids,
                const float *weight, int64_t ld_weight, float inv_t, float inv_cap, bool gradient)
{
    float *row = logits + blockIdx.x * ld;
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && id < n;
    const float own = known && threadIdx.x == 0 ? row[id] : NAN;
    const struct sums all = sum_row(row, n, inv_t);
    const float log_sum = logf(all.one), h = log_sum - all.mean / all.one;
    if (threadIdx.x == 0) {
        nll[blockIdx.x] = log_sum + (all.max - own) * inv_t;
        entropy[blockIdx.x] = h;
        hit[blockIdx.x] = known && all.id == id;
    }
    const float a = weight ? weight[blockIdx.x * ld_weight] : 1, b = weight ? weight[blockIdx.x * ld_weight + 1] : 0;
    if (gradient) write_gradient(row, n, id, all.max, log_sum, h, inv_t, inv_cap, a, b);
}

extern "C" void cuda_linear_policy(struct device *dev, struct tensor nll, struct tensor entropy, struct tensor hit,
                                   struct tensor dx, struct tensor x, const struct weight *w, float cap,
                                   struct tensor rows, struct tensor ids, struct tensor weight, float temperature,
                                   int64_t chunk)
{
    const struct scratch_head s = scratch_linear_topk(dev, w, rows, chunk);
    const int64_t n_label = rows.shape[0], n_vocab = w->n_out;
    want_rows(x);
    if (dx.ndim) want_rows(dx), zero_rows(dx);
    cuda_fill_matrices(s.dense, w);
    for (int64_t first = 0; first < n_label; first += chunk) {
        const int64_t n = MT_MIN(chunk, n_label - first);
        const struct tensor logits = tensor_rows(s.logits, 0, n), part = tensor_rows(s.part, 0, n);
        int32_t *row = i32_ptr(rows) + first;
        move_rows(part, NULL, x, row, n);
        cuda_gemm(tensor_cols(logits, 0, n_vocab), part, false, s.dense, true, 1, 0);
        cap_logits(tensor_cols(logits, 0, n_vocab), cap);
        head_kernel<<<grid_x(n), THREADS, 0, cuda.stream>>>(
            f32_ptr(nll) + first, f32_ptr(entropy) + first, i32_ptr(hit) + first, f32_ptr(logits), logits.ld,
            (int)n_vocab, i32_ptr(ids) + first, weight.ndim ? f32_ptr(weight) + first * weight.ld : NULL, weight.ld,
            1 / temperature, inverse_cap(cap), dx.ndim > 0);
        CUDA_CHECK_LAUNCH();
        if (!dx.ndim) continue;
        struct tensor dlogits = tensor_2d(logits.data, DT_BF16, n, n_vocab); /* in the first half of every row */
        dlogits.ld = 2 * logits.ld;
        cuda_gemm(part, dlogits, false, s.dense, false, 1, 0);
        move_rows(dx, row, part, NULL, n);
    }
}

/* ---- the losses of completions ---- */

enum { ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32 };

struct token_view {
    const float *nll, *entropy, *old, *reference, *weight;
};

static __device__ __forceinline__ struct policy_token token(const struct token_view &t, int64_t i)
{
    const double logp = -(double)t.nll[i];
    return {logp, t.old ? -(double)t.old[i] : logp, t.reference ? -(double)t.reference[i] : logp, (double)t.entropy[i],
            t.weight ? (double)t.weight[i] : 1};
}

/* Sum, or maximum, over the block in a fixed order; every thread gets it. */
static __device__ double block_of(double v, bool most)
{
    __shared__ double part[ROW_WARPS];
    for (int step = 16; step; step /= 2) {
        const double other = other_lane(v, step);
        v = most ? fmax(v, other) : v + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < ROW_WARPS; i++) v = most ? fmax(v, part[i]) : v + part[i];
    return v;
}

static __global__ void __launch_bounds__(ROW_THREADS)
    policy_kernel(double *parts, float *weight, const struct policy p, const struct token_view t, const double *values,
                  const int32_t *cu)
{
    const int64_t begin = cu[blockIdx.x], end = cu[blockIdx.x + 1];
    const double *value = values + (int64_t)blockIdx.x * POLICY_VALUES;
    struct policy_row row = {value[POLICY_ADVANTAGE], value[POLICY_SCALE], value[POLICY_WEIGHT], 0, 0, 0, 0};
    double part[POLICY_PARTS] = {0};
    for (int64_t k = begin + threadIdx.x; k < end; k += ROW_THREADS) {
        const struct policy_token one = token(t, k);
        policy_row_add(&row, &p, &one);
    }
    row.n = block_of(row.n, false);
    row.log_ratio = block_of(row.log_ratio, false);
    row.kept = block_of(row.kept, false);
    row.kl = block_of(row.kl, false);
    for (int64_t k = begin + threadIdx.x; k < end; k += ROW_THREADS) {
        const struct policy_token one = token(t, k);
        const struct policy_share s = policy_share(&p, &row, &one);
        policy_part_add(part, &p, &s, &one);
        weight[2 * k] = (float)s.dnll;
        weight[2 * k + 1] = (float)s.dentropy;
    }
#pragma unroll
    for (int i = 0; i < POLICY_PARTS; i++) part[i] = block_of(part[i], i >= POLICY_SUMS);
    if (threadIdx.x) return;
    policy_part_end(part, &p, &row);
#pragma unroll
    for (int i = 0; i < POLICY_PARTS; i++) parts[(int64_t)blockIdx.x * POLICY_PARTS + i] = part[i];
}

static __global__ void __launch_bounds__(ROW_THREADS)
    importance_kernel(double *parts, float *weight, double *values, const struct importance p, const float *nll,
                      const float *sampler, const int32_t *cu)
{
    const int64_t begin = cu[blockIdx.x], end = cu[blockIdx.x + 1];
    double part[IMPORTANCE_PARTS] = {0}, sum = 0;
    for (int64_t k = begin + threadIdx.x; k < end; k += ROW_THREADS) {
        const double d = importance_add(part, (double)nll[k], (double)sampler[k]);
        sum += d;
        if (p.by_row) continue;
        const double of_label = importance_weight(&p, d);
        importance_add_weight(part, &p, of_label);
        weight[k] = (float)of_label;
    }
    const double of_row = p.by_row ? importance_weight(&p, block_of(sum, false)) : 1;
    for (int64_t k = begin + threadIdx.x; p.by_row && k < end; k += ROW_THREADS) weight[k] = (float)of_row;
    if (p.by_row && threadIdx.x == 0) importance_add_weight(part, &p, of_row);
#pragma unroll
    for (int i = 0; i < IMPORTANCE_PARTS; i++) part[i] = block_of(part[i], i >= IMPORTANCE_SUMS);
    if (threadIdx.x) return;
    values[(int64_t)blockIdx.x * POLICY_VALUES + POLICY_WEIGHT] = of_row;
#pragma unroll
    for (int i = 0; i < IMPORTANCE_PARTS; i++) parts[(int64_t)blockIdx.x * IMPORTANCE_PARTS + i] = part[i];
}

static __global__ void policy_sum(double *sums, double *most, int n_sum, const double *parts, int64_t n)
{
    const int i = threadIdx.x;
    double v = i < n_sum ? sums[i] : most[i - n_sum];
    for (int64_t k = 0; k < n; k++) {
        const double x = parts[k * blockDim.x + i];
        v = i < n_sum ? v + x : fmax(v, x);
    }
    if (i < n_sum)
        sums[i] = v;
    else
        most[i - n_sum] = v;
}

static __global__ void __launch_bounds__(ROW_THREADS)
    scale_rows(row_view<> dx, int64_t n_col, const int32_t *rows, const float *weight, int64_t ld_weight)
{
    const float w = weight[blockIdx.x * ld_weight];
    bf16 *row = dx.at(rows[blockIdx.x]);
    for (int64_t c = threadIdx.x; c < n_col; c += ROW_THREADS)
        row[c] = __float2bfloat16_rn(w * __bfloat162float(row[c]));
}

static const float *data_of(struct tensor x) { return x.ndim ? f32_ptr(x) : NULL; }

extern "C" void cuda_policy(struct device *dev, struct tensor part, struct tensor weight, const struct policy *p,
                            const struct policy_tokens *t, struct tensor values, const struct answers *a)
{
    const struct token_view view = {data_of(t->nll), data_of(t->entropy), data_of(t->old), data_of(t->reference),
                                    data_of(t->weight)};
    if (part.shape[0] == 0) return;
    policy_kernel<<<grid_x(part.shape[0]), ROW_THREADS, 0, cuda.stream>>>(
        (double *)part.data, f32_ptr(weight), *p, view, (const double *)values.data, i32_ptr(a->cu));
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_importance(struct device *dev, struct tensor part, struct tensor weight, struct tensor values,
                                const struct importance *p, struct tensor nll, struct tensor sampler,
                                const struct answers *a)
{
    if (part.shape[0] == 0) return;
    importance_kernel<<<grid_x(part.shape[0]), ROW_THREADS, 0, cuda.stream>>>((double *)part.data, f32_ptr(weight),
                                                                              (double *)values.data, *p, f32_ptr(nll),
                                                                              f32_ptr(sampler), i32_ptr(a->cu));
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_policy_sum(struct device *dev, struct tensor sums, struct tensor most, struct tensor part)
{
    if (part.shape[0] == 0) return;
    policy_sum<<<1, (unsigned)part.shape[1], 0, cuda.stream>>>(
        (double *)sums.data, (double *)most.data, (int)sums.shape[0], (const double *)part.data, part.shape[0]);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_scale_rows(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight)
{
    if (rows.shape[0] == 0) return;
    scale_rows<<<grid_x(rows.shape[0]), ROW_THREADS, 0, cuda.stream>>>(rows_of(dx), dx.shape[1], i32_ptr(rows),
                                                                       f32_ptr(weight), weight.ld);
    CUDA_CHECK_LAUNCH();
}
