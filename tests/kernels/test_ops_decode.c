/* test_ops_decode.c - decoding: keys and values in pages of a cache, and attention of sequences' last tokens to them;
 * several sequences against each alone. */
#include "tests/test.h"

#include <math.h>
#include <string.h>

#include "tests/op_check.h"

enum { MAX_SEQ = 9, MAX_PAGES = 64 };

struct shape {
    int64_t n_head, n_kv, head_dim, value_dim, window; /* value_dim 0: head_dim */
    bool sink, ring;                                   /* ring: as many pages as window and chunk need */
    bool shared;                                       /* values are the first columns of keys */
    int chunk;                                         /* queries of a sequence, its last tokens, at most */
    int n_seq;
    int64_t len[MAX_SEQ]; /* tokens of each sequence, the queries' included */
};

/* Lengths around pages; windows of one key, around a page, and longer than a sequence; rings that wrap several times;
 * sequences with as many queries as tokens. */
#define BORDERS                                                                                                        \
    9, { 1, 63, 64, 65, 2, 128, 129, 191, 300 }
static const struct shape shapes[] = {
    {2, 2, 4, 0, 0, false, false, false, 1, 1, {1}},
    {4, 2, 6, 0, 0, true, false, false, 1, BORDERS},
    {4, 1, 5, 0, 7, false, false, false, 3, BORDERS},
    {4, 4, 3, 0, 1, true, true, false, 1, BORDERS},
    {6, 3, 8, 4, 63, true, true, false, 2, BORDERS},
    {3, 1, 8, 12, 64, false, true, false, 1, BORDERS},
    {8, 2, 16, 0, 65, true, true, false, 70, BORDERS},
    {4, 2, 24, 0, 1000, false, false, false, 5, BORDERS},
    {2, 1, 4, 0, 0, true, false, false, 1, 0, {0}},
    {4, 2, 64, 0, 128, true, true, false, 9, 3, {700, 5, 257}},
    {8, 1, 128, 96, 0, false, false, false, 2, 2, {130, 3}},
    {2, 2, 256, 0, 0, true, false, false, 40, 2, {64, 31}},
    {16, 1, 72, 64, 0, false, false, true, 3, 3, {70, 1, 129}},
    {4, 2, 576, 512, 0, true, false, true, 1, 2, {65, 3}},
    {3, 1, 6, 6, 5, true, true, true, 2, BORDERS},
    /* GPUs: tiles of 16 heads and keys, splits of 256 keys */
    {20, 1, 64, 0, 0, true, false, false, 1, 3, {700, 257, 15}},
    {8, 2, 128, 0, 0, true, false, false, 2, 3, {513, 256, 17}},
    {4, 2, 256, 0, 300, true, true, false, 5, 2, {600, 255}},
    {8, 1, 512, 0, 0, false, false, false, 2, 2, {70, 3}},
};

struct decode {
    struct device *dev;
    struct attn_shape shape;
    struct pages pages;
    struct tensor q, kv, o, sinks, pos, at; /* pos of the tokens kv [.., C], at [T] of the queries */
    struct seqs tokens, queries;
};

/* Columns of a wider tensor. */
static struct tensor view_of(struct tensor wide) { return tensor_cols(wide, 8, wide.shape[1] - 16); }

/* Pages in another order than that of their positions. */
static struct pages make_pages(struct device *dev, const struct shape *s, int64_t n_col)
{
    int32_t table[MAX_PAGES];
    int64_t most = 1, n;
    for (int i = 0; i < s->n_seq; i++) most = MT_MAX(most, s->len[i]);
    if (s->ring) most = s->window + s->chunk - 1;
    const int64_t n_of_seq = (most + MT_PAGE - 1) / MT_PAGE;
    n = s->n_seq * n_of_seq;
    assert_true(n <= MAX_PAGES);
    for (int64_t i = 0; i < n; i++) table[i] = (int32_t)(n - 1 - i);
    struct tensor pages = make_i32(table, n);
    pages = tensor_2d(pages.data, DT_I32, s->n_seq, n_of_seq);
    return (struct pages){.rows = make_empty(dev->act_dtype, (n + 1) * MT_PAGE, n_col, -1), .table = pages};
}

static int64_t n_query(const struct shape *s, int i) { return MT_MIN(s->chunk, s->len[i]); }

static struct decode decode_make(struct device *dev, const struct shape *s)
{
    const int64_t value_dim = s->value_dim ? s->value_dim : s->head_dim;
    const int64_t n_col = s->n_kv * (s->head_dim + (s->shared ? 0 : value_dim));
    int32_t cu[MAX_SEQ + 1] = {0}, of_query[MAX_SEQ + 1] = {0}, at[2048], pos[2048];
    double pairs = 0;
    for (int i = 0; i < s->n_seq; i++) {
        const int32_t len = (int32_t)s->len[i], n = (int32_t)n_query(s, i);
        cu[i + 1] = cu[i] + len;
        of_query[i + 1] = of_query[i] + n;
        assert_true(cu[i + 1] <= MT_LEN(pos));
        for (int32_t p = 0; p < len; p++) pos[cu[i] + p] = p;
        for (int32_t p = len - n; p < len; p++) {
            at[of_query[i] + p - (len - n)] = p;
            pairs += p + 1;
        }
    }
    struct decode d = {
        .dev = dev,
        .shape = {s->n_head, s->n_kv, s->head_dim, s->window, 1.0f / sqrtf((float)s->head_dim), s->value_dim},
        .pages = make_pages(dev, s, n_col),
        .q = view_of(make_random(dev->act_dtype, 1, 2, of_query[s->n_seq], s->n_head * s->head_dim + 16, -1)),
        .kv = view_of(make_random(dev->act_dtype, 3, 2, cu[s->n_seq], n_col + 16, -1)),
        .o = view_of(make_empty(dev->act_dtype, of_query[s->n_seq], s->n_head * value_dim + 16, -1)),
        .pos = make_i32(pos, cu[s->n_seq]),
        .at = make_i32(at, of_query[s->n_seq]),
        .tokens = {.cu = make_i32(cu, s->n_seq + 1), .n_seq = s->n_seq},
        .queries = {.cu = make_i32(of_query, s->n_seq + 1), .n_seq = s->n_seq, .pairs = pairs},
    };
    if (s->sink) d.sinks = make_random(DT_F32, 2, 2, s->n_head, -1, -1);
    return d;
}

static void store(struct decode *d) { op_page_store(d->dev, &d->pages, d->kv, d->pos, &d->tokens); }
static void attend(struct decode *d)
{
    op_attn_decode(d->dev, d->o, d->q, &d->pages, d->sinks, d->at, &d->queries, &d->shape);
}

static void run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct decode d = decode_make(dev, params);
    store(&d);
    attend(&d);
    outputs->out[outputs->n++] = d.o;
}

/* ---- the definition ---- */

/* The output of head h of query t, which is the last of the len tokens from row `first` of kv on. */
static void reference(const struct decode *d, int64_t t, int64_t first, int64_t len, int64_t h, double *out)
{
    const struct attn_shape *s = &d->shape;
    const int64_t dim = s->head_dim, value_dim = attn_value_dim(s), width = d->kv.shape[1],
                  kv = h / (s->n_head / s->n_kv);
    double total = d->sinks.ndim ? exp(value_at(d->sinks, h)) : 0;
    for (int64_t c = 0; c < value_dim; c++) out[c] = 0;
    for (int64_t j = s->window ? MT_MAX(len - s->window, 0) : 0; j < len; j++) {
        const int64_t row = (first + j) * width;
        double score = 0;
        for (int64_t c = 0; c < dim; c++)
            score += value_at(d->q, (t * s->n_head + h) * dim + c) * value_at(d->kv, row + kv * dim + c);
        const double e = exp((double)s->scale * score);
        total += e;
        const int64_t value = width == s->n_kv * dim ? kv * dim : s->n_kv * dim + kv * value_dim;
        for (int64_t c = 0; c < value_dim; c++) out[c] += e * value_at(d->kv, row + value + c);
    }
    for (int64_t c = 0; c < value_dim; c++) out[c] /= total;
}

static void is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        const struct shape *s = &shapes[i];
        struct device dev;
        op_check_begin(&dev, true);
        struct decode d = decode_make(&dev, s);
        store(&d);
        attend(&d);
        const int64_t value_dim = attn_value_dim(&d.shape);
        int64_t first = 0, t = 0;
        for (int seq = 0; seq < s->n_seq; first += s->len[seq++])
            for (int64_t n = s->len[seq] - n_query(s, seq); n++ < s->len[seq]; t++)
                for (int64_t h = 0; h < s->n_head; h++) {
                    double out[512];
                    reference(&d, t, first, n, h, out);
                    for (int64_t c = 0; c < value_dim; c++)
                        assert_close(value_at(d.o, (t * s->n_head + h) * value_dim + c), out[c], 1e-12);
                }
        op_check_end(&dev);
    }
}

/* ---- pages ---- */

/* If tokens share a row of the cache, it holds the last one; rows without a token are unchanged. */
static void check_rows(const struct decode *d, const struct shape *s)
{
    const struct pages *p = &d->pages;
    const int64_t n_row = p->rows.shape[0], n_of_seq = p->table.shape[1];
    int64_t *token = mem_array(n_row, sizeof(*token)), t = 0;
    for (int64_t seq = 0; seq < s->n_seq; seq++)
        for (int64_t at = 0; at < s->len[seq]; at++) {
            const double page = value_at(p->table, seq * n_of_seq + at / MT_PAGE % n_of_seq);
            token[(int64_t)page * MT_PAGE + at % MT_PAGE] = ++t;
        }
    for (int64_t r = 0; r < n_row; r++) {
        if (token[r])
            assert_same_bits(tensor_rows(p->rows, r, 1), tensor_rows(d->kv, token[r] - 1, 1));
        else
            assert_true(isnan(value_at(p->rows, r * p->rows.shape[1])));
    }
    mem_free(token);
}

static void run_stored(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct decode d = decode_make(dev, params);
    store(&d);
    if (!dev->dry_run) check_rows(&d, params);
    outputs->out[outputs->n++] = d.kv;
}

static void stores_the_last(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run_stored, &shapes[i], 1e-6);
}

/* ---- neighbours ---- */

/* A sequence alone, with one token per pass, has the same bits as beside others and with several tokens per pass. */
static void run_alone(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct shape *s = params;
    struct decode all = decode_make(dev, s);
    int64_t first = 0, t = 0;
    store(&all);
    attend(&all);
    outputs->out[outputs->n++] = all.o;
    for (int i = 0; i < s->n_seq; first += s->len[i++]) {
        struct shape one = *s;
        one.n_seq = 1;
        one.len[0] = s->len[i];
        struct decode d = decode_make(dev, &one);
        const struct seqs single = {.cu = make_i32((const int32_t[]){0, 1}, 2), .n_seq = 1};
        for (int64_t p = 0; p < s->len[i]; p++) {
            const struct tensor pos = tensor_rows(d.pos, p, 1), o = tensor_rows(d.o, 0, 1);
            op_page_store(dev, &d.pages, tensor_rows(all.kv, first + p, 1), pos, &single);
            if (p < s->len[i] - n_query(s, i)) continue;
            op_attn_decode(dev, o, tensor_rows(all.q, t, 1), &d.pages, d.sinks, pos, &single, &d.shape);
            if (!dev->dry_run) assert_same_bits(o, tensor_rows(all.o, t, 1));
            t++;
        }
    }
}

static void neighbours_change_no_bits(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) {
        struct device dev;
        struct op_outputs outputs = {.n = 0};
        op_check_begin(&dev, false);
        run_alone(&dev, &shapes[i], &outputs);
        op_check_end(&dev);
    }
}

static void precision_threads_measure(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(shapes); i++) op_check_case(run, &shapes[i], 2e-6);
}

/* ---- costs and the GPU ---- */

static void work_is_counted(void **state)
{
    (void)state;
    static const struct shape full = {4, 2, 8, 6, 0, true, false, false, 1, 2, {10, 90}},
                              window = {4, 2, 8, 6, 20, true, true, false, 3, 2, {90, 90}};
    struct device dev;
    struct op_call call[2];
    struct recorder r = {.calls = call, .cap = 2};
    op_check_begin(&dev, false);
    struct decode d = decode_make(&dev, &full);
    dev.recorder = &r;
    store(&d);
    assert_close(dev.flops, 0, 0);
    attend(&d);
    dev.recorder = NULL;
    assert_close(dev.flops, 2.0 * 100 * 4 * (8 + 6), 1e-15);
    assert_close(call[0].cost.bytes, 100 * (2.0 * 4 * 2 * (8 + 6) + 4), 1e-15);
    assert_close(call[1].cost.bytes, 100 * 4.0 * 2 * (8 + 6) + 2 * 4.0 * (4 * (8 + 6) + 1), 1e-15);
    dev.flops = 0;
    d = decode_make(&dev, &window);
    store(&d);
    attend(&d);
    assert_close(dev.flops, 2.0 * 2 * 3 * 20 * 4 * (8 + 6), 1e-15);
    op_check_end(&dev);
}

static void on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(shapes); i++) {
        op_check_cuda(run, &shapes[i]);
        op_check_cuda(run_stored, &shapes[i]);
    }
    op_check_cuda(run_alone, &shapes[6]);
}

int test_ops_decode(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(is_the_definition),         cmocka_unit_test(stores_the_last),
        cmocka_unit_test(neighbours_change_no_bits), cmocka_unit_test(precision_threads_measure),
        cmocka_unit_test(work_is_counted),           cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_decode", tests, NULL, NULL);
}
