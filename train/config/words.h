/* words.h - a command line as words, without a shell. */
#ifndef MT_WORDS_H
#define MT_WORDS_H

#include "kernels/base.h"

/* Blanks separate words, except in '...' and "..."; '' and "" are empty words. Outside '...' a backslash before a
 * blank, a quote or a backslash stands for that character; other backslashes are kept. No other character is
 * special. */
struct words {
    char **words; /* [n], then NULL */
    int64_t n;
    char *text; /* of all words */
};
int words_split(struct words *w, const char *text, struct err *err) MT_CHECK; /* error: a quote without its end */
void words_free(struct words *w);                                             /* w may be zeroed */

#endif
