/* tokens.h - `moetrain tokens`: prints the tokens of text, messages and data sets. */
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
/* Prints the tokens to standard output: with o->tokenizer those of the text on standard input, with o->checkpoint those
 * of messages, otherwise those of the data of cfg. */
int tokens_run(const struct tokens_options *o, const struct config *cfg, struct err *err) MT_CHECK;
void tokens_put_ids(struct text_buf *out, const int32_t *ids, int64_t n); /* "[1, 2]" */

#endif
