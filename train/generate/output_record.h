/* output_record.h - FILE.run.json beside FILE of `generate --output`: with which model, adapter, options and rows its
 * answers were made; a run that would append different answers is refused.
 *
 * {"moetrain": version, "model", "adapter", "input": paths, "rows": rows of the input, "rows_sha256": hash of their
 * lines, "prompts_sha256": hash of their tokens and end tokens, "settings": {name: text}}. Model and adapter are
 * compared by hashes in the settings, not by paths. */
#ifndef MT_OUTPUT_RECORD_H
#define MT_OUTPUT_RECORD_H

#include "kernels/hash.h"
#include "train/generate/generate_options.h"
#include "train/generate/sample.h"
#include "train/run/run.h"

struct output_record {
    char path[MT_PATH];
    struct json_doc *saved;      /* NULL: there is no file */
    int64_t n_saved, n_row;      /* rows of the saved record; rows added */
    struct hash rows, prompts;   /* of the rows added */
    char first[2][HASH_HEX];     /* hashes of the first n_saved rows; "": fewer were added */
    struct json_doc *settings;   /* of this run */
    const char *model, *adapter; /* paths of this run */
};

/* Reads the record of `output`, if the file exists. Error: the file is not a record. */
int output_record_open(struct output_record *r, const char *output, struct err *err) MT_CHECK;
/* Adds the next row: its line in the input, and its request. */
void output_record_add(struct output_record *r, const char *line, int64_t size, const struct sample_request *q);
/* Records the settings of this run, whose headers are open. adapter: the adapter's directory, or NULL. */
int output_record_set(struct output_record *r, struct run *run, const struct generate_options *o, const char *adapter,
                      struct err *err) MT_CHECK;
/* Error: the saved record has other settings, or its rows are not the first rows of this run. This run may have more
 * rows. */
int output_record_check_settings(const struct output_record *r, const char *output, struct err *err) MT_CHECK;
int output_record_check_rows(const struct output_record *r, const struct generate_options *o, struct err *err) MT_CHECK;
/* Call once, after all rows. */
int output_record_write(struct output_record *r, const char *input, struct err *err) MT_CHECK;
void output_record_close(struct output_record *r);

#endif
