/* process.c - descriptors and signals of a process; how its threads wait. */
#include "train/launch/process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A waiting thread sleeps after this many spins, about 30 us on an EPYC. libgomp's default of 300,000 (9 ms) nearly
 * halves the speed when other processes run: a thread spins while the one that it waits for has no core. */
#define SPINS "1000"

#define LEAST_STACK (256 << 10) /* bytes; a command takes up to 160 KiB */

/* A parent process may leave signals ignored or blocked. Without SIGCHLD this process does not notice a failed rank,
 * and a blocked SIGTERM does not end a run. If SIGINT (background job of a script) or SIGHUP (nohup) is ignored, it
 * stays so. */
static void reset_signals(void)
{
    static const int numbers[] = {SIGCHLD, SIGTERM, SIGPIPE, SIGUSR1, SIGALRM};
    sigset_t none;
    for (int i = 0; i < MT_LEN(numbers); i++) signal(numbers[i], SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static bool set_spins;

void process_bound_spins(void)
{
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME")) return;
    set_spins = !setenv("GOMP_SPINCOUNT", SPINS, 0);
}

void process_prepare(void)
{
    int fd;
    if (set_spins)
        unsetenv(
            "GOMP_SPINCOUNT"); /* libgomp has read the variable; processes that this one starts must not inherit it */
    set_spins = false;
    reset_signals();
    do fd = open("/dev/null", O_RDWR); /* open returns the lowest free descriptor */
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
    signal(SIGXFSZ, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
}

int process_check_stack(struct err *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= LEAST_STACK) return 0;
    return err_set(err, "the limit of the stack is %lld KiB, moetrain needs %d: raise it (`ulimit -s 8192`)",
                   (long long)(limit.rlim_cur >> 10), LEAST_STACK >> 10);
}

static char incomplete[MT_PATH];

enum { DEPTH = 8 }; /* of directories that are deleted */

/* Deletes the contents of a directory, with functions that a signal handler may call. Deleting entries while reading
 * may skip others; the next round finds these. Links are not followed. */
static void empty_directory(int fd, int depth)
{
    struct entry {
        uint64_t inode, offset;
        unsigned short size;
        unsigned char type;
        char name[];
    };
    static _Alignas(struct entry) char bufs[DEPTH][1 << 13];
    char *buf = bufs[depth];
    long n;
    lseek(fd, 0, SEEK_SET);
    while ((n = syscall(SYS_getdents64, fd, buf, sizeof(bufs[0]))) > 0)
        for (long at = 0; at < n;) {
            const struct entry *e = (const struct entry *)(const void *)(buf + at);
            const bool own = !strcmp(e->name, ".") || !strcmp(e->name, "..");
            at += e->size;
            if (own || !unlinkat(fd, e->name, 0) || depth + 1 == DEPTH) continue;
            const int inner = openat(fd, e->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (inner < 0) continue;
            empty_directory(inner, depth + 1);
            close(inner);
            unlinkat(fd, e->name, AT_REMOVEDIR);
        }
}

static void delete_directory(const char *path)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    for (int round = 0; fd >= 0 && round < 100 && rmdir(path); round++) empty_directory(fd, 0);
    if (fd >= 0) close(fd);
}

/* SA_RESETHAND has restored the default action; raise(number) takes it when the handler returns. */
static void delete_incomplete(int number)
{
    if (unlink(incomplete)) delete_directory(incomplete);
    raise(number);
}

void process_delete_on_signal(const char *path)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    if (path) snprintf(incomplete, sizeof(incomplete), "%s", path);
    for (int i = 0; i < MT_LEN(signals); i++) {
        struct sigaction now, next = {.sa_handler = path ? delete_incomplete : SIG_DFL, .sa_flags = (int)SA_RESETHAND};
        sigaction(signals[i], NULL, &now);
        if (now.sa_handler != SIG_IGN) sigaction(signals[i], &next, NULL); /* nohup ignores SIGHUP */
    }
}
