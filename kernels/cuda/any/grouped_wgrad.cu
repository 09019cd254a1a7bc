/* grouped_wgrad.cu - weight gradients of the experts' adapters: outer products of wide and thin rows, summed per
 * expert.
 *
 * Math, shapes: grouped.h. A block computes 128 x RT elements of out_e from some rows of expert e, 32 rows per step.
 * Both operands stay as stored, [rows, 128] and [rows, RT]; ldmatrix.trans makes fragments whose inner dimension is the
 * rows. Eight warps, 16 columns of the wide operand each. Split-K: grouped_parts.cuh.
 * Needs: n_wide, ld_wide, r multiples of 8, r <= 256, 16-byte aligned rows.
 * Grid: (ceil(n_wide / 128), n_row / share + n_exp, ceil(r / RT)) blocks of 256 threads; blocks beyond the last part
 *   return at once. RT 16, 32 or 64: 40, 40 and 48 KiB of shared memory.
 * Bound: 2 * M * n_wide bytes (again for every 64 of r) and 2 * M * r * ceil(n_wide / 128), with 2 * r FLOP per 2
 *   bytes: memory bound for the usual r. Partial sums: at most 16 tiles of 512 * RT bytes per SM.
 * Numerics: f32 sums over the rows of a part in order, then over the parts in order, then one addition to out. The
 *   result does not depend on the order in which blocks run. */
#include "kernels/cuda/parts/grouped_parts.cuh"
#include "kernels/cuda/parts/mma.cuh"

enum { WIDE = WGRAD_WIDE, ROWS = 32, STAGES = 4, THREADS = PARTS_THREADS, WIDE_BYTES = ROWS * WIDE * 2 };

template <int RT> struct thin_tile {
    static constexpr int CHUNKS = RT < 32 ? 4 : RT / 8; /* chunks of a row in shared memory; RT 16 uses half of its 4 */
    static constexpr int STAGE_BYTES = WIDE_BYTES + ROWS * CHUNKS * 16;
};

struct wgrad_args {
    struct grouped_wgrad g;
    int share, ld_wide;
};

/* The two rows of the wide operand that this thread copies in the step that begins at row m; -1 beyond the end.
 * Gathered rows are given as token * top_k + choice, which load_rows divides by top_k a step later: a division here
 * would wait for the load. */
struct two_rows {
    int at[2];
};
static __device__ __forceinline__ struct two_rows find_rows(const struct grouped_wgrad &g, int m, int end)
{
    struct two_rows rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = m + (int)threadIdx.x / 16 + 16 * i;
        rows.at[i] = row >= end ? -1 : g.slot ? __ldg(g.slot + row) : row;
    }
    return rows;
}

struct columns {
    int wide, thin;
};

/* Starts the copies of rows m .. m+31; zeros for rows from `end` on and columns out of bounds. */
template <int RT>
static __device__ __forceinline__ void load_rows(const struct wgrad_args &p, const struct two_rows &rows,
                                                 const struct columns &first, int m, int end, uint32_t stage)
{
    const struct grouped_wgrad &g = p.g;
    const int tid = threadIdx.x, col = first.wide + tid % 16 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool live = rows.at[i] >= 0 && col < (int)g.n_wide;
        const int row = g.slot ? quotient_of(g.token, rows.at[i]) : rows.at[i];
        copy_async16(stage + tile_offset<WIDE / 8>(tid / 16 + 16 * i, tid % 16),
                     live ? g.wide + (int64_t)row * p.ld_wide + col : g.wide, live ? 16 : 0);
    }
    if (tid < ROWS * RT / 8) {
        const int row = tid / (RT / 8), chunk = tid % (RT / 8), c = first.thin + chunk * 8;
        const bool live = m + row < end && c < (int)g.r;
        copy_async16(stage + WIDE_BYTES + tile_offset<thin_tile<RT>::CHUNKS>(row, chunk),
                     live ? g.thin + (int64_t)(m + row) * (int)g.r + c : g.thin, live ? 16 : 0);
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

/* Writes this thread's part of c to `tile`, in the layout of out: [RT, 128] with thin_first, else [128, RT]. */
template <int RT> static __device__ void store_tile(float *tile, float c[][4], bool thin_first)
{
    const int lane = threadIdx.x & 31, wide = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < RT / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = wide + i / 2 * 8, col = j * 8 + lane % 4 * 2 + i % 2;
            tile[thin_first ? col * WIDE + row : row * RT + col] = c[j][i];
        }
    }
}

/* out += scale * tile. A thread loads AT_ONCE elements before it stores the first, since loads do not overtake
 * stores. */
template <int RT>
static __device__ void add_tile(const struct grouped_wgrad &g, const float *tile, const struct columns &first,
                                int expert)
{
    enum { AT_ONCE = 8 };
    const uint32_t n_wide = (uint32_t)g.n_wide, r = (uint32_t)g.r;
    float *out = g.out + (int64_t)expert * g.n_wide * g.r;
    for (uint32_t from = threadIdx.x; from < WIDE * RT; from += AT_ONCE * THREADS) {
        float *to[AT_ONCE], old[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t i = from + k * THREADS;
            const uint32_t wide = first.wide + (g.thin_first ? i % WIDE : i / RT);
            const uint32_t thin = first.thin + (g.thin_first ? i / WIDE : i % RT);
            to[k] = wide < n_wide && thin < r ? out + (g.thin_first ? thin * n_wide + wide : wide * r + thin) : NULL;
            old[k] = to[k] ? *to[k] : 0;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (to[k]) *to[k] = old[k] + g.scale * tile[from + k * THREADS];
    }
    static_assert(WIDE * RT % (AT_ONCE * THREADS) == 0, "whole rounds");
}

template <int RT>
static __global__ void __launch_bounds__(THREADS, RT == 64 ? 3 : 4)
    wgrad_kernel(const __grid_constant__ struct wgrad_args p)
{
    constexpr int STAGE_BYTES = thin_tile<RT>::STAGE_BYTES;
    __shared__ __align__(128) unsigned char memory[STAGES * STAGE_BYTES];
    static_assert(sizeof(memory) >= WIDE * RT * sizeof(float), "the tile reuses the memory of the stages");
    const struct grouped_wgrad &g = p.g;
    const uint32_t shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const struct columns first = {(int)blockIdx.x * WIDE, (int)blockIdx.z * RT};
    const struct unit u = find_unit(g, blockIdx.y, p.share, ROWS);
    if (u.parts == 0) return;
    const int n_step = (u.end - u.first + ROWS - 1) / ROWS;

    struct two_rows rows = find_rows(g, u.first, u.end); /* of the next load: fetched during a product */
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < n_step) load_rows<RT>(p, rows, first, u.first + step * ROWS, u.end, shared + step * STAGE_BYTES);
        copy_commit();
        rows = find_rows(g, u.first + (step + 1) * ROWS, u.end);
    }
    float c[RT / 8][4] = {};
    for (int step = 0; step < n_step; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); /* this step is loaded for all threads, and the stage loaded next is free */
        const int ahead = step + STAGES - 1;
        if (ahead < n_step)
            load_rows<RT>(p, rows, first, u.first + ahead * ROWS, u.end, shared + ahead % STAGES * STAGE_BYTES);
        copy_commit();
        rows = find_rows(g, u.first + (ahead + 1) * ROWS, u.end);
        multiply<RT>(c, shared + step % STAGES * STAGE_BYTES, warp, lane);
    }
    if (u.parts > 1 && !sum_parts(g, c, u, blockIdx.z * gridDim.x + blockIdx.x, gridDim.x * gridDim.z)) return;
    copy_wait<0>();
    __syncthreads();
    store_tile<RT>((float *)memory, c, g.thin_first);
    __syncthreads();
    add_tile<RT>(g, (float *)memory, first, u.expert);
}

/* ---- launch ---- */

/* Rows of a part: such that full parts give 8 blocks per SM, two waves of four resident blocks. */
static int64_t share_of(int64_t n_row, int64_t tiles)
{
    return MT_MAX(ceil_div(ceil_div(n_row * tiles, 8 * DIVISION_SM), ROWS) * ROWS, (int64_t)WGRAD_SHARE);
}

template <int RT> static void launch(const struct grouped_wgrad *g)
{
    const int64_t tiles = scratch_wgrad_tiles(g->n_wide, g->r), share = share_of(g->n_row, tiles);
    const int64_t units = g->n_row / share + g->n_exp;
    MT_REQUIRE(scratch_wgrad_partial(g->n_row, tiles) <= MAX_TILES && units <= 65535 && share <= INT32_MAX &&
                   g->ld_wide <= INT32_MAX,
               "adapter gradients of %lld experts, %lld rows %lld apart, %lld tiles", (long long)g->n_exp,
               (long long)g->n_row, (long long)g->ld_wide, (long long)tiles);
    const struct wgrad_args p = {*g, (int)share, (int)g->ld_wide};
    const dim3 grid(grid_x(ceil_div(g->n_wide, WIDE)), (unsigned)units, (unsigned)ceil_div(g->r, RT));
    wgrad_kernel<RT><<<grid, THREADS, 0, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

void cuda_grouped_wgrad(const struct grouped_wgrad *g)
{
    MT_REQUIRE(g->n_wide > 0 && g->n_wide % 8 == 0 && g->ld_wide % 8 == 0 && g->r > 0 && g->r % 8 == 0 && g->r <= 256,
               "adapter gradient %lld x %lld, rows %lld apart: multiples of 8 are needed, rank at most 256",
               (long long)g->n_wide, (long long)g->r, (long long)g->ld_wide);
    MT_REQUIRE(grouped_aligned(g->wide) && grouped_aligned(g->thin),
               "adapter gradient: an operand is not 16-byte aligned");
    if (g->n_row == 0) return;
    if (g->r <= 16)
        launch<16>(g);
    else if (g->r <= 32)
        launch<32>(g);
    else
        launch<64>(g);
}
