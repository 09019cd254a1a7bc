/* comm_watch.c - the hang detector: a thread of every rank that notices a rank that died, stopped or does not take part
 * in a collective, and ends the run.
 *
 * Once a second each rank sends rank 0 a heartbeat with its step, its collective and the time in it; rank 0 answers
 * with its own. A closed connection means that the process died; silence means a stopped process or a lost machine.
 * When a collective takes longer than the timeout, the cause is a rank that has not entered it and made no progress
 * (base.h) for as long. Rank 0 decides, prints the cause and sends it to all ranks, and every process exits. A rank
 * that loses rank 0 decides for itself. */
#include "kernels/comm/comm_net.h"

#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/comm/comm.h"
#include "kernels/memory.h"

#define TICK_MS        250
#define BEAT_MS        1000
#define SILENT_MS      20000 /* silence that ends the run; at most the timeout, but at least five heartbeats */
#define CAUSE_MS       5000  /* time for the watch, which knows the cause, to end a process that lost a peer */
#define GRACE_MS       500   /* wait after another rank's error, as rank 0 may find the same error */
#define EXIT_S         10    /* for the device to end its work */
#define PAUSE_MS       5000  /* a gap this long between two checks: this process itself was stopped */
#define STALL_TIMEOUTS 4     /* number of timeouts without progress of any rank, while no rank waits in a collective */

enum { WRITE_MS = 2000, READ_MS = 2000 };

/* ---- the end of the run */

static void sleep_ms(long ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

/* Call with the lock held. */
static void send_abort(struct comm_net *net, const char *text)
{
    struct net_beat b = {.kind = NET_ABORT, .rank = net->rank};
    snprintf(b.text, sizeof(b.text), "%s", text);
    for (int r = 1; r < net->world; r++)
        if (!net->gone[r]) net_write(net->line[r], &b, sizeof(b), clock_ms() + 100);
}

static __attribute__((noreturn)) void end_process(const struct comm_net *net)
{
    signal(SIGALRM, SIG_DFL);
    alarm(EXIT_S); /* ends the process if anything below hangs */
    fflush(stdout);
    if (net->ops) net->ops->abort();
    _exit(1);
}

/* Ends the run with this cause. print: no other rank will print it. */
static void end_run(struct comm_net *net, const char *text, bool print)
{
    pthread_mutex_lock(&net->lock);
    const bool first = !net->ended && !net->stop;
    if (first) net->ended = true;
    /* on a terminal the line of the last step is not ended yet */
    if (first && print && net->rank == 0)
        fprintf(stderr, "%smoetrain: error: %s\n", isatty(STDOUT_FILENO) ? "\n" : "", text);
    if (first && print && net->rank != 0) fprintf(stderr, "moetrain: rank %d: error: %s\n", net->rank, text);
    if (first && net->rank == 0) send_abort(net, text);
    pthread_mutex_unlock(&net->lock);
    if (first) end_process(net);
}

/* "rank 2 on HOST (process 4711)" */
static const char *name(const struct comm_net *net, int r, char text[128])
{
    snprintf(text, 128, "rank %d on %s (process %d)", r, net->peers[r].host, net->peers[r].pid);
    return text;
}

/* ", at step 17, its last operation all_reduce" */
static const char *where(const struct net_beat *b, char text[128])
{
    int n =
        snprintf(text, 128, ", at step %lld, its last operation %.23s", (long long)b->step, b->op[0] ? b->op : "none");
    if (b->busy[0]) snprintf(text + n, 128 - (size_t)n, ", while %.23s", b->busy);
    return text;
}

/* ---- decisions of rank 0 */

static double silent_ms(const struct comm_net *net)
{
    return MT_MIN(SILENT_MS, MT_MAX(net->timeout_s * 1e3, 5 * BEAT_MS));
}

static void end_for_silence(struct comm_net *net, int r, bool closed)
{
    char text[NET_TEXT], who[128], at[128];
    where(&net->last[r], at);
    if (closed)
        snprintf(text, sizeof(text), "%s died%s", name(net, r, who), at);
    else
        snprintf(text, sizeof(text), "%s has not answered for %d s%s: it was stopped, or its machine is gone",
                 name(net, r, who), (int)(silent_ms(net) / 1e3), at);
    end_run(net, text, true);
    net->gone[r] = true; /* this run has already ended */
}

/* Checks the last heartbeats of all ranks: has one waited longer than the timeout, and for which rank? */
static void check_waiting(struct comm_net *net)
{
    const struct net_beat *last = net->last;
    int waits = 0, least = 0, idle = 0, moved = 0; /* longest, shortest wait; longest, shortest time without progress */
    char text[NET_TEXT], who[128], at[128];
    for (int r = 1; r < net->world; r++) {
        if (last[r].waiting_s > last[waits].waiting_s) waits = r;
        if (last[r].waiting_s < last[least].waiting_s) least = r;
        if (net->progress_ms[r] < net->progress_ms[idle]) idle = r;
        if (net->progress_ms[r] > net->progress_ms[moved]) moved = r;
    }
    const double idle_s = (clock_ms() - net->progress_ms[idle]) / 1e3,
                 all_s = (clock_ms() - net->progress_ms[moved]) / 1e3;
    name(net, idle, who);
    where(&last[idle], at);
    if (last[waits].waiting_s >= net->timeout_s && idle_s >= net->timeout_s)
        snprintf(text, sizeof(text), "rank %d has waited in %.23s for %.0f s (parallel.timeout_s) for %s%s", waits,
                 last[waits].op, last[waits].waiting_s, who, at);
    else if (last[least].waiting_s >= net->timeout_s)
        snprintf(
            text, sizeof(text),
            "all ranks have waited for %.0f s (parallel.timeout_s) in %.23s, at step %lld: the network or a GPU does "
            "not answer",
            last[least].waiting_s, last[least].op, (long long)last[least].step);
    else if (all_s >= STALL_TIMEOUTS * net->timeout_s)
        snprintf(text, sizeof(text), "no rank has made progress for %.0f s (%d x parallel.timeout_s), the first: %s%s",
                 all_s, STALL_TIMEOUTS, who, at);
    else
        return;
    end_run(net, text, true);
}

static void check_failure(struct comm_net *net)
{
    char text[NET_TEXT + 32];
    if (net->failed.kind != NET_FAIL || clock_ms() < net->failed_ms + GRACE_MS) return;
    snprintf(text, sizeof(text), "rank %d: %s", net->failed.rank, net->failed.text);
    end_run(net, text, true);
}

/* ---- heartbeats */

/* Call with the lock held. */
static struct net_beat own_beat(struct comm_net *net)
{
    struct net_beat b = net->now;
    const double host_s = b.waiting_s >= 0 ? (clock_ms() - net->since_ms) / 1e3 : -1;
    b.kind = NET_BEAT;
    b.rank = net->rank;
    b.progress = progress_count();
    b.waiting_s = net->ops ? fmax(host_s, net->ops->waiting_s()) : host_s;
    if (net->ops && net->ops->failed(b.text)) b.kind = NET_FAIL;
    return b;
}

/* Records the message; a failure only the first time. */
static void record_message(struct comm_net *net, int r, const struct net_beat *b)
{
    net->last_ms[r] = clock_ms();
    switch (b->kind) {
    case NET_BEAT:
        if (b->waiting_s >= 0 || b->progress != net->last[r].progress) net->progress_ms[r] = clock_ms();
        net->last[r] = *b;
        break;
    case NET_BYE: net->gone[r] = true; break;
    case NET_FAIL:
        if (net->failed.kind == NET_FAIL) break;
        net->failed = *b;
        net->failed_ms = clock_ms();
        break;
    case NET_ABORT: end_run(net, b->text, false); break;
    default: break;
    }
}

static void send_beats(struct comm_net *net, double *next_ms)
{
    if (clock_ms() < *next_ms) return;
    *next_ms = clock_ms() + BEAT_MS;
    pthread_mutex_lock(&net->lock);
    const struct net_beat b = own_beat(net);
    if (net->rank == 0) {
        for (int r = 1; r < net->world; r++)
            if (!net->gone[r]) net_write(net->line[r], &b, sizeof(b), clock_ms() + WRITE_MS);
    } else {
        net_write(net->line[0], &b, sizeof(b), clock_ms() + WRITE_MS);
    }
    pthread_mutex_unlock(&net->lock);
    if (net->rank == 0) record_message(net, 0, &b);
}

static void read_line(struct comm_net *net, int r)
{
    struct net_beat b;
    if (net_read(net->line[r], &b, sizeof(b), clock_ms() + READ_MS)) {
        end_for_silence(net, r, true);
        return;
    }
    b.op[NET_OP - 1] = b.busy[NET_OP - 1] = b.text[NET_TEXT - 1] = 0;
    b.rank = r;
    record_message(net, r, &b);
}

static bool all_gone(const struct comm_net *net)
{
    for (int r = 0; r < net->world; r++)
        if (r != net->rank && net->line[r] >= 0 && !net->gone[r]) return false;
    return true;
}

/* The thread may end. Rank 0 first waits for NET_BYE of all others. */
static bool may_end(struct comm_net *net)
{
    pthread_mutex_lock(&net->lock);
    const bool stop = net->stop;
    pthread_mutex_unlock(&net->lock);
    return stop && (net->rank != 0 || all_gone(net));
}

/* This process was stopped for ms: excludes that time from all timeouts. */
static void exclude_pause(struct comm_net *net, double ms)
{
    pthread_mutex_lock(&net->lock);
    net->since_ms += ms;
    pthread_mutex_unlock(&net->lock);
    for (int r = 0; r < net->world; r++) {
        net->last_ms[r] += ms;
        net->progress_ms[r] += ms;
    }
}

static void *watch(void *arg)
{
    struct comm_net *net = arg;
    struct pollfd *polls = mem_array(net->world + 1, sizeof(*polls));
    double next_ms = 0;
    while (!may_end(net)) {
        for (int r = 0; r < net->world; r++)
            polls[r] = (struct pollfd){.fd = net->gone[r] ? -1 : net->line[r], .events = POLLIN};
        polls[net->world] = (struct pollfd){.fd = net->wake[0], .events = POLLIN};
        const double before = clock_ms();
        const int n = poll(polls, (nfds_t)net->world + 1, TICK_MS);
        if (clock_ms() > before + PAUSE_MS) exclude_pause(net, clock_ms() - before);
        if (n < 0) continue;
        if (polls[net->world].revents) break;
        for (int r = 0; r < net->world; r++)
            if (polls[r].fd >= 0 && polls[r].revents) read_line(net, r);
        send_beats(net, &next_ms);
        for (int r = 0; r < net->world; r++)
            if (net->line[r] >= 0 && !net->gone[r] && clock_ms() > net->last_ms[r] + silent_ms(net))
                end_for_silence(net, r, false);
        if (net->rank == 0) check_failure(net);
        if (net->rank == 0) check_waiting(net);
    }
    mem_free(polls);
    return NULL;
}

static pthread_t watcher;

static void wait_for_watch(void)
{
    if (!pthread_equal(pthread_self(), watcher)) sleep_ms(CAUSE_MS);
}

void watch_start(struct comm_net *net)
{
    sigset_t all, before;
    net->gone = mem_array(net->world, sizeof(*net->gone));
    net->last = mem_array(net->world, sizeof(*net->last));
    net->last_ms = mem_array(net->world, sizeof(*net->last_ms));
    net->progress_ms = mem_array(net->world, sizeof(*net->progress_ms));
    net->now.waiting_s = -1;
    for (int r = 0; r < net->world; r++) net->last_ms[r] = net->progress_ms[r] = clock_ms();
    for (int r = 0; r < net->world; r++) net->last[r].waiting_s = -1;
    MT_REQUIRE(!pthread_mutex_init(&net->lock, NULL) && !pipe(net->wake), "no lock or pipe");
    sigfillset(&all); /* signals are handled by the main thread */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    thread_start(&net->thread, watch, net);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    watcher = net->thread;
    die_after(wait_for_watch);
}

void watch_stop(struct comm_net *net)
{
    if (!net->last) return;
    die_after(NULL);
    const struct net_beat bye = {.kind = NET_BYE, .rank = net->rank};
    pthread_mutex_lock(&net->lock);
    net->stop = true;
    if (net->rank != 0) net_write(net->line[0], &bye, sizeof(bye), clock_ms() + WRITE_MS);
    if (net->rank != 0) MT_REQUIRE(write(net->wake[1], "", 1) == 1, "the pipe to the watch");
    pthread_mutex_unlock(&net->lock);
    pthread_join(net->thread, NULL);
    pthread_mutex_destroy(&net->lock);
    close(net->wake[0]);
    close(net->wake[1]);
    mem_free(net->gone);
    mem_free(net->last);
    mem_free(net->last_ms);
    mem_free(net->progress_ms);
    net->last = NULL;
}

/* ---- called by the main thread */

void watch_enter(struct comm_net *net, const char *op)
{
    pthread_mutex_lock(&net->lock);
    snprintf(net->now.op, NET_OP, "%s", op);
    net->now.waiting_s = 0;
    net->since_ms = clock_ms();
    pthread_mutex_unlock(&net->lock);
}

void watch_leave(struct comm_net *net)
{
    pthread_mutex_lock(&net->lock);
    net->now.waiting_s = -1;
    pthread_mutex_unlock(&net->lock);
}

void watch_lost(struct comm_net *net, int peer, const char *what)
{
    char text[NET_TEXT], who[128];
    sleep_ms(CAUSE_MS);
    snprintf(text, sizeof(text), "%s closed its connection in %s", name(net, peer, who), what);
    end_run(net, text, true);
    end_process(net);
}

void comm_fail(struct comm *c, const char *message)
{
    struct comm_net *net = c->net;
    struct net_beat b = {.kind = NET_FAIL};
    mem_free(c->members); /* the watch thread runs until the process ends; of c it reads only the net */
    c->members = NULL;
    if (!net || !net->last) return;
    snprintf(b.text, sizeof(b.text), "%s", message);
    pthread_mutex_lock(&net->lock);
    if (net->rank != 0) {
        net_write(net->line[0], &b, sizeof(b), clock_ms() + WRITE_MS);
    } else {
        net->ended = true; /* the caller prints */
        send_abort(net, message);
    }
    pthread_mutex_unlock(&net->lock);
    if (net->rank != 0) sleep_ms(READ_MS + 6 * GRACE_MS); /* the watch receives the end and exits */
}

void comm_step(struct comm *c, int64_t step)
{
    if (!c->net) return;
    pthread_mutex_lock(&c->net->lock);
    c->net->now.step = step;
    pthread_mutex_unlock(&c->net->lock);
}

void comm_busy(struct comm *c, const char *what)
{
    if (!c->net) return;
    pthread_mutex_lock(&c->net->lock);
    snprintf(c->net->now.busy, NET_OP, "%s", what ? what : "");
    pthread_mutex_unlock(&c->net->lock);
}
