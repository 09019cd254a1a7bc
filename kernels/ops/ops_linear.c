/* ops_linear.c - the wrappers op_* of embedding, norm, dense projection, adapters of several sequences, activation and
 * residual. */
#include "kernels/ops/ops_proj.h"

/* Checks an adapter on a dense [out, in] matrix, and its saved product xa. */
static void want_lora(struct device *dev, const struct lora *l, struct tensor xa, int64_t n_row, int64_t n_out,
                      int64_t n_in)
{
    if (!l->r) return;
    int64_t rows = 0;
    MT_REQUIRE(l->n_seg >= 1 && l->n_seg <= 3 && l->dropout >= 0 && l->dropout < 1, "adapter: %d segments, dropout %g",
               l->n_seg, (double)l->dropout);
    for (int s = 0; s < l->n_seg; rows += l->seg_cols[s++])
        MT_REQUIRE(l->seg_first[s] >= 0 && l->seg_cols[s] >= 0 && l->seg_first[s] <= n_out - l->seg_cols[s],
                   "adapter: segment %d is columns %lld + %lld of %lld", s, (long long)l->seg_first[s],
                   (long long)l->seg_cols[s], (long long)n_out);
    WANT(l->a, dev->act_dtype, l->n_seg * l->r, n_in);
    WANT(l->b, dev->act_dtype, rows, l->r);
    WANT(xa, dev->act_dtype, n_row, l->n_seg * l->r);
}

/* Counts the products of m rows with an adapter of a dense matrix: with A, with B, or both. */
static void count_dense_lora(struct device *dev, int64_t m, const struct lora *l, bool a, bool b)
{
    if (l->r) count_lora(dev, m, l, a ? l->n_seg * l->a.shape[1] : 0, b ? l->b.shape[0] : 0);
}

void op_embed_fwd(struct device *dev, struct tensor y, const struct weight *w, struct tensor tok)
{
    WANT(y, dev->act_dtype, tok.shape[0], w->n_in);
    WANT(tok, DT_I32, y.shape[0]);
    want_weight(__func__, w, 1, w->n_out, y.shape[1]);
    MOVES(dev, y, y, tok);
    RUN(0, embed_fwd, y, w, tok);
    round_act(dev, y);
}

void op_embed_noise(struct device *dev, struct tensor x, const struct seqs *seqs, float alpha, uint64_t key)
{
    WANT(x, dev->act_dtype, x.shape[0], x.shape[1]);
    want_seqs(__func__, seqs, true);
    MOVES(dev, x, x);
    RUN(0, embed_noise, x, seqs, alpha, key);
    round_act(dev, x);
}

static void want_norm(struct device *dev, struct tensor x, struct tensor y, struct tensor rstd, struct tensor w)
{
    const int64_t n_tok = x.shape[0], dim = w.shape[0];
    WANT(x, dev->act_dtype, n_tok, dim);
    WANT(y, dev->act_dtype, n_tok, dim);
    WANT(rstd, dev->stat_dtype, n_tok);
    WANT(w, DT_F32, dim);
}

void op_rmsnorm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w,
                    const struct norm *norm)
{
    want_norm(dev, x, y, rstd, w);
    MOVES(dev, y, rstd, x, w);
    RUN(0, rmsnorm_fwd, y, rstd, x, w, norm);
    round_act(dev, y);
}

void op_rmsnorm_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                    struct tensor w)
{
    want_norm(dev, x, dx, rstd, w);
    want_norm(dev, x, dy, rstd, w);
    MOVES(dev, dx, dx, dy, x, rstd, w);
    RUN(0, rmsnorm_bwd, dx, dy, x, rstd, w);
    round_act(dev, dx);
}

void op_linear_fwd(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *proj,
                   struct tensor res)
{
    const struct weight *w = &proj->w;
    const struct lora *lora = &proj->lora;
    int64_t n_tok = x.shape[0];
    want_weight(__func__, w, 1, y.shape[1], x.shape[1]);
    WANT(y, dev->act_dtype, n_tok, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    WANT_OPT(proj->bias, DT_F32, w->n_out);
    WANT_OPT(res, dev->act_dtype, n_tok, w->n_out);
    want_lora(dev, lora, xa, n_tok, w->n_out, w->n_in);
    want_quant(dev, proj);
    count_dense(dev, n_tok, w->n_out, w->n_in);              /* x W^T */
    count_dense_lora(dev, n_tok, lora, true, !lora->merged); /* x A^T; (x A^T) B^T */
    MOVES(dev, y, xa, x, proj->bias, res);
    moves_matrix(dev, proj, n_tok);
    moves_lora(dev, proj, n_tok);
    RUN(w->n_out, linear_fwd, y, xa, x, proj, res);
    round_act(dev, y);
    if (lora->r) round_act(dev, xa);
}

void op_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor xa,
                   const struct proj *proj)
{
    const struct weight *w = &proj->w;
    const struct lora *lora = &proj->lora;
    int64_t n_tok = dy.shape[0];
    want_weight(__func__, w, 1, dy.shape[1], x.shape[1]);
    WANT_OPT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(dy, dev->act_dtype, n_tok, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    want_lora(dev, lora, xa, n_tok, w->n_out, w->n_in);
    want_grad(dev, proj);
    want_quant(dev, proj);
    if (dx.ndim) count_dense(dev, n_tok, w->n_out, w->n_in); /* dy W */
    count_dense_lora(dev, n_tok, lora, !lora->merged, true); /* dy B; (dy B) A */
    count_dense_lora(dev, n_tok, lora, true, true);          /* dy^T xa; (dy B)^T x */
    MOVES(dev, dx, dy, xa);
    if (lora->r) MOVES(dev, x);
    if (dx.ndim) moves_matrix(dev, proj, n_tok);
    moves_grad(dev, proj, n_tok);
    RUN(w->n_out, linear_bwd, dx, dy, x, xa, proj);
    round_act(dev, dx);
}

/* One adapter of a set: on a dense matrix, or on every expert. */
static void want_member(struct device *dev, const struct lora *l, const struct weight *w, struct tensor xa)
{
    const bool dense = w->n_exp == 1;
    int64_t rows = 0;
    if (!l->r) return;
    MT_REQUIRE(!l->merged && l->dropout <= 0 && l->n_seg >= 1 && l->n_seg <= (dense ? 3 : 1) &&
                   xa.shape[1] >= l->n_seg * l->r,
               "an adapter of a set: %d segments of rank %lld, room for %lld", l->n_seg, (long long)l->r,
               (long long)xa.shape[1]);
    for (int s = 0; s < l->n_seg; rows += l->seg_cols[s++])
        MT_REQUIRE(l->seg_first[s] >= 0 && l->seg_cols[s] >= 0 && l->seg_first[s] <= w->n_out - l->seg_cols[s],
                   "adapter of a set: segment %d", s);
    if (dense) {
        WANT(l->a, dev->act_dtype, l->n_seg * l->r, w->n_in);
        WANT(l->b, dev->act_dtype, rows, l->r);
    } else {
        WANT(l->a, dev->act_dtype, w->n_exp, l->r, w->n_in);
        WANT(l->b, dev->act_dtype, w->n_exp, w->n_out, l->r);
    }
}

void op_lora_rows(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *proj,
                  const struct route *r, bool by_token)
{
    const struct weight *w = &proj->w;
    const struct lora_set *set = proj->rows.set;
    const int64_t n_row = y.shape[0], n_tok = proj->rows.group.shape[0];
    MT_REQUIRE(set && set->n >= 1 && set->n <= LORA_SET && !r == (w->n_exp == 1) && (r || !by_token),
               "a set of adapters");
    WANT(y, dev->act_dtype, n_row, w->n_out);
    WANT(x, dev->act_dtype, by_token ? n_tok : n_row, w->n_in);
    WANT(xa, dev->act_dtype, n_row, xa.shape[1]);
    WANT(proj->rows.group, DT_I32, r ? r->idx.shape[0] : n_row);
    for (int g = 0; g < set->n; g++) want_member(dev, &set->of[g], w, xa);
    count_gemm(dev, n_row, xa.shape[1], w->n_in + w->n_out); /* at most */
    MOVES(dev, y, y, xa, x);
    RUN(0, lora_rows, y, xa, x, proj, r, by_token);
    round_act(dev, y);
}

static void want_dora(struct device *dev, const struct proj *p)
{
    const int64_t rows = p->lora.b.shape[0];
    MT_REQUIRE(p->lora.r && p->w.n_exp == 1, "DoRA of %lld matrices, rank %lld", (long long)p->w.n_exp,
               (long long)p->lora.r);
    WANT(p->dora.m, dev->stat_dtype, rows);
    WANT(p->dora.norm, dev->stat_dtype, rows);
    WANT_OPT(p->dora.grad, dev->stat_dtype, rows);
    WANT_OPT(p->bias, DT_F32, p->w.n_out);
}

void op_row_norm(struct device *dev, struct tensor norm, const struct proj *proj)
{
    const struct lora *l = &proj->lora;
    MT_REQUIRE(l->r && proj->w.n_exp == 1, "norms of %lld matrices, rank %lld", (long long)proj->w.n_exp,
               (long long)l->r);
    WANT(norm, dev->stat_dtype, l->b.shape[0]);
    want(__func__, "master_a", l->master_a, dev->stat_dtype, l->a.ndim, l->a.shape);
    want(__func__, "master_b", l->master_b, dev->stat_dtype, l->b.ndim, l->b.shape);
    count_gemm(dev, l->b.shape[0], proj->w.n_in, l->r); /* B A */
    MOVES(dev, norm, l->master_a, l->master_b);
    dev->op.bytes += (double)weight_bytes(&proj->w);
    RUN(proj->w.n_out, row_norm, norm, proj);
}

void op_dora_fwd(struct device *dev, struct tensor y, const struct proj *proj, struct tensor res)
{
    want_dora(dev, proj);
    WANT(y, dev->act_dtype, y.shape[0], proj->w.n_out);
    WANT_OPT(res, dev->act_dtype, y.shape[0], proj->w.n_out);
    MOVES(dev, y, y, res, proj->bias);
    RUN(proj->w.n_out, dora_fwd, y, proj, res);
    round_act(dev, y);
}

void op_dora_bwd(struct device *dev, struct tensor z, struct tensor dy, const struct proj *proj)
{
    want_dora(dev, proj);
    WANT(z, dev->act_dtype, dy.shape[0], proj->w.n_out);
    WANT(dy, dev->act_dtype, z.shape[0], proj->w.n_out);
    MOVES(dev, z, z, dy, proj->dora.grad, proj->dora.grad);
    RUN(proj->w.n_out, dora_bwd, z, dy, proj);
    round_act(dev, z);
}

void op_glu_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor gate, const struct glu *glu)
{
    const int64_t n_tok = act.shape[0], width = act.shape[1];
    WANT(act, dev->act_dtype, n_tok, width);
    WANT(pre, dev->act_dtype, n_tok, glu_cols(glu, width));
    WANT_OPT(gate, dev->stat_dtype, n_tok, 1);
    MOVES(dev, act, pre, gate);
    RUN(0, glu_fwd, act, pre, gate, glu);
    round_act(dev, act);
}

void op_glu_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor dact, struct tensor pre,
                struct tensor gate, const struct glu *glu)
{
    const int64_t n_tok = dact.shape[0], width = dact.shape[1];
    WANT(dpre, dev->act_dtype, n_tok, glu_cols(glu, width));
    WANT(dact, dev->act_dtype, n_tok, width);
    WANT(pre, dev->act_dtype, n_tok, glu_cols(glu, width));
    WANT_OPT(gate, dev->stat_dtype, n_tok, 1);
    WANT_OPT(dgate, dev->stat_dtype, n_tok, 1);
    MT_REQUIRE(!gate.ndim == !dgate.ndim, "a gate and its gradient");
    MOVES(dev, dpre, dact, pre, gate, dgate);
    RUN(0, glu_bwd, dpre, dgate, dact, pre, gate, glu);
    round_act(dev, dpre);
}

void op_add(struct device *dev, struct tensor y, struct tensor x)
{
    WANT(y, dev->act_dtype, x.shape[0], x.shape[1]);
    WANT(x, dev->act_dtype, y.shape[0], y.shape[1]);
    MOVES(dev, y, y, x);
    RUN(0, add, y, x);
    round_act(dev, y);
}

void op_scale(struct device *dev, struct tensor x, float factor)
{
    WANT(x, dev->act_dtype, x.shape[0], x.shape[1]);
    MOVES(dev, x, x);
    RUN(0, scale, x, factor);
    round_act(dev, x);
}
