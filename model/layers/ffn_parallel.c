/* ffn_parallel.c - a dense network (glu_network.h) beside routed experts (ffn_moe.c): the experts read a separate norm
 * of the residual h, and both outputs are normalised before they are added.
 *
 *   ffn_norm [T,D]               -> dense network -> norm -+-> + residual = y [T,D]
 *   h [T,D] -> norm -> router, experts            -> norm -+
 *
 * Some routers read another norm of h. */
#include <math.h>
#include <stddef.h>

#include "model/layers/glu_network.h"

static const struct tensor absent = {0};

static struct glu_network network(const struct layer_weights *w)
{
    return (struct glu_network){&w->shared_up, &w->shared_down};
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    ffn_moe.products(a, layer, p);
    glu_network_products(a, a->d_dense, offsetof(struct layer_weights, shared_up),
                         offsetof(struct layer_weights, shared_down), LORA_DENSE_GATE, p + 2);
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    struct parallel_weights *w = &lw->parallel;
    const struct tensor_names *n = a->names;
    const double factor = 1 / sqrt((double)a->d_model);
    if (n->router_scale && weights_scaled(f, &w->router, n->router_scale, a->d_model, factor)) return -1;
    if (n->gate_scale && weights_scaled(f, &w->gate_scale, n->gate_scale, a->n_exp, 1)) return -1;
    return ffn_moe.load(f, a, layer, lw) ||
                   glu_network_load(f, a, a->d_dense, LORA_DENSE_GATE, &lw->shared_up, &lw->shared_down)
               ? -1
               : 0;
}

static struct tensor push(struct device *dev, int64_t n_tok, const struct arch *a)
{
    return arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, a->d_model);
}

static void plan_post(const struct acts_plan *p, struct post_acts *post)
{
    post->out = acts_2d(p, p->n_tok, p->a->d_model);
    post->rstd = arena_tensor_1d(&p->dev->work, p->dev->stat_dtype, p->n_tok);
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    const struct glu_network n = network(&p->w);
    struct parallel_acts *t = &s->parallel;
    MT_REQUIRE(!p->a->hyper.n_stream, "a network that reads the residual, with several streams");
    ffn_moe.plan(p, s, group);
    glu_network_plan(p, s, group, p->a->d_dense, &n);
    if (group == ACTS_KEPT) plan_post(p, &t->dense), plan_post(p, &t->routed);
    if (group != ACTS_FFN) return;
    t->norm = acts_2d(p, p->n_tok, p->a->d_model);
    t->rstd = arena_tensor_1d(&p->dev->work, p->dev->stat_dtype, p->n_tok);
}

/* Returns s with the experts' input as ffn_norm. */
static struct layer_acts routed_of(const struct layer_acts *s)
{
    struct layer_acts routed = *s;
    routed.ffn_norm = s->parallel.norm;
    routed.ffn_res = absent;
    return routed;
}

static void norm_routed(const struct block *b, const struct layer_acts *s)
{
    op_rmsnorm_fwd(b->dev, s->parallel.norm, s->parallel.rstd, block_between(b, s), b->w->parallel.routed, &b->a->norm);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const struct parallel_weights *w = &b->w->parallel;
    const struct glu_network n = network(b->w);
    struct layer_acts routed = routed_of(s);
    struct parallel_acts *t = &s->parallel;
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor other = push(dev, s->x.shape[0], b->a);
    if (w->router.ndim) {
        routed.moe.router_in = other;
        op_rmsnorm_fwd(dev, other, t->rstd, block_between(b, s), w->router, &b->a->norm);
    }
    /* 1 dense   */ glu_network_fwd(b, s, &n, t->dense.out, absent);
    /* 2 experts */ norm_routed(b, s);
    ffn_moe.fwd(b, &routed, t->routed.out);
    /* 3 norms   */ op_rmsnorm_fwd(dev, y, t->dense.rstd, t->dense.out, w->dense_post, &b->a->norm);
    op_rmsnorm_fwd(dev, other, t->routed.rstd, t->routed.out, w->routed_post, &b->a->norm);
    op_add(dev, y, other);
    if (s->ffn_res.ndim) op_add(dev, y, s->ffn_res);
    arena_release(&dev->work, mark);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    const struct glu_network n = network(b->w);
    struct layer_acts routed = routed_of(s);
    glu_network_recompute(b, s, &n);
    norm_routed(b, s);
    ffn_moe.recompute(b, &routed);
}

/* Computes dout, the gradient of what a norm after a branch reads. */
static void post_bwd(const struct block *b, struct tensor dout, struct tensor dres, const struct post_acts *post,
                     struct tensor weight)
{
    device_zero(b->dev, dout); /* the norm adds to it */
    op_rmsnorm_bwd(b->dev, dout, dres, post->out, post->rstd, weight);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres,
                struct tensor dh)
{
    struct device *dev = b->dev;
    const struct parallel_weights *w = &b->w->parallel;
    const struct parallel_acts *t = &s->parallel;
    const struct glu_network n = network(b->w);
    struct layer_acts routed = routed_of(s);
    const int64_t mark = arena_mark(&dev->work), n_tok = s->x.shape[0];
    const struct tensor dout = push(dev, n_tok, b->a), drouted = push(dev, n_tok, b->a);
    if (w->router.ndim) {
        routed.moe.drouter_in = push(dev, n_tok, b->a);
        device_zero(dev, routed.moe.drouter_in);
    }
    /* 3 norm    */ post_bwd(b, dout, dres, &t->dense, w->dense_post);
    /* 1 dense   */ glu_network_bwd(b, s, &n, dnorm, absent, dout);
    /* 3 norm    */ post_bwd(b, dout, dres, &t->routed, w->routed_post);
    /* 2 experts */ ffn_moe.bwd(b, &routed, drouted, dout, absent);
    op_rmsnorm_bwd(dev, dh, drouted, block_between(b, s), t->rstd, w->routed); /* dh may be dres */
    /* norms of one input have one rstd */
    if (w->router.ndim) op_rmsnorm_bwd(dev, dh, routed.moe.drouter_in, block_between(b, s), t->rstd, w->router);
    arena_release(&dev->work, mark);
}

const struct ffn_kind ffn_parallel = {true, products, load, plan, fwd, recompute, bwd};
