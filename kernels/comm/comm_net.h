/* comm_net.h - the connections behind kernels/comm/comm.h: a socket between any two ranks for data, and one from every
 * rank to rank 0 for the watch, the hang detector (comm_watch.c). Only for comm*.c and their tests. */
#ifndef MT_COMM_NET_H
#define MT_COMM_NET_H

#include <pthread.h>

#include "kernels/comm/comm_place.h"
#include "kernels/hash.h"

struct comm_ops; /* kernels/comm/comm.h */

enum { NET_HOST = 64, NET_OP = 24, NET_TEXT = 1024, NET_NONCE = 32 };

/* Address of a rank, in the table that rank 0 sends. */
struct net_peer {
    char host[NET_HOST], address[64]; /* name of its machine; numeric address, "": the master's */
    int32_t port, pid;
};

/* Messages of the watch; NET_BEAT: heartbeat, every second. */
enum net_kind { NET_BEAT, NET_FAIL, NET_BYE, NET_ABORT };
struct net_beat {
    int32_t kind, rank;
    int64_t step;        /* optimizer step; 0: before the first */
    uint64_t progress;   /* progress_count() */
    double waiting_s;    /* seconds in op; < 0: not in one */
    char op[NET_OP];     /* the current or last collective */
    char busy[NET_OP];   /* its current long operation; "": none */
    char text[NET_TEXT]; /* NET_FAIL, NET_ABORT */
};

struct comm_net {
    int rank, world;
    double timeout_s;
    struct net_peer *peers; /* [world] */
    int *data;              /* [world] sockets, non-blocking; -1 for this rank */

    /* the watch */
    int *line;   /* rank 0: [world], -1 for itself; others: [1], to rank 0 */
    int wake[2]; /* a pipe that wakes the thread */
    pthread_t thread;
    pthread_mutex_t lock;   /* for all fields below, and for writing to `line` */
    struct net_beat now;    /* own heartbeat; since_ms in place of waiting_s */
    double since_ms;        /* start of the current op; 0: none */
    bool stop, ended;       /* the thread should end; the process is about to exit, its cause is known */
    bool *gone;             /* [world] sent NET_BYE, or is lost */
    struct net_beat *last;  /* [world] rank 0: last heartbeat of each */
    double *last_ms;        /* [world], others [1]: time of the last heartbeat */
    double *progress_ms;    /* [world] rank 0: last time it waited in a collective or reported progress */
    struct net_beat failed; /* the first NET_FAIL, kind set */
    double failed_ms;
    const struct comm_ops *ops;
};

/* ---- comm_auth.c */

/* What a rank sends about itself when it connects to another one. */
enum net_purpose { NET_FOR_WATCH = 1, NET_FOR_DATA };
struct net_hello {
    char version[16], host[NET_HOST];
    int32_t purpose, to; /* the rank that it connects to */
    int32_t rank, world, port, pid;
};
/* Nonces, so that a signature is valid on one connection only. */
struct net_session {
    uint8_t client[NET_NONCE], server[NET_NONCE];
};

enum auth_result {
    AUTH_OK,
    AUTH_CLOSED, /* no answer, or the other side is gone */
    AUTH_WRONG,  /* not a rank of this run, or another key */
    AUTH_LOST    /* rank 0 is gone */
};
/* Mutual authentication with the rank at the other end of fd. `line`: the connection to rank 0, or -1. */
enum auth_result auth_connect(int fd, const uint8_t key[COMM_KEY], const struct net_hello *hello, int line,
                              double deadline_ms, struct net_session *s) MT_CHECK;

enum { LISTENERS = 8, GUESTS = 64 }; /* GUESTS: unauthenticated connections at once, beyond one per rank */
struct guest;
struct auth_server {
    int rank, n_listeners, n_guests, listeners[LISTENERS];
    int32_t purpose; /* enum net_purpose: of the connections expected now */
    uint8_t key[COMM_KEY];
    struct guest *guests;            /* [n_guests] */
    int64_t n_rejected, n_wrong_key; /* rejected connections; those with another key */
};
void auth_open(struct auth_server *a, int rank, int world, const uint8_t key[COMM_KEY]);
void auth_close(struct auth_server *a); /* closes the listeners too */
/* Returns the socket of the next authenticated connection, with its hello and session, or AUTH_LATE, or AUTH_RANK_LOST
 * if the watch connection of rank *lost was closed meanwhile. Other connections are rejected. */
enum { AUTH_LATE = -1, AUTH_RANK_LOST = -2 };
int auth_accept(struct auth_server *a, const struct comm_net *net, double deadline_ms, struct net_hello *hello,
                struct net_session *session, int *lost) MT_CHECK;

/* Signed messages on an authenticated connection; `word` names their type. */
int auth_write(int fd, const uint8_t key[COMM_KEY], const char *word, const struct net_session *s, const void *data,
               int64_t bytes, double deadline_ms) MT_CHECK;
int auth_read(int fd, const uint8_t key[COMM_KEY], const char *word, const struct net_session *s, void *data,
              int64_t bytes, double deadline_ms) MT_CHECK;

/* ---- comm_meet.c */
int net_open(struct comm_net *net, const struct comm_place *place, struct err *err) MT_CHECK;

/* ---- comm_net.c */
void net_close(struct comm_net *net);
/* All bytes, or -1 when the other side is gone or `deadline_ms` (clock_ms) has passed. */
int net_write(int fd, const void *data, int64_t bytes, double deadline_ms);
int net_read(int fd, void *data, int64_t bytes, double deadline_ms);
int net_wait(int fd, short events, double deadline_ms); /* 0: one of the events of poll() occurred */
void net_set_up(int fd);                                /* non-blocking, no delay, closed by exec */

/* ---- comm_watch.c */
void watch_start(struct comm_net *net);
void watch_stop(struct comm_net *net); /* all ranks have finished their last collective */
void watch_enter(struct comm_net *net,
                 const char *op);       /* a collective begins on the host, or is issued to the device */
void watch_leave(struct comm_net *net); /* that collective has ended on the host */
/* Call it when a peer is gone. The watch, which knows the cause, then ends the process; if it does not, this call ends
 * it. */
void watch_lost(struct comm_net *net, int peer, const char *what) __attribute__((noreturn));

#endif
