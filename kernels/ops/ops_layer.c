/* ops_layer.c - the wrappers op_* of the layers: check every shape and dtype, count FLOPs and bytes, call the
 * backend, round activations when dtype = bf16 on the CPU. A wrong shape is a bug in the caller and stops the process
 * with both shapes in the message.
 *
 * FLOPs: matrix products only, a multiply and an add being two; each count names its product. Element-wise work and
 * reductions over rows are not counted. Bytes: the minimum traffic, inputs once, outputs once, sums ("+=") twice. */
#include "kernels/moe_packed.h"
#include "kernels/ops/ops_check.h"

/* ---- checks ---- */

/* An adapter on a dense [out, in] matrix, and its saved product xa. */
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

/* An adapter on every expert, and its saved product xa. */
static void want_expert_lora(struct device *dev, const struct lora *l, struct tensor xa, int64_t n_row,
                             const struct weight *w)
{
    if (!l->r) return;
    MT_REQUIRE(l->n_seg == 1 && l->dropout <= 0, "expert adapter: %d segments, dropout %g", l->n_seg,
               (double)l->dropout);
    WANT(l->a, dev->act_dtype, w->n_exp, l->r, w->n_in);
    WANT(l->b, dev->act_dtype, w->n_exp, w->n_out, l->r);
    WANT(xa, dev->act_dtype, n_row, l->r);
}

/* Fake quantisation: parts that cover the rows, blocks that divide them, and what a merged adapter is read from. */
static void want_quant(struct device *dev, const struct proj *p)
{
    const struct proj_quant *q = &p->quant;
    const struct lora *l = &p->lora;
    if (!q->format.bits) return;
    int64_t rows = 0;
    MT_REQUIRE(q->n_part >= 1 && q->n_part <= 3 && (q->n_part == 1 || p->w.n_exp == 1), "%d parts of %lld matrices",
               q->n_part, (long long)p->w.n_exp);
    for (int i = 0; i < q->n_part; i++) rows += q->part_rows[i];
    MT_REQUIRE(rows == p->w.n_out && (!q->format.block || p->w.n_in % q->format.block == 0),
               "fake quantisation of [%lld, %lld] in %lld rows, blocks of %d", (long long)p->w.n_out,
               (long long)p->w.n_in, (long long)rows, q->format.block);
    if (fakequant_reads_amax(&q->format)) WANT(q->amax, DT_F32, p->w.n_exp * q->n_part);
    if (!l->r || !l->merged) return;
    MT_REQUIRE(l->dropout <= 0, "a merged adapter with dropout %g", (double)l->dropout);
    want(__func__, "master_a", l->master_a, dev->stat_dtype, l->a.ndim, l->a.shape);
    want(__func__, "master_b", l->master_b, dev->stat_dtype, l->b.ndim, l->b.shape);
}

static void want_fp8(const struct proj *p)
{
    if (!p->fp8.step.ndim) return;
    WANT(p->fp8.step, DT_F32, p->w.n_exp);
    MT_REQUIRE(!p->quant.format.bits && !p->in.format.bits && (!p->fp8.pair || p->w.format == WF_BF16),
               "FP8 products of %s, or of fake-quantised experts", weight_format_name(p->w.format));
}

/* A quantised input of rows of n_in. */
static void want_input(const struct input_quant *in, int64_t n_in)
{
    const struct fakequant *f = &in->format;
    if (!f->bits) return;
    MT_REQUIRE(!f->block || n_in % f->block == 0, "a quantised input of %lld columns, blocks of %d", (long long)n_in,
               f->block);
    WANT(in->amax, DT_F32, 1);
}

static void want_grad(struct device *dev, const struct proj *p)
{
    const struct lora *l = &p->lora;
    if (!l->r || !p->grad.a.ndim) return;
    want(__func__, "grad.a", p->grad.a, dev->stat_dtype, l->a.ndim, l->a.shape);
    want(__func__, "grad.b", p->grad.b, dev->stat_dtype, l->b.ndim, l->b.shape);
}

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

static void want_heads(const struct attn_shape *s)
{
    MT_REQUIRE(s->n_kv > 0 && s->n_head > 0 && s->n_head % s->n_kv == 0 && s->head_dim > 0 && s->value_dim >= 0 &&
                   s->window >= 0,
               "%lld heads, %lld kv heads of %lld, values of %lld, window %lld", (long long)s->n_head,
               (long long)s->n_kv, (long long)s->head_dim, (long long)attn_value_dim(s), (long long)s->window);
}

static void want_attn(struct device *dev, struct tensor qkv, struct tensor o, struct tensor lse,
                      const struct seqs *seqs, const struct attn_shape *s)
{
    int64_t n_tok = qkv.shape[0], value_dim = attn_value_dim(s);
    want_heads(s);
    WANT(qkv, dev->act_dtype, n_tok, (s->n_head + s->n_kv) * s->head_dim + s->n_kv * value_dim);
    WANT(o, dev->act_dtype, n_tok, s->n_head * value_dim);
    WANT(lse, dev->stat_dtype, n_tok, s->n_head);
    WANT(seqs->cu, DT_I32, seqs->n_seq + 1);
}

/* ---- work and rounding ---- */

/* One pass of m rows through an adapter: x A^T and (x A^T) B^T, or the two products of their gradients. */
static void count_lora(struct device *dev, int64_t m, const struct lora *l, int64_t n_in, int64_t n_out)
{
    if (l->r) count_gemm(dev, m, l->r, n_in + n_out);
}

/* The same for a dense matrix: the products with A, with B, or both. */
static void count_dense_lora(struct device *dev, int64_t m, const struct lora *l, bool a, bool b)
{
    if (l->r) count_lora(dev, m, l, a ? l->n_seg * l->a.shape[1] : 0, b ? l->b.shape[0] : 0);
}

/* FLOPs of attention products over the (query, key) pairs of the mask: n_key of the width of keys, n_value of that of
 * values. Where a window limits the keys per query: exact for sequences of one length. */
static void count_attn(struct device *dev, int n_key, int n_value, int64_t n_tok, const struct seqs *seqs,
                       const struct attn_shape *s)
{
    const double len = mean_len(seqs, n_tok), near = (double)n_tok / len * window_pairs(len, (double)s->window);
    const double pairs = s->window && s->window < seqs->max_len ? near : seqs->pairs;
    dev->op.flops += 2 * pairs * (double)(s->n_head * (n_key * s->head_dim + n_value * attn_value_dim(s)));
}

/* Experts that a product of n_row rows reads, at most. */
static int64_t read_experts(const struct proj *p, int64_t n_row)
{
    return p->n_active ? MT_MIN(p->n_active, n_row) : n_row;
}

/* The matrix of a projection: as moves_weight, or its packed bytes alone where the product decodes them; of FP8
 * products, a byte per value, and their FLOPs; fake-quantised, it is written first, and the product B A computed. */
static void moves_matrix(struct device *dev, const struct proj *p, int64_t n_row)
{
    const struct weight *w = &p->w;
    const int64_t n_read = read_experts(p, n_row);
    const double decode = dev->op.decode, share = MT_MIN(1, (double)n_read / (double)w->n_exp);
    if (ops_reads_packed(dev, p, n_row)) {
        dev->op.bytes += share * (double)weight_bytes(w);
        return;
    }
    moves_weight(dev, w, n_read);
    if (p->fp8.pair) { /* as if all experts were exact */
        dev->op.bytes -= share * (double)weight_bytes(w) / 2;
        dev->op.fp8 += 2 * (double)n_row * (double)w->n_out * (double)w->n_in;
    }
    if (!p->quant.format.bits || n_row == 0) return;
    if (dev->op.decode <= decode)
        dev->op.decode += share * (double)(weight_bytes(w) + 2 * w->n_exp * w->n_out * w->n_in);
    if (p->lora.r && p->lora.merged)
        dev->op.flops += 2 * share * (double)(w->n_exp * w->n_out * w->n_in) * (double)p->lora.r;
}

/* The bytes that were counted since `before` belong to experts: only those with rows are read and written. */
static void of_active(struct device *dev, const struct proj *p, double before)
{
    const double share = p->n_active ? (double)p->n_active / (double)p->w.n_exp : 1;
    dev->op.bytes = before + share * (dev->op.bytes - before);
}

/* Counts the bytes of an adapter in a backward: factors read, gradients read and written. */
static void moves_grad(struct device *dev, const struct proj *p)
{
    const double before = dev->op.bytes;
    if (p->lora.r) MOVES(dev, p->lora.a, p->lora.b, p->grad.a, p->grad.a, p->grad.b, p->grad.b);
    of_active(dev, p, before);
}

static void moves_lora(struct device *dev, const struct proj *p)
{
    const double before = dev->op.bytes;
    if (p->lora.r) MOVES(dev, p->lora.a, p->lora.b);
    of_active(dev, p, before);
}

/* ---- dense ops ---- */

void op_embed_fwd(struct device *dev, struct tensor y, const struct weight *w, struct tensor tok)
{
    WANT(y, dev->act_dtype, tok.shape[0], w->n_in);
    WANT(tok, DT_I32, y.shape[0]);
    want_weight(__func__, w, 1, w->n_out, y.shape[1]);
    MOVES(dev, y, y, tok);
    RUN(0, embed_fwd, y, w, tok);
    round_act(dev, y);
}

void op_rmsnorm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w,
                    const struct norm *norm)
{
    int64_t n_tok = x.shape[0], dim = w.shape[0];
    WANT(y, dev->act_dtype, n_tok, dim);
    WANT(rstd, dev->stat_dtype, n_tok);
    WANT(x, dev->act_dtype, n_tok, dim);
    WANT(w, DT_F32, dim);
    MOVES(dev, y, rstd, x, w);
    RUN(0, rmsnorm_fwd, y, rstd, x, w, norm);
    round_act(dev, y);
}

void op_rmsnorm_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                    struct tensor w)
{
    int64_t n_tok = x.shape[0], dim = w.shape[0];
    WANT(dx, dev->act_dtype, n_tok, dim);
    WANT(dy, dev->act_dtype, n_tok, dim);
    WANT(x, dev->act_dtype, n_tok, dim);
    WANT(rstd, dev->stat_dtype, n_tok);
    WANT(w, DT_F32, dim);
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
    moves_lora(dev, proj);
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
    moves_grad(dev, proj);
    RUN(w->n_out, linear_bwd, dx, dy, x, xa, proj);
    round_act(dev, dx);
}

/* Checks the arguments, counts the bytes; returns the columns from the first to the last that is rotated. */
static struct tensor want_rope(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table,
                               int64_t n_head, int64_t head_dim)
{
    const int64_t width = table.shape[1], n_col = (n_head - 1) * head_dim + width;
    WANT(qkv, dev->act_dtype, qkv.shape[0], qkv.shape[1]);
    WANT(pos, DT_I32, qkv.shape[0]);
    WANT(table, DT_F32, table.shape[0], width);
    MT_REQUIRE(width % 2 == 0 && width <= head_dim && n_head >= 1 && qkv.ndim == 2 && qkv.shape[1] >= n_col,
               "%lld of the %lld channels of %lld heads in rows of %lld", (long long)width, (long long)head_dim,
               (long long)n_head, (long long)qkv.shape[1]);
    const struct tensor rotated = tensor_cols(qkv, 0, n_head * width); /* as many columns; only their size counts */
    MOVES(dev, rotated, rotated, pos);
    return tensor_cols(qkv, 0, n_col);
}

void op_rope_fwd(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table, int64_t n_head,
                 int64_t head_dim)
{
    const struct tensor heads = want_rope(dev, qkv, pos, table, n_head, head_dim);
    RUN(0, rope_fwd, qkv, pos, table, n_head, head_dim);
    round_act(dev, heads);
}

void op_rope_bwd(struct device *dev, struct tensor dqkv, struct tensor pos, struct tensor table, int64_t n_head,
                 int64_t head_dim)
{
    const struct tensor heads = want_rope(dev, dqkv, pos, table, n_head, head_dim);
    RUN(0, rope_bwd, dqkv, pos, table, n_head, head_dim);
    round_act(dev, heads);
}

void op_attn_fwd(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                 const struct seqs *seqs, const struct attn_shape *shape)
{
    want_attn(dev, qkv, o, lse, seqs, shape);
    WANT_OPT(sinks, DT_F32, shape->n_head);
    count_attn(dev, 1, 1, qkv.shape[0], seqs, shape); /* Q K^T; P V */
    MOVES(dev, o, lse, qkv);
    RUN(shape->window, attn_fwd, o, lse, qkv, sinks, seqs, shape);
    round_act(dev, o);
}

void op_attn_bwd(struct device *dev, struct tensor dqkv, struct tensor dout, struct tensor o, struct tensor lse,
                 struct tensor qkv, const struct seqs *seqs, const struct attn_shape *shape)
{
    want_attn(dev, qkv, o, lse, seqs, shape);
    want_attn(dev, dqkv, dout, lse, seqs, shape);
    count_attn(dev, 3, 2, qkv.shape[0], seqs, shape); /* Q K^T again, dS^T Q, dS K; dO V^T, P^T dO */
    MOVES(dev, dqkv, dout, o, lse, qkv);
    RUN(shape->window, attn_bwd, dqkv, dout, o, lse, qkv, seqs, shape);
    round_act(dev, dqkv);
}

/* Returns the number of columns of q and k. The width of wq selects the norm: per head or over all heads. */
static int64_t want_qk_norm(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd,
                            struct tensor wq, struct tensor wk, const struct attn_shape *s)
{
    int64_t n_tok = qkv.shape[0], dim = s->head_dim;
    want_heads(s);
    bool whole = wq.shape[0] != dim;
    WANT(qkv, dev->act_dtype, n_tok, (s->n_head + 2 * s->n_kv) * dim);
    WANT(raw, dev->act_dtype, n_tok, (s->n_head + s->n_kv) * dim);
    WANT(rstd, dev->stat_dtype, n_tok, whole ? 2 : s->n_head + s->n_kv);
    WANT(wq, DT_F32, whole ? s->n_head * dim : dim);
    WANT(wk, DT_F32, whole ? s->n_kv * dim : dim);
    return (s->n_head + s->n_kv) * dim;
}

void op_qk_norm_fwd(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd, struct tensor wq,
                    struct tensor wk, const struct attn_shape *shape, const struct norm *norm)
{
    int64_t n_col = want_qk_norm(dev, qkv, raw, rstd, wq, wk, shape);
    const struct tensor heads = tensor_cols(qkv, 0, n_col);
    MOVES(dev, heads, heads, raw, rstd);
    RUN(0, qk_norm_fwd, qkv, raw, rstd, wq, wk, shape, norm);
    round_act(dev, heads);
    round_act(dev, raw);
}

void op_qk_norm_bwd(struct device *dev, struct tensor dqkv, struct tensor raw, struct tensor rstd, struct tensor wq,
                    struct tensor wk, const struct attn_shape *shape)
{
    int64_t n_col = want_qk_norm(dev, dqkv, raw, rstd, wq, wk, shape);
    const struct tensor heads = tensor_cols(dqkv, 0, n_col);
    MOVES(dev, heads, heads, raw, rstd);
    RUN(0, qk_norm_bwd, dqkv, raw, rstd, wq, wk, shape);
    round_act(dev, heads);
}

static void want_mla(struct device *dev, struct tensor qkv, struct tensor q, struct tensor kv, struct tensor k_rope,
                     struct tensor pos, struct tensor table, const struct mla_shape *s)
{
    const int64_t n_tok = qkv.shape[0], dim = s->nope + s->rope;
    MT_REQUIRE(s->n_head > 0 && s->nope >= 0 && s->rope > 0 && s->rope % 2 == 0 && s->value > 0,
               "%lld heads of %lld + %lld, values of %lld", (long long)s->n_head, (long long)s->nope,
               (long long)s->rope, (long long)s->value);
    MT_REQUIRE(s->beta >= 0 && (!(s->beta > 0) || s->beta_len > 0), "beta %g of queries, after %lld positions",
               (double)s->beta, (long long)s->beta_len);
    WANT(qkv, dev->act_dtype, n_tok, s->n_head * (2 * dim + s->value));
    WANT(q, dev->act_dtype, n_tok, s->n_head * dim);
    WANT(kv, dev->act_dtype, n_tok, s->n_head * (s->nope + s->value));
    WANT(k_rope, dev->act_dtype, n_tok, s->rope);
    WANT(pos, DT_I32, n_tok);
    WANT(table, DT_F32, table.shape[0], s->rope);
}

void op_mla_qkv_fwd(struct device *dev, struct tensor qkv, struct tensor q, struct tensor kv, struct tensor k_rope,
                    struct tensor pos, struct tensor table, const struct mla_shape *shape)
{
    want_mla(dev, qkv, q, kv, k_rope, pos, table, shape);
    MOVES(dev, qkv, q, kv, k_rope, pos);
    RUN(0, mla_qkv_fwd, qkv, q, kv, k_rope, pos, table, shape);
    round_act(dev, qkv);
}

void op_mla_qkv_bwd(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dk_rope, struct tensor dqkv,
                    struct tensor pos, struct tensor table, const struct mla_shape *shape)
{
    want_mla(dev, dqkv, dq, dkv, dk_rope, pos, table, shape);
    MOVES(dev, dqkv, dq, dkv, dk_rope, pos);
    RUN(0, mla_qkv_bwd, dq, dkv, dk_rope, dqkv, pos, table, shape);
    round_act(dev, dq);
    round_act(dev, dkv);
    round_act(dev, dk_rope);
}

void op_linear_ce(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x,
                  const struct weight *w, struct tensor rows, struct tensor ids, float scale, int64_t chunk)
{
    int64_t n_label = rows.shape[0], n_tok = x.shape[0];
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(nll, dev->stat_dtype, n_label);
    WANT(hit, DT_I32, n_label);
    WANT_OPT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    WANT(rows, DT_I32, n_label);
    WANT(ids, DT_I32, n_label);
    MT_REQUIRE(chunk > 0, "a chunk of %lld rows", (long long)chunk);
    count_dense(dev, n_label, w->n_out, w->n_in);              /* x W^T */
    if (dx.ndim) count_dense(dev, n_label, w->n_out, w->n_in); /* dlogits W */
    MOVES(dev, nll, hit, rows, ids, dx, tensor_rows(x, 0, n_label));
    moves_weight(dev, w, n_label);
    RUN(0, linear_ce, nll, hit, dx, x, w, rows, ids, scale, chunk);
    round_act(dev, dx);
}

static void want_teacher(struct device *dev, const struct teacher *t, int64_t n_label, int64_t n_in)
{
    const int64_t n_top = t->id.ndim == 2 ? t->id.shape[1] : 0;
    WANT_OPT(t->hidden, dev->act_dtype, n_label, n_in);
    WANT_OPT(t->id, DT_I32, n_label, n_top);
    WANT_OPT(t->logprob, dev->stat_dtype, n_label, n_top);
    MT_REQUIRE(!t->hidden.ndim == !!t->id.ndim && !t->id.ndim == !t->logprob.ndim,
               "a teacher has hidden states, or ids with log probabilities");
    MT_REQUIRE(t->kind == KL_FORWARD || t->hidden.ndim, "the reverse KL needs the whole distribution");
    MT_REQUIRE(t->alpha >= 0 && t->alpha <= 1 && t->temperature > 0, "alpha %g, temperature %g", (double)t->alpha,
               (double)t->temperature);
}

void op_linear_kl(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit, struct tensor dx,
                  struct tensor x, const struct weight *w, struct tensor rows, struct tensor ids,
                  const struct teacher *teacher, float scale, int64_t chunk)
{
    int64_t n_label = rows.shape[0], n_tok = x.shape[0];
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(nll, dev->stat_dtype, n_label);
    WANT(kl, dev->stat_dtype, n_label);
    WANT(hit, DT_I32, n_label);
    WANT_OPT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    WANT(rows, DT_I32, n_label);
    WANT(ids, DT_I32, n_label);
    want_teacher(dev, teacher, n_label, w->n_in);
    MT_REQUIRE(chunk > 0, "a chunk of %lld rows", (long long)chunk);
    count_dense(dev, n_label, w->n_out, w->n_in);                           /* x W^T */
    if (teacher->hidden.ndim) count_dense(dev, n_label, w->n_out, w->n_in); /* hidden W^T */
    if (dx.ndim) count_dense(dev, n_label, w->n_out, w->n_in);              /* dlogits W */
    MOVES(dev, nll, kl, hit, rows, ids, dx, tensor_rows(x, 0, n_label), teacher->hidden, teacher->id, teacher->logprob);
    moves_weight(dev, w, n_label);
    RUN(0, linear_kl, nll, kl, hit, dx, x, w, rows, ids, teacher, scale, chunk);
    round_act(dev, dx);
}

void op_linear_topk(struct device *dev, struct tensor id, struct tensor logprob, struct tensor x,
                    const struct weight *w, struct tensor rows, float temperature, int64_t chunk)
{
    int64_t n_label = rows.shape[0], n_top = id.ndim == 2 ? id.shape[1] : 0;
    want_weight(__func__, w, 1, w->n_out, x.shape[1]);
    WANT(id, DT_I32, n_label, n_top);
    WANT(logprob, dev->stat_dtype, n_label, n_top);
    WANT(x, dev->act_dtype, x.shape[0], w->n_in);
    WANT(rows, DT_I32, n_label);
    MT_REQUIRE(chunk > 0 && temperature > 0 && n_top >= 1 && n_top <= w->n_out, "%lld of %lld logits, temperature %g",
               (long long)n_top, (long long)w->n_out, (double)temperature);
    count_dense(dev, n_label, w->n_out, w->n_in);
    MOVES(dev, id, logprob, rows, tensor_rows(x, 0, n_label));
    moves_weight(dev, w, n_label);
    RUN(0, linear_topk, id, logprob, x, w, rows, temperature, chunk);
}

/* ---- experts ---- */

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
    MT_REQUIRE(!router->given || router_is_sigmoid(router), "given experts of a softmax router");
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

void op_glu_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor gate, const struct glu *glu)
{
    const int64_t n_tok = act.shape[0], width = act.shape[1];
    WANT(act, dev->act_dtype, n_tok, width);
    WANT(pre, dev->act_dtype, n_tok, 2 * width);
    WANT_OPT(gate, dev->stat_dtype, n_tok, 1);
    MOVES(dev, act, pre, gate);
    RUN(0, glu_fwd, act, pre, gate, glu);
    round_act(dev, act);
}

void op_glu_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor dact, struct tensor pre,
                struct tensor gate, const struct glu *glu)
{
    const int64_t n_tok = dact.shape[0], width = dact.shape[1];
    WANT(dpre, dev->act_dtype, n_tok, 2 * width);
    WANT(dact, dev->act_dtype, n_tok, width);
    WANT(pre, dev->act_dtype, n_tok, 2 * width);
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

void op_moe_up_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa, struct tensor x,
                   const struct route *r, const struct proj *up, const struct glu *glu)
{
    const struct weight *w = &up->w;
    const struct lora *lora = &up->lora;
    int64_t n_tok = x.shape[0], n_row = n_tok * want_route(dev, r, n_tok, w->n_exp);
    want_weight(__func__, w, w->n_exp, 2 * act.shape[1], x.shape[1]);
    WANT(act, dev->act_dtype, n_row, w->n_out / 2);
    WANT(pre, dev->act_dtype, n_row, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    WANT_OPT(up->bias, DT_F32, w->n_exp, w->n_out);
    want_expert_lora(dev, lora, xa, n_row, w);
    count_gemm(dev, n_row, w->n_out, w->n_in); /* x W_e^T */
    want_quant(dev, up);
    want_fp8(up);
    count_lora(dev, n_row, lora, w->n_in, lora->merged ? 0 : w->n_out);
    MOVES(dev, act, pre, xa, x, r->row_slot);
    moves_matrix(dev, up, n_row);
    moves_lora(dev, up);
    RUN(0, moe_up_fwd, act, pre, xa, x, r, up, glu);
    round_act(dev, act);
    round_act(dev, pre);
    if (lora->r) round_act(dev, xa);
}

void op_glu_quant_fwd(struct device *dev, struct tensor act, struct tensor pre, const struct glu *glu,
                      const struct input_quant *in)
{
    const int64_t n_row = pre.shape[0], width = act.shape[1];
    WANT(act, dev->act_dtype, n_row, width);
    WANT(pre, dev->act_dtype, n_row, 2 * width);
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
    int64_t n_tok = r->idx.shape[0], n_row = n_tok * want_route(dev, r, n_tok, w->n_exp);
    want_weight(__func__, w, w->n_exp, w->n_out, act.shape[1]);
    WANT_OPT(y, dev->act_dtype, n_row, w->n_out);
    WANT(act, dev->act_dtype, n_row, w->n_in);
    WANT_OPT(down->bias, DT_F32, w->n_exp, w->n_out);
    want_expert_lora(dev, lora, ha, n_row, w);
    if (y.ndim) count_gemm(dev, n_row, w->n_out, w->n_in); /* act W_e^T */
    want_quant(dev, down);
    want_fp8(down);
    count_lora(dev, n_row, lora, w->n_in, y.ndim && !lora->merged ? w->n_out : 0);
    MOVES(dev, y, ha, act);
    if (y.ndim) moves_matrix(dev, down, n_row);
    moves_lora(dev, down);
    RUN(0, moe_down_fwd, y, ha, act, r, down);
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
    want_weight(__func__, w, w->n_exp, dout.shape[1], act.shape[1]);
    WANT(dpre, dev->act_dtype, n_row, 2 * w->n_in);
    WANT(r->gate, dev->stat_dtype, n_tok, n_top);
    WANT(dgate, dev->stat_dtype, n_tok, n_top);
    WANT(act, dev->act_dtype, n_row, w->n_in);
    WANT(dout, dev->act_dtype, n_tok, w->n_out);
    WANT(pre, dev->act_dtype, n_row, 2 * w->n_in);
    WANT_OPT(down->bias, DT_F32, w->n_exp, w->n_out);
    want_expert_lora(dev, lora, ha, n_row, w);
    want_grad(dev, down);
    want_quant(dev, down);
    want_fp8(down);
    want_input(&down->in, w->n_in);
    count_gemm(dev, n_row, w->n_out, w->n_in);                              /* dout W_e */
    count_lora(dev, n_row, lora, lora->merged ? 0 : w->n_in, w->n_out);     /* dout B; (dout B) A */
    if (down->grad.a.ndim) count_lora(dev, n_row, lora, w->n_in, w->n_out); /* dout^T ha; (dout B)^T act */
    MOVES(dev, dpre, dgate, act, dout, pre, ha, r->gate, r->row_slot);
    moves_matrix(dev, down, n_row);
    moves_grad(dev, down);
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
    want_weight(__func__, w, w->n_exp, dpre.shape[1], dx.shape[1]);
    WANT(dx, dev->act_dtype, n_tok, w->n_in);
    WANT(dpre, dev->act_dtype, n_row, w->n_out);
    WANT(x, dev->act_dtype, n_tok, w->n_in);
    want_expert_lora(dev, lora, xa, n_row, w);
    want_grad(dev, up);
    want_quant(dev, up);
    want_fp8(up);
    count_gemm(dev, n_row, w->n_out, w->n_in);                            /* dpre W_e */
    count_lora(dev, n_row, lora, lora->merged ? 0 : w->n_in, w->n_out);   /* dpre B; (dpre B) A */
    if (up->grad.a.ndim) count_lora(dev, n_row, lora, w->n_in, w->n_out); /* dpre^T xa; (dpre B)^T x */
    MOVES(dev, dx, dpre, xa, r->row_slot);
    if (lora->r) MOVES(dev, x);
    moves_matrix(dev, up, n_row);
    moves_grad(dev, up);
    RUN(0, moe_up_bwd, dx, dpre, x, xa, r, up);
    round_act(dev, dx);
}

/* The host does not know which experts have rows: counts all experts. */
void op_decode(struct device *dev, struct tensor y, const struct proj *proj, struct tensor offs)
{
    const struct weight *w = &proj->w;
    WANT(y, dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32, w->n_exp, w->n_out, w->n_in);
    WANT_OPT(offs, DT_I32, w->n_exp + 1);
    MT_REQUIRE(w->format != WF_NONE && contiguous(y), "decoding %s into rows %lld apart", weight_format_name(w->format),
               (long long)y.ld);
    want_quant(dev, proj);
    dev->op.bytes += (double)weight_bytes(w);
    MOVES(dev, y);
    RUN(0, decode, y, proj, offs);
}

void op_mx_range(struct device *dev, struct tensor range, const struct weight *w)
{
    WANT(range, DT_I32, w->n_exp, 2);
    MT_REQUIRE(w->format == WF_MXFP4, "the exponents of %s", weight_format_name(w->format));
    dev->op.bytes += (double)weight_bytes(w);
    RUN(w->n_out, mx_range, range, w);
}

void op_expert_codes(struct device *dev, struct tensor y, const struct weight *w, struct tensor step)
{
    WANT(y, DT_U8, w->n_exp, 2 * w->n_out, w->n_in);
    WANT(step, DT_F32, w->n_exp);
    MT_REQUIRE(w->format == WF_MXFP4 && contiguous(y), "e4m3 codes of %s", weight_format_name(w->format));
    dev->op.bytes += (double)weight_bytes(w);
    MOVES(dev, y);
    RUN(w->n_out, expert_codes, y, w, step);
}

void op_proj_amax(struct device *dev, struct tensor amax, const struct proj *proj)
{
    MT_REQUIRE(proj->quant.format.bits, "the largest magnitudes of a projection that is not quantised");
    want_quant(dev, proj);
    WANT(amax, DT_F32, proj->w.n_exp * proj->quant.n_part);
    dev->op.bytes += (double)weight_bytes(&proj->w);
    if (proj->lora.merged) MOVES(dev, proj->lora.a, proj->lora.b);
    RUN(proj->w.n_out, proj_amax, amax, proj);
}
