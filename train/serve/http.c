/* http.c - see http.h. libmicrohttpd is loaded when a server opens, so that the program also runs without it. Each
 * connection has a thread, so that a handler may wait. clients.c limits the time of connections, because the timeouts
 * of libmicrohttpd begin again with each byte. */
#define _GNU_SOURCE /* POLLRDHUP */
#include "train/serve/http.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <microhttpd.h>

#include "train/serve/clients.h"

enum {
    HEADER_BYTES = 1 << 16, /* of a request's line and headers */
    STACK_BYTES = 1 << 20,
    BLOCK_BYTES = 1 << 14, /* of a stream */
    SEND_BYTES = 1 << 16,  /* bytes of a reply that the system buffers while its client does not read */
    SPARE = 64,            /* connections beyond twice the limit */
    DISCARD =
        8 /* a body that is too large is read up to this multiple of the limit, so that its client reads the error */
};

/* The functions in use; mhd.start_daemon is MHD_start_daemon. */
#define MHD_CALLS(X)                                                                                                   \
    X(start_daemon)                                                                                                    \
    X(stop_daemon)                                                                                                     \
    X(lookup_connection_value)                                                                                         \
    X(queue_response)                                                                                                  \
    X(create_response_from_buffer)                                                                                     \
    X(create_response_from_callback)                                                                                   \
    X(add_response_header)                                                                                             \
    X(destroy_response)                                                                                                \
    X(get_connection_info)                                                                                             \
    X(get_version)
#define MHD_POINTER(name) __typeof__(&(MHD_##name)) name;
static struct {
    MHD_CALLS(MHD_POINTER)
} mhd;

struct http {
    struct http_options opt;
    struct MHD_Daemon *daemon;
    struct clients *clients;
    int listener;
};

struct http_peer {
    int fd;
};

/* A request while it is read and answered. */
struct exchange {
    const struct http *server;
    struct MHD_Connection *connection;
    struct client *client;
    struct http_peer peer;
    char *body;
    int64_t size, cap, seen; /* seen: bytes that arrived */
};

/* A reply that is streamed. */
struct stream {
    struct client *client;
    struct http_reply reply;
};

static int load(struct err *err)
{
#define X(name) {"MHD_" #name, &mhd.name},
    static const struct library_call calls[] = {MHD_CALLS(X)};
#undef X
    static const char *const names[] = {"libmicrohttpd.so.12", "libmicrohttpd.so"};
    void *library = library_open(names, MT_LEN(names));
    if (!library)
        return err_set(err, "serve needs libmicrohttpd, which is not installed: apt-get install libmicrohttpd12 "
                            "(libmicrohttpd12t64 on newer systems)");
    return library_find(library, "libmicrohttpd", calls, MT_LEN(calls), err);
}

const char *http_version(char name[64])
{
    struct err err;
    if (load(&err))
        snprintf(name, 64, "libmicrohttpd: not installed");
    else
        snprintf(name, 64, "libmicrohttpd %.40s", mhd.get_version());
    return name;
}

bool http_peer_gone(const struct http_peer *peer)
{
    struct pollfd p = {.fd = peer->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL);
}

/* ---- replies ---- */

static ssize_t read_stream(void *user, uint64_t at, char *to, size_t most)
{
    struct stream *s = user;
    (void)at;
    client_must_read(s->client, 0, true);
    const int64_t n = s->reply.read(s->reply.user, to, (int64_t)most);
    client_must_read(s->client, MT_MAX(n, 1), true);
    return n > 0 ? (ssize_t)n : n ? MHD_CONTENT_READER_END_WITH_ERROR : MHD_CONTENT_READER_END_OF_STREAM;
}

static void end_stream(void *user)
{
    struct stream *s = user;
    s->reply.end(s->reply.user);
    mem_free(s);
}

static enum MHD_Result send_reply(const struct exchange *x, struct http_reply *r)
{
    struct MHD_Response *response;
    if (r->read) {
        struct stream *s = mem_array(1, sizeof(*s));
        *s = (struct stream){x->client, *r};
        response = mhd.create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK_BYTES, read_stream, s, end_stream);
        if (!response) end_stream(s);
    } else {
        response = mhd.create_response_from_buffer((size_t)r->size, r->text, MHD_RESPMEM_MUST_COPY);
        mem_free(r->text);
    }
    if (!response) return MHD_NO;
    mhd.add_response_header(response, "Content-Type", r->type);
    mhd.add_response_header(response, "Cache-Control", "no-store");
    mhd.add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (r->status == 401) mhd.add_response_header(response, "WWW-Authenticate", "Bearer");
    if (r->status == 429 || r->status == 503) mhd.add_response_header(response, "Retry-After", "1");
    const enum MHD_Result rc = mhd.queue_response(x->connection, (unsigned)r->status, response);
    mhd.destroy_response(response);
    return rc;
}

/* ---- requests ---- */

static const char *header(const struct exchange *x, const char *name)
{
    return mhd.lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

static enum MHD_Result answer(struct exchange *x, const char *path, const char *method)
{
    const struct http_options *opt = &x->server->opt;
    const struct http_request q = {.method = method,
                                   .path = path,
                                   .authorization = header(x, "Authorization"),
                                   .type = header(x, "Content-Type"),
                                   .origin = header(x, "Origin"),
                                   .host = header(x, "Host"),
                                   .body = x->body ? x->body : "",
                                   .size = x->size,
                                   .too_large = x->seen > opt->max_body,
                                   .too_many = !client_begin(x->client),
                                   .peer = &x->peer};
    struct http_reply r = {.status = 500, .type = "application/json"};
    opt->handle(opt->user, &q, &r);
    client_must_read(x->client, MT_MAX(r.size, 1), false);
    return send_reply(x, &r);
}

static enum MHD_Result begin(const struct http *h, struct MHD_Connection *c, void **state)
{
    struct exchange *x = mem_array(1, sizeof(*x));
    *x = (struct exchange){
        .server = h,
        .connection = c,
        .client = mhd.get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context,
        .peer.fd = mhd.get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
    };
    *state = x;
    const char *length = header(x, "Content-Length");
    return !length || strtod(length, NULL) <= (double)DISCARD * (double)h->opt.max_body ? MHD_YES : MHD_NO;
}

static enum MHD_Result take_body(struct exchange *x, const char *data, size_t *size)
{
    const int64_t n = (int64_t)*size, max = x->server->opt.max_body;
    x->seen += n;
    if (x->seen > DISCARD * max) return MHD_NO;
    client_sent(x->client, n);
    if (x->seen <= max) {
        x->body = mem_reserve(x->body, &x->cap, x->size + n + 1, 1);
        memcpy(x->body + x->size, data, (size_t)n);
        x->size += n;
        x->body[x->size] = 0;
    }
    *size = 0;
    return MHD_YES;
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *c, const char *path, const char *method,
                                  const char *version, const char *data, size_t *size, void **state)
{
    (void)version;
    if (!*state) return begin(user, c, state);
    return *size ? take_body(*state, data, size) : answer(*state, path, method);
}

static void on_end(void *user, struct MHD_Connection *c, void **state, enum MHD_RequestTerminationCode why)
{
    struct exchange *x = *state;
    (void)user, (void)c, (void)why;
    if (x) client_end(x->client);
    if (x) mem_free(x->body);
    mem_free(x);
    *state = NULL;
}

static void on_connection(void *user, struct MHD_Connection *c, void **context,
                          enum MHD_ConnectionNotificationCode what)
{
    struct http *h = user;
    const int bytes = SEND_BYTES;
    if (what == MHD_CONNECTION_NOTIFY_CLOSED) {
        if (*context) clients_leave(*context);
        *context = NULL;
        return;
    }
    const int fd = mhd.get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    *context = clients_enter(h->clients, fd);
}

/* ---- opening ---- */

static int bind_to(const struct addrinfo *a)
{
    const int one = 1, fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (!bind(fd, a->ai_addr, a->ai_addrlen)) return fd;
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int open_listener(struct http *h, int64_t *port, struct err *err)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found;
    struct sockaddr_storage bound;
    socklen_t size = sizeof(bound);
    char name[16], service[16] = "0";
    snprintf(name, sizeof(name), "%lld", (long long)h->opt.port);
    const int rc = getaddrinfo(h->opt.host, name, &hints, &found);
    if (rc) return err_set(err, "--host %s: %s", h->opt.host, gai_strerror(rc));
    for (const struct addrinfo *a = found; a && h->listener < 0; a = a->ai_next) h->listener = bind_to(a);
    freeaddrinfo(found);
    if (h->listener < 0)
        return err_set(err, "cannot listen on %s, port %lld: %s%s", h->opt.host, (long long)h->opt.port,
                       strerror(errno), errno == EADDRINUSE ? ": choose another --port" : "");
    if (!getsockname(h->listener, (struct sockaddr *)&bound, &size))
        (void)getnameinfo((struct sockaddr *)&bound, size, NULL, 0, service, sizeof(service), NI_NUMERICSERV);
    *port = atoi(service);
    return 0;
}

struct http *http_open(const struct http_options *opt, int64_t *port, struct err *err)
{
    if (load(err)) return NULL;
    struct http *h = mem_array(1, sizeof(*h));
    *h = (struct http){.opt = *opt, .listener = -1};
    if (!open_listener(h, port, err)) return h;
    http_close(h);
    return NULL;
}

int http_start(struct http *h, struct err *err)
{
    if (listen(h->listener, SOMAXCONN))
        return err_set(err, "cannot listen on port %lld: %s", (long long)h->opt.port, strerror(errno));
    const struct clients_options limits = {.most = h->opt.max_connections, .wait_ms = h->opt.wait_ms};
    if (!(h->clients = clients_open(&limits, err))) return -1;
    h->daemon =
        mhd.start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL, 0, NULL, NULL,
                         on_request, h, MHD_OPTION_LISTEN_SOCKET, h->listener, MHD_OPTION_NOTIFY_COMPLETED, on_end,
                         NULL, MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_CONNECTION_LIMIT,
                         (unsigned)(2 * h->opt.max_connections + SPARE), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                         (size_t)HEADER_BYTES, MHD_OPTION_THREAD_STACK_SIZE, (size_t)STACK_BYTES, MHD_OPTION_END);
    return h->daemon ? 0 : err_set(err, "libmicrohttpd cannot start: are there too many threads or open files?");
}

void http_close(struct http *h)
{
    if (!h) return;
    if (h->daemon)
        mhd.stop_daemon(h->daemon); /* closes the listener too */
    else if (h->listener >= 0)
        close(h->listener);
    clients_close(h->clients);
    mem_free(h);
}
