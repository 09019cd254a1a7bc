/* attn_shared_wgmma.cuh - what the Hopper kernels of attention with shared keys have in common: 64 heads of 512
 * columns.
 *
 * Two warpgroups of a block compute, a third loads. A tile of N rows is 8 panels of 64 columns: N rows of 128 bytes,
 * swizzled (sm90.cuh). Threads copy rows with cp.async, so a tile may gather any keys. */
#ifndef MT_CUDA_ATTN_SHARED_WGMMA_H
#define MT_CUDA_ATTN_SHARED_WGMMA_H

#include "kernels/cuda/parts/attn_shared.cuh"
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/sm90/sm90.cuh"

enum {
    PAIR = 256,                               /* threads that compute: two warpgroups */
    THREADS = PAIR + 128,                     /* of a block: the others load */
    PANEL_ROW = 128,                          /* bytes of a row of a panel */
    HEAD_PANEL = SHARED_HEADS * PANEL_ROW,    /* bytes of a panel of heads */
    HEAD_TILE = SHARED_HEADS * SHARED_DIM * 2 /* bytes of the rows of 64 heads of a token */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* One arrival for a warp, after all its lanes have done what comes before. */
__device__ static __forceinline__ void arrive_warp(uint32_t bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

/* Loads panels first .. end - 1 of the rows of 64 heads of a token. One thread calls it. map: from map_heads. */
__device__ static __forceinline__ void load_panels(uint32_t to, uint32_t bar, const CUtensorMap *map, int first,
                                                   int end, int head0, int t)
{
#pragma unroll 1
    for (int i = first; i < end; i++) tma_load(to + (i - first) * HEAD_PANEL, map, bar, i * 64, head0, t);
}

/* The row of the key that this lane finds for copy_keys; any row when it has none. */
template <int ROWS, int WARPS>
__device__ static __forceinline__ const bf16 *find_key(const struct shared_args &a, const struct sight &s, int k0,
                                                       int n, int warp)
{
    static_assert(ROWS / WARPS <= 32 && ROWS % WARPS == 0, "a lane finds the row of one key");
    const int lane = threadIdx.x % 32, k = k0 + warp * (ROWS / WARPS) + lane, e = k - s.n_near;
    if (lane >= ROWS / WARPS || k >= n) return a.kv;
    if (e < 0) return a.kv + (s.first_key + k) * a.ld_kv;
    return a.entry + (int64_t)(s.first_entry + (s.list ? s.list[e] : e)) * a.ld_entry;
}
/* Copies keys k0 .. k0 + ROWS - 1 of the n keys of a token into a tile, zeros after the last. found: from find_key.
 * WARPS warps call it. Eight lanes copy the row of a key, each the same 16 bytes of every panel, so that its eight
 * addresses differ by constants. */
template <int ROWS, int WARPS>
__device__ static __forceinline__ void copy_keys(uint32_t tile, const bf16 *found, int k0, int n, int warp)
{
    static_assert(ROWS / WARPS % 4 == 0, "a copy has four rows");
    const int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int i = 0; i < ROWS / WARPS; i += 4) {
        const int r = i + lane / 8, row = warp * (ROWS / WARPS) + r;
        const uint32_t to = tile + sm90_swizzle(row, lane % 8);
        const bf16 *from = (const bf16 *)__shfl_sync(~0u, (unsigned long long)found, r) + lane % 8 * 8;
#pragma unroll
        for (int p = 0; p < 8; p++) cp_async_16(to + p * ROWS * PANEL_ROW, from + p * 64, k0 + row < n);
    }
}

/* low_word: bits 0 .. 31 of the descriptor (sm90_descriptor) of `address`. descriptor_at: the descriptor of `bytes`
 * further. With additions of 64 bits, products of 32 columns would wait for the arithmetic of their descriptors. */
__device__ static __forceinline__ uint32_t low_word(uint32_t address, uint32_t lead)
{
    return (lead >> 4) << 16 | address >> 4;
}
__device__ static __forceinline__ uint64_t descriptor_at(uint32_t low, uint32_t bytes)
{
    return sm90_descriptor(0, 0, 1024) | (low + (bytes >> 4));
}

/* d [64, 32] = or += a [64, 16] b [16, 32], both K-major in shared memory: wgmma of sm90.cuh for 32 columns. */
__device__ static __forceinline__ void wgmma_32(float (&d)[16], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b), "r"((int)accumulate));
}

/* d += a b with a in registers, as in sm90.cuh. */
__device__ static __forceinline__ void wgmma_32(float (&d)[16], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, "
                 "1, 1, 1, 0;\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* Stores a warp's accumulator, 16 heads by 256 columns, times factor per row, as bf16. dst: the warp's first head and
 * the first of the columns; stage: 4 KiB that nothing else reads or writes. */
__device__ static __forceinline__ void store_heads(bf16 *dst, const float (&acc)[128], const float factor[2],
                                                   char *stage)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) { /* 128 columns: two panels of 16 rows */
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const float *x = acc + 4 * (16 * half + n);
            char *to = stage + n / 8 * 16 * PANEL_ROW + sm90_swizzle(lane / 4, n % 8) + lane % 4 * 4;
            *(uint32_t *)to = pack2(factor[0] * x[0], factor[0] * x[1]);
            *(uint32_t *)(to + 8 * PANEL_ROW) = pack2(factor[1] * x[2], factor[1] * x[3]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i++) { /* a lane per 16 bytes of two rows of 256 */
            const int row = 2 * i + lane / 16, chunk = lane % 16;
            store16(dst + (int64_t)row * SHARED_DIM + half * 128 + chunk * 8,
                    load16(stage + chunk / 8 * 16 * PANEL_ROW + sm90_swizzle(row, chunk % 8)));
        }
        __syncwarp();
    }
}

/* The shared memory of a block from its first multiple of 1024 bytes on. */
__device__ static __forceinline__ char *aligned_shared(char *bytes)
{
    return bytes + ((1024 - (sm90_shared(bytes) & 1023)) & 1023);
}

#endif

/* q or dout, in boxes of 64 heads and 64 columns of a token */
static inline CUtensorMap map_heads(const struct shared_args *a, const bf16 *x, int64_t ld)
{
    const int64_t size[3] = {SHARED_DIM, a->n_head, a->n_tok}, stride[2] = {SHARED_DIM * 2, ld * 2};
    const int64_t box[3] = {64, SHARED_HEADS, 1};
    return sm90_tensor_map(x, size, stride, box);
}

static inline void allow_shared_bytes(const void *kernel, int bytes)
{
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

#endif
