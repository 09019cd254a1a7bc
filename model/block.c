/* block.c - one layer: forward in four numbered steps, backward in the same steps in reverse order.
 *
 *   x [T,D] -> 1 norm -> attn_norm -> 2 mixer -> + x = h [T,D]    mixer: attention or recurrence   layers/mixer_*.c
 *   h [T,D] -> 3 norm -> ffn_norm  -> 4 ffn   -> + h = y [T,D]    ffn:   experts, or dense         layers/ffn_*.c
 *
 * A layer may lack the mixer (then h is x) or the network (y is h). In some families steps 2 and 4 normalise the output
 * before they add the residual. Some multiply y by a number.
 *
 * With N residual streams (hyper-connections, kernels/ops/ops.h) x, y and the streams between mixer and network are
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
        proj->rows = lora->of[i].rows;
        proj->grad = lora->of[i].grad;
        proj->dora = lora->of[i].dora;
        proj->quant = lora->of[i].quant;
        proj->in = lora->of[i].in;
    }
}

static const struct tensor absent = {0};

static const struct mixer_kind *mixer_of(const struct block *b) { return b->a->mixer[b->layer]; }
static const struct ffn_kind *ffn_of(const struct block *b) { return b->a->ffn[b->layer]; }

/* The input of a norm: the residual x, or the sum of its streams. */
static struct tensor sum_streams(const struct block *b, const struct site_acts *site, struct tensor x,
                                 const struct hyper *h)
{
    if (!h->n_stream) return x;
    op_hyper_pre_fwd(b->dev, site->sum, site->m, site->rstd, x, h);
    return site->sum;
}

/* y = x + norm(out) */
static void add_normed(const struct block *b, struct tensor y, const struct post_acts *post, struct tensor x,
                       struct tensor weight)
{
    op_rmsnorm_fwd(b->dev, y, post->rstd, post->out, weight, &b->a->norm);
    op_add(b->dev, y, x);
}

/* The gradient of out from that of y = x + norm(out), or dy itself without norm. */
static struct tensor normed_bwd(const struct block *b, struct tensor dy, const struct post_acts *post,
                                struct tensor weight)
{
    if (!weight.ndim) return dy;
    const struct tensor dout = arena_tensor_2d(&b->dev->work, dy.dtype, dy.shape[0], dy.shape[1]);
    device_zero(b->dev, dout); /* the norm adds to it */
    op_rmsnorm_bwd(b->dev, dout, dy, post->out, post->rstd, weight);
    return dout;
}

static void run_mixer(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct mixer_kind *m = mixer_of(b);
    (!b->cache ? m->fwd : b->decode ? m->decode : m->prefill)(b, s, y);
}

/* Runs the mixer. y: the residual after it; with several streams only its output. */
static void mix(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct layer_weights *w = b->w;
    const bool normed = w->mixer_post.ndim, alone = normed || w->hyper_attn.n_stream;
    if (!mixer_of(b)) return;
    const struct tensor x = sum_streams(b, &s->streams.mixer, s->x, &w->hyper_attn);
    s->mixer_res = alone ? absent : s->x;
    /* 1 norm  */ op_rmsnorm_fwd(b->dev, s->attn_norm, s->attn_rstd, x, w->attn_norm, &b->a->norm);
    /* 2 mixer */ run_mixer(b, s, normed ? s->mixer_post.out : y);
    if (normed) add_normed(b, y, &s->mixer_post, s->x, w->mixer_post);
}

static void norm_ffn(const struct block *b, struct layer_acts *s)
{
    const struct layer_weights *w = b->w;
    const struct stream_acts *t = &s->streams;
    struct tensor h = block_between(b, s);
    s->ffn_res = w->ffn_post.ndim ? absent : h;
    if (w->hyper_ffn.n_stream) {
        op_hyper_post_fwd(b->dev, t->h, s->x, s->h, t->mixer.m, &w->hyper_attn);
        h = sum_streams(b, &t->ffn, t->h, &w->hyper_ffn);
        s->ffn_res = absent;
    }
    /* 3 norm  */ op_rmsnorm_fwd(b->dev, s->ffn_norm, s->ffn_rstd, h, w->ffn_norm, &b->a->norm);
}

static void network(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct layer_weights *w = b->w;
    const struct stream_acts *t = &s->streams;
    const bool normed = w->ffn_post.ndim, streams = w->hyper_ffn.n_stream;
    if (!ffn_of(b)) return;
    norm_ffn(b, s);
    /* 4 ffn   */ ffn_of(b)->fwd(b, s, normed ? s->ffn_post.out : streams ? t->out : y);
    if (normed) add_normed(b, y, &s->ffn_post, block_between(b, s), w->ffn_post);
    if (streams) op_hyper_post_fwd(b->dev, y, t->h, t->out, t->ffn.m, &w->hyper_ffn);
}

void block_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct host_ring *mixer = &b->offload[OFFLOAD_MIXER], *ffn = &b->offload[OFFLOAD_FFN];
    host_ring_need(mixer, b->dev, b->layer, PASS_FORWARD);
    mix(b, s, ffn_of(b) ? s->h : y);
    host_ring_done(mixer, b->dev, b->layer, PASS_FORWARD);
    host_ring_need(ffn, b->dev, b->layer, PASS_FORWARD);
    network(b, s, y);
    host_ring_done(ffn, b->dev, b->layer, PASS_FORWARD);
    if (b->a->names->layer_scale) op_scale(b->dev, y, b->w->scale);
}

/* Computes the input norms of the saved groups if NORMS is not saved; a recomputed group computes its own. */
static void norms_again(const struct block *b, const struct layer_acts *s, int saved)
{
    const bool streams = b->w->hyper_attn.n_stream > 0;
    const struct tensor x = streams ? s->streams.mixer.sum : s->x,
                        h = streams ? s->streams.ffn.sum : block_between(b, s);
    if (saved & SAVE_NORMS) return;
    if (saved & SAVE_MIXER && mixer_of(b))
        /* 1 norm  */ op_rmsnorm_fwd(b->dev, s->attn_norm, s->attn_rstd, x, b->w->attn_norm, &b->a->norm);
    if (saved & SAVE_FFN && ffn_of(b))
        /* 3 norm  */ op_rmsnorm_fwd(b->dev, s->ffn_norm, s->ffn_rstd, h, b->w->ffn_norm, &b->a->norm);
}

void block_recompute(const struct block *b, struct layer_acts *s, int saved)
{
    struct block again = *b;
    again.core_saved = saved & SAVE_CORE;
    if (!(saved & SAVE_MIXER)) mix(&again, s, s->h);
    norms_again(b, s, saved);
    if ((saved & (SAVE_CORE | SAVE_MIXER)) == SAVE_MIXER && mixer_of(b)) mixer_of(b)->core(b, s);
    if (saved & SAVE_FFN || !ffn_of(b)) return;
    norm_ffn(b, s);
    /* 4 ffn   */ ffn_of(b)->recompute(b, s);
}

/* Backward with one residual: dres is the gradient of y, of h and of x in turn. */
static void residual_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    if (ffn_of(b)) {
        /* 4 ffn   */ ffn_of(b)->bwd(b, s, dnorm, normed_bwd(b, dres, &s->ffn_post, w->ffn_post), dres);
        /* 3 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, block_between(b, s), s->ffn_rstd, w->ffn_norm);
    }
    host_ring_done(&b->offload[OFFLOAD_FFN], dev, b->layer, PASS_BACKWARD);
    if (!mixer_of(b)) return;
    /* 2 mixer */ mixer_of(b)->bwd(b, s, dnorm, normed_bwd(b, dres, &s->mixer_post, w->mixer_post));
    /* 1 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->x, s->attn_rstd, w->attn_norm);
}

/* Backward with several streams. Gradients: df of the output of network or mixer, dm of the streams' weights, dsum of
 * the sum of the streams. */
static void streams_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct stream_acts *t = &s->streams;
    const struct site_acts *site = &t->ffn;
    struct tensor df = arena_tensor_2d(&dev->work, dev->act_dtype, dnorm.shape[0], dnorm.shape[1]), dsum = df;
    struct tensor dm = arena_tensor_2d(&dev->work, dev->stat_dtype, site->m.shape[0], site->m.shape[1]);

    op_hyper_post_bwd(dev, df, dres, dm, dres, t->h, t->out, site->m, &w->hyper_ffn);
    /* 4 ffn   */ ffn_of(b)->bwd(b, s, dnorm, df, absent);
    device_zero(dev, dsum); /* the norm adds to it */
    /* 3 norm  */ op_rmsnorm_bwd(dev, dsum, dnorm, site->sum, s->ffn_rstd, w->ffn_norm);
    op_hyper_pre_bwd(dev, dres, dm, dsum, t->h, site->m, site->rstd, &w->hyper_ffn);
    host_ring_done(&b->offload[OFFLOAD_FFN], dev, b->layer, PASS_BACKWARD);
    site = &t->mixer;
    op_hyper_post_bwd(dev, df, dres, dm, dres, s->x, s->h, site->m, &w->hyper_attn);
    /* 2 mixer */ mixer_of(b)->bwd(b, s, dnorm, df);
    device_zero(dev, dsum);
    /* 1 norm  */ op_rmsnorm_bwd(dev, dsum, dnorm, site->sum, s->attn_rstd, w->attn_norm);
    op_hyper_pre_bwd(dev, dres, dm, dsum, s->x, site->m, site->rstd, &w->hyper_attn);
}

void block_bwd(const struct block *b, const struct layer_acts *s, struct tensor dres)
{
    struct device *dev = b->dev;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor dnorm = arena_tensor_2d(&dev->work, dev->act_dtype, s->x.shape[0], b->a->d_model);
    if (b->a->names->layer_scale) op_scale(dev, dres, b->w->scale);
    (b->w->hyper_attn.n_stream ? streams_bwd : residual_bwd)(b, s, dnorm, dres);
    host_ring_done(&b->offload[OFFLOAD_MIXER], dev, b->layer, PASS_BACKWARD);
    arena_release(&dev->work, mark);
}
