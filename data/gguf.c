/* gguf.c - GGUF version 3, little endian: "GGUF", version, two counts, metadata, the table of tensors, then the
 * tensors, each padded to the alignment. Source: ggml, docs/gguf.md, src/gguf.cpp. */
#include "data/gguf.h"

#include <string.h>

#define MAGIC     "GGUF"
#define ALIGNMENT 32                 /* the format's default; this program always uses it */
#define MAX_NAME  64                 /* ggml's limit, the NUL included */
enum { VERSION = 3, MIN_ITEM = 16 }; /* minimum size of a key or a tensor in bytes */

static int64_t aligned(int64_t n) { return (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

int64_t gguf_tensor_count(const struct gguf_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        if (!i64_mul(n, t->shape[i], &n)) return -1;
    return n;
}

const struct ggml_layout *ggml_layout(enum ggml_type type)
{
    static const struct ggml_layout layouts[] = {[GGML_F32] = {"F32", 1, 4},
                                                 [GGML_F16] = {"F16", 1, 2},
                                                 [GGML_Q4_0] = {"Q4_0", 32, 18},
                                                 [GGML_Q8_0] = {"Q8_0", 32, 34},
                                                 [GGML_MXFP4] = {"MXFP4", 32, 17}};
    const bool known = (int64_t)type < MT_LEN(layouts) && layouts[type].block;
    return known ? &layouts[type] : NULL;
}

int64_t gguf_tensor_bytes(const struct gguf_tensor *t)
{
    const struct ggml_layout *l = ggml_layout(t->type);
    const int64_t n = gguf_tensor_count(t);
    int64_t bytes;
    return l && n >= 0 && t->shape[t->ndim - 1] % l->block == 0 && i64_mul(n / l->block, l->bytes, &bytes) ? bytes : -1;
}

/* ---- writing ---- */

struct text {
    char *bytes;
    int64_t size, cap;
};

static void put(struct text *t, const void *data, size_t n)
{
    t->bytes = mem_reserve(t->bytes, &t->cap, t->size + (int64_t)n, 1);
    memcpy(t->bytes + t->size, data, n);
    t->size += (int64_t)n;
}

static void put_u32(struct text *t, uint32_t v) { put(t, &v, sizeof(v)); }
static void put_u64(struct text *t, int64_t v) { put(t, &v, sizeof(v)); }

static void put_string(struct text *t, const char *s)
{
    put_u64(t, (int64_t)strlen(s));
    put(t, s, strlen(s));
}

static void put_array(struct text *t, const struct gguf_value *v)
{
    const char *const *texts = v->array;
    put_u32(t, v->of);
    put_u64(t, v->n);
    if (v->of == GGUF_STRING)
        for (int64_t i = 0; i < v->n; i++) put_string(t, texts[i]);
    else
        put(t, v->array, (size_t)v->n * 4);
}

static void put_value(struct text *t, const struct gguf_value *v)
{
    put_string(t, v->key);
    put_u32(t, v->type);
    if (v->type == GGUF_STRING)
        put_string(t, v->text);
    else if (v->type == GGUF_ARRAY)
        put_array(t, v);
    else if (v->type == GGUF_F32)
        put(t, &v->f32, sizeof(v->f32));
    else
        put(t, &v->u32, v->type == GGUF_BOOL ? 1 : sizeof(v->u32));
}

static int put_tensor(struct text *t, const struct gguf_tensor *g, int64_t *offset, struct err *err)
{
    const int64_t bytes = gguf_tensor_bytes(g);
    if (strlen(g->name) >= MAX_NAME) return err_set(err, "tensor name %s is too long for GGUF", g->name);
    if (bytes < 0) return err_set(err, "tensor %s is too large, or its rows are not whole blocks", g->name);
    put_string(t, g->name);
    put_u32(t, (uint32_t)g->ndim);
    for (int i = g->ndim - 1; i >= 0; i--) put_u64(t, g->shape[i]);
    put_u32(t, g->type);
    put_u64(t, *offset);
    *offset += aligned(bytes);
    return 0;
}

int gguf_writer_open(struct gguf_writer *w, const char *path, const struct gguf_value *values, int64_t n_values,
                     const struct gguf_tensor *tensors, int64_t n_tensors, struct err *err)
{
    static const char zeros[ALIGNMENT];
    struct text head = {0};
    int64_t offset = 0;
    int rc = 0;
    *w = (struct gguf_writer){.tensors = tensors, .n = n_tensors};
    put(&head, MAGIC, 4);
    put_u32(&head, VERSION);
    put_u64(&head, n_tensors);
    put_u64(&head, n_values);
    for (int64_t i = 0; i < n_values; i++) put_value(&head, &values[i]);
    for (int64_t i = 0; i < n_tensors && !rc; i++) rc = put_tensor(&head, &tensors[i], &offset, err);
    put(&head, zeros, (size_t)(aligned(head.size) - head.size));
    if (!rc) rc = file_writer_open(&w->file, path, err);
    if (!rc && file_writer_put(&w->file, head.bytes, head.size, err)) {
        file_writer_close(&w->file, false, NULL);
        rc = -1;
    }
    mem_free(head.bytes);
    return rc;
}

int gguf_writer_put(struct gguf_writer *w, const void *data, int64_t bytes, struct err *err)
{
    static const char zeros[ALIGNMENT];
    const int64_t all = w->at < w->n ? gguf_tensor_bytes(&w->tensors[w->at]) : 0;
    MT_REQUIRE(w->at < w->n && bytes <= all - w->done, "tensor %lld has %lld bytes", (long long)w->at, (long long)all);
    if (file_writer_put(&w->file, data, bytes, err)) return -1;
    w->done += bytes;
    if (w->done < all) return 0;
    w->at++;
    w->done = 0;
    return file_writer_put(&w->file, zeros, aligned(all) - all, err);
}

int gguf_writer_close(struct gguf_writer *w, bool keep, struct err *err)
{
    MT_REQUIRE(!keep || w->at == w->n, "%lld of %lld tensors", (long long)w->at, (long long)w->n);
    return file_writer_close(&w->file, keep, err);
}

int gguf_write(const char *path, const struct gguf_value *values, int64_t n_values, const struct gguf_tensor *tensors,
               int64_t n_tensors, gguf_fill_fn *fill, void *arg, struct err *err)
{
    struct gguf_writer w;
    if (gguf_writer_open(&w, path, values, n_values, tensors, n_tensors, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; i < n_tensors && !rc; i++) {
        const int64_t bytes = gguf_tensor_bytes(&tensors[i]);
        float *out = mem_alloc(bytes);
        fill(arg, i, out);
        rc = gguf_writer_put(&w, out, bytes, err);
        mem_free(out);
    }
    return gguf_writer_close(&w, !rc, rc ? NULL : err) || rc ? -1 : 0;
}

/* ---- reading ---- */

struct cursor {
    struct gguf *g;
    const char *path;
    int64_t at;
    struct err *err;
};

static int take(struct cursor *c, void *out, int64_t n)
{
    if (n > c->g->map.size - c->at)
        return err_set(c->err, "%s: the file is truncated at byte %lld, inside its header", c->path,
                       (long long)c->g->map.size);
    memcpy(out, c->g->map.data + c->at, (size_t)n);
    c->at += n;
    return 0;
}

/* Reads a size or a count; values above INT64_MAX are refused. */
static int take_size(struct cursor *c, int64_t most, const char *what, int64_t *out)
{
    if (take(c, out, sizeof(*out))) return -1;
    if (*out >= 0 && *out <= most) return 0;
    return err_set(c->err, "%s: %s is %llu, above the possible maximum", c->path, what, (unsigned long long)*out);
}

static int take_string(struct cursor *c, char **out)
{
    int64_t n = 0;
    if (take_size(c, c->g->map.size - c->at, "the length of a string", &n)) return -1;
    *out = mem_alloc(n + 1);
    c->g->strings[c->g->n_strings++] = *out;
    if (take(c, *out, n)) return -1;
    return memchr(*out, 0, (size_t)n) ? err_set(c->err, "%s: a string contains a NUL", c->path) : 0;
}

/* Passes over the elements of an array, which begin with their type and number. */
static int take_array(struct cursor *c, struct gguf_value *v)
{
    const int64_t size = c->g->map.size;
    uint32_t of = 0;
    int64_t n = 0, bytes = 0;
    if (take(c, &of, sizeof(of)) || take_size(c, size, "the number of elements of an array", &n)) return -1;
    v->of = (enum gguf_type)of;
    v->n = n;
    if (of != GGUF_STRING && of != GGUF_I32 && of != GGUF_F32)
        return err_set(c->err, "%s: array %s has elements of type %u, which are not supported", c->path, v->key, of);
    for (int64_t i = 0; i < n && of == GGUF_STRING; i++) {
        if (take_size(c, size - c->at, "the length of a string", &bytes) || bytes > size - c->at)
            return err_set(c->err, "%s: array %s is longer than the file", c->path, v->key);
        c->at += bytes;
    }
    if (of == GGUF_STRING) return 0;
    if (n > (size - c->at) / 4) return err_set(c->err, "%s: array %s is longer than the file", c->path, v->key);
    c->at += 4 * n;
    return 0;
}

static int take_value(struct cursor *c, struct gguf_value *v)
{
    char *key, *text = NULL;
    uint32_t type = 0;
    if (take_string(c, &key) || take(c, &type, sizeof(type))) return -1;
    for (const struct gguf_value *other = c->g->values; other < v; other++)
        if (!strcmp(other->key, key)) return err_set(c->err, "%s: duplicate key %s", c->path, key);
    *v = (struct gguf_value){.key = key, .type = (enum gguf_type)type};
    if (type == GGUF_STRING) {
        if (take_string(c, &text)) return -1;
        v->text = text;
        return 0;
    }
    if (type == GGUF_U32) return take(c, &v->u32, sizeof(v->u32));
    if (type == GGUF_F32) return take(c, &v->f32, sizeof(v->f32));
    if (type == GGUF_BOOL) return take(c, &v->u32, 1);
    if (type == GGUF_ARRAY) return take_array(c, v);
    return err_set(c->err, "%s: key %s has type %u; only strings, u32, f32, flags and arrays are supported", c->path,
                   key, type);
}

/* Reads a tensor's entry. offset: where this tensor must begin; moved to its end. */
static int take_tensor(struct cursor *c, struct gguf_tensor *t, int64_t *offset)
{
    char *name;
    uint32_t ndim = 0, type = 0;
    int64_t begin = 0;
    if (take_string(c, &name) || take(c, &ndim, sizeof(ndim))) return -1;
    if (strlen(name) >= MAX_NAME || ndim < 1 || ndim > 4)
        return err_set(c->err, "%s: tensor %.80s has a name too long or %u axes", c->path, name, ndim);
    *t = (struct gguf_tensor){.name = name, .ndim = (int)ndim};
    for (int i = t->ndim - 1; i >= 0; i--)
        if (take_size(c, c->g->map.size, "an axis of a tensor", &t->shape[i])) return -1;
    if (take(c, &type, sizeof(type)) || take(c, &begin, sizeof(begin))) return -1;
    t->type = (enum ggml_type)type;
    if (!ggml_layout(t->type))
        return err_set(c->err, "%s: tensor %s has type %u, which is not supported", c->path, name, type);
    if (begin != *offset)
        return err_set(c->err, "%s: tensor %s begins at %lld instead of %lld", c->path, name, (long long)begin,
                       (long long)*offset);
    const int64_t bytes = gguf_tensor_bytes(t);
    if (bytes < 0 || bytes > c->g->map.size - *offset)
        return err_set(c->err, "%s: tensor %s is larger than the file, or its rows are not whole blocks", c->path,
                       name);
    *offset += aligned(bytes);
    for (const struct gguf_tensor *other = c->g->tensors; other < t; other++)
        if (!strcmp(other->name, name)) return err_set(c->err, "%s: duplicate tensor %s", c->path, name);
    return 0;
}

static int read_head(struct cursor *c)
{
    struct gguf *g = c->g;
    char magic[4] = "";
    uint32_t version = 0;
    int64_t end = 0, n_tensors = 0, n_values = 0;
    if (take(c, magic, 4) || take(c, &version, sizeof(version))) return -1;
    if (memcmp(magic, MAGIC, 4) || version != VERSION)
        return err_set(c->err, "%s is not a GGUF file of version %d", c->path, VERSION);
    if (take_size(c, g->map.size / MIN_ITEM, "the number of tensors", &n_tensors) ||
        take_size(c, g->map.size / MIN_ITEM, "the number of keys", &n_values))
        return -1;
    g->strings = mem_array(n_tensors + 2 * n_values, sizeof(*g->strings));
    g->values = mem_array(n_values, sizeof(*g->values));
    g->tensors = mem_array(n_tensors, sizeof(*g->tensors));
    for (; g->n_values < n_values; g->n_values++)
        if (take_value(c, &g->values[g->n_values])) return -1;
    int64_t *begin = mem_array(n_tensors, sizeof(*begin));
    int rc = 0;
    for (; g->n_tensors < n_tensors && !rc; g->n_tensors++) {
        begin[g->n_tensors] = end;
        rc = take_tensor(c, &g->tensors[g->n_tensors], &end);
    }
    const int64_t data = aligned(c->at);
    if (!rc && (data > g->map.size || end != g->map.size - data))
        rc = err_set(c->err, "%s: the header describes %lld bytes of tensors, the file has %lld", c->path,
                     (long long)end, (long long)MT_MAX(g->map.size - data, 0));
    for (int64_t i = 0; i < n_tensors && !rc; i++) g->tensors[i].data = g->map.data + data + begin[i];
    mem_free(begin);
    return rc;
}

int gguf_open(struct gguf *g, const char *path, struct err *err)
{
    *g = (struct gguf){.n_values = 0};
    if (file_map_open(&g->map, path, err)) return -1;
    struct cursor c = {.g = g, .path = path, .err = err};
    if (!read_head(&c)) return 0;
    gguf_close(g);
    return -1;
}

void gguf_close(struct gguf *g)
{
    for (int64_t i = 0; i < g->n_strings; i++) mem_free(g->strings[i]);
    mem_free(g->strings);
    mem_free(g->values);
    mem_free(g->tensors);
    file_map_close(&g->map);
    *g = (struct gguf){.n_values = 0};
}

const struct gguf_value *gguf_value(const struct gguf *g, const char *key)
{
    for (int64_t i = 0; i < g->n_values; i++)
        if (!strcmp(g->values[i].key, key)) return &g->values[i];
    return NULL;
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name)
{
    for (int64_t i = 0; i < g->n_tensors; i++)
        if (!strcmp(g->tensors[i].name, name)) return &g->tensors[i];
    return NULL;
}
