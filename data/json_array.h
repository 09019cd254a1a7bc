/* json_array.h - a file that is one JSON array, read item by item: its size has no limit, that of an item has. */
#ifndef MT_JSON_ARRAY_H
#define MT_JSON_ARRAY_H

#include "data/file.h"
#include "data/text.h"

/* Zeroed but for the reader is valid; the reader stands at its beginning and stays the caller's. */
struct json_array {
    struct line_reader *reader;
    const char *chunk; /* [size] of which `at` bytes are read */
    int64_t size, at;
    int64_t bytes, index; /* read of the file before the chunk; items returned */
    struct text_buf item;
    bool opened, closed;
};
/* 1: *text is the next item, NUL-terminated, valid until the next call. 0: the array is
 * closed and nothing follows. -1: no JSON array. Items are told apart by strings and brackets alone. */
int json_array_next(struct json_array *a, const char **text, int64_t *size, struct err *err) MT_CHECK;
void json_array_free(struct json_array *a);

#endif
