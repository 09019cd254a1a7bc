/* checkpoint.c - finds tensors of a checkpoint; counts and hashes what is found. */
#include "model/stored/checkpoint.h"

#include <stdio.h>
#include <string.h>

#include "kernels/format/minifloat.h"
#include "model/stored/formats.h"
#include "model/stored/published.h"

static const char *shape_text(char to[128], int ndim, const int64_t *shape)
{
    *to = 0;
    for (int i = 0; i < ndim; i++)
        snprintf(to + strlen(to), 128 - strlen(to), "%s%lld", i ? ", " : "", (long long)shape[i]);
    return to;
}

static int unexpected(const struct st_tensor *t, const char *what, int ndim, const int64_t *shape, const char *advice,
                      struct err *err)
{
    char want[128], have[128];
    return err_set(err, "tensor %s is %s [%s], expected %s [%s]: %s", safetensors_stored(t), t->st_dtype,
                   shape_text(have, t->ndim, t->shape), what, shape_text(want, ndim, shape), advice);
}

int checkpoint_shape_error(const struct st_tensor *t, const char *what, int ndim, const int64_t *shape, struct err *err)
{
    return unexpected(t, what, ndim, shape, "the checkpoint does not fit its config.json", err);
}

int checkpoint_format_error(const struct st_tensor *t, const char *what, int ndim, const int64_t *shape,
                            struct err *err)
{
    return unexpected(t, what, ndim, shape, "this quantisation is not supported, use a checkpoint in " FORMATS_READ,
                      err);
}

bool checkpoint_has(const struct checkpoint *ck, const char *name)
{
    if (safetensors_find(ck->st, name)) return true;
    const int64_t missing = ck->asked ? safetensors_missing(ck->st, name) : -1;
    if (missing >= 0) ck->asked[missing] = true;
    return false;
}

int checkpoint_check_missing(const struct checkpoint *ck, struct err *err)
{
    for (int64_t i = 0; i < ck->st->n_missing; i++)
        if (ck->asked[i]) return safetensors_missing_error(ck->st, i, err);
    return 0;
}

const char *checkpoint_name(const struct checkpoint *ck, char *to, size_t size, const char *name)
{
    const struct st_tensor *t = safetensors_find(ck->st, name);
    bool renamed = false;
    if (t) return safetensors_stored(t);
    for (int64_t i = 0; i < ck->st->n_tensors && !renamed; i++) renamed = ck->st->tensors[i].stored != NULL;
    return renamed && published_name(to, size, name) ? to : name;
}

void checkpoint_open(struct checkpoint *ck, const struct safetensors *st, struct base_hash *hash, int n_threads)
{
    *ck = (struct checkpoint){.st = st, .hash = hash, .n_threads = n_threads};
    ck->used = mem_array(st->n_tensors, sizeof(*ck->used));
    if (hash) ck->later = mem_array(st->n_tensors, sizeof(*ck->later));
}

void checkpoint_close(struct checkpoint *ck)
{
    mem_free(ck->used);
    mem_free(ck->asked);
    mem_free(ck->later);
    *ck = (struct checkpoint){.st = NULL};
}

/* The whole tensor, if its bytes are hashed where they are read. */
static const struct st_tensor *find_later(const struct checkpoint *ck, const struct st_tensor *t)
{
    const struct st_tensor *whole = ck->hash ? safetensors_find(ck->st, t->name) : NULL;
    return whole && ck->later[whole - ck->st->tensors] ? whole : NULL;
}

hash_sum checkpoint_hash(struct checkpoint *ck, const struct st_tensor *t, int64_t at, int64_t n)
{
    const struct st_tensor *whole = find_later(ck, t);
    if (!whole) return 0;
    const hash_sum sum = hash_sum_of(t->data - whole->data + at, t->data + at, n, ck->n_threads);
    base_hash_bytes(ck->hash, whole, sum, ck->reader == READ_HERE);
    return sum;
}

void checkpoint_hash_known(struct checkpoint *ck, const struct st_tensor *t, hash_sum sum)
{
    const struct st_tensor *whole = find_later(ck, t);
    if (whole) base_hash_bytes(ck->hash, whole, sum, ck->reader == READ_HERE);
}

/* The caller hashes the bytes where it reads them, because a rank of the group reads only some of them. */
const struct st_tensor *checkpoint_find_data(struct checkpoint *ck, const char *name, struct err *err)
{
    char full[512], other[512];
    const struct st_tensor *t = safetensors_find(ck->st, name);
    if (t) {
        bool *used = &ck->used[t - ck->st->tensors];
        if (ck->hashed && !*used) ck->fingerprint += rng_bytes(base_tensor_key(t), t->data, MT_MIN(t->bytes, 1 << 16));
        if (ck->hash && !*used && ck->reader != READ_ELSEWHERE) {
            base_hash_tensor(ck->hash, t, ck->reader == READ_HERE);
            ck->later[t - ck->st->tensors] = true;
        }
        *used = true;
        return t;
    }
    const char *near = checkpoint_has(ck, name) ? NULL : safetensors_nearest(ck->st, name);
    err_set(err, "tensor %s is not in the checkpoint%s%s", checkpoint_name(ck, full, sizeof(full), name),
            near ? "; the nearest name there is " : "", near ? checkpoint_name(ck, other, sizeof(other), near) : "");
    return NULL;
}

const struct st_tensor *checkpoint_find(struct checkpoint *ck, const char *name, struct err *err)
{
    const struct st_tensor *t = checkpoint_find_data(ck, name, err);
    if (t) checkpoint_hash(ck, t, 0, t->bytes);
    if (t && ck->hash) ck->later[t - ck->st->tensors] = false;
    return t;
}

const struct st_tensor *checkpoint_take_ids(struct checkpoint *ck, const char *name, int64_t n_row, int64_t n_col,
                                            struct err *err)
{
    const struct st_tensor *t = checkpoint_find(ck, name, err);
    if (!t) return NULL;
    if ((t->dtype == DT_I64 || t->dtype == DT_I32) && t->ndim == 2 && t->shape[0] == n_row && t->shape[1] == n_col)
        return t;
    checkpoint_shape_error(t, "I64 or I32", 2, (int64_t[]){n_row, n_col}, err);
    return NULL;
}

int checkpoint_check_matrix(const struct checkpoint *ck, const char *name, int ndim, const int64_t *shape,
                            struct err *err)
{
    const struct st_tensor *t = safetensors_find(ck->st, name);
    if (!t || checkpoint_dense_format(t->dtype)) return 0;
    return checkpoint_format_error(t,
                                   ndim == 2
                                       ? "BF16, F16, F32, F8_E4M3 with scales, or 4-bit codes with scales in U8 or I8,"
                                       : "BF16, F16, F32, F8_E4M3 with scales, or 4-bit codes with scales in U8,",
                                   ndim, shape, err);
}

const struct st_tensor *checkpoint_take(struct checkpoint *ck, const char *name, bool is_u8, int ndim,
                                        const int64_t *shape, struct err *err)
{
    const struct st_tensor *t = checkpoint_find_data(ck, name, err);
    if (!t) return NULL;
    bool fits = is_u8 ? t->dtype == DT_U8 : checkpoint_dense_format(t->dtype);
    fits = fits && t->ndim == ndim;
    for (int i = 0; fits && i < ndim; i++) fits = t->shape[i] == shape[i];
    if (fits) return t;
    checkpoint_shape_error(t, is_u8 ? "U8" : "BF16, F16 or F32", ndim, shape, err);
    return NULL;
}

enum weight_format checkpoint_dense_format(enum dtype t)
{
    return t == DT_BF16 ? WF_BF16 : t == DT_F16 ? WF_F16 : t == DT_F32 ? WF_F32 : WF_NONE;
}

void checkpoint_f32(const struct st_tensor *t, int64_t n, float *out)
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
