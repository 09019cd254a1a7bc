/* rollout_stats.c - see rollout_stats.h. */
#include "train/rollout/rollout_stats.h"

#include <math.h>

#include "data/rollout/advantages.h"

bool rollout_is_flat(const double *reward, int64_t n)
{
    double least = INFINITY, most = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(reward[i])) continue;
        least = fmin(least, reward[i]);
        most = fmax(most, reward[i]);
    }
    return !(least < most);
}

static int64_t turns_of(const uint8_t *mask, int64_t n)
{
    int64_t turns = 0;
    for (int64_t t = 0; t < n; t++) turns += mask[t] && (!t || !mask[t - 1]);
    return turns;
}

static void add_lengths(struct rollout_stats *s, const struct rollouts *rows)
{
    double sum = 0, ended = 0, all_turns = 0;
    s->shortest = s->ended_shortest = INFINITY;
    for (int64_t i = 0; i < rows->n; i++) {
        const double n = (double)(rows->off[i + 1] - rows->off[i]);
        s->n_cut += rows->truncated[i];
        sum += n;
        const double turns = (double)turns_of(rows->mask + rows->off[i], rows->off[i + 1] - rows->off[i]);
        all_turns += turns;
        s->most_turns = fmax(s->most_turns, turns);
        s->shortest = fmin(s->shortest, n);
        s->longest = fmax(s->longest, n);
        if (rows->truncated[i]) continue;
        ended += n;
        s->ended_shortest = fmin(s->ended_shortest, n);
        s->ended_longest = fmax(s->ended_longest, n);
    }
    const int64_t n_ended = rows->n - s->n_cut;
    s->length = sum / (double)rows->n;
    s->turns = all_turns / (double)rows->n;
    s->cut = (double)s->n_cut / (double)rows->n;
    s->ended_length = n_ended ? ended / (double)n_ended : NAN;
    if (!n_ended) s->ended_shortest = s->ended_longest = NAN;
}

void rollout_stats_of(struct rollout_stats *s, const struct rollouts *rows, int64_t n_group, const double *values,
                      int64_t n_reward)
{
    int64_t n_flat = 0;
    *s = (struct rollout_stats){.n = rows->n, .n_tok = rows->n_tok, .n_reward = n_reward};
    const struct moments all = moments_of(rows->reward, rows->n, 1);
    s->reward = all.mean;
    s->reward_std = all.std;
    s->n_null = rows->n - all.n;
    for (int64_t i = 0; i < n_reward; i++) {
        const struct moments one = moments_of(values + i, rows->n, n_reward);
        s->mean[i] = one.mean;
        s->std[i] = one.std;
        s->nulls[i] = rows->n - one.n;
    }
    for (int64_t i = 0; i < rows->n; i += n_group) n_flat += rollout_is_flat(rows->reward + i, n_group);
    s->zero_std = (double)(n_flat * n_group) / (double)rows->n;
    add_lengths(s, rows);
}
