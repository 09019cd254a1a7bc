/* closing.h - the last lines of a run: the paths of its files, and the next commands. */
#ifndef MT_CLOSING_H
#define MT_CLOSING_H

#include <stdio.h>

#include "train/config.h"

/* Prints the files below output.dir (train/loop.c prints best/) and shell commands for eval, generate and export.
 * program: argv[0]. */
void closing_print(const struct config *cfg, const char *program, FILE *out);

#endif
