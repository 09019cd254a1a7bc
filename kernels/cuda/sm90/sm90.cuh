/* sm90.cuh - Hopper instructions, one function each: mbarrier, bulk tensor copies (TMA), wgmma, setmaxnreg. The names
 * are those of the PTX ISA. Shared memory has 32-bit addresses (sm90_shared). Kernels of this folder trap where they
 * are not compiled for sm_90a: cuda.arch is then never CUDA_SM90, so no op launches them.
 *
 * Tiles in shared memory are rows of 128 bytes (64 bf16), 1024-byte aligned, in the 128-byte swizzle of TMA and wgmma:
 * 16-byte chunk c of row i is at byte i * 128 + ((c ^ (i & 7)) * 16). */
#ifndef MT_CUDA_SM90_H
#define MT_CUDA_SM90_H

#include <cuda.h>
#include <stdint.h>

#include "kernels/cuda/core/cuda.h"

__host__ __device__ __forceinline__ uint32_t sm90_swizzle(uint32_t i, uint32_t c)
{
    return i * 128 + ((c ^ (i & 7)) << 4);
}

/* A wgmma matrix descriptor of a swizzled tile; distances in bytes. K-major (a row is one m or n with 64 of k):
 * `stride` is the distance between groups of 8 rows, `lead` is unused and 16. MN-major (a row is one k with 64 of n):
 * `stride` as above, `lead` the distance between groups of 64 columns. */
__host__ __device__ __forceinline__ uint64_t sm90_descriptor(uint32_t address, uint32_t lead, uint32_t stride)
{
    const uint64_t swizzle_128 = 1ull << 62;
    return swizzle_128 | (uint64_t)(stride >> 4) << 32 | (uint64_t)(lead >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t sm90_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

template <int N> __device__ __forceinline__ void sm90_registers_less()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N> __device__ __forceinline__ void sm90_registers_more()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}

/* ---- mbarrier ---- */

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count) : "memory");
}
/* Call it after the inits and before __syncthreads(): it makes them visible to TMA too. */
__device__ __forceinline__ void mbarrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(bar) : "memory");
}
/* Arrives, and adds `bytes` of bulk copies to what the phase waits for. */
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
}
/* Waits until the phase of this parity is complete; the phase before the first one counts as complete, with parity 1.
 */
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}

/* ---- named barriers: 0 is __syncthreads(); `count` threads, of whole warps ---- */

__device__ __forceinline__ void named_sync(int id, int count)
{
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(count) : "memory");
}
/* named_sync for warps that wait in different places of the code; bar.sync requires that all wait at the same
 * instruction. */
__device__ __forceinline__ void named_sync_apart(int id, int count)
{
    asm volatile("barrier.sync %0, %1;\n" ::"r"(id), "r"(count) : "memory");
}
/* Arrives without waiting. */
__device__ __forceinline__ void named_arrive(int id, int count)
{
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(count) : "memory");
}

/* ---- copies ---- */

/* Loads the box of `map` at (x, y, z) into swizzled shared memory; zeros out of bounds. Signals its bytes on bar. */
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y, int z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];\n" ::"r"(to),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}
/* Copies 16 bytes; writes zeros and reads nothing when !in_bounds. */
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, bool in_bounds)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(in_bounds ? 16 : 0)
                 : "memory");
}
/* Arrives on bar when all earlier cp.async of this thread are complete. */
__device__ __forceinline__ void cp_async_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(bar) : "memory");
}
/* Orders writes of threads to shared memory (cp.async included) before later accesses by wgmma and TMA. */
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
/* Stores four 8x8 matrices of 16 bits; lanes 8i .. 8i+7 have the addresses of the rows of matrix i, and of its columns
 * when TRANS. */
template <bool TRANS = false> __device__ __forceinline__ void store_matrix4(uint32_t shared, const uint32_t x[4])
{
    if (TRANS)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(x[0]),
                     "r"(x[1]), "r"(x[2]), "r"(x[3])
                     : "memory");
}
/* Copies shared memory to global memory, or adds it there as f32; `bytes` and addresses are multiples of 16. One
 * thread. */
__device__ __forceinline__ void bulk_store(float *to, uint32_t from, uint32_t bytes, bool add)
{
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
                     "r"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from), "r"(bytes)
                     : "memory");
}
/* Copies global to shared memory; signals its bytes on bar. */
__device__ __forceinline__ void bulk_load(uint32_t to, const float *from, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
/* Waits until this thread's groups have been written. */
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
/* Orders accesses to global and shared memory before later ones by bulk copies, and the other way around. */
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;\n" ::: "memory"); }
/* Prefetches into L2; address and size are multiples of 16. */
__device__ __forceinline__ void prefetch_l2(const void *p, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(p), "r"(bytes) : "memory");
}
/* Prefetches the sector of 32 bytes that holds p into L2. */
__device__ __forceinline__ void prefetch_line(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(p) : "memory");
}
/* A barrier of the 128 threads of a warpgroup; 0 is that of __syncthreads(). */
__device__ __forceinline__ void warpgroup_barrier(int barrier)
{
    asm volatile("bar.sync %0, 128;\n" ::"r"(barrier) : "memory");
}

/* ---- wgmma: d [64, N] f32 += a [64, 16] b [16, N]; b K-major, or MN-major when TRANS_B ----
 *
 * Thread t of the warpgroup holds, for each 8 columns j, d[4j], d[4j+1] of row 16 (t / 32) + t % 32 / 4 and columns 8j
 * + 2 (t % 4), +1; d[4j+2], d[4j+3] are 8 rows below. */

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
/* Waits until at most PENDING committed groups are incomplete. */
template <int PENDING> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}
/* Call it after wgmma_wait<0>, so that the compiler moves no use of d before the wait. */
template <int N> __device__ __forceinline__ void wgmma_use(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define MT_WGMMA_8(i)                                                                                                  \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define MT_WGMMA_32(i)   MT_WGMMA_8(i), MT_WGMMA_8(i + 8), MT_WGMMA_8(i + 16), MT_WGMMA_8(i + 24)
#define MT_WGMMA_OUT_32  MT_WGMMA_32(0)
#define MT_WGMMA_OUT_40  MT_WGMMA_32(0), MT_WGMMA_8(32)
#define MT_WGMMA_OUT_48  MT_WGMMA_OUT_40, MT_WGMMA_8(40)
#define MT_WGMMA_OUT_64  MT_WGMMA_32(0), MT_WGMMA_32(32)
#define MT_WGMMA_OUT_96  MT_WGMMA_OUT_64, MT_WGMMA_32(64)
#define MT_WGMMA_OUT_128 MT_WGMMA_OUT_96, MT_WGMMA_32(96)
#define MT_WGMMA_NAMES_32                                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MT_WGMMA_NAMES_40 MT_WGMMA_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MT_WGMMA_NAMES_48 MT_WGMMA_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MT_WGMMA_NAMES_64                                                                                              \
    MT_WGMMA_NAMES_48                                                                                                  \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MT_WGMMA_NAMES_96                                                                                              \
    MT_WGMMA_NAMES_64                                                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                               \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MT_WGMMA_NAMES_128                                                                                             \
    MT_WGMMA_NAMES_96                                                                                                  \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                   \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* a and b in shared memory, a MN-major when TRANS_A. accumulate false: d = a b. E: elements of d, N / 2; E .. E + 4
 * number the asm operands after d. */
#define MT_WGMMA_SHARED(E, N, A, B, P, TA, T)                                                                          \
    template <bool TRANS_B, bool TRANS_A = false>                                                                      \
    __device__ __forceinline__ void wgmma(float(&d)[E], uint64_t a, uint64_t b, bool accumulate)                       \
    {                                                                                                                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                     "k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_##E "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #T ";\n}\n"  \
                     : MT_WGMMA_OUT_##E                                                                                \
                     : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)TRANS_A), "n"((int)TRANS_B));                    \
    }
MT_WGMMA_SHARED(32, 64, 32, 33, 34, 35, 36)
MT_WGMMA_SHARED(40, 80, 40, 41, 42, 43, 44)
MT_WGMMA_SHARED(48, 96, 48, 49, 50, 51, 52)
MT_WGMMA_SHARED(64, 128, 64, 65, 66, 67, 68)
MT_WGMMA_SHARED(96, 192, 96, 97, 98, 99, 100)
MT_WGMMA_SHARED(128, 256, 128, 129, 130, 131, 132)

/* wgmma for a [64, 32] and b [32, N] in e4m3, both K-major: 128 of k in a row of 128 bytes. The sums inside one
 * instruction keep about 14 bits, so callers add d to f32 sums after at most 128 of k. */
#define MT_WGMMA_E4M3(E, N, A, B, P)                                                                                   \
    __device__ __forceinline__ void wgmma_e4m3(float(&d)[E], uint64_t a, uint64_t b, bool accumulate)                  \
    {                                                                                                                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                     "k32.f32.e4m3.e4m3 {" MT_WGMMA_NAMES_##E "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                     \
                     : MT_WGMMA_OUT_##E                                                                                \
                     : "l"(a), "l"(b), "r"((int)accumulate));                                                          \
    }
MT_WGMMA_E4M3(64, 128, 64, 65, 66)
MT_WGMMA_E4M3(96, 192, 96, 97, 98)

/* a in registers, in the layout of mma_bf16 (mma.cuh), as are two adjacent blocks of 8 columns of an accumulator,
 * rounded to bf16. a must not change before wgmma_wait has returned for this product. */
#define MT_WGMMA_REGISTERS(E, N, A0, A1, A2, A3, B, P, T)                                                              \
    template <bool TRANS_B>                                                                                            \
    __device__ __forceinline__ void wgmma(float(&d)[E], const uint32_t(&a)[4], uint64_t b, bool accumulate)            \
    {                                                                                                                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                     "k16.f32.bf16.bf16 {" MT_WGMMA_NAMES_##E "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B      \
                                                              ", p, 1, 1, %" #T ";\n}\n"                               \
                     : MT_WGMMA_OUT_##E                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"((int)TRANS_B));   \
    }
MT_WGMMA_REGISTERS(32, 64, 32, 33, 34, 35, 36, 37, 38)
MT_WGMMA_REGISTERS(64, 128, 64, 65, 66, 67, 68, 69, 70)
MT_WGMMA_REGISTERS(96, 192, 96, 97, 98, 99, 100, 101, 102)
MT_WGMMA_REGISTERS(128, 256, 128, 129, 130, 131, 132, 133, 134)
#undef MT_WGMMA_SHARED
#undef MT_WGMMA_E4M3
#undef MT_WGMMA_REGISTERS
#undef MT_WGMMA_8
#undef MT_WGMMA_32
#undef MT_WGMMA_OUT_32
#undef MT_WGMMA_OUT_40
#undef MT_WGMMA_OUT_48
#undef MT_WGMMA_OUT_64
#undef MT_WGMMA_OUT_96
#undef MT_WGMMA_OUT_128
#undef MT_WGMMA_NAMES_32
#undef MT_WGMMA_NAMES_40
#undef MT_WGMMA_NAMES_48
#undef MT_WGMMA_NAMES_64
#undef MT_WGMMA_NAMES_96
#undef MT_WGMMA_NAMES_128

#endif
/* ---- host: tensor maps ---- */

/* n_axis axes, the innermost first: sizes and boxes in elements, strides of the outer axes in bytes, multiples of 16.
 * swizzled: in 128 bytes. Zeros beyond the edges. */
struct sm90_map {
    CUtensorMapDataType type;
    int n_axis;
    const void *base;
    const cuuint64_t *size, *stride;
    const cuuint32_t *box;
    bool swizzled;
};
static inline CUtensorMap sm90_encode(const struct sm90_map *m)
{
    static decltype(&cuTensorMapEncodeTiled) encode;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                                    cudaEnableDefault, &found));
        MT_REQUIRE(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    }
    const cuuint32_t step[] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult rc =
        encode(&map, m->type, (cuuint32_t)m->n_axis, (void *)m->base, m->size, m->stride, m->box, step,
               CU_TENSOR_MAP_INTERLEAVE_NONE, m->swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    MT_REQUIRE(rc == CUDA_SUCCESS, "a tensor map of %lld x %lld x %lld: driver error %d", (long long)m->size[2],
               (long long)m->size[1], (long long)m->size[0], (int)rc);
    return map;
}

/* The map of a tensor of three axes, of bf16 or of bytes, for tma_load: swizzled boxes of 128 bytes of the innermost
 * axis. Sizes, strides and boxes as in struct sm90_map. */
static inline CUtensorMap sm90_tensor_map(const void *base, const int64_t size[3], const int64_t stride[2],
                                          const int64_t box[3],
                                          CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)
{
    MT_REQUIRE((uintptr_t)base % 16 == 0 && stride[0] % 16 == 0 && stride[1] % 16 == 0,
               "a tensor map needs a base and strides that are multiples of 16 bytes");
    const cuuint64_t sizes[] = {(cuuint64_t)size[0], (cuuint64_t)size[1], (cuuint64_t)size[2]};
    const cuuint64_t strides[] = {(cuuint64_t)stride[0], (cuuint64_t)stride[1]};
    const cuuint32_t boxes[] = {(cuuint32_t)box[0], (cuuint32_t)box[1], (cuuint32_t)box[2]};
    const struct sm90_map map = {type, 3, base, sizes, strides, boxes, true};
    return sm90_encode(&map);
}

#endif
