/* json_array.h - a file that is one JSON array, read item by item: the file's size is unlimited, an item's is
 * limited. */
#ifndef MT_JSON_ARRAY_H
#define MT_JSON_ARRAY_H

#include "data/file/file.h"
#include "data/json/text.h"

/* Zeroed is valid once the reader is set; the reader is at its beginning, and the caller owns it. */
struct json_array {
    struct line_reader *reader;
    const char *chunk; /* [size], of which `at` bytes are consumed */
    int64_t size, at;
    int64_t bytes, index; /* bytes of the file before the chunk; items returned */
    struct text_buf item;
    bool opened, closed;
};
/* Reads an item. 1: *text is the next item, NUL-terminated, valid until the next call. 0: the array is closed and
 * nothing follows. -1: not a JSON array. Items are separated by looking at strings and brackets only. */
int json_array_next(struct json_array *a, const char **text, int64_t *size, struct err *err) MT_CHECK;
void json_array_free(struct json_array *a);

#endif
