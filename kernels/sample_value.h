/* sample_value.h - what op_sample computes for one token, the same code on the CPU and on GPUs. */
#ifndef MT_SAMPLE_VALUE_H
#define MT_SAMPLE_VALUE_H

#include "kernels/ops/ops.h"
#include "kernels/philox.h"

/* The random words of the tokens 4 group .. 4 group + 3. */
MT_BOTH struct philox sample_words(const struct sample_row *r, uint32_t group)
{
    const struct philox counter = {{r->place, r->sample, group, r->stream}};
    return philox4x32(r->seed, counter);
}

/* -log(-log u), u = (word + 1/2) 2^-32: above SAMPLE_NOISE_MIN. */
#define SAMPLE_NOISE_MIN (-3.2)
MT_BOTH double sample_noise(uint32_t word) { return -log(-log(((double)word + 0.5) / 4294967296.0)); }

/* e^x, x <= 0, in units of 2^-44, rounded to nearest even: sums over a vocabulary are exact in any order. Adding 2^52
 * leaves the integer in the low bits. */
#define SAMPLE_UNIT 17592186044416.0
MT_BOTH uint64_t sample_weight(double x)
{
    union {
        double value;
        uint64_t bits;
    } w;
    w.value = exp(x) * SAMPLE_UNIT + 4503599627370496.0;
    return w.bits & 0xfffffffffffffu;
}

/* The logit z after bias and penalties. */
MT_BOTH double sample_edited(double z, const struct sample_edit *e, const struct sample_row *r)
{
    z += e->bias;
    if (e->seen) z = z < 0 ? z * r->repetition : z / r->repetition;
    if (e->n_output > 0) z = fma(-r->frequency, (double)e->n_output, z) - r->presence;
    return z;
}

MT_BOTH bool sample_filters(const struct sample_row *r) { return r->top_k > 0 || r->top_p < 1 || r->min_p > 0; }

#endif
