/* test_memory.c - limits of host memory and CPU time: control groups v1 and v2, RLIMIT_AS; blocks of memory. */
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "kernels/cgroup.h"
#include "kernels/memory.h"
#include "tests/process.h"

#define MIB (1ll << 20)

/* A directory with the /proc and /sys files of a machine with 64 GiB; put adds files. */
static const char *machine(void)
{
    static char root[256];
    snprintf(root, sizeof(root), "%s", scratch_dir());
    return root;
}

static void put(const char *root, const char *path, const char *text)
{
    char full[MT_PATH];
    struct err err;
    snprintf(full, sizeof(full), "%s/%s", root, path);
    char *slash = strrchr(full, '/');
    *slash = 0;
    assert_int_equal(file_make_dirs(full, &err), 0);
    *slash = '/';
    assert_int_equal(file_write_atomic(full, text, (int64_t)strlen(text), &err), 0);
}

static void put_mib(const char *root, const char *path, long long mib)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld\n", mib * MIB);
    put(root, path, text);
}

#define MEMINFO                                                                                                        \
    "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\nHugePages_Total: 0\n"

static void test_version_2(void **state)
{
    (void)state;
    const char *root = machine();
    put(root, "proc/meminfo", MEMINFO);
    assert_int_equal(memory_room(root) / MIB, 32768);
    put(root, "proc/self/cgroup", "0::/user.slice/job/step\n");
    put(root, "sys/fs/cgroup/user.slice/job/step/memory.max", "max\n");
    put_mib(root, "sys/fs/cgroup/user.slice/job/step/memory.current", 100);
    assert_int_equal(memory_room(root) / MIB, 32768);
    put_mib(root, "sys/fs/cgroup/user.slice/job/memory.max", 1000); /* the group around it */
    put_mib(root, "sys/fs/cgroup/user.slice/job/memory.current", 400);
    assert_int_equal(memory_room(root) / MIB, 600);
    put(root, "sys/fs/cgroup/user.slice/job/memory.stat", "anon 1\ninactive_file 104857600\nactive_file 52428800\n");
    assert_int_equal(memory_room(root) / MIB, 750);
    put_mib(root, "sys/fs/cgroup/user.slice/job/step/memory.max", 300);
    assert_int_equal(memory_room(root) / MIB, 200);
    put_mib(root, "sys/fs/cgroup/user.slice/job/step/memory.current", 301);
    assert_int_equal(memory_room(root), 0);
    put(root, "proc/self/cgroup", "0::/../..\n"); /* a container: its own group is the mounted root */
    put_mib(root, "sys/fs/cgroup/memory.max", 50);
    put_mib(root, "sys/fs/cgroup/memory.current", 20);
    assert_int_equal(memory_room(root) / MIB, 30);
}

static void test_version_1(void **state)
{
    (void)state;
    const char *root = machine();
    put(root, "proc/meminfo", MEMINFO);
    put(root, "proc/self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/docker/abc\n0::/\n");
    put(root, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
    put_mib(root, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", 100);
    put_mib(root, "sys/fs/cgroup/elsewhere/memory.max", 1);
    assert_int_equal(memory_room(root) / MIB, 32768);
    put_mib(root, "sys/fs/cgroup/memory/docker/memory.limit_in_bytes", 2000);
    put_mib(root, "sys/fs/cgroup/memory/docker/memory.usage_in_bytes", 500);
    put(root, "sys/fs/cgroup/memory/docker/memory.stat", "inactive_file 1\ntotal_inactive_file 104857600\n");
    assert_int_equal(memory_room(root) / MIB, 1600);
    put_mib(root, "sys/fs/cgroup/unified/memory.max", 700);
    put_mib(root, "sys/fs/cgroup/unified/memory.current", 10);
    assert_int_equal(memory_room(root) / MIB, 690);
}

static void test_cpu_quota_2(void **state)
{
    (void)state;
    const char *root = machine();
    assert_int_equal(cgroup_cpus(root), INT_MAX);
    put(root, "proc/self/cgroup", "0::/user.slice/job/step\n");
    put(root, "sys/fs/cgroup/user.slice/job/step/cpu.max", "max 100000\n");
    assert_int_equal(cgroup_cpus(root), INT_MAX);
    put(root, "sys/fs/cgroup/user.slice/job/cpu.max", "450000 100000\n"); /* the group around it; 4.5 */
    assert_int_equal(cgroup_cpus(root), 4);
    put(root, "sys/fs/cgroup/user.slice/job/step/cpu.max", "100000 50000\n");
    assert_int_equal(cgroup_cpus(root), 2);
    put(root, "proc/self/cgroup", "0::/\n"); /* a container: its own group is the mounted root */
    assert_int_equal(cgroup_cpus(root), INT_MAX);
    put(root, "sys/fs/cgroup/cpu.max", "50000 100000\n");
    assert_int_equal(cgroup_cpus(root), 1);
}

static void test_cpu_quota_1(void **state)
{
    (void)state;
    const char *root = machine();
    put(root, "proc/self/cgroup", "5:cpuacct,cpu:/docker/abc\n4:cpuset:/elsewhere\n0::/\n");
    put(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us", "100000\n");
    put(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us", "-1\n");
    assert_int_equal(cgroup_cpus(root), INT_MAX);
    put(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us", "300000\n");
    assert_int_equal(cgroup_cpus(root), 3);
}

/* Runs in a child, as a limit cannot be raised again. */
static void test_address_space(void **state)
{
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    printf("skip: AddressSanitizer needs more address space than the limit of this test\n");
#else
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        const struct rlimit limit = {.rlim_cur = 8ll << 30, .rlim_max = 8ll << 30};
        const int64_t free_before = memory_room("");
        if (setrlimit(RLIMIT_AS, &limit)) _exit(2);
        const int64_t room = memory_room("");
        _exit(room < 8ll << 30 && room <= free_before ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
#endif
}

/* A plan uses the memory that the limit leaves, not the machine's total. */
static void test_plan(void **state)
{
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    printf("skip: AddressSanitizer needs more address space than the limit of this test\n");
#else
    struct rlimit old;
    char unit[8];
    double number;
    const char *config = process_config("");
    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
    assert_int_equal(setrlimit(RLIMIT_AS, &(struct rlimit){.rlim_cur = 3ll << 30, .rlim_max = old.rlim_max}), 0);
    const int code = RUN("plan", config, "--set", "train.threads=1");
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);
    if (code) fail_msg("%s", said.err);
    const char *budget = strstr(said.out, "budget ");
    assert_non_null(budget);
    assert_int_equal(sscanf(budget, "budget %lf %7s", &number, unit), 2);
    if (strcmp(unit, "MiB")) assert_true(!strcmp(unit, "GiB") && number < 3);
#endif
}

/* A new block is entirely in RAM and zero, also if its memory had other bytes before. */
static void test_map(void **state)
{
    (void)state;
    const int64_t bytes = 5 * MIB + 3, page = sysconf(_SC_PAGESIZE), n_pages = (bytes + page - 1) / page;
    unsigned char present[(6 << 20) / 4096];
    for (int k = 0; k < 2; k++) {
        char *p = memory_map(bytes);
        assert_non_null(p);
        assert_int_equal(mincore(p, (size_t)bytes, present), 0);
        for (int64_t i = 0; i < n_pages; i++) assert_true(present[i] & 1);
        for (int64_t i = 0; i < bytes; i++) assert_int_equal(p[i], 0);
        memset(p, 7, (size_t)bytes);
        memory_unmap(p, bytes);
    }
    assert_null(memory_map(memory_room("") + (1ll << 40)));
    assert_null(memory_map(0));
}

int test_memory(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version_2),   cmocka_unit_test(test_version_1),     cmocka_unit_test(test_cpu_quota_2),
        cmocka_unit_test(test_cpu_quota_1), cmocka_unit_test(test_address_space), cmocka_unit_test(test_plan),
        cmocka_unit_test(test_map),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
