/* random_weights.h - random weights, any byte range of a tensor at a time.
 *
 * A value depends on the tensor's key and the value's place alone, so that pieces may be made in any order by any
 * number of threads. */
#ifndef MT_RANDOM_WEIGHTS_H
#define MT_RANDOM_WEIGHTS_H

#include "kernels/base.h"

enum random_kind {
    RANDOM_NORMAL,  /* bf16, normal: mean, std */
    RANDOM_ROWS,    /* bf16, normal, each row of `row` values with an std of its own, 0.8 to 1.2 times std */
    RANDOM_NIBBLES, /* every code of 4 bits as often as any other */
    RANDOM_NF4,     /* nearly so, with the mean 0 that the codes of NF4 lack */
    RANDOM_E8M0,    /* exponents of MXFP4 blocks whose values then have the root mean square std; three neighbours */
    RANDOM_ABSMAX,  /* f32, absmax of NF4 blocks, likewise; within 25 % of each other */
    RANDOM_BYTES    /* a copy of `bytes` */
};

struct random_weights {
    enum random_kind kind;
    uint64_t key;
    double mean, std;
    int64_t row;
    const void *bytes;
};

/* Bytes [at, at+n) of the tensor into dst; `at` is a multiple of 8. */
void random_weights_bytes(const struct random_weights *d, uint8_t *dst, int64_t at, int64_t n);

#endif
