/* threads.c - see threads.h. */
#include "kernels/threads.h"

void threads_run(int64_t n, int n_threads, void (*job)(void *arg, int64_t i), void *arg)
{
    if (n_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(n_threads) if (n > 1 && n_threads > 1)
        for (int64_t i = 0; i < n; i++) job(arg, i);
        return;
    }
#pragma omp parallel for schedule(dynamic) if (n > 1)
    for (int64_t i = 0; i < n; i++) job(arg, i);
}
