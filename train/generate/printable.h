/* printable.h - text of a model on a terminal. */
#ifndef MT_PRINTABLE_H
#define MT_PRINTABLE_H

#include <stdio.h>

#include "kernels/base.h"

/* Writes size bytes of a text that a NUL ends; characters that would steer a terminal become U+FFFD. */
void printable_put(FILE *out, const char *text, int64_t size);

#endif
