/* episode.c - see episode.h. */
#include "train/rollout/episode.h"

#include <math.h>
#include <string.h>

static void push_ids(struct token_list *to, const int32_t *ids, int64_t n)
{
    token_list_reserve(to, n);
    for (int64_t i = 0; i < n; i++) to->ids[to->count++] = ids[i];
}

void episode_begin(struct episode *e, const int32_t *prompt, int64_t n, int64_t n_routing)
{
    *e = (struct episode){.n_prompt = n, .n_routing = n_routing};
    push_ids(&e->ids, prompt, n);
}

void episode_free(struct episode *e)
{
    token_list_free(&e->ids);
    mem_free(e->logprob);
    mem_free(e->kept);
    mem_free(e->mask);
    mem_free(e->routing);
    *e = (struct episode){.n = 0};
}

/* Room for n tokens more of the completion. */
static void reserve(struct episode *e, int64_t n)
{
    const int64_t before = e->cap;
    if (e->n + n <= before) return;
    e->cap = MT_MAX(2 * before, e->n + n);
    e->logprob = mem_grow(e->logprob, before, e->cap, sizeof(*e->logprob));
    e->kept = mem_grow(e->kept, before, e->cap, sizeof(*e->kept));
    e->mask = mem_grow(e->mask, before, e->cap, sizeof(*e->mask));
}

/* Appends the experts of tokens from n_routed on: from the pass over the turn's prompt, then of the turn itself. */
static void add_routing(struct episode *e, const struct sample *s)
{
    const int64_t k = e->n_routing, before = s->n_prompt - 1, from = MT_MIN(e->n_routed, before), n = before + s->n;
    if (!k) return;
    e->routing = mem_reserve(e->routing, &e->cap_routed, MT_MAX(n, 1) * k, sizeof(*e->routing));
    if (before > from)
        memcpy(e->routing + from * k, s->prompt_routing + from * k,
               (size_t)((before - from) * k) * sizeof(*e->routing));
    if (s->n) memcpy(e->routing + before * k, s->routing, (size_t)(s->n * k) * sizeof(*e->routing));
    e->n_routed = n;
}

void episode_add_turn(struct episode *e, const struct sample *s)
{
    MT_REQUIRE(s->n_prompt == e->ids.count, "a turn after %lld tokens of %lld", (long long)s->n_prompt,
               (long long)e->ids.count);
    add_routing(e, s);
    reserve(e, s->n);
    if (s->n) memcpy(e->logprob + e->n, s->logprob, (size_t)s->n * sizeof(*e->logprob));
    if (s->n) memcpy(e->kept + e->n, s->kept_logprob, (size_t)s->n * sizeof(*e->kept));
    if (s->n) memset(e->mask + e->n, 1, (size_t)s->n);
    push_ids(&e->ids, s->ids, s->n);
    e->n += s->n;
}

void episode_add_messages(struct episode *e, const int32_t *ids, int64_t n)
{
    reserve(e, n);
    for (int64_t i = e->n; i < e->n + n; i++) {
        e->logprob[i] = e->kept[i] = NAN;
        e->mask[i] = 0;
    }
    push_ids(&e->ids, ids, n);
    e->n += n;
}

struct sample episode_sample(const struct episode *e, int64_t index)
{
    return (struct sample){.index = index,
                           .prompt = e->ids.ids,
                           .n_prompt = e->n_prompt,
                           .ids = e->ids.ids + e->n_prompt,
                           .n = e->n,
                           .logprob = e->logprob,
                           .kept_logprob = e->kept,
                           .prompt_routing = e->n_routing ? e->routing : NULL,
                           .routing = e->n_routing ? e->routing + (e->n_prompt - 1) * e->n_routing : NULL};
}

int64_t episode_last_turn(const uint8_t *mask, int64_t n_prompt, int64_t n)
{
    while (n && !mask[n - 1]) n--;
    while (n && mask[n - 1]) n--;
    return n_prompt + n;
}
