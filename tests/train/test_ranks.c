/* test_ranks.c - runs of several ranks on the CPU: they train like one process, resume with any number of ranks, stop
 * together, and refuse different settings. */
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/launch/launch.h"
#include "tests/process.h"

/* Every step has four micro-batches; dropout, noise and auxiliary loss differ between them. A and B have different
 * learning rates. */
static const char settings[] = "[parallel]\ncpu_ranks = %d\nzero = %s\n[optim]\nschedule = constant\nwarmup_ratio = 0\n"
                               "lr_ratio_b = 4\n[eval]\nevery = 2\n";
#define JOB                                                                                                            \
    "--set", "train.grad_accum=4", "--set", "train.neftune_alpha=5", "--set", "lora.dropout=0.1", "--set",             \
        "train.aux_loss_coef=0.1", "--set", "output.save_every=2"

static const char *config_of(int ranks, bool zero)
{
    char more[512];
    snprintf(more, sizeof(more), settings, ranks, zero ? "yes" : "no");
    return process_config(more);
}

static void train(const char *config, const char *steps)
{
    if (RUN(config, JOB, "--set", steps)) fail_msg("training failed:\n%s", said.err);
}

static const char *trained(int ranks, bool zero)
{
    const char *config = config_of(ranks, zero);
    train(config, "train.steps=4");
    return config;
}

/* With one micro-batch each, the ranks' gradients are added in the same order as in one process. */
static void test_same_training(void **state)
{
    (void)state;
    const char *one = trained(1, false), *two = trained(2, false), *four = trained(4, false);
    assert_same_output(one, four, ADAPTER);
    assert_same_output(one, four, "checkpoints/step-000004/optimizer.safetensors");
    assert_true(adapter_error(one, two) < 1e-4);
    const char *shared = trained(2, true);
    assert_same_output(two, shared, ADAPTER);
    assert_same_output(two, shared, "checkpoints/step-000004/optimizer.safetensors");
}

/* The evaluation is divided too: the same numbers with any number of ranks, printed once. */
static void test_eval(void **state)
{
    (void)state;
    static char one[sizeof(said.out)];
    assert_int_equal(RUN("eval", "--base", config_of(1, false)), 0);
    memcpy(one, said.out, sizeof(one));
    assert_int_equal(RUN("eval", "--base", config_of(3, false)), 0);
    assert_string_equal(said.out, one);
}

/* Resumes with another number of ranks, with and without parallel.zero. */
static void test_resume(void **state)
{
    (void)state;
    static const struct {
        int first, then;
        bool first_zero, then_zero;
    } rows[] = {{4, 1, true, false}, {1, 4, false, true}};
    const char *reference = trained(1, false);
    for (int i = 0; i < MT_LEN(rows); i++) {
        char ranks[64], zero[64];
        const char *config = config_of(rows[i].first, rows[i].first_zero);
        train(config, "train.steps=2");
        snprintf(ranks, sizeof(ranks), "parallel.cpu_ranks=%d", rows[i].then);
        snprintf(zero, sizeof(zero), "parallel.zero=%s", rows[i].then_zero ? "yes" : "no");
        if (RUN(config, JOB, "--set", "train.steps=4", "--set", ranks, "--set", zero)) fail_msg("%s", said.err);
        assert_says(said.err, "continuing after step 2 of 4");
        assert_same_output(config, reference, ADAPTER);
        assert_same_output(config, reference, "checkpoints/step-000004/optimizer.safetensors");
    }
}

/* ---- signals and faults */

/* A running job of two ranks that has made some steps. */
struct running {
    const char *config, *dir;
    pid_t pid, ranks[2];
};

static void pause_ms(long ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* The processes of the ranks, in the order of their start; 0 when the run has already ended. */
static void find_ranks(struct running *r)
{
    char path[64], text[256];
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)r->pid, (int)r->pid);
    process_read(path, text, sizeof(text));
    if (sscanf(text, "%d %d", &r->ranks[0], &r->ranks[1]) != 2) r->ranks[0] = r->ranks[1] = 0;
}

static void send_signal(pid_t pid, int number)
{
    assert_true(pid > 0); /* 0 would signal this process and its children */
    assert_int_equal(kill(pid, number), 0);
}

static struct running start_run(const char *steps)
{
    struct running r = {.config = config_of(2, true), .dir = scratch_dir()};
    const char *const words[] = {r.config, JOB, "--set", steps, "--set", "log.report=no", NULL};
    r.pid = process_start(r.dir, words);
    process_wait_for_steps(r.config, r.dir, r.pid, 5);
    find_ranks(&r);
    return r;
}

/* SIGTERM to one rank, or to the process that started them: all ranks stop, the state is saved, and the run resumes
 * there. */
static void test_sigterm(void **state)
{
    (void)state;
    const char *reference = config_of(2, false);
    train(reference, "train.steps=12");
    for (int who = 0; who < 3; who++) {
        const struct running r = start_run("train.steps=1000000");
        send_signal(who < 2 ? r.ranks[who] : r.pid, SIGTERM);
        if (process_finish(r.dir, r.pid) != 130) fail_msg("%s", said.err);
        assert_says(said.err, "saving");
        const int made = process_steps(r.config);
        char name[64];
        snprintf(name, sizeof(name), "checkpoints/step-%06d/state.json", made);
        assert_int_equal(access(process_output(r.config, name), F_OK), 0);
    }
    const struct running r = start_run("train.steps=12");
    if (r.ranks[1]) send_signal(r.ranks[1], SIGTERM); /* otherwise the run has already ended */
    const int code = process_finish(r.dir, r.pid);
    assert_true(code == 130 || code == 0);
    train(r.config, "train.steps=12");
    assert_same_output(r.config, reference, ADAPTER);
}

/* When a rank is killed or stopped, the run ends with an error that names it, and its checkpoints are complete. */
static void test_lost_ranks(void **state)
{
    (void)state;
    for (int who = 0; who < 2; who++) {
        const struct running r = start_run("train.steps=1000000");
        const double start = clock_ms();
        send_signal(r.ranks[who], SIGKILL);
        assert_int_equal(process_finish(r.dir, r.pid), 1);
        assert_true(clock_ms() - start < 30e3);
        assert_says(said.err, who ? "rank 1 on " : "rank 0 on ");
        assert_says(said.err, " died");
        if (who) assert_says(said.err, ", at step ");
        if (who) assert_says(said.err, "its last operation ");
        assert_says(said.err, "was ended by signal 9");
        char text[64];
        snprintf(text, sizeof(text), "train.steps=%d", process_steps(r.config) + 2);
        train(r.config, text);
        assert_says(said.err, "continuing after step ");
    }
}

/* Descriptor 3 is a pipe that nobody writes to, for a rank that hangs while loading as on a disk that does not respond:
 * it reads data.chat_template=/dev/fd/3. */
static const char *pipe_script(void)
{
    static char script[2 * MT_PATH];
    char fifo[MT_PATH];
    snprintf(fifo, sizeof(fifo), "%s/fifo", scratch_dir());
    assert_int_equal(mkfifo(fifo, 0600), 0);
    snprintf(script, sizeof(script), "exec 3<> %s; exec \"$@\"", fifo);
    return script;
}

/* After a signal that comes before the first step, the parent process says that there is nothing to save. */
static void test_early_signals(void **state)
{
    (void)state;
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < MT_LEN(signals); i++) {
        struct running r = {.config = config_of(2, false), .dir = scratch_dir()};
        const char *const words[] = {r.config, JOB, "--set", "data.chat_template=/dev/fd/3", NULL};
        r.pid = process_start_shell(r.dir, pipe_script(), words);
        while (access(process_output(r.config, ".lock"), F_OK) && !process_has_ended(r.pid)) pause_ms(10);
        send_signal(r.pid, signals[i]);
        assert_int_equal(process_finish(r.dir, r.pid), 1);
        assert_says(said.err, "moetrain: interrupted before the first step: nothing to save\n");
        assert_null(strstr(said.err, "ended by signal"));
    }
}

/* moetrain is started with SIGCHLD ignored or all signals blocked: it still notices a failed rank, and SIGTERM ends the
 * run. */
static void test_inherited_signals(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *config = config_of(2, false);
    const char *const words[] = {config, JOB, "--set", "data.train=/no/such/file.jsonl", NULL};
    assert_int_equal(process_finish(dir, process_start_shell(dir, "trap '' CHLD; exec \"$@\"", words)), 1);
    assert_says(said.err, "/no/such/file.jsonl");
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    const struct running r = start_run("train.steps=1000000");
    sigprocmask(SIG_SETMASK, &before, NULL);
    send_signal(r.pid, SIGTERM);
    assert_int_equal(process_finish(r.dir, r.pid), 130);
}

static pid_t end_or_stay(int code)
{
    const pid_t pid = process_fork();
    if (pid) return pid;
    while (code < 0) pause();
    _exit(code);
}

/* A rank that does not end after the last exchange, here rank 1: the run ends, with the exit code of rank 0. */
static void test_late_rank(void **state)
{
    (void)state;
    static const int codes[] = {0, 130};
    launch_end_ms = 500;
    for (int i = 0; i < MT_LEN(codes); i++) {
        pid_t pids[] = {end_or_stay(codes[i]), end_or_stay(-1)};
        const double start = clock_ms();
        alarm(60);
        assert_int_equal(launch_wait(pids, 2), codes[i]);
        alarm(0);
        assert_true(clock_ms() - start < 10e3);
        assert_int_equal(pids[0] | pids[1], 0);
    }
    pid_t others[] = {1 << 22, 1 << 22}; /* no children of this process: an error */
    assert_int_equal(launch_wait(others, 2), 1);
}

/* ---- the plan */

/* The plan predicts the peak memory of each rank. */
static void test_plan(void **state)
{
    (void)state;
    static const struct {
        int ranks;
        const char *zero, *ep, *moments;
    } rows[] = {
        {1, "no", "1", "164 KiB"}, {2, "no", "1", "164 KiB"}, {2, "yes", "1", "82.0 KiB"}, {4, "yes", "2", "48.0 KiB"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        char zero[64], ep[64], peak[32], says[64];
        const char *config = config_of(rows[i].ranks, false), *at;
        snprintf(zero, sizeof(zero), "parallel.zero=%s", rows[i].zero);
        snprintf(ep, sizeof(ep), "parallel.ep=%s", rows[i].ep);
        if (RUN(config, JOB, "--set", "train.steps=1", "--set", zero, "--set", ep)) fail_msg("%s", said.err);
        assert_non_null(at = strstr(said.err, "memory by plan: "));
        assert_int_equal(sscanf(at, "memory by plan: %31[^,]", peak), 1);
        assert_int_equal(RUN("plan", config, JOB, "--set", zero, "--set", ep), 0);
        snprintf(says, sizeof(says), ": none %s,", peak);
        assert_says(said.out, says);
        snprintf(says, sizeof(says), "%-34s %11s ", "AdamW moments", rows[i].moments);
        assert_says(said.out, says);
    }
    assert_says(said.out, "per rank, on each of 4 ranks");
    assert_says(said.out, "1/2 of the experts");
    assert_says(said.out, "1/2 of the moments");
    assert_int_equal(RUN("plan", config_of(4, false), "--set", "parallel.ep=3"), 1);
    assert_says(said.err, "parallel.ep = 3 does not divide the number of ranks, 4");
}

/* ---- launchers */

/* Adds the assignments "A=1 B=2" to the environment, or removes them. */
static void environment(const char *assignments, bool set)
{
    char text[512], *save = NULL;
    snprintf(text, sizeof(text), "%s", assignments);
    for (char *a = strtok_r(text, " ", &save); a; a = strtok_r(NULL, " ", &save)) {
        char *value = strchr(a, '=');
        *value++ = 0;
        assert_int_equal(set ? setenv(a, value, 1) : unsetenv(a), 0);
    }
}

/* Runs two processes with different environments; checks their exit codes; `said` has rank 0's output. */
static void run_two(const char *config, const char *env0, const char *env1, const char *more1, int codes[2])
{
    const char *dirs[2] = {scratch_dir(), scratch_dir()}, *const envs[2] = {env0, env1};
    pid_t pids[2];
    for (int r = 0; r < 2; r++) {
        const char *const words[] = {config, JOB, "--set", "train.steps=4", "--set", r ? more1 : "log.every=1", NULL};
        environment(envs[r], true);
        pids[r] = process_start(dirs[r], words);
        environment(envs[r], false);
    }
    for (int r = 1; r >= 0; r--) codes[r] = process_finish(dirs[r], pids[r]);
}

/* A free port below the range that the system assigns, so that no concurrent process gets it. */
static int port(void)
{
    static int next;
    for (int i = 0; i < 1000; i++) {
        const int p = 20000 + (getpid() * 7 + 11 * next++) % 12000;
        const struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)p)};
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        assert_true(fd >= 0);
        const bool taken = bind(fd, (const struct sockaddr *)&a, sizeof(a));
        close(fd);
        if (!taken) return p;
    }
    fail_msg("no port is free");
    return -1;
}

static void test_launchers(void **state)
{
    (void)state;
    static const char *const envs[] = {
        "MASTER_ADDR=127.0.0.2 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 RANK=%d MASTER_PORT=%d",
        ("TORCHELASTIC_RUN_ID=x MASTER_ADDR=localhost WORLD_SIZE=2 RANK=%d MASTER_PORT=%d SLURM_PROCID=0 "
         "SLURM_STEP_NUM_TASKS=5"),
        "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=%d MASTER_PORT=%d",
        "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=a[3-4] SLURM_PROCID=%d MASTER_PORT=%d",
    };
    const char *reference = trained(2, false);
    for (int i = 0; i < MT_LEN(envs); i++) {
        const char *config = config_of(1, false);
        char env[2][256];
        int codes[2];
        const int p = port();
        for (int r = 0; r < 2; r++) snprintf(env[r], sizeof(env[r]), envs[i], r, p);
        run_two(config, env[0], env[1], "log.every=1", codes);
        if (codes[0] || codes[1]) fail_msg("%s: %d, %d\n%s", env[0], codes[0], codes[1], said.err);
        assert_same_output(config, reference, ADAPTER);
    }
}

static void test_stuck_disk(void **state)
{
    (void)state;
    const char *config = config_of(1, false), *dirs[2] = {scratch_dir(), scratch_dir()};
    const char *const words[] = {config, JOB, "--set", "data.chat_template=/dev/fd/3", "--set", "parallel.timeout_s=2",
                                 NULL};
    const char *const scripts[] = {pipe_script(),
                                   "exec 3<< 'END'\n{% for m in messages %}{{ m.content }}{% endfor %}\nEND\n"
                                   "exec \"$@\""};
    const double start = clock_ms();
    const int p = port();
    pid_t pids[2];
    for (int r = 0; r < 2; r++) {
        char env[256];
        snprintf(env, sizeof(env), "MASTER_ADDR=127.0.0.1 WORLD_SIZE=2 RANK=%d MASTER_PORT=%d", r, p);
        environment(env, true);
        pids[r] = process_start_shell(dirs[r], scripts[r], words);
        environment(env, false);
    }
    assert_int_equal(process_finish(dirs[1], pids[1]), 1);
    assert_int_equal(process_finish(dirs[0], pids[0]), 1);
    assert_true(clock_ms() - start < 15e3);
    assert_says(said.err, "rank 1 has waited in ");
    assert_says(said.err, " for rank 0 on ");
    assert_says(said.err, ", while loading");
}

/* One of three ranks dies before another has connected: the others end without waiting for it. */
static void test_start(void **state)
{
    (void)state;
    const char *config = config_of(1, false), *dirs[2] = {scratch_dir(), scratch_dir()};
    const int p = port();
    char env[256];
    pid_t pids[2];
    for (int r = 0; r < 2; r++) {
        const char *const words[] = {config, JOB, NULL};
        snprintf(env, sizeof(env), "MASTER_ADDR=127.0.0.1 WORLD_SIZE=3 RANK=%d MASTER_PORT=%d", r, p);
        environment(env, true);
        pids[r] = process_start(dirs[r], words);
        environment(env, false);
    }
    pause_ms(2000);
    const double start = clock_ms();
    kill(pids[1], SIGKILL);
    assert_int_equal(process_finish(dirs[0], pids[0]), 1);
    assert_true(clock_ms() - start < 10e3);
    assert_says(said.err, "rank 1 on ");
    assert_says(said.err, "closed its connection at the start");
    process_finish(dirs[1], pids[1]);
}

static void test_refusals(void **state)
{
    (void)state;
    const char *config = config_of(1, false);
    const int p = port();
    char env[2][256];
    int codes[2];
    for (int r = 0; r < 2; r++)
        snprintf(env[r], sizeof(env[r]), "MASTER_ADDR=127.0.0.1 WORLD_SIZE=2 RANK=%d MASTER_PORT=%d", r, p);
    run_two(config, env[0], env[1], "optim.lr=1e-3", codes);
    assert_true(codes[0] == 1 && codes[1] == 1);
    assert_says(said.err, "has another configuration than rank 0");

    environment("RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", true);
    assert_int_equal(RUN(config), 1);
    assert_says(said.err, "which is it?");
    environment("RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", false);

    environment("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4", true);
    assert_int_equal(RUN(config, "--set", "parallel.cpu_ranks=2"), 1);
    assert_says(said.err, "mpirun started 4 ranks on this machine, the configuration asks for 2");
    environment("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4", false);

    environment("RANK=0 WORLD_SIZE=2", true);
    assert_int_equal(RUN(config), 1);
    assert_says(said.err, "MASTER_ADDR");
    environment("RANK=0 WORLD_SIZE=2", false);

    assert_int_equal(RUN(config, "--set", "parallel.cpu_ranks=2", "--set", "train.grad_accum=3"), 1);
    assert_says(said.err, "set it to a multiple of 2");
    assert_int_equal(RUN(config, "--set", "train.device=auto", "--set", "parallel.gpus=99"), 1);
    assert_says(said.err, "NVIDIA GPUs can be used here: set parallel.gpus (auto: all of them)");
    assert_int_equal(RUN(config, "--set", "parallel.gpus=2"), 1);
    assert_says(said.err, "parallel.cpu_ranks");
    assert_int_equal(RUN(config, "--set", "parallel.gpus=many"), 1);
    assert_says(said.err, "expected auto or a number");
}

int test_ranks(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_training),
        cmocka_unit_test(test_eval),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_sigterm),
        cmocka_unit_test(test_lost_ranks),
        cmocka_unit_test(test_launchers),
        cmocka_unit_test(test_stuck_disk),
        cmocka_unit_test(test_early_signals),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_start),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_late_rank),
        cmocka_unit_test(test_inherited_signals),
    };
    return cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
}
