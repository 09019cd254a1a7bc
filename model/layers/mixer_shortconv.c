/* mixer_shortconv.c - the gated short convolution of LFM2.
 *
 *   attn_norm [T,D] -> B, C, x (+lora) [T,3D] -> C * convolution of B * x [T,D] -> out (+lora) -> + x = h
 *
 * The convolution has no activation; it begins again at every document. */
#include <stddef.h>

#include "model/layers/linear.h"
#include "model/layer.h"

static const struct tensor absent = {0};

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    const int64_t d = a->d_model;
    (void)layer;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, shortconv.in),
                            .n_exp = 1,
                            .n_out = 3 * d,
                            .n_in = d,
                            .n_target = 1,
                            .target = {LORA_CONV_IN},
                            .rows = {3 * d}};
    p[1] = (struct product){.proj = offsetof(struct layer_weights, shortconv.out),
                            .n_exp = 1,
                            .n_out = d,
                            .n_in = d,
                            .n_target = 1,
                            .target = {LORA_CONV_OUT},
                            .rows = {d}};
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const int64_t d = a->d_model;
    const struct stored_rows in = {.part = {"conv.in_proj"}, .rows = {3 * d}, .n_in = d, .n_part = 1};
    const struct stored_rows out = {.part = {"conv.out_proj"}, .rows = {d}, .n_in = d, .n_part = 1};
    const bool bias = a->conv.bias;
    (void)layer;
    if (!bias && weights_refuse(f, "conv.conv", ".bias", "bias of the convolution", "conv_bias")) return -1;
    return weights_rows(f, &lw->shortconv.in, &in, bias) ||
                   weights_conv(f, &lw->shortconv.conv, "conv.conv", d, a->conv.n_tap) ||
                   (bias && weights_vector(f, &lw->shortconv.bias, "conv.conv", ".bias", d)) ||
                   weights_rows(f, &lw->shortconv.out, &out, bias)
               ? -1
               : 0;
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct shortconv_acts *t = &s->shortconv;
    const int64_t d = p->a->d_model;
    if (group == ACTS_CORE) t->y = acts_2d(p, p->n_tok, d);
    if (group != ACTS_MIXER) return;
    t->bcx = acts_2d(p, p->n_tok, 3 * d);
    t->in_xa = acts_xa(p, p->n_tok, &p->w.shortconv.in.lora);
    t->out_xa = acts_xa(p, p->n_tok, &p->w.shortconv.out.lora);
}

static void core(const struct block *b, struct layer_acts *s)
{
    const struct shortconv_weights *w = &b->w->shortconv;
    /* 2 conv  */ op_short_conv_fwd(b->dev, s->shortconv.y, s->shortconv.bcx, w->conv, w->bias, b->seqs);
}

static void project(const struct block *b, struct layer_acts *s)
{
    /* 1 in    */ linear_fwd(b->dev, s->shortconv.bcx, s->shortconv.in_xa, s->attn_norm, &b->w->shortconv.in, absent);
}

static void output(const struct block *b, struct layer_acts *s, struct tensor y)
{
    /* 3 out   */ linear_fwd(b->dev, y, s->shortconv.out_xa, s->shortconv.y, &b->w->shortconv.out, s->mixer_res);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    project(b, s);
    if (!b->core_saved) core(b, s);
    output(b, s, y);
}

/* Decoding keeps the last products B * x. */
static struct cache_need cache(const struct arch *a, int64_t layer)
{
    (void)layer;
    return (struct cache_need){.state = {{.n = (a->conv.n_tap - 1) * a->d_model, .stat = true}}};
}

static void decode(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct states tail = {.values = b->cache->state[0], .slot = b->cache->slot, .pos = b->pos, .seqs = b->seqs};
    const struct shortconv_weights *w = &b->w->shortconv;
    project(b, s);
    /* 2 conv  */ op_short_conv_decode(b->dev, s->shortconv.y, s->shortconv.bcx, w->conv, w->bias, &tail);
    output(b, s, y);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct shortconv_weights *w = &b->w->shortconv;
    const struct shortconv_acts *t = &s->shortconv;
    const int64_t n_tok = s->x.shape[0], d = b->a->d_model, mark = arena_mark(&dev->work);
    struct tensor dy = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, d);
    struct tensor dbcx = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, 3 * d);

    /* 3 out   */ linear_bwd(dev, dy, dres, t->y, t->out_xa, &w->out);
    /* 2 conv  */ op_short_conv_bwd(dev, dbcx, dy, t->bcx, w->conv, w->bias, b->seqs);
    /* 1 in    */ linear_bwd(dev, dnorm, dbcx, s->attn_norm, t->in_xa, &w->in);
    arena_release(&dev->work, mark);
}

const struct mixer_kind mixer_shortconv = {
    products, load, plan, core, fwd, bwd, cache, .prefill = decode, .decode = decode, .prefixes = 1};
