/* safetensors.c - the file format: header parse with every check, shards with their index, lookup, writer.
 *
 * A file is | u64 N | N bytes of JSON | data |. After the checks every tensor is inside its map, with the bytes that
 * follow from shape and dtype. A file's tensors cover its data without gap or overlap, and names are unique. */
#include "data/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/header_scan.h"
#include "data/json/json.h"

#define HEADER_MAX  100000000 /* bytes; the limit of the reference reader */
#define SHARDS_MAX  10000
#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

/* All dtypes, in the reference implementation's order, which decides the order of tensors in a file. */
static const struct st_dtype {
    const char *name;
    int64_t bits;
    enum dtype dtype;
} st_dtypes[] = {
    {"BOOL", 8, DT_NONE},    {"F4", 4, DT_NONE},          {"F6_E2M3", 6, DT_NONE},     {"F6_E3M2", 6, DT_NONE},
    {"U8", 8, DT_U8},        {"I8", 8, DT_NONE},          {"F8_E5M2", 8, DT_NONE},     {"F8_E4M3", 8, DT_NONE},
    {"F8_E8M0", 8, DT_NONE}, {"F8_E4M3FNUZ", 8, DT_NONE}, {"F8_E5M2FNUZ", 8, DT_NONE}, {"I16", 16, DT_NONE},
    {"U16", 16, DT_NONE},    {"F16", 16, DT_F16},         {"BF16", 16, DT_BF16},       {"I32", 32, DT_I32},
    {"U32", 32, DT_NONE},    {"F32", 32, DT_F32},         {"C64", 64, DT_NONE},        {"F64", 64, DT_F64},
    {"I64", 64, DT_I64},     {"U64", 64, DT_NONE},
};

/* ---- one file ---- */

static bool set_dtype(struct st_tensor *t, const char *name, int64_t n, int64_t *bits)
{
    for (int64_t i = 0; i < MT_LEN(st_dtypes); i++) {
        if (strncmp(st_dtypes[i].name, name, (size_t)n) != 0 || st_dtypes[i].name[n]) continue;
        t->st_dtype = st_dtypes[i].name;
        t->dtype = st_dtypes[i].dtype;
        *bits = st_dtypes[i].bits;
        return true;
    }
    return false;
}

static int parse_dtype(struct st_tensor *t, struct json info, int64_t *bits, struct err *err)
{
    const char *name;
    if (json_get_str(info, "dtype", &name, err)) return -1;
    return set_dtype(t, name, (int64_t)strlen(name), bits) ? 0 : json_error(info, err, "unknown dtype `%s`", name);
}

/* Reads shape and bytes of t; the product is checked factor by factor, as in the reference. */
static int parse_shape(struct st_tensor *t, struct json info, int64_t bits, struct err *err)
{
    struct json shape;
    if (json_get_array(info, "shape", &shape, err)) return -1;
    int64_t ndim = json_count(shape), n = 1;
    if (ndim > MT_LEN(t->shape)) return json_error(shape, err, "more than %d axes", (int)MT_LEN(t->shape));
    t->ndim = (int)ndim;
    for (int i = 0; i < t->ndim; i++) {
        if (json_i64(json_at(shape, i), 0, INT64_MAX, &t->shape[i], err)) return -1;
        if (!i64_mul(n, t->shape[i], &n)) return json_error(shape, err, "more elements than 64 bits can count");
    }
    if (!i64_mul(n, bits, &n)) return json_error(shape, err, "more bits than 64 bits can count");
    if (n % 8) return json_error(shape, err, "the elements of %s do not fill whole bytes", t->st_dtype);
    t->bytes = n / 8;
    return 0;
}

/* Reads the begin of data_offsets into t->offset, which counts from the start of the data until place_tensors changes
 * it, and checks that data_offsets has t->bytes bytes. */
static int parse_offsets(struct st_tensor *t, struct json info, struct err *err)
{
    struct json offsets;
    int64_t end;
    if (json_get_array(info, "data_offsets", &offsets, err)) return -1;
    if (json_count(offsets) != 2) return json_error(offsets, err, "must be two numbers: begin and end");
    if (json_i64(json_at(offsets, 0), 0, INT64_MAX, &t->offset, err)) return -1;
    if (json_i64(json_at(offsets, 1), 0, INT64_MAX, &end, err)) return -1;
    if (end < t->offset) return json_error(offsets, err, "the end is before the begin");
    if (end - t->offset == t->bytes) return 0;
    return json_error(offsets, err, "%" PRId64 " bytes, but shape and dtype need %" PRId64, end - t->offset, t->bytes);
}

static int check_metadata(struct json metadata, struct err *err)
{
    const char *key;
    struct json value;
    if (json_type(metadata) != JSON_OBJECT) return json_error(metadata, err, "must be an object of strings");
    for (int64_t i = 0; json_member(metadata, i, &key, &value); i++)
        if (json_type(value) != JSON_STRING) return json_error(value, err, "must be a string");
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty tensors first */
}

/* Checks that the n tensors of one file cover its data exactly, then sets their addresses in the map. */
static int place_tensors(struct st_tensor *t, int64_t n, const struct file_map *map, int64_t data, bool headers,
                         const char *path, struct err *err)
{
    if (n) qsort(t, (size_t)n, sizeof(*t), by_offset);
    int64_t end = 0;
    for (int64_t i = 0; i < n; i++) {
        if (t[i].offset != end)
            return err_set(err,
                           "%s: tensor `%s` begins at byte %" PRId64 " of the data, the one before it ends at %" PRId64,
                           path, t[i].name, t[i].offset, end);
        end += t[i].bytes; /* no overflow: t->offset + t->bytes was read as an int64 */
    }
    if (end != map->size - data && !(headers && map->size == data))
        return err_set(err, "%s: the header describes %" PRId64 " bytes of tensors, the file has %" PRId64 ": %s", path,
                       end, map->size - data,
                       end > map->size - data ? "it is truncated, download or copy it again"
                                              : "unexpected bytes follow them");
    for (int64_t i = 0; i < n; i++) {
        t[i].offset += data;
        t[i].data = map->data + t[i].offset;
    }
    return 0;
}

static int parse_header(struct safetensors *st, struct json root, int shard, struct err *err)
{
    if (json_type(root) != JSON_OBJECT) return json_error(root, err, "the header is not a JSON object");
    st->tensors = mem_grow(st->tensors, st->n_tensors, st->n_tensors + json_count(root), sizeof(*st->tensors));
    const char *name;
    struct json info;
    for (int64_t i = 0; json_member(root, i, &name, &info); i++) {
        if (!strcmp(name, "__metadata__")) {
            if (check_metadata(info, err)) return -1;
            continue;
        }
        struct st_tensor *t = &st->tensors[st->n_tensors];
        int64_t bits = 0;
        *t = (struct st_tensor){.name = name, .shard = shard};
        if (parse_dtype(t, info, &bits, err) || parse_shape(t, info, bits, err) || parse_offsets(t, info, err))
            return -1;
        st->n_tensors++;
    }
    return 0;
}

/* Sets a tensor from an entry of the header; false: the entry is wrong. */
static bool set_tensor(struct st_tensor *t, const struct header_entry *e)
{
    int64_t bits;
    if (!set_dtype(t, e->dtype.at, e->dtype.n, &bits)) return false;
    t->ndim = e->ndim;
    for (int i = 0; i < e->ndim; i++) {
        t->shape[i] = e->shape[i];
        if (!i64_mul(bits, e->shape[i], &bits)) return false;
    }
    t->bytes = bits / 8;
    t->offset = e->offsets[0];
    return bits % 8 == 0 && e->offsets[1] - e->offsets[0] == t->bytes;
}

/* Reads a header in the form in which libraries write it. false: parse_header must read it, and reports what is
 * wrong. */
static bool scan_header(struct safetensors *st, int shard, const char *text, int64_t size, const char *path)
{
    struct header_scan s = {text, text + size, false};
    struct header_entry e = {.ndim = 0};
    struct err unused;
    enum header_kind kind;
    const int64_t first = st->n_tensors;
    int64_t cap = first;
    char *name = st->names[shard] = mem_alloc(size);
    while ((kind = header_scan_next(&s, &e)) > SCAN_END) {
        if (kind == SCAN_METADATA) {
            if (st->docs[shard]) break;
            st->docs[shard] = json_parse(e.metadata.at, e.metadata.n, path, &unused);
            if (!st->docs[shard] || check_metadata(json_root(st->docs[shard]), &unused)) break;
            continue;
        }
        st->tensors = mem_reserve(st->tensors, &cap, st->n_tensors + 1, sizeof(*st->tensors));
        struct st_tensor *t = &st->tensors[st->n_tensors];
        *t = (struct st_tensor){.name = name, .shard = shard};
        if (!set_tensor(t, &e)) break;
        memcpy(name, e.name.at, (size_t)e.name.n); /* the texts of a header have room for a 0 after each */
        name += e.name.n + 1;
        st->n_tensors++;
    }
    if (kind == SCAN_END) return true;
    json_free(st->docs[shard]);
    mem_free(st->names[shard]);
    st->docs[shard] = NULL;
    st->names[shard] = NULL;
    st->n_tensors = first;
    return false;
}

static int read_header(struct safetensors *st, int shard, const char *text, int64_t size, const char *path,
                       struct err *err)
{
    if (scan_header(st, shard, text, size, path)) return 0;
    st->docs[shard] = json_parse(text, size, path, err);
    if (!st->docs[shard]) return err_prefix(err, "safetensors header");
    return parse_header(st, json_root(st->docs[shard]), shard, err);
}

static int open_file(struct safetensors *st, int shard, const char *path, struct err *err)
{
    struct file_map *map = &st->maps[shard];
    if (file_map_open(map, path, err)) return -1;
    if (map->size < 8)
        return err_set(err, "%s: %" PRId64 " bytes are too few for a safetensors file: download or copy it again", path,
                       map->size);
    uint64_t header = 0;
    for (int i = 0; i < 8; i++) header |= (uint64_t)map->data[i] << 8 * i;
    if (header > HEADER_MAX)
        return err_set(err, "%s: a header of %" PRIu64 " bytes: not a safetensors file, or damaged", path, header);
    int64_t data = 8 + (int64_t)header;
    if (data > map->size)
        return err_set(err,
                       "%s: the header needs %" PRId64 " bytes, the file has %" PRId64
                       ": it is truncated, download or copy it again",
                       path, data, map->size);
    if (header == 0 || map->data[8] != '{') return err_set(err, "%s: the header does not begin with `{`", path);
    int64_t first = st->n_tensors;
    if (read_header(st, shard, (const char *)map->data + 8, (int64_t)header, path, err)) return -1;
    return place_tensors(st->tensors + first, st->n_tensors - first, map, data, st->headers, path, err);
}

/* ---- shards ---- */

static int add_shard(struct safetensors *st, const char *name, struct json where, struct err *err)
{
    for (int i = st->n_shards - 1; i >= 0; i--) /* from the end: neighbours in the index share a shard */
        if (!strcmp(st->shard_names[i], name)) return 0;
    if (!*name || strchr(name, '/') || strstr(name, "..") || !strcmp(name, "."))
        return json_error(where, err, "`%s` is not a plain file name", name);
    if (st->n_shards == SHARDS_MAX) return json_error(where, err, "more than %d files", SHARDS_MAX);
    st->shard_names = mem_grow(st->shard_names, st->n_shards, st->n_shards + 1, sizeof(*st->shard_names));
    st->shard_names[st->n_shards++] = mem_strdup(name);
    return 0;
}

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int list_shards(struct safetensors *st, struct json map, struct err *err)
{
    const char *name, *shard;
    struct json value;
    for (int64_t i = 0; json_member(map, i, &name, &value); i++)
        if (json_get_str(map, name, &shard, err) || add_shard(st, shard, value, err)) return -1;
    if (!st->n_shards) return json_error(map, err, "names no tensor");
    qsort(st->shard_names, (size_t)st->n_shards, sizeof(*st->shard_names), by_text);
    return 0;
}

static int shard_path(char path[MT_PATH], const char *dir, const char *name, struct err *err)
{
    return str_format(path, MT_PATH, err, "path of a safetensors file", "%s/%s", dir, name);
}

static int open_shards(struct safetensors *st, const char *dir, struct err *err)
{
    st->maps = mem_array(st->n_shards, sizeof(*st->maps));
    st->docs = mem_array(st->n_shards, sizeof(struct json_doc *));
    st->names = mem_array(st->n_shards, sizeof(char *));
    char path[MT_PATH];
    for (int i = 0; i < st->n_shards; i++)
        if (shard_path(path, dir, st->shard_names[i], err) || open_file(st, i, path, err)) return -1;
    return 0;
}

/* Removes the names of shards that do not exist. It is an error when none exists. */
static int leave_out_missing(struct safetensors *st, const char *dir, struct err *err)
{
    char path[MT_PATH];
    int n = 0;
    for (int i = 0; i < st->n_shards; i++) {
        if (shard_path(path, dir, st->shard_names[i], err)) return -1;
        n += file_exists(path);
    }
    if (!n && st->n_shards)
        return err_set(err, "%s: no file of " INDEX_NAME " is there, such as %s: the download is incomplete", dir,
                       st->shard_names[0]);
    for (int i = 0, to = 0; i < st->n_shards; i++) {
        if (shard_path(path, dir, st->shard_names[i], err)) return -1;
        if (file_exists(path))
            st->shard_names[to++] = st->shard_names[i];
        else
            mem_free(st->shard_names[i]);
    }
    st->n_shards = n;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct st_tensor *)a)->name, ((const struct st_tensor *)b)->name);
}

/* Returns the bit of a name in `ends`. */
static int64_t end_of(const char *name)
{
    const char *dot = strrchr(name, '.');
    uint32_t hash = 0;
    for (const char *p = dot ? dot : name; *p; p++) hash = hash * 31 + (uint8_t)*p;
    return hash % ST_ENDS;
}

void safetensors_sort(struct safetensors *st)
{
    if (st->n_tensors) qsort(st->tensors, (size_t)st->n_tensors, sizeof(*st->tensors), by_name);
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const int64_t end = end_of(st->tensors[i].name);
        st->ends[end / 64] |= (uint64_t)1 << end % 64;
    }
}

/* Refuses a name that two tensors have. The tensors are sorted. */
static int check_names(const struct safetensors *st, const char *dir, struct err *err)
{
    for (int64_t i = 1; i < st->n_tensors; i++) {
        const struct st_tensor *a = &st->tensors[i - 1], *b = &st->tensors[i];
        if (strcmp(a->name, b->name) != 0) continue;
        if (a->shard == b->shard)
            return err_set(err, "%s/%s: the header has tensor `%s` twice", dir, st->shard_names[a->shard], a->name);
        return err_set(err, "tensor `%s` is in two files, %s and %s", a->name, st->shard_names[a->shard],
                       st->shard_names[b->shard]);
    }
    return 0;
}

/* Removes copies of tensors that the index says are in another file. Logs their number, and that of tensors that the
 * index does not name. */
static void leave_out_copies(struct safetensors *st, struct json map, const char *path)
{
    int64_t n = 0, n_copy = 0, n_new = 0;
    struct st_tensor copy = {0}, new = {0};
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor t = st->tensors[i];
        const char *shard;
        if (json_get_str(map, t.name, &shard, NULL)) {
            shard = st->shard_names[t.shard];
            new = t, n_new++;
        }
        if (strcmp(shard, st->shard_names[t.shard]))
            copy = t, n_copy++;
        else
            st->tensors[n++] = t;
    }
    st->n_tensors = n;
    if (n_copy)
        log_warn("%s: %" PRId64 " tensor%s, such as `%s` of %s, %s in another file by the index, which decides", path,
                 n_copy, str_plural(n_copy), copy.name, st->shard_names[copy.shard], n_copy == 1 ? "is" : "are");
    if (n_new)
        log_warn("%s: the index does not list %" PRId64 " tensor%s, such as `%s` of %s", path, n_new, str_plural(n_new),
                 new.name, st->shard_names[new.shard]);
}

/* Lists the tensors that the index names and no file has. */
static int list_missing(struct safetensors *st, struct json map, struct err *err)
{
    const char *name, *shard;
    struct json value;
    for (int64_t i = 0; json_member(map, i, &name, &value); i++) {
        if (json_get_str(map, name, &shard, err)) return -1;
        if (safetensors_find(st, name)) continue;
        if (!st->missing) st->missing = mem_array(json_count(map), sizeof(*st->missing));
        st->missing[st->n_missing++] = (struct st_missing){mem_strdup(name), mem_strdup(shard)};
    }
    if (st->n_missing) qsort(st->missing, (size_t)st->n_missing, sizeof(*st->missing), by_text);
    return 0;
}

/* Warns of a wrong metadata.total_size, no error since some tools write a wrong value, or a real. */
static void compare_total(const struct safetensors *st, struct json root, const char *path)
{
    double total = 0;
    int64_t sum = 0;
    if (json_get_f64(json_find(root, "metadata"), "total_size", &total, NULL)) return;
    for (int64_t i = 0; i < st->n_tensors; i++) sum += st->tensors[i].bytes;
    if (total != (double)sum) log_warn("%s: total_size is %.0f, the tensors have %" PRId64 " bytes", path, total, sum);
}

static int open_index(struct safetensors *st, const char *dir, const char *path, struct err *err)
{
    int rc = -1;
    struct json_doc *doc = json_load(path, HEADER_MAX, err);
    if (!doc) return -1;
    struct json map;
    if (json_get_object(json_root(doc), "weight_map", &map, err)) goto out;
    if (list_shards(st, map, err) || leave_out_missing(st, dir, err) || open_shards(st, dir, err)) goto out;
    safetensors_sort(st);
    leave_out_copies(st, map, path);
    if (check_names(st, dir, err) || list_missing(st, map, err)) goto out;
    if (!st->n_missing) compare_total(st, json_root(doc), path);
    rc = 0;
out:
    json_free(doc);
    return rc;
}

/* Opens dir/name as the only shard. */
static int open_single(struct safetensors *st, const char *dir, const char *name, struct err *err)
{
    st->shard_names = mem_array(1, sizeof(*st->shard_names));
    st->shard_names[st->n_shards++] = mem_strdup(name);
    if (open_shards(st, dir, err)) return -1;
    safetensors_sort(st);
    return check_names(st, dir, err);
}

/* The error for a directory without weights in transformers' layout: names other weights there. */
static int no_weights(const char *dir, struct err *err)
{
    static const struct {
        const char *begin, *end, *advice;
    } others[] = {
        {"model-0", ".safetensors", "the download is incomplete, download the index as well"},
        {"adapter_model", "", "an adapter, not a model: model.path is its base model, lora.init_from the adapter"},
        {"consolidated", "", "Mistral's own layout: use the checkpoint in the layout of transformers"},
        {"", ".gguf", "a GGUF file is not supported: use the original checkpoint in safetensors"},
        {"", ".bin", "weights of PyTorch: convert them to safetensors (save_pretrained of transformers)"},
        {"", ".pt", "weights of PyTorch: convert them to safetensors (save_pretrained of transformers)"},
        {"", ".pth", "weights of PyTorch: convert them to safetensors (save_pretrained of transformers)"},
        {"", ".safetensors", "if it is the whole model, rename it to " SINGLE_NAME},
    };
    char **names;
    int64_t n;
    if (file_list(dir, &names, &n, err)) return -1;
    err_set(err, "%s: no %s and no %s", dir, INDEX_NAME, SINGLE_NAME);
    for (int64_t i = 0, found = 0; i < MT_LEN(others) && !found; i++)
        for (int64_t k = 0; k < n && !found; k++)
            if ((found =
                     !strncmp(names[k], others[i].begin, strlen(others[i].begin)) && str_ends(names[k], others[i].end)))
                err_set(err, "%s: no %s and no %s, but %s: %s", dir, INDEX_NAME, SINGLE_NAME, names[k],
                        others[i].advice);
    file_list_free(names, n);
    return -1;
}

static int open_dir(struct safetensors *st, const char *dir, struct err *err)
{
    char path[MT_PATH];
    if (str_format(path, sizeof(path), err, "path of the safetensors index", "%s/%s", dir, INDEX_NAME)) return -1;
    if (file_exists(path)) return open_index(st, dir, path, err);
    if (str_format(path, sizeof(path), err, "path of the safetensors file", "%s/%s", dir, SINGLE_NAME)) return -1;
    if (file_exists(path)) return open_single(st, dir, SINGLE_NAME, err);
    return no_weights(dir, err);
}

static int open_any(struct safetensors *st, const char *path, bool headers, struct err *err)
{
    *st = (struct safetensors){.headers = headers};
    int rc;
    if (file_is_dir(path))
        rc = open_dir(st, path, err);
    else {
        char *dir = mem_strdup(path), *slash = strrchr(dir, '/');
        if (slash) *slash = 0;
        rc = open_single(st, slash ? dir : ".", slash ? slash + 1 : path, err);
        mem_free(dir);
    }
    if (rc) safetensors_close(st);
    return rc;
}

int safetensors_open(struct safetensors *st, const char *path, struct err *err)
{
    return open_any(st, path, false, err);
}

int safetensors_open_headers(struct safetensors *st, const char *path, struct err *err)
{
    return open_any(st, path, true, err);
}

void safetensors_close(struct safetensors *st)
{
    for (int i = 0; i < st->n_shards; i++) {
        mem_free(st->shard_names[i]);
        if (st->maps) file_map_close(&st->maps[i]);
        if (st->docs) json_free(st->docs[i]);
        if (st->names) mem_free(st->names[i]);
    }
    mem_free(st->shard_names);
    mem_free(st->maps);
    mem_free(st->docs);
    mem_free(st->names);
    for (int64_t i = 0; i < st->n_tensors; i++)
        if (st->tensors[i].stored) mem_free((void *)(uintptr_t)st->tensors[i].name);
    mem_free(st->tensors);
    for (int64_t i = 0; i < st->n_missing; i++) {
        mem_free(st->missing[i].name);
        mem_free(st->missing[i].file);
    }
    mem_free(st->missing);
    *st = (struct safetensors){0};
}

/* ---- lookup ---- */

const struct st_tensor *safetensors_find(const struct safetensors *st, const char *name)
{
    struct st_tensor key = {.name = name};
    const int64_t end = end_of(name);
    if (!(st->ends[end / 64] >> end % 64 & 1)) return NULL;
    return bsearch(&key, st->tensors, (size_t)st->n_tensors, sizeof(key), by_name);
}

const struct st_tensor *safetensors_beside(const struct safetensors *st, const char *name, size_t n, const char *suffix)
{
    char full[1024];
    if (str_format(full, sizeof(full), NULL, "tensor name", "%.*s%s", (int)n, name, suffix)) return NULL;
    return safetensors_find(st, full);
}

int64_t safetensors_missing(const struct safetensors *st, const char *name)
{
    const struct st_missing key = {.name = (char *)(uintptr_t)name}, *found = NULL;
    if (st->n_missing) found = bsearch(&key, st->missing, (size_t)st->n_missing, sizeof(key), by_text);
    return found ? found - st->missing : -1;
}

int safetensors_missing_error(const struct safetensors *st, int64_t i, struct err *err)
{
    const struct st_missing *m = &st->missing[i];
    bool there = false;
    for (int k = 0; k < st->n_shards; k++) there |= !strcmp(st->shard_names[k], m->file);
    return err_set(err, "tensor %s should be in %s by %s, but %s: the download is incomplete, download it again",
                   m->name, m->file, INDEX_NAME, there ? "is not there" : "that file is missing");
}

int safetensors_rename(struct safetensors *st, safetensors_rename_fn *rename, struct err *err)
{
    char to[512];
    for (int64_t i = 0; i < st->n_tensors; i++) {
        struct st_tensor *t = &st->tensors[i];
        if (!rename(to, sizeof(to), t->name)) continue;
        t->stored = t->name;
        t->name = mem_strdup(to);
    }
    for (int64_t i = 0; i < st->n_missing; i++) {
        if (!rename(to, sizeof(to), st->missing[i].name)) continue;
        mem_free(st->missing[i].name);
        st->missing[i].name = mem_strdup(to);
    }
    if (st->n_missing) qsort(st->missing, (size_t)st->n_missing, sizeof(*st->missing), by_text);
    safetensors_sort(st);
    for (int64_t i = 1; i < st->n_tensors; i++) {
        const struct st_tensor *a = &st->tensors[i - 1], *b = &st->tensors[i];
        if (!strcmp(a->name, b->name))
            return err_set(err, "tensors `%s` and `%s` are both %s: remove one from the checkpoint",
                           safetensors_stored(a), safetensors_stored(b), a->name);
    }
    return 0;
}

const char *safetensors_nearest(const struct safetensors *st, const char *name)
{
    const char **names = mem_array(st->n_tensors, sizeof(*names));
    for (int64_t i = 0; i < st->n_tensors; i++) names[i] = st->tensors[i].name;
    const char *nearest = str_nearest(name, names, st->n_tensors);
    mem_free(names);
    return nearest;
}

void safetensors_drop(const struct safetensors *st, const struct st_tensor *t)
{
    if (t->shard < st->n_shards) file_map_drop(&st->maps[t->shard], t->offset, t->bytes);
}

int64_t safetensors_bytes(const struct safetensors *st)
{
    int64_t sum = 0;
    for (int i = 0; i < st->n_shards; i++) sum += st->maps[i].size;
    for (int64_t i = 0; i < st->n_tensors && st->headers; i++) { /* only the headers of the shards were downloaded */
        const struct st_tensor *t = &st->tensors[i];
        if (t->offset >= st->maps[t->shard].size) sum += t->bytes;
    }
    return sum;
}

uint64_t safetensors_fingerprint(const struct safetensors *st)
{
    enum { SAMPLE = 4096 };
    uint64_t h = 0, word;
    for (int i = 0; i < st->n_shards; i++) {
        const struct file_map *map = &st->maps[i];
        h = rng_key(h, st->shard_names[i]);
        h = rng_u64(rng_u64(h, (uint64_t)map->size), (uint64_t)map->mtime_ns);
        memcpy(&word, map->data, 8); /* the header's length, checked at open */
        h = rng_bytes(h, map->data, 8 + (int64_t)word);
    }
    for (int64_t i = 0; i < st->n_tensors; i++) /* where a file's time was set back after a change */
        h = rng_bytes(h, st->tensors[i].data, MT_MIN(st->tensors[i].bytes, SAMPLE));
    return h;
}

/* Returns "__metadata__" of the first file. */
static struct json metadata_of(const struct safetensors *st)
{
    if (!st->names[0]) return json_find(json_root(st->docs[0]), "__metadata__");
    return st->docs[0] ? json_root(st->docs[0]) : (struct json){.node = NULL};
}

const char *safetensors_metadata(const struct safetensors *st, const char *key)
{
    const char *text;
    const struct json metadata = metadata_of(st);
    return !json_given(metadata) || json_get_str(metadata, key, &text, NULL) ? NULL : text;
}

/* ---- writing ---- */

static int64_t rank_of(const struct st_entry *e)
{
    for (int64_t i = 0; i < MT_LEN(st_dtypes); i++)
        if (e->st_dtype ? !strcmp(st_dtypes[i].name, e->st_dtype)
                        : st_dtypes[i].dtype == e->dtype && e->dtype != DT_NONE)
            return i;
    MT_REQUIRE(false, "safetensors_write: no name for dtype %d", (int)e->dtype);
}

static int by_rank(const void *a, const void *b)
{
    const struct st_entry *x = a, *y = b;
    int64_t rx = rank_of(x), ry = rank_of(y);
    if (rx != ry) return rx > ry ? -1 : 1;
    return strcmp(x->name, y->name);
}

enum dtype safetensors_entry_dtype(const struct st_entry *e) { return st_dtypes[rank_of(e)].dtype; }

int64_t safetensors_entry_bytes(const struct st_entry *e)
{
    int64_t bits = st_dtypes[rank_of(e)].bits;
    for (int i = 0; i < e->ndim; i++)
        if (!i64_mul(bits, e->shape[i], &bits)) return -1;
    return bits / 8;
}

/* Appends the entry to the header and advances *at by its bytes. */
static int put_entry(struct json_out *o, const struct st_entry *e, int64_t *at, struct err *err)
{
    const int64_t begin = *at, bytes = safetensors_entry_bytes(e);
    if (!i64_add(begin, bytes, at)) return err_set(err, "tensor `%s` is too large", e->name);
    json_out_open(o, e->name, '{');
    json_out_str(o, "dtype", st_dtypes[rank_of(e)].name);
    json_out_open(o, "shape", '[');
    for (int i = 0; i < e->ndim; i++) json_out_i64(o, NULL, e->shape[i]);
    json_out_close(o, ']');
    json_out_open(o, "data_offsets", '[');
    json_out_i64(o, NULL, begin);
    json_out_i64(o, NULL, *at);
    json_out_close(o, ']');
    json_out_close(o, '}');
    return 0;
}

static void put_metadata(struct json_out *o, const struct safetensors *like)
{
    const char *key, *text;
    int64_t length;
    struct json value;
    const struct json metadata = metadata_of(like);
    if (!json_count(metadata)) return;
    json_out_open(o, "__metadata__", '{');
    for (int64_t i = 0; json_member(metadata, i, &key, &value); i++)
        if (!json_str(value, &text, &length, NULL)) json_out_str(o, key, text);
    json_out_close(o, '}');
}

/* Makes the header. notes: more entries of the metadata. */
static int make_head(const struct safetensors *like, const struct st_note *notes, int n_note, struct st_entry *entries,
                     int64_t n, char **head, int64_t *size, struct err *err)
{
    int rc = 0;
    struct json_out o = {0};
    *head = NULL;
    if (n) qsort(entries, (size_t)n, sizeof(*entries), by_rank);
    json_out_open(&o, NULL, '{');
    if (like) {
        put_metadata(&o, like);
    } else {
        json_out_open(&o, "__metadata__", '{');
        json_out_str(&o, "format", "pt");
        for (int i = 0; i < n_note; i++) json_out_str(&o, notes[i].key, notes[i].value);
        json_out_close(&o, '}');
    }
    for (int64_t i = 0, at = 0; i < n && !rc; i++) rc = put_entry(&o, &entries[i], &at, err);
    json_out_close(&o, '}');
    if (!rc) {
        const int64_t padded = (o.size + 7) & ~(int64_t)7; /* the data begins 8-aligned */
        *size = 8 + padded;
        *head = mem_alloc(*size);
        for (int i = 0; i < 8; i++) (*head)[i] = (char)(uint8_t)((uint64_t)padded >> 8 * i);
        memset(*head + 8, ' ', (size_t)padded);
        memcpy(*head + 8, o.text, (size_t)o.size);
    }
    json_out_free(&o);
    return rc;
}

int safetensors_head(struct st_entry *entries, int64_t n, char **head, int64_t *size, struct err *err)
{
    return make_head(NULL, NULL, 0, entries, n, head, size, err);
}

int safetensors_head_like(const struct safetensors *like, struct st_entry *entries, int64_t n, char **head,
                          int64_t *size, struct err *err)
{
    return make_head(like, NULL, 0, entries, n, head, size, err);
}

int safetensors_write(const char *path, const struct st_entry *entries, int64_t n, struct err *err)
{
    return safetensors_write_with(path, entries, n, NULL, 0, err);
}

int safetensors_write_with(const char *path, const struct st_entry *entries, int64_t n, const struct st_note *notes,
                           int n_note, struct err *err)
{
    struct st_entry *sorted = mem_array(n, sizeof(*sorted));
    struct file_part *parts = mem_array(n + 1, sizeof(*parts));
    char *head = NULL;
    int64_t size = 0;
    if (n) memcpy(sorted, entries, (size_t)n * sizeof(*sorted));
    int rc = make_head(NULL, notes, n_note, sorted, n, &head, &size, err);
    parts[0] = (struct file_part){head, size};
    for (int64_t i = 0; i < n; i++)
        parts[i + 1] = (struct file_part){sorted[i].data, safetensors_entry_bytes(&sorted[i])};
    if (!rc) rc = file_write_parts(path, parts, n + 1, err);
    mem_free(head);
    mem_free(sorted);
    mem_free(parts);
    return rc;
}
