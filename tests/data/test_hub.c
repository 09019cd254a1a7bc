/* test_hub.c - downloads from tests/hub_server.py, a local server on which each repository has one fault. */
#define _GNU_SOURCE /* unshare */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "data/hub/hub_http.h"
#include "data/hub/hub_url.h"
#include "kernels/hash.h"
#include "tests/hub_server.h"
#include "tests/process.h"

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
    for (int64_t size = 0; size < 300; size++) { /* every length of the last block; with SHA instructions and without */
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

/* A path without hub: is local. No request is made, even if the files are missing. */
static void test_local_paths(void **state)
{
    (void)state;
    static const char *const missing[] = {"/nowhere", "a", "a/b/c", "../a", "a b/c", "models/gpt-oss-20b"};
    static const char *const bad[][2] = {{"hub:", "OWNER/NAME"},          {"hub:a", "OWNER/NAME"},
                                         {"hub:a/b/c", "OWNER/NAME"},     {"hub:-a/b", "OWNER/NAME"},
                                         {"hub:a/b@", "not a branch"},    {"hub:a/b@../c", "not a branch"},
                                         {"hub:a/b@v1", "model.revision"}};
    char dir[MT_PATH], name[MT_PATH];
    struct err err;
    setenv("HF_TOKEN", "hf_good", 1);
    assert_int_equal(hub_model(dir, hub_home, "main", NULL, &err), 0);
    assert_string_equal(dir, hub_home);
    for (int i = 0; i < MT_LEN(missing); i++) {
        assert_int_equal(hub_model(dir, missing[i], "main", NULL, &err), -1);
        assert_says(err.msg, missing[i]);
        assert_says(err.msg, "no such directory");
    }
    char here[MT_PATH], message[2 * MT_PATH];
    assert_non_null(getcwd(here, sizeof(here)));
    snprintf(message, sizeof(message),
             "models/gpt-oss-20b: no such directory; the path is relative to the current directory, %s; "
             "to download from huggingface.co write model.path = hub:OWNER/NAME",
             here);
    assert_string_equal(err.msg, message);
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_int_equal(hub_model(dir, bad[i][0], i == MT_LEN(bad) - 1 ? "v2" : "main", NULL, &err), -1);
        assert_says(err.msg, bad[i][1]);
    }
    assert_int_equal(hub_requests("", ""), 0);
    assert_string_equal(hub_model_name(name, "hub:openai/gpt-oss-20b@v1"), "openai/gpt-oss-20b");
    assert_string_equal(hub_model_name(name, "models/a@b"), "models/a@b");
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
    assert_int_equal(hub_model(dir, "hub:test/plain", "main", NULL, &err), 0);
    assert_verified(dir);
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    assert_int_equal(n, 5 + HUB_SHARDS); /* no README, no other format, no folder */
    file_list_free(names, n);
    assert_int_equal(hub_requests("README", "") + hub_requests(".bin", "") + hub_requests("original", ""), 0);
    process_read(hub_in_cache("plain", "refs/main"), text, sizeof(text));
    assert_string_equal(text, strrchr(dir, '/') + 1);
    assert_true(file_exists(hub_in_cache("plain", "../CACHEDIR.TAG")));

    assert_int_equal(truncate(hub_server.log, 0),
                     0); /* a second download makes one request for the list, or none when the revision is a commit */
    assert_int_equal(hub_model(dir, "hub:test/plain", "main", NULL, &err), 0);
    assert_int_equal(hub_requests("", ""), 1);
    char commit[41];
    strcpy(commit, strrchr(dir, '/') + 1);
    assert_int_equal(hub_model(dir, "hub:test/plain", commit, NULL, &err), 0);
    assert_int_equal(hub_requests("", ""), 1);
    assert_int_equal(hub_model(dir, "hub:test/plain", "refs/pr/1", NULL, &err), 0);
    assert_true(file_exists(hub_in_cache("plain", "refs/refs/pr/1")));
    assert_int_equal(hub_model(dir, "hub:test/plain@refs/pr/1", "main", NULL, &err), 0);
    assert_int_equal(hub_requests("refs%2Fpr%2F1", ""), 2);
    assert_int_equal(hub_requests("cdn", ""), 0);
}

static void test_cache_places(void **state)
{
    (void)state;
    char dir[MT_PATH], cache[MT_PATH];
    struct err err;
    snprintf(cache, sizeof(cache), "%s/elsewhere", hub_home);
    setenv("HF_HUB_CACHE", cache, 1);
    assert_int_equal(hub_model(dir, "hub:test/empty", "main", NULL, &err), 0); /* this repository has an empty file */
    assert_int_equal(strncmp(dir, cache, strlen(cache)), 0);
    assert_verified(dir);
    unsetenv("HF_HUB_CACHE");
    snprintf(cache, sizeof(cache), "%s/older", hub_home);
    setenv("HUGGINGFACE_HUB_CACHE", cache, 1);
    assert_int_equal(hub_model(dir, "hub:test/empty", "main", NULL, &err), 0);
    assert_int_equal(strncmp(dir, cache, strlen(cache)), 0);
}

/* moetrain sends the token only over https or to this machine, and not to the target of a redirect to another origin.
 */
static void test_token(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to;
        bool follow, same;
    } rows[] = {
        {"https://a.co/x", "https://a.co/y", true, true},      {"https://a.co/x", "https://A.CO", true, true},
        {"https://a.co/x", "https://b.co/y", true, false},     {"https://a.co/x", "https://a.co.evil/y", true, false},
        {"https://a.co/x", "https://a.co:444/y", true, false}, {"https://a.co/x", "https://a.co@evil/y", true, false},
        {"https://a.co/x", "http://a.co/y", false, false},     {"http://a.co/x", "https://a.co/y", true, false},
        {"http://a.co/x", "http://a.co/y", true, true},        {"http://a.co/x", "file:///etc/passwd", false, false},
        {"https://a.co/x", "ftp://a.co/y", false, false}};
    static const char *const loopback[] = {"localhost", "localhost:1/", "127.0.0.1:1", "127.9.9.9", "[::1]:1"};
    static const char *const far[] = {"hub.example", "127.0.0.1.example", "localhost.example:80",
                                      "127.0.0.1.",  "[::2]:1",           "1270.0.0.1"};
    char endpoint[128];
    struct hub_env env;
    struct err err;
    bool same;
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(hub_url_may_follow(rows[i].from, rows[i].to, &same), rows[i].follow);
        assert_int_equal(same, rows[i].same);
    }
    setenv("HF_TOKEN", "hf_good", 1);
    for (int i = 0; i < MT_LEN(loopback); i++) {
        snprintf(endpoint, sizeof(endpoint), "http://%s", loopback[i]);
        setenv("HF_ENDPOINT", endpoint, 1);
        assert_int_equal(hub_env_read(&env, &err), 0);
    }
    for (int i = 0; i < MT_LEN(far); i++) {
        snprintf(endpoint, sizeof(endpoint), "http://%s", far[i]);
        setenv("HF_ENDPOINT", endpoint, 1);
        assert_refused("plain", "main", "the token in HF_TOKEN would be sent unencrypted", far[i]);
    }
    unsetenv("HF_TOKEN");
    assert_int_equal(hub_env_read(&env, &err), 0);
}

/* Control characters in a server's text do not reach the terminal, neither in errors nor in log lines. */
static void test_escapes(void **state)
{
    (void)state;
    static const char *const repos[] = {"model.path=hub:test/escape", "model.path=hub:test/escape-503"};
    const char *config = process_config("");
    for (int i = 0; i < MT_LEN(repos); i++) {
        assert_int_equal(RUN("plan", config, "--set", repos[i]), 1);
        assert_says(said.err, i ? "HTTP 503: ?]0;owned?" : "]0;owned?");
        for (const char *p = said.err; *p; p++)
            if ((unsigned char)*p > '~' || (*p < ' ' && *p != '\n')) fail_msg("byte %d in: %s", *p, said.err);
    }
}

/* With a libcurl that lacks an option, no request is sent. */
static void test_old_libcurl(void **state)
{
    (void)state;
    const char *config = process_config("");
    if (!file_exists(MT_OLD_CURL "/libcurl.so.4")) {
        print_message("skip: the build folder is not on this machine\n");
        skip();
    }
    setenv("LD_LIBRARY_PATH", MT_OLD_CURL, 1);
    const int rc = RUN("plan", config, "--set", "model.path=hub:test/tiny");
    unsetenv("LD_LIBRARY_PATH");
    assert_int_equal(rc, 1);
    assert_says(said.err, "this machine's libcurl lacks an option that is needed (unknown option)");
    assert_int_equal(hub_requests("", ""), 0);
}

/* A list of files that the server sends slowly and without end fails at the time limit. */
static void test_slow_list(void **state)
{
    (void)state;
    const double start = clock_ms();
    const int64_t limit_ms = hub_http_limit_ms;
    hub_http_limit_ms = 200;
    assert_refused("drip", "main", "test/drip: ", "gave up after 3 tries");
    hub_http_limit_ms = limit_ms;
    assert_true(clock_ms() - start < 8000);
}

static void test_broken_connections(void **state)
{
    (void)state;
    char line[256];
    assert_downloads("breaks");
    for (int i = 0; i < HUB_SHARDS; i++) /* 300 KB; the connection breaks every 70000 bytes */
        for (int at = 70000; at < 300000; at += 70000) {
            snprintf(line, sizeof(line), "%s bytes=%d- ", hub_shard(i), at);
            assert_int_equal(hub_requests("cdn GET /models/test/breaks/", line), 1);
        }
    assert_downloads("no-range");
    assert_downloads("damaged-once");
    assert_downloads("expired");
    assert_int_equal(hub_requests("hub GET /test/expired/resolve", hub_shard(0)),
                     2); /* the expired address is not requested again */
    assert_refused("no-range-breaks", "main", "cannot resume in the middle", "3 times");
    assert_refused("lying-range", "main", "asked for the bytes from 70000", "from 70001");
}

static void test_retry_delays(void **state)
{
    (void)state;
    double start = clock_ms();
    assert_downloads("throttled");
    assert_true(clock_ms() - start >= 2000); /* Retry-After: 0 and RateLimit: 0, each plus one second */
    assert_int_equal(hub_requests("cdn GET /models/test/throttled", hub_shard(2)), 2);
    assert_downloads("flaky");
    start = clock_ms();
    assert_refused("down", "main", "HTTP 503", "gave up after 3 tries");
    assert_true(clock_ms() - start >= 1000);
}

static void test_wrong_bytes(void **state)
{
    (void)state;
    assert_refused("wrong-size", "main", "the hub lists 300010 bytes, the server has 300000", hub_shard(0));
    assert_false(file_exists(hub_in_cache("wrong-size", "refs/main")));
    assert_refused("endless", "main", "more than the 299000 bytes", hub_shard(0));
    assert_refused("wrong-hash", "main", "the hash is ", ", 3 times: ");
    assert_refused("huge", "main", "1024 PiB must still be downloaded", "make room");
    assert_refused("evil", "main", "../../evil", "not a safe path");
    assert_refused("loop", "main", "redirects", "test/loop/model-0000");
    assert_refused("no-shard", "main", hub_shard(1), "its index names");
    assert_refused("no-weights", "main", "model.safetensors", "safetensors is the format");
    assert_refused("adapter", "main", "has no config.json", ": an adapter, not a model");
    assert_refused("gguf", "main", "has no config.json", "but GGUF files, which are not supported");
}

static void test_refusals(void **state)
{
    (void)state;
    char path[MT_PATH];
    struct err err;
    assert_refused("gated", "main", "gated: accept its terms at http://127.0.0.1", "set HF_TOKEN");
    assert_refused("private", "main", "no such model, or it is private", "set HF_TOKEN");
    assert_refused("missing", "main", "test/missing: ", "no such model");
    assert_refused("disabled", "main", "disabled", "Access to this resource");
    assert_refused("plain", "v9", "no branch, tag or commit \"v9\"", "correct the revision");
    assert_refused("missing", "main", "check the spelling", "hf auth login");
    assert_refused("plain", "../x", "\"../x\"", "not a branch");
    setenv("HF_TOKEN", "hf_bad", 1);
    assert_refused("plain", "main", "token in HF_TOKEN", "mistyped");
    setenv("HF_TOKEN", "hf_other", 1);
    assert_refused("gated", "main", "gated", "the account that accepted");
    assert_refused("missing", "main", "no such model", "whether the token may read it");
    setenv("HF_TOKEN", "hf\ngood", 1);
    assert_refused("gated", "main", "HF_TOKEN", "letters");
    setenv("HF_TOKEN", " hf_good\n", 1);
    assert_downloads("gated");
    unsetenv("HF_TOKEN"); /* now the token is in the file that `hf auth login` writes */
    snprintf(path, sizeof(path), "%s/token", hub_home);
    assert_int_equal(file_write_atomic(path, "hf_good\n", 8, &err), 0);
    assert_downloads("private");
    assert_int_equal(hub_requests("cdn", "hf_"), 0); /* the token is not sent to the other host */
    assert_true(hub_requests("hub", "hf_good") > 0);
}

static void test_offline(void **state)
{
    (void)state;
    char here[MT_PATH], there[MT_PATH];
    struct err err;
    assert_int_equal(hub_model(here, "hub:test/plain", "main", NULL, &err), 0);
    assert_int_equal(truncate(hub_server.log, 0), 0);
    setenv("HF_HUB_OFFLINE", "True", 1);
    assert_int_equal(hub_model(there, "hub:test/plain", "main", NULL, &err), 0);
    assert_string_equal(here, there);
    assert_refused("breaks", "main", "HF_HUB_OFFLINE is set", "; unset it to download, or");
    assert_int_equal(unlink(hub_in_cache("plain", "snapshots/../refs/../../models--test--plain/refs/main")), 0);
    assert_refused("plain", "main", "HF_HUB_OFFLINE is set", "not in the cache");
    assert_int_equal(hub_model(there, "hub:test/plain", strrchr(here, '/') + 1, NULL, &err), 0);
    char name[128];
    snprintf(name, sizeof(name), "snapshots/%s/%s", strrchr(here, '/') + 1, hub_shard(1));
    assert_int_equal(unlink(hub_in_cache("plain", name)), 0);
    assert_refused("plain", strrchr(here, '/') + 1, hub_shard(1), "HF_HUB_OFFLINE is set");
    assert_int_equal(hub_requests("", ""), 0);

    unsetenv("HF_HUB_OFFLINE"); /* online, moetrain restores the deleted link; without the hub it uses the cache */
    assert_downloads("plain");
    assert_int_equal(hub_requests("cdn", ""), 0);
    setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1);
    assert_downloads("plain");
    assert_refused("breaks", "main", "127.0.0.1", "check network, proxy and HF_ENDPOINT");
}

static pid_t download_elsewhere(const char *id)
{
    char dir[MT_PATH];
    struct err err;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid) return pid;
    signal(SIGALRM, SIG_DFL);
    if (!hub_model(dir, id, "main", NULL, &err)) _exit(0);
    fprintf(stderr, "%s\n", err.msg);
    _exit(1);
}

static void test_two_processes(void **state)
{
    (void)state;
    const pid_t a = download_elsewhere("hub:test/slow"), b = download_elsewhere("hub:test/slow");
    int status[2];
    assert_int_equal(waitpid(a, &status[0], 0), a);
    assert_int_equal(waitpid(b, &status[1], 0), b);
    assert_int_equal(status[0], 0);
    assert_int_equal(status[1], 0);
    for (int i = 0; i < HUB_SHARDS; i++) assert_int_equal(hub_requests("cdn", hub_shard(i)), 1);
    assert_downloads("slow");
}

/* Sets the size of each partial file of a hub_shard (fewer than eight); returns their sum. */
static int64_t part_sizes(int64_t size[8])
{
    char path[MT_PATH];
    struct stat st;
    int n = 0;
    int64_t sum = 0;
    DIR *d = opendir(hub_in_cache("slow", "blobs"));
    for (struct dirent *e; d && (e = readdir(d)) && n < 8;) {
        snprintf(path, sizeof(path), "%s/%s", hub_in_cache("slow", "blobs"), e->d_name);
        if (!strstr(e->d_name, ".moetrain.incomplete") || strlen(e->d_name) < 64 || stat(path, &st)) continue;
        size[n++] = st.st_size;
        sum += st.st_size;
    }
    if (d) closedir(d);
    return sum;
}

/* A download killed at fifty random moments completes and is verified. Every request begins where the partial file
 * ended. */
static void test_killed(void **state)
{
    (void)state;
    enum { KILLS = 50 };
    static int64_t size[KILLS][8];
    int64_t had = 0, have;
    int ranges = 0, status;
    double least_ms = 15; /* grows when a start made no progress */
    for (int k = 0; k < KILLS; k++) {
        const double ms = least_ms + 40 * rng_uniform(1, (uint64_t)k);
        const struct timespec pause = {.tv_sec = (long)ms / 1000, .tv_nsec = (long)(1e6 * ms) % 1000000000};
        const pid_t pid = download_elsewhere("hub:test/slow");
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
        if (at < 1000 || at >= 700000) continue; /* nothing received, a small file, or a complete file */
        if (!hub_requests("cdn", range)) fail_msg("no request from byte %lld on", at);
        ranges++;
    }
    print_message("killed %d times, resumed within a file %d times\n", KILLS, ranges);
    assert_true(ranges >= 20);
}

/* Starts a process that fills the disk as soon as a shard has a partial file. */
static pid_t fill_disk(const char *path)
{
    static char zeros[1 << 16];
    const struct timespec pause = {.tv_nsec = 1000000};
    int64_t size[8];
    fflush(NULL);
    const pid_t pid = fork();
    if (pid) return pid;
    while (part_sizes(size) < 5000) nanosleep(&pause, NULL);
    const int fd = open(path, O_WRONLY | O_CREAT, 0600);
    while (write(fd, zeros, sizeof(zeros)) > 0) continue;
    _exit(0);
}

static const char *in_blobs(const char *name)
{
    char below[MT_PATH];
    snprintf(below, sizeof(below), "blobs/%s", name);
    return hub_in_cache("slow", below);
}

/* Downloads to a disk of 4 MiB, mounted at HF_HOME for this process alone. Returns 0, or the number of the check that
 * failed, as exit code. */
static int use_small_disk(void)
{
    char dir[MT_PATH], filler[MT_PATH], **names;
    int64_t size[8] = {0}, n;
    int ranges = 0;
    struct err err;
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", hub_home, "tmpfs", 0, "size=4m"))
        return printf("skip: a full disk below the hub's cache: mount: %s\n", strerror(errno)) < 0;
    snprintf(filler, sizeof(filler), "%s/filler", hub_home);
    const pid_t pid = fill_disk(filler);
    const int rc = hub_model(dir, "hub:test/slow", "main", NULL, &err);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    if (!rc) return 1;
    fprintf(stderr, "%s\n", err.msg);
    if (!strstr(err.msg, "No space left on device, 0 B is free: make room, or set HF_HOME")) return 2;
    part_sizes(size);
    if (file_list(hub_in_cache("slow", "blobs"), &names, &n, &err)) return 3;
    for (int64_t i = 0; i < n; i++) /* a file with its final name is complete */
        if (strlen(names[i]) == 64 && file_size(in_blobs(names[i])) < 300000) return 4;
    file_list_free(names, n);
    if (file_exists(hub_in_cache("slow", "refs/main")) || unlink(filler)) return 5;
    if (hub_model(dir, "hub:test/slow", "main", NULL, &err)) return 6;
    assert_verified(dir);
    for (int i = 0; i < 8; i++) {
        char range[64];
        snprintf(range, sizeof(range), " bytes=%lld- ", (long long)size[i]);
        ranges += size[i] > 0 && hub_requests("cdn", range);
    }
    return ranges ? 0 : 7;
}

/* On a full disk the error gives the free space, no partial file has a final name, and the next start resumes. */
static void test_full_disk(void **state)
{
    (void)state;
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) {
        signal(SIGALRM, SIG_DFL);
        alarm(60);
        const int code = use_small_disk();
        fflush(NULL);
        _exit(code);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
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
    assert_int_equal(hub_requests("eval.jsonl", ""), 0);
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
        {"hub:test/rows", "2 JSONL files", "data/eval.jsonl, data/train.jsonl"},
        {"hub:test/rows/train.jsonl", "no file matches", "data/train.jsonl"},
        {"hub:test/parquet", "does not show its rows: 404 ResponseNotFound", "Not found."},
        {"hub:test/rows@v9/x", "no branch", "v9"},
        {"hub:test/none", "no such data set", "test/none"}};
    for (int i = 0; i < MT_LEN(bad); i++) {
        assert_null(hub_data(bad[i][0], &err));
        assert_says(err.msg, bad[i][1]);
        assert_says(err.msg, bad[i][2]);
    }
}

/* Rows downloaded from the data set viewer are an ordinary file of the cache: line i is row i. */
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
    assert_int_equal(hub_requests("/rows?", "view-plain"), 10);
    assert_int_equal(truncate(hub_server.log, 0),
                     0); /* a second download requests only the lists of files and of splits */
    assert_rows("hub:test/view-plain:train", "default/train", 950);
    assert_int_equal(hub_requests("/rows?", ""), 0);
    assert_int_equal(hub_requests("", ""), 2);
    assert_rows("hub:test/view-splits@main:c/train", "c/train", 5);
    assert_rows("hub:test/view-splits:test", "a b/test", 5);
    assert_int_equal(hub_requests("config=a%20b&split=test", ""), 1);
    char *weighted = hub_data("hub:test/view-splits:c/train*2.5,/x.jsonl", &err);
    assert_non_null(weighted);
    assert_says(weighted, "/snapshots/");
    assert_says(weighted, "/moetrain-rows/c/train.jsonl*2.5,/x.jsonl");
    mem_free(weighted);
    assert_rows("hub:test/view-breaks", "default/train",
                950); /* 429, 502, a truncated page, a page with too few rows */
    assert_int_equal(hub_requests("view-breaks", "offset=460&"), 1);
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
        {"cut", "the viewer truncates row 3", "truncated_cells"},
        {"partial", "only its first 5 rows", "test/view-partial"},
        {"huge", "has 5000000 rows", "too many"},
        {"unready", "ResponseNotReady: The server is busier", "gave up after 3 tries"},
        {"gated", "gated: accept its terms at http://127.0.0.1", "set HF_TOKEN"},
        {"old", "shows the rows of commit 00000000", "only the main branch"},
        {"shifted", "received row 101 instead of row 100", "test/view-shifted"},
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
    assert_int_equal(hub_requests("/rows?", "view-shifted"), 3); /* rows received before the error are kept */
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

/* After repeated kills, and with two processes, no page is requested twice except those in flight at a kill. */
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
        asked += hub_requests("view-slow", offset);
    }
    print_message("killed %d times, %d pages asked for to have %d\n", killed, asked, PAGES);
    assert_true(killed == KILLS && asked <= PAGES + KILLS * AT_ONCE);
}

/* Trains with model and data from the hub, then offline from the cache, with the same loss. */
static void test_training(void **state)
{
    (void)state;
    static char first[sizeof(said.out)];
    const char *config = process_config("[eval]\nat_end = false\n");
    const char *const words[] = {config,
                                 "--set",
                                 "model.path=hub:test/tiny",
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
    assert_int_equal(RUN("eval", config, "--base", "--set", "model.path=hub:test/tiny"), 0);
    assert_says(said.out, "\"loss\"");
    assert_int_equal(RUN("eval", config, "--base", "--set", "model.path=hub:test/none"), 1);
    assert_says(said.err, "moetrain: error: model.path = hub:test/none: HF_HUB_OFFLINE is set: ");
}

/* Targets that the model lacks, and an unknown family, are reported when config.json has been read: no data and no
 * weights are requested. `eval` reads targets from an adapter. */
static void test_early_refusals(void **state)
{
    (void)state;
    const char *config = process_config("[eval]\nmax_batches = 1\n");
    const char *const data[] = {"data.train=hub:test/rows/data/train.jsonl", "data.eval=hub:test/rows/data/eval.jsonl"};
    char dir[MT_PATH];
    struct err err;
    for (int i = 0; i < 2; i++) { /* the second time with the small files in the cache */
        assert_int_equal(RUN(config, "--set", "model.path=hub:test/tiny", "--set", "lora.targets=q_a_proj,experts",
                             "--set", data[0], "--set", data[1]),
                         1);
        assert_says(said.err, "moetrain: error: lora.targets: \"q_a_proj\" ");
        assert_int_equal(hub_requests("/config.json ", "/resolve/"), 1);
    }
    assert_int_equal(RUN("eval", config, "--base", "--set", "model.path=hub:test/plain"), 1); /* names no family */
    assert_says(said.err, "model_type");
    assert_int_equal(hub_requests(".safetensors ", "") + hub_requests("datasets", ""), 0);
    assert_int_equal(RUN("eval", config, "--adapter", fixture("parity/case_a/adapter_final"), "--set",
                         "model.path=hub:test/tiny", "--set", "lora.targets=q_a_proj", "--set", data[0], "--set",
                         data[1]),
                     0);
    if (hub_model(dir, "hub:test/tiny", "main", NULL, &err)) fail_msg("%s", err.msg);
    assert_verified(dir);
}

/* configs/gptoss_20b_qlora.ini as shipped, with a smaller step for the CPU. */
static void test_shipped_configuration(void **state)
{
    (void)state;
    char dir[MT_PATH], out[MT_PATH + 16], config[MT_PATH], text[4096];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    snprintf(out, sizeof(out), "output.dir=%s", dir);
    snprintf(config, sizeof(config), "%s", fixture("../../configs/gptoss_20b_qlora.ini"));
    if (!file_exists(config)) {
        print_message("skip: configs/ is not beside the fixtures\n");
        skip();
    }
    if (RUN(config, "--set", "train.device=cpu", "--set", "train.steps=1", "--set", "train.grad_accum=1", "--set",
            "data.seq_len=256", "--set", "eval.max_batches=1", "--set", out))
        fail_msg("%s", said.err);
    strcat(dir, "/adapter/adapter_config.json");
    process_read(dir, text, sizeof(text));
    assert_says(text, "\"base_model_name_or_path\": \"openai/gpt-oss-20b\"");
}

int test_hub(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hashes),
        cmocka_unit_test_setup(test_local_paths, hub_fresh),
        cmocka_unit_test_setup(test_model, hub_fresh),
        cmocka_unit_test_setup(test_cache_places, hub_fresh),
        cmocka_unit_test_setup(test_token, hub_fresh),
        cmocka_unit_test_setup(test_escapes, hub_fresh),
        cmocka_unit_test_setup(test_old_libcurl, hub_fresh),
        cmocka_unit_test_setup(test_slow_list, hub_fresh),
        cmocka_unit_test_setup(test_broken_connections, hub_fresh),
        cmocka_unit_test_setup(test_retry_delays, hub_fresh),
        cmocka_unit_test_setup(test_wrong_bytes, hub_fresh),
        cmocka_unit_test_setup(test_refusals, hub_fresh),
        cmocka_unit_test_setup(test_offline, hub_fresh),
        cmocka_unit_test_setup(test_two_processes, hub_fresh),
        cmocka_unit_test_setup(test_killed, hub_fresh),
        cmocka_unit_test_setup(test_full_disk, hub_fresh),
        cmocka_unit_test_setup(test_data, hub_fresh),
        cmocka_unit_test_setup(test_rows, hub_fresh),
        cmocka_unit_test_setup(test_rows_refused, hub_fresh),
        cmocka_unit_test_setup(test_rows_killed, hub_fresh),
        cmocka_unit_test_setup(test_training, hub_fresh),
        cmocka_unit_test_setup(test_early_refusals, hub_fresh),
        cmocka_unit_test_setup(test_shipped_configuration, hub_fresh),
    };
    if (!hub_can_run()) return 0;
    const int failed = cmocka_run_group_tests_name("hub", tests, NULL, NULL);
    hub_stop();
    return failed;
}
