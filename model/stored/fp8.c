/* fp8.c - FP8. Tensors of a matrix: name F8_E4M3 [out, in], and name_scale or name_scale_inv, floats or exponents
 * (F8_E8M0):
 *   name_scale        one, one per row, or one per 128 x 128 block
 *   name_scale_inv    one, or blocks; of all experts, name [E, out, in]: one, one per expert, or blocks
 * Products read the codes with a scale per row and block of columns. Where several sources need one format, or other
 * code reads them, they are decoded to bf16. */
#include <math.h>
#include <string.h>

#include "kernels/format/quant.h"
#include "kernels/format/minifloat.h"
#include "model/stored/finite.h"
#include "model/stored/stored.h"

enum { BLOCK = 128 };

const struct stored_layout stored_as_fp8 = {WF_FP8, .data = {"", STORED_E4M3, 1, 1}, .scale = {"_scale", "F32", 0, 1}};
const struct stored_layout stored_as_fp8_blocks = {WF_FP8, .data = {"", STORED_E4M3, 1, 1},
                                                   .scale = {"_scale_inv", STORED_E8M0, BLOCK, BLOCK}};

static int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

/* The shapes of scales, before that of blocks. */
static const char *scales_wanted(bool e8m0, bool inverse)
{
    if (e8m0) return inverse ? "an exponent per 128 x 128 block," : "an exponent per row, or per 128 x 128 block,";
    return inverse ? "one scale, or one per 128 x 128 block," : "one scale, one per row, or blocks";
}

static int find_matrix(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in, shape[] = {out, in};
    const int64_t blocks[] = {blocks_of(out), blocks_of(in)}, blocks_4d[] = {blocks[0], 1, blocks[1], 1};
    const struct st_tensor *inverse = stored_find(ck, name, stored_as_fp8_blocks.scale.suffix), *t = inverse;
    if (!t) t = stored_find(ck, name, stored_as_fp8.scale.suffix);
    s->data = checkpoint_find_data(ck, name, err);
    if (!s->data) return -1;
    if (!stored_has_shape(s->data, 2, shape)) return checkpoint_shape_error(s->data, STORED_E4M3, 2, shape, err);
    if (!t) return stored_no_scales(ck, s->data, name, err);
    const bool e8m0 = stored_is(t, STORED_E8M0);
    if (!checkpoint_dense_format(t->dtype) && !e8m0) return stored_unsupported(s->data, t, err);
    s->format = WF_BF16;
    s->scale = t;
    if (stored_has_shape(t, 2, blocks) || stored_has_shape(t, 4, blocks_4d))
        s->scale_rows = s->scale_cols = BLOCK;
    else if (stored_is_scalar(t))
        s->scale_rows = out, s->scale_cols = in;
    else if (!inverse && (stored_has_shape(t, 1, shape) || stored_has_shape(t, 2, (int64_t[]){out, 1})))
        s->scale_rows = 1, s->scale_cols = in;
    else
        return checkpoint_format_error(t, scales_wanted(e8m0, inverse), 2, blocks, err);
    return 1;
}

static int find(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    return stored_is(safetensors_find(ck->st, name), STORED_E4M3) ? find_matrix(s, ck, name, err) : 0;
}

static int find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err)
{
    const int64_t out = s->n_out, in = s->n_in, shape[] = {n_exp, out, in};
    const int64_t blocks[] = {n_exp, blocks_of(out), blocks_of(in)};
    if (!stored_is(safetensors_find(ck->st, name), STORED_E4M3)) return 0;
    const struct st_tensor *t = stored_find(ck, name, stored_as_fp8_blocks.scale.suffix);
    s->data = checkpoint_find_data(ck, name, err);
    if (!s->data) return -1;
    if (!t)
        return err_set(err, "tensor %s is FP8, but %s%s is not in the checkpoint", name, name,
                       stored_as_fp8_blocks.scale.suffix);
    if (s->transposed || !checkpoint_dense_format(t->dtype)) return stored_unsupported(s->data, t, err);
    if (!stored_has_shape(s->data, 3, shape)) return checkpoint_shape_error(s->data, STORED_E4M3, 3, shape, err);
    const bool each = t->bytes == n_exp * dtype_size(t->dtype) && t->ndim > 0 && t->shape[0] == n_exp;
    if (!stored_has_shape(t, 3, blocks) && !each && !stored_is_scalar(t))
        return checkpoint_format_error(t, "one scale, one per expert, or blocks", 3, blocks, err);
    s->scale = t;
    s->scale_rows = each || stored_is_scalar(t) ? out : BLOCK;
    s->scale_cols = each || stored_is_scalar(t) ? in : BLOCK;
    s->format = WF_BF16;
    return 1;
}

static int64_t row_scales(const struct source *s) { return (s->n_in + s->scale_cols - 1) / s->scale_cols; }

/* The n scales as stored, up to those of the last row of s; mem_free them. */
static float *scales_as_stored(const struct source *s, int64_t *n)
{
    *n = (s->first_row + s->n_out + s->scale_rows - 1) / s->scale_rows * row_scales(s);
    float *scale = mem_array(*n, sizeof(*scale));
    if (stored_is(s->scale, STORED_E8M0))
        for (int64_t i = 0; i < *n; i++) scale[i] = e8m0_scale(s->scale->data[i]);
    else
        checkpoint_f32(s->scale, *n, scale);
    return scale;
}

static int check(const struct source *s, struct err *err)
{
    int64_t n;
    int rc = 0;
    float *scale = scales_as_stored(s, &n);
    for (int64_t i = 0; i < n && !rc; i++)
        if (!isfinite(scale[i]) || scale[i] < 0) rc = stored_damaged(s->scale, scale[i], err);
    mem_free(scale);
    return rc;
}

/* Writes the scales of every row, [out, ceil(in / scale_cols)]; or the values in bf16. */
static void copy(const struct source *s, int plane, char *out, int n_threads)
{
    const int64_t per_row = row_scales(s), n = s->n_out * per_row;
    int64_t n_stored;
    float *scale = mem_array(n, sizeof(*scale)), *from = scales_as_stored(s, &n_stored);
    for (int64_t i = 0; i < n; i++)
        scale[i] = from[(s->first_row + i / per_row) / s->scale_rows * per_row + i % per_row];
    if (plane == PLANE_DATA)
        quant_fp8_decode(out, s->data->data, scale, s->n_out, s->n_in, 1, s->scale_cols, n_threads);
    else
        memcpy(out, scale, (size_t)n * sizeof(*scale));
    mem_free(scale);
    mem_free(from);
}

static float bound(const struct source *s) { return 448 * finite_largest(s->scale); }

const struct stored stored_fp8 = {.name = "fp8",
                                  .codes = WF_FP8,
                                  .find = find,
                                  .find_stack = find_stack,
                                  .check = check,
                                  .copy = copy,
                                  .bound = bound};
