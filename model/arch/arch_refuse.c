/* arch_refuse.c - see arch_refuse.h. */
#include "model/arch/arch_refuse.h"

#include <string.h>

int refuse_variants(struct json root, struct err *err)
{
    bool slides = false;
    double jitter = 0;
    const struct json clip = json_find(root, "clip_qkv");
    if (json_opt_bool(root, "use_sliding_window", &slides, err) ||
        json_opt_f64(root, "router_jitter_noise", &jitter, err))
        return -1;
    if (slides) return json_error(root, err, "use_sliding_window = true is not supported");
    if (jitter != 0) return json_error(root, err, "router_jitter_noise %g is not supported (0)", jitter);
    if (json_given(clip)) return json_error(clip, err, "is not supported (null)");
    return 0;
}

/* Checks keys with one supported value in DeepSeek's configurations and their followers'. transformers ignores most of
 * them. */
int refuse_routers(struct json root, const char *supported, struct err *err)
{
    const char *score = supported, *method = "noaux_tc";
    int64_t every = 1;
    if (json_opt_str(root, "scoring_func", &score, err) || json_opt_str(root, "topk_method", &method, err) ||
        json_opt_i64(root, "moe_layer_freq", 1, MT_MAX_LAYERS, &every, err))
        return -1;
    if (strcmp(score, supported))
        return json_error(root, err, "scoring_func \"%s\" is not supported (%s)", score, supported);
    if (strcmp(method, "noaux_tc"))
        return json_error(root, err, "topk_method \"%s\" is not supported (noaux_tc)", method);
    if (every != 1) return json_error(root, err, "moe_layer_freq %lld is not supported (1)", (long long)every);
    return 0;
}

/* Checks keys of DeepSeek's routers that have one supported value beside a softmax router. */
int refuse_softmax_variants(struct json root, struct err *err)
{
    double scale = 1;
    int64_t n_group = 1;
    if (json_opt_f64(root, "routed_scaling_factor", &scale, err) ||
        json_opt_i64(root, "n_group", 1, 65536, &n_group, err))
        return -1;
    if (scale != 1)
        return json_error(root, err, "routed_scaling_factor %g is not supported with a softmax router (1)", scale);
    if (n_group != 1)
        return json_error(root, err, "n_group %lld is not supported with a softmax router (1)", (long long)n_group);
    return 0;
}

/* Refuses null in keys where transformers fails on it: null means neither the default nor one group. */
int refuse_null_groups(struct json root, struct err *err)
{
    static const char *const keys[] = {"n_group", "topk_group"};
    for (int i = 0; i < MT_LEN(keys); i++) {
        const struct json v = json_find(root, keys[i]);
        if (json_type(v) == JSON_NULL) return json_error(v, err, "is null: write 1 for a router without groups");
    }
    return 0;
}
