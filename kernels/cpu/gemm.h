/* gemm.h - the matrix products of the CPU backend. Leading dimensions in elements. Results do not depend on the number
 * of threads: work is cut into fixed tiles, and one thread computes each with the whole inner dimension. gemm_serial
 * and weight_tile are for one thread, inside or outside an OpenMP region. */
#ifndef MT_CPU_GEMM_H
#define MT_CPU_GEMM_H

#include "kernels/cpu/real.h"

#define gemm_serial CPU(gemm_serial)
#define weight_tile CPU(weight_tile)
#define gemm_rows   CPU(gemm_rows)
#define rows_gemm   CPU(rows_gemm)
#define gemm_fwd    CPU(gemm_fwd)
#define gemm_bwd    CPU(gemm_bwd)
#define proj_weight CPU(proj_weight)

/* Call before a thread uses OpenBLAS: ends the process with an error when the system has no room for the buffers of
 * this team's threads (blas.c). */
void blas_reserve(void);

/* c[m,n] = beta * c + alpha * op(a) op(b), row-major, op transposes when ta / tb; one thread. beta 0 overwrites c, NaN
 * included. */
void gemm_serial(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda,
                 const real *b, int64_t ldb, real beta, real *c, int64_t ldc);

/* c[m,n] = beta * c + alpha * a b^T as gemm_serial; with dev->steady_rows the bits of a row do not depend on the other
 * rows and their number. */
void gemm_rows(const struct device *dev, int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda,
               const real *b, int64_t ldb, real beta, real *c, int64_t ldc);

/* The product of gemm_rows with dev->steady_rows (rows.c). */
void rows_gemm(int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda, const real *b, int64_t ldb,
               real beta, real *c, int64_t ldc);

/* Decodes rows [row, row+n_row) x columns [col, col+n_col) of expert e into out (leading dimension ldo); one thread.
 * col and n_col are even, and multiples of 32 for MXFP4 (the last tile of a row may end at n_in). */
void weight_tile(const struct weight *w, int64_t e, int64_t row, int64_t n_row, int64_t col, int64_t n_col, real *out,
                 int64_t ldo);

/* The matrices that products with proj read: its weight or, in scratch from dev->work, the fake-quantised one, without
 * the experts that have no rows in offs [E+1]; offs absent: all experts. */
struct weight proj_weight(struct device *dev, const struct proj *proj, struct tensor offs);
/* Whether products must add the adapter: there is one, and it is not merged. */
static inline bool lora_added(const struct lora *lora) { return lora->r > 0 && !lora->merged; }

/* y[t, :] (ldy) = x[t, :] (ldx) W_0^T for t < n, all threads; scratch from dev->work. In a dry run it only takes
 * the scratch. */
void gemm_fwd(struct device *dev, real *y, int64_t ldy, const real *x, int64_t ldx, int64_t n, const struct weight *w);
/* dx[t, :] (= or += by accumulate) dy[t, :] W_0 */
void gemm_bwd(struct device *dev, real *dx, int64_t lddx, const real *dy, int64_t lddy, int64_t n,
              const struct weight *w, bool accumulate);

#endif
