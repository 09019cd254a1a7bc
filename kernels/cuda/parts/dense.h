/* dense.h - a dense product with the adapter in its accumulators, for linear.cu and loss.cu, on Hopper. All sums are
 * f32:
 *
 *     v[m, :] = scale * (la[m, part] lb) + a[m, :] b + bias + res[m, :]
 *     out = v, or with `tile_sums` out = exp(v - the largest v of the row in the tile of DENSE_COLS columns)
 *
 * Without `kn` b is stored transposed, [n_out, n_in] (forward); with `kn` as [n_in, n_out] (backward). Columns of `out`
 * outside of all parts get no adapter. */
#ifndef MT_CUDA_DENSE_H
#define MT_CUDA_DENSE_H

#include "kernels/cuda/core/cuda.h"

/* The adapter of columns first .. end-1: r columns of la from column `la` on; lb has row `lb` for column `first`. */
struct dense_part {
    int first, end, la, lb;
    float scale;
};

struct dense {
    int64_t n_row, n_out, n_in;
    const bf16 *a, *b; /* rows of a: lda apart; b contiguous */
    bool kn;
    const float *bias; /* [n_out] or NULL */
    const bf16 *res;   /* [n_row, n_out] or NULL; may be out */
    bf16 *out;
    int64_t lda, ld_out, ld_res, ld_la;
    const bf16 *la, *lb; /* lb [rows of all parts, r], with kn [r, n_out] for one part */
    int64_t r;           /* 0: no adapter */
    int n_part;
    struct dense_part part[3]; /* ascending */

    struct tile_sums *tile_sums; /* [n_row, n_out / DENSE_COLS rounded up] or NULL */
    const int32_t *label;        /* with tile_sums: [n_row] */
    float *own;                  /* with tile_sums: v[m, label[m]], not written where label[m] is no column */
};

/* Whether the kernel takes d: sizes are multiples of 8 and rows 16-byte aligned, parts that share a tile have the same
 * scale. */
bool cuda_dense_takes(const struct dense *d);
void cuda_dense_wgmma(const struct dense *d);

#endif
