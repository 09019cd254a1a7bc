/* json_rewrite.h - rewrites JSON that Python's json reads as JSON that jansson reads. */
#ifndef MT_JSON_REWRITE_H
#define MT_JSON_REWRITE_H

#include "kernels/base.h"

/* The first two bytes of a marked string, which stands for a value that jansson cannot read: NUL, and the kind of
 * value. */
enum json_mark {
    JSON_MARK_NONE = 0,
    JSON_MARK_NUMBER = '#', /* what follows is digits beyond 64 bits, NaN, Infinity or -Infinity */
    JSON_MARK_HALF = '?',   /* a string with half of a surrogate pair */
    JSON_MARK_TEXT = '='    /* what follows is a string that begins with NUL */
};

/* Copies the text with marked strings in place of NaN, Infinity, numbers that neither int64 nor double holds, and
 * strings that begin with NUL or have half of a surrogate pair. In keys U+FFFD replaces such halves and NUL. Line
 * numbers do not change. Returns the size, *out is to be freed; 0: nothing to replace. */
int64_t json_rewrite(const char *text, int64_t size, char **out);

#endif
