/* pack.h - for several formats: a block's largest magnitude, its scaled values, bytes with two 4-bit codes. Loops
 * process one block at a time, codes as int32_t, so that compilers vectorise them. */
#ifndef MT_PACK_H
#define MT_PACK_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/base.h"
#include "kernels/format/minifloat.h"

/* The largest magnitude among the finite values. Adds the number of other values to *n_bad. It compares integers: the
 * bits of positive floats have the same order. */
static inline float pack_absmax(const float *x, int64_t n, int64_t *n_bad)
{
    const int32_t infinity = 0x7f800000;
    int32_t largest = 0, bad = 0, bits;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&bits, x + i, sizeof(bits));
        bits &= INT32_MAX;
        bad += bits >= infinity;
        bits = bits < infinity ? bits : 0;
        largest = bits > largest ? bits : largest;
    }
    float out;
    memcpy(&out, &largest, sizeof(out));
    *n_bad += bad;
    return out;
}

/* v [n] = x * factor, 0 where x is 0 or not finite: in a block of zeros 0 * infinity would be NaN. */
static inline void pack_scaled(float *v, const float *x, int64_t n, float factor)
{
    for (int64_t i = 0; i < n; i++) v[i] = x[i] != 0 && fabsf(x[i]) <= FLT_MAX ? x[i] * factor : 0;
}

static inline void pack_e2m1(int32_t *code, const float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) code[i] = (int32_t)e2m1_code(e2m1_round(fabsf(v[i])));
}

/* For each byte, the values of its two nibbles, before scaling. */
struct pack_pairs {
    float of[256][2];
};

static inline void pack_pairs_init(struct pack_pairs *p, const float code[16], bool low_first)
{
    for (int byte = 0; byte < 256; byte++) {
        p->of[byte][0] = code[low_first ? byte & 15 : byte >> 4];
        p->of[byte][1] = code[low_first ? byte >> 4 : byte & 15];
    }
}

static inline void pack_pairs_scale(float *out, const struct pack_pairs *p, const uint8_t *bytes, int64_t n_bytes,
                                    float scale)
{
    enum { N = 4 };
    typedef double pairs __attribute__((vector_size(32))); /* a double is the bits of two floats */
    typedef float values __attribute__((vector_size(32)));
    int64_t i = 0;
    for (; i + N <= n_bytes; i += N) {
        pairs v;
        for (int k = 0; k < N; k++) {
            double two;
            memcpy(&two, p->of[bytes[i + k]], sizeof(two));
            v[k] = two;
        }
        const values scaled = (values)v * scale;
        memcpy(out + 2 * i, &scaled, sizeof(scaled));
    }
    for (; i < n_bytes; i++) {
        out[2 * i] = p->of[bytes[i]][0] * scale;
        out[2 * i + 1] = p->of[bytes[i]][1] * scale;
    }
}

/* The code of element i, where the low nibble has the element with the even index. */
static inline int pack_low_first(const void *nibbles, int64_t i)
{
    const uint8_t byte = ((const uint8_t *)nibbles)[i / 2];
    return i & 1 ? byte >> 4 : byte & 15;
}

#endif
