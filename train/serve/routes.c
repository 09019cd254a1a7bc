/* routes.c - see routes.h. */
#include "train/serve/routes.h"

#include <string.h>
#include <strings.h>

#include "train/serve/api_reply.h"
#include "train/serve/api_stream.h"
#include "train/serve/page.h"

static void reply_text(struct http_reply *r, int status, struct text_buf *text)
{
    r->status = status;
    r->text = text->text;
    r->size = text->size;
    mem_free(text->spans);
    *text = (struct text_buf){0};
}

static void reply_error(struct http_reply *r, const struct api_error *e)
{
    struct text_buf out = {0};
    api_put_error(&out, e);
    reply_text(r, e->status, &out);
}

/* ---- who asks ---- */

/* Compares in a time that does not depend on where the keys differ. */
static bool same_key(const char *a, const char *b)
{
    const size_t na = strlen(a), nb = strlen(b);
    unsigned differ = na != nb;
    for (size_t i = 0; i < na; i++) differ |= (unsigned char)a[i] ^ (unsigned char)b[nb ? i % nb : 0];
    return !differ;
}

/* Without its port. */
static bool is_here(const struct routes *s, const char *host)
{
    static const char *const local[] = {"127.0.0.1", "localhost", "[::1]"};
    const char *colon = strrchr(host, ':'), *bracket = strrchr(host, ']');
    const size_t n = colon && (!bracket || colon > bracket) ? (size_t)(colon - host) : strlen(host);
    for (int i = 0; i < MT_LEN(local); i++)
        if (n == strlen(local[i]) && !strncasecmp(host, local[i], n)) return true;
    return n == strlen(s->host) && !strncasecmp(host, s->host, n);
}

/* Whether a web page of another host sent the request; such pages must not use a server without a key. The request has
 * the page's origin, or after DNS rebinding (the page's name now has this server's address) the page's name as host. */
static bool from_elsewhere(const struct routes *s, const struct http_request *q)
{
    const char *at = q->origin ? strstr(q->origin, "://") : NULL;
    if (s->key) return false;
    if (q->host && !is_here(s, q->host)) return true;
    return q->origin && (!at || !q->host || strcasecmp(at + 3, q->host) != 0);
}

static int check(const struct routes *s, const struct http_request *q, struct api_error *e)
{
    static const char bearer[] = "Bearer ";
    const char *given = q->authorization;
    *e = (struct api_error){.status = 401};
    if (s->key && (!given || strncasecmp(given, bearer, sizeof(bearer) - 1) != 0 ||
                   !same_key(given + sizeof(bearer) - 1, s->key)))
        return err_set(&e->why, given ? "wrong API key" : "this server needs an API key: Authorization: Bearer KEY");
    e->status = 403;
    if (from_elsewhere(s, q))
        return err_set(&e->why, "a page or name of another host: start the server with --api-key to allow it");
    e->status = 503;
    if (q->too_many) return err_set(&e->why, "as many requests are answered as --connections allows: try again later");
    e->status = 413;
    if (q->too_large) return err_set(&e->why, "the body is over %lld bytes (--max-body-mb)", (long long)s->max_body);
    return 0;
}

/* ---- replies ---- */

static void put_page(struct routes *s, const struct http_request *q, struct http_reply *r)
{
    struct text_buf out = {0};
    (void)s, (void)q;
    text_put_bytes(&out, page_html, page_size);
    r->type = "text/html; charset=utf-8";
    reply_text(r, 200, &out);
}

static void put_health(struct routes *s, const struct http_request *q, struct http_reply *r)
{
    struct text_buf out = {0};
    (void)s, (void)q;
    text_put(&out, "{\"status\": \"ok\"}");
    reply_text(r, 200, &out);
}

static void list_models(struct routes *s, const struct http_request *q, struct http_reply *r)
{
    (void)q;
    struct text_buf out = {0};
    struct models *m = s->api.models;
    text_put(&out, "{\"object\": \"list\", \"data\": [");
    jobs_lock(s->api.jobs);
    (void)models_find(m, "/"); /* looks for new adapters, because no model has this name */
    for (int64_t i = 0; i < m->n; i++) {
        if (!models_has(m->items[i])) continue;
        text_put_comma(&out);
        text_put(&out, "{\"id\": ");
        api_put_text(&out, m->items[i]->name, (int64_t)strlen(m->items[i]->name));
        text_put(&out, ", \"object\": \"model\"");
        api_put_i64(&out, "created", m->items[i]->created);
        text_put(&out, ", \"owned_by\": \"moetrain\"");
        text_put_key(&out, "parent");
        if (i)
            api_put_text(&out, m->items[0]->name, (int64_t)strlen(m->items[0]->name));
        else
            text_put(&out, "null");
        api_put_i64(&out, "max_model_len", s->api.context);
        text_put(&out, "}");
    }
    jobs_unlock(s->api.jobs);
    text_put(&out, "]}");
    reply_text(r, 200, &out);
}

/* Waits until the job is in `state` or its client is gone. Returns the job's status; 0: no error. */
static int wait_for(struct routes *s, struct job *job, enum job_state state, struct api_error *e)
{
    struct jobs *jobs = s->api.jobs;
    bool gone = false;
    jobs_lock(jobs);
    while (job->state < state && !gone) {
        job_wait(jobs, job, job->n_call);
        gone = http_peer_gone(job->peer);
    }
    *e = (struct api_error){.status = gone ? 503 : job->status, .why = job->err};
    if (gone) err_set(&e->why, "the client is gone");
    jobs_unlock(jobs);
    return e->status;
}

static void complete(struct routes *s, const struct http_request *q, struct http_reply *r, bool chat)
{
    struct job *job = job_new();
    struct api_form form;
    struct api_error e;
    int rc = api_request_read(job, &form, &s->api, chat, q->body, q->size, &e);
    job->peer = q->peer;
    if (!rc && (rc = jobs_add(s->api.jobs, job, &e.why))) e.status = rc;
    if (rc) {
        job_free(job);
    } else if ((rc = wait_for(s, job, form.stream ? JOB_RUNS : JOB_DONE, &e))) {
        job_leave(s->api.jobs, job);
    } else if (form.stream) {
        r->status = 200;
        r->type = "text/event-stream; charset=utf-8";
        r->user = api_stream_open(&s->api, job, &form);
        r->read = api_stream_read;
        r->end = api_stream_end;
        return;
    } else {
        struct text_buf out = {0};
        api_reply_put(&out, &s->api, &form, job);
        job_leave(s->api.jobs, job);
        reply_text(r, 200, &out);
    }
    if (rc) reply_error(r, &e);
    api_form_free(&form);
}

static void complete_chat(struct routes *s, const struct http_request *q, struct http_reply *r)
{
    complete(s, q, r, true);
}

static void complete_text(struct routes *s, const struct http_request *q, struct http_reply *r)
{
    complete(s, q, r, false);
}

void routes_handle(void *user, const struct http_request *q, struct http_reply *r)
{
    static const struct {
        const char *method, *path;
        void (*reply)(struct routes *s, const struct http_request *q, struct http_reply *r);
        bool open; /* answered without a key and also when the server is busy; the page asks for the key itself */
    } rows[] = {{"GET", "/", put_page, true},
                {"GET", "/health", put_health, true},
                {"GET", "/v1/models", list_models, false},
                {"POST", "/v1/chat/completions", complete_chat, false},
                {"POST", "/v1/completions", complete_text, false}};
    struct routes *s = user;
    struct api_error e;
    bool known = false;
    int64_t at = 0;
    for (; at < MT_LEN(rows); at++) {
        const bool same = !strcmp(q->path, rows[at].path);
        known |= same;
        if (same && !strcmp(q->method, rows[at].method)) break;
    }
    const bool found = at < MT_LEN(rows);
    if (!(found && rows[at].open) && check(s, q, &e)) {
        reply_error(r, &e);
    } else if (found) {
        rows[at].reply(s, q, r);
    } else {
        e = (struct api_error){.status = known ? 405 : 404};
        err_set(&e.why, known ? "%s %.200s: another method" : "%s %.200s: there is no such path", q->method, q->path);
        reply_error(r, &e);
    }
}
