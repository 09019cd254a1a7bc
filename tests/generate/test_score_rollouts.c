/* test_score_rollouts.c - `moetrain rewards`: recorded completions, columns of prompts, output, errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"

static char prompts[MT_PATH], rollouts[MT_PATH], out[MT_PATH];

static void write_text(char path[MT_PATH], const char *name, const char *text)
{
    struct err err;
    snprintf(path, MT_PATH, "%s/%s", scratch_dir(), name);
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
}

static const char *with_prompts(const char *more)
{
    static char set[2 * MT_PATH];
    snprintf(set, sizeof(set), "[reward]\n%s\n", more);
    return process_config(set);
}

/* Columns of the row of prompts with the same tokens. */
static void generated(void **state)
{
    (void)state;
    struct err err;
    int64_t size;
    write_text(prompts, "prompts.jsonl",
               "{\"prompt\": \"a 1\", \"answer\": \"x\"}\n{\"prompt\": \"b\", \"answer\": 8}\n");
    snprintf(rollouts, MT_PATH, "%s.rollouts", prompts);
    snprintf(out, MT_PATH, "%s.scored", prompts);
    const char *config =
        with_prompts("any = regex pattern='(?s).*'\nsame = exact\nsame.weight = 3\nshort = length max=2 "
                     "cache=1");
    if (RUN("generate", config, "--base", "--input", prompts, "--output", rollouts, "--format", "rollouts", "--samples",
            "2", "--temperature", "1", "--tokens", "4"))
        fail_msg("%s", said.err);
    if (RUN("rewards", config, rollouts, "--prompts", prompts, "--output", out)) fail_msg("%s", said.err);
    assert_says(said.out,
                "any                             1     1.0000     0.0000     1.0000     1.0000       0       0\n");
    assert_says(said.out, "same                            3     0.0000");
    assert_says(said.out, "\n4 rows\n");
    assert_null(strstr(said.err, "warning"));
    char *text = file_read(out, 1 << 20, &size, &err);
    assert_non_null(text);
    int n = 0;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1, n++) {
        struct json_doc *doc = json_parse(line, end - line, "row", &err);
        double total, any, same, length;
        if (!doc) fail_msg("%s", err.msg);
        const struct json row = json_root(doc), rewards = json_find(row, "rewards");
        assert_true(json_has(row, "logprobs") && json_has(row, "finish_reason"));
        if (json_get_f64(row, "reward", &total, &err) || json_get_f64(rewards, "any", &any, &err) ||
            json_get_f64(rewards, "same", &same, &err) || json_get_f64(rewards, "short", &length, &err))
            fail_msg("%s", err.msg);
        assert_true(total == any + 3 * same + length);
        json_free(doc);
    }
    assert_int_equal(n, 4);
    mem_free(text);
    /* rows with rewards are scored again */
    if (RUN("rewards", config, out, "--prompts", prompts)) fail_msg("%s", said.err);
    assert_says(said.out, "\n4 rows\n");
    assert_int_equal(RUN("rewards", config, rollouts, "--output", out), 1);
    assert_says(said.err, "exists");
}

/* The reward of an environment is that of the row; a row without it has none. */
static void environments(void **state)
{
    (void)state;
    write_text(rollouts, "environment.jsonl",
               "{\"prompt_ids\": [5, 6], \"completion_ids\": [7], \"environment_reward\": 0.75}\n"
               "{\"prompt_ids\": [5, 6], \"completion_ids\": [8], \"environment_reward\": null}\n"
               "{\"prompt_ids\": [5, 6], \"completion_ids\": [8], \"environment_reward\": 0.25}\n");
    const char *config = with_prompts("env = environment");
    if (RUN("rewards", config, rollouts)) fail_msg("%s", said.err);
    assert_says(said.out, "env                             1     0.5000");
}

/* Columns and text of the row itself. */
static void recorded(void **state)
{
    (void)state;
    char text[1 << 16];
    int n = 0;
    for (int i = 0; i < 300; i++)
        n += snprintf(
            text + n, sizeof(text) - (size_t)n,
            "{\"prompt_ids\": [1, 2], \"completion_ids\": [3, 4, 5], \"text\": \"so\\u0000 %d\", \"group\": %d, "
            "\"columns\": {\"gold\": 18}, \"finish_reason\": \"%s\"}\n",
            i % 2 ? 18 : 17, i / 10, i % 3 ? "stop" : "length");
    write_text(rollouts, "rollouts.jsonl", text);
    const char *config =
        with_prompts("right = last_number reference=gold\nnone = exact\nform = format\nform.weight = 0");
    if (RUN("rewards", config, rollouts)) fail_msg("%s", said.err);
    assert_says(said.out,
                "right                           1     0.5000     0.5008     0.0000     1.0000       0       0\n");
    assert_says(said.out,
                "none                            1          -          -          -          -     300       0\n");
    assert_says(said.out, "form                            0     0.6667"); /* those that ended */
    assert_says(said.out, "sum of weight * reward                0.5000     0.5008");
    assert_says(said.out, "\n300 rows\n");
    write_text(rollouts, "rollouts.jsonl", "{\"prompt_ids\": [1, 2], \"completion_ids\": [3], \"text\": 5}\n");
    assert_int_equal(RUN("rewards", config, rollouts), 1);
    const char *at = strstr(said.err, "rollouts.jsonl:1: ");
    assert_true(at && !strstr(at + 1, "rollouts.jsonl:1: ")); /* the place is there once */
    assert_says(at, "key `text`: must be a string");
}

static void commands(void **state)
{
    (void)state;
    char reward[2 * MT_PATH];
    if (system("python3 -c '' 2> /dev/null")) skip();
    write_text(rollouts, "rollouts.jsonl",
               "{\"prompt_ids\": [1, 2], \"completion_ids\": [3], \"text\": \"abcd\"}\n"
               "{\"prompt_ids\": [1, 2], \"completion_ids\": [3], \"text\": \"ab\"}\n");
    snprintf(reward, sizeof(reward), "length = command python3 -S '%s' plain",
             fixture("../generate/reward_program.py"));
    if (RUN("rewards", with_prompts(reward), rollouts)) fail_msg("%s", said.err);
    assert_says(said.out,
                "length                          1     3.0000     1.4142     2.0000     4.0000       0       0\n");
    snprintf(reward, sizeof(reward), "length = command python3 -S '%s' exit 2",
             fixture("../generate/reward_program.py"));
    if (RUN("rewards", with_prompts(reward), rollouts)) fail_msg("%s", said.err);
    assert_says(said.out,
                "length                          1     4.0000     0.0000     4.0000     4.0000       1       1\n");
    assert_says(said.err, "reward.length: last words");
    assert_says(said.err, "it answered 1 row of step 0, the rewards of the others are null");
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *row, *why;
    } rows[] = {
        {"", " has no rows"},
        {"{\"prompt_ids\": [1]}", "rollouts.jsonl:1: key `completion_ids`"},
        {"{\"prompt_ids\": [1], \"completion_ids\": []}", "completion_ids is empty"},
        {"{\"prompt_ids\": [1], \"completion_ids\": [99999999]}", "completion_ids"},
        {"{\"prompt_ids\": [1], \"completion_ids\": [1], \"columns\": 3}",
         "rollouts.jsonl:1: columns: expected an object"},
        {"{\"prompt_ids\": [1], \"completion_ids\": [1], \"text\": 3}", "text"},
        {"x", "rollouts.jsonl:1"},
    };
    const char *config = with_prompts("any = exact");
    for (int i = 0; i < MT_LEN(rows); i++) {
        write_text(rollouts, "rollouts.jsonl", rows[i].row);
        assert_int_equal(RUN("rewards", config, rollouts), 1);
        if (!strstr(said.err, rows[i].why)) fail_msg("%s: %s", rows[i].row, said.err);
    }
    assert_int_equal(RUN("rewards", process_config(""), rollouts), 1);
    assert_says(said.err, "no rewards: add a section [reward]");
}

int test_score_rollouts(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generated), cmocka_unit_test(environments), cmocka_unit_test(recorded),
        cmocka_unit_test(commands),  cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests_name("score_rollouts", tests, NULL, NULL);
}
