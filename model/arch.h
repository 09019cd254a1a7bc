/* arch.h - config.json -> struct arch: every size and switch of a model family. */
#ifndef MT_ARCH_H
#define MT_ARCH_H

#include "data/json.h"
#include "kernels/ops.h"

#define MT_MAX_LAYERS 512

struct rope_arch {
    double theta, factor, beta_fast, beta_slow, attention_factor; /* factor 1: plain RoPE */
    int64_t original_len;
    bool yarn, truncate;
};

/* RMSNorm of q and k before RoPE: none, per head (Qwen3), over all heads as one vector (OLMoE). */
enum qk_norm { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_WHOLE };

/* Tensor names of a layer's router and experts in a checkpoint, without "model.layers.N." and ".weight". # stands for
 * the number of the expert. */
struct tensor_names {
    const char *router[2];        /* the second: an alternative name, or NULL */
    const char *gate, *up, *down; /* up NULL: the tensor `gate` holds the rows of both */
};

struct mixer_kind;
struct ffn_kind;
struct arch {
    const char *family; /* "gpt_oss": model_type of config.json */
    const struct tensor_names *names;
    int64_t n_layer, d_model, n_head, n_kv, head_dim;
    int64_t n_exp, top_k, d_ff; /* of a layer with routed experts; d_ff: width of one expert */
    int64_t d_dense;            /* width of a dense layer */
    int64_t vocab, max_len;
    struct norm norm;
    float attn_scale;
    bool attn_bias, expert_bias, router_bias, sinks, tied;
    bool transposed_experts; /* transformers stores the stacks of experts as [E, in, out] */
    enum qk_norm qk_norm;
    enum router_kind router;
    struct glu glu;
    struct rope_arch rope;
    int64_t window[MT_MAX_LAYERS];                 /* 0: full causal */
    bool dense[MT_MAX_LAYERS];                     /* the layer has no routed experts: one dense feed-forward network */
    const struct mixer_kind *mixer[MT_MAX_LAYERS]; /* kinds of each layer: model/layer.h */
    const struct ffn_kind *ffn[MT_MAX_LAYERS];
};

/* Size of the feed-forward network of a layer. A dense layer is one expert that every token uses with weight 1. */
struct ffn_size {
    int64_t n_exp, top_k, d_ff;
};

/* Reads dir/config.json. An error names a missing, contradictory or unsupported value. */
int arch_load(struct arch *a, const char *dir, struct err *err) MT_CHECK;
int arch_parse(struct arch *a, struct json root, struct err *err) MT_CHECK; /* the same, from parsed JSON */
struct ffn_size arch_ffn(const struct arch *a, int64_t layer);
int64_t arch_qkv_cols(const struct arch *a); /* (H + 2K) * A */
/* cos | sin of positions 0..n-1, attention factor included; table [n, head_dim] f32 on the host */
void arch_rope_table(const struct arch *a, int64_t n, float *table);

#endif
