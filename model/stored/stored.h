/* stored.h - a table row for each layout in which files store a matrix: how it is found, and how its tensors become the
 * planes (codes, scales, ...) of a weight (kernels/format/format.h). */
#ifndef MT_STORED_H
#define MT_STORED_H

#include "model/stored/checkpoint.h"

/* A tensor of a matrix in a file. dtype and shape are those that moetrain writes; readers also take others. */
struct stored_tensor {
    const char *suffix;   /* what follows the matrix's name in the tensor's name; NULL: the layout has no such tensor */
    const char *st_dtype; /* as in struct st_tensor */
    /* Shape, for a matrix or a stack [.., out, in]: [.., out / rows, in / cols], then an axis of `last` unless that is
     * 0. rows 0: one value per matrix, [..], but [1] for a single matrix with cols 1. */
    int rows, cols, last;
};
struct stored_layout {
    enum weight_format format; /* of the codes in memory; WF_NONE: there are none, or they are decoded */
    /* The file's tensors, each under the plane of struct weight that has its bytes or is computed from them. */
    union {
        struct stored_tensor plane[PLANES];
        struct {
            struct stored_tensor data, scale, absmax, nested_absmax, nested_offset, code, nested_map, scale2;
        };
    };
    const char *shape; /* suffix of an I64 tensor with the sizes of the matrix; NULL: there is none */
};
/* Each layout is defined in its own file. stored_layouts ends with NULL. */
#define LAYOUTS(X)                                                                                                     \
    X(nf4) X(fp4) X(int4) X(nvfp4_packed) X(mxfp4) X(mxfp4_stack) X(fp8) X(fp8_blocks) X(nvfp4) X(nvfp4_stack) X(dense)
#define ROW(id) extern const struct stored_layout stored_as_##id;
LAYOUTS(ROW)
#undef ROW
extern const struct stored_layout *const stored_layouts[];
/* Dtype and shape of t for a matrix or a stack of this shape [ndim]. */
struct st_entry stored_entry(const struct stored_tensor *t, int ndim, const int64_t *shape);

/* One matrix of a checkpoint, in any layout. source.h has the functions. */
struct source {
    const struct stored *stored;
    enum weight_format format; /* in memory: of the codes, or WF_BF16 if source_copy decodes them */
    int64_t n_out, n_in;
    int64_t block;                  /* bitsandbytes: values per absmax; INT4: columns per scale; else 0 */
    int64_t scale_rows, scale_cols; /* FP8: rows and columns per scale; else 0 */
    int64_t first_row;   /* where the rows begin in the matrix that the scales belong to; source_runs sets it */
    bool transposed;     /* stored as [in, out] */
    bool scale2_divides; /* as in struct weight */
    float offset;        /* bitsandbytes: of a nested absmax */
    /* The matrix's tensors, each under the plane that has its bytes or that source_copy computes from them; others are
     * NULL. FP8 and INT4 have `scale`. */
    union {
        const struct st_tensor *plane[PLANES];
        struct {
            const struct st_tensor *data, *scale, *absmax, *nested_absmax, *nested_offset, *code, *nested_map, *scale2;
        };
    };
};

struct stored {
    const char *name; /* for logs, where copy decodes the values to bf16; else NULL */
    /* If codes may be kept or decoded by copy: the format whose planes have the codes as they are; else WF_NONE. */
    enum weight_format codes;
    /* 1: found, with the right shapes; sets tensors and format of s, whose n_out and n_in the caller has set. 0: the
     * checkpoint has the matrix in another layout. -1: an error. */
    int (*find)(struct source *s, struct checkpoint *ck, const char *name, struct err *err);
    /* find for n_exp matrices in one tensor; s gets the tensors of all. The caller has also set transposed; a layout
     * that is never transposed clears it. NULL: the layout has no stacks. */
    int (*find_stack)(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp, struct err *err);
    /* Refuses scales that are finite, but that no quantiser writes; NULL: all are allowed. */
    int (*check)(const struct source *s, struct err *err);
    /* Computes a plane of s whose bytes are not those of a tensor (source_copy); NULL: there is no such plane. */
    void (*copy)(const struct source *s, int plane, char *out, int n_threads);
    /* An upper bound of the magnitudes of decoded values; NaN or infinite if unknown. NULL: the layout has no
     * scales. */
    float (*bound)(const struct source *s);
};
/* The layouts, in the order of search, on which errors depend. stored_rows ends with NULL. */
#define STORED(X) X(bnb) X(corrected) X(int4) X(nvfp4_packed) X(mxfp4) X(fp8) X(nvfp4) X(dense)
#define ROW(id)   extern const struct stored stored_##id;
STORED(ROW)
#undef ROW
extern const struct stored *const stored_rows[];

/* ---- for the files of layouts ---- */

#define STORED_E4M3 "F8_E4M3"
#define STORED_E8M0 "F8_E8M0"
bool stored_is(const struct st_tensor *t, const char *st_dtype); /* false if t is NULL */
bool stored_has_shape(const struct st_tensor *t, int ndim, const int64_t *shape);
bool stored_is_scalar(const struct st_tensor *t); /* a float scale for a whole matrix: [] or [1] */
/* Looks for name + suffix: whether the checkpoint has it; the tensor, or NULL. */
bool stored_has(const struct checkpoint *ck, const char *name, const char *suffix);
const struct st_tensor *stored_find(struct checkpoint *ck, const char *name, const char *suffix);
/* stored_find; NULL with an error where the tensor is missing. */
const struct st_tensor *stored_need(struct checkpoint *ck, const char *name, const char *suffix, struct err *err);
/* Errors, which return -1: no layout combines these dtypes of codes and scales; the scales (name_scale_inv) of codes
 * are missing; a scale has an impossible value. */
int stored_unsupported(const struct st_tensor *data, const struct st_tensor *scale, struct err *err);
int stored_no_scales(const struct checkpoint *ck, const struct st_tensor *data, const char *name, struct err *err);
int stored_damaged(const struct st_tensor *scale, float value, struct err *err);

#endif
