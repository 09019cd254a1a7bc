/* gguf_items.c - the tensors of each family. Source: llama.cpp, src/models/{openai-moe,qwen3moe,olmoe,llama,
 * minimax-m2,glm4-moe,deepseek2,lfm2}.cpp: load_arch_tensors for the names, build_arch_graph for values that its code
 * fixes. */
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
    {"lfm2_moe", "ffn_norm", ROUTER_SIGMOID_CHOSEN, QK_NORM_HEAD, QK_NORM_HEAD, false, true},
};

static const struct family *family_of(const struct arch *a)
{
    for (int64_t i = 0; i < MT_LEN(families); i++)
        if (!strcmp(families[i].name, a->family)) return &families[i];
    return NULL;
}

static int differs(const char *what, struct err *err)
{
    return err_set(err, "llama.cpp computes this family with other %s: export merged-bf16", what);
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

static bool is_lfm2(const struct arch *a) { return !strcmp(a->family, "lfm2_moe"); }

/* No key names these values of LFM2. */
static int check_lfm2(const struct arch *a, struct err *err)
{
    if (a->conv.bias || a->conv.n_tap < 2) return differs("convolutions (conv_bias, conv_L_cache)", err);
    if (a->router.kind != ROUTER_SIGMOID_CHOSEN || a->router.scale != 1)
        return differs("weights of the chosen experts (norm_topk_prob, routed_scaling_factor)", err);
    return 0;
}

int gguf_items_check(const struct arch *a, struct err *err)
{
    const struct family *f = family_of(a);
    if (!f)
        return err_set(
            err,
            "--to gguf-model writes gpt_oss, qwen3_moe, olmoe, mixtral, minimax_m2, glm4_moe, glm4_moe_lite, "
            "deepseek_v3 and lfm2_moe, not %s: export merged-bf16 and convert it with llama.cpp's "
            "convert_hf_to_gguf.py",
            a->family);
    if (is_lfm2(a) && check_lfm2(a, err)) return -1;
    const bool either = f->router == ROUTER_SIGMOID_CHOSEN && a->router.kind == ROUTER_SIGMOID; /* a key says which */
    if (a->router.kind != f->router && !either) return differs("weights of the chosen experts (norm_topk_prob)", err);
    if (a->qk_norm != f->qk_norm && a->qk_norm != f->other_norm) return differs("norms of queries and keys", err);
    if (a->mla.kv_lora && (!a->mla.q_lora || !a->mla.interleaved || a->attn_bias || a->out_bias))
        return differs("latent attention (q_lora_rank, rope_interleave, attention_bias)", err);
    for (int k = 0; k < ATTN_KINDS; k++)
        if (!has_usual_yarn(&a->rope[k])) return differs("factors of YaRN (mscale, attention_factor)", err);
    if (!has_windows(a, f)) return differs("sliding windows", err);
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
static void add_conv(struct gguf_items *list, int64_t layer, const struct arch *a)
{
    add_vector(list, layer, offsetof(struct layer_weights, shortconv.conv), a->conv.n_tap, "shortconv.conv", ".weight");
    list->items[list->n - 1].n_row = a->d_model;
}
#define VECTOR(list, layer, field, n, name, end)                                                                       \
    add_vector(list, layer, offsetof(struct layer_weights, field), n, name, end)

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

/* Adds kv_b, in F16 instead of a block type: its keys are transposed, so blocks of the file would not be blocks of rows
 * in memory. */
static void add_kv_b(struct gguf_items *list, const struct arch *a, struct gguf_item item)
{
    const int64_t n_head = a->attn[0].n_head;
    if (item.type != GGML_F32) item.type = GGML_F16;
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
    case LORA_DOWN: return "ffn_down_exps";
    case LORA_Q_A: return "attn_q_a";
    case LORA_Q_B: return "attn_q_b";
    case LORA_KV_A: return "attn_kv_a_mqa";
    default: return gguf_names_matrix(a, t);
    }
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
                             .type = type_of(mxfp4 ? GGML_MXFP4 : matrices, p->n_in)};
    for (int k = 0; k < p->n_target; item.first += p->rows[k++]) {
        const enum lora_target t = p->target[k];
        const bool q_or_k = t == LORA_Q || t == LORA_K, qkv = q_or_k || t == LORA_V;
        const bool bias = p->experts ? a->expert_bias : qkv ? a->attn_bias : t == LORA_O && a->out_bias;
        item.target = t;
        item.n_from = item.n_row = p->rows[k];
        item.rows = GGUF_ROWS_ALL;
        if (t == LORA_UP) {
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
        if (q_or_k && !strcmp(a->family, "mixtral")) item.rows = GGUF_ROWS_ROTATED;
        item.head = arch_attn(a, layer)->head_dim;
        add_rows(list, item, matrix_name(a, t), bias);
    }
}

static void add_layer(struct gguf_items *list, const struct arch *a, int64_t l, enum ggml_type matrices)
{
    const struct attn_arch *h = arch_attn(a, l);
    struct product p[LAYER_PRODUCTS];
    const bool whole = a->qk_norm == QK_NORM_WHOLE;
    VECTOR(list, l, attn_norm, a->d_model, "attn_norm", ".weight");
    VECTOR(list, l, ffn_norm, a->d_model, family_of(a)->ffn_norm, ".weight");
    const bool conv = a->mixer[l] == &mixer_shortconv;
    if (conv) add_conv(list, l, a);
    if (a->qk_norm != QK_NORM_NONE && !conv) {
        VECTOR(list, l, attention.q_norm, (whole ? h->n_head : 1) * h->head_dim, "attn_q_norm", ".weight");
        VECTOR(list, l, attention.k_norm, (whole ? h->n_kv : 1) * h->head_dim, "attn_k_norm", ".weight");
    }
    if (a->mla.kv_lora) {
        VECTOR(list, l, mla.q_norm, a->mla.q_lora, "attn_q_a_norm", ".weight");
        VECTOR(list, l, mla.kv_norm, a->mla.kv_lora, "attn_kv_a_norm", ".weight");
    }
    if (a->sinks) VECTOR(list, l, attention.sinks, h->n_head, "attn_sinks", ".weight");
    layer_products(a, l, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        if (p[i].n_out) add_product(list, a, l, &p[i], matrices);
    if (!arch_is_routed(a, l)) return;
    add(list,
        (struct gguf_item){.kind = GGUF_ROUTER,
                           .layer = l,
                           .at = offsetof(struct layer_weights, router),
                           .target = LORA_TARGETS,
                           .n_exp = 1,
                           .n_row = a->n_exp,
                           .n_from = a->n_exp,
                           .n_out = a->n_exp,
                           .n_col = a->d_model},
        "ffn_gate_inp", ".weight");
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

int64_t gguf_items_row(const struct gguf_item *item, int64_t i)
{
    const int64_t d = item->head;
    switch (item->rows) {
    case GGUF_ROWS_ALL: break;
    case GGUF_ROWS_EVEN: return 2 * i;
    case GGUF_ROWS_ODD: return 2 * i + 1;
    case GGUF_ROWS_SECOND: return item->n_from / 2 + i;
    case GGUF_ROWS_ROTATED: return i / d * d + i % 2 * (d / 2) + i % d / 2;
    case GGUF_ROWS_KEYS: return i / item->part * d + i % item->part;
    case GGUF_ROWS_VALUES: return i / item->part * d + d - item->part + i % item->part;
    }
    return i;
}

void gguf_items_transpose(const struct gguf_item *item, bool back, float *values)
{
    const int64_t n = item->n_row * item->n_col, rows = back ? item->n_col : item->part,
                  cols = back ? item->part : item->n_col;
    if (item->rows != GGUF_ROWS_KEYS) return;
    float *from = mem_array(n, sizeof(*from));
    memcpy(from, values, (size_t)n * sizeof(*from));
    for (int64_t at = 0; at < n; at += rows * cols)
        for (int64_t i = 0; i < rows; i++)
            for (int64_t k = 0; k < cols; k++) values[at + k * rows + i] = from[at + i * cols + k];
    mem_free(from);
}

/* A bias of one matrix is [n_row], of experts [n_exp, n_row]. */
struct gguf_tensor gguf_items_tensor(const struct gguf_item *item)
{
    struct gguf_tensor t = {.name = item->name, .type = item->type};
    const bool vector = item->kind == GGUF_VECTOR || item->kind == GGUF_NORM;
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
