/* test_bad_rows.c - when bad rows end the reading of data, files that are one array, and what a row may hold. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/dataset.h"
#include "data/file.h"

static struct tokenizer *tok;

static int load_tokenizer(void **state)
{
    (void)state;
    struct err err;
    tok = tokenizer_load(fixture("data/bytes.tokenizer.json"), &err);
    if (!tok) fprintf(stderr, "%s\n", err.msg);
    return tok ? 0 : -1;
}

static int free_tokenizer(void **state)
{
    (void)state;
    tokenizer_free(tok);
    return 0;
}

static struct dataset_options options(void)
{
    return (struct dataset_options){.seq_len = 1024, .eos = 258, .vocab = 265, .chat_date = "2025-01-01"};
}

/* Plainly, without the fsync of file_write_atomic: some tests write hundreds of files. */
static void write_file(const char *path, const char *text, int64_t size)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, (size_t)size, f), size);
    assert_int_equal(fclose(f), 0);
}

/* A file of its own with this text; a static buffer, one per call of eight. */
static const char *write_text(const char *text, int64_t size)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/rows.jsonl", scratch_dir());
    write_file(p, text, size);
    return p;
}

static const char *write_rows(const char *text) { return write_text(text, (int64_t)strlen(text)); }

static void load(struct dataset *ds, const char *files, const struct dataset_options *opt)
{
    struct err err;
    if (dataset_load(ds, files, tok, opt, &err)) fail_msg("%s", err.msg);
}

static void assert_load_fails(const char *files, const struct dataset_options *opt, const char *words)
{
    struct err err = {""};
    struct dataset ds;
    assert_int_equal(dataset_load(&ds, files, tok, opt, &err), -1);
    if (!strstr(err.msg, words)) fail_msg("\"%s\" is not in: %s", words, err.msg);
}

/* `bad` rows, `good` rows and `bad` rows again, each of about 20 bytes. */
static const char *rows_in_order(int64_t bad, int64_t good, int64_t tail)
{
    char *text = mem_alloc(24 * (bad + good + tail) + 1);
    int64_t n = 0;
    for (int64_t i = 0; i < bad + good + tail; i++)
        n += sprintf(text + n, i < bad || i >= bad + good ? "{\"tex\": \"abc\"}\n" : "{\"text\": \"ab\"}\n");
    const char *path = write_text(text, n);
    mem_free(text);
    return path;
}

/* Reading ends when it is clear that too many are bad, and not before. */
static void bad_rows_end_the_reading(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = options();
    assert_load_fails(rows_in_order(5000, 0, 0), &opt, "1000 of the first 1000 rows are bad");
    assert_load_fails(rows_in_order(0, 100, 200000), &opt, " of the first 2");
    assert_load_fails(rows_in_order(0, 100, 200000), &opt, "rows.jsonl:101: ");
    opt.seq_len = 8;
    load(&ds, rows_in_order(999, 99000, 0), &opt); /* at the start they are all, in the end 1 % */
    assert_int_equal(ds.n_bad, 999);
    assert_int_equal(ds.n_docs, 99000);
    dataset_free(&ds);
    load(&ds, rows_in_order(0, 150000, 1400), &opt);
    assert_int_equal(ds.n_bad, 1400);
    dataset_free(&ds);
}

/* An array is read row by row: what a row may hold, the array may hold as often as it likes. */
static void arrays(void **state)
{
    (void)state;
    static const char *const broken[][2] = {
        {"[{\"text\": \"ab\"}", "byte 15: the array is not closed"},
        {"[{\"text\": \"ab\"},]", "byte 16: a value is missing"},
        {"[,{\"text\": \"ab\"}]", "byte 1: a value is missing"},
        {"[{\"text\": \"ab\"} {}]", "rows.jsonl[0]: not valid JSON"},
        {"[{\"text\": \"ab\"}] x", "byte 17: something follows the array"},
        {"[{\"text\": \"ab\"}}", "byte 15: expected , or ]"},
        {"[{\"text\": \"ab}]", "the array is not closed"},
        {"[{\"text\": \"ab\"}, {\"text\": ab}]", "rows.jsonl[1]: not valid JSON"},
    };
    struct dataset ds;
    const struct dataset_options opt = options();
    load(&ds, write_rows("\xef\xbb\xbf \n [ {\"text\": \"a]\\\"}\\\\\"},\n{\"text\":\n\"b,[\"}\t]\n\n"), &opt);
    assert_int_equal(ds.n_docs, 2);
    dataset_free(&ds);
    for (int64_t i = 0; i < MT_LEN(broken); i++) assert_load_fails(write_rows(broken[i][0]), &opt, broken[i][1]);
    assert_load_fails(write_rows("[]"), &opt, "nothing to train on");
    char *text = mem_alloc(4 << 20);
    int64_t n = sprintf(text, "[{\"text\": \"ab\", \"x\": [");
    for (int64_t i = 0; i < JSON_ROW_VALUES; i++) n += sprintf(text + n, "[],");
    n += sprintf(text + n, "0]}]");
    assert_load_fails(write_text(text, n), &opt, "rows.jsonl[0]: 2097158 JSON values, more than the 1048576");
    assert_load_fails(write_text(text + 1, n - 2), &opt, "rows.jsonl:1: 2097158 JSON values");
    text[n = 0] = '[';
    for (n = 1; n < 3 << 20; n += 3) memcpy(text + n, "[],", 3); /* rows that are no objects: the first 1000 say so */
    assert_load_fails(write_text(text, n), &opt, "1000 of the first 1000 rows are bad");
    mem_free(text);
}

int test_bad_rows(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(bad_rows_end_the_reading), cmocka_unit_test(arrays)};
    return cmocka_run_group_tests_name("bad_rows", tests, load_tokenizer, free_tokenizer);
}
