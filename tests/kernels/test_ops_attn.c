/* test_ops_attn.c - attention. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "tests/op_check.h"

enum { MAX_LEN = 16, MAX_SEQ = 300 };

struct shape {
    int64_t n_head, n_kv, head_dim, value_dim, window; /* value_dim 0: head_dim */
    bool sink;
    int n_seq;
    int64_t len[MAX_LEN]; /* more sequences repeat these */
};

/* Windows 0 (none), 1, 5 and longer than the sequence; 1, 2 or 4 query heads per kv head; lengths around block sizes;
 * values narrower and wider than keys. */
static const struct shape shapes[] = {
    {2, 2, 4, 0, 0, false, 1, {1}},       {2, 1, 4, 0, 0, true, 2, {0, 5}},  {4, 1, 2, 0, 1, true, 3, {3, 1, 4}},
    {4, 2, 6, 0, 5, false, 3, {7, 2, 9}}, {4, 4, 3, 0, 5, true, 2, {12, 6}}, {4, 1, 5, 0, 100, true, 2, {6, 11}},
    {2, 2, 4, 0, 0, true, 0, {0}},        {4, 2, 6, 4, 0, true, 2, {9, 5}},  {3, 3, 2, 5, 4, false, 2, {6, 7}},
};
static const struct shape large_shapes[] = {
    {4, 1, 32, 0, 0, true, 3, {300, 1, 77}},    {8, 2, 32, 0, 64, true, 4, {64, 65, 300, 31}},
    {4, 4, 16, 0, 5, false, 2, {129, 128}},     {2, 1, 64, 0, 0, false, 2, {257, 513}},
    {4, 2, 8, 0, 300, true, 3, {600, 40, 299}}, {4, 4, 24, 16, 0, false, 2, {300, 129}},
    {4, 2, 16, 32, 64, true, 2, {131, 260}},
};

struct attn {
    struct device *dev;
    struct seqs seqs;
    struct attn_shape shape;
    struct tensor qkv, sinks, o, lse, dqkv;
};

static struct attn attn_make(struct device *dev, const struct shape *s)
{
    int32_t cu[MAX_SEQ + 1] = {0};
    int64_t max_len = 0;
    double pairs = 0;
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t len = s->len[i % MAX_LEN];
        cu[i + 1] = cu[i] + (int32_t)len;
        max_len = MT_MAX(max_len, len);
        pairs += (double)len * (double)(len + 1) / 2;
    }
    int64_t n_tok = cu[s->n_seq], value_dim = s->value_dim ? s->value_dim : s->head_dim,
            width = (s->n_head + s->n_kv) * s->head_dim + s->n_kv * value_dim;
    struct attn a = {
        .dev = dev,
        .seqs = {.cu = make_i32(cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = max_len, .pairs = pairs},
        .shape = {s->n_head, s->n_kv, s->head_dim, s->window, 1.0f / sqrtf((float)s->head_dim), s->value_dim},
        .qkv = make_random(dev->act_dtype, 1, 2, n_tok, width, -1),
        .o = make_empty(dev->act_dtype, n_tok, s->n_head * value_dim, -1),
        .lse = make_empty(dev->stat_dtype, n_tok, s->n_head, -1),
        .dqkv = make_empty(dev->act_dtype, n_tok, width, -1),
    };
    if (s->sink) a.sinks = make_random(DT_F32, 2, 2, s->n_head, -1, -1);
    return a;
}

static void fwd(struct attn *a) { op_attn_fwd(a->dev, a->o, a->lse, a->qkv, a->sinks, &a->seqs, &a->shape); }

static void bwd(struct attn *a)
{
    op_attn_bwd(a->dev, a->dqkv, make_probe(a->o, 3), a->o, a->lse, a->qkv, &a->seqs, &a->shape);
}

static void run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct attn a = attn_make(dev, params);
    fwd(&a);
    bwd(&a);
    struct tensor all[] = {a.o, a.lse, a.dqkv};
    for (int i = 0; i < 3; i++) outputs->out[outputs->n++] = all[i];
}

static double loss(void *arg)
{
    struct attn *a = arg;
    fwd(a);
    return probe(a->o, 3);
}

/* Output channel c and lse of head h at position i of the sequence that begins at row `first`, by the definition. */
static void reference(const struct attn *a, int64_t first, int64_t i, int64_t h, double *out, double *lse)
{
    const struct attn_shape *s = &a->shape;
    int64_t dim = s->head_dim, value_dim = attn_value_dim(s), width = a->qkv.shape[1], kv = h / (s->n_head / s->n_kv);
    int64_t q = (first + i) * width + h * dim, k = (s->n_head + kv) * dim;
    int64_t v = (s->n_head + s->n_kv) * dim + kv * value_dim;
    double total = a->sinks.ndim ? exp(value_at(a->sinks, h)) : 0;
    for (int64_t c = 0; c < value_dim; c++) out[c] = 0;
    for (int64_t j = 0; j <= i; j++) {
        if (s->window && j <= i - s->window) continue;
        double score = 0;
        for (int64_t c = 0; c < dim; c++)
            score += value_at(a->qkv, q + c) * value_at(a->qkv, (first + j) * width + k + c);
        double e = exp((double)s->scale * score);
        total += e;
        for (int64_t c = 0; c < value_dim; c++) out[c] += e * value_at(a->qkv, (first + j) * width + v + c);
    }
    for (int64_t c = 0; c < value_dim; c++) out[c] /= total;
    *lse = log(total);
}

static void forward_is_the_definition(struct device *dev, const struct shape *s)
{
    struct attn a = attn_make(dev, s);
    fwd(&a);
    int64_t dim = attn_value_dim(&a.shape), first = 0;
    for (int seq = 0; seq < s->n_seq; first += s->len[seq++]) {
        for (int64_t i = 0; i < s->len[seq]; i++) {
            for (int64_t h = 0; h < s->n_head; h++) {
                double out[64], lse;
                reference(&a, first, i, h, out, &lse);
                assert_close(value_at(a.lse, (first + i) * s->n_head + h), lse, 1e-13);
                for (int64_t c = 0; c < dim; c++)
                    assert_close(value_at(a.o, ((first + i) * s->n_head + h) * dim + c), out[c], 1e-13);
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
        assert_finite(a.dqkv);
        assert_true(gradient_error(loss, &a, a.qkv, a.dqkv) < 1e-8);
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
        assert_true(slope_error(loss, &a, a.qkv, a.dqkv) < 1e-6);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 2e-6);
    for (int i = 0; i < MT_LEN(large_shapes); i++) op_check_case(run, &large_shapes[i], 2e-6);
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
        struct tensor dout = make_probe(a.o, 3);
        fwd(&a);
        bwd(&a);
        int64_t first = 0;
        for (int seq = 0; seq < s->n_seq; first += s->len[seq++]) {
            struct shape one = *s;
            one.n_seq = 1;
            one.len[0] = s->len[seq];
            struct attn b = attn_make(&dev, &one);
            b.qkv = tensor_rows(a.qkv, first, one.len[0]);
            fwd(&b);
            op_attn_bwd(&dev, b.dqkv, tensor_rows(dout, first, one.len[0]), b.o, b.lse, b.qkv, &b.seqs, &b.shape);
            assert_same_bits(b.o, tensor_rows(a.o, first, one.len[0]));
            assert_same_bits(b.lse, tensor_rows(a.lse, first, one.len[0]));
            assert_same_bits(b.dqkv, tensor_rows(a.dqkv, first, one.len[0]));
        }
        op_check_end(&dev);
    }
}

/* Sets every element of q, k, v and dout to `v` in every second sequence, beginning with number `odd`. */
static void poison(const struct attn *a, const struct shape *s, struct tensor dout, int odd, double v)
{
    int64_t row = 0;
    for (int seq = 0; seq < s->n_seq; row += s->len[seq++]) {
        if (seq % 2 != odd) continue;
        struct tensor rows[] = {tensor_rows(a->qkv, row, s->len[seq]), tensor_rows(dout, row, s->len[seq])};
        for (int k = 0; k < 2; k++)
            for (int64_t i = 0; i < tensor_count(rows[k]); i++) set_value(rows[k], i, v);
    }
}

/* NaN and infinity in one sequence do not change a bit of the sequences beside it. */
static void run_poisoned(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct attn clean = attn_make(dev, s);
    fwd(&clean);
    bwd(&clean);
    struct tensor all[] = {clean.o, clean.lse, clean.dqkv};
    for (int i = 0; i < 3; i++) outputs->out[outputs->n++] = all[i];
    for (int k = 0; k < 4 && !dev->dry_run; k++) {
        struct attn a = attn_make(dev, s);
        struct tensor dout = make_probe(a.o, 3), got[] = {a.o, a.lse, a.dqkv};
        poison(&a, s, dout, k % 2, k < 2 ? NAN : INFINITY);
        fwd(&a);
        op_attn_bwd(dev, a.dqkv, dout, a.o, a.lse, a.qkv, &a.seqs, &a.shape);
        dev->ops->wait();
        int64_t row = 0;
        for (int seq = 0; seq < s->n_seq; row += s->len[seq++]) {
            if (seq % 2 == k % 2) {
                for (int i = 0; i < 3 && s->len[seq]; i++)
                    assert_true(!isfinite(value_at(tensor_rows(got[i], row, 1), 0)));
                continue;
            }
            for (int i = 0; i < 3; i++)
                assert_same_bits(tensor_rows(got[i], row, s->len[seq]), tensor_rows(all[i], row, s->len[seq]));
        }
    }
}

/* Boundaries inside tiles of 64, 96 and 128 rows, and at their ends; every width of tile, groups that fill it or not.
 */
#define NEIGHBOURS                                                                                                     \
    9, { 37, 1, 63, 64, 65, 130, 96, 2, 47 }
static const struct shape poisoned_shapes[] = {
    {8, 1, 64, 0, 0, true, NEIGHBOURS},        {8, 2, 64, 0, 128, true, NEIGHBOURS},
    {4, 4, 64, 0, 5, false, NEIGHBOURS},       {3, 1, 64, 0, 33, false, NEIGHBOURS},
    {5, 1, 64, 0, 0, false, NEIGHBOURS},       {2, 2, 64, 0, 1, true, NEIGHBOURS},
    {4, 1, 16, 0, 0, true, NEIGHBOURS},        {4, 2, 96, 0, 0, false, NEIGHBOURS},
    {4, 1, 128, 0, 20, true, NEIGHBOURS},      {2, 1, 256, 0, 0, true, NEIGHBOURS},
    {16, 1, 64, 0, 0, true, 3, {301, 1, 500}}, {20, 1, 64, 0, 0, false, 2, {820, 20}},
    {2, 2, 192, 128, 0, false, NEIGHBOURS},    {5, 1, 192, 128, 20, true, NEIGHBOURS},
    {8, 1, 128, 0, 0, false, NEIGHBOURS},      {3, 1, 256, 0, 33, false, NEIGHBOURS},
    {4, 1, 512, 0, 0, true, NEIGHBOURS},       {3, 1, 512, 0, 33, false, NEIGHBOURS},
};

static void poison_stays_in_its_sequence(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(poisoned_shapes); i += 4) {
        struct device dev;
        struct op_outputs outputs = {.n = 0};
        op_check_begin(&dev, false);
        run_poisoned(&dev, &poisoned_shapes[i], &outputs);
        op_check_end(&dev);
    }
}

/* A NaN in a key reaches only the lse of queries that attend to this key. */
static void nan_stays_visible(void **state)
{
    (void)state;
    static const struct shape s = {2, 2, 4, 0, 3, true, 1, {8}};
    struct device dev;
    op_check_begin(&dev, false);
    struct attn a = attn_make(&dev, &s);
    set_value(a.qkv, 4 * 24 + 8, NAN); /* key of row 4, head 0 */
    fwd(&a);
    for (int64_t t = 0; t < 8; t++) {
        assert_true(isnan(value_at(a.lse, t * 2)) == (t >= 4 && t < 7));
        assert_true(isfinite(value_at(a.lse, t * 2 + 1)));
    }
    op_check_end(&dev);
}

static void flops_are_counted(void **state)
{
    (void)state;
    static const struct shape full = {4, 2, 8, 0, 0, false, 2, {10, 20}}, window = {4, 2, 8, 0, 5, false, 2, {20, 20}},
                              wide = {4, 2, 8, 0, 20, false, 2, {10, 20}}, narrow = {4, 2, 8, 6, 0, false, 2, {10, 20}};
    struct device dev;
    op_check_begin(&dev, false);
    struct attn a = attn_make(&dev, &full);
    fwd(&a);
    assert_close(dev.flops, 4.0 * 32 * (55 + 210), 1e-15);
    dev.flops = 0;
    bwd(&a);
    assert_close(dev.flops, 10.0 * 32 * (55 + 210), 1e-15);
    dev.flops = 0;
    a = attn_make(&dev, &window);
    fwd(&a);
    assert_close(dev.flops, 4.0 * 32 * 2 * (20 * 5 - (4 + 3 + 2 + 1)), 1e-15);
    dev.flops = 0;
    a = attn_make(&dev, &wide);
    fwd(&a);
    assert_close(dev.flops, 4.0 * 32 * (55 + 210), 1e-15);
    dev.flops = 0;
    a = attn_make(&dev, &narrow);
    fwd(&a);
    bwd(&a);
    assert_close(dev.flops, 2.0 * 4 * (4 * 8 + 3 * 6) * (55 + 210), 1e-15);
    op_check_end(&dev);
}

/* ---- attention on the GPU ---- */

/* Lengths near the block sizes (64 and 128 rows); windows that mask nothing, almost everything, and whole blocks. */
#define LENGTHS                                                                                                        \
    7, { 1, 2, 63, 64, 65, 129, 300 }
static const struct gpu_case {
    struct shape shape;
    int64_t pad; /* columns around qkv, o and dqkv, a multiple of 16 */
} gpu_cases[] = {
    {{4, 4, 64, 0, 0, false, LENGTHS}, 0},
    {{8, 2, 64, 0, 0, true, LENGTHS}, 16},
    {{8, 1, 64, 0, 128, true, LENGTHS}, 0},
    {{4, 1, 64, 0, 5, false, LENGTHS}, 16},
    {{2, 2, 64, 0, 1, true, LENGTHS}, 0},
    {{4, 4, 128, 0, 0, true, LENGTHS}, 16},
    {{8, 2, 128, 0, 128, false, LENGTHS}, 0},
    {{8, 1, 128, 0, 0, false, LENGTHS}, 0},
    {{4, 1, 128, 0, 5, true, LENGTHS}, 16},
    {{2, 2, 128, 0, 1, false, LENGTHS}, 0},
    {{8, 1, 64, 0, 0, true, 1, {1100}}, 0}, /* many blocks: every stage of the pipeline is reused; nine add to dq */
    {{8, 1, 64, 0, 128, true, 2, {1, 1100}}, 0},
    {{4, 1, 128, 0, 0, false, 1, {700}}, 0},
    {{3, 1, 64, 0, 33, false, 2, {257, 513}}, 0}, /* a group size that is not a power of two; a window across blocks */
    {{6, 2, 64, 0, 0, true, LENGTHS}, 16},        /* groups that leave rows of a tile empty */
    {{5, 1, 64, 0, 128, false, LENGTHS}, 0},
    {{16, 1, 64, 0, 33, true, 3, {200, 95, 97}}, 0},
    {{7, 1, 64, 0, 200, false, 2, {300, 513}}, 0}, /* tiles of queries across the edges of blocks of keys */
    {{70, 1, 64, 0, 0, false, 2, {9, 40}}, 0},     /* a group larger than a tile of the Hopper kernel */
    {{6, 3, 16, 0, 21, true, LENGTHS}, 16},        /* narrower than a tile */
    {{8, 2, 32, 0, 64, true, LENGTHS}, 0},
    {{4, 1, 8, 0, 0, false, LENGTHS}, 16},
    {{4, 2, 24, 0, 0, true, LENGTHS}, 16}, /* widths that are not powers of two */
    {{3, 3, 56, 0, 64, false, LENGTHS}, 0},
    {{6, 2, 80, 0, 0, true, LENGTHS}, 16},
    {{8, 2, 96, 0, 128, true, LENGTHS}, 0},
    {{4, 4, 112, 0, 5, false, LENGTHS}, 16},
    {{4, 1, 136, 0, 0, true, LENGTHS}, 0}, /* wider than a tile of 128 */
    {{3, 1, 160, 0, 33, true, 2, {257, 513}}, 16},
    {{4, 2, 192, 0, 0, false, LENGTHS}, 16},
    {{8, 2, 256, 0, 128, true, LENGTHS}, 0},
    {{4, 4, 256, 0, 1, false, LENGTHS}, 16},
    {{4, 4, 192, 128, 0, false, LENGTHS}, 16}, /* latent attention: values narrower than keys */
    {{3, 3, 128, 64, 0, true, LENGTHS}, 0},
    {{4, 2, 64, 40, 33, true, LENGTHS}, 16},
    {{2, 1, 64, 128, 0, false, 2, {257, 513}}, 0}, /* and wider */
    {{4, 4, 192, 256, 0, false, LENGTHS}, 0},
    {{8, 1, 256, 0, 0, false, 1, {700}}, 0},
    {{2, 1, 248, 0, 0, true, 16, {0, 0, 1, 1, 200, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1}}, 0},
    {{2, 1, 64, 0, 0, true, 16, {3, 0, 1, 1, 0, 0, 7, 130, 1, 2, 0, 64, 1, 1, 5, 0}}, 0},
    {{2, 1, 128, 0, 0, false, 16, {0, 0, 1, 1, 200, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1}}, 0},
    /* Every pair of widths of the Hopper kernels: all stages reused, windows, groups that leave rows of a tile empty,
     * groups as large as a tile and larger, sequences without rows. */
    {{2, 1, 128, 0, 33, true, 2, {257, 513}}, 0},
    {{12, 1, 128, 0, 0, true, LENGTHS}, 16},
    {{70, 1, 128, 0, 0, false, 2, {9, 40}}, 0},
    {{1, 1, 192, 128, 0, true, 1, {700}}, 0},
    {{3, 1, 192, 128, 33, true, 2, {257, 513}}, 16},
    {{4, 1, 192, 128, 128, false, LENGTHS}, 0},
    {{5, 1, 192, 128, 5, true, LENGTHS}, 16},
    {{1, 1, 192, 128, 0, false, 16, {3, 0, 1, 1, 0, 0, 7, 130, 1, 2, 0, 64, 1, 1, 5, 0}}, 0},
    {{1, 1, 256, 0, 0, true, 1, {700}}, 0},
    {{3, 1, 256, 0, 33, false, 2, {257, 513}}, 16},
    {{8, 1, 256, 0, 0, true, LENGTHS}, 0},
    {{2, 2, 256, 0, 5, true, LENGTHS}, 16},
    {{64, 1, 256, 0, 0, false, 3, {1, 30, 95}}, 0},
    {{70, 1, 256, 0, 0, true, 2, {9, 40}}, 0},
    {{2, 1, 256, 0, 0, true, 16, {3, 0, 1, 1, 0, 0, 7, 130, 1, 2, 0, 64, 1, 1, 5, 0}}, 0},
    /* Wider than 256: blocks of 32 rows, stages of 16, halves of the columns, either of which may be empty. */
    {{4, 2, 512, 0, 0, true, 3, {1, 70, 33}}, 16},
    {{3, 1, 512, 0, 19, false, 2, {17, 129}}, 0},
    {{2, 2, 320, 0, 0, true, 4, {0, 32, 16, 65}}, 16},
    {{2, 1, 264, 40, 0, false, 2, {48, 31}}, 0},
    {{2, 1, 64, 512, 33, true, 2, {40, 31}}, 0},
    {{16, 2, 512, 0, 0, false, 1, {40}}, 0},
    {{1, 1, 512, 0, 1, false, 16, {3, 0, 1, 1, 0, 0, 7, 40, 1, 2, 0, 33, 1, 1, 5, 0}}, 0},
    /* Heads of 512 on Hopper: several blocks of keys and chunks; a window across blocks; groups that leave rows empty,
     * or have one query in a block. */
    {{8, 1, 512, 0, 0, true, 2, {300, 65}}, 16},
    {{5, 1, 512, 0, 70, false, 3, {130, 1, 140}}, 0},
    {{4, 2, 512, 0, 0, false, LENGTHS}, 0},
    {{64, 1, 512, 0, 0, true, 2, {5, 70}}, 0},
    /* Kernels that begin with the longest blocks: more sequences than a warp has lanes, and more than they sort. */
    {{1, 1, 64, 0, 0, false, 70, {3, 0, 1, 1, 0, 0, 7, 140, 1, 2, 0, 64, 1, 1, 5, 0}}, 0},
    {{2, 1, 128, 0, 0, false, 40, {3, 0, 129, 1, 0, 0, 7, 66, 1, 2, 0, 64, 1, 1, 5, 0}}, 0},
    {{1, 1, 256, 0, 0, false, 33, {3, 0, 1, 65, 0, 0, 7, 129, 1, 2, 0, 64, 1, 1, 5, 0}}, 0},
    {{1, 1, 128, 0, 0, false, 300, {3, 0, 1, 1, 0, 0, 7, 9, 1, 2, 0, 1, 1, 1, 5, 0}}, 0},
    {{1, 1, 64, 0, 0, false, 1, {1}}, 0},
    {{4, 2, 64, 0, 0, true, 0, {0}}, 0}, /* no rows */
};

static struct tensor make_view(struct tensor wide, int64_t pad)
{
    return pad ? tensor_cols(wide, pad / 2, wide.shape[1] - pad) : wide;
}

static void run_on_gpu(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct gpu_case *c = params;
    struct attn a = attn_make(dev, &c->shape);
    int64_t n_tok = a.qkv.shape[0], width = a.qkv.shape[1];
    a.qkv = make_view(make_random(dev->act_dtype, 1, 2, n_tok, width + c->pad, -1), c->pad);
    a.o = make_view(make_empty(dev->act_dtype, n_tok, a.o.shape[1] + c->pad, -1), c->pad);
    a.dqkv = make_view(make_empty(dev->act_dtype, n_tok, width + c->pad, -1), c->pad);
    fwd(&a);
    bwd(&a);
    struct tensor all[] = {a.o, a.lse, a.dqkv};
    for (int i = 0; i < 3; i++) outputs->out[outputs->n++] = all[i];
}

/* Keys whose length doubles seven times, up to `growth` times that of others; every 97th is along the query of head 0.
 * So the first keys say nothing of the largest score of a query. The sequences are long enough for the Hopper kernel to
 * bound scores by lengths: with growth 8 weights exceed those of the first keys by up to 2^40, and the first maxima of
 * some rows are raised; with 64 the bound is too large. */
static const struct growth_case {
    struct shape shape;
    double growth; /* a power of 2, so that bf16 rounds nothing */
} growth_cases[] = {
    {{8, 1, 64, 0, 0, true, 1, {2050}}, 8},
    {{8, 1, 64, 0, 0, false, 1, {2050}}, 64},
    {{8, 1, 128, 0, 0, false, 2, {2100, 3}}, 8},
};
static void run_growing(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct growth_case *c = params;
    struct attn a = attn_make(dev, &c->shape);
    const int64_t n_tok = a.qkv.shape[0], dim = c->shape.head_dim, width = a.qkv.shape[1];
    for (int64_t t = 0; t < n_tok; t++) {
        const double factor = ldexp(c->growth, (int)(8 * t / n_tok) - 7);
        for (int64_t i = 0; i < dim; i++) {
            const int64_t query = t * width + i, key = query + c->shape.n_head * dim;
            set_value(a.qkv, key, factor * value_at(a.qkv, t % 97 == 96 ? query : key));
        }
    }
    fwd(&a);
    outputs->out[outputs->n++] = a.o;
    outputs->out[outputs->n++] = a.lse;
}
static void growing_scores_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(growth_cases); i++) op_check_cuda(run_growing, &growth_cases[i]);
}

/* Runs the cases whose heads have this width; 512: all above 256; 0: the widths that no other test runs. */
static void cases_of_width(int64_t width)
{
    int n = 0;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(gpu_cases); i++) {
        const struct shape *s = &gpu_cases[i].shape;
        const int64_t dim = MT_MAX(s->head_dim, s->value_dim) > 256 ? 512 : s->head_dim;
        const bool common = dim == 64 || dim == 128 || dim == 192 || dim == 256 || dim == 512;
        if (width ? dim != width : common) continue;
        op_check_cuda(run_on_gpu, &gpu_cases[i]);
        n++;
    }
    assert_true(n > 0);
}
static void width_64_on_the_gpu(void **state) { (void)state, cases_of_width(64); }
static void width_128_on_the_gpu(void **state) { (void)state, cases_of_width(128); }
static void width_192_on_the_gpu(void **state) { (void)state, cases_of_width(192); }
static void width_256_on_the_gpu(void **state) { (void)state, cases_of_width(256); }
static void wide_heads_on_the_gpu(void **state) { (void)state, cases_of_width(512); }
static void other_widths_on_the_gpu(void **state) { (void)state, cases_of_width(0); }

static void poison_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(poisoned_shapes); i++) op_check_cuda(run_poisoned, &poisoned_shapes[i]);
}

/* A sequence alone and among shorter ones has the same bits. The shorter ones are many enough to change the mean number
 * of keys of the batch: 2000 tokens have tiles of 128 keys, 700 tokens of 24 heads have bounded scores. */
static const struct shape beside_shapes[] = {
    {1, 1, 64, 0, 0, true, 6, {9, 2000, 300, 1, 64, 130}},
    {24, 1, 64, 0, 0, false, 4, {5, 700, 200, 99}},
    {4, 1, 128, 0, 0, false, 4, {65, 300, 1, 200}},
    {2, 1, 256, 0, 33, true, 3, {1, 300, 65}},
    {4, 1, 512, 0, 0, false, 3, {33, 200, 65}},
};
static void run_beside(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct shape one = *s;
    one.n_seq = 1;
    one.len[0] = s->len[1];
    struct attn all = attn_make(dev, s), alone = attn_make(dev, &one);
    const struct tensor dout = make_probe(all.o, 3), rows = tensor_rows(all.qkv, s->len[0], s->len[1]);
    copy_on(dev, alone.qkv, rows);
    fwd(&all);
    fwd(&alone);
    op_attn_bwd(dev, all.dqkv, dout, all.o, all.lse, all.qkv, &all.seqs, &all.shape);
    op_attn_bwd(dev, alone.dqkv, tensor_rows(dout, s->len[0], s->len[1]), alone.o, alone.lse, alone.qkv, &alone.seqs,
                &alone.shape);
    const struct tensor got[] = {alone.o, alone.lse, alone.dqkv}, want[] = {all.o, all.lse, all.dqkv};
    for (int i = 0; i < 3; i++) {
        if (!dev->dry_run) assert_same_bits(got[i], tensor_rows(want[i], s->len[0], s->len[1]));
        outputs->out[outputs->n++] = want[i];
    }
}
static void neighbours_change_no_bits_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(beside_shapes); i++) op_check_cuda(run_beside, &beside_shapes[i]);
}

int test_ops_attn(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward),
        cmocka_unit_test(gradients),
        cmocka_unit_test(gradients_of_large_shapes),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(nan_stays_visible),
        cmocka_unit_test(flops_are_counted),
        cmocka_unit_test(poison_stays_in_its_sequence),
        cmocka_unit_test(width_64_on_the_gpu),
        cmocka_unit_test(width_128_on_the_gpu),
        cmocka_unit_test(width_192_on_the_gpu),
        cmocka_unit_test(width_256_on_the_gpu),
        cmocka_unit_test(wide_heads_on_the_gpu),
        cmocka_unit_test(other_widths_on_the_gpu),
        cmocka_unit_test(growing_scores_on_the_gpu),
        cmocka_unit_test(poison_on_the_gpu),
        cmocka_unit_test(neighbours_change_no_bits_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_attn", tests, NULL, NULL);
}
