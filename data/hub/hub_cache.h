/* hub_cache.h - the cache of hub files on disk, in the layout of the Python library huggingface_hub:
 *
 *    CACHE/models--OWNER--NAME/blobs/HASH                    the content (data sets: datasets--OWNER--NAME)
 *    CACHE/models--OWNER--NAME/snapshots/COMMIT/PATH         a link to ../../blobs/HASH
 *    CACHE/models--OWNER--NAME/refs/REVISION                 the 40 hex digits of the commit
 *    CACHE/models--OWNER--NAME/moetrain-verified             hash, size and time of files that were hashed
 *    CACHE/models--OWNER--NAME/moetrain-headers/COMMIT/PATH  safetensors cut after their headers, for plans
 *    CACHE/.locks/models--OWNER--NAME/HASH.lock              flock'ed by the process that downloads the blob
 *
 * moetrain-verified and moetrain-headers are moetrain's additions; the library ignores them. The library names a blob
 * by the ETag of the response, which a mirror may set to something other than a hash. On a disk without links it puts
 * the file itself into the snapshot.
 *
 * A blob gets its name only when it is complete and checked. Until then it is HASH.moetrain.incomplete, which only the
 * holder of the lock writes. */
#ifndef MT_HUB_CACHE_H
#define MT_HUB_CACHE_H

#include "kernels/hash.h"

#define HUB_PATH 1024 /* maximum bytes of a file's path in its repository, or of a repository's id */

/* Settings from the environment. */
struct hub_env {
    char endpoint[512];     /* without a trailing slash */
    char cache[MT_PATH];    /* the folder of all repositories */
    char token[512];        /* "": none */
    char token_at[MT_PATH]; /* for messages: the variable or file that the token came from */
    bool offline;
};
int hub_env_read(struct hub_env *env, struct err *err) MT_CHECK;

struct hub_file {
    char *path;          /* path in the repository */
    char etag[HASH_HEX]; /* SHA-256 of the content, or git's SHA-1; names the blob. "": unknown */
    int64_t size;        /* bytes */
};

struct hub_repo {
    const struct hub_env *env;
    bool dataset, cached; /* cached: the files are those in the cache, and nothing can be downloaded */
    char id[HUB_PATH], revision[256];
    char commit[41];
    struct hub_file *files;
    int64_t n_files, cap;
    int64_t *slots; /* [2 * cap] hash table of paths: index of the file + 1, or 0 */
};

bool hub_is_commit(const char *revision); /* 40 hex digits */
/* False for names that may leave their folder: absolute, "..", empty parts, backslashes, control characters. */
bool hub_path_is_safe(const char *path);
/* Adds a file; copies its path. */
void hub_repo_add(struct hub_repo *repo, const char *path, const char *etag, int64_t size);
const struct hub_file *hub_repo_find(const struct hub_repo *repo, const char *path); /* NULL: it has no such file */
void hub_repo_free(struct hub_repo *repo);

/* Make paths; name NULL gives the folder itself. below: a folder of the repository, such as "blobs". */
int hub_repo_path(char path[MT_PATH], const struct hub_repo *repo, const char *below, const char *name,
                  struct err *err) MT_CHECK;
int hub_snapshot_path(char path[MT_PATH], const struct hub_repo *repo, const char *name, struct err *err) MT_CHECK;
int hub_blob_path(char path[MT_PATH], const struct hub_repo *repo, const char *etag, struct err *err) MT_CHECK;
int hub_part_path(char path[MT_PATH], const struct hub_repo *repo, const char *etag, struct err *err) MT_CHECK;

/* Writes to text->msg why the cache cannot be written, from errno; for a full disk also the free space and what to
 * do. */
const char *hub_why_unwritten(const struct hub_env *env, struct err *text);

/* Opens or creates a partial file for reading and writing; it must belong to this user and have no second hard link. */
int hub_part_open(int *fd, const char *path, struct err *err) MT_CHECK;

/* Fills commit and files from the cache; a file's hash is the name of its link's target, or "". -1: the revision is
 * missing, or the snapshot has invalid links. */
int hub_cache_list(struct hub_repo *repo, struct err *err) MT_CHECK;
bool hub_cache_has(const struct hub_repo *repo, const struct hub_file *f); /* the complete blob */
/* Locks a blob. *fd: the lock, released by closing it; -1 if another process holds it. */
int hub_cache_lock(int *fd, const struct hub_repo *repo, const struct hub_file *f, struct err *err) MT_CHECK;
/* Creates the folders of blobs and checks the disk space for n missing or incomplete files; the error gives both
 * sizes. */
int hub_cache_reserve(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n,
                      struct err *err) MT_CHECK;
/* Makes the snapshot's link to an existing blob. */
int hub_cache_link(const struct hub_repo *repo, const struct hub_file *f, struct err *err) MT_CHECK;
/* Writes the commit of the revision to refs/. */
int hub_cache_write_ref(const struct hub_repo *repo, struct err *err) MT_CHECK;

#endif
