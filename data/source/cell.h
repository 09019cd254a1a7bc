/* cell.h - values of columns as JSON. */
#ifndef MT_CELL_H
#define MT_CELL_H

#include "data/json/text.h"

void cell_put_int(struct text_buf *t, int64_t value, bool is_unsigned);
void cell_put_float(struct text_buf *t, double value); /* also NaN and Infinity, which json_parse reads */
/* Writes {"not read": KIND}. As an object and not a text it is never trained on; templates take it as true, like an
 * image. */
void cell_put_unread(struct text_buf *t, const char *kind);

#endif
