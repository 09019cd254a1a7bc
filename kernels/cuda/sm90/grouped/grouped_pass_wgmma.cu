/* grouped_pass_wgmma.cu - one pass over dy computes dB and dy B of adapters with r 8 or 16, of experts and of dense
 * layers.
 *
 * Math, shapes: grouped.h. A dense layer has its segments (ops.h) as experts. A block has some rows of one expert and a
 *   slab: 4 x 128 columns of dy (3 x 128 with r 16). A step is 128 rows of 128 columns: a warpgroup adds 64 of the
 *   columns, summed over the rows, to dB, and multiplies 64 of the rows by the slab's part of B. So no sum crosses
 *   warps. Each slab's part of dy B is stored in f32; finish_kernel adds them. Split-K over rows: grouped_parts.cuh. A
 *   dense layer has up to 64 parts per slab: finish_kernel adds them, in many blocks.
 * Needs: sm_90a; n_wide and ld_wide multiples of 8, 16-byte aligned rows.
 * Grid: (n_row / share + n_exp, slabs) blocks of 256 threads, two per SM; blocks beyond the last part return at once.
 *   Blocks run slab by slab, so that the columns of gathered rows that concurrent blocks read stay in L2. Three stages
 *   of 32 KiB, all of them loading at first, then two, by cp.async.
 * Bound: 2 * M * n_wide bytes, twice where g.rows is written, and 8 * M * r for each slab: memory bound.
 * Numerics: f32 sums over the columns of a slab, then over the slabs in order, rounded once; over the rows of a part,
 *   then over the parts in order. They depend only on the shapes and offs. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/grouped_parts.cuh"
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/sm90/sm90.cuh"

enum {
    WIDE = WGRAD_WIDE,
    ROWS = PASS_ROWS,
    STAGES = 3,
    STAGE_BYTES = ROWS * WIDE * 2, /* two tiles of [128 rows, 64 columns], swizzled */
    HALF_STAGE = STAGE_BYTES / 2,
    THREADS = PARTS_THREADS,
    CHUNKS = WIDE / 8,
    PASSES = ROWS * CHUNKS / THREADS
};

/* A block has COLS tiles of 128 columns. */
template <int RT> struct slab {
    static constexpr int COLS = RT == 16 ? 3 : 4; /* 3: two blocks fit an SM */
    static constexpr int THIN = STAGES * STAGE_BYTES, FACTOR = THIN + ROWS * RT * 2;
    static constexpr int BYTES = FACTOR + COLS * WIDE * RT * 2 + 1024; /* 1024: alignment */
};

struct pass_args {
    struct grouped_wgrad g[GROUPED_PASSES];
    int n_slab[GROUPED_PASSES];
    int share;
    float *sums; /* [slabs of all g, n_row, r] */
};

/* ---- loads ---- */

/* The byte offset of chunk `chunk`, 16 bytes, in a row of 128 columns. */
static __device__ __forceinline__ uint32_t offset_in_stage(int row, int chunk)
{
    return chunk / 8 * HALF_STAGE + sm90_swizzle(row, chunk % 8);
}

/* What this thread copies next: 8 rows, 16 apart, of the 128 from `row` on. */
struct loader {
    int row, col, stage;
    int at[PASSES], next[PASSES]; /* rows of wide, -1 beyond the end; slots of the 128 rows after these */
};
static __device__ __forceinline__ void find_slots(struct loader *l, const struct grouped_wgrad &g, int row, int end)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int m = row + (int)threadIdx.x / CHUNKS + i * (THREADS / CHUNKS);
        l->next[i] = m >= end ? -1 : g.slot ? __ldg(g.slot + m) : m;
    }
}
static __device__ __forceinline__ void next_rows(struct loader *l, const struct grouped_wgrad &g, int end)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++)
        l->at[i] = g.slot && l->next[i] >= 0 ? quotient_of(g.token, l->next[i]) : l->next[i];
    find_slots(l, g, l->row + ROWS, end);
}
/* Starts the copies of the next 128 x 128 elements; zeros for rows from `end` on and columns out of bounds. */
static __device__ __forceinline__ void load_tile(struct loader *l, const struct grouped_wgrad &g, int first, int n_col,
                                                 int end, uint32_t memory)
{
    const int chunk = threadIdx.x % CHUNKS, col = first + l->col * WIDE + chunk * 8;
    if (l->row < end) {
        const uint32_t to = memory + l->stage * STAGE_BYTES + offset_in_stage(threadIdx.x / CHUNKS, chunk);
        const bool in_bounds = col < (int)g.n_wide;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const bool live = in_bounds && l->at[i] >= 0;
            copy_async16(to + i * (THREADS / CHUNKS) * 128,
                         live ? g.wide + (int64_t)l->at[i] * (int)g.ld_wide + col : g.wide, live ? 16 : 0);
        }
    }
    copy_commit();
    if (++l->stage == STAGES) l->stage = 0;
    if (++l->col == n_col) {
        l->col = 0;
        l->row += ROWS;
        next_rows(l, g, end);
    }
}

static __device__ __forceinline__ void store_rows(const struct grouped_wgrad &g, int row, int end, int col,
                                                  const unsigned char *tile)
{
    const int own = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    if (col + chunk * 8 >= (int)g.n_wide) return;
    bf16 *to = g.rows + (int64_t)(row + own) * g.n_wide + col + chunk * 8;
    tile += offset_in_stage(own, chunk);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int next = i * (THREADS / CHUNKS);
        if (row + own + next < end) *(uint4 *)(to + next * g.n_wide) = *(const uint4 *)(tile + next * 128);
    }
}

/* 8 elements of this thread of thin rows row .. row+127. */
template <int RT> static __device__ __forceinline__ uint4 load_thin(const struct grouped_wgrad &g, int row, int end)
{
    const int m = row + (int)threadIdx.x / (RT / 8);
    if ((int)threadIdx.x >= ROWS * RT / 8 || m >= end) return make_uint4(0, 0, 0, 0);
    return __ldg((const uint4 *)(g.thin + (int64_t)m * (int)g.ld_thin) + threadIdx.x % (RT / 8));
}
/* Writes columns 8 half .. 8 half + 7 of row k transposed: a tile per 64 rows k, [RT, 64] swizzled. */
template <int RT> static __device__ __forceinline__ void transpose8(unsigned char *to, int k, int half, uint4 x)
{
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    to += k / 64 * (RT * 128) + k % 8 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++)
        *(uint16_t *)(to + sm90_swizzle(half * 8 + j, k % 64 / 8)) = (uint16_t)(word[j / 2] >> j % 2 * 16);
}
template <int RT> static __device__ __forceinline__ void store_thin(unsigned char *thin, uint4 x)
{
    if (threadIdx.x < ROWS * RT / 8) transpose8<RT>(thin, threadIdx.x / (RT / 8), threadIdx.x % (RT / 8), x);
}
template <int RT, int COLS>
static __device__ __forceinline__ void load_factor(const struct grouped_wgrad &g, int expert, int first,
                                                   unsigned char *to)
{
    uint4 x[COLS * WIDE * (RT / 8) / THREADS];
#pragma unroll
    for (int i = 0; i < COLS * WIDE * (RT / 8) / THREADS; i++) {
        const int at = threadIdx.x + i * THREADS, row = at / (RT / 8), chunk = at % (RT / 8);
        x[i] = make_uint4(0, 0, 0, 0);
        if (first + row < (int)g.n_wide)
            x[i] = __ldg((const uint4 *)(g.b + ((int64_t)expert * g.n_wide + first + row) * RT) + chunk);
    }
#pragma unroll
    for (int i = 0; i < COLS * WIDE * (RT / 8) / THREADS; i++) {
        const int at = threadIdx.x + i * THREADS;
        transpose8<RT>(to, at / (RT / 8), at % (RT / 8), x[i]);
    }
}

/* ---- arithmetic ---- */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
/* d [64, RT] += a b; a [64, 16] K-major, or MN-major with TRANS_A; b K-major. */
template <int RT, bool TRANS_A>
static __device__ __forceinline__ void multiply_thin(float (*d)[4], uint64_t a, uint64_t b, bool accumulate)
{
    if constexpr (RT == 8)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, 0;\n}\n"
                     : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
                     : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)TRANS_A));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0;\n}\n"
                     : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
                       "+f"(d[1][2]), "+f"(d[1][3])
                     : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)TRANS_A));
}
template <int N> static __device__ __forceinline__ void use(float (&d)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

/* Descriptor of depth k .. k+15 of what transpose8 wrote. */
template <int RT> static __device__ __forceinline__ uint64_t thin_step(uint32_t tiles, int k)
{
    return sm90_descriptor(tiles + k / 64 * (RT * 128), 16, 1024) + k % 64 * 2 / 16;
}
/* c [64 wide, RT] of the warpgroup's 64 columns += wide^T thin. */
template <int RT> static __device__ __forceinline__ void add_rows(float (*c)[4], uint32_t tile, uint32_t thin)
{
    const uint64_t a = sm90_descriptor(tile + threadIdx.x / 128 * HALF_STAGE, 16, 1024);
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) multiply_thin<RT, true>(c, a + k * 128 / 16, thin_step<RT>(thin, k), true);
}
/* t [64, RT] of the warpgroup's 64 rows += wide b. */
template <int RT>
static __device__ __forceinline__ void add_columns(float (*t)[4], uint32_t tile, uint32_t factor, bool accumulate)
{
#pragma unroll
    for (int k = 0; k < WIDE; k += 16)
        multiply_thin<RT, false>(
            t, sm90_descriptor(tile + k / 64 * HALF_STAGE + threadIdx.x / 128 * 8192, 16, 1024) + k % 64 * 2 / 16,
            thin_step<RT>(factor, k), accumulate || k > 0);
}
#endif

/* This slab's part of the product of rows row .. row+127. */
template <int RT>
static __device__ __forceinline__ void store_sums(const struct pass_args &p, const float (*t)[4], int row, int live)
{
    const int lane = threadIdx.x & 31, own = threadIdx.x / 32 * 16 + lane / 4;
    float *to = p.sums + ((int64_t)blockIdx.y * p.g[0].n_row + row + own) * RT + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < RT / 8; j++) {
        if (own < live) *(float2 *)(to + j * 8) = make_float2(t[j][0], t[j][1]);
        if (own + 8 < live) *(float2 *)(to + 8 * RT + j * 8) = make_float2(t[j][2], t[j][3]);
    }
}

/* out += scale * c for a slab. All loads come before the stores, since loads do not overtake stores. */
template <int RT, int COLS>
static __device__ __forceinline__ void add_slab(const struct grouped_wgrad &g, const float (*c)[4], int expert,
                                                int first)
{
    const int lane = threadIdx.x & 31, own = first + (int)threadIdx.x / 32 * 16 + lane / 4, n_wide = (int)g.n_wide;
    float2 *out = (float2 *)(g.out + ((int64_t)expert * n_wide + own) * RT + lane % 4 * 2), old[COLS][2][RT / 8];
#pragma unroll
    for (int i = 0; i < COLS * 2 * (RT / 8); i++) {
        const int col = i / (RT / 8) / 2, half = i / (RT / 8) % 2, j = i % (RT / 8), row = col * WIDE + half * 8;
        if (own + row < n_wide) old[col][half][j] = out[row * (RT / 2) + j * 4];
    }
#pragma unroll
    for (int i = 0; i < COLS * 2 * (RT / 8); i++) {
        const int col = i / (RT / 8) / 2, half = i / (RT / 8) % 2, j = i % (RT / 8), row = col * WIDE + half * 8;
        const float2 x = old[col][half][j];
        const float *y = c[col * (RT / 8) + j] + 2 * half;
        if (own + row < n_wide) out[row * (RT / 2) + j * 4] = make_float2(x.x + g.scale * y[0], x.y + g.scale * y[1]);
    }
}

template <int RT>
static __global__ void __launch_bounds__(THREADS, 2) pass_kernel(const __grid_constant__ struct pass_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = slab<RT>;
    constexpr int COLS = S::COLS;
    extern __shared__ unsigned char raw[];
    unsigned char *memory = raw + (1024 - sm90_shared(raw) % 1024) % 1024;
    int at = 0, slab = blockIdx.y;
    while (slab >= p.n_slab[at]) slab -= p.n_slab[at++];
    const struct grouped_wgrad &g = p.g[at];
    const uint32_t shared = sm90_shared(memory);
    const int first = slab * (COLS * WIDE), n_col = min(COLS, ((int)g.n_wide - first + WIDE - 1) / WIDE);
    const struct unit u = find_unit(g, blockIdx.x, p.share, ROWS);
    if (u.parts == 0) return;

    struct loader l = {u.first, 0, 0};
    find_slots(&l, g, u.first, u.end);
    uint4 thin = load_thin<RT>(g, u.first, u.end);
    next_rows(&l, g, u.end);
    for (int i = 0; i < STAGES; i++) load_tile(&l, g, first, n_col, u.end, shared);
    load_factor<RT, COLS>(g, u.expert, first, memory + S::FACTOR);
    float c[COLS * RT / 8][4] = {};
    int stage = 0;
    for (int row = u.first; row < u.end; row += ROWS) {
        const int live = u.end - row;
        float t[RT / 8][4] = {};
#pragma unroll
        for (int i = 0; i < COLS; i++) {
            if (i >= n_col) break;
            const bool begun = i > 0 || row > u.first; /* else all stages are loading */
            begun ? copy_wait<STAGES - 2>() : copy_wait<STAGES - 1>();
            if (i == 0) {
                store_thin<RT>(memory + S::THIN, thin);
                thin = load_thin<RT>(g, row + ROWS, u.end);
            }
            fence_proxy_async();
            __syncthreads(); /* this tile is loaded for all threads, and the stage loaded next is free */
            if (begun) load_tile(&l, g, first, n_col, u.end, shared);
            const uint32_t tile = shared + stage * STAGE_BYTES;
            wgmma_fence();
            add_rows<RT>(c + i * (RT / 8), tile, shared + S::THIN);
            add_columns<RT>(t, tile, shared + S::FACTOR + i * (WIDE * RT * 2), i > 0);
            wgmma_commit();
            wgmma_wait<0>();
            use(t);
            use(c);
            if (g.rows) store_rows(g, row, u.end, first + i * WIDE, memory + stage * STAGE_BYTES);
            if (++stage == STAGES) stage = 0;
        }
        __syncthreads(); /* the thin rows of this step are free */
        store_sums<RT>(p, t, row, live);
    }
    if (!g.offs) return store_part(g, c, u, blockIdx.y, gridDim.y); /* finish_kernel adds them */
    if (u.parts > 1 && !sum_parts(g, c, u, blockIdx.y, gridDim.y)) return;
    add_slab<RT, COLS>(g, c, u.expert, first);
#else
    __trap();
#endif
}

/* ---- the sums of all blocks ---- */

/* product[m] = product_scale * sum over the slabs; gated[m] = product[m] times the gate of row m, or absent. A thread
 * has 8 columns, from 8 (i % (RT / 8)) on, of row i / (RT / 8). sums: of all slabs, slab 0 first. */
template <int RT>
static __device__ __forceinline__ void finish_product(const struct grouped_wgrad &g, const float *sums, int n_slab,
                                                      int64_t i)
{
    const int64_t row = i / (RT / 8), col = i % (RT / 8) * 8;
    float v[8] = {};
#pragma unroll 4
    for (int s = 0; s < n_slab; s++) {
        const float4 *from = (const float4 *)(sums + (s * g.n_row + row) * RT + col);
        const float4 x = __ldcs(from), y = __ldcs(from + 1);
        v[0] += x.x, v[1] += x.y, v[2] += x.z, v[3] += x.w;
        v[4] += y.x, v[5] += y.y, v[6] += y.z, v[7] += y.w;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= g.product_scale;
    *(uint4 *)(g.product + row * g.ld_product + col) = bf16_pack8(v);
    if (!g.gated) return;
    const float gate = __ldg(g.gate + __ldg(g.row_slot + row));
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= gate;
    *(uint4 *)(g.gated + row * RT + col) = bf16_pack8(v);
}

/* out += scale * sum over the parts, for one matrix with all rows. A thread has element i in the order of store_part.
 * partial: sums of part 0; stride: elements from part to part. */
template <int RT>
static __device__ __forceinline__ void finish_gradient(const struct grouped_wgrad &g, const float *partial,
                                                       int64_t stride, int n_part, int64_t i)
{
    const int k = (int)(i % 4), thread = (int)(i / 4 % THREADS), tile = (int)(i / (4 * THREADS)) / (RT / 8);
    const int wide = tile * WIDE + thread / 32 * 16 + thread % 32 / 4 + k / 2 * 8;
    const int thin = (int)(i / (4 * THREADS)) % (RT / 8) * 8 + thread % 4 * 2 + k % 2;
    float sum = 0;
    if (wide >= (int)g.n_wide) return;
#pragma unroll 8
    for (int part = 0; part < n_part; part++) sum += __ldcs(partial + part * stride + i);
    g.out[(int64_t)wide * RT + thin] += g.scale * sum;
}

template <int RT>
static __global__ void __launch_bounds__(THREADS) finish_kernel(const __grid_constant__ struct pass_args p)
{
    constexpr int SLAB = slab<RT>::COLS * WIDE * RT; /* elements of the gradient */
    const struct grouped_wgrad &g = p.g[blockIdx.y];
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, n_product = g.n_row * (RT / 8);
    int before = 0, all = 0; /* slabs */
#pragma unroll
    for (int k = 0; k < GROUPED_PASSES; k++) {
        before += k < (int)blockIdx.y ? p.n_slab[k] : 0;
        all += p.n_slab[k];
    }
    if (i < n_product)
        finish_product<RT>(g, p.sums + before * g.n_row * RT, p.n_slab[blockIdx.y], i);
    else if (!g.offs && i - n_product < (int64_t)p.n_slab[blockIdx.y] * SLAB)
        finish_gradient<RT>(g, (const float *)g.partial + (int64_t)before * SLAB, (int64_t)all * SLAB,
                            parts_of((int)g.n_row, p.share), i - n_product);
}

/* ---- launch ---- */

enum { MIN_SHARE = 2 * ROWS };

/* Rows of a part. */
static int64_t share_of(int64_t n_row, int64_t n_slab)
{
    return MT_MAX(ceil_div(ceil_div(n_row * n_slab, PASS_PER_SM * DIVISION_SM), ROWS) * ROWS, (int64_t)MIN_SHARE);
}
template <int RT> static void launch(const struct grouped_wgrad *g, int n)
{
    static bool configured;
    const auto kernel = pass_kernel<RT>;
    const int64_t width = scratch_pass_columns(RT);
    MT_REQUIRE(width == slab<RT>::COLS * WIDE, "slabs of %lld columns", (long long)width);
    struct pass_args p = {};
    int64_t n_slab = 0, most = 0;
    for (int i = 0; i < n; i++) {
        const int64_t slabs = ceil_div(g[i].n_wide, width);
        p.g[i] = g[i];
        p.g[i].partial = g->partial;
        p.n_slab[i] = (int)slabs;
        n_slab += slabs;
        most = MT_MAX(most, slabs);
    }
    const int64_t share = share_of(g->n_row, n_slab), units = g->n_row / share + g->n_exp;
    const int64_t n_partial = scratch_pass_partial(g->n_row, n_slab);
    MT_REQUIRE(n_partial <= MAX_TILES && units <= 65535 && share <= INT32_MAX && n_slab <= 65535,
               "adapter gradients of %lld experts, %lld rows, %lld slabs", (long long)g->n_exp, (long long)g->n_row,
               (long long)n_slab);
    p.share = (int)share;
    p.sums = (float *)g->partial + n_partial * width * RT;
    if (!configured)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, slab<RT>::BYTES));
    configured = true;
    kernel<<<dim3((unsigned)units, (unsigned)n_slab), THREADS, slab<RT>::BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
    const int64_t threads = g->n_row * (RT / 8) + (g->offs ? 0 : most * width * RT);
    finish_kernel<RT><<<dim3(grid_x(ceil_div(threads, THREADS)), (unsigned)n), THREADS, 0, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

void cuda_grouped_pass(const struct grouped_wgrad *g, int n)
{
    MT_REQUIRE(n >= 1 && n <= GROUPED_PASSES, "%d gradients in one pass", n);
    for (int i = 0; i < n; i++) {
        MT_REQUIRE(g[i].n_wide > 0 && g[i].n_wide % 8 == 0 && g[i].ld_wide % 8 == 0 && g[i].ld_wide <= INT32_MAX &&
                       g[i].ld_thin % 8 == 0 && g[i].ld_thin <= INT32_MAX && g[i].ld_product % 8 == 0 && g[i].b &&
                       !g[i].thin_first && choice_one_pass(cuda.arch, g[i].r) && g[i].r == g->r &&
                       g[i].n_row == g->n_row && g[i].offs == g->offs && g[i].slot == g->slot,
                   "one pass for an adapter of %lld x %lld, rows %lld apart", (long long)g[i].n_wide, (long long)g[i].r,
                   (long long)g[i].ld_wide);
        MT_REQUIRE(grouped_aligned(g[i].wide) && grouped_aligned(g[i].thin) && grouped_aligned(g[i].b) &&
                       grouped_aligned(g[i].product),
                   "one pass for an adapter: an operand is not 16-byte aligned");
    }
    if (g->n_row == 0) return;
    g->r == 8 ? launch<8>(g, n) : launch<16>(g, n);
}
