/* loop.h - the training run: steps, evaluations, checkpoints. */
#ifndef MT_LOOP_H
#define MT_LOOP_H

#include "data/safetensors.h"
#include "kernels/comm/comm.h"
#include "model/arch/arch.h"
#include "train/config/config.h"

enum { LOOP_OK = 0, LOOP_ERROR = -1, LOOP_INTERRUPTED = 1 };

/* Rank 0 calls it before the weights are loaded. st: the model's tensors. complete: nothing is left to train. */
struct loop_hook {
    void (*opened)(void *user, const struct arch *a, const struct safetensors *st, bool complete);
    void *user;
};

/* Trains with cfg as a rank of `all`. LOOP_INTERRUPTED: a rank got SIGINT or SIGTERM, and the state was saved.
 * hook may be NULL. */
int loop_train(const struct config *cfg, struct comm *all, const struct loop_hook *hook, struct err *err) MT_CHECK;

#endif
