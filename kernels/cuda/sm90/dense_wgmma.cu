/* dense_wgmma.cu - the dense product of dense.h: the pipeline of grouped_wgmma.cu for one matrix that all rows share.
 *
 * Math: the adapter is summed in the same accumulators: steps of la and lb, a multiplication by scale, then steps of a
 *   and b. A tile that several parts share has steps for each of them; TMA reads zeros where columns of the tile are
 *   outside of a part.
 * Shapes: dense.h. Tiles of 128 rows x 192 columns, 64 of the depth (inner dimension) per step.
 * Needs: sm_90a; n_out, r and leading dimensions multiples of 8, 16-byte aligned rows.
 * Grid: persistent, one block per SM: one thread loads by TMA, two consumer warpgroups take tiles in turns
 *   (pingpong.cuh); 5 stages, 201 KiB.
 * Bound: a is read once per 192 columns and b once per 128 rows, mostly from L2; out is written once, res read once. 2
 *   n_row n_in n_out FLOP: compute-bound. All blocks begin each 128 steps of a tile together (pingpong.cuh).
 * Numerics: f32 sums in one fixed order, one rounding. */
#include "kernels/cuda/parts/dense.h"

#include <float.h>
#include <string.h>

#include "kernels/cuda/sm90/pingpong.cuh"

static_assert((int)ROWS == (int)DENSE_ROWS && (int)COLS == (int)DENSE_COLS, "tiles of dense.h");

enum {
    STAGES = 5,
    RING_BYTES = STAGES * STAGE_BYTES + 1024, /* 1024: alignment */
    MAX_PARTS = 3,
    TOGETHER = 128,  /* steps of a tile that blocks begin together */
    WHOLE_BAND = 32, /* at most this many row tiles are one band: their part of a stays in L2 while b is read once */
    PREFETCHED = 8   /* steps before the end of a tile in which its part of res is prefetched */
};

struct dense_args {
    CUtensorMap a, b, la, lb[MAX_PARTS]; /* boxes: rows or columns of one tile by 64 of depth; zeroed when unused */
    struct dense d;
    int band;    /* row tiles of a band */
    int counter; /* index in tiles_begun */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Tile `at` in bands of row tiles, column by column in a band; the parts first_part .. end_part-1 have its columns. */
struct dense_tile {
    int m, n, n_row, first_part, end_part;
};
static __device__ __forceinline__ struct dense_tile find_tile(const struct dense_args &p, int at)
{
    const struct dense &d = p.d;
    const int n_row_tile = (int)((d.n_row + ROWS - 1) / ROWS), n_col = (int)((d.n_out + COLS - 1) / COLS);
    const int band = at / (p.band * n_col), in_band = at - band * p.band * n_col;
    const int height = MT_MIN(p.band, n_row_tile - band * p.band);
    struct dense_tile t = {};
    t.m = (band * p.band + in_band % height) * ROWS;
    t.n = in_band / height * COLS;
    t.n_row = MT_MIN(ROWS, (int)d.n_row - t.m);
#pragma unroll
    for (int i = 0; i < MAX_PARTS; i++) {
        if (i >= d.n_part || t.n >= d.part[i].end || t.n + COLS <= d.part[i].first) continue;
        if (t.end_part == 0) t.first_part = i;
        t.end_part = i + 1;
    }
    return t;
}
static __device__ __forceinline__ int count_tiles(const struct dense &d)
{
    return (int)((d.n_row + ROWS - 1) / ROWS * ((d.n_out + COLS - 1) / COLS));
}

/* Depth steps of an adapter, and of a tile. */
static __device__ __forceinline__ int thin_steps(const struct dense &d) { return ((int)d.r + DEPTH - 1) / DEPTH; }
static __device__ __forceinline__ int all_steps(const struct dense &d, const struct dense_tile &t)
{
    return (t.end_part - t.first_part) * thin_steps(d) + ((int)d.n_in + DEPTH - 1) / DEPTH;
}

/* ---- loading, by one thread ---- */

struct loader {
    struct ring ring;
    int turn; /* the warpgroup whose tile it is */
};
template <bool KN>
static __device__ __forceinline__ void load_step(struct loader *l, const CUtensorMap *a, int a_k, int m,
                                                 const CUtensorMap *b, int b_k, int n)
{
    struct ring *ring = &l->ring;
    const uint32_t to = ring->data + ring->stage * STAGE_BYTES,
                   full = ring->full + 8 * (ring->stage + l->turn * STAGES);
    mbarrier_wait(ring->empty + 8 * ring->stage, ring->parity ^ 1);
    mbarrier_arrive_expect(full, STAGE_BYTES);
    tma_load(to, a, full, a_k, m, 0);
    load_b<KN>(to + A_BYTES, b, full, b_k, n, 0, 0);
    ring_advance<STAGES>(ring);
}

template <bool KN> static __device__ __forceinline__ void load_tiles(const struct dense_args &p, struct ring ring)
{
    const struct dense &d = p.d;
    const int n_tile = count_tiles(d), n_wide = ((int)d.n_in + DEPTH - 1) / DEPTH;
    const int n_together = (n_wide + TOGETHER - 1) / TOGETHER;
    struct loader l = {ring, 0};
    bool waits = waits_for_tiles();
    if ((int)blockIdx.x < n_tile) announce_tile(p.counter);
    for (int at = blockIdx.x; at < n_tile; at += gridDim.x, l.turn ^= 1) {
        const struct dense_tile t = find_tile(p, at);
        for (int i = t.first_part; i < t.end_part; i++)
            for (int k = 0; k < (int)d.r; k += DEPTH)
                load_step<KN>(&l, &p.la, d.part[i].la + k, t.m, &p.lb[i], k, t.n - d.part[i].first);
        for (int step = 0; step < n_wide; step++) {
            const int part = step / TOGETHER, end = MT_MIN((part + 1) * TOGETHER, n_wide);
            if (step % TOGETHER == 0) begin_tile(p.counter, at, n_tile, part, n_together, &waits);
            if (step == MT_MAX(part * TOGETHER, end - ANNOUNCED) && (end < n_wide || at + (int)gridDim.x < n_tile))
                announce_tile(p.counter);
            load_step<KN>(&l, &p.a, step * DEPTH, t.m, &p.b, step * DEPTH, t.n);
        }
    }
}

/* ---- epilogues of 64 rows, `first` .. first + 63 of the tile ---- */

/* out = sums + bias + res */
static __device__ __forceinline__ void store_half(const float (&sums)[COLS / 2], const struct dense &d,
                                                  const struct dense_tile &t, int first)
{
    const int pair = t.n + threadIdx.x % 4 * 2, eight = t.n + threadIdx.x % 4 * 8, n_out = (int)d.n_out;
#pragma unroll
    for (int c = 0; c < COLS; c += 32) {
        if (t.n + c >= n_out) break;
        float2 bias[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (d.bias && pair + c + 8 * j < n_out) bias[j] = __ldg((const float2 *)(d.bias + pair + c + 8 * j));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
            const bool live = row < t.n_row && eight + c < n_out;
            float v[4][2];
            uint32_t w[4], res[4] = {};
            row_of_sums(v, sums, c / 2, half);
            if (d.res) {
                if (live) *(uint4 *)res = *(const uint4 *)(d.res + (t.m + row) * d.ld_res + eight + c);
                quad_transpose(res);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                w[j] = bf16_pack(v[j][0] + bias[j].x + bf16_low(res[j]), v[j][1] + bias[j].y + bf16_high(res[j]));
            quad_transpose(w);
            if (live) store16(d.out + (t.m + row) * d.ld_out + eight + c, make_uint4(w[0], w[1], w[2], w[3]));
        }
    }
}

/* sums = exp(sums - max) in row `half` of this thread, with the sums of that row in this tile. */
static __device__ __forceinline__ struct tile_sums sum_row(float (&sums)[COLS / 2], int half, int n, int n_out)
{
    struct tile_sums y = {-FLT_MAX, 0, INT32_MAX}; /* finite: exp(-inf - max) is 0 */
    const int col = n + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < COLS / 4; i++) {
        const float x = sums[i / 2 * 4 + i % 2 + 2 * half];
        if (n + i / 2 * 8 >= n_out || !(x > y.max)) continue;
        y.max = x;
        y.id = col + i / 2 * 8 + i % 2;
    }
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
        const float max = __shfl_xor_sync(~0u, y.max, lane);
        const int id = __shfl_xor_sync(~0u, y.id, lane);
        if (max > y.max || (max == y.max && id < y.id)) y.max = max, y.id = id;
    }
#pragma unroll
    for (int i = 0; i < COLS / 4; i++) {
        float *x = &sums[i / 2 * 4 + i % 2 + 2 * half];
        *x = n + i / 2 * 8 < n_out ? exp2f((*x - y.max) * 1.44269504f) : 0.0f;
        y.sum += *x;
    }
    y.sum = quad_sum(y.sum);
    return y;
}
/* out = exp(sums - max), tile_sums and own. */
static __device__ __forceinline__ void store_exp(float (&sums)[COLS / 2], const struct dense &d,
                                                 const struct dense_tile &t, int first)
{
    const int n_out = (int)d.n_out, n_col = (n_out + COLS - 1) / COLS, eight = t.n + threadIdx.x % 4 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        const bool live = row < t.n_row;
        const int64_t m = t.m + row;
        const int own =
            live ? d.label[m] - t.n - (int)threadIdx.x % 4 * 2 : -1; /* its column, from this lane's first */
#pragma unroll
        for (int i = 0; i < COLS / 4; i++)
            if (own == i / 2 * 8 + i % 2 && t.n + i / 2 * 8 < n_out) d.own[m] = sums[i / 2 * 4 + i % 2 + 2 * half];
        const struct tile_sums y = sum_row(sums, half, t.n, n_out);
        if (live && threadIdx.x % 4 == 0) d.tile_sums[m * n_col + t.n / COLS] = y;
#pragma unroll
        for (int c = 0; c < COLS; c += 32) {
            float v[4][2];
            uint32_t w[4];
            row_of_sums(v, sums, c / 2, half);
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = bf16_pack(v[j][0], v[j][1]);
            quad_transpose(w);
            if (live && eight + c < n_out)
                store16(d.out + m * d.ld_out + eight + c, make_uint4(w[0], w[1], w[2], w[3]));
        }
    }
}

/* ---- a warpgroup's tile ---- */

/* Prefetches this row's part of res into L2. */
static __device__ __forceinline__ void prefetch_res(const struct dense &d, const struct dense_tile &t)
{
    const int row = threadIdx.x % ROWS;
    if (d.res && row < t.n_row)
        prefetch_l2(d.res + (t.m + row) * d.ld_res + t.n, (uint32_t)MT_MIN(COLS, (int)d.n_out - t.n) * 2);
}

template <bool KN, int HALVES>
static __device__ __forceinline__ int multiply_tile(float (&sums)[2][COLS / 2], struct ring *ring,
                                                    const struct dense &d, const struct dense_tile &t)
{
    const int n_part = t.end_part - t.first_part;
    if (n_part > 0) {
        multiply_thin<struct pipeline<STAGES>, KN, HALVES>(sums, ring, (int)d.r, n_part);
        scale_sums<HALVES>(sums, d.part[t.first_part].scale);
    }
    return multiply<struct pipeline<STAGES>, KN, HALVES>(sums, ring, (int)d.n_in, n_part > 0, false, PREFETCHED,
                                                         [&] { prefetch_res(d, t); });
}

template <bool KN, bool TALLY>
static __device__ __forceinline__ void multiply_tiles(const struct dense_args &p, struct ring ring)
{
    const struct dense &d = p.d;
    const int n_tile = count_tiles(d);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    float sums[2][COLS / 2];
    ring.full += group * STAGES * 8;
    for (int at = blockIdx.x, i = 0; at < n_tile; at += gridDim.x, i++) {
        const struct dense_tile t = find_tile(p, at);
        if (i % 2 != group) { /* the other warpgroup's */
            ring.stage = (ring.stage + all_steps(d, t)) % STAGES;
            continue;
        }
        const int last =
            t.n_row > HALF_ROWS ? multiply_tile<KN, 2>(sums, &ring, d, t) : multiply_tile<KN, 1>(sums, &ring, d, t);
        wgmma_wait<0>();
        wgmma_use(sums[0]);
        wgmma_use(sums[1]);
        release(ring, last);
#pragma unroll 1
        for (int first = 0; first < MT_MIN(t.n_row, 2 * HALF_ROWS); first += HALF_ROWS) {
            if constexpr (TALLY)
                store_exp(sums[0], d, t, first);
            else
                store_half(sums[0], d, t, first);
#pragma unroll
            for (int j = 0; j < COLS / 2; j++) sums[0][j] = sums[1][j];
        }
    }
}
#endif

template <bool KN, bool TALLY>
static __global__ void __launch_bounds__(THREADS, 1) dense_wgmma_kernel(const __grid_constant__ struct dense_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[2][STAGES], empty[STAGES];
    begin_launch(p.counter);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            for (int w = 0; w < 2; w++) mbarrier_init(sm90_shared(&full[w][i]), 1);
            mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / 2 / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const struct ring ring = {(sm90_shared(memory) + 1023) / 1024 * 1024, sm90_shared(full), sm90_shared(empty), 0, 0};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<LOADER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) load_tiles<KN>(p, ring);
    } else {
        sm90_registers_more<CONSUMER_REGISTERS>();
        multiply_tiles<KN, TALLY>(p, ring);
    }
#else
    __trap();
#endif
}

/* ---- host ---- */

template <bool KN, bool TALLY> static void launch(const struct dense *d)
{
    const int64_t n_row_tile = ceil_div(d->n_row, ROWS);
    struct dense_args p;
    memset(&p, 0, sizeof(p));
    p.d = *d;
    p.band = n_row_tile <= WHOLE_BAND ? (int)n_row_tile : BAND;
    p.counter = next_counter();
    p.a = tensor_map(d->a, 1, d->n_row, d->n_in, d->lda, ROWS);
    p.b = KN ? tensor_map(d->b, 1, d->n_in, d->n_out, d->n_out, DEPTH)
             : tensor_map(d->b, 1, d->n_out, d->n_in, d->n_in, COLS);
    if (d->n_part > 0) p.la = tensor_map(d->la, 1, d->n_row, d->part[d->n_part - 1].la + d->r, d->ld_la, ROWS);
    for (int i = 0; i < d->n_part; i++) {
        const struct dense_part *part = &d->part[i];
        p.lb[i] = KN ? tensor_map(d->lb, 1, d->r, d->n_out, d->n_out, DEPTH)
                     : tensor_map(d->lb + part->lb * d->r, 1, part->end - part->first, d->r, d->r, COLS);
    }
    allow_shared<dense_wgmma_kernel<KN, TALLY>>(RING_BYTES);
    dense_wgmma_kernel<KN, TALLY><<<cuda.n_sm, THREADS, RING_BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

bool cuda_dense_takes(const struct dense *d)
{
    const int64_t eights[] = {d->n_out, d->r, d->lda, d->ld_out, d->ld_res, d->ld_la};
    bool fits = d->n_row < INT32_MAX / 2 && d->n_out < INT32_MAX / 2 && d->n_in < INT32_MAX / 2 &&
                ceil_div(d->n_row, ROWS) * ceil_div(d->n_out, COLS) * ceil_div(d->n_in, DEPTH) < INT32_MAX / 2 &&
                d->r <= 256 && !(d->kn && d->n_part > 1) && !(!d->kn && d->n_in % 8);
    const void *const rows[] = {d->a, d->b, d->out, d->res, d->la, d->lb, d->bias};
    for (int i = 0; i < MT_LEN(rows); i++) fits = fits && grouped_aligned(rows[i]);
    for (int i = 0; i < MT_LEN(eights); i++) fits = fits && eights[i] % 8 == 0;
    for (int i = 0; i < d->n_part; i++) fits = fits && d->part[i].first < d->part[i].end;
    for (int i = 1; i < d->n_part; i++)
        fits = fits && (d->part[i].scale == d->part[i - 1].scale ||
                        (d->part[i].first % COLS == 0 && d->part[i - 1].end <= d->part[i].first));
    return fits;
}

void cuda_dense_wgmma(const struct dense *d)
{
    MT_REQUIRE(cuda_dense_takes(d), "a dense product of %lld rows, [%lld, %lld]", (long long)d->n_row,
               (long long)d->n_out, (long long)d->n_in);
    if (d->n_row == 0) return;
    if (d->tile_sums)
        launch<false, true>(d);
    else
        d->kn ? launch<true, false>(d) : launch<false, false>(d);
}
