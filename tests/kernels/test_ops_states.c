/* test_ops_states.c - decoding with gated DeltaNet: convolution and delta rule over parts of a sequence, with the state
 * kept between passes, equal one pass over it. */
#include "tests/test.h"

#include <math.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 8, MAX_TOK = 1024 };

struct shape {
    struct delta_shape d;
    int64_t n_tap;
    int n_seq;
    int64_t len[MAX_SEQ];
};
/* Pieces shorter than the taps, as long as a chunk of the delta rule, longer; sequences without tokens in a pass. */
static const int64_t pieces[] = {1, 2, 64, 1, 0, 70, 3, 5};
static const struct shape shapes[] = {
    {{1, 1, 4, 3}, 4, 1, {1}},
    {{1, 2, 8, 8}, 8, 1, {150}},
    {{2, 4, 8, 6}, 4, 7, {1, 63, 64, 65, 200, 3, 7}},
    {{1, 3, 7, 5}, 1, 2, {20, 90}},
    {{2, 2, 6, 4}, 2, 3, {2, 140, 129}},
    {{2, 2, 4, 4}, 4, 0, {0}},
};

/* For passes of one token, each of which makes tensors. */
static const struct shape short_shape = {{2, 4, 8, 6}, 4, 3, {1, 20, 7}};

struct bed {
    struct device *dev;
    const struct shape *s;
    struct seqs whole;
    struct tensor x, ba, w, bias; /* inputs of whole sequences: qkv, b | a, taps */
    struct tensor a_log, dt_bias;
    struct tensor y, o;                      /* outputs */
    struct tensor tail, state, slot;         /* [S + 2, ..]: two more slots than sequences */
    int32_t cu[MAX_SEQ + 1], first[MAX_SEQ]; /* first: tokens so far of a sequence */
};

static int64_t state_values(const struct delta_shape *d) { return d->n_value * d->key_dim * d->value_dim; }

static struct bed bed_make(struct device *dev, const struct shape *s)
{
    const struct delta_shape *d = &s->d;
    const int64_t n_col = 2 * d->n_key * d->key_dim + d->n_value * d->value_dim, n_slot = s->n_seq + 2;
    struct bed b = {.dev = dev, .s = s};
    int32_t slot[MAX_SEQ];
    for (int i = 0; i < s->n_seq; i++) {
        b.cu[i + 1] = b.cu[i] + (int32_t)s->len[i];
        slot[i] = s->n_seq - i;
    }
    const int64_t n_tok = b.cu[s->n_seq];
    assert_true(n_tok <= MAX_TOK);
    b.whole = (struct seqs){.cu = make_i32(b.cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = n_tok};
    b.x = make_random(dev->act_dtype, 1, 1, n_tok, n_col, -1);
    b.ba = make_random(dev->act_dtype, 2, 3, n_tok, 2 * d->n_value, -1);
    b.w = make_random(DT_F32, 5, 1, n_col, s->n_tap, -1);
    b.bias = make_random(DT_F32, 6, 1, n_col, -1, -1);
    b.a_log = make_random(DT_F32, 3, 2, d->n_value, -1, -1);
    b.dt_bias = make_random(DT_F32, 4, 1, d->n_value, -1, -1);
    set_value(b.a_log, 0, -4); /* forgets slowly */
    b.y = make_empty(dev->act_dtype, n_tok, n_col, -1);
    b.o = make_empty(dev->act_dtype, n_tok, d->n_value * d->value_dim, -1);
    if (s->n_tap > 1) b.tail = make_empty(dev->act_dtype, n_slot, (s->n_tap - 1) * n_col, -1);
    b.state = make_empty(dev->stat_dtype, n_slot, state_values(d), -1);
    b.slot = make_i32(slot, s->n_seq);
    return b;
}

/* One pass: the next piece of every sequence, at most `most` tokens of it. False: all are complete. */
static bool next_piece(struct bed *b, int pass, int64_t most)
{
    const struct shape *s = b->s;
    int32_t cu[MAX_SEQ + 1] = {0}, pos[MAX_TOK];
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t left = s->len[i] - b->first[i], piece = MT_MIN(pieces[(pass + i) % MT_LEN(pieces)], most);
        cu[i + 1] = cu[i] + (int32_t)MT_MIN(piece, left);
        for (int32_t t = cu[i]; t < cu[i + 1]; t++) pos[t] = b->first[i] + t - cu[i];
    }
    const int64_t n_tok = cu[s->n_seq];
    const struct seqs seqs = {.cu = make_i32(cu, s->n_seq + 1), .n_seq = s->n_seq, .max_len = n_tok};
    struct states tail = {.values = b->tail, .slot = b->slot, .pos = make_i32(pos, n_tok), .seqs = &seqs};
    struct tensor x = make_empty(b->x.dtype, n_tok, b->x.shape[1], -1),
                  y = make_empty(b->y.dtype, n_tok, x.shape[1], -1);
    struct tensor ba = make_empty(b->ba.dtype, n_tok, b->ba.shape[1], -1),
                  o = make_empty(b->o.dtype, n_tok, b->o.shape[1], -1);
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t from = b->cu[i] + b->first[i], n = cu[i + 1] - cu[i];
        copy_on(b->dev, tensor_rows(x, cu[i], n), tensor_rows(b->x, from, n));
        copy_on(b->dev, tensor_rows(ba, cu[i], n), tensor_rows(b->ba, from, n));
    }
    op_conv_decode(b->dev, y, x, b->w, b->bias, &tail);
    tail.values = b->state;
    op_delta_decode(b->dev, o, x, ba, b->a_log, b->dt_bias, &tail, &s->d);
    bool more = false;
    for (int i = 0; i < s->n_seq; i++) {
        const int64_t to = b->cu[i] + b->first[i], n = cu[i + 1] - cu[i];
        copy_on(b->dev, tensor_rows(b->y, to, n), tensor_rows(y, cu[i], n));
        copy_on(b->dev, tensor_rows(b->o, to, n), tensor_rows(o, cu[i], n));
        b->first[i] += (int32_t)n;
        more = more || b->first[i] < s->len[i];
    }
    return more;
}

static void in_pieces(struct bed *b)
{
    for (int pass = 0; next_piece(b, pass, INT64_MAX); pass++) {
    }
}

/* Outputs, and the rows of sequences in slots 1 .. S; slots 0 and S + 1 stay as they were. */
static void run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct bed b = bed_make(dev, params);
    const struct tensor kept[] = {b.state, b.tail};
    in_pieces(&b);
    outputs->out[outputs->n++] = b.y;
    outputs->out[outputs->n++] = b.o;
    for (int i = 0; i < MT_LEN(kept); i++) {
        const int64_t n = kept[i].ndim ? kept[i].shape[1] : 0;
        if (!n) continue;
        outputs->out[outputs->n++] = tensor_rows(kept[i], 1, b.s->n_seq);
        if (dev->dry_run) continue;
        for (int64_t c = 0; c < n; c++)
            assert_true(isnan(value_at(kept[i], c)) && isnan(value_at(kept[i], (b.s->n_seq + 1) * n + c)));
    }
}

static void pieces_are_the_whole(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct bed b = bed_make(&dev, &shapes[i]);
        const struct tensor y = make_empty(b.y.dtype, b.y.shape[0], b.y.shape[1], -1),
                            o = make_empty(b.o.dtype, b.o.shape[0], b.o.shape[1], -1);
        in_pieces(&b);
        op_conv_silu_fwd(&dev, y, b.x, b.w, b.bias, &b.whole);
        op_delta_fwd(&dev, o, b.x, b.ba, b.a_log, b.dt_bias, &b.whole, &b.s->d);
        for (int64_t k = 0; k < tensor_count(y); k++) assert_close(value_at(b.y, k), value_at(y, k), 1e-14);
        for (int64_t k = 0; k < tensor_count(o); k++) assert_close(value_at(b.o, k), value_at(o, k), 1e-12);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 1e-5);
}

/* The convolution, and on a GPU the delta rule, has the same bits in any pieces, here of one token. */
static void run_singly(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct bed b = bed_make(dev, params), single = bed_make(dev, params);
    in_pieces(&b);
    for (int pass = 0; next_piece(&single, pass, 1); pass++) {
    }
    outputs->out[outputs->n++] = b.y;
    if (dev->dry_run) return;
    assert_same_bits(single.y, b.y);
    assert_same_bits(tensor_rows(single.tail, 1, b.s->n_seq), tensor_rows(b.tail, 1, b.s->n_seq));
    if (!dev->ops->own_memory) return;
    assert_same_bits(single.o, b.o);
    assert_same_bits(tensor_rows(single.state, 1, b.s->n_seq), tensor_rows(b.state, 1, b.s->n_seq));
}

static void pieces_change_no_bits(void **state)
{
    (void)state;
    struct device dev;
    struct op_outputs outputs = {.n = 0};
    op_check_begin(&dev, false);
    run_singly(&dev, &shapes[2], &outputs);
    op_check_end(&dev);
}

static void work_is_counted(void **state)
{
    (void)state;
    static const struct shape one = {{1, 2, 4, 6}, 3, 2, {1, 1}};
    struct device dev;
    struct op_call call[2];
    struct recorder r = {.calls = call, .cap = 2};
    op_check_begin(&dev, false);
    struct bed b = bed_make(&dev, &one);
    dev.recorder = &r;
    next_piece(&b, 0, 1);
    dev.recorder = NULL;
    const double n_col = 2 * 4 + 2 * 6, n_state = 2 * 4 * 6;
    assert_close(dev.flops, 2.0 * 2 * 3 * n_state, 1e-15);
    assert_close(call[0].cost.bytes, 4 * (2 * 2 * n_col + 4 * n_col + 2 * 2 * 2 * n_col), 1e-15);
    assert_close(call[1].cost.bytes, 4 * 2 * (n_col + 2 * 6 + 4 + 2 * n_state), 1e-15);
    op_check_end(&dev);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct shape large[] = {{{2, 4, 128, 128}, 4, 3, {1, 70, 133}}, {{1, 2, 64, 32}, 3, 2, {9, 66}}};
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_cuda(run, &shapes[i]);
    for (int i = 0; i < MT_LEN(large); i++) op_check_cuda(run, &large[i]);
    op_check_cuda(run_singly, &short_shape);
}

int test_ops_states(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_the_whole),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(pieces_change_no_bits),
        cmocka_unit_test(work_is_counted),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_states", tests, NULL, NULL);
}
