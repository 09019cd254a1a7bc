/* test_ops_prefix.c - attention where sequences continue the first rows of another one (struct seqs), against whole
 * sequences; NEFTune's noise. */
#include <math.h>
#include <string.h>

#include "tests/kernels/prefix_rows.h"

enum { MAX_SEQ = 12 };

struct shape {
    int64_t n_head, n_kv, head_dim, value_dim, window;
    bool sink;
    int n_seq;
    int64_t len[MAX_SEQ], prefix[MAX_SEQ]; /* rows of each sequence; rows of its base that it continues */
};

/* A prefix that is the whole base, a part of it, one row; two and three sequences to a base; bases without others,
 * sequences without rows; windows that end in the prefix, after it, and before it. */
static const struct shape shapes[] = {
    {2, 1, 4, 4, 0, true, 2, {5, 3}, {0, 5}},
    {4, 2, 6, 6, 0, false, 2, {7, 4}, {0, 3}},
    {4, 1, 2, 2, 3, true, 4, {6, 2, 5, 4}, {0, 4, 2, 0}},
    {4, 2, 6, 4, 0, true, 5, {3, 9, 2, 0, 3}, {0, 0, 8, 1, 5}},
    {2, 2, 4, 5, 1, false, 2, {4, 3}, {0, 4}},
    {4, 4, 3, 3, 5, true, 3, {12, 6, 1}, {0, 7, 12}},
};
static const struct shape large_shapes[] = {
    {4, 1, 32, 32, 0, true, 2, {300, 77}, {0, 257}},
    {8, 2, 32, 32, 64, true, 4, {64, 350, 300, 131}, {0, 0, 340, 129}},
    {2, 1, 64, 64, 0, false, 3, {513, 40, 300}, {0, 256, 512}},
    {4, 4, 24, 16, 300, false, 3, {400, 129, 500}, {0, 300, 0}},
};

struct attn {
    struct device *dev;
    struct seqs seqs;
    struct attn_shape shape;
    struct tensor qkv, sinks, o, lse, dqkv, dout;
};

static void make_outputs(struct attn *a, int64_t n_tok, int64_t pad)
{
    const struct attn_shape *s = &a->shape;
    const int64_t value_dim = attn_value_dim(s), width = (s->n_head + s->n_kv) * s->head_dim + s->n_kv * value_dim;
    struct device *dev = a->dev;
    struct tensor *const to[] = {&a->qkv, &a->dqkv, &a->o};
    a->qkv = make_random(dev->act_dtype, 1, 2, n_tok, width + pad, -1);
    a->dqkv = make_empty(dev->act_dtype, n_tok, width + pad, -1);
    a->o = make_empty(dev->act_dtype, n_tok, s->n_head * value_dim + pad, -1);
    for (int i = 0; pad && i < MT_LEN(to); i++) *to[i] = tensor_cols(*to[i], pad / 2, to[i]->shape[1] - pad);
    a->lse = make_empty(dev->stat_dtype, n_tok, s->n_head, -1);
    a->dout = make_probe(a->o, 3);
}

static struct attn attn_make(struct device *dev, const struct shape *s, int64_t pad)
{
    int32_t cu[MAX_SEQ + 1] = {0}, prefix[MAX_SEQ] = {0};
    struct attn a = {.dev = dev,
                     .seqs = {.n_seq = s->n_seq},
                     .shape = {s->n_head, s->n_kv, s->head_dim, s->window, 1.0f / sqrtf((float)s->head_dim),
                               s->value_dim == s->head_dim ? 0 : s->value_dim}};
    for (int i = 0; i < s->n_seq; i++) {
        cu[i + 1] = cu[i] + (int32_t)s->len[i];
        prefix[i] = (int32_t)s->prefix[i];
        a.seqs.max_len = MT_MAX(a.seqs.max_len, s->prefix[i] + s->len[i]);
        a.seqs.pairs += (double)s->len[i] * (double)(s->len[i] + 1 + 2 * s->prefix[i]) / 2;
    }
    a.seqs.cu = make_i32(cu, s->n_seq + 1);
    a.seqs.prefix = make_i32(prefix, s->n_seq);
    if (s->sink) a.sinks = make_random(DT_F32, 2, 2, s->n_head, -1, -1);
    make_outputs(&a, cu[s->n_seq], pad);
    return a;
}

static void fwd(struct attn *a) { op_attn_fwd(a->dev, a->o, a->lse, a->qkv, a->sinks, &a->seqs, &a->shape); }
static void bwd(struct attn *a) { op_attn_bwd(a->dev, a->dqkv, a->dout, a->o, a->lse, a->qkv, &a->seqs, &a->shape); }

/* ---- side by side */

/* The batch of whole sequences; the gradients of outputs of copies are 0. */
static struct attn attn_side_by_side(const struct attn *a, const struct shape *s, const int64_t *row, int64_t n)
{
    struct shape whole = *s;
    for (int i = 0; i < s->n_seq; i++) whole.len[i] += s->prefix[i], whole.prefix[i] = 0;
    struct attn b = attn_make(a->dev, &whole, 0);
    b.seqs.prefix = (struct tensor){0};
    put_whole(b.qkv, a->qkv, row, n, false);
    put_whole(b.dout, a->dout, row, n, true);
    return b;
}

static void check_side_by_side(const struct shape *s, bool oracle)
{
    int64_t row[4096];
    struct device dev;
    op_check_begin(&dev, oracle);
    struct attn a = attn_make(&dev, s, 0);
    const int64_t n = whole_rows(s->len, s->prefix, s->n_seq, row);
    struct attn b = attn_side_by_side(&a, s, row, n);
    const double bound = oracle ? 1e-12 : 1e-5;
    fwd(&a), bwd(&a), fwd(&b), bwd(&b);
    assert_true(tensor_error(own_rows(b.o, row, n, a.o), a.o) < bound);
    assert_true(tensor_error(own_rows(b.lse, row, n, a.lse), a.lse) < bound);
    assert_true(tensor_error(sum_of_copies(b.dqkv, row, n, a.dqkv), a.dqkv) < bound);
    op_check_end(&dev);
}
static void attention_is_that_of_whole_sequences(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++)
        check_side_by_side(&shapes[i], true), check_side_by_side(&shapes[i], false);
    for (int i = 0; i < MT_LEN(large_shapes); i++) {
        check_side_by_side(&large_shapes[i], true);
        check_side_by_side(&large_shapes[i], false);
    }
}

/* ---- gradients, precision */

static double loss(void *arg)
{
    struct attn *a = arg;
    fwd(a);
    return probe(a->o, 3);
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes) + MT_LEN(large_shapes); i++) {
        const bool large = i >= MT_LEN(shapes);
        struct device dev;
        op_check_begin(&dev, true);
        if (!large) dev.n_threads = 1; /* thousands of tiny calls */
        struct attn a = attn_make(&dev, large ? &large_shapes[i - MT_LEN(shapes)] : &shapes[i], 0);
        fwd(&a), bwd(&a);
        if (large)
            assert_true(slope_error(loss, &a, a.qkv, a.dqkv) < 1e-6);
        else
            assert_true(gradient_error(loss, &a, a.qkv, a.dqkv) < 1e-8);
        op_check_end(&dev);
    }
}

static void outputs_of(struct attn *a, struct op_outputs *outputs)
{
    fwd(a), bwd(a);
    const struct tensor all[] = {a->o, a->lse, a->dqkv};
    for (int i = 0; i < MT_LEN(all); i++) outputs->out[outputs->n++] = all[i];
}
static void run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct attn a = attn_make(dev, params, 0);
    outputs_of(&a, outputs);
}
static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 2e-6);
    for (int i = 0; i < MT_LEN(large_shapes); i++) op_check_case(run, &large_shapes[i], 2e-6);
}

/* Prefixes of 0 rows give the bits of a batch without prefixes. */
static void check_empty_prefixes(struct device *dev, struct shape s)
{
    memset(s.prefix, 0, sizeof(s.prefix));
    struct attn a = attn_make(dev, &s, 0), b = attn_make(dev, &s, 0);
    b.seqs.prefix = (struct tensor){0};
    fwd(&a), bwd(&a), fwd(&b), bwd(&b);
    assert_same_bits(a.o, b.o);
    assert_same_bits(a.lse, b.lse);
    assert_same_bits(a.dqkv, b.dqkv);
}
static void empty_prefixes_change_no_bits(void **state)
{
    (void)state;
    struct device dev;
    op_check_begin(&dev, false);
    for (int i = 0; i < MT_LEN(large_shapes); i++) check_empty_prefixes(&dev, large_shapes[i]);
    op_check_end(&dev);
}

static void flops_are_those_of_visible_keys(void **state)
{
    (void)state;
    static const struct shape s = {4, 2, 8, 8, 0, false, 2, {10, 20}, {0, 6}};
    struct device dev;
    op_check_begin(&dev, false);
    struct attn a = attn_make(&dev, &s, 0);
    fwd(&a);
    assert_close(dev.flops, 4.0 * 32 * (55 + 210 + 20 * 6), 1e-15);
    op_check_end(&dev);
}

/* ---- on the GPU */

/* Bases and prefixes at the edges of tiles of 32, 64 and 128 rows and beside them; a prefix of one row; a whole base;
 * bases that nothing continues; sequences without rows. */
#define EDGES                                                                                                          \
    11, {70, 33, 130, 65, 1, 40, 129, 64, 0, 131, 200}, { 0, 64, 70, 1, 0, 0, 40, 31, 0, 0, 97 }
#define FEW                                                                                                            \
    6, {140, 5, 66, 30, 129, 7}, { 0, 128, 97, 0, 30, 29 }
static const struct gpu_case {
    struct shape shape;
    int64_t pad; /* columns around qkv, o and dqkv, a multiple of 16 */
} gpu_cases[] = {
    {{8, 2, 64, 64, 0, true, EDGES}, 16},
    {{4, 4, 64, 64, 33, false, EDGES}, 0},
    {{3, 1, 64, 64, 128, true, EDGES}, 0},
    {{2, 2, 64, 64, 1, true, FEW}, 0},
    {{70, 1, 64, 64, 0, false, 2, {20, 30}, {0, 9}}, 0}, /* a group larger than a tile of the Hopper kernel */
    {{8, 1, 64, 64, 0, true, 2, {700, 300}, {0, 650}}, 0},
    {{4, 1, 128, 128, 0, true, EDGES}, 16},
    {{8, 2, 128, 128, 100, false, EDGES}, 0},
    {{3, 1, 192, 128, 0, true, FEW}, 16},
    {{2, 2, 192, 128, 65, false, FEW}, 0},
    {{4, 2, 256, 256, 0, true, FEW}, 16},
    {{3, 1, 256, 256, 70, false, FEW}, 0},
    {{4, 2, 512, 512, 0, true, FEW}, 16},
    {{3, 1, 320, 320, 70, false, FEW}, 0},
    {{6, 3, 16, 16, 21, true, FEW}, 16}, /* portable kernels on Hopper too */
    {{4, 2, 80, 80, 0, false, EDGES}, 0},
    {{4, 2, 64, 40, 0, true, FEW}, 0},
    {{2, 1, 136, 136, 0, true, FEW}, 16},
};
static void run_on_gpu(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct gpu_case *c = params;
    struct attn a = attn_make(dev, &c->shape, c->pad);
    outputs_of(&a, outputs);
}
static void attention_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_cases); i++) op_check_cuda(run_on_gpu, &gpu_cases[i]);
}

/* A base and two sequences that continue its first 65 rows. NaN in the second sequence, and in the base after the
 * prefix, changes no bit of the third sequence. */
static const struct shape poisoned_shapes[] = {
    {4, 1, 64, 64, 0, true, 3, {90, 40, 70}, {0, 65, 65}},
    {2, 1, 128, 128, 0, false, 3, {90, 40, 70}, {0, 65, 65}},
    {2, 2, 256, 256, 0, true, 3, {90, 40, 70}, {0, 65, 65}},
    {2, 1, 512, 512, 0, true, 3, {90, 40, 70}, {0, 65, 65}},
};
static void run_poisoned(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct attn clean = attn_make(dev, s, 0);
    outputs_of(&clean, outputs);
    if (dev->dry_run) return;
    struct attn a = attn_make(dev, s, 0);
    const int64_t first = s->prefix[2], last = s->len[0] + s->len[1];
    const struct tensor to[] = {tensor_rows(a.qkv, first, last - first), tensor_rows(a.dout, first, last - first)};
    for (int k = 0; k < MT_LEN(to); k++)
        for (int64_t i = 0; i < tensor_count(to[k]); i++) set_value(to[k], i, NAN);
    fwd(&a), bwd(&a);
    op_settle();
    const struct tensor got[] = {a.o, a.lse, a.dqkv}, want[] = {clean.o, clean.lse, clean.dqkv};
    for (int k = 0; k < MT_LEN(got); k++)
        assert_same_bits(tensor_rows(got[k], last, s->len[2]), tensor_rows(want[k], last, s->len[2]));
}
static void poison_stays_in_its_sequence(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(poisoned_shapes); i++) {
        struct device dev;
        struct op_outputs outputs = {.n = 0};
        op_check_begin(&dev, false);
        run_poisoned(&dev, &poisoned_shapes[i], &outputs);
        op_check_end(&dev);
    }
}
static void poison_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(poisoned_shapes); i++) op_check_cuda(run_poisoned, &poisoned_shapes[i]);
}

/* ---- noise */

static const struct shape noisy = {1, 1, 8, 8, 0, false, 3, {5, 3, 4}, {0, 4, 2}};
enum { NOISY_ROWS = 12, NOISY_COLS = 16 };

static void add_noise(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct attn a = attn_make(dev, params, 0);
    struct tensor x = make_zero(dev->act_dtype, NOISY_ROWS, NOISY_COLS, -1);
    op_embed_noise(dev, x, &a.seqs, 8, 7);
    outputs->out[outputs->n++] = x;
}
static void noise_counts_the_prefix(void **state)
{
    (void)state;
    struct shape plain = noisy;
    struct op_outputs got = {.n = 0};
    struct device dev;
    memset(plain.prefix, 0, sizeof(plain.prefix));
    op_check_begin(&dev, true);
    add_noise(&dev, &noisy, &got);
    add_noise(&dev, &plain, &got);
    for (int64_t i = 0; i < (int64_t)NOISY_ROWS * NOISY_COLS; i++) {
        const int64_t row = i / NOISY_COLS;
        const double factor = row < 5 ? 1 : row < 8 ? sqrt(3.0 / 7) : sqrt(4.0 / 6);
        assert_close(value_at(got.out[0], i), factor * value_at(got.out[1], i), 1e-14);
    }
    op_check_end(&dev);
}

static void noise_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    op_check_cuda(add_noise, &noisy);
}

int test_ops_prefix(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_that_of_whole_sequences),
        cmocka_unit_test(gradients),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(empty_prefixes_change_no_bits),
        cmocka_unit_test(flops_are_those_of_visible_keys),
        cmocka_unit_test(poison_stays_in_its_sequence),
        cmocka_unit_test(noise_counts_the_prefix),
        cmocka_unit_test(attention_on_the_gpu),
        cmocka_unit_test(poison_on_the_gpu),
        cmocka_unit_test(noise_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_prefix", tests, NULL, NULL);
}
