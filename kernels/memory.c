/* memory.c - free memory as the kernel and its limits have it.
 *
 * A control group limits its own processes and those of all groups inside it, so that every group from this process's
 * own up to the root counts. Page cache is charged to a group, too, but gives way: it does not count as used. Inside a
 * container /proc/self/cgroup may name a path of the host that is not mounted here; then the mounted root is the
 * container's own group, and the walk up ends there. */
#include "kernels/memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/base.h"

/* The files of a group in the two versions of the interface. */
struct version {
    const char *limit, *used, *inactive, *active;
};
static const struct version v1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                                  "total_active_file"};
static const struct version v2 = {"memory.max", "memory.current", "inactive_file", "active_file"};

struct name {
    char s[MT_PATH];
};
static FILE *open_in(const char *root, const char *dir, const char *file)
{
    struct name path;
    struct err err;
    return str_format(path.s, sizeof(path.s), &err, "path", "%s%s/%s", root, dir, file) ? NULL : fopen(path.s, "r");
}

/* "max", which is no limit, and a missing file: false. */
static bool read_number(const char *root, const char *dir, const char *file, long long *value)
{
    FILE *f = open_in(root, dir, file);
    const bool found = f && fscanf(f, "%lld", value) == 1;
    if (f) fclose(f);
    return found;
}

/* The sum of the lines "KEY NUMBER" of a file whose keys are a or b. */
static int64_t read_keys(const char *root, const char *dir, const char *file, const char *a, const char *b)
{
    char key[64];
    long long value;
    int64_t sum = 0;
    FILE *f = open_in(root, dir, file);
    while (f && fscanf(f, "%63s %lld%*[^\n]", key, &value) == 2)
        if (!strcmp(key, a) || !strcmp(key, b)) sum += value;
    if (f) fclose(f);
    return sum;
}

/* What the groups from mount + path up to mount leave. */
static int64_t group_room(const char *root, const char *mount, const char *path, const struct version *v)
{
    char dir[MT_PATH];
    int64_t room = INT64_MAX;
    const size_t top = strlen(mount);
    if ((size_t)snprintf(dir, sizeof(dir), "%s%s", mount, path) >= sizeof(dir)) dir[top] = 0;
    for (;;) {
        long long limit, used;
        if (read_number(root, dir, v->limit, &limit) && read_number(root, dir, v->used, &used)) {
            const int64_t cache = read_keys(root, dir, "memory.stat", v->inactive, v->active);
            room = MT_MIN(room, MT_MAX(limit - MT_MAX(used - cache, 0), 0));
        }
        char *slash = strrchr(dir + top, '/');
        if (!slash) return room;
        *slash = 0;
    }
}

static bool lists_memory(const char *controllers)
{
    for (const char *at = controllers; *at; at += strcspn(at, ",")) {
        at += *at == ',';
        if (strcspn(at, ",") == 6 && !strncmp(at, "memory", 6)) return true;
    }
    return false;
}

static int64_t groups_room(const char *root)
{
    char line[MT_PATH];
    int64_t room = INT64_MAX;
    FILE *f = open_in(root, "/proc/self", "cgroup");
    while (f && fgets(line, sizeof(line), f)) { /* ID:CONTROLLERS:PATH; version 2 has the ID 0 and no controllers */
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *controllers++ = *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (!strcmp(path, "/")) *path = 0;
        if (!strcmp(line, "0") && !*controllers) {
            room = MT_MIN(room, group_room(root, "/sys/fs/cgroup", path, &v2));
            room = MT_MIN(room, group_room(root, "/sys/fs/cgroup/unified", path, &v2)); /* both versions mounted */
        } else if (lists_memory(controllers)) {
            room = MT_MIN(room, group_room(root, "/sys/fs/cgroup/memory", path, &v1));
        }
    }
    if (f) fclose(f);
    return room;
}

/* Address space, of which mapped files take as much as memory does. */
static int64_t address_room(const char *root)
{
    struct rlimit limit;
    long long pages = 0;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > INT64_MAX) return INT64_MAX;
    (void)read_number(root, "/proc/self", "statm", &pages);
    return MT_MAX((int64_t)limit.rlim_cur - (int64_t)pages * (int64_t)sysconf(_SC_PAGESIZE), 0);
}

int64_t memory_room(const char *root)
{
    int64_t room = (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE);
    const int64_t kib = read_keys(root, "/proc", "meminfo", "MemAvailable:", "");
    if (kib > 0) room = kib * 1024;
    room = MT_MIN(room, groups_room(root));
    return MT_MIN(room, address_room(root));
}
