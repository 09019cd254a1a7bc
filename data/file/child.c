/* child.c - see child.h. */
#define _GNU_SOURCE /* pipe2, posix_spawn_file_actions_addclosefrom_np */
#include "data/file/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TERM_MS = 2000 };

void child_close(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Signals and descriptors above 2 are not inherited: a program that lives on must not hold a lock. */
static int spawn(struct child *c, const int ends[3], char *const argv[], char *const env[])
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    int rc = 0;
    for (int i = 0; i < 3 && !rc; i++)
        if (ends[i] >= 0) rc = posix_spawn_file_actions_adddup2(&files, ends[i], i);
    if (!rc && ends[1] < 0) rc = posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
    if (!rc) rc = posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
    if (!rc) rc = posix_spawnattr_setsigdefault(&attr, &all);
    if (!rc) rc = posix_spawnattr_setsigmask(&attr, &none);
    if (!rc) rc = posix_spawnattr_setpgroup(&attr, 0);
    if (!rc)
        rc = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    if (!rc) rc = posix_spawnp(&c->pid, argv[0], &files, &attr, argv, env);
    if (rc) c->pid = 0;
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    return rc;
}

int child_start(struct child *c, char *const argv[], char *const env[], int pipes)
{
    int ends[3] = {-1, -1, -1}, *const ours[3] = {&c->in, &c->out, &c->err}, rc = 0;
    *c = (struct child){.in = -1, .out = -1, .err = -1};
    for (int i = 0; i < 3 && !rc; i++) {
        int pair[2];
        if (!(pipes & 1 << i)) continue;
        if (pipe2(pair, O_CLOEXEC)) {
            rc = errno;
            break;
        }
        *ours[i] = pair[i ? 0 : 1];
        ends[i] = pair[i ? 1 : 0];
        if (fcntl(*ours[i], F_SETFL, O_NONBLOCK)) rc = errno;
    }
    if (!rc) rc = spawn(c, ends, argv, env);
    for (int i = 0; i < 3; i++) {
        child_close(&ends[i]);
        if (rc) child_close(ours[i]);
    }
    return rc;
}

ssize_t child_write(const struct child *c, const char *data, size_t n)
{
    sigset_t broken, before;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken, &before);
    const ssize_t done = write(c->in, data, n);
    const int error = errno;
    if (done < 0 && error == EPIPE)
        while (sigtimedwait(&broken, NULL, &(struct timespec){0}) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return done;
}

bool child_ends_by(struct child *c, double until, int *status)
{
    const pid_t pid = c->pid;
    for (;;) {
        const pid_t got = waitpid(pid, status, WNOHANG);
        if (got == pid || (got < 0 && errno != EINTR)) return c->pid = 0, true;
        if (clock_ms() >= until) return false;
        progress();
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
}

void child_end_group(struct child *c, bool gently, int *status)
{
    const pid_t group = c->pid;
    if (gently) {
        kill(-group, SIGTERM);
        if (child_ends_by(c, clock_ms() + TERM_MS, status)) return;
    }
    kill(-group, SIGKILL);
    while (waitpid(group, status, 0) < 0 && errno == EINTR) continue;
    c->pid = 0;
}

bool child_has_ended(const struct child *c)
{
    siginfo_t info = {.si_pid = 0};
    return waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 ? errno != EINTR : info.si_pid != 0;
}

/* Ends the process group before it reaps the program: until then no other process can get the group's number. */
void child_finish(struct child *c, double ms, int *status)
{
    const double until = clock_ms() + ms;
    while (!child_has_ended(c) && clock_ms() < until) {
        progress();
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    child_end_group(c, false, status);
}

const char *child_how(char text[48], int status)
{
    text[0] = 0;
    if (WIFEXITED(status)) snprintf(text, 48, " (exit status %d)", WEXITSTATUS(status));
    if (WIFSIGNALED(status)) snprintf(text, 48, " (signal %d)", WTERMSIG(status));
    return text;
}
