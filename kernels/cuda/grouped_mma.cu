/* grouped_mma.cu - grouped products on any GPU since sm_80: mma.sync fed by ldmatrix and cp.async.
 *
 * Math, shapes: grouped.h. The loop first sums la lb_e, multiplies the accumulators by scale, then continues with a b_e
 *   in the same accumulators. The adapter costs ceil(r / 32) more steps and no separate pass over the output.
 * Needs: n_in, n_out, lda, r multiples of 8; r <= 256; a, b, la, lb, out, act, pre, bias 16-byte aligned.
 * Tiles: 128 rows x 256 columns, eight warps of 64 x 64; for n_out <= 64, 128 x 64, eight warps of 16 rows. Depth 32
 * per step, four pipeline stages, three of them loading. A warp whose rows or columns are all out of bounds skips its
 *   products.
 * Grid: persistent, 256 threads, as many blocks as the GPU holds. Wide tiles: 1 block per SM, 228 .. 255 registers,
 *   98 KiB of shared memory, which fits GPUs with 99 KiB per block. Thin tiles: 2 or more, 82 .. 121 registers, 40 or
 *   48 KiB; no spills. Block i processes tiles i, i + grid, ... in the order of find_tile; it starts the loads of its
 *   next tile before it stores the current one. The number of tiles is only known after reading all of offs.
 * Moves: a tile reads (128 + 256) * 2 bytes per 2*128*256 FLOP of depth, mostly from L2: the tiles of a band of 16 row
 *   tiles share rows of a, and the tiles of a column share b. A thin product is memory bound: 2 * M * n_in bytes.
 * Numerics: f32 sums in one order that depends only on the shape; one rounding to bf16 at the end.
 * Measured: H100 80GB HBM3, commit 5a37c46, 32 experts, 32768 rows, D = F = 2880, r 16: up forward with GLU and gather
 *   3.96 ms, 275 TFLOP/s; down forward 2.64, 206; up backward 4.59, 237. */
#include "kernels/cuda/grouped_epilogue.cuh"
#include "kernels/cuda/mma.cuh"

enum { BM = 128, BK = 32, STAGES = 4, THREADS = 256, WARPS = THREADS / 32, BAND = 16 };

/* How a tile of BN columns is divided among eight warps; its copies and shared memory. */
template <int BN> struct tile {
    static constexpr int WARPS_N = BN == 256 ? 4 : 1, WARPS_M = WARPS / WARPS_N;
    static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;
    static constexpr int B_COPIES = (BN * BK / 8 + THREADS - 1) / THREADS; /* 16-byte copies of a thread per step */
    static constexpr int A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2;
    static constexpr int BYTES = STAGES * STAGE_BYTES;
};

/* ---- which tile ---- */

struct tile_at {
    int64_t place, row, col; /* place of the expert; first element */
    int n_row;               /* valid rows of the tile: 1 .. BM */
};
struct scan {
    int place, before; /* tiles of the experts before this one */
};

/* Finds tile t; t must not decrease between calls with the same scan. Order: expert by expert, bands of BAND row tiles,
 * column by column in a band. Concurrent blocks thus share few row tiles and few column tiles. */
template <int BN> static __device__ bool find_tile(const struct grouped &g, struct scan *w, int t, struct tile_at *p)
{
    const int n_col = (int)((g.n_out + BN - 1) / BN);
    for (; w->place < g.first + g.count; w->place++) {
        const int start = g.offs[w->place], rows = g.offs[w->place + 1] - start, n_row = (rows + BM - 1) / BM;
        const int at = t - w->before;
        if (at < n_row * n_col) {
            const int band = at / (BAND * n_col), height = min((int)BAND, n_row - band * BAND);
            const int in_band = at % (BAND * n_col), row = band * BAND + in_band % height;
            *p = {w->place, start + row * BM, (int64_t)(in_band / height) * BN, min((int)BM, rows - row * BM)};
            return true;
        }
        w->before += n_row * n_col;
    }
    return false;
}

/* ---- loads ---- */

/* The copies of this thread in the next depth step of a tile: 16 bytes from each of two rows of a, 64 rows apart, and
 * from B_COPIES rows of b's tile ([BN, BK], with kn [BK, BN]). */
struct cursor {
    const bf16 *a[2], *b;
    int64_t b_apart, step_b; /* in elements: between its rows of b; between steps */
    int left;                /* remaining depth */
    uint32_t live;           /* bits 0, 1: the rows of a are in bounds; 2 + i: row (with kn: column) i of b is */
};

/* The cursor at the start of the adapter's product (la, lb) or of the main one (a, b). */
template <int BN, bool KN>
static __device__ struct cursor cursor_start(const struct grouped &g, const struct tile_at &p, bool adapter)
{
    constexpr int ROW = KN ? BN / 8 : BK / 8; /* chunks of a row of b's tile */
    const int tid = threadIdx.x;
    const int64_t depth = adapter ? g.r : g.n_in, b_ld = KN ? g.n_out : depth;
    struct cursor c;
    c.left = (int)depth;
    c.live = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = tid / 4 + 64 * i;
        int64_t m = p.row;
        if (row < p.n_row) m += row, c.live |= 1u << i;
        c.a[i] = adapter ? g.la + m * g.r : g.a + (g.slot ? quotient_of(g.token, g.slot[m]) : m) * g.lda;
        c.a[i] += tid % 4 * 8;
    }
    c.b = adapter ? g.lb + grouped_expert(g, p.place) * g.n_out * g.r : g.b + (p.place - g.first) * g.n_out * g.n_in;
    c.b += tid / ROW * b_ld + tid % ROW * 8 + p.col * (KN ? 1 : depth);
    c.b_apart = THREADS / ROW * b_ld;
    c.step_b = BK * (KN ? g.n_out : 1);
    for (int i = 0; i < tile<BN>::B_COPIES; i++) {
        const int64_t n = p.col + (KN ? tid % ROW * 8 : tid / ROW + i * (THREADS / ROW));
        if (n < g.n_out) c.live |= 4u << i;
    }
    return c;
}

/* Starts the copies of one depth step and advances the cursor. Out of bounds nothing is read and zeros are written. */
template <int BN, bool KN> static __device__ __forceinline__ void load_step(struct cursor *c, uint32_t stage)
{
    constexpr int ROW = KN ? BN / 8 : BK / 8, COPY = THREADS * 16;
    const int tid = threadIdx.x;
    const uint32_t to_a = stage + tile_offset<4>(tid / 4, tid % 4);
    const uint32_t to_b = stage + tile<BN>::A_BYTES + tile_offset<ROW>(tid / ROW, tid % ROW);
    const uint32_t live = tid % 4 * 8 < c->left ? c->live : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        copy_async16(to_a + i * COPY, c->a[i], live >> i & 1 ? 16 : 0);
        c->a[i] += BK;
    }
#pragma unroll
    for (int i = 0; i < tile<BN>::B_COPIES; i++) {
        const bool deep = KN && tid / ROW + i * (THREADS / ROW) < c->left;
        const bool in_bounds = KN ? deep && c->live & 4 : live >> (2 + i) & 1;
        if (tid + i * THREADS < BN * BK / 8) copy_async16(to_b + i * COPY, c->b + i * c->b_apart, in_bounds ? 16 : 0);
    }
    c->b += c->step_b;
    c->left -= BK;
}

template <int BN, bool KN>
static __device__ void start_tile(struct cursor *c, const struct grouped &g, const struct tile_at &p, int n_thin,
                                  int n_step, uint32_t shared)
{
    *c = cursor_start<BN, KN>(g, p, n_thin > 0);
    for (int step = 0; step < STAGES - 1; step++) {
        if (step == n_thin && step > 0) *c = cursor_start<BN, KN>(g, p, false);
        if (step < n_step) load_step<BN, KN>(c, shared + step * tile<BN>::STAGE_BYTES);
        copy_commit();
    }
}

/* ---- arithmetic ---- */

/* Fragments of the warp for 16 of a step's depth. */
template <int BN> struct fragments {
    uint32_t a[tile<BN>::WM / 16][4], b[tile<BN>::WN / 8][2];
};

/* a, b: the warp's first row and column in the stage; lane_a, lane_b: ldmatrix offsets of this lane from in_bounds. The
 * next 16 rows or columns change only the upper bits of an offset, the next two chunks only the bits of the xor. */
template <int BN, bool KN>
static __device__ __forceinline__ void fetch(struct fragments<BN> *f, uint32_t a, uint32_t b, uint32_t lane_a,
                                             uint32_t lane_b, int k)
{
#pragma unroll
    for (int i = 0; i < tile<BN>::WM / 16; i++) load_matrix4(f->a[i], a + i * 16 * BK * 2 + (lane_a ^ (k << 5)));
#pragma unroll
    for (int j = 0; j < tile<BN>::WN / 8; j += 2) {
        if (KN)
            load_matrix4_trans(f->b[j], b + k * 16 * BN * 2 + (lane_b ^ (j << 4)));
        else
            load_matrix4(f->b[j], b + j * 8 * BK * 2 + (lane_b ^ (k << 5)));
    }
}

template <int BN>
static __device__ __forceinline__ void multiply(float c[][tile<BN>::WN / 8][4], const struct fragments<BN> &f)
{
#pragma unroll
    for (int i = 0; i < tile<BN>::WM / 16; i++)
#pragma unroll
        for (int j = 0; j < tile<BN>::WN / 8; j++) mma_bf16(c[i][j], f.a[i], f.b[j]);
}

/* Stores the warp's part of the tile. Its 64 columns of a wide tile give one partial sum of dgate per row. */
template <int BN, int EPILOGUE>
static __device__ void store_tile(const struct grouped &g, const struct tile_at &p, float c[][tile<BN>::WN / 8][4],
                                  int warp_m, int warp_n)
{
    constexpr int HALVES = tile<BN>::WM / 8; /* groups of 8 rows; a lane has one row of each */
    const int lane = threadIdx.x & 31, first = warp_m * tile<BN>::WM + lane / 4;
    const int64_t col = p.col + warp_n * tile<BN>::WN;
    float sum[HALVES] = {};
#pragma unroll
    for (int j = 0; j < tile<BN>::WN / 8; j += 4) {
        const int64_t n = col + j * 8;
        float bias[4][2] = {};
        if (EPILOGUE == GROUPED_STORE || EPILOGUE == GROUPED_GLU) grouped_bias(bias, g, grouped_expert(g, p.place), n);
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            const bool live = first + i * 8 < p.n_row;
            const int64_t m = p.row + first + i * 8;
            float v[4][2];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k][0] = c[i / 2][j + k][i % 2 * 2], v[k][1] = c[i / 2][j + k][i % 2 * 2 + 1];
            if constexpr (grouped_is_glu_bwd(EPILOGUE)) {
                constexpr bool quant = EPILOGUE == GROUPED_GLU_BWD_QUANT;
                const struct pre8 pre = grouped_pre(g, m, n + lane % 4 * 8, live);
                sum[i] += grouped_finish_glu_bwd<quant>(g, m, n, live, v, live ? g.gate[g.row_slot[m]] : 0.0f, pre);
            } else if constexpr (EPILOGUE == GROUPED_ADD) {
                grouped_finish_add(g, m, n, live, v);
            } else {
                grouped_finish<EPILOGUE>(g, m, n, live, v, bias);
            }
        }
    }
    if (grouped_is_glu_bwd(EPILOGUE)) {
        static_assert(BN != 256 || tile<BN>::WN == GROUPED_PART, "the columns of a warp are one partial sum of dgate");
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            sum[i] = quad_sum(sum[i]);
            if (lane % 4 == 0 && first + i * 8 < p.n_row && col < g.n_out)
                g.dgate_part[col / GROUPED_PART * g.n_row + p.row + first + i * 8] = sum[i];
        }
    }
}

template <int BN, bool KN, int EPILOGUE>
static __global__ void __launch_bounds__(THREADS, BN == 256 ? 1 : 2)
    grouped_kernel(const __grid_constant__ struct grouped g)
{
    using T = tile<BN>;
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    /* Scheduler s of an SM runs warps s and s + 4. With this mapping the warps of one half of the rows are on all four
     * schedulers, and those of one quarter of the columns on two, when the rest of a tile is out of bounds. */
    const int warp_n = BN == 256 ? warp / 2 : 0, warp_m = BN == 256 ? (warp ^ warp / 4) & 1 : warp;
    const uint32_t first_a = warp_m * T::WM * BK * 2;
    const uint32_t first_b = T::A_BYTES + (KN ? warp_n * T::WN * 2 : warp_n * T::WN * BK * 2);
    const uint32_t lane_a = tile_offset<4>(lane & 15, lane >> 4);
    const uint32_t lane_b =
        KN ? tile_offset<BN / 8>(lane & 15, lane >> 4) : tile_offset<4>((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
    const int n_thin = (int)((g.r + BK - 1) / BK), n_step = n_thin + (int)((g.n_in + BK - 1) / BK);

    struct scan scan = {(int)g.first, 0};
    struct tile_at p, next;
    int t = blockIdx.x;
    if (!find_tile<BN>(g, &scan, t, &next)) return;
    struct cursor cursor;
    start_tile<BN, KN>(&cursor, g, next, n_thin, n_step, shared);
    for (bool more = true; more;) {
        float c[T::WM / 16][T::WN / 8][4] = {};
        p = next;
        const bool busy = warp_m * T::WM < p.n_row && p.col + warp_n * T::WN < g.n_out;
        for (int step = 0; step < n_step; step++) {
            copy_wait<STAGES - 2>();
            __syncthreads(); /* this step is loaded for all threads, and the stage loaded next is free */
            const uint32_t stage = shared + step % STAGES * T::STAGE_BYTES;
            struct fragments<BN> f[2];
            if (busy) {
                fetch<BN, KN>(&f[0], stage + first_a, stage + first_b, lane_a, lane_b, 0);
                fetch<BN, KN>(&f[1], stage + first_a, stage + first_b, lane_a, lane_b, 1);
                multiply<BN>(c, f[0]);
            }
            const int ahead = step + STAGES - 1;
            if (ahead == n_thin) cursor = cursor_start<BN, KN>(g, p, false);
            if (ahead < n_step) load_step<BN, KN>(&cursor, shared + ahead % STAGES * T::STAGE_BYTES);
            copy_commit();
            if (busy) multiply<BN>(c, f[1]);
            if (step + 1 == n_thin) {
#pragma unroll
                for (int i = 0; i < T::WM / 16 * T::WN / 2; i++) ((float *)c)[i] *= g.scale;
            }
        }
        __syncthreads();
        more = find_tile<BN>(g, &scan, t += gridDim.x, &next);
        if (more) start_tile<BN, KN>(&cursor, g, next, n_thin, n_step, shared);
        store_tile<BN, EPILOGUE>(g, p, c, warp_m, warp_n);
    }
}

/* ---- launch ---- */

template <int BN, bool KN, int EPILOGUE> static void launch(const struct grouped *g)
{
    static int per_sm;
    const auto kernel = grouped_kernel<BN, KN, EPILOGUE>;
    if (!per_sm) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, tile<BN>::BYTES));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, THREADS, tile<BN>::BYTES));
        MT_REQUIRE(per_sm > 0, "a block of the grouped product does not fit this GPU");
    }
    const int64_t most = (ceil_div(g->n_row, BM) + g->count) * ceil_div(g->n_out, BN);
    MT_REQUIRE(most < INT32_MAX / 2, "%lld tiles", (long long)most);
    kernel<<<grid_x(MT_MIN(most, (int64_t)per_sm * cuda.n_sm)), THREADS, tile<BN>::BYTES, cuda.stream>>>(*g);
    CUDA_CHECK_LAUNCH();
}

template <int BN> static void launch_store(const struct grouped *g)
{
    if (g->epilogue == GROUPED_GATED)
        launch<BN, true, GROUPED_GATED>(g);
    else if (g->kn)
        launch<BN, true, GROUPED_STORE>(g);
    else
        launch<BN, false, GROUPED_STORE>(g);
}

void cuda_grouped_mma(const struct grouped *g)
{
    grouped_require(g);
    MT_REQUIRE(g->kn == (grouped_is_glu_bwd(g->epilogue) || g->epilogue == GROUPED_GATED) ||
                   g->epilogue == GROUPED_STORE || g->epilogue == GROUPED_ADD,
               "epilogue %d with%s kn", (int)g->epilogue, g->kn ? "" : "out");
    MT_REQUIRE(g->epilogue != GROUPED_ADD || (!g->r && !g->bias), "%s", "GROUPED_ADD takes no adapter and no bias");
    if (g->n_row == 0 || g->count == 0) return;
    if (g->epilogue == GROUPED_GLU) {
        launch<256, false, GROUPED_GLU>(g);
    } else if (g->epilogue == GROUPED_GLU_BWD) {
        launch<256, true, GROUPED_GLU_BWD>(g);
    } else if (g->epilogue == GROUPED_GLU_BWD_QUANT) {
        launch<256, true, GROUPED_GLU_BWD_QUANT>(g);
    } else if (g->epilogue == GROUPED_ADD) { /* memory bound: small tiles, more blocks per SM */
        g->kn ? launch<64, true, GROUPED_ADD>(g) : launch<64, false, GROUPED_ADD>(g);
    } else if (g->n_out <= 64) { /* GROUPED_STORE, GROUPED_GATED */
        launch_store<64>(g);
    } else {
        launch_store<256>(g);
    }
}
