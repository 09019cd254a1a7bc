/* mamba.cu - the state space of Mamba-2 in decoding, token by token (math: kernels/ops/recurrence.h).
 *
 * The columns of a state S [A, B] do not depend on each other. So a thread holds one column in registers, and no thread
 * waits for another. With v = step x, p = <c, b>, w = e^g S^T c:  S = e^g S + b v^T;  y = w + p v + D x.
 * Shapes: as in recurrence.h, bf16; the states of slots f32. T may be 0.
 * Needs: A and B at most 128.
 * Grid: a block per sequence and head, a thread per column, TILE tokens at a time through shared memory (24 KiB).
 * Bound: the states, 8 N A B bytes per sequence; for many tokens instruction issue.
 * Numerics: f32 sums in a fixed order. */
#include "kernels/cuda/parts/mamba.cuh"

enum { TILE = 16, MAX_DIM = 128 };

struct head {
    int64_t first, len;
    int n, x_col, b_col, c_col;
    float d;
};

static __device__ inline struct head find_head(const struct mamba_job &job)
{
    const int n = (int)blockIdx.y, b = mamba_b_column(job, n / (job.n_head / job.n_group));
    const int64_t first = job.cu[blockIdx.x];
    return {first, job.cu[blockIdx.x + 1] - first, n, n * job.head_dim, b, b + job.n_group * job.state, job.d[n]};
}

/* Steps, decays and p of n tokens from t on; p after b and c are in shared memory. */
static __device__ inline void load_steps(float *step, float *decay, const struct mamba_job &job, const struct head &h,
                                         int64_t t, int n)
{
    const int i = (int)threadIdx.x;
    float slope;
    if (i >= n) return;
    step[i] = mamba_step(&slope, job, t + i, h.n);
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
    const float *from = state_before(job.kept, job.cu, (int)blockIdx.x);
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
    float *to = state_row(job.kept, (int)blockIdx.x);
#pragma unroll
    for (int r = 0; r < DIM; r++)
        if (r < job.state) to[((int64_t)h.n * job.state + r) * job.head_dim + c] = s[r];
}

template <int DIM> static __global__ void __launch_bounds__(MAX_DIM) decode(const struct mamba_job job)
{
    __shared__ __align__(16) float b[TILE][DIM], c[TILE][DIM], x[TILE][DIM];
    __shared__ float step[TILE], decay[TILE], p[TILE];
    const struct head h = find_head(job);
    const int e = (int)threadIdx.x;
    float s[DIM] = {0};
    load_column<DIM>(s, job, h);
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
            job.y.at(t + i)[h.x_col + e] = __float2bfloat16_rn(w + (p[i] * v + h.d * x[i][e]));
        }
    }
    store_column<DIM>(s, job, h);
}

extern "C" void cuda_mamba_decode(struct device *, struct tensor y, struct tensor xbc, struct tensor dt,
                                  const struct states *states, const struct mamba *m)
{
    if (xbc.shape[0] == 0) return;
    struct mamba_job job = mamba_job_of(xbc, dt, states->seqs, m);
    const dim3 grid(grid_x(states->seqs->n_seq), (unsigned)m->n_head);
    const unsigned threads = (unsigned)(ceil_div(job.head_dim, 32) * 32);
    const int dim = MT_MAX(job.state, job.head_dim);
    job.y = rows_of(y);
    job.kept = states_of<float>(states);
    if (dim <= 32)
        decode<32><<<grid, threads, 0, cuda.stream>>>(job);
    else if (dim <= 64)
        decode<64><<<grid, threads, 0, cuda.stream>>>(job);
    else
        decode<128><<<grid, threads, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
