/* weights.h - loads the frozen weights from safetensors into dev->weights. Experts keep the checkpoint's format, or are
 * packed (model.quantize), or are decoded to bf16 (train.decoded_layers). */
#ifndef MT_WEIGHTS_H
#define MT_WEIGHTS_H

#include "data/safetensors.h"
#include "kernels/comm/comm.h"
#include "kernels/host_ring.h"
#include "model/arch/arch.h"
#include "model/stored/base_model.h"
#include "model/stored/quantize.h"

/* A compressor of mixer_compressed.c: values, then gates [2W or 4W, D]; its position bias; its norm. */
struct entry_weights {
    struct proj pair;
    struct tensor bias, norm; /* [ratio, W or 2W], [W] f32 */
};

/* Weights of mixer_attention.c. */
struct attention_weights {
    struct proj qkv, out;         /* [(H+2K)A, D]: q rows, k rows, v rows (without v_proj: (H+K)A); [D, HA] */
    struct tensor q_norm, k_norm; /* f32: both [A], or [HA] and [KA]; absent without such norms */
    struct tensor v_norm;         /* [A] f32: ones; absent without arch.value_norm */
    struct tensor sinks;          /* [H] f32 */
};

/* Weights of mixer_mla.c. */
struct mla_weights {
    struct proj a, out;            /* [Lq+Lkv+G, D]: q_a (or all of q), then kv_a; [D, HB] */
    struct proj q_b, kv_b;         /* [H(N+G), Lq], absent without q_lora_rank; [H(N+B), Lkv] */
    struct tensor q_norm, kv_norm; /* [Lq], [Lkv] f32 */
};

/* Weights of mixer_compressed.c. */
struct compressed_weights {
    struct proj a, q_b, out;           /* [Lq+A, D]: q_a, then kv; [HA, Lq]; [D, GO] */
    struct tensor q_norm, kv_norm;     /* [Lq], [A] f32 */
    struct tensor sinks;               /* [H] f32 */
    struct weight group;               /* [G, O, HA/G] */
    struct entry_weights entry, index; /* absent in layers without entries, without an indexer */
    struct proj index_q, index_scale;  /* [heads * width, Lq], [heads, D] of the indexer */
};

/* Weights of mixer_deltanet.c. */
struct deltanet_weights {
    struct proj in, ba, out;                  /* C rows q | k | v and V rows z; N rows b, N rows a; [D, V] */
    struct tensor conv, a_log, dt_bias, norm; /* [C, taps], [N], [N], [V/N] f32 */
};

/* Weights of mixer_mamba.c: C columns x | b | c of the convolution, N heads, V columns of all heads. */
struct mamba_weights {
    struct proj in, out;                   /* [V+C+N, D]: rows z | x | b | c | dt; [D, V] */
    struct tensor conv, conv_bias;         /* [C, taps], [C] f32; the bias may be absent */
    struct tensor a_log, dt_bias, d, norm; /* [N] f32 each; [V] f32 */
};

/* Weights of mixer_shortconv.c. */
struct shortconv_weights {
    struct proj in, out;      /* [3D, D]: rows B | C | x; [D, D] */
    struct tensor conv, bias; /* [D, taps], [D] f32; the bias may be absent */
};

/* The kinds of mixers. A kind x has struct x_weights, struct x_acts (acts.h) and mixer_x (layer.h). The first has the
 * largest structs: an initialiser of a union zeroes its first member. */
#define MIXERS(X) X(compressed) X(attention) X(mla) X(deltanet) X(mamba) X(shortconv)

/* Norms of ffn_parallel.c, [D] f32: before and after its experts, after its dense network, before its router. */
struct parallel_weights {
    struct tensor routed, routed_post, dense_post, router; /* router: absent where it reads what the experts read */
    struct tensor gate_scale;                              /* [E] f32, or absent */
};

struct layer_weights {
    struct tensor attn_norm, ffn_norm;  /* [D] f32: before mixer and network; absent if that is missing */
    struct tensor mixer_post, ffn_post; /* [D] f32: after mixer and network; absent without such norms */
    struct hyper hyper_attn, hyper_ffn; /* before and after the mixer, the network; zeroed without arch.hyper */
    union {
#define X(kind) struct kind##_weights kind;
        MIXERS(X)
#undef X
    };
    float scale;                        /* of the output, where tensor_names.layer_scale is; else 1 */
    struct weight router;               /* [E, D]; absent in a dense layer */
    struct tensor router_bias;          /* [E] f32 */
    struct tensor hash;                 /* [V, J] i32: experts by token id, of the first arch.n_hash layers */
    struct proj shared_up, shared_down; /* [glu_cols(G), D]: gate rows, up rows; [D, G]; G = arch.d_shared */
    struct weight shared_gate;          /* [1, D] */
    struct parallel_weights parallel;   /* whose dense network is shared_up, shared_down, G = arch.d_dense */
    struct proj latent_down, latent_up; /* [Z, D], [D, Z] of ffn_latent.c; Z in place of D below */
    struct proj up, down; /* [E, glu_cols(F), D], [E, D, F]; with expert parallelism only this rank's E/P experts. A
                             dense layer has one of each, of its own width */
};

/* FP8 products of a layer's experts (train.expert_dtype): number of matrices, of those exact in e4m3, host copies of
 * their steps (struct proj_fp8). */
struct fp8_layer {
    int64_t n_matrix, n_exact;
    float *steps[2]; /* [E] each */
    int n_step;
};

enum { HOST_EXPERT_SLOTS = 2 }; /* layers in host memory whose packed experts are on the device at a time */
struct weights {
    struct weight embed, head;         /* [V, D]; head may share embed's bytes */
    struct tensor norm;                /* [D] f32, final */
    struct hyper hyper_head;           /* before the final norm; zeroed without arch.hyper */
    struct layer_weights *layers;      /* [L] host */
    struct fp8_layer *fp8;             /* [L] host; NULL without FP8 products */
    bool fp8_backward;                 /* FP8_BACKWARD */
    int64_t n_layer;                   /* of fp8 */
    int64_t expert_bytes, dense_bytes; /* in dev->weights: up and down with their biases; all other weights */
    struct host_ring host; /* packed experts of weights_options.host_layers; the ring's places are in dev->weights */
    int64_t packed_bytes;  /* on the device, of the layer with the largest experts, if they are packed */
    int64_t n_decoded, decoded_bytes; /* layers with decoded experts; decoded minus packed bytes */
    char experts[96]; /* format in memory: "nf4-nested, packed from bf16, 3 of 24 layers decoded to bf16" */
    enum weight_format expert_format; /* before layers are decoded */
    uint64_t fingerprint;  /* hash of the tensors that were read, and of the format that experts were packed to. It
                              covers the first 64 KiB of a tensor and, of experts in separate tensors, each layer's
                              first expert. It does not depend on device, ranks or decoded layers; 0 in a dry run,
                              unless weights_options.hashed */
    uint64_t base;         /* as fingerprint, but without the format that experts were packed to */
    struct base_hash hash; /* of all bytes that were read, without that format; with expert parallelism only of this
                              rank's experts until base_hash_join */
    int64_t n_unused;      /* tensors of the checkpoint that moetrain does not read */
    const char *unused;    /* name of the first of them; valid until st is closed */
};

struct weights_options {
    const struct quantize *quantize; /* format to pack to while loading, dense feed-forward networks too; NULL: none */
    bool embed_on_host;              /* keep the embedding in dev->host, unless it is also the head */
    int64_t decoded_layers; /* number of last layers whose experts are decoded once by op_decode; their packed bytes are
                               in dev->work until then */
    int64_t host_layers; /* number of routed layers, evenly spaced among those that are not decoded, whose experts are
                            kept in dev->host; host_bytes: weights.packed_bytes of them */
    int64_t host_bytes;
    enum fp8_products fp8; /* of routed experts (train.expert_dtype) */
    bool checked; /* an earlier dry run found all tensors: this one looks only for those of each layer's first expert,
                     and counts no unused ones */
    bool hashed;  /* sets weights.fingerprint in a dry run too */
    const struct comm *ep; /* expert-parallel group: only this rank's experts are read; NULL: one rank */
};
/* Allocates every tensor on dev->weights and copies it, after checking name, shape and format; a dry run only counts
 * the bytes. The error names the tensor and the expected shape. */
int weights_load(struct weights *w, struct device *dev, const struct arch *a, const struct safetensors *st,
                 const struct weights_options *opt, struct err *err) MT_CHECK;
void weights_free(struct weights *w); /* frees the host table only */

/* The prefix of all names but the head's: "model."; "model.language_model." or "language_model.model." where the
 * checkpoint has other parts than text; "backbone." in Nemotron-H's. With "language_model.model." the head is
 * language_model.lm_head. */
const char *weights_prefix(const struct safetensors *st);

/* A model that is loaded in parts, because it does not fit memory as a whole. */
struct weights_source {
    const struct arch *arch;
    const struct safetensors *st;
    struct base_hash *hash; /* each loaded part is added, except in a dry run; after all parts it equals the hash of
                               weights_load. NULL: none */
};
/* Load one part on dev->weights, which the caller releases: one layer (packed by q as in weights_load, but without the
 * cache); the embedding; the head, with the final norm and hyper, the weights that sum several residual streams before
 * it (one stream: zeroed). */
int weights_load_layer(struct layer_weights *lw, struct device *dev, const struct weights_source *from,
                       const struct quantize *q, int64_t layer, struct err *err) MT_CHECK;
int weights_load_embed(struct weight *embed, struct device *dev, const struct weights_source *from,
                       struct err *err) MT_CHECK;
int weights_load_head(struct weight *head, struct tensor *norm, struct hyper *hyper, struct device *dev,
                      const struct weights_source *from, struct err *err) MT_CHECK;

/* The experts of a layer with n_exp that this rank of `ep` holds. */
struct expert_range {
    int64_t first, count;
};
struct expert_range weights_experts_here(const struct comm *ep, int64_t n_exp);

/* ---- for the load functions of struct mixer_kind and struct ffn_kind (model/layer.h). struct weights_read is the
 * layer being loaded. `name` is the checkpoint's name after "model.layers.N."; suffix is ".weight" or ".bias". The
 * functions check the shape, allocate on dev->weights and copy. A value that is not finite is an error. */
struct weights_read;
bool weights_has(const struct weights_read *f, const char *name, const char *suffix);
/* Fails if the checkpoint has this tensor of `what`, which the layer lacks according to config.json. keys: the keys of
 * config.json to correct, "a or b". */
int weights_refuse(struct weights_read *f, const char *name, const char *suffix, const char *what,
                   const char *keys) MT_CHECK;
int weights_vector(struct weights_read *f, struct tensor *out, const char *name, const char *suffix,
                   int64_t n) MT_CHECK;
/* Reads the weight of a norm; arch.norm_plus_one adds 1. */
int weights_norm(struct weights_read *f, struct tensor *out, const char *name, int64_t n) MT_CHECK;
/* Reads a vector as weights_vector does, times a factor. */
int weights_scaled(struct weights_read *f, struct tensor *out, const char *name, int64_t n, double factor) MT_CHECK;
/* Makes the weight of a norm that has none in the checkpoint. */
void weights_ones(struct weights_read *f, struct tensor *out, int64_t n);
/* Reads a tensor of one number; 1 in a dry run. name has no suffix. */
int weights_number(struct weights_read *f, float *out, const char *name) MT_CHECK;
/* Reads the weight [C, 1, taps] of a depthwise convolution, as [C, taps]. */
int weights_conv(struct weights_read *f, struct tensor *out, const char *name, int64_t n_col, int64_t n_tap) MT_CHECK;
/* Reads a tensor [n_row, n_col] in f32; name has no suffix. */
int weights_table(struct weights_read *f, struct tensor *out, const char *name, int64_t n_row, int64_t n_col) MT_CHECK;
/* Reads the experts of every token id, [V, n_top] i32; an error unless each row has distinct numbers below n_exp. name
 * has no suffix. */
int weights_hash_table(struct weights_read *f, struct tensor *out, const char *name, int64_t n_top,
                       int64_t n_exp) MT_CHECK;
/* Reads a matrix that model.quantize does not pack. */
int weights_matrix(struct weights_read *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in) MT_CHECK;
/* Stacks matrices row-wise into one (q, k, v), with their biases; model.quantize_attention packs them, or
 * model.quantize those of a feed-forward network. */
enum { STORED_PARTS = 3 };
struct stored_rows {
    const char *part[STORED_PARTS];
    int64_t rows[STORED_PARTS], n_in;
    int n_part;
    bool ffn;               /* of a feed-forward network */
    bool plain;             /* model.quantize_attention does not pack it, and FP8 is decoded to bf16 */
    bool unpacked;          /* model.quantize_attention does not pack it; FP8 keeps its bytes */
    struct row_order order; /* row order of a single part without bias */
};
int weights_rows(struct weights_read *f, struct proj *p, const struct stored_rows *r, bool biased) MT_CHECK;
/* This rank's experts, two matrices each, in any layout of checkpoints; packed or decoded by weights_options, with
 * biases if arch.expert_bias. */
struct stored_experts {
    const char *stack;   /* name of one tensor with all experts, "mlp.experts.gate_up_proj"; NULL: no such layout */
    const char *part[2]; /* names of one expert's tensors, # is its number; rows of part[1] (if any) follow part[0] */
    int64_t n_out, n_in;
};
int weights_experts(struct weights_read *f, struct proj *up, const struct stored_experts *stored_up, struct proj *down,
                    const struct stored_experts *stored_down) MT_CHECK;

#endif
