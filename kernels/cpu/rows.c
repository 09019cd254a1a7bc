/* rows.c - products of rows with a tile of a weight. OpenBLAS chooses kernels and the order of sums by the number of
 * rows. For generation each element is computed alone: LANES partial sums over the inner dimension, then their sum in a
 * fixed order. Blocks of rows share loads; their sizes change no bits. */
#include <string.h>

#include "kernels/cpu/gemm.h"

enum { LANES = 32 / sizeof(real), N_A = 4, N_B = 3 };
typedef real lanes __attribute__((vector_size(LANES * sizeof(real))));

static inline lanes load(const real *p, int64_t n)
{
    lanes v = {0};
    memcpy(&v, p, (size_t)n * sizeof(real));
    return v;
}

static inline real sum_lanes(lanes v)
{
    real sum = v[0];
    for (int i = 1; i < LANES; i++) sum += v[i];
    return sum;
}

/* out[i][j] = <a_i, b_j> for na rows of a and nb of b. */
static inline __attribute__((always_inline)) void dot(real out[N_A][N_B], int na, int nb, const real *a, int64_t lda,
                                                      const real *b, int64_t ldb, int64_t k)
{
    lanes sum[N_A][N_B] = {{{0}}};
    int64_t c = 0;
    for (; c + LANES <= k; c += LANES)
        for (int j = 0; j < nb; j++) {
            const lanes y = load(b + j * ldb + c, LANES);
            for (int i = 0; i < na; i++) sum[i][j] += load(a + i * lda + c, LANES) * y;
        }
    for (int j = 0; c < k && j < nb; j++) {
        const lanes y = load(b + j * ldb + c, k - c);
        for (int i = 0; i < na; i++) sum[i][j] += load(a + i * lda + c, k - c) * y;
    }
    for (int i = 0; i < na; i++)
        for (int j = 0; j < nb; j++) out[i][j] = sum_lanes(sum[i][j]);
}

/* c[m,nb] = beta c + alpha a b^T for nb rows of b. */
static inline __attribute__((always_inline)) void columns(int nb, int64_t m, int64_t k, real alpha, const real *a,
                                                          int64_t lda, const real *b, int64_t ldb, real beta, real *c,
                                                          int64_t ldc)
{
    for (int64_t i = 0, na; i < m; i += na) {
        real out[N_A][N_B];
        na = m - i < N_A ? 1 : N_A;
        if (na == N_A)
            dot(out, N_A, nb, a + i * lda, lda, b, ldb, k);
        else
            dot(out, 1, nb, a + i * lda, lda, b, ldb, k);
        for (int64_t u = 0; u < na; u++)
            for (int v = 0; v < nb; v++) {
                real *to = c + (i + u) * ldc + v;
                *to = alpha * out[u][v] + (beta == 0 ? 0 : beta * *to);
            }
    }
}

void rows_gemm(int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda, const real *b, int64_t ldb,
               real beta, real *c, int64_t ldc)
{
    int64_t j = 0;
    for (; j + N_B <= n; j += N_B) columns(N_B, m, k, alpha, a, lda, b + j * ldb, ldb, beta, c + j, ldc);
    for (; j < n; j++) columns(1, m, k, alpha, a, lda, b + j * ldb, ldb, beta, c + j, ldc);
}
