/* row_source.h - the rows of one data file, of any kind, as the JSON text of each. */
#ifndef MT_ROW_SOURCE_H
#define MT_ROW_SOURCE_H

#include "kernels/base.h"

/* What a row of a text file is: {"text": ...} of the whole file, of a paragraph (blank lines separate them), of a line
 * that is not blank. */
enum sample_by { SAMPLE_DOCUMENT, SAMPLE_PARAGRAPH, SAMPLE_LINE };

struct row_text {
    const char *text; /* [size] JSON, valid until the next call */
    int64_t size;
    char where[MT_PATH + 32]; /* FILE:LINE or FILE[INDEX] */
    bool line;                /* one line of JSONL, which may be a part of other JSON */
    bool last_if_bad;         /* invalid JSON ends the file: the start of the next row is unknown then */
};

struct row_source;
/* The kind follows from the content if it is binary or the ending of the name is unknown, else from the name
 * (source_list.h). */
struct row_source *row_source_open(const char *path, enum sample_by sample_by, struct err *err) MT_CHECK;
/* Reads a row. 1: there is one; 0: the end; 2: a bad row, err says why, and the next one can be read; -1: the file
 * cannot be read further. */
int row_source_next(struct row_source *s, struct row_text *row, struct err *err) MT_CHECK;
int64_t row_source_position(const struct row_source *s); /* in the file on disk, after the last row */
void row_source_close(struct row_source *s);

#endif
