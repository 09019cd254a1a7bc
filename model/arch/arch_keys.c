/* arch_keys.c - see arch_keys.h. */
#include "model/arch/arch_keys.h"

/* The defaults are those of transformers' configuration class. */
int keys_delta(struct arch *a, struct json root, bool fused, struct err *err)
{
    struct delta_shape *s = &a->delta.shape;
    bool gated = true;
    *s = (struct delta_shape){.n_key = 16, .n_value = 32, .key_dim = 128, .value_dim = 128};
    a->delta.n_tap = 4;
    a->delta.fused = fused;
    if (json_opt_i64(root, "linear_num_key_heads", 1, 4096, &s->n_key, err) ||
        json_opt_i64(root, "linear_num_value_heads", 1, 4096, &s->n_value, err) ||
        json_opt_i64(root, "linear_key_head_dim", 1, 4096, &s->key_dim, err) ||
        json_opt_i64(root, "linear_value_head_dim", 1, 4096, &s->value_dim, err) ||
        json_opt_i64(root, "linear_conv_kernel_dim", 1, MT_MAX_TAPS, &a->delta.n_tap, err) ||
        json_opt_bool(root, "attn_output_gate", &gated, err))
        return -1;
    if (s->n_value % s->n_key)
        return json_error(root, err, "linear_num_value_heads %lld is no multiple of linear_num_key_heads %lld",
                          (long long)s->n_value, (long long)s->n_key);
    if (!gated) return json_error(root, err, "attn_output_gate = false is not supported (true)");
    return 0;
}

int keys_rotary_dim(struct rope_arch *r, struct json root, struct json scaling, int64_t head_dim, struct err *err)
{
    static const char key[] = "rotary_dim", factor[] = "partial_rotary_factor";
    const bool both = json_given(json_find(root, factor)) || json_given(json_find(scaling, factor));
    int64_t width = r->width;
    if (json_opt_i64(root, key, 2, head_dim, &width, err)) return -1;
    if (both && width != r->width)
        return json_error(json_find(root, key), err, "is %lld, but partial_rotary_factor rotates %lld of %lld channels",
                          (long long)width, (long long)r->width, (long long)head_dim);
    r->width = width;
    return 0;
}

int keys_mtp_modules(struct arch *a, struct json root, struct err *err)
{
    int64_t n = 0, each = 1;
    if (json_opt_i64(root, "num_mtp_modules", 0, MT_MAX_LAYERS, &n, err) ||
        json_opt_i64(root, "mtp_transformer_layers", 0, MT_MAX_LAYERS, &each, err))
        return -1;
    a->n_mtp = n * each;
    return 0;
}

int keys_conv(struct arch *a, struct json root, struct err *err)
{
    bool biased = true;
    a->conv.n_tap = 3;
    if (json_opt_i64(root, "conv_L_cache", 1, MT_MAX_SHORT_TAPS, &a->conv.n_tap, err) ||
        json_opt_bool(root, "conv_bias", &a->conv.bias, err) || json_opt_bool(root, "use_expert_bias", &biased, err))
        return -1;
    a->router_unbiased = !biased;
    return 0;
}
