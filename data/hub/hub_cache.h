/* hub_cache.h - the cache of hub files on disk, laid out as the Python library huggingface_hub lays it out:
 *
 *   CACHE/models--OWNER--NAME/blobs/HASH                    the content (data sets: datasets--OWNER--NAME)
 *   CACHE/models--OWNER--NAME/snapshots/COMMIT/PATH         a link to ../../blobs/HASH
 *   CACHE/models--OWNER--NAME/refs/REVISION                 the 40 hex digits of the commit
 *   CACHE/models--OWNER--NAME/moetrain-verified             which files were hashed, and their sizes and times then
 *   CACHE/models--OWNER--NAME/moetrain-headers/COMMIT/PATH  safetensors cut behind their headers, for plans
 *   CACHE/.locks/models--OWNER--NAME/HASH.lock              flock'ed by who downloads the blob
 *
 * moetrain-verified and moetrain-headers are not the library's, which passes over them. It names a blob by the ETag
 * that it was told, which behind a mirror may be no hash, and where a disk has no links the file itself lies in the
 * snapshot.
 *
 * A blob has its name when it is complete and checked, not before; until then it is HASH.moetrain.incomplete, which
 * nobody but the holder of the lock touches. */
#ifndef MT_HUB_CACHE_H
#define MT_HUB_CACHE_H

#include "kernels/hash.h"

#define HUB_PATH 1024 /* bytes of a file's path in its repository, of a repository's id */

/* What the environment says. */
struct hub_env {
    char endpoint[512];     /* without a slash at its end */
    char cache[MT_PATH];    /* the folder above all repositories */
    char token[512];        /* "": none */
    char token_at[MT_PATH]; /* for words: the variable or the file that it came from */
    bool offline;
};
int hub_env_read(struct hub_env *env, struct err *err) MT_CHECK;

struct hub_file {
    char *path;          /* in the repository */
    char etag[HASH_HEX]; /* SHA-256 of the content, or git's SHA-1; names the blob. "" when not told */
    int64_t size;        /* bytes */
};

struct hub_repo {
    const struct hub_env *env;
    bool dataset, cached; /* cached: the files are those of the cache, nothing can be downloaded */
    char id[HUB_PATH], revision[256];
    char commit[41];
    struct hub_file *files;
    int64_t n_files;
};

bool hub_is_commit(const char *revision); /* 40 hex digits */
/* False for what could leave its folder: absolute, "..", empty parts, backslashes, control characters. */
bool hub_path_is_safe(const char *path);
/* Adds a file; its path is copied. Who has a repo frees its files with hub_repo_free. */
void hub_repo_add(struct hub_repo *repo, const char *path, const char *etag, int64_t size);
void hub_repo_free(struct hub_repo *repo);

/* Paths; name NULL gives the folder itself. below: a folder of the repository's, as "blobs". */
int hub_repo_path(char path[MT_PATH], const struct hub_repo *repo, const char *below, const char *name,
                  struct err *err) MT_CHECK;
int hub_snapshot_path(char path[MT_PATH], const struct hub_repo *repo, const char *name, struct err *err) MT_CHECK;
int hub_blob_path(char path[MT_PATH], const struct hub_repo *repo, const char *etag, struct err *err) MT_CHECK;
int hub_part_path(char path[MT_PATH], const struct hub_repo *repo, const char *etag, struct err *err) MT_CHECK;

/* By errno, why the cache cannot be written, in text->msg; of a full disk also the free space and what to do. */
const char *hub_why_unwritten(const struct hub_env *env, struct err *text);

/* Opens a partial file for reading and writing, or begins it: one of this user's, with this name alone. */
int hub_part_open(int *fd, const char *path, struct err *err) MT_CHECK;

/* Fills commit and files from the cache; the hash of a file is what its link names, or "". -1: the revision is not
 * there, or the snapshot has links that no snapshot has. */
int hub_cache_list(struct hub_repo *repo, struct err *err) MT_CHECK;
bool hub_cache_has(const struct hub_repo *repo, const struct hub_file *f); /* the blob, whole */
/* *fd: the lock on the blob, which closing it gives back; -1 when another process has it. */
int hub_cache_lock(int *fd, const struct hub_repo *repo, const struct hub_file *f, struct err *err) MT_CHECK;
/* The folders of blobs, and room on their disk for n files not yet (wholly) there; an error tells both numbers. */
int hub_cache_reserve(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n,
                      struct err *err) MT_CHECK;
/* Makes the snapshot's link to a blob that is there. */
int hub_cache_link(const struct hub_repo *repo, const struct hub_file *f, struct err *err) MT_CHECK;
/* Remembers which commit the revision is. */
int hub_cache_write_ref(const struct hub_repo *repo, struct err *err) MT_CHECK;

#endif
