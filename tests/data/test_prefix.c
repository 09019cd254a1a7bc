/* test_prefix.c - documents of a micro-batch that begin alike share rows: compares with hand-written batches. */
#include "tests/test.h"

#include <string.h>

#include "data/prefix.h"

enum { MOST = 32 };

/* Documents of tokens, in the order of a batch; a token is labelled from number `labelled` on. */
struct doc {
    int n, labelled;
    int32_t tok[8];
};

static void open_batch(struct batch *b, const struct doc *docs, int n)
{
    int64_t off[MOST] = {0}, order[MOST];
    int32_t ids[4 * MOST];
    uint8_t mask[4 * MOST];
    struct dataset ds = {.n_docs = n, .doc_off = off, .ids = ids, .mask = mask};
    for (int d = 0; d < n; d++) {
        order[d] = d;
        off[d + 1] = off[d] + docs[d].n;
        for (int t = 0; t < docs[d].n; t++) {
            ids[off[d] + t] = docs[d].tok[t];
            mask[off[d] + t] = t >= docs[d].labelled;
        }
    }
    batch_open(b, &ds, order, n);
}

struct want {
    int n_tok, n_seq, n_label;
    int32_t tok[MOST], pos[MOST], cu[MOST], prefix[MOST], row[MOST], id[MOST];
};

static void check(const struct doc *docs, int n, int64_t group, const struct want *w)
{
    struct batch b;
    open_batch(&b, docs, n);
    const int64_t longest = b.max_len;
    prefix_share(&b, group, 1);
    assert_int_equal(b.n_tok, w->n_tok);
    assert_int_equal(b.n_seq, w->n_seq);
    assert_int_equal(b.n_label, w->n_label);
    assert_int_equal(b.max_len, longest);
    assert_memory_equal(b.tok, w->tok, (size_t)w->n_tok * sizeof(int32_t));
    assert_memory_equal(b.pos, w->pos, (size_t)w->n_tok * sizeof(int32_t));
    assert_memory_equal(b.cu, w->cu, (size_t)(w->n_seq + 1) * sizeof(int32_t));
    assert_memory_equal(b.prefix, w->prefix, (size_t)w->n_seq * sizeof(int32_t));
    assert_memory_equal(b.label_row, w->row, (size_t)w->n_label * sizeof(int32_t));
    assert_memory_equal(b.label_id, w->id, (size_t)w->n_label * sizeof(int32_t));
    batch_free(&b);
    assert_null(b.prefix);
}

/* The last token of the prompt stays in each answer: it predicts the first labelled token. */
static void pairs(void **state)
{
    (void)state;
    static const struct doc docs[] = {
        {5, 3, {1, 2, 3, 10, 11}}, {6, 3, {1, 2, 3, 20, 21, 22}}, {3, 2, {7, 8, 30}}, {4, 2, {7, 8, 40, 41}}};
    static const struct want want = {
        .n_tok = 15,
        .n_seq = 4,
        .n_label = 8,
        .tok = {1, 2, 3, 10, 11, 3, 20, 21, 22, 7, 8, 30, 8, 40, 41},
        .pos = {0, 1, 2, 3, 4, 2, 3, 4, 5, 0, 1, 2, 1, 2, 3},
        .cu = {0, 5, 9, 12, 15},
        .prefix = {0, 2, 0, 1},
        .row = {2, 3, 5, 6, 7, 10, 12, 13},
        .id = {10, 11, 20, 21, 22, 30, 40, 41},
    };
    check(docs, 4, 2, &want);
}

/* Groups with prompts that differ, an answer that begins like the first one, a document without labels, a shorter one;
 * a group that is not full. */
static void groups(void **state)
{
    (void)state;
    static const struct doc docs[] = {{5, 3, {1, 2, 3, 4, 5}}, {4, 3, {1, 9, 3, 4}}, {5, 3, {1, 2, 3, 4, 6}},
                                      {3, 9, {1, 2, 3}},       {3, 2, {1, 2, 3}},    {5, 3, {1, 2, 3, 4, 5}}};
    static const struct want want = {
        .n_tok = 20,
        .n_seq = 6,
        .n_label = 8,
        .tok = {1, 2, 3, 4, 5, 9, 3, 4, 3, 4, 6, 1, 2, 3, 1, 2, 3, 3, 4, 5},
        .pos = {0, 1, 2, 3, 4, 1, 2, 3, 2, 3, 4, 0, 1, 2, 0, 1, 2, 2, 3, 4},
        .cu = {0, 5, 8, 11, 14, 17, 20},
        .prefix = {0, 1, 2, 0, 0, 2},
        .row = {2, 3, 6, 8, 9, 15, 17, 18},
        .id = {4, 5, 4, 4, 6, 3, 4, 5},
    };
    check(docs, 6, 4, &want);
}

static void nothing_in_common(void **state)
{
    (void)state;
    static const struct doc docs[] = {{3, 2, {1, 2, 3}}, {3, 2, {4, 2, 3}}, {3, 2, {4, 2, 3}}};
    struct batch b;
    open_batch(&b, docs, 3);
    prefix_share(&b, 2, 1);
    assert_null(b.prefix);
    assert_int_equal(b.n_tok, 9);
    assert_memory_equal(b.cu, ((int32_t[]){0, 3, 6, 9}), 4 * sizeof(int32_t));
    assert_memory_equal(b.label_row, ((int32_t[]){1, 4, 7}), 3 * sizeof(int32_t));
    batch_free(&b);
}

/* Fewer common rows than `least` stay in each document. */
static void short_prefixes(void **state)
{
    (void)state;
    static const struct doc docs[] = {{5, 3, {1, 2, 3, 10, 11}}, {6, 3, {1, 2, 3, 20, 21, 22}}};
    for (int64_t least = 2; least <= 3; least++) {
        struct batch b;
        open_batch(&b, docs, 2);
        prefix_share(&b, 2, least);
        assert_int_equal(b.n_tok, least == 2 ? 9 : 11);
        assert_int_equal(b.prefix != NULL, least == 2);
        batch_free(&b);
    }
}

int test_prefix(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs),
        cmocka_unit_test(groups),
        cmocka_unit_test(nothing_in_common),
        cmocka_unit_test(short_prefixes),
    };
    return cmocka_run_group_tests_name("prefix", tests, NULL, NULL);
}
