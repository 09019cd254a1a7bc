/* test_rendezvous.c - other programs connect while the ranks of a run connect to each other: they receive no data and
 * cannot end or delay the start; the key of another run is refused. */
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "kernels/comm/comm_net.h"
#include "tests/process.h"
#include "train/launch/rank_key.h"

enum { MEET_S = 20, QUICK_MS = 4000, FLOOD = 200, GREETING = 8 + NET_NONCE };
#define PROOF ((int64_t)sizeof(struct net_hello) + HASH_MAC)

static pid_t pids[2];
static const char *dir;
static int first_port;

static void pause_ms(long ms)
{
    const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static struct sockaddr_in loopback(int port)
{
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
}

static int open_listener(int *port)
{
    struct sockaddr_in a = loopback(0);
    socklen_t size = sizeof(a);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && !bind(fd, (struct sockaddr *)&a, size) && !listen(fd, 64));
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &size), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

static int connect_to(int port)
{
    struct sockaddr_in a = loopback(port);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && !connect(fd, (struct sockaddr *)&a, sizeof(a)));
    return fd;
}

static void put(int fd, const void *data, int64_t bytes)
{
    assert_int_equal(send(fd, data, (size_t)bytes, MSG_NOSIGNAL), bytes);
}

static bool get(int fd, void *data, int64_t bytes) { return !net_read(fd, data, bytes, clock_ms() + QUICK_MS); }

/* Fails unless the peer closes the connection without another byte. */
static void assert_turned_away(int fd)
{
    char c;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&p, 1, QUICK_MS), 1);
    assert_true(recv(fd, &c, 1, 0) <= 0);
    close(fd);
}

static struct comm_place place_of(int rank, int port, int listener)
{
    return (struct comm_place){.rank = rank,
                               .world = 2,
                               .master = "127.0.0.1",
                               .port = port,
                               .listener = listener,
                               .timeout_s = 5,
                               .meet_s = MEET_S,
                               .key = "the key of this test"};
}

/* Starts a process that meets the other rank, makes one barrier and ends; its output goes to DIR/RANK. */
static void start_rank(const struct comm_place *place)
{
    char path[MT_PATH];
    struct comm c;
    struct err err;
    fflush(NULL);
    pids[place->rank] = process_fork();
    assert_true(pids[place->rank] >= 0);
    if (pids[place->rank]) return;
    snprintf(path, sizeof(path), "%s/%d", dir, place->rank);
    if (!freopen(path, "w", stderr) || setvbuf(stderr, NULL, _IONBF, 0)) _exit(9);
    if (comm_open(&c, place, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        _exit(4);
    }
    comm_barrier(&c);
    comm_close(&c);
    _exit(0);
}

static int rank_result(int r)
{
    char path[MT_PATH];
    int status;
    assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
    snprintf(path, sizeof(path), "%s/%d", dir, r);
    process_read(path, said.err, sizeof(said.err));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void start_first(void)
{
    const int fd = open_listener(&first_port);
    const struct comm_place place = place_of(0, first_port, fd);
    dir = scratch_dir();
    start_rank(&place);
    close(fd);
}

/* Starts the other rank; fails unless the run starts without delay. said.err has rank 0's output. */
static void assert_starts(int port_of_first)
{
    const struct comm_place place = place_of(1, port_of_first, -1);
    const double start = clock_ms();
    start_rank(&place);
    if (rank_result(1)) fail_msg("rank 1: %s", said.err);
    if (rank_result(0)) fail_msg("rank 0: %s", said.err);
    assert_true(clock_ms() - start < QUICK_MS);
    for (const char *p = said.err; *p; p++) assert_true(*p == '\n' || (*p >= 32 && *p < 127));
}

/* ---- */

/* The hello of earlier versions (which once ended every rank's start), random bytes, an HTTP request. */
static void test_garbage(void **state)
{
    (void)state;
    static char noise[1 << 16];
    struct {
        char magic[8], version[16];
        int32_t rank, world, port, pid;
        char host[64];
    } old = {"", MT_VERSION, 1, 3, 1, 1, "\x1b[2Jhost"};
    memcpy(old.magic, "moetrain", sizeof(old.magic));
    for (int64_t i = 0; i < (int64_t)sizeof(noise); i++) noise[i] = (char)rng_u64(1, (uint64_t)i);
    start_first();
    int fds[5];
    for (int i = 0; i < 5; i++) fds[i] = connect_to(first_port);
    put(fds[0], &old, sizeof(old));
    put(fds[1], noise, sizeof(noise));
    put(fds[2], noise, GREETING - 1);
    put(fds[3], "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: \x1b[31m*\r\n\r\n", 50);
    put(fds[4], noise, 1);
    close(fds[2]);
    close(fds[4]);
    assert_turned_away(fds[1]);
    assert_turned_away(fds[3]);
    char answer[GREETING]; /* rank 0 reads the first 40 bytes as a greeting and answers with a nonce only */
    assert_true(get(fds[0], answer, sizeof(answer)));
    assert_starts(first_port);
    assert_says(said.err, "rejected a connection from 127.0.0.1: ");
    assert_says(said.err, "rejected 4 connections that did not come from ranks of this run");
    close(fds[0]);
}

/* Connections that send nothing, or stop within a message, do not block others. */
static void test_silence(void **state)
{
    (void)state;
    static const char greeting[GREETING] = "moetrain", half[PROOF / 2];
    int fds[30];
    start_first();
    for (int i = 0; i < 30; i++) {
        fds[i] = connect_to(first_port);
        if (i % 3) put(fds[i], greeting, i % 3 == 1 ? GREETING / 2 : GREETING);
        if (i % 6 == 5) put(fds[i], half, sizeof(half));
    }
    assert_starts(first_port);
    for (int i = 0; i < 30; i++) close(fds[i]);
}

static int count_files(pid_t pid)
{
    char path[64], **names;
    int64_t n;
    struct err err;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    if (file_list(path, &names, &n, &err)) fail_msg("%s", err.msg);
    file_list_free(names, n);
    return (int)n;
}

/* With more connections than rank 0 keeps, it closes the oldest, and the rank connects. */
static void test_flood(void **state)
{
    (void)state;
    int fds[FLOOD];
    start_first();
    for (int i = 0; i < FLOOD; i++) fds[i] = connect_to(first_port);
    pause_ms(300);
    assert_true(count_files(pids[0]) < GUESTS + 20);
    assert_starts(first_port);
    assert_says(said.err, "too many silent connections");
    for (int i = 0; i < FLOOD; i++) close(fds[i]);
}

/* A rank with another key receives only a nonce, and its error says what to do. Then the right rank connects. */
static void test_wrong_key(void **state)
{
    (void)state;
    start_first();
    struct comm_place wrong = place_of(1, first_port, -1);
    wrong.key[0] ^= 1;
    wrong.meet_s = 0.3;
    start_rank(&wrong);
    assert_int_equal(rank_result(1), 4);
    assert_says(said.err, "has another key than this rank");
    assert_starts(first_port);
    assert_says(said.err, "it has another key than this run");
}

/* A process without the key listens on the master's port. It receives only the nonce and a proof, and rank 1 refuses
 * its answer. */
static void test_impostor_of_rank_0(void **state)
{
    (void)state;
    int port;
    const int listener = open_listener(&port);
    struct comm_place place = place_of(1, port, -1);
    char bytes[GREETING], proof[PROOF];
    dir = scratch_dir();
    place.meet_s = 0.3;
    start_rank(&place);
    const int fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0 && get(fd, bytes, GREETING));
    put(fd, bytes, GREETING); /* echoes rank 1's nonce */
    assert_true(get(fd, proof, PROOF));
    put(fd, proof + PROOF - HASH_MAC, HASH_MAC);
    assert_int_equal(rank_result(1), 4);
    assert_says(said.err, "has another key than this rank");
    close(fd);
    close(listener);
}

/* Forwards bytes in both directions until one side closes. */
static void relay(int a, int b)
{
    struct pollfd p[2] = {{.fd = a, .events = POLLIN}, {.fd = b, .events = POLLIN}};
    char bytes[4096];
    for (;;) {
        assert_true(poll(p, 2, 1000 * MEET_S) > 0);
        for (int i = 0; i < 2; i++) {
            if (!p[i].revents) continue;
            const ssize_t n = recv(p[i].fd, bytes, sizeof(bytes), 0);
            if (n <= 0) return;
            send(p[1 - i].fd, bytes, (size_t)n, MSG_NOSIGNAL);
        }
    }
}

/* A proxy between the two ranks records the proof of rank 1 and replays it on another connection. */
static void test_replay(void **state)
{
    (void)state;
    int port;
    char greeting[GREETING], answer[GREETING], proof[PROOF];
    const int listener = open_listener(&port);
    start_first();
    const struct comm_place place = place_of(1, port, -1);
    start_rank(&place);
    int client = accept(listener, NULL, NULL), server = connect_to(first_port);
    assert_true(client >= 0 && get(client, greeting, GREETING));
    put(server, greeting, GREETING);
    assert_true(get(server, answer, GREETING));
    put(client, answer, GREETING);
    assert_true(get(client, proof, PROOF));
    close(server);
    server = connect_to(first_port);
    put(server, greeting, GREETING);
    assert_true(get(server, answer, GREETING));
    put(server, proof, PROOF);
    assert_turned_away(server);
    close(client);
    client = accept(listener, NULL, NULL); /* rank 1 retries; the proxy now forwards its bytes */
    server = connect_to(first_port);
    relay(client, server);
    close(client);
    close(server);
    close(listener);
    assert_int_equal(rank_result(1), 0);
    assert_int_equal(rank_result(0), 0);
    assert_says(said.err, "it has another key than this run");
}

/* ---- the key file */

static void plant(const char *path, const char *bytes, int64_t size, mode_t mode)
{
    FILE *f = fopen(path, "w");
    assert_true(f && fwrite(bytes, 1, (size_t)size, f) == (size_t)size);
    assert_true(!fchmod(fileno(f), mode) && !fclose(f));
}

/* The error of rank 1 for a key file with these properties. */
static void assert_refused(struct comm_place *place, const char *says)
{
    place->meet_s = 0.3;
    start_rank(place);
    assert_int_equal(rank_result(1), 4);
    assert_says(said.err, says);
}

static void test_key_file(void **state)
{
    (void)state;
    static const char stale[COMM_KEY] = "of a run that was killed";
    struct comm_place first = place_of(0, 0, -1), other = place_of(1, 0, -1);
    struct err err;
    struct stat st;
    char old[MT_PATH];
    close(open_listener(&first.port));
    other.port = first.port;
    dir = scratch_dir();
    if (rank_key_open(&other, dir, &err)) fail_msg("%s", err.msg);
    assert_refused(&other, "all machines must see the same output.dir");
    plant(other.key_file, stale, COMM_KEY, 0640);
    assert_refused(&other, "other users may read or write it");
    plant(other.key_file, stale, 3, 0600);
    assert_refused(&other, "3 bytes, not a key");
    snprintf(old, sizeof(old), "%s/old", dir);
    plant(old, stale, COMM_KEY, 0600);
    assert_true(!unlink(other.key_file) && !symlink("old", other.key_file));
    assert_refused(&other, "cannot open");
    assert_true(!unlink(other.key_file) && !mkfifo(other.key_file, 0600));
    assert_refused(&other, "not a regular file");
    assert_true(!unlink(other.key_file) && !rename(old, other.key_file));

    other.meet_s = MEET_S; /* starts first, reads the stale key, and rereads the file that rank 0 writes */
    start_rank(&other);
    pause_ms(300);
    if (rank_key_open(&first, dir, &err)) fail_msg("%s", err.msg);
    assert_int_equal(stat(first.key_file, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_true(memcmp(first.key, stale, COMM_KEY) != 0);
    start_rank(&first);
    if (rank_result(0) || rank_result(1)) fail_msg("%s", said.err);
    rank_key_close(&first);
    assert_int_equal(stat(first.key_file, &st), -1);
}

/* While ranks of a launch meet, a second launch with the same port and output.dir is refused. It does not change the
 * key file. */
static void test_second_launch(void **state)
{
    (void)state;
    struct comm_place first = place_of(0, 0, -1), second = place_of(0, 0, -1), other = place_of(1, 0, -1);
    struct err err;
    char before[COMM_KEY], after[COMM_KEY], who[64];
    close(open_listener(&first.port));
    second.port = other.port = first.port;
    dir = scratch_dir();
    if (rank_key_open(&first, dir, &err) || rank_key_open(&other, dir, &err)) fail_msg("%s", err.msg);
    process_read(first.key_file, before, sizeof(before));
    assert_int_equal(rank_key_open(&second, dir, &err), -1);
    snprintf(who, sizeof(who), "another launch (process %ld on ", (long)getpid());
    assert_says(err.msg, who);
    assert_says(err.msg, "MASTER_PORT");
    rank_key_close(&second);
    process_read(first.key_file, after, sizeof(after));
    assert_memory_equal(before, after, sizeof(before));
    start_rank(&first);
    start_rank(&other);
    if (rank_result(0) || rank_result(1)) fail_msg("%s", said.err);
    assert_true(!unlink(first.key_file)); /* another launch deleted the file and wrote a new one */
    if (rank_key_open(&second, dir, &err)) fail_msg("%s", err.msg);
    rank_key_close(&first);
    assert_true(file_exists(second.key_file));
    rank_key_close(&second);
    char **names;
    int64_t n;
    if (file_list(dir, &names, &n, &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < n; i++) assert_null(strstr(names[i], ".key"));
    file_list_free(names, n);
}

int test_rendezvous(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_silence),
        cmocka_unit_test(test_flood),
        cmocka_unit_test(test_wrong_key),
        cmocka_unit_test(test_impostor_of_rank_0),
        cmocka_unit_test(test_replay),
        cmocka_unit_test(test_key_file),
        cmocka_unit_test(test_second_launch),
    };
    return cmocka_run_group_tests_name("rendezvous", tests, NULL, NULL);
}
