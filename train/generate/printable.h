/* printable.h - text of a model on a terminal. */
#ifndef MT_PRINTABLE_H
#define MT_PRINTABLE_H

#include <stdio.h>

#include "kernels/base.h"

/* Writes size bytes of a text that ends with a NUL. Control characters, which a terminal would interpret, become
 * U+FFFD. */
void printable_put(FILE *out, const char *text, int64_t size);

#endif
