/* arch_sizes.c - sizes that follow from struct arch, and which tensors and rows belong to it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/layer.h"

struct ffn_size arch_ffn(const struct arch *a, int64_t layer)
{
    return a->dense[layer] ? (struct ffn_size){1, 1, a->d_dense} : (struct ffn_size){a->n_exp, a->top_k, a->d_ff};
}

bool arch_is_other_part(const char *name)
{
    static const char *const parts[] = {"model.visual.",
                                        "visual.",
                                        "mtp.",
                                        "vision_tower.",
                                        "mm_projector.",
                                        "multi_modal_projector.",
                                        "model.vision_tower.",
                                        "model.embed_vision.",
                                        "model.audio_tower.",
                                        "model.embed_audio."};
    for (int i = 0; i < MT_LEN(parts); i++)
        if (!strncmp(name, parts[i], strlen(parts[i]))) return true;
    return false;
}

bool arch_is_prediction(const struct arch *a, const char *name)
{
    const int64_t layer = !strncmp(name, "model.layers.", 13) ? strtoll(name + 13, NULL, 10) : 0;
    return layer >= a->n_layer && layer < a->n_layer + a->n_mtp;
}

int64_t arch_stored_row(const struct row_order *o, int64_t row)
{
    int64_t group = 0, before = 0;
    if (!o->n_group) return row;
    for (int i = 0; i < ROW_PARTS; i++) group += o->part[i];
    for (int i = 0; i < ROW_PARTS; before += o->part[i++]) {
        const int64_t n = o->n_group * o->part[i];
        if (row < n) return row / o->part[i] * group + before + row % o->part[i];
        row -= n;
    }
    MT_REQUIRE(false, "row %lld is past the parts", (long long)row);
}

int64_t arch_row_in_memory(const struct row_order *o, int64_t row)
{
    int64_t group = 0, first = 0;
    if (!o->n_group) return row;
    for (int i = 0; i < ROW_PARTS; i++) group += o->part[i];
    int64_t in_group = row % group;
    for (int i = 0; i < ROW_PARTS; first += o->n_group * o->part[i++]) {
        if (in_group < o->part[i]) return first + row / group * o->part[i] + in_group;
        in_group -= o->part[i];
    }
    MT_REQUIRE(false, "row %lld is past the parts", (long long)row);
}

int64_t arch_stream_cols(const struct arch *a) { return MT_MAX(a->hyper.n_stream, 1) * a->d_model; }

const struct attn_arch *arch_attn(const struct arch *a, int64_t layer) { return &a->attn[a->attn_of[layer]]; }

int64_t arch_qkv_cols(const struct arch *a, int64_t layer)
{
    const struct attn_arch *h = arch_attn(a, layer);
    return (h->n_head + 2 * h->n_kv) * h->head_dim;
}

int64_t arch_q_rows(const struct arch *a, int64_t layer)
{
    const struct attn_arch *h = arch_attn(a, layer);
    return (a->attn_gate ? 2 : 1) * h->n_head * h->head_dim;
}

void arch_router_bias(const struct tensor_names *n, const char *router, char name[ARCH_NAME])
{
    const char *bias = n->router_bias ? n->router_bias : ".bias", *dot = strrchr(router, '.');
    const int kept = *bias == '.' ? (int)strlen(router) : (int)(dot + 1 - router);
    snprintf(name, ARCH_NAME, "%.*s%s", kept, router, bias);
}

int64_t arch_expert_cols(const struct arch *a) { return a->d_latent ? a->d_latent : a->d_model; }

bool arch_is_routed(const struct arch *a, int64_t layer) { return a->ffn[layer] && a->ffn[layer]->routed; }

float arch_embed_factor(const struct arch *a, const struct device *dev)
{
    const float f = a->embed_scaled ? (float)sqrt((double)a->d_model) : 1;
    return dev->act_dtype == DT_BF16 || dev->round_bf16 ? bf16_to_f32(f32_to_bf16(f)) : f;
}

const char *arch_norm_name(const struct arch *a, enum norm_name n)
{
    static const char *const common[NORM_NAMES] = {
        [NORM_MIXER] = "input_layernorm", [NORM_FFN] = "post_attention_layernorm"};
    const char *const *own = a->names->norm;
    return own[NORM_MIXER] || own[NORM_FFN] ? own[n] : common[n];
}

bool arch_same_layer(const struct arch *a, int64_t x, int64_t y)
{
    return a->mixer[x] == a->mixer[y] && a->ffn[x] == a->ffn[y] && a->attn_of[x] == a->attn_of[y] &&
           a->compress.kind[x] == a->compress.kind[y] && (x < a->n_hash) == (y < a->n_hash);
}
