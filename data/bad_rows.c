/* bad_rows.c - see bad_rows.h. */
#include "data/bad_rows.h"

bool bad_rows_add(struct bad_rows *b, const struct err *why)
{
    if (b->n < BAD_ROWS_SHOWN) b->why[b->n] = *why;
    return ++b->n < BAD_ROWS_MOST;
}

int bad_rows_check(const struct bad_rows *b, int64_t n_row, const char *path, struct err *err)
{
    if (!b->n) return 0;
    if (b->n == 1) return err_set(err, "%s", b->why[0].msg);
    for (int64_t i = 0; i < MT_MIN(b->n, (int64_t)BAD_ROWS_SHOWN); i++) log_warn("%s", b->why[i].msg);
    if (b->n > BAD_ROWS_SHOWN) log_warn("further bad rows are counted, not shown");
    return err_set(err, "%s: %lld of the first %lld rows are bad, as listed above: correct or remove them", path,
                   (long long)b->n, (long long)n_row);
}
