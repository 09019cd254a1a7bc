/* metrics_cut.h - removes from metrics.jsonl what a continued run writes again. */
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

/* Rewrites dir/metrics.jsonl, if it exists, without what a killed or interrupted run wrote after `end`: events of later
 * steps; of this step an evaluation that is made again, with its samples; the `start` of a run whose other events are
 * all removed; an incomplete line. Writes nothing when there is nothing to remove. */
int metrics_cut(const char *dir, const struct metrics_end *end, struct err *err) MT_CHECK;

#endif
