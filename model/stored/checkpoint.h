/* checkpoint.h - the tensors of a checkpoint: found by name, with dtype and shape checked, counted and hashed. */
#ifndef MT_STORED_CHECKPOINT_H
#define MT_STORED_CHECKPOINT_H

#include "data/safetensors.h"
#include "kernels/format/format.h"
#include "model/stored/base_model.h"

/* Which expert-parallel ranks read the tensors that follow. */
enum reader { READ_BY_ALL, READ_HERE, READ_ELSEWHERE };
/* A checkpoint, and which of its tensors were read. */
struct checkpoint {
    const struct safetensors *st;
    bool *used;  /* [st->n_tensors] */
    bool *asked; /* [st->n_missing] the caller looked for this tensor, which is in the index but in no file; NULL: not
                    recorded */
    bool hashed; /* tensors found from now on enter the fingerprint, each once */
    uint64_t fingerprint;   /* a sum over these tensors, whose order does not matter: name, dtype, shape and the first
                               64 KiB as stored */
    struct base_hash *hash; /* of all bytes; NULL: none */
    bool *later;            /* [st->n_tensors] if hash: checkpoint_hash adds the bytes where they are read */
    enum reader reader;
    int n_threads;
};
/* Allocates `used` and, with hash, `later`. checkpoint_close frees all arrays. */
void checkpoint_open(struct checkpoint *ck, const struct safetensors *st, struct base_hash *hash, int n_threads);
void checkpoint_close(struct checkpoint *ck);
/* Call it where bytes [at, at + n) of a tensor, or of a part of one, are read. Adds them to the hash and returns their
 * sum, if checkpoint_take or source_find (data) found the tensor; other tensors were hashed when found. */
hash_sum checkpoint_hash(struct checkpoint *ck, const struct st_tensor *t, int64_t at, int64_t n);
/* Replaces checkpoint_hash for bytes that are not read, because their packed form is cached. sum: their sum. */
void checkpoint_hash_known(struct checkpoint *ck, const struct st_tensor *t, hash_sum sum);

/* Finds a tensor; an error unless it has the shape [ndim] and a float dtype, or U8 if is_u8. */
const struct st_tensor *checkpoint_take(struct checkpoint *ck, const char *name, bool is_u8, int ndim,
                                        const int64_t *shape, struct err *err) MT_CHECK;
/* Error: the tensor has a dtype that neither a matrix (ndim 2) nor a stack of them (ndim 3) has in any format; the
 * error lists the possible dtypes. A missing tensor is no error. */
int checkpoint_check_matrix(const struct checkpoint *ck, const char *name, int ndim, const int64_t *shape,
                            struct err *err) MT_CHECK;
/* checkpoint_take of integers [n_row, n_col]. */
const struct st_tensor *checkpoint_take_ids(struct checkpoint *ck, const char *name, int64_t n_row, int64_t n_col,
                                            struct err *err) MT_CHECK;
bool checkpoint_has(const struct checkpoint *ck, const char *name);
/* An error if a tensor that was looked for is in the index but in no file: others might be misread without it. */
int checkpoint_check_missing(const struct checkpoint *ck, struct err *err) MT_CHECK;
/* The tensor's name for messages: that in the file or, if missing, the publisher's name (in `to`). */
const char *checkpoint_name(const struct checkpoint *ck, char *to, size_t size, const char *name);
/* The format of a float dtype; WF_NONE for other dtypes. */
enum weight_format checkpoint_dense_format(enum dtype t);
/* Converts n values of a float tensor to f32. */
void checkpoint_f32(const struct st_tensor *t, int64_t n, float *out);
/* Any tensor; an error if missing. find_data: checkpoint_hash adds its bytes where they are read. */
const struct st_tensor *checkpoint_find(struct checkpoint *ck, const char *name, struct err *err);
const struct st_tensor *checkpoint_find_data(struct checkpoint *ck, const char *name, struct err *err);
/* Return -1 and the error "tensor T is U8 [3], expected WHAT SHAPE: ...". checkpoint_shape_error: the checkpoint does
 * not fit its config.json; checkpoint_format_error: it has a quantisation that moetrain does not read. */
int checkpoint_shape_error(const struct st_tensor *t, const char *what, int ndim, const int64_t *shape,
                           struct err *err);
int checkpoint_format_error(const struct st_tensor *t, const char *what, int ndim, const int64_t *shape,
                            struct err *err);

#endif
