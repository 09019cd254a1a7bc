/* dense.cuh - f32, bf16, f16: values without scales. */
#ifndef MT_CUDA_FORMAT_DENSE_H
#define MT_CUDA_FORMAT_DENSE_H

#include "kernels/cuda/format/dense_words.cuh"
#include "kernels/cuda/format/source.cuh"

static __device__ __forceinline__ void dense_load8(float v[8], const float *p) { load_f32x8(v, p); }
static __device__ __forceinline__ void dense_load8(float v[8], const bf16 *p) { unpack8(v, load16(p)); }
static __device__ __forceinline__ void dense_load8(float v[8], const __half *p) { unpack_f16x8(v, load16(p)); }
static __device__ __forceinline__ float dense_load(const float *p) { return *p; }
static __device__ __forceinline__ float dense_load(const bf16 *p) { return __bfloat162float(*p); }
static __device__ __forceinline__ float dense_load(const __half *p) { return __half2float(*p); }

template <typename T> struct dense_values {
    static constexpr int bits = 8 * sizeof(T);
    static constexpr bool coded = false;

    template <typename CODES>
    static __device__ __forceinline__ void values8(float x[8], const struct source &s, CODES, int64_t e, int64_t v)
    {
        dense_load8(x, (const T *)s.w.data + e * s.n + 8 * v);
    }
    static __device__ __forceinline__ float value(const struct source &s, int64_t e, int64_t i)
    {
        return dense_load((const T *)s.w.data + e * s.n + i);
    }
};
using device_f32 = dense_values<float>;
using device_bf16 = dense_values<bf16>;
using device_f16 = dense_values<__half>;

#endif
