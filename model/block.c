/* block.c - one layer: forward in four numbered steps, backward in the same steps in reverse order.
 *
 *   x [T,D] -> 1 norm -> attn_norm -> 2 mixer -> + x = h [T,D]        mixer: attention                 mixer_*.c
 *   h [T,D] -> 3 norm -> ffn_norm  -> 4 ffn   -> + h = y [T,D]        ffn:   experts, or dense   ffn_*.c */
#include "model/block.h"

void layer_adapt(struct layer_weights *w, const struct arch *a, int64_t layer, const struct lora_layer *lora)
{
    struct product p[LAYER_PRODUCTS];
    layer_products(a, layer, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++) {
        struct proj *proj = layer_proj(w, &p[i]);
        if (!p[i].n_out) continue;
        proj->lora = lora->of[i].lora;
        proj->grad = lora->of[i].grad;
        proj->quant = lora->of[i].quant;
        proj->in = lora->of[i].in;
    }
}

static void norm_mix(const struct block *b, struct layer_acts *s)
{
    /* 1 norm  */ op_rmsnorm_fwd(b->dev, s->attn_norm, s->attn_rstd, s->x, b->w->attn_norm, &b->a->norm);
    /* 2 mixer */ b->a->mixer[b->layer]->fwd(b, s);
}

static void norm_ffn(const struct block *b, struct layer_acts *s)
{
    /* 3 norm  */ op_rmsnorm_fwd(b->dev, s->ffn_norm, s->ffn_rstd, s->h, b->w->ffn_norm, &b->a->norm);
}

void block_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    norm_mix(b, s);
    norm_ffn(b, s);
    /* 4 ffn   */ b->a->ffn[b->layer]->fwd(b, s, y);
}

void block_recompute(const struct block *b, struct layer_acts *s, enum recompute mode)
{
    if (mode == RECOMPUTE_NONE) return;
    if (mode == RECOMPUTE_FULL) norm_mix(b, s);
    norm_ffn(b, s);
    /* 4 ffn   */ b->a->ffn[b->layer]->recompute(b, s);
}

void block_bwd(const struct block *b, const struct layer_acts *s, struct tensor dres)
{
    struct device *dev = b->dev;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor dnorm = arena_tensor_2d(&dev->work, dev->act_dtype, s->x.shape[0], b->a->d_model);
    /* 4 ffn   */ b->a->ffn[b->layer]->bwd(b, s, dnorm, dres);
    /* 3 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->h, s->ffn_rstd, b->w->ffn_norm);
    /* 2 mixer */ b->a->mixer[b->layer]->bwd(b, s, dnorm, dres);
    /* 1 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->x, s->attn_rstd, b->w->attn_norm);
    arena_release(&dev->work, mark);
}
