/* loop.h - the training run: steps, evaluations, checkpoints, from a configuration to an adapter. */
#ifndef MT_LOOP_H
#define MT_LOOP_H

#include "kernels/comm/comm.h"
#include "train/config.h"

enum { LOOP_OK = 0, LOOP_ERROR = -1, LOOP_INTERRUPTED = 1 };

/* Trains as cfg says, as a rank of `all`. LOOP_INTERRUPTED: SIGINT or SIGTERM came to a rank, the state is saved. */
int loop_train(const struct config *cfg, struct comm *all, struct err *err) MT_CHECK;

#endif
