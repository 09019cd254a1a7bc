/* draw.h - random weights, any byte range of a tensor at a time.
 *
 * A value depends on the tensor's key and the value's place alone, so that pieces may be made in any order by any
 * number of threads. */
#ifndef MT_DRAW_H
#define MT_DRAW_H

#include "kernels/base.h"

enum draw_kind {
    DRAW_NORMAL,  /* bf16, normal: mean, std */
    DRAW_ROWS,    /* bf16, normal, each row of `row` values with an std of its own, 0.8 to 1.2 times std */
    DRAW_NIBBLES, /* every code of 4 bits as often as any other */
    DRAW_NF4,     /* nearly so, with the mean 0 that the codes of NF4 lack */
    DRAW_E8M0,    /* exponents of MXFP4 blocks whose values then have the root mean square std; three neighbours */
    DRAW_ABSMAX,  /* f32, absmax of NF4 blocks, likewise; within 25 % of each other */
    DRAW_BYTES    /* a copy of `bytes` */
};

struct draw {
    enum draw_kind kind;
    uint64_t key;
    double mean, std;
    int64_t row;
    const void *bytes;
};

/* Bytes [at, at+n) of the tensor into dst; `at` is a multiple of 8. */
void draw_bytes(const struct draw *d, uint8_t *dst, int64_t at, int64_t n);

#endif
