/* model_card.h - the README.md of an adapter directory: base model, training data, held-out loss. */
#ifndef MT_MODEL_CARD_H
#define MT_MODEL_CARD_H

#include <stdio.h>

#include "train/run/run.h"

/* Returns Markdown with the front matter that model hubs read; the caller frees it (mem_free). Needs an open run.
 * Losses come from output.dir/metrics.jsonl. The text has no date or times, so equal runs give equal text. */
char *model_card(const struct run *r, const struct train_state *s, int64_t total_steps);
/* Writes the section "Use" for an adapter in PEFT's format. nested: as in struct arch; warns: peft_config_warns. */
void model_card_use(FILE *out, const char *base_model, bool nested, bool warns);
/* Writes text with a backslash before each character of `special`. Bytes that are not printable (base.h) become "?". */
void model_card_quote(FILE *out, const char *text, const char *special);
#define MODEL_CARD_SPECIAL "\\|`*<>[]&~" /* of Markdown in a line or a table cell */

#endif
