/* best.c - see best.h. A run that continues from a checkpoint must have the best/ of that checkpoint.
 *
 * Before a new best/ replaces the one that the newest checkpoint names, the checkpoint gets hard links to its files. A
 * run that continues from there moves these files back, and the best/ of a later step to an archive. The adapter's
 * moetrain_step shows which best/ it is. */
#include "train/state/best.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/state/archive.h"
#include "data/file/atomic_dir.h"
#include "train/adapter/peft.h"

#define BEST "best"

static int move(const char *from, const char *to, struct err *err)
{
    return rename(from, to) ? err_set(err, "cannot rename %s to %s: %s", from, to, strerror(errno)) : 0;
}

/* Makes the directory `to` with hard links to the files of `from`; after an error `to` does not exist. */
static int link_files(const char *from, const char *to, struct err *err)
{
    char tmp[MT_PATH], a[MT_PATH], b[MT_PATH], **names;
    int64_t n;
    if (file_list(from, &names, &n, err)) return -1;
    int rc = atomic_dir_begin(to, tmp, err);
    const bool begun = !rc;
    for (int64_t i = 0; i < n && !rc; i++) {
        rc = file_in(a, from, names[i], err) || file_in(b, tmp, names[i], err) ? -1 : 0;
        if (!rc && link(a, b)) rc = err_set(err, "cannot link %s to %s: %s", b, a, strerror(errno));
    }
    if (!rc) rc = atomic_dir_commit(tmp, to, err);
    if (rc && begun) atomic_dir_remove(tmp);
    file_list_free(names, n);
    return rc;
}

/* Links the old best/ into the checkpoint of saved_step. It only warns if that fails (a file system without hard links,
 * two file systems, a protected checkpoint). */
static void keep(const char *best, const char *dir, int64_t saved_step)
{
    char checkpoint[MT_PATH], kept[MT_PATH];
    struct err err;
    if (checkpoint_path(checkpoint, dir, saved_step, &err) || file_in(kept, checkpoint, BEST, &err) ||
        !file_is_dir(checkpoint) || file_exists(kept))
        return;
    if (link_files(best, kept, &err))
        log_warn("%s: a run that continues from step %lld will search for the best adapter again", err.msg,
                 (long long)saved_step);
}

int best_replace(const char *dir, int64_t saved_step, int64_t saved_best, struct err *err)
{
    char new[MT_PATH], best[MT_PATH];
    if (file_in(new, dir, BEST_NEW, err) || file_in(best, dir, BEST, err)) return -1;
    if (saved_step >= 0 && saved_best > 0 && peft_step(best) == saved_best) keep(best, dir, saved_step);
    return atomic_dir_commit(new, best, err);
}

/* Whether best/ is later than the checkpoint. A best/ of the checkpoint's own step is later if the checkpoint was
 * written before that evaluation ended. If the checkpoint has no loss for comparison (the held-out data have changed),
 * best/ stays until the next evaluation. */
static bool is_later(int64_t step, const struct train_state *s)
{
    return step > s->step || (step == s->step && s->best_step != step && isfinite(s->best_loss));
}

/* Finds the best/ that was kept: it is in the newest checkpoint that names it. */
static void find_kept(char kept[MT_PATH], const char *dir, const struct train_state *s)
{
    char folder[MT_PATH], **names;
    struct err unused;
    int64_t n;
    kept[0] = 0;
    if (s->best_step <= 0 || checkpoint_after(dir, s->step - 1, folder, &names, &n, &unused)) return;
    for (int64_t i = 0; i < n && !kept[0]; i++)
        if (str_format(kept, MT_PATH, NULL, "path", "%s/%s/" BEST, folder, names[i]) || peft_step(kept) != s->best_step)
            kept[0] = 0;
    file_list_free(names, n);
}

void best_find(struct best_found *b, const char *dir, const struct train_state *s)
{
    char best[MT_PATH];
    *b = (struct best_found){.later = false};
    if (file_in(best, dir, BEST, NULL)) return;
    b->later = is_later(peft_step(best), s);
    b->missing = !file_is_dir(best);
    if (b->later || b->missing) find_kept(b->kept, dir, s);
}

bool best_is_lost(const struct best_found *b, const struct train_state *s)
{
    return (b->later || b->missing) && s->best_step > 0 && !b->kept[0];
}

int best_restore(const struct best_found *b, const char *dir, const struct train_state *s, bool checkpoints,
                 struct err *err)
{
    char best[MT_PATH], checkpoint[MT_PATH], here[MT_PATH];
    if (file_in(best, dir, BEST, err) || checkpoint_path(checkpoint, dir, s->step, err) ||
        file_in(here, checkpoint, BEST, err))
        return -1;
    /* not in a checkpoint that is archived */
    if (b->kept[0] && strcmp(b->kept, here) && move(b->kept, here, err)) return -1;
    if (archive_later(dir, s->step, checkpoints, b->later, err)) return -1;
    return b->kept[0] && (move(here, best, err) || file_sync_dir(dir, err)) ? -1 : 0;
}

void best_print(const char *dir, const struct train_state *s, const char *highest)
{
    char best[MT_PATH];
    if (s->eval_step <= 0 || s->eval_from < 0 || file_in(best, dir, BEST, NULL)) return;
    const bool there = file_is_dir(best);
    const char *score = highest ? highest : "held-out loss", *better = highest ? "higher" : "lower",
               *most = highest ? "highest" : "lowest";
    const double value = highest ? 1 - s->best_loss : s->best_loss;
    if (!isfinite(s->best_loss))
        log_info("no evaluation had a finite %s: %s is not written", score, best);
    else if (s->best_step && !there)
        log_info("no %s: the %s %s, %.4f, was at step %lld, and that adapter was moved or deleted, or is "
                 "in another output.dir",
                 best, most, score, value, (long long)s->best_step);
    else if (s->eval_from > 0)
        log_info("%-12s %s (%s %.4f at step %lld, the %s of the evaluations from step %lld on; step 0 "
                 "was not evaluated on this held-out data)",
                 "best:", best, score, value, (long long)s->best_step, most, (long long)s->eval_from);
    else if (s->best_step)
        log_info("%-12s %s (%s %.4f at step %lld)", "best:", best, score, value, (long long)s->best_step);
    else
        log_info("no %s: no evaluation had a %s %s than step 0 (%.4f), so adapter/ is no better than at "
                 "the start",
                 best, better, score, value);
    if (there && s->best_step && s->best_step < s->step)
        log_info("             adapter/ is of step %lld; to use the best one, add --adapter %s to the commands below",
                 (long long)s->step, best);
}
