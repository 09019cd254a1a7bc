/* tensor.h - views of memory: struct tensor (dense; kernels/format/format.h has struct weight), and the arena that
 * holds their data. Views own nothing and are never freed. */
#ifndef MT_TENSOR_H
#define MT_TENSOR_H

#include "kernels/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum dtype { DT_NONE, DT_F32, DT_F64, DT_BF16, DT_F16, DT_U8, DT_I32, DT_I64, DT_COUNT };
int64_t dtype_size(enum dtype t); /* bytes of an element */
const char *dtype_name(enum dtype t);

float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f); /* round to nearest even; NaN stays NaN */
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f); /* round to nearest even; NaN stays NaN; infinity from 65520 on */

/* A row-major view with 1 to 3 dimensions. Rows (the last axis) are contiguous; `ld` is the distance between rows in
 * elements, so a slice of columns is a view too. A zeroed struct (ndim 0) means "absent"; data is NULL in a dry run, so
 * test ndim. */
struct tensor {
    void *data;
    enum dtype dtype;
    int ndim;
    int64_t shape[3];
    int64_t ld; /* elements; equals shape[ndim-1] when contiguous */
};
struct tensor tensor_1d(void *data, enum dtype t, int64_t n);
struct tensor tensor_2d(void *data, enum dtype t, int64_t rows, int64_t cols);
struct tensor tensor_3d(void *data, enum dtype t, int64_t n, int64_t rows, int64_t cols);
struct tensor tensor_cols(struct tensor x, int64_t first, int64_t count); /* columns of a [rows, cols] view */
struct tensor tensor_rows(struct tensor x, int64_t first, int64_t count); /* leading-axis slice */
int64_t tensor_count(struct tensor x);                                    /* elements */
int64_t tensor_bytes(struct tensor x);                                    /* of a contiguous view */

/* A stack allocator over one block; pushes are aligned to 256 bytes. In a dry run base is NULL, cap INT64_MAX and every
 * push returns NULL; `peak` is the size that the real arena needs. */
struct arena {
    const char *name;
    char *base;
    int64_t cap, used, peak;
};
void *arena_push(struct arena *a, int64_t bytes); /* a full arena is a bug of the plan and stops the process */
struct tensor arena_tensor_1d(struct arena *a, enum dtype t, int64_t n);
struct tensor arena_tensor_2d(struct arena *a, enum dtype t, int64_t rows, int64_t cols);
struct tensor arena_tensor_3d(struct arena *a, enum dtype t, int64_t n, int64_t rows, int64_t cols);
int64_t arena_mark(const struct arena *a);
void arena_release(struct arena *a, int64_t mark);
struct arena arena_measure(const char *name);

#ifdef __cplusplus
}
#endif
#endif
