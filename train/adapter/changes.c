/* changes.c - see changes.h. */
#include "train/adapter/changes.h"

#include <stdio.h>

void changes_add(struct changes *c, const char *name, const char *old, const char *new)
{
    enum { SHOWN = 100 };
    char values[2 * SHOWN + 32] = "", one[2 * SHOWN + 128];
    if (old)
        snprintf(values, sizeof(values), ": %.*s -> %.*s", SHOWN, *old ? old : "(empty)", SHOWN,
                 *new ? new : "(empty)");
    const int n = snprintf(one, sizeof(one), "%s%s%s", c->n ? ", " : "", name, values);
    if (c->used + (size_t)n < sizeof(c->text) - 32)
        c->used += (size_t)snprintf(c->text + c->used, sizeof(c->text) - c->used, "%s", one);
    else
        c->unnamed++;
    c->n++;
}

const char *changes_text(struct changes *c)
{
    if (c->unnamed) snprintf(c->text + c->used, sizeof(c->text) - c->used, ", and %d more", c->unnamed);
    return c->text;
}
