/* norm.cu - RMSNorm: of the rows of the residual stream, and of queries and keys in place in the q | k | v rows.
 * Math: y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps); dx (+)= rstd * (g - xhat * mean(g * xhat)), g = dy * w.
 * Shapes: x, y, dx [T, D] bf16 (views), w [D] f32, rstd [T] f32. Queries and keys: a row consists of groups, each head
 *   of q and of k, or all of q and all of k; rstd is [T, groups].
 * Needs: the width of every group a multiple of 8 and at most 16384; 16-byte aligned rows. T may be 0.
 * Grid: a team of 16, 32 or 256 threads per group, blocks of 256. The group is read once and stays in registers; the
 *   backward loads two or four pieces of dx at once.
 * Bound: fwd 4 T D bytes, bwd 8 T D; queries and keys 6 bytes per value forward, 6 backward: memory bound.
 * Numerics: f32 sums in a fixed order; one rounding at the end, with round_twice another before the weight. */
#include "kernels/cuda/parts/rows.cuh"

enum { BLOCK = 256, MAX_DIM = 16384 };

/* Rows of n_group groups each; the first n_q are dim_q wide and have weight wq, the others dim_k and wk, from group
 * n_qk on wv. */
struct norm_job {
    int64_t n_tok;
    int n_group, n_q, n_qk, dim_q, dim_k;
    const float *wq, *wk, *wv;
    row_view<float> rstd;
    row_view<> x;

    row_view<> y;   /* forward */
    row_view<> raw; /* copy of x, or absent */
    float eps;
    bool round_twice;

    row_view<> dx; /* backward */
    row_view<> dy; /* may be dx */
    bool accumulate;
};

/* The work of a team: group g of row t, `dim` columns from `col` on. dim 0: beyond the last row. */
struct group {
    int64_t t;
    int g, col, dim;
    const float *w;
};

static __device__ inline struct group find_group(const struct norm_job *job, int team)
{
    const uint32_t i = blockIdx.x * (BLOCK / team) + threadIdx.x / team, t = i / (uint32_t)job->n_group;
    struct group p = {t, (int)(i - t * (uint32_t)job->n_group), 0, 0, job->wq};
    if (p.t >= job->n_tok) return p;
    const bool q = p.g < job->n_q;
    p.col = q ? p.g * job->dim_q : job->n_q * job->dim_q + (p.g - job->n_q) * job->dim_k;
    p.dim = q ? job->dim_q : job->dim_k;
    p.w = q ? job->wq : p.g < job->n_qk ? job->wk : job->wv;
    return p;
}

template <int TEAM> static __device__ inline float team_sum(float v)
{
    if (TEAM <= 32) return warp_sum(v, TEAM);
    __shared__ float part[BLOCK / 32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
#pragma unroll
    for (int i = 0; i < BLOCK / 32; i++) v += part[i];
    return v;
}

/* Thread k of a team holds pieces of eight values: piece i begins at column 8 (i TEAM + k). */
template <int TEAM> static __device__ inline int piece_col(int i) { return 8 * (i * TEAM + (int)threadIdx.x % TEAM); }

template <int N, int TEAM>
static __global__ void __launch_bounds__(BLOCK, N <= 12 ? 2 : 1) norm_fwd(const struct norm_job job)
{
    const struct group p = find_group(&job, TEAM);
    const bf16 *x = job.x.at(p.t) + p.col;
    uint4 piece[N];
    float v[8], w[8], sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        piece[i] = piece_col<TEAM>(i) < p.dim ? load16(x + piece_col<TEAM>(i)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < N; i++) {
        unpack8(v, piece[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += v[k] * v[k];
    }
    sum = team_sum<TEAM>(sum);
    if (p.dim == 0) return;
    const float rstd = 1 / sqrtf(sum / (float)p.dim + job.eps);
    if (threadIdx.x % TEAM == 0) job.rstd.at(p.t)[p.g] = rstd;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int col = piece_col<TEAM>(i);
        if (col >= p.dim) break;
        unpack8(v, piece[i]);
        load_f32x8(w, p.w + col);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] *= rstd;
            v[k] = (job.round_twice ? __bfloat162float(__float2bfloat16_rn(v[k])) : v[k]) * w[k];
        }
        if (job.raw.p) store16(job.raw.at(p.t) + p.col + col, piece[i]);
        store16(job.y.at(p.t) + p.col + col, pack8(v));
    }
}

template <int N, int TEAM>
static __global__ void __launch_bounds__(BLOCK, N <= 12 ? 2 : 1) norm_bwd(const struct norm_job job)
{
    enum { AHEAD = N == 12 ? 2 : 4 }; /* pieces of dx at once; 4 with N = 12 would spill */
    const struct group p = find_group(&job, TEAM);
    const bf16 *x = job.x.at(p.t) + p.col, *dy = job.dy.at(p.t) + p.col;
    bf16 *dx = job.dx.at(p.t) + p.col;
    uint4 of_x[N], of_dy[N], of_dx[AHEAD];
    float v[8], d[8], w[8], sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const bool in = piece_col<TEAM>(i) < p.dim;
        of_x[i] = in ? load16(x + piece_col<TEAM>(i)) : make_uint4(0, 0, 0, 0);
        of_dy[i] = in ? load16(dy + piece_col<TEAM>(i)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int col = piece_col<TEAM>(i);
        if (col >= p.dim) break;
        unpack8(v, of_x[i]);
        unpack8(d, of_dy[i]);
        load_f32x8(w, p.w + col);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += d[k] * w[k] * v[k];
    }
    sum = team_sum<TEAM>(sum);
    if (p.dim == 0) return;
    const float rstd = job.rstd.at(p.t)[p.g], mean = sum * rstd / (float)p.dim;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int col = piece_col<TEAM>(i);
        float old[8];
        if (i % AHEAD == 0) {
#pragma unroll
            for (int k = 0; k < AHEAD && i + k < N; k++)
                of_dx[k] = job.accumulate && piece_col<TEAM>(i + k) < p.dim ? load16(dx + piece_col<TEAM>(i + k))
                                                                            : make_uint4(0, 0, 0, 0);
        }
        if (col >= p.dim) break;
        unpack8(v, of_x[i]);
        unpack8(d, of_dy[i]);
        unpack8(old, of_dx[i % AHEAD]);
        load_f32x8(w, p.w + col);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = old[k] + rstd * (d[k] * w[k] - v[k] * rstd * mean);
        store16(dx + col, pack8(v));
    }
}

#define KERNEL_FOR(kernel, dim)                                                                                        \
    ((dim) <= 128    ? kernel<1, 16>                                                                                   \
     : (dim) <= 256  ? kernel<1, 32>                                                                                   \
     : (dim) <= 1024 ? kernel<4, 32>                                                                                   \
     : (dim) <= 2048 ? kernel<8, 32>                                                                                   \
     : (dim) <= 3072 ? kernel<12, 32>                                                                                  \
     : (dim) <= 4096 ? kernel<16, 32>                                                                                  \
                     : kernel<8, 256>)

static void launch(const struct norm_job *job, bool forward)
{
    const int dim = MT_MAX(job->dim_q, job->dim_k), team = dim <= 128 ? 16 : dim <= 4096 ? 32 : 256;
    MT_REQUIRE(job->dim_q % 8 == 0 && job->dim_k % 8 == 0 && dim <= MAX_DIM,
               "a norm of %d and %d values: multiples of 8 up to 16384 are needed", job->dim_q, job->dim_k);
    if (job->n_tok == 0) return;
    MT_REQUIRE(job->n_tok * job->n_group < INT32_MAX, "a norm of %lld groups", (long long)(job->n_tok * job->n_group));
    const unsigned grid = grid_x(ceil_div(job->n_tok * job->n_group, BLOCK / team));
    if (forward)
        KERNEL_FOR(norm_fwd, dim)<<<grid, BLOCK, 0, cuda.stream>>>(*job);
    else
        KERNEL_FOR(norm_bwd, dim)<<<grid, BLOCK, 0, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
}

/* ---- ops */

static row_view<> norm_rows(struct tensor x) { return aligned_rows(x, "a norm"); }
static const float *norm_weight(struct tensor w) { return aligned_rows<float>(w, "a norm's weight").p; }

static struct norm_job rows_job(struct tensor x, struct tensor rstd, struct tensor w)
{
    struct norm_job job = {};
    job.n_tok = x.shape[0];
    job.n_group = job.n_q = job.n_qk = 1;
    job.dim_q = job.dim_k = (int)w.shape[0];
    job.wq = job.wk = job.wv = norm_weight(w);
    job.rstd = {f32_ptr(rstd), 1};
    job.x = norm_rows(x);
    return job;
}

extern "C" void cuda_rmsnorm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                                 struct tensor w, const struct norm *norm)
{
    struct norm_job job = rows_job(x, rstd, w);
    job.y = norm_rows(y);
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    launch(&job, true);
}

extern "C" void cuda_rmsnorm_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                 struct tensor rstd, struct tensor w)
{
    struct norm_job job = rows_job(x, rstd, w);
    job.dx = norm_rows(dx);
    job.dy = norm_rows(dy);
    job.accumulate = true;
    launch(&job, false);
}

/* A group is as wide as its weight. */
static struct norm_job heads_job(struct tensor qkv, struct tensor rstd, struct tensor wq, struct tensor wk,
                                 struct tensor wv, const struct attn_shape *shape)
{
    struct norm_job job = {};
    job.n_tok = qkv.shape[0];
    job.n_group = (int)rstd.shape[1];
    job.dim_q = (int)wq.shape[0];
    job.dim_k = (int)wk.shape[0];
    job.n_q = (int)(shape->n_head * shape->head_dim / wq.shape[0]);
    job.n_qk = job.n_q + (int)(shape->n_kv * shape->head_dim / wk.shape[0]);
    job.wq = norm_weight(wq);
    job.wk = norm_weight(wk);
    job.wv = wv.ndim ? norm_weight(wv) : NULL;
    job.rstd = rows_of<float>(rstd);
    return job;
}

extern "C" void cuda_qk_norm_fwd(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd,
                                 struct tensor wq, struct tensor wk, struct tensor wv, const struct attn_shape *shape,
                                 const struct norm *norm)
{
    struct norm_job job = heads_job(qkv, rstd, wq, wk, wv, shape);
    job.x = job.y = norm_rows(qkv);
    job.raw = norm_rows(raw);
    job.eps = norm->eps;
    job.round_twice = norm->round_twice;
    launch(&job, true);
}

extern "C" void cuda_qk_norm_bwd(struct device *dev, struct tensor dqkv, struct tensor raw, struct tensor rstd,
                                 struct tensor wq, struct tensor wk, struct tensor wv, const struct attn_shape *shape)
{
    struct norm_job job = heads_job(dqkv, rstd, wq, wk, wv, shape);
    job.x = norm_rows(raw);
    job.dx = job.dy = norm_rows(dqkv);
    launch(&job, false);
}
