/* format.h - frozen weights: struct weight, a matrix or a stack of them, and struct format, which describes a format in
 * memory: sizes, decoder and encoder follow from it. A plane is one array of a weight: codes, scales, or a table. */
#ifndef MT_FORMAT_H
#define MT_FORMAT_H

#include "kernels/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the elements of a frozen weight are stored:
 *   WF_F32, WF_BF16, WF_F16  dense
 *   WF_MXFP4  e2m1 nibbles, LOW nibble first, one e8m0 byte per 32 along the input axis
 *   WF_NF4, WF_FP4  bitsandbytes: HIGH nibble first, absmax per `block` elements of the expert's flat matrix;
 *                   with nested absmax: absmax[i] = nested_map[q[i]] * nested_absmax[i / 256] + nested_offset
 *   WF_NVFP4  e2m1 nibbles, LOW nibble first, one e4m3 byte per 16 along the input axis, and one f32 per row, because
 *             the rows of gate and up, or of q, k and v, may come from matrices with different global scales
 *   WF_FP8    e4m3 bytes, and one f32 per row (as in NVFP4) and `block` columns; a row's last block may be shorter */
#define FORMATS(X)                                                                                                     \
    X(F32, f32) X(BF16, bf16) X(F16, f16) X(MXFP4, mxfp4) X(NF4, nf4) X(FP4, fp4) X(NVFP4, nvfp4) X(FP8, fp8)
#define ID(id, row) WF_##id,
enum weight_format { WF_NONE, FORMATS(ID) };
#undef ID

/* The planes, in the order in which they are allocated and stored. A format uses some of them. */
enum plane_index {
    PLANE_DATA,
    PLANE_SCALE,
    PLANE_ABSMAX,
    PLANE_NESTED_ABSMAX,
    PLANE_NESTED_OFFSET,
    PLANE_CODE,
    PLANE_NESTED_MAP,
    PLANE_SCALE2,
    PLANES
};

/* A frozen matrix [out, in], or a stack with one per expert [E, out, in] (n_exp = 1 for a dense one). Code for one
 * format reads planes by name, other code loops over plane[]. */
struct weight {
    enum weight_format format;
    int64_t n_exp, n_out, n_in;
    int64_t block; /* NF4/FP4: elements per absmax; FP8: columns per scale2 */
    union {
        const void *plane[PLANES];
        struct {
            const void *data;           /* dense elements, nibbles [E, out*in/2], or FP8 bytes [E, out, in] */
            const uint8_t *scale;       /* MXFP4: e8m0 [E, out, in/32]; NVFP4: e4m3 [E, out, in/16]; NF4/FP4 nested: q8
                                           [E, n_block] */
            const float *absmax;        /* NF4/FP4 plain: [E, n_block] */
            const float *nested_absmax; /* [E, ceil(n_block/256)] */
            const float *nested_offset; /* [E] */
            const float *code;          /* NF4/FP4: [16], the table of the file */
            const float *nested_map;    /* [256] */
            const float *scale2; /* NVFP4: [E, out], global scale of the row's matrix; FP8: [E, out, ceil(in/block)] */
        };
    };
    bool scale2_divides; /* NVFP4: a scale is divided by scale2 (compressed-tensors), not multiplied (ModelOpt) */
};

/* What a plane has one value for. Blocks run over the flat matrix, those of PLANE_PER_ROW_BLOCK begin with each row.
 * PLANE_SHARED: a table for all matrices of the stack. */
enum plane_unit {
    PLANE_PER_VALUE,
    PLANE_PER_BLOCK,
    PLANE_PER_ROW,
    PLANE_PER_ROW_BLOCK,
    PLANE_PER_256_BLOCKS,
    PLANE_PER_MATRIX,
    PLANE_SHARED
};
struct plane {
    const char *suffix; /* of its tensor in the cache of model.quantize; NULL: not stored */
    enum plane_unit unit;
    int bits;    /* per value: 32 is f32; 0: the format does not have this plane */
    int entries; /* PLANE_SHARED: values of the table */
};

struct format {
    const char *name;
    int bits, block; /* bits of a code; values per scale, 0: weight.block, or no scales */
    bool dense;      /* without scales */
    bool binary;     /* scales are bytes of e8m0: powers of two */
    struct plane plane[PLANES];
    /* The same format with nested absmax, or NULL. */
    const struct format *nested;
    /* The definition: element i of expert e's flat matrix. Each product and sum is rounded to f32, as in the
     * publishers' implementations. */
    float (*value)(const struct weight *w, int64_t e, int64_t i);
    /* Writes `value` of rows [row, row + n_row) and columns [col, col + n_col), multiples of format_step, to out, whose
     * rows are ldo apart. */
    void (*tile)(float *out, int64_t ldo, const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col,
                 int64_t n_col);
    /* For model.quantize; NULL: it cannot pack this format. encode writes the planes of one expert from a dense matrix,
     * and returns how many values are not finite; tables writes the PLANE_SHARED planes. */
    int64_t (*encode)(void *const plane[PLANES], const struct weight *dense, int n_threads);
    void (*tables)(void *const plane[PLANES]);
};
#define ROW(id, row) extern const struct format format_##row;
FORMATS(ROW)
#undef ROW

/* nested: NF4 and FP4 with absmax stored in 8 bits. */
const struct format *format_row(enum weight_format f, bool nested);
const struct format *format_of(const struct weight *w);
int64_t format_step(const struct format *f); /* values that share a byte or a scale along a row */
/* Number of values and bytes of a plane in format f, for one matrix with the shape and block of w, or of the shared
 * table. */
int64_t format_plane_count(const struct format *f, const struct weight *w, int plane);
int64_t format_plane_bytes(const struct format *f, const struct weight *w, int plane);

const char *weight_format_name(enum weight_format f);
/* Finds the format of this name; *nested: with nested absmax. False: no format has the name. */
bool format_named(const char *name, enum weight_format *f, bool *nested);
bool weight_is_dense(enum weight_format f);
bool weight_is_bf16(const struct weight *w);                    /* products read it as it is */
bool weight_is_packed(enum weight_format f);                    /* codes with scales */
int64_t weight_scale_block(enum weight_format f);               /* elements per scale byte of MXFP4 and NVFP4, else 0 */
int64_t weight_blocks(const struct weight *w);                  /* absmax values per expert (NF4/FP4), else 0 */
int64_t weight_row_scales(const struct weight *w);              /* scale2 values per row (NVFP4, FP8), else 0 */
int64_t weight_bytes(const struct weight *w);                   /* packed bytes, scales and tables included */
struct weight weight_matrix(const struct weight *w, int64_t e); /* matrix e of a stack as a dense one */

#ifdef __cplusplus
}
#endif
#endif
