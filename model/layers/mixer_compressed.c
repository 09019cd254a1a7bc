/* mixer_compressed.c - compressed attention (DeepSeek-V4): all heads share one key, which is the value too. A query
 * sees a window of keys and, in most layers, entries, each of which sums up `ratio` tokens. Kinds of layers
 * (arch.compress): the window alone; few large entries (heavy); many small ones, of which an indexer chooses
 * (sparse).
 *
 *   attn_norm [T,D] -> q_a | kv (+lora) [T, Lq+A] -> norm of q_a -> q_b (+lora) [T,HA] -> norm of each head, rope
 *                                                 -> norm of kv, rope [T,A]
 *   attn_norm -> values, gates of the entries [T,2W] -> entries [N,A] -> norm, rope     N = T / ratio
 *   sparse:      values, gates [T,4I], queries [T,JI] and weights [T,J] of the indexer -> entries of a token [T,K]
 *   -> attention [T,HA] -> rope by the negative angle -> group product [T,GO] -> o_b (+lora) -> + x = h
 *
 * Lq, O: widths of the projections; G groups of heads; W: value columns of an entry; J, I: heads of the indexer, their
 * width; K: entries that a token sees.
 *
 * The indexer only chooses, so it has no gradient. It runs only where a sequence has more entries than a token may
 * see. */
#include <stddef.h>

#include "model/layers/linear.h"
#include "model/layer.h"

static const struct tensor absent = {0};

/* All layers have equal sizes. */
static int64_t n_head(const struct arch *a) { return a->attn[0].n_head; }
static int64_t head_dim(const struct arch *a) { return a->attn[0].head_dim; }

static enum compress_kind kind_of(const struct block *b) { return b->a->compress.kind[b->layer]; }

static struct shared_attn_shape attention_of(const struct block *b)
{
    const struct attn_arch *h = arch_attn(b->a, b->layer);
    return (struct shared_attn_shape){.n_head = h->n_head,
                                      .head_dim = h->head_dim,
                                      .window = h->window,
                                      .ratio = b->a->compress.ratio[kind_of(b)],
                                      .scale = h->scale};
}

/* The shape of entries with `width` columns: those of attention, or of the indexer. */
static struct compress_shape entries_of(const struct arch *a, enum compress_kind kind, int64_t width)
{
    return (struct compress_shape){
        .ratio = a->compress.ratio[kind], .width = width, .overlap = kind == COMPRESS_SPARSE};
}

static int64_t n_entry(const struct arch *a, enum compress_kind kind, int64_t n_tok)
{
    return MT_MAX(1, n_tok / a->compress.ratio[kind]);
}

/* Columns of values and gates, and of their position bias. */
static int64_t bias_cols(enum compress_kind kind, int64_t width) { return kind == COMPRESS_SPARSE ? 2 * width : width; }
static int64_t pair_cols(enum compress_kind kind, int64_t width) { return 2 * bias_cols(kind, width); }
static int64_t first_cols(const struct arch *a) { return a->compress.q_lora + head_dim(a); }
static int64_t query_cols(const struct arch *a) { return n_head(a) * head_dim(a); }
static int64_t group_cols(const struct arch *a) { return a->compress.n_group * a->compress.o_lora; }
static int64_t index_cols(const struct arch *a) { return a->compress.n_index * a->compress.index_dim; }

/* Whether a sequence of this many tokens has more entries than a token may see. */
static bool is_chosen(const struct arch *a, int64_t layer, int64_t n_tok)
{
    const struct compress_arch *c = &a->compress;
    return c->kind[layer] == COMPRESS_SPARSE && n_tok / c->ratio[COMPRESS_SPARSE] > c->index_top;
}

static struct tail_rope rope_heads(const struct arch *a, int64_t n, int64_t width, bool inverse)
{
    return (struct tail_rope){.n_head = n, .head_dim = width, .eps = a->norm.eps, .inverse = inverse};
}

static struct product product_of(size_t proj, enum lora_target t, int64_t n_out, int64_t n_in)
{
    return (struct product){
        .proj = proj, .n_exp = 1, .n_out = n_out, .n_in = n_in, .n_target = 1, .target = {t}, .rows = {n_out}};
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    (void)layer;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, compressed.a),
                            .n_exp = 1,
                            .n_out = first_cols(a),
                            .n_in = a->d_model,
                            .n_target = 2,
                            .target = {LORA_Q_A, LORA_KV},
                            .rows = {a->compress.q_lora, head_dim(a)}};
    p[1] = product_of(offsetof(struct layer_weights, compressed.out), LORA_O_B, a->d_model, group_cols(a));
    p[2] = product_of(offsetof(struct layer_weights, compressed.q_b), LORA_Q_B, query_cols(a), a->compress.q_lora);
}

#define COMPRESSOR "self_attn.compressor."
#define INDEXER    "self_attn.compressor.indexer."
static const char *const own_part[] = {COMPRESSOR "kv_proj", COMPRESSOR "gate_proj", COMPRESSOR "position_bias",
                                       COMPRESSOR "kv_norm"};
static const char *const index_part[] = {INDEXER "kv_proj", INDEXER "gate_proj", INDEXER "position_bias",
                                         INDEXER "kv_norm"};
static const char index_query[] = INDEXER "q_b_proj", index_scale[] = INDEXER "scorer.weights_proj";
static const char kind_keys[] = "layer_types or compress_ratios"; /* of config.json */

/* Loads the matrices, the position bias and the norm of a compressor; part names its tensors. */
static int load_entries(struct weights_read *f, const struct arch *a, enum compress_kind kind, int64_t width,
                        struct entry_weights *e, const char *const part[4])
{
    const int64_t n = bias_cols(kind, width);
    const struct stored_rows pair = {
        .part = {part[0], part[1]}, .rows = {n, n}, .n_in = a->d_model, .n_part = 2, .plain = true};
    return weights_rows(f, &e->pair, &pair, false) || weights_table(f, &e->bias, part[2], a->compress.ratio[kind], n) ||
                   weights_vector(f, &e->norm, part[3], ".weight", width)
               ? -1
               : 0;
}

/* An error if the checkpoint has a tensor of a compressor that the layer does not have. */
static int refuse_entries(struct weights_read *f, const char *const part[4], const char *what)
{
    static const char *const suffix[] = {".weight", ".weight", "", ".weight"};
    for (int i = 0; i < 4; i++)
        if (weights_refuse(f, part[i], suffix[i], what, kind_keys)) return -1;
    return 0;
}

static int refuse_indexer(struct weights_read *f)
{
    return refuse_entries(f, index_part, "indexer") ||
                   weights_refuse(f, index_query, ".weight", "indexer", kind_keys) ||
                   weights_refuse(f, index_scale, ".weight", "indexer", kind_keys)
               ? -1
               : 0;
}

static int load_compressor(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct compress_arch *c = &a->compress;
    const enum compress_kind kind = c->kind[layer];
    const struct stored_rows q = {
        .part = {index_query}, .rows = {index_cols(a)}, .n_in = c->q_lora, .n_part = 1, .plain = true};
    const struct stored_rows scale = {
        .part = {index_scale}, .rows = {c->n_index}, .n_in = a->d_model, .n_part = 1, .plain = true};
    if (kind == COMPRESS_NONE && refuse_entries(f, own_part, "compressor")) return -1;
    if (kind != COMPRESS_SPARSE && refuse_indexer(f)) return -1;
    if (kind == COMPRESS_NONE) return 0;
    if (load_entries(f, a, kind, head_dim(a), &lw->compressed.entry, own_part)) return -1;
    if (kind != COMPRESS_SPARSE) return 0;
    return load_entries(f, a, kind, c->index_dim, &lw->compressed.index, index_part) ||
                   weights_rows(f, &lw->compressed.index_q, &q, false) ||
                   weights_rows(f, &lw->compressed.index_scale, &scale, false)
               ? -1
               : 0;
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct compress_arch *c = &a->compress;
    const struct stored_rows first = {.part = {"self_attn.q_a_proj", "self_attn.kv_proj"},
                                      .rows = {c->q_lora, head_dim(a)},
                                      .n_in = a->d_model,
                                      .n_part = 2};
    const struct stored_rows q_b = {
        .part = {"self_attn.q_b_proj"}, .rows = {query_cols(a)}, .n_in = c->q_lora, .n_part = 1};
    const struct stored_rows out = {
        .part = {"self_attn.o_b_proj"}, .rows = {a->d_model}, .n_in = group_cols(a), .n_part = 1};
    struct weight *group = &lw->compressed.group;
    if (weights_rows(f, &lw->compressed.a, &first, false) ||
        weights_vector(f, &lw->compressed.q_norm, "self_attn.q_a_norm", ".weight", c->q_lora) ||
        weights_rows(f, &lw->compressed.q_b, &q_b, false) ||
        weights_vector(f, &lw->compressed.kv_norm, "self_attn.kv_norm", ".weight", head_dim(a)) ||
        weights_vector(f, &lw->compressed.sinks, "self_attn.sinks", "", n_head(a)) ||
        load_compressor(f, a, layer, lw) ||
        weights_matrix(f, group, "self_attn.o_a_proj", group_cols(a), query_cols(a) / c->n_group) ||
        weights_rows(f, &lw->compressed.out, &out, false))
        return -1;
    group->n_exp = c->n_group; /* the rows of the groups follow each other: a stack */
    group->n_out = c->o_lora;
    return 0;
}

static struct tensor stat_2d(const struct acts_plan *p, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&p->dev->work, p->dev->stat_dtype, rows, cols);
}

static struct tensor stat_1d(const struct acts_plan *p, int64_t n)
{
    return arena_tensor_1d(&p->dev->work, p->dev->stat_dtype, n);
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct compressed_acts *t = &s->compressed;
    const struct arch *a = p->a;
    const enum compress_kind kind = a->compress.kind[p->layer];
    const int64_t n_tok = p->n_tok;
    if (group == ACTS_CORE) {
        if (is_chosen(a, p->layer, n_tok))
            t->idx = arena_tensor_2d(&p->dev->work, DT_I32, n_tok, a->compress.index_top);
        t->o = acts_2d(p, n_tok, query_cols(a));
        t->lse = stat_2d(p, n_tok, n_head(a));
    }
    if (group != ACTS_MIXER) return;
    t->a = acts_2d(p, n_tok, first_cols(a));
    t->a_xa = acts_xa(p, n_tok, &p->w.compressed.a.lora);
    t->q_norm = acts_2d(p, n_tok, a->compress.q_lora);
    t->q_rstd = stat_1d(p, n_tok);
    t->q_xa = acts_xa(p, n_tok, &p->w.compressed.q_b.lora);
    t->q_in = acts_2d(p, n_tok, query_cols(a));
    t->head_rstd = stat_2d(p, n_tok, n_head(a));
    t->q = acts_2d(p, n_tok, query_cols(a));
    t->kv = acts_2d(p, n_tok, head_dim(a));
    t->kv_rstd = stat_1d(p, n_tok);
    if (kind != COMPRESS_NONE) {
        const int64_t n = n_entry(a, kind, n_tok);
        t->pair = acts_2d(p, n_tok, pair_cols(kind, head_dim(a)));
        t->entry_in = acts_2d(p, n, head_dim(a));
        t->entry_rstd = stat_1d(p, n);
        t->entry = acts_2d(p, n, head_dim(a));
        t->entry_pos = arena_tensor_1d(&p->dev->work, DT_I32, n);
    }
    t->group = acts_2d(p, n_tok, group_cols(a));
    t->out_xa = acts_xa(p, n_tok, &p->w.compressed.out.lora);
}

/* Computes entries of attention or of the indexer: in [N,W] before their norm, y after norm and rope. */
static void entries_fwd(const struct block *b, struct tensor pair, struct tensor in, struct tensor rstd,
                        struct tensor y, struct tensor pos, struct tensor x, const struct entry_weights *e)
{
    struct device *dev = b->dev;
    const int64_t width = y.shape[1];
    const struct compress_shape shape = entries_of(b->a, kind_of(b), width);
    const struct tail_rope rope = rope_heads(b->a, 1, width, false);
    op_linear_fwd(dev, pair, absent, x, &e->pair, absent);
    op_compress_fwd(dev, in, pos, pair, e->bias, b->seqs, &shape);
    op_rmsnorm_fwd(dev, y, rstd, in, e->norm, &b->a->norm);
    op_tail_rope_fwd(dev, y, absent, y, pos, b->rope, &rope);
}

/* Computes queries and weights of the indexer; the scale of scores is left out, since it does not change their
 * order. */
static void index_queries(const struct block *b, struct tensor q, struct tensor scale, struct tensor x,
                          struct tensor q_norm)
{
    const struct compress_arch *c = &b->a->compress;
    const struct tail_rope rope = rope_heads(b->a, c->n_index, c->index_dim, false);
    op_linear_fwd(b->dev, q, absent, q_norm, &b->w->compressed.index_q, absent);
    op_tail_rope_fwd(b->dev, q, absent, q, b->pos, b->rope, &rope);
    op_linear_fwd(b->dev, scale, absent, x, &b->w->compressed.index_scale, absent);
}

static void choose_entries(const struct block *b, struct tensor idx, struct tensor x, struct tensor q_norm)
{
    struct device *dev = b->dev;
    struct arena *work = &dev->work;
    const struct arch *a = b->a;
    const struct compress_arch *c = &a->compress;
    const enum dtype act = dev->act_dtype;
    const int64_t n_tok = x.shape[0], mark = arena_mark(work), n = n_entry(a, COMPRESS_SPARSE, n_tok);
    struct tensor pair = arena_tensor_2d(work, act, n_tok, pair_cols(COMPRESS_SPARSE, c->index_dim));
    struct tensor in = arena_tensor_2d(work, act, n, c->index_dim), key = arena_tensor_2d(work, act, n, c->index_dim);
    struct tensor rstd = arena_tensor_1d(work, dev->stat_dtype, n), pos = arena_tensor_1d(work, DT_I32, n);
    struct tensor q = arena_tensor_2d(work, act, n_tok, index_cols(a));
    struct tensor scale = arena_tensor_2d(work, act, n_tok, c->n_index);
    entries_fwd(b, pair, in, rstd, key, pos, x, &b->w->compressed.index);
    index_queries(b, q, scale, x, q_norm);
    op_index_topk(dev, idx, q, key, scale, b->seqs, c->ratio[COMPRESS_SPARSE]);
    arena_release(work, mark);
}

/* The chosen entries, or absent where every sequence is short enough to see all of its entries. */
static struct tensor chosen(const struct block *b, const struct compressed_acts *t)
{
    return is_chosen(b->a, b->layer, b->seqs->max_len) ? t->idx : absent;
}

static void core(const struct block *b, struct layer_acts *s)
{
    const struct shared_attn_shape attention = attention_of(b);
    struct compressed_acts *t = &s->compressed;
    const struct tensor idx = chosen(b, t);
    /* 5 choice  */ if (idx.ndim)
        choose_entries(b, idx, s->attn_norm, t->q_norm);
    /* 6 attn    */ op_shared_attn_fwd(b->dev, t->o, t->lse, t->q, t->kv, t->entry, idx, b->w->compressed.sinks,
                                       b->seqs, &attention);
}

/* attn_norm -> queries, keys after their norms and rope */
static void project(const struct block *b, struct layer_acts *s)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct tail_rope heads = rope_heads(a, n_head(a), head_dim(a), false),
                           key = rope_heads(a, 1, head_dim(a), false);
    struct compressed_acts *t = &s->compressed;
    const struct tensor q_a = tensor_cols(t->a, 0, a->compress.q_lora);
    const struct tensor kv = tensor_cols(t->a, a->compress.q_lora, head_dim(a));

    /* 1 a       */ linear_fwd(dev, t->a, t->a_xa, s->attn_norm, &w->compressed.a, absent);
    /* 2 q       */ op_rmsnorm_fwd(dev, t->q_norm, t->q_rstd, q_a, w->compressed.q_norm, &a->norm);
    linear_fwd(dev, t->q_in, t->q_xa, t->q_norm, &w->compressed.q_b, absent);
    op_tail_rope_fwd(dev, t->q, t->head_rstd, t->q_in, b->pos, b->rope, &heads);
    /* 3 kv      */ op_rmsnorm_fwd(dev, t->kv, t->kv_rstd, kv, w->compressed.kv_norm, &a->norm);
    op_tail_rope_fwd(dev, t->kv, absent, t->kv, b->pos, b->rope, &key);
}

/* o -> y */
static void output(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const struct arch *a = b->a;
    const struct tail_rope back = rope_heads(a, n_head(a), head_dim(a), true);
    struct compressed_acts *t = &s->compressed;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor o = arena_tensor_2d(&dev->work, dev->act_dtype, s->attn_norm.shape[0], query_cols(a));
    /* 7 rope    */ op_tail_rope_fwd(dev, o, absent, t->o, b->pos, b->rope, &back);
    /* 8 group   */ op_group_linear_fwd(dev, t->group, o, &b->w->compressed.group);
    /* 9 out     */ linear_fwd(dev, y, t->out_xa, t->group, &b->w->compressed.out, s->mixer_res);
    arena_release(&dev->work, mark);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct compressed_acts *t = &s->compressed;
    project(b, s);
    /* 4 entries */ if (t->entry.ndim)
        entries_fwd(b, t->pair, t->entry_in, t->entry_rstd, t->entry, t->entry_pos, s->attn_norm,
                    &b->w->compressed.entry);
    /* 5, 6      */ if (!b->core_saved)
        core(b, s);
    output(b, s, y);
}

/* The rows of the cache: keys of the window; values and gates of tokens for entries that are not complete, of
 * attention, then of the indexer; entries of attention; entries of the indexer. */
enum { KEYS, PAIRS, ENTRIES, INDEX };

static struct cache_need cache(const struct arch *a, int64_t layer)
{
    const enum compress_kind kind = a->compress.kind[layer];
    const bool sparse = kind == COMPRESS_SPARSE;
    const int64_t ratio = a->compress.ratio[kind], index = a->compress.index_dim;
    struct cache_need need = {
        .rows = {[KEYS] = {.cols = head_dim(a), .window = arch_attn(a, layer)->window, .ratio = 1}}};
    if (kind == COMPRESS_NONE) return need;
    need.rows[PAIRS] = (struct cache_rows){.cols = pair_cols(kind, head_dim(a)) + (sparse ? pair_cols(kind, index) : 0),
                                           .window = sparse ? 2 * ratio : ratio,
                                           .ratio = 1};
    need.rows[ENTRIES] = (struct cache_rows){.cols = head_dim(a), .ratio = ratio};
    if (sparse) need.rows[INDEX] = (struct cache_rows){.cols = index, .ratio = ratio};
    return need;
}

static struct past past_of(const struct block *b, const struct pages *pages)
{
    return (struct past){.pages = pages, .pos = b->pos, .seqs = b->seqs};
}

/* Stores the entries that the tokens of `pair` complete, then these tokens' values and gates in `ring`, some columns of
 * the rows PAIRS. */
static void store_entries(const struct block *b, struct tensor pair, struct pages ring, const struct pages *entries,
                          const struct entry_weights *e)
{
    struct device *dev = b->dev;
    struct arena *work = &dev->work;
    const int64_t width = entries->rows.shape[1], mark = arena_mark(work);
    const struct compress_shape shape = entries_of(b->a, kind_of(b), width);
    const struct tail_rope rope = rope_heads(b->a, 1, width, false);
    const struct past tokens = past_of(b, &ring), to = past_of(b, entries);
    const int64_t n = pair.shape[0] / shape.ratio + b->seqs->n_seq;
    struct tensor in = arena_tensor_2d(work, dev->act_dtype, n, width);
    struct tensor y = arena_tensor_2d(work, dev->act_dtype, n, width);
    struct tensor rstd = arena_tensor_1d(work, dev->stat_dtype, n), pos = arena_tensor_1d(work, DT_I32, n);
    op_compress_decode(dev, in, pos, pair, e->bias, &tokens, &shape);
    op_rmsnorm_fwd(dev, y, rstd, in, e->norm, &b->a->norm);
    op_tail_rope_fwd(dev, y, absent, y, pos, b->rope, &rope);
    op_entry_store(dev, y, &to, shape.ratio);
    op_page_store(dev, &ring, pair, b->pos, b->seqs);
    arena_release(work, mark);
}

/* Call it after project; in layers with entries t->pair must be computed too. */
static void store(const struct block *b, const struct layer_acts *s)
{
    struct device *dev = b->dev;
    const enum compress_kind kind = kind_of(b);
    const struct layer_cache *c = b->cache;
    const int64_t mark = arena_mark(&dev->work), n_own = pair_cols(kind, head_dim(b->a));
    struct pages ring = c->rows[PAIRS];
    op_page_store(dev, &c->rows[KEYS], s->compressed.kv, b->pos, b->seqs);
    if (kind == COMPRESS_NONE) return;
    ring.rows = tensor_cols(c->rows[PAIRS].rows, 0, n_own);
    store_entries(b, s->compressed.pair, ring, &c->rows[ENTRIES], &b->w->compressed.entry);
    if (kind == COMPRESS_SPARSE) {
        const int64_t n = pair_cols(kind, b->a->compress.index_dim);
        struct tensor pair = arena_tensor_2d(&dev->work, dev->act_dtype, s->attn_norm.shape[0], n);
        op_linear_fwd(dev, pair, absent, s->attn_norm, &b->w->compressed.index.pair, absent);
        ring.rows = tensor_cols(c->rows[PAIRS].rows, n_own, n);
        store_entries(b, pair, ring, &c->rows[INDEX], &b->w->compressed.index);
    }
    arena_release(&dev->work, mark);
}

static void prefill(const struct block *b, struct layer_acts *s, struct tensor y)
{
    fwd(b, s, y);
    store(b, s);
}

/* The entries that tokens see, on dev->work; absent where every token sees all entries of its sequence. */
static struct tensor choose_stored(const struct block *b, const struct layer_acts *s)
{
    struct device *dev = b->dev;
    struct arena *work = &dev->work;
    const struct compress_arch *c = &b->a->compress;
    const int64_t n_tok = s->attn_norm.shape[0];
    const struct past past = past_of(b, &b->cache->rows[INDEX]);
    if (!is_chosen(b->a, b->layer, b->seqs->max_len)) return absent;
    const struct tensor idx = arena_tensor_2d(work, DT_I32, n_tok, c->index_top);
    const int64_t mark = arena_mark(work);
    const struct tensor q = arena_tensor_2d(work, dev->act_dtype, n_tok, index_cols(b->a));
    const struct tensor scale = arena_tensor_2d(work, dev->act_dtype, n_tok, c->n_index);
    index_queries(b, q, scale, s->attn_norm, s->compressed.q_norm);
    op_index_decode(dev, idx, q, scale, &past, c->ratio[COMPRESS_SPARSE]);
    arena_release(work, mark);
    return idx;
}

static void decode(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const struct shared_attn_shape attention = attention_of(b);
    const struct past keys = past_of(b, &b->cache->rows[KEYS]);
    const bool entries = kind_of(b) != COMPRESS_NONE;
    struct compressed_acts *t = &s->compressed;
    const int64_t mark = arena_mark(&dev->work);
    project(b, s);
    /* 4 entries */ if (entries)
        op_linear_fwd(dev, t->pair, absent, s->attn_norm, &b->w->compressed.entry.pair, absent);
    store(b, s);
    /* 5, 6      */ op_shared_attn_decode(dev, t->o, t->q, &keys, entries ? &b->cache->rows[ENTRIES] : NULL,
                                          choose_stored(b, s), b->w->compressed.sinks, &attention);
    output(b, s, y);
    arena_release(&dev->work, mark);
}

/* dx [T,D] += the gradient through the entries. */
static void entries_bwd(const struct block *b, const struct layer_acts *s, struct tensor dx, struct tensor dentry)
{
    struct device *dev = b->dev;
    struct arena *work = &dev->work;
    const struct arch *a = b->a;
    const struct compressed_acts *t = &s->compressed;
    const struct entry_weights *e = &b->w->compressed.entry;
    const struct compress_shape shape = entries_of(a, kind_of(b), head_dim(a));
    const struct tail_rope key = rope_heads(a, 1, head_dim(a), false);
    const int64_t mark = arena_mark(work);
    struct tensor din = arena_tensor_2d(work, dev->act_dtype, dentry.shape[0], head_dim(a));
    struct tensor dpair = arena_tensor_2d(work, dev->act_dtype, dx.shape[0], t->pair.shape[1]);
    struct tensor part = arena_tensor_2d(work, dev->act_dtype, dx.shape[0], dx.shape[1]);
    device_zero(dev, din); /* the norm adds to it */
    op_tail_rope_bwd(dev, dentry, dentry, absent, absent, t->entry_pos, b->rope, &key);
    op_rmsnorm_bwd(dev, din, dentry, t->entry_in, t->entry_rstd, e->norm);
    op_compress_bwd(dev, dpair, din, t->pair, e->bias, b->seqs, &shape);
    op_linear_bwd(dev, part, dpair, s->attn_norm, absent, &e->pair);
    op_add(dev, dx, part);
    arena_release(work, mark);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct shared_attn_shape attention = attention_of(b);
    const struct tail_rope heads = rope_heads(a, n_head(a), head_dim(a), false),
                           key = rope_heads(a, 1, head_dim(a), false);
    const struct tail_rope back = rope_heads(a, n_head(a), head_dim(a), true);
    const struct compressed_acts *t = &s->compressed;
    struct arena *work = &dev->work;
    const enum dtype act = dev->act_dtype;
    const struct tensor rope = b->rope, entry = t->entry;
    const int64_t n_tok = s->attn_norm.shape[0], q_lora = a->compress.q_lora, mark = arena_mark(work);
    struct tensor da = arena_tensor_2d(work, act, n_tok, first_cols(a));
    struct tensor dgroup = arena_tensor_2d(work, act, n_tok, group_cols(a));
    struct tensor dout = arena_tensor_2d(work, act, n_tok, query_cols(a));
    struct tensor dq = arena_tensor_2d(work, act, n_tok, query_cols(a));
    struct tensor dkv = arena_tensor_2d(work, act, n_tok, head_dim(a));
    struct tensor dentry = entry.ndim ? arena_tensor_2d(work, act, entry.shape[0], head_dim(a)) : absent;
    struct tensor dq_norm = arena_tensor_2d(work, act, n_tok, q_lora);

    device_zero(dev, da); /* the norms add to it */
    /* 9 out     */ linear_bwd(dev, dgroup, dres, t->group, t->out_xa, &w->compressed.out);
    /* 8 group   */ op_group_linear_bwd(dev, dout, dgroup, &w->compressed.group);
    /* 7 rope    */ op_tail_rope_bwd(dev, dout, dout, absent, absent, b->pos, rope, &back);
    /* 6 attn    */ op_shared_attn_bwd(dev, dq, dkv, dentry, dout, t->o, t->lse, t->q, t->kv, entry, chosen(b, t),
                                       b->seqs, &attention);
    /* 3 kv      */ op_tail_rope_bwd(dev, dkv, dkv, absent, absent, b->pos, rope, &key);
    op_rmsnorm_bwd(dev, tensor_cols(da, q_lora, head_dim(a)), dkv, tensor_cols(t->a, q_lora, head_dim(a)), t->kv_rstd,
                   w->compressed.kv_norm);
    /* 2 q       */ op_tail_rope_bwd(dev, dout, dq, t->q_in, t->head_rstd, b->pos, rope, &heads); /* dout: free again */
    linear_bwd(dev, dq_norm, dout, t->q_norm, t->q_xa, &w->compressed.q_b);
    op_rmsnorm_bwd(dev, tensor_cols(da, 0, q_lora), dq_norm, tensor_cols(t->a, 0, q_lora), t->q_rstd,
                   w->compressed.q_norm);
    /* 1 a       */ linear_bwd(dev, dnorm, da, s->attn_norm, t->a_xa, &w->compressed.a);
    /* 4 entries */ if (entry.ndim)
        entries_bwd(b, s, dnorm, dentry);
    arena_release(work, mark);
}

const struct mixer_kind mixer_compressed = {products, load,  plan,    core,   fwd,
                                            bwd,      cache, prefill, decode, .prefixes = 0};
