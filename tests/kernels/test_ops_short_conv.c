/* test_ops_short_conv.c - the gated short convolution; decoding in several passes. */
#include <math.h>
#include <string.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 8, MAX_TOK = 64 };

struct shape {
    int64_t n_col, n_tap;
    bool biased;
    int n_seq;
    int64_t len[MAX_SEQ];
};
/* Columns around a block of 64 and around 8 x 128; taps longer than documents; documents without tokens. */
static const struct shape shapes[] = {
    {8, 3, false, 1, {1}},        {16, 3, true, 4, {2, 0, 5, 3}}, {72, 4, true, 3, {1, 9, 4}},
    {8, 1, true, 2, {3, 2}},      {8, 9, false, 3, {7, 8, 12}},   {8, 3, false, 0, {0}},
    {1032, 3, false, 2, {17, 3}}, {8, 32, true, 2, {40, 5}},
};

struct bed {
    struct device *dev;
    const struct shape *s;
    struct seqs seqs;
    struct tensor bcx, y, w, bias, dbcx;
    int32_t cu[MAX_SEQ + 1];
};

static struct bed make(struct device *dev, const void *params)
{
    const struct shape *s = params;
    struct bed b = {.dev = dev, .s = s};
    int64_t longest = 0;
    for (int i = 0; i < s->n_seq; i++) {
        b.cu[i + 1] = b.cu[i] + (int32_t)s->len[i];
        longest = MT_MAX(longest, s->len[i]);
    }
    const int64_t n_tok = b.cu[s->n_seq];
    b.seqs = (struct seqs){.cu = make_i32(b.cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = longest};
    b.bcx = make_random(dev->act_dtype, 1, 2, n_tok, 3 * s->n_col, -1);
    b.w = make_random(DT_F32, 2, 1, s->n_col, s->n_tap, -1);
    if (s->biased) b.bias = make_random(DT_F32, 3, 1, s->n_col, -1, -1);
    b.y = make_empty(dev->act_dtype, n_tok, s->n_col, -1);
    b.dbcx = make_empty(dev->act_dtype, n_tok, 3 * s->n_col, -1);
    return b;
}

static void fwd(struct bed *b) { op_short_conv_fwd(b->dev, b->y, b->bcx, b->w, b->bias, &b->seqs); }
static void bwd(struct bed *b)
{
    op_short_conv_bwd(b->dev, b->dbcx, make_probe(b->y, 3), b->bcx, b->w, b->bias, &b->seqs);
}

static void run(struct device *dev, const void *params, struct op_outputs *o)
{
    struct bed b = make(dev, params);
    fwd(&b);
    bwd(&b);
    o->out[o->n++] = b.y;
    o->out[o->n++] = b.dbcx;
}

static double loss(void *arg)
{
    fwd(arg);
    return probe(((struct bed *)arg)->y, 3);
}

/* C * (bias + the taps times B * x) of token t of the sequence that begins at `first`. */
static double expected(const struct bed *b, int64_t first, int64_t t, int64_t c)
{
    const int64_t d = b->s->n_col, n_tap = b->s->n_tap;
    double u = b->s->biased ? value_at(b->bias, c) : 0;
    for (int64_t back = 0; back < n_tap && back <= t; back++) {
        const int64_t row = (first + t - back) * 3 * d;
        u += value_at(b->w, c * n_tap + n_tap - 1 - back) * value_at(b->bcx, row + c) *
             value_at(b->bcx, row + 2 * d + c);
    }
    return u * value_at(b->bcx, (first + t) * 3 * d + d + c);
}

static void definition_and_gradient(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct bed b = make(&dev, &shapes[i]);
        fwd(&b);
        for (int s = 0; s < b.s->n_seq; s++)
            for (int64_t t = 0; t < b.s->len[s]; t++)
                for (int64_t c = 0; c < b.s->n_col; c++)
                    assert_close(value_at(b.y, (b.cu[s] + t) * b.s->n_col + c), expected(&b, b.cu[s], t, c), 1e-13);
        bwd(&b);
        const bool many = tensor_count(b.bcx) > 4000;
        const double error = !tensor_count(b.bcx) ? 0
                             : many               ? slope_error(loss, &b, b.bcx, b.dbcx)
                                                  : gradient_error(loss, &b, b.bcx, b.dbcx);
        if (!(error <= 1e-6)) fail_msg("shape %d: off by %g", i, error);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 1e-5);
}

/* Decoding in pieces of 1, 3, 2, ... tokens, with the tails of sequences in slots 1 .. S, has the bits of the whole. */
static void run_pieces(struct device *dev, const void *params, struct op_outputs *o)
{
    static const int64_t pieces[] = {1, 3, 2, 7};
    struct bed b = make(dev, params);
    const struct shape *s = b.s;
    const struct tensor y = make_empty(b.y.dtype, b.y.shape[0], s->n_col, -1);
    int32_t slot[MAX_SEQ], first[MAX_SEQ] = {0};
    struct states tail = {.values = {.ndim = 0}};
    for (int i = 0; i < s->n_seq; i++) slot[i] = s->n_seq - i;
    if (s->n_tap > 1) tail.values = make_empty(dev->stat_dtype, s->n_seq + 2, (s->n_tap - 1) * s->n_col, -1);
    tail.slot = make_i32(slot, s->n_seq);
    fwd(&b);
    for (int pass = 0, left = 1; left; pass++) {
        int32_t cu[MAX_SEQ + 1] = {0}, pos[MAX_TOK];
        left = 0;
        for (int i = 0; i < s->n_seq; i++) {
            const int64_t rest = s->len[i] - first[i];
            const int32_t n = (int32_t)MT_MIN(rest, pieces[(pass + i) % MT_LEN(pieces)]);
            cu[i + 1] = cu[i] + n;
            for (int32_t t = 0; t < n; t++) pos[cu[i] + t] = first[i] + t;
        }
        const int64_t n_tok = cu[s->n_seq];
        const struct seqs seqs = {.cu = make_i32(cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = n_tok};
        struct tensor x = make_empty(b.bcx.dtype, n_tok, 3 * s->n_col, -1),
                      part = make_empty(y.dtype, n_tok, s->n_col, -1);
        for (int i = 0; i < s->n_seq; i++)
            copy_on(dev, tensor_rows(x, cu[i], cu[i + 1] - cu[i]),
                    tensor_rows(b.bcx, b.cu[i] + first[i], cu[i + 1] - cu[i]));
        tail.pos = make_i32(pos, n_tok);
        tail.seqs = &seqs;
        op_short_conv_decode(dev, part, x, b.w, b.bias, &tail);
        for (int i = 0; i < s->n_seq; i++) {
            const int32_t n = cu[i + 1] - cu[i];
            copy_on(dev, tensor_rows(y, b.cu[i] + first[i], n), tensor_rows(part, cu[i], n));
            first[i] += n;
            left |= first[i] < s->len[i];
        }
    }
    o->out[o->n++] = y;
    if (dev->dry_run) return;
    assert_same_bits(b.y, y);
    for (int64_t c = 0; tail.values.ndim && c < tail.values.shape[1]; c++) /* slots of other sequences */
        assert_true(isnan(value_at(tail.values, c)) &&
                    isnan(value_at(tail.values, (s->n_seq + 1) * tail.values.shape[1] + c)));
}

static void pieces_have_the_bits_of_the_whole(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run_pieces, &shapes[i], 1e-5);
}

static void work_is_counted(void **state)
{
    (void)state;
    static const struct shape one = {8, 3, false, 2, {3, 4}};
    struct device dev;
    struct op_call call[3];
    struct recorder r = {.calls = call, .cap = 3};
    op_check_begin(&dev, false);
    struct bed b = make(&dev, &one);
    dev.recorder = &r;
    fwd(&b);
    bwd(&b);
    dev.recorder = NULL;
    assert_close(call[0].cost.bytes, 4 * (7 * 4 * 8 + 3 * 8), 1e-15);
    assert_close(call[1].cost.bytes, 4 * (7 * 7 * 8 + 3 * 8), 1e-15);
    op_check_end(&dev);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape large = {2048, 3, false, 3, {30, 1, 33}};
    for (int i = 0; i < MT_LEN(shapes); i++) {
        op_check_cuda(run, &shapes[i]);
        op_check_cuda(run_pieces, &shapes[i]);
    }
    op_check_cuda(run, &large);
}

int test_ops_short_conv(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(definition_and_gradient),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(pieces_have_the_bits_of_the_whole),
        cmocka_unit_test(work_is_counted),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_short_conv", tests, NULL, NULL);
}
