/* process.h - for tests that run the executable: start it, stop it, read its output. */
#ifndef MT_TEST_PROCESS_H
#define MT_TEST_PROCESS_H

#include <sys/types.h>

#include "tests/test.h"

/* Output of the process that ended last, at most 64 KiB each. */
struct said {
    char out[1 << 16], err[1 << 16];
};
extern struct said said;

/* Starts moetrain with these arguments (NULL at the end); its output goes to DIR/stdout and DIR/stderr. */
pid_t process_start(const char *dir, const char *const *words);
/* The same through a shell, whose script runs the command as "$@". */
pid_t process_start_shell(const char *dir, const char *script, const char *const *words);
/* Returns the exit code, or 1000 + the signal that ended it; fills `said`. */
int process_finish(const char *dir, pid_t pid);
int process_run(const char *const *words);
#define RUN(...) process_run((const char *const[]){__VA_ARGS__, NULL})

#define assert_says(text, part)                                                                                        \
    do {                                                                                                               \
        if (!strstr(text, part)) fail_msg("\"%s\" is not in:\n%s", part, text);                                        \
    } while (0)

/* An INI file in a fresh directory: the parity case as model and data, output in out/ in the same directory, then the
 * lines `more`. The path, in one of eight static buffers. */
const char *process_config(const char *more);
/* DIR/out/NAME in the directory of that INI file; likewise. */
const char *process_output(const char *config, const char *name);
/* Two files, or an output of two runs, have the same bytes. */
void assert_same_file(const char *a, const char *b);
void assert_same_output(const char *a, const char *b, const char *name);
/* The final adapters of two runs: the largest relative error of a tensor. */
#define ADAPTER "adapter/adapter_model.safetensors"
double adapter_error(const char *a, const char *b);
void process_read(const char *path, char *text, int64_t cap); /* a text file, NUL-terminated, truncated at cap - 1 */

#endif
