/* delta_wgmma_grad.cu - gated delta rule on Hopper: gradients of q, k, b and a of every chunk (math: delta_wgmma.cuh).
 *
 * Shapes: dqkv [T,C], dba [T,2N] bf16 =; reads X, Y (as dv), dout, qkv, the states and their gradients.
 * Needs: sm_90a, rows aligned to 16 bytes.
 * Grid: persistent, a block per SM, which processes a chunk and key head at a time and adds up its value heads in a
 *   fixed order. Three warpgroups: dq; the terms of dk where the row's k reads the state ("into" the row); those where
 *   its k is written to the state ("out of" the row). The third adds the terms of the second. Operands a are in
 *   registers, b in tiles that TMA loads, dO, X and Y one value head ahead. 217 KiB.
 * The gradient of g in a row is the sum of dG from this row on. A pair of rows adds two terms to dG, which cancel in
 *   this sum unless it contains only one row of the pair. In f32 they cancel only if they have the same bits: the
 *   kernel sums rows and columns of one matrix, without its diagonal, and takes no product that was rounded in between.
 *   (From <q, dq> and <k, dk>, the error of da would exceed da in a head that forgets within a token.)
 * Bound: per chunk and value head 112 KiB, per chunk and key head 32 KiB read and 32 KiB written; 17 MFLOP.
 * Numerics: f32 sums; X, Y, S, E and the decayed dots are rounded to bf16. No atomics. */
#include "kernels/cuda/sm90/delta/delta_wgmma.cuh"

enum {
    GROUPS = 3, /* warpgroups: dq, dk into a row, dk out of a row */
    THREADS = GROUPS * 128,
    /* tiles */
    AT_K = 0,
    AT_Q = 2,
    AT_S = 4,
    AT_E = 8,
    AT_ROWS = 12, /* two sets of tiles of a head, with these offsets: */
    AT_DOUT = 0,
    AT_X = 2,
    AT_Y = 4,
    N_ROWS = 6,
    N_TILE = AT_ROWS + 2 * N_ROWS,
    VECTORS = 0, /* mbarriers: q and k; dO, X and Y of a head (2); its states */
    ROWS = 1,
    STATES = 3,
    N_BAR = 4,
    PAIR = 1 /* named barrier of the warpgroups of dk */
};

enum role { OF_Q, INTO_K, OUT_OF_K };

struct head_memory {
    float g[DELTA_ROWS], beta[DELTA_ROWS], rq[DELTA_ROWS], rk[DELTA_ROWS];
    float dots[GROUPS][DELTA_ROWS];         /* terms of dG by row, of every role */
    float columns[OUT_OF_K][4][DELTA_ROWS]; /* by column, of every warp of a role */
    float xy[DELTA_ROWS];                   /* <X_i, Y_i> */
    float through[THREADS / 32];            /* <S, E>, in parts */
};
struct grad_memory {
    char tiles[N_TILE][DELTA_TILE];
    uint32_t pairs[OUT_OF_K][16]
                  [128]; /* <q_i, k_j>, <k_i, k_j> in bf16: elements 2 i, 2 i + 1 of a thread's accumulator */
    struct head_memory head[2];
    float of_k[DELTA_ROWS]; /* <k, dk into> of all heads, without the norm */
    uint64_t bar[N_BAR];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* What a thread knows of its chunk. Its rows are row and row + 8; columns 8 i + col, + 1. */
struct place {
    struct delta_chunk c;
    bool has_state, has_grad; /* S before the chunk, E after it */
    int key, warp, row, col;
    uint32_t tiles, rows; /* addresses: of all tiles, of those of the head */
};

static __device__ __forceinline__ uint32_t tile_at(const struct place &at, int tile)
{
    return at.tiles + tile * DELTA_TILE;
}
static __device__ __forceinline__ uint32_t rows_tile(const struct place &at, int tile)
{
    return at.rows + tile * DELTA_TILE;
}

static __device__ __forceinline__ void load_vectors(const struct delta_wgmma_args &p, const struct place &at,
                                                    uint32_t bar)
{
    mbarrier_arrive_expect(bar, 4 * DELTA_TILE);
    for (int half = 0; half < 2; half++) {
        tma_load(tile_at(at, AT_K + half), &p.qkv, bar, 0, 2 * (p.n_key + at.key) + half, at.c.row);
        tma_load(tile_at(at, AT_Q + half), &p.qkv, bar, 0, 2 * at.key + half, at.c.row);
    }
}
/* dO, X and Y of value head n into the tiles at `to`. */
static __device__ __forceinline__ void load_rows(const struct delta_wgmma_args &p, uint32_t to, uint32_t bar, int row,
                                                 int n)
{
    mbarrier_arrive_expect(bar, N_ROWS * DELTA_TILE);
    for (int half = 0; half < 2; half++) {
        tma_load(to + (AT_X + half) * DELTA_TILE, &p.x, bar, 0, 2 * n + half, row);
        tma_load(to + (AT_DOUT + half) * DELTA_TILE, &p.dout, bar, 0, 2 * n + half, row);
        tma_load(to + (AT_Y + half) * DELTA_TILE, &p.dv, bar, 0, 4 * p.n_key + 2 * n + half, row);
    }
}
static __device__ __forceinline__ void load_states(const struct delta_wgmma_args &p, const struct place &at,
                                                   uint32_t bar, int n)
{
    mbarrier_arrive_expect(bar, (at.has_state ? 4 * DELTA_TILE : 0) + (at.has_grad ? 4 * DELTA_TILE : 0));
    for (int half = 0; half < 2; half++) {
        const int before = (at.c.before * p.n_value + n) * DELTA_DIM, after = (at.c.after * p.n_value + n) * DELTA_DIM;
        if (at.has_state) tma_load(tile_at(at, AT_S + 2 * half), &p.states, bar, 0, half, before);
        if (at.has_grad) tma_load(tile_at(at, AT_E + 2 * half), &p.grads, bar, 0, half, after);
    }
}

/* The gates of the chunk; beyond its end G is that of the last row, so that no exponent is positive. */
static __device__ __forceinline__ void load_gates(struct head_memory *h, const struct delta_wgmma_args &p,
                                                  const struct place &at, int n)
{
    const int row = (int)threadIdx.x;
    if (row >= DELTA_ROWS) return;
    const float4 v = ((const float4 *)p.gates)[n * (int64_t)p.n_tok + at.c.row + min(row, at.c.n - 1)];
    h->g[row] = v.x;
    h->beta[row] = v.y;
    h->rq[row] = v.z;
    h->rk[row] = v.w;
}

/* The rows of a tile of this warp, as an operand of 128 columns. */
static __device__ __forceinline__ void load_operand(uint32_t (&a)[8][4], uint32_t tile, int warp)
{
#pragma unroll
    for (int k = 0; k < 8; k++) load_tiles<false>(a[k], rows_at(tile + k / 4 * DELTA_TILE, warp, k % 4));
}
/* s = a b^T over 128 columns: this warp's rows of a, all rows of b; two tiles each. */
static __device__ __forceinline__ void dot_tiles(float (&s)[32], uint32_t a_tile, uint32_t b, const struct place &at)
{
    uint32_t a[8][4];
    load_operand(a, a_tile, at.warp);
    wgmma_fence();
    delta_dot<false, 4>(s, a, b, false);
    delta_dot<false, 4, 4>(s, a, b + DELTA_TILE, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(s);
}

/* The rows' terms of dG of a role: sum over the thread's columns, then over the four threads of a row. */
static __device__ __forceinline__ void put_rows(struct head_memory *h, int role, const struct place &at,
                                                const float sum[2], bool add)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float all = warp_sum(sum[i], 4);
        float *to = &h->dots[role][at.row + 8 * i];
        if (at.col == 0) *to = add ? *to + all : all;
    }
}
/* Exchanges halves of 2 N values with the lane `step` away: a lane is left with the sums of N of them. */
template <int N> static __device__ __forceinline__ void halve(float (&x)[16], int step)
{
    const bool high = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float keep = high ? x[i + N] : x[i], give = high ? x[i] : x[i + N];
        x[i] = keep + __shfl_xor_sync(~0u, give, step);
    }
}
/* The columns' terms: columns[2 i + e] of column 8 i + col + e, summed over the warp's rows. */
static __device__ __forceinline__ void put_columns(float *to, float (&columns)[16], const struct place &at)
{
    const int lane = (int)threadIdx.x % 32, i = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    halve<8>(columns, 16);
    halve<4>(columns, 8);
    halve<2>(columns, 4);
    *(float2 *)(to + 8 * i + at.col) = make_float2(columns[0], columns[1]);
}

/* D_ij r_j, 0 unless j < i (or j = i, without `strict`). Rows of the thread are i, or j (TRANSPOSED). */
template <bool TRANSPOSED>
static __device__ __forceinline__ float decay_at(int row, int col, const float *g, float g_col, float r_col,
                                                 bool strict)
{
    const float x = TRANSPOSED ? g_col - g[row] : g[row] - g_col;
    const int after = TRANSPOSED ? row - col : col - row;
    return after < (strict ? 0 : 1) ? delta_exp2(x) * r_col : 0;
}
/* w = s (of_k: -s) times decay_at; the thread's rows are i. */
static __device__ __forceinline__ void decay_rows(uint32_t (&w)[4][4], const float (&s)[32], const struct place &at,
                                                  struct head_memory *h, const uint32_t (&pairs)[16][128], bool of_k)
{
    const float *of_r = of_k ? h->rk : h->rq, r[2] = {of_r[at.row], of_r[at.row + 8]};
    float rows[2] = {0, 0}, columns[16] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int col = 8 * i + at.col;
        const float2 gc = *(const float2 *)(h->g + col), rc = *(const float2 *)(h->rk + col);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = at.row + 8 * k, n = 4 * i + 2 * k;
            const float v[2] = {(of_k ? -s[n] : s[n]) * decay_at<false>(row, col, h->g, gc.x, rc.x, of_k),
                                (of_k ? -s[n + 1] : s[n + 1]) * decay_at<false>(row, col + 1, h->g, gc.y, rc.y, of_k)};
            w[i / 2][i % 2 * 2 + k] = pack2(v[0], v[1]);
            const uint32_t pair = pairs[n / 2][threadIdx.x % 128];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float term = col + e < row ? v[e] * r[k] * (e ? high_half(pair) : low_half(pair)) : 0;
                rows[k] += term;
                columns[2 * i + e] += term;
            }
        }
    }
    put_rows(h, of_k ? INTO_K : OF_Q, at, rows, false);
    put_columns(h->columns[of_k ? INTO_K : OF_Q][at.warp], columns, at);
}
/* w as in decay_rows; the thread's rows are j. */
static __device__ __forceinline__ void decay_columns(uint32_t (&w)[4][4], const float (&s)[32], const struct place &at,
                                                     const struct head_memory *h, bool of_k)
{
    const float *r = of_k ? h->rk : h->rq;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int col = 8 * i + at.col;
        const float2 gc = *(const float2 *)(h->g + col), rc = *(const float2 *)(r + col);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = at.row + 8 * k, n = 4 * i + 2 * k;
            const float v[2] = {s[n] * decay_at<true>(row, col, h->g, gc.x, rc.x, of_k),
                                s[n + 1] * decay_at<true>(row, col + 1, h->g, gc.y, rc.y, of_k)};
            w[i / 2][i % 2 * 2 + k] = of_k ? pack2(-v[0], -v[1]) : pack2(v[0], v[1]);
        }
    }
}

/* sum += x acc over this thread's columns, for its two rows; x: the tile [row][64]. */
static __device__ __forceinline__ void add_dots(float sum[2], const float (&acc)[32], const char *tile,
                                                const struct place &at)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t w = *(const uint32_t *)(tile + sm90_swizzle(at.row + 8 * h, i) + at.col * 2);
            sum[h] += low_half(w) * acc[4 * i + 2 * h] + high_half(w) * acc[4 * i + 2 * h + 1];
        }
    }
}
static __device__ __forceinline__ void add_tiles(float (&acc)[2][32], const uint32_t (&w)[4][4], uint32_t b)
{
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++) delta_dot<true, 4>(acc[half], w, b + half * DELTA_TILE, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(acc[0]);
    wgmma_use(acc[1]);
}

/* acc += factor (a S), or factor (a E) where k is written to the state; a: dO, Y or X, as `role` says. Adds r factor
 * <x, a S> to the terms of dG; x: rows of q or k, r: their factors. */
static __device__ __forceinline__ void add_state(float (&acc)[2][32], const struct place &at, struct grad_memory *m,
                                                 struct head_memory *h, int role, const float factor[2])
{
    const int operand = role == OF_Q ? AT_DOUT : role == INTO_K ? AT_Y : AT_X, vector = role == OF_Q ? AT_Q : AT_K;
    const float *r = role == OF_Q ? h->rq : h->rk;
    uint32_t a[8][4];
    float sum[2] = {0, 0};
    load_operand(a, rows_tile(at, operand), at.warp);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float t[32];
        wgmma_fence();
        delta_dot<true, 8>(t, a, tile_at(at, (role == OUT_OF_K ? AT_E : AT_S) + 2 * half), false);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(t);
#pragma unroll
        for (int i = 0; i < 32; i++) acc[half][i] += factor[i / 2 % 2] * t[i];
        add_dots(sum, t, m->tiles[vector + half], at);
    }
    sum[0] *= factor[0] * r[at.row];
    sum[1] *= factor[1] * r[at.row + 8];
    put_rows(h, role, at, sum, role != OUT_OF_K);
}

/* dq, or dk into the rows. */
static __device__ __forceinline__ void into_rows(float (&acc)[2][32], const struct place &at, struct grad_memory *m,
                                                 struct head_memory *h, bool of_k, uint32_t states, uint32_t parity)
{
    uint32_t w[4][4];
    float s[32];
    dot_tiles(s, rows_tile(at, of_k ? AT_Y : AT_DOUT), rows_tile(at, AT_X), at);
    if (of_k) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (8 * (i / 4) + at.col + i % 2 == at.row + 8 * (i / 2 % 2)) h->xy[at.row + 8 * (i / 2 % 2)] = s[i];
    }
    decay_rows(w, s, at, h, m->pairs[of_k ? INTO_K : OF_Q], of_k);
    add_tiles(acc, w, tile_at(at, AT_K));
    if (!at.has_state) return;
    const float sign = of_k ? -1.0f : 1.0f,
                up[2] = {sign * delta_exp2(h->g[at.row]), sign * delta_exp2(h->g[at.row + 8])};
    mbarrier_wait(states, parity);
    add_state(acc, at, m, h, of_k ? INTO_K : OF_Q, up);
}

/* dk out of the rows. */
static __device__ __forceinline__ void out_of_rows(float (&acc)[2][32], const struct place &at, struct grad_memory *m,
                                                   struct head_memory *h, uint32_t states, uint32_t parity)
{
    uint32_t w[4][4];
    float s[32];
    dot_tiles(s, rows_tile(at, AT_X), rows_tile(at, AT_DOUT), at);
    decay_columns(w, s, at, h, false);
    add_tiles(acc, w, tile_at(at, AT_Q));
    dot_tiles(s, rows_tile(at, AT_X), rows_tile(at, AT_Y), at);
    decay_columns(w, s, at, h, true);
    add_tiles(acc, w, tile_at(at, AT_K));
    const float last = h->g[DELTA_ROWS - 1], none[2] = {0, 0};
    const float tail[2] = {delta_exp2(last - h->g[at.row]), delta_exp2(last - h->g[at.row + 8])};
    if (at.has_grad) {
        mbarrier_wait(states, parity);
        add_state(acc, at, m, h, OUT_OF_K, tail);
    } else {
        put_rows(h, OUT_OF_K, at, none, false);
    }
}

/* This thread's part of <S, E>. */
static __device__ __forceinline__ float dot_states(const struct grad_memory *m)
{
    float sum = 0;
    for (int i = (int)threadIdx.x; i < 4 * DELTA_TILE / 16; i += THREADS) {
        float s[8], e[8];
        unpack8(s, load16(m->tiles[AT_S] + 16 * i));
        unpack8(e, load16(m->tiles[AT_E] + 16 * i));
#pragma unroll
        for (int j = 0; j < 8; j++) sum += s[j] * e[j];
    }
    return sum;
}

/* db and da of a head, by one warp, a lane for two rows. */
static __device__ __forceinline__ void write_gates(const struct head_memory *h, const struct delta_wgmma_args &p,
                                                   const struct place &at, int n)
{
    const int lane = (int)threadIdx.x % 32, row = 2 * lane;
    float through = 0, dg[2], out[2];
    for (int i = 0; i < THREADS / 32; i++) through += h->through[i];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[i] = h->dots[OUT_OF_K][row + i];
        dg[i] = h->dots[OF_Q][row + i] + h->dots[INTO_K][row + i];
        for (int w = 0; w < 4; w++) dg[i] -= h->columns[OF_Q][w][row + i] + h->columns[INTO_K][w][row + i];
        dg[i] -= out[i];
    }
    through = delta_exp2(h->g[DELTA_ROWS - 1]) * through + warp_sum(out[0] + out[1]);
    dg[0] += dg[1];
    float sum = dg[0]; /* then of the rows after */
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_down_sync(~0u, sum, step);
        if (lane + step < 32) sum += other;
    }
    const float after = __shfl_down_sync(~0u, sum, 1);
    dg[0] = sum + through;
    dg[1] += (lane < 31 ? after : 0) + through;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row + i >= at.c.n) continue;
        const int64_t t = at.c.row + row + i;
        const float a = __bfloat162float(p.ba[t * p.ld_ba + p.n_value + n]) + p.dt_bias[n], beta = h->beta[row + i];
        /* <X, Y> is beta^2 times a product, so db is negligible where beta is too small to divide by */
        const float db = beta > 1e-18f ? h->xy[row + i] / beta * (1 - beta) : 0;
        p.dba[t * p.ld_dba + n] = __float2bfloat16_rn(db);
        p.dba[t * p.ld_dba + p.n_value + n] = __float2bfloat16_rn(-dg[i] * expf(p.a_log[n]) / (1 + expf(-a)));
    }
}

/* to = r (acc - x along) of this warp's 16 rows, through the tiles of x, which only this warp reads. */
static __device__ __forceinline__ void write_vectors(bf16 *to, int64_t ld, const float (&acc)[2][32], char *tiles,
                                                     const float r[2], const float along[2], const struct place &at)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t *x = (uint32_t *)(tiles + half * DELTA_TILE + sm90_swizzle(at.row + 8 * h, i) + at.col * 2);
                *x = pack2(r[h] * (acc[half][4 * i + 2 * h] - low_half(*x) * along[h]),
                           r[h] * (acc[half][4 * i + 2 * h + 1] - high_half(*x) * along[h]));
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = 16 * at.warp + 2 * i + lane / 16, chunk = lane % 16;
        if (row < at.c.n)
            store16(to + row * ld + chunk * 8, load16(tiles + chunk / 8 * DELTA_TILE + sm90_swizzle(row, chunk % 8)));
    }
}

/* dq and dk, after the sums over the value heads. */
static __device__ __forceinline__ void finish(const struct delta_wgmma_args &p, const struct place &at,
                                              struct grad_memory *m, const struct head_memory *h, float (&acc)[2][32],
                                              int role)
{
    float total[2] = {0, 0}; /* <x, acc> of the rows */
    float *part = (float *)m->tiles[AT_S];
    const int thread = (int)threadIdx.x % 128;
    bf16 *to = p.dqkv + at.c.row * p.ld_dqkv + at.key * DELTA_DIM;
#pragma unroll
    for (int half = 0; half < 2; half++) add_dots(total, acc[half], m->tiles[(role == OF_Q ? AT_Q : AT_K) + half], at);
    for (int i = 0; i < 2; i++) total[i] = warp_sum(total[i], 4);
    if (role == INTO_K) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 32; i++) part[(32 * half + i) * 128 + thread] = acc[half][i];
        }
        if (at.col == 0)
            for (int i = 0; i < 2; i++) m->of_k[at.row + 8 * i] = total[i];
        named_arrive(PAIR, 256);
        return;
    }
    const float *of_r = role == OF_Q ? h->rq : h->rk, r[2] = {of_r[at.row], of_r[at.row + 8]};
    const float norm = role == OF_Q ? (float)DELTA_DIM : 1.0f; /* rq has the factor 128^-1/2 */
    if (role == OUT_OF_K) {
        named_sync(PAIR, 256);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 32; i++) acc[half][i] += part[(32 * half + i) * 128 + thread];
        }
        for (int i = 0; i < 2; i++) total[i] += m->of_k[at.row + 8 * i];
    }
    const float along[2] = {norm * r[0] * r[0] * total[0], norm * r[1] * r[1] * total[1]};
    write_vectors(to + (role == OF_Q ? 0 : p.n_key * DELTA_DIM), p.ld_dqkv, acc, m->tiles[role == OF_Q ? AT_Q : AT_K],
                  r, along, at);
}

/* Dots of the chunk's queries, or keys, with its keys, for all value heads. */
static __device__ __forceinline__ void put_pairs(uint32_t (&pairs)[16][128], const struct place &at, int role)
{
    float s[32];
    dot_tiles(s, tile_at(at, role == OF_Q ? AT_Q : AT_K), tile_at(at, AT_K), at);
#pragma unroll
    for (int i = 0; i < 16; i++) pairs[i][threadIdx.x % 128] = pack2(s[2 * i], s[2 * i + 1]);
}

/* A chunk and key head. */
struct item {
    struct delta_chunk c;
    int key;
};
/* The first item from i on that is not an unused slot, i += step; key < 0: none. */
static __device__ __forceinline__ struct item next_item(const struct delta_wgmma_args &p, int *i)
{
    struct item item = {{0, 0, 0, 0}, -1};
    for (; *i < p.n_item; *i += gridDim.x) {
        item.c = delta_find_chunk(p, *i / p.n_key);
        if (item.c.n <= 0) continue;
        item.key = *i % p.n_key;
        *i += gridDim.x;
        return item;
    }
    return item;
}

static __device__ __forceinline__ void grad_items(const struct delta_wgmma_args &p, struct place &at,
                                                  struct grad_memory *m, int role)
{
    const uint32_t bars = sm90_shared(m->bar), states = bars + 8 * STATES;
    int i = (int)blockIdx.x, step = 0;
    struct item now = next_item(p, &i);
    if (now.key < 0) return;
    if (threadIdx.x == 0) load_rows(p, tile_at(at, AT_ROWS), bars + 8 * ROWS, now.c.row, now.key * p.group);
    for (int round = 0; now.key >= 0; round++) {
        const struct item next = next_item(p, &i);
        at.c = now.c;
        at.key = now.key;
        at.has_state = now.c.before >= 0;
        at.has_grad = now.c.after >= 0;
        if (threadIdx.x == 0) load_vectors(p, at, bars + 8 * VECTORS);
        float acc[2][32] = {};
        for (int v = 0; v < p.group; v++, step++) {
            const int n = at.key * p.group + v, ahead = (step + 1) & 1;
            struct head_memory *h = &m->head[step & 1];
            at.rows = tile_at(at, AT_ROWS + (step & 1) * N_ROWS);
            if (threadIdx.x == 0) {
                load_states(p, at, states, n);
                if (v + 1 < p.group || next.key >= 0)
                    load_rows(p, tile_at(at, AT_ROWS + ahead * N_ROWS), bars + 8 * (ROWS + ahead),
                              v + 1 < p.group ? at.c.row : next.c.row, v + 1 < p.group ? n + 1 : next.key * p.group);
            }
            load_gates(h, p, at, n);
            if (v == 0) mbarrier_wait(bars + 8 * VECTORS, round & 1);
            mbarrier_wait(bars + 8 * (ROWS + (step & 1)), step >> 1 & 1);
            if (at.c.n < DELTA_ROWS) {
                if (v == 0) delta_clear(at.tiles, AT_S, at.c.n, threadIdx.x, THREADS);
                delta_clear(at.rows, N_ROWS, at.c.n, threadIdx.x, THREADS);
                fence_proxy_async();
            }
            __syncthreads(); /* gates, cleared rows */
            if (v == 0 && role != OUT_OF_K) put_pairs(m->pairs[role], at, role);
            if (role == OUT_OF_K)
                out_of_rows(acc, at, m, h, states, step & 1);
            else
                into_rows(acc, at, m, h, role == INTO_K, states, step & 1);
            mbarrier_wait(states, step & 1); /* also without states: the next phase must not pass this one */
            const float through = warp_sum(at.has_state && at.has_grad ? dot_states(m) : 0);
            if (threadIdx.x % 32 == 0) h->through[threadIdx.x / 32] = through;
            fence_proxy_async();
            __syncthreads(); /* the tiles of the head are no longer read, its sums are there */
            if (threadIdx.x / 32 == THREADS / 32 - 1) write_gates(h, p, at, n);
        }
        finish(p, at, m, &m->head[(step - 1) & 1], acc, role);
        fence_proxy_async();
        __syncthreads(); /* q, k and the states' tiles are free */
        now = next;
    }
}
#endif

static __global__ void __launch_bounds__(THREADS, 1)
    delta_grad_wgmma_kernel(const __grid_constant__ struct delta_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char bytes[];
    struct grad_memory *m = (struct grad_memory *)bytes;
    struct place at;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = (int)threadIdx.x % 32;
    at.warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    at.row = 16 * at.warp + lane / 4;
    at.col = lane % 4 * 2;
    at.tiles = sm90_shared(m->tiles);
    if (threadIdx.x == 0) {
        for (int i = 0; i < N_BAR; i++) mbarrier_init(sm90_shared(&m->bar[i]), 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    grad_items(p, at, m, role);
#else
    __trap();
#endif
}

void delta_wgmma_grads(const struct delta_wgmma_args *p)
{
    allow_shared<delta_grad_wgmma_kernel>((int)sizeof(struct grad_memory));
    struct delta_wgmma_args a = *p;
    a.n_item = (int)delta_slots(p, p->n_key);
    delta_grad_wgmma_kernel<<<(unsigned)MT_MIN(a.n_item, cuda.n_sm), THREADS, sizeof(struct grad_memory),
                              cuda.stream>>>(a);
    CUDA_CHECK_LAUNCH();
}
