/* json_array.h - reads a file that is one JSON array item by item; only the size of an item is limited. */
#ifndef MT_JSON_ARRAY_H
#define MT_JSON_ARRAY_H

#include "data/file/file.h"
#include "data/json/text.h"

/* Zeroed is valid once the reader is set; it is at its beginning, and the caller owns it. */
struct json_array {
    struct line_reader *reader;
    const char *chunk; /* [size], of which `at` bytes are consumed */
    int64_t size, at;
    int64_t bytes, index; /* bytes of the file before the chunk; items returned */
    struct text_buf item;
    bool opened, closed;
};
/* Reads an item. 1: *text is the next item, NUL-terminated, valid until the next call. 0: the array is closed and
 * nothing follows. -1: not a JSON array. Only strings and brackets are checked: the caller parses the item. */
int json_array_next(struct json_array *a, const char **text, int64_t *size, struct err *err) MT_CHECK;
void json_array_free(struct json_array *a);

#endif
