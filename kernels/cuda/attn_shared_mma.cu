/* attn_shared_mma.cu - attention with shared keys for every GPU since Ampere: groups of 64 heads of 512 columns, with
 * mma.sync. On Hopper, attn_shared_wgmma_fwd.cu and attn_shared_wgmma_bwd.cu replace it.
 *
 * Math, shapes, chunks: as attn_shared.cu.
 * Grid: forward and dq: a block of 8 warps per token and 32 heads. A warp has 64 of the 512 columns: its part of the
 *   queries (and of dout) stays in registers, and no other warp reads its part of the keys. So a score is the sum over
 *   8 warps, in shared memory, in their order; each warp then weighs 4 heads. Tiles of 16 keys, four stages, 99 KiB.
 *   While a warp weighs a tile, it multiplies the next one, so that the tensor cores work during sums and softmax.
 *   dkey: 8 warps per item and 64 of its rows; two stages of 64 rows of weights and 256 columns of dout or q of 64
 *   heads, 88 KiB. One block per SM, of dkey two where shared memory has room.
 * Bound: shared memory at 128 bytes per clock, about 700 clocks per tile of the forward and 960 of dq (products at the
 *   rate of 8.0: 512 and 768); 800 per stage of dkey.
 * Numerics: f32 sums; p and ds rounded to bf16; no atomics, bitwise repeatable.
 * Measured: tests/RESULTS.md, "Attention with shared keys"; H200: dkey 1.37 ms with two blocks per SM, 1.98 with one (T
 * 4096, an entry per 4 tokens). */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/attn_shared.cuh"

enum {
    THREADS = 256,
    WARPS = 8,
    HEADS = 32, /* of a block */
    KEYS = 16,  /* of a tile */
    STAGES = 4, /* tiles in shared memory */
    OWN = 64,   /* columns of a warp */
    OWN_BYTES = KEYS * OWN * 2,
    TILES_BYTES = WARPS * STAGES * OWN_BYTES,
    SUMS = WARPS * HEADS * KEYS, /* terms of a tile's products */
    WEIGHT_BYTES = HEADS * 2 * KEYS * 2,
    TOKEN_BYTES = TILES_BYTES + 2 * SUMS * 4 + WEIGHT_BYTES,

    ROWS = 64, /* of a block of dkey */
    BANDS = SHARED_BLOCK / ROWS,
    LEFT_BYTES = ROWS * SHARED_HEADS * 2,
    PANEL_BYTES = SHARED_HEADS * OWN * 2,
    STAGE_BYTES = LEFT_BYTES + SHARED_COLUMNS / OWN * PANEL_BYTES,
    DKEY_BYTES = 2 * STAGE_BYTES + SHARED_TOKENS * ROWS * 4
};
static_assert(HEADS <= STAGES * KEYS, "a warp's part of the queries fits into its part of the tiles");

/* Number of keys of a token. All threads of the block call it. */
__device__ static inline int count_keys(const struct shared_args &a, const struct sight &s)
{
    int n = s.n_near + (s.list ? 0 : s.n_far);
    for (int p = 0; s.list && p < a.top; p += THREADS)
        n += __syncthreads_count(p + (int)threadIdx.x < a.top && listed(s, p + threadIdx.x));
    return n;
}

/* Entry of key `lane % 16` of tile i of a token's n keys, if it is not in the window. Called a tile before copy_keys
 * uses it, so that no warp waits for the list. */
__device__ static inline int find_entry(const struct sight &s, int i, int n)
{
    const int k = i * KEYS + threadIdx.x % KEYS, e = k - s.n_near;
    return s.list && e >= 0 && k < n ? s.list[e] : e;
}
/* Starts the copy of this warp's columns of tile i, as one group; zeros after the last key. entry: of find_entry. */
__device__ static inline void copy_keys(uint32_t own, const struct shared_args &a, const struct sight &s, int i, int n,
                                        int entry)
{
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * OWN + lane % 8 * 8, k = i * KEYS + lane % KEYS;
    const bool near = k < s.n_near;
    const bf16 *key = near ? a.kv : a.entry;
    key += (near ? s.first_key + k : s.first_entry + entry) * (near ? a.ld_kv : a.ld_entry);
    if (k >= n) key = a.kv; /* not read */
    const uint32_t to = own + i % STAGES * OWN_BYTES;
#pragma unroll
    for (int j = 0; j < KEYS / 4; j++) {
        const int r = 4 * j + lane / 8;
        const uint64_t from = __shfl_sync(~0u, (unsigned long long)key, r);
        copy_async16(to + tile_offset<8>(r, lane % 8), (const bf16 *)from + column, i * KEYS + r < n ? 16 : 0);
    }
    copy_commit();
}
/* This warp's columns of 32 heads as A operands. own: this warp's part of the tiles. */
__device__ static inline void load_heads(uint32_t x[4][2][4], uint32_t own, const bf16 *heads)
{
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * OWN + lane % 8 * 8;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEADS / 4; i++) {
        const int r = 4 * i + lane / 8;
        copy_async16(own + tile_offset<8>(r, lane % 8), heads + r * SHARED_DIM + column, 16);
    }
    copy_commit();
    copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int step = 0; step < 4; step++) load_rows<2, OWN>(x[step], lane_rows<OWN>(own), step);
    __syncwarp();
}

/* x[p] [32 heads, 16 keys]: product of operand a[p] and tile i over this warp's columns, whose copy it waits for. Each
 * fragment of the keys is read once for all N products. */
template <int N>
__device__ static inline void find_terms(float x[N][2][2][4], const uint32_t a[N][4][2][4], uint32_t own, int i)
{
    const uint32_t cols = lane_cols<OWN>(own + i % STAGES * OWN_BYTES);
    copy_wait<1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < N * 16; j++) x[j / 16][j / 8 % 2][j / 4 % 2][j % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < OWN / 16; step++) {
        uint32_t f[4];
        load_matrix4(f, cols ^ (step << 5));
#pragma unroll
        for (int j = 0; j < N * 4; j++) mma_bf16(x[j / 4][j / 2 % 2][j % 2], a[j / 4][step][j / 2 % 2], f + j % 2 * 2);
    }
}

/* Where a term is: no bank conflicts in put_terms and add_terms. */
__device__ static inline int sum_offset(int head, int key)
{
    const int row = (head & ~3) + (head & 1) * 2 + (head >> 1 & 1);
    return row * KEYS + (key ^ (head & 1) * 8);
}
/* Writes this warp's terms of [32 heads, 16 keys]. */
__device__ static inline void put_terms(float *sums, const float x[2][2][4])
{
    const int lane = threadIdx.x % 32;
    float *to = sums + threadIdx.x / 32 * HEADS * KEYS;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int head = 16 * m + lane / 4, key = 8 * n + lane % 4 * 2;
            *(float2 *)(to + sum_offset(head, key)) = make_float2(x[m][n][0], x[m][n][1]);
            *(float2 *)(to + sum_offset(head + 8, key)) = make_float2(x[m][n][2], x[m][n][3]);
        }
    }
}

/* The two heads, first_head() and the next, and the key of a tile whose weights this lane computes. */
__device__ static inline int first_head(void) { return threadIdx.x / KEYS * 2; }
__device__ static inline int lane_key(void) { return threadIdx.x % KEYS; }

/* Adds the terms of all warps for this lane's heads and key. */
__device__ static inline void add_terms(float x[2], const float *sums)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        x[h] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x[h] += sums[w * HEADS * KEYS + sum_offset(first_head() + h, lane_key())];
    }
}

/* Stores this lane's weights in tile i of A operands: columns 16 (i % 2) .. of [32 heads, 32]. */
__device__ static inline void put_weights(char *to, const float x[2], int i)
{
    const int key = lane_key();
#pragma unroll
    for (int h = 0; h < 2; h++)
        *(bf16 *)(to + tile_offset<4>(first_head() + h, i % 2 * 2 + key / 8) + key % 8 * 2) = __float2bfloat16_rn(x[h]);
}
/* acc [32 heads, this warp's columns] += weights of tile i times its keys */
__device__ static inline void add_keys(float acc[2][8][4], uint32_t weights, uint32_t own, int i)
{
    const int lane = threadIdx.x % 32;
    const uint32_t rows = lane_rows<OWN>(own + i % STAGES * OWN_BYTES);
    uint32_t w[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) load_matrix4(w[m], weights + tile_offset<4>(16 * m + lane % 16, i % 2 * 2 + lane / 16));
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t f[4];
        load_matrix4_trans(f, rows ^ (c << 5));
#pragma unroll
        for (int m = 0; m < 2; m++) {
            mma_bf16(acc[m][2 * c], w[m], f);
            mma_bf16(acc[m][2 * c + 1], w[m], f + 2);
        }
    }
}

/* The block's token and first head, and its shared memory. */
struct place {
    int at, t, head0; /* at: token in the chunk */
    char *tiles, *weights;
    float *sums;
    uint32_t own; /* this warp's part of the tiles */
};
__device__ static inline struct place place_of(const struct shared_args &a, char *smem, int first, int n)
{
    const int per_token = a.n_head / HEADS;
    struct place p;
    p.at = n - 1 - blockIdx.x / per_token; /* tokens with the most entries first */
    p.t = first + p.at;
    p.head0 = blockIdx.x % per_token * HEADS;
    p.tiles = smem;
    p.sums = (float *)(smem + TILES_BYTES);
    p.weights = smem + TILES_BYTES + 2 * SUMS * 4;
    p.own = shared_address(smem) + threadIdx.x / 32 * STAGES * OWN_BYTES;
    return p;
}

/* Over the 16 lanes that have the same heads. */
__device__ static inline float keys_max(float x)
{
#pragma unroll
    for (int i = KEYS / 2; i; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
/* The softmax of this lane's heads so far. */
struct softmax {
    float max[2], sum[2];
};
/* Weights of tile i from the sums of its scores; the factors by which they scale the output so far. */
__device__ static inline void weigh(struct softmax *t, float *factors, const struct place &p, int i, int n, float c)
{
    float w[2], factor[2];
    add_terms(w, p.sums + i % 2 * SUMS);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float score = i * KEYS + lane_key() < n ? w[h] * c : -INFINITY, top = fmaxf(t->max[h], keys_max(score));
        factor[h] = exp2_fast(t->max[h] - top);
        w[h] = exp2_fast(score - top);
        t->sum[h] = t->sum[h] * factor[h] + warp_sum(w[h], KEYS);
        t->max[h] = top;
    }
    if (lane_key() == 0) *(float2 *)(factors + i % 2 * HEADS + first_head()) = make_float2(factor[0], factor[1]);
    put_weights(p.weights, w, i);
}
/* Multiplies the rows of o by these factors. */
__device__ static inline void scale_rows(float o[2][8][4], const float *factors)
{
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float factor = factors[8 * r + threadIdx.x % 32 / 4];
#pragma unroll
        for (int j = 0; j < 16; j++) o[r / 2][j / 2][r % 2 * 2 + j % 2] *= factor;
    }
}

/* Between two barriers a warp multiplies tile i + 1 by the queries, weighs tile i and adds tile i - 1 to the output. */
static __global__ void __launch_bounds__(THREADS, 1) shared_fwd_mma_kernel(const struct shared_args a)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ __align__(8) float factors[2 * HEADS];
    const struct place p = place_of(a, smem, 0, a.n_tok);
    const int warp = threadIdx.x / 32;
    const struct sight s = sight_of(a, p.t);
    const int n = count_keys(a, s), n_tile = (n + KEYS - 1) / KEYS;
    const float c = a.scale * LOG2_E;
    const uint32_t weights = shared_address(p.weights);
    uint32_t q[1][4][2][4];
    float o[2][8][4] = {}, x[1][2][2][4];
    struct softmax t;
    load_heads(q[0], p.own, a.q + p.t * a.ld_q + (int64_t)p.head0 * SHARED_DIM);
    copy_keys(p.own, a, s, 0, n, find_entry(s, 0, n));
    copy_keys(p.own, a, s, 1, n, find_entry(s, 1, n));
    int entry = find_entry(s, 2, n);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        t.max[h] = a.sinks ? a.sinks[p.head0 + first_head() + h] * LOG2_E : -INFINITY;
        t.sum[h] = a.sinks ? 1.0f : 0.0f;
    }
    find_terms<1>(x, q, p.own, 0);
    put_terms(p.sums, x[0]);
    const auto start = [&](int i) {
        __syncthreads();
        copy_keys(p.own, a, s, i + 2, n, entry);
        entry = find_entry(s, i + 3, n);
        find_terms<1>(x, q, p.own, i + 1);
    };
    const auto finish = [&](int i) {
        weigh(&t, factors, p, i, n, c);
        put_terms(p.sums + (i + 1) % 2 * SUMS, x[0]);
    };
    start(0);
    finish(0);
    for (int i = 1; i < n_tile; i++) {
        start(i);
        scale_rows(o, factors + (i - 1) % 2 * HEADS);
        add_keys(o, weights, p.own, i - 1);
        finish(i);
    }
    __syncthreads();
    scale_rows(o, factors + (n_tile - 1) % 2 * HEADS);
    add_keys(o, weights, p.own, n_tile - 1);
    copy_wait<0>();
    __syncthreads();
    if (lane_key() == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factors[first_head() + h] = 1.0f / t.sum[h];
            a.lse[p.t * a.ld_lse + p.head0 + first_head() + h] = t.max[h] / LOG2_E + logf(t.sum[h]);
        }
    }
    __syncthreads();
    scale_rows(o, factors);
    store_rows<2, OWN>(a.o + p.t * a.ld_o + (int64_t)p.head0 * SHARED_DIM + warp * OWN, SHARED_DIM, HEADS, OWN, o, 1,
                       p.tiles + warp * STAGES * OWN_BYTES);
}

/* <dout, o> of this lane's heads; o, dout: of the block's heads. */
__device__ static inline void find_delta(float delta[2], const bf16 *o, const bf16 *dout)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SHARED_DIM / 8 / KEYS; i++) {
            const int64_t at = (first_head() + h) * SHARED_DIM + (i * KEYS + lane_key()) * 8;
            float u[8], v[8];
            unpack8(u, load16(o + at));
            unpack8(v, load16(dout + at));
#pragma unroll
            for (int e = 0; e < 8; e++) sum += u[e] * v[e];
        }
        delta[h] = warp_sum(sum, KEYS);
    }
}

/* Before the first barrier of a tile, a warp multiplies tile i + 1 by q and dout, and weighs tile i; after it, the warp
 * adds tile i to dq. */
static __global__ void __launch_bounds__(THREADS, 1)
    shared_dq_mma_kernel(const struct shared_args a, const struct shared_chunk x)
{
    extern __shared__ __align__(1024) char smem[];
    const struct place p = place_of(a, smem, x.first, x.n);
    const int warp = threadIdx.x / 32;
    const int64_t column = (int64_t)p.head0 * SHARED_DIM;
    /* scratch of this lane's key of tile 0 and its heads */
    const int64_t slots =
        ((int64_t)p.at * (a.n_head / SHARED_HEADS) + p.head0 / SHARED_HEADS) * x.n_slot * SHARED_HEADS +
        lane_key() * SHARED_HEADS + p.head0 % SHARED_HEADS + first_head();
    const struct sight s = sight_of(a, p.t);
    const int n = count_keys(a, s);
    uint32_t heads[2][4][2][4]; /* q, dout */
    float dq[2][8][4] = {}, terms[2][2][2][4], lse[2], delta[2];
    find_delta(delta, a.o + p.t * a.ld_o + column, a.dout + p.t * a.ld_dout + column);
#pragma unroll
    for (int h = 0; h < 2; h++) lse[h] = a.lse[p.t * a.ld_lse + p.head0 + first_head() + h] * LOG2_E;
    load_heads(heads[0], p.own, a.q + p.t * a.ld_q + column);
    load_heads(heads[1], p.own, a.dout + p.t * a.ld_dout + column);
    copy_keys(p.own, a, s, 0, n, find_entry(s, 0, n));
    copy_keys(p.own, a, s, 1, n, find_entry(s, 1, n));
    int entry = find_entry(s, 2, n);
    const auto put = [&] {
        put_terms(p.sums, terms[0]);
        put_terms(p.sums + SUMS, terms[1]);
    };
    find_terms<2>(terms, heads, p.own, 0);
    put();
    __syncthreads();
    for (int i = 0; i * KEYS < n; i++) {
        const int key = i * KEYS + lane_key();
        float w[2], ds[2];
        copy_keys(p.own, a, s, i + 2, n, entry);
        entry = find_entry(s, i + 3, n);
        find_terms<2>(terms, heads, p.own, i + 1);
        add_terms(w, p.sums);
        add_terms(ds, p.sums + SUMS);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            w[h] = exp2_fast(key < n ? w[h] * a.scale * LOG2_E - lse[h] : -INFINITY);
            ds[h] = w[h] * (ds[h] - delta[h]) * a.scale;
        }
        put_weights(p.weights, ds, i);
        if (key < n) {
            const int64_t to = slots + (int64_t)i * KEYS * SHARED_HEADS;
            *(uint32_t *)(x.p + to) = pack2(w[0], w[1]);
            *(uint32_t *)(x.ds + to) = pack2(ds[0], ds[1]);
        }
        __syncthreads();
        put();
        add_keys(dq, shared_address(p.weights), p.own, i);
        __syncthreads();
    }
    copy_wait<0>();
    __syncwarp();
    store_rows<2, OWN>(a.dq + p.t * a.ld_dq + column + warp * OWN, SHARED_DIM, HEADS, OWN, dq, 1,
                       p.tiles + warp * STAGES * OWN_BYTES);
}

/* ---- dkey */

/* Copies p and dout (kind 0), or ds and q, of a token and 64 heads: the rows of map, and 256 columns. */
__device__ static inline void copy_unit(uint32_t stage, const struct shared_args &a, const struct shared_chunk &x,
                                        int t, int group, int kind, const int *map, int half)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_group = a.n_head / SHARED_HEADS;
    const bf16 *weights = (kind ? x.ds : x.p) + ((int64_t)(t - x.first) * n_group + group) * x.n_slot * SHARED_HEADS;
    const bf16 *rows = (kind ? a.q + t * a.ld_q : a.dout + t * a.ld_dout) + (int64_t)group * SHARED_HEADS * SHARED_DIM +
                       half * SHARED_COLUMNS + lane * 8;
#pragma unroll
    for (int j = 0; j < ROWS / 32; j++) {
        const int r = threadIdx.x / 8 + 32 * j, c = threadIdx.x % 8, slot = map[r];
        copy_async16(stage + tile_offset<8>(r, c), weights + (int64_t)max(slot, 0) * SHARED_HEADS + c * 8,
                     slot < 0 ? 0 : 16);
    }
    const uint32_t right = stage + LEFT_BYTES + lane / 8 * PANEL_BYTES;
#pragma unroll
    for (int j = 0; j < SHARED_HEADS / WARPS; j++)
        copy_async16(right + tile_offset<8>(warp + WARPS * j, lane % 8), rows + (warp + WARPS * j) * SHARED_DIM, 16);
}

/* acc [32 rows, 64 columns] += weights times rows of heads */
__device__ static inline void add_unit(float acc[2][8][4], uint32_t weights, uint32_t panel)
{
    const uint32_t left = lane_rows<SHARED_HEADS>(weights), right = lane_rows<OWN>(panel);
#pragma unroll
    for (int k = 0; k < SHARED_HEADS / 16; k++) {
        uint32_t w[2][4];
        load_rows<2, SHARED_HEADS>(w, left, k);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t f[4];
            load_matrix4_trans(f, (right ^ (c << 5)) + k * 16 * OWN * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(acc[m][2 * c], w[m], f);
                mma_bf16(acc[m][2 * c + 1], w[m], f + 2);
            }
        }
    }
}

/* Stores the rows of `sum` that the sequence owns; rest: zeros in those that are not in `written`, a bit per row. */
__device__ static inline void store_sums(float *to, const float sum[2][8][4], int row, const struct shared_item &m,
                                         int4 owned, int *written, bool rest)
{
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (rest ? *written >> r & 1 : !owns(m, owned, row + 8 * r)) continue;
        *written |= 1 << r;
#pragma unroll
        for (int c = 0; c < 8; c++)
            *(float2 *)(to + 8 * r * SHARED_COLUMNS + 8 * c) =
                rest ? make_float2(0.0f, 0.0f) : make_float2(sum[r / 2][c][r % 2 * 2], sum[r / 2][c][r % 2 * 2 + 1]);
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    shared_dkey_mma_kernel(const struct shared_args a, const struct shared_chunk x)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ struct shared_live live;
    const struct shared_item item = item_of(a, x, blockIdx.x / BANDS);
    if (!item.seen) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
              low = blockIdx.x % BANDS * ROWS; /* rows low .. low+63 */
    int *map = (int *)(smem + 2 * STAGE_BYTES);
    map_item<ROWS>(map, &live, a, item, low);
    const int n_group = a.n_head / SHARED_HEADS, n_unit = live.n * n_group * 2;
    const uint32_t stages = shared_address(smem);
    const int row = low + warp / 4 * 32 + lane / 4;
    float *to =
        x.part + ((int64_t)(blockIdx.x / BANDS) * SHARED_BLOCK + row) * SHARED_COLUMNS + warp % 4 * OWN + lane % 4 * 2;
    int written = 0;
    float sum[2][8][4];
    const auto copy = [&](int u) {
        const int i = live.token[u / (2 * n_group)];
        copy_unit(stages + u % 2 * STAGE_BYTES, a, x, item.first + i, u / 2 % n_group, u % 2, map + i * ROWS,
                  item.half);
    };
    if (n_unit) copy(0);
    copy_commit();
    for (int u = 0; u < n_unit;) { /* a sequence: NaN in it does not reach the rows of another */
        const int4 owned = live.owned[live.token[u / (2 * n_group)]];
#pragma unroll
        for (int i = 0; i < 64; i++) sum[i / 32][i / 4 % 8][i % 4] = 0.0f;
#pragma unroll 1
        for (; u < n_unit && live.owned[live.token[u / (2 * n_group)]].x == owned.x; u++) {
            copy_wait<0>();
            __syncthreads(); /* unit u is complete, and all warps have read unit u - 1 */
            if (u + 1 < n_unit) copy(u + 1);
            copy_commit();
            const uint32_t stage = stages + u % 2 * STAGE_BYTES;
            add_unit(sum, stage + warp / 4 * 32 * SHARED_HEADS * 2, stage + LEFT_BYTES + warp % 4 * PANEL_BYTES);
        }
        store_sums(to, sum, row, item, owned, &written, false);
    }
    store_sums(to, sum, row, item, make_int4(0, 0, 0, 0), &written, true);
}

static void allow_shared_bytes(const void *kernel, int bytes)
{
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

void shared_fwd_mma(const struct shared_args *a)
{
    allow_shared_bytes((const void *)shared_fwd_mma_kernel, TOKEN_BYTES);
    shared_fwd_mma_kernel<<<grid_x((int64_t)a->n_tok * (a->n_head / HEADS)), THREADS, TOKEN_BYTES, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

void shared_dq_mma(const struct shared_args *a, const struct shared_chunk *x)
{
    allow_shared_bytes((const void *)shared_dq_mma_kernel, TOKEN_BYTES);
    shared_dq_mma_kernel<<<grid_x((int64_t)x->n * (a->n_head / HEADS)), THREADS, TOKEN_BYTES, cuda.stream>>>(*a, *x);
    CUDA_CHECK_LAUNCH();
}

void shared_dkey_mma(const struct shared_args *a, const struct shared_chunk *x)
{
    allow_shared_bytes((const void *)shared_dkey_mma_kernel, DKEY_BYTES);
    const unsigned grid = grid_x(ceil_div(x->n, SHARED_TOKENS) * (x->n_window + x->n_far) * 2 * BANDS);
    shared_dkey_mma_kernel<<<grid, THREADS, DKEY_BYTES, cuda.stream>>>(*a, *x);
    CUDA_CHECK_LAUNCH();
}
