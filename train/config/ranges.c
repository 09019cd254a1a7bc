/* ranges.c - see ranges.h. */
#include "train/config/ranges.h"

#include <stdio.h>
#include <string.h>

bool config_in_interval(double v, const char *interval)
{
    char open, close;
    double lo, hi;
    if (!strncmp(interval, "auto|", 5)) interval += 5;
    MT_REQUIRE(sscanf(interval, "%c%lf,%lf%c", &open, &lo, &hi, &close) == 4, "%s", interval);
    return (open == '[' ? v >= lo : v > lo) && (close == ']' ? v <= hi : v < hi);
}

bool config_choice(const char *list, int i, char name[32])
{
    for (; i > 0 && list; i--)
        if ((list = strchr(list, '|'))) list++;
    if (list) snprintf(name, 32, "%.*s", (int)strcspn(list, "|"), list);
    return list != NULL;
}

int config_choice_index(const char *list, const char *name)
{
    char each[32];
    for (int i = 0; config_choice(list, i, each); i++)
        if (!strcmp(each, name)) return i;
    return -1;
}
