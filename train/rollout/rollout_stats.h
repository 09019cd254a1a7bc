/* rollout_stats.h - statistics of the rows of a generation batch, for the log. */
#ifndef MT_ROLLOUT_STATS_H
#define MT_ROLLOUT_STATS_H

#include "data/rollout/rollouts.h"
#include "train/config/reward_keys.h"

struct rollout_stats {
    int64_t n, n_tok, n_cut;                      /* rows; tokens of completions; rows without an end token */
    double reward, reward_std;                    /* of all rows that have one; std divides by n - 1 */
    double mean[REWARDS_MOST], std[REWARDS_MOST]; /* of each reward */
    int64_t n_reward;
    int64_t n_null, nulls[REWARDS_MOST];                /* rows without any reward; rows without this one */
    double zero_std;                                    /* share of groups whose rewards are all equal, or null */
    double length, shortest, longest;                   /* tokens of completions */
    double ended_length, ended_shortest, ended_longest; /* of those with an end token; NaN: none */
    double turns, most_turns;                           /* runs of tokens that the model wrote, of a row */
    int64_t n_lost, n_unfit;                            /* as in struct round; the caller sets them */
    double cut;                                         /* share of rows without an end token */
};
/* values [n, n_reward]; NaN: null. The n_group rows of a group are adjacent. */
void rollout_stats_of(struct rollout_stats *s, const struct rollouts *rows, int64_t n_group, const double *values,
                      int64_t n_reward);
/* Whether all rewards of n rows are equal; null ones do not count. */
bool rollout_is_flat(const double *reward, int64_t n);

#endif
