/* test_best.c - best/ and eval.patience; held-out rows of another format than the training rows. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "train/adapter/peft.h"
#include "train/report/history.h"

/* With a learning rate of 0, no evaluation has a lower loss than that of step 0. */
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
    /* the checkpoint has one evaluation without improvement; patience is two */
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6", "--set", "eval.patience=2"), 0);
    assert_says(said.err, "eval.patience = 2: the last 2 evaluations had no lower loss than ");
    assert_says(said.err, "stopped after step 2 of 6");
    assert_true(file_is_dir(process_output(config, "checkpoints/step-000002")));
    assert_true(file_is_dir(process_output(config, "adapter")));
    char page[1 << 16], out[MT_PATH];
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_says(page, "<span>stopped early: no lower held-out loss for 2 evaluations, none skipped</span>");
    snprintf(out, sizeof(out), "%s", process_output(config, ""));
    assert_int_equal(RUN("compare", out, out), 0);
    assert_says(said.out, "2 / 6, stopped early");
    assert_says(said.out, ": stopped early: no lower held-out loss for 2 evaluations\n");
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6", "--set", "eval.patience=2"), 0);
    assert_says(said.err, "stopped after step 2 of 6");
    assert_int_equal(RUN("compare", out, out), 0);
    assert_says(said.out, ": stopped early: no lower held-out loss for 2 evaluations\n");
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6", "--set", "eval.patience=4"), 0);
    assert_says(said.err, "stopped after step 4 of 6");
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_says(page, "no lower held-out loss for 4 evaluations");
    assert_int_equal(RUN(config, NOTHING, "--set", "train.steps=6"), 0);
    assert_true(file_is_dir(process_output(config, "checkpoints/step-000006")));
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_null(strstr(page, "stopped early"));
    /* losses of other held-out data do not count, also before the first evaluation */
    assert_int_equal(RUN(config, "--set", "optim.lr=0", "--set", "eval.every=4", "--set", "eval.max_batches=1", "--set",
                         "train.steps=7", "--set", "eval.patience=2"),
                     0);
    assert_true(file_is_dir(process_output(config, "checkpoints/step-000007")));
    assert_int_equal(RUN(config, "--set", "eval.patience=1"), 1);
    assert_says(said.err, "eval.patience = 1 needs evaluations: set eval.every");
    assert_int_equal(RUN(config, "--set", "eval.patience=1", "--set", "eval.every=1", "--set", "data.eval=", "--set",
                         "eval.prompts=prompts.jsonl"),
                     1);
    assert_says(said.err, "eval.patience = 1 needs a held-out loss: set data.eval or data.eval_split");
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
    assert_says(said.err, "held out: 1 document,");
    assert_int_equal(RUN(config, "--set", "data.eval=", "--set", "data.eval_format=text"), 1);
    assert_says(said.err, "need data.eval: set it");
}

/* best/ ignores losses of other held-out data. Without an evaluation of step 0, or after the held-out data changed, the
 * first evaluation is the best. */
static void best_ignores_losses_of_other_data(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config, NOTHING, "--set", "eval.at_start=no"), 0);
    assert_says(said.out, " tokens, first evaluation, nothing to compare)");
    assert_null(strstr(said.out, " tokens, best"));
    assert_says(said.err, "at step 1, the lowest of the evaluations from step 1 on; step 0 was not evaluated");
    config = process_config("");
    assert_int_equal(RUN(config, "--set", "eval.every=1", "--set", "optim.lr=0"), 0);
    assert_int_equal(RUN(config, "--set", "eval.every=1", "--set", "optim.lr=0", "--set", "train.steps=4", "--set",
                         "eval.max_batches=1"),
                     0);
    assert_says(said.err, "losses are not compared with those up to step 2");
    assert_says(said.err,
                "the lowest of the evaluations from step 2 on; step 0 was not evaluated on this held-out data");
    struct history h;
    struct err err;
    if (history_read(&h, process_output(config, "."), &err)) fail_msg("%s", err.msg);
    assert_int_equal(h.eval_loss.n, 6); /* steps 0, 1, 2 and, of fewer rows, 2, 3, 4 */
    assert_int_equal(h.first_eval, 3);
    h.eval_loss.v[0] = 0; /* a lower loss, but on other rows */
    assert_int_equal(history_best(&h), 3);
    history_free(&h);
    char page[1 << 16];
    process_read(process_output(config, "report.html"), page, sizeof(page));
    assert_says(page, "<td>other held-out data</tr>");
}

static void a_loss_that_is_not_finite(void **state)
{
    (void)state;
    const char *config = process_config("[optim]\nlr = 1\nweight_decay = 10\nclip_norm = 0\nschedule = constant\n");
    assert_int_equal(RUN(config, "--set", "train.steps=40", "--set", "train.max_nonfinite=100", "--set",
                         "lora.alpha=1e6", "--set", "eval.every=20"),
                     0);
    assert_says(said.out, "eval at step 40: loss nan  perplexity nan");
    assert_null(strstr(said.out, "-nan"));
    assert_says(said.err, "warning: the held-out loss at step 40 is not finite: the adapters have diverged");
    char text[1 << 16];
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    assert_null(strstr(text, ":nan")); /* names of files may contain "nan" */
    assert_null(strstr(text, ":-nan"));
    assert_int_equal(RUN("eval", config), 0);
    assert_says(said.err, "loss nan, perplexity nan");
    assert_says(said.err, "warning: the loss is not finite: the adapter has diverged");
    assert_says(said.out, "null");
}

/* Every evaluation has a lower loss than the one before; checkpoints of steps 2 and 4. */
#define BETTER                                                                                                         \
    "lora.alpha=4 optim.schedule=constant train.grad_accum=2 output.save_every=2 eval.every=1 eval.at_start=no "       \
    "train.steps=4 "

static void delete (const char *config, const char *name)
{
    struct err err;
    if (file_remove_tree(process_output(config, name), &err)) fail_msg("%s", err.msg);
}

/* As after a kill between the evaluation of step 4 and its checkpoint. */
static const char *killed_after_evaluation(void)
{
    const char *config = process_trained(BETTER "optim.lr=1e-1");
    assert_int_equal(peft_step(process_output(config, "best")), 4);
    delete (config, "checkpoints/step-000004");
    return config;
}

/* A continued run takes best/ from its checkpoint. Whether the later best/ of the killed run appears again depends on
 * the run's settings. */
static void a_continued_run_has_its_own_best(void **state)
{
    (void)state;
    static const char *const same[] = {ADAPTER, "best/adapter_model.safetensors",
                                       "checkpoints/step-000002/best/adapter_model.safetensors",
                                       "checkpoints/step-000004/state.json"};
    const char *whole = process_trained(BETTER "optim.lr=1e-1"), *config = killed_after_evaluation();
    if (process_run_sets(config, BETTER "optim.lr=1e-1")) fail_msg("%s", said.err);
    assert_says(said.err, "this run continues from step 2: moved best/, of a later step, to ");
    for (int i = 0; i < MT_LEN(same); i++) assert_same_output(config, whole, same[i]);

    config = killed_after_evaluation();
    if (process_run_sets(config, BETTER "optim.lr=0")) fail_msg("%s", said.err);
    const char *line = strstr(said.err, "best:        "), *loss = line ? strstr(line, "held-out loss ") : NULL;
    char text[32];
    if (!loss || !strstr(line, " at step 2,")) fail_msg("%s", said.err);
    snprintf(text, sizeof(text), "loss %.7s,", loss + strlen("held-out loss "));
    assert_int_equal(peft_step(process_output(config, "best")), 2);
    assert_same_file(process_output(config, "best/adapter_model.safetensors"),
                     process_output(whole, "checkpoints/step-000002/best/adapter_model.safetensors"));
    assert_int_equal(peft_step(process_output(config, "archive-1/best")), 4);
    assert_int_equal(RUN("eval", config, "--adapter", process_output(config, "best")), 0);
    assert_says(said.err, text);
}

/* A finished run keeps its best/ when it is started once without held-out data. */
static void nothing_to_evaluate(void **state)
{
    (void)state;
    const char *config = process_trained(BETTER "optim.lr=1e-1 train.steps=3");
    assert_int_equal(peft_step(process_output(config, "best")), 3);
    if (process_run_sets(config, BETTER "optim.lr=1e-1 train.steps=3 eval.every=0 eval.at_end=no data.eval="))
        fail_msg("%s", said.err);
    assert_says(said.err, "this run is complete");
    if (process_run_sets(config, BETTER "optim.lr=0 train.steps=4")) fail_msg("%s", said.err);
    assert_int_equal(peft_step(process_output(config, "best")), 3);
    delete (config, "best"); /* no step is left, so no evaluation writes best/ again */
    if (process_run_sets(config, BETTER "optim.lr=0 train.steps=4")) fail_msg("%s", said.err);
    assert_says(said.err, " was at step 3, and that adapter was moved or deleted");
    assert_null(strstr(said.err, "writes best/ again"));
}

/* Checkpoints 3, 4 and 5 refer to the best/ of step 3; only the newest of the three holds its files. */
static void the_best_is_in_the_newest_checkpoint(void **state)
{
    (void)state;
    char from[MT_PATH];
    const char *config = process_trained(BETTER "optim.lr=1e-1 train.steps=6 eval.every=3 output.save_every=1 "
                                                "output.keep=0");
    assert_int_equal(peft_step(process_output(config, "best")), 6);
    assert_int_equal(peft_step(process_output(config, "checkpoints/step-000005/best")), 3);
    snprintf(from, sizeof(from), BETTER "optim.lr=0 train.steps=5 eval.every=0 eval.at_end=no train.resume=%s",
             process_output(config, "checkpoints/step-000004"));
    if (process_run_sets(config, from)) fail_msg("%s", said.err);
    assert_int_equal(peft_step(process_output(config, "best")), 3);
    assert_int_equal(peft_step(process_output(config, "archive-1/best")), 6);
    assert_false(file_exists(process_output(config, "archive-1/checkpoints/step-000005/best")));
    /* the best/ of the checkpoint is missing: the search starts again with an evaluation of the checkpoint */
    config = killed_after_evaluation();
    delete (config, "checkpoints/step-000002/best");
    if (process_run_sets(config, BETTER "optim.lr=0")) fail_msg("%s", said.err);
    assert_says(said.out, "eval at step 2: ");
    assert_says(said.err, "the lowest of the evaluations from step 2 on");
    assert_int_equal(peft_step(process_output(config, "best")), 2);
}

int test_best(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(best_is_never_worse_than_the_start),
        cmocka_unit_test(patience_ends_a_run),
        cmocka_unit_test(best_ignores_losses_of_other_data),
        cmocka_unit_test(a_loss_that_is_not_finite),
        cmocka_unit_test(held_out_rows_of_another_form),
        cmocka_unit_test(a_continued_run_has_its_own_best),
        cmocka_unit_test(nothing_to_evaluate),
        cmocka_unit_test(the_best_is_in_the_newest_checkpoint),
    };
    return cmocka_run_group_tests_name("best", tests, NULL, NULL);
}
