/* rows.c - data sets from text, for tests. */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>

struct tokenizer *rows_tok;

int rows_load_tokenizer(void **state)
{
    (void)state;
    struct err err;
    rows_tok = tokenizer_load(fixture("data/bytes.tokenizer.json"), &err);
    if (!rows_tok) fprintf(stderr, "%s\n", err.msg);
    return rows_tok ? 0 : -1;
}

int rows_free_tokenizer(void **state)
{
    (void)state;
    tokenizer_free(rows_tok);
    return 0;
}

struct dataset_options rows_options(void)
{
    return (struct dataset_options){.seq_len = 1024, .eos = ROWS_EOS, .vocab = ROWS_VOCAB, .chat_date = "2025-01-01"};
}

void rows_write_file(const char *path, const char *text, int64_t size)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, (size_t)size, f), size);
    assert_int_equal(fclose(f), 0);
}

const char *rows_write_text(const char *text, int64_t size)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/rows.jsonl", scratch_dir());
    rows_write_file(p, text, size);
    return p;
}

const char *rows_write(const char *text) { return rows_write_text(text, (int64_t)strlen(text)); }

void rows_load(struct dataset *ds, const char *files, const struct dataset_options *opt)
{
    struct err err;
    if (dataset_load(ds, files, rows_tok, opt, &err)) fail_msg("%s", err.msg);
}

void rows_refused(const char *files, const struct dataset_options *opt, const char *words)
{
    struct err err = {""};
    struct dataset ds;
    assert_int_equal(dataset_load(&ds, files, rows_tok, opt, &err), -1);
    if (!strstr(err.msg, words)) fail_msg("\"%s\" is not in: %s", words, err.msg);
}
