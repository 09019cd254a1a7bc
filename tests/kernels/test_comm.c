/* test_comm.c - ranks as processes on this machine: the contract of the collectives, and the end of a run in which a
 * rank fails. */
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/comm/comm.h"
#include "tests/process.h"

/* For ranks: a failed check exits with code 3 and prints its line number on standard error. */
#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (cond) break;                                                                                               \
        fprintf(stderr, "rank %d, line %d: %s\n", c->rank, __LINE__, #cond);                                           \
        _exit(3);                                                                                                      \
    } while (0)

typedef void body_fn(struct comm *c, struct device *dev);
static const char *backend = "cpu";

/* HEARD_S: after these seconds rank 0 has heard of a rank's step, also on a busy machine; ranks send a heartbeat every
 * 1 to 1.25 s. */
enum { MAX_RANKS = 5, TIMEOUT_S = 2, HEARD_S = 3 };

/* The processes of one run. */
struct ranks {
    pid_t pids[MAX_RANKS];
    char dir[128]; /* standard error of each, by its rank */
};

static int open_listener(int *port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(a);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && !bind(fd, (struct sockaddr *)&a, size) && !listen(fd, 64));
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &size), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

static void be_rank(body_fn *body, const char *dir, const struct comm_place *place)
{
    char path[MT_PATH];
    struct comm c;
    struct device dev;
    struct err err;
    snprintf(path, sizeof(path), "%s/%d", dir, place->rank);
    if (!freopen(path, "w", stderr) || setvbuf(stderr, NULL, _IONBF, 0)) _exit(9);
    ops_cuda_choose(place->rank);
    if (comm_open(&c, place, &err) || device_open(&dev, backend, "auto", &err) || comm_attach(&c, &dev, &err) ||
        device_reserve(&dev, &dev.work, "work", 64 << 20, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        _exit(4);
    }
    body(&c, &dev);
    comm_close(&c);
    _exit(0);
}

static struct ranks start_ranks(body_fn *body, int world)
{
    struct ranks ranks;
    int port;
    const int fd = open_listener(&port);
    snprintf(ranks.dir, sizeof(ranks.dir), "%s", scratch_dir());
    fflush(NULL);
    for (int r = 0; r < world; r++) {
        const struct comm_place place = {.rank = r,
                                         .world = world,
                                         .master = "127.0.0.1",
                                         .port = port,
                                         .listener = r ? -1 : fd,
                                         .timeout_s = TIMEOUT_S,
                                         .key = "the key of this test"};
        ranks.pids[r] = process_fork();
        assert_true(ranks.pids[r] >= 0);
        if (!ranks.pids[r]) be_rank(body, ranks.dir, &place);
    }
    close(fd);
    return ranks;
}

/* The exit code of a rank, or 1000 + signal; said.err has its output. */
static int rank_result(const struct ranks *ranks, int r)
{
    char path[MT_PATH];
    int status;
    assert_int_equal(waitpid(ranks->pids[r], &status, 0), ranks->pids[r]);
    snprintf(path, sizeof(path), "%s/%d", ranks->dir, r);
    process_read(path, said.err, sizeof(said.err));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void assert_all_end_well(const struct ranks *ranks, int world)
{
    for (int r = 0; r < world; r++)
        if (rank_result(ranks, r)) fail_msg("rank %d of %d: %s", r, world, said.err);
}

static void run_ranks(body_fn *body, int world)
{
    const struct ranks ranks = start_ranks(body, world);
    assert_all_end_well(&ranks, world);
}

/* ---- collectives */

/* A value in [-0.5, 0.5) with 32 bits, so f32 rounds sums; cheap, as tests compare millions of values. */
static double value(int rank, int64_t i)
{
    return (double)((uint32_t)(i + 1) * 2654435761u ^ (uint32_t)(rank + 7) * 2246822519u) * 0x1p-32 - 0.5;
}

/* Copy values from the host to the device, and back. */
static struct tensor push(struct device *dev, const void *host, enum dtype t, int64_t rows, int64_t cols)
{
    const struct tensor x = cols ? arena_tensor_2d(&dev->work, t, rows, cols) : arena_tensor_1d(&dev->work, t, rows);
    device_upload(dev, x.data, host, tensor_bytes(x));
    return x;
}

static void pull(struct device *dev, void *host, struct tensor x)
{
    device_download(dev, host, x.data, tensor_bytes(x));
}

/* The sum in rank order. Every rank must have it bit for bit. (For two ranks, the order does not matter.) */
static void sum_of(struct comm *c, struct device *dev, int64_t n)
{
    float *x = mem_array(n, sizeof(*x));
    double *y = mem_array(n, sizeof(*y));
    for (int64_t i = 0; i < n; i++) x[i] = (float)value(c->rank, i);
    for (int64_t i = 0; i < n; i++) y[i] = value(c->rank, i);
    const struct tensor tx = push(dev, x, DT_F32, n, 0), ty = push(dev, y, DT_F64, n, 0);
    comm_overlap_begin(c);
    comm_all_reduce_sum(c, dev, tx);
    comm_all_reduce_sum(c, dev, ty);
    comm_overlap_end(c, dev);
    pull(dev, x, tx);
    pull(dev, y, ty);
    for (int64_t i = 0; i < n; i++) {
        float sum = (float)value(0, i);
        double sum64 = value(0, i);
        for (int r = 1; r < c->world; r++) {
            sum += (float)value(r, i);
            sum64 += value(r, i);
        }
        CHECK(x[i] == sum);
        CHECK(y[i] == sum64);
    }
    arena_release(&dev->work, 0);
    mem_free(x);
    mem_free(y);
}

static void copies(struct comm *c, struct device *dev)
{
    enum { N = 1237 };
    int32_t own[N], *all = mem_array((int64_t)N * c->world, sizeof(*all)), root[N];
    for (int i = 0; i < N; i++) own[i] = 10000 * c->rank + i;
    const struct tensor to = push(dev, own, DT_I32, N, 0), ta = push(dev, all, DT_I32, (int64_t)N * c->world, 0);
    comm_all_gather(c, dev, ta, to);
    pull(dev, all, ta);
    for (int i = 0; i < N * c->world; i++) CHECK(all[i] == 10000 * (i / N) + i % N);
    for (int r = 0; r < c->world; r++) {
        const struct tensor t = push(dev, own, DT_I32, N, 0);
        comm_broadcast(c, dev, t, r);
        pull(dev, root, t);
        for (int i = 0; i < N; i++) CHECK(root[i] == 10000 * r + i);
    }
    arena_release(&dev->work, 0);
    mem_free(all);
}

static void host_values(struct comm *c)
{
    CHECK(comm_host_min(c, c->rank) == 0);
    CHECK(comm_host_max(c, c->rank) == c->world - 1);
    for (int r = 1; r < c->world; r++) {
        char word[16] = "";
        if (c->rank == 0) comm_send(c, r, "hello", 6);
        if (c->rank == r) comm_recv(c, 0, word, 6);
        if (c->rank == r) CHECK(!strcmp(word, "hello"));
    }
}

/* Number of rows that rank p sends to rank q; rank 1 receives none. */
static int64_t n_rows(int p, int q) { return q == 1 ? 0 : 3 * p + 100 * q + (p == q); }

static float row_value(int from, int to, int64_t i) { return (float)(from * 1000000 + to * 10000) + (float)i; }

enum { WIDE = 5, MOST = 4096 }; /* MOST: rows that any rank may receive */

/* Exchanges two tensors of different widths in one call, repeatedly; they are at the bottom of the work arena. */
static void rows_of(struct comm *c, struct device *dev, const struct tensor land[2], const int64_t *rows, int turn)
{
    static const int64_t cols[2] = {WIDE, 1};
    const int64_t mark = arena_mark(&dev->work);
    struct comm_rows t[2];
    int64_t n_recv = 0, n_send = 0;
    for (int p = 0; p < c->world; p++) n_send += n_rows(c->rank, p), n_recv += n_rows(p, c->rank);
    float *host = mem_array((n_send + n_recv) * WIDE, sizeof(*host));
    for (int k = 0; k < 2; k++) {
        int64_t at = 0;
        for (int q = 0; q < c->world; q++)
            for (int64_t i = 0; i < cols[k] * n_rows(c->rank, q); i++) host[at++] = row_value(c->rank + turn, q, i + k);
        t[k].x = push(dev, host, DT_F32, n_send, cols[k]);
        t[k].y = tensor_rows(land[k], 0, n_recv);
    }
    comm_wait(c, dev, comm_all_to_all(c, dev, t, 2, rows), "wait");
    for (int k = 0; k < 2; k++) {
        const float *at = host;
        pull(dev, host, t[k].y);
        for (int p = 0; p < c->world; p++)
            for (int64_t i = 0; i < cols[k] * n_rows(p, c->rank); i++)
                CHECK(*at++ == row_value(p + turn, c->rank, i + k));
    }
    mem_free(host);
    arena_release(&dev->work, mark);
}

/* Exchanges rows by NCCL or sockets, then by direct copies where supported; makes more calls than the COMM_TICKETS that
 * may be open. */
static void all_to_all(struct comm *c, struct device *dev)
{
    const struct tensor land[2] = {arena_tensor_2d(&dev->work, DT_F32, MOST, WIDE),
                                   arena_tensor_2d(&dev->work, DT_F32, MOST, 1)};
    int64_t *rows = mem_array((int64_t)c->world * c->world, sizeof(*rows));
    for (int p = 0; p < c->world; p++)
        for (int q = 0; q < c->world; q++) rows[p * c->world + q] = n_rows(p, q);
    rows_of(c, dev, land, rows, 0);
    const char *way = comm_share_work(c, dev);
    fprintf(stderr, "rows travel by %s", way);
    for (int turn = 0; turn < 2 * COMM_TICKETS; turn++) rows_of(c, dev, land, rows, turn);
    comm_barrier(c);
    comm_unshare_work(c);
    arena_release(&dev->work, 0);
    mem_free(rows);
}

/* A device whose ranks share memory. left[r] is set when rank r has closed its view of the others' memory. */
static volatile int *left; /* [MAX_RANKS] seen by all processes */
static int own_rank, without_sharing;

static int fake_offer(void *base, char handle[COMM_HANDLE], struct err *err)
{
    (void)base;
    handle[0] = 1;
    return own_rank == without_sharing ? err_set(err, "no memory operations") : 0;
}
static int fake_reach(const struct comm *c, const char *handles, struct err *err)
{
    (void)err;
    for (int p = 0; p < c->world; p++) CHECK(handles[p * COMM_HANDLE] == 1);
    return 0;
}
static void fake_leave(void)
{
    const struct timespec late = {.tv_nsec = own_rank * 100 * 1000000L};
    nanosleep(&late, NULL);
    left[own_rank] = 1;
}

static void all_left(struct comm *c)
{
    for (int p = 0; p < c->world; p++) CHECK(left[p]);
    comm_barrier(c);
    left[c->rank] = 0;
    comm_barrier(c);
}

/* No rank frees its memory while another may write to it; all use the same transport. */
static void share_work(struct comm *c, struct device *dev)
{
    static const struct comm_ops fake = {.offer = fake_offer, .reach = fake_reach, .leave = fake_leave};
    const struct comm_ops *ops = c->ops;
    const struct arena work = dev->work;
    own_rank = c->rank;
    without_sharing = -1;
    c->ops = &fake;
    c->device = c;
    CHECK(!strcmp(comm_share_work(c, dev), "copies between the GPUs") && c->shared);
    comm_unshare_work(c);
    CHECK(!c->shared);
    all_left(c);
    without_sharing = 2;
    const char *way = comm_share_work(c, dev);
    CHECK(!c->shared && !strncmp(way, "NCCL, not by copies", 19));
    CHECK(strstr(way, c->rank == 2 ? "no memory operations" : "another rank's GPU"));
    all_left(c);
    without_sharing = -1;
    comm_share_work(c, dev);
    comm_abandon_work(c, dev); /* must return without the other ranks */
    CHECK(!dev->work.base && work.base && !left[c->rank]);
    c->shared = false;
    c->device = NULL;
    c->ops = ops;
}

static void test_share_work(void **state)
{
    (void)state;
    void *shared = mmap(NULL, MAX_RANKS * sizeof(*left), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    left = shared;
    run_ranks(share_work, 3);
    munmap(shared, MAX_RANKS * sizeof(*left));
}

static void every_collective(struct comm *c, struct device *dev)
{
    static const int64_t sizes[] = {0, 1, 3, 1000, 65536, 400001}; /* up to several messages */
    for (int i = 0; i < MT_LEN(sizes); i++) sum_of(c, dev, sizes[i]);
    copies(c, dev);
    host_values(c);
    all_to_all(c, dev);
}

static void test_collectives(void **state)
{
    (void)state;
    for (int world = 1; world <= MAX_RANKS; world += world == 1 ? 1 : 3) run_ranks(every_collective, world);
}

/* Groups of the even and of the odd ranks, used at the same time; groups of one rank. */
static void groups(struct comm *c, struct device *dev)
{
    struct comm half, one;
    struct err err;
    CHECK(!comm_split(&half, c, c->rank % 2, &err));
    CHECK(!comm_split(&one, c, c->rank, &err));
    CHECK(half.rank == c->rank / 2 && half.world == (c->world + 1 - c->rank % 2) / 2);
    CHECK(one.world == 1);
    CHECK(c->local_rank == c->rank && c->local_world == c->world);
    every_collective(&half, dev);
    every_collective(&one, dev);
    every_collective(c, dev);
    int32_t first = c->rank;
    const struct tensor t = push(dev, &first, DT_I32, 1, 0);
    comm_broadcast(&half, dev, t, 0);
    pull(dev, &first, t);
    CHECK(first == c->rank % 2);
    comm_close(&one);
    comm_close(&half);
}

static void test_groups(void **state)
{
    (void)state;
    run_ranks(groups, 2);
    run_ranks(groups, 5);
}

static int count_gpus(void)
{
    int status;
    const pid_t pid = fork(); /* a process that has called CUDA must not fork ranks */
    if (pid == 0) _exit(ops_cuda_count());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/* The collectives between two GPUs. */
static void test_gpus(void **state)
{
    (void)state;
    if (count_gpus() < 2) {
        print_message("skip: no two GPUs here\n");
        skip();
    }
    backend = "cuda";
    run_ranks(every_collective, 2);
    print_message("%s\n", said.err); /* direct copies or only NCCL, depending on the machine */
    run_ranks(groups, 2);
    backend = "cpu";
}

/* ---- faults: the run ends on every rank within seconds, and rank 0 names the rank at fault */

static void sleep_s(int s)
{
    const struct timespec t = {.tv_sec = s};
    nanosleep(&t, NULL);
}

static void reduce_often(struct comm *c, struct device *dev, int times)
{
    for (int i = 0; i < times; i++) {
        double x = 1;
        comm_step(c, i);
        comm_all_reduce_sum(c, dev, tensor_1d(&x, DT_F64, 1));
        CHECK(x == c->world);
    }
}

static void killed(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 18);
    sleep_s(HEARD_S);
    if (c->rank == 1) raise(SIGKILL);
    reduce_often(c, dev, 1000000);
}

/* Rank 1 dies; the others abort, like a GPU that accesses the memory of a dead rank. */
static void cut_off(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 18);
    sleep_s(HEARD_S);
    if (c->rank == 1) raise(SIGKILL);
    MT_REQUIRE(false, "%s", "the memory of rank 1");
}

static void late(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 18);
    if (c->rank == 1) sleep_s(60);
    comm_barrier(c);
}

/* Slow, but making progress. */
static void busy(struct comm *c, struct device *dev)
{
    (void)dev;
    comm_busy(c, c->rank == 1 ? "loading" : NULL);
    for (int i = 0; c->rank == 1 && i < TIMEOUT_S + 2; i++) {
        sleep_s(1);
        progress();
    }
    comm_barrier(c);
    comm_busy(c, NULL);
}

/* Ranks 0 and 1 report that they are loading, and hang. */
static void stuck(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 3);
    comm_busy(c, c->rank == 1 ? "loading" : NULL);
    if (c->rank == 1) sleep_s(60);
    comm_barrier(c);
}

static void first_stuck(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 3);
    comm_busy(c, c->rank == 0 ? "saving" : NULL);
    if (c->rank == 0) sleep_s(60);
    comm_barrier(c);
}

/* All ranks hang, and none waits for another. */
static void all_stuck(struct comm *c, struct device *dev)
{
    (void)dev;
    comm_busy(c, "loading");
    sleep_s(60);
}

static void failing(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 3);
    if (c->rank == 1) {
        comm_fail(c, "its disk is full");
        _exit(5);
    }
    comm_barrier(c);
}

/* Rank 0 ends with an error, and has freed the memory of the group. */
static void first_failing(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 3);
    if (c->rank == 0) {
        comm_fail(c, "no adapter");
        fprintf(stderr, "rank 0 prints: no adapter\n");
        _exit(c->members ? 5 : 1);
    }
    comm_barrier(c);
}

static void astray(struct comm *c, struct device *dev)
{
    int32_t x = 0;
    if (c->rank == 1)
        comm_barrier(c);
    else
        comm_broadcast(c, dev, tensor_1d(&x, DT_I32, 1), 1);
}

static void stopped(struct comm *c, struct device *dev)
{
    reduce_often(c, dev, 3);
    sleep_s(HEARD_S);
    if (c->rank == 1) raise(SIGSTOP);
    sleep_s(30); /* no rank waits for it yet */
}

/* Faults among three ranks: ranks 0 and 2 exit with 1, and rank 0 prints the cause. */
static const struct fault {
    body_fn *body;
    const char *who, *says;
    int code_of_1;
} faults[] = {
    {killed, "rank 1 on ", "died, at step 17, its last operation all_reduce", 1000 + SIGKILL},
    {cut_off, "rank 1 on ", "died, at step 17, its last operation all_reduce", 1000 + SIGKILL},
    {late, "for rank 1 on ", "at step 17, its last operation all_reduce", 1},
    {failing, "rank 1: ", "its disk is full", 1},
    {first_failing, "rank 0 prints: ", "no adapter", 1},
    {stuck, "for rank 1 on ", "at step 2, its last operation all_reduce, while loading", 1},
    {first_stuck, "for rank 0 on ", "at step 2, its last operation all_reduce, while saving", 1},
    {all_stuck, "no rank has made progress for ", "while loading", 1},
    {stopped, "rank 1 on ", "has not answered for 5 s, at step 2", 1000 + SIGKILL},
};

static void assert_ends(const struct fault *f, const struct ranks *ranks)
{
    assert_int_equal(rank_result(ranks, 0), 1);
    assert_says(said.err, f->who);
    assert_says(said.err, f->says);
    if (f->body == stopped) kill(ranks->pids[1], SIGKILL);
    assert_int_equal(rank_result(ranks, 1), f->code_of_1);
    assert_int_equal(rank_result(ranks, 2), 1);
}

/* All cases run at the same time, as they mostly wait. */
static void test_faults(void **state)
{
    (void)state;
    struct ranks ranks[MT_LEN(faults)];
    const double start = clock_ms();
    for (int i = 0; i < MT_LEN(faults); i++) ranks[i] = start_ranks(faults[i].body, 3);
    const struct ranks slow = start_ranks(busy, 2);
    for (int i = 0; i < MT_LEN(faults); i++) assert_ends(&faults[i], &ranks[i]);
    assert_true(clock_ms() - start < 20e3);
    assert_all_end_well(&slow, 2);
}

static void slowly(struct comm *c, struct device *dev)
{
    for (int i = 0; i < 3; i++) {
        sleep_s(1);
        reduce_often(c, dev, 1);
    }
}

/* All ranks are stopped, as by Ctrl-Z, and resume without an error. */
static void test_pause(void **state)
{
    (void)state;
    const struct ranks ranks = start_ranks(slowly, 3);
    sleep_s(1);
    for (int r = 0; r < 3; r++) kill(ranks.pids[r], SIGSTOP);
    sleep_s(8);
    for (int r = 0; r < 3; r++) kill(ranks.pids[r], SIGCONT);
    assert_all_end_well(&ranks, 3);
}

/* Ranks that make different collective calls stop, and the message names both calls. */
static void test_astray(void **state)
{
    (void)state;
    const struct ranks ranks = start_ranks(astray, 2);
    const int first = rank_result(&ranks, 0);
    assert_true(first == 1 || first == 1000 + SIGABRT);
    const bool said_it = strstr(said.err, "broadcast") && strstr(said.err, "gather of host values");
    const int second = rank_result(&ranks, 1);
    assert_true(second == 1 || second == 1000 + SIGABRT);
    assert_true(said_it || (strstr(said.err, "broadcast") && strstr(said.err, "gather of host values")));
}

static void agreeing(struct comm *c, struct device *dev)
{
    struct err err = {{0}};
    (void)dev;
    CHECK(!comm_agree(c, "configuration", 5, &err));
    CHECK(comm_agree(c, "configuration", c->rank == 2 ? 6 : 5, &err));
    CHECK(strstr(err.msg, "rank 2") && strstr(err.msg, "another configuration"));
}

static void test_agree(void **state)
{
    (void)state;
    run_ranks(agreeing, 4);
}

int test_comm(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives), cmocka_unit_test(test_groups),     cmocka_unit_test(test_faults),
        cmocka_unit_test(test_pause),       cmocka_unit_test(test_astray),     cmocka_unit_test(test_agree),
        cmocka_unit_test(test_gpus),        cmocka_unit_test(test_share_work),
    };
    return cmocka_run_group_tests_name("comm", tests, NULL, NULL);
}
