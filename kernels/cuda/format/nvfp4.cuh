/* nvfp4.cuh - NVFP4: e2m1 codes, an e4m3 byte per 16 and a global scale per row. */
#ifndef MT_CUDA_FORMAT_NVFP4_H
#define MT_CUDA_FORMAT_NVFP4_H

#include "kernels/cuda/format/source.cuh"

struct device_nvfp4 : nibbles<device_nvfp4> {
    static constexpr int block = 16;
    static constexpr bool high_first = false;
    static __device__ __forceinline__ float code(const struct source &, uint32_t c) { return e2m1_value(c); }
    static __device__ __forceinline__ float scale(const struct source &s, int64_t e, int64_t b)
    {
        return nvfp4_step(s.w.scale[e * s.n_block + b], s.w.scale2[e * s.w.n_out + (uint32_t)b / s.row_blocks],
                          s.w.scale2_divides);
    }
};

#endif
