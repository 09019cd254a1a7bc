/* prefix_rows.h - for tests of prefixes (struct seqs): the rows of whole sequences side by side. */
#ifndef MT_PREFIX_ROWS_H
#define MT_PREFIX_ROWS_H

#include "tests/op_check.h"

/* For each row of the whole sequences, its row in the batch with prefixes; -1 - row if it is a copy of a row of a
 * prefix. Returns their number. */
static inline int64_t whole_rows(const int64_t *len, const int64_t *prefix, int n_seq, int64_t *row)
{
    int64_t n = 0, first = 0, base = 0;
    for (int i = 0; i < n_seq; first += len[i++]) {
        if (!prefix[i]) base = first;
        for (int64_t t = 0; t < prefix[i]; t++) row[n++] = -1 - (base + t);
        for (int64_t t = 0; t < len[i]; t++) row[n++] = first + t;
    }
    return n;
}

/* whole = the rows of x for whole sequences; copies are 0 if `own`. */
static inline void put_whole(struct tensor whole, struct tensor x, const int64_t *row, int64_t n, bool own)
{
    const int64_t width = x.shape[1];
    for (int64_t t = 0; t < n; t++)
        for (int64_t c = 0; c < width; c++) {
            const int64_t from = row[t] < 0 ? -1 - row[t] : row[t];
            set_value(whole, t * width + c, own && row[t] < 0 ? 0 : value_at(x, from * width + c));
        }
}

/* The rows of whole sequences that are not copies, in the order of `like`. */
static inline struct tensor own_rows(struct tensor whole, const int64_t *row, int64_t n, struct tensor like)
{
    struct tensor y = make_copy(like);
    const int64_t width = whole.shape[1];
    for (int64_t t = 0; t < n; t++)
        for (int64_t c = 0; c < width && row[t] >= 0; c++)
            set_value(y, row[t] * width + c, value_at(whole, t * width + c));
    return y;
}
static inline struct tensor sum_of_copies(struct tensor whole, const int64_t *row, int64_t n, struct tensor like)
{
    struct tensor y = make_zero(like.dtype, like.shape[0], like.shape[1], -1);
    const int64_t width = whole.shape[1];
    for (int64_t t = 0; t < n; t++)
        for (int64_t c = 0; c < width; c++) {
            const int64_t at = (row[t] < 0 ? -1 - row[t] : row[t]) * width + c;
            set_value(y, at, value_at(y, at) + value_at(whole, t * width + c));
        }
    return y;
}

#endif
