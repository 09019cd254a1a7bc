/* test_best.c - what evaluations decide: best/, the end by eval.patience; held-out rows of another form. */
#include <stdio.h>
#include <string.h>

#include "data/file.h"
#include "tests/process.h"

/* A rate of 0 learns nothing: no evaluation is lower than that of step 0. */
#define NOTHING "--set", "optim.lr=0", "--set", "eval.every=1"

static void best_is_never_worse_than_the_start(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config, NOTHING), 0);
    assert_says(said.err, "no evaluation had a lower held-out loss than step 0 (");
    assert_false(file_exists(process_output(config, "best")));
    assert_true(file_is_dir(process_output(config, "adapter")));
    config = process_config("");
    assert_int_equal(RUN(config, "--set", "optim.lr=1e-1", "--set", "train.steps=3", "--set", "train.grad_accum=4"), 0);
    assert_says(said.err, "best:        ");
    assert_true(file_is_dir(process_output(config, "best")));
}

static void patience_ends_a_run(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=1"), 0);
    /* one evaluation of two is counted in the checkpoint */
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6", "--set", "eval.patience=2"), 0);
    assert_says(said.err, "eval.patience = 2: the last 2 evaluations had no lower loss than ");
    assert_says(said.err, "stopped after step 2 of 6");
    assert_true(file_is_dir(process_output(config, "checkpoints/step-000002")));
    assert_true(file_is_dir(process_output(config, "adapter")));
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6", "--set", "eval.patience=2"), 0);
    assert_says(said.err, "stopped after step 2 of 6");
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6", "--set", "eval.patience=4"), 0);
    assert_says(said.err, "stopped after step 4 of 6");
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6"), 0);
    assert_true(file_is_dir(process_output(config, "checkpoints/step-000006")));
    assert_int_equal(RUN(config, "--set", "eval.patience=1"), 1);
    assert_says(said.err, "eval.patience = 1 needs evaluations: set eval.every");
}

static void held_out_rows_of_another_form(void **state)
{
    (void)state;
    char path[2][256], sets[2][600];
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof(path[i]), "%s/eval.jsonl", scratch_dir());
        snprintf(sets[i], sizeof(sets[i]), "data.eval=%s", path[i]);
    }
    struct err err;
    static const char answer[] = "{\"prompt\": \"the king\", \"completion\": \" of the house\"}\n";
    static const char body[] = "{\"body\": \"the king of the house\"}\n";
    assert_int_equal(file_write_atomic(path[0], answer, (int64_t)strlen(answer), &err), 0);
    assert_int_equal(file_write_atomic(path[1], body, (int64_t)strlen(body), &err), 0);
    const char *config = process_config("");
    assert_int_equal(RUN("eval", config, "--base", "--set", "data.format=text", "--set", sets[0]), 1);
    assert_int_equal(RUN("eval", config, "--base", "--set", "data.format=text", "--set", sets[0], "--set",
                         "data.eval_format=prompt_completion"),
                     0);
    assert_int_equal(RUN(config, "--set", "data.format=text", "--set", sets[1], "--set", "data.eval_columns=text=body"),
                     0);
    assert_says(said.err, "held out: 1 documents");
    assert_int_equal(RUN(config, "--set", "data.eval=", "--set", "data.eval_format=text"), 1);
    assert_says(said.err, "data.eval, which is not set");
}

int test_best(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(best_is_never_worse_than_the_start),
        cmocka_unit_test(patience_ends_a_run),
        cmocka_unit_test(held_out_rows_of_another_form),
    };
    return cmocka_run_group_tests_name("best", tests, NULL, NULL);
}
