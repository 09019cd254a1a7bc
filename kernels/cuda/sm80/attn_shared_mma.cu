/* attn_shared_mma.cu - attention with shared keys for every GPU since Ampere: groups of 64 heads of 512 columns, with
 * mma.sync. On Hopper, attn_shared_wgmma_fwd.cu and attn_shared_wgmma_bwd.cu replace it.
 *
 * Math, shapes: as attn_shared.cu; chunks and items: attn_shared.cuh.
 * Grid: forward and dq: a block of 4 warps per token and 32 heads, two blocks per SM where shared memory has room. A
 *   warp has 128 of the 512 columns: its part of the queries stays in registers, and no other warp reads its part of
 *   the keys. So a score is the sum over 4 warps, in shared memory, in their order; each warp then computes the weights
 *   of 8 heads. Tiles of 16 keys: three stages in the forward, 66.3 KiB; two in dq, with dout in shared memory 80 KiB.
 *   One block multiplies while the other computes weights, loads or stores. dkey: 8 warps per item and 64 of its rows;
 *   two stages of 64 rows of weights and 256 columns of dout or q of 64 heads, 88 KiB. Two blocks per SM where shared
 *   memory has room.
 * Bound: clocks for a tile of 16 keys and 32 heads: products, at the rate of compute capability 8.0, 512 in the forward
 *   and 768 in dq; shared memory, at 128 bytes per clock, 550 and 900, for a stage of dkey 800. From L2 16 KiB per
 *   tile.
 * Numerics: f32 sums; p and ds rounded to bf16. */
#include "kernels/cuda/parts/attn.cuh"
#include "kernels/cuda/parts/attn_shared.cuh"

enum {
    WARPS = 4, /* of a block of the forward and of dq */
    THREADS = WARPS * 32,
    HEADS = 32,               /* of such a block */
    KEYS = 16,                /* of a tile */
    OWN = SHARED_DIM / WARPS, /* columns of a warp */
    OWN_BYTES = KEYS * OWN * 2,
    HEADS_BYTES = HEADS * OWN * 2, /* of a warp's columns */
    SUMS = WARPS * HEADS * KEYS,   /* terms of a tile's products */
    WEIGHTS_BYTES = HEADS * KEYS * 2,

    FWD_STAGES = 3, /* tiles in shared memory */
    FWD_TILES = WARPS * FWD_STAGES * OWN_BYTES,
    FWD_BYTES = FWD_TILES + 2 * SUMS * 4 + 2 * WEIGHTS_BYTES + 2 * HEADS * 4,
    DQ_STAGES = 2,
    DQ_TILES = WARPS * DQ_STAGES * OWN_BYTES,
    DQ_BYTES = DQ_TILES + WARPS * HEADS_BYTES + 2 * SUMS * 4,

    DKEY_WARPS = 8,
    DKEY_THREADS = DKEY_WARPS * 32,
    ROWS = 64, /* of a block of dkey */
    BANDS = SHARED_BLOCK / ROWS,
    PANEL = 64, /* columns of a warp */
    LEFT_BYTES = ROWS * SHARED_HEADS * 2,
    PANEL_BYTES = SHARED_HEADS * PANEL * 2,
    STAGE_BYTES = LEFT_BYTES + SHARED_COLUMNS / PANEL * PANEL_BYTES,
    DKEY_BYTES = 2 * STAGE_BYTES + SHARED_TOKENS * ROWS * 4
};
static_assert((int)HEADS_BYTES == 2 * (int)OWN_BYTES, "a warp's part of the queries fits into two stages");

/* The key of a tile that this lane finds for copy_keys: each half of a warp copies every second key. */
__device__ static inline int found_key(void) { return threadIdx.x % 8 * 2 + threadIdx.x % 32 / 16; }
/* This lane's key of tile i, of a token t with n keys. A result e >= 0 is entry e, a negative one row t + 1 + e of kv.
 * Callers find a key one tile ahead of its copy, so that no warp waits for the list. */
__device__ static inline int find_key(const struct sight &s, int i, int n)
{
    const int k = i * KEYS + found_key(), e = k - s.n_near;
    return s.list && e >= 0 && k < n ? s.list[e] : e;
}
/* Starts the copy of this warp's columns of tile i of token t, as one group; zeros after the last key. found: from
 * find_key. */
__device__ static inline void copy_keys(uint32_t to, const struct shared_args &a, const struct sight &s, int t, int i,
                                        int n, int found)
{
    const int lane = threadIdx.x % 32, chunk = lane % 16, column = threadIdx.x / 32 * OWN + chunk * 8;
    const int left = n - i * KEYS - lane / 16;
    const bf16 *key = found < 0 ? a.kv : a.entry;
    key += ((found < 0 ? t + 1 : s.first_entry) + found) * (found < 0 ? a.ld_kv : a.ld_entry);
    if (i * KEYS + found_key() >= n) key = a.kv; /* not read */
    to += tile_offset<OWN / 8>(lane / 16, chunk);
#pragma unroll
    for (int j = 0; j < KEYS / 2; j++) {
        const uint64_t from = __shfl_sync(~0u, (unsigned long long)key, j, 16);
        copy_async16((to ^ (j % 4 << 5)) + j * 2 * OWN * 2, (const bf16 *)from + column, 2 * j < left ? 16 : 0);
    }
    copy_commit();
}
/* Starts the copy of this warp's columns of 32 heads, as one group. */
__device__ static inline void copy_heads(uint32_t to, const bf16 *heads)
{
    const int lane = threadIdx.x % 32, chunk = lane % 16, row = lane / 16;
    const bf16 *from = heads + row * SHARED_DIM + threadIdx.x / 32 * OWN + chunk * 8;
    to += tile_offset<OWN / 8>(row, chunk);
#pragma unroll
    for (int j = 0; j < HEADS / 2; j++)
        copy_async16((to ^ (j % 4 << 5)) + j * 2 * OWN * 2, from + 2 * j * SHARED_DIM, 16);
    copy_commit();
}
/* Loads the heads of copy_heads as A operands. */
__device__ static inline void load_heads(uint32_t x[OWN / 16][2][4], uint32_t heads)
{
#pragma unroll
    for (int step = 0; step < OWN / 16; step++) load_rows<2, OWN>(x[step], lane_rows<OWN>(heads), step);
}

/* x [32 heads, 16 keys]: product of q and a tile over this warp's columns. */
__device__ static inline void find_scores(float x[2][2][4], const uint32_t q[OWN / 16][2][4], uint32_t tile)
{
    const uint32_t cols = lane_cols<OWN>(tile);
#pragma unroll
    for (int j = 0; j < 16; j++) x[j / 8][j / 4 % 2][j % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < OWN / 16; step++) dot_step<2, 2, OWN>(x, q[step], cols, step);
}

/* acc [32 heads, this warp's columns] += weights of a tile times its keys. rows: address from lane_rows. */
__device__ static inline void add_keys(float acc[2][OWN / 8][4], const uint32_t w[2][4], uint32_t rows)
{
#pragma unroll
    for (int c = 0; c < OWN / 16; c++) {
        uint32_t f[4];
        load_matrix4_trans(f, rows ^ (c << 5));
#pragma unroll
        for (int m = 0; m < 2; m++) {
            mma_bf16(acc[m][2 * c], w[m], f);
            mma_bf16(acc[m][2 * c + 1], w[m], f + 2);
        }
    }
}

/* The block's token and first head. */
struct place {
    int at, t, head0; /* at: token in the chunk */
};
__device__ static inline struct place place_of(const struct shared_args &a, int first, int n)
{
    const int per_token = a.n_head / HEADS;
    struct place p;
    p.at = n - 1 - blockIdx.x / per_token; /* tokens with the most entries first */
    p.t = first + p.at;
    p.head0 = blockIdx.x % per_token * HEADS;
    return p;
}

/* ---- forward */

/* Index in shared memory of a term, a warp's part of a score; without bank conflicts in put_terms and add_terms. */
__device__ static inline int sum_offset(int head, int key) { return head * KEYS + (key ^ (head & 2) * 4); }
/* Writes this warp's terms of [32 heads, 16 keys]. */
__device__ static inline void put_terms(float *sums, const float x[2][2][4])
{
    const int lane = threadIdx.x % 32, at = threadIdx.x / 32 * HEADS * KEYS + sum_offset(lane / 4, lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float *to = sums + (at ^ 8 * n) + 16 * m * KEYS;
            *(float2 *)to = make_float2(x[m][n][0], x[m][n][1]);
            *(float2 *)(to + 8 * KEYS) = make_float2(x[m][n][2], x[m][n][3]);
        }
    }
}

/* The head and the first of four keys of a tile whose weights this lane computes. Four lanes have the same head. */
__device__ static inline int lane_head(void) { return threadIdx.x / 4; }
__device__ static inline int lane_key(void) { return threadIdx.x % 4 * 4; }

/* Adds the terms of all warps for this lane's head and keys. */
__device__ static inline void add_terms(float x[4], const float *sums)
{
    const float *from = sums + sum_offset(lane_head(), lane_key());
    float4 y[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) y[w] = *(const float4 *)(from + w * HEADS * KEYS);
    x[0] = y[0].x, x[1] = y[0].y, x[2] = y[0].z, x[3] = y[0].w;
#pragma unroll
    for (int w = 1; w < WARPS; w++) x[0] += y[w].x, x[1] += y[w].y, x[2] += y[w].z, x[3] += y[w].w;
}

/* Byte offset of 8 keys of a head in the weights of a tile, without bank conflicts of ldmatrix. */
__device__ static inline uint32_t weight_offset(int head, int chunk)
{
    return head * KEYS * 2 + ((chunk ^ (head >> 2 & 1)) << 4);
}
__device__ static inline void put_weights(char *to, const uint2 &x)
{
    *(uint2 *)(to + weight_offset(lane_head(), lane_key() / 8) + lane_key() % 8 * 2) = x;
}
__device__ static inline void load_weights(uint32_t w[2][4], uint32_t weights)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) load_matrix4(w[m], weights + weight_offset(16 * m + lane % 16, lane / 16));
}

/* The softmax of this lane's head so far; sum: of this lane's keys. */
struct softmax {
    float max, sum;
};
/* Computes the weights of tile i from the sums of its scores, and the factors by which the output so far is rescaled.
 * The maximum grows only when a score exceeds it by more than 8: weights stay below 2^8, and the output is rarely
 * rescaled. */
__device__ static inline void weigh(struct softmax *t, float *factor, char *weights, const float *sums, int i, int n,
                                    float c)
{
    float w[4];
    add_terms(w, sums);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = i * KEYS + lane_key() + j < n ? w[j] * c : -INFINITY;
    float top = fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const bool grown = top > t->max + 8.0f;
    const float f = grown ? exp2_fast(t->max - top) : 1.0f;
    if (grown) t->max = top;
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = exp2_fast(w[j] - t->max);
    t->sum = t->sum * f + ((w[0] + w[1]) + (w[2] + w[3]));
    if (lane_key() == 0) factor[lane_head()] = f;
    put_weights(weights, make_uint2(pack2(w[0], w[1]), pack2(w[2], w[3])));
}
/* Multiplies the rows of o by the factors from weigh, most of which are 1. */
__device__ static inline void scale_rows(float o[2][OWN / 8][4], const float *factors)
{
    float f[4];
#pragma unroll
    for (int r = 0; r < 4; r++) f[r] = factors[8 * r + threadIdx.x % 32 / 4];
    if (!__any_sync(~0u, f[0] != 1.0f || f[1] != 1.0f || f[2] != 1.0f || f[3] != 1.0f)) return;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int j = 0; j < OWN / 4; j++) o[r / 2][j / 2][r % 2 * 2 + j % 2] *= f[r];
    }
}

/* Between two barriers a warp adds tile i - 1 to the output, multiplies tile i + 1 by the queries and computes the
 * weights of tile i. */
static __global__ void __launch_bounds__(THREADS, 2) shared_fwd_mma_kernel(const struct shared_args a)
{
    extern __shared__ __align__(1024) char smem[];
    const struct place p = place_of(a, 0, a.n_tok);
    const int warp = threadIdx.x / 32;
    char *tiles = smem + warp * FWD_STAGES * OWN_BYTES, *weights = smem + FWD_TILES + 2 * SUMS * 4;
    float *sums = (float *)(smem + FWD_TILES), *factors = (float *)(weights + 2 * WEIGHTS_BYTES);
    const uint32_t own = shared_address(tiles);
    const auto tile = [&](int i) { return own + (i + 2) % FWD_STAGES * OWN_BYTES; };
    uint32_t q[OWN / 16][2][4];
    float o[2][OWN / 8][4] = {}, x[2][2][4];
    copy_heads(own, a.q + p.t * a.ld_q + (int64_t)p.head0 * SHARED_DIM); /* into the stages of tiles 1 and 2 */
    const struct sight s = sight_of(a, p.t);
    const int n = count_keys(a, s);
    copy_keys(tile(0), a, s, p.t, 0, n, find_key(s, 0, n));
    copy_wait<1>();
    __syncwarp();
    load_heads(q, own);
    __syncwarp();
    copy_keys(tile(1), a, s, p.t, 1, n, find_key(s, 1, n));
    int found = find_key(s, 2, n);
    const float c = a.scale * LOG2_E;
    struct softmax t;
    t.max = a.sinks ? a.sinks[p.head0 + lane_head()] * LOG2_E : -INFINITY;
    t.sum = a.sinks && lane_key() == 0 ? 1.0f : 0.0f;
    const auto multiply = [&](int i) {
        copy_wait<1>();
        __syncwarp();
        find_scores(x, q, tile(i));
    };
    const auto add = [&](int i) {
        scale_rows(o, factors + i % 2 * HEADS);
        const uint32_t rows = lane_rows<OWN>(tile(i));
        uint32_t w[2][4];
        load_weights(w, shared_address(weights) + i % 2 * WEIGHTS_BYTES);
        add_keys(o, w, rows);
        __syncwarp();
    };
    multiply(0);
    put_terms(sums, x);
    const int last = (n - 1) / KEYS;
    for (int i = 0; i <= last; i++) {
        __syncthreads();
        if (i) add(i - 1);
        copy_keys(tile(i + 2), a, s, p.t, i + 2, n, found);
        found = find_key(s, i + 3, n);
        if (i < last) multiply(i + 1);
        weigh(&t, factors + i % 2 * HEADS, weights + i % 2 * WEIGHTS_BYTES, sums + i % 2 * SUMS, i, n, c);
        if (i < last) put_terms(sums + (i + 1) % 2 * SUMS, x);
    }
    __syncthreads();
    add(last);
    copy_wait<0>();
    t.sum = warp_sum(t.sum, 4);
    __syncthreads();
    if (lane_key() == 0) {
        factors[lane_head()] = 1.0f / t.sum;
        a.lse[p.t * a.ld_lse + p.head0 + lane_head()] = t.max / LOG2_E + logf(t.sum);
    }
    __syncthreads();
    scale_rows(o, factors);
    store_rows<2, OWN>(a.o + p.t * a.ld_o + (int64_t)p.head0 * SHARED_DIM + warp * OWN, SHARED_DIM, HEADS, OWN, o, 1,
                       tiles);
}

/* ---- dq */

/* In dq each warp rotates the order of the heads: row r of the operands of warp w is head (r + 8 w) % 32. So the first
 * 8 rows are the heads whose weights the warp computes, and its terms of these stay in registers. Sums of a tile are
 * [4, 4, 2, 32] float2: element [w, r], r = 1, 2, 3, has the terms that warp w - r computed for the 8 heads of warp w
 * and 16 keys, in the layout of an accumulator; element [w, 0] has the weights of these heads. */
__device__ static inline int turned(int row) { return (row + threadIdx.x / 32 * 8) % HEADS; }
/* Returns x, and hides from the compiler that x is constant. So addresses derived from x are computed again for each
 * tile; registers do not suffice to keep them. */
__device__ static inline uint32_t hidden(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}
/* x, y [32 heads, 16 keys] = q and dout times a tile, over this warp's columns. rows: addresses of dout in shared
 * memory. */
__device__ static inline void find_both(float x[2][2][4], float y[2][2][4], const uint32_t q[OWN / 16][2][4],
                                        const uint32_t rows[2], uint32_t cols)
{
    uint32_t key[2][4], d[2][4];
#pragma unroll
    for (int j = 0; j < 16; j++) x[j / 8][j / 4 % 2][j % 4] = y[j / 8][j / 4 % 2][j % 4] = 0.0f;
    load_matrix4(key[0], cols);
    load_matrix4(d[0], rows[0]);
#pragma unroll
    for (int step = 0; step < OWN / 16; step++) {
        const uint32_t *f = key[step % 2];
        load_matrix4(d[1], rows[1] ^ (step << 5));
        if (step + 1 < OWN / 16) load_matrix4(key[(step + 1) % 2], cols ^ (step + 1 << 5));
#pragma unroll
        for (int j = 0; j < 4; j++) mma_bf16(x[j / 2][j % 2], q[step][j / 2], f + j % 2 * 2);
#pragma unroll
        for (int j = 0; j < 2; j++) mma_bf16(y[0][j], d[0], f + j * 2);
        if (step + 1 < OWN / 16) load_matrix4(d[0], rows[0] ^ (step + 1 << 5));
#pragma unroll
        for (int j = 0; j < 2; j++) mma_bf16(y[1][j], d[1], f + j * 2);
    }
}
/* Terms of rows 8 r .. 8 r + 7 and keys 8 n .. 8 n + 7 of this lane. */
__device__ static inline float2 terms_of(const float x[2][2][4], int r, int n)
{
    return make_float2(x[r / 2][n][r % 2 * 2], x[r / 2][n][r % 2 * 2 + 1]);
}
/* Stores this warp's terms for the heads of the other warps, which add them. own: the terms for its own heads. */
__device__ static inline void give_terms(float2 *sums, float2 own[2], const float x[2][2][4])
{
#pragma unroll
    for (int j = 0; j < 2 * WARPS; j++) {
        const int r = j / 2, n = j % 2, to = (threadIdx.x / 32 + r) % WARPS;
        (r ? sums + ((to * WARPS + r) * 2 + n) * 32 + threadIdx.x % 32 : own + n)[0] = terms_of(x, r, n);
    }
}
__device__ static inline void take_terms(float x[4], const float2 own[2], const float2 *sums)
{
    float2 y[2 * WARPS];
#pragma unroll
    for (int j = 2; j < 2 * WARPS; j++) y[j] = sums[(threadIdx.x / 32 * WARPS * 2 + j) * 32 + threadIdx.x % 32];
    x[0] = own[0].x, x[1] = own[0].y, x[2] = own[1].x, x[3] = own[1].y;
#pragma unroll
    for (int j = 2; j < 2 * WARPS; j++) x[j % 2 * 2] += y[j].x, x[j % 2 * 2 + 1] += y[j].y;
}
/* Byte offset of 8 keys of a head in a tile's sums, without bank conflicts of ldmatrix. */
__device__ static inline uint32_t shared_weight(int head, int chunk)
{
    return head / 8 * WARPS * 32 * 16 + head % 8 * KEYS * 2 + ((chunk ^ (head >> 2 & 1)) << 4);
}
/* This lane has keys lane_pair(), + 1, + 8 and + 9 of a tile. */
__device__ static inline int lane_pair(void) { return threadIdx.x % 4 * 2; }
/* A lane stores in scratch the weights of 8 heads for one of the keys 8 half .. 8 half + 7 of a tile. Head 8 j + 2 i +
 * e of 32 is element 8 i + 2 j + e in scratch, as ldmatrix gives a lane two of each 8. n_key: keys of the tile from 8
 * half on. */
__device__ static inline void store_weights(bf16 *to, const float2 *sums, int half, int n_key)
{
    const int lane = threadIdx.x % 32;
    uint32_t w[4];
    load_matrix4_trans(w, shared_address(sums) + shared_weight(lane, half));
    if (lane / 4 < n_key) store16(to, make_uint4(w[0], w[1], w[2], w[3]));
}

/* Loads o of this lane's head, a quarter of its columns. volatile keeps the compiler from moving the loads. */
__device__ static inline void load_outputs(uint4 u[16], const bf16 *o)
{
#pragma unroll
    for (int i = 0; i < SHARED_DIM / 8 / 4; i++) {
        const bf16 *from = o + lane_head() * SHARED_DIM + (i * 4 + threadIdx.x % 4) * 8;
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(u[i].x), "=r"(u[i].y), "=r"(u[i].z), "=r"(u[i].w)
                     : "l"(__cvta_generic_to_global(from)));
    }
}
/* <dout, o> of this lane's head. dout: of all heads in shared memory, a part per warp. */
__device__ static inline float find_delta(const uint4 o[16], const char *dout)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARED_DIM / 8 / 4; i++) {
        const int chunk = i * 4 + threadIdx.x % 4, part = chunk / (OWN / 8);
        float u[8], v[8];
        unpack8(u, o[i]);
        unpack8(v, load16(dout + part * HEADS_BYTES + tile_offset<OWN / 8>(lane_head(), chunk % (OWN / 8))));
#pragma unroll
        for (int e = 0; e < 8; e++) sum += u[e] * v[e];
    }
    return warp_sum(sum, 4);
}
/* Starts the copy of this warp's columns of 16 heads. */
__device__ static inline void copy_half(uint32_t to, const bf16 *heads)
{
    const int lane = threadIdx.x % 32, chunk = lane % 16, row = lane / 16;
    const bf16 *from = heads + row * SHARED_DIM + threadIdx.x / 32 * OWN + chunk * 8;
    to += tile_offset<OWN / 8>(row, chunk);
#pragma unroll
    for (int j = 0; j < HEADS / 4; j++)
        copy_async16((to ^ (j % 4 << 5)) + j * 2 * OWN * 2, from + 2 * j * SHARED_DIM, 16);
}
/* Stores dq through `tile`, from the rotated order of heads. */
__device__ static inline void store_turned(bf16 *dst, const float acc[2][OWN / 8][4], char *tile)
{
    const int lane = threadIdx.x % 32, c = lane % (OWN / 8);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2 * OWN / 8; j++) {
        const int m = j / (OWN / 8), n = j % (OWN / 8);
        char *p = tile + (16 * m + lane / 4) * OWN * 2 + ((n ^ (lane / 4)) << 4) + lane % 4 * 4;
        *(uint32_t *)p = pack2(acc[m][n][0], acc[m][n][1]);
        *(uint32_t *)(p + 8 * OWN * 2) = pack2(acc[m][n][2], acc[m][n][3]);
    }
    __syncwarp();
    for (int r = lane / (OWN / 8); r < HEADS; r += 2)
        *(uint4 *)(dst + turned(r) * SHARED_DIM + c * 8) = *(const uint4 *)(tile + tile_offset<OWN / 8>(r, c));
}

/* Between the first and the second barrier a warp computes the weights of tile i; after the second, it adds tile i to
 * dq and multiplies tile i + 1 by q and dout. */
static __global__ void __launch_bounds__(THREADS, 2)
    shared_dq_mma_kernel(const struct shared_args a, const struct shared_chunk x)
{
    extern __shared__ __align__(1024) char smem[];
    const struct place p = place_of(a, x.first, x.n);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t column = (int64_t)p.head0 * SHARED_DIM;
    char *tiles = smem + warp * DQ_STAGES * OWN_BYTES, *douts = smem + DQ_TILES;
    float2(*sums)[SUMS / 2] = (float2(*)[SUMS / 2])(douts + WARPS * HEADS_BYTES);
    const uint32_t own = shared_address(tiles), dout = shared_address(douts) + warp * HEADS_BYTES;
    const auto tile = [&](int i) { return own + i % DQ_STAGES * OWN_BYTES; };
    const int row = turned(lane % 16); /* this lane's row of the first 16 heads; of the others it is row ^ 16 */
    uint32_t q[OWN / 16][2][4];
    float dq[2][OWN / 8][4] = {};
    copy_half(own + OWN_BYTES, a.q + p.t * a.ld_q + column);
    copy_half(shared_address(sums) + warp * OWN_BYTES, a.q + p.t * a.ld_q + column + 16 * SHARED_DIM);
    copy_commit();
    copy_heads(dout, a.dout + p.t * a.ld_dout + column);
    const struct sight s = sight_of(a, p.t);
    const int n = count_keys(a, s);
    copy_keys(tile(0), a, s, p.t, 0, n, find_key(s, 0, n));
    uint4 o[16];
    load_outputs(o, a.o + p.t * a.ld_o + column);
    const float lse = a.lse[p.t * a.ld_lse + p.head0 + lane_head()] * LOG2_E;
    copy_wait<2>();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int head = row ^ 16 * m;
        const uint32_t from = (head < 16 ? own + OWN_BYTES : shared_address(sums) + warp * OWN_BYTES) +
                              tile_offset<OWN / 8>(head % 16, lane / 16);
#pragma unroll
        for (int step = 0; step < OWN / 16; step++) load_matrix4(q[step][m], from ^ (step << 5));
    }
    __syncthreads();
    copy_keys(tile(1), a, s, p.t, 1, n, find_key(s, 1, n));
    int found = find_key(s, 2, n);
    float2 terms[2][2];
    const auto multiply = [&](int i) {
        copy_wait<1>();
        __syncwarp();
        float y[2][2][2][4];
        const uint32_t rows[2] = {hidden(dout + tile_offset<OWN / 8>(row, lane / 16)),
                                  hidden(dout + tile_offset<OWN / 8>(row ^ 16, lane / 16))};
        find_both(y[0], y[1], q, rows, lane_cols<OWN>(tile(i)));
#pragma unroll
        for (int j = 0; j < 2; j++) give_terms(sums[j], terms[j], y[j]);
    };
    multiply(0);
    __syncthreads();
    const float delta = find_delta(o, douts) * a.scale, c = a.scale * LOG2_E;
    /* each warp stores half of a tile, of p or of ds */
    const int half = warp % 2;
    bf16 *to = (warp < 2 ? x.p : x.ds) +
               (((int64_t)p.at * (a.n_head / SHARED_HEADS) + p.head0 / SHARED_HEADS) * x.n_slot + 8 * half + lane / 4) *
                   SHARED_HEADS +
               p.head0 % SHARED_HEADS + lane % 4 * 8;
    const int at = shared_weight(lane_head(), 0) + lane % 4 * 4;
    for (int i = 0; i * KEYS < n; i++, to += KEYS * SHARED_HEADS) {
        const int n_key = n - i * KEYS - lane_pair(); /* from this lane's first on */
        float w[2][4];
        take_terms(w[0], terms[0], sums[0]);
        take_terms(w[1], terms[1], sums[1]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[0][j] = exp2_fast(j / 2 * 8 + j % 2 < n_key ? w[0][j] * c - lse : -INFINITY);
            w[1][j] = w[0][j] * (w[1][j] * a.scale - delta);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            *(uint32_t *)((char *)sums[j / 2] + (at ^ j % 2 * 16)) =
                pack2(w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
        __syncthreads();
        store_weights(to, sums[warp / 2], half, n - i * KEYS - 8 * half);
        uint32_t ds[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            load_matrix4(ds[m], shared_address(sums[1]) + shared_weight(row ^ 16 * m, lane / 16));
        add_keys(dq, ds, lane_rows<OWN>(tile(i)));
        __syncwarp();
        copy_keys(tile(i), a, s, p.t, i + 2, n, found);
        found = find_key(s, i + 3, n);
        if ((i + 1) * KEYS < n) multiply(i + 1);
        __syncthreads();
    }
    copy_wait<0>();
    store_turned(a.dq + p.t * a.ld_dq + column + warp * OWN, dq, tiles);
}

/* ---- dkey */

/* Copies p and dout (kind 0), or ds and q, of a token and 64 heads: p or ds of the keys in map (map_token), 256 columns
 * of dout or q. */
__device__ static inline void copy_unit(uint32_t stage, const struct shared_args &a, const struct shared_chunk &x,
                                        int t, int group, int kind, const int *map, int half)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_group = a.n_head / SHARED_HEADS;
    const bf16 *weights = (kind ? x.ds : x.p) + ((int64_t)(t - x.first) * n_group + group) * x.n_slot * SHARED_HEADS;
    const bf16 *rows = (kind ? a.q + t * a.ld_q : a.dout + t * a.ld_dout) + (int64_t)group * SHARED_HEADS * SHARED_DIM +
                       (warp / 2 * 8 + warp % 2) * SHARED_DIM + half * SHARED_COLUMNS + lane * 8;
#pragma unroll
    for (int j = 0; j < ROWS / 32; j++) {
        const int r = threadIdx.x / 8 + 32 * j, c = threadIdx.x % 8, slot = map[r];
        copy_async16(stage + tile_offset<8>(r, c), weights + (int64_t)max(slot, 0) * SHARED_HEADS + c * 8,
                     slot < 0 ? 0 : 16);
    }
    const uint32_t right = stage + LEFT_BYTES + lane / 8 * PANEL_BYTES;
#pragma unroll
    for (int j = 0; j < SHARED_HEADS / DKEY_WARPS; j++) /* in the order of heads in scratch */
        copy_async16(right + tile_offset<8>(warp + DKEY_WARPS * j, lane % 8),
                     rows + (j / 4 * 32 + j % 4 * 2) * SHARED_DIM, 16);
}

/* acc [32 rows, 64 columns] += weights times rows of heads */
__device__ static inline void add_unit(float acc[2][8][4], uint32_t weights, uint32_t panel)
{
    const uint32_t left = lane_rows<SHARED_HEADS>(weights), right = lane_rows<PANEL>(panel);
#pragma unroll
    for (int k = 0; k < SHARED_HEADS / 16; k++) {
        uint32_t w[2][4];
        load_rows<2, SHARED_HEADS>(w, left, k);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            uint32_t f[4];
            load_matrix4_trans(f, (right ^ (c << 5)) + k * 16 * PANEL * 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(acc[m][2 * c], w[m], f);
                mma_bf16(acc[m][2 * c + 1], w[m], f + 2);
            }
        }
    }
}

/* Stores the rows of `sum` that belong to the sequence, and sets their bits in *written. rest: instead stores zeros in
 * the rows without a bit. */
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

static __global__ void __launch_bounds__(DKEY_THREADS, 2)
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
    float *to = x.part + ((int64_t)(blockIdx.x / BANDS) * SHARED_BLOCK + row) * SHARED_COLUMNS + warp % 4 * PANEL +
                lane % 4 * 2;
    int written = 0;
    float sum[2][8][4];
    const auto copy = [&](int u) {
        const int i = live.token[u / (2 * n_group)];
        copy_unit(stages + u % 2 * STAGE_BYTES, a, x, item.first + i, u / 2 % n_group, u % 2, map + i * ROWS,
                  item.half);
    };
    if (n_unit) copy(0);
    copy_commit();
    for (int u = 0; u < n_unit;) { /* one sequence at a time: a NaN in it does not reach the rows of another */
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
    allow_shared_bytes((const void *)shared_fwd_mma_kernel, FWD_BYTES);
    shared_fwd_mma_kernel<<<grid_x((int64_t)a->n_tok * (a->n_head / HEADS)), THREADS, FWD_BYTES, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

void shared_dq_mma(const struct shared_args *a, const struct shared_chunk *x)
{
    allow_shared_bytes((const void *)shared_dq_mma_kernel, DQ_BYTES);
    shared_dq_mma_kernel<<<grid_x((int64_t)x->n * (a->n_head / HEADS)), THREADS, DQ_BYTES, cuda.stream>>>(*a, *x);
    CUDA_CHECK_LAUNCH();
}

void shared_dkey_mma(const struct shared_args *a, const struct shared_chunk *x)
{
    allow_shared_bytes((const void *)shared_dkey_mma_kernel, DKEY_BYTES);
    const unsigned grid = grid_x(ceil_div(x->n, SHARED_TOKENS) * (x->n_window + x->n_far) * 2 * BANDS);
    shared_dkey_mma_kernel<<<grid, DKEY_THREADS, DKEY_BYTES, cuda.stream>>>(*a, *x);
    CUDA_CHECK_LAUNCH();
}
