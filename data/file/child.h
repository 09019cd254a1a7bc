/* child.h - a program that runs beside this process, with pipes to its standard streams. */
#ifndef MT_CHILD_H
#define MT_CHILD_H

#include <sys/types.h>

#include "kernels/base.h"

struct child {
    pid_t pid;        /* also the number of its new process group, so that Ctrl-C in a terminal does not end it; 0: no
                         program runs */
    int in, out, err; /* our ends of its pipes, which do not block; -1: closed */
};
enum child_pipes { CHILD_IN = 1, CHILD_OUT = 2, CHILD_ERR = 4 };
/* Starts argv[0], found as a shell finds it. Without CHILD_OUT its standard output goes to standard error; its other
 * streams without a pipe are those of this process. It inherits neither signals nor other descriptors. Returns 0 or an
 * error number. */
int child_start(struct child *c, char *const argv[], char *const env[], int pipes) MT_CHECK;
void child_close(int *fd); /* one end; -1 is fine */

/* write(2) without SIGPIPE: EPIPE when the program no longer reads. */
ssize_t child_write(const struct child *c, const char *data, size_t n);
bool child_has_ended(const struct child *c); /* without reaping it; other processes of its group may live on */
/* Waits until the program ends or clock_ms() reaches `until`. True: it ended and is reaped, and pid is 0; other
 * processes of its group may live on. */
bool child_ends_by(struct child *c, double until, int *status);
/* Ends the group, SIGTERM first when `gently`, and reaps the program; pid is then 0. */
void child_end_group(struct child *c, bool gently, int *status);
/* Waits at most `ms` for the program to end by itself, which keeps its exit status, then calls child_end_group. */
void child_finish(struct child *c, double ms, int *status);
/* How a program ended: " (exit status 3)", " (signal 9)", or "". */
const char *child_how(char text[48], int status);

#endif
