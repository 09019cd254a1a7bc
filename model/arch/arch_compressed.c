/* arch_compressed.c - the configuration of DeepSeek-V4: compressed attention, hyper-connections, routing by token id.
 * transformers writes layer_types, compress_rates, mlp_layer_types and rope_parameters; the published file has
 * compress_ratios, num_hash_layers, compress_rope_theta and rope_scaling. A file may have both if they agree. */
#include "model/arch/arch_compressed.h"

#include <string.h>

#include "model/arch/arch_range.h"
#include "model/arch/arch_rope.h"

static const char sparse_name[] = "compressed_sparse_attention", heavy_name[] = "heavily_compressed_attention";

/* Kinds of attention, whose RoPE differs. */
enum { WINDOW_ALONE, WITH_ENTRIES };

static int read_attention(struct arch *a, struct json root, struct err *err)
{
    struct compress_arch *c = &a->compress;
    const int64_t big = 1 << 20;
    bool bias = false, mlp_bias = false;
    *c = (struct compress_arch){.q_lora = 1024, .n_group = 8, .o_lora = 1024, .n_index = 64, .index_dim = 128};
    c->index_top = 512;
    if (json_opt_i64(root, "q_lora_rank", 1, big, &c->q_lora, err) ||
        json_opt_i64(root, "o_groups", 1, 4096, &c->n_group, err) ||
        json_opt_i64(root, "o_lora_rank", 1, big, &c->o_lora, err) ||
        json_opt_i64(root, "index_n_heads", 1, 4096, &c->n_index, err) ||
        json_opt_i64(root, "index_head_dim", 2, 4096, &c->index_dim, err) ||
        json_opt_i64(root, "index_topk", 1, big, &c->index_top, err) ||
        json_opt_bool(root, "attention_bias", &bias, err) || json_opt_bool(root, "mlp_bias", &mlp_bias, err))
        return -1;
    if (bias || mlp_bias)
        return json_error(root, err, "%s = true is not supported (false)", bias ? "attention_bias" : "mlp_bias");
    if (a->attn[0].n_kv != 1)
        return json_error(root, err, "num_key_value_heads %lld is not supported: all heads share one key (1)",
                          (long long)a->attn[0].n_kv);
    if (a->attn[0].n_head % c->n_group)
        return json_error(root, err, "num_attention_heads %lld is no multiple of o_groups %lld",
                          (long long)a->attn[0].n_head, (long long)c->n_group);
    return 0;
}

/* ---- kinds of layers */

/* Reads how many tokens an entry of a kind sums up: `name` in compress_rates, or `older` of root, which must be
 * equal. */
static int read_ratio(int64_t *ratio, struct json root, const char *name, const char *older, struct err *err)
{
    const struct json rates = json_find(root, "compress_rates");
    if (json_opt_i64(rates, name, 1, 1 << 20, ratio, err)) return -1;
    const int64_t rate = *ratio;
    if (json_opt_i64(root, older, 1, 1 << 20, ratio, err)) return -1;
    if (!json_given(json_find(rates, name)) || *ratio == rate) return 0;
    return json_error(json_find(root, older), err, "is %lld, but compress_rates.%s is %lld: correct one, or remove %s",
                      (long long)*ratio, name, (long long)rate, older);
}

/* read_ratio for both kinds. In compress_ratios, 4 means the sparse kind and every other value the heavy one. */
static int read_ratios(struct arch *a, struct json root, struct err *err)
{
    const struct json rates = json_find(root, "compress_rates"), list = json_find(root, "compress_ratios");
    int64_t *sparse = &a->compress.ratio[COMPRESS_SPARSE], *heavy = &a->compress.ratio[COMPRESS_HEAVY];
    if (json_given(rates) && json_type(rates) != JSON_OBJECT) return json_error(rates, err, "is not an object");
    *sparse = 4;
    *heavy = 128;
    for (int64_t l = MT_MIN(json_count(list), a->n_layer) - 1; l >= 0; l--) {
        int64_t ratio;
        if (json_i64(json_at(list, l), 0, 1 << 20, &ratio, err)) return -1;
        if (ratio != 0 && ratio != 4) *heavy = ratio;
    }
    return read_ratio(sparse, root, sparse_name, "compress_rate_csa", err) ||
                   read_ratio(heavy, root, heavy_name, "compress_rate_hca", err)
               ? -1
               : 0;
}

static const char *const names_of[] = {
    [COMPRESS_NONE] = "sliding_attention", [COMPRESS_SPARSE] = sparse_name, [COMPRESS_HEAVY] = heavy_name};

static int kind_of_name(struct json item, enum compress_kind *kind, struct err *err)
{
    const char *name;
    int64_t size;
    if (json_str(item, &name, &size, err)) return -1;
    *kind = !strcmp(name, sparse_name) ? COMPRESS_SPARSE : !strcmp(name, heavy_name) ? COMPRESS_HEAVY : COMPRESS_NONE;
    if (*kind != COMPRESS_NONE || !strcmp(name, "sliding_attention")) return 0;
    return json_error(item, err, "\"%s\" is not supported (sliding_attention, %s, %s)", name, sparse_name, heavy_name);
}

static int kind_of_ratio(const struct arch *a, struct json item, enum compress_kind *kind, struct err *err)
{
    const int64_t *ratio = a->compress.ratio;
    int64_t v;
    if (json_i64(item, 0, 1 << 20, &v, err)) return -1;
    *kind = v == 0 ? COMPRESS_NONE : v == ratio[COMPRESS_SPARSE] ? COMPRESS_SPARSE : COMPRESS_HEAVY;
    if (v == 0 || v == ratio[*kind]) return 0;
    return json_error(item, err, "%lld is not supported (0, %lld, %lld: one ratio per kind)", (long long)v,
                      (long long)ratio[COMPRESS_SPARSE], (long long)ratio[COMPRESS_HEAVY]);
}

static int read_kinds(struct arch *a, struct json root, struct err *err)
{
    const struct json names = json_find(root, "layer_types"), ratios = json_find(root, "compress_ratios");
    const bool named = json_given(names);
    const struct json list = named ? names : ratios;
    int64_t window = 128;
    if (json_opt_i64(root, "sliding_window", 1, 1 << 24, &window, err) || read_ratios(a, root, err)) return -1;
    if (!named && !json_given(ratios)) return json_error(root, err, "layer_types and compress_ratios are both missing");
    /* compress_ratios may also have items for the layers of multi-token prediction */
    if (json_type(list) != JSON_ARRAY || json_count(list) < a->n_layer || (named && json_count(list) > a->n_layer))
        return json_error(list, err, "is not a list of %lld layers", (long long)a->n_layer);
    if (json_given(ratios) && (json_type(ratios) != JSON_ARRAY || json_count(ratios) < a->n_layer))
        return json_error(ratios, err, "is not a list of %lld layers", (long long)a->n_layer);
    a->attn[WINDOW_ALONE].window = window;
    a->attn[WITH_ENTRIES] = a->attn[WINDOW_ALONE];
    a->attn[WITH_ENTRIES].rope = WITH_ENTRIES;
    for (int64_t l = 0; l < a->n_layer; l++) {
        enum compress_kind *kind = &a->compress.kind[l];
        const struct json item = json_at(list, l);
        enum compress_kind other;
        if (named ? kind_of_name(item, kind, err) : kind_of_ratio(a, item, kind, err)) return -1;
        a->attn_of[l] = *kind == COMPRESS_NONE ? WINDOW_ALONE : WITH_ENTRIES;
        if (!named || !json_given(ratios)) continue;
        if (kind_of_ratio(a, json_at(ratios, l), &other, err)) return -1;
        if (other != *kind)
            return json_error(json_at(ratios, l), err,
                              "is %s, but layer_types[%lld] is %s: correct one, or remove compress_ratios",
                              names_of[other], (long long)l, names_of[*kind]);
    }
    return 0;
}

/* Reads how many first layers choose experts by the token's id. */
static int read_hash(struct arch *a, struct json root, struct err *err)
{
    const struct json list = json_find(root, "mlp_layer_types");
    const bool counted = json_type(json_find(root, "num_hash_layers")) == JSON_INT;
    int64_t size;
    a->n_hash = 3;
    if (json_opt_i64(root, "num_hash_layers", 0, MT_MAX_LAYERS, &a->n_hash, err)) return -1;
    const int64_t first = a->n_hash = MT_MIN(a->n_hash, a->n_layer);
    if (!json_given(list)) return 0;
    if (json_type(list) != JSON_ARRAY || json_count(list) != a->n_layer)
        return json_error(list, err, "is not a list of %lld names", (long long)a->n_layer);
    a->n_hash = 0;
    for (int64_t l = 0; l < a->n_layer; l++) {
        const char *kind;
        if (json_str(json_at(list, l), &kind, &size, err)) return -1;
        const bool hash = !strcmp(kind, "hash_moe");
        if (!hash && strcmp(kind, "moe"))
            return json_error(json_at(list, l), err, "\"%s\" is not supported (hash_moe, moe)", kind);
        if (hash && a->n_hash < l)
            return json_error(json_at(list, l), err, "is hash_moe after a layer that is moe, which is not supported");
        if (counted && hash != (l < first))
            return json_error(
                json_at(list, l), err,
                "is %s, but num_hash_layers = %lld contradicts it: correct one, or remove num_hash_layers", kind,
                (long long)first);
        a->n_hash += hash;
    }
    return 0;
}

/* ---- RoPE */

/* Reads the number of rotated columns of a head: qk_rope_head_dim, or a share of the head. All that are given must
 * agree. */
static int read_width(struct arch *a, struct json root, struct json main, struct json entry, struct err *err)
{
    const struct json holder[] = {root, main, entry};
    int64_t *width = &a->compress.rope, named = a->attn[0].head_dim / 8;
    const bool has = json_has(root, "qk_rope_head_dim");
    if (json_opt_i64(root, "qk_rope_head_dim", 2, 4096, &named, err)) return -1;
    *width = named;
    for (int i = 0, n = has; i < MT_LEN(holder); i++) {
        double share = 0;
        if (!json_given(json_find(holder[i], "partial_rotary_factor"))) continue;
        if (json_get_f64(holder[i], "partial_rotary_factor", &share, err)) return -1;
        if (!(share > 0 && share <= 1))
            return json_error(holder[i], err, "partial_rotary_factor %g is not above 0 and at most 1", share);
        const int64_t cols = (int64_t)((double)a->attn[0].head_dim * share); /* truncated as in transformers */
        if (n++ && cols != *width)
            return json_error(holder[i], err, "partial_rotary_factor %g rotates %lld columns, another key %lld", share,
                              (long long)cols, (long long)*width);
        *width = cols;
    }
    if (*width < 2 || *width % 2 || *width > a->attn[0].head_dim || *width > a->compress.index_dim)
        return json_error(root, err, "qk_rope_head_dim %lld is not even, or above head_dim %lld or index_head_dim %lld",
                          (long long)*width, (long long)a->attn[0].head_dim, (long long)a->compress.index_dim);
    return 0;
}

static struct rope_arch plain_rope(const struct arch *a, double theta)
{
    return (struct rope_arch){.theta = theta,
                              .factor = 1,
                              .beta_fast = 32,
                              .beta_slow = 1,
                              .attention_factor = 1,
                              .softmax_gain = 1,
                              .truncate = true,
                              .width = a->compress.rope};
}

/* Reads one of the two RoPEs. cos and sin have a factor only if the file names one. YaRN's key `truncate` must be true:
 * transformers does not read it, and the published code always truncates. */
static int read_one(struct rope_arch *r, struct json root, struct json o, struct err *err)
{
    double factor = 1;
    if (rope_read_type(r, root, o, ROPE_KEYS_COMMON, err) || json_opt_f64(o, "attention_factor", &factor, err) ||
        range_factor(o, "attention_factor", factor, err))
        return -1;
    if (!r->truncate) return json_error(o, err, "truncate = false is not supported (true)");
    r->attention_factor = factor;
    return 0;
}

/* Refuses keys that transformers ignores outside rope_parameters and rope_scaling. */
static int refuse_outside(struct json root, struct err *err)
{
    const char *type = "default";
    double factor = 1;
    if (json_opt_str(root, "rope_type", &type, err) || json_opt_f64(root, "attention_factor", &factor, err)) return -1;
    if (strcmp(type, "default"))
        return json_error(root, err, "rope_type \"%s\" is outside rope_scaling: move it there, or remove it", type);
    if (factor != 1)
        return json_error(root, err, "attention_factor %g is outside rope_scaling: move it there, or remove it",
                          factor);
    return 0;
}

static int refuse_no_object(struct json o, struct err *err)
{
    return json_given(o) && json_type(o) != JSON_OBJECT ? json_error(o, err, "is not an object") : 0;
}

/* Reads both RoPEs. Layers with entries have YaRN and compress_rope_theta; the others only rope_theta. */
static int read_ropes_of(struct arch *a, struct json root, struct json scaling, struct err *err)
{
    double theta = 10000, entry_theta = 160000;
    const struct json main = json_find(scaling, "main"), entry = json_find(scaling, "compress");
    const bool nested = json_type(main) == JSON_OBJECT && json_type(entry) == JSON_OBJECT;
    if (refuse_no_object(main, err) || refuse_no_object(entry, err)) return -1;
    if (!nested && (json_type(main) == JSON_OBJECT || json_type(entry) == JSON_OBJECT))
        return json_error(scaling, err, "has one of main and compress: give both, or neither");
    if (rope_read_theta(&theta, root, "rope_theta", main, err) ||
        rope_read_theta(&entry_theta, root, "compress_rope_theta", entry, err) ||
        read_width(a, root, main, nested ? entry : scaling, err))
        return -1;
    a->rope[WINDOW_ALONE] = plain_rope(a, theta);
    a->rope[WITH_ENTRIES] = plain_rope(a, entry_theta);
    if (read_one(&a->rope[WINDOW_ALONE], root, main, err) ||
        read_one(&a->rope[WITH_ENTRIES], root, nested ? entry : scaling, err))
        return -1;
    if (a->rope[WINDOW_ALONE].yarn) return json_error(main, err, "rope_type \"yarn\" is not supported (default)");
    return 0;
}

static int read_ropes(struct arch *a, struct json root, struct err *err)
{
    struct json scaling, other;
    if (refuse_outside(root, err) || rope_find(&scaling, &other, root, err) || read_ropes_of(a, root, scaling, err))
        return -1;
    if (!rope_given(other)) return 0;
    const struct rope_arch rope = a->rope[WINDOW_ALONE], entry = a->rope[WITH_ENTRIES];
    if (read_ropes_of(a, root, other, err)) return -1;
    return rope_same(&rope, &a->rope[WINDOW_ALONE]) && rope_same(&entry, &a->rope[WITH_ENTRIES])
               ? 0
               : rope_differs(other, err);
}

static int read_hyper(struct arch *a, struct json root, struct err *err)
{
    int64_t n_iter = 20;
    a->hyper = (struct hyper_arch){.n_stream = 4, .eps = 1e-6};
    if (json_opt_i64(root, "hc_mult", 1, MT_MAX_STREAMS, &a->hyper.n_stream, err) ||
        json_opt_i64(root, "hc_sinkhorn_iters", 1, MT_MAX_SINKHORN, &n_iter, err) ||
        json_opt_f64(root, "hc_eps", &a->hyper.eps, err))
        return -1;
    if (range_eps(root, "hc_eps", a->hyper.eps, err)) return -1;
    a->hyper.n_iter = (int)n_iter;
    return 0;
}

/* The dtypes of tensors decide how they are read. Refuses settings of formats that the loader does not read. */
static int check_quantization(struct json root, struct err *err)
{
    const struct json q = json_find(root, "quantization_config"), block = json_find(q, "weight_block_size");
    const char *method = "fp8", *scale = "ue8m0", *format = "e4m3", *expert = "fp4";
    if (json_opt_str(root, "expert_dtype", &expert, err)) return -1;
    if (strcmp(expert, "fp4") && strcmp(expert, "fp8") && strcmp(expert, "bf16"))
        return json_error(root, err, "expert_dtype \"%s\" is not supported (fp4, fp8, bf16)", expert);
    if (!json_given(q)) return 0;
    if (json_opt_str(q, "quant_method", &method, err)) return -1;
    if (strcmp(method, "fp8")) return 0;
    if (json_opt_str(q, "scale_fmt", &scale, err) || json_opt_str(q, "fmt", &format, err)) return -1;
    if (strcmp(format, "e4m3")) return json_error(q, err, "fmt \"%s\" is not supported (e4m3)", format);
    if (strcmp(scale, "ue8m0") && strcmp(scale, "float"))
        return json_error(q, err, "scale_fmt \"%s\" is not supported (ue8m0, float)", scale);
    for (int64_t i = 0; json_given(block) && i < 2; i++) {
        int64_t n = 0;
        if (json_type(block) != JSON_ARRAY || json_count(block) != 2)
            return json_error(block, err, "is not a list of two numbers");
        if (json_i64(json_at(block, i), 1, 1 << 20, &n, err)) return -1;
        if (n != 128) return json_error(json_at(block, i), err, "%lld is not supported (128)", (long long)n);
    }
    return 0;
}

int compressed_read(struct arch *a, struct json root, struct err *err)
{
    int64_t n_shared = 1;
    if (json_opt_i64(root, "n_shared_experts", 1, 1024, &n_shared, err)) return -1;
    if (n_shared != 1) return json_error(root, err, "n_shared_experts %lld is not supported (1)", (long long)n_shared);
    return read_attention(a, root, err) || read_kinds(a, root, err) || read_hash(a, root, err) ||
                   read_ropes(a, root, err) || read_hyper(a, root, err) || check_quantization(root, err)
               ? -1
               : 0;
}

int compressed_read_router(struct arch *a, struct json root, struct err *err)
{
    double scale = 1.5;
    bool renormalise = true;
    int64_t n_group = 1, n_dense = 0;
    if (json_opt_f64(root, "routed_scaling_factor", &scale, err) ||
        json_opt_i64(root, "first_k_dense_replace", 0, MT_MAX_LAYERS, &n_dense, err) ||
        json_opt_bool(root, "norm_topk_prob", &renormalise, err) ||
        json_opt_i64(root, "n_group", 1, 65536, &n_group, err))
        return -1;
    if (!renormalise) return json_error(root, err, "norm_topk_prob = false is not supported (true)");
    if (n_group != 1) return json_error(root, err, "n_group %lld is not supported (1)", (long long)n_group);
    if (n_dense) return json_error(root, err, "first_k_dense_replace %lld is not supported (0)", (long long)n_dense);
    if (range_factor(root, "routed_scaling_factor", scale, err)) return -1;
    a->router = (struct router){.kind = ROUTER_SQRT_CHOSEN, .scale = (float)scale};
    return 0;
}
