/* report_experts.h - the experts' part of report.html. */
#ifndef MT_REPORT_EXPERTS_H
#define MT_REPORT_EXPERTS_H

#include <stdio.h>

#include "train/report/history_events.h"

/* Writes heat maps, plots over the steps, and the experts with the most rows; nothing if there are no events. */
void report_experts(FILE *out, const struct history_experts *x);

#endif
