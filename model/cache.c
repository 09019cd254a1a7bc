/* cache.c - see cache.h. */
#include "model/cache.h"

#include <string.h>

#include "model/layer.h"

struct cache_class {
    int64_t window, ratio;
    int64_t n_of_seq;     /* pages of the longest sequence, or of a ring */
    int64_t n_page;       /* of all sequences */
    int32_t *page;        /* [n_seq, n_of_seq] the pages of each sequence; -1: none yet */
    int64_t *n_held;      /* [n_seq] */
    int32_t *free, *uses; /* [n_page] free pages, the next one last; number of sequences that have a page */
    int64_t n_free, n_promised;
    struct tensor table; /* [n_seq * n_of_seq] i32 */
    int32_t *host;       /* the table of the pass, on the host */
};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Pages that n tokens of a sequence need. A ring has all of its pages from the start. */
static int64_t pages_of(const struct cache_class *k, int64_t n)
{
    return k->window ? k->n_of_seq : ceil_div(ceil_div(n, k->ratio), MT_PAGE);
}

/* ---- opening ---- */

/* A ring has window + chunk - 1 tokens: the windows of the chunk's first and last queries begin chunk - 1 tokens
 * apart. */
static void size_class(struct cache_class *k, const struct cache_size *s)
{
    const int64_t tokens = k->window ? MT_MIN(k->window + s->chunk - 1, s->max_len) : s->max_len;
    k->n_of_seq = ceil_div(ceil_div(tokens, k->ratio), MT_PAGE);
    k->n_page = s->n_seq * k->n_of_seq;
    if (!k->window) k->n_page = MT_MIN(k->n_page, ceil_div(ceil_div(s->n_tok, k->ratio), MT_PAGE) + s->n_seq - 1);
}

static void fill_class(struct cache_class *k, int64_t n_seq)
{
    k->page = mem_array(n_seq * k->n_of_seq, sizeof(*k->page));
    k->host = mem_array(n_seq * k->n_of_seq, sizeof(*k->host));
    k->n_held = mem_array(n_seq, sizeof(*k->n_held));
    k->free = mem_array(k->n_page, sizeof(*k->free));
    k->uses = mem_array(k->n_page, sizeof(*k->uses));
    for (int64_t i = 0; i < k->n_page; i++) k->free[i] = (int32_t)(k->n_page - 1 - i);
    k->n_free = k->n_page;
}

/* The class of rows with this window and ratio; makes one if there is none. */
static struct cache_class *class_of(struct cache *c, struct device *dev, struct arena *arena,
                                    const struct cache_rows *r)
{
    for (int64_t i = 0; i < c->n_class; i++)
        if (c->classes[i].window == r->window && c->classes[i].ratio == r->ratio) return &c->classes[i];
    c->classes = mem_grow(c->classes, c->n_class, c->n_class + 1, sizeof(*c->classes));
    struct cache_class *k = &c->classes[c->n_class++];
    *k = (struct cache_class){.window = r->window, .ratio = r->ratio};
    size_class(k, &c->size);
    k->table = arena_tensor_1d(arena, DT_I32, c->size.n_seq * k->n_of_seq);
    if (!dev->dry_run) fill_class(k, c->size.n_seq);
    return k;
}

static void push_layer(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a, int64_t layer)
{
    const struct cache_need need = a->mixer[layer]->cache(a, layer);
    struct layer_cache *to = &c->layers[layer];
    to->slot = c->slot;
    for (int i = 0; i < CACHE_ROWS; i++) {
        if (!need.rows[i].cols) continue;
        const struct cache_class *k = class_of(c, dev, arena, &need.rows[i]);
        to->rows[i] =
            (struct pages){.rows = arena_tensor_2d(arena, dev->act_dtype, k->n_page * MT_PAGE, need.rows[i].cols),
                           .table = tensor_2d(k->table.data, DT_I32, c->size.n_seq, k->n_of_seq)};
    }
    for (int i = 0; i < CACHE_STATES; i++) {
        const struct cache_state *s = &need.state[i];
        if (s->n)
            to->state[i] = arena_tensor_2d(arena, s->stat ? dev->stat_dtype : dev->act_dtype, c->size.n_seq, s->n);
    }
}

int cache_open(struct cache *c, struct device *dev, struct arena *arena, const struct arch *a,
               const struct cache_size *size, struct err *err)
{
    const int64_t mark = arena_mark(arena), most = ceil_div(size->max_len, MT_PAGE), n_seq = size->n_seq;
    *c = (struct cache){.size = *size, .n_layer = a->n_layer};
    if (most > INT32_MAX / n_seq)
        return err_set(err, "%lld sequences of %lld tokens have more than %d pages of %d tokens", (long long)n_seq,
                       (long long)size->max_len, INT32_MAX, MT_PAGE);
    c->layers = mem_array(a->n_layer, sizeof(*c->layers));
    c->seqs = mem_array(n_seq, sizeof(*c->seqs));
    c->slot = arena_tensor_1d(arena, DT_I32, n_seq);
    for (int64_t l = 0; l < a->n_layer; l++)
        if (a->mixer[l]) push_layer(c, dev, arena, a, l);
    c->bytes = arena_mark(arena) - mark;
    return 0;
}

void cache_close(struct cache *c)
{
    for (int64_t i = 0; i < c->n_class; i++) {
        struct cache_class *k = &c->classes[i];
        mem_free(k->page);
        mem_free(k->host);
        mem_free(k->n_held);
        mem_free(k->free);
        mem_free(k->uses);
    }
    mem_free(c->classes);
    mem_free(c->layers);
    mem_free(c->seqs);
    *c = (struct cache){.n_class = 0};
}

/* ---- sequences ---- */

static int64_t n_spare(const struct cache_class *k) { return k->n_free - k->n_promised; }

static int free_seq(const struct cache *c)
{
    for (int64_t s = 0; s < c->size.n_seq; s++)
        if (!c->seqs[s].used) return (int)s;
    return -1;
}

/* Pages of a sequence of len tokens whose rows are all final. */
static int64_t n_full(const struct cache_class *k, int64_t len) { return k->window ? 0 : len / k->ratio / MT_PAGE; }

/* Whether there is room for a sequence of n_tok tokens that shares the full pages of one of len tokens. */
static bool fits(const struct cache *c, int64_t len, int64_t n_tok)
{
    for (int64_t i = 0; i < c->n_class; i++)
        if (pages_of(&c->classes[i], n_tok) - n_full(&c->classes[i], len) > n_spare(&c->classes[i])) return false;
    return true;
}

bool cache_fork_fits(const struct cache *c, int64_t len, int64_t n_tok)
{
    return free_seq(c) >= 0 && fits(c, len, n_tok);
}

static void check_size(const struct cache *c, int64_t n_tok)
{
    MT_REQUIRE(n_tok >= 0 && n_tok <= c->size.max_len, "a sequence of %lld tokens in a cache for %lld",
               (long long)n_tok, (long long)c->size.max_len);
}

int cache_take(struct cache *c, int64_t n_tok)
{
    const int seq = free_seq(c);
    check_size(c, n_tok);
    if (seq < 0 || !fits(c, 0, n_tok)) return -1;
    for (int64_t i = 0; i < c->n_class; i++) c->classes[i].n_promised += pages_of(&c->classes[i], n_tok);
    c->seqs[seq] = (struct cache_seq){.used = true, .promised = n_tok};
    return seq;
}

/* Gives the sequence the pages, already reserved, that n_tok tokens need. */
static void hold(struct cache_class *k, int64_t seq, int64_t n_tok)
{
    const int64_t n = pages_of(k, n_tok);
    while (k->n_held[seq] < n) {
        const int32_t page = k->free[--k->n_free];
        k->n_promised--;
        k->uses[page] = 1;
        k->page[seq * k->n_of_seq + k->n_held[seq]++] = page;
    }
}

static void copy_rows(struct device *dev, struct tensor x, int64_t to, int64_t from, int64_t n)
{
    const int64_t bytes = x.ld * dtype_size(x.dtype);
    dev->ops->copy((char *)x.data + to * bytes, (const char *)x.data + from * bytes, n * bytes);
}

/* Copies the unshared pages of the first len tokens of `from`, in all layers of the class. */
static void copy_pages(struct cache *c, struct device *dev, int64_t at, int64_t to, int64_t from, int64_t len)
{
    struct cache_class *k = &c->classes[at];
    const int64_t shared = n_full(k, len), held = MT_MIN(k->n_held[from], pages_of(k, len));
    const int32_t *source = k->page + from * k->n_of_seq;
    int32_t *page = k->page + to * k->n_of_seq;
    for (int64_t i = 0; i < shared; i++) {
        page[i] = source[i];
        k->uses[page[i]]++;
    }
    k->n_held[to] = shared;
    while (k->n_held[to] < held) {
        const int64_t i = k->n_held[to]++;
        page[i] = k->free[--k->n_free];
        k->n_promised--;
        k->uses[page[i]] = 1;
        for (int64_t l = 0; l < c->n_layer; l++)
            for (int r = 0; r < CACHE_ROWS; r++)
                if (c->layers[l].rows[r].table.ndim && c->layers[l].rows[r].table.data == k->table.data)
                    copy_rows(dev, c->layers[l].rows[r].rows, (int64_t)page[i] * MT_PAGE, (int64_t)source[i] * MT_PAGE,
                              MT_PAGE);
    }
}

static bool has_states(const struct cache *c)
{
    for (int64_t l = 0; l < c->n_layer; l++)
        for (int i = 0; i < CACHE_STATES; i++)
            if (c->layers[l].state[i].ndim) return true;
    return false;
}

/* The next token sees window - 1 tokens before it. */
bool cache_has(const struct cache *c, int seq, int64_t len)
{
    const int64_t all = c->seqs[seq].len;
    if (len >= all) return len == all;
    for (int64_t i = 0; i < c->n_class; i++) {
        const struct cache_class *k = &c->classes[i];
        if (k->window && MT_MAX(0, len - k->window + 1) < all - k->n_of_seq * MT_PAGE) return false;
    }
    return !has_states(c);
}

static void want_tokens(const struct cache *c, int seq, int64_t len)
{
    MT_REQUIRE(cache_has(c, seq, len), "%lld tokens of a sequence of %lld", (long long)len,
               (long long)c->seqs[seq].len);
}

int cache_fork(struct cache *c, struct device *dev, int seq, int64_t len, int64_t n_tok)
{
    const int to = free_seq(c);
    check_size(c, n_tok);
    want_tokens(c, seq, len);
    if (to < 0 || !fits(c, len, n_tok)) return -1;
    for (int64_t i = 0; i < c->n_class; i++) {
        c->classes[i].n_promised += pages_of(&c->classes[i], n_tok) - n_full(&c->classes[i], len);
        copy_pages(c, dev, i, to, seq, len);
    }
    for (int64_t l = 0; l < c->n_layer; l++)
        for (int i = 0; i < CACHE_STATES; i++)
            if (c->layers[l].state[i].ndim) copy_rows(dev, c->layers[l].state[i], to, seq, 1);
    c->seqs[to] = (struct cache_seq){.used = true, .len = len, .promised = n_tok};
    return to;
}

bool cache_extend(struct cache *c, int seq, int64_t n_tok)
{
    const int64_t before = c->seqs[seq].promised;
    check_size(c, n_tok);
    for (int64_t i = 0; i < c->n_class; i++)
        if (pages_of(&c->classes[i], n_tok) - pages_of(&c->classes[i], before) > n_spare(&c->classes[i])) return false;
    for (int64_t i = 0; i < c->n_class; i++)
        c->classes[i].n_promised += pages_of(&c->classes[i], n_tok) - pages_of(&c->classes[i], before);
    c->seqs[seq].promised = n_tok;
    return true;
}

/* Frees all but the first n pages of the sequence. */
static void let_go(struct cache_class *k, int64_t seq, int64_t n)
{
    while (k->n_held[seq] > n) {
        const int32_t page = k->page[seq * k->n_of_seq + --k->n_held[seq]];
        if (!--k->uses[page]) k->free[k->n_free++] = page;
    }
}

bool cache_cut(struct cache *c, int seq, int64_t len)
{
    want_tokens(c, seq, len);
    for (int64_t i = 0; i < c->n_class; i++) {
        const struct cache_class *k = &c->classes[i];
        const int64_t last = pages_of(k, len) - 1;
        if (last >= n_full(k, len) && k->uses[k->page[seq * k->n_of_seq + last]] > 1) return false;
    }
    for (int64_t i = 0; i < c->n_class; i++) {
        struct cache_class *k = &c->classes[i];
        k->n_promised -= pages_of(k, c->seqs[seq].promised) - k->n_held[seq];
        let_go(k, seq, pages_of(k, len));
    }
    c->seqs[seq].len = c->seqs[seq].promised = len;
    return true;
}

void cache_drop(struct cache *c, int seq)
{
    for (int64_t i = 0; i < c->n_class; i++) {
        struct cache_class *k = &c->classes[i];
        k->n_promised -= pages_of(k, c->seqs[seq].promised) - k->n_held[seq];
        let_go(k, seq, 0);
    }
    c->seqs[seq] = (struct cache_seq){.used = false};
}

int64_t cache_len(const struct cache *c, int seq) { return c->seqs[seq].len; }

double cache_used(const struct cache *c)
{
    double most = 0;
    for (int64_t i = 0; i < c->n_class; i++) {
        const struct cache_class *k = &c->classes[i];
        most = MT_MAX(most, (double)(k->n_page - k->n_free) / (double)k->n_page);
    }
    return most;
}

/* ---- passes ---- */

/* The page table of the pass, a row per sequence, as wide as the longest sequence needs; with rings the width is
 * fixed. */
static struct tensor push_table(struct cache_class *k, struct device *dev, int64_t n_seq, const int32_t *seq)
{
    int64_t width = k->window ? k->n_of_seq : 1;
    for (int64_t s = 0; s < n_seq; s++) width = MT_MAX(width, k->n_held[seq[s]]);
    for (int64_t s = 0; s < n_seq; s++)
        for (int64_t i = 0; i < width; i++)
            k->host[s * width + i] = i < k->n_held[seq[s]] ? k->page[seq[s] * k->n_of_seq + i] : -1;
    const struct tensor table = tensor_2d(k->table.data, DT_I32, n_seq, width);
    device_upload(dev, table.data, k->host, tensor_bytes(table));
    return table;
}

void cache_begin(struct cache *c, struct device *dev, int64_t n_seq, const int32_t *seq, const int32_t *cu,
                 const int32_t *pos, bool decode)
{
    MT_REQUIRE(n_seq <= c->size.n_seq, "%lld sequences, the cache has %lld", (long long)n_seq,
               (long long)c->size.n_seq);
    if (dev->dry_run) return;
    for (int64_t s = 0; s < n_seq; s++) {
        struct cache_seq *q = &c->seqs[seq[s]];
        const int64_t n = cu[s + 1] - cu[s];
        MT_REQUIRE(q->used && n >= 0 && q->len + n <= q->promised && (!n || pos[cu[s]] == q->len) &&
                       (decode ? n <= c->size.chunk : !q->len),
                   "%lld tokens after %lld of %lld, chunks of %lld", (long long)n, (long long)q->len,
                   (long long)q->promised, (long long)c->size.chunk);
        q->len += n;
        for (int64_t i = 0; i < c->n_class; i++) hold(&c->classes[i], seq[s], q->len);
    }
    device_upload(dev, c->slot.data, seq, n_seq * (int64_t)sizeof(*seq));
    for (int64_t i = 0; i < c->n_class; i++) {
        const struct tensor table = push_table(&c->classes[i], dev, n_seq, seq);
        for (int64_t l = 0; l < c->n_layer; l++)
            for (int r = 0; r < CACHE_ROWS; r++)
                if (c->layers[l].rows[r].table.data == table.data) c->layers[l].rows[r].table = table;
    }
    for (int64_t l = 0; l < c->n_layer; l++) c->layers[l].slot = tensor_1d(c->slot.data, DT_I32, n_seq);
}
