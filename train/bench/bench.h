/* bench.h - `moetrain bench`: speed of training a published architecture on this machine, with random weights. */
#ifndef MT_BENCH_H
#define MT_BENCH_H

#include "train/cli/cli.h"

struct bench_options {
    struct cli_common common;
    const char *arch, *quant;           /* NULL: the device's default; as published */
    const char *teacher;                /* distill.teacher: none or base */
    const char *routing;                /* as routing_open takes it */
    int64_t tokens, seq, layers, steps; /* 0: the device's default */
    bool json;
};
enum bench_kind { BENCH_STEP, BENCH_OPS, BENCH_DECODE };
/* Prints to standard output. */
int bench_run(const struct bench_options *o, const struct config *cfg, enum bench_kind kind, struct err *err) MT_CHECK;

#endif
