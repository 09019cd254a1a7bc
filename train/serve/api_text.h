/* api_text.h - parts of OpenAI's JSON: errors, text that may not be UTF-8. */
#ifndef MT_SERVE_API_TEXT_H
#define MT_SERVE_API_TEXT_H

#include "data/json/text.h"

struct api_error {
    int status;
    char param[80]; /* the wrong parameter; "": none */
    struct err why;
};
/* Removes the directory of `path` from a message. */
void api_hide_directory(struct err *e, const char *path);
/* {"error": {"message", "type", "param", "code"}} */
void api_put_error(struct text_buf *out, const struct api_error *e);
/* A JSON string; invalid bytes become U+FFFD. */
void api_put_text(struct text_buf *out, const char *text, int64_t size);
void api_put_i64(struct text_buf *out, const char *key, int64_t v);

#endif
