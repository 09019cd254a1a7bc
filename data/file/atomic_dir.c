/* atomic_dir.c - replaces or deletes a directory in one step.
 *
 * rename() cannot replace a directory that is not empty. Linux can exchange two names in one step; if the file system
 * cannot (NFS), the old directory is first renamed to PARENT/.old-NAME. A process killed in between leaves .old-NAME
 * and .tmp-NAME, both complete; atomic_dir_sweep then renames .old-NAME to NAME.
 *
 * A failed deletion must not end a run, because the new directory already has its name. Example: NFS cannot delete a
 * file that a process still reads. */
#include "data/file/atomic_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "data/file/file.h"

#define OLD      ".old-"
#define DELETING ".deleting-"

/* Splits dir, without trailing slashes, into the parent ("a/" of "a/b", "" of "b") and the name. */
static int split(const char *dir, char parent[MT_PATH], char name[MT_PATH], struct err *err)
{
    size_t end = strlen(dir);
    while (end && dir[end - 1] == '/') end--;
    size_t start = end;
    while (start && dir[start - 1] != '/') start--;
    if (start == end || end >= MT_PATH || !strcmp(dir + start, ".") || !strcmp(dir + start, ".."))
        return err_set(err, "\"%s\" cannot be the name of an output directory", dir);
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

static int move(const char *from, const char *to, struct err *err)
{
    if (rename(from, to)) return err_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno));
    return 0;
}

static bool is_there(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

/* Renames `path` to a free name PARENT/.deleting-NAME, NAME that of `dir`, and deletes it. A failure is a warning that
 * names `what`. */
static void discard(const char *path, const char *dir, const char *what)
{
    char aside[MT_PATH], prefix[32] = DELETING;
    struct err err;
    int rc = -1;
    for (int i = 2; i < 100; i++) {
        if ((rc = sibling(dir, prefix, aside, &err)) || !is_there(aside)) break;
        snprintf(prefix, sizeof(prefix), DELETING "%d-", i);
    }
    if (!rc) rc = move(path, aside, &err);
    if (!rc) rc = file_remove_tree(aside, &err);
    if (rc) log_warn("%s could not be deleted: %s; moetrain tries again when a run starts here", what, err.msg);
}

void atomic_dir_remove(const char *dir) { discard(dir, dir, dir); }

int atomic_dir_check_new(const char *dir, const char *advice, struct err *err)
{
    char **names, path[MT_PATH], target[MT_PATH] = "";
    int64_t n;
    if (file_check_dirs(dir, err) || sibling(dir, "", path, err)) return -1;
    if (readlink(path, target, sizeof(target) - 1) >= 0) /* the renaming of atomic_dir_commit would replace the link */
        return err_set(err, "%s is a symbolic link to %s: remove the link, or %s", path, target, advice);
    if (!file_exists(dir)) return 0;
    if (file_list(dir, &names, &n, err)) return -1;
    file_list_free(names, n);
    return n ? err_set(err, "%s is not empty: %s, or remove it first", dir, advice) : 0;
}

int atomic_dir_begin(const char *dir, char tmp[MT_PATH], struct err *err)
{
    if (sibling(dir, ".tmp-", tmp, err)) return -1;
    if (is_there(dir) && file_check_kind(dir, true, err)) return err_prefix(err, "in the way");
    if (is_there(tmp)) discard(tmp, dir, tmp);
    if (is_there(tmp)) return err_set(err, "%s was left by an earlier run and cannot be deleted: remove it", tmp);
    return file_make_dirs(tmp, err);
}

int atomic_dir_commit(const char *tmp, const char *dir, struct err *err)
{
    char old[MT_PATH], parent[MT_PATH], name[MT_PATH];
    if (split(dir, parent, name, err) || sibling(dir, OLD, old, err) || file_sync_dir(tmp, err)) return -1;
    bool replaced = file_exists(dir);
    if (!replaced || syscall(SYS_renameat2, AT_FDCWD, tmp, AT_FDCWD, dir, RENAME_EXCHANGE)) {
        if (replaced && is_there(old)) discard(old, dir, old);
        if ((replaced && move(dir, old, err)) || move(tmp, dir, err)) return -1;
    }
    if (file_sync_dir(*parent ? parent : ".", err)) return -1;
    if (is_there(tmp)) discard(tmp, dir, tmp);
    if (is_there(old)) discard(old, dir, old);
    return 0;
}

/* ---- what killed processes left ---- */

/* The name after one of the hidden prefixes, or NULL. */
static const char *hidden_name(const char *entry)
{
    static const char *const prefixes[] = {".tmp-", OLD, DELETING};
    for (int i = 0; i < MT_LEN(prefixes); i++) {
        const size_t n = strlen(prefixes[i]);
        if (strncmp(entry, prefixes[i], n)) continue;
        const size_t digits = strspn(entry + n, "0123456789"); /* .deleting-2-NAME */
        return entry + n + (i == 2 && digits && entry[n + digits] == '-' ? digits + 1 : 0);
    }
    return NULL;
}

static int sweep_entry(const char *parent, const char *entry, bool warn, struct err *err)
{
    char path[MT_PATH], dir[MT_PATH];
    struct err why;
    if (file_in(path, parent, entry, err) ||
        str_format(dir, sizeof(dir), err, "path", "%s/%s", parent, hidden_name(entry)))
        return -1;
    if (!strncmp(entry, OLD, strlen(OLD)) && !is_there(dir)) return move(path, dir, err);
    if (file_remove_tree(path, &why) && warn)
        log_warn("%s was left by an earlier run and cannot be deleted: %s", path, why.msg);
    return 0;
}

int atomic_dir_sweep(const char *parent, const char *const *names, int64_t n, bool warn, struct err *err)
{
    char **entries;
    int64_t n_entries;
    if (!file_is_dir(parent)) return 0;
    if (file_list(parent, &entries, &n_entries, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; i < n_entries && !rc; i++)
        if (hidden_name(entries[i]) && (!names || str_in(hidden_name(entries[i]), names, n)))
            rc = sweep_entry(parent, entries[i], warn, err);
    file_list_free(entries, n_entries);
    return rc;
}
