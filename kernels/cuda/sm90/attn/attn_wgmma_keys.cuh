/* attn_wgmma_keys.cuh - parts of the Hopper attention backward for heads of 64 (attn_wgmma_bwd.cu): blocks of 128 keys,
 * their loads, weights, and the order in which they add to dq in global memory.
 *
 * A tile of queries is 64 rows: n_query queries of the heads of a group. Tile j begins at query j n_query of its
 * sequence. A block of keys loads the tiles that attend to its keys, the last queries first.
 *
 * Sums of dq: the blocks of keys that a tile attends to add their parts in turn, the first keys first; a counter for
 * each tile says how many have added. The block of the first turn stores its part, later blocks add theirs, that of the
 * last turn loads the sum, adds its part and writes dq; all with bulk copies. A block takes its keys from a ticket
 * counter, in the order of the keys of a sequence, and waits only for blocks with earlier tickets, so that there is no
 * deadlock. As blocks begin with the last queries, those of a sequence are a few tiles apart, and find queries and sums
 * in L2. */
#ifndef MT_CUDA_ATTN_WGMMA_KEYS_H
#define MT_CUDA_ATTN_WGMMA_KEYS_H

#include "kernels/cuda/sm90/attn/attn_wgmma.cuh"

enum {
    HEAD = 64,
    KEYS = 128, /* of a block */
    ROWS = 64,  /* of a tile: q, dout, stat */
    ADDERS = 3, /* threads that add to the sums of dq, in turns */
    STAGES = 4, /* of queries */
    DS_SLOTS = 2,
    AHEAD = 4, /* pairs of columns whose statistics a thread loads before the products */
    STAT_BYTES = ROWS * (int)sizeof(float2),
    KEY_BYTES = KEYS * HEAD * 2,  /* of keys or values */
    PART_BYTES = ROWS * HEAD * 2, /* of q or dout of a stage */
    DS_BYTES = KEYS * ROWS * 2,   /* ds of a tile, [keys, rows] */
    SUM_BYTES = ROWS * HEAD * 4,  /* sums of a tile; every adder has a slot for them */
    BARRIER_BYTES = 256           /* all mbarriers of a block */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Keys from k0 on, and the tiles that attend to them: n_tile tiles down to tile `last` - n_tile + 1. */
struct key_block {
    int64_t first; /* row of the batch where the sequence begins */
    int len, kv, k0, last, n_tile;
};
__device__ static __forceinline__ bool key_block_at(struct key_block *b, const struct attn_wgmma_args &p, int ticket)
{
    const struct slot at = slot_at(p, ticket, gridDim.x);
    const struct seq_block seq = find_block(p.a, at.slot, KEYS);
    b->first = seq.first;
    b->len = seq.len;
    b->kv = at.kv;
    b->k0 = seq.block * KEYS;
    b->last = (min(seq.len, b->k0 + KEYS - 1 + p.a.window) - 1) / p.n_query;
    b->n_tile = b->last - b->k0 / p.n_query + 1;
    return seq.block < seq.n_block;
}
__device__ static __forceinline__ int first_query(const struct attn_wgmma_args &p, const struct key_block &b, int t)
{
    return (b.last - t) * p.n_query;
}

/* Shared-memory addresses. A stage has STAT_BYTES of stat: ROWS times lse / ln 2, then <dout, o>. */
struct key_memory {
    uint32_t k, v, ds, sum, q, dout, stat, kv_full, full, empty, ds_full, ds_empty, sum_full, sum_empty;
    char *bytes; /* generic address of k */
};
/* `start` is aligned to 1024. */
__device__ static __forceinline__ struct key_memory key_memory_at(uint32_t start, char *bytes)
{
    asm volatile("" : "+r"(start)); /* otherwise the compiler computes it in every step */
    struct key_memory m;
    m.bytes = bytes;
    m.k = start;
    m.v = m.k + KEY_BYTES;
    m.ds = m.v + KEY_BYTES;
    m.sum = m.ds + DS_SLOTS * DS_BYTES;
    m.q = m.sum + ADDERS * SUM_BYTES;
    m.dout = m.q + STAGES * PART_BYTES;
    m.stat = m.dout + STAGES * PART_BYTES;
    m.kv_full = m.stat + STAGES * STAT_BYTES;
    m.full = m.kv_full + 8;
    m.empty = m.full + 8 * STAGES;
    m.ds_full = m.empty + 8 * STAGES;
    m.ds_empty = m.ds_full + 8 * DS_SLOTS;
    m.sum_full = m.ds_empty + 8 * DS_SLOTS;
    m.sum_empty = m.sum_full + 8 * ADDERS;
    static_assert(8 * (1 + 2 * STAGES + 2 * DS_SLOTS + 2 * ADDERS) <= BARRIER_BYTES, "room for all mbarriers");
    return m;
}

/* ---- loads, by one warp ---- */

static __device__ __forceinline__ void load_keys(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                 const struct key_block &b)
{
    const int row = (int)b.first + b.k0;
    if (threadIdx.x % 32) return;
    mbarrier_arrive_expect(m.kv_full, 2 * KEY_BYTES);
    load_panels<HEAD, KEYS>(m.k, &p.k, m.kv_full, b.kv, row);
    load_panels<HEAD, KEYS>(m.v, &p.v, m.kv_full, b.kv, row);
}
/* Loads tile t when its stage is empty: q and dout by TMA, stat by the lanes. Queries beyond the end of the sequence
 * get the last entry of stat, which makes all their weights 0. */
static __device__ __forceinline__ void load_queries(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                    const struct key_block &b, int t, struct stage_at at)
{
    const int lane = threadIdx.x % 32, q0 = first_query(p, b, t), n_row = p.n_query * p.group;
    const float2 *stat = p.a.stat + (b.kv * (int64_t)p.a.n_tok + b.first) * p.group;
    const float2 *masked_stat = p.a.stat + (int64_t)p.a.n_head * p.a.n_tok;
    const uint32_t full = m.full + 8 * at.stage, tile = at.stage * PART_BYTES;
    mbarrier_wait(m.empty + 8 * at.stage, at.parity ^ 1);
    if (lane == 0) {
        mbarrier_arrive_expect(full, 2 * n_row * HEAD * 2);
        load_panels<HEAD, ROWS>(m.q + tile, &p.q, full, b.kv * p.group, (int)b.first + q0);
        load_panels<HEAD, ROWS>(m.dout + tile, &p.dout, full, b.kv * p.group, (int)b.first + q0);
    }
    for (int i = lane; i < n_row; i += 32) {
        const bool live = q0 + query_of(i, p.inverse) < b.len;
        const float2 *from = live ? stat + (int64_t)q0 * p.group + i : masked_stat;
        const uint32_t to = m.stat + at.stage * STAT_BYTES + i * 4;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(&from->x) : "memory");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + STAT_BYTES / 2), "l"(&from->y) : "memory");
    }
    cp_async_arrive(full);
}
/* All threads: the rows of a stage that TMA does not fill are zeros, with a stat that makes their weights 0. */
static __device__ __forceinline__ void clear_stages(const struct attn_wgmma_args &p, const struct key_memory &m)
{
    if (p.n_query * p.group == ROWS) return;
    for (int i = threadIdx.x; i < STAGES * 2 * PART_BYTES / 16; i += blockDim.x)
        ((uint4 *)(m.bytes + (m.q - m.k)))[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < STAGES * 2 * ROWS; i += blockDim.x)
        ((float *)(m.bytes + (m.stat - m.k)))[i] = i / ROWS % 2 ? 0.0f : INFINITY;
    fence_proxy_async();
}

/* Waits for the keys and values, and clears those beyond the end of the sequence. */
static __device__ __forceinline__ void wait_keys(const struct key_memory &m, const struct key_block &b, int wg)
{
    mbarrier_wait(m.kv_full, 0);
    if (b.len - b.k0 >= KEYS) return;
    clear_rows<HEAD, KEYS>(m.bytes, b.len - b.k0);
    clear_rows<HEAD, KEYS>(m.bytes + (m.v - m.k), b.len - b.k0);
    rows_cleared(WHOLE + wg);
}
/* Waits for tile t, and clears the queries beyond the end of the sequence, and their dout. */
static __device__ __forceinline__ void wait_queries(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                    const struct key_block &b, int t, struct stage_at at, int wg)
{
    const int live = b.len - first_query(p, b, t), tile = at.stage * PART_BYTES;
    mbarrier_wait(m.full + 8 * at.stage, at.parity);
    if (live >= p.n_query) return;
    clear_rows<HEAD, ROWS>(m.bytes + (m.q - m.k) + tile, live * p.group);
    clear_rows<HEAD, ROWS>(m.bytes + (m.dout - m.k) + tile, live * p.group);
    rows_cleared(WHOLE + wg);
}

/* ---- weights ---- */

/* Loads the first statistics of weigh_scores: after the products have begun, shared memory takes longer to answer. */
static __device__ __forceinline__ void load_ahead(float2 (&ahead)[AHEAD], const char *stat)
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ahead[i] = ((const float2 *)stat)[4 * i];
}
/* pw = weights, bf16, of the scores s of the keys from w0 on and the queries from q0 on. Overwrites s. stat: the tile's
 * statistics from this thread's first column on; ahead: their first AHEAD pairs. */
static __device__ __forceinline__ void weigh_scores(uint32_t (&pw)[ROWS / 16][4], float (&s)[32],
                                                    const struct attn_wgmma_args &p, int w0, int q0, const char *stat,
                                                    const float2 (&ahead)[AHEAD])
{
    if (!none_masked(q0, p.n_query, w0, 64, p.a.window)) {
        const int key = w0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        mask_queries(s, q0 - key, p.inverse, p.a.window);
    }
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float2 y = i / 4 < AHEAD ? ahead[i / 4] : ((const float2 *)stat)[i]; /* of two neighbouring columns */
        s[i] = exp2_fast(s[i] * p.a.scale_log2 - y.x);
        s[i + 1] = exp2_fast(s[i + 1] * p.a.scale_log2 - y.y);
        s[i + 2] = exp2_fast(s[i + 2] * p.a.scale_log2 - y.x);
        s[i + 3] = exp2_fast(s[i + 3] * p.a.scale_log2 - y.y);
    }
    pack_rows(pw, s);
}
/* dp becomes ds = p (dp - <dout, o>), with the weights p rounded to bf16. */
static __device__ __forceinline__ void weigh_dp(float (&dp)[32], const uint32_t (&pw)[ROWS / 16][4], const char *stat)
{
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float2 y = ((const float2 *)(stat + STAT_BYTES / 2))[i];
        uint32_t w[2] = {pw[i / 8][i / 4 % 2 * 2], pw[i / 8][i / 4 % 2 * 2 + 1]};
        asm("" : "+r"(w[0]), "+r"(w[1])); /* otherwise the compiler rounds the weights one by one */
        dp[i] = (dp[i] - y.x) * __uint_as_float(w[0] << 16);
        dp[i + 1] = (dp[i + 1] - y.y) * __uint_as_float(w[0] & 0xffff0000);
        dp[i + 2] = (dp[i + 2] - y.x) * __uint_as_float(w[1] << 16);
        dp[i + 3] = (dp[i + 3] - y.y) * __uint_as_float(w[1] & 0xffff0000);
    }
}

/* ---- sums of dq ---- */

/* This block's turn at a tile: the sums of dq of the tile's n_row rows, the number of blocks that add before this one,
 * and the counter of those that have added. */
struct turn {
    float *sums;
    uint32_t *counter;
    int n_live, n_row, before;
    bool last; /* no block adds after this one */
};
static __device__ __forceinline__ struct turn turn_of(const struct attn_wgmma_args &p, const struct key_block &b, int t)
{
    const int q0 = first_query(p, b, t), block = b.k0 / KEYS;
    const int64_t token = b.kv * (int64_t)p.a.n_tok + b.first + q0;
    struct turn turn;
    turn.sums = p.a.dq_sum + token * p.group * HEAD;
    turn.counter = p.a.turn + token;
    turn.n_live = min(p.n_query, b.len - q0);
    turn.n_row = turn.n_live * p.group;
    turn.before = block - max(0, q0 - p.a.window + 1) / KEYS;
    turn.last = block == (q0 + turn.n_live - 1) / KEYS;
    return turn;
}
/* Waits until the blocks before this one have added; what they wrote is then visible to this thread. */
static __device__ __forceinline__ void wait_turn(const struct turn &turn)
{
    uint32_t n = 0;
    if (turn.before == 0) return;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(turn.counter) : "memory");
    while (n < turn.before);
}

/* Vector i of a row of sums: a thread's 16 elements of a row are four vectors. Vectors i of the four threads of a row
 * are adjacent, and even and odd rows use different banks. */
static __device__ __forceinline__ float4 *sum_at(float *tile, int row, int i)
{
    return (float4 *)(tile + row * HEAD) + (i ^ row % 2) * 4 + threadIdx.x % 4;
}
static __device__ __forceinline__ void put_sums(float *to, const float (&sum)[32])
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = sum + 8 * i + 2 * h;
            *sum_at(to, row + 8 * h, i) = make_float4(x[0], x[1], x[4], x[5]);
        }
    }
}
static __device__ __forceinline__ void get_sums(float (&sum)[32], float *from)
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float *x = sum + 8 * i + 2 * h;
            const float4 y = *sum_at(from, row + 8 * h, i);
            x[0] += y.x, x[1] += y.y, x[4] += y.z, x[5] += y.w;
        }
    }
}
/* sum: this block's part of dq of tile t. slot: shared memory from add_tiles. If this block has the tile's last turn,
 * slot has the sum of the other blocks: adds it to the part and writes dq. Otherwise leaves the part in slot. */
static __device__ __forceinline__ void finish_tile(float (&sum)[32], const struct attn_wgmma_args &p,
                                                   const struct key_block &b, int t, char *slot)
{
    const struct turn turn = turn_of(p, b, t);
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    if (turn.last) {
        const float factor[2] = {p.a.scale, p.a.scale};
        char *rows = slot + warp_row * HEAD * 4; /* this warp's sums, which it no longer needs */
        if (turn.before > 0) get_sums(sum, (float *)slot);
        stage_rows<ROWS>(rows, sum, factor);
        store_panel<HEAD>(p.a.dqkv + (b.first + first_query(p, b, t)) * p.a.ld_dqkv + b.kv * p.group * HEAD,
                          p.a.ld_dqkv, rows, warp_row, p, turn.n_live);
    } else {
        put_sums((float *)slot, sum);
    }
    fence_proxy_async();
}
/* Thread i of ADDERS, for tiles i, i + ADDERS, ...: passes a slot of shared memory to finish_tile. If this block has
 * the tile's last turn, it first loads the sum of the other blocks into the slot. Otherwise it waits until finish_tile
 * has written this block's part there, then adds it to the sum in global memory. */
static __device__ __forceinline__ void add_tiles(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                 const struct key_block &b, int i)
{
    const uint32_t slot = m.sum + i * SUM_BYTES, full = m.sum_full + 8 * i, empty = m.sum_empty + 8 * i;
    uint32_t parity = 0;
#pragma unroll 1
    for (int t = i; t < b.n_tile; t += ADDERS, parity ^= 1) {
        const struct turn turn = turn_of(p, b, t);
        const int bytes = turn.n_row * HEAD * 4;
        if (turn.last && turn.before > 0) {
            wait_turn(turn);
            fence_proxy_async_all();
            mbarrier_arrive_expect(empty, bytes);
            bulk_load(slot, turn.sums, bytes, empty);
        } else {
            mbarrier_arrive(empty);
        }
        if (!turn.last) wait_turn(turn);
        mbarrier_wait(full, parity);
        if (turn.last) continue;
        fence_proxy_async_all();
        bulk_store(turn.sums, slot, bytes, turn.before > 0);
        bulk_commit();
        bulk_wait();
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn.counter), "r"(turn.before + 1) : "memory");
    }
}

#endif
#endif
