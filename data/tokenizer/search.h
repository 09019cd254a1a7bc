/* search.h - a regular expression of the user, searched in texts. */
#ifndef MT_SEARCH_H
#define MT_SEARCH_H

#include "kernels/base.h"

struct search;
/* pattern: PCRE2's syntax, Unicode. The error begins with `name` and has PCRE2's reason and the byte. */
struct search *search_open(const char *pattern, const char *name, struct err *err) MT_CHECK;
void search_close(struct search *s); /* NULL is fine */
/* Whether the pattern has a group of this name. */
bool search_has_group(const struct search *s, const char *group);

enum search_result { SEARCH_NONE, SEARCH_FOUND, SEARCH_LIMIT /* too many steps on this text */ };
/* Whether there is a match. text: valid UTF-8. */
enum search_result search_any(struct search *s, const char *text, int64_t size);
/* *begin, *end: bytes of `group` in the last match in which it takes part. */
enum search_result search_last(struct search *s, const char *text, int64_t size, const char *group, int64_t *begin,
                               int64_t *end);

#endif
