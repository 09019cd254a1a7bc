/* comm_net.c - bytes between connected ranks: a whole message by a deadline, and messages to and from all others at
 * once. */
#include "kernels/comm/comm_net.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- bytes */

void net_set_up(int fd)
{
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

int net_wait(int fd, short events, double deadline_ms)
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
        if (n < 0 && errno == EAGAIN && net_wait(fd, POLLOUT, deadline_ms)) return -1;
    }
    return 0;
}

int net_read(int fd, void *data, int64_t bytes, double deadline_ms)
{
    for (int64_t at = 0; at < bytes;) {
        const ssize_t n = recv(fd, (char *)data + at, (size_t)(bytes - at), 0);
        if (n > 0) at += n;
        if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) return -1;
        if (n < 0 && errno == EAGAIN && net_wait(fd, POLLIN, deadline_ms)) return -1;
    }
    return 0;
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

/* Precedes every message. */
struct head {
    char op[NET_OP];
    uint64_t call;
    int64_t bytes;
};
/* The state of one pair; header and body each way. */
struct flow {
    struct head out, in;
    int64_t sent, got, to_send, to_get; /* total bytes, headers included; 0: no message */
};

static void check_head(const struct comm *c, int p, const struct flow *f)
{
    const struct head *a = &f->out, *b = &f->in;
    MT_REQUIRE(!strncmp(a->op, b->op, NET_OP) && a->call == b->call && f->to_get == b->bytes + (int64_t)sizeof(*b),
               "rank %d is in call %llu, %.23s, of %lld bytes; rank %d in call %llu, %.23s, sends %lld",
               c->members[c->rank], (unsigned long long)a->call, a->op, (long long)(f->to_get - (int64_t)sizeof(*b)),
               c->members[p], (unsigned long long)b->call, b->op, (long long)b->bytes);
}

/* Sends and receives as much as possible without waiting; false when the peer is gone. */
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
