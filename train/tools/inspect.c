/* inspect.c - see inspect.h.
 *
 * In a file a packed weight is several tensors (model/stored/stored.h). inspect prints one row per weight, with its
 * unpacked shape and the bytes of all its tensors. */
#include "train/tools/inspect.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/hub/hub.h"
#include "data/json/json.h"
#include "data/safetensors.h"
#include "kernels/comm/comm.h"
#include "model/stored/formats.h"
#include "model/stored/published.h"
#include "model/stored/stored.h"
#include "model/weights.h"
#include "train/adapter/adapter_dir.h"
#include "train/config/config.h"

#define CONFIG_MAX ((int64_t)16 << 20)

struct row {
    char *name; /* layer and expert numbers replaced by {n}, {e} */
    char shape[192], format[24];
    int64_t count; /* number of weights in this row; 0: a helper tensor, which is counted with its weight */
    int64_t params, bytes;
};

/* ---- from tensors to rows ---- */

/* The suffix of scales in DeepSeek-V4's published files; the loader uses another one. */
#define PUBLISHED_SCALE ".scale"

/* The length of t's name before `suffix`; 0: the name does not end with the suffix, or has nothing before it. */
static size_t before(const struct st_tensor *t, const char *suffix)
{
    return str_ends(t->name, suffix) ? strlen(t->name) - strlen(suffix) : 0;
}

/* The scales of a weight. n: length of t's name without the suffix of its layout. NULL: the weight has none. */
static const struct st_tensor *scale_of(const struct safetensors *st, const struct st_tensor *t, size_t n,
                                        const struct stored_layout *l)
{
    const struct st_tensor *s = safetensors_beside(st, t->name, n, l->scale.suffix);
    const size_t module = before(t, ".weight");
    return s || !module ? s : safetensors_beside(st, t->name, module, PUBLISHED_SCALE);
}

/* The weight that t helps to decode, with its layout *l; NULL: t is a weight itself. */
static const struct st_tensor *owner(const struct safetensors *st, const struct st_tensor *t,
                                     const struct stored_layout **l)
{
    for (int64_t i = 0; (*l = stored_layouts[i]) != NULL; i++)
        for (int p = PLANE_DATA + 1; p < PLANES; p++) {
            const char *suffix = (*l)->plane[p].suffix;
            const size_t n = suffix ? before(t, suffix) : 0;
            const struct st_tensor *of = n ? safetensors_beside(st, t->name, n, (*l)->data.suffix) : NULL;
            if (of) return of;
        }
    const size_t n = before(t, PUBLISHED_SCALE);
    return n ? safetensors_beside(st, t->name, n, ".weight") : NULL;
}

/* A copy of name[0..n) in which the numbers between dots are {n}, {e}, {i} in this order and control characters are
 * question marks. */
static char *collapse(const char *name, size_t n)
{
    static const char *const marks[] = {"{n}", "{e}", "{i}"};
    char *text = mem_alloc(3 * (int64_t)n + 1), *to = text;
    int64_t n_marks = 0;
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && isdigit((unsigned char)name[end])) end++;
        bool number = end > i && (i == 0 || name[i - 1] == '.') && (end == n || name[end] == '.');
        if (number) {
            memcpy(to, marks[MT_MIN(n_marks, 2)], 3);
            n_marks++;
            to += 3;
            i = end;
        } else {
            *to++ = name[i++];
        }
    }
    return str_mask(text);
}

static void set_shape(struct row *r, const int64_t *shape, int ndim)
{
    char text[24];
    r->shape[0] = 0;
    for (int i = 0; i < ndim; i++) {
        snprintf(text, sizeof(text), "%s%" PRId64, i ? " x " : "", shape[i]);
        strncat(r->shape, text, sizeof(r->shape) - strlen(r->shape) - 1);
    }
    if (!ndim) snprintf(r->shape, sizeof(r->shape), "scalar");
}

static void set_format(struct row *r, enum weight_format f, const char *more)
{
    snprintf(r->format, sizeof(r->format), "%s%s", weight_format_name(f), more);
    for (char *c = r->format; *c && *c != ' '; c++) *c = (char)toupper((unsigned char)*c);
}

/* Sets the format of a weight in layout l. If a byte has several values, also sets the row's name and unpacked shape.
 * The values are packed along the axis on which there are fewer scales than bytes. False: t is not a weight in this
 * layout. */
static bool describe_as(struct row *r, const struct safetensors *st, const struct st_tensor *t,
                        const struct stored_layout *l)
{
    const size_t n = before(t, l->data.suffix);
    const struct st_tensor *s = n && l->format && l->scale.suffix ? scale_of(st, t, n, l) : NULL;
    const int last = l->data.last, ndim = t->ndim - (last ? 1 : 0);
    const int64_t values = l->data.rows * l->data.cols;
    int64_t shape[8];
    if (!s) return false;
    if (values > 1) {
        const bool bytes = t->dtype == DT_U8 || !strcmp(t->st_dtype, "I8");
        if (!bytes || strcmp(s->st_dtype, l->scale.st_dtype) || s->ndim != ndim || (last && t->shape[ndim] != last))
            return false;
        memcpy(shape, t->shape, sizeof(shape));
        for (int i = 0; i < ndim; i++)
            if ((last ? i == ndim - 1 : t->shape[i] != s->shape[i]) && shape[i] <= INT64_MAX / values)
                shape[i] *= values;
        mem_free(r->name);
        r->name = collapse(t->name, n);
        r->params = 2 * t->bytes;
        set_shape(r, shape, ndim);
    } else if (strcmp(t->st_dtype, l->data.st_dtype)) {
        return false;
    }
    set_format(r, l->format, "");
    return true;
}

static void describe(struct row *r, const struct safetensors *st, const struct st_tensor *t)
{
    *r = (struct row){.count = 1, .params = 1, .bytes = t->bytes, .name = collapse(t->name, strlen(t->name))};
    snprintf(r->format, sizeof(r->format), "%s", t->st_dtype);
    for (int i = 0; i < t->ndim; i++) r->params *= t->shape[i]; /* no overflow: the reader checked it */
    set_shape(r, t->shape, t->ndim);
    const struct stored_layout *l;
    for (int64_t i = 0; (l = stored_layouts[i]) != NULL; i++)
        if (describe_as(r, st, t, l)) return;
}

/* Describes a bitsandbytes weight in r: the tensor `state` is JSON with its logical shape. */
static int describe_bnb(struct row *r, const struct safetensors *st, const struct st_tensor *weight,
                        const struct st_tensor *state, const struct stored_layout *l, struct err *err)
{
    const bool nested = safetensors_beside(st, weight->name, strlen(weight->name), l->nested_absmax.suffix) != NULL;
    set_format(r, l->format, nested ? " nested" : "");
    if (st->headers) { /* there are only headers, so the state cannot be read and only the number of elements is known
                        */
        r->params = 2 * weight->bytes;
        set_shape(r, &r->params, 1);
        return 0;
    }
    struct json_doc *doc = json_parse((const char *)state->data, state->bytes, state->name, err);
    if (!doc) return -1;
    struct json shape;
    int64_t dims[8], n = 1;
    int rc = json_get_array(json_root(doc), "shape", &shape, err);
    if (!rc && json_count(shape) > 8) rc = json_error(shape, err, "more than 8 axes");
    for (int i = 0; !rc && i < json_count(shape); i++) {
        rc = json_i64(json_at(shape, i), 0, INT32_MAX, &dims[i], err);
        if (!rc && !i64_mul(n, dims[i], &n)) rc = json_error(shape, err, "the number of elements exceeds 64 bits");
    }
    if (!rc && n / 2 + n % 2 != weight->bytes)
        rc = json_error(shape, err, "%" PRId64 " elements of 4 bits, but the weight has %" PRId64 " bytes", n,
                        weight->bytes);
    if (!rc) {
        set_shape(r, dims, (int)json_count(shape));
        r->params = n;
    }
    json_free(doc);
    return rc;
}

static int by_kind(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    int order = strcmp(x->name ? x->name : "", y->name ? y->name : "");
    if (!order) order = strcmp(x->format, y->format);
    return order ? order : strcmp(x->shape, y->shape);
}

static void free_rows(struct row *rows, int64_t n)
{
    for (int64_t i = 0; i < n; i++) mem_free(rows[i].name);
    mem_free(rows);
}

/* Makes one row for each kind of weight, sorted by name. *rows [*n]: free them with free_rows, also after an error. */
static int make_rows(const struct safetensors *st, struct row **rows, int64_t *n, struct err *err)
{
    int rc = 0;
    int64_t n_all = st->n_tensors, n_kinds = 0;
    struct row *all = mem_array(n_all, sizeof(*all));
    const struct stored_layout *l;
    for (int64_t i = 0; i < n_all; i++)
        if (!owner(st, &st->tensors[i], &l)) describe(&all[i], st, &st->tensors[i]);
    for (int64_t i = 0; i < n_all && !rc; i++) {
        const struct st_tensor *t = &st->tensors[i], *of = owner(st, t, &l);
        if (!of) continue;
        struct row *r = &all[of - st->tensors];
        r->bytes += t->bytes;
        if (l && l->nested_offset.suffix && before(t, l->nested_offset.suffix)) rc = describe_bnb(r, st, of, t, l, err);
    }
    if (n_all) qsort(all, (size_t)n_all, sizeof(*all), by_kind);
    for (int64_t i = 0; i < n_all; i++) {
        if (!all[i].count) continue;
        if (n_kinds && !by_kind(&all[n_kinds - 1], &all[i])) {
            all[n_kinds - 1].count++;
            all[n_kinds - 1].params += all[i].params;
            all[n_kinds - 1].bytes += all[i].bytes;
            mem_free(all[i].name);
            all[i].name = NULL;
        } else {
            struct row kind = all[i];
            all[i].name = NULL;
            all[n_kinds++] = kind;
        }
    }
    *rows = all;
    *n = n_kinds;
    return rc;
}

/* ---- printing ---- */

static void print_rows(const struct row *rows, int64_t n, FILE *out)
{
    int name = 6, shape = 5, format = 6;
    char params[32], bytes[32];
    for (int64_t i = 0; i < n; i++) {
        name = MT_MAX(name, (int)MT_MIN(strlen(rows[i].name), 90));
        shape = MT_MAX(shape, (int)strlen(rows[i].shape));
        format = MT_MAX(format, (int)strlen(rows[i].format));
    }
    fprintf(out, "\n  %-*s  %6s  %-*s  %-*s  %10s  %10s\n", name, "tensor", "count", shape, "shape", format, "format",
            "parameters", "bytes");
    for (int64_t i = 0; i < n; i++)
        fprintf(out, "  %-*s  %6" PRId64 "  %-*s  %-*s  %10s  %10s\n", name, rows[i].name, rows[i].count, shape,
                rows[i].shape, format, rows[i].format, str_count(params, rows[i].params),
                str_bytes(bytes, rows[i].bytes));
}

static void print_total(const char *format, int64_t count, int64_t params, int64_t bytes, FILE *out)
{
    char size[32], bits[32] = "-";
    if (params) snprintf(bits, sizeof(bits), "%.2f", 8.0 * (double)bytes / (double)params);
    fprintf(out, "  %-12s  %6" PRId64 "  %15" PRId64 "  %10s  %15s\n", format, count, params, str_bytes(size, bytes),
            bits);
}

static int by_format(const void *a, const void *b)
{
    return strcmp(((const struct row *)a)->format, ((const struct row *)b)->format);
}

/* Sorts the rows by format on the way. */
static void print_totals(struct row *rows, int64_t n, FILE *out)
{
    int64_t count = 0, params = 0, bytes = 0;
    fprintf(out, "\n  %-12s  %6s  %15s  %10s  %15s\n", "format", "count", "parameters", "bytes", "bits per weight");
    if (n) qsort(rows, (size_t)n, sizeof(*rows), by_format);
    for (int64_t i = 0; i < n;) {
        struct row sum = rows[i];
        for (i++; i < n && !strcmp(rows[i].format, sum.format); i++) {
            sum.count += rows[i].count;
            sum.params += rows[i].params;
            sum.bytes += rows[i].bytes;
        }
        print_total(sum.format, sum.count, sum.params, sum.bytes, out);
        count += sum.count;
        params += sum.params;
        bytes += sum.bytes;
    }
    print_total("total", count, params, bytes, out);
}

static void print_text(const char *s, FILE *out)
{
    for (int n; *s; s += MT_MAX(n, 1)) {
        n = str_printable(s);
        fwrite(n ? s : "?", 1, (size_t)MT_MAX(n, 1), out);
    }
}

/* Writes a JSON value as text: an array of strings as "q_proj, k_proj", a string (a regular expression) as it is, null
 * as "none". */
static void print_names(const char *label, struct json names, FILE *out)
{
    const char *s;
    int64_t size;
    fprintf(out, "  %-14s", label);
    if (json_str(names, &s, &size, NULL) == 0) {
        print_text(s, out);
        fputs(" (a regular expression)", out);
    } else if (!json_count(names))
        fputs("none", out);
    for (int64_t i = 0; i < json_count(names); i++) {
        if (i) fputs(", ", out);
        print_text(json_str(json_at(names, i), &s, &size, NULL) ? "?" : s, out);
    }
    fputc('\n', out);
}

static int print_adapter(struct json config, FILE *out, struct err *err)
{
    const char *type, *base = "not given", *version = "of unknown version";
    int64_t r;
    double alpha, dropout = 0;
    bool rslora = false, dora = false;
    if (json_get_str(config, "peft_type", &type, err) || json_opt_str(config, "base_model_name_or_path", &base, err) ||
        json_opt_str(config, "peft_version", &version, err) || json_get_i64(config, "r", 1, INT32_MAX, &r, err) ||
        json_get_f64(config, "lora_alpha", &alpha, err) || json_opt_f64(config, "lora_dropout", &dropout, err) ||
        json_opt_bool(config, "use_rslora", &rslora, err) || json_opt_bool(config, "use_dora", &dora, err))
        return -1;
    fprintf(out, "  %-14s", "type");
    print_text(type, out);
    fprintf(out, "%s, PEFT ", dora ? " with DoRA" : "");
    print_text(version, out);
    fprintf(out, "\n  %-14s", "base model");
    print_text(base, out);
    fputc('\n', out);
    fprintf(out, "  %-14s%" PRId64 "\n", "r", r);
    fprintf(out, "  %-14s%g (scale %s = %g)\n", "alpha", alpha, rslora ? "alpha/sqrt(r), rsLoRA" : "alpha/r",
            alpha / (rslora ? sqrt((double)r) : (double)r));
    fprintf(out, "  %-14s%g\n", "dropout", dropout);
    print_names("modules", json_find(config, "target_modules"), out);
    print_names("parameters", json_find(config, "target_parameters"), out);
    int64_t patterns = json_count(json_find(config, "rank_pattern")) + json_count(json_find(config, "alpha_pattern"));
    if (patterns) fprintf(out, "  %-14s%" PRId64 " in rank_pattern and alpha_pattern\n", "patterns", patterns);
    return 0;
}

/* Prints the bytes of the weights with one value of model.quantize, from a dry run of the loader. True: the
 * value is none, and the experts of the last layer are packed in 4 bits. */
static bool print_held(const struct arch *a, const struct safetensors *st, const struct quantize *q, FILE *out)
{
    struct device dev = {.dry_run = true, .weights = arena_measure("weights")};
    struct weights w;
    struct err why;
    char experts[32], all[32];
    fprintf(out, "  %-14s  ", quantize_name(q));
    if (weights_load(&w, &dev, a, st, &(struct weights_options){.quantize = q}, &why)) {
        fprintf(out, "not possible: ");
        print_text(why.msg, out);
        fputc('\n', out);
        return false;
    }
    const enum weight_format f = w.layers[a->n_layer - 1].up.w.format;
    fprintf(out, "%-28s  %10s  %12s\n", w.experts, str_bytes(experts, w.expert_bytes),
            str_bytes(all, w.expert_bytes + w.dense_bytes));
    weights_free(&w);
    return !q->format && format_row(f, false)->bits == 4;
}

/* Prints nothing for a directory without a model. Renames the tensors to the names that the loader uses. */
static void print_all_held(const char *path, struct safetensors *st, FILE *out)
{
    struct arch a;
    struct quantize q = {.cache = NULL};
    struct err why;
    char config[MT_PATH], name[32];
    if (!file_is_dir(path) || file_in(config, path, "config.json", NULL) || !file_exists(config)) return;
    if (arch_load(&a, path, &why) || published_rename(st, &a, &why) || formats_check(st, &a, &why)) {
        fprintf(out, "\n  this model cannot be trained: ");
        print_text(why.msg, out);
        fputc('\n', out);
        return;
    }
    fprintf(out, "\n  %-14s  %-28s  %10s  %12s\n", "model.quantize", "experts held as", "experts", "all weights");
    for (int i = 0; config_choice(QUANTIZE_FORMATS, i, name) && format_named(name, &q.format, &q.nested); i++)
        if (print_held(&a, st, &q, out)) {
            fprintf(out, "  weights that the checkpoint stores packed stay packed\n");
            break;
        }
}

/* Prints the tables of the tensors in the file or directory `tensors`. config: adapter_config.json of an adapter, or
 * NULL. headers: only the headers of the files were downloaded. */
static int inspect_tensors(const char *path, const char *tensors, const struct json *config, bool headers, FILE *out,
                           struct err *err)
{
    struct safetensors st;
    struct row *rows;
    int64_t n;
    if (headers ? safetensors_open_headers(&st, tensors, err) : safetensors_open(&st, tensors, err)) return -1;
    int rc = make_rows(&st, &rows, &n, err);
    if (!rc) {
        char size[32];
        fprintf(out, "%s: %s, %" PRId64 " tensor%s in %d file%s, %s\n", path, config ? "adapter" : "checkpoint",
                st.n_tensors, str_plural(st.n_tensors), st.n_shards, str_plural(st.n_shards),
                str_bytes(size, safetensors_bytes(&st)));
        if (config) rc = print_adapter(*config, out, err);
    }
    if (!rc && st.n_missing)
        fprintf(out, "%" PRId64 " tensor%s missing, such as %s, which should be in %s by the index\n", st.n_missing,
                st.n_missing == 1 ? " is" : "s are", st.missing[0].name, st.missing[0].file);
    if (!rc) {
        print_rows(rows, n, out);
        print_totals(rows, n, out);
        if (!config) print_all_held(tensors, &st, out);
    }
    free_rows(rows, n);
    safetensors_close(&st);
    return rc;
}

int inspect_run(const char *path, FILE *out, struct err *err)
{
    char file[MT_PATH], dir[MT_PATH];
    bool headers;
    if (hub_model_headers(dir, path, "main", &headers, err) || file_in(file, dir, "config.json", err)) return -1;
    if (file_exists(dir) && !file_is_dir(dir) && !strstr(dir, ".safetensors"))
        return err_set(err,
                       "%s: expected a checkpoint (a directory or a .safetensors file), an adapter directory or a run "
                       "directory",
                       path);
    if (!file_exists(file) && adapter_dir_inside(file, dir)) strcpy(dir, file); /* a run's, or its checkpoint's */
    if (str_format(file, sizeof(file), err, "path of the adapter", "%s/adapter_config.json", dir)) return -1;
    if (!file_exists(file)) return inspect_tensors(path, dir, NULL, headers, out, err);
    struct json_doc *doc = json_load(file, CONFIG_MAX, err);
    if (!doc) return -1;
    struct json config = json_root(doc);
    int rc = str_format(file, sizeof(file), err, "path of the adapter", "%s/adapter_model.safetensors", dir);
    if (!rc) rc = inspect_tensors(path, file, &config, false, out, err);
    json_free(doc);
    return rc;
}
