/* test_eval_generate.c - `eval --generate`: pass@k against all choices of samples; answers of a file and of held-out
 * rows against what `generate` writes; what is refused. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"
#include "train/reward/eval_score.h"

static char in[MT_PATH], out[MT_PATH], text[1 << 16];

/* pass@k by counting: the share of the subsets of k of n samples that contain at least one of the first `right`
 * samples. */
static double counted(int n, int right, int k)
{
    double all = 0, some = 0;
    for (unsigned set = 0; set < 1u << n; set++) {
        if (__builtin_popcount(set) != k) continue;
        all++;
        some += (set & ((1u << right) - 1)) != 0;
    }
    return some / all;
}

static void pass(void **state)
{
    (void)state;
    for (int n = 1; n <= 10; n++)
        for (int right = 0; right <= n; right++)
            for (int k = 1; k <= n; k++) assert_close(pass_at(n, right, k), counted(n, right, k), 1e-12);
    assert_close(pass_at(1 << 20, 1, 1 << 10), 1.0 / 1024, 1e-9); /* its binomials are beyond a double */
}

static void scores(void **state)
{
    (void)state;
    struct eval_score s = {.n = 0};
    assert_true(isnan(eval_score_mean(&s)));
    eval_score_add(&s, 4, 1);
    assert_close(eval_score_mean(&s), 0.25, 1e-12);
    assert_true(isnan(eval_score_error(&s)));
    eval_score_add(&s, 4, 4);
    eval_score_add(&s, 1, 0);
    assert_close(eval_score_mean(&s), 1.25 / 3, 1e-12);
    assert_close(eval_score_error(&s), 0.30046260628866577, 1e-12); /* statistics.stdev([0.25, 1, 0]) / sqrt(3) */
}

static void write_rows(const char *rows)
{
    struct err err;
    snprintf(in, MT_PATH, "%s/in.jsonl", scratch_dir());
    snprintf(out, MT_PATH, "%.*s/out.jsonl", (int)(strrchr(in, '/') - in), in);
    assert_int_equal(file_write_atomic(in, rows, (int64_t)strlen(rows), &err), 0);
}

/* What the base model continues the prompt with, as a JSON string. */
static const char *continued(const char *config, const char *prompt)
{
    static char quoted[4096];
    assert_int_equal(RUN("generate", config, "--base", "--prompt", prompt, "--tokens", "5", "--json"), 0);
    const char *at = strstr(said.out, "\"text\": "), *end = at ? strstr(at, ", \"stop\"") : NULL;
    assert_non_null(end);
    snprintf(quoted, sizeof(quoted), "%.*s", (int)(end - at - 8), at + 8);
    return quoted;
}

static double number_of(const char *key)
{
    double v;
    struct err err;
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "eval", &err);
    if (!doc) fail_msg("%s\n%s", err.msg, said.err);
    struct json j = json_root(doc);
    if (!strncmp(key, "pass_at.", 8)) j = json_find(j, "pass_at"), key += 8;
    if (json_get_f64(j, key, &v, &err)) fail_msg("%s", err.msg);
    json_free(doc);
    return v;
}

#define EVAL "eval", config, "--base", "--generate", "--tokens", "5"

/* One reference is what the model writes, one is not, one is missing. */
static void file(void **state)
{
    (void)state;
    const char *config = process_config("");
    char rows[8192];
    snprintf(rows, sizeof(rows),
             "{\"prompt\": \"The cat\", \"gold\": %s, \"id\": \"a\"}\n\n{\"prompt\": \"The house\", \"gold\": \"no\"}\n"
             "{\"prompt\": \"It\"}\n",
             continued(config, "The cat"));
    write_rows(rows);
#define FILE_WORDS EVAL, "--verifier", "exact", "--input", in, "--reference", "gold"
    if (RUN(FILE_WORDS, "--output", out)) fail_msg("%s", said.err);
    assert_close(number_of("accuracy"), 0.5, 1e-12);
    assert_close(number_of("standard_error"), 0.5, 1e-12);
    assert_close(number_of("rows"), 2, 0);
    assert_close(number_of("no_reference"), 1, 0);
    assert_close(number_of("mean_tokens"), 5, 0);
    assert_close(number_of("cut"), 1, 0);
    assert_says(said.out, "\"adapter\":null,\"verifier\":\"exact\"");
    assert_says(said.err, "accuracy 50.0 % +- 50.0 (standard error) over 2 rows");
    assert_says(said.err, "1 rows have no reference");
    assert_says(said.err, "3 of 3 samples");
    process_read(out, text, sizeof(text));
    const char *first = strstr(text, "{\"id\": \"a\", \"sample\": 0, \"right\": true, \"tokens\": 5, "
                                     "\"finish_reason\": \"length\", \"reference\": "),
               *second = strstr(text, "{\"id\": 1, \"sample\": 0, \"right\": false, "),
               *third = strstr(text, "{\"id\": 2, \"sample\": 0, \"right\": null, ");
    assert_true(first == text && second > first && third > second);
    assert_int_equal(RUN(FILE_WORDS, "--output", out), 1);
    assert_says(said.err, "out.jsonl");
    assert_int_equal(RUN(FILE_WORDS, "--rows", "1"), 0);
    assert_close(number_of("accuracy"), 1, 0);
    assert_says(said.err, "accuracy 100.0 % over 1 row,");
}

/* Ctrl-C: no result, complete rows in the output, and a message that the same command starts anew. */
static void interrupted(void **state)
{
    (void)state;
    const char *config = process_config(""), *dir = scratch_dir();
    const struct timespec pause = {.tv_nsec = 2000000};
    text[0] = 0;
    for (int i = 0; i < 400; i++)
        strcat(text, "{\"prompt\": \"The cat\", \"completion\": \"no\", \"ignore_eos\": true}\n");
    write_rows(text);
    const char *const words[] = {
        "eval", config,     "--base", "--generate", "--verifier", "exact", "--input",
        in,     "--output", out,      "--tokens",   "40",         "--set", "generate.memory_gb=1e-4",
        NULL};
    const pid_t pid = process_start(dir, words);
    for (int k = 0; k < 10000 && !file_size(out); k++) nanosleep(&pause, NULL);
    assert_int_equal(kill(pid, SIGINT), 0);
    assert_int_equal(process_finish(dir, pid), 130);
    assert_says(said.err, " of 400 samples, without a result: eval --generate begins again");
    assert_string_equal(said.out, "");
}

/* pass@k from the lines of the output. */
static void samples(void **state)
{
    (void)state;
    const char *config = process_config("");
    double want[3] = {0};
    static const int k[3] = {1, 2, 3};
    write_rows("{\"prompt\": \"The cat\"}\n{\"prompt\": \"A\"}\n{\"prompt\": \"It was\"}\n");
    if (RUN(EVAL, "--verifier", "regex", "--pattern", "[aeiou]{2}|[st]h", "--input", in, "--samples", "3",
            "--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--seed", "3", "--output", out))
        fail_msg("%s", said.err);
    process_read(out, text, sizeof(text));
    const char *at = text;
    for (int row = 0; row < 3; row++) {
        int right = 0;
        for (int i = 0; i < 3; i++, at++) {
            const char *word = strstr(at, "\"right\": ");
            assert_non_null(word);
            right += !strncmp(word + 9, "true", 4);
            assert_non_null(at = strchr(word, '\n'));
        }
        for (int i = 0; i < 3; i++) want[i] += counted(3, right, k[i]) / 3;
    }
    assert_true(want[0] > 0 && want[0] < 1); /* some are right, some wrong */
    assert_close(number_of("pass_at.1"), want[0], 1e-12);
    assert_close(number_of("pass_at.2"), want[1], 1e-12);
    assert_close(number_of("pass_at.3"), want[2], 1e-12);
    assert_close(number_of("accuracy"), want[0], 1e-12);
    assert_close(number_of("samples"), 9, 0);
}

/* The prompt of a document ends where its answer begins. */
static void held_out(void **state)
{
    (void)state;
    const char *config = process_config("");
    char rows[8192], set[MT_PATH + 16];
    snprintf(rows, sizeof(rows),
             "{\"prompt\": \"The cat\", \"completion\": %s}\n{\"prompt\": \"The cat\", "
             "\"completion\": \" 12 and 3.50\"}\n",
             continued(config, "The cat"));
    write_rows(rows);
    snprintf(set, sizeof(set), "data.eval=%s", in);
    if (RUN(EVAL, "--verifier", "exact", "--set", set, "--output", out)) fail_msg("%s", said.err);
    assert_close(number_of("accuracy"), 0.5, 1e-12);
    process_read(out, text, sizeof(text));
    assert_says(text, "\"reference\": \" 12 and 3.50\"");
    assert_int_equal(RUN(EVAL, "--verifier", "exact"), 1); /* rows of text */
    assert_says(said.err, "held-out document 0 has no prompt");
    assert_int_equal(RUN(EVAL, "--verifier", "exact", "--set", "data.eval="), 1);
    assert_says(said.err, "nothing to evaluate on");
}

/* Reasoning is not compared; the answer of messages is the reference. */
static void conversations(void **state)
{
    (void)state;
    const char *config = process_config("");
    char set[MT_PATH + 16];
    snprintf(set, sizeof(set), "model.path=%s", fixture("../../configs/tiny-gptoss"));
    write_rows("{\"messages\": [{\"role\": \"user\", \"content\": \"2 + 2?\"}, {\"role\": \"assistant\", \"content\": "
               "\"It is 4\", \"thinking\": \"or 5\"}]}\n");
    if (RUN(EVAL, "--verifier", "last_number", "--set", set, "--input", in, "--output", out)) fail_msg("%s", said.err);
    process_read(out, text, sizeof(text));
    assert_says(text, "\"reference\": \"It is 4\"");
    remove(out);
    char held[MT_PATH + 16];
    snprintf(held, sizeof(held), "data.eval=%s", in);
    if (RUN(EVAL, "--verifier", "last_number", "--set", set, "--set", held, "--set", "data.seq_len=512", "--output",
            out))
        fail_msg("%s", said.err);
    process_read(out, text, sizeof(text));
    assert_says(text, "\"reference\": \"It is 4\"");
}

static void refused(void **state)
{
    (void)state;
    const char *config = process_config("");
    write_rows("{\"prompt\": \"The cat\", \"completion\": \"none\"}\n");
#define REFUSED(code, message, ...)                                                                                    \
    do {                                                                                                               \
        assert_int_equal(RUN("eval", config, "--base", __VA_ARGS__), code);                                            \
        assert_says(said.err, message);                                                                                \
        assert_string_equal(said.out, "");                                                                             \
    } while (0)
    REFUSED(2, "--generate needs --verifier", "--generate");
    REFUSED(2, "--samples needs --generate", "--samples", "2");
    REFUSED(2, "--reference needs --input", "--generate", "--verifier", "exact", "--reference", "a");
#define EXACT "--generate", "--verifier", "exact", "--input", in
    REFUSED(1, "--pattern: the pattern is not valid at byte 1", "--generate", "--verifier", "regex", "--pattern", "(",
            "--input", in);
    REFUSED(1, "set --pattern", "--generate", "--verifier", "regex", "--input", in);
    REFUSED(1, "--pattern is for --verifier regex", EXACT, "--pattern", "a");
    REFUSED(1, "--tolerance is for", EXACT, "--tolerance", "1");
    REFUSED(1, "can compare in its completion or last answer", "--generate", "--verifier", "last_number", "--tokens",
            "2", "--input", in);
    assert_null(strstr(said.err, "loaded ")); /* before the model is there */
    REFUSED(1, "all samples of temperature 0 are equal", "--generate", "--verifier", "exact", "--samples", "2");
    REFUSED(1, "are over the model's", EXACT, "--tokens", "100000000");
    write_rows("{\"messages\": 3}\n");
    REFUSED(1, "in.jsonl:1", EXACT);
    write_rows("\n");
    REFUSED(1, "has no rows", EXACT);
}

int test_eval_generate(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pass),    cmocka_unit_test(scores),      cmocka_unit_test(file),
        cmocka_unit_test(samples), cmocka_unit_test(held_out),    cmocka_unit_test(conversations),
        cmocka_unit_test(refused), cmocka_unit_test(interrupted),
    };
    return cmocka_run_group_tests_name("eval_generate", tests, NULL, NULL);
}
