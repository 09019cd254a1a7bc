/* vec8.cuh - eight neighbouring values of a tensor: bf16, f16 or f32. Addresses are 16-byte aligned. */
#ifndef MT_CUDA_VEC8_H
#define MT_CUDA_VEC8_H

#include <cuda_fp16.h>

#include "kernels/cuda/parts/rows.cuh"

/* A word holds two bf16. magnitudes2 clears their signs; larger2 and smaller2 compare both, and return the number where
 * one is NaN. */
static __device__ __forceinline__ uint32_t magnitudes2(uint32_t w) { return w & 0x7fff7fffu; }
static __device__ __forceinline__ uint32_t larger2(uint32_t a, uint32_t b)
{
    uint32_t c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
static __device__ __forceinline__ uint32_t smaller2(uint32_t a, uint32_t b)
{
    uint32_t c;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

template <typename T> struct vec8; /* as loaded: one or two times 16 bytes; get and put: as fp32 */
template <> struct vec8<bf16> {
    static constexpr bool is_bf16 = true;
    uint4 u;
    __device__ void load(const bf16 *p) { u = load16(p); }
    __device__ void store(bf16 *p) const { store16(p, u); }
    __device__ void get(float v[8]) const { unpack8(v, u); }
    __device__ void put(const float v[8]) { u = pack8(v); }
    __device__ float largest() const /* magnitude */
    {
        const uint32_t a = larger2(magnitudes2(u.x), magnitudes2(u.y)), b = larger2(magnitudes2(u.z), magnitudes2(u.w));
        const uint32_t c = larger2(a, b);
        return fmaxf(__uint_as_float(c << 16), __uint_as_float(c & 0xffff0000u));
    }
};
static __device__ __forceinline__ float largest_of(const float v[8])
{
    float most = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
    return most;
}
template <> struct vec8<__half> {
    static constexpr bool is_bf16 = false;
    uint4 u;
    __device__ void load(const __half *p) { u = load16(p); }
    __device__ void get(float v[8]) const { unpack_f16x8(v, u); }
    __device__ void store(__half *p) const { store16(p, u); }
    __device__ float largest() const
    {
        float v[8];
        get(v);
        return largest_of(v);
    }
    __device__ void put(const float v[8])
    {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = (uint32_t)__half_as_ushort(__float2half_rn(v[2 * i + 1])) << 16 |
                      __half_as_ushort(__float2half_rn(v[2 * i]));
        u = make_uint4(word[0], word[1], word[2], word[3]);
    }
};
template <> struct vec8<float> {
    static constexpr bool is_bf16 = false;
    uint4 u[2];
    __device__ void load(const float *p) { u[0] = load16(p), u[1] = load16(p + 4); }
    __device__ void get(float v[8]) const
    {
        const uint32_t word[8] = {u[0].x, u[0].y, u[0].z, u[0].w, u[1].x, u[1].y, u[1].z, u[1].w};
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __uint_as_float(word[i]);
    }
    __device__ void store(float *p) const { store16(p, u[0]), store16(p + 4, u[1]); }
    __device__ float largest() const
    {
        float v[8];
        get(v);
        return largest_of(v);
    }
    __device__ void put(const float v[8])
    {
        uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = __float_as_uint(v[i]);
        u[0] = make_uint4(w[0], w[1], w[2], w[3]);
        u[1] = make_uint4(w[4], w[5], w[6], w[7]);
    }
};

/* Calls launch(x.data) with the type of the values of x: bf16, f16 or f32. */
template <typename LAUNCH> static inline void with_values(struct tensor x, const LAUNCH &launch)
{
    if (x.dtype == DT_BF16)
        launch((bf16 *)x.data);
    else if (x.dtype == DT_F16)
        launch((__half *)x.data);
    else
        launch((float *)x.data);
}

static __device__ __forceinline__ float get_one(const bf16 *p) { return __bfloat162float(*p); }
static __device__ __forceinline__ float get_one(const __half *p) { return __half2float(*p); }
static __device__ __forceinline__ float get_one(const float *p) { return *p; }
static __device__ __forceinline__ void put_one(bf16 *p, float v) { *p = __float2bfloat16_rn(v); }
static __device__ __forceinline__ void put_one(__half *p, float v) { *p = __float2half_rn(v); }
static __device__ __forceinline__ void put_one(float *p, float v) { *p = v; }

#endif
