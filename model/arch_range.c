/* arch_range.c - ranges of the real values in config.json. */
#include "model/arch_range.h"

#include <float.h>

static const double least_factor = 1e-3, most_factor = 1e3;

int range_eps(struct json at, const char *key, double value, struct err *err)
{
    if (value >= (double)FLT_MIN && value < 1) return 0;
    return json_error(at, err, "%s %g is not at least %.3g and below 1", key, value, (double)FLT_MIN);
}

int range_factor(struct json at, const char *key, double value, struct err *err)
{
    if (value >= least_factor && value <= most_factor) return 0;
    return json_error(at, err, "%s %g is not between %g and %g", key, value, least_factor, most_factor);
}
