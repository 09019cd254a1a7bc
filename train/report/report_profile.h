/* report_profile.h - a step in report.html. */
#ifndef MT_REPORT_PROFILE_H
#define MT_REPORT_PROFILE_H

#include <stdio.h>

#include "train/report/history_events.h"

/* Writes the time of each op as a bar, and memory over the profiled steps; nothing without an event `profile`. */
void report_profile(FILE *out, const struct history_profile *p);

#endif
