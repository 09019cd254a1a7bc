/* ffn_latent.c - routed experts that read and write a latent [T,Z], narrower than the residual, and beside them shared
 * experts (glu_network.h). Router and shared experts read ffn_norm.
 *
 *   ffn_norm [T,D] -> down (+lora) [T,Z] -> experts (ffn_moe.c) [T,Z] -> up (+lora) -+-> + residual = y [T,D]
 *   ffn_norm [T,D] -> network                                                       -+ */
#include <stddef.h>

#include "model/layers/glu_network.h"
#include "model/layers/linear.h"

static const struct tensor absent = {0};

static struct glu_network network(const struct layer_weights *w)
{
    return (struct glu_network){&w->shared_up, &w->shared_down};
}

static struct product linear(size_t proj, int64_t n_out, int64_t n_in, enum lora_target t)
{
    return (struct product){
        .proj = proj, .n_exp = 1, .n_out = n_out, .n_in = n_in, .n_target = 1, .target = {t}, .rows = {n_out}};
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    ffn_moe.products(a, layer, p);
    glu_network_products(a, a->d_shared, offsetof(struct layer_weights, shared_up),
                         offsetof(struct layer_weights, shared_down), LORA_SHARED_GATE, p + 2);
    p[4] = linear(offsetof(struct layer_weights, latent_down), a->d_latent, a->d_model, LORA_LATENT_DOWN);
    p[5] = linear(offsetof(struct layer_weights, latent_up), a->d_model, a->d_latent, LORA_LATENT_UP);
}

static int load_linear(struct weights_read *f, const struct arch *a, struct proj *p, enum lora_target t, int64_t n_out,
                       int64_t n_in)
{
    char part[LORA_MODULE_TEXT];
    lora_target_module(a->names, t, part);
    const struct stored_rows rows = {.part = {part}, .rows = {n_out}, .n_in = n_in, .n_part = 1, .ffn = true};
    return weights_rows(f, p, &rows, false);
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    return ffn_moe.load(f, a, layer, lw) ||
                   glu_network_load(f, a, a->d_shared, LORA_SHARED_GATE, &lw->shared_up, &lw->shared_down) ||
                   load_linear(f, a, &lw->latent_down, LORA_LATENT_DOWN, a->d_latent, a->d_model) ||
                   load_linear(f, a, &lw->latent_up, LORA_LATENT_UP, a->d_model, a->d_latent)
               ? -1
               : 0;
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    const struct glu_network n = network(&p->w);
    struct latent_acts *t = &s->latent;
    ffn_moe.plan(p, s, group);
    glu_network_plan(p, s, group, p->a->d_shared, &n);
    if (group == ACTS_KEPT) {
        t->out = acts_2d(p, p->n_tok, p->a->d_latent);
        t->up_xa = acts_xa(p, p->n_tok, &p->w.latent_up.lora);
    }
    if (group != ACTS_FFN) return;
    t->in = acts_2d(p, p->n_tok, p->a->d_latent);
    t->down_xa = acts_xa(p, p->n_tok, &p->w.latent_down.lora);
}

static struct tensor push(const struct block *b, const struct layer_acts *s, int64_t cols)
{
    return arena_tensor_2d(&b->dev->work, b->dev->act_dtype, s->x.shape[0], cols);
}

/* Returns s with the experts' input as ffn_norm. */
static struct layer_acts routed_of(const struct layer_acts *s)
{
    struct layer_acts routed = *s;
    routed.ffn_norm = s->latent.in;
    routed.ffn_res = absent;
    routed.moe.router_in = s->ffn_norm;
    return routed;
}

static void shrink(const struct block *b, struct layer_acts *s)
{
    linear_fwd(b->dev, s->latent.in, s->latent.down_xa, s->ffn_norm, &b->w->latent_down, absent);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct glu_network n = network(b->w);
    struct layer_acts routed = routed_of(s);
    const int64_t mark = arena_mark(&b->dev->work);
    const struct tensor beside = push(b, s, b->a->d_model);
    /* 1 down    */ shrink(b, s);
    /* 2 experts */ ffn_moe.fwd(b, &routed, s->latent.out);
    /* 3 shared  */ glu_network_fwd(b, s, &n, beside, s->ffn_res);
    /* 4 up      */ linear_fwd(b->dev, y, s->latent.up_xa, s->latent.out, &b->w->latent_up, beside);
    arena_release(&b->dev->work, mark);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    const struct glu_network n = network(b->w);
    struct layer_acts routed = routed_of(s);
    shrink(b, s);
    ffn_moe.recompute(b, &routed);
    glu_network_recompute(b, s, &n);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres,
                struct tensor dh)
{
    (void)dh;
    struct device *dev = b->dev;
    const struct glu_network n = network(b->w);
    struct layer_acts routed = routed_of(s);
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor dout = push(b, s, b->a->d_latent), din = push(b, s, b->a->d_latent);
    const struct tensor dx = push(b, s, b->a->d_model);
    routed.moe.drouter_in = dx;
    device_zero(dev, dx);
    /* 4 up      */ linear_bwd(dev, dout, dres, s->latent.out, s->latent.up_xa, &b->w->latent_up);
    /* 2 experts */ ffn_moe.bwd(b, &routed, din, dout, absent);
    /* 1 down    */ linear_bwd(dev, dnorm, din, s->ffn_norm, s->latent.down_xa, &b->w->latent_down);
    op_add(dev, dnorm, dx);
    /* 3 shared  */ glu_network_bwd(b, s, &n, dx, absent, dres);
    op_add(dev, dnorm, dx);
    arena_release(&dev->work, mark);
}

const struct ffn_kind ffn_latent = {true, products, load, plan, fwd, recompute, bwd};
