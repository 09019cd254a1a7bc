/* mxfp4.c - MXFP4 as published, the lower nibble first:
 *   DeepSeek-V4  name I8 or U8 [out, in / 2], name_scale_inv F8_E8M0 or U8 [out, in / 32]
 *   gpt-oss      of all experts: name_blocks U8 [E, out, in / 32, 16], name_scales U8 [E, out, in / 32] */
#include "kernels/format/quant.h"
#include "kernels/format/minifloat.h"
#include "model/stored/stored.h"

const struct stored_layout stored_as_mxfp4 = {WF_MXFP4, .data = {"", "I8", 1, 2},
                                              .scale = {"_scale_inv", STORED_E8M0, 1, 32}};
const struct stored_layout stored_as_mxfp4_stack = {WF_MXFP4, .data = {"_blocks", "U8", 1, 32, 16},
                                                    .scale = {"_scales", "U8", 1, 32}};

static int find_matrix(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in;
    const int64_t nibbles[] = {out, in / 2}, blocks[] = {out, in / 32};
    s->data = checkpoint_find_data(ck, name, err);
    s->scale = stored_find(ck, name, stored_as_mxfp4.scale.suffix);
    if (in % 32)
        return err_set(err, "tensor %s: MXFP4 needs an input width that 32 divides, not %lld",
                       safetensors_stored(s->data), (long long)in);
    if (!stored_has_shape(s->data, 2, nibbles)) return checkpoint_shape_error(s->data, "I8 or U8", 2, nibbles, err);
    if (!stored_has_shape(s->scale, 2, blocks))
        return checkpoint_shape_error(s->scale, "F8_E8M0 or U8", 2, blocks, err);
    if (!stored_is(s->scale, STORED_E8M0) && s->scale->dtype != DT_U8)
        return stored_unsupported(s->data, s->scale, err);
    s->format = WF_MXFP4;
    return 1;
}

static int find(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const struct st_tensor *t = safetensors_find(ck->st, name);
    const bool i8 = stored_is(t, stored_as_mxfp4.data.st_dtype);
    if (t && (t->dtype == DT_U8 || i8) && stored_has(ck, name, stored_as_mxfp4.scale.suffix))
        return find_matrix(s, ck, name, err);
    return i8 && t->stored ? stored_no_scales(ck, t, name, err) : 0;
}

static int find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    const struct stored_layout *l = &stored_as_mxfp4_stack;
    const int64_t nibbles[] = {n_exp, s->n_out, s->n_in / 32, 16}; /* the first 3 are the shape of the exponents */
    char blocks[512], scales[512];
    if (!stored_has(ck, name, l->data.suffix) && !stored_has(ck, name, l->scale.suffix)) return 0;
    if (s->n_in % 32)
        return err_set(err, "%s: MXFP4 needs an input width that 32 divides, not %lld", name, (long long)s->n_in);
    if (str_format(blocks, sizeof(blocks), err, "tensor name", "%s%s", name, l->data.suffix) ||
        str_format(scales, sizeof(scales), err, "tensor name", "%s%s", name, l->scale.suffix) ||
        !(s->data = checkpoint_take(ck, blocks, true, 4, nibbles, err)) ||
        !(s->scale = checkpoint_take(ck, scales, true, 3, nibbles, err)))
        return -1;
    s->transposed = false;
    s->format = WF_MXFP4;
    return 1;
}

static float bound(const struct source *s)
{
    uint8_t largest = 0;
    for (int64_t i = 0; i < s->scale->bytes; i++) largest = MT_MAX(largest, s->scale->data[i]);
    return 6 * e8m0_scale(largest);
}

const struct stored stored_mxfp4 = {.find = find, .find_stack = find_stack, .bound = bound};
