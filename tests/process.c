/* process.c - runs the executable for tests. */
#include "tests/process.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/safetensors.h"

#define CASE     "parity/case_a"
#define MAX_ARGS 48

struct said said;

void process_read(const char *path, char *text, int64_t cap)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    text[fread(text, 1, (size_t)cap - 1, f)] = 0;
    fclose(f);
}

static void make_empty(const char *path)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fclose(f), 0);
}

pid_t process_fork(void)
{
    const pid_t parent = getpid(), pid = fork();
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(97);
    return 0;
}

/* first: words before the arguments, NULL at the end. The parent creates the output files, as the child may be killed
 * before it could. */
static pid_t start(const char *dir, const char *const *first, const char *const *words)
{
    char *argv[MAX_ARGS + 2] = {NULL}, out[MT_PATH], err[MT_PATH];
    int n = 0;
    for (; *first; first++) argv[n++] = (char *)(uintptr_t)*first; /* execv does not change the words */
    for (; *words; words++) {
        assert_true(n <= MAX_ARGS);
        argv[n++] = (char *)(uintptr_t)*words;
    }
    snprintf(out, sizeof(out), "%s/stdout", dir);
    snprintf(err, sizeof(err), "%s/stderr", dir);
    make_empty(out);
    make_empty(err);
    fflush(NULL);
    const pid_t pid = process_fork();
    if (pid) return pid;
    if (!freopen("/dev/null", "r", stdin) || !freopen(out, "w", stdout) || !freopen(err, "w", stderr)) _exit(99);
    execv(argv[0], argv);
    _exit(98);
}

pid_t process_start(const char *dir, const char *const *words)
{
    return start(dir, (const char *const[]){moetrain_binary(), NULL}, words);
}

pid_t process_start_shell(const char *dir, const char *script, const char *const *words)
{
    return start(dir, (const char *const[]){"/bin/sh", "-c", script, "sh", moetrain_binary(), NULL}, words);
}

int process_finish(const char *dir, pid_t pid)
{
    char path[MT_PATH];
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    snprintf(path, sizeof(path), "%s/stdout", dir);
    process_read(path, said.out, sizeof(said.out));
    snprintf(path, sizeof(path), "%s/stderr", dir);
    process_read(path, said.err, sizeof(said.err));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

int process_run(const char *const *words)
{
    const char *dir = scratch_dir();
    return process_finish(dir, process_start(dir, words));
}

int process_steps(const char *config)
{
    struct err err;
    int64_t size;
    int n = 0;
    const char *path = process_output(config, "metrics.jsonl");
    if (access(path, R_OK)) return 0;
    char *text = file_read(path, 1 << 28, &size, &err);
    if (!text) fail_msg("%s", err.msg);
    for (const char *s = text; (s = strstr(s, "\"event\":\"step\"")); s++) n++;
    mem_free(text);
    return n;
}

bool process_has_ended(pid_t pid)
{
    siginfo_t info = {.si_pid = 0};
    return !waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) && info.si_pid == pid;
}

/* Starting two ranks takes minutes under ThreadSanitizer on a loaded machine: the limit only ends a test that hangs. */
void process_wait_for_steps(const char *config, const char *dir, pid_t pid, int n)
{
    const double limit_ms = clock_ms() + 600e3;
    while (process_steps(config) < n && !process_has_ended(pid) && clock_ms() < limit_ms)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    if (process_steps(config) >= n) return;
    if (process_has_ended(pid)) process_finish(dir, pid);
    fail_msg("%d of %d steps were made:\n%s", process_steps(config), n, said.err);
}

void process_in_pieces(const char *const *words, long ms)
{
    for (int i = 0; i < 60; i++) {
        const char *dir = scratch_dir();
        const pid_t pid = process_start(dir, words);
        nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
        kill(pid, SIGKILL);
        const int rc = process_finish(dir, pid);
        ms += ms / 8;
        if (!rc) return;
        assert_int_equal(rc, 1000 + SIGKILL);
    }
    fail_msg("the run makes no progress: %s", said.err);
}

const char *process_config(const char *more)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    const char *dir = scratch_dir(), *base = fixture(CASE);
    snprintf(p, MT_PATH, "%s/run.ini", dir);
    FILE *f = fopen(p, "w");
    assert_non_null(f);
    fprintf(f, "[model]\npath = %s\n[data]\ntrain = %s/train.jsonl\neval = %s/eval.jsonl\nseq_len = 64\n", base, base,
            base);
    fprintf(f, "[train]\ndevice = cpu\nsteps = 2\n[lora]\nr = 2\n[output]\ndir = %s/out\n%s", dir, more);
    assert_int_equal(fclose(f), 0);
    return p;
}

const char *process_output(const char *config, const char *name)
{
    static char path[8][MT_PATH];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%.*s/out/%s", (int)(strrchr(config, '/') - config), config, name);
    return p;
}

void assert_same_file(const char *a, const char *b)
{
    struct err err;
    int64_t na, nb;
    char *x = file_read(a, 1 << 26, &na, &err), *y = file_read(b, 1 << 26, &nb, &err);
    if (!x || !y) fail_msg("%s", err.msg);
    if (na != nb || memcmp(x, y, (size_t)na)) fail_msg("%s and %s differ", a, b);
    mem_free(x);
    mem_free(y);
}

void assert_same_output(const char *a, const char *b, const char *name)
{
    assert_same_file(process_output(a, name), process_output(b, name));
}

double adapter_error(const char *a, const char *b)
{
    struct safetensors x, y;
    struct err err;
    double most = 0;
    assert_int_equal(safetensors_open(&x, process_output(a, ADAPTER), &err), 0);
    assert_int_equal(safetensors_open(&y, process_output(b, ADAPTER), &err), 0);
    assert_int_equal(x.n_tensors, y.n_tensors);
    for (int64_t i = 0; i < x.n_tensors; i++) {
        const struct st_tensor *s = &x.tensors[i], *t = safetensors_find(&y, s->name);
        assert_true(t && t->bytes == s->bytes && s->dtype == DT_F32);
        double diff = 0, sum = 0;
        for (int64_t k = 0; k < s->bytes / 4; k++) {
            float u, v;
            memcpy(&u, s->data + 4 * k, 4);
            memcpy(&v, t->data + 4 * k, 4);
            diff += ((double)u - (double)v) * ((double)u - (double)v);
            sum += (double)u * (double)u;
        }
        most = fmax(most, sqrt(diff / fmax(sum, 1e-30)));
    }
    safetensors_close(&x);
    safetensors_close(&y);
    return most;
}

int process_run_sets(const char *config, const char *sets)
{
    const char *words[48] = {config};
    char text[2048];
    int n = 1;
    snprintf(text, sizeof(text), "%s", sets);
    for (char *set = strtok(text, " "); set; set = strtok(NULL, " ")) {
        assert_true(n + 2 < MT_LEN(words)); /* the last stays NULL */
        words[n++] = "--set";
        words[n++] = set;
    }
    return process_run(words);
}

const char *process_trained(const char *sets)
{
    const char *config = process_config("");
    if (process_run_sets(config, sets)) fail_msg("training failed:\n%s", said.err);
    return config;
}
