/* fp8.cuh - FP8: e4m3 bytes, a scale per row and block of columns. */
#ifndef MT_CUDA_FORMAT_FP8_H
#define MT_CUDA_FORMAT_FP8_H

#include "kernels/cuda/format/source.cuh"

struct device_fp8 {
    static constexpr int bits = 8;
    static constexpr bool coded = false;

    template <typename CODES>
    static __device__ __forceinline__ void values8(float x[8], const struct source &s, CODES, int64_t e, uint32_t v)
    {
        const uint2 raw = *(const uint2 *)((const uint8_t *)s.w.data + e * s.n + (int64_t)v * 8);
        const uint32_t in = (uint32_t)s.w.n_in / 8, row = v / in, block = (v - row * in) * 8 / (uint32_t)s.w.block;
        const float step = s.w.scale2[(e * s.w.n_out + row) * s.row_blocks + block];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __fmul_rn(e4m3_value((j < 4 ? raw.x : raw.y) >> 8 * (j % 4) & 255), step);
    }

    static __device__ __forceinline__ float value(const struct source &s, int64_t e, int64_t i)
    {
        const int64_t row = i / s.w.n_in, block = i % s.w.n_in / s.w.block;
        return __fmul_rn(e4m3_value(((const uint8_t *)s.w.data)[e * s.n + i]),
                         s.w.scale2[(e * s.w.n_out + row) * s.row_blocks + block]);
    }
};

#endif
