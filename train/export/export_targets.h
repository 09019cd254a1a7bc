/* export_targets.h - whether the program that reads a format has the model's family and applies all its adapters. */
#ifndef MT_EXPORT_TARGETS_H
#define MT_EXPORT_TARGETS_H

#include "train/export/export_job.h"

/* Error: no program reads a model of this family in this format, or the format's blocks do not divide the rows of its
 * experts. */
int export_family_check(enum export_format to, const struct arch *a, struct err *err) MT_CHECK;
/* Error: the reader of the format does not apply some of the trained targets. It names them and another format. */
int export_targets_check(enum export_format to, const struct arch *a, const struct adapters *ad,
                         struct err *err) MT_CHECK;
/* Writes which exports of this family refuse some of the trained targets, and which hold all. False: no export refuses
 * any, and text is "". */
#define EXPORT_NOTE_TEXT 1024
bool export_targets_note(char text[EXPORT_NOTE_TEXT], const struct arch *a, const struct adapters *ad);

#endif
