/* rows.cuh - device helpers of the row-wise kernels: loads and stores of eight values, sums over a warp, and eight
 * elements of a weight in any format. Addresses of eight values are 16-byte aligned. */
#ifndef MT_CUDA_ROWS_H
#define MT_CUDA_ROWS_H

#include "kernels/cuda/core/cuda.h"
#include "kernels/cuda/format/dense_words.cuh"
#include "kernels/format/minifloat.h"

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

/* ---- weights; kernels/format/quant.h defines the formats */

static __device__ inline float e8m0_scale(uint8_t s)
{
    return __uint_as_float(s == 255 ? 0x7fffffffu : s ? (uint32_t)s << 23 : 0x00400000u); /* 2^-127 is denormal */
}

static __device__ inline float e2m1_value(uint32_t code)
{
    const uint32_t magnitude = code & 7; /* 0, 0.5, then 1.m * 2^(e-1) */
    const float v = magnitude < 2 ? 0.5f * (float)magnitude
                                  : __uint_as_float(((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22);
    return code & 8 ? -v : v;
}

/* The absmax of one block of a bitsandbytes matrix; no fused multiply-add, as in quant_absmax. */
static __device__ inline float block_absmax(const struct weight *w, int64_t block)
{
    if (!w->scale) return w->absmax[block];
    return __fadd_rn(__fmul_rn(w->nested_map[w->scale[block]], w->nested_absmax[block / 256]), w->nested_offset[0]);
}

/* Elements i .. i+7 of the flat matrix of w, n_exp = 1; i is a multiple of 8. */
static __device__ inline void weight_load8(float v[8], const struct weight *w, int64_t i)
{
    const uint32_t *nibbles = (const uint32_t *)w->data + i / 8;
    float scale;
    switch (w->format) {
    case WF_NONE: return;
    case WF_F32: load_f32x8(v, (const float *)w->data + i); return;
    case WF_BF16: unpack8(v, load16((const bf16 *)w->data + i)); return;
    case WF_F16: {
        const uint4 u = load16((const __half *)w->data + i);
        const uint32_t word[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = __half2float(__ushort_as_half((unsigned short)(word[k / 2] >> 16 * (k & 1))));
        return;
    }
    case WF_MXFP4: /* low nibble first */ scale = e8m0_scale(w->scale[i / 32]);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = e2m1_value(*nibbles >> 4 * k & 15) * scale;
        return;
    case WF_NVFP4: scale = nvfp4_step(w->scale[i / 16], w->scale2[i / w->n_in], w->scale2_divides);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = e2m1_value(*nibbles >> 4 * k & 15) * scale;
        return;
    case WF_FP8: scale = w->scale2[i / w->n_in * ((w->n_in + w->block - 1) / w->block) + i % w->n_in / w->block];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = e4m3_value(((const uint8_t *)w->data)[i + k]) * scale;
        return;
    case WF_NF4: /* high nibble first in each byte, so nibble k ^ 1 of the word */
    case WF_FP4:
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = w->code[*nibbles >> 4 * (k ^ 1) & 15] * block_absmax(w, (i + k) / w->block);
        return;
    }
}

/* Whether w meets the requirements of weight_load8. */
static inline bool weight_loads8(const struct weight *w)
{
    const int64_t block = weight_scale_block(w->format);
    return w->n_in % (block ? block : 8) == 0 && (w->format != WF_FP8 || w->block % 8 == 0) &&
           (uintptr_t)w->data % 16 == 0;
}

#endif
