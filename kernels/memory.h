/* memory.h - how much more host memory this process may use; large blocks of it; the threads that it starts. */
#ifndef MT_MEMORY_H
#define MT_MEMORY_H

#include <pthread.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes: the available memory of the machine without swapping, or the remaining bytes of a smaller limit: of a control
 * group (version 1 or 2, the group of this process or a parent) or RLIMIT_AS. root: "", or in tests a directory with
 * proc/ and sys/. */
int64_t memory_room(const char *root);
/* A block of zeros in huge pages, all of it in RAM on return. NULL when `bytes` are more than the room, or the system
 * refuses. A child of fork does not see it. */
void *memory_map(int64_t bytes);
void memory_unmap(void *p, int64_t bytes);
/* Starts a thread; when the system refuses it (a limit of memory or processes), ends the process with an error. */
void thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

#ifdef __cplusplus
}
#endif

#endif
