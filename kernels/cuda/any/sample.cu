/* sample.cu - the head of generation: logits of a few rows, and a token drawn from each.
 * Math: ops.h. Filters find the last kept token by radix selection, 8 bits of the key at a time: the largest logit z
 *   such that tokens with logits of at least z reach top_k or top_p, then among those equal to z the largest id.
 * Shapes: x [N,D] bf16; W [V,D] any format (any but bf16 is decoded once per call); logits [S,V] f32; rows, edits.
 * Needs: D a multiple of 8; rows of x and logits 16-byte aligned, rows of logits padded to a multiple of 8. An edit of
 *   a token outside the vocabulary traps.
 * Grid: 512 threads per row.
 * Bound: memory: 4*V bytes per row and pass. Passes: one for maximum and sum; one more after edits or with a
 *   temperature; one for the draw; four for top_k and four for the list of the largest logits; five for top_p. The draw
 *   computes Philox and noise in f32 for each token, in f64 only where the token may be the arg max.
 * Numerics: sums of exponentials in f32, weights of filters as integers, so that neither their order nor that of the
 *   atomics changes bits. Keys, noise and edits are those of the CPU to an ulp of exp and log. Rows do not change each
 *   other's bits. */
#include <math.h>

#include "kernels/cuda/parts/loss.cuh"
#include "kernels/sample_value.h"

struct sample_job {
    int32_t *token, *top_id;
    float *logprob, *top_logprob, *logits;
    int64_t ld_logprob, ld_id, ld_top, ld;
    int n, n_top;
    const struct sample_row *rows;
    struct sample_edit *edits;
};

/* Of some logits: maximum, its first index, the sum of exp((logit - max) * inv_t), and whether one is NaN. */
struct sums {
    float max, sum;
    int id, bad;
};

static __device__ struct sums sum_row(const float *row, int n, float inv_t)
{
    struct sums all = {-FLT_MAX, 0, INT32_MAX, 0}; /* finite: exp(-inf - max) is 0 from the start */
    for (int g = threadIdx.x; g < (n + VECTOR - 1) / VECTOR; g += THREADS) {
        float v[VECTOR], max = all.max;
        load_group(v, row, g, n);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            all.bad |= isnan(v[j]);
            if (v[j] > max) all.id = g * VECTOR + j;
            max = fmaxf(max, v[j]);
        }
        all.sum *= exp2f((all.max - max) * inv_t * LOG2_E);
        all.max = max;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) all.sum += exp2f((v[j] - max) * inv_t * LOG2_E);
    }
    return merge_block(all, [inv_t](struct sums a, struct sums b) {
        struct sums c;
        c.max = fmaxf(a.max, b.max);
        c.sum = a.sum * exp2f((a.max - c.max) * inv_t * LOG2_E) + b.sum * exp2f((b.max - c.max) * inv_t * LOG2_E);
        c.id = a.max > b.max ? a.id : b.max > a.max ? b.id : min(a.id, b.id);
        c.bad = a.bad | b.bad;
        return c;
    });
}

static __device__ __forceinline__ bool is_bad(const struct sums &s)
{
    return s.bad || s.id == INT32_MAX || isinf(s.max);
}

/* ---- the order of tokens: falling logit, then rising id ---- */

/* Larger logits have larger keys; -0 has that of 0. */
static __device__ __forceinline__ uint32_t key_of(float v)
{
    const uint32_t bits = __float_as_uint(v + 0.0f);
    return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

/* The first tokens of the order: those with a key above `least`, or with this key and an id of at most `last`. */
struct prefix {
    const float *z;
    int n;
    uint32_t least;
    int last;
    double max, temperature;
    __device__ __forceinline__ bool has(int i) const
    {
        const uint32_t key = key_of(z[i]);
        return key > least || (key == least && i <= last);
    }
    __device__ __forceinline__ double depth(int i) const { return ((double)z[i] - max) / temperature; }
    __device__ __forceinline__ uint64_t weight(int i, bool mass) const { return mass ? sample_weight(depth(i)) : 1; }
};

/* The largest key k such that *above and the weights of the tokens in p with keys of at least k sum to `limit` or more;
 * adds the weights of the tokens with larger keys to *above. Keys are those of logits or, with `ids`, of the ids of
 * tokens whose logit has key p.least: smaller ids have larger keys. A weight is the probability (mass) or 1. */
static __device__ uint32_t find_least(const struct prefix &p, bool ids, bool mass, double limit, uint64_t *above)
{
    __shared__ unsigned long long sum[256], before;
    __shared__ int chosen;
    uint32_t found = 0, mask = 0;
    if (threadIdx.x == 0) before = *above;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int b = threadIdx.x; b < 256; b += THREADS) sum[b] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < p.n; i += THREADS) {
            const uint32_t of_logit = key_of(p.z[i]), key = ids ? ~(uint32_t)i : of_logit;
            if ((key & mask) != found || !p.has(i) || (ids && of_logit != p.least)) continue;
            atomicAdd(&sum[key >> shift & 255], (unsigned long long)p.weight(i, mass));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int b = 255;
            while (b > 0 && (double)(before + sum[b]) < limit) before += sum[b--];
            chosen = b;
        }
        __syncthreads();
        found |= (uint32_t)chosen << shift;
        mask |= 255u << shift;
        *above = before;
        __syncthreads();
    }
    return found;
}

/* Reduces p to its shortest prefix that weighs `limit` or more. */
static __device__ void cut(struct prefix *p, bool mass, double limit)
{
    uint64_t above = 0;
    struct prefix ties = *p;
    const uint32_t least = find_least(*p, false, mass, limit, &above);
    if (least != p->least) ties.last = p->n;
    ties.least = least;
    p->last = (int)~find_least(ties, true, mass, limit, &above);
    p->least = least;
}

/* ---- the largest logits ---- */

static __device__ void write_top(const struct sample_job &job, int r, const float *z, const struct sums &s,
                                 float inv_report)
{
    __shared__ int n_found, id[SAMPLE_TOP];
    __shared__ float value[SAMPLE_TOP];
    struct prefix p = {z, job.n, 0, job.n, 0, 1};
    cut(&p, false, job.n_top);
    if (threadIdx.x == 0) n_found = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < job.n; i += THREADS) {
        if (!p.has(i)) continue;
        const int at = atomicAdd(&n_found, 1);
        if (at < SAMPLE_TOP) id[at] = i, value[at] = z[i];
    }
    __syncthreads();
    for (int k = threadIdx.x; k < job.n_top; k += THREADS) {
        int place = 0;
        for (int j = 0; j < job.n_top; j++) place += value[j] > value[k] || (value[j] == value[k] && id[j] < id[k]);
        job.top_id[r * job.ld_id + place] = id[k];
        job.top_logprob[r * job.ld_top + place] = (value[k] - s.max) * inv_report - logf(s.sum);
    }
    __syncthreads();
}

/* ---- a row ---- */

/* Edits the logits. Afterwards e[i].bias is the logit before the edit, which before_edit reads. */
static __device__ void edit(float *z, int n, const struct sample_row &row, struct sample_edit *e)
{
    for (int i = threadIdx.x; i < row.n_edit; i += THREADS) {
        if (e[i].id < 0 || e[i].id >= n) __trap();
        const float before = z[e[i].id];
        z[e[i].id] = (float)sample_edited((double)before, &e[i], &row);
        e[i].bias = (double)before;
    }
    __syncthreads();
}

static __device__ float before_edit(const float *z, int id, const struct sample_row &row, const struct sample_edit *e)
{
    for (int i = 0; i < row.n_edit; i++)
        if (e[i].id == id) return (float)e[i].bias;
    return z[id];
}

struct drawn {
    double value;
    int id, unused;
};

static __device__ __forceinline__ struct drawn larger(struct drawn a, struct drawn b)
{
    return a.value > b.value || (a.value == b.value && a.id < b.id) ? a : b;
}

/* The arg max of the draw over the tokens of p with a depth of at least `floor`. Skips a token without f64 arithmetic
 * when its f32 value plus the largest possible f32 error is below `least`, a lower bound of the largest value. The
 * error is at most log 2 where f32 rounds u to 1 - k 2^-24; the test adds 1. */
static __device__ int draw(const struct prefix &p, const struct sample_row &row, bool filters, double floor)
{
    const float inv_t = (float)(1 / p.temperature);
    struct drawn best = {-INFINITY, INT32_MAX, 0};
    double least = p.max / p.temperature + SAMPLE_NOISE_MIN;
    for (int g = threadIdx.x; g < (p.n + 3) / 4; g += THREADS) {
        const struct philox words = sample_words(&row, (uint32_t)g);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = 4 * g + j;
            if (i >= p.n) continue;
            const float z = p.z[i] * inv_t, u = ((float)words.word[j] + 0.5f) * 2.3283064e-10f;
            const float near = z - logf(-logf(u));
            if ((double)(near + 1 + 1e-6f * fabsf(z)) < least) continue;
            if (filters && (!p.has(i) || p.depth(i) < floor)) continue;
            const double value = (double)p.z[i] / p.temperature + sample_noise(words.word[j]);
            const struct drawn one = {value, i, 0};
            if (value > -INFINITY) best = larger(best, one);
            least = fmax(least, value);
        }
    }
    return merge_block(best, larger).id;
}

/* The weight of the tokens of p with a depth of at least `floor`. */
static __device__ uint64_t sum_weights(const struct prefix &p, double floor)
{
    uint64_t sum = 0;
    for (int i = threadIdx.x; i < p.n; i += THREADS)
        if (p.has(i) && p.depth(i) >= floor) sum += p.weight(i, true);
    return merge_block(sum, [](uint64_t a, uint64_t b) { return a + b; });
}

/* Filters, then draws. out [2]: log-probability among the kept tokens, their probability. */
static __device__ int choose(const float *z, int n, const struct sample_row &row, const struct sums &s, float *out)
{
    const bool filters = sample_filters(&row);
    const double floor = row.min_p > 0 ? log(row.min_p) : -INFINITY;
    struct prefix p = {z, n, 0, n, (double)s.max, row.temperature};
    double share = 1, log_kept = (double)logf(s.sum);
    if (filters) {
        const uint64_t total = sum_weights(p, -INFINITY);
        if (row.top_k > 0 && row.top_k < n) cut(&p, false, row.top_k);
        if (row.top_p < 1) cut(&p, true, row.top_p * (double)sum_weights(p, -INFINITY));
        const uint64_t kept = sum_weights(p, floor);
        share = (double)kept / (double)total;
        log_kept = log((double)kept / SAMPLE_UNIT);
    }
    const int id = draw(p, row, filters, floor);
    if (id >= n) __trap();
    if (threadIdx.x == 0) {
        out[0] = (float)(p.depth(id) - log_kept);
        out[1] = (float)share;
    }
    return id;
}

static __device__ void write_bad(const struct sample_job &job, int r)
{
    if (threadIdx.x == 0) job.token[r] = -1;
    for (int j = threadIdx.x; j < 3; j += THREADS) job.logprob[r * job.ld_logprob + j] = NAN;
    for (int j = threadIdx.x; j < job.n_top; j += THREADS) {
        job.top_id[r * job.ld_id + j] = -1;
        job.top_logprob[r * job.ld_top + j] = NAN;
    }
}

static __global__ void __launch_bounds__(THREADS, 1) sample_kernel(const struct sample_job job)
{
    const int r = blockIdx.x;
    const struct sample_row row = job.rows[r];
    float *z = job.logits + r * job.ld, *out = job.logprob + r * job.ld_logprob;
    struct sample_edit *e = job.edits ? job.edits + row.first_edit : NULL;
    const float inv_report = (float)(1 / row.report);
    const double t = row.temperature > 0 ? row.temperature : row.report;
    const struct sums given = sum_row(z, job.n, inv_report);
    if (is_bad(given)) {
        write_bad(job, r);
        return;
    }
    if (job.n_top) write_top(job, r, z, given, inv_report);
    if (row.n_edit) edit(z, job.n, row, e);
    const struct sums s = row.n_edit || t != row.report ? sum_row(z, job.n, (float)(1 / t)) : given;
    if (is_bad(s)) {
        write_bad(job, r);
        return;
    }
    const int id = row.temperature > 0 ? choose(z, job.n, row, s, out + 1) : s.id;
    if (threadIdx.x) return;
    job.token[r] = id;
    out[0] = (before_edit(z, id, row, e) - given.max) * inv_report - logf(given.sum);
    if (row.temperature == 0) out[1] = 0, out[2] = 1;
}

/* ---- host ---- */

extern "C" void cuda_head_logits(struct device *dev, struct tensor logits, struct tensor x, const struct weight *w,
                                 float cap)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor dense = scratch_matrices(dev, w, false);
    arena_release(&dev->work, mark);
    cuda_fill_matrices(dense, w);
    if (x.shape[0]) cuda_gemm_rows(dev, logits, x, dense, 1, 0);
    cap_logits(logits, cap);
}

extern "C" void cuda_sample(struct device *dev, const struct sampled *out, struct tensor logits, struct tensor rows,
                            struct tensor edits)
{
    struct sample_job job = {};
    if (!logits.shape[0]) return;
    MT_REQUIRE(rows_aligned(logits) && logits.shape[1] <= INT32_MAX - VECTOR * THREADS, "logits of %lld, %lld apart",
               (long long)logits.shape[1], (long long)logits.ld);
    job.token = i32_ptr(out->token), job.logprob = f32_ptr(out->logprob), job.ld_logprob = out->logprob.ld;
    job.logits = f32_ptr(logits), job.ld = logits.ld, job.n = (int)logits.shape[1];
    job.rows = (const struct sample_row *)rows.data;
    if (edits.ndim) job.edits = (struct sample_edit *)edits.data;
    if (out->top_id.ndim) {
        job.n_top = (int)out->top_id.shape[1];
        job.top_id = i32_ptr(out->top_id), job.ld_id = out->top_id.ld;
        job.top_logprob = f32_ptr(out->top_logprob), job.ld_top = out->top_logprob.ld;
    }
    sample_kernel<<<grid_x(logits.shape[0]), THREADS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
