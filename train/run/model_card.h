/* model_card.h - the README.md of an adapter directory: base model, training data, held-out loss. */
#ifndef MT_MODEL_CARD_H
#define MT_MODEL_CARD_H

#include <stdio.h>

#include "train/run/run.h"

/* Returns Markdown with the front matter that model hubs read; the caller frees it (mem_free). Needs an open run.
 * Losses come from output.dir/metrics.jsonl. Has no date or times: equal runs give equal text. */
char *model_card(const struct run *r, const struct train_state *s, int64_t total_steps);
/* The section "Use" of an adapter in PEFT's format; nested: of struct arch; warns: peft_config_warns. */
void model_card_use(FILE *out, const char *base_model, bool nested, bool warns);
/* Writes text with a backslash before each character of `special`; what is not printable (base.h) becomes "?". */
void model_card_quote(FILE *out, const char *text, const char *special);
#define MODEL_CARD_SPECIAL "\\|`*<>[]&~" /* of Markdown in a line or a table cell */

#endif
