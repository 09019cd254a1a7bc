/* metrics_cut.h - removes from metrics.jsonl the lines that a continued run writes again. */
#ifndef MT_METRICS_CUT_H
#define MT_METRICS_CUT_H

#include "kernels/base.h"

/* Where a run continues. */
struct metrics_end {
    int64_t step;
    bool evaluated;    /* the evaluation of this step is not made again ... */
    uint64_t held_out; /* ... it was on these data (eval_metrics.held_out) */
    bool complete;     /* nothing is made again: `stop` of this step stays */
};

/* Removes from dir/metrics.jsonl, if it exists, the lines that a killed or interrupted run wrote after `end`: events of
 * later steps; an evaluation of step `end` that will be repeated, with its samples; the `start` of a run whose other
 * events are all removed; an incomplete line. */
int metrics_cut(const char *dir, const struct metrics_end *end, struct err *err) MT_CHECK;

#endif
