/* arch.c - the table of model families, and the reader of config.json as transformers 4 and 5 write it. */
#include "model/arch/arch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/arch/arch_compressed.h"
#include "model/arch/arch_fixed.h"
#include "model/arch/arch_gemma.h"
#include "model/arch/arch_keys.h"
#include "model/arch/arch_nemotron.h"
#include "model/arch/arch_range.h"
#include "model/arch/arch_refuse.h"
#include "model/arch/arch_rope.h"
#include "model/layer.h"

/* Facts that config.json does not contain. A family with a new formula adds a field here, not a branch elsewhere. */
struct family {
    const char *model_type;
    const char *text_type;              /* model_type of its text part by itself, or NULL */
    const struct mixer_kind *mixer;     /* kind of every layer */
    const struct mixer_kind *linear;    /* kind of the layers that layer_types calls linear_name, or NULL */
    const char *linear_name;            /* NULL: linear_attention. Otherwise layer_types is required */
    const struct ffn_kind *ffn, *dense; /* kinds of layers with and without routed experts */
    struct tensor_names names;
    const char *width;               /* config.json's key for the width of an expert */
    const char *n_exp;               /* key of the number of experts; NULL: num_experts */
    const char *top_k;               /* key of the experts per token; NULL: num_experts_per_tok */
    const char *act_key, *act;       /* key of the activation, and its one value; NULL: hidden_act, silu */
    const char *d_shared;            /* key of the width of the shared experts; NULL: n_shared_experts times width */
    const char *eps_key;             /* NULL: rms_norm_eps */
    double theta, eps, alpha, limit; /* defaults of transformers' configuration class */
    int64_t head_dim;                /* 0: hidden_size / num_attention_heads */
    double rotated;  /* default of partial_rotary_factor; 0: all channels, no other value is supported */
    bool rotary_dim; /* rotary_dim is read: the number of rotated channels */
    int64_t max_len, window;
    bool attn_bias, expert_bias, router_bias, sinks, transposed_experts, transposed_stacks, round_twice;
    bool local_experts; /* errors call the number of experts num_local_experts, else num_experts; both names are read */
    bool rope_named;    /* rope_scaling or rope_parameters is required: the family was trained with YaRN */
    bool kv_as_heads;   /* num_key_value_heads may be missing: then K = H */
    bool norm_topk;     /* norm_topk_prob is read; missing means false: gates are not renormalised */
    bool renormalises;  /* norm_topk_prob is read; missing means true */
    bool may_be_dense;  /* mlp_only_layers and decoder_sparse_step are read */
    bool sigmoid;       /* sigmoid router; routed_scaling_factor, n_group and topk_group are read */
    double routed_scale;        /* default of routed_scaling_factor; 0: 1 */
    int64_t n_group, top_group; /* defaults of n_group and topk_group; 0: 1 */
    bool predicts;              /* num_nextn_predict_layers is read */
    bool mtp_modules;           /* num_mtp_modules and mtp_transformer_layers are read */
    bool dense_first;           /* first_k_dense_replace and mlp_layer_types are read */
    const char *n_dense;        /* key in place of first_k_dense_replace; NULL: that */
    int64_t first_dense;        /* default of first_k_dense_replace */
    /* Layers with a sliding window when layer_types is absent. SLIDE_NEVER: layer_types must not name one either. */
    enum { SLIDE_NEVER, SLIDE_EVEN, SLIDE_ALL } slide;
    bool qk_norm_named; /* use_qk_norm is read; missing means that q and k have no norm */
    bool out_unbiased;  /* attention_bias does not concern the output projection */
    bool attn_gate, norm_plus_one;
    bool delta_fused;     /* delta_arch.fused */
    bool compressed;      /* arch_compressed.c reads kinds of layers, RoPE and router */
    bool nemotron;        /* arch_nemotron.c reads all but the router */
    bool gemma;           /* arch_gemma.c reads kinds of layers and RoPE */
    bool tied;            /* tie_word_embeddings is true where it is missing */
    const char *tied_key; /* another name of it, which counts; or NULL */
    double floor;         /* of the sum of sigmoids that divides gates; 0: usual */
    enum rope_keys rope_keys;
    enum qk_norm qk_norm;
    struct glu glu;
};

#define EXPERT_NAMES                                                                                                   \
    .router = {"mlp.gate"}, .gate = "mlp.experts.#.gate_proj", .up = "mlp.experts.#.up_proj",                          \
    .down = "mlp.experts.#.down_proj"

/* DeepSeek-V3 and the families that follow it. */
#define DEEPSEEK_NAMES                                                                                                 \
    EXPERT_NAMES, .router_bias = ".e_score_correction_bias", .shared = "mlp.shared_experts", .shared_by_weight = true, \
                  .excluded = ".*vision_tower.*"

#define LATENT_FAMILY                                                                                                  \
    .mixer = &mixer_mla, .ffn = &ffn_moe, .dense = &ffn_dense, .names = {DEEPSEEK_NAMES},                              \
    .width = "moe_intermediate_size", .n_exp = "n_routed_experts", .theta = 10000, .router_bias = true,                \
    .round_twice = true, .kv_as_heads = true, .sigmoid = true, .renormalises = true, .dense_first = true,              \
    .predicts = true, .rope_keys = ROPE_KEYS_MSCALE

#define DELTANET_NAMES EXPERT_NAMES, .shared = "mlp.shared_expert", .shared_gate = "mlp.shared_expert_gate"
#define DELTANET_FAMILY                                                                                                \
    .mixer = &mixer_attention, .linear = &mixer_deltanet, .ffn = &ffn_moe, .dense = &ffn_dense,                        \
    .width = "moe_intermediate_size", .d_shared = "shared_expert_intermediate_size", .theta = 10000, .eps = 1e-6,      \
    .head_dim = 256, .rotated = 0.25, .max_len = 32768, .attn_gate = true, .norm_plus_one = true,                      \
    .qk_norm = QK_NORM_HEAD

#define MIXTRAL_NAMES                                                                                                  \
    .router = {"block_sparse_moe.gate", "mlp.gate"}, .gate = "block_sparse_moe.experts.#.w1",                          \
    .up = "block_sparse_moe.experts.#.w3", .down = "block_sparse_moe.experts.#.w2"

static const struct family families[] = {
    {.model_type = "gpt_oss",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {.router = {"mlp.router", "mlp.router.linear"},
               .gate = "mlp.experts.gate_up_projs.#",
               .down = "mlp.experts.down_projs.#"},
     .width = "intermediate_size",
     .local_experts = true,
     .theta = 150000,
     .eps = 1e-5,
     .alpha = 1.702,
     .limit = 7,
     .head_dim = 64,
     .max_len = 131072,
     .window = 128,
     .attn_bias = true,
     .expert_bias = true,
     .router_bias = true,
     .sinks = true,
     .transposed_experts = true,
     .transposed_stacks = true,
     .rope_named = true,
     .slide = SLIDE_EVEN,
     .glu = {.kind = GLU_CLAMPED, .interleaved = true}},
    {.model_type = "qwen3_moe",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {EXPERT_NAMES},
     .width = "moe_intermediate_size",
     .theta = 10000,
     .eps = 1e-6,
     .max_len = 32768,
     .round_twice = true,
     .norm_topk = true,
     .may_be_dense = true,
     .qk_norm = QK_NORM_HEAD},
    {.model_type = "qwen3_vl_moe",
     .text_type = "qwen3_vl_moe_text",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {EXPERT_NAMES, .stacked = true},
     .width = "moe_intermediate_size",
     .theta = 500000,
     .eps = 1e-6,
     .max_len = 128000,
     .round_twice = true,
     .transposed_stacks = true,
     .kv_as_heads = true,
     .may_be_dense = true,
     .qk_norm = QK_NORM_HEAD},
    {.model_type = "olmoe",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {EXPERT_NAMES},
     .width = "intermediate_size",
     .theta = 10000,
     .eps = 1e-5,
     .max_len = 4096,
     .round_twice = true,
     .kv_as_heads = true,
     .norm_topk = true,
     .qk_norm = QK_NORM_WHOLE},
    {.model_type = "mixtral",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {MIXTRAL_NAMES},
     .width = "intermediate_size",
     .local_experts = true,
     .theta = 1000000,
     .eps = 1e-5,
     .max_len = 131072,
     .round_twice = true,
     .slide = SLIDE_ALL},
    {.model_type = "minimax_m2",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {MIXTRAL_NAMES, .router_bias = "e_score_correction_bias"},
     .width = "intermediate_size",
     .local_experts = true,
     .theta = 5000000,
     .eps = 1e-6,
     .head_dim = 128,
     .rotated = 1,
     .rotary_dim = true,
     .max_len = 196608,
     .router_bias = true,
     .round_twice = true,
     .sigmoid = true,
     .mtp_modules = true,
     .qk_norm = QK_NORM_WHOLE},
    {.model_type = "glm4_moe",
     .mixer = &mixer_attention,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {DEEPSEEK_NAMES},
     .width = "moe_intermediate_size",
     .n_exp = "n_routed_experts",
     .theta = 10000,
     .eps = 1e-5,
     .rotated = 0.5,
     .max_len = 131072,
     .router_bias = true,
     .round_twice = true,
     .sigmoid = true,
     .renormalises = true,
     .predicts = true,
     .dense_first = true,
     .first_dense = 1,
     .qk_norm_named = true,
     .out_unbiased = true,
     .qk_norm = QK_NORM_HEAD},
    {.model_type = "glm4_moe_lite",
     LATENT_FAMILY,
     .eps = 1e-5,
     .max_len = 202752,
     .first_dense = 1,
     .routed_scale = 1.8},
    {.model_type = "deepseek_v3",
     LATENT_FAMILY,
     .eps = 1e-6,
     .max_len = 4096,
     .first_dense = 3,
     .routed_scale = 2.5,
     .n_group = 8,
     .top_group = 4},
    {.model_type = "kimi_k2", /* its class is DeepSeek-V3's */
     LATENT_FAMILY,
     .eps = 1e-6,
     .max_len = 4096,
     .first_dense = 3,
     .routed_scale = 2.5,
     .n_group = 8,
     .top_group = 4},
    {.model_type = "mistral4",
     .mixer = &mixer_mla,
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {EXPERT_NAMES, .shared = "mlp.shared_experts", .excluded = ".*vision_tower.*", .stacked = true},
     .width = "moe_intermediate_size",
     .n_exp = "n_routed_experts",
     .theta = 10000,
     .eps = 1e-6,
     .max_len = 1048576,
     .round_twice = true,
     .rope_named = true,
     .kv_as_heads = true,
     .rope_keys = ROPE_KEYS_GROWTH,
     .renormalises = true,
     .dense_first = true},
    {.model_type = "deepseek_v4",
     .mixer = &mixer_compressed,
     .ffn = &ffn_moe,
     .names = {EXPERT_NAMES, .router_bias = ".e_score_correction_bias", .shared = "mlp.shared_experts",
               .qualified = true, .published = true},
     .width = "moe_intermediate_size",
     .n_exp = "n_routed_experts",
     .eps = 1e-6,
     .limit = 10,
     .head_dim = 512,
     .max_len = 1048576,
     .router_bias = true,
     .sinks = true,
     .compressed = true,
     .predicts = true,
     .glu = {.kind = GLU_SWIGLU_CLAMPED}},
    {.model_type = "lfm2_moe",
     .mixer = &mixer_attention,
     .linear = &mixer_shortconv,
     .linear_name = "conv",
     .ffn = &ffn_moe,
     .dense = &ffn_dense,
     .names = {.norm = {[NORM_MIXER] = "operator_norm", [NORM_FFN] = "ffn_norm"},
               .router = {"feed_forward.gate"},
               .gate = "feed_forward.experts.#.w1",
               .up = "feed_forward.experts.#.w3",
               .down = "feed_forward.experts.#.w2",
               .experts = "feed_forward.experts",
               .router_bias = "expert_bias",
               .attn_out = "self_attn.out_proj",
               .qk_norm = {"self_attn.q_layernorm", "self_attn.k_layernorm"},
               .dense = {"feed_forward.w1", "feed_forward.w3", "feed_forward.w2"},
               .last_norm = "embedding_norm",
               .dense_by_module = true},
     .width = "moe_intermediate_size",
     .eps_key = "norm_eps",
     .theta = 1000000,
     .eps = 1e-5,
     .max_len = 128000,
     .router_bias = true,
     .round_twice = true,
     .sigmoid = true,
     .renormalises = true,
     .floor = 1e-6,
     .dense_first = true,
     .n_dense = "num_dense_layers",
     .first_dense = 2,
     .tied = true,
     .tied_key = "tie_embedding",
     .qk_norm = QK_NORM_HEAD},
    {.model_type = "qwen3_5_moe", .text_type = "qwen3_5_moe_text", DELTANET_FAMILY, .names = {DELTANET_NAMES}},
    {.model_type = "qwen3_next",
     DELTANET_FAMILY,
     .names = {DELTANET_NAMES, .shared_by_weight = true},
     .renormalises = true,
     .may_be_dense = true,
     .delta_fused = true},
    {.model_type = "nemotron_h",
     .names = {.norm = {[NORM_MIXER] = "norm", [NORM_FFN] = "norm"},
               .router = {"mixer.gate"},
               .up = "mixer.experts.#.up_proj",
               .down = "mixer.experts.#.down_proj",
               .experts = "mixer.experts",
               .block = "mixer",
               .embed = "embeddings",
               .last_norm = "norm_f",
               .router_bias = ".e_score_correction_bias",
               .shared = "mixer.shared_experts"},
     .nemotron = true,
     .sigmoid = true,
     .renormalises = true},
    {.model_type = "gemma4",
     .text_type = "gemma4_text",
     .mixer = &mixer_attention,
     .ffn = &ffn_parallel,
     .dense = &ffn_dense,
     .names = {.norm = {[NORM_MIXER] = "input_layernorm",
                        [NORM_MIXER_POST] = "post_attention_layernorm",
                        [NORM_FFN] = "pre_feedforward_layernorm",
                        [NORM_FFN_POST] = "post_feedforward_layernorm",
                        [NORM_ROUTED] = "pre_feedforward_layernorm_2",
                        [NORM_ROUTED_POST] = "post_feedforward_layernorm_2",
                        [NORM_DENSE_POST] = "post_feedforward_layernorm_1"},
               .router = {"router.proj"},
               .gate = "experts.#.gate_proj",
               .up = "experts.#.up_proj",
               .down = "experts.#.down_proj",
               .experts = "experts",
               .router_scale = "router.scale",
               .gate_scale = "router.per_expert_scale",
               .layer_scale = "layer_scalar",
               .stacked = true,
               .dense_by_module = true,
               .excluded = ".*(vision|audio)_tower.*"},
     .width = "moe_intermediate_size",
     .top_k = "top_k_experts",
     .act_key = "hidden_activation",
     .act = "gelu_pytorch_tanh",
     .eps = 1e-6,
     .head_dim = 256,
     .max_len = 131072,
     .gemma = true,
     .tied = true,
     .qk_norm = QK_NORM_HEAD,
     .glu = {.kind = GLU_GELU}},
};

static const struct nemotron_kinds nemotron_kinds = {&mixer_mamba, &mixer_attention, &ffn_shared, &ffn_latent,
                                                     &ffn_dense};

/* Whether the class is a vision tower around the text part of any family: model_type of its text_config names the
 * family. */
static bool is_wrapper(struct json root)
{
    static const char *const types[] = {"kimi_k25", "mistral3"};
    const char *type = "";
    if (json_get_str(root, "model_type", &type, NULL)) return false;
    for (int i = 0; i < MT_LEN(types); i++)
        if (!strcmp(type, types[i])) return json_type(json_find(root, "text_config")) == JSON_OBJECT;
    return false;
}

/* Whether a configuration, or a part of it, has a count of experts above 1. */
static bool counts_experts(struct json j)
{
    const char *key;
    struct json value;
    double n;
    for (int64_t i = 0; json_member(j, i, &key, &value); i++)
        if (counts_experts(value) || (strstr(key, "expert") && !json_f64(value, &n, NULL) && n > 1)) return true;
    return false;
}

static int find_family(const struct family **out, struct json root, struct err *err)
{
    const char *type;
    char known[32 * MT_LEN(families)] = "";
    if (json_get_str(root, "model_type", &type, err)) return -1;
    for (int64_t i = 0; i < MT_LEN(families); i++) {
        const struct family *f = &families[i];
        *out = f;
        if (!strcmp(f->model_type, type) || (f->text_type && !strcmp(f->text_type, type))) return 0;
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "", f->model_type);
    }
    return json_error(root, err, "model_type \"%s\" is %s; this version trains: %s", type,
                      counts_experts(root) ? "not supported" : "a dense model, and dense models are not supported",
                      known);
}

/* Reads a count that has two names; both must be equal if the file has both. If it has neither, the error asks for
 * `name`. */
static int read_count(struct json root, const char *name, const char *other, int64_t *out, struct err *err)
{
    int64_t again;
    if (json_get_i64(root, json_has(root, name) || !json_has(root, other) ? name : other, 1, 65536, out, err))
        return -1;
    again = *out;
    if (json_opt_i64(root, other, 1, 65536, &again, err)) return -1;
    if (again != *out)
        return json_error(root, err, "%s is %lld, but %s is %lld", name, (long long)*out, other, (long long)again);
    return 0;
}

static int read_kv_heads(struct attn_arch *h, struct json root, const struct family *f, struct err *err)
{
    h->n_kv = h->n_head;
    return f->kv_as_heads ? json_opt_i64(root, "num_key_value_heads", 1, 4096, &h->n_kv, err)
                          : json_get_i64(root, "num_key_value_heads", 1, 4096, &h->n_kv, err);
}

static int read_sizes(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    const int64_t big = 1 << 24;
    struct attn_arch *h = &a->attn[0];
    int64_t head_dim = f->head_dim;
    a->max_len = f->max_len;
    a->d_ff_key = f->width;
    if (json_get_i64(root, "num_hidden_layers", 1, MT_MAX_LAYERS, &a->n_layer, err) ||
        json_get_i64(root, "hidden_size", 1, big, &a->d_model, err) ||
        json_get_i64(root, "num_attention_heads", 1, 4096, &h->n_head, err) || read_kv_heads(h, root, f, err) ||
        json_opt_i64(root, "head_dim", 2, 4096, &head_dim, err) ||
        (f->n_exp ? json_get_i64(root, f->n_exp, 1, 65536, &a->n_exp, err)
                  : read_count(root, f->local_experts ? "num_local_experts" : "num_experts",
                               f->local_experts ? "num_experts" : "num_local_experts", &a->n_exp, err)) ||
        (f->top_k ? json_get_i64(root, f->top_k, 1, 65536, &a->top_k, err)
                  : read_count(root, "num_experts_per_tok", "experts_per_token", &a->top_k, err)) ||
        json_get_i64(root, f->width, 1, big, &a->d_ff, err) ||
        json_get_i64(root, "vocab_size", 1, big, &a->vocab, err) ||
        json_opt_i64(root, "max_position_embeddings", 1, big, &a->max_len, err))
        return -1;
    if (h->n_head % h->n_kv)
        return json_error(root, err, "num_attention_heads %lld is no multiple of num_key_value_heads %lld",
                          (long long)h->n_head, (long long)h->n_kv);
    if (a->top_k > a->n_exp)
        return json_error(root, err, "%lld experts per token, but there are %lld experts", (long long)a->top_k,
                          (long long)a->n_exp);
    if (f->mixer == &mixer_mla) return 0; /* read_mla reads the width of a head */
    if (!head_dim && a->d_model % h->n_head)
        return json_error(root, err, "head_dim is missing and hidden_size %lld is no multiple of num_attention_heads",
                          (long long)a->d_model);
    h->head_dim = head_dim ? head_dim : a->d_model / h->n_head;
    if (h->head_dim % 2) return json_error(root, err, "head_dim %lld is odd", (long long)h->head_dim);
    return 0;
}

/* Reads RoPE from rope_parameters or rope_scaling, or without either. */
static int read_rope_of(struct rope_arch *r, const struct arch *a, struct json root, struct json scaling,
                        const struct family *f, struct err *err)
{
    const int64_t head_dim = a->mla.kv_lora ? a->mla.rope : a->attn[0].head_dim;
    double rotated = f->rotated > 0 ? f->rotated : 1;
    *r = (struct rope_arch){.theta = f->theta,
                            .factor = 1,
                            .beta_fast = 32,
                            .beta_slow = 1,
                            .attention_factor = 1,
                            .softmax_gain = 1,
                            .truncate = true};
    if (rope_read_theta(&r->theta, root, "rope_theta", scaling, err) ||
        (f->rotated > 0 && json_opt_f64(root, "partial_rotary_factor", &rotated, err)) ||
        json_opt_f64(scaling, "partial_rotary_factor", &rotated, err))
        return -1;
    if (a->mla.kv_lora && (int64_t)(rotated * (double)a->attn[0].head_dim) == a->mla.rope)
        rotated = 1; /* share of a head */
    if (rotated != 1 && !(f->rotated > 0))
        return json_error(scaling, err, "partial_rotary_factor %g is not supported (1)", rotated);
    if (!(rotated > 0 && rotated <= 1))
        return json_error(root, err, "partial_rotary_factor %g is not above 0 and at most 1", rotated);
    r->width = (int64_t)((double)head_dim * rotated); /* truncated as in transformers */
    if (f->rotary_dim && keys_rotary_dim(r, root, scaling, head_dim, err)) return -1;
    if (r->width < 2 || r->width % 2)
        return json_error(root, err, "partial_rotary_factor %g rotates %lld of %lld channels, which are no pairs",
                          rotated, (long long)r->width, (long long)head_dim);
    return rope_read_type(r, root, scaling, f->rope_keys, err);
}

/* Reads RoPE. transformers 5 writes rope_parameters; 4 writes rope_theta and rope_scaling. If a file has both, they
 * must agree. */
static int read_rope(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    struct json scaling, other;
    struct rope_arch again;
    if (rope_find(&scaling, &other, root, err)) return -1;
    if (!rope_given(scaling) && f->rope_named)
        return json_error(root, err, "rope_parameters and rope_scaling are both missing");
    if (read_rope_of(&a->rope[0], a, root, scaling, f, err)) return -1;
    if (!rope_given(other)) return 0;
    if (read_rope_of(&again, a, root, other, f, err)) return -1;
    return rope_same(&a->rope[0], &again) ? 0 : rope_differs(other, err);
}

/* Reads sizes of latent attention. Every head has its own keys, so num_key_value_heads must equal the number of
 * heads. */
static int read_mla(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    struct mla_arch *m = &a->mla;
    struct attn_arch *h = &a->attn[0];
    const int64_t big = 1 << 20;
    if (f->mixer != &mixer_mla) return 0;
    m->interleaved = true;
    if ((json_type(json_find(root, "q_lora_rank")) != JSON_NULL &&
         json_get_i64(root, "q_lora_rank", 1, big, &m->q_lora, err)) ||
        json_get_i64(root, "kv_lora_rank", 1, big, &m->kv_lora, err) ||
        json_get_i64(root, "qk_nope_head_dim", 1, 4096, &m->nope, err) ||
        json_get_i64(root, "qk_rope_head_dim", 2, 4096, &m->rope, err) ||
        json_get_i64(root, "v_head_dim", 1, 4096, &m->value, err) ||
        json_opt_flag(root, "rope_interleave", &m->interleaved, err))
        return -1;
    if (m->rope % 2) return json_error(root, err, "qk_rope_head_dim %lld is odd", (long long)m->rope);
    if (h->n_kv != h->n_head)
        return json_error(root, err,
                          "num_key_value_heads %lld is not supported: latent attention has a key for each of "
                          "the %lld heads",
                          (long long)h->n_kv, (long long)h->n_head);
    h->head_dim = m->nope + m->rope;
    return 0;
}

enum { FULL, SLIDING };

/* Reads which layers have a window, and which have another mixer than attention. */
static int read_windows(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    int64_t window = f->window, interval = 4; /* every interval-th layer has attention */
    struct json types = json_find(root, "layer_types");
    const char *linear = f->linear_name ? f->linear_name : "linear_attention";
    const bool spaced =
        f->linear && !f->linear_name && json_type(json_find(root, "full_attention_interval")) == JSON_INT;
    if (json_opt_i64(root, "sliding_window", 1, 1 << 24, &window, err) ||
        (f->linear && !f->linear_name &&
         json_opt_i64(root, "full_attention_interval", 1, MT_MAX_LAYERS, &interval, err)))
        return -1;
    a->attn[SLIDING] = a->attn[FULL];
    a->attn[SLIDING].window = window;
    if (!json_given(types) && f->linear_name) return json_error(root, err, "key `layer_types` is missing");
    if (!json_given(types)) {
        for (int64_t l = 0; l < a->n_layer; l++) {
            if (f->slide == SLIDE_ALL || (f->slide == SLIDE_EVEN && l % 2 == 0)) a->attn_of[l] = SLIDING;
            if (f->linear && (l + 1) % interval) a->mixer[l] = f->linear;
        }
        return 0;
    }
    if (json_type(types) != JSON_ARRAY || json_count(types) != a->n_layer)
        return json_error(types, err, "is not a list of %lld names", (long long)a->n_layer);
    for (int64_t l = 0; l < a->n_layer; l++) {
        const char *name;
        int64_t size;
        struct json item = json_at(types, l);
        if (json_str(item, &name, &size, err)) return -1;
        const bool slides = f->slide && !strcmp(name, "sliding_attention");
        if (slides && window)
            a->attn_of[l] = SLIDING;
        else if (slides)
            return json_error(item, err, "is sliding_attention, but sliding_window is not set");
        else if (f->linear && !strcmp(name, linear))
            a->mixer[l] = f->linear;
        else if (strcmp(name, "full_attention"))
            return json_error(item, err, "\"%s\" is not supported (%s%sfull_attention)", name,
                              f->linear  ? linear
                              : f->slide ? "sliding_attention"
                                         : "",
                              f->linear || f->slide ? ", " : "");
        if (spaced && (a->mixer[l] == f->linear) != ((l + 1) % interval != 0))
            return json_error(item, err,
                              "is %s, but full_attention_interval = %lld contradicts it: correct one, or remove "
                              "full_attention_interval",
                              name, (long long)interval);
    }
    return 0;
}

static int read_shared(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    int64_t n = 1;
    if (!f->names.shared) return 0;
    if (f->d_shared) return json_get_i64(root, f->d_shared, 1, 1 << 24, &a->d_shared, err);
    if (json_opt_i64(root, "n_shared_experts", 0, 1024, &n, err)) return -1;
    a->d_shared = n * a->d_ff;
    return 0;
}

/* Reads the number of dense first layers: first_k_dense_replace, or mlp_layer_types with a kind for each layer. */
static int read_first_dense(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    const struct json kinds = json_find(root, "mlp_layer_types");
    const char *key = f->n_dense ? f->n_dense : "first_k_dense_replace";
    const bool counted = json_type(json_find(root, key)) == JSON_INT;
    int64_t first = f->first_dense, size;
    if (!f->dense_first) return 0;
    if (json_opt_i64(root, key, 0, MT_MAX_LAYERS, &first, err)) return -1;
    for (int64_t l = 0; l < a->n_layer; l++) a->dense[l] = l < first;
    if (!json_given(kinds) || f->n_dense) return 0;
    if (json_type(kinds) != JSON_ARRAY || json_count(kinds) != a->n_layer)
        return json_error(kinds, err, "is not a list of %lld names", (long long)a->n_layer);
    for (int64_t l = 0; l < a->n_layer; l++) {
        const char *kind;
        if (json_str(json_at(kinds, l), &kind, &size, err)) return -1;
        a->dense[l] = !strcmp(kind, "dense");
        if (!a->dense[l] && strcmp(kind, "sparse"))
            return json_error(json_at(kinds, l), err, "\"%s\" is not supported (dense, sparse)", kind);
        if (counted && a->dense[l] != (l < first))
            return json_error(json_at(kinds, l), err,
                              "is %s, but first_k_dense_replace = %lld contradicts it: correct one, or remove "
                              "first_k_dense_replace",
                              kind, (long long)first);
    }
    return 0;
}

/* Finds the dense layers: Qwen's configurations list them (mlp_only_layers) or give experts only to every n-th layer
 * (decoder_sparse_step); in others the first ones are dense (first_k_dense_replace). */
static int read_dense(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    int64_t step = 1, layer;
    bool any = false;
    struct json only = json_find(root, "mlp_only_layers");
    if (read_first_dense(a, root, f, err)) return -1;
    for (int64_t l = 0; l < a->n_layer; l++) any |= a->dense[l];
    if (!f->may_be_dense) return any ? json_get_i64(root, "intermediate_size", 1, 1 << 24, &a->d_dense, err) : 0;
    if (json_opt_i64(root, "decoder_sparse_step", 1, MT_MAX_LAYERS, &step, err)) return -1;
    if (json_given(only) && json_type(only) != JSON_ARRAY) return json_error(only, err, "is not a list of layers");
    for (int64_t i = 0; i < json_count(only); i++) {
        if (json_i64(json_at(only, i), 0, a->n_layer - 1, &layer, err)) return -1;
        a->dense[layer] = true;
    }
    for (int64_t l = 0; l < a->n_layer; l++) any |= a->dense[l] |= (l + 1) % step != 0;
    return any ? json_get_i64(root, "intermediate_size", 1, 1 << 24, &a->d_dense, err) : 0;
}

static int read_router(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    bool renormalise = f->renormalises || !f->norm_topk;
    double scale = f->routed_scale > 0 ? f->routed_scale : 1;
    int64_t n_group = MT_MAX(1, f->n_group), top_group = MT_MAX(1, f->top_group);
    if (f->compressed)
        return refuse_routers(root, "sqrtsoftplus", err) || compressed_read_router(a, root, err) ? -1 : 0;
    if ((f->renormalises || f->norm_topk) && json_opt_flag(root, "norm_topk_prob", &renormalise, err)) return -1;
    a->router = (struct router){.kind = renormalise ? ROUTER_CHOSEN : ROUTER_PROBABILITY};
    if (!f->sigmoid) return f->dense_first ? refuse_softmax_variants(root, err) : 0;
    if (refuse_null_groups(root, err) || refuse_routers(root, "sigmoid", err) ||
        json_opt_f64(root, "routed_scaling_factor", &scale, err) ||
        json_opt_i64(root, "n_group", 1, 65536, &n_group, err) ||
        json_opt_i64(root, "topk_group", 1, 65536, &top_group, err))
        return -1;
    if (range_factor(root, "routed_scaling_factor", scale, err)) return -1;
    if (n_group > 1 && (a->n_exp % n_group || a->n_exp / n_group < 2))
        return json_error(root, err, "n_group %lld: %lld experts are not that many groups of two or more",
                          (long long)n_group, (long long)a->n_exp);
    if (top_group > n_group || top_group * (a->n_exp / n_group) < a->top_k)
        return json_error(root, err, "topk_group %lld of n_group %lld: too few or too many for %lld experts per token",
                          (long long)top_group, (long long)n_group, (long long)a->top_k);
    a->router = (struct router){.kind = renormalise ? ROUTER_SIGMOID_CHOSEN : ROUTER_SIGMOID,
                                .scale = (float)scale,
                                .n_group = (int)n_group,
                                .top_group = (int)top_group,
                                .floor = (float)f->floor};
    return 0;
}

/* Checks that the limit of a clamped activation is at least 0.001. It may be so large that no value reaches it. */
static int check_glu(struct json root, const struct family *f, double alpha, double limit, struct err *err)
{
    if (f->glu.kind == GLU_CLAMPED && range_factor(root, "swiglu_alpha", alpha, err)) return -1;
    if (f->glu.kind == GLU_SWIGLU || f->glu.kind == GLU_GELU || limit >= 1e-3) return 0;
    return json_error(root, err, "swiglu_limit %g is not at least 0.001", limit);
}

/* Reads the settings that change the mathematics, and rejects unsupported values. */
static int read_switches(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    double eps = f->eps, alpha = f->alpha, limit = f->limit, dropout = 0;
    bool bias = f->attn_bias, qk_norm = !f->qk_norm_named;
    const char *eps_key = f->eps_key ? f->eps_key : "rms_norm_eps";
    const char *act_key = f->act_key ? f->act_key : "hidden_act", *known = f->act ? f->act : "silu", *act = known;
    a->tied = f->tied;
    if (json_opt_f64(root, eps_key, &eps, err) || json_opt_f64(root, "swiglu_alpha", &alpha, err) ||
        json_opt_f64(root, "swiglu_limit", &limit, err) || json_opt_f64(root, "attention_dropout", &dropout, err) ||
        json_opt_bool(root, "attention_bias", &bias, err) ||
        (f->qk_norm_named && json_opt_bool(root, "use_qk_norm", &qk_norm, err)) ||
        (f->predicts && json_opt_i64(root, "num_nextn_predict_layers", 0, MT_MAX_LAYERS, &a->n_mtp, err)) ||
        json_opt_bool(root, "tie_word_embeddings", &a->tied, err) ||
        (f->tied_key && json_opt_bool(root, f->tied_key, &a->tied, err)) || json_opt_str(root, act_key, &act, err))
        return -1;
    if (strcmp(act, known)) return json_error(root, err, "%s \"%s\" is not supported (%s)", act_key, act, known);
    if (dropout != 0) return json_error(root, err, "attention_dropout %g is not supported (0)", dropout);
    if (range_eps(root, eps_key, eps, err) || check_glu(root, f, alpha, limit, err)) return -1;
    a->norm = (struct norm){.eps = (float)eps, .round_twice = f->round_twice};
    a->qk_norm = qk_norm ? f->qk_norm : QK_NORM_NONE;
    a->transposed_experts = f->transposed_experts;
    a->transposed_stacks = f->transposed_stacks;
    a->attn_gate = f->attn_gate;
    a->norm_plus_one = f->norm_plus_one;
    a->value_norm = a->embed_scaled = f->gemma;
    a->shared_gate = f->names.shared_gate;
    a->attn_bias = bias;
    a->out_bias = bias && !f->out_unbiased;
    a->expert_bias = f->expert_bias;
    a->router_bias = f->router_bias && !a->router_unbiased;
    a->sinks = f->sinks;
    for (int k = 0; k < ATTN_KINDS; k++) {
        struct attn_arch *h = &a->attn[k];
        h->scale =
            f->gemma ? 1 : (float)(a->rope[h->rope].softmax_gain / sqrt((double)h->head_dim)); /* q_norm has it */
    }
    if (a->mla.kv_lora && !a->mla.q_lora && bias)
        return json_error(root, err, "attention_bias without q_lora_rank is not supported");
    a->glu = f->glu;
    a->glu.alpha = (float)alpha;
    a->glu.limit = (float)limit;
    return 0;
}

static int read_kinds(struct arch *a, struct json root, const struct family *f, struct err *err)
{
    if (f->compressed) return compressed_read(a, root, err);
    if (f->gemma) return gemma_read(a, root, err);
    return read_mla(a, root, f, err) || (f->linear == &mixer_deltanet && keys_delta(a, root, f->delta_fused, err)) ||
                   (f->linear == &mixer_shortconv && keys_conv(a, root, err)) || read_rope(a, root, f, err) ||
                   read_windows(a, root, f, err)
               ? -1
               : 0;
}

/* Refuses a missing text_config if the class has other parts than text: the text part's sizes are in it. */
static int want_text_config(const struct family *f, struct json root, struct err *err)
{
    const struct json text = json_find(root, "text_config");
    const bool has = json_has(root, "text_config");
    if (!f->text_type || json_type(text) == JSON_OBJECT || (!has && json_has(root, "num_hidden_layers"))) return 0;
    return json_error(text, err, "is %s: the sizes of a %s model are in it", has ? "not an object" : "missing",
                      f->model_type);
}

int arch_parse(struct arch *a, struct json root, struct err *err)
{
    const struct family *f = NULL;
    *a = (struct arch){0};
    const struct json whole = root;
    const bool wrapped = is_wrapper(root);
    if (wrapped) root = json_find(root, "text_config");
    if (find_family(&f, root, err) || want_text_config(f, root, err)) return -1;
    a->nested = wrapped || (f->text_type && json_type(json_find(root, "text_config")) == JSON_OBJECT);
    if (a->nested && !wrapped) root = json_find(root, "text_config");
    if (fixed_quantization(whole, err) || fixed_quantization(root, err)) return -1;
    if (f->nemotron) {
        if (nemotron_read(a, &nemotron_kinds, root, err) || read_router(a, root, f, err)) return -1;
    } else if ((f->gemma && gemma_refuse(root, err)) || read_sizes(a, root, f, err) || read_kinds(a, root, f, err) ||
               read_shared(a, root, f, err) || read_dense(a, root, f, err) || refuse_variants(root, err) ||
               fixed_check(f->model_type, root, err) || (f->mtp_modules && keys_mtp_modules(a, root, err)) ||
               read_router(a, root, f, err) || read_switches(a, root, f, err)) {
        return -1;
    }
    if (a->nested) { /* transformers reads the key outside text_config */
        a->tied |= f->tied;
        if (json_opt_bool(whole, "tie_word_embeddings", &a->tied, err)) return -1;
    }
    for (int64_t l = 0; l < a->n_layer && !f->nemotron; l++) {
        if (!a->mixer[l]) a->mixer[l] = f->mixer;
        a->ffn[l] = a->dense[l] ? f->dense : a->d_shared ? &ffn_shared : f->ffn;
    }
    a->family = f->model_type;
    a->names = &f->names;
    return 0;
}

int arch_load(struct arch *a, const char *dir, struct err *err)
{
    *a = (struct arch){0};
    struct json_doc *doc = json_load_in(dir, "config.json", 16 << 20, err);
    if (!doc) return -1;
    int rc = arch_parse(a, json_root(doc), err);
    json_free(doc);
    return rc;
}
