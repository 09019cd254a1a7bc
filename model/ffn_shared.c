/* ffn_shared.c - routed experts (ffn_moe.c) and beside them shared experts: one gated network that every token uses, in
 * some families scaled by a gate per token. It runs on the token's rank.
 *
 *   ffn_norm [T,D] -> gate [T,1] = sigmoid(ffn_norm w)
 *   ffn_norm [T,D] -> gate_up (+lora) [T,2G] -> act [T,G] * gate -> down (+lora) [T,D] -> + h -> h of the routed
 * experts
 *
 * The gate is the router of one expert. It multiplies act instead of the output of down, which is the same sum. */
#include <stddef.h>

#include "model/ffn_moe.h"
#include "model/input_quant.h"

static const struct tensor absent = {0};
static const struct router gate_kind = {.kind = ROUTER_SIGMOID, .scale = 1};

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    ffn_moe.products(a, layer, p);
    p[2] = (struct product){.proj = offsetof(struct layer_weights, shared_up),
                            .n_exp = 1,
                            .n_out = 2 * a->d_shared,
                            .n_in = a->d_model,
                            .n_target = 2,
                            .target = {LORA_SHARED_GATE, LORA_SHARED_UP},
                            .rows = {a->d_shared, a->d_shared}};
    p[3] = (struct product){.proj = offsetof(struct layer_weights, shared_down),
                            .n_exp = 1,
                            .n_out = a->d_model,
                            .n_in = a->d_shared,
                            .n_target = 1,
                            .target = {LORA_SHARED_DOWN},
                            .rows = {a->d_model}};
}

static int load(struct fill *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    char part[3][LORA_MODULE_TEXT];
    for (int i = 0; i < 3; i++) lora_target_module(a->names, LORA_SHARED_GATE + (enum lora_target)i, part[i]);
    const struct stored_rows up = {
        .part = {part[0], part[1]}, .rows = {a->d_shared, a->d_shared}, .n_in = a->d_model, .n_part = 2, .ffn = true};
    const struct stored_rows down = {
        .part = {part[2]}, .rows = {a->d_model}, .n_in = a->d_shared, .n_part = 1, .ffn = true};
    return ffn_moe.load(f, a, layer, lw) || weights_rows(f, &lw->shared_up, &up, false, false) ||
                   weights_rows(f, &lw->shared_down, &down, false, false) ||
                   (a->shared_gate && weights_matrix(f, &lw->shared_gate, a->names->shared_gate, 1, a->d_model))
               ? -1
               : 0;
}

static void plan_gate(const struct acts_plan *p, struct shared_acts *h)
{
    struct arena *work = &p->dev->work;
    const int64_t n_tok = p->n_tok;
    h->gate = (struct route){
        .idx = arena_tensor_2d(work, DT_I32, n_tok, 1),
        .gate = arena_tensor_2d(work, p->dev->stat_dtype, n_tok, 1),
        .offs = arena_tensor_1d(work, DT_I32, 2),
        .row_slot = arena_tensor_1d(work, DT_I32, n_tok),
        .slot_row = arena_tensor_2d(work, DT_I32, n_tok, 1),
    };
    h->logits = arena_tensor_2d(work, p->dev->stat_dtype, n_tok, 1);
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct shared_acts *h = &s->shared;
    ffn_moe.plan(p, s, group);
    if (group == ACTS_KEPT) {
        if (p->a->shared_gate) plan_gate(p, h);
        h->down_xa = acts_xa(p, p->n_tok, &p->w.shared_down.lora);
    }
    if (group == ACTS_FFN) {
        h->pre = acts_2d(p, p->n_tok, 2 * p->a->d_shared);
        h->up_xa = acts_xa(p, p->n_tok, &p->w.shared_up.lora);
    }
}

static struct tensor push(const struct block *b, const struct layer_acts *s, int64_t cols)
{
    return arena_tensor_2d(&b->dev->work, b->dev->act_dtype, s->x.shape[0], cols);
}

static void up_fwd(const struct block *b, const struct layer_acts *s)
{
    input_quant_linear_fwd(b->dev, s->shared.pre, s->shared.up_xa, s->ffn_norm, &b->w->shared_up, absent);
}

/* y = s->h + shared(s->ffn_norm) */
static void shared_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    struct shared_acts *h = &s->shared;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor act = push(b, s, b->a->d_shared);
    if (b->a->shared_gate)
        /* 1 gate */ op_router_fwd(dev, &h->gate, h->logits, s->ffn_norm, &w->shared_gate, absent, &gate_kind);
    /* 2 up   */ up_fwd(b, s);
    /* 3 act  */ op_glu_fwd(dev, act, h->pre, h->gate.gate, &b->a->glu);
    /* 4 down */ input_quant_linear_fwd(dev, y, h->down_xa, act, &w->shared_down, s->h);
    arena_release(&dev->work, mark);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const int64_t mark = arena_mark(&b->dev->work);
    struct layer_acts routed = *s;
    routed.h = push(b, s, b->a->d_model);
    shared_fwd(b, s, routed.h);
    ffn_moe.fwd(b, &routed, y);
    arena_release(&b->dev->work, mark);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    ffn_moe.recompute(b, s);
    up_fwd(b, s);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct shared_acts *h = &s->shared;
    const struct aux none = {.coef = 0};
    const int64_t mark = arena_mark(&dev->work), width = b->a->d_shared;
    ffn_moe.bwd(b, s, dnorm, dres);
    struct tensor dx = push(b, s, b->a->d_model), dpre = push(b, s, 2 * width), dact = push(b, s, width);
    struct tensor act = push(b, s, width), dgate = absent;
    if (b->a->shared_gate) dgate = arena_tensor_2d(&dev->work, dev->stat_dtype, s->x.shape[0], 1);
    op_glu_fwd(dev, act, h->pre, h->gate.gate, &b->a->glu);
    /* 4 down */ input_quant_linear_bwd(dev, dact, dres, act, h->down_xa, &w->shared_down);
    /* 3 act  */ op_glu_bwd(dev, dpre, dgate, dact, h->pre, h->gate.gate, &b->a->glu);
    /* 2 up   */ input_quant_linear_bwd(dev, dx, dpre, s->ffn_norm, h->up_xa, &w->shared_up);
    if (b->a->shared_gate)
        /* 1 gate */ op_router_bwd(dev, dx, dgate, &h->gate, h->logits, &w->shared_gate, &none, &gate_kind);
    op_add(dev, dnorm, dx);
    arena_release(&dev->work, mark);
}

const struct ffn_kind ffn_shared = {true, products, load, plan, fwd, recompute, bwd};
