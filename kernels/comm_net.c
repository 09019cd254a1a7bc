/* comm_net.c - how ranks meet, and bytes between them.
 *
 * Rank 0 listens at the master's address. Every other rank opens a listener of its own, connects to rank 0 and says who
 * it is; this connection stays for the watch. When all are there, rank 0 hands out the table of addresses and a key,
 * and each rank connects to those below it for data. Nothing is believed that does not carry the key or fit the table.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include "kernels/comm_net.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MEET_S    120 /* for all ranks to come */
#define REACH_S   30  /* for a connection to one that has come */
#define RETRY_MS  100
#define MAX_WORLD 4096

static const char magic[8] = "moetrain";

/* ---- bytes */

static int wait_for(int fd, short events, double deadline_ms)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = events};
        const double left = deadline_ms - clock_ms();
        if (left <= 0) return -1;
        const int n = poll(&p, 1, (int)MT_MIN(left + 1, 1e6));
        if (n > 0) return 0;
        if (n < 0 && errno != EINTR) return -1;
    }
}

int net_write(int fd, const void *data, int64_t bytes, double deadline_ms)
{
    for (int64_t at = 0; at < bytes;) {
        const ssize_t n = send(fd, (const char *)data + at, (size_t)(bytes - at), MSG_NOSIGNAL);
        if (n > 0) at += n;
        if (n < 0 && errno != EINTR && errno != EAGAIN) return -1;
        if (n < 0 && errno == EAGAIN && wait_for(fd, POLLOUT, deadline_ms)) return -1;
    }
    return 0;
}

int net_read(int fd, void *data, int64_t bytes, double deadline_ms)
{
    for (int64_t at = 0; at < bytes;) {
        const ssize_t n = recv(fd, (char *)data + at, (size_t)(bytes - at), 0);
        if (n > 0) at += n;
        if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return -1;
        if (n < 0 && errno == EAGAIN && wait_for(fd, POLLIN, deadline_ms)) return -1;
    }
    return 0;
}

static void pause_ms(int ms)
{
    const struct timespec t = {.tv_nsec = ms * 1000000L};
    nanosleep(&t, NULL);
}

/* ---- sockets */

static void set_up(int fd)
{
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

static int resolve(const char *host, int port, bool passive, struct addrinfo **out, struct err *err)
{
    char service[16];
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = passive ? AI_PASSIVE : 0};
    snprintf(service, sizeof(service), "%d", port);
    const int rc = getaddrinfo(host, service, &hints, out);
    if (!rc) return 0;
    return err_set(err, "the address of rank 0, %s, is not known here: %s", host ? host : "any", gai_strerror(rc));
}

static int listen_at(const struct sockaddr *address, socklen_t size, int backlog)
{
    const int on = 1, fd = socket(address->sa_family, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (!bind(fd, address, size) && !listen(fd, backlog)) return set_up(fd), fd;
    close(fd);
    return -1;
}

static int port_of(const struct sockaddr_storage *a)
{
    return ntohs(a->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)(const void *)a)->sin6_port
                                          : ((const struct sockaddr_in *)(const void *)a)->sin_port);
}

static void set_port(struct sockaddr_storage *a, int port)
{
    if (a->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)a)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)(void *)a)->sin_port = htons((uint16_t)port);
}

/* Also of IPv4 through an IPv6 socket. */
static bool is_loopback(const struct sockaddr_storage *a)
{
    const uint8_t *v4 = (const void *)&((const struct sockaddr_in *)(const void *)a)->sin_addr;
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr;
    if (a->ss_family != AF_INET6) return v4[0] == 127;
    return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
}

/* A listener for the other ranks on the address that `fd` is connected from (or listens at); its port. `abroad`: some
 * may come from other machines, and on all addresses when `fd` is of none that they could reach. */
static int listen_beside(int fd, bool abroad, int backlog, int *port)
{
    struct sockaddr_storage a;
    socklen_t size = sizeof(a);
    if (getsockname(fd, (struct sockaddr *)&a, &size)) return -1;
    if (abroad && is_loopback(&a)) a = (struct sockaddr_storage){.ss_family = a.ss_family}; /* any address */
    set_port(&a, 0);
    const int own = listen_at((struct sockaddr *)&a, size, backlog);
    size = sizeof(a);
    if (own < 0 || getsockname(own, (struct sockaddr *)&a, &size)) return -1;
    *port = port_of(&a);
    return own;
}

static int connect_once(const struct addrinfo *a, double deadline_ms)
{
    int error = 0;
    socklen_t size = sizeof(error);
    const int fd = socket(a->ai_family, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    set_up(fd);
    if (!connect(fd, a->ai_addr, a->ai_addrlen)) return fd;
    if (errno == EINPROGRESS && !wait_for(fd, POLLOUT, MT_MIN(deadline_ms, clock_ms() + 5000)) &&
        !getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) && !error)
        return fd;
    close(fd);
    return -1;
}

/* Tries until somebody is there. */
static int connect_to(const char *host, int port, double deadline_ms, struct err *err)
{
    struct addrinfo *list;
    if (resolve(host, port, false, &list, err)) return -1;
    int fd = -1;
    for (;;) {
        for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) fd = connect_once(a, deadline_ms);
        if (fd >= 0 || clock_ms() > deadline_ms) break;
        pause_ms(RETRY_MS);
    }
    freeaddrinfo(list);
    if (fd < 0) err_set(err, "nobody answers at %s, port %d", host, port);
    return fd;
}

/* The next connection; LATE, or LOST and in *lost the rank whose connection for the watch was closed meanwhile. */
enum { LATE = -1, LOST = -2 };
static int accept_one(const struct comm_net *net, int listener, double deadline_ms, int *lost)
{
    struct pollfd *polls = mem_array(net->world + 1, sizeof(*polls));
    int fd = LATE;
    while (fd == LATE && clock_ms() < deadline_ms) {
        for (int r = 0; r < net->world; r++) polls[r] = (struct pollfd){.fd = net->line[r], .events = POLLRDHUP};
        polls[net->world] = (struct pollfd){.fd = listener, .events = POLLIN};
        if (poll(polls, (nfds_t)net->world + 1, 1000) <= 0) continue;
        for (int r = 0; r < net->world; r++)
            if (polls[r].fd >= 0 && polls[r].revents) *lost = r, fd = LOST;
        if (fd == LOST || !polls[net->world].revents) continue;
        const int new = accept(listener, NULL, NULL);
        if (new >= 0) set_up(fd = new);
    }
    mem_free(polls);
    return fd;
}

static int lost_rank(const struct comm_net *net, int r, struct err *err)
{
    return err_set(err, "rank %d on %s (process %d) went away at the start", r, net->peers[r].host, net->peers[r].pid);
}

/* ---- meeting */

struct hello {
    char magic[8], version[16];
    int32_t rank, world, port, pid;
    char host[NET_HOST];
};
/* Rank 0's answer; with ok the table follows. */
struct welcome {
    int32_t ok;
    uint64_t key;
    char text[NET_TEXT];
};
/* Of a connection for data. */
struct token {
    uint64_t key;
    int32_t rank;
};

static struct hello make_hello(const struct comm_place *p, int port)
{
    struct hello h = {.rank = p->rank, .world = p->world, .port = port, .pid = (int32_t)getpid()};
    memcpy(h.magic, magic, sizeof(magic));
    snprintf(h.version, sizeof(h.version), "%s", MT_VERSION);
    gethostname(h.host, sizeof(h.host) - 1);
    return h;
}

static int check_hello(const struct comm_net *net, const struct hello *h, struct err *err)
{
    if (memcmp(h->version, MT_VERSION, sizeof(MT_VERSION)))
        return err_set(err, "rank %d on %s runs moetrain %.15s, rank 0 %s: all ranks must run the same program",
                       h->rank, h->host, h->version, MT_VERSION);
    if (h->world != net->world)
        return err_set(err, "rank %d on %s is one of %d ranks, rank 0 of %d: is another run using this port?", h->rank,
                       h->host, h->world, net->world);
    if (h->rank < 1 || h->rank >= net->world)
        return err_set(err, "a process on %s says it is rank %d of %d", h->host, h->rank, h->world);
    if (net->line[h->rank] >= 0)
        return err_set(err, "two processes say they are rank %d: on %s and on %s", h->rank, net->peers[h->rank].host,
                       h->host);
    return 0;
}

static void enter_peer(struct net_peer *p, const struct hello *h, int fd)
{
    struct sockaddr_storage a = {0};
    socklen_t size = sizeof(a);
    p->port = h->port;
    p->pid = h->pid;
    memcpy(p->host, h->host, sizeof(p->host));
    if (fd >= 0 && !getpeername(fd, (struct sockaddr *)&a, &size) && !is_loopback(&a))
        getnameinfo((struct sockaddr *)&a, size, p->address, sizeof(p->address), NULL, 0, NI_NUMERICHOST);
}

static int missing_ranks(const struct comm_net *net, struct err *err)
{
    char list[256] = "";
    size_t used = 0;
    for (int r = 1; r < net->world && used < sizeof(list) - 16; r++)
        if (net->line[r] < 0) used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%d", used ? ", " : "", r);
    return err_set(err, "after %d s these of %d ranks have not come: %s", MEET_S, net->world, list);
}

/* Rank 0: takes the others in. A stranger is turned away; a rank that does not fit ends the start of all. */
static int gather_hellos(struct comm_net *net, int listener, double deadline_ms, struct err *err)
{
    for (int n = 1; n < net->world;) {
        struct hello h;
        int lost;
        const int fd = accept_one(net, listener, deadline_ms, &lost);
        if (fd < 0) return fd == LOST ? lost_rank(net, lost, err) : missing_ranks(net, err);
        if (net_read(fd, &h, sizeof(h), clock_ms() + 5000) || memcmp(h.magic, magic, sizeof(magic))) {
            close(fd);
            continue;
        }
        h.host[NET_HOST - 1] = h.version[15] = 0;
        if (check_hello(net, &h, err)) {
            struct welcome w = {0};
            memcpy(w.text, err->msg, MT_MIN(sizeof(w.text), sizeof(err->msg)));
            net_write(fd, &w, sizeof(w), clock_ms() + 1000);
            close(fd);
            return -1;
        }
        net->line[h.rank] = fd;
        enter_peer(&net->peers[h.rank], &h, fd);
        n++;
    }
    return 0;
}

static uint64_t make_key(void)
{
    uint64_t key = rng_u64((uint64_t)getpid(), (uint64_t)(clock_ms() * 1e6));
    const int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, &key, sizeof(key)) != sizeof(key)) key++;
        close(fd);
    }
    return key;
}

/* No rank is on another machine. */
static bool all_here(const struct comm_place *p)
{
    return !strcmp(p->master, "127.0.0.1") || !strcmp(p->master, "localhost");
}

static int first_listener(const struct comm_place *p, struct err *err)
{
    if (p->listener >= 0) return set_up(p->listener), p->listener;
    struct addrinfo *list;
    if (resolve(all_here(p) ? p->master : NULL, p->port, true, &list, err)) return -1;
    int fd = -1;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) fd = listen_at(a->ai_addr, a->ai_addrlen, 128);
    freeaddrinfo(list);
    if (fd < 0)
        err_set(err, "rank 0 cannot listen at port %d (%s): choose another MASTER_PORT", p->port, strerror(errno));
    return fd;
}

/* Both return the listener for data connections and the key, or -1. */
static int meet_as_first(struct comm_net *net, const struct comm_place *place, uint64_t *key, struct err *err)
{
    const double deadline = clock_ms() + 1e3 * MEET_S;
    struct welcome w = {.ok = 1, .key = make_key()};
    int port = 0, own = -1;
    const int listener = first_listener(place, err);
    if (listener < 0) return -1;
    if (gather_hellos(net, listener, deadline, err)) {
        w.ok = 0;
        memcpy(w.text, err->msg, sizeof(w.text));
    } else if ((own = listen_beside(listener, !all_here(place), net->world, &port)) < 0) {
        err_set(err, "rank 0 gets no port for data: %s", strerror(errno));
        w.ok = 0;
    }
    close(listener);
    const struct hello h = make_hello(place, port);
    enter_peer(&net->peers[0], &h, -1);
    for (int r = 1; r < net->world; r++) {
        if (net->line[r] < 0) continue;
        int rc = net_write(net->line[r], &w, sizeof(w), deadline);
        if (!rc && w.ok) rc = net_write(net->line[r], net->peers, net->world * (int64_t)sizeof(*net->peers), deadline);
        if (rc && w.ok) err_set(err, "rank %d on %s went away at the start", r, net->peers[r].host);
        if (rc) w.ok = 0;
    }
    *key = w.key;
    if (w.ok) return own;
    if (own >= 0) close(own);
    return -1;
}

static int meet_as_other(struct comm_net *net, const struct comm_place *place, uint64_t *key, struct err *err)
{
    const double deadline = clock_ms() + 1e3 * MEET_S;
    const int fd = connect_to(place->master, place->port, deadline, err);
    struct welcome w;
    int port;
    if (fd < 0) return err_prefix(err, "rank %d does not find rank 0", place->rank);
    net->line[0] = fd;
    const int own = listen_beside(fd, !all_here(place), net->world, &port);
    if (own < 0) return err_set(err, "rank %d gets no port for data: %s", place->rank, strerror(errno));
    const struct hello h = make_hello(place, port);
    int rc = 0;
    if (net_write(fd, &h, sizeof(h), deadline) || net_read(fd, &w, sizeof(w), deadline + 1e4))
        rc = err_set(err, "rank 0 at %s, port %d went away at the start", place->master, place->port);
    else if (!w.ok)
        rc = err_set(err, "%.*s", NET_TEXT - 1, w.text);
    else if (net_read(fd, net->peers, net->world * (int64_t)sizeof(*net->peers), deadline + 1e4))
        rc = err_set(err, "rank 0 at %s, port %d went away at the start", place->master, place->port);
    for (int r = 0; r < net->world; r++)
        net->peers[r].host[NET_HOST - 1] = net->peers[r].address[sizeof(net->peers[r].address) - 1] = 0;
    *key = w.key;
    if (!rc) return own;
    close(own);
    return -1;
}

/* Data: to those below, then from those above. */
static int connect_all(struct comm_net *net, const struct comm_place *place, int listener, uint64_t key,
                       struct err *err)
{
    const double deadline = clock_ms() + 1e3 * MEET_S;
    const struct token own = {.key = key, .rank = net->rank};
    for (int r = 0; r < net->rank; r++) {
        const struct net_peer *p = &net->peers[r];
        const char *address = p->address[0] ? p->address : place->master;
        net->data[r] = connect_to(address, p->port, clock_ms() + 1e3 * REACH_S, err);
        if (net->data[r] < 0 || net_write(net->data[r], &own, sizeof(own), deadline))
            return err_set(err,
                           "rank %d on %s does not reach rank %d on %s at %s, port %d: MASTER_ADDR must be an address "
                           "that all machines reach, and no firewall between them",
                           net->rank, net->peers[net->rank].host, r, p->host, address, p->port);
    }
    for (int n = net->rank + 1; n < net->world;) {
        struct token t;
        int lost;
        const int fd = accept_one(net, listener, deadline, &lost);
        if (fd == LOST) return lost_rank(net, lost, err);
        if (fd < 0) return err_set(err, "rank %d waits in vain for connections from higher ranks", net->rank);
        if (net_read(fd, &t, sizeof(t), clock_ms() + 5000) || t.key != key || t.rank <= net->rank ||
            t.rank >= net->world || net->data[t.rank] >= 0) {
            close(fd);
            continue;
        }
        net->data[t.rank] = fd;
        n++;
    }
    return 0;
}

int net_open(struct comm_net *net, const struct comm_place *place, struct err *err)
{
    const int n = place->world;
    uint64_t key;
    if (n > MAX_WORLD || place->rank < 0 || place->rank >= n)
        return err_set(err, "rank %d of %d: at most %d ranks", place->rank, n, MAX_WORLD);
    *net = (struct comm_net){.rank = place->rank, .world = n, .timeout_s = place->timeout_s, .wake = {-1, -1}};
    net->peers = mem_array(n, sizeof(*net->peers));
    net->data = mem_array(n, sizeof(*net->data));
    net->line = mem_array(n, sizeof(*net->line));
    for (int r = 0; r < n; r++) net->data[r] = net->line[r] = -1;
    const int listener = place->rank ? meet_as_other(net, place, &key, err) : meet_as_first(net, place, &key, err);
    if (listener < 0) return -1;
    const int rc = connect_all(net, place, listener, key, err);
    close(listener);
    return rc;
}

void net_close(struct comm_net *net)
{
    for (int r = 0; net->data && r < net->world; r++) {
        if (net->data[r] >= 0) close(net->data[r]);
        if (net->line[r] >= 0) close(net->line[r]);
    }
    mem_free(net->peers);
    mem_free(net->data);
    mem_free(net->line);
    *net = (struct comm_net){0};
}

/* ---- exchange */

/* Before every message. */
struct head {
    char op[NET_OP];
    uint64_t call;
    int64_t bytes;
};
/* The state of one pair; head and body each way. */
struct flow {
    struct head out, in;
    int64_t sent, got, to_send, to_get; /* bytes, heads included; 0 in all: none */
};

static void check_head(const struct comm *c, int p, const struct flow *f)
{
    const struct head *a = &f->out, *b = &f->in;
    MT_REQUIRE(!strncmp(a->op, b->op, NET_OP) && a->call == b->call && f->to_get == b->bytes + (int64_t)sizeof(*b),
               "rank %d is in call %llu, %.23s, of %lld bytes; rank %d in call %llu, %.23s, sends %lld",
               c->members[c->rank], (unsigned long long)a->call, a->op, (long long)(f->to_get - (int64_t)sizeof(*b)),
               c->members[p], (unsigned long long)b->call, b->op, (long long)b->bytes);
}

/* Sends and receives what goes now; false when the peer is gone. */
static bool move(const struct comm *c, int p, struct flow *f, const struct net_part *part)
{
    const int fd = c->net->data[c->members[p]];
    const int64_t head = (int64_t)sizeof(struct head);
    while (f->sent < f->to_send) {
        const bool first = f->sent < head;
        const char *from = first ? (const char *)&f->out + f->sent : (const char *)part->send + (f->sent - head);
        const ssize_t n = send(fd, from, (size_t)((first ? head : f->to_send) - f->sent), MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0 && errno != EINTR) return false;
        f->sent += MT_MAX(n, 0);
    }
    while (f->got < f->to_get) {
        const bool first = f->got < head;
        char *to = first ? (char *)&f->in + f->got : (char *)part->recv + (f->got - head);
        const ssize_t n = recv(fd, to, (size_t)((first ? head : f->to_get) - f->got), 0);
        if (n < 0 && errno == EAGAIN) break;
        if (n == 0 || (n < 0 && errno != EINTR)) return false;
        f->got += MT_MAX(n, 0);
        if (first && f->got == head) check_head(c, p, f);
    }
    return true;
}

void net_exchange(struct comm *c, const char *op, const struct net_part *parts)
{
    const int64_t head = (int64_t)sizeof(struct head);
    struct flow *flows = mem_array(c->world, sizeof(*flows));
    struct pollfd *polls = mem_array(c->world, sizeof(*polls));
    watch_enter(c->net, op);
    c->n_calls++;
    for (int p = 0; p < c->world; p++) {
        struct flow *f = &flows[p];
        const struct net_part *part = &parts[p];
        polls[p].fd = -1;
        snprintf(f->out.op, NET_OP, "%s", op);
        f->out.call = c->n_calls;
        f->out.bytes = part->send_bytes;
        if (p == c->rank) continue;
        if (part->send_bytes >= 0) f->to_send = head + part->send_bytes;
        if (part->recv_bytes >= 0) f->to_get = head + part->recv_bytes;
    }
    for (int left = 1; left;) {
        left = 0;
        for (int p = 0; p < c->world; p++) {
            struct flow *f = &flows[p];
            if (!move(c, p, f, &parts[p])) watch_lost(c->net, c->members[p], op);
            const bool in = f->got < f->to_get, out = f->sent < f->to_send;
            polls[p].fd = in || out ? c->net->data[c->members[p]] : -1;
            polls[p].events = (short)((in ? POLLIN : 0) | (out ? POLLOUT : 0));
            left += in || out;
        }
        if (left) poll(polls, (nfds_t)c->world, 1000);
    }
    watch_leave(c->net);
    mem_free(polls);
    mem_free(flows);
}
