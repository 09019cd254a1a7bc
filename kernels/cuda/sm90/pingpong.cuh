/* pingpong.cuh - what grouped_wgmma.cu and dense_wgmma.cu share: two consumer warpgroups that take tiles in turns
 * (ping-pong). While one multiplies, the other is in its epilogue. One thread or warpgroup loads the stages of both. */
#ifndef MT_CUDA_PINGPONG_H
#define MT_CUDA_PINGPONG_H

#include "kernels/cuda/sm90/product_wgmma.cuh"

enum {
    HALF_ROWS = ROWS / 2,                /* of one wgmma */
    HALF_A = HALF_ROWS * DEPTH * 2 / 16, /* distance of 64 rows of a stage, as descriptors count */
    MAX_POLLS = 2000,                    /* polls until a block stops waiting; 100 leave a fifth of the gain */
    MAX_SPLIT = 3,                       /* after so many launches in which a block stopped waiting, no launch waits */
    ANNOUNCED = 6,                       /* steps before the end of a tile in which its block announces the next */
    LOADER_REGISTERS = 40,               /* (40 + 2 * 232) * 128 = 63 Ki, as at launch */
    CONSUMER_REGISTERS = 232
};

/* A pipeline of N_STAGE stages: each has N_ROW rows of a, then COLS columns of b. */
template <int N_STAGE, int N_ROW = ROWS> struct pipeline {
    enum { STAGES = N_STAGE, TILE_ROWS = N_ROW, ROW_BYTES = N_ROW * DEPTH * 2, BYTES = ROW_BYTES + COLS * DEPTH * 2 };
};

/* Tiles that all blocks have begun: one counter for this launch, the other is set to 0 for the next. */
static __device__ uint32_t tiles_begun[2];
/* Blocks whose waits have ended at MAX_POLLS: in this launch and the one before; launches with such blocks. */
static __device__ uint32_t blocks_alone[2], launches_split;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- blocks begin their tiles together ----
 * Concurrent tiles share rows of a and columns of b, which are in L2 for all only while all are at about the same inner
 * index. Without the wait blocks drift apart, and DRAM delivers the same bytes up to three times. Where another process
 * keeps blocks from running at the same time, a wait ends after MAX_POLLS and the block waits no more in this launch;
 * after MAX_SPLIT such launches no block waits. A deep tile has several parts, and blocks begin each part together. */

static __device__ __forceinline__ void begin_launch(int counter)
{
    if (blockIdx.x || threadIdx.x) return;
    tiles_begun[counter ^ 1] = 0;
    if (blocks_alone[counter ^ 1]) atomicAdd(&launches_split, 1u);
    blocks_alone[counter ^ 1] = 0;
}
static __device__ __forceinline__ uint32_t load_relaxed(const uint32_t *from)
{
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
/* Whether the thread that begins the tiles of a block waits for other blocks. */
static __device__ __forceinline__ bool waits_for_tiles() { return load_relaxed(&launches_split) < MAX_SPLIT; }
/* One thread of a block announces that it is about to begin the next part of a tile. */
static __device__ __forceinline__ void announce_tile(int counter) { atomicAdd(&tiles_begun[counter], 1u); }
/* The thread that announced part `part` of n_part of tile `at` of n_tile calls it before it loads that part. *waits:
 * waits_for_tiles() before the first call. */
static __device__ __forceinline__ void begin_tile(int counter, int at, int n_tile, int part, int n_part, bool *waits)
{
    const uint32_t before = at - blockIdx.x, now = MT_MIN(gridDim.x, (uint32_t)n_tile - before);
    const uint32_t together = before * n_part + now * (part + 1);
    uint32_t begun = 0;
    for (int i = 1; *waits && begun < together; i++) {
        begun = load_relaxed(&tiles_begun[counter]);
        *waits = i < MAX_POLLS;
        if (!*waits) atomicAdd(&blocks_alone[counter], 1u);
    }
}

/* ---- products ---- */

template <typename PIPE, bool KN>
static __device__ __forceinline__ void stage_operands(const struct ring &ring, uint64_t *a, uint64_t *b)
{
    const uint32_t data = ring.data + ring.stage * PIPE::BYTES;
    *a = sm90_descriptor(data + ring.rows, 16, 1024);
    *b = sm90_descriptor(data + PIPE::ROW_BYTES, KN ? CHUNK_BYTES : 16, 1024);
}

/* A wait knows only the parity of a phase, so a warpgroup must wait for every phase of a full barrier. So warpgroups
 * that take tiles in turns have separate full barriers. Bit i of parity: for the warpgroup's next use of stage i. */
static __device__ __forceinline__ void wait_full(const struct ring &ring)
{
    mbarrier_wait(ring.full + 8 * ring.stage, ring.parity >> ring.stage & 1);
}
template <typename PIPE> static __device__ __forceinline__ void advance(struct ring *ring)
{
    ring->parity ^= 1u << ring->stage;
    if (++ring->stage == PIPE::STAGES) ring->stage = 0;
}

/* sums[h] (+)= 64 rows of a, from 64 h on, times b over n_in. A stage is released when its products are complete, after
 * those of the next stage have been issued. Calls prefetch() when `ahead` steps remain. gathered: cp.async has written
 * rows of a. Returns the last stage, whose products may still run. */
template <typename PIPE, bool KN, int HALVES, typename Prefetch>
static __device__ __forceinline__ int multiply(float (&sums)[2][COLS / 2], struct ring *ring, int n_in, bool accumulate,
                                               bool gathered, int ahead, const Prefetch &prefetch)
{
    const int late = MT_MAX(0, (n_in - 1) / DEPTH - ahead) * DEPTH;
    int before = -1;
    for (int k0 = 0; k0 < n_in; k0 += DEPTH) {
        if (k0 == late) prefetch();
        uint64_t a, b;
        stage_operands<PIPE, KN>(*ring, &a, &b);
        wait_full(*ring);
        if (gathered) fence_proxy_async();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                wgmma<KN>(sums[h], a + h * HALF_A + k_major(k), b + b_step<KN>(k), accumulate || k0 + k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(*ring, before);
        before = ring->stage;
        advance<PIPE>(ring);
    }
    return before;
}
/* sums = the sum of la lb of n_part > 0 adapters, r > 0. Depth from r on, rounded up to 16, is zeros and is skipped. */
template <typename PIPE, bool KN, int HALVES>
static __device__ __forceinline__ void multiply_thin(float (&sums)[2][COLS / 2], struct ring *ring, int r, int n_part)
{
    int k0 = 0;
    bool accumulate = false;
    do {
        const int k = k0 % DEPTH;
        uint64_t a, b;
        stage_operands<PIPE, KN>(*ring, &a, &b);
        if (k == 0) wait_full(*ring);
        wgmma_fence();
#pragma unroll
        for (int h = 0; h < HALVES; h++) wgmma<KN>(sums[h], a + h * HALF_A + k_major(k), b + b_step<KN>(k), accumulate);
        wgmma_commit();
        wgmma_wait<0>();
        accumulate = true;
        k0 += 16;
        if (k0 % DEPTH && k0 < r) continue;
        release(*ring, ring->stage);
        advance<PIPE>(ring);
        if (k0 >= r) n_part--, k0 = 0;
    } while (n_part > 0);
}
template <int HALVES> static __device__ __forceinline__ void scale_sums(float (&sums)[2][COLS / 2], float scale)
{
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        wgmma_use(sums[h]);
#pragma unroll
        for (int i = 0; i < COLS / 2; i++) sums[h][i] *= scale;
    }
}

#endif
/* ---- host ---- */

static int next_counter(void)
{
    static int counter;
    return counter ^= 1;
}

#endif
