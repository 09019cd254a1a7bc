/* comm_exchange.c - messages to and from all other ranks of a group at once. */
#include "kernels/comm/comm_exchange.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

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

static void check_head(const struct exchange *x, int p, const struct flow *f)
{
    const struct head *a = &f->out, *b = &f->in;
    MT_REQUIRE(!strncmp(a->op, b->op, NET_OP) && a->call == b->call && f->to_get == b->bytes + (int64_t)sizeof(*b),
               "rank %d is in call %llu, %.23s, of %lld bytes; rank %d in call %llu, %.23s, sends %lld",
               x->members[x->rank], (unsigned long long)a->call, a->op, (long long)(f->to_get - (int64_t)sizeof(*b)),
               x->members[p], (unsigned long long)b->call, b->op, (long long)b->bytes);
}

/* Sends and receives as much as possible without waiting; false when the peer is gone. */
static bool move(const struct exchange *x, int p, struct flow *f, const struct exchange_part *part)
{
    const int fd = x->net->data[x->members[p]];
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
        if (first && f->got == head) check_head(x, p, f);
    }
    return true;
}

void exchange(const struct exchange *x, const struct exchange_part *parts)
{
    const int64_t head = (int64_t)sizeof(struct head);
    struct flow *flows = mem_array(x->world, sizeof(*flows));
    struct pollfd *polls = mem_array(x->world, sizeof(*polls));
    watch_enter(x->net, x->op);
    for (int p = 0; p < x->world; p++) {
        struct flow *f = &flows[p];
        const struct exchange_part *part = &parts[p];
        polls[p].fd = -1;
        snprintf(f->out.op, NET_OP, "%s", x->op);
        f->out.call = x->call;
        f->out.bytes = part->send_bytes;
        if (p == x->rank) continue;
        if (part->send_bytes >= 0) f->to_send = head + part->send_bytes;
        if (part->recv_bytes >= 0) f->to_get = head + part->recv_bytes;
    }
    for (int left = 1; left;) {
        left = 0;
        for (int p = 0; p < x->world; p++) {
            struct flow *f = &flows[p];
            if (!move(x, p, f, &parts[p])) watch_lost(x->net, x->members[p], x->op);
            const bool in = f->got < f->to_get, out = f->sent < f->to_send;
            polls[p].fd = in || out ? x->net->data[x->members[p]] : -1;
            polls[p].events = (short)((in ? POLLIN : 0) | (out ? POLLOUT : 0));
            left += in || out;
        }
        if (left) poll(polls, (nfds_t)x->world, 1000);
    }
    watch_leave(x->net);
    mem_free(polls);
    mem_free(flows);
}
