/* test_ops_dense.c - linear with adapters, rope, loss head. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/real.h"
#include "tests/packed.h"

#define NONE ((struct tensor){0})

static void put(struct op_outputs *o, struct tensor x)
{
    if (x.ndim) o->out[o->n++] = x;
}

/* ---- exp ---- */

static void exp_within_2_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (float x = -86.9f; x <= 88.7228f; x += 0.000731f + fabsf(x) * 1e-6f) {
        float exact = (float)exp((double)x), next = nextafterf(exact, INFINITY);
        if (isfinite(next)) worst = fmax(worst, fabs((double)real_exp(x) - exp((double)x)) / (double)(next - exact));
    }
    assert_true(worst > 0 && worst <= 2);
    assert_true(real_exp(0) == 1 && real_exp(-87) == 0 && real_exp(-INFINITY) == 0 && real_exp(-1e30f) == 0);
    assert_true(isinf(real_exp(89)) && isinf(real_exp(INFINITY)) && isnan(real_exp(NAN)));
}

/* ---- linear ---- */

struct linear_shape {
    int64_t n_tok, n_in, n_out;
    enum weight_format format;
    bool bias, res, want_dx;
    int64_t r;
    int n_seg;
    int64_t seg_first[3], seg_cols[3];
    float dropout;
    bool one_scale; /* of all segments */
};
static const struct linear_shape linear_shapes[] = {
    {0, 8, 6, WF_F32, true, true, true, 2, 1, {0}, {6}, 0.5f, false},
    {1, 2, 1, WF_BF16, false, false, true, 1, 1, {0}, {1}, 0, false},
    {5, 8, 6, WF_F32, true, false, true, 0, 0, {0}, {0}, 0, false},
    {7, 10, 9, WF_BF16, true, true, true, 3, 1, {0}, {9}, 0, false},
    {7, 10, 9, WF_F16, false, true, true, 3, 1, {2}, {5}, 0.25f, false},
    {9, 6, 12, WF_BF16, true, false, true, 2, 2, {0, 8}, {4, 4}, 0, false},
    {9, 6, 12, WF_F32, true, true, false, 2, 3, {0, 6, 9}, {6, 3, 3}, 0.5f, false},
    {130, 70, 96, WF_F16, true, false, true, 4, 3, {0, 64, 80}, {64, 16, 16}, 0.1f, false},
    {700, 150, 600, WF_BF16, true, true, true, 8, 2, {0, 500}, {200, 100}, 0, false},
    {513, 64, 129, WF_F32, false, true, true, 8, 1, {0}, {129}, 0.05f, false},
};

struct linear {
    struct device *dev;
    struct proj proj;
    struct tensor x, res, y, xa, dx;
};

static struct linear linear_make(struct device *dev, const struct linear_shape *s)
{
    const struct weight_packing packing = {s->format, 64, false};
    struct linear l = {.dev = dev, .proj.w = make_packed(packing, 1, 0.3, 1, s->n_out, s->n_in)};
    l.x = make_random(dev->act_dtype, 2, 1, s->n_tok, s->n_in, -1);
    l.y = make_empty(dev->act_dtype, s->n_tok, s->n_out, -1);
    if (s->bias) l.proj.bias = make_random(DT_F32, 3, 1, s->n_out, -1, -1);
    if (s->res) l.res = make_random(dev->act_dtype, 4, 1, s->n_tok, s->n_out, -1);
    if (s->want_dx) l.dx = make_empty(dev->act_dtype, s->n_tok, s->n_in, -1);
    if (!s->r) return l;
    l.proj.lora = (struct lora){
        .r = s->r, .scale = {1.5f, 0.75f, 2.25f}, .n_seg = s->n_seg, .dropout = s->dropout, .dropout_key = 99};
    int64_t rows = 0;
    for (int i = 0; i < s->n_seg; rows += s->seg_cols[i++]) {
        if (s->one_scale) l.proj.lora.scale[i] = 1.5f;
        l.proj.lora.seg_first[i] = s->seg_first[i];
        l.proj.lora.seg_cols[i] = s->seg_cols[i];
    }
    l.proj.lora.a = make_random(dev->act_dtype, 5, 1, s->n_seg * s->r, s->n_in, -1);
    l.proj.lora.b = make_random(dev->act_dtype, 6, 1, rows, s->r, -1);
    l.xa = make_empty(dev->act_dtype, s->n_tok, s->n_seg * s->r, -1);
    l.proj.grad.a = make_zero(dev->stat_dtype, s->n_seg * s->r, s->n_in, -1);
    l.proj.grad.b = make_zero(dev->stat_dtype, rows, s->r, -1);
    return l;
}

static void linear_fwd(struct linear *l) { op_linear_fwd(l->dev, l->y, l->xa, l->x, &l->proj, l->res); }

static void linear_bwd(struct linear *l) { op_linear_bwd(l->dev, l->dx, make_probe(l->y, 7), l->x, l->xa, &l->proj); }

static void linear_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct linear l = linear_make(dev, params);
    linear_fwd(&l);
    linear_bwd(&l);
    struct tensor all[] = {l.y, l.xa, l.dx, l.proj.grad.a, l.proj.grad.b};
    for (int i = 0; i < MT_LEN(all); i++) put(o, all[i]);
}

static double linear_loss(void *arg)
{
    struct linear *l = arg;
    linear_fwd(l);
    return probe(l->y, 7);
}

/* Element (t, i) of x after dropout. */
static double dropped(const struct linear *l, int64_t t, int64_t i)
{
    int64_t at = t * l->proj.w.n_in + i;
    double p = (double)l->proj.lora.dropout, x = value_at(l->x, at);
    if (p <= 0) return x;
    return rng_uniform(l->proj.lora.dropout_key, (uint64_t)at) >= p ? x / (1 - p) : 0;
}

/* y[t, o] by the definition. */
static double linear_reference(const struct linear *l, struct tensor w, int64_t t, int64_t o)
{
    int64_t n_in = l->proj.w.n_in, base = 0;
    double y = l->proj.bias.ndim ? value_at(l->proj.bias, o) : 0;
    if (l->res.ndim) y += value_at(l->res, t * l->proj.w.n_out + o);
    for (int64_t i = 0; i < n_in; i++) y += value_at(l->x, t * n_in + i) * value_at(w, o * n_in + i);
    for (int s = 0; s < l->proj.lora.n_seg; base += l->proj.lora.seg_cols[s++]) {
        int64_t row = o - l->proj.lora.seg_first[s];
        if (row < 0 || row >= l->proj.lora.seg_cols[s]) continue;
        for (int64_t r = 0; r < l->proj.lora.r; r++) {
            double xa = 0;
            for (int64_t i = 0; i < n_in; i++)
                xa += dropped(l, t, i) * value_at(l->proj.lora.a, (s * l->proj.lora.r + r) * n_in + i);
            y += (double)l->proj.lora.scale[s] * xa * value_at(l->proj.lora.b, (base + row) * l->proj.lora.r + r);
        }
    }
    return y;
}

static void linear_forward_is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(linear_shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct linear l = linear_make(&dev, &linear_shapes[i]);
        struct weight plain = make_weight(WF_F32, 1, 0.3, 1, l.proj.w.n_out, l.proj.w.n_in);
        struct tensor w = tensor_2d((void *)(uintptr_t)plain.data, DT_F32, l.proj.w.n_out, l.proj.w.n_in);
        linear_fwd(&l);
        assert_finite(l.y);
        int64_t n = tensor_count(l.y), step = n > 5000 ? 97 : 1;
        for (int64_t k = 0; k < n; k += step)
            assert_close(value_at(l.y, k), linear_reference(&l, w, k / l.proj.w.n_out, k % l.proj.w.n_out), 1e-12);
        op_check_end(&dev);
    }
}

static void linear_gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(linear_shapes); i++) {
        struct device dev;
        if (linear_shapes[i].n_tok > 9) continue;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* thousands of tiny calls */
        struct linear l = linear_make(&dev, &linear_shapes[i]);
        linear_fwd(&l);
        linear_bwd(&l);
        if (l.dx.ndim) assert_true(gradient_error(linear_loss, &l, l.x, l.dx) < 1e-8);
        if (l.proj.lora.r) {
            assert_true(gradient_error(linear_loss, &l, l.proj.lora.a, l.proj.grad.a) < 1e-8);
            assert_true(gradient_error(linear_loss, &l, l.proj.lora.b, l.proj.grad.b) < 1e-8);
            struct tensor a = make_copy(l.proj.grad.a), b = make_copy(l.proj.grad.b);
            linear_fwd(&l); /* the finite differences changed xa */
            linear_bwd(&l); /* gradients are added to */
            for (int64_t k = 0; k < tensor_count(a); k++)
                assert_close(value_at(l.proj.grad.a, k), 2 * value_at(a, k), 1e-13);
            for (int64_t k = 0; k < tensor_count(b); k++)
                assert_close(value_at(l.proj.grad.b, k), 2 * value_at(b, k), 1e-13);
        }
        op_check_end(&dev);
    }
}

static void linear_gradients_of_large_shapes(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(linear_shapes); i++) {
        struct device dev;
        if (linear_shapes[i].n_tok <= 9) continue;
        op_check_begin(&dev, true);
        struct linear l = linear_make(&dev, &linear_shapes[i]);
        linear_fwd(&l);
        linear_bwd(&l);
        assert_true(slope_error(linear_loss, &l, l.x, l.dx) < 1e-6);
        assert_true(slope_error(linear_loss, &l, l.proj.lora.a, l.proj.grad.a) < 1e-6);
        assert_true(slope_error(linear_loss, &l, l.proj.lora.b, l.proj.grad.b) < 1e-6);
        op_check_end(&dev);
    }
}

static void linear_precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(linear_shapes); i++) op_check_case(linear_run, &linear_shapes[i], 1e-6);
}

/* Tensors that are columns of wider ones give the same bits, and the columns beside them stay unchanged. */
static void linear_takes_views(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct linear l = linear_make(&dev, &linear_shapes[8]);
    linear_fwd(&l);
    linear_bwd(&l);
    struct linear v = linear_make(&dev, &linear_shapes[8]);
    struct tensor *views[] = {&v.x, &v.res, &v.y, &v.dx, &v.xa};
    struct tensor wide[5];
    for (int i = 0; i < 5; i++) {
        struct tensor x = *views[i];
        wide[i] = make_zero(x.dtype, x.shape[0], x.shape[1] + 3, -1);
        *views[i] = tensor_cols(wide[i], 2, x.shape[1]);
        for (int64_t k = 0; k < tensor_count(x); k++) set_value(*views[i], k, value_at(x, k));
    }
    linear_fwd(&v);
    linear_bwd(&v);
    assert_same_bits(v.y, l.y);
    assert_same_bits(v.dx, l.dx);
    assert_same_bits(v.proj.grad.a, l.proj.grad.a);
    assert_same_bits(v.proj.grad.b, l.proj.grad.b);
    for (int i = 0; i < 5; i++) {
        struct tensor left = tensor_cols(wide[i], 0, 2), right = tensor_cols(wide[i], wide[i].shape[1] - 1, 1);
        for (int64_t k = 0; k < tensor_count(left); k++) assert_true(value_at(left, k) == 0);
        for (int64_t k = 0; k < tensor_count(right); k++) assert_true(value_at(right, k) == 0);
    }
    op_check_end(&dev);
}

static const struct linear_shape gpu_linear_shapes[] = {
    {0, 64, 72, WF_NF4, true, true, true, 8, 1, {0}, {72}, 0.3f, false},
    {1, 72, 200, WF_BF16, true, true, true, 16, 1, {0}, {200}, 0, false},
    {1, 8, 8, WF_BF16, false, false, true, 0, 0, {0}, {0}, 0, false},
    {37, 200, 72, WF_F16, false, false, false, 0, 0, {0}, {0}, 0, false},
    {37, 72, 200, WF_F32, true, false, true, 0, 0, {0}, {0}, 0, false},
    {37, 72, 136, WF_F16, false, true, true, 24, 1, {40}, {56}, 0.3f, false},
    {37, 64, 328, WF_NF4, false, false, true, 8, 1, {0}, {328}, 0.3f, false},
    {128, 64, 64, WF_BF16, true, false, true, 256, 1, {0}, {64}, 0, false},
    {130, 200, 328, WF_BF16, true, false, true, 8, 3, {0, 192, 256}, {192, 64, 72}, 0, false},
    {130, 200, 328, WF_BF16, true, true, true, 16, 2, {0, 256}, {192, 72}, 0.3f, false},
    {130, 128, 264, WF_MXFP4, false, true, true, 40, 1, {0}, {264}, 0.1f, false},
    {130, 128, 200, WF_FP4, true, false, false, 16, 2, {8, 104}, {96, 96}, 0.3f, false},
    {130, 2880, 640, WF_NF4, true, false, true, 32, 3, {0, 512, 576}, {512, 64, 64}, 0, false},
    /* in_proj_b and in_proj_a of 4, 6 and 3 value heads; columns between segments; widths of no common factor */
    {37, 256, 8, WF_BF16, false, false, true, 8, 2, {0, 4}, {4, 4}, 0, false},
    {130, 72, 12, WF_BF16, false, false, true, 16, 2, {0, 6}, {6, 6}, 0.3f, false},
    {5, 64, 6, WF_F32, true, true, true, 24, 2, {0, 3}, {3, 3}, 0, false},
    {130, 72, 203, WF_BF16, true, true, true, 16, 3, {1, 70, 140}, {67, 70, 61}, 0, false},
    {33, 64, 72, WF_NF4, true, false, true, 8, 2, {0, 12}, {12, 60}, 0, false},
    /* dy B and dB in one pass on Hopper: several slabs of columns and parts of rows, no dx; a part of one row */
    {700, 64, 1288, WF_BF16, false, false, false, 8, 3, {0, 600, 664}, {600, 64, 616}, 0, false},
    {257, 64, 808, WF_BF16, false, false, true, 16, 1, {8}, {792}, 0.3f, false},
};

/* x between eight columns of zeros on each side, which would reveal a write of an op outside the view. */
static struct tensor widened(struct tensor x, struct op_outputs *sides)
{
    if (!x.ndim) return x;
    const int64_t n = x.shape[1];
    struct tensor wide = make_zero(x.dtype, x.shape[0], n + 16, -1), view = tensor_cols(wide, 8, n);
    for (int64_t i = 0; i < tensor_count(x); i++) set_value(view, i, value_at(x, i));
    put(sides, tensor_cols(wide, 0, 8));
    put(sides, tensor_cols(wide, n + 8, 8));
    return view;
}

static void linear_run_views(struct device *dev, const void *params, struct op_outputs *o)
{
    struct linear l = linear_make(dev, params);
    struct tensor *views[] = {&l.x, &l.res, &l.y, &l.xa, &l.dx};
    for (int i = 0; i < MT_LEN(views); i++) *views[i] = widened(*views[i], o);
    linear_fwd(&l);
    linear_bwd(&l);
    struct tensor all[] = {l.y, l.xa, l.dx, l.proj.grad.a, l.proj.grad.b};
    for (int i = 0; i < MT_LEN(all); i++) put(o, all[i]);
}

/* As in a pass that samples, where few rows read W once. */
static void linear_run_steady(struct device *dev, const void *params, struct op_outputs *o)
{
    dev->steady_rows = true;
    linear_run_views(dev, params, o);
    dev->steady_rows = false;
}

/* With scales of MXFP4 on both sides of 2^1, where two factors decode a value. */
static void linear_run_scales(struct device *dev, const void *params, struct op_outputs *o)
{
    struct linear l = linear_make(dev, params);
    uint8_t *scale = (uint8_t *)(uintptr_t)l.proj.w.scale;
    for (int64_t i = 0; i < l.proj.w.n_out * l.proj.w.n_in / 32; i++) scale[i] = (uint8_t)(120 + i % 16);
    dev->steady_rows = true;
    linear_fwd(&l);
    dev->steady_rows = false;
    put(o, l.y);
}

static const struct linear_shape gpu_few_shapes[] = {
    {1, 2880, 5120, WF_BF16, true, false, true, 16, 3, {0, 4096, 4608}, {4096, 512, 512}, 0, false},
    {16, 160, 8232, WF_BF16, true, true, true, 40, 1, {0}, {8232}, 0, false},
    {9, 96, 200, WF_NF4, false, true, true, 8, 2, {16, 112}, {80, 88}, 0, false},
    {13, 64, 136, WF_MXFP4, true, false, true, 24, 1, {0}, {136}, 0, false},
    {2, 544, 64, WF_NVFP4, false, false, true, 0, 0, {0}, {0}, 0, false},
};

static void linear_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_linear_shapes); i++) {
        op_check_cuda(linear_run, &gpu_linear_shapes[i]);
        op_check_cuda(linear_run_views, &gpu_linear_shapes[i]);
        op_check_cuda(linear_run_steady, &gpu_linear_shapes[i]);
    }
    for (int i = 0; i < MT_LEN(gpu_few_shapes); i++) {
        op_check_cuda(linear_run_steady, &gpu_few_shapes[i]);
        if (gpu_few_shapes[i].format == WF_MXFP4) op_check_cuda(linear_run_scales, &gpu_few_shapes[i]);
    }
}

/* Enough tiles for the kernel of dense layers on Hopper. Segments that begin inside a tile of 192 columns, which the
 * kernel takes when they have one scale, also three in one tile; r above the depth of a step, dropout, columns that no
 * segment has; residuals, also without adapter; few rows in the last tile; backward. */
static const struct linear_shape gpu_dense_shapes[] = {
    {1111, 40, 4608, WF_BF16, true, false, false, 16, 3, {0, 4096, 4352}, {4096, 256, 256}, 0, false},
    {1111, 40, 4608, WF_BF16, true, true, false, 16, 3, {0, 4096, 4352}, {4096, 256, 256}, 0, true},
    {1711, 72, 2880, WF_F16, true, true, false, 72, 2, {192, 768}, {384, 1000}, 0.3f, false},
    {1711, 72, 2880, WF_F16, false, false, false, 72, 3, {200, 296, 328}, {96, 32, 1000}, 0.3f, true},
    {1711, 40, 2880, WF_BF16, false, true, false, 0, 0, {0}, {0}, 0, false},
    {1111, 4352, 72, WF_NF4, false, false, true, 8, 2, {0, 40}, {40, 32}, 0, false},
};

static void large_linear_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_dense_shapes); i++) op_check_cuda(linear_run_views, &gpu_dense_shapes[i]);
}

/* ---- rope ---- */

struct rope {
    struct device *dev;
    struct tensor x, pos, table, y;
    int64_t head_dim, first; /* columns from one head to the next; the first rotated column */
};

/* Three heads of head_dim columns, of which 6 are rotated, from column `first` of each head on. */
struct rope_case {
    int64_t n_tok, head_dim, first;
};

static const int32_t rope_pos[] = {0, 3, 4, 0, 1, 2, 9};

static struct rope rope_make(struct device *dev, const struct rope_case *c)
{
    struct rope r = {.dev = dev,
                     .x = make_random(dev->act_dtype, 1, 1, c->n_tok, 3 * c->head_dim + 2, -1),
                     .pos = make_i32(rope_pos, c->n_tok),
                     .table = make_empty(DT_F32, 10, 6, -1),
                     .head_dim = c->head_dim,
                     .first = c->first};
    for (int64_t p = 0; p < 10; p++) {
        for (int64_t i = 0; i < 3; i++) { /* with an attention factor of 1.25 */
            set_value(r.table, p * 6 + i, 1.25 * cos((double)p / pow(10, (double)i)));
            set_value(r.table, p * 6 + 3 + i, 1.25 * sin((double)p / pow(10, (double)i)));
        }
    }
    return r;
}

/* The columns from the first rotated one to the last head's last. */
static struct tensor rope_view(const struct rope *r, struct tensor x)
{
    return tensor_cols(x, r->first, 3 * r->head_dim - r->first);
}

static void rope_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct rope r = rope_make(dev, params);
    r.y = make_copy(r.x);
    op_rope_fwd(dev, rope_view(&r, r.y), r.pos, r.table, 3, r.head_dim);
    struct tensor dx = make_probe(r.x, 2);
    op_rope_bwd(dev, rope_view(&r, dx), r.pos, r.table, 3, r.head_dim);
    put(o, r.y);
    put(o, dx);
}

static double rope_loss(void *arg)
{
    struct rope *r = arg;
    r->y = make_copy(r->x);
    op_rope_fwd(r->dev, rope_view(r, r->y), r->pos, r->table, 3, r->head_dim);
    return probe(r->y, 2);
}

/* Every element of y and, by finite differences, the gradient. */
static void rope_values(struct device *dev, const struct rope_case *c)
{
    struct rope r = rope_make(dev, c);
    const int64_t n_col = r.x.shape[1];
    rope_loss(&r);
    for (int64_t t = 0; t < c->n_tok; t++) {
        for (int64_t col = 0; col < n_col; col++) {
            const int64_t in_head = col % c->head_dim - c->first, i = in_head % 3;
            const bool rotated = col < 3 * c->head_dim && in_head >= 0 && in_head < 6;
            const double x = value_at(r.x, t * n_col + col);
            double y = x;
            if (rotated) {
                const double cosine = value_at(r.table, rope_pos[t] * 6 + i);
                const double sine = value_at(r.table, rope_pos[t] * 6 + 3 + i);
                const double other = value_at(r.x, t * n_col + col + (in_head < 3 ? 3 : -3));
                y = x * cosine + (in_head < 3 ? -other : other) * sine;
            }
            assert_close(value_at(r.y, t * n_col + col), y, 1e-15);
        }
    }
    struct tensor dx = make_probe(r.x, 2);
    op_rope_bwd(dev, rope_view(&r, dx), r.pos, r.table, 3, r.head_dim);
    assert_true(gradient_error(rope_loss, &r, r.x, dx) < 1e-9);
}

static void rope(void **state)
{
    (void)state;
    static const struct rope_case cases[] = {{0, 6, 0}, {1, 6, 0}, {7, 6, 0}, {7, 12, 0}, {1, 24, 0}, {7, 10, 4}};
    for (int i = 0; i < MT_LEN(cases); i++) op_check_case(rope_run, &cases[i], 1e-6);
    struct device dev;
    op_check_begin(&dev, true);
    dev.n_threads = 1; /* hundreds of tiny calls */
    for (int i = 2; i < MT_LEN(cases); i++) rope_values(&dev, &cases[i]);
    op_check_end(&dev);
}

/* On the GPU: heads that are not rotated and columns around the view are unchanged. */
struct gpu_rope {
    int64_t n_tok, n_head, n_more, dim, pad;
    int64_t rest; /* columns of a head after the rotated ones */
};

static void gpu_rope_run(struct device *dev, const void *params, struct op_outputs *o)
{
    enum { POSITIONS = 50 };
    const struct gpu_rope *p = params;
    int64_t head_dim = p->dim + p->rest, width = (p->n_head + p->n_more) * head_dim, half = p->dim / 2;
    struct tensor table = make_empty(DT_F32, POSITIONS, p->dim, -1), pos = make_empty(DT_I32, p->n_tok, -1, -1);
    for (int64_t k = 0; k < POSITIONS * half; k++) {
        double angle = (double)(k / half) / pow(1e4, (double)(k % half) / (double)half);
        set_value(table, k / half * p->dim + k % half, 1.25 * cos(angle));
        set_value(table, k / half * p->dim + half + k % half, 1.25 * sin(angle));
    }
    for (int64_t t = 0; t < p->n_tok; t++) ((int32_t *)pos.data)[t] = (int32_t)((49 + 13 * t) % POSITIONS);
    for (int back = 0; back < 2; back++) {
        struct tensor wide = make_random(dev->act_dtype, 1, 1, p->n_tok, width + p->pad, -1);
        struct tensor qkv = p->pad ? tensor_cols(wide, 8, width) : wide;
        if (back)
            op_rope_bwd(dev, qkv, pos, table, p->n_head, head_dim);
        else
            op_rope_fwd(dev, qkv, pos, table, p->n_head, head_dim);
        put(o, wide);
    }
}

static void rope_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct gpu_rope cases[] = {
        {0, 4, 2, 64, 0, 0},    {1, 1, 0, 16, 0, 0},     {7, 3, 1, 48, 16, 0},    {33, 72, 8, 64, 0, 0},
        {33, 36, 4, 128, 0, 0}, {5, 32, 16, 128, 24, 0}, {65, 10, 2, 64, 8, 0},   {3, 5, 1, 256, 0, 0},
        {9, 6, 2, 80, 16, 0},   {5, 12, 1, 96, 0, 0},    {5, 4, 2, 112, 24, 0},   {7, 9, 3, 192, 0, 0},
        {2, 1, 1, 144, 16, 0},  {33, 104, 8, 64, 0, 64}, {5, 18, 2, 64, 16, 192}, {3, 2, 1, 16, 8, 8},
        {7, 3, 1, 8, 0, 0},     {65, 6, 2, 24, 16, 0},   {5, 4, 2, 4, 0, 12},     {3, 5, 1, 40, 8, 0},
        {2, 3, 0, 6, 8, 3},
    };
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(gpu_rope_run, &cases[i]);
}

/* ---- loss head ---- */

struct ce_shape {
    int64_t n_tok, dim, n_vocab, n_label, chunk;
    enum weight_format format;
    bool want_dx;
};
static const struct ce_shape ce_shapes[] = {
    {0, 4, 5, 0, 8, WF_F32, true},    {3, 4, 5, 0, 8, WF_F32, true},           {1, 4, 5, 1, 1, WF_BF16, true},
    {6, 8, 11, 4, 1, WF_F16, true},   {6, 8, 11, 6, 4, WF_F32, true},          {7, 6, 9, 5, 100, WF_BF16, false},
    {7, 6, 9, 5, 100, WF_BF16, true}, {300, 64, 2500, 211, 64, WF_BF16, true},
};

struct ce {
    struct device *dev;
    const struct ce_shape *s;
    struct weight w;
    struct tensor x, rows, ids, nll, hit, dx;
};

static struct ce ce_make(struct device *dev, const struct ce_shape *s)
{
    struct ce c = {.dev = dev,
                   .s = s,
                   .w = make_packed((struct weight_packing){s->format, 64, false}, 1, 0.5, 1, s->n_vocab, s->dim),
                   .x = make_random(dev->act_dtype, 2, 2, s->n_tok, s->dim, -1),
                   .rows = make_empty(DT_I32, s->n_label, -1, -1),
                   .ids = make_empty(DT_I32, s->n_label, -1, -1),
                   .nll = make_empty(dev->stat_dtype, s->n_label, -1, -1),
                   .hit = make_empty(DT_I32, s->n_label, -1, -1)};
    if (s->want_dx) c.dx = make_empty(dev->act_dtype, s->n_tok, s->dim, -1);
    for (int64_t i = 0; i < s->n_label; i++) {
        set_value(c.rows, i, (double)(i * s->n_tok / s->n_label));
        set_value(c.ids, i, (double)(i * 7 % s->n_vocab));
    }
    return c;
}

/* Caps of the logits for all cases of a test: none, and one that many logits exceed. */
static const float caps[] = {0, 1.5f};
static float cap;

static void ce_op(struct ce *c)
{
    op_linear_ce(c->dev, c->nll, c->hit, c->dx, c->x, &c->w, cap, c->rows, c->ids, 0.25f, c->s->chunk);
}

static void ce_run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct ce c = ce_make(dev, params);
    ce_op(&c);
    put(o, c.nll);
    put(o, c.dx);
    put(o, c.hit);
}

static double ce_loss(void *arg)
{
    struct ce *c = arg;
    double sum = 0;
    ce_op(c);
    for (int64_t i = 0; i < c->s->n_label; i++) sum += 0.25 * value_at(c->nll, i);
    return sum;
}

static void loss_head_of_cap(void)
{
    for (int i = 0; i < MT_LEN(ce_shapes); i++) op_check_case(ce_run, &ce_shapes[i], 2e-6);
    for (int i = 0; i < MT_LEN(ce_shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* thousands of tiny calls */
        struct ce c = ce_make(&dev, &ce_shapes[i]);
        struct weight plain = make_weight(WF_F32, 1, 0.5, 1, c.w.n_out, c.w.n_in);
        ce_op(&c);
        for (int64_t k = 0; k < c.s->n_label; k++) {
            double sum = 0, own = 0, best = -INFINITY;
            int64_t t = (int64_t)value_at(c.rows, k), id = (int64_t)value_at(c.ids, k), arg_max = 0;
            for (int64_t v = 0; v < c.w.n_out; v++) {
                double logit = 0;
                for (int64_t d = 0; d < c.w.n_in; d++)
                    logit += value_at(c.x, t * c.w.n_in + d) * (double)((const float *)plain.data)[v * c.w.n_in + d];
                if (cap > 0) logit = (double)cap * tanh(logit / (double)cap);
                sum += exp(logit);
                if (v == id) own = logit;
                if (logit > best) arg_max = v;
                best = fmax(best, logit);
            }
            assert_close(value_at(c.nll, k), log(sum) - own, 1e-13);
            assert_int_equal((int64_t)value_at(c.hit, k), arg_max == id);
        }
        if (c.dx.ndim) {
            struct tensor dx = make_copy(c.dx);
            if (c.s->n_tok < 10) assert_true(gradient_error(ce_loss, &c, c.x, dx) < 1e-8);
            if (c.s->n_tok >= 10) assert_true(slope_error(ce_loss, &c, c.x, dx) < 1e-6);
        }
        op_check_end(&dev);
    }
}

static void loss_head(void **state)
{
    (void)state;
    for (int i = MT_LEN(caps) - 1; i >= 0; i--) {
        cap = caps[i];
        loss_head_of_cap();
    }
}

/* Logits of up to 1e4 do not overflow, and the loss stays exact. Of equal largest logits the lower id is predicted. */
static void loss_head_extremes(void **state)
{
    (void)state;
    static const float weights[] = {1e4f, 1e4f, -1e4f, 0};
    static const int32_t rows[] = {0, 1, 2}, ids[] = {0, 1, 2};
    struct device dev;
    op_check_begin(&dev, false);
    struct weight w = {.format = WF_F32, .n_exp = 1, .n_out = 4, .n_in = 1, .data = weights};
    struct tensor x = make_empty(DT_F32, 3, 1, -1), dx = make_empty(DT_F32, 3, 1, -1);
    struct tensor nll = make_empty(DT_F32, 3, -1, -1), hit = make_empty(DT_I32, 3, -1, -1);
    for (int i = 0; i < 3; i++) set_value(x, i, 1);
    op_linear_ce(&dev, nll, hit, dx, x, &w, 0, make_i32(rows, 3), make_i32(ids, 3), 1, 2);
    assert_close(value_at(nll, 0), log(2), 1e-6);
    assert_close(value_at(nll, 1), log(2), 1e-6);
    assert_close(value_at(nll, 2), 2e4 + log(2), 1e-7);
    assert_true(value_at(hit, 0) == 1 && value_at(hit, 1) == 0 && value_at(hit, 2) == 0);
    assert_finite(dx);
    set_value(x, 1, NAN); /* affects its row only, and is visible */
    op_linear_ce(&dev, nll, hit, dx, x, &w, 0, make_i32(rows, 3), make_i32(ids, 3), 1, 2);
    assert_true(isnan(value_at(nll, 1)) && isnan(value_at(dx, 1)) && value_at(hit, 1) == 0);
    assert_true(isfinite(value_at(nll, 0)) && isfinite(value_at(dx, 2)));
    op_check_end(&dev);
}

/* In the last shape the tiles of dx fill 0.97 of a round of 132 multiprocessors, so choice_fused_head takes the kernel
 * of sm90/dense_wgmma.cu on Hopper, instead of cuBLASLt. */
static const struct ce_shape gpu_ce_shapes[] = {
    {0, 8, 5, 0, 16, WF_BF16, true},        {80, 64, 1000, 0, 16, WF_NF4, true},
    {80, 72, 1000, 1, 1, WF_BF16, true},    {80, 8, 5, 5, 1, WF_F16, true},
    {80, 72, 50257, 5, 16, WF_BF16, true},  {80, 72, 1000, 70, 64, WF_F32, true},
    {80, 64, 50257, 70, 64, WF_BF16, true}, {80, 200, 1000, 70, 16, WF_BF16, false},
    {80, 64, 1000, 70, 100, WF_NF4, true},  {80, 64, 1001, 70, 16, WF_MXFP4, true},
    {80, 64, 8, 70, 70, WF_BF16, true},     {300, 72, 2696, 290, 290, WF_BF16, true},
    {80, 72, 50256, 5, 16, WF_BF16, true},  {1030, 3072, 72, 1026, 1024, WF_BF16, true},
};
/* Gradients with enough tiles for the kernel of dense layers; the deep sums of the second are divided into parts, which
 * the blocks begin together. */
static const struct ce_shape gpu_large_ce_shapes[] = {
    {1040, 2880, 1000, 1030, 1024, WF_BF16, true},
    {1040, 2880, 8712, 1030, 1024, WF_BF16, true},
};

/* Every other labelled row is parallel to the weight row of its label, so its prediction is correct. */
static void ce_run_hits(struct device *dev, const void *params, struct op_outputs *o)
{
    struct ce c = ce_make(dev, params);
    for (int64_t k = 1; k < c.s->n_label; k += 2) {
        const int64_t row = (int64_t)value_at(c.rows, k), id = (int64_t)value_at(c.ids, k), dim = c.s->dim;
        for (int64_t i = 0; i < dim; i++) {
            const float w = 4 * quant_value(&c.w, 0, id * dim + i);
            set_value(c.x, row * dim + i, (double)bf16_to_f32(f32_to_bf16(w)));
        }
    }
    ce_op(&c);
    put(o, c.nll);
    put(o, c.dx);
    put(o, c.hit);
}

/* Large logits, and three equal ones far apart, of which the lowest id is predicted. */
static const int64_t extreme_vocabs[] = {7001, 7008};
static void ce_run_extremes(struct device *dev, const void *params, struct op_outputs *o)
{
    const int64_t n_vocab = *(const int64_t *)params;
    static const int32_t rows[] = {0, 1, 2, 3}, ids[] = {800, 4104, 7000, 3};
    struct tensor w = make_zero(DT_F32, n_vocab, 8, -1), x = make_zero(dev->act_dtype, 4, 8, -1);
    struct tensor dx = make_empty(dev->act_dtype, 4, 8, -1);
    struct tensor nll = make_empty(dev->stat_dtype, 4, -1, -1), hit = make_empty(DT_I32, 4, -1, -1);
    struct weight head = {.format = WF_F32, .n_exp = 1, .n_out = n_vocab, .n_in = 8, .data = w.data};
    for (int i = 0; i < 4; i++) {
        set_value(w, 8 * ids[i], i < 3 ? 8192 : -8192);
        set_value(x, 8 * i, 1);
    }
    op_linear_ce(dev, nll, hit, dx, x, &head, 0, make_i32(rows, 4), make_i32(ids, 4), 1, 3);
    put(o, nll);
    put(o, dx);
    put(o, hit);
}

static void loss_head_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_ce_shapes); i++) op_check_cuda(ce_run_hits, &gpu_ce_shapes[i]);
    cap = 4;
    for (int i = 0; i < 8; i++) op_check_cuda(ce_run, &gpu_ce_shapes[i]);
    cap = 0;
    op_check_cuda(ce_run_extremes, &extreme_vocabs[0]);
    op_check_cuda(ce_run_extremes, &extreme_vocabs[1]);
}

/* A dry run counts the labels of the largest micro-batch; fewer labels need no more scratch. */
static void loss_head_scratch_of_the_plan(void **state)
{
    static const int64_t dims[] = {2048, 2880, 4096}, chunks[] = {64, 1280, 1664, 3072, 4096};
    struct device card, plan;
    struct err err;
    (void)state;
    for (enum cuda_arch arch = CUDA_SM80; arch <= CUDA_SM90; arch++) {
        if (device_open_card(&card, &(struct device_card){.bytes = (int64_t)80 << 30, .arch = arch}, "auto", &err)) {
            print_message("skip: scratch of the loss head: %s\n", err.msg);
            skip();
        }
        for (int i = 0; i < MT_LEN(dims) * MT_LEN(chunks); i++) {
            const int64_t dim = dims[i % MT_LEN(dims)], chunk = chunks[i / MT_LEN(dims)], n_tok = 8192;
            const struct weight w = {.format = WF_BF16, .n_exp = 1, .n_out = 151936, .n_in = dim};
            const struct tensor x = tensor_2d(NULL, DT_BF16, n_tok, dim);
            int64_t before = 0;
            for (int64_t n = 1; n <= n_tok; n += n < 4 ? 1 : 61) {
                const struct tensor i32 = tensor_1d(NULL, DT_I32, n), nll = tensor_1d(NULL, DT_F32, n);
                device_dry_run(&plan, &card);
                op_linear_ce(&plan, nll, i32, x, x, &w, 0, i32, i32, 1, chunk);
                assert_true(plan.work.peak >= before);
                before = plan.work.peak;
            }
        }
        device_close(&card);
    }
}

static void loss_head_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_large_ce_shapes); i++) op_check_cuda(ce_run_hits, &gpu_large_ce_shapes[i]);
}

/* ---- the wrappers ---- */

static void bf16_rounds_outputs_only(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct linear l = linear_make(&dev, &linear_shapes[7]), h = linear_make(&dev, &linear_shapes[7]);
    linear_fwd(&l);
    dev.round_bf16 = true;
    linear_fwd(&h);
    for (int64_t i = 0; i < tensor_count(l.y); i++)
        assert_true(value_at(h.y, i) == (double)bf16_to_f32(f32_to_bf16((float)value_at(l.y, i))));
    for (int64_t i = 0; i < tensor_count(l.xa); i++)
        assert_true(value_at(h.xa, i) == (double)bf16_to_f32(f32_to_bf16((float)value_at(l.xa, i))));
    assert_same_bits(h.x, l.x);
    op_check_end(&dev);
}

static void flops_are_counted(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct linear l = linear_make(&dev, &linear_shapes[8]); /* T 700, in 150, out 600, two segments of rank 8 */
    linear_fwd(&l);
    assert_close(dev.flops, 2.0 * 700 * (150 * 600 + 8 * (2 * 150 + 300)), 1e-15);
    dev.flops = 0;
    linear_bwd(&l);
    assert_close(dev.flops, 2.0 * 700 * (150 * 600 + 2 * 8 * (2 * 150 + 300)), 1e-15);
    op_check_end(&dev);
}

int test_ops_dense(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_within_2_ulp),
        cmocka_unit_test(linear_forward_is_the_definition),
        cmocka_unit_test(linear_gradients),
        cmocka_unit_test(linear_gradients_of_large_shapes),
        cmocka_unit_test(linear_precision_threads_measure),
        cmocka_unit_test(linear_takes_views),
        cmocka_unit_test(linear_on_the_gpu),
        cmocka_unit_test(large_linear_on_the_gpu),
        cmocka_unit_test(rope),
        cmocka_unit_test(rope_on_the_gpu),
        cmocka_unit_test(loss_head),
        cmocka_unit_test(loss_head_extremes),
        cmocka_unit_test(loss_head_on_the_gpu),
        cmocka_unit_test(loss_head_large_on_the_gpu),
        cmocka_unit_test(loss_head_scratch_of_the_plan),
        cmocka_unit_test(bf16_rounds_outputs_only),
        cmocka_unit_test(flops_are_counted),
    };
    return cmocka_run_group_tests_name("ops_dense", tests, NULL, NULL);
}
