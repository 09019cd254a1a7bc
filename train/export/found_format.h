/* found_format.h - the format of an existing export, from its files. */
#ifndef MT_FOUND_FORMAT_H
#define MT_FOUND_FORMAT_H

#include "train/export/export_job.h"

/* Prints the format of the export in dir. Error: it is not `wanted`. */
int found_format(const struct arch *a, const char *dir, enum export_format wanted, struct err *err) MT_CHECK;

#endif
