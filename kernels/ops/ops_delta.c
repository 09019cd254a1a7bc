/* ops_delta.c - the wrappers op_* of gated DeltaNet. */
#include "kernels/ops/ops_check.h"

static void want_conv(struct device *dev, struct tensor x, struct tensor y, struct tensor w, struct tensor bias,
                      const struct seqs *seqs)
{
    const int64_t n_tok = x.shape[0], n_col = x.shape[1], n_tap = w.ndim == 2 ? w.shape[1] : 0;
    MT_REQUIRE(n_tap >= 1 && n_tap <= MT_MAX_TAPS, "a convolution of %lld taps (1 to %d)", (long long)n_tap,
               MT_MAX_TAPS);
    WANT(x, dev->act_dtype, n_tok, n_col);
    WANT(y, dev->act_dtype, n_tok, n_col);
    WANT(w, DT_F32, n_col, n_tap);
    WANT_OPT(bias, DT_F32, n_col);
    want_seqs(__func__, seqs, true);
}

void op_conv_silu_fwd(struct device *dev, struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                      const struct seqs *seqs)
{
    want_conv(dev, x, y, w, bias, seqs);
    MOVES(dev, y, x, w, bias);
    RUN(0, conv_silu_fwd, y, x, w, bias, seqs);
    round_act(dev, y);
}

void op_conv_silu_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor w,
                      struct tensor bias, const struct seqs *seqs)
{
    want_conv(dev, x, dy, w, bias, seqs);
    want_conv(dev, x, dx, w, bias, seqs);
    MOVES(dev, dx, dy, x, w, bias);
    RUN(0, conv_silu_bwd, dx, dy, x, w, bias, seqs);
    round_act(dev, dx);
}

void op_conv_decode(struct device *dev, struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                    const struct states *tail)
{
    want_conv(dev, x, y, w, bias, tail->seqs);
    want_states(__func__, tail, dev->act_dtype, x.shape[0], (w.shape[1] - 1) * x.shape[1]);
    MOVES(dev, y, x, w, bias);
    dev->op.bytes += 2 * (double)(tail->seqs->n_seq * (w.shape[1] - 1) * x.shape[1] * dtype_size(dev->act_dtype));
    RUN(0, conv_decode, y, x, w, bias, tail);
    round_act(dev, y);
}

static void want_delta(struct device *dev, struct tensor qkv, struct tensor o, struct tensor ba, struct tensor a_log,
                       struct tensor dt_bias, const struct seqs *seqs, const struct delta_shape *s)
{
    const int64_t n_tok = qkv.shape[0];
    MT_REQUIRE(s->n_key > 0 && s->n_value > 0 && s->n_value % s->n_key == 0 && s->key_dim > 0 && s->value_dim > 0,
               "%lld key heads of %lld, %lld value heads of %lld", (long long)s->n_key, (long long)s->key_dim,
               (long long)s->n_value, (long long)s->value_dim);
    WANT(qkv, dev->act_dtype, n_tok, 2 * s->n_key * s->key_dim + s->n_value * s->value_dim);
    WANT(o, dev->act_dtype, n_tok, s->n_value * s->value_dim);
    WANT(ba, dev->act_dtype, n_tok, 2 * s->n_value);
    WANT(a_log, DT_F32, s->n_value);
    WANT(dt_bias, DT_F32, s->n_value);
    want_seqs(__func__, seqs, true);
    want_segments(__func__, seqs);
}

/* Adds the FLOPs of matrix products, per chunk of C = MT_DELTA_CHUNK rows and value head: `inside` products of sizes
 * C x C x key_dim, `values` of C x C x value_dim, `across` of C x key_dim x value_dim; solving a triangular system
 * counts as one. */
static void count_delta(struct device *dev, int64_t n_tok, const struct delta_shape *s, int inside, int values,
                        int across)
{
    const double a = (double)s->key_dim, b = (double)s->value_dim;
    dev->op.flops +=
        2 * (double)n_tok * (double)s->n_value * (MT_DELTA_CHUNK * (inside * a + values * b) + across * a * b);
}

void op_delta_fwd(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba, struct tensor a_log,
                  struct tensor dt_bias, const struct seqs *seqs, const struct delta_shape *shape)
{
    want_delta(dev, qkv, o, ba, a_log, dt_bias, seqs, shape);
    /* In the letters of kernels/cpu/delta.c; "solve W": the triangular system whose solution is W.
     * inside: K K^T, Q K^T, solve W
     * values: solve U, m X
     * across: W S, Q S, K^T X */
    count_delta(dev, qkv.shape[0], shape, 3, 2, 3);
    MOVES(dev, o, qkv, ba);
    RUN(0, delta_fwd, o, qkv, ba, a_log, dt_bias, seqs, shape);
    round_act(dev, o);
}

void op_delta_decode(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba, struct tensor a_log,
                     struct tensor dt_bias, const struct states *states, const struct delta_shape *shape)
{
    const int64_t n = shape->n_value * shape->key_dim * shape->value_dim;
    want_delta(dev, qkv, o, ba, a_log, dt_bias, states->seqs, shape);
    want_states(__func__, states, dev->stat_dtype, qkv.shape[0], n);
    count_delta(dev, qkv.shape[0], shape, 0, 0, 3); /* across, of single tokens: S^T k, k delta^T, S^T q */
    MOVES(dev, o, qkv, ba);
    dev->op.bytes += 2 * (double)(states->seqs->n_seq * n * dtype_size(dev->stat_dtype));
    RUN(0, delta_decode, o, qkv, ba, a_log, dt_bias, states, shape);
    round_act(dev, o);
}

void op_delta_bwd(struct device *dev, struct tensor dqkv, struct tensor dba, struct tensor dout, struct tensor qkv,
                  struct tensor ba, struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                  const struct delta_shape *shape)
{
    want_delta(dev, qkv, dout, ba, a_log, dt_bias, seqs, shape);
    want_delta(dev, dqkv, dout, dba, a_log, dt_bias, seqs, shape);
    /* As in op_delta_fwd; dY is the gradient of Y, E that of the state after the chunk.
     * inside, recomputed: K K^T, Q K^T, solve W
     * inside, gradients: solve dW, dW W^T (added to dL), dm K, dm^T Q, dL K, dL^T K
     * values, recomputed: solve U
     * values, gradients: m^T dO, dO X^T (dm), solve dU, dU U^T (added to dL)
     * across, recomputed: W S, K^T X
     * across, gradients: K E, dO S^T, X E^T, dX S^T, Q^T dO and W^T dX (added to E) */
    count_delta(dev, qkv.shape[0], shape, 9, 5, 8);
    MOVES(dev, dqkv, dba, dout, qkv, ba);
    RUN(0, delta_bwd, dqkv, dba, dout, qkv, ba, a_log, dt_bias, seqs, shape);
    round_act(dev, dqkv);
    round_act(dev, dba);
}

static void want_gated(struct device *dev, struct tensor x, struct tensor y, struct tensor z, struct tensor rstd,
                       struct tensor w)
{
    const int64_t n_tok = x.shape[0], dim = w.shape[0], n_head = rstd.ndim == 2 ? rstd.shape[1] : 0;
    WANT(x, dev->act_dtype, n_tok, n_head * dim);
    WANT(y, dev->act_dtype, n_tok, n_head * dim);
    WANT(z, dev->act_dtype, n_tok, n_head * dim);
    WANT(rstd, dev->stat_dtype, n_tok, n_head);
    WANT(w, DT_F32, dim);
}

void op_gated_norm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor z,
                       struct tensor w, const struct norm *norm)
{
    want_gated(dev, x, y, z, rstd, w);
    MOVES(dev, y, rstd, x, z, w);
    RUN(0, gated_norm_fwd, y, rstd, x, z, w, norm);
    round_act(dev, y);
}

void op_gated_norm_bwd(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy, struct tensor x,
                       struct tensor rstd, struct tensor z, struct tensor w)
{
    want_gated(dev, x, dx, dz, rstd, w);
    want_gated(dev, x, dy, z, rstd, w);
    MOVES(dev, dx, dz, dy, x, rstd, z, w);
    RUN(0, gated_norm_bwd, dx, dz, dy, x, rstd, z, w);
    round_act(dev, dx);
    round_act(dev, dz);
}
