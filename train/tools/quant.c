/* quant.c - see quant.h. Writes decoded values under the same names, or codes and scales.
 *
 * It makes two passes over the file, in chunks of rows. The first finds the largest magnitude of every expert, and
 * values that are not finite. The second writes. A file has its tensors in the order of dtypes, so codes and scales of
 * one tensor are not adjacent: the second pass computes each of them separately. */
#include "train/tools/quant.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/json/json.h"
#include "data/safetensors.h"
#include "kernels/format/fakequant.h"
#include "kernels/ops/ops.h"
#include "model/stored/stored.h"
#include "train/adapter/adapter_dir.h"
#include "train/config/config.h"
#include "train/launch/process.h"

enum {
    CHUNK = 4 << 20, /* elements; a longer row is a chunk */
    EMPTY = 1 << 20  /* largest number of experts, rows or columns of a packed tensor without elements */
};

enum part { PART_COPY, PART_VALUES, PART_CODES, PART_SCALES, PART_TOP, PART_SHAPE };

struct item {
    const struct st_tensor *t;
    int64_t n_exp, n_row, n_in;
    bool swapped; /* the file has [E, in, out] */
    float *amax;  /* [n_exp]; NULL: copied */
};
struct piece {
    struct item *item;
    enum part part;
};

struct quant {
    const struct quant_options *opt;
    struct fakequant f;
    struct safetensors st;
    struct device dev;
    struct item *items; /* [st.n_tensors] */
    struct st_entry *entries;
    struct piece *pieces;                   /* of the entries, which point to them */
    int64_t n_entry, n_quantised, n_before; /* n_quantised: tensors that this command quantises; n_before: tensors that
                                               the input already has quantised */
    const char *before;                     /* the first of these */
    char *x, *codes, *scales;               /* of one chunk */
    char *y;                                /* x transposed to [in, out]; NULL: not needed */
    struct file_writer out;
};

/* ---- which tensors, and their shape as experts of matrices */

/* Whether a tensor is only copied: biases, also of experts, and router weights. */
static bool is_copied(const char *name)
{
    static const char *const ends[] = {
        ".bias",        "_bias",       ".router.weight", ".router.layer.weight", ".router.linear.weight",
        ".gate.weight", "_gate.weight"};
    for (int i = 0; i < MT_LEN(ends); i++)
        if (str_ends(name, ends[i])) return true;
    return false;
}

/* Whether config.json beside the input is that of gpt-oss. */
static int read_model_type(const struct quant *q, bool *gpt_oss, struct err *err)
{
    char path[MT_PATH];
    const char *in = q->opt->in, *slash = strrchr(in, '/'), *type = NULL;
    const int n = slash ? (int)(slash - in + 1) : 0;
    *gpt_oss = false;
    if (file_is_dir(in) ? str_format(path, sizeof(path), err, "path of config.json", "%s/config.json", in)
                        : str_format(path, sizeof(path), err, "path of config.json", "%.*sconfig.json", n, in))
        return -1;
    if (!file_exists(path)) return 0;
    struct json_doc *doc = json_load(path, (int64_t)16 << 20, err);
    if (!doc) return -1;
    const int rc = json_opt_str(json_root(doc), "model_type", &type, err);
    *gpt_oss = !rc && type && !strcmp(type, "gpt_oss");
    json_free(doc);
    return rc;
}

/* Sets item->swapped: gpt-oss in bf16 has experts [E, in, out]. It is recognised by a gate_up_proj [E, D, 2F] with a
 * down_proj [E, F, D], or by config.json. Other models have [E, 2F, D] and [E, D, F] under the same names. */
static int find_order(const struct quant *q, struct item *item, struct err *err)
{
    static const char *const ends[] = {".experts.gate_up_proj", ".experts.down_proj"};
    const struct st_tensor *t = item->t;
    const bool down = str_ends(t->name, ends[1]);
    if (t->ndim != 3 || (!down && !str_ends(t->name, ends[0]))) return 0;
    const size_t n = strlen(t->name) - strlen(ends[down]);
    const struct st_tensor *other = safetensors_beside(&q->st, t->name, n, ends[!down]);
    if (!other || other->ndim != 3) return read_model_type(q, &item->swapped, err);
    const int64_t *g = (down ? other : t)->shape, *d = (down ? t : other)->shape;
    item->swapped = g[1] == d[2] && g[2] / 2 == d[1] && g[2] % 2 == 0;
    return 0;
}

/* Sets item->n_exp, the product of the axes before the matrix. If the tensor has elements, the reader has checked that
 * the product does not overflow. If one axis is 0, the other axes may have any size, with --pack at most EMPTY. */
static int count_experts(const struct quant *q, struct item *item, struct err *err)
{
    const struct st_tensor *t = item->t;
    bool fits = t->bytes || (item->n_row <= EMPTY && item->n_in <= EMPTY);
    item->n_exp = 1;
    for (int i = 0; i < t->ndim - 2; i++)
        fits = fits && i64_mul(item->n_exp, t->shape[i], &item->n_exp) && (t->bytes || item->n_exp <= EMPTY);
    if (fits || !q->opt->pack) return 0;
    return err_set(err, "tensor `%s` has no elements, and more than %d experts, rows or columns: leave out --pack",
                   t->name, EMPTY);
}

/* Whether a tensor is a matrix of codes: integers of up to 32 bits (packed), or floats of up to 8 bits. */
static bool is_codes(const struct st_tensor *t)
{
    static const char *const dtypes[] = {"U8", "I8", "I32", "F8", "F6", "F4"};
    for (int i = 0; i < MT_LEN(dtypes) && t->ndim >= 2; i++)
        if (!strncmp(t->st_dtype, dtypes[i], strlen(dtypes[i]))) return true;
    return false;
}

static int add_item(struct quant *q, struct item *item, const struct st_tensor *t, struct err *err)
{
    const int64_t unit = q->f.block ? q->f.block : q->opt->pack && q->f.bits == 4 ? 8 : 1;
    *item = (struct item){.t = t};
    if (is_codes(t) && !q->n_before++) q->before = t->name;
    if (t->ndim < 2 || is_copied(t->name) || t->dtype == DT_NONE || t->dtype == DT_U8 || t->dtype == DT_I32 ||
        t->dtype == DT_I64)
        return 0;
    if (t->dtype == DT_F64) return err_set(err, "tensor `%s` is F64: quant takes BF16, F16 and F32", t->name);
    if (find_order(q, item, err)) return -1;
    item->n_in = t->shape[t->ndim - (item->swapped ? 2 : 1)];
    item->n_row = t->shape[t->ndim - (item->swapped ? 1 : 2)];
    if (item->n_in % unit)
        return err_set(err, "tensor `%s` has rows of %" PRId64 " elements, which are not blocks of %" PRId64 " (%s)",
                       t->name, item->n_in, unit, q->opt->format);
    if (count_experts(q, item, err)) return -1;
    if (t->bytes || q->opt->pack) item->amax = mem_array(item->n_exp, sizeof(*item->amax));
    q->n_quantised++;
    return 0;
}

static int find_items(struct quant *q, struct err *err)
{
    q->items = mem_array(q->st.n_tensors, sizeof(*q->items));
    for (int64_t i = 0; i < q->st.n_tensors; i++)
        if (add_item(q, &q->items[i], &q->st.tensors[i], err)) return err_prefix(err, "%s", q->opt->in);
    return 0;
}

/* ---- chunks */

/* n_row rows of expert e from `first` on, as [1, rows, in]; all rows if the file has [in, out]. */
struct chunk {
    int64_t e, first, n_row;
};

static int64_t chunk_rows(const struct item *item)
{
    if (item->swapped) return item->n_row;
    return MT_MAX(1, MT_MIN(item->n_row, CHUNK / MT_MAX(item->n_in, 1)));
}

static bool chunk_next(const struct item *item, struct chunk *c)
{
    c->first += c->n_row;
    if (c->first >= item->n_row) {
        c->first = 0;
        c->e++;
    }
    if (!item->t->bytes || c->e >= item->n_exp) return false;
    c->n_row = MT_MIN(chunk_rows(item), item->n_row - c->first);
    return true;
}
/* The state before the first chunk. */
static struct chunk chunk_start(const struct item *item) { return (struct chunk){-1, item->n_row, 0}; }

/* Transposes from [n_row, n_col] to `to` [n_col, n_row], elements of 2 or 4 bytes, in tiles that fit the cache. */
static void transpose(char *to, const void *from, int64_t n_row, int64_t n_col, int64_t size)
{
    enum { TILE = 32 };
    const char *x = from;
    for (int64_t r = 0; r < n_row; r += TILE)
        for (int64_t c = 0; c < n_col; c += TILE)
            for (int64_t i = r; i < MT_MIN(r + TILE, n_row); i++)
                for (int64_t j = c; j < MT_MIN(c + TILE, n_col); j++)
                    if (size == 2)
                        memcpy(to + 2 * (j * n_row + i), x + 2 * (i * n_col + j), 2);
                    else
                        memcpy(to + 4 * (j * n_row + i), x + 4 * (i * n_col + j), 4);
}

static struct tensor chunk_load(struct quant *q, const struct item *item, const struct chunk *c)
{
    const int64_t size = dtype_size(item->t->dtype), row = item->n_in * size;
    const uint8_t *from = item->t->data + (c->e * item->n_row + c->first) * row;
    if (item->swapped)
        transpose(q->x, from, item->n_in, item->n_row, size);
    else
        memcpy(q->x, from, (size_t)(c->n_row * row));
    return tensor_3d(q->x, item->t->dtype, 1, c->n_row, item->n_in);
}

/* Allocates buffers for the largest chunk, and the scratch of op_amax for it. */
static int reserve(struct quant *q, struct err *err)
{
    struct device plan;
    int64_t most = 0;
    bool swapped = false;
    for (int64_t i = 0; i < q->st.n_tensors; i++)
        if (q->items[i].amax && q->items[i].t->bytes) most = MT_MAX(most, chunk_rows(&q->items[i]) * q->items[i].n_in);
    for (int64_t i = 0; i < q->st.n_tensors; i++) swapped |= q->items[i].swapped;
    device_dry_run(&plan, &q->dev);
    op_amax(&plan, tensor_1d(NULL, DT_F32, 1), tensor_1d(NULL, DT_F64, 1), tensor_3d(NULL, DT_F32, 1, 1, most));
    q->x = mem_array(most, sizeof(float));
    if (swapped && !q->opt->pack) q->y = mem_array(most, sizeof(float));
    q->codes = mem_alloc(most);
    q->scales = mem_array(q->f.block ? most / q->f.block : 0, sizeof(float));
    return device_reserve(&q->dev, &q->dev.work, "work", plan.work.peak, err);
}

/* ---- first pass */

static int measure(struct quant *q, struct item *item, struct err *err)
{
    float amax;
    double n_bad, sum = 0;
    int64_t bad_expert = -1;
    for (struct chunk c = chunk_start(item); chunk_next(item, &c);) {
        op_amax(&q->dev, tensor_1d(&amax, DT_F32, 1), tensor_1d(&n_bad, DT_F64, 1), chunk_load(q, item, &c));
        item->amax[c.e] = MT_MAX(item->amax[c.e], amax);
        if (n_bad > 0 && (bad_expert < 0 || bad_expert == c.e)) {
            bad_expert = c.e;
            sum += n_bad;
        }
    }
    safetensors_drop(&q->st, item->t);
    if (bad_expert >= 0 && item->t->ndim > 2)
        return err_set(err, "%s: tensor `%s`, expert %" PRId64 ": %.0f values are NaN or infinite", q->opt->in,
                       item->t->name, bad_expert, sum);
    if (bad_expert >= 0)
        return err_set(err, "%s: tensor `%s`: %.0f values are NaN or infinite", q->opt->in, item->t->name, sum);
    if (!strcmp(q->opt->amax, "expert")) return 0;
    for (int64_t e = 1; e < item->n_exp; e++) item->amax[0] = MT_MAX(item->amax[0], item->amax[e]);
    for (int64_t e = 1; e < item->n_exp; e++) item->amax[e] = item->amax[0];
    return 0;
}

/* ---- tensors of the output */

/* The name of an output tensor: "a.weight" with suffix "_scale" becomes "a.weight_scale", "a.up_proj" becomes
 * "a.up_proj_weight_scale". The suffixes of the stack layout are appended without "_weight". */
static char *name_of(const struct item *item, const struct stored_layout *l, const char *suffix)
{
    const char *base = item->t->name;
    const bool as_it_is = !*suffix || l == &stored_as_mxfp4_stack || str_ends(base, ".weight");
    const size_t size = strlen(base) + strlen("_weight") + strlen(suffix) + 1;
    char *name = mem_alloc((int64_t)size);
    snprintf(name, size, "%s%s%s", base, as_it_is ? "" : "_weight", suffix);
    return name;
}

/* Adds an entry with the dtype and shape of `as`. It takes over name, which is from mem_alloc. */
static void add_entry(struct quant *q, struct item *item, enum part part, char *name, struct st_entry as)
{
    struct piece *p = &q->pieces[q->n_entry];
    *p = (struct piece){item, part};
    as.name = name;
    as.data = p;
    q->entries[q->n_entry++] = as;
}

/* Sets shape to the sizes of the item's tensor, in the order [.., out, in]. */
static void shape_of(int64_t shape[8], const struct item *item)
{
    memcpy(shape, item->t->shape, sizeof(item->t->shape));
    shape[item->t->ndim - 2] = item->n_row;
    shape[item->t->ndim - 1] = item->n_in;
}

/* INT8 is that of compressed-tensors. */
static const struct stored_layout *layout_of(const struct fakequant *f)
{
    static const struct stored_layout int8 = {.data = {"", "I8", 1, 1}, .scale = {"_scale", "F32", 0, 1}};
    switch (f->kind) {
    case FQ_MXFP4: return &stored_as_mxfp4_stack;
    case FQ_NVFP4: return &stored_as_nvfp4;
    case FQ_INT: return f->bits == 4 ? &stored_as_int4 : &int8;
    case FQ_FP8:
    case FQ_FP8_STORED: break;
    }
    return &stored_as_fp8;
}

static void add_packed(struct quant *q, struct item *item)
{
    const struct stored_layout *l = layout_of(&q->f);
    const int n = item->t->ndim;
    int64_t shape[8];
    shape_of(shape, item);
    for (int i = 0; i < PLANES; i++) {
        struct stored_tensor t = l->plane[i];
        if (!t.suffix) continue;
        if (!t.rows && q->f.kind == FQ_INT && q->f.block) t.rows = 1, t.cols = q->f.block;
        if (!t.rows && q->f.kind != FQ_INT) t.cols = 0; /* as Model-Optimizer; compressed-tensors has no scalars */
        const enum part part = i == PLANE_DATA ? PART_CODES : t.rows ? PART_SCALES : PART_TOP;
        add_entry(q, item, part, name_of(item, l, t.suffix), stored_entry(&t, n, shape));
    }
    if (l->shape)
        add_entry(q, item, PART_SHAPE, name_of(item, l, l->shape),
                  (struct st_entry){.st_dtype = "I64", .ndim = 1, .shape = {n}});
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct st_entry *)a)->name, ((const struct st_entry *)b)->name);
}

static int list_entries(struct quant *q, struct err *err)
{
    q->entries = mem_array(3 * q->st.n_tensors, sizeof(*q->entries));
    q->pieces = mem_array(3 * q->st.n_tensors, sizeof(*q->pieces));
    for (int64_t i = 0; i < q->st.n_tensors; i++) {
        struct item *item = &q->items[i];
        if (item->amax && q->opt->pack && q->f.kind == FQ_MXFP4 && item->t->ndim == 8)
            return err_set(err, "tensor `%s` has 8 dimensions: its blocks would have 9", item->t->name);
        struct st_entry same = {.st_dtype = item->t->st_dtype, .ndim = item->t->ndim};
        memcpy(same.shape, item->t->shape, sizeof(same.shape));
        if (item->amax && q->opt->pack)
            add_packed(q, item);
        else
            add_entry(q, item, item->amax ? PART_VALUES : PART_COPY, mem_strdup(item->t->name), same);
    }
    if (q->n_entry) qsort(q->entries, (size_t)q->n_entry, sizeof(*q->entries), by_name);
    for (int64_t i = 1; i < q->n_entry; i++)
        if (!strcmp(q->entries[i].name, q->entries[i - 1].name))
            return err_set(err, "%s: two tensors would have the name `%s`: the file has quantised tensors already",
                           q->opt->in, q->entries[i].name);
    return 0;
}

/* ---- second pass */

static int put_values(struct quant *q, const struct item *item, struct err *err)
{
    for (struct chunk c = chunk_start(item); chunk_next(item, &c);) {
        const struct tensor x = chunk_load(q, item, &c);
        op_fake_quant(&q->dev, x, x, tensor_1d(&item->amax[c.e], DT_F32, 1), &q->f);
        if (item->swapped) transpose(q->y, x.data, item->n_row, item->n_in, dtype_size(x.dtype));
        if (file_writer_put(&q->out, item->swapped ? q->y : x.data, tensor_bytes(x), err)) return -1;
    }
    return 0;
}

static int put_packed(struct quant *q, const struct item *item, enum part part, struct err *err)
{
    const struct fakequant *f = &q->f;
    float top;
    for (struct chunk c = chunk_start(item); chunk_next(item, &c);) {
        const struct tensor x = chunk_load(q, item, &c);
        const struct tensor codes = tensor_3d(q->codes, DT_U8, 1, c.n_row, item->n_in * f->bits / 8);
        struct tensor scales = {0};
        if (f->block)
            scales = tensor_3d(q->scales, f->kind == FQ_INT ? DT_F32 : DT_U8, 1, c.n_row, item->n_in / f->block);
        op_quant_pack(&q->dev, codes, scales, tensor_1d(&top, DT_F32, 1), x, tensor_1d(&item->amax[c.e], DT_F32, 1), f);
        if (f->kind == FQ_INT && f->bits == 4) /* q + 8 instead of two's complement */
            for (int64_t i = 0; i < tensor_count(codes); i++) q->codes[i] ^= (char)0x88;
        const struct tensor part_of = part == PART_CODES ? codes : scales;
        if (file_writer_put(&q->out, part_of.data, tensor_bytes(part_of), err)) return -1;
    }
    return 0;
}

static int put_top(struct quant *q, const struct item *item, struct err *err)
{
    for (int64_t e = 0; e < item->n_exp; e++) {
        const struct fakequant_scale s = fakequant_scale(&q->f, item->amax[e], 0);
        const float top =
            q->f.kind == FQ_NVFP4 ? fakequant_global(&q->f, item->amax[e]) : fakequant_multiplier(&q->f, &s);
        if (file_writer_put(&q->out, &top, sizeof(top), err)) return -1;
    }
    return 0;
}

/* Puts the shape [.., out, in] of the codes. */
static int put_shape(struct quant *q, const struct item *item, struct err *err)
{
    int64_t shape[8];
    shape_of(shape, item);
    return file_writer_put(&q->out, shape, (int64_t)sizeof(shape[0]) * item->t->ndim, err);
}

static int put_piece(struct quant *q, const struct piece *p, struct err *err)
{
    const struct st_tensor *t = p->item->t;
    int rc = -1;
    switch (p->part) {
    case PART_COPY: rc = file_writer_put(&q->out, t->data, t->bytes, err); break;
    case PART_VALUES: rc = put_values(q, p->item, err); break;
    case PART_CODES:
    case PART_SCALES: rc = put_packed(q, p->item, p->part, err); break;
    case PART_TOP: return put_top(q, p->item, err);
    case PART_SHAPE: return put_shape(q, p->item, err);
    }
    safetensors_drop(&q->st, t);
    return rc;
}

static int write_all(struct quant *q, struct err *err)
{
    char *head = NULL;
    int64_t size;
    if (safetensors_head_like(&q->st, q->entries, q->n_entry, &head, &size, err)) return -1;
    int rc = file_writer_open(&q->out, q->opt->out, err);
    if (!rc) {
        process_delete_on_signal(q->out.tmp);
        rc = file_writer_put(&q->out, head, size, err);
        for (int64_t i = 0; i < q->n_entry && !rc; i++) rc = put_piece(q, q->entries[i].data, err);
        if (file_writer_close(&q->out, !rc, rc ? NULL : err)) rc = -1;
        process_delete_on_signal(NULL);
    }
    mem_free(head);
    return rc;
}

/* ---- the command */

static int check_space(const struct quant *q, struct err *err)
{
    char dir[MT_PATH];
    int64_t bytes = 0;
    const char *slash = strrchr(q->opt->out, '/');
    for (int64_t i = 0; i < q->n_entry; i++)
        if (!i64_add(bytes, safetensors_entry_bytes(&q->entries[i]), &bytes)) return 0; /* safetensors_head refuses */
    if (!slash) return file_check_space(".", bytes, err);
    if (str_format(dir, sizeof(dir), err, "path of the output", "%.*s", (int)(slash - q->opt->out + 1), q->opt->out))
        return -1;
    return file_check_space(dir, bytes, err);
}

/* Checks that the writer's temporary file does not replace a file of the user. */
static int check_names(const struct quant_options *o, struct err *err)
{
    char tmp[MT_PATH];
    if (str_format(tmp, sizeof(tmp), err, "path of the output", "%s.tmp", o->out)) return -1;
    if (!file_exists(tmp)) return 0;
    return err_set(err, "%s exists: quant writes a temporary file of this name; rename it, or choose another output",
                   tmp);
}

/* As safetensors_open; if the path is a configuration or an adapter, the error says so. */
static int open_input(struct quant *q, struct err *err)
{
    const char *in = q->opt->in;
    char found[MT_PATH];
    struct err why;
    if (file_is_dir(in) && adapter_dir_inside(found, in))
        return err_set(err, "%s is %s: quant takes a model. Merge the adapter first (moetrain export), or name a model",
                       in, strcmp(found, in) ? "a run with an adapter" : "an adapter");
    if (!safetensors_open(&q->st, in, err))
        return q->st.n_missing ? safetensors_missing_error(&q->st, 0, err) : 0; /* the output would lack them too */
    struct config *cfg = mem_alloc(sizeof(*cfg));
    config_defaults(cfg);
    if (file_exists(in) && !file_is_dir(in) && file_size(in) > 0 && !config_load(cfg, in, &why))
        err_set(err,
                "%s is a configuration: quant takes a safetensors file or a model's directory, such as model.path "
                "(%s)",
                in, cfg->model.path);
    mem_free(cfg);
    return -1;
}

static int prepare(struct quant *q, struct err *err)
{
    const struct quant_options *o = q->opt;
    if (fakequant_parse(&q->f, o->format, err)) return -1;
    if (o->pack && q->f.rule == FQ_KERNEL)
        return err_set(err, "%s has no codes and scales that a reader would decode to its values: leave out --pack",
                       o->format);
    if (file_check_new(o->out, err) || check_names(o, err) || open_input(q, err)) return -1;
    if (device_open(&q->dev, "cpu", "fp32", err)) return -1;
    return find_items(q, err) || list_entries(q, err) || check_space(q, err) || reserve(q, err) ? -1 : 0;
}

static void quant_close(struct quant *q)
{
    for (int64_t i = 0; q->items && i < q->st.n_tensors; i++) mem_free(q->items[i].amax);
    for (int64_t i = 0; i < q->n_entry; i++) mem_free((char *)(uintptr_t)q->entries[i].name);
    mem_free(q->items);
    mem_free(q->entries);
    mem_free(q->pieces);
    mem_free(q->x);
    mem_free(q->y);
    mem_free(q->codes);
    mem_free(q->scales);
    device_close(&q->dev);
    safetensors_close(&q->st);
}

int quant_run(const struct quant_options *o, FILE *log, struct err *err)
{
    struct quant q = {.opt = o};
    char bytes[32], before[256] = "";
    int rc = prepare(&q, err);
    for (int64_t i = 0; i < q.st.n_tensors && !rc; i++)
        if (q.items[i].amax) rc = measure(&q, &q.items[i], err);
    if (!rc) rc = write_all(&q, err);
    if (q.n_before)
        snprintf(before, sizeof(before), " (%" PRId64 " of them quantised already, the first is %.150s)", q.n_before,
                 q.before);
    if (!rc)
        fprintf(log, "%s: %" PRId64 " tensor%s in %s%s, %" PRId64 " copied%s, %s\n", o->out, q.n_quantised,
                str_plural(q.n_quantised), o->format, o->pack ? ", packed" : "", q.st.n_tensors - q.n_quantised, before,
                str_bytes(bytes, file_size(o->out)));
    quant_close(&q);
    return rc;
}
