/* arch_fixed.c - keys of config.json that change a family's mathematics and have one supported value. Most are keys of
 * the publishers' own code: transformers' class ignores them and computes as if they had the supported value. */
#include "model/arch/arch_fixed.h"

#include <stdio.h>
#include <string.h>

/* NUMBERS: a list whose items all have the value. */
enum kind { NUMBER, NUMBERS, FLAG, TEXT };
static const struct row {
    const char *family, *key;
    enum kind kind;
    double number; /* of FLAG: 0 or 1 */
    const char *text;
} rows[] = {
    {"minimax_m2", "qk_norm_type", TEXT, 0, "per_layer"},
    {"minimax_m2", "use_qk_norm", FLAG, 1, NULL},
    {"minimax_m2", "use_routing_bias", FLAG, 1, NULL},
    {"minimax_m2", "attn_type_list", NUMBERS, 1, NULL},
    {"minimax_m2", "shared_intermediate_size", NUMBER, 0, NULL},
    {"minimax_m2", "layernorm_full_attention_beta", NUMBER, 1, NULL},
    {"minimax_m2", "layernorm_mlp_beta", NUMBER, 1, NULL},
    {"minimax_m2", "routed_scaling_factor", NUMBER, 1, NULL},
    {"minimax_m2", "n_group", NUMBER, 1, NULL},
};

static int check_number(struct json at, double want, struct err *err)
{
    double v;
    if (json_f64(at, &v, err)) return -1;
    return v == want ? 0 : json_error(at, err, "%g is not supported (%g)", v, want);
}

static int check_row(const struct row *r, struct json root, struct err *err)
{
    const struct json at = json_find(root, r->key);
    const char *text = r->text;
    bool flag = r->number > 0;
    if (!json_given(at)) return 0;
    switch (r->kind) {
    case NUMBER: return check_number(at, r->number, err);
    case NUMBERS:
        if (json_type(at) != JSON_ARRAY) return json_error(at, err, "is not a list");
        for (int64_t i = 0; i < json_count(at); i++)
            if (check_number(json_at(at, i), r->number, err)) return -1;
        return 0;
    case FLAG:
        if (json_opt_bool(root, r->key, &flag, err)) return -1;
        if (flag == (r->number > 0)) return 0;
        return json_error(at, err, "%s is not supported (%s)", flag ? "true" : "false", flag ? "false" : "true");
    case TEXT:
        if (json_opt_str(root, r->key, &text, err)) return -1;
        return strcmp(text, r->text) ? json_error(at, err, "\"%s\" is not supported (%s)", text, r->text) : 0;
    }
    return 0;
}

int fixed_check(const char *family, struct json root, struct err *err)
{
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        if (!strcmp(rows[i].family, family) && check_row(&rows[i], root, err)) return -1;
    return 0;
}

/* The loader reads tensors by their names and dtypes; quantization_config may also describe a checkpoint that was
 * decoded since. A method with other tensors is refused here, because the later error, a missing tensor, would explain
 * less. fbgemm_fp8 and the FP8 of quark have the tensors of compressed-tensors. Model-Optimizer also has modelopt_fp4
 * and other longer names. */
int fixed_quantization(struct json root, struct err *err)
{
    static const char *const known[] = {"bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "mxfp4", "quark",
                                        "modelopt"};
    const struct json q = json_find(root, "quantization_config");
    const char *method = known[0];
    char names[128] = "";
    if (!json_given(q)) return 0;
    if (json_type(q) != JSON_OBJECT)
        return json_error(q, err, "is not an object: remove the key if the tensors are not quantised");
    if (json_opt_str(q, "quant_method", &method, err)) return -1;
    for (int64_t i = 0; i < MT_LEN(known); i++) {
        if (!strcmp(method, known[i]) || !strncmp(method, "modelopt_", 9)) return 0;
        snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", i ? ", " : "", known[i]);
    }
    return json_error(q, err,
                      "quant_method \"%s\" is not supported (%s): use the checkpoint without quantisation, or remove "
                      "quantization_config if the tensors are not quantised",
                      method, names);
}
