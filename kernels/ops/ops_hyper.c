/* ops_hyper.c - the wrappers op_* of hyper-connections. */
#include "kernels/ops/ops_check.h"

/* Checks x [T, N*D]; returns D. site: C and post are needed too, which the head of the model lacks. */
static int64_t want_hyper(struct device *dev, struct tensor x, const struct hyper *h, bool site)
{
    const int64_t n = h->n_stream, n_col = x.shape[1], n_value = (2 + n) * n;
    MT_REQUIRE(n >= 1 && n <= MT_MAX_STREAMS && n_col > 0 && n_col % n == 0,
               "%lld streams (1 to %d) in rows of %lld columns", (long long)n, MT_MAX_STREAMS, (long long)n_col);
    const bool head = !site && h->fn.shape[0] == n;
    MT_REQUIRE(head || (h->n_iter >= 1 && h->n_iter <= MT_MAX_SINKHORN), "%d rounds of normalisation (1 to %d)",
               h->n_iter, MT_MAX_SINKHORN);
    WANT(x, dev->act_dtype, x.shape[0], n_col);
    WANT(h->fn, DT_F32, head ? n : n_value, n_col);
    WANT(h->base, DT_F32, head ? n : n_value);
    WANT(h->scale, DT_F32, head ? 1 : 3);
    return n_col / n;
}

void op_hyper_pre_fwd(struct device *dev, struct tensor y, struct tensor m, struct tensor rstd, struct tensor x,
                      const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, h, false);
    WANT(y, dev->act_dtype, n_tok, dim);
    WANT(m, dev->stat_dtype, n_tok, hyper_values(h));
    WANT(rstd, dev->stat_dtype, n_tok);
    dev->op.flops += 2 * (double)tensor_count(x) * (double)hyper_values(h);
    MOVES(dev, y, m, rstd, x, h->fn);
    RUN(0, hyper_pre_fwd, y, m, rstd, x, h);
    round_act(dev, y);
}

void op_hyper_post_fwd(struct device *dev, struct tensor out, struct tensor x, struct tensor f, struct tensor m,
                       const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, h, true);
    WANT(out, dev->act_dtype, n_tok, x.shape[1]);
    WANT(f, dev->act_dtype, n_tok, dim);
    WANT(m, dev->stat_dtype, n_tok, hyper_values(h));
    MOVES(dev, out, x, f, m);
    RUN(0, hyper_post_fwd, out, x, f, m, h);
    round_act(dev, out);
}

void op_hyper_post_bwd(struct device *dev, struct tensor df, struct tensor dx, struct tensor dm, struct tensor dout,
                       struct tensor x, struct tensor f, struct tensor m, const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, h, true);
    WANT(df, dev->act_dtype, n_tok, dim);
    WANT(dx, dev->act_dtype, n_tok, x.shape[1]);
    WANT(dm, dev->stat_dtype, n_tok, hyper_values(h));
    WANT(dout, dev->act_dtype, n_tok, x.shape[1]);
    WANT(f, dev->act_dtype, n_tok, dim);
    WANT(m, dev->stat_dtype, n_tok, hyper_values(h));
    MOVES(dev, df, dx, dm, dout, x, f, m);
    RUN(0, hyper_post_bwd, df, dx, dm, dout, x, f, m, h);
    round_act(dev, df);
    round_act(dev, dx);
}

void op_hyper_pre_bwd(struct device *dev, struct tensor dx, struct tensor dm, struct tensor dy, struct tensor x,
                      struct tensor m, struct tensor rstd, const struct hyper *h)
{
    const int64_t n_tok = x.shape[0], dim = want_hyper(dev, x, h, false);
    WANT(dx, dev->act_dtype, n_tok, x.shape[1]);
    WANT_OPT(dm, dev->stat_dtype, n_tok, hyper_values(h));
    WANT(dy, dev->act_dtype, n_tok, dim);
    WANT(m, dev->stat_dtype, n_tok, hyper_values(h));
    WANT(rstd, dev->stat_dtype, n_tok);
    dev->op.flops += 2 * (double)tensor_count(x) * (double)hyper_values(h);
    MOVES(dev, dx, dx, dm, dy, x, m, rstd, h->fn);
    RUN(0, hyper_pre_bwd, dx, dm, dy, x, m, rstd, h);
    round_act(dev, dx);
}
