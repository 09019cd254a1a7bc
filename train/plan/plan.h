/* plan.h - memory and FLOPs of a run, from a dry run of the model's code before anything is loaded. */
#ifndef MT_PLAN_H
#define MT_PLAN_H

#include <stdio.h>

#include "train/plan/plan_sums.h"

/* Fills p for a request of plan_request_of. Error: nothing fits the budget. */
int plan_make(struct plan *p, const struct plan_request *request, struct err *err) MT_CHECK;
/* Whether any options fit the budget, in fewer dry runs. */
int plan_fits(bool *fits, const struct plan_request *request, struct err *err) MT_CHECK;
/* Fills p->longest, p->eval_alone and p->host_faster, with dry runs of a few seconds. */
int plan_longest(struct plan *p, const struct plan_request *request, struct err *err) MT_CHECK;
/* What the plan saves, decodes and keeps in host memory, in one line. */
const char *plan_text(char text[PLAN_TEXT], const struct model_options *opt, const struct plan_memory *m,
                      int64_t n_layer);
/* Prints the table of `moetrain plan`: memory by class and phase, then choices, FLOPs and trainable parameters. */
void plan_print(const struct plan *p, FILE *out);
/* Prints the table of memory against speed: a row per memory limit. rates: of the device; 0: not known. */
int plan_frontier(const struct plan *p, const struct plan_request *request, const struct roofs *rates, FILE *out,
                  struct err *err) MT_CHECK;

#endif
