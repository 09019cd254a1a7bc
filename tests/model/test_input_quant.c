/* test_input_quant.c - quantised inputs of the experts: values against independent tables, straight-through gradients
 * and masks against finite differences, the GPU against the CPU; calibration and whole runs. */
#include "tests/packed.h"
#include "tests/process.h"
#include "tests/recorded.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/layers/input_quant.h"
#include "train/session/calibrate.h"

/* ---- a layer of experts ---- */

enum { N_TOK = 9, N_EXP = 4, TOP_K = 2, DIM = 64, WIDTH = 32, N_ROW = N_TOK * TOP_K, R = 8 };

struct setup {
    const char *format;
    float amax[2]; /* of x and of the activation; smaller than their largest values */
    struct glu glu;
    const char *weights; /* NULL: not quantised */
    bool merged;
};
static const struct setup setups[] = {
    {"fp8", {0.7f, 0.25f}, {GLU_CLAMPED, 1.702f, 0.5f, true}, NULL, false},
    {"int8", {0.6f, 0.1f}, {GLU_SWIGLU, 1, 0, false}, NULL, false},
    {"nvfp4", {0.8f, 0.3f}, {GLU_CLAMPED, 1.702f, 0.5f, false}, NULL, false},
    {"nvfp4", {0.6f, 0.1f}, {GLU_SWIGLU, 1, 0, true}, "mxfp4", true},
    {"int8-narrow", {0.6f, 0.2f}, {GLU_CLAMPED, 1.702f, 0.5f, true}, "fp8", true},
    {"int8", {0.6f, 0.4f}, {GLU_RELU2, 0, 0, false}, NULL, false},
    {"nvfp4", {0.6f, 0.4f}, {GLU_RELU2, 0, 0, false}, "mxfp4", true},
};

struct layer {
    struct device *dev;
    struct proj up, down;
    struct glu glu;
    struct route route;
    struct tensor x, res, pre, act, xa, y, ha, out, dout, dpre, dgate, dx;
};

static struct route make_route(struct device *dev)
{
    struct route r = {.idx = make_empty(DT_I32, N_TOK, TOP_K, -1),
                      .gate = make_random(dev->stat_dtype, 11, 1, N_TOK, TOP_K, -1),
                      .offs = make_empty(DT_I32, N_EXP + 1, -1, -1),
                      .row_slot = make_empty(DT_I32, N_ROW, -1, -1),
                      .slot_row = make_empty(DT_I32, N_TOK, TOP_K, -1)};
    for (int64_t t = 0; t < N_TOK; t++) { /* the last expert has no rows */
        set_value(r.idx, 2 * t, (double)(t % 2));
        set_value(r.idx, 2 * t + 1, 2);
    }
    op_route_sort(dev, &r, N_EXP);
    return r;
}

static struct proj make_proj(struct device *dev, uint64_t stream, int64_t n_out, int64_t n_in, const struct setup *s,
                             float amax)
{
    struct proj p = {.w = make_packed((struct weight_packing){WF_MXFP4, 0, false}, stream, 0.5, N_EXP, n_out, n_in),
                     .bias = make_random(DT_F32, stream + 1, 0.5, N_EXP, n_out, -1)};
    struct err err;
    p.lora = (struct lora){.r = R, .n_seg = 1, .seg_cols = {n_out}, .scale = {0.75f}};
    p.lora.a = make_random(dev->act_dtype, stream + 2, 0.25, N_EXP, R, n_in);
    p.lora.b = make_random(dev->act_dtype, stream + 3, 0.25, N_EXP, n_out, R);
    p.lora.master_a = make_random(dev->stat_dtype, stream + 2, 0.25, N_EXP, R, n_in);
    p.lora.master_b = make_random(dev->stat_dtype, stream + 3, 0.25, N_EXP, n_out, R);
    p.grad.a = make_zero(dev->stat_dtype, N_EXP, R, n_in);
    p.grad.b = make_zero(dev->stat_dtype, N_EXP, n_out, R);
    assert_int_equal(fakequant_parse(&p.in.format, s->format, &err), 0);
    p.in.amax = make_empty(DT_F32, 1, -1, -1);
    set_value(p.in.amax, 0, (double)amax);
    if (!s->weights) return p;
    assert_int_equal(fakequant_parse(&p.quant.format, s->weights, &err), 0);
    p.lora.merged = s->merged;
    p.quant.n_part = 1;
    p.quant.part_rows[0] = n_out;
    p.quant.amax = make_empty(DT_F32, N_EXP, -1, -1);
    op_proj_amax(dev, p.quant.amax, &p);
    return p;
}

static struct layer make_layer(struct device *dev, const struct setup *s)
{
    const enum dtype t = dev->act_dtype;
    const int64_t n_pre = glu_cols(&s->glu, WIDTH);
    struct layer l = {.dev = dev, .glu = s->glu, .route = make_route(dev)};
    l.up = make_proj(dev, 1, n_pre, DIM, s, s->amax[0]);
    l.down = make_proj(dev, 5, DIM, WIDTH, s, s->amax[1]);
    l.x = make_random(t, 9, 1, N_TOK, DIM, -1);
    l.res = make_random(t, 10, 1, N_TOK, DIM, -1);
    l.pre = make_empty(t, N_ROW, n_pre, -1);
    l.act = make_empty(t, N_ROW, WIDTH, -1);
    l.xa = make_empty(t, N_ROW, R, -1);
    l.y = make_empty(t, N_ROW, DIM, -1);
    l.ha = make_empty(t, N_ROW, R, -1);
    l.out = make_empty(t, N_TOK, DIM, -1);
    l.dout = make_probe(l.out, 12);
    l.dpre = make_empty(t, N_ROW, n_pre, -1);
    l.dgate = make_empty(dev->stat_dtype, N_TOK, TOP_K, -1);
    l.dx = make_empty(t, N_TOK, DIM, -1);
    return l;
}

/* As model/layers/experts.c. */
static void forward(struct layer *l)
{
    const int64_t mark = arena_mark(&l->dev->work);
    const struct tensor x = input_quant_fwd(l->dev, &l->up, l->x);
    op_moe_up_fwd(l->dev, l->act, l->pre, l->xa, x, &l->route, &l->up, &l->glu);
    arena_release(&l->dev->work, mark);
    input_quant_act(l->dev, &l->down, l->act, l->pre, &l->glu);
    op_moe_down_fwd(l->dev, l->y, l->ha, l->act, &l->route, &l->down);
    op_moe_combine_fwd(l->dev, l->out, l->res, l->y, &l->route);
}

static void backward(struct layer *l)
{
    const int64_t mark = arena_mark(&l->dev->work);
    input_quant_act(l->dev, &l->down, l->act, l->pre, &l->glu);
    copy_on(l->dev, l->dpre, l->pre);
    op_moe_down_bwd(l->dev, l->dpre, l->dgate, l->act, l->dout, l->dpre, l->ha, &l->route, &l->down, &l->glu);
    const struct tensor x = input_quant_fwd(l->dev, &l->up, l->x);
    op_moe_up_bwd(l->dev, l->dx, l->dpre, x, l->xa, &l->route, &l->up);
    input_quant_bwd(l->dev, &l->up, l->dx, l->x);
    arena_release(&l->dev->work, mark);
}

/* ---- values ---- */

/* The nearest of n ascending magnitudes, those of codes 0, 1, ...; ties go to the even code; beyond the last: the last.
 */
static double nearest(double a, const double *table, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++) {
        const double now = fabs(a - table[i]), before = fabs(a - table[best]);
        if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return table[best];
}
static double e4m3(double a)
{
    double table[127];
    for (int c = 0; c < 127; c++) table[c] = c < 8 ? ldexp(c, -9) : ldexp(8 + c % 8, c / 8 - 10);
    return nearest(a, table, 127);
}
static double e2m1(double a) { return nearest(a, (const double[]){0, 0.5, 1, 1.5, 2, 3, 4, 6}, 8); }

/* One rounding to f32. */
static float fl(double v) { return (float)v; }

/* Q(x), from the formulas of kernels/README.md; x is one of a block whose largest magnitude is bmax. */
static float quantised(const char *format, float x, float amax, float bmax)
{
    if (!strncmp(format, "int8", 4)) {
        const float s = fl(127.0 / (double)amax), least = strcmp(format, "int8") ? -127 : -128;
        float q = fl((double)x * (double)s);
        q = rintf(q < least ? least : q > 127 ? 127 : q);
        return fl((double)q / (double)s);
    }
    if (!strcmp(format, "fp8")) {
        const float s = fl(448.0 / (double)amax), inverse = fl(1 / (double)s);
        return fl(copysign(e4m3(fabs((double)fl((double)x * (double)s))), (double)x) * (double)inverse);
    }
    const float g = fl((double)amax / 2688), r = fl((double)bmax / (double)fl(6 * (double)g));
    const float scale = bmax == 0 ? 1 : (float)e4m3(fmax((double)r, 0x1p-9)), t = fl((double)scale * (double)g);
    return fl(copysign(e2m1(fabs((double)fl((double)x / (double)t))), (double)x) * (double)t);
}

/* Q of a row of whole blocks. */
static void quantise_row(float *x, const struct input_quant *in, const char *format, int64_t n)
{
    const float amax = *(const float *)in->amax.data;
    const int64_t block = in->format.block ? in->format.block : n;
    for (int64_t i = 0; i < n; i += block) {
        float most = 0;
        for (int64_t k = i; k < i + block; k++) most = fmaxf(most, fabsf(x[k]));
        for (int64_t k = i; k < i + block; k++) x[k] = quantised(format, x[k], amax, most);
    }
}

/* The number of elements of got that differ from Q(x) rounded to the dtype of got. x and got are [rows, n]. */
static int64_t n_wrong(struct tensor got, struct tensor x, const struct input_quant *in, const char *format)
{
    const int64_t n = x.shape[1];
    int64_t wrong = 0;
    float row[DIM];
    for (int64_t m = 0; m < x.shape[0]; m++) {
        for (int64_t i = 0; i < n; i++) row[i] = (float)value_at(x, m * n + i);
        quantise_row(row, in, format, n);
        for (int64_t i = 0; i < n; i++) {
            const float want = got.dtype == DT_BF16 ? bf16_to_f32(f32_to_bf16(row[i])) : row[i];
            wrong += (float)value_at(got, m * n + i) != want;
        }
    }
    return wrong;
}

/* x and the activation, as the products read them, against the tables; h is the device's own. */
static void check_values(struct device *dev, const struct setup *s, int64_t wrong[2])
{
    struct layer l = make_layer(dev, s);
    const struct tensor q = make_empty(dev->act_dtype, N_ROW, WIDTH, -1), h = make_copy(q), absent = {0};
    const int64_t mark = arena_mark(&dev->work);
    wrong[0] = wrong[1] = 0;
    struct tensor x = input_quant_fwd(dev, &l.up, l.x);
    op_moe_up_fwd(dev, l.act, l.pre, l.xa, x, &l.route, &l.up, &l.glu);
    op_glu_quant_fwd(dev, q, l.pre, &l.glu, &l.down.in);
    op_glu_fwd(dev, h, l.pre, absent, &l.glu);
    dev->ops->wait();
    if (!dev->dry_run) {
        const struct tensor back = make_empty(dev->act_dtype, N_TOK, DIM, -1);
        device_download(dev, back.data, x.data, tensor_bytes(x));
        wrong[0] = n_wrong(back, l.x, &l.up.in, s->format);
        wrong[1] = n_wrong(q, h, &l.down.in, s->format);
    }
    arena_release(&dev->work, mark);
}

static void test_values(void **state)
{
    for (int i = 0; i < MT_LEN(setups); i++)
        for (int oracle = 0; oracle < 2; oracle++) {
            struct device dev;
            int64_t wrong[2];
            op_check_begin(&dev, oracle);
            check_values(&dev, &setups[i], wrong);
            assert_int_equal(wrong[0], 0);
            assert_int_equal(wrong[1], 0);
            op_check_end(&dev);
        }
    (void)state;
}

/* ---- gradients ---- */

/* Straight through: the gradient is that of a layer that reads x + (Q(x0) - x0) where |x0| <= amax and the constant
 * Q(x0) elsewhere, and h likewise. */
struct surrogate {
    struct layer *l;
    struct tensor x0, h0, xq, hq; /* at the start, and their quantised values */
    struct tensor read;           /* [T, D] */
};

static void follow(struct tensor to, struct tensor now, struct tensor start, struct tensor quantised, float amax)
{
    for (int64_t i = 0; i < tensor_count(to); i++) {
        const double v = value_at(start, i), q = value_at(quantised, i);
        set_value(to, i, fabsf((float)v) <= amax ? q + value_at(now, i) - v : q);
    }
}

static double surrogate_loss(void *arg)
{
    const struct surrogate *s = arg;
    struct layer *l = s->l;
    follow(s->read, l->x, s->x0, s->xq, *(float *)l->up.in.amax.data);
    op_moe_up_fwd(l->dev, l->act, l->pre, l->xa, s->read, &l->route, &l->up, &l->glu);
    const struct tensor h = make_copy(l->act);
    follow(l->act, h, s->h0, s->hq, *(float *)l->down.in.amax.data);
    op_moe_down_fwd(l->dev, l->y, l->ha, l->act, &l->route, &l->down);
    op_moe_combine_fwd(l->dev, l->out, l->res, l->y, &l->route);
    return probe(l->out, 12);
}

static int64_t n_clipped(struct tensor x, const struct input_quant *in)
{
    int64_t n = 0;
    for (int64_t i = 0; i < tensor_count(x); i++) n += fabs(value_at(x, i)) > value_at(in->amax, 0);
    return n;
}

static void expect_slope(struct surrogate *s, const char *name, struct tensor x, struct tensor dx)
{
    const double error = slope_error(surrogate_loss, s, x, dx);
    if (!(error <= 1e-6)) fail_msg("gradient of %s is off by %g", name, error);
}

static void test_gradients(void **state)
{
    for (int i = 0; i < MT_LEN(setups); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct layer l = make_layer(&dev, &setups[i]);
        forward(&l);
        const struct tensor hq = make_copy(l.act), out = make_copy(l.out);
        memset(l.act.data, 0xff, (size_t)tensor_bytes(l.act)); /* the backward computes it again, with the same bits */
        backward(&l);
        assert_same_bits(l.act, hq);
        const int64_t mark = arena_mark(&dev.work);
        struct surrogate s = {.l = &l,
                              .x0 = make_copy(l.x),
                              .h0 = make_empty(DT_F64, N_ROW, WIDTH, -1),
                              .xq = make_copy(input_quant_fwd(&dev, &l.up, l.x)),
                              .hq = hq,
                              .read = make_empty(DT_F64, N_TOK, DIM, -1)};
        arena_release(&dev.work, mark);
        op_moe_up_fwd(&dev, s.h0, l.pre, l.xa, s.xq, &l.route, &l.up, &l.glu);
        const int64_t clipped[] = {n_clipped(l.x, &l.up.in), n_clipped(s.h0, &l.down.in)};
        if (clipped[0] < 5 || clipped[1] < 5)
            fail_msg("setup %d clips %lld and %lld values", i, (long long)clipped[0], (long long)clipped[1]);
        assert_close(surrogate_loss(&s), probe(out, 12), 1e-12);
        expect_slope(&s, "x", l.x, l.dx);
        expect_slope(&s, "the gates", l.route.gate, l.dgate);
        if (!setups[i].merged) {
            expect_slope(&s, "up A", l.up.lora.a, l.up.grad.a);
            expect_slope(&s, "up B", l.up.lora.b, l.up.grad.b);
            expect_slope(&s, "down A", l.down.lora.a, l.down.grad.a);
            expect_slope(&s, "down B", l.down.lora.b, l.down.grad.b);
        }
        for (int64_t k = 0; k < tensor_count(l.dx); k++)
            if (fabs(value_at(l.x, k)) > (double)setups[i].amax[0]) assert_true(value_at(l.dx, k) == 0);
        op_check_end(&dev);
    }
    (void)state;
}

/* Inputs that Q leaves alone: every bit is that of a layer without quantised inputs. */
static void test_exact_inputs(void **state)
{
    const struct setup s = {"fp8", {448, 448}, {GLU_CLAMPED, 1.702f, 0.5f, true}, NULL, false};
    struct device dev;
    op_check_begin(&dev, false);
    struct layer a = make_layer(&dev, &s), b = make_layer(&dev, &s);
    for (int64_t i = 0; i < tensor_count(a.x); i++) {
        const double v = ldexp(rint(8 * value_at(a.x, i)), -2); /* at most four bits */
        set_value(a.x, i, v), set_value(b.x, i, v);
    }
    a.down.in.format.bits = b.down.in.format.bits = b.up.in.format.bits = 0;
    forward(&a), forward(&b);
    backward(&a), backward(&b);
    const struct tensor got[] = {a.out, a.dx, a.dgate, a.up.grad.a, a.up.grad.b, a.down.grad.a, a.down.grad.b};
    const struct tensor want[] = {b.out, b.dx, b.dgate, b.up.grad.a, b.up.grad.b, b.down.grad.a, b.down.grad.b};
    for (int i = 0; i < MT_LEN(got); i++) assert_same_bits(got[i], want[i]);
    op_check_end(&dev);
    (void)state;
}

/* ---- every run, and the GPU ---- */

static void run_layer(struct device *dev, const void *params, struct op_outputs *o)
{
    struct layer l = make_layer(dev, params);
    forward(&l);
    backward(&l);
    const struct tensor all[] = {l.out,       l.pre,         l.dx,          l.dgate, l.up.grad.a,
                                 l.up.grad.b, l.down.grad.a, l.down.grad.b, l.xa,    l.ha};
    for (int i = 0; i < MT_LEN(all); i++) o->out[o->n++] = all[i];
}

static void test_every_run(void **state)
{
    for (int i = 0; i < MT_LEN(setups); i++) op_check_case(run_layer, &setups[i], 1e-5);
    (void)state;
}

static void layers_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(setups); i++) op_check_cuda(run_layer, &setups[i]);
    (void)state;
}

/* Three counts of wrong values, which must be 0: two against the tables, and one of the backward against the forward.
 * They are integers, since op_check_cuda requires integers to be equal. */
static void run_values(struct device *dev, const void *params, struct op_outputs *o)
{
    struct layer l = make_layer(dev, params);
    const struct tensor wrong = make_zero(DT_I32, 3, -1, -1);
    int64_t n[2];
    check_values(dev, params, n);
    forward(&l);
    dev->ops->wait();
    const struct tensor act = dev->dry_run ? l.act : make_copy(l.act);
    backward(&l);
    dev->ops->wait();
    set_value(wrong, 0, dev->round_bf16 ? 0 : (double)n[0]); /* stored as f32 there, rounded to bf16 */
    set_value(wrong, 1, dev->round_bf16 ? 0 : (double)n[1]);
    set_value(wrong, 2, !dev->dry_run && memcmp(act.data, l.act.data, (size_t)tensor_bytes(act)));
    o->out[o->n++] = wrong;
}

static void values_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(setups); i++) op_check_cuda(run_values, &setups[i]);
    (void)state;
}

/* ---- calibration ---- */

#define AMAX "adapter/quant_amax.safetensors"

/* Opens a run with quant.activations = int8 on one of the parity cases; the caller closes it. */
static void open_run(struct run *r, struct config *cfg, const char *name)
{
    char path[MT_PATH];
    struct err err;
    config_defaults(cfg);
    snprintf(path, sizeof(path), "%s/%s", fixture("parity"), name);
    recorded_set(cfg, "model.path", path);
    snprintf(path, sizeof(path), "%s/%s/train.jsonl", fixture("parity"), name);
    recorded_set(cfg, "data.train", path);
    recorded_set(cfg, "output.dir", scratch_dir());
    recorded_set(cfg, "train.device", "cpu");
    recorded_set(cfg, "data.seq_len", "64");
    recorded_set(cfg, "quant.activations", "int8");
    recorded_set(cfg, "quant.targets", "all");
    recorded_set(cfg, "quant.calibration", "3");
    OK(run_open_headers(r, cfg, &err));
    OK(run_open_data(r, true, &err));
    OK(run_open_model(r, NULL, PLAN_TRAIN, &err));
}

/* Calibration finds the largest magnitudes of the rows in its passes: the test computes them again from the activations
 * of a layer. */
static void test_calibration(void **state)
{
    static struct config cfg;
    struct run r;
    struct err err;
    float most = 0, amax[2];
    open_run(&r, &cfg, "case_a");
    struct model *m = &r.model;
    assert_false(model_calibrated(m));
    OK(calibrate_run(&r, &err));
    assert_true(model_calibrated(m));
    const struct loader_options opt = run_loader_options(&cfg, true);
    struct loader *l = loader_open(&r.train, &opt, (struct loader_pos){0, 0});
    for (int i = 0; i < 3; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        run_forward(&r, &b, &(struct model_pass){.backward = true, .inputs = QAT_INPUTS_PLAIN});
        const struct tensor x = m->acts.layers[1].ffn_norm; /* with backward every layer has its own */
        for (int64_t k = 0; k < tensor_count(x); k++) most = fmaxf(most, fabsf(((float *)x.data)[k]));
        model_end(m);
        batch_free(&b);
    }
    loader_close(l);
    device_get_f32(m->dev, &amax[0], m->weights.layers[1].up.in.amax);
    assert_true(amax[0] == most);
    device_get_f32(m->dev, &amax[1], m->weights.layers[0].up.in.amax);
    assert_true(amax[1] > 0 && amax[1] != most);
    run_close(&r);
    (void)state;
}

static void fill(struct tensor x, float v)
{
    for (int64_t i = 0; i < tensor_count(x); i++) ((float *)x.data)[i] = v;
}

/* Values that are not finite, and inputs of zeros alone, by layer and product. */
static void test_calibration_errors(void **state)
{
    static struct config cfg;
    struct run r;
    struct err err;
    open_run(&r, &cfg, "case_a");
    struct layer_weights *layers = r.model.weights.layers;
    const struct tensor norm = make_copy(layers[1].ffn_norm);
    fill(layers[1].ffn_norm, 0);
    assert_int_equal(calibrate_run(&r, &err), -1);
    assert_says(err.msg, "the inputs of gate_up_proj in layer 1 had no rows, or zeros alone, in the calibration of 3 "
                         "micro-batches: raise quant.calibration");
    assert_false(model_calibrated(&r.model));
    fill(layers[1].ffn_norm, NAN);
    assert_int_equal(calibrate_run(&r, &err), -1);
    assert_says(err.msg, "inputs of gate_up_proj in layer 1 are NaN or infinite");
    memcpy(layers[1].ffn_norm.data, norm.data, (size_t)tensor_bytes(norm));
    OK(calibrate_run(&r, &err));
    run_close(&r);
    (void)state;
}

/* The largest relative difference between the magnitudes of two runs. */
static double amax_error(const char *a, const char *b)
{
    struct safetensors x, y;
    struct err err;
    double worst = 0;
    OK(safetensors_open(&x, process_output(a, AMAX), &err));
    OK(safetensors_open(&y, process_output(b, AMAX), &err));
    assert_int_equal(x.n_tensors, y.n_tensors);
    for (int64_t i = 0; i < x.n_tensors; i++) {
        float v[2];
        assert_string_equal(x.tensors[i].name, y.tensors[i].name);
        memcpy(&v[0], x.tensors[i].data, sizeof(float));
        memcpy(&v[1], y.tensors[i].data, sizeof(float));
        worst = fmax(worst, fabs((double)(v[0] / v[1]) - 1));
    }
    safetensors_close(&x);
    safetensors_close(&y);
    return worst;
}

/* The same bits from one rank and from two that share the data. Two that share the experts multiply other numbers of
 * rows at a time, which may change the last bit. */
static void test_ranks(void **state)
{
#define FP8 "quant.activations=fp8 train.steps=1 train.grad_accum=2 quant.calibration=5 "
    const char *one = process_trained(FP8);
    assert_same_output(one, process_trained(FP8 "parallel.cpu_ranks=2"), AMAX);
    const double error = amax_error(one, process_trained(FP8 "parallel.cpu_ranks=2 parallel.ep=2"));
    if (error > 1e-6) fail_msg("the magnitudes are %g apart", error);
    (void)state;
}

/* A checkpoint of two ranks with half of the experts each continues on one rank and on four. */
static void test_divided(void **state)
{
#define NVFP4 "optim.schedule=constant quant.activations=nvfp4 quant.weights=int4 quant.amax=static train.grad_accum=4 "
    for (int ranks = 1; ranks <= 4; ranks += 3) {
        const char *config = process_trained(NVFP4 "train.steps=1 parallel.cpu_ranks=2 parallel.ep=2");
        const char *before = process_output(config, "checkpoints/step-000001/" AMAX);
        char more[256];
        snprintf(more, sizeof(more), NVFP4 "train.steps=2 parallel.cpu_ranks=%d parallel.ep=%d", ranks, ranks);
        if (process_run_sets(config, more)) fail_msg("%s", said.err);
        assert_null(strstr(said.err, "calibrated"));
        assert_same_file(before, process_output(config, AMAX));
    }
    (void)state;
}

/* Experts divided between two ranks read the same inputs. Products of other numbers of rows may change the last bit of
 * a value, and the code of an input that is nearly halfway between two codes. With OpenBLAS's kernels for AVX-512 one
 * such code changes a gradient by 9e-4. A large eps makes AdamW's updates proportional to gradients. As a control,
 * inputs with another calibration differ more. */
static void test_divided_training(void **state)
{
#define INT8 "quant.activations=int8 train.steps=2 train.grad_accum=2 optim.eps=1 "
    const double near = 5e-3, far = 0.1;
    const char *one = process_trained(INT8);
    static const char *const modes[] = {"none", "full"};
    for (int i = 0; i < 2; i++) {
        char more[256];
        snprintf(more, sizeof(more), INT8 "parallel.cpu_ranks=2 parallel.ep=2 train.recompute=%s", modes[i]);
        const double error = adapter_error(one, process_trained(more));
        if (error > near) fail_msg("recompute = %s: the adapters are %g apart", modes[i], error);
    }
    assert_true(adapter_error(one, process_trained(INT8 "quant.calibration=1")) > far);
    (void)state;
}

/* ---- whole runs ---- */

/* Recomputation, threads and an interruption change no bit. */
static void test_same_adapter(void **state)
{
#define ALL "optim.schedule=constant quant.activations=nvfp4 quant.weights=int8 quant.targets=all "
    const char *all = process_trained(ALL "train.steps=4 train.recompute=none train.threads=1"),
               *config = process_config("");
    assert_same_output(all, process_trained(ALL "train.steps=4 train.recompute=full train.threads=3"), ADAPTER);
    assert_int_equal(process_run_sets(config, ALL "train.steps=2"), 0);
    assert_int_equal(process_run_sets(config, ALL "train.steps=4"), 0);
    assert_same_output(all, config, ADAPTER);
    assert_same_output(all, config, AMAX);
    assert_same_file(process_output(config, AMAX), process_output(config, "checkpoints/step-000002/" AMAX));
    (void)state;
}

static double number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    if (!at) fail_msg("no %s in:\n%s", key, text);
    return strtod(at + strlen(key), NULL);
}

/* An evaluation of the written adapter reads the inputs that training read; one without magnitudes is refused. */
static void test_evaluation(void **state)
{
    static char text[1 << 16];
    const char *config = process_trained("quant.activations=fp8 quant.calibration=1 train.steps=2");
    const char *own = process_output(config, "config.ini"), *path = process_output(config, AMAX), *last;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    last = text;
    for (const char *at; (at = strstr(last + 1, "\"event\":\"eval\""));) last = at;
    assert_int_equal(RUN("eval", own), 0);
    assert_close(number_after(said.out, "\"loss\":"), number_after(last, "\"loss\":"), 1e-6);
    assert_says(said.out, "\"activations\":\"fp8\"");
    assert_says(said.err, "experts read inputs quantised to fp8");
    assert_int_equal(RUN("eval", own, "--set", "quant.activations=none"), 0);
    assert_true(fabs(number_after(said.out, "\"loss\":") - number_after(last, "\"loss\":")) > 1e-5);
    assert_int_not_equal(RUN("eval", own, "--base"), 0);
    assert_says(said.err, "quant.activations needs the magnitudes of a run's calibration");
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, -4, SEEK_END);
    fwrite(&(float){0.5f}, 4, 1, f);
    fclose(f);
    assert_int_not_equal(RUN("eval", own), 0);
    assert_says(said.err, "share one magnitude above 0");
    assert_int_equal(remove(path), 0);
    assert_int_not_equal(RUN("eval", own), 0);
    assert_says(said.err, "has no quant_amax.safetensors");
    (void)state;
}

/* The loss of a step, as metrics.jsonl has it. */
static double step_loss(const char *config, int step)
{
    static char text[1 << 16];
    char key[64];
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    snprintf(key, sizeof(key), "\"event\":\"step\",\"step\":%d,", step);
    const char *at = strstr(text, key);
    if (!at) fail_msg("no step %d in:\n%s", step, text);
    return number_after(at, "\"loss\":");
}

/* quant.start: the first steps read inputs as they are, evaluations do not. */
static void test_start(void **state)
{
#define CONSTANT "optim.schedule=constant optim.lr=0 train.steps=2 "
    const char *plain = process_trained(CONSTANT),
               *late = process_trained(CONSTANT "quant.activations=nvfp4 quant.start=1");
    const char *all = process_trained(CONSTANT "quant.activations=nvfp4");
    assert_true(step_loss(late, 1) == step_loss(plain, 1));
    assert_true(fabs(step_loss(all, 1) - step_loss(plain, 1)) > 1e-4);
    assert_true(step_loss(late, 2) == step_loss(all, 2));
    assert_true(fabs(step_loss(late, 2) - step_loss(plain, 2)) > 1e-3);
    assert_same_output(late, all, AMAX);
    (void)state;
}

static void test_configuration(void **state)
{
    const char *config = process_trained("quant.activations=fp8 train.steps=1 quant.mode=base quant.calibration=2");
    assert_says(said.err, "calibrated the inputs of 4 products on 2 micro-batches");
    assert_says(said.err, "no effect: quant.mode");
    assert_int_not_equal(process_run_sets(config, "quant.activations=fp8 quant.calibration=3 train.steps=2"), 0);
    assert_says(said.err, "quant.calibration: 2 -> 3");
    assert_int_not_equal(process_run_sets(config, "train.steps=2"), 0);
    assert_says(said.err, "quant.activations: fp8 -> none");
    assert_int_not_equal(process_run_sets(config, "quant.activations=fp8 quant.narrow=yes"), 0);
    assert_says(said.err, "quant.narrow = true with quant.activations = fp8: only int8 and int4");
    assert_int_not_equal(process_run_sets(config, "quant.activations=mxfp4"), 0);
    assert_says(said.err, "fp8");
    process_trained("quant.weights=mxfp4 quant.calibration=2 train.steps=1");
    assert_says(said.err, "no effect: quant.calibration");
    (void)state;
}

/* ---- exports ---- */

/* A small model with widths that blocks of 16 divide. */
static const char *small_model(const char *arch)
{
    static char model[MT_PATH];
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    char path[2 * MT_PATH];
    struct err err;
    snprintf(model, sizeof(model), "%s/model", scratch_dir());
    if (RUN("synth", arch, model, "--layers", "2")) fail_msg("%s", said.err);
    for (int i = 0; i < MT_LEN(files); i++) {
        struct file_map map;
        snprintf(path, sizeof(path), "parity/qwen3/%s", files[i]);
        OK(file_map_open(&map, fixture(path), &err));
        snprintf(path, sizeof(path), "%s/%s", model, files[i]);
        OK(file_write_atomic(path, map.data, map.size, &err));
        file_map_close(&map);
    }
    return model;
}

/* Trains a model on a parity case's rows, with weights and inputs in `format`, and exports it; returns the
 * configuration. */
static const char *exported(const char *model, const char *rows, const char *format, const char *to, const char *more)
{
    char sets[2048];
    const char *config = process_config(""), *base = fixture("parity");
    const int n = snprintf(sets, sizeof(sets),
                           "model.path=%s data.train=%s/%s/train.jsonl data.eval=%s/%s/eval.jsonl train.steps=2 "
                           "data.seq_len=24 quant.weights=%s quant.activations=%s quant.calibration=2 %s",
                           model, base, rows, base, rows, format, format, more);
    assert_true(n < (int)sizeof(sets));
    if (process_run_sets(config, sets)) fail_msg("training failed:\n%s", said.err);
    if (RUN("export", process_output(config, "config.ini"), "--to", to)) fail_msg("%s\n%s", said.out, said.err);
    return config;
}

static float f32_of(const struct safetensors *st, const char *name)
{
    const struct st_tensor *t = safetensors_find(st, name);
    float v;
    if (!t || t->dtype != DT_F32) fail_msg("no f32 %s", name);
    memcpy(&v, t->data, sizeof(v));
    return v;
}

/* Scales of a layer's experts in the export against the magnitudes of training. */
static void expect_scales(const char *config, const char *dir, const char *up, const char *down, double divisor)
{
    struct safetensors amax, st;
    struct err err;
    char name[128];
    OK(safetensors_open(&amax, process_output(config, AMAX), &err));
    OK(safetensors_open(&st, process_output(config, dir), &err));
    for (int i = 0; i < 2; i++) {
        const char *target = i ? "layers.1.down_proj.input_amax" : "layers.1.gate_up_proj.input_amax";
        snprintf(name, sizeof(name), "model.layers.1.%s.input_scale", i ? down : up);
        assert_close((double)f32_of(&st, name) * divisor, (double)f32_of(&amax, target), 1e-6);
    }
    safetensors_close(&amax);
    safetensors_close(&st);
}

static void test_export_nvfp4(void **state)
{
    static char text[1 << 16];
    const char *config = exported(small_model("qwen3-tiny"), "qwen3", "nvfp4", "merged-nvfp4", "");
    assert_says(said.out, "scales of inputs are bit for bit those that training read");
    expect_scales(config, "export-merged-nvfp4", "mlp.experts.3.gate_proj", "mlp.experts.0.down_proj", 2688);
    process_read(process_output(config, "export-merged-nvfp4/hf_quant_config.json"), text, sizeof(text));
    assert_says(text, "\"quant_algo\": \"NVFP4\"");
    process_read(process_output(config, "export-merged-nvfp4/config.json"), text, sizeof(text));
    assert_says(text, "input_activations");
    if (RUN("export", process_output(config, "config.ini"), "--to", "merged-fp8")) fail_msg("%s", said.err);
    assert_says(said.err, "training read inputs quantised to nvfp4, and merged-fp8 has no scales for them");
    assert_null(strstr(said.out, "scales of inputs"));
    (void)state;
}

/* Another scale in the export is found. */
static void test_export_fp8(void **state)
{
    const char *config = exported(fixture("parity/mixtral"), "mixtral", "fp8", "merged-fp8", "quant.targets=all");
    const char *dir = process_output(config, "export-merged-fp8"), *own = process_output(config, "config.ini");
    static char text[1 << 16];
    struct safetensors st;
    struct err err;
    float *scale;
    assert_says(said.out, "scales of inputs are bit for bit those that training read");
    expect_scales(config, "export-merged-fp8", "block_sparse_moe.experts.1.w3", "block_sparse_moe.experts.2.w2", 448);
    process_read(process_output(config, "export-merged-fp8/config.json"), text, sizeof(text));
    assert_says(strstr(text, "input_activations"), "\"dynamic\": false");
    OK(safetensors_open(&st, dir, &err));
    const struct st_tensor *t = safetensors_find(&st, "model.layers.0.self_attn.v_proj.input_scale");
    assert_non_null(t);
    const int64_t at = t->data - (const uint8_t *)st.maps[0].data;
    safetensors_close(&st);
    FILE *f = fopen(process_output(config, "export-merged-fp8/model.safetensors"), "r+b");
    assert_non_null(f);
    scale = &(float){0.5f};
    fseek(f, at, SEEK_SET);
    fwrite(scale, sizeof(*scale), 1, f);
    fclose(f);
    assert_int_not_equal(RUN("export", own, "--to", "merged-fp8", "--verify", dir), 0);
    assert_says(said.err, "self_attn.v_proj.input_scale: not the scale that training read");
    (void)state;
}

/* Every product reads its input through the calibration: a dense layer, shared experts, latent attention. */
static void test_export_all_kinds(void **state)
{
    const char *config = exported(small_model("glm-flash-tiny"), "qwen3", "fp8", "merged-fp8",
                                  "quant.targets=all lora.targets=o_proj,experts lora.r=4");
    assert_says(said.out, "scales of inputs are bit for bit those that training read");
    expect_scales(config, "export-merged-fp8", "mlp.experts.3.up_proj", "mlp.experts.0.down_proj", 448);
    (void)state;
}

int test_input_quant(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_exact_inputs),
        cmocka_unit_test(test_every_run),
        cmocka_unit_test(layers_on_the_gpu),
        cmocka_unit_test(values_on_the_gpu),
        cmocka_unit_test(test_calibration),
        cmocka_unit_test(test_calibration_errors),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_divided),
        cmocka_unit_test(test_divided_training),
        cmocka_unit_test(test_same_adapter),
        cmocka_unit_test(test_evaluation),
        cmocka_unit_test(test_configuration),
        cmocka_unit_test(test_start),
        cmocka_unit_test(test_export_nvfp4),
        cmocka_unit_test(test_export_fp8),
        cmocka_unit_test(test_export_all_kinds),
    };
    return cmocka_run_group_tests_name("input_quant", tests, NULL, NULL);
}
