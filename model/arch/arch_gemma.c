/* arch_gemma.c - the configuration of Gemma-4. Layers have full attention or a window; these kinds differ in heads,
 * RoPE, and in whether values are keys. transformers before 5.17 writes global_head_dim and num_global_key_value_heads,
 * later versions per_layer_config, sizes by layer. */
#include "model/arch/arch_gemma.h"

#include <stdlib.h>
#include <string.h>

#include "model/arch/arch_range.h"
#include "model/arch/arch_rope.h"

enum { FULL, SLIDING, KINDS };
static const char *const kind_names[KINDS] = {"full_attention", "sliding_attention"};

/* Heads of one layer. */
struct layer_heads {
    int64_t head_dim, n_kv;
};

int gemma_refuse(struct json root, struct err *err)
{
    bool experts = false;
    int64_t per_layer = 256, shared = 0;
    const char *both_ways = "vision";
    if (json_opt_bool(root, "enable_moe_block", &experts, err) ||
        json_opt_i64(root, "hidden_size_per_layer_input", 0, 1 << 24, &per_layer, err) ||
        json_opt_i64(root, "num_kv_shared_layers", 0, MT_MAX_LAYERS, &shared, err) ||
        json_opt_str(root, "use_bidirectional_attention", &both_ways, err))
        return -1;
    if (!experts)
        return json_error(root, err, "enable_moe_block is not true: a dense model, and dense models are not supported");
    if (per_layer)
        return json_error(root, err,
                          "hidden_size_per_layer_input %lld is not supported (0): embeddings of each layer (missing: "
                          "256)",
                          (long long)per_layer);
    if (shared) return json_error(root, err, "num_kv_shared_layers %lld is not supported (0)", (long long)shared);
    if (strcmp(both_ways, "vision")) /* "vision" concerns images alone */
        return json_error(root, err, "use_bidirectional_attention \"%s\" is not supported (null, \"vision\")",
                          both_ways);
    return 0;
}

/* Reads the kind of each layer. The last one is full, whatever layer_types says. */
static int read_kinds(struct arch *a, struct json root, struct err *err)
{
    const struct json types = json_find(root, "layer_types");
    const int64_t last = a->n_layer - 1;
    if (json_given(types) && (json_type(types) != JSON_ARRAY || json_count(types) != a->n_layer))
        return json_error(types, err, "is not a list of %lld names", (long long)a->n_layer);
    for (int64_t l = 0; l < a->n_layer; l++) {
        const struct json item = json_at(types, l);
        const char *name = kind_names[(l + 1) % 6 ? SLIDING : FULL];
        int64_t size;
        if (json_given(types) && json_str(item, &name, &size, err)) return -1;
        if (strcmp(name, kind_names[FULL]) && strcmp(name, kind_names[SLIDING]))
            return json_error(item, err, "\"%s\" is not supported (sliding_attention, full_attention)", name);
        a->attn_of[l] = strcmp(name, kind_names[FULL]) ? SLIDING : FULL;
    }
    if (a->attn_of[last] != FULL && json_given(types))
        log_warn("%s: the last layer has full attention, as in transformers, though layer_types says otherwise",
                 json_name(root));
    a->attn_of[last] = FULL;
    return 0;
}

/* The number of the layer that a key of per_layer_config names, "5" or "05"; -1: none. */
static int64_t layer_of_key(const char *key, int64_t n_layer)
{
    char *end;
    const int64_t l = *key >= '0' && *key <= '9' ? strtoll(key, &end, 10) : -1;
    return l >= 0 && !*end && l < n_layer ? l : -1;
}

static int read_override(struct layer_heads *h, struct json o, struct err *err)
{
    const char *key;
    struct json value;
    if (json_type(o) != JSON_OBJECT) return json_error(o, err, "is not an object");
    for (int64_t i = 0; json_member(o, i, &key, &value); i++)
        if (strcmp(key, "head_dim") && strcmp(key, "num_key_value_heads"))
            return json_error(value, err, "%s of a layer is not supported (head_dim, num_key_value_heads)", key);
    return json_opt_i64(o, "head_dim", 2, 4096, &h->head_dim, err) ||
                   json_opt_i64(o, "num_key_value_heads", 1, 4096, &h->n_kv, err)
               ? -1
               : 0;
}

/* Reads the heads of every layer from per_layer_config, else from the two global_* keys. */
static int read_heads(const struct arch *a, struct json root, bool values_are_keys, struct layer_heads *heads,
                      struct err *err)
{
    const struct json map = json_find(root, "per_layer_config");
    const struct attn_arch *base = &a->attn[0];
    struct layer_heads global = {512, base->n_kv};
    const char *key;
    struct json value;
    for (int64_t l = 0; l < a->n_layer; l++) heads[l] = (struct layer_heads){base->head_dim, base->n_kv};
    if (json_given(map) && json_type(map) != JSON_OBJECT) return json_error(map, err, "is not an object");
    for (int64_t i = 0; json_member(map, i, &key, &value); i++) {
        const int64_t l = layer_of_key(key, a->n_layer);
        if (l < 0) return json_error(value, err, "\"%s\" is no layer of %lld", key, (long long)a->n_layer);
        if (read_override(&heads[l], value, err)) return -1;
    }
    if (json_has(root, "per_layer_config")) return 0; /* null too: transformers then has no sizes by layer */
    if (json_opt_i64(root, "global_head_dim", 2, 4096, &global.head_dim, err) ||
        json_opt_i64(root, "num_global_key_value_heads", 1, 4096, &global.n_kv, err))
        return -1;
    if (!values_are_keys) global.n_kv = base->n_kv; /* as transformers */
    for (int64_t l = 0; l < a->n_layer; l++)
        if (a->attn_of[l] == FULL) heads[l] = global;
    return 0;
}

/* Sets the heads of each kind. Layers of one kind must have equal heads: transformers computes one RoPE for each
 * kind. */
static int set_heads(struct arch *a, struct json root, const struct layer_heads *heads, bool used[KINDS],
                     struct err *err)
{
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct attn_arch *h = &a->attn[a->attn_of[l]];
        const struct layer_heads *own = &heads[l];
        if (used[a->attn_of[l]] && (h->head_dim != own->head_dim || h->n_kv != own->n_kv))
            return json_error(root, err,
                              "per_layer_config: layer %lld has %lld key heads of %lld, but another layer of "
                              "%s has %lld of %lld: layers of a kind need equal heads",
                              (long long)l, (long long)own->n_kv, (long long)own->head_dim, kind_names[a->attn_of[l]],
                              (long long)h->n_kv, (long long)h->head_dim);
        used[a->attn_of[l]] = true;
        h->head_dim = own->head_dim;
        h->n_kv = own->n_kv;
        if (h->n_head % h->n_kv)
            return json_error(root, err, "num_attention_heads %lld is no multiple of the %lld key heads of layer %lld",
                              (long long)h->n_head, (long long)h->n_kv, (long long)l);
        if (h->head_dim % 2)
            return json_error(root, err, "the width of heads of layer %lld, %lld, is odd", (long long)l,
                              (long long)h->head_dim);
    }
    return 0;
}

/* ---- RoPE */

/* Reads proportional RoPE: all frequencies are those of the whole head, and only the first pairs rotate. */
static int read_proportional(struct rope_arch *r, struct json o, struct err *err)
{
    double share = 1;
    if (json_opt_f64(o, "partial_rotary_factor", &share, err) || json_opt_f64(o, "factor", &r->factor, err) ||
        range_factor(o, "factor", r->factor, err))
        return -1;
    if (!(share >= 0 && share <= 1))
        return json_error(o, err, "partial_rotary_factor %g is not at least 0 and at most 1", share);
    r->n_pair = (int64_t)(share * (double)r->width) / 2;
    if (!r->n_pair) r->width = 0;
    return 0;
}

/* Refuses keys that transformers ignores if rope_type is "default". */
static int refuse_ignored(struct json o, struct err *err)
{
    static const char *const keys[] = {"partial_rotary_factor", "factor"};
    for (int i = 0; i < MT_LEN(keys); i++) {
        double value = 1;
        if (json_opt_f64(o, keys[i], &value, err)) return -1;
        if (value != 1)
            return json_error(o, err, "%s %g needs rope_type \"proportional\": add it, or remove %s", keys[i], value,
                              keys[i]);
    }
    return 0;
}

static int read_rope(struct arch *a, struct json all, int kind, struct err *err)
{
    const bool given = json_given(all);
    const struct json o = json_find(all, kind_names[kind]);
    const char *type = given || kind == SLIDING ? "default" : "proportional";
    struct rope_arch *r = &a->rope[kind];
    *r = (struct rope_arch){.theta = kind == FULL ? 1e6 : 1e4,
                            .factor = 1,
                            .beta_fast = 32,
                            .beta_slow = 1,
                            .attention_factor = 1,
                            .softmax_gain = 1,
                            .truncate = true,
                            .width = a->attn[kind].head_dim};
    if (!given) {
        if (kind == FULL) r->n_pair = r->width / 8; /* a quarter of the head */
        if (kind == FULL && !r->n_pair) r->width = 0;
        return 0;
    }
    if (json_type(o) != JSON_OBJECT) return json_error(all, err, "has no settings of %s", kind_names[kind]);
    if (json_opt_str(o, "rope_type", &type, err) || json_get_f64(o, "rope_theta", &r->theta, err) ||
        range_theta(o, "rope_theta", r->theta, err))
        return -1;
    if (!strcmp(type, "proportional")) return read_proportional(r, o, err);
    if (!strcmp(type, "default")) return refuse_ignored(o, err);
    return json_error(o, err, "rope_type \"%s\" is not supported (default, proportional)", type);
}

static int read_ropes(struct arch *a, struct json root, const bool used[KINDS], struct err *err)
{
    const struct json all = json_find(root, "rope_parameters"), older = json_find(root, "rope_scaling");
    if (json_given(all) && json_type(all) != JSON_OBJECT) return json_error(all, err, "is not an object");
    if (json_given(older))
        return json_error(older, err, "is not supported: write the settings of each kind of layer in rope_parameters");
    for (int k = 0; k < KINDS; k++)
        if (used[k] && read_rope(a, all, k, err)) return -1;
    return 0;
}

int gemma_read(struct arch *a, struct json root, struct err *err)
{
    struct layer_heads heads[MT_MAX_LAYERS];
    bool values_are_keys = false, used[KINDS] = {false};
    int64_t window = 512;
    double cap = 0;
    if (json_opt_bool(root, "attention_k_eq_v", &values_are_keys, err) ||
        json_opt_i64(root, "sliding_window", 1, 1 << 24, &window, err) ||
        json_opt_f64(root, "final_logit_softcapping", &cap, err) ||
        json_get_i64(root, "intermediate_size", 1, 1 << 24, &a->d_dense, err) || read_kinds(a, root, err) ||
        read_heads(a, root, values_are_keys, heads, err))
        return -1;
    if (json_given(json_find(root, "final_logit_softcapping")) &&
        range_factor(root, "final_logit_softcapping", cap, err))
        return -1;
    a->logit_cap = (float)cap;
    a->attn[SLIDING] = a->attn[FULL];
    a->attn[FULL].values_are_keys = values_are_keys;
    a->attn[SLIDING].window = window;
    a->attn[SLIDING].rope = SLIDING;
    return set_heads(a, root, heads, used, err) || read_ropes(a, root, used, err) ? -1 : 0;
}
