/* test_tables.c - data files that are not JSON: files that pandas, datasets and pyarrow wrote
 * (tests/parity/make_tables.py) give the tokens of the JSONL with the same rows; CSV by RFC 4180; texts, folders,
 * patterns; reading only the first rows. */
#define _GNU_SOURCE /* memfd_create */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json_literal.h"
#include "data/source/brotli.h"
#include "data/source/codec.h"
#include "data/source/row_source.h"
#include "data/source/source_list.h"

/* ---- the same rows */

static void assert_same(const char *path, const struct dataset *expected)
{
    struct dataset ds;
    const struct dataset_options opt = rows_options();
    rows_load(&ds, path, &opt);
    if (ds.n_docs != expected->n_docs || ds.n_tokens != expected->n_tokens)
        fail_msg("%s: %lld documents, %lld tokens; expected %lld, %lld", path, (long long)ds.n_docs,
                 (long long)ds.n_tokens, (long long)expected->n_docs, (long long)expected->n_tokens);
    assert_memory_equal(ds.ids, expected->ids, (size_t)ds.n_tokens * sizeof(*ds.ids));
    assert_memory_equal(ds.mask, expected->mask, (size_t)ds.n_tokens);
    assert_memory_equal(ds.doc_off, expected->doc_off, (size_t)(ds.n_docs + 1) * sizeof(*ds.doc_off));
    assert_memory_equal(ds.doc_row, expected->doc_row, (size_t)ds.n_docs * sizeof(*ds.doc_row));
    dataset_free(&ds);
}

static void same_rows(void **state)
{
    (void)state;
    static const char *const chats[] = {
        "chats_pandas.csv",     "chats_pandas.tsv",   "chats_json.csv",     "chats_datasets.csv", "chats_none.parquet",
        "chats_snappy.parquet", "chats_gzip.parquet", "chats_zstd.parquet", "chats_lz4.parquet",  "saved",
        "saved/*.arrow"};
    static const char *const texts[] = {"texts_pandas.csv",
                                        "texts_bom.csv",
                                        "texts.csv.gz",
                                        "texts_datasets.tsv",
                                        "texts_plain.parquet",
                                        "texts_delta_length.parquet",
                                        "texts_delta_bytes.parquet",
                                        "texts_pandas.parquet",
                                        "texts_lz4.parquet",
                                        "texts.feather"};
    const struct dataset_options opt = rows_options();
    struct dataset expected;
    char name[128];
    rows_load(&expected, fixture("tables/chats.jsonl"), &opt);
    assert_int_equal(expected.n_rows, 4);
    for (int64_t i = 0; i < MT_LEN(chats); i++) {
        snprintf(name, sizeof(name), "tables/%s", chats[i]);
        assert_same(fixture(name), &expected);
    }
    dataset_free(&expected);
    rows_load(&expected, fixture("tables/texts.jsonl"), &opt);
    assert_int_equal(expected.n_docs, 7);
    for (int64_t i = 0; i < MT_LEN(texts); i++) {
        snprintf(name, sizeof(name), "tables/%s", texts[i]);
        assert_same(fixture(name), &expected);
    }
    dataset_free(&expected);
}

/* Every row of both files as JSON. */
static void assert_rows(const char *path, const char *jsonl)
{
    struct err err;
    struct row_text a, b;
    struct text_buf is = {0}, expected = {0};
    struct row_source *one = row_source_open(path, SAMPLE_DOCUMENT, &err), *other;
    if (!one) fail_msg("%s", err.msg);
    assert_non_null(other = row_source_open(jsonl, SAMPLE_DOCUMENT, &err));
    int more;
    while ((more = row_source_next(one, &a, &err)) == 1) {
        assert_int_equal(row_source_next(other, &b, &err), 1);
        struct json_doc *x = json_parse(a.text, a.size, a.where, &err), *y = json_parse(b.text, b.size, b.where, &err);
        if (!x) fail_msg("%s", err.msg);
        is.size = expected.size = 0;
        assert_int_equal(text_put_json(&is, json_root(x), &err) | text_put_json(&expected, json_root(y), &err), 0);
        if (strcmp(is.text, expected.text) != 0) fail_msg("%s: %s; expected %s", a.where, is.text, expected.text);
        json_free(x);
        json_free(y);
    }
    if (more) fail_msg("%s", err.msg);
    assert_int_equal(row_source_next(other, &b, &err), 0);
    row_source_close(one);
    row_source_close(other);
    text_free(&is);
    text_free(&expected);
}

static void rows_of_columns(void **state)
{
    (void)state;
    static const char *const files[][2] = {
        {"nested.parquet", "nested.jsonl"},         {"nested_v2.parquet", "nested.jsonl"},
        {"nested_old.parquet", "nested.jsonl"},     {"numbers.parquet", "numbers.jsonl"},
        {"numbers_delta.parquet", "numbers.jsonl"}, {"nested_stream.arrow", "nested.jsonl"},
        {"split.parquet", "split.jsonl"},           {"nested_file.arrow", "nested.jsonl"},
        {"nested_lz4.arrow", "nested.jsonl"}};
    char path[MT_PATH], name[128];
    for (int64_t i = 0; i < MT_LEN(files); i++) {
        snprintf(name, sizeof(name), "tables/%s", files[i][0]);
        snprintf(path, sizeof(path), "%s", fixture(name));
        snprintf(name, sizeof(name), "tables/%s", files[i][1]);
        assert_rows(path, fixture(name));
    }
}

/* Parquet in Brotli, and in builds without it the error that names the package. */
static void brotli(void **state)
{
    /* 16 times "moetrain " */
    static const uint8_t packed[] = {0x1b, 0x8f, 0x00, 0x00, 0xa4, 0x41, 0xca, 0xda, 0xde, 0x94,
                                     0x27, 0x8a, 0x15, 0x83, 0x6a, 0xef, 0xf0, 0x01, 0x00};
    static const char word[] = "moetrain ";
    const int64_t n = sizeof(packed), size = 16 * 9;
    uint8_t out[16 * 9 + 1];
    const struct dataset_options opt = rows_options();
    struct dataset expected;
    char library[64];
    (void)state;
    assert_int_equal(strstr(codec_library(library), "no brotli") == NULL, brotli_built());
    if (!brotli_built()) {
        rows_refused(fixture("tables/chats_brotli.parquet"), &opt, "apt-get install libbrotli-dev");
        return;
    }
    rows_load(&expected, fixture("tables/chats.jsonl"), &opt);
    assert_same(fixture("tables/chats_brotli.parquet"), &expected);
    dataset_free(&expected);
    assert_true(codec_unpack(CODEC_BROTLI, out, size, packed, n));
    for (int64_t i = 0; i < size; i++) assert_int_equal(out[i], word[i % 9]);
    assert_false(codec_unpack(CODEC_BROTLI, out, size - 1, packed, n));
    assert_false(codec_unpack(CODEC_BROTLI, out, size + 1, packed, n));
    for (int64_t k = 0; k < n; k++) assert_false(codec_unpack(CODEC_BROTLI, out, size, packed, k));
}

static void what_is_not_read(void **state)
{
    (void)state;
    struct dataset_options opt = rows_options();
    rows_refused(fixture("tables/refused_lzo.parquet"), &opt,
                 "refused_lzo.parquet: column f: the codec LZO is not read");
    struct dataset ds; /* columns that no row format needs may have any type */
    rows_load(&ds, fixture("tables/odd.parquet"), &opt);
    assert_int_equal(ds.n_docs, 2);
    dataset_free(&ds);
    rows_load(&ds, fixture("tables/odd.arrow"), &opt);
    assert_int_equal(ds.n_docs, 2);
    dataset_free(&ds);
    opt.columns = "text=d";
    rows_refused(fixture("tables/odd.arrow"), &opt, "key `text`: must be a string, not an object");
    rows_refused(fixture("tables/odd.parquet"), &opt, "key `text`: must be a string, not an object");
}

/* ---- files of a folder */

static const char *folder(void)
{
    static char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%s/data", scratch_dir());
    assert_int_equal(mkdir(dir, 0777), 0);
    return dir;
}

/* DIR/NAME, in one of eight static buffers. */
static const char *in(const char *dir, const char *name)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/%s", dir, name);
    return p;
}

static const char *put_in(const char *dir, const char *name, const char *text)
{
    const char *path = in(dir, name);
    rows_write_file(path, text, (int64_t)strlen(text));
    return path;
}

/* Cut at every place, and with a bit of every byte changed: an error or rows, and no fault of memory. */
static void damaged_files(void **state)
{
    (void)state;
    static const char *const files[] = {"chats_snappy.parquet",  "nested_v2.parquet", "texts_delta_bytes.parquet",
                                        "numbers_delta.parquet", "split.parquet",     "chats_gzip.parquet",
                                        "nested_stream.arrow",   "nested_file.arrow", "odd.arrow",
                                        "nested_lz4.arrow",      "chats_lz4.parquet", "texts_lz4.parquet"};
    const int fd = memfd_create("table", 0);
    char name[128], path[64];
    assert_true(fd >= 0);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int64_t good = 0, refused = 0;
    for (int64_t f = 0; f < MT_LEN(files); f++) {
        int64_t size;
        struct err err;
        snprintf(name, sizeof(name), "tables/%s", files[f]);
        char *bytes = file_read(fixture(name), 1 << 20, &size, &err);
        assert_non_null(bytes);
        for (int64_t i = 0; i < 2 * size; i++) {
            struct row_text row;
            const int64_t at = i / 2;
            const char before = bytes[at];
            if (i & 1) bytes[at] = (char)(before ^ (1 << at % 8));
            const int64_t n = i & 1 ? size : at;
            assert_int_equal(ftruncate(fd, n) | (pwrite(fd, bytes, (size_t)n, 0) != n), 0);
            bytes[at] = before;
            struct row_source *source = row_source_open(path, SAMPLE_DOCUMENT, &err);
            int status = source ? 1 : -1;
            for (int rows = 0; status == 1 && rows < 10000; rows++) status = row_source_next(source, &row, &err);
            row_source_close(source);
            good += status == 0;
            refused += status < 0;
        }
        mem_free(bytes);
    }
    close(fd);
    assert_true(good > 0 && refused > good);
}

/* The bytes of the documents' tokens, "|" after each. The tokenizer has a token per byte, eos is left out. */
static const char *text_of(const char *files, const struct dataset_options *opt)
{
    static char text[1024];
    struct dataset ds;
    int64_t n = 0;
    rows_load(&ds, files, opt);
    for (int64_t d = 0; d < ds.n_docs; d++) {
        for (int64_t i = ds.doc_off[d]; i < ds.doc_off[d + 1] && n + 2 < MT_LEN(text); i++)
            if (ds.ids[i] < 256) text[n++] = (char)ds.ids[i];
        text[n++] = '|';
    }
    text[n] = 0;
    dataset_free(&ds);
    return text;
}

static void csv_by_the_letter(void **state)
{
    (void)state;
    static const char *const good[][2] = {
        {"text\nab\ncd", "ab|cd|"},
        {"text\r\nab\r\ncd\r\n", "ab|cd|"},
        {"text\rab\rcd\r", "ab|cd|"},
        {"\xef\xbb\xbftext\nab\n", "ab|"},
        {"text,n\n\"a,b\",1\n", "a,b|"},
        {"text,n\n\"a \"\"b\"\"\",1\n", "a \"b\"|"},
        {"text,n\n\"a\r\nb\",1\n", "a\r\nb|"},
        {"text,n\na \"b\" c,\n", "a \"b\" c|"},
        {"\n\ntext,n\n\nab,\n\n", "ab|"},
        {"text;n\na,b;1\n", "a,b|"},
        {"n\ttext\n1\ta,b\n", "a,b|"},
        {",text\n0,ab\n", "ab|"},
        {"\"text\",\"a,b;c;d;\"\nab,\n", "ab|"},
        {"\"te\"\"x\"\"t\",text\n1,ab\n", "ab|"},
        {"text\n\xc3\xa9 x\n", "\xc3\xa9 x|"},
    };
    static const char *const bad[][2] = {
        {"text,n\nab,1\n\"cd,2\nef,3\n", "a.csv:3: a quote of this row is not closed"},
        {"text,n\nab,1\n\"c\"d,2\n", "a.csv:3: text after the quote that closes a cell"},
        {"text,n\n\"ab\" ,1\n", "a.csv:2: text after the quote that closes a cell"},
        {"text,text\nab,1\n", "a.csv:1: the header has the column text twice"},
        {"text\n", "no rows"},
        {"", "no rows"},
        {"text,n\nab\n", "a.csv:2: has 1 cell, the header has 2"},
        {"text,n\nab,1,2\n", "a.csv:2: has 3 cells, the header has 2"},
        {"text,n\n\"a\nb\",1\nab\n", "a.csv:4: has 1 cell"},
        {"text,n\n,1\n", "a.csv:2: key `text`: must be a string, not null"},
        {"text,n\n\xff"
         "a,1\n",
         "a.csv:2 is not UTF-8 (byte 0xff)"},
        {"caf\xe9,text\n1,ab\n", "a.csv:1 is not UTF-8 (column 1 of the header): convert the file"},
        {"a,b\n1,2\n", "has none of `messages`"},
        {"messages\n\"[{'role': 'user', 'content': 'a'} ...\"\n", "`messages` is text, and neither a list in JSON"},
    };
    const char *dir = folder();
    const struct dataset_options opt = rows_options();
    for (int64_t i = 0; i < MT_LEN(good); i++)
        assert_string_equal(text_of(put_in(dir, "a.csv", good[i][0]), &opt), good[i][1]);
    for (int64_t i = 0; i < MT_LEN(bad); i++) rows_refused(put_in(dir, "a.csv", bad[i][0]), &opt, bad[i][1]);
    assert_string_equal(text_of(put_in(dir, "a.tsv", "n\ttext\n1,2,3\ta,b\n"), &opt), "a,b|");
}

/* Chunks of the reader are 256 KiB: quotes, delimiters and line breaks at their ends. */
static void csv_over_chunks(void **state)
{
    (void)state;
    const char *dir = folder();
    const struct dataset_options opt = {.seq_len = 1 << 20, .eos = ROWS_EOS, .vocab = ROWS_VOCAB};
    const int64_t chunk = 256 << 10;
    char *text = mem_alloc(chunk + 64);
    for (int64_t cut = 1; cut < 16; cut++) {
        struct dataset ds;
        static const char rows[] = "\"\r\n\"a\"\"b\nc\"\r\nd\r\n"; /* closes the first cell; "a""b\nc"; d */
        const int64_t fill = chunk - cut - 6;
        memcpy(text, "text\n\"", 6);
        memset(text + 6, 'x', (size_t)fill);
        memcpy(text + 6 + fill, rows, sizeof(rows) - 1);
        const char *path = in(dir, "a.csv");
        rows_write_file(path, text, 6 + fill + (int64_t)sizeof(rows) - 1);
        rows_load(&ds, path, &opt);
        assert_int_equal(ds.n_docs, 3);
        assert_int_equal(ds.doc_off[1], fill + 1);
        assert_int_equal(ds.doc_off[2] - ds.doc_off[1], 6); /* a " b LF c and eos */
        assert_int_equal(ds.doc_off[3] - ds.doc_off[2], 2);
        dataset_free(&ds);
    }
    mem_free(text);
}

static void python_literals(void **state)
{
    (void)state;
    static const char *const good[][2] = {
        {"[]", "[]"},
        {" ['a', \"b\" 'c'] ", "[\"a\", \"b\", \"c\"]"},
        {"{'a': 1, 'b': [None, True, False, 1.5, -2, 1e-05]}",
         "{\"a\": 1, \"b\": [null, true, false, 1.5, -2, 1e-05]}"},
        {"(1, 2,)", "[1, 2]"},
        {"[1 2\n 3.]", "[1, 2, 3.0]"},
        {"array([{'a': array([1, 2])}],\n      dtype=object)", "[{\"a\": [1, 2]}]"},
        {"['\\x41\\u00e9\\U0001f600\\'\\\"\\\\\\n']", "[\"\\u0041\\u00e9\\ud83d\\ude00'\\\"\\\\\\n\"]"},
        {"['\"\x01']", "[\"\\\"\\u0001\"]"},
        {"[nan, -inf]", "[NaN, -Infinity]"},
    };
    static const char *const bad[] = {"",         "abc",      "[1, 2",     "[1 ... 2]", "{'a'}",
                                      "{1: 2}",   "['a]",     "[+1]",      "['\\']",    "[1] 2",
                                      "['\\x4']", "array(1)", "[-]",       "['\\q']",   "[\"a']",
                                      "(1, 2]",   "{'a': ",   "array([1]", "[foo]",     "['\\U00110000']"};
    struct text_buf out = {0};
    for (int64_t i = 0; i < MT_LEN(good); i++) {
        out.size = 0;
        assert_true(json_literal(&out, good[i][0], (int64_t)strlen(good[i][0])));
        assert_string_equal(out.text, good[i][1]);
    }
    out.size = 0;
    for (int64_t i = 0; i < MT_LEN(bad); i++)
        if (json_literal(&out, bad[i], (int64_t)strlen(bad[i])) || out.size) fail_msg("%s is taken", bad[i]);
    char deep[1000];
    memset(deep, '[', sizeof(deep));
    assert_false(json_literal(&out, deep, sizeof(deep)));
    text_free(&out);
}

/* JSONL too may have lists as text (Python's notation): in `messages`, under mapped columns and as prompts. */
static void lists_as_text(void **state)
{
    (void)state;
    static const char *const chat = "[{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]";
    struct dataset_options opt = rows_options();
    char row[512], expected[256];
    snprintf(row, sizeof(row),
             "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
             "\"content\": \"b\"}]}\n");
    snprintf(expected, sizeof(expected), "%s", text_of(rows_write(row), &opt));
    snprintf(row, sizeof(row), "{\"messages\": \"%s\"}\n", chat);
    assert_string_equal(text_of(rows_write(row), &opt), expected);
    snprintf(row, sizeof(row),
             "{\"prompt\": \"[{'role': 'user', 'content': 'a'}]\", \"completion\": \"[{'role': "
             "'assistant', 'content': 'b'}]\"}\n");
    assert_string_equal(text_of(rows_write(row), &opt), expected);
    snprintf(row, sizeof(row), "{\"chat\": \"%s\"}\n", chat);
    opt.columns = "messages=chat";
    assert_string_equal(text_of(rows_write(row), &opt), expected);
    opt.columns = NULL; /* text that looks like a list remains text */
    assert_string_equal(text_of(rows_write("{\"prompt\": \"[1]\", \"completion\": \"[{'a': 2}]\"}"), &opt),
                        "[1][{'a': 2}]|");
}

static void texts(void **state)
{
    (void)state;
    static const char text[] = "\xef\xbb\xbf"
                               "a\nb \n\n \nc \"d\"\r\n";
    const char *dir = folder();
    struct dataset_options opt = rows_options();
    const char *path = put_in(dir, "a.txt", text);
    assert_string_equal(text_of(path, &opt), "a\nb \n\n \nc \"d\"\r\n|");
    opt.sample_by = SAMPLE_PARAGRAPH;
    assert_string_equal(text_of(path, &opt), "a\nb |c \"d\"|");
    opt.sample_by = SAMPLE_LINE;
    assert_string_equal(text_of(path, &opt), "a|b |c \"d\"|");
    assert_string_equal(text_of(put_in(dir, "b.md", "# x\n"), &opt), "# x|");
    opt.sample_by = SAMPLE_DOCUMENT;
    rows_refused(put_in(dir, "c.txt", " \n"), &opt, "no rows");
    rows_refused(put_in(dir, "c.txt", "a\xff"), &opt,
                 "c.txt:1 is not UTF-8 (byte 0xff): convert the file, as with iconv");
}

static void kinds(void **state)
{
    (void)state;
    const char *dir = folder();
    const struct dataset_options opt = rows_options();
    assert_string_equal(text_of(put_in(dir, "a", "{\"text\": \"ab\"}"), &opt), "ab|"); /* by content */
    assert_string_equal(text_of(put_in(dir, "a.data", "[{\"text\": \"ab\"}]"), &opt), "ab|");
    rows_refused(put_in(dir, "a.dat", "text\nab\n"), &opt,
                 "neither its name nor its content says what kind of file it is: expected JSONL");
    rows_refused(put_in(dir, "a.xlsx", "PK"), &opt, ".xlsx files are not read: convert it to JSONL");
    rows_refused(put_in(dir, "a.csv", "\xff\xfet"), &opt, "UTF-16, not UTF-8");
}

static void folders_and_patterns(void **state)
{
    (void)state;
    const char *dir = folder();
    struct dataset_options opt = rows_options();
    char list[MT_PATH];
    rows_refused(dir, &opt, "no data files in this folder: expected JSONL");
    put_in(dir, "b.txt", "b1");
    put_in(dir, "a.md", "a1");
    put_in(dir, "README.md", "no data");
    put_in(dir, ".hidden.txt", "no data");
    assert_string_equal(text_of(dir, &opt), "a1|b1|");
    put_in(dir, "b.csv", "text\nb2\nb3\n");
    assert_int_equal(mkdir(in(dir, "a"), 0777), 0);
    put_in(dir, "a/z.jsonl", "{\"text\": \"z1\"}\n{\"text\": \"z2\"}\n");
    put_in(dir, "state.json", "{}");
    put_in(dir, "c.py", "no data");
    assert_string_equal(text_of(dir, &opt), "z1|z2|b2|b3|"); /* texts beside rows are left out */
    snprintf(list, sizeof(list), "%s//", dir);
    assert_string_equal(text_of(list, &opt), "z1|z2|b2|b3|");
    snprintf(list, sizeof(list), "%s/*.txt, %s/[a-c].?sv", dir, dir);
    assert_string_equal(text_of(list, &opt), "b1|b2|b3|");
    snprintf(list, sizeof(list), "%s/*.txt*2", dir);
    assert_string_equal(text_of(list, &opt), "b1|b1|");
    snprintf(list, sizeof(list), "%s*0.5", dir); /* half of all documents together, not half of each file */
    assert_int_equal(strlen(text_of(list, &opt)), 2 * 3);
    snprintf(list, sizeof(list), "%s/a*", dir);
    assert_string_equal(text_of(list, &opt), "z1|z2|a1|");
    snprintf(list, sizeof(list), "%s/*.none", dir);
    rows_refused(list, &opt, "*.none: no file matches this pattern");
    put_in(dir, "dataset_dict.json", "{}");
    rows_refused(dir, &opt, "holds the splits of a data set: name one");
    assert_int_equal(unlink(in(dir, "dataset_dict.json")), 0);
    opt.max_rows = 3;
    assert_string_equal(text_of(dir, &opt), "z1|z2|b2|");
    opt.max_rows = 1; /* of each entry */
    snprintf(list, sizeof(list), "%s, %s/b.csv*2", dir, dir);
    assert_string_equal(text_of(list, &opt), "z1|b2|b2|");
}

int test_tables(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_rows),
        cmocka_unit_test(rows_of_columns),
        cmocka_unit_test(what_is_not_read),
        cmocka_unit_test(damaged_files),
        cmocka_unit_test(csv_by_the_letter),
        cmocka_unit_test(csv_over_chunks),
        cmocka_unit_test(python_literals),
        cmocka_unit_test(lists_as_text),
        cmocka_unit_test(texts),
        cmocka_unit_test(brotli),
        cmocka_unit_test(kinds),
        cmocka_unit_test(folders_and_patterns),
    };
    return cmocka_run_group_tests(tests, rows_load_tokenizer, rows_free_tokenizer);
}
