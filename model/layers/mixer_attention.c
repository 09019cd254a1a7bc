/* mixer_attention.c - causal grouped-query attention: fused qkv, norm of q and k (some families), RoPE, sinks, sliding
 * windows, an output gate (some families).
 *
 *   attn_norm [T,D] -> qkv (+lora) [T,(H+2K)A] -> (q, k norm) -> rope -> attention [T,HA] -> out (+lora) -> + x = h
 *   Where values are keys: -> q, k (+lora) [T,(H+K)A] -> v = k -> (q, k norm) ...
 *   With an output gate: -> q, gate, k, v (+lora) [T,(2H+2K)A] -> split, norm, rope in one op ... o * sigmoid(gate)
 *
 * Gemma-4 normalises v too, without a weight. */
#include <stddef.h>

#include "model/layers/linear.h"
#include "model/layer.h"

static const struct tensor absent = {0};

static struct attn_shape shape_of(const struct block *b)
{
    const struct attn_arch *h = arch_attn(b->a, b->layer);
    return (struct attn_shape){h->n_head, h->n_kv, h->head_dim, h->window, h->scale, 0};
}

/* Columns of the first product: q, an output gate, k, and v unless it is k. */
static int64_t wide_cols(const struct arch *a, int64_t layer)
{
    const struct attn_arch *h = arch_attn(a, layer);
    MT_REQUIRE(!a->attn_gate || !h->values_are_keys, "layer %lld: an output gate, and values that are keys",
               (long long)layer);
    return arch_q_rows(a, layer) + (h->values_are_keys ? 1 : 2) * h->n_kv * h->head_dim;
}

/* k (0) or v (1) of q | k | v. */
static struct tensor keys_or_values(struct tensor qkv, const struct attn_shape *s, int v)
{
    const int64_t n = s->n_kv * s->head_dim;
    return tensor_cols(qkv, s->n_head * s->head_dim + v * n, n);
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    const struct attn_arch *h = arch_attn(a, layer);
    const int64_t q = arch_q_rows(a, layer), kv = h->n_kv * h->head_dim, n_out = h->n_head * h->head_dim;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, attention.qkv),
                            .n_exp = 1,
                            .n_out = wide_cols(a, layer),
                            .n_in = a->d_model,
                            .n_target = h->values_are_keys ? 2 : 3,
                            .target = {LORA_Q, LORA_K, LORA_V},
                            .rows = {q, kv, kv}};
    p[1] = (struct product){.proj = offsetof(struct layer_weights, attention.out),
                            .n_exp = 1,
                            .n_out = a->d_model,
                            .n_in = n_out,
                            .n_target = 1,
                            .target = {LORA_O},
                            .rows = {a->d_model}};
}

static int load_norms(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct attn_arch *h = arch_attn(a, layer);
    const bool whole = a->qk_norm == QK_NORM_WHOLE;
    const int64_t q = (whole ? h->n_head : 1) * h->head_dim, k = (whole ? h->n_kv : 1) * h->head_dim;
    if (a->qk_norm == QK_NORM_NONE) return 0;
    if (a->value_norm) weights_ones(f, &lw->attention.v_norm, h->head_dim);
    const char *const *own = a->names->qk_norm;
    return weights_norm(f, &lw->attention.q_norm, own[0] ? own[0] : "self_attn.q_norm", q) ||
                   weights_norm(f, &lw->attention.k_norm, own[1] ? own[1] : "self_attn.k_norm", k)
               ? -1
               : 0;
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct attn_arch *h = arch_attn(a, layer);
    const int64_t kv = h->n_kv * h->head_dim;
    static const enum lora_target target[] = {LORA_Q, LORA_K, LORA_V, LORA_O};
    char part[MT_LEN(target)][LORA_MODULE_TEXT];
    for (int i = 0; i < MT_LEN(target); i++) lora_target_module(a->names, target[i], part[i]);
    const struct stored_rows qkv = {.part = {part[0], part[1], part[2]},
                                    .rows = {arch_q_rows(a, layer), kv, kv},
                                    .n_in = a->d_model,
                                    .n_part = h->values_are_keys ? 2 : 3};
    const struct stored_rows out = {
        .part = {part[3]}, .rows = {a->d_model}, .n_in = h->n_head * h->head_dim, .n_part = 1};
    return weights_rows(f, &lw->attention.qkv, &qkv, a->attn_bias) ||
                   weights_rows(f, &lw->attention.out, &out, a->out_bias) ||
                   (a->sinks && weights_vector(f, &lw->attention.sinks, "self_attn.sinks", "", h->n_head)) ||
                   load_norms(f, a, layer, lw)
               ? -1
               : 0;
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct attention_acts *t = &s->attention;
    const struct arch *a = p->a;
    const struct attn_arch *h = arch_attn(a, p->layer);
    struct device *dev = p->dev;
    const int64_t n_tok = p->n_tok, n_head = h->n_head + (a->value_norm ? 2 : 1) * h->n_kv; /* heads that have a norm */
    const int64_t out = h->n_head * h->head_dim;
    if (group == ACTS_CORE) {
        t->o = acts_2d(p, n_tok, out);
        t->lse = arena_tensor_2d(&dev->work, dev->stat_dtype, n_tok, h->n_head);
    }
    if (group != ACTS_MIXER) return;
    t->qkv_xa = acts_xa(p, n_tok, &p->w.attention.qkv.lora);
    if (a->qk_norm != QK_NORM_NONE) {
        if (!a->attn_gate) t->qk = acts_2d(p, n_tok, n_head * h->head_dim);
        t->rstd_qk = arena_tensor_2d(&dev->work, dev->stat_dtype, n_tok, a->qk_norm == QK_NORM_HEAD ? n_head : 2);
    }
    if (a->attn_gate) {
        t->wide = acts_2d(p, n_tok, wide_cols(a, p->layer));
        t->gated = acts_2d(p, n_tok, out);
    }
    t->qkv = acts_2d(p, n_tok, arch_qkv_cols(a, p->layer));
    t->out_xa = acts_xa(p, n_tok, &p->w.attention.out.lora);
}

static void core(const struct block *b, struct layer_acts *s)
{
    const struct attn_shape shape = shape_of(b);
    struct attention_acts *t = &s->attention;
    /* 4 attn */ op_attn_fwd(b->dev, t->o, t->lse, t->qkv, b->w->attention.sinks, b->seqs, &shape);
}

/* attn_norm -> qkv */
static void project(const struct block *b, struct layer_acts *s)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct attn_shape shape = shape_of(b);
    const bool copied = arch_attn(a, b->layer)->values_are_keys;
    struct attention_acts *t = &s->attention;
    const struct tensor wide = a->attn_gate ? t->wide : tensor_cols(t->qkv, 0, wide_cols(a, b->layer));

    if (copied) device_zero(dev, t->qkv);
    /* 1 qkv  */ linear_fwd(dev, wide, t->qkv_xa, s->attn_norm, &w->attention.qkv, absent);
    if (copied) op_add(dev, keys_or_values(t->qkv, &shape, 1), keys_or_values(t->qkv, &shape, 0));
    if (a->attn_gate) {
        /* 2, 3   */ op_attn_split_fwd(dev, t->qkv, t->rstd_qk, t->wide, w->attention.q_norm, w->attention.k_norm,
                                       b->pos, b->rope, &shape, &a->norm);
    } else {
        if (a->qk_norm != QK_NORM_NONE)
            /* 2 q, k */ op_qk_norm_fwd(dev, t->qkv, t->qk, t->rstd_qk, w->attention.q_norm, w->attention.k_norm,
                                        w->attention.v_norm, &shape, &a->norm);
        if (b->rope.ndim)
            /* 3 rope */ op_rope_fwd(dev, t->qkv, b->pos, b->rope, shape.n_head + shape.n_kv, shape.head_dim);
    }
}

/* o -> y */
static void output(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct attn_shape shape = shape_of(b);
    struct attention_acts *t = &s->attention;
    const bool gate = b->a->attn_gate;
    if (gate) op_attn_gate_fwd(b->dev, t->gated, t->o, t->wide, &shape);
    /* 5 out  */ linear_fwd(b->dev, y, t->out_xa, gate ? t->gated : t->o, &b->w->attention.out, s->mixer_res);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    project(b, s);
    /* 4 attn */ if (!b->core_saved)
        core(b, s);
    output(b, s, y);
}

static struct cache_need cache(const struct arch *a, int64_t layer)
{
    const struct attn_arch *h = arch_attn(a, layer);
    return (struct cache_need){.rows = {{.cols = 2 * h->n_kv * h->head_dim, .window = h->window, .ratio = 1}}};
}

static void store(const struct block *b, const struct layer_acts *s)
{
    const struct attn_shape shape = shape_of(b);
    const int64_t q = shape.n_head * shape.head_dim;
    const struct tensor qkv = s->attention.qkv, kv = tensor_cols(qkv, q, qkv.shape[1] - q);
    op_page_store(b->dev, &b->cache->rows[0], kv, b->pos, b->seqs);
}

static void prefill(const struct block *b, struct layer_acts *s, struct tensor y)
{
    fwd(b, s, y);
    store(b, s);
}

static void decode(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct attn_shape shape = shape_of(b);
    const struct attention_acts *t = &s->attention;
    project(b, s);
    store(b, s);
    /* 4 attn */ op_attn_decode(b->dev, t->o, tensor_cols(t->qkv, 0, shape.n_head * shape.head_dim), &b->cache->rows[0],
                                b->w->attention.sinks, b->pos, b->seqs, &shape);
    output(b, s, y);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct attn_shape shape = shape_of(b);
    const struct attention_acts *t = &s->attention;
    const int64_t n_tok = s->x.shape[0], mark = arena_mark(&dev->work);
    struct tensor dqkv = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, arch_qkv_cols(a, b->layer));
    struct tensor dout = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, shape.n_head * shape.head_dim);
    const int64_t n_wide = wide_cols(a, b->layer);
    struct tensor dwide =
        a->attn_gate ? arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, n_wide) : tensor_cols(dqkv, 0, n_wide);

    /* 5 out  */ linear_bwd(dev, dout, dres, a->attn_gate ? t->gated : t->o, t->out_xa, &w->attention.out);
    if (a->attn_gate) op_attn_gate_bwd(dev, dout, dwide, dout, t->o, t->wide, &shape);
    /* 4 attn */ op_attn_bwd(dev, dqkv, dout, t->o, t->lse, t->qkv, b->seqs, &shape);
    if (a->attn_gate) {
        /* 2, 3   */ op_attn_split_bwd(dev, dwide, dqkv, t->wide, t->rstd_qk, w->attention.q_norm, w->attention.k_norm,
                                       b->pos, b->rope, &shape);
    } else {
        if (b->rope.ndim)
            /* 3 rope */ op_rope_bwd(dev, dqkv, b->pos, b->rope, shape.n_head + shape.n_kv, shape.head_dim);
        if (a->qk_norm != QK_NORM_NONE)
            /* 2 q, k */ op_qk_norm_bwd(dev, dqkv, t->qk, t->rstd_qk, w->attention.q_norm, w->attention.k_norm,
                                        w->attention.v_norm, &shape);
    }
    if (arch_attn(a, b->layer)->values_are_keys)
        op_add(dev, keys_or_values(dqkv, &shape, 0), keys_or_values(dqkv, &shape, 1));
    /* 1 qkv  */ linear_bwd(dev, dnorm, dwide, s->attn_norm, t->qkv_xa, &w->attention.qkv);
    arena_release(&dev->work, mark);
}

const struct mixer_kind mixer_attention = {products, load, plan, core, fwd, bwd, cache, prefill, decode, .prefixes = 1};
