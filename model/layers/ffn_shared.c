/* ffn_shared.c - routed experts (ffn_moe.c) and shared experts beside them: one network that every token uses
 * (glu_network.h), in some families scaled by a gate per token.
 *
 *   ffn_norm [T,D] -> gate [T,1] = sigmoid(ffn_norm w)
 *   network(ffn_norm) * gate + residual = what the routed experts add their output to
 *
 * The gate is computed as a router of one expert. It multiplies act instead of the output of down, with the same
 * result. */
#include <stddef.h>

#include "model/layers/glu_network.h"

static const struct tensor absent = {0};
static const struct router gate_kind = {.kind = ROUTER_SIGMOID, .scale = 1};

static struct glu_network network(const struct layer_weights *w)
{
    return (struct glu_network){&w->shared_up, &w->shared_down};
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    ffn_moe.products(a, layer, p);
    glu_network_products(a, a->d_shared, offsetof(struct layer_weights, shared_up),
                         offsetof(struct layer_weights, shared_down), LORA_SHARED_GATE, p + 2);
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    return ffn_moe.load(f, a, layer, lw) ||
                   glu_network_load(f, a, a->d_shared, LORA_SHARED_GATE, &lw->shared_up, &lw->shared_down) ||
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
    const struct glu_network n = network(&p->w);
    ffn_moe.plan(p, s, group);
    if (group == ACTS_KEPT && p->a->shared_gate) plan_gate(p, &s->shared);
    glu_network_plan(p, s, group, p->a->d_shared, &n);
}

static struct tensor push(const struct block *b, const struct layer_acts *s)
{
    return arena_tensor_2d(&b->dev->work, b->dev->act_dtype, s->x.shape[0], b->a->d_model);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct glu_network n = network(b->w);
    struct shared_acts *h = &s->shared;
    const int64_t mark = arena_mark(&b->dev->work);
    struct layer_acts routed = *s;
    routed.ffn_res = push(b, s);
    if (b->a->shared_gate)
        op_router_fwd(b->dev, &h->gate, h->logits, s->ffn_norm, &b->w->shared_gate, absent, &gate_kind);
    glu_network_fwd(b, s, &n, routed.ffn_res, s->ffn_res);
    ffn_moe.fwd(b, &routed, y);
    arena_release(&b->dev->work, mark);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    const struct glu_network n = network(b->w);
    ffn_moe.recompute(b, s);
    glu_network_recompute(b, s, &n);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres,
                struct tensor dh)
{
    struct device *dev = b->dev;
    const struct glu_network n = network(b->w);
    const struct shared_acts *h = &s->shared;
    const struct aux none = {.coef = 0};
    const int64_t mark = arena_mark(&dev->work);
    ffn_moe.bwd(b, s, dnorm, dres, dh);
    struct tensor dx = push(b, s), dgate = absent;
    if (b->a->shared_gate) dgate = arena_tensor_2d(&dev->work, dev->stat_dtype, s->x.shape[0], 1);
    glu_network_bwd(b, s, &n, dx, dgate, dres);
    if (b->a->shared_gate) op_router_bwd(dev, dx, dgate, &h->gate, h->logits, &b->w->shared_gate, &none, &gate_kind);
    op_add(dev, dnorm, dx);
    arena_release(&dev->work, mark);
}

const struct ffn_kind ffn_shared = {true, products, load, plan, fwd, recompute, bwd};
