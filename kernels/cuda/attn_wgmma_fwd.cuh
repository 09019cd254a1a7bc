/* attn_wgmma_fwd.cuh - attention forward on Hopper: the function of attn_fwd.cu with wgmma and TMA.
 *
 * Math: as attn_fwd.cu, with a lazy maximum: the maximum of the online softmax is only raised when a score exceeds
 *   it by a factor of 2^8. So the sums are rescaled a few times per row, not at every tile.
 * Shapes: as attn_fwd.cu.
 * Needs: sm_90a, widths A of keys and B of values in fwd_tiles, at most 64 query heads to a kv head, rows aligned to
 *   16 bytes.
 * Grid: persistent, one block per SM, which takes tiles of 64 rows per consumer warpgroup (192 rows: 24 queries of a
 *   group of 8) from a queue, with one producer warpgroup. TMA loads keys and values in stages; with two tiles of
 *   queries, the next one during the current one. No spills.
 *   A, B      warpgroups  keys, stages  tiles of queries  registers (used)  KiB  clocks: wgmma, 2^x  L2 bytes per clock
 *   64, 64    3           96, 4         2                 160 (133)         146  1152, 1152          21
 *   128, 128  2           128, 2        2                 240 (190)         193  2048, 1024          32
 *   192, 128  2           128, 2        1                 240 (204)         209  2560, 1024          32
 *   256, 256  2           80, 2         1                 240 (235)         225  2560, 640           32
 * Moves: as attn_fwd.cu, but keys and values are read once for the whole group: 12 KiB from L2 for 96 x 192 scores.
 * Bound: the table has the clocks per SM for a tile of keys. Heads of 64: issue is 1020 per scheduler, so all three are
 *   close, and the speed depends on how well a warpgroup's softmax overlaps with the products of the others. Wider
 *   heads: wgmma, then L2: with many kv heads, the order of items decides whether L2 holds the tiles (slot_at).
 * Numerics: as attn_fwd.cu: f32 sums in one order, no atomics, bitwise repeatable. NaN and infinity stay in their
 *   sequence: values beyond its end are cleared.
 * Measured, heads of 64: H100 80GB HBM3, commit 4b2b765, T 16384, H 64, K 8: S 4096 1.13 ms, 485 TFLOP/s (inside a step
 *   1.43 ms, 384); S 8192 2.18 ms, 505; window 128 0.22 ms. The portable kernel: 1.76, 3.44, 0.33 ms.
 *   H200, inside a step: 1.50 ms at commit 14931fb, before NaN was confined to its document, 1.54 ms after (0765d1f);
 *   window 128 0.27 ms at both.
 * Measured, wider heads: tests/RESULTS.md, "Attention by width of heads".
 * Tried and dropped, TFLOP/s at S 4096 and 8192: warpgroups without the order of TURN 466, 426; arithmetic after the
 *   wait, where the compiler puts it without before_wait, 463, 423; tiles of 128 keys 485, 460, and window 128 0.24 ms.
 *   Heads of 64, H100 80GB HBM3, S 4096 and 16384, against 2465f77 (446 to 463, 478 to 499): the maximum found in
 *   scores less the earlier one, as integers, three at a time, without shuffles 426, 455 to 461; with that, waits
 *   tested ahead 420 to 438, 464 to 477, every fourth 2^x on the FMA pipe 403 to 424, 455 to 457, one warpgroup at a
 *   time in its 2^x 423 to 431, 457 to 475. A warp's own instructions take 1,500 of the 2,185 clocks of a tile.
 *   Queries as an operand in registers, heads of 64 and 128, H200, against fcac2c2: no difference, S 4096, 32768.
 *   kv heads in flight (NEAR_HEADS), 128 kv heads of 192/128: all 503, 32 575, 8 620, 4 663; but heads of 64, 8 kv
 *   heads: 8 462, 4 436.
 * Source: FlashAttention-3, arXiv 2407.08608 (warpgroups in turns; softmax of a tile overlaps with the next scores). */
#ifndef MT_CUDA_ATTN_WGMMA_FWD_H
#define MT_CUDA_ATTN_WGMMA_FWD_H

#include "kernels/cuda/attn_wgmma.cuh"

/* Tiles of a width of keys A and of values B, and the registers of consumers and producer. */
template <int A, int B> struct fwd_tiles;
template <> struct fwd_tiles<64, 64> {
    static constexpr int GROUPS = 3, KEYS = 96, Q_STAGES = 2, STAGES = 4, REGISTERS = 160, LOADER_REGISTERS = 32;
};
template <> struct fwd_tiles<128, 128> {
    static constexpr int GROUPS = 2, KEYS = 128, Q_STAGES = 2, STAGES = 2, REGISTERS = 240, LOADER_REGISTERS = 24;
};
template <> struct fwd_tiles<192, 128> {
    static constexpr int GROUPS = 2, KEYS = 128, Q_STAGES = 1, STAGES = 2, REGISTERS = 240, LOADER_REGISTERS = 24;
};
template <> struct fwd_tiles<256, 256> {
    static constexpr int GROUPS = 2, KEYS = 80, Q_STAGES = 1, STAGES = 2, REGISTERS = 240, LOADER_REGISTERS = 24;
};
/* What follows from them. GROUPS: consumer warpgroups, 64 rows each. */
template <int A, int B> struct fwd_sizes : fwd_tiles<A, B> {
    using T = fwd_tiles<A, B>;
    static constexpr int ROWS = T::GROUPS * 64, THREADS = T::GROUPS * 128 + LOADER;
    static constexpr int Q_BYTES = ROWS * A * 2, K_BYTES = T::KEYS * A * 2, STAGE_BYTES = T::KEYS * (A + B) * 2;
    static constexpr int BYTES = T::Q_STAGES * Q_BYTES + T::STAGES * STAGE_BYTES + 1024; /* 1024: alignment */
    static_assert(T::GROUPS * T::REGISTERS + T::LOADER_REGISTERS <= (T::GROUPS + 1) * (512 / (T::GROUPS + 1) / 8 * 8),
                  "the registers of the block at launch");
    static_assert(BYTES <= SHARED_LIMIT && B <= A, "shared memory of an SM; outputs are staged over queries");
};
enum { TURN = 1 }; /* named barriers TURN + g: warpgroup g may issue its products */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int A, int B> struct fwd_barriers {
    using S = fwd_sizes<A, B>;
    uint64_t q_full[S::Q_STAGES], q_empty[S::Q_STAGES];
    uint64_t k_full[S::STAGES], k_empty[S::STAGES], v_full[S::STAGES], v_empty[S::STAGES];
    struct item items[S::Q_STAGES];
};
/* Shared-memory addresses. A stage of kv holds keys, then values. */
struct fwd_memory {
    uint32_t q, kv, q_full, q_empty, k_full, k_empty, v_full, v_empty;
    char *q_bytes; /* generic address of q */
    struct item *items;
};

template <int A, int B>
static __device__ __forceinline__ void load_fwd(const struct attn_wgmma_args &p, const struct fwd_memory &m)
{
    using S = fwd_sizes<A, B>;
    struct stage_at q = {0, 0}, kv = {0, 0};
    struct item item;
    while (take_item<S::KEYS>(&item, p)) {
        mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
        m.items[q.stage] = item;
        mbarrier_arrive_expect(m.q_full + 8 * q.stage, p.n_query * p.group * A * 2);
        load_panels<A, S::ROWS>(m.q + q.stage * S::Q_BYTES, &p.q, m.q_full + 8 * q.stage, item.kv * p.group,
                                (int)item.first + item.q0);
        q = next_stage<S::Q_STAGES>(q);
        int row = (int)item.first + item.begin;
        for (int t = item.n_tile; t > 0; t--, row += S::KEYS) {
            const int bar = 8 * kv.stage;
            const uint32_t to = m.kv + kv.stage * S::STAGE_BYTES;
            mbarrier_wait(m.k_empty + bar, kv.parity ^ 1);
            mbarrier_arrive_expect(m.k_full + bar, S::K_BYTES);
            load_panels<A, S::KEYS>(to, &p.k, m.k_full + bar, item.kv, row);
            mbarrier_wait(m.v_empty + bar, kv.parity ^ 1);
            mbarrier_arrive_expect(m.v_full + bar, S::STAGE_BYTES - S::K_BYTES);
            load_panels<B, S::KEYS>(to + S::K_BYTES, &p.v, m.v_full + bar, item.kv, row);
            kv = next_stage<S::STAGES>(kv);
        }
    }
    mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
    m.items[q.stage].n_tile = 0;
    mbarrier_arrive(m.q_full + 8 * q.stage);
}

/* Online softmax of this thread's two rows: maximum, sum over this thread's columns, factor of the last rescaling. */
struct softmax {
    float max[2], sum[2], factor[2];
};

/* Scores become weights 2^(c (s - max)), c = scale / ln 2. max is raised only when a score exceeds it by more than
 * `slack`: weights stay below 2^8, and sums rarely change. The caller multiplies earlier sums by factor. A row without
 * a key so far has max = -inf and weights 0. */
template <int N>
static __device__ __forceinline__ void online_softmax(float (&s)[N], struct softmax *x, float c, float slack)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = s[2 * h];
#pragma unroll
        for (int i = 2 * h; i < N; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const bool grown = top > x->max[h] + slack;
        top = grown ? top : x->max[h];
        x->factor[h] = grown ? exp2_fast((x->max[h] - top) * c) : 1.0f;
        x->max[h] = top;
        const float shift = top == -INFINITY ? 0.0f : top * c;
        float total[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 2 * h; i < N; i += 4) {
            s[i] = exp2_fast(s[i] * c - shift);
            s[i + 1] = exp2_fast(s[i + 1] * c - shift);
            total[0] += s[i];
            total[1] += s[i + 1];
        }
        x->sum[h] = x->sum[h] * x->factor[h] + (total[0] + total[1]);
    }
}

/* Query and head of this thread's two rows. */
struct rows {
    int query[2], head[2]; /* relative to the first query of the tile and the first head of the group */
};

template <int N>
static __device__ __forceinline__ void mask_tile(float (&s)[N], const struct attn_wgmma_args &p,
                                                 const struct rows &rows, int q0, int k0, int wg)
{
    const int first = query_of(wg * 64, p.inverse), n = query_of(wg * 64 + 63, p.inverse) - first + 1;
    if (none_masked(q0 + first, n, k0, 2 * N, p.a.window)) return;
    const int corner = q0 - k0 - threadIdx.x % 4 * 2;
    const int d[2] = {corner + rows.query[0], corner + rows.query[1]};
#pragma unroll
    for (int i = 0; i < N; i++)
        if (!attends_to(d, i, p.a.window)) s[i] = -INFINITY;
}

/* Stores o and lse of an item. o is rearranged into whole rows in the shared memory of the queries. */
template <int ROWS, int N>
static __device__ __forceinline__ void finish(const struct attn_wgmma_args &p, const struct item &item,
                                              const struct rows &rows, struct softmax *x, const float sink[2],
                                              const float (&o)[N], char *q_rows, int wg)
{
    const int n_live = min(p.n_query, item.len - item.q0), row = threadIdx.x / 32 * 16;
    const int64_t t0 = item.first + item.q0;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float total = x->sum[h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (p.a.sinks) total += exp2_fast((sink[h] - x->max[h]) * p.a.scale_log2);
        inverse[h] = 1.0f / total;
        if (rows.query[h] < n_live && threadIdx.x % 4 == 0)
            p.a.lse[(t0 + rows.query[h]) * p.a.ld_lse + item.kv * p.group + rows.head[h]] =
                x->max[h] * p.a.scale + logf(total);
    }
    named_sync(WHOLE + wg, 128); /* the products that read these queries are complete */
    stage_rows<ROWS>(q_rows + row * ROW_BYTES, o, inverse);
    store_queries<2 * N, ROWS>(p.a.o + t0 * p.a.ld_o + item.kv * p.group * 2 * N, p.a.ld_o, q_rows + row * ROW_BYTES,
                               row, p, n_live);
    fence_proxy_async(); /* before TMA writes there again */
}

/* The softmax of a tile overlaps with the products of the previous tile and of the other warpgroups. The warpgroups
 * take turns (TURN): each issues the scores of tile t, then o += weights of tile t - 1. */
template <int A, int B>
static __device__ __forceinline__ void attend(const struct attn_wgmma_args &p, const struct fwd_memory &m)
{
    using S = fwd_sizes<A, B>;
    constexpr int KEYS = S::KEYS, STAGES = S::STAGES;
    const int wg = warpgroup_index(), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float c = p.a.scale_log2, slack = 8.0f / c;
    struct rows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.query[h] = query_of(row + 8 * h, p.inverse);
        rows.head[h] = row + 8 * h - rows.query[h] * p.group;
    }
    struct stage_at q = {0, 0}, kv = {0, 0};
    if (wg == 0) named_arrive(TURN, 256);
    for (;;) {
        mbarrier_wait(m.q_full + 8 * q.stage, q.parity);
        const struct item *item = m.items + q.stage;
        if (!item->n_tile) break;
        const int q0 = item->q0, last = item->begin + (item->n_tile - 1) * KEYS; /* last: first key of the last tile */
        int k0 = item->begin;
        float s[KEYS / 2], o[B / 2] = {}, sink[2];
        uint32_t w[KEYS / 16][4];
        struct softmax x;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sink[h] = p.a.sinks ? p.a.sinks[item->kv * p.group + rows.head[h]] / p.a.scale : -INFINITY;
            x.max[h] = sink[h];
            x.sum[h] = 0.0f;
        }
        const uint32_t q_rows = m.q + q.stage * S::Q_BYTES + wg * 64 * ROW_BYTES;
        mbarrier_wait(m.k_full + 8 * kv.stage, kv.parity);
        wgmma_fence();
        dot_heads<A, S::ROWS>(s, q_rows, m.kv + kv.stage * S::STAGE_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        release_stage(m.k_empty + 8 * kv.stage);
        mask_tile(s, p, rows, q0, k0, wg);
        online_softmax(s, &x, c, slack);
        pack_rows(w, s);
        while (k0 < last) {
            k0 += KEYS;
            const struct stage_at now = next_stage<STAGES>(kv);
            mbarrier_wait(m.k_full + 8 * now.stage, now.parity);
            mbarrier_wait(m.v_full + 8 * kv.stage, kv.parity);
            named_sync(TURN + wg, 256);
            wgmma_fence();
            dot_heads<A, S::ROWS>(s, q_rows, m.kv + now.stage * S::STAGE_BYTES);
            wgmma_commit();
            add_rows(o, w, m.kv + kv.stage * S::STAGE_BYTES + S::K_BYTES);
            wgmma_commit();
            named_arrive(TURN + (wg + 1) % S::GROUPS, 256);
            wgmma_wait<1>();
            wgmma_use(s);
            release_stage(m.k_empty + 8 * now.stage);
            mask_tile(s, p, rows, q0, k0, wg);
            online_softmax(s, &x, c, slack);
            before_wait(x.sum[0] + x.sum[1] < 0.0f);
            wgmma_wait<0>();
            wgmma_use(o);
            wgmma_use(s);
            release_stage(m.v_empty + 8 * kv.stage);
            if (__any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < B / 2; i++) o[i] *= x.factor[i / 2 % 2];
            }
            pack_rows(w, s);
            kv = now;
        }
        mbarrier_wait(m.v_full + 8 * kv.stage, kv.parity);
        const int live = item->len - last; /* keys of the last tile */
        if (live < KEYS) {
            clear_rows<B, KEYS>(m.q_bytes + (m.kv - m.q) + kv.stage * S::STAGE_BYTES + S::K_BYTES, live);
            rows_cleared(WHOLE + wg);
        }
        wgmma_fence();
        add_rows(o, w, m.kv + kv.stage * S::STAGE_BYTES + S::K_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(o);
        release_stage(m.v_empty + 8 * kv.stage);
        kv = next_stage<STAGES>(kv);
        finish<S::ROWS>(p, *item, rows, &x, sink, o, m.q_bytes + q.stage * S::Q_BYTES, wg);
        release_stage(m.q_empty + 8 * q.stage);
        q = next_stage<S::Q_STAGES>(q);
    }
}
#endif

template <int A, int B>
static __global__ void __launch_bounds__(fwd_sizes<A, B>::THREADS, 1)
    attn_fwd_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = fwd_sizes<A, B>;
    extern __shared__ char bytes[];
    __shared__ struct fwd_barriers<A, B> b;
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024;
    const struct fwd_memory m = {start,
                                 start + S::Q_STAGES * S::Q_BYTES,
                                 sm90_shared(b.q_full),
                                 sm90_shared(b.q_empty),
                                 sm90_shared(b.k_full),
                                 sm90_shared(b.k_empty),
                                 sm90_shared(b.v_full),
                                 sm90_shared(b.v_empty),
                                 bytes + (start - sm90_shared(bytes)),
                                 b.items};
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::Q_STAGES; i++) {
            mbarrier_init(m.q_full + 8 * i, 1);
            mbarrier_init(m.q_empty + 8 * i, S::GROUPS * 4);
        }
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(m.k_full + 8 * i, 1);
            mbarrier_init(m.v_full + 8 * i, 1);
            mbarrier_init(m.k_empty + 8 * i, S::GROUPS * 4);
            mbarrier_init(m.v_empty + 8 * i, S::GROUPS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= S::GROUPS * 128) {
        sm90_registers_less<S::LOADER_REGISTERS>();
        if (threadIdx.x == S::GROUPS * 128) load_fwd<A, B>(p, m);
    } else {
        sm90_registers_more<S::REGISTERS>();
        attend<A, B>(p, m);
    }
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

template <int A, int B> static void attn_fwd_wgmma(const struct attn_args *a)
{
    using S = fwd_sizes<A, B>;
    const struct attn_wgmma_args p = wgmma_args_of(a, S::ROWS, S::KEYS);
    allow_shared<attn_fwd_wgmma_kernel<A, B>>(S::BYTES);
    attn_fwd_wgmma_kernel<A, B><<<(unsigned)MT_MIN(p.n_item, cuda.n_sm), S::THREADS, S::BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

#endif
