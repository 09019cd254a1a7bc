/* experts.c - the experts of a layer on the token's own rank, without communication. */
#include "model/layers/experts.h"

#include "model/layers/input_quant.h"
#include "model/layers/lora_rows.h"

static const struct tensor absent = {0};

static struct tensor push(const struct block *b, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&b->dev->work, b->dev->act_dtype, rows, cols);
}

static int64_t routed_rows(const struct layer_acts *s) { return tensor_count(s->moe.route.idx); }

static int64_t n_row(const struct acts_plan *p, const struct ffn_size *size) { return p->n_tok * size->top_k; }

static void up_fwd(const struct block *b, struct layer_acts *s, struct tensor act)
{
    struct moe_acts *m = &s->moe;
    const int64_t mark = arena_mark(&b->dev->work);
    const struct tensor x = input_quant_fwd(b->dev, &b->w->up, s->ffn_norm);
    struct proj base;
    const struct proj *up = lora_rows_base(&base, &b->w->up);
    op_moe_up_fwd(b->dev, act, m->pre, up->lora.r ? m->up_xa : absent, x, &m->route, up, &b->a->glu);
    if (up == &base) {
        op_lora_rows(b->dev, m->pre, m->up_xa, x, &b->w->up, &m->route, true);
        op_glu_fwd(b->dev, act, m->pre, absent, &b->a->glu);
    }
    arena_release(&b->dev->work, mark);
}

static void down_fwd(const struct block *b, const struct layer_acts *s, struct tensor e, struct tensor act)
{
    const struct moe_acts *m = &s->moe;
    struct proj base;
    const struct proj *down = lora_rows_base(&base, &b->w->down);
    op_moe_down_fwd(b->dev, e, down->lora.r ? m->down_ha : absent, act, &m->route, down);
    if (down == &base) op_lora_rows(b->dev, e, m->down_ha, act, &b->w->down, &m->route, false);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct ffn_size size = arch_ffn(b->a, b->layer);
    const int64_t mark = arena_mark(&b->dev->work), n = routed_rows(s);
    struct tensor act = push(b, n, size.d_ff);
    /* 1 up      */ up_fwd(b, s, act);
    struct tensor e = push(b, n, arch_expert_cols(b->a));
    input_quant_act(b->dev, &b->w->down, act, s->moe.pre, &b->a->glu);
    /* 2 down    */ down_fwd(b, s, e, act);
    /* 3 combine */ op_moe_combine_fwd(b->dev, y, s->ffn_res, e, &s->moe.route);
    arena_release(&b->dev->work, mark);
}

static void recompute(const struct block *b, struct layer_acts *s)
{
    const int64_t mark = arena_mark(&b->dev->work);
    up_fwd(b, s, push(b, routed_rows(s), arch_ffn(b->a, b->layer).d_ff));
    arena_release(&b->dev->work, mark);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                struct tensor dres)
{
    struct device *dev = b->dev;
    const struct moe_acts *m = &s->moe;
    const int64_t mark = arena_mark(&dev->work), n = routed_rows(s), d_ff = arch_ffn(b->a, b->layer).d_ff;
    struct tensor act = push(b, n, d_ff), dpre = m->pre;
    /* 3 combine */ /* the gradient of s->ffn_res is dres unchanged; step 2 applies the gates to the rows */
    input_quant_act(dev, &b->w->down, act, m->pre, &b->a->glu);
    /* 2 down    */ op_moe_down_bwd(dev, dpre, dgate, act, dres, m->pre, m->down_ha, &m->route, &b->w->down,
                                    &b->a->glu);
    arena_release(&dev->work, mark);
    const struct tensor x = input_quant_fwd(dev, &b->w->up, s->ffn_norm);
    /* 1 up      */ op_moe_up_bwd(dev, dnorm, dpre, x, m->up_xa, &m->route, &b->w->up);
    input_quant_bwd(dev, &b->w->up, dnorm, s->ffn_norm);
    arena_release(&dev->work, mark);
}

const struct experts experts_local = {n_row, ACTS_KEPT, fwd, recompute, bwd};
