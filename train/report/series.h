/* series.h - a growing array of numbers. */
#ifndef MT_SERIES_H
#define MT_SERIES_H

#include "kernels/base.h"

struct series {
    double *v;
    int64_t n, cap;
};

void series_push(struct series *s, double v);
/* The last finite value, or NaN. */
double series_last(const struct series *s);

#endif
