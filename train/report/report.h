/* report.h - report.html of a run. */
#ifndef MT_REPORT_H
#define MT_REPORT_H

#include "kernels/base.h"

/* Writes dir/report.html, self-contained, from dir/metrics.jsonl: plots of losses, learning rate, gradient norm,
 * throughput; heat map of tokens per expert and layer; the configuration. */
int report_write(const char *dir, const char *title, const char *config_text, struct err *err) MT_CHECK;

#endif
