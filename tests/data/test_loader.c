/* test_loader.c - micro-batches of small artificial data sets: labels compared with hand-written ones, coverage, order,
 * resume, packing, closing. */
#include "tests/test.h"

#include <string.h>

#include "data/loader.h"
#include "train/config/epochs.h"

#define DOCS    101
#define SEQ_LEN 64

/* Document d has 2 .. SEQ_LEN tokens, all different in the dataset; the second half of each carries loss. */
static void make_dataset(struct dataset *ds, int64_t n_docs)
{
    *ds = (struct dataset){.n_docs = n_docs};
    ds->doc_off = mem_array(n_docs + 1, sizeof(*ds->doc_off));
    for (int64_t d = 0; d < n_docs; d++) {
        int64_t n = 2 + (int64_t)(rng_u64(5, (uint64_t)d) % (SEQ_LEN - 1));
        ds->doc_off[d + 1] = ds->doc_off[d] + n;
    }
    ds->n_tokens = ds->doc_off[n_docs];
    ds->ids = mem_array(ds->n_tokens, sizeof(*ds->ids));
    ds->mask = mem_array(ds->n_tokens, 1);
    for (int64_t d = 0; d < n_docs; d++) {
        int64_t begin = ds->doc_off[d], end = ds->doc_off[d + 1];
        for (int64_t i = begin; i < end; i++) {
            ds->ids[i] = (int32_t)i;
            ds->mask[i] = i > begin && i >= (begin + end) / 2;
        }
    }
}

static struct loader_options options(bool packing, bool shuffle, int64_t micro_batch)
{
    return (struct loader_options){
        .seq_len = SEQ_LEN, .micro_batch = micro_batch, .packing = packing, .shuffle = shuffle, .seed = 3};
}

/* The document that begins with token id `first`, or -1 (ids are positions in the dataset). */
static int64_t find_doc(const struct dataset *ds, int32_t first)
{
    for (int64_t d = 0; d < ds->n_docs; d++) {
        if (ds->doc_off[d] == first) return d;
    }
    return -1;
}

/* Checks every invariant of a batch against the dataset; counts its documents in seen. */
static void check_batch(const struct batch *b, const struct dataset *ds, const struct loader_options *opt,
                        int64_t *seen)
{
    int64_t label = 0, longest = 0, packs = 0, room = 0;
    assert_int_equal(b->cu[0], 0);
    assert_int_equal(b->cu[b->n_seq], b->n_tok);
    assert_true(b->n_tok <= loader_max_tokens(opt));
    for (int64_t s = 0; s < b->n_seq; s++) {
        int64_t begin = b->cu[s], n = b->cu[s + 1] - begin, d = find_doc(ds, b->tok[begin]);
        assert_true(d >= 0);
        assert_int_equal(n, ds->doc_off[d + 1] - ds->doc_off[d]);
        seen[d]++;
        longest = MT_MAX(longest, n);
        if (n > room) {
            packs++;
            room = opt->seq_len;
        }
        room -= n;
        for (int64_t t = 0; t < n; t++) {
            int64_t i = ds->doc_off[d] + t;
            assert_int_equal(b->tok[begin + t], ds->ids[i]);
            assert_int_equal(b->pos[begin + t], t);
            if (t + 1 == n || !ds->mask[i + 1]) continue;
            assert_true(label < b->n_label);
            assert_int_equal(b->label_row[label], begin + t);
            assert_int_equal(b->label_id[label++], ds->ids[i + 1]);
        }
    }
    assert_int_equal(label, b->n_label);
    assert_int_equal(longest, b->max_len);
    assert_true(opt->packing ? packs <= opt->micro_batch : b->n_seq <= opt->micro_batch);
}

static void assert_same_batch(const struct batch *a, const struct batch *b)
{
    assert_int_equal(a->n_tok, b->n_tok);
    assert_int_equal(a->n_seq, b->n_seq);
    assert_int_equal(a->n_label, b->n_label);
    assert_int_equal(a->max_len, b->max_len);
    assert_memory_equal(a->tok, b->tok, (size_t)a->n_tok * sizeof(*a->tok));
    assert_memory_equal(a->pos, b->pos, (size_t)a->n_tok * sizeof(*a->pos));
    assert_memory_equal(a->cu, b->cu, (size_t)(a->n_seq + 1) * sizeof(*a->cu));
    assert_memory_equal(a->label_row, b->label_row, (size_t)a->n_label * sizeof(*a->label_row));
    assert_memory_equal(a->label_id, b->label_id, (size_t)a->n_label * sizeof(*a->label_id));
}

static void labels_by_hand(void **state)
{
    (void)state;
    int64_t off[] = {0, 3, 5};
    int32_t ids[] = {10, 11, 12, 20, 21};
    uint8_t mask[] = {0, 0, 1, 0, 1};
    struct dataset ds = {.n_docs = 2, .n_tokens = 5, .doc_off = off, .ids = ids, .mask = mask};
    struct loader_options opt = {.seq_len = 8, .micro_batch = 1, .packing = true};
    struct loader_pos pos;
    struct batch b;
    struct loader *l = loader_open(&ds, &opt, (struct loader_pos){0});
    assert_int_equal(loader_epoch_batches(l, 0), 1);
    loader_next(l, &b, &pos);
    assert_int_equal(pos.epoch, 1);
    assert_int_equal(pos.index, 0);
    assert_int_equal(b.n_tok, 5);
    assert_int_equal(b.n_seq, 2);
    assert_int_equal(b.max_len, 3);
    assert_memory_equal(b.tok, ((int32_t[]){10, 11, 12, 20, 21}), 5 * sizeof(int32_t));
    assert_memory_equal(b.pos, ((int32_t[]){0, 1, 2, 0, 1}), 5 * sizeof(int32_t));
    assert_memory_equal(b.cu, ((int32_t[]){0, 3, 5}), 3 * sizeof(int32_t));
    assert_int_equal(b.n_label, 2);
    assert_memory_equal(b.label_row, ((int32_t[]){1, 3}), 2 * sizeof(int32_t));
    assert_memory_equal(b.label_id, ((int32_t[]){12, 21}), 2 * sizeof(int32_t));
    batch_free(&b);
    loader_close(l);
}

/* For any options, every document appears once per epoch, and only the last batch of an epoch is small. */
static void every_document_once(void **state)
{
    (void)state;
    struct dataset ds;
    make_dataset(&ds, DOCS);
    for (int variant = 0; variant < 12; variant++) {
        struct loader_options opt = options(variant & 1, variant & 2, (int64_t[]){1, 3, 1000}[variant / 4]);
        struct loader_pos pos = {0};
        struct loader *l = loader_open(&ds, &opt, pos);
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            int64_t seen[DOCS] = {0}, n = loader_epoch_batches(l, epoch);
            for (int64_t i = 0; i < n; i++) {
                struct batch b;
                assert_int_equal(pos.epoch, epoch);
                assert_int_equal(pos.index, i);
                loader_next(l, &b, &pos);
                check_batch(&b, &ds, &opt, seen);
                if (!opt.packing && i + 1 < n) assert_int_equal(b.n_seq, opt.micro_batch);
                batch_free(&b);
            }
            for (int64_t d = 0; d < DOCS; d++) assert_int_equal(seen[d], 1);
        }
        loader_close(l);
    }
    dataset_free(&ds);
}

static void file_order_without_shuffle(void **state)
{
    (void)state;
    struct dataset ds;
    make_dataset(&ds, DOCS);
    struct loader_options opt = options(false, false, 1);
    struct loader *l = loader_open(&ds, &opt, (struct loader_pos){0});
    for (int64_t i = 0; i < 2 * DOCS; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        assert_int_equal(find_doc(&ds, b.tok[0]), i % DOCS);
        batch_free(&b);
    }
    loader_close(l);
    dataset_free(&ds);
}

/* A loader opened at any position continues with the same batches as an uninterrupted one. */
static void resume_anywhere(void **state)
{
    (void)state;
    enum { N = 60 };
    struct dataset ds;
    make_dataset(&ds, DOCS);
    for (int packing = 0; packing < 2; packing++) {
        struct loader_options opt = options(packing, true, 4);
        struct batch batches[N];
        struct loader_pos at[N + 1] = {{0}};
        struct loader *l = loader_open(&ds, &opt, at[0]);
        for (int i = 0; i < N; i++) loader_next(l, &batches[i], &at[i + 1]);
        assert_true(at[N].epoch >= 2);
        loader_close(l);
        for (int start = 0; start < N; start++) {
            l = loader_open(&ds, &opt, at[start]);
            for (int i = start; i < MT_MIN(N, start + 3); i++) {
                struct batch b;
                struct loader_pos pos;
                loader_next(l, &b, &pos);
                assert_same_batch(&b, &batches[i]);
                assert_int_equal(pos.epoch, at[i + 1].epoch);
                assert_int_equal(pos.index, at[i + 1].index);
                batch_free(&b);
            }
            loader_close(l);
        }
        for (int i = 0; i < N; i++) batch_free(&batches[i]);
    }
    dataset_free(&ds);
}

/* A position at the end of an epoch is the start of the next one. */
static void index_past_the_end(void **state)
{
    (void)state;
    struct dataset ds;
    make_dataset(&ds, DOCS);
    struct loader_options opt = options(false, true, 1);
    struct batch a, b;
    struct loader *l = loader_open(&ds, &opt, (struct loader_pos){.epoch = 1}), *m;
    m = loader_open(&ds, &opt, (struct loader_pos){.epoch = 0, .index = DOCS});
    loader_next(l, &a, NULL);
    loader_next(m, &b, NULL);
    assert_same_batch(&a, &b);
    batch_free(&a);
    batch_free(&b);
    loader_close(l);
    loader_close(m);
    dataset_free(&ds);
}

/* First tokens of the first n batches: a fingerprint of the order. */
static void first_tokens(const struct dataset *ds, const struct loader_options *opt, int64_t epoch, int32_t *out, int n)
{
    struct loader *l = loader_open(ds, opt, (struct loader_pos){.epoch = epoch});
    for (int i = 0; i < n; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        out[i] = b.tok[0];
        batch_free(&b);
    }
    loader_close(l);
}

static void order_follows_seed_and_epoch(void **state)
{
    (void)state;
    enum { N = 20 };
    struct dataset ds;
    make_dataset(&ds, DOCS);
    for (int packing = 0; packing < 2; packing++) {
        struct loader_options opt = options(packing, true, 1), other = opt;
        int32_t a[N], b[N];
        other.seed++;
        first_tokens(&ds, &opt, 0, a, N);
        first_tokens(&ds, &opt, 0, b, N);
        assert_memory_equal(a, b, sizeof(a));
        first_tokens(&ds, &opt, 1, b, N);
        assert_memory_not_equal(a, b, sizeof(a));
        first_tokens(&ds, &other, 0, b, N);
        assert_memory_not_equal(a, b, sizeof(a));
    }
    dataset_free(&ds);
}

static double packed_fill(const struct dataset *ds, int64_t seq_len)
{
    struct loader_options opt = {.seq_len = seq_len, .micro_batch = 1, .packing = true, .shuffle = true, .seed = 1};
    struct loader *l = loader_open(ds, &opt, (struct loader_pos){0});
    double fill = (double)ds->n_tokens / (double)(loader_epoch_batches(l, 0) * seq_len);
    loader_close(l);
    return fill;
}

/* Sequences are nearly full when documents are short, also with many more documents than the packing window. */
static void packs_are_full(void **state)
{
    (void)state;
    struct dataset ds;
    make_dataset(&ds, 5000); /* 2 .. 64 tokens, 33 on average */
    assert_true(packed_fill(&ds, 64) > 0.95);
    assert_true(packed_fill(&ds, 256) > 0.99);
    assert_true(packed_fill(&ds, 16384) > 0.90); /* 11 sequences for tokens of 10.1 */
    dataset_free(&ds);
}

/* Packing does not sort: documents early and late in an epoch have the same mean length. */
static void packs_stay_shuffled(void **state)
{
    (void)state;
    struct dataset ds;
    make_dataset(&ds, 4000);
    struct loader_options opt = {.seq_len = 256, .micro_batch = 1, .packing = true, .shuffle = true, .seed = 1};
    struct loader *l = loader_open(&ds, &opt, (struct loader_pos){0});
    int64_t n = loader_epoch_batches(l, 0), tokens[2] = {0}, docs[2] = {0};
    for (int64_t i = 0; i < n; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        tokens[i >= n / 2] += b.n_tok;
        docs[i >= n / 2] += b.n_seq;
        batch_free(&b);
    }
    loader_close(l);
    double early = (double)tokens[0] / (double)docs[0], late = (double)tokens[1] / (double)docs[1];
    assert_close(early, late, 0.05); /* 2000 documents in each half, whose lengths have a standard deviation of 18: the
                                        bound is 3.5 standard deviations of the difference */
    dataset_free(&ds);
}

/* The pack that is left over, half full, is not always the last one of its epoch. */
static void packs_are_shuffled_too(void **state)
{
    (void)state;
    enum { DOCUMENTS = 9, PACKS = 5, EPOCHS = 40 };
    int64_t off[DOCUMENTS + 1] = {0}, at[PACKS] = {0};
    int32_t ids[4 * DOCUMENTS] = {0};
    uint8_t mask[4 * DOCUMENTS] = {0};
    for (int d = 0; d < DOCUMENTS; d++) off[d + 1] = off[d] + 4;
    const struct dataset ds = {
        .n_docs = DOCUMENTS, .n_tokens = off[DOCUMENTS], .doc_off = off, .ids = ids, .mask = mask};
    const struct loader_options opt = {.seq_len = 8, .micro_batch = 1, .packing = true, .shuffle = true, .seed = 1};
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        struct loader *l = loader_open(&ds, &opt, (struct loader_pos){.epoch = epoch});
        assert_int_equal(loader_epoch_batches(l, epoch), PACKS);
        for (int i = 0; i < PACKS; i++) {
            struct batch b;
            loader_next(l, &b, NULL);
            at[i] += b.n_seq == 1;
            batch_free(&b);
        }
        loader_close(l);
    }
    for (int i = 0; i < PACKS; i++) assert_in_range(at[i], 1, EPOCHS / 2); /* 8 on average */
}

/* Documents of these sizes, repeated. */
static void sized_dataset(struct dataset *ds, int64_t n_docs, const int64_t *sizes, int64_t n)
{
    *ds = (struct dataset){.n_docs = n_docs, .doc_off = mem_array(n_docs + 1, sizeof(*ds->doc_off))};
    for (int64_t d = 0; d < n_docs; d++) ds->doc_off[d + 1] = ds->doc_off[d] + sizes[d % n];
    ds->n_tokens = ds->doc_off[n_docs];
    ds->ids = mem_array(ds->n_tokens, sizeof(*ds->ids));
    ds->mask = mem_array(ds->n_tokens, 1);
}

/* The steps of a million epochs are computed from one epoch if all epochs have equal packs. Otherwise each epoch is
 * packed. */
static void steps_of_epochs(void **state)
{
    (void)state;
    static const struct {
        int64_t n_docs, sizes[3], n;
        bool packing, shuffle, equal;
    } rows[] = {
        {101, {20, 30, 40}, 3, true, true, false}, /* packs depend on the order */
        {101, {20, 30, 40}, 3, true, false, true}, {101, {20, 30, 40}, 3, false, true, true},
        {101, {7, 7, 7}, 3, true, true, true},     {101, {33, 32, 64}, 3, true, true, false},
        {101, {33, 40, 64}, 3, true, true, true},  {3, {20, 30, 14}, 3, true, true, true},
        {4, {20, 30, 14}, 3, true, true, false},   {2, {1, 63, 0}, 2, true, true, true},
        {2, {2, 63, 0}, 2, true, true, true},      {1, {64, 0, 0}, 1, true, true, true},
    };
    struct config cfg;
    config_defaults(&cfg);
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct loader_options opt = options(rows[i].packing, rows[i].shuffle, 2);
        struct dataset ds;
        sized_dataset(&ds, rows[i].n_docs, rows[i].sizes, rows[i].n);
        struct loader *l = loader_open(&ds, &opt, (struct loader_pos){0});
        const int64_t first = loader_epoch_batches(l, 0), whole = rows[i].equal ? 1000000 : 20;
        int64_t sum = rows[i].equal ? first * (whole - 20) : 0;
        assert_int_equal(loader_epochs_are_equal(l), rows[i].equal);
        for (int64_t e = 0; e < 20; e++) {
            sum += loader_epoch_batches(l, e);
            if (rows[i].equal) assert_int_equal(loader_epoch_batches(l, e), first);
        }
        cfg.train.epochs = (double)whole;
        cfg.train.grad_accum = 3;
        assert_int_equal(epochs_steps(&cfg, l, false), (sum + 2) / 3);
        cfg.train.epochs += 0.5;
        sum += (loader_epoch_batches(l, whole) + 1) / 2;
        assert_int_equal(epochs_steps(&cfg, l, false), (sum + 2) / 3);
        cfg.train.grad_accum = 1;
        cfg.train.epochs = 1.1; /* the nearest double is a little above 1.1 */
        assert_int_equal(epochs_steps(&cfg, l, false), first + (loader_epoch_batches(l, 1) + 9) / 10);
        loader_close(l);
        dataset_free(&ds);
    }
}

/* Closes the loader at once, after some batches, with a full ring buffer and a partly filled one. */
static void close_at_any_time(void **state)
{
    (void)state;
    struct dataset ds;
    make_dataset(&ds, DOCS);
    struct loader_options opt = options(true, true, 2);
    for (int n = 0; n < 200; n++) {
        struct loader *l = loader_open(&ds, &opt, (struct loader_pos){0});
        for (int i = 0; i < n % 10; i++) {
            struct batch b;
            loader_next(l, &b, NULL);
            batch_free(&b);
        }
        loader_close(l);
    }
    loader_close(NULL);
    dataset_free(&ds);
}

int test_loader(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(labels_by_hand),
        cmocka_unit_test(every_document_once),
        cmocka_unit_test(file_order_without_shuffle),
        cmocka_unit_test(resume_anywhere),
        cmocka_unit_test(index_past_the_end),
        cmocka_unit_test(order_follows_seed_and_epoch),
        cmocka_unit_test(packs_are_full),
        cmocka_unit_test(packs_stay_shuffled),
        cmocka_unit_test(packs_are_shuffled_too),
        cmocka_unit_test(steps_of_epochs),
        cmocka_unit_test(close_at_any_time),
    };
    return cmocka_run_group_tests_name("loader", tests, NULL, NULL);
}
