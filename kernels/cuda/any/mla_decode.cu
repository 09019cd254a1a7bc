/* mla_decode.cu - latent attention without expanding keys and values.
 * Math: y[t,h] = M_h[:N]^T q[t,h,:N] | q[t,h,N:], times the factor of the position; o[t,h] = M_h[N:] z[t,h]; M = W +
 *   scale B A of kv_b. The adapter is applied as two products of width R.
 * Shapes: q [T, H(N+G)], y [T, H(L+G)], z [T, H L], o [T, H V] bf16 (views); W [H(N+V), L] bf16, decoded first where it
 *   is packed; A [R, L], B [H(N+V), R] bf16; pos [T] i32. T may be 0.
 * Needs: N and R at most 256, L at most 576.
 * Grid: absorb: a block per head, 128 columns of the latent and TOKENS tokens, a thread per column. values: a block per
 *   head, ROWS value columns and TOKENS tokens; a warp per value column, its lanes along the latent.
 * Bound: bytes of W, once per TOKENS tokens; with many tokens f32 instructions.
 * Numerics: f32 sums in a fixed order, which does not depend on the other tokens; one rounding at the end. */
#include "kernels/cuda/parts/rows.cuh"

enum { TOKENS = 8, COLS = 128, ROWS = 32, WARPS = 8, NARROW = 256, LATENT = 576 };

struct latent_job {
    row_view<> in, out, w, a, b; /* a, b: of the adapter, with r > 0 */
    const int32_t *pos;
    int64_t n_tok;
    int n_in, nope, rope, value, r, n_tile; /* n_tile: blocks per head and TOKENS tokens */
    float scale, beta;
    int beta_len;
};

static __device__ inline float factor_of(const struct latent_job &job, int64_t t)
{
    return job.beta > 0 ? 1 + job.beta * logf(1 + (float)(job.pos[t] / job.beta_len)) : 1;
}

/* rows[i] = n values of token t + i from column col on; 0 beyond the last token. */
template <int WIDTH>
static __device__ inline void load_tokens(float (*rows)[WIDTH], const struct latent_job &job, int64_t t, int64_t col,
                                          int n)
{
    for (int i = (int)threadIdx.x; i < TOKENS * n; i += (int)blockDim.x) {
        const int64_t row = t + i / n;
        rows[i / n][i % n] = row < job.n_tok ? __bfloat162float(job.in.at(row)[col + i % n]) : 0;
    }
}

static __global__ void __launch_bounds__(COLS) absorb(const struct latent_job job)
{
    __shared__ float q[TOKENS][NARROW], u[TOKENS][NARROW];
    const int h = (int)blockIdx.x / job.n_tile, tile = (int)blockIdx.x % job.n_tile;
    const int col = tile * COLS + (int)threadIdx.x;
    const int64_t t = (int64_t)blockIdx.y * TOKENS, row = (int64_t)h * (job.nope + job.value);
    const int64_t from = (int64_t)h * (job.nope + job.rope), to = (int64_t)h * (job.n_in + job.rope);
    const int n = (int)MT_MIN((int64_t)TOKENS, job.n_tok - t);
    float sum[TOKENS] = {0};
    load_tokens<NARROW>(q, job, t, from, job.nope);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < TOKENS * job.r; i += COLS) {
        float s = 0;
        for (int k = 0; k < job.nope; k++) s += q[i / job.r][k] * __bfloat162float(job.b.at(row + k)[i % job.r]);
        u[i / job.r][i % job.r] = job.scale * s;
    }
    __syncthreads();
    for (int k = 0; k < job.nope && col < job.n_in; k++) {
        const float w = __bfloat162float(job.w.at(row + k)[col]);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) sum[i] += q[i][k] * w;
    }
    for (int k = 0; k < job.r && col < job.n_in; k++) {
        const float a = __bfloat162float(job.a.at(k)[col]);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) sum[i] += u[i][k] * a;
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
        if (i < n && col < job.n_in) job.out.at(t + i)[to + col] = __float2bfloat16_rn(factor_of(job, t + i) * sum[i]);
    for (int i = (int)threadIdx.x; i < n * job.rope && tile == 0; i += COLS) {
        const int64_t token = t + i / job.rope;
        const float x = __bfloat162float(job.in.at(token)[from + job.nope + i % job.rope]);
        job.out.at(token)[to + job.n_in + i % job.rope] = __float2bfloat16_rn(factor_of(job, token) * x);
    }
}

/* sum[i] += <x, rows[i]>, complete in every lane. */
template <int WIDTH>
static __device__ inline void dot_tokens(float sum[TOKENS], const bf16 *x, const float (*rows)[WIDTH], int n)
{
    float part[TOKENS] = {0};
    for (int c = (int)threadIdx.x % 32; c < n; c += 32) {
        const float v = __bfloat162float(x[c]);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) part[i] += rows[i][c] * v;
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++) sum[i] += warp_sum(part[i]);
}

static __global__ void __launch_bounds__(32 * WARPS) values(const struct latent_job job)
{
    __shared__ float z[TOKENS][LATENT], u[TOKENS][NARROW];
    const int h = (int)blockIdx.x / job.n_tile, first = (int)blockIdx.x % job.n_tile * ROWS;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, end = min(first + ROWS, job.value);
    const int64_t t = (int64_t)blockIdx.y * TOKENS, row = (int64_t)h * (job.nope + job.value) + job.nope;
    const int n = (int)MT_MIN((int64_t)TOKENS, job.n_tok - t);
    load_tokens<LATENT>(z, job, t, (int64_t)h * job.n_in, job.n_in);
    __syncthreads();
    for (int k = warp; k < job.r; k += WARPS) {
        float sum[TOKENS] = {0};
        dot_tokens<LATENT>(sum, job.a.at(k), z, job.n_in);
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
            if (lane == i) u[i][k] = job.scale * sum[i];
    }
    __syncthreads();
    for (int c = first + warp; c < end; c += WARPS) {
        float sum[TOKENS] = {0};
        dot_tokens<LATENT>(sum, job.w.at(row + c), z, job.n_in);
        if (job.r) dot_tokens<NARROW>(sum, job.b.at(row + c), u, job.r);
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
            if (lane == i && i < n) job.out.at(t + i)[(int64_t)h * job.value + c] = __float2bfloat16_rn(sum[i]);
    }
}

/* The arguments of both kernels. Decodes kv_b into scratch if it is not in bf16, or is fake-quantised. */
static struct latent_job job_of(struct device *dev, struct tensor out, struct tensor in, const struct proj *kv_b,
                                const struct mla_shape *s)
{
    const struct lora *l = &kv_b->lora;
    const struct tensor dense = scratch_latent(dev, kv_b);
    struct latent_job job = {};
    MT_REQUIRE(kv_b->w.n_in <= LATENT && s->nope <= NARROW && l->r <= NARROW,
               "latents of %lld, heads of %lld, an adapter of rank %lld", (long long)kv_b->w.n_in, (long long)s->nope,
               (long long)l->r);
    cuda_fill_dense(dense, kv_b);
    job.in = rows_of(in), job.out = rows_of(out), job.w = rows_of(dense);
    job.n_tok = in.shape[0];
    job.n_in = (int)kv_b->w.n_in;
    job.nope = (int)s->nope, job.rope = (int)s->rope, job.value = (int)s->value;
    job.beta = s->beta, job.beta_len = (int)s->beta_len;
    if (l->r == 0 || l->merged) return job;
    job.a = rows_of(l->a), job.b = rows_of(l->b);
    job.r = (int)l->r;
    job.scale = l->scale[0];
    return job;
}

static dim3 grid_of(const struct latent_job *job, int64_t n_head)
{
    const int64_t batches = ceil_div(job->n_tok, TOKENS);
    MT_REQUIRE(batches <= 65535, "%lld tokens in a pass", (long long)job->n_tok);
    return dim3(grid_x(n_head * job->n_tile), (unsigned)batches);
}

extern "C" void cuda_mla_absorb(struct device *dev, struct tensor y, struct tensor q, struct tensor pos,
                                const struct proj *kv_b, const struct mla_shape *shape)
{
    struct latent_job job = job_of(dev, y, q, kv_b, shape);
    if (q.shape[0] == 0) return;
    job.pos = i32_ptr(pos);
    job.n_tile = (int)ceil_div(job.n_in, COLS);
    absorb<<<grid_of(&job, shape->n_head), COLS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_mla_values(struct device *dev, struct tensor o, struct tensor z, const struct proj *kv_b,
                                const struct mla_shape *shape)
{
    struct latent_job job = job_of(dev, o, z, kv_b, shape);
    if (z.shape[0] == 0) return;
    job.n_tile = (int)ceil_div(job.value, ROWS);
    values<<<grid_of(&job, shape->n_head), 32 * WARPS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
