/* bad_rows.h - the bad rows of a JSONL file in one message, so that the user corrects them together. */
#ifndef MT_BAD_ROWS_H
#define MT_BAD_ROWS_H

#include "kernels/base.h"

enum { BAD_ROWS_SHOWN = 10, BAD_ROWS_MOST = 1000 };

/* Zeroed is valid. */
struct bad_rows {
    int64_t n;
    struct err why[BAD_ROWS_SHOWN]; /* of the first ones, with file and line */
};
/* Counts a bad row and keeps the reasons of the first ones. False: BAD_ROWS_MOST are bad, the caller stops reading. */
bool bad_rows_add(struct bad_rows *b, const struct err *why);
/* An error if any of the n_row rows read is bad. It has the reason if one row is bad; if several are, the reasons are
 * logged. */
int bad_rows_check(const struct bad_rows *b, int64_t n_row, const char *path, struct err *err) MT_CHECK;

#endif
