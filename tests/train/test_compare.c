/* test_compare.c - `moetrain compare`: results, settings that differ, the HTML page. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/report/compare.h"

/* Writes a run directory DIR/NAME with 3 steps, two evaluations and the given settings. */
static const char *make_run(const char *dir, const char *name, double loss, const char *settings)
{
    static char path[4][MT_PATH];
    static int next;
    struct err err;
    char text[1024], file[MT_PATH + 16], *run = path[next++ % 4];
    snprintf(run, MT_PATH, "%s/%s", dir, name);
    assert_int_equal(file_make_dirs(run, &err), 0);
    snprintf(text, sizeof(text),
             "{\"event\":\"start\",\"step\":0,\"total_steps\":5}\n{\"event\":\"eval\",\"step\":0,\"loss\":4}\n"
             "{\"event\":\"step\",\"step\":1,\"smooth_loss\":3,\"tokens\":1000,\"ms\":500}\n"
             "{\"event\":\"step\",\"step\":2,\"smooth_loss\":%g,\"tokens\":1000,\"ms\":500}\n"
             "{\"event\":\"eval\",\"step\":2,\"loss\":%g}\n",
             loss, loss);
    snprintf(file, sizeof(file), "%s/metrics.jsonl", run);
    assert_int_equal(file_write_atomic(file, text, (int64_t)strlen(text), &err), 0);
    snprintf(file, sizeof(file), "%s/config.ini", run);
    if (settings) assert_int_equal(file_write_atomic(file, settings, (int64_t)strlen(settings), &err), 0);
    return run;
}

/* The output of compare; the caller frees it with mem_free. */
static char *compared(const char *dir, const char *const *dirs, int n, const char *html)
{
    struct err err;
    char path[MT_PATH];
    int64_t size;
    snprintf(path, sizeof(path), "%s/screen", dir);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    if (compare_runs(dirs, n, html, out, &err)) fail_msg("%s", err.msg);
    fclose(out);
    char *text = file_read(path, 1 << 20, &size, &err);
    assert_non_null(text);
    return text;
}

/* Appends an evaluation on held-out data with this hash to a run's metrics. */
static void evaluate_on(const char *run, const char *hash)
{
    char file[MT_PATH + 16];
    snprintf(file, sizeof(file), "%s/metrics.jsonl", run);
    FILE *f = fopen(file, "a");
    assert_non_null(f);
    fprintf(f, "{\"event\":\"eval\",\"step\":3,\"loss\":2,\"held_out\":\"%s\"}\n", hash);
    assert_int_equal(fclose(f), 0);
}

static void other_held_out_data(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    const char *runs[] = {make_run(dir, "one", 2.5, "[optim]\nlr = 1e-4\n"),
                          make_run(dir, "two", 2.25, "[optim]\nlr = 2e-4\n")};
    for (int same = 1; same >= 0; same--) {
        evaluate_on(runs[0], "00000000000000aa");
        evaluate_on(runs[1], same ? "00000000000000aa" : "00000000000000bb");
        char *text = compared(dir, runs, 2, NULL);
        assert_int_equal(strstr(text, "held-out data differ") == NULL, same);
        mem_free(text);
    }
}

/* A run with a teacher has another loss than one without, or with another alpha. */
static void other_losses(void **state)
{
    static const char *const settings[][2] = {
        {"[optim]\nlr = 1e-4\n", "[distill]\nalpha = 0.5\n"}, /* no teacher: alpha has no effect */
        {"[optim]\nlr = 1e-4\n", "[distill]\nteacher = base\nalpha = 0.5\n"},
        {"[distill]\nteacher = base\nalpha = 0.25\n", "[distill]\nteacher = base\nalpha = 0.5\n"},
        {"[objective]\nkind = grpo\n", "[objective]\nkind = dapo\n"},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(settings); i++) {
        char html_path[MT_PATH];
        struct err err;
        int64_t size;
        const char *dir = scratch_dir();
        const char *runs[] = {make_run(dir, "one", 2.5, settings[i][0]), make_run(dir, "two", 1.25, settings[i][1])};
        snprintf(html_path, sizeof(html_path), "%s/compare.html", dir);
        char *text = compared(dir, runs, 2, html_path), *html = file_read(html_path, 1 << 20, &size, &err);
        assert_non_null(html);
        assert_int_equal(strstr(text, "[objective] differs: these losses do not compare") != NULL, i > 0);
        assert_int_equal(strstr(html, "[objective] differs: these losses do not compare") != NULL, i > 0);
        assert_int_equal(strstr(text, "distill.teacher=none") != NULL, i == 1 || i == 2);
        mem_free(text);
        mem_free(html);
    }
}

static void results_and_settings(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    const char *runs[] = {make_run(dir, "one", 2.5, "[optim]\nlr = 1e-4\n[output]\ndir = x\n"),
                          make_run(dir, "two", 2.25,
                                   "[optim]\nlr = 2e-4\n[data]\ntrain = <a>.jsonl\n"
                                   "[model]\nexpert_weight_format = bf16\n")};
    char html_path[MT_PATH];
    struct err err;
    int64_t size;
    snprintf(html_path, sizeof(html_path), "%s/compare.html", dir);
    char *text = compared(dir, runs, 2, html_path);
    const char *first = strstr(text, runs[0]), *second = strstr(text, runs[1]);
    assert_non_null(first);
    assert_non_null(second);
    assert_non_null(strstr(first, "2 / 5  2.00 k         2.5000          4.0000  2.5000 (2)         2.5000  2,000"));
    assert_non_null(strstr(second, "2.2500 (2)"));
    assert_non_null(strstr(second, "optim.lr                    0.0001 | 0.0002\n"));
    assert_non_null(strstr(second, "data.train                  (empty) | <a>.jsonl\n"));
    assert_non_null(strstr(second, "model.expert_weight_format  auto | bf16\n")); /* the longest key */
    assert_null(strstr(second, "output.dir"));
    assert_null(strstr(second, "lora.r"));
    assert_non_null(strstr(text, html_path)); /* the output names the page */
    char *html = file_read(html_path, 1 << 20, &size, &err);
    assert_non_null(html);
    assert_non_null(strstr(html, "<td>&lt;a&gt;.jsonl"));
    assert_non_null(strstr(html, "<h2>Held-out loss</h2>"));
    assert_null(strstr(html, "<script"));
    mem_free(html);
    mem_free(text);
}

static void what_is_missing(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    struct err err;
    const char *same[] = {make_run(dir, "a", 1, "[optim]\nlr = 1e-4\n"), make_run(dir, "b", 1, "[optim]\nlr = 1e-4\n")};
    char *text = compared(dir, same, 2, NULL);
    assert_non_null(strstr(text, "no difference but output.dir"));
    mem_free(text);
    char long_a[700], long_b[700];
    snprintf(long_a, sizeof(long_a), "[data]\ntrain = %0400d/a.jsonl\n", 0);
    snprintf(long_b, sizeof(long_b), "[data]\ntrain = %0400d/b.jsonl\n", 0);
    const char *ends[] = {make_run(dir, "d", 1, long_a), make_run(dir, "e", 1, long_b)};
    text = compared(dir, ends, 2, NULL);
    assert_non_null(strstr(text, "/a.jsonl | 0"));
    assert_non_null(strstr(text, "/b.jsonl\n"));
    mem_free(text);
    const char *none[] = {same[0], "/no/such"};
    assert_int_equal(compare_runs(none, 2, NULL, stdout, &err), -1);
    assert_non_null(strstr(err.msg, "/no/such: no such directory"));
    assert_int_equal(compare_runs(same, 1, NULL, stdout, &err), -1);
    assert_non_null(strstr(err.msg, "2 to 8"));
    const char *bare[] = {same[0], make_run(dir, "c", 1, NULL)};
    text = compared(dir, bare, 2, NULL);
    assert_non_null(strstr(text, bare[1]));
    mem_free(text);
}

/* --html does not replace a FIFO or a link to one. */
static void page_replaces_only_files(void **state)
{
    (void)state;
    const char *dir = scratch_dir();
    const char *runs[] = {make_run(dir, "f", 1, NULL), make_run(dir, "g", 1, NULL)};
    char names[2][MT_PATH];
    struct err err;
    struct stat st;
    snprintf(names[0], MT_PATH, "%s/pipe", dir);
    snprintf(names[1], MT_PATH, "%s/link", dir);
    assert_int_equal(mkfifo(names[0], 0600), 0);
    assert_int_equal(symlink(names[0], names[1]), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(compare_runs(runs, 2, names[i], stdout, &err), -1);
        assert_non_null(strstr(err.msg, "not a regular file: choose the name of a new file"));
        assert_int_equal(lstat(names[i], &st), 0);
        assert_true(i ? S_ISLNK(st.st_mode) : S_ISFIFO(st.st_mode));
    }
}

/* With eval.best = accuracy the best evaluation has the highest share of right pairs and, among equal shares, the
 * lowest loss. */
static void best_by_accuracy(void **state)
{
    (void)state;
    const char *scratch = scratch_dir(), *dirs[2];
    for (int i = 0; i < 2; i++) {
        char file[MT_PATH + 16];
        dirs[i] = make_run(scratch, i ? "by_loss" : "by_accuracy", 2, NULL);
        snprintf(file, sizeof(file), "%s/metrics.jsonl", dirs[i]);
        FILE *f = fopen(file, "w");
        assert_non_null(f);
        fprintf(f,
                "{\"event\":\"start\",\"step\":0,\"config\":{\"eval.best\":\"%s\"}}\n"
                "{\"event\":\"eval\",\"step\":0,\"loss\":4,\"eval_rewards/accuracies\":0}\n"
                "{\"event\":\"eval\",\"step\":2,\"loss\":3,\"eval_rewards/accuracies\":0.8}\n"
                "{\"event\":\"eval\",\"step\":4,\"loss\":2.5,\"eval_rewards/accuracies\":0.8}\n"
                "{\"event\":\"eval\",\"step\":6,\"loss\":2,\"eval_rewards/accuracies\":0.625}\n"
                "{\"event\":\"stop\",\"step\":6,\"evaluations\":2}\n",
                i ? "loss" : "accuracy");
        assert_int_equal(fclose(f), 0);
    }
    char *text = compared(scratch, dirs, 2, NULL);
    assert_non_null(strstr(text, "2.5000 (4)"));
    assert_non_null(strstr(text, "2.0000 (6)"));
    assert_non_null(strstr(text, "pairs right"));
    assert_non_null(strstr(text, "62.5 %"));
    assert_non_null(strstr(text, "no higher held-out accuracy for 2 evaluations"));
    assert_non_null(strstr(text, "no lower held-out loss for 2 evaluations"));
    mem_free(text);
}

/* Runs of online RL: the table has the mean reward of the last batches, and held-out rewards of evaluations on the same
 * data as the last one. Without such a run there are no columns and plots of rewards. */
static void rewards(void **state)
{
    (void)state;
    const char *scratch = scratch_dir(), *dirs[2];
    char html_path[MT_PATH];
    struct err err;
    int64_t size;
    for (int i = 0; i < 2; i++) {
        char file[MT_PATH + 16];
        dirs[i] = make_run(scratch, i ? "rl" : "sft", 2, "[optim]\nlr = 1e-4\n");
        snprintf(file, sizeof(file), "%s/metrics.jsonl", dirs[i]);
        FILE *f = i ? fopen(file, "w") : NULL;
        for (int step = 1; f && step <= 12; step++)
            fprintf(f, "{\"event\":\"rollouts\",\"step\":%d,\"reward\":%g}\n", step, step < 3 ? -9.0 : step / 4.0);
        for (int step = 0; f && step <= 6; step += 2)
            fprintf(f, "{\"event\":\"eval\",\"step\":%d,\"eval_reward\":%g,\"held_out\":\"%s\"}\n", step,
                    step ? 0.5 - step / 16.0 : 0.75, step ? "bb" : "aa");
        if (f) assert_int_equal(fclose(f), 0);
    }
    snprintf(html_path, sizeof(html_path), "%s/compare.html", scratch);
    char *text = compared(scratch, dirs, 2, html_path), *html = file_read(html_path, 1 << 20, &size, &err);
    assert_non_null(html);
    assert_non_null(
        strstr(text, "reward, last 10 batches  held-out reward first  best reward (at)  held-out reward last"));
    assert_non_null(strstr(text, " 1.8750                 0.3750        0.3750 (2)                0.1250"));
    assert_non_null(strstr(html, "<h2>Held-out reward</h2>"));
    assert_non_null(strstr(html, "<h2>Reward of the training batches</h2>"));
    mem_free(text);
    mem_free(html);
    const char *both[] = {dirs[0], make_run(scratch, "other", 2, NULL)};
    text = compared(scratch, both, 2, html_path);
    html = file_read(html_path, 1 << 20, &size, &err);
    assert_non_null(html);
    assert_null(strstr(text, "reward"));
    assert_null(strstr(html, "eward"));
    mem_free(text);
    mem_free(html);
}

int test_compare(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(results_and_settings),
                                       cmocka_unit_test(other_held_out_data),
                                       cmocka_unit_test(other_losses),
                                       cmocka_unit_test(what_is_missing),
                                       cmocka_unit_test(page_replaces_only_files),
                                       cmocka_unit_test(best_by_accuracy),
                                       cmocka_unit_test(rewards)};
    return cmocka_run_group_tests_name("compare", tests, NULL, NULL);
}
