/* test_bad_rows.c - how many bad rows stop the loading of data; files that are one JSON array; size limits of a row. */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"

/* `bad` rows, `good` rows and `bad` rows again, each of about 20 bytes. */
static const char *rows_in_order(int64_t bad, int64_t good, int64_t tail)
{
    char *text = mem_alloc(24 * (bad + good + tail) + 1);
    int64_t n = 0;
    for (int64_t i = 0; i < bad + good + tail; i++)
        n += sprintf(text + n, i < bad || i >= bad + good ? "{\"tex\": \"abc\"}\n" : "{\"text\": \"ab\"}\n");
    const char *path = rows_write_text(text, n);
    mem_free(text);
    return path;
}

/* Loading stops as soon as too many rows are bad, and not before. */
static void bad_rows_end_the_reading(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = rows_options();
    rows_refused(rows_in_order(5000, 0, 0), &opt, "1000 of the first 1000 rows are bad");
    rows_refused(rows_in_order(0, 100, 200000), &opt, " of the first 2");
    rows_refused(rows_in_order(0, 100, 200000), &opt, "rows.jsonl:101: ");
    opt.seq_len = 8;
    rows_load(&ds, rows_in_order(999, 99000, 0), &opt); /* all of the first rows are bad, 1 % of all rows */
    assert_int_equal(ds.n_bad, 999);
    assert_int_equal(ds.n_docs, 99000);
    dataset_free(&ds);
    rows_load(&ds, rows_in_order(0, 150000, 1400), &opt);
    assert_int_equal(ds.n_bad, 1400);
    dataset_free(&ds);
}

/* The loader reads an array row by row: the limits apply to each row, not to the array. */
static void arrays(void **state)
{
    (void)state;
    static const char *const broken[][2] = {
        {"[{\"text\": \"ab\"}", "byte 15: the array is not closed"},
        {"[{\"text\": \"ab\"},]", "byte 16: a value is missing"},
        {"[,{\"text\": \"ab\"}]", "byte 1: a value is missing"},
        {"[{\"text\": \"ab\"} {}]", "rows.jsonl[0]: not valid JSON"},
        {"[{\"text\": \"ab\"}] x", "byte 17: unexpected text after the array"},
        {"[{\"text\": \"ab\"}}", "byte 15: expected , or ]"},
        {"[{\"text\": \"ab}]", "the array is not closed"},
        {"[{\"text\": \"ab\"}, {\"text\": ab}]", "rows.jsonl[1]: not valid JSON"},
    };
    struct dataset ds;
    const struct dataset_options opt = rows_options();
    rows_load(&ds, rows_write("\xef\xbb\xbf \n [ {\"text\": \"a]\\\"}\\\\\"},\n{\"text\":\n\"b,[\"}\t]\n\n"), &opt);
    assert_int_equal(ds.n_docs, 2);
    dataset_free(&ds);
    for (int64_t i = 0; i < MT_LEN(broken); i++) rows_refused(rows_write(broken[i][0]), &opt, broken[i][1]);
    rows_refused(rows_write("[]"), &opt, "no rows: expected");
    char *text = mem_alloc(4 << 20);
    int64_t n = sprintf(text, "[{\"text\": \"ab\", \"x\": [");
    for (int64_t i = 0; i < JSON_ROW_VALUES; i++) n += sprintf(text + n, "[],");
    n += sprintf(text + n, "0]}]");
    rows_refused(rows_write_text(text, n), &opt, "rows.jsonl[0]: 2097158 JSON values, more than the 1048576");
    rows_refused(rows_write_text(text + 1, n - 2), &opt, "rows.jsonl:1: 2097158 JSON values");
    text[n = 0] = '[';
    for (n = 1; n < 3 << 20; n += 3)
        memcpy(text + n, "[],", 3); /* rows that are not objects: the first 1000 stop the loading */
    rows_refused(rows_write_text(text, n), &opt, "1000 of the first 1000 rows are bad");
    mem_free(text);
}

static void other_encodings(void **state)
{
    (void)state;
    static const char little[] = "\xff\xfe{\0}\0\n", big[] = "\xfe\xff\0{\0}\0\n";
    const struct dataset_options opt = rows_options();
    rows_refused(rows_write_text(little, sizeof(little)), &opt, "rows.jsonl: UTF-16, not UTF-8: convert it");
    rows_refused(rows_write_text(big, sizeof(big) - 1), &opt, "rows.jsonl: UTF-16, not UTF-8: convert it");
}

/* An error in a row that data.columns converts names the row's line. */
static void bad_rows_of_columns(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"conversations=c", "{\"c\": []}"},
        {"conversations=c", "{\"c\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\", "
                            "\"weight\": 0.5}]}"},
        {"instruction=i,output=o,history=h", "{\"i\": \"a\", \"o\": \"b\", \"h\": [[true, 2]]}"},
        {"instruction=i,output=o,tools=t", "{\"i\": \"a\", \"o\": \"b\", \"t\": \"x\"}"},
        {"text=s", "{\"s\": 5}"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct dataset_options opt = rows_options();
        char line[MT_PATH + 8];
        opt.columns = rows[i][0];
        const char *path = rows_write(rows[i][1]);
        snprintf(line, sizeof(line), "%s:1", path);
        rows_refused(path, &opt, line);
    }
}

/* A column `history` of earlier turns, as ms-swift writes it: read if data.columns maps it, otherwise an error; it may
 * be absent. */
static void history_beside_columns(void **state)
{
    (void)state;
    static const char last[] = "{\"q\": \"b\", \"a\": \"c\", \"history\": [[\"d\", \"e\"]]}\n";
    struct dataset_options opt = rows_options();
    struct dataset ds;
    char text[256];
    opt.columns = "user=q,assistant=a";
    rows_refused(rows_write(last), &opt, "has earlier turns in `history`, which data.columns leaves out");
    opt.columns = "instruction=q,output=a";
    rows_refused(rows_write(last), &opt, "add history=history");
    opt.columns = "instruction=q,output=a,history=history";
    snprintf(text, sizeof(text), "%s{\"q\": \"b\", \"a\": \"c\"}\n", last);
    rows_load(&ds, rows_write(text), &opt);
    assert_int_equal(ds.n_bad, 0);
    assert_int_equal(ds.n_docs,
                     3); /* an earlier answer ends in another token than a last one, so each answer is a sample */
    dataset_free(&ds);
}

/* A column `rejected` with false or null is not read as an answer. */
static void flags_are_no_preferences(void **state)
{
    (void)state;
    struct dataset ds;
    const struct dataset_options opt = rows_options();
    rows_load(&ds, rows_write("{\"text\": \"ab\", \"rejected\": false}\n{\"text\": \"cd\", \"rejected\": null}\n"),
              &opt);
    assert_int_equal(ds.n_docs, 2);
    dataset_free(&ds);
}

/* A file of rows over several lines, and one object around them. */
static void rows_over_lines(void **state)
{
    (void)state;
    static const char *const files[] = {"{\n  \"text\": \"a\"\n}\n", "{\"train\": [\n{\"text\": \"a\"}\n]}\n"};
    const struct dataset_options opt = rows_options();
    for (int i = 0; i < MT_LEN(files); i++)
        rows_refused(rows_write(files[i]), &opt, "; a row must be one line, or the file one array of rows");
}

int test_bad_rows(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_rows_end_the_reading), cmocka_unit_test(arrays),
        cmocka_unit_test(other_encodings),          cmocka_unit_test(bad_rows_of_columns),
        cmocka_unit_test(history_beside_columns),   cmocka_unit_test(flags_are_no_preferences),
        cmocka_unit_test(rows_over_lines)};
    return cmocka_run_group_tests_name("bad_rows", tests, rows_load_tokenizer, rows_free_tokenizer);
}
