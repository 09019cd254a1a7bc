/* export_gguf_model.c - the whole model with the adapter merged as one GGUF file: W + scale * B A, tensor by tensor.
 *
 * Values are those of the weights that the trainer loads, one layer and one decoded expert at a time. After
 * quantisation-aware training for MXFP4, experts of gpt-oss have the codes that training read. Otherwise MXFP4 experts
 * have the nearest codes; a code of the source stays if no other is nearer (kernels/format/quant.h,
 * quant_mxfp4_merge). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/layer.h"
#include "data/chat/chat_template.h"
#include "train/export/export_job.h"
#include "train/export/export_quant.h"
#include "train/gguf/ggml_blocks.h"
#include "train/gguf/gguf_items.h"
#include "train/gguf/gguf_tokenizer.h"
#include "train/run/chat_file.h"

#define KEY_BYTES   (64 << 20) /* more than keys and the table of tensors take */
#define CHUNK_BYTES (64 << 20) /* of decoded rows of the embedding */

struct model_file {
    struct export *x;
    struct gguf_items list;
    struct gguf_tensor *tensors; /* [list.n] */
    struct device dev;
    struct gguf_writer out;
    struct progress progress;
    int64_t done;
};

static int put(struct model_file *f, const void *data, int64_t bytes, struct err *err)
{
    f->done += bytes;
    progress_tell(&f->progress, f->done);
    return gguf_writer_put(&f->out, data, bytes, err);
}

/* ---- rows */

/* Sets values [n, n_col] to the merged rows [row, row + n) of expert e. w: the base weight. */
static void merge_rows(struct model_file *f, const struct gguf_item *item, const struct weight *w, int64_t e,
                       int64_t row, int64_t n, float *values)
{
    const struct adapters *ad = &f->x->adapter.ad;
    const int64_t n_in = item->n_col;
    const bool adapted = item->target < LORA_TARGETS;
    const struct lora_param *a = adapted ? adapters_find(ad, item->layer, item->target, false) : NULL;
    if (item->rows == GGUF_ROWS_ALL) {
        quant_decode(values, w, e, (item->first + row) * n_in, n * n_in, f->dev.n_threads);
    } else {
        float *all = mem_array(item->n_from * n_in, sizeof(*all));
        quant_decode(all, w, e, item->first * n_in, item->n_from * n_in, f->dev.n_threads);
        for (int64_t i = 0; i < n; i++)
            memcpy(values + i * n_in, all + gguf_items_row(item, row + i) * n_in, (size_t)n_in * sizeof(*values));
        mem_free(all);
    }
    if (!a) return;
    int64_t *rows = mem_array(n, sizeof(*rows));
    for (int64_t i = 0; i < n; i++) rows[i] = gguf_items_adapter_row(item, row + i);
    cpu_adapter_add(&f->x->adapter, &f->dev, a, adapters_find(ad, item->layer, item->target, true), e, rows, n, values,
                    n_in);
    mem_free(rows);
}

static int put_encoded(struct model_file *f, const struct gguf_item *item, const float *values, int64_t n,
                       struct err *err)
{
    const struct ggml_layout *l = ggml_layout(item->type);
    const int64_t bytes = n / l->block * l->bytes;
    uint8_t *out = mem_alloc(bytes);
    const int64_t bad = ggml_encode(out, item->type, values, n);
    const int rc = bad ? err_set(err, "%s: a merged weight is not finite, or too large for %s", item->name, l->name)
                       : put(f, out, bytes, err);
    mem_free(out);
    return rc;
}

/* Writes the nearest codes. If w is MXFP4, the encoder gets the codes of the same rows of w. */
static int put_mxfp4(struct model_file *f, const struct gguf_item *item, const struct weight *w, int64_t e,
                     const float *values, struct err *err)
{
    const bool again = w->format == export_format_packs(EXPORT_MERGED_MXFP4);
    const int64_t n_in = item->n_col, n = item->n_row * n_in;
    uint8_t *nibbles = mem_alloc(n), *scales = nibbles + n / 2, *old = mem_alloc(n);
    for (int64_t i = 0; i < item->n_row && again; i++) {
        const int64_t from = (e * w->n_out + item->first + gguf_items_row(item, i)) * n_in;
        memcpy(old + i * n_in / 2, (const uint8_t *)w->data + from / 2, (size_t)n_in / 2);
        memcpy(old + n / 2 + i * n_in / 32, w->scale + from / 32, (size_t)n_in / 32);
    }
    int rc =
        quant_mxfp4_merge(nibbles, scales, values, again ? old : NULL, again ? old + n / 2 : NULL, n, f->dev.n_threads)
            ? err_set(err, "%s: a merged weight is not finite", item->name)
            : 0;
    ggml_mxfp4_pack(old, nibbles, scales, n);
    if (!rc) rc = put(f, old, n / 32 * 17, err);
    mem_free(nibbles);
    mem_free(old);
    return rc;
}

/* Writes the codes that training read. They are computed for all rows of the target; the item has some of these
 * rows. */
static int put_trained(struct model_file *f, const struct gguf_item *item, const struct proj *p, struct err *err)
{
    const struct cpu_adapter *h = &f->x->adapter;
    const struct lora_param *a = adapters_find(&h->ad, item->layer, item->target, false),
                            *b = adapters_find(&h->ad, item->layer, item->target, true);
    const int64_t n_in = item->n_col, n = item->n_from, size = n_in / 2, n_scale = n_in / 32;
    float *w = mem_array(n * n_in, sizeof(*w)), top;
    uint8_t *codes = mem_alloc(n * (size + n_scale)), *scales = codes + n * size, *out = mem_alloc(n_in / 32 * 17);
    int rc = 0;
    for (int64_t e = 0; e < item->n_exp && !rc; e++) {
        const struct tensor amax = tensor_1d((float *)p->quant.amax.data + e * p->quant.n_part, DT_F32, 1);
        quant_decode(w, &p->w, e, item->first * n_in, n * n_in, f->dev.n_threads);
        if (a)
            fakequant_merge(w, cpu_adapter_at(h, b, e, 0, 0), cpu_adapter_at(h, a, e, 0, 0), b->cols,
                            h->ad.scale[item->target], n, n_in, f->dev.n_threads);
        for (int64_t k = 0; k < n * n_in && !rc; k++)
            if (!isfinite(w[k])) rc = err_set(err, "%s: a merged weight is not finite", item->name);
        if (rc) break;
        op_quant_pack(&f->dev, tensor_3d(codes, DT_U8, 1, n, size), tensor_3d(scales, DT_U8, 1, n, n_scale),
                      tensor_1d(&top, DT_F32, 1), tensor_3d(w, DT_F32, 1, n, n_in), amax, &p->quant.format);
        for (int64_t i = 0; i < item->n_row && !rc; i++) {
            const int64_t row = gguf_items_row(item, i);
            ggml_mxfp4_pack(out, codes + row * size, scales + row * n_scale, n_in);
            rc = put(f, out, n_in / 32 * 17, err);
        }
    }
    mem_free(w);
    mem_free(codes);
    mem_free(out);
    return rc;
}

static int put_matrix(struct model_file *f, const struct gguf_item *item, const struct weight *w, struct err *err)
{
    const int64_t most = item->rows == GGUF_ROWS_ALL && item->type != GGML_MXFP4
                             ? MT_MIN(item->n_row, MT_MAX(1, CHUNK_BYTES / (4 * item->n_col)))
                             : item->n_row;
    float *values = mem_array(most * item->n_col, sizeof(*values));
    int rc = 0;
    for (int64_t e = 0; e < item->n_exp && !rc; e++)
        for (int64_t row = 0; row < item->n_row && !rc; row += most) {
            const int64_t n = MT_MIN(most, item->n_row - row);
            merge_rows(f, item, w, e, row, n, values);
            gguf_items_columns(item, false, n, values);
            rc = item->type == GGML_MXFP4 ? put_mxfp4(f, item, w, e, values, err)
                                          : put_encoded(f, item, values, n * item->n_col, err);
        }
    mem_free(values);
    return rc;
}

/* Values in f32, in the order of the item's rows. */
static int put_bias(struct model_file *f, const struct gguf_item *item, struct tensor bias, struct err *err)
{
    float *out = mem_array(item->n_exp * item->n_row, sizeof(*out));
    for (int64_t e = 0; e < item->n_exp; e++)
        for (int64_t i = 0; i < item->n_row; i++)
            out[e * item->n_row + i] =
                ((const float *)bias.data)[e * item->n_out + item->first + gguf_items_row(item, i)];
    const int rc = put(f, out, item->n_exp * item->n_row * 4, err);
    mem_free(out);
    return rc;
}

static int put_vector(struct model_file *f, const struct gguf_item *item, struct tensor t, struct err *err)
{
    float *out = mem_array(item->n_row * item->n_col, sizeof(*out));
    gguf_items_vector(item, false, out, t.data);
    const int rc = put(f, out, item->n_row * item->n_col * 4, err);
    mem_free(out);
    return rc;
}

static int put_of_layer(struct model_file *f, const struct gguf_item *item, const struct layer_weights *lw,
                        struct err *err)
{
    const void *at = (const char *)lw + item->at;
    const struct proj *proj = at;
    switch (item->kind) {
    case GGUF_MATRIX:
        return proj->quant.format.bits ? put_trained(f, item, proj, err) : put_matrix(f, item, &proj->w, err);
    case GGUF_BIAS: return put_bias(f, item, proj->bias, err);
    case GGUF_ROUTER: return put_matrix(f, item, at, err);
    case GGUF_NUMBER: return put(f, at, sizeof(float), err);
    default: return put_vector(f, item, *(const struct tensor *)at, err);
    }
}

/* ---- all tensors */

static struct weights_source source_of(const struct export *x)
{
    return (struct weights_source){.arch = &x->run.arch, .st = &x->run.st};
}

static int reserve(struct model_file *f, struct err *err)
{
    struct export *x = f->x;
    const struct arch *a = &x->run.arch;
    const struct weights_source from = source_of(x);
    struct device measure;
    struct weight w;
    struct tensor norm;
    struct hyper hyper;
    struct product p[LAYER_PRODUCTS];
    device_dry_run(&measure, &x->run.dev);
    if (weights_load_embed(&w, &measure, &from, err)) return -1;
    arena_release(&measure.weights, 0);
    if (weights_load_head(&w, &norm, &hyper, &measure, &from, err)) return -1;
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct layer_weights lw;
        arena_release(&measure.weights, 0);
        if (weights_load_layer(&lw, &measure, &from, &x->quantize, l, err)) return -1;
        export_quant_layer(x, &measure, &lw, l);
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            if (p[i].n_out) cpu_adapter_measure(&measure, p[i].n_out, p[i].n_in, adapters_max_rank(&x->adapter.ad));
    }
    if (device_open(&f->dev, "cpu", "fp32", err)) return -1;
    f->dev.n_threads = x->run.dev.n_threads;
    return device_reserve(&f->dev, &f->dev.weights, "weights", measure.weights.peak, err) ||
                   device_reserve(&f->dev, &f->dev.work, "work", measure.work.peak, err)
               ? -1
               : 0;
}

static int put_rope(struct model_file *f, const struct gguf_item *item, struct err *err)
{
    float *out = mem_array(item->n_col, sizeof(*out));
    gguf_items_rope(&f->x->run.arch, out);
    const int rc = put(f, out, item->n_col * 4, err);
    mem_free(out);
    return rc;
}

static int put_ends(struct model_file *f, const struct gguf_item *item, struct err *err)
{
    const struct weights_source from = source_of(f->x);
    struct weight w;
    struct tensor norm;
    struct hyper hyper;
    if (item->kind == GGUF_ROPE) return put_rope(f, item, err);
    arena_release(&f->dev.weights, 0);
    if (item->kind == GGUF_EMBED)
        return weights_load_embed(&w, &f->dev, &from, err) || put_matrix(f, item, &w, err) ? -1 : 0;
    if (weights_load_head(&w, &norm, &hyper, &f->dev, &from, err)) return -1;
    return item->kind == GGUF_HEAD ? put_matrix(f, item, &w, err) : put(f, norm.data, item->n_col * 4, err);
}

static int put_tensors(struct model_file *f, struct err *err)
{
    const struct weights_source from = source_of(f->x);
    struct layer_weights lw;
    int64_t layer = -1;
    for (int64_t i = 0; i < f->list.n; i++) {
        const struct gguf_item *item = &f->list.items[i];
        if (item->layer >= 0 && item->layer != layer) {
            layer = item->layer;
            arena_release(&f->dev.weights, 0);
            if (weights_load_layer(&lw, &f->dev, &from, &f->x->quantize, layer, err)) return -1;
            export_quant_layer(f->x, &f->dev, &lw, layer);
        }
        if (item->layer < 0 ? put_ends(f, item, err) : put_of_layer(f, item, &lw, err)) return -1;
    }
    return 0;
}

static void list_tensors(struct model_file *f, struct export *x)
{
    *f = (struct model_file){.x = x};
    gguf_items_list(&f->list, &x->run.arch, x->ggml);
    f->tensors = mem_array(f->list.n, sizeof(*f->tensors));
    for (int64_t i = 0; i < f->list.n; i++) f->tensors[i] = gguf_items_tensor(&f->list.items[i]);
}

static void close_file(struct model_file *f)
{
    device_close(&f->dev);
    gguf_items_free(&f->list);
    mem_free(f->tensors);
}

static int64_t bytes_of(const struct model_file *f)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < f->list.n; i++) bytes += gguf_tensor_bytes(&f->tensors[i]);
    return bytes;
}

/* ---- called by export.c */

int64_t export_gguf_model_bytes(struct export *x)
{
    struct model_file f;
    list_tensors(&f, x);
    const int64_t bytes = bytes_of(&f) + KEY_BYTES;
    close_file(&f);
    return bytes;
}

int export_gguf_model(struct export *x, struct err *err)
{
    struct model_file f;
    struct gguf_meta meta;
    char path[MT_PATH], *own;
    if (file_in(path, x->tmp, EXPORT_GGUF_MODEL_NAME, err) || chat_file_find(&own, &x->run, x->adapter_dir, err))
        return -1;
    const struct gguf_meta_model model = {&x->run.arch, x->run.model_name, x->run.model_dir,
                                          own ? own : chat_template_text(x->run.chat), x->ggml};
    list_tensors(&f, x);
    gguf_meta_open(&meta, &model);
    int rc = gguf_tokenizer_put(&meta, &model, err);
    if (!rc) rc = reserve(&f, err);
    if (!rc) rc = gguf_writer_open(&f.out, path, meta.values, meta.n, f.tensors, f.list.n, err);
    if (!rc) {
        f.progress = progress_start("merging", bytes_of(&f));
        rc = put_tensors(&f, err);
        if (gguf_writer_close(&f.out, !rc, rc ? NULL : err)) rc = -1;
    }
    gguf_meta_close(&meta);
    close_file(&f);
    mem_free(own);
    return rc;
}
