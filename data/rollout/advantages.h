/* advantages.h - rewards of groups of completions -> advantages. */
#ifndef MT_ADVANTAGES_H
#define MT_ADVANTAGES_H

#include "kernels/base.h"

/* Mean and standard deviation of the n values x[0], x[stride], ..; NaN values are skipped, and the member n counts the
 * others. std divides by their number - 1. */
struct moments {
    int64_t n;
    double mean, std; /* NaN where n is 0; where n is less than 2 */
};
struct moments moments_of(const double *x, int64_t n, int64_t stride);

/* An advantage is (reward - mean of its group) / (standard deviation + 1e-4), with the deviation of the group or of all
 * rewards; NONE: without the divisor. */
enum advantage_scale { ADVANTAGE_GROUP, ADVANTAGE_BATCH, ADVANTAGE_NONE };
struct advantage_options {
    int64_t n_group; /* rows of a group, adjacent */
    enum advantage_scale scale;
    bool leave_one_out; /* RLOO: the mean is that of the other rows of the group, and only ADVANTAGE_BATCH divides, by
                         * the deviation of all advantages, after their mean is subtracted */
};
struct advantage_stats {
    double mean, std; /* of all rewards that are not null; mean NaN: there are none; std NaN: at most one */
    double zero_std;  /* share of rows without a gradient: the standard deviation of their group is 0; with
                         ADVANTAGE_BATCH and no leave_one_out that of all rewards (share 0 or 1) */
};

/* Standard deviations divide by n - 1. Null rewards (NaN) count in no mean and have advantage 0. n is a multiple of
 * n_group; advantage, reward [n]. */
void advantages_compute(double *advantage, const double *reward, int64_t n, const struct advantage_options *opt);
struct advantage_stats advantages_stats(const double *reward, int64_t n, const struct advantage_options *opt);

/* For reward.combine = normalize_then_sum. Computes sum [n] of weight * (value - mean) / (deviation + 1e-4) over the
 * rewards; mean and deviation are those of the group; values [n, n_reward], nulls left out. Without any value: NaN.
 * Advantages are then those of ADVANTAGE_BATCH. */
void advantages_normalized_sum(double *sum, const double *values, const double *weights, int64_t n, int64_t n_reward,
                               int64_t n_group);

#endif
