/* ffn_dense.c - a dense feed-forward network (glu_network.h). */
#include <stddef.h>

#include "model/layers/glu_network.h"

static struct glu_network network(const struct layer_weights *w) { return (struct glu_network){&w->up, &w->down}; }

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    (void)layer;
    glu_network_products(a, a->d_dense, offsetof(struct layer_weights, up), offsetof(struct layer_weights, down),
                         LORA_DENSE_GATE, p);
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    char part[3][LORA_MODULE_TEXT];
    for (int i = 0; i < 3; i++) lora_target_module(a->names, LORA_DENSE_GATE + (enum lora_target)i, part[i]);
    const bool gated = glu_network_first(a) == 0;
    const struct stored_experts up = {
        NULL, {gated ? part[0] : part[1], gated ? part[1] : NULL}, glu_cols(&a->glu, a->d_dense), a->d_model};
    const struct stored_experts down = {NULL, {part[2]}, a->d_model, a->d_dense};
    (void)layer;
    return weights_experts(f, &lw->up, &up, &lw->down, &down);
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    const struct glu_network n = network(&p->w);
    glu_network_plan(p, s, group, p->a->d_dense, &n);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct glu_network n = network(b->w);
    glu_network_fwd(b, s, &n, y, s->ffn_res);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    const struct glu_network n = network(b->w);
    glu_network_recompute(b, s, &n);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres,
                struct tensor dh)
{
    (void)dh;
    const struct glu_network n = network(b->w);
    glu_network_bwd(b, s, &n, dnorm, (struct tensor){0}, dres);
}

const struct ffn_kind ffn_dense = {false, products, load, plan, fwd, recompute, bwd};
