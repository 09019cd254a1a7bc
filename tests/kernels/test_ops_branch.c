/* test_ops_branch.c - convolution, gated delta rule and Mamba-2 where sequences continue the first rows of another one
 * (struct seqs), against whole sequences; kernels/segments.h. */
#include <math.h>
#include <string.h>

#include "kernels/segments.h"
#include "tests/kernels/prefix_rows.h"

enum { MAX_SEQ = 8, MAX_ROWS = 2048 };

/* Rows of each sequence; rows of its base that it continues. */
struct layout {
    int n_seq;
    int64_t len[MAX_SEQ], prefix[MAX_SEQ];
};
/* Prompts and answers of 1, 2, 3, 63, 64, 65 and 129 rows; a base that is only the prompt, or that ends with an answer;
 * one to five others; several prompts; several cuts of a base; sequences without rows. */
static const struct layout layouts[] = {
    {2, {2, 1}, {0, 1}},
    {2, {3, 2}, {0, 2}},
    {4, {4, 3, 5, 1}, {0, 3, 0, 2}},
    {5, {3, 9, 2, 0, 3}, {0, 0, 8, 1, 5}},
    {1, {5}, {0}},
    {2, {63, 65}, {0, 63}},
    {3, {65, 2, 129}, {0, 64, 64}},
    {6, {128, 1, 64, 3, 65, 129}, {0, 65, 65, 65, 65, 65}},
    {8, {131, 63, 2, 66, 64, 1, 130, 65}, {0, 129, 0, 0, 2, 0, 0, 1}},
    {7, {200, 7, 70, 1, 5, 0, 129}, {0, 64, 3, 64, 200, 100, 63}},
};
enum { SMALL = 5 }; /* the first layouts are small */

enum kind { CONV, SHORT, DELTA, MAMBA };
struct shape {
    enum kind kind;
    int64_t n_tap, n_key, n_value, a, b; /* taps; key heads or groups; value heads; columns of a state, of values */
};
static const struct shape shapes[] = {
    {CONV, 4, 0, 1, 0, 9},  {CONV, 8, 0, 1, 0, 3},  {CONV, 1, 0, 1, 0, 2},
    {SHORT, 3, 0, 1, 0, 7}, {SHORT, 9, 0, 1, 0, 2}, {DELTA, 0, 1, 2, 4, 3},
    {DELTA, 0, 2, 2, 3, 5}, {MAMBA, 0, 1, 2, 4, 3}, {MAMBA, 0, 2, 4, 3, 5},
};

struct bed {
    struct device *dev;
    struct shape s;
    struct delta_shape delta;
    struct mamba mamba;
    struct seqs seqs;
    struct tensor x, gates, y, dx, dgates, dy, w, bias; /* gates: ba, or dt; absent in convolutions */
};

static int64_t width_of(const struct shape *s, int64_t *out, int64_t *gates)
{
    *out = s->n_value * s->b;
    *gates = s->kind == DELTA ? 2 * s->n_value : s->kind == MAMBA ? s->n_value : 0;
    return s->kind == SHORT ? 3 * *out : *out + 2 * s->n_key * s->a;
}

static struct seqs make_seqs(const struct layout *l)
{
    int32_t cu[MAX_SEQ + 1] = {0}, prefix[MAX_SEQ] = {0}, ints[256] = {0};
    struct seqs seqs = {.n_seq = l->n_seq};
    bool any = false;
    assert_true(segments_ints(MAX_SEQ) <= MT_LEN(ints));
    for (int i = 0; i < l->n_seq; i++) {
        cu[i + 1] = cu[i] + (int32_t)l->len[i];
        prefix[i] = (int32_t)l->prefix[i];
        any = any || prefix[i];
        seqs.max_len = MT_MAX(seqs.max_len, l->prefix[i] + l->len[i]);
    }
    seqs.cu = make_i32(cu, l->n_seq + 1);
    if (!any) return seqs;
    seqs.prefix = make_i32(prefix, l->n_seq);
    seqs.segments = segments_make(ints, cu, prefix, l->n_seq);
    seqs.segments = segments_at(seqs.segments, make_i32(ints, segments_ints(l->n_seq)).data, l->n_seq);
    return seqs;
}

static struct bed make(struct device *dev, const struct shape *s, const struct layout *l)
{
    int64_t out, gates, n_tok = 0;
    const int64_t width = width_of(s, &out, &gates);
    struct bed b = {.dev = dev, .s = *s, .seqs = make_seqs(l)};
    for (int i = 0; i < l->n_seq; i++) n_tok += l->len[i];
    b.x = make_random(dev->act_dtype, 1, 2, n_tok, width, -1);
    b.dx = make_empty(dev->act_dtype, n_tok, width, -1);
    b.y = make_empty(dev->act_dtype, n_tok, out, -1);
    b.dy = make_probe(b.y, 3);
    if (gates) {
        b.gates = make_random(dev->act_dtype, 4, 2, n_tok, gates, -1);
        b.dgates = make_empty(dev->act_dtype, n_tok, gates, -1);
        b.w = make_random(DT_F32, 5, 2, 3, s->n_value, -1);
        for (int64_t i = 0; i < s->n_value; i++) set_value(b.w, i, -2 + value_at(b.w, i)); /* a_log: slow decay */
    } else {
        b.w = make_random(DT_F32, 5, 1, out, s->n_tap, -1);
        b.bias = make_random(DT_F32, 6, 1, out, -1, -1);
    }
    b.delta = (struct delta_shape){s->n_key, s->n_value, s->a, s->b};
    b.mamba = (struct mamba){.n_head = s->n_value, .head_dim = s->b, .n_group = s->n_key, .state = s->a};
    b.mamba.dt_max = INFINITY;
    return b;
}

static struct tensor row(struct tensor w, int64_t i)
{
    return tensor_1d((float *)w.data + i * w.ld, DT_F32, w.shape[1]);
}

static struct mamba mamba_of(const struct bed *b)
{
    struct mamba m = b->mamba;
    m.a_log = row(b->w, 0), m.dt_bias = row(b->w, 1), m.d = row(b->w, 2);
    return m;
}

static void fwd(struct bed *b)
{
    const struct mamba m = mamba_of(b);
    if (b->s.kind == CONV) op_conv_silu_fwd(b->dev, b->y, b->x, b->w, b->bias, &b->seqs);
    if (b->s.kind == SHORT) op_short_conv_fwd(b->dev, b->y, b->x, b->w, b->bias, &b->seqs);
    if (b->s.kind == DELTA) op_delta_fwd(b->dev, b->y, b->x, b->gates, row(b->w, 0), row(b->w, 1), &b->seqs, &b->delta);
    if (b->s.kind == MAMBA) op_mamba_fwd(b->dev, b->y, b->x, b->gates, &b->seqs, &m);
}

static void bwd(struct bed *b)
{
    const struct mamba m = mamba_of(b);
    if (b->s.kind == CONV) op_conv_silu_bwd(b->dev, b->dx, b->dy, b->x, b->w, b->bias, &b->seqs);
    if (b->s.kind == SHORT) op_short_conv_bwd(b->dev, b->dx, b->dy, b->x, b->w, b->bias, &b->seqs);
    if (b->s.kind == DELTA)
        op_delta_bwd(b->dev, b->dx, b->dgates, b->dy, b->x, b->gates, row(b->w, 0), row(b->w, 1), &b->seqs, &b->delta);
    if (b->s.kind == MAMBA) op_mamba_bwd(b->dev, b->dx, b->dgates, b->dy, b->x, b->gates, &b->seqs, &m);
}

/* ---- the CPU ---- */

static void check_whole(const struct shape *s, const struct layout *l, bool oracle)
{
    int64_t rows[MAX_ROWS];
    struct device dev;
    struct layout whole = *l;
    op_check_begin(&dev, oracle);
    for (int i = 0; i < l->n_seq; i++) whole.len[i] += l->prefix[i], whole.prefix[i] = 0;
    struct bed a = make(&dev, s, l), b = make(&dev, s, &whole);
    const int64_t n = whole_rows(l->len, l->prefix, l->n_seq, rows);
    const double bound = oracle ? 1e-11 : 1e-5;
    put_whole(b.x, a.x, rows, n, false);
    put_whole(b.dy, a.dy, rows, n, true);
    if (a.gates.ndim) put_whole(b.gates, a.gates, rows, n, false);
    fwd(&a), bwd(&a), fwd(&b), bwd(&b);
    assert_true(tensor_error(own_rows(b.y, rows, n, a.y), a.y) < bound);
    assert_true(tensor_error(sum_of_copies(b.dx, rows, n, a.dx), a.dx) < bound);
    if (a.gates.ndim) assert_true(tensor_error(sum_of_copies(b.dgates, rows, n, a.dgates), a.dgates) < bound);
    op_check_end(&dev);
}
static void outputs_are_those_of_whole_sequences(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++)
        for (int k = 0; k < MT_LEN(layouts); k++)
            check_whole(&shapes[i], &layouts[k], true), check_whole(&shapes[i], &layouts[k], false);
}

static double loss(void *arg)
{
    struct bed *b = arg;
    fwd(b);
    return probe(b->y, 3);
}
static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++)
        for (int k = 0; k < MT_LEN(layouts); k++) {
            struct device dev;
            op_check_begin(&dev, true);
            if (k < SMALL) dev.n_threads = 1; /* thousands of tiny calls */
            struct bed b = make(&dev, &shapes[i], &layouts[k]);
            double (*const error_of)(double (*)(void *), void *, struct tensor, struct tensor) =
                k < SMALL ? gradient_error : slope_error;
            bwd(&b);
            double error = error_of(loss, &b, b.x, b.dx);
            if (b.gates.ndim) error = MT_MAX(error, error_of(loss, &b, b.gates, b.dgates));
            if (!(error <= 1e-6)) fail_msg("shape %d, layout %d: off by %g", i, k, error);
            op_check_end(&dev);
        }
}

struct branch_case {
    struct shape s;
    int layout;
};
static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct branch_case *c = params;
    struct bed b = make(dev, &c->s, &layouts[c->layout]);
    fwd(&b), bwd(&b);
    const struct tensor all[] = {b.y, b.dx, b.dgates};
    for (int i = 0; i < (b.gates.ndim ? 3 : 2); i++) o->out[o->n++] = all[i];
}
static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++)
        for (int k = 0; k < MT_LEN(layouts); k++) op_check_case(run, &(struct branch_case){shapes[i], k}, 1e-5);
}

/* A base and two sequences that continue its first 65 rows. NaN in the second sequence, and in the base after the
 * prefix, changes no bit of the third sequence. */
static void run_poisoned(struct device *dev, const void *params, struct op_outputs *o)
{
    static const struct layout layout = {3, {90, 40, 70}, {0, 65, 65}};
    struct bed clean = make(dev, params, &layout), b = make(dev, params, &layout);
    const struct tensor want[] = {clean.y, clean.dx, clean.dgates}, got[] = {b.y, b.dx, b.dgates};
    const struct tensor to[] = {b.x, b.dy, b.gates};
    const int64_t first = layout.prefix[2], last = layout.len[0] + layout.len[1];
    fwd(&clean), bwd(&clean);
    for (int i = 0; i < (b.gates.ndim ? 3 : 2); i++) o->out[o->n++] = want[i];
    if (dev->dry_run) return;
    for (int i = 0; i < o->n; i++)
        for (int64_t k = first * to[i].shape[1]; k < last * to[i].shape[1]; k++) set_value(to[i], k, NAN);
    fwd(&b), bwd(&b);
    op_settle();
    for (int i = 0; i < o->n; i++)
        assert_same_bits(tensor_rows(got[i], last, layout.len[2]), tensor_rows(want[i], last, layout.len[2]));
}
static void poison_stays_in_its_sequence(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        struct op_outputs o = {.n = 0};
        op_check_begin(&dev, false);
        run_poisoned(&dev, &shapes[i], &o);
        op_check_end(&dev);
    }
}

/* Bases are cut where others continue them; slots of the others are adjacent. */
static void segments(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 10, 12, 12, 15, 20, 24, 25}, prefix[] = {0, 4, 4, 10, 4, 0, 4};
    static const int32_t rows[] = {0, 4, 10, 12, 12, 15, 20, 24, 25};
    static const int32_t links[][SEGMENT_LINKS] = {
        {0, -1, -1, 0, 3}, {1, 0, 0, 3, 1},  {1, 0, 1, -1, 0},  {0, -1, -1, -1, 0},
        {2, 3, 3, -1, 0},  {1, 0, 2, -1, 0}, {0, -1, -1, 4, 1}, {1, 4, 4, -1, 0},
    };
    int32_t ints[128];
    assert_true(segments_ints(7) <= MT_LEN(ints));
    const struct segments s = segments_make(ints, cu, prefix, 7);
    assert_int_equal(s.n, MT_LEN(links));
    assert_int_equal(s.n_level, 3);
    assert_int_equal(s.n_slot, 5);
    assert_memory_equal(s.cu.data, rows, sizeof(rows));
    assert_memory_equal(s.links.data, links, sizeof(links));
}

/* ---- the GPU ---- */

/* The layouts from `first` on. Where products round to bf16, a few values say little about the error. */
static const struct gpu_case {
    struct shape s;
    int first;
} gpu_cases[] = {
    {{CONV, 4, 0, 1, 0, 40}, 0},    {{CONV, 7, 0, 1, 0, 1032}, 8},       {{SHORT, 3, 0, 1, 0, 40}, 0},
    {{SHORT, 9, 0, 1, 0, 1032}, 8}, {{MAMBA, 0, 1, 2, 128, 64}, SMALL},  {{MAMBA, 0, 2, 4, 24, 72}, 8},
    {{MAMBA, 0, 1, 3, 17, 9}, 0},   {{DELTA, 0, 1, 2, 128, 128}, SMALL}, /* in chunks on Hopper */
    {{DELTA, 0, 2, 2, 24, 40}, 0},
};
static void branches_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_cases); i++)
        for (int k = gpu_cases[i].first; k < MT_LEN(layouts); k++)
            op_check_cuda(run, &(struct branch_case){gpu_cases[i].s, k});
}

static void poison_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_cases); i++) op_check_cuda(run_poisoned, &gpu_cases[i].s);
}

int test_ops_branch(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_are_those_of_whole_sequences),
        cmocka_unit_test(gradients),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(poison_stays_in_its_sequence),
        cmocka_unit_test(segments),
        cmocka_unit_test(branches_on_the_gpu),
        cmocka_unit_test(poison_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_branch", tests, NULL, NULL);
}
