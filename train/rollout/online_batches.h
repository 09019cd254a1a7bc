/* online_batches.h - micro-batches of a generation batch; whether trainer and sampler agree. */
#ifndef MT_ONLINE_BATCHES_H
#define MT_ONLINE_BATCHES_H

#include "train/rollout/online.h"

/* Micro-batch i of optimizer step `step`, of the batch in use, without experts. The caller frees it. */
void online_micro_batch(const struct online *o, int64_t step, int64_t i, struct batch *b);

/* The comparison of the sampler with a forward pass of the trainer over some rows of the batch, with the trainer's own
 * choice of experts. */
struct online_proof {
    int64_t n, n_choice; /* tokens of completions; choices of a token and layer */
    double mean, most;   /* |difference| of log-probabilities */
    bool corrected;      /* rows have importance weights (objective.is_mode); the step then compares all rows */
    double given; /* only if not corrected: the mean difference with the sampler's experts, which training uses */
    double other_experts; /* share of the choices that differ; NaN: no layer has a choice */
};
/* All ranks call it, and get the same result. */
void online_prove(struct online *o, struct online_proof *p);

#endif
