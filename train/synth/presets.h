/* presets.h - published architectures by name: config.json and special tokens. */
#ifndef MT_PRESETS_H
#define MT_PRESETS_H

#include "model/arch/arch.h"

/* A special token with its id in the published vocabulary. */
struct special_token {
    const char *text;
    int64_t id;
};

/* Sizes of DeepSeek-V4. Its first two layers have only a window. In the others tokens are also compressed to entries;
 * layers with sparse and with heavy compression alternate. */
struct preset_compress {
    int64_t q_lora, n_group, o_lora, rope, window, heavy; /* heavy: tokens per entry; sparse entries have 4 */
    int64_t n_index, index_dim, index_top;
};

/* Sizes of Nemotron-H that a row does not have. */
struct preset_nemotron {
    const char *pattern;                      /* a letter per layer: M, E, * or - */
    int64_t n_head, head_dim, n_group, state; /* of Mamba-2 */
    int64_t d_shared, d_dense;
    double routed_scale;
    int64_t d_latent; /* moe_latent_size; 0: none */
};

struct preset;

/* Further sizes of Gemma-4; the row has those of layers with a window. Every period-th layer and the last one have full
 * attention, in which the keys are also the values. */
struct preset_gemma {
    int64_t global_head_dim, global_n_kv, period, window, d_dense;
    double cap; /* of logits */
};

/* Values that all checkpoints of a family share; preset_config writes the rest of config.json. */
struct preset_family {
    const char *model_type, *class_name;
    const char *experts_key, *width_key; /* keys of config.json for the number of experts and their width */
    const char *eps_key;                 /* NULL: rms_norm_eps */
    bool tied;                           /* tie_word_embeddings */
    double eps, aux_coef;
    int64_t vocab; /* published size; the ids below belong to it */
    const char *bos, *eos, *pad;
    struct special_token tokens[12]; /* up to text NULL */
    bool head_dim_named;             /* config.json has the key head_dim */
    enum weight_format experts;      /* as published */
    int64_t d_dense, n_dense;        /* width and number of the dense layers, which are the first layers; 0: none */
    double routed_scale;             /* routed_scaling_factor of a sigmoid router; 0: another router */
    int64_t n_shared;                /* shared experts of such a router; 0: one */
    int64_t n_group, topk_group;     /* groups of such a router; 0: one */
    const struct mla_arch *mla;      /* latent attention; NULL: another mixer */
    double yarn, beta_fast;          /* its YaRN: factor, 0: none; beta_fast, 0: 32 */
    int64_t yarn_len;                /* original_max_position_embeddings, 0: 4096 */
    double query_beta;               /* llama_4_scaling_beta; 0: none */
    bool attn_bias, qk_norm;         /* attention_bias; use_qk_norm where config.json has the key */
    bool stacked;          /* in bf16 all experts of a layer are one tensor, [E, out, in] or, if arch.transposed_stacks,
                              [E, in, out] */
    const char *text_type; /* model_type of the text part, whose settings are in text_config and whose tensors are below
                              model.language_model; NULL: the model has no other part */
    const struct delta_shape *delta; /* gated DeltaNet in three of four layers, and a shared expert as wide as the
                                        routed experts; NULL: another family */
    void (*put)(struct json_out *o, const struct preset *p, int64_t n_layer); /* keys of the family alone; or NULL */
    const struct preset_nemotron *nemotron; /* Mamba-2 and one branch per layer; NULL: another family */
    const struct preset_compress *compress; /* compressed attention and hyper-connections; NULL: another family */
    const struct preset_gemma *gemma;       /* NULL: another family */
};

struct preset {
    const char *name;
    const struct preset_family *family;
    int64_t n_layer, d_model, n_head, n_kv, head_dim;
    int64_t n_exp, top_k, d_ff, vocab, max_len, theta;
};

/* Finds the row of a name. NULL: the name is unknown. */
const struct preset *preset_find(const char *name, struct err *err);
const struct preset *preset_row(int64_t i); /* NULL: i is past the end */
/* The id of a special token in this row's vocabulary. Ids near 0 are the published ones; others have the published
 * distance from the end of the vocabulary.
 */
int64_t preset_token(const struct preset *p, const char *text);

/* config.json with the first n_layer layers (all: p->n_layer) and experts stored as WF_MXFP4, WF_NF4, WF_BF16, WF_NVFP4
 * or WF_FP8. Free o with json_out_free. */
void preset_config(struct json_out *o, const struct preset *p, int64_t n_layer, enum weight_format experts);

#endif
