/* ops_mamba.c - the wrappers op_* of Mamba-2. */
#include "kernels/ops/ops_check.h"

static void want_mamba(struct device *dev, struct tensor xbc, struct tensor y, struct tensor dt,
                       const struct seqs *seqs, const struct mamba *m)
{
    const int64_t n_tok = xbc.shape[0];
    MT_REQUIRE(m->n_group > 0 && m->n_head > 0 && m->n_head % m->n_group == 0 && m->head_dim > 0 && m->state > 0,
               "%lld heads of %lld, %lld groups of %lld", (long long)m->n_head, (long long)m->head_dim,
               (long long)m->n_group, (long long)m->state);
    MT_REQUIRE(m->dt_min >= 0 && m->dt_min <= m->dt_max, "steps from %g to %g", (double)m->dt_min, (double)m->dt_max);
    WANT(xbc, dev->act_dtype, n_tok, m->n_head * m->head_dim + 2 * m->n_group * m->state);
    WANT(y, dev->act_dtype, n_tok, m->n_head * m->head_dim);
    WANT(dt, dev->act_dtype, n_tok, m->n_head);
    WANT(m->a_log, DT_F32, m->n_head);
    WANT(m->dt_bias, DT_F32, m->n_head);
    WANT(m->d, DT_F32, m->n_head);
    want_seqs(__func__, seqs, true);
    want_segments(__func__, seqs);
}

/* Adds FLOPs of products with the rows of a token's chunk: `group` per group over the columns of b or c, `inside` per
 * head over head_dim columns; and of `across` products per head with a state. */
static void count_mamba(struct device *dev, int64_t n_tok, const struct mamba *m, int group, int inside, int across)
{
    const double a = (double)m->state, b = (double)m->head_dim;
    dev->op.flops += 2 * (double)n_tok *
                     ((double)m->n_group * group * MT_MAMBA_CHUNK * a +
                      (double)m->n_head * (inside * MT_MAMBA_CHUNK * b + across * a * b));
}

void op_mamba_fwd(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt, const struct seqs *seqs,
                  const struct mamba *m)
{
    want_mamba(dev, xbc, y, dt, seqs, m);
    count_mamba(dev, xbc.shape[0], m, 1, 1, 2); /* C B^T; M V; C S, B^T V */
    MOVES(dev, y, xbc, dt);
    RUN(0, mamba_fwd, y, xbc, dt, seqs, m);
    round_act(dev, y);
}

void op_mamba_decode(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt,
                     const struct states *states, const struct mamba *m)
{
    const int64_t n = m->n_head * m->state * m->head_dim;
    want_mamba(dev, xbc, y, dt, states->seqs, m);
    want_states(__func__, states, dev->stat_dtype, xbc.shape[0], n);
    count_mamba(dev, xbc.shape[0], m, 0, 0, 2); /* b x^T, S^T c */
    MOVES(dev, y, xbc, dt);
    dev->op.bytes += 2 * (double)(states->seqs->n_seq * n * dtype_size(dev->stat_dtype));
    RUN(0, mamba_decode, y, xbc, dt, states, m);
    round_act(dev, y);
}

void op_mamba_bwd(struct device *dev, struct tensor dxbc, struct tensor ddt, struct tensor dy, struct tensor xbc,
                  struct tensor dt, const struct seqs *seqs, const struct mamba *m)
{
    want_mamba(dev, xbc, dy, dt, seqs, m);
    want_mamba(dev, dxbc, dy, ddt, seqs, m);
    /* In the letters of kernels/cpu/mamba.c, of the forward, recomputed: C B^T; M V; C S, B^T V. Gradients: K B, K^T C
     * of a group's sum; M^T dY, dY V^T; dY S^T, V E^T, B E, C^T dY. */
    count_mamba(dev, xbc.shape[0], m, 3, 3, 6);
    MOVES(dev, dxbc, ddt, dy, xbc, dt);
    RUN(0, mamba_bwd, dxbc, ddt, dy, xbc, dt, seqs, m);
    round_act(dev, dxbc);
    round_act(dev, ddt);
}

static void want_silu_norm(struct device *dev, struct tensor x, struct tensor y, struct tensor z, struct tensor rstd,
                           struct tensor w)
{
    const int64_t n_tok = x.shape[0], n_col = w.shape[0], n_group = rstd.ndim == 2 ? rstd.shape[1] : 0;
    MT_REQUIRE(n_group > 0 && n_col % n_group == 0, "%lld columns in %lld groups", (long long)n_col,
               (long long)n_group);
    WANT(x, dev->act_dtype, n_tok, n_col);
    WANT(y, dev->act_dtype, n_tok, n_col);
    WANT(z, dev->act_dtype, n_tok, n_col);
    WANT(rstd, dev->stat_dtype, n_tok, n_group);
    WANT(w, DT_F32, n_col);
}

void op_silu_norm_fwd(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor z,
                      struct tensor w, const struct norm *norm)
{
    want_silu_norm(dev, x, y, z, rstd, w);
    MOVES(dev, y, rstd, x, z, w);
    RUN(0, silu_norm_fwd, y, rstd, x, z, w, norm);
    round_act(dev, y);
}

void op_silu_norm_bwd(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy, struct tensor x,
                      struct tensor rstd, struct tensor z, struct tensor w)
{
    want_silu_norm(dev, x, dx, z, rstd, w);
    want_silu_norm(dev, x, dy, dz, rstd, w);
    MOVES(dev, dx, dz, dy, x, rstd, z, w);
    RUN(0, silu_norm_bwd, dx, dz, dy, x, rstd, z, w);
    round_act(dev, dx);
    round_act(dev, dz);
}
