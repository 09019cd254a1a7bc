/* best.h - replaces best/ by a better adapter, and restores it when a run continues from a checkpoint. */
#ifndef MT_BEST_H
#define MT_BEST_H

#include "train/state/checkpoint.h"

/* The directory to which a new best/ is written. The next start deletes it if the run is killed before best_replace. */
#define BEST_NEW ".tmp-best"

/* Renames dir/.tmp-best to dir/best. If the old best/ is of step saved_best, the checkpoint of saved_step first gets
 * hard links to it, as `best`, because a run that continues from this checkpoint needs it again. Only warns if linking
 * fails. saved_step < 0: there is no checkpoint. */
int best_replace(const char *dir, int64_t saved_step, int64_t saved_best, struct err *err) MT_CHECK;

/* best/ when a run continues from a checkpoint. */
struct best_found {
    bool later;         /* best/ was written after the checkpoint, at a step that the run will repeat */
    bool missing;       /* there is no such directory */
    char kept[MT_PATH]; /* the adapter that was best/ at the checkpoint, if a later one has replaced it; "": it is best/
                           itself, or there is none */
};
/* Compares dir/best with the checkpoint's state. */
void best_find(struct best_found *b, const char *dir, const struct train_state *s);
/* Whether the checkpoint names a best adapter that is gone. */
bool best_is_lost(const struct best_found *b, const struct train_state *s);
/* Moves a later best/ to dir/archive-N, and moves back the best/ that was kept. checkpoints: also moves the checkpoints
 * of later steps to dir/archive-N. */
int best_restore(const struct best_found *b, const char *dir, const struct train_state *s, bool checkpoints,
                 struct err *err) MT_CHECK;

/* Prints the path of the best adapter at the end of a run. highest NULL: it has the lowest held-out loss; otherwise it
 * has the highest value of this metric (best_loss is 1 - the value). */
void best_print(const char *dir, const struct train_state *s, const char *highest);

#endif
