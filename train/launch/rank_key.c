/* rank_key.c - see rank_key.h. The file has the key, then a line that names the process of rank 0. Its name contains
 * the port at which the ranks connect, so concurrent launches use different files.
 *
 * Rank 0 locks its file (lock.c) until all ranks have connected. No other launch replaces or deletes a locked file;
 * rank 0 of the next launch locks and replaces the file of a killed one. A rank that read the old key is refused and
 * reads again (kernels/comm/comm_meet.c). */
#include "train/launch/rank_key.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/state/lock.h"

static int failed(struct err *err, const char *path, const char *doing)
{
    return err_set(err, "%s: cannot %s the key of the ranks: %s", path, doing, strerror(errno));
}

static int in_use(int fd, const struct comm_place *p, struct err *err)
{
    char text[LOCK_TEXT];
    const ssize_t n = pread(fd, text, sizeof(text) - 1, COMM_KEY);
    text[MT_MAX(n, 0)] = 0;
    text[strcspn(text, "\n")] = 0;
    return err_set(err,
                   "the ranks of another launch (%s) meet at port %d with the same output.dir: wait for it, or choose "
                   "another MASTER_PORT and output.dir",
                   text[0] ? text : "a process that has not written its name yet", p->port);
}

/* Whether the path still refers to the open file. */
static bool is_current(int fd, const char *path)
{
    struct stat a, b;
    return !fstat(fd, &a) && !lstat(path, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Opens or creates the file and locks it. -1: a running launch holds the lock. *fd -1: the name is a symbolic link; the
 * caller replaces it, and its target is not read. */
static int claim_name(const struct comm_place *p, int *fd, struct err *err)
{
    for (;;) {
        *fd = open(p->key_file, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        if (*fd < 0) return errno == ELOOP ? 0 : failed(err, p->key_file, "open");
        const int held = lock_file(*fd);
        if (held <= 0 && is_current(*fd, p->key_file)) return 0;
        const int rc = held > 0 ? in_use(*fd, p, err) : 0;
        close(*fd);
        if (rc) return rc; /* rc 0: another launch replaced or deleted the file after this one opened it */
    }
}

/* Writes the new file, and locks it before it gets its final name. */
static int write_key(struct comm_place *p, struct err *err)
{
    char tmp[MT_PATH], text[COMM_KEY + LOCK_TEXT];
    int old;
    if (str_format(tmp, sizeof(tmp), err, "path of the key", "%s.%d", p->key_file, (int)getpid())) return -1;
    if (unlink(tmp) && errno != ENOENT) return failed(err, tmp, "replace");
    const int fd = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return failed(err, tmp, "create");
    memcpy(text, p->key, COMM_KEY);
    lock_holder(text + COMM_KEY);
    const ssize_t size = COMM_KEY + (ssize_t)strlen(text + COMM_KEY);
    int rc = write(fd, text, (size_t)size) == size && !fsync(fd) ? 0 : failed(err, tmp, "write");
    if (!rc && lock_file(fd) < 0)
        log_warn("%s cannot be locked (%s): make sure that no other launch uses port %d and the same output.dir", tmp,
                 strerror(errno), p->port);
    if (!rc && !(rc = claim_name(p, &old, err))) {
        if (rename(tmp, p->key_file)) rc = failed(err, p->key_file, "create");
        if (old >= 0) close(old);
    }
    if (rc) {
        unlink(tmp);
        close(fd);
    } else {
        p->key_fd = fd;
    }
    return rc;
}

static int check_file(const char *path, const struct stat *st, struct err *err)
{
    if (!S_ISREG(st->st_mode)) return err_set(err, "%s: not a regular file", path);
    if (st->st_uid != geteuid())
        return err_set(err, "%s: belongs to user %lld, and this rank runs as user %lld: start all ranks as one user",
                       path, (long long)st->st_uid, (long long)geteuid());
    if (st->st_mode & 077)
        return err_set(err, "%s: other users may read or write it (mode %03o): delete it and start again", path,
                       (unsigned)st->st_mode & 0777);
    if (st->st_size < COMM_KEY || st->st_size > COMM_KEY + LOCK_TEXT)
        return err_set(err, "%s: %lld bytes, not a key of the ranks: delete it and start again", path,
                       (long long)st->st_size);
    return 0;
}

static int read_key(const struct comm_place *p, uint8_t key[COMM_KEY], struct err *err)
{
    struct stat st;
    const int fd = open(p->key_file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return err_set(
            err,
            "rank %d finds no key of this run at %s, where rank 0 writes it: all machines must see the same output.dir",
            p->rank, p->key_file);
    if (fd < 0) return failed(err, p->key_file, "open");
    int rc = fstat(fd, &st) ? failed(err, p->key_file, "read") : check_file(p->key_file, &st, err);
    if (!rc && read(fd, key, COMM_KEY) != COMM_KEY) rc = failed(err, p->key_file, "read");
    close(fd);
    return rc;
}

int rank_key_open(struct comm_place *p, const char *dir, struct err *err)
{
    if (str_format(p->key_file, sizeof(p->key_file), err, "path of the key", "%s/.ranks-%d.key", dir, p->port))
        return -1;
    p->read_key = p->rank ? read_key : NULL;
    if (p->rank) return 0;
    return file_make_dirs(dir, err) || comm_make_key(p->key, err) || write_key(p, err) ? -1 : 0;
}

void rank_key_close(struct comm_place *p)
{
    if (!p->key_fd) return;
    if (is_current(p->key_fd, p->key_file) && unlink(p->key_file) && errno != ENOENT)
        log_warn("%s: the key of the ranks cannot be deleted: %s", p->key_file, strerror(errno));
    close(p->key_fd);
    p->key_fd = 0;
}
