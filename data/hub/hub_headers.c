/* hub_headers.c - the folder moetrain-headers/COMMIT of a repository in the cache.
 *
 * It is not in snapshots/, where every file is complete. The headers are not hashed, as the hub lists only the whole
 * file's hash; the safetensors reader checks them as usual. The index is linked last: when it (or the only shard)
 * exists, the folder is complete. */
#include "data/hub/hub_headers.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub_http.h"

#define FOLDER "moetrain-headers"
#define INDEX  "model.safetensors.index.json"
#define WHOLE  "model.safetensors"

static int folder_path(char path[MT_PATH], const struct hub_repo *repo, const char *name, struct err *err)
{
    char below[64];
    snprintf(below, sizeof(below), FOLDER "/%s", repo->commit);
    return hub_repo_path(path, repo, below, name, err);
}

static bool exists(const struct hub_repo *repo, const char *name)
{
    char path[MT_PATH];
    return !folder_path(path, repo, name, NULL) && file_exists(path);
}

bool hub_headers_needless(const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n)
{
    bool all = true;
    for (int64_t i = 0; i < n && all; i++) {
        char path[MT_PATH];
        all = hub_cache_has(repo, shards[i]) && !hub_snapshot_path(path, repo, shards[i]->path, NULL) &&
              file_exists(path);
    }
    return all;
}

/* Makes a link to the target of the snapshot's link. */
static int link_small(const struct hub_repo *repo, const char *name, struct err *err)
{
    char from[MT_PATH], to[MT_PATH], target[MT_PATH];
    if (exists(repo, name)) return 0;
    snprintf(target, sizeof(target), "../../snapshots/%s/%s", repo->commit, name);
    if (hub_snapshot_path(from, repo, name, err) || folder_path(to, repo, name, err)) return -1;
    if (!file_exists(from)) return 0;
    if ((unlink(to) && errno != ENOENT) || (symlink(target, to) && errno != EEXIST))
        return err_set(err, "%s: cannot make a symbolic link: %s", to, strerror(errno));
    return 0;
}

static int write_headers(const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n, struct err *err)
{
    const struct hub_file **missing = mem_array(MT_MAX(n, 1), sizeof(struct hub_file *));
    char path[MT_PATH], bytes[32], **text = mem_array(MT_MAX(n, 1), sizeof(char *));
    int64_t *size = mem_array(MT_MAX(n, 1), sizeof(*size)), n_missing = 0, sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (!exists(repo, shards[i]->path)) missing[n_missing++] = shards[i];
    int rc = n_missing ? hub_http_headers(repo, missing, n_missing, text, size, err) : 0;
    for (int64_t i = 0; i < n_missing && !rc; sum += size[i++]) {
        rc = folder_path(path, repo, missing[i]->path, err);
        if (!rc) rc = file_write_atomic(path, text[i], size[i], err);
    }
    if (!rc && n_missing)
        log_info("%s: read the headers of %lld file%s, %s; no weights are downloaded", repo->id, (long long)n_missing,
                 str_plural(n_missing), str_bytes(bytes, sum));
    for (int64_t i = 0; i < n_missing; i++) mem_free(text[i]);
    mem_free(text);
    mem_free(size);
    mem_free(missing);
    return rc;
}

int hub_headers(char dir[MT_PATH], const struct hub_repo *repo, struct hub_file const *const *shards, int64_t n,
                struct err *err)
{
    if (folder_path(dir, repo, NULL, err) || file_make_dirs(dir, err) || link_small(repo, "config.json", err) ||
        write_headers(repo, shards, n, err))
        return -1;
    return link_small(repo, INDEX, err);
}

bool hub_headers_have(char dir[MT_PATH], const struct hub_repo *repo)
{
    return !folder_path(dir, repo, NULL, NULL) && exists(repo, "config.json") &&
           (exists(repo, INDEX) || exists(repo, WHOLE));
}
