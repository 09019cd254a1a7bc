/* hub_push.c - the steps of an upload: find or create the repository, ask which files are large (preupload), send these
 * by the batch API of git LFS to the addresses that it gives, then make a commit, which has the small ones.
 *
 * LFS identifies contents by their SHA-256 and stores them when they are sent, before the commit. A content's addresses
 * expire, so moetrain asks for them just before it sends it. */
#include "data/hub/hub_push.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "data/hub/hub_progress.h"
#include "data/hub/hub_send.h"
#include "data/json/text.h"

#define SAMPLE    512                 /* first bytes of a file, by which the hub tells text from data */
#define AT_ONCE   256                 /* files in a question about sizes */
#define SMALL_MAX ((int64_t)64 << 20) /* bytes of a file in the commit itself */
#define PARTS_MAX 10000
#define DEPTH     16 /* of folders */
#define URL_MAX   8192
#define LFS_TYPE  "application/vnd.git-lfs+json"
#define JSON_TYPE "application/json"

struct upload {
    char *path; /* in the folder and in the repository */
    int64_t size;
    bool large, ignored, same;
    char oid[HASH_HEX];   /* SHA-256 of a large file, git's SHA-1 of a small one */
    char there[HASH_HEX]; /* the same hash of the file in the repository; "": no such file, or not known */
};

struct push {
    const struct hub_push *opt;
    struct hub_env env;
    char id[HUB_PATH];
    struct upload *files;
    int64_t n, cap;
    struct hub_progress progress;
    int64_t done, moved; /* bytes of large files that the hub has; those that this process sent */
};

/* ---- requests */

/* The answer's JSON; NULL: the hub refuses, or the answer is not JSON. */
static struct json_doc *answer_of(struct push *p, struct hub_send *s, const char *doing, struct err *err)
{
    struct json_doc *doc = NULL;
    const char *token = s->status == 401 || s->status == 403
                            ? ": the token needs write access to the repository (hf auth login stores another)"
                            : "";
    char name[HUB_PATH + 64];
    snprintf(name, sizeof(name), "%s: answer to %s", p->id, doing);
    if (s->status < 200 || s->status > 299)
        err_set(err, "%s: the hub refuses to %s (HTTP %ld)%s%s%s", p->id, doing, s->status, s->why[0] ? ": " : "",
                s->why, token);
    else
        doc = json_parse(s->n_text ? s->text : "{}", s->n_text ? s->n_text : 2, name, err);
    return doc;
}

/* Sends a request with a JSON body to an address of the hub; s gets the answer, whose text the caller frees. */
static int ask_status(struct push *p, struct hub_send *s, const char *url, const char *body, int64_t size,
                      struct err *err)
{
    const bool lfs = s->accept != NULL;
    s->method = body ? "POST" : "GET";
    s->url = url;
    s->token = true;
    s->body = body;
    s->size = size;
    if (!s->type) s->type = body ? lfs ? LFS_TYPE : JSON_TYPE : NULL;
    if (!hub_send(&p->env, s, err)) return 0;
    mem_free(s->text);
    return err_prefix(err, "%s", p->id);
}

static struct json_doc *ask(struct push *p, struct hub_send *s, const char *doing, const char *url, const char *body,
                            int64_t size, struct err *err)
{
    if (ask_status(p, s, url, body, size, err)) return NULL;
    struct json_doc *doc = answer_of(p, s, doing, err);
    mem_free(s->text);
    return doc;
}

/* ---- the folder */

static int add_folder(struct push *p, const char *below, int depth, struct err *err);

static int add_file(struct push *p, const char *below, const char *name, int depth, struct err *err)
{
    char path[HUB_PATH], full[MT_PATH];
    struct stat st;
    if (str_format(path, sizeof(path), err, "path", "%s%s%s", below, below[0] ? "/" : "", name) ||
        file_in(full, p->opt->dir, path, err))
        return -1;
    if (!hub_path_is_safe(path)) return err_set(err, "%s: a name that the hub does not take: rename it", full);
    if (stat(full, &st)) return err_set(err, "%s: %s", full, strerror(errno));
    if (S_ISDIR(st.st_mode)) return add_folder(p, path, depth + 1, err);
    if (!S_ISREG(st.st_mode)) return err_set(err, "%s: neither a file nor a folder: remove it", full);
    p->files = mem_reserve(p->files, &p->cap, p->n + 1, sizeof(*p->files));
    p->files[p->n++] = (struct upload){.path = mem_strdup(path), .size = st.st_size};
    return 0;
}

static int add_folder(struct push *p, const char *below, int depth, struct err *err)
{
    char full[MT_PATH], **names;
    int64_t n;
    if (depth > DEPTH) return err_set(err, "%s/%s: folders nest deeper than %d", p->opt->dir, below, DEPTH);
    if (below[0] ? file_in(full, p->opt->dir, below, err) : str_format(full, MT_PATH, err, "path", "%s", p->opt->dir))
        return -1;
    if (file_list(full, &names, &n, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++)
        if (names[i][0] != '.') rc = add_file(p, below, names[i], depth, err);
    file_list_free(names, n);
    return rc;
}

static int open_file(const struct push *p, const struct upload *f, struct err *err)
{
    char full[MT_PATH];
    if (file_in(full, p->opt->dir, f->path, err)) return -1;
    const int fd = open(full, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? err_set(err, "%s: %s", full, strerror(errno)) : fd;
}

static int hash_file(const struct push *p, struct upload *f, struct err *err)
{
    const int64_t chunk = 1 << 20;
    struct hash h;
    int64_t at = 0;
    ssize_t n;
    const int fd = open_file(p, f, err);
    if (fd < 0) return -1;
    char *bytes = mem_alloc(chunk);
    if (f->large)
        hash_init(&h);
    else
        hash_init_git(&h, f->size);
    for (; (n = read(fd, bytes, (size_t)chunk)) > 0; at += n) {
        hash_add(&h, bytes, n);
        progress();
    }
    close(fd);
    mem_free(bytes);
    if (n < 0 || at != f->size) return err_set(err, "%s/%s: changed while it was read", p->opt->dir, f->path);
    hash_hex(&h, f->oid);
    return 0;
}

/* ---- the repository */

static int create(struct push *p, struct err *err)
{
    char url[URL_MAX], owner[HUB_PATH];
    struct json_out o = {0};
    const char *name = strchr(p->id, '/') + 1;
    snprintf(owner, sizeof(owner), "%.*s", (int)(name - 1 - p->id), p->id);
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "type", "model");
    json_out_str(&o, "name", name);
    json_out_str(&o, "organization", owner);
    json_out_bool(&o, "private", p->opt->private);
    json_out_close(&o, '}');
    snprintf(url, sizeof(url), "%s/api/repos/create", p->env.endpoint);
    struct hub_send s = {.fd = -1};
    struct json_doc *doc = ask(p, &s, "create it", url, o.text, o.size, err);
    json_out_free(&o);
    if (doc) log_info("%s: created, %s", p->id, p->opt->private ? "private" : "public");
    json_free(doc);
    return doc ? 0 : -1;
}

/* Creates the repository if there is none. An existing one stays as public or private as it is. */
static int find_or_create(struct push *p, struct err *err)
{
    char url[URL_MAX];
    bool private = false;
    struct hub_send s = {.fd = -1};
    snprintf(url, sizeof(url), "%s/api/models/%s", p->env.endpoint, p->id);
    if (ask_status(p, &s, url, NULL, 0, err)) return -1;
    if (s.status == 404) {
        mem_free(s.text);
        return create(p, err);
    }
    struct json_doc *doc = answer_of(p, &s, "show it", err);
    mem_free(s.text);
    if (!doc) return -1;
    int rc = json_opt_bool(json_root(doc), "private", &private, err);
    if (!rc && p->opt->private && !private)
        rc = err_set(err, "--private: %s exists and is public: change that in its settings, or name another", p->id);
    json_free(doc);
    return rc;
}

/* ---- which files are large */

static void put_base64(struct json_out *o, const char *key, const uint8_t *data, int64_t n)
{
    struct text_buf text = {0};
    text_put_base64(&text, data, n);
    json_out_str(o, key, text.text);
    text_free(&text);
}

static int put_question(const struct push *p, struct json_out *o, const struct upload *f, struct err *err)
{
    uint8_t sample[SAMPLE];
    const int fd = open_file(p, f, err);
    if (fd < 0) return -1;
    const ssize_t n = pread(fd, sample, SAMPLE, 0);
    close(fd);
    if (n < 0) return err_set(err, "%s/%s: cannot be read", p->opt->dir, f->path);
    json_out_open(o, NULL, '{');
    json_out_str(o, "path", f->path);
    put_base64(o, "sample", sample, n);
    json_out_i64(o, "size", f->size);
    json_out_close(o, '}');
    return 0;
}

static struct upload *find_file(const struct push *p, const char *path)
{
    for (int64_t i = 0; i < p->n; i++)
        if (!strcmp(p->files[i].path, path)) return &p->files[i];
    return NULL;
}

static int read_mode(const struct push *p, struct json row, struct err *err)
{
    const char *path, *mode, *oid = "";
    bool ignored = false;
    if (json_get_str(row, "path", &path, err) || json_get_str(row, "uploadMode", &mode, err) ||
        json_opt_bool(row, "shouldIgnore", &ignored, err) || json_opt_str(row, "oid", &oid, err))
        return -1;
    struct upload *f = find_file(p, path);
    if (!f) return json_error(row, err, "%.100s was not asked for", path);
    f->large = f->size && !strcmp(mode, "lfs"); /* LFS has no empty contents */
    f->ignored = ignored;
    if (strlen(oid) < sizeof(f->there)) strcpy(f->there, oid);
    return 0;
}

static int ask_modes(struct push *p, int64_t first, int64_t n, struct err *err)
{
    char url[URL_MAX];
    struct json_out o = {0};
    struct json rows;
    struct hub_send s = {.fd = -1};
    int rc = 0;
    json_out_open(&o, NULL, '{');
    json_out_open(&o, "files", '[');
    for (int64_t i = first; i < first + n && !rc; i++) rc = put_question(p, &o, &p->files[i], err);
    json_out_close(&o, ']');
    json_out_close(&o, '}');
    snprintf(url, sizeof(url), "%s/api/models/%s/preupload/main", p->env.endpoint, p->id);
    struct json_doc *doc = rc ? NULL : ask(p, &s, "take files", url, o.text, o.size, err);
    json_out_free(&o);
    if (!doc) return -1;
    rc = json_get_array(json_root(doc), "files", &rows, err);
    if (!rc && json_count(rows) != n)
        rc = json_error(rows, err, "answers about %lld files of %lld", (long long)json_count(rows), (long long)n);
    for (int64_t i = 0; i < n && !rc; i++) rc = read_mode(p, json_at(rows, i), err);
    json_free(doc);
    return rc;
}

/* ---- large files */

static void on_sent(void *user, int64_t bytes)
{
    struct push *p = user;
    hub_progress_show(&p->progress, p->id, p->done + bytes, p->moved + bytes);
}

/* Sends bytes [from, from + size) of the file; *etag if wanted. Signed addresses get no token. */
static int put_part(struct push *p, const struct upload *f, int fd, const char *url, int64_t from, int64_t size,
                    char etag[256], struct err *err)
{
    struct hub_send s = {.method = "PUT", .url = url, .fd = fd, .from = from, .size = size, .sent = on_sent, .user = p};
    int rc = hub_send(&p->env, &s, err);
    if (!rc && (s.status < 200 || s.status > 299))
        rc = err_set(err, "the store refuses it (HTTP %ld)%s%s", s.status, s.why[0] ? ": " : "", s.why);
    mem_free(s.text);
    if (rc) return err_prefix(err, "%s/%s", p->id, f->path);
    p->done += size;
    p->moved += size;
    if (etag) memcpy(etag, s.etag, sizeof(s.etag));
    return etag && !etag[0] ? err_set(err, "%s/%s: the store gives no ETag for a part", p->id, f->path) : 0;
}

/* Finds the address of part i: the header's member named by the number i, perhaps with leading zeros. */
static int part_url(struct json header, int64_t i, const char **url, struct err *err)
{
    const char *key;
    struct json value;
    for (int64_t k = 0; json_member(header, k, &key, &value); k++)
        if (key[0] && strspn(key, "0123456789") == strlen(key) && strtoll(key, NULL, 10) == i)
            return json_str(value, url, &(int64_t){0}, err);
    return json_error(header, err, "it has no address for part %lld", (long long)i);
}

static int64_t chunk_size(struct json header)
{
    const char *text;
    int64_t n = 0;
    if (!json_get_str(header, "chunk_size", &text, NULL)) return strtoll(text, NULL, 10);
    return json_get_i64(header, "chunk_size", 1, INT64_MAX, &n, NULL) ? 0 : n;
}

/* Sends the file in parts of a size that the hub chooses; a request to `href` then joins them. */
static int put_parts(struct push *p, const struct upload *f, int fd, struct json header, const char *href,
                     struct err *err)
{
    const int64_t chunk = chunk_size(header), n = chunk > 0 ? (f->size + chunk - 1) / chunk : 0;
    const char *url;
    char etag[256];
    struct json_out o = {0};
    int rc = n >= 1 && n <= PARTS_MAX ? 0 : json_error(header, err, "chunk_size is invalid");
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "oid", f->oid);
    json_out_open(&o, "parts", '[');
    for (int64_t i = 1; i <= n && !rc; i++) {
        const int64_t from = (i - 1) * chunk;
        rc = part_url(header, i, &url, err) || put_part(p, f, fd, url, from, MT_MIN(chunk, f->size - from), etag, err);
        json_out_open(&o, NULL, '{');
        json_out_i64(&o, "partNumber", i);
        json_out_str(&o, "etag", etag);
        json_out_close(&o, '}');
    }
    json_out_close(&o, ']');
    json_out_close(&o, '}');
    struct hub_send s = {.fd = -1, .accept = LFS_TYPE};
    struct json_doc *doc = rc ? NULL : ask(p, &s, "join the parts of a file", href, o.text, o.size, err);
    json_out_free(&o);
    json_free(doc);
    return doc ? 0 : -1;
}

static void put_object(struct json_out *o, const struct upload *f)
{
    json_out_str(o, "oid", f->oid);
    json_out_i64(o, "size", f->size);
}

/* Confirms that the content is complete, if the batch's answer asks for it. */
static int confirm(struct push *p, const struct upload *f, struct json verify, struct err *err)
{
    const char *href;
    struct json_out o = {0};
    struct hub_send s = {.fd = -1, .accept = LFS_TYPE};
    if (json_type(verify) != JSON_OBJECT) return 0;
    if (json_get_str(verify, "href", &href, err)) return -1;
    json_out_open(&o, NULL, '{');
    put_object(&o, f);
    json_out_close(&o, '}');
    struct json_doc *doc = ask(p, &s, "confirm a file", href, o.text, o.size, err);
    json_out_free(&o);
    json_free(doc);
    return doc ? 0 : -1;
}

/* Sends the content as the batch's answer specifies; nothing if LFS has it already. */
static int put_content(struct push *p, const struct upload *f, struct json object, struct err *err)
{
    struct json error = json_find(object, "error"), actions = json_find(object, "actions");
    const struct json upload = json_find(actions, "upload"), header = json_find(upload, "header");
    const char *message = "", *href;
    if (json_type(error) == JSON_OBJECT) {
        if (json_opt_str(error, "message", &message, NULL)) message = "";
        return err_set(err, "%s/%s: the hub does not take it: %s", p->id, f->path, message);
    }
    if (json_type(upload) != JSON_OBJECT) {
        p->done += f->size;
        return 0;
    }
    if (json_get_str(upload, "href", &href, err)) return -1;
    const int fd = open_file(p, f, err);
    if (fd < 0) return -1;
    int rc = json_has(header, "chunk_size") ? put_parts(p, f, fd, header, href, err)
                                            : put_part(p, f, fd, href, 0, f->size, NULL, err);
    close(fd);
    return rc ? -1 : confirm(p, f, json_find(actions, "verify"), err);
}

static int send_large(struct push *p, const struct upload *f, struct err *err)
{
    char url[URL_MAX];
    struct json_out o = {0};
    struct json objects;
    struct hub_send s = {.fd = -1, .accept = LFS_TYPE};
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "operation", "upload");
    json_out_raw(&o, "transfers", "[\"basic\",\"multipart\"]");
    json_out_str(&o, "hash_algo", "sha256");
    json_out_open(&o, "objects", '[');
    json_out_open(&o, NULL, '{');
    put_object(&o, f);
    json_out_close(&o, '}');
    json_out_close(&o, ']');
    json_out_close(&o, '}');
    snprintf(url, sizeof(url), "%s/%s.git/info/lfs/objects/batch", p->env.endpoint, p->id);
    struct json_doc *doc = ask(p, &s, "take a large file", url, o.text, o.size, err);
    json_out_free(&o);
    if (!doc) return -1;
    int rc = json_get_array(json_root(doc), "objects", &objects, err);
    if (!rc && json_count(objects) != 1) rc = json_error(objects, err, "expected one object");
    if (!rc) rc = put_content(p, f, json_at(objects, 0), err);
    json_free(doc);
    return rc;
}

/* ---- the commit */

static int put_small(const struct push *p, struct json_out *o, const struct upload *f, struct err *err)
{
    char full[MT_PATH];
    int64_t size;
    if (file_in(full, p->opt->dir, f->path, err)) return -1;
    char *content = file_read(full, SMALL_MAX, &size, err);
    if (!content) return -1;
    put_base64(o, "content", (const uint8_t *)content, size);
    json_out_str(o, "encoding", "base64");
    mem_free(content);
    return 0;
}

/* Appends a line {"key": key, "value": {...}} of which the caller writes the members. */
static void line_open(struct json_out *o, const char *key)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "key", key);
    json_out_open(o, "value", '{');
}

static void line_close(struct json_out *o, struct text_buf *body)
{
    json_out_close(o, '}');
    json_out_close(o, '}');
    text_put_bytes(body, o->text, o->size);
    text_put(body, "\n");
    json_out_free(o);
}

static int commit(struct push *p, struct err *err)
{
    char url[URL_MAX];
    struct text_buf body = {0};
    struct json_out o = {0};
    struct hub_send s = {.fd = -1, .type = "application/x-ndjson"};
    int rc = 0;
    line_open(&o, "header");
    json_out_str(&o, "summary", p->opt->message);
    json_out_str(&o, "description", "");
    line_close(&o, &body);
    for (int64_t i = 0; i < p->n && !rc; i++) {
        const struct upload *f = &p->files[i];
        if (f->ignored || f->same) continue;
        line_open(&o, f->large ? "lfsFile" : "file");
        json_out_str(&o, "path", f->path);
        if (f->large) {
            json_out_str(&o, "algo", "sha256");
            put_object(&o, f);
        } else {
            rc = put_small(p, &o, f, err);
        }
        line_close(&o, &body);
    }
    snprintf(url, sizeof(url), "%s/api/models/%s/commit/main", p->env.endpoint, p->id);
    struct json_doc *doc = rc ? NULL : ask(p, &s, "make the commit", url, body.text, body.size, err);
    text_free(&body);
    json_free(doc);
    return doc ? 0 : -1;
}

/* ---- all of it */

/* Hashes the files and sets `same` where the repository has this content. *changed: number of the other files. */
static int compare(struct push *p, int64_t *changed, struct err *err)
{
    *changed = 0;
    for (int64_t i = 0; i < p->n; i++) {
        struct upload *f = &p->files[i];
        if (f->ignored) log_info("%s: left out, as .gitignore of the repository says", f->path);
        if (f->ignored) continue;
        if (hash_file(p, f, err)) return -1;
        f->same = !strcmp(f->oid, f->there);
        *changed += !f->same;
        if (f->large && !f->same) p->progress.total += f->size;
    }
    return 0;
}

static int push_files(struct push *p, int64_t *changed, struct err *err)
{
    char size[32], time[32];
    int rc = find_or_create(p, err);
    for (int64_t i = 0; i < p->n && !rc; i += AT_ONCE) rc = ask_modes(p, i, MT_MIN(AT_ONCE, p->n - i), err);
    if (!rc) rc = compare(p, changed, err);
    if (rc || !*changed) return rc;
    p->progress.start_ms = p->progress.last_ms = clock_ms();
    log_info("%s: %lld of %lld file%s to send, %s of large ones", p->id, (long long)*changed, (long long)p->n,
             str_plural(p->n), str_bytes(size, p->progress.total));
    for (int64_t i = 0; i < p->n && !rc; i++)
        if (p->files[i].large && !p->files[i].ignored && !p->files[i].same) rc = send_large(p, &p->files[i], err);
    hub_progress_clear();
    if (!rc) rc = commit(p, err);
    if (rc) return -1;
    log_info("%s: sent in %s, %s of them large files", p->id,
             str_seconds(time, (clock_ms() - p->progress.start_ms) / 1e3), str_bytes(size, p->moved));
    return 0;
}

int hub_push(const struct hub_push *opt, char url[MT_PATH], int64_t *changed, struct err *err)
{
    struct push p = {.opt = opt};
    if (hub_repository(p.id, sizeof(p.id), opt->to, err) || hub_env_read(&p.env, err)) return -1;
    if (p.env.offline) return err_set(err, "HF_HUB_OFFLINE is set: remove it to push");
    if (!p.env.token[0])
        return err_set(err, "push needs a token with write access: set HF_TOKEN, or run hf auth login");
    int rc = add_folder(&p, "", 0, err);
    if (!rc && !p.n) rc = err_set(err, "%s: no files in it", opt->dir);
    if (!rc) rc = push_files(&p, changed, err);
    if (!rc) rc = str_format(url, MT_PATH, err, "address", "%s/%s", p.env.endpoint, p.id);
    for (int64_t i = 0; i < p.n; i++) mem_free(p.files[i].path);
    mem_free(p.files);
    return rc;
}
