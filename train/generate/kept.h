/* kept.h - sequences that stay in the engine's cache when their samples end. A later request with the same adapter
 * continues the kept sequence whose tokens its prompt begins with. If its prompt begins with only some of them, it
 * continues a copy of these, if the cache can copy them (cache_has).
 *
 * A kept sequence has no room beyond its tokens. When a new sequence needs its number or its pages, the kept sequence
 * that was used longest ago is dropped first. Only engine.c calls these functions. */
#ifndef MT_KEPT_H
#define MT_KEPT_H

#include "model/cache.h"
#include "train/generate/answer.h"

struct kept_seq {
    int32_t *ids;      /* [n] tokens in the cache; NULL: the sequence is not kept */
    uint16_t *routing; /* [n, n_routing] experts of the tokens; NULL: not recorded */
    int64_t n, n_routing, used;
    int adapter;
};
struct kept {
    struct cache *cache;
    struct device *dev;
    struct kept_seq *seqs; /* [cache.size.n_seq] by the sequence's number; NULL: no sequence is kept */
    int64_t n_use;
};

/* on: sequences are kept. Otherwise all functions only call those of the cache. */
void kept_open(struct kept *k, struct cache *c, struct device *dev, bool on);
void kept_close(struct kept *k); /* k may be zeroed */

/* Ends the sequence of a complete answer: keeps or drops it. */
void kept_end(struct kept *k, int seq, const struct answer *a);
void kept_forget(struct kept *k, int adapter); /* drops the kept sequences of the adapter */

/* Returns a sequence for a prompt, with room for n_tok tokens. The cache may already have the first tokens of the
 * prompt; if r asks for experts, r->prompt_routing gets those of these tokens. -1: there is no room now. */
int kept_take(struct kept *k, const struct answer_rules *r, int64_t n_tok);
/* As the functions of cache.h, but drop kept sequences if room is missing. */
int kept_fork(struct kept *k, int seq, int64_t n_tok);
bool kept_fork_fits(struct kept *k, int64_t len, int64_t n_tok);
bool kept_extend(struct kept *k, int seq, int64_t n_tok);

#endif
