/* ops.c - the CPU backend's op table and its memory. */
#include "kernels/cpu/real.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "kernels/memory.h"

static void *host_alloc(int64_t bytes)
{
    void *p;
    return posix_memalign(&p, 4096, (size_t)MT_MAX(bytes, 1)) ? NULL : p;
}

static void host_free(void *p) { free(p); }

static void host_free_host(void *p, int64_t bytes) { (void)bytes, free(p); }

static int64_t host_free_bytes(void) { return memory_room(""); }

static int64_t host_used_bytes(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (int64_t)u.ru_maxrss * 1024;
}

static int64_t host_fixed_bytes(void) { return 0; }

static void host_copy(void *dst, const void *src, int64_t bytes)
{
    if (bytes) memcpy(dst, src, (size_t)bytes);
}

/* Uses all cores: one core alone does not saturate the memory bus. */
static void host_copy_wide(void *dst, const void *src, int64_t bytes)
{
    const int64_t piece = 1 << 20;
#pragma omp parallel for
    for (int64_t at = 0; at < bytes; at += piece)
        memcpy((char *)dst + at, (const char *)src + at, (size_t)MT_MIN(piece, bytes - at));
}

/* At once, so there is nothing to join. */
static void host_copy_now(void *dst, const void *src, int64_t bytes, int ticket, bool after_ops)
{
    (void)after_ops;
    (void)ticket;
    host_copy_wide(dst, src, bytes);
}

static void host_join(int ticket) { (void)ticket; }

static void host_zero(void *dst, int64_t bytes)
{
    if (bytes) memset(dst, 0, (size_t)bytes);
}

static void host_wait(void) {}

static double marks[DEV_MARKS];
static void host_mark(int slot) { marks[slot] = clock_ms(); }
static double host_mark_ms(int from, int to) { return marks[to] - marks[from]; }

static void host_count_calls(bool on, struct dev_calls *calls)
{
    (void)on;
    *calls = (struct dev_calls){.missing = "the CPU backend launches no kernels"};
}

static const struct ops table = {
#ifdef MT_F64
    .name = "cpu (f64)",
#else
    .name = "cpu",
#endif
    .rank_multiple = 1,
    .act_dtype = DT_REAL,
    .stat_dtype = DT_REAL,
    .alloc = host_alloc,
    .alloc_host = host_alloc,
    .free = host_free,
    .free_host = host_free_host,
    .free_bytes = host_free_bytes,
    .used_bytes = host_used_bytes,
    .fixed_bytes = host_fixed_bytes,
    .upload = host_copy,
    .download = host_copy,
    .zero = host_zero,
    .wait = host_wait,
    .copy = host_copy_wide,
    .host_copy = host_copy_now,
    .host_join = host_join,
    .mark = host_mark,
    .mark_ms = host_mark_ms,
    .count_calls = host_count_calls,
#define ENTRY(op) .op = CPU(op),
    OPS(ENTRY)
#undef ENTRY
};

/* Whether this processor supports the instructions that this file was compiled for. */
static bool can_run(void)
{
    bool yes = true;
#if defined(__x86_64__) && defined(__AVX2__)
    yes = yes && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(__x86_64__) && defined(__AVX512F__)
    yes = yes && __builtin_cpu_supports("avx512f");
#endif
    return yes;
}

#ifdef MT_F64
const struct ops *ops_cpu64(void)
#else
const struct ops *ops_cpu(void)
#endif
{
    MT_REQUIRE(openblas_get_parallel() != OPENBLAS_SEQUENTIAL,
               "linked with a sequential OpenBLAS, which is not thread-safe: link the pthread or OpenMP version");
    openblas_set_num_threads(1); /* this backend parallelises with OpenMP: gemm.h */
    return can_run() ? &table : NULL;
}

#ifndef MT_F64
const char *ops_cpu_library(void) { return openblas_get_config(); }

/* Chooses OpenBLAS's kernels by the instructions of this processor, unless OPENBLAS_CORETYPE is set. OpenBLAS takes
 * kernels for SSE3 where a processor is younger than its table of models: ten steps of configs/demo.ini took 12.6 s
 * instead of 4.7 (529c078, OpenBLAS 0.3.21, two cores of an Intel Xeon with AVX-512). It reads the variable in a
 * constructor without priority, which runs after this function. */
__attribute__((constructor(101))) static void choose_kernels(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vl"))
        setenv("OPENBLAS_CORETYPE", "SkylakeX", 0);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        setenv("OPENBLAS_CORETYPE", "Haswell", 0);
#endif
}
#endif
