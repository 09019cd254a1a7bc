/* run_summary.h - the last lines of a run: the paths of its files, and the next commands. */
#ifndef MT_RUN_SUMMARY_H
#define MT_RUN_SUMMARY_H

#include <stdio.h>

#include "train/config/config.h"

/* Prints the files below output.dir (train/loop.c prints best/) and shell commands for eval, generate and export.
 * program: argv[0]; export_to: format of the export. */
void run_summary_print(const struct config *cfg, const char *program, const char *export_to, FILE *out);

#endif
