/* export.h - `moetrain export`: a trained adapter in the form that another program reads, verified before it appears.
 */
#ifndef MT_EXPORT_H
#define MT_EXPORT_H

#include <stdio.h>

#include "train/config.h"

/* Writes the adapter of the PEFT directory adapter_dir (NULL: output.dir/adapter) into the directory out (NULL:
 * output.dir/export-FORMAT), new or empty, which appears when everything in it was written and verified. The table of
 * the verification goes to `report`. Error: the format is none of this model's, no held-out rows to verify with, too
 * little space, or what was read back is not what was trained: which part. force: without held-out rows the values that
 * were written are compared one by one, no outputs of the model, and a warning says so. */
int export_run(const struct config *cfg, const char *adapter_dir, const char *format, const char *out, bool force,
               FILE *report, struct err *err) MT_CHECK;
/* The verification alone, of what lies in dir already. */
int export_check(const struct config *cfg, const char *adapter_dir, const char *format, const char *dir, bool force,
                 FILE *report, struct err *err) MT_CHECK;

#endif
