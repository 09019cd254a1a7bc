/* test_serve_http.c - the HTTP server against clients that are slow, that do not read, and that are too many. */
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/test.h"
#include "train/serve/http.h"

enum { MOST = 2, STEP_US = 20000 };

static struct here {
    struct http *http;
    int64_t port;
    atomic_bool hold;     /* GET /hold waits while hold */
    atomic_int n_holding; /* of these */
    atomic_int n_ended;   /* streams */
    char reply[4096];
} here;

static int64_t endless(void *user, char *to, int64_t most)
{
    (void)user;
    memset(to, 'x', (size_t)most);
    return most;
}

static void ended(void *user)
{
    (void)user;
    atomic_fetch_add(&here.n_ended, 1);
}

static void handle(void *user, const struct http_request *q, struct http_reply *r)
{
    (void)user;
    r->type = "text/plain";
    r->status = q->too_many ? 503 : 200;
    if (!strcmp(q->path, "/stream")) {
        r->read = endless;
        r->end = ended;
        return;
    }
    if (!q->too_many && !strcmp(q->path, "/hold")) atomic_fetch_add(&here.n_holding, 1);
    while (!q->too_many && !strcmp(q->path, "/hold") && atomic_load(&here.hold)) usleep(STEP_US);
    r->text = mem_strdup("text");
    r->size = 4;
}

static bool open_here(double wait_ms)
{
    const struct http_options opt = {
        .host = "127.0.0.1", .max_body = 1 << 20, .max_connections = MOST, .wait_ms = wait_ms, .handle = handle};
    char name[64];
    struct err err;
    if (strstr(http_version(name), "not ")) {
        printf("skip: %s\n", name);
        return false;
    }
    if (!(here.http = http_open(&opt, &here.port, &err)) || http_start(here.http, &err)) fail_msg("%s", err.msg);
    return true;
}

static int connect_here(void)
{
    const struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)here.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct timeval patience = {.tv_sec = 30};
    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

static void put(int fd, const char *text) { (void)send(fd, text, strlen(text), MSG_NOSIGNAL); }

/* The status of the reply, 0: the connection was closed without one. */
static int status(int fd)
{
    const ssize_t n = recv(fd, here.reply, sizeof(here.reply) - 1, 0);
    int code = 0;
    here.reply[MT_MAX(n, 0)] = 0;
    sscanf(here.reply, "HTTP/1.1 %d", &code);
    return code;
}

static int ask(const char *path)
{
    char text[128];
    const int fd = connect_here();
    snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", path);
    put(fd, text);
    const int code = status(fd);
    close(fd);
    return code;
}

/* Sends a byte at a time until the server has answered; returns the status, 0: no answer. */
static int drip(const char *head, const char *byte)
{
    const int fd = connect_here();
    int code = 0;
    put(fd, head);
    for (int i = 0; i < 250 && !code; i++) {
        char first;
        put(fd, byte);
        usleep(STEP_US);
        if (recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) > 0) code = status(fd);
    }
    close(fd);
    return code;
}

/* ---- tests ---- */

static void slow_requests(void **state)
{
    (void)state;
    if (!open_here(300)) return;
    assert_int_equal(drip("GET / HTTP/1.1\r\nHost: a\r\nX: ", "x"), 408);
    assert_int_equal(drip("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n", "x"), 408);
    assert_int_equal(ask("/"), 200);
    http_close(here.http);
}

static void unread_streams(void **state)
{
    (void)state;
    if (!open_here(300)) return;
    const int fd = connect_here();
    put(fd, "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
    for (int i = 0; i < 1000 && !atomic_load(&here.n_ended); i++) usleep(STEP_US);
    assert_int_equal(atomic_load(&here.n_ended), 1);
    close(fd);
    http_close(here.http);
}

/* The server keeps the connection of a slow reader whose pauses are within the time limit. */
static void slow_readers(void **state)
{
    (void)state;
    if (!open_here(1500)) return;
    const int fd = connect_here();
    atomic_store(&here.n_ended, 0);
    put(fd, "GET /stream HTTP/1.1\r\nHost: a\r\n\r\n");
    for (int i = 0; i < 30; i++) {
        static char bytes[1 << 18];
        assert_true(recv(fd, bytes, sizeof(bytes), 0) > 0);
        usleep(5 * STEP_US);
    }
    assert_int_equal(atomic_load(&here.n_ended), 0);
    close(fd);
    http_close(here.http);
}

static void too_many(void **state)
{
    (void)state;
    if (!open_here(60000)) return;
    int fd[MOST];
    atomic_store(&here.hold, true);
    for (int i = 0; i < MOST; i++) {
        fd[i] = connect_here();
        put(fd[i], "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    }
    for (int i = 0; i < 1500 && atomic_load(&here.n_holding) < MOST; i++) usleep(STEP_US);
    assert_int_equal(ask("/"), 503);
    atomic_store(&here.hold, false);
    for (int i = 0; i < MOST; i++) {
        assert_int_equal(status(fd[i]), 200);
        close(fd[i]);
    }
    assert_int_equal(ask("/"), 200);
    http_close(here.http);
}

/* The connection that waited longest without a request makes room. */
static void idle_connections(void **state)
{
    (void)state;
    if (!open_here(60000)) return;
    int fd[MOST];
    for (int i = 0; i < MOST; i++) {
        fd[i] = connect_here();
        usleep(10 * STEP_US);
    }
    usleep(1200000);
    assert_int_equal(ask("/"), 200);
    assert_int_equal(status(fd[0]), 408);
    put(fd[1], "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_int_equal(status(fd[1]), 200);
    for (int i = 0; i < MOST; i++) close(fd[i]);
    http_close(here.http);
}

int test_serve_http(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slow_requests), cmocka_unit_test(unread_streams),   cmocka_unit_test(slow_readers),
        cmocka_unit_test(too_many),      cmocka_unit_test(idle_connections),
    };
    return cmocka_run_group_tests_name("serve_http", tests, NULL, NULL);
}
