/* test_ops_residual.c - every op that adds to the residual stream or to its gradient rounds the sum once. The stream
 * has values of thousands in a few channels, as in trained checkpoints, and the contributions are about ten. CPU in
 * bf16 and GPU are compared with F64, element by element. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "tests/op_check.h"

enum { T = 70, IN = 64, D = 136, R = 8, E = 8, J = 3 };

/* A stream [T, D]: a few channels of 1e3 to 1e4, both signs, the others about 1. */
static struct tensor make_stream(struct device *dev)
{
    static const double large[] = {4096, -1000, 9984, -6016, 2560, -3008, 1504};
    struct tensor x = make_random(dev->act_dtype, 50, 1, T, D, -1);
    for (int64_t i = 0; i < tensor_count(x); i++)
        if (i % D % 19 == 4) set_value(x, i, large[(i / D + i % D) % MT_LEN(large)]);
    return x;
}

/* An element of the sum before rounding, and the error that the roundings of the contribution may cause. */
struct sum {
    double value, slack;
};

static void take(struct sum *s, double v)
{
    s->value += v;
    s->slack += fabs(v) / 256;
}

/* Half of the distance between neighbouring bf16 values at v. */
static double half_ulp(double v) { return ldexp(1, (int)floor(log2(fmax(fabs(v), 1e-30))) - 8); }

/* Whether this device rounds activations to bf16, and is not a dry run. */
static bool rounds(const struct device *dev)
{
    if (dev->dry_run) return false;
    dev->ops->wait();
    return dev->act_dtype == DT_BF16 || dev->round_bf16;
}

static void assert_rounded_once(const char *op, struct tensor got, int64_t i, struct sum want)
{
    const double error = fabs(value_at(got, i) - want.value);
    const double allowed = half_ulp(fabs(want.value) + want.slack) + want.slack;
    if (!(error <= allowed))
        fail_msg("%s, row %lld, column %lld: %g, exactly %g: %g away, one rounding is %g", op, (long long)(i / D),
                 (long long)(i % D), value_at(got, i), want.value, error, allowed);
}

/* ---- y = res + x W^T + bias + LoRA */

struct linear_case {
    bool bias, lora;
};
static const struct linear_case linear_cases[] = {{true, true}, {false, true}, {true, false}, {false, false}};

static void linear_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct linear_case *c = params;
    const struct weight w = make_weight(WF_BF16, 1, 2, 1, D, IN);
    const struct tensor plain = tensor_2d((void *)(uintptr_t)w.data, DT_BF16, D, IN), res = make_stream(dev);
    struct tensor x = make_random(dev->act_dtype, 2, 2, T, IN, -1), y = make_empty(dev->act_dtype, T, D, -1), xa = {0},
                  bias = {0};
    struct lora lora = {.n_seg = 1, .scale = {0.5f}, .seg_cols = {D}};
    if (c->bias) bias = make_random(DT_F32, 3, 10, D, -1, -1);
    if (c->lora) {
        lora.r = R;
        lora.a = make_random(dev->act_dtype, 4, 1, R, IN, -1);
        lora.b = make_random(dev->act_dtype, 5, 2, D, R, -1);
        xa = make_empty(dev->act_dtype, T, R, -1);
    }
    op_linear_fwd(dev, y, xa, x, &(struct proj){.w = w, .bias = bias, .lora = lora}, res);
    o->out[o->n++] = y;
    for (int64_t i = 0; rounds(dev) && i < tensor_count(y); i++) {
        struct sum s = {value_at(res, i), 0}, product = {0};
        for (int64_t k = 0; k < IN; k++) product.value += value_at(x, i / D * IN + k) * value_at(plain, i % D * IN + k);
        take(&s, product.value);
        if (c->bias) take(&s, value_at(bias, i % D));
        for (int64_t k = 0; k < lora.r; k++)
            take(&s, 0.5 * value_at(xa, i / D * R + k) * value_at(lora.b, i % D * R + k));
        assert_rounded_once("linear_fwd", y, i, s);
    }
}

/* ---- out = res + sum of gate * y; dx += dl W */

static struct route make_route(struct device *dev)
{
    struct route r = {.idx = make_empty(DT_I32, T, J, -1),
                      .gate = make_empty(dev->stat_dtype, T, J, -1),
                      .offs = make_empty(DT_I32, E + 1, -1, -1),
                      .row_slot = make_empty(DT_I32, T * J, -1, -1),
                      .slot_row = make_empty(DT_I32, T, J, -1)};
    for (int64_t s = 0; s < T * J; s++) {
        set_value(r.idx, s, (double)(s % J * 2 + s / J % 3));
        set_value(r.gate, s, (double)(float)(0.3 + 0.2 * test_value(60, (uint64_t)s)));
    }
    op_route_sort(dev, &r, E);
    return r;
}

static void combine_run(struct device *dev, const void *params, struct op_outputs *o)
{
    (void)params;
    const struct route r = make_route(dev);
    const struct tensor res = make_stream(dev), y = make_random(dev->act_dtype, 1, 20, T * J, D, -1);
    struct tensor out = make_empty(dev->act_dtype, T, D, -1);
    op_moe_combine_fwd(dev, out, res, y, &r);
    o->out[o->n++] = out;
    for (int64_t i = 0; rounds(dev) && i < tensor_count(out); i++) {
        struct sum s = {value_at(res, i), 0};
        for (int64_t slot = i / D * J; slot < i / D * J + J; slot++)
            take(&s, value_at(r.gate, slot) * value_at(y, (int64_t)value_at(r.slot_row, slot) * D + i % D));
        assert_rounded_once("moe_combine_fwd", out, i, s);
    }
}

static void router_run(struct device *dev, const void *params, struct op_outputs *o)
{
    (void)params;
    const struct route r = make_route(dev);
    const struct weight w = make_weight(WF_BF16, 1, 2, 1, E, D);
    const struct tensor plain = tensor_2d((void *)(uintptr_t)w.data, DT_BF16, E, D), old = make_stream(dev);
    const struct tensor logits = make_random(dev->stat_dtype, 2, 1, T, E, -1),
                        dgate = make_random(dev->stat_dtype, 3, 60, T, J, -1);
    const struct aux none = {0};
    const struct router how = {.kind = ROUTER_CHOSEN};
    struct tensor dx = make_copy(old);
    op_router_bwd(dev, dx, dgate, &r, logits, &w, &none, &how);
    o->out[o->n++] = dx;
    for (int64_t i = 0; rounds(dev) && i < tensor_count(dx); i++) {
        struct sum s = {value_at(old, i), 0};
        double mean = 0;
        for (int64_t slot = i / D * J; slot < i / D * J + J; slot++)
            mean += value_at(r.gate, slot) * value_at(dgate, slot);
        for (int64_t slot = i / D * J; slot < i / D * J + J; slot++) {
            const double dl = value_at(r.gate, slot) * (value_at(dgate, slot) - mean);
            take(&s, dl * value_at(plain, (int64_t)value_at(r.idx, slot) * D + i % D));
        }
        assert_rounded_once("router_bwd", dx, i, s);
    }
}

/* ---- dx += rstd (g - xhat mean(g xhat)), g = dy w */

static void norm_run(struct device *dev, const void *params, struct op_outputs *o)
{
    (void)params;
    const struct norm norm = {.eps = 1e-5f};
    const struct tensor x = make_random(dev->act_dtype, 1, 2, T, D, -1), w = make_random(DT_F32, 2, 1, D, -1, -1);
    const struct tensor dy = make_random(dev->act_dtype, 3, 30, T, D, -1), old = make_stream(dev);
    struct tensor y = make_empty(dev->act_dtype, T, D, -1), rstd = make_empty(dev->stat_dtype, T, -1, -1),
                  dx = make_copy(old);
    op_rmsnorm_fwd(dev, y, rstd, x, w, &norm);
    op_rmsnorm_bwd(dev, dx, dy, x, rstd, w);
    o->out[o->n++] = dx;
    for (int64_t t = 0; rounds(dev) && t < T; t++) {
        const double scale = value_at(rstd, t);
        double mean = 0;
        for (int64_t c = 0; c < D; c++)
            mean += value_at(dy, t * D + c) * value_at(w, c) * value_at(x, t * D + c) * scale / D;
        for (int64_t c = 0; c < D; c++) {
            struct sum s = {value_at(old, t * D + c), 0};
            take(&s, scale * value_at(dy, t * D + c) * value_at(w, c));
            take(&s, -scale * value_at(x, t * D + c) * scale * mean);
            assert_rounded_once("rmsnorm_bwd", dx, t * D + c, s);
        }
    }
}

/* ---- devices */

static void on_the_cpu(op_case_fn *run, const void *params)
{
    struct device exact, dev;
    struct err err = {{0}};
    struct op_outputs o = {.n = 0};
    op_check_begin(&exact, true);
    if (device_open(&dev, "cpu", "bf16", &err) || device_reserve(&dev, &dev.work, "work", (int64_t)16 << 20, &err))
        fail_msg("%s", err.msg);
    run(&dev, params, &o);
    device_close(&dev);
    op_check_end(&exact);
}

static void on_the_gpu(op_case_fn *run, const void *params)
{
    op_check_need_gpu();
    op_check_cuda(run, params);
}

typedef void somewhere_fn(op_case_fn *run, const void *params);

static void linear(somewhere_fn *where)
{
    for (int i = 0; i < MT_LEN(linear_cases); i++) where(linear_run, &linear_cases[i]);
}

static void linear_rounds_once(void **state)
{
    (void)state;
    linear(on_the_cpu);
}

static void others_round_once(void **state)
{
    (void)state;
    on_the_cpu(combine_run, NULL);
    on_the_cpu(router_run, NULL);
    on_the_cpu(norm_run, NULL);
}

static void linear_rounds_once_on_the_gpu_by_cublas(void **state)
{
    (void)state;
    linear(on_the_gpu);
}

static void others_round_once_on_the_gpu(void **state)
{
    (void)state;
    on_the_gpu(combine_run, NULL);
    on_the_gpu(router_run, NULL);
    on_the_gpu(norm_run, NULL);
}

int test_ops_residual(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_rounds_once),
        cmocka_unit_test(others_round_once),
        cmocka_unit_test(linear_rounds_once_on_the_gpu_by_cublas),
        cmocka_unit_test(others_round_once_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_residual", tests, NULL, NULL);
}
