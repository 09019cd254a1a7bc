/* json_rewrite.h - rewrites JSON that Python's json reads as JSON that jansson reads. */
#ifndef MT_JSON_REWRITE_H
#define MT_JSON_REWRITE_H

#include "kernels/base.h"

/* The first two bytes of a string that stands for something else: a NUL and what it is. */
enum json_mark {
    JSON_MARK_NONE = 0,
    JSON_MARK_NUMBER = '#', /* what follows is digits beyond 64 bits, NaN, Infinity or -Infinity */
    JSON_MARK_HALF = '?',   /* a string with half of a surrogate pair */
    JSON_MARK_TEXT = '='    /* what follows is a string that begins with NUL */
};

/* Copies the text with marked strings in place of numbers that neither int64 nor double holds, of NaN and Infinity, and
 * of strings with half of a surrogate pair or NUL at the start. In keys U+FFFD replaces such halves and NUL. Lines stay
 * as they are. Returns its size, *out is to be freed; 0: nothing to replace. */
int64_t json_rewrite(const char *text, int64_t size, char **out);

#endif
