/* test_hub_cache.c - caches written by versions of the Python library; damage, malicious links, downloads of headers
 * only. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "data/json/json.h"
#include "kernels/hash.h"
#include "tests/hub_server.h"
#include "tests/process.h"

#define COMMIT "0123456789abcdef0123456789abcdef01234567"

static void join(char path[MT_PATH], const char *dir, const char *name)
{
    struct err err;
    if (str_format(path, MT_PATH, &err, "path", "%s/%s", dir, name)) fail_msg("%s", err.msg);
}

static char *get_text(const char *path, int64_t *size)
{
    struct err err;
    char *text = file_read(path, 1 << 24, size, &err);
    if (!text) fail_msg("%s", err.msg);
    return text;
}

static void put_text(const char *path, const void *text, int64_t size)
{
    struct err err;
    if (file_write_atomic(path, text, size, &err)) fail_msg("%s", err.msg);
}

/* SHA-256 of each shard. */
static char known[HUB_SHARDS][HASH_HEX];

static void hash_shard(char hex[HASH_HEX], const char *dir, int i)
{
    char path[MT_PATH];
    int64_t size;
    struct hash h;
    join(path, dir, hub_shard(i));
    char *text = get_text(path, &size);
    hash_init(&h);
    hash_add(&h, text, size);
    hash_hex(&h, hex);
    mem_free(text);
}

static void assert_content(const char *dir)
{
    char hex[HASH_HEX];
    for (int i = 0; i < HUB_SHARDS; i++) {
        hash_shard(hex, dir, i);
        assert_string_equal(hex, known[i]);
    }
}

static void download(char dir[MT_PATH])
{
    struct err err;
    if (hub_model(dir, "hub:test/plain", "main", NULL, &err)) fail_msg("%s", err.msg);
}

/* ---- layouts */

enum layout {
    V0,       /* 0.36: links to blobs named by their hashes; a list of files known to be missing */
    V2,       /* 1.x, 2.x: as V0, with the list of the commit's files */
    MIRROR,   /* a download from a mirror: blobs have the mirror's ETags as names */
    COPIES,   /* file system without links: the snapshot has the files themselves */
    ABSOLUTE, /* links with absolute paths, as in the first versions */
    LAYOUTS
};

static void make_folder(const char *path)
{
    struct err err;
    if (file_make_dirs(path, &err)) fail_msg("%s", err.msg);
}

/* Changes a snapshot file that moetrain wrote to the layout of another program. */
static void relay_file(enum layout layout, const char *dir, const char *name)
{
    char path[MT_PATH], blob[MT_PATH], target[MT_PATH], other[MT_PATH], hash[128];
    join(path, dir, name);
    const ssize_t n = readlink(path, target, sizeof(target) - 1);
    assert_true(n > 0);
    target[n] = 0;
    snprintf(hash, sizeof(hash), "%.100s", strrchr(target, '/') + 1);
    snprintf(blob, sizeof(blob), "%s", hub_in_cache("plain", "blobs/"));
    strcat(blob, hash);
    if (layout == V0 || layout == V2) return;
    assert_int_equal(unlink(path), 0);
    if (layout == COPIES) {
        assert_int_equal(rename(blob, path), 0);
    } else if (layout == ABSOLUTE) {
        assert_int_equal(symlink(blob, path), 0);
    } else {
        snprintf(target, sizeof(target), "xet-%.32s", hash);
        join(other, hub_in_cache("plain", "blobs"), target);
        assert_int_equal(rename(blob, other), 0);
        snprintf(target, sizeof(target), "../../blobs/xet-%.32s", hash);
        assert_int_equal(symlink(target, path), 0);
    }
}

/* Changes a download of moetrain to a layout and deletes moetrain's additional files. */
static void relay(enum layout layout, const char *dir)
{
    char **names, path[MT_PATH];
    const char *commit = strrchr(dir, '/') + 1;
    int64_t n;
    struct err err;
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) relay_file(layout, dir, names[i]);
    file_list_free(names, n);
    assert_int_equal(unlink(hub_in_cache("plain", "moetrain-verified")), 0);
    assert_int_equal(file_remove_tree(hub_in_cache("plain", "../.locks"), &err), 0);
    if (layout == V0) {
        assert_int_equal(unlink(hub_in_cache("plain", "../CACHEDIR.TAG")), 0);
        snprintf(path, sizeof(path), "%s/%s", hub_in_cache("plain", ".no_exist"), commit);
        make_folder(path);
        strcat(path, "/adapter_config.json");
        put_text(path, "", 0);
    } else {
        make_folder(hub_in_cache("plain", "trees"));
        snprintf(path, sizeof(path), "%s/%s.json", hub_in_cache("plain", "trees"), commit);
        put_text(path, "{\"format_version\": 1, \"files\": {}}", 34);
    }
}

/* With every layout, online and offline: no downloads, and the files have the right content. */
static void test_layouts(void **state)
{
    (void)state;
    char dir[MT_PATH], again[MT_PATH];
    for (int layout = 0; layout < LAYOUTS; layout++) {
        hub_fresh(NULL);
        download(dir);
        for (int i = 0; i < HUB_SHARDS; i++) hash_shard(known[i], dir, i);
        relay((enum layout)layout, dir);
        for (int offline = 0; offline < 2; offline++) {
            assert_int_equal(truncate(hub_server.log, 0), 0);
            if (offline) setenv("HF_HUB_OFFLINE", "1", 1);
            download(again);
            assert_string_equal(again, dir);
            assert_content(dir);
            if (hub_requests("cdn", "") + hub_requests("resolve", ""))
                fail_msg("layout %d is downloaded again", layout);
        }
        /* for a commit that is complete in the cache, no request */
        struct err err;
        unsetenv("HF_HUB_OFFLINE");
        assert_int_equal(truncate(hub_server.log, 0), 0);
        assert_int_equal(hub_model(again, "hub:test/plain", strrchr(dir, '/') + 1, NULL, &err), 0);
        assert_int_equal(hub_requests("", ""), 0);
    }
}

/* The Python library finds the files in the cache, and moetrain finds the library's. (Version 0.36 warns about
 * CACHEDIR.TAG, which 1.0 and later write themselves.) */
static void test_library(void **state)
{
    (void)state;
    static const char offline[] = "from huggingface_hub import snapshot_download as s, scan_cache_dir as c\n"
                                  "print(s('test/plain', local_files_only=True), end='')\n"
                                  "w = [x for x in c().warnings if 'CACHEDIR.TAG' not in str(x)]\n"
                                  "assert not w, w\n";
    static const char online[] = "from huggingface_hub import snapshot_download as s\n"
                                 "print(s('test/plain', ignore_patterns=['*.bin', 'metal/*', 'original/*']), end='')\n";
    bool headers;
    char dir[MT_PATH], head[MT_PATH], theirs[MT_PATH] = "", command[2048];
    struct err err;
    if (system("python3 -c 'import huggingface_hub' 2>/dev/null")) {
        print_message("skip: huggingface_hub is not installed in python3\n");
        skip();
    }
    for (int turn = 0; turn < 2; turn++) {
        hub_fresh(NULL);
        if (turn == 0) {
            assert_int_equal(hub_model(dir, "hub:test/plain", "main", NULL, &err), 0);
            for (int i = 0; i < HUB_SHARDS; i++) hash_shard(known[i], dir, i);
            mem_free(hub_data("hub:test/view-splits:c/train", &err));
            assert_int_equal(hub_model_headers(head, "hub:test/head", "main", &headers, &err), 0);
        }
        snprintf(command, sizeof(command), "python3 -c \"%s\"", turn ? online : offline);
        FILE *f = popen(command, "r");
        assert_non_null(f);
        theirs[fread(theirs, 1, sizeof(theirs) - 1, f)] = 0;
        assert_int_equal(pclose(f), 0);
        assert_int_equal(truncate(hub_server.log, 0), 0);
        if (turn == 1) assert_int_equal(hub_model(dir, "hub:test/plain", "main", NULL, &err), 0);
        if (turn == 1) assert_content(dir);
        assert_string_equal(dir, theirs);
        assert_int_equal(hub_requests("cdn", "") + hub_requests("resolve", ""), 0);
    }
}

/* ---- verification of files */

/* Changes a byte in the middle of a blob; quiet: restores its modification time. */
static void damage(const char *dir, int i, bool quiet)
{
    char path[MT_PATH];
    struct stat st;
    join(path, dir, hub_shard(i));
    assert_int_equal(stat(path, &st), 0);
    const int fd = open(path, O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "?!", 2, 1000), 2);
    const struct timespec later[2] = {{.tv_sec = st.st_atime}, {.tv_sec = st.st_mtime + 5}},
                          same[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(futimens(fd, quiet ? same : later), 0);
    close(fd);
}

static void test_damage(void **state)
{
    (void)state;
    char dir[MT_PATH], path[MT_PATH];
    struct err err;
    download(dir);
    for (int i = 0; i < HUB_SHARDS; i++) hash_shard(known[i], dir, i);
    damage(dir, 1, true); /* the modification time is equal, so the file is not hashed again */
    assert_int_equal(truncate(hub_server.log, 0), 0);
    download(dir);
    assert_int_equal(hub_requests("cdn", ""), 0);
    damage(dir, 1, false); /* the modification time differs */
    setenv("HF_HUB_OFFLINE", "1", 1);
    assert_refused("plain", "main", "is damaged or was changed", known[1]);
    unsetenv("HF_HUB_OFFLINE");
    download(dir);
    assert_content(dir);
    assert_int_equal(hub_requests("cdn", ""), 1);
    snprintf(path, sizeof(path), "blobs/%s.damaged", known[1]);
    assert_true(file_exists(hub_in_cache("plain", path)));
    damage(dir, 2, true); /* a file of another program, not hashed before */
    assert_int_equal(unlink(hub_in_cache("plain", "moetrain-verified")), 0);
    assert_int_equal(hub_model(dir, "hub:test/plain", strrchr(dir, '/') + 1, NULL, &err), 0);
    assert_content(dir);
    assert_int_equal(hub_requests("cdn", ""), 2);
}

/* ---- entries made by other users */

static void plant(const char *victim, const char *part, bool hard)
{
    char text[16];
    put_text(victim, "precious", 8);
    assert_int_equal(hard ? link(victim, part) : symlink(victim, part), 0);
    process_read(victim, text, sizeof(text));
    assert_string_equal(text, "precious");
}

/* Another user of a shared cache has put a link at the path of the partial file. Its target stays unchanged. */
static void test_planted_links(void **state)
{
    (void)state;
    char dir[MT_PATH], part[MT_PATH], victim[MT_PATH], text[16];
    struct stat st;
    struct err err;
    for (int hard = 0; hard < 2; hard++) {
        hub_fresh(NULL);
        download(dir);
        hash_shard(known[0], dir, 0);
        assert_int_equal(file_remove_tree(dir, &err), 0);
        snprintf(part, sizeof(part), "%s/%s", hub_in_cache("plain", "blobs"), known[0]);
        assert_int_equal(unlink(part), 0);
        strcat(part, ".moetrain.incomplete");
        snprintf(victim, sizeof(victim), "%s/victim", hub_home);
        plant(victim, part, hard);
        download(dir);
        process_read(victim, text, sizeof(text));
        assert_string_equal(text, "precious");
        snprintf(part, sizeof(part), "%s/%s", hub_in_cache("plain", "blobs"), known[0]);
        assert_int_equal(lstat(part, &st), 0);
        assert_true(S_ISREG(st.st_mode) && st.st_nlink == 1);
        assert_verified(dir);
    }
}

/* Links to themselves or to a parent folder are an error. */
static void test_link_loops(void **state)
{
    (void)state;
    static const char *const targets[] = {"loop", ".", ".."};
    char dir[MT_PATH], path[MT_PATH], at[MT_PATH];
    struct err err;
    download(dir);
    setenv("HF_HUB_OFFLINE", "1", 1);
    for (int i = 0; i < MT_LEN(targets); i++) {
        join(path, dir, "loop");
        assert_int_equal(symlink(targets[i], path), 0);
        assert_int_equal(hub_model(at, "hub:test/plain", "main", NULL, &err), -1);
        assert_says(err.msg, "/loop");
        assert_says(err.msg, "link");
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(hub_model(at, "hub:test/plain", "main", NULL, &err), 0);
}

/* ---- headers only */

/* Bytes of the bodies that the server sent for a repository test/head... */
static int64_t logged_bytes(void)
{
    char line[1024];
    long long n, sum = 0;
    FILE *f = fopen(hub_server.log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f))
        if (sscanf(line, "bytes %lld", &n) == 1) sum += n;
    fclose(f);
    return sum;
}

/* Waits for the log: the server logs an answer's bytes at its end, which may be after the client disconnects. */
static int64_t sent_bytes(void)
{
    int64_t sum = -1, now;
    for (int i = 0; i < 100 && sum != (now = logged_bytes()); i++) {
        sum = now;
        usleep(100000);
    }
    return sum;
}

/* For a plan, moetrain downloads only the headers of 2.6 MB of weights, also from a server without range requests. The
 * plan equals that from the complete weights, and training does not take the headers for complete weights. */
static void test_headers(void **state)
{
    (void)state;
    static const char *const repos[] = {"model.path=hub:test/head", "model.path=hub:test/head-no-range",
                                        "model.path=hub:test/head-no-range-whole"};
    static char whole[sizeof(said.out)];
    char dir[MT_PATH];
    struct err err;
    const char *config = process_config("[train]\nmemory_gb = 4\n");
    assert_int_equal(RUN("plan", config), 0);
    strcpy(whole, said.out);
    for (int i = 0; i < MT_LEN(repos); i++) {
        hub_fresh(NULL);
        assert_int_equal(RUN("plan", config, "--set", repos[i]), 0);
        assert_string_equal(said.out, whole);
        assert_says(said.err, "no weights are downloaded");
        print_message("%s: %lld bytes\n", repos[i], (long long)sent_bytes());
        assert_true(sent_bytes() > 1000 && sent_bytes() < 300000);
        assert_int_equal(hub_requests("tokenizer.json", ""), 0);
        assert_int_equal(truncate(hub_server.log, 0), 0); /* a second plan requests only the list; offline, nothing */
        assert_int_equal(RUN("plan", config, "--set", repos[i]), 0);
        assert_string_equal(said.out, whole);
        assert_int_equal(hub_requests("", ""), 1);
        setenv("HF_HUB_OFFLINE", "1", 1);
        assert_int_equal(RUN("plan", config, "--set", repos[i]), 0);
        assert_string_equal(said.out, whole);
        assert_int_equal(hub_model(dir, repos[i] + strlen("model.path="), "main", NULL, &err), -1);
        assert_says(err.msg, "HF_HUB_OFFLINE is set");
    }
    hub_fresh(NULL);
    assert_int_equal(RUN("inspect", "hub:test/head"), 0);
    assert_says(said.out, "tensors in 2 files");
    assert_true(sent_bytes() < 300000);
    assert_int_equal(hub_model(dir, "hub:test/head", "main", NULL, &err), 0); /* then the complete weights */
    assert_int_equal(truncate(hub_server.log, 0), 0);
    assert_int_equal(RUN("plan", config, "--set", repos[0]), 0);
    assert_string_equal(said.out, whole);
    assert_int_equal(hub_requests("cdn", ""), 0);
}

/* A plan by the model's name downloads no weights, and the tokenizer only if data are given. */
static void test_plan_by_name(void **state)
{
    (void)state;
    char data[MT_PATH];
    snprintf(data, sizeof(data), "%s/train.jsonl", fixture("parity/case_a"));
    hub_fresh(NULL);
    assert_int_equal(RUN("plan", "hub:test/head", "--gpu", "24gb"), 0);
    assert_int_equal(strncmp(said.out, "fits: 0.", 8), 0);
    assert_true(sent_bytes() < 300000);
    assert_int_equal(hub_requests("tokenizer.json", ""), 0);
    if (RUN("plan", "hub:test/head", "--gpu", "24gb", "--data", data)) fail_msg("%s", said.err);
    assert_says(said.out, " steps\n");
    assert_true(hub_requests("tokenizer.json", "") > 0 && sent_bytes() < 2000000);
    assert_int_equal(truncate(hub_server.log, 0), 0); /* the second time only the lists are requested */
    assert_int_equal(RUN("plan", "hub:test/head", "--gpu", "24gb", "--data", data), 0);
    assert_int_equal(hub_requests("resolve", ""), 0);
}

/* A shard that is too short for the length of its header. */
static void test_short_shards(void **state)
{
    (void)state;
    static const char *const repos[] = {"head-short-0", "head-short-5", "head-short-7"};
    char id[64], dir[MT_PATH], says[64];
    bool headers;
    struct err err;
    for (int i = 0; i < MT_LEN(repos); i++) {
        snprintf(id, sizeof(id), "hub:test/%s", repos[i]);
        snprintf(says, sizeof(says), "%s bytes are too few for a safetensors file", repos[i] + strlen("head-short-"));
        assert_int_equal(hub_model_headers(dir, id, "main", &headers, &err), -1);
        assert_says(err.msg, says);
    }
}

/* Writes text to NAME in the snapshot of a repository in the cache. */
static void put_small(const char *dir, const char *name, const char *text)
{
    char path[MT_PATH], below[128];
    snprintf(below, sizeof(below), "snapshots/" COMMIT "/%s", name);
    join(path, dir, below);
    put_text(path, text, (int64_t)strlen(text));
}

/* A repository of n files in the cache, with an index that names them all, and a line in moetrain-verified for each. */
static void make_many(const char *dir, const char *names, int n)
{
    char path[MT_PATH], target[128], name[64], below[128];
    struct stat st;
    struct json_out index = {0};
    join(path, dir, "snapshots/" COMMIT);
    make_folder(path);
    join(path, dir, "blobs");
    make_folder(path);
    join(path, dir, "moetrain-verified");
    FILE *marks = fopen(path, "w");
    assert_non_null(marks);
    json_out_open(&index, NULL, '{');
    json_out_open(&index, "weight_map", '{');
    for (int i = 0; i < n; i++) {
        snprintf(target, sizeof(target), "../../blobs/%064x", i);
        snprintf(name, sizeof(name), names, i);
        json_out_str(&index, name, name);
        join(path, dir, target + strlen("../../"));
        const int fd = open(path, O_WRONLY | O_CREAT, 0666);
        assert_int_equal(fstat(fd, &st) | close(fd), 0);
        fprintf(marks, "%064x 0 %lld\n", i, (long long)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec);
        snprintf(below, sizeof(below), "snapshots/" COMMIT "/%s", name);
        join(path, dir, below);
        assert_int_equal(symlink(target, path), 0);
    }
    json_out_close(&index, '}');
    json_out_close(&index, '}');
    fclose(marks);
    put_small(dir, "model.safetensors.index.json", index.text);
    put_small(dir, "config.json", "{}");
    put_small(dir, "tokenizer.json", "{}");
    json_out_free(&index);
}

/* The time for a repository is linear in its number of files. A quadratic algorithm took minutes for 30,000. */
static void test_many_files(void **state)
{
    (void)state;
    enum { FILES = 30000 };
    char dir[MT_PATH], path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/hub/models--test--many", hub_home);
    make_many(path, "model-%05d.safetensors", FILES);
    snprintf(path, sizeof(path), "%s/hub/datasets--test--many", hub_home);
    make_many(path, "rows-%05d.jsonl", FILES);
    setenv("HF_HUB_OFFLINE", "1", 1);
    const double start = clock_ms();
    if (hub_model(dir, "hub:test/many", COMMIT, NULL, &err)) fail_msg("%s", err.msg);
    char *list = hub_data("hub:test/many@" COMMIT "/rows-*.jsonl*2", &err);
    if (!list) fail_msg("%s", err.msg);
    int64_t files = 1;
    for (const char *p = list; (p = strchr(p, ',')); p++) files++;
    assert_int_equal(files, FILES);
    assert_string_equal(list + strlen(list) - strlen(".jsonl*2"), ".jsonl*2");
    mem_free(list);
    print_message("%d files: %.1f s\n", FILES, (clock_ms() - start) / 1e3);
    assert_true(clock_ms() - start < 30e3);
}

/* tiktoken.model in place of tokenizer.json, with the code that transformers needs to read it, and additional
 * templates. */
static void test_kimi(void **state)
{
    (void)state;
    static const char *const there[] = {"tiktoken.model", "tokenization_kimi.py", "tool_declaration_ts.py",
                                        "additional_chat_templates/tool_use.jinja"};
    char dir[MT_PATH], path[2 * MT_PATH];
    struct err err;
    assert_int_equal(hub_model(dir, "hub:test/kimi", "main", NULL, &err), 0);
    for (int i = 0; i < MT_LEN(there); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, there[i]);
        if (!file_exists(path)) fail_msg("%s", path);
    }
    assert_int_equal(hub_requests("modeling_kimi", "") + hub_requests("a.jinja", ""), 0);
}

/* moetrain takes the parquet files of a split if their names show that the split is complete. Otherwise it downloads
 * rows from the viewer. */
static void test_shards(void **state)
{
    (void)state;
    static const char *const good[][2] = {{"hub:test/shards:default/train", "data/train-00000-of-00002.parquet"},
                                          {"hub:test/shards:data/train*2", "data/train-00000-of-00002.parquet*2"},
                                          {"hub:test/shards:test", "data/test-00000-of-00001.parquet"},
                                          {"hub:test/shards:more/train", "more/train-00000-of-00001.parquet"},
                                          {"hub:test/shards/more/*.parquet", "more/less-00000-of-00002.parquet"}};
    static const char *const others[] = {"hub:test/shards:train", "hub:test/shards:more/less", "hub:test/shards:none",
                                         "hub:test/shards"};
    struct err err;
    for (int i = 0; i < MT_LEN(good); i++) {
        char *files = hub_data(good[i][0], &err);
        if (!files) fail_msg("%s", err.msg);
        const char *comma = strchr(files, ',');
        const bool two = i < 2 || i == 4;
        assert_true(two == (comma != NULL));
        if (i < 2) assert_non_null(strstr(comma, "data/train-00001-of-00002.parquet"));
        assert_non_null(strstr(files, good[i][1]));
        mem_free(files);
    }
    for (int i = 0; i < MT_LEN(others); i++) {
        assert_null(hub_data(others[i], &err));
        assert_says(err.msg, "does not show its rows");
    }
    setenv("HF_HUB_OFFLINE", "1", 1);
    char *files = hub_data("hub:test/shards:default/train", &err);
    if (!files) fail_msg("%s", err.msg);
    mem_free(files);
    unsetenv("HF_HUB_OFFLINE");
}

int test_hub_cache(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_layouts, hub_fresh),      cmocka_unit_test_setup(test_library, hub_fresh),
        cmocka_unit_test_setup(test_damage, hub_fresh),       cmocka_unit_test_setup(test_planted_links, hub_fresh),
        cmocka_unit_test_setup(test_link_loops, hub_fresh),   cmocka_unit_test_setup(test_headers, hub_fresh),
        cmocka_unit_test_setup(test_plan_by_name, hub_fresh), cmocka_unit_test_setup(test_short_shards, hub_fresh),
        cmocka_unit_test_setup(test_many_files, hub_fresh),   cmocka_unit_test_setup(test_kimi, hub_fresh),
        cmocka_unit_test_setup(test_shards, hub_fresh),
    };
    if (!hub_can_run()) return 0;
    const int failed = cmocka_run_group_tests_name("hub_cache", tests, NULL, NULL);
    hub_stop();
    return failed;
}
