/* lock.h - one run at a time writes under output.dir. */
#ifndef MT_LOCK_H
#define MT_LOCK_H

#include "kernels/base.h"

enum { LOCK_TEXT = 256 };

/* Zeroed: not held. */
struct lock {
    bool held, fresh; /* fresh: this process made the lock file */
    int fd;
    int64_t there; /* leading bytes of the directory's path that existed before */
};
/* Makes dir and locks dir/.lock. An error names the process that holds it: pid, host, since when. A file system without
 * locks is a warning. */
int lock_take(struct lock *l, const char *dir, struct err *err) MT_CHECK;
/* The same when `path`, which is to be written, lies in dir itself; otherwise nothing is locked. */
int lock_take_for(struct lock *l, const char *dir, const char *path, struct err *err) MT_CHECK;
/* For a start that failed: releases the lock and deletes what lock_take has made, the lock file and empty directories.
 */
void lock_undo(struct lock *l, const char *dir);
void lock_release(struct lock *l); /* zeroed, or twice, is fine */

/* The lock itself, for other files: 0 when it is taken, 1 when another process holds it, -1 (errno) when the file
 * system has no locks. It lasts until fd and its copies are closed. */
int lock_file(int fd);
/* What a holder writes into the file for others to read: "process 123 on host since 2026-01-31 12:00:00 UTC". */
void lock_holder(char text[LOCK_TEXT]);

#endif
