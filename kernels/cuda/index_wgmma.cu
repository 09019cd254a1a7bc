/* index_wgmma.cu - the scores of the indexer on Hopper, 64 heads of 128. Contract and scratch: index.cu.
 * Grid: a block has 256 entries and 16 tokens. Each of its 2 warpgroups keeps the rows of 2 x 64 entries in registers
 * as operands a of wgmma (m64n64k16) and multiplies them by the 64 heads of one token after the other, which arrive in
 *   shared memory by cp.async, 2 x 16 KiB. 2 blocks per multiprocessor: the sums of one warpgroup overlap with products
 *   of the others.
 * Numerics: f32 sums in a fixed order. */
#include "kernels/cuda/index.cuh"
#include "kernels/cuda/sm90.cuh"

enum { GROUPS = 2, TILES = INDEX_ENTRIES / GROUPS / 64, THREADS = GROUPS * 128, HALF = INDEX_HEADS * 128 };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The heads of one token: columns 0 .. 63 of all, then 64 .. 127, as swizzled tiles; then their weights. */
struct __align__(1024) stage
{
    unsigned char q[2 * HALF];
    bf16 w[INDEX_HEADS];
};

static __device__ inline void copy_token(struct stage *s, const struct index_job &job, int64_t t)
{
    const bf16 *q = job.q + t * job.ld_q, *w = job.w + t * job.ld_w;
#pragma unroll
    for (int i = threadIdx.x; i < INDEX_HEADS * (INDEX_DIM / 8); i += THREADS) {
        const int head = i / (INDEX_DIM / 8), chunk = i % (INDEX_DIM / 8);
        cp_async_16(sm90_shared(s->q) + chunk / 8 * HALF + sm90_swizzle(head, chunk % 8), q + i * 8, true);
    }
    if (threadIdx.x < INDEX_HEADS / 8) cp_async_16(sm90_shared(s->w + threadIdx.x * 8), w + threadIdx.x * 8, true);
}

/* sum: of 64 entries, the part of the heads of this lane. All warps of the warpgroup call it. */
static __device__ inline void score_tile(float sum[2], const uint32_t (&a)[INDEX_STEPS][4], const struct stage *s)
{
    float d[INDEX_HEADS / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < INDEX_STEPS; k++)
        wgmma<false>(d, a[k], sm90_descriptor(sm90_shared(s->q) + k / 4 * HALF + k % 4 * 32, 16, 1024), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(d);
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < INDEX_HEADS / 8; i++)
        index_add(sum, d + 4 * i, *(const uint32_t *)(s->w + i * 8 + threadIdx.x % 4 * 2));
}

static __device__ inline void score_tokens(struct stage stages[2], const struct index_job &job, int64_t start,
                                           int first, int64_t begin, int64_t end)
{
    uint32_t a[TILES][INDEX_STEPS][4];
    const int own = first + threadIdx.x / 128 * TILES * 64, row = threadIdx.x % 128 / 32 * 16;
    copy_token(&stages[0], job, begin);
    copy_commit();
#pragma unroll
    for (int m = 0; m < TILES; m++) index_rows(a[m], job, start / job.ratio + own + m * 64 + row);
    for (int64_t t = begin; t < end; t++) {
        const struct stage *s = &stages[(t - begin) % 2];
        if (t + 1 < end) copy_token(&stages[(t + 1 - begin) % 2], job, t + 1);
        copy_commit();
        copy_wait<1>();
        fence_proxy_async();
        __syncthreads();
        const int64_t n = (t - start + 1) / job.ratio;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            float sum[2];
            if (own + m * 64 >= n) break; /* the whole warpgroup */
            score_tile(sum, a[m], s);
            index_write(job, sum, t, own + m * 64 + row, m);
        }
        __syncthreads();
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 2) index_scores_wgmma_kernel(const struct index_job job)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ struct stage stages[2];
    index_walk(job, [&](int64_t start, int first, int64_t begin, int64_t end) {
        score_tokens(stages, job, start, first, begin, end);
    });
#else
    __trap();
#endif
}

void index_scores_wgmma(const struct index_job *job)
{
    index_scores_wgmma_kernel<<<index_grid(job), THREADS, 0, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
}
