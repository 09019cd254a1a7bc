/* gguf_meta.c - see gguf_meta.h. Source: llama.cpp, conversion/base.py (set_gguf_parameters) and the files of the
 * families beside it, src/llama-arch.cpp. */
#include "train/gguf/gguf_meta.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/layer.h"
#include "train/gguf/gguf_items.h"
#include "train/gguf/gguf_names.h"

enum { GATING_SIGMOID = 2, FILE_F32 = 0, FILE_F16 = 1, FILE_Q4_0 = 2, FILE_Q8_0 = 7, FILE_MXFP4 = 38 };

void *gguf_meta_own(struct gguf_meta *m, void *p)
{
    m->owned = mem_reserve(m->owned, &m->cap_owned, m->n_owned + 1, sizeof(*m->owned));
    return m->owned[m->n_owned++] = p;
}

/* The architecture is the text of the first value. */
static struct gguf_value *add(struct gguf_meta *m, const char *key, enum gguf_type type)
{
    char full[128];
    snprintf(full, sizeof(full), "%s%s", key[0] == '.' ? m->values[0].text : "", key);
    m->values = mem_reserve(m->values, &m->cap, m->n + 1, sizeof(*m->values));
    m->values[m->n] = (struct gguf_value){.key = gguf_meta_own(m, mem_strdup(full)), .type = type};
    return &m->values[m->n++];
}

void gguf_meta_u32(struct gguf_meta *m, const char *key, int64_t v) { add(m, key, GGUF_U32)->u32 = (uint32_t)v; }

void gguf_meta_bool(struct gguf_meta *m, const char *key, bool v) { add(m, key, GGUF_BOOL)->u32 = v; }

void gguf_meta_f32(struct gguf_meta *m, const char *key, double v) { add(m, key, GGUF_F32)->f32 = (float)v; }

void gguf_meta_text(struct gguf_meta *m, const char *key, const char *text)
{
    const char *copy = gguf_meta_own(m, mem_strdup(text));
    add(m, key, GGUF_STRING)->text = copy;
}

void gguf_meta_array(struct gguf_meta *m, const char *key, enum gguf_type of, int64_t n, const void *array)
{
    struct gguf_value *v = add(m, key, GGUF_ARRAY);
    v->of = of;
    v->n = n;
    v->array = array;
}

static uint32_t file_type(const struct gguf_meta_model *model)
{
    switch (model->matrices) {
    case GGML_F32: return FILE_F32;
    case GGML_F16: return FILE_F16;
    case GGML_Q4_0: return model->arch->transposed_experts ? FILE_MXFP4 : FILE_Q4_0;
    case GGML_Q8_0: return model->arch->transposed_experts ? FILE_MXFP4 : FILE_Q8_0;
    case GGML_MXFP4: break;
    }
    return FILE_MXFP4;
}

/* Computes mscale_all_dim from softmax_gain, which is (1 + mscale / 10 * ln(factor))^2. */
static double mscale_of(const struct rope_arch *r) { return 10 * (sqrt(r->softmax_gain) - 1) / log(r->factor); }

static void put_rope(struct gguf_meta *m, const struct rope_arch *r)
{
    if (!r->width) return;
    gguf_meta_f32(m, ".rope.freq_base", r->theta);
    gguf_meta_u32(m, ".rope.dimension_count", r->width);
    if (!r->yarn) return;
    gguf_meta_text(m, ".rope.scaling.type", "yarn");
    gguf_meta_f32(m, ".rope.scaling.factor", r->factor);
    gguf_meta_u32(m, ".rope.scaling.original_context_length", r->original_len);
    gguf_meta_f32(m, ".rope.scaling.yarn_beta_fast", r->beta_fast);
    gguf_meta_f32(m, ".rope.scaling.yarn_beta_slow", r->beta_slow);
    if (r->softmax_gain != 1) gguf_meta_f32(m, ".rope.scaling.yarn_log_multiplier", 0.1 * mscale_of(r));
}

void gguf_meta_options(char text[GGUF_OPTIONS_TEXT], const struct arch *a)
{
    const struct rope_arch *r = &a->rope[arch_attn(a, 0)->rope];
    text[0] = 0;
    if (r->yarn && (fabs(r->beta_fast - 32) > 1e-6 || fabs(r->beta_slow - 1) > 1e-6))
        snprintf(text, GGUF_OPTIONS_TEXT, " --yarn-beta-fast %g --yarn-beta-slow %g", r->beta_fast, r->beta_slow);
}

static void put_experts(struct gguf_meta *m, const struct arch *a)
{
    int64_t n_dense = 0;
    while (n_dense < a->n_layer && a->dense[n_dense]) n_dense++;
    gguf_meta_u32(m, ".expert_count", a->n_exp);
    gguf_meta_u32(m, ".expert_used_count", a->top_k);
    gguf_meta_u32(m, ".expert_feed_forward_length", a->d_ff);
    if (a->shared_gate || a->mamba.n_head) gguf_meta_u32(m, ".expert_shared_feed_forward_length", a->d_shared);
    if (a->d_latent) gguf_meta_u32(m, ".moe_latent_size", a->d_latent);
    if (!router_is_sigmoid(&a->router)) return;
    gguf_meta_u32(m, ".expert_gating_func", GATING_SIGMOID);
    gguf_meta_f32(m, ".expert_weights_scale", (double)a->router.scale);
    gguf_meta_bool(m, ".expert_weights_norm", router_divides(&a->router));
    gguf_meta_u32(m, ".expert_group_count", MT_MAX(a->router.n_group, 1));
    gguf_meta_u32(m, ".expert_group_used_count", MT_MAX(a->router.top_group, 1));
    gguf_meta_u32(m, ".leading_dense_block_count", n_dense);
    gguf_meta_u32(m, ".expert_shared_count", a->mamba.n_head ? 1 : a->d_shared / a->d_ff);
}

/* Puts a number for each layer; one number if it is the same in all layers. */
static void put_by_layer(struct gguf_meta *m, const char *key, const struct arch *a,
                         int64_t (*of)(const struct arch *a, int64_t layer))
{
    int32_t *n = gguf_meta_own(m, mem_array(a->n_layer, sizeof(*n)));
    bool same = true;
    for (int64_t l = 0; l < a->n_layer; l++) {
        n[l] = (int32_t)of(a, l);
        same = same && n[l] == n[0];
    }
    if (same)
        gguf_meta_u32(m, key, n[0]);
    else
        gguf_meta_array(m, key, GGUF_I32, a->n_layer, n);
}

static int64_t ffn_width(const struct arch *a, int64_t layer)
{
    return !a->ffn[layer] ? 0 : a->d_dense && !a->mamba.n_head ? a->d_dense : a->d_ff;
}

/* llama.cpp recognises layers with a convolution or a state space, and layers without a mixer, by 0 key heads. */
static int64_t key_heads(const struct arch *a, int64_t layer)
{
    const bool none = !a->mixer[layer] || a->mixer[layer] == &mixer_shortconv || a->mixer[layer] == &mixer_mamba;
    return none ? 0 : arch_attn(a, layer)->n_kv;
}

static int64_t has_window(const struct arch *a, int64_t layer) { return arch_attn(a, layer)->window != 0; }

static void put_heads(struct gguf_meta *m, const struct attn_arch *h)
{
    gguf_meta_u32(m, ".attention.key_length", h->head_dim);
    gguf_meta_u32(m, ".attention.value_length", h->head_dim);
}

/* In llama.cpp latent attention has one head of keys and values. */
static void put_latent(struct gguf_meta *m, const struct mla_arch *a)
{
    gguf_meta_u32(m, ".attention.head_count_kv", 1);
    gguf_meta_u32(m, ".attention.q_lora_rank", a->q_lora);
    gguf_meta_u32(m, ".attention.kv_lora_rank", a->kv_lora);
    gguf_meta_u32(m, ".attention.key_length", a->kv_lora + a->rope);
    gguf_meta_u32(m, ".attention.value_length", a->kv_lora);
    gguf_meta_u32(m, ".attention.key_length_mla", a->nope + a->rope);
    gguf_meta_u32(m, ".attention.value_length_mla", a->value);
}

static void put_delta(struct gguf_meta *m, const struct arch *a)
{
    const struct delta_shape *s = &a->delta.shape;
    const int64_t pairs = a->rope[0].width / 2, third = (pairs + 2) / 3;
    const int32_t sections[] = {(int32_t)third, (int32_t)third, (int32_t)(pairs - 2 * third), 0};
    gguf_meta_u32(m, ".ssm.conv_kernel", a->delta.n_tap);
    gguf_meta_u32(m, ".ssm.state_size", s->key_dim);
    gguf_meta_u32(m, ".ssm.group_count", s->n_key);
    gguf_meta_u32(m, ".ssm.time_step_rank", s->n_value);
    gguf_meta_u32(m, ".ssm.inner_size", s->n_value * s->value_dim);
    gguf_meta_u32(m, ".full_attention_interval", gguf_items_interval(a));
    if (a->delta.fused) return;
    /* of the axes of images; for text all axes have the same position */
    int32_t *axes = gguf_meta_own(m, mem_array(MT_LEN(sections), sizeof(*axes)));
    memcpy(axes, sections, sizeof(sections));
    gguf_meta_array(m, ".rope.dimension_sections", GGUF_I32, MT_LEN(sections), axes);
}

static void put_mamba(struct gguf_meta *m, const struct mamba_arch *a)
{
    gguf_meta_u32(m, ".ssm.conv_kernel", a->n_tap);
    gguf_meta_u32(m, ".ssm.state_size", a->state);
    gguf_meta_u32(m, ".ssm.group_count", a->n_group);
    gguf_meta_u32(m, ".ssm.time_step_rank", a->n_head);
    gguf_meta_u32(m, ".ssm.inner_size", a->n_head * a->head_dim);
}

/* Layers with full attention have other heads and rotary embeddings than those with a window. */
static void put_gemma(struct gguf_meta *m, const struct arch *a)
{
    const struct attn_arch *full = &a->attn[0], *window = &a->attn[1];
    gguf_meta_u32(m, ".attention.key_length_swa", window->head_dim);
    gguf_meta_u32(m, ".attention.value_length_swa", window->head_dim);
    gguf_meta_u32(m, ".attention.sliding_window", window->window);
    put_by_layer(m, ".attention.sliding_window_pattern", a, has_window);
    gguf_meta_u32(m, ".attention.shared_kv_layers", 0);
    gguf_meta_u32(m, ".embedding_length_per_layer_input", 0);
    gguf_meta_f32(m, ".final_logit_softcapping", (double)a->logit_cap);
    gguf_meta_f32(m, ".rope.freq_base", a->rope[full->rope].theta);
    gguf_meta_f32(m, ".rope.freq_base_swa", a->rope[window->rope].theta);
    gguf_meta_u32(m, ".rope.dimension_count", full->head_dim);
    gguf_meta_u32(m, ".rope.dimension_count_swa", a->rope[window->rope].width);
}

static void put_sizes(struct gguf_meta *m, const struct arch *a)
{
    const bool gemma = a->names->layer_scale != NULL;
    const struct attn_arch *h = gemma ? &a->attn[0] : arch_attn(a, 0);
    gguf_meta_u32(m, ".block_count", a->n_layer);
    gguf_meta_u32(m, ".context_length", a->max_len);
    gguf_meta_u32(m, ".embedding_length", a->d_model);
    put_by_layer(m, ".feed_forward_length", a, ffn_width);
    gguf_meta_u32(m, ".attention.head_count", h->n_head);
    if (a->mla.kv_lora) {
        put_latent(m, &a->mla);
    } else {
        put_by_layer(m, ".attention.head_count_kv", a, key_heads);
        put_heads(m, h);
    }
    gguf_meta_f32(m, ".attention.layer_norm_rms_epsilon", (double)a->norm.eps);
    gguf_meta_u32(m, ".vocab_size", a->vocab);
    if (h->window) gguf_meta_u32(m, ".attention.sliding_window", h->window);
    if (gemma)
        put_gemma(m, a);
    else
        put_rope(m, &a->rope[h->rope]);
    put_experts(m, a);
    if (a->conv.n_tap) gguf_meta_u32(m, ".shortconv.l_cache", a->conv.n_tap);
    if (a->delta.shape.n_key) put_delta(m, a);
    if (!a->mamba.n_head) return;
    put_mamba(m, &a->mamba);
    gguf_meta_f32(m, ".attention.layer_norm_epsilon", (double)a->norm.eps); /* required beside that of RMSNorm */
}

void gguf_meta_open(struct gguf_meta *m, const struct gguf_meta_model *model)
{
    *m = (struct gguf_meta){.n = 0};
    gguf_meta_text(m, "general.architecture", gguf_names_arch(model->arch));
    gguf_meta_text(m, "general.type", "model");
    gguf_meta_text(m, "general.name", model->name);
    gguf_meta_u32(m, "general.quantization_version", 2);
    gguf_meta_u32(m, "general.file_type", file_type(model));
    put_sizes(m, model->arch);
}

void gguf_meta_close(struct gguf_meta *m)
{
    for (int64_t i = 0; i < m->n_owned; i++) mem_free(m->owned[i]);
    mem_free(m->owned);
    mem_free(m->values);
    *m = (struct gguf_meta){.n = 0};
}
