/* clients.c - see clients.h. */
#include "train/serve/clients.h"

#include <math.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>

enum {
    CLIENT_RATE = 8192, /* bytes/s that a client must send and read, beside wait_ms */
    YOUNG_MS = 1000,    /* a connection so young is not closed for another */
    WATCH_MS = 250
};

struct client {
    struct clients *of;
    int fd;
    double since,
        late; /* since: clock_ms at which the server began to wait for a request; late: the deadline, INFINITY: none */
    bool reads, counts; /* reads: the server waits for a request; counts: the client is one of n_answered */
    bool ended;
    struct client *next, *before;
};

struct clients {
    struct clients_options opt;
    pthread_mutex_t lock;
    pthread_cond_t closed;
    pthread_t watcher;
    struct client *first;
    int64_t n, n_answered; /* n: without those that ended */
    bool closing;
};

/* Shuts the socket down, which ends the wait of the connection's thread for this socket. The mutex is locked. */
static void end_connection(struct client *k)
{
    static const char text[] = "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    if (k->reads) (void)send(k->fd, text, sizeof(text) - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)shutdown(k->fd, SHUT_RDWR);
    k->late = INFINITY;
    k->ended = true;
    k->of->n--;
}

/* Ends connections until there are at most `most`, including `more` new ones. The mutex is locked. */
static void make_room(struct clients *c, int64_t more)
{
    const double now = clock_ms();
    for (struct client *slowest = c->first; slowest && c->n + more > c->opt.most;) {
        slowest = NULL;
        for (struct client *k = c->first; k; k = k->next)
            if (k->reads && !k->ended && now - k->since > YOUNG_MS && (!slowest || k->since < slowest->since))
                slowest = k;
        if (slowest) end_connection(slowest);
    }
}

static void *watch(void *user)
{
    struct clients *c = user;
    pthread_mutex_lock(&c->lock);
    while (!c->closing) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += WATCH_MS * 1000000L;
        if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
        pthread_cond_timedwait(&c->closed, &c->lock, &until);
        const double now = clock_ms();
        for (struct client *k = c->first; k; k = k->next)
            if (now > k->late && !k->ended) end_connection(k);
        make_room(c, 0);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

struct clients *clients_open(const struct clients_options *opt, struct err *err)
{
    struct clients *c = mem_array(1, sizeof(*c));
    *c = (struct clients){.opt = *opt};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->closed, NULL);
    if (!pthread_create(&c->watcher, NULL, watch, c)) return c;
    err_set(err, "a thread cannot be started");
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->closed);
    mem_free(c);
    return NULL;
}

void clients_close(struct clients *c)
{
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    c->closing = true;
    pthread_cond_signal(&c->closed);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->watcher, NULL);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->closed);
    mem_free(c);
}

struct client *clients_enter(struct clients *c, int fd)
{
    struct client *k = mem_array(1, sizeof(*k));
    const double now = clock_ms();
    *k = (struct client){.of = c, .fd = fd, .since = now, .late = now + c->opt.wait_ms, .reads = true};
    pthread_mutex_lock(&c->lock);
    make_room(c, 1);
    k->next = c->first;
    if (c->first) c->first->before = k;
    c->first = k;
    c->n++;
    pthread_mutex_unlock(&c->lock);
    return k;
}

void clients_leave(struct client *k)
{
    struct clients *c = k->of;
    pthread_mutex_lock(&c->lock);
    if (k->next) k->next->before = k->before;
    if (k->before)
        k->before->next = k->next;
    else
        c->first = k->next;
    c->n -= !k->ended;
    c->n_answered -= k->counts;
    pthread_mutex_unlock(&c->lock);
    mem_free(k);
}

void client_sent(struct client *k, int64_t bytes)
{
    pthread_mutex_lock(&k->of->lock);
    k->late += 1e3 * (double)bytes / CLIENT_RATE;
    pthread_mutex_unlock(&k->of->lock);
}

bool client_begin(struct client *k)
{
    struct clients *c = k->of;
    pthread_mutex_lock(&c->lock);
    k->counts = c->n_answered < c->opt.most;
    c->n_answered += k->counts;
    k->reads = false;
    k->late = INFINITY;
    pthread_mutex_unlock(&c->lock);
    return k->counts;
}

void client_must_read(struct client *k, int64_t bytes, bool stream)
{
    const double wait = k->of->opt.wait_ms * (stream ? 0.25 : 1) + 1e3 * (double)bytes / CLIENT_RATE;
    pthread_mutex_lock(&k->of->lock);
    k->late = bytes ? clock_ms() + wait : (double)INFINITY;
    pthread_mutex_unlock(&k->of->lock);
}

void client_end(struct client *k)
{
    struct clients *c = k->of;
    pthread_mutex_lock(&c->lock);
    c->n_answered -= k->counts;
    k->counts = false;
    k->reads = true;
    k->since = clock_ms();
    k->late = k->since + c->opt.wait_ms;
    pthread_mutex_unlock(&c->lock);
}
