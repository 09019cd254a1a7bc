/* unicode.h - characters that Unicode got after version 14, the one that PCRE2 10.42 knows. */
#ifndef MT_UNICODE_H
#define MT_UNICODE_H

#include "kernels/base.h"

/* A copy of the text (valid UTF-8) with each of them replaced by one of Unicode 14 that has the same general category
 * and as many bytes, so that all offsets stay; NULL when there is none. For mem_free. */
char *unicode_as_14(const char *text, int64_t size);

#endif
