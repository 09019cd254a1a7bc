/* unicode.h - characters added after Unicode 14, the version of PCRE2 10.42. */
#ifndef MT_UNICODE_H
#define MT_UNICODE_H

#include "kernels/base.h"

/* A copy of the text (valid UTF-8) in which a character of Unicode 14 with the same general category, membership in the
 * script Han and number of bytes replaces each newer one, so that offsets do not change; for mem_free. NULL: the text
 * has no such character. */
char *unicode_as_14(const char *text, int64_t size);

#endif
