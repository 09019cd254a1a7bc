/* rank_key.c - the key file of a run. Its name has the port at which the ranks meet, so that runs side by side do not
 * share one. A run that was killed at its start leaves its file behind: rank 0 of the next one replaces it under the
 * same name, and a rank that read the old one is turned away and reads again (kernels/comm/comm_meet.c). */
#include "train/rank_key.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file.h"

static int failed(struct err *err, const char *path, const char *doing)
{
    return err_set(err, "%s: cannot %s the key of the ranks: %s", path, doing, strerror(errno));
}

static int write_key(const struct comm_place *p, struct err *err)
{
    char tmp[MT_PATH];
    if (str_format(tmp, sizeof(tmp), err, "path of the key", "%s.%d", p->key_file, (int)getpid())) return -1;
    if (unlink(tmp) && errno != ENOENT) return failed(err, tmp, "replace");
    const int fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return failed(err, tmp, "create");
    int rc = write(fd, p->key, COMM_KEY) == COMM_KEY && !fsync(fd) ? 0 : failed(err, tmp, "write");
    close(fd);
    if (!rc && rename(tmp, p->key_file)) rc = failed(err, p->key_file, "create");
    if (rc) unlink(tmp);
    return rc;
}

static int check_file(const char *path, const struct stat *st, struct err *err)
{
    if (!S_ISREG(st->st_mode)) return err_set(err, "%s: not a regular file", path);
    if (st->st_uid != geteuid())
        return err_set(err, "%s: belongs to user %lld, and this rank runs as user %lld: start all ranks as one user",
                       path, (long long)st->st_uid, (long long)geteuid());
    if (st->st_mode & 077)
        return err_set(err, "%s: others may read or write it (mode %03o): delete it and start again", path,
                       (unsigned)st->st_mode & 0777);
    if (st->st_size != COMM_KEY)
        return err_set(err, "%s: %lld bytes are no key of the ranks: delete it and start again", path,
                       (long long)st->st_size);
    return 0;
}

static int read_key(const struct comm_place *p, uint8_t key[COMM_KEY], struct err *err)
{
    struct stat st;
    const int fd = open(p->key_file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return err_set(err,
                       "rank %d finds no key of this run at %s: rank 0 writes it there, so that all machines must see "
                       "the same output.dir",
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

void rank_key_close(const struct comm_place *p)
{
    if (p->rank == 0 && p->key_file[0] && unlink(p->key_file) && errno != ENOENT)
        log_warn("%s: the key of the ranks cannot be deleted: %s", p->key_file, strerror(errno));
}
