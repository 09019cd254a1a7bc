/* test_peers.c - tests/parity/peers.py: its table, extrapolation from two numbers of layers, trainers that are skipped,
 * too slow or stopped, compile caches. A shell script takes the place of the trainers' Python. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/file/file.h"
#include "tests/test.h"

static const char *dir;
static char said[1 << 16];

/* Runs peers.py with the options, in a shell after `prefix`. `script` takes the place of the peers' Python: its $1 is
 * the Python script of the step, $2 the peer. Returns the exit code. */
static int run_after(const char *prefix, const char *script, const char *options)
{
    char path[MT_PATH], command[3 * MT_PATH];
    struct err err;
    int64_t size;
    snprintf(path, sizeof(path), "%s/python", dir);
    assert_int_equal(file_write_atomic(path, script, (int64_t)strlen(script), &err), 0);
    assert_int_equal(chmod(path, 0755), 0);
    snprintf(command, sizeof(command),
             "%s python3 '%s' --moetrain '%s' --python '%s' --work '%s' --arch gpt-oss-20b --device cpu %s > '%s/said' "
             "2>&1",
             prefix, fixture("../parity/peers.py"), moetrain_binary(), path, dir, options, dir);
    const int status = system(command);
    snprintf(path, sizeof(path), "%s/said", dir);
    char *text = file_read(path, sizeof(said) - 1, &size, &err);
    assert_non_null(text);
    snprintf(said, sizeof(said), "%s", text);
    mem_free(text);
    return WEXITSTATUS(status);
}

static int run(const char *script, const char *options) { return run_after("", script, options); }

static void expect(const char *part)
{
    if (!strstr(said, part)) fail_msg("\"%s\" is not in:\n%s", part, said);
}

/* Empty directories stand for the checkpoints, which peers.py would write otherwise. */
static int open_dir(void **state)
{
    char path[MT_PATH];
    struct err err;
    (void)state;
    dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/bf16-8/gpt-oss-20b", dir);
    if (file_make_dirs(path, &err)) return -1;
    snprintf(path, sizeof(path), "%s/mxfp4-8/gpt-oss-20b", dir);
    return file_make_dirs(path, &err);
}

static bool no_python(void)
{
    if (!system("python3 -c 'import json' 2>/dev/null")) return false;
    print_message("skip: no python3\n");
    return true;
}

/* 10 ms and 25 ms a layer, 1 GiB and 0.5 GiB a layer: 610 ms and 13 GiB of 24 layers. */
static void test_table(void **state)
{
    (void)state;
    if (no_python()) skip();
    const char *peer =
        "#!/bin/sh\n"
        "[ \"$2\" = axolotl ] && { echo '{\"problem\": \"skipped: ImportError: no axolotl\"}'; exit 0; }\n"
        "[ \"$2\" = unsloth-4bit ] && { echo 'Traceback' >&2; echo 'RuntimeError: broken' >&2; exit 3; }\n"
        "echo noise\n"
        "echo '{\"shape\": [4, 2048], \"layers\": 8, \"ms\": 210, \"allocator\": 5368709120, \"card\": null, "
        "\"note\": \"n\"}'\n"
        "echo '{\"shape\": [1, 1024], \"layers\": 8, \"ms\": 50, \"allocator\": null, \"card\": null, \"note\": "
        "\"n\"}'\n"
        "echo '{\"shape\": [4, 2048], \"layers\": 4, \"ms\": 110, \"allocator\": 3221225472, \"card\": null, "
        "\"note\": \"n\"}'\n";
    assert_int_equal(run(peer, "--peers transformers,axolotl,unsloth-4bit --shapes 4x2048,1x1024"), 0);
    expect("| transformers | 4 x 2048 | 13,430 | 610.0 ms | 13.0 GiB |  | 4 and 8 layers, 25.00 ms a layer | n |");
    expect("| transformers, 8 layers alone | 1 x 1024 | | 50.0 ms |  |  | 8 layers | n |");
    expect("- axolotl: skipped: ImportError: no axolotl");
    expect("- unsloth-4bit: exit 3: RuntimeError: broken");
}

/* The checkpoint of a peer, $3, has the format of experts that its users load. */
static void test_checkpoints(void **state)
{
    (void)state;
    if (no_python()) skip();
    const char *peer = "#!/bin/sh\necho \"{\\\"problem\\\": \\\"loads $3\\\"}\"\n";
    assert_int_equal(run(peer, "--peers unsloth-mxfp4,unsloth-4bit --shapes 1x1024"), 1);
    char line[MT_PATH];
    snprintf(line, sizeof(line), "- unsloth-mxfp4: loads %s/mxfp4-8/gpt-oss-20b\n", dir);
    expect(line);
    snprintf(line, sizeof(line), "- unsloth-4bit: loads %s/bf16-8/gpt-oss-20b\n", dir);
    expect(line);
}

static void test_limit(void **state)
{
    (void)state;
    if (no_python()) skip();
    const char *slow = "#!/bin/sh\nsleep 30\n";
    assert_int_equal(run(slow, "--peers transformers --limit 0.3"), 1);
    expect("- transformers: stopped after 0.3 s");
}

/* SIGTERM while the second of three peers runs: its measurement and those of the first are in the table. */
static void test_stopped(void **state)
{
    (void)state;
    if (no_python()) skip();
    const char *peer =
        "#!/bin/sh\n"
        "echo '{\"shape\": [1, 1024], \"layers\": 8, \"ms\": 50, \"allocator\": null, \"card\": null, \"note\": "
        "\"n\"}'\n"
        "[ \"$2\" = transformers ] || sleep 60\n";
    assert_int_equal(
        run_after("timeout -k 30 2", peer, "--peers transformers,axolotl,unsloth-4bit --shapes 1x1024 --limit 60"),
        124); /* of timeout; peers.py itself ends with 0 */
    expect("| transformers, 8 layers alone | 1 x 1024 | | 50.0 ms |");
    expect("| axolotl, 8 layers alone | 1 x 1024 | | 50.0 ms |");
    expect("- axolotl: stopped by a signal");
    assert_null(strstr(said, "| unsloth-4bit"));
}

/* --compile: every peer runs once with --compile, all at the same time, then measures. */
static void test_compile(void **state)
{
    (void)state;
    if (no_python()) skip();
    const char *peer =
        "#!/bin/sh\n"
        "case \"$*\" in *--compile*) touch \"$2.compiled\"; [ \"$2\" = transformers ] || sleep 60; exit 0;; esac\n"
        "[ -f ../transformers/transformers.compiled ] && [ -f ../axolotl/axolotl.compiled ] || exit 3\n"
        "echo '{\"shape\": [1, 1024], \"layers\": 24, \"ms\": 50, \"allocator\": null, \"card\": null, \"note\": "
        "\"n\"}'\n";
    assert_int_equal(run(peer, "--peers transformers,axolotl --shapes 1x1024 --compile 1"), 0);
    expect("transformers: compiled, exit 0");
    expect("axolotl: still compiling after 1 s");
    expect("| transformers | 1 x 1024 | 20,480 | 50.0 ms |");
    expect("| axolotl | 1 x 1024 | 20,480 | 50.0 ms |");
}

static void test_moetrain(void **state)
{
    (void)state;
    if (no_python()) skip();
    assert_int_equal(
        run("", "--peers moetrain,moetrain-16gb --arch gpt-oss-tiny --layers 2,4 --shapes 1x8 --steps 1 --rank 4"), 0);
    expect("| moetrain | 1 x 8 | ");
    expect(" | 4 layers | experts mxfp4 |");
    expect("| moetrain-16gb | 1 x 8 | ");
}

static void test_arguments(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"--peers torchtune", "expected some of moetrain, moetrain-16gb, transformers"},
        {"--layers 3", "expected one or two even numbers"},
        {"--layers 2,4,8", "expected one or two even numbers"},
        {"--shapes 2048", "expected BATCHxSEQ,..."},
        {"--layers 26", "gpt-oss-20b has 24"},
        {"--limit 1,2,3", "3 numbers for 7 peers"},
        {"--arch gpt-oss-2b", "invalid choice"}};
    if (no_python()) skip();
    for (int i = 0; i < MT_LEN(cases); i++) {
        assert_int_not_equal(run("", cases[i][0]), 0);
        expect(cases[i][1]);
    }
}

int test_peers(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_table, open_dir),     cmocka_unit_test_setup(test_checkpoints, open_dir),
        cmocka_unit_test_setup(test_limit, open_dir),     cmocka_unit_test_setup(test_stopped, open_dir),
        cmocka_unit_test_setup(test_compile, open_dir),   cmocka_unit_test_setup(test_moetrain, open_dir),
        cmocka_unit_test_setup(test_arguments, open_dir),
    };
    return cmocka_run_group_tests_name("peers", tests, NULL, NULL);
}
