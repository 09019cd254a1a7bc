/* log_command.h - log.command: a process whose standard input has the lines of metrics.jsonl. The file is the queue:
 * the run writes as many of its bytes as the pipe takes, without waiting. So a process that reads slowly does not delay
 * the run. */
#ifndef MT_LOG_COMMAND_H
#define MT_LOG_COMMAND_H

#include "data/file/child.h"

struct log_command {
    struct child child;     /* in is -1 when the process does not read it any more */
    int lines;              /* metrics.jsonl, opened for reading */
    int64_t sent;           /* bytes of the file */
    double behind_ms;       /* since when the pipe is full; 0: the process has all lines */
    bool warned;            /* that the process is slow */
    double slow_ms, end_ms; /* slow_ms: a pipe that is full for this time causes a warning; end_ms: time for the process
                               to finish after the run */
};
struct log_command_run {
    const char *command, *name, *dir; /* for sh -c; log.name, or empty; output.dir */
    bool resumed;
};
/* Starts the process in a separate process group, so that Ctrl-C in a terminal does not end it before the run. It gets
 * the lines that are appended to `path` from now on. Its standard output goes to standard error. */
int log_command_open(struct log_command *c, const char *path, const struct log_command_run *run,
                     struct err *err) MT_CHECK;
/* Sends lines. -1, at most once: the process ended or is slow; the caller logs `why`. */
int log_command_send(struct log_command *c, struct err *why) MT_CHECK;
/* Sends the rest, closes the pipe and waits for the process, at most end_ms in all; then ends its process group. -1: as
 * log_command_send. */
int log_command_close(struct log_command *c, struct err *why) MT_CHECK;

#endif
