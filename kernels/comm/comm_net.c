/* comm_net.c - bytes between two connected ranks: a whole message by a deadline. */
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
