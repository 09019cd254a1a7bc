/* attn_shared_mma.cu - attention with shared keys for every GPU since Ampere: groups of 64 heads of 512 columns, with
 * mma.sync. On Hopper, attn_shared_wgmma_fwd.cu and attn_shared_wgmma_bwd.cu replace it.
 *
 * Math, shapes, chunks: as attn_shared.cu.
 * Grid: forward and dq: a block of 8 warps per token and 32 heads. A warp has 64 of the 512 columns: its part of the
 *   queries (and of dout) stays in registers, and no other warp reads its part of the keys. So a score is the sum over
 *   8 warps, in shared memory, in their order; each warp then weighs 4 heads. Tiles of 32 keys, two stages, 99 KiB.
 *   dkey: 8 warps per item and 64 of its rows; two stages of 64 rows of weights and 256 columns of dout or q of 64
 *   heads, 88 KiB. One block per SM, of dkey two where shared memory has room.
 * Bound: shared memory, about 1400 clocks per tile of the forward, 2100 of dq, 800 per stage of dkey.
 * Numerics: f32 sums; p and ds rounded to bf16; no atomics, bitwise repeatable.
 * Measured: tests/RESULTS.md, "Attention with shared keys"; H200: dkey 1.37 ms with two blocks per SM, 1.98 with one (T
 * 4096, an entry per 4 tokens). */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/attn_shared.cuh"

enum {
    THREADS = 256,
    WARPS = 8,
    HEADS = 32, /* of a block */
    KEYS = 32,  /* of a tile */
    OWN = 64,   /* columns of a warp */
    OWN_BYTES = KEYS * OWN * 2,
    TILE_BYTES = WARPS * OWN_BYTES,
    SUM_BYTES = WARPS * HEADS * KEYS * 4,
    WEIGHT_BYTES = HEADS * KEYS * 2,
    TOKEN_BYTES = 2 * TILE_BYTES + SUM_BYTES + WEIGHT_BYTES,

    ROWS = 64, /* of a block of dkey */
    BANDS = SHARED_BLOCK / ROWS,
    LEFT_BYTES = ROWS * SHARED_HEADS * 2,
    PANEL_BYTES = SHARED_HEADS * OWN * 2,
    STAGE_BYTES = LEFT_BYTES + SHARED_COLUMNS / OWN * PANEL_BYTES,
    DKEY_BYTES = 2 * STAGE_BYTES + SHARED_TOKENS * ROWS * 4
};
static_assert(HEADS == KEYS, "a warp's part of the queries fits into a tile");

/* Number of keys of a token. All threads of the block call it. */
__device__ static inline int count_keys(const struct shared_args &a, const struct sight &s)
{
    int n = s.n_near + (s.list ? 0 : s.n_far);
    for (int p = 0; s.list && p < a.top; p += THREADS)
        n += __syncthreads_count(p + (int)threadIdx.x < a.top && listed(s, p + threadIdx.x));
    return n;
}

/* Copies this warp's columns of keys k0 .. k0+31 of a token, of n, into its part of a tile; zeros after the last. */
__device__ static inline void copy_keys(uint32_t own, const struct shared_args &a, const struct sight &s, int k0, int n)
{
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * OWN + lane % 8 * 8, k = k0 + lane;
    int row = -1; /* of key k: in kv, or after all rows of kv in entry */
    if (k < n) {
        const int e = k - s.n_near;
        row = e < 0 ? s.first_key + k : a.n_tok + s.first_entry + (s.list ? s.list[e] : e);
    }
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) {
        const int r = 4 * i + lane / 8, from = __shfl_sync(~0u, row, r);
        const bf16 *src = from < a.n_tok ? a.kv + max(from, 0) * a.ld_kv : a.entry + (from - a.n_tok) * a.ld_entry;
        copy_async16(own + tile_offset<8>(r, lane % 8), src + column, from < 0 ? 0 : 16);
    }
}
/* This warp's columns of 32 heads as A operands. own: a tile that is not in use. */
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

/* Writes this warp's terms of [32 heads, 32 keys]; a row's elements are permuted by pairs of banks. */
__device__ static inline int sum_offset(int head, int key) { return head * KEYS + (key ^ (head & 3) * 8); }
__device__ static inline void put_terms(float *sums, const float x[2][4][4])
{
    const int lane = threadIdx.x % 32;
    float *to = sums + threadIdx.x / 32 * HEADS * KEYS;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int head = 16 * m + lane / 4, key = 8 * n + lane % 4 * 2;
            *(float2 *)(to + sum_offset(head, key)) = make_float2(x[m][n][0], x[m][n][1]);
            *(float2 *)(to + sum_offset(head + 8, key)) = make_float2(x[m][n][2], x[m][n][3]);
        }
    }
}
/* Adds the terms of all warps for this warp's 4 heads, 4 warp + h, and the key `lane`. */
__device__ static inline void add_terms(float x[4], const float *sums)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < 4; h++) {
        x[h] = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x[h] += sums[w * HEADS * KEYS + sum_offset(4 * warp + h, lane)];
    }
}

/* Stores the weights of this warp's heads and key `lane` in the tile of A operands, [32 heads, 32 keys]. */
__device__ static inline void put_weights(char *to, const float x[4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 4; h++)
        *(bf16 *)(to + tile_offset<4>(threadIdx.x / 32 * 4 + h, lane / 8) + lane % 8 * 2) = __float2bfloat16_rn(x[h]);
}
/* acc [32 heads, this warp's columns] += weights times keys */
__device__ static inline void add_keys(float acc[2][8][4], uint32_t weights, uint32_t own)
{
    const int lane = threadIdx.x % 32;
    const uint32_t rows = lane_rows<OWN>(own);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        uint32_t w[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) load_matrix4(w[m], weights + tile_offset<4>(16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t f[4];
            load_matrix4_trans(f, (rows ^ (c << 5)) + k * 16 * OWN * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(acc[m][2 * c], w[m], f);
                mma_bf16(acc[m][2 * c + 1], w[m], f + 2);
            }
        }
    }
}

/* The block's token and first head, and its shared memory. */
struct place {
    int at, t, head0; /* at: token in the chunk */
    char *tiles, *weights;
    float *sums;
    uint32_t own; /* this warp's part of the first stage */
};
__device__ static inline struct place place_of(const struct shared_args &a, char *smem, int first, int n)
{
    const int per_token = a.n_head / HEADS;
    struct place p;
    p.at = n - 1 - blockIdx.x / per_token; /* tokens with the most entries first */
    p.t = first + p.at;
    p.head0 = blockIdx.x % per_token * HEADS;
    p.tiles = smem;
    p.sums = (float *)(smem + 2 * TILE_BYTES);
    p.weights = smem + 2 * TILE_BYTES + SUM_BYTES;
    p.own = shared_address(smem) + threadIdx.x / 32 * OWN_BYTES;
    return p;
}

static __global__ void __launch_bounds__(THREADS, 1) shared_fwd_mma_kernel(const struct shared_args a)
{
    extern __shared__ __align__(1024) char smem[];
    __shared__ float factors[HEADS];
    const struct place p = place_of(a, smem, 0, a.n_tok);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const struct sight s = sight_of(a, p.t);
    const int n = count_keys(a, s);
    const float c = a.scale * LOG2_E;
    uint32_t q[4][2][4];
    float o[2][8][4] = {}, max[4], sum[4];
    load_heads(q, p.own, a.q + p.t * a.ld_q + (int64_t)p.head0 * SHARED_DIM);
    copy_keys(p.own, a, s, 0, n);
    copy_commit();
#pragma unroll
    for (int h = 0; h < 4; h++) {
        max[h] = a.sinks ? a.sinks[p.head0 + 4 * warp + h] * LOG2_E : -INFINITY;
        sum[h] = a.sinks ? 1.0f : 0.0f;
    }
    for (int k0 = 0, stage = 0; k0 < n; k0 += KEYS, stage ^= 1) {
        const uint32_t own = p.own + stage * TILE_BYTES;
        float x[2][4][4] = {}, w[4];
        if (k0 + KEYS < n) copy_keys(p.own + (stage ^ 1) * TILE_BYTES, a, s, k0 + KEYS, n);
        copy_commit();
        copy_wait<1>();
        __syncwarp();
        dot_registers<2, 4, OWN>(x, q, lane_cols<OWN>(own));
        put_terms(p.sums, x);
        __syncthreads();
        add_terms(w, p.sums);
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const float score = k0 + lane < n ? w[h] * c : -INFINITY, top = fmaxf(max[h], warp_max(score));
            const float factor = exp2_fast(max[h] - top);
            w[h] = exp2_fast(score - top);
            sum[h] = sum[h] * factor + warp_sum(w[h]);
            max[h] = top;
            if (lane == 0) factors[4 * warp + h] = factor;
        }
        put_weights(p.weights, w);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float factor = factors[8 * r + lane / 4];
#pragma unroll
            for (int j = 0; j < 16; j++) o[r / 2][j / 2][r % 2 * 2 + j % 2] *= factor;
        }
        add_keys(o, shared_address(p.weights), own);
        __syncwarp(); /* all lanes have read this stage */
    }
    __syncthreads();
    if (lane < 4) {
        float total = sum[0], top = max[0];
#pragma unroll
        for (int h = 1; h < 4; h++) total = lane == h ? sum[h] : total, top = lane == h ? max[h] : top;
        factors[4 * warp + lane] = 1.0f / total;
        a.lse[p.t * a.ld_lse + p.head0 + 4 * warp + lane] = top / LOG2_E + logf(total);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float inverse = factors[8 * r + lane / 4];
#pragma unroll
        for (int j = 0; j < 16; j++) o[r / 2][j / 2][r % 2 * 2 + j % 2] *= inverse;
    }
    store_rows<2, OWN>(a.o + p.t * a.ld_o + (int64_t)p.head0 * SHARED_DIM + warp * OWN, SHARED_DIM, HEADS, OWN, o, 1,
                       p.tiles + warp * OWN_BYTES);
}

/* <dout, o> of this warp's heads. */
__device__ static inline void find_delta(float delta[4], const bf16 *o, const bf16 *dout)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t at = (4 * warp + h) * SHARED_DIM + i * 256 + lane * 8;
            float u[8], v[8];
            unpack8(u, load16(o + at));
            unpack8(v, load16(dout + at));
#pragma unroll
            for (int e = 0; e < 8; e++) sum += u[e] * v[e];
        }
        delta[h] = warp_sum(sum);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    shared_dq_mma_kernel(const struct shared_args a, const struct shared_chunk x)
{
    extern __shared__ __align__(1024) char smem[];
    const struct place p = place_of(a, smem, x.first, x.n);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t column = (int64_t)p.head0 * SHARED_DIM;
    /* scratch of key `lane` and this warp's heads */
    const int64_t slots =
        ((int64_t)p.at * (a.n_head / SHARED_HEADS) + p.head0 / SHARED_HEADS) * x.n_slot * SHARED_HEADS +
        lane * SHARED_HEADS + p.head0 % SHARED_HEADS + 4 * warp;
    const struct sight s = sight_of(a, p.t);
    const int n = count_keys(a, s);
    uint32_t q[4][2][4], dout[4][2][4];
    float dq[2][8][4] = {}, lse[4], delta[4];
    find_delta(delta, a.o + p.t * a.ld_o + column, a.dout + p.t * a.ld_dout + column);
#pragma unroll
    for (int h = 0; h < 4; h++) lse[h] = a.lse[p.t * a.ld_lse + p.head0 + 4 * warp + h] * LOG2_E;
    load_heads(q, p.own, a.q + p.t * a.ld_q + column);
    load_heads(dout, p.own, a.dout + p.t * a.ld_dout + column);
    copy_keys(p.own, a, s, 0, n);
    copy_commit();
    for (int k0 = 0, stage = 0; k0 < n; k0 += KEYS, stage ^= 1) {
        const uint32_t own = p.own + stage * TILE_BYTES;
        float w[4], ds[4];
        if (k0 + KEYS < n) copy_keys(p.own + (stage ^ 1) * TILE_BYTES, a, s, k0 + KEYS, n);
        copy_commit();
        copy_wait<1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) { /* scores, then dp */
            float terms[2][4][4] = {};
            dot_registers<2, 4, OWN>(terms, i ? dout : q, lane_cols<OWN>(own));
            if (i) __syncthreads(); /* the scores have been read */
            put_terms(p.sums, terms);
            __syncthreads();
            add_terms(i ? ds : w, p.sums);
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            w[h] = k0 + lane < n ? exp2_fast(w[h] * a.scale * LOG2_E - lse[h]) : 0.0f;
            ds[h] = w[h] * (ds[h] - delta[h]) * a.scale;
        }
        put_weights(p.weights, ds);
        if (k0 + lane < n) {
            const int64_t to = slots + (int64_t)k0 * SHARED_HEADS;
            *(uint2 *)(x.p + to) = make_uint2(pack2(w[0], w[1]), pack2(w[2], w[3]));
            *(uint2 *)(x.ds + to) = make_uint2(pack2(ds[0], ds[1]), pack2(ds[2], ds[3]));
        }
        __syncthreads();
        add_keys(dq, shared_address(p.weights), own);
        __syncwarp(); /* all lanes have read this stage */
    }
    store_rows<2, OWN>(a.dq + p.t * a.ld_dq + column + warp * OWN, SHARED_DIM, HEADS, OWN, dq, 1,
                       p.tiles + warp * OWN_BYTES);
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
