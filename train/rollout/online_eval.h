/* online_eval.h - the evaluation of online RL: the mean reward of held-out prompts. */
#ifndef MT_ONLINE_EVAL_H
#define MT_ONLINE_EVAL_H

#include "train/rollout/online.h"

struct online_eval {
    struct rollout_stats stats; /* of an answer to each prompt, at temperature 0 */
    double ms;
};
/* The number of held-out prompts of an evaluation: the first eval.max_batches * train.micro_batch, or all if that is
 * 0. */
int64_t online_eval_prompts(const struct online *o);
/* Answers the held-out prompts. The ranks divide the prompts, and all get the result. 1: stop() was true on a rank. */
int online_evaluate(struct online *o, int64_t step, bool (*stop)(void), struct online_eval *out,
                    struct err *err) MT_CHECK;

#endif
