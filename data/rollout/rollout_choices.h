/* rollout_choices.h - the sampler's experts for the rows of a micro-batch. */
#ifndef MT_ROLLOUT_CHOICES_H
#define MT_ROLLOUT_CHOICES_H

#include "data/loader.h"
#include "data/rollout/rollouts.h"

/* Sets b->choices, the experts that the sampler chose for each token, also where documents share a prefix (prefix.h).
 * Sequence s of b is document b->answer_doc[s], row of that index in `rows`. The last token of a row, which the sampler
 * did not read, takes the experts of the one before: nothing depends on it. Either all rows have routing or none;
 * without, b does not change. */
void rollout_choices(struct batch *b, const struct rollouts *rows);

#endif
