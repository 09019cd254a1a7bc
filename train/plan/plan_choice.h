/* plan_choice.h - chooses what to save, to recompute, to decode and to keep in host memory. */
#ifndef MT_PLAN_CHOICE_H
#define MT_PLAN_CHOICE_H

#include "train/plan/plan_measure.h"

struct plan_choice {
    struct model_options opt;
    int64_t peak;  /* device bytes, `fixed` included */
    double ms;     /* estimated time of a micro-batch by the rates of machine.h; only for comparing choices */
    double ops_ms; /* the part of `ms` in ops; the rest is time that small scratch and host memory cost */
    bool packed;   /* decoded layers would take longer */
};
/* The fastest options whose peak is at most `budget`; if there are none, those with the lowest peak. train.offload =
 * auto takes at most half of the host memory, and more only if nothing else fits. */
int plan_choose(struct plan_choice *c, const struct plan_request *q, int64_t fixed, int64_t budget,
                struct err *err) MT_CHECK;
/* The options with the lowest peak. */
int plan_choose_least(struct plan_choice *c, const struct plan_request *q, int64_t fixed, struct err *err) MT_CHECK;
/* *bytes: the least host memory of a rank with which options fit `budget`; INT64_MAX: no amount of host memory is
 * enough. */
int plan_least_host(int64_t *bytes, const struct plan_request *q, int64_t fixed, int64_t budget,
                    struct err *err) MT_CHECK;

/* Measures the memory of the choice. If the configuration does not set the number of decoded layers, decodes as many as
 * fit, or none if packed experts are faster. */
int plan_settle(struct plan_memory *m, struct plan_choice *c, const struct plan_request *q, int64_t fixed,
                int64_t budget, struct err *err) MT_CHECK;

#endif
