/* bench_quant.h - `moetrain bench quant`: speed of fake quantisation. */
#ifndef MT_BENCH_QUANT_H
#define MT_BENCH_QUANT_H

#include "train/cli/cli.h"

struct bench_quant_options {
    const char *device;
    struct cli_list experts; /* empty: the device's default */
    int64_t repeats;
    bool json;
};
int bench_quant_run(const struct bench_quant_options *o, struct err *err) MT_CHECK;

#endif
