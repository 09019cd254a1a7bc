/* bench.h - `moetrain bench`: how fast this machine trains a published architecture, with random weights in memory. */
#ifndef MT_BENCH_H
#define MT_BENCH_H

#include "train/cli/cli.h"

struct bench_options {
    struct cli_common common;
    const char *arch, *quant;           /* NULL: chosen by the device; as published */
    int64_t tokens, seq, layers, steps; /* 0: chosen by the device */
    struct cli_list paths;              /* of the experts, by BENCH_PATHS */
    bool json;
};
#define BENCH_PATHS "grouped|loop|presort"
/* `bench step`, or (ops) `bench ops`. Prints to standard output; -1 for what the user can fix. */
int bench_run(const struct bench_options *o, const struct config *cfg, bool ops, struct err *err) MT_CHECK;

#endif
