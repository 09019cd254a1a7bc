/* alu.c - instructions that compute each lane by itself: arithmetic, comparisons, conversions. ex2, rcp, rsqrt and div
 * .approx are computed as exactly as the host can; a GPU is 1 or 2 ulp away. */
#include <fenv.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "tests/emulator/warp.h"

typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32;
typedef double f64;

#define A a[l]
#define B b[l]
#define C c[l]
#define D d[l]

#define OP1(name, TD, TA, expr)                                                                                        \
    static void name(struct warp *w, const struct ins *i, uint32_t m)                                                  \
    {                                                                                                                  \
        TD *d = row(w, i, 0);                                                                                          \
        const TA *a = row(w, i, 1);                                                                                    \
        FOR_LANES(m, D = (TD)(expr));                                                                                  \
    }
#define OP2(name, TD, TA, TB, expr)                                                                                    \
    static void name(struct warp *w, const struct ins *i, uint32_t m)                                                  \
    {                                                                                                                  \
        TD *d = row(w, i, 0);                                                                                          \
        const TA *a = row(w, i, 1);                                                                                    \
        const TB *b = row(w, i, 2);                                                                                    \
        FOR_LANES(m, D = (TD)(expr));                                                                                  \
    }
#define OP3(name, TD, TA, TB, TC, expr)                                                                                \
    static void name(struct warp *w, const struct ins *i, uint32_t m)                                                  \
    {                                                                                                                  \
        TD *d = row(w, i, 0);                                                                                          \
        const TA *a = row(w, i, 1);                                                                                    \
        const TB *b = row(w, i, 2);                                                                                    \
        const TC *c = row(w, i, 3);                                                                                    \
        FOR_LANES(m, D = (TD)(expr));                                                                                  \
    }

/* ---- integers ---- */

OP2(add_32, u32, u32, u32, A + B)
OP2(add_64, u64, u64, u64, A + B)
OP2(sub_32, u32, u32, u32, A - B)
OP2(sub_64, u64, u64, u64, A - B)
OP2(add_16, u32, u32, u32, (A + B) & 0xffff)
OP2(sub_16, u32, u32, u32, (A - B) & 0xffff)
OP2(mul_lo_16, u32, u32, u32, (A * B) & 0xffff)
OP2(mul_lo_32, u32, u32, u32, A *B)
OP2(mul_lo_64, u64, u64, u64, A *B)
OP2(mul_hi_s32, s32, s32, s32, ((s64)A * B) >> 32)
OP2(mul_hi_u32, u32, u32, u32, ((u64)A * B) >> 32)
OP2(mul_hi_s64, s64, s64, s64, (s64)(((__int128)A * B) >> 64))
OP2(mul_hi_u64, u64, u64, u64, (u64)(((unsigned __int128)A * B) >> 64))
OP2(mul_wide_s32, s64, s32, s32, (s64)A *B)
OP2(mul_wide_u32, u64, u32, u32, (u64)A *B)
OP2(mul_wide_u16, u32, u32, u32, A *B)
OP2(mul_wide_s16, s32, u32, u32, (s32)(s16)A *(s16)B)
OP3(mad_lo_32, u32, u32, u32, u32, A *B + C)
OP3(mad_lo_64, u64, u64, u64, u64, A *B + C)
OP3(mad_wide_u32, u64, u32, u32, u64, (u64)A *B + C)
OP3(mad_wide_s32, s64, s32, s32, s64, (s64)A *B + C)
OP2(div_u32, u32, u32, u32, B ? A / B : ~0u)
OP2(div_s32, s32, s32, s32, B == 0 ? -1 : B == -1 ? (s32)(0u - (u32)A) : A / B)
OP2(div_u64, u64, u64, u64, B ? A / B : ~0ull)
OP2(div_s64, s64, s64, s64, B == 0 ? -1 : B == -1 ? (s64)(0ull - (u64)A) : A / B)
OP2(rem_u32, u32, u32, u32, B ? A % B : A)
OP2(rem_s32, s32, s32, s32, B == 0 ? A : B == -1 ? 0 : A % B)
OP2(rem_u64, u64, u64, u64, B ? A % B : A)
OP2(rem_s64, s64, s64, s64, B == 0 ? A : B == -1 ? 0 : A % B)
OP1(neg_16, u32, u32, (0u - A) & 0xffff)
OP1(neg_32, u32, u32, 0u - A)
OP1(neg_64, u64, u64, 0ull - A)
OP1(abs_s32, s32, s32, A < 0 ? (s32)(0u - (u32)A) : A)
OP2(min_u32, u32, u32, u32, A < B ? A : B)
OP2(max_u32, u32, u32, u32, A > B ? A : B)
OP2(min_s32, s32, s32, s32, A < B ? A : B)
OP2(max_s32, s32, s32, s32, A > B ? A : B)
OP2(min_u64, u64, u64, u64, A < B ? A : B)
OP2(max_u64, u64, u64, u64, A > B ? A : B)
OP2(min_s64, s64, s64, s64, A < B ? A : B)
OP2(max_s64, s64, s64, s64, A > B ? A : B)
OP2(min_u16, u32, u32, u32, A < B ? A : B)
OP2(max_u16, u32, u32, u32, A > B ? A : B)

/* ---- bits ---- */

OP2(and_32, u32, u32, u32, A &B)
OP2(or_32, u32, u32, u32, A | B)
OP2(xor_32, u32, u32, u32, A ^ B)
OP1(not_32, u32, u32, ~A)
OP1(not_16, u32, u32, ~A & 0xffff)
OP2(and_64, u64, u64, u64, A &B)
OP2(or_64, u64, u64, u64, A | B)
OP2(xor_64, u64, u64, u64, A ^ B)
OP1(not_64, u64, u64, ~A)
OP2(shl_16, u32, u32, u32, B > 15 ? 0 : A << B & 0xffff)
OP2(shl_32, u32, u32, u32, B > 31 ? 0 : A << (B & 31))
OP2(shl_64, u64, u64, u32, B > 63 ? 0 : A << (B & 63))
OP2(shr_u16, u32, u32, u32, B > 15 ? 0 : A >> B)
OP2(shr_s16, u32, u32, u32, ((s32)(s16)A >> (B > 15 ? 15 : B)) & 0xffff)
OP2(shr_u32, u32, u32, u32, B > 31 ? 0 : A >> (B & 31))
OP2(shr_s32, s32, s32, u32, A >> (B > 31 ? 31 : B))
OP2(shr_u64, u64, u64, u32, B > 63 ? 0 : A >> (B & 63))
OP2(shr_s64, s64, s64, u32, A >> (B > 63 ? 63 : B))
OP1(popc_32, u32, u32, __builtin_popcount(A))
OP1(popc_64, u32, u64, __builtin_popcountll(A))
OP1(clz_32, u32, u32, A ? __builtin_clz(A) : 32)
OP1(clz_64, u32, u64, A ? __builtin_clzll(A) : 64)
OP1(bfind_shift_u32, u32, u32, A ? (u32)__builtin_clz(A) : ~0u)
OP1(bfind_u32, u32, u32, A ? 31u - (u32)__builtin_clz(A) : ~0u)

static u32 reverse_bits(u32 x)
{
    u32 y = 0;
    for (int k = 0; k < 32; k++) y |= (x >> k & 1) << (31 - k);
    return y;
}
OP1(brev_32, u32, u32, reverse_bits(A))

static u32 select_bytes(u32 a, u32 b, u32 c)
{
    const u64 bytes = (u64)b << 32 | a;
    u32 y = 0;
    for (int k = 0; k < 4; k++) {
        const u32 s = c >> 4 * k & 15;
        u32 x = (u32)(bytes >> 8 * (s & 7)) & 255;
        if (s & 8) x = x & 128 ? 255 : 0;
        y |= x << 8 * k;
    }
    return y;
}
OP3(prmt, u32, u32, u32, u32, select_bytes(A, B, C))

static u64 insert_bits(u64 a, u64 b, u32 at, u32 n, u32 width)
{
    at &= 255;
    n &= 255;
    if (at >= width || n == 0) return b;
    if (n > width - at) n = width - at;
    const u64 mask = (n == 64 ? ~0ull : (1ull << n) - 1) << at;
    return (b & ~mask) | (a << at & mask);
}
static void bfi_32(struct warp *w, const struct ins *i, uint32_t m)
{
    u32 *d = row(w, i, 0);
    const u32 *a = row(w, i, 1), *b = row(w, i, 2), *c = row(w, i, 3), *n = row(w, i, 4);
    FOR_LANES(m, D = (u32)insert_bits(A, B, C, n[l], 32));
}
static void bfi_64(struct warp *w, const struct ins *i, uint32_t m)
{
    u64 *d = row(w, i, 0);
    const u64 *a = row(w, i, 1), *b = row(w, i, 2);
    const u32 *c = row(w, i, 3), *n = row(w, i, 4);
    FOR_LANES(m, D = insert_bits(A, B, C, n[l], 64));
}
OP3(bfe_u32, u32, u32, u32, u32, (B & 255) > 31 ? 0 : A >> (B & 255) & ((C & 255) > 31 ? ~0u : (1u << (C & 255)) - 1))
OP3(shf_l_wrap, u32, u32, u32, u32, ((((u64)B << 32 | A) << (C & 31)) >> 32))
OP3(shf_r_wrap, u32, u32, u32, u32, (((u64)B << 32 | A) >> (C & 31)))

/* ---- floating point ---- */

static inline u32 bits(f32 x)
{
    union {
        f32 f;
        u32 u;
    } v = {.f = x};
    return v.u;
}
static inline f32 of_bits(u32 x)
{
    union {
        u32 u;
        f32 f;
    } v = {.u = x};
    return v.f;
}
/* The operand that is a number, if one is not; -0 < +0. */
static inline f32 smaller(f32 a, f32 b)
{
    return a < b || b != b ? a : a == b ? of_bits(bits(a) | bits(b)) : a != a || b < a ? b : a;
}
static inline f32 larger(f32 a, f32 b)
{
    return a > b || b != b ? a : a == b ? of_bits(bits(a) & bits(b)) : a != a || b > a ? b : a;
}
static const u32 nan_bits = 0x7fffffff;
#define NAN_OF(a, b, x) ((a) != (a) || (b) != (b) ? of_bits(nan_bits) : (x))
static inline f32 flush(f32 x) { return fabsf(x) < 0x1p-126f ? of_bits(bits(x) & 0x80000000) : x; }

OP2(add_f32, f32, f32, f32, A + B)
OP2(sub_f32, f32, f32, f32, A - B)
OP2(mul_f32, f32, f32, f32, A *B)
OP2(div_f32, f32, f32, f32, A / B)
OP3(fma_f32, f32, f32, f32, f32, fmaf(A, B, C))
OP1(neg_f32, u32, u32, A ^ 0x80000000)
OP1(abs_f32, u32, u32, A & 0x7fffffff)
OP2(min_f32, f32, f32, f32, smaller(A, B))
OP2(max_f32, f32, f32, f32, larger(A, B))
OP2(min_nan_f32, f32, f32, f32, NAN_OF(A, B, smaller(A, B)))
OP2(max_nan_f32, f32, f32, f32, NAN_OF(A, B, larger(A, B)))
OP2(copysign_f32, u32, u32, u32, (A & 0x80000000) | (B & 0x7fffffff))
OP1(rcp_f32, f32, f32, 1 / A)
OP1(rcp_ftz_f32, f32, f32, flush(1 / flush(A)))
OP1(sqrt_f32, f32, f32, sqrtf(A))
OP1(rsqrt_f32, f32, f32, (f32)(1 / sqrt((f64)A)))
OP1(ex2_f32, f32, f32, exp2f(A))
OP1(ex2_ftz_f32, f32, f32, flush(exp2f(flush(A))))
OP1(lg2_f32, f32, f32, log2f(A))
OP1(saturate_f32, f32, f32, A > 0 ? (A < 1 ? A : 1) : 0)

OP2(add_f64, f64, f64, f64, A + B)
OP2(sub_f64, f64, f64, f64, A - B)
OP2(mul_f64, f64, f64, f64, A *B)
OP2(div_f64, f64, f64, f64, A / B)
OP3(fma_f64, f64, f64, f64, f64, fma(A, B, C))
OP1(neg_f64, f64, f64, -A)
OP1(abs_f64, f64, f64, fabs(A))
OP2(max_f64, f64, f64, f64, A > B || B != B ? A : B)
OP2(min_f64, f64, f64, f64, A < B || B != B ? A : B)
OP1(rcp_f64, f64, f64, 1 / A)
OP1(sqrt_f64, f64, f64, sqrt(A))

/* Directed rounding. The volatile variables keep the operation between the calls of fesetround. */
static void add_rz_f32(struct warp *w, const struct ins *i, uint32_t m)
{
    f32 *d = row(w, i, 0);
    const f32 *a = row(w, i, 1), *b = row(w, i, 2);
    fesetround(FE_TOWARDZERO);
    for (int l = 0; l < LANES; l++) {
        const volatile f32 x = A, y = B;
        const volatile f32 sum = x + y;
        if (m >> l & 1) D = sum;
    }
    fesetround(FE_TONEAREST);
}
static void fma_rm_f32(struct warp *w, const struct ins *i, uint32_t m)
{
    f32 *d = row(w, i, 0);
    const f32 *a = row(w, i, 1), *b = row(w, i, 2), *c = row(w, i, 3);
    fesetround(FE_DOWNWARD);
    for (int l = 0; l < LANES; l++) {
        const volatile f32 x = A, y = B, z = C;
        const volatile f32 sum = fmaf(x, y, z);
        if (m >> l & 1) D = sum;
    }
    fesetround(FE_TONEAREST);
}

/* ---- conversions ---- */

static inline u32 to_bf16(f32 x)
{
    const u32 b = bits(x);
    return x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static inline f32 of_f16(u32 x) { return _cvtsh_ss((u16)x); }
static inline u32 to_f16(f32 x)
{
    return x != x ? 0x7fff : _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static u32 to_e4m3(f32 x)
{
    const u32 sign = bits(x) >> 24 & 0x80;
    const f32 y = fabsf(x);
    int exponent;
    if (x != x) return 0x7f;
    if (y >= 448) return sign | 0x7e;
    frexpf(y, &exponent);
    if (exponent < -5) exponent = -5; /* below 2^-6: steps of 2^-9 */
    const f32 steps = rintf(ldexpf(y, 4 - exponent));
    return sign | (steps < 8 ? (u32)steps : (u32)(exponent + 6) * 8 + (u32)steps - 8);
}
static inline s32 to_s32(f32 x) { return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : (s32)x; }
static inline u32 to_u32(f32 x) { return x >= 0x1p32f ? UINT32_MAX : x > 0 ? (u32)(s64)x : 0; }

OP1(cvt_bf16_f32, u32, f32, to_bf16(A))
OP2(cvt_bf16x2_f32, u32, f32, f32, to_bf16(A) << 16 | to_bf16(B))
OP1(cvt_f32_bf16, u32, u32, A << 16)
OP1(cvt_f32_f16, f32, u32, of_f16(A))
OP1(cvt_f16_f32, u32, f32, to_f16(A))
OP2(cvt_e4m3x2_f32, u32, f32, f32, to_e4m3(A) << 8 | to_e4m3(B))
OP1(cvt_rzi_s32_f32, s32, f32, to_s32(A))
OP1(cvt_rzi_u32_f32, u32, f32, to_u32(A))
OP1(cvt_rpi_f32_f32, f32, f32, ceilf(A))
OP1(cvt_f32_u32, f32, u32, A)
OP1(cvt_f32_s32, f32, s32, A)
OP1(cvt_f32_s64, f32, s64, A)
OP1(cvt_f32_u64, f32, u64, A)
OP1(cvt_f32_f64, f32, f64, A)
OP1(cvt_f64_f32, f64, f32, A)
OP1(cvt_f64_u64, f64, u64, A)
OP1(cvt_f64_s64, f64, s64, A)
OP1(cvt_f64_s32, f64, s32, A)
OP1(cvt_f64_u32, f64, u32, A)
OP1(cvt_u16_u32, u32, u32, A & 0xffff)
OP1(cvt_u16_u64, u32, u64, A & 0xffff)
OP1(cvt_s32_s16, s32, u32, (s16)A)
OP1(cvt_s64_s16, s64, u32, (s16)A)
OP1(cvt_u32_u64, u32, u64, A)
OP1(cvt_u64_u32, u64, u32, A)
OP1(cvt_s64_s32, s64, s32, A)
OP1(cvt_u32_u8, u32, u32, A & 255)
OP1(cvt_s32_s8, s32, u32, (int8_t)A)

/* ---- pairs of bf16; GPUs before sm_90 have no add, sub and mul of them ---- */

static inline u32 bf16_pair(f32 high, f32 low) { return to_bf16(high) << 16 | to_bf16(low); }
#define HIGH(x) of_bits((x)&0xffff0000)
#define LOW(x)  of_bits((x) << 16)
OP3(fma_bf16x2, u32, u32, u32, u32, bf16_pair(fmaf(HIGH(A), HIGH(B), HIGH(C)), fmaf(LOW(A), LOW(B), LOW(C))))
OP2(max_bf16x2, u32, u32, u32, bf16_pair(larger(HIGH(A), HIGH(B)), larger(LOW(A), LOW(B))))
OP2(min_bf16x2, u32, u32, u32, bf16_pair(smaller(HIGH(A), HIGH(B)), smaller(LOW(A), LOW(B))))

/* ---- copies, choices, comparisons ---- */

OP1(mov_32, u32, u32, A)
OP1(mov_64, u64, u64, A)
OP3(selp_32, u32, u32, u32, u32, C ? A : B)
OP3(selp_64, u64, u64, u64, u32, C ? A : B)
OP1(to_shared, u64, u64, A - SHARED_WINDOW)
OP1(to_local, u64, u64, A - LOCAL_WINDOW)
OP1(of_shared, u64, u64, A + SHARED_WINDOW)
OP1(of_local, u64, u64, A + LOCAL_WINDOW)

#define MASK(x) ((x) ? ~0u : 0)
#define COMPARE(t, T, T_REG)                                                                                           \
    OP2(setp_eq_##t, u32, T_REG, T_REG, MASK((T)A == (T)B))                                                            \
    OP2(setp_ne_##t, u32, T_REG, T_REG, MASK((T)A != (T)B))                                                            \
    OP2(setp_lt_##t, u32, T_REG, T_REG, MASK((T)A < (T)B))                                                             \
    OP2(setp_le_##t, u32, T_REG, T_REG, MASK((T)A <= (T)B))                                                            \
    OP2(setp_gt_##t, u32, T_REG, T_REG, MASK((T)A > (T)B))                                                             \
    OP2(setp_ge_##t, u32, T_REG, T_REG, MASK((T)A >= (T)B))
COMPARE(u16, u16, u32)
COMPARE(s16, s16, u32)
COMPARE(u32, u32, u32)
COMPARE(s32, s32, s32)
COMPARE(u64, u64, u64)
COMPARE(s64, s64, s64)
#define COMPARE_FLOAT(t, T)                                                                                            \
    OP2(setp_eq_##t, u32, T, T, MASK(A == B))                                                                          \
    OP2(setp_ne_##t, u32, T, T, MASK(A<B || A> B))                                                                     \
    OP2(setp_lt_##t, u32, T, T, MASK(A < B))                                                                           \
    OP2(setp_le_##t, u32, T, T, MASK(A <= B))                                                                          \
    OP2(setp_gt_##t, u32, T, T, MASK(A > B))                                                                           \
    OP2(setp_ge_##t, u32, T, T, MASK(A >= B))                                                                          \
    OP2(setp_equ_##t, u32, T, T, MASK(!(A < B || A > B)))                                                              \
    OP2(setp_neu_##t, u32, T, T, MASK(A != B))                                                                         \
    OP2(setp_ltu_##t, u32, T, T, MASK(!(A >= B)))                                                                      \
    OP2(setp_leu_##t, u32, T, T, MASK(!(A > B)))                                                                       \
    OP2(setp_gtu_##t, u32, T, T, MASK(!(A <= B)))                                                                      \
    OP2(setp_geu_##t, u32, T, T, MASK(!(A < B)))                                                                       \
    OP2(setp_num_##t, u32, T, T, MASK(A == A && B == B))                                                               \
    OP2(setp_nan_##t, u32, T, T, MASK(A != A || B != B))
COMPARE_FLOAT(f32, f32)
COMPARE_FLOAT(f64, f64)

/* ---- table ---- */

#define COMPARISONS(t, name, w)                                                                                        \
    {"setp.eq." name, "4" w w, setp_eq_##t}, {"setp.ne." name, "4" w w, setp_ne_##t},                                  \
        {"setp.lt." name, "4" w w, setp_lt_##t}, {"setp.le." name, "4" w w, setp_le_##t},                              \
        {"setp.gt." name, "4" w w, setp_gt_##t},                                                                       \
    {                                                                                                                  \
        "setp.ge." name, "4" w w, setp_ge_##t                                                                          \
    }
#define COMPARISONS_FLOAT(t, w)                                                                                        \
    COMPARISONS(t, #t, w), {"setp.equ." #t, "4" w w, setp_equ_##t}, {"setp.neu." #t, "4" w w, setp_neu_##t},           \
        {"setp.ltu." #t, "4" w w, setp_ltu_##t}, {"setp.leu." #t, "4" w w, setp_leu_##t},                              \
        {"setp.gtu." #t, "4" w w, setp_gtu_##t}, {"setp.geu." #t, "4" w w, setp_geu_##t},                              \
        {"setp.num." #t, "4" w w, setp_num_##t},                                                                       \
    {                                                                                                                  \
        "setp.nan." #t, "4" w w, setp_nan_##t                                                                          \
    }
#define SIGNS_32(op, run)                                                                                              \
    {op ".s32", "444", run}, { op ".u32", "444", run }
#define SIGNS_64(op, run)                                                                                              \
    {op ".s64", "888", run}, { op ".u64", "888", run }

static const struct op table[] = {
    SIGNS_32("add", add_32),
    SIGNS_64("add", add_64),
    SIGNS_32("sub", sub_32),
    SIGNS_64("sub", sub_64),
    {"add.s16", "444", add_16},
    {"add.u16", "444", add_16},
    {"sub.s16", "444", sub_16},
    {"sub.u16", "444", sub_16},
    SIGNS_32("mul.lo", mul_lo_32),
    SIGNS_64("mul.lo", mul_lo_64),
    {"mul.lo.s16", "444", mul_lo_16},
    {"mul.lo.u16", "444", mul_lo_16},
    {"mul.hi.s32", "444", mul_hi_s32},
    {"mul.hi.u32", "444", mul_hi_u32},
    {"mul.hi.s64", "888", mul_hi_s64},
    {"mul.hi.u64", "888", mul_hi_u64},
    {"mul.wide.s32", "844", mul_wide_s32},
    {"mul.wide.u32", "844", mul_wide_u32},
    {"mul.wide.u16", "444", mul_wide_u16},
    {"mul.wide.s16", "444", mul_wide_s16},
    {"mad.lo.s32", "4444", mad_lo_32},
    {"mad.lo.u32", "4444", mad_lo_32},
    {"mad.lo.s64", "8888", mad_lo_64},
    {"mad.lo.u64", "8888", mad_lo_64},
    {"mad.wide.u32", "8448", mad_wide_u32},
    {"mad.wide.s32", "8448", mad_wide_s32},
    {"div.u32", "444", div_u32},
    {"div.s32", "444", div_s32},
    {"div.u64", "888", div_u64},
    {"div.s64", "888", div_s64},
    {"rem.u32", "444", rem_u32},
    {"rem.s32", "444", rem_s32},
    {"rem.u64", "888", rem_u64},
    {"rem.s64", "888", rem_s64},
    {"neg.s16", "44", neg_16},
    {"neg.s32", "44", neg_32},
    {"neg.s64", "88", neg_64},
    {"abs.s32", "44", abs_s32},
    {"min.u32", "444", min_u32},
    {"max.u32", "444", max_u32},
    {"min.s32", "444", min_s32},
    {"max.s32", "444", max_s32},
    {"min.u64", "888", min_u64},
    {"max.u64", "888", max_u64},
    {"min.s64", "888", min_s64},
    {"max.s64", "888", max_s64},
    {"min.u16", "444", min_u16},
    {"max.u16", "444", max_u16},
    {"and.b32", "444", and_32},
    {"or.b32", "444", or_32},
    {"xor.b32", "444", xor_32},
    {"not.b32", "44", not_32},
    {"and.b16", "444", and_32},
    {"or.b16", "444", or_32},
    {"xor.b16", "444", xor_32},
    {"not.b16", "44", not_16},
    {"and.pred", "444", and_32},
    {"or.pred", "444", or_32},
    {"xor.pred", "444", xor_32},
    {"not.pred", "44", not_32},
    {"and.b64", "888", and_64},
    {"or.b64", "888", or_64},
    {"xor.b64", "888", xor_64},
    {"not.b64", "88", not_64},
    {"shl.b16", "444", shl_16},
    {"shl.b32", "444", shl_32},
    {"shl.b64", "884", shl_64},
    {"shr.u16", "444", shr_u16},
    {"shr.s16", "444", shr_s16},
    {"shr.u32", "444", shr_u32},
    {"shr.b32", "444", shr_u32},
    {"shr.s32", "444", shr_s32},
    {"shr.u64", "884", shr_u64},
    {"shr.b64", "884", shr_u64},
    {"shr.s64", "884", shr_s64},
    {"popc.b32", "44", popc_32},
    {"popc.b64", "48", popc_64},
    {"clz.b32", "44", clz_32},
    {"clz.b64", "48", clz_64},
    {"bfind.shiftamt.u32", "44", bfind_shift_u32},
    {"bfind.u32", "44", bfind_u32},
    {"brev.b32", "44", brev_32},
    {"prmt.b32", "4444", prmt},
    {"bfi.b32", "44444", bfi_32},
    {"bfi.b64", "88844", bfi_64},
    {"bfe.u32", "4444", bfe_u32},
    {"shf.l.wrap.b32", "4444", shf_l_wrap},
    {"shf.r.wrap.b32", "4444", shf_r_wrap},

    {"add.f32", "444", add_f32},
    {"add.rn.f32", "444", add_f32},
    {"add.rz.f32", "444", add_rz_f32},
    {"sub.f32", "444", sub_f32},
    {"sub.rn.f32", "444", sub_f32},
    {"mul.f32", "444", mul_f32},
    {"mul.rn.f32", "444", mul_f32},
    {"div.rn.f32", "444", div_f32},
    {"div.approx.f32", "444", div_f32},
    {"div.full.f32", "444", div_f32},
    {"fma.rn.f32", "4444", fma_f32},
    {"fma.rm.f32", "4444", fma_rm_f32},
    {"neg.f32", "44", neg_f32},
    {"abs.f32", "44", abs_f32},
    {"min.f32", "444", min_f32},
    {"max.f32", "444", max_f32},
    {"min.NaN.f32", "444", min_nan_f32},
    {"max.NaN.f32", "444", max_nan_f32},
    {"copysign.f32", "444", copysign_f32},
    {"rcp.rn.f32", "44", rcp_f32},
    {"rcp.approx.f32", "44", rcp_f32},
    {"rcp.approx.ftz.f32", "44", rcp_ftz_f32},
    {"sqrt.rn.f32", "44", sqrt_f32},
    {"sqrt.approx.f32", "44", sqrt_f32},
    {"rsqrt.approx.f32", "44", rsqrt_f32},
    {"ex2.approx.f32", "44", ex2_f32},
    {"ex2.approx.ftz.f32", "44", ex2_ftz_f32},
    {"lg2.approx.f32", "44", lg2_f32},
    {"cvt.sat.f32.f32", "44", saturate_f32},
    {"add.f64", "888", add_f64},
    {"add.rn.f64", "888", add_f64},
    {"sub.f64", "888", sub_f64},
    {"sub.rn.f64", "888", sub_f64},
    {"mul.f64", "888", mul_f64},
    {"mul.rn.f64", "888", mul_f64},
    {"div.rn.f64", "888", div_f64},
    {"fma.rn.f64", "8888", fma_f64},
    {"neg.f64", "88", neg_f64},
    {"abs.f64", "88", abs_f64},
    {"max.f64", "888", max_f64},
    {"min.f64", "888", min_f64},
    {"rcp.approx.ftz.f64", "88", rcp_f64},
    {"rcp.rn.f64", "88", rcp_f64},
    {"sqrt.rn.f64", "88", sqrt_f64},

    {"cvt.rn.bf16.f32", "44", cvt_bf16_f32},
    {"cvt.rn.bf16x2.f32", "444", cvt_bf16x2_f32},
    {"cvt.f32.bf16", "44", cvt_f32_bf16},
    {"cvt.f32.f16", "44", cvt_f32_f16},
    {"cvt.rn.f16.f32", "44", cvt_f16_f32},
    {"cvt.rn.satfinite.e4m3x2.f32", "444", cvt_e4m3x2_f32},
    {"cvt.rzi.s32.f32", "44", cvt_rzi_s32_f32},
    {"cvt.rzi.u32.f32", "44", cvt_rzi_u32_f32},
    {"cvt.rpi.f32.f32", "44", cvt_rpi_f32_f32},
    {"cvt.rn.f32.u32", "44", cvt_f32_u32},
    {"cvt.rn.f32.s32", "44", cvt_f32_s32},
    {"cvt.rn.f32.s64", "48", cvt_f32_s64},
    {"cvt.rn.f32.u64", "48", cvt_f32_u64},
    {"cvt.rn.f32.f64", "48", cvt_f32_f64},
    {"cvt.f64.f32", "84", cvt_f64_f32},
    {"cvt.rn.f64.u64", "88", cvt_f64_u64},
    {"cvt.rn.f64.s64", "88", cvt_f64_s64},
    {"cvt.rn.f64.s32", "84", cvt_f64_s32},
    {"cvt.rn.f64.u32", "84", cvt_f64_u32},
    {"cvt.u16.u32", "44", cvt_u16_u32},
    {"cvt.u16.u64", "48", cvt_u16_u64},
    {"cvt.u32.u16", "44", mov_32},
    {"cvt.s32.s16", "44", cvt_s32_s16},
    {"cvt.s64.s16", "84", cvt_s64_s16},
    {"cvt.u64.u16", "84", cvt_u64_u32},
    {"cvt.u32.u64", "48", cvt_u32_u64},
    {"cvt.s32.s64", "48", cvt_u32_u64},
    {"cvt.u64.u32", "84", cvt_u64_u32},
    {"cvt.s64.s32", "84", cvt_s64_s32},
    {"cvt.u32.u8", "44", cvt_u32_u8},
    {"cvt.s32.s8", "44", cvt_s32_s8},

    {"fma.rn.bf16x2", "4444", fma_bf16x2},
    {"max.bf16x2", "444", max_bf16x2},
    {"min.bf16x2", "444", min_bf16x2},

    {"mov.b32", "44", mov_32},
    {"mov.u32", "44", mov_32},
    {"mov.s32", "44", mov_32},
    {"mov.f32", "44", mov_32},
    {"mov.b16", "44", mov_32},
    {"mov.u16", "44", mov_32},
    {"mov.pred", "44", mov_32},
    {"mov.b64", "88", mov_64},
    {"mov.u64", "88", mov_64},
    {"mov.s64", "88", mov_64},
    {"mov.f64", "88", mov_64},
    {"selp.b16", "4444", selp_32},
    {"selp.u16", "4444", selp_32},
    {"selp.b32", "4444", selp_32},
    {"selp.u32", "4444", selp_32},
    {"selp.s32", "4444", selp_32},
    {"selp.f32", "4444", selp_32},
    {"selp.b64", "8884", selp_64},
    {"selp.u64", "8884", selp_64},
    {"selp.s64", "8884", selp_64},
    {"selp.f64", "8884", selp_64},
    {"cvta.to.global.u64", "88", mov_64},
    {"cvta.global.u64", "88", mov_64},
    {"cvta.param.u64", "88", mov_64},
    {"cvta.to.shared.u64", "88", to_shared},
    {"cvta.shared.u64", "88", of_shared},
    {"cvta.to.local.u64", "88", to_local},
    {"cvta.local.u64", "88", of_local},

    COMPARISONS(u16, "u16", "4"),
    COMPARISONS(u16, "b16", "4"),
    COMPARISONS(s16, "s16", "4"),
    COMPARISONS(u32, "u32", "4"),
    COMPARISONS(u32, "b32", "4"),
    COMPARISONS(s32, "s32", "4"),
    COMPARISONS(u64, "u64", "8"),
    COMPARISONS(u64, "b64", "8"),
    COMPARISONS(s64, "s64", "8"),
    COMPARISONS_FLOAT(f32, "4"),
    COMPARISONS_FLOAT(f64, "8"),
};

const struct op *alu_find(const char *name)
{
    for (unsigned k = 0; k < sizeof(table) / sizeof(*table); k++)
        if (!strcmp(table[k].name, name)) return &table[k];
    return NULL;
}
