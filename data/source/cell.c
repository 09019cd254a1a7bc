/* cell.c - values of columns as JSON. */
#include "data/source/cell.h"

#include <math.h>
#include <stdio.h>

void cell_put_int(struct text_buf *t, int64_t value, bool is_unsigned)
{
    char number[32];
    if (is_unsigned)
        snprintf(number, sizeof(number), "%llu", (unsigned long long)value);
    else
        snprintf(number, sizeof(number), "%lld", (long long)value);
    text_put(t, number);
}

void cell_put_float(struct text_buf *t, double value)
{
    if (isfinite(value))
        text_put_float(t, value);
    else
        text_put(t, isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity");
}

void cell_put_unread(struct text_buf *t, const char *kind)
{
    text_put(t, "{\"not read\": \"");
    text_put(t, kind);
    text_put(t, "\"}");
}
