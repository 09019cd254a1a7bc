/* loss.cuh - what the loss heads share: groups of logits, rows that move between the labelled tokens and a chunk. */
#ifndef MT_CUDA_LOSS_H
#define MT_CUDA_LOSS_H

#include <float.h>

#include "kernels/cuda/parts/rows.cuh"

enum { THREADS = HEAD_THREADS, WARPS = THREADS / 32, VECTOR = HEAD_VECTOR, MOVE_THREADS = 128 };

#define LOG2_E 1.44269504f

/* Columns 8g .. 8g+7 of a row of n logits; -inf beyond its end. The row is padded to whole groups. */
static __device__ __forceinline__ void load_group(float v[VECTOR], const float *row, int g, int n)
{
    float x[VECTOR];
    load_f32x8(x, row + g * VECTOR);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) v[j] = g * VECTOR + j < n ? x[j] : -INFINITY;
}

/* The derivative of a capped logit z with respect to the logit before the cap; inv_cap 0: no cap. */
static __device__ __forceinline__ float cap_slope(float z, float inv_cap)
{
    return inv_cap != 0 ? fmaf(-z * inv_cap, z * inv_cap, 1.0f) : 1.0f;
}

/* v of the lane whose number differs in the bit `step`. */
template <typename T> static __device__ __forceinline__ T other_lane(T v, int step)
{
    static_assert(sizeof(T) % sizeof(int) == 0, "whole words");
    int word[sizeof(T) / sizeof(int)];
    memcpy(word, &v, sizeof(v));
#pragma unroll
    for (int i = 0; i < (int)MT_LEN(word); i++) word[i] = __shfl_xor_sync(~0u, word[i], step);
    memcpy(&v, word, sizeof(v));
    return v;
}
/* Merges v of all threads of the block, in a fixed order; every thread gets the result. All threads call, any number of
 * times. */
template <typename T, typename MERGE> static __device__ __forceinline__ T merge_block(T v, const MERGE &merge)
{
    __shared__ T part[WARPS];
    for (int step = 16; step; step /= 2) v = merge(v, other_lane(v, step));
    __syncthreads(); /* the last call's parts have been read */
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < WARPS; i++) v = merge(v, part[i]);
    return v;
}

/* dst[dst_rows[i]] = src[src_rows[i]] for i < gridDim.x; NULL rows: row i. */
static __global__ void __launch_bounds__(MOVE_THREADS)
    move_kernel(bf16 *__restrict__ dst, int64_t ld_dst, const int32_t *__restrict__ dst_rows,
                const bf16 *__restrict__ src, int64_t ld_src, const int32_t *__restrict__ src_rows, int64_t n_col)
{
    const int64_t i = blockIdx.x, to = dst_rows ? dst_rows[i] : i, from = src_rows ? src_rows[i] : i;
    for (int64_t c = threadIdx.x * VECTOR; c < n_col; c += MOVE_THREADS * VECTOR)
        *(uint4 *)(dst + to * ld_dst + c) = *(const uint4 *)(src + from * ld_src + c);
}

/* ---- host ---- */

static void move_rows(struct tensor dst, const int32_t *dst_rows, struct tensor src, const int32_t *src_rows, int64_t n)
{
    move_kernel<<<grid_x(n), MOVE_THREADS, 0, cuda.stream>>>(bf16_ptr(dst), dst.ld, dst_rows, bf16_ptr(src), src.ld,
                                                             src_rows, dst.shape[1]);
    CUDA_CHECK_LAUNCH();
}

static __global__ void __launch_bounds__(THREADS) cap_kernel(float *logits, int64_t ld, int n, float cap)
{
    float *row = logits + blockIdx.x * ld;
    for (int i = threadIdx.x; i < n; i += THREADS) row[i] = cap * tanhf(row[i] / cap);
}

/* In place: z = cap tanh(z / cap); cap 0: z does not change. */
static void cap_logits(struct tensor logits, float cap)
{
    if (!(cap > 0) || !logits.shape[0]) return;
    cap_kernel<<<grid_x(logits.shape[0]), THREADS, 0, cuda.stream>>>(f32_ptr(logits), logits.ld, (int)logits.shape[1],
                                                                     cap);
    CUDA_CHECK_LAUNCH();
}
static float inverse_cap(float cap) { return cap > 0 ? 1 / cap : 0; }

static void zero_rows(struct tensor x)
{
    if (tensor_count(x))
        CUDA_CHECK(cudaMemset2DAsync(x.data, (size_t)x.ld * sizeof(bf16), 0, (size_t)x.shape[1] * sizeof(bf16),
                                     (size_t)x.shape[0], cuda.stream));
}

static void want_rows(struct tensor x)
{
    MT_REQUIRE(rows_aligned(x), "rows of the head, %lld apart: not 16-byte aligned", (long long)x.ld);
}

#endif
