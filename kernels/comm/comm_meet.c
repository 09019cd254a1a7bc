/* comm_meet.c - the rendezvous of the ranks.
 *
 * Rank 0 listens at the master's address. Every other rank opens a listener, connects to rank 0, and both authenticate
 * (comm_auth.c); this connection later carries heartbeats (comm_watch.c). When all ranks are connected, rank 0 sends
 * the table of addresses. Each rank then connects to all lower ranks and authenticates, for data. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "kernels/comm/comm_net.h"

#define REACH_S   30 /* time limit for a connection to a rank that is present */
#define ANSWER_S  30 /* time limit of rank 0 for the handshake, before a retry */
#define RETRY_MS  100
#define MAX_WORLD 4096

static void pause_ms(int ms)
{
    const struct timespec t = {.tv_nsec = ms * 1000000L};
    nanosleep(&t, NULL);
}

/* ---- sockets */

/* host NULL: all addresses of this machine, to listen on. */
static int resolve(const char *host, int port, struct addrinfo **out, struct err *err)
{
    char service[16];
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = host ? 0 : AI_PASSIVE};
    snprintf(service, sizeof(service), "%d", port);
    const int rc = getaddrinfo(host, service, &hints, out);
    if (!rc) return 0;
    return err_set(err, "cannot resolve the address of rank 0, %s: %s", host ? host : "any", gai_strerror(rc));
}

static int listen_at(const struct sockaddr *address, socklen_t size, int backlog, bool only_v6)
{
    const int on = 1, fd = socket(address->sa_family, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (only_v6 && address->sa_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    if (!bind(fd, address, size) && !listen(fd, backlog)) return net_set_up(fd), fd;
    const int error = errno;
    close(fd);
    errno = error;
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

/* Also for IPv4 through an IPv6 socket. */
static bool is_loopback(const struct sockaddr_storage *a)
{
    const uint8_t *v4 = (const void *)&((const struct sockaddr_in *)(const void *)a)->sin_addr;
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr;
    if (a->ss_family != AF_INET6) return v4[0] == 127;
    return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
}

/* Opens a listener for the other ranks on the local address of `fd` (a connected or listening socket), or on all
 * addresses if that is a loopback and some ranks may be on other machines (`remote`). *port: its port. */
static int listen_beside(int fd, bool remote, int backlog, int *port)
{
    struct sockaddr_storage a;
    socklen_t size = sizeof(a);
    if (getsockname(fd, (struct sockaddr *)&a, &size)) return -1;
    if (remote && is_loopback(&a)) a = (struct sockaddr_storage){.ss_family = a.ss_family}; /* any address */
    set_port(&a, 0);
    const int own = listen_at((struct sockaddr *)&a, size, backlog, false);
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
    net_set_up(fd);
    if (!connect(fd, a->ai_addr, a->ai_addrlen)) return fd;
    if (errno == EINPROGRESS && !net_wait(fd, POLLOUT, MT_MIN(deadline_ms, clock_ms() + 5000)) &&
        !getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) && !error)
        return fd;
    close(fd);
    return -1;
}

static int connect_any(const struct addrinfo *list, double deadline_ms)
{
    int fd = -1;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) fd = connect_once(a, deadline_ms);
    return fd;
}

static int lost_rank(const struct comm_net *net, int r, struct err *err)
{
    return err_set(err, "rank %d on %s (process %d) closed its connection at the start", r, net->peers[r].host,
                   net->peers[r].pid);
}

/* ---- meeting */

/* Rank 0's signed answer. If ok is set, the table of addresses follows; else text says why not. */
struct welcome {
    int32_t ok;
    char text[NET_TEXT];
};

static struct net_hello make_hello(const struct comm_place *p, enum net_purpose purpose, int to, int port)
{
    struct net_hello h = {.purpose = (int32_t)purpose,
                          .to = to,
                          .rank = p->rank,
                          .world = p->world,
                          .port = port,
                          .pid = (int32_t)getpid()};
    snprintf(h.version, sizeof(h.version), "%s", MT_VERSION);
    gethostname(h.host, sizeof(h.host) - 1);
    return h;
}

static int check_hello(const struct comm_net *net, const struct net_hello *h, struct err *err)
{
    if (memcmp(h->version, MT_VERSION, sizeof(MT_VERSION)))
        return err_set(err, "rank %d on %s runs moetrain %.15s, rank 0 %s: all ranks must run the same version",
                       h->rank, h->host, h->version, MT_VERSION);
    if (h->world != net->world)
        return err_set(err, "rank %d on %s has world size %d, rank 0 has %d: is another run using this port?", h->rank,
                       h->host, h->world, net->world);
    if (h->rank < 1 || h->rank >= net->world)
        return err_set(err, "a process on %s says it is rank %d of %d", h->host, h->rank, h->world);
    if (net->line[h->rank] >= 0)
        return err_set(err, "two processes say they are rank %d: on %s and on %s", h->rank, net->peers[h->rank].host,
                       h->host);
    return 0;
}

static void enter_peer(struct net_peer *p, const struct net_hello *h, int fd)
{
    struct sockaddr_storage a = {0};
    socklen_t size = sizeof(a);
    p->port = h->port;
    p->pid = h->pid;
    memcpy(p->host, h->host, sizeof(p->host));
    if (fd >= 0 && !getpeername(fd, (struct sockaddr *)&a, &size) && !is_loopback(&a))
        getnameinfo((struct sockaddr *)&a, size, p->address, sizeof(p->address), NULL, 0, NI_NUMERICHOST);
}

/* "; 3 connections had another key than that of PATH: ..." */
static void append_key_hint(const struct comm_place *p, const struct auth_server *a, struct err *err)
{
    struct err before = *err;
    if (!p->key_file[0]) return;
    if (a->n_wrong_key)
        err_set(err, "%s; %lld connections had another key than %s: all machines must see the same output.dir",
                before.msg, (long long)a->n_wrong_key, p->key_file);
    else
        err_set(err, "%s. All machines must see the same output.dir, which has the key of the run: %s", before.msg,
                p->key_file);
}

static double meet_s(const struct comm_place *p) { return p->meet_s > 0 ? p->meet_s : COMM_MEET_S; }

static int missing_ranks(const struct comm_net *net, const struct comm_place *p, const struct auth_server *a,
                         struct err *err)
{
    char list[256] = "";
    size_t used = 0;
    for (int r = 1; r < net->world && used < sizeof(list) - 16; r++)
        if (net->line[r] < 0) used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%d", used ? ", " : "", r);
    err_set(err, "after %.0f s these of %d ranks are missing: %s", meet_s(p), net->world, list);
    append_key_hint(p, a, err);
    return -1;
}

/* Rank 0: accepts the other ranks. One invalid hello makes the start of all ranks fail. */
static int gather_hellos(struct comm_net *net, const struct comm_place *place, struct auth_server *a,
                         struct net_session *sessions, double deadline_ms, struct err *err)
{
    for (int n = 1; n < net->world; n++) {
        struct net_hello h;
        struct net_session s;
        int lost;
        const int fd = auth_accept(a, net, deadline_ms, &h, &s, &lost);
        if (fd == AUTH_RANK_LOST) return lost_rank(net, lost, err);
        if (fd < 0) return missing_ranks(net, place, a, err);
        if (check_hello(net, &h, err)) {
            struct welcome w = {0};
            memcpy(w.text, err->msg, MT_MIN(sizeof(w.text), sizeof(err->msg)));
            if (auth_write(fd, a->key, "welcome", &s, &w, sizeof(w), clock_ms() + 1000))
                err_prefix(err, "rank %d did not receive this error", h.rank);
            close(fd);
            return -1;
        }
        net->line[h.rank] = fd;
        sessions[h.rank] = s;
        enter_peer(&net->peers[h.rank], &h, fd);
    }
    return 0;
}

/* All ranks are on this machine. */
static bool one_machine(const struct comm_place *p)
{
    struct sockaddr_storage a = {.ss_family = AF_INET}, b = {.ss_family = AF_INET6};
    if (!strcmp(p->master, "localhost")) return true;
    if (inet_pton(AF_INET, p->master, &((struct sockaddr_in *)(void *)&a)->sin_addr) == 1) return is_loopback(&a);
    return inet_pton(AF_INET6, p->master, &((struct sockaddr_in6 *)(void *)&b)->sin6_addr) == 1 && is_loopback(&b);
}

/* Listens at every address of the list that belongs to this machine. Returns 0, or the errno when there is none.
 * Without `loopback`, a loopback address is EADDRNOTAVAIL too: Debian, for example, gives a machine's own name
 * 127.0.1.1, and other machines resolve the name to another address. */
static int listen_at_all(struct auth_server *a, const struct addrinfo *list, bool loopback, int backlog)
{
    int error = EADDRNOTAVAIL;
    for (const struct addrinfo *i = list; i && a->n_listeners < LISTENERS; i = i->ai_next) {
        struct sockaddr_storage address = {0};
        memcpy(&address, i->ai_addr, MT_MIN(sizeof(address), (size_t)i->ai_addrlen));
        if (is_loopback(&address) && !loopback) return EADDRNOTAVAIL;
        const int fd = listen_at(i->ai_addr, i->ai_addrlen, backlog, true);
        if (fd >= 0)
            a->listeners[a->n_listeners++] = fd;
        else
            error = errno;
    }
    return a->n_listeners ? 0 : error;
}

/* Rank 0: listens at the addresses of the master's name, or at all addresses of this machine when none of those is both
 * local and reachable: the name is a loopback here, or belongs to a router or load balancer. */
static int listen_as_rank0(struct auth_server *a, const struct comm_place *p, struct err *err)
{
    struct addrinfo *list;
    struct err unknown;
    const int backlog = MT_MAX(p->world, 128);
    if (p->listener >= 0) {
        net_set_up(a->listeners[a->n_listeners++] = p->listener);
        return 0;
    }
    int error = EADDRNOTAVAIL;
    if (!resolve(p->master, p->port, &list, &unknown)) {
        error = listen_at_all(a, list, one_machine(p), backlog);
        freeaddrinfo(list);
    }
    if (error == EADDRNOTAVAIL) {
        for (int i = 0; i < a->n_listeners; i++) close(a->listeners[i]);
        a->n_listeners = 0;
        if (resolve(NULL, p->port, &list, err)) return -1;
        log_info(
            "MASTER_ADDR = %s is not an address of this machine that others reach: rank 0 listens at all its addresses",
            p->master);
        error = listen_at_all(a, list, true, backlog);
        freeaddrinfo(list);
    }
    if (!error) return 0;
    return err_set(err, "rank 0 cannot listen at %s, port %d (%s): choose another MASTER_PORT", p->master, p->port,
                   strerror(error));
}

static int meet_as_rank0(struct comm_net *net, const struct comm_place *place, struct auth_server *a, struct err *err)
{
    const double deadline = clock_ms() + 1e3 * meet_s(place);
    const struct net_hello h = make_hello(place, NET_FOR_WATCH, 0, place->port);
    struct welcome w = {.ok = 1};
    if (listen_as_rank0(a, place, err)) return -1;
    struct net_session *sessions = mem_array(net->world, sizeof(*sessions));
    enter_peer(&net->peers[0], &h, -1);
    if (gather_hellos(net, place, a, sessions, deadline, err)) {
        w.ok = 0;
        memcpy(w.text, err->msg, sizeof(w.text));
    }
    for (int r = 1; r < net->world; r++) {
        if (net->line[r] < 0) continue;
        int rc = auth_write(net->line[r], a->key, "welcome", &sessions[r], &w, sizeof(w), deadline);
        if (!rc && w.ok)
            rc = auth_write(net->line[r], a->key, "table", &sessions[r], net->peers,
                            net->world * (int64_t)sizeof(*net->peers), deadline);
        if (rc && w.ok) lost_rank(net, r, err);
        if (rc) w.ok = 0;
    }
    mem_free(sessions);
    return w.ok ? 0 : -1;
}

/* The error for a rank that could not reach rank 0. */
static int unreachable_error(const struct comm_place *p, bool wrong, const struct err *key_err, struct err *err)
{
    if (key_err->msg[0]) return err_set(err, "%s", key_err->msg);
    if (!wrong)
        return err_set(err, "rank %d cannot reach rank 0: no answer at %s, port %d", p->rank, p->master, p->port);
    return err_set(err,
                   "rank %d cannot reach rank 0: the process at %s, port %d has another key than this rank%s%s: all "
                   "machines must see the same output.dir, and concurrent runs need different MASTER_PORTs",
                   p->rank, p->master, p->port, p->key_file[0] ? ", " : "", p->key_file);
}

/* The authenticated connection to rank 0, and the listener for data; -1 on failure. */
static int connect_rank0(struct auth_server *a, const struct comm_place *place, double deadline_ms,
                         struct net_session *session, struct err *err)
{
    struct addrinfo *list;
    enum auth_result rc = AUTH_CLOSED;
    struct err key_err;
    bool wrong = false;
    int fd = -1, port = 0;
    if (resolve(place->master, place->port, &list, err)) return -1;
    for (;;) {
        key_err.msg[0] = 0;
        const bool have = !place->read_key || !place->read_key(place, a->key, &key_err);
        if (have && (fd = connect_any(list, deadline_ms)) >= 0) {
            if (!a->n_listeners) {
                const int own = listen_beside(fd, !one_machine(place), place->world, &port);
                if (own < 0) break;
                a->listeners[a->n_listeners++] = own;
            }
            const struct net_hello h = make_hello(place, NET_FOR_WATCH, 0, port);
            rc = auth_connect(fd, a->key, &h, -1, MT_MIN(deadline_ms, clock_ms() + 1e3 * ANSWER_S), session);
            if (!rc) break;
            wrong |= rc == AUTH_WRONG;
            close(fd);
            fd = -1;
        }
        if (clock_ms() > deadline_ms) break;
        pause_ms(RETRY_MS);
    }
    freeaddrinfo(list);
    if (fd >= 0 && !rc) return fd;
    if (fd < 0) return unreachable_error(place, wrong, &key_err, err);
    close(fd);
    return err_set(err, "rank %d cannot open a port for data: %s", place->rank, strerror(errno));
}

static int meet_as_other(struct comm_net *net, const struct comm_place *place, struct auth_server *a, struct err *err)
{
    const double deadline = clock_ms() + 1e3 * meet_s(place);
    struct net_session s;
    struct welcome w;
    const int fd = connect_rank0(a, place, deadline, &s, err);
    if (fd < 0) return -1;
    net->line[0] = fd;
    if (auth_read(fd, a->key, "welcome", &s, &w, sizeof(w), deadline + 1e4))
        return err_set(err, "rank 0 at %s, port %d closed its connection at the start", place->master, place->port);
    if (!w.ok) return err_set(err, "%.*s", NET_TEXT - 1, w.text);
    if (auth_read(fd, a->key, "table", &s, net->peers, net->world * (int64_t)sizeof(*net->peers), deadline + 1e4))
        return err_set(err, "rank 0 at %s, port %d closed its connection at the start", place->master, place->port);
    for (int r = 0; r < net->world; r++)
        net->peers[r].host[NET_HOST - 1] = net->peers[r].address[sizeof(net->peers[r].address) - 1] = 0;
    return 0;
}

/* ---- data */

static int reach_peer(struct comm_net *net, const struct comm_place *place, const struct auth_server *a, int r,
                      double deadline_ms, struct err *err)
{
    const struct net_peer *p = &net->peers[r];
    const char *address = p->address[0] ? p->address : place->master;
    const struct net_hello h = make_hello(place, NET_FOR_DATA, r, p->port);
    const double give_up = clock_ms() + 1e3 * REACH_S;
    enum auth_result rc = AUTH_CLOSED;
    struct addrinfo *list;
    struct net_session s;
    if (resolve(address, p->port, &list, err)) return -1;
    for (;;) {
        const int fd = net->data[r] = connect_any(list, give_up);
        if (fd >= 0) rc = auth_connect(fd, a->key, &h, net->line[0], deadline_ms, &s);
        if ((fd >= 0 && !rc) || rc == AUTH_LOST || clock_ms() > give_up) break;
        if (fd >= 0) close(fd);
        pause_ms(RETRY_MS);
    }
    freeaddrinfo(list);
    if (rc == AUTH_LOST) return lost_rank(net, 0, err);
    if (net->data[r] >= 0 && !rc) return 0;
    return err_set(err,
                   "rank %d on %s cannot reach rank %d on %s at %s, port %d: MASTER_ADDR must be an address that all "
                   "machines reach, without a firewall between them",
                   net->rank, net->peers[net->rank].host, r, p->host, address, p->port);
}

/* Connects to lower ranks, then accepts higher ones. */
static int connect_all(struct comm_net *net, const struct comm_place *place, struct auth_server *a, struct err *err)
{
    const double deadline = clock_ms() + 1e3 * meet_s(place);
    a->purpose = NET_FOR_DATA;
    for (int r = 0; r < net->rank; r++)
        if (reach_peer(net, place, a, r, deadline, err)) return -1;
    for (int n = net->rank + 1; n < net->world;) {
        struct net_hello h;
        struct net_session s;
        int lost;
        const int fd = auth_accept(a, net, deadline, &h, &s, &lost);
        if (fd == AUTH_RANK_LOST) return lost_rank(net, lost, err);
        if (fd < 0) return err_set(err, "rank %d received no connection from some higher ranks", net->rank);
        if (h.rank <= net->rank || h.rank >= net->world || net->data[h.rank] >= 0) {
            close(fd);
            continue;
        }
        net->data[h.rank] = fd;
        n++;
    }
    return 0;
}

int net_open(struct comm_net *net, const struct comm_place *place, struct err *err)
{
    const int n = place->world;
    struct auth_server a;
    if (n > MAX_WORLD || place->rank < 0 || place->rank >= n)
        return err_set(err, "rank %d of %d: at most %d ranks", place->rank, n, MAX_WORLD);
    *net = (struct comm_net){.rank = place->rank, .world = n, .timeout_s = place->timeout_s, .wake = {-1, -1}};
    net->peers = mem_array(n, sizeof(*net->peers));
    net->data = mem_array(n, sizeof(*net->data));
    net->line = mem_array(n, sizeof(*net->line));
    for (int r = 0; r < n; r++) net->data[r] = net->line[r] = -1;
    auth_open(&a, place->rank, n, place->key);
    a.purpose = NET_FOR_WATCH;
    int rc = place->rank ? meet_as_other(net, place, &a, err) : meet_as_rank0(net, place, &a, err);
    if (!rc) rc = connect_all(net, place, &a, err);
    auth_close(&a);
    return rc;
}
