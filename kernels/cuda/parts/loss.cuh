/* loss.cuh - what the loss heads share: groups of logits, rows that move between the labelled tokens and a chunk. */
#ifndef MT_CUDA_LOSS_H
#define MT_CUDA_LOSS_H

#include <float.h>

#include "kernels/cuda/core/cuda.h"

enum { THREADS = 512, WARPS = THREADS / 32, VECTOR = 8, MOVE_THREADS = 128 };

#define LOG2_E 1.44269504f

/* Columns 8g .. 8g+7 of a row of n logits; -inf beyond its end. The row is padded to whole groups. */
static __device__ __forceinline__ void load_group(float v[VECTOR], const float *row, int g, int n)
{
    const float4 a = *(const float4 *)(row + g * VECTOR), b = *(const float4 *)(row + g * VECTOR + 4);
    const float x[VECTOR] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < VECTOR; j++) v[j] = g * VECTOR + j < n ? x[j] : -INFINITY;
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

static void zero_rows(struct tensor x)
{
    if (tensor_count(x))
        CUDA_CHECK(cudaMemset2DAsync(x.data, (size_t)x.ld * sizeof(bf16), 0, (size_t)x.shape[1] * sizeof(bf16),
                                     (size_t)x.shape[0], cuda.stream));
}

static void check_head(const struct weight *w, struct tensor x)
{
    MT_REQUIRE(w->n_in % VECTOR == 0 && w->n_out <= INT32_MAX - VECTOR * THREADS && x.ld % VECTOR == 0 &&
                   (uintptr_t)x.data % 16 == 0,
               "a head of %lld rows of %lld: not 16-byte aligned", (long long)w->n_out, (long long)w->n_in);
}

#endif
