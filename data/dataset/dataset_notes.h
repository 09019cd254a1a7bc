/* dataset_notes.h - warnings and notes about rows that were read: left out, truncated, changed. */
#ifndef MT_DATASET_NOTES_H
#define MT_DATASET_NOTES_H

#include "data/dataset/dataset_types.h"

void dataset_notes(const struct dataset *ds, const char *files, const struct dataset_options *opt);

#endif
