/* dense_wgmma.cu - the dense product of dense.h: the pipeline of grouped_wgmma.cu for one matrix that all rows share.
 *
 * Math: the adapter extends the depth of the same accumulators: steps of la and lb, a multiplication by scale, then
 *   steps of a and b. A tile takes the columns of la, the rows of lb and the scale of the part that it is in.
 * Shapes: dense.h. Tiles of 128 rows x COLS columns (256, or without kn 192 where that divides better), 64 of depth
 *   per step.
 * Needs: sm_90a; n_in, n_out, r and the distances of rows multiples of 8, 16-byte aligned rows.
 * Grid: persistent, one block per SM: a producer warpgroup, of which one thread loads by TMA, and two consumer
 *   warpgroups of 64 rows each; stages and registers as grouped_wgmma.cu, no spills.
 * Moves: as grouped_wgmma.cu; out is written once. 2 n_row n_in n_out FLOP: compute-bound.
 * Numerics: f32 sums in one fixed order, one rounding: bitwise repeatable.
 * Measured: H200, qwen3.5-35b-a3b, T 16384, r 8, bench step of 40 layers. Commit 61c7d7f, which calls cuBLASLt and adds
 *   the adapter in a second pass, and an earlier form of this kernel ran in turn. us per call, first 61c7d7f:
 *     forward 2048 -> 12288   1309  1265     backward of layers of 2048 columns   338  312
 *     forward 2048 -> 9216     993   958     backward of layers of 1024 columns   218  196
 *     forward 2048 -> 1024     142   140     backward of layers of 64 columns     146  101
 * Tried and dropped, us per call, first 61c7d7f: the residual added in the epilogue, 299 and 303; in backward, tiles of
 *   192 columns at a depth of 5120 (gpt-oss-20b), 791 and 856. */
#include "kernels/cuda/dense.h"

#include <string.h>

#include "kernels/cuda/grouped_wgmma.cuh"

struct dense_args {
    CUtensorMap a, b, la, lb; /* boxes: rows or columns of one tile by 64 of depth; zeroed when unused */
    struct dense d;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Tile `at` in bands of BAND row tiles, column by column in a band; its adapter. */
struct dense_tile {
    int m, n, n_row;
    int la, lb, r; /* r 0: no adapter */
    float scale;
};
static __device__ __forceinline__ struct dense_tile find_tile(const struct dense &d, int at, int cols)
{
    const int n_row_tile = (int)((d.n_row + ROWS - 1) / ROWS), n_col = (int)((d.n_out + cols - 1) / cols);
    const int band = at / (BAND * n_col), in_band = at - band * BAND * n_col;
    const int height = MT_MIN(BAND, n_row_tile - band * BAND);
    struct dense_tile t = {};
    t.m = (band * BAND + in_band % height) * ROWS;
    t.n = in_band / height * cols;
    t.n_row = MT_MIN(ROWS, (int)d.n_row - t.m);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const struct dense_part &p = d.part[i];
        if (i >= d.n_part || t.n < p.first || t.n >= p.end) continue;
        t.la = p.la;
        t.lb = p.lb + t.n - p.first;
        t.r = (int)d.r;
        t.scale = p.scale;
    }
    return t;
}
static __device__ __forceinline__ int count_tiles(const struct dense &d, int cols)
{
    return (int)((d.n_row + ROWS - 1) / ROWS * ((d.n_out + cols - 1) / cols));
}

/* Depth steps of the adapter, and of the tile. */
static __device__ __forceinline__ int thin_steps(const struct dense_tile &t) { return (t.r + DEPTH - 1) / DEPTH; }
static __device__ __forceinline__ int wide_steps(const struct dense &d) { return ((int)d.n_in + DEPTH - 1) / DEPTH; }

/* One thread. */
template <int COLS, bool KN>
static __device__ __forceinline__ void load_tiles(const struct dense_args &p, struct ring ring)
{
    const int n_tile = count_tiles(p.d, COLS), n_wide = wide_steps(p.d);
    for (int at = blockIdx.x; at < n_tile; at += gridDim.x) {
        const struct dense_tile t = find_tile(p.d, at, COLS);
        const int n_thin = thin_steps(t);
        for (int step = 0; step < n_thin + n_wide; step++) {
            const bool thin = step < n_thin;
            const int k = DEPTH * (thin ? step : step - n_thin);
            const uint32_t to = ring.data + ring.stage * shape<COLS>::STAGE_BYTES, full = ring.full + 8 * ring.stage;
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            mbarrier_arrive_expect(full, shape<COLS>::B_BYTES + A_BYTES);
            tma_load(to, thin ? &p.la : &p.a, full, thin ? t.la + k : k, t.m, 0);
            load_b<COLS, KN>(to + A_BYTES, thin ? &p.lb : &p.b, full, k, thin ? t.lb : t.n, 0);
            ring_advance<COLS>(&ring);
        }
    }
}

/* sums (+)= a b. A stage is released one step later, when its products are complete. Returns the last stage, whose
 * products may still run. */
template <int COLS, bool KN>
static __device__ __forceinline__ int multiply(float (&sums)[COLS / 2], struct ring *ring, int n_step, bool accumulate)
{
    int before = -1;
    for (int step = 0; step < n_step; step++) {
        uint64_t a, b;
        operands<COLS, KN>(*ring, &a, &b);
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16)
            wgmma<KN>(sums, a + k_major(k), b + b_step<KN>(k), accumulate || step > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0) release(*ring, before);
        before = ring->stage;
        ring_advance<COLS>(ring);
    }
    return before;
}

/* out = sums + bias for this thread's two rows. */
template <int COLS>
static __device__ __forceinline__ void store_tile(const float (&sums)[COLS / 2], const struct dense &d,
                                                  const struct dense_tile &t)
{
    const int pair = t.n + threadIdx.x % 4 * 2, first = t.n + threadIdx.x % 4 * 8, n_out = (int)d.n_out;
#pragma unroll
    for (int c = 0; c < COLS; c += 32) {
        if (t.n + c >= n_out) break;
        float2 bias[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (d.bias && pair + c + 8 * j < n_out) bias[j] = __ldg((const float2 *)(d.bias + pair + c + 8 * j));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of_thread() + 8 * half;
            float v[4][2];
            uint32_t w[4];
            row_of_sums<COLS>(v, sums, c / 2, half);
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = bf16_pack(v[j][0] + bias[j].x, v[j][1] + bias[j].y);
            quad_transpose(w);
            if (row < t.n_row && first + c < n_out)
                store16(d.out + (t.m + row) * d.ld_out + first + c, make_uint4(w[0], w[1], w[2], w[3]));
        }
    }
}

template <int COLS, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct dense &d, struct ring ring)
{
    const int n_tile = count_tiles(d, COLS), n_wide = wide_steps(d);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    float sums[COLS / 2] = {0.0f};
    if (group && (int)blockIdx.x < n_tile && n_wide > LEAD) mbarrier_wait(ring.full + 8 * LEAD, 0);
    for (int at = blockIdx.x; at < n_tile; at += gridDim.x) {
        const struct dense_tile t = find_tile(d, at, COLS);
        if (group * 64 >= t.n_row) {
            skip_tile<COLS>(&ring, thin_steps(t) + n_wide);
            continue;
        }
        if (t.r > 0) {
            multiply_thin<COLS, KN>(sums, &ring, t.r);
#pragma unroll
            for (int i = 0; i < COLS / 2; i++) sums[i] *= t.scale;
        }
        const int last = multiply<COLS, KN>(sums, &ring, n_wide, t.r > 0);
        wgmma_wait<0>();
        wgmma_use(sums);
        release(ring, last);
        store_tile<COLS>(sums, d, t);
    }
}
#endif

template <int COLS, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) dense_wgmma_kernel(const __grid_constant__ struct dense_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[shape<COLS>::STAGES], empty[shape<COLS>::STAGES];
    if (threadIdx.x == 0) {
        for (int i = 0; i < shape<COLS>::STAGES; i++) {
            mbarrier_init(sm90_shared(&full[i]), 1);
            mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const struct ring ring = {
        (sm90_shared(memory) + 1023) / 1024 * 1024, sm90_shared(full), sm90_shared(empty), 0, 0, 1};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<LOADER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) load_tiles<COLS, KN>(p, ring);
    } else {
        sm90_registers_more<CONSUMER_REGISTERS>();
        multiply_tiles<COLS, KN>(p.d, ring);
    }
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

/* ---- host ---- */

template <int COLS, bool KN> static void launch(const struct dense *d)
{
    struct dense_args p;
    memset(&p, 0, sizeof(p));
    p.d = *d;
    p.a = tensor_map(d->a, 1, d->n_row, d->n_in, d->lda, ROWS);
    p.b = KN ? tensor_map(d->b, 1, d->n_in, d->n_out, d->n_out, DEPTH)
             : tensor_map(d->b, 1, d->n_out, d->n_in, d->n_in, COLS);
    if (d->n_part > 0) {
        const struct dense_part *last = &d->part[d->n_part - 1];
        const int64_t n_lb = last->lb + last->end - last->first;
        p.la = tensor_map(d->la, 1, d->n_row, last->la + d->r, d->ld_la, ROWS);
        p.lb =
            KN ? tensor_map(d->lb, 1, d->r, d->n_out, d->n_out, DEPTH) : tensor_map(d->lb, 1, n_lb, d->r, d->r, COLS);
    }
    allow_shared<dense_wgmma_kernel<COLS, KN>>(shape<COLS>::RING_BYTES);
    dense_wgmma_kernel<COLS, KN><<<cuda.n_sm, THREADS, shape<COLS>::RING_BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

/* With kn and narrow tiles cuBLASLt is faster. */
bool cuda_dense_takes(const struct dense *d)
{
    const int cols = narrow(d->n_out) ? 192 : 256;
    const bool aligned = grouped_aligned(d->a) && grouped_aligned(d->b) && grouped_aligned(d->out) &&
                         grouped_aligned(d->la) && grouped_aligned(d->lb) && grouped_aligned(d->bias);
    bool fits = cuda.hopper && aligned && d->n_row < INT32_MAX / 2 && d->n_out < INT32_MAX / 2 &&
                d->n_row * d->n_out >= (int64_t)ROWS * 256 * cuda.n_sm && d->r <= 256 && !(d->kn && d->n_part > 1) &&
                !(d->kn && cols == 192);
    const int64_t eights[] = {d->n_out, d->n_in, d->r, d->lda, d->ld_out, d->ld_la};
    for (int i = 0; i < MT_LEN(eights); i++) fits = fits && eights[i] % 8 == 0;
    for (int i = 0; i < d->n_part; i++)
        fits = fits && d->part[i].first % cols == 0 && (i + 1 == d->n_part || d->part[i].end % cols == 0);
    return fits;
}

void cuda_dense_wgmma(const struct dense *d)
{
    MT_REQUIRE(cuda_dense_takes(d), "a dense product of %lld rows, [%lld, %lld]", (long long)d->n_row,
               (long long)d->n_out, (long long)d->n_in);
    if (d->kn)
        launch<256, true>(d);
    else
        narrow(d->n_out) ? launch<192, false>(d) : launch<256, false>(d);
}
