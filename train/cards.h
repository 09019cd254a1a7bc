/* cards.h - GPUs by name, for plans on machines that have none. */
#ifndef MT_CARDS_H
#define MT_CARDS_H

#include "kernels/base.h"

struct card {
    char title[48]; /* "RTX 4090" */
    int64_t bytes;  /* of its memory, as the driver reports the total */
    int capability; /* 89: compute capability 8.9; 0: not known */
};
/* name: h100, rtx4090, "RTX 4090", ... or a size, 24gb; upper and lower case, blanks, - and _ do not matter. An unknown
 * name is an error that lists those there are. */
int card_find(struct card *card, const char *name, struct err *err) MT_CHECK;

#endif
