/* arch_nemotron.c - the configuration of Nemotron-H, as published and as transformers 5 writes it. A layer has a mixer
 * or a network. Defaults are those of transformers' configuration class.
 *
 * Like transformers, moetrain takes time_step_min as the least step, and ignores time_step_limit, attention_bias,
 * norm_eps, n_shared_experts, expand and the keys of RoPE, which attention does not have. */
#include "model/arch/arch_nemotron.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/arch/arch_range.h"

enum kind { MAMBA, ATTENTION, EXPERTS, DENSE, KINDS, NO_KIND = KINDS };

/* Reads a key that has two names; if the file has both, they must be equal. */
static int opt_i64(struct json root, const char *name, const char *other, int64_t low, int64_t high, int64_t *out,
                   struct err *err)
{
    if (json_opt_i64(root, name, low, high, out, err)) return -1;
    int64_t again = *out;
    if (json_opt_i64(root, other, low, high, &again, err)) return -1;
    if (again != *out && json_given(json_find(root, name)))
        return json_error(root, err, "%s is %lld, but %s is %lld", name, (long long)*out, other, (long long)again);
    *out = again;
    return 0;
}

static int opt_f64(struct json root, const char *name, const char *other, double *out, struct err *err)
{
    if (json_opt_f64(root, name, out, err)) return -1;
    double again = *out;
    if (json_opt_f64(root, other, &again, err)) return -1;
    if ((again < *out || again > *out) && json_given(json_find(root, name)))
        return json_error(root, err, "%s is %g, but %s is %g", name, *out, other, again);
    *out = again;
    return 0;
}

static int opt_bool(struct json root, const char *name, const char *other, bool *out, struct err *err)
{
    if (json_opt_bool(root, name, out, err)) return -1;
    bool again = *out;
    if (json_opt_bool(root, other, &again, err)) return -1;
    if (again != *out && json_given(json_find(root, name)))
        return json_error(root, err, "%s and %s contradict each other", name, other);
    *out = again;
    return 0;
}

static void set_kind(struct arch *a, const struct nemotron_kinds *kinds, int64_t l, enum kind kind)
{
    a->mixer[l] = kind == MAMBA ? kinds->mamba : kind == ATTENTION ? kinds->attention : NULL;
    a->ffn[l] = kind == EXPERTS ? (a->d_latent ? kinds->latent : kinds->experts) : kind == DENSE ? kinds->dense : NULL;
    a->dense[l] = kind == DENSE;
}

/* The kind of a name in layers_block_type; names of version 4 and of version 5. */
static enum kind kind_named(const char *name)
{
    static const char *const names[][2] = {[MAMBA] = {"mamba", "linear_attention"},
                                           [ATTENTION] = {"attention", "full_attention"},
                                           [EXPERTS] = {"moe", "moe"},
                                           [DENSE] = {"mlp", "mlp"}};
    for (int k = 0; k < KINDS; k++)
        if (!strcmp(name, names[k][0]) || !strcmp(name, names[k][1])) return (enum kind)k;
    return NO_KIND;
}

static enum kind kind_of_letter(char c)
{
    static const char letters[] = "M*E-";
    const char *at = c ? strchr(letters, c) : NULL;
    return at ? (enum kind)(at - letters) : NO_KIND;
}

static int read_names(struct json list, enum kind *kind, int64_t *n, struct err *err)
{
    const char *name;
    int64_t size;
    if (json_type(list) != JSON_ARRAY || !json_count(list) || json_count(list) > MT_MAX_LAYERS)
        return json_error(list, err, "is not a list of 1 to %d names", MT_MAX_LAYERS);
    *n = json_count(list);
    for (int64_t l = 0; l < *n; l++) {
        if (json_str(json_at(list, l), &name, &size, err)) return -1;
        kind[l] = kind_named(name);
        if (kind[l] == NO_KIND)
            return json_error(json_at(list, l), err,
                              "\"%s\" is not supported (mamba, linear_attention, attention, full_attention, moe, mlp)",
                              name);
    }
    return 0;
}

static int read_pattern(struct json at, enum kind *kind, int64_t *n, struct err *err)
{
    const char *text;
    if (json_str(at, &text, n, err)) return -1;
    if (!*n || *n > MT_MAX_LAYERS)
        return json_error(at, err, "has %lld letters: 1 to %d are needed", (long long)*n, MT_MAX_LAYERS);
    for (int64_t l = 0; l < *n; l++) {
        kind[l] = kind_of_letter(text[l]);
        if (kind[l] == NO_KIND)
            return json_error(at, err, "letter %lld is '%c': M (Mamba), * (attention), E (experts) or - (dense)",
                              (long long)l + 1, text[l]);
    }
    return 0;
}

/* Reads the kinds of the layers from a key with three names, of which a file may have several. */
static int read_layers(struct arch *a, const struct nemotron_kinds *kinds, struct json root, struct err *err)
{
    static const char *const keys[] = {"layers_block_type", "layer_types", "hybrid_override_pattern"};
    enum kind kind[MT_MAX_LAYERS] = {MAMBA, EXPERTS, ATTENTION, DENSE}, other[MT_MAX_LAYERS];
    const char *from = NULL;
    int64_t n = 4;
    for (int k = 0; k < MT_LEN(keys); k++) {
        const struct json list = json_find(root, keys[k]);
        enum kind *to = from ? other : kind;
        int64_t here;
        if (!json_given(list)) continue;
        if (k == 2 ? read_pattern(list, to, &here, err) : read_names(list, to, &here, err)) return -1;
        if (from && (here != n || memcmp(kind, other, (size_t)n * sizeof(*kind))))
            return json_error(list, err, "has other layers than %s: correct one, or remove it", from);
        n = here;
        from = keys[k];
    }
    a->n_layer = n;
    if (json_opt_i64(root, "num_hidden_layers", 1, MT_MAX_LAYERS, &a->n_layer, err)) return -1;
    if (a->n_layer != n)
        return json_error(root, err, "num_hidden_layers %lld: %s has %lld layers: correct one, or remove it",
                          (long long)a->n_layer, from ? from : "without layers_block_type a model", (long long)n);
    for (int64_t l = 0; l < n; l++) set_kind(a, kinds, l, kind[l]);
    return 0;
}

static int read_mamba(struct arch *a, struct json root, struct err *err)
{
    struct mamba_arch *m = &a->mamba;
    double dt_max = INFINITY;
    int64_t chunk = 128;
    *m = (struct mamba_arch){
        .n_head = 128, .head_dim = 64, .n_group = 8, .state = 128, .n_tap = 4, .conv_bias = true, .dt_min = 0.001};
    if (json_opt_i64(root, "mamba_num_heads", 1, 65536, &m->n_head, err) ||
        json_opt_i64(root, "mamba_head_dim", 1, 4096, &m->head_dim, err) ||
        opt_i64(root, "n_groups", "mamba_n_groups", 1, 65536, &m->n_group, err) ||
        json_opt_i64(root, "ssm_state_size", 1, 4096, &m->state, err) ||
        opt_i64(root, "conv_kernel", "mamba_d_conv", 1, MT_MAX_TAPS, &m->n_tap, err) ||
        opt_i64(root, "chunk_size", "mamba_chunk_size", 1, 1 << 20, &chunk, err) || /* changes no result */
        opt_bool(root, "use_conv_bias", "mamba_conv_bias", &m->conv_bias, err) ||
        json_opt_bool(root, "use_bias", &m->bias, err) ||
        opt_f64(root, "time_step_min", "mamba_dt_min", &m->dt_min, err))
        return -1;
    if (m->n_head % m->n_group)
        return json_error(root, err, "mamba_num_heads %lld is no multiple of n_groups %lld", (long long)m->n_head,
                          (long long)m->n_group);
    if (!(m->dt_min >= 0 && m->dt_min < dt_max))
        return json_error(root, err, "time_step_min %g is not a number from 0 on", m->dt_min);
    return 0;
}

static int read_sizes(struct arch *a, struct json root, struct err *err)
{
    const int64_t big = 1 << 24;
    struct attn_arch *h = &a->attn[0];
    a->d_model = 4096, a->vocab = 131072, a->max_len = 4096;
    a->n_exp = 8, a->top_k = 2, a->d_ff = a->d_shared = 7688, a->d_dense = 21504;
    *h = (struct attn_arch){.n_head = 32, .n_kv = 8, .head_dim = 128};
    a->d_ff_key = "moe_intermediate_size";
    if (json_opt_i64(root, "hidden_size", 1, big, &a->d_model, err) ||
        json_opt_i64(root, "vocab_size", 1, big, &a->vocab, err) ||
        json_opt_i64(root, "max_position_embeddings", 1, big, &a->max_len, err) ||
        json_opt_i64(root, "num_attention_heads", 1, 4096, &h->n_head, err))
        return -1;
    if (json_type(json_find(root, "num_key_value_heads")) == JSON_NULL) h->n_kv = h->n_head;
    if (json_opt_i64(root, "num_key_value_heads", 1, 4096, &h->n_kv, err) ||
        json_opt_i64(root, "head_dim", 1, 4096, &h->head_dim, err) ||
        opt_i64(root, "n_routed_experts", "num_local_experts", 1, 65536, &a->n_exp, err) ||
        json_opt_i64(root, "num_experts_per_tok", 1, 65536, &a->top_k, err) ||
        json_opt_i64(root, a->d_ff_key, 1, big, &a->d_ff, err) ||
        json_opt_i64(root, "moe_shared_expert_intermediate_size", 1, big, &a->d_shared, err) ||
        json_opt_i64(root, "intermediate_size", 1, big, &a->d_dense, err) ||
        (json_given(json_find(root, "moe_latent_size")) &&
         json_get_i64(root, "moe_latent_size", 1, big, &a->d_latent, err)))
        return -1;
    if (h->n_head % h->n_kv)
        return json_error(root, err, "num_attention_heads %lld is no multiple of num_key_value_heads %lld",
                          (long long)h->n_head, (long long)h->n_kv);
    if (a->top_k > a->n_exp)
        return json_error(root, err, "%lld experts per token, but there are %lld experts", (long long)a->top_k,
                          (long long)a->n_exp);
    h->scale = (float)(1 / sqrt((double)h->head_dim));
    a->attn[1] = *h;
    return 0;
}

/* Refuses unsupported values of keys that change the mathematics. */
static int refuse_variants(struct json root, struct err *err)
{
    static const struct {
        const char *key, *only;
    } acts[] = {{"mlp_hidden_act", "relu2"}, {"mamba_hidden_act", "silu"}};
    const struct json window = json_find(root, "sliding_window");
    bool mlp_bias = false;
    double dropout = 0;
    for (int i = 0; i < MT_LEN(acts); i++) {
        const char *act = acts[i].only;
        if (json_opt_str(root, acts[i].key, &act, err)) return -1;
        if (strcmp(act, acts[i].only))
            return json_error(root, err, "%s \"%s\" is not supported (%s)", acts[i].key, act, acts[i].only);
    }
    if (json_opt_bool(root, "mlp_bias", &mlp_bias, err) || json_opt_f64(root, "attention_dropout", &dropout, err))
        return -1;
    if (mlp_bias) return json_error(root, err, "mlp_bias = true is not supported (false)");
    if (dropout != 0) return json_error(root, err, "attention_dropout %g is not supported (0)", dropout);
    if (json_given(window)) return json_error(window, err, "is not supported (null)");
    return 0;
}

int nemotron_read(struct arch *a, const struct nemotron_kinds *kinds, struct json root, struct err *err)
{
    double eps = 1e-5;
    if (read_sizes(a, root, err) || read_layers(a, kinds, root, err) || read_mamba(a, root, err) ||
        refuse_variants(root, err) || json_opt_f64(root, "layer_norm_epsilon", &eps, err) ||
        range_eps(root, "layer_norm_epsilon", eps, err) || json_opt_bool(root, "tie_word_embeddings", &a->tied, err))
        return -1;
    a->norm = (struct norm){.eps = (float)eps};
    a->router_bias = true;
    a->glu = (struct glu){.kind = GLU_RELU2};
    return 0;
}
