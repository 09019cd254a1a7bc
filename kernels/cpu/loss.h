/* loss.h - what the two loss heads, cross-entropy and distillation, share. */
#ifndef MT_CPU_LOSS_H
#define MT_CPU_LOSS_H

#include "kernels/cpu/real.h"

#define loss_move_rows CPU(loss_move_rows)
#define loss_zero_rows CPU(loss_zero_rows)
#define loss_max       CPU(loss_max)
#define loss_first     CPU(loss_first)
#define loss_log_sum   CPU(loss_log_sum)
#define loss_cap       CPU(loss_cap)

/* Copies row rows[i] of src to row i of dst, or back (scatter), for i < n. */
void loss_move_rows(struct device *dev, struct tensor dst, struct tensor src, const int32_t *rows, int64_t n,
                    bool scatter);
void loss_zero_rows(struct device *dev, struct tensor x);
/* The end of the loop over chunks of labelled tokens. A dry run computes the first chunk alone: no other takes more
 * scratch. */
static inline int64_t loss_end(const struct device *dev, int64_t n_label, int64_t chunk)
{
    return dev->dry_run ? MT_MIN(chunk, n_label) : n_label;
}
/* In place: z = cap tanh(z / cap) of n rows; cap 0: z does not change. */
void loss_cap(struct device *dev, struct tensor z, int64_t n, float cap);
/* The derivative of the capped logit z with respect to the logit before the cap. */
static inline real loss_slope(real z, real cap) { return cap > 0 ? 1 - z / cap * (z / cap) : 1; }
/* The largest of n logits, n > 0; a NaN is passed over. */
real loss_max(const real *logits, int64_t n);
int64_t loss_first(const real *logits, int64_t n, real value); /* index of the first equal to value; n: none is */
/* log sum exp((v - max) * inv_t): sums of blocks of 1,024, which are added in double; entries of -inf count as 0. */
real loss_log_sum(const real *v, int64_t n, real max, real inv_t);

#endif
