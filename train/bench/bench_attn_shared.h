/* bench_attn_shared.h - for `moetrain bench attn`: attention whose heads share one key, with the sizes of DeepSeek-V4.
 */
#ifndef MT_BENCH_ATTN_SHARED_H
#define MT_BENCH_ATTN_SHARED_H

#include "train/bench/bench_experts.h"

/* A kind of layer, timed. */
struct bench_shared_row {
    const char *name;
    int64_t n_head, head_dim, window, ratio, top; /* ratio 0: no entries; top 0: all entries */
    double ms[2], flops[2], floor_ms[2];          /* forward, backward: median; work of one call */
};
enum { BENCH_SHARED_ROWS = 4 };
/* tokens in sequences of seq; the median of `repeats` runs, at most BENCH_RUNS */
int bench_attn_shared(struct device *dev, int64_t tokens, int64_t seq, int64_t repeats,
                      struct bench_shared_row rows[BENCH_SHARED_ROWS], struct err *err) MT_CHECK;

#endif
