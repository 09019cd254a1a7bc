/* archive.c - the outputs of an earlier run are kept when another one starts anew in the same output.dir.
 *
 * Several names cannot be renamed at once. They move into a hidden directory one after the other, and that one gets the
 * archive's name when it has them all: a kill before this leaves the hidden directory, and the next start moves what is
 * in it back. Where something else has a name by then (an export that ran in between), both stay: what is in the hidden
 * directory under that name goes to an archive. The caller holds the lock of output.dir. */
#include "train/archive.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data/file.h"

#define HALF ".archiving"

static const char *const outputs[] = {"adapter",    "best",       "checkpoints", "metrics.jsonl", "report.html",
                                      "config.ini", "trace.json", "profile.txt", "tensorboard"};

/* What names of any number of outputs begin with: of exports, and of profiles of ranks other than 0. */
static const char *const families[] = {"export-", "trace-rank", "profile-rank"};

static bool is_output(const char *name)
{
    bool found = false;
    for (int64_t i = 0; i < MT_LEN(families); i++) found |= !strncmp(name, families[i], strlen(families[i]));
    for (int64_t i = 0; i < MT_LEN(outputs); i++) found |= !strcmp(name, outputs[i]);
    return found;
}

static int join(char path[MT_PATH], const char *dir, const char *name, struct err *err)
{
    return str_format(path, MT_PATH, err, "path", "%s/%s", dir, name);
}

static bool is_there(const char *dir, const char *name)
{
    struct stat st;
    char path[MT_PATH];
    return !join(path, dir, name, NULL) && !lstat(path, &st);
}

static int move(const char *from_dir, const char *to_dir, const char *name, struct err *err)
{
    char from[MT_PATH], to[MT_PATH];
    if (join(from, from_dir, name, err) || join(to, to_dir, name, err)) return -1;
    return rename(from, to) ? err_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno)) : 0;
}

/* Every entry of `from`, or the outputs among them, to `to`; how many in *moved. Those whose name is taken there stay:
 * how many in *kept. */
static int move_all(const char *from, const char *to, bool only_outputs, int64_t *moved, int64_t *kept, struct err *err)
{
    char **names;
    int64_t n;
    *moved = *kept = 0;
    if (file_list(from, &names, &n, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++) {
        if (only_outputs && !is_output(names[i])) continue;
        const bool taken = is_there(to, names[i]);
        if (!taken) rc = move(from, to, names[i], err);
        *moved += !taken && !rc;
        *kept += taken;
    }
    file_list_free(names, n);
    return rc;
}

/* The first archive-N that is not there. */
static int free_name(const char *dir, char name[32], struct err *err)
{
    char path[MT_PATH];
    for (int i = 1;; i++) {
        snprintf(name, 32, "archive-%d", i);
        if (join(path, dir, name, err)) return -1;
        if (!is_there(dir, name)) return 0;
    }
}

/* The hidden directory becomes an archive; its path in `to`. */
static int finish(const char *dir, char to[MT_PATH], struct err *err)
{
    char half[MT_PATH], name[32];
    if (join(half, dir, HALF, err) || free_name(dir, name, err) || join(to, dir, name, err)) return -1;
    if (rename(half, to)) return err_set(err, "cannot rename %s to %s: %s", half, to, strerror(errno));
    return file_sync_dir(dir, err);
}

int archive_recover(const char *dir, struct err *err)
{
    char half[MT_PATH], to[MT_PATH];
    int64_t moved, kept;
    if (join(half, dir, HALF, err)) return -1;
    if (!file_is_dir(half)) return 0;
    if (move_all(half, dir, false, &moved, &kept, err) || (kept && finish(dir, to, err)))
        return err_prefix(err, "putting an earlier run back");
    if (!kept) return file_remove_tree(half, err);
    log_warn("a start with train.resume = never was killed while it archived the earlier run, and %s has newer outputs "
             "of the same names: the older ones are in %s",
             dir, to);
    return 0;
}

int archive_run(const char *dir, struct err *err)
{
    char half[MT_PATH], to[MT_PATH];
    int64_t moved, kept;
    if (join(half, dir, HALF, err) || file_make_dirs(half, err)) return -1;
    int rc = move_all(dir, half, true, &moved, &kept, err);
    if (!rc && moved) rc = finish(dir, to, err);
    if (rc || !moved) {
        struct err back = {.msg = ""};
        if (archive_recover(dir, &back)) log_warn("%s", back.msg);
        return rc ? err_prefix(err, "moving the earlier run in %s aside", dir) : 0;
    }
    log_info("the earlier run in %s is kept in %s", dir, to);
    return 0;
}
