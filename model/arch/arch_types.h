/* arch_types.h - struct arch: every size and switch of a model family. */
#ifndef MT_ARCH_TYPES_H
#define MT_ARCH_TYPES_H

#include "data/json/json.h"
#include "kernels/ops/ops.h"

#define MT_MAX_LAYERS 512

struct rope_arch {
    double theta, factor, beta_fast, beta_slow, attention_factor; /* factor 1: plain RoPE */
    double softmax_gain; /* factor of the softmax scale: mscale_all_dim of latent attention's YaRN; else 1 */
    double query_beta;   /* queries grow with the position: beta of struct mla_shape, whose beta_len is original_len */
    int64_t original_len;
    int64_t width;  /* rotated channels of a head, from the first on */
    int64_t n_pair; /* proportional RoPE: number of pairs that rotate, at frequencies divided by `factor`; the others
                       have angle 0. 0: not proportional */
    bool yarn, truncate;
};

/* RMSNorm of q and k before RoPE: none, per head (Qwen3), over all heads as one vector (OLMoE). */
enum qk_norm { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_WHOLE };

/* Tensor names of a layer in a checkpoint, without "model.layers.N." and ".weight": its norms, router and experts. #
 * stands for the expert's number. */
enum norm_name {
    NORM_MIXER,
    NORM_MIXER_POST,
    NORM_FFN,
    NORM_FFN_POST,
    NORM_ROUTED, /* of ffn_parallel.c: before and after its experts, after its dense network */
    NORM_ROUTED_POST,
    NORM_DENSE_POST,
    NORM_NAMES
};
struct tensor_names {
    const char *norm[NORM_NAMES]; /* before and after the mixer, before and after the network; NULL: none. All NULL:
                                     input_layernorm before the mixer, post_attention_layernorm before the network */
    const char *router[2];        /* the second: an alternative name, or NULL */
    const char *gate, *up, *down; /* up NULL: the tensor `gate` has the rows of gate and up. gate NULL: up alone */
    const char *experts;          /* the module of all experts; NULL: mlp.experts */
    const char *block;      /* the module of a layer's mixer or network; NULL: self_attn or linear_attn, and mlp */
    const char *attn_out;   /* module of attention's output projection; NULL: self_attn.o_proj */
    const char *qk_norm[2]; /* norms of q and k; NULL: self_attn.q_norm, self_attn.k_norm */
    const char *dense[3];   /* modules of a dense network: gate, up, down; NULL: mlp.gate_proj, ... */
    const char *embed, *last_norm; /* outside the layers; NULL: embed_tokens, norm */
    const char *router_scale; /* per channel, of the router's separate norm of the residual; NULL: the router reads what
                                 the experts read. Only with ffn_parallel */
    const char *gate_scale;   /* of the experts' gates, per expert; NULL: none. Only with router_scale */
    const char *layer_scale;  /* of the output of a layer, one number; NULL: none */
    const char *router_bias;  /* suffix of the router's bias; NULL: ".bias". Without a dot it replaces the last part of
                                 the router's name */
    const char *shared;       /* the shared experts, which have gate_proj, up_proj, down_proj; NULL: none */
    const char *shared_gate;  /* the gate of the shared experts; NULL: none */
    const char *excluded;     /* regular expression of modules outside the text model that have names of targets, or
                                 NULL */
    bool stacked;             /* transformers reads all experts of a layer from one tensor, and no other layout */
    bool dense_by_module;     /* PEFT adapts dense networks as modules, not their weights as parameters */
    bool shared_by_weight;    /* PEFT takes the shared experts' names for the routed ones: it adapts their weights as
                                 parameters */
    bool qualified;           /* other modules have the names of attention's targets: PEFT needs them with self_attn. */
    bool published; /* published checkpoints have other names, which model/stored/published.c translates to these */
};

/* Attention of one kind of layer. The kinds of latent and of compressed attention may differ only in window and
 * RoPE. */
enum { ATTN_KINDS = 2 };
struct attn_arch {
    int64_t n_head, n_kv, head_dim; /* head_dim: of queries and keys */
    int64_t window;                 /* 0: full causal */
    int rope;                       /* index into arch.rope */
    float scale;                    /* of the softmax */
    bool values_are_keys;           /* no v_proj: v is k before its norm and RoPE. Not with an output gate */
};

/* Sizes of latent attention (mixer_mla.c). */
struct mla_arch {
    int64_t q_lora, kv_lora;   /* widths of the projections; q_lora 0: queries have none. kv_lora 0: another mixer */
    int64_t nope, rope, value; /* columns of a head: q and k without position; q and k rotated; values */
    bool interleaved;          /* rotated pairs are adjacent columns */
};

/* Sizes of gated DeltaNet (mixer_deltanet.c); n_tap: width of its convolution. */
struct delta_arch {
    struct delta_shape shape;
    int64_t n_tap;
    bool fused; /* checkpoints have in_proj_qkvz and in_proj_ba, whose rows are grouped by key head */
};

/* Sizes of Mamba-2 (mixer_mamba.c); n_tap: width of its convolution. */
struct mamba_arch {
    int64_t n_head, head_dim, n_group, state, n_tap; /* n_head 0: another mixer */
    bool conv_bias, bias;                            /* of the convolution; of both projections */
    double dt_min;                                   /* of a step, which has no upper limit */
};

/* The gated short convolution (mixer_shortconv.c); bias: of the convolution and of both projections. */
struct conv_arch {
    int64_t n_tap;
    bool bias;
};

/* Compressed attention (mixer_compressed.c): the kind of a layer, and the sizes. */
enum compress_kind { COMPRESS_NONE, COMPRESS_HEAVY, COMPRESS_SPARSE };
struct compress_arch {
    int64_t q_lora, n_group, o_lora;    /* columns of q_a; groups of the output projection, columns of o_a for each */
    int64_t rope;                       /* rotated columns of a head, its last ones */
    int64_t ratio[COMPRESS_SPARSE + 1]; /* tokens that an entry of each kind sums up */
    int64_t n_index, index_dim, index_top; /* of the indexer: heads, their width, entries per token */
    enum compress_kind kind[MT_MAX_LAYERS];
};

/* Hyper-connections: parallel residual streams (kernels/ops/ops.h). n_stream 0: one residual. */
struct hyper_arch {
    int64_t n_stream;
    int n_iter;
    double eps;
};

/* The order of a matrix's rows in a checkpoint, if it differs from that in memory. The checkpoint has n_group groups,
 * each with part[0] rows of part 0, then part[1] rows of part 1, and so on. Memory has all rows of part 0 first, then
 * all of part 1, each in the checkpoint's order. n_group 0: the orders are equal. */
enum { ROW_PARTS = 4 };
struct row_order {
    int64_t n_group, part[ROW_PARTS]; /* unused parts are 0 */
};

struct mixer_kind;
struct ffn_kind;
struct arch {
    const char *family; /* "gpt_oss": model_type of config.json */
    const struct tensor_names *names;
    const char *d_ff_key; /* of d_ff in config.json */
    int64_t n_layer, d_model;
    int64_t n_exp, top_k, d_ff; /* of a layer with routed experts; d_ff: width of one expert */
    int64_t d_dense;            /* width of a dense layer */
    int64_t d_latent;           /* columns that routed experts read and write; 0: d_model */
    int64_t d_shared;           /* width of all shared experts of a layer together; 0: none */
    int64_t vocab, max_len;
    int64_t n_mtp; /* layers of multi-token prediction after the last layer in the checkpoint, which are not read */
    struct norm norm;
    bool attn_bias, out_bias; /* of q, k and v; of the output projection */
    bool expert_bias, router_bias, sinks, tied;
    bool router_unbiased;    /* config.json says that routers lack the bias of their family */
    bool shared_gate;        /* a sigmoid gate per token scales the shared experts */
    bool transposed_experts; /* transformers and PEFT have the stacks of experts as [E, in, out] */
    bool transposed_stacks;  /* files have the stacks as [E, in, out]; transformers transposes them unless
                                transposed_experts */
    bool attn_gate;          /* q_proj has for every head the rows of q, then the rows of an output gate */
    bool value_norm;         /* values have an RMSNorm per head, without weight; with QK_NORM_HEAD */
    bool embed_scaled;       /* the embedding is multiplied by sqrt(d_model), rounded to the dtype of activations */
    float logit_cap;         /* logits are cap tanh(z / cap); 0: z */
    bool norm_plus_one;      /* norms multiply by 1 + weight, except the gated one of DeltaNet */
    bool nested;             /* config.json has these settings in text_config: the class has other parts too */
    enum qk_norm qk_norm;
    struct mla_arch mla;
    struct delta_arch delta;
    struct mamba_arch mamba;
    struct conv_arch conv;
    struct compress_arch compress;
    struct hyper_arch hyper;
    int64_t n_hash; /* first layers whose experts follow from the token's id */
    struct router router;
    struct glu glu;
    struct attn_arch attn[ATTN_KINDS];
    struct rope_arch rope[ATTN_KINDS];             /* width 0: unused */
    uint8_t attn_of[MT_MAX_LAYERS];                /* kind of attention of each layer, in attn */
    bool dense[MT_MAX_LAYERS];                     /* the layer has no routed experts: one dense feed-forward network */
    const struct mixer_kind *mixer[MT_MAX_LAYERS]; /* kinds of each layer: model/layer.h; mixer or ffn may be NULL */
    const struct ffn_kind *ffn[MT_MAX_LAYERS];
};

#endif
