/* base.h - errors, log, clock, memory, small macros, for every file of moetrain.
 *
 * There are three kinds of failure. For an error that the user can fix (a file, a configuration, the data) a function
 * returns -1 and fills a struct err. A bug stops the process with file and line (MT_REQUIRE). When host memory for
 * small structures runs out, mem_alloc stops the process with the size of the request. */
#ifndef MT_BASE_H
#define MT_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MT_VERSION           "0.1.0"
#define MT_PATH              4096 /* bytes of a path buffer, the final NUL included */
#define MT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define MT_CHECK             __attribute__((warn_unused_result))
#define MT_LEN(array)        ((int64_t)(sizeof(array) / sizeof((array)[0])))
#define MT_MIN(a, b)         ((a) < (b) ? (a) : (b))
#define MT_MAX(a, b)         ((a) > (b) ? (a) : (b))

/* The message of an error: what, where, what to do. */
struct err {
    char msg[1024];
};

/* Fills e (which may be NULL) and returns -1, so that a function can end with `return err_set(e, ...)`. */
int err_set(struct err *e, const char *fmt, ...) MT_PRINTF(2, 3);
/* Puts "context: " before the message in e; returns -1. */
int err_prefix(struct err *e, const char *fmt, ...) MT_PRINTF(2, 3);

void log_info(const char *fmt, ...) MT_PRINTF(1, 2); /* one line to standard error */
void log_warn(const char *fmt, ...) MT_PRINTF(1, 2); /* one line that begins with "warning: " */
/* This process is one of several: warnings and fatal errors begin with "rank N: ", except on rank 0. Only rank 0 prints
 * info, and one rank per machine (`speaks`) warnings. */
void log_rank(int rank, bool speaks);

/* Prints file, line, condition and message, then aborts: only for bugs and failed devices. */
void die_at(const char *file, int line, const char *what, const char *fmt, ...) MT_PRINTF(4, 5)
    __attribute__((noreturn));
#define MT_REQUIRE(cond, ...)                                                                                          \
    do {                                                                                                               \
        if (!(cond)) die_at(__FILE__, __LINE__, #cond, __VA_ARGS__);                                                   \
    } while (0)

/* Prints the message as an error and ends the process: for a lack of memory or threads. */
void end_with_error(const char *fmt, ...) MT_PRINTF(1, 2) __attribute__((noreturn));

/* die_at calls `wait`, which may be NULL, before it aborts. When another rank is lost, this rank's device fails too;
 * during the wait the watch thread (comm.h), which knows the cause, ends the process. */
void die_after(void (*wait)(void));

double clock_ms(void); /* monotonic */

/* Heartbeat for the hang detector: any thread calls it for every piece of work that may take long (an op, bytes read or
 * written, a row of data). */
void progress(void);
uint64_t progress_count(void);

/* Zeroed host memory, never NULL; free with mem_free, which accepts NULL. mem_array checks count * size for overflow.
 * mem_grow keeps the old content and zeroes the rest. mem_reserve grows an array of *cap elements when `need` is
 * larger, and at least doubles *cap. */
void *mem_alloc(int64_t bytes);
void *mem_array(int64_t count, int64_t size);
void *mem_grow(void *p, int64_t old_count, int64_t new_count, int64_t size);
void *mem_reserve(void *p, int64_t *cap, int64_t need, int64_t size);
char *mem_strdup(const char *s);
char *mem_strndup(const char *s, int64_t n); /* n bytes, which may contain NUL, and a NUL */
void mem_free(void *p);

/* v with the sign of a NaN cleared: printf prints "-nan" for a negative one. */
double f64_unsigned_nan(double v);
double f64_for_4f(double v); /* the same for %.4f, also without the sign of what rounds to 0 */
/* a * b (or a + b) in *out; false when it does not fit or an operand is negative. */
bool i64_mul(int64_t a, int64_t b, int64_t *out);
bool i64_add(int64_t a, int64_t b, int64_t *out);

/* Bytes of the printable UTF-8 character at s (a C string). 0: a control character other than a tab, one that reorders
 * or hides text, or invalid UTF-8: by such bytes a hostile file or server could control a terminal. */
int str_printable(const char *s);
char *str_mask(char *text); /* one printable line, in place: a line feed becomes a blank, other unprintable bytes "?" */
uint32_t str_codepoint(const char *s, int n); /* of a valid character of n bytes */

/* snprintf into dst of size n; -1 with an error that names `what` when the text does not fit. */
int str_format(char *dst, size_t n, struct err *e, const char *what, const char *fmt, ...) MT_PRINTF(5, 6) MT_CHECK;
bool str_ends(const char *s, const char *end);
int64_t str_index(const char *s, const char *const *names, int64_t n); /* in names[n]; n: it is not there */
bool str_in(const char *s, const char *const *names, int64_t n);
/* The entry of names[n] nearest to word by edit distance, or NULL when none is near enough. */
const char *str_nearest(const char *word, const char *const *names, int64_t n);
/* "1.23 GiB" / "12.3 M" / "1:02:03" into buf of 32 bytes; returns buf. */
char *str_bytes(char buf[32], int64_t bytes);
char *str_count(char buf[32], int64_t count);
char *str_seconds(char buf[32], double seconds);
const char *str_plural(int64_t count); /* "" for 1, else "s" */

/* Shared libraries, opened at first use, so that the program also runs without them. library_open returns the first of
 * names[n] that opens, or NULL; it also looks in NVIDIA's packages in the Python environment of the executable.
 * library_find sets the pointers of all calls. Its error names the library (`what`) and the first missing function. */
struct library_call {
    const char *name;
    void *at; /* address of a function pointer */
};
/* The path of a library in NVIDIA's Python packages: PREFIX/lib/python3.x/site-packages/nvidia/x/lib/name for the
 * executable PREFIX/bin/x. */
bool library_beside(char path[MT_PATH], const char *executable, const char *name);
void *library_open(const char *const *names, int64_t n);
int library_find(void *library, const char *what, const struct library_call *calls, int64_t n, struct err *e) MT_CHECK;

/* Counter-based random numbers: results do not depend on the order of use. */
uint64_t rng_u64(uint64_t key, uint64_t counter);
double rng_uniform(uint64_t key, uint64_t counter);   /* [0, 1) */
uint64_t rng_key(uint64_t seed, const char *purpose); /* a separate stream for each purpose */
/* A hash of bytes: rng_u64 over words of eight bytes, the last word filled up with zeros. */
uint64_t rng_bytes(uint64_t key, const void *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
