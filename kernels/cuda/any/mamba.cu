/* mamba.cu - the state space of Mamba-2, forward and backward, token by token (math: kernels/ops/recurrence.h,
 * kernels/cpu/mamba.c).
 *
 * The columns of a state S [A, B] do not depend on each other; nor do its rows. So a thread holds one column or one row
 * in registers, and no thread waits for another. With v = step x, p = <c, b>:
 *   columns   forward    w = e^g S^T c, S = e^g S + b v^T; y = w + p v + D x
 *             backward   u = E^T b without the token's own dy; E = e^g (E + c dy^T); dx = step (u + p dy) + D dy
 *   rows      forward    S, then dc = S dy;  backward   E + c dy^T, then db = (E + c dy^T) v
 *   tokens    db and dc are summed over the heads of a group; ds = <w, dy> - <v, u>; dstep = <u + p dy, x>
 *   gates     dstep -= exp(A_log) times the sum of ds over the tokens from this one on, inside the sequence
 * The op's forward is the first line, its backward runs all of them. Every document begins with a zero state, unless
 * decoding continues from the state of a slot.
 * Shapes: as in recurrence.h, bf16; w, u [T, N*B] and db, dc [T, N*A] f32 in scratch. T may be 0.
 * Needs: A and B at most 128, T N < 2^31.
 * Grid: a block per sequence and head, a thread per column (row), TILE tokens at a time through shared memory (at most
 *   24 KiB); tokens: a warp per token and group; gates: a block per sequence and head.
 * Bound: instruction issue, and too few blocks for few sequences and heads. Bytes: fwd 2 T (C + N B) bytes; bwd about
 *   8 T N (2 B + 2 A).
 * Numerics: f32 sums in a fixed order, bitwise repeatable. w and u lack the token itself, whose terms of ds cancel. */
#include "kernels/cuda/parts/seqs.cuh"
#include "kernels/cuda/parts/state_rows.cuh"

enum { TILE = 16, MAX_DIM = 128, SCAN = 256 };

struct mamba_job {
    int64_t n_tok;
    int n_head, head_dim, n_group, state; /* N, B, G, A */
    float dt_min, dt_max;
    const int32_t *cu;
    row_view<> xbc, dt, y, dy, dxbc, ddt;
    const float *a_log, *dt_bias, *d;
    float *w, *u;                    /* [T, N*B] */
    float *db, *dc;                  /* [T, N*A] */
    float *ds, *dstep;               /* [T, N] */
    struct state_view<float> states; /* decoding: [slots, N*A*B] */
};

/* The head of a block, and its columns. */
struct head {
    int64_t first, len;
    int n, x_col, b_col, c_col;
    float d;
};

static __device__ inline int b_column(const struct mamba_job &job, int group)
{
    return job.n_head * job.head_dim + group * job.state;
}

static __device__ inline struct head find_head(const struct mamba_job &job)
{
    const int n = (int)blockIdx.y, group = n / (job.n_head / job.n_group), b = b_column(job, group);
    const int64_t first = job.cu[blockIdx.x];
    return {first, job.cu[blockIdx.x + 1] - first, n, n * job.head_dim, b, b + job.n_group * job.state, job.d[n]};
}

/* The step of a token, and its derivative. */
static __device__ inline float step_of(float *slope, const struct mamba_job &job, int64_t t, int n)
{
    const float a = __bfloat162float(job.dt.at(t)[n]) + job.dt_bias[n], plus = softplus(a);
    const float step = plus < job.dt_min ? job.dt_min : plus > job.dt_max ? job.dt_max : plus; /* NaN stays */
    *slope = step == plus ? sigmoid(a) : 0;
    return step;
}

/* Steps, decays and p of n tokens from t on; p after b and c are in shared memory. */
static __device__ inline void load_steps(float *step, float *decay, const struct mamba_job &job, const struct head &h,
                                         int64_t t, int n)
{
    const int i = (int)threadIdx.x;
    float slope;
    if (i >= n) return;
    step[i] = step_of(&slope, job, t + i, h.n);
    decay[i] = expf(-expf(job.a_log[h.n]) * step[i]);
}

template <int DIM> static __device__ inline void load_p(float *p, const float (*b)[DIM], const float (*c)[DIM], int n)
{
    for (int i = (int)threadIdx.x / 32; i < n; i += (int)blockDim.x / 32) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < DIM / 32; e++) sum += b[i][threadIdx.x % 32 + 32 * e] * c[i][threadIdx.x % 32 + 32 * e];
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) p[i] = sum;
    }
}

/* Column c of the state of a head: row r is B values further. */
template <int DIM>
static __device__ inline void load_column(float s[DIM], const struct mamba_job &job, const struct head &h)
{
    const int c = (int)threadIdx.x;
    const float *from = state_before(job.states, job.cu, (int)blockIdx.x);
    if (from == NULL || c >= job.head_dim) return;
#pragma unroll
    for (int r = 0; r < DIM; r++)
        if (r < job.state) s[r] = from[((int64_t)h.n * job.state + r) * job.head_dim + c];
}
template <int DIM>
static __device__ inline void store_column(const float s[DIM], const struct mamba_job &job, const struct head &h)
{
    const int c = (int)threadIdx.x;
    if (h.len == 0 || c >= job.head_dim) return;
    float *to = state_row(job.states, (int)blockIdx.x);
#pragma unroll
    for (int r = 0; r < DIM; r++)
        if (r < job.state) to[((int64_t)h.n * job.state + r) * job.head_dim + c] = s[r];
}

/* y; w for the backward; or y from the states of decoding on, which it updates. */
enum columns { COLUMNS_Y, COLUMNS_W, COLUMNS_DECODE };
template <int DIM, enum columns WHAT>
static __global__ void __launch_bounds__(MAX_DIM) columns_fwd(const struct mamba_job job)
{
    __shared__ __align__(16) float b[TILE][DIM], c[TILE][DIM], x[TILE][DIM];
    __shared__ float step[TILE], decay[TILE], p[TILE];
    const struct head h = find_head(job);
    const int e = (int)threadIdx.x;
    float s[DIM] = {0};
    if (WHAT == COLUMNS_DECODE) load_column<DIM>(s, job, h);
    for (int64_t at = 0; at < h.len; at += TILE) {
        const int64_t t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        load_rows<DIM>(b, job.xbc.p + h.b_col, job.xbc.ld, t, n, job.state, (const float *)NULL);
        load_rows<DIM>(c, job.xbc.p + h.c_col, job.xbc.ld, t, n, job.state, (const float *)NULL);
        load_rows<DIM>(x, job.xbc.p + h.x_col, job.xbc.ld, t, n, job.head_dim, (const float *)NULL);
        load_steps(step, decay, job, h, t, n);
        __syncthreads();
        load_p<DIM>(p, b, c, n);
        __syncthreads();
        if (e >= job.head_dim) continue;
        for (int i = 0; i < n; i++) {
            const float w = decay[i] * dot<DIM>(s, c[i]), v = step[i] * x[i][e];
            update<DIM>(s, decay[i], b[i], v);
            if (WHAT == COLUMNS_W)
                job.w[(t + i) * job.n_head * job.head_dim + h.x_col + e] = w;
            else
                job.y.at(t + i)[h.x_col + e] = __float2bfloat16_rn(w + (p[i] * v + h.d * x[i][e]));
        }
    }
    if (WHAT == COLUMNS_DECODE) store_column<DIM>(s, job, h);
}

/* u and dx. */
template <int DIM> static __global__ void __launch_bounds__(MAX_DIM) columns_bwd(const struct mamba_job job)
{
    __shared__ __align__(16) float b[TILE][DIM], c[TILE][DIM], dy[TILE][DIM];
    __shared__ float step[TILE], decay[TILE], p[TILE];
    const struct head h = find_head(job);
    const int e = (int)threadIdx.x;
    float s[DIM] = {0};
    for (int64_t at = (h.len - 1) / TILE * TILE; at >= 0 && h.len > 0; at -= TILE) {
        const int64_t t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        load_rows<DIM>(b, job.xbc.p + h.b_col, job.xbc.ld, t, n, job.state, (const float *)NULL);
        load_rows<DIM>(c, job.xbc.p + h.c_col, job.xbc.ld, t, n, job.state, (const float *)NULL);
        load_rows<DIM>(dy, job.dy.p + h.x_col, job.dy.ld, t, n, job.head_dim, (const float *)NULL);
        load_steps(step, decay, job, h, t, n);
        __syncthreads();
        load_p<DIM>(p, b, c, n);
        __syncthreads();
        if (e >= job.head_dim) continue;
        for (int i = n - 1; i >= 0; i--) {
            const float u = dot<DIM>(s, b[i]), d = dy[i][e];
            job.u[(t + i) * job.n_head * job.head_dim + h.x_col + e] = u;
            job.dxbc.at(t + i)[h.x_col + e] = __float2bfloat16_rn(step[i] * (u + p[i] * d) + h.d * d);
            update<DIM>(s, decay[i], c[i], decay[i] * d);
        }
    }
}

/* dc of the head: rows of S times dy. db: rows of E times v. */
template <int DIM, bool BACK> static __global__ void __launch_bounds__(MAX_DIM) rows(const struct mamba_job job)
{
    __shared__ __align__(16) float v[TILE][DIM], dy[TILE][DIM], in[TILE][DIM];
    __shared__ float step[TILE], decay[TILE];
    const struct head h = find_head(job);
    const int r = (int)threadIdx.x;
    const int64_t n_tile = (h.len + TILE - 1) / TILE;
    float s[DIM] = {0};
    for (int64_t k = 0; k < n_tile; k++) {
        const int64_t at = (BACK ? n_tile - 1 - k : k) * TILE, t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        load_steps(step, decay, job, h, t, n);
        __syncthreads();
        load_rows<DIM>(v, job.xbc.p + h.x_col, job.xbc.ld, t, n, job.head_dim, (const float *)step);
        load_rows<DIM>(dy, job.dy.p + h.x_col, job.dy.ld, t, n, job.head_dim, (const float *)NULL);
        load_rows<DIM>(in, job.xbc.p + (BACK ? h.c_col : h.b_col), job.xbc.ld, t, n, job.state, (const float *)NULL);
        __syncthreads();
        if (r >= job.state) continue;
        for (int j = 0; j < n; j++) {
            const int i = BACK ? n - 1 - j : j;
            const int64_t out = ((t + i) * job.n_head + h.n) * job.state + r;
            update<DIM>(s, BACK ? 1 : decay[i], BACK ? dy[i] : v[i], in[i][r]);
            (BACK ? job.db : job.dc)[out] = dot<DIM>(s, BACK ? v[i] : dy[i]);
#pragma unroll
            for (int k = 0; BACK && k < DIM; k++) s[k] *= decay[i];
        }
    }
}

/* A warp per token and group: db and dc of the op; ds, dstep of its heads. */
template <int DIM> static __global__ void __launch_bounds__(128) tokens(const struct mamba_job job)
{
    const int64_t i = (int64_t)blockIdx.x * 4 + threadIdx.x / 32, t = i / job.n_group;
    const int group = (int)(i % job.n_group), heads = job.n_head / job.n_group, b = b_column(job, group);
    float of_b[DIM / 32], of_c[DIM / 32], sum_b[DIM / 32] = {0}, sum_c[DIM / 32] = {0};
    float x[DIM / 32], dy[DIM / 32], w[DIM / 32], u[DIM / 32];
    if (t >= job.n_tok) return;
    lane_load<DIM>(of_b, job.xbc.at(t) + b, job.state);
    lane_load<DIM>(of_c, job.xbc.at(t) + b + job.n_group * job.state, job.state);
    const float p = lane_dot<DIM / 32>(of_b, of_c);
    for (int n = group * heads; n < (group + 1) * heads; n++) {
        const int64_t head = t * job.n_head + n;
        float slope;
        const float step = step_of(&slope, job, t, n);
        lane_load<DIM>(of_b, job.db + head * job.state, job.state);
        lane_load<DIM>(of_c, job.dc + head * job.state, job.state);
        lane_load<DIM>(x, job.xbc.at(t) + n * job.head_dim, job.head_dim);
        lane_load<DIM>(dy, job.dy.at(t) + n * job.head_dim, job.head_dim);
        lane_load<DIM>(w, job.w + head * job.head_dim, job.head_dim);
        lane_load<DIM>(u, job.u + head * job.head_dim, job.head_dim);
#pragma unroll
        for (int e = 0; e < DIM / 32; e++) sum_b[e] += of_b[e], sum_c[e] += of_c[e];
        const float ux = lane_dot<DIM / 32>(u, x), ds = lane_dot<DIM / 32>(w, dy) - step * ux;
        const float dstep = ux + p * lane_dot<DIM / 32>(dy, x);
        if (threadIdx.x % 32 == 0) job.ds[head] = ds, job.dstep[head] = dstep;
    }
    bf16 *out = job.dxbc.at(t) + b;
#pragma unroll
    for (int e = 0; e < DIM / 32; e++) {
        const int c = (int)(threadIdx.x % 32) + 32 * e;
        if (c >= job.state) continue;
        out[c] = __float2bfloat16_rn(sum_b[e]);
        out[job.n_group * job.state + c] = __float2bfloat16_rn(sum_c[e]);
    }
}

/* A block per sequence and head, from the last token to the first. */
static __global__ void __launch_bounds__(SCAN) gates_bwd(const struct mamba_job job)
{
    __shared__ float part[SCAN / 32];
    const struct head h = find_head(job);
    float carry = 0, slope;
    for (int64_t end = h.len; end > 0; end -= SCAN) {
        const int64_t at = end - 1 - (int64_t)threadIdx.x, t = h.first + at;
        const float sum = sum_before<SCAN>(at >= 0 ? job.ds[t * job.n_head + h.n] : 0, part, &carry);
        if (at < 0) continue;
        step_of(&slope, job, t, h.n);
        const float dstep = job.dstep[t * job.n_head + h.n] - expf(job.a_log[h.n]) * sum;
        job.ddt.at(t)[h.n] = __float2bfloat16_rn(slope * dstep);
    }
}

/* ---- ops ---- */

static struct mamba_job job_of(struct tensor xbc, struct tensor dt, const struct seqs *seqs, const struct mamba *m)
{
    struct mamba_job job = {};
    MT_REQUIRE(m->head_dim <= MAX_DIM && m->state <= MAX_DIM && m->n_head <= 65535,
               "Mamba-2: heads of %lld, states of %lld; the CUDA kernels take up to %d", (long long)m->head_dim,
               (long long)m->state, MAX_DIM);
    job.n_tok = xbc.shape[0];
    job.n_head = (int)m->n_head, job.head_dim = (int)m->head_dim;
    job.n_group = (int)m->n_group, job.state = (int)m->state;
    job.dt_min = m->dt_min, job.dt_max = m->dt_max;
    job.cu = i32_ptr(seqs->cu);
    job.xbc = rows_of(xbc), job.dt = rows_of(dt);
    job.a_log = f32_ptr(m->a_log), job.dt_bias = f32_ptr(m->dt_bias), job.d = f32_ptr(m->d);
    return job;
}

/* The instance whose threads hold the wider of a row and a column. */
#define LAUNCH(kernel, job, grid, threads)                                                                             \
    do {                                                                                                               \
        const int mamba_dim = MT_MAX((job).state, (job).head_dim);                                                     \
        if (mamba_dim <= 32)                                                                                           \
            kernel(32)<<<grid, threads, 0, cuda.stream>>>(job);                                                        \
        else if (mamba_dim <= 64)                                                                                      \
            kernel(64)<<<grid, threads, 0, cuda.stream>>>(job);                                                        \
        else                                                                                                           \
            kernel(128)<<<grid, threads, 0, cuda.stream>>>(job);                                                       \
        CUDA_CHECK_LAUNCH();                                                                                           \
    } while (0)
#define OUTPUTS(dim)  columns_fwd<dim, COLUMNS_Y>
#define DECODE(dim)   columns_fwd<dim, COLUMNS_DECODE>
#define INSIDE(dim)   columns_fwd<dim, COLUMNS_W>
#define COLUMNS(dim)  columns_bwd<dim>
#define ROWS(dim)     rows<dim, false>
#define ROWS_BWD(dim) rows<dim, true>
#define TOKENS(dim)   tokens<dim>

static unsigned threads_of(int dim) { return (unsigned)(ceil_div(dim, 32) * 32); }

extern "C" void cuda_mamba_fwd(struct device *, struct tensor y, struct tensor xbc, struct tensor dt,
                               const struct seqs *seqs, const struct mamba *m)
{
    if (xbc.shape[0] == 0) return;
    struct mamba_job job = job_of(xbc, dt, seqs, m);
    const dim3 grid(grid_x(seqs->n_seq), (unsigned)m->n_head);
    job.y = rows_of(y);
    LAUNCH(OUTPUTS, job, grid, threads_of(job.head_dim));
}

extern "C" void cuda_mamba_decode(struct device *, struct tensor y, struct tensor xbc, struct tensor dt,
                                  const struct states *states, const struct mamba *m)
{
    if (xbc.shape[0] == 0) return;
    struct mamba_job job = job_of(xbc, dt, states->seqs, m);
    const dim3 grid(grid_x(states->seqs->n_seq), (unsigned)m->n_head);
    job.y = rows_of(y);
    job.states = states_of<float>(states);
    LAUNCH(DECODE, job, grid, threads_of(job.head_dim));
}

extern "C" void cuda_mamba_bwd(struct device *dev, struct tensor dxbc, struct tensor ddt, struct tensor dy,
                               struct tensor xbc, struct tensor dt, const struct seqs *seqs, const struct mamba *m)
{
    const int64_t n_tok = xbc.shape[0];
    const struct scratch_mamba s = scratch_mamba(dev, xbc, m);
    if (n_tok == 0) return;
    struct mamba_job job = job_of(xbc, dt, seqs, m);
    const dim3 grid(grid_x(seqs->n_seq), (unsigned)m->n_head);
    job.w = f32_ptr(s.w), job.u = f32_ptr(s.u), job.db = f32_ptr(s.db), job.dc = f32_ptr(s.dc);
    job.ds = f32_ptr(s.ds), job.dstep = f32_ptr(s.dstep);
    job.dy = rows_of(dy), job.dxbc = rows_of(dxbc), job.ddt = rows_of(ddt);
    LAUNCH(INSIDE, job, grid, threads_of(job.head_dim));
    LAUNCH(COLUMNS, job, grid, threads_of(job.head_dim));
    LAUNCH(ROWS, job, grid, threads_of(job.state));
    LAUNCH(ROWS_BWD, job, grid, threads_of(job.state));
    LAUNCH(TOKENS, job, grid_x(ceil_div(n_tok * m->n_group, 4)), 128);
    gates_bwd<<<grid, SCAN, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
