/* row_source.h - the rows of one data file, of any kind, as the JSON text of each. */
#ifndef MT_ROW_SOURCE_H
#define MT_ROW_SOURCE_H

#include "kernels/base.h"

/* A row of a text file, {"text": ...}, is the whole file, a paragraph (blank lines separate them), or a line that is
 * not blank. */
enum sample_by { SAMPLE_DOCUMENT, SAMPLE_PARAGRAPH, SAMPLE_LINE };

struct row_text {
    const char *text; /* [size] JSON, valid until the next call */
    int64_t size;
    char where[MT_PATH + 32]; /* FILE:LINE or FILE[INDEX] */
    bool line;                /* one line of JSONL, which may be a part of other JSON */
    bool last_if_bad;         /* invalid JSON ends the file, as the start of the next row is then unknown */
};

struct row_source;
/* The name determines the kind (source_list.h), or the content if that is binary or the name's ending is unknown. */
struct row_source *row_source_open(const char *path, enum sample_by sample_by, struct err *err) MT_CHECK;
/* Reads a row. 1: a row; 0: the end; 2: a bad row, for the reason in err, after which reading can go on; -1: the file
 * cannot be read further. */
int row_source_next(struct row_source *s, struct row_text *row, struct err *err) MT_CHECK;
int64_t row_source_position(const struct row_source *s); /* in the file on disk, after the last row */
void row_source_close(struct row_source *s);

#endif
