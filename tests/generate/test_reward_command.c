/* test_reward_command.c - rewards of programs: order, failures, bad answers, what they leave behind. */
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/test.h"
#include "train/reward/rewards.h"

static struct config cfg;

/* Opens the rewards; more: further lines of [reward]. */
static struct rewards *begin(const char *mode, const char *more)
{
    char text[8 * MT_PATH];
    struct err err;
    snprintf(text, sizeof(text), "[reward]\nr = command python3 -S \"%s\" %s\n%s",
             fixture("../generate/reward_program.py"), mode, more);
    config_defaults(&cfg);
    if (config_parse(&cfg, text, (int64_t)strlen(text), "run.ini", &err)) fail_msg("%s", err.msg);
    struct rewards *r = rewards_open(&cfg, true, &err);
    if (!r) fail_msg("%s", err.msg);
    return r;
}

static const char letters[] = "abcdefghij";

/* Row i has i % 10 letters. 0, or -1 with an error. */
static int step_of(struct rewards *r, int64_t step, int64_t n, struct reward_results *out, struct err *err)
{
    static const int32_t ids[] = {1, 2, 3};
    if (rewards_begin(r, step, err)) return -1;
    for (int64_t i = 0; i < n; i++) {
        const struct reward_item item = {
            .prompt = "\"the\\nprompt\"",
            .columns = "{\"x\":\n {\"y\": [1, 2.5]}}",
            .answer = {.content = {letters, 0}, .whole = {letters, i % 10}, .ids = ids, .n_ids = i % 4},
            .finish_reason = "stop"};
        if (rewards_submit(r, &item, err)) return -1;
    }
    return rewards_collect(r, out, NULL, err);
}

static void pass(struct rewards *r, int64_t step, int64_t n, struct reward_results *out)
{
    struct err err;
    if (step_of(r, step, n, out, &err)) fail_msg("%s", err.msg);
    assert_int_equal(out->n, n);
}

static int count_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

/* No process is left, running or not reaped, and no descriptor. */
static void end(struct rewards *r, int fds)
{
    rewards_close(r);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    assert_int_equal(count_fds(), fds);
}

static void answers(void **state)
{
    (void)state;
    static const char *const modes[] = {"plain", "reverse", "deaf 2", "noisy"};
    const int fds = count_fds();
    struct reward_results out;
    for (int m = 0; m < MT_LEN(modes); m++) {
        struct rewards *r = begin(modes[m], "r.weight = 0.5\nother = repetition");
        for (int64_t step = 0; step < 3; step++) {
            const int64_t n = step == 1 ? 0 : 23;
            pass(r, step, n, &out);
            for (int64_t i = 0; i < n; i++) {
                assert_true(out.values[2 * i] == (double)(i % 10) && out.values[2 * i + 1] == 0);
                assert_true(out.totals[i] == 0.5 * (double)(i % 10));
            }
            assert_true(!out.nulls[0] && !out.missing[0]);
        }
        end(r, fds);
    }
}

static void many_rows(void **state)
{
    (void)state;
    struct reward_results out;
    const int fds = count_fds();
    struct rewards *r = begin("reverse", "");
    pass(r, 1, 5000, &out);
    for (int64_t i = 0; i < 5000; i++) assert_true(out.totals[i] == (double)(i % 10));
    end(r, fds);
}

static void forms(void **state)
{
    (void)state;
    struct reward_results out;
    const int fds = count_fds();
    struct rewards *r = begin("columns", "");
    pass(r, 7, 6, &out);
    for (int64_t i = 0; i < 6; i++) assert_true(out.totals[i] == 2.5 + 10 + (double)(i % 4) + 7);
    end(r, fds);
    r = begin("bytes", "");
    pass(r, 7, 6, &out);
    for (int64_t i = 0; i < 6; i++) assert_true(out.totals[i] == 0.25);
    end(r, fds);
    r = begin("null 2", "");
    pass(r, 7, 3, &out);
    assert_true(out.totals[0] == 0 && isnan(out.totals[1]) && out.totals[2] == 2);
    assert_true(out.nulls[0] == 1 && out.missing[0] == 0);
    end(r, fds);
    r = begin("metrics", "");
    for (int step = 0; step < 2; step++) {
        pass(r, step, 4, &out);
        assert_int_equal(out.n_metric, 1);
        assert_string_equal(out.metrics[0].name, "r/double");
        assert_true(out.metrics[0].mean == 3);
    }
    end(r, fds);
}

/* Each of two programs answers only when the other has its row too. */
static void at_the_same_time(void **state)
{
    (void)state;
    char more[3 * MT_PATH], mode[3 * MT_PATH], one[MT_PATH], two[MT_PATH];
    struct reward_results out;
    const char *dir = scratch_dir();
    snprintf(one, sizeof(one), "%s/one", dir);
    snprintf(two, sizeof(two), "%s/two", dir);
    snprintf(mode, sizeof(mode), "meet 150 '%s' '%s'", one, two);
    snprintf(more, sizeof(more), "s = command python3 -S '%s' meet 150 '%s' '%s'",
             fixture("../generate/reward_program.py"), two, one);
    const int fds = count_fds();
    struct rewards *r = begin(mode, more);
    pass(r, 1, 200, &out);
    for (int i = 0; i < 400; i++) assert_true(out.values[i] == i / 2 % 10);
    end(r, fds);
}

/* Answers that a program gave before it failed count; other rows of the step are null; the next step has a new process.
 */
static void failures(void **state)
{
    (void)state;
    static const struct {
        const char *mode;
        int64_t answered;
    } rows[] = {{"exit 5", 4}, {"kill 5", 4}, {"half 3", 2}, {"hang 4", 3}};
    struct reward_results out;
    const int fds = count_fds();
    for (int m = 0; m < MT_LEN(rows); m++) {
        struct rewards *r = begin(rows[m].mode, m == 3 ? "timeout_s = 2" : "");
        pass(r, 0, 20, &out);
        for (int64_t i = 0; i < 20; i++)
            assert_true(i < rows[m].answered ? out.totals[i] == (double)i : isnan(out.totals[i]));
        assert_int_equal(out.missing[0], 20 - rows[m].answered);
        pass(r, 1, 2, &out);
        assert_true(out.totals[1] == 1 && !out.missing[0]);
        end(r, fds);
    }
}

/* A program that answers one step and exits loses no row, in any number of steps. */
static void one_step_each(void **state)
{
    (void)state;
    struct reward_results out;
    const int fds = count_fds();
    struct rewards *r = begin("once", "");
    for (int64_t step = 0; step < 5; step++) {
        pass(r, step, 30, &out);
        for (int64_t i = 0; i < 30; i++) assert_true(out.totals[i] == (double)(i % 10));
        usleep(100000);
    }
    end(r, fds);
}

static void third_failure(void **state)
{
    (void)state;
    static const char *const modes[] = {"exit 1", "crash", "hang 1"};
    struct reward_results out;
    struct err err;
    const int fds = count_fds();
    for (int m = 0; m < MT_LEN(modes); m++) {
        struct rewards *r = begin(modes[m], m == 2 ? "timeout_s = 0.3" : "");
        int step = 0;
        while (step < 9 && !step_of(r, step, 3, &out, &err)) step++;
        assert_true(step <= 2);
        assert_non_null(strstr(err.msg, "the 3rd failure in a row"));
        assert_non_null(strstr(err.msg, m == 0   ? "reward.r ended (exit status 3)"
                                        : m == 1 ? "reward.r ended (exit status 1)"
                                                 : "reward.r gave no answer for 0.3 s"));
        end(r, fds);
    }
}

static void bad_answers(void **state)
{
    (void)state;
    static const struct {
        const char *line, *why;
    } rows[] = {
        {"garbage", "line 2 of its output, garbage: answer"},
        {"[1]", "expected an object"},
        {"{}", "it has no \"id\" of a row"},
        {"{\"id\": \"1\", \"reward\": 1}", "it has no \"id\" of a row"},
        {"{\"id\": -1, \"reward\": 1}", "it has no \"id\" of a row"},
        {"{\"id\": ID}", "it has no \"reward\""},
        {"{\"id\": ID, \"reward\": \"1\"}", "\"reward\": expected a number or null"},
        {"{\"id\": ID, \"reward\": true}", "\"reward\": expected a number or null"},
        {"{\"id\": ID, \"reward\": [1]}", "\"reward\": expected a number or null"},
        {"{\"id\": ID, \"reward\": NaN}", "\"reward\" is not finite: correct it, or set reward.on_nan = null"},
        {"{\"id\": ID, \"reward\": -Infinity}", "\"reward\" is not finite"},
        {"{\"id\": 99, \"reward\": 1}", "id 99 is of no row of step 4"},
        {"{\"id\": 0, \"reward\": 1}", "id 0 was answered before"},
        {"{\"id\": ID, \"reward\": 1, \"metrics\": 3}", "\"metrics\": expected an object"},
        {"{\"id\": ID, \"reward\": 1, \"metrics\": {\"a\": \"b\"}}", "\"metrics\": \"a\": expected a number"},
        {"{\"id\": ID, \"reward\": 1} x", "answer"},
        {"{\"id\": ID, \"rewrd\": 1}",
         "unknown key \"rewrd\" (did you mean \"reward\"?); the keys are id, reward, metrics"},
        {"{\"id\": ID, \"reward\": null, \"explanation\": 1}",
         "unknown key \"explanation\"; the keys are id, reward, metrics"},
    };
    char mode[512];
    struct reward_results out;
    struct err err;
    const int fds = count_fds();
    for (int m = 0; m < MT_LEN(rows); m++) {
        snprintf(mode, sizeof(mode), "say 2 '%s'", rows[m].line);
        struct rewards *r = begin(mode, "");
        assert_int_equal(step_of(r, 4, 3, &out, &err), -1);
        if (!strstr(err.msg, rows[m].why)) fail_msg("%s: %s", rows[m].line, err.msg);
        assert_non_null(strstr(err.msg, "reward.r: line 2 of its output"));
        end(r, fds);
    }
    struct rewards *r = begin("twice", ""); /* a second answer after the step is complete */
    pass(r, 0, 3, &out);
    usleep(500000);
    assert_int_equal(step_of(r, 1, 3, &out, &err), -1);
    assert_non_null(strstr(err.msg, "id 0 is of no row of step 1"));
    end(r, fds);
    r = begin("say 5 '{\"id\": 1, \"reward\": 1}'", ""); /* an id of the step before */
    pass(r, 0, 3, &out);
    assert_int_equal(step_of(r, 1, 3, &out, &err), -1);
    assert_non_null(strstr(err.msg, "id 1 is of no row of step 1"));
    end(r, fds);
    r = begin("long", "");
    assert_int_equal(step_of(r, 4, 3, &out, &err), -1);
    assert_string_equal(err.msg, "reward.r: line 1 of its output is longer than 16777216 bytes");
    end(r, fds);
    r = begin("say 2 '{\"id\": ID, \"reward\": NaN}'", "on_nan = null");
    pass(r, 0, 3, &out);
    assert_true(isnan(out.totals[1]) && out.totals[2] == 2 && out.nulls[0] == 1 && !out.missing[0]);
    end(r, fds);
}

/* Whether the process runs. A zombie, which only waits for init to reap it, does not. */
static bool runs(const char *pid)
{
    char path[64], state = 'Z';
    snprintf(path, sizeof(path), "/proc/%.16s/stat", pid);
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    if (f) fclose(f);
    return state != 'Z';
}

/* Processes that the command started are in its process group: they are ended with it. */
static void its_children(void **state)
{
    (void)state;
    char mode[MT_PATH], path[MT_PATH], pid[32];
    struct reward_results out;
    struct err err;
    int64_t size;
    const int fds = count_fds();
    snprintf(path, sizeof(path), "%s/pid", scratch_dir());
    snprintf(mode, sizeof(mode), "child 2 '%s'", path);
    struct rewards *r = begin(mode, "");
    const double start = clock_ms();
    pass(r, 0, 5, &out); /* the child keeps the pipe open */
    assert_true(clock_ms() - start < 5000);
    assert_true(out.totals[0] == 0 && out.missing[0] == 4);
    char *text = file_read(path, 32, &size, &err);
    assert_non_null(text);
    snprintf(pid, sizeof(pid), "%s", text);
    mem_free(text);
    for (int i = 0; i < 100 && runs(pid); i++) usleep(10000);
    assert_false(runs(pid));
    end(r, fds);
    r = begin("stay", ""); /* the command goes on after the end of its input */
    pass(r, 0, 5, &out);
    end(r, fds);
}

static void no_program(void **state)
{
    (void)state;
    static const char text[] = "[reward]\nr = command ./no-such-program x\n";
    struct err err;
    const int fds = count_fds();
    config_defaults(&cfg);
    assert_int_equal(config_parse(&cfg, text, (int64_t)strlen(text), "run.ini", &err), 0);
    struct rewards *silent = rewards_open(&cfg, false, &err); /* starts no process */
    assert_non_null(silent);
    assert_int_equal(rewards_count(silent), 1);
    rewards_close(silent);
    assert_null(rewards_open(&cfg, true, &err));
    assert_string_equal(err.msg,
                        "reward.r: ./no-such-program cannot be started: No such file or directory: check its path, "
                        "which is from the current directory; {here}/ is the folder of the configuration");
    snprintf(cfg.reward.NAME, sizeof(cfg.reward.NAME), "r=command pythn3 a.py");
    assert_null(rewards_open(&cfg, true, &err));
    assert_string_equal(err.msg,
                        "reward.r: pythn3 cannot be started: No such file or directory: check its spelling; no "
                        "folder of PATH has it");
    end(NULL, fds);
}

/* The script of an interpreter is looked for before the run. */
static void no_script(void **state)
{
    (void)state;
    char text[256];
    struct err err;
    const int fds = count_fds();
    static const struct {
        const char *command;
        bool refused;
    } scripts[] = {{"python3 ./no-such.py 1", true},
                   {"/usr/bin/env ./no-such.py", false},
                   {"python3 -S -u ./no-such.py", true},
                   {"sh ./no-such.sh", true},
                   {"sh -c ./no-such.sh", false},
                   {"python3 -c 0 ./no-such.py", false},
                   {"python3 -m json.tool ./no-such.py", false}};
    for (int i = 0; i < MT_LEN(scripts); i++) {
        snprintf(text, sizeof(text), "[reward]\nr = command %s\n", scripts[i].command);
        config_defaults(&cfg);
        if (config_parse(&cfg, text, (int64_t)strlen(text), "run.ini", &err)) fail_msg("%s", err.msg);
        struct rewards *r = rewards_open(&cfg, true, &err);
        assert_int_equal(!r, scripts[i].refused);
        if (!r && !strstr(err.msg, "reward.r: ./no-such.")) fail_msg("%s", err.msg);
        rewards_close(r);
    }
    end(NULL, fds);
}

int test_reward_command(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers),          cmocka_unit_test(many_rows),   cmocka_unit_test(forms),
        cmocka_unit_test(at_the_same_time), cmocka_unit_test(failures),    cmocka_unit_test(one_step_each),
        cmocka_unit_test(third_failure),    cmocka_unit_test(bad_answers), cmocka_unit_test(its_children),
        cmocka_unit_test(no_program),       cmocka_unit_test(no_script),
    };
    if (system("python3 -c '' 2> /dev/null")) {
        print_message("skip: no python3, which tests/generate/reward_program.py needs\n");
        return 0;
    }
    return cmocka_run_group_tests_name("reward_command", tests, NULL, NULL);
}
