/* hub_http.c - transfers by libcurl's multi interface, in one thread.
 *
 * A transfer waits (while AT_ONCE others run, for another process, for its next try), runs, or is done. Bytes are
 * written and hashed as they arrive, so after an interruption the next request begins where the file ends. A partial
 * file of an earlier process is hashed once, before its first request. A resolve URL redirects to a signed URL that
 * expires, so every try begins with the resolve URL. This file follows redirects itself, since older versions of
 * libcurl can forward the token: it is sent only to the origin of the first address, and https is never redirected to
 * http. */
#include "data/hub/hub_http.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub_curl.h"
#include "data/hub/hub_progress.h"
#include "data/hub/hub_url.h"
#include "data/hub/hub_verify.h"
#include "data/json/json.h"

#define AT_ONCE      4 /* concurrent transfers, one connection each */
#define TRIES        7 /* in a row without a byte; delays: FIRST_MS, 1, 2, 4, 8, 16 s */
#define FIRST_MS     200
#define TEXT_TRIES   3                    /* TRIES for a small answer, which the cache may replace */
#define NOT_READY    "ResponseNotReady"   /* the viewer has not converted the data set yet, which takes minutes */
#define RESTARTS     2                    /* times that a file may be downloaded again */
#define WAIT_MAX     3600                 /* longest delay in seconds that the hub may ask for */
#define TEXT_MAX     ((int64_t)256 << 20) /* largest small answer in bytes */
#define ERROR_MAX    4096                 /* bytes kept of an error page */
#define PAGE_MAX     (1 << 20)            /* bytes received of an error page or redirect page */
#define HEAD_MAX     (256 << 10)          /* largest response header in bytes */
#define HOPS         10                   /* redirects in a row */
#define FIRST_BYTES  (16 << 10)           /* first request for a safetensors header: most headers are shorter */
#define HEADER_MAX   100000000            /* limit of such a header in bytes, from the format */
#define STALL_S      60                   /* a transfer below STALL_RATE bytes/s for this long is aborted */
#define STALL_RATE   1024
#define LOCK_WAIT_MS 300
#define CHUNK        (256 << 10)
#define URL_MAX      8192

int64_t hub_http_limit_ms = 120000;

const char *hub_http_library(char name[64]) { return hub_curl_version(name); }

/* ---- a transfer */

enum state { WAITING, RUNNING, DONE };

/* Header fields of the last response. */
struct response {
    char code[64], message[256];            /* X-Error-Code, X-Error-Message */
    char commit[41];                        /* X-Revision, of the viewer */
    int64_t wait_s, range_from, range_size; /* -1: not given */
    bool begun;                             /* the body has begun: status, range and length were checked */
};

struct transfer {
    const struct hub_repo *repo;
    const struct hub_file *file; /* NULL: into text */
    enum state state;
    double wake_ms;       /* no try before this time */
    int tries, restarts;  /* tries in a row without progress; fresh starts */
    int64_t have, before; /* bytes of the file; bytes at the start of this try */
    int64_t received;     /* bytes of all tries */
    bool failed;          /* err is set; no further try */
    bool unreachable;     /* the failure is in the connection, not in the hub's answer */
    struct err *err;
    CURL *easy;
    struct curl_slist *headers;
    char *url, why[CURL_ERROR_SIZE];
    struct response response;
    int lock, fd; /* of a file; -1: not open */
    bool told;    /* the user was told that another process has the lock */
    struct hash hash;
    bool viewer;        /* the answer is from the viewer, whose errors are JSON */
    bool header;        /* only the safetensors header of the file is wanted, into text */
    char *hop;          /* target of the last redirect; NULL: none */
    int hops;           /* redirects of this try */
    bool foreign;       /* a redirect left the origin of url: send no token */
    bool cut;           /* the rest of the body is not needed: stops libcurl */
    int64_t head, page; /* bytes of this request: response header; error or redirect page */
    char *text;         /* NUL-terminated */
    int64_t cap;
};

static int fail(struct transfer *t, const char *fmt, ...) MT_PRINTF(2, 3);
static int fail(struct transfer *t, const char *fmt, ...)
{
    char text[sizeof(t->err->msg)];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    t->failed = true;
    return err_set(t->err, "%s%s%s: %s", t->repo->id, t->file ? "/" : "", t->file ? t->file->path : "", text);
}

/* Logs a line about a transfer; clears the progress line first. */
static void note(const struct transfer *t, const char *what)
{
    hub_progress_clear();
    log_info("%s%s%s: %s", t->repo->id, t->file ? "/" : "", t->file ? t->file->path : "", what);
}

/* Schedules another try after at least wait_s seconds, or fails after too many. */
static void try_again(struct transfer *t, int64_t wait_s, const char *why)
{
    char text[512];
    const bool patient = t->file || (t->viewer && strcmp(t->response.code, NOT_READY));
    const int most = patient ? TRIES : TEXT_TRIES;
    if (t->file && t->have > t->before) t->tries = 0;
    t->state = WAITING;
    t->unreachable = true;
    mem_free(t->hop);
    t->hop = NULL;
    t->hops = 0;
    t->foreign = false;
    if (++t->tries == most) {
        fail(t, "%s; gave up after %d tries", why, most);
    } else if (wait_s > WAIT_MAX) {
        fail(t, "%s; the hub asks to retry in %lld minutes", why, (long long)wait_s / 60);
    } else {
        const double ms = MT_MAX(1e3 * (double)wait_s, t->tries == 1 ? FIRST_MS : 500.0 * (1 << (t->tries - 1)));
        t->wake_ms = clock_ms() + ms;
        snprintf(text, sizeof(text), "%s; retrying in %.1f s", why, ms / 1e3);
        note(t, text);
    }
}

static void drop_easy(struct transfer *t, CURLM *multi)
{
    if (!t->easy) return;
    hub_curl.multi_remove_handle(multi, t->easy);
    hub_curl.easy_cleanup(t->easy);
    hub_curl.slist_free_all(t->headers);
    t->easy = NULL;
    t->headers = NULL;
}

static void close_file(struct transfer *t)
{
    if (t->fd >= 0) close(t->fd);
    if (t->lock >= 0) close(t->lock);
    t->fd = t->lock = -1;
}

/* ---- the file of a transfer */

/* Starts the hash that the hub lists: SHA-256 of large files, git's SHA-1 of small ones. */
static void start_hash(struct transfer *t)
{
    if (strlen(t->file->etag) == 64)
        hash_init(&t->hash);
    else
        hash_init_git(&t->hash, t->file->size);
}

static int rewind_file(struct transfer *t)
{
    t->have = t->before = 0;
    start_hash(t);
    if (ftruncate(t->fd, 0) || lseek(t->fd, 0, SEEK_SET) < 0)
        return fail(t, "cannot truncate the partial file: %s", strerror(errno));
    return 0;
}

static int start_over(struct transfer *t, const char *why)
{
    if (rewind_file(t)) return -1;
    if (t->restarts++ < RESTARTS) return 0;
    return fail(t, "%s, %d times: the received file differs from the one that the hub lists", why, t->restarts);
}

/* Opens the partial file and hashes its bytes. */
static int open_part(struct transfer *t)
{
    char path[MT_PATH];
    ssize_t n;
    if (hub_part_path(path, t->repo, t->file->etag, t->err)) return t->failed = true, -1;
    if (hub_part_open(&t->fd, path, t->err)) return t->failed = true, -1;
    const off_t there = lseek(t->fd, 0, SEEK_END);
    if (there == 0 || there > t->file->size) return rewind_file(t);
    char *chunk = mem_alloc(CHUNK);
    start_hash(t);
    for (t->have = 0; (n = pread(t->fd, chunk, CHUNK, t->have)) > 0; t->have += n) hash_add(&t->hash, chunk, n);
    mem_free(chunk);
    return n < 0 ? fail(t, "cannot read %s: %s", path, strerror(errno)) : 0;
}

static int write_part(struct transfer *t, const char *data, int64_t size)
{
    hash_add(&t->hash, data, size);
    while (size > 0) {
        const ssize_t put = write(t->fd, data, (size_t)size);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return fail(t, "%s", hub_why_unwritten(t->repo->env, &(struct err){{0}}));
        data += put, size -= put, t->have += put, t->received += put;
    }
    return 0;
}

/* Call it when all bytes have arrived: a partial file with the right hash becomes the blob. */
static void finish_file(struct transfer *t)
{
    char part[MT_PATH], blob[MT_PATH], hex[HASH_HEX], why[160];
    hash_hex(&t->hash, hex);
    if (strcmp(hex, t->file->etag)) {
        snprintf(why, sizeof(why), "the hash is %.12s..., the hub lists %.12s...", hex, t->file->etag);
        if (!start_over(t, why)) try_again(t, 0, why);
        return;
    }
    if (hub_part_path(part, t->repo, hex, t->err) || hub_blob_path(blob, t->repo, hex, t->err)) {
        t->failed = true;
    } else if (fsync(t->fd) || rename(part, blob)) {
        fail(t, "%s", hub_why_unwritten(t->repo->env, &(struct err){{0}}));
    } else {
        hub_verify_mark(t->repo, t->file);
        close_file(t);
        t->state = DONE;
    }
}

/* ---- callbacks of libcurl */

/* The value of a header line when it is the one called name, else NULL. */
static const char *header_value(const char *line, const char *name)
{
    const size_t n = strlen(name);
    if (strncasecmp(line, name, n) || line[n] != ':') return NULL;
    return line + n + 1 + strspn(line + n + 1, " \t");
}

static size_t on_header(char *data, size_t one, size_t n, void *user)
{
    struct transfer *t = user;
    struct response *r = &t->response;
    char line[512];
    long long a, b;
    const char *value;
    (void)one;
    t->head += (int64_t)n;
    if (t->head > HEAD_MAX) return fail(t, "the response header is longer than %d bytes", HEAD_MAX), 0;
    snprintf(line, sizeof(line), "%.*s", (int)MT_MIN(n, sizeof(line) - 1), data);
    line[strcspn(line, "\r\n")] = 0;
    if (!strncasecmp(line, "HTTP/", 5)) *r = (struct response){.wait_s = -1, .range_from = -1, .range_size = -1};
    if ((value = header_value(line, "x-error-code"))) snprintf(r->code, sizeof(r->code), "%s", value);
    if ((value = header_value(line, "x-error-message"))) snprintf(r->message, sizeof(r->message), "%.255s", value);
    if ((value = header_value(line, "x-revision"))) snprintf(r->commit, sizeof(r->commit), "%.40s", value);
    if ((value = header_value(line, "content-range")) && sscanf(value, "bytes %lld-%*d/%lld", &a, &b) == 2)
        r->range_from = a, r->range_size = b;
    if ((value = header_value(line, "retry-after")) && r->wait_s < 0 && sscanf(value, "%lld", &a) == 1 && a >= 0)
        r->wait_s = MT_MIN(a, INT32_MAX) + 1;
    /* RateLimit: "resolvers";r=0;t=123: nothing left in the window, which ends in 123 s */
    if ((value = header_value(line, "ratelimit")) && (value = strchr(value, ';')) &&
        sscanf(value, ";r=%lld;t=%lld", &a, &b) == 2 && a == 0 && b >= 0)
        r->wait_s = MT_MIN(b, INT32_MAX) + 1;
    return n;
}

/* Checks the first bytes of a good answer: they begin where the file ends, and the length is as listed. */
static int begin_body(struct transfer *t, long status)
{
    const long long size = t->file->size, have = t->have;
    const struct response *r = &t->response;
    curl_off_t length = -1;
    if (status == 206) {
        if (r->range_from == have && r->range_size == size) return 0;
        return fail(t, "asked for the bytes from %lld of %lld on, the server sends those from %lld of %lld on", have,
                    size, (long long)r->range_from, (long long)r->range_size);
    }
    hub_curl.easy_getinfo(t->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    if (length >= 0 && length != size)
        return fail(t, "the hub lists %lld bytes, the server has %lld", size, (long long)length);
    return have ? start_over(t, "the server cannot resume in the middle of a file") : 0;
}

static int add_text(struct transfer *t, const char *data, int64_t size)
{
    if (t->have + size > TEXT_MAX) return fail(t, "the answer has more than %lld bytes", (long long)TEXT_MAX);
    t->text = mem_reserve(t->text, &t->cap, t->have + size + 1, 1);
    memcpy(t->text + t->have, data, (size_t)size);
    t->have += size;
    t->text[t->have] = 0;
    return 0;
}

/* Bytes wanted of the file, as far as its first bytes give the header's length. */
static int64_t header_end(const struct transfer *t)
{
    uint64_t n = 0;
    if (t->have < 8) return MT_MIN(FIRST_BYTES, t->file->size);
    for (int i = 0; i < 8; i++) n |= (uint64_t)(unsigned char)t->text[i] << 8 * i;
    return n > HEADER_MAX ? -1 : 8 + (int64_t)n;
}

/* When a server sends the whole file, only the header is kept. */
static size_t add_header_bytes(struct transfer *t, const char *data, int64_t n, long status)
{
    const struct response *r = &t->response;
    if (!r->begun && status == 206 && (r->range_from != t->have || r->range_size != t->file->size))
        return fail(t, "asked for the bytes from %lld of %lld on, the server sends those from %lld of %lld on",
                    (long long)t->have, (long long)t->file->size, (long long)r->range_from, (long long)r->range_size),
               0;
    if (!r->begun && status == 200) t->have = 0;
    t->response.begun = true;
    if (add_text(t, data, n)) return 0;
    const int64_t end = header_end(t);
    if (end < 0 || end > t->file->size)
        return fail(t, "its first bytes do not begin a safetensors file of %lld bytes", (long long)t->file->size), 0;
    if (t->have < end) return (size_t)n;
    t->cut = t->have >= 8;
    return t->cut ? 0 : (size_t)n;
}

static size_t on_body(char *data, size_t one, size_t n, void *user)
{
    struct transfer *t = user;
    long status = 0;
    (void)one;
    hub_curl.easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200 && status != 206) { /* an error page */
        t->page += (int64_t)n;
        t->cut = t->page > PAGE_MAX;
        if (t->cut) return 0;
        if (!t->viewer || t->have > ERROR_MAX) return n;
    }
    if (t->header) return add_header_bytes(t, data, (int64_t)n, status);
    if (!t->file) return add_text(t, data, (int64_t)n) ? 0 : n;
    if (!t->response.begun && begin_body(t, status)) return 0;
    t->response.begun = true;
    if ((int64_t)n > t->file->size - t->have) {
        fail(t, "the server sends more than the %lld bytes that the hub lists", (long long)t->file->size);
        return 0;
    }
    return write_part(t, data, (int64_t)n) ? 0 : n;
}

/* ---- the end of a try */

/* Ends a transfer with an error in words, because a retry would give the same answer. */
static void refuse(struct transfer *t, long status)
{
    const struct hub_env *env = t->repo->env;
    const char *code = t->response.code, *message = t->response.message, *id = t->repo->id;
    const char *kind = t->repo->dataset ? "datasets/" : "";
    const bool token = env->token[0] != 0;
    if (!strcmp(code, "GatedRepo") || !strncmp(code, "External", 8)) /* the latter two are the viewer's */
        fail(t, "gated: accept its terms at %s/%s%s, then %s", env->endpoint, kind, id,
             token ? "try again; the token must belong to the account that accepted, and may read gated repositories"
                   : "set HF_TOKEN to a token of that account (hf auth login stores one, too)");
    else if (status == 401 && strstr(message, "Invalid credentials"))
        fail(t,
             "the hub does not accept the token in %s: it is mistyped or expired; set HF_TOKEN or run hf auth "
             "login",
             env->token_at);
    else if (!strcmp(code, "RevisionNotFound"))
        fail(t, "there is no branch, tag or commit \"%s\": correct the revision", t->repo->revision);
    else if (!strcmp(code, "EntryNotFound"))
        fail(t, "there is no such file at %s: check the name of the file and the revision",
             t->repo->commit[0] ? t->repo->commit : t->repo->revision);
    else if (t->viewer && status != 401 && status != 403)
        fail(t, "the hub does not show its rows: %ld%s%s%s%s", status, code[0] ? " " : "", code, message[0] ? ": " : "",
             message);
    else if (status == 401 || status == 404)
        fail(t, "%s has no such %s, or it is private: check the spelling%s", env->endpoint,
             t->repo->dataset ? "data set" : "model",
             token ? " and whether the token may read it" : ", or set HF_TOKEN or run hf auth login");
    else if (status == 403 && strstr(message, "disabled"))
        fail(t, "the hub has disabled it: %s: choose another", message);
    else if (status == 403)
        fail(t, "the hub refuses (403%s%s): %s", message[0] ? ", " : "", message,
             token ? "the token may not read it" : "set HF_TOKEN to a token that may read it");
    else
        fail(t, "the hub answers %ld%s%s; try again later, or set HF_ENDPOINT to a mirror", status,
             message[0] ? ": " : "", message);
}

static bool may_pass(CURLcode rc)
{
    static const CURLcode lasting[] = {CURLE_UNSUPPORTED_PROTOCOL,     CURLE_URL_MALFORMAT,
                                       CURLE_PEER_FAILED_VERIFICATION, CURLE_TOO_MANY_REDIRECTS,
                                       CURLE_SSL_CACERT_BADFILE,       CURLE_SSL_ENGINE_INITFAILED,
                                       CURLE_COULDNT_RESOLVE_PROXY,    CURLE_OUT_OF_MEMORY};
    for (int i = 0; i < MT_LEN(lasting); i++)
        if (rc == lasting[i]) return false;
    return true;
}

/* Reads the viewer's error, which is in the body: {"error": ...}. */
static void read_error(struct transfer *t)
{
    const char *message = "";
    struct json_doc *doc = t->text ? json_parse(t->text, t->have, "error", NULL) : NULL;
    if (doc && !json_opt_str(json_root(doc), "error", &message, NULL))
        snprintf(t->response.message, sizeof(t->response.message), "%.255s", message);
    json_free(doc);
}

static void follow(struct transfer *t, const char *to)
{
    const char *from = t->hop ? t->hop : t->url;
    bool same;
    if (++t->hops > HOPS) {
        fail(t, "more than %d redirects, the last to %.200s", HOPS, to);
    } else if (strlen(to) >= URL_MAX) {
        fail(t, "the redirect's address is too long: %zu bytes", strlen(to));
    } else if (!hub_url_may_follow(from, to, &same)) {
        fail(t, "redirected from %.*s to %.200s, which is not followed: the connection would be unencrypted",
             (int)hub_url_origin(from), from, to);
    } else {
        hub_url_may_follow(t->url, to, &same);
        t->foreign |= !same;
        mem_free(t->hop);
        t->hop = mem_strdup(to);
        t->state = WAITING;
        t->wake_ms = 0;
    }
}

/* Ends a request for a header: it is complete, or its next bytes are requested. */
static void finish_header(struct transfer *t)
{
    const int64_t end = header_end(t);
    if (t->have >= MT_MAX(end, 8))
        t->state = DONE;
    else if (t->have == t->before)
        try_again(t, 0, "the answer ended early");
    else
        t->state = WAITING, t->wake_ms = 0, t->tries = 0;
}

static void finish(struct transfer *t, CURLM *multi, CURLcode rc)
{
    const struct response *r = &t->response;
    long status = 0;
    char why[sizeof(r->code) + sizeof(r->message) + 64];
    const char *to = NULL;
    hub_curl.easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    hub_curl.easy_getinfo(t->easy, CURLINFO_REDIRECT_URL, &to);
    if (t->cut) rc = CURLE_OK;
    if (!t->failed && rc == CURLE_OK && to) {
        follow(t, to); /* before libcurl frees the address */
        drop_easy(t, multi);
        return;
    }
    drop_easy(t, multi);
    if (t->failed) return;
    const char *words = t->why[0] ? t->why : hub_curl.easy_strerror(rc);
    if (t->viewer && status >= 400) read_error(t);
    snprintf(why, sizeof(why), "HTTP %ld%s%s%s%s%s", status, status == 429 ? " (too many requests)" : "",
             r->code[0] ? " " : "", r->code, r->message[0] ? ": " : "", r->message);
    if (rc != CURLE_OK && may_pass(rc))
        try_again(t, 0, words);
    else if (rc != CURLE_OK)
        t->unreachable = true, fail(t, "%s", words);
    else if (status == 429 || status == 408 || (status >= 500 && status != 501))
        try_again(t, r->wait_s, why);
    else if (status == 403 && t->hops && !r->code[0])
        try_again(t, 0, "the signed address was refused (403)");
    else if (status == 416 && t->file)
        start_over(t, "the file is shorter than listed") ? (void)0 : try_again(t, 0, "the file is shorter than listed");
    else if (status != 200 && status != 206)
        refuse(t, status);
    else if (t->header)
        finish_header(t);
    else if (!t->file)
        t->state = DONE;
    else if (t->have < t->file->size)
        try_again(t, 0, "the answer ended early");
    else
        finish_file(t);
}

/* ---- the start of a try */

static void add_header(struct transfer *t, const char *line)
{
    t->headers = hub_curl.slist_append(t->headers, line);
    MT_REQUIRE(t->headers, "curl_slist_append: out of memory");
}

static CURLcode set_options(struct transfer *t)
{
    char range[64];
    const struct hub_curl_request request = {
        t->hop ? t->hop : t->url, t->headers, STALL_RATE, STALL_S, t->why, on_header, on_body, t};
    CURLcode rc = hub_curl_set(t->easy, &request);
#define SET(option, value) rc = rc ? rc : hub_curl.easy_setopt(t->easy, option, value)
    if (t->header) {
        snprintf(range, sizeof(range), "%lld-%lld", (long long)t->have, (long long)header_end(t) - 1);
        SET(CURLOPT_RANGE, range);
    } else if (t->have) {
        snprintf(range, sizeof(range), "%lld-", (long long)t->have);
        SET(CURLOPT_RANGE, range);
    }
    if (!t->file || t->header) SET(CURLOPT_TIMEOUT_MS, (long)hub_http_limit_ms);
    SET(CURLOPT_BUFFERSIZE, (long)CHUNK);
    SET(CURLOPT_PRIVATE, t);
#undef SET
    return rc;
}

static void send_request(struct transfer *t, CURLM *multi)
{
    const struct hub_env *env = t->repo->env;
    char line[sizeof(env->token) + 64];
    t->easy = hub_curl.easy_init();
    MT_REQUIRE(t->easy, "curl_easy_init failed");
    t->why[0] = 0;
    t->unreachable = t->cut = false;
    t->before = t->have;
    t->head = t->page = 0;
    t->response = (struct response){.wait_s = -1, .range_from = -1, .range_size = -1};
    add_header(t, "Accept-Encoding: identity"); /* no compression: sizes and hashes are those of the bytes sent */
    snprintf(line, sizeof(line), "Authorization: Bearer %s", env->token);
    if (env->token[0] && !t->foreign) add_header(t, line);
    const CURLcode rc = set_options(t);
    if (rc) {
        fail(t, "this machine's libcurl lacks an option that is needed (%s): install a newer one",
             hub_curl.easy_strerror(rc));
        return;
    }
    hub_curl.multi_add_handle(multi, t->easy);
    t->state = RUNNING;
}

/* Whether this process may download the file; otherwise it exists, another process downloads it, or the try failed. */
static bool take_file(struct transfer *t)
{
    if (t->lock < 0 && hub_cache_lock(&t->lock, t->repo, t->file, t->err)) return t->failed = true, false;
    if (hub_cache_has(t->repo, t->file)) {
        t->have = t->file->size;
        close_file(t);
        t->state = DONE;
        return false;
    }
    if (t->lock < 0) {
        t->wake_ms = clock_ms() + LOCK_WAIT_MS;
        if (!t->told) note(t, "another process downloads it: waiting");
        t->told = true;
        return false;
    }
    return t->fd >= 0 || !open_part(t);
}

static bool set_file_url(struct transfer *t)
{
    char url[URL_MAX];
    snprintf(url, URL_MAX, "%s/%s%s/resolve/%s/", t->repo->env->endpoint, t->repo->dataset ? "datasets/" : "",
             t->repo->id, t->repo->commit);
    if (!hub_url_escape(url, URL_MAX, t->file->path, true)) return fail(t, "its address is too long"), false;
    t->url = mem_strdup(url);
    return true;
}

static void start(struct transfer *t, CURLM *multi)
{
    if (t->file && !t->url && !set_file_url(t)) return;
    if (t->header && t->file->size < 8) {
        fail(t, "%lld bytes are too few for a safetensors file", (long long)t->file->size);
        return;
    }
    if (!t->file) {
        t->have = 0;
        if (t->text) t->text[0] = 0;
    } else if (!t->header && !take_file(t)) {
        return;
    } else if (t->have == t->file->size) { /* the connection broke just before the end */
        finish_file(t);
        return;
    }
    send_request(t, multi);
}

/* ---- many transfers at once */

static void release(struct transfer *t, CURLM *multi)
{
    drop_easy(t, multi);
    close_file(t);
    mem_free(t->url);
    mem_free(t->hop);
    t->url = t->hop = NULL;
}

/* The transfers that have begun and are not done, so that a pass does not go over all transfers. */
struct window {
    int64_t next;           /* the first transfer that has not begun */
    struct transfer **open; /* [n_open] */
    int64_t n_open, cap;
    int64_t have, received; /* bytes of those that are done */
};

/* Starts transfers in their order while there are slots; transfers that wait for their next try keep no slot. */
static bool fill_slots(struct window *w, struct transfer *t, int64_t n, CURLM *multi)
{
    int64_t running = 0, kept = 0;
    bool failed = false;
    for (int64_t i = 0; i < w->n_open; i++) running += w->open[i]->state == RUNNING;
    for (int64_t i = 0; (i < w->n_open || (w->next < n && running < AT_ONCE)) && !failed; i++) {
        if (i == w->n_open) {
            w->open = mem_reserve(w->open, &w->cap, w->n_open + 1, sizeof(*w->open));
            w->open[w->n_open++] = &t[w->next++];
        }
        struct transfer *one = w->open[i];
        if (one->state == WAITING && running < AT_ONCE && one->wake_ms <= clock_ms()) {
            start(one, multi);
            running += one->state == RUNNING;
        }
        failed = one->failed;
    }
    for (int64_t i = 0; i < w->n_open; i++) {
        if (w->open[i]->state != DONE) {
            w->open[kept++] = w->open[i];
            continue;
        }
        w->have += w->open[i]->have;
        w->received += w->open[i]->received;
        release(w->open[i], multi);
    }
    w->n_open = kept;
    return failed;
}

static int run_transfers(struct transfer *t, int64_t n, struct hub_progress *p)
{
    CURLM *multi = hub_curl.multi_init();
    MT_REQUIRE(multi, "curl_multi_init failed");
    struct window w = {0};
    bool failed = false;
    while ((w.n_open || w.next < n) && !failed) {
        int rest, wait_ms = 100;
        failed = fill_slots(&w, t, n, multi);
        int64_t have = w.have, received = w.received;
        for (int64_t i = 0; i < w.n_open; i++) have += w.open[i]->have, received += w.open[i]->received;
        if (p) hub_progress_show(p, t->repo->id, have, received);
        if (failed || !w.n_open) continue;
        progress(); /* the stall limit watches a transfer itself */
        hub_curl.multi_perform(multi, &rest);
        for (CURLMsg *m; !failed && (m = hub_curl.multi_info_read(multi, &rest));) {
            struct transfer *of = NULL;
            hub_curl.easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&of);
            finish(of, multi, m->data.result);
            failed = of->failed;
            wait_ms = 0; /* a slot is free */
        }
        if (!failed) hub_curl.multi_poll(multi, NULL, 0, wait_ms, NULL);
    }
    for (int64_t i = 0; i < n; i++) release(&t[i], multi);
    mem_free(w.open);
    hub_curl.multi_cleanup(multi);
    return failed ? -1 : 0;
}

char *hub_http_text(const struct hub_repo *repo, const char *path, int64_t *size, bool *unreachable, struct err *err)
{
    struct transfer t = {.repo = repo, .err = err, .lock = -1, .fd = -1};
    char url[URL_MAX];
    *unreachable = false;
    if (hub_curl_open(err) || str_format(url, URL_MAX, err, "address", "%s/%s", repo->env->endpoint, path)) return NULL;
    t.url = mem_strdup(url);
    const int rc = run_transfers(&t, 1, NULL);
    *unreachable = t.unreachable;
    *size = t.have;
    if (!rc) return t.text ? t.text : mem_alloc(1);
    mem_free(t.text);
    return NULL;
}

int hub_http_viewer(const struct hub_repo *repo, struct hub_answer *answers, int64_t n, struct err *err)
{
    static const char https[] = "https://";
    const char *endpoint = repo->env->endpoint;
    const bool own = !strncmp(endpoint, https, strlen(https));
    if (hub_curl_open(err)) return -1;
    struct transfer *t = mem_array(n, sizeof(*t));
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++) {
        char url[URL_MAX];
        rc = str_format(url, URL_MAX, err, "address", "%s%s/%s", own ? "https://datasets-server." : "",
                        own ? endpoint + strlen(https) : endpoint, answers[i].path);
        t[i] = (struct transfer){.repo = repo, .err = err, .lock = -1, .fd = -1, .viewer = true};
        if (!rc) t[i].url = mem_strdup(url);
    }
    if (!rc) rc = run_transfers(t, n, NULL);
    for (int64_t i = 0; i < n; i++) {
        answers[i].text = rc ? NULL : t[i].text ? t[i].text : mem_alloc(1);
        answers[i].size = t[i].have;
        snprintf(answers[i].commit, sizeof(answers[i].commit), "%s", t[i].response.commit);
        if (rc) mem_free(t[i].text);
        mem_free(t[i].url);
    }
    mem_free(t);
    return rc;
}

int hub_http_fetch(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, struct err *err)
{
    struct hub_progress p = {.start_ms = clock_ms()};
    char a[32], b[32];
    int64_t missing = 0;
    if (hub_curl_open(err) || hub_cache_reserve(repo, files, n, err)) return -1;
    struct transfer *t = mem_array(MT_MAX(n, 1), sizeof(*t));
    for (int64_t i = 0; i < n; i++) {
        if (hub_cache_has(repo, files[i])) continue;
        t[missing++] = (struct transfer){.repo = repo, .file = files[i], .err = err, .lock = -1, .fd = -1};
        p.total += files[i]->size;
    }
    p.last_ms = p.start_ms;
    if (missing)
        log_info("%s: downloading %lld file%s, %s, to %s", repo->id, (long long)missing, str_plural(missing),
                 str_bytes(a, p.total), repo->env->cache);
    const int rc = missing ? run_transfers(t, missing, &p) : 0;
    hub_progress_clear();
    if (!rc && missing)
        log_info("%s: %s in %s, verified", repo->id, str_bytes(a, p.total),
                 str_seconds(b, (clock_ms() - p.start_ms) / 1e3));
    mem_free(t);
    return rc;
}

int hub_http_headers(const struct hub_repo *repo, const struct hub_file *const *files, int64_t n, char **text,
                     int64_t *size, struct err *err)
{
    if (hub_curl_open(err)) return -1;
    struct transfer *t = mem_array(MT_MAX(n, 1), sizeof(*t));
    for (int64_t i = 0; i < n; i++)
        t[i] = (struct transfer){.repo = repo, .file = files[i], .err = err, .lock = -1, .fd = -1, .header = true};
    const int rc = run_transfers(t, n, NULL);
    for (int64_t i = 0; i < n; i++) {
        text[i] = rc ? NULL : t[i].text;
        size[i] = rc ? 0 : header_end(&t[i]);
        if (rc) mem_free(t[i].text);
    }
    mem_free(t);
    return rc;
}
