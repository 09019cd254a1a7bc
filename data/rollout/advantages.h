/* advantages.h - rewards of groups of completions -> advantages. */
#ifndef MT_ADVANTAGES_H
#define MT_ADVANTAGES_H

#include "kernels/base.h"

/* Mean and standard deviation, with divisor n - 1, of the n values x[0], x[stride], .. that are not NaN. */
struct moments {
    int64_t n;
    double mean, std; /* mean: NaN if n is 0; std: NaN if n < 2 */
};
struct moments moments_of(const double *x, int64_t n, int64_t stride);

/* Advantages are (reward - mean of the group) / (standard deviation + 1e-4). The standard deviation is that of the
 * group, or of all rewards (BATCH). NONE: no divisor. */
enum advantage_scale { ADVANTAGE_GROUP, ADVANTAGE_BATCH, ADVANTAGE_NONE };
struct advantage_options {
    int64_t n_group; /* rows of a group, adjacent */
    enum advantage_scale scale;
    bool leave_one_out; /* RLOO: the mean is that of the group's other rows. Only ADVANTAGE_BATCH divides, by the
                           standard deviation of all advantages, after it subtracts their mean */
};
struct advantage_stats {
    double mean, std; /* of all rewards that are not null; NaN as in struct moments */
    double zero_std;  /* share of rows without a gradient, because the standard deviation of their group is 0; with
                         ADVANTAGE_BATCH and no leave_one_out that of all rewards (share 0 or 1) */
};

/* Null rewards (NaN) count in no mean and have advantage 0. n is a multiple of n_group; advantage, reward [n]. */
void advantages_compute(double *advantage, const double *reward, int64_t n, const struct advantage_options *opt);
struct advantage_stats advantages_stats(const double *reward, int64_t n, const struct advantage_options *opt);

/* For reward.combine = normalize_then_sum: sum [n] = sum over the rewards of weight * (value - mean) / (standard
 * deviation + 1e-4), with the moments of the group; values [n, n_reward], nulls left out. Rows without any value: NaN.
 * ADVANTAGE_BATCH then makes advantages of the sums. */
void advantages_normalized_sum(double *sum, const double *values, const double *weights, int64_t n, int64_t n_reward,
                               int64_t n_group);

#endif
