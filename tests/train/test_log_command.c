/* test_log_command.c - log.command: a process that reads every line, ends early, reads nothing or cannot start; the
 * scripts for W&B and MLflow with stubs of these packages. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "train/report/metrics.h"

/* ---- with metrics alone */

static void wait_ms(long ms) { nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL); }

struct writer {
    struct metrics m;
    char path[MT_PATH], copy[MT_PATH], command[2 * MT_PATH];
};

/* command: with the path of a file for its output in place of %s. */
static void begin(struct writer *w, const char *command)
{
    const char *dir = scratch_dir();
    struct err err;
    snprintf(w->path, sizeof(w->path), "%s/metrics.jsonl", dir);
    snprintf(w->copy, sizeof(w->copy), "%s/copy", dir);
    const char *at = strstr(command, "%s");
    snprintf(w->command, sizeof(w->command), "%.*s%s%s", (int)(at ? at - command : (long)strlen(command)), command,
             at ? w->copy : "", at ? at + 2 : "");
    if (metrics_open(&w->m, dir, NULL, &err)) fail_msg("%s", err.msg);
    if (metrics_command(&w->m, &(struct log_command_run){w->command, "", dir, false}, &err)) fail_msg("%s", err.msg);
}

static void put_steps(struct writer *w, int64_t n)
{
    for (int64_t i = 1; i <= n; i++)
        metrics_step(&w->m, &(struct step_metrics){.step = i, .total_steps = n, .ms = 1}, false);
}

static int64_t lines_of(const char *path)
{
    struct err err;
    int64_t size, n = 0;
    char *text = file_read(path, 1 << 26, &size, &err);
    if (!text) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < size; i++) n += text[i] == '\n';
    mem_free(text);
    return n;
}

/* More lines than a pipe holds, read at any speed. */
static void every_line_arrives(void **state)
{
    (void)state;
    static const char *const commands[] = {"cat > %s", "sleep 0.3 && cat > %s", "dd bs=7 of=%s 2> /dev/null"};
    struct writer *w = test_malloc(sizeof(*w));
    struct err why;
    for (int i = 0; i < MT_LEN(commands); i++) {
        begin(w, commands[i]);
        put_steps(w, 2000);
        if (log_command_close(&w->m.command, &why)) fail_msg("%s", why.msg);
        assert_int_equal(metrics_close(&w->m, &why), 0);
        assert_int_equal(lines_of(w->path), 2000);
        assert_same_file(w->path, w->copy);
    }
    test_free(w);
}

/* When the process ends, the run gets one error with its exit status, and no SIGPIPE. */
static void a_process_may_end(void **state)
{
    (void)state;
    struct writer *w = test_malloc(sizeof(*w));
    struct err why;
    begin(w, "head -1 > %s && exit 3");
    metrics_step(&w->m, &(struct step_metrics){.step = 1, .total_steps = 9, .ms = 1}, false);
    int told = 0;
    for (int i = 0; i < 400 && !told; i++) {
        fputs("{\"event\":\"x\",\"step\":1}\n", w->m.jsonl);
        told = log_command_send(&w->m.command, &why) != 0;
        wait_ms(10);
    }
    assert_true(told);
    assert_says(why.msg, "log.command ended before the run (exit status 3): it gets no further lines");
    put_steps(w, 10);
    assert_int_equal(log_command_send(&w->m.command, &why), 0);
    assert_int_equal(log_command_close(&w->m.command, &why), 0);
    assert_int_equal(metrics_close(&w->m, &why), 0);
    assert_int_equal(lines_of(w->copy), 1);
    test_free(w);
}

/* When the process does not read, the run gets one error and continues. After the run, moetrain ends the process and
 * its child processes within a bounded time. */
static void a_process_may_block(void **state)
{
    (void)state;
    struct writer *w = test_malloc(sizeof(*w));
    struct err why;
    begin(w, "trap '' TERM && sleep 1000 | sleep 1000");
    put_steps(w, 2000);
    w->m.command.slow_ms = 1;
    w->m.command.end_ms = 200;
    wait_ms(5);
    assert_int_equal(log_command_send(&w->m.command, &why), -1);
    assert_says(why.msg, "has not read its lines for 0 s: the run goes on");
    put_steps(w, 2000);
    assert_int_equal(log_command_send(&w->m.command, &why), 0);
    const double start = clock_ms();
    assert_int_equal(log_command_close(&w->m.command, &why), -1);
    assert_true(clock_ms() - start < 15e3);
    assert_says(why.msg, "with lines that it had not read; metrics.jsonl has all lines");
    assert_int_equal(metrics_close(&w->m, &why), 0);
    assert_int_equal(lines_of(w->path), 4000);
    test_free(w);
}

/* ---- with runs */

static void runs_and_their_continuation(void **state)
{
    (void)state;
    char out[MT_PATH], more[4 * MT_PATH], text[512];
    snprintf(out, sizeof(out), "%s", scratch_dir());
    snprintf(more, sizeof(more),
             "[log]\nname = first try\ncommand = echo \"$MOETRAIN_RUN_NAME $MOETRAIN_RESUMED\" >> %s/env && tee -a "
             "%s/lines\n",
             out, out);
    const char *config = process_config(more);
    char lines[MT_PATH + 8], env[MT_PATH + 8];
    snprintf(lines, sizeof(lines), "%s/lines", out);
    snprintf(env, sizeof(env), "%s/env", out);
    if (RUN(config)) fail_msg("%s", said.err);
    assert_null(strstr(said.out, "\"event\""));
    assert_says(said.err, "{\"event\":\"start\",\"step\":0,");
    assert_says(said.err, "\"name\":\"first try\",");
    assert_says(said.err, "\"config\":{\"model.path\":");
    assert_same_file(lines, process_output(config, "metrics.jsonl"));
    if (RUN(config, "--set", "train.steps=3", "--set", "log.name=second")) fail_msg("%s", said.err);
    assert_same_file(lines, process_output(config, "metrics.jsonl")); /* a resumed file only grows here */
    process_read(env, text, sizeof(text));
    assert_string_equal(text, "first try 0\nsecond 1\n");
    process_read(process_output(config, "report.html"), said.out, sizeof(said.out));
    assert_says(said.out, "<title>moetrain: second</title>");
}

static void a_command_that_fails(void **state)
{
    (void)state;
    const char *config = process_config("[log]\ncommand = no-such-command-here\n"), *plain = process_config("");
    if (RUN(config) || RUN(plain)) fail_msg("%s", said.err);
    assert_same_output(config, plain, ADAPTER);
    if (RUN(config, "--set", "train.steps=3")) fail_msg("%s", said.err);
    assert_says(said.err, "warning: log.command ");
    assert_says(said.err, "(exit status 127)");
}

/* ---- the scripts */

static const char wandb_stub[] = "import json, os, sys\n"
                                 "class Run:\n"
                                 "    def define_metric(self, *a, **k): put('define', a, k)\n"
                                 "    def log(self, values): put('log', values)\n"
                                 "    def finish(self): put('finish')\n"
                                 "def put(*what): print(json.dumps(what), file=open(os.environ['CALLS'], 'a'))\n"
                                 "def init(**k):\n"
                                 "    k['config'] = k['config']['config']['lora.r']\n"
                                 "    put('init', k)\n"
                                 "    return Run()\n";
static const char mlflow_stub[] =
    "import json, os, types\n"
    "def put(*what): print(json.dumps(what), file=open(os.environ['CALLS'], 'a'))\n"
    "class Run:\n"
    "    def __init__(self, id): self.info = types.SimpleNamespace(run_id=id)\n"
    "    def __enter__(self): return self\n"
    "    def __exit__(self, *a): put('end')\n"
    "def start_run(run_id=None, run_name=None):\n"
    "    put('init', {'name': run_name, 'id': run_id or 'abc'})\n"
    "    return Run(run_id or 'abc')\n"
    "def set_experiment(name): put('experiment', name)\n"
    "def log_params(p): assert all(p.values()) and len(p) <= 100; put('params', p.get('lora.r'))\n"
    "def set_tags(t): put('tags', list(t))\n"
    "def log_metrics(values, step): put('log', {'step': step, **values})\n";

/* Two runs, the second continues the first: they have one id, and every loss is sent. */
static void run_script(const char *script, const char *module, const char *stub)
{
    const char *dir = scratch_dir(), *here = fixture("../../configs");
    char path[MT_PATH], more[3 * MT_PATH], calls[1 << 14], id[2][64];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s.py", dir, module);
    assert_int_equal(file_write_atomic(path, stub, (int64_t)strlen(stub), &err), 0);
    snprintf(more, sizeof(more), "[log]\nname = mine\ncommand = PYTHONPATH=%s CALLS=%s/calls python3 %s/%s\n", dir, dir,
             here, script);
    const char *config = process_config(more);
    if (RUN(config) || RUN(config, "--set", "train.steps=3")) fail_msg("%s", said.err);
    assert_null(strstr(said.err, "warning: log.command"));
    snprintf(path, sizeof(path), "%s/calls", dir);
    process_read(path, calls, sizeof(calls));
    const char *first = strstr(calls, "[\"init\""), *second = first ? strstr(first + 1, "[\"init\"") : NULL;
    if (!second) fail_msg("%s", calls);
    for (int i = 0; i < 2; i++) {
        const char *at = strstr(i ? second : first, "\"id\": \"");
        assert_true(at && sscanf(at, "\"id\": \"%63[^\"]", id[i]) == 1);
    }
    assert_string_equal(id[0], id[1]);
    assert_says(first, "\"name\": \"mine\"");
    for (int step = 1; step <= 3; step++) {
        snprintf(path, sizeof(path), "[\"log\", {\"step\": %d, \"train/loss\": ", step);
        assert_says(calls, path);
    }
    assert_says(calls, "\"train/tokens_per_second\": ");
    assert_says(calls, "\"train/lr\": ");
    assert_says(calls, "[\"log\", {\"step\": 0, \"eval/loss\": ");
    assert_says(calls, "\"train/labels\": ");
}

/* Numbers of online RL arrive too; texts, lists, null and events without numbers of a step do not. */
static void send_rollouts(const char *script, const char *module, const char *stub)
{
    static const char lines[] = "{\"event\":\"start\",\"step\":0,\"model\":\"m\",\"data\":\"d\",\"device\":\"cpu\","
                                "\"version\":\"1\",\"config\":{\"lora.r\":\"8\",\"log.name\":\"\"}}\n"
                                "{\"event\":\"rollouts\",\"step\":0,\"reward\":0.5,\"rewards/right/mean\":0.25,"
                                "\"completions/mean_length\":null,\"rows\":8}\n"
                                "{\"event\":\"eval\",\"step\":2,\"eval_reward\":0.75,\"best\":true}\n"
                                "{\"event\":\"experts\",\"step\":2,\"counts\":[[1,2]]}\n";
    const char *dir = scratch_dir(), *here = fixture("../../configs");
    char path[MT_PATH], command[5 * MT_PATH], calls[4096];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s.py", dir, module);
    assert_int_equal(file_write_atomic(path, stub, (int64_t)strlen(stub), &err), 0);
    assert_int_equal(file_write_in(dir, "lines", lines, (int64_t)strlen(lines), &err), 0);
    snprintf(command, sizeof(command),
             "MOETRAIN_OUTPUT_DIR=%s MOETRAIN_RUN_NAME=x MOETRAIN_RESUMED=0 PYTHONPATH=%s CALLS=%s/calls python3 "
             "%s/%s < %s/lines",
             dir, dir, dir, here, script, dir);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof(path), "%s/calls", dir);
    process_read(path, calls, sizeof(calls));
    assert_says(calls, "[\"log\", {\"step\": 0, \"rollouts/reward\": 0.5, \"rollouts/rewards/right/mean\": 0.25, "
                       "\"rollouts/rows\": 8}]\n[\"log\", {\"step\": 2, \"eval/eval_reward\": 0.75}]\n");
    assert_null(strstr(calls, "counts"));
}

static void scripts(void **state)
{
    (void)state;
    if (system("python3 -c '' 2> /dev/null")) {
        print_message("skip: no python3, which the scripts need\n");
        skip();
    }
    run_script("log_wandb.py", "wandb", wandb_stub);
    run_script("log_mlflow.py", "mlflow", mlflow_stub);
    send_rollouts("log_wandb.py", "wandb", wandb_stub);
    send_rollouts("log_mlflow.py", "mlflow", mlflow_stub);
}

int test_log_command(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_line_arrives),   cmocka_unit_test(a_process_may_end),
        cmocka_unit_test(a_process_may_block),  cmocka_unit_test(runs_and_their_continuation),
        cmocka_unit_test(a_command_that_fails), cmocka_unit_test(scripts),
    };
    return cmocka_run_group_tests_name("log_command", tests, NULL, NULL);
}
