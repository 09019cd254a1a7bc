/* model_card.h - the README.md of an adapter directory: what it belongs to, what it was trained on, how it did. */
#ifndef MT_MODEL_CARD_H
#define MT_MODEL_CARD_H

#include "train/run.h"

/* Markdown with the front matter that model hubs read; mem_free it. Data and model are open; losses come from
 * output.dir/metrics.jsonl. The text depends on the run alone: no date, no times. */
char *model_card(const struct run *r, const struct train_state *s, int64_t total_steps);

#endif
