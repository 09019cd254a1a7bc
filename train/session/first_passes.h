/* first_passes.h - forward passes over the first training data, before training. */
#ifndef MT_FIRST_PASSES_H
#define MT_FIRST_PASSES_H

#include "train/run/run.h"

/* Runs the first n micro-batches of the training data, at most an epoch, and returns their number. Rank i mod P runs
 * micro-batch i, so sums over the ranks do not depend on the number of ranks. All ranks call it. */
int64_t first_passes(struct run *r, int64_t n, const struct model_pass *pass);

#endif
