/* kept.h - sequences that stay in the engine's cache when their samples end. A request whose prompt begins with the
 * tokens of one, with the same adapter, continues it, or a copy of its first tokens where these exist (cache_has).
 *
 * A kept sequence has no room beyond its tokens. It is dropped as soon as another sequence needs its place or its
 * pages: the one that was used longest ago first. For engine.c. */
#ifndef MT_KEPT_H
#define MT_KEPT_H

#include "model/cache.h"
#include "train/generate/answer.h"

struct kept_seq {
    int32_t *ids;      /* [n] its tokens; NULL: the sequence is not kept */
    uint16_t *routing; /* [n, n_routing] their experts; NULL: not recorded */
    int64_t n, n_routing, used;
    int adapter;
};
struct kept {
    struct cache *cache;
    struct device *dev;
    struct kept_seq *seqs; /* [cache.size.n_seq] by the sequence's number; NULL: no sequence is kept */
    int64_t n_use;
};

/* on: sequences are kept; without it kept_take and others only call the cache. */
void kept_open(struct kept *k, struct cache *c, struct device *dev, bool on);
void kept_close(struct kept *k); /* k may be zeroed */

/* The sequence of an answer that has ended: it stays, or is dropped. */
void kept_end(struct kept *k, int seq, const struct answer *a);
void kept_forget(struct kept *k, int adapter); /* drops its sequences */

/* A sequence for a prompt, with room for n_tok tokens: cache_len of it are those of the prompt's first tokens, whose
 * experts are in r->prompt_routing where these are asked for. -1: there is no room now. */
int kept_take(struct kept *k, const struct answer_rules *r, int64_t n_tok);
/* As in cache.h, after dropping kept sequences where they are in the way. */
int kept_fork(struct kept *k, int seq, int64_t n_tok);
bool kept_fork_fits(struct kept *k, int64_t len, int64_t n_tok);
bool kept_extend(struct kept *k, int seq, int64_t n_tok);

#endif
