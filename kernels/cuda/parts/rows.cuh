/* rows.cuh - what the row-wise kernels share: rows of a tensor and their alignment, sums over a warp; eight values are
 * loaded and stored by kernels/cuda/format/dense_words.cuh. */
#ifndef MT_CUDA_ROWS_H
#define MT_CUDA_ROWS_H

#include "kernels/cuda/core/cuda.h"
#include "kernels/cuda/format/dense_words.cuh"

/* The rows of a tensor, ld elements apart; an absent tensor has none. */
template <typename T = bf16> struct row_view {
    T *p;
    int64_t ld;
    __device__ __forceinline__ T *at(int64_t row) const { return p + row * ld; }
};
template <typename T = bf16> static inline row_view<T> rows_of(struct tensor x)
{
    return {x.ndim ? (T *)x.data : NULL, x.ld};
}
/* rows_of, for kernels that load and store 16 bytes. An error names the op by `what`, as in "a gated norm". */
template <typename T = bf16> static inline row_view<T> aligned_rows(struct tensor x, const char *what)
{
    MT_REQUIRE(!x.ndim || rows_aligned(x), "the rows of %s are not 16-byte aligned: %p, %lld apart", what, x.data,
               (long long)x.ld);
    return rows_of<T>(x);
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

#define LOG2_E 1.44269504f
/* 2^x with an error of at most 2 ulp; 0 for -inf and for results below the normal range. */
__device__ static inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Eight pairs of a row from pair `at` on: columns `at` and half + at, or interleaved 2 at and 2 at + 1. */
static __device__ inline void load_pairs(float lo[8], float hi[8], const bf16 *row, int64_t at, int64_t half,
                                         bool interleaved)
{
    if (!interleaved) {
        unpack8(lo, load16(row + at));
        unpack8(hi, load16(row + half + at));
        return;
    }
    float v[16];
    unpack8(v, load16(row + 2 * at));
    unpack8(v + 8, load16(row + 2 * at + 8));
#pragma unroll
    for (int k = 0; k < 8; k++) lo[k] = v[2 * k], hi[k] = v[2 * k + 1];
}
static __device__ inline void store_pairs(bf16 *row, const float lo[8], const float hi[8], int64_t at, int64_t half,
                                          bool interleaved)
{
    if (!interleaved) {
        store16(row + at, pack8(lo));
        store16(row + half + at, pack8(hi));
        return;
    }
    float v[16];
#pragma unroll
    for (int k = 0; k < 8; k++) v[2 * k] = lo[k], v[2 * k + 1] = hi[k];
    store16(row + 2 * at, pack8(v));
    store16(row + 2 * at + 8, pack8(v + 8));
}

/* Kernels whose threads have eight columns of a row each, in blocks of OCTET_THREADS. */
enum { OCTET_THREADS = 256 };
struct octet {
    int64_t row, col; /* beyond the last row: no work */
};
static __device__ __forceinline__ struct octet find_octet(int64_t n_col)
{
    const uint32_t i = blockIdx.x * OCTET_THREADS + threadIdx.x, per_row = (uint32_t)(n_col / 8), row = i / per_row;
    return {row, 8 * (int64_t)(i - row * per_row)};
}
static inline unsigned octet_grid(int64_t n_row, int64_t n_col)
{
    const int64_t n = n_row * (n_col / 8);
    MT_REQUIRE(n < INT32_MAX, "%lld rows of %lld", (long long)n_row, (long long)n_col);
    return grid_x(ceil_div(n, OCTET_THREADS));
}

#endif
