/* rows.c - products of rows with a tile of a weight, for generation: the bits of a row do not depend on the number of
 * rows, by which OpenBLAS chooses the order of sums. Each element is LANES partial sums over the inner dimension, added
 * in a fixed order. Blocks of rows share loads. */
#include <string.h>

#include "kernels/cpu/gemm.h"

enum { LANES = 32 / sizeof(real), N_A = 3, N_B = 4 };
typedef real lanes __attribute__((vector_size(LANES * sizeof(real))));
typedef real sums __attribute__((vector_size(N_B * sizeof(real))));

static inline lanes load(const real *p, int64_t n)
{
    lanes v = {0};
    memcpy(&v, p, (size_t)n * sizeof(real));
    return v;
}

/* The sum of all lanes: of neighbours, then of neighbouring sums. */
static inline real sum_lanes(lanes v)
{
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++) v[i] = v[2 * i] + v[2 * i + 1];
    return v[0];
}

/* sum_lanes of N_B vectors. */
static inline sums sum_each(const lanes *v)
{
#ifdef MT_F64
    return (sums){sum_lanes(v[0]), sum_lanes(v[1]), sum_lanes(v[2]), sum_lanes(v[3])};
#else
#ifdef __clang__
#define PICK(a, b, i, j) __builtin_shufflevector(a, b, i, j, i + 8, j + 8, i + 4, j + 4, i + 12, j + 12)
#else
    typedef int32_t order __attribute__((vector_size(32)));
#define PICK(a, b, i, j) __builtin_shuffle(a, b, (order){i, j, i + 8, j + 8, i + 4, j + 4, i + 12, j + 12})
#endif
    const lanes x = PICK(v[0], v[1], 0, 2) + PICK(v[0], v[1], 1, 3),
                y = PICK(v[2], v[3], 0, 2) + PICK(v[2], v[3], 1, 3);
    const lanes z = PICK(x, y, 0, 2) + PICK(x, y, 1, 3);
    return (sums){z[0], z[1], z[2], z[3]} + (sums){z[4], z[5], z[6], z[7]};
#endif
}

/* c[i][j] = beta c[i][j] + alpha <a_i, b_j> for na rows of a, at most N_A, and nb of b, 1 or N_B. */
static inline __attribute__((always_inline)) void dots(int na, int nb, int64_t k, real alpha, const real *a,
                                                       int64_t lda, const real *b, int64_t ldb, real beta, real *c,
                                                       int64_t ldc)
{
    lanes sum[N_A][N_B] = {{{0}}};
    int64_t at = 0;
    for (; at + LANES <= k; at += LANES)
        for (int j = 0; j < nb; j++) {
            const lanes y = load(b + j * ldb + at, LANES);
            for (int i = 0; i < na; i++) sum[i][j] += load(a + i * lda + at, LANES) * y;
        }
    for (int j = 0; at < k && j < nb; j++) {
        const lanes y = load(b + j * ldb + at, k - at);
        for (int i = 0; i < na; i++) sum[i][j] += load(a + i * lda + at, k - at) * y;
    }
    for (int i = 0; i < na; i++) {
        sums out = nb == N_B ? sum_each(sum[i]) : (sums){sum_lanes(sum[i][0])}, old = {0};
        if (beta != 0) memcpy(&old, c + i * ldc, (size_t)nb * sizeof(real));
        out = alpha * out + beta * old;
        memcpy(c + i * ldc, &out, (size_t)nb * sizeof(real));
    }
}

static inline __attribute__((always_inline)) void columns(int nb, int64_t m, int64_t k, real alpha, const real *a,
                                                          int64_t lda, const real *b, int64_t ldb, real beta, real *c,
                                                          int64_t ldc)
{
    for (int64_t i = 0, na; i < m; i += na) {
        na = m - i == N_A + 1 ? 2 : MT_MIN(N_A, m - i);
        if (na == N_A)
            dots(N_A, nb, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
        else if (na == 2)
            dots(2, nb, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
        else
            dots(1, nb, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
    }
}

void rows_gemm(int64_t m, int64_t n, int64_t k, real alpha, const real *a, int64_t lda, const real *b, int64_t ldb,
               real beta, real *c, int64_t ldc)
{
    int64_t j = 0;
    for (; j + N_B <= n; j += N_B) columns(N_B, m, k, alpha, a, lda, b + j * ldb, ldb, beta, c + j, ldc);
    for (; j < n; j++) columns(1, m, k, alpha, a, lda, b + j * ldb, ldb, beta, c + j, ldc);
}
