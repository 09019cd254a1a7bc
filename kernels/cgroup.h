/* cgroup.h - the control group (version 1 or 2) of this process and its parents. root: "", or in tests a
 * directory with proc/ and sys/. */
#ifndef MT_CGROUP_H
#define MT_CGROUP_H

#include <stdbool.h>
#include <stdio.h>

/* dir: the directory of a group below root; it may not exist. version: 1 or 2. */
typedef void cgroup_visit(void *user, const char *root, const char *dir, int version);
void cgroup_each(const char *root, const char *controller, cgroup_visit *visit, void *user);

/* Opens `file` in directory dir below root; NULL: failed. cgroup_number reads its first number; false: it has none
 * ("max"). */
FILE *cgroup_open(const char *root, const char *dir, const char *file);
bool cgroup_number(const char *root, const char *dir, const char *file, long long *value);

/* The number of CPUs that the quotas allow, rounded down, at least 1; INT_MAX without a quota. The kernel pauses a
 * process that keeps more threads busy. */
int cgroup_cpus(const char *root);

#endif
