/* gemm.c - matrix products: OpenBLAS for a tile, OpenMP over the tiles of a product with a frozen weight. A thread
 * decodes its part of the weight into its scratch; decoding is cheap compared to the product with TOKENS rows. */
#include "kernels/cpu/gemm.h"

#include <cblas.h>
#include <limits.h>
#include <omp.h>

enum {
    TOKENS = 512,  /* rows of x or dy in a tile */
    FEATURES = 64, /* fwd: rows of W in a tile; bwd: columns of W, a multiple of 32 for MXFP4 */
    SLAB = 512,    /* bwd: rows of W decoded at a time */
};

#ifdef MT_F64
#define cblas_gemm cblas_dgemm
#else
#define cblas_gemm cblas_sgemm
#endif

void gemm_serial(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda,
                 const real *b, int64_t ldb, real beta, real *c, int64_t ldc)
{
    if (m == 0 || n == 0) return;
    MT_REQUIRE(m <= INT_MAX && n <= INT_MAX && k <= INT_MAX && lda <= INT_MAX && ldb <= INT_MAX && ldc <= INT_MAX,
               "a product of [%lld, %lld] by %lld is too large for BLAS", (long long)m, (long long)k, (long long)n);
    blas_reserve();
    cblas_gemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k,
               alpha, a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

void gemm_rows(const struct device *dev, int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda,
               const real *b, int64_t ldb, real beta, real *c, int64_t ldc)
{
    if (dev->steady_rows)
        rows_gemm(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else
        gemm_serial(false, true, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* Rows x columns of W: in place when W is stored as reals, otherwise decoded into buf. */
static const real *weight_part(const struct weight *w, int64_t row, int64_t n_row, int64_t col, int64_t n_col,
                               real *buf, int64_t *ld)
{
#ifndef MT_F64
    if (format_of(w) == &format_f32) {
        *ld = w->n_in;
        return (const real *)w->data + row * w->n_in + col;
    }
#endif
    *ld = n_col;
    weight_tile(w, 0, row, n_row, col, n_col, buf, n_col);
    return buf;
}

void gemm_fwd(struct device *dev, real *y, int64_t ldy, const real *x, int64_t ldx, int64_t n, const struct weight *w)
{
    int64_t mark = arena_mark(&dev->work);
    struct tensor scratch = arena_tensor_3d(&dev->work, DT_REAL, dev->n_threads, FEATURES, w->n_in);
    if (!dev->dry_run) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
        for (int64_t row = 0; row < w->n_out; row += FEATURES) {
            for (int64_t t = 0; t < n; t += TOKENS) {
                int64_t n_row = MT_MIN(FEATURES, w->n_out - row), ld;
                real *buf = real_row(scratch, omp_get_thread_num() * FEATURES);
                const real *part = weight_part(w, row, n_row, 0, w->n_in, buf, &ld);
                gemm_rows(dev, MT_MIN(TOKENS, n - t), n_row, w->n_in, 1, x + t * ldx, ldx, part, ld, 0,
                          y + t * ldy + row, ldy);
            }
        }
    }
    arena_release(&dev->work, mark);
}

void gemm_bwd(struct device *dev, real *dx, int64_t lddx, const real *dy, int64_t lddy, int64_t n,
              const struct weight *w, bool accumulate)
{
    int64_t mark = arena_mark(&dev->work);
    struct tensor scratch = arena_tensor_3d(&dev->work, DT_REAL, dev->n_threads, SLAB, FEATURES);
    if (!dev->dry_run) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(dev->n_threads)
        for (int64_t col = 0; col < w->n_in; col += FEATURES) {
            for (int64_t t = 0; t < n; t += TOKENS) {
                int64_t n_col = MT_MIN(FEATURES, w->n_in - col), ld;
                real *buf = real_row(scratch, omp_get_thread_num() * SLAB);
                for (int64_t row = 0; row < w->n_out; row += SLAB) {
                    int64_t n_row = MT_MIN(SLAB, w->n_out - row);
                    const real *part = weight_part(w, row, n_row, col, n_col, buf, &ld);
                    gemm_serial(false, false, MT_MIN(TOKENS, n - t), n_col, n_row, 1, dy + t * lddy + row, lddy, part,
                                ld, row > 0 || accumulate, dx + t * lddx + col, lddx);
                }
            }
        }
    }
    arena_release(&dev->work, mark);
}
