/* search.h - a regular expression of the user, searched in texts. */
#ifndef MT_SEARCH_H
#define MT_SEARCH_H

#include "kernels/base.h"

struct search;
/* pattern: PCRE2's syntax, Unicode. The error has PCRE2's reason and the byte; `name` begins it. */
struct search *search_open(const char *pattern, const char *name, struct err *err) MT_CHECK;
void search_close(struct search *s); /* NULL is fine */
/* The pattern has a group of this name. */
bool search_has_group(const struct search *s, const char *group);

enum search_result { SEARCH_NONE, SEARCH_FOUND, SEARCH_LIMIT /* too many steps */ };
/* The first match from byte `at` on. *begin, *end: bytes of `group`, or with NULL of the match; both -1 when the group
 * has no part in it. text: valid UTF-8. */
enum search_result search_next(struct search *s, const char *text, int64_t size, int64_t at, const char *group,
                               int64_t *begin, int64_t *end);

#endif
