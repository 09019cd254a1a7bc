/* file.c - read-only maps, line reader over plain or gzip text, atomic writes, directories, checksums.
 * Every error message begins with the path it is about. */
#define _GNU_SOURCE /* sync_file_range */
#include "data/file/file.h"

#include "data/file/sigbus.h"
#include "kernels/threads.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zlib.h>

#define CHUNK_BYTES  (256 << 10)         /* per read() */
#define WRITE_BYTES  ((int64_t)8 << 20)  /* per write(), at most */
#define BEHIND_BYTES ((int64_t)64 << 20) /* unit of sync_file_range; at most twice as much is not on disk yet */

static bool is_broken_link(const char *path)
{
    const int before = errno;
    struct stat st;
    const bool broken = stat(path, &st) && errno == ENOENT && !lstat(path, &st);
    errno = before;
    return broken;
}

int file_check_kind(const char *path, bool want_dir, struct err *err)
{
    char target[MT_PATH] = "";
    struct stat st;
    if (is_broken_link(path)) {
        (void)!readlink(path, target, sizeof(target) - 1);
        return err_set(err, "%s: a symbolic link to %s, which is missing", path, target);
    }
    if (stat(path, &st)) {
        if (errno == ENOENT) return err_set(err, "%s: no such %s", path, want_dir ? "directory" : "file");
        return err_set(err, "%s: %s", path, strerror(errno));
    }
    if (want_dir == S_ISDIR(st.st_mode)) return 0;
    return err_set(err, "%s: %s", path, want_dir ? "not a directory" : "a directory, not a regular file");
}

static int io_error(struct err *err, const char *path, const char *doing)
{
    return err_set(err, "%s: cannot %s: %s", path, doing, strerror(errno));
}

/* read() until `size` bytes or the end of the file; returns the bytes read, or -1. */
static int64_t read_full(int fd, void *dst, int64_t size)
{
    int64_t n = 0;
    while (n < size) {
        ssize_t got = read(fd, (char *)dst + n, (size_t)(size - n));
        progress();
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        n += got;
    }
    return n;
}

/* Whether the file is the three lines of text that `git clone` without git-lfs leaves in place of a large file. */
static bool is_lfs_pointer(int fd, const struct stat *st)
{
    static const char mark[] = "version https://git-lfs.github.com/spec/v1";
    char head[sizeof(mark) - 1];
    return st->st_size > (off_t)sizeof(head) && st->st_size < 1024 && S_ISREG(st->st_mode) &&
           pread(fd, head, sizeof(head), 0) == (ssize_t)sizeof(head) && !memcmp(head, mark, sizeof(head));
}

/* Opens a file for reading; never blocks on a FIFO or device. With `pipe` it accepts a pipe named by its descriptor,
 * such as a shell's <(...) or /dev/stdin, since that has a writer. */
static int open_file(const char *path, bool pipe, struct stat *st, struct err *err)
{
    const bool descriptor =
        !strncmp(path, "/dev/fd/", 8) || !strncmp(path, "/proc/self/fd/", 14) || !strcmp(path, "/dev/stdin");
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | (pipe && descriptor ? 0 : O_NONBLOCK));
    if (fd < 0 && is_broken_link(path)) return file_check_kind(path, false, err);
    if (fd < 0) return io_error(err, path, "open");
    if (fstat(fd, st))
        io_error(err, path, "stat");
    else if (S_ISDIR(st->st_mode))
        err_set(err, "%s: a directory, not a regular file", path);
    else if (is_lfs_pointer(fd, st))
        err_set(err, "%s: a pointer of Git LFS, not the file itself: run `git lfs pull` in its directory", path);
    else if (S_ISREG(st->st_mode) || (pipe && descriptor && S_ISFIFO(st->st_mode)))
        return fd;
    else if (S_ISFIFO(st->st_mode))
        err_set(err, "%s: a pipe, not a regular file: write its content to a file, and name that", path);
    else
        err_set(err, "%s: not a regular file", path);
    close(fd);
    return -1;
}

/* ---- maps ---- */

int file_map_open(struct file_map *map, const char *path, struct err *err)
{
    *map = (struct file_map){0};
    int rc = -1;
    struct stat st;
    const int fd = open_file(path, false, &st, err);
    if (fd < 0) return -1;
    map->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            io_error(err, path, "map");
            goto out;
        }
        map->data = p;
        map->size = st.st_size;
        sigbus_watch(p, map->size, path);
    }
    rc = 0;
out:
    close(fd);
    return rc;
}

void file_map_close(struct file_map *map)
{
    if (map->data) {
        sigbus_forget(map->data);
        munmap((void *)(uintptr_t)map->data, (size_t)map->size);
    }
    *map = (struct file_map){0};
}

void file_map_drop(const struct file_map *map, int64_t offset, int64_t bytes)
{
    if (!map->data || bytes <= 0 || offset < 0 || offset > map->size - bytes) return;
    /* Drops whole pages, rounded outward: bytes of a neighbour on these pages are read again from the page cache. */
    int64_t page = sysconf(_SC_PAGESIZE), begin = offset / page * page;
    madvise((void *)(uintptr_t)(map->data + begin), (size_t)(offset + bytes - begin), MADV_DONTNEED);
}

char *file_read(const char *path, int64_t max_bytes, int64_t *size, struct err *err)
{
    struct stat st;
    const int fd = open_file(path, true, &st, err);
    if (fd < 0) return NULL;
    char *text = NULL, limit[32];
    int64_t n = 0, cap = 0, got;
    do { /* reads to the end instead of by size: pipes have no size */
        int64_t grown = MT_MAX(2 * cap, CHUNK_BYTES);
        text = mem_grow(text, cap, grown + 1, 1);
        cap = grown;
        got = read_full(fd, text + n, cap - n);
        n += MT_MAX(got, 0);
    } while (got >= 0 && n == cap && n <= max_bytes);
    if (got < 0)
        io_error(err, path, "read");
    else if (n > max_bytes)
        err_set(err, "%s: larger than the limit of %s for such a file", path, str_bytes(limit, max_bytes));
    close(fd);
    if (got < 0 || n > max_bytes) {
        mem_free(text);
        return NULL;
    }
    text[n] = 0;
    *size = n;
    return text;
}

/* ---- lines ---- */

struct line_reader {
    int fd;
    char *path;
    bool gzip, in_member; /* in_member: between the header and the trailer of a gzip member */
    z_stream z;           /* the input is in `raw` */
    uint8_t *raw;         /* [CHUNK_BYTES] compressed bytes */
    char *chunk;          /* [CHUNK_BYTES] plain bytes; pos .. end are not returned yet */
    int64_t pos, end;
    char *line; /* [cap] the line last returned */
    int64_t cap, number;
    int64_t packed, plain; /* bytes read from the file; bytes decompressed, for gzip */
};

static struct line_reader *open_lines(const char *path, bool pipe, struct err *err)
{
    struct line_reader *r = mem_alloc(sizeof(*r));
    r->path = mem_strdup(path);
    r->chunk = mem_alloc(CHUNK_BYTES);
    struct stat st;
    r->fd = open_file(path, pipe, &st, err);
    if (r->fd < 0) goto fail;
    r->end = read_full(r->fd, r->chunk, CHUNK_BYTES);
    if (r->end < 0) {
        io_error(err, path, "read");
        goto fail;
    }
    r->packed = r->end;
    if (r->end >= 2 && !memcmp(r->chunk, "\x1f\x8b", 2)) {
        if (inflateInit2(&r->z, 16 + MAX_WBITS) != Z_OK) { /* 16: gzip framing only */
            err_set(err, "%s: cannot start decompression: %s", path, r->z.msg ? r->z.msg : "out of memory");
            goto fail;
        }
        r->gzip = true;
        r->raw = (uint8_t *)r->chunk;
        r->z.next_in = r->raw;
        r->z.avail_in = (uInt)r->end;
        r->chunk = mem_alloc(CHUNK_BYTES);
        r->end = 0;
    }
    return r;
fail:
    line_reader_close(r);
    return NULL;
}

struct line_reader *line_reader_open(const char *path, struct err *err) { return open_lines(path, false, err); }
struct line_reader *line_reader_open_once(const char *path, struct err *err) { return open_lines(path, true, err); }

void line_reader_close(struct line_reader *r)
{
    if (!r) return;
    if (r->gzip) inflateEnd(&r->z);
    if (r->fd >= 0) close(r->fd);
    mem_free(r->path);
    mem_free(r->raw);
    mem_free(r->chunk);
    mem_free(r->line);
    mem_free(r);
}

/* Fills the chunk; 1: it has bytes, 0: end of the file, -1: error. */
static int fill_gzip(struct line_reader *r, struct err *err)
{
    r->z.next_out = (Bytef *)r->chunk;
    r->z.avail_out = CHUNK_BYTES;
    while (r->z.avail_out == CHUNK_BYTES) {
        if (r->z.avail_in == 0) {
            int64_t got = read_full(r->fd, r->raw, CHUNK_BYTES);
            if (got < 0) return io_error(err, r->path, "read");
            if (got == 0 && r->in_member) return err_set(err, "%s: the gzip file is truncated", r->path);
            if (got == 0) return 0;
            r->z.next_in = r->raw;
            r->z.avail_in = (uInt)got;
            r->packed += got;
        }
        r->in_member = true;
        int rc = inflate(&r->z, Z_NO_FLUSH);
        if (rc == Z_STREAM_END) { /* another member may follow */
            r->in_member = false;
            rc = inflateReset(&r->z);
        }
        if (rc != Z_OK && rc != Z_BUF_ERROR)
            return err_set(err, "%s: damaged gzip data: %s", r->path, r->z.msg ? r->z.msg : "unknown cause");
    }
    r->pos = 0;
    r->end = CHUNK_BYTES - r->z.avail_out;
    r->plain += r->end;
    if (r->plain > FILE_GZIP_FREE && r->plain / FILE_GZIP_RATIO > r->packed) {
        char limit[32];
        return err_set(err,
                       "%s: the gzip file unpacks to more than %s and more than %d times its size; unpack it if it is "
                       "not a decompression bomb",
                       r->path, str_bytes(limit, FILE_GZIP_FREE), FILE_GZIP_RATIO);
    }
    return 1;
}

static int fill(struct line_reader *r, struct err *err)
{
    if (r->gzip) return fill_gzip(r, err);
    r->pos = 0;
    r->end = read_full(r->fd, r->chunk, CHUNK_BYTES);
    if (r->end < 0) {
        r->end = 0;
        return io_error(err, r->path, "read");
    }
    r->packed += r->end;
    return r->end > 0;
}

int line_reader_chunk(struct line_reader *r, const char **bytes, int64_t *size, struct err *err)
{
    int rc = r->pos < r->end ? 1 : fill(r, err);
    *bytes = r->chunk + r->pos;
    *size = r->end - r->pos;
    r->pos = r->end;
    return rc;
}

int line_reader_peek(struct line_reader *r, char *first, struct err *err)
{
    if (r->pos == r->end && fill(r, err) < 0) return -1;
    if (r->end - r->pos >= 3 && !memcmp(r->chunk + r->pos, "\xef\xbb\xbf", 3)) r->pos += 3;
    *first = 0;
    for (int64_t i = r->pos; i < r->end && !*first; i++)
        if (!strchr(" \t\r\n", r->chunk[i])) *first = r->chunk[i];
    return 0;
}

const char *line_reader_path(const struct line_reader *r) { return r->path; }

int64_t line_reader_position(const struct line_reader *r, int64_t unread)
{
    unread += r->end - r->pos;
    if (!r->gzip) return r->packed - unread;
    return (int64_t)((double)(r->packed - r->z.avail_in) * (double)(r->plain - unread) / (double)MT_MAX(r->plain, 1));
}

int line_reader_next(struct line_reader *r, char **line, int64_t *size, struct err *err)
{
    int64_t n = 0;
    bool ended = false, any = false;
    while (!ended) {
        if (r->pos == r->end) {
            int rc = fill(r, err);
            if (rc < 0) return -1;
            if (rc == 0) break;
        }
        any = true;
        const char *from = r->chunk + r->pos;
        const char *lf = memchr(from, '\n', (size_t)(r->end - r->pos));
        int64_t count = lf ? lf - from : r->end - r->pos;
        if (n + count > FILE_LINE_MAX) {
            char limit[32];
            return err_set(err, "%s:%lld: the line is longer than the limit of %s", r->path, (long long)r->number + 1,
                           str_bytes(limit, FILE_LINE_MAX));
        }
        r->line = mem_reserve(r->line, &r->cap, n + count + 1, 1);
        memcpy(r->line + n, from, (size_t)count);
        n += count;
        r->pos += count + (lf != NULL);
        ended = lf != NULL;
    }
    if (!any) return 0;
    r->number++;
    if (ended && n && r->line[n - 1] == '\r') n--;
    r->line[n] = 0;
    int64_t bom = r->number == 1 && n >= 3 && !memcmp(r->line, "\xef\xbb\xbf", 3) ? 3 : 0;
    *line = r->line + bom;
    *size = n - bom;
    return 1;
}

int64_t line_reader_line(const struct line_reader *r) { return r->number; }

/* ---- atomic writes ---- */

static int write_full(int fd, const void *data, int64_t size)
{
    const char *p = data;
    while (size > 0) {
        ssize_t put = write(fd, p, (size_t)MT_MIN(size, WRITE_BYTES));
        progress();
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return -1;
        p += put;
        size -= put;
    }
    return 0;
}

int file_sync_dir(const char *path, struct err *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return io_error(err, path, "open");
    int rc = fsync(fd);
    if (rc && errno == EINVAL) rc = 0; /* errors of file systems whose directories need no fsync */
    if (rc) io_error(err, path, "fsync");
    close(fd);
    return rc;
}

static int sync_parent(const char *path, struct err *err)
{
    char *dir = mem_strdup(path);
    char *slash = strrchr(dir, '/');
    if (slash) slash[slash == dir] = 0;
    int rc = file_sync_dir(slash ? dir : ".", err);
    mem_free(dir);
    return rc;
}

/* Refuses a device, a pipe or a link to one, which the final rename would replace with the file (as root, even
 * /dev/null). */
static int check_replaceable(const char *path, struct err *err)
{
    struct stat st;
    if (stat(path, &st) || S_ISREG(st.st_mode)) return 0;
    return err_set(err, "%s: %s: choose the name of a new file", path,
                   S_ISDIR(st.st_mode) ? "a directory, not a file" : "not a regular file");
}

int file_check_link(const char *path, struct err *err)
{
    struct stat st;
    if (lstat(path, &st) || !S_ISLNK(st.st_mode)) return 0;
    return err_set(err, "%s: a symbolic link, whose target is not written to: remove the link", path);
}

int file_open_own(const char *path, int flags, struct err *err)
{
    struct stat st;
    const int fd = open(path, flags | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
    if (fd < 0 && errno == ELOOP && file_check_link(path, err)) return -1;
    if (fd < 0 && errno == ENXIO)
        return err_set(err, "%s: a pipe, not a regular file: remove it, or name another file", path);
    if (fd < 0) return io_error(err, path, "create");
    if (fstat(fd, &st))
        io_error(err, path, "stat");
    else if (!S_ISREG(st.st_mode))
        err_set(err, "%s: not a regular file: remove it, or name another file", path);
    else if (st.st_nlink > 1)
        err_set(err, "%s: a hard link, whose other name would change too: replace it with a copy", path);
    else
        return fd;
    close(fd);
    return -1;
}

/* Empties the file, which only one process may write. Error: another process has its lock, or renamed the file after it
 * was opened. */
static int begin_alone(int fd, const char *tmp, struct err *err)
{
    struct stat own, named;
    const bool busy = flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK; /* some file systems have no locks */
    if (busy || fstat(fd, &own) || stat(tmp, &named) || own.st_ino != named.st_ino || own.st_dev != named.st_dev)
        return err_set(err, "%s: another process is writing this file", tmp);
    if (!ftruncate(fd, 0)) return 0;
    io_error(err, tmp, "truncate");
    unlink(tmp);
    return -1;
}

int file_writer_open(struct file_writer *w, const char *path, struct err *err)
{
    *w = (struct file_writer){.fd = -1};
    if (check_replaceable(path, err)) return -1;
    if (str_format(w->path, sizeof(w->path), err, "path of the file to write", "%s", path) ||
        str_format(w->tmp, sizeof(w->tmp), err, "path of the file to write", "%s.tmp", path))
        return -1;
    w->fd = file_open_own(w->tmp, O_WRONLY, err);
    if (w->fd < 0) return -1;
    if (!begin_alone(w->fd, w->tmp, err)) return 0;
    close(w->fd);
    return -1;
}

/* Starts writing a full part to disk while the next one fills, so that the final fsync is short, and a slow disk shows
 * progress. Errors are ignored: fsync reports them. */
static void send_part(struct file_writer *w)
{
    const unsigned start = SYNC_FILE_RANGE_WRITE,
                   end = start | SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (w->size - w->sent < BEHIND_BYTES) return;
    if (w->sent) sync_file_range(w->fd, 0, w->sent, end);
    sync_file_range(w->fd, w->sent, w->size - w->sent, start);
    w->sent = w->size;
}

int file_writer_put(struct file_writer *w, const void *data, int64_t size, struct err *err)
{
    for (int64_t at = 0, n; at < size; at += n, w->size += n) {
        n = MT_MIN(size - at, BEHIND_BYTES);
        w->failed |= write_full(w->fd, (const char *)data + at, n) != 0;
        if (w->failed) return io_error(err, w->tmp, "write");
        send_part(w);
    }
    return 0;
}

int file_writer_close(struct file_writer *w, bool keep, struct err *err)
{
    int rc = keep && !w->failed ? 0 : -1;
    if (!rc && fsync(w->fd)) rc = io_error(err, w->tmp, "write");
    if (close(w->fd) && !rc) rc = io_error(err, w->tmp, "write");
    if (!rc && rename(w->tmp, w->path)) {
        char doing[MT_PATH + 16];
        snprintf(doing, sizeof(doing), "rename to %s", w->path);
        rc = io_error(err, w->tmp, doing);
    }
    if (!rc) return sync_parent(w->path, err);
    unlink(w->tmp);
    return -1;
}

int file_write_parts(const char *path, const struct file_part *parts, int64_t n, struct err *err)
{
    struct file_writer w;
    if (file_writer_open(&w, path, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++) rc = file_writer_put(&w, parts[i].data, parts[i].size, err);
    return file_writer_close(&w, !rc, err);
}

int file_write_atomic(const char *path, const void *data, int64_t size, struct err *err)
{
    return file_write_parts(path, &(struct file_part){data, size}, 1, err);
}

int file_in(char path[MT_PATH], const char *dir, const char *name, struct err *err)
{
    return str_format(path, MT_PATH, err, "path", "%s/%s", dir, name);
}

int file_write_in(const char *dir, const char *name, const void *data, int64_t size, struct err *err)
{
    char path[MT_PATH];
    return file_in(path, dir, name, err) || file_write_atomic(path, data, size, err) ? -1 : 0;
}

/* ---- directories ---- */

int file_check_new(const char *path, struct err *err)
{
    char dir[MT_PATH];
    struct err why;
    const char *slash = strrchr(path, '/');
    if (file_is_dir(path) || !path[0]) return err_set(err, "%s: a directory: add the name of a file", path);
    if (file_exists(path)) return err_set(err, "%s exists: delete it, or choose another name", path);
    if (str_format(dir, sizeof(dir), err, "path of the output", "%.*s",
                   slash ? (int)(slash - path) + (slash == path) : 1, slash ? path : "."))
        return -1;
    if (file_check_kind(dir, true, &why)) return err_set(err, "cannot write %s: %s", path, why.msg);
    return access(dir, W_OK | X_OK) ? io_error(err, dir, "write to the directory") : 0;
}

int file_check_space(const char *dir, int64_t bytes, struct err *err)
{
    struct statvfs fs;
    char need[32], have[32];
    if (statvfs(dir, &fs)) return io_error(err, dir, "ask for the free space of");
    const double free_bytes = (double)fs.f_bavail * (double)fs.f_frsize;
    if (free_bytes >= (double)bytes) return 0;
    return err_set(err, "%s: %s of disk space are needed, only %s are free", dir, str_bytes(need, bytes),
                   str_bytes(have, (int64_t)free_bytes));
}

int file_check_holes(const char *path, struct err *err)
{
    struct stat st;
    char at[32], size[32];
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return io_error(err, path, "open");
    const bool regular = !fstat(fd, &st) && S_ISREG(st.st_mode);
    const off_t hole = regular ? lseek(fd, 0, SEEK_HOLE) : -1; /* -1: the file system cannot tell */
    close(fd);
    if (hole < 0 || hole >= st.st_size) return 0;
    return err_set(err,
                   "%s: the file of %s has a hole at %s, where nothing was written: its download or copy is not "
                   "complete; fetch it again",
                   path, str_bytes(size, st.st_size), str_bytes(at, hole));
}

int64_t file_size(const char *path)
{
    struct stat st;
    return stat(path, &st) || !S_ISREG(st.st_mode) ? 0 : st.st_size;
}

bool file_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

bool file_exists_in(const char *dir, const char *name)
{
    char path[MT_PATH];
    return !file_in(path, dir, name, NULL) && file_exists(path);
}

bool file_has_links(const char *path)
{
    struct stat st;
    return !lstat(path, &st) && S_ISREG(st.st_mode) && st.st_nlink > 1;
}

bool file_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool file_is_writable(const char *path) { return access(path, W_OK) == 0; }

static int make_dir(const char *path, struct err *err)
{
    if (!mkdir(path, 0777)) return 0;
    return errno == EEXIST ? file_check_kind(path, true, err) : io_error(err, path, "create the directory");
}

/* 1: path does not exist, so nothing below it exists. */
static int check_dir(const char *path, struct err *err)
{
    struct stat st;
    return lstat(path, &st) && errno == ENOENT ? 1 : file_check_kind(path, true, err);
}

/* Calls visit for each directory of the path, from the first one, until it returns something else than 0. */
static int each_dir(const char *path, int (*visit)(const char *, struct err *), struct err *err)
{
    char *part = mem_strdup(path);
    int rc = 0;
    for (char *p = part; *p && !rc; p++) {
        if (p[1] && p[1] != '/') continue; /* not the end of a component yet */
        char next = p[1];
        p[1] = 0;
        rc = visit(part, err);
        p[1] = next;
    }
    mem_free(part);
    return rc;
}

int file_make_dirs(const char *path, struct err *err) { return each_dir(path, make_dir, err); }

int file_check_dirs(const char *path, struct err *err) { return each_dir(path, check_dir, err) < 0 ? -1 : 0; }

int file_remove_tree(const char *path, struct err *err)
{
    struct stat st;
    if (lstat(path, &st)) return errno == ENOENT ? 0 : io_error(err, path, "stat");
    if (!S_ISDIR(st.st_mode)) return unlink(path) ? io_error(err, path, "delete") : 0;
    char **names;
    int64_t count;
    if (file_list(path, &names, &count, err)) return -1;
    int rc = 0;
    char child[MT_PATH];
    for (int64_t i = 0; i < count && !rc; i++) {
        rc = str_format(child, sizeof(child), err, "path to delete", "%s/%s", path, names[i]);
        if (!rc) rc = file_remove_tree(child, err);
    }
    file_list_free(names, count);
    if (!rc && rmdir(path)) rc = io_error(err, path, "delete");
    return rc;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

int file_list(const char *dir, char ***names, int64_t *count, struct err *err)
{
    *names = NULL;
    *count = 0;
    DIR *d = opendir(dir);
    if (!d) return io_error(err, dir, "open the directory");
    int64_t n = 0, cap = 0;
    char **list = NULL;
    struct dirent *entry;
    while (errno = 0, (entry = readdir(d)) != NULL) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        list = mem_reserve(list, &cap, n + 1, sizeof(*list));
        list[n++] = mem_strdup(entry->d_name);
    }
    int rc = errno ? io_error(err, dir, "read the directory") : 0;
    closedir(d);
    if (rc) {
        file_list_free(list, n);
        return rc;
    }
    if (n) qsort(list, (size_t)n, sizeof(*list), by_name);
    *names = list;
    *count = n;
    return 0;
}

void file_list_free(char **names, int64_t count)
{
    for (int64_t i = 0; i < count; i++) mem_free(names[i]);
    mem_free(names);
}

char *file_relative_to(char buf[MT_PATH + 64], const char *path)
{
    char here[MT_PATH];
    buf[0] = 0;
    if (path[0] != '/' && getcwd(here, sizeof(here)))
        snprintf(buf, MT_PATH + 64, "the path is relative to the current directory, %s; ", here);
    return buf;
}

bool file_gunzip(uint8_t *out, int64_t size, const uint8_t *in, int64_t n)
{
    z_stream z = {.next_out = out};
    if (size > UINT32_MAX || n > UINT32_MAX || inflateInit2(&z, 32 + MAX_WBITS) != Z_OK) return false; /* 32: both */
    z.next_in = (Bytef *)(uintptr_t)in;
    z.avail_in = (uInt)n;
    z.avail_out = (uInt)size;
    const int status = inflate(&z, Z_FINISH);
    inflateEnd(&z);
    return status == Z_STREAM_END && !z.avail_out;
}

/* Parts of a file whose CRCs threads compute. */
enum { CRC_PARTS = 64, CRC_BYTES = 4 << 20 };
struct crc_parts {
    int fd;
    int64_t at, size; /* of the first part; of the file */
    uLong sum[CRC_PARTS];
    int error[CRC_PARTS]; /* errno of the thread that read the part; 0: read */
};

static int64_t crc_bytes(const struct crc_parts *c, int64_t i)
{
    return MT_MIN((int64_t)CRC_BYTES, c->size - c->at - i * CRC_BYTES);
}

static void crc_part(void *arg, int64_t i)
{
    struct crc_parts *c = arg;
    uint8_t *chunk = mem_alloc(CHUNK_BYTES);
    int64_t at = c->at + i * CRC_BYTES, n = crc_bytes(c, i);
    c->sum[i] = crc32(0, NULL, 0);
    c->error[i] = 0;
    while (n > 0 && !c->error[i]) {
        const ssize_t got = pread(c->fd, chunk, (size_t)MT_MIN(n, CHUNK_BYTES), at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) c->error[i] = got < 0 ? errno : EIO; /* EIO: the file became shorter */
        if (got > 0) c->sum[i] = crc32(c->sum[i], chunk, (uInt)got);
        at += MT_MAX(got, 0);
        n -= MT_MAX(got, 0);
    }
    mem_free(chunk);
}

int file_crc32(const char *path, uint32_t *crc, int64_t *size, struct err *err)
{
    struct stat st;
    struct crc_parts c = {.fd = open_file(path, false, &st, err)};
    if (c.fd < 0) return -1;
    c.size = st.st_size;
    uLong all = crc32(0, NULL, 0);
    int rc = 0;
    for (; c.at < c.size && !rc; c.at += (int64_t)CRC_PARTS * CRC_BYTES) {
        const int64_t n = MT_MIN((c.size - c.at + CRC_BYTES - 1) / CRC_BYTES, CRC_PARTS);
        threads_run(n, 0, crc_part, &c);
        for (int64_t i = 0; i < n && !rc; i++) {
            all = crc32_combine(all, c.sum[i], (z_off_t)crc_bytes(&c, i));
            errno = c.error[i];
            if (errno) rc = io_error(err, path, "read");
        }
        progress();
    }
    close(c.fd);
    *crc = (uint32_t)all;
    *size = c.size;
    return rc;
}

const char *file_library(char name[64])
{
    snprintf(name, 64, "zlib %s", zlibVersion());
    return name;
}
