/* online_batches.h - micro-batches of a generation batch, with the sampler's experts; whether trainer and sampler
 * agree.
 */
#ifndef MT_ONLINE_BATCHES_H
#define MT_ONLINE_BATCHES_H

#include "train/rollout/online.h"

/* Micro-batch i of optimizer step `step`, of the batch in use, without experts. The caller frees it. */
void online_micro_batch(const struct online *o, int64_t step, int64_t i, struct batch *b);

/* What a forward pass of the trainer over some rows of the batch says of the sampler, before training takes its
 * experts. */
struct online_proof {
    int64_t n, n_choice; /* tokens of completions; choices of a token and layer */
    double mean, most;   /* |difference| of log-probabilities */
    bool corrected; /* rows have weights that correct for the sampler (objective.is_mode), which compare all rows */
    double given;   /* without them: the mean with the sampler's experts, as training takes them */
    double other_experts; /* share of the choices that differ; NaN: no layer chooses */
};
/* All ranks call it, and get one result. */
void online_prove(struct online *o, struct online_proof *p);

#endif
