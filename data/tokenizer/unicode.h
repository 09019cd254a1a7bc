/* unicode.h - characters added after Unicode 14, the version of PCRE2 10.42. */
#ifndef MT_UNICODE_H
#define MT_UNICODE_H

#include "kernels/base.h"

/* A copy of the text (valid UTF-8) in which each such newer character is replaced by a character of Unicode 14 with the
 * same general category, the same membership in the script Han and the same number of bytes, so all offsets stay the
 * same. NULL when the text has no such character. For mem_free. */
char *unicode_as_14(const char *text, int64_t size);

#endif
