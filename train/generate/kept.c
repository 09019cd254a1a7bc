/* kept.c - see kept.h. */
#include "train/generate/kept.h"

#include <string.h>

void kept_open(struct kept *k, struct cache *c, struct device *dev, bool on)
{
    *k = (struct kept){.cache = c, .dev = dev};
    if (on) k->seqs = mem_array(c->size.n_seq, sizeof(*k->seqs));
}

/* Forgets that the sequence is kept; its tokens stay in the cache. */
static void release(struct kept_seq *s)
{
    mem_free(s->ids);
    mem_free(s->routing);
    *s = (struct kept_seq){.n = 0};
}

void kept_close(struct kept *k)
{
    for (int64_t i = 0; k->seqs && i < k->cache->size.n_seq; i++) release(&k->seqs[i]);
    mem_free(k->seqs);
    k->seqs = NULL;
}

static void drop(struct kept *k, int64_t seq)
{
    release(&k->seqs[seq]);
    cache_drop(k->cache, (int)seq);
}

/* Drops the kept sequence that was used longest ago, except `but`. False: there is no other. */
static bool drop_oldest(struct kept *k, int64_t but)
{
    int64_t oldest = -1;
    for (int64_t i = 0; k->seqs && i < k->cache->size.n_seq; i++)
        if (k->seqs[i].ids && i != but && (oldest < 0 || k->seqs[i].used < k->seqs[oldest].used)) oldest = i;
    if (oldest < 0) return false;
    drop(k, oldest);
    return true;
}

void kept_forget(struct kept *k, int adapter)
{
    for (int64_t i = 0; k->seqs && i < k->cache->size.n_seq; i++)
        if (k->seqs[i].ids && k->seqs[i].adapter == adapter) drop(k, i);
}

/* ---- ends ---- */

/* Copies the experts of all s->n tokens: of the prompt, then of the answer. */
static void keep_routing(struct kept_seq *s, const struct answer *a)
{
    const struct answer_rules *r = a->rules;
    const int64_t before = MT_MIN(r->q.n_ids - 1, s->n), k = r->n_routing;
    s->n_routing = k;
    s->routing = mem_array(MT_MAX(s->n * k, 1), sizeof(*s->routing));
    if (before) memcpy(s->routing, r->prompt_routing, (size_t)(before * k) * sizeof(*s->routing));
    if (s->n > before) memcpy(s->routing + before * k, a->routing, (size_t)((s->n - before) * k) * sizeof(*s->routing));
}

void kept_end(struct kept *k, int seq, const struct answer *a)
{
    const struct sample_request *q = &a->rules->q;
    const int64_t n = cache_len(k->cache, seq), of_prompt = MT_MIN(n, q->n_ids);
    if (!k->seqs || !n || a->end == SAMPLE_FAILED) {
        cache_drop(k->cache, seq);
        return;
    }
    struct kept_seq *s = &k->seqs[seq];
    *s = (struct kept_seq){.n = n, .adapter = q->adapter, .used = ++k->n_use};
    s->ids = mem_array(n, sizeof(*s->ids));
    memcpy(s->ids, q->ids, (size_t)of_prompt * sizeof(*s->ids));
    if (n > of_prompt) memcpy(s->ids + of_prompt, a->ids, (size_t)(n - of_prompt) * sizeof(*s->ids));
    if (a->rules->n_routing) keep_routing(s, a);
    MT_REQUIRE(cache_extend(k->cache, seq, n), "a sequence of %lld tokens does not fit itself", (long long)n);
}

/* ---- begins ---- */

/* Number of tokens at the start of the prompt that the kept sequence also has, without the prompt's last token. 0 if
 * the sequence cannot be continued after them. */
static int64_t common(const struct kept *k, int seq, const struct answer_rules *r)
{
    const struct kept_seq *s = &k->seqs[seq];
    const int64_t most = MT_MIN(s->n, r->q.n_ids - 1);
    int64_t n = 0;
    if (!s->ids || s->adapter != r->q.adapter || (r->n_routing && !s->routing)) return 0;
    while (n < most && s->ids[n] == r->q.ids[n]) n++;
    return cache_has(k->cache, seq, n) ? n : 0;
}

/* The kept sequence with the most tokens of the prompt; *n: their number. -1: no sequence saves time. Each chunk of the
 * prompt's other tokens is a pass that reads all weights, so they must fit one chunk, or be no more than the saved
 * tokens. */
static int find(const struct kept *k, const struct answer_rules *r, int64_t *n)
{
    int best = -1;
    *n = 0;
    for (int i = 0; k->seqs && !r->prompt_logprob && i < k->cache->size.n_seq; i++) {
        const int64_t found = common(k, i, r);
        const bool whole = found && found == k->seqs[i].n;
        if (found > *n || (whole && found == *n)) best = i, *n = found;
    }
    const int64_t rest = r->q.n_ids - 1 - *n;
    return rest <= MT_MAX(k->cache->size.chunk, *n) ? best : -1;
}

/* Returns a sequence that begins with the first n tokens of seq. If seq has more tokens and there is room, it is a
 * copy, otherwise seq itself, cut to n tokens. -1: there is no room; -2: seq can neither be copied nor cut. */
static int continue_from(struct kept *k, int seq, int64_t n, int64_t n_tok)
{
    struct kept_seq *s = &k->seqs[seq];
    int copy = -1;
    while (n < s->n && (copy = cache_fork(k->cache, k->dev, seq, n, n_tok)) < 0 && drop_oldest(k, seq)) continue;
    if (copy >= 0) return copy;
    if (n < s->n && !cache_cut(k->cache, seq, n)) return -2;
    s->n = n;
    while (!cache_extend(k->cache, seq, n_tok))
        if (!drop_oldest(k, seq)) return -1;
    release(s);
    return seq;
}

int kept_take(struct kept *k, const struct answer_rules *r, int64_t n_tok)
{
    int64_t n;
    const int from = find(k, r, &n);
    int seq = -2;
    if (from >= 0) {
        k->seqs[from].used = ++k->n_use;
        if (r->n_routing)
            memcpy(r->prompt_routing, k->seqs[from].routing, (size_t)(n * r->n_routing) * sizeof(*r->prompt_routing));
        seq = continue_from(k, from, n, n_tok);
    }
    if (seq > -2) return seq;
    while ((seq = cache_take(k->cache, n_tok)) < 0 && drop_oldest(k, -1)) continue;
    return seq;
}

int kept_fork(struct kept *k, int seq, int64_t n_tok)
{
    const int64_t len = cache_len(k->cache, seq);
    int copy;
    while ((copy = cache_fork(k->cache, k->dev, seq, len, n_tok)) < 0 && drop_oldest(k, -1)) continue;
    return copy;
}

bool kept_fork_fits(struct kept *k, int64_t len, int64_t n_tok)
{
    while (!cache_fork_fits(k->cache, len, n_tok))
        if (!drop_oldest(k, -1)) return false;
    return true;
}

bool kept_extend(struct kept *k, int seq, int64_t n_tok)
{
    while (!cache_extend(k->cache, seq, n_tok))
        if (!drop_oldest(k, -1)) return false;
    return true;
}
