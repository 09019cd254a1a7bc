/* http.h - an HTTP server: requests as memory, replies as memory or as a stream. Each connection has a thread. */
#ifndef MT_SERVE_HTTP_H
#define MT_SERVE_HTTP_H

#include "kernels/base.h"

struct http_peer; /* the client of a request */
/* The client has closed its connection, or its end of it. */
bool http_peer_gone(const struct http_peer *peer);

struct http_request {
    const char *method, *path;                        /* path without the query */
    const char *authorization, *type, *origin, *host; /* headers; NULL: absent */
    const char *body;                                 /* NUL-terminated */
    int64_t size;
    bool too_large; /* the body is over max_body and was not kept */
    bool too_many;  /* max_connections other requests are being answered: answer only a request that needs no work,
                       others get an error */
    const struct http_peer *peer;
};

/* A text, or with `read` a stream. */
struct http_reply {
    int status;
    const char *type; /* Content-Type, static */
    char *text;       /* mem_free frees it */
    int64_t size;
    int64_t (*read)(void *user, char *to, int64_t most); /* waits for the next bytes; 0: the end, -1: cut off */
    void (*end)(void *user);                             /* always called once, also when the client is gone */
    void *user;
};

struct http_options {
    const char *host;
    int64_t port;                      /* 0: any that is free */
    int64_t max_body, max_connections; /* max_connections: requests that are answered at once; the same number of
                                          further connections get an error */
    double wait_ms;                    /* for a request, or for a client to read; see clients.h */
    void (*handle)(void *user, const struct http_request *q, struct http_reply *r); /* in the connection's thread */
    void *user;
};

struct http;
/* Opens the port but does not answer yet, so that errors are found before a model is loaded. *port: its number. */
struct http *http_open(const struct http_options *opt, int64_t *port, struct err *err);
int http_start(struct http *h, struct err *err) MT_CHECK;
void http_close(struct http *h); /* waits for the replies that are being sent; NULL is fine */
/* "libmicrohttpd 0.9.75", or that it is not there. */
const char *http_version(char name[64]);

#endif
