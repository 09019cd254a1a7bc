/* mixer_deltanet.c - gated DeltaNet: a linear attention whose state is corrected and decays with every token.
 *
 *   attn_norm [T,D] -> q, k, v, z (+lora) [T,C+V]; b, a (+lora) [T,2N]
 *   q, k, v [T,C] -> short convolution, silu -> gated delta rule (b, a) [T,V] -> norm * silu(z) -> out (+lora), + x = h
 *
 * G key heads have A columns each, N value heads B: C = 2GA + NB, V = NB. The convolution and the state begin again at
 * every document. In fused matrices of a checkpoint rows are grouped by key head: A of q, A of k, NB/G of v, NB/G of z;
 * N/G of b, N/G of a. In memory they have the order above. */
#include <stddef.h>

#include "model/layers/linear.h"
#include "model/layer.h"

static const struct tensor absent = {0};

static int64_t key_cols(const struct arch *a) { return a->delta.shape.n_key * a->delta.shape.key_dim; }
static int64_t value_cols(const struct arch *a) { return a->delta.shape.n_value * a->delta.shape.value_dim; }
static int64_t qkv_cols(const struct arch *a) { return 2 * key_cols(a) + value_cols(a); }

/* The norm of the output rounds x * rstd before it multiplies by the weight, unlike the norms of the residual
 * stream. */
static struct norm norm_of(const struct arch *a) { return (struct norm){.eps = a->norm.eps, .round_twice = true}; }

static struct row_order order_in(const struct arch *a)
{
    const struct delta_shape *s = &a->delta.shape;
    const int64_t v = s->n_value / s->n_key * s->value_dim;
    return (struct row_order){.n_group = a->delta.fused ? s->n_key : 0, .part = {s->key_dim, s->key_dim, v, v}};
}

static struct row_order order_ba(const struct arch *a)
{
    const int64_t n = a->delta.shape.n_value / a->delta.shape.n_key;
    return (struct row_order){.n_group = a->delta.fused ? a->delta.shape.n_key : 0, .part = {n, n}};
}

/* Puts one LoRA target in place of two. */
static void fuse(struct product *p, enum lora_target t, struct row_order order)
{
    p->n_target = 1;
    p->target[0] = t;
    p->rows[0] = p->n_out;
    p->order = order;
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    const int64_t n = a->delta.shape.n_value;
    (void)layer;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, deltanet.in),
                            .n_exp = 1,
                            .n_out = qkv_cols(a) + value_cols(a),
                            .n_in = a->d_model,
                            .n_target = 2,
                            .target = {LORA_IN_QKV, LORA_IN_Z},
                            .rows = {qkv_cols(a), value_cols(a)}};
    p[1] = (struct product){.proj = offsetof(struct layer_weights, deltanet.ba),
                            .n_exp = 1,
                            .n_out = 2 * n,
                            .n_in = a->d_model,
                            .n_target = 2,
                            .target = {LORA_IN_B, LORA_IN_A},
                            .rows = {n, n}};
    if (a->delta.fused) {
        fuse(&p[0], LORA_IN_QKVZ, order_in(a));
        fuse(&p[1], LORA_IN_BA, order_ba(a));
    }
    p[2] = (struct product){.proj = offsetof(struct layer_weights, deltanet.out),
                            .n_exp = 1,
                            .n_out = a->d_model,
                            .n_in = value_cols(a),
                            .n_target = 1,
                            .target = {LORA_OUT},
                            .rows = {a->d_model}};
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct delta_shape *s = &a->delta.shape;
    struct stored_rows in = {.part = {"linear_attn.in_proj_qkv", "linear_attn.in_proj_z"},
                             .rows = {qkv_cols(a), value_cols(a)},
                             .n_in = a->d_model,
                             .n_part = 2};
    struct stored_rows ba = {.part = {"linear_attn.in_proj_b", "linear_attn.in_proj_a"},
                             .rows = {s->n_value, s->n_value},
                             .n_in = a->d_model,
                             .n_part = 2,
                             .unpacked = true};
    const struct stored_rows out = {
        .part = {"linear_attn.out_proj"}, .rows = {a->d_model}, .n_in = value_cols(a), .n_part = 1};
    (void)layer;
    if (a->delta.fused) {
        in = (struct stored_rows){.part = {"linear_attn.in_proj_qkvz"}, .rows = {qkv_cols(a) + value_cols(a)}};
        ba = (struct stored_rows){.part = {"linear_attn.in_proj_ba"}, .rows = {2 * s->n_value}, .unpacked = true};
        in.n_part = ba.n_part = 1;
        in.n_in = ba.n_in = a->d_model;
        in.order = order_in(a);
        ba.order = order_ba(a);
    }
    return weights_rows(f, &lw->deltanet.in, &in, false) || weights_rows(f, &lw->deltanet.ba, &ba, false) ||
                   weights_conv(f, &lw->deltanet.conv, "linear_attn.conv1d", qkv_cols(a), a->delta.n_tap) ||
                   weights_vector(f, &lw->deltanet.a_log, "linear_attn.A_log", "", s->n_value) ||
                   weights_vector(f, &lw->deltanet.dt_bias, "linear_attn.dt_bias", "", s->n_value) ||
                   weights_vector(f, &lw->deltanet.norm, "linear_attn.norm", ".weight", s->value_dim) ||
                   weights_rows(f, &lw->deltanet.out, &out, false)
               ? -1
               : 0;
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct deltanet_acts *t = &s->deltanet;
    const struct arch *a = p->a;
    const int64_t n_tok = p->n_tok, n = a->delta.shape.n_value;
    if (group == ACTS_CORE) t->o = acts_2d(p, n_tok, value_cols(a));
    if (group != ACTS_MIXER) return;
    t->in = acts_2d(p, n_tok, qkv_cols(a) + value_cols(a));
    t->in_xa = acts_xa(p, n_tok, &p->w.deltanet.in.lora);
    t->ba = acts_2d(p, n_tok, 2 * n);
    t->ba_xa = acts_xa(p, n_tok, &p->w.deltanet.ba.lora);
    t->qkv = acts_2d(p, n_tok, qkv_cols(a));
    t->y = acts_2d(p, n_tok, value_cols(a));
    t->rstd = arena_tensor_2d(&p->dev->work, p->dev->stat_dtype, n_tok, n);
    t->out_xa = acts_xa(p, n_tok, &p->w.deltanet.out.lora);
}

static void core(const struct block *b, struct layer_acts *s)
{
    const struct layer_weights *w = b->w;
    struct deltanet_acts *t = &s->deltanet;
    /* 4 delta */ op_delta_fwd(b->dev, t->o, t->qkv, t->ba, w->deltanet.a_log, w->deltanet.dt_bias, b->seqs,
                               &b->a->delta.shape);
}

static void project(const struct block *b, struct layer_acts *s)
{
    struct deltanet_acts *t = &s->deltanet;
    /* 1 in    */ linear_fwd(b->dev, t->in, t->in_xa, s->attn_norm, &b->w->deltanet.in, absent);
    /* 2 b, a  */ linear_fwd(b->dev, t->ba, t->ba_xa, s->attn_norm, &b->w->deltanet.ba, absent);
}

static void output(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct layer_weights *w = b->w;
    const struct norm norm = norm_of(b->a);
    struct deltanet_acts *t = &s->deltanet;
    const struct tensor z = tensor_cols(t->in, qkv_cols(b->a), value_cols(b->a));
    /* 5 norm  */ op_gated_norm_fwd(b->dev, t->y, t->rstd, t->o, z, w->deltanet.norm, &norm);
    /* 6 out   */ linear_fwd(b->dev, y, t->out_xa, t->y, &w->deltanet.out, s->mixer_res);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct deltanet_acts *t = &s->deltanet;
    project(b, s);
    /* 3 conv  */ op_conv_silu_fwd(b->dev, t->qkv, tensor_cols(t->in, 0, qkv_cols(b->a)), b->w->deltanet.conv, absent,
                                   b->seqs);
    /* 4 delta */ if (!b->core_saved)
        core(b, s);
    output(b, s, y);
}

/* Decoding keeps the last inputs of the convolution, and the state of the delta rule. */
enum { TAIL, STATE };
static struct cache_need cache(const struct arch *a, int64_t layer)
{
    const struct delta_shape *s = &a->delta.shape;
    (void)layer;
    return (struct cache_need){.state = {[TAIL] = {.n = (a->delta.n_tap - 1) * qkv_cols(a)},
                                         [STATE] = {.n = s->n_value * s->key_dim * s->value_dim, .stat = true}}};
}

static struct states states_of(const struct block *b, int i)
{
    return (struct states){.values = b->cache->state[i], .slot = b->cache->slot, .pos = b->pos, .seqs = b->seqs};
}

static void decode(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct layer_weights *w = b->w;
    const struct states tail = states_of(b, TAIL), state = states_of(b, STATE);
    struct deltanet_acts *t = &s->deltanet;
    project(b, s);
    /* 3 conv  */ op_conv_decode(b->dev, t->qkv, tensor_cols(t->in, 0, qkv_cols(b->a)), w->deltanet.conv, absent,
                                 &tail);
    /* 4 delta */ op_delta_decode(b->dev, t->o, t->qkv, t->ba, w->deltanet.a_log, w->deltanet.dt_bias, &state,
                                  &b->a->delta.shape);
    output(b, s, y);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct arch *a = b->a;
    const struct deltanet_acts *t = &s->deltanet;
    struct arena *work = &dev->work;
    const enum dtype act = dev->act_dtype;
    const int64_t n_tok = s->x.shape[0], c = qkv_cols(a), v = value_cols(a), mark = arena_mark(work);
    struct tensor din = arena_tensor_2d(work, act, n_tok, c + v), dqkv = arena_tensor_2d(work, act, n_tok, c);
    struct tensor dba = arena_tensor_2d(work, act, n_tok, 2 * a->delta.shape.n_value);
    struct tensor dy = arena_tensor_2d(work, act, n_tok, v), of_ba = arena_tensor_2d(work, act, n_tok, a->d_model);

    /* 6 out   */ linear_bwd(dev, dy, dres, t->y, t->out_xa, &w->deltanet.out);
    /* 5 norm  */ op_gated_norm_bwd(dev, dy, tensor_cols(din, c, v), dy, t->o, t->rstd, tensor_cols(t->in, c, v),
                                    w->deltanet.norm);
    /* 4 delta */ op_delta_bwd(dev, dqkv, dba, dy, t->qkv, t->ba, w->deltanet.a_log, w->deltanet.dt_bias, b->seqs,
                               &a->delta.shape);
    /* 3 conv  */ op_conv_silu_bwd(dev, tensor_cols(din, 0, c), dqkv, tensor_cols(t->in, 0, c), w->deltanet.conv,
                                   absent, b->seqs);
    /* 2 b, a  */ linear_bwd(dev, of_ba, dba, s->attn_norm, t->ba_xa, &w->deltanet.ba);
    /* 1 in    */ linear_bwd(dev, dnorm, din, s->attn_norm, t->in_xa, &w->deltanet.in);
    op_add(dev, dnorm, of_ba);
    arena_release(work, mark);
}

const struct mixer_kind mixer_deltanet = {
    products, load, plan, core, fwd, bwd, cache, .prefill = decode, .decode = decode, .prefixes = 2 * MT_DELTA_CHUNK};
