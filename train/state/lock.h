/* lock.h - the lock of output.dir: only one run at a time writes there. */
#ifndef MT_LOCK_H
#define MT_LOCK_H

#include "kernels/base.h"

enum { LOCK_TEXT = 256 };

/* Zeroed: not held. */
struct lock {
    bool held, fresh; /* fresh: this process made the lock file */
    int fd;
    int64_t there; /* length of the leading part of the path that existed before */
};
/* Creates dir and locks dir/.lock. Error: another process has the lock. Warns if the file system has no locks. */
int lock_take(struct lock *l, const char *dir, struct err *err) MT_CHECK;
/* As lock_take if `path`, which the caller will write, is in dir; otherwise locks nothing. */
int lock_take_for(struct lock *l, const char *dir, const char *path, struct err *err) MT_CHECK;
/* Call it after a failed start: releases the lock and deletes the lock file and the empty directories that lock_take
 * created.
 */
void lock_undo(struct lock *l, const char *dir);
void lock_release(struct lock *l); /* zeroed, or twice, is fine */

/* Locks any open file. 0: locked; 1: another process holds the lock; -1 (errno): the file system has no locks. The lock
 * lasts until fd and its duplicates are closed. */
int lock_file(int fd);
/* The text that the holder writes into the file for other processes: "process 123 on host since 2026-01-31 12:00:00
 * UTC".
 */
void lock_holder(char text[LOCK_TEXT]);

#endif
