/* archive.c - see archive.h.
 *
 * The outputs are moved one by one to a hidden directory, which is then renamed to archive-N. After a kill before this
 * rename, the next start moves the contents back. If output.dir now has a newer entry of the same name (an export that
 * ran in between, or the directory of the other checkpoints), that stays and the older one goes to an archive. The
 * caller holds the lock of output.dir. */
#include "train/state/archive.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/state/checkpoint.h"

#define HALF ".archiving"

static const char *const outputs[] = {"adapter",    "best",       "checkpoints", "metrics.jsonl", "report.html",
                                      "config.ini", "trace.json", "profile.txt", "tensorboard",   "rollouts"};

/* Prefixes of outputs whose number varies: exports, and profiles of ranks other than 0. */
static const char *const families[] = {"export-", "trace-rank", "profile-rank"};

static bool is_output(const char *name)
{
    bool found = false;
    for (int64_t i = 0; i < MT_LEN(families); i++) found |= !strncmp(name, families[i], strlen(families[i]));
    for (int64_t i = 0; i < MT_LEN(outputs); i++) found |= !strcmp(name, outputs[i]);
    return found;
}

static bool is_there(const char *dir, const char *name)
{
    struct stat st;
    char path[MT_PATH];
    return !file_in(path, dir, name, NULL) && !lstat(path, &st);
}

static int move(const char *from_dir, const char *to_dir, const char *name, struct err *err)
{
    char from[MT_PATH], to[MT_PATH];
    if (file_in(from, from_dir, name, err) || file_in(to, to_dir, name, err)) return -1;
    return rename(from, to) ? err_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno)) : 0;
}

/* Moves all entries of `from`, or only the outputs, to `to`. *moved: their number. Entries whose name exists in `to`
 * stay; *kept: their number. */
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

static int free_name(const char *dir, char name[32], struct err *err)
{
    char path[MT_PATH];
    for (int i = 1;; i++) {
        snprintf(name, 32, "archive-%d", i);
        if (file_in(path, dir, name, err)) return -1;
        if (!is_there(dir, name)) return 0;
    }
}

/* Renames the hidden directory to an archive and sets `to` to its path. */
static int finish(const char *dir, char to[MT_PATH], struct err *err)
{
    char half[MT_PATH], name[32];
    if (file_in(half, dir, HALF, err) || file_sync_dir(half, err) || free_name(dir, name, err) ||
        file_in(to, dir, name, err))
        return -1;
    if (rename(half, to)) return err_set(err, "cannot rename %s to %s: %s", half, to, strerror(errno));
    return file_sync_dir(dir, err);
}

int archive_recover(const char *dir, struct err *err)
{
    char half[MT_PATH], to[MT_PATH];
    int64_t moved, kept;
    if (file_in(half, dir, HALF, err) || file_check_link(half, err)) return -1; /* files behind a link are not moved */
    if (!file_is_dir(half)) return 0;
    if (move_all(half, dir, false, &moved, &kept, err) || (kept && finish(dir, to, err)))
        return err_prefix(err, "restoring the outputs of an earlier run");
    if (!kept) return file_remove_tree(half, err);
    log_warn("a start was killed while it archived the earlier run, and %s has newer outputs of the same names: the "
             "older ones are in %s",
             dir, to);
    return 0;
}

/* Moves back the entries whose names are free in dir. Returns rc, which is 0, or -1 with the error in err. */
static int undo(const char *dir, int rc, struct err *err)
{
    struct err back = {.msg = ""};
    if (archive_recover(dir, &back)) log_warn("%s", back.msg);
    return rc ? err_prefix(err, "archiving the earlier run in %s", dir) : 0;
}

int archive_run(const char *dir, struct err *err)
{
    char half[MT_PATH], to[MT_PATH];
    int64_t moved, kept;
    if (file_in(half, dir, HALF, err) || file_make_dirs(half, err)) return -1;
    int rc = move_all(dir, half, true, &moved, &kept, err);
    if (!rc && moved) rc = finish(dir, to, err);
    if (rc || !moved) return undo(dir, rc, err);
    log_info("moved the earlier run in %s to %s", dir, to);
    return 0;
}

int archive_later(const char *dir, int64_t step, bool checkpoints, bool best, struct err *err)
{
    char from[MT_PATH], half[MT_PATH], later[MT_PATH], to[MT_PATH], what[64] = "", **names = NULL;
    int64_t n = 0;
    if (checkpoints && checkpoint_after(dir, step, from, &names, &n, err)) return -1;
    const bool any = n || best;
    int rc = any && (file_in(half, dir, HALF, err) || file_in(later, half, "checkpoints", err) ||
                     file_make_dirs(n ? later : half, err))
                 ? -1
                 : 0;
    for (int64_t i = 0; i < n && !rc; i++) rc = move(from, later, names[i], err);
    if (!rc && best) rc = move(dir, half, "best", err);
    file_list_free(names, n);
    if (!rc && any) rc = finish(dir, to, err);
    if (rc || !any) return rc ? undo(dir, rc, err) : 0;
    if (n) snprintf(what, sizeof(what), "the %" PRId64 " checkpoint%s of later steps", n, n > 1 ? "s" : "");
    log_info("this run continues from step %" PRId64 ": moved %s%s%s to %s", step, what, n && best ? " and " : "",
             best ? "best/, of a later step," : "", to);
    return 0;
}

void archive_links(const char *dir)
{
    static const char *const names[] = {"adapter", "best", "checkpoints", "cache", "tensorboard"};
    char path[MT_PATH], target[MT_PATH];
    struct stat st;
    for (int64_t i = 0; i < MT_LEN(names); i++) {
        if (file_in(path, dir, names[i], NULL) || lstat(path, &st) || !S_ISLNK(st.st_mode)) continue;
        const ssize_t n = readlink(path, target, sizeof(target) - 1);
        if (n >= 0) log_info("output.dir: %s is a link to %.*s", names[i], (int)n, target);
    }
}
