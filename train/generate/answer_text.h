/* answer_text.h - the text of an answer while tokens are added: complete characters, up to the first stop string. */
#ifndef MT_ANSWER_TEXT_H
#define MT_ANSWER_TEXT_H

#include "data/json/text.h"
#include "data/tokenizer/tokenizer.h"

struct answer_text {
    const struct tokenizer *tok; /* NULL: no text */
    const char *const *stops;    /* [n_stops] stop strings, not empty; the owner keeps them */
    int64_t n_stops;
    bool keep_stop; /* the text ends with its stop string; otherwise before it */
    bool early;     /* set before a token: a stop string that it completes does not count (min_tokens, as in vLLM) */

    struct text_buf bytes, text; /* decoded bytes of the tokens; their complete characters as UTF-8, invalid ones as
                                  * U+FFFD */
    int64_t n_done;              /* bytes that are in text */
    int64_t n_sure;              /* bytes of text that no later token removes: what a stream may show */
    int64_t stop;                /* the stop string that ended the text; -1: none yet */
};

void answer_text_begin(struct answer_text *a); /* empties it, after its first members were set */
/* Adds the text of a token. True: the token completes a stop string, and the text has ended. Of several stop strings
 * the one that ends first counts, then the first of the list. */
bool answer_text_add(struct answer_text *a, int32_t id);
void answer_text_end(struct answer_text *a); /* no more tokens: an incomplete character becomes U+FFFD */
void answer_text_free(struct answer_text *a);

#endif
