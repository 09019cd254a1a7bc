/* test_pairs.c - `moetrain pairs`: which answers become pairs, and files that do not belong together. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/process.h"

static const char *put(const char *name, const char *text)
{
    static char path[4][MT_PATH];
    static int next;
    struct err err;
    char *p = path[next++ % 4];
    snprintf(p, MT_PATH, "%s/%s", scratch_dir(), name);
    if (file_write_atomic(p, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
    return p;
}

#define ANSWER(id, right, text) "{\"id\": " id ", \"right\": " right ", \"text\": \"" text "\"}\n"

static void best_and_worst(void **state)
{
    (void)state;
    char out[MT_PATH], text[4096];
    const char *rows = put("rows.jsonl", "{\"prompt\": \"1+1=\"}\n"
                                         "{\"id\": \"b\", \"messages\": [{\"role\": \"user\", \"content\": \"2+2?\"}, "
                                         "{\"role\": \"assistant\", \"content\": \"4\"}], \"tools\": []}\n"
                                         "{\"prompt\": \"3+3=\"}\n{\"prompt\": \"4+4=\"}\n{\"prompt\": \"5+5=\"}\n"
                                         "{\"prompt\": [{\"role\": \"user\", \"content\": \"6+6?\"}]}\n");
    const char *answers = put(
        "answers.jsonl",
        ANSWER("0", "false", "3") ANSWER("0", "true", "2") ANSWER("0", "true", "two") ANSWER("\"b\"", "true", "4")
            ANSWER("\"b\"", "false", "5") ANSWER("2", "true", "6") ANSWER("2", "true", "six") ANSWER("3", "null", "8")
                ANSWER("3", "false",
                       "9") "{\"id\": 4, \"reward\": 0.5, \"text\": \"10\", \"finish_reason\": \"length\"}\n"
                            "{\"id\": 4, \"reward\": 0.25, \"text\": \"ten\"}\n{\"id\": 4, \"reward\": -1, \"text\": "
                            "\"11\"}\n" ANSWER("5", "false", "13") ANSWER("5", "true", "12"));
    snprintf(out, sizeof(out), "%s/pairs.jsonl", scratch_dir());
    if (RUN("pairs", rows, answers, "--out", out)) fail_msg("%s", said.err);
    assert_says(said.out, "4 pairs of 6 rows with 14 answers");
    process_read(out, text, sizeof(text));
    assert_string_equal(
        text, "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"3\"}\n"
              "{\"prompt\": [{\"role\": \"user\", \"content\": \"2+2?\"}], \"chosen\": [{\"role\": \"assistant\", "
              "\"content\": \"4\"}], \"rejected\": [{\"role\": \"assistant\", \"content\": \"5\"}], \"tools\": []}\n"
              "{\"prompt\": \"5+5=\", \"chosen\": \"ten\", \"rejected\": \"11\"}\n"
              "{\"prompt\": [{\"role\": \"user\", \"content\": \"6+6?\"}], \"chosen\": [{\"role\": \"assistant\", "
              "\"content\": \"12\"}], \"rejected\": [{\"role\": \"assistant\", \"content\": \"13\"}]}\n");
}

static void files_that_do_not_fit(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"{\"prompt\": \"a\"}\n", ANSWER("7", "true", "b"), "has the id 7"},
        {"{\"prompt\": \"a\"}\n", ANSWER("0", "true", "b"),
         "no row has a better and a worse answer: raise --samples or"},
        {"{\"prompt\": \"a\"}\n",
         ANSWER("0", "false", "b") "{\"id\": 0, \"right\": true, \"text\": \"c\", \"finish_reason\": \"length\"}\n",
         "raise --tokens (1 of 2 answers are cut, and these are never the better ones), raise --samples"},
        {"{\"prompt\": \"a\"}\n", "{\"id\": 0, \"text\": \"b\"}\n", "has neither `right` nor `reward`"},
        {"{\"prompt_ids\": [1]}\n", ANSWER("0", "true", "b") ANSWER("0", "false", "c"), "neither `prompt` nor"},
        {"{\"prompt\": \"a\"}\n", "{\n", "answers.jsonl:1"},
    };
    char out[MT_PATH];
    for (int i = 0; i < MT_LEN(cases); i++) {
        const char *rows = put("rows.jsonl", cases[i][0]), *answers = put("answers.jsonl", cases[i][1]);
        snprintf(out, sizeof(out), "%s/pairs.jsonl", scratch_dir());
        assert_int_equal(RUN("pairs", rows, answers, "--out", out), 1);
        assert_says(said.err, cases[i][2]);
        assert_false(file_exists(out));
    }
}

/* A model can sample the token of byte 0. Such an answer is in no pair; the other answers are. */
static void nul_character(void **state)
{
    (void)state;
    char out[MT_PATH], text[4096];
    const char *rows = put("rows.jsonl", "{\"prompt\": \"1+1=\"}\n");
    const char *answers = put("answers.jsonl", ANSWER("0", "true", "2\\u0000") ANSWER("0", "true", "two")
                                                   ANSWER("0", "false", "\\u0000") ANSWER("0", "false", "3"));
    snprintf(out, sizeof(out), "%s/nul.jsonl", scratch_dir());
    if (RUN("pairs", rows, answers, "--out", out)) fail_msg("%s", said.err);
    assert_says(said.err, "2 answers have a NUL character, which training refuses: left out");
    process_read(out, text, sizeof(text));
    assert_string_equal(text, "{\"prompt\": \"1+1=\", \"chosen\": \"two\", \"rejected\": \"3\"}\n");
}

/* Pairs with --checkpoint are those that `init` and training take. */
static void refused_by_training(void **state)
{
    (void)state;
    char out[MT_PATH], text[4096], model[MT_PATH];
    const char *rows = put("rows.jsonl", "{\"id\": 1, \"messages\": [{\"role\": \"user\", \"content\": \"2+2?\"}]}\n"
                                         "{\"id\": 2, \"messages\": [{\"role\": \"user\", \"content\": \"2+3?\"}]}\n");
    const char *answers =
        put("answers.jsonl", ANSWER("1", "true", "<|channel|>final<|message|>4") ANSWER("1", "false", "5")
                                 ANSWER("2", "true", "5") ANSWER("2", "false", "6"));
    snprintf(out, sizeof(out), "%s/checked.jsonl", scratch_dir());
    snprintf(model, sizeof(model), "%s", fixture("../../configs/tiny-gptoss"));
    if (RUN("pairs", rows, answers, "--out", out, "--checkpoint", model)) fail_msg("%s", said.err);
    assert_says(said.err, "the pair of row 1 is left out, as training refuses it: ");
    assert_says(said.err, "You have passed a message containing <|channel|> tags");
    assert_says(said.out, "1 pairs of 2 rows");
    process_read(out, text, sizeof(text));
    assert_string_equal(text, "{\"prompt\": [{\"role\": \"user\", \"content\": \"2+3?\"}], \"chosen\": [{\"role\": "
                              "\"assistant\", \"content\": \"5\"}], \"rejected\": [{\"role\": \"assistant\", "
                              "\"content\": \"6\"}]}\n");
    assert_int_equal(RUN("pairs", rows, answers, "--out", out), 1);
    assert_says(said.err, "checked.jsonl exists");
    remove(out);
    if (RUN("pairs", rows, answers, "--out", out)) fail_msg("%s", said.err);
    assert_says(said.err,
                "1 pair has <|..|>, perhaps a special token that the chat template refuses: with --checkpoint");
    assert_says(said.out, "2 pairs of 2 rows");
    remove(out);
    answers = put("answers.jsonl", ANSWER("1", "false", "<|channel|>final<|message|>4") ANSWER("1", "true", "5"));
    assert_int_equal(RUN("pairs", rows, answers, "--out", out, "--checkpoint", model), 1);
    assert_says(said.err, "training refuses every pair");
    assert_int_equal(RUN("pairs", rows, answers, "--out", out, "--checkpoint", "/nowhere"), 1);
    assert_says(said.err, "--checkpoint /nowhere");
}

int test_pairs(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(best_and_worst), cmocka_unit_test(files_that_do_not_fit),
                                       cmocka_unit_test(nul_character), cmocka_unit_test(refused_by_training)};
    return cmocka_run_group_tests_name("pairs", tests, NULL, NULL);
}
