/* bench_attn.h - `moetrain bench attn`: speed of attention for several head widths. */
#ifndef MT_BENCH_ATTN_H
#define MT_BENCH_ATTN_H

#include "train/cli/cli.h"

struct bench_attn_options {
    const char *device;
    int64_t tokens, seq, window, repeats;
    bool json;
};
int bench_attn_run(const struct bench_attn_options *o, struct err *err) MT_CHECK;

#endif
