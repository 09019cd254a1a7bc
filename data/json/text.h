/* text.h - text that grows, with marked spans; JSON as Python writes it. */
#ifndef MT_TEXT_H
#define MT_TEXT_H

#include "data/json/json.h"

/* A text and its marked spans, bytes [begin, end), ascending and disjoint: the parts that carry loss. Zeroed is
 * valid. */
struct text_buf {
    char *text; /* NUL-terminated after the first write */
    int64_t size, cap;
    int64_t (*spans)[2];
    int64_t n_spans, cap_spans;
};
void text_free(struct text_buf *t);
void text_span(struct text_buf *t, int64_t begin, int64_t end); /* appends one span */

static inline bool text_is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

bool text_is_blank(const char *text, int64_t size); /* empty, or white space */
bool text_is_blank_json(struct json j);             /* a blank string, or another value that is false */
void text_trim(const char **text, int64_t *size);   /* leaves out white space at both ends */

void text_put(struct text_buf *t, const char *text); /* NUL-terminated */
void text_put_bytes(struct text_buf *t, const char *text, int64_t size);
void text_put_base64(struct text_buf *t, const void *data, int64_t n); /* n bytes, with padding */
/* Writes a value as json.dumps(value, ensure_ascii=False): ", " and ": " between items, floats as Python's repr. */
int text_put_json(struct text_buf *t, struct json value, struct err *err) MT_CHECK;
int text_put_number(struct text_buf *t, struct json number, struct err *err) MT_CHECK;
void text_put_quoted(struct text_buf *t, const char *s, int64_t size); /* a string, as text_put_json */
void text_put_string(struct text_buf *t, const char *s);               /* text_put_quoted; s is NUL-terminated */
/* Call it before each value of an array or object that is written in pieces. Writes ", " unless the opening bracket
 * precedes. */
void text_put_comma(struct text_buf *t);
void text_put_key(struct text_buf *t, const char *key); /* text_put_comma, and `"key": ` unless it is NULL */
void text_put_float(struct text_buf *t, double v);      /* Python's repr */

#endif
