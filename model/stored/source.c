/* source.c - finds a matrix in a checkpoint, and copies it. Tensor names and dtypes decide its format, not shapes. */
#include "model/stored/source.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/json.h"
#include "kernels/format/quant.h"
#include "model/stored/formats.h"

static bool has_shape(const struct st_tensor *t, int64_t rows, int64_t cols)
{
    return t->ndim == 2 && t->shape[0] == rows && t->shape[1] == cols;
}

static int damaged_scale(const struct st_tensor *t, float value, struct err *err)
{
    return err_set(err, "tensor %s has the value %g, which is not a scale: the checkpoint is damaged",
                   safetensors_stored(t), (double)value);
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

/* dst [n_out, n_in] = src [n_in, n_out] transposed, elements of `size` 1, 2 or 4 bytes; a tile fits the L1 cache. */
static void transpose(char *dst, const uint8_t *src, int64_t n_out, int64_t n_in, int64_t size)
{
    const int64_t tile = 32;
    for (int64_t o0 = 0; o0 < n_out; o0 += tile)
        for (int64_t i0 = 0; i0 < n_in; i0 += tile)
            for (int64_t o = o0; o < MT_MIN(o0 + tile, n_out); o++)
                for (int64_t i = i0; i < MT_MIN(i0 + tile, n_in); i++) {
                    char *to = dst + (o * n_in + i) * size;
                    const uint8_t *from = src + (i * n_out + o) * size;
                    if (size == 1)
                        *to = (char)*from;
                    else if (size == 2)
                        memcpy(to, from, 2);
                    else
                        memcpy(to, from, 4);
                }
}

static float scalar(const struct st_tensor *t)
{
    float x;
    source_f32(t, 1, &x);
    return x;
}

static bool is_e8m0(const struct st_tensor *t) { return !strcmp(t->st_dtype, "F8_E8M0"); }

/* Scales: floats, or exponents, of which 255 is NaN. */
static void scales_f32(const struct st_tensor *t, int64_t n, float *out)
{
    if (!is_e8m0(t))
        source_f32(t, n, out);
    else
        for (int64_t i = 0; i < n; i++) out[i] = t->data[i] == 255 ? NAN : ldexpf(1, t->data[i] - 127);
}

static bool is_fp8(const struct source *s) { return s->scale_rows > 0; }

static int64_t fp8_row_scales(const struct source *s) { return (s->n_in + s->scale_cols - 1) / s->scale_cols; }

/* The scales as stored, one per scale_rows rows, up to those of the last row; mem_free them. NULL: an error, one is no
 * scale. */
static float *fp8_scales(const struct source *s, struct err *err)
{
    const int64_t n = (s->first_row + s->n_out + s->scale_rows - 1) / s->scale_rows * fp8_row_scales(s);
    float *scale = mem_array(n, sizeof(*scale));
    scales_f32(s->scale, n, scale);
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(scale[i]) && scale[i] >= 0) continue;
        damaged_scale(s->scale, scale[i], err);
        mem_free(scale);
        return NULL;
    }
    return scale;
}

int source_fp8_scales(const struct source *s, float *out, struct err *err)
{
    const int64_t n = fp8_row_scales(s);
    float *scale = fp8_scales(s, err);
    if (!scale) return -1;
    for (int64_t i = 0; i < s->n_out * n; i++) out[i] = scale[(s->first_row + i / n) / s->scale_rows * n + i % n];
    mem_free(scale);
    return 0;
}

static int decode_fp8(const struct source *s, char *out, int n_threads, struct err *err)
{
    float *scale = mem_array(s->n_out * fp8_row_scales(s), sizeof(*scale)); /* of every row */
    const int rc = source_fp8_scales(s, scale, err);
    if (!rc) quant_fp8_decode(out, s->data->data, scale, s->n_out, s->n_in, 1, s->scale_cols, n_threads);
    mem_free(scale);
    return rc;
}

static int decode_int4(const struct source *s, char *out, int n_threads, struct err *err)
{
    const int64_t n = s->n_out * s->n_in / s->group;
    float *scale = mem_array(n, sizeof(*scale));
    int rc = 0;
    source_f32(s->scale, n, scale);
    for (int64_t i = 0; i < n && !rc; i++)
        if (!isfinite(scale[i])) rc = damaged_scale(s->scale, scale[i], err);
    if (!rc) quant_int4_decode(out, s->data->data, scale, n, s->group, n_threads);
    mem_free(scale);
    return rc;
}

const char *source_decoded(const struct source *s) { return is_fp8(s) ? "fp8" : s->group ? "int4" : NULL; }

int64_t source_bytes(const struct source *s) { return source_decoded(s) ? 2 * s->n_out * s->n_in : s->data->bytes; }

int source_scales(const struct source *s, uint8_t *scale, float *scale2, struct err *err)
{
    const float g = scalar(s->scale2);
    *scale2 = g;
    if (!isfinite(g) || g < 0 || (s->scale2_divides && !(g > 0))) return damaged_scale(s->scale2, g, err);
    bool bad = false;
    for (int64_t i = 0; i < s->scale->bytes; i++) bad |= s->scale->data[i] == 0x7f || s->scale->data[i] > 0x80;
    if (bad)
        return err_set(err, "tensor %s has a scale that is NaN or negative: the checkpoint is damaged",
                       safetensors_stored(s->scale));
    if (s->transposed)
        transpose((char *)scale, s->scale->data, s->n_out, s->n_in / 16, 1);
    else
        memcpy(scale, s->scale->data, (size_t)s->scale->bytes);
    return 0;
}

int source_copy(const struct source *s, char *out, int n_threads, struct err *err)
{
    const bool nibbles = s->format == WF_NVFP4;
    if (is_fp8(s)) return decode_fp8(s, out, n_threads, err);
    if (s->group) return decode_int4(s, out, n_threads, err);
    if (s->transposed)
        transpose(out, s->data->data, s->n_out, nibbles ? s->n_in / 2 : s->n_in,
                  nibbles ? 1 : dtype_size(s->data->dtype));
    else
        memcpy(out, s->data->data, (size_t)s->data->bytes);
    return 0;
}

static struct st_tensor rows_of(const struct st_tensor *t, int64_t n_out, int64_t first, int64_t n)
{
    struct st_tensor part = *t;
    part.bytes = t->bytes / n_out * n;
    part.data += t->bytes / n_out * first;
    part.offset += t->bytes / n_out * first;
    return part;
}

struct source *source_runs(const struct source *s, const struct row_order *o, int64_t *n)
{
    int n_part = 0;
    while (n_part < ROW_PARTS && o->part[n_part]) n_part++;
    *n = n_part * o->n_group;
    struct source *runs = mem_array(*n, sizeof(*runs) + 2 * sizeof(struct st_tensor));
    struct st_tensor *tensors = (struct st_tensor *)(void *)(runs + *n);
    int64_t row = 0;
    for (int64_t i = 0; i < *n; row += runs[i++].n_out) {
        const int64_t rows = o->part[i / o->n_group], first = arch_stored_row(o, row);
        runs[i] = *s;
        runs[i].n_out = rows;
        runs[i].first_row = first;
        tensors[2 * i] = rows_of(s->data, s->n_out, first, rows);
        runs[i].data = &tensors[2 * i];
        if (s->format != WF_NVFP4 && s->format != WF_MXFP4 && !s->group) continue;
        tensors[2 * i + 1] = rows_of(s->scale, s->n_out, first, rows);
        runs[i].scale = &tensors[2 * i + 1];
    }
    return runs;
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
    const int64_t n = source_blocks(s), first = s->first_row * s->n_in / s->block;
    struct st_tensor part = *s->absmax;
    part.data += first * dtype_size(part.dtype);
    if (!s->nested_absmax) {
        source_f32(&part, n, out);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float map, scale;
        memcpy(&map, s->nested_map->data + 4 * part.data[i], 4);
        memcpy(&scale, s->nested_absmax->data + 4 * ((first + i) / 256), 4);
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
    const struct st_tensor *t = checkpoint_find(ck, full, err);
    if (!t) return NULL;
    if (t->dtype == dtype && t->bytes == n * dtype_size(dtype)) return t;
    const bool absmax = !strcmp(suffix, ".absmax") && t->dtype != dtype;
    checkpoint_shape_error(t, absmax ? "F32 or U8" : dtype_name(dtype), 1, &n, err);
    return NULL;
}

/* A matrix in bitsandbytes' 4-bit format. An absmax of dtype U8 means nested (double quantised) scales. */
static int find_4bit(struct source *s, struct checkpoint *ck, const char *name, const char *state_name,
                     const char *type, struct err *err)
{
    char absmax[512];
    const struct st_tensor *state = checkpoint_find(ck, state_name, err);
    if (!state || !(s->data = checkpoint_find_data(ck, name, err)) ||
        str_format(absmax, sizeof(absmax), err, "tensor name", "%s.absmax", name) ||
        !(s->absmax = checkpoint_find(ck, absmax, err)))
        return -1;
    const bool nested = s->absmax->dtype == DT_U8;
    if (state->dtype != DT_U8) return checkpoint_shape_error(state, "U8", 1, &state->bytes, err);
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

/* ---- NVFP4 and FP8 ---- */

static bool is_e4m3(const struct st_tensor *t) { return !strcmp(t->st_dtype, "F8_E4M3"); }

static bool has_beside(const struct checkpoint *ck, char full[512], const char *name, const char *suffix)
{
    return !str_format(full, 512, NULL, "tensor name", "%s%s", name, suffix) && checkpoint_has(ck, full);
}

/* name + suffix, or NULL when the checkpoint does not have it. */
static const struct st_tensor *find_beside(struct checkpoint *ck, const char *name, const char *suffix)
{
    char full[512];
    return has_beside(ck, full, name, suffix) ? checkpoint_find(ck, full, NULL) : NULL;
}

/* A float scale for the whole matrix: [] or [1]. */
static bool is_scalar(const struct st_tensor *t)
{
    return checkpoint_dense_format(t->dtype) && t->bytes == dtype_size(t->dtype);
}

static int unsupported(const struct st_tensor *data, const struct st_tensor *scale, struct err *err)
{
    return err_set(err, "tensor %s is %s with scales in %s (%s), which is no supported quantisation: use %s",
                   safetensors_stored(data), data->st_dtype, safetensors_stored(scale), scale->st_dtype, FORMATS_READ);
}

/* scale2 of compressed-tensors is a divisor. */
static int find_nvfp4(struct source *s, const struct st_tensor *data, const struct st_tensor *scale,
                      const struct st_tensor *scale2, bool divides, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in;
    if (data->dtype != DT_U8 || !is_e4m3(scale)) return unsupported(data, scale, err);
    if (in % 16)
        return err_set(err, "tensor %s: NVFP4 needs an input width that 16 divides, not %lld", safetensors_stored(data),
                       (long long)in);
    if (!has_shape(data, out, in / 2)) return checkpoint_shape_error(data, "U8", 2, (int64_t[]){out, in / 2}, err);
    if (!has_shape(scale, out, in / 16))
        return checkpoint_shape_error(scale, "F8_E4M3", 2, (int64_t[]){out, in / 16}, err);
    if (!is_scalar(scale2)) return checkpoint_shape_error(scale2, "BF16, F16 or F32", 0, NULL, err);
    s->format = WF_NVFP4;
    s->data = data;
    s->scale = scale;
    s->scale2 = scale2;
    s->scale2_divides = divides;
    return 0;
}

/* compressed-tensors' pack-quantized: name_packed I32 [out, in / 8], name_scale [out, groups], name_shape. */
static int find_int4(struct source *s, struct checkpoint *ck, const char *name, const struct st_tensor *data,
                     const struct st_tensor *scale, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in, n_group = scale->ndim == 2 ? scale->shape[1] : 0;
    const struct st_tensor *order = find_beside(ck, name, "_g_idx");
    if (order)
        return err_set(err,
                       "tensor %s: integer codes with reordered groups are not supported; use bf16, FP8 or INT4 "
                       "without them",
                       safetensors_stored(order));
    const int64_t bits = data->ndim == 2 ? data->shape[1] * 32 / in : 0;
    if (bits != 4 && has_shape(data, out, in * bits / 32) && bits > 1 && bits <= 8)
        return err_set(
            err,
            "tensor %s has codes of %lld bits (pack-quantized of compressed-tensors, W%lldA16), of which only "
            "INT4 is supported: use a checkpoint in %s",
            safetensors_stored(data), (long long)bits, (long long)bits, FORMATS_READ);
    if (in % 8 || !has_shape(data, out, in / 8))
        return checkpoint_shape_error(data, "I32 with 8 codes of 4 bits each,", 2, (int64_t[]){out, in / 8}, err);
    if (!checkpoint_dense_format(scale->dtype)) return unsupported(data, scale, err);
    if (n_group < 1 || in % n_group || in / n_group % 2 || !has_shape(scale, out, n_group))
        return checkpoint_format_error(scale, "a scale per group of columns,", 2, (int64_t[]){out, MT_MAX(in / 32, 1)},
                                       err);
    find_beside(ck, name, "_shape"); /* read: the sizes follow from config.json */
    s->format = WF_BF16;
    s->data = data;
    s->scale = scale;
    s->group = in / n_group;
    return 0;
}

/* ModelOpt: name, name_scale, name_scale_2. compressed-tensors: name_packed, name_scale, name_global_scale. */
static int find_packed(struct source *s, struct checkpoint *ck, const char *name, const char *suffix, struct err *err)
{
    const bool divides = *suffix != 0;
    char full[512];
    const struct st_tensor *data = has_beside(ck, full, name, suffix) ? checkpoint_find_data(ck, full, err) : NULL;
    const struct st_tensor *scale = find_beside(ck, name, "_scale");
    const struct st_tensor *scale2 = find_beside(ck, name, divides ? "_global_scale" : "_scale_2");
    if (data->dtype == DT_I32 && scale) return find_int4(s, ck, name, data, scale, err);
    if (!scale || (is_e4m3(scale) && !scale2))
        return err_set(err, "tensor %s is packed, but %s%s is not in the checkpoint", safetensors_stored(data), name,
                       !scale    ? "_scale"
                       : divides ? "_global_scale"
                                 : "_scale_2");
    if (!scale2) return unsupported(data, scale, err);
    return find_nvfp4(s, data, scale, scale2, divides, err);
}

enum { FP8_BLOCK = 128 };

/* FP8 or MXFP4 codes without scales. */
static int no_scales(const struct checkpoint *ck, const struct st_tensor *data, const char *name, struct err *err)
{
    char inverse[512], full[512];
    if (str_format(inverse, sizeof(inverse), err, "tensor name", "%s_scale_inv", name)) return -1;
    const char *scale = checkpoint_name(ck, full, sizeof(full), inverse);
    if (scale == full)
        return err_set(err, "tensor %s is %s, but its scales %s are not in the checkpoint", safetensors_stored(data),
                       data->st_dtype, scale);
    return err_set(err, "tensor %s is FP8, but neither %s_scale nor %s is in the checkpoint", name, name, inverse);
}

/* The shapes of scales, before that of blocks. */
static const char *fp8_scales_wanted(bool e8m0, bool inverse)
{
    if (e8m0) return inverse ? "an exponent per 128 x 128 block," : "an exponent per row, or per 128 x 128 block,";
    return inverse ? "one scale, or one per 128 x 128 block," : "one scale, one per row, or blocks";
}

static int find_fp8(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in;
    const int64_t rows = (out + FP8_BLOCK - 1) / FP8_BLOCK, cols = (in + FP8_BLOCK - 1) / FP8_BLOCK;
    const struct st_tensor *inverse = find_beside(ck, name, "_scale_inv"), *t = inverse;
    if (!t) t = find_beside(ck, name, "_scale");
    s->data = checkpoint_find_data(ck, name, err);
    if (!s->data) return -1;
    if (!has_shape(s->data, out, in)) return checkpoint_shape_error(s->data, "F8_E4M3", 2, (int64_t[]){out, in}, err);
    if (!t) return no_scales(ck, s->data, name, err);
    if (!checkpoint_dense_format(t->dtype) && !is_e8m0(t)) return unsupported(s->data, t, err);
    s->format = WF_BF16;
    s->scale = t;
    const bool per_row = t->ndim == 1 ? t->shape[0] == out : has_shape(t, out, 1);
    const bool blocks = has_shape(t, rows, cols) || (t->ndim == 4 && t->shape[0] == rows && t->shape[1] == 1 &&
                                                     t->shape[2] == cols && t->shape[3] == 1);
    if (blocks)
        s->scale_rows = s->scale_cols = FP8_BLOCK;
    else if (is_scalar(t))
        s->scale_rows = out, s->scale_cols = in;
    else if (!inverse && per_row)
        s->scale_rows = 1, s->scale_cols = in;
    else
        return checkpoint_format_error(t, fp8_scales_wanted(is_e8m0(t), inverse), 2, (int64_t[]){rows, cols}, err);
    return 0;
}

/* MXFP4 of one matrix, as DeepSeek-V4 has its experts: nibbles [out, in / 2], the lower one first, and name_scale_inv,
 * exponents [out, in / 32]. */
static int find_mxfp4(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in;
    s->data = checkpoint_find_data(ck, name, err);
    s->scale = find_beside(ck, name, "_scale_inv");
    if (in % 32)
        return err_set(err, "tensor %s: MXFP4 needs an input width that 32 divides, not %lld",
                       safetensors_stored(s->data), (long long)in);
    if (!has_shape(s->data, out, in / 2))
        return checkpoint_shape_error(s->data, "I8 or U8", 2, (int64_t[]){out, in / 2}, err);
    if (!has_shape(s->scale, out, in / 32))
        return checkpoint_shape_error(s->scale, "F8_E8M0 or U8", 2, (int64_t[]){out, in / 32}, err);
    if (!is_e8m0(s->scale) && s->scale->dtype != DT_U8) return unsupported(s->data, s->scale, err);
    s->format = WF_MXFP4;
    return 0;
}

/* AWQ and SVDQuant scale or correct the product outside the matrix. */
static int refuse_products(const struct checkpoint *ck, const char *name, struct err *err)
{
    static const char *const parts[] = {".pre_quant_scale", ".svdquant_lora_a", ".weight_zero_point"};
    const size_t n = strlen(name), tail = strlen(".weight");
    char full[512];
    if (n < tail || strcmp(name + n - tail, ".weight")) return 0;
    for (int i = 0; i < MT_LEN(parts); i++) {
        if (str_format(full, sizeof(full), err, "tensor name", "%.*s%s", (int)(n - tail), name, parts[i])) return -1;
        if (checkpoint_has(ck, full))
            return err_set(err, "tensor %s: this quantisation is not supported; use a checkpoint without it", full);
    }
    return 0;
}

static bool has_shape_3d(const struct st_tensor *t, const int64_t shape[3])
{
    return t->ndim == 3 && !memcmp(t->shape, shape, 3 * sizeof(*shape));
}

/* transformers' FP8 of all experts: [E, out, in] and name_scale_inv, one value, one per expert, or blocks per expert.
 */
static int find_fp8_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in, shape[] = {n_exp, out, in};
    const int64_t blocks[] = {n_exp, (out + FP8_BLOCK - 1) / FP8_BLOCK, (in + FP8_BLOCK - 1) / FP8_BLOCK};
    const struct st_tensor *t = find_beside(ck, name, "_scale_inv");
    s->data = checkpoint_find_data(ck, name, err);
    if (!s->data) return -1;
    if (!t) return err_set(err, "tensor %s is FP8, but %s_scale_inv is not in the checkpoint", name, name);
    if (s->transposed || !checkpoint_dense_format(t->dtype)) return unsupported(s->data, t, err);
    if (!has_shape_3d(s->data, shape)) return checkpoint_shape_error(s->data, "F8_E4M3", 3, shape, err);
    const bool each = t->bytes == n_exp * dtype_size(t->dtype) && t->ndim > 0 && t->shape[0] == n_exp;
    if (!has_shape_3d(t, blocks) && !each && !is_scalar(t))
        return checkpoint_format_error(t, "one scale, one per expert, or blocks", 3, blocks, err);
    s->scale = t;
    s->scale_rows = each || is_scalar(t) ? out : FP8_BLOCK;
    s->scale_cols = each || is_scalar(t) ? in : FP8_BLOCK;
    s->format = WF_BF16;
    return 0;
}

int source_find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    const struct st_tensor *codes = safetensors_find(ck->st, name);
    if (codes && is_e4m3(codes)) return find_fp8_stack(s, ck, name, n_exp, err);
    const int64_t out = s->n_out, in = s->n_in;
    const int64_t half[] = {n_exp, s->transposed ? in / 2 : out, s->transposed ? out : in / 2};
    const int64_t blocks[] = {n_exp, s->transposed ? in / 16 : out, s->transposed ? out : in / 16};
    char full[3][512];
    for (int i = 0; i < 3; i++)
        if (str_format(full[i], sizeof(full[i]), err, "tensor name", "%s%s", name,
                       i == 0   ? ""
                       : i == 1 ? "_weight_scale"
                                : "_weight_scale_2"))
            return -1;
    if (!(s->data = checkpoint_find_data(ck, full[0], err)) || !(s->scale = checkpoint_find(ck, full[1], err)))
        return -1;
    if (s->data->dtype != DT_U8 || !is_e4m3(s->scale)) return unsupported(s->data, s->scale, err);
    if (!(s->scale2 = checkpoint_find(ck, full[2], err))) return -1;
    if (in % 16)
        return err_set(err, "tensor %s: NVFP4 needs an input width that 16 divides, not %lld", name, (long long)in);
    if (!has_shape_3d(s->data, half)) return checkpoint_shape_error(s->data, "U8", 3, half, err);
    if (!has_shape_3d(s->scale, blocks)) return checkpoint_shape_error(s->scale, "F8_E4M3", 3, blocks, err);
    if (!is_scalar(s->scale2) && (s->scale2->dtype != DT_F32 || s->scale2->bytes != n_exp * (int64_t)sizeof(float)))
        return checkpoint_shape_error(s->scale2, "F32, or one value for all in BF16, F16 or F32,", 1, &n_exp, err);
    s->format = WF_NVFP4;
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
    if (refuse_products(ck, name, err)) return -1;
    const struct st_tensor *t = safetensors_find(ck->st, name);
    if (has_beside(ck, absmax, name, "_packed")) return find_packed(s, ck, name, "_packed", err);
    if (t && (t->dtype == DT_U8 || !strcmp(t->st_dtype, "I8")) && find_beside(ck, name, "_scale_inv"))
        return find_mxfp4(s, ck, name, err);
    if (t && t->stored && !strcmp(t->st_dtype, "I8")) return no_scales(ck, t, name, err);
    if (t && t->dtype == DT_U8 && find_beside(ck, name, "_scale")) return find_packed(s, ck, name, "", err);
    if (t && is_e4m3(t)) return find_fp8(s, ck, name, err);
    if (checkpoint_check_matrix(ck, name, 2, (int64_t[]){n_out, n_in}, err)) return -1;
    s->data = checkpoint_take(ck, name, false, 2, (int64_t[]){n_out, n_in}, err);
    if (!s->data) return -1;
    s->format = checkpoint_dense_format(s->data->dtype);
    return 0;
}

bool source_is_activation_scale(const char *name)
{
    static const char *const suffixes[] = {"activation_scale", "input_scale", "input_scale_ub", "input_global_scale",
                                           ".output_scale",    ".k_scale",    ".v_scale",       ".q_scale"};
    for (int i = 0; i < MT_LEN(suffixes); i++)
        if (str_ends(name, suffixes[i])) return true;
    return false;
}
