/* test_dataset.c - ids and loss mask of rows, worked out by hand for a byte tokenizer (id = byte, merges "10" and
 * "ok"); bad rows, truncation, gzip, the cache. */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <sys/stat.h>

#include "data/duplicates.h"
#include "data/file/file.h"

enum { TEN = 256, OK, RETURN, END, START, MESSAGE, CHANNEL, CALL, VOCAB = 265 };

static void assert_document(const struct dataset *ds, int64_t d, const int32_t *ids, const uint8_t *mask, int64_t n)
{
    assert_true(d < ds->n_docs);
    assert_int_equal(ds->doc_off[d + 1] - ds->doc_off[d], n);
    assert_memory_equal(ds->ids + ds->doc_off[d], ids, (size_t)n * sizeof(*ids));
    assert_memory_equal(ds->mask + ds->doc_off[d], mask, (size_t)n);
}

#define ASSERT_DOCUMENT(ds, d, IDS, MASK)                                                                              \
    assert_document(ds, d, (const int32_t[])IDS, (const uint8_t[])MASK, MT_LEN(((const int32_t[])IDS)))
#define LIST(...)                                                                                                      \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }

static void assert_same(const struct dataset *a, const struct dataset *b)
{
    assert_int_equal(a->n_docs, b->n_docs);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->n_rows, b->n_rows);
    assert_int_equal(a->n_bad, b->n_bad);
    assert_int_equal(a->n_overlong, b->n_overlong);
    assert_int_equal(a->n_unlabelled, b->n_unlabelled);
    assert_memory_equal(a->doc_off, b->doc_off, (size_t)(a->n_docs + 1) * sizeof(*a->doc_off));
    assert_memory_equal(a->ids, b->ids, (size_t)a->n_tokens * sizeof(*a->ids));
    assert_memory_equal(a->mask, b->mask, (size_t)a->n_tokens);
    assert_true(a->hash == b->hash);
}

/* ---- rows */

static void text_rows(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.loss_on = LOSS_ASSISTANT; /* has no effect on text */
    rows_load(&ds, rows_write("{\"text\": \"a10\"}\n{\"text\": \"\\u00e9\\u0000\"}\n"), &opt);
    assert_int_equal(ds.n_docs, 2);
    ASSERT_DOCUMENT(&ds, 0, LIST('a', TEN, RETURN), LIST(0, 1, 1));
    ASSERT_DOCUMENT(&ds, 1, LIST(0xc3, 0xa9, 0, RETURN), LIST(0, 1, 1, 1));
    assert_int_equal(dataset_targets(&ds), 5);
    assert_int_equal(ds.n_rows, 2);
    dataset_free(&ds);
}

static void prompt_completion_rows(void **state)
{
    (void)state;
    static const char *rows =
        "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n"
        "{\"prompt\": \"x1\", \"completion\": \"0y\"}\n" /* a token across the boundary carries loss */
        "{\"prompt\": \"\", \"completion\": \"ok\"}\n"
        "{\"prompt\": \"ok\", \"completion\": \"\"}\n"            /* no answer, so no loss */
        "{\"prompt\": \"a\", \"completion\": \"b<|return|>\"}\n"; /* not a second end token */
    struct dataset ds;
    struct dataset_options opt = rows_options();
    rows_load(&ds, rows_write(rows), &opt);
    assert_int_equal(ds.n_docs, 4);
    assert_int_equal(ds.counts.n_unanswered, 1);
    ASSERT_DOCUMENT(&ds, 0, LIST('a', 'b', 'c', 'd', RETURN), LIST(0, 0, 1, 1, 1));
    ASSERT_DOCUMENT(&ds, 1, LIST('x', TEN, 'y', RETURN), LIST(0, 1, 1, 1));
    ASSERT_DOCUMENT(&ds, 2, LIST(OK, RETURN), LIST(0, 1));
    ASSERT_DOCUMENT(&ds, 3, LIST('a', 'b', RETURN), LIST(0, 1, 1));
    dataset_free(&ds);
    opt.loss_on = LOSS_ALL;
    rows_load(&ds, rows_write(rows), &opt);
    ASSERT_DOCUMENT(&ds, 0, LIST('a', 'b', 'c', 'd', RETURN), LIST(0, 1, 1, 1, 1));
    dataset_free(&ds);
}

static void messages_rows(void **state)
{
    (void)state;
    static const char *rows =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", "
        "\"content\": \"4\"}, {\"role\": \"user\", \"content\": \"r\"}, {\"role\": \"assistant\", "
        "\"content\": \"10\"}]}\n";
    static const int32_t learned[] = {CHANNEL, 'f', 'i', 'n', 'a', 'l', MESSAGE, '4', END,
                                      CHANNEL, 'f', 'i', 'n', 'a', 'l', MESSAGE, TEN, RETURN};
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.whole = true;
    rows_load(&ds, rows_write(rows), &opt);
    assert_int_equal(ds.n_docs, 1);
    assert_int_equal(ds.ids[0], START);
    int64_t n = 0;
    for (int64_t i = 0; i < ds.n_tokens; i++) {
        if (!ds.mask[i]) continue;
        assert_true(n < MT_LEN(learned));
        assert_int_equal(ds.ids[i], learned[n++]);
    }
    assert_int_equal(n, MT_LEN(learned));
    assert_int_equal(ds.ids[ds.n_tokens - 1], RETURN); /* not a second end token */
    int64_t n_tokens = ds.n_tokens;
    dataset_free(&ds);
    opt.loss_on = LOSS_ALL;
    rows_load(&ds, rows_write(rows), &opt);
    assert_int_equal(ds.n_tokens, n_tokens);
    assert_int_equal(ds.mask[0], 0);
    assert_int_equal(dataset_targets(&ds), n_tokens - 1);
    dataset_free(&ds);
}

/* An answer ends in <|return|> when it is the last message, and in <|end|> as history. So each answer is a sample. */
static void messages_are_split(void **state)
{
    (void)state;
    static const char *rows = "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", "
                              "\"content\": \"4\"}, {\"role\": \"user\", \"content\": \"r\"}, {\"role\": "
                              "\"assistant\", \"content\": \"10\"}]}\n";
    static const int32_t last[] = {'4', TEN};
    struct dataset ds;
    struct dataset_options opt = rows_options();
    rows_load(&ds, rows_write(rows), &opt);
    assert_int_equal(ds.n_docs, 2);
    for (int64_t d = 0; d < 2; d++) {
        const int32_t learned[] = {CHANNEL, 'f', 'i', 'n', 'a', 'l', MESSAGE, last[d], RETURN};
        const int64_t end = ds.doc_off[d + 1], begin = end - MT_LEN(learned);
        for (int64_t i = ds.doc_off[d]; i < end; i++) {
            assert_int_equal(ds.mask[i], i >= begin);
            if (i >= begin) assert_int_equal(ds.ids[i], learned[i - begin]);
        }
    }
    dataset_free(&ds);
    opt.loss_on = LOSS_LAST;
    rows_load(&ds, rows_write(rows), &opt);
    assert_int_equal(ds.n_docs, 1);
    assert_int_equal(dataset_targets(&ds), 9);
    assert_int_equal(ds.ids[ds.n_tokens - 2], TEN);
    dataset_free(&ds);
}

static void format_by_keys(void **state)
{
    (void)state;
    const char *path = rows_write("{\"text\": \"ab\"}\n{\"prompt\": \"ab\", \"completion\": \"c\", \"text\": \"x\"}\n"
                                  "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", "
                                  "\"content\": \"d\"}], \"id\": 7}\n");
    struct dataset ds;
    struct dataset_options opt = rows_options();
    rows_load(&ds, path, &opt);
    assert_int_equal(ds.n_docs, 3);
    ASSERT_DOCUMENT(&ds, 0, LIST('a', 'b', RETURN), LIST(0, 1, 1));
    ASSERT_DOCUMENT(&ds, 1, LIST('a', 'b', 'c', RETURN), LIST(0, 0, 1, 1));
    assert_int_equal(ds.ids[ds.doc_off[2]], START);
    dataset_free(&ds);
    opt.format = DATA_TEXT;
    rows_refused(path, &opt, "rows.jsonl:3");
}

/* ---- files */

static void lines_files_and_gzip(void **state)
{
    (void)state;
    struct dataset a, b;
    struct dataset_options opt = rows_options();
    char both[2 * MT_PATH];
    rows_load(&a, rows_write("{\"text\": \"ab\"}\n{\"text\": \"cd\"}\n"), &opt);
    rows_load(&b, rows_write("\xef\xbb\xbf\r\n{\"text\": \"ab\"}\r\n \t\n\n{\"text\": \"cd\"}"), &opt);
    assert_same(&a, &b);
    dataset_free(&b);
    snprintf(both, sizeof(both), " %s , %s", rows_write("{\"text\": \"ab\"}"), rows_write("{\"text\": \"cd\"}\n"));
    rows_load(&b, both, &opt);
    assert_same(&a, &b);
    dataset_free(&a);
    dataset_free(&b);
    rows_load(&a, fixture("data/rows.jsonl"), &opt);
    rows_load(&b, fixture("data/rows.jsonl.gz"), &opt);
    assert_int_equal(a.n_docs, 6);
    assert_same(&a, &b);
    dataset_free(&a);
    dataset_free(&b);
}

static void unreadable_files(void **state)
{
    (void)state;
    struct err err;
    struct dataset_options opt = rows_options();
    int64_t size;
    char *gz = file_read(fixture("data/rows.jsonl.gz"), 1 << 20, &size, &err);
    assert_non_null(gz);
    rows_refused("/nonexistent/rows.jsonl", &opt, "/nonexistent/rows.jsonl");
    rows_refused(rows_write_text(gz, size - 9), &opt, "rows.jsonl");
    gz[size / 2] = (char)(gz[size / 2] ^ 64);
    rows_refused(rows_write_text(gz, size), &opt, "rows.jsonl");
    rows_refused(rows_write("\n\n"), &opt, "no rows: expected");
    mem_free(gz);
}

/* Truncated at any byte, the file loads or gives an error, and only complete rows are read. */
static void truncation_at_every_byte(void **state)
{
    (void)state;
    struct err err;
    struct dataset_options opt = rows_options();
    int64_t size;
    char *text = file_read(fixture("data/rows.jsonl"), 1 << 20, &size, &err);
    assert_non_null(text);
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/rows.jsonl", scratch_dir());
    for (int64_t n = 0; n < size; n++) {
        struct dataset ds;
        rows_write_file(path, text, n);
        err.msg[0] = 0;
        bool whole = n > 0 && (text[n] == '\n' || text[n - 1] == '\n');
        if (whole) {
            rows_load(&ds, path, &opt);
            assert_true(ds.n_docs > 0);
            dataset_free(&ds);
        } else {
            assert_int_equal(dataset_load(&ds, path, rows_tok, &opt, &err), -1);
            assert_true(strlen(err.msg) > 10);
        }
    }
    mem_free(text);
}

/* Sparse files are refused at once, with and without a cache: 4 TiB, and a hole at the end of a file of 4 MiB. */
static void sparse_files_are_refused(void **state)
{
    (void)state;
    struct err err;
    struct dataset ds;
    struct dataset_options opt = rows_options();
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/rows.jsonl", scratch_dir());
    for (int i = 0; i < 2; i++) {
        const int64_t sizes[] = {(int64_t)4 << 40, 4 << 20};
        rows_write_file(path, "{\"text\": \"a b\"}\n", 16);
        if (truncate(path, sizes[i])) {
            print_message("skip: a sparse file of %lld bytes cannot be made here\n", (long long)sizes[i]);
            continue;
        }
        opt.cache_dir = i ? NULL : scratch_dir();
        const double start = clock_ms();
        assert_int_equal(dataset_load(&ds, path, rows_tok, &opt, &err), -1);
        if (!strstr(err.msg, "has a hole at ")) fail_msg("%s", err.msg);
        assert_true(clock_ms() - start < 5000);
    }
}

/* ---- rows that are dropped or truncated */

static void bad_rows(void **state)
{
    (void)state;
    static const struct {
        const char *row, *words;
    } rows[] = {
        {"{\"text\": \"a\"", "rows.jsonl:2"},
        {"{\"text\": \"a\"} x", "rows.jsonl:2"},
        {"{\"text\": \"\xff\"}", "rows.jsonl:2"},
        {"[\"text\"]", "must be an object"},
        {"{\"question\": \"a\"}", "none of `messages`"},
        {"{\"prompt\": \"a\"}", "none of `messages`"},
        {"{\"text\": 7}", "`text`"},
        {"{\"text\": null}", "`text`"},
        {"{\"text\": 18446744073709551615}", "`text`"},
        {"{\"text\": NaN}", "`text`: must be a string, not a number"},
        {"{\"instruction\": \"a\", \"output\": \"b\", \"history\": [[true, \"c\"]]}", "must be text, not a boolean"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": NaN}]}",
         "`messages[0].content`: must be text, not a boolean, NaN"},
        {"{\"prompt\": \"a\", \"completion\": [\"b\"]}", "two texts, or two lists of messages"},
        {"{\"prompt\": [], \"completion\": [{\"from\": \"gpt\", \"value\": \"b\"}]}", "`completion` write messages"},
        {"{\"prompt\": {}, \"completion\": \"b\"}", "`prompt`"},
        {"{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
         "`rejected`, a key of preference data: set objective.kind = dpo, or name the columns"},
        {"{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}], \"rejected\": {\"from\": 1}}",
         "`rejected`, a key"},
        {"{\"prompt\": \"a\", \"completion\": \"b\", \"label\": false}",
         "`label`, a key of preference data: set objective.kind = kto, or keep the rows"},
        {"{\"prompt\": \"a\", \"completion\": \"b\", \"label\": \"False\"}", "`label`, a key of preference data"},
        {"{\"prompt\": \"a\", \"completion\": \"b\", \"label\": \"desirable\"}", "`label`, a key of preference data"},
        {"{\"instruction\": \"a\", \"output\": \"b\", \"kto_tag\": false}", "keep the rows in which it is true"},
        {"{\"messages\": [], \"label\": false}", "`label`, a key of preference data"},
        {"{\"messages\": [], \"rejected_response\": \"b\"}", "`rejected_response`, a key of preference data"},
        {"{\"messages\": [], \"rejected_messages\": [{}]}", "to train on the good answers, remove the key"},
        {"{\"messages\": \"hello\"}", "messages"},
        {"{\"messages\": [{\"from\": \"human\", \"value\": \"a\"}]}", "set data.columns = conversations=messages"},
        {"{\"conversations\": [{\"role\": \"judge\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"q\"}, "
         "{\"role\": \"assistant\", \"content\": \"b\"}]}",
         "judge"},
        {"{\"conversations\": [{\"from\": \"judge\", \"value\": \"a\"}]}", "`from` \"judge\" is unknown"},
        {"{\"messages\": [{\"role\": \"judge\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"q\"}, "
         "{\"role\": \"assistant\", \"content\": \"b\"}]}",
         "judge"},
        {"{\"messages\": [{\"role\": \"user\"}]}", "messages"},
    };
    struct dataset_options opt = rows_options();
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char text[256];
        snprintf(text, sizeof(text), "{\"text\": \"ab\"}\n%s\n", rows[i].row);
        const char *path = rows_write(text);
        rows_refused(path, &opt, "1 of 2 rows are bad");
        rows_refused(path, &opt, "rows.jsonl:2");
        rows_refused(path, &opt, rows[i].words);
    }
}

/* n rows; row k is not JSON. */
static const char *rows_with_bad(int n, int k)
{
    char text[4096] = "";
    for (int i = 1; i <= n; i++) strcat(text, i == k ? "oops\n" : "{\"text\": \"ab\"}\n");
    return rows_write(text);
}

static void one_percent_may_be_bad(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = rows_options();
    rows_load(&ds, rows_with_bad(100, 42), &opt);
    assert_int_equal(ds.n_rows, 100);
    assert_int_equal(ds.n_bad, 1);
    assert_int_equal(ds.n_docs, 99);
    dataset_free(&ds);
    rows_refused(rows_with_bad(99, 42), &opt, "1 of 99 rows are bad");
    rows_refused(rows_with_bad(99, 42), &opt, "rows.jsonl:42");
    rows_refused(rows_with_bad(1, 1), &opt, "1 of 1 rows are bad");
}

static void overlong_rows(void **state)
{
    (void)state;
    const char *path =
        rows_write("{\"text\": \"abcd\"}\n{\"text\": \"abc\"}\n{\"prompt\": \"ab\", \"completion\": \"cdef\"}\n");
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.seq_len = 4;
    rows_load(&ds, path, &opt);
    assert_int_equal(ds.n_docs, 3);
    assert_int_equal(ds.n_overlong, 2);
    ASSERT_DOCUMENT(&ds, 0, LIST('a', 'b', 'c', 'd'), LIST(0, 1, 1, 1));
    ASSERT_DOCUMENT(&ds, 1, LIST('a', 'b', 'c', RETURN), LIST(0, 1, 1, 1));
    ASSERT_DOCUMENT(&ds, 2, LIST('a', 'b', 'c', 'd'), LIST(0, 0, 1, 1));
    dataset_free(&ds);
    opt.overlong = OVERLONG_DROP;
    rows_load(&ds, path, &opt);
    assert_int_equal(ds.n_docs, 1);
    assert_int_equal(ds.n_overlong, 2);
    ASSERT_DOCUMENT(&ds, 0, LIST('a', 'b', 'c', RETURN), LIST(0, 1, 1, 1));
    dataset_free(&ds);
}

static void rows_without_target(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = rows_options();
    /* Only eos; only a question; all labelled tokens truncated. None of them counts as bad. */
    const char *path = rows_write("{\"text\": \"\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}\n"
                                  "{\"prompt\": \"abcdefgh\", \"completion\": \"i\"}\n{\"text\": \"ab\"}\n");
    opt.seq_len = 8;
    rows_load(&ds, path, &opt);
    assert_int_equal(ds.n_docs, 1);
    assert_int_equal(ds.n_unlabelled, 3);
    assert_int_equal(ds.n_bad, 0);
    dataset_free(&ds);
    rows_refused(rows_write("{\"text\": \"\"}\n"), &opt, "no document has a token with loss: 1 row,");
}

static void ids_must_fit_the_model(void **state)
{
    (void)state;
    struct dataset_options opt = rows_options();
    const char *path = rows_write("{\"text\": \"ab\"}\n{\"text\": \"a10\"}\n");
    opt.eos = 0;
    opt.vocab = TEN;
    rows_refused(path, &opt, "rows.jsonl:2: token id 256");
    opt.vocab = TEN + 1;
    opt.eos = -1;
    rows_refused(path, &opt, "no such token");
}

/* ---- cache */

static void cache_path(char path[MT_PATH], const char *dir)
{
    char **names;
    int64_t n;
    struct err err;
    if (file_list(dir, &names, &n, &err)) fail_msg("%s", err.msg);
    assert_int_equal(n, 1);
    snprintf(path, MT_PATH, "%s/%s", dir, names[0]);
    file_list_free(names, n);
}

static void cache_hit_equals_fresh(void **state)
{
    (void)state;
    struct dataset fresh, first, second;
    struct dataset_options opt = rows_options();
    struct stat before, after;
    char path[MT_PATH];
    rows_load(&fresh, fixture("data/rows.jsonl"), &opt);
    opt.cache_dir = scratch_dir();
    rows_load(&first, fixture("data/rows.jsonl"), &opt);
    cache_path(path, opt.cache_dir);
    assert_int_equal(stat(path, &before), 0);
    rows_load(&second, fixture("data/rows.jsonl"), &opt);
    assert_int_equal(stat(path, &after), 0);
    assert_true(before.st_ino == after.st_ino); /* not rewritten */
    assert_same(&fresh, &first);
    assert_same(&fresh, &second);
    dataset_free(&first);
    dataset_free(&second);
    dataset_free(&fresh);
}

/* Another tokenizer or template: one character of the file differs. */
static struct tokenizer *changed_tokenizer(void)
{
    struct err err;
    int64_t size;
    char *text = file_read(fixture("data/bytes.tokenizer.json"), 1 << 20, &size, &err);
    assert_non_null(text);
    char *at = strstr(text, "\"1.0\"");
    assert_non_null(at);
    at[3] = '1';
    struct tokenizer *other = tokenizer_parse(text, size, "t", &err);
    if (!other) fail_msg("%s", err.msg);
    mem_free(text);
    return other;
}

static struct chat_template *template_of(const char *text)
{
    struct err err;
    struct chat_template *t;
    const char *dir = scratch_dir();
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/t.jinja", dir);
    rows_write_file(path, text, (int64_t)strlen(text));
    if (chat_template_load(&t, dir, path, &err) || !t) fail_msg("%s", err.msg);
    return t;
}

static void assert_caches(const char *dir, int64_t want)
{
    char **names;
    int64_t n;
    struct err err;
    if (file_list(dir, &names, &n, &err)) fail_msg("%s", err.msg);
    assert_int_equal(n, want);
    file_list_free(names, n);
}

/* The cache key covers every option, the tokenizer, the template, and the files' bytes, order and weights. It does not
 * cover file names and times. */
static void cache_key_covers_every_option(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *path = fixture("data/rows.jsonl");
    const char *rows[] = {rows_write("{\"text\": \"one file\"}\n"), rows_write("{\"text\": \"two files\"}\n"),
                          rows_write("{\"text\": \"one file\"}\n")};
    char files[4][3 * MT_PATH];
    snprintf(files[0], sizeof(files[0]), "%s,%s", rows[0], rows[1]);
    snprintf(files[1], sizeof(files[1]), "%s,%s", rows[1], rows[0]);
    snprintf(files[2], sizeof(files[2]), "%s*2,%s", rows[0], rows[1]);
    snprintf(files[3], sizeof(files[3]), "%s , %s", rows[2],
             rows[1]); /* the same files, order and weights as the first */
    struct chat_template *templates[] = {template_of("{% for m in messages %}{{ m.content }}{% endfor %}"),
                                         template_of("{% for m in messages %}{{ m.content }} {% endfor %}")};
    struct tokenizer *own = rows_tok, *other = changed_tokenizer();
    enum { LAST = 18 };
    for (int i = 0; i <= LAST; i++) {
        struct dataset fresh, cached;
        struct dataset_options opt = rows_options();
        if (i == 1) opt.loss_on = LOSS_ALL;
        if (i == 2) opt.overlong = OVERLONG_DROP;
        if (i == 3) opt.seq_len = 20;
        if (i == 4) opt.eos = END;
        if (i == 5) opt.vocab = VOCAB + 1;
        if (i == 6) opt.chat_date = "2025-01-02";
        if (i == 7) opt.whole = true;
        if (i == 8 || i == 9) opt.chat = templates[i - 8];
        rows_tok = i == 10 ? other : own;
        if (i == 11 || i == 12) path = rows[0];
        if (i == 12) opt.format = DATA_TEXT;
        if (i == 13) opt.dropped = DROPPED_WARN;
        if (i == 14) opt.special_text = SPECIAL_SPLIT;
        if (i >= 15) path = files[i - 15];
        rows_load(&fresh, path, &opt);
        opt.cache_dir = dir;
        rows_load(&cached, path, &opt);
        assert_same(&fresh, &cached);
        dataset_free(&fresh);
        dataset_free(&cached);
        assert_caches(dir, i < LAST ? i + 1 : LAST);
    }
    tokenizer_free(other);
    for (int i = 0; i < 2; i++) chat_template_free(templates[i]);
}

static void damaged_cache_is_rebuilt(void **state)
{
    (void)state;
    enum { STEP = 5 }; /* every STEP-th byte, as each case costs an atomic write */
    struct dataset fresh, ds;
    struct dataset_options opt = rows_options();
    struct err err;
    const char *rows = rows_write("{\"text\": \"ab\"}\n{\"text\": \"c\"}\n");
    char path[MT_PATH];
    int64_t size, size_again;
    opt.cache_dir = scratch_dir();
    rows_load(&fresh, rows, &opt);
    cache_path(path, opt.cache_dir);
    char *good = file_read(path, 1 << 20, &size, &err);
    assert_non_null(good);
    /* The cache is truncated at byte i, then changed there. */
    for (int64_t i = 0; i < 2 * size; i += STEP) {
        char *bad = mem_alloc(size);
        memcpy(bad, good, (size_t)size);
        if (i >= size) bad[i - size] = (char)(bad[i - size] ^ 0x10);
        rows_write_file(path, bad, i < size ? i : size);
        mem_free(bad);
        rows_load(&ds, rows, &opt);
        assert_same(&fresh, &ds);
        dataset_free(&ds);
        char *again = file_read(path, 1 << 20, &size_again, &err);
        assert_non_null(again);
        assert_int_equal(size_again, size);
        assert_memory_equal(again, good, (size_t)size);
        mem_free(again);
    }
    mem_free(good);
    dataset_free(&fresh);
}

/* A cache that cannot be written is a warning. */
static void unwritable_cache_is_a_warning(void **state)
{
    (void)state;
    struct dataset ds;
    struct dataset_options opt = rows_options();
    opt.cache_dir = fixture("data/rows.jsonl"); /* a file */
    rows_load(&ds, fixture("data/rows.jsonl"), &opt);
    assert_int_equal(ds.n_docs, 6);
    dataset_free(&ds);
}

/* ---- split */

/* Every supported form of a conversation gives the same ids. */
static void forms_of_conversations(void **state)
{
    (void)state;
    static const char *const rows[] = {
        "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"a\\nb\"}, "
        "{\"role\": \"assistant\", \"content\": \"c\"}]}",
        "{\"conversations\": [{\"from\": \"system\", \"value\": \"s\"}, {\"from\": \"human\", \"value\": \"a\\nb\"}, "
        "{\"from\": \"gpt\", \"value\": \"c\"}]}",
        "{\"system\": \"s\", \"conversations\": [{\"from\": \"user\", \"value\": \"a\\nb\"}, {\"from\": \"assistant\", "
        "\"value\": \"c\"}]}",
        "{\"instruction\": \"a\", \"input\": \"b\", \"output\": \"c\", \"system\": \"s\", \"history\": \"\"}",
        "{\"instruction\": \"a\\nb\", \"input\": \"\", \"output\": \"c\", \"system\": \"s\", \"history\": []}",
        "{\"prompt\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"a\\nb\"}], "
        "\"completion\": [{\"role\": \"assistant\", \"content\": \"c\"}]}",
    };
    struct dataset ds;
    const struct dataset_options opt = rows_options();
    char text[4096] = "[";
    for (int64_t i = 0; i < MT_LEN(rows); i++) { /* as one JSON array, over several lines */
        strcat(text, i ? ",\n" : "\n");
        strcat(text, rows[i]);
    }
    rows_load(&ds, rows_write(strcat(text, "\n]\n")), &opt);
    assert_int_equal(ds.n_rows, MT_LEN(rows));
    assert_int_equal(ds.n_docs, MT_LEN(rows));
    assert_int_equal(duplicates_in(&ds), MT_LEN(rows) - 1);
    assert_int_equal(dataset_targets(&ds), MT_LEN(rows) * 9); /* CHANNEL final MESSAGE c RETURN */
    dataset_free(&ds);
    rows_refused(rows_write("{\"conversations\": [{\"from\": \"judge\", \"value\": \"a\"}]}\n"), &opt, "judge");
    rows_refused(rows_write("{\"instruction\": \"a\", \"output\": 7}\n"), &opt, "`output`");
    rows_refused(rows_write("{\"instruction\": \"a\", \"output\": \"b\", \"history\": \"x\"}\n"), &opt,
                 "`history` must be");
    rows_refused(
        rows_write("{\"instruction\": \"a\", \"output\": \"b\", \"history\": [{\"q\": \"x\", \"a\": \"y\"}]}\n"), &opt,
        "must be [question, answer]");
    rows_refused(rows_write("{\"instruction\": \"a\", \"output\": \"b\", \"system\": 7}\n"), &opt,
                 "`system` must be a string");
    rows_refused(rows_write("{\"conversations\": [], \"system\": [\"s\"]}\n"), &opt, "`system` must be a string");
    rows_refused(rows_write("[{\"text\": \"ab\"}, {\"text\": 7}]"), &opt, "rows.jsonl[1]: key `text`");
    rows_refused(rows_write("[{\"text\": \"ab\"}"), &opt, "rows.jsonl");
}

/* Messages in a prompt, and messages with "train": false, carry no loss. */
static void untrained_answers(void **state)
{
    (void)state;
    static const char row[] =
        "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}, "
        "{\"role\": \"user\", \"content\": \"c\"}], \"completion\": [{\"role\": \"assistant\", \"content\": \"d\"}]}\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\", "
        "\"train\": false}]}\n"
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"function_call\", \"value\": "
        "\"{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": {}}\"}]}\n";
    struct dataset ds;
    const struct dataset_options opt = rows_options();
    rows_load(&ds, rows_write(row), &opt);
    assert_int_equal(ds.n_docs, 2);
    assert_int_equal(ds.n_unlabelled, 1);
    assert_int_equal(ds.ids[ds.doc_off[1] - 2], 'd');
    assert_int_equal(ds.ids[ds.n_tokens - 1], CALL);
    dataset_free(&ds);
}

/* A turn of ShareGPT, also a function call, can carry the three keys of messages that switch its loss off. */
static void untrained_turns(void **state)
{
    (void)state;
    static const char *const marks[] = {"", "\"train\": false, ", "\"weight\": 0, ", "\"loss_weight\": 0.0, "};
    static const char *const turns[] = {
        "\"from\": \"gpt\", \"value\": \"b\"",
        "\"from\": \"function_call\", \"value\": \"{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": {}}\""};
    const struct dataset_options opt = rows_options();
    char row[512];
    for (int i = 0; i < MT_LEN(marks) * MT_LEN(turns); i++) {
        struct dataset ds;
        snprintf(
            row, sizeof(row),
            "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {%s%s}, {\"from\": \"human\", \"value\": "
            "\"c\"}, {\"from\": \"gpt\", \"value\": \"d\"}]}\n",
            marks[i / 2], turns[i % 2]);
        rows_load(&ds, rows_write(row), &opt);
        const int64_t last = 9; /* CHANNEL final MESSAGE d RETURN */
        if ((dataset_targets(&ds) == last) != (i >= 2)) fail_msg("%s: %d", row, (int)dataset_targets(&ds));
        dataset_free(&ds);
    }
    rows_refused(
        rows_write("{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": "
                   "\"b\", \"weight\": 2}]}\n"),
        &opt, "`weight` must be 0 or 1");
}

#define AB     "\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]"
#define EFFORT "\"chat_template_kwargs\": {\"reasoning_effort\": \"high\"}"
#define TOOL   "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"d\"}}"

/* Rows with renamed columns give the same documents as rows with the default keys. */
static void columns(void **state)
{
    (void)state;
    static const char *const same[][3] = {
        {"user = question, assistant =answer", "{\"question\": \"a\\n\", \"answer\": \"b\", \"id\": 7}",
         "{\"messages\": [{\"role\": \"user\", \"content\": \"a\\n\"}, {\"role\": \"assistant\", \"content\": "
         "\"b\"}]}"},
        {"system=s,user=q,assistant=a", "{\"q\": \"a\", \"a\": \"b\", \"s\": \"\"}", "{" AB "}"},
        {"system=s,user=q,assistant=a", "{\"q\": \"a\", \"a\": \"b\", \"s\": \"c\"}",
         "{\"messages\": [{\"role\": \"system\", \"content\": \"c\"}, {\"role\": \"user\", \"content\": \"a\"}, "
         "{\"role\": \"assistant\", \"content\": \"b\"}]}"},
        {"prompt=q,completion=a", "{\"q\": \"a\", \"a\": \"b\"}", "{\"prompt\": \"a\", \"completion\": \"b\"}"},
        {"user=q,assistant=a", "{\"q\": \"a\", \"id\": 18446744073709551615, \"a\": \"b\"}", "{" AB "}"},
        {"text=story", "{\"story\": \"abc\"}", "{\"text\": \"abc\"}"},
        {"user=q,tools=f,assistant=a", "{\"q\": \"a\", \"a\": \"b\", \"f\": [" TOOL "]}",
         "{\"tools\": [" TOOL "], " AB "}"},
        {"user=q,assistant=a", "{\"q\": \"a\", \"a\": \"b\", \"tools\": [" TOOL "]}",
         "{\"tools\": [" TOOL "], " AB "}"},
        {"user=q,assistant=a", "{\"q\": \"a\", \"a\": \"b\", " EFFORT "}", "{" EFFORT ", " AB "}"},
        {"instruction=q,output=a", "{\"q\": \"a\", \"a\": \"b\", " EFFORT "}", "{" EFFORT ", " AB "}"},
        {"",
         "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": \"b\"}], " EFFORT
         "}",
         "{" EFFORT ", " AB "}"},
        {"system=s,instruction=q,output=a", "{\"q\": \"a\", \"a\": \"b\", \"s\": \"c\"}",
         "{\"messages\": [{\"role\": \"system\", \"content\": \"c\"}, {\"role\": \"user\", \"content\": \"a\"}, "
         "{\"role\": \"assistant\", \"content\": \"b\"}]}"},
        {"messages=chat",
         "{\"chat\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
         "{" AB "}"}};
    static const char *const bad[][2] = {{"system=s,user=n,assistant=n", "no row has the column `s`"},
                                         {"user=question", "has no column `question`"},
                                         {"user=a,,assistant=b", "\"\" is not TO=COLUMN"},
                                         {"user= ", "is not TO=COLUMN"},
                                         {"user", "\"user\" is not TO=COLUMN"},
                                         {"=a", "is not TO=COLUMN"},
                                         {"user=", "is not TO=COLUMN"},
                                         {"system=n,prompt=n,completion=n", "`system` makes a message, and `prompt`"},
                                         {"conversations=n,system=n,user=n", "`user` makes a message, and `conversa"},
                                         {"text=n", "text"}};
    for (int i = 0; i < MT_LEN(same); i++) {
        struct dataset a, b;
        struct dataset_options opt = rows_options();
        rows_load(&b, rows_write(same[i][2]), &opt);
        opt.columns = same[i][0];
        rows_load(&a, rows_write(same[i][1]), &opt);
        assert_int_equal(a.hash, b.hash);
        dataset_free(&a);
        dataset_free(&b);
    }
    for (int i = 0; i < MT_LEN(bad); i++) {
        struct dataset_options opt = rows_options();
        opt.columns = bad[i][0];
        /* only the first row would be good */
        rows_refused(rows_write(i ? "{\"n\": 1}" : "{\"n\": \"a\"}"), &opt, bad[i][1]);
    }
}

static void weighted_files(void **state)
{
    (void)state;
    struct dataset ds, again;
    const struct dataset_options opt = rows_options();
    char files[MT_PATH];
    const char *a = rows_write("{\"text\": \"ab\"}\n{\"text\": \"cd\"}\n{\"text\": \"ef\"}\n{\"text\": \"gh\"}\n"),
               *b = rows_write("{\"text\": \"xy\"}\n");
    snprintf(files, sizeof(files), "%s*2.5, %s", a, b);
    rows_load(&ds, files, &opt);
    rows_load(&again, files, &opt);
    assert_int_equal(ds.n_docs, 11);
    assert_int_equal(ds.hash, again.hash);
    assert_int_equal(ds.ids[ds.doc_off[4]], 'a');
    assert_int_equal(ds.ids[ds.doc_off[10]], 'x');
    assert_int_equal(duplicates_in(&ds), 0); /* copies made by a weight do not count */
    dataset_free(&again);
    snprintf(files, sizeof(files), "%s * 0.5", a);
    rows_load(&again, files, &opt);
    assert_int_equal(again.n_docs, 2);
    assert_int_equal(duplicates_shared(&again, &ds), 2);
    assert_int_equal(duplicates_shared(&ds, &again), 6); /* a weight of 0.5 always selects the same half */
    dataset_free(&again);
    dataset_free(&ds);
    rows_refused("*0.5", &opt, "*0.5: * must follow the path of a file");
    rows_refused(" * 0.5", &opt, "* 0.5: * must follow the path of a file");
    snprintf(files, sizeof(files), "%s*0.4", b);
    rows_refused(files, &opt,
                 "rows.jsonl: the weight after * selects none of 1 document: raise it, or leave the file out");
    snprintf(files, sizeof(files), "%s, %s*0.4", a, b);
    rows_refused(files, &opt, "the weight after * selects none of 1 document:");
    snprintf(files, sizeof(files), "%s*0", a);
    rows_refused(files, &opt, "* must be followed by a weight");
    snprintf(files, sizeof(files), "%s*x", a);
    rows_refused(files, &opt, "no file matches this pattern (a number after * is a weight)");
}

/* Without a chat template conversations are an error, not ordinary text. */
static void messages_need_a_template(void **state)
{
    (void)state;
    struct dataset_options opt = rows_options();
    opt.chat = NULL;
    rows_refused(rows_write("{\"messages\":[{\"role\":\"user\",\"content\":\"10\"},"
                            "{\"role\":\"assistant\",\"content\":\"ok\"}]}\n"),
                 &opt, "messages need a chat template, and the checkpoint has none: set data.chat_template");
}

int test_dataset(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_rows),
        cmocka_unit_test(prompt_completion_rows),
        cmocka_unit_test(messages_rows),
        cmocka_unit_test(messages_are_split),
        cmocka_unit_test(format_by_keys),
        cmocka_unit_test(lines_files_and_gzip),
        cmocka_unit_test(unreadable_files),
        cmocka_unit_test(truncation_at_every_byte),
        cmocka_unit_test(sparse_files_are_refused),
        cmocka_unit_test(bad_rows),
        cmocka_unit_test(one_percent_may_be_bad),
        cmocka_unit_test(overlong_rows),
        cmocka_unit_test(rows_without_target),
        cmocka_unit_test(ids_must_fit_the_model),
        cmocka_unit_test(cache_hit_equals_fresh),
        cmocka_unit_test(cache_key_covers_every_option),
        cmocka_unit_test(damaged_cache_is_rebuilt),
        cmocka_unit_test(unwritable_cache_is_a_warning),
        cmocka_unit_test(forms_of_conversations),
        cmocka_unit_test(untrained_answers),
        cmocka_unit_test(untrained_turns),
        cmocka_unit_test(columns),
        cmocka_unit_test(weighted_files),
        cmocka_unit_test(messages_need_a_template),
    };
    return cmocka_run_group_tests_name("dataset", tests, rows_load_tokenizer, rows_free_tokenizer);
}
