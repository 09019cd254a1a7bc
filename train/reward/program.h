/* program.h - a program of the user that answers lines of JSON by lines of JSON, for rewards and environments. */
#ifndef MT_PROGRAM_H
#define MT_PROGRAM_H

#include <poll.h>

#include "data/file/child.h"
#include "data/json/text.h"

enum { PROGRAM_LINE = 16 << 20, PROGRAM_FAILURES = 3, PROGRAM_FDS = 3 };

struct program {
    char key[64];      /* the setting that names it, for messages */
    char *const *argv; /* of the owner */
    struct child child;
    struct text_buf to;   /* lines for it, of which `sent` bytes are written */
    struct text_buf from; /* the beginning of a line of its standard output */
    struct text_buf said; /* the beginning of a line of its standard error; complete lines are logged */
    int64_t sent, n_line; /* lines that it has written since it was started */
    int n_failed;         /* failures in a row: the owner sets it to 0 after a success */
};
int program_open(struct program *p, const char *key, char *const argv[], struct err *err) MT_CHECK;
/* Closes the program's standard input, and 2 s later ends its process group. */
void program_close(struct program *p); /* p may be zeroed */

/* Queues a line for the program's standard input. Error: the line, with its line feed, is longer than PROGRAM_LINE. */
int program_put(struct program *p, const char *line, int64_t size, struct err *err) MT_CHECK;

/* Reads and writes without waiting, and calls `line` for each complete line. Errors: that of `line`, after which it
 * returns at once; a line longer than PROGRAM_LINE. */
struct program_reader {
    int (*line)(void *user, const char *text, int64_t size, struct err *err);
    void *user;
};
int program_work(struct program *p, const struct program_reader *reader, struct err *err) MT_CHECK;
bool program_ended(const struct program *p); /* it has ended or closed its standard output, and all output is read */
/* Sets fds to the descriptors to wait for before program_work; returns their number. */
int program_fds(const struct program *p, struct pollfd fds[PROGRAM_FDS]);

/* Ends the program's process group and starts the program again, without queued lines. why: "gave no answer for 60 s";
 * NULL: it ended. lost: the consequence, for the warning. Error: the third failure in a row, or the program cannot be
 * started. */
int program_restart(struct program *p, const char *why, const char *lost, struct err *err) MT_CHECK;
/* Appends "key": json, without the line feeds that JSON may have between its values. */
void program_put_member(struct text_buf *line, const char *key, const char *json);
/* Reads a reward from the program's output: a finite number, or null, for which *value is NaN. Python's NaN and
 * Infinity are errors unless nan_is_null. */
int program_reward(struct json j, bool nan_is_null, double *value, struct err *err) MT_CHECK;
/* Error: the object has a key that is not in known [n]. */
int program_check_keys(struct json reply, const char *const *known, int n, struct err *err) MT_CHECK;
/* Sets an error with the key, `what` and the line of the program's output; returns -1. */
int program_bad_line(const struct program *p, struct err *err, const char *text, int64_t size, const char *what);

#endif
