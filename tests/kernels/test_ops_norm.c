/* test_ops_norm.c - rmsnorm and the norm of queries and keys; where bf16 rounds. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "tests/op_check.h"

static const struct norm once = {.eps = 1e-5f}, twice = {.eps = 1e-5f, .round_twice = true};

static double round_bf16(double x) { return bf16_to_f32(f32_to_bf16((float)x)); }

static double rstd_of(struct tensor x, int64_t first, int64_t n)
{
    double sum = 0;
    for (int64_t i = first; i < first + n; i++) sum += value_at(x, i) * value_at(x, i);
    return 1 / sqrt(sum / (double)n + (double)once.eps);
}

/* The result of a norm of x in bf16 that rounds twice (or once), with every product in f32. */
static double rounded(double x, double rstd, double w, bool two)
{
    float xhat = (float)x * (float)rstd;
    return round_bf16((double)((two ? (float)round_bf16((double)xhat) : xhat) * (float)w));
}

/* ---- rmsnorm ---- */

struct rms_shape {
    int64_t n_tok, dim;
};
static const struct rms_shape rms_shapes[] = {{0, 8}, {1, 4}, {3, 7}, {65, 256}, {2, 2880}};

struct rms {
    struct device *dev;
    struct tensor x, w, y, rstd, dx;
};

static struct rms rms_make(struct device *dev, const struct rms_shape *s)
{
    return (struct rms){.dev = dev,
                        .x = make_random(dev->act_dtype, 1, 2, s->n_tok, s->dim, -1),
                        .w = make_random(DT_F32, 2, 1, s->dim, -1, -1),
                        .y = make_empty(dev->act_dtype, s->n_tok, s->dim, -1),
                        .rstd = make_empty(dev->stat_dtype, s->n_tok, -1, -1),
                        .dx = make_zero(dev->act_dtype, s->n_tok, s->dim, -1)};
}

static void rms_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct rms n = rms_make(dev, params);
    op_rmsnorm_fwd(dev, n.y, n.rstd, n.x, n.w, &once);
    op_rmsnorm_bwd(dev, n.dx, make_probe(n.y, 3), n.x, n.rstd, n.w);
    struct tensor all[] = {n.y, n.rstd, n.dx};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static double rms_loss(void *arg)
{
    struct rms *n = arg;
    op_rmsnorm_fwd(n->dev, n->y, n->rstd, n->x, n->w, &once);
    return probe(n->y, 3);
}

static void rmsnorm(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(rms_shapes); i++) op_check_case(rms_run, &rms_shapes[i], 1e-6);
    for (int i = 0; i < MT_LEN(rms_shapes) - 1; i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* thousands of tiny calls */
        struct rms n = rms_make(&dev, &rms_shapes[i]);
        rms_loss(&n);
        int64_t dim = rms_shapes[i].dim;
        for (int64_t t = 0; t < rms_shapes[i].n_tok; t++) {
            double r = rstd_of(n.x, t * dim, dim);
            assert_close(value_at(n.rstd, t), r, 1e-14);
            for (int64_t c = 0; c < dim; c++)
                assert_close(value_at(n.y, t * dim + c), value_at(n.x, t * dim + c) * r * value_at(n.w, c), 1e-14);
        }
        op_rmsnorm_bwd(&dev, n.dx, make_probe(n.y, 3), n.x, n.rstd, n.w);
        if (n.x.shape[0] <= 3) assert_true(gradient_error(rms_loss, &n, n.x, n.dx) < 1e-8);
        rms_loss(&n); /* the finite differences changed rstd */
        struct tensor again = make_copy(n.dx);
        op_rmsnorm_bwd(&dev, again, make_probe(n.y, 3), n.x, n.rstd, n.w);
        for (int64_t c = 0; c < tensor_count(again); c++)
            assert_close(value_at(again, c), 2 * value_at(n.dx, c), 1e-14);
        op_check_end(&dev);
    }
}

/* In F32 the places of bf16 rounding have no effect; in bf16 each variant has the bits of its definition. */
static void rmsnorm_rounding(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct rms a = rms_make(&dev, &rms_shapes[3]), b = rms_make(&dev, &rms_shapes[3]);
    op_rmsnorm_fwd(&dev, a.y, a.rstd, a.x, a.w, &once);
    op_rmsnorm_fwd(&dev, b.y, b.rstd, b.x, b.w, &twice);
    assert_same_bits(a.y, b.y);
    dev.round_bf16 = true;
    op_rmsnorm_fwd(&dev, a.y, a.rstd, a.x, a.w, &once);
    op_rmsnorm_fwd(&dev, b.y, b.rstd, b.x, b.w, &twice);
    assert_same_bits(a.rstd, b.rstd);
    int64_t differ = 0, dim = a.x.shape[1];
    for (int64_t i = 0; i < tensor_count(a.y); i++) {
        double x = value_at(a.x, i), r = value_at(a.rstd, i / dim), w = value_at(a.w, i % dim);
        assert_true(value_at(a.y, i) == rounded(x, r, w, false));
        assert_true(value_at(b.y, i) == rounded(x, r, w, true));
        differ += value_at(a.y, i) != value_at(b.y, i);
    }
    assert_in_range(differ, tensor_count(a.y) / 10, tensor_count(a.y) / 2);
    op_check_end(&dev);
}

/* ---- queries and keys ---- */

struct qk_shape {
    int64_t n_tok, n_head, n_kv, head_dim;
    bool whole, values; /* values: v has a norm too */
};
/* The last four have the shapes of Qwen3-30B, OLMoE and Gemma-4. */
static const struct qk_shape qk_shapes[] = {
    {0, 2, 1, 4, false, false},    {0, 2, 1, 4, true, false},     {1, 1, 1, 2, false, false},
    {1, 4, 2, 6, true, false},     {3, 4, 2, 6, false, false},    {3, 4, 2, 6, true, false},
    {2, 4, 1, 5, true, false},     {2, 4, 1, 5, false, false},    {5, 3, 3, 8, true, false},
    {4, 6, 3, 7, false, false},    {65, 4, 2, 16, true, false},   {65, 4, 2, 16, false, false},
    {3, 32, 4, 128, false, false}, {3, 16, 16, 128, true, false}, {3, 4, 2, 6, false, true},
    {65, 3, 3, 16, false, true},   {2, 16, 8, 256, false, true},  {1, 16, 2, 512, false, true},
};

struct qk {
    struct device *dev;
    struct attn_shape shape;
    struct tensor x, qkv, raw, rstd, wq, wk, wv;
};

static struct qk qk_make(struct device *dev, const struct qk_shape *s)
{
    const int64_t n_group = s->whole ? 2 : s->n_head + (s->values ? 2 : 1) * s->n_kv;
    const int64_t width = (s->n_head + 2 * s->n_kv) * s->head_dim;
    struct qk n = {
        .dev = dev,
        .shape = {.n_head = s->n_head, .n_kv = s->n_kv, .head_dim = s->head_dim},
        .x = make_random(dev->act_dtype, 1, 2, s->n_tok, width, -1),
        .qkv = make_empty(dev->act_dtype, s->n_tok, width, -1),
        .raw = make_empty(dev->act_dtype, s->n_tok, width - (s->values ? 0 : s->n_kv * s->head_dim), -1),
        .rstd = make_empty(dev->stat_dtype, s->n_tok, n_group, -1),
        .wq = make_random(DT_F32, 2, 1, (s->whole ? s->n_head : 1) * s->head_dim, -1, -1),
        .wk = make_random(DT_F32, 3, 1, (s->whole ? s->n_kv : 1) * s->head_dim, -1, -1),
    };
    if (s->values) n.wv = make_random(DT_F32, 5, 1, s->head_dim, -1, -1);
    for (int64_t i = 1; i < tensor_count(n.wq); i += 5) set_value(n.wq, i, 0);
    for (int64_t i = 0; i < tensor_count(n.wk); i += 4) set_value(n.wk, i, 0);
    return n;
}

static void qk_fwd(struct qk *n, const struct norm *norm)
{
    for (int64_t i = 0; i < tensor_count(n->x); i++) set_value(n->qkv, i, value_at(n->x, i));
    op_qk_norm_fwd(n->dev, n->qkv, n->raw, n->rstd, n->wq, n->wk, n->wv, &n->shape, norm);
}

static struct tensor qk_bwd(struct qk *n)
{
    struct tensor dqkv = make_probe(n->x, 4);
    op_qk_norm_bwd(n->dev, dqkv, n->raw, n->rstd, n->wq, n->wk, n->wv, &n->shape);
    return dqkv;
}

static void qk_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct qk n = qk_make(dev, params);
    qk_fwd(&n, &once);
    struct tensor all[] = {n.qkv, n.raw, n.rstd, qk_bwd(&n)};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static double qk_loss(void *arg)
{
    struct qk *n = arg;
    qk_fwd(n, &once);
    return probe(n->qkv, 4);
}

/* Column c of a row: its group, the group's first column and width, and its weight. Columns of v have group -1. */
struct place {
    int64_t group, first, n;
    double w;
};
static struct place place_of(const struct qk_shape *s, const struct qk *n, int64_t c)
{
    int64_t n_q = s->n_head * s->head_dim, n_k = s->n_kv * s->head_dim;
    if (c >= n_q + n_k && !s->values) return (struct place){.group = -1};
    struct tensor w = c < n_q ? n->wq : c < n_q + n_k ? n->wk : n->wv;
    int64_t own = c < n_q ? c : c - n_q; /* column in q or in k */
    if (s->whole) return (struct place){c >= n_q, c < n_q ? 0 : n_q, c < n_q ? n_q : n_k, value_at(w, own)};
    int64_t head = c / s->head_dim;
    return (struct place){head, head * s->head_dim, s->head_dim, value_at(w, own % s->head_dim)};
}

static void qk_norm_is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(qk_shapes); i++) {
        const struct qk_shape *s = &qk_shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct qk n = qk_make(&dev, s);
        qk_fwd(&n, &once);
        struct tensor dqkv = qk_bwd(&n);
        int64_t width = n.x.shape[1];
        assert_same_bits(n.raw, tensor_cols(n.x, 0, n.raw.shape[1]));
        for (int64_t k = 0; k < tensor_count(n.x); k++) {
            struct place p = place_of(s, &n, k % width);
            double x = value_at(n.x, k);
            if (p.group < 0) { /* v: value and gradient are unchanged */
                assert_true(value_at(n.qkv, k) == x);
                assert_true(value_at(dqkv, k) == test_value(4, (uint64_t)k));
                continue;
            }
            double r = rstd_of(n.x, k / width * width + p.first, p.n);
            assert_close(value_at(n.rstd, k / width * n.rstd.shape[1] + p.group), r, 1e-14);
            assert_close(value_at(n.qkv, k), x * r * p.w, 1e-14);
        }
        op_check_end(&dev);
    }
}

static void qk_norm_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(qk_shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* thousands of tiny calls */
        struct qk n = qk_make(&dev, &qk_shapes[i]);
        qk_fwd(&n, &once);
        struct tensor dqkv = qk_bwd(&n);
        double error = 0;
        if (tensor_count(n.x) && tensor_count(n.x) < 500) error = gradient_error(qk_loss, &n, n.x, dqkv);
        if (tensor_count(n.x) >= 500) error = slope_error(qk_loss, &n, n.x, dqkv);
        if (!(error <= 1e-7)) fail_msg("shape %d: off by %g", i, error);
        op_check_end(&dev);
    }
}

static void qk_norm_runs(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(qk_shapes); i++) op_check_case(qk_run, &qk_shapes[i], 1e-6);
}

/* Tensors that are columns of wider ones give the same bits, and the columns beside them stay unchanged. */
static void qk_norm_takes_views(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    for (int i = 4; i < 6; i++) {
        struct qk n = qk_make(&dev, &qk_shapes[i]), v = qk_make(&dev, &qk_shapes[i]);
        struct tensor *views[] = {&v.qkv, &v.raw, &v.rstd}, wide[3];
        for (int k = 0; k < 3; k++) {
            int64_t cols = views[k]->shape[1];
            wide[k] = make_zero(DT_F32, views[k]->shape[0], cols + 3, -1);
            *views[k] = tensor_cols(wide[k], 2, cols);
        }
        qk_fwd(&n, &once);
        qk_fwd(&v, &once);
        assert_same_bits(v.qkv, n.qkv);
        assert_same_bits(v.raw, n.raw);
        assert_same_bits(v.rstd, n.rstd);
        struct tensor want = qk_bwd(&n);
        for (int64_t k = 0; k < tensor_count(want); k++) set_value(v.qkv, k, test_value(4, (uint64_t)k));
        op_qk_norm_bwd(&dev, v.qkv, v.raw, v.rstd, v.wq, v.wk, v.wv, &v.shape);
        assert_same_bits(v.qkv, want);
        for (int k = 0; k < 3; k++) {
            struct tensor left = tensor_cols(wide[k], 0, 2), right = tensor_cols(wide[k], wide[k].shape[1] - 1, 1);
            for (int64_t e = 0; e < tensor_count(left); e++) assert_true(value_at(left, e) == 0);
            for (int64_t e = 0; e < tensor_count(right); e++) assert_true(value_at(right, e) == 0);
        }
    }
    op_check_end(&dev);
}

/* As for rmsnorm. The op copies v without rounding, and the backward rounds only the columns of q and k. */
static void qk_norm_rounding(void **state)
{
    (void)state;
    for (int i = 10; i < 12; i++) {
        const struct qk_shape *s = &qk_shapes[i];
        struct device dev;
        op_check_begin(&dev, false);
        struct qk a = qk_make(&dev, s), b = qk_make(&dev, s);
        int64_t width = a.x.shape[1], n_qk = a.raw.shape[1], differ = 0;
        for (int64_t k = 0; k < tensor_count(a.x); k++) { /* q and k as from a linear */
            if (k % width >= n_qk) continue;
            set_value(a.x, k, round_bf16(value_at(a.x, k)));
            set_value(b.x, k, value_at(a.x, k));
        }
        qk_fwd(&a, &once);
        qk_fwd(&b, &twice);
        assert_same_bits(a.qkv, b.qkv);
        struct tensor exact = qk_bwd(&a);
        dev.round_bf16 = true;
        qk_fwd(&a, &once);
        qk_fwd(&b, &twice);
        struct tensor dqkv = qk_bwd(&a);
        assert_same_bits(a.raw, tensor_cols(a.x, 0, n_qk));
        assert_same_bits(a.rstd, b.rstd);
        for (int64_t k = 0; k < tensor_count(a.x); k++) {
            struct place p = place_of(s, &a, k % width);
            double x = value_at(a.x, k), d = value_at(exact, k);
            assert_true(value_at(dqkv, k) == (p.group < 0 ? d : round_bf16(d)));
            double r = p.group < 0 ? 0 : value_at(a.rstd, k / width * a.rstd.shape[1] + p.group);
            assert_true(value_at(a.qkv, k) == (p.group < 0 ? x : rounded(x, r, p.w, false)));
            assert_true(value_at(b.qkv, k) == (p.group < 0 ? x : rounded(x, r, p.w, true)));
            differ += value_at(a.qkv, k) != value_at(b.qkv, k);
        }
        assert_in_range(differ, tensor_count(a.raw) / 10, tensor_count(a.raw) / 2);
        op_check_end(&dev);
    }
}

/* ---- on the GPU: every width of its kernels, rows inside wider ones ---- */

/* The columns of a tensor from 8 on, without its last pad - 8 columns; all columns if pad is 0. */
static struct tensor inner(struct tensor wide, int64_t pad)
{
    return pad ? tensor_cols(wide, 8, wide.shape[1] - pad) : wide;
}

/* An output tensor, with columns around it that must not change. */
static struct tensor make_outer(struct device *dev, int64_t rows, int64_t cols, int64_t pad)
{
    return pad ? make_zero(dev->act_dtype, rows, cols + pad, -1) : make_empty(dev->act_dtype, rows, cols, -1);
}

struct gpu_rms {
    int64_t n_tok, dim, pad;
    bool twice;
};

static void gpu_rms_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct gpu_rms *p = params;
    struct norm norm = {.eps = once.eps, .round_twice = p->twice};
    struct tensor x = inner(make_random(dev->act_dtype, 1, 2, p->n_tok, p->dim + p->pad, -1), p->pad);
    struct tensor dy = inner(make_random(dev->act_dtype, 3, 1, p->n_tok, p->dim + p->pad, -1), p->pad);
    struct tensor w = make_random(DT_F32, 2, 1, p->dim, -1, -1), rstd = make_empty(dev->stat_dtype, p->n_tok, -1, -1);
    struct tensor wide_y = make_outer(dev, p->n_tok, p->dim, p->pad), y = inner(wide_y, p->pad);
    struct tensor wide_dx = make_random(dev->act_dtype, 4, 1, p->n_tok, p->dim + p->pad, -1);
    op_rmsnorm_fwd(dev, y, rstd, x, w, &norm);
    op_rmsnorm_bwd(dev, inner(wide_dx, p->pad), dy, x, rstd, w);
    for (int64_t i = 0; dev->act_dtype == DT_BF16 && !dev->dry_run && i < tensor_count(y); i++) {
        double r = value_at(rstd, i / p->dim);
        assert_true(value_at(y, i) == rounded(value_at(x, i), r, value_at(w, i % p->dim), p->twice));
    }
    struct tensor all[] = {wide_y, rstd, wide_dx};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void rmsnorm_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct gpu_rms cases[] = {
        {0, 64, 0, false},   {1, 8, 0, false},     {3, 64, 16, true},    {35, 128, 0, false},  {9, 136, 24, true},
        {7, 1024, 0, false}, {65, 2048, 16, true}, {33, 2880, 0, false}, {33, 2880, 16, true}, {5, 4096, 0, true},
        {3, 4104, 8, false}, {1, 7168, 0, true},   {2, 16384, 0, false},
    };
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(gpu_rms_run, &cases[i]);
}

struct gpu_qk {
    struct qk_shape shape;
    int64_t pad;
    bool twice;
};

static void gpu_qk_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct gpu_qk *p = params;
    struct norm norm = {.eps = once.eps, .round_twice = p->twice};
    struct qk n = qk_make(dev, &p->shape);
    int64_t n_tok = n.x.shape[0], width = n.x.shape[1], n_group = n.rstd.shape[1];
    struct tensor wide = make_random(dev->act_dtype, 8, 1, n_tok, width + p->pad, -1);
    struct tensor wide_raw = make_outer(dev, n_tok, n.raw.shape[1], p->pad);
    n.qkv = inner(wide, p->pad);
    n.raw = inner(wide_raw, p->pad);
    if (p->pad) n.rstd = tensor_cols(make_zero(dev->stat_dtype, n_tok, n_group + 3, -1), 2, n_group);
    qk_fwd(&n, &norm);
    for (int64_t i = 0; dev->act_dtype == DT_BF16 && !dev->dry_run && i < tensor_count(n.x); i++) {
        struct place at = place_of(&p->shape, &n, i % width);
        double x = value_at(n.x, i), r = at.group < 0 ? 0 : value_at(n.rstd, i / width * n_group + at.group);
        assert_true(value_at(n.qkv, i) == (at.group < 0 ? x : rounded(x, r, at.w, p->twice)));
    }
    struct tensor wide_d = make_random(dev->act_dtype, 4, 1, n_tok, width + p->pad, -1);
    op_qk_norm_bwd(dev, inner(wide_d, p->pad), n.raw, n.rstd, n.wq, n.wk, n.wv, &n.shape);
    struct tensor all[] = {wide, wide_raw, n.rstd, wide_d};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void qk_norm_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct gpu_qk cases[] = {
        {{0, 4, 2, 64, false, false}, 0, false},    {{1, 2, 1, 8, false, false}, 0, true},
        {{1, 4, 2, 64, true, false}, 0, false},     {{7, 3, 3, 24, true, false}, 16, true},
        {{5, 64, 8, 64, false, false}, 0, false},   {{33, 32, 4, 128, false, false}, 0, true},
        {{5, 32, 4, 128, false, false}, 24, false}, {{9, 16, 16, 128, true, false}, 0, false},
        {{3, 8, 2, 256, false, false}, 8, true},    {{3, 64, 8, 128, true, false}, 16, false},
        {{2, 5, 1, 136, false, false}, 0, true},    {{5, 6, 2, 80, false, false}, 0, false},
        {{7, 8, 2, 96, true, false}, 16, true},     {{33, 4, 4, 112, false, false}, 8, true},
        {{5, 12, 4, 192, false, false}, 0, false},  {{3, 4, 2, 192, true, false}, 8, false},
        {{5, 16, 8, 256, false, true}, 8, false},   {{3, 16, 2, 512, false, true}, 0, true},
    };
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(gpu_qk_run, &cases[i]);
}

int test_ops_norm(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm),
        cmocka_unit_test(rmsnorm_rounding),
        cmocka_unit_test(qk_norm_is_the_definition),
        cmocka_unit_test(qk_norm_gradients),
        cmocka_unit_test(qk_norm_runs),
        cmocka_unit_test(qk_norm_takes_views),
        cmocka_unit_test(qk_norm_rounding),
        cmocka_unit_test(rmsnorm_on_the_gpu),
        cmocka_unit_test(qk_norm_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_norm", tests, NULL, NULL);
}
