/* test_optim.c - the learning-rate schedules, AdamW with clipping against the formula written in C, the sums of a step,
 * and their ops on the GPU. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "optim/adamw.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "kernels/format/quant.h"
#include "tests/op_check.h"

static void warmup_rises_to_the_full_rate(void **state)
{
    (void)state;
    struct schedule s = {.lr = 2e-4, .min_lr_ratio = 0.1, .warmup_steps = 10, .total_steps = 100};
    for (int64_t step = 1; step <= 10; step++) assert_close(schedule_lr(&s, step) / 2e-4, (double)step / 10, 1e-15);
    assert_true(schedule_lr(&s, 11) < 2e-4);
    s.warmup_steps = 0;
    assert_true(schedule_lr(&s, 1) == 2e-4);
    s.warmup_steps = 100; /* the run ends with the warm-up */
    assert_true(schedule_lr(&s, 50) == 1e-4);
    assert_true(schedule_lr(&s, 100) == 2e-4);
}

static void decay_ends_at_the_minimum_rate(void **state)
{
    (void)state;
    struct schedule s = {.lr = 1, .min_lr_ratio = 0.1, .warmup_steps = 10, .total_steps = 110};
    assert_close(schedule_lr(&s, 10), 1, 1e-15);
    assert_close(schedule_lr(&s, 35), 0.1 + 0.9 * (0.5 + sqrt(0.125)), 1e-14); /* a quarter: cos(pi/4) = sqrt(1/2) */
    assert_close(schedule_lr(&s, 60), 0.55, 1e-14);
    assert_close(schedule_lr(&s, 110), 0.1, 1e-15);
    for (int64_t step = 11; step <= 110; step++) assert_true(schedule_lr(&s, step) < schedule_lr(&s, step - 1));
    s.kind = SCHEDULE_LINEAR;
    assert_close(schedule_lr(&s, 35), 0.775, 1e-14);
    assert_close(schedule_lr(&s, 110), 0.1, 1e-15);
    s.min_lr_ratio = 0;
    assert_true(schedule_lr(&s, 110) == 0);
    s.kind = SCHEDULE_CONSTANT;
    assert_true(schedule_lr(&s, 5) == 0.5);
    assert_true(schedule_lr(&s, 110) == 1);
}

/* Values of transformers' get_wsd_schedule (linear decay), get_polynomial_decay_schedule_with_warmup and
 * get_cosine_with_hard_restarts_schedule_with_warmup, 10 steps of warm-up of 110, every tenth step. */
static void schedules_of_transformers(void **state)
{
    (void)state;
    static const struct {
        struct schedule s;
        double lr[11];
    } rows[] = {
        {{.kind = SCHEDULE_WSD, .min_lr_ratio = 0.1, .decay_steps = 30}, {1, 1, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1}},
        {{.kind = SCHEDULE_POLYNOMIAL, .min_lr_ratio = 0.1, .power = 2},
         {1, 0.829, 0.676, 0.541, 0.424, 0.325, 0.244, 0.181, 0.136, 0.109, 0.1}},
        {{.kind = SCHEDULE_RESTARTS, .cycles = 3},
         {1, 0.793893, 0.345492, 0.024472, 0.904508, 0.5, 0.095492, 0.975528, 0.654508, 0.206107, 0}},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct schedule s = rows[i].s;
        s.lr = 1;
        s.warmup_steps = 10;
        s.total_steps = 110;
        for (int64_t k = 0; k <= 10; k++) assert_true(fabs(schedule_lr(&s, 10 * (k + 1)) - rows[i].lr[k]) < 5e-7);
    }
    struct schedule longer = {
        .kind = SCHEDULE_WSD, .lr = 1, .warmup_steps = 90, .total_steps = 110, .decay_steps = 110};
    assert_true(schedule_lr(&longer, 90) == 1);
    assert_close(schedule_lr(&longer, 100), 0.5, 1e-15);
}

static void a_run_of_one_step_learns(void **state)
{
    (void)state;
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_RESTARTS; kind++) {
        struct schedule s = {.kind = (enum schedule_kind)kind, .lr = 3e-4, .total_steps = 1, .power = 2, .cycles = 3};
        assert_true(schedule_lr(&s, 1) == 3e-4);
        s.warmup_steps = 1;
        assert_true(schedule_lr(&s, 1) == 3e-4);
    }
}

/* ---- AdamW */

enum { N = 1003, STEPS = 7 };

static void open_device(struct device *dev, bool oracle)
{
    struct err err;
    if (oracle)
        device_open_oracle(dev);
    else if (device_open(dev, "cpu", "fp32", &err))
        fail_msg("%s", err.msg);
    if (device_reserve(dev, &dev->state, "state", 1 << 20, &err)) fail_msg("%s", err.msg);
    if (device_reserve(dev, &dev->work, "work", 1 << 20, &err)) fail_msg("%s", err.msg);
}

static void measure_norm(struct device *dev, const struct optimizer *opt, struct tensor sum2, double *norm,
                         int64_t *n_bad)
{
    double sums[2];
    op_sumsq(dev, sum2, opt->grad);
    device_get(dev, sums, sum2);
    *norm = sqrt(sums[0]);
    *n_bad = (int64_t)sums[1];
}

static void check_formula(bool oracle, double tol, double clip_norm)
{
    static double p[N], m[N], v[N], g[N], got[N];
    struct device dev;
    open_device(&dev, oracle);
    struct optimizer opt = {.kind = &optimizer_adamw,
                            .beta1 = 0.9,
                            .beta2 = 0.999,
                            .eps = 1e-8,
                            .weight_decay = 0.01,
                            .clip_norm = clip_norm};
    struct tensor *flat[] = {&opt.param, &opt.grad, &opt.state[0], &opt.state[1]};
    for (int i = 0; i < 4; i++) device_zero(&dev, *flat[i] = arena_tensor_1d(&dev.state, dev.stat_dtype, N));
    struct tensor sum2 = arena_tensor_1d(&dev.state, DT_F64, 2);
    for (int i = 0; i < N; i++) {
        p[i] = (double)(float)test_value(1, (uint64_t)i);
        m[i] = v[i] = 0;
    }
    device_set(&dev, opt.param, p);

    const double b1 = 0.9f, b2 = 0.999f, eps = 1e-8f, decay = 0.01f; /* the op takes floats */
    for (int t = 1; t <= STEPS; t++) {
        double lr = (double)(float)(1e-2 / t), sum = 0, norm;
        int64_t n_bad;
        for (int i = 0; i < N; i++) {
            g[i] = (double)(float)test_value((uint64_t)t + 10, (uint64_t)i);
            sum += g[i] * g[i];
        }
        device_set(&dev, opt.grad, g);
        measure_norm(&dev, &opt, sum2, &norm, &n_bad);
        assert_close(norm / sqrt(sum), 1, 1e-12);
        assert_int_equal(n_bad, 0);
        optimizer_update(&opt, &dev, lr, norm);
        double clip = clip_norm > 0 && clip_norm < sqrt(sum) ? (double)(float)(clip_norm / (sqrt(sum) + 1e-6)) : 1;
        for (int i = 0; i < N; i++) {
            double c1 = (double)(float)(1 - pow(b1, t)), c2 = (double)(float)(1 - pow(b2, t));
            m[i] = b1 * m[i] + (1 - b1) * clip * g[i];
            v[i] = b2 * v[i] + (1 - b2) * clip * g[i] * clip * g[i];
            p[i] = p[i] * (1 - lr * decay) - lr * (m[i] / c1) / (sqrt(v[i] / c2) + eps);
        }
        assert_int_equal(opt.step, t);
    }
    device_get(&dev, got, opt.param);
    assert_true(relative_error(got, p, N) < tol);
    device_get(&dev, got, opt.state[0]);
    assert_true(relative_error(got, m, N) < tol);
    device_get(&dev, got, opt.state[1]);
    assert_true(relative_error(got, v, N) < tol);
    device_close(&dev);
}

/* Groups with other rates, and a part of the parameters as with ZeRO-1: each element's update is that of an optimizer
 * with its rate, bit for bit. */
static void groups_have_their_rates(void **state)
{
    (void)state;
    static const struct param_group groups[] = {
        {0, 100, 0, false, 1}, {100, 50, 0, false, 16}, {150, 350, 1, false, 16}, {500, 400, 1, true, 0.5}};
    enum { PART = 120, END = 903 }; /* the last 103 are padding */
    static double p[N], g[N], got[N], want[3][N];
    struct device dev;
    open_device(&dev, false);
    for (int i = 0; i < N; i++) {
        p[i] = (double)(float)test_value(1, (uint64_t)i);
        g[i] = (double)(float)test_value(2, (uint64_t)i);
    }
    for (int run = 0; run < 4; run++) {
        static const double rates[] = {1, 16, 0.5, 1};
        struct optimizer opt = {
            .kind = &optimizer_adamw, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
        if (run == 3) opt.group = groups, opt.n_group = MT_LEN(groups), opt.first = PART;
        opt.n_state = run == 3 ? END - PART : N;
        opt.param = arena_tensor_1d(&dev.state, DT_F32, N);
        opt.grad = arena_tensor_1d(&dev.state, DT_F32, N);
        device_set(&dev, opt.param, p);
        device_set(&dev, opt.grad, g);
        optimizer_alloc(&opt, &dev);
        for (int step = 0; step < 3; step++) optimizer_update(&opt, &dev, 1e-2 * rates[run], 1);
        device_get(&dev, run == 3 ? got : want[run], opt.param);
    }
    for (int i = 0; i < N; i++) {
        const int rate = i < 100 ? 0 : i < 500 ? 1 : 2;
        assert_true(got[i] == (i < PART || i >= END ? p[i] : want[rate][i]));
    }
    device_close(&dev);
}

static void adamw_follows_the_formula(void **state)
{
    (void)state;
    check_formula(true, 1e-13, 0);
    check_formula(false, 1e-6, 0);
}

static void clipping_follows_the_formula(void **state)
{
    (void)state;
    check_formula(true, 1e-13, 1);   /* the norm is about 10: clipped */
    check_formula(true, 1e-13, 1e3); /* not clipped */
    check_formula(false, 1e-6, 1);
}

/* With the bias corrections, the first step has size lr for gradients of any size. */
static void the_first_step_moves_by_lr(void **state)
{
    (void)state;
    struct device dev;
    open_device(&dev, false);
    struct optimizer opt = {.kind = &optimizer_adamw, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    struct tensor *flat[] = {&opt.param, &opt.grad, &opt.state[0], &opt.state[1]};
    for (int i = 0; i < 4; i++) device_zero(&dev, *flat[i] = arena_tensor_1d(&dev.state, dev.stat_dtype, 3));
    device_set(&dev, opt.grad, (const double[]){1e-3, -1, 500});
    optimizer_update(&opt, &dev, 0.125, 500);
    double p[3];
    device_get(&dev, p, opt.param);
    assert_close(p[0], -0.125, 2e-6); /* eps is 1e-5 of this gradient */
    assert_close(p[1], 0.125, 1e-7);
    assert_close(p[2], -0.125, 1e-7);
    device_close(&dev);
}

static void non_finite_values_are_counted(void **state)
{
    (void)state;
    struct device dev;
    open_device(&dev, false);
    struct optimizer opt = {.grad = arena_tensor_1d(&dev.state, dev.stat_dtype, 5)};
    struct tensor sum2 = arena_tensor_1d(&dev.state, DT_F64, 2);
    double norm;
    int64_t n_bad;
    device_set(&dev, opt.grad, (const double[]){1, NAN, 2, INFINITY, -INFINITY});
    measure_norm(&dev, &opt, sum2, &norm, &n_bad);
    assert_int_equal(n_bad, 3);
    device_set(&dev, opt.grad, (const double[]){1, 3, 1, 3, 4});
    measure_norm(&dev, &opt, sum2, &norm, &n_bad);
    assert_int_equal(n_bad, 0);
    assert_close(norm, 6, 1e-15);
    device_close(&dev);
}

/* ---- the sums of a step ---- */

struct sums {
    int64_t n_label, n_exp;
};

static struct tensor make_numbers(int64_t n, int below, uint64_t stream)
{
    struct tensor x = make_empty(DT_I32, n, -1, -1);
    for (int64_t i = 0; i < n; i++) ((int32_t *)x.data)[i] = (int32_t)(rng_u64(stream, (uint64_t)i) % (unsigned)below);
    return x;
}

static void sums_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct sums *p = params;
    struct tensor nll = make_random(dev->stat_dtype, 1, 3, p->n_label, -1, -1), hit = make_numbers(p->n_label, 2, 2);
    struct tensor kl = {0}, loss = make_random(DT_F64, 3, 100, 3, -1, -1),
                  aux_loss = make_random(DT_F64, 4, 1, 1, -1, -1);
    struct aux aux = {.count = make_random(dev->stat_dtype, 7, 50, p->n_exp, -1, -1),
                      .prob = make_random(dev->stat_dtype, 8, 9, p->n_exp, -1, -1)};
    if (p->n_exp % 20) kl = make_random(dev->stat_dtype, 9, 2, p->n_label, -1, -1); /* else absent */
    op_loss_sum(dev, loss, nll, hit, kl);
    op_aux_sum(dev, aux_loss, &aux, 0.25);
    struct tensor all[] = {loss, aux_loss};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

/* Rows and gates of each expert. n_exp experts have 0 to 99 rows each, of 3 experts a token. */
static void experts_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const int64_t n_exp = ((const struct sums *)params)->n_exp;
    struct tensor rows = make_random(DT_F64, 5, 100, n_exp, -1, -1), gates = make_random(DT_F64, 6, 100, n_exp, -1, -1);
    struct tensor offs = make_numbers(n_exp + 1, 100, 6);
    int32_t *off = offs.data;
    off[0] = 0;
    for (int64_t e = 0; e < n_exp; e++) off[e + 1] += off[e];
    off[n_exp] += (3 - off[n_exp] % 3) % 3;
    const int64_t n_row = off[n_exp], n_tok = n_row / 3;
    struct route r = {.offs = offs, .row_slot = make_zero(DT_I32, n_row, -1, -1)};
    for (int64_t i = 0; i < n_row; i++) ((int32_t *)r.row_slot.data)[i] = (int32_t)(n_row - 1 - i);
    r.idx = make_zero(DT_I32, n_tok, 3, -1);
    r.slot_row = make_zero(DT_I32, n_tok, 3, -1);
    r.gate = make_random(dev->stat_dtype, 7, 1, n_tok, 3, -1);
    op_expert_sums(dev, rows, gates, &r);
    o->out[0] = rows, o->out[1] = gates;
    o->n = 2;
}

static const struct sums sums_cases[] = {{0, 1}, {1, 32}, {1000, 60}, {1025, 128}, {40001, 512}, {7, 1500}};

static void the_sums_of_a_step(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(sums_cases); i++) op_check_case(sums_run, &sums_cases[i], 1e-6);
    for (int i = 0; i < MT_LEN(sums_cases); i++) op_check_case(experts_run, &sums_cases[i], 1e-6);
    struct device dev;
    op_check_begin(&dev, true);
    struct tensor nll = make_random(DT_F64, 1, 3, 3, -1, -1), hit = make_i32((const int32_t[]){1, 0, 1}, 3);
    struct tensor kl = make_random(DT_F64, 4, 1, 3, -1, -1);
    struct tensor loss = make_zero(DT_F64, 3, -1, -1), aux_loss = make_zero(DT_F64, 1, -1, -1);
    struct tensor rows = make_zero(DT_F64, 3, -1, -1), gates = make_zero(DT_F64, 3, -1, -1);
    struct route r = {.offs = make_i32((const int32_t[]){0, 1, 1, 4}, 4),
                      .row_slot = make_i32((const int32_t[]){2, 3, 0, 1}, 4),
                      .idx = make_zero(DT_I32, 2, 2, -1),
                      .slot_row = make_zero(DT_I32, 2, 2, -1),
                      .gate = make_random(DT_F64, 5, 1, 2, 2, -1)};
    struct aux aux = {.count = make_random(DT_F64, 2, 9, 2, -1, -1), .prob = make_random(DT_F64, 3, 1, 2, -1, -1)};
    double nll_sum = value_at(nll, 0) + value_at(nll, 1) + value_at(nll, 2), aux_now = 0;
    for (int64_t i = 0; i < 2; i++) aux_now += value_at(aux.count, i) * value_at(aux.prob, i);
    for (int step = 1; step <= 2; step++) {
        op_loss_sum(&dev, loss, nll, hit, kl);
        op_aux_sum(&dev, aux_loss, &aux, 0.5);
        op_expert_sums(&dev, rows, gates, &r);
        assert_close(value_at(loss, 0), step * nll_sum, 1e-14);
        assert_close(value_at(loss, 1), step * 2, 0);
        assert_close(value_at(loss, 2), step * (value_at(kl, 0) + value_at(kl, 1) + value_at(kl, 2)), 1e-14);
        assert_close(value_at(aux_loss, 0), step * 0.5 * aux_now, 1e-14);
        for (int64_t e = 0; e < 3; e++) assert_close(value_at(rows, e), step * (double[]){1, 0, 3}[e], 0);
        assert_close(value_at(gates, 0), step * value_at(r.gate, 2), 1e-14);
        assert_close(value_at(gates, 1), 0, 0);
        assert_close(value_at(gates, 2), step * (value_at(r.gate, 3) + value_at(r.gate, 0) + value_at(r.gate, 1)),
                     1e-14);
    }
    op_check_end(&dev);
}

/* ---- on the GPU ---- */

static void sums_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(sums_cases); i++) op_check_cuda(sums_run, &sums_cases[i]);
    for (int i = 0; i < MT_LEN(sums_cases); i++) op_check_cuda(experts_run, &sums_cases[i]);
}

/* ---- the CPU beside a GPU */

struct host_arrays {
    float *p, *m, *v, *g;
    uint16_t *working;
    int64_t n;
};

static float *values_of(struct device *dev, struct tensor x)
{
    float *values = mem_array(tensor_count(x) + 1, sizeof(float));
    device_get_f32(dev, values, x);
    return values;
}

static struct host_arrays host_arrays(struct device *dev, struct tensor p, struct tensor m, struct tensor v,
                                      struct tensor g)
{
    const int64_t n = tensor_count(p);
    return (struct host_arrays){.p = values_of(dev, p),
                                .m = values_of(dev, m),
                                .v = values_of(dev, v),
                                .g = values_of(dev, g),
                                .working = mem_array(n + 1, sizeof(uint16_t)),
                                .n = n};
}

static void free_host_arrays(struct host_arrays *h)
{
    mem_free(h->p);
    mem_free(h->m);
    mem_free(h->v);
    mem_free(h->g);
    mem_free(h->working);
}

static bool same_or_nan(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

/* Checks one step on the CPU against the results of cuda_adamw and cuda_cast, bit for bit. */
static void check_host_step(struct device *dev, struct host_arrays *h, const struct adamw_step *s, struct tensor p,
                            struct tensor m, struct tensor v, struct tensor working)
{
    float *got[] = {values_of(dev, p), values_of(dev, m), values_of(dev, v), values_of(dev, working)};
    adamw_host(h->p, h->m, h->v, h->g, h->working, h->n, s, 3);
    for (int64_t i = 0; i < h->n; i++) {
        assert_true(same_or_nan(h->p[i], got[0][i]));
        assert_true(same_or_nan(h->m[i], got[1][i]));
        assert_true(same_or_nan(h->v[i], got[2][i]));
        assert_true(same_or_nan(bf16_to_f32(h->working[i]), got[3][i]));
    }
    for (int i = 0; i < MT_LEN(got); i++) mem_free(got[i]);
}

/* adamw_host, AdamW on the CPU beside a GPU, against the CPU's op_adamw, which may fuse other products; any number of
 * threads gives the same bits. */
static void the_cpu_beside_a_gpu(void **state)
{
    (void)state;
    enum { MANY = 50001 };
    struct device dev;
    struct err err;
    const struct adamw_step s = {0.01f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.5f, 0.19f, 0.001999f};
    if (device_open(&dev, "cpu", "fp32", &err)) fail_msg("%s", err.msg);
    struct tensor x[4];
    for (int i = 0; i < 4; i++) x[i] = make_random(DT_F32, 70 + (uint64_t)i, 1, MANY, -1, -1);
    for (int64_t i = 0; i < MANY; i++) set_value(x[2], i, fabs(value_at(x[2], i)));
    set_value(x[0], 3, NAN);
    set_value(x[0], 5, INFINITY);
    struct host_arrays a = host_arrays(&dev, x[0], x[1], x[2], x[3]), b = host_arrays(&dev, x[0], x[1], x[2], x[3]);
    adamw_host(a.p, a.m, a.v, a.g, a.working, MANY, &s, 1);
    adamw_host(b.p, b.m, b.v, b.g, b.working, MANY, &s, 7);
    op_adamw(&dev, x[0], x[1], x[2], x[3], &s);
    assert_memory_equal(a.p, b.p, MANY * sizeof(float));
    assert_memory_equal(a.working, b.working, MANY * sizeof(uint16_t));
    for (int64_t i = 0; i < MANY; i++) {
        assert_int_equal(a.working[i], isnan(a.p[i]) ? 0x7fff : f32_to_bf16(a.p[i]));
        if (!isfinite(a.p[i])) continue;
        assert_close(a.p[i], value_at(x[0], i), 1e-6);
        assert_close(a.m[i], value_at(x[1], i), 1e-6);
        assert_close(a.v[i], value_at(x[2], i), 1e-6);
    }
    free_host_arrays(&a);
    free_host_arrays(&b);
    device_close(&dev);
}

/* Sums over stat, act and an array that begins in the middle of 16 bytes; then an update and a copy. */
static void flat_run(struct device *dev, const void *params, struct op_outputs *o)
{
    int64_t n = *(const int64_t *)params;
    struct adamw_step s = {0.01f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.5f, 0.19f, 0.001999f};
    struct tensor p = make_random(dev->stat_dtype, 50, 1, n, -1, -1),
                  g = make_random(dev->stat_dtype, 51, 1, n + 1, -1, -1);
    struct tensor m = make_random(dev->stat_dtype, 52, 1, n, -1, -1),
                  v = make_random(dev->stat_dtype, 53, 0.1, n, -1, -1);
    struct tensor act = make_random(dev->act_dtype, 54, 1, n, -1, -1), copy = make_empty(dev->act_dtype, n, -1, -1);
    struct tensor sum = make_empty(DT_F64, 2, -1, -1), of_act = make_empty(DT_F64, 2, -1, -1);
    struct tensor of_odd = make_empty(DT_F64, 2, -1, -1);
    for (int64_t i = 0; i < n; i++) set_value(v, i, fabs(value_at(v, i)));
    op_sumsq(dev, sum, tensor_rows(g, 0, n));
    op_sumsq(dev, of_act, act);
    op_sumsq(dev, of_odd, tensor_rows(g, 1, n));
    struct host_arrays before = host_arrays(dev, p, m, v, tensor_rows(g, 0, n));
    op_adamw(dev, p, m, v, tensor_rows(g, 0, n), &s);
    op_cast(dev, copy, p);
    if (dev->act_dtype == DT_BF16 && !dev->dry_run) check_host_step(dev, &before, &s, p, m, v, copy);
    free_host_arrays(&before);
    for (int64_t i = 0; dev->act_dtype == DT_BF16 && !dev->dry_run && i < n; i++)
        assert_true(value_at(copy, i) == (double)bf16_to_f32(f32_to_bf16((float)value_at(p, i))));
    struct tensor all[] = {sum, of_act, of_odd, p, m, v, copy};
    memcpy(o->out, all, sizeof(all));
    o->n = MT_LEN(all);
}

static void flat_arrays_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const int64_t sizes[] = {0, 1, 7, 8, 1023, 65536, 65543, 400001};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_cuda(flat_run, &sizes[i]);
}

/* Counts the non-finite values; the sum is not finite either. */
static void bad_run(struct device *dev, const void *params, struct op_outputs *o)
{
    int64_t n = *(const int64_t *)params;
    struct tensor x[] = {make_random(dev->stat_dtype, 60, 1, n, -1, -1), make_random(dev->act_dtype, 61, 1, n, -1, -1)};
    for (int k = 0; k < 2; k++) {
        struct tensor out = make_empty(DT_F64, 2, -1, -1);
        for (int64_t i = 0; i < n; i += 1 + n / 5) set_value(x[k], i, i % 3 ? (double)NAN : -INFINITY);
        set_value(x[k], n - 1, INFINITY);
        op_sumsq(dev, out, x[k]);
        if (!dev->dry_run) assert_true(!isfinite(value_at(out, 0)));
        o->out[o->n++] = tensor_rows(out, 1, 1);
    }
}

static void non_finite_values_are_counted_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const int64_t sizes[] = {6, 1000, 70001};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_cuda(bad_run, &sizes[i]);
}

/* Sums in f32 of values and of rows 2^30 times as large, whose bits depend on the order. */
static void order_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const int64_t n = *(const int64_t *)params;
    struct tensor y = make_random(dev->stat_dtype, 56, 1, 1, n, -1), before = make_copy(y),
                  x = make_random(dev->stat_dtype, 57, 1 << 30, 3, n, -1);
    op_add_in_order(dev, tensor_1d(y.data, y.dtype, n), x);
    for (int64_t i = 0; !dev->dry_run && i < n; i++) {
        double want = value_at(before, i);
        for (int64_t p = 0; p < 3; p++) {
            want += value_at(x, p * n + i);
            if (dev->stat_dtype == DT_F32) want = (float)want;
        }
        assert_true(value_at(y, i) == want);
    }
    o->out[o->n++] = y;
}

static void rows_are_added_in_order(void **state)
{
    (void)state;
    static const int64_t sizes[] = {0, 1, 700};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_case(order_run, &sizes[i], 1e-6);
}

static void rows_are_added_in_order_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const int64_t sizes[] = {0, 1, 700};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_cuda(order_run, &sizes[i]);
}

/* Columns 3 and 4 of rows of n + 5 become zero, and nothing else changes. */
static void clear_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const int64_t n = *(const int64_t *)params;
    struct tensor x = make_random(dev->stat_dtype, 55, 1, n, n + 5, -1), before = make_copy(x);
    op_clear(dev, tensor_cols(x, 3, 2));
    for (int64_t i = 0; !dev->dry_run && i < n * (n + 5); i++) {
        const int64_t col = i % (n + 5);
        assert_true(value_at(x, i) == (col == 3 || col == 4 ? 0 : value_at(before, i)));
    }
    o->out[o->n++] = x;
}

static void columns_are_cleared(void **state)
{
    (void)state;
    static const int64_t sizes[] = {0, 1, 300};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_case(clear_run, &sizes[i], 1e-6);
}

static void columns_are_cleared_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const int64_t sizes[] = {0, 1, 300};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_cuda(clear_run, &sizes[i]);
}

/* ---- 8-bit moments: bitsandbytes' formula in numpy (fixtures/quant/adam8.txt, made by parity/make_adam8.py) */

enum { CODED = 300, CODED_STEPS = 4 };

static void read_line(FILE *f, const char *name, int64_t n, double *values, bool hex)
{
    char word[16];
    assert_int_equal(fscanf(f, "%15s", word), 1);
    assert_string_equal(word, name);
    for (int64_t i = 0; i < n; i++) {
        union {
            uint32_t bits;
            float value;
        } x;
        assert_int_equal(fscanf(f, "%15s", word), 1);
        x.bits = (uint32_t)strtoul(word, NULL, hex ? 16 : 10);
        values[i] = hex ? (double)x.value : (double)x.bits;
    }
}

static void eight_bits_follow_bitsandbytes(void **state)
{
    (void)state;
    static double x[CODED], want[CODED];
    static float values[2][CODED];
    uint8_t codes[CODED], again[CODED];
    struct device dev;
    open_device(&dev, false);
    FILE *f = fopen(fixture("quant/adam8.txt"), "r");
    assert_non_null(f);
    struct optimizer opt = {.kind = &optimizer_adamw8, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .n_state = CODED};
    opt.param = arena_tensor_1d(&dev.state, DT_F32, CODED);
    opt.grad = arena_tensor_1d(&dev.state, DT_F32, CODED);
    optimizer_alloc(&opt, &dev);
    assert_int_equal(optimizer_state_bytes(&opt), 2 * (CODED + 2 * 4));
    read_line(f, "p", CODED, x, true);
    device_set(&dev, opt.param, x);
    for (int step = 0; step < CODED_STEPS; step++) {
        read_line(f, "g", CODED, x, true);
        device_set(&dev, opt.grad, x);
        optimizer_update(&opt, &dev, 1e-2, 1);
    }
    read_line(f, "p", CODED, want, true);
    device_get(&dev, x, opt.param);
    assert_true(relative_error(x, want, CODED) < 1e-6);
    for (int k = 0; k < 2; k++) {
        read_line(f, k ? "v" : "m", CODED, want, false);
        device_download(&dev, codes, opt.state[k].data, CODED);
        for (int i = 0; i < CODED; i++) assert_int_equal(codes[i], (int)want[i]);
        read_line(f, "scale", 2, want, true);
        device_get(&dev, x, opt.scale[k]);
        assert_true(relative_error(x, want, 2) < 1e-6);
        optimizer_get_state(&opt, &dev, k, values[k]); /* as checkpoints have them: codes and scales come back */
        optimizer_set_state(&opt, &dev, k, values[k]);
        device_download(&dev, again, opt.state[k].data, CODED);
        assert_memory_equal(again, codes, CODED);
        device_get(&dev, want, opt.scale[k]);
        assert_true(x[0] == want[0] && x[1] == want[1]);
    }
    fclose(f);
    device_close(&dev);
}

/* Parameters without gradients keep their values and moments of 0, also a whole block of them. */
static void eight_bits_keep_zeros(void **state)
{
    (void)state;
    enum { M = 600 };
    static double p[M], g[M], got[M];
    static float moments[M];
    struct device dev;
    open_device(&dev, false);
    struct optimizer opt = {.kind = &optimizer_adamw8, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .n_state = M};
    opt.param = arena_tensor_1d(&dev.state, DT_F32, M);
    opt.grad = arena_tensor_1d(&dev.state, DT_F32, M);
    optimizer_alloc(&opt, &dev);
    for (int i = 0; i < M; i++) {
        p[i] = (double)(float)test_value(1, (uint64_t)i);
        g[i] = i < 256 && i % 3 ? test_value(2, (uint64_t)i) : 0;
    }
    device_set(&dev, opt.param, p);
    device_set(&dev, opt.grad, g);
    for (int step = 0; step < 3; step++) optimizer_update(&opt, &dev, 1e-2, 1);
    device_get(&dev, got, opt.param);
    for (int k = 0; k < 2; k++) {
        optimizer_get_state(&opt, &dev, k, moments);
        for (int i = 0; i < M; i++) assert_true((moments[i] == 0) == (g[i] == 0));
    }
    for (int i = 0; i < M; i++) assert_true((got[i] == p[i]) == (g[i] == 0));
    device_close(&dev);
}

static void coded_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const int64_t n = *(const int64_t *)params, n_block = (n + ADAMW8_BLOCK - 1) / ADAMW8_BLOCK;
    struct adamw_step s = {0.01f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.5f, 0.19f, 0.001999f};
    struct tensor p = make_random(dev->stat_dtype, 50, 1, n, -1, -1), map = make_empty(DT_F32, 2, 256, -1);
    struct adamw8_states states = {.map = map};
    quant_dynamic_map(map.data);
    quant_dynamic_map_unsigned((float *)map.data + 256);
    for (int k = 0; k < 2; k++) {
        states.code[k] = make_zero(DT_U8, n, -1, -1);
        states.scale[k] = make_zero(DT_F32, n_block, -1, -1);
    }
    for (uint64_t step = 0; step < 3; step++)
        op_adamw8(dev, p, &states, make_random(dev->stat_dtype, 60 + step, 1, n, -1, -1), &s);
    o->out[o->n++] = p;
    for (int k = 0; k < 2; k++) o->out[o->n++] = states.scale[k];
}

static void eight_bits_on_every_device(void **state)
{
    (void)state;
    static const int64_t sizes[] = {0, 1, 256, 1000, 65536};
    for (int i = 0; i < MT_LEN(sizes); i++)
        op_check_case(coded_run, &sizes[i], 1e-3); /* f64 may round to other codes */
}

static void eight_bits_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const int64_t sizes[] = {0, 1, 256, 1000, 65536};
    for (int i = 0; i < MT_LEN(sizes); i++) op_check_cuda(coded_run, &sizes[i]);
}

int test_optim(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warmup_rises_to_the_full_rate),
        cmocka_unit_test(decay_ends_at_the_minimum_rate),
        cmocka_unit_test(schedules_of_transformers),
        cmocka_unit_test(groups_have_their_rates),
        cmocka_unit_test(a_run_of_one_step_learns),
        cmocka_unit_test(adamw_follows_the_formula),
        cmocka_unit_test(clipping_follows_the_formula),
        cmocka_unit_test(the_first_step_moves_by_lr),
        cmocka_unit_test(non_finite_values_are_counted),
        cmocka_unit_test(the_sums_of_a_step),
        cmocka_unit_test(the_cpu_beside_a_gpu),
        cmocka_unit_test(sums_on_the_gpu),
        cmocka_unit_test(eight_bits_follow_bitsandbytes),
        cmocka_unit_test(eight_bits_keep_zeros),
        cmocka_unit_test(eight_bits_on_every_device),
        cmocka_unit_test(eight_bits_on_the_gpu),
        cmocka_unit_test(columns_are_cleared),
        cmocka_unit_test(rows_are_added_in_order),
        cmocka_unit_test(rows_are_added_in_order_on_the_gpu),
        cmocka_unit_test(columns_are_cleared_on_the_gpu),
        cmocka_unit_test(flat_arrays_on_the_gpu),
        cmocka_unit_test(non_finite_values_are_counted_on_the_gpu),
    };
    return cmocka_run_group_tests_name("optim", tests, NULL, NULL);
}
