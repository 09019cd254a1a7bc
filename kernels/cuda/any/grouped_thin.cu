/* grouped_thin.cu - grouped products with few output columns: one factor of an adapter, x A^T or dy B.
 *
 * Math, shapes: grouped.h, without la, lb and bias; n_out <= 64, GROUPED_STORE or GROUPED_GATED.
 * Needs: n_in, n_out, lda multiples of 8, 16-byte aligned rows. Any GPU since sm_80.
 * Tiles: 64 rows x BN columns, BN 16, 32 or 64, one block of four warps each. Depth 128 per step: 256 contiguous bytes
 *   of each row, so that DRAM pages are read in large pieces. Three pipeline stages, two of them loading.
 * Grid: at most ceil(n_row / 64) + count blocks. Order: the first row tile of every expert, then the second of every
 *   expert, and so on. The rows of an expert are in token order, so concurrent blocks gather the same tokens, from L2.
 *   BN 16: 90 to 94 registers and 60 KiB of shared memory (72 where g.kn), so 3 blocks per SM; BN 64: 168 and 96 KiB,
 *   which fits GPUs with 99 KiB per block; no spills.
 * Bound: 2 * M * n_in bytes of rows, twice with g.rows; gathered rows are read once from DRAM as far as L2 holds
 *   them: memory bound.
 * Numerics: f32 sums in the order of the depth, one rounding to bf16. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/mma.cuh"

enum { MAX_EXPERTS = 4096 }; /* the numbers of their row tiles fit into the memory of the stages */
enum { ROWS = 64, DEPTH = 128, STAGES = 3, THREADS = 128, CHUNKS = DEPTH / 8, PASSES = ROWS * CHUNKS / THREADS };

template <int BN, bool KN> struct tile {
    static constexpr int B_CHUNKS = !KN ? CHUNKS
                                    : BN < 32
                                        ? 4
                                        : BN / 8; /* chunks of a row of b in shared memory; BN 16 uses half of its 4 */
    static constexpr int A_BYTES = ROWS * DEPTH * 2;
    static constexpr int STAGE_BYTES = A_BYTES + (KN ? DEPTH : BN) * B_CHUNKS * 16, BYTES = STAGES * STAGE_BYTES;
};

/* ---- which tile ---- */

struct tile_at {
    int expert, row, n_row; /* n_row 0: no tile */
};

/* The number of tiles that are among the first `level` of their expert. All lanes of the warp call it. */
static __device__ __forceinline__ int tiles_below(const int *tiles, int count, int level)
{
    int sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < count; i += 32) sum += min(tiles[i], level);
    return __reduce_add_sync(~0u, sum);
}
/* Tile t in the order (index in its expert, expert); the index by binary search. tiles: shared memory for the number of
 * row tiles of each expert of this launch, free when this returns. */
static __device__ struct tile_at find_tile(const struct grouped &g, int *tiles, int t)
{
    const int lane = threadIdx.x % 32, count = (int)g.count;
    const int32_t *offs = g.offs + g.first;
    int most = 0, level = 0;
    for (int i = threadIdx.x; i < count; i += THREADS)
        tiles[i] = (__ldg(offs + i + 1) - __ldg(offs + i) + ROWS - 1) / ROWS;
    __syncthreads();
    for (int i = lane; i < count; i += 32) most = max(most, tiles[i]);
    most = __reduce_max_sync(~0u, most);
    for (int step = most ? 1 << (31 - __clz(most)) : 0; step > 0; step /= 2)
        if (tiles_below(tiles, count, level + step) <= t) level += step;
    int left = t - tiles_below(tiles, count, level);
    struct tile_at at = {0, 0, 0};
    for (int base = 0; base < count; base += 32) {
        const bool own = base + lane < count && tiles[base + lane] > level;
        const uint32_t has = __ballot_sync(~0u, own);
        if (left < __popc(has)) {
            const bool found = own && __popc(has & ((1u << lane) - 1)) == left;
            const int i = base + __ffs(__ballot_sync(~0u, found)) - 1, row = __ldg(offs + i) + level * ROWS;
            at.expert = (int)g.first + i;
            at.row = row;
            at.n_row = min((int)ROWS, __ldg(offs + i + 1) - row);
            break;
        }
        left -= __popc(has);
    }
    __syncthreads();
    return at;
}

/* ---- loads ---- */

/* The rows whose chunks this thread copies, 8 rows apart: 16 threads a row. */
struct rows {
    const bf16 *at[PASSES]; /* the first chunk of this thread in the row; NULL: no row */
};
static __device__ __forceinline__ struct rows find_rows(const struct grouped &g, const struct tile_at &p)
{
    struct rows rows;
    int row[PASSES]; /* all loaded before one is used */
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int m = p.row + min((int)threadIdx.x / CHUNKS + i * (THREADS / CHUNKS), p.n_row - 1);
        row[i] = g.slot ? __ldg(g.slot + m) : m;
    }
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const bool live = (int)threadIdx.x / CHUNKS + i * (THREADS / CHUNKS) < p.n_row;
        const int at = g.slot ? quotient_of(g.token, row[i]) : row[i];
        rows.at[i] = live ? g.a + at * g.lda + threadIdx.x % CHUNKS * 8 : NULL;
    }
    return rows;
}

/* Starts the copies of depth k .. k+127; zeros out of bounds. */
template <int BN, bool KN>
static __device__ __forceinline__ void load_step(const struct grouped &g, const struct rows &rows, const bf16 *b, int k,
                                                 uint32_t stage)
{
    const int tid = threadIdx.x, n_in = (int)g.n_in, n_out = (int)g.n_out, chunk = tid % CHUNKS;
    const bool deep = k + chunk * 8 < n_in;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const bool in_bounds = deep && rows.at[i];
        copy_async16(stage + tile_offset<CHUNKS>(tid / CHUNKS + i * (THREADS / CHUNKS), chunk),
                     in_bounds ? rows.at[i] + k : g.a, in_bounds ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < BN / 8; i++) {
        const int at = tid + i * THREADS, row = at / (KN ? BN / 8 : CHUNKS), c = at % (KN ? BN / 8 : CHUNKS);
        const bool in_bounds = KN ? k + row < n_in && c * 8 < n_out : deep && row < n_out;
        const bf16 *from = KN ? b + (int64_t)(k + row) * n_out + c * 8 : b + (int64_t)row * n_in + k + c * 8;
        copy_async16(stage + tile<BN, KN>::A_BYTES + tile_offset<tile<BN, KN>::B_CHUNKS>(row, c),
                     in_bounds ? from : g.b, in_bounds ? 16 : 0);
    }
}

static __device__ __forceinline__ void store_rows(const struct grouped &g, const struct tile_at &p, int k,
                                                  const unsigned char *stage)
{
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    if (k + chunk * 8 >= (int)g.n_in) return;
    bf16 *to = g.rows + (p.row + row) * g.n_in + k + chunk * 8;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int next = i * (THREADS / CHUNKS);
        if (row + next < p.n_row)
            *(uint4 *)(to + next * g.n_in) = *(const uint4 *)(stage + tile_offset<CHUNKS>(row + next, chunk));
    }
}

/* ---- arithmetic ---- */

/* c [16, BN] of the warp's 16 rows += the product of one step. */
template <int BN, bool KN> static __device__ __forceinline__ void multiply(float c[][4], uint32_t stage)
{
    constexpr int B_CHUNKS = tile<BN, KN>::B_CHUNKS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t b = stage + tile<BN, KN>::A_BYTES;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t x[4], y[BN / 8][2];
        load_matrix4(x, stage + tile_offset<CHUNKS>(warp * 16 + (lane & 15), k / 8 + (lane >> 4)));
#pragma unroll
        for (int j = 0; j < BN / 8; j += 2) {
            if (KN)
                load_matrix4_trans(y[j], b + tile_offset<B_CHUNKS>(k + (lane & 15), j + (lane >> 4)));
            else
                load_matrix4(y[j],
                             b + tile_offset<B_CHUNKS>(j * 8 + (lane & 7) + (lane >> 4 << 3), k / 8 + (lane >> 3 & 1)));
        }
#pragma unroll
        for (int j = 0; j < BN / 8; j++) mma_bf16(c[j], x, y[j]);
    }
}

template <int BN, bool KN, int EPILOGUE>
static __global__ void __launch_bounds__(THREADS, 3) thin_kernel(const __grid_constant__ struct grouped g)
{
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const struct tile_at p = find_tile(g, (int *)memory, blockIdx.x);
    if (p.n_row == 0) return;
    const struct rows rows = find_rows(g, p);
    const bf16 *b = g.b + (p.expert - g.first) * g.n_out * g.n_in;
    const int n_step = (int)((g.n_in + DEPTH - 1) / DEPTH);
    float c[BN / 8][4] = {};
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < n_step) load_step<BN, KN>(g, rows, b, step * DEPTH, shared + step * tile<BN, KN>::STAGE_BYTES);
        copy_commit();
    }
    for (int step = 0; step < n_step; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); /* this step is loaded for all threads, and the stage loaded next is free */
        const int ahead = step + STAGES - 1;
        if (ahead < n_step)
            load_step<BN, KN>(g, rows, b, ahead * DEPTH, shared + ahead % STAGES * tile<BN, KN>::STAGE_BYTES);
        copy_commit();
        if (g.rows) store_rows(g, p, step * DEPTH, memory + step % STAGES * tile<BN, KN>::STAGE_BYTES);
        multiply<BN, KN>(c, shared + step % STAGES * tile<BN, KN>::STAGE_BYTES);
    }
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float bias[4][2] = {};
    float weight[2] = {};
#pragma unroll
    for (int half = 0; half < 2 && EPILOGUE == GROUPED_GATED; half++)
        if (row + 8 * half < p.n_row) weight[half] = __ldg(g.gate + __ldg(g.row_slot + p.row + row + 8 * half));
#pragma unroll
    for (int n = 0; n < BN; n += 32)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float v[4][2] = {};
#pragma unroll
            for (int j = 0; j < 4 && n / 8 + j < BN / 8; j++)
                v[j][0] = c[n / 8 + j][2 * half], v[j][1] = c[n / 8 + j][2 * half + 1];
            grouped_finish<EPILOGUE>(g, p.row + row + 8 * half, n, row + 8 * half < p.n_row, v, bias, weight[half]);
        }
}

/* ---- launch ---- */

template <int BN, bool KN, int EPILOGUE> static void launch(const struct grouped *g)
{
    static bool configured;
    const auto kernel = thin_kernel<BN, KN, EPILOGUE>;
    if (!configured)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile<BN, KN>::BYTES));
    configured = true;
    const int64_t n_tile = ceil_div(g->n_row, ROWS) + g->count;
    kernel<<<grid_x(n_tile), THREADS, tile<BN, KN>::BYTES, cuda.stream>>>(*g);
    CUDA_CHECK_LAUNCH();
}

template <int BN> static void launch(const struct grouped *g)
{
    if (g->epilogue == GROUPED_GATED)
        launch<BN, true, GROUPED_GATED>(g);
    else if (g->kn)
        launch<BN, true, GROUPED_STORE>(g);
    else
        launch<BN, false, GROUPED_STORE>(g);
}

void cuda_grouped_thin(const struct grouped *g)
{
    grouped_require(g);
    MT_REQUIRE(
        g->n_out <= 64 && g->r == 0 && !g->bias && !g->ids && g->count <= MAX_EXPERTS &&
            (g->epilogue == GROUPED_STORE || g->epilogue == GROUPED_GATED) && (g->kn || g->epilogue == GROUPED_STORE),
        "a thin product takes no ids, adapter or bias, at most 64 columns and 4096 experts, and only GROUPED_STORE or "
        "GROUPED_GATED with kn");
    if (g->n_row == 0 || g->count == 0) return;
    if (g->n_out <= 16)
        launch<16>(g);
    else if (g->n_out <= 32)
        launch<32>(g);
    else
        launch<64>(g);
}
