/* delta_wgmma_scan.cu - gated delta rule on Hopper: the recurrence over the chunks of a sequence (math:
 * delta_wgmma.cuh), forward (O, or X and the states) and backward (Y and E).
 *
 * Shapes: o, dout [T,N*128], dv inside dqkv [T,C], x [T,N*128], states and grads [slots,N,128,128], all bf16.
 * Needs: sm_90a, rows aligned to 16 bytes.
 * Grid: a block per segment and value head, with two warpgroups that share its tiles and have 64 value columns each;
 *   columns of a state do not depend on each other. Where there are at most half as many blocks as SMs, a block per
 *   warpgroup, with the same bits. A warpgroup holds 64 columns of S^T, or E^T, in f32 accumulators. The operand a of
 *   every product is in registers: S^T, V^T - S^T K^T, X^T, an accumulator rounded to bf16. TMA loads the next chunks
 *   meanwhile (three stages). One block per SM.
 * Bound: products that wait for each other. A chunk needs 1024 clocks of wgmma (S^T K^T 256, S^T Q^T 256, X^T 128, the
 *   state 256, X^T M^T 128), and S^T K^T, X^T and the state follow each other, with rounding in between; on an H200 a
 *   chunk of a warpgroup takes an SM about 2,000 clocks if two warpgroups share it, 3,200 if one has it alone. Results
 *   of a chunk are written during the first product of the next. Moves, forward: 64 KiB per chunk and value head, keys
 *   and queries mostly from L2.
 * Numerics: states are f32 and are rounded to bf16 for products only, as are T, M, V - (r u K) S, X and X times its
 *   factor. Every element of the result is a fixed sequence of operations that does not depend on other sequences:
 *   packed sequences have the bits of each alone; no atomics. */
#include "kernels/cuda/sm90/delta/delta_wgmma.cuh"

/* WARPGROUPS is 2, or 1 where there are too few sequences for all SMs: a block then has 64 of the value columns. */
enum { COLS = 64, STAGES = 3 };
enum scan { OUTPUTS, STATES, BACK };

/* Tiles of a stage, in this order: keys (2); T; M and queries (2), which STATES does not need; V or dO (WARPGROUPS). */
enum { AT_K, AT_T = 2, AT_M, AT_Q };
template <int SCAN> __host__ __device__ constexpr int values_at(void) { return SCAN == STATES ? AT_M : AT_Q + 2; }
template <int SCAN, int WARPGROUPS> __host__ __device__ constexpr int stage_bytes(void)
{
    return (values_at<SCAN>() + WARPGROUPS) * DELTA_TILE;
}
/* The factors of a chunk. */
struct __align__(16) chunk_factors
{
    float into[DELTA_ROWS], out[DELTA_ROWS], query[DELTA_ROWS];
    float decay; /* of the chunk */
};
/* The end of shared memory, after the stages and, where states are stored, a tile per warpgroup to store them from. */
struct scan_tail {
    struct chunk_factors factors[2][2]; /* of a warpgroup, of this chunk and the next */
    uint64_t full[STAGES], empty[STAGES];
};
template <int SCAN, int WARPGROUPS> __host__ __device__ constexpr int tail_at(void)
{
    return STAGES * stage_bytes<SCAN, WARPGROUPS>() + (SCAN == OUTPUTS ? 0 : WARPGROUPS * DELTA_TILE);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A value head of a segment (struct segments). It begins with the sum of the states in slots from .. from + n_from - 1;
 * to: the slot of the state after it, or -1. */
struct strip {
    int first, len, head, half, from, n_from, to; /* half: the first of the block */
};
template <int SCAN>
static __device__ __forceinline__ struct strip find_strip(const struct delta_wgmma_args &p, int seq, int head, int half)
{
    const int in = delta_segment_slot(p, seq, SEGMENT_IN), out = delta_segment_slot(p, seq, SEGMENT_OUT);
    const int first = p.cu[seq], len = p.cu[seq + 1] - first;
    if (SCAN != BACK) return {first, len, head, half, in, in >= 0, out};
    return {first,
            len,
            head,
            half,
            out,
            out < 0 ? 0 : p.links[seq * SEGMENT_LINKS + SEGMENT_N_OUT],
            delta_segment_slot(p, seq, SEGMENT_OWN)};
}

/* Loads a chunk: one thread of every warp calls it, since a thread needs about 100 clocks for a copy. */
template <int SCAN, int WARPGROUPS>
static __device__ __forceinline__ void load_chunk(const struct delta_wgmma_args &p, const struct strip &s, uint32_t to,
                                                  uint32_t bar, int chunk)
{
    const int row = s.first + chunk * DELTA_ROWS, key = s.head / p.group, warp = (int)threadIdx.x / 32;
    if (warp == 0) mbarrier_arrive_expect(bar, stage_bytes<SCAN, WARPGROUPS>());
    for (int tile = warp; tile < values_at<SCAN>() + WARPGROUPS; tile += 4 * WARPGROUPS) {
        const CUtensorMap *map = &p.qkv;
        int column;
        if (tile < AT_T) {
            column = 2 * (p.n_key + key) + tile;
        } else if (tile == AT_T) {
            map = &p.inverse;
            column = s.head;
        } else if (tile >= values_at<SCAN>()) {
            if (SCAN == BACK) map = &p.dout;
            column = (SCAN == BACK ? 0 : 4 * p.n_key) + 2 * s.head + s.half + tile - values_at<SCAN>();
        } else if (tile == AT_M) {
            map = &p.m;
            column = s.head;
        } else {
            column = 2 * key + tile - AT_Q;
        }
        tma_load(to + tile * DELTA_TILE, map, bar, 0, column, row);
    }
}

/* The factors of a row, zero beyond the chunk. */
static __device__ __forceinline__ struct delta_factors row_factors(const struct delta_wgmma_args &p,
                                                                   const struct strip &s, int chunk)
{
    const int i = (int)threadIdx.x % 128, at = chunk * DELTA_ROWS + i;
    struct delta_factors f = {0, 0, 0, 0};
    if (i < DELTA_ROWS && at < s.len) {
        const float4 v = ((const float4 *)p.factors)[s.head * (int64_t)p.n_tok + s.first + at];
        f.into = v.x, f.out = v.y, f.query = v.z, f.up = v.w;
    }
    return f;
}
static __device__ __forceinline__ void put_factors(struct chunk_factors *t, const struct delta_factors &f, int n)
{
    const int i = (int)threadIdx.x % 128;
    if (i >= DELTA_ROWS) return;
    t->into[i] = f.into;
    t->out[i] = f.out;
    t->query[i] = f.query;
    if (i == n - 1) t->decay = f.up;
}

/* The factors of the two columns (tokens) of this lane in tile i of an accumulator. */
static __device__ __forceinline__ float2 column_pair(const float *factor, int i)
{
    return *(const float2 *)(factor + 8 * i + threadIdx.x % 4 * 2);
}
static __device__ __forceinline__ void scale_columns(float (&x)[32], const float *factor)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 f = column_pair(factor, i);
        x[4 * i] *= f.x, x[4 * i + 1] *= f.y, x[4 * i + 2] *= f.x, x[4 * i + 3] *= f.y;
    }
}
static __device__ __forceinline__ void pack_scaled(uint32_t (&a)[4][4], const float (&x)[32], const float *factor,
                                                   float sign)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 f = column_pair(factor, i);
        a[i / 2][i % 2 * 2] = pack2(sign * f.x * x[4 * i], sign * f.y * x[4 * i + 1]);
        a[i / 2][i % 2 * 2 + 1] = pack2(sign * f.x * x[4 * i + 2], sign * f.y * x[4 * i + 3]);
    }
}

/* Writes the warp's 16 value columns of a tile to rows of `to`, of which n exist. Overwrites the warp's part of the
 * tile in shared memory. */
static __device__ __forceinline__ void write_columns(bf16 *to, int64_t ld, const uint32_t (&a)[4][4], uint32_t tile,
                                                     const char *bytes, int warp, int n)
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) store_matrix4<true>(columns_at(tile, warp, k), a[k]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 * i + lane / 2, chunk = 2 * warp + lane % 2;
        if (row < n) store16(to + row * ld + chunk * 8, load16(bytes + sm90_swizzle(row, chunk)));
    }
}
/* Writes the warp's 16 rows of a state, in two halves through its rows of a tile. Without `exists` it overwrites the
 * tile only. */
static __device__ __forceinline__ void write_state(bf16 *to, const uint32_t (&a)[8][4], uint32_t tile,
                                                   const char *bytes, int warp, bool exists)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 4; k++) store_matrix4<false>(rows_at(tile, warp, k), a[4 * half + k]);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 16 * warp + 4 * i + lane / 8, chunk = lane % 8;
            if (exists) store16(to + row * DELTA_DIM + half * 64 + chunk * 8, load16(bytes + sm90_swizzle(row, chunk)));
        }
    }
}

/* Address in a slot of the two adjacent elements of the state that rounded[k][i] holds. */
static __device__ __forceinline__ uint32_t *state_pair(const struct delta_wgmma_args &p, const struct strip &s,
                                                       bf16 *rows, int slot, int half, int warp, int k, int i)
{
    const int row = (s.half + half) * COLS + 16 * warp + threadIdx.x % 32 / 4 + 8 * (i % 2);
    const int64_t at = ((int64_t)slot * p.n_value + s.head) * DELTA_DIM + row;
    return (uint32_t *)(rows + at * DELTA_DIM + 16 * k + 8 * (i / 2) + threadIdx.x % 4 * 2);
}
/* The state with which a segment begins: the sum of n_from slots of states. The backward stores the sum in the first
 * slot, where the gradients of the segment's last chunk read it. */
template <int SCAN>
static __device__ __forceinline__ void begin_state(float (&state)[2][32], uint32_t (&rounded)[8][4],
                                                   const struct delta_wgmma_args &p, const struct strip &s, int half,
                                                   int warp)
{
    bf16 *rows = SCAN == BACK ? p.grad_rows : p.state_rows;
    for (int n = s.n_from - 1; n >= 0; n--) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t *w = state_pair(p, s, rows, s.from + n, half, warp, k, i);
                float *x = &state[k / 4][8 * (k % 4) + 2 * i];
                x[0] += low_half(*w), x[1] += high_half(*w);
                rounded[k][i] = pack2(x[0], x[1]);
                if (SCAN == BACK && n == 0) *w = rounded[k][i];
            }
        }
    }
}
template <int SCAN>
static __device__ __forceinline__ void end_state(const uint32_t (&rounded)[8][4], const struct delta_wgmma_args &p,
                                                 const struct strip &s, int half, int warp)
{
    if (s.to < 0) return;
#pragma unroll
    for (int k = 0; k < 8; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            *state_pair(p, s, SCAN == BACK ? p.grad_rows : p.state_rows, s.to, half, warp, k, i) = rounded[k][i];
    }
}

static __device__ __forceinline__ void scale(float (&x)[32], float by)
{
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] *= by;
}

/* Issues the product at the start of a chunk: mem = S^T K^T, or E^T K^T. */
static __device__ __forceinline__ void begin_chunk(float (&mem)[32], const uint32_t (&rounded)[8][4], uint32_t tiles)
{
    wgmma_fence();
    delta_dot<false, 4>(mem, rounded, tiles + AT_K * DELTA_TILE, false);
    delta_dot<false, 4, 4>(mem, rounded, tiles + (AT_K + 1) * DELTA_TILE, true);
    wgmma_commit();
}

/* The rest of a chunk, forward. s: S^T, sb: rounded to bf16. Leaves X, or O if OUT, rounded, in out. */
template <bool OUT>
static __device__ __forceinline__ void end_forward(float (&s)[2][32], uint32_t (&sb)[8][4], uint32_t (&out)[4][4],
                                                   float (&mem)[32], uint32_t tiles, const struct chunk_factors *t,
                                                   uint32_t values, int warp)
{
    float o[32], x[32];
    uint32_t a[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) load_tiles<true>(a[k], columns_at(values, warp, k));
    wgmma_wait<0>();
    wgmma_use(mem);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 f = column_pair(t->into, i);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t *v = &a[i / 2][i % 2 * 2 + h];
            *v = pack2(low_half(*v) - f.x * mem[4 * i + 2 * h], high_half(*v) - f.y * mem[4 * i + 2 * h + 1]);
        }
    }
    wgmma_fence();
    delta_dot<false, 4>(x, a, tiles + AT_T * DELTA_TILE, false);
    wgmma_commit();
    if (OUT) { /* runs while X is scaled and rounded */
        delta_dot<false, 4>(o, sb, tiles + AT_Q * DELTA_TILE, false);
        delta_dot<false, 4, 4>(o, sb, tiles + (AT_Q + 1) * DELTA_TILE, true);
        wgmma_commit();
    }
    for (int i = 0; i < 2; i++) scale(s[i], t->decay);
    wgmma_wait<OUT ? 1 : 0>();
    wgmma_use(x);
    pack_scaled(a, x, t->out, 1);
    delta_pack(out, x);
    wgmma_fence();
    for (int i = 0; i < 2; i++) delta_dot<true, 4>(s[i], a, tiles + (AT_K + i) * DELTA_TILE, true);
    wgmma_commit();
    if (OUT) {
        wgmma_wait<1>();
        wgmma_use(o);
        scale_columns(o, t->query);
        wgmma_fence();
        delta_dot<false, 4>(o, out, tiles + AT_M * DELTA_TILE, true);
        wgmma_commit();
    }
    wgmma_wait<OUT ? 1 : 0>();
    wgmma_use(s[0]);
    wgmma_use(s[1]);
    delta_pack<0>(sb, s[0]);
    delta_pack<4>(sb, s[1]);
    if (OUT) {
        wgmma_wait<0>();
        wgmma_use(o);
        delta_pack(out, o);
    }
}

/* The rest of a chunk, backward. e: E^T, eb: rounded to bf16. Leaves Y, rounded, in out. */
static __device__ __forceinline__ void end_back(float (&e)[2][32], uint32_t (&eb)[8][4], uint32_t (&out)[4][4],
                                                float (&dx)[32], uint32_t tiles, const struct chunk_factors *t,
                                                uint32_t values, int warp)
{
    float of_m[32], y[32];
    uint32_t dout[4][4], a[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) load_tiles<true>(dout[k], columns_at(values, warp, k));
    wgmma_fence();
    delta_dot<true, 4>(of_m, dout, tiles + AT_M * DELTA_TILE, false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(dx);
    wgmma_use(of_m);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 f = column_pair(t->out, i), q = column_pair(t->query, i);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = 4 * i + 2 * h;
            uint32_t *d = &dout[i / 2][i % 2 * 2 + h];
            a[i / 2][i % 2 * 2 + h] = pack2(f.x * dx[at] + of_m[at], f.y * dx[at + 1] + of_m[at + 1]);
            *d = pack2(q.x * low_half(*d), q.y * high_half(*d));
        }
    }
    wgmma_fence();
    delta_dot<true, 4>(y, a, tiles + AT_T * DELTA_TILE, false);
    wgmma_commit();
    for (int i = 0; i < 2; i++) scale(e[i], t->decay);
    wgmma_fence();
    for (int i = 0; i < 2; i++) delta_dot<true, 4>(e[i], dout, tiles + (AT_Q + i) * DELTA_TILE, true);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_use(y);
    pack_scaled(a, y, t->into, -1);
    delta_pack(out, y);
    wgmma_fence();
    for (int i = 0; i < 2; i++) delta_dot<true, 4>(e[i], a, tiles + (AT_K + i) * DELTA_TILE, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(e[0]);
    wgmma_use(e[1]);
    delta_pack<0>(eb, e[0]);
    delta_pack<4>(eb, e[1]);
}

template <int SCAN>
static __device__ __forceinline__ void write_chunk(const struct delta_wgmma_args &p, const struct strip &s, int row,
                                                   int column, const uint32_t (&a)[4][4], uint32_t values,
                                                   const char *bytes, int warp, int n)
{
    const int64_t ld = p.n_value * (int64_t)DELTA_DIM;
    if (SCAN == OUTPUTS) write_columns(p.o + row * p.ld_o + column, p.ld_o, a, values, bytes, warp, n);
    if (SCAN == STATES) write_columns(p.x_rows + row * ld + column, ld, a, values, bytes, warp, n);
    if (SCAN == BACK)
        write_columns(p.dqkv + row * p.ld_dqkv + 2 * p.n_key * DELTA_DIM + column, p.ld_dqkv, a, values, bytes, warp,
                      n);
}

/* Writes the results of chunk i: its rows, and the state after it if another chunk follows. For i = -1 sizes of 0,
 * instead of a branch, make it write nothing, since products are in flight. */
template <int SCAN, int WARPGROUPS>
static __device__ __forceinline__ void finish_chunk(const struct delta_wgmma_args &p, const struct strip &s, int i,
                                                    int half, const uint32_t (&out)[4][4],
                                                    const uint32_t (&rounded)[8][4], char *bytes, int values)
{
    const uint32_t base = sm90_shared(bytes);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), last = (s.len - 1) / DELTA_ROWS;
    const int chunk = SCAN == BACK ? last - i : i, row = s.first + chunk * DELTA_ROWS;
    const int column = s.head * DELTA_DIM + (s.half + half) * COLS;
    const int staging = STAGES * stage_bytes<SCAN, WARPGROUPS>() + half * DELTA_TILE;
    write_chunk<SCAN>(p, s, row, column, out, base + values, bytes + values, warp,
                      i < 0 ? 0 : min(DELTA_ROWS, s.len - chunk * DELTA_ROWS));
    if (SCAN == OUTPUTS) return;
    bf16 *rows = SCAN == BACK ? p.grad_rows : p.state_rows;
    const int64_t slot = delta_state_slot(SCAN == BACK ? row : row + DELTA_ROWS);
    write_state(rows + (slot * p.n_value * DELTA_DIM + column) * DELTA_DIM, rounded, base + staging, bytes + staging,
                warp, i >= 0 && i < last);
}

template <int SCAN, int WARPGROUPS>
static __device__ __forceinline__ void scan(const struct delta_wgmma_args &p, const struct strip &s, char *bytes,
                                            struct scan_tail *t)
{
    constexpr int BYTES = stage_bytes<SCAN, WARPGROUPS>();
    const uint32_t base = sm90_shared(bytes), full = sm90_shared(t->full), empty = sm90_shared(t->empty);
    const int half = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int n_chunk = (s.len + DELTA_ROWS - 1) / DELTA_ROWS, last = n_chunk - 1;
    const int of_values = (values_at<SCAN>() + half) * DELTA_TILE;
    const bool loads = threadIdx.x % 32 == 0;
    float state[2][32] = {};
    uint32_t rounded[8][4] = {}, out[4][4] = {};
    begin_state<SCAN>(state, rounded, p, s, half, warp);
    for (int i = 0; loads && i < min(STAGES - 1, n_chunk); i++)
        load_chunk<SCAN, WARPGROUPS>(p, s, base + i * BYTES, full + 8 * i, SCAN == BACK ? last - i : i);
    __syncwarp();
    struct delta_factors f = row_factors(p, s, SCAN == BACK ? last : 0);
    /* before chunk 0, the last stage counts as chunk -1, which has no results to write */
    for (int i = 0, stage = 0, parity = 0; i < n_chunk; i++) {
        const int chunk = SCAN == BACK ? last - i : i, n = min(DELTA_ROWS, s.len - chunk * DELTA_ROWS);
        const int before = stage ? stage - 1 : STAGES - 1, ahead = i + STAGES - 1;
        const uint32_t tiles = base + stage * BYTES, values = tiles + of_values;
        struct chunk_factors *factors = &t->factors[half][i & 1];
        float mem[32];
        put_factors(factors, f, n);
        if (i < last) f = row_factors(p, s, SCAN == BACK ? chunk - 1 : chunk + 1);
        mbarrier_wait(full + 8 * stage, parity);
        if (n < DELTA_ROWS) { /* both warpgroups clear the tiles that they share */
            delta_clear(tiles, BYTES / DELTA_TILE, n, threadIdx.x % 128, 128);
            fence_proxy_async();
        }
        warpgroup_barrier(1 + half); /* factors, cleared rows */
        begin_chunk(mem, rounded, tiles);
        finish_chunk<SCAN, WARPGROUPS>(p, s, i - 1, half, out, rounded, bytes, before * BYTES + of_values);
        fence_proxy_async(); /* accesses of the tiles by threads come before TMA's */
        __syncwarp();
        if (loads) mbarrier_arrive(empty + 8 * before);
        if (SCAN == BACK)
            end_back(state, rounded, out, mem, tiles, factors, values, warp);
        else
            end_forward<SCAN == OUTPUTS>(state, rounded, out, mem, tiles, factors, values, warp);
        if (loads && ahead < n_chunk) { /* into the stage of the chunk before, when all warps have left it */
            mbarrier_wait(empty + 8 * before, parity);
            load_chunk<SCAN, WARPGROUPS>(p, s, base + before * BYTES, full + 8 * before,
                                         SCAN == BACK ? last - ahead : ahead);
        }
        __syncwarp();
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        parity ^= !stage;
    }
    finish_chunk<SCAN, WARPGROUPS>(p, s, last, half, out, rounded, bytes, last % STAGES * BYTES + of_values);
    end_state<SCAN>(rounded, p, s, half, warp);
}

#endif

template <int SCAN, int WARPGROUPS>
static __global__ void __launch_bounds__(WARPGROUPS * 128, 1)
    delta_scan_wgmma_kernel(const __grid_constant__ struct delta_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char bytes[];
    const int blocks = 2 / WARPGROUPS, item = (int)blockIdx.x / blocks, seq = item / p.n_value;
    const struct strip s = find_strip<SCAN>(p, seq, item % p.n_value, (int)blockIdx.x % blocks);
    const int level = SCAN == BACK ? p.n_level - 1 - p.level : p.level;
    if (p.links && p.links[seq * SEGMENT_LINKS + SEGMENT_LEVEL] != level) return;
    struct scan_tail *t = (struct scan_tail *)(bytes + tail_at<SCAN, WARPGROUPS>());
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(sm90_shared(&t->full[i]), 1);
            mbarrier_init(sm90_shared(&t->empty[i]), WARPGROUPS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (s.len > 0) scan<SCAN, WARPGROUPS>(p, s, bytes, t);
#else
    __trap();
#endif
}

template <int SCAN, int WARPGROUPS> static void launch_scan(const struct delta_wgmma_args *p)
{
    const int bytes = tail_at<SCAN, WARPGROUPS>() + (int)sizeof(struct scan_tail);
    const unsigned grid = grid_x((int64_t)p->n_seq * p->n_value * (2 / WARPGROUPS));
    allow_shared<delta_scan_wgmma_kernel<SCAN, WARPGROUPS>>(bytes);
    struct delta_wgmma_args a = *p;
    for (; a.level < a.n_level; a.level++) {
        delta_scan_wgmma_kernel<SCAN, WARPGROUPS><<<grid, WARPGROUPS * 128, bytes, cuda.stream>>>(a);
        CUDA_CHECK_LAUNCH();
    }
}
/* One or two warpgroups per block: both give the same bits. */
template <int SCAN> static void choose_scan(const struct delta_wgmma_args *p)
{
    if ((int64_t)p->n_seq * p->n_value * 2 <= cuda.n_sm)
        launch_scan<SCAN, 1>(p);
    else
        launch_scan<SCAN, 2>(p);
}

void delta_wgmma_outputs(const struct delta_wgmma_args *p) { choose_scan<OUTPUTS>(p); }
void delta_wgmma_states(const struct delta_wgmma_args *p) { choose_scan<STATES>(p); }
void delta_wgmma_back(const struct delta_wgmma_args *p) { choose_scan<BACK>(p); }
