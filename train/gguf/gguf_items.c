/* gguf_items.c - the tensors of each family. Source: llama.cpp, src/models/{openai-moe,qwen3moe,olmoe,llama,
 * minimax-m2,glm4-moe,deepseek2,lfm2,qwen3next,qwen35moe,nemotron-h,gemma4}.cpp: load_arch_tensors for the names,
 * build_arch_graph for values that its code fixes. */
#include "train/gguf/gguf_items.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "model/layer.h"
#include "train/gguf/gguf_names.h"

/* What llama.cpp's code for a family fixes. */
struct family {
    const char *name, *ffn_norm;
    enum router_kind router;
    enum qk_norm qk_norm, other_norm;
    bool windows, dense;
};
static const struct family families[] = {
    {"gpt_oss", "post_attention_norm", ROUTER_CHOSEN, QK_NORM_NONE, QK_NORM_NONE, true, false},
    {"qwen3_moe", "ffn_norm", ROUTER_CHOSEN, QK_NORM_HEAD, QK_NORM_HEAD, false, false},
    {"olmoe", "ffn_norm", ROUTER_PROBABILITY, QK_NORM_WHOLE, QK_NORM_WHOLE, false, false},
    {"mixtral", "ffn_norm", ROUTER_CHOSEN, QK_NORM_NONE, QK_NORM_NONE, false, false},
    {"minimax_m2", "ffn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_WHOLE, QK_NORM_WHOLE, false, false},
    {"glm4_moe", "post_attention_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_HEAD, QK_NORM_NONE, false, true},
    {"glm4_moe_lite", "ffn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_NONE, QK_NORM_NONE, false, true},
    {"deepseek_v3", "ffn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_NONE, QK_NORM_NONE, false, true},
    {"kimi_k2", "ffn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_NONE, QK_NORM_NONE, false, true},
    {"lfm2_moe", "ffn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_HEAD, QK_NORM_HEAD, false, true},
    {"qwen3_next", "post_attention_norm", ROUTER_CHOSEN, QK_NORM_HEAD, QK_NORM_HEAD, false, false},
    {"qwen3_5_moe", "post_attention_norm", ROUTER_CHOSEN, QK_NORM_HEAD, QK_NORM_HEAD, false, false},
    {"gemma4", "ffn_norm", ROUTER_CHOSEN, QK_NORM_HEAD, QK_NORM_HEAD, false, false},
    {"nemotron_h", "attn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_NONE, QK_NORM_NONE, false, false},
};

static const struct family *family_of(const struct arch *a)
{
    for (int64_t i = 0; i < MT_LEN(families); i++)
        if (!strcmp(families[i].name, a->family)) return &families[i];
    return NULL;
}

static int differs(const char *what, struct err *err)
{
    return err_set(err, "llama.cpp's code for this family expects other %s than this model has: export merged-bf16",
                   what);
}

/* Whether the layers have the windows that llama.cpp assumes: in gpt-oss layers 0, 2, 4, ...; in other families
 * none. */
static bool has_windows(const struct arch *a, const struct family *f)
{
    for (int64_t l = 0; l < a->n_layer; l++)
        if ((arch_attn(a, l)->window != 0) != (f->windows && l % 2 == 0)) return false;
    return true;
}

/* Dense layers first, then the others. */
static bool has_dense_first(const struct arch *a, const struct family *f)
{
    for (int64_t l = 0; l < a->n_layer; l++)
        if (a->dense[l] && (!f->dense || (l && !a->dense[l - 1]))) return false;
    return true;
}

/* Whether YaRN's scaling of rotated values is that of llama.cpp: 1 + ln(factor) / 10, or 1 with mscale_all_dim. */
static bool has_usual_yarn(const struct rope_arch *r)
{
    const double usual = r->softmax_gain != 1 ? 1 : 1 + 0.1 * log(r->factor);
    return !r->width || !r->yarn || fabs(r->attention_factor - usual) < 1e-6;
}

static bool is_gemma(const struct arch *a) { return !strcmp(a->family, "gemma4"); }
static bool is_lfm2(const struct arch *a) { return !strcmp(a->family, "lfm2_moe"); }

/* Refuses LFM2 models whose settings differ from those that llama.cpp assumes without a key. */
static int check_lfm2(const struct arch *a, struct err *err)
{
    if (a->conv.bias || a->conv.n_tap < 2) return differs("convolutions (conv_bias, conv_L_cache)", err);
    if (a->router.kind != ROUTER_SIGMOID_CHOSEN || a->router.scale != 1)
        return differs("weights of the chosen experts (norm_topk_prob, routed_scaling_factor)", err);
    return 0;
}

int64_t gguf_items_interval(const struct arch *a)
{
    int64_t l = 0;
    while (l < a->n_layer && a->mixer[l] == &mixer_deltanet) l++;
    return l + 1;
}

/* Refuses Qwen3-Next and Qwen3.5 models whose settings differ from those that llama.cpp assumes without a key. */
static int check_delta(const struct arch *a, struct err *err)
{
    const int64_t interval = gguf_items_interval(a);
    for (int64_t l = 0; l < a->n_layer; l++)
        if ((a->mixer[l] == &mixer_attention) != ((l + 1) % interval == 0)) return differs("layers (layer_types)", err);
    if (a->delta.shape.key_dim != a->delta.shape.value_dim)
        return differs("heads of DeltaNet (linear_value_head_dim)", err);
    return a->attn_bias ? differs("biases (attention_bias)", err) : 0;
}

/* Refuses Nemotron-H models whose settings differ from those that llama.cpp assumes. llama.cpp has no minimum of
 * Mamba-2's time step. Models with the published minimum, 0.001, are written: in llama.cpp their states decay up to
 * 0.1 % less per token than in training. */
static int check_mamba(const struct arch *a, struct err *err)
{
    if (a->mamba.bias) return differs("biases (use_bias)", err);
    return a->mamba.dt_min > 0.001 ? differs("steps of Mamba-2 (time_step_min)", err) : 0;
}

/* Refuses Gemma-4 models whose settings differ from those that llama.cpp assumes without a key. */
static int check_gemma(const struct arch *a, struct err *err)
{
    const struct rope_arch *full = &a->rope[a->attn[0].rope], *window = &a->rope[a->attn[1].rope];
    if (!full->n_pair || window->n_pair || window->factor != 1 || window->yarn)
        return differs("rotary embeddings (rope_parameters)", err);
    return a->attn_bias || a->out_bias ? differs("biases (attention_bias)", err) : 0;
}

/* Refuses models whose latent attention differs from that of llama.cpp. llama.cpp does not read q_lora_rank if a model
 * has as many layers as DeepSeek-V2-Lite (27, as Moonlight), GigaChat3 (26) or Kanana-2 (48, with 128256 tokens): it
 * then expects one matrix for queries. */
static int check_latent(const struct arch *a, struct err *err)
{
    const bool one = a->n_layer == 26 || a->n_layer == 27 || (a->n_layer == 48 && a->vocab == 128256);
    if (!(one && a->mla.q_lora) && a->mla.interleaved && !a->attn_bias && !a->out_bias) return 0;
    return differs("latent attention (q_lora_rank, rope_interleave, attention_bias)", err);
}

int gguf_items_check(const struct arch *a, struct err *err)
{
    const struct family *f = family_of(a);
    if (!f)
        return err_set(
            err,
            "--to gguf-model writes gpt_oss, qwen3_moe, olmoe, mixtral, minimax_m2, glm4_moe, glm4_moe_lite, "
            "deepseek_v3, kimi_k2, lfm2_moe, qwen3_next, qwen3_5_moe, nemotron_h and gemma4, not %s: export "
            "merged-bf16 and convert it with llama.cpp's convert_hf_to_gguf.py",
            a->family);
    if (is_lfm2(a) && check_lfm2(a, err)) return -1;
    if (a->delta.shape.n_key && check_delta(a, err)) return -1;
    if (a->mamba.n_head && check_mamba(a, err)) return -1;
    if (is_gemma(a) && check_gemma(a, err)) return -1;
    const bool either = f->router == ROUTER_SIGMOID_CHOSEN && a->router.kind == ROUTER_SIGMOID; /* a key says which */
    if (a->router.kind != f->router && !either) return differs("weights of the chosen experts (norm_topk_prob)", err);
    if (a->qk_norm != f->qk_norm && a->qk_norm != f->other_norm) return differs("norms of queries and keys", err);
    if (a->mla.kv_lora && check_latent(a, err)) return -1;
    for (int k = 0; k < ATTN_KINDS; k++)
        if (!has_usual_yarn(&a->rope[k])) return differs("factors of YaRN (mscale, attention_factor)", err);
    if (!is_gemma(a) && !has_windows(a, f)) return differs("sliding windows", err);
    if (!has_dense_first(a, f)) return differs("dense layers", err);
    if (!strcmp(f->name, "gpt_oss") && !(a->expert_bias && a->router_bias && a->sinks && a->out_bias))
        return differs("biases", err);
    return 0;
}

static struct gguf_item *add(struct gguf_items *list, struct gguf_item item, const char *name, const char *end)
{
    list->items = mem_reserve(list->items, &list->cap, list->n + 1, sizeof(*list->items));
    struct gguf_item *to = &list->items[list->n++];
    *to = item;
    if (item.layer < 0)
        snprintf(to->name, sizeof(to->name), "%s%s", name, end);
    else
        snprintf(to->name, sizeof(to->name), "blk.%lld.%s%s", (long long)item.layer, name, end);
    return to;
}

static void add_vector(struct gguf_items *list, int64_t layer, size_t at, int64_t n, const char *name, const char *end)
{
    add(list,
        (struct gguf_item){
            .kind = GGUF_VECTOR, .layer = layer, .at = at, .target = LORA_TARGETS, .n_exp = 1, .n_row = 1, .n_col = n},
        name, end);
}
#define VECTOR(list, layer, field, n, name, end)                                                                       \
    add_vector(list, layer, offsetof(struct layer_weights, field), n, name, end)

static void add_conv(struct gguf_items *list, int64_t layer, const struct arch *a)
{
    VECTOR(list, layer, shortconv.conv, a->conv.n_tap, "shortconv.conv", ".weight");
    list->items[list->n - 1].n_row = a->d_model;
}

/* Returns whether the file has value heads in another order than the checkpoint. In Qwen3-Next both have the order of
 * the fused matrices. */
static bool moves_heads(const struct arch *a) { return a->delta.shape.n_key && !a->delta.fused; }

/* Sets the order of the last item, which has value heads of d rows, or of d values. */
static void set_heads(const struct gguf_items *list, const struct arch *a, int64_t d)
{
    struct gguf_item *item = &list->items[list->n - 1];
    item->rows = moves_heads(a) ? GGUF_ROWS_HEADS : GGUF_ROWS_ALL;
    item->delta = a->delta.shape;
    item->head = d;
}

static void add_delta(struct gguf_items *list, int64_t layer, const struct arch *a)
{
    const struct delta_shape *s = &a->delta.shape;
    VECTOR(list, layer, deltanet.conv, a->delta.n_tap, "ssm_conv1d", ".weight");
    list->items[list->n - 1].n_row = 2 * s->n_key * s->key_dim + s->n_value * s->value_dim;
    set_heads(list, a, s->value_dim);
    VECTOR(list, layer, deltanet.dt_bias, s->n_value, "ssm_dt", ".bias");
    set_heads(list, a, 1);
    VECTOR(list, layer, deltanet.a_log, s->n_value, "ssm_a", "");
    set_heads(list, a, 1);
    list->items[list->n - 1].decay = true;
    VECTOR(list, layer, deltanet.norm, s->value_dim, "ssm_norm", ".weight");
}

/* llama.cpp multiplies the router's scale by 1 / sqrt(D), memory has the product. */
static void add_gemma(struct gguf_items *list, int64_t layer, const struct arch *a)
{
    VECTOR(list, layer, mixer_post, a->d_model, "post_attention_norm", ".weight");
    VECTOR(list, layer, ffn_post, a->d_model, "post_ffw_norm", ".weight");
    VECTOR(list, layer, parallel.dense_post, a->d_model, "post_ffw_norm_1", ".weight");
    VECTOR(list, layer, parallel.routed, a->d_model, "pre_ffw_norm_2", ".weight");
    VECTOR(list, layer, parallel.routed_post, a->d_model, "post_ffw_norm_2", ".weight");
    VECTOR(list, layer, parallel.gate_scale, a->n_exp, "ffn_down_exps", ".scale");
    VECTOR(list, layer, parallel.router, a->d_model, "ffn_gate_inp", ".scale");
    list->items[list->n - 1].factor = sqrtf((float)a->d_model);
    VECTOR(list, layer, scale, 1, "layer_output_scale", ".weight");
    list->items[list->n - 1].kind = GGUF_NUMBER;
}

static void add_split(struct gguf_items *list, int64_t layer, size_t at, int64_t n_row, int64_t n, const char *name,
                      const char *end)
{
    add_vector(list, layer, at, n / n_row, name, end);
    list->items[list->n - 1].n_row = n_row;
}

static void add_mamba(struct gguf_items *list, int64_t layer, const struct arch *a)
{
    const struct mamba_arch *m = &a->mamba;
    const int64_t n_value = m->n_head * m->head_dim, n_conv = n_value + 2 * m->n_group * m->state;
    const size_t at = offsetof(struct layer_weights, mamba);
    add_split(list, layer, at + offsetof(struct mamba_weights, conv), n_conv, n_conv * m->n_tap, "ssm_conv1d",
              ".weight");
    if (m->conv_bias) VECTOR(list, layer, mamba.conv_bias, n_conv, "ssm_conv1d", ".bias");
    VECTOR(list, layer, mamba.dt_bias, m->n_head, "ssm_dt", ".bias");
    add_split(list, layer, at + offsetof(struct mamba_weights, a_log), m->n_head, m->n_head, "ssm_a", "");
    list->items[list->n - 1].decay = true;
    add_split(list, layer, at + offsetof(struct mamba_weights, d), m->n_head, m->n_head, "ssm_d", "");
    add_split(list, layer, at + offsetof(struct mamba_weights, norm), m->n_group, n_value, "ssm_norm", ".weight");
}

static enum ggml_type type_of(enum ggml_type wanted, int64_t n_col)
{
    return n_col % ggml_layout(wanted)->block ? GGML_F16 : wanted;
}

/* A target's rows, or some of them, and their bias. */
static void add_rows(struct gguf_items *list, struct gguf_item item, const char *name, bool bias)
{
    add(list, item, name, ".weight");
    item.kind = GGUF_BIAS;
    item.type = GGML_F32;
    item.target = LORA_TARGETS;
    if (bias) add(list, item, name, ".bias");
}

static void add_kv_b(struct gguf_items *list, const struct arch *a, struct gguf_item item)
{
    const int64_t n_head = a->attn[0].n_head;
    item.head = a->mla.nope + a->mla.value;
    item.rows = GGUF_ROWS_KEYS;
    item.part = a->mla.nope;
    item.n_row = n_head * item.part;
    add_rows(list, item, "attn_k_b", false);
    item.rows = GGUF_ROWS_VALUES;
    item.part = a->mla.value;
    item.n_row = n_head * item.part;
    add_rows(list, item, "attn_v_b", false);
}

/* llama.cpp's name of a target's matrix, also if llama.cpp does not apply adapters of this matrix. */
static const char *matrix_name(const struct arch *a, enum lora_target t)
{
    switch (t) {
    case LORA_UP: return gguf_names_fused(a) ? "ffn_gate_up_exps" : "ffn_up_exps"; /* fused, or without a gate */
    case LORA_DOWN: return "ffn_down_exps";
    case LORA_Q: return "attn_q";
    case LORA_Q_A: return "attn_q_a";
    case LORA_Q_B: return "attn_q_b";
    case LORA_KV_A: return "attn_kv_a_mqa";
    default: return gguf_names_matrix(a, t);
    }
}

/* Returns F16 if the values of a block in the file would not be adjacent in memory: the file has the keys' part of kv_b
 * transposed, and the columns of DeltaNet's out_proj (value heads) in another order. */
enum ggml_type gguf_items_type(const struct arch *a, const struct product *p, enum ggml_type matrices)
{
    if (p->target[0] == LORA_KV_B) return matrices == GGML_F32 ? GGML_F32 : GGML_F16;
    return type_of(matrices, p->target[0] == LORA_OUT && moves_heads(a) ? a->delta.shape.value_dim : p->n_in);
}

/* Adds in_proj_qkvz of Qwen3-Next, whose rows are q | k | v | z in memory. */
static void add_qkvz(struct gguf_items *list, const struct arch *a, struct gguf_item item)
{
    const int64_t n_value = a->delta.shape.n_value * a->delta.shape.value_dim;
    item.n_from = item.n_row -= n_value;
    add_rows(list, item, "attn_qkv", false);
    item.first = item.n_row;
    item.n_from = item.n_row = n_value;
    add_rows(list, item, "attn_gate", false);
}

static bool is_delta_input(enum lora_target t)
{
    return t == LORA_IN_QKV || t == LORA_IN_Z || t == LORA_IN_B || t == LORA_IN_A;
}

static void add_product(struct gguf_items *list, const struct arch *a, int64_t layer, const struct product *p,
                        enum ggml_type matrices)
{
    const bool mxfp4 = a->transposed_experts && p->experts && ggml_layout(matrices)->block > 1;
    struct gguf_item item = {.kind = GGUF_MATRIX,
                             .layer = layer,
                             .at = p->proj,
                             .n_exp = p->n_exp,
                             .n_col = p->n_in,
                             .n_out = p->n_out,
                             .type = mxfp4 ? type_of(GGML_MXFP4, p->n_in) : gguf_items_type(a, p, matrices),
                             .order = p->order};
    for (int k = 0; k < p->n_target; item.first += p->rows[k++]) {
        const enum lora_target t = p->target[k];
        const bool q_or_k = t == LORA_Q || t == LORA_K, qkv = q_or_k || t == LORA_V;
        const bool bias = p->experts ? a->expert_bias : qkv ? a->attn_bias : t == LORA_O && a->out_bias;
        item.target = t;
        item.n_from = item.n_row = p->rows[k];
        item.rows = GGUF_ROWS_ALL;
        if (t == LORA_UP && glu_gated(&a->glu) && !gguf_names_fused(a)) {
            item.n_row /= 2;
            item.rows = a->glu.interleaved ? GGUF_ROWS_EVEN : GGUF_ROWS_ALL;
            add_rows(list, item, "ffn_gate_exps", bias);
            item.rows = a->glu.interleaved ? GGUF_ROWS_ODD : GGUF_ROWS_SECOND;
            add_rows(list, item, "ffn_up_exps", bias);
            continue;
        }
        if (t == LORA_KV_B) {
            add_kv_b(list, a, item);
            continue;
        }
        if (t == LORA_IN_QKVZ) {
            add_qkvz(list, a, item);
            continue;
        }
        if (t == LORA_IN_BA) item.rows = GGUF_ROWS_STORED;
        if (q_or_k && !strcmp(a->family, "mixtral")) item.rows = GGUF_ROWS_ROTATED;
        item.head = arch_attn(a, layer)->head_dim;
        add_rows(list, item, matrix_name(a, t), bias);
        if (is_delta_input(t)) set_heads(list, a, t == LORA_IN_B || t == LORA_IN_A ? 1 : a->delta.shape.value_dim);
        if (t != LORA_OUT || !moves_heads(a)) continue;
        list->items[list->n - 1].delta = a->delta.shape;
        list->items[list->n - 1].columns = true;
    }
}

/* Adds a matrix [n_row, D] in F32. */
static void add_router(struct gguf_items *list, const struct arch *a, int64_t layer, size_t at, int64_t n_row,
                       const char *name)
{
    const struct gguf_item item = {.kind = GGUF_ROUTER,
                                   .layer = layer,
                                   .at = at,
                                   .target = LORA_TARGETS,
                                   .n_exp = 1,
                                   .n_row = n_row,
                                   .n_from = n_row,
                                   .n_out = n_row,
                                   .n_col = a->d_model};
    add(list, item, name, ".weight");
}

static void add_layer(struct gguf_items *list, const struct arch *a, int64_t l, enum ggml_type matrices)
{
    const struct attn_arch *h = arch_attn(a, l);
    struct product p[LAYER_PRODUCTS];
    const bool whole = a->qk_norm == QK_NORM_WHOLE;
    if (a->mixer[l]) VECTOR(list, l, attn_norm, a->d_model, "attn_norm", ".weight");
    if (a->ffn[l]) VECTOR(list, l, ffn_norm, a->d_model, family_of(a)->ffn_norm, ".weight");
    const bool conv = a->mixer[l] == &mixer_shortconv;
    if (conv) add_conv(list, l, a);
    if (a->mixer[l] == &mixer_deltanet) add_delta(list, l, a);
    if (a->mixer[l] == &mixer_mamba) add_mamba(list, l, a);
    if (is_gemma(a)) add_gemma(list, l, a);
    if (a->qk_norm != QK_NORM_NONE && a->mixer[l] == &mixer_attention) {
        VECTOR(list, l, attention.q_norm, (whole ? h->n_head : 1) * h->head_dim, "attn_q_norm", ".weight");
        VECTOR(list, l, attention.k_norm, (whole ? h->n_kv : 1) * h->head_dim, "attn_k_norm", ".weight");
    }
    if (a->mla.kv_lora) {
        if (a->mla.q_lora) VECTOR(list, l, mla.q_norm, a->mla.q_lora, "attn_q_a_norm", ".weight");
        VECTOR(list, l, mla.kv_norm, a->mla.kv_lora, "attn_kv_a_norm", ".weight");
    }
    if (a->sinks) VECTOR(list, l, attention.sinks, h->n_head, "attn_sinks", ".weight");
    layer_products(a, l, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        if (p[i].n_out) add_product(list, a, l, &p[i], matrices);
    if (!arch_is_routed(a, l)) return;
    add_router(list, a, l, offsetof(struct layer_weights, router), a->n_exp, "ffn_gate_inp");
    if (a->shared_gate) add_router(list, a, l, offsetof(struct layer_weights, shared_gate), 1, "ffn_gate_inp_shexp");
    if (!a->router_bias) return;
    const bool sigmoid = router_is_sigmoid(&a->router);
    VECTOR(list, l, router_bias, a->n_exp, sigmoid ? "exp_probs_b" : "ffn_gate_inp", ".bias");
}

void gguf_items_list(struct gguf_items *list, const struct arch *a, enum ggml_type matrices)
{
    struct gguf_item table = {.kind = GGUF_EMBED,
                              .layer = -1,
                              .target = LORA_TARGETS,
                              .n_exp = 1,
                              .n_row = a->vocab,
                              .n_from = a->vocab,
                              .n_out = a->vocab,
                              .n_col = a->d_model,
                              .type = type_of(matrices, a->d_model)};
    *list = (struct gguf_items){.n = 0};
    add(list, table, "token_embd", ".weight");
    if (is_gemma(a))
        add(list,
            (struct gguf_item){.kind = GGUF_ROPE,
                               .layer = -1,
                               .target = LORA_TARGETS,
                               .n_exp = 1,
                               .n_row = 1,
                               .n_col = a->attn[0].head_dim / 2},
            "rope_freqs", ".weight");
    for (int64_t l = 0; l < a->n_layer; l++) add_layer(list, a, l, matrices);
    add(list,
        (struct gguf_item){
            .kind = GGUF_NORM, .layer = -1, .target = LORA_TARGETS, .n_exp = 1, .n_row = 1, .n_col = a->d_model},
        is_lfm2(a) ? "token_embd_norm" : "output_norm", ".weight");
    table.kind = GGUF_HEAD;
    add(list, table, "output", ".weight");
}

void gguf_items_free(struct gguf_items *list)
{
    mem_free(list->items);
    *list = (struct gguf_items){.n = 0};
}

void gguf_items_rope(const struct arch *a, float *out)
{
    const struct rope_arch *r = &a->rope[a->attn[0].rope];
    for (int64_t i = 0; i < a->attn[0].head_dim / 2; i++) out[i] = i < r->n_pair ? (float)r->factor : 1e30f;
}

int64_t gguf_items_row(const struct gguf_item *item, int64_t i)
{
    const int64_t d = item->head;
    const bool flat = item->kind == GGUF_VECTOR && item->n_row == 1;
    switch (item->rows) {
    case GGUF_ROWS_ALL: break;
    case GGUF_ROWS_EVEN: return 2 * i;
    case GGUF_ROWS_ODD: return 2 * i + 1;
    case GGUF_ROWS_SECOND: return item->n_from / 2 + i;
    case GGUF_ROWS_ROTATED: return i / d * d + i % 2 * (d / 2) + i % d / 2;
    case GGUF_ROWS_KEYS: return i / item->part * d + i % item->part;
    case GGUF_ROWS_VALUES: return i / item->part * d + d - item->part + i % item->part;
    case GGUF_ROWS_HEADS: return gguf_names_value_row(&item->delta, d, i, flat ? item->n_col : item->n_row);
    case GGUF_ROWS_STORED: return arch_row_in_memory(&item->order, i);
    }
    return i;
}

int64_t gguf_items_adapter_row(const struct gguf_item *item, int64_t i)
{
    const int64_t row = gguf_items_row(item, i);
    return item->order.n_group ? arch_stored_row(&item->order, item->first + row) : row;
}

static void transpose(const struct gguf_item *item, bool back, int64_t n, float *to, const float *from)
{
    const int64_t rows = back ? item->n_col : item->part, cols = back ? item->part : item->n_col;
    for (int64_t at = 0; at < n; at += rows * cols)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t k = 0; k < cols; k++) to[at + k * rows + i] = from[at + i * cols + k];
}

static void move_heads(const struct gguf_item *item, bool back, int64_t n, float *to, const float *from)
{
    for (int64_t at = 0; at < n; at += item->n_col)
        for (int64_t k = 0; k < item->n_col; k++) {
            const int64_t memory = gguf_names_value_row(&item->delta, item->delta.value_dim, k, item->n_col);
            to[at + (back ? memory : k)] = from[at + (back ? k : memory)];
        }
}

void gguf_items_columns(const struct gguf_item *item, bool back, int64_t n_row, float *values)
{
    const int64_t n = n_row * item->n_col;
    if (item->rows != GGUF_ROWS_KEYS && !item->columns) return;
    float *from = mem_array(n, sizeof(*from));
    memcpy(from, values, (size_t)n * sizeof(*from));
    (item->columns ? move_heads : transpose)(item, back, n, values, from);
    mem_free(from);
}

/* A value of memory for the file, or back. */
static float vector_value(const struct gguf_item *item, bool back, float v)
{
    const float factor = item->factor != 0 ? item->factor : 1;
    if (item->decay) return back ? logf(-v) : -expf(v);
    return back ? v / factor : v * factor;
}

void gguf_items_vector(const struct gguf_item *item, bool back, float *to, const float *from)
{
    const int64_t n_row = item->n_row > 1 ? item->n_row : item->n_col, n_col = item->n_row > 1 ? item->n_col : 1;
    for (int64_t i = 0; i < n_row; i++) {
        const int64_t memory = gguf_items_row(item, i);
        for (int64_t k = 0; k < n_col; k++)
            to[(back ? memory : i) * n_col + k] = vector_value(item, back, from[(back ? i : memory) * n_col + k]);
    }
}

/* A bias of one matrix is [n_row], of experts [n_exp, n_row]. */
struct gguf_tensor gguf_items_tensor(const struct gguf_item *item)
{
    struct gguf_tensor t = {.name = item->name, .type = item->type};
    const bool vector = item->kind == GGUF_VECTOR || item->kind == GGUF_NUMBER || item->kind == GGUF_NORM ||
                        item->kind == GGUF_ROUTER || item->kind == GGUF_ROPE;
    if (item->kind == GGUF_MATRIX && lora_target_is_stack(item->target)) t.shape[t.ndim++] = item->n_exp;
    if (item->part) {
        const bool keys = item->rows == GGUF_ROWS_KEYS;
        t.ndim = 3;
        t.shape[0] = item->n_row / item->part;
        t.shape[1] = keys ? item->n_col : item->part;
        t.shape[2] = keys ? item->part : item->n_col;
        return t;
    }
    if (item->kind == GGUF_BIAS && item->n_exp > 1) t.shape[t.ndim++] = item->n_exp;
    if (!vector || item->n_row > 1) t.shape[t.ndim++] = item->n_row;
    if (item->kind != GGUF_BIAS) t.shape[t.ndim++] = item->n_col;
    return t;
}
