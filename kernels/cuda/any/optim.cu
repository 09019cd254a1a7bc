/* optim.cu - optimizer kernels on the adapters' flat arrays: sum of squares, AdamW with moments of 32 or 8 bits, cast;
 *   sums of a step, kept on the device: loss, hits, KL, auxiliary loss, rows and gates of every expert.
 * Shapes: flat, n up to 2^40; sums: nll, hit, kl [N]; count, prob [E]; offs [E+1]; row_slot, gate [M]; added to f64.
 * Needs: 16-byte aligned arrays (sumsq also takes unaligned ones, one element at a time; adamw8 takes any).
 * Grid: sumsq one block per 65536 elements, then one block over their sums; adamw one thread per 4 values, cast per 8;
 *   loss_sum one block of 1024 threads, expert_sums one block of 128 per expert.
 * Bound: sumsq 4 n bytes (bf16: 2 n), adamw 28 n, adamw8 16 n, cast 6 n, add_in_order 8 n and 4 n a row: memory.
 * Numerics: squares and sums in f64, in an order that depends only on n and the alignment; AdamW in f32. */
#include "kernels/adamw8_code.h"
#include "kernels/adamw_value.h"
#include "kernels/cuda/parts/rows.cuh"

enum { BLOCK = 256, CHUNK = SQUARES_CHUNK };

static __device__ inline void add_square(struct square_sum *s, float v)
{
    s->sum += (double)v * (double)v;
    s->n_bad += !isfinite(v);
}

/* Sum over the block; thread 0 gets it. */
static __device__ inline struct square_sum block_total(struct square_sum s)
{
    __shared__ struct square_sum part[BLOCK / 32];
    s.sum = warp_sum(s.sum);
    s.n_bad = warp_sum(s.n_bad);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x) return s;
    for (int i = 1; i < BLOCK / 32; i++) {
        s.sum += part[i].sum;
        s.n_bad += part[i].n_bad;
    }
    return s;
}

static __device__ inline void load_piece(float v[8], const float *p) { load_f32x8(v, p); }
static __device__ inline void load_piece(float v[8], const bf16 *p) { unpack8(v, load16(p)); }
static __device__ inline float value(float v) { return v; }
static __device__ inline float value(bf16 v) { return __bfloat162float(v); }

/* One chunk of g per block. aligned: loads eight values at a time. */
template <typename T>
static __global__ void __launch_bounds__(BLOCK)
    sumsq_chunks(struct square_sum *out, const T *g, int64_t n, bool aligned)
{
    const int64_t first = (int64_t)blockIdx.x * CHUNK, left = n - first;
    const int count = (int)(left < CHUNK ? left : CHUNK), whole = aligned ? count / 8 * 8 : 0;
    struct square_sum s = {0, 0};
    g += first;
#pragma unroll 4
    for (int i = 8 * (int)threadIdx.x; i < whole; i += 8 * BLOCK) {
        float v[8];
        load_piece(v, g + i);
#pragma unroll
        for (int k = 0; k < 8; k++) add_square(&s, v[k]);
    }
    for (int i = whole + (int)threadIdx.x; i < count; i += BLOCK) add_square(&s, value(g[i]));
    s = block_total(s);
    if (threadIdx.x == 0) out[blockIdx.x] = s;
}

static __global__ void __launch_bounds__(BLOCK) sumsq_total(double *out, const struct square_sum *part, int64_t n)
{
    struct square_sum s = {0, 0};
    for (int64_t i = threadIdx.x; i < n; i += BLOCK) {
        s.sum += part[i].sum;
        s.n_bad += part[i].n_bad;
    }
    s = block_total(s);
    if (threadIdx.x) return;
    out[0] = s.sum;
    out[1] = (double)s.n_bad;
}

extern "C" void cuda_sumsq(struct device *dev, struct tensor out, struct tensor g)
{
    const int64_t n = tensor_count(g), n_chunk = ceil_div(n, CHUNK);
    struct square_sum *part = scratch_sumsq(dev, g);
    const bool aligned = (uintptr_t)g.data % 16 == 0;
    if (n_chunk && g.dtype == DT_BF16)
        sumsq_chunks<<<grid_x(n_chunk), BLOCK, 0, cuda.stream>>>(part, bf16_ptr(g), n, aligned);
    else if (n_chunk)
        sumsq_chunks<<<grid_x(n_chunk), BLOCK, 0, cuda.stream>>>(part, f32_ptr(g), n, aligned);
    CUDA_CHECK_LAUNCH();
    sumsq_total<<<1, BLOCK, 0, cuda.stream>>>((double *)out.data, part, n_chunk);
    CUDA_CHECK_LAUNCH();
}

static __global__ void __launch_bounds__(BLOCK) clear(float *x, int64_t ld, int64_t n, int64_t n_col)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) x[i / n_col * ld + i % n_col] = 0;
}

extern "C" void cuda_clear(struct device *dev, struct tensor x)
{
    const int64_t n = tensor_count(x);
    if (n == 0) return;
    clear<<<grid_x(ceil_div(n, BLOCK)), BLOCK, 0, cuda.stream>>>(f32_ptr(x), x.ld, n, x.shape[1]);
    CUDA_CHECK_LAUNCH();
}

template <typename T>
static __global__ void __launch_bounds__(BLOCK) add_in_order(T *y, const T *x, int64_t n, int64_t n_row)
{
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    T sum = y[i];
    for (int64_t p = 0; p < n_row; p++) sum += x[p * n + i];
    y[i] = sum;
}

extern "C" void cuda_add_in_order(struct device *dev, struct tensor y, struct tensor x)
{
    const int64_t n = y.shape[0];
    if (n == 0) return;
    const unsigned grid = grid_x(ceil_div(n, BLOCK));
    if (y.dtype == DT_F64)
        add_in_order<<<grid, BLOCK, 0, cuda.stream>>>((double *)y.data, (const double *)x.data, n, x.shape[0]);
    else
        add_in_order<<<grid, BLOCK, 0, cuda.stream>>>(f32_ptr(y), f32_ptr(x), n, x.shape[0]);
    CUDA_CHECK_LAUNCH();
}

/* ---- AdamW */

static __global__ void __launch_bounds__(BLOCK)
    adamw(float *p, float *m, float *v, const float *g, int64_t n, const struct adamw_step s)
{
    const int64_t i = 4 * ((int64_t)blockIdx.x * BLOCK + threadIdx.x);
    const float decay = adamw_decay(&s);
    if (i + 4 > n) {
        for (int64_t k = i; k < n; k++) adamw_value(p + k, m + k, v + k, g[k], &s, decay);
        return;
    }
    float4 p4 = *(const float4 *)(p + i), m4 = *(const float4 *)(m + i), v4 = *(const float4 *)(v + i);
    const float4 g4 = *(const float4 *)(g + i);
    adamw_value(&p4.x, &m4.x, &v4.x, g4.x, &s, decay);
    adamw_value(&p4.y, &m4.y, &v4.y, g4.y, &s, decay);
    adamw_value(&p4.z, &m4.z, &v4.z, g4.z, &s, decay);
    adamw_value(&p4.w, &m4.w, &v4.w, g4.w, &s, decay);
    *(float4 *)(p + i) = p4;
    *(float4 *)(m + i) = m4;
    *(float4 *)(v + i) = v4;
}

static bool flat_aligned(struct tensor x) { return (uintptr_t)x.data % 16 == 0; }

extern "C" void cuda_adamw(struct device *dev, struct tensor p, struct tensor m, struct tensor v, struct tensor g,
                           const struct adamw_step *step)
{
    const int64_t n = tensor_count(p);
    if (n == 0) return;
    MT_REQUIRE(flat_aligned(p) && flat_aligned(m) && flat_aligned(v) && flat_aligned(g),
               "an array of AdamW is not 16-byte aligned");
    adamw<<<grid_x(ceil_div(n, 4 * BLOCK)), BLOCK, 0, cuda.stream>>>(f32_ptr(p), f32_ptr(m), f32_ptr(v), f32_ptr(g), n,
                                                                     *step);
    CUDA_CHECK_LAUNCH();
}

/* ---- AdamW with moments of 8 bits: a warp has a block of values, a lane eight consecutive ones */

struct adamw8_job {
    float *p;
    const float *g;
    uint8_t *code[2];
    float *scale[2];
    const float *map;
    int64_t n;
    struct adamw_step step;
};

static __device__ inline float warp_most(float v)
{
    for (int lane = 16; lane; lane /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, lane));
    return v;
}

static __global__ void __launch_bounds__(BLOCK) adamw8(const struct adamw8_job job)
{
    __shared__ float map[2][256];
    const int64_t block = (int64_t)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    const int64_t first = block * ADAMW8_BLOCK + 8 * (threadIdx.x % 32);
    const int count = (int)(first >= job.n ? 0 : job.n - first < 8 ? job.n - first : 8);
    const float decay = adamw_decay(&job.step);
    for (int i = (int)threadIdx.x; i < 512; i += BLOCK) map[i / 256][i % 256] = job.map[i];
    __syncthreads();
    if (block * ADAMW8_BLOCK >= job.n) return;
    float state[2][8], most[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        const float scale = job.scale[k][block];
#pragma unroll
        for (int i = 0; i < 8; i++) state[k][i] = i < count ? map[k][job.code[k][first + i]] * scale : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) {
            float p = job.p[first + i];
            adamw_value(&p, &state[0][i], &state[1][i], job.g[first + i], &job.step, decay);
            job.p[first + i] = p;
            for (int k = 0; k < 2; k++) most[k] = fmaxf(most[k], fabsf(state[k][i]));
        }
    __syncwarp();
    for (int k = 0; k < 2; k++) {
        most[k] = adamw8_scale(warp_most(most[k]));
        if (threadIdx.x % 32 == 0) job.scale[k][block] = most[k];
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) job.code[k][first + i] = (uint8_t)adamw8_code(map[k], state[k][i], most[k]);
    }
}

extern "C" void cuda_adamw8(struct device *dev, struct tensor p, const struct adamw8_states *states, struct tensor g,
                            const struct adamw_step *step)
{
    struct adamw8_job job = {};
    if (dev->dry_run || p.shape[0] == 0) return;
    job.p = f32_ptr(p), job.g = f32_ptr(g), job.map = f32_ptr(states->map), job.n = p.shape[0], job.step = *step;
    for (int k = 0; k < 2; k++) {
        job.code[k] = (uint8_t *)states->code[k].data;
        job.scale[k] = f32_ptr(states->scale[k]);
    }
    adamw8<<<grid_x(ceil_div(job.n, ADAMW8_BLOCK * (BLOCK / 32))), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* ---- cast */

static __global__ void __launch_bounds__(BLOCK) cast(bf16 *dst, const float *src, int64_t n)
{
    const int64_t i = 8 * ((int64_t)blockIdx.x * BLOCK + threadIdx.x);
    if (i + 8 > n) {
        for (int64_t k = i; k < n; k++) dst[k] = __float2bfloat16_rn(src[k]);
        return;
    }
    float v[8];
    load_f32x8(v, src + i);
    store16(dst + i, pack8(v));
}

extern "C" void cuda_cast(struct device *dev, struct tensor dst, struct tensor src)
{
    const int64_t n = tensor_count(dst);
    if (n == 0) return;
    MT_REQUIRE(flat_aligned(dst) && flat_aligned(src), "an array of cast is not 16-byte aligned");
    cast<<<grid_x(ceil_div(n, 8 * BLOCK)), BLOCK, 0, cuda.stream>>>(bf16_ptr(dst), f32_ptr(src), n);
    CUDA_CHECK_LAUNCH();
}

/* ---- sums of a step */

enum { SUMS_BLOCK = 1024, EXPERT_BLOCK = 128 };

/* Sums over the block; the first warp gets them. All threads must call it, once. */
template <int THREADS = SUMS_BLOCK, int N> static __device__ inline void block_sums(double (&v)[N])
{
    __shared__ double part[N][THREADS / 32];
#pragma unroll
    for (int k = 0; k < N; k++) {
        v[k] = warp_sum(v[k]);
        if (threadIdx.x % 32 == 0) part[k][threadIdx.x / 32] = v[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N && threadIdx.x < 32; k++)
        v[k] = warp_sum(threadIdx.x < THREADS / 32 ? part[k][threadIdx.x] : 0);
}

static __global__ void __launch_bounds__(SUMS_BLOCK)
    loss_sum(double *out, const float *nll, const int32_t *hit, const float *kl, int64_t n)
{
    enum { AHEAD = 4 }; /* loads at a time */
    double sums[3] = {0, 0, 0};
    for (int64_t first = threadIdx.x; first < n; first += AHEAD * SUMS_BLOCK) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t i = first + k * SUMS_BLOCK;
            if (i >= n) continue;
            sums[0] += (double)nll[i];
            sums[1] += (double)hit[i];
            if (kl) sums[2] += (double)kl[i];
        }
    }
    block_sums(sums);
    if (threadIdx.x < 3) out[threadIdx.x] += threadIdx.x == 0 ? sums[0] : threadIdx.x == 1 ? sums[1] : sums[2];
}

static __global__ void __launch_bounds__(SUMS_BLOCK)
    aux_sum(double *out, const float *count, const float *prob, int64_t n_exp, double factor)
{
    double sum[1] = {0};
    for (int64_t i = threadIdx.x; i < n_exp; i += SUMS_BLOCK) sum[0] += (double)count[i] * (double)prob[i];
    block_sums(sum);
    if (threadIdx.x == 0) out[0] += factor * sum[0];
}

static __global__ void __launch_bounds__(EXPERT_BLOCK)
    expert_sums(double *rows, double *gates, const int32_t *offs, const int32_t *slot, const float *gate)
{
    const int e = (int)blockIdx.x;
    double sum[1] = {0};
    for (int i = offs[e] + (int)threadIdx.x; i < offs[e + 1]; i += EXPERT_BLOCK) sum[0] += (double)gate[slot[i]];
    block_sums<EXPERT_BLOCK>(sum);
    if (threadIdx.x) return;
    rows[e] += (double)(offs[e + 1] - offs[e]);
    gates[e] += sum[0];
}

extern "C" void cuda_loss_sum(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit,
                              struct tensor kl)
{
    if (nll.shape[0] == 0) return;
    loss_sum<<<1, SUMS_BLOCK, 0, cuda.stream>>>((double *)out.data, f32_ptr(nll), i32_ptr(hit),
                                                kl.ndim ? f32_ptr(kl) : NULL, nll.shape[0]);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_aux_sum(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    aux_sum<<<1, SUMS_BLOCK, 0, cuda.stream>>>((double *)out.data, f32_ptr(aux->count), f32_ptr(aux->prob),
                                               aux->count.shape[0], factor);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_expert_sums(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r)
{
    const int64_t n_exp = rows.shape[0];
    if (n_exp == 0) return;
    expert_sums<<<grid_x(n_exp), EXPERT_BLOCK, 0, cuda.stream>>>(
        (double *)rows.data, (double *)gates.data, i32_ptr(r->offs), i32_ptr(r->row_slot), f32_ptr(r->gate));
    CUDA_CHECK_LAUNCH();
}
