/* presets_quant.c - see presets_quant.h. */
#include "train/synth/presets_quant.h"

void presets_names(struct json_out *o, const char *key, const char *const *names)
{
    json_out_open(o, key, '[');
    for (; *names; names++) json_out_str(o, NULL, *names);
    json_out_close(o, ']');
}

/* NVFP4 of ModelOpt, weights alone. */
static void put_modelopt(struct json_out *o)
{
    static const char *const kept[] = {
        "*self_attn*", "*linear_attn*", "*router*", "*mlp.gate", "*block_sparse_moe.gate", "lm_head", NULL};
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "quant_method", "modelopt");
    json_out_str(o, "quant_algo", "W4A16_NVFP4");
    json_out_i64(o, "group_size", 16);
    presets_names(o, "ignore", kept);
    json_out_close(o, '}');
}

static void put_numbers(struct json_out *o, const char *key, bool dynamic)
{
    json_out_open(o, key, '{');
    json_out_i64(o, "num_bits", 8);
    json_out_str(o, "type", "float");
    json_out_bool(o, "dynamic", dynamic);
    json_out_bool(o, "symmetric", true);
    json_out_str(o, "strategy", "tensor");
    json_out_close(o, '}');
}

static void put_compressed(struct json_out *o)
{
    static const char *const kept[] = {"re:.*self_attn.*", "re:.*linear_attn.*", "re:.*gate$", "lm_head", NULL};
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "quant_method", "compressed-tensors");
    json_out_str(o, "format", "float-quantized");
    json_out_str(o, "quantization_status", "compressed");
    json_out_open(o, "config_groups", '{');
    json_out_open(o, "group_0", '{');
    presets_names(o, "targets", (const char *const[]){"Linear", NULL});
    put_numbers(o, "weights", false);
    put_numbers(o, "input_activations", true);
    json_out_close(o, '}');
    json_out_close(o, '}');
    presets_names(o, "ignore", kept);
    json_out_close(o, '}');
}

/* Writes the FP8 format of DeepSeek-V4: blocks of 128 x 128 whose scales are powers of two. */
static void put_blocks(struct json_out *o)
{
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "activation_scheme", "dynamic");
    json_out_str(o, "fmt", "e4m3");
    json_out_str(o, "quant_method", "fp8");
    json_out_str(o, "scale_fmt", "ue8m0");
    json_out_open(o, "weight_block_size", '[');
    for (int i = 0; i < 2; i++) json_out_i64(o, NULL, 128);
    json_out_close(o, ']');
    json_out_close(o, '}');
}

static void put_mxfp4(struct json_out *o)
{
    static const char *const kept[] = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head", NULL};
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "quant_method", "mxfp4");
    presets_names(o, "modules_to_not_convert", kept);
    json_out_close(o, '}');
}

static void put_nf4(struct json_out *o)
{
    static const char *const kept[] = {"self_attn", "linear_attn", "router", "gate", "embed_tokens", "lm_head", NULL};
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "quant_method", "bitsandbytes");
    json_out_bool(o, "load_in_4bit", true);
    json_out_bool(o, "load_in_8bit", false);
    json_out_str(o, "bnb_4bit_quant_type", "nf4");
    json_out_bool(o, "bnb_4bit_use_double_quant", false);
    json_out_str(o, "bnb_4bit_compute_dtype", "bfloat16");
    json_out_str(o, "bnb_4bit_quant_storage", "uint8");
    presets_names(o, "llm_int8_skip_modules", kept);
    json_out_close(o, '}');
}

void presets_quantization(struct json_out *o, bool published, enum weight_format experts)
{
    static const struct {
        void (*put)(struct json_out *o);
        void (*published)(struct json_out *o); /* of DeepSeek-V4, if it differs from the others */
    } configs[] = {[WF_MXFP4] = {put_mxfp4, put_blocks},
                   [WF_NF4] = {put_nf4, NULL},
                   [WF_NVFP4] = {put_modelopt, NULL},
                   [WF_FP8] = {put_compressed, put_blocks}};
    if (published && configs[experts].published)
        configs[experts].published(o);
    else if (configs[experts].put)
        configs[experts].put(o);
}
