/* gated.cu - outputs with a gate: RMSNorm(x) silu(z) for every head; RMSNorm(x silu(z)) for groups of columns;
 *   attention times quick_sigmoid(gate).
 * Math: y = x r w silu(z), r = 1/sqrt(mean(x^2) + eps); with g = dy silu(z): dx = r (g w - x r mean(g w x r)), dz = dy
 *   x r w silu'(z). Groups: v = x silu(z), y = v r w. w is frozen: no gradient. y = o s, s = quick_sigmoid(gate); do =
 *   dy s, dgate = dy o s (1 - s).
 * Shapes: x, z, y [T, N*B] bf16 (views), w [B] f32, r [T, N] f32; wide [T, (2H+2K)*A] bf16. T may be 0.
 * Needs: widths of heads and groups multiples of 8, B at most 256, 16-byte aligned rows.
 * Grid: norm: a team of 16 threads (B up to 128) or 32 per head, 8 values each, for four heads (backward two) whose
 *   loads are issued together; groups: a block per group, 8 values per thread and sweep; attention: a thread has 8
 *   columns of four tokens. Blocks of 256.
 * Bound: norm 6 T N B bytes forward, 10 backward; gate 6 forward, 10 backward: memory bound.
 * Numerics: f32, sums in a fixed order; one rounding at the end, with round_twice another before the weight; e^x and
 *   the quotient of the sigmoid by the approximate instructions, within 2^-17. */
#include "kernels/cuda/parts/rows.cuh"

enum { BLOCK = 256, MAX_DIM = 8 * 32, TOKENS = 4 };

static __device__ inline float quick_sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }

/* ---- norm ---- */

struct norm_job {
    uint32_t n_head, n_all; /* heads of a token, and of all tokens */
    int dim;
    row_view<> x, z, y, dy, dx, dz; /* dx may be dy */
    row_view<float> rstd;
    const float *w;
    float eps;
    bool round_twice;
};

/* Item k of a team: a head of a token. */
struct item {
    int64_t t;
    int head, col;
    bool in;
};
template <int TEAM, int ITEMS> static __device__ inline struct item find_item(const struct norm_job &job, int k)
{
    const uint32_t i = (blockIdx.x * ITEMS + k) * (BLOCK / TEAM) + threadIdx.x / TEAM, t = i / job.n_head;
    const int at = 8 * (int)(threadIdx.x % TEAM);
    struct item item = {t, (int)(i - t * job.n_head), 0, i < job.n_all && at < job.dim};
    item.col = item.head * job.dim + at;
    return item;
}

static __device__ inline uint4 load_item(const row_view<> &x, const struct item &item)
{
    return item.in ? load16(x.at(item.t) + item.col) : make_uint4(0, 0, 0, 0);
}

static __device__ inline void load_weight(float w[8], const struct norm_job &job, int team)
{
    const int at = 8 * (int)(threadIdx.x % team);
#pragma unroll
    for (int k = 0; k < 8; k++) w[k] = 0;
    if (at < job.dim) load_f32x8(w, job.w + at);
}

template <int TEAM, int ITEMS> static __global__ void __launch_bounds__(BLOCK) norm_fwd(const struct norm_job job)
{
    struct item item[ITEMS];
    uint4 of_x[ITEMS], of_z[ITEMS];
    float v[8], z[8], w[8];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        item[i] = find_item<TEAM, ITEMS>(job, i);
        of_x[i] = load_item(job.x, item[i]);
        of_z[i] = load_item(job.z, item[i]);
    }
    load_weight(w, job, TEAM);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        float sum = 0;
        unpack8(v, of_x[i]);
        unpack8(z, of_z[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += v[k] * v[k];
        sum = warp_sum(sum, TEAM);
        if (!item[i].in) continue;
        const float r = 1 / sqrtf(sum / (float)job.dim + job.eps);
        if (threadIdx.x % TEAM == 0) job.rstd.at(item[i].t)[item[i].head] = r;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] *= r;
            v[k] = (job.round_twice ? __bfloat162float(__float2bfloat16_rn(v[k])) : v[k]) * w[k];
            v[k] *= z[k] * quick_sigmoid(z[k]);
        }
        store16(job.y.at(item[i].t) + item[i].col, pack8(v));
    }
}

template <int TEAM, int ITEMS> static __global__ void __launch_bounds__(BLOCK) norm_bwd(const struct norm_job job)
{
    struct item item[ITEMS];
    uint4 of_x[ITEMS], of_y[ITEMS], of_z[ITEMS];
    float r[ITEMS], v[8], g[8], z[8], w[8], dz[8];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        item[i] = find_item<TEAM, ITEMS>(job, i);
        of_x[i] = load_item(job.x, item[i]);
        of_y[i] = load_item(job.dy, item[i]);
        of_z[i] = load_item(job.z, item[i]);
        r[i] = item[i].in ? job.rstd.at(item[i].t)[item[i].head] : 0;
    }
    load_weight(w, job, TEAM);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        float sum = 0;
        unpack8(v, of_x[i]);
        unpack8(g, of_y[i]);
        unpack8(z, of_z[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float s = quick_sigmoid(z[k]);
            v[k] *= r[i];
            g[k] *= s * w[k];
            dz[k] = g[k] * v[k] * (1 + z[k] * (1 - s));
            g[k] *= z[k];
            sum += g[k] * v[k];
        }
        sum = warp_sum(sum, TEAM);
        if (!item[i].in) continue;
        const float mean = sum / (float)job.dim;
#pragma unroll
        for (int k = 0; k < 8; k++) g[k] = r[i] * (g[k] - v[k] * mean);
        store16(job.dx.at(item[i].t) + item[i].col, pack8(g));
        store16(job.dz.at(item[i].t) + item[i].col, pack8(dz));
    }
}

static struct norm_job job_of(struct tensor x, struct tensor rstd, struct tensor z, struct tensor w)
{
    struct norm_job job = {};
    job.n_head = (uint32_t)rstd.shape[1];
    job.n_all = (uint32_t)tensor_count(rstd);
    job.dim = (int)w.shape[0];
    job.x = aligned_rows(x, "a gated norm");
    job.z = aligned_rows(z, "a gated norm");
    job.w = f32_ptr(w);
    job.rstd = rows_of<float>(rstd);
    MT_REQUIRE(tensor_count(rstd) < INT32_MAX, "a gated norm of %lld heads", (long long)tensor_count(rstd));
    MT_REQUIRE(job.dim % 8 == 0 && job.dim <= MAX_DIM && (uintptr_t)w.data % 16 == 0,
               "a gated norm of %d values: a multiple of 8 up to %d and an aligned weight are needed", job.dim,
               MAX_DIM);
    return job;
}

/* Blocks of norm_fwd and norm_bwd; each has `items` heads per team. */
static unsigned grid_of(const struct norm_job *job, int items)
{
    return grid_x(ceil_div(job->n_all, items * BLOCK / (job->dim <= 128 ? 16 : 32)));
}

extern "C" void cuda_gated_norm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                                    struct tensor z, struct tensor w, const struct norm *norm)
{
    if (x.shape[0] == 0) return;
    struct norm_job job = job_of(x, rstd, z, w);
    job.y = aligned_rows(y, "a gated norm");
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    (job.dim <= 128 ? norm_fwd<16, 4> : norm_fwd<32, 4>)<<<grid_of(&job, 4), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_gated_norm_bwd(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy,
                                    struct tensor x, struct tensor rstd, struct tensor z, struct tensor w)
{
    if (x.shape[0] == 0) return;
    struct norm_job job = job_of(x, rstd, z, w);
    job.dx = aligned_rows(dx, "a gated norm");
    job.dz = aligned_rows(dz, "a gated norm");
    job.dy = aligned_rows(dy, "a gated norm");
    (job.dim <= 128 ? norm_bwd<16, 2> : norm_bwd<32, 2>)<<<grid_of(&job, 2), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* ---- RMSNorm of groups of columns times silu(z) ---- */

struct group_job {
    int n_group, dim;               /* columns of a group */
    row_view<> x, z, y, dy, dx, dz; /* dx may be dy */
    row_view<float> rstd;
    const float *w;
    float eps;
    bool round_twice;
};

/* The sum over a block of at most BLOCK threads; every thread gets the same bits. */
static __device__ inline float block_sum(float v)
{
    __shared__ float part[BLOCK / 32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) v += part[i];
    return v;
}

/* x silu(z) of eight columns; s: sigmoid(z). */
static __device__ inline void gated8(float v[8], float z[8], float s[8], const struct group_job &job, int64_t t, int c)
{
    unpack8(v, load16(job.x.at(t) + c));
    unpack8(z, load16(job.z.at(t) + c));
#pragma unroll
    for (int k = 0; k < 8; k++) {
        s[k] = quick_sigmoid(z[k]);
        v[k] *= z[k] * s[k];
    }
}

static __global__ void __launch_bounds__(BLOCK) group_fwd(const struct group_job job)
{
    const int64_t t = blockIdx.x / job.n_group;
    const int group = (int)(blockIdx.x % job.n_group), first = group * job.dim, step = 8 * (int)blockDim.x;
    float v[8], z[8], s[8], w[8], sum = 0;
    for (int c = 8 * (int)threadIdx.x; c < job.dim; c += step) {
        gated8(v, z, s, job, t, first + c);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += v[k] * v[k];
    }
    const float r = 1 / sqrtf(block_sum(sum) / (float)job.dim + job.eps);
    if (threadIdx.x == 0) job.rstd.at(t)[group] = r;
    for (int c = 8 * (int)threadIdx.x; c < job.dim; c += step) {
        gated8(v, z, s, job, t, first + c);
        load_f32x8(w, job.w + first + c);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] *= r;
            v[k] = (job.round_twice ? __bfloat162float(__float2bfloat16_rn(v[k])) : v[k]) * w[k];
        }
        store16(job.y.at(t) + first + c, pack8(v));
    }
}

static __global__ void __launch_bounds__(BLOCK) group_bwd(const struct group_job job)
{
    const int64_t t = blockIdx.x / job.n_group;
    const int group = (int)(blockIdx.x % job.n_group), first = group * job.dim, step = 8 * (int)blockDim.x;
    const float r = job.rstd.at(t)[group];
    float v[8], z[8], s[8], w[8], d[8], x[8], sum = 0;
    for (int c = 8 * (int)threadIdx.x; c < job.dim; c += step) {
        gated8(v, z, s, job, t, first + c);
        unpack8(d, load16(job.dy.at(t) + first + c));
        load_f32x8(w, job.w + first + c);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += d[k] * w[k] * v[k];
    }
    const float mean = r * block_sum(sum) / (float)job.dim;
    for (int c = 8 * (int)threadIdx.x; c < job.dim; c += step) {
        gated8(v, z, s, job, t, first + c);
        unpack8(d, load16(job.dy.at(t) + first + c));
        unpack8(x, load16(job.x.at(t) + first + c));
        load_f32x8(w, job.w + first + c);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float of_v = r * (d[k] * w[k] - v[k] * r * mean);
            d[k] = of_v * z[k] * s[k];
            x[k] *= of_v * s[k] * (1 + z[k] * (1 - s[k]));
        }
        store16(job.dx.at(t) + first + c, pack8(d));
        store16(job.dz.at(t) + first + c, pack8(x));
    }
}

static struct group_job groups_of(struct tensor x, struct tensor rstd, struct tensor z, struct tensor w)
{
    struct group_job job = {};
    job.n_group = (int)rstd.shape[1];
    job.dim = (int)(w.shape[0] / rstd.shape[1]);
    job.x = aligned_rows(x, "a gated norm");
    job.z = aligned_rows(z, "a gated norm");
    job.w = f32_ptr(w);
    job.rstd = rows_of<float>(rstd);
    MT_REQUIRE(job.dim % 8 == 0 && (uintptr_t)w.data % 16 == 0,
               "a gated norm of groups of %d: a multiple of 8 and an aligned weight are needed", job.dim);
    return job;
}

static unsigned group_threads(const struct group_job *job)
{
    return (unsigned)MT_MIN((int64_t)BLOCK, 32 * ceil_div(job->dim, 8 * 32));
}

extern "C" void cuda_silu_norm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                                   struct tensor z, struct tensor w, const struct norm *norm)
{
    if (x.shape[0] == 0) return;
    struct group_job job = groups_of(x, rstd, z, w);
    job.y = aligned_rows(y, "a gated norm");
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    group_fwd<<<grid_x(tensor_count(rstd)), group_threads(&job), 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_silu_norm_bwd(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy,
                                   struct tensor x, struct tensor rstd, struct tensor z, struct tensor w)
{
    if (x.shape[0] == 0) return;
    struct group_job job = groups_of(x, rstd, z, w);
    job.dx = aligned_rows(dx, "a gated norm");
    job.dz = aligned_rows(dz, "a gated norm");
    job.dy = aligned_rows(dy, "a gated norm");
    group_bwd<<<grid_x(tensor_count(rstd)), group_threads(&job), 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* ---- attention ---- */

/* A thread has eight columns of tokens TOKENS * blockIdx.x and following. */
struct gate_job {
    int64_t n_tok;
    int n_q, dim; /* columns of q; of a head */
    row_view<> wide, dy, o, y;
    row_view<> gate; /* backward: the saved wide */
};

/* The column of `wide` that holds the gate of column c of o. */
static __device__ inline int gate_col(const struct gate_job &job, int c)
{
    return (2 * (c / job.dim) + 1) * job.dim + c % job.dim;
}

/* Columns `col` .. of TOKENS rows from `first` on; beyond the last row the last one again. */
static __device__ inline void load_rows(uint4 v[TOKENS], const row_view<> &x, int col, int64_t first, int64_t n_tok)
{
#pragma unroll
    for (int k = 0; k < TOKENS; k++) v[k] = load16(x.at(min(first + k, n_tok - 1)) + col);
}

static __global__ void __launch_bounds__(BLOCK) gate_fwd(const struct gate_job job)
{
    const int c = 8 * (int)(blockIdx.y * BLOCK + threadIdx.x), at = gate_col(job, c);
    const int64_t first = (int64_t)blockIdx.x * TOKENS;
    uint4 of_o[TOKENS], of_gate[TOKENS];
    float v[8], gate[8];
    if (c >= job.n_q) return;
    load_rows(of_o, job.o, c, first, job.n_tok);
    load_rows(of_gate, job.wide, at, first, job.n_tok);
#pragma unroll
    for (int k = 0; k < TOKENS; k++) {
        if (first + k >= job.n_tok) return;
        unpack8(v, of_o[k]);
        unpack8(gate, of_gate[k]);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= quick_sigmoid(gate[i]);
        store16(job.y.at(first + k) + c, pack8(v));
    }
}

/* job.y is dout, which may be dy; job.wide is dwide. */
static __global__ void __launch_bounds__(BLOCK) gate_bwd(const struct gate_job job)
{
    const int c = 8 * (int)(blockIdx.y * BLOCK + threadIdx.x), at = gate_col(job, c);
    const int64_t first = (int64_t)blockIdx.x * TOKENS;
    uint4 of_y[TOKENS], of_o[TOKENS], of_gate[TOKENS];
    float d[8], v[8], gate[8];
    if (c >= job.n_q) return;
    load_rows(of_y, job.dy, c, first, job.n_tok);
    load_rows(of_o, job.o, c, first, job.n_tok);
    load_rows(of_gate, job.gate, at, first, job.n_tok);
#pragma unroll
    for (int k = 0; k < TOKENS; k++) {
        if (first + k >= job.n_tok) return;
        unpack8(d, of_y[k]);
        unpack8(v, of_o[k]);
        unpack8(gate, of_gate[k]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float s = quick_sigmoid(gate[i]);
            gate[i] = d[i] * v[i] * s * (1 - s);
            d[i] *= s;
        }
        store16(job.y.at(first + k) + c, pack8(d));
        store16(job.wide.at(first + k) + at, pack8(gate));
    }
}

static struct gate_job gate_of(struct tensor wide, const struct attn_shape *s)
{
    struct gate_job job = {};
    MT_REQUIRE(s->head_dim % 8 == 0, "gated heads of %lld: a multiple of 8 is needed", (long long)s->head_dim);
    job.n_tok = wide.shape[0];
    job.n_q = (int)(s->n_head * s->head_dim);
    job.dim = (int)s->head_dim;
    job.wide = aligned_rows(wide, "gated heads");
    return job;
}

static dim3 gate_grid(const struct gate_job *job)
{
    return dim3(grid_x(ceil_div(job->n_tok, TOKENS)), (unsigned)ceil_div(job->n_q, 8 * BLOCK));
}

extern "C" void cuda_attn_gate_fwd(struct device *dev, struct tensor y, struct tensor o, struct tensor wide,
                                   const struct attn_shape *shape)
{
    if (wide.shape[0] == 0) return;
    struct gate_job job = gate_of(wide, shape);
    job.y = aligned_rows(y, "a gated output");
    job.o = aligned_rows(o, "a gated output");
    gate_fwd<<<gate_grid(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_attn_gate_bwd(struct device *dev, struct tensor dout, struct tensor dwide, struct tensor dy,
                                   struct tensor o, struct tensor wide, const struct attn_shape *shape)
{
    if (wide.shape[0] == 0) return;
    struct gate_job job = gate_of(dwide, shape);
    job.y = aligned_rows(dout, "a gated output");
    job.dy = aligned_rows(dy, "a gated output");
    job.o = aligned_rows(o, "a gated output");
    job.gate = aligned_rows(wide, "gated heads");
    gate_bwd<<<gate_grid(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
