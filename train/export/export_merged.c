/* export_merged.c - the checkpoint with the adapter merged: W + scale * B A, tensor by tensor in the published layout.
 *
 * A tensor without adapter and with the same layout in source and export is copied byte by byte. All others are
 * computed from the weights that the trainer loads (model/weights.h), one layer and one decoded expert at a time.
 * merged-bf16 has no packed weights. merged-mxfp4 has the experts of gpt-oss in MXFP4, and DeepSeek-V4 in its published
 * layout, MXFP4 experts and other matrices in FP8. The codes are those that training read after quantisation-aware
 * training (export_quant.h), otherwise the nearest codes (kernels/format/quant.h, quant_mxfp4_merge). */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/shards.h"
#include "kernels/format/quant.h"
#include "model/layer.h"
#include "model/stored/published.h"
#include "model/stored/source.h"
#include "train/export/export_job.h"
#include "train/export/export_quant.h"
#include "train/export/merged_files.h"

#define SHARD_BYTES 4500000000
#define COPY_BYTES  (32 << 20)
#define HEAD_BYTES  512 /* upper bound of the bytes that a tensor takes in the header and in the index together */

enum which { COPY, DECODED, MATRIX, ROUTER, UP_BIAS, DOWN_BIAS, INPUT_SCALE };
/* Of values in bf16: [out, in], [E, out, in] or [E, in, out]. */
enum form { DENSE, STACK, TRANSPOSED };

/* The source of one tensor of the output. */
struct made {
    enum which which;
    enum form form;
    const struct stored_layout
        *layout; /* layout of the codes, whose scales are the next tensors; NULL: values in bf16 */
    int64_t layer;
    size_t proj;                  /* MATRIX: offset of its struct proj in struct layer_weights */
    const struct st_tensor *copy; /* COPY; DECODED: FP8 that becomes bf16 */
    int64_t row, n_row;           /* rows of each matrix that this tensor has */
    struct row_order order;       /* the order of these rows in the file; values are computed in the order of memory */
    int64_t exp, n_exp;           /* experts that this tensor has */
    const struct lora_param *a, *b; /* NULL: not adapted */
    int64_t b_row;
    bool joined;    /* readers join the tensor with a matrix that has an adapter and is therefore in bf16 */
    bool quantised; /* as struct proj_quant of its product has it */
    int part;       /* of that product */
    float value;    /* INPUT_SCALE */
};

struct merge {
    struct export *x;
    const char *prefix; /* of the source's names, "model." */
    struct device dev;
    struct st_entry *entries;
    struct made *made;
    int64_t n, cap;
    struct shards shards;
    struct progress progress;
    int64_t done;
};

static const struct proj *proj_in(const struct layer_weights *lw, size_t proj)
{
    return (const struct proj *)(const void *)((const char *)lw + proj);
}

/* ---- the list of tensors ---- */

/* Whether w already has the format of the export's quantised matrices. */
static bool has_format(const struct merge *m, const struct weight *w)
{
    return w->format == export_format_packs(m->x->format);
}
static bool is_mxfp4(const struct merge *m) { return m->x->format == EXPORT_MERGED_MXFP4; }
/* Whether the export has the layout of DeepSeek-V4's publisher. merged-bf16 has the publisher's names too, because
 * transformers reads no others. */
static bool is_published(const struct merge *m) { return is_mxfp4(m) && m->x->run.arch.names->published; }

static struct made *add_as(struct merge *m, const char *name, struct st_entry e)
{
    if (m->n == m->cap) {
        const int64_t cap = 2 * m->cap + 256;
        m->entries = mem_grow(m->entries, m->cap, cap, sizeof(*m->entries));
        m->made = mem_grow(m->made, m->cap, cap, sizeof(*m->made));
        m->cap = cap;
    }
    char file[256];
    if (m->x->run.arch.names->published && published_name(file, sizeof(file), name)) name = file;
    e.name = mem_strdup(name);
    m->entries[m->n] = e;
    return &m->made[m->n++];
}

static struct made *add(struct merge *m, const char *name, enum dtype dtype, int ndim, const int64_t *shape)
{
    struct st_entry e = {.dtype = dtype, .ndim = ndim};
    memcpy(e.shape, shape, (size_t)ndim * sizeof(*shape));
    return add_as(m, name, e);
}

static struct made *add_copy(struct merge *m, const char *name, const struct st_tensor *t)
{
    struct st_entry e = {.st_dtype = t->st_dtype, .ndim = t->ndim};
    memcpy(e.shape, t->shape, sizeof(e.shape));
    struct made *made = add_as(m, name, e);
    made->copy = t;
    return made;
}

static void layer_name(char name[256], const struct merge *m, int64_t layer, const char *rest, const char *suffix)
{
    snprintf(name, 256, "%slayers.%lld.%s%s", m->prefix, (long long)layer, rest, suffix);
}

/* The part of a name after "model.layers.N."; NULL: the name is not of a layer. */
static const char *rest_of(const struct merge *m, const char *name, int64_t *layer)
{
    static const char layers[] = "layers.";
    const size_t n = strlen(m->prefix), k = sizeof(layers) - 1;
    if (strncmp(name, m->prefix, n) || strncmp(name + n, layers, k)) return NULL;
    *layer = strtoll(name + n + k, NULL, 10);
    const char *dot = strchr(name + n + k, '.');
    return dot ? dot + 1 : NULL;
}

/* The source's tensor `name` if it can be copied unchanged, else NULL. w: the same weight as the trainer loads it. */
static const struct st_tensor *as_it_is(const struct merge *m, const char *name, const struct weight *w, enum form form)
{
    const struct st_tensor *t = safetensors_find(&m->x->run.st, name);
    if (t && form == TRANSPOSED && t->shape[1] != w->n_in) return NULL; /* as transformers saved it */
    return t && weight_is_dense(w->format) && t->dtype != DT_U8 && t->dtype != DT_NONE ? t : NULL;
}

/* Adds the tensors of codes and scales of the matrix or stack `name`, in the layout of `how`. copied: copies them from
 * the source; returns false, and adds nothing, if the source has another layout. */
static bool add_codes(struct merge *m, const char *name, int64_t n_in, struct made how, bool copied)
{
    const struct stored_tensor *t = how.layout->plane;
    const int64_t shape[] = {how.n_exp, how.n_row, n_in}, *from = how.layout->data.last ? shape : shape + 1;
    const struct st_tensor *source[PLANES];
    struct st_entry e[PLANES];
    for (int p = 0; p < PLANES; p++) {
        if (!t[p].suffix) continue;
        e[p] = stored_entry(&t[p], from == shape ? 3 : 2, from);
        source[p] = safetensors_beside(&m->x->run.st, name, strlen(name), t[p].suffix);
        const bool same = source[p] && source[p]->bytes == safetensors_entry_bytes(&e[p]) &&
                          !strcmp(source[p]->st_dtype, e[p].st_dtype);
        if (copied && !same) return false;
    }
    for (int p = 0; p < PLANES; p++) {
        char full[300];
        if (!t[p].suffix) continue;
        snprintf(full, sizeof(full), "%s%s", name, t[p].suffix);
        if (copied)
            add_copy(m, full, source[p])->layout = how.layout;
        else
            *add_as(m, full, e[p]) = p == PLANE_DATA ? how : (struct made){.layer = -1};
    }
    return true;
}

static void add_input_scale(struct merge *m, const char *weight, const struct proj *p)
{
    const struct fakequant *f = &m->x->qat.opt.inputs;
    char name[300];
    if (!f->bits || !p->in.amax.ndim) return;
    snprintf(name, sizeof(name), "%.*s.input_scale", (int)(strlen(weight) - strlen(".weight")), weight);
    *add(m, name, DT_F32, f->block ? 0 : 1, (int64_t[]){1}) = (struct made){
        .which = INPUT_SCALE, .layer = -1, .value = export_quant_input_scale(f, *(const float *)p->in.amax.data)};
}

/* The layout of a matrix that the export stores as codes: that of the publisher, of MXFP4 stacks, or of the format of
 * the export. NULL: the matrix is in bf16. *as_read: the source has this layout, and its codes are copied, because
 * quantising its values would round them again. */
static const struct stored_layout *layout_of(const struct merge *m, const char *name, const struct proj *p,
                                             const struct made *how, bool stacked, bool *as_read)
{
    const struct fakequant *f = &p->quant.format;
    const bool frozen = !how->a && !how->quantised;
    const struct stored_layout *l = is_published(m) ? export_quant_layout(&m->x->run.st, name) : NULL;
    *as_read = frozen && has_format(m, &p->w);
    if (l) *as_read = frozen && format_of(&p->w)->bits == format_row(l->format, false)->bits;
    if (l) return l;
    if (stacked && is_mxfp4(m)) return &stored_as_mxfp4_stack;
    if (!how->quantised || f->kind == FQ_MXFP4) return NULL;
    *as_read = !m->x->trained && !how->a && has_format(m, &p->w);
    return f->block ? &stored_as_nvfp4 : &stored_as_fp8;
}

/* Adds a tensor that is computed from p. `how` says which rows and experts of p it has, and in which form. target
 * LORA_TARGETS: it cannot have an adapter. */
static void add_matrix(struct merge *m, const char *rest, const struct proj *p, enum lora_target target,
                       struct made how)
{
    const struct weight *w = &p->w;
    const int64_t e = how.n_exp;
    const struct adapters *ad = &m->x->adapter.ad;
    char name[256];
    bool as_read;
    layer_name(name, m, how.layer, rest, "");
    how.quantised = p->quant.format.bits;
    if (p->quant.n_part <= 1) how.part = 0;
    if (target < LORA_TARGETS) {
        how.a = adapters_find(ad, how.layer, target, false);
        how.b = adapters_find(ad, how.layer, target, true);
    }
    how.layout = layout_of(m, name, p, &how, how.form == TRANSPOSED, &as_read);
    const struct st_tensor *t = how.layout || how.a || how.quantised ? NULL : as_it_is(m, name, w, how.form);
    if (how.layout) {
        if (!as_read || !add_codes(m, name, w->n_in, how, true)) add_codes(m, name, w->n_in, how, false);
        if (!is_mxfp4(m)) add_input_scale(m, name, p);
    } else if (t && !(how.joined && t->dtype != DT_BF16)) {
        add_copy(m, name, t);
    } else if (how.form == STACK) {
        *add(m, name, DT_BF16, 3, (int64_t[]){e, how.n_row, w->n_in}) = how;
    } else if (how.form == TRANSPOSED) {
        *add(m, name, DT_BF16, 3, (int64_t[]){e, w->n_in, how.n_row}) = how;
    } else {
        *add(m, name, DT_BF16, 2, (int64_t[]){how.n_row, w->n_in}) = how;
    }
}

static size_t proj_at(enum lora_target t)
{
    return t == LORA_UP ? offsetof(struct layer_weights, up) : offsetof(struct layer_weights, down);
}

/* All experts in one tensor, with the biases of gpt-oss. */
static void add_stack(struct merge *m, int64_t l, const char *rest, const struct proj *p, enum lora_target target)
{
    const struct weight *w = &p->w;
    const struct arch *a = &m->x->run.arch;
    const struct made how = {.which = MATRIX,
                             .form = a->transposed_stacks ? TRANSPOSED : STACK,
                             .layer = l,
                             .proj = proj_at(target),
                             .n_row = w->n_out,
                             .n_exp = w->n_exp};
    char name[256];
    add_matrix(m, rest, p, target, how);
    if (!a->expert_bias) return;
    layer_name(name, m, l, rest, "_bias");
    const struct st_tensor *t = safetensors_find(&m->x->run.st, name);
    if (t)
        add_copy(m, name, t);
    else
        *add(m, name, DT_BF16, 2, (int64_t[]){w->n_exp, w->n_out}) =
            (struct made){.which = target == LORA_UP ? UP_BIAS : DOWN_BIAS, .layer = l};
}

static void add_each(struct merge *m, int64_t l, const char *pattern, const struct proj *p, enum lora_target target,
                     int64_t row, int64_t n_row)
{
    const size_t before = strcspn(pattern, "#");
    char rest[192];
    for (int64_t e = 0; e < p->w.n_exp; e++) {
        snprintf(rest, sizeof(rest), "%.*s%lld%s.weight", (int)before, pattern, (long long)e, pattern + before + 1);
        const struct made how = {.which = MATRIX,
                                 .layer = l,
                                 .proj = proj_at(target),
                                 .row = row,
                                 .b_row = row,
                                 .n_row = n_row,
                                 .exp = e,
                                 .n_exp = 1};
        add_matrix(m, rest, p, target, how);
    }
}

/* Whether the experts of a layer are two stacks in the export. They are if the family has no names for single experts,
 * or in merged-bf16 if the source has stacks, or transformers reads nothing else. */
static bool is_stacked(const struct merge *m, int64_t l, const struct tensor_names *n)
{
    char name[256], stack[LORA_MODULE_TEXT];
    lora_stack_module(n, LORA_UP, stack);
    layer_name(name, m, l, stack, "");
    return !n->up || (m->x->format == EXPORT_MERGED_BF16 && (n->stacked || safetensors_find(&m->x->run.st, name)));
}

static void add_experts(struct merge *m, int64_t l, const struct layer_weights *lw)
{
    const struct tensor_names *n = m->x->run.arch.names;
    const int64_t f = lw->down.w.n_in;
    char up[LORA_MODULE_TEXT], down[LORA_MODULE_TEXT];
    lora_stack_module(n, LORA_UP, up);
    lora_stack_module(n, LORA_DOWN, down);
    if (is_stacked(m, l, n)) {
        add_stack(m, l, up, &lw->up, LORA_UP);
        add_stack(m, l, down, &lw->down, LORA_DOWN);
        return;
    }
    if (n->gate) add_each(m, l, n->gate, &lw->up, LORA_UP, 0, f);
    add_each(m, l, n->up, &lw->up, LORA_UP, n->gate ? f : 0, f);
    add_each(m, l, n->down, &lw->down, LORA_DOWN, 0, lw->down.w.n_out);
}

static void add_router(struct merge *m, int64_t l, const struct layer_weights *lw)
{
    const struct tensor_names *n = m->x->run.arch.names;
    char name[256], other[256], rest[128], bias[2][ARCH_NAME];
    snprintf(rest, sizeof(rest), "%s.weight", n->router[0]);
    const struct proj router = {.w = lw->router};
    add_matrix(m, rest, &router, LORA_TARGETS,
               (struct made){.which = ROUTER, .layer = l, .n_row = lw->router.n_out, .n_exp = 1});
    if (lw->hash.ndim) {
        layer_name(name, m, l, n->router[0], ".tid2eid");
        add_copy(m, name, safetensors_find(&m->x->run.st, name));
    }
    if (!lw->router_bias.ndim) return;
    for (int i = 0; i < 2; i++) arch_router_bias(n, n->router[i] ? n->router[i] : n->router[0], bias[i]);
    layer_name(name, m, l, bias[0], "");
    layer_name(other, m, l, bias[1], "");
    const struct st_tensor *t = safetensors_find(&m->x->run.st, name);
    add_copy(m, name, t ? t : safetensors_find(&m->x->run.st, other));
}

/* Adds the Linears of a product: in files each target is a separate matrix. */
static void add_linears(struct merge *m, int64_t l, const struct layer_weights *lw, const struct product *p)
{
    char module[LORA_MODULE_TEXT], rest[LORA_MODULE_TEXT + 8];
    bool joined = false;
    for (int64_t k = 0; k < p->n_target; k++)
        joined |= adapters_find(&m->x->adapter.ad, l, p->target[k], false) != NULL;
    for (int64_t k = 0, row = 0; k < p->n_target; row += p->rows[k++]) {
        lora_target_module(m->x->run.arch.names, p->target[k], module);
        snprintf(rest, sizeof(rest), "%s.weight", module);
        add_matrix(m, rest, proj_in(lw, p->proj), p->target[k],
                   (struct made){.which = MATRIX,
                                 .layer = l,
                                 .proj = p->proj,
                                 .row = row,
                                 .n_row = p->rows[k],
                                 .order = p->order,
                                 .joined = joined,
                                 .n_exp = 1,
                                 .part = (int)k});
    }
}

static void add_layer(struct merge *m, int64_t l, const struct layer_weights *lw)
{
    const struct arch *a = &m->x->run.arch;
    struct product p[LAYER_PRODUCTS];
    layer_products(a, l, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        if (!p[i].experts) add_linears(m, l, lw, &p[i]);
    if (!arch_is_routed(a, l)) return;
    add_router(m, l, lw);
    add_experts(m, l, lw);
}

/* Whether `rest` begins with the weight of a Linear that add_linears lists. */
static bool is_linear(const struct arch *a, int64_t l, const char *rest)
{
    struct product p[LAYER_PRODUCTS];
    char module[LORA_MODULE_TEXT];
    layer_products(a, l, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        for (int k = 0; k < p[i].n_target && !p[i].experts; k++) {
            lora_target_module(a->names, p[i].target[k], module);
            const size_t n = strlen(module);
            if (!strncmp(rest, module, n) && !strncmp(rest + n, ".weight", 7)) return true;
        }
    return false;
}

/* Whether the tensor is part of a matrix that add_layer lists, in any format. */
static bool is_matrix(const struct merge *m, const char *name)
{
    const struct arch *a = &m->x->run.arch;
    const char *const parts[] = {"mlp.experts", "block_sparse_moe.experts", lora_experts_module(a->names)};
    int64_t layer;
    const char *rest = rest_of(m, name, &layer);
    if (!rest || layer >= a->n_layer) return false;
    for (int64_t i = 0; i < MT_LEN(parts); i++)
        if (!strncmp(rest, parts[i], strlen(parts[i])) && rest[strlen(parts[i])] == '.') return true;
    if (is_linear(a, layer, rest)) return true;
    for (int i = 0; i < 2 && a->names->router[i]; i++) {
        const size_t n = strlen(a->names->router[i]);
        char bias[ARCH_NAME];
        arch_router_bias(a->names, a->names->router[i], bias);
        if (!strcmp(rest, bias) || (!strncmp(rest, a->names->router[i], n) && rest[n] == '.')) return true;
    }
    return false;
}

static bool is_packed(const struct st_tensor *t) { return t->dtype == DT_NONE || t->dtype == DT_U8; }

static bool is_prediction(const struct merge *m, const char *name)
{
    return arch_is_prediction(&m->x->run.arch, name) || !strncmp(name, "mtp.", 4);
}

/* The number of tensors of multi-token prediction that are left out: all if some are quantised, since only the
 * publisher's layout can hold these; otherwise 0. */
static int64_t predictions_left_out(const struct merge *m)
{
    const struct safetensors *st = &m->x->run.st;
    int64_t n = 0;
    bool packed = false;
    for (int64_t i = 0; i < st->n_tensors; i++) {
        if (!is_prediction(m, st->tensors[i].name)) continue;
        packed = packed || is_packed(&st->tensors[i]);
        n++;
    }
    return packed && !is_published(m) ? n : 0;
}

/* Adds an FP8 tensor that cannot have an adapter (DeepSeek-V4's o_a_proj, its indexer). merged-mxfp4 copies it with its
 * scales; merged-bf16 decodes it and leaves out the scales. */
static void add_frozen(struct merge *m, const struct st_tensor *t)
{
    if (is_mxfp4(m))
        add_copy(m, t->name, t);
    else if (!strcmp(t->st_dtype, stored_as_fp8.data.st_dtype))
        *add(m, t->name, DT_BF16, t->ndim, t->shape) = (struct made){.which = DECODED, .copy = t};
}

static int add_rest(struct merge *m, struct err *err)
{
    const struct safetensors *st = &m->x->run.st;
    const int64_t left_out = predictions_left_out(m);
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        if (is_matrix(m, t->name) || source_is_activation_scale(t->name)) continue;
        if (left_out && is_prediction(m, t->name)) continue;
        if (is_packed(t) && m->x->run.arch.names->published) {
            add_frozen(m, t);
            continue;
        }
        if (is_packed(t))
            return err_set(
                err, "tensor %s is %s: in a checkpoint to merge, only attention, router and experts may be packed",
                t->name, t->st_dtype);
        add_copy(m, t->name, t);
    }
    return 0;
}

/* ---- opening ---- */

static void merge_close(struct merge *m)
{
    shards_close(&m->shards);
    for (int64_t i = 0; i < m->n; i++) mem_free((void *)(uintptr_t)m->entries[i].name);
    mem_free(m->entries);
    mem_free(m->made);
    device_close(&m->dev);
}

static int load(struct merge *m, struct layer_weights *lw, struct device *dev, int64_t l, struct err *err)
{
    const struct weights_source from = {.arch = &m->x->run.arch, .st = &m->x->run.st};
    return weights_load_layer(lw, dev, &from, &m->x->quantize, l, err);
}

static int check_published(const struct merge *m, const struct layer_weights *lw, int64_t l, struct err *err)
{
    const bool mxfp4 = has_format(m, &lw->up.w);
    if (mxfp4 && export_quant_published(&m->x->run.st, l)) return 0;
    return err_set(err, "merged-mxfp4: training read the experts %s%s, not in MXFP4 as published: use merged-bf16",
                   mxfp4 ? "packed by model.quantize" : "in ", mxfp4 ? "" : weight_format_name(lw->up.w.format));
}

/* Lists the tensors; allocates memory for the largest layer. */
static int merge_open(struct merge *m, struct export *x, struct err *err)
{
    struct device measure;
    const struct arch *a = &x->run.arch;
    *m = (struct merge){.x = x, .prefix = weights_prefix(&x->run.st)};
    device_dry_run(&measure, &x->run.dev);
    int rc = add_rest(m, err);
    for (int64_t l = 0; l < a->n_layer && !rc; l++) {
        struct layer_weights lw;
        const int64_t mark = arena_mark(&measure.weights);
        rc = load(m, &lw, &measure, l, err);
        if (!rc && is_published(m)) rc = check_published(m, &lw, l, err);
        if (!rc) {
            export_quant_layer(x, &measure, &lw, l);
            add_layer(m, l, &lw);
            struct product p[LAYER_PRODUCTS];
            layer_products(a, l, p);
            for (int i = 0; i < LAYER_PRODUCTS; i++)
                if (p[i].n_out) cpu_adapter_measure(&measure, p[i].n_out, p[i].n_in, adapters_max_rank(&x->adapter.ad));
        }
        arena_release(&measure.weights, mark);
    }
    if (!rc) rc = device_open(&m->dev, "cpu", "fp32", err);
    m->dev.n_threads = x->run.dev.n_threads;
    if (!rc) rc = device_reserve(&m->dev, &m->dev.weights, "weights", measure.weights.peak, err);
    if (!rc) rc = device_reserve(&m->dev, &m->dev.work, "work", measure.work.peak, err);
    if (rc) merge_close(m);
    return rc;
}

/* ---- making a tensor ---- */

static int put(struct merge *m, int64_t i, int64_t at, const void *data, int64_t size, struct err *err)
{
    m->done += size;
    progress_tell(&m->progress, m->done);
    return shards_put(&m->shards, i, at, data, size, err);
}

static int put_copy(struct merge *m, int64_t i, struct err *err)
{
    const struct st_tensor *t = m->made[i].copy;
    int rc = 0;
    for (int64_t at = 0; at < t->bytes && !rc; at += COPY_BYTES)
        rc = put(m, i, at, t->data + at, MT_MIN(COPY_BYTES, t->bytes - at), err);
    safetensors_drop(&m->x->run.st, t);
    return rc;
}

static int put_decoded(struct merge *m, int64_t i, struct err *err)
{
    const struct st_tensor *t = m->made[i].copy;
    struct checkpoint ck;
    struct source s;
    char *out = NULL;
    checkpoint_open(&ck, &m->x->run.st, NULL, m->dev.n_threads);
    int rc = source_find(&s, &ck, t->name, t->shape[0], t->shape[1], err);
    if (!rc) rc = source_check(&s, err);
    if (!rc) {
        const struct format *to = format_row(s.format, false);
        const int64_t bytes = source_bytes(&s, to, PLANE_DATA);
        out = mem_alloc(bytes);
        source_copy(&s, to, PLANE_DATA, out, m->dev.n_threads);
        rc = put(m, i, 0, out, bytes, err);
    }
    mem_free(out);
    checkpoint_close(&ck);
    return rc;
}

/* w [n_row, n_in] += scale * B A of one expert. */
static void add_delta(struct merge *m, const struct made *how, int64_t e, float *w, int64_t n_in)
{
    int64_t *rows = mem_array(how->n_row, sizeof(*rows));
    for (int64_t o = 0; o < how->n_row; o++) rows[o] = how->b_row + arch_stored_row(&how->order, o);
    cpu_adapter_add(&m->x->adapter, &m->dev, how->a, how->b, e, rows, how->n_row, w, n_in);
    mem_free(rows);
}

static int put_dense(struct merge *m, int64_t i, int64_t nth, const float *w, int64_t n_in, struct err *err)
{
    const struct made *how = &m->made[i];
    const int64_t n = how->n_row * n_in;
    uint16_t *out = mem_array(n, sizeof(*out));
    int rc = 0;
    for (int64_t o = 0; o < how->n_row; o++) {
        const float *from = w + arch_row_in_memory(&how->order, o) * n_in;
        for (int64_t j = 0; j < n_in; j++)
            out[how->form == TRANSPOSED ? j * how->n_row + o : o * n_in + j] = f32_to_bf16(from[j]);
    }
    for (int64_t k = 0; k < n && !rc; k++)
        if ((out[k] & 0x7f80) == 0x7f80) rc = err_set(err, "%s: a merged weight is not finite", m->entries[i].name);
    if (!rc) rc = put(m, i, 2 * nth * n, out, 2 * n, err);
    mem_free(out);
    return rc;
}

/* Writes the nearest codes. MXFP4: a code of the source stays if no other code is nearer. */
static int put_nearest(struct merge *m, int64_t i, int64_t nth, const float *values, const struct weight *w,
                       struct err *err)
{
    const struct made *how = &m->made[i];
    const int64_t n = how->n_row * w->n_in, first = ((how->exp + nth) * w->n_out + how->row) * w->n_in;
    const int64_t size = safetensors_entry_bytes(&m->entries[i]) / how->n_exp,
                  n_scale = safetensors_entry_bytes(&m->entries[i + 1]) / how->n_exp;
    const bool again = w->format == how->layout->format;
    uint8_t *out = mem_alloc(size + n_scale), *scales = out + size;
    const int64_t n_bad =
        how->layout == &stored_as_fp8_blocks
            ? quant_fp8_blocks(out, scales, values, how->n_row, w->n_in, m->dev.n_threads)
            : quant_mxfp4_merge(out, scales, values, again ? (const uint8_t *)w->data + first / 2 : NULL,
                                again ? w->scale + first / 32 : NULL, n, m->dev.n_threads);
    int rc = n_bad ? err_set(err, "%s: a merged weight is not finite", m->entries[i].name) : 0;
    if (!rc) rc = put(m, i, nth * size, out, size, err) || put(m, i + 1, nth * n_scale, scales, n_scale, err) ? -1 : 0;
    mem_free(out);
    return rc;
}

/* Sorts rows of `size` bytes from the order of memory to the order of the file. */
static void sort_rows(const struct made *how, uint8_t *data, int64_t size)
{
    if (!how->order.n_group) return;
    uint8_t *copy = mem_alloc(how->n_row * size);
    memcpy(copy, data, (size_t)(how->n_row * size));
    for (int64_t o = 0; o < how->n_row; o++)
        memcpy(data + o * size, copy + arch_row_in_memory(&how->order, o) * size, (size_t)size);
    mem_free(copy);
}

/* Writes the codes of the matrix that training read, or if the tensor is bf16 the values of these codes. w: the base
 * weight. */
static int put_quantised(struct merge *m, int64_t i, int64_t nth, float *w, const struct proj *p, struct err *err)
{
    const struct made *how = &m->made[i];
    const struct cpu_adapter *h = &m->x->adapter;
    const struct fakequant *f = &p->quant.format;
    const int64_t n_in = p->w.n_in, n = how->n_row * n_in, e = how->exp + nth;
    const struct tensor x = tensor_3d(w, DT_F32, 1, how->n_row, n_in);
    const struct tensor amax = tensor_1d((float *)p->quant.amax.data + e * p->quant.n_part + how->part, DT_F32, 1);
    if (how->a)
        fakequant_merge(w, cpu_adapter_at(h, how->b, e, how->b_row, 0), cpu_adapter_at(h, how->a, e, 0, 0),
                        how->b->cols, h->ad.scale[how->b->target], how->n_row, n_in, m->dev.n_threads);
    for (int64_t k = 0; k < n; k++)
        if (!isfinite(w[k])) return err_set(err, "%s: a merged weight is not finite", m->entries[i].name);
    if (!how->layout) {
        op_fake_quant(&m->dev, x, x, amax, f);
        return put_dense(m, i, nth, w, n_in, err);
    }
    float top;
    const int64_t size = n * f->bits / 8, n_scale = f->block ? n / f->block : 0;
    uint8_t *codes = mem_alloc(size + n_scale);
    struct tensor scales = {0};
    if (f->block) scales = tensor_3d(codes + size, DT_U8, 1, how->n_row, n_in / f->block);
    op_quant_pack(&m->dev, tensor_3d(codes, DT_U8, 1, how->n_row, n_in * f->bits / 8), scales,
                  tensor_1d(&top, DT_F32, 1), x, amax, f);
    sort_rows(how, codes, size / how->n_row);
    if (f->block) sort_rows(how, codes + size, n_scale / how->n_row);
    int rc = put(m, i, nth * size, codes, size, err);
    if (!rc && f->block) rc = put(m, i + 1, nth * n_scale, codes + size, n_scale, err);
    if (!rc && f->kind != FQ_MXFP4) rc = put(m, f->block ? i + 2 : i + 1, 0, &top, sizeof(top), err);
    mem_free(codes);
    return rc;
}

static int put_matrix(struct merge *m, int64_t i, const struct layer_weights *lw, struct err *err)
{
    const struct made *how = &m->made[i];
    const struct weight *w = how->which == ROUTER ? &lw->router : &proj_in(lw, how->proj)->w;
    const int64_t n = how->n_row * w->n_in;
    float *values = mem_array(n, sizeof(*values));
    int rc = 0;
    for (int64_t e = 0; e < how->n_exp && !rc; e++) {
        quant_decode(values, w, how->exp + e, how->row * w->n_in, n, m->dev.n_threads);
        if (how->quantised) {
            rc = put_quantised(m, i, e, values, proj_in(lw, how->proj), err);
            continue;
        }
        if (how->a) add_delta(m, how, how->exp + e, values, w->n_in);
        rc = how->layout ? put_nearest(m, i, e, values, w, err) : put_dense(m, i, e, values, w->n_in, err);
    }
    mem_free(values);
    return rc;
}

static int put_bias(struct merge *m, int64_t i, struct tensor bias, struct err *err)
{
    const int64_t n = tensor_count(bias);
    uint16_t *out = mem_array(n, sizeof(*out));
    for (int64_t k = 0; k < n; k++) out[k] = f32_to_bf16(((const float *)bias.data)[k]);
    const int rc = put(m, i, 0, out, 2 * n, err);
    mem_free(out);
    return rc;
}

static int write_tensors(struct merge *m, struct err *err)
{
    struct layer_weights lw = {.attn_norm = {0}};
    int64_t layer = -1;
    for (int64_t i = 0; i < m->n; i++) {
        const struct made *how = &m->made[i];
        if (how->copy) {
            if (how->which == DECODED ? put_decoded(m, i, err) : put_copy(m, i, err)) return -1;
            continue;
        }
        if (how->which == INPUT_SCALE && put(m, i, 0, &how->value, sizeof(how->value), err)) return -1;
        if (how->layer < 0) continue; /* scales of weights, written with their blocks */
        if (how->layer != layer) {
            layer = how->layer;
            arena_release(&m->dev.weights, 0);
            if (load(m, &lw, &m->dev, layer, err)) return -1;
            export_quant_layer(m->x, &m->dev, &lw, layer);
        }
        const bool bias = how->which == UP_BIAS || how->which == DOWN_BIAS;
        if (bias ? put_bias(m, i, how->which == UP_BIAS ? lw.up.bias : lw.down.bias, err) : put_matrix(m, i, &lw, err))
            return -1;
    }
    return shards_finish(&m->shards, err);
}

/* ---- called by export.c ---- */

/* Whether the module is k_proj of a layer whose values are its keys. vLLM's qkv_proj of such a layer has a v_proj too,
 * and vLLM requires the same format of all three. */
static bool is_value_too(const struct merge *m, const char *module)
{
    int64_t layer;
    const char *rest = rest_of(m, module, &layer);
    return rest && !strcmp(rest, "self_attn.k_proj") && layer < m->x->run.arch.n_layer &&
           arch_attn(&m->x->run.arch, layer)->values_are_keys;
}

/* The names of the modules whose matrices are not quantised, without the embedding. The caller frees all. */
static char **dense_modules(const struct merge *m, int64_t *n)
{
    static const char *const tails[] = {".weight", ".gate_up_proj"}; /* of a matrix, of a stack of experts */
    char **names = mem_array(2 * m->n + 1, sizeof(*names));
    *n = 0;
    for (int64_t i = 0; i < m->n; i++) {
        const char *name = m->entries[i].name;
        const int ndim = m->entries[i].ndim;
        if (ndim < 2 || ndim > 3 || m->made[i].layout || !str_ends(name, tails[ndim - 2])) continue;
        if (str_ends(name, "embed_tokens.weight") || str_ends(name, ".embeddings.weight") ||
            !strcmp(name, "lm_head.weight"))
            continue;
        char *module = names[(*n)++] = mem_strdup(name);
        module[strlen(name) - strlen(tails[ndim - 2])] = 0;
        if (!is_value_too(m, module)) continue;
        names[*n] = mem_strdup(module);
        names[(*n)++][strlen(module) - strlen("k_proj")] = 'v';
    }
    names[(*n)++] = mem_strdup("lm_head");
    return names;
}

static int write_files(const struct merge *m, struct err *err)
{
    int64_t n;
    char **dense = dense_modules(m, &n);
    const int rc = merged_files_write(m->x, (const char *const *)dense, n, !predictions_left_out(m), err);
    for (int64_t i = 0; i < n; i++) mem_free(dense[i]);
    mem_free(dense);
    return rc;
}

/* Prints what the export does with tensors that training does not read. */
static void tell_others(const struct merge *m)
{
    const int64_t left_out = predictions_left_out(m);
    int64_t copied = 0;
    for (int64_t i = 0; i < m->n; i++)
        copied += arch_is_other_part(m->entries[i].name) || is_prediction(m, m->entries[i].name);
    if (left_out)
        log_info("the layer of multi-token prediction is quantised: the export leaves out its %lld tensor%s",
                 (long long)left_out, str_plural(left_out));
    if (copied)
        log_info("%lld tensor%s of the vision tower and of multi-token prediction %s copied unchanged",
                 (long long)copied, str_plural(copied), copied == 1 ? "is" : "are");
}

int export_merged_bytes(struct export *x, int64_t *bytes, struct err *err)
{
    struct merge m;
    if (merged_files_bytes(x, bytes, err) || merge_open(&m, x, err)) return -1;
    *bytes += 1 << 20;
    for (int64_t i = 0; i < m.n; i++) *bytes += safetensors_entry_bytes(&m.entries[i]) + HEAD_BYTES;
    merge_close(&m);
    return 0;
}

int export_merged(struct export *x, struct err *err)
{
    struct merge m;
    if (merge_open(&m, x, err)) return -1;
    tell_others(&m);
    int rc = shards_open(&m.shards, x->tmp, m.entries, m.n, SHARD_BYTES, err);
    m.progress = progress_start("merging", m.shards.bytes);
    if (!rc) rc = write_tensors(&m, err) || write_files(&m, err) ? -1 : 0;
    merge_close(&m);
    return rc;
}
