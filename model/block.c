/* block.c - one layer, forward and backward, as numbered steps that mirror each other.
 *
 *   x [T,D] -> rmsnorm -> qkv (+lora) [T,(H+2K)A] -> (q, k norm) -> rope -> attention [T,HA] -> out (+lora) -> + x = h
 *   h [T,D] -> rmsnorm -> route: idx, gate [T,J], offs [E+1] -> gather [M,D] -> gate_up (+lora) [M,2F] -> act [M,F]
 *           -> down (+lora) [M,D] -> combine by gate -> + h = y [T,D] */
#include "model/block.h"

#include "model/dispatch.h"

static void adapt(struct proj *p, const struct lora *lora, const struct lora_grad *grad)
{
    p->lora = *lora;
    p->grad = *grad;
}

void block_adapt(struct layer_weights *w, const struct lora_layer *lora)
{
    adapt(&w->qkv, &lora->qkv, &lora->g_qkv);
    adapt(&w->out, &lora->out, &lora->g_out);
    adapt(&w->up, &lora->up, &lora->g_up);
    adapt(&w->down, &lora->down, &lora->g_down);
}

static void attention_fwd(const struct block *b, struct layer_acts *s)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const int64_t rotated = b->a->n_head + b->a->n_kv;

    /* 1 norm  */ op_rmsnorm_fwd(dev, s->n1, s->rstd1, s->x, w->norm1, &b->a->norm);
    /* 2 qkv   */ op_linear_fwd(dev, s->qkv, s->qkv_xa, s->n1, &w->qkv, (struct tensor){0});
    if (b->a->qk_norm != QK_NORM_NONE)
        /* 3 q, k  */ op_qk_norm_fwd(dev, s->qkv, s->qk, s->rstd_qk, w->q_norm, w->k_norm, &b->attn, &b->a->norm);
    /* 4 rope  */ op_rope_fwd(dev, s->qkv, b->pos, b->rope, rotated);
    /* 5 attn  */ op_attn_fwd(dev, s->o, s->lse, s->qkv, w->sinks, b->seqs, &b->attn);
    /* 6 out   */ op_linear_fwd(dev, s->h, s->out_xa, s->o, &w->out, s->x);
}

/* Norm and routing, unless that is known already. */
static void route_fwd(const struct block *b, struct layer_acts *s, bool routed)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;

    /* 7 norm  */ op_rmsnorm_fwd(dev, s->n2, s->rstd2, s->h, w->norm2, &b->a->norm);
    if (!routed) {
        /* 8 route */ op_router_fwd(dev, &s->route, s->logits, s->n2, &w->router, w->router_bias, b->a->router);
        op_route_sort(dev, &s->route, b->ffn.n_exp);
        if (b->aux->coef != 0) op_aux_stats(dev, b->aux, s->logits, &s->route);
    }
}

/* Gate_up product and activation: up to the tensor act [M, F]. */
static void up_fwd(const struct block *b, struct layer_acts *s, struct tensor act)
{
    /* 9 up    */ op_moe_up_fwd(b->dev, act, s->pre, s->up_xa, s->n2, &s->route, &b->w->up, &b->a->glu);
}

static struct tensor push_act(const struct block *b, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&b->dev->work, b->dev->act_dtype, rows, cols);
}

void block_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    attention_fwd(b, s);
    route_fwd(b, s, false);
    if (b->divided) {
        dispatch_fwd(b, s, y);
        return;
    }
    const int64_t n_row = s->x.shape[0] * b->ffn.top_k, mark = arena_mark(&b->dev->work);
    struct tensor act = push_act(b, n_row, b->ffn.d_ff), e = push_act(b, n_row, b->a->d_model);
    up_fwd(b, s, act);
    /* 10 down */ op_moe_down_fwd(b->dev, e, s->down_ha, act, &s->route, &b->w->down);
    /* 11 sum  */ op_moe_combine_fwd(b->dev, y, s->h, e, &s->route);
    arena_release(&b->dev->work, mark);
}

void block_recompute(const struct block *b, struct layer_acts *s, enum recompute mode)
{
    if (mode == RECOMPUTE_NONE) return;
    if (mode == RECOMPUTE_FULL) attention_fwd(b, s);
    route_fwd(b, s, true);
    if (b->divided) return; /* its backward does, piece by piece */
    const int64_t mark = arena_mark(&b->dev->work);
    up_fwd(b, s, push_act(b, s->x.shape[0] * b->ffn.top_k, b->ffn.d_ff));
    arena_release(&b->dev->work, mark);
}

static void experts_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                        struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const int64_t n_row = s->x.shape[0] * b->ffn.top_k, mark = arena_mark(&dev->work);
    struct tensor dpre = push_act(b, n_row, 2 * b->ffn.d_ff), act = push_act(b, n_row, b->ffn.d_ff);

    /* 10 down */ op_moe_down_bwd(dev, dpre, dgate, act, dres, s->pre, s->down_ha, &s->route, &w->down, &b->a->glu);
    /* 9 up    */ op_moe_up_bwd(dev, dnorm, dpre, s->n2, s->up_xa, &s->route, &w->up);
    arena_release(&dev->work, mark);
}

void block_bwd(const struct block *b, const struct layer_acts *s, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct arch *a = b->a;
    const struct layer_weights *w = b->w;
    const int64_t n_tok = s->x.shape[0], mark = arena_mark(&dev->work);
    struct tensor dnorm = push_act(b, n_tok, a->d_model);
    const int64_t mark_experts = arena_mark(&dev->work);
    struct tensor dgate = arena_tensor_2d(&dev->work, dev->stat, n_tok, b->ffn.top_k);

    /* 11 sum  */ /* dh gets dres as it is; the rows' share is taken inside step 10 */
    if (b->divided)
        dispatch_bwd(b, s, dnorm, dgate, dres);
    else
        experts_bwd(b, s, dnorm, dgate, dres);
    /* 8 route */ op_router_bwd(dev, dnorm, dgate, &s->route, s->logits, &w->router, b->aux, a->router);
    /* 7 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->h, s->rstd2, w->norm2);
    arena_release(&dev->work, mark_experts);

    struct tensor dqkv = push_act(b, n_tok, arch_qkv_cols(a)), dout = push_act(b, n_tok, a->n_head * a->head_dim);
    /* 6 out   */ op_linear_bwd(dev, dout, dres, s->o, s->out_xa, &w->out);
    /* 5 attn  */ op_attn_bwd(dev, dqkv, dout, s->o, s->lse, s->qkv, b->seqs, &b->attn);
    /* 4 rope  */ op_rope_bwd(dev, dqkv, b->pos, b->rope, a->n_head + a->n_kv);
    if (a->qk_norm != QK_NORM_NONE)
        /* 3 q, k  */ op_qk_norm_bwd(dev, dqkv, s->qk, s->rstd_qk, w->q_norm, w->k_norm, &b->attn);
    /* 2 qkv   */ op_linear_bwd(dev, dnorm, dqkv, s->n1, s->qkv_xa, &w->qkv);
    /* 1 norm  */ op_rmsnorm_bwd(dev, dres, dnorm, s->x, s->rstd1, w->norm1);
    arena_release(&dev->work, mark);
}
