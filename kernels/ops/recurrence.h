/* recurrence.h - for ops.h: the ops of recurrent mixers: short convolutions, gated DeltaNet, Mamba-2, their norms.
 * ops.h defines letters, dtypes, "=", gradients, "takes prefixes" (struct seqs) and states in decoding (struct states).
 */
#ifndef MT_RECURRENCE_H
#define MT_RECURRENCE_H

#include "kernels/tensor.h"

struct device;
struct norm;
struct seqs;
struct states;

/* ---- gated DeltaNet (Qwen3.5, Qwen3-Next): G key heads of width A, N value heads of width B; N/G value heads share a
 * key head. Rows q | k | v have C = 2 G A + N B columns. */
enum { MT_MAX_TAPS = 8, MT_DELTA_CHUNK = 64, MT_MAMBA_CHUNK = 64 };
struct delta_shape {
    int64_t n_key, n_value, key_dim, value_dim;
};
/* y[t,c] = silu(u), u = bias[c] + sum_j w[c,j] x[t - (J-1) + j, c]; rows before the sequence are 0. x, y [T,C] act,
 * y =; w [C,J] f32, J <= MT_MAX_TAPS; bias [C] f32 or absent. Takes prefixes, as does the backward. */
typedef void conv_silu_fwd_fn(struct device *dev, struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                              const struct seqs *seqs);
/* dx = */
typedef void conv_silu_bwd_fn(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor w,
                              struct tensor bias, const struct seqs *seqs);
/* conv_silu_fwd, where tail has the J - 1 rows before x of every sequence, in order, (J-1) * C values, act, and
 * afterwards the last J - 1 rows, those of x included. tail is absent when J is 1. */
typedef void conv_decode_fn(struct device *dev, struct tensor y, struct tensor x, struct tensor w, struct tensor bias,
                            const struct states *tail);
/* Gated delta rule: for every value head a state S [A,B], 0 before the first token of a sequence, then per token
 *   S' = e^g S;  S = S' + k (beta (v - S'^T k))^T;  o = S^T q
 * with q = A^-1/2 q / |q| and k = k / |k|, |x| = sqrt(sum x^2 + 1e-6), beta = sigmoid(b), g = -exp(a_log) softplus(a +
 * dt_bias). o [T,N*B] act =; qkv [T,C] act; ba [T,2N] act: b | a; a_log, dt_bias [N] f32. Takes prefixes, with the
 * segments of seqs, as does the backward. */
typedef void delta_fwd_fn(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba, struct tensor a_log,
                          struct tensor dt_bias, const struct seqs *seqs, const struct delta_shape *shape);
/* delta_fwd that begins with the states S of the sequences and updates them: rows of N * A * B values, stat */
typedef void delta_decode_fn(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba,
                             struct tensor a_log, struct tensor dt_bias, const struct states *states,
                             const struct delta_shape *shape);
/* dqkv =, dba = */
typedef void delta_bwd_fn(struct device *dev, struct tensor dqkv, struct tensor dba, struct tensor dout,
                          struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                          const struct seqs *seqs, const struct delta_shape *shape);
/* RMSNorm of every head, times a gate: y = x * rstd * w * silu(z). x, z, y [T,N*B] act, y =; rstd [T,N] stat =; w [B]
 * f32 */
typedef void gated_norm_fwd_fn(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                               struct tensor z, struct tensor w, const struct norm *norm);
/* dx =, dz =; dx may be dy */
typedef void gated_norm_bwd_fn(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy,
                               struct tensor x, struct tensor rstd, struct tensor z, struct tensor w);

/* ---- Mamba-2 (Nemotron-H): N heads of width B, G groups of N/G heads that share b and c, states of A columns. Rows
 * x | b | c have C = N B + 2 G A columns. */
struct mamba {
    int64_t n_head, head_dim, n_group, state; /* N, B, G, A */
    float dt_min, dt_max;                     /* limits of the step; dt_max may be infinite */
    struct tensor a_log, dt_bias, d;          /* [N] f32 */
};
/* For every head a state S [A,B], 0 before the first token of a sequence, then per token
 *   S = e^(-step exp(a_log)) S + step b x^T;  y = S^T c + d x,  step = clamp(softplus(dt + dt_bias)).
 * y [T,N*B] act =; xbc [T,C] act; dt [T,N] act. Takes prefixes, with the segments of seqs, as does the backward. */
typedef void mamba_fwd_fn(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt,
                          const struct seqs *seqs, const struct mamba *m);
/* mamba_fwd that begins with the states S of the sequences and updates them: rows of N * A * B values, stat */
typedef void mamba_decode_fn(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt,
                             const struct states *states, const struct mamba *m);
/* dxbc =, ddt =. A step outside its limits has no gradient. */
typedef void mamba_bwd_fn(struct device *dev, struct tensor dxbc, struct tensor ddt, struct tensor dy,
                          struct tensor xbc, struct tensor dt, const struct seqs *seqs, const struct mamba *m);
/* A gate, then RMSNorm of every group of columns: v = x silu(z), y = v * rstd * w. x, z, y [T,C] act, y =; rstd [T,G]
 * stat =, of C/G columns each; w [C] f32 */
typedef void silu_norm_fwd_fn(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor z,
                              struct tensor w, const struct norm *norm);
/* dx =, dz =; dx may be dy */
typedef void silu_norm_bwd_fn(struct device *dev, struct tensor dx, struct tensor dz, struct tensor dy, struct tensor x,
                              struct tensor rstd, struct tensor z, struct tensor w);

#endif
