/* source.h - one matrix of a checkpoint: dense, or 4 bits with scales in separate tensors. */
#ifndef MT_SOURCE_H
#define MT_SOURCE_H

#include "data/safetensors.h"

/* A checkpoint, and which of its tensors were read. */
struct checkpoint {
    const struct safetensors *st;
    bool *used; /* [st->n_tensors] */
};

struct source {
    enum weight_format format;
    int64_t n_out, n_in, block;
    const struct st_tensor *data;
    const struct st_tensor *absmax, *code;              /* bitsandbytes */
    const struct st_tensor *nested_absmax, *nested_map; /* NULL: absmax is f32 */
    float nested_offset;
    bool transposed; /* dense: stored as [in, out] */
};

/* Finds a tensor and checks its shape [ndim] and dtype: a float dtype, or U8 when is_u8. Else an error. */
const struct st_tensor *checkpoint_take(struct checkpoint *ck, const char *name, bool is_u8, int ndim,
                                        const int64_t *shape, struct err *err) MT_CHECK;
bool checkpoint_has(const struct checkpoint *ck, const char *name);

/* The matrix `name` ([out, in], e.g. "model.layers.0.self_attn.q_proj.weight"): dense, or bitsandbytes 4-bit when
 * name.quant_state.bitsandbytes__nf4 / __fp4 exists. All shapes and sizes are checked. */
int source_find(struct source *s, struct checkpoint *ck, const char *name, int64_t n_out, int64_t n_in,
                struct err *err) MT_CHECK;
int64_t source_blocks(const struct source *s); /* number of absmax values */
/* absmax of all blocks as f32; nested ones are decoded. */
void source_absmax(const struct source *s, float *out);
/* Converts n values of a float tensor to f32. */
void source_f32(const struct st_tensor *t, int64_t n, float *out);
enum weight_format source_dense_format(enum dtype t);
/* Copies a dense matrix as [out, in] in its own dtype; out may be unaligned. */
void source_copy(const struct source *s, char *out);
/* Drops the mapped pages of bytes [at, at+n) of a tensor: they will not be read again. */
void source_drop(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n);

#endif
