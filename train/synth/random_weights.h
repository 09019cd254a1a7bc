/* random_weights.h - random weights, any byte range of a tensor at a time.
 *
 * A value depends only on the tensor's key and the value's index, so threads can generate parts in any order. */
#ifndef MT_RANDOM_WEIGHTS_H
#define MT_RANDOM_WEIGHTS_H

#include "kernels/format/format.h"

enum random_kind {
    RANDOM_NORMAL,  /* bf16, normal: mean, std */
    RANDOM_ROWS,    /* bf16, normal; each row of `row` values has a different std, 0.8 to 1.2 times std */
    RANDOM_NIBBLES, /* uniform 4-bit codes */
    RANDOM_NF4,     /* nearly uniform NF4 codes, chosen so that the mean is 0 */
    RANDOM_E8M0,   /* exponents of MXFP4 blocks, three neighbouring ones, such that the values have the root mean square
                      std */
    RANDOM_E4M3,   /* scale bytes of NVFP4 blocks, uniform over the 16 codes from 1 to 3.75 */
    RANDOM_FP8,    /* e4m3 bytes of a normal distribution whose largest magnitudes are near 448 */
    RANDOM_ABSMAX, /* f32 absmax of NF4 blocks, within 25 % of their mean, such that the values have the root mean
                      square std */
    RANDOM_F32,    /* as RANDOM_NORMAL, in f32 */
    RANDOM_HASH,   /* i64 experts of token ids: for each id `row` distinct numbers below `n_exp` */
    RANDOM_FILL,   /* every byte is `byte` */
    RANDOM_BYTES   /* a copy of `bytes` */
};

struct random_weights {
    enum random_kind kind;
    uint64_t key;
    double mean, std;
    int64_t row, n_exp;
    uint8_t byte;
    const void *bytes;
};

/* The scale of a matrix such that its values have the root mean square std. WF_NVFP4: the global scale for
 * RANDOM_NIBBLES with RANDOM_E4M3. WF_FP8: the scale for RANDOM_FP8. */
float random_weights_scale(enum weight_format format, double std);
/* The biased exponent of the power of two nearest to the scale of WF_FP8. */
uint8_t random_weights_exponent(double std);
/* Writes bytes [at, at+n) of the tensor to dst; `at` is a multiple of 8. */
void random_weights_bytes(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n);

#endif
