/* ranges.h - ranges and choices of option tables. */
#ifndef MT_RANGES_H
#define MT_RANGES_H

#include "kernels/base.h"

bool config_in_interval(double v, const char *interval); /* "[0, 1)" */
/* Copies choice i of "a|b|c"; false: i is past the end. */
bool config_choice(const char *list, int i, char name[32]);
int config_choice_index(const char *list, const char *name); /* -1: it is not in the list */

#endif
