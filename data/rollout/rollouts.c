/* rollouts.c - see rollouts.h. */
#include "data/rollout/rollouts.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int64_t routing_count(const struct rollouts *r, int64_t n_prompt, int64_t n)
{
    return (n_prompt + n - 1) * r->n_routing;
}

/* The new capacity of an array that needs `need` elements. */
static int64_t more(int64_t cap, int64_t need) { return MT_MAX(need, 2 * cap); }

static void reserve(struct rollouts *r, int64_t n_prompt, int64_t n_tok)
{
    if (r->n == r->cap) {
        const int64_t cap = more(r->cap, r->n + 1), had = r->cap ? r->cap + 1 : 0;
        r->prompt_off = mem_grow(r->prompt_off, had, cap + 1, sizeof(*r->prompt_off));
        r->off = mem_grow(r->off, had, cap + 1, sizeof(*r->off));
        r->reward = mem_grow(r->reward, r->cap, cap, sizeof(*r->reward));
        r->group = mem_grow(r->group, r->cap, cap, sizeof(*r->group));
        r->truncated = mem_grow(r->truncated, r->cap, cap, sizeof(*r->truncated));
        r->routing = mem_grow(r->routing, r->cap, cap, sizeof(*r->routing));
        for (int64_t k = 0; k < r->named.n; k++)
            r->named.of[k] = mem_grow(r->named.of[k], r->cap, cap, sizeof(*r->named.of[k]));
        r->cap = cap;
    }
    r->prompt_ids = mem_reserve(r->prompt_ids, &r->cap_prompt, r->n_prompt_tok + n_prompt, sizeof(*r->prompt_ids));
    if (r->n_tok + n_tok > r->cap_tok) {
        const int64_t cap = more(r->cap_tok, r->n_tok + n_tok);
        r->ids = mem_grow(r->ids, r->cap_tok, cap, sizeof(*r->ids));
        r->logprobs = mem_grow(r->logprobs, r->cap_tok, cap, sizeof(*r->logprobs));
        r->mask = mem_grow(r->mask, r->cap_tok, cap, sizeof(*r->mask));
        r->cap_tok = cap;
    }
}

void rollouts_add(struct rollouts *r, const struct rollout *row)
{
    const int64_t i = r->n, at = r->n_tok, n = row->n_completion;
    MT_REQUIRE(row->n_prompt > 0 && n > 0, "a row of %lld and %lld tokens", (long long)row->n_prompt, (long long)n);
    MT_REQUIRE(!row->routing || r->n_routing > 0, "a routing, but n_routing is not set");
    reserve(r, row->n_prompt, n);
    memcpy(r->prompt_ids + r->n_prompt_tok, row->prompt_ids, (size_t)row->n_prompt * sizeof(*r->prompt_ids));
    memcpy(r->ids + at, row->completion_ids, (size_t)n * sizeof(*r->ids));
    for (int64_t t = 0; t < n; t++) {
        r->logprobs[at + t] = row->logprobs ? row->logprobs[t] : NAN;
        r->mask[at + t] = !row->mask || row->mask[t];
    }
    r->n_logprobs += row->logprobs != NULL;
    r->reward[i] = row->reward;
    for (int64_t k = 0; k < r->named.n; k++) r->named.of[k][i] = NAN;
    r->group[i] = row->group;
    r->truncated[i] = row->truncated;
    r->routing[i] = NULL;
    if (row->routing) {
        const int64_t count = routing_count(r, row->n_prompt, n);
        r->routing[i] = mem_array(count, sizeof(**r->routing));
        memcpy(r->routing[i], row->routing, (size_t)count * sizeof(**r->routing));
    }
    r->n_prompt_tok += row->n_prompt;
    r->n_tok += n;
    r->n++;
    r->prompt_off[r->n] = r->n_prompt_tok;
    r->off[r->n] = r->n_tok;
}

int rollouts_add_reward(struct rollouts *r, const char *name, double value, struct err *err)
{
    struct rollout_rewards *named = &r->named;
    int64_t k = 0;
    while (k < named->n && strcmp(named->names[k], name)) k++;
    if (!*name || strlen(name) >= ROLLOUT_REWARD_NAME)
        return err_set(err, "`rewards`: the name \"%.60s\" is empty or has more than %d bytes", name,
                       ROLLOUT_REWARD_NAME - 1);
    if (k == ROLLOUT_REWARDS) return err_set(err, "`rewards`: the rows have more than %d names", ROLLOUT_REWARDS);
    if (k == named->n) {
        snprintf(named->names[k], ROLLOUT_REWARD_NAME, "%s", name);
        named->of[k] = mem_array(r->cap, sizeof(*named->of[k]));
        for (int64_t i = 0; i < r->n; i++) named->of[k][i] = NAN;
        named->n++;
    }
    named->of[k][r->n - 1] = value;
    return 0;
}

struct rollout rollouts_row(const struct rollouts *r, int64_t i)
{
    const int64_t p = r->prompt_off[i], at = r->off[i];
    MT_REQUIRE(i >= 0 && i < r->n, "row %lld of %lld", (long long)i, (long long)r->n);
    return (struct rollout){.n_prompt = r->prompt_off[i + 1] - p,
                            .n_completion = r->off[i + 1] - at,
                            .prompt_ids = r->prompt_ids + p,
                            .completion_ids = r->ids + at,
                            .logprobs = r->logprobs + at,
                            .mask = r->mask + at,
                            .reward = r->reward[i],
                            .group = r->group[i],
                            .truncated = r->truncated[i],
                            .routing = r->routing[i]};
}

/* The number of adjacent rows from `first` on with the same group. */
static int64_t group_size(const struct rollouts *r, int64_t first)
{
    int64_t n = 1;
    while (first + n < r->n && r->group[first + n] == r->group[first]) n++;
    return n;
}

int rollouts_check_groups(const struct rollouts *r, int64_t n_group, struct err *err)
{
    for (int64_t i = 0; i < r->n; i += n_group) {
        const int64_t n = group_size(r, i);
        if (n == n_group) continue;
        return err_set(
            err,
            "row %lld: group %lld has %lld adjacent row%s, and objective.num_generations = %lld: the rows of "
            "a group must be adjacent and their number num_generations",
            (long long)(i + 1), (long long)r->group[i], (long long)n, str_plural(n), (long long)n_group);
    }
    return 0;
}

uint64_t rollouts_hash(const struct rollouts *r)
{
    const int64_t counts[] = {r->n, r->n_prompt_tok, r->n_tok, r->n_routing};
    uint64_t h = rng_bytes(0, counts, sizeof(counts));
    if (!r->n) return h;
    h = rng_bytes(h, r->prompt_off, (r->n + 1) * (int64_t)sizeof(*r->prompt_off));
    h = rng_bytes(h, r->off, (r->n + 1) * (int64_t)sizeof(*r->off));
    h = rng_bytes(h, r->prompt_ids, r->n_prompt_tok * (int64_t)sizeof(*r->prompt_ids));
    h = rng_bytes(h, r->ids, r->n_tok * (int64_t)sizeof(*r->ids));
    h = rng_bytes(h, r->logprobs, r->n_tok * (int64_t)sizeof(*r->logprobs));
    h = rng_bytes(h, r->mask, r->n_tok);
    h = rng_bytes(h, r->reward, r->n * (int64_t)sizeof(*r->reward));
    h = rng_bytes(h, r->group, r->n * (int64_t)sizeof(*r->group));
    h = rng_bytes(h, r->truncated, r->n);
    for (int64_t i = 0; i < r->n; i++) {
        const int64_t n_prompt = r->prompt_off[i + 1] - r->prompt_off[i], n = r->off[i + 1] - r->off[i];
        if (r->routing[i])
            h = rng_bytes(h, r->routing[i], routing_count(r, n_prompt, n) * (int64_t)sizeof(**r->routing));
    }
    return h;
}

void rollouts_clear(struct rollouts *r)
{
    for (int64_t i = 0; i < r->n; i++) mem_free(r->routing[i]);
    r->n = r->n_prompt_tok = r->n_tok = r->n_logprobs = 0;
}

void rollouts_free(struct rollouts *r)
{
    rollouts_clear(r);
    for (int64_t k = 0; k < r->named.n; k++) mem_free(r->named.of[k]);
    mem_free(r->prompt_off);
    mem_free(r->off);
    mem_free(r->prompt_ids);
    mem_free(r->ids);
    mem_free(r->logprobs);
    mem_free(r->mask);
    mem_free(r->reward);
    mem_free(r->group);
    mem_free(r->truncated);
    mem_free(r->routing);
    *r = (struct rollouts){.n = 0};
}
