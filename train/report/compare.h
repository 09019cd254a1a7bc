/* compare.h - `moetrain compare`: results and settings of several runs. */
#ifndef MT_COMPARE_H
#define MT_COMPARE_H

#include <stdio.h>

#include "kernels/base.h"

enum { COMPARE_RUNS = 8 };

/* Reads metrics.jsonl and config.ini of 2 to COMPARE_RUNS run directories. Prints the results and the settings that
 * differ to `out`, and with overlaid plots to the file `html` (NULL: none). */
int compare_runs(const char *const *dirs, int n, const char *html, FILE *out, struct err *err) MT_CHECK;

#endif
