/* json_literal.h - values as Python and numpy print them -> JSON. */
#ifndef MT_JSON_LITERAL_H
#define MT_JSON_LITERAL_H

#include "data/json/text.h"

/* Appends the JSON of a list, tuple, dict or array as repr() and str() print it: pandas and datasets write such text
 * into cells of CSV files. Items of numpy's arrays have only blanks between them. False, with `out` unchanged: the text
 * is something else, or not complete ("..." in an array of more than 1000 items). */
bool json_literal(struct text_buf *out, const char *text, int64_t size);

#endif
