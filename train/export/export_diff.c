/* export_diff.c - see export_diff.h. */
#include "train/export/export_diff.h"

#include <stdarg.h>
#include <string.h>

void export_diff_add(struct export_diff *l, const char *fmt, ...)
{
    enum { SHOWN = 20 };
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (!l->n) memcpy(l->first, text, sizeof(text));
    if (l->n++ < SHOWN) fprintf(l->report, "  lost: %s\n", text);
}
