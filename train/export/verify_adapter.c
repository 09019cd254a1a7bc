/* verify_adapter.c - adapter files read back: PEFT and vLLM directories with the PEFT reader (train/adapter/peft.c),
 * GGUF with a separate reader that uses the names in the file, not the writer's list. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/gguf.h"
#include "train/export/verify.h"
#include "train/gguf/gguf_names.h"

/* ---- per-expert PEFT: gate and up separate ---- */

/* Converts an adapter of rank 2r, A = [A_gate; A_up], B = [B_gate 0; 0 B_up], back to rank r. A_gate and A_up must be
 * equal. */
static int fold(struct cpu_adapter *out, const struct cpu_adapter *wide, const struct arch *a, struct err *err)
{
    struct shape shape = cpu_adapter_shape(&wide->ad);
    const int64_t r = shape.r / 2;
    shape.r = r;
    shape.alpha /= 2;
    if (cpu_adapter_open(out, a, &shape, err)) return -1;
    for (int64_t i = 0; i < out->ad.n_params; i++) {
        const struct lora_param *p = &out->ad.params[i];
        const struct lora_param *w = adapters_match(&wide->ad, p);
        const size_t row = (size_t)p->cols * sizeof(float);
        for (int64_t e = 0; e < p->n_exp; e++)
            for (int64_t k = 0; k < p->rows; k++) {
                const bool second = p->is_b && p->target == LORA_UP && k >= p->rows / 2;
                memcpy(cpu_adapter_at(out, p, e, k, 0), cpu_adapter_at(wide, w, e, k, second ? r : 0), row);
                if (p->is_b || p->target != LORA_UP) continue;
                if (memcmp(cpu_adapter_at(wide, w, e, k, 0), cpu_adapter_at(wide, w, e, k + r, 0), row))
                    return err_set(err, "layer %lld, expert %lld: gate and up have different lora_A",
                                   (long long)p->layer, (long long)e);
            }
    }
    return 0;
}

static int read_peft(struct cpu_adapter *read, const struct export *x, struct err *err)
{
    struct cpu_adapter wide;
    if (cpu_adapter_load(read, &x->run.arch, x->tmp, err)) return -1;
    if (read->ad.r != 2 * adapters_max_rank(&x->adapter.ad)) return 0;
    wide = *read;
    const int rc = fold(read, &wide, &x->run.arch, err);
    cpu_adapter_close(&wide);
    return rc;
}

/* ---- GGUF ---- */

struct gguf_name {
    int64_t layer;
    enum lora_target target;
    bool up; /* the second half of LORA_UP, z of LORA_IN_QKVZ */
    bool is_b;
};

/* "blk.3.attn_q.weight.lora_a" */
static bool parse_name(const struct arch *a, const char *name, struct gguf_name *out)
{
    static const struct {
        const char *matrix;
        enum lora_target target;
        bool up;
    } rows[] = {{"attn_q", LORA_Q, false},
                {"attn_k", LORA_K, false},
                {"attn_v", LORA_V, false},
                {"attn_output", LORA_O, false},
                {"shortconv.in_proj", LORA_CONV_IN, false},
                {"shortconv.out_proj", LORA_CONV_OUT, false},
                {"attn_qkv", LORA_IN_QKV, false},
                {"attn_gate", LORA_IN_Z, false},
                {"ssm_beta", LORA_IN_B, false},
                {"ssm_alpha", LORA_IN_A, false},
                {"ssm_ba", LORA_IN_BA, false},
                {"ssm_in", LORA_IN, false},
                {"ssm_out", LORA_OUT, false},
                {"ffn_gate_up_exps", LORA_UP, false},
                {"ffn_gate_exps", LORA_UP, false},
                {"ffn_up_exps", LORA_UP, true},
                {"ffn_down_exps", LORA_DOWN, false},
                {"ffn_gate_shexp", LORA_SHARED_GATE, false},
                {"ffn_up_shexp", LORA_SHARED_UP, false},
                {"ffn_down_shexp", LORA_SHARED_DOWN, false},
                {"ffn_latent_down", LORA_LATENT_DOWN, false},
                {"ffn_latent_up", LORA_LATENT_UP, false},
                {"ffn_gate", LORA_DENSE_GATE, false},
                {"ffn_up", LORA_DENSE_UP, false},
                {"ffn_down", LORA_DENSE_DOWN, false}};
    char *rest;
    if (strncmp(name, "blk.", 4)) return false;
    *out = (struct gguf_name){.layer = strtoll(name + 4, &rest, 10)};
    for (int64_t i = 0; *rest == '.' && i < MT_LEN(rows); i++) {
        const size_t n = strlen(rows[i].matrix);
        const char *tail = rest + 1 + n;
        if (strncmp(rest + 1, rows[i].matrix, n) || *tail != '.') continue;
        out->target = rows[i].target;
        out->up = rows[i].up && glu_gated(&a->glu);
        if (a->delta.fused && (out->target == LORA_IN_QKV || out->target == LORA_IN_Z)) {
            out->up = out->target == LORA_IN_Z;
            out->target = LORA_IN_QKVZ;
        }
        out->is_b = !strcmp(tail, ".weight.lora_b");
        return out->is_b || !strcmp(tail, ".weight.lora_a");
    }
    return false;
}

/* The number in the checkpoint of llama.cpp's row or column `at`. The last of the `rows` rows are value heads of gated
 * DeltaNet, with `dim` rows each, ordered as gguf_names_value_row says. */
static int64_t value_place(const struct delta_shape *s, int64_t dim, int64_t at, int64_t rows)
{
    const int64_t keys = s->n_key, per_key = s->n_value / keys, before = rows - keys * per_key * dim;
    for (int64_t nth = 0, here = before; nth < per_key; nth++)
        for (int64_t key = 0; key < keys; key++, here += dim)
            if (at >= here && at < here + dim) return before + (key * per_key + nth) * dim + at - here;
    return at;
}

/* The row of in_proj_qkvz for a row of llama.cpp's tensor q | k | v, or of z. in_proj_qkvz has q, k, v and z of a key
 * head together. */
static int64_t fused_place(const struct delta_shape *s, bool z, int64_t row)
{
    const int64_t v = s->n_value / s->n_key * s->value_dim, group = 2 * s->key_dim + 2 * v, q = s->n_key * s->key_dim;
    if (z) return row / v * group + 2 * s->key_dim + v + row % v;
    if (row >= 2 * q) return (row - 2 * q) / v * group + 2 * s->key_dim + (row - 2 * q) % v;
    return row % q / s->key_dim * group + row / q * s->key_dim + row % s->key_dim;
}

/* The row of a parameter, which has `rows` rows, for row `row` of a GGUF tensor. gpt-oss interleaves gate and up, other
 * models stack them; llama's q and k interleave the two halves of every head. */
static int64_t param_row(const struct arch *a, const struct gguf_name *n, int64_t row, int64_t rows)
{
    const int64_t head_dim = arch_attn(a, n->layer)->head_dim, half = head_dim / 2, in_head = row % head_dim;
    if (!n->is_b || (n->target == LORA_UP && gguf_names_fused(a))) return row;
    if (n->target == LORA_UP && glu_gated(&a->glu))
        return a->glu.interleaved ? 2 * row + n->up : row + (n->up ? rows / 2 : 0);
    if (n->target == LORA_IN_QKVZ) return fused_place(&a->delta.shape, n->up, row);
    if (n->target == LORA_IN_QKV || n->target == LORA_IN_Z)
        return value_place(&a->delta.shape, a->delta.shape.value_dim, row, rows);
    if (n->target == LORA_IN_B || n->target == LORA_IN_A) return value_place(&a->delta.shape, 1, row, rows);
    if (strcmp(a->family, "mixtral") || n->target > LORA_K) return row;
    return row - in_head + in_head / 2 + (in_head % 2 ? half : 0);
}

/* A row of a tensor in the order of the parameter's columns. */
static void sort_columns(const struct arch *a, const struct gguf_name *n, float *to, const float *from, int64_t cols)
{
    const bool values = !n->is_b && n->target == LORA_OUT && !a->delta.fused;
    for (int64_t k = 0; k < cols; k++)
        to[values ? value_place(&a->delta.shape, a->delta.shape.value_dim, k, cols) : k] = from[k];
}

/* The rows of a tensor that has B of p, or a part of it. */
static int64_t rows_in_file(const struct arch *a, const struct gguf_name *n, const struct lora_param *p)
{
    const int64_t z = a->delta.shape.n_value * a->delta.shape.value_dim;
    if (n->target == LORA_IN_QKVZ) return n->up ? z : p->rows - z;
    return n->target == LORA_UP && glu_gated(&a->glu) && !gguf_names_fused(a) ? p->rows / 2 : p->rows;
}

/* Copies one tensor to its parameter; values not read yet are NaN. */
static int read_tensor(struct cpu_adapter *read, const struct arch *a, const struct gguf_tensor *t, struct err *err)
{
    struct gguf_name n;
    const struct lora_param *p =
        parse_name(a, t->name, &n) ? adapters_find(&read->ad, n.layer, n.target, n.is_b) : NULL;
    if (!p) return err_set(err, "tensor %s does not match any trained target", t->name);
    const int first = t->ndim - 2;
    const int64_t r = read->ad.rank[n.target], n_exp = first ? t->shape[0] : 1;
    const int64_t rows = n.is_b ? rows_in_file(a, &n, p) : r, cols = n.is_b ? r : p->cols;
    if (t->ndim != (p->experts ? 3 : 2) || n_exp != p->n_exp || t->shape[first] != rows || t->shape[first + 1] != cols)
        return err_set(err, "tensor %s has a wrong shape", t->name);
    float *sorted = mem_array(cols, sizeof(*sorted));
    int rc = 0;
    for (int64_t e = 0; e < n_exp; e++)
        for (int64_t row = 0; row < rows; row++) {
            float *to = cpu_adapter_at(read, p, e, param_row(a, &n, row, p->rows), 0);
            const size_t size = (size_t)cols * sizeof(float);
            sort_columns(a, &n, sorted, (const float *)t->data + (e * rows + row) * cols, cols);
            if (!isnan(*to) && memcmp(to, sorted, size))
                rc = err_set(err, "layer %lld, expert %lld: %s have different lora_a", (long long)n.layer, (long long)e,
                             n.target == LORA_UP ? "gate and up" : "attn_qkv and attn_gate");
            memcpy(to, sorted, size);
        }
    mem_free(sorted);
    return rc;
}

static int check_header(const struct gguf *g, struct err *err)
{
    static const char *const wanted[][2] = {{"general.type", "adapter"}, {"adapter.type", "lora"}};
    for (int64_t i = 0; i < MT_LEN(wanted); i++) {
        const struct gguf_value *v = gguf_value(g, wanted[i][0]);
        if (!v || v->type != GGUF_STRING || strcmp(v->text, wanted[i][1]))
            return err_set(err, "key %s is not %s", wanted[i][0], wanted[i][1]);
    }
    const struct gguf_value *alpha = gguf_value(g, "adapter.lora.alpha");
    if (!alpha || alpha->type != GGUF_F32) return err_set(err, "key adapter.lora.alpha is missing");
    return 0;
}

static int fill_from(struct cpu_adapter *read, const struct gguf *g, const struct arch *a, struct err *err)
{
    for (int64_t i = 0; i < read->ad.n_params; i++) {
        const struct lora_param *p = &read->ad.params[i];
        const int64_t r = read->ad.rank[p->target], n_row = p->is_b ? p->rows : r, n_col = p->is_b ? r : p->cols;
        for (int64_t row = 0; row < p->n_exp * n_row; row++)
            for (int64_t col = 0; col < n_col; col++) *cpu_adapter_at(read, p, row / n_row, row % n_row, col) = NAN;
    }
    for (int64_t i = 0; i < g->n_tensors; i++)
        if (read_tensor(read, a, &g->tensors[i], err)) return -1;
    return 0;
}

static int read_gguf(struct cpu_adapter *read, const struct export *x, struct err *err)
{
    struct gguf g;
    char path[MT_PATH];
    if (file_in(path, x->tmp, EXPORT_GGUF_NAME, err) || gguf_open(&g, path, err)) return -1;
    int rc = check_header(&g, err);
    if (!rc) {
        struct shape shape = cpu_adapter_shape(&x->adapter.ad);
        shape.rslora = false;
        shape.alpha = (double)gguf_value(&g, "adapter.lora.alpha")->f32;
        shape.alphas[0] = '\0';
        rc = cpu_adapter_open(read, &x->run.arch, &shape, err) || fill_from(read, &g, &x->run.arch, err) ? -1 : 0;
    }
    gguf_close(&g);
    return rc ? err_prefix(err, "%s", path) : 0;
}

int verify_read(struct cpu_adapter *read, const struct export *x, struct err *err)
{
    *read = (struct cpu_adapter){.ad = {0}};
    const int rc = x->format == EXPORT_GGUF ? read_gguf(read, x, err) : read_peft(read, x, err);
    if (rc) cpu_adapter_close(read);
    return rc;
}

/* ---- comparing ---- */

/* Returns the number of values of expert e that differ; pair: the first differing pair. want NULL: all values must be
 * 0, as those of untrained ranks.
 */
static int64_t count_wrong(const struct cpu_adapter *trained, const struct lora_param *want,
                           const struct cpu_adapter *read, const struct lora_param *p, int64_t e, float pair[2])
{
    int64_t wrong = 0;
    const int64_t r = read->ad.rank[p->target];
    const int64_t n_row = p->is_b ? p->rows : r,
                  n_col = p->is_b && !p->is_m ? r : p->cols; /* sizes in the export; `want` may have fewer ranks */
    const float factor = want && p->is_b && !p->is_m ? cpu_adapter_factor(&trained->ad, &read->ad, p->target) : 1;
    for (int64_t row = 0; row < n_row; row++)
        for (int64_t col = 0; col < n_col; col++) {
            const bool there = want && row < want->rows && col < want->cols;
            const float target = there ? factor * *cpu_adapter_at(trained, want, e, row, col) : 0;
            const float got = *cpu_adapter_at(read, p, e, row, col);
            if (got == target) continue;
            if (!wrong++) pair[0] = target, pair[1] = got;
        }
    return wrong;
}

static void compare_param(struct export_diff *l, const struct cpu_adapter *trained, const struct cpu_adapter *read,
                          const struct lora_param *p)
{
    const struct lora_param *want = adapters_match(&trained->ad, p);
    float pair[2] = {0, 0};
    char name[64], expert[32] = "";
    lora_param_name(p, name);
    if (!want && !p->is_b) return; /* a target that only the format requires; B must be 0 */
    if (want && (want->n_exp != p->n_exp || read->ad.rank[p->target] < trained->ad.rank[p->target] ||
                 (p->is_b ? want->rows != p->rows : want->cols != p->cols))) {
        export_diff_add(l, "%s has a different shape", name);
        return;
    }
    for (int64_t e = 0; e < p->n_exp; e++) {
        const int64_t wrong = count_wrong(trained, want, read, p, e, pair);
        if (!wrong) continue;
        if (p->n_exp > 1) snprintf(expert, sizeof(expert), " of expert %lld", (long long)e);
        if (isnan(pair[1]))
            export_diff_add(l, "%s%s is missing", name, expert);
        else
            export_diff_add(l, "%s%s: %lld of %lld values differ, the first is %g instead of %g", name, expert,
                            (long long)wrong, (long long)(p->rows * p->cols), (double)pair[1], (double)pair[0]);
    }
}

void verify_values(struct export_diff *l, const struct cpu_adapter *trained, const struct cpu_adapter *read)
{
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        const double scale = (double)trained->ad.scale[t];
        const double got = (double)(cpu_adapter_factor(&trained->ad, &read->ad, t) * read->ad.scale[t]);
        if (trained->ad.target[t] && !(fabs(got - scale) <= 1e-6 * scale))
            export_diff_add(l, "%s: the scale is %g instead of %g", lora_target_name(t), got, scale);
    }
    for (int64_t i = 0; i < read->ad.n_params; i++) compare_param(l, trained, read, &read->ad.params[i]);
    for (int64_t i = 0; i < trained->ad.n_params; i++) {
        const struct lora_param *p = &trained->ad.params[i];
        char name[64];
        lora_param_name(p, name);
        if (!adapters_match(&read->ad, p)) export_diff_add(l, "%s is missing", name);
    }
}
