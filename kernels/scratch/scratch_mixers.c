/* scratch_mixers.c - scratch of attention, the gated delta rule, Mamba-2 and hyper-connections. */
#include "kernels/scratch/scratch.h"

/* ---- attention */

/* Memory for all pairs, or for as many as the budget holds. n_value: values per row and key, 1 in the forward, 2 in the
 * backward. The forward needs 1/16 more, for 1 KiB of partial sums per 1 to 4 blocks of keys, each of 16 KiB. */
static struct scratch_pairs push_pairs(struct device *dev, int64_t n_tok, int64_t n_value, const struct seqs *seqs,
                                       const struct attn_shape *shape)
{
    enum { BLOCK = ATTN_WEIGHT_BLOCK };
    const int64_t budget = (int64_t)1 << 28; /* bytes, but for one pair at least */
    const int64_t n_query = BLOCK / (shape->n_head / shape->n_kv) * 2;
    const int64_t all = MT_MAX(1, ceil_div(MT_MIN(seqs->max_len, n_tok), BLOCK));
    const int64_t seen = ceil_div(shape->window + n_query + BLOCK - 2, BLOCK); /* blocks that a window may touch */
    struct scratch_pairs s = {.n_block = shape->window ? MT_MIN(all, seen) : all};
    const int64_t pair = s.n_block * shape->n_kv * n_value * 2 * BLOCK * BLOCK * 2;
    const int64_t bytes = MT_MAX(pair, MT_MIN(budget, (n_tok / n_query + 1) * pair));
    s.n_pair = bytes / pair;
    s.data = arena_push(&dev->work, n_value == 1 ? bytes + bytes / 16 : bytes);
    return s;
}

struct scratch_attn_fwd scratch_attn_fwd(struct device *dev, struct tensor qkv, const struct seqs *seqs,
                                         const struct attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), group = shape->n_head / shape->n_kv;
    const enum attn_way way = choice_attn(dev->ops->arch(), shape);
    const bool bounds = way != ATTN_ANY && shape->head_dim <= BOUNDED_WIDTH;
    const int64_t n_norm = bounds ? qkv.shape[0] / BOUNDED_LEN(group) + 1 : 0;
    struct scratch_attn_fwd s = {.norm = arena_tensor_1d(&dev->work, DT_I32, n_norm * shape->n_kv)};
    if (way == ATTN_512) s.pairs = push_pairs(dev, qkv.shape[0], 1, seqs, shape);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_attn_decode scratch_attn_decode(struct device *dev, struct tensor q, const struct pages *pages,
                                               const struct attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), dim = shape->head_dim, group = shape->n_head / shape->n_kv;
    const bool width = dim == 64 || dim == 128 || dim == 256, pairs = pages->rows.shape[1] == 2 * shape->n_kv * dim;
    struct scratch_attn_decode s = {.tiles = width && pairs && attn_value_dim(shape) == dim};
    if (!s.tiles) return s;
    /* the first of the keys may be inside a tile of 16 */
    const int64_t most = shape->window ? shape->window + 15 : pages->table.shape[1] * MT_PAGE;
    s.n_split = ceil_div(MT_MIN(most, pages->table.shape[1] * MT_PAGE), DECODE_SPLIT);
    if (s.n_split > 1)
        s.part = arena_tensor_2d(&dev->work, DT_F32,
                                 q.shape[0] * shape->n_kv * ceil_div(group, DECODE_HEADS) * s.n_split * DECODE_HEADS,
                                 dim + 2);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_attn_bwd scratch_attn_bwd(struct device *dev, struct tensor qkv, const struct seqs *seqs,
                                         const struct attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = qkv.shape[0];
    const enum attn_way way = choice_attn(dev->ops->arch(), shape);
    const int64_t n_add = way == ATTN_64 ? n_tok * shape->n_head * shape->head_dim : 0; /* elements of dq */
    struct scratch_attn_bwd s = {.pairs = {.n_pair = 0}};
    s.stat = arena_tensor_2d(&dev->work, DT_F32, shape->n_head * n_tok + 1, 2);
    s.sum = arena_tensor_1d(&dev->work, DT_F32, way == ATTN_512 ? 2 * n_tok * shape->n_kv * shape->head_dim : n_add);
    s.turn = arena_tensor_1d(&dev->work, DT_I32, n_add ? n_tok * shape->n_kv + 1 : 0);
    if (way == ATTN_512) s.pairs = push_pairs(dev, n_tok, 2, seqs, shape);
    arena_release(&dev->work, mark);
    return s;
}

struct tensor scratch_latent(struct device *dev, const struct proj *kv_b)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor dense = scratch_matrices(dev, &kv_b->w, kv_b->quant.format.bits > 0);
    arena_release(&dev->work, mark);
    return dense;
}

/* ---- attention with a shared key */

bool scratch_shared_tiles(const struct shared_attn_shape *shape)
{
    return shape->head_dim == SHARED_DIM && shape->n_head % SHARED_HEADS == 0;
}

/* Memory for the items of a chunk: all items if they fit into the budget, else chunks of equal size within it. */
static void push_items(struct device *dev, struct scratch_shared_bwd *s, int64_t n_tok, int64_t n_head)
{
    const int64_t budget = (int64_t)5 << 28; /* bytes of all items; more if one item needs more */
    const int64_t n_all = ceil_div(n_tok, SHARED_TOKENS);
    s->weights = SHARED_TOKENS * n_head * s->n_slot;
    const int64_t item = 4 * s->weights + (s->n_window + s->n_far) * SHARED_BLOCK * SHARED_DIM * 4;
    const int64_t bytes = MT_MAX(item, MT_MIN(budget, MT_MIN(n_all, (int64_t)SHARED_ITEMS) * item));
    s->n_item = ceil_div(n_all, ceil_div(n_all, bytes / item));
    s->items = arena_push(&dev->work, bytes);
}

struct scratch_shared_bwd scratch_shared_attn_bwd(struct device *dev, struct tensor q, struct tensor entry,
                                                  struct tensor idx, const struct seqs *seqs,
                                                  const struct shared_attn_shape *shape)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = q.shape[0], window = MT_MAX(1, MT_MIN(shape->window, n_tok));
    const int64_t ratio = entry.ndim ? shape->ratio : 0, n_entry = entry.ndim ? entry.shape[0] : 0;
    const int64_t seen = ratio ? MT_MIN(n_entry, seqs->max_len / ratio) : 0; /* entries of a token, without idx */
    struct scratch_shared_bwd s = {.tiles = scratch_shared_tiles(shape)};
    MT_REQUIRE(shape->head_dim <= SHARED_WIDEST, "head_dim %lld: the CUDA kernels take up to %d",
               (long long)shape->head_dim, SHARED_WIDEST);
    if (s.tiles) {
        s.n_slot = window + (idx.ndim ? idx.shape[1] : seen);
        s.n_window = ceil_div(window + SHARED_TOKENS - 1, SHARED_BLOCK);
        s.n_far = ratio ? ceil_div(n_entry, SHARED_BLOCK) : 0;
        push_items(dev, &s, MT_MAX(1, n_tok), shape->n_head);
        s.dkv = arena_tensor_2d(&dev->work, DT_F32, MT_MAX(1, n_tok), SHARED_DIM);
        s.dentry = arena_tensor_2d(&dev->work, DT_F32, MT_MAX(1, n_entry), SHARED_DIM);
    } else {
        s.delta = arena_tensor_2d(&dev->work, DT_F32, n_tok, shape->n_head);
    }
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_index scratch_index_topk(struct device *dev, struct tensor idx, struct tensor q, const struct seqs *seqs,
                                        int64_t ratio)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = q.shape[0], most = seqs->max_len / ratio;
    struct scratch_index s = {
        .most = most, .ld = ceil_div(most, INDEX_ENTRIES) * INDEX_ENTRIES, .scored = most > idx.shape[1]};
    const int64_t row = s.ld * (int64_t)sizeof(float);
    const int64_t bytes = s.scored ? MT_MIN(n_tok * row, MT_MAX((int64_t)INDEX_SCRATCH, row)) : 0;
    s.score = arena_push(&dev->work, bytes);
    s.chunk = s.scored ? MT_MAX(1, bytes / row) : MT_MAX(1, n_tok);
    arena_release(&dev->work, mark);
    return s;
}

/* ---- gated delta rule */

static bool in_chunks(enum cuda_arch arch, struct tensor qkv, struct tensor values, struct tensor written,
                      const struct delta_shape *shape)
{
    return choice_delta_chunks(arch) && shape->key_dim == DELTA_DIM && shape->value_dim == DELTA_DIM &&
           rows_aligned(qkv) && rows_aligned(values) && rows_aligned(written) &&
           2 * qkv.shape[0] * shape->n_value < INT32_MAX;
}

static void push_chunks(struct device *dev, struct scratch_delta *s, int64_t n_tok, int64_t n, int64_t n_slot,
                        bool backward)
{
    const int64_t n_row = ((backward ? n_tok / DELTA_ROWS : 0) + n_slot) * n * DELTA_DIM; /* of all states */
    s->inverse = arena_tensor_2d(&dev->work, DT_BF16, n_tok, n * DELTA_ROWS);
    s->m = arena_tensor_2d(&dev->work, DT_BF16, n_tok, n * DELTA_ROWS);
    s->factors = arena_tensor_2d(&dev->work, DT_F32, n * n_tok, 4);
    s->gates = arena_tensor_2d(&dev->work, DT_F32, n * n_tok, 4);
    s->states = arena_tensor_2d(&dev->work, DT_BF16, n_row, DELTA_DIM);
    if (!backward) return;
    s->x = arena_tensor_2d(&dev->work, DT_BF16, n_tok, n * DELTA_DIM);
    s->grads = arena_tensor_2d(&dev->work, DT_BF16, n_row, DELTA_DIM);
}

/* States of segments, for kernels that compute token by token. */
static void push_ends(struct device *dev, struct scratch_delta *s, int64_t n, const struct delta_shape *shape,
                      bool backward)
{
    const int64_t size = shape->key_dim * shape->value_dim;
    s->states = arena_tensor_2d(&dev->work, DT_F32, n, size);
    s->grads = arena_tensor_2d(&dev->work, DT_F32, backward ? n : 0, size);
    s->sums = arena_tensor_1d(&dev->work, DT_F32, backward ? n : 0);
}

struct scratch_delta scratch_delta(struct device *dev, struct tensor qkv, struct tensor values, struct tensor written,
                                   const struct seqs *seqs, const struct delta_shape *shape, bool backward)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = qkv.shape[0], n = shape->n_value;
    const int64_t n_slot = seqs->segments.n_slot;
    struct scratch_delta s = {.chunks = in_chunks(dev->ops->arch(), qkv, values, written, shape)};
    struct tensor *of_values[] = {&s.err, &s.dd}, *of_keys[] = {&s.dq, &s.dk_in, &s.dk_out},
                  *of_heads[] = {&s.dbeta, &s.dg};
    if (s.chunks)
        push_chunks(dev, &s, n_tok, n, n_slot, backward);
    else
        push_ends(dev, &s, n_slot * n, shape, backward);
    if (!s.chunks && backward) {
        for (int i = 0; i < 2; i++) *of_values[i] = arena_tensor_2d(&dev->work, DT_F32, n_tok, n * shape->value_dim);
        for (int i = 0; i < 3; i++) *of_keys[i] = arena_tensor_2d(&dev->work, DT_F32, n_tok, n * shape->key_dim);
        for (int i = 0; i < 2; i++) *of_heads[i] = arena_tensor_2d(&dev->work, DT_F32, n_tok, n);
    }
    arena_release(&dev->work, mark);
    return s;
}

/* ---- Mamba-2 */

struct scratch_mamba scratch_mamba(struct device *dev, struct tensor xbc, const struct seqs *seqs,
                                   const struct mamba *m, bool backward)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = xbc.shape[0];
    const int64_t n_state = n_tok / MT_MAMBA_CHUNK + seqs->segments.n_slot;
    const int64_t n_row = n_state * m->n_head * ceil_div(m->head_dim, MAMBA_COLS) * m->state;
    struct scratch_mamba s = {.gates = arena_tensor_2d(&dev->work, DT_F32, m->n_head * n_tok, 2)};
    s.states = arena_tensor_2d(&dev->work, DT_BF16, n_row, MAMBA_COLS);
    s.grads = arena_tensor_2d(&dev->work, DT_BF16, backward ? n_row : 0, MAMBA_COLS);
    arena_release(&dev->work, mark);
    return s;
}

/* ---- hyper-connections */

static float *push(struct device *dev, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&dev->work, DT_F32, rows, cols).data;
}

static void want_streams(struct tensor x, const struct hyper *h)
{
    MT_REQUIRE(x.shape[1] / h->n_stream % 8 == 0 && rows_aligned(h->fn), "%lld streams in %lld columns",
               (long long)h->n_stream, (long long)x.shape[1]);
}

float *scratch_hyper_pre_fwd(struct device *dev, struct tensor x, const struct hyper *h)
{
    const int64_t mark = arena_mark(&dev->work);
    want_streams(x, h);
    float *part = push(dev, HYPER_SPLITS * x.shape[0], scratch_hyper_width(h));
    arena_release(&dev->work, mark);
    return part;
}

float *scratch_hyper_pre_bwd(struct device *dev, struct tensor x)
{
    const int64_t mark = arena_mark(&dev->work);
    float *factor = push(dev, x.shape[0], HYPER_FACTORS);
    arena_release(&dev->work, mark);
    return factor;
}

struct scratch_hyper_post scratch_hyper_post(struct device *dev, struct tensor x, bool backward)
{
    const int64_t mark = arena_mark(&dev->work);
    struct scratch_hyper_post s = {.coef = push(dev, x.shape[0], HYPER_COEFS)};
    if (backward) s.dots = push(dev, x.shape[0], HYPER_COEFS);
    arena_release(&dev->work, mark);
    return s;
}
