/* swap.h - a directory written whole or not at all: made beside its place under a hidden name, then put there. */
#ifndef MT_SWAP_H
#define MT_SWAP_H

#include "kernels/base.h"

/* An empty directory PARENT/.tmp-NAME for what will be PARENT/NAME = dir (parents are made, what a killed save left
 * there is removed); its path in tmp. */
int swap_begin(const char *dir, char tmp[MT_PATH], struct err *err) MT_CHECK;
/* Puts tmp, whose files are synced already, in the place of dir and removes what was there. At every moment the disk
 * holds the old directory or the new one, whole and under the name dir; only on a file system that cannot exchange two
 * names is there an instant in which dir is missing and the old one is PARENT/.old-NAME. */
int swap_commit(const char *tmp, const char *dir, struct err *err) MT_CHECK;

#endif
