/* attn_wgmma_bwd.cu - attention backward on Hopper, heads of 64: the function of attn_bwd.cu with wgmma and TMA.
 *
 * Math: as attn_bwd.cu: seven products, p and ds once for dk, dv and once more for dq. Sums across blocks would need
 *   five, but dq in global memory in f32 and an order to add in.
 * Shapes: as attn_bwd.cu; stat [K, T, H/K] and one entry more.
 * Needs: sm_90a, A 64, at most 64 query heads to a kv head, rows aligned to 16 bytes.
 * Grid: two warpgroups multiply, 64 rows each, and one loads, in both kernels. 168 registers at launch, then 240 (dkv
 *   227 used, dq 177) and 24; no spills.
 *   dkv: a block per 128 keys of a sequence and kv head; k and v are first operands held in registers, the queries of
 *   all heads of the group come by in stages of 64 rows, eight of them; 165 KiB.
 *   dq: a block per SM, resident to the end, takes tiles of 128 rows (16 queries of a group of 8), as the forward does;
 *   keys and values in tiles of 96, six stages; 209 KiB.
 * Moves: as attn_bwd.cu; dkv 16 KiB of L2 for 128 x 64 scores, dq 24 KiB for 128 x 96.
 * Bound, per SM, in clocks: dkv, 64 rows to 128 keys: wgmma 1024, 2^x 512, issue 670 a scheduler; dq, 96 keys to 128
 *   rows: 1152, 768, 714: the tensor cores, if the arithmetic of one warpgroup runs beside the products of the other.
 * Numerics: as attn_bwd.cu. NaN and infinity stay in their sequence: keys and values (dq), queries and dout (dk, dv)
 *   beyond its end are cleared before the products read them.
 * Source: FlashAttention-2 and -3, arXiv 2307.08691, 2407.08608.
 *
 * In both loops nothing is in flight when a pass ends: the compiler keeps the registers of a first operand for a
 * product only up to a wait in the same pass, and else puts other values there while they are still read.
 * Measured: H100 80GB HBM3, commit 4b2b765, T 16384, H 64, K 8: S 4096 3.39 ms, 405 TFLOP/s of 5 products
 *   (inside a step 3.88 ms, 354); S 8192 6.81 ms, 404; window 128 0.60 ms. The portable kernels: 5.34, 10.5, 0.80 ms.
 *   H200, inside a step of gpt-oss-20b, one run: S 4096 4.20 ms before the rows were cleared (14931fb), 4.41 with it;
 *   window 128 0.668, 0.695. Of this 2 % are the clock: the same run's cuBLAS products became slower by that.
 * Tried and dropped: masking the products with dout too (11 % slower: the accumulators change inside a branch). */
#include "kernels/cuda/attn_wgmma.cuh"

enum {
    GROUPS = 2, /* warpgroups that multiply, 64 rows each */
    ROWS = GROUPS * 64,
    THREADS = GROUPS * 128 + LOADER,
    LOADER_REGISTERS = 24, /* 24 + 2 * 240 <= 512: all of the SM's */
    REGISTERS = 240,
    TILE_BYTES = ROWS * ROW_BYTES,
    WHOLE = 1, /* named barriers: a whole warpgroup is here */

    DQ_STAGES = 6,                                                /* of keys and values; and two of queries and dout */
    DQ_BYTES = 4 * TILE_BYTES + DQ_STAGES * 2 * KEY_BYTES + 1024, /* 1024: to align it */

    DKV_QUERIES = 64, /* rows (queries of all heads of the group) of a stage: q, dout, stat */
    DKV_STAGES = 8,
    PART_BYTES = DKV_QUERIES * ROW_BYTES,
    STAT_BYTES = DKV_QUERIES * (int)sizeof(float2),
    DKV_BYTES = 2 * TILE_BYTES + DKV_STAGES * (2 * PART_BYTES + STAT_BYTES) + 1024
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dq: tiles of queries walk over their keys, as in the forward */

struct dq_barriers {
    uint64_t q_full[2], q_empty[2], kv_full[DQ_STAGES], kv_empty[DQ_STAGES];
};
/* Shared addresses. A buffer of q is queries, then dout; one of kv keys, then values. */
struct dq_memory {
    uint32_t q, kv, q_full, q_empty, kv_full, kv_empty;
    char *q_bytes; /* generic address of q */
};

static __device__ __forceinline__ void load_dq(const struct attn_wgmma_args &p, const struct dq_memory &m)
{
    struct place q = {0, 0}, kv = {0, 0};
    const int rounds = n_round(p);
    for (int round = 0; round < rounds; round++) {
        struct item item;
        if (!item_at(&item, p, round)) continue;
        const int row = (int)item.first + item.q0, head = item.kv * p.group;
        const uint32_t to = m.q + q.stage * 2 * TILE_BYTES, bar = m.q_full + 8 * q.stage;
        mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
        mbarrier_arrive_expect(bar, 2 * p.n_query * p.group * ROW_BYTES);
        tma_load(to, &p.q, bar, 0, head, row);
        tma_load(to + TILE_BYTES, &p.dout, bar, 0, head, row);
        q = next_place<2>(q);
        for (int t = 0; t < item.n_tile; t++) {
            const int key = (int)item.first + item.begin + t * KEYS;
            const uint32_t k = m.kv + kv.stage * 2 * KEY_BYTES, kv_bar = m.kv_full + 8 * kv.stage;
            mbarrier_wait(m.kv_empty + 8 * kv.stage, kv.parity ^ 1);
            mbarrier_arrive_expect(kv_bar, 2 * KEY_BYTES);
            tma_load(k, &p.kv, kv_bar, 0, p.a.n_head + item.kv, key);
            tma_load(k + KEY_BYTES, &p.kv, kv_bar, 0, p.a.n_head + p.a.n_kv + item.kv, key);
            kv = next_place<DQ_STAGES>(kv);
        }
    }
}

/* Where a tile of queries is: rows and stat of this thread, and the queries of its warpgroup from the tile's first. */
struct dq_rows {
    int query[2], first, n_query;
    float2 stat[2];
};

/* Scores s of keys k0 .. and products dp with the values become ds, in dp. */
static __device__ __forceinline__ void weigh_keys(float (&s)[KEYS / 2], float (&dp)[KEYS / 2], const struct dq_rows &x,
                                                  int q0, int k0, const struct attn_args &a)
{
    if (!all_see(q0 + x.first, x.n_query, k0, KEYS, a.window)) {
        const int corner = q0 - k0 - threadIdx.x % 4 * 2;
        const int d[2] = {corner + x.query[0], corner + x.query[1]};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (!sees_key(d, i, a.window)) s[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        const float2 y = x.stat[i / 2 % 2];
        dp[i] = exp2_fast(s[i] * a.scale_log2 - y.x) * (dp[i] - y.y);
    }
}

/* Keys and values of the item's tile t that are beyond the end of the sequence become zeros. */
static __device__ __forceinline__ void clear_keys(const struct dq_memory &m, const struct item &item, int t, int stage,
                                                  int wg)
{
    const int live = item.len - item.begin - t * KEYS;
    char *tile = m.q_bytes + (m.kv - m.q) + stage * 2 * KEY_BYTES;
    if (live >= KEYS) return;
    clear_rows(tile, live, KEYS);
    clear_rows(tile + KEY_BYTES, live, KEYS);
    rows_cleared(WHOLE + wg);
}

/* As in the forward, while a tile's ds is formed the tile before is multiplied with its keys. */
static __device__ __forceinline__ void multiply_dq(const struct attn_wgmma_args &p, const struct dq_memory &m)
{
    const int wg = warpgroup_index(), warp_row = threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
    const int rounds = n_round(p);
    struct dq_rows x;
    x.first = query_of(wg * 64, p.inverse);
    x.n_query = query_of(wg * 64 + 63, p.inverse) - x.first + 1;
    x.query[0] = query_of(row, p.inverse);
    x.query[1] = query_of(row + 8, p.inverse);
    struct place q = {0, 0}, kv = {0, 0};
    for (int round = 0; round < rounds; round++) {
        struct item item;
        if (!item_at(&item, p, round)) continue;
        const int n_live = min(p.n_query, item.len - item.q0);
        const int64_t t0 = item.first + item.q0;
        const uint32_t q_rows = m.q + q.stage * 2 * TILE_BYTES + wg * 64 * ROW_BYTES;
        const float2 *item_stat = p.a.stat + (item.kv * (int64_t)p.a.n_tok + t0) * p.group;
        float s[KEYS / 2], dp[KEYS / 2], dq[32] = {};
        uint32_t w[KEYS / 16][4];
#pragma unroll
        for (int h = 0; h < 2; h++)
            x.stat[h] = x.query[h] < n_live ? item_stat[row + 8 * h] : make_float2(INFINITY, 0.0f);
        mbarrier_wait(m.q_full + 8 * q.stage, q.parity);
        mbarrier_wait(m.kv_full + 8 * kv.stage, kv.parity);
        clear_keys(m, item, 0, kv.stage, wg);
        wgmma_fence();
        dot_heads(s, q_rows, m.kv + kv.stage * 2 * KEY_BYTES);
        dot_heads(dp, q_rows + TILE_BYTES, m.kv + kv.stage * 2 * KEY_BYTES + KEY_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        wgmma_use(dp);
        weigh_keys(s, dp, x, item.q0, item.begin, p.a);
        pack_rows(w, dp);
        for (int t = 1; t < item.n_tile; t++) {
            const struct place now = next_place<DQ_STAGES>(kv);
            mbarrier_wait(m.kv_full + 8 * now.stage, now.parity);
            clear_keys(m, item, t, now.stage, wg);
            wgmma_fence();
            dot_heads(s, q_rows, m.kv + now.stage * 2 * KEY_BYTES);
            dot_heads(dp, q_rows + TILE_BYTES, m.kv + now.stage * 2 * KEY_BYTES + KEY_BYTES);
            wgmma_commit();
            add_rows(dq, w, m.kv + kv.stage * 2 * KEY_BYTES);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(s);
            wgmma_use(dp);
            weigh_keys(s, dp, x, item.q0, item.begin + t * KEYS, p.a);
            before_wait(is_odd_one(dp));
            wgmma_wait<0>();
            wgmma_use(dq);
            wgmma_use(dp);
            give_back(m.kv_empty + 8 * kv.stage);
            pack_rows(w, dp);
            kv = now;
        }
        wgmma_fence();
        add_rows(dq, w, m.kv + kv.stage * 2 * KEY_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(dq);
        give_back(m.kv_empty + 8 * kv.stage);
        kv = next_place<DQ_STAGES>(kv);

        const float factor[2] = {p.a.scale, p.a.scale};
        char *place = m.q_bytes + q.stage * 2 * TILE_BYTES + warp_row * ROW_BYTES;
        named_sync(WHOLE + wg, 128); /* nobody multiplies by these queries any more */
        stage_rows(place, dq, factor);
        store_queries(p.a.dqkv + t0 * p.a.ld_dqkv + item.kv * p.group * HEAD, p.a.ld_dqkv, place, warp_row, p, n_live);
        fence_proxy_async(); /* before the copy engine writes there again */
        give_back(m.q_empty + 8 * q.stage);
        q = next_place<2>(q);
    }
}

/* ---- dk, dv: 128 keys of a kv head, in registers, see the queries of all heads of the group come by */

/* Shared addresses: a stage's q, dout and stat are at stage * *_BYTES of the three. */
struct dkv_memory {
    uint32_t k, v, q, dout, stat, kv_full, full, empty;
    char *bytes; /* generic address of k */
};
/* Which keys, and which queries see them: n_tile tiles from k0 on. */
struct key_block {
    int64_t first;
    int len, kv, k0, n_tile;
};

/* One warp: the copy engine brings q and dout, the lanes stat. Queries after the end of the sequence have the last
 * entry of stat, with which all weights are 0. */
static __device__ __forceinline__ void load_dkv(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                const struct key_block &b)
{
    const int lane = threadIdx.x % 32, head = p.a.n_head + b.kv, row = (int)b.first + b.k0;
    const int n_row = p.n_query * p.group;
    const float2 *stat = p.a.stat + (b.kv * (int64_t)p.a.n_tok + b.first) * p.group;
    const float2 *nobody = p.a.stat + (int64_t)p.a.n_head * p.a.n_tok;
    if (lane == 0) {
        mbarrier_arrive_expect(m.kv_full, 2 * TILE_BYTES);
        for (int half = 0; half < ROWS; half += 64) {
            tma_load(m.k + half * ROW_BYTES, &p.kv, m.kv_full, 0, head, row + half);
            tma_load(m.v + half * ROW_BYTES, &p.kv, m.kv_full, 0, head + p.a.n_kv, row + half);
        }
    }
    struct place at = {0, 0};
    for (int t = 0; t < b.n_tile; t++) {
        const int q0 = b.k0 + t * p.n_query;
        const uint32_t full = m.full + 8 * at.stage;
        mbarrier_wait(m.empty + 8 * at.stage, at.parity ^ 1);
        if (lane == 0) {
            mbarrier_arrive_expect(full, 2 * n_row * ROW_BYTES);
            tma_load(m.q + at.stage * PART_BYTES, &p.q, full, 0, b.kv * p.group, (int)b.first + q0);
            tma_load(m.dout + at.stage * PART_BYTES, &p.dout, full, 0, b.kv * p.group, (int)b.first + q0);
        }
        for (int i = lane; i < n_row; i += 32) {
            const bool live = q0 + query_of(i, p.inverse) < b.len;
            const float2 *from = live ? stat + (int64_t)q0 * p.group + i : nobody;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(m.stat + at.stage * STAT_BYTES + i * 8),
                         "l"(from)
                         : "memory");
        }
        cp_async_arrive(full);
        at = next_place<DKV_STAGES>(at);
    }
}

/* A first operand of this warp's 16 rows of a tile, all of a head. */
static __device__ __forceinline__ void hold_rows(uint32_t (&a)[HEAD / 16][4], uint32_t tile)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) load_matrix4(a[k], tile + sm90_swizzle(lane % 16, 2 * k + lane / 16));
}

/* s = -inf where the query does not see the key; distance: of the tile's first query to this thread's first key. */
static __device__ __forceinline__ void hide_queries(float (&s)[32], int distance, uint32_t inverse, int window)
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int column = 8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2;
        const int d = distance + query_of(column, inverse) - 8 * (i / 2 % 2);
        if ((unsigned)d >= (unsigned)window) s[i] = -INFINITY;
    }
}

/* Queries and dout from query q0 + live on, of a tile that begins at q0, become zeros. */
static __device__ __forceinline__ void clear_queries(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                     int live, int stage, int wg)
{
    if (live >= p.n_query) return;
    clear_rows(m.bytes + (m.q - m.k) + stage * PART_BYTES, live * p.group, DKV_QUERIES);
    clear_rows(m.bytes + (m.dout - m.k) + stage * PART_BYTES, live * p.group, DKV_QUERIES);
    rows_cleared(WHOLE + wg);
}

/* Scores s [keys, queries] of keys w0 .. and queries q0 .. become weights, and dp ds. */
static __device__ __forceinline__ void weigh_queries(float (&s)[32], float (&dp)[32], const struct attn_wgmma_args &p,
                                                     int w0, int q0, const char *stat)
{
    const int key = w0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (!all_see(q0, p.n_query, w0, 64, p.a.window)) hide_queries(s, q0 - key, p.inverse, p.a.window);
#pragma unroll
    for (int n = 0; n < DKV_QUERIES / 8; n++) {
        const float4 x = ((const float4 *)stat)[n * 4 + threadIdx.x % 4]; /* of two neighbouring columns */
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = 4 * n + e;
            s[i] = exp2_fast(s[i] * p.a.scale_log2 - (e % 2 ? x.z : x.x));
            dp[i] = s[i] * (dp[i] - (e % 2 ? x.w : x.y));
        }
    }
}

/* Tiles that this warpgroup has no part in. */
static __device__ __forceinline__ void pass_by(const struct dkv_memory &m, struct place *at, int n)
{
    for (int i = 0; i < n; i++) {
        mbarrier_wait(m.full + 8 * at->stage, at->parity);
        give_back(m.empty + 8 * at->stage);
        *at = next_place<DKV_STAGES>(*at);
    }
}

static __device__ __forceinline__ void store_keys(const struct attn_wgmma_args &p, const struct key_block &b,
                                                  const float (&sum)[32], float scale, char *tile, int head)
{
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, chunk = lane % 8;
    const float factor[2] = {scale, scale};
    bf16 *to = p.a.dqkv + (b.first + b.k0 + warp_row) * p.a.ld_dqkv + head * HEAD + chunk * 8;
    stage_rows(tile + warp_row * ROW_BYTES, sum, factor);
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
        if (b.k0 + warp_row + r < b.len)
            store16(to + r * p.a.ld_dqkv, load16(tile + (warp_row * ROW_BYTES + sm90_swizzle(r, chunk))));
    }
}

/* Products are transposed, keys by queries, so that weights are at once the first operand of the sums over queries. */
static __device__ __forceinline__ void multiply_dkv(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                    const struct key_block &b)
{
    const int wg = warpgroup_index(), warp_row = threadIdx.x / 32 * 16, w0 = b.k0 + wg * 64; /* keys w0 .. w0+63 */
    const int end = min(b.len, w0 + 63 + p.a.window); /* queries w0 .. end-1 see them */
    const int from = min(wg * 64 / p.n_query, b.n_tile);
    const int to = w0 < b.len ? (end - b.k0 + p.n_query - 1) / p.n_query : from;
    const char *stat = m.bytes + (m.stat - m.k);
    uint32_t k[HEAD / 16][4], v[HEAD / 16][4], pw[DKV_QUERIES / 16][4], dw[DKV_QUERIES / 16][4];
    float s[32], dp[32], dk[32] = {}, dv[32] = {};
    struct place at = {0, 0};

    mbarrier_wait(m.kv_full, 0);
    hold_rows(k, m.k + warp_row * ROW_BYTES);
    hold_rows(v, m.v + warp_row * ROW_BYTES);
    pass_by(m, &at, from);
    if (from < to) {
        mbarrier_wait(m.full + 8 * at.stage, at.parity);
        clear_queries(p, m, b.len - b.k0 - from * p.n_query, at.stage, wg);
        wgmma_fence();
        dot_held_heads(s, k, m.q + at.stage * PART_BYTES);
        dot_held_heads(dp, v, m.dout + at.stage * PART_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        wgmma_use(dp);
        weigh_queries(s, dp, p, w0, b.k0 + from * p.n_query, stat + at.stage * STAT_BYTES);
        pack_rows(pw, s);
        pack_rows(dw, dp);
        for (int t = from + 1; t < to; t++) {
            const struct place now = next_place<DKV_STAGES>(at);
            mbarrier_wait(m.full + 8 * now.stage, now.parity);
            clear_queries(p, m, b.len - b.k0 - t * p.n_query, now.stage, wg);
            wgmma_fence();
            dot_held_heads(s, k, m.q + now.stage * PART_BYTES);
            dot_held_heads(dp, v, m.dout + now.stage * PART_BYTES);
            wgmma_commit();
            add_rows(dv, pw, m.dout + at.stage * PART_BYTES);
            add_rows(dk, dw, m.q + at.stage * PART_BYTES);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(s);
            wgmma_use(dp);
            weigh_queries(s, dp, p, w0, b.k0 + t * p.n_query, stat + now.stage * STAT_BYTES);
            before_wait(is_odd_one(dp));
            wgmma_wait<0>();
            wgmma_use(dk);
            wgmma_use(dv);
            wgmma_use(s);
            wgmma_use(dp);
            give_back(m.empty + 8 * at.stage);
            pack_rows(pw, s);
            pack_rows(dw, dp);
            at = now;
        }
        wgmma_fence();
        add_rows(dv, pw, m.dout + at.stage * PART_BYTES);
        add_rows(dk, dw, m.q + at.stage * PART_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(dk);
        wgmma_use(dv);
        give_back(m.empty + 8 * at.stage);
        at = next_place<DKV_STAGES>(at);
    }
    pass_by(m, &at, b.n_tile - to);

    store_keys(p, b, dk, p.a.scale, m.bytes, p.a.n_head + b.kv);
    store_keys(p, b, dv, 1.0f, m.bytes + (m.v - m.k), p.a.n_head + p.a.n_kv + b.kv);
}
#endif

static __global__ void __launch_bounds__(THREADS, 1)
    attn_dq_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct dq_barriers b;
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024;
    const struct dq_memory m = {start,
                                start + 4 * TILE_BYTES,
                                sm90_shared(b.q_full),
                                sm90_shared(b.q_empty),
                                sm90_shared(b.kv_full),
                                sm90_shared(b.kv_empty),
                                bytes + (start - sm90_shared(bytes))};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(m.q_full + 8 * i, 1);
            mbarrier_init(m.q_empty + 8 * i, GROUPS * 4);
        }
        for (int i = 0; i < DQ_STAGES; i++) {
            mbarrier_init(m.kv_full + 8 * i, 1);
            mbarrier_init(m.kv_empty + 8 * i, GROUPS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= GROUPS * 128) {
        sm90_registers_less<LOADER_REGISTERS>();
        if (threadIdx.x == GROUPS * 128) load_dq(p, m);
    } else {
        sm90_registers_more<REGISTERS>();
        multiply_dq(p, m);
    }
#else
    __trap(); /* cuda.hopper is true only where this is code of sm_90a */
#endif
}

static __global__ void __launch_bounds__(THREADS, 1)
    attn_dkv_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ uint64_t kv_full, full[DKV_STAGES], empty[DKV_STAGES];
    const struct seq_block seq = find_block(p.a, blockIdx.x / p.a.n_kv, ROWS);
    if (seq.block >= seq.n_block) return;
    struct key_block b; /* the first keys are seen by the most queries, and come first */
    b.first = seq.first;
    b.len = seq.len;
    b.kv = blockIdx.x % p.a.n_kv;
    b.k0 = seq.block * ROWS;
    b.n_tile = (min(seq.len, b.k0 + ROWS - 1 + p.a.window) - b.k0 + p.n_query - 1) / p.n_query;

    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024, parts = start + 2 * TILE_BYTES;
    const struct dkv_memory m = {start,
                                 start + TILE_BYTES,
                                 parts,
                                 parts + DKV_STAGES * PART_BYTES,
                                 parts + DKV_STAGES * 2 * PART_BYTES,
                                 sm90_shared(&kv_full),
                                 sm90_shared(full),
                                 sm90_shared(empty),
                                 bytes + (start - sm90_shared(bytes))};
    if (threadIdx.x == 0) {
        mbarrier_init(m.kv_full, 1);
        for (int i = 0; i < DKV_STAGES; i++) {
            mbarrier_init(m.full + 8 * i, 1 + 32);
            mbarrier_init(m.empty + 8 * i, GROUPS * 4);
        }
        mbarrier_init_fence();
    }
    /* rows of a stage that no query is copied to have weight 0 times 0 */
    if (p.n_query * p.group < DKV_QUERIES) {
        for (int i = threadIdx.x; i < DKV_STAGES * 2 * PART_BYTES / 16; i += THREADS)
            ((uint4 *)(m.bytes + 2 * TILE_BYTES))[i] = make_uint4(0, 0, 0, 0);
        for (int i = threadIdx.x; i < DKV_STAGES * DKV_QUERIES; i += THREADS)
            ((float2 *)(m.bytes + (m.stat - m.k)))[i] = make_float2(INFINITY, 0.0f);
        fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x >= GROUPS * 128) {
        sm90_registers_less<LOADER_REGISTERS>();
        if (threadIdx.x < GROUPS * 128 + 32) load_dkv(p, m, b);
    } else {
        sm90_registers_more<REGISTERS>();
        multiply_dkv(p, m, b);
    }
#else
    __trap(); /* cuda.hopper is true only where this is code of sm_90a */
#endif
}

void attn_bwd_wgmma(const struct attn_args *a)
{
    static bool ready;
    const struct attn_wgmma_args dq = wgmma_args_of(a, ROWS, KEYS), dkv = wgmma_args_of(a, DKV_QUERIES, 64);
    if (!ready) {
        const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
        CUDA_CHECK(cudaFuncSetAttribute(attn_dkv_wgmma_kernel, limit, DKV_BYTES));
        CUDA_CHECK(cudaFuncSetAttribute(attn_dq_wgmma_kernel, limit, DQ_BYTES));
    }
    ready = true;
    attn_dkv_wgmma_kernel<<<attn_grid(a, ROWS, a->n_kv), THREADS, DKV_BYTES, cuda.stream>>>(dkv);
    CUDA_CHECK_LAUNCH();
    attn_dq_wgmma_kernel<<<(unsigned)MT_MIN(dq.n_item, cuda.n_sm), THREADS, DQ_BYTES, cuda.stream>>>(dq);
    CUDA_CHECK_LAUNCH();
}
