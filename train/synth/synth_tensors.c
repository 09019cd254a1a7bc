/* synth_tensors.c - the list of a checkpoint's tensors with the distribution of each.
 *
 * Every matrix has std 1 / sqrt(in), so that a normalised input gives outputs near 1: attention scores, router logits
 * and the head's logits are neither flat nor saturated. Matrices that write to the residual stream are also scaled by
 * GAIN / sqrt(2 L), so the norm of the stream about doubles over all layers. The rows of the router have unequal norms,
 * so experts get unequal loads. tests/train/test_synth.c measures this. */
#include "train/synth/synth_tensors.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/layer.h"
#include "model/stored/published.h"

#define NF4_BLOCK 64
#define GAIN      4.0

static bool published_names(const struct synth *s) { return s->p->family->compress && s->form->names; }
static bool as_published(const struct synth *s) { return s->p->family->compress && s->form->blocks; }

static void add_as(struct synth *s, const char *name, struct st_entry e, struct random_weights draw)
{
    char stored[256];
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
    struct st_entry e = {.dtype = dtype, .ndim = ndim};
    memcpy(e.shape, shape, (size_t)ndim * sizeof(*shape));
    add_as(s, name, e, draw);
}

/* Adds a bf16 tensor [n_out, n_in], or [n_out] if n_in is 0. */
static void add_values(struct synth *s, const char *name, int64_t n_out, int64_t n_in, struct random_weights draw)
{
    add(s, name, DT_BF16, n_in ? 2 : 1, (int64_t[]){n_out, n_in}, draw);
    s->n_params += n_out * MT_MAX(n_in, 1);
}

static struct random_weights copied(const void *bytes)
{
    return (struct random_weights){.kind = RANDOM_BYTES, .bytes = bytes};
}
static struct random_weights normal(double mean, double std)
{
    return (struct random_weights){.kind = RANDOM_NORMAL, .mean = mean, .std = std};
}

/* Of all tensors but the head. */
static const char *prefix(const struct synth *s)
{
    return s->p->family->text_type ? "model.language_model." : s->p->family->nemotron ? "backbone." : "model.";
}

/* "model.layers.7." + rest */
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
/* The factor of the outputs of feed-forward networks. It is smaller with squared ReLUs, whose values are larger than
 * those of gated activations. */
static double network_gain(const struct synth *s)
{
    return (glu_gated(&s->a.glu) ? 1 : 0.5) * GAIN / sqrt(2 * (double)s->p->n_layer);
}
static double residual_gain(const struct synth *s) { return GAIN / sqrt(2 * (double)s->p->n_layer); }

static void add_linear(struct synth *s, struct name name, int64_t n_out, int64_t n_in, double std, bool bias)
{
    add_values(s, with(name, ".weight").s, n_out, n_in, normal(0, std));
    if (bias) add_values(s, with(name, ".bias").s, n_out, 0, normal(0, 0.1));
}

/* Adds the norm of queries. If attention has no scale, the weight of this norm is the scale of the softmax. */
static void add_query_norm(struct synth *s, struct name name, int64_t n, const struct attn_arch *h)
{
    const double mean = s->a.norm_plus_one ? 0 : h->scale == 1.0f ? spread(h->head_dim) : 1;
    add_values(s, with(name, ".weight").s, n, 0, normal(mean, mean > 0 ? mean / 10 : 0.1));
}

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

/* Adds the tensors of a matrix [out, in], or of a stack, in a layout. kind: the kind of random values of each tensor of
 * the layout; draw: their other parameters. If a matrix has one scale, a stack also has only one. */
static void add_layout(struct synth *s, struct name name, const struct stored_layout *l, int ndim, const int64_t *shape,
                       const enum random_kind *kind, struct random_weights draw)
{
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    s->n_params += n;
    for (int p = 0; p < PLANES; p++) {
        const struct stored_tensor *t = &l->plane[p];
        if (!t->suffix) continue;
        draw.kind = *kind++;
        add_as(s, with(name, t->suffix).s, stored_entry(t, t->rows ? ndim : 2, shape), draw);
    }
}

/* Adds a matrix in the published format of DeepSeek-V4, FP8 with an exponent per block of 128 x 128; bf16 if another
 * format was chosen for the experts. */
static void add_blocks(struct synth *s, struct name name, int64_t n_out, int64_t n_in, double std)
{
    if (!as_published(s)) {
        add_linear(s, name, n_out, n_in, std, false);
        return;
    }
    add_layout(s, with(name, ".weight"), &stored_as_fp8_blocks, 2, (int64_t[]){n_out, n_in},
               (enum random_kind[]){RANDOM_FP8, RANDOM_FILL},
               (struct random_weights){.byte = random_weights_exponent(std)});
}

/* Adds the matrices that compress tokens to entries: pooled values, their gates, and a bias for each token's place in
 * an entry. width: of an entry; twice that if entries overlap. */
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
               spread(c->n_group * c->o_lora) * residual_gain(s));
    add_f32(s, layer_name(s, layer, "self_attn.sinks").s, n_head, 0, 0, 0.5);
    if (c->kind[layer] == COMPRESS_NONE) return;
    add_compressor(s, layer, "self_attn.compressor", ratio, head, sparse ? 2 * head : head);
    if (!sparse) return;
    add_compressor(s, layer, indexer, ratio, c->index_dim, 2 * c->index_dim);
    add_blocks(s, with(layer_name(s, layer, indexer), ".q_b_proj"), c->n_index * c->index_dim, c->q_lora,
               spread(c->q_lora));
    add_linear(s, with(layer_name(s, layer, indexer), ".scorer.weights_proj"), c->n_index, d, spread(d), false);
}

/* Adds the tensors that mix the residual streams once: before a mixer, before a feed-forward network, or in the head.
 * Random bases give the streams different weights. */
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
    add_linear(s, layer_name(s, layer, "self_attn.o_proj"), d, o, spread(o) * residual_gain(s), a->out_bias);
}

/* Adds gated DeltaNet. With A_log around -3 a state decays by a factor of about 0.95 per token. */
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
    add_linear(s, layer_name(s, layer, "linear_attn.out_proj"), d, v, spread(v) * residual_gain(s), false);
    add(s, layer_name(s, layer, "linear_attn.conv1d.weight").s, DT_BF16, 3, (int64_t[]){c, 1, taps},
        normal(0, spread(taps)));
    s->n_params += c * taps;
    add_values(s, layer_name(s, layer, "linear_attn.A_log").s, h->n_value, 0, normal(-3, 1));
    add_values(s, layer_name(s, layer, "linear_attn.dt_bias").s, h->n_value, 0, normal(0, 0.5));
    add_values(s, layer_name(s, layer, "linear_attn.norm.weight").s, h->value_dim, 0, normal(1, 0.1));
}

/* The place of a Linear. */
static struct name linear_name(const struct synth *s, int64_t layer, enum lora_target t)
{
    char module[LORA_MODULE_TEXT];
    lora_target_module(s->a.names, t, module);
    return layer_name(s, layer, module);
}

/* Adds Mamba-2. A_log and dt_bias are drawn as in transformers: decays from 1 to N, steps from 0.001 to 0.1. */
static void add_mamba(struct synth *s, int64_t layer)
{
    const struct mamba_arch *m = &s->a.mamba;
    const int64_t d = s->a.d_model, v = m->n_head * m->head_dim, c = v + 2 * m->n_group * m->state;
    const struct name conv = layer_name(s, layer, "mixer.conv1d");
    add_linear(s, linear_name(s, layer, LORA_IN), v + c + m->n_head, d, spread(d), m->bias);
    add_linear(s, linear_name(s, layer, LORA_OUT), d, v, spread(v) * residual_gain(s), m->bias);
    add(s, with(conv, ".weight").s, DT_BF16, 3, (int64_t[]){c, 1, m->n_tap}, normal(0, spread(m->n_tap)));
    if (m->conv_bias) add_values(s, with(conv, ".bias").s, c, 0, normal(0, 0.1));
    s->n_params += c * m->n_tap;
    add_f32(s, layer_name(s, layer, "mixer.A_log").s, m->n_head, 0, log((double)m->n_head) - 1, 0.8);
    add_f32(s, layer_name(s, layer, "mixer.dt_bias").s, m->n_head, 0, -4.6, 1.3);
    add_f32(s, layer_name(s, layer, "mixer.D").s, m->n_head, 0, 1, 0.1);
    add_values(s, layer_name(s, layer, "mixer.norm.weight").s, v, 0, normal(1, 0.1));
}

static void add_shortconv(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const int64_t d = a->d_model, taps = a->conv.n_tap;
    add_linear(s, layer_name(s, layer, "conv.in_proj"), 3 * d, d, spread(d), a->conv.bias);
    add(s, layer_name(s, layer, "conv.conv.weight").s, DT_BF16, 3, (int64_t[]){d, 1, taps}, normal(0, spread(taps)));
    s->n_params += d * taps;
    if (a->conv.bias) add_values(s, layer_name(s, layer, "conv.conv.bias").s, d, 0, normal(0, 0.1));
    add_linear(s, layer_name(s, layer, "conv.out_proj"), d, d, spread(d) * residual_gain(s), a->conv.bias);
}

static void add_attention(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const struct attn_arch *h = arch_attn(a, layer);
    const int64_t d = a->d_model, q = h->n_head * h->head_dim, kv = h->n_kv * h->head_dim;
    const bool whole = a->qk_norm == QK_NORM_WHOLE;
    const char *const *own = a->names->qk_norm;
    add_linear(s, linear_name(s, layer, LORA_Q), arch_q_rows(a, layer), d, spread(d), a->attn_bias);
    add_linear(s, linear_name(s, layer, LORA_K), kv, d, spread(d), a->attn_bias);
    if (!h->values_are_keys) add_linear(s, linear_name(s, layer, LORA_V), kv, d, spread(d), a->attn_bias);
    add_linear(s, linear_name(s, layer, LORA_O), d, q, spread(q) * residual_gain(s), a->out_bias);
    if (a->sinks) add_values(s, layer_name(s, layer, "self_attn.sinks").s, h->n_head, 0, normal(0, 0.5));
    if (a->qk_norm == QK_NORM_NONE) return;
    add_query_norm(s, layer_name(s, layer, own[0] ? own[0] : "self_attn.q_norm"), whole ? q : h->head_dim, h);
    add_norm(s, layer_name(s, layer, own[1] ? own[1] : "self_attn.k_norm"), whole ? kv : h->head_dim);
}

/* Adds one expert's matrix as bitsandbytes stores a Linear. absmax and quant_map are f32 and do not count as
 * parameters. */
static void add_nf4(struct synth *s, struct name name, const struct matrix *p)
{
    const struct name weight = with(name, ".weight");
    const struct stored_layout *l = &stored_as_nf4;
    const int64_t n = p->n_out * p->n_in, state = (int64_t)strlen(p->state);
    add(s, with(weight, l->data.suffix).s, DT_U8, 2, (int64_t[]){n / 2, 1},
        (struct random_weights){.kind = RANDOM_NF4});
    add(s, with(weight, l->absmax.suffix).s, DT_F32, 1, (int64_t[]){n / NF4_BLOCK},
        (struct random_weights){.kind = RANDOM_ABSMAX, .std = p->std});
    add(s, with(weight, l->code.suffix).s, DT_F32, 1, (int64_t[]){16}, copied(quant_nf4_code));
    add(s, with(weight, l->nested_offset.suffix).s, DT_U8, 1, (int64_t[]){state}, copied(p->state));
    s->n_params += n;
}

static struct random_weights draw_of(const struct matrix *p)
{
    return (struct random_weights){.std = p->std, .bytes = &p->scale};
}

static void add_per_expert(struct synth *s, int64_t layer, const struct matrix *p)
{
    const size_t before = strcspn(p->pattern, "#");
    const struct form *f = s->form;
    char rest[192];
    for (int64_t x = 0; x < s->a.n_exp; x++) {
        snprintf(rest, sizeof(rest), "%.*s%lld%s", (int)before, p->pattern, (long long)x, p->pattern + before + 1);
        const struct name name = layer_name(s, layer, rest);
        if (!f->layout)
            add_nf4(s, name, p);
        else if (f->layout == &stored_as_fp8 && as_published(s))
            add_blocks(s, name, p->n_out, p->n_in, p->std);
        else
            add_layout(s, with(name, ".weight"), f->layout, 2, (int64_t[]){p->n_out, p->n_in}, f->kind, draw_of(p));
        if (s->a.expert_bias) add_values(s, with(name, ".bias").s, p->n_out, 0, normal(0, 0.1));
    }
}

/* For gpt-oss: adds one tensor of all experts, [E, in, out] (with MXFP4 [E, out, in]), and their biases. */
static void add_stack(struct synth *s, int64_t layer, const struct matrix *p)
{
    const int64_t e = s->a.n_exp;
    const struct form *f = s->form;
    const struct name name = layer_name(s, layer, p->stack);
    const int64_t out_in[] = {e, p->n_out, p->n_in}, in_out[] = {e, p->n_in, p->n_out};
    add_layout(s, name, f->stack, 3, f->stack == &stored_as_mxfp4_stack ? out_in : in_out, f->kind, draw_of(p));
    add_values(s, with(name, "_bias").s, e, p->n_out, normal(0, 0.1));
}

static const struct form forms[] = {{.name = "mxfp4",
                                     .format = WF_MXFP4,
                                     .layout = &stored_as_mxfp4,
                                     .stack = &stored_as_mxfp4_stack,
                                     .kind = {RANDOM_NIBBLES, RANDOM_E8M0},
                                     .published = true,
                                     .names = true,
                                     .blocks = true},
                                    {.name = "nf4", .format = WF_NF4},
                                    {.name = "bf16",
                                     .format = WF_BF16,
                                     .layout = &stored_as_dense,
                                     .stack = &stored_as_dense,
                                     .kind = {RANDOM_NORMAL},
                                     .names = true},
                                    {.name = "nvfp4",
                                     .format = WF_NVFP4,
                                     .layout = &stored_as_nvfp4,
                                     .stack = &stored_as_nvfp4_stack,
                                     .kind = {RANDOM_NIBBLES, RANDOM_E4M3, RANDOM_BYTES}},
                                    {.name = "fp8",
                                     .format = WF_FP8,
                                     .layout = &stored_as_fp8,
                                     .kind = {RANDOM_FP8, RANDOM_BYTES},
                                     .names = true,
                                     .blocks = true}};

const struct form *synth_tensors_form(int64_t i) { return i < MT_LEN(forms) ? &forms[i] : NULL; }

/* Whether experts have the layout of preset_family.stacked, which has gate and up in one tensor. */
static bool is_stacked(const struct synth *s) { return s->p->family->stacked && weight_is_dense(s->form->format); }

static void add_rows(struct synth *s, int64_t layer, const struct matrix *p)
{
    const int64_t e = s->a.n_exp;
    const bool turned = s->a.transposed_stacks;
    add(s, layer_name(s, layer, p->stack).s, DT_BF16, 3,
        (int64_t[]){e, turned ? p->n_in : p->n_out, turned ? p->n_out : p->n_in}, normal(0, p->std));
    s->n_params += e * p->n_out * p->n_in;
}

static void add_shared(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    for (enum lora_target t = glu_gated(&a->glu) ? LORA_SHARED_GATE : LORA_SHARED_UP; t <= LORA_SHARED_DOWN; t++) {
        const bool down = t == LORA_SHARED_DOWN;
        const int64_t n_out = down ? a->d_model : a->d_shared, n_in = down ? a->d_shared : a->d_model;
        add_blocks(s, linear_name(s, layer, t), n_out, n_in, spread(n_in) * (down ? network_gain(s) : 1));
    }
    if (a->shared_gate)
        add_values(s, with(layer_name(s, layer, a->names->shared_gate), ".weight").s, 1, a->d_model,
                   normal(0, spread(a->d_model)));
}

static void add_dense(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    const int64_t d = a->d_model, f = a->d_dense;
    if (glu_gated(&a->glu)) add_linear(s, linear_name(s, layer, LORA_DENSE_GATE), f, d, spread(d), false);
    add_linear(s, linear_name(s, layer, LORA_DENSE_UP), f, d, spread(d), false);
    add_linear(s, linear_name(s, layer, LORA_DENSE_DOWN), d, f, spread(f) * network_gain(s), false);
}

static void add_experts(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    char bias[ARCH_NAME];
    const struct name router = layer_name(s, layer, a->names->router[0]);
    const double std = a->names->router_scale ? 1 : spread(a->d_model); /* its input is divided by sqrt(D) */
    const struct random_weights rows = {.kind = RANDOM_ROWS, .std = std, .row = a->d_model};
    add_values(s, with(router, ".weight").s, a->n_exp, a->d_model, rows); /* rows with different norms: uneven loads */
    if (layer < a->n_hash)
        add(s, with(router, ".tid2eid").s, DT_I64, 2, (int64_t[]){a->vocab, a->top_k},
            (struct random_weights){.kind = RANDOM_HASH, .row = a->top_k, .n_exp = a->n_exp});
    arch_router_bias(a->names, a->names->router[0], bias);
    if (a->router_bias && layer >= a->n_hash) add_values(s, layer_name(s, layer, bias).s, a->n_exp, 0, normal(0, 0.1));
    for (int i = 0; i < s->n_products; i++)
        if (a->transposed_experts && s->form->stack)
            add_stack(s, layer, &s->products[i]);
        else if (is_stacked(s))
            add_rows(s, layer, &s->products[i]);
        else
            add_per_expert(s, layer, &s->products[i]);
    if (a->d_shared) add_shared(s, layer);
    if (a->names->router_scale)
        add_values(s, layer_name(s, layer, a->names->router_scale).s, a->d_model, 0, normal(1, 0.1));
    if (a->names->gate_scale) add_values(s, layer_name(s, layer, a->names->gate_scale).s, a->n_exp, 0, normal(1, 0.1));
    if (!a->d_latent) return;
    add_linear(s, linear_name(s, layer, LORA_LATENT_DOWN), a->d_latent, a->d_model, spread(a->d_model), false);
    add_linear(s, linear_name(s, layer, LORA_LATENT_UP), a->d_model, a->d_latent, spread(a->d_latent), false);
}

/* Adds the norms from `from` on, up to another that is not added. */
static void add_norms(struct synth *s, int64_t layer, enum norm_name from, enum norm_name end)
{
    for (enum norm_name n = from; n < end; n++) {
        const char *name = arch_norm_name(&s->a, n);
        if (name) add_norm(s, layer_name(s, layer, name), s->a.d_model);
    }
}

static void add_layer(struct synth *s, int64_t layer)
{
    const struct arch *a = &s->a;
    if (a->mixer[layer]) add_norms(s, layer, NORM_MIXER, NORM_MIXER_POST);
    if (a->hyper.n_stream) {
        const int64_t n = a->hyper.n_stream;
        add_hyper(s, layer_name(s, layer, "attn_hc."), "", (2 + n) * n, 3);
        add_hyper(s, layer_name(s, layer, "ffn_hc."), "", (2 + n) * n, 3);
    }
    if (a->mixer[layer] == &mixer_deltanet)
        add_delta(s, layer);
    else if (a->mixer[layer] == &mixer_shortconv)
        add_shortconv(s, layer);
    else if (a->mixer[layer] == &mixer_compressed)
        add_compressed(s, layer);
    else if (a->mixer[layer] == &mixer_mamba)
        add_mamba(s, layer);
    else if (a->mixer[layer])
        (a->mla.kv_lora ? add_latent : add_attention)(s, layer);
    if (a->mixer[layer]) add_norms(s, layer, NORM_MIXER_POST, NORM_FFN);
    if (!a->ffn[layer]) return;
    add_norms(s, layer, NORM_FFN, NORM_NAMES);
    if (!a->dense[layer]) add_experts(s, layer);
    if (a->dense[layer] || a->ffn[layer] == &ffn_parallel) add_dense(s, layer);
    if (a->names->layer_scale) add_values(s, layer_name(s, layer, a->names->layer_scale).s, 1, 0, normal(1, 0.1));
}

static void add_product(struct synth *s, const char *pattern, const char *stack, int64_t n_out, int64_t n_in,
                        double std)
{
    struct matrix *p = &s->products[s->n_products++];
    *p = (struct matrix){.pattern = pattern, .stack = stack, .n_out = n_out, .n_in = n_in, .std = std};
    p->scale = random_weights_scale(s->form->format, std);
    snprintf(p->state, sizeof(p->state),
             "{\"quant_type\": \"nf4\", \"blocksize\": %d, \"dtype\": \"bfloat16\", \"shape\": [%lld, %lld]}",
             NF4_BLOCK, (long long)n_out, (long long)n_in);
}

static void add_products(struct synth *s)
{
    const struct arch *a = &s->a;
    const int64_t d = arch_expert_cols(a), f = a->d_ff;
    const struct tensor_names *n = a->names;
    const bool both = !n->up || is_stacked(s);
    snprintf(s->stacks[0], sizeof(s->stacks[0]), "%s.gate_up_proj", lora_experts_module(n));
    snprintf(s->stacks[1], sizeof(s->stacks[1]), "%s.down_proj", lora_experts_module(n));
    if (n->gate) add_product(s, n->gate, s->stacks[0], both ? 2 * f : f, d, spread(d));
    if (!both) add_product(s, n->up, NULL, f, d, spread(d));
    add_product(s, n->down, s->stacks[1], d, f, spread(f) * network_gain(s));
}

void synth_tensors_add(struct synth *s)
{
    const struct arch *a = &s->a;
    add_products(s);
    struct name embed, norm;
    const struct tensor_names *n = a->names;
    snprintf(embed.s, sizeof(embed.s), "%s%s.weight", prefix(s), n->embed ? n->embed : "embed_tokens");
    snprintf(norm.s, sizeof(norm.s), "%s%s", prefix(s), n->last_norm ? n->last_norm : "norm");
    add_values(s, embed.s, a->vocab, a->d_model, normal(0, a->tied ? spread(a->d_model) : 1)); /* tied: the head */
    for (int64_t l = 0; l < s->n_layer; l++) add_layer(s, l);
    add_norm(s, norm, a->d_model);
    if (a->hyper.n_stream) add_hyper(s, (struct name){"model.hc_head."}, "hc_", a->hyper.n_stream, 1);
    if (!a->tied) add_values(s, "lm_head.weight", a->vocab, a->d_model, normal(0, spread(a->d_model)));
}
