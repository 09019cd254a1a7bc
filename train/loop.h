/* loop.h - the training run: steps, evaluations, checkpoints, from a configuration to an adapter. */
#ifndef MT_LOOP_H
#define MT_LOOP_H

#include "train/config.h"

enum { LOOP_OK = 0, LOOP_ERROR = -1, LOOP_INTERRUPTED = 1 };

/* Trains as cfg says. LOOP_INTERRUPTED: SIGINT or SIGTERM came, the state is saved. */
int loop_train(const struct config *cfg, struct err *err) MT_CHECK;

#endif
