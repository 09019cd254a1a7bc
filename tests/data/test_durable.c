/* test_durable.c - files are synced to disk before they get their final name, and directories before the command ends.
 * This file replaces functions of libc in the test program to watch every rename. */
#define _GNU_SOURCE /* nftw */
#include "tests/test.h"

#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/shards.h"
#include "tests/process.h"
#include "train/state/archive.h"
#include "data/file/atomic_dir.h"
#include "train/state/lock.h"
#include "train/loop.h"
#include "train/synth/synth.h"

/* ---- fsync and rename of this process */

struct synced {
    dev_t dev;
    ino_t ino;
    off_t size;
    struct timespec changed; /* st_mtim at its last fsync */
};
static struct synced synced[4096];
static int64_t n_synced;
static struct {
    char dir[MT_PATH]; /* directory with a new name since its last fsync */
    bool renamed;
} pending[64];
static int64_t n_pending, n_renamed;
static char problem[2 * MT_PATH]; /* the first one */
static bool watching;

static bool is_synced(const struct stat *st)
{
    for (int64_t i = n_synced; i-- > 0;)
        if (synced[i].dev == st->st_dev && synced[i].ino == st->st_ino)
            return synced[i].size == st->st_size && synced[i].changed.tv_sec == st->st_mtim.tv_sec &&
                   synced[i].changed.tv_nsec == st->st_mtim.tv_nsec;
    return false;
}

static int check_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)kind;
    (void)at;
    if (!problem[0] && (S_ISREG(st->st_mode) || S_ISDIR(st->st_mode)) && !is_synced(st))
        snprintf(problem, sizeof(problem), "%s was not synced before a rename", path);
    return 0;
}

int fsync(int fd)
{
    struct stat st;
    char path[64], name[MT_PATH] = "";
    const int rc = (int)syscall(SYS_fsync, fd);
    if (!watching || rc || fstat(fd, &st)) return rc;
    MT_REQUIRE(n_synced < MT_LEN(synced), "more than %d files", (int)MT_LEN(synced));
    synced[n_synced++] = (struct synced){st.st_dev, st.st_ino, st.st_size, st.st_mtim};
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof(name) - 1) < 0) return rc;
    for (int64_t i = 0; i < n_pending; i++)
        if (!strcmp(pending[i].dir, name)) pending[i--] = pending[--n_pending];
    return rc;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* A temporary name: FILE.tmp or .tmp-DIRECTORY. */
static bool is_new(const char *path)
{
    const size_t n = strlen(path);
    return !strncmp(base_name(path), ".tmp-", 5) || (n > 4 && !strcmp(path + n - 4, ".tmp"));
}

/* The name `path` is new until the fsync of its directory. */
static void add_pending(const char *path, bool renamed)
{
    char dir[MT_PATH], whole[PATH_MAX] = "";
    snprintf(dir, sizeof(dir), "%s", path);
    char *slash = strrchr(dir, '/');
    if (slash) *slash = 0;
    MT_REQUIRE(n_pending < MT_LEN(pending) && realpath(slash ? dir : ".", whole), "%s", path);
    pending[n_pending].renamed = renamed;
    snprintf(pending[n_pending++].dir, MT_PATH, "%s", whole);
}

/* Before a rename, the directories of earlier renames must have been synced, except hidden ones, into which an archive
 * moves entries one by one. The parent of a new directory must have been synced before the next rename in the same
 * parent. */
static void check_pending(const char *to)
{
    for (int64_t i = 0; i < n_pending && !problem[0]; i++) {
        const size_t n = strlen(pending[i].dir);
        const bool beside = !strncmp(to, pending[i].dir, n) && to[n] == '/' && !strchr(to + n + 1, '/');
        if (pending[i].renamed ? base_name(pending[i].dir)[0] != '.' : beside)
            snprintf(problem, sizeof(problem), "%.4000s was not synced before the next rename", pending[i].dir);
    }
}

int rename(const char *from, const char *to)
{
    const bool counts = watching && base_name(to)[0] != '.'; /* what is about to be deleted gets a hidden name */
    if (counts) check_pending(to);
    if (counts && is_new(from)) nftw(from, check_one, 16, FTW_PHYS);
    const int rc = (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (!counts || rc) return rc;
    n_renamed++;
    add_pending(to, true);
    return rc;
}

int mkdir(const char *path, mode_t mode)
{
    const int rc = (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (watching && !rc && !strcmp(base_name(path), "checkpoints")) add_pending(path, false);
    return rc;
}

static void watch(void)
{
    watching = true;
    n_pending = n_renamed = 0;
    problem[0] = 0;
}

/* Checks that there were at least n renames since `watch`, that everything under a temporary name was synced before its
 * rename, and that the directory was synced after each rename. */
static void assert_durable(int64_t n)
{
    watching = false;
    if (problem[0]) fail_msg("%s", problem);
    if (n_pending) fail_msg("%s was not synced after a new name", pending[0].dir);
    assert_true(n_renamed >= n);
}

#define OK(rc)                                                                                                         \
    do {                                                                                                               \
        if (rc) fail_msg("%s", err.msg);                                                                               \
    } while (0)

/* ---- what is written */

static void a_file(void **state)
{
    (void)state;
    struct err err;
    char path[MT_PATH];
    snprintf(path, sizeof(path), "%s/file", scratch_dir());
    watch();
    OK(file_write_atomic(path, "text", 4, &err));
    assert_durable(1);
}

static void a_new_directory_and_its_successor(void **state)
{
    (void)state;
    struct err err;
    char dir[MT_PATH], tmp[MT_PATH], path[MT_PATH];
    snprintf(dir, sizeof(dir), "%s/made", scratch_dir());
    for (int i = 0; i < 2; i++) {
        watch();
        OK(atomic_dir_begin(dir, tmp, &err));
        OK(str_format(path, sizeof(path), &err, "path", "%s/file", tmp));
        const int fd = open(path, O_WRONLY | O_CREAT, 0666);
        assert_true(fd >= 0 && write(fd, "text", 4) == 4 && !fsync(fd) && !close(fd));
        OK(atomic_dir_commit(tmp, dir, &err));
        assert_durable(!i); /* the second one is exchanged, by another system call */
    }
}

static void an_archive(void **state)
{
    (void)state;
    struct err err;
    char path[MT_PATH];
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/metrics.jsonl", dir);
    OK(file_write_atomic(path, "{}", 2, &err));
    watch();
    OK(archive_run(dir, &err));
    assert_durable(1);
}

/* Each shard is synced when shards_finish ends; nothing is renamed. */
static void shards_and_their_index(void **state)
{
    (void)state;
    struct err err;
    struct shards s;
    const char *dir = scratch_dir();
    const float one[4] = {1};
    struct st_entry entries[] = {{.name = "a", .dtype = DT_F32, .ndim = 1, .shape = {4}},
                                 {.name = "b", .dtype = DT_F32, .ndim = 1, .shape = {4}}};
    watch();
    OK(shards_open(&s, dir, entries, 2, 16, &err));
    for (int i = 0; i < 2; i++) OK(shards_put(&s, i, 0, one, sizeof(one), &err));
    OK(shards_finish(&s, &err));
    shards_close(&s);
    for (int i = 1; i <= 2; i++) {
        char path[MT_PATH];
        struct stat st;
        snprintf(path, sizeof(path), "%s/model-%05d-of-00002.safetensors", dir, i);
        assert_int_equal(stat(path, &st), 0);
        if (!is_synced(&st)) fail_msg("%s was not synced", path);
    }
    assert_durable(1); /* the index */
}

static void a_checkpoint_of_random_weights(void **state)
{
    (void)state;
    struct err err;
    char dir[MT_PATH];
    const struct synth_options opt = {.arch = "gpt-oss-tiny", .dir = dir, .n_layer = 1, .shard_bytes = 1 << 20};
    snprintf(dir, sizeof(dir), "%s/made", scratch_dir());
    watch();
    OK(synth_run(&opt, &err));
    assert_durable(1);
}

/* A run with evaluations and checkpoints; then one from the start, which archives it. */
static void runs_and_the_archive(void **state)
{
    (void)state;
    struct err err;
    struct config cfg;
    const char *path =
        process_config("[eval]\nevery = 1\nat_start = no\n[optim]\nlr = 1e-1\nschedule = constant\n[lora]\nalpha = 4\n"
                       "[train]\ngrad_accum = 2\n[output]\nsave_every = 2\n");
    config_defaults(&cfg);
    OK(config_load(&cfg, path, &err));
    cfg.train.steps = 4;
    watch();
    OK(loop_train(&cfg, &comm_alone, NULL, &err));
    assert_true(file_is_dir(process_output(path, "best")));
    assert_true(file_is_dir(process_output(path, "checkpoints/step-000004")));
    assert_durable(4);
    /* the later best/ is archived, and best/ of step 2 returns */
    OK(file_remove_tree(process_output(path, "checkpoints/step-000004"), &err));
    watch();
    OK(loop_train(&cfg, &comm_alone, NULL, &err));
    assert_durable(4);
    snprintf(cfg.train.resume, sizeof(cfg.train.resume), "never");
    watch();
    OK(loop_train(&cfg, &comm_alone, NULL, &err));
    assert_true(file_is_dir(process_output(path, "archive-2")));
    assert_durable(4);
}

int test_durable(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file),
        cmocka_unit_test(a_new_directory_and_its_successor),
        cmocka_unit_test(an_archive),
        cmocka_unit_test(shards_and_their_index),
        cmocka_unit_test(a_checkpoint_of_random_weights),
        cmocka_unit_test(runs_and_the_archive),
    };
    return cmocka_run_group_tests_name("durable", tests, NULL, NULL);
}
