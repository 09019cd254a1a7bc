/* source.c - finds a matrix in a checkpoint. Tensor names decide its format, not shapes. */
#include "model/source.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json.h"

static int shape_error(const struct st_tensor *t, const char *what, int ndim, const int64_t *shape, struct err *err)
{
    char want[128] = "", have[128] = "";
    for (int i = 0; i < ndim; i++)
        snprintf(want + strlen(want), sizeof(want) - strlen(want), "%s%lld", i ? ", " : "", (long long)shape[i]);
    for (int i = 0; i < t->ndim; i++)
        snprintf(have + strlen(have), sizeof(have) - strlen(have), "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    return err_set(err, "tensor %s is %s [%s], expected %s [%s]: the checkpoint does not fit its config.json", t->name,
                   t->st_dtype, have, what, want);
}

bool checkpoint_has(const struct checkpoint *ck, const char *name) { return safetensors_find(ck->st, name) != NULL; }

static const struct st_tensor *find(struct checkpoint *ck, const char *name, struct err *err)
{
    const struct st_tensor *t = safetensors_find(ck->st, name);
    if (t) {
        ck->used[t - ck->st->tensors] = true;
        return t;
    }
    const char *near = safetensors_nearest(ck->st, name);
    err_set(err, "tensor %s is not in the checkpoint%s%s", name, near ? "; the nearest name there is " : "",
            near ? near : "");
    return NULL;
}

const struct st_tensor *checkpoint_take(struct checkpoint *ck, const char *name, bool is_u8, int ndim,
                                        const int64_t *shape, struct err *err)
{
    const struct st_tensor *t = find(ck, name, err);
    if (!t) return NULL;
    bool fits = is_u8 ? t->dtype == DT_U8 : source_dense_format(t->dtype) != WF_NONE;
    fits = fits && t->ndim == ndim;
    for (int i = 0; fits && i < ndim; i++) fits = t->shape[i] == shape[i];
    if (fits) return t;
    shape_error(t, is_u8 ? "U8" : "BF16, F16 or F32", ndim, shape, err);
    return NULL;
}

enum weight_format source_dense_format(enum dtype t)
{
    return t == DT_BF16 ? WF_BF16 : t == DT_F16 ? WF_F16 : t == DT_F32 ? WF_F32 : WF_NONE;
}

void source_f32(const struct st_tensor *t, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        if (t->dtype == DT_F32) {
            memcpy(&out[i], t->data + 4 * i, 4);
            continue;
        }
        memcpy(&h, t->data + 2 * i, 2);
        out[i] = t->dtype == DT_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
    }
}

/* dst [n_out, n_in] = src [n_in, n_out] transposed, elements of `size` 2 or 4 bytes; a tile fits the L1 cache. */
static void transpose(char *dst, const uint8_t *src, int64_t n_out, int64_t n_in, int64_t size)
{
    const int64_t tile = 32;
    for (int64_t o0 = 0; o0 < n_out; o0 += tile)
        for (int64_t i0 = 0; i0 < n_in; i0 += tile)
            for (int64_t o = o0; o < MT_MIN(o0 + tile, n_out); o++)
                for (int64_t i = i0; i < MT_MIN(i0 + tile, n_in); i++) {
                    char *to = dst + (o * n_in + i) * size;
                    const uint8_t *from = src + (i * n_out + o) * size;
                    if (size == 2)
                        memcpy(to, from, 2);
                    else
                        memcpy(to, from, 4);
                }
}

void source_copy(const struct source *s, char *out)
{
    if (s->transposed)
        transpose(out, s->data->data, s->n_out, s->n_in, dtype_size(s->data->dtype));
    else
        memcpy(out, s->data->data, (size_t)s->data->bytes);
}

void source_drop(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n)
{
    struct st_tensor part = *t;
    part.offset += at;
    part.bytes = n;
    safetensors_drop(st, &part);
}

int64_t source_blocks(const struct source *s) { return (s->n_out * s->n_in + s->block - 1) / s->block; }

void source_absmax(const struct source *s, float *out)
{
    const int64_t n = source_blocks(s);
    if (!s->nested_absmax) {
        source_f32(s->absmax, n, out);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float map, scale;
        memcpy(&map, s->nested_map->data + 4 * s->absmax->data[i], 4);
        memcpy(&scale, s->nested_absmax->data + 4 * (i / 256), 4);
        out[i] = map * scale + s->nested_offset;
    }
}

/* Reads the JSON blob that bitsandbytes writes for every 4-bit weight. `type` is the format in the blob's name. */
static int read_quant_state(struct source *s, const struct st_tensor *blob, const char *type, bool nested,
                            struct err *err)
{
    struct json_doc *doc = json_parse((const char *)blob->data, blob->bytes, blob->name, err);
    struct json root, shape;
    const char *quant_type, *nested_dtype = "float32";
    int64_t out = 0, in = 0, nested_block = 256;
    double offset = 0;
    int rc = -1;
    if (!doc) return -1;
    root = json_root(doc);
    if (json_get_str(root, "quant_type", &quant_type, err) ||
        json_get_i64(root, "blocksize", 32, 4096, &s->block, err) || json_get_array(root, "shape", &shape, err) ||
        json_opt_i64(root, "nested_blocksize", 1, 1 << 20, &nested_block, err) ||
        json_opt_str(root, "nested_dtype", &nested_dtype, err) ||
        (nested && json_get_f64(root, "nested_offset", &offset, err)))
        goto out;
    if (json_count(shape) != 2 || json_i64(json_at(shape, 0), 0, INT64_MAX, &out, err) ||
        json_i64(json_at(shape, 1), 0, INT64_MAX, &in, err) || out != s->n_out || in != s->n_in) {
        json_error(shape, err, "is not [%lld, %lld]", (long long)s->n_out, (long long)s->n_in);
        goto out;
    }
    s->nested_offset = (float)offset;
    if (strcmp(quant_type, type))
        json_error(root, err, "quant_type is \"%s\", expected \"%s\"", quant_type, type);
    else if (s->block & (s->block - 1))
        json_error(root, err, "blocksize %lld is no power of two", (long long)s->block);
    else if (nested_block != 256 || strcmp(nested_dtype, "float32"))
        json_error(root, err, "nested_blocksize must be 256 and nested_dtype float32");
    else if (!isfinite(s->nested_offset))
        json_error(root, err, "nested_offset %g is no float32", offset);
    else
        rc = 0;
out:
    json_free(doc);
    return rc;
}

/* Derives the block size from the number of absmax values, for when only headers were read and not the blob. */
static void guess_block(struct source *s)
{
    const int64_t n = s->n_out * s->n_in, n_absmax = s->absmax->bytes / dtype_size(s->absmax->dtype);
    for (s->block = 32; s->block < 4096 && (n + s->block - 1) / s->block > n_absmax;) s->block *= 2;
}

/* Finds name + suffix and checks that it has n elements of a dtype, in any shape. */
static const struct st_tensor *aux_tensor(struct checkpoint *ck, const char *name, const char *suffix, enum dtype dtype,
                                          int64_t n, struct err *err)
{
    char full[512];
    if (str_format(full, sizeof(full), err, "tensor name", "%s%s", name, suffix)) return NULL;
    const struct st_tensor *t = find(ck, full, err);
    if (!t) return NULL;
    if (t->dtype == dtype && t->bytes == n * dtype_size(dtype)) return t;
    shape_error(t, dtype_name(dtype), 1, &n, err);
    return NULL;
}

/* A matrix in bitsandbytes' 4-bit format. An absmax of dtype U8 means nested (double quantised) scales. */
static int find_4bit(struct source *s, struct checkpoint *ck, const char *name, const char *state_name,
                     const char *type, struct err *err)
{
    char absmax[512];
    const struct st_tensor *state = find(ck, state_name, err);
    if (!state || !(s->data = find(ck, name, err)) ||
        str_format(absmax, sizeof(absmax), err, "tensor name", "%s.absmax", name) ||
        !(s->absmax = find(ck, absmax, err)))
        return -1;
    const bool nested = s->absmax->dtype == DT_U8;
    if (state->dtype != DT_U8) return shape_error(state, "U8", 1, &state->bytes, err);
    if (ck->st->headers)
        guess_block(s);
    else if (read_quant_state(s, state, type, nested, err))
        return -1;
    s->format = !strcmp(type, "nf4") ? WF_NF4 : WF_FP4;
    if (s->n_in % 2)
        return err_set(err, "tensor %s: a row of %lld nibbles does not fill its bytes", name, (long long)s->n_in);
    if (s->data->bytes != s->n_out * s->n_in / 2)
        return err_set(err, "tensor %s has %lld bytes, its quant_state asks for %lld x %lld nibbles", name,
                       (long long)s->data->bytes, (long long)s->n_out, (long long)s->n_in);
    const int64_t n = source_blocks(s);
    if (!aux_tensor(ck, name, ".absmax", nested ? DT_U8 : DT_F32, n, err) ||
        !(s->code = aux_tensor(ck, name, ".quant_map", DT_F32, 16, err)))
        return -1;
    if (nested && (!(s->nested_absmax = aux_tensor(ck, name, ".nested_absmax", DT_F32, (n + 255) / 256, err)) ||
                   !(s->nested_map = aux_tensor(ck, name, ".nested_quant_map", DT_F32, 256, err))))
        return -1;
    return 0;
}

int source_find(struct source *s, struct checkpoint *ck, const char *name, int64_t n_out, int64_t n_in, struct err *err)
{
    static const char *const types[] = {"nf4", "fp4"};
    char state[2][512], absmax[512];
    bool has[2];
    *s = (struct source){.n_out = n_out, .n_in = n_in};
    if (str_format(absmax, sizeof(absmax), err, "tensor name", "%s.absmax", name)) return -1;
    for (int i = 0; i < 2; i++) {
        if (str_format(state[i], sizeof(state[i]), err, "tensor name", "%s.quant_state.bitsandbytes__%s", name,
                       types[i]))
            return -1;
        has[i] = checkpoint_has(ck, state[i]);
    }
    if (has[0] && has[1]) return err_set(err, "tensors %s and %s contradict each other", state[0], state[1]);
    if (has[0] || has[1]) return find_4bit(s, ck, name, state[has[1]], types[has[1]], err);
    if (checkpoint_has(ck, absmax))
        return err_set(err, "tensor %s is not in the checkpoint, but %s is", state[0], absmax);
    s->data = checkpoint_take(ck, name, false, 2, (int64_t[]){n_out, n_in}, err);
    if (!s->data) return -1;
    s->format = source_dense_format(s->data->dtype);
    return 0;
}
