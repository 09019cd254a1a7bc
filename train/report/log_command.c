/* log_command.c - see log_command.h. */
#include "train/report/log_command.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { BUFFER = 1 << 14, TELL_MS = 1000 };

/* ---- start */

/* The environment of this process and three more variables, whose texts are in `own`. */
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

/* Returns 0 or an error number. */
static int start(struct log_command *c, const struct log_command_run *run)
{
    char own[3][MT_PATH + 32], *argv[] = {"/bin/sh", "-c", (char *)(uintptr_t)run->command, NULL};
    char **env = environment(own, run);
    const int rc = child_start(&c->child, argv, env, CHILD_IN);
    mem_free(env);
    return rc;
}

static void close_files(struct log_command *c)
{
    child_close(&c->child.in);
    child_close(&c->lines);
}

int log_command_open(struct log_command *c, const char *path, const struct log_command_run *run, struct err *err)
{
    *c = (struct log_command){.lines = open(path, O_RDONLY | O_CLOEXEC), .slow_ms = 60e3, .end_ms = 30e3};
    if (c->lines < 0) return err_set(err, "%s: cannot be read: %s", path, strerror(errno));
    c->sent = lseek(c->lines, 0, SEEK_END);
    const int rc = start(c, run);
    if (!rc) return 0;
    close_files(c);
    return err_set(err, "log.command = %.200s: cannot be started: %s", run->command, strerror(rc));
}

/* ---- lines */

/* Writes as many bytes as the pipe takes. False: the process has closed the pipe. */
static bool push(struct log_command *c)
{
    char buf[BUFFER];
    ssize_t n, done = 0;
    while ((n = pread(c->lines, buf, sizeof(buf), c->sent)) > 0) {
        do done = child_write(&c->child, buf, (size_t)n);
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

int log_command_send(struct log_command *c, struct err *why)
{
    char text[48];
    int status = 0;
    if (!c->child.pid || c->child.in < 0) return 0;
    if (!push(c)) {
        close_files(c);
        const bool ended =
            child_ends_by(&c->child, clock_ms() + 50, &status); /* the pipe closes a moment before the process ends */
        return err_set(why, "log.command %s%s: it gets no further lines; metrics.jsonl has all of them",
                       ended ? "ended before the run" : "closed its standard input",
                       ended ? child_how(text, status) : "");
    }
    if (c->warned || !c->behind_ms || clock_ms() - c->behind_ms < c->slow_ms) return 0;
    c->warned = true;
    return err_set(why, "log.command has not read its lines for %.0f s: the run goes on; metrics.jsonl has all of them",
                   c->slow_ms / 1e3);
}

/* ---- end */

int log_command_close(struct log_command *c, struct err *why)
{
    const double start = clock_ms(), until = start + c->end_ms;
    char text[48];
    int status = 0, rc = 0;
    if (!c->child.pid) return 0;
    while (c->child.in >= 0 && !(rc = log_command_send(c, why)) && c->behind_ms && clock_ms() < until) {
        progress();
        poll(&(struct pollfd){.fd = c->child.in, .events = POLLOUT}, 1, 50);
    }
    const bool unread = c->child.in >= 0 && c->behind_ms;
    close_files(c);
    if (!c->child.pid) return rc;
    if (!unread && !child_ends_by(&c->child, start + MT_MIN(TELL_MS, c->end_ms), &status))
        log_info("waiting for log.command to end, at most %.0f s", c->end_ms / 1e3);
    if (c->child.pid && (unread || !child_ends_by(&c->child, until, &status))) {
        child_end_group(&c->child, true, &status);
        return err_set(why, "log.command was ended %.0f s after the run%s; metrics.jsonl has all lines",
                       (clock_ms() - start) / 1e3, unread ? ", with lines that it had not read" : "");
    }
    if (!rc && (!WIFEXITED(status) || WEXITSTATUS(status)))
        rc = err_set(why, "log.command failed%s; metrics.jsonl has all lines", child_how(text, status));
    return rc;
}
