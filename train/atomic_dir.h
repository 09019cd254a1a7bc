/* atomic_dir.h - a directory written whole or not at all: made beside its place under a hidden name, then put there;
 * and deleted the same way. */
#ifndef MT_ATOMIC_DIR_H
#define MT_ATOMIC_DIR_H

#include "kernels/base.h"

/* Before work that will be written to dir: an error unless dir can be made or is an empty directory. advice: how to
 * name another one. */
int atomic_dir_check_new(const char *dir, const char *advice, struct err *err) MT_CHECK;
/* An empty directory PARENT/.tmp-NAME for what will be PARENT/NAME = dir (parents are made, what a killed save left
 * there is removed); its path in tmp. */
int atomic_dir_begin(const char *dir, char tmp[MT_PATH], struct err *err) MT_CHECK;
/* Puts tmp, whose files are synced already, in the place of dir and removes what was there. At every moment the disk
 * holds the old directory or the new one, whole and under the name dir; only on a file system that cannot exchange two
 * names is there an instant in which dir is missing and the old one is PARENT/.old-NAME. */
int atomic_dir_commit(const char *tmp, const char *dir, struct err *err) MT_CHECK;
/* Deletes dir, which becomes PARENT/.deleting-NAME first: a process killed meanwhile leaves no half directory under its
 * name. What cannot be deleted is a warning and stays under the hidden name. */
void atomic_dir_remove(const char *dir);
/* Ends what killed processes began in the directory `parent`, for these n names (names NULL: for all): PARENT/.old-NAME
 * becomes NAME again where that is missing; .tmp-NAME and .deleting-NAME go. `tell`: warns of what cannot be deleted.
 */
int atomic_dir_sweep(const char *parent, const char *const *names, int64_t n, bool tell, struct err *err) MT_CHECK;

#endif
