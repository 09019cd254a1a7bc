/* peft_config.c - see peft_config.h. */
#include "train/adapter/peft_config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"

enum { NAME_SIZE = 160 };

static void write_string_list(struct json_out *o, const char *key, char (*items)[NAME_SIZE], int64_t n)
{
    json_out_open(o, key, '[');
    for (int64_t i = 0; i < n; i++) json_out_str(o, NULL, items[i]);
    json_out_close(o, ']');
}

static bool all_layers(const struct adapters *ad)
{
    bool all = true;
    for (int64_t n = 0; n < ad->n_layer; n++) all = all && ad->layer_on[n];
    return all;
}

/* Whether the target is in target_modules. All others are in target_parameters, because PEFT understands mlp.gate_proj
 * in target_modules as the routed experts in most families, and the names of shared experts in some. */
static bool is_module(const struct adapters *ad, enum lora_target t)
{
    return !lora_target_is_stack(t) && (!lora_target_is_dense(t) || ad->names->dense_by_module) &&
           !(lora_target_is_shared(t) && ad->names->shared_by_weight);
}

/* The name of a target for PEFT, which looks for it at the end of the names of modules or parameters. */
static void peft_name(const struct adapters *ad, enum lora_target t, char name[NAME_SIZE])
{
    char module[LORA_MODULE_TEXT];
    if (lora_target_is_stack(t)) {
        lora_stack_module(ad->names, t, module);
        snprintf(name, NAME_SIZE, "%s", module);
        return;
    }
    lora_target_module(ad->names, t, module);
    const bool shares_name = t == LORA_CONV_IN || t == LORA_CONV_OUT || (t == LORA_O && ad->names->attn_out);
    if (lora_target_is_shared(t) || lora_target_is_dense(t) || shares_name || ad->names->qualified)
        snprintf(name, NAME_SIZE, "%s%s", module, is_module(ad, t) ? "" : ".weight");
    else
        snprintf(name, NAME_SIZE, "%s", lora_target_name(t));
}

/* layers_to_transform restricts only target_modules. target_parameters match suffixes of full paths, so the experts of
 * selected layers are listed one by one. */
static void write_targets(struct json_out *o, const struct adapters *ad)
{
    char(*items)[NAME_SIZE] = mem_array(LORA_TARGETS * ad->n_layer, NAME_SIZE);
    int64_t n = 0;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t] && is_module(ad, t)) peft_name(ad, t, items[n++]);
    write_string_list(o, "target_modules", items, n);
    n = 0;
    for (int64_t layer = 0; layer < ad->n_layer; layer++)
        for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
            char name[NAME_SIZE];
            if (!ad->target[t] || is_module(ad, t)) continue;
            peft_name(ad, t, name);
            if (all_layers(ad) && !layer)
                snprintf(items[n++], NAME_SIZE, "%s", name);
            else if (!all_layers(ad) && adapters_find(ad, layer, t, false))
                snprintf(items[n++], NAME_SIZE, "layers.%lld.%.96s", (long long)layer, name);
        }
    if (n)
        write_string_list(o, "target_parameters", items, n);
    else
        json_out_str(o, "target_parameters", NULL);
    mem_free(items);
}

static void write_empty(struct json_out *o, const char *key)
{
    json_out_open(o, key, '{');
    json_out_close(o, '}');
}

static void write_alpha(struct json_out *o, const char *key, double alpha)
{
    if (alpha == floor(alpha) && alpha < 1e15)
        json_out_i64(o, key, (int64_t)alpha);
    else
        json_out_f64(o, key, alpha);
}

/* PEFT compares a key with the end of the name of a module or parameter. In a model with shared experts or dense layers
 * a key of routed experts must therefore be a longer part of the name. */
static void write_pattern(struct json_out *o, const struct adapters *ad, bool ranks)
{
    json_out_open(o, ranks ? "rank_pattern" : "alpha_pattern", '{');
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        char name[NAME_SIZE];
        const bool usual = ranks ? ad->rank[t] == ad->r : !(fabs(ad->alpha_of[t] - ad->alpha) > 0);
        if (!ad->target[t] || usual) continue;
        peft_name(ad, t, name);
        const char *key =
            lora_target_is_stack(t) && !ad->names->shared && !ad->names->dense_by_module ? lora_target_name(t) : name;
        if (ranks)
            json_out_i64(o, key, ad->rank[t]);
        else
            write_alpha(o, key, ad->alpha_of[t]);
    }
    json_out_close(o, '}');
}

bool peft_config_warns(const struct adapters *ad)
{
    bool warns = false;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        warns |= ad->target[t] && !is_module(ad, t) && (ad->rank[t] != ad->r || fabs(ad->alpha_of[t] - ad->alpha) > 0);
    return warns;
}

static void write_layers(struct json_out *o, const struct adapters *ad)
{
    bool modules = false;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) modules |= ad->target[t] && is_module(ad, t);
    if (all_layers(ad) || !modules) {
        json_out_str(o, "layers_to_transform", NULL);
        return;
    }
    json_out_open(o, "layers_to_transform", '[');
    for (int64_t n = 0; n < ad->n_layer; n++)
        if (ad->layer_on[n]) json_out_i64(o, NULL, n);
    json_out_close(o, ']');
}

/* Every field of PEFT 0.19.1's LoraConfig, sorted as PEFT itself writes them. */
static void config_text(struct json_out *o, const struct adapters *ad, const char *base_model)
{
    bool parameters = false;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) parameters |= ad->target[t] && !is_module(ad, t);
    json_out_open(o, NULL, '{');
    json_out_str(o, "alora_invocation_tokens", NULL);
    write_pattern(o, ad, false);
    json_out_str(o, "arrow_config", NULL);
    json_out_str(o, "auto_mapping", NULL);
    json_out_str(o, "base_model_name_or_path", base_model);
    json_out_str(o, "bias", "none");
    json_out_str(o, "corda_config", NULL);
    json_out_bool(o, "ensure_weight_tying", false);
    json_out_str(o, "eva_config", NULL);
    json_out_str(o, "exclude_modules", ad->nested ? ad->names->excluded : NULL);
    json_out_bool(o, "fan_in_fan_out", false);
    json_out_bool(o, "inference_mode", true);
    json_out_bool(o, "init_lora_weights", true);
    json_out_str(o, "layer_replication", NULL);
    json_out_str(o, "layers_pattern", NULL);
    write_layers(o, ad);
    write_empty(o, "loftq_config");
    write_alpha(o, "lora_alpha", ad->alpha);
    json_out_bool(o, "lora_bias", false);
    json_out_f64(o, "lora_dropout",
                 parameters ? 0.0 : ad->dropout); /* PEFT accepts only dropout 0 with target_parameters */
    json_out_str(o, "lora_ga_config", NULL);
    json_out_str(o, "megatron_config", NULL);
    json_out_str(o, "megatron_core", "megatron.core");
    json_out_str(o, "modules_to_save", NULL);
    json_out_str(o, "peft_type", "LORA");
    json_out_str(o, "peft_version", "0.19.1");
    json_out_i64(o, "qalora_group_size", 16);
    json_out_i64(o, "r", ad->r);
    write_pattern(o, ad, true);
    json_out_str(o, "revision", NULL);
    write_targets(o, ad);
    json_out_str(o, "task_type", "CAUSAL_LM");
    json_out_str(o, "trainable_token_indices", NULL);
    json_out_str(o, "use_bdlora", NULL);
    json_out_bool(o, "use_dora", ad->dora);
    json_out_bool(o, "use_qalora", false);
    json_out_bool(o, "use_rslora", ad->rslora);
    json_out_close(o, '}');
}

int peft_config_write(const struct adapters *ad, const char *dir, const char *base_model, struct err *err)
{
    struct json_out o = {.indent = true};
    config_text(&o, ad, base_model);
    const int rc = file_write_in(dir, PEFT_CONFIG_NAME, o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

/* ---- version, variants ---- */

int64_t peft_config_version(const char *s)
{
    long part[3] = {0};
    char *end = NULL;
    for (int i = 0; i < 3; i++) {
        if (*s < '0' || *s > '9') break;
        part[i] = MT_MIN(strtol(s, &end, 10), 999);
        s = *end == '.' ? end + 1 : "";
    }
    return end ? PEFT_VERSION(part[0], part[1], part[2]) : -1;
}

int peft_config_check(struct json root, struct err *err)
{
    static const char *const keys[] = {
        "alora_invocation_tokens", "arrow_config", "fan_in_fan_out",  "kasa_config",
        "layer_replication",       "lora_bias",    "modules_to_save", "monteclora_config",
        "trainable_token_indices"};
    const char *type = NULL, *bias = "none", *init = "gaussian";
    const char *key;
    char set[512] = "";
    struct json value;
    int at = 0;
    if (json_get_str(root, "peft_type", &type, err) || json_opt_str(root, "bias", &bias, err)) return -1;
    if (strcmp(type, "LORA")) return json_error(json_find(root, "peft_type"), err, "is %s; only LORA is read", type);
    if (strcmp(bias, "none")) return json_error(json_find(root, "bias"), err, "is %s; only none is read", bias);
    for (int64_t i = 0; i < MT_LEN(keys); i++)
        if (json_truthy(json_find(root, keys[i])))
            at += snprintf(set + at, sizeof(set) - (size_t)at, "%s`%s`", at ? ", " : "", keys[i]);
    for (int64_t i = 0; at < 256 && json_member(root, i, &key, &value); i++) /* also variants of a later PEFT */
        if (!strncmp(key, "use_", 4) && strcmp(key, "use_rslora") && strcmp(key, "use_dora") && json_truthy(value))
            at += snprintf(set + at, sizeof(set) - (size_t)at, "%s`%.64s`", at ? ", " : "", key);
    if (at) return json_error(root, err, "sets %s; only LoRA and DoRA are read", set);
    if (json_type(json_find(root, "init_lora_weights")) != JSON_STRING) return 0;
    if (json_get_str(root, "init_lora_weights", &init, err)) return -1;
    if (strcmp(init, "gaussian") && strcmp(init, "eva") && strcmp(init, "orthogonal"))
        return json_error(json_find(root, "init_lora_weights"), err,
                          "is %s, which changes the base model too; convert the adapter to plain LoRA in PEFT", init);
    return 0;
}
