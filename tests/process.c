/* process.c - runs the executable for tests. */
#include "tests/process.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CASE     "parity/case_a"
#define MAX_ARGS 32

struct said said;

void process_read(const char *path, char *text, int64_t cap)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    text[fread(text, 1, (size_t)cap - 1, f)] = 0;
    fclose(f);
}

pid_t process_start(const char *dir, const char *const *words)
{
    char *argv[MAX_ARGS + 2] = {(char *)(uintptr_t)moetrain_binary()}, out[MT_PATH], err[MT_PATH];
    for (int i = 0; words[i]; i++) {
        assert_true(i < MAX_ARGS);
        argv[i + 1] = (char *)(uintptr_t)words[i]; /* execv changes nothing */
    }
    snprintf(out, sizeof(out), "%s/stdout", dir);
    snprintf(err, sizeof(err), "%s/stderr", dir);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid) return pid;
    if (!freopen("/dev/null", "r", stdin) || !freopen(out, "w", stdout) || !freopen(err, "w", stderr)) _exit(99);
    execv(argv[0], argv);
    _exit(98);
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
