/* checkpoints.c - variants of the parity checkpoint. */
#include "tests/checkpoints.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"
#include "model/stored/published.h"
#include "tests/packed.h"

#define CASE     "parity/case_a"
#define N_LAYER  2
#define N_EXP    8
#define MAX_NAME 256
#define OK(rc)   assert_int_equal(check(rc, &err, __LINE__), 0)

static int check(int rc, const struct err *err, int line)
{
    if (rc) print_error("line %d: %s\n", line, err->msg);
    return rc;
}

static void *copy(const void *data, int64_t bytes) { return memcpy(mem_alloc(MT_MAX(bytes, 1)), data, (size_t)bytes); }

static int64_t entry_count(const struct st_entry *e)
{
    int64_t n = 1;
    for (int i = 0; i < e->ndim; i++) n *= e->shape[i];
    return n;
}

/* ---- the tensors of a draft */

static int64_t place(const struct draft *d, const char *name)
{
    int64_t i = 0;
    while (i < d->n && strcmp(d->entries[i].name, name)) i++;
    return i;
}

void draft_open(struct draft *d) { draft_open_case(d, CASE); }

void draft_open_case(struct draft *d, const char *name) { draft_open_dir(d, fixture(name)); }

void draft_open_dir(struct draft *d, const char *dir)
{
    struct err err;
    struct safetensors st;
    int64_t size;
    char path[MT_PATH];
    *d = (struct draft){0};
    OK(safetensors_open(&st, dir, &err));
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[i];
        draft_put(d, t->name, t->dtype, t->ndim, t->shape, copy(t->data, t->bytes));
        if (t->dtype == DT_NONE) d->entries[place(d, t->name)].st_dtype = t->st_dtype;
    }
    safetensors_close(&st);
    OK(str_format(path, sizeof(path), &err, "path", "%s/config.json", dir));
    d->config = file_read(path, 1 << 20, &size, &err);
    OK(d->config ? 0 : -1);
}

static void entry_free(struct st_entry *e)
{
    mem_free((void *)(uintptr_t)e->name);
    mem_free((void *)(uintptr_t)e->data);
}

void draft_free(struct draft *d)
{
    for (int64_t i = 0; i < d->n; i++) entry_free(&d->entries[i]);
    mem_free(d->entries);
    mem_free(d->config);
    *d = (struct draft){0};
}

const struct st_entry *draft_find(const struct draft *d, const char *name)
{
    const int64_t i = place(d, name);
    if (i == d->n) fail_msg("%s is not in the draft", name);
    return &d->entries[i];
}

void draft_remove(struct draft *d, const char *name)
{
    draft_find(d, name);
    const int64_t i = place(d, name);
    entry_free(&d->entries[i]);
    d->entries[i] = d->entries[--d->n];
}

void draft_put(struct draft *d, const char *name, enum dtype t, int ndim, const int64_t *shape, void *data)
{
    const int64_t i = place(d, name);
    if (i == d->cap) {
        const int64_t cap = MT_MAX(64, 2 * d->cap);
        d->entries = mem_grow(d->entries, d->cap, cap, sizeof(*d->entries));
        d->cap = cap;
    }
    struct st_entry e = {.name = mem_strdup(name), .dtype = t, .ndim = ndim, .data = data};
    memcpy(e.shape, shape, (size_t)ndim * sizeof(*shape));
    if (i < d->n)
        entry_free(&d->entries[i]);
    else
        d->n++;
    d->entries[i] = e;
}

void draft_put_as(struct draft *d, const char *name, const char *st_dtype, int ndim, const int64_t *shape, void *data)
{
    draft_put(d, name, DT_NONE, ndim, shape, data);
    d->entries[place(d, name)].st_dtype = st_dtype;
}

void draft_begin(struct draft *d, const char *config) { *d = (struct draft){.config = mem_strdup(config)}; }

void draft_random(struct draft *d, const char *prefix, int64_t layer, const char *name, int64_t n_out, int64_t n_in)
{
    const int64_t n = n_out * MT_MAX(n_in, 1);
    float *x = mem_array(n, sizeof(*x));
    char text[MAX_NAME];
    snprintf(text, sizeof(text), "%slayers.%lld.%s", prefix, (long long)layer, name);
    if (layer < 0) snprintf(text, sizeof(text), "%s", name);
    const double mean = strstr(name, "norm") ? 1 : 0, std = strstr(name, "embed") ? 1 : 0.4;
    const uint64_t key = rng_key(1, text);
    for (int64_t i = 0; i < n; i++) x[i] = (float)(mean + std * test_value(key, (uint64_t)i));
    draft_put(d, text, DT_F32, n_in ? 2 : 1, (int64_t[]){n_out, n_in}, x);
}

void draft_config(struct draft *d, const char *old, const char *new)
{
    const char *at = strstr(d->config, old);
    if (!at) fail_msg("\"%s\" is not in config.json", old);
    const size_t before = (size_t)(at - d->config), size = strlen(d->config) + strlen(new) + 1;
    char *text = mem_alloc((int64_t)size);
    snprintf(text, size, "%.*s%s%s", (int)before, d->config, new, at + strlen(old));
    mem_free(d->config);
    d->config = text;
}

/* ---- files */

static void write_text(const char *dir, const char *name, const char *text)
{
    struct err err;
    char path[MT_PATH];
    OK(str_format(path, sizeof(path), &err, "path", "%s/%s", dir, name));
    OK(file_write_atomic(path, text, (int64_t)strlen(text), &err));
}

static void write_shard(const struct draft *d, const char *dir, const char *name, const int *shard_of, int shard)
{
    struct err err;
    char path[MT_PATH];
    struct st_entry *part = mem_array(d->n, sizeof(*part));
    int64_t n = 0;
    for (int64_t i = 0; i < d->n; i++)
        if (shard_of[i] == shard) part[n++] = d->entries[i];
    OK(str_format(path, sizeof(path), &err, "path", "%s/%s", dir, name));
    OK(safetensors_write(path, part, n, &err));
    mem_free(part);
}

const char *draft_save(const struct draft *d, int n_shards)
{
    const char *dir = scratch_dir();
    const size_t cap = (size_t)d->n * (MAX_NAME + 64) + 64;
    char *index = mem_alloc((int64_t)cap), file[64] = "model.safetensors";
    int *shard_of = mem_array(d->n, sizeof(*shard_of));
    size_t at = (size_t)snprintf(index, cap, "{\"metadata\": {}, \"weight_map\": {");
    for (int64_t i = 0; i < d->n; i++) {
        shard_of[i] = (int)(rng_u64(7, (uint64_t)i) % (uint64_t)n_shards);
        at += (size_t)snprintf(index + at, cap - at, "%s\"%s\": \"model-%05d-of-%05d.safetensors\"", i ? ", " : "",
                               d->entries[i].name, shard_of[i], n_shards - 1);
    }
    snprintf(index + at, cap - at, "}}");
    for (int s = 0; s < n_shards; s++) {
        if (n_shards > 1) snprintf(file, sizeof(file), "model-%05d-of-%05d.safetensors", s, n_shards - 1);
        write_shard(d, dir, file, shard_of, s);
    }
    if (n_shards > 1) write_text(dir, "model.safetensors.index.json", index);
    write_text(dir, "config.json", d->config);
    mem_free(index);
    mem_free(shard_of);
    return dir;
}

/* ---- values and dtypes */

static bool is_float(enum dtype t) { return t == DT_F32 || t == DT_BF16 || t == DT_F16; }

static float *entry_values(const struct st_entry *e)
{
    const int64_t n = entry_count(e);
    float *x = mem_array(n, sizeof(*x));
    for (int64_t i = 0; i < n; i++)
        x[i] = e->dtype == DT_F32    ? ((const float *)e->data)[i]
               : e->dtype == DT_BF16 ? bf16_to_f32(((const uint16_t *)e->data)[i])
                                     : f16_to_f32(((const uint16_t *)e->data)[i]);
    return x;
}

float *draft_values(const struct draft *d, const char *name) { return entry_values(draft_find(d, name)); }

/* The bytes of x in the tensor's dtype; frees x. */
static void *stored(float *x, int64_t n, enum dtype t)
{
    if (t == DT_F32) return x;
    uint16_t *out = mem_array(n, sizeof(*out));
    for (int64_t i = 0; i < n; i++) out[i] = t == DT_BF16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]);
    mem_free(x);
    return out;
}

static void put_floats(struct draft *d, const char *name, enum dtype t, int ndim, const int64_t *shape, float *x)
{
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    draft_put(d, name, t, ndim, shape, stored(x, n, t));
}

void draft_dense(struct draft *d, enum dtype t)
{
    for (int64_t i = 0; i < d->n; i++) {
        const struct st_entry e = d->entries[i];
        if (!is_float(e.dtype)) continue;
        float *x = entry_values(&e);
        for (int64_t k = 0; k < entry_count(&e); k++) x[k] = f16_to_f32(f32_to_f16(x[k]));
        char name[MAX_NAME];
        snprintf(name, sizeof(name), "%s", e.name);
        put_floats(d, name, t, e.ndim, e.shape, x);
    }
}

/* ---- layouts */

const struct linear_form linear_forms[] = {{.format = WF_BF16},
                                           {.format = WF_NF4, .block = 64},
                                           {.format = WF_NF4, .block = 64, .nested = true},
                                           {.format = WF_NVFP4},
                                           {.format = WF_NVFP4, .nested = true},
                                           {.format = WF_BF16, .int4 = true},
                                           {.format = WF_F32, .fp8 = FP8_TENSOR},
                                           {.format = WF_F32, .fp8 = FP8_ROWS},
                                           {.format = WF_F32, .fp8 = FP8_COLUMN},
                                           {.format = WF_F32, .fp8 = FP8_BLOCKS},
                                           {.format = WF_F32, .fp8 = FP8_BLOCKS_INV},
                                           {.format = WF_NONE}};

static void put_part(struct draft *d, const char *name, const char *suffix, enum dtype t, int64_t n, void *data)
{
    char full[2 * MAX_NAME];
    snprintf(full, sizeof(full), "%s%s", name, suffix);
    draft_put(d, full, t, 1, &n, data);
}

/* The tensors that bitsandbytes writes for one Linear */
static void put_4bit(struct draft *d, const char *name, const struct weight *w, const struct linear_form *form)
{
    const int64_t blocks = weight_blocks(w), size = form->storage == DT_NONE ? 1 : dtype_size(form->storage);
    const char *type = w->format == WF_NF4 ? "nf4" : "fp4";
    char text[512], key[64];
    int at = snprintf(text, sizeof(text),
                      "{\"quant_type\": \"%s\", \"blocksize\": %lld, \"dtype\": \"bfloat16\", \"shape\": [%lld, %lld]",
                      type, (long long)w->block, (long long)w->n_out, (long long)w->n_in);
    if (form->nested)
        at += snprintf(text + at, sizeof(text) - (size_t)at,
                       ", \"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": %.17g",
                       (double)*w->nested_offset);
    at += snprintf(text + at, sizeof(text) - (size_t)at, "}");
    snprintf(key, sizeof(key), ".quant_state.bitsandbytes__%s", type);
    const int64_t shape[] = {w->n_out * w->n_in / 2 / size, 1};
    draft_put(d, name, form->storage == DT_NONE ? DT_U8 : form->storage, 2, shape, copy(w->data, shape[0] * size));
    put_part(d, name, key, DT_U8, at, copy(text, at));
    put_part(d, name, ".quant_map", DT_F32, 16, copy(w->code, 64));
    if (!form->nested) {
        put_part(d, name, ".absmax", DT_F32, blocks, copy(w->absmax, 4 * blocks));
        return;
    }
    const int64_t outer = (blocks + 255) / 256;
    put_part(d, name, ".absmax", DT_U8, blocks, copy(w->scale, blocks));
    put_part(d, name, ".nested_absmax", DT_F32, outer, copy(w->nested_absmax, 4 * outer));
    put_part(d, name, ".nested_quant_map", DT_F32, 256, copy(w->nested_map, 1024));
}

/* Packs n values as one matrix. Returns what they decode to. */
static float *pack_nvfp4(uint8_t *nibbles, uint8_t *scales, float *scale2, bool divides, const float *x, int64_t n)
{
    assert_int_equal(packed_encode(WF_NVFP4, nibbles, scales, scale2, x, WF_F32, n, 1), 0);
    if (divides) *scale2 = 1 / *scale2;
    const struct weight w = {.format = WF_NVFP4,
                             .n_exp = 1,
                             .n_out = 1,
                             .n_in = n,
                             .data = nibbles,
                             .scale = scales,
                             .scale2 = scale2,
                             .scale2_divides = divides};
    float *y = mem_array(n, sizeof(*y));
    for (int64_t i = 0; i < n; i++) y[i] = quant_value(&w, 0, i);
    return y;
}

static void put_nvfp4(struct draft *d, const char *name, const float *x, int64_t n_out, int64_t n_in,
                      const struct linear_form *form)
{
    const int64_t n = n_out * n_in;
    uint8_t *nibbles = mem_alloc(n / 2), *scales = mem_alloc(n / 16);
    float *scale2 = mem_alloc(4), *y = pack_nvfp4(nibbles, scales, scale2, form->nested, x, n);
    char full[MAX_NAME];
    if (form->decoded) {
        put_floats(d, name, DT_F32, 2, (int64_t[]){n_out, n_in}, y);
        mem_free(nibbles);
        mem_free(scales);
        mem_free(scale2);
        return;
    }
    mem_free(y);
    if (place(d, name) < d->n) draft_remove(d, name);
    snprintf(full, sizeof(full), "%s%s", name, form->nested ? "_packed" : "");
    draft_put(d, full, DT_U8, 2, (int64_t[]){n_out, n_in / 2}, nibbles);
    snprintf(full, sizeof(full), "%s_scale", name);
    draft_put_as(d, full, "F8_E4M3", 2, (int64_t[]){n_out, n_in / 16}, scales);
    snprintf(full, sizeof(full), "%s%s", name, form->nested ? "_global_scale" : "_scale_2");
    draft_put(d, full, DT_F32, form->nested, (int64_t[]){1}, scale2);
    snprintf(full, sizeof(full), "%.*s%s", (int)(strlen(name) - strlen("weight")), name,
             form->nested ? "input_global_scale" : "input_scale");
    draft_put(d, full, DT_F32, 0, (int64_t[]){1}, mem_array(1, 4));
}

/* Rows and columns per scale. */
static void fp8_sizes(enum fp8_scales kind, int64_t n_out, int64_t n_in, int64_t size[2])
{
    const bool blocks = kind >= FP8_BLOCKS;
    size[0] = blocks ? 128 : kind == FP8_TENSOR ? n_out : 1;
    size[1] = blocks ? 128 : n_in;
}

static void put_fp8(struct draft *d, const char *name, const float *x, int64_t n_out, int64_t n_in,
                    const struct linear_form *form)
{
    int64_t size[2];
    fp8_sizes(form->fp8, n_out, n_in, size);
    const int64_t rows = (n_out + size[0] - 1) / size[0], cols = (n_in + size[1] - 1) / size[1];
    uint8_t *codes = mem_alloc(n_out * n_in);
    float *scale = mem_array(rows * cols, 4), *y = mem_array(n_out * n_in, 4);
    for (int64_t i = 0; i < rows * cols; i++)
        scale[i] = bf16_to_f32(f32_to_bf16((float)(1 + test_value(31, (uint64_t)i) / 2) / 256));
    for (int64_t i = 0; i < n_out * n_in; i++) {
        const float g = scale[i / n_in / size[0] * cols + i % n_in / size[1]], q = e4m3_round(fabsf(x[i]) / g);
        codes[i] = (uint8_t)(e4m3_code(q) | (x[i] < 0 ? 128 : 0));
        y[i] = (x[i] < 0 ? -q : q) * g;
    }
    char full[MAX_NAME];
    snprintf(full, sizeof(full), "%s%s", name, form->fp8 == FP8_BLOCKS_INV ? "_scale_inv" : "_scale");
    if (form->decoded) {
        put_floats(d, name, form->format == WF_BF16 ? DT_BF16 : DT_F32, 2, (int64_t[]){n_out, n_in}, y);
        mem_free(codes);
        mem_free(scale);
        return;
    }
    mem_free(y);
    draft_put_as(d, name, "F8_E4M3", 2, (int64_t[]){n_out, n_in}, codes);
    const int ndim = form->fp8 == FP8_TENSOR ? 0 : form->fp8 == FP8_ROWS ? 1 : 2;
    put_floats(d, full, form->fp8 == FP8_BLOCKS ? DT_BF16 : DT_F32, ndim, (int64_t[]){rows, cols}, scale);
}

/* Groups of 32 columns, as compressed-tensors stores symmetric 4-bit integers; the codes are random. */
static void put_int4(struct draft *d, const char *name, int64_t n_out, int64_t n_in, bool decoded)
{
    enum { GROUP = 32 };
    const int64_t n = n_out * n_in;
    uint8_t *nibbles = mem_alloc(n / 2);
    uint16_t *scale = mem_array(n / GROUP, sizeof(*scale)), *value = mem_array(n, sizeof(*value));
    char full[MAX_NAME];
    const uint64_t key = rng_key(5, name);
    for (int64_t i = 0; i < n; i++) {
        const int code = (int)(rng_u64(key, (uint64_t)i) % 16);
        if (i % GROUP == 0) scale[i / GROUP] = f32_to_bf16((float)(0.02 + 0.01 * test_value(6, (uint64_t)i)));
        nibbles[i / 2] |= (uint8_t)(code << 4 * (i % 2));
        value[i] = f32_to_bf16((float)(code - 8) * bf16_to_f32(scale[i / GROUP]));
    }
    if (decoded) {
        draft_put(d, name, DT_BF16, 2, (int64_t[]){n_out, n_in}, value);
        mem_free(nibbles);
        mem_free(scale);
        return;
    }
    mem_free(value);
    if (place(d, name) < d->n) draft_remove(d, name);
    snprintf(full, sizeof(full), "%s_packed", name);
    draft_put(d, full, DT_I32, 2, (int64_t[]){n_out, n_in / 8}, nibbles);
    snprintf(full, sizeof(full), "%s_scale", name);
    draft_put(d, full, DT_BF16, 2, (int64_t[]){n_out, n_in / GROUP}, scale);
    snprintf(full, sizeof(full), "%s_shape", name);
    draft_put(d, full, DT_I64, 1, (int64_t[]){2}, copy((int64_t[]){n_out, n_in}, 16));
}

void draft_linear(struct draft *d, const char *name, const float *x, int64_t n_out, int64_t n_in,
                  const struct linear_form *form)
{
    const int64_t n = n_out * n_in;
    struct weight w = {.format = form->format, .n_exp = 1, .n_out = n_out, .n_in = n_in, .block = form->block};
    if (form->int4) {
        put_int4(d, name, n_out, n_in, form->decoded);
        return;
    }
    if (!form->fp8 && (form->format == WF_F32 || form->format == WF_BF16)) {
        const enum dtype t = form->format == WF_F32 ? DT_F32 : DT_BF16;
        put_floats(d, name, t, 2, (int64_t[]){n_out, n_in}, copy(x, 4 * n));
        return;
    }
    if (form->fp8 || form->format == WF_NVFP4) {
        (form->fp8 ? put_fp8 : put_nvfp4)(d, name, x, n_out, n_in, form);
        return;
    }
    const int64_t blocks = weight_blocks(&w);
    uint8_t *nibbles = mem_alloc(n / 2), *q8 = mem_alloc(blocks);
    float *absmax = mem_array(blocks, 4), *outer = mem_array(blocks, 4), map[256], offset;
    assert_int_equal(quant_bnb_encode(w.format, nibbles, absmax, x, n, w.block), 0);
    quant_dynamic_map(map);
    quant_nested_encode(q8, outer, &offset, absmax, blocks, map);
    w.data = nibbles;
    w.code = w.format == WF_NF4 ? quant_nf4_code : quant_fp4_code;
    w.absmax = absmax;
    if (form->nested) w.scale = q8, w.nested_absmax = outer, w.nested_offset = &offset, w.nested_map = map;
    if (form->decoded) {
        float *y = mem_array(n, sizeof(*y));
        for (int64_t i = 0; i < n; i++) y[i] = quant_value(&w, 0, i);
        put_floats(d, name, DT_F32, 2, (int64_t[]){n_out, n_in}, y);
    } else {
        put_4bit(d, name, &w, form);
    }
    mem_free(nibbles);
    mem_free(q8);
    mem_free(absmax);
    mem_free(outer);
}

static const char *const products[] = {"gate_up_proj", "down_proj"};

static const char *expert_name(char name[MAX_NAME], int64_t layer, int product, const char *suffix)
{
    snprintf(name, MAX_NAME, "model.layers.%lld.mlp.experts.%s%s", (long long)layer, products[product], suffix);
    return name;
}

/* Decodes the MXFP4 experts of one product to [E, out, in] and removes them from the draft. */
static float *take_experts(struct draft *d, int64_t layer, int product, int64_t *n_out, int64_t *n_in)
{
    char name[MAX_NAME];
    const struct st_entry *b = draft_find(d, expert_name(name, layer, product, "_blocks"));
    const struct st_entry *s = draft_find(d, expert_name(name, layer, product, "_scales"));
    *n_out = b->shape[1];
    *n_in = b->shape[2] * 32;
    const int64_t n = *n_out * *n_in;
    const struct weight w = {
        .format = WF_MXFP4, .n_exp = N_EXP, .n_out = *n_out, .n_in = *n_in, .data = b->data, .scale = s->data};
    float *x = mem_array(N_EXP * n, sizeof(*x));
    for (int64_t i = 0; i < N_EXP * n; i++) x[i] = quant_value(&w, i / n, i % n);
    draft_remove(d, expert_name(name, layer, product, "_blocks"));
    draft_remove(d, expert_name(name, layer, product, "_scales"));
    return x;
}

void draft_transposed(struct draft *d, enum dtype t)
{
    for (int64_t layer = 0; layer < N_LAYER; layer++)
        for (int p = 0; p < 2; p++) {
            char name[MAX_NAME];
            int64_t n_out, n_in;
            float *x = take_experts(d, layer, p, &n_out, &n_in), *y = mem_array(N_EXP * n_out * n_in, sizeof(*y));
            for (int64_t e = 0; e < N_EXP; e++)
                for (int64_t o = 0; o < n_out; o++)
                    for (int64_t i = 0; i < n_in; i++) y[(e * n_in + i) * n_out + o] = x[(e * n_out + o) * n_in + i];
            put_floats(d, expert_name(name, layer, p, ""), t, 3, (int64_t[]){N_EXP, n_in, n_out}, y);
            mem_free(x);
        }
}

void draft_nvfp4_stacks(struct draft *d, bool each, bool decoded)
{
    for (int64_t layer = 0; layer < N_LAYER; layer++)
        for (int p = 0; p < 2; p++) {
            char name[MAX_NAME];
            int64_t n_out, n_in;
            float *x = take_experts(d, layer, p, &n_out, &n_in), *t = mem_array(N_EXP * n_out * n_in, sizeof(*t));
            const int64_t n = n_out * n_in;
            uint8_t *bytes = mem_alloc(N_EXP * n / 2), *scales = mem_alloc(N_EXP * n / 16), one[2][1 << 16];
            float *scale2 = mem_array(N_EXP, 4), g;
            for (int64_t e = 0; e < N_EXP; e++) {
                float *y = pack_nvfp4(one[0], one[1], &g, false, x + e * n, n);
                const float used = each || !e ? g : scale2[0];
                scale2[e] = used;
                for (int64_t i = 0; i < n; i++) {
                    const int64_t o = i / n_in, c = i % n_in;
                    bytes[(e * n_in / 2 + c / 2) * n_out + o] = one[0][i / 2];
                    scales[(e * n_in / 16 + c / 16) * n_out + o] = one[1][i / 16];
                    t[(e * n_in + c) * n_out + o] =
                        quant_e2m1_code[one[0][i / 2] >> 4 * (i % 2) & 15] * nvfp4_step(one[1][i / 16], used, false);
                }
                mem_free(y);
            }
            mem_free(x);
            if (decoded) {
                put_floats(d, expert_name(name, layer, p, ""), DT_F32, 3, (int64_t[]){N_EXP, n_in, n_out}, t);
                mem_free(bytes);
                mem_free(scales);
                mem_free(scale2);
                continue;
            }
            mem_free(t);
            draft_put(d, expert_name(name, layer, p, ""), DT_U8, 3, (int64_t[]){N_EXP, n_in / 2, n_out}, bytes);
            draft_put_as(d, expert_name(name, layer, p, "_weight_scale"), "F8_E4M3", 3,
                         (int64_t[]){N_EXP, n_in / 16, n_out}, scales);
            draft_put(d, expert_name(name, layer, p, "_weight_scale_2"), DT_F32, each, (int64_t[]){N_EXP}, scale2);
            draft_put(d, expert_name(name, layer, p, "_input_scale"), DT_F32, 0, (int64_t[]){1}, mem_array(1, 4));
        }
}

static void rename_tensor(struct draft *d, const char *old, const char *new)
{
    const struct st_entry e = *draft_find(d, old);
    draft_put(d, new, e.dtype, e.ndim, e.shape, copy(e.data, entry_count(&e) * dtype_size(e.dtype)));
    draft_remove(d, old);
}

static void split_bias(struct draft *d, int64_t layer, int product)
{
    char name[MAX_NAME], suffix[32];
    const struct st_entry e = *draft_find(d, expert_name(name, layer, product, "_bias"));
    const int64_t bytes = e.shape[1] * dtype_size(e.dtype);
    for (int64_t x = 0; x < N_EXP; x++) {
        snprintf(suffix, sizeof(suffix), "s.%lld.bias", (long long)x);
        draft_put(d, expert_name(name, layer, product, suffix), e.dtype, 1, &e.shape[1],
                  copy((const char *)e.data + x * bytes, bytes));
    }
    draft_remove(d, expert_name(name, layer, product, "_bias"));
}

void draft_per_expert(struct draft *d, const struct linear_form *form)
{
    for (int64_t layer = 0; layer < N_LAYER; layer++) {
        char name[MAX_NAME], new[MAX_NAME], suffix[32];
        for (int p = 0; p < 2; p++) {
            int64_t n_out, n_in;
            float *x = take_experts(d, layer, p, &n_out, &n_in);
            for (int64_t e = 0; e < N_EXP; e++) {
                snprintf(suffix, sizeof(suffix), "s.%lld.weight", (long long)e);
                draft_linear(d, expert_name(name, layer, p, suffix), x + e * n_out * n_in, n_out, n_in, form);
            }
            mem_free(x);
            split_bias(d, layer, p);
        }
        for (int i = 0; i < 2; i++) {
            const char *part = i ? "bias" : "weight";
            snprintf(name, sizeof(name), "model.layers.%lld.mlp.router.%s", (long long)layer, part);
            snprintf(new, sizeof(new), "model.layers.%lld.mlp.router.linear.%s", (long long)layer, part);
            rename_tensor(d, name, new);
        }
    }
}

void draft_attention(struct draft *d, const struct linear_form *form)
{
    for (int64_t i = 0; i < 4 * N_LAYER; i++) {
        char name[MAX_NAME];
        snprintf(name, sizeof(name), "model.layers.%lld.self_attn.%c_proj.weight", (long long)i / 4, "qkvo"[i % 4]);
        const struct st_entry e = *draft_find(d, name);
        float *x = entry_values(&e);
        draft_linear(d, name, x, e.shape[0], e.shape[1], form);
        mem_free(x);
    }
}

void draft_expert_width(struct draft *d, int64_t d_ff)
{
    char text[64];
    const int64_t d_model = draft_find(d, "model.norm.weight")->shape[0];
    snprintf(text, sizeof(text), "\"intermediate_size\": %lld", (long long)d_ff);
    draft_config(d, "\"intermediate_size\": 96", text);
    for (int64_t layer = 0; layer < N_LAYER; layer++)
        for (int p = 0; p < 2; p++) {
            char name[MAX_NAME];
            const int64_t n_out = p ? d_model : 2 * d_ff, n_in = p ? d_ff : d_model, n = N_EXP * n_out * n_in;
            float *x = mem_array(n, sizeof(*x)), *bias = mem_array(N_EXP * n_out, sizeof(*bias));
            uint8_t *nibbles = mem_alloc(n / 2), *scales = mem_alloc(n / 32);
            for (int64_t i = 0; i < n; i++) x[i] = (float)test_value((uint64_t)(2 * layer + p), (uint64_t)i) / 4;
            for (int64_t i = 0; i < N_EXP * n_out; i++) bias[i] = (float)test_value(99, (uint64_t)i);
            assert_int_equal(quant_mxfp4_encode(nibbles, scales, x, n), 0);
            draft_put(d, expert_name(name, layer, p, "_blocks"), DT_U8, 4, (int64_t[]){N_EXP, n_out, n_in / 32, 16},
                      nibbles);
            draft_put(d, expert_name(name, layer, p, "_scales"), DT_U8, 3, (int64_t[]){N_EXP, n_out, n_in / 32},
                      scales);
            put_floats(d, expert_name(name, layer, p, "_bias"), DT_F32, 2, (int64_t[]){N_EXP, n_out}, bias);
            mem_free(x);
        }
}

void draft_head_width(struct draft *d, int64_t dim)
{
    const int64_t d_model = draft_find(d, "model.norm.weight")->shape[0];
    char name[MAX_NAME];
    snprintf(name, sizeof(name), "\"head_dim\": %lld", (long long)dim);
    draft_config(d, "\"head_dim\": 32", name);
    for (int64_t i = 0; i < 4 * N_LAYER; i++) {
        const int64_t cols = (i % 4 == 0 || i % 4 == 3 ? 4 : 2) * dim; /* 4 query heads; 2 heads for k and v */
        const int64_t n_out = i % 4 == 3 ? d_model : cols, n_in = i % 4 == 3 ? cols : d_model;
        float *x = mem_array(n_out * n_in, sizeof(*x)), *bias = mem_array(n_out, sizeof(*bias));
        for (int64_t k = 0; k < n_out * n_in; k++) x[k] = (float)test_value((uint64_t)i, (uint64_t)k) / 8;
        for (int64_t k = 0; k < n_out; k++) bias[k] = (float)test_value((uint64_t)(100 + i), (uint64_t)k) / 4;
        snprintf(name, sizeof(name), "model.layers.%lld.self_attn.%c_proj.weight", (long long)i / 4, "qkvo"[i % 4]);
        put_floats(d, name, DT_BF16, 2, (int64_t[]){n_out, n_in}, x);
        snprintf(name, sizeof(name), "model.layers.%lld.self_attn.%c_proj.bias", (long long)i / 4, "qkvo"[i % 4]);
        put_floats(d, name, DT_BF16, 1, (int64_t[]){n_out}, bias);
    }
}

/* ---- loading */

/* Two documents of 13 and 18 tokens, longer than the window of 8; every second token is labelled. */
static void forward(struct model *m, struct model_sums *loss)
{
    enum { N = 31, CUT = 13, N_LABEL = N / 2 };
    int32_t tok[N], pos[N], cu[] = {0, CUT, N}, row[N_LABEL], id[N_LABEL];
    const struct model_pass pass = {.loss_scale = 1};
    for (int32_t t = 0; t < N; t++) {
        tok[t] = (int32_t)(rng_u64(11, (uint64_t)t) % (uint64_t)m->arch.vocab);
        pos[t] = t < CUT ? t : t - CUT;
    }
    for (int32_t i = 0; i < N_LABEL; i++) row[i] = 2 * i, id[i] = tok[2 * i + 1];
    const struct model_batch b = {.n_tok = N,
                                  .n_seq = 2,
                                  .n_label = N_LABEL,
                                  .max_len = N - CUT,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = id};
    model_clear(m);
    model_begin(m, &b, &pass);
    model_fwd(m);
    model_loss(m);
    model_read(m, loss);
    model_end(m);
}

static void open_model(struct loaded *l, struct model *m, struct device *dev, const struct model_options *opt)
{
    const char *target = l->arch.hyper.n_stream ? "o_b_proj" : "o_proj";
    const struct lora_options lora = {.r = 2, .alpha = 2, .targets = target, .layers = ""};
    struct adapters ad;
    struct err err;
    OK(adapters_plan(&ad, &l->arch, &lora, &err));
    OK(model_open(m, dev, &l->arch, &l->st, &ad, opt, 1, &err));
    forward(m, &l->loss);
}

void loaded_open(struct loaded *l, const char *dir) { loaded_open_as(l, dir, &(struct quantize){.cache = NULL}); }

void loaded_open_as(struct loaded *l, const char *dir, const struct quantize *q) { loaded_open_decoded(l, dir, q, 0); }

void loaded_open_decoded(struct loaded *l, const char *dir, const struct quantize *q, int64_t n)
{
    const struct model_options opt = {.max_len = 64, .quantize = *q, .decoded_layers = n};
    struct device measure, *dev = &l->dev;
    struct model plan;
    struct err err;
    *l = (struct loaded){0};
    OK(arch_load(&l->arch, dir, &err));
    OK(safetensors_open(&l->st, dir, &err));
    OK(published_rename(&l->st, &l->arch, &err));
    OK(device_open(dev, "cpu", "fp32", &err));
    device_dry_run(&measure, dev);
    open_model(l, &plan, &measure, &opt);
    model_close(&plan);
    OK(device_reserve(dev, &dev->weights, "weights", measure.weights.peak, &err));
    OK(device_reserve(dev, &dev->state, "state", measure.state.peak, &err));
    OK(device_reserve(dev, &dev->work, "work", measure.work.peak, &err));
    open_model(l, &l->model, dev, &opt);
    assert_int_equal(dev->weights.used, measure.weights.peak);
}

void loaded_close(struct loaded *l)
{
    model_close(&l->model);
    device_close(&l->dev);
    safetensors_close(&l->st);
}

static void same_weight(const char *what, int64_t layer, const struct weight *a, const struct weight *b)
{
    const int64_t n = a->n_out * a->n_in;
    if (a->n_exp != b->n_exp || a->n_out != b->n_out || a->n_in != b->n_in)
        fail_msg("%s of layer %lld: shapes differ", what, (long long)layer);
    if (a->format == WF_BF16 && b->format == WF_BF16 && !memcmp(a->data, b->data, (size_t)weight_bytes(a))) return;
    for (int64_t i = 0; i < a->n_exp * n; i++) {
        const float x = quant_value(a, i / n, i % n), y = quant_value(b, i / n, i % n);
        if (memcmp(&x, &y, sizeof(x)))
            fail_msg("%s of layer %lld, element %lld: %.9g is not %.9g", what, (long long)layer, (long long)i,
                     (double)x, (double)y);
    }
}

static void same_tensor(const char *what, int64_t layer, struct tensor a, struct tensor b)
{
    assert_int_equal(a.dtype, b.dtype);
    assert_int_equal(tensor_bytes(a), tensor_bytes(b));
    if (a.ndim && memcmp(a.data, b.data, (size_t)tensor_bytes(a)))
        fail_msg("%s of layer %lld differs", what, (long long)layer);
}

void assert_same_weights(const struct loaded *a, const struct loaded *b)
{
    const struct weights *x = &a->model.weights, *y = &b->model.weights;
    assert_int_equal(a->arch.n_layer, b->arch.n_layer);
    same_weight("embedding", -1, &x->embed, &y->embed);
    same_weight("head", -1, &x->head, &y->head);
    same_tensor("final norm", -1, x->norm, y->norm);
#define SAME_WEIGHT(field) same_weight(#field, i, &x->layers[i].field, &y->layers[i].field)
#define SAME_TENSOR(field) same_tensor(#field, i, x->layers[i].field, y->layers[i].field)
    for (int64_t i = 0; i < a->arch.n_layer; i++) {
        struct product p[LAYER_PRODUCTS];
        layer_products(&a->arch, i, p);
        for (int k = 0; k < LAYER_PRODUCTS; k++) {
            const struct proj *of_x = layer_proj(&x->layers[i], &p[k]), *of_y = layer_proj(&y->layers[i], &p[k]);
            if (!p[k].n_out) continue;
            same_weight(lora_target_name(p[k].target[0]), i, &of_x->w, &of_y->w);
            same_tensor("bias", i, of_x->bias, of_y->bias);
        }
        SAME_WEIGHT(router), SAME_TENSOR(router_bias);
        SAME_TENSOR(attn_norm), SAME_TENSOR(ffn_norm);
        if (a->arch.mixer[i] == &mixer_attention) SAME_TENSOR(attention.sinks);
    }
#undef SAME_WEIGHT
#undef SAME_TENSOR
}

void assert_same_loaded(const struct loaded *a, const struct loaded *b)
{
    assert_same_weights(a, b);
    if (memcmp(&a->loss.nll, &b->loss.nll, sizeof(double)))
        fail_msg("one loss is %.17g, the other %.17g", a->loss.nll, b->loss.nll);
}

void assert_same_model(const char *dir_a, const char *dir_b)
{
    struct loaded a, b;
    loaded_open(&a, dir_a);
    loaded_open(&b, dir_b);
    assert_same_loaded(&a, &b);
    loaded_close(&a);
    loaded_close(&b);
}

void assert_draft_refused(const struct draft *d, const char *says)
{
    struct arch a;
    struct safetensors st;
    struct err err = {.msg = ""};
    struct weights w;
    struct device dev = {.dry_run = true, .weights = arena_measure("weights")};
    const char *dir = draft_save(d, 1);
    if (arch_load(&a, dir, &err) || safetensors_open(&st, dir, &err)) fail_msg("%s", err.msg);
    assert_int_equal(weights_load(&w, &dev, &a, &st, &(struct weights_options){0}, &err), -1);
    if (!strstr(err.msg, says)) fail_msg("\"%s\" does not say \"%s\"", err.msg, says);
    safetensors_close(&st);
}
