/* mixer_mla.c - multi-head latent attention: queries, and keys with values, pass through a narrow projection with its
 * own norm. The last rope columns of queries and keys are rotated; all heads share the rotated key.
 *
 *   attn_norm [T,D] -> q_a | kv_a (+lora) [T, Lq + Lkv + G] -> norm of q_a, of kv_a
 *                   -> q_b (+lora) [T,H(N+G)], kv_b (+lora) [T,H(N+B)] -> rope, pack [T,H(2(N+G)+B)]
 *                   -> attention [T,HB] -> out (+lora) -> + x = h
 *
 * Lq, Lkv: widths of the projections. A head has N columns without position, G rotated and B value columns. Without
 * q_lora_rank, q [T,H(N+G)] replaces q_a and q_b. */
#include <stddef.h>

#include "model/layers/input_quant.h"
#include "model/layers/linear.h"
#include "model/layers/lora_rows.h"
#include "model/layer.h"

static const struct tensor absent = {0};

static struct attn_shape attention_of(const struct block *b)
{
    const struct attn_arch *h = arch_attn(b->a, b->layer);
    return (struct attn_shape){.n_head = h->n_head,
                               .n_kv = h->n_head,
                               .head_dim = h->head_dim,
                               .window = h->window,
                               .scale = h->scale,
                               .value_dim = b->a->mla.value};
}

/* All layers have equal sizes. */
static int64_t n_head(const struct arch *a) { return a->attn[0].n_head; }
static int64_t query_cols(const struct arch *a) { return n_head(a) * a->attn[0].head_dim; }

static struct mla_shape shape_of(const struct arch *a)
{
    const struct mla_arch *m = &a->mla;
    return (struct mla_shape){.n_head = n_head(a),
                              .nope = m->nope,
                              .rope = m->rope,
                              .value = m->value,
                              .interleaved = m->interleaved,
                              .beta_len = a->rope[0].original_len,
                              .beta = (float)a->rope[0].query_beta};
}

/* The projections' norms have the default eps of transformers' class, whatever rms_norm_eps is. */
static struct norm norm_of(const struct arch *a)
{
    return (struct norm){.eps = 1e-6f, .round_twice = a->norm.round_twice};
}

/* Columns of the first product's parts: queries or their projection; keys and values, then the rotated key. */
static int64_t q_cols(const struct arch *a) { return a->mla.q_lora ? a->mla.q_lora : query_cols(a); }
static int64_t kv_cols(const struct arch *a) { return a->mla.kv_lora + a->mla.rope; }
static int64_t key_value_cols(const struct arch *a) { return n_head(a) * (a->mla.nope + a->mla.value); }
static int64_t out_cols(const struct arch *a) { return n_head(a) * a->mla.value; }

static struct product product_of(size_t proj, enum lora_target t, int64_t n_out, int64_t n_in)
{
    return (struct product){
        .proj = proj, .n_exp = 1, .n_out = n_out, .n_in = n_in, .n_target = 1, .target = {t}, .rows = {n_out}};
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    const struct mla_arch *m = &a->mla;
    (void)layer;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, mla.a),
                            .n_exp = 1,
                            .n_out = q_cols(a) + kv_cols(a),
                            .n_in = a->d_model,
                            .n_target = 2,
                            .target = {m->q_lora ? LORA_Q_A : LORA_Q, LORA_KV_A},
                            .rows = {q_cols(a), kv_cols(a)}};
    p[1] = product_of(offsetof(struct layer_weights, mla.out), LORA_O, a->d_model, out_cols(a));
    p[2] = product_of(offsetof(struct layer_weights, mla.kv_b), LORA_KV_B, key_value_cols(a), m->kv_lora);
    if (m->q_lora) p[3] = product_of(offsetof(struct layer_weights, mla.q_b), LORA_Q_B, query_cols(a), m->q_lora);
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct mla_arch *m = &a->mla;
    const struct stored_rows first = {
        .part = {m->q_lora ? "self_attn.q_a_proj" : "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"},
        .rows = {q_cols(a), kv_cols(a)},
        .n_in = a->d_model,
        .n_part = 2};
    const struct stored_rows q_b = {
        .part = {"self_attn.q_b_proj"}, .rows = {query_cols(a)}, .n_in = m->q_lora, .n_part = 1};
    const struct stored_rows kv_b = {
        .part = {"self_attn.kv_b_proj"}, .rows = {key_value_cols(a)}, .n_in = m->kv_lora, .n_part = 1};
    const struct stored_rows out = {
        .part = {"self_attn.o_proj"}, .rows = {a->d_model}, .n_in = out_cols(a), .n_part = 1};
    (void)layer;
    if (m->q_lora && (weights_vector(f, &lw->mla.q_norm, "self_attn.q_a_layernorm", ".weight", m->q_lora) ||
                      weights_rows(f, &lw->mla.q_b, &q_b, false)))
        return -1;
    return weights_rows(f, &lw->mla.a, &first, a->attn_bias) ||
                   weights_vector(f, &lw->mla.kv_norm, "self_attn.kv_a_layernorm", ".weight", m->kv_lora) ||
                   weights_rows(f, &lw->mla.kv_b, &kv_b, false) || weights_rows(f, &lw->mla.out, &out, a->out_bias)
               ? -1
               : 0;
}

static struct tensor rstd(const struct acts_plan *p)
{
    return arena_tensor_1d(&p->dev->work, p->dev->stat_dtype, p->n_tok);
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct mla_acts *t = &s->mla;
    const struct arch *a = p->a;
    const struct mla_arch *m = &a->mla;
    const int64_t n_tok = p->n_tok;
    if (group == ACTS_CORE) {
        t->o = acts_2d(p, n_tok, out_cols(a));
        t->lse = arena_tensor_2d(&p->dev->work, p->dev->stat_dtype, n_tok, n_head(a));
    }
    if (group != ACTS_MIXER) return;
    t->a = acts_2d(p, n_tok, q_cols(a) + kv_cols(a));
    t->a_xa = acts_xa(p, n_tok, &p->w.mla.a.lora);
    if (m->q_lora) {
        t->q_norm = acts_2d(p, n_tok, m->q_lora);
        t->q_rstd = rstd(p);
        t->q_xa = acts_xa(p, n_tok, &p->w.mla.q_b.lora);
    }
    t->kv_norm = acts_2d(p, n_tok, m->kv_lora);
    t->kv_rstd = rstd(p);
    t->kv_xa = acts_xa(p, n_tok, &p->w.mla.kv_b.lora);
    t->qkv = acts_2d(p, n_tok, 2 * query_cols(a) + out_cols(a));
    t->out_xa = acts_xa(p, n_tok, &p->w.mla.out.lora);
}

/* Views of the first product's columns, or of their gradients. */
struct parts {
    struct tensor q, kv, rope;
};
static struct parts parts_of(const struct arch *a, struct tensor x)
{
    return (struct parts){tensor_cols(x, 0, q_cols(a)), tensor_cols(x, q_cols(a), a->mla.kv_lora),
                          tensor_cols(x, q_cols(a) + a->mla.kv_lora, a->mla.rope)};
}

static void core(const struct block *b, struct layer_acts *s)
{
    const struct attn_shape attention = attention_of(b);
    struct mla_acts *t = &s->mla;
    /* 5 attn */ op_attn_fwd(b->dev, t->o, t->lse, t->qkv, absent, b->seqs, &attention);
}

/* attn_norm -> queries [T,H(N+G)] before RoPE, on dev->work; s->kv_norm */
static struct tensor project(const struct block *b, struct layer_acts *s)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct norm norm = norm_of(a);
    struct mla_acts *t = &s->mla;
    const struct parts part = parts_of(a, t->a);
    struct tensor q = part.q;

    /* 1 a    */ linear_fwd(dev, t->a, t->a_xa, s->attn_norm, &w->mla.a, absent);
    if (a->mla.q_lora) {
        q = arena_tensor_2d(&dev->work, dev->act_dtype, s->x.shape[0], query_cols(a));
        /* 2 q    */ op_rmsnorm_fwd(dev, t->q_norm, t->q_rstd, part.q, w->mla.q_norm, &norm);
        linear_fwd(dev, q, t->q_xa, t->q_norm, &w->mla.q_b, absent);
    }
    /* 3 kv   */ op_rmsnorm_fwd(dev, t->kv_norm, t->kv_rstd, part.kv, w->mla.kv_norm, &norm);
    return q;
}

static void output(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct mla_acts *t = &s->mla;
    /* 6 out  */ linear_fwd(b->dev, y, t->out_xa, t->o, &b->w->mla.out, s->mixer_res);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const struct arch *a = b->a;
    const struct mla_shape shape = shape_of(a);
    struct mla_acts *t = &s->mla;
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor q = project(b, s);
    const struct tensor kv = arena_tensor_2d(&dev->work, dev->act_dtype, s->x.shape[0], key_value_cols(a));

    linear_fwd(dev, kv, t->kv_xa, t->kv_norm, &b->w->mla.kv_b, absent);
    /* 4 rope */ op_mla_qkv_fwd(dev, t->qkv, q, kv, parts_of(a, t->a).rope, b->pos, b->rope, &shape);
    /* 5 attn */ if (!b->core_saved)
        core(b, s);
    output(b, s, y);
    arena_release(&dev->work, mark);
}

/* Decoding keeps the latent, as products with kv_b read it, and the rotated key, whose columns have the projection's
 * order, unlike those in q | k | v (struct mla_shape). */
static struct cache_need cache(const struct arch *a, int64_t layer)
{
    return (struct cache_need){.rows = {{.cols = kv_cols(a), .window = arch_attn(a, layer)->window, .ratio = 1}}};
}

/* Applies RoPE in place to the last columns of n heads of x. */
static void rotate(const struct block *b, struct tensor x, int64_t n)
{
    const int64_t width = x.shape[1] / n, nope = width - b->a->mla.rope;
    const struct tail_rope pairs = {.n_head = n, .head_dim = width};
    if (b->a->mla.interleaved)
        op_tail_rope_fwd(b->dev, x, absent, x, b->pos, b->rope, &pairs);
    else
        op_rope_fwd(b->dev, tensor_cols(x, nope, x.shape[1] - nope), b->pos, b->rope, n, width);
}

/* Stores the tokens' rows in the cache. Call it after project and, in a prefill, after fwd has read the key. */
static void store(const struct block *b, const struct layer_acts *s)
{
    const struct mla_arch *m = &b->a->mla;
    const struct tensor rope = parts_of(b->a, s->mla.a).rope, rows = b->cache->rows[0].rows;
    struct pages latent = b->cache->rows[0], key = latent;
    const int64_t mark = arena_mark(&b->dev->work);
    latent.rows = tensor_cols(rows, 0, m->kv_lora);
    key.rows = tensor_cols(rows, m->kv_lora, m->rope);
    rotate(b, rope, 1);
    op_page_store(b->dev, &latent, input_quant_fwd(b->dev, &b->w->mla.kv_b, s->mla.kv_norm), b->pos, b->seqs);
    op_page_store(b->dev, &key, rope, b->pos, b->seqs);
    arena_release(&b->dev->work, mark);
}

/* The tokens of group g, all of them without groups; false: no more groups. */
static bool group_at(const struct block *b, int g, int64_t n_tok, int64_t *first, int64_t *n)
{
    const struct lora_set *set = b->w->mla.kv_b.rows.set;
    if (g > (set ? set->n : 0)) return false;
    *first = set ? b->group_cu[g] : 0;
    *n = set ? b->group_cu[g + 1] - *first : n_tok;
    return true;
}

static void absorb(const struct block *b, struct tensor wide, struct tensor q, const struct mla_shape *shape)
{
    int64_t at, n;
    for (int g = 0; group_at(b, g, q.shape[0], &at, &n); g++) {
        const struct proj kv_b = lora_rows_one(&b->w->mla.kv_b, g);
        op_mla_absorb(b->dev, tensor_rows(wide, at, n), tensor_rows(q, at, n), tensor_rows(b->pos, at, n), &kv_b,
                      shape);
    }
}

static void values(const struct block *b, struct tensor o, struct tensor z, const struct mla_shape *shape)
{
    int64_t at, n;
    for (int g = 0; group_at(b, g, z.shape[0], &at, &n); g++) {
        const struct proj kv_b = lora_rows_one(&b->w->mla.kv_b, g);
        op_mla_values(b->dev, tensor_rows(o, at, n), tensor_rows(z, at, n), &kv_b, shape);
    }
}

static void decode(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    struct arena *work = &dev->work;
    const struct arch *a = b->a;
    const struct mla_shape shape = shape_of(a);
    struct attn_shape one = attention_of(b); /* all heads attend to the one latent per token, as their key */
    const int64_t n_tok = s->x.shape[0], mark = arena_mark(work);
    const struct tensor q = project(b, s);
    const struct tensor wide = arena_tensor_2d(work, dev->act_dtype, n_tok, n_head(a) * kv_cols(a));
    const struct tensor z = arena_tensor_2d(work, dev->act_dtype, n_tok, n_head(a) * a->mla.kv_lora);
    one.n_kv = 1;
    one.head_dim = kv_cols(a);
    one.value_dim = a->mla.kv_lora;
    /* 4 rope */ rotate(b, q, n_head(a));
    store(b, s);
    absorb(b, wide, q, &shape);
    /* 5 attn */ op_attn_decode(dev, z, wide, &b->cache->rows[0], absent, b->pos, b->seqs, &one);
    values(b, s->mla.o, z, &shape);
    output(b, s, y);
    arena_release(work, mark);
}

/* On the CPU the bits of a token do not depend on how many tokens of its sequence are in a pass that samples. */
static void prefill(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const bool steady = b->dev->steady_rows && !b->dev->ops->own_memory && !arch_attn(b->a, b->layer)->window;
    if (steady) {
        decode(b, s, y);
        return;
    }
    fwd(b, s, y);
    store(b, s);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct attn_shape attention = attention_of(b);
    const struct mla_shape shape = shape_of(a);
    const struct mla_acts *t = &s->mla;
    struct arena *work = &dev->work;
    const enum dtype act = dev->act_dtype;
    const int64_t n_tok = s->x.shape[0], mark = arena_mark(work);
    struct tensor da = arena_tensor_2d(work, act, n_tok, q_cols(a) + kv_cols(a));
    struct tensor dkv_norm = arena_tensor_2d(work, act, n_tok, a->mla.kv_lora);
    struct tensor dkv = arena_tensor_2d(work, act, n_tok, key_value_cols(a));
    struct tensor dqkv = arena_tensor_2d(work, act, n_tok, 2 * query_cols(a) + out_cols(a));
    struct tensor dout = arena_tensor_2d(work, act, n_tok, out_cols(a));
    const struct parts part = parts_of(a, t->a), dpart = parts_of(a, da);
    struct tensor dq = a->mla.q_lora ? arena_tensor_2d(work, act, n_tok, query_cols(a)) : dpart.q;

    device_zero(dev, da); /* the norms add to it */
    /* 6 out  */ linear_bwd(dev, dout, dres, t->o, t->out_xa, &w->mla.out);
    /* 5 attn */ op_attn_bwd(dev, dqkv, dout, t->o, t->lse, t->qkv, b->seqs, &attention);
    /* 4 rope */ op_mla_qkv_bwd(dev, dq, dkv, dpart.rope, dqkv, b->pos, b->rope, &shape);
    /* 3 kv   */ linear_bwd(dev, dkv_norm, dkv, t->kv_norm, t->kv_xa, &w->mla.kv_b);
    op_rmsnorm_bwd(dev, dpart.kv, dkv_norm, part.kv, t->kv_rstd, w->mla.kv_norm);
    if (a->mla.q_lora) {
        struct tensor dq_norm = arena_tensor_2d(work, act, n_tok, a->mla.q_lora);
        /* 2 q    */ linear_bwd(dev, dq_norm, dq, t->q_norm, t->q_xa, &w->mla.q_b);
        op_rmsnorm_bwd(dev, dpart.q, dq_norm, part.q, t->q_rstd, w->mla.q_norm);
    }
    /* 1 a    */ linear_bwd(dev, dnorm, da, s->attn_norm, t->a_xa, &w->mla.a);
    arena_release(work, mark);
}

const struct mixer_kind mixer_mla = {products, load, plan, core, fwd, bwd, cache, prefill, decode, .prefixes = 1};
