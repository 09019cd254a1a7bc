/* tensor.h - views of memory: struct tensor (dense), struct weight (a frozen matrix, dense or in 4 or 8 bits), and
 * the arena that holds their data. Views own nothing and are never freed. */
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
uint16_t f32_to_f16(float f); /* the same; infinity from 65520 on */

/* A row-major view with 1 to 3 dimensions. Rows (the last axis) are contiguous; `ld` is the distance between rows in
 * elements, so that a slice of columns is a view too. Zeroed means "absent" (ndim 0); in a dry run data is NULL, so
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

/* How the elements of a frozen weight are stored:
 *   WF_F32, WF_BF16, WF_F16  dense
 *   WF_MXFP4  e2m1 nibbles, LOW nibble first, one e8m0 byte per 32 along the input axis
 *   WF_NF4, WF_FP4  bitsandbytes: HIGH nibble first, absmax per `block` elements of the expert's flat matrix;
 *                   with nested absmax: absmax[i] = nested_map[q[i]] * nested_absmax[i / 256] + nested_offset
 *   WF_NVFP4  e2m1 nibbles, LOW nibble first, one e4m3 byte per 16 along the input axis, and one f32 per row, because
 *             the rows of gate and up, or of q, k and v, may come from matrices with different global scales
 *   WF_FP8    e4m3 bytes, and one f32 per row and `block` columns, for the same reason; a row may have a shorter block
 *             at its end */
enum weight_format { WF_NONE, WF_F32, WF_BF16, WF_F16, WF_MXFP4, WF_NF4, WF_FP4, WF_NVFP4, WF_FP8 };
/* Elements per scale byte of MXFP4 and NVFP4, else 0. */
int64_t weight_scale_block(enum weight_format f);
const char *weight_format_name(enum weight_format f);

/* A frozen matrix [out, in], or a stack with one per expert [E, out, in] (n_exp = 1 for a dense one). */
struct weight {
    enum weight_format format;
    int64_t n_exp, n_out, n_in;
    const void *data; /* dense elements, nibbles [E, out*in/2], or FP8 bytes [E, out, in] */
    const uint8_t
        *scale;          /* MXFP4: e8m0 [E, out, in/32]; NVFP4: e4m3 [E, out, in/16]; NF4/FP4 nested: q8 [E, n_block] */
    const float *absmax; /* NF4/FP4 plain: [E, n_block] */
    const float *nested_absmax; /* [E, ceil(n_block/256)] */
    const float *nested_offset; /* [E] */
    const float *nested_map;    /* [256] */
    const float *code;          /* NF4/FP4: [16], the table of the file */
    int64_t block;              /* NF4/FP4: elements per absmax; FP8: columns per scale2 */
    const float *scale2;        /* NVFP4: [E, out], global scale of the row's matrix; FP8: [E, out, ceil(in/block)] */
    bool scale2_divides; /* NVFP4: a scale is divided by scale2 (compressed-tensors), not multiplied (ModelOpt) */
};
int64_t weight_blocks(const struct weight *w);                  /* absmax values per expert (NF4/FP4) */
int64_t weight_row_scales(const struct weight *w);              /* scale2 values per row (NVFP4, FP8), else 0 */
int64_t weight_bytes(const struct weight *w);                   /* packed bytes, scales and tables included */
struct weight weight_matrix(const struct weight *w, int64_t e); /* matrix e of a stack as a dense one */

/* A stack allocator over one block. In a dry run base is NULL and cap INT64_MAX: every push returns NULL, and `peak` is
 * the size that the real arena needs. Every push is aligned to 256 bytes. */
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
