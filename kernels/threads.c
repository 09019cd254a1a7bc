/* threads.c - see threads.h. */
#include "kernels/threads.h"

#include <omp.h>

void threads_run(int64_t n, int n_threads, void (*job)(void *arg, int64_t i), void *arg)
{
    const int most = n_threads ? n_threads : omp_get_max_threads();
#pragma omp parallel for schedule(dynamic) num_threads((int)MT_MIN(n, most)) if (n > 1)
    for (int64_t i = 0; i < n; i++) job(arg, i);
}
