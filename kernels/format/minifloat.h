/* minifloat.h - floats of 4 and 8 bits as their fp32 values and as codes: e2m1, e4m3, e8m0; for the host and for GPUs.
 * Products and quotients (fl_mul, fl_div, fl_by) round once, to nearest even, and are never fused with another
 * operation. A magnitude is at least 0 and not NaN. */
#ifndef MT_MINIFLOAT_H
#define MT_MINIFLOAT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define MT_BOTH static __host__ __device__ __forceinline__
#else
#define MT_BOTH static inline
#endif

union float_word {
    float value;
    uint32_t bits;
};

MT_BOTH uint32_t float_bits(float x)
{
    union float_word w;
    w.value = x;
    return w.bits;
}

MT_BOTH float bits_float(uint32_t bits)
{
    union float_word w;
    w.bits = bits;
    return w.value;
}

MT_BOTH float fl_mul(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

MT_BOTH float fl_add(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

MT_BOTH float fl_div(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

/* Between two limits; a NaN becomes lo. */
MT_BOTH float fl_clamp(float a, float lo, float hi)
{
#ifdef __CUDA_ARCH__
    return fminf(fmaxf(a, lo), hi);
#else
    a = a > lo ? a : lo;
    return a < hi ? a : hi;
#endif
}

/* For fl_by: 1 / b, or 0 where b > 0 is too small or too large for it. */
MT_BOTH float fl_inverse(float b)
{
    if (!(b >= 0x1p-60f && b <= 0x1p60f)) return 0;
#ifdef __CUDA_ARCH__
    return __frcp_rn(b); /* the same bits in fewer operations */
#else
    return 1 / b;
#endif
}

/* a / b, correctly rounded: one product and two corrections of it, each by an exact remainder (Markstein, "Computation
 * of elementary functions on the IBM RISC System/6000 processor", 1990). inverse is fl_inverse(b) and not 0. |a| and
 * |a / b| must be at most 2^90. If |a| or |a / b| is below 2^-90, the result may be wrong, since a remainder may be too
 * small for an exact f32; it is below 2^-29 then, as b is at least 2^-60. */
MT_BOTH float fl_by_inverse(float a, float b, float inverse)
{
    float q = fl_mul(a, inverse);
    q = fmaf(fmaf(-q, b, a), inverse, q);
    return fmaf(fmaf(-q, b, a), inverse, q);
}

/* a / b with the inverse of b, for many a. A GPU's division takes twice as many operations. */
MT_BOTH float fl_by(float a, float b, float inverse)
{
#ifdef __CUDA_ARCH__
    return inverse > 0 ? fl_by_inverse(a, b, inverse) : fl_div(a, b);
#else
    (void)inverse;
    return a / b;
#endif
}

/* A quotient in three operations: within 2^-22 ulp of a / b before its last rounding. */
MT_BOTH float short_quotient(float a, float b, float inverse)
{
    const float q = fl_mul(a, inverse);
    return fmaf(fmaf(-q, b, a), inverse, q);
}

/* fl_by of a whole number a up to 2^8, for which the short quotient is correctly rounded: all a with all 2^23 mantissas
 * of b were tried. */
MT_BOTH float fl_whole_by(float a, float b, float inverse)
{
#ifdef __CUDA_ARCH__
    return inverse > 0 ? short_quotient(a, b, inverse) : fl_div(a, b);
#else
    (void)inverse;
    return a / b;
#endif
}

/* The inverse of b for a short quotient that e2m1_round reads; 0 where the rounded result could be wrong. A short
 * quotient can differ from a / b, correctly rounded, only if a / b is within 2^-22 ulp of the middle w of two
 * neighbouring floats, and the result of e2m1_round only if one of these floats is a midpoint m of two values of e2m1.
 *
 * Let b = B 2^p, B of 24 bits; m = M 2^k, M = 1, 3, 5 or 7; and F = 1, 2 or 4 the power of two at or below M. In units
 * of 2^(p+k), a - b m is a whole number, |b (w - m)| = B F / 2^24, and |a - b w| <= B F / 2^45 < 8 F / 2^24; the last
 * two are half as large if M = 1 and w < m. Since b (w - m) = (a - b m) - (a - b w), B F / 2^24 is within 8 F / 2^24 of
 * a whole number, and B within 8 of a multiple of 2^24 / F: of 2^23, 3 * 2^22 or 2^24. For these b the inverse is 0,
 * except for powers of two, whose quotients are exact. */
MT_BOTH float e2m1_inverse(float b)
{
    const uint32_t mantissa = float_bits(b) & 0x007fffffu;
    return mantissa && ((mantissa + 8) & 0x003fffffu) <= 16 ? 0 : fl_inverse(b);
}

/* The nearest integer, ties to even, never -0; |x| is at most 2^22. */
MT_BOTH float round_even(float x) { return fl_add(fl_add(x, 0x1.8p23f), -0x1.8p23f); }

/* Rounds magnitude a to a multiple of 2^-digits times the power of two at or below a (at least 2^lowest), ties to even.
 * Adding a power of two whose ulp is that multiple rounds; subtracting it is exact. */
MT_BOTH float minifloat_round(float a, int digits, int lowest)
{
    const uint32_t own = float_bits(a) & 0x7f800000u, least = (uint32_t)(lowest + 127) << 23;
    const float shift = bits_float((own > least ? own : least) + ((uint32_t)(23 - digits) << 23));
    return fl_add(fl_add(a, shift), -shift);
}

/* The nearest value of e2m1, ties to the even code; 6 at most. */
MT_BOTH float e2m1_round(float a) { return minifloat_round(a < 6 ? a : 6, 1, 0); }
/* The code of a rounded value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 have the codes 0 to 7. */
MT_BOTH uint32_t e2m1_code(float a) { return a < 1 ? a > 0 : (float_bits(a) >> 22) - 252; }
/* The value of a code of e2m1 with its sign: its bits at the same places of an f32 give the value times 2^-126. */
MT_BOTH float e2m1_value(uint32_t code) { return fl_mul(bits_float((code & 8) << 28 | (code & 7) << 22), 0x1p126f); }
/* The nearest value of e4m3 ("fn", no infinity), ties to the even code; 448 at most, steps of 2^-9 below 2^-6. */
MT_BOTH float e4m3_round(float a) { return minifloat_round(a < 448 ? a : 448, 3, -6); }
MT_BOTH uint32_t e4m3_code(float a) { return a < 0x1p-6f ? (uint32_t)(a * 512) : (float_bits(a) >> 20) - 960; }

/* The value of a byte of e4m3 with its sign: its bits at the same places of an f32 give the value times 2^-120. */
MT_BOTH float e4m3_value(uint32_t byte)
{
    const uint32_t bits = (byte & 0x7f) == 0x7f ? 0x7fc00000u : (byte & 0x7f) << 20;
    return fl_mul(bits_float(bits | (byte & 0x80) << 24), 0x1p120f);
}
/* The scale of a row of e4m3 codes that an FP8 product reads, for the largest magnitude `most` of the row: the least
 * power of two s with most / s <= 448, and at least 2^-100. NaN if most is not finite. */
MT_BOTH float e4m3_row_step(float most)
{
    const uint32_t bits = float_bits(most), byte = (bits >> 23) + ((bits & 0x007fffffu) > 0x00600000u);
    if (bits >= 0x7f800000u) return bits_float(0x7fc00000u);
    return bits_float((byte > 35 ? byte - 8 : 27) << 23);
}
/* What an FP8 product reads for x: the value of its code times step, exact in bf16. NaN if step is NaN. */
MT_BOTH float e4m3_row_value(float x, float step)
{
    const float inverse = bits_float(0x7f000000u - float_bits(step)), a = fl_mul(fabsf(x), inverse);
    return step > 0 ? copysignf(fl_mul(e4m3_round(a), step), x) : step;
}
/* The factor of all codes in a block of NVFP4; see struct weight. */
MT_BOTH float nvfp4_step(uint32_t byte, float scale2, bool divides)
{
    return divides ? fl_div(e4m3_value(byte), scale2) : fl_mul(e4m3_value(byte), scale2);
}

/* 2^(byte - 127), byte < 255, and its inverse. 2^-127 is denormal. */
MT_BOTH float e8m0_value(uint32_t byte) { return bits_float(byte ? byte << 23 : 0x00400000u); }
/* e8m0_value of any byte: 255 is a NaN. */
MT_BOTH float e8m0_scale(uint32_t byte) { return byte == 255 ? bits_float(0x7fc00000u) : e8m0_value(byte); }
MT_BOTH float e8m0_inverse(uint32_t byte) { return e8m0_value(254 - byte); }
/* The e8m0 byte of a power of two, at least 0. e8m0_floor: of the largest that is at most a, divided by 2^drop.
 * e8m0_ceil: of the smallest that is at least a. */
MT_BOTH uint32_t e8m0_floor(float a, uint32_t drop)
{
    const uint32_t byte = float_bits(a) >> 23;
    return byte > drop ? byte - drop : 0;
}
MT_BOTH uint32_t e8m0_ceil(float a)
{
    const uint32_t bits = float_bits(a);
    return bits < 0x00800000u ? bits > 0x00400000u : (bits >> 23) + ((bits & 0x007fffffu) != 0);
}

#endif
