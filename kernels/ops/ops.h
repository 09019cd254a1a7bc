/* ops.h - the contract of every op. Model code calls op_*, which checks shapes, counts FLOPs and bytes, and calls
 * dev->ops.
 *
 * Letters: T packed tokens of a micro-batch, S sequences in it, D hidden, H query heads, K key/value heads, A head dim,
 * E experts, J experts per token, M = T*J rows in expert order, F expert width, U = glu_cols(F) columns before the
 * activation, V vocabulary, R LoRA rank, N labelled tokens. W_e is the matrix of expert e.
 * Dtypes: "act" is dev->act_dtype, "stat" is dev->stat_dtype; small frozen vectors (norms, biases, sinks) are f32;
 * indices are i32. An absent tensor has ndim 0. dx is the gradient of x, with its shape and dtype; pos [T] i32 is each
 * token's position in its sequence.
 * "=" overwrites, "+=" adds; "saved" is for the backward. Outputs alias inputs only where the contract allows it. T, M,
 * N and any expert's row count may be 0. "LoRA" in a formula: scale * (x A^T) B^T, A [R, in], B [out, R].
 * An op takes scratch from dev->work and releases it before it returns; in a dry run it does nothing else. It allocates
 * no other memory, is asynchronous on the device and copies nothing to the host. */
#ifndef MT_OPS_H
#define MT_OPS_H

#include "kernels/device.h"
#include "kernels/format/fakequant.h"
#include "kernels/format/format.h"
#include "kernels/ops/losses.h"
#include "kernels/ops/networks.h"
#include "kernels/ops/recurrence.h"
#include "kernels/ops/sampling.h"
#include "kernels/ops/short_conv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An adapter on one matrix; r == 0: none, and its tensors are absent. A dense matrix may have several adapters side by
 * side, one per segment of its output columns (q | k | v): a [n_seg*R, in], b [sum of seg_cols, R] with the segments'
 * rows in order, xa [T, n_seg*R]. On experts n_seg is 1 and a [E, R, in], b [E, out, R], xa [M, R]. */
struct lora {
    struct tensor a, b; /* act */
    int64_t r;
    int n_seg;
    float scale[3];                    /* of each segment */
    int64_t seg_first[3], seg_cols[3]; /* output columns of each segment */
    float dropout;                     /* dense only: dropout of x before A, kept elements scaled by 1/(1-p) */
    uint64_t dropout_key;              /* element (t, i) is kept iff rng_uniform(key, t*in + i) >= p */
    bool merged; /* the matrix contains scale B A: products do not add the adapter, but still write xa and gradients */
    struct tensor master_a, master_b; /* if merged or with DoRA: the master weights, shaped like a and b, stat */
};
/* Gradients of an adapter: shaped like a and b, stat, always "+=". Backward ops of experts skip absent ones. */
struct lora_grad {
    struct tensor a, b;
};

/* Decoding with several adapters: token t has adapter group[t] of the set; none if that is n. */
enum { LORA_SET = 8 };
struct lora_set {
    int n;
    struct lora of[LORA_SET]; /* not merged, without dropout; r 0: the matrix has no adapter */
};
struct lora_rows {
    const struct lora_set *set; /* NULL: all tokens have the adapter proj.lora */
    struct tensor group;        /* [T] i32, 0 to n */
};

/* DoRA (arXiv:2402.09353) of a dense projection: y = m / |W + scale B A| (W x + scale B A x) + bias, where |.| is the
 * norm of each row and has no gradient. m and norm have one value for each row of lora.b. */
struct dora {
    struct tensor m, norm; /* stat; absent: no DoRA */
    struct tensor grad;    /* of m, stat, "+="; absent: not trained */
};

/* Fake quantisation of a projection (quantisation-aware training): its products read Q(W_e) in place of W_e, or with
 * lora.merged Q(M_e), M_e = W_e + scale B_e A_e in f32: fused multiply-adds in ascending order of r, then times scale,
 * then plus W_e, each rounded once. The gradient passes straight through Q. */
struct proj_quant {
    struct fakequant format; /* bits 0: off */
    int n_part;              /* ranges of rows that are quantised separately: q | k | v; experts: 1 */
    int64_t part_rows[3];
    struct tensor amax; /* [E * n_part] f32, as op_proj_amax writes it; absent where the format reads none */
};

/* Fake quantisation of a projection's input: its products and its adapter read Q(x) in place of x. All rows share one
 * amax, measured by calibration before training. The gradient is passed on where |x| <= amax, and is 0 elsewhere. The
 * caller quantises the input, except in glu_quant_fwd and moe_down_bwd (model/layers/input_quant.h). */
struct input_quant {
    struct fakequant format;  /* bits 0: off */
    struct tensor amax;       /* [1] f32 */
    struct input_range *seen; /* for calibration; not read by ops */
};

/* FP8 products of a projection of experts (train.expert_dtype). Where every value of W_e is a power of two, step[e],
 * times a value of e4m3, products with W_e also round each of their rows x to e4m3: they read e4m3(x / s) s, rounded to
 * nearest even, with the least power of two s for which max |x| <= 448 s (e4m3_row_step). x is the input in the forward
 * and the gradient of the output in the backward; the gradient passes straight through. Sums are f32. Adapters read x
 * itself, as do products with other experts, whose step[e] is 0. */
enum fp8_products { FP8_OFF, FP8_ON, FP8_BACKWARD };
struct proj_fp8 {
    struct tensor step;     /* [E] f32; absent: no FP8 products */
    const float *host_step; /* step in host memory */
    bool backward;          /* only the backward has FP8 products: ops of the forward ignore this struct */
    bool pair; /* w is declared BF16, but where step[e] > 0 its bytes are the e4m3 codes of W_e [out, in], then those of
                  its transpose [in, out] (op_expert_codes) */
    struct tensor transposed; /* with `backward`: [E, in, out] u8, the e4m3 codes of the transposed W_e; w is BF16 */
};

/* A projection: a frozen matrix, or a stack with one per expert, its bias, its adapter and the adapter's gradients. */
struct proj {
    struct weight w;    /* [out, in]; experts [E, out, in] */
    struct tensor bias; /* [out] f32, experts [E, out]; or absent */
    struct lora lora;
    struct lora_rows rows; /* in place of lora; applied by lora_rows alone */
    struct lora_grad grad;
    struct dora dora; /* applied by dora_fwd and dora_bwd alone */
    struct proj_quant quant;
    struct input_quant in;
    struct proj_fp8 fp8; /* experts; without quant and in */
    int64_t n_active;    /* number of experts with rows, set by `bench` to count bytes; 0: count all experts */
};

/* Whether FP8 products of p read e4m3 codes from memory. */
static inline bool proj_has_codes(const struct proj *p) { return p->fp8.pair || p->fp8.transposed.ndim; }
/* p as the ops of the forward read it. */
static inline struct proj proj_of_forward(const struct proj *p)
{
    struct proj f = *p;
    if (p->fp8.backward) f.fp8 = (struct proj_fp8){0};
    return f;
}

/* The routing of tokens to experts. Row m of a tensor in expert order, [M, ...], is token t at its j-th expert:
 * row_slot[m] = t*J + j; slot_row is the inverse map. Expert e has rows offs[e] .. offs[e+1]-1, in token order. Ops
 * that do not read gate accept a route without it. */
struct route {
    struct tensor idx;      /* [T, J] i32, chosen experts, ascending */
    struct tensor gate;     /* [T, J] stat, combine weights */
    struct tensor offs;     /* [E+1] i32 */
    struct tensor row_slot; /* [M] i32 */
    struct tensor slot_row; /* [T, J] i32 */
};

/* The packed sequences: sequence s has rows cu[s] .. cu[s+1]-1. cu [S+1] i32 is on the device, the counts on the host.
 * prefix [S] i32 or absent: with n = prefix[s] > 0, sequence s continues the first n rows of its base, the last
 * sequence before it with prefix 0; its row cu[s] is at position n. A base does not see the sequences that continue it,
 * nor do they see each other. Only ops whose contract says "takes prefixes" accept them. */
struct segments {
    int64_t n, n_level, n_slot; /* segments, levels, slots (below); n 0: no prefixes, a segment per sequence */
    struct tensor cu;           /* [n + 1] i32, as that of seqs */
    struct tensor links;        /* [n, SEGMENT_LINKS] i32 */
};
struct seqs {
    struct tensor cu;
    int64_t n_seq, max_len; /* max_len: bound of the length of sequences, prefix included */
    double pairs; /* for FLOP counts: (query, key) pairs of all sequences under the causal mask, without a window */
    struct tensor prefix;
    struct segments segments; /* of sequences with prefixes, for recurrent ops */
};
/* Recurrent ops cut the rows of sequences where a prefix ends (kernels/segments.h), and compute a segment from the
 * final state of the segment that it continues. Each of the n_slot segments that continue another has a slot for a
 * state. LEVEL: number of segments before this one. IN: the slot with its initial state; -1: zero. OWN: the slot for
 * the gradient of that state; -1: none. OUT, N_OUT: the first slot and the number of the segments that continue this
 * one; its final state is in slot OUT, and the gradient of that state is the sum over the N_OUT slots. */
enum { SEGMENT_LEVEL, SEGMENT_IN, SEGMENT_OWN, SEGMENT_OUT, SEGMENT_N_OUT, SEGMENT_LINKS };
struct attn_shape {
    int64_t n_head, n_kv, head_dim, window; /* window 0: full causal; W: keys j with i-W < j <= i */
    float scale;
    int64_t value_dim; /* width of a value and of a head's output; 0: head_dim, the width of queries and keys */
};
static inline int64_t attn_value_dim(const struct attn_shape *s) { return s->value_dim ? s->value_dim : s->head_dim; }

/* y[t] = w[tok[t]].  y [T,D] act =; tok [T] i32 */
typedef void embed_fwd_fn(struct device *dev, struct tensor y, const struct weight *w, struct tensor tok);
/* In place, NEFTune (arXiv:2310.05914): x[t,c] += alpha / sqrt(n D) u, with n the length of the sequence of row t,
 * prefix included, and u = u24 2^-23 - 1 in [-1, 1), u24 the upper 24 bits of rng_u64(key, t D + c), exact in f32.
 * x [T,D] act. Takes prefixes. */
typedef void embed_noise_fn(struct device *dev, struct tensor x, const struct seqs *seqs, float alpha, uint64_t key);

/* RMSNorm in bf16 rounds once, at the end (gpt-oss), or with round_twice also x * rstd before the product with the
 * weight (Llama). In F32 and F64 round_twice changes nothing. */
struct norm {
    float eps;
    bool round_twice;
};
/* y = x * rstd * w, rstd = 1/sqrt(mean(x^2) + eps).  x,y [T,D] act, y =; rstd [T] stat =; w [D] f32 */
typedef void rmsnorm_fwd_fn(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x, struct tensor w,
                            const struct norm *norm);
/* dx += rstd * (g - xhat * mean(g * xhat)), g = dy * w, xhat = x * rstd */
typedef void rmsnorm_bwd_fn(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor rstd,
                            struct tensor w);

/* y = res + x W^T + bias + LoRA.  y [T,out] act =, x [T,in] act, res [T,out] act or absent; xa [T, n_seg*R] act =:
 * dropout(x) A^T, saved for the backward */
typedef void linear_fwd_fn(struct device *dev, struct tensor y, struct tensor xa, struct tensor x,
                           const struct proj *proj, struct tensor res);
/* dx = dy W + LoRA (absent: not computed); proj->grad += */
typedef void linear_bwd_fn(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor xa,
                           const struct proj *proj);

/* y[m] += scale (x[m] A^T) B^T, after a product without an adapter: A and B are the adapter that proj->rows gives the
 * token of row m. Without a route row m is token m. With one, rows are in expert order, A and B are those of the row's
 * expert, and x is [M,in], or [T,in] with by_token. y [M,out] act +=, xa [M, W] act: scratch, W >= n_seg*R of every
 * adapter */
typedef void lora_rows_fn(struct device *dev, struct tensor y, struct tensor xa, struct tensor x,
                          const struct proj *proj, const struct route *r, bool by_token);

/* DoRA: norm [rows of lora.b] stat = |W + scale B A| of each row, from lora.master_a and master_b. */
typedef void row_norm_fn(struct device *dev, struct tensor norm, const struct proj *proj);
/* In place: y = m / norm * y + bias + res. The given y is without bias and res. m / norm counts as 1 in columns without
 * an adapter, as 0 where norm is 0. y, res [T,out] act */
typedef void dora_fwd_fn(struct device *dev, struct tensor y, const struct proj *proj, struct tensor res);
/* proj->dora.grad += sum over T of dy * z / norm, where z [T,out] act is the y that dora_fwd read. Then, in place,
 * z = m / norm * dy */
typedef void dora_bwd_fn(struct device *dev, struct tensor z, struct tensor dy, const struct proj *proj);

/* In place: rotates the first W channels of the first n_head heads of every row, in pairs (i, i + W/2). Head h begins
 * at column h * head_dim; its channels from W on do not change. To rotate other channels, pass a view that begins with
 * them; its last head may end after W channels. qkv [T, >= (n_head-1)*head_dim + W] act; table [P, W] f32: row p holds
 * cos [W/2] then sin [W/2], times the attention factor of scaled RoPE. The backward rotates by the negative angle. */
typedef void rope_fwd_fn(struct device *dev, struct tensor qkv, struct tensor pos, struct tensor table, int64_t n_head,
                         int64_t head_dim);
typedef void rope_bwd_fn(struct device *dev, struct tensor dqkv, struct tensor pos, struct tensor table, int64_t n_head,
                         int64_t head_dim);

/* Causal GQA attention inside each sequence, with an optional sink per head: a logit in the softmax's denominator
 * without a value. Takes prefixes: a row sees the keys and values of its sequence's prefix that are inside its window.
 * o [T,H*B] act =, lse [T,H] stat = (sink included), qkv [T,(H+K)*A+K*B] act: q | k | v, B the width of values
 * (attn_value_dim), sinks [H] f32 or absent */
typedef void attn_fwd_fn(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                         const struct seqs *seqs, const struct attn_shape *shape);
/* dqkv =. Gradients of a prefix are sums over the sequences that see it. */
typedef void attn_bwd_fn(struct device *dev, struct tensor dqkv, struct tensor dout, struct tensor o, struct tensor lse,
                         struct tensor qkv, const struct seqs *seqs, const struct attn_shape *shape);

/* Decoding: cached rows of earlier tokens, in pages of MT_PAGE rows. The token at position p of sequence s has row p %
 * MT_PAGE of page table[s, p / MT_PAGE % P]. A sequence of more than P * MT_PAGE tokens keeps the last ones. */
enum { MT_PAGE = 64 };
struct pages {
    struct tensor rows;  /* [pages * MT_PAGE, C] act */
    struct tensor table; /* [>= S, P] i32: a page that is written to belongs to one sequence */
};
/* Writes row t of x [T,C] act to the row of token t in its page; other rows do not change. */
typedef void page_store_fn(struct device *dev, const struct pages *pages, struct tensor x, struct tensor pos,
                           const struct seqs *seqs);
/* attn_fwd with keys and values in pages: a query sees those inside its window at positions up to its pos, which
 * ascends by 1 in a sequence. The pages must hold the last min(last pos + 1, window + n - 1) tokens of a sequence with
 * n queries, at most P * MT_PAGE. o [T,H*B] act =; q [T,H*A] act; pages.rows act: [.., K*(A+B)]: k | v, or [.., K*A]:
 * k, whose first B columns are v; sinks [H] f32 or absent; seqs.pairs = sum of pos + 1 */
typedef void attn_decode_fn(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                            struct tensor sinks, struct tensor pos, const struct seqs *seqs,
                            const struct attn_shape *shape);

/* Decoding: states of recurrent ops. Row slot[s] of values is the state of sequence s of seqs; rows of sequences
 * without tokens in the pass do not change. Where a sequence's first token has position 0, its state begins as zero,
 * whatever the row holds. */
struct states {
    struct tensor values; /* [slots, n], in place */
    struct tensor slot;   /* [S] i32, distinct */
    struct tensor pos;    /* [T] i32, in a sequence ascending by 1 */
    const struct seqs *seqs;
};

/* In place, before RoPE: RMSNorm of the q and k columns of every row, per head (wq, wk [A]), or over all heads of q and
 * over all heads of k (wq [H*A], wk [K*A]). With wv [A] each head of v has a norm too; else v does not change.
 * qkv [T,(H+2K)A] act. Saved: raw [T,(H+K)A] act =: the input q | k; rstd [T,G] stat =, G = H+K per head, else 2. With
 * wv: raw [T,(H+2K)A], G = H+2K. wq, wk, wv f32 */
typedef void qk_norm_fwd_fn(struct device *dev, struct tensor qkv, struct tensor raw, struct tensor rstd,
                            struct tensor wq, struct tensor wk, struct tensor wv, const struct attn_shape *shape,
                            const struct norm *norm);
/* In place: the columns of dqkv that have a norm become the gradient with respect to its input. */
typedef void qk_norm_bwd_fn(struct device *dev, struct tensor dqkv, struct tensor raw, struct tensor rstd,
                            struct tensor wq, struct tensor wk, struct tensor wv, const struct attn_shape *shape);

/* Latent attention (MLA). A head's queries and keys have N columns without position, then G rotated ones, which all
 * heads share in the key. Values have B columns. interleaved: pair i of the rotated inputs is columns 2i and 2i+1,
 * otherwise i and i + G/2; in the output q | k | v it is always i and i + G/2. Queries at position p are multiplied by
 * 1 + beta log(1 + floor(p / beta_len)); beta 0: by 1. */
struct mla_shape {
    int64_t n_head, nope, rope, value; /* H, N, G, B */
    bool interleaved;
    int64_t beta_len;
    float beta;
};
/* The packed q | k | v of attention, from copies and RoPE.  qkv [T,H(2(N+G)+B)] act =; q [T,H(N+G)] act; kv [T,H(N+B)]
 * act: per head key | value; k_rope [T,G] act; table [P,G] f32 as in rope_fwd */
typedef void mla_qkv_fwd_fn(struct device *dev, struct tensor qkv, struct tensor q, struct tensor kv,
                            struct tensor k_rope, struct tensor pos, struct tensor table,
                            const struct mla_shape *shape);
/* Decoding without expanding keys and values. c [L] is a token's input of kv_b; M_h are the N + B rows of head h in
 * kv_b [H(N+B),L], adapter included. The key of head h is M_h[:N] c | the rotated key, the value M_h[N:] c.
 * mla_absorb: y[t,h] = (M_h[:N]^T q[t,h,:N] | q[t,h,N:]), with the factor of pos[t] in mla_shape. The product of y and
 * (c | the rotated key) equals that of query and key. y [T,H(L+G)] act =; q [T,H(N+G)] act, rotated
 * mla_values: o[t,h] = M_h[N:] z[t,h], z the sum of c weighted by attention. o [T,H*B] act =; z [T,H*L] act */
typedef void mla_absorb_fn(struct device *dev, struct tensor y, struct tensor q, struct tensor pos,
                           const struct proj *kv_b, const struct mla_shape *shape);
typedef void mla_values_fn(struct device *dev, struct tensor o, struct tensor z, const struct proj *kv_b,
                           const struct mla_shape *shape);
/* dq, dkv, dk_rope =; dk_rope is the sum over the heads */
typedef void mla_qkv_bwd_fn(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dk_rope,
                            struct tensor dqkv, struct tensor pos, struct tensor table, const struct mla_shape *shape);

/* ---- attention with an output gate (Qwen3.5, Qwen3-Next). wide [T,(2H+2K)*A] act: of every query head A columns of q
 * and A of the gate, then k | v. */
/* qkv [T,(H+2K)*A] act = q | k | v of wide, after RMSNorm per head of q and of k (qk_norm_fwd), then RoPE (rope_fwd).
 * rstd [T,H+K] stat =, saved; wq, wk [A] f32; table [P, W] f32, W <= A */
typedef void attn_split_fwd_fn(struct device *dev, struct tensor qkv, struct tensor rstd, struct tensor wide,
                               struct tensor wq, struct tensor wk, struct tensor pos, struct tensor table,
                               const struct attn_shape *shape, const struct norm *norm);
/* The columns q, k and v of dwide =; those of the gate do not change. */
typedef void attn_split_bwd_fn(struct device *dev, struct tensor dwide, struct tensor dqkv, struct tensor wide,
                               struct tensor rstd, struct tensor wq, struct tensor wk, struct tensor pos,
                               struct tensor table, const struct attn_shape *shape);
/* y = o * sigmoid(gate).  y, o [T,H*A] act, y = */
typedef void attn_gate_fwd_fn(struct device *dev, struct tensor y, struct tensor o, struct tensor wide,
                              const struct attn_shape *shape);
/* dout =, the gradient of o, in place of dy allowed; the columns of the gate of dwide =, others do not change */
typedef void attn_gate_bwd_fn(struct device *dev, struct tensor dout, struct tensor dwide, struct tensor dy,
                              struct tensor o, struct tensor wide, const struct attn_shape *shape);

/* ---- hyper-connections (DeepSeek-V4): the residual of a token is N streams of D columns, a row x [N*D]. The input of
 * a mixer or feed-forward part is the sum of the streams with weights pre [N]. After it the streams are mixed by
 * C [N,N], and its output is added with weights post [N]. All three follow from x:
 *   m       = rstd * (fn x), rstd = 1/sqrt(mean(x^2) + norm_eps); (2 + N) N values in stat: of pre, of post, of C
 *   pre_i   = sigmoid(m_i scale_0 + base_i) + eps
 *   post_i  = 2 sigmoid(m_(N+i) scale_1 + base_(N+i))
 *   C_j     = softmax over k of (m_(2N+Nj+k) scale_2 + base_(2N+Nj+k)), + eps; then every column / (its sum + eps);
 *             then n_iter - 1 times: every row / (its sum + eps), every column / (its sum + eps)
 * The model's head has pre alone: fn [N, N*D], base [N], scale [1], and m has N values. */
enum { MT_MAX_STREAMS = 4, MT_MAX_SINKHORN = 32 };
struct hyper {
    int64_t n_stream; /* N, 1 .. MT_MAX_STREAMS */
    int n_iter;       /* 1 .. MT_MAX_SINKHORN; the head has none */
    float eps, norm_eps;
    struct tensor fn, base, scale; /* [(2+N)N, N*D], [(2+N)N], [3] f32 */
};
/* Number of values of m: (2 + N) N, or N of the head. */
static inline int64_t hyper_values(const struct hyper *h) { return h->fn.shape[0]; }
/* y = sum_i pre_i x_i.  y [T,D] act =; m [T, hyper_values] stat =, rstd [T] stat =: saved; x [T,N*D] act */
typedef void hyper_pre_fwd_fn(struct device *dev, struct tensor y, struct tensor m, struct tensor rstd, struct tensor x,
                              const struct hyper *h);
/* out_k = post_k f + sum_j C_jk x_j.  out, x [T,N*D] act, out =; f [T,D] act: output of mixer or feed-forward part */
typedef void hyper_post_fwd_fn(struct device *dev, struct tensor out, struct tensor x, struct tensor f, struct tensor m,
                               const struct hyper *h);
/* Gradients of hyper_post_fwd. df =; dx =: only through C x, in place of dout allowed; dm =: through post and C, zero
 * in the N values of pre */
typedef void hyper_post_bwd_fn(struct device *dev, struct tensor df, struct tensor dx, struct tensor dm,
                               struct tensor dout, struct tensor x, struct tensor f, struct tensor m,
                               const struct hyper *h);
/* Gradients of hyper_pre_fwd: dx_i += pre_i dy, plus the gradient through m, which comes from pre and from dm of
 * hyper_post_bwd (absent for the head) */
typedef void hyper_pre_bwd_fn(struct device *dev, struct tensor dx, struct tensor dm, struct tensor dy, struct tensor x,
                              struct tensor m, struct tensor rstd, const struct hyper *h);

/* ---- compressed attention (DeepSeek-V4): all H heads share one key of width A, which is also the value. A query sees
 * the keys of a sliding window, and compressed entries, each a weighted sum of `ratio` tokens.
 *
 * Entry e of sequence s, e < floor(len(s) / ratio), is row floor(cu[s] / ratio) + e of tensors with N = max(1, floor(T
 * / ratio)) rows; other rows are zero. Its position in the sequence is e * ratio. Query t (from 0 in its sequence) sees
 * entry e when (e + 1) * ratio <= t + 1. */
struct compress_shape {
    int64_t ratio, width; /* width: columns of an entry */
    bool overlap;         /* an entry sums 2 * ratio tokens: its own, and those of the entry before it */
};
/* Column c of an entry: y_c = sum_j softmax_j(gate_j,c + bias_j,c) value_j,c over the tokens j of the entry. Without
 * overlap: kg [T,2W] act: value | gate; bias [ratio,W] f32. With overlap a token has two sets of columns: kg [T,4W]:
 * value a | value b | gate a | gate b; bias [ratio,2W]: a | b. Entry e then sums the tokens of entry e - 1, if any,
 * with their set a, and its own tokens with their set b.  y [N,W] act =; pos [N] i32 =: position of the entry, 0 in
 * other rows */
typedef void compress_fwd_fn(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg,
                             struct tensor bias, const struct seqs *seqs, const struct compress_shape *shape);
/* dkg =: zero for tokens that are in no entry */
typedef void compress_bwd_fn(struct device *dev, struct tensor dkg, struct tensor dy, struct tensor kg,
                             struct tensor bias, const struct seqs *seqs, const struct compress_shape *shape);

/* Decoding: tokens that follow those in pages; pos ascends by 1 in a sequence. */
struct past {
    const struct pages *pages;
    struct tensor pos;
    const struct seqs *seqs;
};
/* compress_fwd of the entries whose last token is in kg. The pages have kg of earlier tokens: at least of the last
 * `ratio`, with overlap of the last 2 * ratio. The entries of sequence s are rows from floor(cu[s] / ratio) + s on;
 * other rows are zero. N = floor(T / ratio) + S. */
typedef void compress_decode_fn(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg,
                                struct tensor bias, const struct past *past, const struct compress_shape *shape);
/* Writes entries to their pages: entry e of a sequence to the row of position e. x [N,C] act, its rows as in
 * compress_decode; past: pos and seqs of the tokens, pages of the entries */
typedef void entry_store_fn(struct device *dev, struct tensor x, const struct past *past, int64_t ratio);

/* The K visible entries e of every token with the largest scores (ties: lower e first):
 * score(t, e) = sum_h w[t,h] max(0, <q[t,h], k[e]>). idx [T,K] i32 =: e ascending, then -1; q [T,H*A] act, k [N,A] act,
 * w [T,H] act */
typedef void index_topk_fn(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                           const struct seqs *seqs, int64_t ratio);

/* index_topk with k in pages: token t sees entry e when (e + 1) * ratio <= pos[t] + 1. seqs.max_len counts cached
 * tokens too */
typedef void index_decode_fn(struct device *dev, struct tensor idx, struct tensor q, struct tensor w,
                             const struct past *past, int64_t ratio);

struct shared_attn_shape {
    int64_t n_head, head_dim, window; /* window W: keys j with i-W < j <= i of the same sequence */
    int64_t ratio;                    /* tokens per entry; 0: no entries */
    float scale;
};
/* o = sum of p_k key_k over the keys in the window and the visible entries. p = softmax of scale <q, key_k> and the
 * sink, a logit without a key. o [T,H*A] act =, lse [T,H] stat = (sink included), q [T,H*A] act, kv [T,A] act,
 * entry [N,A] act or absent; sinks [H] f32 or absent; idx [T,K] i32: the entries that a token sees, from index_topk;
 * absent: all visible */
typedef void shared_attn_fwd_fn(struct device *dev, struct tensor o, struct tensor lse, struct tensor q,
                                struct tensor kv, struct tensor entry, struct tensor idx, struct tensor sinks,
                                const struct seqs *seqs, const struct shared_attn_shape *shape);
/* shared_attn_fwd with keys in pages as in attn_decode, and entries and seqs.max_len as in index_decode; entries NULL:
 * none. */
typedef void shared_attn_decode_fn(struct device *dev, struct tensor o, struct tensor q, const struct past *past,
                                   const struct pages *entries, struct tensor idx, struct tensor sinks,
                                   const struct shared_attn_shape *shape);
/* dq, dkv =; dentry =: absent if entry is, zero in rows without an entry */
typedef void shared_attn_bwd_fn(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dentry,
                                struct tensor dout, struct tensor o, struct tensor lse, struct tensor q,
                                struct tensor kv, struct tensor entry, struct tensor idx, const struct seqs *seqs,
                                const struct shared_attn_shape *shape);

/* RoPE of the last G columns of every head in adjacent pairs (2i, 2i+1), table [P,G] as in rope_fwd. When rstd is
 * present, RMSNorm without a weight over the A columns of a head precedes it. inverse: rotates by the negative angle.
 */
struct tail_rope {
    int64_t n_head, head_dim;
    float eps; /* of the norm */
    bool inverse;
};
/* y, x [T,H*A] act, y =, in place allowed without rstd; rstd [T,H] stat = or absent */
typedef void tail_rope_fwd_fn(struct device *dev, struct tensor y, struct tensor rstd, struct tensor x,
                              struct tensor pos, struct tensor table, const struct tail_rope *r);
/* dx =, in place of dy allowed; x is read when rstd is present */
typedef void tail_rope_bwd_fn(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                              struct tensor rstd, struct tensor pos, struct tensor table, const struct tail_rope *r);

/* A block-diagonal product: y[:, g*O .. ] = x[:, g*I .. ] W_g^T for every group g.  y [T,G*O] act =, x [T,G*I] act,
 * w [G,O,I] */
typedef void group_linear_fwd_fn(struct device *dev, struct tensor y, struct tensor x, const struct weight *w);
/* The backward: dx = */
typedef void group_linear_bwd_fn(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w);

/* How the J chosen logits become gates. ROUTER_CHOSEN: softmax over the chosen logits, which equals the softmax over
 * all E renormalised over the chosen (gpt-oss, Qwen3, Mixtral). ROUTER_PROBABILITY: the softmax over all E, not
 * renormalised (OLMoE). ROUTER_SIGMOID: scale * s, s = sigmoid(logits); ROUTER_SIGMOID_CHOSEN: scale * s / (sum of the
 * chosen s + floor) (GLM-4.5, DeepSeek-V3). ROUTER_SQRT_CHOSEN: as SIGMOID_CHOSEN, with s = sqrt(softplus(logits))
 * (DeepSeek-V4). The last three are the sigmoid kinds. */
enum router_kind { ROUTER_CHOSEN, ROUTER_PROBABILITY, ROUTER_SIGMOID, ROUTER_SIGMOID_CHOSEN, ROUTER_SQRT_CHOSEN };
/* scale and groups are for the sigmoid kinds alone. Groups are n_group equal ranges of experts. A token's experts come
 * from the top_group groups with the largest sum of their two best choice values (router_fwd; ties: lower group
 * first). */
struct router {
    enum router_kind kind;
    float scale;
    int n_group, top_group; /* n_group 0 or 1: no groups; top_group * E / n_group >= J */
    bool given; /* r->idx is an input, ascending: the router computes only logits and gates, with the same bits as if it
                   had chosen these experts */
    float floor; /* 0: 1e-20 */
};
static inline float router_floor(const struct router *r) { return r->floor > 0 ? r->floor : 1e-20f; }
static inline bool router_is_sigmoid(const struct router *r) { return r->kind >= ROUTER_SIGMOID; }
static inline bool router_divides(const struct router *r)
{
    return r->kind == ROUTER_SIGMOID_CHOSEN || r->kind == ROUTER_SQRT_CHOSEN;
}
/* logits = x W^T; the J experts with the largest choice values (ties: lower id first) -> r->idx ascending, r->gate by
 * kind. Choice values: in the softmax kinds the logits, bias included; in the sigmoid kinds s + bias, while logits and
 * gates have no bias. logits [T,E] stat = (for the backward and the auxiliary loss); x [T,D] act; w [E,D]; bias [E] f32
 * or absent */
typedef void router_fwd_fn(struct device *dev, struct route *r, struct tensor logits, struct tensor x,
                           const struct weight *w, struct tensor bias, const struct router *router);
/* idx [T,J] i32 =: the experts of a token by its id, ascending.  table [V,J] i32: distinct experts of every id; tok [T]
 * i32 */
typedef void hash_route_fn(struct device *dev, struct tensor idx, struct tensor table, struct tensor tok);
/* y[t,j] = x[t,j] scale[idx[t,j]].  y, x [T,J] stat, y =, may be x; idx [T,J] i32; scale [E] f32 */
typedef void scale_gates_fn(struct device *dev, struct tensor y, struct tensor x, struct tensor idx,
                            struct tensor scale);
/* Fills r->offs, row_slot, slot_row from r->idx: a stable counting sort. */
typedef void route_sort_fn(struct device *dev, struct route *r, int64_t n_exp);
/* aux->count and aux->prob += over the T rows of one layer */
typedef void aux_stats_fn(struct device *dev, struct aux *aux, struct tensor logits, const struct route *r);
/* dl is the gradient of the logits. ROUTER_CHOSEN: dl_i = gate_i (dgate_i - sum_j gate_j dgate_j) for chosen i.
 * ROUTER_PROBABILITY: dl_i = P_i ([i chosen] dgate_i - sum_j gate_j dgate_j) for all i, P = softmax(logits). Sigmoid
 * kinds, for chosen i, with z = sum of the chosen s + floor: ROUTER_SIGMOID: dl_i = scale dgate_i s_i (1 - s_i),
 * ROUTER_SIGMOID_CHOSEN: dl_i = scale / z (dgate_i - sum_j s_j / z dgate_j) s_i (1 - s_i); ROUTER_SQRT_CHOSEN the same
 * with sigmoid(l_i) / (2 s_i) in place of s_i (1 - s_i). Softmax kinds add the auxiliary gradient if aux->coef != 0.
 * dx += dl W.  logits as saved, read by aux and by all kinds but ROUTER_CHOSEN */
typedef void router_bwd_fn(struct device *dev, struct tensor dx, struct tensor dgate, const struct route *r,
                           struct tensor logits, const struct weight *w, const struct aux *aux,
                           const struct router *router);

/* Activation of a dense feed-forward part, which a gate may scale per token: act[t] = gate[t] glu(pre[t]).
 * act [T,F] act =, pre [T,U] act, gate [T,1] stat or absent: 1 */
typedef void glu_fwd_fn(struct device *dev, struct tensor act, struct tensor pre, struct tensor gate,
                        const struct glu *glu);
/* dpre[t] = glu'(pre[t]) gate[t] dact[t]; dgate[t] = <glu(pre[t]), dact[t]>.  dpre =, may be pre; dgate =, absent if
 * gate is */
typedef void glu_bwd_fn(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor dact,
                        struct tensor pre, struct tensor gate, const struct glu *glu);
/* y += x.  y, x [T,D] act */
typedef void add_fn(struct device *dev, struct tensor y, struct tensor x);
/* x *= factor.  x [T,D] act */
typedef void scale_fn(struct device *dev, struct tensor x, float factor);

/* For each row m of expert e with token t: pre[m] = W_e x[t] + bias_e + LoRA_e; act[m] = glu(pre[m]).
 * pre [M,U] act = (saved), act [M,F] act =, xa [M,R] act = (saved), x [T,D] act; up [E,U,D] */
typedef void moe_up_fwd_fn(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa, struct tensor x,
                           const struct route *r, const struct proj *up, const struct glu *glu);
/* act[m] = Q(h) with `in`, h = glu(pre[m]) rounded to act: the input of a down product. act [M,F] act =, pre [M,U] act,
 * F a multiple of the format's block */
typedef void glu_quant_fwd_fn(struct device *dev, struct tensor act, struct tensor pre, const struct glu *glu,
                              const struct input_quant *in);
/* y[m] = W_e act[m] + bias_e + LoRA_e.  y [M,D] act =, absent: only ha is computed; ha [M,R] act = (saved);
 * down [E,D,F] */
typedef void moe_down_fwd_fn(struct device *dev, struct tensor y, struct tensor ha, struct tensor act,
                             const struct route *r, const struct proj *down);
/* y[i] = x[rows[i] / share].  y [N,C] =, x [*,C], of one dtype and contiguous; rows [N] i32 */
typedef void gather_fn(struct device *dev, struct tensor y, struct tensor x, struct tensor rows, int64_t share);
/* out[t] = res[t] + sum_j gate[t,j] y[slot_row[t,j]], f32 sum in ascending j; an absent res is 0, absent gates are 1.
 * out, res [T,D] act; out = */
typedef void moe_combine_fwd_fn(struct device *dev, struct tensor out, struct tensor res, struct tensor y,
                                const struct route *r);
/* Backward of combine, down product and activation in one op. With g = W_e^T dout[t] + LoRA and h = glu(pre[m]):
 * dgate[t,j] = <h, g> + <bias_e, dout[t]>;  dpre[m] = glu'(pre[m]) * gate * g;  down->grad += from gate * dout[t]. With
 * down->in, act is an input, Q(h) of glu_quant_fwd, that replaces h, and dpre is 0 where |h| > amax. Else act = h,
 * scratch of the caller. dpre =, may be pre; dgate =; pre and ha as saved */
typedef void moe_down_bwd_fn(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act,
                             struct tensor dout, struct tensor pre, struct tensor ha, const struct route *r,
                             const struct proj *down, const struct glu *glu);
/* dx[t] = sum over its rows (ascending j) of dpre[m] W_e + LoRA; up->grad +=; xa as saved */
typedef void moe_up_bwd_fn(struct device *dev, struct tensor dx, struct tensor dpre, struct tensor x, struct tensor xa,
                           const struct route *r, const struct proj *up);

/* Ops of the loss head have logits z = cap tanh(W x / cap), or z = W x if cap is 0.
 *
 * Fused linear cross-entropy over labelled tokens only, `chunk` at a time, so the [N,V] logits are never in memory.
 * nll [N] stat = : -log softmax(z of x[row])[id];  hit [N] i32 = : 1 when id is the arg max (ties: the lower id)
 * dx [T,D] act = : scale * dnll/dx, zero in rows without label; absent: forward only
 * x [T,D] act, w [V,D], rows [N] i32 (ascending), ids [N] i32 */
typedef void linear_ce_fn(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x,
                          const struct weight *w, float cap, struct tensor rows, struct tensor ids, float scale,
                          int64_t chunk);

/* linear_ce with a teacher (losses.h). p = softmax(z / T). FORWARD: kl = sum_v q (log q - log p), where the bucket
 * counts as one more v. REVERSE: kl = sum_v p (log p - log q).
 * kl [N] stat =; dx [T,D] act = : scale * d(alpha * nll + (1 - alpha) * T^2 * kl)/dx; all else as linear_ce. When
 * teacher and student have equal hidden states, kl is exactly 0, and with alpha = 0 so is dx. */
typedef void linear_kl_fn(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit, struct tensor dx,
                          struct tensor x, const struct weight *w, float cap, struct tensor rows, struct tensor ids,
                          const struct teacher *teacher, float scale, int64_t chunk);
/* linear_ce of softmax(z / T), and its entropy H. weight [N,2] stat: dx = weight[.,0] * dnll/dx + weight[.,1] * dH/dx
 * of each label; absent: 1 and 0. entropy [N] stat =; all else as linear_ce */
typedef void linear_policy_fn(struct device *dev, struct tensor nll, struct tensor entropy, struct tensor hit,
                              struct tensor dx, struct tensor x, const struct weight *w, float cap, struct tensor rows,
                              struct tensor ids, struct tensor weight, float temperature, int64_t chunk);
/* The K largest logits of each row (ties: lower id first) as log softmax(z / T), ids ascending.
 * id [N,K] i32 =, logprob [N,K] stat =; K <= V; x, w, rows, chunk as linear_ce */
typedef void linear_topk_fn(struct device *dev, struct tensor id, struct tensor logprob, struct tensor x,
                            const struct weight *w, float cap, struct tensor rows, float temperature, int64_t chunk);

/* logits = z of every row.  logits [N,V] stat =, rows of V rounded up to a multiple of 8; x [N,D] act; w [V,D] */
typedef void head_logits_fn(struct device *dev, struct tensor logits, struct tensor x, const struct weight *w,
                            float cap);

/* Draws a token from each row of logits z, edited to z' (struct sample_edit), at temperature T. Filters, in this order:
 * the first top_k by (z' falling, id rising); of these the shortest prefix with a share >= top_p of their probability;
 * of these the tokens with probability >= min_p times the largest. The token is the arg max of z' / T - log(-log u),
 * u = (random word of the token + 1/2) 2^-32, in doubles, the lowest id of equal ones. Probabilities are summed
 * exactly, in units of 2^-44 of the largest.
 * logits [S,V] stat, become z'; rows [S, SAMPLE_ROW_WORDS] i32: struct sample_row; edits [N, SAMPLE_EDIT_WORDS] i32 or
 * absent: struct sample_edit, overwritten; the ids of a row are distinct and in [0, V) */
typedef void sample_fn(struct device *dev, const struct sampled *out, struct tensor logits, struct tensor rows,
                       struct tensor edits);

/* out[0] = sum of squares of g, added in f64 in a fixed order; out[1] = number of elements that are not finite.
 * g contiguous, stat or act; out [2] f64 = */
typedef void sumsq_fn(struct device *dev, struct tensor out, struct tensor g);
/* x = 0.  x [N,C] stat, a view of columns */
typedef void clear_fn(struct device *dev, struct tensor x);
/* y = ((y + x[0]) + x[1]) + ...: the rows are added in their order.
 * y [n] in place; x [P,n] contiguous; both stat or both f64 */
typedef void add_in_order_fn(struct device *dev, struct tensor y, struct tensor x);
/* AdamW (optim/adamw.c has the formula) with g * grad_scale as gradient.  p, m, v [n] stat in place; g [n] stat */
struct adamw_step {
    float lr, beta1, beta2, eps, weight_decay, grad_scale;
    float correction1, correction2; /* 1 - beta^step */
};
typedef void adamw_fn(struct device *dev, struct tensor p, struct tensor m, struct tensor v, struct tensor g,
                      const struct adamw_step *step);

/* AdamW with 8-bit moments: value i is map[code[i]] * scale[i / ADAMW8_BLOCK]. scale is the block's largest magnitude,
 * rounded to 16 significant bits. The update of p reads the new moments before they are rounded to codes. code [n] u8,
 * scale [blocks] f32, in place: of m, of v; map [2, 256] f32, ascending: with both signs for m, without for v */
enum { ADAMW8_BLOCK = 256 };
struct adamw8_states {
    struct tensor code[2], scale[2], map;
};
typedef void adamw8_fn(struct device *dev, struct tensor p, const struct adamw8_states *states, struct tensor g,
                       const struct adamw_step *step);

/* dst = src, for working copies of the adapters' master weights: dst in act_dtype, src in stat_dtype. */
typedef void cast_fn(struct device *dev, struct tensor dst, struct tensor src);
/* y = the matrices that products of proj read: its weight, decoded, and fake-quantised if proj->quant is set.
 * y [E,out,in] bf16 where act is bf16, else f32; offs [E+1] i32: experts without rows are neither read nor written;
 * absent: all experts */
typedef void decode_fn(struct device *dev, struct tensor y, const struct proj *proj, struct tensor offs);
/* range[e] = smallest and largest scale byte among the blocks of expert e with a value other than 0; 255 and -1 where
 * there are none.  range [E,2] i32 =; w MXFP4 */
typedef void mx_range_fn(struct device *dev, struct tensor range, const struct weight *w);
/* The experts as FP8 products read them (struct proj_fp8): where step[e] is above 0 the e4m3 codes of W_e / step[e]
 * [out, in] and of its transpose [in, out], else W_e in bf16.  y [E,2*out,in] u8 =; w MXFP4; step [E] f32. If y
 * is [E,in,out]: only the codes of the transposes; other experts are not written */
typedef void expert_codes_fn(struct device *dev, struct tensor y, const struct weight *w, struct tensor step);
/* amax [E*n_part] f32 = largest magnitude of each part of W_e, or of M_e if the adapter is merged; NaN if one is NaN */
typedef void proj_amax_fn(struct device *dev, struct tensor amax, const struct proj *proj);

/* Ops of fake quantisation. x [E, out, in], contiguous: BF16, F16 or F32 on every device; F64, read as F32, where act
 * is F64. amax [E] f32, or [1]: one for all experts; absent for formats that do not read it. Values are finite. */

/* amax = max |x| of each expert or of all, n_bad = the number of NaNs and infinities, which amax leaves out.
 * amax [E] or [1] f32 =, n_bad f64 =, of the same shape */
typedef void amax_fn(struct device *dev, struct tensor amax, struct tensor n_bad, struct tensor x);
/* y = Q(x), rounded to the dtype of x; in place allowed */
typedef void fake_quant_fn(struct device *dev, struct tensor y, struct tensor x, struct tensor amax,
                           const struct fakequant *f);
/* Straight through: dx = dy where |x| <= amax, else 0; in place allowed */
typedef void fake_quant_bwd_fn(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                               struct tensor amax);
/* The codes and scales that decode to Q(x). codes u8 =: [.., in], or [.., in/2] in 4-bit formats, the element with the
 * even index in the low half of a byte. scales [.., in/block] =: u8 e4m3 (NVFP4), u8 e8m0 (MXFP4) or f32 (integers);
 * absent without blocks. top [E] f32 =: the factor of an expert's codes (integers, FP8) or scales (NVFP4); else
 * absent. */
typedef void quant_pack_fn(struct device *dev, struct tensor codes, struct tensor scales, struct tensor top,
                           struct tensor x, struct tensor amax, const struct fakequant *f);

/* Sums of a step; all f64, added in a fixed order. out [3] +=: sum of nll, of hit, of kl.  nll [N] stat, hit [N] i32,
 * kl [N] stat or absent */
typedef void loss_sum_fn(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit, struct tensor kl);
/* logps [A,2] f64 = : sums of -nll over the completion and over all labels of an answer (losses.h); nll [N] stat */
typedef void answer_sums_fn(struct device *dev, struct tensor logps, struct tensor nll, const struct answers *a);
/* The loss of each pair or row, and its derivatives (kernels/preference_value.h, losses.h) */
typedef void preference_fn(struct device *dev, struct tensor sums, struct tensor weight, const struct preference *p,
                           struct tensor logps, struct tensor reference, struct tensor good, const struct answers *a);
/* The loss of every row of a policy, and its derivatives (kernels/policy_value.h, losses.h) */
typedef void policy_fn(struct device *dev, struct tensor part, struct tensor weight, const struct policy *p,
                       const struct policy_tokens *t, struct tensor values, const struct answers *a);
/* Importance weights of rows or labels (losses.h). nll, sampler [N] stat: of the label by the old model and
 * by the sampler; NaN where the sampler's is unknown, which then counts as equal. */
typedef void importance_fn(struct device *dev, struct tensor part, struct tensor weight, struct tensor values,
                           const struct importance *p, struct tensor nll, struct tensor sampler,
                           const struct answers *a);
/* sums [S] += and most [E] = max over rows of part [A, S + E], of op_policy or op_importance; all f64 */
typedef void policy_sum_fn(struct device *dev, struct tensor sums, struct tensor most, struct tensor part);
/* dx[rows[i]] *= weight[i, 0].  rows [N] i32, distinct; weight [N,2] stat */
typedef void scale_rows_fn(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight);
/* dx[rows[i]] *= the weight of label i in weight [A,2] of op_preference; rows [N] i32, distinct */
typedef void scale_labels_fn(struct device *dev, struct tensor dx, struct tensor rows, struct tensor weight,
                             const struct answers *a);
/* out [1] += factor * sum_i count_i prob_i of one auxiliary loss (struct aux) */
typedef void aux_sum_fn(struct device *dev, struct tensor out, const struct aux *aux, double factor);
/* rows [E] += rows of each expert; gates [E] += the sum of their combine weights */
typedef void expert_sums_fn(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r);

/* Memory. alloc returns NULL when there is not enough. alloc_host: host memory that ops can read (on a CPU as alloc);
 * free_host takes the same number of bytes. free_bytes: what alloc can still provide, -1 without a device
 * (device_open_plan). used_bytes: used on the device; on a CPU the peak of this process. fixed_bytes: used outside the
 * arenas, by the backend and other processes; plans leave it free. upload has read src on return, and later ops see it;
 * download waits for earlier ops; wait: for all ops. */
typedef void *dev_alloc_fn(int64_t bytes);
typedef void dev_free_fn(void *p);
typedef void dev_free_host_fn(void *p, int64_t bytes);
typedef int64_t dev_bytes_fn(void);
typedef void dev_upload_fn(void *dst, const void *src, int64_t bytes);
typedef void dev_download_fn(void *dst, const void *src, int64_t bytes);
typedef void dev_zero_fn(void *dst, int64_t bytes);
typedef void dev_wait_fn(void);
/* dst = src, both on the device; asynchronous. */
typedef void dev_copy_fn(void *dst, const void *src, int64_t bytes);

/* Copies between the device and memory of alloc_host, beside the ops. host_copy starts at once, or with after_ops when
 * the ops issued before it are done; later ops do not wait for it. A ticket, 0 .. DEV_TICKETS-1, is a queue: its copies
 * run in the order of their calls. host_join(ticket): later ops wait for the copies with this ticket. */
enum { DEV_TICKETS = 32 };
typedef void dev_host_copy_fn(void *dst, const void *src, int64_t bytes, int ticket, bool after_ops);
typedef void dev_host_join_fn(int ticket);

/* y [n, n] = x [n, n] w [n, n]^T in act_dtype, with the instructions of the portable kernels (enum cuda_arch) alone.
 * Returns false, and computes nothing, without such a kernel or if the device's kernels use its fastest
 * instructions. */
typedef bool dev_portable_product_fn(struct tensor y, struct tensor x, struct tensor w);

/* For kernels/prof.c and benchmarks. mark(slot), 0 .. DEV_MARKS-1, records the time when the device reaches it; mark_ms
 * is the time between two marks, valid after a wait. */
enum { DEV_MARKS = 1 << 15 };
typedef void dev_mark_fn(int slot);
typedef double dev_mark_ms_fn(int from, int to);

/* For `bench step`: starts (on) or stops counting the host's calls to the device; on a stop, stores the counts. */
struct dev_calls {
    int64_t launches, waits; /* kernels; calls in which the host waits for the device */
    const char *missing;     /* why nothing was counted, or NULL */
};
typedef void dev_count_calls_fn(bool on, struct dev_calls *calls);

/* Between record_begin and record_end ops are recorded instead of run; nothing may wait for the device or copy to or
 * from the host. Each replay runs them once, with the same tensors, after the ops issued before it. */
typedef bool dev_record_begin_fn(void); /* false: the device cannot record, and nothing began */
typedef void *dev_record_end_fn(void);
typedef void dev_recording_fn(void *recording);

/* Every op, once: struct ops, the declarations below and the backends' tables follow from this list. */
/* clang-format off */
#define OPS(X) \
    X(embed_fwd) X(embed_noise) X(rmsnorm_fwd) X(rmsnorm_bwd) X(linear_fwd) X(linear_bwd) X(glu_fwd) X(glu_bwd) X(add) \
    X(lora_rows) X(scale) X(row_norm) X(dora_fwd) X(dora_bwd) X(answer_sums) X(preference) X(scale_labels) \
    X(linear_policy) X(importance) X(policy) X(policy_sum) X(scale_rows) \
    X(rope_fwd) X(rope_bwd) X(attn_fwd) X(attn_bwd) X(page_store) X(attn_decode) X(qk_norm_fwd) X(qk_norm_bwd) \
    X(mla_qkv_fwd) X(mla_qkv_bwd) X(mla_absorb) X(mla_values) X(attn_split_fwd) X(attn_split_bwd) X(attn_gate_fwd) \
    X(attn_gate_bwd) \
    X(conv_silu_fwd) X(conv_silu_bwd) X(conv_decode) X(delta_fwd) X(delta_bwd) X(delta_decode) X(gated_norm_fwd) \
    X(gated_norm_bwd) X(mamba_fwd) X(mamba_bwd) X(mamba_decode) X(silu_norm_fwd) X(silu_norm_bwd) \
    X(short_conv_fwd) X(short_conv_bwd) X(short_conv_decode) \
    X(hyper_pre_fwd) X(hyper_post_fwd) X(hyper_post_bwd) X(hyper_pre_bwd) X(compress_fwd) X(compress_bwd) \
    X(compress_decode) X(entry_store) X(index_topk) X(index_decode) X(shared_attn_fwd) X(shared_attn_bwd) \
    X(shared_attn_decode) X(tail_rope_fwd) X(tail_rope_bwd) X(group_linear_fwd) X(group_linear_bwd) \
    X(hash_route) X(scale_gates) X(router_fwd) X(route_sort) X(aux_stats) X(router_bwd) X(moe_up_fwd) X(glu_quant_fwd) \
    X(moe_down_fwd) X(moe_combine_fwd) X(moe_down_bwd) X(moe_up_bwd) X(gather) X(expert_sums) \
    X(linear_ce) X(linear_kl) X(linear_topk) X(head_logits) X(sample) X(loss_sum) X(aux_sum) \
    X(decode) X(mx_range) X(expert_codes) X(proj_amax) X(amax) X(fake_quant) X(fake_quant_bwd) X(quant_pack) \
    X(sumsq) X(clear) X(add_in_order) X(adamw) X(adamw8) X(cast)
/* clang-format on */

struct comm_ops;
struct ops {
    const char *name;
    enum dtype act_dtype, stat_dtype;
    bool own_memory;              /* a GPU: the host reaches its tensors by copies alone */
    bool (*integrated)(void);     /* whether that GPU shares the memory of the host; NULL: no */
    enum cuda_arch (*arch)(void); /* of the kernels that run, for choice.h; NULL: no GPU */
    int64_t rank_multiple;        /* LoRA ranks are padded to a multiple of this */
    dev_alloc_fn *alloc, *alloc_host;
    dev_free_fn *free;
    dev_free_host_fn *free_host;
    dev_bytes_fn *free_bytes, *used_bytes, *fixed_bytes;
    dev_upload_fn *upload;
    dev_download_fn *download;
    dev_zero_fn *zero;
    dev_wait_fn *wait;
    dev_copy_fn *copy;
    dev_host_copy_fn *host_copy;
    dev_host_join_fn *host_join;
    dev_mark_fn *mark;
    dev_mark_ms_fn *mark_ms;
    dev_count_calls_fn *count_calls;
    dev_portable_product_fn *portable_product; /* for a roof (kernels/prof.c); NULL: none */
    double (*energy)(void);                    /* joules used since any start; NaN: unknown; NULL: not a GPU */
    dev_record_begin_fn *record_begin;         /* NULL: the backend cannot record */
    dev_record_end_fn *record_end;
    dev_recording_fn *replay, *record_free;
#define SLOT(op) op##_fn *op;
    OPS(SLOT)
#undef SLOT
    const struct comm_ops *comm; /* kernels/comm/comm.h; NULL: collectives on tensors in host memory */
};

/* What a dry run for a GPU calls in place of an op (kernels/scratch/): only takes scratch. NULL: the op needs none. */
struct scratch_table {
#define SLOT(op) op##_fn *op;
    OPS(SLOT)
#undef SLOT
};
extern const struct scratch_table cuda_scratch;

/* Wrapper, CPU in f32 and in f64, GPU. */
#define DECLARE(op) op##_fn op_##op, cpu_##op, cpu64_##op, cuda_##op;
OPS(DECLARE)
#undef DECLARE

#ifdef __cplusplus
}
#endif
#endif
