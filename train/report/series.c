/* series.c - see series.h. */
#include "train/report/series.h"

#include <math.h>

void series_push(struct series *s, double v)
{
    s->v = mem_reserve(s->v, &s->cap, s->n + 1, (int64_t)sizeof(double));
    s->v[s->n++] = v;
}

double series_last(const struct series *s)
{
    for (int64_t i = s->n - 1; i >= 0; i--)
        if (isfinite(s->v[i])) return s->v[i];
    return NAN;
}
