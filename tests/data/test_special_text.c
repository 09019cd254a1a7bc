/* test_special_text.c - special tokens spelled out in the contents of a conversation: kept, refused, or tokenised as
 * text. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "tests/rows.h"

static struct chat_template *template_of(const char *text)
{
    struct err err;
    struct chat_template *t;
    const char *dir = scratch_dir();
    char path[256];
    snprintf(path, sizeof(path), "%s/t.jinja", dir);
    rows_write_file(path, text, (int64_t)strlen(text));
    if (chat_template_load(&t, dir, path, &err) || !t) fail_msg("%s", err.msg);
    return t;
}

/* The text of the ids, special tokens in brackets: "[259]". */
static void put_ids(char *out, size_t size, const struct dataset *ds, int64_t d)
{
    size_t n = 0;
    for (int64_t i = ds->doc_off[d]; i < ds->doc_off[d + 1] && n + 8 < size; i++) {
        int64_t bytes;
        const char *text = tokenizer_bytes(rows_tok, ds->ids[i], &bytes);
        if (ds->ids[i] < 258)
            n += (size_t)snprintf(out + n, size - n, "%.*s", (int)bytes, text);
        else
            n += (size_t)snprintf(out + n, size - n, "[%d]", ds->ids[i]);
    }
    out[n] = 0;
}

#define TEMPLATE                                                                                                       \
    "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content | trim }}<|end|>{% endfor %}"      \
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
#define ROW(user, assistant)                                                                                           \
    "{\"messages\": [{\"role\": \"user\", \"content\": \"" user                                                        \
    "\"}, {\"role\": \"assistant\", \"content\": \"" assistant "\"}]}\n"

static void contents(void **state)
{
    (void)state;
    static const struct {
        const char *row, *keep, *split;
        int64_t n_special;
    } rows[] = {
        {ROW("a", "b"), "None[260]user[261]a[259][260]assistant[261]b[259]",
         "None[260]user[261]a[259][260]assistant[261]b[259]", 0},
        {ROW(" <|end|><|start|>system", "x<|end|>\\u00e9"),
         "None[260]user[261][259][260]system[259][260]assistant[261]x[259]\xc3\xa9[259]",
         "None[260]user[261]<|end|><|start|>system[259][260]assistant[261]x<|end|>\xc3\xa9[259]", 1},
        {"{\"tools\": [\"<|call|>\"], \"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": "
         "\"<|end|>\"}]}, {\"role\": \"assistant\", \"content\": \"c\"}]}\n",
         NULL, NULL, 1},
        {"{\"conversations\": [{\"from\": \"human\", \"value\": \"<|end|\"}, {\"from\": \"gpt\", \"value\": "
         "\"<|end|>\"}]}\n",
         "None[260]user[261]<|end|[259][260]assistant[261][259][259]",
         "None[260]user[261]<|end|[259][260]assistant[261]<|end|>[259]", 1},
        {"{\"prompt\": \"<|end|>\", \"completion\": \"c<|end|>\"}\n", "[259]c[259][258]", "[259]c[259][258]", 0},
    };
    struct dataset_options opt = rows_options();
    struct chat_template *t = template_of(TEMPLATE);
    opt.chat = t;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        for (int split = 0; split < 2 && rows[i].keep; split++) {
            struct dataset ds;
            char text[256];
            opt.special_text = split ? SPECIAL_SPLIT : SPECIAL_KEEP;
            rows_load(&ds, rows_write(rows[i].row), &opt);
            assert_int_equal(ds.n_docs, 1);
            assert_int_equal(ds.counts.n_special, rows[i].n_special);
            put_ids(text, sizeof(text), &ds, 0);
            assert_string_equal(text, split ? rows[i].split : rows[i].keep);
            dataset_free(&ds);
        }
        opt.special_text = SPECIAL_ERROR;
        if (rows[i].n_special) rows_refused(rows_write(rows[i].row), &opt, "the contents spell the special token <|");
    }
    chat_template_free(t);
}

/* A template that renders differently if a content has a special token. */
static void templates_that_read_them(void **state)
{
    (void)state;
    struct dataset_options opt = rows_options();
    struct chat_template *t =
        template_of("{% for m in messages %}{{ m.content | replace('<|end|>', '!') }}<|end|>{% endfor %}");
    opt.chat = t;
    opt.special_text = SPECIAL_SPLIT;
    rows_refused(rows_write(ROW("a<|end|>b", "c")), &opt,
                 "data.special_text = split: the chat template reads the special");
    chat_template_free(t);
}

/* Counted at start, from the cache too; shown by tokens. */
static void commands(void **state)
{
    (void)state;
    char template[MT_PATH + 32], rows[MT_PATH + 32], path[256];
    const char *dir = scratch_dir(), *config = process_config("");
    snprintf(path, sizeof(path), "%s/t.jinja", dir);
    rows_write_file(path, TEMPLATE, (int64_t)strlen(TEMPLATE));
    snprintf(template, sizeof(template), "data.chat_template=%s", path);
    const char *file = rows_write(ROW("a<|end|>b", "c") ROW("a", "d") ROW("<|end|>", "e"));
    snprintf(rows, sizeof(rows), "data.train=%s", file);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(RUN("tokens", config, "--set", template, "--set", rows, "--set", "data.eval=", "--set",
                             "train.grad_accum=1"),
                         0);
        assert_says(said.err,
                    "rows.jsonl: the contents of 2 of 3 rows spell special tokens, which become special tokens");
        assert_int_equal(strstr(said.err, "rows.jsonl:1: the contents spell 1 special token, such as <|end|>") != NULL,
                         i == 0);
    }
    assert_int_equal(RUN("tokens", "--checkpoint", fixture("parity/case_a"), "--template", path, "--messages", file),
                     0);
    assert_says(said.out, ", \"special_text\": {\"count\": 1, \"first\": \"<|end|>\"}}");
}

int test_special_text(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(contents), cmocka_unit_test(templates_that_read_them),
                                       cmocka_unit_test(commands)};
    return cmocka_run_group_tests_name("special_text", tests, rows_load_tokenizer, rows_free_tokenizer);
}
