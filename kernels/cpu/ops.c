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

/* With all cores: one core alone does not saturate the memory bus. */
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
    .embed_fwd = CPU(embed_fwd),
    .rmsnorm_fwd = CPU(rmsnorm_fwd),
    .rmsnorm_bwd = CPU(rmsnorm_bwd),
    .linear_fwd = CPU(linear_fwd),
    .linear_bwd = CPU(linear_bwd),
    .rope_fwd = CPU(rope_fwd),
    .rope_bwd = CPU(rope_bwd),
    .attn_fwd = CPU(attn_fwd),
    .attn_bwd = CPU(attn_bwd),
    .qk_norm_fwd = CPU(qk_norm_fwd),
    .qk_norm_bwd = CPU(qk_norm_bwd),
    .mla_qkv_fwd = CPU(mla_qkv_fwd),
    .mla_qkv_bwd = CPU(mla_qkv_bwd),
    .conv_silu_fwd = CPU(conv_silu_fwd),
    .conv_silu_bwd = CPU(conv_silu_bwd),
    .delta_fwd = CPU(delta_fwd),
    .delta_bwd = CPU(delta_bwd),
    .gated_norm_fwd = CPU(gated_norm_fwd),
    .gated_norm_bwd = CPU(gated_norm_bwd),
    .attn_split_fwd = CPU(attn_split_fwd),
    .attn_split_bwd = CPU(attn_split_bwd),
    .attn_gate_fwd = CPU(attn_gate_fwd),
    .attn_gate_bwd = CPU(attn_gate_bwd),
    .hyper_pre_fwd = CPU(hyper_pre_fwd),
    .hyper_post_fwd = CPU(hyper_post_fwd),
    .hyper_post_bwd = CPU(hyper_post_bwd),
    .hyper_pre_bwd = CPU(hyper_pre_bwd),
    .compress_fwd = CPU(compress_fwd),
    .compress_bwd = CPU(compress_bwd),
    .index_topk = CPU(index_topk),
    .tail_rope_fwd = CPU(tail_rope_fwd),
    .tail_rope_bwd = CPU(tail_rope_bwd),
    .group_linear_fwd = CPU(group_linear_fwd),
    .group_linear_bwd = CPU(group_linear_bwd),
    .shared_attn_fwd = CPU(shared_attn_fwd),
    .shared_attn_bwd = CPU(shared_attn_bwd),
    .hash_route = CPU(hash_route),
    .router_fwd = CPU(router_fwd),
    .route_sort = CPU(route_sort),
    .aux_stats = CPU(aux_stats),
    .router_bwd = CPU(router_bwd),
    .glu_fwd = CPU(glu_fwd),
    .glu_bwd = CPU(glu_bwd),
    .add = CPU(add),
    .moe_up_fwd = CPU(moe_up_fwd),
    .glu_quant_fwd = CPU(glu_quant_fwd),
    .moe_down_fwd = CPU(moe_down_fwd),
    .moe_combine_fwd = CPU(moe_combine_fwd),
    .gather = CPU(gather),
    .moe_down_bwd = CPU(moe_down_bwd),
    .moe_up_bwd = CPU(moe_up_bwd),
    .linear_ce = CPU(linear_ce),
    .linear_kl = CPU(linear_kl),
    .linear_topk = CPU(linear_topk),
    .sumsq = CPU(sumsq),
    .adamw = CPU(adamw),
    .cast = CPU(cast),
    .decode = CPU(decode),
    .mx_range = CPU(mx_range),
    .expert_codes = CPU(expert_codes),
    .proj_amax = CPU(proj_amax),
    .loss_sum = CPU(loss_sum),
    .aux_sum = CPU(aux_sum),
    .row_count = CPU(row_count),
    .amax = CPU(amax),
    .fake_quant = CPU(fake_quant),
    .fake_quant_bwd = CPU(fake_quant_bwd),
    .quant_pack = CPU(quant_pack),
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

/* Chooses OpenBLAS's kernels by the instructions of this processor, unless OPENBLAS_CORETYPE is set. OpenBLAS itself
 * looks for the processor's model in a table, and takes its kernels for SSE3 where the processor is younger than the
 * table: ten steps of configs/demo.ini took 12.6 s instead of 4.7 (529c078, OpenBLAS 0.3.21, two cores of an Intel Xeon
 * with AVX-512). It reads the variable in a constructor without priority, hence later than this one. */
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
