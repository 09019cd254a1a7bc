/* main.c - runs the test groups named on the command line, or all:
 *   moetrain_test [--fixtures DIR] [--binary PATH] [--only PATTERN] [--skip PATTERN] [--need-gpu] [NAME ...]
 * --fixtures and --binary override the paths of the build. Of each group, the tests run that match the PATTERN of
 * --only and do not match that of --skip. It fails when no test runs, in all or in a group that is named. With
 * --need-gpu a test that lacks a GPU fails instead of being skipped. */
#include "tests/test.h"

#include <fnmatch.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"

#define TEST(name) int test_##name(void);
#include "test_list.h"
#undef TEST

static const struct {
    const char *name;
    int (*run)(void);
} groups[] = {
#define TEST(name) {#name, test_##name},
#include "test_list.h"
#undef TEST
};

static const char *fixtures = MT_FIXTURES;
static const char *binary = MT_BINARY;
static char scratch[96];
static pid_t scratch_owner;

/* Runs before libgomp's constructor: its threads, and those of the executables that tests start, sleep at barriers.
 * With the small shapes of the tests and other processes running, spinning took five times the CPU time. */
__attribute__((constructor(101))) static void sleep_at_barriers(void) { setenv("OMP_WAIT_POLICY", "passive", 0); }

static void remove_scratch(void)
{
    struct err err;
    if (scratch[0] && getpid() == scratch_owner && file_remove_tree(scratch, &err)) fprintf(stderr, "%s\n", err.msg);
}

static void make_scratch(void)
{
    const char *parent = getenv("TMPDIR");
    if (scratch[0]) return;
    if (!parent || !*parent) parent = "/tmp";
    const int n = snprintf(scratch, sizeof(scratch), "%s/moetrain-test-XXXXXX", parent);
    if (n >= (int)sizeof(scratch) || !mkdtemp(scratch)) MT_REQUIRE(false, "no scratch folder can be in %s", parent);
    scratch_owner = getpid();
    atexit(remove_scratch);
}

/* Tests write paths without quotes into commands and lists of settings: a folder with a blank in its path is therefore
 * reached through a symbolic link. */
static const char *without_blank(const char **path, char out[256], const char *name)
{
    static char folder[PATH_MAX];
    const char *base = strrchr(*path, '/');
    if (!base || !strchr(*path, ' ')) return *path;
    make_scratch();
    snprintf(folder, sizeof(folder), "%.*s", (int)(base - *path), *path);
    snprintf(out, 256, "%s/%s", scratch, name);
    MT_REQUIRE(!symlink(folder, out), "no link to %s can be in %s", folder, scratch);
    snprintf(out, 256, "%s/%s%s", scratch, name, base);
    return *path = out;
}

const char *fixture(const char *name)
{
    static char path[8][MT_PATH], plain[256];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, MT_PATH, "%s/%s", without_blank(&fixtures, plain, "tests"), name);
    return p;
}

const char *moetrain_binary(void)
{
    static char plain[256];
    return without_blank(&binary, plain, "build");
}

const char *scratch_dir(void)
{
    static char path[8][128];
    static int next;
    make_scratch();
    char *p = path[next % 8];
    snprintf(p, sizeof(path[0]), "%s/%d", scratch, next++);
    struct err err;
    if (file_make_dirs(p, &err)) MT_REQUIRE(false, "%s", err.msg);
    return p;
}

void assert_close(double a, double b, double tol)
{
    if (fabs(a - b) <= tol * fmax(1.0, fabs(b))) return;
    fail_msg("%.12g is not %.12g within %g", a, b, tol);
}

double relative_error(const double *a, const double *b, int64_t n)
{
    double diff = 0, ref = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += (a[i] - b[i]) * (a[i] - b[i]);
        ref += b[i] * b[i];
    }
    return sqrt(diff) / fmax(sqrt(ref), 1e-30);
}

double test_value(uint64_t stream, uint64_t i)
{
    double s = 0;
    for (uint64_t k = 0; k < 3; k++) s += rng_uniform(stream, 3 * i + k) - 0.5;
    return s / 1.5;
}

/* Each group runs in a separate process: test_comm.c forks ranks, which a process with OpenMP threads or a GPU must not
 * do. */
static int run_alone(int (*run)(void))
{
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    MT_REQUIRE(pid >= 0, "fork failed");
    if (!pid) exit(run() != 0);
    MT_REQUIRE(waitpid(pid, &status, 0) == pid, "waitpid failed");
    if (WIFSIGNALED(status)) fprintf(stderr, "the group was ended by signal %d\n", WTERMSIG(status));
    return !WIFEXITED(status) || WEXITSTATUS(status);
}

/* ---- the tests that run */

static const char *only, *without;
static bool need_gpu;

bool test_needs_gpu(void) { return need_gpu; }

/* Shared with the processes of the groups. A group that lacks a program or library runs no cmocka group. */
static struct counts {
    int groups, tests;
} * counted;

int test_run_group(const char *name, const struct CMUnitTest *tests, size_t n, CMFixtureFunction setup,
                   CMFixtureFunction teardown)
{
    int wanted = 0;
    for (size_t i = 0; i < n; i++)
        wanted += (!only || !fnmatch(only, tests[i].name, 0)) && (!without || fnmatch(without, tests[i].name, 0));
    counted->groups++;
    counted->tests += wanted;
    return wanted ? _cmocka_run_group_tests(name, tests, n, setup, teardown) : 0;
}

static int run_wanted(int argc, char **argv, int first)
{
    int failed = 0;
    for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) {
        const bool named = first < argc;
        bool wanted = !named;
        for (int i = first; i < argc; i++) wanted |= !strcmp(argv[i], groups[g].name);
        if (!wanted) continue;
        const struct counts before = *counted;
        failed += argc - first == 1 ? groups[g].run() : run_alone(groups[g].run);
        if (!named || counted->groups == before.groups || counted->tests > before.tests) continue;
        fprintf(stderr, "FAILED: no test of the group %s was run: none matches --only and --skip\n", groups[g].name);
        failed++;
    }
    if (counted->groups && !counted->tests) fprintf(stderr, "FAILED: no test was run\n");
    return failed || (counted->groups && !counted->tests);
}

/* Returns 0 if every name is the name of a group. */
static int check_names(int argc, char **argv, int first)
{
    for (int i = first; i < argc; i++) {
        bool found = false;
        for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) found |= !strcmp(argv[i], groups[g].name);
        if (found) continue;
        fprintf(stderr, "no such test group: %s; there are:", argv[i]);
        for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) fprintf(stderr, " %s", groups[g].name);
        fprintf(stderr, "\n");
        return 1;
    }
    return 0;
}

/* The first argument after the options; -1: an unknown option, or one without its value. */
static int read_options(int argc, char **argv)
{
    static const struct {
        const char *name, **value;
    } options[] = {{"--fixtures", &fixtures}, {"--binary", &binary}, {"--only", &only}, {"--skip", &without}};
    int at = 1;
    while (at < argc && argv[at][0] == '-') {
        int found = 0;
        if (!strcmp(argv[at], "--need-gpu")) need_gpu = true, found = 1;
        for (int i = 0; i < MT_LEN(options) && at + 1 < argc; i++)
            if (!strcmp(argv[at], options[i].name)) *options[i].value = argv[at + 1], found = 2;
        if (!found) return fprintf(stderr, "%s: an unknown option, or one without a value\n", argv[at]), -1;
        at += found;
    }
    return at;
}

int main(int argc, char **argv)
{
    static char whole[2][PATH_MAX];
    const int first = read_options(argc, argv);
    if (first < 0 || check_names(argc, argv, first)) return 2;
    if (only) cmocka_set_test_filter(only);
    if (without) cmocka_set_skip_filter(without);
    /* Absolute paths, since tests create symbolic links to fixtures, and run the binary in other folders. */
    if (realpath(fixtures, whole[0])) fixtures = whole[0];
    if (binary && realpath(binary, whole[1])) binary = whole[1];
    counted = mmap(NULL, sizeof(*counted), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MT_REQUIRE(counted != MAP_FAILED, "mmap failed");
    return run_wanted(argc, argv, first);
}
