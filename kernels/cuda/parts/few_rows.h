/* few_rows.h - products with few rows, as sampling has them: of one matrix, or of the experts that have rows. A weight
 * is read once, in its format, without a decoded copy. For every row m of expert e, with a_row(m) = slot ? slot[m] /
 * top_k : m and all sums in f32:
 *
 *     v[m, :] = a[a_row(m), :] W_e^T + scale * (la[m, part] lb_e^T) + bias_e + res[m, :]
 *
 * out = v; with act also the activation of pairs of columns. sm80/few_rows.cu */
#ifndef MT_CUDA_FEW_ROWS_H
#define MT_CUDA_FEW_ROWS_H

#include "kernels/cuda/parts/dense.h"
#include "kernels/cuda/parts/grouped.h"

struct few_rows {
    struct weight w;     /* [n_exp, n_out, n_in] */
    int64_t n_row;       /* of all experts */
    const int32_t *offs; /* [n_exp + 1] device: rows of each expert; NULL: one matrix has all */
    const bf16 *a;       /* rows of n_in, lda apart */
    int64_t lda;
    const int32_t *slot; /* [n_row] or NULL */
    struct quotient token;
    int64_t r; /* 0: no adapter; else a multiple of 8 */
    const bf16 *la, *lb;
    int64_t ld_la;
    int n_part;
    struct dense_part part[3]; /* of an expert's lb [rows of all parts, r] */
    const float *bias;         /* [n_exp, n_out] or NULL */
    const bf16 *res;           /* [n_row, n_out], ld_res apart, or NULL; may be out */
    bf16 *out;
    int64_t ld_res, ld_out;
    bf16 *act; /* [n_row, n_out / 2] = glu of the rounded pairs of columns; or NULL */
    struct glu_form form;
};

/* Call only where choice_few_rows returns true. Rows of a and matrices are 16-byte aligned, those of la, res and out
 * 4-byte. The bits of a row depend neither on other rows nor on their number. */
void cuda_few_rows(const struct few_rows *f);

#endif
