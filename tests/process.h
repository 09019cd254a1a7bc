/* process.h - starts and stops the executable for tests, and reads its output. */
#ifndef MT_TEST_PROCESS_H
#define MT_TEST_PROCESS_H

#include <sys/types.h>

#include "tests/test.h"

/* Standard output and error of the last process that ended, at most 64 KiB each. */
struct said {
    char out[1 << 16], err[1 << 16];
};
extern struct said said;

/* fork() whose child is killed when the test process ends: a surviving child would keep the pipe to which the tests
 * print open, and the pipe's reader would wait forever. */
pid_t process_fork(void);

/* Starts moetrain with these arguments (NULL at the end); its output goes to DIR/stdout and DIR/stderr. */
pid_t process_start(const char *dir, const char *const *words);
/* The same through a shell, whose script runs the command as "$@". */
pid_t process_start_shell(const char *dir, const char *script, const char *const *words);
/* Returns the exit code, or 1000 + the signal that ended it; fills `said`. */
int process_finish(const char *dir, pid_t pid);
int process_run(const char *const *words);
/* Kills the run after ms milliseconds and starts it again, with an eighth more each time, until it ends with 0. */
void process_in_pieces(const char *const *words, long ms);
#define RUN(...) process_run((const char *const[]){__VA_ARGS__, NULL})

#define assert_says(text, part)                                                                                        \
    do {                                                                                                               \
        if (!strstr(text, part)) fail_msg("\"%s\" is not in:\n%s", part, text);                                        \
    } while (0)

/* Steps in metrics.jsonl of that INI file's output.dir. */
int process_steps(const char *config);
bool process_has_ended(pid_t pid); /* leaves it to process_finish */
/* Waits until the run has made n steps; after the first, every rank handles signals. Fails the test if the run ends
 * before. */
void process_wait_for_steps(const char *config, const char *dir, pid_t pid, int n);

/* Writes an INI file in a new directory and returns its path (in one of eight static buffers). Model and data are the
 * parity case, output.dir is out/ in that directory; the lines `more` follow. */
const char *process_config(const char *more);
/* Runs an INI file with assignments, separated by blanks; returns the exit code. */
int process_run_sets(const char *config, const char *sets);
/* Trains tests/fixtures/parity/case_a with the assignments `sets` and returns its INI file; fails the test if training
 * fails. */
const char *process_trained(const char *sets);
/* The path of NAME in the output.dir of that INI file, in one of eight static buffers. */
const char *process_output(const char *config, const char *name);
/* Fail unless two files, or the same output of two runs, have equal bytes. */
void assert_same_file(const char *a, const char *b);
void assert_same_output(const char *a, const char *b, const char *name);
/* The largest relative error of a tensor between the final adapters of two runs. */
#define ADAPTER "adapter/adapter_model.safetensors"
double adapter_error(const char *a, const char *b);
void process_read(const char *path, char *text, int64_t cap); /* reads a text file; adds a NUL, truncates at cap - 1 */

#endif
