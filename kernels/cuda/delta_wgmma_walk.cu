/* delta_wgmma_walk.cu - gated delta rule on Hopper: the walk over the chunks of a sequence (math: delta_wgmma.cuh),
 * forward (O, or X and the states) and backward (Y and E).
 *
 * Shapes: o, dout [T,N*128], dv inside dqkv [T,C], x [T,N*128], states and grads [slots,N,128,128], all bf16. Needs:
 *   sm_90a, rows aligned to 16 bytes.
 * Grid: a block of one warpgroup per sequence, value head and half of the value columns: columns of a state do not
 *   depend on each other. It holds 64 columns of S^T, or E^T, in f32 accumulators. The operand a of every product is
 *   in registers: S^T, V^T - S^T K^T, X^T, an accumulator rounded to bf16. Tiles of the next chunk arrive by TMA
 *   meanwhile (two stages). 113 KiB, two blocks per SM; no spills.
 * Bound: products that wait for each other. A chunk needs 1024 clocks of wgmma (S^T K^T 256, S^T Q^T 256, X^T 128, the
 *   state 256, X^T M^T 128), and each of the three links of the chain waits for the one before, about 100 clocks of
 *   rounding and latency. Two blocks per SM overlap. Moves, forward: 112 KiB per chunk and value head, keys and
 *   queries mostly from L2.
 * Numerics: states are f32 and are rounded to bf16 for products only, as are T, M, V - (r u K) S, X and X times its
 *   factor. Every element of the result is a fixed sequence of operations that does not depend on other sequences:
 *   packed sequences have the bits of each alone; no atomics.
 * Measured: H200, T 16384, N 32, in ms: O 0.17 with 4 sequences, 0.45 with one; X and states 0.19, 0.50; Y and E 0.25,
 *   0.59. */
#include "kernels/cuda/delta_wgmma.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, STAGES = 2, COLS = 64 };
enum walk { OUTPUTS, STATES, BACK };

/* Tiles of a stage: keys (2), T, V or dO; then queries (2) and M, which the states do not need. */
enum { AT_K, AT_T = 2, AT_V, AT_Q, AT_M = 6 };
template <int WALK> __host__ __device__ constexpr int stage_bytes(void)
{
    return (WALK == STATES ? AT_Q : AT_M + 1) * DELTA_TILE;
}
/* What follows the stages: barriers and the factors of a chunk. */
struct walk_tail {
    uint64_t full[STAGES];
    float into[DELTA_ROWS], out[DELTA_ROWS], query[DELTA_ROWS];
    float decay; /* of the chunk */
};
template <int WALK> static constexpr int walk_bytes(void)
{
    return STAGES * stage_bytes<WALK>() + (int)sizeof(struct walk_tail);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* 64 value columns of one value head of a sequence. */
struct strip {
    int first, len, head, half;
};

template <int WALK>
static __device__ __forceinline__ void load_chunk(const struct delta_wgmma_args &p, const struct strip &s, uint32_t to,
                                                  uint32_t bar, int chunk)
{
    const int row = s.first + chunk * DELTA_ROWS, key = s.head / p.group, column = 2 * s.head + s.half;
    mbarrier_arrive_expect(bar, stage_bytes<WALK>());
    for (int half = 0; half < 2; half++)
        tma_load(to + (AT_K + half) * DELTA_TILE, &p.qkv, bar, 0, 2 * (p.n_key + key) + half, row);
    tma_load(to + AT_T * DELTA_TILE, &p.inverse, bar, 0, s.head, row);
    if (WALK == BACK)
        tma_load(to + AT_V * DELTA_TILE, &p.dout, bar, 0, column, row);
    else
        tma_load(to + AT_V * DELTA_TILE, &p.qkv, bar, 0, 4 * p.n_key + column, row);
    if (WALK != STATES) {
        for (int half = 0; half < 2; half++)
            tma_load(to + (AT_Q + half) * DELTA_TILE, &p.qkv, bar, 0, 2 * key + half, row);
        tma_load(to + AT_M * DELTA_TILE, &p.m, bar, 0, s.head, row);
    }
}

/* The factors of a row, zero beyond the chunk. */
static __device__ __forceinline__ struct delta_factors row_factors(const struct delta_wgmma_args &p,
                                                                   const struct strip &s, int chunk)
{
    const int at = chunk * DELTA_ROWS + (int)threadIdx.x;
    struct delta_factors f = {0, 0, 0, 0};
    if (threadIdx.x < DELTA_ROWS && at < s.len) {
        const float4 v = ((const float4 *)p.factors)[s.head * (int64_t)p.n_tok + s.first + at];
        f.into = v.x, f.out = v.y, f.query = v.z, f.up = v.w;
    }
    return f;
}
static __device__ __forceinline__ void put_factors(struct walk_tail *t, const struct delta_factors &f, int n)
{
    const int i = (int)threadIdx.x;
    if (i >= DELTA_ROWS) return;
    t->into[i] = f.into;
    t->out[i] = f.out;
    t->query[i] = f.query;
    if (i == n - 1) t->decay = f.up;
}

/* The operand x * factor, step by step: factor of the columns (tokens) of this lane. */
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
    for (int k = 0; k < 4; k++) store_tiles<true>(columns_at(tile, warp, k), a[k]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 * i + lane / 2, chunk = 2 * warp + lane % 2;
        if (row < n) store16(to + row * ld + chunk * 8, load16(bytes + sm90_swizzle(row, chunk)));
    }
}
/* Writes the warp's 16 rows of a state, through two tiles that no warp reads any more. */
static __device__ __forceinline__ void write_state(bf16 *to, const uint32_t (&a)[8][4], uint32_t tile,
                                                   const char *bytes, int warp)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 8; k++) store_tiles<false>(rows_at(tile + k / 4 * DELTA_TILE, warp, k % 4), a[k]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = 16 * warp + 2 * i + lane / 16, chunk = lane % 16;
        store16(to + row * DELTA_DIM + chunk * 8,
                load16(bytes + chunk / 8 * DELTA_TILE + sm90_swizzle(row, chunk % 8)));
    }
}

static __device__ __forceinline__ void scale(float (&x)[32], float by)
{
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] *= by;
}

/* A chunk of the forward walk. s: S^T, sb: rounded to bf16; v: the chunk's tiles. Leaves X, and O if OUT, rounded, in
 * xb and ob. */
template <bool OUT>
static __device__ __forceinline__ void step_forward(float (&s)[2][32], uint32_t (&sb)[8][4], uint32_t (&xb)[4][4],
                                                    uint32_t (&ob)[4][4], uint32_t tiles, const struct walk_tail *t,
                                                    int warp)
{
    float mem[32], o[32], x[32];
    uint32_t a[4][4];
    wgmma_fence();
    delta_dot<false, 4>(mem, sb, tiles + AT_K * DELTA_TILE, false);
    delta_dot<false, 4, 4>(mem, sb, tiles + (AT_K + 1) * DELTA_TILE, true);
    wgmma_commit();
    if (OUT) {
        delta_dot<false, 4>(o, sb, tiles + AT_Q * DELTA_TILE, false);
        delta_dot<false, 4, 4>(o, sb, tiles + (AT_Q + 1) * DELTA_TILE, true);
        wgmma_commit();
    }
#pragma unroll
    for (int k = 0; k < 4; k++) load_tiles<true>(a[k], columns_at(tiles + AT_V * DELTA_TILE, warp, k));
    wgmma_wait<OUT ? 1 : 0>();
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
    for (int i = 0; i < 2; i++) scale(s[i], t->decay);
    if (OUT) {
        wgmma_wait<1>();
        wgmma_use(o);
        scale_columns(o, t->query);
    }
    wgmma_wait<0>();
    wgmma_use(x);
    pack_scaled(a, x, t->out, 1);
    delta_pack(xb, x);
    wgmma_fence();
    for (int i = 0; i < 2; i++) delta_dot<true, 4>(s[i], a, tiles + (AT_K + i) * DELTA_TILE, true);
    wgmma_commit();
    if (OUT) {
        delta_dot<false, 4>(o, xb, tiles + AT_M * DELTA_TILE, true);
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
        delta_pack(ob, o);
    }
}

/* A chunk of the backward walk. e: E^T, eb: rounded to bf16. Leaves Y, rounded, in yb. */
static __device__ __forceinline__ void step_back(float (&e)[2][32], uint32_t (&eb)[8][4], uint32_t (&yb)[4][4],
                                                 uint32_t tiles, const struct walk_tail *t, int warp)
{
    float dx[32], of_m[32], y[32];
    uint32_t dout[4][4], a[4][4];
    for (int i = 0; i < 2; i++) scale(e[i], t->decay);
#pragma unroll
    for (int k = 0; k < 4; k++) load_tiles<true>(dout[k], columns_at(tiles + AT_V * DELTA_TILE, warp, k));
    wgmma_fence();
    delta_dot<false, 4>(dx, eb, tiles + AT_K * DELTA_TILE, false);
    delta_dot<false, 4, 4>(dx, eb, tiles + (AT_K + 1) * DELTA_TILE, true);
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
    for (int i = 0; i < 2; i++) delta_dot<true, 4>(e[i], dout, tiles + (AT_Q + i) * DELTA_TILE, true);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_use(y);
    pack_scaled(a, y, t->into, -1);
    delta_pack(yb, y);
    wgmma_fence();
    for (int i = 0; i < 2; i++) delta_dot<true, 4>(e[i], a, tiles + (AT_K + i) * DELTA_TILE, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(e[0]);
    wgmma_use(e[1]);
    delta_pack<0>(eb, e[0]);
    delta_pack<4>(eb, e[1]);
}

template <int WALK>
static __device__ __forceinline__ void walk(const struct delta_wgmma_args &p, const struct strip &s, char *bytes,
                                            struct walk_tail *t)
{
    const uint32_t base = sm90_shared(bytes), full = sm90_shared(t->full);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), n_chunk = (s.len + DELTA_ROWS - 1) / DELTA_ROWS;
    const int last = n_chunk - 1, column = s.head * DELTA_DIM + s.half * COLS;
    float state[2][32] = {};
    uint32_t rounded[8][4] = {}, a[4][4], out[4][4];
    if (threadIdx.x == 0)
        for (int i = 0; i < min(STAGES, n_chunk); i++)
            load_chunk<WALK>(p, s, base + i * stage_bytes<WALK>(), full + 8 * i, WALK == BACK ? last - i : i);
    struct delta_factors f = row_factors(p, s, WALK == BACK ? last : 0);
    for (int i = 0; i < n_chunk; i++) {
        const int chunk = WALK == BACK ? last - i : i, next = WALK == BACK ? chunk - 1 : chunk + 1, stage = i % STAGES;
        const int n = min(DELTA_ROWS, s.len - chunk * DELTA_ROWS), row = s.first + chunk * DELTA_ROWS;
        const uint32_t tiles = base + stage * stage_bytes<WALK>();
        const char *at = bytes + stage * stage_bytes<WALK>();
        put_factors(t, f, n);
        if (i < last) f = row_factors(p, s, next);
        mbarrier_wait(full + 8 * stage, i / STAGES & 1);
        if (n < DELTA_ROWS) {
            delta_clear(tiles, stage_bytes<WALK>() / DELTA_TILE, n, threadIdx.x, THREADS);
            fence_proxy_async();
        }
        warpgroup_barrier(1); /* factors, cleared rows */
        if (WALK == BACK)
            step_back(state, rounded, out, tiles, t, warp);
        else
            step_forward<WALK == OUTPUTS>(state, rounded, a, out, tiles, t, warp);
        const int64_t value = row * (int64_t)p.n_value * DELTA_DIM + column;
        if (WALK == OUTPUTS)
            write_columns(p.o + row * p.ld_o + column, p.ld_o, out, tiles + AT_V * DELTA_TILE, at + AT_V * DELTA_TILE,
                          warp, n);
        if (WALK == STATES)
            write_columns(p.x_rows + value, (int64_t)p.n_value * DELTA_DIM, a, tiles + AT_V * DELTA_TILE,
                          at + AT_V * DELTA_TILE, warp, n);
        if (WALK == BACK)
            write_columns(p.dqkv + row * p.ld_dqkv + 2 * p.n_key * DELTA_DIM + column, p.ld_dqkv, out,
                          tiles + AT_V * DELTA_TILE, at + AT_V * DELTA_TILE, warp, n);
        fence_proxy_async();  /* accesses of the tiles by threads come before TMA's */
        warpgroup_barrier(1); /* no warp reads the tiles or the factors any more */
        if (WALK != OUTPUTS && i < last) {
            bf16 *rows = WALK == BACK ? p.grad_rows : p.state_rows;
            const int64_t slot = delta_state_slot(WALK == BACK ? row : row + DELTA_ROWS);
            write_state(rows + ((slot * p.n_value + s.head) * DELTA_DIM + s.half * COLS) * DELTA_DIM, rounded,
                        tiles + AT_K * DELTA_TILE, at + AT_K * DELTA_TILE, warp);
            fence_proxy_async();
            warpgroup_barrier(1);
        }
        if (i + STAGES < n_chunk && threadIdx.x == 0)
            load_chunk<WALK>(p, s, tiles, full + 8 * stage, WALK == BACK ? chunk - STAGES : chunk + STAGES);
    }
}

#endif

template <int WALK>
static __global__ void __launch_bounds__(THREADS, 2)
    delta_walk_wgmma_kernel(const __grid_constant__ struct delta_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char bytes[];
    const int item = (int)blockIdx.x, head = item / 2 % p.n_value, seq = item / 2 / p.n_value, first = p.cu[seq];
    const struct strip s = {first, p.cu[seq + 1] - first, head, item % 2};
    struct walk_tail *t = (struct walk_tail *)(bytes + STAGES * stage_bytes<WALK>());
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) mbarrier_init(sm90_shared(&t->full[i]), 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (s.len > 0) walk<WALK>(p, s, bytes, t);
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

template <int WALK> static void launch_walk(const struct delta_wgmma_args *p)
{
    static bool ready;
    const unsigned grid = grid_x((int64_t)p->n_seq * p->n_value * (DELTA_DIM / COLS));
    if (!ready)
        CUDA_CHECK(cudaFuncSetAttribute(delta_walk_wgmma_kernel<WALK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        walk_bytes<WALK>()));
    ready = true;
    delta_walk_wgmma_kernel<WALK><<<grid, THREADS, walk_bytes<WALK>(), cuda.stream>>>(*p);
    CUDA_CHECK_LAUNCH();
}

void delta_wgmma_outputs(const struct delta_wgmma_args *p) { launch_walk<OUTPUTS>(p); }
void delta_wgmma_states(const struct delta_wgmma_args *p) { launch_walk<STATES>(p); }
void delta_wgmma_back(const struct delta_wgmma_args *p) { launch_walk<BACK>(p); }
