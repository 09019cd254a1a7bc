/* cache.h - what decoding keeps of earlier tokens: for each layer the rows and states that its mixer asks for
 * (cache_need in layer.h), rows in pages of MT_PAGE. Where queries see a window, a sequence has as many pages as the
 * window and a chunk need, a ring. Every sequence has its own pages and states, given when the cache is opened.
 *
 * A pass with model_pass.cache adds tokens to sequences: any number while all are empty (prefill), else at most
 * `chunk` of each (decode). */
#ifndef MT_CACHE_H
#define MT_CACHE_H

#include "model/arch/arch.h"

struct cache {
    struct layer_cache *layers; /* [n_layer] host: views of the arena */
    int64_t n_seq, max_len, chunk;
    struct tensor slot; /* [n_seq] i32 */
    int64_t bytes;      /* in the arena */
    int32_t *len;       /* [n_seq] host: tokens of each sequence so far */
};

/* Whether all mixers of the model can decode. */
bool cache_possible(const struct arch *a);
/* Allocates the pages and states of n_seq sequences of at most max_len tokens in `arena` of dev, whose owner releases
 * it; a dry run counts their bytes. Error: a mixer cannot decode, or too many pages for their numbers. */
int cache_open(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a, int64_t n_seq,
               int64_t max_len, int64_t chunk, struct err *err) MT_CHECK;
void cache_close(struct cache *c); /* frees the host tables; c may be zeroed */
void cache_clear(struct cache *c); /* all sequences are empty again */

/* Of model_begin: counts the tokens of a pass, sequence s those at pos[cu[s]] .. pos[cu[s+1] - 1]. True: some follow
 * earlier ones, and the pass decodes. */
bool cache_begin(struct cache *c, int64_t n_seq, const int32_t *cu, const int32_t *pos);

#endif
