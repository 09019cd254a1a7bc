/* published.c - translates tensor names. A published name is layers.N. + module + leaf, or a name outside the layers;
 * transformers writes most of them with "model." before it (save_pretrained of 5.23), and attn.norm for attn.kv_norm.
 */
#include "model/stored/published.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

struct pair {
    const char *file, *name; /* # stands for a number */
};

/* Of several rows with one name, the first has the published form. */
static const struct pair ends[] = {
    {"embed.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.norm.weight"},
    {"head.weight", "lm_head.weight"},
    {"hc_head_fn", "model.hc_head.hc_fn"},
    {"hc_head_base", "model.hc_head.hc_base"},
    {"hc_head_scale", "model.hc_head.hc_scale"},
};
static const struct pair modules[] = {
    {"attn_norm", "input_layernorm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"hc_attn_fn", "attn_hc.fn"},
    {"hc_attn_base", "attn_hc.base"},
    {"hc_attn_scale", "attn_hc.scale"},
    {"hc_ffn_fn", "ffn_hc.fn"},
    {"hc_ffn_base", "ffn_hc.base"},
    {"hc_ffn_scale", "ffn_hc.scale"},
    {"attn.attn_sink", "self_attn.sinks"},
    {"attn.wq_a", "self_attn.q_a_proj"},
    {"attn.wq_b", "self_attn.q_b_proj"},
    {"attn.wkv", "self_attn.kv_proj"},
    {"attn.wo_a", "self_attn.o_a_proj"},
    {"attn.wo_b", "self_attn.o_b_proj"},
    {"attn.q_norm", "self_attn.q_a_norm"},
    {"attn.kv_norm", "self_attn.kv_norm"},
    {"attn.norm", "self_attn.kv_norm"},
    {"attn.compressor.wkv", "self_attn.compressor.kv_proj"},
    {"attn.compressor.wgate", "self_attn.compressor.gate_proj"},
    {"attn.compressor.ape", "self_attn.compressor.position_bias"},
    {"attn.compressor.norm", "self_attn.compressor.kv_norm"},
    {"attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"},
    {"attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"},
    {"attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"},
    {"attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"},
    {"attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"},
    {"attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm"},
    {"ffn.gate.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn.gate.tid2eid", "mlp.gate.tid2eid"},
    {"ffn.gate", "mlp.gate"},
    {"ffn.experts.#.w1", "mlp.experts.#.gate_proj"},
    {"ffn.experts.#.w3", "mlp.experts.#.up_proj"},
    {"ffn.experts.#.w2", "mlp.experts.#.down_proj"},
    {"ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"},
    {"ffn.shared_experts.w3", "mlp.shared_experts.up_proj"},
    {"ffn.shared_experts.w2", "mlp.shared_experts.down_proj"},
};
static const struct pair leaves[] = {{"", ""},
                                     {".weight", ".weight"},
                                     {".scale", ".weight_scale_inv"},
                                     {".weight_scale", ".weight_scale"}, /* NVFP4 of ModelOpt */
                                     {".weight_scale_2", ".weight_scale_2"},
                                     {".input_scale", ".input_scale"},
                                     {".lora_A.weight", ".lora_A.weight"},
                                     {".lora_B.weight", ".lora_B.weight"}};

/* The characters of `name` that `pattern` matches, or -1. number: where # begins in name. */
static int64_t match(const char *name, const char *pattern, const char **number)
{
    const char *at = name;
    for (; *pattern; pattern++) {
        if (*pattern != '#') {
            if (*at++ != *pattern) return -1;
            continue;
        }
        *number = at;
        if (!isdigit((unsigned char)*at)) return -1;
        while (isdigit((unsigned char)*at)) at++;
    }
    return at - name;
}

static bool put(char *to, size_t size, const char *before, int64_t n_before, const char *pattern, const char *number,
                const char *leaf)
{
    const size_t head = strcspn(pattern, "#");
    const int n = pattern[head] ? snprintf(to, size, "%.*s%.*s%.*s%s%s", (int)n_before, before, (int)head, pattern,
                                           (int)strspn(number, "0123456789"), number, pattern + head + 1, leaf)
                                : snprintf(to, size, "%.*s%s%s", (int)n_before, before, pattern, leaf);
    return n > 0 && (size_t)n < size;
}

static const char *side(const struct pair *p, bool file) { return file ? p->file : p->name; }

/* Translates the part of a name after "layers.N.", which follows `before`. */
static bool translate(char *to, size_t size, const char *before, int64_t n_before, const char *rest, bool from_file)
{
    for (int i = 0; i < MT_LEN(modules); i++) {
        const char *number = "";
        const int64_t n = match(rest, side(&modules[i], from_file), &number);
        for (int k = 0; n > 0 && k < MT_LEN(leaves); k++)
            if (!strcmp(rest + n, side(&leaves[k], from_file)))
                return put(to, size, before, n_before, side(&modules[i], !from_file), number,
                           side(&leaves[k], !from_file));
    }
    return false;
}

/* "layers.N." at the start of a name: its length, or 0. */
static int64_t layer_part(const char *name)
{
    const char *number;
    const int64_t n = match(name, "layers.#.", &number);
    return n > 0 ? n : 0;
}

static bool from_file(char *to, size_t size, const char *name)
{
    const char *bare = strncmp(name, "model.", 6) ? name : name + 6;
    const int64_t n = layer_part(bare);
    char before[64];
    if (n) {
        const int n_before = snprintf(before, sizeof(before), "model.%.*s", (int)n, bare);
        return n_before < (int)sizeof(before) && translate(to, size, before, (int64_t)strlen(before), bare + n, true);
    }
    for (int i = 0; i < MT_LEN(ends) && bare == name; i++)
        if (!strcmp(name, ends[i].file)) return put(to, size, "", 0, ends[i].name, "", "");
    return false;
}

int published_rename(struct safetensors *st, const struct arch *a, struct err *err)
{
    return a->names->published ? safetensors_rename(st, from_file, err) : 0;
}

bool published_name(char *to, size_t size, const char *name)
{
    for (int i = 0; i < MT_LEN(ends); i++)
        if (!strcmp(name, ends[i].name)) return put(to, size, "", 0, ends[i].file, "", "");
    if (strncmp(name, "model.", 6)) return false;
    const int64_t n = layer_part(name + 6);
    return n && translate(to, size, name + 6, n, name + 6 + n, false);
}

/* Translates what follows PEFT's prefix. */
static bool in_adapter(char *to, size_t size, const char *name, safetensors_rename_fn *rename)
{
    static const char prefix[] = "base_model.model.";
    const size_t n = sizeof(prefix) - 1;
    if (strncmp(name, prefix, n) || size <= n || !rename(to + n, size - n, name + n)) return false;
    memcpy(to, prefix, n);
    return true;
}

static bool from_adapter(char *to, size_t size, const char *name) { return in_adapter(to, size, name, from_file); }

int published_rename_adapter(struct safetensors *st, struct err *err)
{
    return safetensors_rename(st, from_adapter, err);
}

bool published_adapter_name(char *to, size_t size, const char *name)
{
    return in_adapter(to, size, name, published_name);
}
