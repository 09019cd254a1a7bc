/* normalize.h - UTF-8 checked once, and Unicode normalization form C with the way back to the original bytes. */
#ifndef MT_NORMALIZE_H
#define MT_NORMALIZE_H

#include "kernels/base.h"

/* Byte offset of the first byte that is no valid UTF-8 (overlong, surrogate, above U+10FFFF, cut off), or -1. */
int64_t utf8_invalid_at(const char *text, int64_t size);

/* A text in form C. Zeroed is valid. text == NULL: the input is in form C already, and nothing was copied. */
struct nfc {
    char *text;
    int64_t size, cap;
    int32_t *begin, *end; /* [size] for each byte, the bytes [begin, end) of the input that it came from */
};
void nfc_free(struct nfc *n);
/* text: valid UTF-8 of at most INT32_MAX bytes. An error: more combining marks in a row than any language has. */
int nfc_make(struct nfc *n, const char *text, int64_t size, struct err *err) MT_CHECK;

#endif
