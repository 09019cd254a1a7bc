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

/* Pages of a sequence. A query at the end of a chunk sees its window, and the first one of the chunk another. */
static int64_t n_page(const struct cache *c, const struct cache_rows *r)
{
    const int64_t tokens = r->window ? MT_MIN(r->window + c->chunk - 1, c->max_len) : c->max_len;
    const int64_t rows = (tokens + r->ratio - 1) / r->ratio;
    return (rows + MT_PAGE - 1) / MT_PAGE;
}

/* [n_seq, n] i32 = 0, 1, ...: page i of sequence s is number s * n + i; n 1: its states are row s. */
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

/* Rows with equally many pages share a table. */
static struct tensor find_table(const struct cache *c, int64_t layer, int64_t n)
{
    for (int64_t l = 0; l <= layer; l++)
        for (int i = 0; i < CACHE_ROWS; i++) {
            const struct tensor table = c->layers[l].rows[i].table;
            if (table.ndim && table.shape[1] == n) return table;
        }
    return (struct tensor){0};
}

static void push_layer(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a, int64_t layer)
{
    const struct cache_need need = a->mixer[layer]->cache(a, layer);
    struct layer_cache *to = &c->layers[layer];
    to->slot = c->slot;
    for (int i = 0; i < CACHE_ROWS; i++) {
        if (!need.rows[i].cols) continue;
        const int64_t n = n_page(c, &need.rows[i]);
        struct tensor table = find_table(c, layer, n);
        if (!table.ndim) table = make_table(dev, arena, c->n_seq, n);
        to->rows[i] = (struct pages){
            .rows = arena_tensor_2d(arena, dev->act_dtype, c->n_seq * n * MT_PAGE, need.rows[i].cols), .table = table};
    }
    for (int i = 0; i < CACHE_STATES; i++) {
        const struct cache_state *s = &need.state[i];
        if (s->n) to->state[i] = arena_tensor_2d(arena, s->stat ? dev->stat_dtype : dev->act_dtype, c->n_seq, s->n);
    }
}

int cache_open(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a, int64_t n_seq,
               int64_t max_len, int64_t chunk, struct err *err)
{
    const int64_t mark = arena_mark(arena), most = (max_len + MT_PAGE - 1) / MT_PAGE;
    *c = (struct cache){.n_seq = n_seq, .max_len = max_len, .chunk = chunk};
    if (!cache_possible(a)) return err_set(err, "the mixers of %s cannot decode with a cache", a->family);
    if (most > INT32_MAX / n_seq)
        return err_set(err, "%lld sequences of %lld tokens have more than %d pages of %d tokens", (long long)n_seq,
                       (long long)max_len, INT32_MAX, MT_PAGE);
    c->layers = mem_array(a->n_layer, sizeof(*c->layers));
    c->len = mem_array(n_seq, sizeof(*c->len));
    const struct tensor slot = make_table(dev, arena, n_seq, 1);
    c->slot = tensor_1d(slot.data, DT_I32, n_seq);
    for (int64_t l = 0; l < a->n_layer; l++)
        if (a->mixer[l]) push_layer(c, dev, arena, a, l);
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
    bool decode = false;
    MT_REQUIRE(n_seq == c->n_seq, "%lld sequences, the cache has %lld", (long long)n_seq, (long long)c->n_seq);
    for (int64_t s = 0; s < n_seq; s++) decode = decode || c->len[s];
    for (int64_t s = 0; s < n_seq; s++) {
        const int32_t n = cu[s + 1] - cu[s], before = c->len[s];
        MT_REQUIRE(n >= 0 && before + n <= c->max_len && (!n || pos[cu[s]] == before) && (!decode || n <= c->chunk),
                   "%d tokens after %d of %lld, chunks of %lld", n, before, (long long)c->max_len, (long long)c->chunk);
        c->len[s] += n;
    }
    return decode;
}
