/* json_scan.h - the large parts of a JSON text: cut out before json_parse, and read item by item without a tree. */
#ifndef MT_JSON_SCAN_H
#define MT_JSON_SCAN_H

#include "data/json.h"

/* An object or array as it stands in the text. Not looked at yet: json_scan finds what is wrong inside. */
struct json_part {
    const char *text; /* NULL: there is none */
    int64_t size;
};
/* json_parse, with the objects and arrays under keys[0..n) of the object `parent` at the root left out of the tree,
 * where {} or [] stands for them: parts[i] is their text. */
struct json_doc *json_parse_without(const char *text, int64_t size, const char *name, const char *parent,
                                    const char *const *keys, struct json_part *parts, int64_t n,
                                    struct err *err) MT_CHECK;

/* Goes through a part: json_scan_next for each item, then exactly one of the readers below for its value. */
struct json_scan {
    const char *at, *end;
    struct json where; /* the node that stands for the part, for messages */
    const char *key;   /* of the item, [key_size]; NULL in an array */
    int64_t key_size, index;
    int64_t depth;
    bool first; /* nothing was read of what was opened last */
    char *text; /* of the last string that had escapes */
    int64_t cap;
};
/* -1 when the part is not valid UTF-8. After an error too s needs json_scan_close. */
int json_scan_open(struct json_scan *s, struct json_part part, struct json where, struct err *err) MT_CHECK;
void json_scan_close(struct json_scan *s);
/* 1: at the value of the next item, of an object with s->key; 0: the end of what was opened last; -1: no valid JSON. */
int json_scan_next(struct json_scan *s, struct err *err) MT_CHECK;
bool json_scan_is_array(const struct json_scan *s); /* the value is one */
/* The value is an array, whose items come next, up to the 0 of json_scan_next. */
int json_scan_array(struct json_scan *s, struct err *err) MT_CHECK;
/* *out: [size] without a NUL, valid until the next string is read. */
int json_scan_str(struct json_scan *s, const char **out, int64_t *size, struct err *err) MT_CHECK;
int json_scan_i64(struct json_scan *s, int64_t min, int64_t max, int64_t *out, struct err *err) MT_CHECK;
/* An error that names file and item, as json_error does. */
int json_scan_error(const struct json_scan *s, struct err *err, const char *fmt, ...) MT_PRINTF(3, 4);

#endif
