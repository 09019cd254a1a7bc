/* attn_wgmma_bwd.cu - attention backward on Hopper, heads of 64: the function of attn_bwd.cu with wgmma and TMA.
 *
 * Math: as attn_bwd.cu, with five products: scores, dp, dv, dk and dq of a tile of queries and a block of keys.
 * Shapes: as attn_bwd.cu; stat [K, T, H/K] and one entry more; dq_sum [K, T H/K, 64] f32, the elements of a
 *   row permuted (sum_at).
 * Needs: sm_90a, A 64, at most 64 query heads to a kv head, rows aligned to 16 bytes.
 * Grid: one block per 128 keys of a sequence and kv head (attn_wgmma_keys.cuh: order of blocks, of the sums of dq). Two
 *   warpgroups compute weights, dk and dv of 64 keys each; k is an A operand in registers. They pass ds through shared
 *   memory to a third, which computes dq. The fourth has a warp that loads and three threads that add to dq_sum. Shared
 *   memory: 180 KiB.
 * Bound: instruction issue, in clocks per SM for 64 rows by 128 keys: 2092 on an H200, in which a scheduler issues 360
 *   instructions of each of two warps of dk and dv; wgmma 1280, 2^x 512, shared memory 1500. Bytes: as attn_bwd.cu, and
 *   for these rows and keys 16 KiB of q and dout from L2 and 16 KiB of sums to L2.
 * Numerics: as attn_bwd.cu; ds from weights rounded to bf16; sums of dq in f32, subnormal ones are 0. NaN and infinity
 *   stay in their sequence: rows beyond the end of a sequence are cleared before the products read them.
 * Source: FlashAttention-2 and -3, arXiv 2307.08691, 2407.08608. Place of the fence for ds: PTX ISA, causality order.
 *
 * From the first product of a group to the wait for it, nothing else may read or change an accumulator of these
 * products, or change an A operand; otherwise ptxas waits for each product (C7514, C7515). */
#include "kernels/cuda/sm90/attn/attn_wgmma_keys.cuh"

enum {
    CONSUMERS = 2 * 128, /* threads; the warpgroup after them computes dq, the last loads and adds */
    THREADS = CONSUMERS + 2 * 128,
    REGISTERS = 208, /* 2 * 208 + 72 + 24 = 4 * 128 */
    DQ_REGISTERS = 72,
    LOADER_REGISTERS = 24,
    BYTES = 2 * KEY_BYTES + DS_SLOTS * DS_BYTES + ADDERS * SUM_BYTES + STAGES * (2 * PART_BYTES + STAT_BYTES) +
            BARRIER_BYTES + 1024 /* alignment */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The stage of tile t in a ring of N, a power of 2, and the parity of its phase there. */
template <int N> __device__ static __forceinline__ struct stage_at place(int t)
{
    return {(int)((uint32_t)t % N), (uint32_t)t / N % 2};
}
/* Which of the block's tiles attend to the 64 keys of a warpgroup: from .. to-1. */
struct range {
    int from, to;
};
__device__ static __forceinline__ struct range tiles_of(const struct attn_wgmma_args &p, const struct key_block &b,
                                                        int wg)
{
    const int w0 = b.k0 + wg * 64, end = min(b.len, w0 + 63 + p.a.window); /* queries w0 .. end-1 */
    if (w0 >= b.len) return {b.n_tile, b.n_tile};
    return {b.last - (end - 1) / p.n_query, b.last - w0 / p.n_query + 1};
}

/* ---- dk, dv: a warpgroup keeps the sums of 64 keys; the loop is over the queries of all heads of the group ---- */

/* Loads the A operand: this warp's 16 rows of a tile, all elements of a head. */
static __device__ __forceinline__ void load_operand(uint32_t (&a)[HEAD / 16][4], uint32_t tile)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) load_matrix4(a[k], tile + sm90_swizzle(lane % 16, 2 * k + lane / 16));
}

/* Passes ds of tile t, this warp's 16 keys by 64 rows, to the warpgroup of dq: key i is row i of the slot. That
 * warpgroup executes the proxy fence between these stores and its products; a fence here would wait for the stores. */
static __device__ __forceinline__ void pass_ds(const struct key_memory &m, uint32_t to,
                                               const uint32_t (&w)[ROWS / 16][4], int t)
{
    const struct stage_at at = place<DS_SLOTS>(t);
    mbarrier_wait(m.ds_empty + 8 * at.stage, at.parity ^ 1);
    to += at.stage * DS_BYTES;
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) store_matrix4(to ^ k << 5, w[k]); /* chunks 2 k and 2 k + 1 */
    release_stage(m.ds_full + 8 * at.stage);
}
/* Waits for and releases tiles that this warpgroup does not need: their ds is 0. */
static __device__ __forceinline__ void skip_tiles(const struct key_memory &m, int from, int to)
{
    const int warp_row = threadIdx.x / 32 * 16;
#pragma unroll 1
    for (int t = from; t < to; t++) {
        const struct stage_at at = place<DS_SLOTS>(t);
        mbarrier_wait(m.full + 8 * place<STAGES>(t).stage, place<STAGES>(t).parity);
        release_stage(m.empty + 8 * place<STAGES>(t).stage);
        mbarrier_wait(m.ds_empty + 8 * at.stage, at.parity ^ 1);
        uint4 *to = (uint4 *)(m.bytes + (m.ds - m.k) + at.stage * DS_BYTES + warp_row * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < 16 * ROW_BYTES / 16; i += 32) to[i + threadIdx.x % 32] = make_uint4(0, 0, 0, 0);
        release_stage(m.ds_full + 8 * at.stage);
    }
}

/* Stores dk or dv of the warp's keys through their rows of v in shared memory, which no other warp uses. */
static __device__ __forceinline__ void store_sums(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                  const struct key_block &b, const float (&sum)[32], float scale,
                                                  int head)
{
    const int warp_row = threadIdx.x / 32 * 16, key = b.k0 + warp_row;
    const float factor[2] = {scale, scale};
    char *rows = m.bytes + (m.v - m.k) + warp_row * ROW_BYTES;
    stage_rows<KEYS>(rows, sum, factor);
    store_keys<HEAD, KEYS>(p.a.dqkv + (b.first + key) * p.a.ld_dqkv + head * HEAD, p.a.ld_dqkv, rows, b.len - key);
}

/* Scores and dp are [keys, queries], so that weights and ds are in the layout of the A operand of the sums over
 * queries. While a warpgroup computes the weights of a tile, the products for its dp and for dk of the tile before run;
 * while it computes ds, those for dv and for the scores of the next tile. The scores of the last tile are computed
 * twice. */
static __device__ __forceinline__ void multiply_keys(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                     const struct key_block &b)
{
    const int wg = warpgroup_index(), warp_row = threadIdx.x / 32 * 16, w0 = b.k0 + wg * 64; /* keys w0 .. w0+63 */
    const struct range tiles = tiles_of(p, b, wg);
    const int last = tiles.to - 1;
    const int row = warp_row + threadIdx.x % 16, chunk = threadIdx.x % 32 / 16; /* of this lane's part of ds */
    const uint32_t v = m.v + wg * 64 * ROW_BYTES, ds = m.ds + sm90_swizzle(row, chunk);
    const char *stats = m.bytes + (m.stat - m.k) + threadIdx.x % 4 * 8; /* of this thread's columns */
    uint32_t k[HEAD / 16][4], pw[ROWS / 16][4], dw[ROWS / 16][4] = {};
    float s[32], dp[32], dk[32] = {}, dv[32] = {};
    float2 ahead[AHEAD];

    wait_keys(m, b, wg);
    load_operand(k, m.k + warp_row * ROW_BYTES);
    skip_tiles(m, 0, tiles.from);
    if (tiles.from < tiles.to) {
        wait_queries(p, m, b, tiles.from, place<STAGES>(tiles.from), wg);
        wgmma_fence();
        dot_register_heads(s, k, m.q + place<STAGES>(tiles.from).stage * PART_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        load_ahead(ahead, stats + place<STAGES>(tiles.from).stage * STAT_BYTES);
        for (int t = tiles.from; t <= last; t++) {
            const int at = place<STAGES>(t).stage, before = place<STAGES>(max(t - 1, tiles.from)).stage;
            const int next = min(t + 1, last);
            const char *stat = stats + at * STAT_BYTES;
            wgmma_fence();
            dot_heads<HEAD, KEYS>(dp, v, m.dout + at * PART_BYTES);
            add_rows(dk, dw, m.q + before * PART_BYTES); /* at first 0 */
            wgmma_commit();
            weigh_scores(pw, s, p, w0, first_query(p, b, t), stat, ahead);
            wait_queries(p, m, b, next, place<STAGES>(next), wg);
            wgmma_wait<0>();
            wgmma_use(dp);
            wgmma_use(dk);
            if (t > tiles.from) release_stage(m.empty + 8 * before);
            wgmma_fence();
            dot_register_heads(s, k, m.q + place<STAGES>(next).stage * PART_BYTES);
            add_rows(dv, pw, m.dout + at * PART_BYTES);
            wgmma_commit();
            weigh_dp(dp, pw, stat);
            pack_rows(dw, dp);
            load_ahead(ahead, stats + place<STAGES>(next).stage * STAT_BYTES);
            pass_ds(m, ds, dw, t);
            wgmma_wait<0>();
            wgmma_use(s);
            wgmma_use(dv);
        }
        wgmma_fence();
        add_rows(dk, dw, m.q + place<STAGES>(last).stage * PART_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(dk);
        release_stage(m.empty + 8 * place<STAGES>(last).stage);
    }
    skip_tiles(m, tiles.to, b.n_tile);

    named_sync(WHOLE + wg, 128); /* the products that read v are complete */
    store_sums(p, m, b, dk, p.a.scale, p.a.n_head + b.kv);
    store_sums(p, m, b, dv, 1.0f, p.a.n_head + p.a.n_kv + b.kv);
}

/* ---- dq: one warpgroup ---- */

/* sum [64 rows, elements] = ds^T k. */
static __device__ __forceinline__ void multiply_ds(float (&sum)[32], const struct key_memory &m, int slot)
{
    const uint64_t ds = sm90_descriptor(m.ds + slot * DS_BYTES, 16, 1024), k = sm90_descriptor(m.k, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) wgmma<true, true>(sum, ds + 128 * i, k + 128 * i, i > 0);
    wgmma_commit();
}

/* Computes dq of every tile. */
static __device__ __forceinline__ void multiply_queries(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                        const struct key_block &b)
{
    struct stage_at at = {0, 0};
    wait_keys(m, b, warpgroup_index());
    for (int t = 0; t < b.n_tile; t++) {
        const struct stage_at ds = place<DS_SLOTS>(t);
        char *slot = m.bytes + (m.sum - m.k) + at.stage * SUM_BYTES;
        float sum[32];
        mbarrier_wait(m.ds_full + 8 * ds.stage, ds.parity);
        fence_proxy_async(); /* for the stores of pass_ds */
        multiply_ds(sum, m, ds.stage);
        mbarrier_wait(m.sum_empty + 8 * at.stage, at.parity);
        wgmma_wait<0>();
        wgmma_use(sum);
        release_stage(m.ds_empty + 8 * ds.stage);
        finish_tile(sum, p, b, t, slot);
        release_stage(m.sum_full + 8 * at.stage);
        at = next_stage<ADDERS>(at);
    }
}

/* Warp 0 loads; one thread of warp 1 + i is adder i. */
static __device__ __forceinline__ void load_and_add(const struct attn_wgmma_args &p, const struct key_memory &m,
                                                    const struct key_block &b)
{
    const int warp = threadIdx.x % 128 / 32;
    if (warp == 0) {
        load_keys(p, m, b);
        for (int t = 0; t < b.n_tile; t++) load_queries(p, m, b, t, place<STAGES>(t));
    } else if (threadIdx.x % 32 == 0) {
        add_tiles(p, m, b, warp - 1);
    }
}
#endif

static __global__ void __launch_bounds__(THREADS, 1)
    attn_bwd_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ uint32_t ticket;
    struct key_block b;
    if (threadIdx.x == 0) ticket = atomicAdd(p.a.ticket, 1u);
    __syncthreads();
    if (!key_block_at(&b, p, ticket)) return;
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024;
    const struct key_memory m = key_memory_at(start, bytes + (start - sm90_shared(bytes)));
    if (threadIdx.x == 0) {
        mbarrier_init(m.kv_full, 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.full + 8 * i, 1 + 32);
            mbarrier_init(m.empty + 8 * i, 8);
        }
        for (int i = 0; i < DS_SLOTS; i++) {
            mbarrier_init(m.ds_full + 8 * i, 8);
            mbarrier_init(m.ds_empty + 8 * i, 4);
        }
        for (int i = 0; i < ADDERS; i++) {
            mbarrier_init(m.sum_full + 8 * i, 4);
            mbarrier_init(m.sum_empty + 8 * i, 1);
        }
        mbarrier_init_fence();
    }
    clear_stages(p, m);
    __syncthreads();
    const int wg = warpgroup_index();
    if (wg < 2) {
        sm90_registers_more<REGISTERS>();
        multiply_keys(p, m, b);
    } else if (wg == 2) {
        sm90_registers_less<DQ_REGISTERS>();
        multiply_queries(p, m, b);
    } else {
        sm90_registers_less<LOADER_REGISTERS>();
        load_and_add(p, m, b);
    }
#else
    __trap();
#endif
}

void attn_bwd_wgmma_64(const struct attn_args *a)
{
    const struct attn_wgmma_args p = wgmma_args_of(a, ROWS, KEYS);
    allow_shared<attn_bwd_wgmma_kernel>(BYTES);
    attn_bwd_wgmma_kernel<<<attn_grid(a, KEYS, a->n_kv), THREADS, BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}
