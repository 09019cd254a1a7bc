/* loop.h - the training run: steps, evaluations, checkpoints. */
#ifndef MT_LOOP_H
#define MT_LOOP_H

#include "train/session/training.h"

enum { LOOP_OK = 0, LOOP_ERROR = -1, LOOP_INTERRUPTED = 1 };

/* Trains with cfg as a rank of `all`. LOOP_INTERRUPTED: a rank got SIGINT or SIGTERM, and the state was saved.
 * hook may be NULL. */
int loop_train(const struct config *cfg, struct comm *all, const struct training_hook *hook, struct err *err) MT_CHECK;

#endif
