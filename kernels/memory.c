/* memory.c - free memory according to the kernel and the limits of this process; blocks of it; threads.
 *
 * Page cache is also charged to a control group, but the kernel can reclaim it: it does not count as used. */
#include "kernels/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/base.h"
#include "kernels/cgroup.h"

/* File names of a group in each version of the interface. */
struct version {
    const char *limit, *used, *inactive, *active;
};
static const struct version v1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                                  "total_active_file"};
static const struct version v2 = {"memory.max", "memory.current", "inactive_file", "active_file"};

/* The sum of NUMBER over the lines "KEY NUMBER" of a file with key a or b. */
static int64_t read_keys(const char *root, const char *dir, const char *file, const char *a, const char *b)
{
    char key[64];
    long long value;
    int64_t sum = 0;
    FILE *f = cgroup_open(root, dir, file);
    while (f && fscanf(f, "%63s %lld%*[^\n]", key, &value) == 2)
        if (!strcmp(key, a) || !strcmp(key, b)) sum += value;
    if (f) fclose(f);
    return sum;
}

/* Remaining memory of a group. */
static void take_room(void *user, const char *root, const char *dir, int version)
{
    const struct version *v = version == 1 ? &v1 : &v2;
    int64_t *room = user;
    long long limit, used;
    if (!cgroup_number(root, dir, v->limit, &limit) || !cgroup_number(root, dir, v->used, &used)) return;
    const int64_t cache = read_keys(root, dir, "memory.stat", v->inactive, v->active);
    *room = MT_MIN(*room, MT_MAX(limit - MT_MAX(used - cache, 0), 0));
}

/* Remaining address space; mapped files count as much as memory does. */
static int64_t address_room(const char *root)
{
    struct rlimit limit;
    long long pages = 0;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > INT64_MAX) return INT64_MAX;
    (void)cgroup_number(root, "/proc/self", "statm", &pages);
    return MT_MAX((int64_t)limit.rlim_cur - (int64_t)pages * (int64_t)sysconf(_SC_PAGESIZE), 0);
}

int64_t memory_room(const char *root)
{
    int64_t room = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
    const int64_t kib = read_keys(root, "/proc", "meminfo", "MemAvailable:", "");
    if (kib > 0) room = kib * 1024;
    cgroup_each(root, "memory", take_room, &room);
    return MT_MIN(room, address_room(root));
}

/* The kernel allocates a page at its first write, and without free memory would kill a process then: so all pages are
 * written here, 512 (a huge page) by each thread at a time. */
void *memory_map(int64_t bytes)
{
    const int64_t page = sysconf(_SC_PAGESIZE);
    if (bytes < 1 || bytes > memory_room("")) return NULL;
    char *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    (void)madvise(p, (size_t)bytes, MADV_HUGEPAGE); /* small pages where the kernel has no huge ones */
    if (madvise(p, (size_t)bytes, MADV_DONTFORK)) return memory_unmap(p, bytes), NULL;
#pragma omp parallel for schedule(static, 512)
    for (int64_t at = 0; at < bytes; at += page) p[at] = 0;
    return p;
}

void memory_unmap(void *p, int64_t bytes) { MT_REQUIRE(!munmap(p, (size_t)bytes), "not a block of memory_map"); }

void thread_start(pthread_t *thread, void *(*run)(void *), void *arg)
{
    const int rc = pthread_create(thread, NULL, run, arg);
    if (!rc) return;
    end_with_error("the system refused another thread (%s): raise its limits of memory and processes", strerror(rc));
}
