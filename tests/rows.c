/* rows.c - data sets from text, for tests. */
#include "tests/rows.h"

#include <stdio.h>
#include <string.h>

struct tokenizer *rows_tok;
struct chat_template *rows_chat;

int rows_load_tokenizer(void **state)
{
    (void)state;
    struct err err;
    rows_tok = tokenizer_load(fixture("data/bytes.tokenizer.json"), &err);
    const int rc =
        !rows_tok || chat_template_load(&rows_chat, fixture("../../configs/tiny-gptoss"), NULL, &err) ? -1 : 0;
    if (rc) fprintf(stderr, "%s\n", err.msg);
    if (!rc) chat_template_probe(rows_chat);
    return rc;
}

int rows_free_tokenizer(void **state)
{
    (void)state;
    tokenizer_free(rows_tok);
    chat_template_free(rows_chat);
    return 0;
}

struct dataset_options rows_options(void)
{
    return (struct dataset_options){
        .seq_len = 1024, .eos = ROWS_EOS, .vocab = ROWS_VOCAB, .chat_date = "2025-01-01", .chat = rows_chat};
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
