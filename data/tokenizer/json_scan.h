/* json_scan.h - reads large parts of a JSON text item by item, without a tree; they are cut out before json_parse. */
#ifndef MT_JSON_SCAN_H
#define MT_JSON_SCAN_H

#include "data/json/json.h"

/* The unchecked text of an object or array, in which json_scan reports errors. */
struct json_part {
    const char *text; /* NULL: missing */
    int64_t size;
};
/* json_parse without the objects and arrays under keys[0..n) of the object `parent` at the root. The tree has {} or []
 * in their place; parts[i] is their text. */
struct json_doc *json_scan_without(const char *text, int64_t size, const char *name, const char *parent,
                                   const char *const *keys, struct json_part *parts, int64_t n,
                                   struct err *err) MT_CHECK;

/* Iterates a part: call json_scan_next for each item, then exactly one of the readers below for its value. */
struct json_scan {
    const char *at, *end;
    struct json where; /* the part's node in the tree, for messages */
    const char *key;   /* key of the item, [key_size]; NULL in an array */
    int64_t key_size, index;
    int64_t depth;
    bool first; /* no item was read since the last bracket */
    char *text; /* of the last string that had escapes */
    int64_t cap;
};
/* Opens a part; -1 when it is not valid UTF-8. s needs json_scan_close also after an error. */
int json_scan_open(struct json_scan *s, struct json_part part, struct json where, struct err *err) MT_CHECK;
void json_scan_close(struct json_scan *s);
/* Moves to the next item. 1: at its value, in an object with s->key; 0: end of the innermost open array or object; -1:
 * not valid JSON. */
int json_scan_next(struct json_scan *s, struct err *err) MT_CHECK;
bool json_scan_is_array(const struct json_scan *s);
/* Enters the value, which must be an array; json_scan_next returns its items, then 0. */
int json_scan_array(struct json_scan *s, struct err *err) MT_CHECK;
/* Reads the value, a string. *out: [size] without a NUL, valid until the next string is read. */
int json_scan_str(struct json_scan *s, const char **out, int64_t *size, struct err *err) MT_CHECK;
int json_scan_i64(struct json_scan *s, int64_t min, int64_t max, int64_t *out, struct err *err) MT_CHECK;
/* An error that names file and item, as json_error does. */
int json_scan_error(const struct json_scan *s, struct err *err, const char *fmt, ...) MT_PRINTF(3, 4);

#endif
