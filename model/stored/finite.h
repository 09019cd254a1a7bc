/* finite.h - refuses values of a checkpoint that are not finite: file, tensor, position and value are in the error. */
#ifndef MT_FINITE_H
#define MT_FINITE_H

#include "model/stored/source.h"

/* Checks bytes [at, at + n) of a tensor, or of a part of one: floats, FP8 (F8_E4M3) and exponents (F8_E8M0). Other
 * dtypes have only finite values. */
int finite_check(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n,
                 struct err *err) MT_CHECK;
/* finite_check for a source's values, floats and FP8. */
int finite_check_data(const struct safetensors *st, const struct source *s, struct err *err) MT_CHECK;
/* Checks the scales of a source: the products of codes and scales must be finite in bf16, and source_check must pass.
 * The caller has checked the codes of FP8. */
int finite_check_scaled(const struct safetensors *st, const struct source *s, struct err *err) MT_CHECK;
/* The largest magnitude of a tensor of floats or FP8; NaN or infinite if it has such a value. */
float finite_largest(const struct st_tensor *t);

#endif
