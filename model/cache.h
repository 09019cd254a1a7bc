/* cache.h - what decoding keeps of earlier tokens: for each layer the rows and states that its mixer needs (cache_need
 * in layer.h), rows in pages of MT_PAGE.
 *
 * A sequence has one row of every state, and pages. In layers with a window its pages are a ring, long enough for
 * window and chunk. In other layers pages come from a pool: a new sequence reserves the pages of all tokens that it may
 * have, and takes them as it grows, so it can always finish. A forked sequence shares the full pages of the original,
 * which neither writes any more; the last page, rings and states are copied.
 *
 * A pass with model_pass.cache adds tokens to some sequences, in any order: any number if these are all empty
 * (prefill), else at most `chunk` to each (decode). */
#ifndef MT_CACHE_H
#define MT_CACHE_H

#include "model/arch/arch.h"

struct cache_size {
    int64_t n_seq, max_len; /* sequences; tokens of the longest one */
    int64_t chunk;          /* tokens of a sequence in a decoding pass, at most */
    int64_t n_tok;          /* tokens of all sequences that pages have room for, at least max_len */
};

struct cache_class; /* rows of all layers with one window and ratio; they have the same page numbers */
struct cache {
    struct cache_size size;
    struct layer_cache *layers; /* [n_layer] host: views of the arena; tables and slots are those of the last pass */
    int64_t n_layer, n_class;
    struct cache_class *classes;
    struct tensor slot; /* [n_seq] i32 */
    int64_t bytes;      /* in the arena */
    struct cache_seq {
        bool used;
        int64_t len, promised; /* tokens so far, and at most */
    } * seqs;                  /* [n_seq] host */
};

/* Allocates pages and states in `arena` of dev, whose owner releases it; a dry run counts their bytes. Error: more
 * pages than 31-bit page numbers can name. */
int cache_open(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a,
               const struct cache_size *size, struct err *err) MT_CHECK;
void cache_close(struct cache *c); /* frees the host tables; c may be zeroed */

/* Begins a sequence of at most n_tok tokens and returns its number; -1: no room now. */
int cache_take(struct cache *c, int64_t n_tok);
/* Copies the first len tokens of seq, for which cache_has must hold, to a new sequence of at most n_tok tokens. Returns
 * its number; -1: no room now. */
int cache_fork(struct cache *c, struct device *dev, int seq, int64_t len, int64_t n_tok);
/* Whether cache_fork would find room. */
bool cache_fork_fits(const struct cache *c, int64_t len, int64_t n_tok);
/* Reserves pages for n_tok tokens of the sequence, at least those that it has; false: no room now. */
bool cache_extend(struct cache *c, int seq, int64_t n_tok);
/* Whether the sequence can continue after its first len tokens. Before its end it cannot if layers have states, which
 * exist only for the end, or if a ring has dropped tokens that the window needs. */
bool cache_has(const struct cache *c, int seq, int64_t len);
/* Shortens the sequence to its first len tokens, for which cache_has must hold, and frees the other pages, reserved
 * ones too. False, with no change: its last page would be shared with another sequence. */
bool cache_cut(struct cache *c, int seq, int64_t len);
void cache_drop(struct cache *c, int seq);
int64_t cache_len(const struct cache *c, int seq);
double cache_used(const struct cache *c); /* share of the pages in use, 0 to 1 */

/* Adds the tokens of a pass to sequences; model_begin calls it. Tokens cu[s] .. cu[s+1] - 1, at positions pos, are
 * those of sequence seq[s], s < n_seq. decode: some of these sequences have tokens already. */
void cache_begin(struct cache *c, struct device *dev, int64_t n_seq, const int32_t *seq, const int32_t *cu,
                 const int32_t *pos, bool decode);

#endif
