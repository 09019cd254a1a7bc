/* attn_split.cu - q | k | v of attention with an output gate, from the output of one projection: the split, RMSNorm of
 * the heads of q and k and RoPE in one pass.
 * Math: y = x r w, r = 1/sqrt(mean(x^2) + eps); channels i and i + W/2 are rotated: lo' = lo c - hi s, hi' = hi c + lo
 *   s. Backward: d is dy rotated by -s, g = d w, dx = r (g - x r mean(g x r)). v is copied. w is frozen: no gradient.
 * Shapes: wide, dwide [T, (2H+2K)*A], qkv, dqkv [T, (H+2K)*A] bf16 (views), r [T, H+K] f32, w [A] f32; pos [T] i32,
 *   table [P, W] f32: cos [W/2], then sin [W/2]. T may be 0.
 * Needs: A a multiple of 8 up to 256, W even and at most A, 16-byte aligned rows, 0 <= pos < P (an invalid position
 *   traps).
 * Grid: a block of 256 has one head; a warp has two tokens, whose loads are issued together. A thread has 8 channels
 *   and also loads the channels that they are paired with: 16 bytes where W is a multiple of 16, otherwise one by one.
 * Bound: forward 4 bytes per value of qkv, backward 4, and 2 more per value of q and k: memory bound.
 * Numerics: f32, sums in a fixed order; one rounding at the end, with round_twice another before the weight. */
#include "kernels/cuda/parts/rope.cuh"

enum { BLOCK = 256, WARPS = BLOCK / 32, MAX_DIM = 8 * 32, TOKENS = 2 };

struct split_job {
    int64_t n_tok;
    int n_head, n_kv, dim;
    row_view<> wide;
    const float *wq, *wk;
    row_view<float> rstd;
    float eps;
    bool round_twice;
    struct angles angles;
    int half;         /* W / 2 */
    row_view<> qkv;   /* backward: dqkv, which is read */
    row_view<> dwide; /* backward */
};

/* The head of this block: its first columns in wide and in qkv, its column in rstd, the weight of its norm (NULL: a
 * head of v). */
struct head {
    int wide, qkv, at;
    const float *w;
};
static __device__ __forceinline__ struct head find_head(const struct split_job &job)
{
    const int n_q = job.n_head, at = (int)(blockIdx.x % (uint32_t)(n_q + 2 * job.n_kv));
    return {(at < n_q ? 2 * at : n_q + at) * job.dim, at * job.dim, at,
            at < n_q              ? job.wq
            : at < n_q + job.n_kv ? job.wk
                                  : NULL};
}
/* Token i of this warp. */
static __device__ __forceinline__ int64_t find_token(const struct split_job &job, int i)
{
    const uint32_t group = blockIdx.x / (uint32_t)(job.n_head + 2 * job.n_kv);
    return ((int64_t)group * TOKENS + i) * WARPS + threadIdx.x / 32;
}

/* ---- rotation of channels c .. c+7. EIGHTS: half is a multiple of 8 and rows of the table are aligned; otherwise some
 * channels may be beyond the rotated ones, from 2 * half on ---- */

static __device__ __forceinline__ int partner_of(int c, int half) { return c < half ? c + half : c - half; }

/* x of the channels that c .. c + 7 are paired with */
template <bool EIGHTS> static __device__ __forceinline__ uint4 load_partners(const bf16 *x, int c, int half)
{
    uint32_t word[4] = {};
    if constexpr (EIGHTS) {
        return load16(x + partner_of(c, half));
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (c + k < 2 * half)
                word[k / 2] |= (uint32_t)__bfloat16_as_ushort(x[partner_of(c + k, half)]) << k % 2 * 16;
        return make_uint4(word[0], word[1], word[2], word[3]);
    }
}
template <bool EIGHTS> static __device__ __forceinline__ void load_partners(float v[8], const float *x, int c, int half)
{
    if constexpr (EIGHTS) {
        load_f32x8(v, x + partner_of(c, half));
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = c + k < 2 * half ? x[partner_of(c + k, half)] : 0;
    }
}

/* Rotates v; direction -1: by the negative angle. */
template <bool EIGHTS>
static __device__ __forceinline__ void rotate(float v[8], const float partner[8], const struct split_job &job,
                                              int32_t p, int c, float direction)
{
    const int half = job.half;
    float cosine[8], sine[8];
    const float *row = angles_at(job.angles, p, true);
    if (EIGHTS) {
        load_f32x8(cosine, row + (c < half ? c : c - half));
        load_f32x8(sine, row + (c < half ? c + half : c));
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const bool low = c + k < half, rotated = EIGHTS || c + k < 2 * half;
        if (!EIGHTS) cosine[k] = rotated ? row[low ? c + k : c + k - half] : 1;
        if (!EIGHTS) sine[k] = rotated ? row[low ? c + k + half : c + k] : 0;
        v[k] = v[k] * cosine[k] + (low ? -direction : direction) * partner[k] * sine[k];
    }
}

/* ---- kernels ---- */

static __device__ __forceinline__ float normalised(float x, float r, float w, bool round_twice)
{
    x *= r;
    return (round_twice ? __bfloat162float(__float2bfloat16_rn(x)) : x) * w;
}

template <bool EIGHTS> static __global__ void __launch_bounds__(BLOCK) split_fwd(const struct split_job job)
{
    const struct head head = find_head(job);
    const int c = 8 * (int)(threadIdx.x % 32);
    const bool rotated = head.w && c < 2 * job.half;
    uint4 of_x[TOKENS] = {}, of_partner[TOKENS] = {};
    int32_t pos[TOKENS] = {};
    float v[8], w[8] = {}, partner[8], partner_w[8];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const int64_t t = find_token(job, i);
        const bf16 *x = job.wide.at(t) + head.wide;
        if (t >= job.n_tok || c >= job.dim) continue;
        of_x[i] = load16(x + c);
        if (rotated) of_partner[i] = load_partners<EIGHTS>(x, c, job.half);
        if (rotated) pos[i] = job.angles.pos[t];
    }
    if (head.w && c < job.dim) load_f32x8(w, head.w + c);
    if (rotated) load_partners<EIGHTS>(partner_w, head.w, c, job.half);
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const int64_t t = find_token(job, i);
        float sum = 0;
        if (t >= job.n_tok) return;
        if (head.w) {
            unpack8(v, of_x[i]);
#pragma unroll
            for (int k = 0; k < 8; k++) sum += v[k] * v[k];
            const float r = 1 / sqrtf(warp_sum(sum) / (float)job.dim + job.eps);
            if (c == 0) job.rstd.at(t)[head.at] = r;
            unpack8(partner, of_partner[i]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                v[k] = normalised(v[k], r, w[k], job.round_twice);
                if (rotated) partner[k] = normalised(partner[k], r, partner_w[k], job.round_twice);
            }
            if (rotated) rotate<EIGHTS>(v, partner, job, pos[i], c, 1);
            of_x[i] = pack8(v);
        }
        if (c < job.dim) store16(job.qkv.at(t) + head.qkv + c, of_x[i]);
    }
}

template <bool EIGHTS> static __global__ void __launch_bounds__(BLOCK) split_bwd(const struct split_job job)
{
    const struct head head = find_head(job);
    const int c = 8 * (int)(threadIdx.x % 32);
    const bool rotated = head.w && c < 2 * job.half;
    uint4 of_y[TOKENS] = {}, of_x[TOKENS] = {}, of_partner[TOKENS] = {};
    int32_t pos[TOKENS] = {};
    float r[TOKENS] = {}, v[8], d[8], w[8] = {}, partner[8];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const int64_t t = find_token(job, i);
        const bf16 *y = job.qkv.at(t) + head.qkv;
        if (t >= job.n_tok || c >= job.dim) continue;
        of_y[i] = load16(y + c);
        if (rotated) of_partner[i] = load_partners<EIGHTS>(y, c, job.half);
        if (rotated) pos[i] = job.angles.pos[t];
        if (head.w) of_x[i] = load16(job.wide.at(t) + head.wide + c);
        if (head.w) r[i] = job.rstd.at(t)[head.at];
    }
    if (head.w && c < job.dim) load_f32x8(w, head.w + c);
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        const int64_t t = find_token(job, i);
        float sum = 0;
        if (t >= job.n_tok) return;
        if (head.w) {
            unpack8(d, of_y[i]);
            unpack8(partner, of_partner[i]);
            if (rotated) rotate<EIGHTS>(d, partner, job, pos[i], c, -1);
            unpack8(v, of_x[i]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                d[k] *= w[k];
                sum += d[k] * v[k];
            }
            const float mean = warp_sum(sum) * r[i] / (float)job.dim;
#pragma unroll
            for (int k = 0; k < 8; k++) d[k] = r[i] * (d[k] - v[k] * r[i] * mean);
            of_y[i] = pack8(d);
        }
        if (c < job.dim) store16(job.dwide.at(t) + head.wide + c, of_y[i]);
    }
}

/* ---- ops ---- */

static struct split_job job_of(struct tensor wide, struct tensor qkv, struct tensor rstd, struct tensor wq,
                               struct tensor wk, struct tensor pos, struct tensor table, const struct attn_shape *s)
{
    struct split_job job = {};
    MT_REQUIRE(s->head_dim % 8 == 0 && s->head_dim <= MAX_DIM && (uintptr_t)wq.data % 16 == 0 &&
                   (uintptr_t)wk.data % 16 == 0,
               "gated heads of %lld: a multiple of 8 up to %d and 16-byte aligned weights are needed",
               (long long)s->head_dim, MAX_DIM);
    job.n_tok = wide.shape[0];
    job.n_head = (int)s->n_head;
    job.n_kv = (int)s->n_kv;
    job.dim = (int)s->head_dim;
    job.wide = aligned_rows(wide, "gated heads");
    job.qkv = aligned_rows(qkv, "gated heads");
    job.rstd = rows_of<float>(rstd);
    job.wq = f32_ptr(wq);
    job.wk = f32_ptr(wk);
    job.angles = angles_of(pos, table);
    job.half = (int)(table.shape[1] / 2);
    return job;
}

static bool in_eights(const struct split_job *job, struct tensor table)
{
    return job->half % 8 == 0 && rows_aligned(table);
}

static unsigned grid_of(const struct split_job *job)
{
    return grid_x(ceil_div(job->n_tok, TOKENS * WARPS) * (job->n_head + 2 * job->n_kv));
}

extern "C" void cuda_attn_split_fwd(struct device *dev, struct tensor qkv, struct tensor rstd, struct tensor wide,
                                    struct tensor wq, struct tensor wk, struct tensor pos, struct tensor table,
                                    const struct attn_shape *shape, const struct norm *norm)
{
    if (wide.shape[0] == 0) return;
    struct split_job job = job_of(wide, qkv, rstd, wq, wk, pos, table, shape);
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    const auto kernel = in_eights(&job, table) ? split_fwd<true> : split_fwd<false>;
    kernel<<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_attn_split_bwd(struct device *dev, struct tensor dwide, struct tensor dqkv, struct tensor wide,
                                    struct tensor rstd, struct tensor wq, struct tensor wk, struct tensor pos,
                                    struct tensor table, const struct attn_shape *shape)
{
    if (wide.shape[0] == 0) return;
    struct split_job job = job_of(wide, dqkv, rstd, wq, wk, pos, table, shape);
    job.dwide = aligned_rows(dwide, "the gradient of gated heads");
    const auto kernel = in_eights(&job, table) ? split_bwd<true> : split_bwd<false>;
    kernel<<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
