/* export_diff.h - the parts of an adapter that an export lost or changed. */
#ifndef MT_EXPORT_DIFF_H
#define MT_EXPORT_DIFF_H

#include <stdio.h>

#include "kernels/base.h"

/* Sums over the matrices that an export rounds to fewer bits. delta2: squares of the trained change; arrived: trained
 * change * change in the export; step2: squares of the change in the export. */
struct rounded {
    double delta2, arrived, step2;
};

struct export_diff {
    FILE *report;
    int64_t n;              /* parts: a matrix of an expert, or of attention */
    char first[256];        /* description of the first one */
    int64_t n_exact;        /* quantised weights that were compared bit by bit */
    struct rounded experts; /* their 4-bit or FP8 matrices */
    struct rounded others;  /* FP8 matrices beside MXFP4 experts */
};
/* Counts a part and prints it; after some parts only counts. */
void export_diff_add(struct export_diff *l, const char *fmt, ...) MT_PRINTF(2, 3);

#endif
