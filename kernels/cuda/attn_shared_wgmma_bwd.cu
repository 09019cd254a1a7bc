/* attn_shared_wgmma_bwd.cu - attention with shared keys on Hopper: backward. Groups of 64 heads of 512 columns.
 *
 * Math, shapes: as attn_shared.cu. The tokens are processed in chunks whose weights fit into scratch:
 *   dq: a block per token and 64 heads computes p, ds and dq, and stores p and ds, transposed: 64 heads per key.
 *   dkey: a block per item: 192 rows of kv or of the entries, 32 tokens and 256 columns: p^T dout + ds^T q, in f32.
 *   sum: adds the items of a row in the order of the tokens; the sums become bf16 when no later token sees the row.
 * Scratch: struct shared_chunk: p and ds of up to 1 GiB, and the items, about a fifth of it.
 * Grid: dq as the forward, with tiles of 32 keys in two stages, 213 KiB; the first warpgroup computes the scores and p,
 *   the second dp and ds, then each 256 columns of dq. dkey: three warpgroups of 64 rows; 3 stages of 56 KiB: weights
 * of 64 heads for 192 rows, and 256 columns of dout or q of these heads. The 192 rows hold all keys in the window of 32
 *   tokens. Tokens that see none of the rows are left out.
 * Bound: dq per tile: shared memory, 1856 clocks per SM; with a window alone, memory: 256 KiB per token.
 *   dkey per stage: wgmma 1536 clocks; copies from L2 56 KiB, 18 bytes per clock: L2.
 * Numerics: f32 sums; p and ds rounded to bf16; no atomics, bitwise repeatable.
 * Measured: tests/RESULTS.md, "Attention with shared keys"; H200, commit 1000353: of 2.70 ms, dq 1.63, dkey 0.99, sum
 * 0.09 (T 4096, an entry per 4 tokens). Tried and dropped: items of 128 rows and 64 tokens, dkey 1.39 ms; tiles of 64
 * keys in dq, in one stage, 1.58 ms, but 1.41 instead of 1.35 with lists of 512 entries. */
#include "kernels/cuda/attn_shared_wgmma.cuh"

enum {
    SHARED_KEYS = 32, /* of a tile of dq */
    TILE_BYTES = SHARED_KEYS * SHARED_DIM * 2,
    TILE_PANEL = SHARED_KEYS * PANEL_ROW,
    PASS_BYTES = SHARED_KEYS * SHARED_HEADS * 2, /* weights of a tile */
    DS_BYTES = SHARED_HEADS * PANEL_ROW,         /* rows of 32 keys, half of 128 bytes */
    DQ_BYTES = 2 * HEAD_TILE + 2 * TILE_BYTES + 3 * PASS_BYTES + DS_BYTES + 1024,

    TRIPLE = 384, /* threads of dkey: a warpgroup per 64 rows */
    STAGES = 3,
    LEFT_BYTES = SHARED_BLOCK * PANEL_ROW,
    STAGE_BYTES = LEFT_BYTES + SHARED_HEADS * SHARED_COLUMNS * 2,
    MAP_BYTES = SHARED_TOKENS * SHARED_BLOCK * 4,
    DKEY_BYTES = STAGES * STAGE_BYTES + MAP_BYTES + 1024
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- dq */

/* s [64 heads, 32 keys] = heads times keys */
static __device__ __forceinline__ void dot_tile(float (&s)[16], uint32_t heads, uint32_t tile)
{
    const uint64_t a = sm90_descriptor(heads, 16, 1024), b = sm90_descriptor(tile, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < SHARED_DIM / 16; k++)
        wgmma_32(s, a + k / 4 * (HEAD_PANEL >> 4) + k % 4 * 2, b + k / 4 * (TILE_PANEL >> 4) + k % 4 * 2, k > 0);
    wgmma_commit();
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
/* The A operand of dq: 64 rows of 32 keys. */
static __device__ __forceinline__ void put_ds(char *to, const uint32_t (&w)[8])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        char *p = to + sm90_swizzle(row, n) + lane % 4 * 4;
        *(uint32_t *)p = w[2 * n];
        *(uint32_t *)(p + 8 * PANEL_ROW) = w[2 * n + 1];
    }
}

/* delta = <dout, o> of 8 heads per warp; dout is in shared memory. */
static __device__ __forceinline__ void put_delta(float *delta, const bf16 *o, const char *dout)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = load16(o + (warp * 8 + i / 2) * SHARED_DIM + i % 2 * 256 + lane * 8);
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 8; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float u[8], v[8];
            unpack8(u, x[2 * h + i]);
            unpack8(v, load16(dout + (lane / 8 + 4 * i) * HEAD_PANEL + sm90_swizzle(warp * 8 + h, lane % 8)));
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
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int k = 8 * (i / 4) + column;
        const float low = k < live ? exp2_approx(s[i] * c - lse[i / 2 % 2]) : 0.0f;
        const float high = k + 1 < live ? exp2_approx(s[i + 1] * c - lse[i / 2 % 2]) : 0.0f;
        w[i / 2] = pack2(low, high);
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

/* Copies the first `live` keys of transposed weights to scratch. All threads call it. */
static __device__ __forceinline__ void keep_weights(bf16 *to, const char *from, int live)
{
    const int k = threadIdx.x / 8, chunk = threadIdx.x % 8;
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
static __device__ __forceinline__ void copy_unit(uint32_t stage, const struct shared_args &a,
                                                 const struct shared_chunk &x, const struct unit &u, int half)
{
    const int n_group = a.n_head / SHARED_HEADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bf16 *weights =
        (u.kind ? x.ds : x.p) + ((int64_t)(u.t - x.first) * n_group + u.group) * x.n_slot * SHARED_HEADS;
    const bf16 *rows = (u.kind ? a.q + u.t * a.ld_q : a.dout + u.t * a.ld_dout) +
                       (int64_t)u.group * SHARED_HEADS * SHARED_DIM + half * SHARED_COLUMNS + lane * 8;
#pragma unroll
    for (int j = 0; j < SHARED_BLOCK * 8 / TRIPLE; j++) {
        const int r = threadIdx.x / 8 + TRIPLE / 8 * j, c = threadIdx.x % 8, slot = u.map[r];
        cp_async_16(stage + sm90_swizzle(r, c), weights + (int64_t)max(slot, 0) * SHARED_HEADS + c * 8, slot >= 0);
    }
    const uint32_t right = stage + LEFT_BYTES + lane / 8 * HEAD_PANEL;
#pragma unroll
    for (int h = warp; h < SHARED_HEADS; h += TRIPLE / 32)
        cp_async_16(right + sm90_swizzle(h, lane % 8), rows + h * SHARED_DIM, true);
}
#endif

static __global__ void __launch_bounds__(PAIR, 1)
    shared_dq_wgmma_kernel(const struct shared_args a, const struct shared_chunk x)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ float deltas[SHARED_HEADS];
    char *smem = aligned_shared(bytes), *pass = smem + 2 * HEAD_TILE + 2 * TILE_BYTES, *p_rows = pass + PASS_BYTES,
         *ds_rows = p_rows + PASS_BYTES, *ds = ds_rows + PASS_BYTES;
    const uint32_t q = sm90_shared(smem), dout = q + HEAD_TILE, tiles = dout + HEAD_TILE;
    const int n_group = a.n_head / SHARED_HEADS, at = x.n - 1 - blockIdx.x / n_group, t = x.first + at;
    const int group = blockIdx.x % n_group, head0 = group * SHARED_HEADS, warp = threadIdx.x / 32;
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t column = (int64_t)head0 * SHARED_DIM;
    const int64_t slots = ((int64_t)at * n_group + group) * x.n_slot * SHARED_HEADS;
    const struct sight sight = sight_of(a, t);
    const int n = count_keys(a, sight), n_tile = (n + SHARED_KEYS - 1) / SHARED_KEYS;
    copy_heads<8>(q, a.q + t * a.ld_q + column, warp);
    copy_heads<8>(dout, a.dout + t * a.ld_dout + column, warp);
    copy_keys<SHARED_KEYS, 8>(tiles, a, sight, 0, n, warp);
    copy_commit();
    put_delta(deltas, a.o + t * a.ld_o + column, smem + HEAD_TILE);
    __syncthreads();

    float dq[128] = {}, stat[2]; /* of this thread's rows: lse / ln 2, or delta */
#pragma unroll
    for (int h = 0; h < 2; h++) stat[h] = wg ? deltas[row + 8 * h] : a.lse[t * a.ld_lse + head0 + row + 8 * h] * LOG2_E;
    for (int i = 0; i < n_tile; i++) {
        const uint32_t tile = tiles + i % 2 * TILE_BYTES;
        const int live = n - i * SHARED_KEYS;
        float s[16];
        uint32_t w[8];
        copy_wait<0>();
        fence_proxy_async();
        __syncthreads(); /* this tile is complete; no product reads the other any more */
        if (i == 0 && threadIdx.x == 0) {
            prefetch_heads(a, a.q + x.first * a.ld_q, a.ld_q, x.n);
            prefetch_heads(a, a.dout + x.first * a.ld_dout, a.ld_dout, x.n);
            prefetch_heads(a, a.o + x.first * a.ld_o, a.ld_o, x.n);
        }
        dot_tile(s, wg ? dout : q, tile);
        if (i + 1 < n_tile) {
            copy_keys<SHARED_KEYS, 8>(tiles + (i + 1) % 2 * TILE_BYTES, a, sight, (i + 1) * SHARED_KEYS, n, warp);
            copy_commit();
        }
        wgmma_wait<0>();
        wgmma_use(s);
        uint4 *passed = (uint4 *)pass + threadIdx.x % 128;
        if (wg == 0) {
            weigh_scores(w, s, stat, a.scale * LOG2_E, live);
            passed[0] = make_uint4(w[0], w[1], w[2], w[3]);
            passed[128] = make_uint4(w[4], w[5], w[6], w[7]);
            put_transposed(sm90_shared(p_rows), w);
        }
        __syncthreads(); /* p is complete */
        if (wg == 1) {
            *(uint4 *)w = passed[0];
            *(uint4 *)(w + 4) = passed[128];
            weigh_gradients(w, s, stat, a.scale);
            put_ds(ds, w);
            put_transposed(sm90_shared(ds_rows), w);
            fence_proxy_async();
        }
        __syncthreads(); /* ds is complete */
        const uint64_t left = sm90_descriptor(sm90_shared(ds), 16, 1024);
        const uint64_t right = sm90_descriptor(tile + wg * 4 * TILE_PANEL, TILE_PANEL, 1024);
        wgmma_fence();
        wgmma<true>(dq, left, right, true);
        wgmma<true>(dq, left + 2, right + 128, true);
        wgmma_commit();
        keep_weights(x.p + slots + (int64_t)i * SHARED_KEYS * SHARED_HEADS, p_rows, live);
        keep_weights(x.ds + slots + (int64_t)i * SHARED_KEYS * SHARED_HEADS, ds_rows, live);
        wgmma_wait<0>();
        wgmma_use(dq);
    }
    const float one[2] = {1.0f, 1.0f};
    store_half(a.dq + t * a.ld_dq + column + wg * SHARED_COLUMNS, dq, one, smem, wg);
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

static __global__ void __launch_bounds__(TRIPLE, 1)
    shared_dkey_wgmma_kernel(const struct shared_args a, const struct shared_chunk x)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct shared_live live;
    const struct shared_item item = item_of(a, x, blockIdx.x);
    if (!item.seen) return;
    char *smem = aligned_shared(bytes);
    int *map = (int *)(smem + STAGES * STAGE_BYTES);
    const uint32_t stages = sm90_shared(smem);
    map_item<SHARED_BLOCK>(map, &live, a, item, 0);
    const int n_group = a.n_head / SHARED_HEADS, n_unit = live.n * n_group * 2, lane = threadIdx.x % 32;
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const auto unit_at = [&](int u) {
        const int i = live.token[u / (2 * n_group)];
        return unit{item.first + i, u / 2 % n_group, u % 2, map + i * SHARED_BLOCK};
    };
    const int row = wg * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float *to = x.part + ((int64_t)blockIdx.x * SHARED_BLOCK + row) * SHARED_COLUMNS + lane % 4 * 2;
    int written = 0;
#pragma unroll 1
    for (int u = 0; u < STAGES - 1; u++) {
        if (u < n_unit) copy_unit(stages + u * STAGE_BYTES, a, x, unit_at(u), item.half);
        copy_commit();
    }
    for (int u = 0; u < n_unit;) { /* a sequence: NaN in it does not reach the rows of another */
        const int4 owned = live.owned[live.token[u / (2 * n_group)]];
        float sum[128] = {};
#pragma unroll 1
        for (; u < n_unit; u++) {
            const int token = live.token[u / (2 * n_group)], next = u + STAGES - 1;
            const uint32_t stage = stages + u % STAGES * STAGE_BYTES;
            if (live.owned[token].x != owned.x) break;
            copy_wait<STAGES - 2>();
            fence_proxy_async();
            __syncthreads(); /* unit u is complete; no product reads unit u - 1 any more */
            if (live.bits[token] >> wg & 1) {
                const uint64_t left = sm90_descriptor(stage + wg * HEAD_PANEL, 16, 1024);
                const uint64_t right = sm90_descriptor(stage + LEFT_BYTES, HEAD_PANEL, 1024);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < SHARED_HEADS / 16; k++) wgmma<true>(sum, left + 2 * k, right + 128 * k, true);
                wgmma_commit();
            }
            if (next < n_unit) copy_unit(stages + next % STAGES * STAGE_BYTES, a, x, unit_at(next), item.half);
            copy_commit();
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

void shared_dq_wgmma(const struct shared_args *a, const struct shared_chunk *x)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_dq_wgmma_kernel, DQ_BYTES);
    ready = true;
    const unsigned grid = grid_x((int64_t)x->n * (a->n_head / SHARED_HEADS));
    shared_dq_wgmma_kernel<<<grid, PAIR, DQ_BYTES, cuda.stream>>>(*a, *x);
    CUDA_CHECK_LAUNCH();
}

void shared_dkey_wgmma(const struct shared_args *a, const struct shared_chunk *x)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_dkey_wgmma_kernel, DKEY_BYTES);
    ready = true;
    const unsigned grid = grid_x(ceil_div(x->n, SHARED_TOKENS) * (x->n_window + x->n_far) * 2);
    shared_dkey_wgmma_kernel<<<grid, TRIPLE, DKEY_BYTES, cuda.stream>>>(*a, *x);
    CUDA_CHECK_LAUNCH();
}
