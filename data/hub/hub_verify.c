/* hub_verify.c - hashes files in the cache, once.
 *
 * A line of moetrain-verified is `HASH SIZE MTIME_NS`: a file of this size and modification time had this hash. Lines
 * are only appended, each by one write, so several processes may append. In a read-only cache nothing is hashed, as
 * every start would repeat it. */
#include "data/hub/hub_verify.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"

#define MARKS     "moetrain-verified"
#define MARKS_MAX ((int64_t)16 << 20)
#define CHUNK     (1 << 20)
#define WAIT_MS   300 /* delay while another process holds the lock */

static int marks_path(char path[MT_PATH], const struct hub_repo *repo, struct err *err)
{
    return hub_repo_path(path, repo, MARKS, NULL, err);
}

static void mark_line(char line[128], const struct hub_file *f, const struct stat *st)
{
    snprintf(line, 128, "%s %" PRId64 " %" PRId64 "\n", f->etag, (int64_t)st->st_size,
             (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec);
}

/* The lines of moetrain-verified, sorted by size and time, then by hash. */
struct marks {
    char *text;
    char **lines; /* [n] */
    int64_t n;
};

static const char *size_and_time(const char *line) { return line + strcspn(line, " "); }

static int by_size_and_time(const void *a, const void *b)
{
    return strcmp(size_and_time(*(char *const *)a), size_and_time(*(char *const *)b));
}

static int by_all(const void *a, const void *b)
{
    const int order = by_size_and_time(a, b);
    return order ? order : strcmp(*(char *const *)a, *(char *const *)b);
}

static struct marks read_marks(const struct hub_repo *repo)
{
    struct marks m = {.n = 0};
    char path[MT_PATH];
    int64_t size;
    m.text = !marks_path(path, repo, NULL) && file_exists(path) ? file_read(path, MARKS_MAX, &size, NULL) : NULL;
    if (!m.text) return m;
    for (const char *p = m.text; *p; p++) m.n += *p == '\n';
    m.lines = mem_array(MT_MAX(m.n, 1), sizeof(*m.lines));
    char *p = m.text;
    for (int64_t i = 0; i < m.n; i++, p += strlen(p) + 1) {
        m.lines[i] = p;
        p[strcspn(p, "\n")] = 0;
    }
    qsort(m.lines, (size_t)m.n, sizeof(*m.lines), by_all);
    return m;
}

static void free_marks(struct marks *m)
{
    mem_free(m->text);
    mem_free(m->lines);
}

/* For a file that the hub did not list, the blob's name may not be a hash; size and time are then sufficient. */
static bool is_marked(const struct marks *m, const struct hub_repo *repo, const struct hub_file *f,
                      const struct stat *st)
{
    char line[128];
    const char *key = line;
    mark_line(line, f, st);
    line[strcspn(line, "\n")] = 0;
    return m->n && bsearch(&key, m->lines, (size_t)m->n, sizeof(*m->lines), repo->cached ? by_size_and_time : by_all);
}

/* Opens moetrain-verified to append to it; -1: the cache cannot be written to. */
static int open_marks(const struct hub_repo *repo)
{
    char path[MT_PATH];
    return marks_path(path, repo, NULL)
               ? -1
               : open(path, O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
}

static void mark(const struct hub_repo *repo, const struct hub_file *f, const struct stat *st)
{
    char line[128];
    const int fd = open_marks(repo);
    mark_line(line, f, st);
    if (fd < 0) return;
    if (write(fd, line, strlen(line)) < 0) log_warn("%s: cannot write " MARKS ": %s", repo->id, strerror(errno));
    close(fd);
}

void hub_verify_mark(const struct hub_repo *repo, const struct hub_file *f)
{
    char path[MT_PATH];
    struct stat st;
    if (!hub_blob_path(path, repo, f->etag, NULL) && !stat(path, &st)) mark(repo, f, &st);
}

static bool is_whole(const char *path, const struct hub_file *f, struct stat *st)
{
    return !stat(path, st) && S_ISREG(st->st_mode) && st->st_size == f->size;
}

/* The path of the blob, or of the file in the snapshot. */
static enum hub_place find(char path[MT_PATH], const struct hub_repo *repo, const struct hub_file *f, struct stat *st)
{
    if (f->etag[0] && !hub_blob_path(path, repo, f->etag, NULL) && is_whole(path, f, st)) return HUB_BLOB;
    return !hub_snapshot_path(path, repo, f->path, NULL) && is_whole(path, f, st) ? HUB_SNAPSHOT : HUB_ABSENT;
}

static int hash_file(char hex[HASH_HEX], const char *path, const struct hub_file *f, struct err *err)
{
    struct hash h;
    ssize_t n;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return err_set(err, "%s: cannot open: %s", path, strerror(errno));
    if (strlen(f->etag) == 64)
        hash_init(&h);
    else
        hash_init_git(&h, f->size);
    char *chunk = mem_alloc(CHUNK);
    while ((n = read(fd, chunk, CHUNK)) > 0) {
        hash_add(&h, chunk, n);
        progress();
    }
    mem_free(chunk);
    close(fd);
    hash_hex(&h, hex);
    return n < 0 ? err_set(err, "%s: cannot read: %s", path, strerror(errno)) : 0;
}

/* Handles a blob whose content does not match its name. */
static int set_aside(const struct hub_repo *repo, const char *path, const char *hex, struct err *err)
{
    char aside[MT_PATH];
    if (repo->cached)
        return err_set(
            err, "%s is damaged or was changed: its hash is %.12s...; run once with access to the hub to repair it",
            path, hex);
    if (str_format(aside, sizeof(aside), err, "path in the hub's cache", "%s.damaged", path)) return -1;
    if (rename(path, aside)) return err_set(err, "%s: cannot rename: %s", path, strerror(errno));
    log_warn("%s is damaged or was changed (its hash is %.12s...): renamed to ....damaged, downloading it again", path,
             hex);
    return 0;
}

/* Waits while another process hashes or downloads the blob. Without locks two processes do the same work. */
static int wait_for_lock(const struct hub_repo *repo, const struct hub_file *f, bool *waited)
{
    const struct timespec pause = {.tv_nsec = WAIT_MS * 1000000};
    int lock = -1;
    for (*waited = false; !hub_cache_lock(&lock, repo, f, NULL) && lock < 0; *waited = true) {
        progress();
        nanosleep(&pause, NULL);
    }
    return lock;
}

/* Another process has hashed the file since moetrain-verified was read. */
static bool is_marked_now(const struct hub_repo *repo, const struct hub_file *f, const struct stat *st)
{
    struct marks m = read_marks(repo);
    const bool marked = is_marked(&m, repo, f, st);
    free_marks(&m);
    return marked;
}

static int verify(const struct hub_repo *repo, const struct hub_file *f, enum hub_place *where, struct err *err)
{
    char path[MT_PATH], hex[HASH_HEX];
    struct stat st;
    int rc = 0;
    bool waited;
    const int lock = wait_for_lock(repo, f, &waited);
    *where = find(path, repo, f, &st);
    if (*where != HUB_ABSENT && !(waited && is_marked_now(repo, f, &st))) {
        rc = hash_file(hex, path, f, err);
        if (!rc && !strcmp(hex, f->etag)) {
            mark(repo, f, &st);
        } else if (!rc) {
            if (*where == HUB_BLOB) rc = set_aside(repo, path, hex, err);
            *where = HUB_ABSENT;
        }
    }
    if (lock >= 0) close(lock);
    return rc;
}

int hub_verify(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, enum hub_place *where,
               struct err *err)
{
    char path[MT_PATH], size[32];
    struct stat st;
    int64_t bytes = 0, unmarked = 0;
    int rc = 0;
    struct marks marked = read_marks(repo);
    bool *open = mem_array(MT_MAX(n, 1), sizeof(*open)); /* must be hashed */
    for (int64_t i = 0; i < n; i++) {
        where[i] = find(path, repo, files[i], &st);
        open[i] = where[i] != HUB_ABSENT && files[i]->etag[0] && !is_marked(&marked, repo, files[i], &st);
        bytes += open[i] ? files[i]->size : 0;
        unmarked += open[i];
    }
    free_marks(&marked);
    const int marks = unmarked ? open_marks(repo) : -1;
    if (unmarked && marks < 0)
        log_info("%s: %s in the cache are used unverified: the cache is not writable", repo->id,
                 str_bytes(size, bytes));
    else if (unmarked)
        log_info("%s: verifying %s that other programs left in the cache, once", repo->id, str_bytes(size, bytes));
    if (marks >= 0) close(marks);
    for (int64_t i = 0; i < n && !rc && marks >= 0; i++)
        if (open[i]) rc = verify(repo, files[i], &where[i], err);
    mem_free(open);
    return rc;
}
