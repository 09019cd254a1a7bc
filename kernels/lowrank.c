/* lowrank.c - |B A|^2 = sum of (A A^T) * (B^T B), elementwise: two products of r x r. */
#include "kernels/lowrank.h"

/* gram [r, r] = a a^T of a [r, n] */
static void gram_of_rows(double *gram, const float *a, int64_t r, int64_t n)
{
    for (int64_t i = 0; i < r; i++) {
        for (int64_t j = 0; j <= i; j++) {
            const float *x = a + i * n, *y = a + j * n;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < n; k++) sum += x[k] * y[k];
            gram[i * r + j] = gram[j * r + i] = (double)sum;
        }
    }
}

/* Sum over the rows y of b [n, r] of y gram y^T. */
static double sum_of_rows(const double *gram, const float *b, int64_t r, int64_t n)
{
    double sum = 0;
    for (int64_t k = 0; k < n; k++) {
        const float *y = b + k * r;
        for (int64_t i = 0; i < r; i++) {
            double row = 0;
#pragma omp simd reduction(+ : row)
            for (int64_t j = 0; j < r; j++) row += gram[i * r + j] * (double)y[j];
            sum += (double)y[i] * row;
        }
    }
    return sum;
}

void lowrank_norms(double *out, const float *a, const float *b, int64_t n, int64_t r, int64_t n_in, int64_t n_out)
{
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        double *gram = mem_array(r * r, sizeof(*gram));
        gram_of_rows(gram, a + i * r * n_in, r, n_in);
        out[i] += sum_of_rows(gram, b + i * n_out * r, r, n_out);
        mem_free(gram);
    }
}
