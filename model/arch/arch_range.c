/* arch_range.c - see arch_range.h. */
#include "model/arch/arch_range.h"

#include <float.h>

static const double least_factor = 1e-3, most_factor = 1e3, most_theta = 1e12, most_stretch = 1e4;

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

int range_theta(struct json at, const char *key, double value, struct err *err)
{
    if (value > 1 && value <= most_theta) return 0;
    return json_error(at, err, "%s %g is not above 1 and at most %g", key, value, most_theta);
}

int range_stretch(struct json at, const char *key, double value, struct err *err)
{
    if (value >= 1 && value <= most_stretch) return 0;
    return json_error(at, err, "%s %g is not between 1 and %g", key, value, most_stretch);
}
