/* dequant.cuh - values of frozen weights of every format, eight at a time: for dequant.cu and proj.cu. */
#ifndef MT_CUDA_DEQUANT_H
#define MT_CUDA_DEQUANT_H

#include <cuda_fp16.h>

#include "kernels/cuda/core/cuda.h"
#include "kernels/format/minifloat.h"

enum { VECTOR = 8 };

/* A weight and sizes derived from it. For MXFP4 w.block is 32, for NVFP4 16. */
struct source {
    struct weight w;
    uint32_t row_blocks;         /* NVFP4: scale bytes per row; FP8: scales per row */
    int64_t n, n_block, n_outer; /* per expert: values, absmax values, nested absmax values */
};

/* Code c of e2m1 (sign, two bits of exponent, one of mantissa): its bits at the same places of an f32 give the value
 * times 2^-126. */
static __device__ __forceinline__ float e2m1(uint32_t c)
{
    return __uint_as_float((c & 8) << 28 | (c & 7) << 22) * 0x1p126f;
}

static __host__ __device__ __forceinline__ bool is_e2m1(enum weight_format f) { return f == WF_MXFP4 || f == WF_NVFP4; }

/* Whether a value is one of a table of sixteen, times a scale. */
static __host__ __device__ __forceinline__ bool has_codes(enum weight_format f) { return f >= WF_MXFP4 && f != WF_FP8; }

static __device__ __forceinline__ float code_value(const struct source &s, uint32_t c)
{
    return is_e2m1(s.w.format) ? e2m1(c) : s.w.code[c];
}

static __device__ __forceinline__ float absmax_value(const struct source &s, enum weight_format f, int64_t e, int64_t b)
{
    const int64_t at = e * s.n_block + b;
    if (f == WF_MXFP4) {
        const uint32_t x = s.w.scale[at];
        return __uint_as_float(x == 0 ? 0x00400000 : x == 255 ? 0x7fc00000 : x << 23);
    }
    if (f == WF_NVFP4)
        return nvfp4_step(s.w.scale[at], s.w.scale2[e * s.w.n_out + (uint32_t)b / s.row_blocks], s.w.scale2_divides);
    if (!s.w.scale) return s.w.absmax[at];
    const float outer = s.w.nested_absmax[e * s.n_outer + b / 256];
    return __fadd_rn(__fmul_rn(s.w.nested_map[s.w.scale[at]], outer), s.w.nested_offset[e]);
}

static __device__ __forceinline__ uint32_t pair_bits(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

static __device__ __forceinline__ uint4 pack8(const float x[VECTOR])
{
    return make_uint4(pair_bits(x[0], x[1]), pair_bits(x[2], x[3]), pair_bits(x[4], x[5]), pair_bits(x[6], x[7]));
}

/* Values 8v .. 8v+7 of expert e; code: the 16 values of the codes. FORMAT WF_NF4 stands for WF_FP4 too. */
template <enum weight_format FORMAT>
static __device__ __forceinline__ void values8(float x[VECTOR], const struct source &s, const float *code, int64_t e,
                                               uint32_t v)
{
    const int64_t at = e * s.n + (int64_t)v * VECTOR;
    if (FORMAT == WF_F32) {
        const float4 *p = (const float4 *)((const float *)s.w.data + at);
        const float4 a = p[0], b = p[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else if (FORMAT == WF_BF16) {
        const uint4 raw = *(const uint4 *)((const bf16 *)s.w.data + at);
        const uint32_t pair[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < VECTOR; j++) x[j] = __uint_as_float(j % 2 ? pair[j / 2] & 0xffff0000u : pair[j / 2] << 16);
    } else if (FORMAT == WF_F16) {
        const uint4 raw = *(const uint4 *)((const __half *)s.w.data + at);
        const __half *h = (const __half *)&raw;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) x[j] = __half2float(h[j]);
    } else if (FORMAT == WF_FP8) {
        const uint2 raw = *(const uint2 *)((const uint8_t *)s.w.data + at);
        const uint32_t in = (uint32_t)s.w.n_in / VECTOR, row = v / in,
                       block = (v - row * in) * VECTOR / (uint32_t)s.w.block;
        const float step = s.w.scale2[(e * s.w.n_out + row) * s.row_blocks + block];
#pragma unroll
        for (int j = 0; j < VECTOR; j++)
            x[j] = __fmul_rn(e4m3_value((j < 4 ? raw.x : raw.y) >> 8 * (j % 4) & 255), step);
    } else {
        const uint32_t nibbles = *(const uint32_t *)((const uint8_t *)s.w.data + at / 2);
        const uint32_t block = FORMAT == WF_MXFP4   ? v / 4
                               : FORMAT == WF_NVFP4 ? v / 2
                                                    : v / (uint32_t)(s.w.block / VECTOR);
        const float absmax = absmax_value(s, FORMAT, e, block);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const int place = is_e2m1(FORMAT) ? j : j ^ 1; /* the others have the first value in the high nibble */
            x[j] = __fmul_rn(code[nibbles >> 4 * place & 15], absmax);
        }
    }
}

/* The same rounded to bf16, in 16 bytes. */
template <enum weight_format FORMAT>
static __device__ __forceinline__ uint4 decode8(const struct source &s, const float *code, int64_t e, uint32_t v)
{
    if (FORMAT == WF_BF16) return *(const uint4 *)((const bf16 *)s.w.data + e * s.n + (int64_t)v * VECTOR);
    float x[VECTOR];
    values8<FORMAT>(x, s, code, e, v);
    return pack8(x);
}

static __device__ __forceinline__ bool has_rows(const int32_t *offs, int64_t place)
{
    return !offs || offs[place] < offs[place + 1];
}
static __device__ __forceinline__ int64_t expert_at(const int32_t *ids, int64_t place)
{
    return ids ? ids[place] : place;
}

static __host__ __device__ __forceinline__ bool is_packed(enum weight_format f) { return f >= WF_MXFP4; }

static inline struct source source_of(const struct weight *w)
{
    struct source s = {*w, 0, w->n_out * w->n_in, 0, 0};
    const int64_t block = weight_scale_block(w->format);
    if (block) {
        MT_REQUIRE(w->n_in % block == 0, "%s rows of %lld", weight_format_name(w->format), (long long)w->n_in);
        s.w.block = block;
        s.row_blocks = (uint32_t)(w->n_in / block);
    }
    if (is_packed(w->format)) {
        s.n_block = ceil_div(s.n, s.w.block);
        s.n_outer = ceil_div(s.n_block, 256);
    }
    if (w->format == WF_FP8) s.row_blocks = (uint32_t)weight_row_scales(w);
    return s;
}

#endif
