/* test_ops_hyper.c - hyper-connections (weighted residual streams). */
#include "tests/test.h"

#include <math.h>

#include "tests/op_check.h"

/* amplitude: of m; the largest makes sigmoids and softmaxes nearly constant. pad: columns around every view, half of
 * them before it; on a GPU a multiple of 16, as rows are aligned */
struct shape {
    int64_t n_tok, n_stream, dim;
    int n_iter;
    bool head;
    double amplitude;
    int64_t pad;
};

static const struct shape shapes[] = {
    {0, 4, 8, 20, false, 1, 0}, {1, 4, 8, 20, false, 1, 0}, {5, 4, 6, 20, false, 2, 6},
    {3, 4, 7, 3, false, 8, 0},  {3, 3, 5, 32, false, 1, 2}, {4, 2, 8, 1, false, 1, 0},
    {2, 1, 9, 4, false, 1, 0},  {4, 4, 8, 0, true, 1, 4},   {3, 2, 6, 0, true, 3, 0},
};
/* DeepSeek-V4-Flash and its head; rows that no tile divides; one stream; sizes below a warp. */
static const struct shape gpu_shapes[] = {
    {130, 4, 4096, 20, false, 1, 0}, {67, 4, 4096, 0, true, 1, 0}, {33, 4, 1000, 20, false, 2, 16},
    {70, 3, 264, 7, false, 1, 16},   {65, 2, 72, 32, false, 4, 0}, {9, 1, 16, 1, false, 1, 16},
    {1, 4, 8, 20, false, 1, 0},      {5, 2, 136, 0, true, 2, 16},  {0, 4, 64, 20, false, 1, 0},
};

struct hc {
    struct device *dev;
    struct hyper h;
    struct tensor x, f, y, m, rstd, out;
    struct tensor df, dx, dm;
    struct tensor mixed, in_place; /* dx of hyper_post_bwd, and in place of dout */
};

static struct tensor view(struct tensor wide, int64_t pad)
{
    return pad ? tensor_cols(wide, pad / 2, wide.shape[1] - pad) : wide;
}
static struct tensor act(struct device *dev, const struct shape *p, int64_t cols)
{
    return view(make_empty(dev->act_dtype, p->n_tok, cols + p->pad, -1), p->pad);
}
static struct tensor input(struct device *dev, const struct shape *p, uint64_t stream, int64_t cols)
{
    return view(make_random(dev->act_dtype, stream, 1, p->n_tok, cols + p->pad, -1), p->pad);
}

static struct hc make(struct device *dev, const struct shape *p)
{
    const int64_t n = p->n_stream, n_value = p->head ? n : (2 + n) * n, n_col = n * p->dim;
    struct hc c = {.dev = dev,
                   .h = {.n_stream = n, .n_iter = p->n_iter, .eps = 1e-6f, .norm_eps = 1e-5f},
                   .x = input(dev, p, 1, n_col),
                   .f = input(dev, p, 2, p->dim),
                   .y = act(dev, p, p->dim),
                   .m = make_empty(dev->stat_dtype, p->n_tok, n_value, -1),
                   .rstd = make_empty(dev->stat_dtype, p->n_tok, -1, -1),
                   .out = act(dev, p, n_col),
                   .df = act(dev, p, p->dim),
                   .dx = act(dev, p, n_col),
                   .dm = make_empty(dev->stat_dtype, p->n_tok, n_value, -1)};
    c.h.fn = make_random(DT_F32, 3, p->amplitude / sqrt((double)n_col), n_value, n_col, -1);
    c.h.base = make_random(DT_F32, 4, 1, n_value, -1, -1);
    c.h.scale = make_random(DT_F32, 5, 0.5, p->head ? 1 : 3, -1, -1);
    for (int64_t i = 0; i < tensor_count(c.h.scale); i++) set_value(c.h.scale, i, 1 + value_at(c.h.scale, i));
    return c;
}

/* Computes out from x and f; the hyper-connection at a model's head ends with y. */
static void fwd(struct hc *c)
{
    op_hyper_pre_fwd(c->dev, c->y, c->m, c->rstd, c->x, &c->h);
    if (c->h.n_iter) op_hyper_post_fwd(c->dev, c->out, c->x, c->f, c->m, &c->h);
}

static void bwd(struct hc *c)
{
    const struct tensor dy = make_probe(c->y, 6), absent = {0};
    if (!c->h.n_iter) {
        for (int64_t i = 0; i < tensor_count(c->dx); i++) set_value(c->dx, i, 0.25);
        op_hyper_pre_bwd(c->dev, c->dx, absent, dy, c->x, c->m, c->rstd, &c->h);
        return;
    }
    const struct tensor dout = make_probe(c->out, 7);
    op_hyper_post_bwd(c->dev, c->df, c->dx, c->dm, dout, c->x, c->f, c->m, &c->h);
    c->dev->ops->wait();
    c->mixed = make_copy(c->dx);
    op_hyper_pre_bwd(c->dev, c->dx, c->dm, dy, c->x, c->m, c->rstd, &c->h);
    c->in_place = make_copy(dout);
    op_hyper_post_bwd(c->dev, c->df, c->in_place, c->dm, c->in_place, c->x, c->f, c->m, &c->h);
}

static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct hc c = make(dev, params);
    fwd(&c);
    bwd(&c);
    const struct tensor all[] = {c.y, c.m, c.rstd, c.dx, c.out, c.df, c.dm, c.in_place};
    for (int i = 0; i < (c.h.n_iter ? 8 : 4); i++) o->out[o->n++] = all[i];
}

/* ---- the plain formula */

static double logistic(double x) { return 1 / (1 + exp(-x)); }

struct plain {
    double m[24], pre[4], post[4], c[4][4];
};

static double logit(const struct hc *c, const struct plain *p, int64_t v, int64_t part)
{
    return p->m[v] * value_at(c->h.scale, part) + value_at(c->h.base, v);
}

static void normalise(double c[4][4], int64_t n, double eps, bool rows)
{
    for (int64_t a = 0; a < n; a++) {
        double sum = eps;
        for (int64_t b = 0; b < n; b++) sum += rows ? c[a][b] : c[b][a];
        for (int64_t b = 0; b < n; b++) *(rows ? &c[a][b] : &c[b][a]) /= sum;
    }
}

static struct plain plain_of(const struct hc *c, int64_t t)
{
    const int64_t n = c->h.n_stream, n_col = c->x.shape[1], n_value = c->h.fn.shape[0];
    const double eps = (double)c->h.eps;
    struct plain p = {.m = {0}};
    double square = 0;
    for (int64_t i = 0; i < n_col; i++) square += pow(value_at(c->x, t * n_col + i), 2);
    for (int64_t v = 0; v < n_value; v++)
        for (int64_t i = 0; i < n_col; i++)
            p.m[v] += value_at(c->h.fn, v * n_col + i) * value_at(c->x, t * n_col + i) /
                      sqrt(square / (double)n_col + (double)c->h.norm_eps);
    for (int64_t i = 0; i < n; i++) p.pre[i] = logistic(logit(c, &p, i, 0)) + eps;
    if (!c->h.n_iter) return p;
    for (int64_t j = 0; j < n; j++) {
        double sum = 0;
        p.post[j] = 2 * logistic(logit(c, &p, n + j, 1));
        for (int64_t k = 0; k < n; k++) sum += exp(logit(c, &p, 2 * n + n * j + k, 2));
        for (int64_t k = 0; k < n; k++) p.c[j][k] = exp(logit(c, &p, 2 * n + n * j + k, 2)) / sum + eps;
    }
    for (int i = 0; i < c->h.n_iter; i++) {
        if (i) normalise(p.c, n, eps, true);
        normalise(p.c, n, eps, false);
    }
    return p;
}

static void check_token(const struct hc *c, int64_t t)
{
    const struct plain p = plain_of(c, t);
    const int64_t n = c->h.n_stream, dim = c->y.shape[1], n_value = c->h.fn.shape[0];
    for (int64_t v = 0; v < n_value; v++) assert_close(value_at(c->m, t * n_value + v), p.m[v], 1e-12);
    for (int64_t d = 0; d < dim; d++) {
        double y = 0;
        for (int64_t j = 0; j < n; j++) y += p.pre[j] * value_at(c->x, (t * n + j) * dim + d);
        assert_close(value_at(c->y, t * dim + d), y, 1e-12);
        for (int64_t k = 0; c->h.n_iter && k < n; k++) {
            double out = p.post[k] * value_at(c->f, t * dim + d);
            for (int64_t j = 0; j < n; j++) out += p.c[j][k] * value_at(c->x, (t * n + j) * dim + d);
            assert_close(value_at(c->out, (t * n + k) * dim + d), out, 1e-12);
        }
    }
}

static void is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct hc c = make(&dev, &shapes[i]);
        fwd(&c);
        for (int64_t t = 0; t < shapes[i].n_tok; t++) check_token(&c, t);
        op_check_end(&dev);
    }
}

/* ---- gradients */

static double loss(void *arg)
{
    struct hc *c = arg;
    double start = 0; /* of the gradient that the head's backward adds to */
    fwd(c);
    for (int64_t i = 0; !c->h.n_iter && i < tensor_count(c->x); i++) start += 0.25 * value_at(c->x, i);
    return probe(c->y, 6) + (c->h.n_iter ? probe(c->out, 7) : start);
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* hundreds of tiny calls */
        struct hc c = make(&dev, &shapes[i]);
        fwd(&c);
        bwd(&c);
        assert_true(gradient_error(loss, &c, c.x, c.dx) < 1e-8);
        if (!shapes[i].head) {
            assert_true(gradient_error(loss, &c, c.f, c.df) < 1e-8);
            assert_same_bits(c.in_place, c.mixed);
        }
        op_check_end(&dev);
    }
}

/* Every row and column of C sums to 1: a constant in all streams stays, plus post times f. */
static void mixing_keeps_a_constant(void **state)
{
    const struct shape shape = {3, 4, 8, 20, false, 2, 0};
    struct device dev;
    (void)state;
    op_check_begin(&dev, true);
    struct hc c = make(&dev, &shape);
    for (int64_t i = 0; i < tensor_count(c.x); i++) set_value(c.x, i, 3);
    for (int64_t i = 0; i < tensor_count(c.f); i++) set_value(c.f, i, 0);
    fwd(&c);
    for (int64_t i = 0; i < tensor_count(c.out); i++) assert_close(value_at(c.out, i), 3, 1e-4);
    op_check_end(&dev);
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 2e-6);
    for (int i = 2; i < MT_LEN(gpu_shapes); i++) op_check_case(run, &gpu_shapes[i], 2e-6);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(run, &gpu_shapes[i]);
}

int test_ops_hyper(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_the_definition),
        cmocka_unit_test(gradients),
        cmocka_unit_test(mixing_keeps_a_constant),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_hyper", tests, NULL, NULL);
}
