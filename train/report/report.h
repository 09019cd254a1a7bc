/* report.h - report.html of a run. */
#ifndef MT_REPORT_H
#define MT_REPORT_H

#include "kernels/base.h"

/* Writes dir/report.html from dir/metrics.jsonl, self-contained: SVG plots of train and eval loss, learning rate,
 * gradient norm, throughput; heat map of tokens per expert per layer; the configuration. Plots without data are
 * omitted. */
int report_write(const char *dir, const char *title, const char *config_text, struct err *err) MT_CHECK;

#endif
