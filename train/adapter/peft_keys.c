/* peft_keys.c - see peft_keys.h. */
#include "train/adapter/peft_keys.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The names of modules that families have. */
static const struct tensor_names namings[] = {
    {.shared = "mlp.shared_experts"},
    {.shared = "mlp.shared_expert"},
    {.shared = "mlp.shared_expert", /* LFM2 */
     .experts = "feed_forward.experts",
     .attn_out = "self_attn.out_proj",
     .dense = {"feed_forward.w1", "feed_forward.w3", "feed_forward.w2"}},
    {.shared = "mixer.shared_experts", .experts = "mixer.experts", .up = "mixer.experts.#.up_proj", .block = "mixer"},
    {.shared = "mlp.shared_experts", .experts = "experts"}}; /* Gemma-4, without shared experts */

bool peft_keys_linear(const char *key, enum lora_target t)
{
    char module[LORA_MODULE_TEXT], weight[LORA_MODULE_TEXT + 8];
    bool same = false;
    for (int i = 0; i < MT_LEN(namings) && !lora_target_is_stack(t); i++) {
        lora_target_module(&namings[i], t, module);
        snprintf(weight, sizeof(weight), "%s.weight", module);
        same = same || !strcmp(key, module) || !strcmp(key, weight);
    }
    return same;
}

bool peft_keys_stack(const char *key, enum lora_target t)
{
    char module[LORA_MODULE_TEXT];
    bool same = false;
    for (int i = 0; i < MT_LEN(namings) && lora_target_is_stack(t); i++) {
        lora_stack_module(&namings[i], t, module);
        same = same || !strcmp(key, module);
    }
    return same;
}

/* Whether s begins with the pattern, in which # stands for a number. */
static bool begins(const char *s, const char *pattern)
{
    for (; *pattern; pattern++) {
        if (*pattern != '#') {
            if (*s++ != *pattern) return false;
            continue;
        }
        const size_t digits = strspn(s, "0123456789");
        if (!digits) return false;
        s += digits;
    }
    return true;
}

bool peft_keys_nested(const char *key) { return !strncmp(key, PEFT_KEYS_NESTED, strlen(PEFT_KEYS_NESTED)); }

uint64_t peft_keys_parse(const char *key, int64_t *layer)
{
    static const struct {
        const char *part;
        uint64_t targets;
    } parts[] = {
        {".mlp.experts.base_layer.lora_", 1u << LORA_UP | 1u << LORA_DOWN},
        {".mlp.experts.lora_", PEFT_KEYS_FUSED},
        {".mixer.experts.base_layer.lora_", 1u << LORA_UP | 1u << LORA_DOWN},
        {".mixer.experts.lora_", PEFT_KEYS_FUSED},
        {".experts.base_layer.lora_", 1u << LORA_UP | 1u << LORA_DOWN},
        {".experts.lora_", PEFT_KEYS_FUSED},
        {".mixer.experts.#.up_proj.lora_", PEFT_KEYS_EACH | 1u << LORA_UP},
        {".mixer.experts.#.down_proj.lora_", PEFT_KEYS_EACH | 1u << LORA_DOWN},
        {".mlp.experts.gate_up_projs.", 1u << LORA_UP},
        {".mlp.experts.down_projs.", 1u << LORA_DOWN},
        {".mlp.experts.#.gate_proj.lora_", PEFT_KEYS_SPLIT | 1u << LORA_UP},
        {".mlp.experts.#.up_proj.lora_", PEFT_KEYS_SPLIT | 1u << LORA_UP},
        {".mlp.experts.#.down_proj.lora_", PEFT_KEYS_SPLIT | 1u << LORA_DOWN},
        {".block_sparse_moe.experts.#.w1.lora_", PEFT_KEYS_MIXTRAL | PEFT_KEYS_SPLIT | 1u << LORA_UP},
        {".block_sparse_moe.experts.#.w3.lora_", PEFT_KEYS_MIXTRAL | PEFT_KEYS_SPLIT | 1u << LORA_UP},
        {".block_sparse_moe.experts.#.w2.lora_", PEFT_KEYS_MIXTRAL | PEFT_KEYS_SPLIT | 1u << LORA_DOWN},
        {".feed_forward.experts.base_layer.lora_", 1u << LORA_UP | 1u << LORA_DOWN},
        {".feed_forward.experts.lora_", PEFT_KEYS_FUSED},
        {".feed_forward.experts.#.w1.lora_", PEFT_KEYS_MIXTRAL | PEFT_KEYS_SPLIT | 1u << LORA_UP},
        {".feed_forward.experts.#.w3.lora_", PEFT_KEYS_MIXTRAL | PEFT_KEYS_SPLIT | 1u << LORA_UP},
        {".feed_forward.experts.#.w2.lora_", PEFT_KEYS_MIXTRAL | PEFT_KEYS_SPLIT | 1u << LORA_DOWN},
    };
    const bool nested = peft_keys_nested(key);
    const size_t prefix = strlen(nested ? PEFT_KEYS_NESTED : PEFT_KEYS_FLAT);
    char *rest;
    if ((!nested && strncmp(key, PEFT_KEYS_FLAT, prefix)) || key[prefix] < '0' || key[prefix] > '9') return 0;
    *layer = strtoll(key + prefix, &rest, 10);
    const char *lora = strstr(rest, ".lora_");
    char module[LORA_MODULE_TEXT];
    if (lora && lora - rest > 1 && lora - rest < LORA_MODULE_TEXT) {
        snprintf(module, sizeof(module), "%.*s", (int)(lora - rest - 1), rest + 1);
        for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
            if (peft_keys_linear(module, t)) return 1u << t;
    }
    for (int64_t i = 0; i < MT_LEN(parts); i++)
        if (begins(rest, parts[i].part)) return parts[i].targets;
    return 0;
}
