/* mma.cuh - instructions of the portable products (sm_80 and later), and the layout of their tiles in shared memory.
 *
 * A tile is rows of CHUNKS 16-byte chunks (8 bf16). ldmatrix reads one chunk of eight rows at a time. Chunk c of row r
 * is stored at position c ^ f(r), so that those eight chunks are in different banks. */
#ifndef MT_CUDA_MMA_H
#define MT_CUDA_MMA_H

#include <stdint.h>

/* Byte offset of a chunk in a tile; CHUNKS is 4 (two rows per 128 bytes) or a multiple of 8. */
template <int CHUNKS> __device__ __forceinline__ uint32_t tile_offset(uint32_t row, uint32_t chunk)
{
    static_assert(CHUNKS == 4 || CHUNKS % 8 == 0, "rows of 64 bytes, or of a multiple of 128");
    return row * (CHUNKS * 16) + ((chunk ^ (CHUNKS == 4 ? row >> 1 & 3 : row & 7)) << 4);
}

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Asynchronous copy of 16 bytes; bytes is 16, or 0 to write zeros without reading. */
__device__ __forceinline__ void copy_async16(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
/* copy_async16 for rows of which other chunks are read next: L2 fetches all 128 bytes around these 16 from DRAM. */
__device__ __forceinline__ void copy_async16_of_row(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until all but the last PENDING groups of this thread are complete. */
template <int PENDING> __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Loads four 8x8 matrices; lanes 8i .. 8i+7 have the addresses of the rows of matrix i. _trans transposes each. */
__device__ __forceinline__ void load_matrix4(uint32_t x[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared)
                 : "memory");
}
__device__ __forceinline__ void load_matrix4_trans(uint32_t x[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared)
                 : "memory");
}

/* c [16, 8] f32 += a [16, 16] b [16, 8]. With i = lane / 4 and q = lane % 4: c holds (i, 2q), (i, 2q+1), (i+8, 2q),
 * (i+8, 2q+1); a pairs of columns (i, 2q), (i+8, 2q), (i, 2q+8), (i+8, 2q+8); b pairs of rows (2q, i), (2q+8, i). */
__device__ __forceinline__ void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* mma_bf16 of a [16, 8] and b [8, 8]: a (i, 2q), (i+8, 2q); b (2q, i). */
__device__ __forceinline__ void mma_bf16_k8(float c[4], const uint32_t a[2], const uint32_t b[1])
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

#endif
