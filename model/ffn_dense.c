/* ffn_dense.c - a dense feed-forward network, computed as one expert that every token uses with weight 1. It always
 * runs on the token's rank. Its router is one row of zeros: the gate is 1 and the router's gradient 0. No LoRA target
 * covers it. */
#include "model/ffn_moe.h"

static const struct router always = {.kind = ROUTER_CHOSEN};

static int load(struct fill *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct ffn_size z = arch_ffn(a, layer);
    const struct stored_experts up = {NULL, {"mlp.gate_proj", "mlp.up_proj"}, 2 * z.d_ff, a->d_model};
    const struct stored_experts down = {NULL, {"mlp.down_proj"}, a->d_model, z.d_ff};
    weights_zeros(f, &lw->router, 1, a->d_model);
    return weights_experts(f, &lw->up, &up, &lw->down, &down);
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group g)
{
    moe_plan(p, &experts_local, s, g);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    moe_fwd(b, &experts_local, &always, s, y);
}

static void recompute(const struct block *b, struct layer_acts *s) { experts_local.recompute(b, s); }

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    moe_bwd(b, &experts_local, &always, s, dnorm, dres);
}

const struct ffn_kind ffn_dense = {false, moe_products, load, plan, fwd, recompute, bwd};
