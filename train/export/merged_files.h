/* merged_files.h - the files of a merged checkpoint other than its weights. */
#ifndef MT_MERGED_FILES_H
#define MT_MERGED_FILES_H

#include "train/export/export_job.h"

/* Bytes of the files that are copied. */
int merged_files_bytes(const struct export *x, int64_t *bytes, struct err *err) MT_CHECK;
/* Copies tokenizer, chat template, generation_config.json and licence; writes config.json. dense [n]: the modules whose
 * matrices are not quantised. predicts: false if the export leaves out the layers of multi-token prediction;
 * config.json then has 0 of them, and its lists end with the last layer. */
int merged_files_write(const struct export *x, const char *const *dense, int64_t n, bool predicts,
                       struct err *err) MT_CHECK;

#endif
