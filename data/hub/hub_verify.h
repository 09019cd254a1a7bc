/* hub_verify.h - finds the files in the cache with the content that the hub lists. */
#ifndef MT_HUB_VERIFY_H
#define MT_HUB_VERIFY_H

#include "data/hub/hub_cache.h"

enum hub_place {
    HUB_ABSENT,
    HUB_BLOB,     /* as the blob named by its hash */
    HUB_SNAPSHOT, /* in the snapshot, as a blob of another name or a plain file */
};

/* Fills where[i] of the n files. Files that moetrain did not download are hashed once, under the lock of their blob,
 * and recorded in moetrain-verified with size and modification time. A damaged blob is renamed and counts as absent; it
 * is an error if nothing can be downloaded (repo->cached). A file without a hash (etag "") counts as complete. */
int hub_verify(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, enum hub_place *where,
               struct err *err) MT_CHECK;
/* Records a blob that was hashed while it was written. */
void hub_verify_mark(const struct hub_repo *repo, const struct hub_file *f);

#endif
