/* bnb.c - NF4 and FP4 of bitsandbytes. Tensors of a matrix: name, the nibbles in any dtype and shape; name.absmax (F32,
 * or nested: U8 with name.nested_absmax and name.nested_quant_map); name.quant_map; name.quant_state.bitsandbytes__nf4
 * or __fp4, JSON in U8. */
#include <math.h>
#include <string.h>

#include "data/json/json.h"
#include "model/stored/finite.h"
#include "model/stored/stored.h"

#define TENSORS                                                                                                        \
    .data = {"", "U8"}, .absmax = {".absmax", "F32"}, .code = {".quant_map", "F32"},                                   \
    .nested_absmax = {".nested_absmax", "F32"}, .nested_map = {".nested_quant_map", "F32"}
const struct stored_layout stored_as_nf4 = {WF_NF4, TENSORS, .nested_offset = {".quant_state.bitsandbytes__nf4", "U8"}};
const struct stored_layout stored_as_fp4 = {WF_FP4, TENSORS, .nested_offset = {".quant_state.bitsandbytes__fp4", "U8"}};

static int64_t n_block(const struct source *s) { return (s->n_out * s->n_in + s->block - 1) / s->block; }

/* Reads the JSON that bitsandbytes writes for every 4-bit weight. `type`: the format in the tensor's name. */
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
    s->offset = (float)offset;
    if (strcmp(quant_type, type))
        json_error(root, err, "quant_type is \"%s\", expected \"%s\"", quant_type, type);
    else if (s->block & (s->block - 1))
        json_error(root, err, "blocksize %lld is no power of two", (long long)s->block);
    else if (nested_block != 256 || strcmp(nested_dtype, "float32"))
        json_error(root, err, "nested_blocksize must be 256 and nested_dtype float32");
    else if (!isfinite(s->offset))
        json_error(root, err, "nested_offset %g is no float32", offset);
    else
        rc = 0;
out:
    json_free(doc);
    return rc;
}

/* Derives the block size from the number of absmax values, if only headers were read. */
static void guess_block(struct source *s, const struct st_tensor *absmax)
{
    const int64_t n = s->n_out * s->n_in, n_absmax = absmax->bytes / dtype_size(absmax->dtype);
    for (s->block = 32; s->block < 4096 && (n + s->block - 1) / s->block > n_absmax;) s->block *= 2;
}

/* Finds name + suffix and checks that it has n elements of a dtype, in any shape. */
static const struct st_tensor *aux_tensor(struct checkpoint *ck, const char *name, const char *suffix, enum dtype dtype,
                                          int64_t n, struct err *err)
{
    const struct st_tensor *t = stored_need(ck, name, suffix, err);
    if (!t) return NULL;
    if (t->dtype == dtype && t->bytes == n * dtype_size(dtype)) return t;
    const bool absmax = !strcmp(suffix, stored_as_nf4.absmax.suffix) && t->dtype != dtype;
    checkpoint_shape_error(t, absmax ? "F32 or U8" : dtype_name(dtype), 1, &n, err);
    return NULL;
}

/* Finds the planes of scales and tables; nested: absmax is quantised to U8, in the plane of scales. */
static int find_tables(struct source *s, struct checkpoint *ck, const char *name, bool nested, struct err *err)
{
    const int64_t n = n_block(s);
    const struct stored_layout *l = &stored_as_nf4; /* as FP4 */
    const struct st_tensor **q8_or_absmax = nested ? &s->scale : &s->absmax;
    if (!(*q8_or_absmax = aux_tensor(ck, name, l->absmax.suffix, nested ? DT_U8 : DT_F32, n, err)) ||
        !(s->code = aux_tensor(ck, name, l->code.suffix, DT_F32, 16, err)))
        return -1;
    if (nested && (!(s->nested_absmax = aux_tensor(ck, name, l->nested_absmax.suffix, DT_F32, (n + 255) / 256, err)) ||
                   !(s->nested_map = aux_tensor(ck, name, l->nested_map.suffix, DT_F32, 256, err))))
        return -1;
    return 0;
}

static int find_matrix(struct source *s, struct checkpoint *ck, const char *name, const struct stored_layout *l,
                       struct err *err)
{
    const struct st_tensor *state, *absmax;
    if (!(state = stored_need(ck, name, l->nested_offset.suffix, err)) ||
        !(s->data = checkpoint_find_data(ck, name, err)) || !(absmax = stored_need(ck, name, l->absmax.suffix, err)))
        return -1;
    const bool nested = absmax->dtype == DT_U8;
    if (state->dtype != DT_U8) return checkpoint_shape_error(state, "U8", 1, &state->bytes, err);
    if (ck->st->headers)
        guess_block(s, absmax);
    else if (read_quant_state(s, state, weight_format_name(l->format), nested, err))
        return -1;
    s->format = l->format;
    if (s->n_in % 2)
        return err_set(err, "tensor %s: a row of %lld nibbles does not fill its bytes", name, (long long)s->n_in);
    if (s->data->bytes != s->n_out * s->n_in / 2)
        return err_set(err, "tensor %s has %lld bytes, its quant_state asks for %lld x %lld nibbles", name,
                       (long long)s->data->bytes, (long long)s->n_out, (long long)s->n_in);
    return find_tables(s, ck, name, nested, err) ? -1 : 1;
}

static int find(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const char *nf4_state = stored_as_nf4.nested_offset.suffix, *fp4_state = stored_as_fp4.nested_offset.suffix;
    const bool nf4 = stored_has(ck, name, nf4_state), fp4 = stored_has(ck, name, fp4_state);
    if (nf4 && fp4)
        return err_set(err, "tensors %s%s and %s%s contradict each other", name, nf4_state, name, fp4_state);
    if (nf4 || fp4) return find_matrix(s, ck, name, fp4 ? &stored_as_fp4 : &stored_as_nf4, err);
    if (!stored_has(ck, name, stored_as_nf4.absmax.suffix)) return 0;
    return err_set(err, "tensor %s%s is not in the checkpoint, but %s%s is", name, nf4_state, name,
                   stored_as_nf4.absmax.suffix);
}

/* Writes absmax of all blocks as f32, nested ones decoded; or the offset of nested ones. */
static void copy(const struct source *s, int plane, char *out, int n_threads)
{
    const int64_t n = n_block(s), first = s->first_row * s->n_in / s->block;
    float map, scale, x;
    (void)n_threads;
    if (plane == PLANE_NESTED_OFFSET) {
        memcpy(out, &s->offset, sizeof(x));
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        if (s->nested_absmax) {
            memcpy(&map, s->nested_map->data + 4 * s->scale->data[first + i], 4);
            memcpy(&scale, s->nested_absmax->data + 4 * ((first + i) / 256), 4);
            x = map * scale + s->offset;
        } else {
            memcpy(&x, s->absmax->data + 4 * (first + i), 4);
        }
        memcpy(out + 4 * i, &x, sizeof(x));
    }
}

static float bound(const struct source *s)
{
    const float code = finite_largest(s->code);
    if (!s->nested_absmax) return code * finite_largest(s->absmax);
    return code * (finite_largest(s->nested_map) * finite_largest(s->nested_absmax) + fabsf(s->offset));
}

const struct stored stored_bnb = {.find = find, .copy = copy, .bound = bound};
