/* memory.h - how much more host memory this process may use; the threads that it starts. */
#ifndef MT_MEMORY_H
#define MT_MEMORY_H

#include <pthread.h>
#include <stdint.h>

/* Bytes: the available memory of the machine without swapping, or the remaining bytes of a smaller limit: of a control
 * group (version 1 or 2, the group of this process or a parent) or RLIMIT_AS. root: "", or in tests a directory with
 * proc/ and sys/. */
int64_t memory_room(const char *root);
/* Starts a thread; when the system refuses it (a limit of memory or processes), ends the process with an error. */
void thread_start(pthread_t *thread, void *(*run)(void *), void *arg);

#endif
