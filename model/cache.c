/* cache.c - see cache.h. */
#include "model/cache.h"

#include <string.h>

#include "model/layer.h"

bool cache_possible(const struct arch *a)
{
    for (int64_t l = 0; l < a->n_layer; l++)
        if (a->mixer[l] && !a->mixer[l]->decode) return false;
    return true;
}

/* Pages of a sequence. */
static int64_t n_page(const struct cache *c, const struct cache_need *need)
{
    const int64_t tokens = need->window ? MT_MIN(need->window, c->max_len) : c->max_len;
    return (tokens + MT_PAGE - 1) / MT_PAGE;
}

/* Page i of sequence s is number s * n + i. */
static struct tensor make_table(struct device *dev, struct arena *arena, int64_t n_seq, int64_t n)
{
    const struct tensor table = arena_tensor_2d(arena, DT_I32, n_seq, n);
    if (dev->dry_run) return table;
    int32_t *host = mem_array(n_seq * n, sizeof(*host));
    for (int64_t i = 0; i < n_seq * n; i++) host[i] = (int32_t)i;
    device_upload(dev, table.data, host, tensor_bytes(table));
    mem_free(host);
    return table;
}

/* Layers with equally many pages share a table. */
static struct tensor find_table(const struct cache *c, int64_t layer, int64_t n)
{
    for (int64_t l = 0; l < layer; l++)
        if (c->layers[l].table.ndim && c->layers[l].table.shape[1] == n) return c->layers[l].table;
    return (struct tensor){0};
}

int cache_open(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a, int64_t n_seq,
               int64_t max_len, struct err *err)
{
    const int64_t mark = arena_mark(arena), most = (max_len + MT_PAGE - 1) / MT_PAGE;
    *c = (struct cache){.n_seq = n_seq, .max_len = max_len};
    if (!cache_possible(a)) return err_set(err, "the mixers of %s cannot decode with a cache", a->family);
    if (most > INT32_MAX / n_seq)
        return err_set(err, "%lld sequences of %lld tokens have more than %d pages of %d tokens", (long long)n_seq,
                       (long long)max_len, INT32_MAX, MT_PAGE);
    c->layers = mem_array(a->n_layer, sizeof(*c->layers));
    c->len = mem_array(n_seq, sizeof(*c->len));
    for (int64_t l = 0; l < a->n_layer; l++) {
        if (!a->mixer[l]) continue;
        const struct cache_need need = a->mixer[l]->cache(a, l);
        const int64_t n = n_page(c, &need);
        struct pages *p = &c->layers[l];
        p->table = find_table(c, l, n);
        if (!p->table.ndim) p->table = make_table(dev, arena, n_seq, n);
        p->rows = arena_tensor_2d(arena, dev->act_dtype, n_seq * n * MT_PAGE, need.cols);
    }
    c->bytes = arena_mark(arena) - mark;
    return 0;
}

void cache_close(struct cache *c)
{
    mem_free(c->layers);
    mem_free(c->len);
    *c = (struct cache){0};
}

void cache_clear(struct cache *c) { memset(c->len, 0, (size_t)c->n_seq * sizeof(*c->len)); }

bool cache_begin(struct cache *c, int64_t n_seq, const int32_t *cu, const int32_t *pos)
{
    const bool decode = c->len[0] > 0;
    MT_REQUIRE(n_seq == c->n_seq, "%lld sequences, the cache has %lld", (long long)n_seq, (long long)c->n_seq);
    for (int64_t s = 0; s < n_seq; s++) {
        const int32_t n = cu[s + 1] - cu[s], before = c->len[s];
        MT_REQUIRE(n > 0 && before + n <= c->max_len && pos[cu[s]] == before && (decode ? n == 1 : !before),
                   "%d tokens at %d after %d of %lld", n, pos[cu[s]], before, (long long)c->max_len);
        c->len[s] += n;
    }
    return decode;
}
