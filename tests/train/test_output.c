/* test_output.c - the lock of output.dir; leftovers of killed runs; the archive of earlier runs; exports without rows.
 */
#define _GNU_SOURCE /* F_OFD_SETLK */
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "train/state/archive.h"
#include "data/file/atomic_dir.h"
#include "train/state/lock.h"
#include "train/launch/process.h"

/* ---- the lock */

/* A child that holds the lock of dir until it is killed. */
static pid_t holder(const char *dir)
{
    int ready[2];
    char byte = 0;
    struct lock l;
    struct err err;
    assert_int_equal(pipe(ready), 0);
    const pid_t pid = process_fork();
    if (pid == 0) {
        byte = (char)(lock_take(&l, dir, &err) == 0);
        if (write(ready[1], &byte, 1) == 1) pause();
        _exit(0);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

static void test_lock(void **state)
{
    (void)state;
    char dir[MT_PATH], inside[MT_PATH + 8], who[64];
    struct lock l = {.held = false}, again = {.held = false};
    struct err err;
    snprintf(dir, sizeof(dir), "%s/out", scratch_dir());
    snprintf(inside, sizeof(inside), "%s/x", dir);
    const pid_t pid = holder(dir);
    snprintf(who, sizeof(who), "process %ld on ", (long)pid);
    assert_int_equal(lock_take(&l, dir, &err), -1);
    assert_says(err.msg, who);
    assert_says(err.msg, " since 20");
    assert_int_equal(lock_take_for(&l, dir, inside, &err), -1);
    assert_int_equal(lock_take_for(&l, dir, "elsewhere", &err), 0);
    assert_false(l.held);
    assert_int_equal(kill(pid, SIGKILL), 0); /* the process cannot delete the lock file */
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    if (lock_take(&l, dir, &err)) fail_msg("%s", err.msg);
    snprintf(inside, sizeof(inside), "%s/.lock", dir);
    char *text = file_read(inside, 1 << 10, &(int64_t){0}, &err); /* reading the lock file does not release the lock */
    snprintf(who, sizeof(who), "process %ld on ", (long)getpid());
    assert_says(text, who);
    mem_free(text);
    assert_int_equal(lock_take(&again, dir, &err), -1);
    lock_release(&l);
    assert_int_equal(lock_take(&again, dir, &err), 0);
    lock_release(&again);
    lock_release(&again);
}

/* fcntl in place of libc's: it deletes this file before the next lock. */
static const char *delete_before_lock;

int fcntl(int fd, int cmd, ...)
{
    va_list list;
    va_start(list, cmd);
    void *arg = va_arg(list, void *);
    va_end(list);
    if (cmd == F_OFD_SETLK && delete_before_lock) {
        unlink(delete_before_lock);
        delete_before_lock = NULL;
    }
    return (int)syscall(SYS_fcntl, fd, cmd, arg);
}

/* A run that fails to start deletes the lock file that it created. Another run that opened the file before that would
 * hold a lock that no later run sees. */
static void test_lock_of_a_deleted_file(void **state)
{
    (void)state;
    char file[MT_PATH];
    const char *dir = scratch_dir();
    struct lock l = {.held = false};
    struct err err;
    snprintf(file, sizeof(file), "%s/.lock", dir);
    delete_before_lock = file;
    assert_int_equal(lock_take(&l, dir, &err), -1);
    assert_says(err.msg, "was in use by another moetrain until now: run the command again");
    assert_null(delete_before_lock);
    assert_false(l.held || file_exists(file));
    assert_int_equal(lock_take(&l, dir, &err), 0);
    assert_true(file_exists(file));
    lock_release(&l);
}

/* A lock file that is a link is refused: truncating it would empty the link's target. */
static void test_lock_of_a_link(void **state)
{
    (void)state;
    char path[MT_PATH], target[MT_PATH];
    const char *dir = scratch_dir();
    struct lock l = {.held = false};
    struct err err;
    int64_t size;
    snprintf(path, sizeof(path), "%s/.lock", dir);
    snprintf(target, sizeof(target), "%s/precious", dir);
    assert_int_equal(file_write_atomic(target, "text", 4, &err), 0);
    assert_int_equal(symlink(target, path), 0);
    assert_int_equal(lock_take(&l, dir, &err), -1);
    assert_says(err.msg, "/.lock: cannot be opened");
    char *text = file_read(target, 100, &size, &err);
    assert_non_null(text);
    assert_string_equal(text, "text");
    mem_free(text);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* The second of two runs is refused and changes nothing; read-only commands, and exports to other folders, work. */
static void test_two_runs(void **state)
{
    (void)state;
    const char *config = process_config("[log]\nreport = false\n"), *dir = scratch_dir();
    const char *metrics = process_output(config, "metrics.jsonl");
    const pid_t first =
        process_start(dir, (const char *const[]){config, "--set", "train.steps=100000", "--set", "log.every=0", NULL});
    for (int i = 0; i < 500 && !file_exists(metrics); i++) sleep_ms(20);
    assert_true(file_exists(metrics));
    char who[64];
    snprintf(who, sizeof(who), "process %ld on ", (long)first);
    const int code = RUN(config, "--set", "train.resume=never");
    assert_int_equal(code, 1);
    assert_says(said.err, who);
    assert_null(strstr(said.err, "loaded "));
    assert_int_equal(RUN("export", config, "--to", "peft"), 1);
    assert_says(said.err, who);
    assert_int_equal(RUN("eval", config, "--base"), 0);
    assert_int_equal(kill(first, SIGTERM), 0);
    assert_int_equal(process_finish(dir, first), 130);
    assert_int_equal(RUN(config, "--set", "optim.schedule=constant", "--set", "train.resume=never"), 0);
}

/* ---- directories left by killed processes */

static void make(const char *parent, const char *name, const char *file)
{
    char path[MT_PATH];
    struct err err;
    assert_int_equal(str_format(path, sizeof(path), &err, "path", "%s/%s", parent, name), 0);
    assert_int_equal(file_make_dirs(path, &err), 0);
    assert_int_equal(str_format(path, sizeof(path), &err, "path", "%s/%s/%s", parent, name, file), 0);
    assert_int_equal(file_write_atomic(path, "x", 1, &err), 0);
}

static void assert_entries(const char *dir, const char *want)
{
    char text[1024] = "", **names;
    int64_t n;
    struct err err;
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    for (int64_t i = 0; i < n; i++) strcat(strcat(text, i ? " " : ""), names[i]);
    file_list_free(names, n);
    assert_string_equal(text, want);
}

static void test_sweep(void **state)
{
    (void)state;
    static const char *const names[] = {"best"};
    char dir[256], path[MT_PATH];
    struct err err;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    make(dir, ".tmp-best", "a");
    make(dir, ".old-best", "the old one");
    make(dir, ".deleting-best", "b");
    make(dir, ".deleting-2-best", "c");
    make(dir, ".tmp-other", "d");
    make(dir, ".cache", "e");
    assert_int_equal(atomic_dir_sweep(dir, names, 1, true, &err), 0);
    assert_entries(dir, ".cache .tmp-other best");
    snprintf(path, sizeof(path), "%s/best", dir);
    assert_entries(path, "the old one");
    make(dir, ".old-best", "older");
    assert_int_equal(atomic_dir_sweep(dir, NULL, 0, true, &err), 0);
    assert_entries(dir, ".cache best");
    assert_entries(path, "the old one");
    atomic_dir_remove(path);
    assert_entries(dir, ".cache");
}

/* ---- the archive of an earlier run */

static void test_archive(void **state)
{
    (void)state;
    char dir[256], path[MT_PATH];
    struct err err = {.msg = ""};
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    make(dir, "best", "a");
    make(dir, "checkpoints", "b");
    make(dir, "cache", "c");
    make(dir, "export-peft", "d");
    make(dir, "trace-rank1.json", "g");
    make(dir, "profile-rank1.txt", "g");
    if (archive_run(dir, &err)) fail_msg("%s", err.msg);
    assert_entries(dir, "archive-1 cache");
    snprintf(path, sizeof(path), "%s/archive-1", dir);
    assert_entries(path, "best checkpoints export-peft profile-rank1.txt trace-rank1.json");
    assert_int_equal(archive_run(dir, &err), 0); /* a second archive_run has nothing to move */
    assert_entries(dir, "archive-1 cache");
    make(dir, ".archiving/checkpoints", "b"); /* killed within archive_run: all files are moved back */
    make(dir, ".archiving/adapter", "e");
    make(dir, "best", "f");
    assert_int_equal(archive_recover(dir, &err), 0);
    assert_entries(dir, "adapter archive-1 best cache checkpoints");
    assert_int_equal(archive_run(dir, &err), 0);
    assert_entries(dir, "archive-1 archive-2 cache");
}

/* A start with train.resume = never was killed while it moved files. Then an export created a directory with the name
 * of a moved one. */
static void test_archive_taken(void **state)
{
    (void)state;
    char dir[256], path[MT_PATH];
    struct err err = {.msg = ""};
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    make(dir, ".archiving/export-peft", "old");
    make(dir, ".archiving/adapter", "a");
    make(dir, "export-peft", "new");
    make(dir, "checkpoints", "b");
    if (archive_recover(dir, &err)) fail_msg("%s", err.msg);
    assert_entries(dir, "adapter archive-1 checkpoints export-peft");
    snprintf(path, sizeof(path), "%s/export-peft", dir);
    assert_entries(path, "new");
    snprintf(path, sizeof(path), "%s/archive-1/export-peft", dir);
    assert_entries(path, "old");
    make(dir, ".archiving", "metrics.jsonl"); /* a file, which rename() would replace */
    make(dir, ".", "metrics.jsonl");
    if (archive_recover(dir, &err)) fail_msg("%s", err.msg);
    assert_entries(dir, "adapter archive-1 archive-2 checkpoints export-peft metrics.jsonl");
    snprintf(path, sizeof(path), "%s/.archiving", dir); /* a link: the files of its target stay there */
    assert_int_equal(symlink("archive-1", path), 0);
    assert_int_equal(archive_recover(dir, &err), -1);
    assert_non_null(strstr(err.msg, "a symbolic link"));
    snprintf(path, sizeof(path), "%s/archive-1/export-peft", dir);
    assert_entries(path, "old");
}

/* A start that is killed after any number of its moves: the next one moves the files back. */
static void test_archive_killed(void **state)
{
    (void)state;
    static const char *const names[] = {"adapter", "best", "checkpoints", "export-peft"};
    char dir[256], moved[MT_PATH];
    struct err err = {.msg = ""};
    for (int n = 0; n <= MT_LEN(names); n++) {
        snprintf(dir, sizeof(dir), "%s", scratch_dir());
        snprintf(moved, sizeof(moved), "%s/.archiving", dir);
        assert_int_equal(file_make_dirs(moved, &err), 0);
        for (int i = 0; i < MT_LEN(names); i++) make(i < n ? moved : dir, names[i], "x");
        if (archive_recover(dir, &err)) fail_msg("%s", err.msg);
        assert_entries(dir, "adapter best checkpoints export-peft");
    }
}

/* `never` keeps all files of the run before, under one name. */
static void test_never(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN(config), 0);
    char *old = file_read(process_output(config, "metrics.jsonl"), 1 << 20, &(int64_t){0}, &(struct err){{0}});
    assert_int_equal(RUN(config, "--set", "train.seed=1", "--set", "train.resume=never"), 0);
    assert_says(said.err, "moved the earlier run in ");
    char *kept =
        file_read(process_output(config, "archive-1/metrics.jsonl"), 1 << 20, &(int64_t){0}, &(struct err){{0}});
    assert_non_null(kept);
    assert_string_equal(old, kept);
    assert_true(file_exists(process_output(config, "archive-1/adapter/adapter_model.safetensors")));
    assert_true(file_exists(process_output(config, "archive-1/checkpoints/step-000002/state.json")));
    assert_true(file_exists(process_output(config, "archive-1/report.html")));
    assert_true(file_exists(process_output(config, "archive-1/config.ini")));
    assert_true(file_exists(process_output(config, "adapter/adapter_model.safetensors")));
    char text[1 << 14]; /* the config.ini that the run wrote continues the run */
    process_read(process_output(config, "config.ini"), text, sizeof(text));
    assert_says(text, "# this run had train.resume = never; with auto, this file continues the run\n");
    assert_int_equal(RUN(process_output(config, "config.ini")), 0);
    assert_says(said.err, "this run is complete");
    assert_false(file_exists(process_output(config, "archive-2")));
    mem_free(old);
    mem_free(kept);
}

/* ---- an export without rows to verify it with */

static void test_export_by_force(void **state)
{
    (void)state;
    static const char *const formats[] = {"vllm", "merged-bf16"};
    const char *config = process_config(""), *dir = scratch_dir(), *adapter = fixture("parity/case_a/adapter_final");
    char out[300];
    assert_int_equal(RUN("export", config, "--set", "data.eval=", "--adapter", adapter, "--to", "peft"), 1);
    assert_says(said.err, "--force");
    for (int i = 0; i < 2; i++) {
        snprintf(out, sizeof(out), "%.200s/%s", dir, formats[i]);
        assert_int_equal(RUN("export", config, "--set", "data.eval=", "--adapter", adapter, "--to", formats[i], "--out",
                             out, "--force"),
                         0);
        assert_says(said.err, "warning: NOT VERIFIED ON DATA");
        assert_true((strstr(said.err, "64 KiB of each tensor") != NULL) == !i);
        assert_says(said.out, "no held-out tokens: not verified on data; values compared one by one, different: 0");
        assert_int_equal(RUN("export", config, "--set", "data.eval=", "--adapter",
                             fixture("parity/case_a/adapter_init"), "--to", formats[i], "--verify", out, "--force"),
                         1); /* the directory has the export of another adapter */
        assert_says(said.err, "parts of the adapter that differ: ");
    }
    assert_int_equal(RUN("export", config, "--adapter", adapter, "--to", "peft", "--force"), 0);
    assert_says(said.out, "whole adapter"); /* with rows, the verification uses them */
}

/* ---- interrupted exports, and where their lines go */

static void write_x(const char *dir, const char *name)
{
    char path[4 * MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    if (file_make_dirs(dir, &err) || file_write_atomic(path, "x", 1, &err)) fail_msg("%s", err.msg);
}

/* checkpoints/ may be a link to another disk, and foreign files there stay: in training, pruning and archiving. A link
 * in place of a checkpoint is not followed. */
static void test_linked_checkpoints(void **state)
{
    (void)state;
    char config[MT_PATH], elsewhere[128], victim[128], path[2 * MT_PATH];
    struct err err;
    struct stat st;
    snprintf(config, sizeof(config), "%s", process_config("save_every = 1\nkeep = 1\n"));
    snprintf(elsewhere, sizeof(elsewhere), "%s", scratch_dir());
    snprintf(victim, sizeof(victim), "%s", scratch_dir());
    assert_int_equal(file_make_dirs(process_output(config, ""), &err), 0);
    assert_int_equal(symlink(elsewhere, process_output(config, "checkpoints")), 0);
    write_x(elsewhere, "mine");
    snprintf(path, sizeof(path), "%s/step-mine", elsewhere);
    write_x(path, "model");
    write_x(victim, "state.json");
    assert_int_equal(RUN(config), 0);
    snprintf(path, sizeof(path), "output.dir: checkpoints is a link to %s\n", elsewhere);
    assert_says(said.err, path);
    assert_entries(elsewhere, "mine step-000002 step-mine");
    snprintf(path, sizeof(path), "%s/step-000001", elsewhere);
    assert_int_equal(symlink(victim, path), 0);
    assert_int_equal(RUN(config, "--set", "train.steps=4"), 0);
    assert_says(said.err, "continu");
    assert_entries(elsewhere, "mine step-000004 step-mine");
    assert_int_equal(RUN(config, "--set", "train.seed=1", "--set", "train.resume=never"), 0);
    assert_entries(elsewhere, "mine step-000004 step-mine");
    assert_entries(victim, "state.json");
    snprintf(path, sizeof(path), "%s/state.json", victim);
    assert_true(!stat(path, &st) && st.st_size == 1);
    snprintf(path, sizeof(path), "%s/step-mine", elsewhere);
    assert_entries(path, "model");
    assert_true(!lstat(process_output(config, "archive-1/checkpoints"), &st) && S_ISLNK(st.st_mode));
    assert_true(!lstat(process_output(config, "checkpoints"), &st) && S_ISDIR(st.st_mode));
}

static void test_interrupted(void **state)
{
    (void)state;
    char dir[MT_PATH], kept[MT_PATH], inner[2 * MT_PATH];
    int status;
    snprintf(dir, sizeof(dir), "%s/.tmp-export", scratch_dir());
    for (int i = 0; i < 3; i++) write_x(dir, i == 0 ? "a" : i == 1 ? "b" : "a-longer-name.safetensors");
    snprintf(inner, sizeof(inner), "%s/assets/more", dir);
    write_x(inner, "c");
    snprintf(kept, sizeof(kept), "%s/kept", scratch_dir());
    write_x(kept, "d");
    snprintf(inner, sizeof(inner), "%s/assets/link", dir);
    assert_int_equal(symlink(kept, inner), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        process_delete_on_signal(dir);
        raise(SIGTERM);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    assert_false(file_exists(dir));
    snprintf(inner, sizeof(inner), "%s/d", kept);
    assert_true(file_exists(inner));
}

/* An export deletes what a killed export of any format left in output.dir, and nothing else. */
static void test_export_sweeps(void **state)
{
    (void)state;
    const char *config = process_config("");
    write_x(process_output(config, ".tmp-export-merged-bf16"), "model.safetensors");
    write_x(process_output(config, ".tmp-mine"), "x");
    assert_int_equal(
        RUN("export", config, "--adapter", fixture("parity/case_a/adapter_final"), "--to", "peft", "--force"), 0);
    assert_false(file_exists(process_output(config, ".tmp-export-merged-bf16")));
    assert_true(file_exists(process_output(config, ".tmp-mine")));
    assert_true(file_exists(process_output(config, "export-peft")));
}

/* If standard output and error go to one file, its lines are in the order in which they were written. */
static void test_one_file(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *config = process_config(""), *adapter = fixture("parity/case_a/adapter_final");
    const char *const words[] = {"export", config, "--adapter", adapter, "--to", "merged-bf16", NULL};
    assert_int_equal(process_finish(dir, process_start_shell(dir, "\"$@\" 2>&1", words)), 0);
    const char *first = strstr(said.out, "exporting "), *table = strstr(said.out, "\n  layer   1  down_proj ");
    const char *last = strstr(said.out, "\nwritten and verified in ");
    if (!first || !table || !last || !(first < table && table < last)) fail_msg("%s", said.out);
    assert_null(strchr(last + 1, '\n')[1] ? last : NULL);
}

int test_output(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lock),
        cmocka_unit_test(test_lock_of_a_link),
        cmocka_unit_test(test_lock_of_a_deleted_file),
        cmocka_unit_test(test_two_runs),
        cmocka_unit_test(test_sweep),
        cmocka_unit_test(test_archive),
        cmocka_unit_test(test_archive_taken),
        cmocka_unit_test(test_archive_killed),
        cmocka_unit_test(test_linked_checkpoints),
        cmocka_unit_test(test_never),
        cmocka_unit_test(test_export_by_force),
        cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_export_sweeps),
        cmocka_unit_test(test_one_file),
    };
    return cmocka_run_group_tests_name("output", tests, NULL, NULL);
}
