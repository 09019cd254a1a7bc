/* presets.c - a row per architecture with the values of its published config.json. The rows named tiny are not
 * published: they have every feature of their family at a size that a laptop can train. */
#include "train/synth/presets.h"

#include <stdio.h>
#include <string.h>

#include "train/synth/presets_quant.h"

static const struct preset_family gpt_oss = {
    .model_type = "gpt_oss",
    .class_name = "GptOssForCausalLM",
    .experts_key = "num_local_experts",
    .width_key = "intermediate_size",
    .eps = 1e-5,
    .aux_coef = 0.9,
    .vocab = 201088,
    .bos = "<|startoftext|>",
    .eos = "<|return|>",
    .pad = "<|endoftext|>",
    .tokens = {{"<|startoftext|>", 199998},
               {"<|endoftext|>", 199999},
               {"<|return|>", 200002},
               {"<|constrain|>", 200003},
               {"<|channel|>", 200005},
               {"<|start|>", 200006},
               {"<|end|>", 200007},
               {"<|message|>", 200008},
               {"<|call|>", 200012},
               {"<|endofprompt|>", 200018}},
    .head_dim_named = true,
    .experts = WF_MXFP4,
    .attn_bias = true,
};

static const struct preset_family qwen3_moe = {
    .model_type = "qwen3_moe",
    .class_name = "Qwen3MoeForCausalLM",
    .experts_key = "num_experts",
    .width_key = "moe_intermediate_size",
    .eps = 1e-6,
    .aux_coef = 0.001,
    .vocab = 151936,
    .bos = "<|endoftext|>",
    .eos = "<|im_end|>",
    .pad = "<|endoftext|>",
    .tokens = {{"<|endoftext|>", 151643}, {"<|im_start|>", 151644}, {"<|im_end|>", 151645}},
    .head_dim_named = true,
    .experts = WF_BF16,
};

static const struct preset_family olmoe = {
    .model_type = "olmoe",
    .class_name = "OlmoeForCausalLM",
    .experts_key = "num_experts",
    .width_key = "intermediate_size",
    .eps = 1e-5,
    .aux_coef = 0.01,
    .vocab = 50304,
    .eos = "<|endoftext|>",
    .pad = "<|padding|>",
    .tokens = {{"<|padding|>", 1}, {"<|endoftext|>", 50279}},
    .experts = WF_BF16,
};

static const struct preset_family mixtral = {
    .model_type = "mixtral",
    .class_name = "MixtralForCausalLM",
    .experts_key = "num_local_experts",
    .width_key = "intermediate_size",
    .eps = 1e-5,
    .aux_coef = 0.02,
    .vocab = 32000,
    .bos = "<s>",
    .eos = "</s>",
    .tokens = {{"<unk>", 0}, {"<s>", 1}, {"</s>", 2}},
    .experts = WF_BF16,
};

#define GLM4                                                                                                           \
    .model_type = "glm4_moe", .class_name = "Glm4MoeForCausalLM", .experts_key = "n_routed_experts",                   \
    .width_key = "moe_intermediate_size", .eps = 1e-5, .vocab = 151552, .eos = "<|endoftext|>",                        \
    .pad = "<|endoftext|>",                                                                                            \
    .tokens = {{"<|endoftext|>", 151329}, {"[MASK]", 151330},         {"[gMASK]", 151331},    {"[sMASK]", 151332},     \
               {"<sop>", 151333},         {"<eop>", 151334},          {"<|system|>", 151335}, {"<|user|>", 151336},    \
               {"<|assistant|>", 151337}, {"<|observation|>", 151338}},                                                \
    .head_dim_named = true, .experts = WF_BF16, .attn_bias = true

static const struct preset_family glm4_air = {GLM4, .d_dense = 10944, .n_dense = 1, .routed_scale = 1};
static const struct preset_family glm4 = {GLM4, .d_dense = 12288, .n_dense = 3, .routed_scale = 2.5, .qk_norm = true};
static const struct preset_family glm4_tiny = {GLM4, .d_dense = 384, .n_dense = 1, .routed_scale = 2.5,
                                               .qk_norm = true};

#define GLM4_LITE                                                                                                      \
    .model_type = "glm4_moe_lite", .class_name = "Glm4MoeLiteForCausalLM", .experts_key = "n_routed_experts",          \
    .width_key = "moe_intermediate_size", .eps = 1e-5, .vocab = 154880, .eos = "<|endoftext|>",                        \
    .pad = "<|endoftext|>",                                                                                            \
    .tokens = {{"<|endoftext|>", 154820}, {"[MASK]", 154821},         {"[gMASK]", 154822},    {"[sMASK]", 154823},     \
               {"<sop>", 154824},         {"<eop>", 154825},          {"<|system|>", 154826}, {"<|user|>", 154827},    \
               {"<|assistant|>", 154828}, {"<|observation|>", 154829}},                                                \
    .experts = WF_BF16

static const struct mla_arch glm47_mla = {768, 512, 192, 64, 256, true}, tiny_mla = {128, 64, 48, 16, 64, true};
static const struct preset_family glm4_lite = {GLM4_LITE, .d_dense = 10240, .n_dense = 1, .routed_scale = 1.8,
                                               .mla = &glm47_mla};
static const struct preset_family glm4_lite_tiny = {GLM4_LITE, .d_dense = 384, .n_dense = 1, .routed_scale = 1.8,
                                                    .mla = &tiny_mla};

#define DEEPSEEK                                                                                                       \
    .model_type = "deepseek_v3", .class_name = "DeepseekV3ForCausalLM", .experts_key = "n_routed_experts",             \
    .width_key = "moe_intermediate_size", .experts = WF_BF16
#define DEEPSEEK_TOKENS                                                                                                \
    .eps = 1e-6, .vocab = 129280, .bos = "<｜begin▁of▁sentence｜>", .eos = "<｜end▁of▁sentence｜>",                    \
    .pad = "<｜▁pad▁｜>",                                                                                              \
    .tokens = {{"<｜begin▁of▁sentence｜>", 0},                                                                         \
               {"<｜end▁of▁sentence｜>", 1},                                                                           \
               {"<｜▁pad▁｜>", 2},                                                                                     \
               {"<｜User｜>", 128803},                                                                                 \
               {"<｜Assistant｜>", 128804}}

static const struct mla_arch v3_mla = {1536, 512, 128, 64, 128, true}, moonlight_mla = {0, 512, 128, 64, 128, true};
static const struct mla_arch v3_tiny_mla = {128, 64, 32, 16, 32, true};
static const struct preset_family deepseek_v3 = {DEEPSEEK,        DEEPSEEK_TOKENS,     .d_dense = 18432,
                                                 .n_dense = 3,    .routed_scale = 2.5, .n_group = 8,
                                                 .topk_group = 4, .mla = &v3_mla,      .yarn = 40};
static const struct preset_family deepseek_tiny = {
    DEEPSEEK,      DEEPSEEK_TOKENS, .d_dense = 384,  .n_dense = 1,        .routed_scale = 2.5,
    .n_shared = 2, .n_group = 4,    .topk_group = 2, .mla = &v3_tiny_mla, .yarn = 40};

#define DEEPSEEK_V4                                                                                                    \
    .model_type = "deepseek_v4", .class_name = "DeepseekV4ForCausalLM", .experts_key = "n_routed_experts",             \
    .width_key = "moe_intermediate_size", .eps = 1e-6, .vocab = 129280, .bos = "<｜begin▁of▁sentence｜>",              \
    .eos = "<｜end▁of▁sentence｜>", .pad = "<｜▁pad▁｜>",                                                              \
    .tokens = {{"<｜begin▁of▁sentence｜>", 0}, {"<｜end▁of▁sentence｜>", 1}, {"<｜▁pad▁｜>", 2},                       \
               {"<｜User｜>", 128803},         {"<｜Assistant｜>", 128804},  {"<think>", 128821},                      \
               {"</think>", 128822},           {"｜DSML｜", 128825},         {"<｜latest_reminder｜>", 128828}},       \
    .head_dim_named = true, .experts = WF_MXFP4

static const struct preset_compress v4_flash = {1024, 8, 1024, 64, 128, 128, 64, 128, 512};
static const struct preset_compress v4_small = {128, 2, 32, 16, 8, 8, 4, 32, 4};
static const struct preset_family deepseek_v4 = {DEEPSEEK_V4, .compress = &v4_flash};
static const struct preset_family deepseek_v4_tiny = {DEEPSEEK_V4, .compress = &v4_small};

#define MOONSHOT_TOKENS                                                                                                \
    .vocab = 163840, .bos = "[BOS]", .eos = "[EOS]", .pad = "[PAD]",                                                   \
    .tokens = {{"[BOS]", 163584},                                                                                      \
               {"[EOS]", 163585},                                                                                      \
               {"<|im_end|>", 163586},                                                                                 \
               {"<|im_user|>", 163587},                                                                                \
               {"<|im_assistant|>", 163588},                                                                           \
               {"<|im_system|>", 163594},                                                                              \
               {"<|im_middle|>", 163601},                                                                              \
               {"[PAD]", 163839}}

static const struct preset_family moonlight = {DEEPSEEK,         MOONSHOT_TOKENS,      .eps = 1e-5,
                                               .d_dense = 11264, .n_dense = 1,         .routed_scale = 2.446,
                                               .n_shared = 2,    .mla = &moonlight_mla};
#define KIMI_K2                                                                                                        \
    .model_type = "kimi_k2", .class_name = "DeepseekV3ForCausalLM", .experts_key = "n_routed_experts",                 \
    .width_key = "moe_intermediate_size", .experts = WF_BF16, MOONSHOT_TOKENS, .eps = 1e-6, .n_dense = 1,              \
    .routed_scale = 2.827, .yarn = 64, .beta_fast = 1
static const struct preset_family kimi_k2 = {KIMI_K2, .d_dense = 18432, .mla = &v3_mla};
static const struct preset_family kimi_tiny = {KIMI_K2, .d_dense = 384, .mla = &v3_tiny_mla};

#define QWEN3_5                                                                                                        \
    .model_type = "qwen3_5_moe", .text_type = "qwen3_5_moe_text", .class_name = "Qwen3_5MoeForConditionalGeneration",  \
    .experts_key = "num_experts", .width_key = "moe_intermediate_size", .eps = 1e-6, .aux_coef = 0.001,                \
    .vocab = 248320, .eos = "<|im_end|>", .pad = "<|endoftext|>",                                                      \
    .tokens = {{"<|endoftext|>", 248044}, {"<|im_start|>", 248045}, {"<|im_end|>", 248046}}, .head_dim_named = true,   \
    .experts = WF_BF16, .stacked = true

static const struct delta_shape delta_35b = {16, 32, 128, 128}, delta_122b = {16, 64, 128, 128};
static const struct delta_shape delta_tiny = {2, 4, 32, 32};
static const struct preset_family qwen3_5_35b = {QWEN3_5, .delta = &delta_35b};
static const struct preset_family qwen3_5_122b = {QWEN3_5, .delta = &delta_122b};
static const struct preset_family qwen3_5_tiny = {QWEN3_5, .delta = &delta_tiny};

static void put_qwen3_vl(struct json_out *o, const struct preset *p, int64_t n_layer);
static const struct preset_family qwen3_vl = {
    .model_type = "qwen3_vl_moe",
    .text_type = "qwen3_vl_moe_text",
    .class_name = "Qwen3VLMoeForConditionalGeneration",
    .experts_key = "num_experts",
    .width_key = "moe_intermediate_size",
    .eps = 1e-6,
    .vocab = 151936,
    .bos = "<|endoftext|>",
    .eos = "<|im_end|>",
    .pad = "<|endoftext|>",
    .tokens = {{"<|endoftext|>", 151643}, {"<|im_start|>", 151644}, {"<|im_end|>", 151645}},
    .head_dim_named = true,
    .experts = WF_BF16,
    .stacked = true,
    .put = put_qwen3_vl,
};

#define QWEN3_NEXT                                                                                                     \
    .model_type = "qwen3_next", .class_name = "Qwen3NextForCausalLM", .experts_key = "num_experts",                    \
    .width_key = "moe_intermediate_size", .eps = 1e-6, .aux_coef = 0.001, .vocab = 151936, .bos = "<|endoftext|>",     \
    .eos = "<|im_end|>", .pad = "<|endoftext|>",                                                                       \
    .tokens = {{"<|endoftext|>", 151643}, {"<|im_start|>", 151644}, {"<|im_end|>", 151645}}, .head_dim_named = true,   \
    .experts = WF_BF16

static const struct preset_family qwen3_next = {QWEN3_NEXT, .delta = &delta_35b};
static const struct preset_family qwen3_next_tiny = {QWEN3_NEXT, .delta = &delta_tiny};

#define MISTRAL4                                                                                                       \
    .model_type = "mistral4", .class_name = "Mistral4ForCausalLM", .experts_key = "n_routed_experts",                  \
    .width_key = "moe_intermediate_size", .eps = 1e-6, .vocab = 131072, .bos = "<s>", .eos = "</s>", .pad = "<pad>",   \
    .tokens = {{"<unk>", 0},                                                                                           \
               {"<s>", 1},                                                                                             \
               {"</s>", 2},                                                                                            \
               {"[INST]", 3},                                                                                          \
               {"[/INST]", 4},                                                                                         \
               {"[AVAILABLE_TOOLS]", 5},                                                                               \
               {"<pad>", 11},                                                                                          \
               {"[SYSTEM_PROMPT]", 17},                                                                                \
               {"[/SYSTEM_PROMPT]", 18}},                                                                              \
    .experts = WF_BF16, .routed_scale = 1, .yarn = 128, .yarn_len = 8192, .query_beta = 0.1, .stacked = true

static const struct mla_arch mistral4_mla = {1024, 256, 64, 64, 128, true};
static const struct preset_family mistral4 = {MISTRAL4, .d_dense = 12288, .mla = &mistral4_mla};
static const struct preset_family mistral4_tiny = {MISTRAL4, .d_dense = 384, .mla = &v3_tiny_mla};

static void put_minimax(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    json_out_i64(o, "rotary_dim", p->head_dim / 2);
    json_out_bool(o, "use_qk_norm", true);
    json_out_str(o, "qk_norm_type", "per_layer");
    json_out_bool(o, "use_routing_bias", true);
    json_out_str(o, "scoring_func", "sigmoid");
    json_out_i64(o, "shared_intermediate_size", 0);
    json_out_real(o, "router_jitter_noise", 0);
    json_out_open(o, "attn_type_list", '[');
    for (int64_t l = 0; l < n_layer; l++) json_out_i64(o, NULL, 1);
    json_out_close(o, ']');
    json_out_i64(o, "num_mtp_modules", 0); /* 3 as published, but without their layers */
}

static const struct preset_family minimax_m2 = {
    .model_type = "minimax_m2",
    .class_name = "MiniMaxM2ForCausalLM",
    .experts_key = "num_local_experts",
    .width_key = "intermediate_size",
    .eps = 1e-6,
    .aux_coef = 0.001,
    .vocab = 200064,
    .bos = "]~!b[",
    .eos = "[e~[",
    .tokens = {{"]~b]", 200019}, {"[e~[", 200020}, {"]~!b[", 200034}},
    .head_dim_named = true,
    .experts = WF_BF16,
    .put = put_minimax,
};

static void put_nemotron(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    const struct preset_nemotron *n = p->family->nemotron;
    char pattern[MT_MAX_LAYERS + 1];
    snprintf(pattern, sizeof(pattern), "%.*s", (int)n_layer, n->pattern);
    json_out_str(o, "hybrid_override_pattern", pattern);
    json_out_f64(o, "layer_norm_epsilon", p->family->eps);
    json_out_f64(o, "norm_eps", p->family->eps);
    json_out_i64(o, "intermediate_size", n->d_dense);
    json_out_str(o, "mlp_hidden_act", "relu2");
    json_out_bool(o, "mlp_bias", false);
    json_out_bool(o, "use_bias", false);
    json_out_i64(o, "mamba_num_heads", n->n_head);
    json_out_i64(o, "mamba_head_dim", n->head_dim);
    json_out_i64(o, "n_groups", n->n_group);
    json_out_i64(o, "ssm_state_size", n->state);
    json_out_i64(o, "conv_kernel", 4);
    json_out_bool(o, "use_conv_bias", true);
    json_out_i64(o, "chunk_size", 128);
    json_out_str(o, "mamba_hidden_act", "silu");
    json_out_f64(o, "time_step_min", 0.001);
    json_out_f64(o, "time_step_max", 0.1);
    json_out_i64(o, "moe_shared_expert_intermediate_size", n->d_shared);
    if (n->d_latent) json_out_i64(o, "moe_latent_size", n->d_latent);
    json_out_i64(o, "n_shared_experts", 1);
    json_out_i64(o, "n_group", 1);
    json_out_i64(o, "topk_group", 1);
    json_out_bool(o, "norm_topk_prob", true);
    json_out_real(o, "routed_scaling_factor", n->routed_scale);
    json_out_i64(o, "num_nextn_predict_layers", 0); /* Lightning has 1, but that layer is not written */
}

#define NEMOTRON                                                                                                       \
    .model_type = "nemotron_h", .class_name = "NemotronHForCausalLM", .experts_key = "n_routed_experts",               \
    .width_key = "moe_intermediate_size", .eps = 1e-5, .vocab = 131072, .bos = "<s>", .eos = "<|im_end|>",             \
    .pad = "<unk>", .tokens = {{"<unk>", 0},       {"<s>", 1},      {"</s>", 2},     {"<|im_start|>", 10},             \
                               {"<|im_end|>", 11}, {"<think>", 12}, {"</think>", 13}},                                 \
    .head_dim_named = true, .experts = WF_BF16, .put = put_nemotron

static const struct preset_nemotron nano = {
    "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 64, 64, 8, 128, 3712, 1856, 2.5, 0};
static const struct preset_nemotron super = {
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    128,
    64,
    8,
    128,
    5376,
    5376,
    5,
    1024};
static const struct preset_nemotron super_tiny = {"ME*ME", 8, 32, 2, 32, 256, 384, 2.5, 128};
static const struct preset_nemotron nano_tiny = {"ME*M-EME*E", 8, 32, 2, 32, 256, 384, 2.5, 0};
static const struct preset_family nemotron_nano = {NEMOTRON, .nemotron = &nano};
static const struct preset_family nemotron_super = {NEMOTRON, .nemotron = &super};
static const struct preset_family nemotron_super_tiny = {NEMOTRON, .nemotron = &super_tiny};
static const struct preset_family nemotron_tiny = {NEMOTRON, .nemotron = &nano_tiny};

/* LFM2 has attention in layer 3 and every fourth layer after it, and in layer 22 (counted from 1). */
static void put_lfm2(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    json_out_i64(o, "intermediate_size", p->family->d_dense);
    json_out_i64(o, "num_dense_layers", p->family->n_dense);
    json_out_i64(o, "conv_L_cache", 3);
    json_out_bool(o, "conv_bias", false);
    json_out_bool(o, "use_expert_bias", true);
    json_out_bool(o, "norm_topk_prob", true);
    json_out_real(o, "routed_scaling_factor", 1);
    json_out_open(o, "layer_types", '[');
    for (int64_t l = 0; l < n_layer; l++)
        json_out_str(o, NULL, (l % 4 == 2 && l < 20) || l == 21 ? "full_attention" : "conv");
    json_out_close(o, ']');
}

#define LFM2                                                                                                           \
    .model_type = "lfm2_moe", .class_name = "Lfm2MoeForCausalLM", .experts_key = "num_experts",                        \
    .width_key = "moe_intermediate_size", .eps_key = "norm_eps", .tied = true, .eps = 1e-5, .vocab = 65536,            \
    .bos = "<|startoftext|>", .eos = "<|im_end|>", .pad = "<|pad|>",                                                   \
    .tokens = {{"<|pad|>", 0},           {"<|startoftext|>", 1},      {"<|endoftext|>", 2},                            \
               {"<|im_start|>", 6},      {"<|im_end|>", 7},           {"<|tool_list_start|>", 8},                      \
               {"<|tool_list_end|>", 9}, {"<|tool_call_start|>", 10}, {"<|tool_call_end|>", 11}},                      \
    .experts = WF_BF16, .put = put_lfm2

static const struct preset_family lfm2 = {LFM2, .d_dense = 7168, .n_dense = 2};
static const struct preset_family lfm2_tiny = {LFM2, .d_dense = 384, .n_dense = 1};

/* Where the row of layer l < n_layer has full attention. */
static bool gemma_is_full(const struct preset_gemma *g, int64_t l, int64_t n_layer)
{
    return (l + 1) % g->period == 0 || l == n_layer - 1;
}

static void put_gemma_rope(struct json_out *o, const char *kind, int64_t theta, bool proportional)
{
    json_out_open(o, kind, '{');
    if (proportional) json_out_real(o, "partial_rotary_factor", 0.25);
    json_out_real(o, "rope_theta", (double)theta);
    json_out_str(o, "rope_type", proportional ? "proportional" : "default");
    json_out_close(o, '}');
}

static void put_gemma(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    const struct preset_gemma *g = p->family->gemma;
    static const char full[] = "full_attention", sliding[] = "sliding_attention";
    json_out_bool(o, "enable_moe_block", true);
    json_out_i64(o, "intermediate_size", g->d_dense);
    json_out_i64(o, "global_head_dim", g->global_head_dim);
    json_out_i64(o, "num_global_key_value_heads", g->global_n_kv);
    json_out_bool(o, "attention_k_eq_v", true);
    json_out_i64(o, "sliding_window", g->window);
    json_out_real(o, "final_logit_softcapping", g->cap);
    json_out_i64(o, "hidden_size_per_layer_input", 0);
    json_out_i64(o, "num_kv_shared_layers", 0);
    json_out_str(o, "use_bidirectional_attention", "vision");
    json_out_open(o, "layer_types", '[');
    for (int64_t l = 0; l < n_layer; l++) json_out_str(o, NULL, gemma_is_full(g, l, n_layer) ? full : sliding);
    json_out_close(o, ']');
    json_out_open(o, "rope_parameters", '{');
    put_gemma_rope(o, full, p->theta, true);
    put_gemma_rope(o, sliding, 10000, false);
    json_out_close(o, '}');
}

#define GEMMA4                                                                                                         \
    .model_type = "gemma4", .text_type = "gemma4_text", .class_name = "Gemma4ForConditionalGeneration",                \
    .experts_key = "num_experts", .width_key = "moe_intermediate_size", .tied = true, .eps = 1e-6, .vocab = 262144,    \
    .bos = "<bos>", .eos = "<eos>", .pad = "<pad>",                                                                    \
    .tokens = {{"<pad>", 0}, {"<eos>", 1}, {"<bos>", 2}, {"<unk>", 3}, {"<|turn>", 105}, {"<turn|>", 106}},            \
    .head_dim_named = true, .experts = WF_BF16, .stacked = true, .put = put_gemma

static const struct preset_gemma gemma4_sizes = {512, 2, 6, 1024, 2112, 30}, gemma4_small = {128, 1, 2, 16, 192, 30};
static const struct preset_family gemma4 = {GEMMA4, .gemma = &gemma4_sizes};
static const struct preset_family gemma4_tiny = {GEMMA4, .gemma = &gemma4_small};

static const struct preset rows[] = {
    /* name, family, layers, hidden, heads, kv, head_dim, experts, top k, width, vocabulary, longest, theta */
    {"gpt-oss-20b", &gpt_oss, 24, 2880, 64, 8, 64, 32, 4, 2880, 201088, 131072, 150000},
    {"gpt-oss-120b", &gpt_oss, 36, 2880, 64, 8, 64, 128, 4, 2880, 201088, 131072, 150000},
    {"qwen3-30b-a3b", &qwen3_moe, 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, 1000000},
    {"qwen3-vl-30b-a3b", &qwen3_vl, 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 262144, 5000000},
    {"qwen3-vl-235b-a22b", &qwen3_vl, 94, 4096, 64, 4, 128, 128, 8, 1536, 151936, 262144, 5000000},
    {"olmoe-1b-7b", &olmoe, 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 4096, 10000},
    {"mixtral-8x7b", &mixtral, 32, 4096, 32, 8, 128, 8, 2, 14336, 32000, 32768, 1000000},
    {"minimax-m2", &minimax_m2, 62, 3072, 48, 8, 128, 256, 8, 1536, 200064, 196608, 5000000},
    {"lfm2-8b-a1b", &lfm2, 24, 2048, 32, 8, 64, 32, 4, 1792, 65536, 128000, 1000000},
    {"lfm2.5-8b-a1b", &lfm2, 24, 2048, 32, 8, 64, 32, 4, 1792, 128000, 128000, 1000000},
    {"glm-4.5-air", &glm4_air, 46, 4096, 96, 8, 128, 128, 8, 1408, 151552, 131072, 1000000},
    {"glm-4.7", &glm4, 92, 5120, 96, 8, 128, 160, 8, 1536, 151552, 202752, 1000000},
    {"glm-4.7-flash", &glm4_lite, 47, 2048, 20, 20, 256, 64, 4, 1536, 154880, 202752, 1000000},
    {"moonlight-16b-a3b", &moonlight, 27, 2048, 16, 16, 192, 64, 6, 1408, 163840, 8192, 50000},
    {"deepseek-v3", &deepseek_v3, 61, 7168, 128, 128, 192, 256, 8, 2048, 129280, 163840, 10000},
    {"deepseek-v4-flash", &deepseek_v4, 43, 4096, 64, 1, 512, 256, 6, 2048, 129280, 1048576, 10000},
    {"kimi-k2", &kimi_k2, 61, 7168, 64, 64, 192, 384, 8, 2048, 163840, 262144, 50000},
    {"mistral-small-4", &mistral4, 36, 4096, 32, 32, 128, 128, 4, 2048, 131072, 1048576, 10000},
    {"qwen3.5-35b-a3b", &qwen3_5_35b, 40, 2048, 16, 2, 256, 256, 8, 512, 248320, 262144, 10000000},
    {"qwen3.5-122b-a10b", &qwen3_5_122b, 48, 3072, 32, 2, 256, 256, 8, 1024, 248320, 262144, 10000000},
    {"qwen3-next-80b-a3b", &qwen3_next, 48, 2048, 16, 2, 256, 512, 10, 512, 151936, 262144, 10000000},
    {"nemotron-3-nano-30b-a3b", &nemotron_nano, 52, 2688, 32, 2, 128, 128, 6, 1856, 131072, 262144, 10000},
    {"nemotron-3-super-120b-a12b", &nemotron_super, 88, 4096, 32, 2, 128, 512, 22, 2688, 131072, 262144, 10000},
    {"gemma-4-26b-a4b", &gemma4, 30, 2816, 16, 8, 256, 128, 8, 704, 262144, 262144, 1000000},
    {"gpt-oss-tiny", &gpt_oss, 4, 256, 8, 2, 64, 16, 4, 256, 2048, 131072, 150000},
    {"qwen3-tiny", &qwen3_moe, 4, 256, 4, 2, 128, 16, 8, 128, 2048, 40960, 1000000},
    {"qwen3-vl-tiny", &qwen3_vl, 4, 256, 4, 2, 64, 16, 8, 192, 2048, 262144, 5000000},
    {"olmoe-tiny", &olmoe, 4, 256, 2, 2, 128, 16, 8, 128, 2048, 4096, 10000},
    {"mixtral-tiny", &mixtral, 4, 256, 2, 1, 128, 8, 2, 256, 2048, 32768, 1000000},
    {"gemma-tiny", &gemma4_tiny, 4, 256, 4, 2, 64, 16, 4, 128, 2048, 262144, 1000000},
    {"minimax-tiny", &minimax_m2, 4, 256, 4, 2, 64, 16, 4, 128, 2048, 196608, 5000000},
    {"lfm2-tiny", &lfm2_tiny, 4, 256, 4, 2, 64, 16, 4, 128, 2048, 128000, 1000000},
    {"glm-tiny", &glm4_tiny, 4, 256, 4, 2, 64, 16, 4, 128, 2048, 131072, 1000000},
    {"glm-flash-tiny", &glm4_lite_tiny, 4, 256, 4, 4, 64, 16, 4, 128, 2048, 202752, 1000000},
    {"deepseek-tiny", &deepseek_tiny, 4, 256, 4, 4, 48, 16, 4, 128, 2048, 163840, 10000},
    {"deepseek-v4-tiny", &deepseek_v4_tiny, 4, 256, 4, 1, 64, 16, 4, 128, 2048, 1048576, 10000},
    {"kimi-tiny", &kimi_tiny, 4, 256, 4, 4, 48, 16, 4, 128, 2048, 262144, 50000},
    {"mistral-small-tiny", &mistral4_tiny, 4, 256, 4, 4, 48, 16, 4, 128, 2048, 1048576, 10000},
    {"qwen3.5-tiny", &qwen3_5_tiny, 4, 256, 4, 2, 64, 16, 8, 128, 2048, 32768, 10000000},
    {"qwen3-next-tiny", &qwen3_next_tiny, 4, 256, 4, 2, 64, 16, 4, 128, 2048, 32768, 10000000},
    {"nemotron-super-tiny", &nemotron_super_tiny, 5, 256, 4, 2, 64, 16, 4, 128, 2048, 262144, 10000},
    {"nemotron-tiny", &nemotron_tiny, 10, 256, 4, 2, 64, 16, 4, 128, 2048, 262144, 10000},
};

const struct preset *preset_row(int64_t i) { return i < MT_LEN(rows) ? &rows[i] : NULL; }

const struct preset *preset_find(const char *name, struct err *err)
{
    const char *names[MT_LEN(rows)];
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        if (!strcmp(rows[i].name, name)) return &rows[i];
        names[i] = rows[i].name;
    }
    const char *near = str_nearest(name, names, MT_LEN(rows));
    if (near)
        err_set(err, "unknown architecture \"%.64s\": did you mean \"%s\"?", name, near);
    else
        err_set(err, "unknown architecture \"%.64s\"; `moetrain synth` lists them", name);
    return NULL;
}

int64_t preset_token(const struct preset *p, const char *text)
{
    const struct special_token *t = p->family->tokens;
    while (strcmp(t->text, text)) t++;
    return t->id < 256 ? t->id : t->id - p->family->vocab + p->vocab;
}

/* ---- config.json */

static void put_gpt_oss(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    json_out_i64(o, "experts_per_token", p->top_k);
    json_out_i64(o, "initial_context_length", 4096);
    json_out_i64(o, "sliding_window", 128);
    json_out_real(o, "swiglu_limit", 7);
    json_out_open(o, "layer_types", '[');
    for (int64_t l = 0; l < n_layer; l++) json_out_str(o, NULL, l % 2 ? "full_attention" : "sliding_attention");
    json_out_close(o, ']');
    json_out_open(o, "rope_scaling", '{');
    json_out_str(o, "rope_type", "yarn");
    json_out_real(o, "factor", 32);
    json_out_real(o, "beta_fast", 32);
    json_out_real(o, "beta_slow", 1);
    json_out_i64(o, "original_max_position_embeddings", 4096);
    json_out_bool(o, "truncate", false);
    json_out_close(o, '}');
}

static void put_latent(struct json_out *o, const struct preset *p)
{
    const struct preset_family *f = p->family;
    const struct mla_arch *m = f->mla;
    if (m->q_lora)
        json_out_i64(o, "q_lora_rank", m->q_lora);
    else
        json_out_str(o, "q_lora_rank", NULL);
    json_out_i64(o, "kv_lora_rank", m->kv_lora);
    json_out_i64(o, "qk_nope_head_dim", m->nope);
    json_out_i64(o, "qk_rope_head_dim", m->rope);
    json_out_i64(o, "v_head_dim", m->value);
    if (!(f->yarn > 0)) {
        json_out_str(o, "rope_scaling", NULL);
        return;
    }
    json_out_open(o, f->query_beta > 0 ? "rope_parameters" : "rope_scaling", '{');
    if (f->query_beta > 0) json_out_i64(o, "rope_theta", p->theta);
    json_out_str(o, "type", "yarn");
    if (f->query_beta > 0) json_out_str(o, "rope_type", "yarn");
    json_out_real(o, "factor", f->yarn);
    json_out_real(o, "beta_fast", f->beta_fast > 0 ? f->beta_fast : 32);
    json_out_real(o, "beta_slow", 1);
    json_out_real(o, "mscale", 1);
    json_out_real(o, "mscale_all_dim", 1);
    json_out_i64(o, "original_max_position_embeddings", f->yarn_len ? f->yarn_len : 4096);
    if (f->query_beta > 0) json_out_real(o, "llama_4_scaling_beta", f->query_beta);
    json_out_close(o, '}');
}

/* The families with DeepSeek's keys: GLM-4.5, DeepSeek-V3, Mistral Small 4. */
static void put_sigmoid(struct json_out *o, const struct preset *p)
{
    const struct preset_family *f = p->family;
    json_out_i64(o, "intermediate_size", f->d_dense);
    json_out_i64(o, "first_k_dense_replace", f->n_dense);
    json_out_i64(o, "n_shared_experts", MT_MAX(f->n_shared, 1));
    json_out_i64(o, "n_group", MT_MAX(f->n_group, 1));
    json_out_i64(o, "topk_group", MT_MAX(f->topk_group, 1));
    json_out_bool(o, "norm_topk_prob", true);
    json_out_real(o, "routed_scaling_factor", f->routed_scale);
    json_out_i64(o, "num_nextn_predict_layers", 0); /* 1 as published, but that layer is not written */
    if (f->mla) {
        put_latent(o, p);
        return;
    }
    json_out_bool(o, "use_qk_norm", f->qk_norm);
    json_out_real(o, "partial_rotary_factor", 0.5);
    json_out_str(o, "rope_scaling", NULL);
}

/* Sizes of gated DeltaNet and of the shared expert. */
static void put_delta(struct json_out *o, const struct preset *p)
{
    json_out_i64(o, "shared_expert_intermediate_size", p->d_ff);
    json_out_i64(o, "linear_num_key_heads", p->family->delta->n_key);
    json_out_i64(o, "linear_num_value_heads", p->family->delta->n_value);
    json_out_i64(o, "linear_key_head_dim", p->family->delta->key_dim);
    json_out_i64(o, "linear_value_head_dim", p->family->delta->value_dim);
    json_out_i64(o, "linear_conv_kernel_dim", 4);
}

/* Writes the keys of the published file. In compress_ratios transformers accepts only the ratios 4 and 128; other
 * ratios need named layer types. */
static void put_compressed_attention(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    const struct preset_compress *c = p->family->compress;
    static const char *const names[] = {"sliding_attention", "compressed_sparse_attention",
                                        "heavily_compressed_attention"};
    const int64_t ratio[] = {0, 4, c->heavy};
    const bool named = c->heavy != 128;
    json_out_i64(o, "q_lora_rank", c->q_lora);
    json_out_i64(o, "o_groups", c->n_group);
    json_out_i64(o, "o_lora_rank", c->o_lora);
    json_out_i64(o, "qk_rope_head_dim", c->rope);
    json_out_i64(o, "sliding_window", c->window);
    json_out_i64(o, "index_n_heads", c->n_index);
    json_out_i64(o, "index_head_dim", c->index_dim);
    json_out_i64(o, "index_topk", c->index_top);
    json_out_open(o, named ? "layer_types" : "compress_ratios", '[');
    for (int64_t l = 0; l < n_layer; l++) {
        const int64_t kind = l < 2 ? 0 : 1 + l % 2;
        if (named)
            json_out_str(o, NULL, names[kind]);
        else
            json_out_i64(o, NULL, ratio[kind]);
    }
    json_out_close(o, ']');
    if (named) {
        json_out_open(o, "compress_rates", '{');
        for (int i = 1; i < 3; i++) json_out_i64(o, names[i], ratio[i]);
        json_out_close(o, '}');
    }
    json_out_i64(o, "compress_rope_theta", 160000);
    json_out_open(o, "rope_scaling", '{');
    json_out_str(o, "type", "yarn");
    json_out_i64(o, "factor", 16);
    json_out_i64(o, "beta_fast", 32);
    json_out_i64(o, "beta_slow", 1);
    json_out_i64(o, "original_max_position_embeddings", 65536);
    json_out_close(o, '}');
    json_out_i64(o, "hc_mult", 4);
    json_out_i64(o, "hc_sinkhorn_iters", 20);
    json_out_f64(o, "hc_eps", 1e-6);
}

static void put_deepseek_v4(struct json_out *o, const struct preset *p, int64_t n_layer, enum weight_format experts)
{
    put_compressed_attention(o, p, n_layer);
    json_out_i64(o, "n_shared_experts", 1);
    json_out_i64(o, "num_hash_layers", 3);
    json_out_str(o, "scoring_func", "sqrtsoftplus");
    json_out_str(o, "topk_method", "noaux_tc");
    json_out_bool(o, "norm_topk_prob", true);
    json_out_real(o, "routed_scaling_factor", 1.5);
    json_out_real(o, "swiglu_limit", 10);
    json_out_i64(o, "num_nextn_predict_layers", 0); /* 1 as published, but that layer is not written */
    if (format_row(experts, false)->binary) json_out_str(o, "expert_dtype", "fp4");
}

static void put_qwen3_next(struct json_out *o, const struct preset *p)
{
    put_delta(o, p);
    json_out_i64(o, "full_attention_interval", 4);
    json_out_real(o, "partial_rotary_factor", 0.25);
    json_out_str(o, "rope_scaling", NULL);
    json_out_i64(o, "intermediate_size", 5 * p->d_model / 2); /* of dense layers; there are none */
    json_out_i64(o, "decoder_sparse_step", 1);
    json_out_open(o, "mlp_only_layers", '[');
    json_out_close(o, ']');
    json_out_bool(o, "norm_topk_prob", true);
}

/* The sections of n_pair rotated pairs, for positions in images. */
static void put_sections(struct json_out *o, int64_t n_pair)
{
    json_out_bool(o, "mrope_interleaved", true);
    json_out_open(o, "mrope_section", '[');
    for (int64_t i = 2; i >= 0; i--) json_out_i64(o, NULL, (n_pair + i) / 3);
    json_out_close(o, ']');
}

static void put_qwen3_vl(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    (void)n_layer;
    json_out_i64(o, "intermediate_size", 3 * p->d_model); /* of dense layers; there are none */
    json_out_i64(o, "decoder_sparse_step", 1);
    json_out_open(o, "mlp_only_layers", '[');
    json_out_close(o, ']');
    json_out_bool(o, "norm_topk_prob", true);
    json_out_i64(o, "rope_theta", p->theta);
    json_out_open(o, "rope_scaling", '{');
    json_out_str(o, "rope_type", "default");
    put_sections(o, p->head_dim / 2);
    json_out_close(o, '}');
}

static void put_qwen3_5(struct json_out *o, const struct preset *p, int64_t n_layer)
{
    put_delta(o, p);
    json_out_bool(o, "attn_output_gate", true);
    json_out_str(o, "mamba_ssm_dtype", "float32");
    json_out_open(o, "layer_types", '[');
    for (int64_t l = 0; l < n_layer; l++) json_out_str(o, NULL, (l + 1) % 4 ? "linear_attention" : "full_attention");
    json_out_close(o, ']');
    json_out_open(o, "rope_parameters", '{');
    json_out_str(o, "rope_type", "default");
    json_out_i64(o, "rope_theta", p->theta);
    json_out_real(o, "partial_rotary_factor", 0.25);
    put_sections(o, p->head_dim / 8); /* a quarter of a head is rotated */
    json_out_close(o, '}');
}

/* Keys that only one family has. */
static void put_family(struct json_out *o, const struct preset *p, int64_t n_layer, enum weight_format experts)
{
    const struct preset_family *f = p->family;
    if (f->put) {
        f->put(o, p, n_layer);
    } else if (f->compress) {
        put_deepseek_v4(o, p, n_layer, experts);
    } else if (f == &gpt_oss) {
        put_gpt_oss(o, p, n_layer);
    } else if (f->routed_scale > 0) {
        put_sigmoid(o, p);
    } else if (f->delta && f->text_type) {
        put_qwen3_5(o, p, n_layer);
    } else if (f->delta) {
        put_qwen3_next(o, p);
    } else if (f == &qwen3_moe) {
        json_out_i64(o, "intermediate_size", 3 * p->d_model); /* of dense layers; there are none */
        json_out_i64(o, "decoder_sparse_step", 1);
        json_out_open(o, "mlp_only_layers", '[');
        json_out_close(o, ']');
        json_out_bool(o, "norm_topk_prob", true);
        json_out_bool(o, "use_sliding_window", false);
        json_out_str(o, "sliding_window", NULL);
        json_out_i64(o, "max_window_layers", n_layer);
    } else if (f == &olmoe) {
        json_out_bool(o, "norm_topk_prob", false);
        json_out_str(o, "clip_qkv", NULL);
        json_out_str(o, "rope_scaling", NULL);
    } else {
        json_out_real(o, "router_jitter_noise", 0);
        json_out_str(o, "sliding_window", NULL);
    }
}

static void put_tokens(struct json_out *o, const struct preset *p)
{
    const struct preset_family *f = p->family;
    if (f->bos) json_out_i64(o, "bos_token_id", preset_token(p, f->bos));
    json_out_i64(o, "eos_token_id", preset_token(p, f->eos));
    if (f->pad) json_out_i64(o, "pad_token_id", preset_token(p, f->pad));
}

void preset_config(struct json_out *o, const struct preset *p, int64_t n_layer, enum weight_format experts)
{
    const struct preset_family *f = p->family;
    *o = (struct json_out){.indent = true};
    json_out_open(o, NULL, '{');
    presets_names(o, "architectures", (const char *const[]){f->class_name, NULL});
    json_out_str(o, "model_type", f->model_type);
    if (f->text_type) {
        json_out_open(o, "text_config", '{');
        json_out_str(o, "model_type", f->text_type);
    }
    json_out_str(o, "torch_dtype", "bfloat16");
    json_out_i64(o, "num_hidden_layers", n_layer);
    json_out_i64(o, "hidden_size", p->d_model);
    json_out_i64(o, "num_attention_heads", p->n_head);
    json_out_i64(o, "num_key_value_heads", p->n_kv);
    if (f->head_dim_named) json_out_i64(o, "head_dim", p->head_dim);
    json_out_i64(o, f->experts_key, p->n_exp);
    json_out_i64(o, f->gemma ? "top_k_experts" : "num_experts_per_tok", p->top_k);
    json_out_i64(o, f->width_key, p->d_ff);
    json_out_i64(o, "vocab_size", p->vocab);
    json_out_i64(o, "max_position_embeddings", p->max_len);
    if (!f->text_type) json_out_i64(o, "rope_theta", p->theta);
    json_out_real(o, f->eps_key ? f->eps_key : "rms_norm_eps", f->eps);
    json_out_bool(o, "attention_bias", f->attn_bias);
    json_out_real(o, "attention_dropout", 0);
    json_out_str(o, f->gemma ? "hidden_activation" : "hidden_act", f->gemma ? "gelu_pytorch_tanh" : "silu");
    json_out_real(o, "initializer_range", 0.02);
    json_out_bool(o, "tie_word_embeddings", f->tied);
    json_out_bool(o, "output_router_logits", false);
    if (f->aux_coef > 0) json_out_real(o, "router_aux_loss_coef", f->aux_coef);
    json_out_bool(o, "use_cache", true);
    put_family(o, p, n_layer, experts);
    put_tokens(o, p);
    if (f->text_type) json_out_close(o, '}');
    presets_quantization(o, f->compress, experts);
    json_out_close(o, '}');
}
