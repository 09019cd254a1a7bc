/* attn_wgmma_bwd.cu - attention backward on Hopper, heads of 64: the function of attn_bwd.cu with wgmma and TMA.
 *
 * Math: as attn_bwd.cu, with seven products: the dkv kernel computes p and ds, and the dq kernel computes them again.
 *   One kernel would need five products, but also dq in f32 in global memory and a fixed order of additions to it.
 * Shapes: as attn_bwd.cu; stat [K, T, H/K] and one entry more.
 * Needs: sm_90a, A 64, at most 64 query heads to a kv head, rows aligned to 16 bytes.
 * Grid: in both kernels two consumer warpgroups of 64 rows each and one producer warpgroup. 168 registers at launch,
 *   then 240 for consumers (dkv uses 227, dq 177) and 24 for the producer; no spills. dkv: one block per 128 keys of
 *   a sequence and kv head. k and v are A operands in registers. The queries of all heads of the group are loaded in
 *   stages of 64 rows; eight stages; 165 KiB. dq: persistent, one block per SM. It processes tiles of 128 rows (16
 *   queries of a group of 8), as the forward does. Keys and values are loaded in tiles of 96; six stages; 209 KiB.
 * Moves: as attn_bwd.cu; dkv reads 16 KiB from L2 for 128 x 64 scores, dq 24 KiB for 128 x 96.
 * Bound, in clocks per SM: dkv, 64 rows by 128 keys: wgmma 1024, 2^x 512, issue 670 per scheduler. dq, 96 keys by 128
 *   rows: 1152, 768, 714. So the tensor cores are the bound if the arithmetic of one warpgroup overlaps with the
 *   products of the other.
 * Numerics: as attn_bwd.cu. NaN and infinity stay in their sequence: rows beyond the end of a sequence are cleared
 *   before the products read them (keys and values for dq, queries and dout for dk and dv).
 * Source: FlashAttention-2 and -3, arXiv 2307.08691, 2407.08608.
 *
 * In both loops every product is complete at the end of an iteration. The compiler preserves the registers of an A
 * operand only up to a wait in the same iteration; otherwise it reuses them while the product still reads them.
 * Measured: H100 80GB HBM3, commit 4b2b765, T 16384, H 64, K 8: S 4096 3.39 ms, 405 TFLOP/s of 5 products
 *   (inside a step 3.88 ms, 354); S 8192 6.81 ms, 404; window 128 0.60 ms. The portable kernels: 5.34, 10.5, 0.80 ms.
 *   H200, inside a step of gpt-oss-20b, one run: S 4096 4.20 ms at commit 14931fb, 4.41 ms at 34f68cb, which clears the
 *   rows beyond a sequence; window 128 0.668 and 0.695 ms. A lower clock explains 2 % of this: the cuBLAS products of
 *   the run slowed down by as much.
 * Tried and dropped: masking the products with dout too (11 % slower: the accumulators change inside a branch);
 *   warpgroups in turns, as in the forward (H200, inside a step, S 4096: 4.27 instead of 4.25 ms; window 128: 0.72
 *   instead of 0.68). */
#include "kernels/cuda/attn_wgmma.cuh"

enum {
    HEAD = 64,
    KEYS = 96, /* keys of a tile of dq */
    KEY_BYTES = KEYS * ROW_BYTES,
    GROUPS = 2, /* consumer warpgroups, 64 rows each */
    ROWS = GROUPS * 64,
    THREADS = GROUPS * 128 + LOADER,
    LOADER_REGISTERS = 24, /* 24 + 2 * 240 <= 512, the SM's registers per 128 threads */
    REGISTERS = 240,
    TILE_BYTES = ROWS * ROW_BYTES,

    DQ_STAGES = 6,                                                /* of keys and values; queries and dout have two */
    DQ_BYTES = 4 * TILE_BYTES + DQ_STAGES * 2 * KEY_BYTES + 1024, /* 1024: alignment */

    DKV_QUERIES = 64, /* rows (queries of all heads of the group) of a stage: q, dout, stat */
    DKV_STAGES = 8,
    PART_BYTES = DKV_QUERIES * ROW_BYTES,
    STAT_BYTES = DKV_QUERIES * (int)sizeof(float2),
    DKV_BYTES = 2 * TILE_BYTES + DKV_STAGES * (2 * PART_BYTES + STAT_BYTES) + 1024
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dq: a tile of queries loops over its keys, as in the forward */

struct dq_barriers {
    uint64_t q_full[2], q_empty[2], kv_full[DQ_STAGES], kv_empty[DQ_STAGES];
};
/* Shared-memory addresses. A stage of q holds queries, then dout; a stage of kv holds keys, then values. */
struct dq_memory {
    uint32_t q, kv, q_full, q_empty, kv_full, kv_empty;
    char *q_bytes; /* generic address of q */
};

static __device__ __forceinline__ void load_dq(const struct attn_wgmma_args &p, const struct dq_memory &m)
{
    struct stage_at q = {0, 0}, kv = {0, 0};
    const int rounds = n_round(p);
    for (int round = 0; round < rounds; round++) {
        struct item item;
        if (!item_at<KEYS>(&item, p, round)) continue;
        const int row = (int)item.first + item.q0, head = item.kv * p.group;
        const uint32_t to = m.q + q.stage * 2 * TILE_BYTES, bar = m.q_full + 8 * q.stage;
        mbarrier_wait(m.q_empty + 8 * q.stage, q.parity ^ 1);
        mbarrier_arrive_expect(bar, 2 * p.n_query * p.group * ROW_BYTES);
        tma_load(to, &p.q, bar, 0, head, row);
        tma_load(to + TILE_BYTES, &p.dout, bar, 0, head, row);
        q = next_stage<2>(q);
        for (int t = 0; t < item.n_tile; t++) {
            const int key = (int)item.first + item.begin + t * KEYS;
            const uint32_t k = m.kv + kv.stage * 2 * KEY_BYTES, kv_bar = m.kv_full + 8 * kv.stage;
            mbarrier_wait(m.kv_empty + 8 * kv.stage, kv.parity ^ 1);
            mbarrier_arrive_expect(kv_bar, 2 * KEY_BYTES);
            tma_load(k, &p.k, kv_bar, 0, item.kv, key);
            tma_load(k + KEY_BYTES, &p.v, kv_bar, 0, item.kv, key);
            kv = next_stage<DQ_STAGES>(kv);
        }
    }
}

/* Queries relative to the first of the tile: those of this thread's two rows, with their stat; and the range of queries
 * of its warpgroup. */
struct dq_rows {
    int query[2], first, n_query;
    float2 stat[2];
};

/* dp = ds, from the scores s of the keys from k0 on and dp = dout v^T. */
static __device__ __forceinline__ void weigh_keys(float (&s)[KEYS / 2], float (&dp)[KEYS / 2], const struct dq_rows &x,
                                                  int q0, int k0, const struct attn_args &a)
{
    if (!none_masked(q0 + x.first, x.n_query, k0, KEYS, a.window)) {
        const int corner = q0 - k0 - threadIdx.x % 4 * 2;
        const int d[2] = {corner + x.query[0], corner + x.query[1]};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (!attends_to(d, i, a.window)) s[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        const float2 y = x.stat[i / 2 % 2];
        dp[i] = exp2_fast(s[i] * a.scale_log2 - y.x) * (dp[i] - y.y);
    }
}

/* Clears the keys and values of the item's tile t that are beyond the end of the sequence. */
static __device__ __forceinline__ void clear_keys(const struct dq_memory &m, const struct item &item, int t, int stage,
                                                  int wg)
{
    const int live = item.len - item.begin - t * KEYS;
    char *tile = m.q_bytes + (m.kv - m.q) + stage * 2 * KEY_BYTES;
    if (live >= KEYS) return;
    clear_rows<HEAD, KEYS>(tile, live);
    clear_rows<HEAD, KEYS>(tile + KEY_BYTES, live);
    rows_cleared(WHOLE + wg);
}

/* As in the forward, the computation of a tile's ds overlaps with the product of the previous tile's ds and keys. */
static __device__ __forceinline__ void multiply_dq(const struct attn_wgmma_args &p, const struct dq_memory &m)
{
    const int wg = warpgroup_index(), warp_row = threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;
    const int rounds = n_round(p);
    struct dq_rows x;
    x.first = query_of(wg * 64, p.inverse);
    x.n_query = query_of(wg * 64 + 63, p.inverse) - x.first + 1;
    x.query[0] = query_of(row, p.inverse);
    x.query[1] = query_of(row + 8, p.inverse);
    struct stage_at q = {0, 0}, kv = {0, 0};
    for (int round = 0; round < rounds; round++) {
        struct item item;
        if (!item_at<KEYS>(&item, p, round)) continue;
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
        dot_heads<HEAD, ROWS>(s, q_rows, m.kv + kv.stage * 2 * KEY_BYTES);
        dot_heads<HEAD, ROWS>(dp, q_rows + TILE_BYTES, m.kv + kv.stage * 2 * KEY_BYTES + KEY_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        wgmma_use(dp);
        weigh_keys(s, dp, x, item.q0, item.begin, p.a);
        pack_rows(w, dp);
        for (int t = 1; t < item.n_tile; t++) {
            const struct stage_at now = next_stage<DQ_STAGES>(kv);
            mbarrier_wait(m.kv_full + 8 * now.stage, now.parity);
            clear_keys(m, item, t, now.stage, wg);
            wgmma_fence();
            dot_heads<HEAD, ROWS>(s, q_rows, m.kv + now.stage * 2 * KEY_BYTES);
            dot_heads<HEAD, ROWS>(dp, q_rows + TILE_BYTES, m.kv + now.stage * 2 * KEY_BYTES + KEY_BYTES);
            wgmma_commit();
            add_rows(dq, w, m.kv + kv.stage * 2 * KEY_BYTES);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(s);
            wgmma_use(dp);
            weigh_keys(s, dp, x, item.q0, item.begin + t * KEYS, p.a);
            before_wait(practically_never(dp));
            wgmma_wait<0>();
            wgmma_use(dq);
            wgmma_use(dp);
            release_stage(m.kv_empty + 8 * kv.stage);
            pack_rows(w, dp);
            kv = now;
        }
        wgmma_fence();
        add_rows(dq, w, m.kv + kv.stage * 2 * KEY_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(dq);
        release_stage(m.kv_empty + 8 * kv.stage);
        kv = next_stage<DQ_STAGES>(kv);

        const float factor[2] = {p.a.scale, p.a.scale};
        char *rows = m.q_bytes + q.stage * 2 * TILE_BYTES + warp_row * ROW_BYTES;
        named_sync(WHOLE + wg, 128); /* the products that read these queries are complete */
        stage_rows<ROWS>(rows, dq, factor);
        store_queries<HEAD, ROWS>(p.a.dqkv + t0 * p.a.ld_dqkv + item.kv * p.group * HEAD, p.a.ld_dqkv, rows, warp_row,
                                  p, n_live);
        fence_proxy_async(); /* before TMA writes there again */
        release_stage(m.q_empty + 8 * q.stage);
        q = next_stage<2>(q);
    }
}

/* ---- dk, dv: 128 keys of a kv head stay in registers; the loop is over the queries of all heads of the group */

/* Shared-memory addresses. Stage i begins i * PART_BYTES after q and dout, and i * STAT_BYTES after stat. */
struct dkv_memory {
    uint32_t k, v, q, dout, stat, kv_full, full, empty;
    char *bytes; /* generic address of k */
};
/* Keys from k0 on, and the queries that attend to them: n_tile tiles from query k0 on. */
struct key_block {
    int64_t first;
    int len, kv, k0, n_tile;
};

/* One warp: TMA loads q and dout, the lanes load stat. Queries beyond the end of the sequence get the last entry of
 * stat, which makes all their weights 0. */
static __device__ __forceinline__ void load_dkv(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                const struct key_block &b)
{
    const int lane = threadIdx.x % 32, row = (int)b.first + b.k0;
    const int n_row = p.n_query * p.group;
    const float2 *stat = p.a.stat + (b.kv * (int64_t)p.a.n_tok + b.first) * p.group;
    const float2 *masked_stat = p.a.stat + (int64_t)p.a.n_head * p.a.n_tok;
    if (lane == 0) {
        mbarrier_arrive_expect(m.kv_full, 2 * TILE_BYTES);
        for (int half = 0; half < ROWS; half += 64) {
            tma_load(m.k + half * ROW_BYTES, &p.k, m.kv_full, 0, b.kv, row + half);
            tma_load(m.v + half * ROW_BYTES, &p.v, m.kv_full, 0, b.kv, row + half);
        }
    }
    struct stage_at at = {0, 0};
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
            const float2 *from = live ? stat + (int64_t)q0 * p.group + i : masked_stat;
            asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(m.stat + at.stage * STAT_BYTES + i * 8),
                         "l"(from)
                         : "memory");
        }
        cp_async_arrive(full);
        at = next_stage<DKV_STAGES>(at);
    }
}

/* Loads the A operand: this warp's 16 rows of a tile, all elements of a head. */
static __device__ __forceinline__ void load_operand(uint32_t (&a)[HEAD / 16][4], uint32_t tile)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) load_matrix4(a[k], tile + sm90_swizzle(lane % 16, 2 * k + lane / 16));
}

/* Clears all but the first `live` queries, and their dout, of a tile. */
static __device__ __forceinline__ void clear_queries(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                     int live, int stage, int wg)
{
    if (live >= p.n_query) return;
    clear_rows<HEAD, DKV_QUERIES>(m.bytes + (m.q - m.k) + stage * PART_BYTES, live * p.group);
    clear_rows<HEAD, DKV_QUERIES>(m.bytes + (m.dout - m.k) + stage * PART_BYTES, live * p.group);
    rows_cleared(WHOLE + wg);
}

/* s [keys, queries], scores of the keys from w0 on and the queries from q0 on, become weights; dp becomes ds. */
static __device__ __forceinline__ void weigh_queries(float (&s)[32], float (&dp)[32], const struct attn_wgmma_args &p,
                                                     int w0, int q0, const char *stat)
{
    const int key = w0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (!none_masked(q0, p.n_query, w0, 64, p.a.window)) mask_queries(s, q0 - key, p.inverse, p.a.window);
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

/* Waits for and releases n tiles that this warpgroup does not need. */
static __device__ __forceinline__ void skip_tiles(const struct dkv_memory &m, struct stage_at *at, int n)
{
    for (int i = 0; i < n; i++) {
        mbarrier_wait(m.full + 8 * at->stage, at->parity);
        release_stage(m.empty + 8 * at->stage);
        *at = next_stage<DKV_STAGES>(*at);
    }
}

static __device__ __forceinline__ void store_sums(const struct attn_wgmma_args &p, const struct key_block &b,
                                                  const float (&sum)[32], float scale, char *tile, int head)
{
    const int warp_row = threadIdx.x / 32 * 16, key = b.k0 + warp_row;
    const float factor[2] = {scale, scale};
    stage_rows<ROWS>(tile + warp_row * ROW_BYTES, sum, factor);
    store_keys<HEAD, ROWS>(p.a.dqkv + (b.first + key) * p.a.ld_dqkv + head * HEAD, p.a.ld_dqkv,
                           tile + warp_row * ROW_BYTES, b.len - key);
}

/* Products are transposed, [keys, queries]: the weights are then in the layout of the A operand of the sums over
 * queries. */
static __device__ __forceinline__ void multiply_dkv(const struct attn_wgmma_args &p, const struct dkv_memory &m,
                                                    const struct key_block &b)
{
    const int wg = warpgroup_index(), warp_row = threadIdx.x / 32 * 16, w0 = b.k0 + wg * 64; /* keys w0 .. w0+63 */
    const int end = min(b.len, w0 + 63 + p.a.window); /* queries w0 .. end-1 attend to them */
    const int from = min(wg * 64 / p.n_query, b.n_tile);
    const int to = w0 < b.len ? (end - b.k0 + p.n_query - 1) / p.n_query : from;
    const char *stat = m.bytes + (m.stat - m.k);
    uint32_t k[HEAD / 16][4], v[HEAD / 16][4], pw[DKV_QUERIES / 16][4], dw[DKV_QUERIES / 16][4];
    float s[32], dp[32], dk[32] = {}, dv[32] = {};
    struct stage_at at = {0, 0};

    mbarrier_wait(m.kv_full, 0);
    load_operand(k, m.k + warp_row * ROW_BYTES);
    load_operand(v, m.v + warp_row * ROW_BYTES);
    skip_tiles(m, &at, from);
    if (from < to) {
        mbarrier_wait(m.full + 8 * at.stage, at.parity);
        clear_queries(p, m, b.len - b.k0 - from * p.n_query, at.stage, wg);
        wgmma_fence();
        dot_register_heads(s, k, m.q + at.stage * PART_BYTES);
        dot_register_heads(dp, v, m.dout + at.stage * PART_BYTES);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(s);
        wgmma_use(dp);
        weigh_queries(s, dp, p, w0, b.k0 + from * p.n_query, stat + at.stage * STAT_BYTES);
        pack_rows(pw, s);
        pack_rows(dw, dp);
        for (int t = from + 1; t < to; t++) {
            const struct stage_at now = next_stage<DKV_STAGES>(at);
            mbarrier_wait(m.full + 8 * now.stage, now.parity);
            clear_queries(p, m, b.len - b.k0 - t * p.n_query, now.stage, wg);
            wgmma_fence();
            dot_register_heads(s, k, m.q + now.stage * PART_BYTES);
            dot_register_heads(dp, v, m.dout + now.stage * PART_BYTES);
            wgmma_commit();
            add_rows(dv, pw, m.dout + at.stage * PART_BYTES);
            add_rows(dk, dw, m.q + at.stage * PART_BYTES);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_use(s);
            wgmma_use(dp);
            weigh_queries(s, dp, p, w0, b.k0 + t * p.n_query, stat + now.stage * STAT_BYTES);
            before_wait(practically_never(dp));
            wgmma_wait<0>();
            wgmma_use(dk);
            wgmma_use(dv);
            wgmma_use(s);
            wgmma_use(dp);
            release_stage(m.empty + 8 * at.stage);
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
        release_stage(m.empty + 8 * at.stage);
        at = next_stage<DKV_STAGES>(at);
    }
    skip_tiles(m, &at, b.n_tile - to);

    store_sums(p, b, dk, p.a.scale, m.bytes, p.a.n_head + b.kv);
    store_sums(p, b, dv, 1.0f, m.bytes + (m.v - m.k), p.a.n_head + p.a.n_kv + b.kv);
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
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

static __global__ void __launch_bounds__(THREADS, 1)
    attn_dkv_wgmma_kernel(const __grid_constant__ struct attn_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ uint64_t kv_full, full[DKV_STAGES], empty[DKV_STAGES];
    const struct slot at = slot_at(p, blockIdx.x, gridDim.x);
    const struct seq_block seq = find_block(p.a, at.slot, ROWS);
    if (seq.block >= seq.n_block) return;
    struct key_block b; /* the first keys have the most queries, and come first */
    b.first = seq.first;
    b.len = seq.len;
    b.kv = at.kv;
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
    /* The rows of a stage that TMA does not fill: zeros, and a stat that makes their weights 0. */
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
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

void attn_bwd_wgmma_64(const struct attn_args *a)
{
    const struct attn_wgmma_args dq = wgmma_args_of(a, ROWS, KEYS), dkv = wgmma_args_of(a, DKV_QUERIES, 64);
    allow_shared<attn_dkv_wgmma_kernel>(DKV_BYTES);
    allow_shared<attn_dq_wgmma_kernel>(DQ_BYTES);
    attn_dkv_wgmma_kernel<<<attn_grid(a, ROWS, a->n_kv), THREADS, DKV_BYTES, cuda.stream>>>(dkv);
    CUDA_CHECK_LAUNCH();
    attn_dq_wgmma_kernel<<<(unsigned)MT_MIN(dq.n_item, cuda.n_sm), THREADS, DQ_BYTES, cuda.stream>>>(dq);
    CUDA_CHECK_LAUNCH();
}
