/* rows.cuh - device helpers of the row-wise kernels: alignment of rows, sums over a warp; eight values are loaded and
 * stored by kernels/cuda/format/dense_words.cuh. */
#ifndef MT_CUDA_ROWS_H
#define MT_CUDA_ROWS_H

#include "kernels/cuda/core/cuda.h"
#include "kernels/cuda/format/dense_words.cuh"

/* Whether every row is 16-byte aligned. */
static inline bool rows_aligned(struct tensor x)
{
    return (uintptr_t)x.data % 16 == 0 && x.ld * dtype_size(x.dtype) % 16 == 0;
}

/* Sum over groups of `width` adjacent lanes (a power of two); every lane gets the same bits. All 32 lanes must call it.
 */
template <typename T> static __device__ inline T warp_sum(T v, int width = 32)
{
    for (int step = width / 2; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
static __device__ inline float warp_max(float v)
{
    for (int step = 16; step; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

#endif
