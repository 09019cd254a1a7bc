/* attn_split.cu - q | k | v of attention with an output gate, from the output of one projection: the split, RMSNorm of
 * the heads of q and k and RoPE in one pass.
 * Math: y = x r w, r = 1/sqrt(mean(x^2) + eps); channels i and i + W/2 are rotated: lo' = lo c - hi s, hi' = hi c + lo
 *   s. Backward: d is dy rotated by -s, g = d w, dx = r (g - x r mean(g x r)). v is copied. w is frozen: no gradient.
 * Shapes: wide, dwide [T, (2H+2K)*A], qkv, dqkv [T, (H+2K)*A] bf16 (views), r [T, H+K] f32, w [A] f32; pos [T] i32,
 *   table [P, W] f32: cos [W/2], then sin [W/2]. T may be 0.
 * Needs: A a multiple of 8 up to 256, W even and at most A, 16-byte aligned rows, 0 <= pos < P (an invalid position
 *   traps).
 * Grid: a block has one token; a warp has up to four neighbouring heads of q, of k or of v, whose loads are issued
 *   together (backward: of both inputs). At most eight warps; further groups of heads are in further blocks (y). A
 *   thread has 8 channels of each head. Position, angles and w are loaded once per warp. One sum over the warp, one
 *   division and one root serve the four heads. Channels that are rotated together are exchanged by shuffles, through
 *   shared memory (8 KiB) where W is not a multiple of 16. Registers on sm_90a: forward 64, backward 110, otherwise 96
 *   and 123; no spills.
 * Moves: forward 4 bytes per value of qkv, backward 4 and 2 per value of q and k: memory bound.
 * Numerics: f32, sums in a fixed order; one rounding at the end, with round_twice another before the weight.
 * Measured: H200, T 16384, H 16, K 2, A 256, W 64: forward 213 us, backward 180 us with a warp for one head of two
 *   tokens, which repeated the loads, the division and the root for each. */
#include <stdio.h>

#include "kernels/cuda/rows.cuh"

enum { WARPS = 8, MAX_DIM = 8 * 32, HEADS = 4, OCTET = 32 / HEADS };

struct split_job {
    int64_t ld_wide, ld_qkv, ld_rstd, ld_dwide;
    int n_head, n_kv, dim, q_groups, kv_groups; /* groups: of q; of k, and as many of v */
    const bf16 *wide;
    const float *wq, *wk;
    float *rstd, eps;
    bool round_twice;
    const int32_t *pos;
    const float *table;
    int64_t ld_table, n_pos;
    int half;    /* W / 2 */
    bf16 *qkv;   /* backward: dqkv, which is read */
    bf16 *dwide; /* backward */
};

/* Neighbouring heads of one kind, up to HEADS, of one token: their number, possibly 0, and the first one's index among
 * those of q, k and v. Columns of wide: of the first head, and from one head to the next. */
struct group {
    int n, at, wide, step;
    bool of_q, of_v;
};
/* The group of this warp. */
static __device__ __forceinline__ struct group find_group(const struct split_job &job)
{
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x) / 32, of_kv = i - job.q_groups;
    if (of_kv < 0)
        return {min(job.n_head - HEADS * i, HEADS), HEADS * i, 2 * HEADS * i * job.dim, 2 * job.dim, true, false};
    const bool of_v = of_kv >= job.kv_groups;
    const int first = HEADS * (of_kv - (of_v ? job.kv_groups : 0)), at = job.n_head + (of_v ? job.n_kv : 0) + first;
    return {max(min(job.n_kv - first, HEADS), 0), at, (job.n_head + at) * job.dim, job.dim, false, of_v};
}

/* Channels 8 * lane and following of each head of a group; zeros beyond. */
static __device__ __forceinline__ void load_heads(uint4 of_x[HEADS], const bf16 *x, int step, const struct group &group,
                                                  bool in)
{
#pragma unroll
    for (int h = 0; h < HEADS; h++, x += step) of_x[h] = h < group.n && in ? load16(x) : make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void store_heads(bf16 *y, int step, const uint4 of_y[HEADS],
                                                   const struct group &group, bool in)
{
#pragma unroll
    for (int h = 0; h < HEADS; h++, y += step)
        if (h < group.n && in) store16(y, of_y[h]);
}

/* The sums of HEADS values over the warp: lane l gets that of value l / OCTET. The additions are those of warp_sum. */
static __device__ __forceinline__ float warp_sums(const float v[HEADS])
{
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 16);
    const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], 16);
    return warp_sum((odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 8), OCTET);
}
/* The value of head h, which the lanes of its octet have. */
static __device__ __forceinline__ float of_head(float v, int h) { return __shfl_sync(0xffffffffu, v, h * OCTET); }

/* ---- rotation of channels c .. c+7. EIGHTS: half is a multiple of 8 and rows of the table are aligned; otherwise
 * channels from 2 * half on may be among them ---- */

struct angles {
    float cosine[8], sine[8]; /* sine: negative for a channel whose partner is subtracted */
};
/* Direction -1: the negative angles. */
template <bool EIGHTS>
static __device__ __forceinline__ void load_angles(struct angles &angles, const struct split_job &job, int32_t p, int c,
                                                   float direction)
{
    const int half = job.half;
    if (p < 0 || p >= job.n_pos) {
        printf("attn_split: position %d, but the table has %lld\n", p, (long long)job.n_pos);
        __trap();
    }
    const float *row = job.table + p * job.ld_table + (c < half ? c : c - half);
    if (EIGHTS) {
        load_f32x8(angles.cosine, row);
        load_f32x8(angles.sine, row + half);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const bool low = (EIGHTS ? c : c + k) < half, rotated = EIGHTS || c + k < 2 * half;
        const int i = low || c >= half ? k : k - half; /* row[i]: the cosine of channel c + k */
        if (!EIGHTS) angles.cosine[k] = rotated ? row[i] : 1;
        if (!EIGHTS) angles.sine[k] = rotated ? row[i + half] : 0;
        angles.sine[k] *= low ? -direction : direction;
    }
}

static __device__ __forceinline__ int partner_of(int c, int half) { return c < half ? c + half : c - half; }

/* Rotates v. Other lanes have the channels that those of v are paired with: all 32 lanes must call it. */
template <bool EIGHTS>
static __device__ __forceinline__ void rotate(float v[8], const struct angles &angles, int c, int half)
{
    float partner[8] = {};
    if constexpr (EIGHTS) {
#pragma unroll
        for (int k = 0; k < 8; k++) partner[k] = __shfl_sync(0xffffffffu, v[k], partner_of(c, half) / 8);
    } else {
        __shared__ alignas(16) float shared[WARPS][MAX_DIM];
        float *row = shared[threadIdx.x / 32];
        store_f32x8(row + c, v);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (c + k < 2 * half) partner[k] = row[partner_of(c + k, half)];
        __syncwarp();
    }
    if (c >= 2 * half) return;
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = v[k] * angles.cosine[k] + partner[k] * angles.sine[k];
}

/* ---- kernels ---- */

template <bool EIGHTS> static __global__ void __launch_bounds__(32 * WARPS) split_fwd(const struct split_job job)
{
    const struct group group = find_group(job);
    const int64_t t = blockIdx.x;
    const int lane = (int)(threadIdx.x % 32), c = 8 * lane;
    const bool in = c < job.dim, rotated = !group.of_v && c < 2 * job.half;
    const int32_t pos = rotated ? job.pos[t] : 0;
    uint4 of_x[HEADS];
    load_heads(of_x, job.wide + t * job.ld_wide + group.wide + c, group.step, group, in);
    if (!group.of_v) {
        struct angles angles;
        float v[8], w[8] = {}, sum[HEADS] = {};
        if (in) load_f32x8(w, (group.of_q ? job.wq : job.wk) + c);
        if (rotated) load_angles<EIGHTS>(angles, job, pos, c, 1);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            unpack8(v, of_x[h]);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[h] += v[k] * v[k];
        }
        const float r = 1 / sqrtf(warp_sums(sum) / (float)job.dim + job.eps);
        if (lane % OCTET == 0 && lane / OCTET < group.n) job.rstd[t * job.ld_rstd + group.at + lane / OCTET] = r;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float of_h = of_head(r, h);
            unpack8(v, of_x[h]);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] *= of_h;
            if (job.round_twice) unpack8(v, pack8(v));
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] *= w[k];
            rotate<EIGHTS>(v, angles, c, job.half);
            of_x[h] = pack8(v);
        }
    }
    store_heads(job.qkv + t * job.ld_qkv + group.at * job.dim + c, job.dim, of_x, group, in);
}

template <bool EIGHTS> static __global__ void __launch_bounds__(32 * WARPS) split_bwd(const struct split_job job)
{
    const struct group group = find_group(job);
    const int64_t t = blockIdx.x;
    const int lane = (int)(threadIdx.x % 32), c = 8 * lane;
    const bool in = c < job.dim, rotated = !group.of_v && c < 2 * job.half;
    const int32_t pos = rotated ? job.pos[t] : 0;
    uint4 of_y[HEADS], of_x[HEADS];
    load_heads(of_y, job.qkv + t * job.ld_qkv + group.at * job.dim + c, job.dim, group, in);
    if (!group.of_v) {
        struct angles angles;
        float v[8], d[HEADS][8], w[8] = {}, sum[HEADS] = {}, r = 0;
        load_heads(of_x, job.wide + t * job.ld_wide + group.wide + c, group.step, group, in);
        if (lane / OCTET < group.n) r = job.rstd[t * job.ld_rstd + group.at + lane / OCTET];
        if (in) load_f32x8(w, (group.of_q ? job.wq : job.wk) + c);
        if (rotated) load_angles<EIGHTS>(angles, job, pos, c, -1);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            unpack8(d[h], of_y[h]);
            rotate<EIGHTS>(d[h], angles, c, job.half);
            unpack8(v, of_x[h]);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                d[h][k] *= w[k];
                sum[h] += d[h][k] * v[k];
            }
        }
        const float mean = warp_sums(sum) * r / (float)job.dim;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float of_h = of_head(r, h), mean_h = of_head(mean, h);
            unpack8(v, of_x[h]);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = of_h * (d[h][k] - v[k] * of_h * mean_h);
            of_y[h] = pack8(v);
        }
    }
    store_heads(job.dwide + t * job.ld_dwide + group.wide + c, group.step, of_y, group, in);
}

/* ---- ops ---- */

static struct split_job job_of(struct tensor wide, struct tensor qkv, struct tensor rstd, struct tensor wq,
                               struct tensor wk, struct tensor pos, struct tensor table, const struct attn_shape *s)
{
    struct split_job job = {};
    MT_REQUIRE(s->head_dim % 8 == 0 && s->head_dim <= MAX_DIM && rows_aligned(wide) && rows_aligned(qkv) &&
                   (uintptr_t)wq.data % 16 == 0 && (uintptr_t)wk.data % 16 == 0,
               "gated heads of %lld: a multiple of 8 up to %d and 16-byte aligned rows are needed",
               (long long)s->head_dim, MAX_DIM);
    job.n_head = (int)s->n_head;
    job.n_kv = (int)s->n_kv;
    job.dim = (int)s->head_dim;
    job.q_groups = (int)ceil_div(job.n_head, HEADS);
    job.kv_groups = (int)ceil_div(job.n_kv, HEADS);
    job.wide = bf16_ptr(wide);
    job.ld_wide = wide.ld;
    job.qkv = bf16_ptr(qkv);
    job.ld_qkv = qkv.ld;
    job.rstd = f32_ptr(rstd);
    job.ld_rstd = rstd.ld;
    job.wq = f32_ptr(wq);
    job.wk = f32_ptr(wk);
    job.pos = i32_ptr(pos);
    job.table = f32_ptr(table);
    job.ld_table = table.ld;
    job.n_pos = table.shape[0];
    job.half = (int)(table.shape[1] / 2);
    return job;
}

static bool in_eights(const struct split_job *job, struct tensor table)
{
    return job->half % 8 == 0 && rows_aligned(table);
}

/* Blocks in x: tokens; the warps of the blocks in y: the groups of heads of a token. */
static void launch(void (*kernel)(struct split_job), const struct split_job *job, int64_t n_tok)
{
    const int64_t n_group = job->q_groups + 2 * job->kv_groups, n_block = ceil_div(n_group, WARPS);
    const dim3 grid(grid_x(n_tok), (unsigned)n_block);
    kernel<<<grid, 32 * (unsigned)ceil_div(n_group, n_block), 0, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_attn_split_fwd(struct device *dev, struct tensor qkv, struct tensor rstd, struct tensor wide,
                                    struct tensor wq, struct tensor wk, struct tensor pos, struct tensor table,
                                    const struct attn_shape *shape, const struct norm *norm)
{
    if (dev->dry_run || wide.shape[0] == 0) return;
    struct split_job job = job_of(wide, qkv, rstd, wq, wk, pos, table, shape);
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    launch(in_eights(&job, table) ? split_fwd<true> : split_fwd<false>, &job, wide.shape[0]);
}

extern "C" void cuda_attn_split_bwd(struct device *dev, struct tensor dwide, struct tensor dqkv, struct tensor wide,
                                    struct tensor rstd, struct tensor wq, struct tensor wk, struct tensor pos,
                                    struct tensor table, const struct attn_shape *shape)
{
    if (dev->dry_run || wide.shape[0] == 0) return;
    struct split_job job = job_of(wide, dqkv, rstd, wq, wk, pos, table, shape);
    MT_REQUIRE(rows_aligned(dwide), "the rows of the gradient of gated heads are not 16-byte aligned");
    job.dwide = bf16_ptr(dwide);
    job.ld_dwide = dwide.ld;
    launch(in_eights(&job, table) ? split_bwd<true> : split_bwd<false>, &job, wide.shape[0]);
}
