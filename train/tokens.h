/* tokens.h - `moetrain tokens`: what becomes of text, messages and data sets before the model sees them. */
#ifndef MT_TOKENS_H
#define MT_TOKENS_H

#include <stdio.h>

#include "data/chat.h"

/* words: what follows `tokens` on the command line. Prints to standard output; -1 for what the user can fix. */
int tokens_run(int n_words, char **words, struct err *err) MT_CHECK;
void tokens_help(FILE *out);
void tokens_put_ids(struct chat_text *out, const int32_t *ids, int64_t n); /* "[1, 2]" */

#endif
