/* amax.cu - the largest finite magnitude of each expert or of all experts, in one launch, and how many values are not
 * finite.
 *
 * Shapes:   x [E, out, in] bf16, f16 or f32; amax [E] or [1] f32, n_bad of the same shape, f64. E at most 65535.
 * Needs:    out * in a multiple of 8 and a 16-byte aligned x for 16-byte loads; other tensors are read a value at a
 *           time.
 * Grid:     [blocks, E] of 256 threads; a thread loads 4 times 8 values at a time, and does so repeatedly in a large x.
 *           Every block stores its result. The last block of an expert waits for the results of the expert's other
 *           blocks, which have started, as GPUs start blocks in the order of their indices, and combines them. No
 *           launch has to clear memory.
 * Bound:    each value read once -> memory bound.
 * Numerics: maximum of integers and sum of whole numbers, so the order of the blocks does not matter. */
#include "kernels/cuda/parts/vec8.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    VECTOR = 8,
    UNROLL = 4,
    PER_BLOCK = THREADS * UNROLL,
    MAX_EXPERTS = 65535,
    MAX_BLOCKS = 8192
};

/* The result of a block. The upper half of each word is the number of the launch: a word with the current number is
 * complete. */
static __device__ struct result {
    unsigned long long most, bad;
} results[MAX_EXPERTS + MAX_BLOCKS];

static __device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

/* The largest magnitude of v among the finite ones; values that are not finite are rare, and are counted. */
template <int N> static __device__ __forceinline__ void see(const float v[N], uint32_t &most, uint32_t &bad)
{
    uint32_t here = 0;
#pragma unroll
    for (int k = 0; k < N; k++) here = max(here, magnitude_bits(v[k]));
    if (here >= 0x7f800000u) {
        here = 0;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const uint32_t bits = magnitude_bits(v[k]);
            bad += bits >= 0x7f800000u;
            here = max(here, bits < 0x7f800000u ? bits : 0u);
        }
    }
    most = max(most, here);
}

static __device__ __forceinline__ void put_word(unsigned long long *to, uint32_t launch, uint32_t value)
{
    *(volatile unsigned long long *)to = (unsigned long long)launch << 32 | value;
}

static __device__ __forceinline__ uint32_t wait_word(const unsigned long long *from, uint32_t launch)
{
    unsigned long long word;
    do word = *(const volatile unsigned long long *)from;
    while (word >> 32 != launch);
    return (uint32_t)word;
}

/* Combines the results of all threads of a block; each thread gets the total. All threads call it; of_warp is in shared
 * memory. */
static __device__ __forceinline__ void combine(struct result of_warp[WARPS], uint32_t &most, unsigned long long &bad)
{
    most = __reduce_max_sync(0xffffffffu, most);
    bad = warp_sum(bad);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = {most, bad};
    __syncthreads();
    for (int i = 0; i < WARPS; i++) most = max(most, (uint32_t)of_warp[i].most);
    bad = 0;
    for (int i = 0; i < WARPS; i++) bad += of_warp[i].bad;
    __syncthreads();
}

/* The bits of positive floats compare like integers. */
template <typename T, bool VECTORS>
static __global__ void __launch_bounds__(THREADS)
    amax_kernel(float *amax, double *n_bad, const T *x, bool one_amax, int64_t n, uint32_t launch)
{
    __shared__ struct result of_warp[WARPS];
    const int64_t e = blockIdx.y, n_unit = VECTORS ? n / VECTOR : n;
    const T *from = x + e * n;
    uint32_t most = 0, bad = 0;
    for (int64_t start = (int64_t)blockIdx.x * PER_BLOCK + threadIdx.x; start < n_unit;
         start += (int64_t)gridDim.x * PER_BLOCK) {
        if (VECTORS) {
            struct vec8<T> in[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) /* beyond the end: the last values again, which are not used */
                in[u].load(from + min(start + u * THREADS, n_unit - 1) * VECTOR);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                float v[VECTOR];
                in[u].get(v);
                if (start + u * THREADS < n_unit) see<VECTOR>(v, most, bad);
            }
        } else {
            for (int64_t i = start; i < min(start + PER_BLOCK, n_unit); i += THREADS) {
                const float v = get_one(from + i);
                see<1>(&v, most, bad);
            }
        }
    }
    unsigned long long n_here = bad;
    combine(of_warp, most, n_here);
    if (threadIdx.x == 0) {
        struct result *to = &results[e * gridDim.x + blockIdx.x];
        put_word(&to->most, launch, most);
        put_word(&to->bad, launch, (uint32_t)n_here);
    }
    if (blockIdx.x < gridDim.x - 1 || (one_amax && blockIdx.y < gridDim.y - 1)) return;
    const struct result *of_blocks = &results[one_amax ? 0 : e * gridDim.x];
    const uint32_t n_block = one_amax ? gridDim.x * gridDim.y : gridDim.x;
    most = 0, n_here = 0;
    for (uint32_t i = threadIdx.x; i < n_block; i += THREADS) {
        most = max(most, wait_word(&of_blocks[i].most, launch));
        n_here += wait_word(&of_blocks[i].bad, launch);
    }
    combine(of_warp, most, n_here);
    if (threadIdx.x) return;
    amax[one_amax ? 0 : e] = __uint_as_float(most);
    n_bad[one_amax ? 0 : e] = (double)n_here;
}

static uint32_t n_launch;

template <typename T> static void launch(struct tensor amax, struct tensor n_bad, struct tensor x, const T *from)
{
    const int64_t n = x.shape[1] * x.shape[2], n_exp = x.shape[0];
    const bool one_amax = amax.shape[0] == 1, vectors = n % VECTOR == 0 && (uintptr_t)x.data % 16 == 0;
    const int64_t chunks = ceil_div(vectors ? n / VECTOR : n, PER_BLOCK), passes = ceil_div(chunks * n_exp, MAX_BLOCKS);
    MT_REQUIRE(n_exp <= MAX_EXPERTS, "%lld experts", (long long)n_exp);
    const dim3 grid(grid_x(ceil_div(chunks, passes)), (unsigned)n_exp);
    double *bad = (double *)n_bad.data;
    n_launch += n_launch < UINT32_MAX ? 1 : 2; /* not 0, which `results` has at first */
    const auto kernel = vectors ? amax_kernel<T, true> : amax_kernel<T, false>;
    kernel<<<grid, THREADS, 0, cuda.stream>>>(f32_ptr(amax), bad, from, one_amax, n, n_launch);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_amax(struct device *dev, struct tensor amax, struct tensor n_bad, struct tensor x)
{
    if (!amax.shape[0]) return;
    if (!tensor_count(x)) {
        CUDA_CHECK(cudaMemsetAsync(amax.data, 0, (size_t)tensor_bytes(amax), cuda.stream));
        CUDA_CHECK(cudaMemsetAsync(n_bad.data, 0, (size_t)tensor_bytes(n_bad), cuda.stream));
    } else {
        with_values(x, [&](const auto *from) { launch(amax, n_bad, x, from); });
    }
}
