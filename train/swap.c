/* swap.c - replaces a directory in one step.
 *
 * rename() cannot replace a directory that is not empty. Linux can exchange two names in one step; where the file
 * system cannot (NFS), the old directory steps aside to PARENT/.old-NAME first. A process killed in between leaves that
 * one and .tmp-NAME, both whole; the next save of the same directory puts its own in place and then removes them. */
#include "train/swap.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "data/file.h"

/* dir without trailing slashes, cut into the parent ("a/" of "a/b", "" of "b") and the name. */
static int split(const char *dir, char parent[MT_PATH], char name[MT_PATH], struct err *err)
{
    size_t end = strlen(dir);
    while (end && dir[end - 1] == '/') end--;
    size_t start = end;
    while (start && dir[start - 1] != '/') start--;
    if (start == end || end >= MT_PATH || !strcmp(dir + start, ".") || !strcmp(dir + start, ".."))
        return err_set(err, "\"%s\" is no name for a directory to write", dir);
    snprintf(parent, MT_PATH, "%.*s", (int)start, dir);
    snprintf(name, MT_PATH, "%.*s", (int)(end - start), dir + start);
    return 0;
}

static int sibling(const char *dir, const char *prefix, char path[MT_PATH], struct err *err)
{
    char parent[MT_PATH], name[MT_PATH];
    if (split(dir, parent, name, err)) return -1;
    return str_format(path, MT_PATH, err, "path", "%s%s%s", parent, prefix, name);
}

int swap_begin(const char *dir, char tmp[MT_PATH], struct err *err)
{
    if (sibling(dir, ".tmp-", tmp, err)) return -1;
    if (file_exists(dir) && !file_is_dir(dir)) return err_set(err, "%s is in the way: it is no directory", dir);
    return file_remove_tree(tmp, err) || file_make_dirs(tmp, err) ? -1 : 0;
}

static int move(const char *from, const char *to, struct err *err)
{
    if (rename(from, to)) return err_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno));
    return 0;
}

int swap_commit(const char *tmp, const char *dir, struct err *err)
{
    char old[MT_PATH], parent[MT_PATH], name[MT_PATH];
    if (split(dir, parent, name, err) || sibling(dir, ".old-", old, err) || file_sync_dir(tmp, err)) return -1;
    bool replaced = file_exists(dir);
    if (!replaced || syscall(SYS_renameat2, AT_FDCWD, tmp, AT_FDCWD, dir, RENAME_EXCHANGE)) {
        if (replaced && (file_remove_tree(old, err) || move(dir, old, err))) return -1;
        if (move(tmp, dir, err)) return -1;
    }
    if (file_sync_dir(*parent ? parent : ".", err)) return -1;
    return file_remove_tree(tmp, err) || file_remove_tree(old, err) ? -1 : 0;
}
