/* test_qat.c - quantisation-aware training: the quantised matrices that products read, on the CPU and bit for bit on
 * the GPU; straight-through gradients; amax; whole runs. */
#include "tests/packed.h"
#include "tests/process.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "train/config/config.h"

/* ---- a layer of experts and a dense projection of three parts ---- */

enum { N_TOK = 9, N_EXP = 4, TOP_K = 2 };

struct setup {
    const char *format;
    struct weight_packing packing;
    int64_t dim, width, r;
    bool merged;
};

static const struct setup setups[] = {
    {"mxfp4", {WF_MXFP4, 0, false}, 64, 32, 8, true},    {"mxfp4", {WF_NF4, 64, true}, 96, 64, 24, false},
    {"nvfp4", {WF_MXFP4, 0, false}, 32, 96, 16, true},   {"fp8", {WF_BF16, 0, false}, 40, 24, 8, true},
    {"int8", {WF_FP4, 64, false}, 64, 32, 8, true},      {"int4", {WF_F32, 0, false}, 32, 64, 8, true},
    {"nvfp4", {WF_NVFP4, 0, false}, 48, 96, 16, true},   {"mxfp4", {WF_NVFP4, 0, true}, 64, 96, 16, false},
    {"fp8", {WF_FP8, 0, false}, 64, 32, 8, true},        {"nvfp4", {WF_FP8, 128, false}, 256, 48, 16, false},
    {"int4-128", {WF_NF4, 64, true}, 256, 128, 8, true}, {"int4-32", {WF_F16, 0, false}, 64, 320, 40, true},
};

struct layer {
    struct device *dev;
    struct proj up, down, qkv;
    struct glu glu;
    struct route route;
    struct tensor x, res, pre, act, xa, y, ha, out, dout, dpre, dgate, dx; /* experts */
    struct tensor qkv_y, qkv_xa, qkv_dy, qkv_dx;
};

static struct route make_route(struct device *dev)
{
    struct route r = {.idx = make_empty(DT_I32, N_TOK, TOP_K, -1),
                      .gate = make_random(dev->stat_dtype, 11, 1, N_TOK, TOP_K, -1),
                      .offs = make_empty(DT_I32, N_EXP + 1, -1, -1),
                      .row_slot = make_empty(DT_I32, N_TOK * TOP_K, -1, -1),
                      .slot_row = make_empty(DT_I32, N_TOK, TOP_K, -1)};
    for (int64_t t = 0; t < N_TOK; t++) { /* the last expert has no rows */
        set_value(r.idx, 2 * t, (double)(t % 2));
        set_value(r.idx, 2 * t + 1, 2);
    }
    op_route_sort(dev, &r, N_EXP);
    return r;
}

/* Adapters on `n` of the three parts of a dense projection, or, n 0, on every expert. */
static void adapt(struct device *dev, struct proj *p, uint64_t stream, const struct setup *s, int n)
{
    const int64_t n_in = p->w.n_in, n_out = p->w.n_out, n_exp = n ? -1 : p->w.n_exp;
    struct lora *l = &p->lora;
    *l = (struct lora){.r = s->r, .n_seg = n ? n : 1, .merged = s->merged, .seg_cols = {n_out}, .scale = {0.75f}};
    int64_t rows = n ? 0 : n_out;
    for (int i = 0; i < n; i++) { /* adapters on the first and the last part only */
        const int part = i ? 2 : 0;
        for (int k = 0; k < part; k++) l->seg_first[i] += p->quant.part_rows[k];
        rows += l->seg_cols[i] = p->quant.part_rows[part];
        l->scale[i] = i ? 1.5f : 0.75f;
    }
    const int64_t a[3] = {n ? l->n_seg * s->r : n_exp, n ? n_in : s->r, n ? -1 : n_in};
    const int64_t b[3] = {n ? rows : n_exp, n ? s->r : n_out, n ? -1 : s->r};
    l->a = make_random(dev->act_dtype, stream, 0.25, a[0], a[1], a[2]);
    l->b = make_random(dev->act_dtype, stream + 1, 0.25, b[0], b[1], b[2]);
    l->master_a = make_random(dev->stat_dtype, stream, 0.25, a[0], a[1], a[2]);
    l->master_b = make_random(dev->stat_dtype, stream + 1, 0.25, b[0], b[1], b[2]);
    p->grad.a = make_zero(dev->stat_dtype, a[0], a[1], a[2]);
    p->grad.b = make_zero(dev->stat_dtype, b[0], b[1], b[2]);
}

static void quantise(struct proj *p, const char *format, int64_t q, int64_t k)
{
    struct err err;
    assert_int_equal(fakequant_parse(&p->quant.format, format, &err), 0);
    p->quant.n_part = q ? 3 : 1;
    p->quant.part_rows[0] = q ? q : p->w.n_out;
    p->quant.part_rows[1] = p->quant.part_rows[2] = k;
    p->quant.amax = make_empty(DT_F32, p->w.n_exp * p->quant.n_part, -1, -1);
}

static struct layer make_layer(struct device *dev, const struct setup *s)
{
    const int64_t n_row = N_TOK * TOP_K, dim = s->dim, width = s->width;
    struct layer l = {.dev = dev, .route = make_route(dev), .glu = {GLU_CLAMPED, 1.702f, 0.5f, true}};
    l.up.w = make_packed(s->packing, 1, 0.5, N_EXP, 2 * width, dim);
    l.down.w = make_packed(s->packing, 2, 0.5, N_EXP, dim, width);
    l.qkv.w = make_packed(s->packing, 3, 0.5, 1, 128, dim);
    l.up.bias = make_random(DT_F32, 4, 0.5, N_EXP, 2 * width, -1);
    quantise(&l.up, s->format, 0, 0);
    quantise(&l.down, s->format, 0, 0);
    quantise(&l.qkv, s->format, 64, 32);
    adapt(dev, &l.up, 5, s, 0);
    adapt(dev, &l.down, 7, s, 0);
    adapt(dev, &l.qkv, 13, s, 2);
    const enum dtype t = dev->act_dtype;
    l.x = make_random(t, 9, 1, N_TOK, dim, -1);
    l.res = make_random(t, 10, 1, N_TOK, dim, -1);
    l.pre = make_empty(t, n_row, 2 * width, -1);
    l.act = make_empty(t, n_row, width, -1);
    l.xa = make_empty(t, n_row, s->r, -1);
    l.y = make_empty(t, n_row, dim, -1);
    l.ha = make_empty(t, n_row, s->r, -1);
    l.out = make_empty(t, N_TOK, dim, -1);
    l.dout = make_probe(l.out, 12);
    l.dpre = make_empty(t, n_row, 2 * width, -1);
    l.dgate = make_empty(dev->stat_dtype, N_TOK, TOP_K, -1);
    l.dx = make_empty(t, N_TOK, dim, -1);
    l.qkv_y = make_empty(t, N_TOK, 128, -1);
    l.qkv_xa = make_empty(t, N_TOK, 2 * s->r, -1);
    l.qkv_dy = make_probe(l.qkv_y, 15);
    l.qkv_dx = make_empty(t, N_TOK, dim, -1);
    return l;
}

static void measure(struct layer *l)
{
    struct proj *const projs[] = {&l->up, &l->down, &l->qkv};
    for (int i = 0; i < 3; i++)
        if (projs[i]->quant.format.bits) op_proj_amax(l->dev, projs[i]->quant.amax, projs[i]);
}

static void forward(struct layer *l)
{
    const struct tensor absent = {0};
    op_moe_up_fwd(l->dev, l->act, l->pre, l->xa, l->x, &l->route, &l->up, &l->glu);
    op_moe_down_fwd(l->dev, l->y, l->ha, l->act, &l->route, &l->down);
    op_moe_combine_fwd(l->dev, l->out, l->res, l->y, &l->route);
    op_linear_fwd(l->dev, l->qkv_y, l->qkv_xa, l->x, &l->qkv, absent);
}

static void backward(struct layer *l)
{
    op_moe_down_bwd(l->dev, l->dpre, l->dgate, l->act, l->dout, l->pre, l->ha, &l->route, &l->down, &l->glu);
    op_moe_up_bwd(l->dev, l->dx, l->dpre, l->x, l->xa, &l->route, &l->up);
    op_linear_bwd(l->dev, l->qkv_dx, l->qkv_dy, l->x, l->qkv_xa, &l->qkv);
}

/* ---- the matrices ---- */

/* w + scale * (B A)[row, col], in f32 in the order of the contract; w where no adapter has the row. */
static float adapted(float w, const struct proj *p, int64_t e, int64_t row, int64_t col)
{
    const struct lora *l = &p->lora;
    int64_t b_row = 0;
    for (int s = 0; s < l->n_seg; b_row += l->seg_cols[s++]) {
        if (row < l->seg_first[s] || row >= l->seg_first[s] + l->seg_cols[s]) continue;
        volatile float sum = 0;
        for (int64_t k = 0; k < l->r; k++) {
            const int64_t a = (e * l->n_seg + s) * l->r + k, b = e * p->w.n_out + b_row + row - l->seg_first[s];
            sum = fmaf((float)value_at(l->master_b, b * l->r + k), (float)value_at(l->master_a, a * p->w.n_in + col),
                       sum);
        }
        const volatile float scaled = l->scale[s] * sum;
        return w + scaled;
    }
    return w;
}

/* M, or W where nothing is merged: [E, out, in]. */
static struct tensor merged(const struct proj *p)
{
    const struct weight *w = &p->w;
    const struct tensor m = make_empty(DT_F32, w->n_exp, w->n_out, w->n_in);
    for (int64_t i = 0; i < tensor_count(m); i++) {
        const int64_t n = w->n_out * w->n_in, e = i / n, row = i % n / w->n_in;
        const float v = quant_value(w, e, i % n);
        ((float *)m.data)[i] = p->lora.merged ? adapted(v, p, e, row, i % w->n_in) : v;
    }
    return m;
}

static int part_of(const struct proj *p, int64_t row)
{
    int part = 0;
    while (row >= p->quant.part_rows[part]) row -= p->quant.part_rows[part++];
    return part;
}

static void expect_amax(const struct proj *p, struct tensor m)
{
    const int64_t n_part = p->quant.n_part, rows = p->w.n_out;
    float *most = mem_array(p->w.n_exp * n_part, sizeof(*most));
    for (int64_t i = 0; i < tensor_count(m); i++) {
        const int64_t row = i / p->w.n_in, at = row / rows * n_part + part_of(p, row % rows);
        most[at] = fmaxf(most[at], fabsf(((float *)m.data)[i]));
    }
    assert_memory_equal(p->quant.amax.data, most, (size_t)(p->w.n_exp * n_part) * sizeof(*most));
    mem_free(most);
}

/* Q of m, part by part and block by block, as fakequant.h has it for one element. */
static void fake(const struct proj *p, struct tensor m)
{
    const struct fakequant *f = &p->quant.format;
    const int64_t n_in = p->w.n_in, block = f->block ? f->block : n_in;
    const float *amax = p->quant.amax.data;
    for (int64_t row = 0; row < p->w.n_exp * p->w.n_out; row++)
        for (int64_t first = 0; first < n_in; first += block) {
            float *x = (float *)m.data + row * n_in + first, most = 0;
            const float own = amax[row / p->w.n_out * p->quant.n_part + part_of(p, row % p->w.n_out)];
            for (int64_t i = 0; i < block; i++) most = fmaxf(most, fabsf(x[i]));
            const struct fakequant_scale s =
                fakequant_scale(f, f->kind == FQ_NVFP4 ? fakequant_global(f, own) : own, most);
            for (int64_t i = 0; i < block; i++) x[i] = fakequant_value(f, &s, fakequant_round(f, &s, x[i]));
        }
}

static void check_matrices(bool oracle)
{
    for (int i = 0; i < MT_LEN(setups); i++) {
        struct device dev;
        op_check_begin(&dev, oracle);
        struct layer l = make_layer(&dev, &setups[i]);
        measure(&l);
        const struct proj *const projs[] = {&l.up, &l.down, &l.qkv};
        for (int k = 0; k < 3; k++) {
            const struct weight *w = &projs[k]->w;
            const struct tensor want = merged(projs[k]), got = make_empty(DT_F32, w->n_exp, w->n_out, w->n_in);
            expect_amax(projs[k], want);
            fake(projs[k], want);
            op_decode(&dev, got, projs[k], (struct tensor){0});
            assert_same_bits(got, want);
        }
        op_check_end(&dev);
    }
}
static void test_matrices(void **state)
{
    (void)state;
    check_matrices(false);
    check_matrices(true); /* F64 reads the same matrices */
}

/* MXFP4 values are quantised to themselves. */
static void test_mxfp4_stays(void **state)
{
    struct device dev;
    op_check_begin(&dev, false);
    struct proj p = {.w = make_packed((struct weight_packing){WF_MXFP4, 0, false}, 1, 3, 3, 64, 96)};
    const struct tensor plain = make_empty(DT_F32, 3, 64, 96), again = make_empty(DT_F32, 3, 64, 96);
    op_decode(&dev, plain, &p, (struct tensor){0});
    quantise(&p, "mxfp4", 0, 0);
    op_decode(&dev, again, &p, (struct tensor){0});
    assert_same_bits(plain, again);
    op_check_end(&dev);
    (void)state;
}

/* ---- products and gradients ---- */

/* The same layer whose stored matrices are the quantised ones: what products give must not differ in a bit. */
static void store_quantised(struct layer *l)
{
    struct proj *const projs[] = {&l->up, &l->down, &l->qkv};
    for (int i = 0; i < 3; i++) {
        struct proj *p = projs[i];
        const struct tensor y = make_empty(DT_F32, p->w.n_exp, p->w.n_out, p->w.n_in);
        op_decode(l->dev, y, p, (struct tensor){0});
        p->w = (struct weight){WF_F32, p->w.n_exp, p->w.n_out, p->w.n_in, .data = y.data};
        p->quant.format.bits = 0;
    }
}

static void test_products(void **state)
{
    for (int i = 0; i < MT_LEN(setups); i++) {
        struct device dev;
        op_check_begin(&dev, false);
        struct layer a = make_layer(&dev, &setups[i]), b = make_layer(&dev, &setups[i]);
        measure(&a), measure(&b);
        store_quantised(&b);
        forward(&a), forward(&b);
        backward(&a), backward(&b);
        const struct tensor got[] = {a.out,       a.pre,       a.dx,          a.dgate,       a.qkv_y,     a.qkv_dx,
                                     a.up.grad.a, a.up.grad.b, a.down.grad.a, a.down.grad.b, a.qkv.grad.a};
        const struct tensor want[] = {b.out,       b.pre,       b.dx,          b.dgate,       b.qkv_y,     b.qkv_dx,
                                      b.up.grad.a, b.up.grad.b, b.down.grad.a, b.down.grad.b, b.qkv.grad.a};
        for (int k = 0; k < MT_LEN(got); k++) assert_same_bits(got[k], want[k]);
        op_check_end(&dev);
    }
    (void)state;
}

/* Straight through: the gradient of A and B is that of M at the quantised matrix, dA = scale B^T dM, dB = scale dM A^T.
 * Moving the stored matrix by scale (B dA + dB A) h and by -h changes the loss by 2 h <gradient, (dA, dB)>. */
struct moved {
    struct layer *l;
    struct tensor base, way; /* of the matrix that moves */
    struct proj *p;
};
static double loss_at(struct moved *m, double h)
{
    for (int64_t i = 0; i < tensor_count(m->base); i++)
        set_value((struct tensor){(void *)(uintptr_t)m->p->w.data, DT_F32, 1, {tensor_count(m->base)}, 0}, i,
                  value_at(m->base, i) + h * value_at(m->way, i));
    forward(m->l);
    return probe(m->l->out, 12) + probe(m->l->qkv_y, 15);
}

static void check_straight_through(struct layer *l, struct proj *p, int64_t row_first, int64_t rows, int seg)
{
    const struct lora *lo = &p->lora;
    const int64_t n_exp = p->w.n_exp, n_in = p->w.n_in, r = lo->r;
    const struct tensor da = make_random(DT_F64, 31, 1, tensor_count(lo->a), -1, -1);
    const struct tensor db = make_random(DT_F64, 32, 1, tensor_count(lo->b), -1, -1);
    struct moved m = {l, make_copy(tensor_1d((void *)(uintptr_t)p->w.data, DT_F32, n_exp * p->w.n_out * n_in)),
                      make_zero(DT_F64, n_exp * p->w.n_out * n_in, -1, -1), p};
    double slope = 0;
    for (int64_t e = 0; e < n_exp; e++)
        for (int64_t o = 0; o < rows; o++)
            for (int64_t i = 0; i < n_in; i++) {
                double way = 0;
                for (int64_t k = 0; k < r; k++) {
                    const int64_t a = ((e * lo->n_seg + seg) * r + k) * n_in + i;
                    const int64_t b = (seg ? tensor_count(lo->b) - rows * r : e * rows * r) + o * r + k;
                    way += value_at(lo->b, b) * value_at(da, a) + value_at(db, b) * value_at(lo->a, a);
                }
                set_value(m.way, (e * p->w.n_out + row_first + o) * n_in + i, (double)lo->scale[seg] * way);
            }
    for (int64_t e = 0; e < n_exp; e++)
        for (int64_t k = 0; k < r; k++) {
            for (int64_t i = 0; i < n_in; i++) {
                const int64_t a = ((e * lo->n_seg + seg) * r + k) * n_in + i;
                slope += value_at(p->grad.a, a) * value_at(da, a);
            }
            for (int64_t o = 0; o < rows; o++) {
                const int64_t b = (seg ? tensor_count(lo->b) - rows * r : e * rows * r) + o * r + k;
                slope += value_at(p->grad.b, b) * value_at(db, b);
            }
        }
    const double h = 1e-4, found = (loss_at(&m, h) - loss_at(&m, -h)) / (2 * h);
    loss_at(&m, 0);
    assert_true(fabs(slope) > 1e-3);
    assert_close(found / slope, 1, 1e-3); /* stored matrices are f32, which rounds steps of h */
}

static void test_straight_through(void **state)
{
    struct device dev;
    op_check_begin(&dev, true);
    struct layer l = make_layer(&dev, &setups[2]);
    measure(&l);
    store_quantised(&l);
    forward(&l);
    backward(&l);
    check_straight_through(&l, &l.up, 0, l.up.w.n_out, 0);
    check_straight_through(&l, &l.down, 0, l.down.w.n_out, 0);
    check_straight_through(&l, &l.qkv, 0, 64, 0);
    check_straight_through(&l, &l.qkv, 96, 32, 1);
    op_check_end(&dev);
    (void)state;
}

/* ---- every run ---- */

static void run_layer(struct device *dev, const void *params, struct op_outputs *o)
{
    struct layer l = make_layer(dev, params);
    measure(&l);
    forward(&l);
    backward(&l);
    const struct tensor all[] = {l.out,        l.pre,        l.dx,        l.dgate,       l.qkv_y,
                                 l.qkv_dx,     l.up.grad.a,  l.up.grad.b, l.down.grad.a, l.down.grad.b,
                                 l.qkv.grad.a, l.qkv.grad.b, l.xa,        l.ha};
    for (int i = 0; i < MT_LEN(all); i++) o->out[o->n++] = all[i];
}

static void test_every_run(void **state)
{
    for (int i = 0; i < MT_LEN(setups); i++) op_check_case(run_layer, &setups[i], 1e-5);
    (void)state;
}

static void qat_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(setups); i++) op_check_cuda(run_layer, &setups[i]);
    (void)state;
}

/* Bits of y as bf16, and of amax, as integers: op_check_cuda wants those equal. */
static void add_bits(struct op_outputs *o, struct tensor y, struct tensor amax)
{
    const struct tensor bits = make_empty(DT_I32, tensor_count(y), -1, -1);
    for (int64_t i = 0; i < tensor_count(y); i++)
        set_value(bits, i, y.dtype == DT_BF16 ? ((uint16_t *)y.data)[i] : f32_to_bf16(((float *)y.data)[i]));
    o->out[o->n++] = bits;
    o->out[o->n++] = tensor_1d(amax.data, DT_I32, tensor_count(amax));
}

static void run_matrices(struct device *dev, const void *params, struct op_outputs *o)
{
    struct layer l = make_layer(dev, params);
    struct proj *const projs[] = {&l.up, &l.down, &l.qkv};
    measure(&l);
    for (int k = 0; k < 3; k++) {
        const struct weight *w = &projs[k]->w;
        const enum dtype t = dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32;
        const struct tensor y = make_empty(t, w->n_exp, w->n_out, w->n_in);
        op_decode(dev, y, projs[k], (struct tensor){0});
        dev->ops->wait();
        add_bits(o, y, projs[k]->quant.amax);
    }
}

/* The GPU's matrices are those of the CPU rounded to bf16, and the largest magnitudes have the same bits. */
static void matrices_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(setups); i++) op_check_cuda(run_matrices, &setups[i]);
    (void)state;
}

/* ---- whole runs ---- */

/* The line of the evaluation before step 1. */
static void first_eval(const char *config, char line[256])
{
    static char text[1 << 16];
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    const char *at = strstr(text, "\"event\":\"eval\"");
    assert_non_null(at);
    at = strstr(at, "\"loss\":");
    snprintf(line, 256, "%.*s", (int)strcspn(at, ","), at);
}

/* At first B is 0, and the MXFP4 experts of the base do not change when they are quantised to MXFP4: the loss has the
 * same digits. With NVFP4 it differs. */
static void test_first_loss(void **state)
{
    char line[3][256];
    first_eval(process_trained("train.steps=1"), line[0]);
    first_eval(process_trained("train.steps=1 quant.weights=mxfp4"), line[1]);
    first_eval(process_trained("train.steps=1 quant.weights=nvfp4"), line[2]);
    assert_string_equal(line[0], line[1]);
    assert_string_not_equal(line[0], line[2]);
    (void)state;
}

/* Recomputation, threads and an interruption change no bit. */
static void test_same_adapter(void **state)
{
#define INT8 "optim.schedule=constant quant.weights=int8 quant.targets=all "
    const char *all = process_trained(INT8 "train.steps=4 train.recompute=none train.threads=1"),
               *config = process_config("");
    assert_same_output(all, process_trained(INT8 "train.steps=4 train.recompute=full train.threads=3"), ADAPTER);
    assert_int_equal(process_run_sets(config, INT8 "train.steps=2"), 0);
    assert_int_equal(process_run_sets(config, INT8 "train.steps=4"), 0);
    assert_same_output(all, config, ADAPTER);
    (void)state;
}

/* The modes differ, and a checkpoint of one is not continued with the other. */
static void test_modes(void **state)
{
    const char *config = process_trained("quant.weights=fp8 train.steps=2");
    assert_true(adapter_error(config, process_trained("quant.weights=fp8 quant.mode=base train.steps=2")) > 1e-6);
    assert_int_not_equal(process_run_sets(config, "quant.weights=fp8 quant.mode=base train.steps=4"), 0);
    assert_says(said.err, "quant.mode");
    if (RUN("eval", config, "--set", "quant.weights=fp8", "--set", "quant.targets=all")) fail_msg("%s", said.err);
    assert_says(said.err, "adapter: all projections read weights quantised to fp8, with the adapter merged");
    assert_says(said.out, "\"weights\":\"fp8\"");
    if (RUN("eval", config)) fail_msg("%s", said.err);
    assert_null(strstr(said.out, "weights"));
    assert_null(strstr(said.err, "quantised"));
    (void)state;
}

/* Experts divided between two ranks read the same matrices. */
static void test_divided(void **state)
{
    const char *one = process_trained("quant.weights=nvfp4 train.steps=2 train.grad_accum=2");
    const char *two =
        process_trained("quant.weights=nvfp4 train.steps=2 train.grad_accum=2 parallel.cpu_ranks=2 parallel.ep=2");
    const double error = adapter_error(one, two);
    if (error > 1e-3) fail_msg("the adapters are %g apart", error);
    (void)state;
}

/* ---- quant.amax = static ---- */

#define AMAX "adapter/quant_amax.safetensors"

/* Settings of a run with fixed amax that starts from the parity case's adapter. B is not zero, so these amax differ
 * from those of the base model. */
static const char *fixed(const char *more)
{
    static char sets[4][512];
    static int next;
    char *at = sets[next++ % 4];
    snprintf(
        at, sizeof(sets[0]),
        "optim.schedule=constant lora.r=8 lora.alpha=16 quant.weights=int4 quant.amax=static lora.init_from=%s/%s %s",
        fixture("parity"), "case_a/adapter_init", more);
    return at;
}

static double number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    if (!at) fail_msg("no %s in:\n%s", key, text);
    return strtod(at + strlen(key), NULL);
}

/* Fixed amax are those of the first adapter, and equal the current ones before the first update. An interruption
 * changes no bit. An evaluation of the written adapter reads the same matrices as the last evaluation of the run. */
static void test_static(void **state)
{
    char line[2][256], sets[512];
    first_eval(process_trained(fixed("train.steps=1")), line[0]);
    first_eval(process_trained(fixed("train.steps=1 quant.amax=current")), line[1]);
    assert_string_equal(line[0], line[1]);
    const char *all = process_trained(fixed("quant.targets=all train.steps=4")), *config = process_config("");
    assert_int_equal(process_run_sets(config, fixed("quant.targets=all train.steps=2")), 0);
    assert_int_equal(process_run_sets(config, fixed("quant.targets=all train.steps=4")), 0);
    assert_same_output(all, config, ADAPTER);
    assert_same_output(all, config, AMAX);
    assert_same_file(process_output(config, AMAX), process_output(config, "checkpoints/step-000002/" AMAX));
    static char text[1 << 16];
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    const char *last = text;
    for (const char *at; (at = strstr(last + 1, "\"event\":\"eval\""));) last = at;
    const double loss = number_after(last, "\"loss\":");
    snprintf(sets, sizeof(sets), "%s", process_output(config, "config.ini"));
    assert_int_equal(RUN("eval", sets), 0);
    assert_close(number_after(said.out, "\"loss\":"), loss, 1e-6);
    assert_int_equal(RUN("eval", sets, "--set", "quant.amax=current"), 0);
    assert_true(fabs(number_after(said.out, "\"loss\":") - loss) > 1e-4);
    (void)state;
}

/* A checkpoint of two ranks with half of the experts each continues on one rank and on four. */
static void test_static_divided(void **state)
{
    const char *one = process_trained(fixed("train.grad_accum=4 train.steps=1"));
    for (int ranks = 1; ranks <= 4; ranks += 3) {
        const char *config =
            process_trained(fixed("train.grad_accum=4 train.steps=1 parallel.cpu_ranks=2 parallel.ep=2"));
        char more[128];
        assert_same_output(one, config, AMAX);
        snprintf(more, sizeof(more), "train.grad_accum=4 train.steps=2 parallel.cpu_ranks=%d parallel.ep=%d", ranks,
                 ranks);
        assert_int_equal(process_run_sets(config, fixed(more)), 0);
        assert_same_output(one, config, AMAX);
    }
    (void)state;
}

/* An amax of -0 is refused: scales of nvfp4 would be negative zeros, and quotients by them NaN. */
static void check_negative_zero(const char *config)
{
    const char *path = process_output(config, AMAX);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, -4, SEEK_END);
    fwrite("\0\0\0\x80", 1, 4, f);
    fclose(f);
    assert_int_not_equal(RUN("eval", process_output(config, "config.ini")), 0);
    assert_says(said.err, "is -0, not a magnitude: the file is damaged");
}

/* A damaged or missing file is an error that names it. */
static void test_static_files(void **state)
{
    const char *config = process_trained(fixed("train.steps=1")),
               *path = process_output(config, "checkpoints/step-000001/" AMAX);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, -1, SEEK_END);
    fputc(7, f);
    fclose(f);
    assert_int_not_equal(process_run_sets(config, fixed("train.steps=2")), 0);
    assert_says(said.err, AMAX " is damaged");
    check_negative_zero(config);
    assert_int_equal(remove(process_output(config, AMAX)), 0);
    assert_int_not_equal(RUN("eval", process_output(config, "config.ini")), 0);
    assert_says(said.err, "has no quant_amax.safetensors");
    (void)state;
}

/* Steps before quant.start are those of a run without quantisation; later ones differ. From a checkpoint before, at or
 * after quant.start the run continues with the same bits. */
static void test_start(void **state)
{
#define LATE(steps) "train.steps=" #steps " quant.start=2 output.save_every=1 output.keep=0"
    const char *plain = process_trained("optim.schedule=constant train.steps=2");
    const char *all = process_trained("optim.schedule=constant quant.weights=int8 " LATE(3));
    assert_says(said.err, "with the adapter merged; training steps after step 2\n");
    assert_same_file(process_output(plain, ADAPTER), process_output(all, "checkpoints/step-000002/" ADAPTER));
    if (RUN("eval", process_output(all, "config.ini"))) fail_msg("%s", said.err);
    assert_says(said.err, "/adapter: experts read weights quantised to int8, with the adapter merged\n");
    if (RUN("eval", process_output(all, "config.ini"), "--base")) fail_msg("%s", said.err);
    assert_says(said.err, "evaluating the base model: experts read weights quantised to int8\n");
    assert_true(adapter_error(all, process_trained("optim.schedule=constant train.steps=3")) > 1e-6);
    all = process_trained(fixed(LATE(4)));
    uint32_t crc[2]; /* CRC of the fixed amax: they are those of the adapter at the first quantised step, not of the
                        first adapter */
    int64_t size;
    struct err err;
    assert_int_equal(file_crc32(process_output(all, AMAX), &crc[0], &size, &err), 0);
    assert_int_equal(file_crc32(process_output(process_trained(fixed("train.steps=1")), AMAX), &crc[1], &size, &err),
                     0);
    assert_true(crc[0] != crc[1]);
    const char *config = process_trained(fixed(LATE(3)));
    for (int at = 3; at >= 1; at--) { /* the checkpoints before `at` are those of the first run */
        char more[256], from[64];
        snprintf(from, sizeof(from), "checkpoints/step-00000%d", at);
        snprintf(more, sizeof(more), LATE(4) " train.resume=%s", process_output(config, from));
        if (process_run_sets(config, fixed(more))) fail_msg("resuming failed:\n%s", said.err);
        snprintf(more, sizeof(more), "continuing after step %d of 4 ", at);
        assert_says(said.err, more);
        assert_same_output(all, config, ADAPTER);
        assert_same_output(all, config, AMAX);
    }
    assert_int_not_equal(process_run_sets(process_config(""), "quant.weights=int8 train.steps=2 quant.start=2"), 0);
    assert_says(said.err, "quant.start = 2: no step of the run's 2 would be quantised");
    (void)state;
}

static void test_errors(void **state)
{
    const char *config = process_config("");
    assert_int_not_equal(process_run_sets(config, "quant.weights=int4-128"), 0);
    assert_says(said.err, "which blocks of 128 do not divide");
    assert_int_not_equal(process_run_sets(config, "quant.weights=fp8 quant.narrow=yes"), 0);
    assert_says(said.err, "quant.narrow = true with quant.weights = fp8: only int8 and int4");
    assert_int_not_equal(process_run_sets(config, "quant.weights=int3"), 0);
    assert_says(said.err, "int4-32");
    assert_int_not_equal(process_run_sets(config, "quant.weights=int8 quant.targets=all lora.dropout=0.1"), 0);
    assert_says(said.err, "lora.dropout = 0.1 with quant.targets = all");
    (void)state;
}

/* The parity case has MXFP4 experts. Quantising them to MXFP4 has no effect if they have no adapter, or if the adapter
 * is added after quantisation; a warning says so. */
static void test_no_effect(void **state)
{
    static const struct {
        const char *sets, *says;
    } rows[] = {
        {"quant.weights=mxfp4 lora.targets=q_proj", "lora.targets adapts none of them: add experts to it, or set "},
        {"quant.weights=mxfp4-ceil quant.mode=base", "quant.mode = base adds their adapters afterwards: set "},
        {"quant.weights=mxfp4", NULL},
        {"quant.weights=int8 lora.targets=q_proj", NULL},
        {"quant.weights=mxfp4 quant.targets=all lora.targets=q_proj", NULL},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        char sets[256];
        snprintf(sets, sizeof(sets), "train.steps=1 %s", rows[i].sets);
        process_trained(sets);
        const char *at = strstr(said.err, "has no effect: the experts are MXFP4 already, and ");
        if (!at != !rows[i].says) fail_msg("%s: %s", rows[i].sets, said.err);
        if (at) assert_non_null(strstr(at, rows[i].says));
        const bool none = strstr(said.err, "weights quantised to mxfp4, which have no adapter\n") != NULL;
        assert_int_equal(none, i == 0);
    }
}

/* Every choice of quant.weights is a format. */
static void test_choices(void **state)
{
    struct fakequant f;
    struct err err;
    char name[32];
    for (int n = 1; config_choice(QUANT_FORMATS, n, name); n++) assert_int_equal(fakequant_parse(&f, name, &err), 0);
    (void)state;
}

int test_qat(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrices),       cmocka_unit_test(test_mxfp4_stays),
        cmocka_unit_test(test_products),       cmocka_unit_test(test_straight_through),
        cmocka_unit_test(test_every_run),      cmocka_unit_test(qat_on_the_gpu),
        cmocka_unit_test(matrices_on_the_gpu), cmocka_unit_test(test_first_loss),
        cmocka_unit_test(test_same_adapter),   cmocka_unit_test(test_modes),
        cmocka_unit_test(test_divided),        cmocka_unit_test(test_no_effect),
        cmocka_unit_test(test_errors),         cmocka_unit_test(test_choices),
        cmocka_unit_test(test_static),         cmocka_unit_test(test_static_divided),
        cmocka_unit_test(test_static_files),   cmocka_unit_test(test_start),
    };
    return cmocka_run_group_tests_name("qat", tests, NULL, NULL);
}
