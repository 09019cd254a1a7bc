/* prof.h - a profile: the device time of every op, with its FLOPs and bytes. prof_begin starts recording, without
 * waiting for the device; prof_end waits, and adds the times to rows and events. Between them at most PROF_RECORDS ops
 * are timed; further ops are counted. Without a profile (dev->recorder NULL) an op costs one comparison. */
#ifndef MT_PROF_H
#define MT_PROF_H

#include "kernels/ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PROF_RECORDS = DEV_MARKS / 2 - 1, PROF_ROWS = 128 };

/* All calls of one op with one part: the width of a product, the window of attention, or 0. */
struct prof_row {
    const char *name;
    int64_t part, calls;
    double ms, floor_ms;
    struct cost cost;
};
/* One call; start_ms on the scale of clock_ms. */
struct prof_event {
    const char *name;
    int64_t part;
    double start_ms, ms;
    struct cost cost;
    int64_t used[DEV_ARENAS]; /* bytes used of weights, state and work when the op was issued */
};
struct prof {
    struct device *dev;
    struct prof_row rows[PROF_ROWS]; /* in the order of first appearance */
    int n_rows;
    struct prof_event *events; /* [n_events], of all begin-end pairs */
    int64_t n_events;
    int64_t n_spans, n_lost; /* begin-end pairs; ops beyond PROF_RECORDS */
    double span_ms;          /* from begin to end on the device, summed */

    /* since prof_begin */
    struct recorder recorder; /* of PROF_RECORDS calls */
    double begin_ms;
};

void prof_open(struct prof *p, struct device *dev);
void prof_begin(struct prof *p);
void prof_end(struct prof *p);
void prof_cancel(struct prof *p); /* instead of prof_end: discards the records since prof_begin */
/* The median of n values, at least 1: the mean of the two in the middle if n is even. Sorts x. */
double prof_middle(double *x, int64_t n);
/* When all begin-end pairs ran the same ops: keeps the rows and events of one pair, in which each call has the median
 * of its times. span_ms becomes the mean. */
void prof_median(struct prof *p);
void prof_close(struct prof *p); /* zeroed is valid */

/* Fills dev->roofs: in under 0.3 s the rates of a large product and a large copy, and on a GPU the time of the smallest
 * op, which zeroes 4 bytes; in under 1 s, where portable kernels run on a GPU with faster instructions, their rate of a
 * large product. Allocates separate memory (0.4 GB on a GPU) and frees it, so call it before the arenas are reserved.
 * Error: not enough memory. */
int prof_measure_roofs(struct device *dev, struct err *err) MT_CHECK;
/* FLOP/s of large products of random rows during `seconds`, which the GPU's power limits: lower than that of
 * prof_measure_roofs, whose products are few and repeat their rows. Uses free memory of the work arena; 0: not
 * enough. */
double prof_sustained_flops(struct device *dev, double seconds);
/* floor_ms / ms, at most 1. When ms is below the floor, the roofs were measured too low (other processes were running):
 * all roofs are raised until the share is 1. */
double prof_share(struct device *dev, double floor_ms, double ms);

#ifdef __cplusplus
}
#endif
#endif
