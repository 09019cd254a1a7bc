/* hub_send.c - requests with a body, one at a time. Redirects are not followed: the hub has none for these addresses,
 * and a body would be sent twice. */
#include "data/hub/hub_send.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include "data/hub/hub_curl.h"
#include "data/hub/hub_progress.h"
#include "data/hub/hub_url.h"
#include "data/json/json.h"

#define TRIES      7 /* delays: FIRST_MS, 1, 2, 4, 8, 16 s */
#define FIRST_MS   200
#define WAIT_MAX   3600                /* longest delay in seconds that the hub may ask for */
#define ANSWER_MAX ((int64_t)64 << 20) /* bytes */
#define STALL_S    120                 /* without progress; the hub checks large files before it answers */

struct one_try {
    struct hub_send *s;
    CURL *easy;
    struct curl_slist *headers;
    int64_t at, cap, wait_s;
    bool unread; /* the file ended early, or cannot be read */
    char why[CURL_ERROR_SIZE], message[256];
};

static size_t on_read(char *to, size_t one, size_t n, void *user)
{
    struct one_try *t = user;
    struct hub_send *s = t->s;
    ssize_t got = (ssize_t)MT_MIN((int64_t)(one * n), s->size - t->at);
    if (s->body)
        memcpy(to, s->body + t->at, (size_t)got);
    else if (got && (got = pread(s->fd, to, (size_t)got, s->from + t->at)) <= 0)
        return t->unread = true, (size_t)CURL_READFUNC_ABORT;
    t->at += got;
    if (s->sent) s->sent(s->user, t->at);
    return (size_t)got;
}

static size_t on_write(char *data, size_t one, size_t n, void *user)
{
    struct one_try *t = user;
    struct hub_send *s = t->s;
    const int64_t size = (int64_t)(one * n);
    if (s->n_text + size > ANSWER_MAX) return 0;
    s->text = mem_reserve(s->text, &t->cap, s->n_text + size + 1, 1);
    memcpy(s->text + s->n_text, data, (size_t)size);
    s->n_text += size;
    s->text[s->n_text] = 0;
    return (size_t)size;
}

static const char *value_of(const char *line, const char *name)
{
    const size_t n = strlen(name);
    return strncasecmp(line, name, n) || line[n] != ':' ? NULL : line + n + 1 + strspn(line + n + 1, " \t");
}

static size_t on_header(char *data, size_t one, size_t n, void *user)
{
    struct one_try *t = user;
    char line[512];
    const char *value;
    snprintf(line, sizeof(line), "%.*s", (int)MT_MIN(one * n, sizeof(line) - 1), data);
    line[strcspn(line, "\r\n")] = 0;
    if ((value = value_of(line, "etag"))) snprintf(t->s->etag, sizeof(t->s->etag), "%.255s", value);
    if ((value = value_of(line, "x-error-message"))) snprintf(t->message, sizeof(t->message), "%.255s", value);
    if ((value = value_of(line, "retry-after")) && strspn(value, "0123456789"))
        t->wait_s = MT_MIN(strtoll(value, NULL, 10), INT32_MAX);
    return one * n;
}

static void add_header(struct one_try *t, const char *name, const char *value)
{
    char line[1024];
    if (!value) return;
    snprintf(line, sizeof(line), "%s: %s", name, value);
    t->headers = hub_curl.slist_append(t->headers, line);
    MT_REQUIRE(t->headers, "curl_slist_append: out of memory");
}

static void add_headers(struct one_try *t, const struct hub_env *env)
{
    char token[sizeof(env->token) + 16];
    bool same = false;
    snprintf(token, sizeof(token), "Bearer %s", env->token);
    (void)hub_url_may_follow(env->endpoint, t->s->url, &same);
    add_header(t, "Authorization", t->s->token && same && env->token[0] ? token : NULL);
    add_header(t, "Content-Type", t->s->type ? t->s->type : "");
    add_header(t, "Accept", t->s->accept);
    add_header(t, "Expect", ""); /* no wait for "100 Continue" */
}

static CURLcode set_options(struct one_try *t)
{
    const struct hub_send *s = t->s;
    const struct hub_curl_request request = {s->url, t->headers, 1, STALL_S, t->why, on_header, on_write, t};
    CURLcode rc = hub_curl_set(t->easy, &request);
#define SET(option, value) rc = rc ? rc : hub_curl.easy_setopt(t->easy, option, value)
    if (strcmp(s->method, "GET")) {
        SET(CURLOPT_UPLOAD, 1L);
        SET(CURLOPT_CUSTOMREQUEST, s->method);
        SET(CURLOPT_INFILESIZE_LARGE, (curl_off_t)s->size);
        SET(CURLOPT_READFUNCTION, on_read);
        SET(CURLOPT_READDATA, t);
    }
#undef SET
    return rc;
}

static CURLcode perform(struct one_try *t)
{
    CURLM *multi = hub_curl.multi_init();
    CURLcode rc = CURLE_OK;
    int running = 1, rest;
    MT_REQUIRE(multi, "curl_multi_init failed");
    hub_curl.multi_add_handle(multi, t->easy);
    while (running) {
        progress();
        hub_curl.multi_perform(multi, &running);
        for (CURLMsg *m; (m = hub_curl.multi_info_read(multi, &rest));) rc = m->data.result;
        if (running) hub_curl.multi_poll(multi, NULL, 0, 100, NULL);
    }
    hub_curl.easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &t->s->status);
    hub_curl.multi_remove_handle(multi, t->easy);
    hub_curl.multi_cleanup(multi);
    return rc;
}

/* Reads the hub's reason for a refusal: a header, or {"error": ...}. */
static void read_why(struct one_try *t)
{
    struct hub_send *s = t->s;
    const char *error = "";
    struct json_doc *doc = s->text ? json_parse(s->text, s->n_text, "answer", NULL) : NULL;
    if (doc && json_opt_str(json_root(doc), "error", &error, NULL)) error = "";
    snprintf(s->why, sizeof(s->why), "%s", t->message[0] ? t->message : error);
    str_mask(s->why);
    json_free(doc);
}

/* One try. 0: an answer with s->status. 1: try again, after at least *wait_s seconds (0: the hub named none); the
 * reason is s->status from 400 on, and s->why if not empty. -1: err is set. */
static int try_once(const struct hub_env *env, struct hub_send *s, int64_t *wait_s, struct err *err)
{
    struct one_try t = {.s = s, .easy = hub_curl.easy_init()};
    MT_REQUIRE(t.easy, "curl_easy_init failed");
    mem_free(s->text);
    s->text = NULL;
    s->n_text = s->status = 0;
    s->etag[0] = s->why[0] = 0;
    add_headers(&t, env);
    CURLcode rc = set_options(&t);
    int again = 0;
    if (rc)
        again = err_set(err, "this machine's libcurl lacks an option that is needed (%s): install a newer one",
                        hub_curl.easy_strerror(rc));
    else
        rc = perform(&t);
    if (!again && t.unread) {
        again = err_set(err, "the file became shorter, or cannot be read, while it was sent");
    } else if (!again && rc) {
        snprintf(s->why, sizeof(s->why), "%s", t.why[0] ? t.why : hub_curl.easy_strerror(rc));
        again = 1;
    } else if (!again && s->status >= 400) {
        read_why(&t);
        again = s->status == 408 || s->status == 429 || (s->status >= 500 && s->status != 501);
    }
    *wait_s = t.wait_s;
    hub_curl.easy_cleanup(t.easy);
    hub_curl.slist_free_all(t.headers);
    return again;
}

int hub_send(const struct hub_env *env, struct hub_send *s, struct err *err)
{
    char http[32];
    int64_t wait_s;
    int again;
    bool same;
    if (hub_curl_open(err)) return -1;
    if (!hub_url_may_follow(env->endpoint, s->url, &same))
        return err_set(err, "%.200s is not used: the connection would be unencrypted", s->url);
    for (int n = 1; (again = try_once(env, s, &wait_s, err)) > 0; n++) {
        http[0] = 0;
        if (s->status >= 400) snprintf(http, sizeof(http), "HTTP %ld%s", s->status, s->why[0] ? ": " : "");
        if (n == TRIES) return err_set(err, "%s%s; gave up after %d tries", http, s->why, n);
        if (wait_s > WAIT_MAX)
            return err_set(err, "%s%s; the hub asks to retry in %lld minutes", http, s->why, (long long)wait_s / 60);
        const double ms = MT_MAX(1e3 * (double)wait_s, n == 1 ? FIRST_MS : 500.0 * (1 << (n - 1)));
        hub_progress_clear();
        log_info("%s%s; retrying in %.1f s", http, s->why, ms / 1e3);
        nanosleep(&(struct timespec){(time_t)(ms / 1e3), (long)((int64_t)ms % 1000 * 1000000)}, NULL);
    }
    return again;
}
