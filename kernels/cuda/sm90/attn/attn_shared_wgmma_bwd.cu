/* attn_shared_wgmma_bwd.cu - attention with shared keys on Hopper: backward. Groups of 64 heads of 512 columns.
 *
 * Math, shapes: as attn_shared.cu. The tokens are processed in chunks whose weights fit into scratch:
 *   dq: a block per token and 64 heads computes p, ds and dq, and stores p and ds, transposed: 64 heads per key.
 *   dkey: a block per item: 192 rows of kv or of the entries, 32 tokens and 256 columns: p^T dout + ds^T q, in f32.
 *   sum: adds the items of a row in the order of the tokens; the sums become bf16 when no later token sees the row.
 * Scratch: struct shared_chunk: p, ds and the items of a chunk, up to 1.25 GiB.
 * Grid, dq: a block per SM, which takes a token and 64 heads at a time. Of the third warpgroup, with 24 registers per
 *   thread, two warps copy heads and tiles of 32 keys into four slots, up to the next token's; two store p and ds,
 *   which have two stages. 225 KiB. The first warpgroup computes the scores and p, the second dp and ds, then each 256
 *   columns of dq. The first holds 192 columns of q in registers, the second 192 columns of dout. The products of the
 *   scores and dp of the next tile are issued before dq of this one.
 * Grid, dkey: three warpgroups of 64 rows; 3 stages of 56 KiB: weights of 64 heads for 192 rows, and 256 columns of
 *   dout or q of these heads, which TMA loads. The 192 rows hold all keys in the window of 32 tokens. Tokens that see
 *   none of the rows are left out.
 * Bound: dq per tile: wgmma of 32 columns, 1450 clocks for both warpgroups as measured on an H200 (23 per instruction;
 *   the full rate is 16), and of 256 columns, 550; without entries, memory: 256 KiB per token. dkey per stage: wgmma
 *   1536 clocks; L2, 56 KiB, 18 bytes per clock.
 * Numerics: f32 sums; p and ds rounded to bf16. */
#include <type_traits>

#include "kernels/cuda/sm90/attn/attn_shared_wgmma.cuh"

enum {
    SHARED_KEYS = 32, /* of a tile of dq */
    TILE_BYTES = SHARED_KEYS * SHARED_DIM * 2,
    TILE_PANEL = SHARED_KEYS * PANEL_ROW,
    SLOTS = 4,
    HELD = 12,                   /* operands of heads in registers: 16 columns each, the last 192 of the 512 */
    FIRST_PANELS = 8 - HELD / 4, /* of heads, the rest: they stay in shared memory */
    FIRST_BYTES = FIRST_PANELS * HEAD_PANEL,
    LAST_BYTES = HELD / 4 * HEAD_PANEL,
    WEIGHT_BYTES = SHARED_KEYS * SHARED_HEADS * 2,
    WEIGHT_STAGES = 2,
    SLOTS_AT = 2 * FIRST_BYTES,
    WEIGHTS_AT = SLOTS_AT + SLOTS * TILE_BYTES,
    DQ_BYTES = WEIGHTS_AT + WEIGHT_STAGES * 2 * WEIGHT_BYTES + 1024,
    COPIERS = 2, /* warps of the third warpgroup that copy; the other two store weights */
    MORE = 240,  /* registers of a thread that computes, and of one that loads */
    LESS = 24,

    TRIPLE = 384, /* threads of dkey: a warpgroup per 64 rows */
    STAGES = 3,
    LEFT_BYTES = SHARED_BLOCK * PANEL_ROW,
    RIGHT_BYTES = SHARED_HEADS * SHARED_COLUMNS * 2,
    STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES,
    MAP_BYTES = SHARED_TOKENS * SHARED_BLOCK * 4,
    DKEY_BYTES = STAGES * STAGE_BYTES + MAP_BYTES + 1024
};

static_assert((int)LAST_BYTES <= (int)TILE_BYTES, "a slot holds a tile, or the last columns of q or dout");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dq */

/* mbarriers of dq: FULL, EMPTY of a slot; HEADS: the first columns of q and dout have arrived; FREE: they are no longer
 * needed; WRITTEN, STORED: of weights of kind 0 (p) and 1 (ds), each for WEIGHT_STAGES stages. */
enum {
    FULL,
    EMPTY = FULL + SLOTS,
    HEADS = EMPTY + SLOTS,
    FREE,
    WRITTEN,
    STORED = WRITTEN + 2 * WEIGHT_STAGES,
    DQ_BARRIERS = STORED + 2 * WEIGHT_STAGES
};
/* Named barriers of dq: ONE_GROUP and the next for each computing warpgroup, BOTH_GROUPS for both; P_READY + w and
 * DS_READY + w for warp w of both. */
enum { ONE_GROUP = 1, BOTH_GROUPS = 3, P_READY = 4, DS_READY = 8 };

/* Shared memory of a block of dq: the first columns of q and of dout, the slots, the weights. The slots are a ring: for
 * each token the last columns of q, those of dout, then the tiles; `place` counts over all tokens. */
struct dq_room {
    char *smem;
    uint32_t base, bars; /* addresses of smem and of the mbarriers */
    int *n_key;          /* of the token whose heads have arrived */

    __device__ uint32_t bar(int i) const { return bars + 8 * i; }
    __device__ int slot_at(uint32_t place) const { return SLOTS_AT + place % SLOTS * TILE_BYTES; }
    __device__ uint32_t slot(uint32_t place) const { return base + slot_at(place); }
    __device__ uint32_t full(uint32_t place) const { return bar(FULL + place % SLOTS); }
    __device__ uint32_t empty(uint32_t place) const { return bar(EMPTY + place % SLOTS); }
    __device__ void wait_full(uint32_t place) const { mbarrier_wait(full(place), place / SLOTS & 1); }
    __device__ void wait_empty(uint32_t place) const { mbarrier_wait(empty(place), (place / SLOTS & 1) ^ 1); }
    /* tile: counts the tiles of all tokens */
    __device__ int weights_at(int kind, uint32_t tile) const
    {
        return WEIGHTS_AT + (tile % WEIGHT_STAGES * 2 + kind) * WEIGHT_BYTES;
    }
    __device__ uint32_t written(int kind, uint32_t tile) const
    {
        return bar(WRITTEN + tile % WEIGHT_STAGES * 2 + kind);
    }
    __device__ uint32_t stored(int kind, uint32_t tile) const { return bar(STORED + tile % WEIGHT_STAGES * 2 + kind); }
};
/* What a block of dq computes at a time: a token and 64 heads. The last token, which sees the most keys, is first. */
struct dq_job {
    int t, head0;
    int64_t slots; /* where its weights are in scratch */
};
static __device__ __forceinline__ int count_jobs(const struct shared_args &a, const struct shared_chunk &x)
{
    return x.n * (a.n_head / SHARED_HEADS);
}
static __device__ __forceinline__ struct dq_job dq_job_of(const struct shared_args &a, const struct shared_chunk &x,
                                                          int job)
{
    const int n_group = a.n_head / SHARED_HEADS, at = x.n - 1 - job / n_group, group = job % n_group;
    return {x.first + at, group * SHARED_HEADS, ((int64_t)at * n_group + group) * x.n_slot * SHARED_HEADS};
}

/* The last columns of a warp's 16 heads: A operands. tile: these columns of 64 heads. */
static __device__ __forceinline__ void load_heads(uint32_t (&x)[HELD][4], uint32_t tile)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HELD; k++)
        load_matrix4(x[k], tile + k / 4 * HEAD_PANEL + sm90_swizzle(row, k % 4 * 2 + lane / 16));
}

/* s [64 heads, 32 keys] = rows of heads times keys. heads: the first columns, in shared memory; held: the last ones. */
static __device__ __forceinline__ void dot_tile(float (&s)[16], uint32_t heads, const uint32_t (&held)[HELD][4],
                                                uint32_t tile)
{
    uint32_t a = low_word(heads, 16), b = low_word(tile, 16);
    asm volatile("" : "+r"(a)); /* otherwise the descriptors of heads stay in registers, which spill */
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4 * FIRST_PANELS; k++)
        wgmma_32(s, descriptor_at(a, k / 4 * HEAD_PANEL + k % 4 * 32),
                 descriptor_at(b, k / 4 * TILE_PANEL + k % 4 * 32), k > 0);
#pragma unroll
    for (int k = 0; k < HELD; k++)
        wgmma_32(s, held[k], descriptor_at(b, (FIRST_PANELS + k / 4) * TILE_PANEL + k % 4 * 32));
}

/* Stores weights transposed: row k of `to` has the 64 heads of key k. */
static __device__ __forceinline__ void put_transposed(uint32_t to, const uint32_t (&w)[8])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, matrix = lane / 8;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const uint32_t at = to + sm90_swizzle(8 * (n + matrix / 2) + lane % 8, warp * 2 + matrix % 2);
        store_matrix4<true>(at, w + 2 * n);
    }
}
static __device__ __forceinline__ void get_transposed(uint32_t (&w)[8], uint32_t from)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, matrix = lane / 8;
#pragma unroll
    for (int n = 0; n < 4; n += 2)
        load_matrix4_trans(w + 2 * n, from + sm90_swizzle(8 * (n + matrix / 2) + lane % 8, warp * 2 + matrix % 2));
}

/* o of 8 heads per warp. */
static __device__ __forceinline__ void load_outputs(uint4 (&x)[16], const bf16 *o)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = load16(o + (warp * 8 + i / 2) * SHARED_DIM + i % 2 * 256 + lane * 8);
}
/* delta = <dout, o> of these heads. dout, last: the first and the last columns of dout. */
static __device__ __forceinline__ void put_delta(float *delta, const uint4 (&x)[16], const char *dout, const char *last)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const char *from[2]; /* the panels of this lane's columns */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int panel = 4 * i + lane / 8;
        from[i] = panel < FIRST_PANELS ? dout + panel * HEAD_PANEL : last + (panel - FIRST_PANELS) * HEAD_PANEL;
    }
#pragma unroll
    for (int h = 0; h < 8; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float u[8], v[8];
            unpack8(u, x[2 * h + i]);
            unpack8(v, load16(from[i] + sm90_swizzle(warp * 8 + h, lane % 8)));
#pragma unroll
            for (int e = 0; e < 8; e++) sum += u[e] * v[e];
        }
        sum = warp_sum(sum);
        if (lane == 0) delta[warp * 8 + h] = sum;
    }
}

/* p of this thread's scores, as bf16: w[2n], w[2n + 1] are rows g and g + 8 of keys 8n + 2q, +1. */
static __device__ __forceinline__ void weigh_scores(uint32_t (&w)[8], const float (&s)[16], const float lse[2], float c,
                                                    int live)
{
#pragma unroll
    for (int i = 0; i < 16; i += 2)
        w[i / 2] = pack2(exp2_approx(s[i] * c - lse[i / 2 % 2]), exp2_approx(s[i + 1] * c - lse[i / 2 % 2]));
    if (live >= SHARED_KEYS) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int k = 8 * (i / 2) + threadIdx.x % 4 * 2;
        w[i] &= (k < live ? 0xffffu : 0) | (k + 1 < live ? 0xffff0000u : 0);
    }
}
/* ds = scale p (dp - delta), in place of p. */
static __device__ __forceinline__ void weigh_gradients(uint32_t (&w)[8], const float (&dp)[16], const float delta[2],
                                                       float scale)
{
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float low = __uint_as_float(w[i / 2] << 16), high = __uint_as_float(w[i / 2] & 0xffff0000u);
        w[i / 2] = pack2(low * scale * (dp[i] - delta[i / 2 % 2]), high * scale * (dp[i + 1] - delta[i / 2 % 2]));
    }
}

/* Copies the first `live` keys of transposed weights to scratch. A warp calls it. */
static __device__ __forceinline__ void store_weights(bf16 *to, const char *from, int live)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int k = lane / 8; k < SHARED_KEYS; k += 4)
        if (k < live) store16(to + k * SHARED_HEADS + lane % 8 * 8, load16(from + sm90_swizzle(k, lane % 8)));
}
static __device__ __forceinline__ void store_jobs(const struct dq_room &m, const struct shared_args &a,
                                                  const struct shared_chunk &x, int kind)
{
    const int n_job = count_jobs(a, x);
    uint32_t tile = 0, turn = 0;
    for (int job = blockIdx.x; job < n_job; job += gridDim.x, turn++) {
        bf16 *to = (kind ? x.ds : x.p) + dq_job_of(a, x, job).slots;
        mbarrier_wait(m.bar(HEADS), turn & 1);
        const int n = *m.n_key;
        arrive_warp(m.bar(FREE));
        for (int k0 = 0; k0 < n; k0 += SHARED_KEYS, tile++) {
            mbarrier_wait(m.written(kind, tile), tile / WEIGHT_STAGES & 1);
            store_weights(to + (int64_t)k0 * SHARED_HEADS, m.smem + m.weights_at(kind, tile), n - k0);
            arrive_warp(m.stored(kind, tile));
        }
    }
}

/* One thread loads the first columns of a job's heads, and passes on its number of keys n. */
static __device__ __forceinline__ void load_first(const struct dq_room &m, const CUtensorMap *q,
                                                  const CUtensorMap *dout, const struct dq_job &j, int n)
{
    *m.n_key = n;
    mbarrier_arrive_expect(m.bar(HEADS), 2 * FIRST_BYTES);
    load_panels(m.base, m.bar(HEADS), q, 0, FIRST_PANELS, j.head0, j.t);
    load_panels(m.base + FIRST_BYTES, m.bar(HEADS), dout, 0, FIRST_PANELS, j.head0, j.t);
}
/* COPIERS warps, of which this is `warp`: load the heads and copy the tiles of all jobs. */
static __device__ __forceinline__ void copy_jobs(const struct dq_room &m, const struct shared_args &a,
                                                 const struct shared_chunk &x, const CUtensorMap *q,
                                                 const CUtensorMap *dout, int warp)
{
    const int n_job = count_jobs(a, x);
    const bool first = threadIdx.x == PAIR;
    uint32_t place = 0, turn = 0;
    for (int job = blockIdx.x; job < n_job; job += gridDim.x, turn++) {
        const struct dq_job j = dq_job_of(a, x, job);
        const struct sight sight = sight_of(a, j.t);
        const int n = count_keys(a, sight);
        for (int i = 0; i < 2; i++, place++) {
            m.wait_empty(place);
            if (first) {
                mbarrier_arrive_expect(m.full(place), LAST_BYTES);
                load_panels(m.slot(place), m.full(place), i ? dout : q, FIRST_PANELS, 8, j.head0, j.t);
            } else {
                mbarrier_arrive(m.full(place));
            }
        }
        if (first) {
            mbarrier_wait(m.bar(FREE), (turn & 1) ^ 1);
            load_first(m, q, dout, j, n);
        }
        __syncwarp();
        for (int k0 = 0; k0 < n; k0 += SHARED_KEYS, place++) {
            const bf16 *found = find_key<SHARED_KEYS, COPIERS>(a, sight, k0, n, warp);
            m.wait_empty(place);
            copy_keys<SHARED_KEYS, COPIERS>(m.slot(place), found, k0, n, warp);
            cp_async_arrive(m.full(place));
        }
    }
}

/* Two warpgroups: the first computes scores and p, the second dp and ds, each 256 columns of dq. */
static __device__ __forceinline__ void compute_jobs(const struct dq_room &m, const struct shared_args &a,
                                                    const struct shared_chunk &x, float *deltas)
{
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32;
    const int row = warp * 16 + threadIdx.x % 32 / 4, n_job = count_jobs(a, x);
    const uint32_t heads = m.base + wg * FIRST_BYTES;
    uint4 o[16];
    const auto load_o = [&](int job) {
        const struct dq_job j = dq_job_of(a, x, job);
        load_outputs(o, a.o + j.t * a.ld_o + (int64_t)j.head0 * SHARED_DIM);
    };
    load_o(blockIdx.x);
    uint32_t place = 0, tile = 0, turn = 0; /* tile: of all tokens */
    for (int job = blockIdx.x; job < n_job; job += gridDim.x, turn++) {
        const struct dq_job j = dq_job_of(a, x, job);
        float s[16], stat[2]; /* stat of this thread's rows: lse / ln 2, or delta */
        uint32_t held[HELD][4];
        const float *lse = a.lse + j.t * a.ld_lse + j.head0 + row;
#pragma unroll
        for (int h = 0; h < 2; h++) stat[h] = lse[8 * h];
        m.wait_full(place);
        m.wait_full(place + 1);
        load_heads(held, m.slot(place + wg));
        mbarrier_wait(m.bar(HEADS), turn & 1);
        int live = __shfl_sync(~0u, *m.n_key, 0); /* keys from this tile on */
        m.wait_full(place + 2);
        fence_proxy_async();
        dot_tile(s, heads, held, m.slot(place + 2));
        wgmma_commit();
        put_delta(deltas, o, m.smem + FIRST_BYTES, m.smem + m.slot_at(place + 1));
        named_sync(BOTH_GROUPS, PAIR); /* delta is complete */
        arrive_warp(m.empty(place));
        place += 2;
#pragma unroll
        for (int h = 0; h < 2; h++) stat[h] = wg ? deltas[row + 8 * h] : stat[h] * LOG2_E;
        float dq[128] = {};
        const auto add_tile = [&](int live, auto last) {
            const uint32_t p_rows = m.base + m.weights_at(0, tile), ds_rows = m.base + m.weights_at(1, tile);
            uint32_t w[8], ds[2][4];
            if constexpr (decltype(last)::value) arrive_warp(m.bar(FREE));
            mbarrier_wait(m.stored(wg, tile), (tile / WEIGHT_STAGES & 1) ^ 1);
            if (wg == 0) {
                weigh_scores(w, s, stat, a.scale * LOG2_E, live);
                put_transposed(p_rows, w);
                named_arrive(P_READY + warp, 64);
            } else {
                named_sync(P_READY + warp, 64);
                get_transposed(w, p_rows);
                weigh_gradients(w, s, stat, a.scale);
                put_transposed(ds_rows, w);
                named_arrive(DS_READY + warp, 64);
            }
            arrive_warp(m.written(wg, tile));
            if constexpr (!decltype(last)::value) {
                m.wait_full(place + 1);
                fence_proxy_async();
                dot_tile(s, heads, held, m.slot(place + 1));
                wgmma_commit();
            }
            wgmma_wait<decltype(last)::value ? 0 : 1>(); /* dq of the tile before */
            arrive_warp(m.empty(place - 1));             /* that tile's slot; at first that of dout */
            if (wg == 0) named_sync(DS_READY + warp, 64);
            get_transposed((uint32_t(&)[8])ds, ds_rows);
            const uint32_t right = low_word(m.slot(place) + wg * 4 * TILE_PANEL, TILE_PANEL);
            wgmma_fence();
            wgmma<true>(dq, ds[0], descriptor_at(right, 0), true);
            wgmma<true>(dq, ds[1], descriptor_at(right, 2048), true);
            wgmma_commit();
            if constexpr (!decltype(last)::value) {
                wgmma_wait<1>(); /* all but dq */
                wgmma_use(s);
            }
            place++;
            tile++;
        };
        wgmma_wait<0>();
        wgmma_use(s);
#pragma unroll 1
        for (; live > SHARED_KEYS; live -= SHARED_KEYS) add_tile(live, std::false_type());
        add_tile(live, std::true_type());
        load_o(min(job + (int)gridDim.x, n_job - 1));
        wgmma_wait<0>();
        wgmma_use(dq);
        named_sync(ONE_GROUP + wg, 128); /* all have read this half of the last tile: dq is staged there */
        const float one[2] = {1.0f, 1.0f};
        store_heads(a.dq + j.t * a.ld_dq + (int64_t)(j.head0 + warp * 16) * SHARED_DIM + wg * SHARED_COLUMNS, dq, one,
                    m.smem + m.slot_at(place - 1) + (wg * 4 + warp) * TILE_PANEL);
        fence_proxy_async();
        arrive_warp(m.empty(place - 1));
    }
}

/* ---- dkey */

/* Stores this thread's rows, `row` and row + 8, that belong to the sequence. written: a bit for each row that has been
 * stored. */
static __device__ __forceinline__ void store_sums(float *to, const float (&sum)[128], int row,
                                                  const struct shared_item &m, int4 owned, int *written)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!owns(m, owned, row + 8 * h)) continue;
        *written |= 1 << h;
#pragma unroll
        for (int n = 0; n < 32; n++)
            *(float2 *)(to + 8 * h * SHARED_COLUMNS + 8 * n) = make_float2(sum[4 * n + 2 * h], sum[4 * n + 2 * h + 1]);
    }
}
static __device__ __forceinline__ void clear_rest(float *to, int written)
{
    for (int h = 0; h < 2; h++)
        for (int n = 0; n < 32 && !(written >> h & 1); n++)
            *(float2 *)(to + 8 * h * SHARED_COLUMNS + 8 * n) = make_float2(0.0f, 0.0f);
}

/* What a block of dkey needs to copy a unit: p and dout, or ds and q, of a token and 64 heads. */
struct unit {
    int t, group, kind;
    const int *map;
};
/* All threads copy the weights; one thread loads the rows of heads and signals them on `bar`. */
static __device__ __forceinline__ void copy_unit(uint32_t stage, uint32_t bar, const struct shared_args &a,
                                                 const struct shared_chunk &x, const CUtensorMap *heads,
                                                 const struct unit &u, int half)
{
    const int n_group = a.n_head / SHARED_HEADS;
    const bf16 *weights =
        (u.kind ? x.ds : x.p) + ((int64_t)(u.t - x.first) * n_group + u.group) * x.n_slot * SHARED_HEADS;
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(bar, RIGHT_BYTES);
#pragma unroll
        for (int i = 0; i < RIGHT_BYTES / HEAD_PANEL; i++)
            tma_load(stage + LEFT_BYTES + i * HEAD_PANEL, heads, bar, half * SHARED_COLUMNS + i * 64,
                     u.group * SHARED_HEADS, u.t);
    }
#pragma unroll
    for (int j = 0; j < SHARED_BLOCK * 8 / TRIPLE; j++) {
        const int r = threadIdx.x / 8 + TRIPLE / 8 * j, c = threadIdx.x % 8, slot = u.map[r];
        cp_async_16(stage + sm90_swizzle(r, c), weights + (int64_t)max(slot, 0) * SHARED_HEADS + c * 8, slot >= 0);
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1)
    shared_dq_wgmma_kernel(const struct shared_args a, const struct shared_chunk x,
                           const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap dout)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ float deltas[SHARED_HEADS];
    __shared__ uint64_t bars[DQ_BARRIERS];
    __shared__ int n_key;
    char *smem = aligned_shared(bytes);
    const struct dq_room m = {smem, sm90_shared(smem), sm90_shared(bars), &n_key};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            mbarrier_init(m.bar(FULL + i), COPIERS * 32);
            mbarrier_init(m.bar(EMPTY + i), PAIR / 32);
        }
        mbarrier_init(m.bar(HEADS), 1);
        mbarrier_init(m.bar(FREE), PAIR / 32 + 2);
        for (int i = 0; i < 2 * WEIGHT_STAGES; i++) {
            mbarrier_init(m.bar(WRITTEN + i), PAIR / 64);
            mbarrier_init(m.bar(STORED + i), 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < PAIR) {
        sm90_registers_more<MORE>();
        compute_jobs(m, a, x, deltas);
    } else {
        sm90_registers_less<LESS>();
        const int warp = __shfl_sync(~0u, (threadIdx.x - PAIR) / 32, 0);
        if (warp < COPIERS)
            copy_jobs(m, a, x, &q, &dout, warp);
        else
            store_jobs(m, a, x, warp - COPIERS);
    }
#else
    __trap();
#endif
}

static __global__ void __launch_bounds__(TRIPLE, 1)
    shared_dkey_wgmma_kernel(const struct shared_args a, const struct shared_chunk x,
                             const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap dout)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct shared_live live;
    __shared__ uint64_t loaded[STAGES]; /* barriers: the rows of heads of a stage */
    const struct shared_item item = item_of(a, x, blockIdx.x);
    if (!item.seen) return;
    char *smem = aligned_shared(bytes);
    int *map = (int *)(smem + STAGES * STAGE_BYTES);
    const uint32_t stages = sm90_shared(smem), bars = sm90_shared(loaded);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) mbarrier_init(bars + 8 * i, 1);
        mbarrier_init_fence();
    }
    map_item<SHARED_BLOCK>(map, &live, a, item, 0);
    const int n_group = a.n_head / SHARED_HEADS, n_unit = __shfl_sync(~0u, live.n, 0) * n_group * 2;
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const auto copy = [&](int u) {
        if (u < n_unit) {
            const int i = live.token[u / (2 * n_group)], stage = u % STAGES;
            const struct unit unit = {item.first + i, u / 2 % n_group, u % 2, map + i * SHARED_BLOCK};
            copy_unit(stages + stage * STAGE_BYTES, bars + 8 * stage, a, x, unit.kind ? &q : &dout, unit, item.half);
        }
        copy_commit();
    };
    const int row = wg * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float *to = x.part + ((int64_t)blockIdx.x * SHARED_BLOCK + row) * SHARED_COLUMNS + lane % 4 * 2;
    int written = 0;
#pragma unroll 1
    for (int u = 0; u < STAGES - 1; u++) copy(u);
    for (int u = 0; u < n_unit;) { /* one sequence at a time: a NaN in it does not reach the rows of another */
        const int4 owned = live.owned[live.token[u / (2 * n_group)]];
        float sum[128] = {};
#pragma unroll 1
        for (; u < n_unit; u++) {
            const int token = live.token[u / (2 * n_group)];
            const uint32_t stage = stages + u % STAGES * STAGE_BYTES;
            if (live.owned[token].x != owned.x) break;
            copy_wait<STAGES - 2>();
            fence_proxy_async();
            __syncthreads(); /* the weights are complete; no product reads unit u - 1 any more */
            mbarrier_wait(bars + 8 * (u % STAGES), u / STAGES % 2);
            if (live.bits[token] >> wg & 1) {
                const uint32_t left = low_word(stage + wg * HEAD_PANEL, 16);
                const uint32_t right = low_word(stage + LEFT_BYTES, HEAD_PANEL);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < SHARED_HEADS / 16; k++)
                    wgmma<true>(sum, descriptor_at(left, 32 * k), descriptor_at(right, 2048 * k), true);
                wgmma_commit();
            }
            copy(u + STAGES - 1);
            wgmma_wait<0>();
            wgmma_use(sum);
        }
        store_sums(to, sum, row, item, owned, &written);
    }
    clear_rest(to, written);
#else
    __trap();
#endif
}

void shared_dq_wgmma(const struct shared_args *a, const struct shared_chunk *x)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_dq_wgmma_kernel, DQ_BYTES);
    ready = true;
    const unsigned grid = grid_x(MT_MIN((int64_t)x->n * (a->n_head / SHARED_HEADS), a->n_sm));
    shared_dq_wgmma_kernel<<<grid, THREADS, DQ_BYTES, cuda.stream>>>(*a, *x, map_heads(a, a->q, a->ld_q),
                                                                     map_heads(a, a->dout, a->ld_dout));
    CUDA_CHECK_LAUNCH();
}

void shared_dkey_wgmma(const struct shared_args *a, const struct shared_chunk *x)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_dkey_wgmma_kernel, DKEY_BYTES);
    ready = true;
    const unsigned grid = grid_x(ceil_div(x->n, SHARED_TOKENS) * (x->n_window + x->n_far) * 2);
    shared_dkey_wgmma_kernel<<<grid, TRIPLE, DKEY_BYTES, cuda.stream>>>(*a, *x, map_heads(a, a->q, a->ld_q),
                                                                        map_heads(a, a->dout, a->ld_dout));
    CUDA_CHECK_LAUNCH();
}
