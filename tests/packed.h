/* packed.h - test weights in every format, encoded by kernels/format/quant.h from known values. */
#ifndef MT_PACKED_H
#define MT_PACKED_H

#include "kernels/format/quant.h"
#include "tests/op_check.h"

/* How a weight is stored. `block` (values per absmax) and `nested` (absmax is quantised too) apply to NF4 and FP4;
 * with NVFP4 `nested` means that values are divided by the global scale. FP8: `block` is the number of columns per
 * scale, 0: one scale per row. */
struct weight_packing {
    enum weight_format format;
    int64_t block;
    bool nested;
};
/* Packs n dense values as one row; arrays that the format lacks may be NULL. With NVFP4 *absmax receives the global
 * scale. Returns how many values are not finite. */
int64_t packed_encode(enum weight_format format, uint8_t *nibbles, uint8_t *scales, float *absmax, const void *x,
                      enum weight_format dense, int64_t n, int n_threads);
/* The values of make_random, encoded in that format; valid until op_check_end. */
struct weight make_packed(struct weight_packing p, uint64_t stream, double amplitude, int64_t n_exp, int64_t n_out,
                          int64_t n_in);
/* The same weight, decoded by quant_value to f32. */
struct weight make_unpacked(const struct weight *w);

#endif
