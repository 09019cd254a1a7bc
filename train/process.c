/* process.c - descriptors and signals of a process. */
#include "train/process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#define LEAST_STACK (256 << 10) /* bytes; `check` and `export` take up to 160 KiB */

void process_prepare(void)
{
    int fd;
    do fd = open("/dev/null", O_RDWR); /* open returns the lowest free descriptor */
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
    signal(SIGXFSZ, SIG_IGN);
}

int process_check_stack(struct err *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= LEAST_STACK) return 0;
    return err_set(err, "the limit of the stack is %lld KiB, moetrain needs %d: raise it (`ulimit -s 8192`)",
                   (long long)(limit.rlim_cur >> 10), LEAST_STACK >> 10);
}

static char incomplete[MT_PATH];

/* The default action of the signal follows when the handler returns. */
static void delete_incomplete(int number)
{
    unlink(incomplete);
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
