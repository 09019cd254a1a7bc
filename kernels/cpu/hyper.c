/* hyper.c - hyper-connections: a token's weights of its residual streams, the weighted sums of the streams, and the
 * gradients of both. One thread computes a row. */
#include <math.h>

#include "kernels/cpu/real.h"

enum { N_MAX = MT_MAX_STREAMS, VALUES_MAX = (2 + N_MAX) * N_MAX, STEPS_MAX = 2 * MT_MAX_SINKHORN - 1 };

/* The matrices of one row: softmax before eps, the input of every normalisation, the result. */
struct mix {
    real soft[N_MAX][N_MAX], step[STEPS_MAX][N_MAX][N_MAX], c[N_MAX][N_MAX];
};

static real sigmoid(real x) { return x >= 0 ? 1 / (1 + real_exp(-x)) : real_exp(x) / (1 + real_exp(x)); }

/* The argument of value v's sigmoid or softmax. part: 0 pre, 1 post, 2 C */
static real argument(const struct hyper *h, const real *m, int64_t v, int part)
{
    return m[v] * (real)((const float *)h->scale.data)[part] + (real)((const float *)h->base.data)[v];
}
static real raw_pre(const struct hyper *h, const real *m, int64_t i) { return sigmoid(argument(h, m, i, 0)); }
static real raw_post(const struct hyper *h, const real *m, int64_t i)
{
    return sigmoid(argument(h, m, h->n_stream + i, 1));
}

/* Step s normalises columns when s is even, rows when it is odd. Element (line, at) of a matrix. */
static real *element(real c[N_MAX][N_MAX], int s, int64_t line, int64_t at)
{
    return s % 2 ? &c[line][at] : &c[at][line];
}

static real line_sum(real c[N_MAX][N_MAX], int s, int64_t line, int64_t n)
{
    real sum = 0;
    for (int64_t i = 0; i < n; i++) sum += *element(c, s, line, i);
    return sum;
}

static void soft_fwd(struct mix *x, const struct hyper *h, const real *m)
{
    const int64_t n = h->n_stream;
    for (int64_t j = 0; j < n; j++) {
        real top = -INFINITY, sum = 0;
        for (int64_t k = 0; k < n; k++) {
            x->soft[j][k] = argument(h, m, 2 * n + n * j + k, 2);
            top = x->soft[j][k] > top ? x->soft[j][k] : top;
        }
        for (int64_t k = 0; k < n; k++) sum += x->soft[j][k] = real_exp(x->soft[j][k] - top);
        for (int64_t k = 0; k < n; k++) {
            x->soft[j][k] /= sum;
            x->c[j][k] = x->soft[j][k] + (real)h->eps;
        }
    }
}

static void mix_fwd(struct mix *x, const struct hyper *h, const real *m)
{
    const int64_t n = h->n_stream;
    soft_fwd(x, h, m);
    for (int s = 0; s < 2 * h->n_iter - 1; s++)
        for (int64_t line = 0; line < n; line++) {
            const real den = line_sum(x->c, s, line, n) + (real)h->eps;
            for (int64_t i = 0; i < n; i++) {
                real *c = element(x->c, s, line, i);
                *element(x->step[s], s, line, i) = *c;
                *c /= den;
            }
        }
}

/* dc: gradient of C, overwritten. dm: of the values of C. */
static void mix_bwd(struct mix *x, const struct hyper *h, real dc[N_MAX][N_MAX], real *dm)
{
    const int64_t n = h->n_stream;
    const real scale = (real)((const float *)h->scale.data)[2];
    for (int s = 2 * h->n_iter - 2; s >= 0; s--)
        for (int64_t line = 0; line < n; line++) {
            const real den = line_sum(x->step[s], s, line, n) + (real)h->eps;
            real dot = 0;
            for (int64_t i = 0; i < n; i++) dot += *element(dc, s, line, i) * (*element(x->step[s], s, line, i) / den);
            for (int64_t i = 0; i < n; i++) *element(dc, s, line, i) = (*element(dc, s, line, i) - dot) / den;
        }
    for (int64_t j = 0; j < n; j++) {
        real dot = 0;
        for (int64_t k = 0; k < n; k++) dot += dc[j][k] * x->soft[j][k];
        for (int64_t k = 0; k < n; k++) dm[n * j + k] = x->soft[j][k] * (dc[j][k] - dot) * scale;
    }
}

static real product(const real *x, const real *y, int64_t n)
{
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static void values_fwd(real *m, real *rstd, const real *x, const struct hyper *h)
{
    const int64_t n_col = h->fn.shape[1];
    *rstd = 1 / real_sqrt(product(x, x, n_col) / (real)n_col + (real)h->norm_eps);
    for (int64_t v = 0; v < hyper_values(h); v++) {
        const float *w = (const float *)h->fn.data + v * h->fn.ld;
        real sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n_col; i++) sum += x[i] * (real)w[i];
        m[v] = *rstd * sum;
    }
}

/* y (= or += by accumulate) a x */
static void add_scaled(real *y, real a, const real *x, int64_t n, bool accumulate)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = (accumulate ? y[i] : 0) + a * x[i];
}

void CPU(hyper_pre_fwd)(struct device *dev, struct tensor y, struct tensor m, struct tensor rstd, struct tensor x,
                        const struct hyper *h)
{
    if (dev->dry_run) return;
    const int64_t dim = y.shape[1];
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        const real *row = real_row(x, t);
        values_fwd(real_row(m, t), (real *)rstd.data + t, row, h);
        for (int64_t i = 0; i < h->n_stream; i++)
            add_scaled(real_row(y, t), raw_pre(h, real_row(m, t), i) + (real)h->eps, row + i * dim, dim, i > 0);
    }
}

void CPU(hyper_post_fwd)(struct device *dev, struct tensor out, struct tensor x, struct tensor f, struct tensor m,
                         const struct hyper *h)
{
    if (dev->dry_run) return;
    const int64_t dim = f.shape[1], n = h->n_stream;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        struct mix mix;
        mix_fwd(&mix, h, real_row(m, t));
        for (int64_t k = 0; k < n; k++) {
            real *to = real_row(out, t) + k * dim;
            add_scaled(to, 2 * raw_post(h, real_row(m, t), k), real_row(f, t), dim, false);
            for (int64_t j = 0; j < n; j++) add_scaled(to, mix.c[j][k], real_row(x, t) + j * dim, dim, true);
        }
    }
}

/* dx_j = sum_k C_jk dout_k, column by column: dx may be dout. */
static void unmix(real *dx, const real *dout, struct mix *x, int64_t n, int64_t dim)
{
    for (int64_t i = 0; i < dim; i++) {
        real d[N_MAX];
        for (int64_t k = 0; k < n; k++) d[k] = dout[k * dim + i];
        for (int64_t j = 0; j < n; j++) {
            real sum = 0;
            for (int64_t k = 0; k < n; k++) sum += x->c[j][k] * d[k];
            dx[j * dim + i] = sum;
        }
    }
}

void CPU(hyper_post_bwd)(struct device *dev, struct tensor df, struct tensor dx, struct tensor dm, struct tensor dout,
                         struct tensor x, struct tensor f, struct tensor m, const struct hyper *h)
{
    if (dev->dry_run) return;
    const int64_t dim = f.shape[1], n = h->n_stream;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        const real *from = real_row(dout, t), *value = real_row(m, t);
        const real scale = (real)((const float *)h->scale.data)[1];
        real *d = real_row(dm, t), dc[N_MAX][N_MAX];
        struct mix mix;
        mix_fwd(&mix, h, value);
        for (int64_t k = 0; k < n; k++) {
            const real s = raw_post(h, value, k);
            d[k] = 0;
            d[n + k] = 2 * product(from + k * dim, real_row(f, t), dim) * s * (1 - s) * scale;
            for (int64_t j = 0; j < n; j++) dc[j][k] = product(real_row(x, t) + j * dim, from + k * dim, dim);
            add_scaled(real_row(df, t), 2 * s, from + k * dim, dim, k > 0);
        }
        mix_bwd(&mix, h, dc, d + 2 * n);
        unmix(real_row(dx, t), from, &mix, n, dim);
    }
}

/* dx += rstd (fn^T dm) - x rstd^2 / (N D) <dm, m> */
static void values_bwd(real *dx, const real *dm, const real *x, const real *m, real rstd, const struct hyper *h)
{
    const int64_t n_col = h->fn.shape[1];
    add_scaled(dx, -rstd * rstd / (real)n_col * product(dm, m, hyper_values(h)), x, n_col, true);
    for (int64_t v = 0; v < hyper_values(h); v++) {
        const float *w = (const float *)h->fn.data + v * h->fn.ld;
        const real a = rstd * dm[v];
#pragma omp simd
        for (int64_t i = 0; i < n_col; i++) dx[i] += a * (real)w[i];
    }
}

void CPU(hyper_pre_bwd)(struct device *dev, struct tensor dx, struct tensor dm, struct tensor dy, struct tensor x,
                        struct tensor m, struct tensor rstd, const struct hyper *h)
{
    if (dev->dry_run) return;
    const int64_t dim = dy.shape[1], n = h->n_stream;
    const real scale = (real)((const float *)h->scale.data)[0];
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        const real *value = real_row(m, t), *from = real_row(dy, t);
        real d[VALUES_MAX] = {0};
        for (int64_t v = 0; dm.ndim && v < hyper_values(h); v++) d[v] = real_row(dm, t)[v];
        for (int64_t i = 0; i < n; i++) {
            const real s = raw_pre(h, value, i);
            d[i] += product(from, real_row(x, t) + i * dim, dim) * s * (1 - s) * scale;
            add_scaled(real_row(dx, t) + i * dim, s + (real)h->eps, from, dim, true);
        }
        values_bwd(real_row(dx, t), d, real_row(x, t), value, ((const real *)rstd.data)[t], h);
    }
}
