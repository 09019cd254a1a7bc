/* atomic_dir.h - writes or deletes a directory completely or not at all: until complete it has a hidden name beside its
 * final path. */
#ifndef MT_ATOMIC_DIR_H
#define MT_ATOMIC_DIR_H

#include "kernels/base.h"

/* Checks dir before the work whose output goes there: an error unless it is an empty directory, not a symbolic link, or
 * can be created. advice: how to name another one, for the end of the error. */
int atomic_dir_check_new(const char *dir, const char *advice, struct err *err) MT_CHECK;
/* Creates the empty directory PARENT/.tmp-NAME for PARENT/NAME = dir, in place of an older one, and missing parents.
 * tmp: its path. */
int atomic_dir_begin(const char *dir, char tmp[MT_PATH], struct err *err) MT_CHECK;
/* Renames tmp, whose files are synced, to dir, and deletes the old dir. dir is always the complete old or new
 * directory, except on a file system that cannot exchange two names: there dir is missing for an instant, and the old
 * one is PARENT/.old-NAME. */
int atomic_dir_commit(const char *tmp, const char *dir, struct err *err) MT_CHECK;
/* Renames dir to PARENT/.deleting-NAME and deletes it, so that a killed process leaves no incomplete dir. A failed
 * deletion is only a warning. */
void atomic_dir_remove(const char *dir);
/* Completes or undoes what killed processes began in the directory `parent`, for these n names (names NULL: all):
 * renames PARENT/.old-NAME to NAME where NAME is missing, deletes .tmp-NAME and .deleting-NAME. `warn`: warn about
 * failed deletions. */
int atomic_dir_sweep(const char *parent, const char *const *names, int64_t n, bool warn, struct err *err) MT_CHECK;

#endif
