/* log_command.c - the process of log.command: start, lines, end. */
#define _GNU_SOURCE /* pipe2, posix_spawn_file_actions_addclosefrom_np */
#include "train/report/log_command.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum { BUFFER = 1 << 14, TERM_MS = 2000, TELL_MS = 1000 };

/* ---- start */

/* The environment with three variables; the texts are in `own`. */
static char **environment(char own[3][MT_PATH + 32], const struct log_command_run *run)
{
    const char *slash = strrchr(run->dir, '/');
    int64_t n = 0, kept = 0;
    snprintf(own[0], sizeof(own[0]), "MOETRAIN_RUN_NAME=%s", *run->name ? run->name : slash ? slash + 1 : run->dir);
    snprintf(own[1], sizeof(own[1]), "MOETRAIN_OUTPUT_DIR=%s", run->dir);
    snprintf(own[2], sizeof(own[2]), "MOETRAIN_RESUMED=%d", run->resumed);
    while (environ[n]) n++;
    char **all = mem_array(n + 4, sizeof(*all));
    for (int64_t i = 0; i < n; i++) {
        bool replaced = false;
        for (int k = 0; k < 3; k++) replaced |= !strncmp(environ[i], own[k], strcspn(own[k], "=") + 1);
        if (!replaced) all[kept++] = environ[i];
    }
    for (int k = 0; k < 3; k++) all[kept++] = own[k];
    return all;
}

/* Signals and descriptors other than 0 to 2 are not inherited: a process that lives on must not hold the lock of
 * output.dir. Returns 0 or an error number. */
static int spawn(struct log_command *c, int in, const struct log_command_run *run)
{
    char own[3][MT_PATH + 32], *argv[] = {"sh", "-c", (char *)(uintptr_t)run->command, NULL};
    char **env = environment(own, run);
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    int rc = posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    if (!rc) rc = posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
    if (!rc) rc = posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
    if (!rc) rc = posix_spawnattr_setsigdefault(&attr, &all);
    if (!rc) rc = posix_spawnattr_setsigmask(&attr, &none);
    if (!rc) rc = posix_spawnattr_setpgroup(&attr, 0);
    if (!rc)
        rc = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
    if (!rc) rc = posix_spawn(&c->pid, "/bin/sh", &files, &attr, argv, env);
    if (rc) c->pid = 0;
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    mem_free(env);
    return rc;
}

static void close_files(struct log_command *c)
{
    if (c->in >= 0) close(c->in);
    if (c->lines >= 0) close(c->lines);
    c->in = c->lines = -1;
}

int log_command_open(struct log_command *c, const char *path, const struct log_command_run *run, struct err *err)
{
    int ends[2];
    *c = (struct log_command){.lines = open(path, O_RDONLY | O_CLOEXEC), .in = -1, .slow_ms = 60e3, .end_ms = 30e3};
    if (c->lines < 0) return err_set(err, "%s: cannot be read: %s", path, strerror(errno));
    c->sent = lseek(c->lines, 0, SEEK_END);
    int rc = pipe2(ends, O_CLOEXEC) ? errno : 0;
    if (!rc) {
        c->in = ends[1];
        rc = fcntl(c->in, F_SETFL, O_NONBLOCK) ? errno : spawn(c, ends[0], run);
        close(ends[0]);
    }
    if (!rc) return 0;
    close_files(c);
    return err_set(err, "log.command = %.200s: cannot be started: %s", run->command, strerror(rc));
}

/* ---- lines */

/* write() without a SIGPIPE, by which a run would stop. */
static ssize_t write_quietly(int fd, const char *data, size_t n)
{
    sigset_t broken, before;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken, &before);
    const ssize_t done = write(fd, data, n);
    const int error = errno;
    if (done < 0 && error == EPIPE)
        while (sigtimedwait(&broken, NULL, &(struct timespec){0}) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = error;
    return done;
}

/* Writes what the pipe takes. False: the process does not read it any more. */
static bool push(struct log_command *c)
{
    char buf[BUFFER];
    ssize_t n, done = 0;
    while ((n = pread(c->lines, buf, sizeof(buf), c->sent)) > 0) {
        do done = write_quietly(c->in, buf, (size_t)n);
        while (done < 0 && errno == EINTR);
        if (done < 0) break;
        c->sent += done;
    }
    if (n <= 0)
        c->behind_ms = 0;
    else if (!c->behind_ms)
        c->behind_ms = clock_ms();
    return n <= 0 || done >= 0 || errno == EAGAIN;
}

/* " (exit status 3)" for a process that has ended. */
static const char *how(char text[48], bool ended, int status)
{
    text[0] = 0;
    if (ended && WIFEXITED(status)) snprintf(text, 48, " (exit status %d)", WEXITSTATUS(status));
    if (ended && WIFSIGNALED(status)) snprintf(text, 48, " (signal %d)", WTERMSIG(status));
    return text;
}

/* Whether the process ends by `until`, on clock_ms; pid is then 0. */
static bool ends_by(struct log_command *c, double until, int *status)
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

int log_command_send(struct log_command *c, struct err *why)
{
    char text[48];
    int status = 0;
    if (!c->pid || c->in < 0) return 0;
    if (!push(c)) {
        close_files(c);
        const bool ended = ends_by(c, clock_ms() + 50, &status); /* the pipe closes a moment before the process ends */
        return err_set(why, "log.command %s%s: it gets no further lines; metrics.jsonl has all of them",
                       ended ? "ended before the run" : "closed its standard input", how(text, ended, status));
    }
    if (c->warned || !c->behind_ms || clock_ms() - c->behind_ms < c->slow_ms) return 0;
    c->warned = true;
    return err_set(why, "log.command has not read its lines for %.0f s: the run goes on; metrics.jsonl has all of them",
                   c->slow_ms / 1e3);
}

/* ---- end */

static void end_group(struct log_command *c, pid_t group, int *status)
{
    kill(-group, SIGTERM);
    if (ends_by(c, clock_ms() + TERM_MS, status)) return;
    kill(-group, SIGKILL);
    while (waitpid(group, status, 0) < 0 && errno == EINTR) continue;
    c->pid = 0;
}

int log_command_close(struct log_command *c, struct err *why)
{
    const double start = clock_ms(), until = start + c->end_ms;
    const pid_t group = c->pid;
    char text[48];
    int status = 0, rc = 0;
    if (!c->pid) return 0;
    while (c->in >= 0 && !(rc = log_command_send(c, why)) && c->behind_ms && clock_ms() < until) {
        progress();
        poll(&(struct pollfd){.fd = c->in, .events = POLLOUT}, 1, 50);
    }
    const bool unread = c->in >= 0 && c->behind_ms;
    close_files(c);
    if (!c->pid) return rc;
    if (!unread && !ends_by(c, start + MT_MIN(TELL_MS, c->end_ms), &status))
        log_info("waiting for log.command to end, at most %.0f s", c->end_ms / 1e3);
    if (c->pid && (unread || !ends_by(c, until, &status))) {
        end_group(c, group, &status);
        return err_set(why, "log.command was ended %.0f s after the run%s; metrics.jsonl has all lines",
                       (clock_ms() - start) / 1e3, unread ? ", with lines that it had not read" : "");
    }
    if (!rc && (!WIFEXITED(status) || WEXITSTATUS(status)))
        rc = err_set(why, "log.command failed%s; metrics.jsonl has all lines", how(text, true, status));
    return rc;
}
