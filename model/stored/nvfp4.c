/* nvfp4.c - NVFP4: nibbles, the lower one first, a scale per 16 columns in F8_E4M3, and a global scale:
 *   compressed-tensors  name_packed U8 [out, in / 2], name_scale [out, in / 16], name_global_scale, which divides
 *   ModelOpt            name, name_scale, name_scale_2, which multiplies
 *   of all experts      name [E, out, in / 2], name_weight_scale, name_weight_scale_2 (one value, or one per expert);
 *                       transformers' gpt-oss has the input axis before the output axis */
#include <math.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "model/stored/finite.h"
#include "model/stored/stored.h"

const struct stored_layout stored_as_nvfp4 = {WF_NVFP4, .data = {"", "U8", 1, 2},
                                              .scale = {"_scale", STORED_E4M3, 1, 16}, .scale2 = {"_scale_2", "F32"}};
const struct stored_layout stored_as_nvfp4_stack = {WF_NVFP4, .data = {"", "U8", 2, 1},
                                                    .scale = {"_weight_scale", STORED_E4M3, 16, 1},
                                                    .scale2 = {"_weight_scale_2", "F32"}};
const struct stored_layout stored_as_nvfp4_packed = {WF_NVFP4, .data = {"_packed", "U8", 1, 2},
                                                     .scale = {"_scale", STORED_E4M3, 1, 16},
                                                     .scale2 = {"_global_scale", "F32", 0, 1}};

static int check_width(const struct source *s, const char *name, struct err *err)
{
    return s->n_in % 16 ? err_set(err, "tensor %s: NVFP4 needs an input width that 16 divides, not %lld", name,
                                  (long long)s->n_in)
                        : 0;
}

static int check_matrix(struct source *s, struct err *err)
{
    const int64_t nibbles[] = {s->n_out, s->n_in / 2}, blocks[] = {s->n_out, s->n_in / 16};
    if (s->data->dtype != DT_U8 || !stored_is(s->scale, STORED_E4M3)) return stored_unsupported(s->data, s->scale, err);
    if (check_width(s, safetensors_stored(s->data), err)) return -1;
    if (!stored_has_shape(s->data, 2, nibbles)) return checkpoint_shape_error(s->data, "U8", 2, nibbles, err);
    if (!stored_has_shape(s->scale, 2, blocks)) return checkpoint_shape_error(s->scale, STORED_E4M3, 2, blocks, err);
    if (!stored_is_scalar(s->scale2)) return checkpoint_shape_error(s->scale2, "BF16, F16 or F32", 0, NULL, err);
    s->format = WF_NVFP4;
    return 1;
}

static int find_matrix(struct source *s, struct checkpoint *ck, const char *name, const struct stored_layout *l,
                       struct err *err)
{
    char full[512];
    if (str_format(full, sizeof(full), err, "tensor name", "%s%s", name, l->data.suffix) ||
        !(s->data = checkpoint_find_data(ck, full, err)))
        return -1;
    s->scale = stored_find(ck, name, l->scale.suffix);
    s->scale2 = stored_find(ck, name, l->scale2.suffix);
    if (!s->scale || (stored_is(s->scale, STORED_E4M3) && !s->scale2))
        return err_set(err, "tensor %s is packed, but %s%s is not in the checkpoint", safetensors_stored(s->data), name,
                       s->scale ? l->scale2.suffix : l->scale.suffix);
    return s->scale2 ? check_matrix(s, err) : stored_unsupported(s->data, s->scale, err);
}

static int find_packed(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    if (!stored_has(ck, name, stored_as_nvfp4_packed.data.suffix)) return 0;
    s->scale2_divides = true;
    return find_matrix(s, ck, name, &stored_as_nvfp4_packed, err);
}

static int find(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const struct st_tensor *t = safetensors_find(ck->st, name);
    if (!t || t->dtype != DT_U8 || !stored_has(ck, name, stored_as_nvfp4.scale.suffix)) return 0;
    return find_matrix(s, ck, name, &stored_as_nvfp4, err);
}

static int find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    const struct stored_layout *l = &stored_as_nvfp4_stack;
    const int64_t out = s->n_out, in = s->n_in;
    const int64_t half[] = {n_exp, s->transposed ? in / 2 : out, s->transposed ? out : in / 2};
    const int64_t blocks[] = {n_exp, s->transposed ? in / 16 : out, s->transposed ? out : in / 16};
    if (!stored_has(ck, name, l->scale.suffix)) return 0;
    if (!(s->data = checkpoint_find_data(ck, name, err)) || !(s->scale = stored_need(ck, name, l->scale.suffix, err)))
        return -1;
    if (s->data->dtype != DT_U8 || !stored_is(s->scale, STORED_E4M3)) return stored_unsupported(s->data, s->scale, err);
    if (!(s->scale2 = stored_need(ck, name, l->scale2.suffix, err)) || check_width(s, name, err)) return -1;
    if (!stored_has_shape(s->data, 3, half)) return checkpoint_shape_error(s->data, "U8", 3, half, err);
    if (!stored_has_shape(s->scale, 3, blocks)) return checkpoint_shape_error(s->scale, STORED_E4M3, 3, blocks, err);
    if (!stored_is_scalar(s->scale2) &&
        (s->scale2->dtype != DT_F32 || s->scale2->bytes != n_exp * (int64_t)sizeof(float)))
        return checkpoint_shape_error(s->scale2, "F32, or one value for all in BF16, F16 or F32,", 1, &n_exp, err);
    s->format = WF_NVFP4;
    return 1;
}

static float global_scale(const struct source *s)
{
    float x;
    checkpoint_f32(s->scale2, 1, &x);
    return x;
}

static int check(const struct source *s, struct err *err)
{
    const float g = global_scale(s);
    bool bad = false;
    if (!isfinite(g) || g < 0 || (s->scale2_divides && !(g > 0))) return stored_damaged(s->scale2, g, err);
    for (int64_t i = 0; i < s->scale->bytes; i++) bad |= s->scale->data[i] == 0x7f || s->scale->data[i] > 0x80;
    return bad ? err_set(err, "tensor %s has a scale that is NaN or negative: the checkpoint is damaged",
                         safetensors_stored(s->scale))
               : 0;
}

/* Writes the global scale, for each row. */
static void copy(const struct source *s, int plane, char *out, int n_threads)
{
    const float g = global_scale(s);
    (void)plane;
    (void)n_threads;
    for (int64_t r = 0; r < s->n_out; r++) memcpy(out + r * (int64_t)sizeof(g), &g, sizeof(g));
}

static float bound(const struct source *s)
{
    const float g = global_scale(s), scale = finite_largest(s->scale);
    return 6 * (s->scale2_divides ? scale / g : scale * g);
}

const struct stored stored_nvfp4_packed = {.find = find_packed, .check = check, .copy = copy, .bound = bound};
const struct stored stored_nvfp4 = {
    .find = find, .find_stack = find_stack, .check = check, .copy = copy, .bound = bound};
