/* ffn_moe.c - routed experts.
 *
 *   ffn_norm [T,D] -> route: idx, gate [T,J], offs [E+1] -> experts (experts.h): gather [M,D] -> gate_up (+lora) [M,U]
 *                  -> act [M,F] -> down (+lora) [M,D] -> combine by gate -> + h = y [T,D]
 *
 * U = glu_cols(F): gate and up, or up alone. */
#include <stddef.h>
#include <stdio.h>

#include "model/layers/experts.h"

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    const struct ffn_size z = arch_ffn(a, layer);
    const int64_t up = glu_cols(&a->glu, z.d_ff), d = arch_expert_cols(a);
    p[0] = (struct product){.proj = offsetof(struct layer_weights, up),
                            .n_exp = z.n_exp,
                            .n_out = up,
                            .n_in = d,
                            .experts = true,
                            .n_target = 1,
                            .target = {LORA_UP},
                            .rows = {up}};
    p[1] = (struct product){.proj = offsetof(struct layer_weights, down),
                            .n_exp = z.n_exp,
                            .n_out = d,
                            .n_in = z.d_ff,
                            .experts = true,
                            .n_target = 1,
                            .target = {LORA_DOWN},
                            .rows = {d}};
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct ffn_size z = arch_ffn(a, layer);
    const struct tensor_names *n = a->names;
    const char *other = n->router[1] ? n->router[1] : n->router[0];
    const char *router = weights_has(f, other, ".weight") || weights_has(f, other, ".bias") ? other : n->router[0];
    char bias[ARCH_NAME];
    char up_name[LORA_MODULE_TEXT], down_name[LORA_MODULE_TEXT];
    snprintf(up_name, sizeof(up_name), "%s.%s", lora_experts_module(n),
             glu_gated(&a->glu) ? "gate_up_proj" : "up_proj");
    lora_stack_module(n, LORA_DOWN, down_name);
    const int64_t d = arch_expert_cols(a);
    const struct stored_experts gated = {up_name, {n->gate, n->up}, 2 * z.d_ff, d};
    const struct stored_experts plain = {up_name, {n->up}, z.d_ff, d};
    const struct stored_experts down = {down_name, {n->down}, d, z.d_ff};
    const bool hashed = layer < a->n_hash;
    static const char table[] = "mlp.gate.tid2eid", keys[] = "num_hash_layers or mlp_layer_types";
    arch_router_bias(n, router, bias);
    if (hashed ? weights_refuse(f, bias, "", "router bias", keys)
               : weights_refuse(f, table, "", "table of experts by token id", keys))
        return -1;
    return weights_matrix(f, &lw->router, router, z.n_exp, a->d_model) ||
                   (hashed && weights_hash_table(f, &lw->hash, table, z.top_k, z.n_exp)) ||
                   (a->router_bias && !hashed && weights_vector(f, &lw->router_bias, bias, "", z.n_exp)) ||
                   weights_experts(f, &lw->up, glu_gated(&a->glu) ? &gated : &plain, &lw->down, &down)
               ? -1
               : 0;
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    const struct experts *experts = p->experts;
    struct moe_acts *m = &s->moe;
    struct device *dev = p->dev;
    struct arena *work = &dev->work;
    const struct ffn_size z = arch_ffn(p->a, p->layer);
    const int64_t n_tok = p->n_tok, n_row = experts->n_row(p, &z);
    if (group == ACTS_KEPT)
        m->route = (struct route){
            .idx = arena_tensor_2d(work, DT_I32, n_tok, z.top_k),
            .gate = arena_tensor_2d(work, dev->stat_dtype, n_tok, z.top_k),
            .offs = arena_tensor_1d(work, DT_I32, z.n_exp + 1),
            .row_slot = arena_tensor_1d(work, DT_I32, n_tok * z.top_k),
            .slot_row = arena_tensor_2d(work, DT_I32, n_tok, z.top_k),
        };
    if (group == ACTS_KEPT && p->a->names->gate_scale)
        m->share = arena_tensor_2d(work, dev->stat_dtype, n_tok, z.top_k);
    if (group == (p->keep_logits ? ACTS_KEPT : ACTS_SCRATCH))
        m->logits = arena_tensor_2d(work, dev->stat_dtype, n_tok, z.n_exp);
    if (group == ACTS_FFN) {
        m->pre = acts_2d(p, n_row, glu_cols(&p->a->glu, z.d_ff));
        m->up_xa = acts_xa(p, n_row, &p->w.up.lora);
    }
    if (group == experts->down_ha) m->down_ha = acts_xa(p, n_row, &p->w.down.lora);
}

/* In the first layers the token's id chooses the experts. */
static bool hashes(const struct block *b) { return b->layer < b->a->n_hash; }

static struct router router_of(const struct block *b)
{
    struct router r = b->a->router;
    r.given = b->given_experts || hashes(b);
    return r;
}

/* The route with the gates of the router, before their scales. */
static struct route routed_by(const struct moe_acts *m)
{
    struct route r = m->route;
    if (m->share.ndim) r.gate = m->share;
    return r;
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const struct router router = router_of(b);
    struct moe_acts *m = &s->moe;
    struct route chosen = routed_by(m);
    if (hashes(b)) op_hash_route(dev, m->route.idx, b->w->hash, b->tok);
    /* 1 route   */ op_router_fwd(dev, &chosen, m->logits, m->router_in.ndim ? m->router_in : s->ffn_norm,
                                  &b->w->router, b->w->router_bias, &router);
    if (m->share.ndim) op_scale_gates(dev, m->route.gate, m->share, m->route.idx, b->w->parallel.gate_scale);
    op_route_sort(dev, &m->route, m->logits.shape[1]);
    if (b->aux->coef != 0) op_aux_stats(dev, b->aux, m->logits, &m->route);
    host_ring_need(b->host_experts, dev, b->layer, PASS_FORWARD);
    /* 2 experts */ b->experts->fwd(b, s, y);
    host_ring_done(b->host_experts, dev, b->layer, PASS_FORWARD);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres,
                struct tensor dh)
{
    (void)dh;
    struct device *dev = b->dev;
    const struct router router = router_of(b);
    const struct moe_acts *m = &s->moe;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor dgate = arena_tensor_2d(&dev->work, dev->stat_dtype, s->x.shape[0], m->route.idx.shape[1]);
    host_ring_need(b->host_experts, dev, b->layer, PASS_BACKWARD);
    /* 2 experts */ b->experts->bwd(b, s, dnorm, dgate, dres);
    host_ring_done(b->host_experts, dev, b->layer, PASS_BACKWARD);
    if (m->share.ndim) op_scale_gates(dev, dgate, dgate, m->route.idx, b->w->parallel.gate_scale);
    const struct route chosen = routed_by(m);
    /* 1 route   */ op_router_bwd(dev, m->drouter_in.ndim ? m->drouter_in : dnorm, dgate, &chosen, m->logits,
                                  &b->w->router, b->aux, &router);
    arena_release(&dev->work, mark);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    host_ring_need(b->host_experts, b->dev, b->layer, PASS_BACKWARD);
    b->experts->recompute(b, s);
}

const struct ffn_kind ffn_moe = {true, products, load, plan, fwd, recompute, bwd};
