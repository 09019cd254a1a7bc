/* ops_shared_attn.c - the wrappers op_* of attention whose heads share one key, which is the value too. */
#include <math.h>

#include "kernels/ops/ops_check.h"

/* Sum over n = 1 .. len of min(n / ratio, limit), n / ratio rounded down: their entries. */
static double far_pairs(double len, double ratio, double limit)
{
    const double rising = MT_MIN(len, ratio * limit), whole = floor(rising / ratio);
    return ratio * whole * (whole - 1) / 2 + whole * (rising - whole * ratio + 1) + (len - rising) * limit;
}

/* (query, key) pairs of window and entries: exact for sequences of one length. */
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
    WANT(seqs->cu, DT_I32, seqs->n_seq + 1);
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

void op_shared_attn_bwd(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dentry,
                        struct tensor dout, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                        struct tensor entry, struct tensor idx, const struct seqs *seqs,
                        const struct shared_attn_shape *shape)
{
    want_shared(dev, o, lse, q, kv, entry, idx, seqs, shape);
    want_shared(dev, dout, lse, dq, dkv, dentry, idx, seqs, shape);
    MT_REQUIRE(!entry.ndim == !dentry.ndim, "entries without their gradient, or a gradient without entries");
    /* again the scores; dout times keys; dq; two terms of a key's gradient */
    count_products(dev, 5, count_pairs(q.shape[0], entry, idx, seqs, shape), shape);
    MOVES(dev, dq, dkv, dentry, dout, o, lse, q, kv, entry, idx);
    RUN(entry.ndim ? shape->ratio : 0, shared_attn_bwd, dq, dkv, dentry, dout, o, lse, q, kv, entry, idx, seqs, shape);
    round_act(dev, dq);
    round_act(dev, dkv);
    round_act(dev, dentry);
}
