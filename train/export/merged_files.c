/* merged_files.c - see merged_files.h. */
#include "train/export/merged_files.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "train/run/chat_file.h"
#include "train/export/export_packed.h"

static void copy_json(struct json_out *o, const char *key, struct json j)
{
    const char *name, *text = "";
    int64_t integer = 0, size;
    double real = 0;
    bool yes = false;
    struct json child;
    if (json_wide(j)) {
        json_out_raw(o, key, json_wide(j));
        return;
    }
    switch (json_type(j)) {
    case JSON_ABSENT:
    case JSON_NULL: json_out_str(o, key, NULL); return;
    case JSON_BOOL: json_out_bool(o, key, !json_bool(j, &yes, NULL) && yes); return;
    case JSON_INT: json_out_i64(o, key, json_i64(j, INT64_MIN, INT64_MAX, &integer, NULL) ? 0 : integer); return;
    case JSON_REAL: json_out_real(o, key, json_f64(j, &real, NULL) ? 0 : real); return;
    case JSON_STRING: json_out_str(o, key, json_str(j, &text, &size, NULL) ? "" : text); return;
    case JSON_ARRAY:
        json_out_open(o, key, '[');
        for (int64_t i = 0; i < json_count(j); i++) copy_json(o, NULL, json_at(j, i));
        json_out_close(o, ']');
        return;
    case JSON_OBJECT:
        json_out_open(o, key, '{');
        for (int64_t i = 0; json_member(j, i, &name, &child); i++) copy_json(o, name, child);
        json_out_close(o, '}');
    }
}

/* The list of published gpt-oss. */
static void write_mxfp4_config(struct json_out *o)
{
    static const char *const dense[] = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                        "lm_head"};
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "quant_method", "mxfp4");
    json_out_open(o, "modules_to_not_convert", '[');
    for (int64_t i = 0; i < MT_LEN(dense); i++) json_out_str(o, NULL, dense[i]);
    json_out_close(o, ']');
    json_out_close(o, '}');
}

static int put_json(const struct export *x, const char *name, struct json_out *o, struct err *err)
{
    const int rc = file_write_in(x->tmp, name, o->text, o->size, err);
    json_out_free(o);
    return rc;
}

static int write_packed_config(const struct export *x, struct json_out *config, const char *const *dense, int64_t n,
                               struct err *err)
{
    const bool nvfp4 = x->format == EXPORT_MERGED_NVFP4, inputs = x->qat.opt.inputs.bits;
    struct json_out o = {.indent = true};
    export_packed_config(config, nvfp4, inputs, dense, n);
    if (!nvfp4) return 0;
    export_packed_hf_config(&o, inputs, dense, n);
    return put_json(x, "hf_quant_config.json", &o, err);
}

/* Keys of config.json that say how the source is quantised. */
static bool is_quantisation(const char *key)
{
    return !strcmp(key, "quantization_config") || !strcmp(key, "compression_config") || !strcmp(key, "expert_dtype");
}

/* Copies a member of config.json without the layers of multi-token prediction: some lists have entries for them after
 * those of the last layer. */
static void copy_without_predictions(struct json_out *o, const char *key, struct json j, int64_t n_layer)
{
    static const char *const counts[] = {"num_nextn_predict_layers", "mtp_num_hidden_layers"};
    static const char *const lists[] = {"compress_ratios", "layer_types", "mlp_layer_types"};
    const char *name;
    struct json child;
    if (json_type(j) == JSON_INT && str_in(key, counts, MT_LEN(counts))) {
        json_out_i64(o, key, 0);
    } else if (json_type(j) == JSON_ARRAY && str_in(key, lists, MT_LEN(lists))) {
        json_out_open(o, key, '[');
        for (int64_t i = 0; i < MT_MIN(json_count(j), n_layer); i++) copy_json(o, NULL, json_at(j, i));
        json_out_close(o, ']');
    } else if (json_type(j) == JSON_OBJECT && !strcmp(key, "text_config")) {
        json_out_open(o, key, '{');
        for (int64_t i = 0; json_member(j, i, &name, &child); i++) copy_without_predictions(o, name, child, n_layer);
        json_out_close(o, '}');
    } else {
        copy_json(o, key, j);
    }
}

/* The source's config.json with another quantisation entry. */
static int write_config(const struct export *x, const char *const *dense, int64_t n, bool predicts, struct err *err)
{
    const char *key;
    struct json value;
    struct json_out o = {.indent = true};
    int rc = 0;
    struct json_doc *doc = json_load_in(x->run.model_dir, "config.json", 64 << 20, err);
    if (!doc) return -1;
    const bool same = x->format == EXPORT_MERGED_MXFP4 && x->run.arch.names->published; /* as the source is */
    json_out_open(&o, NULL, '{');
    for (int64_t i = 0; json_member(json_root(doc), i, &key, &value); i++) {
        if (!same && is_quantisation(key)) continue;
        if (predicts)
            copy_json(&o, key, value);
        else
            copy_without_predictions(&o, key, value, x->run.arch.n_layer);
    }
    if (x->format == EXPORT_MERGED_MXFP4 && !same) write_mxfp4_config(&o);
    if (x->format > EXPORT_MERGED_MXFP4) rc = write_packed_config(x, &o, dense, n, err);
    json_out_close(&o, '}');
    json_free(doc);
    if (!rc) return put_json(x, "config.json", &o, err);
    json_out_free(&o);
    return rc;
}

/* Whether a file is copied: not weights, not descriptions of the source's quantisation, not files that this code
 * writes. */
static bool is_beside(const char *name)
{
    static const char *const others[] = {"hf_quant_config.json",
                                         "recipe.yaml",
                                         ".safetensors",
                                         ".bin",
                                         ".pt",
                                         ".pth",
                                         ".gguf",
                                         ".h5",
                                         ".msgpack",
                                         ".onnx",
                                         ".tmp",
                                         ".incomplete"};
    for (int64_t i = 0; i < MT_LEN(others); i++)
        if (str_ends(name, others[i])) return false;
    return strcmp(name, "config.json") && !str_ends(name, ".index.json") && name[0] != '.';
}

static bool is_template(const char *name)
{
    return !strcmp(name, CHAT_TEMPLATE_FILE) || !strcmp(name, "chat_template.json") ||
           !strcmp(name, CHAT_TEMPLATES_DIR);
}

typedef int beside_fn(const struct export *x, const char *name, const struct file_map *map, void *arg, struct err *err);
static int each_of(const struct export *x, const char *below, beside_fn *job, void *arg, struct err *err)
{
    const bool own = chat_file_is_own(&x->run, x->adapter_dir);
    char dir[MT_PATH], path[MT_PATH], name[MT_PATH], **names;
    int64_t n;
    int rc = 0;
    if (file_in(dir, x->run.model_dir, below, err) || file_list(dir, &names, &n, err)) return -1;
    for (int64_t i = 0; i < n && !rc; i++) {
        struct file_map map;
        if (!is_beside(names[i]) || (own && is_template(names[i]))) continue;
        rc = str_format(name, sizeof(name), err, "path", "%s%s", below, names[i]) ||
                     file_in(path, x->run.model_dir, name, err)
                 ? -1
                 : 0;
        if (!rc && !strcmp(name, CHAT_TEMPLATES_DIR) && file_is_dir(path))
            rc = each_of(x, CHAT_TEMPLATES_DIR "/", job, arg, err);
        if (rc || file_is_dir(path)) continue;
        rc = file_map_open(&map, path, err);
        if (rc) break;
        rc = job(x, name, &map, arg, err);
        file_map_close(&map);
    }
    file_list_free(names, n);
    return rc;
}

static int each_beside(const struct export *x, beside_fn *job, void *arg, struct err *err)
{
    return each_of(x, "", job, arg, err);
}

static int count_file(const struct export *x, const char *name, const struct file_map *map, void *arg, struct err *err)
{
    (void)x, (void)name, (void)err;
    *(int64_t *)arg += map->size;
    return 0;
}

static int copy_file(const struct export *x, const char *name, const struct file_map *map, void *arg, struct err *err)
{
    char path[MT_PATH];
    (void)arg;
    if (!strncmp(name, CHAT_TEMPLATES_DIR "/", sizeof(CHAT_TEMPLATES_DIR)) &&
        (file_in(path, x->tmp, CHAT_TEMPLATES_DIR, err) || file_make_dirs(path, err)))
        return -1;
    return file_write_in(x->tmp, name, map->data, map->size, err);
}

/* ---- called by export_merged.c ---- */

int merged_files_bytes(const struct export *x, int64_t *bytes, struct err *err)
{
    *bytes = 0;
    return each_beside(x, count_file, bytes, err);
}

int merged_files_write(const struct export *x, const char *const *dense, int64_t n, bool predicts, struct err *err)
{
    return each_beside(x, copy_file, NULL, err) || write_config(x, dense, n, predicts, err) ? -1 : 0;
}
