/* gated.cu - outputs with a gate: RMSNorm of every head times silu(z), and attention times sigmoid(gate) with the split
 * of its projection.
 * Math: y = x r w silu(z), r = 1/sqrt(mean(x^2) + eps); with g = dy silu(z): dx = r (g w - x r mean(g w x r)), dz = dy
 * x r w silu'(z). y = o s, s = sigmoid(gate); do = dy s, dgate = dy o s (1 - s). Shapes: x, z, y [T, N*B] bf16 (views),
 * w [B] f32, r [T, N] f32; wide [T, (2H+2K)*A], qkv [T, (H+2K)*A] bf16. T may be 0. Needs: head widths multiples of 8,
 * B at most 256, 16-byte aligned rows. Grid: norm: a team of 32 threads per head and token, a piece of 8 values each;
 * others: a thread per 8 values. Blocks of 256.     Moves: norm 6 T N B bytes forward, 10 backward; split 4 per value;
 * gate 6 forward, 10 backward: memory bound. Numerics: f32, sums in a fixed order; one rounding at the end, with
 * round_twice another before the weight. Measured: not yet. */
#include "kernels/cuda/rows.cuh"

enum { BLOCK = 256, TEAM = 32, MAX_DIM = 8 * TEAM };

static __device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* ---- norm ---- */

struct norm_job {
    int64_t n_tok, ldx, ldz, ldy, lddy, lddx, lddz, ld_rstd;
    int n_head, dim;
    const bf16 *x, *z, *dy;
    const float *w;
    float *rstd, eps;
    bf16 *y, *dx, *dz; /* dx may be dy */
    bool round_twice;
};

static __global__ void __launch_bounds__(BLOCK) norm_fwd(const struct norm_job job)
{
    const int64_t i = (int64_t)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM, t = i / job.n_head;
    const int head = (int)(i % job.n_head), at = 8 * (int)(threadIdx.x % TEAM), col = head * job.dim + at;
    const bool in = t < job.n_tok && at < job.dim;
    float v[8] = {0}, z[8], w[8], sum = 0;
    if (in) unpack8(v, load16(job.x + t * job.ldx + col));
#pragma unroll
    for (int k = 0; k < 8; k++) sum += v[k] * v[k];
    sum = warp_sum(sum);
    if (!in) return;
    const float r = 1 / sqrtf(sum / (float)job.dim + job.eps);
    if (at == 0) job.rstd[t * job.ld_rstd + head] = r;
    unpack8(z, load16(job.z + t * job.ldz + col));
    load_f32x8(w, job.w + at);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        v[k] *= r;
        v[k] = (job.round_twice ? __bfloat162float(__float2bfloat16_rn(v[k])) : v[k]) * w[k] * (z[k] * sigmoid(z[k]));
    }
    store16(job.y + t * job.ldy + col, pack8(v));
}

static __global__ void __launch_bounds__(BLOCK) norm_bwd(const struct norm_job job)
{
    const int64_t i = (int64_t)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM, t = i / job.n_head;
    const int head = (int)(i % job.n_head), at = 8 * (int)(threadIdx.x % TEAM), col = head * job.dim + at;
    const bool in = t < job.n_tok && at < job.dim;
    float v[8] = {0}, g[8] = {0}, z[8] = {0}, w[8] = {0}, dz[8], sum = 0;
    const float r = in ? job.rstd[t * job.ld_rstd + head] : 0;
    if (in) {
        unpack8(v, load16(job.x + t * job.ldx + col));
        unpack8(g, load16(job.dy + t * job.lddy + col));
        unpack8(z, load16(job.z + t * job.ldz + col));
        load_f32x8(w, job.w + at);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float s = sigmoid(z[k]);
        v[k] *= r;
        dz[k] = g[k] * v[k] * w[k] * s * (1 + z[k] * (1 - s));
        g[k] *= z[k] * s * w[k];
        sum += g[k] * v[k];
    }
    sum = warp_sum(sum);
    if (!in) return;
    const float mean = sum / (float)job.dim;
#pragma unroll
    for (int k = 0; k < 8; k++) g[k] = r * (g[k] - v[k] * mean);
    store16(job.dx + t * job.lddx + col, pack8(g));
    store16(job.dz + t * job.lddz + col, pack8(dz));
}

static struct norm_job job_of(struct tensor x, struct tensor rstd, struct tensor z, struct tensor w)
{
    struct norm_job job = {};
    job.n_tok = x.shape[0];
    job.n_head = (int)rstd.shape[1];
    job.dim = (int)w.shape[0];
    job.x = bf16_ptr(x);
    job.ldx = x.ld;
    job.z = bf16_ptr(z);
    job.ldz = z.ld;
    job.w = f32_ptr(w);
    job.rstd = f32_ptr(rstd);
    job.ld_rstd = rstd.ld;
    MT_REQUIRE(job.dim % 8 == 0 && job.dim <= MAX_DIM && rows_aligned(x) && rows_aligned(z) &&
                   (uintptr_t)w.data % 16 == 0,
               "a gated norm of %d values: a multiple of 8 up to %d and aligned rows are needed", job.dim, MAX_DIM);
    return job;
}

static unsigned grid_of(const struct norm_job *job) { return grid_x(ceil_div(job->n_tok * job->n_head, BLOCK / TEAM)); }

extern "C" void cuda_gated_norm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                                    struct tensor z, struct tensor w, const struct norm *norm)
{
    if (dev->dry_run || x.shape[0] == 0) return;
    struct norm_job job = job_of(x, rstd, z, w);
    MT_REQUIRE(rows_aligned(y), "the rows of a gated norm are not 16-byte aligned");
    job.y = bf16_ptr(y);
    job.ldy = y.ld;
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    norm_fwd<<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_gated_norm_bwd(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy,
                                    struct tensor x, struct tensor rstd, struct tensor z, struct tensor w)
{
    if (dev->dry_run || x.shape[0] == 0) return;
    struct norm_job job = job_of(x, rstd, z, w);
    MT_REQUIRE(rows_aligned(dx) && rows_aligned(dz) && rows_aligned(dy),
               "the rows of a gated norm are not 16-byte aligned");
    job.dx = bf16_ptr(dx);
    job.lddx = dx.ld;
    job.dz = bf16_ptr(dz);
    job.lddz = dz.ld;
    job.dy = bf16_ptr(dy);
    job.lddy = dy.ld;
    norm_bwd<<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* ---- attention ---- */

/* A thread has piece blockIdx.x * BLOCK + threadIdx.x of token blockIdx.y + k gridDim.y, in pieces of eight columns. */
struct gate_job {
    int64_t n_tok, ld_wide, ld_qkv, ldo, ldy;
    int n_q, n_kv, dim; /* columns of q, and of k and v together; of a head */
    bf16 *wide, *qkv, *o, *y;
    const bf16 *gate; /* backward: the saved wide */
    int64_t ld_gate;
};

/* The column of `wide` that holds column c of q | k | v; c may also be a column of o. */
static __device__ inline int wide_col(const struct gate_job *job, int c)
{
    return c < job->n_q ? c / job->dim * 2 * job->dim + c % job->dim : c + job->n_q;
}

template <bool TO_QKV> static __global__ void __launch_bounds__(BLOCK) split(const struct gate_job job)
{
    const int c = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x);
    if (c >= job.n_q + job.n_kv) return;
    for (int64_t t = blockIdx.y; t < job.n_tok; t += gridDim.y) {
        bf16 *a = job.qkv + t * job.ld_qkv + c, *b = job.wide + t * job.ld_wide + wide_col(&job, c);
        store16(TO_QKV ? a : b, load16(TO_QKV ? b : a));
    }
}

static __global__ void __launch_bounds__(BLOCK) gate_fwd(const struct gate_job job)
{
    const int c = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x);
    float v[8], gate[8];
    if (c >= job.n_q) return;
    for (int64_t t = blockIdx.y; t < job.n_tok; t += gridDim.y) {
        unpack8(v, load16(job.o + t * job.ldo + c));
        unpack8(gate, load16(job.wide + t * job.ld_wide + wide_col(&job, c) + job.dim));
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] *= sigmoid(gate[k]);
        store16(job.y + t * job.ldy + c, pack8(v));
    }
}

/* qkv: dy; y: dout, which may be dy; wide: dwide. */
static __global__ void __launch_bounds__(BLOCK) gate_bwd(const struct gate_job job)
{
    const int c = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x);
    float v[8], gate[8], d[8];
    if (c >= job.n_q) return;
    for (int64_t t = blockIdx.y; t < job.n_tok; t += gridDim.y) {
        const int at = wide_col(&job, c) + job.dim;
        unpack8(v, load16(job.o + t * job.ldo + c));
        unpack8(d, load16(job.qkv + t * job.ld_qkv + c));
        unpack8(gate, load16(job.gate + t * job.ld_gate + at));
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float s = sigmoid(gate[k]);
            v[k] *= d[k] * s * (1 - s);
            d[k] *= s;
        }
        store16(job.y + t * job.ldy + c, pack8(d));
        store16(job.wide + t * job.ld_wide + at, pack8(v));
    }
}

static struct gate_job gate_of(struct tensor wide, const struct attn_shape *s)
{
    struct gate_job job = {};
    MT_REQUIRE(s->head_dim % 8 == 0 && rows_aligned(wide),
               "gated heads of %lld: a multiple of 8 and 16-byte aligned rows are needed", (long long)s->head_dim);
    job.n_tok = wide.shape[0];
    job.n_q = (int)(s->n_head * s->head_dim);
    job.n_kv = (int)(2 * s->n_kv * s->head_dim);
    job.dim = (int)s->head_dim;
    job.wide = bf16_ptr(wide);
    job.ld_wide = wide.ld;
    return job;
}

static dim3 gate_grid(const struct gate_job *job, int n_col)
{
    return dim3(grid_x(ceil_div(n_col, 8 * BLOCK)), (unsigned)MT_MIN(job->n_tok, 65535));
}

static void launch_split(struct device *dev, struct tensor qkv, struct tensor wide, const struct attn_shape *shape,
                         bool to_qkv)
{
    if (dev->dry_run || wide.shape[0] == 0) return;
    struct gate_job job = gate_of(wide, shape);
    MT_REQUIRE(rows_aligned(qkv), "the rows of q, k and v are not 16-byte aligned");
    job.qkv = bf16_ptr(qkv);
    job.ld_qkv = qkv.ld;
    const dim3 grid = gate_grid(&job, job.n_q + job.n_kv);
    if (to_qkv)
        split<true><<<grid, BLOCK, 0, cuda.stream>>>(job);
    else
        split<false><<<grid, BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_attn_split_fwd(struct device *dev, struct tensor qkv, struct tensor wide,
                                    const struct attn_shape *shape)
{
    launch_split(dev, qkv, wide, shape, true);
}

extern "C" void cuda_attn_split_bwd(struct device *dev, struct tensor dwide, struct tensor dqkv,
                                    const struct attn_shape *shape)
{
    launch_split(dev, dqkv, dwide, shape, false);
}

extern "C" void cuda_attn_gate_fwd(struct device *dev, struct tensor y, struct tensor o, struct tensor wide,
                                   const struct attn_shape *shape)
{
    if (dev->dry_run || wide.shape[0] == 0) return;
    struct gate_job job = gate_of(wide, shape);
    MT_REQUIRE(rows_aligned(y) && rows_aligned(o), "the rows of a gated output are not 16-byte aligned");
    job.y = bf16_ptr(y);
    job.ldy = y.ld;
    job.o = bf16_ptr(o);
    job.ldo = o.ld;
    gate_fwd<<<gate_grid(&job, job.n_q), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_attn_gate_bwd(struct device *dev, struct tensor dout, struct tensor dwide, struct tensor dy,
                                   struct tensor o, struct tensor wide, const struct attn_shape *shape)
{
    if (dev->dry_run || wide.shape[0] == 0) return;
    struct gate_job job = gate_of(dwide, shape);
    MT_REQUIRE(rows_aligned(dout) && rows_aligned(dy) && rows_aligned(o) && rows_aligned(wide),
               "the rows of a gated output are not 16-byte aligned");
    job.y = bf16_ptr(dout);
    job.ldy = dout.ld;
    job.qkv = bf16_ptr(dy);
    job.ld_qkv = dy.ld;
    job.o = bf16_ptr(o);
    job.ldo = o.ld;
    job.gate = bf16_ptr(wide);
    job.ld_gate = wide.ld;
    gate_bwd<<<gate_grid(&job, job.n_q), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
