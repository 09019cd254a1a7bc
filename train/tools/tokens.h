/* tokens.h - `moetrain tokens`: what becomes of text, messages and data sets before the model sees them. */
#ifndef MT_TOKENS_H
#define MT_TOKENS_H

#include <stdio.h>

#include "data/chat/chat.h"
#include "train/cli/cli.h"

struct tokens_options {
    struct cli_common common;
    const char *tokenizer, *checkpoint, *messages, *template;
    int64_t row; /* micro-batch of the first epoch, from 0 */
    bool html, json, no_special;
};
/* Text on standard input with a tokenizer, else messages with a checkpoint, else the data of cfg. Prints to standard
 * output; -1 for what the user can fix. */
int tokens_run(const struct tokens_options *o, const struct config *cfg, struct err *err) MT_CHECK;
void tokens_put_ids(struct text_buf *out, const int32_t *ids, int64_t n); /* "[1, 2]" */

#endif
