/* later_rows.h - FILE.later.jsonl beside FILE of `generate --output`: rows that were complete when a signal ended the
 * run, although an earlier row was not. FILE has its rows in order, so this file keeps them for the next run.
 *
 * A line: {"row": number from 0, "samples": [lines of FILE]}, rows ascending. */
#ifndef MT_LATER_ROWS_H
#define MT_LATER_ROWS_H

#include "data/file/file.h"
#include "data/json/json.h"
#include "data/json/text.h"

struct later_rows {
    char path[MT_PATH];
    struct later_row {
        int64_t row;
        struct json_doc *doc;
    } * rows; /* [n] */
    int64_t n, cap, at;
};

int later_rows_open(struct later_rows *l, const char *output, struct err *err) MT_CHECK; /* reads it, if it is there */
/* The samples of a row, an array of texts; absent: the file does not have the row. The row numbers must ascend from
 * call to call. */
struct json later_rows_take(struct later_rows *l, int64_t row);
void later_rows_close(struct later_rows *l);

/* A line of the next file. */
void later_rows_put(struct text_buf *out, int64_t row, const struct text_buf *samples, int64_t n);
/* Writes the next file: these lines, then the rows that were not taken. If there are none, deletes the file. *n: rows
 * in the file. */
int later_rows_write(const struct later_rows *l, struct text_buf *lines, int64_t n_line, int64_t *n,
                     struct err *err) MT_CHECK;

#endif
