/* grouped_wgrad.cu - gradients of the experts' adapters: sums over an expert's rows of a wide row times a thin one.
 *
 * Math, shapes: grouped.h. A block makes 128 x RT elements of out_e: it walks the rows of the expert in steps of 32,
 *   both operands as they lie in memory, [rows, 128] and [rows, RT]; ldmatrix.trans turns them into fragments whose
 *   depth is the rows. Eight warps, 16 columns of the wide operand each.
 * Needs: n_wide, ld_wide, r multiples of 8, r <= 256, 16-byte aligned rows.
 * Grid: (ceil(n_wide / 128), n_exp, ceil(r / RT)) blocks of 256 threads. RT 16, 32 or 64: 58, 63 or 80 registers, 40,
 *   40 or 48 KiB of shared memory; no spills.
 * Moves: 2 * M * n_wide bytes (again for every 64 of r) and 2 * M * r * ceil(n_wide / 128), at 2 * r FLOP for 2
 *   bytes: memory bound for the ranks in use.
 * Numerics: f32 sums over the rows in their order, one addition to out; nothing depends on which block runs when. One
 *   expert with all the rows is slow (only ceil(n_wide / 128) blocks work), not wrong.
 * Measured: H100 80GB HBM3, kernel of commit 1d28d06, by itself, 32 experts, 65536 rows, r 16:
 *   of width 2880 0.16 to 0.18 ms, of
 *   5760 0.27 ms, 2.8 TB/s. */
#include "kernels/cuda/grouped.h"
#include "kernels/cuda/mma.cuh"

enum { WIDE = 128, ROWS = 32, STAGES = 4, THREADS = 256, WIDE_BYTES = ROWS * WIDE * 2 };

template <int RT> struct thin_tile {
    static constexpr int CHUNKS = RT < 32 ? 4 : RT / 8; /* of a row in shared memory: RT = 16 leaves half unused */
    static constexpr int STAGE_BYTES = WIDE_BYTES + ROWS * CHUNKS * 16;
};

/* Rows of the wide operand that this thread copies in the step that begins at row m: two. */
struct two_rows {
    int64_t at[2];
};
static __device__ struct two_rows find_rows(const struct grouped_wgrad &g, int m, int end)
{
    struct two_rows rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = m + (int)threadIdx.x / 16 + 16 * i;
        rows.at[i] = row >= end ? -1 : g.slot ? g.slot[row] / (int)g.top_k : row;
    }
    return rows;
}

/* Starts the copies of rows m .. m+31; rows from end on and columns beyond the operands' are 0. */
template <int RT>
static __device__ void load_rows(const struct grouped_wgrad &g, const struct two_rows &rows, int m, int end,
                                 uint32_t stage)
{
    const int tid = threadIdx.x;
    const int64_t col = (int64_t)blockIdx.x * WIDE + tid % 16 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool live = rows.at[i] >= 0 && col < g.n_wide;
        copy_async16(stage + tile_offset<WIDE / 8>(tid / 16 + 16 * i, tid % 16),
                     live ? g.wide + rows.at[i] * g.ld_wide + col : g.wide, live ? 16 : 0);
    }
    if (tid < ROWS * RT / 8) {
        const int row = tid / (RT / 8), chunk = tid % (RT / 8);
        const int64_t c = (int64_t)blockIdx.z * RT + chunk * 8;
        const bool live = m + row < end && c < g.r;
        copy_async16(stage + WIDE_BYTES + tile_offset<thin_tile<RT>::CHUNKS>(row, chunk),
                     live ? g.thin + (int64_t)(m + row) * g.r + c : g.thin, live ? 16 : 0);
    }
}

/* c [16 wide, RT thin] += the product of one step. */
template <int RT> static __device__ __forceinline__ void multiply(float c[][4], uint32_t stage, int warp, int lane)
{
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) {
        uint32_t x[4], y[RT / 8][2];
        /* Matrices: rows 0-7 of columns 0-7, of columns 8-15, then rows 8-15. */
        load_matrix4_trans(x, stage +
                                  tile_offset<WIDE / 8>(k + (lane & 7) + (lane >> 4 << 3), warp * 2 + (lane >> 3 & 1)));
#pragma unroll
        for (int j = 0; j < RT / 8; j += 2)
            load_matrix4_trans(y[j], stage + WIDE_BYTES +
                                         tile_offset<thin_tile<RT>::CHUNKS>(k + (lane & 15), j + (lane >> 4)));
#pragma unroll
        for (int j = 0; j < RT / 8; j++) mma_bf16(c[j], x, y[j]);
    }
}

template <int RT>
static __global__ void __launch_bounds__(THREADS) wgrad_kernel(const __grid_constant__ struct grouped_wgrad g)
{
    constexpr int STAGE_BYTES = thin_tile<RT>::STAGE_BYTES;
    __shared__ __align__(128) unsigned char memory[STAGES * STAGE_BYTES];
    const uint32_t shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int64_t e = blockIdx.y;
    const int first = g.offs[e], end = g.offs[e + 1], n_step = (end - first + ROWS - 1) / ROWS;
    if (n_step == 0) return;

    struct two_rows rows = find_rows(g, first, end); /* of the next load: their latency passes during a product */
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < n_step) load_rows<RT>(g, rows, first + step * ROWS, end, shared + step * STAGE_BYTES);
        copy_commit();
        rows = find_rows(g, first + (step + 1) * ROWS, end);
    }
    float c[RT / 8][4] = {};
    for (int step = 0; step < n_step; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); /* this step has arrived for all; all are done with the buffer loaded next */
        const int ahead = step + STAGES - 1;
        if (ahead < n_step) load_rows<RT>(g, rows, first + ahead * ROWS, end, shared + ahead % STAGES * STAGE_BYTES);
        copy_commit();
        rows = find_rows(g, first + (ahead + 1) * ROWS, end);
        multiply<RT>(c, shared + step % STAGES * STAGE_BYTES, warp, lane);
    }

    float *out = g.out + e * g.n_wide * g.r;
    const int64_t wide = (int64_t)blockIdx.x * WIDE + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < RT / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t row = wide + i / 2 * 8, col = (int64_t)blockIdx.z * RT + j * 8 + lane % 4 * 2 + i % 2;
            if (row >= g.n_wide || col >= g.r) continue;
            out[g.thin_first ? col * g.n_wide + row : row * g.r + col] += g.scale * c[j][i];
        }
    }
}

template <int RT> static void launch(const struct grouped_wgrad *g)
{
    const dim3 grid(grid_x(ceil_div(g->n_wide, WIDE)), (unsigned)g->n_exp, (unsigned)ceil_div(g->r, RT));
    wgrad_kernel<RT><<<grid, THREADS, 0, cuda.stream>>>(*g);
    CUDA_CHECK_LAUNCH();
}

void cuda_grouped_wgrad(const struct grouped_wgrad *g)
{
    MT_REQUIRE(g->n_wide > 0 && g->n_wide % 8 == 0 && g->ld_wide % 8 == 0 && g->r > 0 && g->r % 8 == 0 && g->r <= 256,
               "adapter gradient %lld x %lld, rows %lld apart: multiples of 8 are needed, rank at most 256",
               (long long)g->n_wide, (long long)g->r, (long long)g->ld_wide);
    MT_REQUIRE(grouped_aligned(g->wide) && grouped_aligned(g->thin),
               "adapter gradient: an operand is not 16-byte aligned");
    MT_REQUIRE(g->n_exp <= 65535, "%lld experts", (long long)g->n_exp);
    if (g->n_row == 0) return;
    if (g->r <= 16)
        launch<16>(g);
    else if (g->r <= 32)
        launch<32>(g);
    else
        launch<64>(g);
}
