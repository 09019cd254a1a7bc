/* grouped_parts.cuh - split-K of the adapters' weight gradients: an expert with more rows than `share` is divided into
 * equal parts. Each part writes its sums to scratch, and the last block of a tile adds them. So the time depends on the
 * number of rows and hardly on the routing. */
#ifndef MT_CUDA_GROUPED_PARTS_H
#define MT_CUDA_GROUPED_PARTS_H

#include "kernels/cuda/parts/grouped.h"

enum { PARTS_THREADS = 256 };

/* Part `part` of `parts` of an expert: rows first .. end-1. slot: index of the expert's first part among the parts of
 * all experts that have several. parts 0: there is no such part. */
struct unit {
    int expert, part, parts, slot, first, end;
};

static __device__ __forceinline__ int parts_of(int n_row, int share)
{
    return n_row <= share ? n_row > 0 : (n_row + share - 1) / share;
}

/* The first row of expert e. */
static __device__ __forceinline__ int row_of_expert(const struct grouped_wgrad &g, int e)
{
    return g.offs ? __ldg(g.offs + e) : e ? (int)g.n_row : 0;
}

/* The u-th part of all experts, in the order (expert, part). Parts have at most `share` rows, a multiple of `step`
 * except for the last. n_exp + n_row / share < 2^16. All lanes of a warp call it; they take 32 experts at a time, one
 * per lane. */
static __device__ __forceinline__ struct unit find_unit(const struct grouped_wgrad &g, int u, int share, int step)
{
    const int lane = threadIdx.x & 31, n_exp = (int)g.n_exp;
    int row = row_of_expert(g, min(lane, n_exp)), end = row_of_expert(g, min(lane + 1, n_exp));
    uint32_t before = 0; /* lower half: units; upper half: those of experts with more than one part */
    for (int first = 0; first < n_exp; first += 32) {
        const int ahead = first + 32 + lane, parts = parts_of(end - row, share);
        const int next_row = row_of_expert(g, min(ahead, n_exp)), next_end = row_of_expert(g, min(ahead + 1, n_exp));
        const uint32_t own = (uint32_t)parts + (parts > 1 ? (uint32_t)parts << 16 : 0);
        uint32_t sum = own;
        for (int i = 1; i < 32; i *= 2) {
            const uint32_t left = __shfl_up_sync(~0u, sum, i);
            if (lane >= i) sum += left;
        }
        sum += before;
        const uint32_t has = __ballot_sync(~0u, (int)(sum & 0xffff) > u);
        if (has) {
            const int of = __ffs(has) - 1, n = __shfl_sync(~0u, parts, of);
            const uint32_t at = __shfl_sync(~0u, sum - own, of); /* units of earlier experts */
            row = __shfl_sync(~0u, row, of);
            end = __shfl_sync(~0u, end, of);
            const int part = u - (int)(at & 0xffff), rows = ((end - row + n - 1) / n + step - 1) / step * step;
            return {
                first + of, part, n, (int)(at >> 16), min(row + part * rows, end), min(row + (part + 1) * rows, end)};
        }
        before = __shfl_sync(~0u, sum, 31);
        row = next_row;
        end = next_end;
    }
    return {};
}

/* Number of parts of a tile that are in g.partial; the last block resets it to 0. */
enum { MAX_TILES = 1 << 14 };
static __device__ int arrived[MAX_TILES];

/* Writes this part's sums of tile `tile` of `tiles` to scratch: [parts of all experts, tiles, N, threads] float4. */
template <int N>
static __device__ __forceinline__ void store_part(const struct grouped_wgrad &g, const float (&c)[N][4],
                                                  const struct unit &u, int64_t tile, int64_t tiles)
{
    float4 *to = (float4 *)g.partial + ((u.slot + u.part) * tiles + tile) * (N * PARTS_THREADS) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < N; j++) __stcg(to + j * PARTS_THREADS, make_float4(c[j][0], c[j][1], c[j][2], c[j][3]));
}

/* Calls store_part. Returns true in the last block of a tile to do so; c then has the sum of all parts, in their
 * order. */
template <int N>
static __device__ bool sum_parts(const struct grouped_wgrad &g, float (&c)[N][4], const struct unit &u, int64_t tile,
                                 int64_t tiles)
{
    const float4 *partial = (const float4 *)g.partial + (u.slot * tiles + tile) * (N * PARTS_THREADS) + threadIdx.x;
    const int64_t stride = tiles * (N * PARTS_THREADS); /* from part to part */
    store_part(g, c, u, tile, tiles);
    __threadfence();
    __syncthreads();
    int *count = arrived + u.slot * tiles + tile;
    const bool last = __syncthreads_or(threadIdx.x == 0 && atomicAdd(count, 1) == u.parts - 1);
    if (!last) return false;
    if (threadIdx.x == 0) *count = 0;
    __threadfence();
#pragma unroll
    for (int j = 0; j < N; j++) {
        float4 sum = {};
#pragma unroll 4
        for (int p = 0; p < u.parts; p++) {
            const float4 x = __ldcg(partial + p * stride + j * PARTS_THREADS);
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        c[j][0] = sum.x, c[j][1] = sum.y, c[j][2] = sum.z, c[j][3] = sum.w;
    }
    return true;
}

#endif
