/* grouped_epilogue.cuh - epilogues of the grouped products: bias, rounding, GLU and its backward, and the stores, as
 * struct grouped specifies.
 *
 * In an accumulator of mma.sync and wgmma, a row of an 8-column tile is held by the four lanes of a quad (lanes
 * 4i .. 4i+3): lane q has columns 2q, 2q+1. For four adjacent tiles, a 4x4 transpose inside the quad moves all 8
 * columns of tile q to lane q. Every load and store is then 16 bytes wide, and a quad covers 32 columns of its row. */
#ifndef MT_CUDA_GROUPED_EPILOGUE_H
#define MT_CUDA_GROUPED_EPILOGUE_H

#include "kernels/cuda/parts/grouped.h"

/* ---- bf16 ---- */

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/* In assembly: the compiler splits a plain uint4 store into smaller ones. */
__device__ __forceinline__ void store16(bf16 *to, uint4 v)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ void store8(bf16 *to, uint2 v)
{
    asm volatile("st.global.v2.b32 [%0], {%1, %2};\n" ::"l"(to), "r"(v.x), "r"(v.y));
}

/* ---- the activation, the same function as kernels/cpu/glu.c; struct glu_form. A NaN passes through the clamps. ----
 */

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
/* 1 / (1 + 2^x) by the special function units for 2^x and 1/x; each has an error of at most 2 ulp. */
__device__ __forceinline__ float fast_sigmoid_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + y));
    return y;
}
__device__ __forceinline__ float fast_sigmoid(float x) { return fast_sigmoid_exp2(x * -1.44269504f); }

/* x (1 + n cube gate^2); x itself without cube: gate^2 may be infinite. */
__device__ __forceinline__ float glu_cubed(const struct glu_form &f, float x, float n, float gate)
{
    return f.cube != 0.0f ? x * fmaf(n * f.cube * gate, gate, 1.0f) : x;
}
/* Returns h of a gate and an up; glu_gradient also sets their gradients, given dh. The derivative of g s, s =
 * sigmoid(alpha g), is s + alpha g s (1 - s). dh is selected before it is multiplied: of selected products the compiler
 * makes branches. */
__device__ __forceinline__ float glu_value(const struct glu_form &f, float gate, float up)
{
    const float g = min_nan(gate, f.limit), u = max_nan(min_nan(up, f.limit), -f.limit);
    return (u + f.offset) * (g * fast_sigmoid_exp2(f.exponent * glu_cubed(f, g, 1.0f, g)));
}
__device__ __forceinline__ float glu_gradient(const struct glu_form &f, float gate, float up, float dh, float *dgate,
                                              float *dup)
{
    const float g = min_nan(gate, f.limit), u = max_nan(min_nan(up, f.limit), -f.limit);
    const float s = fast_sigmoid_exp2(f.exponent * glu_cubed(f, g, 1.0f, g)), gs = g * s, uo = u + f.offset;
    const float of_gate = gate > f.limit ? 0.0f : dh, of_up = fabsf(up) > f.limit ? 0.0f : dh;
    *dgate = of_gate * uo * fmaf(glu_cubed(f, gs, 3.0f, g), fmaf(-f.alpha, s, f.alpha), s);
    *dup = of_up * gs;
    return uo * gs;
}

/* glu_value and glu_gradient for plain SwiGLU: half the instructions, since the compiler cannot remove those for a
 * limit. */
__device__ __forceinline__ float swiglu_value(float gate, float up) { return up * (gate * fast_sigmoid(gate)); }
__device__ __forceinline__ float swiglu_gradient(float gate, float up, float dh, float *dgate, float *dup)
{
    const float s = fast_sigmoid(gate), gs = gate * s;
    *dgate = dh * up * fmaf(gs, 1.0f - s, s);
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
 * out may be pre: the thread that uses these columns then overwrites them.
 */
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
        p.x = *(const uint4 *)from;
        p.y = *(const uint4 *)(from + pre_apart(g));
    }
    return p;
}

/* The layout of gates and ups in pre, and whether the activation is plain SwiGLU, as a template argument. */
enum glu_layout {
    GLU_PAIRS,       /* interleaved */
    GLU_HALVES,      /* in separate halves */
    GLU_PLAIN_HALVES /* in separate halves, plain SwiGLU */
};

__device__ __forceinline__ void pre_unpack(float gate[8], float up[8], bool interleaved, const struct pre8 &pre)
{
    if (interleaved) {
        const uint32_t w[8] = {pre.x.x, pre.x.y, pre.x.z, pre.x.w, pre.y.x, pre.y.y, pre.y.z, pre.y.w};
#pragma unroll
        for (int i = 0; i < 8; i++) gate[i] = bf16_low(w[i]), up[i] = bf16_high(w[i]);
    } else {
        unpack8(gate, pre.x);
        unpack8(up, pre.y);
    }
}

__host__ __device__ constexpr bool grouped_is_glu_bwd(int epilogue)
{
    return epilogue == GROUPED_GLU_BWD || epilogue == GROUPED_GLU_BWD_QUANT;
}

/* GROUPED_GLU_BWD_QUANT for eight columns of a row: h becomes q, which is Q(h), and gradients of values that Q clips
 * become 0. */
__device__ __forceinline__ void grouped_read_quant8(const struct grouped &g, uint4 q, float h[8], float gate[8],
                                                    float up[8])
{
    const float most = __ldg(g.in_amax);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!(fabsf(__bfloat162float(__float2bfloat16_rn(h[i]))) <= most)) gate[i] = up[i] = 0.0f;
    unpack8(h, q);
}

/* Loads columns 0..3 and SECOND..SECOND+3, counted from `act`; `both`: the latter are in bounds. */
template <int SECOND> __device__ __forceinline__ uint4 load_two4(const bf16 *act, bool both)
{
    if (SECOND == 4) return *(const uint4 *)act;
    const uint2 x = *(const uint2 *)act, y = both ? *(const uint2 *)(act + SECOND) : make_uint2(0, 0);
    return make_uint4(x.x, x.y, y.x, y.y);
}
template <int SECOND> __device__ __forceinline__ void store_two4(bf16 *act, uint4 v, bool both)
{
    if (SECOND == 4) {
        store16(act, v);
    } else {
        store8(act, make_uint2(v.x, v.y));
        if (both) store8(act + SECOND, make_uint2(v.z, v.w));
    }
}

/* GROUPED_GLU_BWD, or with QUANT GROUPED_GLU_BWD_QUANT, for eight columns of a row: columns 0..3 and SECOND..SECOND+3
 * of `out` and `act`. v: g in grouped.h. Returns the sum of h * g over them. */
template <bool QUANT, int LAYOUT, int SECOND = 4>
__device__ __forceinline__ float grouped_glu_bwd8(const struct grouped &g, bf16 *out, bf16 *act, const float v[8],
                                                  float weight, const struct pre8 &pre, bool both = true)
{
    static_assert(SECOND == 4 || LAYOUT == GLU_PAIRS, "gates of eight columns are next to each other");
    float gate[8], up[8], h[8], sum = 0.0f;
    pre_unpack(gate, up, LAYOUT == GLU_PAIRS, pre);
#pragma unroll
    for (int i = 0; i < 8; i++) { /* gate and up become their gradients */
        const float dh = weight * v[i];
        h[i] = LAYOUT == GLU_PLAIN_HALVES ? swiglu_gradient(gate[i], up[i], dh, &gate[i], &up[i])
                                          : glu_gradient(g.form, gate[i], up[i], dh, &gate[i], &up[i]);
        if (!QUANT) sum += h[i] * v[i];
    }
    if (QUANT) {
        grouped_read_quant8(g, load_two4<SECOND>(act, both), h, gate, up);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += h[i] * v[i];
    } else {
        store_two4<SECOND>(act, bf16_pack8(h), both);
    }
    if (LAYOUT == GLU_PAIRS) {
        uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = bf16_pack(gate[i], up[i]);
        store16(out, make_uint4(w[0], w[1], w[2], w[3]));
        if (both) store16(out + 2 * SECOND, make_uint4(w[4], w[5], w[6], w[7]));
    } else {
        store16(out, bf16_pack8(gate));
        store16(out + g.n_out, bf16_pack8(up));
    }
    return sum;
}
/* grouped_glu_bwd8 for columns n .. n+7 of row m, in any layout. */
template <bool QUANT>
__device__ __forceinline__ float grouped_glu_bwd8(const struct grouped &g, int64_t m, int64_t n, const float v[8],
                                                  float weight, const struct pre8 &pre)
{
    bf16 *out = g.out + pre_start(g, m, n), *act = g.act + m * g.n_out + n;
    return g.glu.interleaved ? grouped_glu_bwd8<QUANT, GLU_PAIRS>(g, out, act, v, weight, pre)
                             : grouped_glu_bwd8<QUANT, GLU_HALVES>(g, out, act, v, weight, pre);
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

/* x = columns c .. c + 3 and c + 16 .. c + 19, c = 8 (q % 2) + 4 (q / 2), in lane q: takes half the shuffles of
 * quad_columns. The interleaved gates and ups of these columns are whole sectors of 32 bytes in each load and store. */
__device__ __forceinline__ void quad_fours(float x[8], const float v[4][2])
{
    const bool odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t low = __float_as_uint(v[i / 2 * 2][i % 2]), high = __float_as_uint(v[i / 2 * 2 + 1][i % 2]);
        quad_swap(&low, &high, odd, 1);
        x[i / 2 * 4 + i % 2] = __uint_as_float(low);
        x[i / 2 * 4 + i % 2 + 2] = __uint_as_float(high);
    }
}

/* In the GLU's backward a lane has eight of 32 columns: those of quad_fours if gates and ups are interleaved, else of
 * quad_columns. glu_column: the first of the eight. load_columns: pre of the eight; n_col: columns in bounds, from the
 * first on. */
template <int LAYOUT> __device__ __forceinline__ void glu_columns(float x[8], const float v[4][2])
{
    LAYOUT == GLU_PAIRS ? quad_fours(x, v) : quad_columns(x, v);
}
template <int LAYOUT> __device__ __forceinline__ int glu_column()
{
    const int q = threadIdx.x % 4;
    return LAYOUT == GLU_PAIRS ? q % 2 * 8 + q / 2 * 4 : q * 8;
}
template <int LAYOUT> __device__ __forceinline__ struct pre8 load_columns(const bf16 *from, int n_out, int n_col)
{
    struct pre8 p = {};
    if (n_col > 0) p.x = *(const uint4 *)from;
    if (LAYOUT == GLU_PAIRS ? n_col > 16 : n_col > 0) p.y = *(const uint4 *)(from + (LAYOUT == GLU_PAIRS ? 32 : n_out));
    return p;
}

/* Stores columns n .. n+7 of row m, rounded. GROUPED_GLU: also the activations of their four pairs. */
template <int EPILOGUE>
__device__ __forceinline__ void grouped_store8(const struct grouped &g, int64_t m, int64_t n, uint4 v)
{
    store16(g.out + m * g.n_out + n, v);
    if (EPILOGUE == GROUPED_GLU) {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
        float h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) h[i] = glu_value(g.form, bf16_low(w[i]), bf16_high(w[i]));
        store8(g.act + m * (g.n_out / 2) + n / 2, make_uint2(bf16_pack(h[0], h[1]), bf16_pack(h[2], h[3])));
    }
}

/* Finishes 32 columns of row m from column n on, for the epilogues other than the GLU's backward. bias: of this lane's
 * pairs of columns, 0 with GROUPED_GATED. weight: the gate of the row, only for GROUPED_GATED. */
template <int EPILOGUE>
__device__ __forceinline__ void grouped_finish(const struct grouped &g, int64_t m, int64_t n, bool live,
                                               const float v[4][2], const float bias[4][2], float weight = 1.0f)
{
    const int64_t mine = n + 8 * (threadIdx.x & 3); /* columns of this lane after the transpose */
    const bool stored = live && mine < g.n_out;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = bf16_pack(v[i][0] + bias[i][0], v[i][1] + bias[i][1]);
    quad_transpose(w);
    if (stored) grouped_store8<EPILOGUE>(g, m, mine, make_uint4(w[0], w[1], w[2], w[3]));
    if (EPILOGUE == GROUPED_GATED) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = bf16_pack(weight * v[i][0], weight * v[i][1]);
        quad_transpose(w);
        if (stored) store16(g.act + m * g.n_out + mine, make_uint4(w[0], w[1], w[2], w[3]));
    }
}

#endif
