/* mxfp4_words.cuh - decodes MXFP4 in words of eight weights to pairs of bf16, exactly: for the products that read
 * packed experts. prmt looks up the bytes of four values at a time. */
#ifndef MT_CUDA_MXFP4_WORDS_H
#define MT_CUDA_MXFP4_WORDS_H

#include <stdint.h>

/* The products of two pairs of bf16. GPUs before sm_90 have no product of bf16 alone, only x y + z in one instruction
 * (fma). z is -0: with +0 a product of -0 would become +0. */
static __device__ __forceinline__ uint32_t times(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000));
    return z;
}

/* bf16 of an e8m0 byte. */
static __device__ __forceinline__ uint32_t scale_bits(uint32_t x) { return x == 0 ? 0x40 : x == 255 ? 0x7fc0 : x << 7; }

/* Codes 0 .. 7 times a scale, in bf16: the low and the high bytes of the eight values. */
struct values {
    uint32_t low[2], high[2];
};
/* scale: e8m0. */
static __device__ __forceinline__ struct values scaled_values(uint32_t scale)
{
    const uint32_t by = scale_bits(scale) * 0x10001;
    const uint32_t a = times(0x3f000000, by), b = times(0x3fc03f80, by), c = times(0x40404000, by),
                   d = times(0x40c04080, by);
    return {{__byte_perm(a, b, 0x6420), __byte_perm(c, d, 0x6420)},
            {__byte_perm(a, b, 0x7531), __byte_perm(c, d, 0x7531)}};
}

/* Four bytes, one for each of four codes 0 .. 7, from the eight bytes `low` and `high`. prmt, since __byte_perm would
 * mask the codes again. */
static __device__ __forceinline__ uint32_t look_up(uint32_t low, uint32_t high, uint32_t codes)
{
    uint32_t x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(codes));
    return x;
}

/* The eight weights of the bytes of c, in pairs of neighbours. */
static __device__ __forceinline__ void decode_word(uint32_t pair[4], const struct values &v, uint32_t c)
{
    const uint32_t low4 = c << 4, codes = c & 0x77777777; /* the signs of the low nibbles at the top of bytes */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t low = look_up(v.low[0], v.low[1], codes >> 16 * i);
        uint32_t high = look_up(v.high[0], v.high[1], codes >> 16 * i), sign;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(sign) : "r"(low4), "r"(c), "r"(i ? 0xfbea : 0xd9c8)); /* 8: sign mode */
        high |= sign & 0x80808080;
        pair[2 * i] = __byte_perm(low, high, 0x5140);
        pair[2 * i + 1] = __byte_perm(low, high, 0x7362);
    }
}

/* The values of the eight nibbles of c, from a table of sixteen bf16: low has their low bytes, high their high bytes.
 * Pair i has nibbles 2 i + 1 and 2 i, as NF4 orders them. */
static __device__ __forceinline__ void nibble_pairs(uint32_t pair[4], const uint32_t low[4], const uint32_t high[4],
                                                    uint32_t c)
{
    const uint32_t low4 = c << 4, codes = c & 0x77777777; /* the fourth bits of the low nibbles at the top of bytes */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t upper; /* bytes of ones where the code is 8 or more */
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(upper) : "r"(low4), "r"(c), "r"(i ? 0xfbea : 0xd9c8)); /* 8: sign mode */
        const uint32_t l =
            (look_up(low[0], low[1], codes >> 16 * i) & ~upper) | (look_up(low[2], low[3], codes >> 16 * i) & upper);
        const uint32_t h = (look_up(high[0], high[1], codes >> 16 * i) & ~upper) |
                           (look_up(high[2], high[3], codes >> 16 * i) & upper);
        pair[2 * i] = __byte_perm(l, h, 0x4051);
        pair[2 * i + 1] = __byte_perm(l, h, 0x6273);
    }
}

/* An e2m1 code whose exponent and mantissa are moved to bits 8 .. 6 of a bf16 has 2^-126 times its value. factor: 2^126
 * times the e8m0 scale. bf16 cannot hold that for a scale above 2^1: `more` is then the second factor, else 0. */
struct mxfp4_factors {
    uint32_t factor, more;
};
static __device__ __forceinline__ struct mxfp4_factors mxfp4_factors_of(uint32_t scale)
{
    const uint32_t by = scale == 255 ? 0x7fc0 : min(scale + 126, 254u) << 7;
    return {by * 0x10001, scale > 128 && scale < 255 ? ((scale - 1) << 7) * 0x10001 : 0};
}

/* The eight weights of the bytes of c: pair i has nibbles i and i + 4. Fewer instructions than decode_word: shifts,
 * masks and bf16 products, without prmt. */
static __device__ __forceinline__ void mxfp4_pairs(uint32_t pair[4], const struct mxfp4_factors &f, uint32_t c)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t size = i < 2 ? c << (6 - 4 * i) : c >> (4 * i - 6), sign = c << (12 - 4 * i);
        pair[i] = times((size & 0x01c001c0) | (sign & 0x80008000), f.factor);
    }
    if (f.more)
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = times(pair[i], f.more);
}

#endif
