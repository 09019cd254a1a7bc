/* threads.h - divides independent jobs of the host among threads. */
#ifndef MT_THREADS_H
#define MT_THREADS_H

#include "kernels/base.h"

/* Calls job(arg, i) once for each i from 0 to n - 1, in any order and at the same time; returns after the last.
 * n_threads 0: as many threads as the process may use. Waking threads and waiting for them takes about as long as
 * THREADS_GRAIN simple operations: a job should have at least as many, and less work in total should use one thread. */
enum { THREADS_GRAIN = 1 << 16 };
void threads_run(int64_t n, int n_threads, void (*job)(void *arg, int64_t i), void *arg);

#endif
