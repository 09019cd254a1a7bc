/* lock.c - see lock.h. A run takes the lock before its first write in output.dir and holds it until its end.
 *
 * It is an open file description lock (F_OFD_SETLK, fcntl(2)). The kernel releases it when the process ends. NFS
 * clients pass it to the server, so it works between machines. Unlike a plain POSIX lock it survives another open and
 * close of the file in this process. The file is deleted only if the start that created it fails; a process that opened
 * it before detects that. The text in the file names the holder, for error messages. */
#define _GNU_SOURCE /* F_OFD_SETLK */
#include "train/state/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"

#define NAME ".lock"

void lock_holder(char text[LOCK_TEXT])
{
    char host[128] = "", when[64] = "";
    struct tm utc;
    const time_t now = time(NULL);
    gethostname(host, sizeof(host) - 1);
    if (gmtime_r(&now, &utc)) strftime(when, sizeof(when), "%Y-%m-%d %H:%M:%S UTC", &utc);
    snprintf(text, LOCK_TEXT, "process %ld on %s since %s\n", (long)getpid(), host, when);
}

int lock_file(int fd)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (!fcntl(fd, F_OFD_SETLK, &whole)) return 0;
    return errno == EAGAIN || errno == EACCES ? 1 : -1;
}

/* A hard link keeps the text of its other name. */
static void write_holder(int fd, const char *path)
{
    char text[LOCK_TEXT];
    if (file_has_links(path)) return;
    lock_holder(text);
    const ssize_t n = (ssize_t)strlen(text);
    if (ftruncate(fd, 0) || pwrite(fd, text, (size_t)n, 0) != n)
        log_warn("the lock file of output.dir cannot be written: %s", strerror(errno));
}

static int in_use(int fd, const char *dir, struct err *err)
{
    char text[LOCK_TEXT];
    const ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    text[MT_MAX(n, 0)] = 0;
    text[strcspn(text, "\n")] = 0;
    return err_set(err,
                   "%s is in use by another moetrain: %s; wait for it, stop it, or choose another directory "
                   "(output.dir)",
                   dir, text[0] ? text : "a process that has not written its pid yet");
}

/* Length of the part of dir's path that exists. */
static int64_t existing(const char *dir)
{
    char path[MT_PATH];
    int64_t n = snprintf(path, sizeof(path), "%s", dir);
    while (n > 0 && !file_exists(path)) {
        while (n > 0 && path[n - 1] == '/') n--;
        while (n > 0 && path[n - 1] != '/') n--;
        path[n] = 0;
    }
    return n;
}

static bool is_deleted(int fd)
{
    struct stat st;
    return fstat(fd, &st) || st.st_nlink == 0;
}

int lock_take(struct lock *l, const char *dir, struct err *err)
{
    char path[MT_PATH];
    if (str_format(path, sizeof(path), err, "output.dir", "%s/" NAME, dir)) return -1;
    const int64_t there = existing(dir);
    if (file_make_dirs(dir, err)) return -1;
    const bool fresh = !file_exists(path);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd < 0) return err_set(err, "%s: cannot be opened to lock %s: %s", path, dir, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        close(fd);
        return err_set(err, "%s: not a regular file: remove it", path);
    }
    const int held = lock_file(fd);
    if (held > 0) {
        in_use(fd, dir, err);
        close(fd);
        return -1;
    }
    if (held < 0)
        log_warn("%s cannot be locked (%s): make sure that no other run uses the directory", path, strerror(errno));
    if (is_deleted(fd)) {
        close(fd);
        return err_set(err, "%s was in use by another moetrain until now: run the command again", dir);
    }
    write_holder(fd, path);
    *l = (struct lock){.held = true, .fresh = fresh, .fd = fd, .there = there};
    return 0;
}

int lock_take_for(struct lock *l, const char *dir, const char *path, struct err *err)
{
    char parent[MT_PATH];
    struct stat a, b;
    if (str_format(parent, sizeof(parent), err, "path", "%s", path)) return -1;
    size_t n = strlen(parent);
    while (n && parent[n - 1] == '/') n--;
    while (n && parent[n - 1] != '/') n--;
    snprintf(parent + n, sizeof(parent) - n, n ? "" : ".");
    if (stat(parent, &a) || stat(dir, &b) || a.st_dev != b.st_dev || a.st_ino != b.st_ino) return 0;
    return lock_take(l, dir, err);
}

void lock_undo(struct lock *l, const char *dir)
{
    char path[MT_PATH];
    int64_t n = (int64_t)strlen(dir);
    if (!l->held) return;
    snprintf(path, sizeof(path), "%s/" NAME, dir);
    if (l->fresh) unlink(path);
    path[n] = 0;
    while (n > l->there && !rmdir(path)) {
        while (n > 0 && path[n - 1] == '/') n--;
        while (n > 0 && path[n - 1] != '/') n--;
        path[n] = 0;
    }
    lock_release(l);
}

void lock_release(struct lock *l)
{
    if (l->held) close(l->fd);
    *l = (struct lock){.held = false};
}
