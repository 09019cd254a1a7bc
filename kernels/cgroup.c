/* cgroup.c - walks the control groups of this process, and reads their CPU quota.
 *
 * A control group limits its processes and those of all groups inside it, so every group from this process's group up
 * to the root counts. Inside a container /proc/self/cgroup may name a host path that is not mounted here; then the
 * mounted root is the container's group, and the walk ends there. */
#include "kernels/cgroup.h"

#include <limits.h>
#include <string.h>

#include "kernels/base.h"

FILE *cgroup_open(const char *root, const char *dir, const char *file)
{
    char path[MT_PATH];
    struct err err;
    return str_format(path, sizeof(path), &err, "path", "%s%s/%s", root, dir, file) ? NULL : fopen(path, "r");
}

bool cgroup_number(const char *root, const char *dir, const char *file, long long *value)
{
    FILE *f = cgroup_open(root, dir, file);
    const bool found = f && fscanf(f, "%lld", value) == 1;
    if (f) fclose(f);
    return found;
}

/* The groups from mount + path up to mount. */
static void walk_up(const char *root, const char *mount, const char *path, int version, cgroup_visit *visit, void *user)
{
    char dir[MT_PATH];
    const size_t top = strlen(mount);
    if ((size_t)snprintf(dir, sizeof(dir), "%s%s", mount, path) >= sizeof(dir)) dir[top] = 0;
    for (;;) {
        visit(user, root, dir, version);
        char *slash = strrchr(dir + top, '/');
        if (!slash) return;
        *slash = 0;
    }
}

static bool lists(const char *controllers, const char *name)
{
    for (const char *at = controllers; *at; at += strcspn(at, ",")) {
        at += *at == ',';
        if (strcspn(at, ",") == strlen(name) && !strncmp(at, name, strlen(name))) return true;
    }
    return false;
}

void cgroup_each(const char *root, const char *controller, cgroup_visit *visit, void *user)
{
    char line[MT_PATH], mount[64];
    FILE *f = cgroup_open(root, "/proc/self", "cgroup");
    while (f && fgets(line, sizeof(line), f)) { /* ID:CONTROLLERS:PATH; version 2 has the ID 0 and no controllers */
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *controllers++ = *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (!strcmp(path, "/")) *path = 0;
        if (!strcmp(line, "0") && !*controllers) {
            walk_up(root, "/sys/fs/cgroup", path, 2, visit, user);
            walk_up(root, "/sys/fs/cgroup/unified", path, 2, visit, user); /* both versions mounted */
        } else if (lists(controllers, controller)) {
            snprintf(mount, sizeof(mount), "/sys/fs/cgroup/%s", controller);
            walk_up(root, mount, path, 1, visit, user);
        }
    }
    if (f) fclose(f);
}

/* quota microseconds of CPU time per period. */
static void take_quota(void *user, const char *root, const char *dir, int version)
{
    long long quota = 0, period = 0;
    int *cpus = user;
    if (version == 2) {
        FILE *f = cgroup_open(root, dir, "cpu.max"); /* "max 100000" without a quota */
        if (f && fscanf(f, "%lld %lld", &quota, &period) != 2) quota = 0;
        if (f) fclose(f);
    } else if (!cgroup_number(root, dir, "cpu.cfs_quota_us", &quota) || /* -1: no quota */
               !cgroup_number(root, dir, "cpu.cfs_period_us", &period)) {
        return;
    }
    if (quota > 0 && period > 0) *cpus = (int)MT_MIN(*cpus, MT_MAX(quota / period, 1));
}

int cgroup_cpus(const char *root)
{
    int cpus = INT_MAX;
    cgroup_each(root, "cpu", take_quota, &cpus);
    return cpus;
}
