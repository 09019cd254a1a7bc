/* generate.h - `moetrain generate`: text from the base model or an adapter, to see what was learnt. */
#ifndef MT_GENERATE_H
#define MT_GENERATE_H

#include <stdio.h>

#include "kernels/base.h"

/* words: what follows `generate` on the command line. Text goes to standard output as it comes; -1 for what the user
 * can fix. */
int generate_run(int n_words, char **words, struct err *err) MT_CHECK;
void generate_help(FILE *out);

#endif
