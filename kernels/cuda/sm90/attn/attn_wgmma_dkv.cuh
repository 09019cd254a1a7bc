/* attn_wgmma_dkv.cuh - attention backward on Hopper, heads of 128 and more: dk and dv, with wgmma and TMA.
 *
 * Math, shapes, needs: as attn_wgmma_dq.cuh.
 * Grid: one block per 64 KEY_BLOCKS keys of a sequence and kv head; they stay in shared memory. The queries of all
 *   heads of the group are loaded in stages of 64 rows. Two consumer warpgroups and a producer warpgroup. Shared memory
 *   for heads of 128, 192 and 256: 195, 219 and 210 KiB. The first keys of a sequence, which have the most queries,
 *   come first. Heads of 128 in groups of 4 and more: the blocks with the most queries of all sequences come first.
 * Heads of 128: 128 keys, 64 per warpgroup, which keeps their dk and dv (128 registers). Wider heads: 64 keys, whose dk
 *   and dv fill the registers of both warpgroups. The first computes scores, weights and dv; the second dp, ds and dk.
 *   Weights pass from the first to the second in shared memory, as bf16, in the registers' layout.
 * Bound, for heads of 128, 192 and 256, in clocks per SM for a stage: wgmma 2048, 1280, 2048; 2^x 512, 256, 256; shared
 *   memory reads and writes 1800, 1280, 2180, as a product of 64 by 64 rows reads both operands again; loads from L2
 *   32, 40, 64 KiB, 16 or 32 bytes per clock. So heads of more than 128 are bound by shared memory and L2.
 * Numerics: as attn_bwd.cu; for wider heads, ds = p (dp - <dout, o>) with p rounded to bf16. Queries and dout beyond
 *   the end of a sequence are cleared.
 * Source: FlashAttention-2 and -3, arXiv 2307.08691, 2407.08608. */
#ifndef MT_CUDA_ATTN_WGMMA_DKV_H
#define MT_CUDA_ATTN_WGMMA_DKV_H

#include "kernels/cuda/sm90/attn/attn_wgmma.cuh"

/* Blocks of 64 keys; stages of queries and dout; whether one warpgroup computes dv and the other dk, or each both. */
template <int A, int B> struct dkv_tiles;
template <> struct dkv_tiles<128, 128> {
    static constexpr int KEY_BLOCKS = 2, STAGES = 4;
    static constexpr bool BY_ROLE = false;
};
template <> struct dkv_tiles<192, 128> {
    static constexpr int KEY_BLOCKS = 1, STAGES = 4;
    static constexpr bool BY_ROLE = true;
};
template <> struct dkv_tiles<256, 256> {
    static constexpr int KEY_BLOCKS = 1, STAGES = 2;
    static constexpr bool BY_ROLE = true;
};
enum {
    DKV_QUERIES = 64, /* rows (queries of all heads of the group) of a stage: q, dout, stat */
    STAT_BYTES = DKV_QUERIES * (int)sizeof(float2),
    WEIGHT_BYTES = 64 * DKV_QUERIES * 2, /* weights of 64 keys, bf16 */
    WEIGHT_SLOTS = 2
};
template <int A, int B> struct dkv_sizes : dkv_tiles<A, B> {
    using T = dkv_tiles<A, B>;
    static constexpr int KEYS = T::KEY_BLOCKS * 64, K_BYTES = KEYS * A * 2, V_BYTES = KEYS * B * 2;
    static constexpr int Q_BYTES = DKV_QUERIES * A * 2, DOUT_BYTES = DKV_QUERIES * B * 2;
    static constexpr int STAGE_BYTES = Q_BYTES + DOUT_BYTES;
    static constexpr int BYTES =
        K_BYTES + V_BYTES + T::STAGES * (STAGE_BYTES + STAT_BYTES) + WEIGHT_SLOTS * WEIGHT_BYTES + 1024;
    static_assert(BYTES <= SHARED_LIMIT && B <= A, "shared memory of an SM; dv is staged over keys");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dk, dv: the keys of a block stay in shared memory; the loop is over the queries of all heads of the group */

template <int A, int B> struct dkv_barriers {
    using S = dkv_sizes<A, B>;
    uint64_t kv_full, full[S::STAGES], q_empty[S::STAGES], dout_empty[S::STAGES];
    uint64_t weights_full[WEIGHT_SLOTS], weights_empty[WEIGHT_SLOTS];
};
/* Shared-memory addresses. A stage holds q, then dout. */
struct dkv_memory {
    uint32_t k, v, stages, stat, weights, kv_full, full, q_empty, dout_empty, weights_full, weights_empty;
    char *bytes; /* generic address of k */
};
/* Keys from k0 on, and the queries that attend to them: n_tile tiles from query k0 on; 0: an unused slot. */
struct key_block {
    int64_t first;
    int len, kv, k0, n_tile;
};

template <int KEYS>
static __device__ __forceinline__ struct key_block key_block_of(const struct attn_wgmma_args &p, int kv,
                                                                const struct seq_block &seq)
{
    const int k0 = seq.block * KEYS, end = min(seq.len, k0 + KEYS - 1 + p.a.window);
    return {seq.first, seq.len, kv, k0, seq.block < seq.n_block ? (end - k0 + p.n_query - 1) / p.n_query : 0};
}

/* A warp loads keys, values and all tiles of queries: q and dout by TMA, stat by the lanes. Queries beyond the end of
 * the sequence get the last entry of stat, which makes all their weights 0. */
template <int A, int B>
static __device__ __forceinline__ void load_dkv(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                const struct key_block &b)
{
    using S = dkv_sizes<A, B>;
    const int lane = threadIdx.x % 32, row = (int)b.first + b.k0, n_row = p.n_query * p.group;
    const float2 *stat = p.a.stat + (b.kv * (int64_t)p.a.n_tok + b.first) * p.group;
    const float2 *masked_stat = p.a.stat + (int64_t)p.a.n_head * p.a.n_tok;
    if (lane == 0) {
        mbarrier_arrive_expect(m.kv_full, S::K_BYTES + S::V_BYTES);
        load_panels<A, S::KEYS>(m.k, &p.k, m.kv_full, b.kv, row);
        load_panels<B, S::KEYS>(m.v, &p.v, m.kv_full, b.kv, row);
    }
    struct stage_at at = {0, 0};
    for (int t = 0; t < b.n_tile; t++) {
        const int q0 = b.k0 + t * p.n_query;
        const uint32_t full = m.full + 8 * at.stage, to = m.stages + at.stage * S::STAGE_BYTES;
        mbarrier_wait(m.q_empty + 8 * at.stage, at.parity ^ 1);
        if (lane == 0) {
            mbarrier_arrive_expect(full, n_row * (A + B) * 2);
            load_panels<A, DKV_QUERIES>(to, &p.q, full, b.kv * p.group, (int)b.first + q0);
        }
#pragma unroll 1
        for (int i = lane; i < n_row; i += 32) {
            const bool live = q0 + query_of(i, p.inverse) < b.len;
            const float2 *from = live ? stat + (int64_t)q0 * p.group + i : masked_stat;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(m.stat + at.stage * STAT_BYTES + i * 8),
                         "l"(from)
                         : "memory");
        }
        cp_async_arrive(full);
        mbarrier_wait(m.dout_empty + 8 * at.stage, at.parity ^ 1);
        if (lane == 0) load_panels<B, DKV_QUERIES>(to + S::Q_BYTES, &p.dout, full, b.kv * p.group, (int)b.first + q0);
        at = next_stage<S::STAGES>(at);
    }
}

/* Waits for a stage, and clears the queries beyond the end of the sequence, and their dout. */
template <int A, int B>
static __device__ __forceinline__ void wait_queries(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                    int live, struct stage_at at, int wg)
{
    using S = dkv_sizes<A, B>;
    char *stage = m.bytes + (m.stages - m.k) + at.stage * S::STAGE_BYTES;
    mbarrier_wait(m.full + 8 * at.stage, at.parity);
    if (live >= p.n_query) return;
    clear_rows<A, DKV_QUERIES>(stage, live * p.group);
    clear_rows<B, DKV_QUERIES>(stage + S::Q_BYTES, live * p.group);
    rows_cleared(WHOLE + wg);
}

/* The warpgroup of dv passes the weights of 64 keys and 64 queries to that of dk, in the layout of the A operand: a
 * thread reads what the same thread of the other warpgroup wrote. */
static __device__ __forceinline__ void send_weights(const uint32_t (&w)[4][4], const struct dkv_memory &m,
                                                    struct stage_at *slot)
{
    uint4 *to = (uint4 *)(m.bytes + (m.weights - m.k) + slot->stage * WEIGHT_BYTES) + threadIdx.x % 128;
    mbarrier_wait(m.weights_empty + 8 * slot->stage, slot->parity ^ 1);
#pragma unroll
    for (int k = 0; k < 4; k++) to[k * 128] = make_uint4(w[k][0], w[k][1], w[k][2], w[k][3]);
    release_stage(m.weights_full + 8 * slot->stage);
    *slot = next_stage<WEIGHT_SLOTS>(*slot);
}
/* dp becomes ds: times the weights. */
static __device__ __forceinline__ void receive_weights(float (&dp)[32], const struct dkv_memory &m,
                                                       struct stage_at *slot)
{
    const uint4 *from = (const uint4 *)(m.bytes + (m.weights - m.k) + slot->stage * WEIGHT_BYTES) + threadIdx.x % 128;
    mbarrier_wait(m.weights_full + 8 * slot->stage, slot->parity);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float w[8];
        unpack8(w, from[k * 128]);
#pragma unroll
        for (int i = 0; i < 8; i++) dp[8 * k + i] *= w[i];
    }
    release_stage(m.weights_empty + 8 * slot->stage);
    *slot = next_stage<WEIGHT_SLOTS>(*slot);
}

/* x = scores [64 keys, 64 queries] become weights, masked. */
static __device__ __forceinline__ void weigh_scores(float (&x)[32], const struct attn_wgmma_args &p, int w0, int q0,
                                                    const char *stat)
{
    const int key = w0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (!none_masked(q0, p.n_query, w0, 64, p.a.window)) mask_queries(x, q0 - key, p.inverse, p.a.window);
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float4 y = ((const float4 *)stat)[i + threadIdx.x % 4]; /* of two neighbouring columns */
        x[i] = exp2_fast(x[i] * p.a.scale_log2 - y.x);
        x[i + 1] = exp2_fast(x[i + 1] * p.a.scale_log2 - y.z);
        x[i + 2] = exp2_fast(x[i + 2] * p.a.scale_log2 - y.x);
        x[i + 3] = exp2_fast(x[i + 3] * p.a.scale_log2 - y.z);
    }
}
/* dp -= <dout, o> of its query. */
static __device__ __forceinline__ void center_dp(float (&dp)[32], const char *stat)
{
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float4 y = ((const float4 *)stat)[i + threadIdx.x % 4];
        dp[i] -= y.y;
        dp[i + 1] -= y.w;
        dp[i + 2] -= y.y;
        dp[i + 3] -= y.w;
    }
}

/* Waits for and releases n tiles that this warpgroup does not need. */
template <int STAGES>
static __device__ __forceinline__ void skip_tiles(const struct dkv_memory &m, struct stage_at *at, int n)
{
    for (int i = 0; i < n; i++) {
        mbarrier_wait(m.full + 8 * at->stage, at->parity);
        release_stage(m.q_empty + 8 * at->stage);
        release_stage(m.dout_empty + 8 * at->stage);
        *at = next_stage<STAGES>(*at);
    }
}

/* Each warpgroup computes dk and dv of 64 keys. dv += p^T dout of a tile runs while ds is computed; the scores of the
 * next tile are issued behind dk += ds^T q, and its dp behind the scores. */
template <int A, int B>
static __device__ __forceinline__ void multiply_block(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                      const struct key_block &b)
{
    using S = dkv_sizes<A, B>;
    const int wg = warpgroup_index(), w0 = b.k0 + wg * 64; /* keys w0 .. w0+63 */
    const int end = min(b.len, w0 + 63 + p.a.window);      /* queries w0 .. end-1 attend to the keys */
    const int from = min(wg * 64 / p.n_query, b.n_tile);
    const int to = w0 < b.len ? (end - b.k0 + p.n_query - 1) / p.n_query : from;
    const uint32_t k = m.k + wg * 64 * ROW_BYTES, v = m.v + wg * 64 * ROW_BYTES;
    const char *stat = m.bytes + (m.stat - m.k);
    uint32_t pw[4][4], dw[4][4];
    float s[32], dp[32], dk[A / 2] = {}, dv[B / 2] = {};
    struct stage_at at = {0, 0};

    mbarrier_wait(m.kv_full, 0);
    skip_tiles<S::STAGES>(m, &at, from);
    if (from < to) {
        wait_queries<A, B>(p, m, b.len - b.k0 - from * p.n_query, at, wg);
        wgmma_fence();
        dot_heads<A, S::KEYS>(s, k, m.stages + at.stage * S::STAGE_BYTES);
        wgmma_commit();
        dot_heads<B, S::KEYS>(dp, v, m.stages + at.stage * S::STAGE_BYTES + S::Q_BYTES);
        wgmma_commit();
        for (int t = from;; t++) {
            const uint32_t q = m.stages + at.stage * S::STAGE_BYTES, dout = q + S::Q_BYTES;
            const int q0 = b.k0 + t * p.n_query;
            wgmma_wait<1>();
            wgmma_use(s);
            weigh_scores(s, p, w0, q0, stat + at.stage * STAT_BYTES);
            pack_rows(pw, s);
            wgmma_fence();
            add_rows(dv, pw, dout);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(dp);
            center_dp(dp, stat + at.stage * STAT_BYTES);
#pragma unroll
            for (int i = 0; i < 32; i++) dp[i] *= s[i];
            pack_rows(dw, dp);
            if (t + 1 == to) break;
            const struct stage_at now = next_stage<S::STAGES>(at);
            const uint32_t next = m.stages + now.stage * S::STAGE_BYTES;
            wait_queries<A, B>(p, m, b.len - q0 - p.n_query, now, wg);
            wgmma_fence();
            add_rows(dk, dw, q);
            wgmma_commit();
            dot_heads<A, S::KEYS>(s, k, next);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(dv);
            wgmma_use(dk);
            release_stage(m.q_empty + 8 * at.stage);
            release_stage(m.dout_empty + 8 * at.stage);
            wgmma_fence();
            dot_heads<B, S::KEYS>(dp, v, next + S::Q_BYTES);
            wgmma_commit();
            at = now;
        }
        wgmma_fence();
        add_rows(dk, dw, m.stages + at.stage * S::STAGE_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(dk);
        wgmma_use(dv);
        release_stage(m.q_empty + 8 * at.stage);
        release_stage(m.dout_empty + 8 * at.stage);
        at = next_stage<S::STAGES>(at);
    }
    skip_tiles<S::STAGES>(m, &at, b.n_tile - to);

    const int warp_row = threadIdx.x / 32 * 16, key = b.k0 + warp_row;
    const float scale[2] = {p.a.scale, p.a.scale}, one[2] = {1.0f, 1.0f};
    bf16 *out = p.a.dqkv + (b.first + key) * p.a.ld_dqkv;
    char *k_rows = m.bytes + warp_row * ROW_BYTES, *v_rows = k_rows + S::K_BYTES;
    named_sync(WHOLE + wg, 128); /* the products that read these tiles are complete */
    stage_rows<S::KEYS>(k_rows, dk, scale);
    store_keys<A, S::KEYS>(out + (p.a.n_head + b.kv) * A, p.a.ld_dqkv, k_rows, b.len - key);
    stage_rows<S::KEYS>(v_rows, dv, one);
    store_keys<B, S::KEYS>(out + value_col(p.a, b.kv), p.a.ld_dqkv, v_rows, b.len - key);
}

/* w = the weights, from the scores x [64 keys from w0 on, queries from q0 on]. IS_DK: w = ds, from x = dp. */
template <bool IS_DK>
static __device__ __forceinline__ void weigh_queries(uint32_t (&w)[4][4], float (&x)[32],
                                                     const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                     int w0, int q0, const char *stat, struct stage_at *slot)
{
    if (IS_DK) {
        center_dp(x, stat);
        receive_weights(x, m, slot);
    } else {
        weigh_scores(x, p, w0, q0, stat);
    }
    pack_rows(w, x);
    if (!IS_DK) send_weights(w, m, slot);
}

/* One warpgroup computes scores, weights p and dv += p^T dout; the other dp, ds and dk += ds^T q. Scores and dp are
 * [keys, queries], so that weights and ds are in the layout of the A operand of the sums over queries. For dv the first
 * product reads k and q, the second dout; for dk the first reads v and dout, the second q. The first product of the
 * next tile, or block of keys, is issued behind the second of this one. */
template <int A, int B, bool IS_DK>
static __device__ __forceinline__ void multiply_dkv(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                    const struct key_block &b)
{
    using S = dkv_sizes<A, B>;
    constexpr int FIRST = IS_DK ? B : A, SECOND = IS_DK ? A : B, BLOCKS = S::KEY_BLOCKS;
    const uint32_t keys = IS_DK ? m.v : m.k;
    const uint32_t first = m.stages + (IS_DK ? S::Q_BYTES : 0), second = m.stages + (IS_DK ? 0 : S::Q_BYTES);
    const uint32_t first_empty = IS_DK ? m.dout_empty : m.q_empty, second_empty = IS_DK ? m.q_empty : m.dout_empty;
    const char *stat = m.bytes + (m.stat - m.k);
    uint32_t w[4][4];
    float x[32], sum[BLOCKS][SECOND / 2] = {};
    struct stage_at at = {0, 0}, slot = {0, 0};

    mbarrier_wait(m.kv_full, 0);
    wait_queries<A, B>(p, m, b.len - b.k0, at, IS_DK);
    wgmma_fence();
    dot_heads<FIRST, S::KEYS>(x, keys, first + at.stage * S::STAGE_BYTES);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(x);
    weigh_queries<IS_DK>(w, x, p, m, b.k0, b.k0, stat, &slot);
    for (int t = 0;; t++) {
        const uint32_t now = at.stage * S::STAGE_BYTES;
        const int q0 = b.k0 + t * p.n_query;
#pragma unroll
        for (int h = 1; h < BLOCKS; h++) {
            wgmma_fence();
            add_rows(sum[h - 1], w, second + now);
            wgmma_commit();
            dot_heads<FIRST, S::KEYS>(x, keys + h * 64 * ROW_BYTES, first + now);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(sum[h - 1]);
            wgmma_wait<0>();
            wgmma_use(x);
            weigh_queries<IS_DK>(w, x, p, m, b.k0 + h * 64, q0, stat + at.stage * STAT_BYTES, &slot);
        }
        release_stage(first_empty + 8 * at.stage);
        if (t + 1 == b.n_tile) break;
        const struct stage_at next = next_stage<S::STAGES>(at);
        wait_queries<A, B>(p, m, b.len - q0 - p.n_query, next, IS_DK);
        wgmma_fence();
        add_rows(sum[BLOCKS - 1], w, second + now);
        wgmma_commit();
        dot_heads<FIRST, S::KEYS>(x, keys, first + next.stage * S::STAGE_BYTES);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_use(sum[BLOCKS - 1]);
        release_stage(second_empty + 8 * at.stage);
        wgmma_wait<0>();
        wgmma_use(x);
        weigh_queries<IS_DK>(w, x, p, m, b.k0, q0 + p.n_query, stat + next.stage * STAT_BYTES, &slot);
        at = next;
    }
    wgmma_fence();
    add_rows(sum[BLOCKS - 1], w, second + at.stage * S::STAGE_BYTES);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(sum[BLOCKS - 1]);

    /* dv is rearranged in the memory of k, which only this warpgroup reads; dk in that of the last q, from which the
     * other warpgroup has computed the last weights. */
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    const float factor[2] = {IS_DK ? p.a.scale : 1.0f, IS_DK ? p.a.scale : 1.0f};
    const int64_t column = IS_DK ? (p.a.n_head + b.kv) * A : value_col(p.a, b.kv);
    named_sync(WHOLE + IS_DK, 128); /* the products that read these tiles are complete */
#pragma unroll
    for (int h = 0; h < BLOCKS; h++) {
        const int key = b.k0 + h * 64 + warp_row;
        char *rows = IS_DK ? m.bytes + (second - m.k) + at.stage * S::STAGE_BYTES + warp_row * ROW_BYTES
                           : m.bytes + (h * 64 + warp_row) * ROW_BYTES;
        constexpr int ROWS = IS_DK ? (int)DKV_QUERIES : S::KEYS;
        stage_rows<ROWS>(rows, sum[h], factor);
        store_keys<SECOND, ROWS>(p.a.dqkv + (b.first + key) * p.a.ld_dqkv + column, p.a.ld_dqkv, rows, b.len - key);
    }
}
#endif

template <int A, int B>
static __global__ void __launch_bounds__(PAIR_THREADS, 1)
    attn_dkv_wide_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = dkv_sizes<A, B>;
    extern __shared__ char bytes[];
    __shared__ struct dkv_barriers<A, B> bar;
    __shared__ struct seq_block found;
    const struct slot slot = slot_at(p, blockIdx.x, gridDim.x);
    const bool sorts = !S::BY_ROLE && p.group >= 4; /* sorting pays where blocks are long and few bytes come from L2 */
    if (sorts && threadIdx.x < 32) {
        const struct seq_block longest = find_longest(p.a, slot.slot, S::KEYS);
        if (threadIdx.x == 0) found = longest;
    }
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024, stages = start + S::K_BYTES + S::V_BYTES;
    const uint32_t weights = stages + S::STAGES * S::STAGE_BYTES;
    const struct dkv_memory m = {start,
                                 start + S::K_BYTES,
                                 stages,
                                 weights + WEIGHT_SLOTS * WEIGHT_BYTES,
                                 weights,
                                 sm90_shared(&bar.kv_full),
                                 sm90_shared(bar.full),
                                 sm90_shared(bar.q_empty),
                                 sm90_shared(bar.dout_empty),
                                 sm90_shared(bar.weights_full),
                                 sm90_shared(bar.weights_empty),
                                 bytes + (start - sm90_shared(bytes))};
    if (threadIdx.x == 0) {
        mbarrier_init(m.kv_full, 1);
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(m.full + 8 * i, 1 + 32);
            mbarrier_init(m.q_empty + 8 * i, 8);
            mbarrier_init(m.dout_empty + 8 * i, 8);
        }
        for (int i = 0; i < WEIGHT_SLOTS; i++) {
            mbarrier_init(m.weights_full + 8 * i, 4);
            mbarrier_init(m.weights_empty + 8 * i, 4);
        }
        mbarrier_init_fence();
    }
    /* The rows of a stage that TMA does not fill: zeros, and a stat that makes their weights 0. */
    if (p.n_query * p.group < DKV_QUERIES) {
        for (int i = threadIdx.x; i < S::STAGES * S::STAGE_BYTES / 16; i += PAIR_THREADS)
            ((uint4 *)(m.bytes + (stages - start)))[i] = make_uint4(0, 0, 0, 0);
        for (int i = threadIdx.x; i < S::STAGES * DKV_QUERIES; i += PAIR_THREADS)
            ((float2 *)(m.bytes + (m.stat - start)))[i] = make_float2(INFINITY, 0.0f);
        fence_proxy_async();
    }
    __syncthreads();
    const struct key_block b = key_block_of<S::KEYS>(p, slot.kv, sorts ? found : find_block(p.a, slot.slot, S::KEYS));
    if (!b.n_tile) return;
    if (threadIdx.x >= PAIR_CONSUMERS) {
        sm90_registers_less<PAIR_LOADER_REGISTERS>();
        if (threadIdx.x < PAIR_CONSUMERS + 32) load_dkv<A, B>(p, m, b);
    } else {
        sm90_registers_more<PAIR_REGISTERS>();
        if (!S::BY_ROLE)
            multiply_block<A, B>(p, m, b);
        else if (warpgroup_index() == 0)
            multiply_dkv<A, B, false>(p, m, b);
        else
            multiply_dkv<A, B, true>(p, m, b);
    }
#else
    __trap();
#endif
}

template <int A, int B> static void attn_dkv_wide(const struct attn_args *a)
{
    using S = dkv_sizes<A, B>;
    const struct attn_wgmma_args p = wgmma_args_of(a, DKV_QUERIES, S::KEYS);
    allow_shared<attn_dkv_wide_kernel<A, B>>(S::BYTES);
    attn_dkv_wide_kernel<A, B><<<attn_grid(a, S::KEYS, a->n_kv), PAIR_THREADS, S::BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

#endif
