/* online_log.h - log lines and events of online RL, for a batch and for an evaluation. */
#ifndef MT_ONLINE_LOG_H
#define MT_ONLINE_LOG_H

#include "train/report/metrics.h"
#include "train/rollout/online_batches.h"
#include "train/rollout/online_eval.h"

/* Appends rewards and lengths as members of an event. prefix: put before their names. */
void online_log_stats(struct json_out *out, const struct online *o, const struct rollout_stats *s, const char *prefix);
/* The event `rollouts` and a line. */
void online_log_batch(struct metrics *m, const struct online *o, const struct online_proof *p);
/* Writes the event `eval` and a log line. best: the reward is the highest so far. */
void online_log_eval(struct metrics *m, const struct online *o, const struct online_eval *e, int64_t step, bool best,
                     uint64_t held_out);

#endif
