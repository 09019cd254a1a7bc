/* ops_experts.c - the wrappers op_* of the router and the experts. */
#include "kernels/ops/ops_proj.h"

/* Returns J. */
static int64_t want_route(struct device *dev, const struct route *r, int64_t n_tok, int64_t n_exp)
{
    int64_t n_top = r->idx.ndim == 2 ? r->idx.shape[1] : 0;
    WANT(r->idx, DT_I32, n_tok, n_top);
    WANT_OPT(r->gate, dev->stat_dtype, n_tok, n_top);
    WANT(r->offs, DT_I32, n_exp + 1);
    WANT(r->row_slot, DT_I32, n_tok * n_top);
    WANT(r->slot_row, DT_I32, n_tok, n_top);
    return n_top;
}

static void want_groups(const struct router *r, int64_t n_exp, int64_t n_top)
{
    if (r->n_group <= 1) return;
    MT_REQUIRE(router_is_sigmoid(r) && n_exp % r->n_group == 0 && n_exp / r->n_group >= 2 && r->top_group >= 1 &&
                   r->top_group <= r->n_group && r->top_group * (n_exp / r->n_group) >= n_top,
               "%lld of %lld experts in %d of %d groups", (long long)n_top, (long long)n_exp, r->top_group, r->n_group);
}

void op_router_fwd(struct device *dev, struct route *r, struct tensor logits, struct tensor x, const struct weight *w,
                   struct tensor bias, const struct router *router)
{
    int64_t n_tok = x.shape[0];
    int64_t n_top = want_route(dev, r, n_tok, w->n_out);
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    MT_REQUIRE(n_top >= 1 && n_top <= w->n_out, "%lld experts of %lld per token", (long long)n_top,
               (long long)w->n_out);
    want_groups(router, w->n_out, n_top);
    WANT(r->gate, dev->stat_dtype, n_tok, n_top);
    WANT(logits, dev->stat_dtype, n_tok, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    WANT_OPT(bias, DT_F32, w->n_out);
    count_gemm(dev, n_tok, w->n_out, w->n_in);
    MOVES(dev, logits, x, r->idx, r->gate);
    moves_weight(dev, w, n_tok);
    RUN(w->n_out, router_fwd, r, logits, x, w, bias, router);
}

void op_hash_route(struct device *dev, struct tensor idx, struct tensor table, struct tensor tok)
{
    WANT(idx, DT_I32, tok.shape[0], table.shape[1]);
    WANT(table, DT_I32, table.shape[0], idx.shape[1]);
    WANT(tok, DT_I32, idx.shape[0]);
    MT_REQUIRE(contiguous(idx) && contiguous(table), "rows apart");
    MOVES(dev, idx, idx, tok);
    RUN(0, hash_route, idx, table, tok);
}

void op_scale_gates(struct device *dev, struct tensor y, struct tensor x, struct tensor idx, struct tensor scale)
{
    const int64_t n_tok = x.shape[0], n_top = x.shape[1];
    WANT(y, dev->stat_dtype, n_tok, n_top);
    WANT(x, dev->stat_dtype, n_tok, n_top);
    WANT(idx, DT_I32, n_tok, n_top);
    WANT(scale, DT_F32, scale.shape[0]);
    MOVES(dev, y, x, idx, scale);
    RUN(0, scale_gates, y, x, idx, scale);
}

void op_route_sort(struct device *dev, struct route *r, int64_t n_exp)
{
    want_route(dev, r, r->idx.shape[0], n_exp);
    MOVES(dev, r->idx, r->offs, r->row_slot, r->slot_row);
    RUN(0, route_sort, r, n_exp);
}

static void want_aux(struct device *dev, const struct aux *aux, int64_t n_exp)
{
    WANT(aux->count, dev->stat_dtype, n_exp);
    WANT(aux->prob, dev->stat_dtype, n_exp);
}

void op_aux_stats(struct device *dev, struct aux *aux, struct tensor logits, const struct route *r)
{
    int64_t n_tok = logits.shape[0], n_exp = logits.shape[1];
    WANT(logits, dev->stat_dtype, n_tok, n_exp);
    want_aux(dev, aux, n_exp);
    want_route(dev, r, n_tok, n_exp);
    MOVES(dev, logits, r->idx);
    RUN(0, aux_stats, aux, logits, r);
}

void op_router_bwd(struct device *dev, struct tensor dx, struct tensor dgate, const struct route *r,
                   struct tensor logits, const struct weight *w, const struct aux *aux, const struct router *router)
{
    int64_t n_tok = dx.shape[0];
    int64_t n_top = want_route(dev, r, n_tok, w->n_out);
    want_weight(__func__, w, 1, w->n_out, dx.shape[1]);
    WANT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(r->gate, dev->stat_dtype, n_tok, n_top);
    WANT(dgate, dev->stat_dtype, n_tok, n_top);
    WANT(logits, dev->stat_dtype, n_tok, w->n_out);
    bool auxiliary = aux->coef > 0 || aux->coef < 0;
    if (auxiliary) want_aux(dev, aux, w->n_out);
    MT_REQUIRE(!auxiliary || aux->pooled || aux->rows == n_tok, "auxiliary loss of one layer: %lld rows of %lld",
               (long long)aux->rows, (long long)n_tok);
    bool dense = auxiliary || router->kind == ROUTER_PROBABILITY;
    MT_REQUIRE(!auxiliary || !router_is_sigmoid(router), "an auxiliary loss of a sigmoid router");
    count_gemm(dev, n_tok, dense ? w->n_out : n_top, w->n_in); /* dl W: only chosen rows of W, or all */
    MOVES(dev, dx, dx, dgate, r->gate, r->idx);
    if (dense || router_is_sigmoid(router)) MOVES(dev, logits);
    moves_weight(dev, w, n_tok);
    RUN(w->n_out, router_bwd, dx, dgate, r, logits, w, aux, router);
    round_act(dev, dx);
}

/* An adapter on every expert, and its saved product xa. */
static void want_expert_lora(struct device *dev, const struct proj *p, struct tensor xa, int64_t n_row)
{
    const struct lora *l = &p->lora;
    const struct weight *w = &p->w;
    if (!l->r) return;
    MT_REQUIRE(l->n_seg == 1 && l->dropout <= 0, "expert adapter: %d segments, dropout %g", l->n_seg,
               (double)l->dropout);
    WANT(l->a, dev->act_dtype, w->n_exp, l->r, w->n_in);
    WANT(l->b, dev->act_dtype, w->n_exp, w->n_out, l->r);
    WANT(xa, dev->act_dtype, n_row, l->r);
}

static void want_fp8(const struct proj *p)
{
    if (!p->fp8.step.ndim) return;
    WANT(p->fp8.step, DT_F32, p->w.n_exp);
    if (p->fp8.transposed.ndim) WANT(p->fp8.transposed, DT_U8, p->w.n_exp, p->w.n_in, p->w.n_out);
    MT_REQUIRE(!p->quant.format.bits && !p->in.format.bits &&
                   (!proj_has_codes(p) || format_of(&p->w) == &format_bf16) &&
                   (p->fp8.backward ? !p->fp8.pair : !p->fp8.transposed.ndim),
               "FP8 products of %s, or of fake-quantised experts, or with the codes of other products",
               weight_format_name(p->w.format));
}

/* Checks what a product of the experts reads besides its rows and writes besides its result. */
static void want_experts(struct device *dev, const struct proj *p, struct tensor xa, int64_t n_row, int64_t n_out,
                         int64_t n_in)
{
    want_weight(__func__, &p->w, p->w.n_exp, n_out, n_in);
    WANT_OPT(p->bias, DT_F32, p->w.n_exp, n_out);
    want_expert_lora(dev, p, xa, n_row);
    want_quant(dev, p);
    want_fp8(p);
}

/* Checks the fake quantisation of an input with rows of n_in. */
static void want_input(const struct input_quant *in, int64_t n_in)
{
    const struct fakequant *f = &in->format;
    if (!f->bits) return;
    MT_REQUIRE(!f->block || n_in % f->block == 0, "a quantised input of %lld columns, blocks of %d", (long long)n_in,
               f->block);
    WANT(in->amax, DT_F32, 1);
}

void op_moe_up_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa, struct tensor x,
                   const struct route *r, const struct proj *up, const struct glu *glu)
{
    const struct weight *w = &up->w;
    const struct lora *lora = &up->lora;
    const struct proj read = proj_of_forward(up);
    int64_t n_tok = x.shape[0], n_row = n_tok * want_route(dev, r, n_tok, w->n_exp);
    want_experts(dev, up, xa, n_row, glu_cols(glu, act.shape[1]), x.shape[1]);
    WANT(act, dev->act_dtype, n_row, act.shape[1]);
    WANT(pre, dev->act_dtype, n_row, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    count_gemm(dev, n_row, w->n_out, w->n_in); /* x W_e^T */
    count_lora(dev, n_row, lora, w->n_in, lora->merged ? 0 : w->n_out);
    MOVES(dev, act, pre, xa, x, r->row_slot);
    moves_matrix(dev, &read, n_row);
    moves_lora(dev, up, n_row);
    RUN(0, moe_up_fwd, act, pre, xa, x, r, &read, glu);
    round_act(dev, act);
    round_act(dev, pre);
    if (lora->r) round_act(dev, xa);
}

void op_glu_quant_fwd(struct device *dev, struct tensor act, struct tensor pre, const struct glu *glu,
                      const struct input_quant *in)
{
    const int64_t n_row = pre.shape[0], width = act.shape[1];
    WANT(act, dev->act_dtype, n_row, width);
    WANT(pre, dev->act_dtype, n_row, glu_cols(glu, width));
    MT_REQUIRE(in->format.bits && contiguous(act) && contiguous(pre), "an input that is not quantised, or rows apart");
    want_input(in, width);
    MOVES(dev, act, pre);
    RUN(0, glu_quant_fwd, act, pre, glu, in);
    round_act(dev, act);
}

void op_moe_down_fwd(struct device *dev, struct tensor y, struct tensor ha, struct tensor act, const struct route *r,
                     const struct proj *down)
{
    const struct weight *w = &down->w;
    const struct lora *lora = &down->lora;
    const struct proj read = proj_of_forward(down);
    int64_t n_tok = r->idx.shape[0], n_row = n_tok * want_route(dev, r, n_tok, w->n_exp);
    want_experts(dev, down, ha, n_row, w->n_out, act.shape[1]);
    WANT_OPT(y, dev->act_dtype, n_row, w->n_out);
    WANT(act, dev->act_dtype, n_row, w->n_in);
    if (y.ndim) count_gemm(dev, n_row, w->n_out, w->n_in); /* act W_e^T */
    count_lora(dev, n_row, lora, w->n_in, y.ndim && !lora->merged ? w->n_out : 0);
    MOVES(dev, y, ha, act);
    if (y.ndim) moves_matrix(dev, &read, n_row);
    moves_lora(dev, down, n_row);
    RUN(0, moe_down_fwd, y, ha, act, r, &read);
    round_act(dev, y);
    if (lora->r) round_act(dev, ha);
}

void op_gather(struct device *dev, struct tensor y, struct tensor x, struct tensor rows, int64_t share)
{
    int64_t n_row = rows.shape[0], n_col = x.ndim == 2 ? x.shape[1] : 0;
    WANT(rows, DT_I32, n_row);
    WANT(y, x.dtype, n_row, n_col);
    MT_REQUIRE(share >= 1 && n_col > 0 && contiguous(x) && contiguous(y),
               "gather of rows of %lld, share %lld: contiguous rows and share >= 1 are needed", (long long)n_col,
               (long long)share);
    MOVES(dev, y, y, rows);
    RUN(0, gather, y, x, rows, share);
}

void op_moe_combine_fwd(struct device *dev, struct tensor out, struct tensor res, struct tensor y,
                        const struct route *r)
{
    int64_t n_tok = out.shape[0], dim = out.shape[1];
    int64_t n_top = want_route(dev, r, n_tok, r->offs.shape[0] - 1);
    WANT(out, dev->act_dtype, n_tok, dim);
    WANT_OPT(res, dev->act_dtype, n_tok, dim);
    WANT(y, dev->act_dtype, n_tok * n_top, dim);
    MOVES(dev, out, res, y, r->gate, r->slot_row);
    RUN(0, moe_combine_fwd, out, res, y, r);
    round_act(dev, out);
}

void op_moe_down_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act, struct tensor dout,
                     struct tensor pre, struct tensor ha, const struct route *r, const struct proj *down,
                     const struct glu *glu)
{
    const struct weight *w = &down->w;
    const struct lora *lora = &down->lora;
    int64_t n_tok = dout.shape[0], n_top = want_route(dev, r, n_tok, w->n_exp), n_row = n_tok * n_top;
    want_experts(dev, down, ha, n_row, dout.shape[1], act.shape[1]);
    want_grad(dev, down);
    WANT(dpre, dev->act_dtype, n_row, glu_cols(glu, w->n_in));
    WANT(r->gate, dev->stat_dtype, n_tok, n_top);
    WANT(dgate, dev->stat_dtype, n_tok, n_top);
    WANT(act, dev->act_dtype, n_row, w->n_in);
    WANT(dout, dev->act_dtype, n_tok, w->n_out);
    WANT(pre, dev->act_dtype, n_row, glu_cols(glu, w->n_in));
    want_input(&down->in, w->n_in);
    count_gemm(dev, n_row, w->n_out, w->n_in);                              /* dout W_e */
    count_lora(dev, n_row, lora, lora->merged ? 0 : w->n_in, w->n_out);     /* dout B; (dout B) A */
    if (down->grad.a.ndim) count_lora(dev, n_row, lora, w->n_in, w->n_out); /* dout^T ha; (dout B)^T act */
    MOVES(dev, dpre, dgate, act, dout, pre, ha, r->gate, r->row_slot);
    moves_matrix(dev, down, n_row);
    moves_grad(dev, down, n_row);
    RUN(0, moe_down_bwd, dpre, dgate, act, dout, pre, ha, r, down, glu);
    round_act(dev, dpre);
    if (!down->in.format.bits) round_act(dev, act);
}

void op_moe_up_bwd(struct device *dev, struct tensor dx, struct tensor dpre, struct tensor x, struct tensor xa,
                   const struct route *r, const struct proj *up)
{
    const struct weight *w = &up->w;
    const struct lora *lora = &up->lora;
    int64_t n_tok = dx.shape[0], n_row = n_tok * want_route(dev, r, n_tok, w->n_exp);
    want_experts(dev, up, xa, n_row, dpre.shape[1], dx.shape[1]);
    want_grad(dev, up);
    WANT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(dpre, dev->act_dtype, n_row, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    count_gemm(dev, n_row, w->n_out, w->n_in);                            /* dpre W_e */
    count_lora(dev, n_row, lora, lora->merged ? 0 : w->n_in, w->n_out);   /* dpre B; (dpre B) A */
    if (up->grad.a.ndim) count_lora(dev, n_row, lora, w->n_in, w->n_out); /* dpre^T xa; (dpre B)^T x */
    MOVES(dev, dx, dpre, xa, r->row_slot);
    if (lora->r) MOVES(dev, x);
    moves_matrix(dev, up, n_row);
    moves_grad(dev, up, n_row);
    RUN(0, moe_up_bwd, dx, dpre, x, xa, r, up);
    round_act(dev, dx);
}

void op_expert_sums(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r)
{
    const int64_t n_exp = r->offs.shape[0] - 1;
    want_route(dev, r, r->idx.shape[0], n_exp);
    WANT(r->gate, dev->stat_dtype, r->idx.shape[0], r->idx.shape[1]);
    WANT(rows, DT_F64, n_exp);
    WANT(gates, DT_F64, n_exp);
    MOVES(dev, rows, rows, gates, gates, r->offs, r->row_slot, r->gate);
    RUN(0, expert_sums, rows, gates, r);
}
