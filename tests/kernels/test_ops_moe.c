/* test_ops_moe.c - the experts' ops: every weight format, routings from no tokens to all tokens on one expert, planned
 * scratch. */
#include "tests/expert_layer.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct device f64; /* of the tests that need only the oracle */
static int begin(void **state) { return *state = NULL, op_check_begin(&f64, true), 0; }
static int end(void **state) { return *state = NULL, op_check_end(&f64), 0; }

static const struct setup setups[] = {
    {{WF_MXFP4, 0, false}, 7, 5, 2, 32, 32, 3, 3, GPTOSS, true, SPREAD},
    {{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 3, 0, SWIGLU, false, SPREAD},
    {{WF_NF4, 64, false}, 7, 5, 2, 70, 50, 0, 3, GPTOSS_HALVES, true, SPREAD},
    {{WF_NF4, 32, true}, 7, 5, 2, 64, 32, 3, 3, SWIGLU_PAIRS, false, SPREAD},
    {{WF_FP4, 64, false}, 7, 5, 2, 32, 32, 3, 3, SWIGLU, true, SPREAD},
    {{WF_NVFP4, 0, false}, 7, 5, 2, 48, 32, 3, 3, SWIGLU, false, SPREAD},
    {{WF_FP8, 0, false}, 7, 5, 2, 33, 31, 3, 3, SWIGLU, false, SPREAD},
    {{WF_FP8, 128, false}, 5, 3, 2, 160, 136, 3, 0, SWIGLU, false, SPREAD},
    {{WF_FP4, 64, true}, 7, 5, 2, 34, 30, 0, 0, GPTOSS, true, SPREAD},
    {{WF_BF16, 0, false}, 7, 5, 2, 33, 31, 3, 3, GPTOSS, true, SPREAD},
    {{WF_F32, 0, false}, 5, 5, 4, 32, 32, 3, 3, SWIGLU, false, SPREAD},
    {{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 3, 3, SWIGLU_CLAMPED, false, SPREAD},
    {{WF_MXFP4, 0, false}, 7, 5, 1, 32, 32, 3, 3, GPTOSS, true, CROWDED},
    {{WF_MXFP4, 0, false}, 1, 5, 2, 32, 32, 3, 3, GPTOSS, true, SPREAD},
    {{WF_NF4, 64, false}, 6, 3, 3, 32, 32, 3, 3, SWIGLU, false, ALL},
    {{WF_F32, 0, false}, 7, 5, 2, 33, 31, 3, 3, GEGLU, false, SPREAD},
    {{WF_MXFP4, 0, false}, 7, 5, 2, 32, 32, 3, 3, RELU2, true, SPREAD},
    {{WF_BF16, 0, false}, 7, 5, 2, 33, 31, 3, 0, RELU2, false, CROWDED},
};
enum { WITH_CLAMP = 0, WITHOUT_GATE = (int)MT_LEN(setups) - 2 };

static double layer_loss(void *arg)
{
    struct layer *l = arg;
    expert_layer_fwd(l);
    return probe(l->out, 12);
}

/* ---- gradients ---- */

static void check_gradient(struct layer *l, const char *name, int64_t setup, struct tensor x, struct tensor dx)
{
    if (!x.ndim) return;
    double error = gradient_error(layer_loss, l, x, dx);
    if (!(error <= 1e-6)) fail_msg("setup %lld: gradient of %s is off by %g", (long long)setup, name, error);
}

static void test_gradients(void **state)
{
    f64.n_threads = 1; /* thousands of tiny runs */
    for (int64_t i = 0; i < MT_LEN(setups); i++) {
        struct layer l = expert_layer_make(&f64, &setups[i]);
        expert_layer_fwd(&l);
        memset(l.act.data, 0xff, (size_t)tensor_bytes(l.act)); /* the backward recomputes act */
        expert_layer_bwd(&l);
        struct layer probe_layer = l;
        probe_layer.act = make_copy(l.act);
        check_gradient(&probe_layer, "x", i, l.x, l.dx);
        check_gradient(&probe_layer, "gate", i, l.route.gate, l.dgate);
        check_gradient(&probe_layer, "up A", i, l.up.lora.a, l.up.grad.a);
        check_gradient(&probe_layer, "up B", i, l.up.lora.b, l.up.grad.b);
        check_gradient(&probe_layer, "down A", i, l.down.lora.a, l.down.grad.a);
        check_gradient(&probe_layer, "down B", i, l.down.lora.b, l.down.grad.b);
        expert_layer_fwd(&l);
        struct tensor act = make_copy(l.act);
        expert_layer_bwd(&l);
        assert_same_bits(l.act, act); /* the recomputed act has the same bits */
    }
    (void)state;
}

/* The inputs of the gradients above reach both sides of every clamp. */
static void test_clamp_is_reached(void **state)
{
    struct layer l = expert_layer_make(&f64, &setups[0]);
    int64_t above = 0, below = 0, between = 0;
    expert_layer_fwd(&l);
    for (int64_t i = 0; i < tensor_count(l.pre); i++) {
        double v = value_at(l.pre, i), limit = (double)l.glu.limit;
        above += v > limit;
        below += v < -limit;
        between += fabs(v) < limit;
    }
    assert_true(above > 20 && below > 20 && between > 20);
    (void)state;
}

/* gate = limit and up = +-limit pass the gradient; the next larger number does not. */
static void test_clamp_edge(void **state)
{
    struct setup s = setups[0];
    s.r_up = s.r_down = 0;
    struct layer l = expert_layer_make(&f64, &s);
    double limit = (double)l.glu.limit;
    for (int64_t edge = 0; edge < 2; edge++) {
        for (int64_t i = 0; i < tensor_count(l.pre); i++) {
            double sign = i % 4 == 3 ? -1 : 1; /* odd elements are `up`; every other one is at the lower limit */
            set_value(l.pre, i, sign * (edge ? nextafter(limit, 1) : limit));
        }
        expert_layer_bwd(&l);
        for (int64_t i = 0; i < tensor_count(l.dpre); i++) {
            double d = value_at(l.dpre, i);
            assert_true(edge ? d >= 0 && d <= 0 : d < 0 || d > 0);
        }
    }
    (void)state;
}

/* Gradients are accumulated; those of an expert without tokens keep every bit. */
static void check_added(struct tensor grad, struct tensor alone, bool idle_last)
{
    int64_t n = tensor_count(grad) / grad.shape[0], idle = tensor_count(grad) - (idle_last ? n : 0);
    for (int64_t i = 0; i < tensor_count(grad); i++) {
        double v = value_at(grad, i) - 0.25;
        if (i >= idle) assert_true(v >= 0 && v <= 0);
        assert_close(v, value_at(alone, i), 1e-12);
    }
}

static void test_idle_experts(void **state)
{
    struct layer l = expert_layer_make(&f64, &setups[0]);
    expert_layer_fwd(&l);
    expert_layer_bwd(&l);
    struct tensor *grads[] = {&l.up.grad.a, &l.up.grad.b, &l.down.grad.a, &l.down.grad.b}, alone[4];
    for (int g = 0; g < 4; g++) {
        alone[g] = *grads[g];
        *grads[g] = make_empty(f64.stat_dtype, alone[g].shape[0], alone[g].shape[1], alone[g].shape[2]);
        for (int64_t i = 0; i < tensor_count(alone[g]); i++) set_value(*grads[g], i, 0.25);
    }
    expert_layer_bwd(&l);
    for (int g = 0; g < 4; g++) check_added(*grads[g], alone[g], true);
    (void)state;
}

static void test_no_tokens(void **state)
{
    struct setup s = setups[0];
    s.n_tok = 0;
    struct layer l = expert_layer_make(&f64, &s);
    expert_layer_fwd(&l);
    expert_layer_bwd(&l);
    struct tensor grads[] = {l.up.grad.a, l.up.grad.b, l.down.grad.a, l.down.grad.b};
    for (int g = 0; g < 4; g++) {
        for (int64_t i = 0; i < tensor_count(grads[g]); i++) assert_true(fabs(value_at(grads[g], i)) <= 0);
    }
    for (int64_t e = 0; e <= s.n_exp; e++) assert_int_equal(value_at(l.route.offs, e), 0);
    (void)state;
}

/* A NaN gate or a NaN up of expert 1 passes through the clamps and the ReLU, and affects only the tokens of that
 * expert. */
static void test_nan_is_visible(void **state)
{
    for (int64_t i = 0; i < 3; i++) {
        const int64_t column = i % 2;
        struct layer l = expert_layer_make(&f64, &setups[i < 2 ? WITH_CLAMP : WITHOUT_GATE]);
        set_value(l.up.bias, l.up.bias.ld + column, NAN);
        expert_layer_fwd(&l);
        expert_layer_bwd(&l);
        for (int64_t k = 0; k < tensor_count(l.out); k++) {
            int64_t t = k / l.out.shape[1], top_k = l.route.idx.shape[1];
            bool bad = false;
            for (int64_t j = 0; j < top_k; j++) bad |= (int64_t)value_at(l.route.idx, t * top_k + j) == 1;
            assert_int_equal(isnan(value_at(l.out, k)), bad);
            assert_int_equal(isnan(value_at(l.dx, k)), bad);
        }
    }
    (void)state;
}

/* Moves the nibbles before a page that cannot be read, so that a read beyond the last expert faults. */
static void hide_last_expert(struct weight *w)
{
    int64_t page = sysconf(_SC_PAGESIZE), bytes = (w->n_exp - 1) * w->n_out * w->n_in / 2;
    int64_t room = (bytes + page - 1) / page * page;
    char *base = mmap(NULL, (size_t)(room + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED);
    memcpy(base + room - bytes, w->data, (size_t)bytes);
    assert_int_equal(mprotect(base + room, (size_t)page, PROT_NONE), 0);
    w->data = base + room - bytes;
}

static void test_idle_is_not_read(void **state)
{
    struct layer l = expert_layer_make(&f64, &setups[0]), same = expert_layer_make(&f64, &setups[0]);
    hide_last_expert(&l.up.w);
    hide_last_expert(&l.down.w);
    expert_layer_fwd(&l);
    expert_layer_bwd(&l);
    expert_layer_fwd(&same);
    expert_layer_bwd(&same);
    assert_same_bits(l.dx, same.dx);
    (void)state;
}

/* ---- what a run writes ---- */

static void test_every_run(void **state)
{
    static const struct setup larger[] = {
        {{WF_MXFP4, 0, false}, 211, 6, 3, 96, 64, 8, 8, GPTOSS, true, SPREAD},
        {{WF_MXFP4, 0, false}, 211, 6, 1, 96, 64, 8, 8, GPTOSS, true, CROWDED},
        {{WF_NF4, 64, true}, 0, 5, 2, 32, 32, 3, 3, GPTOSS, true, SPREAD},
    };
    for (int64_t i = 0; i < MT_LEN(setups); i++) op_check_case(expert_layer_run, &setups[i], 2e-6);
    for (int64_t i = 0; i < MT_LEN(larger); i++) op_check_case(expert_layer_run, &larger[i], 2e-6);
    (void)state;
}

/* Scratch stays inside the measured size: a work arena of exactly that size, followed by a guard. */
static void test_scratch(void **state)
{
    enum { GUARD = 65536 };
    struct device dev, plan;
    struct op_outputs o = {.n = 0};
    op_check_begin(&dev, false);
    dev.n_threads = 3;
    struct arena whole = dev.work;
    for (int64_t i = 0; i < MT_LEN(setups); i++) {
        device_dry_run(&plan, &dev);
        o.n = 0;
        expert_layer_run(&plan, &setups[i], &o);
        dev.work.used = 0;
        dev.work.cap = plan.work.peak;
        memset(dev.work.base, 0xff, (size_t)(dev.work.cap + GUARD)); /* NaN: scratch is written before it is read */
        o.n = 0;
        expert_layer_run(&dev, &setups[i], &o);
        for (int k = 0; k < o.n; k++) assert_finite(o.out[k]);
        for (int64_t k = 0; k < GUARD; k++) assert_int_equal((unsigned char)dev.work.base[dev.work.cap + k], 0xff);
    }
    dev.work.cap = whole.cap;
    op_check_end(&dev);
    (void)state;
}

/* A packed weight and the same one decoded give the same bits, in both precisions. */
static void test_packed_equals_decoded(void **state)
{
    for (int64_t i = 0; i < 2 * MT_LEN(setups); i++) {
        struct device dev;
        op_check_begin(&dev, i % 2);
        struct layer a = expert_layer_make(&dev, &setups[i / 2]), b = expert_layer_make(&dev, &setups[i / 2]);
        b.up.w = make_unpacked(&a.up.w);
        b.down.w = make_unpacked(&a.down.w);
        expert_layer_fwd(&a);
        expert_layer_bwd(&a);
        expert_layer_fwd(&b);
        expert_layer_bwd(&b);
        assert_finite(a.out);
        assert_same_bits(a.out, b.out);
        assert_same_bits(a.dx, b.dx);
        if (a.up.lora.r) assert_same_bits(a.up.grad.a, b.up.grad.a);
        op_check_end(&dev);
    }
    (void)state;
}

/* Adapters whose gradients are not needed: the other outputs keep every bit. */
static void backward_frozen(struct layer *l)
{
    struct proj up = l->up, down = l->down;
    up.grad = down.grad = (struct lora_grad){0};
    op_moe_down_bwd(l->dev, l->dpre, l->dgate, l->act, l->dout, l->pre, l->ha, &l->route, &down, &l->glu);
    op_moe_up_bwd(l->dev, l->dx, l->dpre, l->x, l->xa, &l->route, &up);
}

/* out, dx, dpre and dgate of both computations are equal. */
static void run_frozen(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct layer l = expert_layer_make(dev, params);
    struct tensor same[3] = {{0}};
    expert_layer_fwd(&l);
    expert_layer_bwd(&l);
    if (!dev->dry_run) dev->ops->wait();
    if (!dev->dry_run) same[0] = make_copy(l.dx), same[1] = make_copy(l.dpre), same[2] = make_copy(l.dgate);
    backward_frozen(&l);
    const struct tensor now[] = {l.dx, l.dpre, l.dgate};
    for (int i = 0; i < 3; i++) {
        if (!dev->dry_run) dev->ops->wait();
        if (!dev->dry_run) assert_same_bits(now[i], same[i]);
        outputs->out[outputs->n++] = now[i];
    }
}

static void test_frozen(void **state)
{
    const double flops = f64.flops;
    struct layer l = expert_layer_make(&f64, &setups[0]);
    expert_layer_fwd(&l);
    const double forward_flops = f64.flops - flops;
    backward_frozen(&l); /* only the products for dx */
    assert_close(f64.flops - flops, 2 * forward_flops, 1e-12);
    for (int64_t i = 0; i < tensor_count(l.up.grad.a); i++) assert_true(fabs(value_at(l.up.grad.a, i)) <= 0);
    for (int64_t i = 0; i < MT_LEN(setups); i++) op_check_case(run_frozen, &setups[i], 2e-6);
    (void)state;
}

/* ---- the GPU ---- */

/* Formats, layouts, adapters and routings, no tokens, one token: small enough for a sanitizer. */
static const struct gpu_setup small_cases[] = {
    {{{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 0, 0, GPTOSS_2, true, SPREAD}, 0, true},
    {{{WF_MXFP4, 0, false}, 1, 5, 4, 96, 160, 16, 16, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 0, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 65, 5, 4, 128, 96, 24, 40, SWIGLU_CLAMPED_2, false, SPREAD}, 1, true},
    {{{WF_NVFP4, 0, true}, 65, 5, 4, 112, 80, 24, 40, SWIGLU, true, SPREAD}, 1, true},
    {{{WF_FP8, 128, false}, 33, 5, 2, 136, 264, 8, 8, SWIGLU, true, SPREAD}, 2, true},
    {{{WF_NF4, 64, false}, 65, 5, 4, 104, 72, 24, 40, SWIGLU, true, SPREAD}, 1, true},
    {{{WF_NF4, 64, true}, 7, 5, 1, 320, 136, 0, 8, SWIGLU, false, SPREAD}, 0, false},
    {{{WF_BF16, 0, false}, 70, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, CROWDED}, 1, true},
    {{{WF_BF16, 0, false}, 1, 5, 1, 72, 328, 32, 48, SWIGLU_PAIRS, true, SPREAD}, 0, false},
    {{{WF_F32, 0, false}, 33, 5, 2, 136, 264, 8, 8, GPTOSS_HALVES_2, false, SPREAD}, 2, false},
    {{{WF_MXFP4, 0, false}, 33, 3, 3, 96, 64, 16, 8, GPTOSS_2, true, ALL}, 0, true},
    {{{WF_NF4, 64, false}, 9, 1, 1, 64, 48, 256, 136, SWIGLU, false, ALL}, 0, false},
    {{{WF_BF16, 0, false}, 70, 5, 2, 96, 136, 8, 8, GEGLU, true, CROWDED}, 0, true},
    {{{WF_NF4, 64, false}, 33, 5, 4, 104, 72, 24, 0, GEGLU, false, SPREAD}, 1, false},
    {{{WF_BF16, 0, false}, 70, 5, 2, 96, 136, 8, 8, RELU2, true, CROWDED}, 0, true},
    {{{WF_NF4, 64, false}, 33, 5, 4, 104, 72, 24, 0, RELU2, false, SPREAD}, 2, false},
    {{{WF_MXFP4, 0, false}, 0, 5, 2, 96, 64, 8, 8, RELU2, true, SPREAD}, 0, false},
};
static const struct gpu_setup grouped_cases[] = {
    /* products that decode packed experts themselves: from one tile of rows to five, with few and with many in the
       last; the kernels for few, some and many rows per expert */
    {{{WF_MXFP4, 0, false}, 97, 5, 1, 96, 160, 16, 16, GPTOSS_2, true, CROWDED}, 0, false},
    {{{WF_MXFP4, 0, false}, 129, 5, 1, 96, 64, 0, 24, GPTOSS_2, true, CROWDED}, 1, false},
    {{{WF_MXFP4, 0, false}, 270, 5, 1, 64, 96, 8, 8, SWIGLU_CLAMPED_2, false, CROWDED}, 0, true},
    {{{WF_MXFP4, 0, false}, 597, 5, 1, 64, 160, 8, 0, GPTOSS_2, false, CROWDED}, 0, false},
    {{{WF_MXFP4, 0, false}, 220, 3, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 300, 2, 1, 224, 96, 0, 24, SWIGLU_CLAMPED_2, false, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 520, 3, 1, 96, 224, 72, 0, GPTOSS_HALVES_2, true, CROWDED}, 1, false},
    {{{WF_MXFP4, 0, false}, 33, 5, 4, 416, 224, 8, 8, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 222, 2, 1, 96, 224, 16, 8, SWIGLU_CLAMPED_2, false, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 270, 3, 1, 288, 64, 0, 72, GPTOSS_2, true, CROWDED}, 1, false},
    {{{WF_MXFP4, 0, false}, 310, 4, 1, 96, 160, 8, 8, GPTOSS_2, true, CROWDED}, 0, false},
    {{{WF_BF16, 0, false}, 140, 4, 2, 256, 256, 8, 8, GEGLU, false, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 220, 3, 2, 96, 64, 8, 8, GEGLU, false, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 40, 5, 2, 96, 160, 8, 8, RELU2, true, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 250, 5, 2, 96, 96, 16, 0, RELU2, false, SPREAD}, 0, true},
    {{{WF_MXFP4, 0, false}, 310, 4, 1, 96, 160, 8, 8, RELU2, true, CROWDED}, 0, false},
    /* more tiles than multiprocessors, so that a block has several; adapters that copy no rows */
    {{{WF_BF16, 0, false}, 40, 256, 8, 64, 128, 0, 72, SWIGLU, false, SPREAD}, 0, true},
    {{{WF_BF16, 0, false}, 40, 256, 8, 64, 104, 8, 8, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_NF4, 64, false}, 9, 40, 22, 64, 72, 8, 8, RELU2, false, SPREAD}, 0, true}, /* many experts per token */
};

static void layer_on_the_gpu(void **state)
{
    (void)state;
    expert_layer_on_gpu(small_cases, MT_LEN(small_cases));
    expert_layer_on_gpu(grouped_cases, MT_LEN(grouped_cases));
}

/* Tiles with one row, experts with one row more than a tile; more row tiles than a band has (2048 rows); columns that
 * end inside every part of a tile; every lora rank with a separate kernel. */
static void layer_large_on_the_gpu(void **state)
{
    static const struct gpu_setup cases[] = {
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, 0, false},
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, 2, false},
        {{{WF_MXFP4, 0, false}, 130, 5, 1, 96, 64, 8, 8, GPTOSS_2, true, CROWDED}, 1, true},
        {{{WF_MXFP4, 0, false}, 129, 8, 2, 192, 96, 8, 0, GPTOSS_HALVES_2, false, CROWDED}, 3, false},
        {{{WF_MXFP4, 0, false}, 130, 8, 2, 256, 160, 64, 64, SWIGLU_CLAMPED_2, false, SPREAD}, 0, false},
        {{{WF_NVFP4, 0, false}, 130, 8, 2, 256, 144, 64, 64, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_FP8, 0, false}, 130, 8, 2, 256, 144, 64, 64, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_NF4, 64, false}, 130, 8, 2, 256, 128, 64, 64, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_NF4, 64, true}, 130, 6, 2, 192, 96, 64, 8, SWIGLU_PAIRS, false, SPREAD}, 2, false},
        {{{WF_FP4, 64, false}, 130, 6, 2, 96, 64, 136, 256, GPTOSS_HALVES_2, true, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 130, 7, 4, 200, 144, 16, 16, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 130, 6, 4, 200, 488, 8, 8, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 300, 4, 2, 200, 384, 24, 8, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_NF4, 64, false}, 130, 5, 2, 192, 256, 0, 8, SWIGLU, false, CROWDED}, 2, false},
        {{{WF_BF16, 0, false}, 2300, 5, 1, 72, 40, 8, 8, GPTOSS_2, true, CROWDED}, 0, false},
        /* adapter gradients summed in several parts: for all experts; for one in 25 parts; for one expert of 50 */
        {{{WF_MXFP4, 0, false}, 2600, 3, 2, 160, 96, 16, 64, GPTOSS_2, true, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 6200, 3, 1, 136, 40, 32, 8, SWIGLU, false, CROWDED}, 0, true},
        {{{WF_BF16, 0, false}, 1500, 50, 2, 136, 72, 72, 24, SWIGLU, false, MIXED}, 0, false},
        /* rows gathered before the products, which have many columns */
        {{{WF_BF16, 0, false}, 130, 5, 2, 72, 2824, 16, 8, SWIGLU, false, SPREAD}, 0, true},
        {{{WF_BF16, 0, false}, 130, 5, 2, 72, 2824, 16, 8, RELU2, false, SPREAD}, 0, true},
        {{{WF_BF16, 0, false}, 70, 6, 4, 72, 2824, 32, 24, SWIGLU, true, CROWDED}, 2, false},
        /* gradients in several ranges of columns */
        {{{WF_BF16, 0, false}, 1300, 3, 2, 904, 264, 16, 8, SWIGLU, false, SPREAD}, 0, true},
        {{{WF_MXFP4, 0, false}, 700, 6, 2, 1056, 288, 8, 16, GPTOSS_2, true, CROWDED}, 0, false},
    };
    (void)state;
    expert_layer_on_gpu(cases, MT_LEN(cases));
}

/* More experts than the ring has places, each decoded while the product with an earlier one runs; some have no rows. */
static void decoded_ahead_on_the_gpu(void **state)
{
    static const struct gpu_setup cases[] = {
        {{{WF_MXFP4, 0, false}, 1930, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, 0, false},
        {{{WF_MXFP4, 0, false}, 1850, 6, 3, 192, 128, 16, 0, SWIGLU, false, CROWDED}, 0, true},
        {{{WF_MXFP4, 0, false}, 3480, 9, 2, 64, 96, 0, 24, GPTOSS_HALVES_2, true, MIXED}, 0, false},
        {{{WF_MXFP4, 0, false}, 7690, 10, 1, 64, 64, 0, 0, GPTOSS_2, false, ENDS}, 0, false},
        {{{WF_MXFP4, 0, false}, 1930, 5, 2, 96, 64, 8, 8, RELU2, true, SPREAD}, 0, false},
    };
    (void)state;
    expert_layer_on_gpu(cases, MT_LEN(cases));
}

static void frozen_on_the_gpu(void **state)
{
    static const struct setup cases[] = {
        {{WF_MXFP4, 0, false}, 65, 5, 4, 96, 160, 16, 16, GPTOSS_2, true, SPREAD},
        {{WF_NF4, 64, false}, 65, 5, 2, 128, 64, 8, 72, SWIGLU, false, SPREAD},
    };
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(run_frozen, &cases[i]);
    (void)state;
}

int test_ops_moe(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_gradients, begin, end),
        cmocka_unit_test_setup_teardown(test_clamp_is_reached, begin, end),
        cmocka_unit_test_setup_teardown(test_clamp_edge, begin, end),
        cmocka_unit_test_setup_teardown(test_idle_experts, begin, end),
        cmocka_unit_test_setup_teardown(test_no_tokens, begin, end),
        cmocka_unit_test_setup_teardown(test_nan_is_visible, begin, end),
        cmocka_unit_test_setup_teardown(test_idle_is_not_read, begin, end),
        cmocka_unit_test(test_every_run),
        cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_packed_equals_decoded),
        cmocka_unit_test_setup_teardown(test_frozen, begin, end),
        cmocka_unit_test(layer_on_the_gpu),
        cmocka_unit_test(decoded_ahead_on_the_gpu),
        cmocka_unit_test(frozen_on_the_gpu),
        cmocka_unit_test(layer_large_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_moe", tests, NULL, NULL);
}
