/* hub.c - resolves a name on the hub: its commit, its files, and which of them are needed.
 *
 * One request lists a repository with sizes and hashes; later requests use that commit. Without the hub
 * (HF_HUB_OFFLINE, no network) the files in the cache replace the list, and the same files are selected. */
#include "data/hub/hub.h"

#include <ctype.h>
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/hub/hub_headers.h"
#include "data/hub/hub_http.h"
#include "data/hub/hub_rows.h"
#include "data/hub/hub_url.h"
#include "data/hub/hub_verify.h"
#include "data/json/json.h"
#include "data/json/text.h"

#define PREFIX    "hub:"
#define INDEX     "model.safetensors.index.json"
#define WHOLE     "model.safetensors"
#define INDEX_MAX ((int64_t)64 << 20)
#define REVISION  "main"

struct wanted {
    const struct hub_file **files;
    int64_t n, cap;
};

static void want(struct wanted *w, const struct hub_file *f)
{
    w->files = mem_reserve(w->files, &w->cap, w->n + 1, sizeof(*w->files));
    w->files[w->n++] = f;
}

/* ---- names */

/* [A-Za-z0-9._-], without the forms that the hub refuses. */
static bool is_name(const char *s, size_t n)
{
    if (n == 0 || n > 96 || strchr(".-", s[0]) || strchr(".-", s[n - 1])) return false;
    for (size_t i = 0; i < n; i++) {
        if (!isalnum((unsigned char)s[i]) && !strchr("._-", s[i])) return false;
        if (i && s[i] == s[i - 1] && strchr(".-", s[i])) return false;
    }
    return true;
}

static bool is_id(const char *s)
{
    const char *slash = strchr(s, '/');
    return slash && is_name(s, (size_t)(slash - s)) && is_name(slash + 1, strlen(slash + 1));
}

static int set_revision(struct hub_repo *repo, const char *revision, size_t n, struct err *err)
{
    if (n >= sizeof(repo->revision)) return err_set(err, "%s: a revision of %zu bytes is too long", repo->id, n);
    memcpy(repo->revision, revision, n);
    repo->revision[n] = 0;
    if (hub_path_is_safe(repo->revision)) return 0;
    return err_set(err, "%s: \"%s\" is not a branch, tag or commit", repo->id, repo->revision);
}

/* ---- the list of files */

static int read_file_row(struct hub_repo *repo, struct json row, struct err *err)
{
    const char *path, *etag = NULL;
    int64_t size = -1;
    struct json lfs = json_find(row, "lfs");
    if (json_get_str(row, "rfilename", &path, err)) return -1;
    if (!hub_path_is_safe(path)) return json_error(row, err, "\"%.100s\" is not a safe path", path);
    if (json_type(lfs) == JSON_OBJECT) {
        if (json_get_str(lfs, "sha256", &etag, err) || json_get_i64(lfs, "size", 0, INT64_MAX, &size, err)) return -1;
    } else if (json_get_str(row, "blobId", &etag, err) || json_get_i64(row, "size", 0, INT64_MAX, &size, err)) {
        return -1;
    }
    const size_t n = strlen(etag);
    if ((n != 64 && n != 40) || strspn(etag, "0123456789abcdef") != n)
        return json_error(row, err, "\"%.80s\" is neither a SHA-256 nor a SHA-1", etag);
    hub_repo_add(repo, path, etag, size);
    return 0;
}

static int read_list(struct hub_repo *repo, const char *text, int64_t size, struct err *err)
{
    char name[HUB_PATH + 32];
    const char *commit;
    struct json rows;
    snprintf(name, sizeof(name), "the hub's list of %s", repo->id);
    struct json_doc *doc = json_parse(text, size, name, err);
    if (!doc) return -1;
    int rc = json_get_str(json_root(doc), "sha", &commit, err);
    if (!rc && !hub_is_commit(commit)) rc = json_error(json_root(doc), err, "sha \"%.80s\" is not a commit", commit);
    if (!rc) strcpy(repo->commit, commit);
    if (!rc) rc = json_get_array(json_root(doc), "siblings", &rows, err);
    for (int64_t i = 0; !rc && i < json_count(rows); i++) rc = read_file_row(repo, json_at(rows, i), err);
    json_free(doc);
    return rc;
}

static int advise(struct err *err, const char *advice)
{
    const struct err what = *err;
    return err_set(err, "%s; %s", what.msg, advice);
}

/* Lists the repository's files: from the hub, or from the cache when the hub is offline or unreachable. */
static int list_files(struct hub_repo *repo, struct err *err)
{
    char path[2 * HUB_PATH];
    bool unreachable;
    int64_t size;
    struct err cached;
    if (repo->env->offline) {
        if (!hub_cache_list(repo, err)) return 0;
        (void)err_prefix(err, "HF_HUB_OFFLINE is set");
        return advise(err, "unset it to download, or download elsewhere and give the path of the copy");
    }
    snprintf(path, sizeof(path), "api/%s/%s/revision/", repo->dataset ? "datasets" : "models", repo->id);
    if (!hub_url_escape(path, sizeof(path) - 16, repo->revision, false))
        return err_set(err, "%s: the revision is too long", repo->id);
    strcat(path, "?blobs=true");
    char *text = hub_http_text(repo, path, &size, &unreachable, err);
    if (text) {
        const int rc = read_list(repo, text, size, err);
        mem_free(text);
        return rc;
    }
    if (!unreachable) return -1;
    if (hub_cache_list(repo, &cached))
        return advise(err,
                      "it is not in the cache; check network, proxy and HF_ENDPOINT, or download elsewhere and give "
                      "the path of the copy");
    log_warn("%s; using the cached files", err->msg);
    return 0;
}

/* ---- fetching files */

static int lacks(const struct hub_repo *repo, const char *what, const char *more, struct err *err)
{
    char dir[MT_PATH];
    if (!repo->cached) return err_set(err, "%s has no %s%s", repo->id, what, more);
    if (hub_snapshot_path(dir, repo, NULL, err)) return -1;
    return err_set(err, "%s: the cache lacks %s of commit %.8s, and the hub %s", repo->id, what, repo->commit,
                   repo->env->offline ? "cannot be asked because HF_HUB_OFFLINE is set; unset it"
                                      : "was not asked or not reached");
}

static int fetch(const struct hub_repo *repo, const struct wanted *w, struct err *err)
{
    struct wanted missing = {0};
    enum hub_place *where = mem_array(MT_MAX(w->n, 1), sizeof(*where));
    int rc = hub_verify(repo, w->files, w->n, where, err);
    for (int64_t i = 0; i < w->n; i++)
        if (where[i] == HUB_ABSENT) want(&missing, w->files[i]);
    if (!rc && missing.n)
        rc = repo->cached ? lacks(repo, missing.files[0]->path, "", err)
                          : hub_http_fetch(repo, missing.files, missing.n, err);
    for (int64_t i = 0; i < w->n && !rc && !repo->cached; i++)
        if (where[i] != HUB_SNAPSHOT) rc = hub_cache_link(repo, w->files[i], err);
    mem_free(missing.files);
    mem_free(where);
    return rc;
}

/* ---- models */

static int want_shards(const struct hub_repo *repo, struct wanted *w, struct err *err)
{
    char path[MT_PATH];
    const char *tensor, *name;
    int64_t length;
    struct json map, value;
    if (hub_snapshot_path(path, repo, INDEX, err)) return -1;
    struct json_doc *doc = json_load(path, INDEX_MAX, err);
    if (!doc) return -1;
    bool *listed = mem_array(repo->n_files, sizeof(*listed));
    int rc = json_get_object(json_root(doc), "weight_map", &map, err);
    for (int64_t i = 0; !rc && json_member(map, i, &tensor, &value); i++) {
        rc = json_str(value, &name, &length, err);
        const struct hub_file *f = rc ? NULL : hub_repo_find(repo, name);
        if (!rc && !f) rc = lacks(repo, name, ", which its index names", err);
        if (!rc && !listed[f - repo->files]) want(w, f);
        if (!rc) listed[f - repo->files] = true;
    }
    mem_free(listed);
    json_free(doc);
    return rc;
}

static int want_needed(const struct hub_repo *repo, struct wanted *w, const char *name, const char *more,
                       struct err *err)
{
    const struct hub_file *f = hub_repo_find(repo, name);
    if (!f) return lacks(repo, name, more, err);
    want(w, f);
    return 0;
}

static void want_useful(const struct hub_repo *repo, struct wanted *w, const char *name)
{
    const struct hub_file *f = hub_repo_find(repo, name);
    if (f) want(w, f);
}

/* Adds the tokenizer code that transformers lacks, which merged exports copy, and more chat templates. */
static void want_patterns(const struct hub_repo *repo, struct wanted *w)
{
    static const char *const ends[][2] = {
        {"additional_chat_templates/", ".jinja"}, {"tokenization_", ".py"}, {"tool_declaration_", ".py"}};
    for (int64_t i = 0; i < repo->n_files; i++)
        for (int64_t k = 0; k < MT_LEN(ends); k++) {
            const char *path = repo->files[i].path;
            const size_t begin = strlen(ends[k][0]);
            if (!strncmp(path, ends[k][0], begin) && str_ends(path, ends[k][1]) && !strchr(path + begin, '/'))
                want(w, &repo->files[i]);
        }
}

static int want_tokenizer(const struct hub_repo *repo, struct wanted *w, struct err *err)
{
    static const char *const useful[] = {"tokenizer_config.json", "chat_template.jinja", "chat_template.json",
                                         "special_tokens_map.json", "generation_config.json"};
    const bool ranks = !hub_repo_find(repo, "tokenizer.json") && hub_repo_find(repo, "tiktoken.model");
    if (want_needed(repo, w, ranks ? "tiktoken.model" : "tokenizer.json", "", err)) return -1;
    for (int64_t i = 0; i < MT_LEN(useful); i++) want_useful(repo, w, useful[i]);
    want_patterns(repo, w);
    return 0;
}

/* What a repository without config.json is, by its files; "": unknown. */
static const char *other_content(const struct hub_repo *repo)
{
    if (hub_repo_find(repo, "adapter_config.json"))
        return ": an adapter, not a model; set model.path to its base model";
    for (int64_t i = 0; i < repo->n_files; i++)
        if (str_ends(repo->files[i].path, ".gguf"))
            return ", but GGUF files, which are not supported; use the repository of the original checkpoint";
    return "";
}

/* Fetches the small files that training, or a plan, reads; adds the shards to `shards`. Folders of the repository, and
 * other formats of the same weights, are not needed. */
static int fetch_small(const struct hub_repo *repo, bool plan, struct wanted *shards, struct err *err)
{
    struct wanted w = {0};
    int rc = want_needed(repo, &w, "config.json", other_content(repo), err);
    if (!rc && !plan) rc = want_tokenizer(repo, &w, err);
    want_useful(repo, &w, INDEX);
    if (!rc && !hub_repo_find(repo, INDEX))
        rc = want_needed(repo, shards, WHOLE, " and no index of shards: safetensors is the format that is read", err);
    if (!rc) rc = fetch(repo, &w, err);
    if (!rc && hub_repo_find(repo, INDEX)) rc = want_shards(repo, shards, err);
    mem_free(w.files);
    return rc;
}

/* Whether the branch is in the cache; a plan must not move it away from the commit whose weights are cached. */
static bool has_ref(const struct hub_repo *repo)
{
    char path[MT_PATH];
    return !hub_repo_path(path, repo, "refs", repo->revision, NULL) && file_exists(path);
}

/* Fetches a model. *headers true: for a plan, which downloads only the headers of shards that are not in the cache.
 * check: called before shards are downloaded; may be NULL. */
static int open_model(struct hub_repo *repo, char dir[MT_PATH], bool *headers, const struct hub_check *check,
                      struct err *err)
{
    struct wanted shards = {0};
    const bool plan = *headers;
    int rc = fetch_small(repo, plan, &shards, err);
    if (!rc && check) rc = hub_snapshot_path(dir, repo, NULL, err) || check->look(check->user, dir, err) ? -1 : 0;
    *headers = plan && !rc && !repo->cached && !hub_headers_needless(repo, shards.files, shards.n);
    if (!rc && *headers)
        rc = hub_headers(dir, repo, shards.files, shards.n, err);
    else if (!rc && (plan || !(rc = fetch(repo, &shards, err))))
        rc = hub_snapshot_path(dir, repo, NULL, err);
    mem_free(shards.files);
    return rc || repo->cached || (plan && has_ref(repo)) ? rc : hub_cache_write_ref(repo, err);
}

/* A commit never changes: no request when all of its files are cached. */
static bool have_model(const struct hub_repo *like, char dir[MT_PATH], bool plan)
{
    struct hub_repo repo = *like;
    struct err err;
    const bool have = hub_is_commit(repo.revision) && !hub_cache_list(&repo, &err) &&
                      !open_model(&repo, dir, &(bool){plan}, NULL, &err);
    hub_repo_free(&repo);
    return have;
}

/* Parses OWNER/NAME[@REVISION]; the revision may be a separate argument instead. */
static int parse_model(struct hub_repo *repo, const char *spec, const char *revision, struct err *err)
{
    const char *at = strchr(spec, '@');
    const size_t n = at ? (size_t)(at - spec) : strlen(spec);
    snprintf(repo->id, sizeof(repo->id), "%.*s", (int)MT_MIN(n, HUB_PATH - 1), spec);
    if (!is_id(repo->id))
        return err_set(err, "\"" PREFIX "%.200s\": expected " PREFIX "OWNER/NAME or " PREFIX "OWNER/NAME@REVISION",
                       spec);
    if (at && strcmp(revision, REVISION) && strcmp(revision, at + 1))
        return err_set(err, "\"" PREFIX "%.200s\" and model.revision = %s name different revisions: remove one", spec,
                       revision);
    return at ? set_revision(repo, at + 1, strlen(at + 1), err) : set_revision(repo, revision, strlen(revision), err);
}

static int find_model(char dir[MT_PATH], const char *path, const char *revision, bool *headers,
                      const struct hub_check *check, struct err *err)
{
    struct hub_env env;
    struct hub_repo repo = {.env = &env};
    struct err why = {{0}};
    const bool plan = *headers;
    char relative[MT_PATH + 64];
    *headers = false;
    if (strncmp(path, PREFIX, strlen(PREFIX))) {
        if (file_exists(path)) return str_format(dir, MT_PATH, err, "model.path", "%s", path);
        (void)!file_check_kind(path, true, &why);
        return err_set(err, "%s; %s%s", why.msg, file_relative_to(relative, path),
                       is_id(path) ? "to download from huggingface.co write model.path = " PREFIX "OWNER/NAME"
                                   : "name a directory that holds a model");
    }
    if (parse_model(&repo, path + strlen(PREFIX), revision, err) || hub_env_read(&env, err)) return -1;
    if (have_model(&repo, dir, plan)) return 0;
    *headers = plan;
    int rc = list_files(&repo, err);
    if (!rc && plan && repo.cached && hub_headers_have(dir, &repo)) {
        hub_repo_free(&repo);
        return 0;
    }
    if (!rc) rc = open_model(&repo, dir, headers, check, err);
    hub_repo_free(&repo);
    return rc;
}

int hub_model(char dir[MT_PATH], const char *path, const char *revision, const struct hub_check *check, struct err *err)
{
    return find_model(dir, path, revision, &(bool){false}, check, err);
}

int hub_model_headers(char dir[MT_PATH], const char *path, const char *revision, bool *headers, struct err *err)
{
    *headers = true;
    return find_model(dir, path, revision, headers, NULL, err);
}

const char *hub_model_name(char name[MT_PATH], const char *path)
{
    const bool hub = !strncmp(path, PREFIX, strlen(PREFIX));
    snprintf(name, MT_PATH, "%s", hub ? path + strlen(PREFIX) : path);
    if (hub) name[strcspn(name, "@")] = 0;
    return name;
}

int hub_repository(char *id, size_t n, const char *path, struct err *err)
{
    const char *name = path + strlen(PREFIX);
    if (strncmp(path, PREFIX, strlen(PREFIX)) || !is_id(name))
        return err_set(err, "\"%.200s\": expected " PREFIX "OWNER/NAME", path);
    return str_format(id, n, err, "name of the repository", "%s", name);
}

/* ---- data */

static bool is_data(const char *path) { return str_ends(path, ".jsonl") || str_ends(path, ".jsonl.gz"); }

/* Splits "FOLDER/SPLIT-00000-of-00003.parquet", the form of datasets' push_to_hub; FOLDER is "data" or the
 * configuration. False: another name. */
static bool parse_shard(const char *path, char folder[HUB_PATH], char split[HUB_PATH], int *count)
{
    static const char form[] = "-00000-of-00000.parquet";
    const size_t n = strlen(path), tail = sizeof(form) - 1;
    if (n <= tail || n >= HUB_PATH) return false;
    const char *end = path + n - tail, *slash = strchr(path, '/');
    for (size_t i = 0; i < tail; i++)
        if (form[i] == '0' ? !isdigit((unsigned char)end[i]) : form[i] != end[i]) return false;
    if (!slash || slash + 1 >= end || memchr(slash + 1, '/', (size_t)(end - slash - 1))) return false;
    snprintf(folder, HUB_PATH, "%.*s", (int)(slash - path), path);
    snprintf(split, HUB_PATH, "%.*s", (int)(end - slash - 1), slash + 1);
    return sscanf(end, "-%*5d-of-%5d", count) == 1;
}

/* Whether a shard belongs to "CONFIG/SPLIT", "SPLIT" or "" (any split). */
static bool shard_is_of(const char *folder, const char *split, const char *which)
{
    const char *slash = strchr(which, '/');
    if (!slash) return !which[0] || !strcmp(split, which);
    const size_t n = (size_t)(slash - which);
    return !strcmp(split, slash + 1) && ((strlen(folder) == n && !strncmp(folder, which, n)) ||
                                         (!strcmp(folder, "data") && !strncmp(which, "default/", 8)));
}

/* Adds the parquet files of a split. False, adding none: there are none, some are missing, or several splits match. */
static bool want_shards_of(const struct hub_repo *repo, const char *which, struct wanted *w)
{
    char folder[HUB_PATH], split[HUB_PATH], first_folder[HUB_PATH] = "", first_split[HUB_PATH] = "";
    int count = 0, of;
    bool one = true;
    for (int64_t i = 0; i < repo->n_files; i++) {
        if (!parse_shard(repo->files[i].path, folder, split, &of) || !shard_is_of(folder, split, which)) continue;
        if (!w->n) {
            memcpy(first_folder, folder, sizeof(folder));
            memcpy(first_split, split, sizeof(split));
            count = of;
        }
        one = one && of == count && !strcmp(folder, first_folder) && !strcmp(split, first_split);
        want(w, &repo->files[i]);
    }
    if (w->n && one && w->n == count) return true;
    w->n = 0;
    return false;
}

static int ask_for_name(const struct hub_repo *repo, const char *what, struct err *err)
{
    char names[512] = "";
    size_t used = 0;
    int64_t shown = 0;
    for (int64_t i = 0; i < repo->n_files && shown < 8; i++) {
        const char *path = repo->files[i].path;
        if (path[0] == '.' || str_ends(path, ".md") || used + strlen(path) + 3 > sizeof(names)) continue;
        used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", shown++ ? ", " : "", path);
    }
    return err_set(err, "%s; name a data file of it: " PREFIX "%s/FILE, where FILE may contain * and ?. It has %s%s",
                   what, repo->id, shown ? names : "nothing", shown == 8 ? ", ..." : "");
}

/* Adds the files that match the pattern, or the only data file. */
static int want_data(const struct hub_repo *repo, const char *pattern, struct wanted *w, struct err *err)
{
    char what[HUB_PATH + 64];
    for (int64_t i = 0; i < repo->n_files; i++) {
        const char *path = repo->files[i].path;
        if (pattern[0] ? fnmatch(pattern, path, FNM_PATHNAME) == 0 : is_data(path)) want(w, &repo->files[i]);
    }
    if (w->n == 1 || (w->n && pattern[0])) return 0;
    if (repo->cached && !w->n) return lacks(repo, pattern[0] ? pattern : "data", "", err);
    if (pattern[0])
        snprintf(what, sizeof(what), "no file matches %s", pattern);
    else
        snprintf(what, sizeof(what), "it has %lld JSONL files", (long long)w->n);
    return ask_for_name(repo, what, err);
}

/* Fetches files of a data set, or a split: the named one, or the only one if there is no JSONL file. If file names show
 * a split's parquet files, it fetches these; else its rows come from the viewer or the cache. */
static int fetch_data(struct hub_repo *repo, const char *pattern, const char *split, struct wanted *w, struct err *err)
{
    char rows[2 * HUB_PATH] = "";
    bool jsonl = false;
    for (int64_t i = 0; i < repo->n_files && !jsonl; i++) jsonl = is_data(repo->files[i].path);
    const bool plain = pattern[0] || repo->cached || jsonl;
    if (!pattern[0] && (split[0] || !jsonl) && want_shards_of(repo, split, w)) return fetch(repo, w, err);
    if (!plain || (split[0] && !repo->cached)) {
        if (hub_rows(repo, split, err)) return -1;
        want(w, &repo->files[repo->n_files - 1]);
        return 0;
    }
    if (split[0]) snprintf(rows, sizeof(rows), HUB_ROWS "/%s%s.jsonl", strchr(split, '/') ? "" : "*/", split);
    return want_data(repo, split[0] ? rows : pattern, w, err) || fetch(repo, w, err) ? -1 : 0;
}

/* Parses OWNER/NAME[@REVISION][/FILE or :SPLIT]. */
static int parse_data(struct hub_repo *repo, const char *spec, char pattern[HUB_PATH], char split[HUB_PATH],
                      struct err *err)
{
    const char *slash = strchr(spec, '/');
    const size_t n = slash ? (size_t)(slash - spec) + 1 + strcspn(slash + 1, "/@:") : strlen(spec);
    const char *rest = spec + n;
    snprintf(repo->id, sizeof(repo->id), "%.*s", (int)MT_MIN(n, HUB_PATH - 1), spec);
    if (!is_id(repo->id))
        return err_set(err,
                       "\"" PREFIX "%.200s\": expected " PREFIX "OWNER/NAME, " PREFIX "OWNER/NAME/FILE or " PREFIX
                       "OWNER/NAME:SPLIT",
                       spec);
    if (set_revision(repo, REVISION, strlen(REVISION), err)) return -1;
    if (rest[0] == '@') {
        const size_t length = strcspn(rest + 1, "/:");
        if (set_revision(repo, rest + 1, length, err)) return -1;
        rest += 1 + length;
    }
    return str_format(pattern, HUB_PATH, err, "name of a data file", "%s", rest[0] == '/' ? rest + 1 : "") ||
                   str_format(split, HUB_PATH, err, "name of a split", "%s", rest[0] == ':' ? rest + 1 : "")
               ? -1
               : 0;
}

static void append(struct text_buf *list, const char *path, int64_t n, const char *weight)
{
    if (list->size) text_put(list, ",");
    text_put_bytes(list, path, n);
    text_put(list, weight);
}

static int append_paths(struct text_buf *list, const struct hub_repo *repo, const struct wanted *w, const char *weight,
                        struct err *err)
{
    char path[MT_PATH];
    for (int64_t i = 0; i < w->n; i++) {
        if (hub_snapshot_path(path, repo, w->files[i]->path, err)) return -1;
        if (strchr(path, ',')) return err_set(err, "%s: a path in a list of files must not contain a comma", path);
        append(list, path, (int64_t)strlen(path), weight);
    }
    return 0;
}

/* Downloads a data set and adds its paths to the list. weight: "*2.5", or "". */
static int add_data(struct text_buf *list, const char *spec, const char *weight, struct err *err)
{
    struct hub_env env;
    struct hub_repo repo = {.env = &env, .dataset = true};
    struct wanted w = {0};
    char pattern[HUB_PATH], split[HUB_PATH];
    int rc = -1;
    if (parse_data(&repo, spec, pattern, split, err) || hub_env_read(&env, err)) return -1;
    if (!list_files(&repo, err) && !fetch_data(&repo, pattern, split, &w, err) &&
        (repo.cached || !hub_cache_write_ref(&repo, err)))
        rc = append_paths(list, &repo, &w, weight, err);
    mem_free(w.files);
    hub_repo_free(&repo);
    return rc;
}

/* Moves a weight at the end of spec, "*" and a number (dataset.h), to `weight`; any other * is part of the name. */
static char *cut_weight(char *spec, char weight[32])
{
    char *star = strrchr(spec, '*');
    weight[0] = 0;
    if (!star || !star[1] || strlen(star) >= 32 || star[strspn(star + 1, "0123456789.") + 1]) return spec;
    strcpy(weight, star);
    *star = 0;
    return spec;
}

char *hub_data(const char *files, struct err *err)
{
    struct text_buf list = {0};
    char spec[MT_PATH], weight[32];
    for (const char *p = files + strspn(files, ", \t"); *p; p += strspn(p, ", \t")) {
        size_t n = strcspn(p, ","), used = n;
        while (n && isspace((unsigned char)p[n - 1])) n--;
        if (strncmp(p, PREFIX, strlen(PREFIX))) {
            append(&list, p, (int64_t)n, "");
        } else if (str_format(spec, sizeof(spec), err, "data file", "%.*s", (int)(n - strlen(PREFIX)),
                              p + strlen(PREFIX)) ||
                   add_data(&list, cut_weight(spec, weight), weight, err)) {
            text_free(&list);
            return NULL;
        }
        p += used;
    }
    return list.text ? list.text : mem_strdup("");
}
