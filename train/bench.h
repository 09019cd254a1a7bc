/* bench.h - `moetrain bench`: how fast this machine trains a published architecture, with random weights in memory. */
#ifndef MT_BENCH_H
#define MT_BENCH_H

#include <stdio.h>

#include "kernels/base.h"

/* words: what follows `bench` on the command line. Prints to standard output; -1 for what the user can fix. */
int bench_run(int n_words, char **words, struct err *err) MT_CHECK;
void bench_help(FILE *out);

#endif
