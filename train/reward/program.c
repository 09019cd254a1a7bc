/* program.c - see program.h. */
#include "train/reward/program.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { BUFFER = 1 << 14, END_MS = 2000, TELL_MS = 300, SAID = 4000, READS = 64 };

/* With this variable Python writes each line at once, as on a terminal. */
static char unbuffered[] = "PYTHONUNBUFFERED=1";

static int start(struct program *p)
{
    int64_t n = 0, kept = 0;
    while (environ[n]) n++;
    char **env = mem_array(n + 2, sizeof(*env));
    for (int64_t i = 0; i < n; i++)
        if (strncmp(environ[i], unbuffered, strcspn(unbuffered, "=") + 1)) env[kept++] = environ[i];
    env[kept] = unbuffered;
    const int rc = child_start(&p->child, p->argv, env, CHILD_IN | CHILD_OUT | CHILD_ERR);
    mem_free(env);
    p->sent = p->n_line = p->to.size = p->from.size = p->said.size = 0;
    return rc;
}

/* The script that an interpreter runs: its first argument; Python may have options of one letter without a value before
 * it. NULL: argv has no script, or it is not known. */
static const char *script_of(char *const argv[])
{
    static const char *const interpreters[] = {"sh", "bash", "node", "perl", "ruby"};
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];
    const bool python = !strncmp(name, "python", 6);
    if (!python && !str_in(name, interpreters, MT_LEN(interpreters))) return NULL;
    int i = 1;
    while (python && argv[i] && argv[i][0] == '-' && argv[i][1] && strchr("BEIOPSdiqsuv", argv[i][1]) && !argv[i][2])
        i++;
    return argv[i] && argv[i][0] != '-' ? argv[i] : NULL;
}

static int not_started(const struct program *p, int why, struct err *err)
{
    const char *name = p->argv[0], *hint = "";
    if (why == ENOENT)
        hint = strchr(name, '/')
                   ? ": check its path, which is from the current directory; {here}/ is the folder of the "
                     "configuration"
                   : ": check its spelling; no folder of PATH has it";
    return err_set(err, "%s: %.200s cannot be started: %s%s", p->key, name, strerror(why), hint);
}

int program_open(struct program *p, const char *key, char *const argv[], struct err *err)
{
    const char *script = script_of(argv);
    *p = (struct program){.argv = argv};
    snprintf(p->key, sizeof(p->key), "%s", key);
    if (script && access(script, R_OK))
        return err_set(err,
                       "%s: %.200s cannot be read: %s; it is a path from the current directory, and {here}/ before it "
                       "is the folder of the configuration",
                       key, script, strerror(errno));
    const int rc = start(p);
    return rc ? not_started(p, rc, err) : 0;
}

int program_put(struct program *p, const char *line, int64_t size, struct err *err)
{
    if (size > PROGRAM_LINE)
        return err_set(err, "%s: a row takes %lld bytes as JSON; the limit is %d", p->key, (long long)size,
                       PROGRAM_LINE);
    if (p->sent == p->to.size) {
        p->sent = p->to.size = 0;
    } else if (p->sent > PROGRAM_LINE && p->sent > p->to.size / 2) {
        memmove(p->to.text, p->to.text + p->sent, (size_t)(p->to.size - p->sent));
        p->to.size -= p->sent;
        p->sent = 0;
    }
    text_put_bytes(&p->to, line, size);
    return 0;
}

/* ---- its streams ---- */

static void write_lines(struct program *p)
{
    while (p->child.in >= 0 && p->sent < p->to.size) {
        const ssize_t n = child_write(&p->child, p->to.text + p->sent, (size_t)(p->to.size - p->sent));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN) child_close(&p->child.in); /* the program may still write its output */
        if (n < 0) return;
        p->sent += n;
    }
}

/* Reads the bytes that are there, at most BUFFER. 0: there are none now, or the stream has ended and is now closed. */
static ssize_t read_some(int *fd, char buf[BUFFER])
{
    ssize_t n = -1;
    if (*fd < 0) return 0;
    do n = read(*fd, buf, BUFFER);
    while (n < 0 && errno == EINTR);
    if (!n || (n < 0 && errno != EAGAIN)) child_close(fd);
    return MT_MAX(n, 0);
}

static void log_said(struct program *p)
{
    text_put_bytes(&p->said, "", 1);
    if (p->said.size > 1) log_info("%s: %s", p->key, str_mask(p->said.text));
    p->said.size = 0;
}

static void read_said(struct program *p)
{
    char buf[BUFFER];
    ssize_t n;
    for (int k = 0; k < READS && (n = read_some(&p->child.err, buf)) > 0; k++) /* the program may write without end */
        for (ssize_t i = 0; i < n; i++) {
            if (buf[i] != '\n') text_put_bytes(&p->said, buf + i, 1);
            if (buf[i] == '\n' || p->said.size == SAID) log_said(p);
        }
    if (p->child.err < 0 && p->said.size) log_said(p);
}

static int take(struct program *p, const struct program_reader *reader, const char *text, int64_t size, struct err *err)
{
    p->n_line++;
    return text_is_blank(text, size) ? 0 : reader->line(reader->user, text, size, err);
}

/* *all: nothing is left in the pipe for now. */
static int read_lines(struct program *p, const struct program_reader *reader, bool *all, struct err *err)
{
    char buf[BUFFER];
    ssize_t n = 0;
    for (int k = 0; k < READS && (n = read_some(&p->child.out, buf)) > 0; k++)
        for (const char *at = buf, *end = buf + n; at < end;) {
            const char *line = memchr(at, '\n', (size_t)(end - at));
            const int64_t size = (line ? line : end) - at;
            if (p->from.size + size > PROGRAM_LINE)
                return err_set(err, "%s: line %lld of its output is longer than %d bytes", p->key,
                               (long long)p->n_line + 1, PROGRAM_LINE);
            if (line && !p->from.size) {
                if (take(p, reader, at, size, err)) return -1;
            } else {
                text_put_bytes(&p->from, at, size);
                if (line && take(p, reader, p->from.text, p->from.size, err)) return -1;
                if (line) p->from.size = 0;
            }
            at += size + 1;
        }
    *all = !n;
    return 0;
}

/* When the program has ended and all its output is read, program_work closes the pipe, even if a process that the
 * program started still has it open. */
int program_work(struct program *p, const struct program_reader *reader, struct err *err)
{
    const bool ended = child_has_ended(&p->child);
    bool all;
    write_lines(p);
    read_said(p);
    if (read_lines(p, reader, &all, err)) return -1;
    if (ended && all) child_close(&p->child.out);
    return 0;
}

bool program_ended(const struct program *p) { return p->child.out < 0; }

int program_fds(const struct program *p, struct pollfd fds[PROGRAM_FDS])
{
    int n = 0;
    if (p->child.out >= 0) fds[n++] = (struct pollfd){.fd = p->child.out, .events = POLLIN};
    if (p->child.err >= 0) fds[n++] = (struct pollfd){.fd = p->child.err, .events = POLLIN};
    if (p->child.in >= 0 && p->sent < p->to.size) fds[n++] = (struct pollfd){.fd = p->child.in, .events = POLLOUT};
    return n;
}

/* ---- its end ---- */

static void close_streams(struct program *p)
{
    child_close(&p->child.in);
    child_close(&p->child.out);
    child_close(&p->child.err);
}

static int ignore(void *user, const char *text, int64_t size, struct err *err)
{
    (void)user, (void)text, (void)size, (void)err;
    return 0;
}

int program_restart(struct program *p, const char *why, const char *lost, struct err *err)
{
    char how[48] = "";
    int status = 0;
    if (p->child.pid) child_finish(&p->child, why ? 0 : TELL_MS, &status);
    read_said(p);
    if (!why) child_how(how, status);
    close_streams(p);
    if (++p->n_failed >= PROGRAM_FAILURES)
        return err_set(err, "%s %s%s, the %drd failure in a row: correct the program (%.200s)", p->key,
                       why ? why : "ended", how, PROGRAM_FAILURES, p->argv[0]);
    log_warn("%s %s%s: %s; it is started again", p->key, why ? why : "ended", how, lost);
    const int rc = start(p);
    return rc ? not_started(p, rc, err) : 0;
}

void program_close(struct program *p)
{
    const struct program_reader nobody = {.line = ignore};
    const double until = clock_ms() + END_MS;
    int status;
    struct err unused;
    if (p->child.pid) {
        struct pollfd fds[PROGRAM_FDS];
        child_close(&p->child.in);
        for (int n; (n = program_fds(p, fds)) && clock_ms() < until && !program_work(p, &nobody, &unused);)
            poll(fds, (nfds_t)n, 50), progress();
        child_finish(&p->child, MT_MAX(until - clock_ms(), 0), &status);
        read_said(p);
        close_streams(p);
    }
    text_free(&p->to);
    text_free(&p->from);
    text_free(&p->said);
    *p = (struct program){.n_line = 0};
}

int program_bad_line(const struct program *p, struct err *err, const char *text, int64_t size, const char *what)
{
    char shown[256];
    snprintf(shown, sizeof(shown), "%.*s%s", (int)MT_MIN(size, 200), text, size > 200 ? "..." : "");
    return err_set(err, "%s: line %lld of its output, %s: %s", p->key, (long long)p->n_line, str_mask(shown), what);
}

/* ---- JSON ---- */

void program_put_member(struct text_buf *line, const char *key, const char *json)
{
    text_put_key(line, key);
    const int64_t from = line->size;
    text_put(line, json);
    for (int64_t i = from; i < line->size; i++)
        if (line->text[i] == '\n' || line->text[i] == '\r') line->text[i] = ' ';
}

int program_reward(struct json j, bool nan_is_null, double *value, struct err *err)
{
    const enum json_type type = json_type(j);
    const char *wide = type == JSON_REAL ? json_wide(j) : NULL;
    *value = (double)NAN;
    if (type == JSON_NULL) return 0;
    if (type != JSON_INT && type != JSON_REAL) return err_set(err, "\"reward\": expected a number or null");
    if (!wide || !strpbrk(wide, "NI"))
        return json_f64(j, value, NULL) ? err_set(err, "\"reward\" is beyond a double") : 0;
    return nan_is_null ? 0 : err_set(err, "\"reward\" is not finite: correct it, or set reward.on_nan = null");
}

int program_check_keys(struct json reply, const char *const *known, int n, struct err *err)
{
    const char *key;
    struct json value;
    char shown[80], list[256] = "";
    for (int64_t i = 0; json_member(reply, i, &key, &value); i++) {
        if (str_in(key, known, n)) continue;
        const char *near = str_nearest(key, known, n);
        for (int k = 0; k < n; k++)
            snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", k ? ", " : "", known[k]);
        snprintf(shown, sizeof(shown), "%.64s", key);
        return err_set(err, "unknown key \"%s\"%s%s%s; the keys are %s", str_mask(shown),
                       near ? " (did you mean \"" : "", near ? near : "", near ? "\"?)" : "", list);
    }
    return 0;
}
