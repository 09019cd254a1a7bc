/* base_model.c - hashes of the weights by layer. */
#include "model/stored/base_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json/json.h"

enum { EMBEDDING, HEAD, REST, ENDS };
static const char *const ends[ENDS] = {"embedding", "head", "final norm"};

void base_hash_open(struct base_hash *h, int64_t n_layer)
{
    h->n_layer = n_layer;
    h->common = mem_array(2 * (n_layer + ENDS), sizeof(*h->common));
    h->own = h->common + n_layer + ENDS;
}

void base_hash_close(struct base_hash *h)
{
    mem_free(h->common);
    *h = (struct base_hash){0};
}

static hash_sum *part_of(struct base_hash *h, const char *name, bool own)
{
    static const char layers[] = "layers.";
    const char *at = strstr(name, layers);
    const int64_t layer = at ? strtoll(at + sizeof(layers) - 1, NULL, 10) : -1;
    const int64_t end = strstr(name, "embed_tokens") ? EMBEDDING : strstr(name, "lm_head") ? HEAD : REST;
    return (own ? h->own : h->common) + (layer >= 0 && layer < h->n_layer ? layer : h->n_layer + end);
}

uint64_t base_tensor_key(const struct st_tensor *t)
{
    uint64_t key = rng_key(rng_key(0, t->name), t->st_dtype);
    for (int i = 0; i < t->ndim; i++) key = rng_u64(key, (uint64_t)t->shape[i]);
    return key;
}

void base_hash_tensor(struct base_hash *h, const struct st_tensor *t, bool own)
{
    *part_of(h, t->name, own) += base_tensor_key(t);
}

void base_hash_bytes(struct base_hash *h, const struct st_tensor *t, hash_sum bytes, bool own)
{
    *part_of(h, t->name, own) += hash_sum_factor(base_tensor_key(t)) * bytes;
}

void base_hash_join(struct base_hash *h, struct comm *ep)
{
    const int64_t n = h->n_layer + ENDS;
    hash_sum *all = mem_array(ep->world * n, sizeof(*all));
    comm_host_gather(ep, all, h->own, n * (int64_t)sizeof(*all));
    for (int64_t i = 0; i < n; i++) h->own[i] = 0;
    for (int64_t i = 0; i < ep->world * n; i++) h->own[i % n] += all[i];
    mem_free(all);
}

char *base_hash_text(const struct base_hash *h)
{
    struct json_out o = {0};
    char name[32], hex[20];
    json_out_open(&o, NULL, '{');
    for (int64_t i = 0; i < h->n_layer + ENDS; i++) {
        const hash_sum sum = h->common[i] + h->own[i];
        if (!sum) continue; /* no head: it is the embedding */
        snprintf(name, sizeof(name), "layers.%" PRId64, i);
        snprintf(hex, sizeof(hex), "%016" PRIx64, hash_sum_fold(sum));
        json_out_str(&o, i < h->n_layer ? name : ends[i - h->n_layer], hex);
    }
    json_out_close(&o, '}');
    return json_out_take(&o);
}

void base_model_copy(struct base_model *to, const struct base_model *from)
{
    base_model_free(to);
    to->sample = from->sample;
    if (from->weights) to->weights = mem_strdup(from->weights);
    if (from->config) to->config = mem_strdup(from->config);
}

void base_model_free(struct base_model *m)
{
    mem_free(m->weights);
    mem_free(m->config);
    *m = (struct base_model){0};
}
