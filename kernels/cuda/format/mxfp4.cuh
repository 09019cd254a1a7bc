/* mxfp4.cuh - MXFP4: e2m1 codes, an e8m0 byte per 32. */
#ifndef MT_CUDA_FORMAT_MXFP4_H
#define MT_CUDA_FORMAT_MXFP4_H

#include "kernels/cuda/format/source.cuh"

struct device_mxfp4 : nibbles<device_mxfp4> {
    static constexpr int block = 32;
    static constexpr bool high_first = false;
    static __device__ __forceinline__ float code(const struct source &, uint32_t c) { return e2m1_value(c); }
    static __device__ __forceinline__ float scale(const struct source &s, int64_t e, int64_t b)
    {
        return e8m0_scale(s.w.scale[e * s.n_block + b]);
    }
};

#endif
