/* int4.c - INT4 of compressed-tensors (pack-quantized, symmetric): name_packed I32 [out, in / 8], each with eight
 * codes plus 8, from the lowest bits up; name_scale [out, groups], floats; name_shape. They are decoded to bf16. */
#include "kernels/format/quant.h"
#include "model/stored/finite.h"
#include "model/stored/formats.h"
#include "model/stored/stored.h"

const struct stored_layout stored_as_int4 = {
    .data = {"_packed", "I32", 1, 8}, .scale = {"_scale", "F32", 0, 1}, .shape = "_shape"};

static int find_matrix(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const struct st_tensor *data = s->data, *scale = s->scale;
    const int64_t out = s->n_out, in = s->n_in, n_group = scale->ndim == 2 ? scale->shape[1] : 0;
    const int64_t packed[] = {out, in / 8}, groups[] = {out, n_group};
    const struct st_tensor *order = stored_find(ck, name, "_g_idx");
    if (order)
        return err_set(err,
                       "tensor %s: integer codes with reordered groups are not supported; use bf16, FP8 or INT4 "
                       "without them",
                       safetensors_stored(order));
    const int64_t bits = data->ndim == 2 ? data->shape[1] * 32 / in : 0;
    if (bits != 4 && stored_has_shape(data, 2, (int64_t[]){out, in * bits / 32}) && bits > 1 && bits <= 8)
        return err_set(
            err,
            "tensor %s has codes of %lld bits (pack-quantized of compressed-tensors, W%lldA16), of which only "
            "INT4 is supported: use a checkpoint in %s",
            safetensors_stored(data), (long long)bits, (long long)bits, FORMATS_READ);
    if (in % 8 || !stored_has_shape(data, 2, packed))
        return checkpoint_shape_error(data, "I32 with 8 codes of 4 bits each,", 2, packed, err);
    if (!checkpoint_dense_format(scale->dtype)) return stored_unsupported(data, scale, err);
    if (n_group < 1 || in % n_group || in / n_group % 2 || !stored_has_shape(scale, 2, groups))
        return checkpoint_format_error(scale, "a scale per group of columns,", 2, (int64_t[]){out, MT_MAX(in / 32, 1)},
                                       err);
    stored_find(ck, name, stored_as_int4.shape); /* read: the sizes follow from config.json */
    s->format = WF_BF16;
    s->block = in / n_group;
    return 1;
}

static int find(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    char packed[512];
    if (str_format(packed, sizeof(packed), err, "tensor name", "%s%s", name, stored_as_int4.data.suffix)) return -1;
    const struct st_tensor *codes = safetensors_find(ck->st, packed);
    if (!codes || codes->dtype != DT_I32 || !stored_has(ck, name, stored_as_int4.scale.suffix)) return 0;
    s->data = checkpoint_find_data(ck, packed, err);
    s->scale = stored_find(ck, name, stored_as_int4.scale.suffix);
    return find_matrix(s, ck, name, err);
}

static void copy(const struct source *s, int plane, char *out, int n_threads)
{
    const int64_t n = s->n_out * s->n_in / s->block, first = s->first_row * s->n_in / s->block;
    struct st_tensor part = *s->scale;
    float *scale = mem_array(n, sizeof(*scale));
    (void)plane; /* the only one of bf16 */
    part.data += first * dtype_size(part.dtype);
    checkpoint_f32(&part, n, scale);
    quant_int4_decode(out, s->data->data, scale, n, s->block, n_threads);
    mem_free(scale);
}

static float bound(const struct source *s) { return 8 * finite_largest(s->scale); }

const struct stored stored_int4 = {.name = "int4", .find = find, .copy = copy, .bound = bound};
