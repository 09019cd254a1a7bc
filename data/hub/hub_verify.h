/* hub_verify.h - which files are in the cache with the content that the hub lists for them. */
#ifndef MT_HUB_VERIFY_H
#define MT_HUB_VERIFY_H

#include "data/hub/hub_cache.h"

enum hub_place {
    HUB_ABSENT,
    HUB_BLOB,     /* as the blob that its hash names */
    HUB_SNAPSHOT, /* in the snapshot, as a blob of another name or a plain file */
};

/* Fills where[i] of the n files. What moetrain did not download itself is hashed, under the lock of its blob, and
 * remembered by size and time of change in moetrain-verified: no later start hashes it again, unless it was changed. A
 * damaged blob is set aside, and absent; an error when nothing can be downloaded (repo->cached). A file without a hash
 * (etag "") counts as whole. */
int hub_verify(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, enum hub_place *where,
               struct err *err) MT_CHECK;
/* Remembers a blob that was hashed while it was written. */
void hub_verify_mark(const struct hub_repo *repo, const struct hub_file *f);

#endif
