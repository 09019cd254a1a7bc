/* verify_merged.c - compares each merged weight with base + adapter.
 *
 * The loader reads the exported layer. This file computes base + adapter by plain sums, not by the writer's product. A
 * bf16 weight may differ by half a bf16 step; an MXFP4 weight must be a nearest code for its block's exponent. Both may
 * differ by another SLACK times the matrix's largest delta, because sums have another order. A weight of a quantised
 * product (struct proj_quant) must have the bits that products in training read, which are those of op_decode. Without
 * an adapter and without quantised training it may have the bits of the base. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "kernels/memory.h"
#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"
#include "model/layer.h"
#include "model/stored/published.h"
#include "train/export/verify.h"
#include "train/gguf/ggml_blocks.h"

#define SLACK 1e-5
enum { ROWS = 32 }; /* rows decoded at a time */

/* A matrix of all experts, in the trained model and in the export: its n_row rows from `row` on. */
struct matrix {
    const struct weight *source, *exported;
    const struct cpu_adapter *adapter;
    const struct lora_param *a, *b; /* NULL: not adapted */
    int64_t row, n_row;
    bool trained;           /* training read them */
    const float *quantised; /* [n_exp, n_out, n_in], the required values; NULL: base + adapter within rounding */
    enum ggml_type ggml; /* the type in a gguf-model, whose values `exported` has in f32; GGML_F32 for other formats */
};

/* Sums over an expert's matrix. delta: the trained change; step: the change in the export. */
struct compared {
    double moved, dot, delta2, step2;
    int64_t wrong;
};

int merged_open(struct merged *m, const struct export *x, struct err *err)
{
    const struct arch *a = &x->run.arch;
    *m = (struct merged){.st = {0}};
    if (x->format == EXPORT_GGUF_MODEL) {
        if (!merged_open_gguf(m, x, err)) return 0;
        merged_close(m);
        return -1;
    }
    if (arch_load(&m->arch, x->tmp, err) || safetensors_open(&m->st, x->tmp, err) ||
        published_rename(&m->st, &m->arch, err))
        return -1;
    const struct arch *b = &m->arch;
    if (a->n_layer == b->n_layer && a->d_model == b->d_model && a->vocab == b->vocab &&
        !memcmp(a->attn, b->attn, sizeof(a->attn)) && a->n_exp == b->n_exp && a->d_ff == b->d_ff &&
        a->names == b->names)
        return 0;
    merged_close(m);
    return err_set(err, "%s/config.json describes a different model", x->tmp);
}

void merged_close(struct merged *m)
{
    safetensors_close(&m->st);
    gguf_close(&m->gguf);
    gguf_items_free(&m->items);
}

/* With DoRA: turns `change`, s B A for a row w of n_in values, into the whole change of w: m / |w + change| (w +
 * change) - w. */
static void scale_row(const struct matrix *m, int64_t row, const float *w, float *change)
{
    const struct lora_param *p = m->a ? adapters_find_magnitude(&m->adapter->ad, m->a->layer, m->a->target) : NULL;
    const int64_t n_in = m->source->n_in;
    double square = 0;
    if (!p) return;
    for (int64_t i = 0; i < n_in; i++) square += pow((double)w[i] + (double)change[i], 2);
    const double size = (double)*cpu_adapter_at(m->adapter, p, 0, arch_stored_row(&p->order, row), 0);
    const double gain = square > 0 ? size / sqrt(square) : 0;
    for (int64_t i = 0; i < n_in; i++) change[i] = (float)(gain * ((double)w[i] + (double)change[i]) - (double)w[i]);
}

/* out [n_row, n_in]: the change of expert e's rows from `row` on, scale * B A; base: their weights */
static void delta_rows(const struct matrix *m, int64_t e, int64_t row, int64_t n_row, const float *base, float *out)
{
    const int64_t n_in = m->source->n_in;
    memset(out, 0, (size_t)(n_row * n_in) * sizeof(*out));
    if (!m->a) return;
    for (int64_t o = 0; o < n_row; o++)
        for (int64_t k = 0; k < m->adapter->ad.rank[m->b->target]; k++) {
            const int64_t at = arch_stored_row(&m->b->order, row + o); /* both weights are in the order of memory */
            const float b = m->adapter->ad.scale[m->b->target] * *cpu_adapter_at(m->adapter, m->b, e, at, k);
            const float *a = cpu_adapter_at(m->adapter, m->a, e, k, 0);
            for (int64_t i = 0; i < n_in; i++) out[o * n_in + i] += b * a[i];
        }
    for (int64_t o = 0; o < n_row; o++) scale_row(m, row + o, base + o * n_in, out + o * n_in);
}

/* Distance of t from the nearest MXFP4 value: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 times the block's scale. */
static double mxfp4_error(const struct weight *w, int64_t e, int64_t i, double t)
{
    const double step = (double)e8m0_scale(w->scale[(e * w->n_out * w->n_in + i) / 32]), v = fabs(t) / step;
    const double below = v < 2 ? floor(2 * v) / 2 : v < 4 ? floor(v) : v < 6 ? 4 : 6;
    const double gap = v < 2 ? 0.5 : v < 4 ? 1 : v < 6 ? 2 : INFINITY;
    return step * fmin(v - below, below + gap - v);
}

/* Half a step of e4m3 at t, in the scale of its block. */
static double fp8_error(const struct weight *w, int64_t e, int64_t i, double t)
{
    const int64_t per_row = weight_row_scales(w), row = e * w->n_out + i / w->n_in;
    const double step = (double)w->scale2[row * per_row + i % w->n_in / w->block];
    return fmax(fabs(t) * 0x1p-4, step * 0x1p-10);
}

/* The rounding error that element i of expert e, whose exact value is t, may have. Formats that are not in the table
 * have that of f32. */
static double allowed_error(const struct weight *w, int64_t e, int64_t i, float t)
{
    static const struct {
        double half_step; /* relative to t */
        double (*error)(const struct weight *w, int64_t e, int64_t i, double t);
    } rows[] = {[WF_BF16] = {.half_step = 0x1p-8},
                [WF_F16] = {.half_step = 0x1p-11},
                [WF_MXFP4] = {.error = mxfp4_error},
                [WF_FP8] = {.error = fp8_error}};
    if (rows[w->format].error) return rows[w->format].error(w, e, i, (double)t);
    return fabs((double)t) * fmax(rows[w->format].half_step, 0x1p-23);
}

/* As allowed_error, for values that a GGUF file has in blocks. All elements of a block have the same error: it is
 * computed where i begins a block. error: the result for the element before. */
static double ggml_allowed(const struct matrix *m, const float *base, const float *delta, int64_t i, double error)
{
    float target[32];
    const int block = ggml_layout(m->ggml)->block;
    if (i % block) return error;
    for (int k = 0; k < block; k++) target[k] = base[i + k] + delta[i + k];
    return ggml_error(m->ggml, target);
}

static void compare_rows(const struct matrix *m, struct compared *sum, int64_t e, int64_t row, int64_t n_row,
                         float *space)
{
    const int64_t n_in = m->source->n_in, n = n_row * n_in, first = (m->row + row) * n_in;
    float *base = space, *got = space + n, *delta = space + 2 * n, most = 0;
    quant_decode(base, m->source, e, first, n, 1);
    quant_decode(got, m->exported, e, first, n, 1);
    delta_rows(m, e, row, n_row, base, delta);
    for (int64_t i = 0; i < n; i++) most = fabsf(delta[i]) > most ? fabsf(delta[i]) : most;
    const double slack = SLACK * (double)most;
    double rounding = 0;
    for (int64_t i = 0; i < n; i++) {
        rounding = ggml_allowed(m, base, delta, i, rounding);
        const float target = base[i] + delta[i];
        const double step = (double)got[i] - (double)base[i], error = fabs((double)got[i] - (double)target);
        sum->moved += got[i] != base[i];
        sum->dot += step * (double)delta[i];
        sum->step2 += step * step;
        sum->delta2 += (double)delta[i] * (double)delta[i];
        if (m->quantised) {
            const float want = m->quantised[e * m->source->n_out * n_in + first + i];
            const bool kept = !m->a && !m->trained && float_bits(got[i]) == float_bits(base[i]);
            sum->wrong += !kept && float_bits(got[i]) != float_bits(want);
            continue;
        }
        if (error <= slack) continue;
        const double allowed = fmax(rounding, allowed_error(m->exported, e, first + i, target));
        sum->wrong += !(error <= allowed * (1 + SLACK) + slack);
    }
}

/* Each thread takes the next expert; sums are per expert. */
struct work {
    const struct matrix *m;
    struct compared *compared; /* [n_exp] */
    pthread_mutex_t lock;
    int64_t next;
};

static void *compare_experts(void *arg)
{
    struct work *w = arg;
    const struct matrix *m = w->m;
    float *space = mem_array(3 * ROWS * m->source->n_in, sizeof(*space));
    for (;;) {
        pthread_mutex_lock(&w->lock);
        const int64_t e = w->next++;
        pthread_mutex_unlock(&w->lock);
        if (e >= m->source->n_exp) break;
        for (int64_t row = 0; row < m->n_row; row += ROWS)
            compare_rows(m, &w->compared[e], e, row, MT_MIN(ROWS, m->n_row - row), space);
    }
    mem_free(space);
    return NULL;
}

static void compare_matrix(const struct matrix *m, struct compared *compared, int n_threads)
{
    struct work w = {.m = m, .compared = compared};
    pthread_t *threads = mem_array(n_threads, sizeof(*threads));
    MT_REQUIRE(!pthread_mutex_init(&w.lock, NULL), "no lock");
    for (int i = 0; i < n_threads; i++) thread_start(&threads[i], compare_experts, &w);
    for (int i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&w.lock);
    mem_free(threads);
}

/* Prints the layer's line for one target; adds to the totals of struct export_diff. */
static void print_layer(const struct matrix *m, const struct compared *compared, struct export_diff *l, int64_t layer,
                        const char *name)
{
    struct compared all = {.wrong = 0};
    const double n = (double)(m->source->n_exp * m->n_row * m->source->n_in);
    char expert[32] = "";
    for (int64_t e = 0; e < m->source->n_exp; e++) {
        const struct compared *t = &compared[e];
        all.moved += t->moved, all.dot += t->dot, all.delta2 += t->delta2, all.step2 += t->step2;
        if (!t->wrong) continue;
        if (m->source->n_exp > 1) snprintf(expert, sizeof(expert), " of expert %lld", (long long)e);
        export_diff_add(l, "layers.%lld.%s%s: %lld weights are not %s", (long long)layer, name, expert,
                        (long long)t->wrong,
                        m->trained     ? "those that training read"
                        : m->quantised ? "base + adapter, quantised"
                                       : "base + adapter");
    }
    if (m->quantised) l->n_exact += (int64_t)n;
    if (!m->a) return;
    const bool packed = weight_is_packed(m->exported->format), stack = lora_target_is_stack(m->a->target);
    struct rounded *r = m->quantised                        ? m->trained ? NULL : &l->experts
                        : m->ggml != GGML_F32               ? stack ? &l->experts : &l->others
                        : !packed                           ? NULL
                        : format_of(m->exported)->bits == 4 ? &l->experts
                                                            : &l->others;
    if (r) r->delta2 += all.delta2, r->arrived += all.dot, r->step2 += all.step2;
    const double product = sqrt(all.delta2) * sqrt(all.step2);
    fprintf(l->report,
            "  layer %3lld  %-13s %6.2f %% of the weights changed; remaining delta: cosine %.4f, norm %.4f\n",
            (long long)layer, name, 100 * all.moved / n, product > 0 ? all.dot / product : 0,
            all.delta2 > 0 ? sqrt(all.step2 / all.delta2) : 0);
}

/* One product of a layer, with its counterpart in the export. */
struct pair {
    const struct proj *source;
    const struct weight *exported;
    const float *quantised; /* NULL: not quantised */
    enum ggml_type ggml;    /* as in struct matrix */
};

static void compare(const struct export *x, struct export_diff *l, int64_t layer, enum lora_target t,
                    const struct pair *p, int64_t row, int64_t n_row)
{
    const struct matrix m = {.source = &p->source->w,
                             .exported = p->exported,
                             .adapter = &x->adapter,
                             .a = adapters_find(&x->adapter.ad, layer, t, false),
                             .b = adapters_find(&x->adapter.ad, layer, t, true),
                             .row = row,
                             .n_row = n_row,
                             .trained = p->quantised && x->trained,
                             .quantised = p->quantised,
                             .ggml = p->ggml};
    struct compared *compared = mem_array(m.source->n_exp, sizeof(*compared));
    compare_matrix(&m, compared, x->run.dev.n_threads);
    print_layer(&m, compared, l, layer, lora_target_name(t));
    mem_free(compared);
}

static const struct proj *proj_in(const struct layer_weights *lw, const struct product *p)
{
    return (const struct proj *)(const void *)((const char *)lw + p->proj);
}

void merged_compare(struct merged *merged, struct device *dev, const struct export *x, struct export_diff *l,
                    int64_t layer, const struct layer_weights *source, const struct layer_weights *exported)
{
    struct product products[LAYER_PRODUCTS];
    layer_products(&merged->arch, layer, products);
    for (int i = 0; i < LAYER_PRODUCTS; i++) {
        const struct product *one = &products[i];
        if (!one->n_out) continue;
        const struct proj *from = proj_in(source, one), *to = proj_in(exported, one);
        const struct weight *w = &from->w;
        const int64_t mark = arena_mark(&dev->work);
        struct pair p = {.source = from, .exported = &to->w};
        if (merged->gguf.n_tensors && !weight_is_packed(to->w.format))
            p.ggml = gguf_items_type(&merged->arch, one, x->ggml);
        if (from->quant.format.bits) {
            const struct tensor y = arena_tensor_3d(&dev->work, DT_F32, w->n_exp, w->n_out, w->n_in);
            op_decode(dev, y, from, (struct tensor){0});
            p.quantised = y.data;
        }
        for (int64_t k = 0, row = 0; k < one->n_target && !dev->dry_run; row += one->rows[k++])
            compare(x, l, layer, one->target[k], &p, row, one->rows[k]);
        arena_release(&dev->work, mark);
    }
}
