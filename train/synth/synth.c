/* synth.c - the list of a checkpoint's tensors with the distribution of each, written by all cores.
 *
 * Every matrix has std 1 / sqrt(in), so that a normalised input gives outputs near 1: attention scores, router logits
 * and the head's logits are neither flat nor saturated. Matrices that write to the residual stream are also scaled by
 * GAIN / sqrt(2 L), so the stream about doubles over all layers. The rows of the router have unequal norms, so experts
 * get unequal loads.
 * Measured: tests/train/test_synth.c. */
#include "train/synth/synth.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/shards.h"
#include "kernels/cgroup.h"
#include "kernels/memory.h"
#include "kernels/format/quant.h"
#include "model/layer.h"
#include "model/stored/published.h"
#include "data/file/atomic_dir.h"
#include "train/launch/process.h"
#include "train/synth/presets.h"
#include "train/synth/random_weights.h"
#include "train/synth/synth_tokenizer.h"

#define SHARD_BYTES 4500000000
#define PIECE_BYTES (8 << 20) /* bytes that a thread generates and writes at a time */
#define NF4_BLOCK   64
#define GAIN        4.0

/* A matrix that every expert has: its names in the checkpoint and its shape. */
struct matrix {
    const char *pattern; /* struct tensor_names */
    const char *stack;   /* all experts in one tensor */
    int64_t n_out, n_in;
    double std;
    float scale;     /* of the whole matrix, NVFP4 and FP8 */
    char state[128]; /* bitsandbytes' quant_state */
};

struct synth {
    const struct preset *p;
    struct arch a; /* of all layers */
    int64_t n_layer;
    enum weight_format experts;
    uint64_t seed;
    struct matrix products[3];
    int n_products;
    struct st_entry *entries; /* data: a struct random_weights */
    int64_t n, cap, n_params, bytes;
    bool sizes; /* counts n_params and bytes alone */
};

/* ---- the tensors */

/* Whether the checkpoint has the names of DeepSeek-V4's publisher, the only ones that transformers reads; and its FP8
 * beside the experts. */
static bool published_names(const struct synth *s)
{
    return s->p->family->compress && (s->experts == WF_MXFP4 || s->experts == WF_FP8 || s->experts == WF_BF16);
}
static bool as_published(const struct synth *s) { return published_names(s) && s->experts != WF_BF16; }

static void add_as(struct synth *s, const char *name, enum dtype dtype, const char *st_dtype, int ndim,
                   const int64_t *shape, struct random_weights draw)
{
    char stored[256];
    struct st_entry e = {.dtype = dtype, .st_dtype = st_dtype, .ndim = ndim};
    memcpy(e.shape, shape, (size_t)ndim * sizeof(*shape));
    s->bytes += safetensors_entry_bytes(&e);
    if (s->sizes) return;
    s->entries = mem_reserve(s->entries, &s->cap, s->n + 1, sizeof(*s->entries));
    struct random_weights *d = mem_alloc(sizeof(*d));
    if (published_names(s) && published_name(stored, sizeof(stored), name)) name = stored;
    *d = draw;
    d->key = rng_key(s->seed, name);
    e.name = mem_strdup(name);
    e.data = d;
    s->entries[s->n++] = e;
}

static void add(struct synth *s, const char *name, enum dtype dtype, int ndim, const int64_t *shape,
                struct random_weights draw)
{
    add_as(s, name, dtype, NULL, ndim, shape, draw);
}

/* bf16 values, n_out of them, or [n_out, n_in] unless n_in is 0. */
static void add_values(struct synth *s, const char *name, int64_t n_out, int64_t n_in, struct random_weights draw)
{
    add(s, name, DT_BF16, n_in ? 2 : 1, (int64_t[]){n_out, n_in}, draw);
    s->n_params += n_out * MT_MAX(n_in, 1);
}

static struct random_weights normal(double mean, double std)
{
    return (struct random_weights){.kind = RANDOM_NORMAL, .mean = mean, .std = std};
}

/* Of all tensors but the head. */
static const char *prefix(const struct synth *s)
{
    return s->p->family->text_type ? "model.language_model." : "model.";
}

/* "model.layers.7." + rest */
struct name {
    char s[256];
};
static struct name layer_name(const struct synth *s, int64_t layer, const char *rest)
{
    struct name n;
    snprintf(n.s, sizeof(n.s), "%slayers.%lld.%s", prefix(s), (long long)layer, rest);
    return n;
}

static struct name with(struct name n, const char *suffix)
{
    strncat(n.s, suffix, sizeof(n.s) - strlen(n.s) - 1);
    return n;
}

static double spread(int64_t n_in) { return 1 / sqrt((double)n_in); }
static double residual_gain(const struct arch *a) { return GAIN / sqrt(2 * (double)a->n_layer); }

static void add_linear(struct synth *s, struct name name, int64_t n_out, int64_t n_in, double std, bool bias)
{
    add_values(s, with(name, ".weight").s, n_out, n_in, normal(0, std));
    if (bias) add_values(s, with(name, ".bias").s, n_out, 0, normal(0, 0.1));
}

/* The weight of a norm. */
static void add_norm(struct synth *s, struct name name, int64_t n)
{
    add_values(s, with(name, ".weight").s, n, 0, normal(s->a.norm_plus_one ? 0 : 1, 0.1));
}

/* f32 values, as add_values. */
static void add_f32(struct synth *s, const char *name, int64_t n_out, int64_t n_in, double mean, double std)
{
    add(s, name, DT_F32, n_in ? 2 : 1, (int64_t[]){n_out, n_in},
        (struct random_weights){.kind = RANDOM_F32, .mean = mean, .std = std});
    s->n_params += n_out * MT_MAX(n_in, 1);
}

/* FP8 with an exponent per block of 128 x 128, as DeepSeek-V4 is published; else bf16. */
static void add_blocks(struct synth *s, struct name name, int64_t n_out, int64_t n_in, double std)
{
    if (!as_published(s)) {
        add_linear(s, name, n_out, n_in, std, false);
        return;
    }
    add_as(s, with(name, ".weight").s, DT_U8, "F8_E4M3", 2, (int64_t[]){n_out, n_in},
           (struct random_weights){.kind = RANDOM_FP8});
    add_as(s, with(name, ".weight_scale_inv").s, DT_U8, "F8_E8M0", 2,
           (int64_t[]){(n_out + 127) / 128, (n_in + 127) / 128},
           (struct random_weights){.kind = RANDOM_FILL, .byte = random_weights_exponent(std)});
    s->n_params += n_out * n_in;
}

/* One expert's matrix as DeepSeek-V4 is published: nibbles, and an exponent per 32 columns. */
static void add_mxfp4(struct synth *s, struct name name, const struct matrix *p)
{
    add_as(s, with(name, ".weight").s, DT_U8, "I8", 2, (int64_t[]){p->n_out, p->n_in / 2},
           (struct random_weights){.kind = RANDOM_NIBBLES});
    add_as(s, with(name, ".weight_scale_inv").s, DT_U8, "F8_E8M0", 2, (int64_t[]){p->n_out, p->n_in / 32},
           (struct random_weights){.kind = RANDOM_E8M0, .std = p->std});
    s->n_params += p->n_out * p->n_in;
}

/* Gates, pooled values and the bias of each token in an entry; width: of an entry, twice with overlap. */
static void add_compressor(struct synth *s, int64_t layer, const char *module, int64_t ratio, int64_t dim,
                           int64_t width)
{
    const int64_t d = s->a.d_model;
    const struct name at = layer_name(s, layer, module);
    add_linear(s, with(at, ".kv_proj"), width, d, spread(d), false);
    add_linear(s, with(at, ".gate_proj"), width, d, spread(d), false);
    add_f32(s, with(at, ".position_bias").s, ratio, width, 0, 0.5);
    add_norm(s, with(at, ".kv_norm"), dim);
}

static void add_compressed(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const struct compress_arch *c = &a->compress;
    const int64_t d = a->d_model, n_head = a->attn[0].n_head, head = a->attn[0].head_dim, q = n_head * head,
                  ratio = c->ratio[c->kind[layer]];
    const bool sparse = c->kind[layer] == COMPRESS_SPARSE;
    const char *indexer = "self_attn.compressor.indexer";
    add_blocks(s, layer_name(s, layer, "self_attn.q_a_proj"), c->q_lora, d, spread(d));
    add_norm(s, layer_name(s, layer, "self_attn.q_a_norm"), c->q_lora);
    add_blocks(s, layer_name(s, layer, "self_attn.q_b_proj"), q, c->q_lora, spread(c->q_lora));
    add_blocks(s, layer_name(s, layer, "self_attn.kv_proj"), head, d, spread(d));
    add_norm(s, layer_name(s, layer, "self_attn.kv_norm"), head);
    add_blocks(s, layer_name(s, layer, "self_attn.o_a_proj"), c->n_group * c->o_lora, q / c->n_group,
               spread(q / c->n_group));
    add_blocks(s, layer_name(s, layer, "self_attn.o_b_proj"), d, c->n_group * c->o_lora,
               spread(c->n_group * c->o_lora) * residual_gain(a));
    add_f32(s, layer_name(s, layer, "self_attn.sinks").s, n_head, 0, 0, 0.5);
    if (c->kind[layer] == COMPRESS_NONE) return;
    add_compressor(s, layer, "self_attn.compressor", ratio, head, sparse ? 2 * head : head);
    if (!sparse) return;
    add_compressor(s, layer, indexer, ratio, c->index_dim, 2 * c->index_dim);
    add_blocks(s, with(layer_name(s, layer, indexer), ".q_b_proj"), c->n_index * c->index_dim, c->q_lora,
               spread(c->q_lora));
    add_linear(s, with(layer_name(s, layer, indexer), ".scorer.weights_proj"), c->n_index, d, spread(d), false);
}

/* One place of hyper-connections. Base and scale keep the streams apart: each goes on mainly as itself. */
static void add_hyper(struct synth *s, struct name name, const char *part, int64_t n_value, int64_t n_scale)
{
    const int64_t cols = s->a.hyper.n_stream * s->a.d_model;
    char leaf[3][16];
    static const char *const leaves[] = {"fn", "base", "scale"};
    for (int i = 0; i < 3; i++) snprintf(leaf[i], sizeof(leaf[i]), "%s%s", part, leaves[i]);
    add_f32(s, with(name, leaf[0]).s, n_value, cols, 0, spread(cols));
    add_f32(s, with(name, leaf[1]).s, n_value, 0, 0, 0.5);
    add_f32(s, with(name, leaf[2]).s, n_scale, 0, 0.5, 0.1);
}

static void add_latent(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const struct mla_arch *m = &a->mla;
    const int64_t d = a->d_model, n_head = a->attn[0].n_head, q = n_head * a->attn[0].head_dim, o = n_head * m->value;
    if (m->q_lora) {
        add_linear(s, layer_name(s, layer, "self_attn.q_a_proj"), m->q_lora, d, spread(d), a->attn_bias);
        add_values(s, layer_name(s, layer, "self_attn.q_a_layernorm.weight").s, m->q_lora, 0, normal(1, 0.1));
        add_linear(s, layer_name(s, layer, "self_attn.q_b_proj"), q, m->q_lora, spread(m->q_lora), false);
    } else {
        add_linear(s, layer_name(s, layer, "self_attn.q_proj"), q, d, spread(d), false);
    }
    add_linear(s, layer_name(s, layer, "self_attn.kv_a_proj_with_mqa"), m->kv_lora + m->rope, d, spread(d),
               a->attn_bias);
    add_values(s, layer_name(s, layer, "self_attn.kv_a_layernorm.weight").s, m->kv_lora, 0, normal(1, 0.1));
    add_linear(s, layer_name(s, layer, "self_attn.kv_b_proj"), n_head * (m->nope + m->value), m->kv_lora,
               spread(m->kv_lora), false);
    add_linear(s, layer_name(s, layer, "self_attn.o_proj"), d, o, spread(o) * residual_gain(a), a->out_bias);
}

/* Gated DeltaNet. A_log around -3: a state keeps about 0.95 of itself per token. */
static void add_delta(struct synth *s, int64_t layer)
{
    const struct delta_shape *h = &s->a.delta.shape;
    const int64_t d = s->a.d_model, v = h->n_value * h->value_dim, c = 2 * h->n_key * h->key_dim + v;
    const int64_t taps = s->a.delta.n_tap;
    if (s->a.delta.fused) {
        add_linear(s, layer_name(s, layer, "linear_attn.in_proj_qkvz"), c + v, d, spread(d), false);
        add_linear(s, layer_name(s, layer, "linear_attn.in_proj_ba"), 2 * h->n_value, d, spread(d), false);
    } else {
        add_linear(s, layer_name(s, layer, "linear_attn.in_proj_qkv"), c, d, spread(d), false);
        add_linear(s, layer_name(s, layer, "linear_attn.in_proj_z"), v, d, spread(d), false);
        add_linear(s, layer_name(s, layer, "linear_attn.in_proj_b"), h->n_value, d, spread(d), false);
        add_linear(s, layer_name(s, layer, "linear_attn.in_proj_a"), h->n_value, d, spread(d), false);
    }
    add_linear(s, layer_name(s, layer, "linear_attn.out_proj"), d, v, spread(v) * residual_gain(&s->a), false);
    add(s, layer_name(s, layer, "linear_attn.conv1d.weight").s, DT_BF16, 3, (int64_t[]){c, 1, taps},
        normal(0, spread(taps)));
    s->n_params += c * taps;
    add_values(s, layer_name(s, layer, "linear_attn.A_log").s, h->n_value, 0, normal(-3, 1));
    add_values(s, layer_name(s, layer, "linear_attn.dt_bias").s, h->n_value, 0, normal(0, 0.5));
    add_values(s, layer_name(s, layer, "linear_attn.norm.weight").s, h->value_dim, 0, normal(1, 0.1));
}

static void add_attention(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const struct attn_arch *h = arch_attn(a, layer);
    const int64_t d = a->d_model, q = h->n_head * h->head_dim, kv = h->n_kv * h->head_dim;
    const bool whole = a->qk_norm == QK_NORM_WHOLE;
    add_linear(s, layer_name(s, layer, "self_attn.q_proj"), arch_q_rows(a, layer), d, spread(d), a->attn_bias);
    add_linear(s, layer_name(s, layer, "self_attn.k_proj"), kv, d, spread(d), a->attn_bias);
    add_linear(s, layer_name(s, layer, "self_attn.v_proj"), kv, d, spread(d), a->attn_bias);
    add_linear(s, layer_name(s, layer, "self_attn.o_proj"), d, q, spread(q) * residual_gain(a), a->out_bias);
    if (a->sinks) add_values(s, layer_name(s, layer, "self_attn.sinks").s, h->n_head, 0, normal(0, 0.5));
    if (a->qk_norm == QK_NORM_NONE) return;
    add_norm(s, layer_name(s, layer, "self_attn.q_norm"), whole ? q : h->head_dim);
    add_norm(s, layer_name(s, layer, "self_attn.k_norm"), whole ? kv : h->head_dim);
}

/* One expert's matrix as bitsandbytes stores a Linear; absmax and quant_map are f32 and not counted as parameters. */
static void add_nf4(struct synth *s, struct name name, const struct matrix *p)
{
    const struct name weight = with(name, ".weight");
    const int64_t n = p->n_out * p->n_in, state = (int64_t)strlen(p->state);
    add(s, weight.s, DT_U8, 2, (int64_t[]){n / 2, 1}, (struct random_weights){.kind = RANDOM_NF4});
    add(s, with(weight, ".absmax").s, DT_F32, 1, (int64_t[]){n / NF4_BLOCK},
        (struct random_weights){.kind = RANDOM_ABSMAX, .std = p->std});
    add(s, with(weight, ".quant_map").s, DT_F32, 1, (int64_t[]){16},
        (struct random_weights){.kind = RANDOM_BYTES, .bytes = quant_nf4_code});
    add(s, with(weight, ".quant_state.bitsandbytes__nf4").s, DT_U8, 1, (int64_t[]){state},
        (struct random_weights){.kind = RANDOM_BYTES, .bytes = p->state});
    s->n_params += n;
}

/* One expert's matrix as ModelOpt stores NVFP4. */
static void add_nvfp4(struct synth *s, struct name name, const struct matrix *p)
{
    const struct name weight = with(name, ".weight");
    add(s, weight.s, DT_U8, 2, (int64_t[]){p->n_out, p->n_in / 2}, (struct random_weights){.kind = RANDOM_NIBBLES});
    add_as(s, with(weight, "_scale").s, DT_U8, "F8_E4M3", 2, (int64_t[]){p->n_out, p->n_in / 16},
           (struct random_weights){.kind = RANDOM_E4M3});
    add(s, with(weight, "_scale_2").s, DT_F32, 0, (int64_t[]){1},
        (struct random_weights){.kind = RANDOM_BYTES, .bytes = &p->scale});
    s->n_params += p->n_out * p->n_in;
}

/* One expert's matrix as compressed-tensors stores FP8 with one scale. */
static void add_fp8(struct synth *s, struct name name, const struct matrix *p)
{
    const struct name weight = with(name, ".weight");
    add_as(s, weight.s, DT_U8, "F8_E4M3", 2, (int64_t[]){p->n_out, p->n_in},
           (struct random_weights){.kind = RANDOM_FP8});
    add(s, with(weight, "_scale").s, DT_F32, 1, (int64_t[]){1},
        (struct random_weights){.kind = RANDOM_BYTES, .bytes = &p->scale});
    s->n_params += p->n_out * p->n_in;
}

/* A Linear per expert. */
static void add_per_expert(struct synth *s, int64_t layer, const struct matrix *p)
{
    const size_t before = strcspn(p->pattern, "#");
    char rest[192];
    for (int64_t x = 0; x < s->a.n_exp; x++) {
        snprintf(rest, sizeof(rest), "%.*s%lld%s", (int)before, p->pattern, (long long)x, p->pattern + before + 1);
        const struct name name = layer_name(s, layer, rest);
        if (as_published(s) && s->experts == WF_FP8) {
            add_blocks(s, name, p->n_out, p->n_in, p->std);
            continue;
        }
        if (s->experts == WF_BF16) {
            add_linear(s, name, p->n_out, p->n_in, p->std, s->a.expert_bias);
            continue;
        }
        (s->experts == WF_NF4     ? add_nf4
         : s->experts == WF_FP8   ? add_fp8
         : s->experts == WF_MXFP4 ? add_mxfp4
                                  : add_nvfp4)(s, name, p);
        if (s->a.expert_bias) add_values(s, with(name, ".bias").s, p->n_out, 0, normal(0, 0.1));
    }
}

/* gpt-oss: one tensor of all experts, as MXFP4, or in the [E, in, out] of transformers as bf16 or ModelOpt's NVFP4. */
static void add_stack(struct synth *s, int64_t layer, const struct matrix *p)
{
    const int64_t e = s->a.n_exp, groups = p->n_in / 32;
    const struct name name = layer_name(s, layer, p->stack);
    if (s->experts == WF_MXFP4) {
        add(s, with(name, "_blocks").s, DT_U8, 4, (int64_t[]){e, p->n_out, groups, 16},
            (struct random_weights){.kind = RANDOM_NIBBLES});
        add(s, with(name, "_scales").s, DT_U8, 3, (int64_t[]){e, p->n_out, groups},
            (struct random_weights){.kind = RANDOM_E8M0, .std = p->std});
    } else if (s->experts == WF_NVFP4) {
        add(s, name.s, DT_U8, 3, (int64_t[]){e, p->n_in / 2, p->n_out},
            (struct random_weights){.kind = RANDOM_NIBBLES});
        add_as(s, with(name, "_weight_scale").s, DT_U8, "F8_E4M3", 3, (int64_t[]){e, p->n_in / 16, p->n_out},
               (struct random_weights){.kind = RANDOM_E4M3});
        add(s, with(name, "_weight_scale_2").s, DT_F32, 0, (int64_t[]){1},
            (struct random_weights){.kind = RANDOM_BYTES, .bytes = &p->scale});
    } else {
        add(s, name.s, DT_BF16, 3, (int64_t[]){e, p->n_in, p->n_out}, normal(0, p->std));
    }
    s->n_params += e * p->n_out * p->n_in;
    add_values(s, with(name, "_bias").s, e, p->n_out, normal(0, 0.1));
}

/* The layout of struct preset_family.stacked, which has gate and up in one tensor. */
static bool is_stacked(const struct synth *s) { return s->p->family->stacked && s->experts == WF_BF16; }

static void add_rows(struct synth *s, int64_t layer, const struct matrix *p)
{
    const int64_t e = s->a.n_exp;
    add(s, layer_name(s, layer, p->stack).s, DT_BF16, 3, (int64_t[]){e, p->n_out, p->n_in}, normal(0, p->std));
    s->n_params += e * p->n_out * p->n_in;
}

static void add_shared(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    for (enum lora_target t = LORA_SHARED_GATE; t <= LORA_SHARED_DOWN; t++) {
        const bool down = t == LORA_SHARED_DOWN;
        const int64_t n_out = down ? a->d_model : a->d_shared, n_in = down ? a->d_shared : a->d_model;
        char module[LORA_MODULE_TEXT];
        lora_target_module(a->names, t, module);
        add_blocks(s, layer_name(s, layer, module), n_out, n_in, spread(n_in) * (down ? residual_gain(a) : 1));
    }
    if (a->shared_gate)
        add_values(s, with(layer_name(s, layer, a->names->shared_gate), ".weight").s, 1, a->d_model,
                   normal(0, spread(a->d_model)));
}

static void add_dense(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const int64_t d = a->d_model, f = a->d_dense;
    add_linear(s, layer_name(s, layer, "mlp.gate_proj"), f, d, spread(d), false);
    add_linear(s, layer_name(s, layer, "mlp.up_proj"), f, d, spread(d), false);
    add_linear(s, layer_name(s, layer, "mlp.down_proj"), d, f, spread(f) * residual_gain(a), false);
}

static void add_experts(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const char *bias = a->names->router_bias ? a->names->router_bias : ".bias";
    const struct name router = layer_name(s, layer, a->names->router[0]);
    const struct random_weights rows = {.kind = RANDOM_ROWS, .std = spread(a->d_model), .row = a->d_model};
    add_values(s, with(router, ".weight").s, a->n_exp, a->d_model, rows); /* rows with different norms: uneven loads */
    if (layer < a->n_hash)
        add(s, with(router, ".tid2eid").s, DT_I64, 2, (int64_t[]){a->vocab, a->top_k},
            (struct random_weights){.kind = RANDOM_HASH, .row = a->top_k, .n_exp = a->n_exp});
    else if (a->router_bias)
        add_values(s, with(router, bias).s, a->n_exp, 0, normal(0, 0.1));
    for (int i = 0; i < s->n_products; i++)
        if (a->transposed_experts && s->experts != WF_NF4)
            add_stack(s, layer, &s->products[i]);
        else if (is_stacked(s))
            add_rows(s, layer, &s->products[i]);
        else
            add_per_expert(s, layer, &s->products[i]);
    if (a->d_shared) add_shared(s, layer);
}

static void add_layer(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    add_norm(s, layer_name(s, layer, "input_layernorm"), a->d_model);
    if (a->hyper.n_stream) {
        const int64_t n = a->hyper.n_stream;
        add_hyper(s, layer_name(s, layer, "attn_hc."), "", (2 + n) * n, 3);
        add_hyper(s, layer_name(s, layer, "ffn_hc."), "", (2 + n) * n, 3);
    }
    if (a->mixer[layer] == &mixer_deltanet)
        add_delta(s, layer);
    else if (a->mixer[layer] == &mixer_compressed)
        add_compressed(s, layer);
    else
        (a->mla.kv_lora ? add_latent : add_attention)(s, layer);
    add_norm(s, layer_name(s, layer, "post_attention_layernorm"), a->d_model);
    (a->dense[layer] ? add_dense : add_experts)(s, layer);
}

static void add_product(struct synth *s, const char *pattern, const char *stack, int64_t n_out, int64_t n_in,
                        double std)
{
    struct matrix *p = &s->products[s->n_products++];
    *p = (struct matrix){.pattern = pattern, .stack = stack, .n_out = n_out, .n_in = n_in, .std = std};
    p->scale = random_weights_scale(s->experts, std);
    snprintf(p->state, sizeof(p->state),
             "{\"quant_type\": \"nf4\", \"blocksize\": %d, \"dtype\": \"bfloat16\", \"shape\": [%lld, %lld]}",
             NF4_BLOCK, (long long)n_out, (long long)n_in);
}

static void add_products(struct synth *s)
{
    const struct arch *a = &s->a;
    const int64_t d = a->d_model, f = a->d_ff;
    const struct tensor_names *n = a->names;
    const bool both = !n->up || is_stacked(s);
    add_product(s, n->gate, "mlp.experts.gate_up_proj", both ? 2 * f : f, d, spread(d));
    if (!both) add_product(s, n->up, NULL, f, d, spread(d));
    add_product(s, n->down, "mlp.experts.down_proj", d, f, spread(f) * residual_gain(a));
}

static void add_all(struct synth *s)
{
    const struct arch *a = &s->a;
    add_products(s);
    struct name embed, norm;
    snprintf(embed.s, sizeof(embed.s), "%sembed_tokens.weight", prefix(s));
    snprintf(norm.s, sizeof(norm.s), "%snorm", prefix(s));
    add_values(s, embed.s, a->vocab, a->d_model, normal(0, 1));
    for (int64_t l = 0; l < s->n_layer; l++) add_layer(s, l);
    add_norm(s, norm, a->d_model);
    if (a->hyper.n_stream) add_hyper(s, (struct name){"model.hc_head."}, "hc_", a->hyper.n_stream, 1);
    add_values(s, "lm_head.weight", a->vocab, a->d_model, normal(0, spread(a->d_model)));
}

/* ---- what to write */

static int find_format(struct synth *s, const char *quant, struct err *err)
{
    static const char *const names[] = {"mxfp4", "nf4", "bf16", "nvfp4", "fp8"};
    static const enum weight_format formats[] = {WF_MXFP4, WF_NF4, WF_BF16, WF_NVFP4, WF_FP8};
    int i = 0;
    s->experts = s->p->family->experts;
    if (!quant) return 0;
    while (i < MT_LEN(names) && strcmp(names[i], quant)) i++;
    if (i == MT_LEN(names)) return err_set(err, "--quant \"%.64s\": expected mxfp4, nf4, bf16, nvfp4 or fp8", quant);
    s->experts = formats[i];
    if (s->experts == WF_MXFP4 && s->p->family->experts != WF_MXFP4)
        return err_set(err, "%s has no published layout with experts in MXFP4: use nf4, bf16, nvfp4 or fp8",
                       s->p->name);
    if (s->experts == WF_FP8 && s->p->family->experts == WF_MXFP4 && !s->p->family->compress)
        return err_set(err, "%s has no layout with experts in FP8: use mxfp4, nf4, bf16 or nvfp4", s->p->name);
    return 0;
}

/* The architecture as arch_load reads it from the text of config.json. */
static int read_arch(struct synth *s, struct err *err)
{
    struct json_out text;
    preset_config(&text, s->p, s->p->n_layer, s->experts);
    struct json_doc *doc = json_parse(text.text, text.size, s->p->name, err);
    const int rc = doc ? arch_parse(&s->a, json_root(doc), err) : -1;
    json_free(doc);
    json_out_free(&text);
    return rc;
}

static void synth_close(struct synth *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        mem_free((void *)(uintptr_t)s->entries[i].name);
        mem_free((void *)(uintptr_t)s->entries[i].data);
    }
    mem_free(s->entries);
    *s = (struct synth){0};
}

/* The fewest first layers, at least 2, that have every kind of layer of the model. */
static int64_t layers_of_each_kind(const struct arch *a)
{
    int64_t n = MT_MIN(a->n_layer, 2);
    for (int64_t l = n; l < a->n_layer; l++) {
        bool seen = false;
        for (int64_t k = 0; k < n; k++) seen = seen || arch_same_layer(a, k, l);
        if (!seen) n = l + 1;
    }
    return n;
}

static int synth_open(struct synth *s, const struct synth_options *opt, bool sizes, struct err *err)
{
    *s = (struct synth){.seed = opt->seed, .sizes = sizes};
    s->p = preset_find(opt->arch, err);
    if (!s->p || find_format(s, opt->quant, err)) return -1;
    s->n_layer = opt->n_layer ? opt->n_layer : s->p->n_layer;
    if (s->n_layer < 0 || s->n_layer > s->p->n_layer)
        return err_set(err, "--layers %lld: %s has %lld", (long long)s->n_layer, s->p->name, (long long)s->p->n_layer);
    if (read_arch(s, err)) return -1;
    if (opt->each_kind && !opt->n_layer) s->n_layer = layers_of_each_kind(&s->a);
    add_all(s);
    return 0;
}

/* ---- writing: threads take the next part, generate and write it */

struct writer {
    struct synth *s;
    struct shards shards;
    pthread_mutex_t lock; /* protects all fields below */
    struct err *err;
    bool failed;
    int64_t entry, done; /* the cursor: this entry, from byte `done` on */
    int64_t written;     /* of s->bytes */
    double start, told;
};

struct piece {
    int64_t entry, at, n; /* bytes [at, at+n) of the tensor */
};

static bool next_piece(struct writer *w, struct piece *piece)
{
    if (w->entry == w->s->n) return false;
    const int64_t bytes = safetensors_entry_bytes(&w->s->entries[w->entry]);
    *piece = (struct piece){w->entry, w->done, MT_MIN(PIECE_BYTES, bytes - w->done)};
    w->done += piece->n;
    if (w->done < bytes) return true;
    w->done = 0;
    w->entry++;
    return true;
}

/* Prints a line every 2 seconds. */
static void print_progress(struct writer *w, int64_t n)
{
    char done[32], all[32], left[32], speed[32];
    const double now = clock_ms(), seconds = (now - w->start) / 1e3;
    w->written += n;
    if (now - w->told < 2000) return;
    w->told = now;
    const double rate = (double)w->written / seconds;
    log_info("%s of %s  %s/s  left %s", str_bytes(done, w->written), str_bytes(all, w->s->bytes),
             str_bytes(speed, (int64_t)rate), str_seconds(left, (double)(w->s->bytes - w->written) / rate));
}

static void *work(void *arg)
{
    struct writer *w = arg;
    struct piece piece;
    struct err err;
    uint8_t *bytes = mem_alloc(PIECE_BYTES);
    pthread_mutex_lock(&w->lock);
    while (!w->failed && next_piece(w, &piece)) {
        pthread_mutex_unlock(&w->lock);
        random_weights_bytes(w->s->entries[piece.entry].data, bytes, piece.at, piece.n);
        const int rc = shards_put(&w->shards, piece.entry, piece.at, bytes, piece.n, &err);
        pthread_mutex_lock(&w->lock);
        print_progress(w, piece.n);
        if (rc && !w->failed) w->failed = err_set(w->err, "%s", err.msg);
    }
    pthread_mutex_unlock(&w->lock);
    mem_free(bytes);
    return NULL;
}

static int write_tensors(struct synth *s, const char *dir, const struct synth_options *opt, struct err *err)
{
    const double start = clock_ms();
    struct writer w = {.s = s, .err = err, .start = start, .told = start};
    const int64_t most = opt->shard_bytes ? opt->shard_bytes : SHARD_BYTES;
    const int64_t cpus = MT_MIN(MT_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1), cgroup_cpus(""));
    const int n = opt->n_threads ? opt->n_threads : (int)cpus;
    if (shards_open(&w.shards, dir, s->entries, s->n, most, err)) return -1;
    pthread_t *threads = mem_array(n, sizeof(*threads));
    MT_REQUIRE(!pthread_mutex_init(&w.lock, NULL), "no lock");
    for (int i = 0; i < n; i++) thread_start(&threads[i], work, &w);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&w.lock);
    mem_free(threads);
    const int rc = w.failed || shards_finish(&w.shards, err) ? -1 : 0;
    shards_close(&w.shards);
    return rc;
}

/* ---- the directory */

static int check_space(const struct synth *s, const char *dir, struct err *err)
{
    struct err why;
    if (!file_check_space(dir, s->bytes, &why)) return 0;
    return err_set(err, "%s; --layers N writes the first N layers", why.msg);
}

static int write_config(const struct synth *s, const char *dir, struct err *err)
{
    char path[MT_PATH];
    struct json_out o;
    if (str_format(path, sizeof(path), err, "path of config.json", "%s/config.json", dir)) return -1;
    preset_config(&o, s->p, s->n_layer, s->experts);
    const int rc = file_write_atomic(path, o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

/* Writes to a hidden directory beside dir, which is renamed to dir at the end; config.json is written last. */
static int write_all(struct synth *s, const struct synth_options *opt, struct err *err)
{
    char tmp[MT_PATH];
    if (atomic_dir_begin(opt->dir, tmp, err)) return -1;
    process_delete_on_signal(tmp);
    const bool done = !check_space(s, tmp, err) && !write_tensors(s, tmp, opt, err) &&
                      !synth_tokenizer(tmp, s->p, err) && !write_config(s, tmp, err) &&
                      !atomic_dir_commit(tmp, opt->dir, err);
    process_delete_on_signal(NULL);
    if (!done) (void)!file_remove_tree(tmp, NULL);
    return done ? 0 : -1;
}

int synth_run(const struct synth_options *opt, struct err *err)
{
    struct synth s;
    char params[32], bytes[32];
    const double start = clock_ms();
    int rc = synth_open(&s, opt, false, err) || atomic_dir_check_new(opt->dir, "name a new directory", err) ? -1 : 0;
    if (!rc) {
        log_info("%s: %lld of %lld layer%s, %s parameters, experts %s, %s in %lld tensors, seed %llu", s.p->name,
                 (long long)s.n_layer, (long long)s.p->n_layer, str_plural(s.p->n_layer), str_count(params, s.n_params),
                 weight_format_name(s.experts), str_bytes(bytes, s.bytes), (long long)s.n, (unsigned long long)s.seed);
        rc = write_all(&s, opt, err);
    }
    if (!rc) log_info("%s written in %.1f s", opt->dir, (clock_ms() - start) / 1e3);
    synth_close(&s);
    return rc;
}

int synth_size(const struct synth_options *opt, int64_t *n_params, int64_t *bytes, struct err *err)
{
    struct synth s;
    const int rc = synth_open(&s, opt, true, err);
    *n_params = s.n_params;
    *bytes = s.bytes;
    synth_close(&s);
    return rc;
}

/* ---- in memory ---- */

static bool same_content(const struct st_entry *a, const struct st_entry *b)
{
    const struct random_weights *x = a->data, *y = b->data;
    return x->kind == y->kind && x->mean == y->mean && x->std == y->std && x->row == y->row && x->bytes == y->bytes &&
           safetensors_entry_bytes(a) == safetensors_entry_bytes(b);
}

/* The bytes of entry i: shared with an earlier equal entry, or drawn now; a large tensor repeats its first part. */
static const uint8_t *memory_bytes(struct synth_memory *m, const struct synth *s, int64_t i, int64_t *n_drawn)
{
    const struct st_entry *e = &s->entries[i];
    for (int64_t k = 0; k < i; k++)
        if (same_content(&s->entries[k], e)) return m->st.tensors[k].data;
    const int64_t bytes = safetensors_entry_bytes(e), drawn = MT_MIN(bytes, (int64_t)64 << 20);
    uint8_t *data = mem_alloc(bytes);
    random_weights_bytes(e->data, data, 0, drawn);
    for (int64_t at = drawn; at < bytes; at += drawn) memcpy(data + at, data, (size_t)MT_MIN(drawn, bytes - at));
    m->buffers[(*n_drawn)++] = data;
    return data;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct st_tensor *)a)->name, ((const struct st_tensor *)b)->name);
}

int synth_memory_open(struct synth_memory *m, const struct synth_options *opt, struct err *err)
{
    struct synth s;
    int64_t n_drawn = 0;
    *m = (struct synth_memory){0};
    if (synth_open(&s, opt, false, err)) {
        synth_close(&s);
        return -1;
    }
    m->arch = s.a;
    m->arch.n_layer = s.n_layer;
    m->n = m->st.n_tensors = s.n;
    m->names = mem_array(s.n, sizeof(*m->names));
    m->buffers = mem_array(s.n, sizeof(*m->buffers));
    m->st.tensors = mem_array(s.n, sizeof(*m->st.tensors));
    for (int64_t i = 0; i < s.n; i++) {
        const struct st_entry *e = &s.entries[i];
        struct st_tensor *t = &m->st.tensors[i];
        m->names[i] = mem_strdup(e->name);
        *t = (struct st_tensor){.name = m->names[i], .dtype = e->st_dtype ? DT_NONE : e->dtype, .ndim = e->ndim};
        t->st_dtype = e->st_dtype ? e->st_dtype : dtype_name(e->dtype);
        memcpy(t->shape, e->shape, sizeof(t->shape));
        t->bytes = safetensors_entry_bytes(e);
        t->data = opt->no_bytes ? NULL : memory_bytes(m, &s, i, &n_drawn);
    }
    qsort(m->st.tensors, (size_t)s.n, sizeof(*m->st.tensors), by_name);
    synth_close(&s);
    return published_rename(&m->st, &m->arch, err);
}

void synth_memory_close(struct synth_memory *m)
{
    safetensors_close(&m->st);
    for (int64_t i = 0; i < m->n; i++) {
        mem_free(m->names[i]);
        mem_free(m->buffers[i]);
    }
    mem_free(m->names);
    mem_free(m->buffers);
    *m = (struct synth_memory){0};
}

void synth_list(FILE *out)
{
    static const char *const formats[] = {"mxfp4", "nf4", "bf16", "nvfp4", "fp8"};
    const struct preset *p;
    fprintf(out, "%-18s  %6s  %10s", "architecture", "layers", "parameters");
    for (int k = 0; k < MT_LEN(formats); k++) fprintf(out, "  %10s", formats[k]);
    fputc('\n', out);
    for (int64_t i = 0; (p = preset_row(i)) != NULL; i++) {
        char text[MT_LEN(formats)][32], params[32] = "";
        for (int k = 0; k < MT_LEN(formats); k++) {
            struct err err;
            int64_t n, bytes;
            const struct synth_options opt = {.arch = p->name, .quant = formats[k]};
            if (synth_size(&opt, &n, &bytes, &err))
                snprintf(text[k], sizeof(text[k]), "-");
            else
                str_bytes(text[k], bytes), str_count(params, n);
        }
        fprintf(out, "%-18s  %6lld  %10s", p->name, (long long)p->n_layer, params);
        for (int k = 0; k < MT_LEN(formats); k++) fprintf(out, "  %10s", text[k]);
        fputc('\n', out);
    }
}
