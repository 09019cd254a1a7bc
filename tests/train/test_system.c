/* test_system.c - hangups, closed pipes and descriptors; files that are truncated while mapped, or are not regular
 * files; limits of file size, address space and stack; how long threads spin. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "train/launch/process.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 }; /* AddressSanitizer's shadow memory exceeds any limit */
#else
enum { SANITIZED = 0 };
#endif

#define LONG_RUN "--set", "train.steps=1000000", "--set", "log.report=no", "--set", "train.grad_accum=2"

static int run_shell(const char *script, const char *const *words)
{
    const char *dir = scratch_dir();
    return process_finish(dir, process_start_shell(dir, script, words));
}
#define SHELL(script, ...) run_shell(script, (const char *const[]){__VA_ARGS__, NULL})

static void pause_ms(long ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static const char *config_of(int ranks)
{
    char more[128];
    snprintf(more, sizeof(more), "[parallel]\ncpu_ranks = %d\n[optim]\nschedule = constant\nwarmup_ratio = 0\n", ranks);
    return process_config(more);
}

/* Fails unless the next run resumes from a checkpoint. */
static void assert_saved(const char *config)
{
    char **names, steps[64];
    int64_t n;
    struct err err;
    if (file_list(process_output(config, "checkpoints"), &names, &n, &err)) fail_msg("%s: %s", err.msg, said.err);
    assert_true(n >= 1);
    snprintf(steps, sizeof(steps), "train.steps=%d", atoi(names[n - 1] + strlen("step-")) + 1);
    file_list_free(names, n);
    if (RUN(config, LONG_RUN, "--set", steps)) fail_msg("%s", said.err);
    assert_says(said.err, "continuing after step ");
}

/* ---- hangup, closed pipes */

/* SIGHUP to the process group, as when a terminal closes, several times. */
static void test_hangup(void **state)
{
    (void)state;
    signal(SIGHUP, SIG_DFL); /* with nohup, runs ignore it as this process does */
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *config = config_of(ranks), *dir = scratch_dir();
        const char *const words[] = {config, LONG_RUN, NULL};
        const pid_t pid = process_start_shell(dir, "setsid -w \"$@\"", words);
        process_wait_for_steps(config, dir, pid, 1);
        char path[64], text[256];
        int session = 0;
        snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)pid, (int)pid);
        process_read(path, text, sizeof(text));
        assert_int_equal(sscanf(text, "%d", &session), 1);
        assert_int_equal(kill(-getpgid(session), SIGHUP), 0);
        kill(-getpgid(session), SIGHUP);
        assert_int_equal(process_finish(dir, pid), 130);
        assert_says(said.err, "interrupted by signal ");
        assert_says(said.err, ": run the same command to continue\n");
        assert_saved(config);
    }
}

/* nohup: the run continues. */
static void test_nohup(void **state)
{
    (void)state;
    const char *config = config_of(2), *dir = scratch_dir();
    const char *const words[] = {config, LONG_RUN, NULL};
    const pid_t pid = process_start_shell(dir, "trap '' HUP; exec \"$@\"", words);
    process_wait_for_steps(config, dir, pid, 1);
    kill(pid, SIGHUP);
    pause_ms(300);
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0);
    kill(pid, SIGTERM);
    assert_int_equal(process_finish(dir, pid), 130);
}

/* `| head` closes the pipe of standard output, or of both streams. */
static void test_closed_pipe(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *config = config_of(ranks);
        assert_int_equal(SHELL("{ \"$@\"; echo \"code $?\" >&2; } | head -n 3", config, LONG_RUN), 0);
        assert_says(said.err, "standard output or error was closed after step ");
        assert_says(said.err, "code 130");
        assert_saved(config);
    }
    const char *config = config_of(1);
    SHELL("\"$@\" 2>&1 | { read -r line; sleep 0.3; read -r line; while read -r line; do case $line in step*) exit;; "
          "esac; done; }",
          config, LONG_RUN);
    assert_saved(config);
    assert_int_equal(SHELL("\"$@\" | head -n 1", "config"), 0);
    assert_string_equal(said.err, "");
}

/* A command whose output is lost fails; a run, whose output is a log, does not. */
static void test_full_output(void **state)
{
    (void)state;
    const char *config = config_of(1);
    if (access("/dev/full", W_OK)) {
        print_message("skip: no /dev/full\n");
        skip();
    }
    assert_int_equal(SHELL("\"$@\" > /dev/full", config), 0);
    const char *const words[][4] = {{config, "--dump-config"}, {"config"}, {"eval", config}, {"help", "eval"}};
    for (int i = 0; i < MT_LEN(words); i++) {
        assert_int_equal(run_shell("\"$@\" > /dev/full", words[i]), 1);
        assert_says(said.err, "moetrain: error: standard output cannot be written: is the disk full?\n");
    }
}

/* ---- descriptors */

static void test_closed_descriptors(void **state)
{
    (void)state;
    static const char *const scripts[] = {"\"$@\" >&-", "\"$@\" 2>&-", "\"$@\" <&- >&- 2>&-"};
    const char *reference = config_of(1);
    assert_int_equal(RUN(reference), 0);
    for (int i = 0; i < MT_LEN(scripts); i++) {
        const char *config = config_of(1);
        assert_int_equal(SHELL(scripts[i], config), 0);
        assert_same_output(config, reference, ADAPTER);
        struct err err;
        int64_t size;
        char *text = file_read(process_output(config, "metrics.jsonl"), 1 << 20, &size, &err);
        assert_true(text && text[0] == '{' && !strstr(text, "\nstep ") && !strstr(text, "\neval "));
        mem_free(text);
    }
}

/* ---- files */

static void cut_file(const char *path)
{
    struct file_map map;
    struct err err;
    volatile uint8_t sum = 0;
    if (file_map_open(&map, path, &err) || truncate(path, 0)) _exit(9);
    sum = (uint8_t)(sum + map.data[map.size - 1]);
    _exit(8);
}

static void test_cut_file(void **state)
{
    (void)state;
    char path[MT_PATH], text[MT_PATH + 256];
    int status, fds[2];
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/a\x1b[2Jb", dir);
    FILE *f = fopen(path, "w");
    for (int i = 0; i < 100000; i++) assert_true(fputc('x', f) == 'x');
    assert_true(!fclose(f) && !pipe(fds));
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) {
        dup2(fds[1], STDERR_FILENO);
        cut_file(path);
    }
    close(fds[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    const ssize_t n = read(fds[0], text, sizeof(text) - 1);
    close(fds[0]);
    assert_true(n > 0 && WIFEXITED(status));
    text[n] = 0;
    assert_int_equal(WEXITSTATUS(status), 1);
    assert_says(text, "moetrain: error: ");
    assert_says(text, "/a?[2Jb: the file was truncated");
}

/* SIGBUS at other addresses, and in a closed mapping, ends the process as usual. */
static void test_other_bus_error(void **state)
{
    (void)state;
    struct file_map map;
    struct err err;
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) {
        signal(SIGBUS, SIG_DFL);
        if (file_map_open(&map, fixture("parity/case_a/config.json"), &err)) _exit(9);
        file_map_close(&map);
        kill(getpid(), SIGBUS);
        raise(SIGBUS);
        _exit(8);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
}

/* Every reader refuses a FIFO without waiting. */
static void test_no_file(void **state)
{
    (void)state;
    char fifo[256], set[MT_PATH + 32];
    const char *dir = scratch_dir(), *const kinds[] = {fifo, "/dev/zero", dir};
    snprintf(fifo, sizeof(fifo), "%s/fifo", dir);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    for (int i = 0; i < MT_LEN(kinds); i++) {
        static const char *const keys[] = {"data.train", "data.eval", "data.chat_template"};
        const double start = clock_ms();
        for (int k = 0; k < MT_LEN(keys); k++) {
            snprintf(set, sizeof(set), "%s=%s", keys[k], kinds[i]);
            assert_int_equal(RUN(process_config(""), "--set", set), 1);
            assert_says(said.err, kinds[i] == dir && k < 2 ? "no data files in this folder" : "not a regular file");
        }
        assert_int_equal(RUN("plan", kinds[i]), 1);
        assert_says(said.err, kinds[i] == dir ? "is a directory, not a configuration" : "not a regular file");
        assert_true(clock_ms() - start < 10e3);
    }
    /* files of a model: configuration, tokenizer, weights */
    static const char *const names[] = {"config.json", "tokenizer.json", "model.safetensors"};
    for (int i = 0; i < MT_LEN(names); i++) {
        const char *model = scratch_dir();
        char command[3 * MT_PATH], path[MT_PATH];
        snprintf(command, sizeof(command), "cp -r %s/* %s", fixture("parity/case_a"), model);
        assert_int_equal(system(command), 0);
        snprintf(path, sizeof(path), "%s/%s", model, names[i]);
        assert_true(!unlink(path) && !mkfifo(path, 0600));
        snprintf(set, sizeof(set), "model.path=%s", model);
        assert_int_equal(RUN(process_config(""), "--set", set), 1);
        assert_says(said.err, names[i]);
        assert_says(said.err, "not a regular file");
    }
    /* a configuration may come from a pipe of the shell */
    assert_int_equal(SHELL("cat \"$3\" | \"$1\" \"$2\" /dev/stdin", "plan", process_config("")), 0);
}

/* ---- limits */

/* When a file reaches the size limit, the error names it. */
static void test_file_size(void **state)
{
    (void)state;
    static const char *const blocks[] = {"0", "8", "64"};
    for (int i = 0; i < MT_LEN(blocks); i++) {
        char script[128]; /* through a pipe: the limit would also apply to this test's output file */
        snprintf(script, sizeof(script), "(ulimit -f %s; \"$@\"; echo code $?) 2>&1 | cat", blocks[i]);
        assert_int_equal(SHELL(script, process_config("")), 0);
        assert_says(said.out, "moetrain: error: ");
        assert_says(said.out, "File too large");
        assert_says(said.out, "code 1\n");
    }
}

/* Address space limits from too small for a run up to sufficient: each run succeeds or ends with an error. If a limit
 * is too small for the executable itself, which may have code for many GPUs, the system reports it. OpenBLAS 0.3.28 and
 * later needs a buffer even for --version. */
static void test_address_space(void **state)
{
    (void)state;
    static const char *const mib[] = {"60", "100", "180", "250", "400", "500", "700"};
    enum { LIBRARIES = 16 };
    const int64_t own = file_size(moetrain_binary()) >> 20;
    int done = 0;
    if (SANITIZED) {
        print_message("skip: a sanitizer needs more address space\n");
        skip();
    }
    assert_int_equal(RUN("--version"), 0);
    const char *blas = strstr(said.out, "OpenBLAS 0.3.");
    const bool early = !blas || atoi(blas + strlen("OpenBLAS 0.3.")) >= 28;
    for (int i = 0; i < MT_LEN(mib); i++) {
        char script[128];
        if (atoll(mib[i]) < own + LIBRARIES) {
            print_message("skip: %s MiB: the executable alone has %lld\n", mib[i], (long long)own);
            continue;
        }
        snprintf(script, sizeof(script), "ulimit -v $((%s * 1024)); exec timeout -s KILL 20 \"$@\"", mib[i]);
        const int code = SHELL(script, process_config("[eval]\nat_start = no\n"), "--set", "train.threads=2");
        if (code != 0 && code != 1) fail_msg("%s MiB: %d, %s", mib[i], code, said.err);
        if (code) assert_says(said.err, "error: ");
        done += code == 0;
        if (SHELL(script, "--version")) {
            assert_true(early);
            assert_says(said.err, "moetrain: error: out of memory: OpenBLAS needs ");
        }
    }
    assert_true(done < MT_LEN(mib));
}

/* Every command works with a stack of 256 KiB; with less, the error is one line. */
static void test_stack(void **state)
{
    (void)state;
    const char *config = config_of(1);
    if (SANITIZED) {
        print_message("skip: a sanitizer needs a larger stack\n");
        skip();
    }
#define STACK(kib, ...) SHELL("ulimit -s " kib "; exec \"$@\"", __VA_ARGS__)
    assert_int_equal(STACK("64", config), 1);
    assert_string_equal(said.err, "moetrain: error: the limit of the stack is 64 KiB, moetrain needs 256: raise it "
                                  "(`ulimit -s 8192`)\n");
    assert_int_equal(STACK("256", config), 0);
    assert_int_equal(STACK("256", config, "--set", "train.steps=3", "--set", "optim.lr=1e-3"), 0);
    assert_int_equal(STACK("256", "check", config), 0);
    assert_int_equal(STACK("256", "export", config, "--to", "vllm"), 0);
    assert_int_equal(STACK("256", "synth", "gpt-oss-tiny", process_output(config, "synth")), 0);
    assert_int_equal(STACK("256", "compare", process_output(config, "."), process_output(config, ".")), 0);
}

/* Returns 0 if GOMP_SPINCOUNT is set before process_prepare and unset after it, so that child processes do not inherit
 * it. */
static int spins_left_to_children(void)
{
    unsetenv("OMP_WAIT_POLICY");
    process_bound_spins();
    if (!getenv("GOMP_SPINCOUNT")) return 1;
    process_prepare();
    return getenv("GOMP_SPINCOUNT") ? 2 : 0;
}

/* OpenMP's threads spin briefly, or as the user's variables say. Processes started later do not inherit the setting. */
static void test_spins(void **state)
{
    (void)state;
    static const struct {
        const char *set, *spins;
    } cases[] = {
        {"", "'1000'"},
        {"OMP_WAIT_POLICY=passive", "'0'"},
        {"OMP_WAIT_POLICY=active", "'30000000000'"},
        {"GOMP_SPINCOUNT=77", "'77'"},
        {"KMP_BLOCKTIME=1", "'300000'"},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        char script[256], line[64];
        snprintf(script, sizeof(script), "unset OMP_WAIT_POLICY; export OMP_DISPLAY_ENV=verbose %s; exec \"$@\"",
                 cases[i].set);
        assert_int_equal(SHELL(script, "version"), 0);
        if (!strstr(said.err, "GOMP_SPINCOUNT")) {
            print_message("skip: the executable is not linked with libgomp\n");
            skip();
        }
        snprintf(line, sizeof(line), "GOMP_SPINCOUNT = %s", cases[i].spins);
        assert_says(said.err, line);
    }
    int status;
    const pid_t pid = process_fork();
    if (!pid) _exit(spins_left_to_children());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

int test_system(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hangup),
        cmocka_unit_test(test_nohup),
        cmocka_unit_test(test_closed_pipe),
        cmocka_unit_test(test_full_output),
        cmocka_unit_test(test_closed_descriptors),
        cmocka_unit_test(test_cut_file),
        cmocka_unit_test(test_other_bus_error),
        cmocka_unit_test(test_no_file),
        cmocka_unit_test(test_file_size),
        cmocka_unit_test(test_address_space),
        cmocka_unit_test(test_stack),
        cmocka_unit_test(test_spins),
    };
    return cmocka_run_group_tests_name("system", tests, NULL, NULL);
}
