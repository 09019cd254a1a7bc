/* hub_rows.c - rows of a data set in pages, from the hub's viewer.
 *
 * A page is at most 100 rows and the total of all rows; several are requested concurrently. Rows are appended in order
 * to a partial file in the cache, which is synced after every page. After an interruption the next start counts its
 * lines and continues there. A complete file becomes a blob named by its SHA-256, like any file in the cache. Every
 * page must be of the commit, give the same total, and contain the requested rows untruncated. */
#include "data/hub/hub_rows.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub_http.h"
#include "data/hub/hub_url.h"
#include "data/hub/hub_verify.h"
#include "data/json/json.h"
#include "data/json/text.h"

#define PAGE     100     /* rows: the viewer's limit */
#define AT_ONCE  4       /* concurrent pages */
#define MAX_ROWS 1000000 /* 10,000 pages: an hour at the hub's rate limit */
#define RESTARTS 2       /* times that the rows may be downloaded again */
#define WAIT_MS  300     /* delay while another process holds the lock */
#define SHOW_TTY 250     /* ms between progress lines on a terminal */
#define SHOW_LOG 30000   /* elsewhere */
#define CHUNK    (1 << 20)

struct download {
    struct hub_repo *repo;
    char config[256], split[256];
    struct hub_file file; /* etag: name of the lock and the partial file, from commit, config and split */
    char path[HUB_PATH], part[MT_PATH];
    int fd;
    int64_t have, total; /* rows; total -1: not known yet */
    bool changed;        /* the total has changed */
    double shown_ms;
};

/* ---- which split */

static int get(const struct hub_repo *repo, struct hub_answer *answer, struct json_doc **doc, struct err *err)
{
    char name[HUB_PATH + 32];
    snprintf(name, sizeof(name), "the hub's view of %s", repo->id);
    if (hub_http_viewer(repo, answer, 1, err)) return -1;
    *doc = json_parse(answer->text, answer->size, name, err);
    mem_free(answer->text);
    return *doc ? 0 : -1;
}

static int ask_for_split(const struct hub_repo *repo, struct json splits, int64_t found, struct err *err)
{
    char names[512] = "";
    size_t used = 0;
    int64_t shown = 0;
    const char *config, *split;
    for (; shown < json_count(splits) && used < 300; shown++) {
        const struct json row = json_at(splits, shown);
        if (json_get_str(row, "config", &config, err) || json_get_str(row, "split", &split, err)) return -1;
        used +=
            (size_t)snprintf(names + used, sizeof(names) - used, "%s%.100s/%.80s", shown ? ", " : "", config, split);
    }
    return err_set(err, "%s has %s; name one, as in hub:%s:CONFIG/SPLIT, of %s%s", repo->id,
                   found ? "more than one split" : "no such split", repo->id,
                   shown ? names : "no split that the hub shows", shown < json_count(splits) ? ", ..." : "");
}

/* Finds the only row of the list that `which` matches. */
static int pick_split(struct download *d, struct json splits, const char *which, struct err *err)
{
    const char *slash = strrchr(which, '/'), *wanted = slash ? slash + 1 : which, *config, *split;
    int64_t found = 0;
    for (int64_t i = 0; i < json_count(splits); i++) {
        const struct json row = json_at(splits, i);
        if (json_get_str(row, "config", &config, err) || json_get_str(row, "split", &split, err)) return -1;
        const bool of =
            !slash || (strlen(config) == (size_t)(slash - which) && !strncmp(config, which, (size_t)(slash - which)));
        if (!of || (wanted[0] && strcmp(split, wanted))) continue;
        if (str_format(d->config, sizeof(d->config), err, "name of a configuration", "%s", config) ||
            str_format(d->split, sizeof(d->split), err, "name of a split", "%s", split))
            return -1;
        found++;
    }
    return found == 1 ? 0 : ask_for_split(d->repo, splits, found, err);
}

static int find_split(struct download *d, const char *which, struct err *err)
{
    struct hub_answer answer = {.path = "splits?dataset="};
    struct json_doc *doc;
    struct json splits;
    if (!hub_url_escape(answer.path, sizeof(answer.path), d->repo->id, false))
        return err_set(err, "the id is too long");
    if (get(d->repo, &answer, &doc, err)) return -1;
    int rc = json_get_array(json_root(doc), "splits", &splits, err);
    if (!rc) rc = pick_split(d, splits, which, err);
    json_free(doc);
    return rc;
}

/* ---- the partial file */

static int io_error(const struct download *d, const char *doing, struct err *err)
{
    return err_set(err, "%s: cannot %s: %s", d->part, doing, strerror(errno));
}

static int write_error(const struct download *d, struct err *err)
{
    struct err why;
    return err_set(err, "%s: %s", d->repo->id, hub_why_unwritten(d->repo->env, &why));
}

static int cut(struct download *d, int64_t bytes, struct err *err)
{
    if (bytes == 0) d->have = 0;
    if (ftruncate(d->fd, bytes) || lseek(d->fd, 0, SEEK_END) < 0) return io_error(d, "shorten it", err);
    return 0;
}

/* Counts the complete rows; a partial line at the end is removed. */
static int open_part(struct download *d, struct err *err)
{
    int64_t at = 0, whole = 0;
    ssize_t n;
    if (hub_part_open(&d->fd, d->part, err)) return -1;
    char *chunk = mem_alloc(CHUNK);
    while ((n = pread(d->fd, chunk, CHUNK, at)) > 0) {
        for (char *p = chunk; (p = memchr(p, '\n', (size_t)(n - (p - chunk)))); p++, d->have++)
            whole = at + (p - chunk) + 1;
        at += n;
    }
    mem_free(chunk);
    return n < 0 ? io_error(d, "read it", err) : cut(d, whole, err);
}

static int append(struct download *d, const struct text_buf *lines, struct err *err)
{
    for (int64_t done = 0; done < lines->size;) {
        const ssize_t n = write(d->fd, lines->text + done, (size_t)(lines->size - done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return write_error(d, err);
        done += n;
    }
    return fsync(d->fd) ? write_error(d, err) : 0;
}

/* ---- pages */

static int add_row(const struct download *d, struct json entry, int64_t index, struct text_buf *lines, struct err *err)
{
    int64_t at;
    struct json row, cells = json_find(entry, "truncated_cells");
    if (json_get_i64(entry, "row_idx", 0, INT64_MAX, &at, err) || json_get_object(entry, "row", &row, err)) return -1;
    if (at != index)
        return json_error(entry, err, "received row %lld instead of row %lld", (long long)at, (long long)index);
    if (json_count(cells))
        return json_error(cells, err, "the viewer truncates row %lld: download a file of %s and convert it to JSONL",
                          (long long)index, d->repo->id);
    if (text_put_json(lines, row, err)) return -1;
    text_put(lines, "\n");
    return 0;
}

/* Reads a page's total into d->total; an error when the rows are not available. */
static int read_total(struct download *d, struct json page, struct err *err)
{
    const char *id = d->repo->id, *help = "download a file of it and convert it to JSONL";
    bool partial = false;
    int64_t total;
    if (json_opt_bool(page, "partial", &partial, err) ||
        json_get_i64(page, "num_rows_total", 0, INT64_MAX, &total, err))
        return -1;
    const long long was = MT_MAX(d->total, d->have), now = total;
    if (partial)
        return json_error(page, err, "%s is so large that the hub shows only its first %lld rows: %s", id, now, help);
    if (total > MAX_ROWS)
        return json_error(page, err, "%s has %lld rows, too many: the limit is %d in pages of %d; %s", id, now,
                          MAX_ROWS, PAGE, help);
    d->changed = d->have > total || (d->total >= 0 && d->total != total);
    if (d->changed) return json_error(page, err, "%s had %lld rows, now it has %lld", id, was, now);
    d->total = total;
    return 0;
}

/* Writes a page's rows as lines; a page may have fewer rows than requested. */
static int add_page(struct download *d, const struct hub_answer *a, struct text_buf *lines, int64_t *n, struct err *err)
{
    const struct hub_repo *repo = d->repo;
    char name[HUB_PATH + 64];
    struct json rows;
    snprintf(name, sizeof(name), "rows of %s from %lld on", repo->id, (long long)d->have);
    if (a->commit[0] && strcmp(a->commit, repo->commit))
        return err_set(err,
                       "%s: the hub shows the rows of commit %.8s instead of %.8s: it shows only the main branch, "
                       "some time after a change",
                       repo->id, a->commit, repo->commit);
    struct json_doc *doc = json_parse(a->text, a->size, name, err);
    if (!doc) return -1;
    int rc = json_get_array(json_root(doc), "rows", &rows, err);
    if (!rc) rc = read_total(d, json_root(doc), err);
    *n = rc ? 0 : json_count(rows);
    if (!rc && *n > MT_MIN(PAGE, d->total - d->have))
        rc = json_error(rows, err, "has %lld rows instead of %lld", (long long)*n, (long long)d->total);
    for (int64_t i = 0; i < *n && !rc; i++) rc = add_row(d, json_at(rows, i), d->have + i, lines, err);
    json_free(doc);
    return rc;
}

static int set_page(const struct download *d, struct hub_answer *a, int64_t offset, struct err *err)
{
    const size_t n = sizeof(a->path) - 64;
    *a = (struct hub_answer){.path = "rows?dataset="};
    bool fits = hub_url_escape(a->path, n, d->repo->id, false);
    strcat(a->path, "&config=");
    fits = fits && hub_url_escape(a->path, n, d->config, false);
    strcat(a->path, "&split=");
    fits = fits && hub_url_escape(a->path, n, d->split, false);
    const size_t used = strlen(a->path);
    snprintf(a->path + used, sizeof(a->path) - used, "&offset=%lld&length=%d", (long long)offset, PAGE);
    return fits ? 0 : err_set(err, "%s: the name of its split is too long", d->repo->id);
}

/* Requests the next pages and appends their rows; only one page while the total is unknown. */
static int get_pages(struct download *d, struct err *err)
{
    struct hub_answer *answers = mem_array(AT_ONCE, sizeof(*answers));
    struct text_buf lines = {0};
    const int64_t left = (d->total - d->have + PAGE - 1) / PAGE, want = d->total < 0 ? 1 : MT_MIN(left, AT_ONCE);
    int64_t rows = PAGE;
    int rc = 0;
    for (int64_t i = 0; i < want && !rc; i++) rc = set_page(d, &answers[i], d->have + i * PAGE, err);
    if (!rc) rc = hub_http_viewer(d->repo, answers, want, err);
    for (int64_t i = 0; i < want && !rc && rows == PAGE; i++) {
        lines.size = 0;
        rc = add_page(d, &answers[i], &lines, &rows, err);
        const long long have = d->have, total = d->total;
        if (!rc && rows == 0 && have < total)
            rc = err_set(err, "%s: row %lld of %lld is not shown", d->repo->id, have, total);
        if (!rc) rc = append(d, &lines, err);
        if (!rc) d->have += rows;
    }
    for (int64_t i = 0; i < want; i++) mem_free(answers[i].text);
    mem_free(answers);
    text_free(&lines);
    return rc;
}

/* ---- the whole split */

static void show(struct download *d)
{
    const bool tty = isatty(STDERR_FILENO);
    const double now = clock_ms();
    if (d->total < 0 || now - d->shown_ms < (tty ? SHOW_TTY : SHOW_LOG)) return;
    d->shown_ms = now;
    if (tty)
        fprintf(stderr, "\r\033[K%s: %lld of %lld rows", d->repo->id, (long long)d->have, (long long)d->total);
    else
        log_info("%s: %lld of %lld rows", d->repo->id, (long long)d->have, (long long)d->total);
}

/* Checks the disk space for the remaining rows, at the average length so far. */
static int check_space(const struct download *d, struct err *err)
{
    struct stat st;
    if (fstat(d->fd, &st)) return io_error(d, "ask for its size", err);
    const double more = (double)st.st_size / (double)MT_MAX(d->have, 1) * (double)(d->total - d->have);
    return file_check_space(d->repo->env->cache, (int64_t)more, err);
}

static int download(struct download *d, struct err *err)
{
    int restarts = 0;
    while (d->total < 0 || d->have < d->total) {
        const bool first = d->total < 0;
        d->changed = false;
        if (get_pages(d, err)) {
            if (!d->changed || restarts++ == RESTARTS) return -1;
            log_warn("%s; starting again", err->msg);
            d->total = -1;
            if (cut(d, 0, err)) return -1;
        } else if (first && check_space(d, err)) {
            return -1;
        }
        show(d);
    }
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
    log_info("%s: %lld row%s of %s/%s", d->repo->id, (long long)d->have, str_plural(d->have), d->config, d->split);
    return d->have ? 0 : err_set(err, "%s: %s/%s has no rows", d->repo->id, d->config, d->split);
}

/* Renames the complete download to its blob and links it in the snapshot. */
static int put_in_place(struct download *d, struct err *err)
{
    struct hub_file done = d->file;
    char blob[MT_PATH], *chunk = mem_alloc(CHUNK);
    struct hash hash;
    ssize_t n;
    hash_init(&hash);
    for (done.size = 0; (n = pread(d->fd, chunk, CHUNK, done.size)) > 0; done.size += n) hash_add(&hash, chunk, n);
    mem_free(chunk);
    if (n < 0) return io_error(d, "read it", err);
    hash_hex(&hash, done.etag);
    if (hub_blob_path(blob, d->repo, done.etag, err)) return -1;
    if (rename(d->part, blob)) return io_error(d, "rename it", err);
    hub_verify_mark(d->repo, &done);
    return hub_cache_link(d->repo, &done, err);
}

static int fetch(struct download *d, struct err *err)
{
    const struct hub_file *none = NULL;
    if (hub_part_path(d->part, d->repo, d->file.etag, err) || hub_cache_reserve(d->repo, &none, 0, err)) return -1;
    int rc = open_part(d, err);
    if (!rc && d->have)
        log_info("%s: %lld row%s of %s/%s already downloaded", d->repo->id, (long long)d->have, str_plural(d->have),
                 d->config, d->split);
    if (!rc) rc = download(d, err);
    if (!rc) rc = put_in_place(d, err);
    if (d->fd >= 0) close(d->fd);
    return rc;
}

/* Downloads the rows, unless another process has completed them meanwhile. */
static int fetch_once(struct download *d, struct err *err)
{
    const struct timespec pause = {.tv_nsec = WAIT_MS * 1000000};
    char path[MT_PATH];
    int lock = -1;
    if (hub_snapshot_path(path, d->repo, d->path, err)) return -1;
    for (bool told = false; !file_exists(path) && lock < 0; told = true) {
        if (hub_cache_lock(&lock, d->repo, &d->file, err)) return -1;
        if (lock >= 0) break;
        if (!told) log_info("%s: another process downloads its rows: waiting", d->repo->id);
        progress();
        nanosleep(&pause, NULL);
    }
    const int rc = file_exists(path) ? 0 : fetch(d, err);
    if (lock >= 0) close(lock);
    return rc;
}

int hub_rows(struct hub_repo *repo, const char *which, struct err *err)
{
    struct download d = {.repo = repo, .fd = -1, .total = -1, .shown_ms = clock_ms(), .file = {.path = d.path}};
    struct hash hash;
    if (find_split(&d, which, err) ||
        str_format(d.path, sizeof(d.path), err, "path of rows", HUB_ROWS "/%s/%s.jsonl", d.config, d.split))
        return -1;
    if (!hub_path_is_safe(d.path) || strchr(d.split, '/'))
        return err_set(err, "%s: \"%s\" is not a safe path", repo->id, d.path);
    hash_init(&hash);
    hash_add(&hash, repo->commit, (int64_t)strlen(repo->commit));
    hash_add(&hash, d.path, (int64_t)strlen(d.path));
    hash_hex(&hash, d.file.etag);
    if (fetch_once(&d, err)) return -1;
    hub_repo_add(repo, d.path, "", 0);
    return 0;
}
