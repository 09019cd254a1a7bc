/* block.c - one layer: forward in four numbered steps, backward in the same steps in reverse order.
 *
 *   x [T,D] -> 1 norm -> attn_norm -> 2 mixer -> + x = h [T,D]        mixer: attention                 mixer_*.c
 *   h [T,D] -> 3 norm -> ffn_norm  -> 4 ffn   -> + h = y [T,D]        ffn:   experts, or dense   ffn_*.c
 *
 * With N residual streams (hyper-connections, kernels/ops/ops.h) x, the streams between mixer and network and y are
 * [T,N*D]. Steps 1 and 3 then begin with the sum of the streams. After steps 2 and 4 the output, without residual, is
 * added to the mixed streams. */
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

static const struct tensor absent = {0};

/* The input of a norm: the residual x, or the sum of its streams. */
static struct tensor sum_streams(const struct block *b, const struct site_acts *site, struct tensor x,
                                 const struct hyper *h)
{
    if (!h->n_stream) return x;
    op_hyper_pre_fwd(b->dev, site->sum, site->m, site->rstd, x, h);
    return site->sum;
}

static void norm_mix(const struct block *b, struct layer_acts *s)
{
    const struct layer_weights *w = b->w;
    const struct tensor x = sum_streams(b, &s->streams.mixer, s->x, &w->hyper_attn);
    s->mixer_res = w->hyper_attn.n_stream ? absent : s->x;
    /* 1 norm  */ op_rmsnorm_fwd(b->dev, s->attn_norm, s->attn_rstd, x, w->attn_norm, &b->a->norm);
    /* 2 mixer */ b->a->mixer[b->layer]->fwd(b, s);
}

static void norm_ffn(const struct block *b, struct layer_acts *s)
{
    const struct layer_weights *w = b->w;
    const struct stream_acts *t = &s->streams;
    struct tensor h = s->h;
    s->ffn_res = s->h;
    if (w->hyper_ffn.n_stream) {
        op_hyper_post_fwd(b->dev, t->h, s->x, s->h, t->mixer.m, &w->hyper_attn);
        h = sum_streams(b, &t->ffn, t->h, &w->hyper_ffn);
        s->ffn_res = absent;
    }
    /* 3 norm  */ op_rmsnorm_fwd(b->dev, s->ffn_norm, s->ffn_rstd, h, w->ffn_norm, &b->a->norm);
}

void block_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct stream_acts *t = &s->streams;
    const struct hyper *hyper = &b->w->hyper_ffn;
    const struct offload *mixer = &b->offload[OFFLOAD_MIXER], *ffn = &b->offload[OFFLOAD_FFN];
    offload_reuse(mixer, b->dev, b->layer);
    norm_mix(b, s);
    offload_store(mixer, b->dev, b->layer);
    offload_reuse(ffn, b->dev, b->layer);
    norm_ffn(b, s);
    /* 4 ffn   */ b->a->ffn[b->layer]->fwd(b, s, hyper->n_stream ? t->out : y);
    if (hyper->n_stream) op_hyper_post_fwd(b->dev, y, t->h, t->out, t->ffn.m, hyper);
    offload_store(ffn, b->dev, b->layer);
}

/* The norms of groups that are saved without them. The other norms are computed with their group. */
static void norms_again(const struct block *b, const struct layer_acts *s, int saved)
{
    const bool streams = b->w->hyper_attn.n_stream > 0;
    const struct tensor x = streams ? s->streams.mixer.sum : s->x, h = streams ? s->streams.ffn.sum : s->h;
    if (saved & SAVE_NORMS) return;
    if (saved & SAVE_MIXER)
        /* 1 norm  */ op_rmsnorm_fwd(b->dev, s->attn_norm, s->attn_rstd, x, b->w->attn_norm, &b->a->norm);
    if (saved & SAVE_FFN)
        /* 3 norm  */ op_rmsnorm_fwd(b->dev, s->ffn_norm, s->ffn_rstd, h, b->w->ffn_norm, &b->a->norm);
}

void block_recompute(const struct block *b, struct layer_acts *s, int saved)
{
    struct block again = *b;
    again.core_saved = saved & SAVE_CORE;
    if (!(saved & SAVE_MIXER)) norm_mix(&again, s);
    norms_again(b, s, saved);
    if ((saved & (SAVE_CORE | SAVE_MIXER)) == SAVE_MIXER) b->a->mixer[b->layer]->core(b, s);
    if (saved & SAVE_FFN) return;
    norm_ffn(b, s);
    /* 4 ffn   */ b->a->ffn[b->layer]->recompute(b, s);
}

/* One residual: dres is the gradient of y, of h and of x in turn. */
static void residual_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    /* 4 ffn   */ b->a->ffn[b->layer]->bwd(b, s, dnorm, dres);
    /* 3 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->h, s->ffn_rstd, b->w->ffn_norm);
    offload_load(&b->offload[OFFLOAD_FFN], dev, b->layer);
    /* 2 mixer */ b->a->mixer[b->layer]->bwd(b, s, dnorm, dres);
    /* 1 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->x, s->attn_rstd, b->w->attn_norm);
}

/* Several streams: the same with the gradients df of a network's or mixer's output, dm of the weights of the streams,
 * dsum of their sum. */
static void streams_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct stream_acts *t = &s->streams;
    const struct site_acts *site = &t->ffn;
    struct tensor df = arena_tensor_2d(&dev->work, dev->act_dtype, dnorm.shape[0], dnorm.shape[1]), dsum = df;
    struct tensor dm = arena_tensor_2d(&dev->work, dev->stat_dtype, site->m.shape[0], site->m.shape[1]);

    op_hyper_post_bwd(dev, df, dres, dm, dres, t->h, t->out, site->m, &w->hyper_ffn);
    /* 4 ffn   */ b->a->ffn[b->layer]->bwd(b, s, dnorm, df);
    device_zero(dev, dsum); /* the norm adds to it */
    /* 3 norm  */ op_rmsnorm_bwd(dev, dsum, dnorm, site->sum, s->ffn_rstd, w->ffn_norm);
    op_hyper_pre_bwd(dev, dres, dm, dsum, t->h, site->m, site->rstd, &w->hyper_ffn);
    offload_load(&b->offload[OFFLOAD_FFN], dev, b->layer);
    site = &t->mixer;
    op_hyper_post_bwd(dev, df, dres, dm, dres, s->x, s->h, site->m, &w->hyper_attn);
    /* 2 mixer */ b->a->mixer[b->layer]->bwd(b, s, dnorm, df);
    device_zero(dev, dsum);
    /* 1 norm  */ op_rmsnorm_bwd(dev, dsum, dnorm, site->sum, s->attn_rstd, w->attn_norm);
    op_hyper_pre_bwd(dev, dres, dm, dsum, s->x, site->m, site->rstd, &w->hyper_attn);
}

void block_bwd(const struct block *b, const struct layer_acts *s, struct tensor dres)
{
    struct device *dev = b->dev;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor dnorm = arena_tensor_2d(&dev->work, dev->act_dtype, s->x.shape[0], b->a->d_model);
    (b->w->hyper_attn.n_stream ? streams_bwd : residual_bwd)(b, s, dnorm, dres);
    offload_load(&b->offload[OFFLOAD_MIXER], dev, b->layer);
    arena_release(&dev->work, mark);
}
