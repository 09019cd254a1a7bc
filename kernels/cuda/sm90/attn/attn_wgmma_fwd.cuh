/* attn_wgmma_fwd.cuh - attention forward on Hopper: attn_fwd.cu with wgmma and TMA; arXiv 2407.08608.
 * Math: lazy maximum: it is only raised when a score exceeds it by a factor of 2^8. Where the lengths of queries and
 *   keys bound the scores well enough (bound_max), it is set once, after the first tile; before the forward, a kernel
 *   finds the longest key of every long sequence and kv head. Heads of 64: sequences with many keys have a separate
 *   launch, with larger tiles of keys.
 * Needs: shapes of attn_fwd.cu, sm_90a, widths A and B in fwd_tiles, at most 64 query heads to a kv head, rows aligned
 *   to 16 bytes.
 * Grid: persistent, one block per SM, which takes tiles of 64 rows per consumer warpgroup (192 rows: 24 queries of a
 *   group of 8) from a queue; a producer warpgroup. TMA loads keys and values in stages. No spills.
 *   A, B      warpgroups  keys, stages  tiles of queries  registers (used)  KiB  clocks: wgmma, 2^x  L2 bytes per clock
 *   64, 64    3           96, 4         2                 160 (132)         146  1152, 1152          21
 *   64, 64    3           128, 4        2                 160 (154)         178  1536, 1536          21
 *   128, 128  2           128, 2        2                 240 (184)         193  2048, 1024          32
 *   192, 128  2           128, 2        1                 240 (184)         209  2560, 1024          32
 *   256, 256  2           80, 2         1                 240 (214)         225  2560, 640           32
 * Bound: heads of 64: the power limit of an H200; a tile of 96 keys takes 1,783 clocks, in which a scheduler issues 775
 *   instructions. Wider: wgmma, then L2, where the order of items (slot_at) decides whether it holds the tiles of many
 *   kv heads. Keys and values are read once for a group.
 * Numerics: as attn_fwd.cu: f32 sums in one order, no atomics but for a maximum. Values beyond the end of a sequence
 *   are cleared. */
#ifndef MT_CUDA_ATTN_WGMMA_FWD_H
#define MT_CUDA_ATTN_WGMMA_FWD_H

#include "kernels/cuda/sm90/attn/attn_wgmma.cuh"

/* Tiles of KEYS keys of width A and values of width B, and the registers of consumers and producer. */
template <int A, int B> struct fwd_tiles;
template <> struct fwd_tiles<64, 64> {
    static constexpr int GROUPS = 3, Q_STAGES = 2, STAGES = 4, REGISTERS = 160, LOADER_REGISTERS = 32;
};
template <> struct fwd_tiles<128, 128> {
    static constexpr int GROUPS = 2, Q_STAGES = 2, STAGES = 2, REGISTERS = 240, LOADER_REGISTERS = 24;
};
template <> struct fwd_tiles<192, 128> {
    static constexpr int GROUPS = 2, Q_STAGES = 1, STAGES = 2, REGISTERS = 240, LOADER_REGISTERS = 24;
};
template <> struct fwd_tiles<256, 256> {
    static constexpr int GROUPS = 2, Q_STAGES = 1, STAGES = 2, REGISTERS = 240, LOADER_REGISTERS = 24;
};
/* Sizes that follow from the tiles. GROUPS: consumer warpgroups, 64 rows each. */
template <int A, int B, int N_KEY> struct fwd_sizes : fwd_tiles<A, B> {
    using T = fwd_tiles<A, B>;
    static constexpr int KEYS = N_KEY, ROWS = T::GROUPS * 64, THREADS = T::GROUPS * 128 + LOADER;
    static constexpr int Q_BYTES = ROWS * A * 2, K_BYTES = KEYS * A * 2, STAGE_BYTES = KEYS * (A + B) * 2;
    static constexpr int BYTES = T::Q_STAGES * Q_BYTES + T::STAGES * STAGE_BYTES + 1024; /* 1024: alignment */
    static_assert(T::GROUPS * T::REGISTERS + T::LOADER_REGISTERS <= (T::GROUPS + 1) * (512 / (T::GROUPS + 1) / 8 * 8),
                  "the registers of the block at launch");
    static_assert(BYTES <= SHARED_LIMIT && B <= A, "shared memory of an SM; outputs are staged over queries");
};
enum {
    TURN = 1,        /* named barriers TURN + g: warpgroup g may issue its products */
    MANY_TILES = 8,  /* of keys: with fewer, bound_max takes longer than it saves */
    NORM_SLOTS = 256 /* longest keys that a block of key_norms_kernel collects before it passes them on */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct fwd_item {
    struct item at;
    float key_norm; /* no |k|^2 of the sequence and kv head is larger; 0: not known */
};
template <class S> struct fwd_barriers {
    uint64_t q_full[S::Q_STAGES], q_empty[S::Q_STAGES];
    uint64_t kv_full[S::STAGES], kv_empty[S::STAGES];
    struct fwd_item items[S::Q_STAGES];
};
/* Shared-memory addresses. A stage of kv holds the keys of a tile, then the values of the tile before. */
struct fwd_memory {
    uint32_t q, kv, q_full, q_empty, kv_full, kv_empty;
    char *q_bytes; /* generic address of q */
    struct fwd_item *items;
};

template <int A, int B, int KEYS>
static __device__ __forceinline__ void load_fwd(const struct attn_wgmma_args &p, const struct fwd_memory &m)
{
    using S = fwd_sizes<A, B, KEYS>;
    struct stage_at q = {0, 0}, kv = {0, 0};
    struct item item;
    while (take_item<S::KEYS>(&item, p)) {
        mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
        m.items[q.stage] = {item, 0.0f};
        if (item.n_tile >= MANY_TILES && p.a.key_norm && attn_bounded(p.a, item.len))
            m.items[q.stage].key_norm = __uint_as_float(p.a.key_norm[attn_norm_at(p.a, item.first) + item.kv]);
        mbarrier_arrive_expect(m.q_full + 8 * q.stage, p.n_query * p.group * A * 2);
        load_panels<A, S::ROWS>(m.q + q.stage * S::Q_BYTES, &p.q, m.q_full + 8 * q.stage, item.kv * p.group,
                                (int)item.first + item.q0);
        q = next_stage<S::Q_STAGES>(q);
        int row = (int)item.first + item.begin;
        for (int t = 0; t <= item.n_tile; t++, row += KEYS) {
            const uint32_t full = m.kv_full + 8 * kv.stage, to = m.kv + kv.stage * S::STAGE_BYTES;
            const bool keys = t<item.n_tile, values = t> 0;
            mbarrier_wait(m.kv_empty + 8 * kv.stage, kv.parity ^ 1);
            mbarrier_arrive_expect(full, (keys ? S::K_BYTES : 0) + (values ? S::STAGE_BYTES - S::K_BYTES : 0));
            if (keys) load_panels<A, KEYS>(to, &p.k, full, item.kv, row);
            if (values) load_panels<B, KEYS>(to + S::K_BYTES, &p.v, full, item.kv, row - KEYS);
            kv = next_stage<S::STAGES>(kv);
        }
    }
    mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
    m.items[q.stage].at.n_tile = 0;
    mbarrier_arrive(m.q_full + 8 * q.stage);
}

/* Online softmax of this thread's two rows: maximum, sum over this thread's columns, factor of the last rescaling. */
struct softmax {
    float max[2], sum[2], factor[2];
};

/* Scores of row h of this thread become weights 2^(c (s - max)), c = scale / ln 2. A row without a key so far has max =
 * -inf and weights 0. */
template <int N> static __device__ __forceinline__ void weigh_row(float (&s)[N], struct softmax *x, int h, float c)
{
    const float shift = x->max[h] == -INFINITY ? 0.0f : x->max[h] * c;
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 2 * h; i < N; i += 4) {
        s[i] = exp2_fast(s[i] * c - shift);
        s[i + 1] = exp2_fast(s[i + 1] * c - shift);
        total[0] += s[i];
        total[1] += s[i + 1];
    }
    x->sum[h] += total[0] + total[1];
}
/* Finds the maximum of both rows, then computes their weights. A maximum is raised only when a score exceeds it by more
 * than `slack`, 8 / c in callers: so weights are at most 2^8, and sums rarely need rescaling. The caller multiplies
 * earlier sums by x->factor. */
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
        x->sum[h] *= x->factor[h];
        weigh_row(s, x, h, c);
    }
}

/* Raises the maxima of this warp's rows until no later weight can exceed 2^GROWTH, as |q| |k| bounds the scores. Later
 * tiles then need no maximum. This loses no precision, as f32 has the same relative precision far from 1. Returns false
 * and changes nothing if all weights so far would fall below 2^-SHRINK, for NaN, and for an unknown |k|. s: weights of
 * the first tile; row: this thread's first row; used: whether its two rows have queries. */
template <int A, int ROWS, int N>
static __device__ __forceinline__ bool bound_max(float (&s)[N], struct softmax *x, const char *q, int row,
                                                 const bool used[2], float key_norm, float c)
{
    enum { GROWTH = 64, SHRINK = 60 };
    float top[2];
    bool bounded = key_norm > 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < A / 32; i++) {
            const char *panel = q + i / 2 * ROWS * ROW_BYTES;
            float v[8];
            unpack8(v, load16(panel + sm90_swizzle(row + 8 * h, threadIdx.x % 4 + i % 2 * 4)));
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[j] * v[j];
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float need = sqrtf(sum) * sqrtf(key_norm) - GROWTH / c;
        if (used[h]) bounded = bounded && need - x->max[h] <= SHRINK / c;
        top[h] = fmaxf(x->max[h], need);
    }
    if (!__all_sync(~0u, bounded)) return false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float factor = exp2_fast((x->max[h] - top[h]) * c);
        x->max[h] = top[h];
        x->sum[h] *= factor;
#pragma unroll
        for (int i = 2 * h; i < N; i += 4) s[i] *= factor, s[i + 1] *= factor;
    }
    return true;
}

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
 * take turns (TURN): each issues the scores of tile t, then o += weights times values of tile t - 1. */
template <int A, int B, int KEYS>
static __device__ __forceinline__ void attend(const struct attn_wgmma_args &p, const struct fwd_memory &m)
{
    using S = fwd_sizes<A, B, KEYS>;
    constexpr int STAGES = S::STAGES;
    const int wg = warpgroup_index(), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float c = p.a.scale_log2, slack = 8.0f / c;
    struct rows rows;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.query[h] = query_of(row + 8 * h, p.inverse);
        rows.head[h] = row + 8 * h - rows.query[h] * p.group;
    }
    const bool used[2] = {rows.query[0] < p.n_query, rows.query[1] < p.n_query};
    struct stage_at q = {0, 0}, kv = {0, 0};
    if (wg == 0) named_arrive(TURN, 256);
    for (;;) {
        mbarrier_wait(m.q_full + 8 * q.stage, q.parity);
        const struct item *item = &m.items[q.stage].at;
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
        mbarrier_wait(m.kv_full + 8 * kv.stage, kv.parity);
        wgmma_fence();
        dot_heads<A, S::ROWS>(s, q_rows, m.kv + kv.stage * S::STAGE_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        release_stage(m.kv_empty + 8 * kv.stage);
        kv = next_stage<STAGES>(kv);
        mask_tile(s, p, rows, q0, k0, wg);
        online_softmax(s, &x, c, slack);
        bool bounded = false;
        if (A <= BOUNDED_WIDTH && m.items[q.stage].key_norm != 0.0f)
            bounded =
                bound_max<A, S::ROWS>(s, &x, m.q_bytes + q.stage * S::Q_BYTES, row, used, m.items[q.stage].key_norm, c);
        pack_rows(w, s);
        while (k0 < last) {
            const uint32_t stage = m.kv + kv.stage * S::STAGE_BYTES;
            k0 += KEYS;
            mbarrier_wait(m.kv_full + 8 * kv.stage, kv.parity);
            named_sync(TURN + wg, 256);
            wgmma_fence();
            dot_heads<A, S::ROWS>(s, q_rows, stage);
            wgmma_commit();
            add_rows(o, w, stage + S::K_BYTES);
            wgmma_commit();
            named_arrive(TURN + (wg + 1) % S::GROUPS, 256);
            wgmma_wait<1>();
            wgmma_use(s);
            mask_tile(s, p, rows, q0, k0, wg);
            if (bounded) {
                weigh_row(s, &x, 0, c);
                weigh_row(s, &x, 1, c);
            } else {
                online_softmax(s, &x, c, slack);
            }
            before_wait(x.sum[0] + x.sum[1] < 0.0f);
            wgmma_wait<0>();
            wgmma_use(o);
            wgmma_use(s);
            release_stage(m.kv_empty + 8 * kv.stage);
            kv = next_stage<STAGES>(kv);
            if (!bounded && __any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < B / 2; i++) o[i] *= x.factor[i / 2 % 2];
            }
            pack_rows(w, s);
        }
        const uint32_t values = kv.stage * S::STAGE_BYTES + S::K_BYTES;
        const int live = item->len - last; /* keys of the last tile */
        mbarrier_wait(m.kv_full + 8 * kv.stage, kv.parity);
        if (live < KEYS) {
            clear_rows<B, KEYS>(m.q_bytes + (m.kv - m.q) + values, live);
            rows_cleared(WHOLE + wg);
        }
        wgmma_fence();
        add_rows(o, w, m.kv + values);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(o);
        release_stage(m.kv_empty + 8 * kv.stage);
        kv = next_stage<STAGES>(kv);
        finish<S::ROWS>(p, *item, rows, &x, sink, o, m.q_bytes + q.stage * S::Q_BYTES, wg);
        release_stage(m.q_empty + 8 * q.stage);
        q = next_stage<S::Q_STAGES>(q);
    }
}
#endif

template <int A, int B, int KEYS>
static __global__ void __launch_bounds__(fwd_sizes<A, B, KEYS>::THREADS, 1)
    attn_fwd_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = fwd_sizes<A, B, KEYS>;
    using barriers = struct fwd_barriers<S>;
    extern __shared__ char bytes[];
    __shared__ barriers b;
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024;
    uint32_t bars = sm90_shared(&b);
    if (A <= 128) asm volatile("" : "+r"(bars)); /* else bars is computed in every step; wider heads would spill */
    const struct fwd_memory m = {start,
                                 start + S::Q_STAGES * S::Q_BYTES,
                                 bars + (uint32_t)offsetof(barriers, q_full),
                                 bars + (uint32_t)offsetof(barriers, q_empty),
                                 bars + (uint32_t)offsetof(barriers, kv_full),
                                 bars + (uint32_t)offsetof(barriers, kv_empty),
                                 bytes + (start - sm90_shared(bytes)),
                                 b.items};
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::Q_STAGES; i++) {
            mbarrier_init(m.q_full + 8 * i, 1);
            mbarrier_init(m.q_empty + 8 * i, S::GROUPS * 4);
        }
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(m.kv_full + 8 * i, 1);
            mbarrier_init(m.kv_empty + 8 * i, S::GROUPS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= S::GROUPS * 128) {
        sm90_registers_less<S::LOADER_REGISTERS>();
        if (threadIdx.x == S::GROUPS * 128) load_fwd<A, B, KEYS>(p, m);
    } else {
        sm90_registers_more<S::REGISTERS>();
        attend<A, B, KEYS>(p, m);
    }
#else
    __trap();
#endif
}

/* key_norm of the sequences with bounded scores. A block has consecutive keys, a thread one at a time. */
template <int A> static __global__ void __launch_bounds__(256) key_norms_kernel(const struct attn_args a)
{
    __shared__ uint32_t most[NORM_SLOTS]; /* of the entries from `base` on */
    const int64_t n = (int64_t)a.n_tok * a.n_kv, share = (n + gridDim.x - 1) / gridDim.x;
    const int64_t begin = blockIdx.x * share, end = MT_MIN(begin + share, n);
    if (begin >= end) return;
    const int64_t base = attn_norm_at(a, a.cu[sequence_at(a.cu, a.n_seq, (int)(begin / a.n_kv))]);
    for (int i = threadIdx.x; i < NORM_SLOTS; i += blockDim.x) most[i] = 0;
    __syncthreads();
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const int kv = (int)(i % a.n_kv), seq = sequence_at(a.cu, a.n_seq, (int)(i / a.n_kv)), first = a.cu[seq];
        const bf16 *key = a.qkv + i / a.n_kv * a.ld_qkv + (int64_t)(a.n_head + kv) * A;
        float sum = 0.0f;
        if (!attn_bounded(a, a.cu[seq + 1] - first)) continue;
#pragma unroll
        for (int j = 0; j < A; j += 8) {
            float v[8];
            unpack8(v, load16(key + j));
#pragma unroll
            for (int k = 0; k < 8; k++) sum += v[k] * v[k];
        }
        const int64_t at = attn_norm_at(a, first) + kv;
        const uint32_t bits = __float_as_uint(sum); /* NaN is above all numbers */
        if (at - base < NORM_SLOTS)
            atomicMax(&most[at - base], bits);
        else
            atomicMax(&a.key_norm[at], bits);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NORM_SLOTS; i += blockDim.x)
        if (most[i]) atomicMax(&a.key_norm[base + i], most[i]);
}

/* a->key_norm, or NULL where no sequence has bounded scores. */
template <int A> static void find_key_norms(struct attn_args *a)
{
    if (A > BOUNDED_WIDTH || !attn_bounded(*a, a->max_len)) a->key_norm = NULL;
    if (!a->key_norm) return;
    const int64_t n = (int64_t)a->n_tok * a->n_kv, n_norm = attn_norm_at(*a, a->n_tok) + a->n_kv;
    CUDA_CHECK(cudaMemsetAsync(a->key_norm, 0, (size_t)n_norm * sizeof(*a->key_norm), cuda.stream));
    key_norms_kernel<A><<<(unsigned)MT_MIN(ceil_div(n, 256), 4 * cuda.n_sm), 256, 0, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

/* Sequences whose attn_mean_keys is from .. end-1. */
template <int A, int B, int KEYS> static void attn_fwd_wgmma(const struct attn_args *a, int from, int end)
{
    using S = fwd_sizes<A, B, KEYS>;
    struct attn_wgmma_args p = wgmma_args_of(a, S::ROWS, S::KEYS);
    const int most = attn_mean_keys(*a, a->max_len);
    const bool alike = (int64_t)a->max_len * a->n_seq == a->n_tok; /* all sequences have the same length */
    if (most < from || (alike && most >= end)) return;
    p.keys_from = from;
    p.keys_end = end;
    allow_shared<attn_fwd_wgmma_kernel<A, B, KEYS>>(S::BYTES);
    attn_fwd_wgmma_kernel<A, B, KEYS><<<(unsigned)MT_MIN(p.n_item, cuda.n_sm), S::THREADS, S::BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

#endif
