/* base.c - errors, log, clock, host memory, text helpers, shared libraries, counter-based random numbers. */
#include "kernels/base.h"

#include <ctype.h>
#include <dlfcn.h>
#include <glob.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

uint32_t str_codepoint(const char *s, int n)
{
    static const uint8_t first[] = {0x7f, 0x7f, 0x1f, 0x0f, 0x07}; /* bits of the first byte of n */
    uint32_t code = (uint8_t)s[0] & first[n];
    for (int i = 1; i < n; i++) code = code << 6 | ((uint8_t)s[i] & 0x3f);
    return code;
}

/* Control characters; Unicode characters that reorder, break or hide text: bidirectional controls, line and paragraph
 * separators, soft hyphens, fillers, invisible operators, music controls and tags; surrogates and numbers above
 * U+10FFFF, which UTF-8 may not encode. Joiners (U+200C, U+200D) and variation selectors are allowed: words and emoji
 * have them. */
static bool is_unprintable(uint32_t code)
{
    static const uint32_t ranges[][2] = {
        {0, 8},           {0xa, 0x1f},           {0x7f, 0x9f},       {0xad, 0xad},       {0x34f, 0x34f},
        {0x61c, 0x61c},   {0x115f, 0x1160},      {0x17b4, 0x17b5},   {0x180e, 0x180e},   {0x200b, 0x200b},
        {0x200e, 0x200f}, {0x2028, 0x202e},      {0x2060, 0x206f},   {0x3164, 0x3164},   {0xfeff, 0xfeff},
        {0xffa0, 0xffa0}, {0xfff0, 0xfffb},      {0x1d173, 0x1d17a}, {0xe0000, 0xe00ff}, {0xe01f0, 0xe0fff},
        {0xd800, 0xdfff}, {0x110000, UINT32_MAX}};
    for (int i = 0; i < MT_LEN(ranges); i++)
        if (code >= ranges[i][0] && code <= ranges[i][1]) return true;
    return false;
}

int str_printable(const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    const int n = p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0;
    if (n == 1 && p[0] >= ' ' && p[0] < 127) return 1; /* the usual case */
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    const bool overlong = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90);
    return overlong || !n || is_unprintable(str_codepoint(s, n)) ? 0 : n;
}

char *str_mask(char *text)
{
    for (char *p = text; *p;) {
        const int n = str_printable(p);
        if (!n) *p = *p == '\n' ? ' ' : '?';
        p += MT_MAX(n, 1);
    }
    return text;
}

int err_set(struct err *e, const char *fmt, ...)
{
    if (!e) return -1;
    char text[sizeof(e->msg)]; /* the arguments may point into e->msg */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    str_mask(text);
    memcpy(e->msg, text, sizeof(text));
    return -1;
}

int err_prefix(struct err *e, const char *fmt, ...)
{
    if (!e) return -1;
    struct err old = *e;
    char context[sizeof(e->msg)];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(context, sizeof(context), fmt, ap);
    va_end(ap);
    const char *parts[] = {context, ": ", old.msg};
    size_t n = 0;
    for (int i = 0; i < 3; i++)
        for (const char *p = parts[i]; *p && n + 1 < sizeof(e->msg); p++) e->msg[n++] = *p;
    e->msg[n] = 0;
    str_mask(e->msg);
    return -1;
}

static struct {
    int rank;
    bool silent;
} log_of;

void log_rank(int rank, bool speaks)
{
    log_of.rank = rank;
    log_of.silent = !speaks;
}

static void log_line(const char *prefix, const char *fmt, va_list ap)
{
    static char text[4 * MT_PATH]; /* of the thread that holds the lock */
    flockfile(stderr);             /* lines of different threads do not mix */
    vsnprintf(text, sizeof(text), fmt, ap);
    str_mask(text);
    if (log_of.rank) fprintf(stderr, "rank %d: ", log_of.rank);
    fputs(prefix, stderr);
    fputs(text, stderr);
    fputc('\n', stderr);
    funlockfile(stderr);
}

void log_info(const char *fmt, ...)
{
    if (log_of.rank) return;
    va_list ap;
    va_start(ap, fmt);
    log_line("", fmt, ap);
    va_end(ap);
}

void log_warn(const char *fmt, ...)
{
    if (log_of.silent) return;
    va_list ap;
    va_start(ap, fmt);
    log_line("warning: ", fmt, ap);
    va_end(ap);
}

_Noreturn void end_with_error(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    fputs("moetrain: ", stderr);
    log_line("error: ", fmt, ap);
    va_end(ap);
    exit(1);
}

static void (*before_abort)(void);

void die_after(void (*wait)(void)) { before_abort = wait; }

_Noreturn void die_at(const char *file, int line, const char *what, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    fprintf(stderr, "%s:%d: %s does not hold: ", file, line, what);
    log_line("", fmt, ap);
    va_end(ap);
    if (before_abort) before_abort();
    abort();
}

double clock_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static atomic_uint_fast64_t n_progress;

void progress(void) { atomic_fetch_add_explicit(&n_progress, 1, memory_order_relaxed); }

/* Page faults count as progress: they are the only sign of a long copy out of a mapped file. Under ThreadSanitizer they
 * do not count, as its own records cause page faults even in a process that hangs. */
uint64_t progress_count(void)
{
    const uint64_t n = atomic_load_explicit(&n_progress, memory_order_relaxed);
#ifdef __SANITIZE_THREAD__
    return n;
#else
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return n + (uint64_t)u.ru_majflt + (uint64_t)u.ru_minflt;
#endif
}

/* ---- memory ---- */

static _Noreturn void out_of_memory(int64_t bytes)
{
    char text[32];
    end_with_error("out of memory: the system refused %s of host memory", str_bytes(text, bytes));
}

static int64_t array_bytes(int64_t count, int64_t size)
{
    int64_t bytes;
    MT_REQUIRE(i64_mul(count, size, &bytes), "array of %lld x %lld bytes", (long long)count, (long long)size);
    return bytes;
}

void *mem_alloc(int64_t bytes)
{
    MT_REQUIRE(bytes >= 0, "allocation of %lld bytes", (long long)bytes);
    void *p = calloc(1, bytes ? (size_t)bytes : 1);
    if (!p) out_of_memory(bytes);
    return p;
}

void *mem_array(int64_t count, int64_t size) { return mem_alloc(array_bytes(count, size)); }

void *mem_grow(void *p, int64_t old_count, int64_t new_count, int64_t size)
{
    int64_t old_bytes = array_bytes(old_count, size), new_bytes = array_bytes(new_count, size);
    char *grown = realloc(p, new_bytes ? (size_t)new_bytes : 1);
    if (!grown) out_of_memory(new_bytes);
    if (new_bytes > old_bytes) memset(grown + old_bytes, 0, (size_t)(new_bytes - old_bytes));
    return grown;
}

void *mem_reserve(void *p, int64_t *cap, int64_t need, int64_t size)
{
    const int64_t old = *cap;
    if (need <= old) return p;
    *cap = MT_MAX(2 * old, need + 8 + 1024 / size); /* a kilobyte at least */
    return mem_grow(p, old, *cap, size);
}

char *mem_strndup(const char *s, int64_t n) { return memcpy(mem_alloc(n + 1), s, (size_t)n); }

char *mem_strdup(const char *s) { return mem_strndup(s, (int64_t)strlen(s)); }

void mem_free(void *p) { free(p); }

double f64_unsigned_nan(double v) { return isnan(v) ? (double)NAN : v; }
double f64_for_4f(double v) { return fabs(v) < 5e-5 ? 0 : f64_unsigned_nan(v); }

bool i64_mul(int64_t a, int64_t b, int64_t *out) { return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, out); }

bool i64_add(int64_t a, int64_t b, int64_t *out) { return a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, out); }

/* ---- text ---- */

int str_format(char *dst, size_t n, struct err *e, const char *what, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int len = vsnprintf(dst, n, fmt, ap);
    va_end(ap);
    if (len >= 0 && (size_t)len < n) return 0;
    return err_set(e, "%s is too long: %d bytes, at most %zu fit: %.60s...", what, len, n - 1, dst);
}

#define MT_WORD_MAX 255 /* longer words have no nearest name */

/* Edit distance of a and b: insertion, deletion, substitution and the swap of two neighbours cost 1 each; case is
 * ignored (optimal string alignment: Damerau-Levenshtein without a second edit inside a swap). */
static int64_t edit_distance(const char *a, int64_t na, const char *b, int64_t nb)
{
    int64_t rows[3][MT_WORD_MAX + 1]; /* distances of a's prefixes i-2, i-1 and i to every prefix of b, in rotation */
    for (int64_t j = 0; j <= nb; j++) rows[0][j] = j;
    for (int64_t i = 1; i <= na; i++) {
        int64_t *now = rows[i % 3], *before = rows[(i + 2) % 3], *earlier = rows[(i + 1) % 3];
        now[0] = i;
        for (int64_t j = 1; j <= nb; j++) {
            int ca = tolower((unsigned char)a[i - 1]), cb = tolower((unsigned char)b[j - 1]);
            int64_t best = MT_MIN(before[j] + 1, now[j - 1] + 1);
            best = MT_MIN(best, before[j - 1] + (ca != cb));
            bool swapped =
                i > 1 && j > 1 && ca == tolower((unsigned char)b[j - 2]) && cb == tolower((unsigned char)a[i - 2]);
            if (swapped) best = MT_MIN(best, earlier[j - 2] + 1);
            now[j] = best;
        }
    }
    return rows[na % 3][nb];
}

bool str_ends(const char *s, const char *end)
{
    const size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

int64_t str_index(const char *s, const char *const *names, int64_t n)
{
    int64_t i = 0;
    while (i < n && strcmp(names[i], s)) i++;
    return i;
}

bool str_in(const char *s, const char *const *names, int64_t n) { return str_index(s, names, n) < n; }

const char *str_nearest(const char *word, const char *const *names, int64_t n)
{
    const char *nearest = NULL;
    int64_t len = (int64_t)strlen(word), best = INT64_MAX;
    if (len > MT_WORD_MAX) return NULL;
    for (int64_t i = 0; i < n; i++) {
        int64_t name_len = (int64_t)strlen(names[i]), longest = MT_MAX(len, name_len);
        int64_t near = (longest + 2) / 3; /* at most a third of the letters may differ */
        int64_t at_least = longest - MT_MIN(len, name_len);
        if (longest > MT_WORD_MAX || at_least > near || at_least >= best) continue;
        int64_t distance = edit_distance(word, len, names[i], name_len);
        if (distance > near || distance >= best) continue;
        best = distance;
        nearest = names[i];
    }
    return nearest;
}

/* Three significant digits of value / step^k with the k-th suffix. */
static char *scaled(char buf[32], int64_t value, double step, const char *const suffix[], int n_suffix)
{
    double v = (double)value;
    int k = 0;
    while (k + 1 < n_suffix && (v < 0 ? -v : v) >= step - 0.5) { /* what rounds to step has the next suffix */
        v /= step;
        k++;
    }
    double size = v < 0 ? -v : v;
    int digits = k == 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
    snprintf(buf, 32, "%.*f%s%s", digits, v, suffix[k][0] ? " " : "", suffix[k]);
    return buf;
}

char *str_bytes(char buf[32], int64_t bytes)
{
    static const char *const suffix[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    return scaled(buf, bytes, 1024, suffix, 6);
}

char *str_count(char buf[32], int64_t count)
{
    static const char *const suffix[] = {"", "k", "M", "G", "T"};
    return scaled(buf, count, 1000, suffix, 5);
}

const char *str_plural(int64_t count) { return count == 1 ? "" : "s"; }

char *str_seconds(char buf[32], double seconds)
{
    if (!(seconds >= 0 && seconds < 1e12)) {
        snprintf(buf, 32, "?");
        return buf;
    }
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600)
        snprintf(buf, 32, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(buf, 32, "%lld:%02lld", s / 60, s % 60);
    return buf;
}

/* ---- shared libraries ---- */

bool library_beside(char path[MT_PATH], const char *executable, const char *name)
{
    char pattern[MT_PATH];
    glob_t found;
    const char *end = strrchr(executable, '/');
    if (!end || strchr(name, '/')) return false;
    const int n = snprintf(pattern, sizeof(pattern), "%.*s/../lib/python3*/site-packages/nvidia/*/lib/%s",
                           (int)(end - executable), executable, name);
    if (n < 0 || n >= MT_PATH || glob(pattern, 0, NULL, &found)) return false;
    snprintf(path, MT_PATH, "%s", found.gl_pathv[0]);
    globfree(&found);
    return true;
}

void *library_open(const char *const *names, int64_t n)
{
    void *library = NULL;
    char executable[MT_PATH] = "", path[MT_PATH];
    for (int64_t i = 0; i < n && !library; i++) library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library || readlink("/proc/self/exe", executable, sizeof(executable) - 1) < 0) return library;
    for (int64_t i = 0; i < n && !library; i++)
        if (library_beside(path, executable, names[i])) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library;
}

int library_find(void *library, const char *what, const struct library_call *calls, int64_t n, struct err *e)
{
    for (int64_t i = 0; i < n; i++) {
        void *symbol = dlsym(library, calls[i].name);
        if (!symbol) return err_set(e, "%s is too old: it lacks %s", what, calls[i].name);
        memcpy(calls[i].at, &symbol, sizeof(symbol));
    }
    return 0;
}

/* ---- random numbers ---- */

/* The finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): a bijection
 * in which every input bit flips every output bit with probability close to one half. */
static uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* The key is mixed in twice, so that the streams of two keys are not shifted copies of each other. */
uint64_t rng_u64(uint64_t key, uint64_t counter)
{
    uint64_t x = mix64(key + (counter + 1) * 0x9e3779b97f4a7c15u);
    return mix64(x ^ (key * 0xd1342543de82ef95u + 0x632be59bd9b4e019u));
}

double rng_uniform(uint64_t key, uint64_t counter) { return (double)(rng_u64(key, counter) >> 11) * 0x1p-53; }

uint64_t rng_key(uint64_t seed, const char *purpose)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (const char *p = purpose; *p; p++) hash = (hash ^ (uint8_t)*p) * 0x100000001b3u;
    return rng_u64(mix64(seed + 0x9e3779b97f4a7c15u), hash);
}

uint64_t rng_bytes(uint64_t key, const void *data, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + at, (size_t)MT_MIN(8, bytes - at));
        key = rng_u64(key, word);
    }
    return key;
}
