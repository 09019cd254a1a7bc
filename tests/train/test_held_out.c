/* test_held_out.c - data.eval_split holds out training documents: by seed, whole rows, no document lost. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/dataset.h"
#include "data/file/file.h"

static void load(struct dataset *ds, const char *rows)
{
    struct err err;
    char path[MT_PATH];
    struct chat_template *chat;
    if (chat_template_load(&chat, fixture("../../configs/tiny-gptoss"), NULL, &err)) fail_msg("%s", err.msg);
    const struct dataset_options opt = {
        .seq_len = 1024, .eos = 258, .vocab = 265, .chat_date = "2025-01-01", .chat = chat};
    struct tokenizer *tok = tokenizer_load(fixture("data/bytes.tokenizer.json"), &err);
    snprintf(path, sizeof(path), "%s/rows.jsonl", scratch_dir());
    assert_non_null(tok);
    assert_int_equal(file_write_atomic(path, rows, (int64_t)strlen(rows), &err), 0);
    if (dataset_load(ds, path, tok, &opt, &err)) fail_msg("%s", err.msg);
    tokenizer_free(tok);
    chat_template_free(chat);
}

static void load_fifty(struct dataset *ds)
{
    char text[4096] = "", row[64];
    for (int i = 0; i < 50; i++) {
        snprintf(row, sizeof(row), "{\"text\": \"%c%c\"}\n", 'A' + i / 10, 'a' + i % 10);
        strcat(text, row);
    }
    load(ds, text);
    assert_int_equal(ds->n_docs, 50);
}

static int document_number(const struct dataset *ds, int64_t d)
{
    const int32_t *ids = ds->ids + ds->doc_off[d];
    return (ids[0] - 'A') * 10 + ids[1] - 'a';
}

/* Splits fifty documents by seed and sets which are held out. Checks that both parts keep their order and that each
 * document is in one of them. */
static void split_fifty(double fraction, uint64_t seed, int64_t want, bool held_out[50])
{
    struct dataset ds, held;
    struct err err;
    int seen[50] = {0}, last = -1;
    load_fifty(&ds);
    uint64_t hash = ds.hash;
    if (dataset_split(&ds, &held, fraction, seed, &err)) fail_msg("%s", err.msg);
    assert_int_equal(held.n_docs, want);
    assert_int_equal(ds.n_docs, 50 - want);
    if (want) assert_true(ds.hash != hash && held.hash != ds.hash);
    memset(held_out, 0, 50);
    for (int64_t d = 0; d < held.n_docs; d++) {
        int k = document_number(&held, d);
        assert_true(k > last);
        last = k;
        held_out[k] = true;
        seen[k]++;
    }
    last = -1;
    for (int64_t d = 0; d < ds.n_docs; d++) {
        int k = document_number(&ds, d);
        assert_true(k > last);
        last = k;
        seen[k]++;
    }
    for (int k = 0; k < 50; k++) assert_int_equal(seen[k], 1);
    dataset_free(&ds);
    dataset_free(&held);
}

static void split_by_document(void **state)
{
    (void)state;
    bool a[50], b[50];
    struct dataset ds, held;
    struct err err;
    split_fifty(0.2, 1, 10, a);
    split_fifty(0.2, 1, 10, b);
    assert_memory_equal(a, b, sizeof(a));
    split_fifty(0.2, 2, 10, b);
    assert_memory_not_equal(a, b, sizeof(a));
    split_fifty(0, 1, 0, b);
    split_fifty(1e-9, 1, 1, b);
    load_fifty(&ds);
    assert_int_equal(dataset_split(&ds, &held, 1, 1, &err), -1);
    assert_non_null(strstr(err.msg, "leaves none"));
    assert_int_equal(ds.n_docs, 50);
    dataset_free(&ds);
}

/* All samples of one conversation are either trained on or held out. */
static void split_keeps_rows_together(void **state)
{
    (void)state;
    char text[8192] = "";
    struct dataset ds, held;
    struct err err;
    for (int i = 0; i < 20; i++)
        snprintf(
            text + strlen(text), sizeof(text) - strlen(text),
            "{\"messages\": [{\"role\": \"user\", \"content\": \"%d\"}, {\"role\": \"assistant\", \"content\": \"b\"}, "
            "{\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", \"content\": \"d\"}]}\n",
            i);
    load(&ds, text);
    assert_int_equal(ds.n_docs, 40);
    assert_int_equal(dataset_split(&ds, &held, 0.25, 3, &err), 0);
    assert_int_equal(held.n_docs, 10);
    assert_int_equal(ds.n_docs, 30);
    for (int64_t d = 0; d < held.n_docs; d++)
        for (int64_t k = 0; k < ds.n_docs; k++) assert_int_not_equal(held.doc_row[d], ds.doc_row[k]);
    dataset_free(&ds);
    dataset_free(&held);
}

int test_held_out(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(split_by_document),
                                       cmocka_unit_test(split_keeps_rows_together)};
    return cmocka_run_group_tests_name("held_out", tests, NULL, NULL);
}
