/* attn_wgmma_dq.cuh - attention backward on Hopper, heads of 128 and more: dq, with wgmma and TMA.
 *
 * Math, shapes: as attn_bwd.cu; p and ds are computed again, as in the dkv kernel (attn_wgmma_dkv.cuh), so that every
 *   sum has a fixed order.
 * Needs: as attn_wgmma_bwd.cu, for the widths of dq_tiles.
 * Grid: persistent, one block per SM, which takes tiles of 128 rows (16 queries of a group of 8) from a queue. Two
 *   consumer warpgroups of 64 rows and a producer warpgroup. Queries and dout are loaded once per tile; keys and values
 *   have separate stages: a tile of values is free after one product and a tile of keys after two. Shared memory for
 *   heads of 128, 192 and 256: 225, 201 and 225 KiB.
 * Schedule: the scores of a tile are issued behind the previous tile's product of ds and keys, and dp behind the
 *   scores; 2^x of the scores overlaps with dp. Registers hold dq, s and dp, or dq, ds and the next s, but not all
 *   four. So the tensor cores idle between products of one warpgroup, and the other warpgroup fills the gaps.
 * Bound, in clocks per SM for a tile of keys by 128 rows: wgmma 3072 for heads of 128, 192 and 256 (tiles of 128, 96
 *   and 64 keys), 2^x 1024, 768, 512; loads from L2 64, 60, 64 KiB, 21 bytes per clock.
 * Numerics: as attn_bwd.cu. Keys and values beyond the end of a sequence are cleared, as in attn_wgmma_bwd.cu.
 * Source: FlashAttention-2 and -3, arXiv 2307.08691, 2407.08608. */
#ifndef MT_CUDA_ATTN_WGMMA_DQ_H
#define MT_CUDA_ATTN_WGMMA_DQ_H

#include "kernels/cuda/sm90/attn/attn_wgmma.cuh"

/* Keys of a tile; stages of keys, which two products read, and of values. */
template <int A, int B> struct dq_tiles;
template <> struct dq_tiles<128, 128> {
    static constexpr int KEYS = 128, K_STAGES = 3, V_STAGES = 2;
};
template <> struct dq_tiles<192, 128> {
    static constexpr int KEYS = 96, K_STAGES = 2, V_STAGES = 2;
};
template <> struct dq_tiles<256, 256> {
    static constexpr int KEYS = 64, K_STAGES = 2, V_STAGES = 1;
};
enum { DQ_ROWS = 128 };
template <int A, int B> struct dq_sizes : dq_tiles<A, B> {
    using T = dq_tiles<A, B>;
    static constexpr int Q_BYTES = DQ_ROWS * A * 2, DOUT_BYTES = DQ_ROWS * B * 2;
    static constexpr int K_BYTES = T::KEYS * A * 2, V_BYTES = T::KEYS * B * 2;
    static constexpr int BYTES = Q_BYTES + DOUT_BYTES + T::K_STAGES * K_BYTES + T::V_STAGES * V_BYTES + 1024;
    static_assert(BYTES <= SHARED_LIMIT, "shared memory of an SM");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dq: a tile of queries loops over its keys, as in the forward */

template <int A, int B> struct dq_barriers {
    using S = dq_sizes<A, B>;
    uint64_t q_full, q_empty, k_full[S::K_STAGES], k_empty[S::K_STAGES], v_full[S::V_STAGES], v_empty[S::V_STAGES];
    struct item item;
};
/* Shared-memory addresses. */
struct dq_memory {
    uint32_t q, dout, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
    char *bytes; /* generic address of q */
    struct item *item;
};

template <int A, int B>
static __device__ __forceinline__ void load_dq(const struct attn_wgmma_args &p, const struct dq_memory &m)
{
    using S = dq_sizes<A, B>;
    struct stage_at q = {0, 0}, k = {0, 0}, v = {0, 0};
    struct item item;
    while (take_item<S::KEYS>(&item, p)) {
        const int row = (int)item.first + item.q0, head = item.kv * p.group;
        mbarrier_wait(m.q_empty, q.parity ^ 1);
        *m.item = item;
        mbarrier_arrive_expect(m.q_full, p.n_query * p.group * (A + B) * 2);
        load_panels<A, DQ_ROWS>(m.q, &p.q, m.q_full, head, row);
        load_panels<B, DQ_ROWS>(m.dout, &p.dout, m.q_full, head, row);
        q = next_stage<1>(q);
        for (int t = 0; t < item.n_tile; t++) {
            const int key = (int)item.first + item.begin + t * S::KEYS;
            mbarrier_wait(m.k_empty + 8 * k.stage, k.parity ^ 1);
            mbarrier_arrive_expect(m.k_full + 8 * k.stage, S::K_BYTES);
            load_panels<A, S::KEYS>(m.k + k.stage * S::K_BYTES, &p.k, m.k_full + 8 * k.stage, item.kv, key);
            k = next_stage<S::K_STAGES>(k);
            mbarrier_wait(m.v_empty + 8 * v.stage, v.parity ^ 1);
            mbarrier_arrive_expect(m.v_full + 8 * v.stage, S::V_BYTES);
            load_panels<B, S::KEYS>(m.v + v.stage * S::V_BYTES, &p.v, m.v_full + 8 * v.stage, item.kv, key);
            v = next_stage<S::V_STAGES>(v);
        }
    }
    mbarrier_wait(m.q_empty, q.parity ^ 1);
    m.item->n_tile = 0;
    mbarrier_arrive(m.q_full);
}

/* query, stat: of this thread's two rows. first, n_query: the queries of its warpgroup. All are relative to the tile's
 * first query. */
struct dq_rows {
    int query[2], first, n_query;
    float2 stat[2];
};

/* Scores s of the keys from k0 on become weights. */
template <int N>
static __device__ __forceinline__ void weigh_keys(float (&s)[N], const struct dq_rows &x, int q0, int k0,
                                                  const struct attn_args &a)
{
    if (!none_masked(q0 + x.first, x.n_query, k0, 2 * N, a.window)) {
        const int corner = q0 - k0 - threadIdx.x % 4 * 2;
        const int d[2] = {corner + x.query[0], corner + x.query[1]};
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!attends_to(d, i, a.window)) s[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = exp2_fast(s[i] * a.scale_log2 - x.stat[i / 2 % 2].x);
}

/* Waits for a tile of keys or values, and clears its rows from row `live` on, beyond the end of the sequence. */
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void wait_tile(uint32_t full, struct stage_at at, char *tile, int live, int wg)
{
    mbarrier_wait(full + 8 * at.stage, at.parity);
    if (live >= ROWS) return;
    clear_rows<WIDTH, ROWS>(tile, live);
    rows_cleared(WHOLE + wg);
}

/* The products of scores and of dp are in flight: computes the weights while dp runs, then w = ds. Releases the stage
 * of values. */
template <int N>
static __device__ __forceinline__ void weigh_tile(uint32_t (&w)[N / 8][4], float (&s)[N], float (&dp)[N],
                                                  const struct dq_rows &x, int q0, int k0, const struct attn_args &a,
                                                  uint32_t v_empty)
{
    wgmma_wait<1>();
    wgmma_use(s);
    weigh_keys(s, x, q0, k0, a);
    before_wait(practically_never(s));
    wgmma_wait<0>();
    wgmma_use(dp);
    release_stage(v_empty);
#pragma unroll
    for (int i = 0; i < N; i++) dp[i] = s[i] * (dp[i] - x.stat[i / 2 % 2].y);
    pack_rows(w, dp);
}

/* The scores of a tile of keys are issued behind the previous tile's product of ds and keys, and dp behind the scores.
 * While one warpgroup computes weights, the tensor cores run products of the other. */
template <int A, int B>
static __device__ __forceinline__ void multiply_dq(const struct attn_wgmma_args &p, const struct dq_memory &m)
{
    using S = dq_sizes<A, B>;
    constexpr int KEYS = S::KEYS;
    const int wg = warpgroup_index(), warp_row = threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
    const uint32_t q_rows = m.q + wg * 64 * ROW_BYTES, d_rows = m.dout + wg * 64 * ROW_BYTES;
    char *const k_bytes = m.bytes + (m.k - m.q), *const v_bytes = m.bytes + (m.v - m.q);
    struct dq_rows x;
    x.first = query_of(wg * 64, p.inverse);
    x.n_query = query_of(wg * 64 + 63, p.inverse) - x.first + 1;
    x.query[0] = query_of(row, p.inverse);
    x.query[1] = query_of(row + 8, p.inverse);
    struct stage_at q = {0, 0}, k = {0, 0}, v = {0, 0};
    for (;;) {
        mbarrier_wait(m.q_full, q.parity);
        const struct item item = *m.item;
        if (!item.n_tile) break;
        const int n_key = item.len - item.begin;
        const float2 *item_stat = p.a.stat + (item.kv * (int64_t)p.a.n_tok + item.first + item.q0) * p.group;
        float s[KEYS / 2], dp[KEYS / 2], dq[A / 2] = {};
        uint32_t w[KEYS / 16][4];
#pragma unroll
        for (int h = 0; h < 2; h++)
            x.stat[h] =
                x.query[h] < min(p.n_query, item.len - item.q0) ? item_stat[row + 8 * h] : make_float2(INFINITY, 0.0f);
        wait_tile<A, KEYS>(m.k_full, k, k_bytes + k.stage * S::K_BYTES, n_key, wg);
        wgmma_fence();
        dot_heads<A, DQ_ROWS>(s, q_rows, m.k + k.stage * S::K_BYTES);
        wgmma_commit();
        wait_tile<B, KEYS>(m.v_full, v, v_bytes + v.stage * S::V_BYTES, n_key, wg);
        wgmma_fence();
        dot_heads<B, DQ_ROWS>(dp, d_rows, m.v + v.stage * S::V_BYTES);
        wgmma_commit();
        weigh_tile(w, s, dp, x, item.q0, item.begin, p.a, m.v_empty + 8 * v.stage);
        v = next_stage<S::V_STAGES>(v);
        for (int t = 1; t < item.n_tile; t++) {
            const struct stage_at now = next_stage<S::K_STAGES>(k);
            const int live = n_key - t * KEYS;
            wait_tile<A, KEYS>(m.k_full, now, k_bytes + now.stage * S::K_BYTES, live, wg);
            wgmma_fence();
            add_rows(dq, w, m.k + k.stage * S::K_BYTES);
            wgmma_commit();
            dot_heads<A, DQ_ROWS>(s, q_rows, m.k + now.stage * S::K_BYTES);
            wgmma_commit();
            wait_tile<B, KEYS>(m.v_full, v, v_bytes + v.stage * S::V_BYTES, live, wg);
            wgmma_wait<1>();
            wgmma_use(dq);
            release_stage(m.k_empty + 8 * k.stage);
            wgmma_fence();
            dot_heads<B, DQ_ROWS>(dp, d_rows, m.v + v.stage * S::V_BYTES);
            wgmma_commit();
            weigh_tile(w, s, dp, x, item.q0, item.begin + t * KEYS, p.a, m.v_empty + 8 * v.stage);
            k = now;
            v = next_stage<S::V_STAGES>(v);
        }
        wgmma_fence();
        add_rows(dq, w, m.k + k.stage * S::K_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(dq);
        release_stage(m.k_empty + 8 * k.stage);
        k = next_stage<S::K_STAGES>(k);

        const float factor[2] = {p.a.scale, p.a.scale};
        char *rows = m.bytes + warp_row * ROW_BYTES;
        named_sync(WHOLE + wg, 128); /* the products that read these queries are complete */
        stage_rows<DQ_ROWS>(rows, dq, factor);
        const struct item done = *m.item; /* again, for fields that no register keeps */
        store_queries<A, DQ_ROWS>(p.a.dqkv + (done.first + done.q0) * p.a.ld_dqkv + done.kv * p.group * A, p.a.ld_dqkv,
                                  rows, warp_row, p, min(p.n_query, done.len - done.q0));
        fence_proxy_async(); /* before TMA writes there again */
        release_stage(m.q_empty);
        q = next_stage<1>(q);
    }
}

#endif

template <int A, int B>
static __global__ void __launch_bounds__(PAIR_THREADS, 1)
    attn_dq_wide_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = dq_sizes<A, B>;
    extern __shared__ char bytes[];
    __shared__ struct dq_barriers<A, B> b;
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024, keys = start + S::Q_BYTES + S::DOUT_BYTES;
    const struct dq_memory m = {start,
                                start + S::Q_BYTES,
                                keys,
                                keys + S::K_STAGES * S::K_BYTES,
                                sm90_shared(&b.q_full),
                                sm90_shared(&b.q_empty),
                                sm90_shared(b.k_full),
                                sm90_shared(b.k_empty),
                                sm90_shared(b.v_full),
                                sm90_shared(b.v_empty),
                                bytes + (start - sm90_shared(bytes)),
                                &b.item};
    if (threadIdx.x == 0) {
        mbarrier_init(m.q_full, 1);
        mbarrier_init(m.q_empty, 8);
        for (int i = 0; i < S::K_STAGES; i++) {
            mbarrier_init(m.k_full + 8 * i, 1);
            mbarrier_init(m.k_empty + 8 * i, 8);
        }
        for (int i = 0; i < S::V_STAGES; i++) {
            mbarrier_init(m.v_full + 8 * i, 1);
            mbarrier_init(m.v_empty + 8 * i, 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= PAIR_CONSUMERS) {
        sm90_registers_less<PAIR_LOADER_REGISTERS>();
        if (threadIdx.x == PAIR_CONSUMERS) load_dq<A, B>(p, m);
    } else {
        sm90_registers_more<PAIR_REGISTERS>();
        multiply_dq<A, B>(p, m);
    }
#else
    __trap();
#endif
}

template <int A, int B> static void attn_dq_wide(const struct attn_args *a)
{
    using S = dq_sizes<A, B>;
    const struct attn_wgmma_args p = wgmma_args_of(a, DQ_ROWS, S::KEYS);
    allow_shared<attn_dq_wide_kernel<A, B>>(S::BYTES);
    attn_dq_wide_kernel<A, B><<<(unsigned)MT_MIN(p.n_item, cuda.n_sm), PAIR_THREADS, S::BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

#endif
