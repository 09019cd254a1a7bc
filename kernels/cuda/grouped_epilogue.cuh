/* grouped_epilogue.cuh - epilogues of the grouped products: bias, rounding, GLU and its backward, and the stores, as
 * struct grouped specifies.
 *
 * In an accumulator of mma.sync and wgmma, a row of an 8-column tile is held by the four lanes of a quad (lanes
 * 4i .. 4i+3): lane q has columns 2q, 2q+1. For four adjacent tiles, a 4x4 transpose inside the quad moves all 8
 * columns of tile q to lane q. Every load and store is then 16 bytes wide, and a quad covers 32 columns of its row. */
#ifndef MT_CUDA_GROUPED_EPILOGUE_H
#define MT_CUDA_GROUPED_EPILOGUE_H

#include "kernels/cuda/grouped.h"

/* ---- bf16, eight at a time ---- */

__device__ __forceinline__ uint32_t bf16_pack(float low, float high)
{
    const __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&p;
}
__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ void bf16_unpack8(float x[8], uint4 v)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = bf16_low(w[i]);
        x[2 * i + 1] = bf16_high(w[i]);
    }
}
__device__ __forceinline__ uint4 bf16_pack8(const float x[8])
{
    return make_uint4(bf16_pack(x[0], x[1]), bf16_pack(x[2], x[3]), bf16_pack(x[4], x[5]), bf16_pack(x[6], x[7]));
}

/* In assembly: the compiler splits a plain uint4 store into smaller ones. */
__device__ __forceinline__ void store16(bf16 *to, uint4 v)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ void store8(bf16 *to, uint2 v)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};\n" ::"l"(to), "r"(v.x), "r"(v.y));
}

/* ---- the activation, the same function as kernels/cpu/glu.c ----
 * All kinds are (up + offset) * gate * sigmoid(alpha * gate) of the clamped gate and up: plain SwiGLU has alpha 1,
 * offset 0 and no limit. A NaN passes through the clamps. */

struct glu_form {
    float alpha, offset, limit;
};
__device__ __forceinline__ struct glu_form glu_form_of(const struct glu &glu)
{
    if (glu.kind == GLU_CLAMPED) return {glu.alpha, 1.0f, glu.limit};
    return {1.0f, 0.0f, glu.kind == GLU_SWIGLU_CLAMPED ? glu.limit : __int_as_float(0x7f800000)};
}

__device__ __forceinline__ float min_nan(float a, float b)
{
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
__device__ __forceinline__ float max_nan(float a, float b)
{
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
/* 1 / (1 + 2^(-x / ln 2)) by the special function units for 2^x and 1/x; each has an error of at most 2 ulp. */
__device__ __forceinline__ float fast_sigmoid(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + y));
    return y;
}

/* Returns h of one pair; glu_gradient also sets its gradients, given dh. */
__device__ __forceinline__ float glu_value(const struct glu_form &f, float gate, float up)
{
    const float g = min_nan(gate, f.limit), u = max_nan(min_nan(up, f.limit), -f.limit);
    return (u + f.offset) * (g * fast_sigmoid(f.alpha * g));
}
__device__ __forceinline__ float glu_gradient(const struct glu_form &f, float gate, float up, float dh, float *dgate,
                                              float *dup)
{
    const float g = min_nan(gate, f.limit), u = max_nan(min_nan(up, f.limit), -f.limit);
    const float s = fast_sigmoid(f.alpha * g), gs = g * s, uo = u + f.offset;
    *dgate = gate > f.limit ? 0.0f : dh * uo * s * (1.0f + f.alpha * g * (1.0f - s));
    *dup = fabsf(up) > f.limit ? 0.0f : dh * gs;
    return uo * gs;
}

/* The same for plain SwiGLU: half the instructions, since the compiler cannot remove what a limit needs. */
__device__ __forceinline__ float swiglu_value(float gate, float up) { return up * (gate * fast_sigmoid(gate)); }
__device__ __forceinline__ float swiglu_gradient(float gate, float up, float dh, float *dgate, float *dup)
{
    const float s = fast_sigmoid(gate), gs = gate * s;
    *dgate = dh * up * (s + gs * (1.0f - s));
    *dup = dh * gs;
    return up * gs;
}

/* ---- 4x4 transpose in a quad: x[i] of lane q and x[q] of lane i are exchanged. All lanes of the warp call it. ---- */

__device__ __forceinline__ void quad_swap(uint32_t *low, uint32_t *high, bool upper, int lanes)
{
    const uint32_t got = __shfl_xor_sync(~0u, upper ? *low : *high, lanes);
    if (upper)
        *low = got;
    else
        *high = got;
}
__device__ __forceinline__ void quad_transpose(uint32_t x[4])
{
    const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
    quad_swap(&x[0], &x[1], odd, 1);
    quad_swap(&x[2], &x[3], odd, 1);
    quad_swap(&x[0], &x[2], second, 2);
    quad_swap(&x[1], &x[3], second, 2);
}
/* The sum over the four lanes of a quad, in a fixed order; all four get it. */
__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- 32 columns n .. n+31 of a row; n is a multiple of 8, columns from n_out on are skipped ---- */

/* The bias of this lane's pairs of columns, the same for all rows; 0 without a bias. */
__device__ __forceinline__ void grouped_bias(float b[4][2], const struct grouped &g, int64_t e, int64_t n)
{
    const int64_t first = n + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 x = make_float2(0.0f, 0.0f);
        if (g.bias && first + 8 * i < g.n_out) x = *(const float2 *)(g.bias + e * g.n_out + first + 8 * i);
        b[i][0] = x.x;
        b[i][1] = x.y;
    }
}

/* pre for columns n .. n+7 of row m of act: gate, up, gate, up, ... or eight gates and eight ups; zeros out of bounds.
 * A caller may load it ahead of use: pre must not overlap out or act. */
struct pre8 {
    uint4 x, y;
};
__device__ __forceinline__ int64_t pre_start(const struct grouped &g, int64_t m, int64_t n)
{
    return m * 2 * g.n_out + (g.glu.interleaved ? 2 * n : n);
}
__device__ __forceinline__ int64_t pre_apart(const struct grouped &g) { return g.glu.interleaved ? 8 : g.n_out; }
__device__ __forceinline__ struct pre8 grouped_pre(const struct grouped &g, int64_t m, int64_t n, bool live)
{
    struct pre8 p = {};
    if (live && n < g.n_out) {
        const bf16 *from = g.pre + pre_start(g, m, n);
        p.x = __ldg((const uint4 *)from);
        p.y = __ldg((const uint4 *)(from + pre_apart(g)));
    }
    return p;
}

__device__ __forceinline__ void pre_unpack(float gate[8], float up[8], const struct grouped &g, const struct pre8 &pre)
{
    if (g.glu.interleaved) {
        const uint32_t w[8] = {pre.x.x, pre.x.y, pre.x.z, pre.x.w, pre.y.x, pre.y.y, pre.y.z, pre.y.w};
#pragma unroll
        for (int i = 0; i < 8; i++) gate[i] = bf16_low(w[i]), up[i] = bf16_high(w[i]);
    } else {
        bf16_unpack8(gate, pre.x);
        bf16_unpack8(up, pre.y);
    }
}

__host__ __device__ constexpr bool grouped_is_glu_bwd(int epilogue)
{
    return epilogue == GROUPED_GLU_BWD || epilogue == GROUPED_GLU_BWD_QUANT;
}

/* GROUPED_GLU_BWD_QUANT for eight columns of row m: h becomes Q(h), and gradients of values that Q clips become 0. */
__device__ __forceinline__ void grouped_read_quant8(const struct grouped &g, const bf16 *act, float h[8], float gate[8],
                                                    float up[8])
{
    const float most = __ldg(g.in_amax);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!(fabsf(__bfloat162float(__float2bfloat16_rn(h[i]))) <= most)) gate[i] = up[i] = 0.0f;
    bf16_unpack8(h, *(const uint4 *)act);
}

/* GROUPED_GLU_BWD, or with QUANT GROUPED_GLU_BWD_QUANT, for columns n .. n+7 of row m, v = g. Returns the sum of h * g
 * over them. */
template <bool QUANT>
__device__ __forceinline__ float grouped_glu_bwd8(const struct grouped &g, int64_t m, int64_t n, const float v[8],
                                                  float weight, const struct pre8 &pre)
{
    const struct glu_form form = glu_form_of(g.glu);
    const bool pairs = g.glu.interleaved;
    bf16 *out = g.out + pre_start(g, m, n);
    float gate[8], up[8], h[8], sum = 0.0f;
    pre_unpack(gate, up, g, pre);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        h[i] = glu_gradient(form, gate[i], up[i], weight * v[i], &gate[i],
                            &up[i]); /* gate and up become their gradients */
        if (!QUANT) sum += h[i] * v[i];
    }
    if (QUANT) {
        grouped_read_quant8(g, g.act + m * g.n_out + n, h, gate, up);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += h[i] * v[i];
    } else {
        store16(g.act + m * g.n_out + n, bf16_pack8(h));
    }
    if (pairs) {
        uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = bf16_pack(gate[i], up[i]);
        store16(out, make_uint4(w[0], w[1], w[2], w[3]));
        store16(out + 8, make_uint4(w[4], w[5], w[6], w[7]));
    } else {
        store16(out, bf16_pack8(gate));
        store16(out + g.n_out, bf16_pack8(up));
    }
    return sum;
}

/* x = columns 8q .. 8q + 7 in lane q. v[i]: this lane's pair of columns 8i + 2q. All lanes of the warp call it. */
__device__ __forceinline__ void quad_columns(float x[8], const float v[4][2])
{
    uint32_t even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; i++) even[i] = __float_as_uint(v[i][0]), odd[i] = __float_as_uint(v[i][1]);
    quad_transpose(even);
    quad_transpose(odd);
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = __uint_as_float(even[i]), x[2 * i + 1] = __uint_as_float(odd[i]);
}

/* GROUPED_GLU_BWD for 32 columns of row m. v[i]: this lane's pair of columns n + 8i + 2q; weight: the gate of the row;
 * pre: of columns n + 8q .. n + 8q + 7. All lanes of the warp call it; live: the row is in bounds. Returns this lane's
 * part of the sum of h * g, which quad_sum completes. */
template <bool QUANT>
__device__ __forceinline__ float grouped_finish_glu_bwd(const struct grouped &g, int64_t m, int64_t n, bool live,
                                                        const float v[4][2], float weight, const struct pre8 &pre)
{
    const int64_t mine = n + 8 * (threadIdx.x & 3);
    float x[8];
    quad_columns(x, v);
    return live && mine < g.n_out ? grouped_glu_bwd8<QUANT>(g, m, mine, x, weight, pre) : 0.0f;
}

/* GROUPED_ADD for 32 columns of row m. */
__device__ __forceinline__ void grouped_finish_add(const struct grouped &g, int64_t m, int64_t n, bool live,
                                                   const float v[4][2])
{
    const int64_t mine = n + 8 * (threadIdx.x & 3);
    float x[8], y[8];
    quad_columns(x, v);
    if (!live || mine >= g.n_out) return;
    bf16 *out = g.out + m * g.n_out + mine;
    bf16_unpack8(y, *(const uint4 *)out);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] += g.scale * x[i];
    store16(out, bf16_pack8(y));
}

/* Columns n .. n+7 of row m, rounded; GROUPED_GLU: also their activations, of four pairs. */
template <int EPILOGUE>
__device__ __forceinline__ void grouped_store8(const struct grouped &g, int64_t m, int64_t n, uint4 v)
{
    store16(g.out + m * g.n_out + n, v);
    if (EPILOGUE == GROUPED_GLU) {
        const struct glu_form form = glu_form_of(g.glu);
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        float h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) h[i] = glu_value(form, bf16_low(w[i]), bf16_high(w[i]));
        store8(g.act + m * (g.n_out / 2) + n / 2, make_uint2(bf16_pack(h[0], h[1]), bf16_pack(h[2], h[3])));
    }
}

/* The same for the other epilogues. bias: of this lane's pairs of columns; GROUPED_GATED has none. */
template <int EPILOGUE>
__device__ __forceinline__ void grouped_finish(const struct grouped &g, int64_t m, int64_t n, bool live,
                                               const float v[4][2], const float bias[4][2])
{
    const int64_t mine = n + 8 * (threadIdx.x & 3); /* columns of this lane after the transpose */
    const bool stored = live && mine < g.n_out;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = bf16_pack(v[i][0] + bias[i][0], v[i][1] + bias[i][1]);
    quad_transpose(w);
    if (stored) grouped_store8<EPILOGUE>(g, m, mine, make_uint4(w[0], w[1], w[2], w[3]));
    if (EPILOGUE == GROUPED_GATED) {
        const float weight = live ? g.gate[g.row_slot[m]] : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = bf16_pack(weight * v[i][0], weight * v[i][1]);
        quad_transpose(w);
        if (stored) store16(g.act + m * g.n_out + mine, make_uint4(w[0], w[1], w[2], w[3]));
    }
}

#endif
