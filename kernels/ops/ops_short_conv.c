/* ops_short_conv.c - the wrappers op_* of the gated short convolution. */
#include "kernels/ops/ops_check.h"

static void want_short(struct device *dev, struct tensor bcx, struct tensor y, struct tensor w, struct tensor bias,
                       const struct seqs *seqs)
{
    const int64_t n_tok = y.shape[0], n_col = y.shape[1], n_tap = w.ndim == 2 ? w.shape[1] : 0;
    MT_REQUIRE(n_tap >= 1 && n_tap <= MT_MAX_SHORT_TAPS, "a short convolution of %lld taps (1 to %d)", (long long)n_tap,
               MT_MAX_SHORT_TAPS);
    WANT(bcx, dev->act_dtype, n_tok, 3 * n_col);
    WANT(y, dev->act_dtype, n_tok, n_col);
    WANT(w, DT_F32, n_col, n_tap);
    WANT_OPT(bias, DT_F32, n_col);
    want_seqs(__func__, seqs, true);
}

void op_short_conv_fwd(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w, struct tensor bias,
                       const struct seqs *seqs)
{
    want_short(dev, bcx, y, w, bias, seqs);
    MOVES(dev, y, bcx, w);
    RUN(0, short_conv_fwd, y, bcx, w, bias, seqs);
    round_act(dev, y);
}

void op_short_conv_bwd(struct device *dev, struct tensor dbcx, struct tensor dy, struct tensor bcx, struct tensor w,
                       struct tensor bias, const struct seqs *seqs)
{
    want_short(dev, bcx, dy, w, bias, seqs);
    want_short(dev, dbcx, dy, w, bias, seqs);
    MOVES(dev, dbcx, dy, bcx, w);
    RUN(0, short_conv_bwd, dbcx, dy, bcx, w, bias, seqs);
    round_act(dev, dbcx);
}

void op_short_conv_decode(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w, struct tensor bias,
                          const struct states *tail)
{
    const int64_t n = (w.shape[1] - 1) * y.shape[1];
    want_short(dev, bcx, y, w, bias, tail->seqs);
    want_states(__func__, tail, dev->stat_dtype, y.shape[0], n);
    MOVES(dev, y, bcx, w);
    dev->op.bytes += 2 * (double)(tail->seqs->n_seq * n * dtype_size(dev->stat_dtype));
    RUN(0, short_conv_decode, y, bcx, w, bias, tail);
    round_act(dev, y);
}
