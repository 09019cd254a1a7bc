/* hub_rows.h - the rows of a data set that has no plain JSON (parquet, CSV, ...), as the hub's viewer shows them. */
#ifndef MT_HUB_ROWS_H
#define MT_HUB_ROWS_H

#include "data/hub/hub_cache.h"

#define HUB_ROWS "moetrain-rows" /* the folder in a snapshot: HUB_ROWS/CONFIG/SPLIT.jsonl */

/* Has all rows of a split at repo->commit in the snapshot, as JSONL, one row a line in their order, and adds that file
 * to the repo's. which: "CONFIG/SPLIT", "SPLIT" of the only configuration that has it, or "" when there is one split.
 *
 * Pages that came stay for the next time when it fails; a commit's rows are downloaded once. Refused: what the viewer
 * cuts or shows only the beginning of, the rows of another commit, more than a million. */
int hub_rows(struct hub_repo *repo, const char *which, struct err *err) MT_CHECK;

#endif
