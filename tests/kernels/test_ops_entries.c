/* test_ops_entries.c - decoding with DeepSeek-V4's attention to compressed keys. A sequence that is decoded in several
 * passes, whose keys and compressed keys (also one that still lacks tokens) are in pages of the cache between them,
 * gives the compressed keys, choices and outputs of one pass over all tokens. */
#include "tests/test.h"

#include <math.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 8, MAX_TOK = 1024, LONGEST = 70 };

struct shape {
    struct compress_shape s; /* width: of entries, of keys and of the indexer's heads */
    int64_t n_head, window;
    int64_t n_index, n_top; /* heads of the indexer, entries that it chooses; 0: all entries are seen */
    bool sink;
    int n_seq;
    int64_t len[MAX_SEQ];
};
/* Pieces that complete no entry, one, many; sequences without tokens in a pass; entries of several pages. */
static const int64_t pieces[] = {1, 2, 64, 1, 0, LONGEST, 3, 5};
static const struct shape shapes[] = {
    {{4, 6, true}, 2, 5, 0, 0, true, 1, {1}},
    {{4, 6, true}, 3, 8, 2, 4, true, 6, {1, 3, 4, 5, 200, 90}},
    {{8, 4, false}, 2, 66, 0, 0, true, 5, {7, 8, 9, 131, 64}},
    {{1, 8, false}, 1, 3, 3, 5, false, 2, {150, 70}},
    {{64, 3, true}, 2, 100, 0, 0, true, 3, {63, 300, 129}},
    {{4, 4, true}, 2, 4, 1, 3, true, 0, {0}},
};
/* DeepSeek-V4-Flash's widths, with fewer heads; small and odd widths. */
static const struct shape gpu_shapes[] = {
    {{4, 128, true}, 2, 128, 64, 16, true, 3, {1, 200, 131}},
    {{128, 512, false}, 3, 128, 0, 0, true, 3, {300, 127, 128}},
    {{8, 5, true}, 2, 9, 3, 4, false, 4, {9, 3, 140, 8}},
    {{4, 24, true}, 4, 8, 0, 0, true, 3, {5, 0, 77}},
    {{4, 8, true}, 2, 4, 1, 3, true, 0, {0}},
};

/* For passes of one token, each of which makes tensors. */
static const struct shape short_shape = {{4, 6, true}, 3, 5, 2, 2, true, 3, {3, 14, 9}};

/* Inputs and outputs of whole sequences; pages; first: tokens so far of a sequence. */
struct bed {
    struct device *dev;
    const struct shape *p;
    struct seqs whole;
    struct shared_attn_shape attention;
    struct tensor kg, bias, entry, kv, q, sinks, index_q, index_w;
    struct tensor y, o, idx;
    struct pages pairs, keys, entries;
    int32_t cu[MAX_SEQ + 1], first[MAX_SEQ];
};

static struct pages make_pages(struct device *dev, int n_seq, int64_t n_row, int64_t n_col)
{
    int32_t table[MAX_SEQ * 16];
    const int64_t n_page = MT_MAX(1, (n_row + MT_PAGE - 1) / MT_PAGE), n = n_seq * n_page;
    assert_true(n <= MT_LEN(table));
    for (int64_t i = 0; i < n; i++) table[i] = (int32_t)(n - 1 - i);
    const struct tensor pages = make_i32(table, n);
    return (struct pages){.rows = make_empty(dev->act_dtype, (n + 1) * MT_PAGE, n_col, -1),
                          .table = tensor_2d(pages.data, DT_I32, n_seq, n_page)};
}

/* Whole numbers: scores of the indexer are exact. */
static struct tensor whole_numbers(enum dtype t, uint64_t stream, int64_t n0, int64_t n1)
{
    const struct tensor x = make_random(t, stream, 4, n0, n1, -1);
    for (int64_t i = 0; i < tensor_count(x); i++) set_value(x, i, rint(value_at(x, i)));
    return x;
}

static struct bed bed_make(struct device *dev, const struct shape *p)
{
    const int64_t w = p->s.width, n_part = p->s.overlap ? 2 : 1;
    const enum dtype act = dev->act_dtype;
    struct bed b = {.dev = dev, .p = p};
    int64_t longest = 0;
    double pairs = 0;
    for (int i = 0; i < p->n_seq; i++) {
        b.cu[i + 1] = b.cu[i] + (int32_t)p->len[i];
        longest = MT_MAX(longest, p->len[i]);
        pairs += (double)(p->len[i] * (p->len[i] + 1)) / 2;
    }
    const int64_t n_tok = b.cu[p->n_seq], n_entry = MT_MAX(1, n_tok / p->s.ratio);
    assert_true(n_tok <= MAX_TOK);
    b.whole = (struct seqs){.cu = make_i32(b.cu, p->n_seq + 1), .n_seq = p->n_seq, .max_len = longest, .pairs = pairs};
    b.attention = (struct shared_attn_shape){p->n_head, w, p->window, p->s.ratio, 1.0f / sqrtf((float)w)};
    b.kg = make_random(act, 1, 3, n_tok, 2 * n_part * w, -1);
    b.bias = make_random(DT_F32, 2, 1, p->s.ratio, n_part * w, -1);
    b.entry = whole_numbers(act, 3, n_entry, w);
    b.kv = make_random(act, 4, 2, n_tok, w, -1);
    b.q = make_random(act, 5, 1, n_tok, p->n_head * w, -1);
    if (p->sink) b.sinks = make_random(DT_F32, 6, 2, p->n_head, -1, -1);
    b.y = make_zero(act, n_entry, w, -1);
    b.o = make_empty(act, n_tok, p->n_head * w, -1);
    b.pairs = make_pages(dev, p->n_seq, n_part * p->s.ratio, 2 * n_part * w);
    b.keys = make_pages(dev, p->n_seq, p->window + LONGEST - 1, w);
    b.entries = make_pages(dev, p->n_seq, longest / p->s.ratio, w);
    if (!p->n_top) return b;
    b.index_q = whole_numbers(act, 7, n_tok, p->n_index * w);
    b.index_w = whole_numbers(act, 8, n_tok, p->n_index);
    b.idx = make_empty(DT_I32, n_tok, p->n_top, -1);
    return b;
}

/* A pass: n tokens of every sequence from first on; its tensors are copies of rows of the whole ones. */
struct pass {
    int32_t cu[MAX_SEQ + 1], pos[MAX_TOK];
    struct seqs seqs;
    struct tensor at;
};

static struct tensor rows_of(const struct bed *b, const struct pass *x, struct tensor from)
{
    const struct tensor to = make_empty(from.dtype, x->at.shape[0], from.shape[1], -1);
    for (int i = 0; i < b->p->n_seq; i++)
        copy_on(b->dev, tensor_rows(to, x->cu[i], x->cu[i + 1] - x->cu[i]),
                tensor_rows(from, b->cu[i] + b->first[i], x->cu[i + 1] - x->cu[i]));
    return to;
}
static void put_rows(const struct bed *b, const struct pass *x, struct tensor to, struct tensor from)
{
    for (int i = 0; i < b->p->n_seq; i++)
        copy_on(b->dev, tensor_rows(to, b->cu[i] + b->first[i], x->cu[i + 1] - x->cu[i]),
                tensor_rows(from, x->cu[i], x->cu[i + 1] - x->cu[i]));
}

/* Entries that the pass completes: their values into b->y, and rows of b->entry in the order of the op into x. */
static void copy_entries(const struct bed *b, const struct pass *x, struct tensor values, struct tensor pos,
                         struct tensor rows)
{
    const int64_t r = b->p->s.ratio;
    for (int i = 0; i < b->p->n_seq; i++) {
        const int64_t before = b->first[i] / r, after = (b->first[i] + x->cu[i + 1] - x->cu[i]) / r;
        for (int64_t e = before; e < after; e++) {
            const int64_t row = x->cu[i] / r + i + e - before, whole = b->cu[i] / r + e;
            copy_on(b->dev, tensor_rows(b->y, whole, 1), tensor_rows(values, row, 1));
            copy_on(b->dev, tensor_rows(rows, row, 1), tensor_rows(b->entry, whole, 1));
            if (!b->dev->dry_run) assert_true(value_at(pos, row) == (double)(e * r));
        }
    }
}

static void run_pass(struct bed *b, const struct pass *x)
{
    const struct shape *p = b->p;
    struct device *dev = b->dev;
    const struct past pairs = {&b->pairs, x->at, &x->seqs}, keys = {&b->keys, x->at, &x->seqs},
                      entries = {&b->entries, x->at, &x->seqs};
    const int64_t n_row = x->at.shape[0] / p->s.ratio + p->n_seq;
    const struct tensor kg = rows_of(b, x, b->kg), kv = rows_of(b, x, b->kv), q = rows_of(b, x, b->q);
    const struct tensor y = make_empty(kg.dtype, n_row, p->s.width, -1), pos = make_empty(DT_I32, n_row, -1, -1);
    const struct tensor rows = make_empty(kg.dtype, n_row, p->s.width, -1);
    const struct tensor o = make_empty(q.dtype, q.shape[0], q.shape[1], -1);
    struct tensor idx = {0};
    op_compress_decode(dev, y, pos, kg, b->bias, &pairs, &p->s);
    copy_entries(b, x, y, pos, rows);
    op_entry_store(dev, rows, &entries, p->s.ratio);
    op_page_store(dev, &b->pairs, kg, x->at, &x->seqs);
    op_page_store(dev, &b->keys, kv, x->at, &x->seqs);
    if (p->n_top) {
        idx = make_empty(DT_I32, q.shape[0], p->n_top, -1);
        op_index_decode(dev, idx, rows_of(b, x, b->index_q), rows_of(b, x, b->index_w), &entries, p->s.ratio);
        put_rows(b, x, b->idx, idx);
    }
    op_shared_attn_decode(dev, o, q, &keys, &b->entries, idx, b->sinks, &b->attention);
    put_rows(b, x, b->o, o);
}

/* The next piece of every sequence, of at most `most` tokens; false: all were complete. */
static bool next_piece(struct bed *b, int number, int64_t most)
{
    const struct shape *p = b->p;
    struct pass x = {.cu = {0}};
    bool more = false;
    double pairs = 0;
    for (int i = 0; i < p->n_seq; i++) {
        const int64_t piece = MT_MIN(pieces[(number + i) % MT_LEN(pieces)], most);
        x.cu[i + 1] = x.cu[i] + (int32_t)MT_MIN(piece, p->len[i] - b->first[i]);
        for (int32_t t = x.cu[i]; t < x.cu[i + 1]; t++) pairs += 1 + (x.pos[t] = b->first[i] + t - x.cu[i]);
    }
    x.at = make_i32(x.pos, x.cu[p->n_seq]);
    x.seqs = (struct seqs){
        .cu = make_i32(x.cu, p->n_seq + 1), .n_seq = p->n_seq, .max_len = b->whole.max_len, .pairs = pairs};
    run_pass(b, &x);
    for (int i = 0; i < p->n_seq; i++) {
        b->first[i] += x.cu[i + 1] - x.cu[i];
        more = more || b->first[i] < p->len[i];
    }
    return more;
}

static void run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct bed b = bed_make(dev, params);
    for (int i = 0; next_piece(&b, i, LONGEST); i++) {
    }
    outputs->out[outputs->n++] = b.y;
    outputs->out[outputs->n++] = b.o;
    if (b.idx.ndim) outputs->out[outputs->n++] = b.idx;
}

static void pieces_are_the_whole(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        op_check_begin(&dev, true);
        struct bed b = bed_make(&dev, &shapes[i]);
        const struct tensor y = make_empty(DT_F64, b.y.shape[0], b.y.shape[1], -1), o = make_copy(b.o),
                            pos = make_empty(DT_I32, y.shape[0], -1, -1),
                            lse = make_empty(DT_F64, o.shape[0], b.p->n_head, -1);
        const struct tensor idx = b.idx.ndim ? make_copy(b.idx) : b.idx;
        for (int k = 0; next_piece(&b, k, LONGEST); k++) {
        }
        op_compress_fwd(&dev, y, pos, b.kg, b.bias, &b.whole, &b.p->s);
        if (idx.ndim) op_index_topk(&dev, idx, b.index_q, b.entry, b.index_w, &b.whole, b.p->s.ratio);
        op_shared_attn_fwd(&dev, o, lse, b.q, b.kv, b.entry, idx, b.sinks, &b.whole, &b.attention);
        for (int64_t k = 0; k < tensor_count(y); k++) assert_close(value_at(b.y, k), value_at(y, k), 1e-13);
        for (int64_t k = 0; k < tensor_count(o); k++) assert_close(value_at(b.o, k), value_at(o, k), 1e-12);
        if (idx.ndim) assert_same_bits(idx, b.idx);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 2e-6);
}

/* The same bits in any pieces, here of one token. */
static void run_singly(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct bed b = bed_make(dev, params), single = bed_make(dev, params);
    for (int i = 0; next_piece(&b, i, LONGEST); i++) {
    }
    for (int i = 0; next_piece(&single, i, 1); i++) {
    }
    outputs->out[outputs->n++] = b.y;
    if (dev->dry_run) return;
    assert_same_bits(single.y, b.y);
    assert_same_bits(single.o, b.o);
    if (b.idx.ndim) assert_same_bits(single.idx, b.idx);
}

static void pieces_change_no_bits(void **state)
{
    (void)state;
    struct device dev;
    struct op_outputs outputs = {.n = 0};
    op_check_begin(&dev, false);
    run_singly(&dev, &shapes[1], &outputs);
    op_check_end(&dev);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_cuda(run, &shapes[i]);
    for (int i = 0; i < MT_LEN(gpu_shapes); i++) op_check_cuda(run, &gpu_shapes[i]);
    op_check_cuda(run_singly, &short_shape);
}

int test_ops_entries(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_the_whole),
        cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(pieces_change_no_bits),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_entries", tests, NULL, NULL);
}
