/* grouped_wgrad.cu - gradients of the experts' adapters: sums over an expert's rows of a wide row times a thin one.
 *
 * Math, shapes: grouped.h. A block makes 128 x RT elements of out_e: it walks rows of the expert in steps of 32, both
 *   operands as they lie in memory, [rows, 128] and [rows, RT]; ldmatrix.trans turns them into fragments whose depth is
 *   the rows. Eight warps, 16 columns of the wide operand each. On Hopper a cluster of 2, 4 or 8 blocks shares the rows
 *   of an expert where there are few blocks, and adds through its shared memory.
 * Needs: n_wide, ld_wide, r multiples of 8, r <= 256, 16-byte aligned rows.
 * Grid: (ceil(n_wide / 128), n_exp, ceil(r / RT) * parts) blocks of 256 threads, clusters of `parts`. RT 16, 32 or 64:
 *   47, 46 or 64 registers, 40, 40 or 48 KiB of shared memory; no spills.
 * Moves: 2 * M * n_wide bytes (again for every 64 of r) and 2 * M * r * ceil(n_wide / 128), at 2 * r FLOP for 2
 *   bytes: memory bound for the ranks in use.
 * Numerics: f32 sums over the rows in their order, of `parts` runs of them each by itself, one addition to out; nothing
 *   depends on which block runs when.
 * Measured: H100 80GB HBM3, kernel of commit 1d28d06, without clusters, by itself, 32 experts, 65536 rows, r 16: of
 *   width 2880 0.16 to 0.18 ms, of 5760 0.27 ms, 2.8 TB/s.
 *   H200, commits a95a7e9 and a6e0d93, without clusters and with, the whole backward of gpt-oss-20b's down and up
 *   products with fewer experts, 65536 rows: 4 experts 3.36, 4.12 and 3.00, 3.82 ms; in four pieces 2 experts 4.42,
 *   4.85 and 3.36, 3.97, 1 expert 5.69, 6.20 and 3.40, 3.97. */
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
                                 uint32_t stage, int parts)
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
        const int64_t c = (int64_t)(blockIdx.z / parts) * RT + chunk * 8;
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

/* The cluster's blocks meet; where there are no clusters it is one block. */
static __device__ void meet(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* Element i of the tile that another block of the cluster has at the same place of its shared memory. */
static __device__ float of_part(const float *tile, int part, int i)
{
#if __CUDA_ARCH__ >= 900
    uint32_t at;
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(tile + i)), "r"(part));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
#else
    return tile[i];
#endif
}

/* This block's rows of c, to `tile` as they lie in out: [RT, 128] with thin_first, else [128, RT]. */
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

/* out += scale times the sum of all parts' tiles, by part; every block adds its share of the elements. */
template <int RT> static __device__ void add_tiles(const struct grouped_wgrad &g, float *tile, int part, int parts)
{
    float *out = g.out + (int64_t)blockIdx.y * g.n_wide * g.r;
    const int64_t first_wide = (int64_t)blockIdx.x * WIDE, first_thin = (int64_t)(blockIdx.z / parts) * RT;
    for (int i = part * THREADS + (int)threadIdx.x; i < WIDE * RT; i += parts * THREADS) {
        const int64_t wide = first_wide + (g.thin_first ? i % WIDE : i / RT);
        const int64_t thin = first_thin + (g.thin_first ? i / WIDE : i % RT);
        if (wide >= g.n_wide || thin >= g.r) continue;
        float sum = of_part(tile, 0, i);
        for (int p = 1; p < parts; p++) sum += of_part(tile, p, i);
        out[g.thin_first ? thin * g.n_wide + wide : wide * g.r + thin] += g.scale * sum;
    }
}

template <int RT>
static __global__ void __launch_bounds__(THREADS)
    wgrad_kernel(const __grid_constant__ struct grouped_wgrad g, int parts)
{
    constexpr int STAGE_BYTES = thin_tile<RT>::STAGE_BYTES;
    __shared__ __align__(128) unsigned char memory[STAGES * STAGE_BYTES];
    static_assert(sizeof(memory) >= WIDE * RT * sizeof(float), "the tile takes the place of the stages");
    const uint32_t shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = blockIdx.z % parts;
    const int of_expert = g.offs[blockIdx.y], past = g.offs[blockIdx.y + 1];
    if (of_expert == past) return; /* all parts do */
    const int share = (past - of_expert + parts * ROWS - 1) / (parts * ROWS) * ROWS;
    const int first = min(of_expert + part * share, past), end = min(first + share, past);
    const int n_step = (end - first + ROWS - 1) / ROWS;

    struct two_rows rows = find_rows(g, first, end); /* of the next load: their latency passes during a product */
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < n_step) load_rows<RT>(g, rows, first + step * ROWS, end, shared + step * STAGE_BYTES, parts);
        copy_commit();
        rows = find_rows(g, first + (step + 1) * ROWS, end);
    }
    float c[RT / 8][4] = {};
    for (int step = 0; step < n_step; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); /* this step has arrived for all; all are done with the buffer loaded next */
        const int ahead = step + STAGES - 1;
        if (ahead < n_step)
            load_rows<RT>(g, rows, first + ahead * ROWS, end, shared + ahead % STAGES * STAGE_BYTES, parts);
        copy_commit();
        rows = find_rows(g, first + (ahead + 1) * ROWS, end);
        multiply<RT>(c, shared + step % STAGES * STAGE_BYTES, warp, lane);
    }
    copy_wait<0>();
    __syncthreads();
    store_tile<RT>((float *)memory, c, g.thin_first);
    meet();
    add_tiles<RT>(g, (float *)memory, part, parts);
    meet(); /* the others read this block's tile */
}

/* As many parts of an expert's rows as fill the GPU twice over with blocks, four to a multiprocessor; none shorter than
 * 256 rows on average. */
static int parts_of(const struct grouped_wgrad *g, int64_t blocks)
{
    int parts = 1;
    while (cuda.hopper && parts < 8 && blocks * parts < 8 * cuda.n_sm && g->n_row >= 2 * parts * 256 * g->n_exp)
        parts *= 2;
    return parts;
}

template <int RT> static void launch(const struct grouped_wgrad *g)
{
    const int64_t tiles = ceil_div(g->n_wide, WIDE), thin = ceil_div(g->r, RT);
    const int parts = parts_of(g, tiles * thin * g->n_exp);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = (unsigned)parts;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_x(tiles), (unsigned)g->n_exp, (unsigned)(thin * parts));
    config.blockDim = dim3(THREADS);
    config.stream = cuda.stream;
    config.attrs = &cluster;
    config.numAttrs = parts > 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, wgrad_kernel<RT>, *g, parts));
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
