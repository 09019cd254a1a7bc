/* export_gguf.c - writes the adapter as a LoRA GGUF with llama.cpp's tensor names and row order.
 *
 * Experts are one tensor per projection, A [E, r, in] and B [E, out, r]. In llama.cpp gate and up are separate; in
 * moetrain they share A. So A is written twice, and the rows of B are split: even and odd for gpt-oss, the two halves
 * otherwise; Gemma-4 keeps one tensor. llama.cpp names Mixtral "llama" and interleaves the two halves of every head of
 * q and k. Value heads of gated DeltaNet have another order (gguf_names_value_row), in rows of B and, for the output
 * projection, columns of A. llama.cpp divides Qwen3-Next's in_proj_qkvz into two tensors, q | k | v and z, and has the
 * other fused matrices as stored. Source: llama.cpp, convert_lora_to_gguf.py,
 * conversion/{llama,gpt_oss,qwen,olmo,glm,deepseek}.py, src/llama-adapter.cpp. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/gguf.h"
#include "train/export/export_job.h"
#include "train/gguf/gguf_names.h"

/* ROWS_VALUES: the last rows are value heads of gated DeltaNet; other rows may precede them. COLUMNS_VALUES: the same
 * for columns of A. ROWS_QKV, ROWS_Z: the two parts of in_proj_qkvz. */
enum rows {
    ROWS_ALL,
    ROWS_EVEN,
    ROWS_ODD,
    ROWS_FIRST,
    ROWS_SECOND,
    ROWS_ROTATED,
    ROWS_VALUES,
    COLUMNS_VALUES,
    ROWS_QKV,
    ROWS_Z
};

struct part {
    const struct lora_param *p;
    enum rows rows; /* which rows of B, in which order; or columns of A */
    char name[64];
};

struct file {
    const struct export *x;
    struct part *parts;
    struct gguf_tensor *tensors;
    int64_t n;
};

static int64_t value_cols(const struct arch *a) { return a->delta.shape.n_value * a->delta.shape.value_dim; }

static int64_t row_count(const struct arch *a, const struct lora_param *p, enum rows rows)
{
    if (rows >= ROWS_EVEN && rows <= ROWS_SECOND) return p->rows / 2;
    return rows == ROWS_QKV ? p->rows - value_cols(a) : rows == ROWS_Z ? value_cols(a) : p->rows;
}

static void add(struct file *f, const struct lora_param *p, const char *matrix, enum rows rows)
{
    struct part *part = &f->parts[f->n];
    struct gguf_tensor *t = &f->tensors[f->n++];
    *part = (struct part){.p = p, .rows = rows};
    snprintf(part->name, sizeof(part->name), "blk.%lld.%s.weight.lora_%c", (long long)p->layer, matrix,
             p->is_b ? 'b' : 'a');
    const int64_t r = f->x->adapter.ad.rank[p->target], n_rows = p->is_b ? row_count(&f->x->run.arch, p, rows) : r;
    const int64_t n_cols = p->is_b ? r : p->cols; /* r without padding: llama.cpp's scale is alpha / r */
    *t = !p->experts ? (struct gguf_tensor){.name = part->name, .ndim = 2, .shape = {n_rows, n_cols}}
                     : (struct gguf_tensor){.name = part->name, .ndim = 3, .shape = {p->n_exp, n_rows, n_cols}};
}

static void add_param(struct file *f, const struct lora_param *p)
{
    const struct arch *a = &f->x->run.arch;
    const bool rotated = !strcmp(a->family, "mixtral");
    enum rows rows = ROWS_ALL;
    switch (p->target) {
    case LORA_UP:
        if (!glu_gated(&a->glu)) {
            add(f, p, "ffn_up_exps", ROWS_ALL);
            return;
        }
        if (gguf_names_fused(a)) {
            add(f, p, "ffn_gate_up_exps", ROWS_ALL);
            return;
        }
        add(f, p, "ffn_gate_exps", a->glu.interleaved ? ROWS_EVEN : ROWS_FIRST);
        add(f, p, "ffn_up_exps", a->glu.interleaved ? ROWS_ODD : ROWS_SECOND);
        return;
    case LORA_DOWN: add(f, p, "ffn_down_exps", ROWS_ALL); return;
    case LORA_Q:
    case LORA_K: rows = rotated ? ROWS_ROTATED : ROWS_ALL; break;
    case LORA_IN_QKV:
    case LORA_IN_Z:
    case LORA_IN_B:
    case LORA_IN_A: rows = ROWS_VALUES; break;
    case LORA_IN_QKVZ:
        add(f, p, "attn_qkv", ROWS_QKV);
        add(f, p, "attn_gate", ROWS_Z);
        return;
    case LORA_OUT: rows = a->delta.fused ? ROWS_ALL : COLUMNS_VALUES; break;
    default: break;
    }
    add(f, p, gguf_names_matrix(a, p->target), rows);
}

/* The number in the checkpoint of row or column i of the file. n: number of rows or columns; the last of them are value
 * heads. */
static int64_t of_values(const struct delta_shape *s, enum lora_target t, int64_t i, int64_t n)
{
    return gguf_names_value_row(s, t == LORA_IN_B || t == LORA_IN_A ? 1 : s->value_dim, i, n);
}

/* The row of the trained B for row i of the written one. */
static int64_t row_of(const struct arch *a, const struct part *part, int64_t i)
{
    const int64_t n = part->p->rows, d = arch_attn(a, part->p->layer)->head_dim;
    switch (part->rows) {
    case ROWS_ALL:
    case COLUMNS_VALUES: break;
    case ROWS_EVEN: return 2 * i;
    case ROWS_ODD: return 2 * i + 1;
    case ROWS_FIRST: return i;
    case ROWS_SECOND: return n / 2 + i;
    case ROWS_ROTATED: return i / d * d + i % 2 * (d / 2) + i % d / 2;
    case ROWS_QKV: return arch_stored_row(&part->p->order, i);
    case ROWS_Z: return arch_stored_row(&part->p->order, n - value_cols(a) + i);
    case ROWS_VALUES: return of_values(&a->delta.shape, part->p->target, i, n);
    }
    return i;
}

static void fill(void *arg, int64_t i, float *out)
{
    const struct file *f = arg;
    const struct arch *a = &f->x->run.arch;
    const struct part *part = &f->parts[i];
    const struct gguf_tensor *t = &f->tensors[i];
    const struct lora_param *p = part->p;
    const int64_t n_rows = t->shape[t->ndim - 2], n_cols = t->shape[t->ndim - 1];
    const struct adapters *ad = &f->x->adapter.ad;
    const float factor = p->is_b ? (float)(ad->alpha_of[p->target] / ad->alpha) : 1; /* the file has one alpha */
    const bool moved = !p->is_b && part->rows == COLUMNS_VALUES;
    for (int64_t e = 0; e < p->n_exp; e++)
        for (int64_t row = 0; row < n_rows; row++, out += n_cols) {
            const float *from = cpu_adapter_at(&f->x->adapter, p, e, p->is_b ? row_of(a, part, row) : row, 0);
            for (int64_t k = 0; k < n_cols; k++)
                out[k] = factor * from[moved ? of_values(&a->delta.shape, p->target, k, n_cols) : k];
        }
}

int64_t export_gguf_bytes(const struct export *x)
{
    int64_t n = 1 << 20;
    for (int64_t i = 0; i < x->adapter.ad.n_params; i++) {
        const struct lora_param *p = &x->adapter.ad.params[i];
        n += 4 * lora_param_count(p) * ((p->target == LORA_UP || p->target == LORA_IN_QKVZ) && !p->is_b ? 2 : 1);
    }
    return n;
}

int export_gguf(struct export *x, struct err *err)
{
    const struct adapters *ad = &x->adapter.ad;
    const char *arch = gguf_names_arch(&x->run.arch);
    struct file f = {.x = x};
    char path[MT_PATH], ranks[LORA_RANKS_TEXT];
    adapters_ranks_text(ad, ranks);
    if (ad->rslora && ranks[0])
        return err_set(err, "a LoRA GGUF has one alpha and cannot express rsLoRA with several ranks "
                            "(lora.rank_pattern): export merged-bf16");
    const struct gguf_value values[] = {
        {.key = "general.architecture", .type = GGUF_STRING, .text = arch},
        {.key = "general.type", .type = GGUF_STRING, .text = "adapter"},
        {.key = "adapter.type", .type = GGUF_STRING, .text = "lora"},
        {.key = "general.quantization_version", .type = GGUF_U32, .u32 = 2},
        {.key = "adapter.lora.alpha",
         .type = GGUF_F32,
         .f32 = (float)(ad->alpha * (ad->rslora ? sqrt((double)ad->r) : 1))},
    };
    f.parts = mem_array(2 * ad->n_params, sizeof(*f.parts));
    f.tensors = mem_array(2 * ad->n_params, sizeof(*f.tensors));
    for (int64_t i = 0; i < ad->n_params; i++) add_param(&f, &ad->params[i]);
    int rc = file_in(path, x->tmp, EXPORT_GGUF_NAME, err);
    if (!rc) rc = gguf_write(path, values, MT_LEN(values), f.tensors, f.n, fill, &f, err);
    mem_free(f.parts);
    mem_free(f.tensors);
    return rc;
}
