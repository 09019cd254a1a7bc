/* test_ops_dora.c - DoRA: norms of the rows of W + scale B A, the scaled product and its gradients; adapters of several
 * sequences. */
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

/* ---- adapters of several sequences ---- */

/* n_exp 1: a dense matrix. Adapter g has rank r[g], and one segment fewer than the one before. */
struct several {
    int64_t n_tok, n_in, n_out, n_exp, top_k;
    bool by_token;
    int n;
    int64_t r[3];
};
static const struct several several[] = {
    {9, 24, 40, 1, 1, false, 3, {8, 16, 0}},   {0, 8, 8, 1, 1, false, 1, {8}},
    {7, 16, 24, 3, 2, true, 2, {8, 24}},       {7, 16, 24, 3, 2, false, 2, {0, 8}},
    {130, 264, 520, 1, 1, false, 2, {16, 64}}, {41, 512, 264, 8, 4, true, 3, {8, 8, 16}},
    {5, 32, 16, 4, 1, true, 1, {8}},           {5, 32, 16, 4, 1, false, 1, {8}},
};

static struct lora member(const struct device *dev, const struct several *s, int g)
{
    const int64_t r = s->r[g];
    struct lora l = {.r = r, .n_seg = s->n_exp > 1 ? 1 : 3 - g, .scale = {1.5f, 0.75f, 2.25f}};
    int64_t rows = 0;
    if (!r) return (struct lora){.r = 0};
    for (int i = 0; i < l.n_seg; rows += l.seg_cols[i++]) {
        l.seg_cols[i] = s->n_exp > 1 ? s->n_out : s->n_out / 4;
        l.seg_first[i] = s->n_exp > 1 ? 0 : i * s->n_out / 4 + s->n_out / 8;
    }
    const uint64_t stream = 20 + 2 * (uint64_t)g;
    l.a = s->n_exp > 1 ? make_random(dev->act_dtype, stream, 0.5, s->n_exp, r, s->n_in)
                       : make_random(dev->act_dtype, stream, 0.5, l.n_seg * r, s->n_in, -1);
    l.b = s->n_exp > 1 ? make_random(dev->act_dtype, stream + 1, 0.5, s->n_exp, rows, r)
                       : make_random(dev->act_dtype, stream + 1, 0.5, rows, r, -1);
    return l;
}

/* Token t uses the experts t, t + 1 .. modulo E, in ascending order. */
static struct route route_of(const struct several *s)
{
    const int64_t n = s->n_tok * s->top_k;
    int32_t *idx = mem_array(MT_MAX(n, 1), sizeof(*idx)), *slot = mem_array(MT_MAX(n, 1), sizeof(*slot)), at = 0;
    for (int64_t t = 0; t < s->n_tok; t++)
        for (int64_t e = 0, j = 0; e < s->n_exp; e++)
            if ((e - t % s->n_exp + s->n_exp) % s->n_exp < s->top_k) idx[t * s->top_k + j++] = (int32_t)e;
    for (int32_t e = 0; e < s->n_exp; e++)
        for (int32_t i = 0; i < n; i++)
            if (idx[i] == e) slot[at++] = i;
    const struct tensor flat = make_i32(idx, n);
    const struct route r = {.idx = tensor_2d(flat.data, DT_I32, s->n_tok, s->top_k), .row_slot = make_i32(slot, n)};
    mem_free(idx);
    mem_free(slot);
    return r;
}

struct beside {
    struct proj proj;
    struct lora_set set;
    struct route route;
    struct tensor x, y, xa;
};

static void make_beside(struct beside *b, struct device *dev, const struct several *s)
{
    const struct weight_packing packing = {WF_BF16, 64, false};
    const int64_t n_row = s->n_tok * s->top_k;
    int32_t group[256], most = 1;
    *b = (struct beside){.proj.w = make_packed(packing, 1, 0.3, s->n_exp, s->n_out, s->n_in), .set.n = s->n};
    for (int64_t t = 0; t < s->n_tok; t++) group[t] = (int32_t)(t % (s->n + 1));
    for (int g = 0; g < s->n; g++) {
        b->set.of[g] = member(dev, s, g);
        most = MT_MAX(most, (int32_t)(b->set.of[g].n_seg * s->r[g]));
    }
    b->route = route_of(s);
    b->proj.rows = (struct lora_rows){&b->set, make_i32(group, s->n_tok)};
    b->x = make_random(dev->act_dtype, 2, 1, s->by_token ? s->n_tok : n_row, s->n_in, -1);
    b->y = make_random(dev->act_dtype, 3, 1, n_row, s->n_out, -1);
    b->xa = make_empty(dev->act_dtype, n_row, most, -1);
    op_lora_rows(dev, b->y, b->xa, b->x, &b->proj, s->n_exp > 1 ? &b->route : NULL, s->by_token);
}

static void run_beside(struct device *dev, const void *params, struct op_outputs *o)
{
    struct beside b;
    make_beside(&b, dev, params);
    o->out[o->n++] = b.y;
}

/* scale (x A^T) B^T of a row and a column of the output. */
static double of_member(const struct beside *b, const struct several *s, const struct lora *l, int64_t e, int64_t from,
                        int64_t col)
{
    int segment;
    const int64_t row = l->r ? row_of(l, col, &segment) : -1, of_b = l->r ? l->b.shape[l->b.ndim - 2] : 0;
    double sum = 0;
    for (int64_t k = 0; k < l->r && row >= 0; k++) {
        double xa = 0;
        for (int64_t i = 0; i < s->n_in; i++)
            xa += value_at(b->x, from * s->n_in + i) *
                  value_at(l->a, ((e * l->n_seg + segment) * l->r + k) * s->n_in + i);
        sum += (double)l->scale[segment] * xa * value_at(l->b, (e * of_b + row) * l->r + k);
    }
    return sum;
}

static void rows_have_their_adapters(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(several); i++) {
        const struct several *s = &several[i];
        struct device dev;
        struct beside b;
        op_check_begin(&dev, true);
        make_beside(&b, &dev, s);
        const struct tensor before = make_random(dev.act_dtype, 3, 1, s->n_tok * s->top_k, s->n_out, -1);
        for (int64_t m = 0; m < s->n_tok * s->top_k; m += 1 + m / 20) {
            const int64_t slot = s->n_exp > 1 ? (int64_t)value_at(b.route.row_slot, m) : m, t = slot / s->top_k;
            const int64_t e = s->n_exp > 1 ? (int64_t)value_at(b.route.idx, slot) : 0;
            const struct lora none = {.r = 0}, *l = t % (s->n + 1) < s->n ? &b.set.of[t % (s->n + 1)] : &none;
            for (int64_t c = 0; c < s->n_out; c++)
                assert_close(value_at(b.y, m * s->n_out + c),
                             value_at(before, m * s->n_out + c) + of_member(&b, s, l, e, s->by_token ? t : m, c),
                             1e-10);
        }
        op_check_end(&dev);
        op_check_case(run_beside, s, 2e-6);
    }
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(several); i++) op_check_cuda(run_beside, &several[i]);
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(run, &gpu_shapes[i]);
}

int test_ops_dora(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_the_definition),
        cmocka_unit_test(gradients),
        cmocka_unit_test(rows_of_zeros),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(rows_have_their_adapters),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_dora", tests, NULL, NULL);
}
