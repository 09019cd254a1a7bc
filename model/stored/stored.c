/* stored.c - the table of layouts, and what their files share. */
#include "model/stored/stored.h"

#include <string.h>

#include "model/stored/formats.h"

bool stored_is(const struct st_tensor *t, const char *st_dtype) { return t && !strcmp(t->st_dtype, st_dtype); }

bool stored_has_shape(const struct st_tensor *t, int ndim, const int64_t *shape)
{
    return t->ndim == ndim && !memcmp(t->shape, shape, (size_t)ndim * sizeof(*shape));
}

bool stored_is_scalar(const struct st_tensor *t)
{
    return checkpoint_dense_format(t->dtype) && t->bytes == dtype_size(t->dtype);
}

/* full = name + suffix; whether the checkpoint has it. */
static bool has(char full[512], const struct checkpoint *ck, const char *name, const char *suffix)
{
    return !str_format(full, 512, NULL, "tensor name", "%s%s", name, suffix) && checkpoint_has(ck, full);
}

bool stored_has(const struct checkpoint *ck, const char *name, const char *suffix)
{
    char full[512];
    return has(full, ck, name, suffix);
}

const struct st_tensor *stored_find(struct checkpoint *ck, const char *name, const char *suffix)
{
    char full[512];
    return has(full, ck, name, suffix) ? checkpoint_find(ck, full, NULL) : NULL;
}

const struct st_tensor *stored_need(struct checkpoint *ck, const char *name, const char *suffix, struct err *err)
{
    char full[512];
    if (str_format(full, sizeof(full), err, "tensor name", "%s%s", name, suffix)) return NULL;
    return checkpoint_find(ck, full, err);
}

int stored_unsupported(const struct st_tensor *data, const struct st_tensor *scale, struct err *err)
{
    return err_set(err, "tensor %s is %s with scales in %s (%s), which is no supported quantisation: use %s",
                   safetensors_stored(data), data->st_dtype, safetensors_stored(scale), scale->st_dtype, FORMATS_READ);
}

int stored_no_scales(const struct checkpoint *ck, const struct st_tensor *data, const char *name, struct err *err)
{
    char inverse[512], full[512];
    if (str_format(inverse, sizeof(inverse), err, "tensor name", "%s_scale_inv", name)) return -1;
    const char *scale = checkpoint_name(ck, full, sizeof(full), inverse);
    if (scale == full)
        return err_set(err, "tensor %s is %s, but its scales %s are not in the checkpoint", safetensors_stored(data),
                       data->st_dtype, scale);
    return err_set(err, "tensor %s is FP8, but neither %s_scale nor %s is in the checkpoint", name, name, inverse);
}

int stored_damaged(const struct st_tensor *scale, float value, struct err *err)
{
    return err_set(err, "tensor %s has the value %g, which is not a scale: the checkpoint is damaged",
                   safetensors_stored(scale), (double)value);
}

/* ---- the table ---- */

/* An error if one of these tensors is beside the matrix, since its products would also need that tensor. */
static int refuse(struct source *s, struct checkpoint *ck, const char *name, struct err *err)
{
    static const char *const parts[] = {".pre_quant_scale", ".svdquant_lora_a", ".weight_zero_point"};
    const size_t n = strlen(name), tail = strlen(".weight");
    char full[512];
    (void)s;
    if (n < tail || strcmp(name + n - tail, ".weight")) return 0;
    for (int i = 0; i < MT_LEN(parts); i++) {
        if (str_format(full, sizeof(full), err, "tensor name", "%.*s%s", (int)(n - tail), name, parts[i])) return -1;
        if (checkpoint_has(ck, full))
            return err_set(err, "tensor %s: this quantisation is not supported; use a checkpoint without it", full);
    }
    return 0;
}
const struct stored stored_corrected = {.find = refuse};

#define ROW(id) &stored_##id,
const struct stored *const stored_rows[] = {STORED(ROW) NULL};
#undef ROW
#define ROW(id) &stored_as_##id,
const struct stored_layout *const stored_layouts[] = {LAYOUTS(ROW) NULL};

struct st_entry stored_entry(const struct stored_tensor *t, int ndim, const int64_t *shape)
{
    struct st_entry e = {.st_dtype = t->st_dtype, .ndim = t->rows ? ndim : ndim - 2};
    memcpy(e.shape, shape, (size_t)e.ndim * sizeof(*shape));
    if (t->rows) {
        e.shape[ndim - 2] = (shape[ndim - 2] + t->rows - 1) / t->rows;
        e.shape[ndim - 1] = (shape[ndim - 1] + t->cols - 1) / t->cols;
    }
    if (!t->rows && !e.ndim && t->cols) e.shape[e.ndim++] = 1;
    if (t->last) e.shape[e.ndim++] = t->last;
    return e;
}
