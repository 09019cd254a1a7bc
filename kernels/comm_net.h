/* comm_net.h - the connections under kernels/comm.h: a socket between any two ranks for data, and one from every rank
 * to rank 0 for the watch. For comm*.c alone. */
#ifndef MT_COMM_NET_H
#define MT_COMM_NET_H

#include <pthread.h>

#include "kernels/comm.h"

enum { NET_HOST = 64, NET_OP = 24, NET_TEXT = 1024 };

/* Where a rank is: the table that rank 0 hands out. */
struct net_peer {
    char host[NET_HOST], address[64]; /* its name; numeric, as the others reach it, "": at the master's */
    int32_t port, pid;
};

/* What a rank says of itself every second, and other messages of the watch. */
enum net_kind { NET_BEAT, NET_FAIL, NET_BYE, NET_ABORT };
struct net_beat {
    int32_t kind, rank;
    int64_t step;        /* of the optimizer; 0: before the first */
    uint64_t progress;   /* progress_count() */
    double waiting_s;    /* in op; < 0: not in one */
    char op[NET_OP];     /* the collective it is in, or the last one */
    char busy[NET_OP];   /* what it does that takes long; "": nothing */
    char text[NET_TEXT]; /* NET_FAIL, NET_ABORT */
};

struct comm_net {
    int rank, world;
    double timeout_s;
    struct net_peer *peers; /* [world] */
    int *data;              /* [world] sockets, non-blocking; -1 for this rank */

    /* the watch */
    int *line;   /* rank 0: [world], -1 for itself; others: [1], to rank 0 */
    int wake[2]; /* a pipe that ends the thread's sleep */
    pthread_t thread;
    pthread_mutex_t lock;  /* of all below, and of writing to `line` */
    struct net_beat now;   /* of this rank; waiting_s is kept in since_ms */
    double since_ms;       /* when the op began; 0: in none */
    bool stop, ended;      /* the thread shall end; the cause is known and the process is about to exit */
    bool *gone;            /* [world] said goodbye */
    struct net_beat *last; /* [world] rank 0: last beat of each */
    double *last_ms;       /* [world], others [1]: when it came */
    double *moved_ms; /* [world] rank 0: when it last waited in a collective, or had got on since the beat before */
    struct net_beat failed; /* the first NET_FAIL, kind set */
    double failed_ms;
    const struct comm_ops *ops;
};

/* ---- comm_net.c */
int net_open(struct comm_net *net, const struct comm_place *place, struct err *err) MT_CHECK;
void net_close(struct comm_net *net);

/* One message to and one from each of the others at once. bytes < 0: none. */
struct net_part {
    const void *send;
    void *recv;
    int64_t send_bytes, recv_bytes;
};
/* parts [c->world]; the own one is left alone. Every message carries op and c->n_calls: ranks that are not in the same
 * call end the run. Counts the call. */
void net_exchange(struct comm *c, const char *op, const struct net_part *parts);
/* All of it, or -1 when the other side is gone or `deadline_ms` (clock_ms) is past. */
int net_write(int fd, const void *data, int64_t bytes, double deadline_ms);
int net_read(int fd, void *data, int64_t bytes, double deadline_ms);

/* ---- comm_watch.c */
void watch_start(struct comm_net *net);
void watch_stop(struct comm_net *net);                  /* all ranks are past their last collective */
void watch_enter(struct comm_net *net, const char *op); /* a collective begins on the host, or is issued */
void watch_leave(struct comm_net *net);                 /* it is over on the host */
/* A peer is gone: waits for the watch, which knows more, to end the process; ends it itself when that does not. */
void watch_lost(struct comm_net *net, int peer, const char *what) __attribute__((noreturn));

#endif
