/* best.h - best/ of a run: replaced by a better adapter, and after the run continued from a checkpoint. */
#ifndef MT_BEST_H
#define MT_BEST_H

#include "train/state/checkpoint.h"

/* Where a new best/ is written. A run that is killed before best_replace leaves it to be deleted with other temporary
 * directories. */
#define BEST_NEW ".tmp-best"

/* Renames dir/.tmp-best to dir/best. If the old best/ is of step saved_best, the checkpoint of saved_step first gets
 * hard links to it, as `best`: a run that continues from this checkpoint needs it again. If linking fails, a warning.
 * saved_step < 0: there is no checkpoint. */
int best_replace(const char *dir, int64_t saved_step, int64_t saved_best, struct err *err) MT_CHECK;

/* best/ when a run continues from a checkpoint. */
struct best_found {
    bool later;         /* it was written after the checkpoint: its loss is of steps that are made again */
    bool missing;       /* there is no such directory */
    char kept[MT_PATH]; /* the adapter that was best/ at the checkpoint, where a later one replaced it; "": best/
                           itself, or no such directory */
};
/* Compares dir/best with the checkpoint's state. */
void best_find(struct best_found *b, const char *dir, const struct train_state *s);
/* Whether the checkpoint names a best adapter that is gone. */
bool best_is_lost(const struct best_found *b, const struct train_state *s);
/* Moves a later best/ to dir/archive-N, and with it the checkpoints of later steps if `checkpoints`; brings back the
 * one that was kept. */
int best_restore(const struct best_found *b, const char *dir, const struct train_state *s, bool checkpoints,
                 struct err *err) MT_CHECK;

/* At the end of a run: prints the path of the best adapter. highest: name of the figure that the adapter has the
 * highest of (the state has 1 minus the figure); NULL: it has the lowest held-out loss. */
void best_print(const char *dir, const struct train_state *s, const char *highest);

#endif
