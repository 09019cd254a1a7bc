/* blas.c - checks that there is room for the threads of OpenMP and the buffers of OpenBLAS, which maps a buffer for
 * every calling thread and keeps it. When the system refuses one, OpenBLAS retries forever: a process with a limited
 * address space (ulimit -v) would hang. So the buffers of all threads of a team are allocated before its first product,
 * each after a test for room. */
#ifndef MT_F64 /* compiled once for both precisions */
#include <cblas.h>
#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cgroup.h"
#include "kernels/cpu/gemm.h"

#define BUFFER_BYTES ((size_t)129 << 20) /* BUFFER_SIZE of OpenBLAS, 32 << 22, and its alignment */

/* Functions of OpenBLAS without a header; a build may hide them. */
void *blas_memory_alloc(int position) __attribute__((weak));
void blas_memory_free(void *buffer) __attribute__((weak));

static bool has_room(void)
{
    void *p = mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p != MAP_FAILED && !munmap(p, BUFFER_BYTES);
}

/* Runs before OpenBLAS's constructor, which otherwise starts unused threads, each with a buffer. Since 0.3.28 the
 * constructor also allocates a buffer for this thread. */
__attribute__((constructor(101))) static void before_openblas(void)
{
    int minor, patch;
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    if (sscanf(OPENBLAS_VERSION, " OpenBLAS 0.%d.%d", &minor, &patch) == 2 && minor == 3 && patch < 28) return;
    if (has_room()) return;
    fprintf(stderr,
            "moetrain: error: out of memory: OpenBLAS needs %zu MiB of address space: raise the limit (ulimit -v)\n",
            BUFFER_BYTES >> 20);
    _exit(1);
}

enum { MAX_THREADS = 512 }; /* OpenBLAS 0.3 has no memory for more than some 600 callers at a time */

static void *wait_here(void *lock)
{
    pthread_mutex_lock(lock);
    pthread_mutex_unlock(lock);
    return NULL;
}

int ops_cpu_threads(int *n, struct err *err)
{
    static int started; /* OpenMP keeps its team of threads */
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const int max = omp_get_max_threads();
    const int most = max == omp_get_num_procs() ? MT_MIN(max, cgroup_cpus("")) : max; /* else OMP_NUM_THREADS applies */
    const int want = MT_MIN(most, MAX_THREADS);
    int had = 0, team = 0, rc = 0;
    if (started) return *n = started, 0;
    pthread_t *threads = mem_array(want, sizeof(*threads));
    pthread_mutex_lock(&lock); /* all threads exist at the same time until it is released */
    while (had < want - 1 && !(rc = pthread_create(&threads[had], NULL, wait_here, &lock))) had++;
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < had; i++) pthread_join(threads[i], NULL);
    mem_free(threads);
    if (rc)
        return err_set(err,
                       "%d threads cannot be started (%s): raise the limits of address space and processes (ulimit -v, "
                       "-u), or set OMP_NUM_THREADS to at most %d",
                       want, strerror(rc), MT_MAX(had / 2, 1));
    omp_set_num_threads(want);
#pragma omp parallel reduction(+ : team)
    team++;
    *n = started = team;
    return 0;
}

void blas_reserve(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static atomic_int reserved; /* number of threads that have a buffer */
    const int n = omp_get_num_threads();
    if (n <= atomic_load_explicit(&reserved, memory_order_acquire)) return;
    pthread_mutex_lock(&lock);
    const int had = atomic_load_explicit(&reserved, memory_order_relaxed);
    void **buffers = mem_array(n, sizeof(*buffers));
    for (int i = 0; i < n && n > had; i++) {
        if (i >= had && !has_room()) {
            fprintf(stderr,
                    "moetrain: error: out of memory: a matrix product needs %zu MiB of address space for each of %d "
                    "threads: raise the limit (ulimit -v), or lower train.threads\n",
                    BUFFER_BYTES >> 20, n);
            _exit(1);
        }
        if (blas_memory_alloc && blas_memory_free) buffers[i] = blas_memory_alloc(0);
    }
    for (int i = 0; i < n; i++)
        if (buffers[i]) blas_memory_free(buffers[i]);
    mem_free(buffers);
    if (n > had) atomic_store_explicit(&reserved, n, memory_order_release);
    pthread_mutex_unlock(&lock);
}
#endif
