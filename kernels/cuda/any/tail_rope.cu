/* tail_rope.cu - RoPE of the last columns of every head as adjacent pairs, after RMSNorm without a weight.
 * Math: y = f x, f = rstd = 1/sqrt(mean(x^2) + eps) or 1; then the last G columns rotate: (lo c - hi s, hi c + lo s) of
 *   columns 2i and 2i+1. Backward: g = dy rotated by the negative angle, dx = rstd (g - x rstd^2 mean(g x)), or g.
 * Shapes: x, y, dx, dy [T, H*A] bf16 (views), rstd [T, H] f32, pos [T] i32, table [P, G] f32: cos [G/2], then sin.
 *   T may be 0.
 * Needs: 0 <= pos < P (an invalid position traps). Fast: A and G multiples of 8, A <= 1024, 16-byte aligned rows.
 * Grid: one warp per head, 8 per block; a lane has 8 columns of every 256. In place without a norm, one thread per 8
 *   rotated columns. Other sizes: one warp per head, a lane per column.
 * Bound: fwd 4 T H A bytes, with a norm bwd 6 T H A; in place 4 T H G: memory bound.
 * Numerics: f32 sums in a fixed order, one rounding at the end. */
#include "kernels/cuda/parts/rope.cuh"

enum { BLOCK = 256, WARPS = BLOCK / 32 };

struct tail_job {
    row_view<> y; /* backward: dx */
    row_view<> x; /* backward: dy */
    row_view<> saved;
    row_view<float> rstd; /* or absent */
    int64_t n_heads;      /* of all tokens */
    struct angles angles;
    int n_head, dim, rope;
    float eps, direction;
};

/* Four pairs, from column `at` of the rotated ones on. */
static __device__ inline void turn8(float v[8], const float *cosine, int at, int half, float direction)
{
    const float4 c4 = *(const float4 *)(cosine + at / 2), s4 = *(const float4 *)(cosine + half + at / 2);
    const float c[4] = {c4.x, c4.y, c4.z, c4.w}, s[4] = {s4.x, s4.y, s4.z, s4.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float lo = v[2 * k], hi = v[2 * k + 1], n = direction * s[k];
        v[2 * k] = lo * c[k] - hi * n;
        v[2 * k + 1] = hi * c[k] + lo * n;
    }
}

/* The head of this warp. */
static __device__ inline int64_t head_of_warp(void) { return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; }

/* CHUNKS: of 256 columns. */
template <int CHUNKS, bool BACKWARD> static __global__ void __launch_bounds__(BLOCK) tail_rope(const struct tail_job j)
{
    const int64_t head = head_of_warp();
    if (head >= j.n_heads) return;
    const int64_t t = head / j.n_head, h = head % j.n_head;
    const int lane = threadIdx.x % 32, first = j.dim - j.rope;
    const bf16 *x = j.x.at(t) + h * j.dim;
    const float *angle = angles_at(j.angles, j.angles.pos[t], true);
    float v[CHUNKS][8], old[BACKWARD ? CHUNKS : 1][8], sum = 0, factor = 1;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int c = i * 256 + lane * 8;
        unpack8(v[i], c < j.dim ? load16(x + c) : make_uint4(0, 0, 0, 0));
        if (BACKWARD && j.rstd.p)
            unpack8(old[i], c < j.dim ? load16(j.saved.at(t) + h * j.dim + c) : make_uint4(0, 0, 0, 0));
    }
    if (BACKWARD) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int c = i * 256 + lane * 8;
            if (c >= first && c < j.dim) turn8(v[i], angle, c - first, j.rope / 2, j.direction);
        }
    }
    if (j.rstd.p) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
#pragma unroll
            for (int k = 0; k < 8; k++) sum += v[i][k] * (BACKWARD ? old[BACKWARD ? i : 0][k] : v[i][k]);
        sum = warp_sum(sum);
        if (!BACKWARD) {
            factor = 1 / sqrtf(sum / (float)j.dim + j.eps);
            if (lane == 0) j.rstd.at(t)[h] = factor;
        } else {
            factor = j.rstd.at(t)[h];
            const float mean = sum * factor / (float)j.dim * factor;
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
#pragma unroll
                for (int k = 0; k < 8; k++) v[i][k] -= old[BACKWARD ? i : 0][k] * mean;
        }
    }
    bf16 *y = j.y.at(t) + h * j.dim;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int c = i * 256 + lane * 8;
        if (c >= j.dim) break;
#pragma unroll
        for (int k = 0; k < 8; k++) v[i][k] *= factor;
        if (!BACKWARD && c >= first) turn8(v[i], angle, c - first, j.rope / 2, j.direction);
        store16(y + c, pack8(v[i]));
    }
}

/* In place, without a norm: a thread has eight rotated columns. */
static __global__ void __launch_bounds__(BLOCK) rotate_in_place(const struct tail_job j)
{
    const int n = j.rope / 8;
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, head = i / n;
    if (head >= j.n_heads) return;
    const int64_t t = head / j.n_head;
    const int at = (int)(i % n) * 8;
    bf16 *y = j.y.at(t) + head % j.n_head * j.dim + j.dim - j.rope + at;
    float v[8];
    unpack8(v, load16(y));
    turn8(v, angles_at(j.angles, j.angles.pos[t], true), at, j.rope / 2, j.direction);
    store16(y, pack8(v));
}

/* Column c of x, rotated. */
static __device__ inline float turned(const struct tail_job &j, const bf16 *x, const float *angle, int c)
{
    const int i = c - (j.dim - j.rope);
    const float own = __bfloat162float(x[c]);
    if (i < 0) return own;
    const float other = __bfloat162float(x[i % 2 ? c - 1 : c + 1]);
    const float s = j.direction * angle[j.rope / 2 + i / 2];
    return own * angle[i / 2] + (i % 2 ? other * s : -other * s);
}

/* Any size. A warp takes 32 columns at a time: all lanes read their pairs before any lane writes. The first rotated
 * column begins a group of 32, so no pair is in two groups. */
template <bool BACKWARD> static __global__ void __launch_bounds__(BLOCK) tail_rope_any(const struct tail_job j)
{
    const int64_t head = head_of_warp();
    if (head >= j.n_heads) return;
    const int64_t t = head / j.n_head, h = head % j.n_head;
    const int lane = threadIdx.x % 32, first = j.dim - j.rope;
    const bf16 *x = j.x.at(t) + h * j.dim, *saved = j.saved.at(t) + h * j.dim;
    bf16 *y = j.y.at(t) + h * j.dim;
    const float *angle = angles_at(j.angles, j.angles.pos[t], true);
    float sum = 0, factor = 1, mean = 0;
    if (j.rstd.p) {
        for (int c = lane; c < j.dim; c += 32) {
            const float v = BACKWARD ? turned(j, x, angle, c) : __bfloat162float(x[c]);
            sum += v * (BACKWARD ? __bfloat162float(saved[c]) : v);
        }
        sum = warp_sum(sum);
        factor = BACKWARD ? j.rstd.at(t)[h] : 1 / sqrtf(sum / (float)j.dim + j.eps);
        if (BACKWARD) mean = sum * factor / (float)j.dim * factor;
        if (!BACKWARD && lane == 0) j.rstd.at(t)[h] = factor;
    }
    for (int base = first % 32 - 32; base < j.dim; base += 32) {
        const int c = base + lane;
        const bool valid = c >= 0 && c < j.dim;
        float v = valid ? turned(j, x, angle, c) : 0;
        if (BACKWARD && j.rstd.p && valid) v -= __bfloat162float(saved[c]) * mean;
        __syncwarp();
        if (valid) y[c] = __float2bfloat16_rn(factor * v);
    }
}

template <bool BACKWARD> static void launch(const struct tail_job &j, bool aligned)
{
    const bool eights = aligned && j.dim % 8 == 0 && j.rope % 8 == 0 && j.dim <= 1024;
    const unsigned grid = grid_x(ceil_div(j.n_heads, WARPS));
    if (eights && !j.rstd.p && j.x.p == j.y.p) {
        rotate_in_place<<<grid_x(ceil_div(j.n_heads * (j.rope / 8), BLOCK)), BLOCK, 0, cuda.stream>>>(j);
    } else if (!eights) {
        tail_rope_any<BACKWARD><<<grid, BLOCK, 0, cuda.stream>>>(j);
    } else if (j.dim <= 256) {
        tail_rope<1, BACKWARD><<<grid, BLOCK, 0, cuda.stream>>>(j);
    } else if (j.dim <= 512) {
        tail_rope<2, BACKWARD><<<grid, BLOCK, 0, cuda.stream>>>(j);
    } else {
        tail_rope<4, BACKWARD><<<grid, BLOCK, 0, cuda.stream>>>(j);
    }
    CUDA_CHECK_LAUNCH();
}

static struct tail_job job_of(struct tensor y, struct tensor x, struct tensor rstd, struct tensor pos,
                              struct tensor table, const struct tail_rope *r)
{
    struct tail_job j = {};
    j.y = rows_of(y);
    j.x = rows_of(x);
    j.rstd = rows_of<float>(rstd);
    j.n_heads = y.shape[0] * r->n_head;
    j.angles = angles_of(pos, table);
    j.n_head = (int)r->n_head;
    j.dim = (int)r->head_dim;
    j.rope = (int)table.shape[1];
    j.eps = r->eps;
    j.direction = r->inverse ? -1 : 1;
    return j;
}

extern "C" void cuda_tail_rope_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                                   struct tensor pos, struct tensor table, const struct tail_rope *r)
{
    if (y.shape[0] == 0) return;
    launch<false>(job_of(y, x, rstd, pos, table, r), rows_aligned(y) && rows_aligned(x) && rows_aligned(table));
}

extern "C" void cuda_tail_rope_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                   struct tensor rstd, struct tensor pos, struct tensor table,
                                   const struct tail_rope *r)
{
    if (dx.shape[0] == 0) return;
    struct tail_job j = job_of(dx, dy, rstd, pos, table, r);
    j.direction = -j.direction;
    j.saved = rows_of(x);
    launch<true>(j, rows_aligned(dx) && rows_aligned(dy) && rows_aligned(table) && (!rstd.ndim || rows_aligned(x)));
}
