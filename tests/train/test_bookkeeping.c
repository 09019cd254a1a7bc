/* test_bookkeeping.c - what a run counts beside its training: the smoothed loss, the loss that the divergence warning
 * compares with, evaluations without improvement; also the progress that a long search for a plan prints. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/process.h"
#include "train/plan/plan_measure.h"

/* The number after KEY in a text; state.json has reals as strings. */
static double number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    if (!at) fail_msg("%s is not in:\n%s", key, text);
    at += strlen(key);
    return strtod(at + strspn(at, "\": "), NULL);
}

static double in_state(const char *config, const char *step, const char *key)
{
    char name[64], text[1 << 14];
    snprintf(name, sizeof(name), "checkpoints/step-%s/state.json", step);
    process_read(process_output(config, name), text, sizeof(text));
    return number_after(text, key);
}

/* Loss and smoothed loss of every step in metrics.jsonl; returns their number. */
static int read_steps(const char *config, double *loss, double *smooth, int most)
{
    static char text[1 << 16];
    int n = 0;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (!strstr(line, "\"event\":\"step\"")) continue;
        assert_true(n < most);
        loss[n] = number_after(line, "\"loss\":");
        smooth[n++] = number_after(line, "\"smooth_loss\":");
    }
    return n;
}

/* The mean of the first ten losses, then a tenth of each new one. */
static void the_smoothed_loss_is_the_documented_mean(void **state)
{
    (void)state;
    enum { N = 14 };
    double loss[N], smooth[N], sum = 0, want = 0;
    const char *config = process_trained("train.steps=14 optim.lr=1e-1 eval.at_start=no eval.at_end=no");
    assert_int_equal(read_steps(config, loss, smooth, N), N);
    for (int i = 0; i < N; i++) {
        sum += loss[i];
        want = i < 10 ? sum / (i + 1) : 0.9 * want + 0.1 * loss[i];
        assert_close(smooth[i], want, 1e-12);
    }
    assert_close(in_state(config, "000014", "\"smooth_loss\""), want, 1e-12);
}

/* With optim.lr = 1e-1 the evaluation of step 4 is the best. */
#define FALLING "lora.alpha=4 optim.schedule=constant train.grad_accum=2 eval.every=1"

/* An evaluation with a lower loss than all before it starts the count of eval.patience again. */
static void an_improvement_ends_the_count_of_patience(void **state)
{
    (void)state;
    const char *config = process_trained("train.steps=2 optim.lr=0 " FALLING);
    assert_int_equal((int)in_state(config, "000002", "\"n_worse\""), 2);
    if (process_run_sets(config, "train.steps=4 optim.lr=1e-2 " FALLING)) fail_msg("%s", said.err);
    assert_says(said.out, ", best");
    assert_int_equal((int)in_state(config, "000004", "\"n_worse\""), 0);
    assert_int_equal((int)in_state(config, "000004", "\"best_step\""), 4);
}

/* The warning of divergence compares with the loss before the first update, so diverging steps do not raise the
 * reference. */
static void divergence_is_judged_by_the_first_step(void **state)
{
    (void)state;
    enum { N = 12 };
    double loss[N], smooth[N];
    const char *config = process_trained("train.steps=12 optim.lr=1 lora.alpha=64 optim.schedule=constant "
                                         "optim.warmup_ratio=0 eval.at_start=no eval.at_end=no");
    assert_int_equal(read_steps(config, loss, smooth, N), N);
    const double mean = (loss[0] + loss[1] + loss[2]) / 3;
    if (fabs(mean - loss[0]) < 1e-3) fail_msg("this test shows nothing: %g and %g", loss[0], mean);
    assert_close(in_state(config, "000012", "\"first_loss\""), loss[0], 1e-12);
    config = process_trained("train.steps=1 eval.max_batches=1");
    read_steps(config, loss, smooth, N);
    char text[1 << 14];
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    const double held_out = number_after(strstr(text, "\"event\":\"eval\",\"step\":0"), "\"loss\":");
    assert_close(in_state(config, "000001", "\"first_loss\""), fmax(loss[0], held_out), 1e-12);
}

/* When planning takes long, rank 0 prints its progress; a short plan prints nothing. */
static void long_plans_say_so(void **state)
{
    (void)state;
    static const struct {
        double quiet_ms;
        int rank;
        bool says;
    } rows[] = {{0, 0, true}, {0, 1, false}, {1e6, 0, false}};
    char path[MT_PATH], text[1024];
    for (int i = 0; i < MT_LEN(rows); i++) {
        snprintf(path, sizeof(path), "%s/stderr", scratch_dir());
        fflush(NULL);
        const pid_t pid = process_fork();
        if (!pid) {
            struct comm all = {.world = 2, .rank = rows[i].rank};
            const struct parallel par = {.all = &all};
            if (!freopen(path, "w", stderr)) _exit(1);
            plan_quiet_ms = rows[i].quiet_ms;
            plan_log_ms = 0;
            for (int n = 0; n < 3; n++) plan_progress(&(struct plan_request){.par = &par});
            plan_progress_end();
            fflush(stderr);
            _exit(0);
        }
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        process_read(path, text, sizeof(text));
        assert_int_equal(strstr(text, "plan: 3 dry runs of the model so far, 0:00") != NULL, rows[i].says);
        if (!rows[i].says) assert_string_equal(text, "");
    }
}

int test_bookkeeping(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_smoothed_loss_is_the_documented_mean),
        cmocka_unit_test(an_improvement_ends_the_count_of_patience),
        cmocka_unit_test(divergence_is_judged_by_the_first_step),
        cmocka_unit_test(long_plans_say_so),
    };
    return cmocka_run_group_tests_name("bookkeeping", tests, NULL, NULL);
}
