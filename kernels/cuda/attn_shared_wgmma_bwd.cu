/* attn_shared_wgmma_bwd.cu - attention with shared keys on Hopper: backward. Groups of 64 heads of 512 columns.
 *
 * Math, shapes: as attn_shared.cu. The tokens are processed in chunks whose weights fit into scratch:
 *   dq: a block per token and 64 heads computes p, ds and dq, and stores p and ds, transposed: 64 heads per key.
 *   dkey: a block per item: 192 rows of kv or of the entries, 32 tokens and 256 columns: p^T dout + ds^T q, in f32.
 *   sum: adds the items of a row in the order of the tokens; the sums become bf16 when no later token sees the row.
 * Scratch: struct shared_chunk: p and ds of up to 1 GiB, and the items, about a fifth of it.
 * Grid: dq as the forward, with tiles of 32 keys in four stages, 201 KiB. The first warpgroup computes the scores
 *   and p, the second dp and ds, then each 256 columns of dq. Registers of the first hold half of q, those of the
 *   second half of dout. The products of the scores and dp of the next tile are issued before dq of this one.
 * Grid, dkey: three warpgroups of 64 rows; 3 stages of 56 KiB: weights of 64 heads for 192 rows, and 256 columns of
 *   dout or q of these heads, which TMA loads. The 192 rows hold all keys in the window of 32 tokens. Tokens that see
 *   none of the rows are left out.
 * Bound: dq per tile: wgmma of 32 columns, for both warpgroups 1450 clocks as measured (23 per instruction, not
 *   16), and of 256 columns, 550; with a window alone, memory: 256 KiB per token. dkey per stage: wgmma 1536 clocks;
 *   copies from L2 56 KiB, 18 bytes per clock: L2.
 * Numerics: f32 sums; p and ds rounded to bf16; no atomics, bitwise repeatable.
 * Measured: tests/RESULTS.md, "Attention with shared keys"; H200: of 2.34 ms, dq 1.37, dkey 0.91, sum 0.06 (T 4096,
 *   an entry per 4 tokens). Clocks of a tile of dq, about 4000: issuing the products of scores and dp 750, of dq 250,
 *   copies 400 to 1100 (the warps wait to issue them), p 560, ds 500, storing p and ds 500.
 * Tried and dropped: items of 128 rows and 64 tokens, dkey 1.39 ms; tiles of 64 keys in dq, in one stage, 1.58 ms;
 *   dq with a barrier per exchange instead of two per tile, 1.57 ms; a block of dq for many tokens, 1.62 ms; dkey
 *   with the next product issued before the last one ends, 0.91 ms, and 11 % slower for 4 sequences. */
#include <type_traits>

#include "kernels/cuda/attn_shared_wgmma.cuh"

enum {
    SHARED_KEYS = 32, /* of a tile of dq */
    TILE_BYTES = SHARED_KEYS * SHARED_DIM * 2,
    TILE_PANEL = SHARED_KEYS * PANEL_ROW,
    TILES = 4,
    HELD = 16, /* operands of heads in registers: 16 columns each, the last 256 of the 512 */
    FIRST_TILE = SHARED_HEADS * SHARED_DIM, /* bytes of the first 256 columns of 64 heads */
    LAST = 2 * FIRST_TILE + 2 * TILE_BYTES, /* from these columns of q to the last, which tiles 2 and 3 hold until they
                                               are in registers; the same of dout */
    WEIGHT_BYTES = SHARED_KEYS * SHARED_HEADS * 2,
    DQ_BYTES = 2 * FIRST_TILE + TILES * TILE_BYTES + 2 * WEIGHT_BYTES + 1024,

    TRIPLE = 384, /* threads of dkey: a warpgroup per 64 rows */
    STAGES = 3,
    LEFT_BYTES = SHARED_BLOCK * PANEL_ROW,
    RIGHT_BYTES = SHARED_HEADS * SHARED_COLUMNS * 2,
    STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES,
    MAP_BYTES = SHARED_TOKENS * SHARED_BLOCK * 4,
    DKEY_BYTES = STAGES * STAGE_BYTES + MAP_BYTES + 1024
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dq */

/* The last columns of a warp's 16 heads: A operands. tile: these columns of 64 heads. */
static __device__ __forceinline__ void load_heads(uint32_t (&x)[HELD][4], uint32_t tile)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HELD; k++)
        load_matrix4(x[k], tile + k / 4 * HEAD_PANEL + sm90_swizzle(row, k % 4 * 2 + lane / 16));
}

/* s [64 heads, 32 keys] = heads times keys. heads: their first columns; held: the last. */
static __device__ __forceinline__ void dot_tile(float (&s)[16], uint32_t heads, const uint32_t (&held)[HELD][4],
                                                uint32_t tile)
{
    const uint32_t a = low_word(heads, 16), b = low_word(tile, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HELD; k++)
        wgmma_32(s, descriptor_at(a, k / 4 * HEAD_PANEL + k % 4 * 32),
                 descriptor_at(b, k / 4 * TILE_PANEL + k % 4 * 32), k > 0);
#pragma unroll
    for (int k = 0; k < HELD; k++) wgmma_32(s, held[k], descriptor_at(b, (4 + k / 4) * TILE_PANEL + k % 4 * 32));
}

/* Stores weights transposed: row k of `to` has the 64 heads of key k. */
static __device__ __forceinline__ void put_transposed(uint32_t to, const uint32_t (&w)[8])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, matrix = lane / 8;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const uint32_t at = to + sm90_swizzle(8 * (n + matrix / 2) + lane % 8, warp * 2 + matrix % 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w[2 * n]),
                     "r"(w[2 * n + 1]), "r"(w[2 * n + 2]), "r"(w[2 * n + 3])
                     : "memory");
    }
}
/* Loads weights that put_transposed has stored. */
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
/* delta = <dout, o> of these heads. */
static __device__ __forceinline__ void put_delta(float *delta, const uint4 (&x)[16], const char *dout)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < 8; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float u[8], v[8];
            unpack8(u, x[2 * h + i]);
            unpack8(v, load16(dout + lane / 8 * HEAD_PANEL + i * LAST + sm90_swizzle(warp * 8 + h, lane % 8)));
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

/* Copies the first `live` keys of transposed weights to scratch. A warpgroup calls it. */
static __device__ __forceinline__ void store_weights(bf16 *to, const char *from, int live)
{
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int k = threadIdx.x % 128 / 8; k < SHARED_KEYS; k += 16)
        if (k < live) store16(to + k * SHARED_HEADS + chunk * 8, load16(from + sm90_swizzle(k, chunk)));
}

/* ---- dkey */

/* Stores this thread's rows `row` and row + 8 of the sums as far as the sequence owns them. written: a bit for each row
 * that has been stored. */
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
/* Zeros in the rows that have not been stored. */
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

/* The rows of 64 heads of token t, of q and of dout; one thread. bar: a barrier that is not initialised yet. */
static __device__ __forceinline__ void load_rows(uint32_t bar, uint32_t q, uint32_t dout, const CUtensorMap &q_map,
                                                 const CUtensorMap &dout_map, int head0, int t)
{
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(bar, 2 * HEAD_TILE);
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        const uint32_t to = i / 4 * LAST + i % 4 * HEAD_PANEL;
        tma_load(q + to, &q_map, bar, i * 64, head0, t);
        tma_load(dout + to, &dout_map, bar, i * 64, head0, t);
    }
}

/* Prefetches the heads of the tokens of a chunk. */
static __device__ __forceinline__ void prefetch_chunk(const struct shared_args &a, const struct shared_chunk &x)
{
    prefetch_heads(a, a.q + x.first * a.ld_q, a.ld_q, x.n);
    prefetch_heads(a, a.dout + x.first * a.ld_dout, a.ld_dout, x.n);
    prefetch_heads(a, a.o + x.first * a.ld_o, a.ld_o, x.n);
}
#endif

static __global__ void __launch_bounds__(PAIR, 1)
    shared_dq_wgmma_kernel(const struct shared_args a, const struct shared_chunk x,
                           const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dout_map)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ float deltas[SHARED_HEADS];
    __shared__ uint64_t loaded; /* barrier: the rows of heads */
    char *smem = aligned_shared(bytes), *p_rows = smem + 2 * FIRST_TILE + TILES * TILE_BYTES,
         *ds_rows = p_rows + WEIGHT_BYTES;
    const uint32_t q = sm90_shared(smem), dout = q + FIRST_TILE, tiles = dout + FIRST_TILE;
    const int n_group = a.n_head / SHARED_HEADS, at = x.n - 1 - blockIdx.x / n_group, t = x.first + at;
    const int group = blockIdx.x % n_group, head0 = group * SHARED_HEADS, warp = threadIdx.x / 32;
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t column = (int64_t)head0 * SHARED_DIM;
    const int64_t slots = ((int64_t)at * n_group + group) * x.n_slot * SHARED_HEADS;
    const uint32_t bar = sm90_shared(&loaded);
    if (threadIdx.x == 0) load_rows(bar, q, dout, q_map, dout_map, head0, t);
    uint4 o[16];
    load_outputs(o, a.o + t * a.ld_o + column);
    const struct sight sight = sight_of(a, t);
    const int n = __shfl_sync(~0u, count_keys(a, sight), 0), n_tile = (n + SHARED_KEYS - 1) / SHARED_KEYS;
    const auto copy_tile = [&](int i) {
        const int k0 = i * SHARED_KEYS;
        if (i < n_tile)
            copy_keys<SHARED_KEYS, 8>(tiles + i % TILES * TILE_BYTES, find_key<SHARED_KEYS, 8>(a, sight, k0, n, warp),
                                      k0, n, warp);
        copy_commit();
    };
    copy_tile(0);
    copy_tile(1);

    float s[16], dq[128], stat[2]; /* stat of this thread's rows: lse / ln 2, or delta */
    uint32_t held[HELD][4];
    copy_wait<1>();
    fence_proxy_async();
    __syncthreads(); /* tile 0 is complete */
    mbarrier_wait(bar, 0);
    load_heads(held, (wg ? dout : q) + LAST);
    dot_tile(s, wg ? dout : q, held, tiles);
    wgmma_commit();
    put_delta(deltas, o, smem + FIRST_TILE);
    __syncthreads(); /* delta is complete; tiles 2 and 3 hold no heads any more */
    copy_tile(2);
    if (threadIdx.x == 0) prefetch_chunk(a, x);
#pragma unroll
    for (int h = 0; h < 2; h++) stat[h] = wg ? deltas[row + 8 * h] : a.lse[t * a.ld_lse + head0 + row + 8 * h] * LOG2_E;
    const auto add_tile = [&](int i, auto last) {
        const uint32_t tile = tiles + i % TILES * TILE_BYTES;
        const int live = n - i * SHARED_KEYS;
        bf16 *const kept = (wg ? x.ds : x.p) + slots + (int64_t)i * SHARED_KEYS * SHARED_HEADS;
        uint32_t w[8];
        if (wg == 0) {
            weigh_scores(w, s, stat, a.scale * LOG2_E, live);
            put_transposed(sm90_shared(p_rows), w);
        }
        copy_wait<1>();
        fence_proxy_async();
        __syncthreads(); /* p and tile i + 1 are complete */
        if (wg == 1) {
            get_transposed(w, sm90_shared(p_rows));
            weigh_gradients(w, s, stat, a.scale);
            put_transposed(sm90_shared(ds_rows), w);
        }
        if constexpr (!decltype(last)::value) {
            dot_tile(s, wg ? dout : q, held, tiles + (i + 1) % TILES * TILE_BYTES);
            wgmma_commit();
        }
        if (wg == 0) store_weights(kept, p_rows, live);
        wgmma_wait<decltype(last)::value ? 0 : 1>(); /* dq of tile i - 1 */
        __syncthreads();                             /* ds is complete; no product reads tile i - 1 any more */
        const uint32_t right = low_word(tile + wg * 4 * TILE_PANEL, TILE_PANEL);
        uint32_t ds[2][4];
        get_transposed((uint32_t(&)[8])ds, sm90_shared(ds_rows));
        wgmma_fence();
        wgmma<true>(dq, ds[0], descriptor_at(right, 0), i > 0);
        wgmma<true>(dq, ds[1], descriptor_at(right, 2048), true);
        wgmma_commit();
        copy_tile(i + 3);
        if (wg == 1) store_weights(kept, ds_rows, live);
        if constexpr (!decltype(last)::value) {
            wgmma_wait<1>(); /* all but dq */
            wgmma_use(s);
        }
    };
    wgmma_wait<0>();
    wgmma_use(s);
#pragma unroll 1
    for (int i = 0; i + 1 < n_tile; i++) add_tile(i, std::false_type());
    add_tile(n_tile - 1, std::true_type());
    wgmma_wait<0>();
    wgmma_use(dq);
    const float one[2] = {1.0f, 1.0f};
    store_half(a.dq + t * a.ld_dq + column + wg * SHARED_COLUMNS, dq, one, smem, wg);
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
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
    for (int u = 0; u < n_unit;) { /* a sequence: NaN in it does not reach the rows of another */
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
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

/* q or dout, in boxes of 64 heads and 64 columns of a token */
static CUtensorMap map_heads(const struct shared_args *a, const bf16 *x, int64_t ld)
{
    const int64_t size[3] = {SHARED_DIM, a->n_head, a->n_tok}, stride[2] = {SHARED_DIM * 2, ld * 2};
    const int64_t box[3] = {64, SHARED_HEADS, 1};
    return sm90_tensor_map(x, size, stride, box);
}

void shared_dq_wgmma(const struct shared_args *a, const struct shared_chunk *x)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_dq_wgmma_kernel, DQ_BYTES);
    ready = true;
    const unsigned grid = grid_x((int64_t)x->n * (a->n_head / SHARED_HEADS));
    shared_dq_wgmma_kernel<<<grid, PAIR, DQ_BYTES, cuda.stream>>>(*a, *x, map_heads(a, a->q, a->ld_q),
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
