/* grouped_wgmma_fp8.cu - the grouped GEMM of grouped_fp8.h on Hopper: wgmma in e4m3, fed by TMA.
 *
 * Math: v = row_step * step_e * (a b_e^T) + scale * (la lb_e) + bias_e, then the epilogue of grouped_epilogue.cuh. The
 *   e4m3 products come first; after every 128 of the depth (inner dimension) they are added to a second set of f32
 *   sums, as the tensor cores keep about 14 bits. The adapter's bf16 product follows, in the accumulators that are free
 *   then.
 * Shapes: grouped.h. Tiles of 128 rows x 192 columns, 128 of depth per step; both operands K-major, which is why the
 *   backward reads the transpose of W_e.
 * Needs: sm_90a; n_in a multiple of 16, n_out and r of 8, 16-byte aligned bases, at most 512 experts per launch.
 * Grid: persistent, one block per SM: one producer thread, two consumer warpgroups of 64 rows each, 5 stages of 40 KiB.
 *   While one warpgroup adds its sums, the other multiplies.
 * Bound: a once per 192 columns and b once per 128 rows, mostly from L2; 2 M n_in n_out FLOP: compute-bound.
 * Numerics: products exact, f32 sums in one fixed order. */
#include <string.h>

#include "kernels/cuda/parts/grouped_fp8.h"
#include "kernels/cuda/sm90/product_wgmma.cuh"

enum {
    STAGES = 5,
    RING_BYTES = STAGES * STAGE_BYTES + 1024, /* 1024: alignment */
    LEAD = 2,                                 /* stages by which the first consumer warpgroup is ahead of the second */
    STEP = 128,                               /* of depth, in bytes */
    SUM_REGISTERS = 240,                      /* (24 + 2 * 240) * 128 = 63 Ki of the SM's 64 Ki */
    LOAD_REGISTERS = 24
};

struct fp8_args {
    CUtensorMap a, b, la, lb;
    const float *row_step, *step;
    struct grouped g;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Descriptors of the current stage's operands for this warpgroup's 64 rows. */
template <bool KN> static __device__ __forceinline__ void operands(const struct ring &ring, uint64_t *a, uint64_t *b)
{
    const uint32_t data = ring.data + ring.stage * STAGE_BYTES;
    *a = sm90_descriptor(data + threadIdx.x / 128 * (A_BYTES / 2), 16, 1024);
    *b = sm90_descriptor(data + A_BYTES, KN ? CHUNK_BYTES : 16, 1024);
}

/* sums = la lb_e. Depth from r on, rounded up to 16, is zeros and is skipped. */
template <bool KN>
static __device__ __forceinline__ void multiply_thin(float (&sums)[COLS / 2], struct ring *ring, int r)
{
    for (int k0 = 0; k0 < r; k0 += 16) {
        const int k = k0 % DEPTH;
        uint64_t a, b;
        operands<KN>(*ring, &a, &b);
        if (k == 0) mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        wgmma_fence();
        wgmma<KN>(sums, a + k_major(k), b + b_step<KN>(k), k0 > 0);
        wgmma_commit();
        wgmma_wait<0>();
        if (k + 16 < DEPTH && k0 + 16 < r) continue;
        release(*ring, ring->stage);
        ring_advance<STAGES>(ring);
    }
    wgmma_use(sums);
}

/* Waits for and releases all stages of a tile in which this warpgroup has no rows. */
static __device__ __forceinline__ void skip_tile(struct ring *ring, int n_block)
{
    for (int i = 0; i < n_block; i++) {
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        release(*ring, ring->stage);
        ring_advance<STAGES>(ring);
    }
}

/* GROUPED_GLU_BWD: prefetches the tile's part of pre into L2; one thread per row, or two when gates and ups are in
 * separate halves. */
static __device__ __forceinline__ void prefetch_pre(const struct grouped &g, const struct tile &t)
{
    const bool pairs = g.glu.interleaved;
    const int row = threadIdx.x % ROWS, second = threadIdx.x / ROWS;
    if (row >= t.n_row || (pairs && second)) return;
    const uint32_t bytes = (uint32_t)MT_MIN((int64_t)COLS, g.n_out - t.n) * (pairs ? 4 : 2);
    prefetch_l2(g.pre + pre_start(g, t.m + row, t.n) + second * g.n_out, bytes);
}

static __device__ __forceinline__ void load_slots(struct two_rows *rows, const struct grouped &g, const struct tile &t)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
        rows->slot[half] = __ldg(g.row_slot + t.m + MT_MIN(row_of_thread() + 8 * half, t.n_row - 1));
}
static __device__ __forceinline__ void load_weights(struct two_rows *rows, const struct grouped &g)
{
#pragma unroll
    for (int half = 0; half < 2; half++) rows->weight[half] = __ldg(g.gate + rows->slot[half]);
}

template <bool KN>
static __device__ __forceinline__ void load_steps(const struct fp8_args &p, const struct tiles *tiles, struct ring ring)
{
    const struct grouped &g = p.g;
    const int n_main = ((int)g.n_in + STEP - 1) / STEP, n_block = n_main + ((int)g.r + DEPTH - 1) / DEPTH;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    if (threadIdx.x % LOADERS) return;
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, &e);
        for (int block = 0; block < n_block; block++) {
            const bool thin = block >= n_main;
            const uint32_t to = ring.data + ring.stage * STAGE_BYTES, full = ring.full + 8 * ring.stage;
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            mbarrier_arrive_expect(full, STAGE_BYTES);
            if (thin) {
                const int k = (block - n_main) * DEPTH;
                tma_load(to, &p.la, full, k, t.m, 0);
                load_b<KN>(to + A_BYTES, &p.lb, full, k, t.n, (int)g.first + t.e, 0);
            } else {
                tma_load(to, &p.a, full, block * STEP, t.m, 0);
                tma_load(to + A_BYTES, &p.b, full, block * STEP, t.n, t.e);
            }
            ring_advance<STAGES>(&ring);
        }
    }
}

/* sums = a b_e^T over n_in of depth; `part` is of one step. */
static __device__ __forceinline__ void multiply_e4m3(float (&sums)[COLS / 2], float (&part)[COLS / 2],
                                                     struct ring *ring, int n_in)
{
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) sums[i] = 0.0f;
    for (int k0 = 0; k0 < n_in; k0 += STEP) {
        uint64_t a, b;
        operands<false>(*ring, &a, &b);
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP; k += 32) wgmma_e4m3(part, a + k / 16, b + k / 16, k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_use(part);
        release(*ring, ring->stage);
        ring_advance<STAGES>(ring);
#pragma unroll
        for (int i = 0; i < COLS / 2; i++) sums[i] += part[i];
    }
}

/* bias: as in struct extra of grouped_wgmma.cuh. */
template <int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct fp8_args &p, const struct tiles *tiles,
                                                      struct ring ring, float *bias)
{
    const struct grouped &g = p.g;
    const int r = (int)g.r, n_in = (int)g.n_in, n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    const int n_block = (r + DEPTH - 1) / DEPTH + (n_in + STEP - 1) / STEP;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    float sums[COLS / 2];
    bias += group * COLS;
    if (group && (int)blockIdx.x < n_tile && n_block > LEAD) mbarrier_wait(ring.full + 8 * LEAD, 0);
    for (int at = blockIdx.x, e = 0, odd = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, &e);
        if (is_glu_bwd(EPILOGUE)) prefetch_pre(g, t);
        if (group * 64 >= t.n_row) {
            skip_tile(&ring, n_block);
            continue;
        }
        struct two_rows rows = {};
        if (is_glu_bwd(EPILOGUE)) load_slots(&rows, g, t);
        {
            float part[COLS / 2];
            multiply_e4m3(sums, part, &ring, n_in);
            if (is_glu_bwd(EPILOGUE)) {
                load_weights(&rows, g);
                load_pre<layout_of(EPILOGUE)>(&rows, g, t);
            }
            float step[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                step[half] = __ldg(p.step + g.first + t.e) *
                             __ldg(p.row_step + t.m + MT_MIN(row_of_thread() + 8 * half, t.n_row - 1));
#pragma unroll
            for (int i = 0; i < COLS / 2; i++) sums[i] *= step[i / 2 % 2];
            if (r > 0) {
                multiply_thin<KN>(part, &ring, r);
#pragma unroll
                for (int i = 0; i < COLS / 2; i++) sums[i] += g.scale * part[i];
            }
        }
        if constexpr (is_glu_bwd(EPILOGUE)) {
            finish_glu_bwd<false, layout_of(EPILOGUE)>(sums, g, t, &rows);
        } else {
            const float2 columns = load_bias(g, t);
            float *own = bias + odd * 2 * COLS;
            if (threadIdx.x % 128 < COLS / 2) *(float2 *)(own + threadIdx.x % 128 * 2) = columns;
            warpgroup_barrier(1 + group);
            finish<EPILOGUE>(sums, g, t, own);
            odd ^= 1;
        }
    }
}
#endif

template <int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) grouped_fp8_wgmma_kernel(const __grid_constant__ struct fp8_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ uint64_t full[STAGES], empty[STAGES];
    __shared__ __align__(16) float bias[2 * 2 * COLS];
    if (threadIdx.x < 32) count_tiles(&tiles, p.g);
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(sm90_shared(&full[i]), 1);
            mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const struct ring ring = {(sm90_shared(memory) + 1023) / 1024 * 1024, sm90_shared(full), sm90_shared(empty), 0, 0};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<LOAD_REGISTERS>();
        load_steps<KN>(p, &tiles, ring);
    } else {
        sm90_registers_more<SUM_REGISTERS>();
        multiply_tiles<EPILOGUE, KN>(p, &tiles, ring, bias);
    }
#else
    __trap();
#endif
}

/* ---- host ---- */

/* n_mat matrices [n_row, n_col] of bytes, `apart` bytes from each other, in boxes of box_rows x 128. */
static CUtensorMap byte_map(const uint8_t *base, int64_t n_mat, int64_t n_row, int64_t n_col, int64_t apart,
                            int box_rows)
{
    const int64_t size[3] = {n_col, n_row, n_mat}, stride[2] = {n_col, apart}, box[3] = {STEP, box_rows, 1};
    return sm90_tensor_map(base, size, stride, box, CU_TENSOR_MAP_DATA_TYPE_UINT8);
}

template <int EPILOGUE, bool KN> static void launch(const struct grouped_fp8 *f)
{
    const struct grouped *g = &f->g;
    static bool configured;
    struct fp8_args p;
    memset(&p, 0, sizeof(p));
    p.g = *g;
    p.row_step = f->row_step;
    p.step = f->step;
    p.a = byte_map(f->a, 1, g->n_row, g->n_in, g->n_row * g->n_in, ROWS);
    p.b = byte_map(f->b, g->count, g->n_out, g->n_in, f->apart, COLS);
    if (g->r > 0) {
        p.la = tensor_map(g->la, 1, g->n_row, g->r, g->r, ROWS);
        p.lb = KN ? tensor_map(g->lb, g->n_exp, g->r, g->n_out, g->n_out, DEPTH)
                  : tensor_map(g->lb, g->n_exp, g->n_out, g->r, g->r, COLS);
    }
    if (!configured)
        CUDA_CHECK(cudaFuncSetAttribute(grouped_fp8_wgmma_kernel<EPILOGUE, KN>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES));
    configured = true;
    grouped_fp8_wgmma_kernel<EPILOGUE, KN><<<cuda.n_sm, THREADS, RING_BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

void cuda_grouped_fp8(const struct grouped_fp8 *f)
{
    const struct grouped *g = &f->g;
    const int64_t n_tile = (ceil_div(g->n_row, ROWS) + g->count) * ceil_div(g->n_out, COLS);
    grouped_require(g);
    MT_REQUIRE(g->count <= MAX_EXPERTS && n_tile + cuda.n_sm <= INT32_MAX, "%lld experts, %lld tiles",
               (long long)g->count, (long long)n_tile);
    MT_REQUIRE(g->n_in % 16 == 0 && !g->ids && grouped_aligned(f->a) && grouped_aligned(f->b),
               "e4m3 rows of %lld: a multiple of 16, aligned to 16 bytes, is needed", (long long)g->n_in);
    if (g->n_row == 0 || g->count == 0) return;
    if (g->epilogue == GROUPED_GLU_BWD) {
        MT_REQUIRE(g->kn, "GROUPED_GLU_BWD needs kn");
        g->glu.interleaved ? launch<GROUPED_GLU_BWD, true>(f) : launch<HALVES_BWD, true>(f);
    } else if (g->epilogue == GROUPED_GLU) {
        MT_REQUIRE(!g->kn && g->glu.interleaved, "GROUPED_GLU in e4m3 needs interleaved columns");
        launch<GROUPED_GLU, false>(f);
    } else {
        MT_REQUIRE(g->epilogue == GROUPED_STORE, "epilogue %d in e4m3", (int)g->epilogue);
        g->kn ? launch<GROUPED_STORE, true>(f) : launch<GROUPED_STORE, false>(f);
    }
}
