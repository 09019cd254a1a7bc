/* report_experts.h - the experts' part of report.html. */
#ifndef MT_REPORT_EXPERTS_H
#define MT_REPORT_EXPERTS_H

#include <stdio.h>

#include "train/report/history_events.h"

/* Heat maps of rows, gates and adapter norms, plots over the steps, the experts with the most rows. Nothing without
 * events. */
void report_experts(FILE *out, const struct history_experts *x);

#endif
