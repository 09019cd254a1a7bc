/* ops_dsv4.c - the wrappers op_* of DeepSeek-V4: hyper-connections, compressed attention, attention whose heads share
 * one key, which is also the value. */
#include <math.h>

#include "kernels/ops/ops_check.h"

/* ---- hyper-connections ---- */

/* Checks x [T, N*D], m and h; returns D. site: h must have pre, post and C; else it may be that of the model's head,
 * which has only pre. */
static int64_t want_hyper(struct device *dev, struct tensor x, struct tensor m, const struct hyper *h, bool site)
{
    const int64_t n = h->n_stream, n_col = x.shape[1], n_value = (2 + n) * n;
    MT_REQUIRE(n >= 1 && n <= MT_MAX_STREAMS && n_col > 0 && n_col % n == 0,
               "%lld streams (1 to %d) in rows of %lld columns", (long long)n, MT_MAX_STREAMS, (long long)n_col);
    const bool head = !site && h->fn.shape[0] == n;
    MT_REQUIRE(head || (h->n_iter >= 1 && h->n_iter <= MT_MAX_SINKHORN), "%d rounds of normalisation (1 to %d)",
               h->n_iter, MT_MAX_SINKHORN);
    WANT(x, dev->act_dtype, x.shape[0], n_col);
    WANT(m, dev->stat_dtype, x.shape[0], hyper_values(h));
    WANT(h->fn, DT_F32, head ? n : n_value, n_col);
    WANT(h->base, DT_F32, head ? n : n_value);
    WANT(h->scale, DT_F32, head ? 1 : 3);
    return n_col / n;
}

void op_hyper_pre_fwd(struct device *dev, struct tensor y, struct tensor m, struct tensor rstd, struct tensor x,
                      const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, m, h, false);
    WANT(y, dev->act_dtype, n_tok, dim);
    WANT(rstd, dev->stat_dtype, n_tok);
    dev->op.flops += 2 * (double)tensor_count(x) * (double)hyper_values(h);
    MOVES(dev, y, m, rstd, x, h->fn);
    RUN(0, hyper_pre_fwd, y, m, rstd, x, h);
    round_act(dev, y);
}

void op_hyper_post_fwd(struct device *dev, struct tensor out, struct tensor x, struct tensor f, struct tensor m,
                       const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, m, h, true);
    WANT(out, dev->act_dtype, n_tok, x.shape[1]);
    WANT(f, dev->act_dtype, n_tok, dim);
    MOVES(dev, out, x, f, m);
    RUN(0, hyper_post_fwd, out, x, f, m, h);
    round_act(dev, out);
}

void op_hyper_post_bwd(struct device *dev, struct tensor df, struct tensor dx, struct tensor dm, struct tensor dout,
                       struct tensor x, struct tensor f, struct tensor m, const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, m, h, true);
    WANT(df, dev->act_dtype, n_tok, dim);
    WANT(dx, dev->act_dtype, n_tok, x.shape[1]);
    WANT(dm, dev->stat_dtype, n_tok, hyper_values(h));
    WANT(dout, dev->act_dtype, n_tok, x.shape[1]);
    WANT(f, dev->act_dtype, n_tok, dim);
    MOVES(dev, df, dx, dm, dout, x, f, m);
    RUN(0, hyper_post_bwd, df, dx, dm, dout, x, f, m, h);
    round_act(dev, df);
    round_act(dev, dx);
}

void op_hyper_pre_bwd(struct device *dev, struct tensor dx, struct tensor dm, struct tensor dy, struct tensor x,
                      struct tensor m, struct tensor rstd, const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, m, h, false);
    WANT(dx, dev->act_dtype, n_tok, x.shape[1]);
    WANT_OPT(dm, dev->stat_dtype, n_tok, hyper_values(h));
    WANT(dy, dev->act_dtype, n_tok, dim);
    WANT(rstd, dev->stat_dtype, n_tok);
    dev->op.flops += 2 * (double)tensor_count(x) * (double)hyper_values(h);
    MOVES(dev, dx, dx, dm, dy, x, m, rstd, h->fn);
    RUN(0, hyper_pre_bwd, dx, dm, dy, x, m, rstd, h);
    round_act(dev, dx);
}

/* ---- compressed attention ---- */

static int64_t entry_rows(int64_t n_tok, int64_t ratio) { return MT_MAX(1, n_tok / ratio); }

static void want_compress(struct device *dev, struct tensor y, struct tensor kg, struct tensor bias,
                          const struct seqs *seqs, const struct compress_shape *s)
{
    const int64_t n_tok = kg.shape[0], n_part = s->overlap ? 2 : 1;
    MT_REQUIRE(s->ratio > 0 && s->width > 0, "entries of %lld tokens and width %lld", (long long)s->ratio,
               (long long)s->width);
    WANT(kg, dev->act_dtype, n_tok, 2 * n_part * s->width);
    WANT(y, dev->act_dtype, entry_rows(n_tok, s->ratio), s->width);
    WANT(bias, DT_F32, s->ratio, n_part * s->width);
    want_seqs(__func__, seqs, false);
}

void op_compress_fwd(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg, struct tensor bias,
                     const struct seqs *seqs, const struct compress_shape *shape)
{
    want_compress(dev, y, kg, bias, seqs, shape);
    WANT(pos, DT_I32, y.shape[0]);
    MOVES(dev, y, pos, kg, bias);
    RUN(shape->ratio, compress_fwd, y, pos, kg, bias, seqs, shape);
    round_act(dev, y);
}

void op_compress_bwd(struct device *dev, struct tensor dkg, struct tensor dy, struct tensor kg, struct tensor bias,
                     const struct seqs *seqs, const struct compress_shape *shape)
{
    want_compress(dev, dy, kg, bias, seqs, shape);
    WANT(dkg, dev->act_dtype, kg.shape[0], kg.shape[1]);
    MOVES(dev, dkg, dy, kg, bias);
    RUN(shape->ratio, compress_bwd, dkg, dy, kg, bias, seqs, shape);
    round_act(dev, dkg);
}

/* Rows of a tensor for the entries that a pass completes; some may stay unused. */
static int64_t complete_rows(const struct past *p, int64_t ratio) { return p->pos.shape[0] / ratio + p->seqs->n_seq; }

/* Checks the arguments. n_col: columns of the rows in pages. */
static void want_past(struct device *dev, const struct past *p, const struct pages *pages, int64_t n_col)
{
    WANT(pages->rows, dev->act_dtype, pages->rows.shape[0], n_col);
    WANT(pages->table, DT_I32, pages->table.shape[0], pages->table.shape[1]);
    WANT(p->pos, DT_I32, p->pos.shape[0]);
    want_seqs(__func__, p->seqs, false);
    MT_REQUIRE(pages->rows.shape[0] % MT_PAGE == 0 && pages->table.shape[0] >= p->seqs->n_seq &&
                   pages->table.shape[1] > 0,
               "%lld rows, pages of %lld sequences, %lld each; %lld sequences", (long long)pages->rows.shape[0],
               (long long)pages->table.shape[0], (long long)pages->table.shape[1], (long long)p->seqs->n_seq);
}

void op_compress_decode(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg, struct tensor bias,
                        const struct past *past, const struct compress_shape *shape)
{
    const int64_t n_part = shape->overlap ? 2 : 1, n_row = complete_rows(past, shape->ratio);
    want_past(dev, past, past->pages, 2 * n_part * shape->width);
    WANT(kg, dev->act_dtype, past->pos.shape[0], 2 * n_part * shape->width);
    WANT(y, dev->act_dtype, n_row, shape->width);
    WANT(pos, DT_I32, n_row);
    WANT(bias, DT_F32, shape->ratio, n_part * shape->width);
    MOVES(dev, y, pos, kg, bias);
    RUN(shape->ratio, compress_decode, y, pos, kg, bias, past, shape);
    round_act(dev, y);
}

void op_entry_store(struct device *dev, struct tensor x, const struct past *past, int64_t ratio)
{
    want_past(dev, past, past->pages, x.shape[1]);
    WANT(x, dev->act_dtype, complete_rows(past, ratio), x.shape[1]);
    MOVES(dev, x, x);
    RUN(ratio, entry_store, x, past, ratio);
}

void op_index_decode(struct device *dev, struct tensor idx, struct tensor q, struct tensor w, const struct past *past,
                     int64_t ratio)
{
    const int64_t n_tok = q.shape[0], n_head = w.ndim == 2 ? w.shape[1] : 0, dim = past->pages->rows.shape[1];
    MT_REQUIRE(ratio > 0 && n_head > 0, "%lld heads score entries of %lld tokens", (long long)n_head, (long long)ratio);
    want_past(dev, past, past->pages, dim);
    WANT(idx, DT_I32, n_tok, idx.shape[1]);
    WANT(q, dev->act_dtype, n_tok, n_head * dim);
    WANT(w, dev->act_dtype, n_tok, n_head);
    WANT(past->pos, DT_I32, n_tok);
    /* FLOPs of the scores q k^T: an upper bound, as tokens that see no more entries than are chosen need none */
    const double pairs = past->seqs->pairs / (double)ratio;
    dev->op.flops += 2 * pairs * (double)(n_head * dim);
    dev->op.bytes += pairs * (double)(dim * dtype_size(dev->act_dtype));
    MOVES(dev, idx, q, w);
    RUN(0, index_decode, idx, q, w, past, ratio);
}

void op_index_topk(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                   const struct seqs *seqs, int64_t ratio)
{
    const int64_t n_tok = q.shape[0], n_head = w.ndim == 2 ? w.shape[1] : 0, dim = k.ndim == 2 ? k.shape[1] : 0;
    MT_REQUIRE(ratio > 0 && n_head > 0 && dim > 0, "%lld heads of %lld score entries of %lld tokens", (long long)n_head,
               (long long)dim, (long long)ratio);
    WANT(idx, DT_I32, n_tok, idx.shape[1]);
    WANT(q, dev->act_dtype, n_tok, n_head * dim);
    WANT(k, dev->act_dtype, entry_rows(n_tok, ratio), dim);
    WANT(w, dev->act_dtype, n_tok, n_head);
    want_seqs(__func__, seqs, false);
    /* FLOPs of the scores q k^T. A token that sees no more entries than are chosen (the columns of idx) needs no
     * scores: the first `few` tokens of a sequence. n_choice and pairs are estimates: both assume sequences of equal
     * length, and that the n-th token sees n / ratio entries, not rounded down. */
    const double len = mean_len(seqs, n_tok), n_seq = (double)n_tok / len;
    const double few = MT_MIN(len, (double)((idx.shape[1] + 1) * ratio - 1));
    const int64_t n_choice = (int64_t)((double)n_tok - n_seq * few);
    const double pairs = MT_MAX(0, seqs->pairs - n_seq * few * (few + 1) / 2);
    dev->op.flops += 2 * pairs / (double)ratio * (double)(n_head * dim);
    MOVES(dev, idx, tensor_rows(q, 0, n_choice), k, tensor_rows(w, 0, n_choice));
    RUN(0, index_topk, idx, q, k, w, seqs, ratio);
}

/* Checks the arguments. */
static void want_tail_rope(struct device *dev, struct tensor x, struct tensor y, struct tensor rstd, struct tensor pos,
                           struct tensor table, const struct tail_rope *r)
{
    const int64_t n_tok = y.shape[0], width = table.shape[1];
    MT_REQUIRE(r->n_head > 0 && width > 0 && width % 2 == 0 && width <= r->head_dim,
               "the last %lld columns of %lld heads of %lld", (long long)width, (long long)r->n_head,
               (long long)r->head_dim);
    WANT(x, dev->act_dtype, n_tok, r->n_head * r->head_dim);
    WANT(y, dev->act_dtype, n_tok, r->n_head * r->head_dim);
    WANT_OPT(rstd, dev->stat_dtype, n_tok, r->n_head);
    WANT(pos, DT_I32, n_tok);
    WANT(table, DT_F32, table.shape[0], width);
}

/* Counts the bytes that are read and written. In place and without a norm, only the rotated columns count. */
static void moves_tail_rope(struct device *dev, struct tensor y, struct tensor x, struct tensor rstd, struct tensor pos,
                            struct tensor table, const struct tail_rope *r)
{
    const bool in_place = !rstd.ndim && x.data == y.data;
    const struct tensor part = in_place ? tensor_cols(y, 0, r->n_head * table.shape[1]) : y;
    MOVES(dev, part, part, rstd, pos);
}

void op_tail_rope_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor pos,
                      struct tensor table, const struct tail_rope *r)
{
    want_tail_rope(dev, x, y, rstd, pos, table, r);
    MT_REQUIRE(!rstd.ndim || dev->dry_run || x.data != y.data || !x.shape[0], "a norm of heads in place");
    moves_tail_rope(dev, y, x, rstd, pos, table, r);
    RUN(0, tail_rope_fwd, y, rstd, x, pos, table, r);
    round_act(dev, y);
}

void op_tail_rope_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                      struct tensor pos, struct tensor table, const struct tail_rope *r)
{
    want_tail_rope(dev, rstd.ndim ? x : dy, dx, rstd, pos, table, r);
    want_tail_rope(dev, dy, dx, rstd, pos, table, r);
    moves_tail_rope(dev, dx, dy, rstd, pos, table, r);
    if (rstd.ndim) MOVES(dev, x);
    RUN(0, tail_rope_bwd, dx, dy, x, rstd, pos, table, r);
    round_act(dev, dx);
}

static void want_groups(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    MT_REQUIRE(w->format && w->n_exp > 0 && w->n_out > 0 && w->n_in > 0, "%lld groups of [%lld, %lld]",
               (long long)w->n_exp, (long long)w->n_out, (long long)w->n_in);
    WANT(y, dev->act_dtype, x.shape[0], w->n_exp * w->n_out);
    WANT(x, dev->act_dtype, x.shape[0], w->n_exp * w->n_in);
    count_dense(dev, x.shape[0], w->n_exp * w->n_out, w->n_in); /* x W^T or dy W of every group */
    MOVES(dev, y, x);
    moves_weight(dev, w, w->n_exp);
}

void op_group_linear_fwd(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    want_groups(dev, y, x, w);
    RUN(w->n_out, group_linear_fwd, y, x, w);
    round_act(dev, y);
}

void op_group_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w)
{
    want_groups(dev, dy, dx, w);
    RUN(w->n_out, group_linear_bwd, dx, dy, w);
    round_act(dev, dx);
}

/* ---- attention with one key for all heads ---- */

/* The entries that len tokens see: sum over n = 1 .. len of min(floor(n / ratio), limit). */
static double far_pairs(double len, double ratio, double limit)
{
    const double rising = MT_MIN(len, ratio * limit), whole = floor(rising / ratio);
    return ratio * whole * (whole - 1) / 2 + whole * (rising - whole * ratio + 1) + (len - rising) * limit;
}

/* (query, key) pairs of window and entries; exact only if all sequences have the same length. */
static double count_pairs(int64_t n_tok, struct tensor entry, struct tensor idx, const struct seqs *seqs,
                          const struct shared_attn_shape *s)
{
    const double len = mean_len(seqs, n_tok), n_seq = (double)n_tok / len;
    double pairs = n_seq * window_pairs(len, (double)s->window);
    if (entry.ndim) pairs += n_seq * far_pairs(len, (double)s->ratio, idx.ndim ? (double)idx.shape[1] : len);
    return pairs;
}

static void want_shared(struct device *dev, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                        struct tensor entry, struct tensor idx, const struct seqs *seqs,
                        const struct shared_attn_shape *s)
{
    const int64_t n_tok = q.shape[0], n_col = s->n_head * s->head_dim;
    MT_REQUIRE(s->n_head > 0 && s->head_dim > 0 && s->window > 0 && s->ratio >= 0 && s->scale > 0,
               "%lld heads of %lld, window %lld, ratio %lld, scale %g", (long long)s->n_head, (long long)s->head_dim,
               (long long)s->window, (long long)s->ratio, (double)s->scale);
    MT_REQUIRE(!entry.ndim || s->ratio > 0, "entries of %lld tokens", (long long)s->ratio);
    MT_REQUIRE(!idx.ndim || entry.ndim, "indices of entries, but no entries");
    WANT(q, dev->act_dtype, n_tok, n_col);
    WANT(o, dev->act_dtype, n_tok, n_col);
    WANT(lse, dev->stat_dtype, n_tok, s->n_head);
    WANT(kv, dev->act_dtype, n_tok, s->head_dim);
    WANT_OPT(entry, dev->act_dtype, MT_MAX(1, n_tok / MT_MAX(1, s->ratio)), s->head_dim);
    WANT_OPT(idx, DT_I32, n_tok, idx.shape[1]);
    want_seqs(__func__, seqs, false);
}

static void count_products(struct device *dev, int n, double pairs, const struct shared_attn_shape *s)
{
    dev->op.flops += 2 * n * pairs * (double)(s->n_head * s->head_dim);
}

void op_shared_attn_fwd(struct device *dev, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                        struct tensor entry, struct tensor idx, struct tensor sinks, const struct seqs *seqs,
                        const struct shared_attn_shape *shape)
{
    want_shared(dev, o, lse, q, kv, entry, idx, seqs, shape);
    WANT_OPT(sinks, DT_F32, shape->n_head);
    count_products(dev, 2, count_pairs(q.shape[0], entry, idx, seqs, shape), shape); /* scores; outputs */
    MOVES(dev, o, lse, q, kv, entry, idx);
    RUN(entry.ndim ? shape->ratio : 0, shared_attn_fwd, o, lse, q, kv, entry, idx, sinks, seqs, shape);
    round_act(dev, o);
}

void op_shared_attn_decode(struct device *dev, struct tensor o, struct tensor q, const struct past *past,
                           const struct pages *entries, struct tensor idx, struct tensor sinks,
                           const struct shared_attn_shape *shape)
{
    const int64_t n_tok = q.shape[0], n_col = shape->n_head * shape->head_dim;
    const double near = MT_MIN(past->seqs->pairs, (double)n_tok * (double)shape->window);
    double keys = near; /* (query, key) pairs of window and entries, at most */
    MT_REQUIRE(shape->n_head > 0 && shape->head_dim > 0 && shape->window > 0 && (!entries || shape->ratio > 0),
               "%lld heads of %lld, window %lld, ratio %lld", (long long)shape->n_head, (long long)shape->head_dim,
               (long long)shape->window, (long long)shape->ratio);
    want_past(dev, past, past->pages, shape->head_dim);
    if (entries) want_past(dev, past, entries, shape->head_dim);
    WANT(q, dev->act_dtype, n_tok, n_col);
    WANT(o, dev->act_dtype, n_tok, n_col);
    WANT(past->pos, DT_I32, n_tok);
    WANT_OPT(idx, DT_I32, n_tok, idx.shape[1]);
    WANT_OPT(sinks, DT_F32, shape->n_head);
    if (entries) {
        const double all = past->seqs->pairs / (double)shape->ratio;
        keys += idx.ndim ? MT_MIN(all, (double)tensor_count(idx)) : all;
    }
    count_products(dev, 2, keys, shape); /* scores; outputs */
    dev->op.bytes += keys * (double)(shape->head_dim * dtype_size(dev->act_dtype));
    MOVES(dev, o, q, idx);
    RUN(entries ? shape->ratio : 0, shared_attn_decode, o, q, past, entries, idx, sinks, shape);
    round_act(dev, o);
}

void op_shared_attn_bwd(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dentry,
                        struct tensor dout, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                        struct tensor entry, struct tensor idx, const struct seqs *seqs,
                        const struct shared_attn_shape *shape)
{
    want_shared(dev, o, lse, q, kv, entry, idx, seqs, shape);
    want_shared(dev, dout, lse, dq, dkv, dentry, idx, seqs, shape);
    MT_REQUIRE(!entry.ndim == !dentry.ndim, "entries without their gradient, or a gradient without entries");
    /* five products: the scores, recomputed; dout times keys; dq; the key's gradient as key and as value */
    count_products(dev, 5, count_pairs(q.shape[0], entry, idx, seqs, shape), shape);
    MOVES(dev, dq, dkv, dentry, dout, o, lse, q, kv, entry, idx);
    RUN(entry.ndim ? shape->ratio : 0, shared_attn_bwd, dq, dkv, dentry, dout, o, lse, q, kv, entry, idx, seqs, shape);
    round_act(dev, dq);
    round_act(dev, dkv);
    round_act(dev, dentry);
}
