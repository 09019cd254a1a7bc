/* eval_reward.h - `moetrain eval` with online RL: the mean reward of the held-out prompts. */
#ifndef MT_EVAL_REWARD_H
#define MT_EVAL_REWARD_H

#include "kernels/comm/comm.h"
#include "train/config/config.h"
#include "train/rollout/online_eval.h"

struct eval_reward_options {
    struct online_eval_options how;
    int64_t rows;       /* the first ones; 0: as many as an evaluation of the run */
    const char *output; /* NULL: none; a new file of the completions, as rows of recorded rollouts */
};
/* With the default options, runs the evaluation of a training run (online_eval.h). adapter NULL: the base model. Prints
 * a line of JSON. All ranks call it. */
int eval_reward_run(const struct eval_reward_options *o, const struct config *cfg, const char *adapter,
                    struct comm *all, struct err *err) MT_CHECK;

#endif
