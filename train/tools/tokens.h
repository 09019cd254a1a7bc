/* tokens.h - `moetrain tokens`: shows the tokens of text, messages and data sets. */
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
/* With o->tokenizer: text on standard input; with o->checkpoint: messages; otherwise the data of cfg. Prints to
 * standard output. */
int tokens_run(const struct tokens_options *o, const struct config *cfg, struct err *err) MT_CHECK;
void tokens_put_ids(struct text_buf *out, const int32_t *ids, int64_t n); /* "[1, 2]" */

#endif
