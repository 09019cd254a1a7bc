/* history_experts.h - the events `experts` of metrics.jsonl. */
#ifndef MT_HISTORY_EXPERTS_H
#define MT_HISTORY_EXPERTS_H

#include "data/json/json.h"
#include "train/report/series.h"

/* The experts, from events `experts`. Layers without routed experts have no rows. */
struct history_experts {
    int64_t n_layer, n_exp; /* 0: no such event */
    double *rows, *gates;   /* [n_layer, n_exp], all events summed; gates: of combine weights, 0 in older files */
    double *norms;          /* [n_layer, n_exp] of the last event that has them, or NULL */
    /* Per event: entropy of the rows over the experts, over its maximum, mean of the layers; share of the experts
     * without rows; rows of a layer's first expert over the mean, mean of the layers. */
    struct series step, entropy, idle, hottest;
};
/* Adds an event; error: not an object as metrics_experts writes it, or of another size than the events before. */
int history_experts_add(struct history_experts *x, struct json event, double step, struct err *err) MT_CHECK;
void history_experts_free(struct history_experts *x);

#endif
