/* hub_rows.h - the rows of a data set without plain JSON (parquet, CSV, ...), from the hub's viewer. */
#ifndef MT_HUB_ROWS_H
#define MT_HUB_ROWS_H

#include "data/hub/hub_cache.h"

#define HUB_ROWS "moetrain-rows" /* the folder in a snapshot: HUB_ROWS/CONFIG/SPLIT.jsonl */

/* Puts all rows of a split at repo->commit into the snapshot, as JSONL in order, and adds that file to the repo's
 * files. which: "CONFIG/SPLIT", "SPLIT" of the only configuration that has it, or "" for the only split.
 *
 * After a failure the next call continues after the pages received; a commit's rows are downloaded once. Errors: rows
 * or data sets that the viewer truncates, rows of another commit, more than a million rows. */
int hub_rows(struct hub_repo *repo, const char *which, struct err *err) MT_CHECK;

#endif
