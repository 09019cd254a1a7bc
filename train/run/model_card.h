/* model_card.h - the README.md of an adapter directory: base model, training data, held-out loss. */
#ifndef MT_MODEL_CARD_H
#define MT_MODEL_CARD_H

#include <stdio.h>

#include "train/run/run.h"

/* Returns Markdown with the front matter that model hubs read; mem_free it. Needs an open run. Losses come from
 * output.dir/metrics.jsonl. The text has no times: equal runs give equal text. */
char *model_card(const struct run *r, const struct train_state *s, int64_t total_steps);
/* Writes the section "Use" for an adapter in PEFT's format. warns: peft_config_warns. */
void model_card_use(FILE *out, const char *base_model, const struct arch *a, bool warns);
/* The class of transformers that loads a checkpoint of this family with all its parts. */
const char *model_card_loader(const struct arch *a);
/* "" or a sentence about releases of transformers whose outputs are wrong, with a space before it. */
const char *model_card_wrong(const struct arch *a);
/* Writes text with a backslash before each character of `special`. Bytes that are not printable (base.h) become "?". */
void model_card_quote(FILE *out, const char *text, const char *special);
#define MODEL_CARD_SPECIAL "\\|`*<>[]&~" /* of Markdown in a line or a table cell */

#endif
