/* hub_cache.c - paths, links and locks of the hub's cache on this machine; no network. */
#include "data/hub/hub_cache.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub_url.h"

#define ENDPOINT "https://huggingface.co"

static int io_error(struct err *err, const char *path, const char *doing)
{
    return err_set(err, "%s: cannot %s: %s", path, doing, strerror(errno));
}

/* ---- the environment */

static bool is_set(const char *value) { return value && value[0]; }

static bool is_true(const char *value)
{
    static const char *const words[] = {"1", "on", "yes", "true"};
    for (int i = 0; value && i < MT_LEN(words); i++)
        if (!strcasecmp(value, words[i])) return true;
    return false;
}

/* Finds the library's root folder: HF_HOME, or huggingface in the user's cache. */
static int find_home(char home[MT_PATH], struct err *err)
{
    const char *hf = getenv("HF_HOME"), *xdg = getenv("XDG_CACHE_HOME"), *user = getenv("HOME");
    if (is_set(hf)) return str_format(home, MT_PATH, err, "HF_HOME", "%s", hf);
    if (is_set(xdg)) return str_format(home, MT_PATH, err, "XDG_CACHE_HOME", "%s/huggingface", xdg);
    if (is_set(user)) return str_format(home, MT_PATH, err, "HOME", "%s/.cache/huggingface", user);
    return err_set(err, "neither HF_HOME nor HOME is set: set HF_HOME to a folder for downloads");
}

/* Copies a token without the blanks around it; characters that a header cannot contain are refused. */
static int set_token(struct hub_env *env, const char *text, struct err *err)
{
    text += strspn(text, " \t\r\n");
    size_t n = strlen(text);
    while (n && isspace((unsigned char)text[n - 1])) n--;
    if (n >= sizeof(env->token))
        return err_set(err, "%s: the token has %zu bytes, which is not a valid length", env->token_at, n);
    for (size_t i = 0; i < n; i++)
        if (text[i] <= ' ' || text[i] > '~')
            return err_set(err, "%s: a token of the hub has only letters, digits and _, as in hf_...", env->token_at);
    memcpy(env->token, text, n);
    env->token[n] = 0;
    return 0;
}

static int find_token(struct hub_env *env, const char *home, struct err *err)
{
    const char *token = getenv("HF_TOKEN"), *path = getenv("HF_TOKEN_PATH");
    int64_t size;
    if (is_set(token)) return strcpy(env->token_at, "HF_TOKEN"), set_token(env, token, err);
    if (is_set(path) ? str_format(env->token_at, MT_PATH, err, "HF_TOKEN_PATH", "%s", path)
                     : str_format(env->token_at, MT_PATH, err, "path of the token", "%s/token", home))
        return -1;
    if (!file_exists(env->token_at)) return 0;
    char *text = file_read(env->token_at, 4096, &size, err);
    const int rc = text ? set_token(env, text, err) : -1;
    mem_free(text);
    return rc;
}

int hub_env_read(struct hub_env *env, struct err *err)
{
    const char *endpoint = getenv("HF_ENDPOINT"), *cache = getenv("HF_HUB_CACHE");
    char home[MT_PATH];
    if (!is_set(cache)) cache = getenv("HUGGINGFACE_HUB_CACHE"); /* an older name of HF_HUB_CACHE */
    *env = (struct hub_env){.offline = is_true(getenv("HF_HUB_OFFLINE"))};
    if (!is_set(endpoint)) endpoint = ENDPOINT;
    const char *fault = hub_url_fault(endpoint);
    if (fault && strchr(endpoint, '@')) /* without its value, which may have a password */
        return err_set(err, "HF_ENDPOINT: %s: write https://HOST, and give a token in HF_TOKEN", fault);
    if (fault)
        return err_set(err, "HF_ENDPOINT = \"%s\": %s: expected https://HOST, with :PORT or /PATH where needed",
                       endpoint, fault);
    if (str_format(env->endpoint, sizeof(env->endpoint), err, "HF_ENDPOINT", "%s", endpoint) || find_home(home, err))
        return -1;
    for (size_t n = strlen(env->endpoint); env->endpoint[n - 1] == '/'; n--) env->endpoint[n - 1] = 0;
    if (is_set(cache) ? str_format(env->cache, MT_PATH, err, "HF_HUB_CACHE", "%s", cache)
                      : str_format(env->cache, MT_PATH, err, "path of the hub's cache", "%s/hub", home))
        return -1;
    if (find_token(env, home, err)) return -1;
    if (!env->token[0] || env->offline || !strncmp(env->endpoint, "https://", 8) || hub_url_is_loopback(env->endpoint))
        return 0;
    return err_set(err,
                   "HF_ENDPOINT = \"%s\": the token in %s would be sent unencrypted; use https://, or remove the token",
                   env->endpoint, env->token_at);
}

/* ---- names */

bool hub_is_commit(const char *revision)
{
    return strlen(revision) == 40 && strspn(revision, "0123456789abcdef") == 40;
}

bool hub_path_is_safe(const char *path)
{
    if (!path[0] || strlen(path) >= HUB_PATH) return false;
    for (const char *p = path; *p; p++)
        if ((unsigned char)*p < ' ' || *p == 127 || *p == '\\') return false;
    for (const char *part = path;; part = strchr(part, '/') + 1) {
        const size_t n = strcspn(part, "/");
        if (n == 0 || (n == 1 && part[0] == '.') || (n == 2 && !strncmp(part, "..", 2))) return false;
        if (!part[n]) return true;
    }
}

/* Makes the folder's name, "models--OWNER--NAME". */
static void folder_name(char name[HUB_PATH + 16], const struct hub_repo *repo)
{
    const char *slash = strchr(repo->id, '/');
    snprintf(name, HUB_PATH + 16, "%s--%.*s--%s", repo->dataset ? "datasets" : "models", (int)(slash - repo->id),
             repo->id, slash + 1);
}

int hub_repo_path(char path[MT_PATH], const struct hub_repo *repo, const char *below, const char *name, struct err *err)
{
    char folder[HUB_PATH + 16];
    folder_name(folder, repo);
    return str_format(path, MT_PATH, err, "path in the hub's cache", "%s/%s/%s%s%s", repo->env->cache, folder, below,
                      name ? "/" : "", name ? name : "");
}

int hub_snapshot_path(char path[MT_PATH], const struct hub_repo *repo, const char *name, struct err *err)
{
    char below[64];
    snprintf(below, sizeof(below), "snapshots/%s", repo->commit);
    return hub_repo_path(path, repo, below, name, err);
}

int hub_blob_path(char path[MT_PATH], const struct hub_repo *repo, const char *etag, struct err *err)
{
    return hub_repo_path(path, repo, "blobs", etag, err);
}

int hub_part_path(char path[MT_PATH], const struct hub_repo *repo, const char *etag, struct err *err)
{
    char name[HASH_HEX + 32];
    snprintf(name, sizeof(name), "%s.moetrain.incomplete", etag);
    return hub_repo_path(path, repo, "blobs", name, err);
}

/* The slot of a path in repo->slots, at most half full, so that linear probing ends. */
static int64_t slot_of(const struct hub_repo *repo, const char *path)
{
    int64_t at = (int64_t)(rng_key(0, path) & (uint64_t)(2 * repo->cap - 1));
    while (repo->slots[at] && strcmp(repo->files[repo->slots[at] - 1].path, path) != 0) at = (at + 1) % (2 * repo->cap);
    return at;
}

static void grow(struct hub_repo *repo)
{
    const int64_t cap = MT_MAX(2 * repo->cap, 64); /* powers of two */
    repo->files = mem_grow(repo->files, repo->cap, cap, sizeof(*repo->files));
    repo->cap = cap;
    mem_free(repo->slots);
    repo->slots = mem_array(2 * cap, sizeof(*repo->slots));
    for (int64_t i = 0; i < repo->n_files; i++) repo->slots[slot_of(repo, repo->files[i].path)] = i + 1;
}

void hub_repo_add(struct hub_repo *repo, const char *path, const char *etag, int64_t size)
{
    if (repo->n_files == repo->cap) grow(repo);
    struct hub_file *f = &repo->files[repo->n_files++];
    *f = (struct hub_file){.path = mem_strdup(path), .size = size};
    snprintf(f->etag, HASH_HEX, "%s", etag);
    int64_t *slot = &repo->slots[slot_of(repo, path)];
    if (!*slot) *slot = repo->n_files; /* of a path that is listed twice, the first one counts */
}

const struct hub_file *hub_repo_find(const struct hub_repo *repo, const char *path)
{
    const int64_t found = repo->n_files ? repo->slots[slot_of(repo, path)] : 0;
    return found ? &repo->files[found - 1] : NULL;
}

void hub_repo_free(struct hub_repo *repo)
{
    for (int64_t i = 0; i < repo->n_files; i++) mem_free(repo->files[i].path);
    mem_free(repo->files);
    mem_free(repo->slots);
    repo->files = NULL;
    repo->slots = NULL;
    repo->n_files = repo->cap = 0;
}

/* ---- reading */

static int walk(struct hub_repo *repo, const char *name, struct err *err);

/* Reads the hash in the target of a snapshot's link, the blob's name; "": the target has another name. */
static void linked_hash(char etag[HASH_HEX], const char *path)
{
    char target[MT_PATH];
    const ssize_t length = readlink(path, target, sizeof(target) - 1);
    etag[0] = 0;
    if (length <= 0) return;
    target[length] = 0;
    const char *slash = strrchr(target, '/'), *name = slash ? slash + 1 : target;
    const size_t n = strspn(name, "0123456789abcdef");
    if (!name[n] && (n == 40 || n == 64)) strcpy(etag, name);
}

/* Adds a file of the snapshot, or those of a folder. A dangling link counts as a missing file. */
static int add_entry(struct hub_repo *repo, const char *name, struct err *err)
{
    char path[MT_PATH], etag[HASH_HEX];
    struct stat st, behind;
    if (hub_snapshot_path(path, repo, name, err)) return -1;
    if (lstat(path, &st)) return 0;
    if (S_ISDIR(st.st_mode)) return walk(repo, name, err);
    if (stat(path, &behind)) return errno == ELOOP ? io_error(err, path, "follow the link") : 0;
    if (S_ISDIR(behind.st_mode))
        return err_set(err, "%s is a link to a folder, which a snapshot never has: delete it", path);
    linked_hash(etag, path);
    if (S_ISREG(behind.st_mode)) hub_repo_add(repo, name, etag, behind.st_size);
    return 0;
}

/* Adds every regular file below a folder of the snapshot; `name` is the folder in the repository, "" its root. */
static int walk(struct hub_repo *repo, const char *name, struct err *err)
{
    char dir[MT_PATH], below[HUB_PATH];
    char **names;
    int64_t n;
    if (hub_snapshot_path(dir, repo, name[0] ? name : NULL, err) || file_list(dir, &names, &n, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++) {
        rc = str_format(below, sizeof(below), err, "path in the hub's cache", "%s%s%s", name, name[0] ? "/" : "",
                        names[i]);
        if (!rc) rc = add_entry(repo, below, err);
    }
    file_list_free(names, n);
    return rc;
}

int hub_cache_list(struct hub_repo *repo, struct err *err)
{
    char path[MT_PATH];
    int64_t size;
    repo->cached = true;
    if (hub_is_commit(repo->revision)) {
        strcpy(repo->commit, repo->revision);
    } else {
        if (hub_repo_path(path, repo, "refs", repo->revision, err)) return -1;
        char *text = file_read(path, 4096, &size, NULL);
        if (text) text[strcspn(text, " \r\n")] = 0;
        const bool good = text && hub_is_commit(text);
        if (good) strcpy(repo->commit, text);
        mem_free(text);
        if (!good) return err_set(err, "%s at %s is not in the cache %s", repo->id, repo->revision, repo->env->cache);
    }
    if (hub_snapshot_path(path, repo, NULL, err)) return -1;
    if (!file_is_dir(path))
        return err_set(err, "%s at commit %s is not in the cache %s", repo->id, repo->commit, repo->env->cache);
    return walk(repo, "", err);
}

bool hub_cache_has(const struct hub_repo *repo, const struct hub_file *f)
{
    char path[MT_PATH];
    struct stat st;
    return f->etag[0] && !hub_blob_path(path, repo, f->etag, NULL) && !stat(path, &st) && S_ISREG(st.st_mode) &&
           st.st_size == f->size;
}

/* ---- writing */

int hub_cache_lock(int *fd, const struct hub_repo *repo, const struct hub_file *f, struct err *err)
{
    char folder[HUB_PATH + 16], path[MT_PATH];
    struct stat st;
    *fd = -1;
    folder_name(folder, repo);
    if (str_format(path, MT_PATH, err, "path of a lock", "%s/.locks/%s", repo->env->cache, folder) ||
        file_make_dirs(path, err) ||
        str_format(path, MT_PATH, err, "path of a lock", "%s/.locks/%s/%s.lock", repo->env->cache, folder, f->etag))
        return -1;
    const int lock = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (lock < 0) return io_error(err, path, "create the lock");
    /* On a file system without locks, as on some clusters, no lock is used; two processes then write the same bytes. */
    const bool busy = flock(lock, LOCK_EX | LOCK_NB) && (errno == EWOULDBLOCK || errno == EINTR);
    if (busy || fstat(lock, &st) || st.st_nlink == 0) /* the last holder deleted it: the next try creates it */
        close(lock);
    else
        *fd = lock;
    return 0;
}

/* In a cache that several users share, the name may belong to another user's file, a symbolic link, or a hard link of a
 * file elsewhere. It is removed, not followed. */
int hub_part_open(int *fd, const char *path, struct err *err)
{
    const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    struct stat st;
    *fd = open(path, flags);
    if (*fd >= 0 && !fstat(*fd, &st) && S_ISREG(st.st_mode) && st.st_nlink == 1 && st.st_uid == geteuid()) return 0;
    if (*fd >= 0) close(*fd);
    if (unlink(path) && errno != ENOENT) return *fd = -1, io_error(err, path, "remove the entry in its place");
    *fd = open(path, flags | O_CREAT | O_EXCL, 0666);
    return *fd < 0 ? io_error(err, path, "create") : 0;
}

const char *hub_why_unwritten(const struct hub_env *env, struct err *text)
{
    const int why = errno;
    struct statvfs disk;
    char room[32];
    err_set(text, "cannot write to %s: %s", env->cache, strerror(why));
    if ((why == ENOSPC || why == EDQUOT) && !statvfs(env->cache, &disk))
        err_set(text,
                "cannot write to %s: %s, %s is free: make room, or set HF_HOME to a folder on a larger disk; the next "
                "start continues with what was downloaded",
                env->cache, strerror(why), str_bytes(room, (int64_t)((double)disk.f_bavail * (double)disk.f_frsize)));
    return text->msg;
}

/* Renames a file that only this process wrote; two processes that create one name both succeed. */
static int put_in_place(const char *tmp, const char *path, struct err *err)
{
    if (!rename(tmp, path)) return 0;
    io_error(err, path, "rename to it");
    unlink(tmp);
    return -1;
}

static int own_name(char tmp[MT_PATH], const char *path, struct err *err)
{
    return str_format(tmp, MT_PATH, err, "path in the hub's cache", "%s.%lld.tmp", path, (long long)getpid());
}

static int write_small(const char *path, const char *text, struct err *err)
{
    char tmp[MT_PATH];
    if (own_name(tmp, path, err) || file_write_atomic(tmp, text, (int64_t)strlen(text), err)) return -1;
    return put_in_place(tmp, path, err);
}

/* Writes the tag by which backup programs recognise a cache (bford.info/cachedir). */
static int write_tag(const struct hub_env *env, struct err *err)
{
    static const char tag[] = "Signature: 8a477f597d28d172789f06886806bc55\n"
                              "# This file is a cache directory tag: what lies here can be downloaded again.\n";
    char path[MT_PATH];
    if (str_format(path, MT_PATH, err, "path in the hub's cache", "%s/CACHEDIR.TAG", env->cache)) return -1;
    return file_exists(path) ? 0 : write_small(path, tag, err);
}

int hub_cache_reserve(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, struct err *err)
{
    char path[MT_PATH], a[32], b[32];
    struct stat st;
    struct statvfs disk;
    int64_t need = 0, room;
    for (int64_t i = 0; i < n; i++) {
        if (hub_cache_has(repo, files[i])) continue;
        if (hub_part_path(path, repo, files[i]->etag, err)) return -1;
        const int64_t have = stat(path, &st) ? 0 : st.st_size;
        if (!i64_add(need, MT_MAX(files[i]->size - have, 0), &need)) need = INT64_MAX;
    }
    if (hub_repo_path(path, repo, "blobs", NULL, err) || file_make_dirs(path, err) || write_tag(repo->env, err))
        return -1;
    if (statvfs(path, &disk)) return io_error(err, path, "ask for the free space of its disk");
    if (!i64_mul((int64_t)disk.f_bavail, (int64_t)disk.f_frsize, &room)) room = INT64_MAX;
    if (need == 0 || need <= room) return 0;
    return err_set(err,
                   "%s must still be downloaded, but only %s is free at %s: make room, or set HF_HOME to a "
                   "folder on a larger disk",
                   str_bytes(a, need), str_bytes(b, room), repo->env->cache);
}

/* Creates the directories of path, all that is before its last slash. */
static int make_parents(const char *path, struct err *err)
{
    char dir[MT_PATH];
    snprintf(dir, sizeof(dir), "%.*s", (int)(strrchr(path, '/') - path), path);
    return file_make_dirs(dir, err);
}

int hub_cache_link(const struct hub_repo *repo, const struct hub_file *f, struct err *err)
{
    char path[MT_PATH], tmp[MT_PATH], target[MT_PATH], now[MT_PATH];
    size_t used = 0;
    target[0] = 0; /* up from snapshots/COMMIT and every folder of the file's path */
    for (const char *p = f->path; p; p = strchr(p + 1, '/'))
        used += (size_t)snprintf(target + used, sizeof(target) - used, "../");
    snprintf(target + used, sizeof(target) - used, "../blobs/%s", f->etag);
    if (hub_snapshot_path(path, repo, f->path, err) || make_parents(path, err)) return -1;
    const ssize_t n = readlink(path, now, sizeof(now) - 1);
    if (n > 0 && (size_t)n == strlen(target) && !memcmp(now, target, (size_t)n)) return 0;
    /* created beside blobs/ and snapshots/; after a kill, a leftover does not count as a file */
    if (hub_repo_path(now, repo, "link", NULL, err) || own_name(tmp, now, err)) return -1;
    if (unlink(tmp) && errno != ENOENT) return io_error(err, tmp, "remove");
    if (symlink(target, tmp)) return io_error(err, tmp, "make a symbolic link, which the hub's cache needs");
    return put_in_place(tmp, path, err);
}

int hub_cache_write_ref(const struct hub_repo *repo, struct err *err)
{
    char path[MT_PATH];
    if (hub_is_commit(repo->revision)) return 0;
    if (hub_repo_path(path, repo, "refs", repo->revision, err) || make_parents(path, err)) return -1;
    return write_small(path, repo->commit, err);
}
