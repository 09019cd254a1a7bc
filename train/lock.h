/* lock.h - one run at a time writes under output.dir. */
#ifndef MT_LOCK_H
#define MT_LOCK_H

#include "kernels/base.h"

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

#endif
