/* verify_gguf.c - reads a whole model back from its GGUF file, layer by layer, as the weights of a layer. */
#include <math.h>
#include <string.h>

#include "train/export/verify.h"
#include "train/gguf/ggml_blocks.h"

static int check_rope(const struct merged *m, const struct gguf_tensor *t)
{
    const int64_t bytes = t->shape[0] * 4;
    float *want = mem_alloc(bytes);
    gguf_items_rope(&m->arch, want);
    const int rc = memcmp(want, t->data, (size_t)bytes);
    mem_free(want);
    return rc;
}

/* The tensors are those that the writer lists, in any order. */
static int check_tensors(const struct merged *m, const char *path, struct err *err)
{
    if (m->gguf.n_tensors != m->items.n)
        return err_set(err, "%s has %lld tensors, expected are %lld", path, (long long)m->gguf.n_tensors,
                       (long long)m->items.n);
    for (int64_t i = 0; i < m->items.n; i++) {
        const struct gguf_tensor want = gguf_items_tensor(&m->items.items[i]), *t = gguf_tensor(&m->gguf, want.name);
        if (!t || t->ndim != want.ndim || memcmp(t->shape, want.shape, sizeof(want.shape)))
            return err_set(err, "%s: tensor %s is missing, or has another shape", path, want.name);
        if (t->type != want.type)
            return err_set(err,
                           "%s: tensor %s has another type: verify with the --quantize that wrote this export "
                           "(without it q8_0)",
                           path, want.name);
        if (m->items.items[i].kind == GGUF_ROPE && check_rope(m, t))
            return err_set(err, "%s: tensor %s has other values", path, want.name);
    }
    return 0;
}

int merged_open_gguf(struct merged *m, const struct export *x, struct err *err)
{
    char path[MT_PATH];
    if (file_in(path, x->tmp, EXPORT_GGUF_MODEL_NAME, err) || gguf_open(&m->gguf, path, err)) return -1;
    m->arch = x->run.arch;
    gguf_items_list(&m->items, &x->run.arch, x->ggml);
    return check_tensors(m, path, err);
}

/* Reads the item's rows into to [n_exp, n_out, n_col], in the order of memory. */
static void read_rows(const struct merged *m, const struct gguf_item *item, float *to)
{
    const struct ggml_layout *l = ggml_layout(item->type);
    const int64_t n = item->n_row * item->n_col, bytes = n / l->block * l->bytes;
    const uint8_t *from = gguf_tensor(&m->gguf, item->name)->data;
    float *rows = mem_array(n, sizeof(*rows));
    for (int64_t e = 0; e < item->n_exp; e++, from += bytes) {
        ggml_decode(rows, item->type, from, n);
        gguf_items_columns(item, true, item->n_row, rows);
        for (int64_t i = 0; i < item->n_row; i++)
            memcpy(to + (e * item->n_out + item->first + gguf_items_row(item, i)) * item->n_col, rows + i * item->n_col,
                   (size_t)item->n_col * sizeof(*to));
    }
    mem_free(rows);
}

/* The same as nibbles and scales. */
static void read_mxfp4(const struct merged *m, const struct gguf_item *item, uint8_t *nibbles, uint8_t *scales)
{
    const int64_t n = item->n_col;
    const uint8_t *from = gguf_tensor(&m->gguf, item->name)->data;
    for (int64_t e = 0; e < item->n_exp; e++)
        for (int64_t i = 0; i < item->n_row; i++, from += n / 32 * 17) {
            const int64_t at = (e * item->n_out + item->first + gguf_items_row(item, i)) * n;
            ggml_mxfp4_unpack(nibbles + at / 2, scales + at / 32, from, n);
        }
}

static struct weight f32_weight(struct device *dev, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    const struct tensor t = arena_tensor_3d(&dev->weights, DT_F32, n_exp, n_out, n_in);
    if (!dev->dry_run) memset(t.data, 0xff, (size_t)tensor_bytes(t)); /* NaN: no row may be left out */
    return (struct weight){.format = WF_F32, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .data = t.data};
}

static struct weight mxfp4_weight(struct device *dev, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    const struct tensor nibbles = arena_tensor_3d(&dev->weights, DT_U8, n_exp, n_out, n_in / 2);
    const struct tensor scales = arena_tensor_3d(&dev->weights, DT_U8, n_exp, n_out, n_in / 32);
    if (!dev->dry_run) memset(scales.data, 0xff, (size_t)tensor_bytes(scales));
    return (struct weight){
        .format = WF_MXFP4, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .data = nibbles.data, .scale = scales.data};
}

/* Reads an item into w. fresh: w still is the base model's weight, and first gets memory for all items of its
 * product. */
static void read_weight(const struct merged *m, struct device *dev, const struct gguf_item *item, struct weight *w,
                        bool fresh)
{
    const bool mxfp4 = item->type == GGML_MXFP4;
    if (fresh) *w = (mxfp4 ? mxfp4_weight : f32_weight)(dev, item->n_exp, item->n_out, item->n_col);
    if (dev->dry_run) return;
    if (mxfp4)
        read_mxfp4(m, item, (uint8_t *)(uintptr_t)w->data, (uint8_t *)(uintptr_t)w->scale);
    else
        read_rows(m, item, (float *)(uintptr_t)w->data);
}

static void read_bias(const struct merged *m, const struct gguf_item *item, float *bias)
{
    const float *from = gguf_tensor(&m->gguf, item->name)->data;
    for (int64_t e = 0; e < item->n_exp; e++)
        for (int64_t i = 0; i < item->n_row; i++)
            bias[e * item->n_out + item->first + gguf_items_row(item, i)] = *from++;
}

static void read_vector(const struct merged *m, const struct gguf_item *item, void *to)
{
    gguf_items_vector(item, true, to, (const void *)gguf_tensor(&m->gguf, item->name)->data);
}

/* lw: the same layer of the base model; its values are replaced. */
void merged_read_layer(const struct merged *m, struct device *dev, struct layer_weights *lw, int64_t layer)
{
    size_t last = SIZE_MAX; /* the product of the item before */
    for (int64_t i = 0; i < m->items.n; i++) {
        const struct gguf_item *item = &m->items.items[i];
        void *at = (char *)lw + item->at;
        struct proj *proj = at;
        if (item->layer != layer) continue;
        if (item->kind == GGUF_MATRIX) {
            read_weight(m, dev, item, &proj->w, item->at != last);
            last = item->at;
        } else if (item->kind == GGUF_ROUTER) {
            read_weight(m, dev, item, at, true);
        } else if (!dev->dry_run && item->kind == GGUF_BIAS) {
            read_bias(m, item, proj->bias.data);
        } else if (!dev->dry_run) {
            read_vector(m, item, item->kind == GGUF_NUMBER ? at : ((struct tensor *)at)->data);
        }
    }
}

static const struct gguf_item *item_of(const struct merged *m, enum gguf_kind kind)
{
    int64_t i = 0;
    while (m->items.items[i].kind != kind) i++;
    return &m->items.items[i];
}

void merged_read_embed(const struct merged *m, struct device *dev, struct weight *embed)
{
    read_weight(m, dev, item_of(m, GGUF_EMBED), embed, true);
}

void merged_read_head(const struct merged *m, struct device *dev, struct weight *head, struct tensor *norm)
{
    read_weight(m, dev, item_of(m, GGUF_HEAD), head, true);
    *norm = arena_tensor_1d(&dev->weights, DT_F32, item_of(m, GGUF_NORM)->n_col);
    if (!dev->dry_run) read_vector(m, item_of(m, GGUF_NORM), norm->data);
}
