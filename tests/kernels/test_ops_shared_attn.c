/* test_ops_shared_attn.c - attention whose heads share one key, which is also the value. */
#include "tests/test.h"

#include <math.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 12 };

struct shape {
    int64_t n_head, dim, window;
    int64_t ratio; /* 0: no entries */
    int64_t top;   /* entries per token in idx; 0: no idx */
    bool sink;
    int n_seq;
    int64_t len[MAX_SEQ];
};

/* A token that sees one key and no sink has a gradient of zero, which cannot be compared: the first case has a sink.
 * Windows and ratios around the lengths; entry rows that do not begin at a multiple of the ratio. */
static const struct shape shapes[] = {
    {2, 3, 4, 0, 0, true, 1, {1}},
    {2, 4, 4, 0, 0, true, 7, {1, 3, 4, 5, 0, 13, 2}},
    {3, 2, 4, 4, 0, true, 5, {1, 3, 4, 5, 21}},
    {2, 4, 3, 4, 3, true, 6, {2, 17, 3, 4, 5, 26}},
    {2, 4, 4, 8, 0, false, 3, {7, 20, 9}},
    {1, 5, 1, 2, 1, false, 3, {9, 1, 12}},
    {2, 4, 100, 4, 2, true, 2, {19, 6}},
    {2, 4, 4, 4, 2, true, 0, {0}},
    {2, 4, 4, 128, 0, true, 2, {30, 6}},
};
#define WINDOW_LENGTHS                                                                                                 \
    6, { 1, 3, 127, 128, 129, 200 }
static const struct shape large_shapes[] = {
    {2, 8, 128, 0, 0, true, WINDOW_LENGTHS},    {2, 8, 128, 4, 0, true, WINDOW_LENGTHS},
    {2, 8, 128, 128, 0, false, WINDOW_LENGTHS}, {3, 16, 128, 4, 20, true, WINDOW_LENGTHS},
    {4, 16, 16, 4, 8, true, 3, {33, 300, 65}},
};

struct attn {
    struct device *dev;
    struct seqs seqs;
    struct shared_attn_shape shape;
    struct tensor q, kv, entry, idx, sinks, o, lse, dq, dkv, dentry;
};

/* Distinct visible entries of a token at position i, ascending, then -1: as many as fit, except that every seventh
 * token has none. */
static void choose(int32_t *idx, int64_t top, int64_t i, int64_t ratio)
{
    const int64_t n_visible = (i + 1) / ratio;
    int64_t n = 0;
    for (int64_t e = 0; e < n_visible && n < top && i % 7 != 5; e++)
        if (n_visible - e <= top - n || (e * 5 + i) % 3 == 0) idx[n++] = (int32_t)e;
    while (n < top) idx[n++] = -1;
}

static struct tensor make_idx(const struct shape *s, int64_t n_tok)
{
    const struct tensor idx = make_empty(DT_I32, n_tok, s->top, -1);
    int64_t t = 0;
    for (int seq = 0; seq < s->n_seq; seq++)
        for (int64_t i = 0; i < s->len[seq]; i++, t++) choose((int32_t *)idx.data + t * s->top, s->top, i, s->ratio);
    return idx;
}

static struct attn attn_make(struct device *dev, const struct shape *s)
{
    int32_t cu[MAX_SEQ + 1] = {0};
    int64_t max_len = 0;
    double pairs = 0;
    for (int i = 0; i < s->n_seq; i++) {
        cu[i + 1] = cu[i] + (int32_t)s->len[i];
        max_len = MT_MAX(max_len, s->len[i]);
        pairs += (double)s->len[i] * (double)(s->len[i] + 1) / 2;
    }
    const int64_t n_tok = cu[s->n_seq], n_col = s->n_head * s->dim, n_entry = MT_MAX(1, n_tok / MT_MAX(1, s->ratio));
    struct attn a = {
        .dev = dev,
        .seqs = {.cu = make_i32(cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = max_len, .pairs = pairs},
        .shape = {s->n_head, s->dim, s->window, s->ratio, 1.0f / sqrtf((float)s->dim)},
        .q = make_random(dev->act_dtype, 1, 2, n_tok, n_col, -1),
        .kv = make_random(dev->act_dtype, 2, 2, n_tok, s->dim, -1),
        .o = make_empty(dev->act_dtype, n_tok, n_col, -1),
        .lse = make_empty(dev->stat_dtype, n_tok, s->n_head, -1),
        .dq = make_empty(dev->act_dtype, n_tok, n_col, -1),
        .dkv = make_empty(dev->act_dtype, n_tok, s->dim, -1),
    };
    if (s->ratio) a.entry = make_random(dev->act_dtype, 4, 2, n_entry, s->dim, -1);
    if (s->ratio) a.dentry = make_empty(dev->act_dtype, n_entry, s->dim, -1);
    if (s->top) a.idx = make_idx(s, n_tok);
    if (s->sink) a.sinks = make_random(DT_F32, 5, 2, s->n_head, -1, -1);
    return a;
}

static void fwd(struct attn *a)
{
    op_shared_attn_fwd(a->dev, a->o, a->lse, a->q, a->kv, a->entry, a->idx, a->sinks, &a->seqs, &a->shape);
}
static void bwd_of(struct attn *a, struct tensor dout)
{
    op_shared_attn_bwd(a->dev, a->dq, a->dkv, a->dentry, dout, a->o, a->lse, a->q, a->kv, a->entry, a->idx, &a->seqs,
                       &a->shape);
}
static void bwd(struct attn *a) { bwd_of(a, make_probe(a->o, 3)); }

static void list_outputs(const struct attn *a, struct op_outputs *outputs)
{
    const struct tensor all[] = {a->o, a->lse, a->dq, a->dkv, a->dentry};
    for (int i = 0; i < MT_LEN(all); i++)
        if (all[i].ndim) outputs->out[outputs->n++] = all[i];
}

static void run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct attn a = attn_make(dev, params);
    fwd(&a);
    bwd(&a);
    list_outputs(&a, outputs);
}

static double loss(void *arg)
{
    struct attn *a = arg;
    fwd(a);
    return probe(a->o, 3);
}

static bool chosen(const struct attn *a, int64_t t, int64_t e)
{
    if (!a->idx.ndim) return true;
    for (int64_t k = 0; k < a->idx.shape[1]; k++)
        if (value_at(a->idx, t * a->idx.shape[1] + k) == (double)e) return true;
    return false;
}

/* Adds a key, row j of x, to the output of head h at row t. */
static void see(const struct attn *a, int64_t t, int64_t h, struct tensor x, int64_t j, double *out, double *total)
{
    const int64_t dim = a->shape.head_dim;
    double score = 0;
    for (int64_t c = 0; c < dim; c++)
        score += value_at(a->q, (t * a->shape.n_head + h) * dim + c) * value_at(x, j * dim + c);
    const double e = exp((double)a->shape.scale * score);
    *total += e;
    for (int64_t c = 0; c < dim; c++) out[c] += e * value_at(x, j * dim + c);
}

/* Output and lse of head h at position i of the sequence that begins at row `first`, by the definition. */
static void reference(const struct attn *a, int64_t first, int64_t i, int64_t h, double *out, double *lse)
{
    double total = a->sinks.ndim ? exp(value_at(a->sinks, h)) : 0;
    for (int64_t c = 0; c < a->shape.head_dim; c++) out[c] = 0;
    for (int64_t j = MT_MAX(0, i - a->shape.window + 1); j <= i; j++)
        see(a, first + i, h, a->kv, first + j, out, &total);
    for (int64_t e = 0; a->entry.ndim && (e + 1) * a->shape.ratio <= i + 1; e++)
        if (chosen(a, first + i, e)) see(a, first + i, h, a->entry, first / a->shape.ratio + e, out, &total);
    for (int64_t c = 0; c < a->shape.head_dim; c++) out[c] /= total;
    *lse = log(total);
}

static void forward_is_the_definition(struct device *dev, const struct shape *s)
{
    struct attn a = attn_make(dev, s);
    int64_t first = 0;
    fwd(&a);
    for (int seq = 0; seq < s->n_seq; first += s->len[seq++]) {
        for (int64_t i = 0; i < s->len[seq]; i++) {
            for (int64_t h = 0; h < s->n_head; h++) {
                const int64_t at = (first + i) * s->n_head + h;
                double out[16], lse;
                reference(&a, first, i, h, out, &lse);
                assert_close(value_at(a.lse, at), lse, 1e-13);
                for (int64_t c = 0; c < s->dim; c++) assert_close(value_at(a.o, at * s->dim + c), out[c], 1e-13);
            }
        }
    }
}

static void forward(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes) + MT_LEN(large_shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        forward_is_the_definition(&dev, i < MT_LEN(shapes) ? &shapes[i] : &large_shapes[i - MT_LEN(shapes)]);
        op_check_end(&dev);
    }
}

/* Elements of dentry in rows of no entry are zero. */
static void check_unused_rows(const struct attn *a, const struct shape *s)
{
    if (!s->ratio) return;
    int64_t row = 0, first = 0;
    for (int seq = 0; seq <= s->n_seq; seq++) {
        const int64_t next = seq < s->n_seq ? first / s->ratio : a->dentry.shape[0];
        for (; row < next; row++)
            for (int64_t c = 0; c < s->dim; c++) assert_true(value_at(a->dentry, row * s->dim + c) == 0);
        if (seq < s->n_seq) row = first / s->ratio + s->len[seq] / s->ratio, first += s->len[seq];
    }
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        dev.n_threads = 1; /* thousands of tiny calls */
        struct attn a = attn_make(&dev, &shapes[i]);
        fwd(&a);
        bwd(&a);
        assert_true(gradient_error(loss, &a, a.q, a.dq) < 1e-8);
        assert_true(gradient_error(loss, &a, a.kv, a.dkv) < 1e-8);
        if (a.entry.ndim) assert_true(gradient_error(loss, &a, a.entry, a.dentry) < 1e-8);
        check_unused_rows(&a, &shapes[i]);
        op_check_end(&dev);
    }
}

static void gradients_of_large_shapes(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(large_shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct attn a = attn_make(&dev, &large_shapes[i]);
        fwd(&a);
        bwd(&a);
        assert_true(slope_error(loss, &a, a.q, a.dq) < 1e-6);
        assert_true(slope_error(loss, &a, a.kv, a.dkv) < 1e-6);
        if (a.entry.ndim) assert_true(slope_error(loss, &a, a.entry, a.dentry) < 1e-6);
        check_unused_rows(&a, &large_shapes[i]);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 4e-6);
    for (int i = 0; i < MT_LEN(large_shapes); i++) op_check_case(run, &large_shapes[i], 4e-6);
}

/* Each sequence of a packed batch gives the same bits as alone. */
static void packed_equals_separate(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(large_shapes); i++) {
        const struct shape *s = &large_shapes[i];
        struct device dev;
        op_check_begin(&dev, false);
        struct attn a = attn_make(&dev, s);
        const struct tensor dout = make_probe(a.o, 3);
        int64_t first = 0;
        fwd(&a);
        bwd_of(&a, dout);
        for (int seq = 0; seq < s->n_seq; first += s->len[seq++]) {
            struct shape one = *s;
            one.n_seq = 1;
            one.len[0] = s->len[seq];
            struct attn b = attn_make(&dev, &one);
            b.q = tensor_rows(a.q, first, one.len[0]);
            b.kv = tensor_rows(a.kv, first, one.len[0]);
            const int64_t n_entry = s->ratio ? one.len[0] / s->ratio : 0;
            if (n_entry) b.entry = tensor_rows(a.entry, first / s->ratio, n_entry);
            fwd(&b);
            bwd_of(&b, tensor_rows(dout, first, one.len[0]));
            assert_same_bits(b.o, tensor_rows(a.o, first, one.len[0]));
            assert_same_bits(b.lse, tensor_rows(a.lse, first, one.len[0]));
            assert_same_bits(b.dq, tensor_rows(a.dq, first, one.len[0]));
            assert_same_bits(b.dkv, tensor_rows(a.dkv, first, one.len[0]));
            if (n_entry) assert_same_bits(b.dentry, tensor_rows(a.dentry, first / s->ratio, n_entry));
        }
        op_check_end(&dev);
    }
}

static void poison(struct tensor x, int64_t row, int64_t n, double v)
{
    for (int64_t i = row * x.shape[1]; i < (row + n) * x.shape[1]; i++) set_value(x, i, v);
}

/* Rows of sequence `seq` of each output: the first, and how many. */
static void rows_of(const struct attn *a, const struct shape *s, int seq, int64_t at[5][2])
{
    int64_t first = 0;
    for (int i = 0; i < seq; i++) first += s->len[i];
    for (int i = 0; i < 5; i++) at[i][0] = first, at[i][1] = s->len[seq];
    if (a->entry.ndim) at[4][0] = first / s->ratio, at[4][1] = s->len[seq] / s->ratio;
}

/* NaN in every second sequence does not change a bit of the others. */
static void run_poisoned(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct attn clean = attn_make(dev, s), a = attn_make(dev, s);
    const struct tensor dout = make_probe(clean.o, 3), bad_dout = make_probe(a.o, 3);
    int64_t at[5][2];
    fwd(&clean);
    bwd_of(&clean, dout);
    list_outputs(&clean, outputs);
    for (int seq = 1; seq < s->n_seq; seq += 2) {
        rows_of(&a, s, seq, at);
        poison(a.q, at[0][0], at[0][1], NAN);
        poison(a.kv, at[0][0], at[0][1], NAN);
        poison(bad_dout, at[0][0], at[0][1], NAN);
        if (a.entry.ndim) poison(a.entry, at[4][0], at[4][1], NAN);
    }
    fwd(&a);
    bwd_of(&a, bad_dout);
    if (dev->dry_run) return;
    dev->ops->wait();
    const struct tensor want[] = {clean.o, clean.lse, clean.dq, clean.dkv, clean.dentry},
                        got[] = {a.o, a.lse, a.dq, a.dkv, a.dentry};
    for (int seq = 0; seq < s->n_seq; seq++) {
        rows_of(&a, s, seq, at);
        for (int i = 0; i < 5; i++) {
            if (!got[i].ndim || !at[i][1]) continue;
            if (seq % 2)
                assert_true(isnan(value_at(tensor_rows(got[i], at[i][0], 1), 0)));
            else
                assert_same_bits(tensor_rows(got[i], at[i][0], at[i][1]), tensor_rows(want[i], at[i][0], at[i][1]));
        }
    }
}
static const struct shape poisoned_shapes[] = {
    {2, 16, 4, 4, 3, true, 5, {13, 9, 5, 0, 61}},
    {64, 512, 8, 4, 2, true, 4, {13, 4, 9, 5}},
};
static const struct shape large_poisoned_shape = {64, 512, 32, 4, 5, true, 4, {37, 9, 50, 33}};

static void poison_stays_in_its_sequence(void **state)
{
    (void)state;
    struct device dev;
    struct op_outputs outputs = {.n = 0};
    op_check_begin(&dev, false);
    run_poisoned(&dev, &poisoned_shapes[0], &outputs);
    op_check_end(&dev);
}
static void poison_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(poisoned_shapes); i++) op_check_cuda(run_poisoned, &poisoned_shapes[i]);
}
static void poison_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    op_check_cuda(run_poisoned, &large_poisoned_shape);
}

/* Generic sizes, and heads of 512 columns as in DeepSeek-V4. Of these, the second last case has more tiles of keys than
 * stages, and more entries than the blocks of keys of a window have room for. */
static const struct shape gpu_shapes[] = {
    {2, 16, 4, 4, 3, true, 7, {1, 3, 4, 5, 0, 61, 2}},
    {2, 16, 4, 8, 0, true, 3, {30, 9, 17}},
    {5, 24, 7, 0, 0, false, 2, {20, 40}},
    {2, 16, 4, 4, 3, true, 0, {0}},
    {64, 512, 8, 0, 0, true, 3, {1, 3, 13}},
    {64, 512, 8, 2, 6, true, 2, {3, 33}},
    {64, 512, 128, 1, 0, false, 1, {70}},
    {128, 512, 8, 4, 0, true, 2, {5, 9}},
};
/* Sizes of DeepSeek-V4: 64 or 128 heads. With long lists, the weights of all tokens do not fit into scratch at once. */
#define GPU_LENGTHS                                                                                                    \
    5, { 1, 3, 31, 32, 33 }
static const struct shape large_gpu_shapes[] = {
    {64, 512, 32, 0, 0, true, GPU_LENGTHS},   {64, 512, 32, 4, 0, true, GPU_LENGTHS},
    {64, 512, 32, 4, 6, true, GPU_LENGTHS},   {64, 512, 128, 128, 0, false, 2, {9, 140}},
    {64, 512, 128, 2, 40, true, 1, {100}},    {64, 512, 20, 2, 0, false, 1, {90}},
    {128, 512, 32, 4, 0, true, 2, {5, 40}},   {64, 512, 32, 2, 50000, true, 2, {7, 70}},
    {64, 512, 64, 1, 0, false, 2, {200, 40}},
};

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(run, &gpu_shapes[i]);
}
static void sizes_large_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(large_gpu_shapes); i++) op_check_cuda(run, &large_gpu_shapes[i]);
}

/* FLOPs per pair of a sequence of 4096: all see their window, and of 1024 entries all or 512. */
static void counts_pairs(void **state)
{
    (void)state;
    const struct {
        int64_t ratio, top;
        double pairs;
    } cases[] = {{0, 0, 0},
                 {128, 0, 31.0 * 32 / 2 * 128 + 32},
                 {4, 0, 1023.0 * 1024 / 2 * 4 + 1024},
                 {4, 512, 511.0 * 512 / 2 * 4 + 512 + 2048.0 * 512}};
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct device dev, plan;
        const int64_t n = 4096;
        op_check_begin(&dev, false);
        device_dry_run(&plan, &dev);
        const struct shared_attn_shape s = {2, 4, 128, cases[i].ratio, 1};
        const struct seqs seqs = {.cu = {.ndim = 1, .dtype = DT_I32, .shape = {2}},
                                  .n_seq = 1,
                                  .max_len = n,
                                  .pairs = (double)n * (double)(n + 1) / 2};
        const struct tensor wide = arena_tensor_2d(&plan.state, plan.act_dtype, n, 8),
                            kv = arena_tensor_2d(&plan.state, plan.act_dtype, n, 4),
                            lse = arena_tensor_2d(&plan.state, plan.stat_dtype, n, 2);
        struct tensor entry = {0}, idx = {0};
        if (s.ratio) entry = arena_tensor_2d(&plan.state, plan.act_dtype, n / s.ratio, 4);
        if (cases[i].top) idx = arena_tensor_2d(&plan.state, DT_I32, n, cases[i].top);
        op_shared_attn_fwd(&plan, wide, lse, wide, kv, entry, idx, (struct tensor){0}, &seqs, &s);
        const double window = (double)n * 128 - 127.0 * 128 / 2;
        assert_close(plan.flops, 4 * 2 * 4 * (window + cases[i].pairs), 1e-12);
        op_check_end(&dev);
    }
}

/* Scratch of the backward for 64 heads of 512 with entries of four tokens, of which a token sees at most 512. */
static int64_t scratch_of(struct device *card, int64_t n_tok, int64_t max_len)
{
    const struct shared_attn_shape s = {64, 512, 128, 4, 1};
    const int64_t n_col = s.n_head * s.head_dim;
    const struct tensor wide = tensor_2d(NULL, DT_BF16, n_tok, n_col), kv = tensor_2d(NULL, DT_BF16, n_tok, s.head_dim),
                        entry = tensor_2d(NULL, DT_BF16, MT_MAX(1, n_tok / s.ratio), s.head_dim),
                        lse = tensor_2d(NULL, DT_F32, n_tok, s.n_head);
    const struct seqs seqs = {
        .cu = tensor_1d(NULL, DT_I32, n_tok + 1), .n_seq = n_tok, .max_len = max_len, .pairs = (double)n_tok};
    struct device plan;
    struct tensor idx = {0};
    if (max_len / s.ratio > 512) idx = tensor_2d(NULL, DT_I32, n_tok, 512);
    device_dry_run(&plan, card);
    op_shared_attn_bwd(&plan, wide, kv, entry, wide, wide, lse, wide, kv, entry, idx, &seqs, &s);
    return plan.work.peak;
}

/* A micro-batch of fewer tokens or shorter sequences than the plan's needs no more scratch. */
static void scratch_of_the_plan(void **state)
{
    static const int64_t most[][2] = {{1024, 1024}, {4096, 2048}, {4096, 4096}, {16384, 4096}};
    static const int64_t lens[] = {1, 300, 2048, 4096};
    struct device card;
    struct err err;
    (void)state;
    if (device_open_card(&card, &(struct device_card){.bytes = (int64_t)80 << 30, .arch = CUDA_SM90}, "auto", &err)) {
        print_message("skip: scratch of the plan: %s\n", err.msg);
        skip();
    }
    for (int i = 0; i < MT_LEN(most); i++) {
        const int64_t plan = scratch_of(&card, most[i][0], most[i][1]);
        for (int64_t n = 1; n <= most[i][0]; n += 61)
            for (int k = 0; k < MT_LEN(lens) && lens[k] <= MT_MIN(n, most[i][1]); k++)
                if (scratch_of(&card, n, lens[k]) > plan)
                    fail_msg("%lld tokens in sequences of %lld: %lld bytes, %lld tokens of %lld: %lld", (long long)n,
                             (long long)lens[k], (long long)scratch_of(&card, n, lens[k]), (long long)most[i][0],
                             (long long)most[i][1], (long long)plan);
    }
    device_close(&card);
}

int test_ops_shared_attn(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(gradients),
        cmocka_unit_test(gradients_of_large_shapes),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(counts_pairs),
        cmocka_unit_test(scratch_of_the_plan),
        cmocka_unit_test(poison_stays_in_its_sequence),
        cmocka_unit_test(on_the_gpu),
        cmocka_unit_test(sizes_large_on_the_gpu),
        cmocka_unit_test(poison_on_the_gpu),
        cmocka_unit_test(poison_large_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_shared_attn", tests, NULL, NULL);
}
