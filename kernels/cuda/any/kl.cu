/* kl.cu - loss head of a distillation over the labelled rows, a chunk of them at a time; the likeliest tokens of a row.
 *
 * Math:     ops.h. z, y logits of student and teacher, p = softmax(z/T), q = softmax(y/T). Forward KL: sum q (log q -
 *           log p), its gradient to z (p - q) / T. Reverse KL: sum p (log p - log q), gradient p (log p - log q - kl) /
 *           T. With a teacher given by K ids, and a bucket of all other tokens, of mass p_r and q_r: gradient (p - q) /
 *           T for the ids, (p - q_r p / p_r) / T for the others. A term is summed as q (d + e^-d - 1), d = log q - log
 *           p: the sum over a distribution is the same, and an error of d enters in second order.
 * Shapes:   as linear_ce. Scratch: logits [chunk, V] f32, once more for a teacher with hidden states, or [chunk, K]
 *           f32 for the logits of its ids; x and then dx of the chunk [chunk, D] bf16.
 * Needs:    as linear_ce; K <= V. An id outside the vocabulary gives a loss that is not a number.
 * Grid:     512 threads for a row or a pair of rows. kl_kernel: a pass over each row for maximum and sums, one over
 *           both for divergence and gradient, two where the reverse KL must be known before its gradient.
 *           bucket_kernel: moves the logits of the ids out of the row; a pass for maximum and sums of the rest, one for
 *           the gradient. choose_kernel: four passes of radix selection, 8 bits each, one that writes the chosen in the
 *           order of their ids.
 * Bound:    kl_kernel: 16*N*V read, for the gradient 2*N*V written, in reverse 8*N*V more read. bucket_kernel: 4*N*V
 *           read for the loss, 4*N*V read and 2*N*V written for the gradient. choose_kernel: 24*N*V read. The kernels
 *           are memory bound; the op is bound by its products, 6*N*V*D FLOP (4 without hidden states).
 * Numerics: f32 logits; f32 sums of a row in a fixed order, those over K ids in f64; dlogits rounded to bf16. Equal
 *           logits give kl = 0 and gradient 0 exactly. A NaN stays in its row. */
#include "kernels/cuda/parts/loss.cuh"

struct factors {
    float ce, kl, inv_t, inv_cap; /* scale * alpha, scale * (1 - alpha) * T, 1 / T, 1 / cap or 0 */
    bool reverse, gradient;
};

/* Of some logits: the largest, its first index, the sums of exp(logit - max) and exp((logit - max) / T). */
struct sums {
    float max, one, warm;
    int id;
};

static __device__ __forceinline__ struct sums no_sums(void)
{
    const struct sums none = {-FLT_MAX, 0, 0, INT32_MAX}; /* finite: exp(-inf - max) is 0 from the start */
    return none;
}

static __device__ __forceinline__ struct sums merge(struct sums a, struct sums b, float inv_t)
{
    struct sums c;
    c.max = fmaxf(a.max, b.max);
    const float da = (a.max - c.max) * LOG2_E, db = (b.max - c.max) * LOG2_E;
    c.one = a.one * exp2f(da) + b.one * exp2f(db);
    c.warm = a.warm * exp2f(da * inv_t) + b.warm * exp2f(db * inv_t);
    c.id = a.max > b.max ? a.id : b.max > a.max ? b.id : min(a.id, b.id);
    return c;
}

static __device__ struct sums sums_of_block(struct sums all, float inv_t)
{
    return merge_block(all, [&](struct sums a, struct sums b) { return merge(a, b, inv_t); });
}
template <typename T> static __device__ T add_block(T v)
{
    return merge_block(v, [](T a, T b) { return a + b; });
}

static __device__ __forceinline__ struct sums sum_row(const float *row, int n, float inv_t)
{
    struct sums all = no_sums();
    for (int g = threadIdx.x; g < (n + VECTOR - 1) / VECTOR; g += THREADS) {
        float v[VECTOR], max = all.max;
        load_group(v, row, g, n);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            if (v[j] > max) all.id = g * VECTOR + j;
            max = fmaxf(max, v[j]);
        }
        const float down = (all.max - max) * LOG2_E;
        all.one *= exp2f(down);
        all.warm *= exp2f(down * inv_t);
        all.max = max;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const float x = (v[j] - max) * LOG2_E;
            all.one += exp2f(x);
            all.warm += exp2f(x * inv_t);
        }
    }
    return sums_of_block(all, inv_t);
}

/* a (log a - log b) - a + b for d = log a - log b, never negative. */
static __device__ __forceinline__ float divergence_of(float a, float b, float d)
{
    const float series =
        d * d * (0.5f - d * (1 / 6.0f - d * (1 / 24.0f - d * (1 / 120.0f - d * (1 / 720.0f - d / 5040)))));
    return fabsf(d) < 0.25f ? a * series : a * (d - 1) + b;
}

/* q (d + e^-d - 1) of the bucket, from log q and log p; p where q is 0 in double. */
static __device__ __forceinline__ double bucket_divergence(double lq, double lp)
{
    const double q = exp(lq), d = lq - lp;
    if (d < -600) return (q > 0 ? q * (d - 1) : 0) + exp(lp); /* expm1 overflows from 710 on */
    return q * (d + expm1(-d));
}

/* The largest logit of a row, and the logs of its sums at temperature 1 and T: log p = (logit - max) / T - log_warm. */
struct scale_of {
    float max, log_one, log_warm;
};

static __device__ __forceinline__ struct scale_of scale_of(struct sums s)
{
    const struct scale_of out = {s.max, logf(s.one), logf(s.warm)};
    return out;
}

static __device__ __forceinline__ float log_prob(float v, const struct scale_of *s, float inv_t)
{
    return (v - s->max) * inv_t - s->log_warm;
}

/* A pass over both rows. measure: returns this thread's part of kl. write: the student's logits become their gradient
 * in bf16, in place as in loss.cu. kl: the row's KL, which the gradient of the reverse KL needs. */
static __device__ __forceinline__ float pass(float *z, const float *y, int n, int id, struct scale_of s,
                                             struct scale_of t, struct factors f, float kl, bool measure, bool write)
{
    const int n_group = (n + VECTOR - 1) / VECTOR;
    uint4 *out = (uint4 *)z;
    float sum = 0;
    for (int first = 0; first < n_group; first += THREADS) {
        const int g = first + threadIdx.x;
        uint4 words;
        if (g < n_group) {
            float a[VECTOR], b[VECTOR];
            load_group(a, z, g, n);
            load_group(b, y, g, n);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const bool in = g * VECTOR + j < n;
                const float lp = log_prob(a[j], &s, f.inv_t), lq = log_prob(b[j], &t, f.inv_t);
                const float p = exp2f(lp * LOG2_E), q = exp2f(lq * LOG2_E);
                if (measure && in) sum += f.reverse ? divergence_of(p, q, lp - lq) : divergence_of(q, p, lq - lp);
                if (!write) continue;
                const float grad = f.reverse ? p * ((lp - lq) - kl) : p - q, slope = cap_slope(a[j], f.inv_cap);
                a[j] = f.ce * exp2f(((a[j] - s.max) - s.log_one) * LOG2_E) + f.kl * grad;
                if (g * VECTOR + j == id) a[j] -= f.ce;
                a[j] *= slope;
            }
            if (write) words = bf16_pack8(a);
        }
        if (!write) continue;
        __syncthreads();
        if (g < n_group) out[g] = words;
    }
    return sum;
}

static __global__ void __launch_bounds__(THREADS)
    kl_kernel(float *nll, float *kl, int32_t *hit, float *logits, const float *of_teacher, int64_t ld, int n,
              const int32_t *ids, struct factors f)
{
    float *z = logits + blockIdx.x * ld;
    const float *y = of_teacher + blockIdx.x * ld;
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && id < n;
    const float own = known && threadIdx.x == 0 ? z[id] : NAN;
    const struct sums student = sum_row(z, n, f.inv_t), teacher = sum_row(y, n, f.inv_t);
    const struct scale_of s = scale_of(student), t = scale_of(teacher);
    const bool at_once = f.gradient && !f.reverse;
    float part = at_once ? pass(z, y, n, id, s, t, f, 0, true, true) : pass(z, y, n, id, s, t, f, 0, true, false);
    const float divergence = add_block(part);
    if (threadIdx.x == 0) {
        nll[blockIdx.x] = s.log_one + (s.max - own);
        hit[blockIdx.x] = known && student.id == id;
        kl[blockIdx.x] = divergence;
    }
    if (f.gradient && f.reverse) pass(z, y, n, id, s, t, f, divergence, false, true);
}

/* ---- a teacher of K ids and a bucket ---- */

/* Writes the gradient of the ids in the bucket, in place. It also writes values for the K ids, which the caller
 * overwrites. */
static __device__ __forceinline__ void write_rest(float *z, int n, int id, struct scale_of s, struct sums rest,
                                                  struct factors f, float mass, float left)
{
    const int n_group = (n + VECTOR - 1) / VECTOR;
    const float to_share = rest.warm > 0 ? left / rest.warm : 0;
    uint4 *out = (uint4 *)z;
    for (int first = 0; first < n_group; first += THREADS) {
        const int g = first + threadIdx.x;
        uint4 words;
        if (g < n_group) {
            float a[VECTOR];
            load_group(a, z, g, n);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const float p = exp2f(log_prob(a[j], &s, f.inv_t) * LOG2_E);
                const float share = exp2f((a[j] - rest.max) * f.inv_t * LOG2_E) * to_share;
                const float slope = cap_slope(a[j], f.inv_cap);
                a[j] = f.ce * exp2f(((a[j] - s.max) - s.log_one) * LOG2_E) + f.kl * (p * mass - share);
                if (g * VECTOR + j == id) a[j] -= f.ce;
                a[j] *= slope;
            }
            words = bf16_pack8(a);
        }
        __syncthreads();
        if (g < n_group) out[g] = words;
    }
    __syncthreads();
}

/* Moves the logits of the ids to own [K], and replaces them in the row by -inf. */
static __device__ __forceinline__ struct sums take_ids(float *z, int n, const int32_t *top, int n_top, float *own,
                                                       float inv_t)
{
    struct sums all = no_sums();
    for (int k = threadIdx.x; k < n_top; k += THREADS) {
        if (top[k] < 0 || top[k] >= n) continue;
        const struct sums one = {own[k] = z[top[k]], 1, 1, top[k]};
        all = merge(all, one, inv_t);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < n_top; k += THREADS)
        if (top[k] >= 0 && top[k] < n) z[top[k]] = -INFINITY;
    return sums_of_block(all, inv_t); /* all threads wait in it */
}

static __global__ void __launch_bounds__(THREADS)
    bucket_kernel(float *nll, float *kl, int32_t *hit, float *logits, int64_t ld, int n, const int32_t *ids,
                  const int32_t *topk, int64_t ld_topk, const float *logprob, int64_t ld_logprob, int n_top, float *own,
                  struct factors f)
{
    float *z = logits + blockIdx.x * ld;
    const int32_t *top = topk + blockIdx.x * ld_topk;
    const float *lq = logprob + blockIdx.x * ld_logprob;
    const int id = ids[blockIdx.x];
    const bool known_id = id >= 0 && id < n;
    const float label = known_id && threadIdx.x == 0 ? z[id] : NAN;
    own += (int64_t)blockIdx.x * n_top;
    __syncthreads();
    const struct sums first = take_ids(z, n, top, n_top, own, f.inv_t), rest = sum_row(z, n, f.inv_t);
    const struct sums all = merge(first, rest, f.inv_t);
    const struct scale_of s = scale_of(all);
    double known = 0, sum = 0;
    for (int k = threadIdx.x; k < n_top; k += THREADS) {
        if (top[k] < 0) continue;
        known += top[k] < n ? exp((double)lq[k]) : NAN;
        if (top[k] < n) sum += bucket_divergence((double)lq[k], (double)log_prob(own[k], &s, f.inv_t));
    }
    known = add_block(known);
    sum = add_block(sum);
    const bool others = rest.warm > 0;
    const double left = others ? fmax(0.0, 1 - known) : 0;
    const double p_rest = others ? (double)((rest.max - s.max) * f.inv_t + (logf(rest.warm) - s.log_warm)) : 0;
    if (left > 0) sum += bucket_divergence(log(left), p_rest);
    if (threadIdx.x == 0) {
        nll[blockIdx.x] = s.log_one + (s.max - label);
        hit[blockIdx.x] = known_id && all.id == id;
        kl[blockIdx.x] = (float)(sum + (known + left) - (others && !(left > 0) ? 1 - exp(p_rest) : 1));
    }
    if (!f.gradient) return;
    const float mass = (float)(known + left);
    write_rest(z, n, id, s, rest, f, mass, (float)left);
    bf16 *out = (bf16 *)z;
    for (int k = threadIdx.x; k < n_top; k += THREADS) {
        if (top[k] < 0 || top[k] >= n) continue;
        const float p = exp2f(log_prob(own[k], &s, f.inv_t) * LOG2_E), q = exp2f(lq[k] * LOG2_E);
        const float grad = f.ce * exp2f(((own[k] - s.max) - s.log_one) * LOG2_E) + f.kl * (p * mass - q);
        out[top[k]] = __float2bfloat16_rn((top[k] == id ? grad - f.ce : grad) * cap_slope(own[k], f.inv_cap));
    }
}

/* ---- the likeliest tokens ---- */

/* Larger floats have larger keys; -0 has that of 0. */
static __device__ __forceinline__ uint32_t key_of(float v)
{
    const uint32_t bits = __float_as_uint(v + 0.0f);
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

/* The k-th largest key of the row, and how many of those equal to it are among the k largest. */
static __device__ uint32_t kth_largest(const float *row, int n, int k, int *equal)
{
    __shared__ int count[256];
    __shared__ int chosen, room;
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int b = threadIdx.x; b < 256; b += THREADS) count[b] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const uint32_t key = key_of(row[i]);
            if ((key & mask) == found) atomicAdd(&count[key >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int b = 255, above = 0;
            while (b > 0 && above + count[b] < k) above += count[b--];
            chosen = b;
            room = k - above;
        }
        __syncthreads();
        found |= (uint32_t)chosen << shift;
        mask |= 255u << shift;
        k = room;
        __syncthreads();
    }
    *equal = k;
    return found;
}

static __global__ void __launch_bounds__(THREADS)
    choose_kernel(int32_t *id, int64_t ld_id, float *logprob, int64_t ld_logprob, int n_top, const float *logits,
                  int64_t ld, int n, float inv_t)
{
    __shared__ int greater_in[WARPS], equal_in[WARPS];
    const float *row = logits + blockIdx.x * ld;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int room, greater = 0, equal = 0; /* of the columns before */
    const struct scale_of s = scale_of(sum_row(row, n, inv_t));
    const uint32_t least = kth_largest(row, n, n_top, &room);
    id += blockIdx.x * ld_id;
    logprob += blockIdx.x * ld_logprob;
    for (int first = 0; first < n; first += THREADS) {
        const int i = first + threadIdx.x;
        const float v = i < n ? row[i] : 0;
        const bool more = i < n && key_of(v) > least, same = i < n && key_of(v) == least;
        const uint32_t all_more = __ballot_sync(~0u, more), all_same = __ballot_sync(~0u, same);
        const uint32_t below = (1u << lane) - 1;
        if (lane == 0) greater_in[warp] = __popc(all_more), equal_in[warp] = __popc(all_same);
        __syncthreads();
        int at_more = greater + __popc(all_more & below), at_same = equal + __popc(all_same & below);
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) at_more += greater_in[w], at_same += equal_in[w];
            greater += greater_in[w];
            equal += equal_in[w];
        }
        if (more || (same && at_same < room)) {
            const int at = at_more + min(at_same, room);
            id[at] = i;
            logprob[at] = log_prob(v, &s, inv_t);
        }
        __syncthreads();
    }
}

/* ---- host ---- */

struct chunk {
    struct tensor rows, logits, of_teacher, part; /* n rows each */
};

static struct chunk chunk_of(struct tensor rows, int64_t first, int64_t n, const struct scratch_head *all)
{
    const struct chunk c = {tensor_rows(rows, first, n), tensor_rows(all->logits, 0, n),
                            all->of_teacher.ndim ? tensor_rows(all->of_teacher, 0, n) : all->of_teacher,
                            tensor_rows(all->part, 0, n)};
    return c;
}

static void make_logits(const struct chunk *c, struct tensor x, struct tensor w, float cap)
{
    move_rows(c->part, NULL, x, i32_ptr(c->rows), c->rows.shape[0]);
    cuda_gemm(tensor_cols(c->logits, 0, w.shape[0]), c->part, false, w, true, 1, 0);
    cap_logits(tensor_cols(c->logits, 0, w.shape[0]), cap);
}

static void loss_of_chunk(struct tensor nll, struct tensor kl, struct tensor hit, struct tensor dx, struct tensor ids,
                          const struct teacher *t, int64_t first, const struct chunk *c, struct tensor w, float cap,
                          float scale)
{
    const int64_t n = c->rows.shape[0], n_vocab = w.shape[0];
    const struct factors f = {scale * t->alpha,      scale * (1 - t->alpha) * t->temperature,
                              1 / t->temperature,    inverse_cap(cap),
                              t->kind == KL_REVERSE, dx.ndim > 0};
    float *of_nll = f32_ptr(nll) + first, *of_kl = f32_ptr(kl) + first, *logits = f32_ptr(c->logits);
    int32_t *of_hit = i32_ptr(hit) + first, *label = i32_ptr(ids) + first;
    if (t->hidden.ndim) {
        cuda_gemm(tensor_cols(c->of_teacher, 0, n_vocab), tensor_rows(t->hidden, first, n), false, w, true, 1, 0);
        cap_logits(tensor_cols(c->of_teacher, 0, n_vocab), cap);
        kl_kernel<<<grid_x(n), THREADS, 0, cuda.stream>>>(of_nll, of_kl, of_hit, logits, f32_ptr(c->of_teacher),
                                                          c->logits.ld, (int)n_vocab, label, f);
    } else {
        bucket_kernel<<<grid_x(n), THREADS, 0, cuda.stream>>>(
            of_nll, of_kl, of_hit, logits, c->logits.ld, (int)n_vocab, label, i32_ptr(t->id) + first * t->id.ld,
            t->id.ld, f32_ptr(t->logprob) + first * t->logprob.ld, t->logprob.ld, (int)t->id.shape[1],
            f32_ptr(c->of_teacher), f);
    }
    CUDA_CHECK_LAUNCH();
    if (!dx.ndim) return;
    struct tensor dlogits = tensor_2d(c->logits.data, DT_BF16, n, n_vocab); /* in the first half of every row */
    dlogits.ld = 2 * c->logits.ld;
    cuda_gemm(c->part, dlogits, false, w, false, 1, 0);
    move_rows(dx, i32_ptr(c->rows), c->part, NULL, n);
}

extern "C" void cuda_linear_kl(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit,
                               struct tensor dx, struct tensor x, const struct weight *w, float cap, struct tensor rows,
                               struct tensor ids, const struct teacher *t, float scale, int64_t chunk)
{
    const struct scratch_head s = scratch_linear_kl(dev, w, rows, t, chunk);
    const int64_t n_label = rows.shape[0];
    want_rows(x);
    if (dx.ndim) want_rows(dx), zero_rows(dx);
    if (t->hidden.ndim) want_rows(t->hidden);
    cuda_fill_matrices(s.dense, w);
    for (int64_t first = 0; first < n_label; first += chunk) {
        const struct chunk c = chunk_of(rows, first, MT_MIN(chunk, n_label - first), &s);
        make_logits(&c, x, s.dense, cap);
        loss_of_chunk(nll, kl, hit, dx, ids, t, first, &c, s.dense, cap, scale);
    }
}

extern "C" void cuda_linear_topk(struct device *dev, struct tensor id, struct tensor logprob, struct tensor x,
                                 const struct weight *w, float cap, struct tensor rows, float temperature,
                                 int64_t chunk)
{
    const struct scratch_head s = scratch_linear_topk(dev, w, rows, chunk);
    const int64_t n_label = rows.shape[0];
    want_rows(x);
    cuda_fill_matrices(s.dense, w);
    for (int64_t first = 0; first < n_label; first += chunk) {
        const struct chunk c = chunk_of(rows, first, MT_MIN(chunk, n_label - first), &s);
        make_logits(&c, x, s.dense, cap);
        choose_kernel<<<grid_x(c.rows.shape[0]), THREADS, 0, cuda.stream>>>(
            i32_ptr(id) + first * id.ld, id.ld, f32_ptr(logprob) + first * logprob.ld, logprob.ld, (int)id.shape[1],
            f32_ptr(c.logits), c.logits.ld, (int)w->n_out, 1 / temperature);
        CUDA_CHECK_LAUNCH();
    }
}
