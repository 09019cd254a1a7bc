/* rows.c - products of rows with a tile of a weight. OpenBLAS chooses kernels and the order of sums by the number of
 * rows. For generation each element is computed alone: LANES partial sums over the inner dimension, then their sum in a
 * fixed order. With few rows this is also faster, as nothing is packed. */
#include <string.h>

#include "kernels/cpu/gemm.h"

enum { LANES = 32 / sizeof(real), N_A = 4, N_B = 2 };
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

void rows_gemm(int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda, const real *b, int64_t ldb,
               real beta, real *c, int64_t ldc)
{
    for (int64_t j = 0; j < n; j += N_B)
        for (int64_t i = 0; i < m; i += N_A) {
            const int na = (int)MT_MIN(N_A, m - i), nb = (int)MT_MIN(N_B, n - j);
            const real *x = a + i * lda, *w = b + j * ldb;
            real out[N_A][N_B];
            if (na == N_A && nb == N_B)
                dot(out, N_A, N_B, x, lda, w, ldb, k);
            else if (na == 1 && nb == N_B)
                dot(out, 1, N_B, x, lda, w, ldb, k);
            else
                dot(out, na, nb, x, lda, w, ldb, k);
            for (int u = 0; u < na; u++)
                for (int v = 0; v < nb; v++) {
                    real *to = c + (i + u) * ldc + j + v;
                    *to = alpha * out[u][v] + (beta == 0 ? 0 : beta * *to);
                }
        }
}
