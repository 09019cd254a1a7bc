/* reference_cache.h - objective.reference_cache = auto: computes the reference's log-probabilities of all answers
 * before step 1.
 */
#ifndef MT_REFERENCE_CACHE_H
#define MT_REFERENCE_CACHE_H

#include "train/run/run.h"

/* Reads the log-probabilities from output.dir/cache, or computes them in the micro-batches of the first epoch and
 * writes the file. The file's name is a hash of tokens, weights, adapter, device and micro-batches. Sets `reference` of
 * the data sets of r. All ranks call it. Does nothing for objectives without a reference. */
int reference_cache_open(struct run *r, struct err *err) MT_CHECK;

#endif
