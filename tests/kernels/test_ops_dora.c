/* test_ops_dora.c - DoRA: norms of the rows of W + scale B A, the scaled product and its gradients, against the
 * definition and finite differences; the GPU against the CPU. */
#include "tests/test.h"

#include <math.h>

#include "tests/packed.h"

struct shape {
    int64_t n_tok, n_in, n_out;
    enum weight_format format;
    bool bias, res;
    int64_t r;
    int n_seg;
    int64_t seg_first[3], seg_cols[3];
};
static const struct shape shapes[] = {
    {0, 8, 6, WF_F32, true, true, 2, 1, {0}, {6}},
    {1, 2, 1, WF_BF16, false, false, 1, 1, {0}, {1}},
    {7, 10, 9, WF_BF16, true, true, 3, 1, {2}, {5}},
    {9, 6, 12, WF_F32, true, false, 2, 2, {0, 8}, {4, 4}},
    {33, 64, 96, WF_NF4, false, true, 4, 3, {0, 64, 80}, {64, 16, 16}},
};
/* q | k | v of a layer, q and v of them, rows that no tile divides, 4 bits. */
static const struct shape gpu_shapes[] = {
    {130, 512, 768, WF_BF16, true, false, 16, 3, {0, 512, 640}, {512, 128, 128}},
    {67, 2880, 1024, WF_BF16, false, true, 8, 2, {0, 896}, {512, 128}},
    {9, 72, 40, WF_F16, true, true, 24, 1, {0}, {40}},
    {40, 256, 200, WF_NF4, false, true, 8, 1, {8}, {184}},
    {0, 64, 64, WF_BF16, true, true, 8, 1, {0}, {64}},
};

struct linear {
    struct device *dev;
    struct proj proj;
    struct tensor x, y, z, xa, res;
};

static struct linear make(struct device *dev, const struct shape *s)
{
    const struct weight_packing packing = {s->format, 64, false};
    struct linear l = {.dev = dev, .proj.w = make_packed(packing, 1, 0.3, 1, s->n_out, s->n_in)};
    struct lora *lora = &l.proj.lora;
    int64_t rows = 0;
    *lora = (struct lora){.r = s->r, .scale = {1.5f, 0.75f, 2.25f}, .n_seg = s->n_seg};
    for (int i = 0; i < s->n_seg; rows += s->seg_cols[i++])
        lora->seg_first[i] = s->seg_first[i], lora->seg_cols[i] = s->seg_cols[i];
    lora->a = make_random(dev->act_dtype, 5, 0.5, s->n_seg * s->r, s->n_in, -1);
    lora->b = make_random(dev->act_dtype, 6, 0.5, rows, s->r, -1);
    lora->master_a = make_random(dev->stat_dtype, 5, 0.5, s->n_seg * s->r, s->n_in, -1);
    lora->master_b = make_random(dev->stat_dtype, 6, 0.5, rows, s->r, -1);
    l.proj.dora = (struct dora){.m = make_random(dev->stat_dtype, 7, 1, rows, -1, -1),
                                .norm = make_empty(dev->stat_dtype, rows, -1, -1),
                                .grad = make_zero(dev->stat_dtype, rows, -1, -1)};
    if (s->bias) l.proj.bias = make_random(DT_F32, 3, 1, s->n_out, -1, -1);
    if (s->res) l.res = make_random(dev->act_dtype, 4, 1, s->n_tok, s->n_out, -1);
    l.x = make_random(dev->act_dtype, 2, 1, s->n_tok, s->n_out, -1); /* the product that is scaled */
    l.y = make_copy(l.x);
    l.z = make_copy(l.x);
    return l;
}

static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct linear l = make(dev, params);
    op_row_norm(dev, l.proj.dora.norm, &l.proj);
    op_dora_fwd(dev, l.y, &l.proj, l.res);
    op_dora_bwd(dev, l.z, make_probe(l.y, 8), &l.proj);
    const struct tensor all[] = {l.proj.dora.norm, l.y, l.z, l.proj.dora.grad};
    for (int i = 0; i < MT_LEN(all); i++) o->out[o->n++] = all[i];
}

/* The row of B of an output column, and its segment; -1: none. */
static int64_t row_of(const struct lora *l, int64_t col, int *segment)
{
    int64_t base = 0;
    for (int s = 0; s < l->n_seg; base += l->seg_cols[s++])
        if (col >= l->seg_first[s] && col < l->seg_first[s] + l->seg_cols[s])
            return *segment = s, base + col - l->seg_first[s];
    return -1;
}

static double norm_of(const struct linear *l, struct tensor w, int64_t col, int s, int64_t row)
{
    const int64_t n_in = l->proj.w.n_in, r = l->proj.lora.r;
    double sum = 0;
    for (int64_t i = 0; i < n_in; i++) {
        double v = 0;
        for (int64_t k = 0; k < r; k++)
            v += value_at(l->proj.lora.master_b, row * r + k) * value_at(l->proj.lora.master_a, (s * r + k) * n_in + i);
        sum += pow(value_at(w, col * n_in + i) + (double)l->proj.lora.scale[s] * v, 2);
    }
    return sqrt(sum);
}

static void is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        const struct shape *p = &shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct linear l = make(&dev, p);
        const struct weight flat = make_unpacked(&l.proj.w);
        const struct tensor w = tensor_2d((void *)(uintptr_t)flat.data, DT_F32, p->n_out, p->n_in);
        op_row_norm(&dev, l.proj.dora.norm, &l.proj);
        op_dora_fwd(&dev, l.y, &l.proj, l.res);
        for (int64_t c = 0; c < p->n_out; c++) {
            int s = 0;
            const int64_t row = row_of(&l.proj.lora, c, &s);
            const double norm = row < 0 ? 1 : norm_of(&l, w, c, s, row);
            if (row >= 0) assert_close(value_at(l.proj.dora.norm, row), norm, 1e-12);
            for (int64_t t = 0; t < p->n_tok; t++) {
                const int64_t at = t * p->n_out + c;
                const double gain = row < 0 ? 1 : value_at(l.proj.dora.m, row) / norm;
                const double y = gain * value_at(l.x, at) + (p->bias ? value_at(l.proj.bias, c) : 0) +
                                 (p->res ? value_at(l.res, at) : 0);
                assert_close(value_at(l.y, at), y, 1e-12);
            }
        }
        op_check_end(&dev);
    }
}

static double loss(void *arg)
{
    struct linear *l = arg;
    copy_on(l->dev, l->y, l->x);
    op_dora_fwd(l->dev, l->y, &l->proj, l->res);
    return probe(l->y, 8);
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct linear l = make(&dev, &shapes[i]);
        op_row_norm(&dev, l.proj.dora.norm, &l.proj);
        op_dora_bwd(&dev, l.z, make_probe(l.y, 8), &l.proj);
        assert_true(gradient_error(loss, &l, l.x, l.z) < 1e-8);
        assert_true(gradient_error(loss, &l, l.proj.dora.m, l.proj.dora.grad) < 1e-8);
        op_check_end(&dev);
    }
}

/* A row of zeros has no direction: its output and its gradient are 0, not NaN. */
static void rows_of_zeros(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    struct linear l = make(&dev, &shapes[3]);
    for (int64_t k = 0; k < tensor_count(l.proj.dora.norm); k++) set_value(l.proj.dora.norm, k, 0);
    op_dora_fwd(&dev, l.y, &l.proj, l.res);
    op_dora_bwd(&dev, l.z, make_probe(l.y, 8), &l.proj);
    for (int64_t i = 0; i < tensor_count(l.y); i++) {
        int s;
        if (row_of(&l.proj.lora, i % 12, &s) >= 0) assert_close(value_at(l.y, i), value_at(l.proj.bias, i % 12), 0);
    }
    for (int64_t k = 0; k < tensor_count(l.proj.dora.grad); k++) assert_close(value_at(l.proj.dora.grad, k), 0, 0);
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

int test_ops_dora(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_the_definition),         cmocka_unit_test(gradients),  cmocka_unit_test(rows_of_zeros),
        cmocka_unit_test(precision_threads_measure), cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_dora", tests, NULL, NULL);
}
