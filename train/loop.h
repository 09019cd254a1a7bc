/* loop.h - the training run: steps, evaluations, checkpoints. */
#ifndef MT_LOOP_H
#define MT_LOOP_H

#include "kernels/comm/comm.h"
#include "model/arch.h"
#include "train/config.h"

enum { LOOP_OK = 0, LOOP_ERROR = -1, LOOP_INTERRUPTED = 1 };

/* Trains with cfg as a rank of `all`. LOOP_INTERRUPTED: a rank got SIGINT or SIGTERM, and the state was saved.
 * arch, which may be NULL, gets the model's. */
int loop_train(const struct config *cfg, struct comm *all, struct arch *arch, struct err *err) MT_CHECK;

#endif
