/* checkpoint.c - saves and restores a run: OUT/checkpoints/step-NNNNNN/
 *     adapter/adapter_config.json, adapter/adapter_model.safetensors   for other programs; not read back
 *     adapter/README.md   the model card; not read back, not in the manifest
 *     best/ the run's best/ at this step, if a later one has replaced it (train/state/best.c); not in the manifest
 *     adapter/quant_amax.safetensors   with quant.amax = static or quant.activations (train/adapter/amax_file.h)
 *     optimizer.safetensors   "param.NAME", "m.NAME", "v.NAME" of every adapter parameter, not divided among ranks and
 *                             without padding (logical layout, model/lora.h), in the precision of training
 *     generation.safetensors   "old_nll", "reference_nll" of the labels of an unfinished generation (online RL)
 *     state.json      counters, position, hashes, and the settings that a continued run must match
 *     manifest.json   size and CRC-32 of the files above without best/, one per line; written last
 *
 * A directory named step-NNNNNN is complete: it is written under a hidden name, every file is synced, and then it is
 * renamed (data/file/atomic_dir.h). The manifest shows later damage by a disk or a copy. */
#include "train/state/checkpoint.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json/json.h"
#include "data/safetensors.h"
#include "model/arch/arch_values.h"
#include "train/adapter/amax_file.h"
#include "data/file/atomic_dir.h"
#include "train/adapter/peft.h"

#define FOLDER      "checkpoints"
#define STEP_PREFIX "step-"
#define MANIFEST    "manifest.json"
#define OPTIMIZER   "optimizer.safetensors"
#define STATE       "state.json"
#define SETTINGS    "settings"
#define MAX_TEXT    (1 << 20)

#define AMAX       "adapter/" AMAX_FILE
#define GENERATION "generation.safetensors"

static const char *const files[] = {"adapter/adapter_config.json",
                                    "adapter/adapter_model.safetensors",
                                    OPTIMIZER,
                                    STATE,
                                    AMAX,
                                    GENERATION}; /* the last two are not in every checkpoint */
enum { ALWAYS = 4 };

/* ---- manifest.json ---- */

/* The names of a checkpoint's files, from the directory, or if manifest is not NULL from this text. */
static int64_t list_files(const char *names[], const char *dir, const char *manifest)
{
    int64_t n = 0;
    char quoted[64];
    for (int64_t i = 0; i < MT_LEN(files); i++) {
        snprintf(quoted, sizeof(quoted), "\"%s\"", files[i]);
        if (i < ALWAYS || (manifest ? strstr(manifest, quoted) != NULL : file_exists_in(dir, files[i])))
            names[n++] = files[i];
    }
    return n;
}

/* Makes the manifest of n files on disk, a line per file; mem_free the text. NULL: a file cannot be read. */
static char *manifest_text(const char *dir, const char *const *names, int64_t n, struct err *err)
{
    int64_t size = 256 * (n + 2), len = 0;
    char *text = mem_alloc(size), path[MT_PATH];
    for (int64_t i = 0; i < n; i++) {
        uint32_t crc;
        int64_t bytes;
        if (file_in(path, dir, names[i], err) || file_crc32(path, &crc, &bytes, err)) {
            mem_free(text);
            return NULL;
        }
        len += snprintf(text + len, (size_t)(size - len),
                        "%s\"%s\": {\"size\": %" PRId64 ", \"crc32\": \"%08" PRIx32 "\"}%s\n", i ? "" : "{\n", names[i],
                        bytes, crc, i + 1 < n ? "," : "");
    }
    snprintf(text + len, (size_t)(size - len), "}\n");
    return text;
}

static int manifest_write(const char *dir, struct err *err)
{
    const char *names[MT_LEN(files)];
    const int64_t n = list_files(names, dir, NULL);
    char *text = manifest_text(dir, names, n, err);
    if (!text) return -1;
    const int rc = file_write_in(dir, MANIFEST, text, (int64_t)strlen(text), err);
    mem_free(text);
    return rc;
}

static int file_damaged(const char *dir, const char *file, struct err *err)
{
    return err_set(err, "%s/%s is damaged: size or checksum is not that of %s", dir, file, MANIFEST);
}

/* Compares sizes before any file is read completely, because a damaged file may have any size. */
static int check_sizes(const char *dir, const char *stored, struct err *err)
{
    char path[MT_PATH], before[128];
    for (int64_t i = 0; i < MT_LEN(files); i++) {
        if (file_in(path, dir, files[i], err)) return -1;
        snprintf(before, sizeof(before), "\"%s\": {\"size\": ", files[i]);
        const char *size = strstr(stored, before);
        if (size && file_exists(path) && strtoll(size + strlen(before), NULL, 10) != file_size(path))
            return file_damaged(dir, files[i], err);
    }
    return 0;
}

/* The first line that differs names the damaged file. */
static int manifest_check(const char *dir, struct err *err)
{
    char path[MT_PATH];
    int64_t size;
    if (file_in(path, dir, MANIFEST, err)) return -1;
    char *stored = file_read(path, MAX_TEXT, &size, err);
    if (!stored) return -1;
    const char *names[MT_LEN(files)];
    const int64_t n = list_files(names, dir, stored);
    char *actual = check_sizes(dir, stored, err) ? NULL : manifest_text(dir, names, n, err);
    int rc = actual ? 0 : -1;
    if (actual && ((size_t)size != strlen(actual) || memcmp(stored, actual, (size_t)size))) {
        int64_t line = 0;
        for (int64_t i = 0; i < size && stored[i] == actual[i]; i++) line += stored[i] == '\n';
        if (line >= 1 && line <= n)
            rc = file_damaged(dir, names[line - 1], err);
        else
            rc = err_set(err, "%s is damaged", path);
    }
    mem_free(actual);
    mem_free(stored);
    return rc;
}

static bool same_bytes(const char *a, const char *b)
{
    struct err unused;
    uint32_t crc[2];
    int64_t bytes[2];
    if (!file_exists(a) && !file_exists(b)) return true;
    return !file_crc32(a, &crc[0], &bytes[0], &unused) && !file_crc32(b, &crc[1], &bytes[1], &unused) &&
           bytes[0] == bytes[1] && crc[0] == crc[1];
}

bool checkpoint_is_saved(const char *dir, const char *out_dir)
{
    char here[MT_PATH], there[MT_PATH];
    struct err unused;
    bool same = true;
    for (int64_t i = 0; i < MT_LEN(files) && same; i++)
        if (!strncmp(files[i], "adapter/", strlen("adapter/")))
            same = !file_in(here, out_dir, files[i], &unused) && !file_in(there, dir, files[i], &unused) &&
                   same_bytes(here, there);
    return same;
}

/* ---- state.json ---- */

enum field_kind { FIELD_I64, FIELD_U64, FIELD_F64 };
#define NAMED(member) #member, offsetof(struct train_state, member)
static const struct field {
    const char *name;
    size_t offset;
    enum field_kind kind;
} fields[] = {
    {NAMED(step), FIELD_I64},           {NAMED(pos.epoch), FIELD_I64},  {NAMED(pos.index), FIELD_I64},
    {NAMED(n_nonfinite), FIELD_I64},    {NAMED(tokens), FIELD_I64},     {NAMED(total_steps), FIELD_I64},
    {NAMED(smooth_loss), FIELD_F64},    {NAMED(first_loss), FIELD_F64}, {NAMED(best_loss), FIELD_F64},
    {NAMED(best_step), FIELD_I64},      {NAMED(n_worse), FIELD_I64},    {NAMED(eval_step), FIELD_I64},
    {NAMED(seed), FIELD_U64},           {NAMED(data_hash), FIELD_U64},  {NAMED(model_hash), FIELD_U64},
    {NAMED(eval_hash), FIELD_U64},      {NAMED(eval_from), FIELD_I64},  {NAMED(best_tie), FIELD_F64},
    {NAMED(rollout_tokens), FIELD_I64},
};
_Static_assert(sizeof(struct train_state) == 8 * sizeof(fields) / sizeof(fields[0]),
               "a field of train_state is missing");

/* Older checkpoints lack these fields. */
static bool is_later(const char *name)
{
    static const char *const later[] = {"eval_from", "model_hash", "best_tie", "rollout_tokens"};
    return str_in(name, later, MT_LEN(later));
}

static void settings_write(struct json_out *o, const struct config *cfg)
{
    struct config_value v;
    json_out_open(o, SETTINGS, '{');
    for (int64_t i = 0; config_value(cfg, i, &v); i++)
        if (v.effect != CONFIG_FREE) json_out_str(o, v.name, v.text);
    json_out_close(o, '}');
}

/* Doubles are written as strings of 17 digits, which read back exactly and can be infinite; hashes as hexadecimal
 * strings. */
static int state_write(const char *dir, const struct train_state *state, int64_t n_update, const struct config *cfg,
                       const struct arch *arch, struct err *err)
{
    struct json_out o = {.indent = true};
    char text[40];
    json_out_open(&o, NULL, '{');
    for (int64_t i = 0; i < MT_LEN(fields); i++) {
        const void *at = (const char *)state + fields[i].offset;
        if (fields[i].kind == FIELD_I64) {
            json_out_i64(&o, fields[i].name, *(const int64_t *)at);
            continue;
        }
        if (fields[i].kind == FIELD_U64)
            snprintf(text, sizeof(text), "%016" PRIx64, *(const uint64_t *)at);
        else
            snprintf(text, sizeof(text), "%.17g", *(const double *)at);
        json_out_str(&o, fields[i].name, text);
    }
    json_out_i64(&o, "updates", n_update);
    settings_write(&o, cfg);
    if (arch) arch_values_write(&o, "model", arch);
    json_out_close(&o, '}');
    const int rc = file_write_in(dir, STATE, o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

static int read_field(struct json root, const struct field *f, struct train_state *state, struct err *err)
{
    void *at = (char *)state + f->offset;
    const char *text;
    char *end;
    if (f->kind == FIELD_I64) return json_get_i64(root, f->name, INT64_MIN, INT64_MAX, at, err);
    if (json_get_str(root, f->name, &text, err)) return -1;
    if (f->kind == FIELD_U64)
        *(uint64_t *)at = strtoull(text, &end, 16);
    else
        *(double *)at = strtod(text, &end);
    if (end == text || *end) return json_error(json_find(root, f->name), err, "\"%s\" is not a number", text);
    return 0;
}

int checkpoint_peek(const char *dir, struct train_state *state, int64_t *n_update, struct json_doc **doc,
                    struct err *err)
{
    struct json settings;
    if (!(*doc = json_load_in(dir, STATE, MAX_TEXT, err))) return -1;
    const struct json root = json_root(*doc);
    *state = (struct train_state){.best_tie = INFINITY};
    int rc = 0;
    if (!json_has(root, SETTINGS))
        rc = err_set(err,
                     "%s has no settings: an older moetrain wrote it; continue that run with the older one, or start "
                     "anew with another output.dir or train.resume = never",
                     json_name(root));
    for (int64_t i = 0; !rc && i < MT_LEN(fields); i++)
        if (!is_later(fields[i].name) || json_has(root, fields[i].name)) rc = read_field(root, &fields[i], state, err);
    if (!json_has(root, "eval_from")) state->eval_from = isfinite(state->best_loss) ? 0 : -1;
    if (!rc) rc = json_get_i64(root, "updates", INT64_MIN, INT64_MAX, n_update, err);
    if (!rc) rc = json_get_object(root, SETTINGS, &settings, err);
    if (!rc) return 0;
    json_free(*doc);
    *doc = NULL;
    return -1;
}

/* ---- optimizer.safetensors ---- */

enum { MAX_FLAT = 1 + OPTIMIZER_STATES, NAME_SIZE = 80 };

/* The masters and the optimizer's states. */
struct flat {
    const char *name;
    struct tensor x;
    enum dtype dtype; /* of its values in files; states of 8 bits are decoded */
    bool positive;
};
static int flat_arrays(const struct adapters *ad, struct flat flat[MAX_FLAT])
{
    const struct optimizer *opt = &ad->opt;
    int n = 0;
    flat[n++] = (struct flat){"param", opt->param, opt->param.dtype, false};
    for (int i = 0; i < optimizer_count_states(opt->kind); i++)
        flat[n++] =
            (struct flat){opt->kind->state[i].name, opt->state[i], opt->param.dtype, opt->kind->state[i].positive};
    return n;
}

static void entry_name(char name[NAME_SIZE], const struct flat *flat, const struct lora_param *p)
{
    char param[64];
    lora_param_name(p, param);
    snprintf(name, NAME_SIZE, "%s.%s", flat->name, param);
}

/* Whether the host can read a flat array without a copy: it is on a CPU, complete on this rank, and in the order of the
 * file. */
static bool readable(const struct adapters *ad, const struct device *dev, struct tensor flat)
{
    return !dev->ops->own_memory && !ad->logical && flat.shape[0] == ad->n_flat && flat.dtype == ad->opt.param.dtype;
}

static int optimizer_write(const char *dir, const struct adapters *ad, struct device *dev, struct err *err)
{
    struct flat flat[MAX_FLAT];
    char path[MT_PATH], *copy[MAX_FLAT] = {NULL};
    const int n_flat = flat_arrays(ad, flat);
    const struct adapters *whole = adapters_logical(ad);
    int64_t width = dtype_size(ad->opt.param.dtype), n = 0;
    if (file_in(path, dir, OPTIMIZER, err)) return -1;
    struct st_entry *entries = mem_array(n_flat * whole->n_params, sizeof(*entries));
    char(*names)[NAME_SIZE] = mem_array(n_flat * whole->n_params, NAME_SIZE);
    for (int f = 0; f < n_flat; f++) {
        const struct tensor x = flat[f].x;
        const char *host = x.data;
        if (!readable(ad, dev, x)) {
            host = copy[f] = mem_array(whole->n_flat, width);
            adapters_gather(ad, dev, x, flat[f].dtype, copy[f]);
        }
        for (int64_t i = 0; i < whole->n_params; i++, n++) {
            const struct lora_param *p = &whole->params[i];
            entry_name(names[n], &flat[f], p);
            entries[n] = (struct st_entry){.name = names[n],
                                           .dtype = flat[f].dtype,
                                           .ndim = 3,
                                           .shape = {p->n_exp, p->rows, p->cols},
                                           .data = host + p->off * width};
        }
    }
    int rc = safetensors_write(path, entries, n, err);
    for (int f = 0; f < n_flat; f++) mem_free(copy[f]);
    mem_free(names);
    mem_free(entries);
    return rc;
}

/* Whether the file's lora rank r fits p. Earlier versions wrote padded ranks: q, k and v with the largest r of the
 * three, on a GPU rounded up to a multiple of 8. */
static bool rank_fits(const struct adapters *whole, const struct lora_param *p, int64_t r)
{
    if (p->is_m) return r == 1;
    return r == whole->rank[p->target] || r == adapters_padded_rank(whole, p->target, 1) ||
           r == adapters_padded_rank(whole, p->target, 8);
}

static const struct st_tensor *find_entry(const struct safetensors *st, const char *path, const struct adapters *whole,
                                          const struct lora_param *p, const struct flat *flat, struct err *err)
{
    char name[NAME_SIZE];
    entry_name(name, flat, p);
    const struct st_tensor *t = safetensors_find(st, name);
    if (t && t->ndim == 3 && t->shape[0] == p->n_exp && t->shape[p->is_b ? 1 : 2] == (p->is_b ? p->rows : p->cols) &&
        rank_fits(whole, p, t->shape[p->is_b ? 2 : 1]) && t->dtype == flat->dtype)
        return t;
    err_set(err, "%s: tensor \"%s\" %s: the checkpoint's adapters do not match the configuration", path, name,
            t ? "has a different shape or dtype" : "is missing");
    return NULL;
}

static double value_of(const void *data, enum dtype dtype)
{
    float narrow;
    double wide;
    memcpy(&narrow, data, sizeof(narrow));
    if (dtype == DT_F32) return (double)narrow;
    memcpy(&wide, data, sizeof(wide));
    return wide;
}

/* Refuses impossible values of a state: not finite, or negative where they cannot be. */
static int check_values(const struct st_tensor *t, const char *path, bool positive, struct err *err)
{
    const int64_t width = dtype_size(t->dtype);
    MT_REQUIRE(t->dtype == DT_F32 || t->dtype == DT_F64, "%s", t->name);
    for (int64_t i = 0; i < t->bytes / width; i++) {
        const double x = value_of(t->data + i * width, t->dtype);
        if (!isfinite(x) || (positive && x < 0))
            return err_set(err,
                           "%s: tensor \"%s\": value %" PRId64
                           " is %g: no run can be continued from it; take an earlier "
                           "checkpoint (train.resume = DIRECTORY)",
                           path, t->name, i, x);
    }
    return 0;
}

/* Copies the tensor into values, in the logical layout. Ranks beyond those of p are padding and must be zero. */
static int read_entry(const struct st_tensor *t, const char *path, const struct lora_param *p, char *values,
                      struct err *err)
{
    const int64_t rows = t->shape[1], cols = t->shape[2], width = dtype_size(t->dtype);
    const char *from = (const char *)t->data;
    if (rows == p->rows && cols == p->cols) return memcpy(values, from, (size_t)t->bytes), 0;
    for (int64_t i = 0; i < t->shape[0] * rows * cols; i++, from += width) {
        const int64_t e = i / (rows * cols), row = i / cols % rows, col = i % cols;
        if (row < p->rows && col < p->cols)
            memcpy(values + ((e * p->rows + row) * p->cols + col) * width, from, (size_t)width);
        else if (value_of(from, t->dtype) != 0)
            return err_set(err,
                           "%s: tensor \"%s\" has rank %" PRId64 ", but %" PRId64
                           " is configured: the checkpoint is of other adapters than the configuration's",
                           path, t->name, p->is_b ? cols : rows, p->is_b ? p->cols : p->rows);
    }
    return 0;
}

static int optimizer_read(const char *dir, struct adapters *ad, struct device *dev, struct err *err)
{
    struct flat flat[MAX_FLAT];
    struct safetensors st;
    char path[MT_PATH];
    const struct adapters *whole = adapters_logical(ad);
    int64_t width = dtype_size(ad->opt.param.dtype);
    if (file_in(path, dir, OPTIMIZER, err) || safetensors_open(&st, path, err)) return -1;
    int rc = 0;
    char *host = mem_array(whole->n_flat, width); /* padding is zero in host, as in flat */
    const int n_flat = flat_arrays(ad, flat);
    if (st.n_tensors != n_flat * whole->n_params)
        rc = err_set(err, "%s: %" PRId64 " tensors, but the configuration's adapters have %" PRId64, path, st.n_tensors,
                     n_flat * whole->n_params);
    for (int f = 0; !rc && f < n_flat; f++) {
        for (int64_t i = 0; !rc && i < whole->n_params; i++) {
            const struct lora_param *p = &whole->params[i];
            const struct st_tensor *t = find_entry(&st, path, whole, p, &flat[f], err);
            rc = t ? check_values(t, path, flat[f].positive, err) : -1;
            if (!rc) rc = read_entry(t, path, p, host + p->off * width, err);
        }
        if (!rc) adapters_put(ad, dev, flat[f].x, flat[f].dtype, host);
    }
    mem_free(host);
    safetensors_close(&st);
    return rc;
}

static int amax_read(const char *dir, struct adapters *ad, struct device *dev, struct err *err)
{
    char adapter[MT_PATH];
    if (!ad->amax.rows) return 0;
    return file_in(adapter, dir, "adapter", err) || amax_file_load(ad, dev, adapter, err) ? -1 : 0;
}

/* ---- generation.safetensors ---- */

static int generation_write(const char *dir, const struct checkpoint_generation *g, struct err *err)
{
    char path[MT_PATH];
    struct st_entry entries[2];
    int64_t n = 0;
    if (!g || !g->n_label || (!g->old_nll && !g->reference_nll)) return 0;
    for (int i = 0; i < 2; i++) {
        const float *data = i ? g->reference_nll : g->old_nll;
        if (data)
            entries[n++] = (struct st_entry){.name = i ? "reference_nll" : "old_nll",
                                             .dtype = DT_F32,
                                             .ndim = 1,
                                             .shape = {g->n_label},
                                             .data = data};
    }
    return file_in(path, dir, GENERATION, err) ? -1 : safetensors_write(path, entries, n, err);
}

int checkpoint_generation_load(const char *dir, int64_t n_label, float **old_nll, float **reference_nll,
                               struct err *err)
{
    struct safetensors st;
    char path[MT_PATH];
    int rc = 0;
    *old_nll = *reference_nll = NULL;
    if (!file_exists_in(dir, GENERATION)) return 0;
    if (file_in(path, dir, GENERATION, err) || safetensors_open(&st, path, err)) return -1;
    for (int i = 0; !rc && i < 2; i++) {
        const struct st_tensor *t = safetensors_find(&st, i ? "reference_nll" : "old_nll");
        float **out = i ? reference_nll : old_nll;
        if (!t) continue;
        if (t->dtype != DT_F32 || t->ndim != 1 || t->shape[0] != n_label) {
            rc = err_set(err, "%s: tensor \"%s\" is not of the %lld labels of this generation", path, t->name,
                         (long long)n_label);
            break;
        }
        *out = mem_array(n_label + 1, sizeof(**out));
        memcpy(*out, t->data, (size_t)t->bytes);
    }
    safetensors_close(&st);
    return rc;
}

/* ---- the folder of checkpoints ---- */

static int64_t step_of(const char *name)
{
    size_t prefix = strlen(STEP_PREFIX), digits = strspn(name + MT_MIN(prefix, strlen(name)), "0123456789");
    if (strncmp(name, STEP_PREFIX, prefix) || digits < 6 || digits > 18 || name[prefix + digits]) return -1;
    return strtoll(name + prefix, NULL, 10);
}

static int newest_first(const void *a, const void *b)
{
    int64_t x = step_of(*(char *const *)a), y = step_of(*(char *const *)b);
    return (x < y) - (x > y);
}

/* Lists all names in the directory: checkpoints by descending step, then other names with step -1. */
static int list_folder(const char *folder, char ***names, int64_t *n, struct err *err)
{
    if (file_list(folder, names, n, err)) return -1;
    if (*n) qsort(*names, (size_t)*n, sizeof(**names), newest_first);
    return 0;
}

/* Deletes hidden directories of killed saves, and all but the newest `keep` checkpoints up to `step`, which was just
 * written. Later checkpoints, of a run that continued from an earlier step, stay and do not count. */
static int prune(const char *folder, int64_t step, int64_t keep, struct err *err)
{
    char **names, path[MT_PATH];
    int64_t n, kept = 0;
    if (atomic_dir_sweep(folder, NULL, 0, false, err) || list_folder(folder, &names, &n, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; !rc && i < n; i++) {
        int64_t s = step_of(names[i]);
        bool old = s >= 0 && s <= step && ++kept > keep && keep > 0;
        if (!old) continue;
        rc = file_in(path, folder, names[i], err);
        if (!rc) atomic_dir_remove(path);
    }
    file_list_free(names, n);
    return rc;
}

int checkpoint_prune(const char *out_dir, int64_t step, int64_t keep, struct err *err)
{
    char folder[MT_PATH];
    return file_in(folder, out_dir, FOLDER, err) || prune(folder, step, keep, err) ? -1 : 0;
}

int checkpoint_sweep(const char *out_dir, struct err *err)
{
    char folder[MT_PATH];
    return file_in(folder, out_dir, FOLDER, err) || atomic_dir_sweep(folder, NULL, 0, true, err) ? -1 : 0;
}

/* The part of ranks other than 0 in a save: they send their parameters. */
static int send_parts(const struct adapters *ad, struct device *dev, struct err *err)
{
    struct flat flat[MAX_FLAT];
    const int n_flat = flat_arrays(ad, flat);
    if (peft_save(ad, dev, "", "", NULL, err)) return -1;
    for (int f = 0; f < n_flat; f++) adapters_gather(ad, dev, flat[f].x, flat[f].dtype, NULL);
    return 0;
}

int checkpoint_path(char path[MT_PATH], const char *out_dir, int64_t step, struct err *err)
{
    return str_format(path, MT_PATH, err, "path", "%s/" FOLDER "/" STEP_PREFIX "%06" PRId64, out_dir, step);
}

int checkpoint_save(const char *out_dir, const struct adapters *ad, struct device *dev, const struct train_state *state,
                    const struct config *cfg, const struct arch *arch, const char *base_model, const char *card,
                    const struct checkpoint_generation *generation, int64_t keep, struct err *err)
{
    char folder[MT_PATH], dir[MT_PATH], tmp[MT_PATH], adapter[MT_PATH];
    if (ad->par.all->rank != 0) return send_parts(ad, dev, err);
    if (file_in(folder, out_dir, FOLDER, err) || checkpoint_path(dir, out_dir, state->step, err) ||
        atomic_dir_begin(dir, tmp, err) || file_in(adapter, tmp, "adapter", err) ||
        peft_save(ad, dev, adapter, base_model, card, err) || optimizer_write(tmp, ad, dev, err) ||
        generation_write(tmp, generation, err) || state_write(tmp, state, ad->opt.step, cfg, arch, err) ||
        manifest_write(tmp, err) || atomic_dir_commit(tmp, dir, err) || file_sync_dir(out_dir, err) ||
        prune(folder, state->step, keep, err))
        return err_prefix(err, "saving the checkpoint of step %" PRId64, state->step);
    return 0;
}

int checkpoint_load(const char *dir, struct adapters *ad, struct device *dev, struct train_state *state,
                    struct err *err)
{
    struct train_state read;
    struct json_doc *doc;
    int64_t n_update;
    if (manifest_check(dir, err) || checkpoint_peek(dir, &read, &n_update, &doc, err)) return -1;
    json_free(doc);
    if (optimizer_read(dir, ad, dev, err) || amax_read(dir, ad, dev, err)) return -1;
    *state = read;
    ad->opt.step = n_update;
    adapters_refresh(ad, dev);
    return 0;
}

int checkpoint_newest(const char *out_dir, char path[MT_PATH], struct err *err)
{
    char folder[MT_PATH], **names;
    int64_t n, n_damaged = 0;
    if (file_in(folder, out_dir, FOLDER, err)) return -1;
    if (!file_is_dir(folder)) return 0;
    if (list_folder(folder, &names, &n, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; !rc && i < n && step_of(names[i]) >= 0; i++) {
        struct err why;
        if (file_in(path, folder, names[i], err)) {
            rc = -1;
        } else if (!manifest_check(path, &why)) {
            rc = 1;
        } else {
            log_warn("checkpoint %s is not used: %s", names[i], why.msg);
            n_damaged++;
        }
    }
    if (!rc && n_damaged)
        rc = err_set(err,
                     "%s: all %" PRId64 " checkpoints are damaged; remove them (or set train.resume = never) to start "
                     "anew",
                     folder, n_damaged);
    file_list_free(names, n);
    return rc;
}

int checkpoint_after(const char *out_dir, int64_t step, char folder[MT_PATH], char ***names, int64_t *n,
                     struct err *err)
{
    int64_t later = 0;
    *names = NULL;
    *n = 0;
    if (file_in(folder, out_dir, FOLDER, err)) return -1;
    if (!file_is_dir(folder)) return 0;
    if (list_folder(folder, names, n, err)) return -1;
    while (later < *n && step_of((*names)[later]) > step) later++;
    for (int64_t i = later; i < *n; i++) mem_free((*names)[i]);
    *n = later;
    return 0;
}
