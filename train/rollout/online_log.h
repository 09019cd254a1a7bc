/* online_log.h - log lines and events of online RL, for a batch and for an evaluation. */
#ifndef MT_ONLINE_LOG_H
#define MT_ONLINE_LOG_H

#include "train/report/metrics.h"
#include "train/rollout/online_batches.h"
#include "train/rollout/online_eval.h"

/* Appends rewards and lengths as members of an event. prefix: put before their names. */
void online_log_stats(struct json_out *out, const struct online *o, const struct rollout_stats *s, const char *prefix);
/* Warns if every completion is truncated, and of rewards that are null for all of them. where: "step 3". */
void online_log_warn(const struct online *o, const struct rollout_stats *s, const char *where);
/* Writes ", 3 without a reward, 2 lost by the environment", or "". Means leave out rows without a reward. The reward of
 * a lost row lacks the environment's part, so means with and without lost rows are not comparable. */
const char *online_log_nulls(char out[96], const struct rollout_stats *s);
/* The event `rollouts`, a line and warnings. */
void online_log_batch(struct metrics *m, const struct online *o, const struct online_proof *p);
/* Writes the event `eval`, a log line and warnings. best: the reward is the highest so far. */
void online_log_eval(struct metrics *m, const struct online *o, const struct online_eval *e, int64_t step, bool best,
                     uint64_t held_out);

#endif
