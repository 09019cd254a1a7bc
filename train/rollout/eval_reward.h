/* eval_reward.h - `moetrain eval` with online RL: the mean reward of the held-out prompts. */
#ifndef MT_EVAL_REWARD_H
#define MT_EVAL_REWARD_H

#include "kernels/comm/comm.h"
#include "train/config/config.h"

/* Runs the evaluation of a training run (online_eval.h) with this adapter, or if NULL with the base model. Prints a
 * line of JSON. All ranks call it. */
int eval_reward_run(const struct config *cfg, const char *adapter, struct comm *all, struct err *err) MT_CHECK;

#endif
