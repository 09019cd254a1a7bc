/* changes.h - a list of what differs between two runs or models, for messages. */
#ifndef MT_CHANGES_H
#define MT_CHANGES_H

#include "kernels/base.h"

/* "section.key: old -> new, ..."; a long list ends with a count. Zeroed is empty. */
struct changes {
    char text[640];
    size_t used;
    int n, unnamed;
};
/* old and new: NULL where only the name is of interest. */
void changes_add(struct changes *c, const char *name, const char *old, const char *new);
const char *changes_text(struct changes *c);

#endif
