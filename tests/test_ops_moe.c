/* test_ops_moe.c - the experts' ops: gradients against finite differences in f64, every weight format, routings from no
 * tokens to all tokens on one expert, f32 and f64, 1 to 3 threads, planned scratch; the GPU against the CPU. */
#include "tests/packed.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct device f64; /* of the tests that need only the oracle */
static int begin(void **state) { return *state = NULL, op_check_begin(&f64, true), 0; }
static int end(void **state) { return *state = NULL, op_check_end(&f64), 0; }

/* ---- one MoE layer and its tensors ---- */

/* SPREAD: all experts but the last. CROWDED: every token goes to experts 1 .. J. MIXED: three of four tokens choose the
 * middle expert first. */
enum layout { SPREAD, CROWDED, MIXED };

struct setup {
    struct weight_packing packing;
    int64_t n_tok, n_exp, top_k, dim, width, r_up, r_down;
    struct glu glu;
    bool bias;
    enum layout routing;
};

struct layer {
    struct device *dev;
    struct proj up, down;
    struct glu glu;
    struct route route;
    struct tensor x, res, pre, act, xa, y, ha, out;
    struct tensor dout, dpre, dgate, dx;
};

#define GPTOSS                                                                                                         \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 0.5f, true                                                                                \
    }
#define GPTOSS_HALVES                                                                                                  \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 0.5f, false                                                                               \
    }
#define SWIGLU                                                                                                         \
    {                                                                                                                  \
        GLU_SWIGLU, 1, 0, false                                                                                        \
    }
#define SWIGLU_PAIRS                                                                                                   \
    {                                                                                                                  \
        GLU_SWIGLU, 1, 0, true                                                                                         \
    }

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
    {{WF_MXFP4, 0, false}, 7, 5, 1, 32, 32, 3, 3, GPTOSS, true, CROWDED},
    {{WF_MXFP4, 0, false}, 1, 5, 2, 32, 32, 3, 3, GPTOSS, true, SPREAD},
};

/* J different experts for token t, ascending, never the last one. */
static void choose(int32_t *idx, int64_t t, const struct setup *s)
{
    int64_t n = s->n_exp - 1;
    bool taken[64] = {false};
    for (int64_t j = 0; j < s->top_k; j++) {
        int64_t e = s->routing == CROWDED ? 1 + j : (3 * t + j * (t + 1)) % n;
        if (s->routing == MIXED && t % 4 && j == 0) e = n / 2;
        while (taken[e]) e = (e + 1) % n;
        taken[e] = true;
    }
    for (int64_t e = 0; e < n; e++)
        if (taken[e]) *idx++ = (int32_t)e;
}

static struct route make_route(struct device *dev, const struct setup *s)
{
    int64_t n_tok = s->n_tok, top_k = s->top_k;
    struct route r = {
        .idx = make_empty(DT_I32, n_tok, top_k, -1),
        .gate = make_random(dev->stat_dtype, 11, 1, n_tok, top_k, -1),
        .offs = make_empty(DT_I32, s->n_exp + 1, -1, -1),
        .row_slot = make_empty(DT_I32, n_tok * top_k, -1, -1),
        .slot_row = make_empty(DT_I32, n_tok, top_k, -1),
    };
    for (int64_t t = 0; t < n_tok; t++) choose((int32_t *)r.idx.data + t * top_k, t, s);
    op_route_sort(dev, &r, s->n_exp);
    return r;
}

static void make_lora(struct device *dev, struct proj *p, uint64_t stream, int64_t r)
{
    const int64_t n_exp = p->w.n_exp, n_out = p->w.n_out, n_in = p->w.n_in;
    p->lora = (struct lora){.r = r, .scale = {0.75f}, .n_seg = 1, .seg_cols = {n_out}};
    if (!r) return;
    p->lora.a = make_random(dev->act_dtype, stream, 0.5, n_exp, r, n_in);
    p->lora.b = make_random(dev->act_dtype, stream + 1, 0.5, n_exp, n_out, r);
    p->grad.a = make_zero(dev->stat_dtype, n_exp, r, n_in);
    p->grad.b = make_zero(dev->stat_dtype, n_exp, n_out, r);
}

static struct layer make_layer(struct device *dev, const struct setup *s)
{
    int64_t n_tok = s->n_tok, n_row = n_tok * s->top_k, n_exp = s->n_exp, dim = s->dim, width = s->width;
    struct layer l = {.dev = dev, .glu = s->glu, .route = make_route(dev, s)};
    l.up.w = make_packed(s->packing, 1, 0.5, n_exp, 2 * width, dim);
    l.down.w = make_packed(s->packing, 2, 0.5, n_exp, dim, width);
    if (s->bias) {
        l.up.bias = make_random(DT_F32, 3, 0.5, n_exp, 2 * width, -1);
        l.down.bias = make_random(DT_F32, 4, 0.5, n_exp, dim, -1);
    }
    make_lora(dev, &l.up, 5, s->r_up);
    make_lora(dev, &l.down, 7, s->r_down);
    l.x = make_random(dev->act_dtype, 9, 1, n_tok, dim, -1);
    l.res = make_random(dev->act_dtype, 10, 1, n_tok, dim, -1);
    l.pre = make_empty(dev->act_dtype, n_row, 2 * width, -1);
    l.act = make_empty(dev->act_dtype, n_row, width, -1);
    l.y = make_empty(dev->act_dtype, n_row, dim, -1);
    l.out = make_empty(dev->act_dtype, n_tok, dim, -1);
    if (s->r_up) l.xa = make_empty(dev->act_dtype, n_row, s->r_up, -1);
    if (s->r_down) l.ha = make_empty(dev->act_dtype, n_row, s->r_down, -1);
    l.dout = make_probe(l.out, 12);
    l.dpre = make_empty(dev->act_dtype, n_row, 2 * width, -1);
    l.dgate = make_empty(dev->stat_dtype, n_tok, s->top_k, -1);
    l.dx = make_empty(dev->act_dtype, n_tok, dim, -1);
    return l;
}

static void forward(struct layer *l)
{
    op_moe_up_fwd(l->dev, l->act, l->pre, l->xa, l->x, &l->route, &l->up, &l->glu);
    op_moe_down_fwd(l->dev, l->y, l->ha, l->act, &l->route, &l->down);
    op_moe_combine_fwd(l->dev, l->out, l->res, l->y, &l->route);
}

static void backward(struct layer *l)
{
    op_moe_down_bwd(l->dev, l->dpre, l->dgate, l->act, l->dout, l->pre, l->ha, &l->route, &l->down, &l->glu);
    op_moe_up_bwd(l->dev, l->dx, l->dpre, l->x, l->xa, &l->route, &l->up);
}

static double layer_loss(void *arg)
{
    struct layer *l = arg;
    forward(l);
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
        struct layer l = make_layer(&f64, &setups[i]);
        forward(&l);
        memset(l.act.data, 0xff, (size_t)tensor_bytes(l.act)); /* the backward recomputes act */
        backward(&l);
        struct layer probe_layer = l;
        probe_layer.act = make_copy(l.act);
        check_gradient(&probe_layer, "x", i, l.x, l.dx);
        check_gradient(&probe_layer, "gate", i, l.route.gate, l.dgate);
        check_gradient(&probe_layer, "up A", i, l.up.lora.a, l.up.grad.a);
        check_gradient(&probe_layer, "up B", i, l.up.lora.b, l.up.grad.b);
        check_gradient(&probe_layer, "down A", i, l.down.lora.a, l.down.grad.a);
        check_gradient(&probe_layer, "down B", i, l.down.lora.b, l.down.grad.b);
        forward(&l);
        struct tensor act = make_copy(l.act);
        backward(&l);
        assert_same_bits(l.act, act); /* the recomputed act has the same bits */
    }
    (void)state;
}

/* The inputs of the gradients above reach both sides of every clamp. */
static void test_clamp_is_reached(void **state)
{
    struct layer l = make_layer(&f64, &setups[0]);
    int64_t above = 0, below = 0, between = 0;
    forward(&l);
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
    struct layer l = make_layer(&f64, &s);
    double limit = (double)l.glu.limit;
    for (int64_t edge = 0; edge < 2; edge++) {
        for (int64_t i = 0; i < tensor_count(l.pre); i++) {
            double sign = i % 4 == 3 ? -1 : 1; /* odd elements are `up`; every other one is at the lower limit */
            set_value(l.pre, i, sign * (edge ? nextafter(limit, 1) : limit));
        }
        backward(&l);
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
    struct layer l = make_layer(&f64, &setups[0]);
    forward(&l);
    backward(&l);
    struct tensor *grads[] = {&l.up.grad.a, &l.up.grad.b, &l.down.grad.a, &l.down.grad.b}, alone[4];
    for (int g = 0; g < 4; g++) {
        alone[g] = *grads[g];
        *grads[g] = make_empty(f64.stat_dtype, alone[g].shape[0], alone[g].shape[1], alone[g].shape[2]);
        for (int64_t i = 0; i < tensor_count(alone[g]); i++) set_value(*grads[g], i, 0.25);
    }
    backward(&l);
    for (int g = 0; g < 4; g++) check_added(*grads[g], alone[g], true);
    (void)state;
}

static void test_no_tokens(void **state)
{
    struct setup s = setups[0];
    s.n_tok = 0;
    struct layer l = make_layer(&f64, &s);
    forward(&l);
    backward(&l);
    struct tensor grads[] = {l.up.grad.a, l.up.grad.b, l.down.grad.a, l.down.grad.b};
    for (int g = 0; g < 4; g++) {
        for (int64_t i = 0; i < tensor_count(grads[g]); i++) assert_true(fabs(value_at(grads[g], i)) <= 0);
    }
    for (int64_t e = 0; e <= s.n_exp; e++) assert_int_equal(value_at(l.route.offs, e), 0);
    (void)state;
}

/* A NaN gate or a NaN up of expert 1 passes through the clamps, and affects only the tokens of that expert. */
static void test_nan_is_visible(void **state)
{
    for (int64_t column = 0; column < 2; column++) {
        struct layer l = make_layer(&f64, &setups[0]);
        set_value(l.up.bias, l.up.bias.ld + column, NAN);
        forward(&l);
        backward(&l);
        for (int64_t i = 0; i < tensor_count(l.out); i++) {
            int64_t t = i / l.out.shape[1], top_k = l.route.idx.shape[1];
            bool bad = false;
            for (int64_t j = 0; j < top_k; j++) bad |= (int64_t)value_at(l.route.idx, t * top_k + j) == 1;
            assert_int_equal(isnan(value_at(l.out, i)), bad);
            assert_int_equal(isnan(value_at(l.dx, i)), bad);
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
    struct layer l = make_layer(&f64, &setups[0]), same = make_layer(&f64, &setups[0]);
    hide_last_expert(&l.up.w);
    hide_last_expert(&l.down.w);
    forward(&l);
    backward(&l);
    forward(&same);
    backward(&same);
    assert_same_bits(l.dx, same.dx);
    (void)state;
}

/* ---- what a run writes ---- */

static void run_both_ways(struct layer *l, struct op_outputs *outputs)
{
    forward(l);
    backward(l);
    struct tensor all[] = {l->pre,   l->act, l->xa,        l->y,         l->ha,          l->out,        l->dpre,
                           l->dgate, l->dx,  l->up.grad.a, l->up.grad.b, l->down.grad.a, l->down.grad.b};
    for (int i = 0; i < MT_LEN(all); i++)
        if (all[i].ndim) outputs->out[outputs->n++] = all[i];
    if (l->dev->dry_run && tensor_count(l->out)) assert_true(isnan(value_at(l->out, 0)) && isnan(value_at(l->dx, 0)));
}

static void run_layer(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct layer l = make_layer(dev, params);
    run_both_ways(&l, outputs);
}

static void test_every_run(void **state)
{
    static const struct setup larger[] = {
        {{WF_MXFP4, 0, false}, 211, 6, 3, 96, 64, 8, 8, GPTOSS, true, SPREAD},
        {{WF_MXFP4, 0, false}, 211, 6, 1, 96, 64, 8, 8, GPTOSS, true, CROWDED},
        {{WF_NF4, 64, true}, 0, 5, 2, 32, 32, 3, 3, GPTOSS, true, SPREAD},
    };
    for (int64_t i = 0; i < MT_LEN(setups); i++) op_check_case(run_layer, &setups[i], 2e-6);
    for (int64_t i = 0; i < MT_LEN(larger); i++) op_check_case(run_layer, &larger[i], 2e-6);
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
        run_layer(&plan, &setups[i], &o);
        dev.work.used = 0;
        dev.work.cap = plan.work.peak;
        memset(dev.work.base, 0xff, (size_t)(dev.work.cap + GUARD)); /* NaN: scratch is written before it is read */
        o.n = 0;
        run_layer(&dev, &setups[i], &o);
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
        struct layer a = make_layer(&dev, &setups[i / 2]), b = make_layer(&dev, &setups[i / 2]);
        b.up.w = make_unpacked(&a.up.w);
        b.down.w = make_unpacked(&a.down.w);
        forward(&a);
        backward(&a);
        forward(&b);
        backward(&b);
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
    struct layer l = make_layer(dev, params);
    struct tensor same[3] = {{0}};
    forward(&l);
    backward(&l);
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
    struct layer l = make_layer(&f64, &setups[0]);
    forward(&l);
    const double forward_flops = f64.flops - flops;
    backward_frozen(&l); /* only the products for dx */
    assert_close(f64.flops - flops, 2 * forward_flops, 1e-12);
    for (int64_t i = 0; i < tensor_count(l.up.grad.a); i++) assert_true(fabs(value_at(l.up.grad.a, i)) <= 0);
    for (int64_t i = 0; i < MT_LEN(setups); i++) op_check_case(run_frozen, &setups[i], 2e-6);
    (void)state;
}

/* ---- the GPU ---- */

struct gpu_setup {
    struct setup s;
    int64_t expert_group; /* as in struct device */
    bool views;           /* rows of x, res, out, dout and dx have a stride larger than their length */
};

/* The same values in the middle of longer rows. */
static struct tensor in_longer_rows(struct tensor x)
{
    struct tensor y = tensor_cols(make_empty(x.dtype, x.shape[0], x.shape[1] + 24, -1), 8, x.shape[1]);
    for (int64_t i = 0; i < tensor_count(x); i++) set_value(y, i, value_at(x, i));
    return y;
}

static void run_gpu_layer(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct gpu_setup *g = params;
    struct layer l = make_layer(dev, &g->s);
    struct tensor *tokens[] = {&l.x, &l.res, &l.out, &l.dout, &l.dx};
    for (int i = 0; g->views && i < MT_LEN(tokens); i++) *tokens[i] = in_longer_rows(*tokens[i]);
    dev->expert_group = g->expert_group;
    run_both_ways(&l, outputs);
}

/* Few elements reach this clamp limit. Rounding moves some of them across it, which removes or adds their gradient. */
#define GPTOSS_2                                                                                                       \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 2, true                                                                                   \
    }
#define GPTOSS_HALVES_2                                                                                                \
    {                                                                                                                  \
        GLU_CLAMPED, 1.702f, 2, false                                                                                  \
    }

static void run_gpu_cases(const struct gpu_setup *cases, int64_t n)
{
    op_check_need_gpu();
    for (int64_t i = 0; i < n; i++) op_check_cuda(run_gpu_layer, &cases[i]);
}

/* Formats, layouts, adapters and routings, no tokens, one token: small enough for a sanitizer. */
static const struct gpu_setup small_cases[] = {
    {{{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 0, 0, GPTOSS_2, true, SPREAD}, 0, true},
    {{{WF_MXFP4, 0, false}, 1, 5, 4, 96, 160, 16, 16, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 0, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, 0, false},
    {{{WF_NVFP4, 0, true}, 65, 5, 4, 112, 80, 24, 40, SWIGLU, true, SPREAD}, 1, true},
    {{{WF_FP8, 128, false}, 33, 5, 2, 136, 264, 8, 8, SWIGLU, true, SPREAD}, 2, true},
    {{{WF_NF4, 64, false}, 65, 5, 4, 104, 72, 24, 40, SWIGLU, true, SPREAD}, 1, true},
    {{{WF_NF4, 64, true}, 7, 5, 1, 320, 136, 0, 8, SWIGLU, false, SPREAD}, 0, false},
    {{{WF_BF16, 0, false}, 70, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, CROWDED}, 1, true},
    {{{WF_BF16, 0, false}, 1, 5, 1, 72, 328, 32, 48, SWIGLU_PAIRS, true, SPREAD}, 0, false},
    {{{WF_F32, 0, false}, 33, 5, 2, 136, 264, 8, 8, GPTOSS_HALVES_2, false, SPREAD}, 2, false},
};

static void layer_on_the_gpu(void **state)
{
    (void)state;
    run_gpu_cases(small_cases, MT_LEN(small_cases));
}

/* The loops of `bench step --path`. The last case has more slots than one block selects from. */
static void loops_on_the_gpu_by_cublas(void **state)
{
    static const struct gpu_setup many = {
        {{WF_MXFP4, 0, false}, 700, 6, 4, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, 0, true};
    (void)state;
    op_check_need_gpu();
    for (int64_t i = 0; i < MT_LEN(small_cases); i++) op_check_loops(run_gpu_layer, &small_cases[i]);
    op_check_loops(run_gpu_layer, &many);
}

/* Tiles with one row, with one row too many; more row tiles than a band has (2048 rows); columns that end inside every
 * part of a tile; every lora rank with a separate kernel. */
static void layer_large_on_the_gpu(void **state)
{
    static const struct gpu_setup cases[] = {
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, 0, false},
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, 2, false},
        {{{WF_MXFP4, 0, false}, 130, 5, 1, 96, 64, 8, 8, GPTOSS_2, true, CROWDED}, 1, true},
        {{{WF_MXFP4, 0, false}, 129, 8, 2, 192, 96, 8, 0, GPTOSS_HALVES_2, false, CROWDED}, 3, false},
        {{{WF_NVFP4, 0, false}, 130, 8, 2, 256, 144, 64, 64, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_FP8, 0, false}, 130, 8, 2, 256, 144, 64, 64, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_NF4, 64, false}, 130, 8, 2, 256, 128, 64, 64, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_NF4, 64, true}, 130, 6, 2, 192, 96, 64, 8, SWIGLU_PAIRS, false, SPREAD}, 2, false},
        {{{WF_FP4, 64, false}, 130, 6, 2, 96, 64, 136, 256, GPTOSS_HALVES_2, true, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 130, 7, 4, 200, 144, 16, 16, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 2300, 5, 1, 72, 40, 8, 8, GPTOSS_2, true, CROWDED}, 0, false},
        /* adapter gradients summed in several parts: for all experts; for one in 25 parts; for one expert of 50 */
        {{{WF_MXFP4, 0, false}, 2600, 3, 2, 160, 96, 16, 64, GPTOSS_2, true, SPREAD}, 0, false},
        {{{WF_BF16, 0, false}, 6200, 3, 1, 136, 40, 32, 8, SWIGLU, false, CROWDED}, 0, true},
        {{{WF_BF16, 0, false}, 1500, 50, 2, 136, 72, 72, 24, SWIGLU, false, MIXED}, 0, false},
    };
    (void)state;
    run_gpu_cases(cases, MT_LEN(cases));
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
        cmocka_unit_test(frozen_on_the_gpu),
        cmocka_unit_test(loops_on_the_gpu_by_cublas),
        cmocka_unit_test(layer_large_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_moe", tests, NULL, NULL);
}
