/* test_optim.c - the learning-rate schedules, and AdamW with clipping against the formula written out in C. */
#include "tests/test.h"

#include <math.h>

#include "kernels/device.h"
#include "optim/adamw.h"
#include "optim/schedule.h"

static void warmup_rises_to_the_full_rate(void **state)
{
    (void)state;
    struct schedule s = {SCHEDULE_COSINE, 2e-4, 0.1, 10, 100};
    for (int64_t step = 1; step <= 10; step++) assert_close(schedule_lr(&s, step) / 2e-4, (double)step / 10, 1e-15);
    assert_true(schedule_lr(&s, 11) < 2e-4);
    s.warmup_steps = 0;
    assert_true(schedule_lr(&s, 1) == 2e-4);
    s.warmup_steps = 100; /* the run ends with the warm-up */
    assert_true(schedule_lr(&s, 50) == 1e-4);
    assert_true(schedule_lr(&s, 100) == 2e-4);
}

static void decay_ends_at_the_least_rate(void **state)
{
    (void)state;
    struct schedule s = {SCHEDULE_COSINE, 1, 0.1, 10, 110};
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

static void a_run_of_one_step_learns(void **state)
{
    (void)state;
    for (int kind = SCHEDULE_COSINE; kind <= SCHEDULE_CONSTANT; kind++) {
        struct schedule s = {(enum schedule_kind)kind, 3e-4, 0, 0, 1};
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

static void measure_norm(struct device *dev, const struct adamw *opt, struct tensor sum2, double *norm, int64_t *n_bad)
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
    struct adamw opt = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .clip_norm = clip_norm};
    struct tensor *flat[] = {&opt.param, &opt.grad, &opt.m, &opt.v};
    for (int i = 0; i < 4; i++) device_zero(&dev, *flat[i] = arena_tensor_1d(&dev.state, dev.stat, N));
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
        adamw_update(&dev, &opt, lr, norm);
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
    device_get(&dev, got, opt.m);
    assert_true(relative_error(got, m, N) < tol);
    device_get(&dev, got, opt.v);
    assert_true(relative_error(got, v, N) < tol);
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
    check_formula(true, 1e-13, 1);   /* the norm is about 10: clips */
    check_formula(true, 1e-13, 1e3); /* does not */
    check_formula(false, 1e-6, 1);
}

/* ... whatever the size of the gradients: the corrections are right. */
static void the_first_step_moves_by_lr(void **state)
{
    (void)state;
    struct device dev;
    open_device(&dev, false);
    struct adamw opt = {.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    struct tensor *flat[] = {&opt.param, &opt.grad, &opt.m, &opt.v};
    for (int i = 0; i < 4; i++) device_zero(&dev, *flat[i] = arena_tensor_1d(&dev.state, dev.stat, 3));
    device_set(&dev, opt.grad, (const double[]){1e-3, -1, 500});
    adamw_update(&dev, &opt, 0.125, 500);
    double p[3];
    device_get(&dev, p, opt.param);
    assert_close(p[0], -0.125, 2e-6); /* eps is 1e-5 of this gradient */
    assert_close(p[1], 0.125, 1e-7);
    assert_close(p[2], -0.125, 1e-7);
    device_close(&dev);
}

static void what_is_not_finite_is_counted(void **state)
{
    (void)state;
    struct device dev;
    open_device(&dev, false);
    struct adamw opt = {.grad = arena_tensor_1d(&dev.state, dev.stat, 5)};
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

int test_optim(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warmup_rises_to_the_full_rate), cmocka_unit_test(decay_ends_at_the_least_rate),
        cmocka_unit_test(a_run_of_one_step_learns),      cmocka_unit_test(adamw_follows_the_formula),
        cmocka_unit_test(clipping_follows_the_formula),  cmocka_unit_test(the_first_step_moves_by_lr),
        cmocka_unit_test(what_is_not_finite_is_counted),
    };
    return cmocka_run_group_tests_name("optim", tests, NULL, NULL);
}
