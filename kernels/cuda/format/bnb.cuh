/* bnb.cuh - NF4 and FP4 of bitsandbytes: codes into the weight's table of 16 values, an absmax per block, in f32 or
 * quantised itself (nested). */
#ifndef MT_CUDA_FORMAT_BNB_H
#define MT_CUDA_FORMAT_BNB_H

#include "kernels/cuda/format/source.cuh"

struct device_nf4 : nibbles<device_nf4> {
    static constexpr int block = 0;
    static constexpr bool high_first = true;
    static __device__ __forceinline__ float code(const struct source &s, uint32_t c) { return s.w.code[c]; }
    static __device__ __forceinline__ float scale(const struct source &s, int64_t e, int64_t b)
    {
        const int64_t at = e * s.n_block + b;
        if (!s.w.scale) return s.w.absmax[at];
        const float outer = s.w.nested_absmax[e * s.n_outer + b / 256];
        return __fadd_rn(__fmul_rn(s.w.nested_map[s.w.scale[at]], outer), s.w.nested_offset[e]);
    }
};
using device_fp4 = device_nf4;

#endif
