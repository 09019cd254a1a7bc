/* model_card.h - the README.md of an adapter directory: base model, training data, held-out loss. */
#ifndef MT_MODEL_CARD_H
#define MT_MODEL_CARD_H

#include "train/run.h"

/* Returns Markdown with the front matter that model hubs read; the caller frees it (mem_free). Needs an open run.
 * Losses come from output.dir/metrics.jsonl. Has no date or times: equal runs give equal text. */
char *model_card(const struct run *r, const struct train_state *s, int64_t total_steps);

#endif
