/* grouped_mma.cu - grouped products on any GPU since sm_80: mma.sync fed by ldmatrix and cp.async.
 * Math: grouped.h. The loop first sums la lb_e, multiplies the accumulators by scale, then continues with a b_e in the
 *   same accumulators. The adapter costs ceil(r / 32) more steps and no separate pass over the output.
 * Needs: n_in, n_out, lda, r multiples of 8; r <= 256; a, b, la, lb, out, act, pre, bias 16-byte aligned.
 * Grid: persistent, as many blocks as the GPU holds; block i processes tiles i, i + grid, ... of find_tile. Tiles of
 *   128 rows, depth 32 per step; a warp has 64 x 64, in thin tiles 16 x 64. Pair: 128 columns, 4 warps, 3 stages of 16
 *   KiB, two blocks per SM of 100 KiB (compute capability 8.6, 8.9, 12.0). Deep pair: 5 stages, for 164 KiB or more.
 *   Thin: 64 columns, 8 warps, 4 stages of 12 KiB, for n_out <= 64. One of two blocks multiplies while the other is in
 *   its epilogue or at a barrier. Copies run STAGES - 1 steps ahead, over the ends of products and of tiles. A warp has
 *   two sets of fragments: while it multiplies 16 of the depth, half of a step, it fetches the next 16. The barrier for
 *   the next step is between the halves of this step, so the second half fetches from the next step. The code of a half
 *   has no branches, so operands are in registers at every product.
 * Bound: tensor cores: for each tile and inner index (128 + 128) * 2 bytes, mostly from L2, and 2*128*128 FLOP; the
 *   tiles of a band of 16 row tiles share rows of a, those of a column share b. A step of two blocks writes 32 KiB to
 *   shared memory and reads 64: 768 clocks; its products take 1024 at the rate of compute capability 8.0, 2048 on 8.6,
 *   8.9 and 12.0. Thin: memory, 2 * M * n_in bytes.
 * Numerics: f32 sums in one order that depends only on the shape; one rounding to bf16 at the end. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/mma.cuh"

enum { BM = 128, BK = 32, BAND = 16 };

/* How a tile of COLS columns is divided among its warps; its pipeline stages, copies and shared memory. */
template <int COLS, int DEPTH> struct tile {
    static constexpr int BN = COLS, STAGES = DEPTH;
    static constexpr int WARPS_N = BN / 64, WARPS_M = BN == 64 ? 8 : 2, THREADS = WARPS_M * WARPS_N * 32;
    static constexpr int WM = BM / WARPS_M, WN = 64;
    static constexpr int A_COPIES = BM * BK / 8 / THREADS; /* 16-byte copies of a thread per step */
    static constexpr int B_COPIES = BN * BK / 8 / THREADS;
    static constexpr int A_BYTES = BM * BK * 2, STAGE_BYTES = A_BYTES + BN * BK * 2;
    static constexpr int BYTES = STAGES * STAGE_BYTES;
};
using thin_tile = tile<64, 4>;
using pair_tile = tile<128, 3>;      /* two blocks in the 100 KiB of an SM of 8.6, 8.9 and 12.0 */
using deep_pair_tile = tile<128, 5>; /* two blocks in the 164 KiB of 8.0, the 228 of 9.0 and 10.x */

/* ---- which tile ---- */

struct tile_at {
    int place, row, col; /* place of the expert; first element */
    int n_row;           /* valid rows of the tile: 1 .. BM */
};
struct scan {
    int place, before; /* tiles of the experts before this one */
};

/* Finds tile t; t must not decrease between calls with the same scan. Order: expert by expert, bands of BAND row tiles,
 * column by column in a band. Concurrent blocks thus share few row tiles and few column tiles. */
template <class T> static __device__ bool find_tile(const struct grouped &g, struct scan *w, int t, struct tile_at *p)
{
    const int n_col = (int)((g.n_out + T::BN - 1) / T::BN);
    for (; w->place < g.first + g.count; w->place++) {
        const int start = g.offs[w->place], rows = g.offs[w->place + 1] - start, n_row = (rows + BM - 1) / BM;
        const int at = t - w->before;
        if (at < n_row * n_col) {
            const int band = at / (BAND * n_col), height = min((int)BAND, n_row - band * BAND);
            const int in_band = at % (BAND * n_col), row = band * BAND + in_band % height;
            *p = {w->place, start + row * BM, in_band / height * T::BN, min((int)BM, rows - row * BM)};
            return true;
        }
        w->before += n_row * n_col;
    }
    return false;
}

/* ---- loads ---- */

/* The copies of this thread in the next depth step: 16 bytes from each of A_COPIES rows of a, and from B_COPIES rows of
 * b's tile ([BN, BK], with kn [BK, BN]). Offsets are in units of eight elements. The main product of a tile follows the
 * adapter's, then come those of the block's next tile. */
template <class T> struct cursor {
    const bf16 *a, *b; /* the same for all threads */
    uint32_t at_a[T::A_COPIES], at_b, ld_b;
    int left;      /* remaining depth, at most 0: no product */
    uint32_t live; /* bit i: row i of a is in bounds; A_COPIES + i: row (with kn: column) i of b is */
};

/* Sets the cursor to the start of the adapter's product (la, lb) or of the main one (a, b). */
template <class T, bool KN>
static __device__ void cursor_start(struct cursor<T> *c, const struct grouped &g, const struct tile_at &p, bool adapter)
{
    constexpr int ROW = KN ? T::BN / 8 : BK / 8; /* chunks of a row of b's tile */
    const int tid = threadIdx.x, depth = adapter ? (int)g.r : (int)g.n_in;
    const uint32_t ld_a = (uint32_t)(adapter ? g.r : g.lda) / 8, ld_b = KN ? (uint32_t)g.n_out / 8 : depth / 8;
    c->left = depth;
    c->live = 0;
    c->a = adapter ? g.la : g.a;
#pragma unroll
    for (int i = 0; i < T::A_COPIES; i++) {
        const int row = tid / 4 + T::THREADS / 4 * i;
        int m = p.row;
        if (row < p.n_row) m += row, c->live |= 1u << i;
        if (!adapter && g.slot) m = quotient_of(g.token, g.slot[m]);
        c->at_a[i] = m * ld_a + tid % 4;
    }
    c->b = adapter ? g.lb + grouped_expert(g, p.place) * g.n_out * g.r : g.b + (p.place - g.first) * g.n_out * g.n_in;
    c->b += (int64_t)p.col * (KN ? 1 : depth);
    c->at_b = tid / ROW * ld_b + tid % ROW;
    c->ld_b = ld_b;
#pragma unroll
    for (int i = 0; i < T::B_COPIES; i++) {
        const int n = p.col + (KN ? tid % ROW * 8 : tid / ROW + i * (T::THREADS / ROW));
        if (n < g.n_out) c->live |= 1u << (T::A_COPIES + i);
    }
}

/* Starts copy i of a depth step: of a, then of b. Out of bounds it writes zeros. live: c->live, or 0 where this
 * thread's chunks of rows are beyond the depth. */
template <class T, bool KN>
static __device__ __forceinline__ void load_part(const struct cursor<T> &c, uint32_t stage, uint32_t live, int i)
{
    constexpr int ROW = KN ? T::BN / 8 : BK / 8, COPY = T::THREADS * 16;
    const int tid = threadIdx.x, k = i - T::A_COPIES;
    if (i < T::A_COPIES) {
        const uint32_t to = stage + tile_offset<4>(tid / 4, tid % 4);
        copy_async16_of_row(to + i * COPY, c.a + (uint64_t)c.at_a[i] * 8, live >> i & 1 ? 16 : 0);
    } else {
        const uint32_t to = stage + T::A_BYTES + tile_offset<ROW>(tid / ROW, tid % ROW);
        const bool deep = KN && tid / ROW + k * (T::THREADS / ROW) < c.left;
        const bool in_bounds = KN ? deep && c.live >> T::A_COPIES & 1 : live >> i & 1;
        copy_async16_of_row(to + k * COPY, c.b + (uint64_t)(c.at_b + k * (T::THREADS / ROW) * c.ld_b) * 8,
                            in_bounds ? 16 : 0);
    }
}
template <class T> static __device__ __forceinline__ uint32_t live_of(const struct cursor<T> &c)
{
    return (int)threadIdx.x % 4 * 8 < c.left ? c.live : 0;
}
template <class T, bool KN> static __device__ __forceinline__ void advance(struct cursor<T> *c)
{
    c->a += BK;
    c->b += KN ? (int64_t)c->ld_b * 8 * BK : BK;
    c->left -= BK;
}

/* ---- arithmetic ---- */

/* Fragments of the warp for 16 of a step's depth. */
template <class T> struct fragments {
    uint32_t a[T::WM / 16][4], b[T::WN / 8][2];
};

/* This lane's ldmatrix addresses of the warp's a and b, as byte offsets in a stage. The next 16 rows or columns are an
 * addition to an offset, the next 16 of the depth an xor of its low bits. */
struct places {
    uint32_t a, b;
};

/* Part i of the fragments of slice k of a stage (16 of its depth). A_PARTS parts are of a, the others of b. */
template <class T, bool KN>
static __device__ __forceinline__ void fetch_part(struct fragments<T> *f, uint32_t stage, const struct places &at,
                                                  int k, int i)
{
    constexpr int A_PARTS = T::WM / 16;
    const int j = (i - A_PARTS) * 2;
    if (i < A_PARTS)
        load_matrix4(f->a[i], stage + (at.a ^ k << 5) + i * 16 * BK * 2);
    else if (KN)
        load_matrix4_trans(f->b[j], stage + (at.b ^ j << 4) + k * 16 * T::BN * 2);
    else
        load_matrix4(f->b[j], stage + (at.b ^ k << 5) + j * 8 * BK * 2);
}
template <class T, bool KN>
static __device__ __forceinline__ void fetch(struct fragments<T> *f, uint32_t stage, const struct places &at, int k)
{
#pragma unroll
    for (int i = 0; i < T::WM / 16 + T::WN / 16; i++) fetch_part<T, KN>(f, stage, at, k, i);
}

/* Multiplies slice k of a step, fetches the next slice (of stage `from`) and, with LOAD, starts the copies of a step to
 * stage `to`: all in one block of straight code, so that the tensor cores never wait for an address, a fragment or a
 * copy. */
template <class T, bool KN, bool LOAD>
static __device__ __forceinline__ void slice(float acc[][T::WN / 8][4], const struct fragments<T> &now,
                                             struct fragments<T> *next, uint32_t from, const struct places &at, int k,
                                             const struct cursor<T> &c, uint32_t to)
{
    constexpr int ROWS = T::WM / 16, COLS = T::WN / 8, PARTS = ROWS + COLS / 2, COPIES = T::A_COPIES + T::B_COPIES;
    const uint32_t live = live_of(c);
#pragma unroll
    for (int i = 0; i < ROWS * COLS; i++) {
        /* Fragments first, since the next slice waits for them; two instructions for every two products. */
        const int part = i, copy = i - PARTS;
        mma_bf16(acc[i / COLS][i % COLS], now.a[i / COLS], now.b[i % COLS]);
        if (part < PARTS) fetch_part<T, KN>(next, from, at, k, part);
        if (LOAD && copy >= 0 && copy < COPIES) load_part<T, KN>(c, to, live, copy);
    }
    static_assert(!LOAD || PARTS + COPIES <= ROWS * COLS, "fewer products than loads");
}

/* Stores the warp's part of the tile, chunks of 8 rows and 32 columns. Loads do not overtake stores, so it first loads
 * the gates of all rows, values to add, and pre of two chunks; pre of others when registers of sums are free. The 64
 * columns of a warp give one partial sum of dgate per row. */
template <class T, int EPILOGUE, int LAYOUT>
static __device__ __forceinline__ void store_tile(const struct grouped &g, const struct tile_at &p,
                                                  float c[][T::WN / 8][4], int warp_m, int warp_n)
{
    constexpr bool glu_bwd = grouped_is_glu_bwd(EPILOGUE), quant = EPILOGUE == GROUPED_GLU_BWD_QUANT;
    constexpr bool gated = glu_bwd || EPILOGUE == GROUPED_GATED;
    constexpr int COLS = T::WN / 32, CHUNKS = T::WM / 8 * COLS;
    constexpr int WIDE = LAYOUT == GLU_PAIRS ? 2 : 1;    /* elements of pre for a column, next to each other */
    constexpr int SECOND = LAYOUT == GLU_PAIRS ? 16 : 4; /* where a lane's second four columns begin */
    const int lane = threadIdx.x & 31, first = warp_m * T::WM, n_out = (int)g.n_out;
    const int col = p.col + warp_n * T::WN, mine = col + (glu_bwd ? glu_column<LAYOUT>() : lane % 4 * 8);
    const auto row_of = [&](int i) { return first + i / COLS * 8 + lane / 4; }; /* of chunk i, in the tile */
    const auto column_of = [&](int i) { return mine + i % COLS * 32; };
    const auto load_pre = [&](int i) {
        const bf16 *from = g.pre + (2 * n_out * (int64_t)(p.row + row_of(i)) + WIDE * column_of(i));
        return load_columns<LAYOUT>(from, n_out, row_of(i) < p.n_row ? n_out - column_of(i) : 0);
    };
    float gate[2] = {}, bias[COLS][4][2] = {}, sum = 0.0f; /* gate: of rows lane and lane + 32 */
    struct pre8 pre[8] = {};
    /* Chunks whose pre is loaded before chunk i. */
    const auto n_ahead = [](int i) { return glu_bwd ? MT_MIN(CHUNKS, i + MT_MIN(2 + i / 2, 5)) : 0; };
#pragma unroll
    for (int i = 0; i < T::WM; i += 32)
        if (gated && first + i + lane < p.n_row)
            gate[i / 32] = __ldg(g.gate + __ldg(g.row_slot + p.row + first + i + lane));
#pragma unroll
    for (int i = 0; i < COLS && !gated; i++) grouped_bias(bias[i], g, grouped_expert(g, p.place), col + i * 32);
#pragma unroll
    for (int i = 0; i < n_ahead(0); i++) pre[i] = load_pre(i);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int h = i / COLS, j = i % COLS * 4, n = column_of(i);
        const int64_t m = p.row + row_of(i);
        const bool live = row_of(i) < p.n_row;
        const float weight = gated ? __shfl_sync(~0u, gate[h / 4], h % 4 * 8 + lane / 4) : 1.0f;
        float v[4][2], x[8];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k][0] = c[h / 2][j + k][h % 2 * 2], v[k][1] = c[h / 2][j + k][h % 2 * 2 + 1];
        if constexpr (glu_bwd) {
            glu_columns<LAYOUT>(x, v);
            if (live && n < n_out)
                sum += grouped_glu_bwd8<quant, LAYOUT, SECOND>(g, g.out + (2 * n_out * m + WIDE * n),
                                                               g.act + (n_out * m + n), x, weight, pre[i % 8],
                                                               n + SECOND < n_out);
#pragma unroll
            for (int k = n_ahead(i); k < n_ahead(i + 1); k++) pre[k % 8] = load_pre(k);
            static_assert(T::WN == GROUPED_PART, "the columns of a warp are one partial sum of dgate");
            if (i % COLS < COLS - 1) continue;
            sum = quad_sum(sum);
            if (lane % 4 == 0 && live && col < n_out) g.dgate_part[(int64_t)(col / GROUPED_PART) * g.n_row + m] = sum;
            sum = 0.0f;
        } else {
            grouped_finish<EPILOGUE>(g, m, col + j * 8, live, v, bias[j / 4], weight);
        }
    }
}

/* Prefetches a tile's part of pre into L2, a row per thread: once all its copies are started. */
static __device__ __forceinline__ void prefetch_pre(const struct grouped &g, const struct tile_at &p)
{
    const bool pairs = g.glu.interleaved;
    const int row = threadIdx.x % BM;
    if (row >= p.n_row) return;
    const bf16 *pre = g.pre + pre_start(g, p.row + row, p.col);
#pragma unroll
    for (int i = 0; i < 4; i++) { /* of 128 columns, 64 or, interleaved, 32 at a time */
        const int n = pairs ? i * 32 : i % 2 * 64;
        if (p.col + n >= g.n_out) continue;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(pre + (pairs ? 2 * n : i / 2 * g.n_out + n)) : "memory");
    }
}

/* The product whose operands a block copies now. Copies are STAGES - 1 steps ahead of products: up to several tiles. */
struct course {
    struct scan scan;
    struct tile_at tile;
    int t;     /* number of the tile after this one */
    bool thin; /* the adapter's product of `tile`; else the main one */
};

/* Sets the cursor to the next product, of this tile or the next, after all copies of a product have been started.
 * Without a next tile c->left stays 0 or less, and further copies write zeros. */
template <class T, bool KN, int EPILOGUE>
static __device__ void next_product(struct cursor<T> *c, struct course *k, const struct grouped &g)
{
    if (k->thin) {
        k->thin = false;
    } else {
        if (grouped_is_glu_bwd(EPILOGUE)) prefetch_pre(g, k->tile);
        k->tile.n_row = 0; /* prefetched once, also where no tile follows */
        if (!find_tile<T>(g, &k->scan, k->t, &k->tile)) return;
        k->t += gridDim.x;
        k->thin = g.r > 0;
    }
    cursor_start<T, KN>(c, g, k->tile, k->thin);
}

template <class T, bool KN> static __device__ __forceinline__ void load_step(const struct cursor<T> &c, uint32_t stage)
{
    const uint32_t live = live_of(c);
#pragma unroll
    for (int i = 0; i < T::A_COPIES + T::B_COPIES; i++) load_part<T, KN>(c, stage, live, i);
}

template <class T, bool KN, int EPILOGUE>
static __global__ void __launch_bounds__(T::THREADS, 2) grouped_kernel(const __grid_constant__ struct grouped g)
{
    extern __shared__ __align__(128) unsigned char memory[];
    uint32_t shared = shared_address(memory);
    asm volatile("" : "+r"(shared)); /* in a register: the compiler would compute it in every step */
    const uint32_t end = shared + T::BYTES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int warp_n = warp / T::WARPS_M, warp_m = warp % T::WARPS_M;
    const struct places at = {warp_m * T::WM * BK * 2 + tile_offset<4>(lane & 15, lane >> 4),
                              T::A_BYTES + warp_n * T::WN * (KN ? 2 : BK * 2) +
                                  (KN ? tile_offset<T::BN / 8>(lane & 15, lane >> 4)
                                      : tile_offset<4>((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1))};
    const int n_thin = (int)((g.r + BK - 1) / BK), n_step = n_thin + (int)((g.n_in + BK - 1) / BK);

    struct scan scan = {(int)g.first, 0};
    struct tile_at p;
    if (!find_tile<T>(g, &scan, blockIdx.x, &p)) return;
    struct course course = {scan, {}, (int)blockIdx.x, false};
    struct cursor<T> cursor;
    cursor.left = 0;
#pragma unroll 1
    for (int i = 0; i < T::STAGES - 1; i++) {
        if (cursor.left <= 0) next_product<T, KN, EPILOGUE>(&cursor, &course, g);
        load_step<T, KN>(cursor, shared + i * T::STAGE_BYTES);
        copy_commit();
        advance<T, KN>(&cursor);
    }
    copy_wait<T::STAGES - 2>();
    __syncthreads();
    uint32_t before = end - T::STAGE_BYTES, stage = shared;
    int t = blockIdx.x;
    for (bool more = true; more;) {
        float c[T::WM / 16][T::WN / 8][4] = {};
        struct fragments<T> f[2];
        int busy = warp_m * T::WM < p.n_row && p.col + warp_n * T::WN < g.n_out;
        asm volatile("" : "+r"(busy)); /* in a register, as `shared` is */
        fetch<T, KN>(&f[0], stage, at, 0);
        /* The adapter's steps, then the others, in two runs of the loop, so that no step tests whether to multiply by
         * scale. */
        for (int step = 0, end_of_part = n_thin ? n_thin : n_step; step < n_step; end_of_part = n_step) {
            for (; step < end_of_part; step++) {
                const uint32_t after = stage + T::STAGE_BYTES == end ? shared : stage + T::STAGE_BYTES;
                if (cursor.left <= 0) next_product<T, KN, EPILOGUE>(&cursor, &course, g);
                if (busy)
                    slice<T, KN, true>(c, f[0], &f[1], stage, at, 1, cursor, before);
                else
                    load_step<T, KN>(cursor, before);
                copy_commit();
                advance<T, KN>(&cursor);
                copy_wait<T::STAGES - 2>();
                __syncthreads(); /* the next step is loaded for all, and all have fetched the last of this one */
                if (busy) slice<T, KN, false>(c, f[1], &f[0], after, at, 0, cursor, 0);
                before = stage;
                stage = after;
            }
#pragma unroll
            for (int i = 0; i < T::WM / 16 * T::WN / 2; i++) ((float *)c)[i] *= step < n_step ? g.scale : 1.0f;
        }
        const struct tile_at done = p;
        more = find_tile<T>(g, &scan, t += gridDim.x, &p);
        if (grouped_is_glu_bwd(EPILOGUE) && !g.glu.interleaved)
            store_tile<T, EPILOGUE, GLU_HALVES>(g, done, c, warp_m, warp_n);
        else
            store_tile<T, EPILOGUE, GLU_PAIRS>(g, done, c, warp_m, warp_n);
    }
    copy_wait<0>();
}

/* ---- launch ---- */

template <class T, bool KN, int EPILOGUE> static void launch(const struct grouped *g)
{
    static int per_sm;
    const auto kernel = grouped_kernel<T, KN, EPILOGUE>;
    if (!per_sm) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::BYTES));
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, T::THREADS, T::BYTES));
        MT_REQUIRE(per_sm > 0, "a block of the grouped product does not fit this GPU");
    }
    const int64_t most = (ceil_div(g->n_row, BM) + g->count) * ceil_div(g->n_out, T::BN);
    MT_REQUIRE(most < INT32_MAX / 2, "%lld tiles", (long long)most);
    MT_REQUIRE(
        g->n_row * (g->lda / 8) < UINT32_MAX && g->n_out * (g->n_in / 8) < UINT32_MAX && g->n_out < INT32_MAX / 2,
        "a grouped product of %lld rows, %lld x %lld", (long long)g->n_row, (long long)g->n_out, (long long)g->n_in);
    kernel<<<grid_x(MT_MIN(most, (int64_t)per_sm * cuda.n_sm)), T::THREADS, T::BYTES, cuda.stream>>>(*g);
    CUDA_CHECK_LAUNCH();
}

template <class T> static void launch_store(const struct grouped *g)
{
    if (g->epilogue == GROUPED_GATED)
        launch<T, true, GROUPED_GATED>(g);
    else if (g->kn)
        launch<T, true, GROUPED_STORE>(g);
    else
        launch<T, false, GROUPED_STORE>(g);
}
template <class T> static void launch_any(const struct grouped *g)
{
    if (g->epilogue == GROUPED_GLU)
        launch<T, false, GROUPED_GLU>(g);
    else if (g->epilogue == GROUPED_GLU_BWD)
        launch<T, true, GROUPED_GLU_BWD>(g);
    else if (g->epilogue == GROUPED_GLU_BWD_QUANT)
        launch<T, true, GROUPED_GLU_BWD_QUANT>(g);
    else
        launch_store<T>(g);
}

void cuda_grouped_mma(const struct grouped *g)
{
    grouped_require(g);
    MT_REQUIRE(g->kn == (grouped_is_glu_bwd(g->epilogue) || g->epilogue == GROUPED_GATED) ||
                   g->epilogue == GROUPED_STORE,
               "epilogue %d with%s kn", (int)g->epilogue, g->kn ? "" : "out");
    if (g->n_row == 0 || g->count == 0) return;
    const int c = cuda.capability;
    if (g->n_out <= 64 && (g->epilogue == GROUPED_STORE || g->epilogue == GROUPED_GATED))
        launch_store<thin_tile>(g);
    else if (c == 86 || c == 89 || c >= 120)
        launch_any<pair_tile>(g);
    else
        launch_any<deep_pair_tile>(g);
}
