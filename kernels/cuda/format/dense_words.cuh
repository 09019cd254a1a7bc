/* dense_words.cuh - eight values of f32, bf16 or f16 to registers and back: 16 or 32 aligned bytes. */
#ifndef MT_CUDA_FORMAT_DENSE_WORDS_H
#define MT_CUDA_FORMAT_DENSE_WORDS_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ inline uint4 load16(const void *p) { return *(const uint4 *)p; }
/* To global memory. In assembly, since the compiler may split a plain store into four. */
static __device__ inline void store16(void *p, uint4 u)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(p)), "r"(u.x), "r"(u.y),
                 "r"(u.z), "r"(u.w)
                 : "memory");
}

/* Eight bf16 of a 16-byte load <-> floats, rounded to nearest even; the low half of a word comes first. */
static __device__ inline void unpack8(float v[8], uint4 u)
{
    const uint32_t word[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = __uint_as_float(word[i] << 16);
        v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
}
static __device__ inline uint32_t pack2(float low, float high)
{
    return (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16 |
           __bfloat16_as_ushort(__float2bfloat16_rn(low));
}
/* The bits of pack2 by one PTX instruction instead of three. */
static __device__ __forceinline__ uint32_t bf16_pack(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}
static __device__ __forceinline__ uint4 bf16_pack8(const float v[8])
{
    return make_uint4(bf16_pack(v[0], v[1]), bf16_pack(v[2], v[3]), bf16_pack(v[4], v[5]), bf16_pack(v[6], v[7]));
}
static __device__ inline uint4 pack8(const float v[8])
{
    return make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
}

/* Eight f16. */
static __device__ inline void unpack_f16x8(float v[8], uint4 u)
{
    const uint32_t word[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __half2float(__ushort_as_half((unsigned short)(word[i / 2] >> 16 * (i & 1))));
}

static __device__ inline void load_f32x8(float v[8], const float *p)
{
    const float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
static __device__ inline void store_f32x8(float *p, const float v[8])
{
    ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

#endif
