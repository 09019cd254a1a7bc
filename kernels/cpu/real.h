/* real.h - the number type of the CPU backend, in two precisions. Every file of this folder is compiled twice: for F32,
 * the CPU backend, and with MT_F64 for the oracle of the tests. CPU(x) is the name of op x in this compilation. */
#ifndef MT_CPU_REAL_H
#define MT_CPU_REAL_H

#include <math.h>

#include "kernels/ops/ops.h"

#ifdef MT_F64
typedef double real;
#define CPU(name) cpu64_##name
#define DT_REAL   DT_F64

static inline real real_exp(real x) { return exp(x); }
static inline real real_sqrt(real x) { return sqrt(x); }
static inline real real_log1p(real x) { return log1p(x); }
static inline real real_tanh(real x) { return tanh(x); }
#else
typedef float real;
#define CPU(name) cpu_##name
#define DT_REAL   DT_F32

/* e^x with an error of at most 2 ulp, without branches, so that loops over it vectorise. 0 below -86.9 (no denormals),
 * inf above 88.72, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 split in two (Cody and Waite); adding 1.5 *
 * 2^23 rounds x / ln 2 to n, in the low bits; e^r by its Taylor series of degree 7. */
static inline real real_exp(real x)
{
    union {
        float f;
        uint32_t u;
    } n, scale;
    n.f = x * 1.44269504f + 12582912.0f;
    float whole = n.f - 12582912.0f;
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    scale.u = (n.u + 126) << 23; /* 2^(n-1): 2^128 would not fit */
    float y = 2 * p * scale.f;
    y = x < -86.9f ? 0.0f : y;
    return x > 88.7228f ? INFINITY : y;
}
static inline real real_sqrt(real x) { return sqrtf(x); }
static inline real real_log1p(real x) { return log1pf(x); }
static inline real real_tanh(real x) { return tanhf(x); }
#endif

static inline real *real_row(struct tensor x, int64_t t) { return (real *)x.data + t * x.ld; }

#endif
