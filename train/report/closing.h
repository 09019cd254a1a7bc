/* closing.h - the last lines of a run: where its files are, and the next commands. */
#ifndef MT_CLOSING_H
#define MT_CLOSING_H

#include <stdio.h>

#include "train/config.h"

/* Names what there is below output.dir (train/loop.c has named best/), then the commands for evaluation, text and
 * export, ready to be pasted into a shell. program: as it was called. */
void closing_print(const struct config *cfg, const char *program, FILE *out);

#endif
