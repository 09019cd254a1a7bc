/* words.h - a command line as words, without a shell. */
#ifndef MT_WORDS_H
#define MT_WORDS_H

#include "kernels/base.h"

/* Blanks separate words. '...' and "..." keep blanks; an empty pair is an empty word. A backslash before a blank, a
 * quote or a backslash stands for that character, except in '...'; other backslashes stay. Nothing else is special: no
 * variables, patterns, ~ or pipes. */
struct words {
    char **words; /* [n], then NULL */
    int64_t n;
    char *text; /* of all words */
};
int words_split(struct words *w, const char *text, struct err *err) MT_CHECK; /* error: a quote without its end */
void words_free(struct words *w);                                             /* w may be zeroed */

#endif
