/* grouped_wgmma.cu - the grouped GEMM of grouped.h on Hopper: wgmma fed by TMA.
 *
 * Math: v = scale * la lb_e + a b_e + bias_e per expert, then the epilogue of grouped_epilogue.cuh. The adapter is
 *   summed in the same accumulators: steps of la and lb, a multiplication by scale, then steps of a and b.
 * Shapes: grouped.h. Tiles of 128 rows x 192 columns, 64 of the depth (inner dimension) per step.
 * Needs: sm_90a; n_in, n_out, lda, r multiples of 8, 16-byte aligned bases, at most 512 experts per launch.
 * Grid: persistent, one block per SM: a loading warpgroup and two consumer warpgroups, which alternate between the
 *   tiles of the block (ping-pong): while one multiplies, the other is in its epilogue. They share 5 stages of the
 *   pipeline, 212 KiB; in the GLU's backward also 18 KiB for sums, 227 KiB.
 * Bound: a is read once per 192 columns and b once per 128 rows, mostly from L2; 2 M n_in n_out FLOP: compute-bound.
 * Numerics: f32 sums in one fixed order.
 *
 * TMA loads b, and a when its rows are contiguous; rows of the next expert at the end of a tile are computed but not
 * stored. Gathered rows are loaded by cp.async of all 128 loading threads, into the same swizzle. Out-of-bounds
 * elements are zeros: depth that is no multiple of 64, columns, LoRA ranks.
 *
 * Compiling: ptxas makes wgmmas wait for each other, and says so (C7515), unless it sees that only wgmmas write sums
 * between the first product of a tile and the last. So the test r > 0 is before the loop over r, and the compiler
 * cannot move clear(). */
#include "kernels/cuda/sm90/grouped/grouped_wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- loading ---- */

/* rows [128] in shared memory: the row of a for each row of a tile. Warp w finds the rows that it copies: 4 w to 4 w +
 * 3 of every 16. Rows beyond the expert's last repeat that one and are not stored. */
static __device__ __forceinline__ void find_rows(int *rows, const struct grouped &g, const struct tile &t, int thread)
{
    const int lane = thread % 32, row = thread / 32 * 4 + lane % 4 + lane / 4 * 16;
    __syncwarp(); /* all lanes have read those of the tile before */
    rows[row] = quotient_of(g.token, g.slot[t.m + MT_MIN(row, t.n_row - 1)]);
    __syncwarp();
}
/* Starts the copies of this thread, inner indices k .. k + 63: 8 threads per row, the rows of a thread 16 apart. */
static __device__ __forceinline__ void copy_rows(uint32_t to, const int *rows, const struct grouped &g, int k,
                                                 int thread)
{
    const int chunk = k + thread % 8 * 8;
    const bf16 *a = g.a + chunk;
    to += sm90_swizzle(thread / 8, thread % 8);
#pragma unroll
    for (int i = 0; i < 8; i++) cp_async_16(to + i * 2048, a + rows[thread / 8 + 16 * i] * g.lda, chunk < (int)g.n_in);
}

template <typename PIPE, int EPILOGUE, bool KN>
static __device__ __forceinline__ void load_tiles(const struct wgmma_args &p, const struct tiles *tiles,
                                                  struct ring ring, int *rows)
{
    const struct grouped &g = p.g;
    const int half = EPILOGUE == SWIGLU ? (int)g.n_out / 2 : 0, thread = threadIdx.x % LOADERS;
    const bool gathered = g.slot != NULL;
    const int n_thin = count_thin(g), n_block = count_steps(g);
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    bool waits = waits_for_tiles();
    if (!gathered && thread != 0) return;

    if (thread == 0 && (int)blockIdx.x < n_tile) announce_tile(p.counter);
    for (int at = blockIdx.x, e = 0, turn = 0; at < n_tile; at += gridDim.x, turn ^= 1) {
        const struct tile t = tile_at(tiles, at, &e);
        if (thread == 0) begin_tile(p.counter, at, n_tile, 0, 1, &waits);
        if (gathered) find_rows(rows, g, t, thread);
        for (int block = 0; block < n_block; block++) {
            const bool thin = block < n_thin, a_by_tma = thin || !gathered;
            const int k = DEPTH * (thin ? block : block - n_thin);
            const uint32_t to = ring.data + ring.stage * PIPE::BYTES,
                           full = ring.full + 8 * (ring.stage + turn * PIPE::STAGES);
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            if (thread == 0) {
                if (block == MT_MAX(0, n_block - ANNOUNCED) && at + (int)gridDim.x < n_tile) announce_tile(p.counter);
                mbarrier_arrive_expect(full, PIPE::BYTES - (a_by_tma ? 0 : PIPE::ROW_BYTES));
                if (a_by_tma) tma_load(to, thin ? &p.la : &p.a, full, k, t.m, 0);
                load_b<KN>(to + PIPE::ROW_BYTES, thin ? &p.lb : &p.b, full, k, t.n,
                           thin ? (int)grouped_expert(g, g.first + t.e) : t.e, half);
            }
            if (!thin && gathered) copy_rows(to, rows, g, k, thread);
            if (gathered) cp_async_arrive(full);
            ring_advance<PIPE::STAGES>(&ring);
        }
    }
}
#endif

struct loads_bf16 {
    enum { LOADER = LOADER_REGISTERS, CONSUMER = CONSUMER_REGISTERS, IN_TURNS = true, SCRATCH_BYTES = ROWS * 4 };
    using pipe = struct pipeline<5>;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static __device__ __forceinline__ int arrivals(const struct grouped &g) { return g.slot ? 1 + LOADERS : 1; }
    static __device__ __forceinline__ void tile_loaded(const struct wgmma_args &, int) {}
    template <int EPILOGUE, bool KN>
    static __device__ __forceinline__ void load(const struct wgmma_args &p, const struct tiles *tiles,
                                                const struct ring &ring, void *rows)
    {
        load_tiles<pipe, EPILOGUE, KN>(p, tiles, ring, (int *)rows);
    }
#endif
};

/* ---- host ---- */

bool cuda_grouped_swiglu(const struct grouped *g)
{
    return g->glu.kind == GLU_SWIGLU && !g->glu.interleaved && g->n_out % 256 == 0 && !g->bias && !g->kn;
}

void cuda_grouped_wgmma(const struct grouped *g)
{
    if (has_tiles(g)) launch_epilogue<loads_bf16>(g, NULL, NULL);
}
