/* packed.h - weights in every format for the tests, made by the encoders of kernels/quant.h from known values. */
#ifndef MT_PACKED_H
#define MT_PACKED_H

#include "kernels/quant.h"
#include "tests/op_check.h"

/* Options of a test: NF4 and FP4 have blocks and optionally a nested absmax; the others ignore both. */
struct packing_check {
    enum weight_format format;
    int64_t block;
    bool nested;
};
/* Values of make_random in that format; valid until op_check_end. */
struct weight make_packed(struct packing_check p, uint64_t stream, double amplitude, int64_t n_exp, int64_t n_out,
                          int64_t n_in);
/* The same weight, decoded by quant_value to f32. */
struct weight make_unpacked(const struct weight *w);

#endif
