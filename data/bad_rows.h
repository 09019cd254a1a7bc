/* bad_rows.h - the rows of a JSONL file that cannot be read, all in one message: a user corrects them in one pass. */
#ifndef MT_BAD_ROWS_H
#define MT_BAD_ROWS_H

#include "kernels/base.h"

enum { BAD_ROWS_SHOWN = 10, BAD_ROWS_MOST = 1000 };

/* Zeroed is valid. */
struct bad_rows {
    int64_t n;
    struct err why[BAD_ROWS_SHOWN]; /* of the first ones, each with file and line */
};
/* Counts a bad row; the first ones keep their reason. False: BAD_ROWS_MOST are bad, so the caller stops reading. */
bool bad_rows_add(struct bad_rows *b, const struct err *why);
/* An error if some of the n_row rows that were read are bad. The error of a single bad row has its reason; with several
 * bad rows, the reasons are logged. */
int bad_rows_check(const struct bad_rows *b, int64_t n_row, const char *path, struct err *err) MT_CHECK;

#endif
