/* gguf_names.c - see gguf_names.h. Source: llama.cpp, src/llama-arch.cpp. */
#include "train/gguf/gguf_names.h"

#include <string.h>

const char *gguf_names_arch(const struct arch *a)
{
    static const char *const names[][2] = {{"gpt_oss", "gpt-oss"},         {"qwen3_moe", "qwen3moe"},
                                           {"qwen3_vl_moe", "qwen3vlmoe"}, {"olmoe", "olmoe"},
                                           {"mixtral", "llama"},           {"glm4_moe", "glm4moe"},
                                           {"glm4_moe_lite", "deepseek2"}, {"deepseek_v3", "deepseek2"},
                                           {"qwen3_5_moe", "qwen35moe"},   {"qwen3_next", "qwen3next"},
                                           {"kimi_k2", "deepseek2"},       {"minimax_m2", "minimax-m2"},
                                           {"lfm2_moe", "lfm2moe"},        {"gemma4", "gemma4"}};
    for (int64_t i = 0; i < MT_LEN(names); i++)
        if (!strcmp(names[i][0], a->family)) return names[i][1];
    for (int64_t l = 0; !strcmp(a->family, "nemotron_h") && l < a->n_layer; l++)
        if (arch_is_routed(a, l)) return "nemotron_h_moe";
    return strcmp(a->family, "nemotron_h") ? NULL : "nemotron_h";
}

bool gguf_names_fused(const struct arch *a) { return !strcmp(a->family, "gemma4"); }

const char *gguf_names_matrix(const struct arch *a, enum lora_target t)
{
    static const char *const names[LORA_TARGETS] = {[LORA_Q] = "attn_q",
                                                    [LORA_K] = "attn_k",
                                                    [LORA_V] = "attn_v",
                                                    [LORA_O] = "attn_output",
                                                    [LORA_CONV_IN] = "shortconv.in_proj",
                                                    [LORA_CONV_OUT] = "shortconv.out_proj",
                                                    [LORA_IN_QKV] = "attn_qkv",
                                                    [LORA_IN_Z] = "attn_gate",
                                                    [LORA_IN_B] = "ssm_beta",
                                                    [LORA_IN_A] = "ssm_alpha",
                                                    [LORA_IN_QKVZ] = "attn_qkv", /* and attn_gate, for the rows of z */
                                                    [LORA_IN_BA] = "ssm_ba",
                                                    [LORA_IN] = "ssm_in",
                                                    [LORA_OUT] = "ssm_out",
                                                    [LORA_SHARED_GATE] = "ffn_gate_shexp",
                                                    [LORA_SHARED_UP] = "ffn_up_shexp",
                                                    [LORA_SHARED_DOWN] = "ffn_down_shexp",
                                                    [LORA_DENSE_GATE] = "ffn_gate",
                                                    [LORA_DENSE_UP] = "ffn_up",
                                                    [LORA_DENSE_DOWN] = "ffn_down",
                                                    [LORA_LATENT_DOWN] = "ffn_latent_down",
                                                    [LORA_LATENT_UP] = "ffn_latent_up"};
    return a->mla.kv_lora && t == LORA_Q ? NULL : names[t];
}

int64_t gguf_names_value_row(const struct delta_shape *s, int64_t d, int64_t i, int64_t n)
{
    const int64_t first = n - s->n_value * d;
    if (i < first) return i;
    const int64_t head = (i - first) / d, key = head % s->n_key, nth = head / s->n_key;
    return first + (key * (s->n_value / s->n_key) + nth) * d + (i - first) % d;
}
