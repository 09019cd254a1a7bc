/* test_hub.c - downloads against tests/hub_server.py, a hub on this machine each of whose repositories has a vice. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file.h"
#include "kernels/hash.h"
#include "data/hub.h"
#include "tests/process.h"

#define N_SHARDS 3

static struct {
    pid_t pid;
    int keep; /* it ends when this pipe does */
    char endpoint[64], log[MT_PATH];
} server;
static char *home; /* HF_HOME of the test */

/* ---- the server, the environment, the log */

static bool start_server(void)
{
    int in[2], out[2];
    char port[16] = "", model[MT_PATH], script[MT_PATH];
    snprintf(server.log, sizeof(server.log), "%s/requests", scratch_dir());
    snprintf(model, sizeof(model), "%s", fixture("parity/case_a"));
    snprintf(script, sizeof(script), "%s", fixture("../hub_server.py"));
    assert_int_equal(pipe(in) | pipe(out), 0);
    fflush(NULL);
    server.pid = fork();
    if (server.pid == 0) {
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        for (int i = 0; i < 2; i++) close(in[i]), close(out[i]);
        execlp("python3", "python3", script, server.log, model, (char *)NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    server.keep = in[1];
    fcntl(server.keep, F_SETFD, FD_CLOEXEC);
    const ssize_t n = read(out[0], port, sizeof(port) - 1);
    close(out[0]);
    if (n <= 0) return false;
    snprintf(server.endpoint, sizeof(server.endpoint), "http://127.0.0.1:%d/", atoi(port));
    return true;
}

static void stop_server(void)
{
    close(server.keep);
    waitpid(server.pid, NULL, 0);
}

static int fresh(void **state)
{
    static const char *const cleared[] = {"HF_TOKEN",   "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
                                          "http_proxy", "https_proxy",   "all_proxy"};
    (void)state;
    for (int i = 0; i < MT_LEN(cleared); i++) unsetenv(cleared[i]);
    mem_free(home);
    home = mem_strdup(scratch_dir());
    setenv("HF_HOME", home, 1);
    setenv("HF_ENDPOINT", server.endpoint, 1);
    return truncate(server.log, 0);
}

/* Requests in the log whose line holds both texts. */
static int requests(const char *a, const char *b)
{
    char line[1024];
    int n = 0;
    FILE *f = fopen(server.log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f)) n += strstr(line, a) && strstr(line, b);
    fclose(f);
    return n;
}

static const char *shard(int i)
{
    static char name[4][48];
    snprintf(name[i], sizeof(name[i]), "model-0000%d-of-00003.safetensors", i + 1);
    return name[i];
}

/* ---- what must hold after a download */

static const char *in_cache(const char *repo, const char *below)
{
    static char path[4][MT_PATH];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, MT_PATH, "%s/hub/models--test--%s/%s", home, repo, below);
    return p;
}

/* Every link leads to a blob whose name is the hash of what it holds; nothing is left over. */
static void assert_verified(const char *dir)
{
    char **names, path[MT_PATH], target[MT_PATH], hex[HASH_HEX];
    int64_t n, size;
    struct err err;
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        const ssize_t length = readlink(path, target, sizeof(target) - 1);
        assert_true(length > 0);
        target[length] = 0;
        assert_int_equal(strncmp(target, "../../blobs/", 12), 0);
        char *text = file_read(path, 1 << 24, &size, &err);
        assert_non_null(text);
        struct hash h;
        if (strlen(target + 12) == 64)
            hash_init(&h);
        else
            hash_init_git(&h, size);
        hash_add(&h, text, size);
        hash_hex(&h, hex);
        assert_string_equal(target + 12, hex);
        mem_free(text);
    }
    file_list_free(names, n);
    snprintf(path, sizeof(path), "%s/../../blobs", dir);
    assert_int_equal(file_list(path, &names, &size, &err), 0);
    assert_int_equal(n, size);
    file_list_free(names, size);
}

static void assert_downloads(const char *repo)
{
    char dir[MT_PATH], id[64];
    struct err err;
    snprintf(id, sizeof(id), "test/%s", repo);
    if (hub_model(dir, id, "main", &err)) fail_msg("%s", err.msg);
    assert_verified(dir);
    assert_int_equal(file_is_dir(dir), 1);
}

static void assert_refused(const char *repo, const char *revision, const char *a, const char *b)
{
    char dir[MT_PATH], id[64];
    struct err err = {{0}};
    snprintf(id, sizeof(id), "test/%s", repo);
    assert_int_equal(hub_model(dir, id, revision, &err), -1);
    assert_says(err.msg, a);
    assert_says(err.msg, b);
}

/* ---- tests */

static void test_hashes(void **state)
{
    (void)state;
    char hex[HASH_HEX];
    for (int plain = 0; plain < 2; plain++) { /* FIPS 180-4's examples, whole and byte by byte */
        struct hash h;
        hash_init(&h);
        h.plain |= plain;
        hash_add(&h, "abc", 3);
        hash_hex(&h, hex);
        assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        hash_init(&h);
        h.plain |= plain;
        for (int i = 0; i < 1000000; i++) hash_add(&h, "a", 1);
        hash_hex(&h, hex);
        assert_string_equal(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
    struct hash h; /* git hash-object of an empty file and of "hello\n" */
    hash_init_git(&h, 0);
    hash_hex(&h, hex);
    assert_string_equal(hex, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
    hash_init_git(&h, 6);
    hash_add(&h, "hello\n", 6);
    hash_hex(&h, hex);
    assert_string_equal(hex, "ce013625030ba8dba906f756967f9e9ca394464a");
    char *text = mem_alloc(1000), other[HASH_HEX];
    for (int64_t size = 0; size < 300; size++) { /* every length of the last block, both ways, in two pieces */
        struct hash a, b;
        hash_init(&a);
        hash_init(&b);
        b.plain = true;
        hash_add(&a, text, size / 3);
        hash_add(&a, text, size - size / 3);
        hash_add(&b, text, size);
        hash_hex(&a, hex);
        hash_hex(&b, other);
        assert_string_equal(hex, other);
    }
    mem_free(text);
}

/* A directory, a file, and what is no OWNER/NAME are taken as they are. */
static void test_local_paths(void **state)
{
    (void)state;
    static const char *const paths[] = {"/nowhere", "a", "a/b/c", "../a", "a/..", "-a/b", "a/b.", "a--b/c", "a b/c"};
    char dir[MT_PATH];
    struct err err;
    setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1);
    for (int i = 0; i < MT_LEN(paths); i++) {
        assert_int_equal(hub_model(dir, paths[i], "main", &err), 0);
        assert_string_equal(dir, paths[i]);
    }
    char *files = hub_data(" a.jsonl, /b c.jsonl.gz ,d", &err);
    assert_string_equal(files, "a.jsonl,/b c.jsonl.gz,d");
    mem_free(files);
}

static void test_model(void **state)
{
    (void)state;
    char dir[MT_PATH], text[64], **names;
    int64_t n;
    struct err err;
    assert_int_equal(hub_model(dir, "test/plain", "main", &err), 0);
    assert_verified(dir);
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    assert_int_equal(n, 5 + N_SHARDS); /* no README, no other format, no folder */
    file_list_free(names, n);
    assert_int_equal(requests("README", "") + requests(".bin", "") + requests("original", ""), 0);
    process_read(in_cache("plain", "refs/main"), text, sizeof(text));
    assert_string_equal(text, strrchr(dir, '/') + 1);
    assert_true(file_exists(in_cache("plain", "../CACHEDIR.TAG")));

    truncate(server.log, 0); /* again: one look at the list, nothing else; of a commit: none */
    assert_int_equal(hub_model(dir, "test/plain", "main", &err), 0);
    assert_int_equal(requests("", ""), 1);
    char commit[41];
    strcpy(commit, strrchr(dir, '/') + 1);
    assert_int_equal(hub_model(dir, "test/plain", commit, &err), 0);
    assert_int_equal(requests("", ""), 1);
    assert_int_equal(hub_model(dir, "test/plain", "refs/pr/1", &err), 0);
    assert_true(file_exists(in_cache("plain", "refs/refs/pr/1")));
    assert_int_equal(requests("cdn", ""), 0);
}

static void test_cache_places(void **state)
{
    (void)state;
    char dir[MT_PATH], cache[MT_PATH];
    struct err err;
    snprintf(cache, sizeof(cache), "%s/elsewhere", home);
    setenv("HF_HUB_CACHE", cache, 1);
    assert_int_equal(hub_model(dir, "test/empty", "main", &err), 0); /* it has an empty file */
    assert_int_equal(strncmp(dir, cache, strlen(cache)), 0);
    assert_verified(dir);
    setenv("HF_ENDPOINT", "ftp://x", 1);
    assert_refused("plain", "main", "HF_ENDPOINT", "https://");
}

static void test_breaks(void **state)
{
    (void)state;
    char line[256];
    assert_downloads("breaks");
    for (int i = 0; i < N_SHARDS; i++) /* 300 KB in pieces of 70000 bytes, each from where the last ended */
        for (int at = 70000; at < 300000; at += 70000) {
            snprintf(line, sizeof(line), "%s bytes=%d- ", shard(i), at);
            assert_int_equal(requests("cdn GET /models/test/breaks/", line), 1);
        }
    assert_downloads("no-range");
    assert_downloads("damaged-once");
    assert_downloads("expired");
    assert_int_equal(requests("hub GET /test/expired/resolve", shard(0)), 2); /* not the old address again */
    assert_refused("no-range-breaks", "main", "cannot go on in the middle", "3 times");
    assert_refused("lying-range", "main", "asked for the bytes from 70000", "from 70001");
}

static void test_waits(void **state)
{
    (void)state;
    double start = clock_ms();
    assert_downloads("throttled");
    assert_true(clock_ms() - start >= 2000); /* Retry-After and RateLimit: 0 s, and a second more, each */
    assert_int_equal(requests("cdn GET /models/test/throttled", shard(2)), 2);
    assert_downloads("flaky");
    start = clock_ms();
    assert_refused("down", "main", "HTTP 503", "given up after 3 tries");
    assert_true(clock_ms() - start >= 1000);
}

static void test_lies(void **state)
{
    (void)state;
    assert_refused("wrong-size", "main", "the hub lists 300010 bytes, the server has 300000", shard(0));
    assert_false(file_exists(in_cache("wrong-size", "refs/main")));
    assert_refused("endless", "main", "more than the 299000 bytes", shard(0));
    assert_refused("wrong-hash", "main", "the hash is ", "3 times now");
    assert_refused("huge", "main", "1024 PiB is still to be downloaded", "make room");
    assert_refused("evil", "main", "../../evil", "no path");
    assert_refused("loop", "main", "redirects", "test/loop/model-0000");
    assert_refused("no-shard", "main", shard(1), "its index names");
    assert_refused("no-weights", "main", "model.safetensors", "safetensors is the format");
}

static void test_refusals(void **state)
{
    (void)state;
    char path[MT_PATH];
    struct err err;
    assert_refused("gated", "main", "gated: accept its terms at http://127.0.0.1", "set HF_TOKEN");
    assert_refused("private", "main", "no such model, or it is private", "set HF_TOKEN");
    assert_refused("missing", "main", "test/missing is no directory here", "no such model");
    assert_refused("disabled", "main", "disabled", "Access to this resource");
    assert_refused("plain", "v9", "no branch, tag or commit \"v9\"", "test/plain");
    assert_refused("plain", "../x", "\"../x\"", "no branch");
    setenv("HF_TOKEN", "hf_bad", 1);
    assert_refused("plain", "main", "token in HF_TOKEN", "mistyped");
    setenv("HF_TOKEN", "hf_other", 1);
    assert_refused("gated", "main", "gated", "the account that accepted");
    assert_refused("missing", "main", "no such model", "the token may not read it");
    setenv("HF_TOKEN", "hf\ngood", 1);
    assert_refused("gated", "main", "HF_TOKEN", "letters");
    setenv("HF_TOKEN", " hf_good\n", 1);
    assert_downloads("gated");
    unsetenv("HF_TOKEN"); /* the file that `hf auth login` writes */
    snprintf(path, sizeof(path), "%s/token", home);
    assert_int_equal(file_write_atomic(path, "hf_good\n", 8, &err), 0);
    assert_downloads("private");
    assert_int_equal(requests("cdn", "hf_"), 0); /* the token stays with the hub */
    assert_true(requests("hub", "hf_good") > 0);
}

static void test_offline(void **state)
{
    (void)state;
    char here[MT_PATH], there[MT_PATH];
    struct err err;
    assert_int_equal(hub_model(here, "test/plain", "main", &err), 0);
    truncate(server.log, 0);
    setenv("HF_HUB_OFFLINE", "True", 1);
    assert_int_equal(hub_model(there, "test/plain", "main", &err), 0);
    assert_string_equal(here, there);
    assert_refused("breaks", "main", "HF_HUB_OFFLINE is set", "not in the cache");
    assert_int_equal(unlink(in_cache("plain", "snapshots/../refs/../../models--test--plain/refs/main")), 0);
    assert_refused("plain", "main", "HF_HUB_OFFLINE is set", "not in the cache");
    assert_int_equal(hub_model(there, "test/plain", strrchr(here, '/') + 1, &err), 0);
    char name[128];
    snprintf(name, sizeof(name), "snapshots/%s/%s", strrchr(here, '/') + 1, shard(1));
    assert_int_equal(unlink(in_cache("plain", name)), 0);
    assert_refused("plain", strrchr(here, '/') + 1, shard(1), "HF_HUB_OFFLINE is set");
    assert_int_equal(requests("", ""), 0);

    unsetenv("HF_HUB_OFFLINE"); /* the hub is back: one link is made anew; it is gone: the cache serves */
    assert_downloads("plain");
    assert_int_equal(requests("cdn", ""), 0);
    setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1);
    assert_downloads("plain");
    assert_refused("breaks", "main", "127.0.0.1", "given up");
}

static pid_t download_elsewhere(const char *id)
{
    char dir[MT_PATH];
    struct err err;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid) return pid;
    signal(SIGALRM, SIG_DFL);
    if (!hub_model(dir, id, "main", &err)) _exit(0);
    fprintf(stderr, "%s\n", err.msg);
    _exit(1);
}

static void test_two_processes(void **state)
{
    (void)state;
    const pid_t a = download_elsewhere("test/slow"), b = download_elsewhere("test/slow");
    int status[2];
    assert_int_equal(waitpid(a, &status[0], 0), a);
    assert_int_equal(waitpid(b, &status[1], 0), b);
    assert_int_equal(status[0], 0);
    assert_int_equal(status[1], 0);
    for (int i = 0; i < N_SHARDS; i++) assert_int_equal(requests("cdn", shard(i)), 1);
    assert_downloads("slow");
}

/* Bytes of every partial file of a shard, of which there are less than eight; their sum. */
static int64_t part_sizes(int64_t size[8])
{
    char path[MT_PATH];
    struct stat st;
    int n = 0;
    int64_t sum = 0;
    DIR *d = opendir(in_cache("slow", "blobs"));
    for (struct dirent *e; d && (e = readdir(d)) && n < 8;) {
        snprintf(path, sizeof(path), "%s/%s", in_cache("slow", "blobs"), e->d_name);
        if (!strstr(e->d_name, ".moetrain.incomplete") || strlen(e->d_name) < 64 || stat(path, &st)) continue;
        size[n++] = st.st_size;
        sum += st.st_size;
    }
    if (d) closedir(d);
    return sum;
}

/* Killed at fifty random moments: complete and verified in the end, every piece asked for from where the last ended. */
static void test_killed(void **state)
{
    (void)state;
    enum { KILLS = 50 };
    static int64_t size[KILLS][8];
    int64_t had = 0, have;
    int ranges = 0, status;
    double least_ms = 15; /* more where it does not suffice to get on */
    for (int k = 0; k < KILLS; k++) {
        const double ms = least_ms + 40 * rng_uniform(1, (uint64_t)k);
        const struct timespec pause = {.tv_sec = (long)ms / 1000, .tv_nsec = (long)(1e6 * ms) % 1000000000};
        const pid_t pid = download_elsewhere("test/slow");
        nanosleep(&pause, NULL);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        have = part_sizes(size[k]);
        if (have == had) least_ms += 10;
        had = have;
    }
    assert_downloads("slow");
    for (int i = 0; i < KILLS * 8; i++) {
        char range[64];
        const long long at = size[i / 8][i % 8];
        snprintf(range, sizeof(range), " bytes=%lld- ", at);
        if (at < 1000 || at >= 700000) continue; /* nothing came; a small file; all of it */
        if (!requests("cdn", range)) fail_msg("nobody asked from byte %lld on", at);
        ranges++;
    }
    print_message("killed %d times, gone on in the middle %d times\n", KILLS, ranges);
    assert_true(ranges >= 20);
}

static void test_data(void **state)
{
    (void)state;
    char path[MT_PATH];
    struct err err;
    char *files = hub_data("hub:test/rows/data/train.jsonl, /x.jsonl", &err);
    assert_non_null(files);
    assert_string_equal(strrchr(files, ','), ",/x.jsonl");
    files[strcspn(files, ",")] = 0;
    assert_says(files, "/hub/datasets--test--rows/snapshots/");
    const ssize_t n = readlink(files, path, sizeof(path) - 1);
    assert_true(n > 0);
    assert_int_equal(strncmp(path, "../../../blobs/", 15), 0);
    assert_true(file_exists(files));
    mem_free(files);
    assert_int_equal(requests("eval.jsonl", ""), 0);
    files = hub_data("hub:test/rows@main/data/*.jsonl", &err);
    assert_non_null(files);
    assert_non_null(strstr(files, "eval.jsonl,"));
    mem_free(files);
    files = hub_data("hub:test/one", &err);
    assert_non_null(files);
    assert_says(files, "/a b/100%20 \u00e9?#.jsonl");
    mem_free(files);
    setenv("HF_HUB_OFFLINE", "1", 1);
    files = hub_data("hub:test/one,hub:test/rows/data/eval.jsonl", &err);
    assert_non_null(files);
    mem_free(files);
    assert_null(hub_data("hub:test/rows/data/other.jsonl", &err));
    assert_says(err.msg, "HF_HUB_OFFLINE");
    unsetenv("HF_HUB_OFFLINE");
    static const char *const bad[][3] = {
        {"hub:rows", "OWNER/NAME", "rows"},
        {"hub:test/rows", "2 files", "data/eval.jsonl, data/train.jsonl"},
        {"hub:test/rows/train.jsonl", "no file is called", "data/train.jsonl"},
        {"hub:test/parquet", "does not show its rows: 404 ResponseNotFound", "Not found."},
        {"hub:test/rows@v9/x", "no branch", "v9"},
        {"hub:test/none", "no such data set", "test/none"}};
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_null(hub_data(bad[i][0], &err));
        assert_says(err.msg, bad[i][1]);
        assert_says(err.msg, bad[i][2]);
    }
}

/* Of a data set by its viewer: line i is row i, and it is a file of the cache as any other. */
static void assert_rows(const char *spec, const char *split, int64_t n_rows)
{
    char expected[128], target[MT_PATH], hex[HASH_HEX];
    struct hash h;
    struct err err;
    int64_t size, n = 0;
    char *path = hub_data(spec, &err), *end;
    if (!path) fail_msg("%s", err.msg);
    char *text = file_read(path, 1 << 24, &size, &err);
    assert_non_null(text);
    for (char *line = text; (end = strchr(line, '\n')); line = end + 1, n++) {
        snprintf(expected, sizeof(expected), "{\"text\": \"%s %d \u00e9\\n\", \"n\": %d, \"x\": [1.5, null]}", split,
                 (int)n, (int)n);
        *end = 0;
        assert_string_equal(line, expected);
        *end = '\n';
    }
    assert_int_equal(n, n_rows);
    const ssize_t length = readlink(path, target, sizeof(target) - 1);
    assert_true(length > 64);
    target[length] = 0;
    hash_init(&h);
    hash_add(&h, text, size);
    hash_hex(&h, hex);
    assert_string_equal(strrchr(target, '/') + 1, hex);
    mem_free(text);
    mem_free(path);
}

static void test_rows(void **state)
{
    (void)state;
    struct err err;
    assert_rows("hub:test/view-plain", "default/train", 950);
    assert_int_equal(requests("/rows?", "view-plain"), 10);
    truncate(server.log, 0); /* again: the list of files and that of splits */
    assert_rows("hub:test/view-plain:train", "default/train", 950);
    assert_int_equal(requests("/rows?", ""), 0);
    assert_int_equal(requests("", ""), 2);
    assert_rows("hub:test/view-splits@main:c/train", "c/train", 5);
    assert_rows("hub:test/view-splits:test", "a b/test", 5);
    assert_int_equal(requests("config=a%20b&split=test", ""), 1);
    char *weighted = hub_data("hub:test/view-splits:c/train*2.5,/x.jsonl", &err);
    assert_non_null(weighted);
    assert_says(weighted, "/snapshots/");
    assert_says(weighted, "/moetrain-rows/c/train.jsonl*2.5,/x.jsonl");
    mem_free(weighted);
    assert_rows("hub:test/view-breaks", "default/train", 950); /* 429, 502, a page broken off, a short page */
    assert_int_equal(requests("view-breaks", "offset=460&"), 1);
    assert_rows("hub:test/view-changing", "default/train", 1000);
    assert_rows("hub:test/view-shrunk", "default/train", 250);
    setenv("HF_TOKEN", "hf_good", 1);
    assert_rows("hub:test/view-gated", "default/train", 5);
    setenv("HF_HUB_OFFLINE", "1", 1);
    assert_rows("hub:test/view-plain", "default/train", 950);
    assert_rows("hub:test/view-splits:test", "a b/test", 5);
    assert_rows("hub:test/view-splits:c/train", "c/train", 5);
    assert_null(hub_data("hub:test/view-splits:a b/train", &err));
    assert_says(err.msg, "HF_HUB_OFFLINE");
}

static void test_rows_refused(void **state)
{
    (void)state;
    static const char *const bad[][3] = {
        {"splits", "more than one split", "as in hub:test/view-splits:CONFIG/SPLIT, of a b/train, a b/test, c/train"},
        {"splits:train", "more than one split", "a b/train, a b/test, c/train"},
        {"splits:c/test", "no such split", "a b/train, a b/test, c/train"},
        {"ever-changing", "had 9", "rows, now it has 9"},
        {"cut", "row 3 is too long", "truncated_cells"},
        {"partial", "only its first 5 rows", "test/view-partial"},
        {"huge", "has 5000000 rows", "too many"},
        {"unready", "ResponseNotReady: The server is busier", "given up after 3 tries"},
        {"gated", "gated: accept its terms at http://127.0.0.1", "set HF_TOKEN"},
        {"old", "shows the rows of commit 00000000", "main branch alone"},
        {"shifted", "row 101 came where 100", "test/view-shifted"},
        {"hole", "row 100 of 250 is not shown", "test/view-hole"},
        {"big", "501 TooBigContentError: Rows from parquet row groups", "test/view-big"},
        {"empty", "default/train has no rows", "test/view-empty"},
        {"odd", "rows of test/view-odd from 0 on", "JSON"},
        {"bare", "rows of test/view-bare from 0 on", "key `rows`: is missing"}};
    struct err err;
    for (int i = 0; i < MT_LEN(bad); i++) {
        char spec[128];
        snprintf(spec, sizeof(spec), "hub:test/view-%s", bad[i][0]);
        if (hub_data(spec, &err)) fail_msg("%s is taken", spec);
        assert_says(err.msg, bad[i][1]);
        assert_says(err.msg, bad[i][2]);
    }
    assert_int_equal(requests("/rows?", "view-shifted"), 3); /* what came before the break stays */
}

static pid_t rows_elsewhere(const char *spec)
{
    struct err err;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid) return pid;
    signal(SIGALRM, SIG_DFL);
    if (hub_data(spec, &err)) _exit(0);
    fprintf(stderr, "%s\n", err.msg);
    _exit(1);
}

/* Killed again and again, and two at once: no page is asked for twice but those under way at a kill. */
static void test_rows_killed(void **state)
{
    (void)state;
    enum { KILLS = 8, PAGES = 400, AT_ONCE = 4 };
    int status, asked = 0, killed = 0;
    for (int k = 0; k < KILLS; k++) {
        const struct timespec pause = {.tv_nsec = 60000000 + 3000000 * k};
        const pid_t pid = rows_elsewhere("hub:test/view-slow");
        nanosleep(&pause, NULL);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        killed += WIFSIGNALED(status);
    }
    const pid_t a = rows_elsewhere("hub:test/view-slow"), b = rows_elsewhere("hub:test/view-slow");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(waitpid(i ? b : a, &status, 0), i ? b : a);
        assert_int_equal(status, 0);
    }
    assert_rows("hub:test/view-slow", "default/train", 40000);
    for (int page = 0; page < PAGES; page++) {
        char offset[32];
        snprintf(offset, sizeof(offset), "offset=%d&", 100 * page);
        asked += requests("view-slow", offset);
    }
    print_message("killed %d times, %d pages asked for to have %d\n", killed, asked, PAGES);
    assert_true(killed == KILLS && asked <= PAGES + KILLS * AT_ONCE);
}

/* The executable: model and data by name, then the same without the hub, with the same loss. */
static void test_training(void **state)
{
    (void)state;
    static char first[sizeof(said.out)];
    const char *config = process_config("[eval]\nat_end = false\n");
    const char *const words[] = {config,
                                 "--set",
                                 "model.path=test/tiny",
                                 "--set",
                                 "data.train=hub:test/rows/data/train.jsonl",
                                 "--set",
                                 "data.eval=hub:test/rows/data/eval.jsonl",
                                 "--set",
                                 "log.every=0",
                                 NULL};
    assert_int_equal(process_run(words), 0);
    assert_says(said.err, "test/tiny: downloading");
    assert_says(said.err, "verified");
    strcpy(first, said.out);
    char text[4096];
    process_read(process_output(config, "adapter/adapter_config.json"), text, sizeof(text));
    assert_says(text, "\"test/tiny\"");
    setenv("HF_HUB_OFFLINE", "1", 1);
    assert_int_equal(RUN("eval", config, "--set", "model.path=test/tiny"), 0);
    assert_says(said.out, "\"loss\"");
    assert_int_equal(RUN("eval", config, "--set", "model.path=test/none"), 1);
    assert_says(said.err, "test/none");
}

/* The Python library finds what is in the cache, and what it put there is found. */
static void test_library(void **state)
{
    (void)state;
    static const char offline[] = "from huggingface_hub import snapshot_download as s, scan_cache_dir as c\n"
                                  "print(s('test/plain', local_files_only=True), end='')\n"
                                  "assert not c().warnings, c().warnings\n";
    static const char online[] = "from huggingface_hub import snapshot_download as s\n"
                                 "print(s('test/plain', ignore_patterns=['*.bin', 'metal/*', 'original/*']), end='')\n";
    char dir[MT_PATH], theirs[MT_PATH] = "", command[2048];
    struct err err;
    if (system("python3 -c 'import huggingface_hub' 2>/dev/null")) {
        print_message("skip: huggingface_hub is not installed in python3\n");
        skip();
    }
    for (int turn = 0; turn < 2; turn++) {
        fresh(NULL);
        if (turn == 0) {
            assert_int_equal(hub_model(dir, "test/plain", "main", &err), 0);
            assert_rows("hub:test/view-splits:c/train", "c/train", 5);
        }
        snprintf(command, sizeof(command), "python3 -c \"%s\"", turn ? online : offline);
        FILE *f = popen(command, "r");
        assert_non_null(f);
        theirs[fread(theirs, 1, sizeof(theirs) - 1, f)] = 0;
        assert_int_equal(pclose(f), 0);
        truncate(server.log, 0);
        if (turn == 1) assert_int_equal(hub_model(dir, "test/plain", "main", &err), 0);
        assert_string_equal(dir, theirs);
        assert_int_equal(requests("cdn", "") + requests("resolve", ""), 0);
    }
}

/* False, with words: what this machine lacks. */
static bool can_run(void)
{
    char dir[MT_PATH];
    struct err err;
    if (!start_server()) {
        print_message("skip: no python3, which tests/hub_server.py needs\n");
        return false;
    }
    fresh(NULL);
    if (!hub_model(dir, "test/plain", "main", &err) || !strstr(err.msg, "needs libcurl")) return true;
    print_message("skip: %s\n", err.msg);
    stop_server();
    return false;
}

int test_hub(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hashes),
        cmocka_unit_test_setup(test_local_paths, fresh),
        cmocka_unit_test_setup(test_model, fresh),
        cmocka_unit_test_setup(test_cache_places, fresh),
        cmocka_unit_test_setup(test_breaks, fresh),
        cmocka_unit_test_setup(test_waits, fresh),
        cmocka_unit_test_setup(test_lies, fresh),
        cmocka_unit_test_setup(test_refusals, fresh),
        cmocka_unit_test_setup(test_offline, fresh),
        cmocka_unit_test_setup(test_two_processes, fresh),
        cmocka_unit_test_setup(test_killed, fresh),
        cmocka_unit_test_setup(test_data, fresh),
        cmocka_unit_test_setup(test_rows, fresh),
        cmocka_unit_test_setup(test_rows_refused, fresh),
        cmocka_unit_test_setup(test_rows_killed, fresh),
        cmocka_unit_test_setup(test_training, fresh),
        cmocka_unit_test_setup(test_library, fresh),
    };
    if (!can_run()) return 0;
    const int failed = cmocka_run_group_tests_name("hub", tests, NULL, NULL);
    stop_server();
    mem_free(home);
    return failed;
}
