/* comm_auth.c - mutual authentication: before any data is exchanged, both ends of a connection prove that they have the
 * key of this run (struct comm_place). A rank C connects to a rank S:
 *     C -> S   magic, nonce c
 *     S -> C   magic, nonce s
 *     C -> S   hello, HMAC(key, "hello", c, s, hello)
 *     S -> C   HMAC(key, "accept", c, s, hello)
 * Both nonces are fresh, so a recorded handshake cannot be replayed. The first word of each HMAC prevents the use of
 * one side's answer as the other's; purpose and destination in the hello prevent its use at another rank. The data is
 * not encrypted: this restricts who can connect, not who can read or change packets of others.
 *
 * The server polls all its sockets at once: it closes and counts silent, slow and wrong connections, and none blocks
 * another. */
#define _GNU_SOURCE /* POLLRDHUP */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "kernels/comm/comm_net.h"

#define HANDSHAKE_MS 5000 /* time limit from connecting to the hello */
#define SHOWN        3    /* rejected connections that are logged; further ones are counted */

#define MAGIC "moetrain" /* without a NUL at its end */

/* The first message of either side. */
struct greeting {
    char magic[8];
    uint8_t nonce[NET_NONCE];
};
/* The second message of the client. */
struct proof {
    struct net_hello hello;
    uint8_t mac[HASH_MAC];
};

int comm_make_key(uint8_t key[COMM_KEY], struct err *err)
{
    if (getrandom(key, COMM_KEY, 0) == COMM_KEY) return 0;
    return err_set(err, "the system returns no random bytes: %s", strerror(errno));
}

static void mac_of(uint8_t mac[HASH_MAC], const uint8_t key[COMM_KEY], const char *word, const struct net_session *s,
                   const void *data, int64_t bytes)
{
    struct hash h;
    hash_mac_init(&h, key, COMM_KEY);
    hash_add(&h, word, (int64_t)strlen(word) + 1);
    hash_add(&h, s, (int64_t)sizeof(*s));
    hash_add(&h, data, bytes);
    hash_mac_end(&h, key, COMM_KEY, mac);
}

static bool mac_fits(const uint8_t mac[HASH_MAC], const uint8_t key[COMM_KEY], const char *word,
                     const struct net_session *s, const void *data, int64_t bytes)
{
    uint8_t own[HASH_MAC];
    mac_of(own, key, word, s, data, bytes);
    return hash_mac_equal(own, mac);
}

int auth_write(int fd, const uint8_t key[COMM_KEY], const char *word, const struct net_session *s, const void *data,
               int64_t bytes, double deadline_ms)
{
    uint8_t mac[HASH_MAC];
    mac_of(mac, key, word, s, data, bytes);
    return net_write(fd, data, bytes, deadline_ms) || net_write(fd, mac, sizeof(mac), deadline_ms) ? -1 : 0;
}

int auth_read(int fd, const uint8_t key[COMM_KEY], const char *word, const struct net_session *s, void *data,
              int64_t bytes, double deadline_ms)
{
    uint8_t mac[HASH_MAC];
    if (net_read(fd, data, bytes, deadline_ms) || net_read(fd, mac, sizeof(mac), deadline_ms)) return -1;
    return mac_fits(mac, key, word, s, data, bytes) ? 0 : -1;
}

/* ---- the client */

static int new_nonce(uint8_t nonce[NET_NONCE]) { return getrandom(nonce, NET_NONCE, 0) == NET_NONCE ? 0 : -1; }

/* Waits until fd has bytes to read. line: the connection to rank 0, or -1; AUTH_LOST if it was closed meanwhile. */
static enum auth_result wait_for_answer(int fd, int line, double deadline_ms)
{
    for (;;) {
        struct pollfd p[2] = {{.fd = fd, .events = POLLIN}, {.fd = line, .events = POLLRDHUP}};
        const double left = deadline_ms - clock_ms();
        if (left <= 0) return AUTH_CLOSED;
        if (poll(p, 2, (int)MT_MIN(left + 1, 1e6)) < 0 && errno != EINTR) return AUTH_CLOSED;
        if (p[1].revents) return AUTH_LOST;
        if (p[0].revents) return AUTH_OK;
    }
}

enum auth_result auth_connect(int fd, const uint8_t key[COMM_KEY], const struct net_hello *hello, int line,
                              double deadline_ms, struct net_session *s)
{
    struct greeting own, other;
    struct proof p = {.hello = *hello};
    uint8_t mac[HASH_MAC];
    enum auth_result rc;
    memcpy(own.magic, MAGIC, sizeof(own.magic));
    if (new_nonce(own.nonce) || net_write(fd, &own, sizeof(own), deadline_ms)) return AUTH_CLOSED;
    if ((rc = wait_for_answer(fd, line, deadline_ms))) return rc;
    if (net_read(fd, &other, sizeof(other), MT_MIN(deadline_ms, clock_ms() + HANDSHAKE_MS))) return AUTH_CLOSED;
    if (memcmp(other.magic, MAGIC, sizeof(other.magic))) return AUTH_WRONG;
    memcpy(s->client, own.nonce, NET_NONCE);
    memcpy(s->server, other.nonce, NET_NONCE);
    mac_of(p.mac, key, "hello", s, &p.hello, sizeof(p.hello));
    if (net_write(fd, &p, sizeof(p), deadline_ms)) return AUTH_WRONG;
    if ((rc = wait_for_answer(fd, line, deadline_ms))) return rc;
    if (net_read(fd, mac, sizeof(mac), MT_MIN(deadline_ms, clock_ms() + HANDSHAKE_MS))) return AUTH_WRONG;
    return mac_fits(mac, key, "accept", s, &p.hello, sizeof(p.hello)) ? AUTH_OK : AUTH_WRONG;
}

/* ---- the server */

/* A connection that is not authenticated yet. */
struct guest {
    int fd; /* -1: a free slot */
    double since_ms;
    bool greeted; /* its nonce has arrived, ours is sent */
    int64_t got;  /* bytes received of the current message */
    struct net_session session;
    union {
        struct greeting greeting;
        struct proof proof;
    } in;
};

void auth_open(struct auth_server *a, int rank, int world, const uint8_t key[COMM_KEY])
{
    *a = (struct auth_server){.rank = rank, .n_guests = world + GUESTS};
    memcpy(a->key, key, COMM_KEY);
    a->guests = mem_array(a->n_guests, sizeof(*a->guests));
    for (int i = 0; i < a->n_guests; i++) a->guests[i].fd = -1;
}

void auth_close(struct auth_server *a)
{
    for (int i = 0; i < a->n_listeners; i++) close(a->listeners[i]);
    for (int i = 0; i < a->n_guests; i++)
        if (a->guests[i].fd >= 0) close(a->guests[i].fd);
    if (a->n_rejected > SHOWN)
        log_warn("rejected %lld connections that did not come from ranks of this run", (long long)a->n_rejected);
    mem_free(a->guests);
    *a = (struct auth_server){0};
}

/* The message shows none of the bytes received. */
static void reject(struct auth_server *a, struct guest *g, const char *why)
{
    struct sockaddr_storage from;
    socklen_t size = sizeof(from);
    char host[64] = "?";
    if (!getpeername(g->fd, (struct sockaddr *)&from, &size))
        getnameinfo((struct sockaddr *)&from, size, host, sizeof(host), NULL, 0, NI_NUMERICHOST);
    if (a->n_rejected++ < SHOWN) log_warn("rejected a connection from %s: %s", host, why);
    close(g->fd);
    g->fd = -1;
}

/* A free slot; when all are used, the oldest connection is closed: ranks answer at once, other programs may not. */
static struct guest *free_slot(struct auth_server *a)
{
    struct guest *oldest = &a->guests[0];
    for (int i = 0; i < a->n_guests; i++) {
        if (a->guests[i].fd < 0) return &a->guests[i];
        if (a->guests[i].since_ms < oldest->since_ms) oldest = &a->guests[i];
    }
    reject(a, oldest, "too many silent connections at once");
    return oldest;
}

static void accept_connection(struct auth_server *a, int listener)
{
    const struct timespec moment = {.tv_nsec = 10000000};
    const int fd = accept(listener, NULL, NULL);
    if (fd >= 0) {
        net_set_up(fd);
        *free_slot(a) = (struct guest){.fd = fd, .since_ms = clock_ms()};
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        struct guest *oldest = NULL;
        for (int i = 0; i < a->n_guests; i++)
            if (a->guests[i].fd >= 0 && (!oldest || a->guests[i].since_ms < oldest->since_ms)) oldest = &a->guests[i];
        if (oldest) reject(a, oldest, "the system allows no more connections");
        nanosleep(&moment, NULL);
    }
}

/* Answers a complete greeting; returns why the connection is rejected, or NULL. */
static const char *greet(struct guest *g)
{
    struct greeting own;
    if (memcmp(g->in.greeting.magic, MAGIC, sizeof(g->in.greeting.magic))) return "it is not a rank of a run";
    memcpy(own.magic, MAGIC, sizeof(own.magic));
    memcpy(g->session.client, g->in.greeting.nonce, NET_NONCE);
    if (new_nonce(own.nonce)) return "the system returns no random bytes";
    memcpy(g->session.server, own.nonce, NET_NONCE);
    if (send(g->fd, &own, sizeof(own), MSG_NOSIGNAL) != sizeof(own)) return "it closed the connection";
    g->greeted = true;
    g->got = 0;
    return NULL;
}

static const char *check_proof(struct auth_server *a, const struct guest *g)
{
    const struct net_hello *h = &g->in.proof.hello;
    uint8_t mac[HASH_MAC];
    if (!mac_fits(g->in.proof.mac, a->key, "hello", &g->session, h, sizeof(*h))) {
        a->n_wrong_key++;
        return "it has another key than this run";
    }
    if (h->purpose != a->purpose || h->to != a->rank) return "it expects another rank";
    mac_of(mac, a->key, "accept", &g->session, h, sizeof(*h));
    return send(g->fd, mac, sizeof(mac), MSG_NOSIGNAL) == sizeof(mac) ? NULL : "it closed the connection";
}

/* Receives available bytes, never beyond a message; true: the proof is complete and valid. */
static bool receive_message(struct auth_server *a, struct guest *g)
{
    const int64_t want = g->greeted ? (int64_t)sizeof(struct proof) : (int64_t)sizeof(struct greeting);
    const ssize_t n = recv(g->fd, (char *)&g->in + g->got, (size_t)(want - g->got), 0);
    const char *why = NULL;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) why = "it closed the connection before it was authenticated";
    g->got += MT_MAX(n, 0);
    const bool complete = !why && g->got == want, authenticated = complete && g->greeted;
    if (complete) why = authenticated ? check_proof(a, g) : greet(g);
    if (why) reject(a, g, why);
    return authenticated && !why;
}

/* Order of polls[]: sockets of the watch, listeners, unauthenticated connections. */
static int fill_polls(const struct auth_server *a, const struct comm_net *net, struct pollfd *polls)
{
    int n = 0;
    for (int r = 0; r < net->world; r++) polls[n++] = (struct pollfd){.fd = net->line[r], .events = POLLRDHUP};
    for (int i = 0; i < a->n_listeners; i++) polls[n++] = (struct pollfd){.fd = a->listeners[i], .events = POLLIN};
    for (int i = 0; i < a->n_guests; i++) polls[n++] = (struct pollfd){.fd = a->guests[i].fd, .events = POLLIN};
    return n;
}

static int serve(struct auth_server *a, const struct comm_net *net, const struct pollfd *polls, struct net_hello *hello,
                 struct net_session *session, int *lost)
{
    const struct pollfd *listeners = polls + net->world, *guests = listeners + a->n_listeners;
    for (int r = 0; r < net->world; r++)
        if (polls[r].fd >= 0 && polls[r].revents) return *lost = r, AUTH_RANK_LOST;
    for (int i = 0; i < a->n_guests; i++) {
        struct guest *g = &a->guests[i];
        if (g->fd < 0 || guests[i].fd != g->fd) continue;
        if (guests[i].revents && receive_message(a, g)) {
            const int fd = g->fd;
            *hello = g->in.proof.hello;
            *session = g->session;
            g->fd = -1;
            return fd;
        }
        if (g->fd >= 0 && clock_ms() > g->since_ms + HANDSHAKE_MS) reject(a, g, "it did not authenticate in time");
    }
    for (int i = 0; i < a->n_listeners; i++)
        if (listeners[i].revents) accept_connection(a, a->listeners[i]);
    return AUTH_LATE;
}

int auth_accept(struct auth_server *a, const struct comm_net *net, double deadline_ms, struct net_hello *hello,
                struct net_session *session, int *lost)
{
    struct pollfd *polls = mem_array(net->world + a->n_listeners + a->n_guests, sizeof(*polls));
    int fd = AUTH_LATE;
    while (fd == AUTH_LATE && clock_ms() < deadline_ms) {
        const int n = fill_polls(a, net, polls);
        if (poll(polls, (nfds_t)n, (int)MT_MIN(deadline_ms - clock_ms() + 1, 500)) < 0) continue;
        fd = serve(a, net, polls, hello, session, lost);
    }
    mem_free(polls);
    if (fd >= 0) hello->version[sizeof(hello->version) - 1] = hello->host[NET_HOST - 1] = 0;
    return fd;
}
