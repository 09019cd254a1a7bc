/* ops_attention.c - the wrappers op_* of attention: RoPE, norms of q and k, decoding, latent attention, the output
 * gate. */
#include "kernels/ops/ops_check.h"

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
    want_seqs(__func__, seqs, true);
}

/* Counts the FLOPs of attention products over the (query, key) pairs of the mask: n_key products of the width of keys,
 * n_value of the width of values. With a window the count is exact only if all sequences have the same length. */
static void count_attn(struct device *dev, int n_key, int n_value, int64_t n_tok, const struct seqs *seqs,
                       const struct attn_shape *s)
{
    const double len = mean_len(seqs, n_tok), near = (double)n_tok / len * window_pairs(len, (double)s->window);
    const double pairs = s->window && s->window < seqs->max_len ? near : seqs->pairs;
    dev->op.flops += 2 * pairs * (double)(s->n_head * (n_key * s->head_dim + n_value * attn_value_dim(s)));
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

static void want_pages(struct device *dev, const struct pages *p, struct tensor pos, const struct seqs *seqs,
                       int64_t n_col)
{
    WANT(p->rows, dev->act_dtype, p->rows.shape[0], n_col);
    WANT(p->table, DT_I32, p->table.shape[0], p->table.shape[1]);
    WANT(pos, DT_I32, pos.shape[0]);
    MT_REQUIRE(p->rows.shape[0] % MT_PAGE == 0 && p->table.shape[0] >= seqs->n_seq && p->table.shape[1] > 0,
               "%lld rows, pages of %lld sequences, %lld each; %lld sequences", (long long)p->rows.shape[0],
               (long long)p->table.shape[0], (long long)p->table.shape[1], (long long)seqs->n_seq);
}

void op_page_store(struct device *dev, const struct pages *pages, struct tensor x, struct tensor pos,
                   const struct seqs *seqs)
{
    want_pages(dev, pages, pos, seqs, x.shape[1]);
    WANT(x, dev->act_dtype, pos.shape[0], x.shape[1]);
    want_seqs(__func__, seqs, false);
    MOVES(dev, x, x, pos);
    RUN(0, page_store, pages, x, pos, seqs);
}

void op_attn_decode(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                    struct tensor sinks, struct tensor pos, const struct seqs *seqs, const struct attn_shape *shape)
{
    const int64_t value_dim = attn_value_dim(shape), n_key = shape->n_kv * shape->head_dim;
    const int64_t n_col = pages->rows.shape[1] == n_key ? n_key : n_key + shape->n_kv * value_dim;
    /* where a window limits the keys, exact only if all sequences have the same length */
    const double near = (double)pos.shape[0] * (double)shape->window;
    const double keys = shape->window ? MT_MIN(seqs->pairs, near) : seqs->pairs;
    want_heads(shape);
    MT_REQUIRE(n_col > n_key || value_dim <= shape->head_dim, "values of %lld in keys of %lld", (long long)value_dim,
               (long long)shape->head_dim);
    want_pages(dev, pages, pos, seqs, n_col);
    WANT(q, dev->act_dtype, pos.shape[0], shape->n_head * shape->head_dim);
    WANT(o, dev->act_dtype, pos.shape[0], shape->n_head * value_dim);
    want_seqs(__func__, seqs, false);
    WANT_OPT(sinks, DT_F32, shape->n_head);
    dev->op.flops += 2 * keys * (double)(shape->n_head * (shape->head_dim + value_dim)); /* q K^T; p V */
    dev->op.bytes += keys * (double)(n_col * dtype_size(dev->act_dtype));
    MOVES(dev, o, q, pos);
    RUN(shape->window, attn_decode, o, q, pages, sinks, pos, seqs, shape);
    round_act(dev, o);
}

/* Returns the number of columns that have a norm. The width of wq selects it: per head or over all heads. */
static int64_t want_qk_norm(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd,
                            struct tensor wq, struct tensor wk, struct tensor wv, const struct attn_shape *s)
{
    const int64_t n_tok = qkv.shape[0], dim = s->head_dim, n_head = s->n_head + (wv.ndim ? 2 : 1) * s->n_kv;
    want_heads(s);
    const bool whole = wq.shape[0] != dim;
    MT_REQUIRE(!whole || !wv.ndim, "a norm of values beside one over all heads");
    WANT(qkv, dev->act_dtype, n_tok, (s->n_head + 2 * s->n_kv) * dim);
    WANT(raw, dev->act_dtype, n_tok, n_head * dim);
    WANT(rstd, dev->stat_dtype, n_tok, whole ? 2 : n_head);
    WANT(wq, DT_F32, whole ? s->n_head * dim : dim);
    WANT(wk, DT_F32, whole ? s->n_kv * dim : dim);
    WANT_OPT(wv, DT_F32, dim);
    return n_head * dim;
}

void op_qk_norm_fwd(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd, struct tensor wq,
                    struct tensor wk, struct tensor wv, const struct attn_shape *shape, const struct norm *norm)
{
    int64_t n_col = want_qk_norm(dev, qkv, raw, rstd, wq, wk, wv, shape);
    const struct tensor heads = tensor_cols(qkv, 0, n_col);
    MOVES(dev, heads, heads, raw, rstd);
    RUN(0, qk_norm_fwd, qkv, raw, rstd, wq, wk, wv, shape, norm);
    round_act(dev, heads);
    round_act(dev, raw);
}

void op_qk_norm_bwd(struct device *dev, struct tensor dqkv, struct tensor raw, struct tensor rstd, struct tensor wq,
                    struct tensor wk, struct tensor wv, const struct attn_shape *shape)
{
    int64_t n_col = want_qk_norm(dev, dqkv, raw, rstd, wq, wk, wv, shape);
    const struct tensor heads = tensor_cols(dqkv, 0, n_col);
    MOVES(dev, heads, heads, raw, rstd);
    RUN(0, qk_norm_bwd, dqkv, raw, rstd, wq, wk, wv, shape);
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

static void want_latent(struct device *dev, struct tensor q, int64_t n_q, struct tensor y, int64_t n_y,
                        const struct proj *kv_b, const struct mla_shape *s)
{
    const struct weight *w = &kv_b->w;
    const int64_t n_tok = q.shape[0], r = kv_b->lora.r;
    MT_REQUIRE(s->n_head > 0 && s->nope >= 0 && s->rope > 0 && s->value > 0 && w->n_exp == 1 &&
                   w->n_out == s->n_head * (s->nope + s->value) && !kv_b->bias.ndim && (!r || kv_b->lora.n_seg == 1),
               "%lld heads of %lld + %lld, values of %lld, from [%lld, %lld]", (long long)s->n_head, (long long)s->nope,
               (long long)s->rope, (long long)s->value, (long long)w->n_out, (long long)w->n_in);
    WANT(q, dev->act_dtype, n_tok, s->n_head * n_q);
    WANT(y, dev->act_dtype, n_tok, s->n_head * n_y);
    MOVES(dev, q, y);
    moves_weight(dev, w, 1);
    if (r) MOVES(dev, kv_b->lora.a, kv_b->lora.b);
}

/* Counts the products of every head with its n rows of kv_b, and with its adapter. */
static void count_latent(struct device *dev, int64_t n_tok, int64_t n, const struct proj *kv_b,
                         const struct mla_shape *s)
{
    const int64_t n_in = kv_b->w.n_in, r = kv_b->lora.merged ? 0 : kv_b->lora.r;
    count_gemm(dev, n_tok * s->n_head, n_in, n);
    count_gemm(dev, n_tok * s->n_head, r, n + n_in);
}

void op_mla_absorb(struct device *dev, struct tensor y, struct tensor q, struct tensor pos, const struct proj *kv_b,
                   const struct mla_shape *shape)
{
    want_latent(dev, q, shape->nope + shape->rope, y, kv_b->w.n_in + shape->rope, kv_b, shape);
    WANT(pos, DT_I32, q.shape[0]);
    count_latent(dev, q.shape[0], shape->nope, kv_b, shape);
    RUN(0, mla_absorb, y, q, pos, kv_b, shape);
    round_act(dev, y);
}

void op_mla_values(struct device *dev, struct tensor o, struct tensor z, const struct proj *kv_b,
                   const struct mla_shape *shape)
{
    want_latent(dev, z, kv_b->w.n_in, o, shape->value, kv_b, shape);
    count_latent(dev, z.shape[0], shape->value, kv_b, shape);
    RUN(0, mla_values, o, z, kv_b, shape);
    round_act(dev, o);
}

static void want_wide(struct device *dev, struct tensor wide, const struct attn_shape *s)
{
    MT_REQUIRE(s->n_head > 0 && s->n_kv > 0 && s->head_dim > 0, "%lld heads, %lld kv heads of %lld",
               (long long)s->n_head, (long long)s->n_kv, (long long)s->head_dim);
    WANT(wide, dev->act_dtype, wide.shape[0], 2 * (s->n_head + s->n_kv) * s->head_dim);
}

static void want_split(struct device *dev, struct tensor qkv, struct tensor rstd, struct tensor wide, struct tensor wq,
                       struct tensor wk, struct tensor pos, struct tensor table, const struct attn_shape *s)
{
    want_wide(dev, wide, s);
    WANT(qkv, dev->act_dtype, wide.shape[0], (s->n_head + 2 * s->n_kv) * s->head_dim);
    WANT(rstd, dev->stat_dtype, wide.shape[0], s->n_head + s->n_kv);
    WANT(wq, DT_F32, s->head_dim);
    WANT(wk, DT_F32, s->head_dim);
    WANT(pos, DT_I32, wide.shape[0]);
    WANT(table, DT_F32, table.shape[0], table.shape[1]);
    MT_REQUIRE(table.shape[1] % 2 == 0 && table.shape[1] <= s->head_dim, "%lld of %lld channels are rotated",
               (long long)table.shape[1], (long long)s->head_dim);
}

void op_attn_split_fwd(struct device *dev, struct tensor qkv, struct tensor rstd, struct tensor wide, struct tensor wq,
                       struct tensor wk, struct tensor pos, struct tensor table, const struct attn_shape *shape,
                       const struct norm *norm)
{
    want_split(dev, qkv, rstd, wide, wq, wk, pos, table, shape);
    MOVES(dev, qkv, qkv, rstd, pos); /* of wide as many columns as of qkv */
    RUN(0, attn_split_fwd, qkv, rstd, wide, wq, wk, pos, table, shape, norm);
    round_act(dev, qkv);
}

void op_attn_split_bwd(struct device *dev, struct tensor dwide, struct tensor dqkv, struct tensor wide,
                       struct tensor rstd, struct tensor wq, struct tensor wk, struct tensor pos, struct tensor table,
                       const struct attn_shape *shape)
{
    const int64_t n_q = shape->n_head * shape->head_dim, n_kv = shape->n_kv * shape->head_dim;
    want_split(dev, dqkv, rstd, wide, wq, wk, pos, table, shape);
    want_wide(dev, dwide, shape);
    MOVES(dev, dqkv, dqkv, tensor_cols(dqkv, 0, n_q + n_kv), rstd, pos); /* of wide q and k */
    RUN(0, attn_split_bwd, dwide, dqkv, wide, rstd, wq, wk, pos, table, shape);
    for (int64_t h = 0; h < shape->n_head; h++)
        round_act(dev, tensor_cols(dwide, 2 * h * shape->head_dim, shape->head_dim));
    round_act(dev, tensor_cols(dwide, 2 * n_q, n_kv));
}

void op_attn_gate_fwd(struct device *dev, struct tensor y, struct tensor o, struct tensor wide,
                      const struct attn_shape *shape)
{
    const int64_t n_col = shape->n_head * shape->head_dim;
    want_wide(dev, wide, shape);
    WANT(y, dev->act_dtype, wide.shape[0], n_col);
    WANT(o, dev->act_dtype, wide.shape[0], n_col);
    MOVES(dev, y, o, o);
    RUN(0, attn_gate_fwd, y, o, wide, shape);
    round_act(dev, y);
}

void op_attn_gate_bwd(struct device *dev, struct tensor dout, struct tensor dwide, struct tensor dy, struct tensor o,
                      struct tensor wide, const struct attn_shape *shape)
{
    const int64_t n_tok = wide.shape[0], n_col = shape->n_head * shape->head_dim;
    want_wide(dev, wide, shape);
    want_wide(dev, dwide, shape);
    WANT(dout, dev->act_dtype, n_tok, n_col);
    WANT(dy, dev->act_dtype, n_tok, n_col);
    WANT(o, dev->act_dtype, n_tok, n_col);
    MOVES(dev, dout, dout, dy, o, o);
    RUN(0, attn_gate_bwd, dout, dwide, dy, o, wide, shape);
    round_act(dev, dout);
    for (int64_t h = 0; h < shape->n_head; h++)
        round_act(dev, tensor_cols(dwide, (2 * h + 1) * shape->head_dim, shape->head_dim));
}
