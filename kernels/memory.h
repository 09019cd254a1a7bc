/* memory.h - how much more host memory this process may use; large blocks of it; threads. */
#ifndef MT_MEMORY_H
#define MT_MEMORY_H

#include <pthread.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes: the available memory of the machine without swapping, or what is left of a smaller limit: RLIMIT_AS or that of
 * a control group (version 1 or 2, the group of this process or a parent). root: "", or in tests a directory with proc/
 * and sys/. */
int64_t memory_room(const char *root);
/* A block of zeros in huge pages, all of it in RAM on return; NULL when memory_room is less than `bytes` or the system
 * refuses. A child of fork does not see it. */
void *memory_map(int64_t bytes);
void memory_unmap(void *p, int64_t bytes);
/* Starts a thread; when the system refuses it (a limit of memory or processes), ends the process with an error. */
void thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

#ifdef __cplusplus
}
#endif

#endif
