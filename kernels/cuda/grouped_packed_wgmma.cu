/* grouped_packed_wgmma.cu - the grouped GEMM of grouped.h on Hopper with experts in MXFP4, decoded between shared
 * memory and the tensor cores: no decoded copy of an expert exists. For few rows per expert;
 * grouped_decode_wgmma.cu: for many.
 *
 * Math: as in grouped_wgmma.cu. A decoded weight is the exact bf16 value that dequant.cu writes, so the products are
 *   the same, and only the order of the f32 sums differs.
 * Operands change places: columns of the output are the 64 rows of a wgmma, whose a is in registers; rows of the
 *   experts (tokens) are its N columns, whose b is in shared memory. The rows of an expert are cut into the fewest
 *   equal tiles of at most 144; N is 48, 96 or 144.
 * Tiles: 256 columns of the output, 128 of each consumer warpgroup, 32 of each of its warps. A thread has four
 *   adjacent ones, 4i .. 4i+3 with i = lane / 4, as rows i and i+8 of two products: it stores them without exchanges.
 * Decoding: forward, a thread needs byte q = lane % 4 of every word of eight weights in its rows. The lanes of a quad
 *   load a word each and transpose their bytes in two exchanges; prmt looks up both bytes of a bf16. Backward,
 *   neighbours in depth are rows of w: a transposing ldmatrix puts four columns of two rows into one word; shifts move
 *   the three low bits of a code to bits 6 .. 8 of a half, where they are the value times 2^-126. Either way the
 *   product in bf16 with the scale, a power of two, is exact.
 * Needs: sm_90a; n_in of w a multiple of 32, n_out of 8; grouped_require; at most 512 experts.
 * Grid: persistent, one block per SM: a producer warpgroup, two consumer warpgroups, 8 pipeline stages: 209 KiB. 168
 *   registers at launch, then 40 and 232; at most 12 bytes of spills.
 * Moves: w is read once per 144 rows of its expert, 0.53 bytes a weight; rows once per 256 columns, from L2.
 * Numerics: f32 sums in one fixed order, no atomics: bitwise repeatable.
 *
 * Order: while the wgmmas of half a step run, a warp decodes a of the next half but for the scales. The compiler makes
 *   wgmmas wait for each other when registers that they read are written during earlier ones, when sums are scaled
 *   before them, and when a kernel has loops for more than three widths N. It moves decoding behind the wait for the
 *   running wgmmas where no branch is between. So the adapter comes last, by mma.sync.
 * Measured: H200, bench lora, gpt-oss-20b, r 16, forward and backward of the experts of a layer with adapters, ms, by
 *   tokens (top 4 of 32 experts): decoded to memory in each use, commit 61c7d7f; resident in bf16, 61c7d7f; this kernel
 *     256     2.140   1.111   0.925
 *     1024    2.432   1.409   1.458
 *     4096    4.415   3.727   4.158
 *     16384  13.14   13.16   15.34
 *   Hardware counters, 1024 tokens: tensor cores busy 43 %, issue 37 %; DRAM and L2 are not the bound.
 *   Those of more than 112 rows per expert are of the time before grouped_decode_wgmma.cu.
 * Tried and dropped: TMA boxes of 48 rows: experts of DeepSeek-V4-Flash, 96 rows each, up backward 3.12 instead of 2.59
 *   ms. Decoding after the wait, N of 32, 64, 96 and 128: 1024 tokens 1.684. Three consumer warpgroups of
 *   64 columns, tiles of 192: a step of 1024 tokens 57.9 instead of 55.5 ms, issue 45 %, tensor cores 40 %. On an H200,
 *   not in the history: one product of 64 columns per warpgroup and tiles of 256 rows, a step 59.8 instead of 55.0 ms.
 *   Tiles of 128 rows whose decoding overlaps completely with the wgmmas (branches that are never taken keep the
 *   order), 57.2 instead of 55.3 ms. The same with words of weights fetched half a step earlier, us of the products of
 *   a layer at 128 rows per expert: forward 353 and 183 instead of 343 and 178, backward 403 and 315 instead of 343 and
 *   272; there the warps of the backward wait for stages in 38 % of the samples. */
#include <string.h>

#include "kernels/cuda/grouped_epilogue.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/mxfp4_words.cuh"
#include "kernels/cuda/ring_wgmma.cuh"
#include "kernels/cuda/sm90_narrow.cuh"

enum {
    COLS = 256,
    TOKENS = NARROW_MAX,
    UNIT = 16,  /* tokens of one TMA box */
    DEPTH = 64, /* of a stage */
    TOKEN_BYTES = TOKENS * DEPTH * 2,
    WEIGHT_BYTES = COLS * DEPTH / 2,
    STAGE_BYTES = TOKEN_BYTES + WEIGHT_BYTES,
    STAGES = 8,
    RING_BYTES = STAGES * STAGE_BYTES + 1024, /* 1024: alignment */
    MAX_EXPERTS = 512,
    LOADERS = 128,
    CONSUMERS = 2 * 128,
    THREADS = CONSUMERS + LOADERS,
    LOADER_REGISTERS = 40, /* (40 + 2 * 232) * 128 = 63 Ki of the SM's 64 Ki */
    CONSUMER_REGISTERS = 232,
    SCALE_BLOCK = 32,
    FEW_ROWS = 112, /* per expert; with more, grouped_decode_wgmma.cu is faster */
    MOST_ROWS = 768 /* per expert; with more, decoding to memory first is faster */
};

struct packed_args {
    CUtensorMap a, w; /* a: boxes of UNIT tokens by 64 of depth, zeroed when unused */
    struct grouped g;
    const uint8_t *scale; /* [E, rows of w, columns of w / 32] e8m0 */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- tiles: expert by expert, column by column; tiles of rows innermost, as they share a part of w ---- */

struct tiles {
    int32_t first[MAX_EXPERTS + 1]; /* tiles of rows before expert i */
    int32_t row[MAX_EXPERTS + 1];   /* offs */
    int32_t n_exp, n_col;
};
struct tile {
    int32_t e, m, n, n_row; /* expert, first row and column, rows */
};

static __device__ __forceinline__ struct tile tile_at(const struct tiles *tiles, int at, int *e)
{
    while (at >= tiles->first[*e + 1] * tiles->n_col) (*e)++;
    const int n_tile = tiles->first[*e + 1] - tiles->first[*e], in_expert = at - tiles->first[*e] * tiles->n_col;
    const int start = tiles->row[*e], rows = tiles->row[*e + 1] - start;
    const int height = ((rows + n_tile - 1) / n_tile + UNIT - 1) / UNIT * UNIT, skip = in_expert % n_tile * height;
    struct tile t;
    t.e = *e;
    t.m = start + skip;
    t.n = in_expert / n_tile * COLS;
    t.n_row = MT_MIN(height, rows - skip);
    return t;
}

/* One warp fills `tiles`. */
static __device__ __forceinline__ void count_tiles(struct tiles *tiles, const struct grouped &g)
{
    const int lane = threadIdx.x & 31, n_exp = (int)g.n_exp;
    int before = 0;
    for (int base = 0; base < n_exp; base += 32) {
        const int i = MT_MIN(base + lane, n_exp - 1), start = g.offs[i], end = g.offs[i + 1];
        int sum = base + lane < n_exp ? (end - start + TOKENS - 1) / TOKENS : 0;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        tiles->row[i] = start;
        if (base + lane < n_exp) tiles->first[i + 1] = before + sum;
        before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) {
        tiles->first[0] = 0;
        tiles->row[n_exp] = g.offs[n_exp];
        tiles->n_exp = n_exp;
        tiles->n_col = (int)((g.n_out + COLS - 1) / COLS);
    }
}

/* ---- the pipeline: as in grouped_wgmma.cu ---- */

static __device__ __forceinline__ uint32_t stage_of(const struct ring &ring)
{
    return ring.data + ring.stage * STAGE_BYTES;
}

/* ---- loading ---- */

static __device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap *map, uint32_t bar, int x, int y,
                                                   int z, int w)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];\n" ::"r"(to),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

/* By one thread. */
template <bool KN>
static __device__ __forceinline__ void load_tiles(const struct packed_args &p, const struct tiles *tiles,
                                                  struct ring ring)
{
    const int n_in = (int)p.g.n_in;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, &e);
        const int n_unit = (t.n_row + UNIT - 1) / UNIT;
        for (int k = 0; k < n_in; k += DEPTH) {
            const uint32_t to = stage_of(ring), full = ring.full + 8 * ring.stage;
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            mbarrier_arrive_expect(full, WEIGHT_BYTES + n_unit * UNIT * DEPTH * 2);
            if (KN)
                tma_load_4d(to + TOKEN_BYTES, &p.w, full, t.n / 2, k, t.e, 0);
            else
                tma_load_4d(to + TOKEN_BYTES, &p.w, full, k / 2, t.n / 4, 0, t.e);
            for (int i = 0; i < n_unit; i++) tma_load(to + i * UNIT * 128, &p.a, full, k, t.m + i * UNIT, 0);
            ring_advance<STAGES>(&ring);
        }
    }
}

/* ---- decoding ---- */

/* Column j of a word of two rows of w, nibble j of its halves, without their scales. */
static __device__ __forceinline__ uint32_t decode_rows(uint32_t u, int j)
{
    const uint32_t code = (j == 0 ? u << 6 : j == 1 ? u << 2 : j == 2 ? u >> 2 : u >> 6) & 0x01c001c0;
    const uint32_t sign = (u << (12 - 4 * j)) & 0x80008000;
    return times(code | sign, 0x7e807e80); /* 0x7e80: 2^126 */
}

/* Two scales of this lane for each step of depth. Forward: row `lane` of the warp's 32, the two blocks of the step.
 * Backward: rows 2 lane and 2 lane + 1 of the step, the block of the warp's 32 columns. */
struct scales {
    const uint8_t *from; /* of the next step */
    int left;            /* forward blocks, backward rows, from there to the end */
    uint32_t a, b;       /* bytes of a step; 0 out of bounds */
};
template <bool KN> static __device__ __forceinline__ void load_scales(struct scales *s, int n_block)
{
    s->a = s->b = 0;
    if (s->left > 0) s->a = __ldg(s->from);
    if (s->left > 1) s->b = __ldg(s->from + (KN ? n_block : 1));
    s->from += KN ? DEPTH * n_block : DEPTH / SCALE_BLOCK;
    s->left -= KN ? DEPTH : DEPTH / SCALE_BLOCK;
}
template <bool KN>
static __device__ __forceinline__ struct scales first_scales(const struct packed_args &p, const struct tile &t)
{
    const int lane = threadIdx.x % 32, col = t.n + threadIdx.x / 32 * 32;
    const int n_row = (int)(KN ? p.g.n_in : p.g.n_out), n_block = (int)(KN ? p.g.n_out : p.g.n_in) / SCALE_BLOCK;
    const int row = KN ? 2 * lane : col + lane, block = KN ? col / SCALE_BLOCK : 0;
    struct scales s = {p.scale + ((int64_t)t.e * n_row + row) * n_block + block, 0, 0, 0};
    if (row < n_row && block < n_block) s.left = KN ? n_row - row : n_block;
    load_scales<KN>(&s, n_block);
    return s;
}

/* The words of half a step for this thread. Forward: w[j]: byte q of the four words of row j of its four. Backward:
 * w[i]: four columns of rows 8i + 2q and 8i + 2q + 1. */
template <bool KN> static __device__ __forceinline__ void load_words(uint32_t (&w)[4], uint32_t data, int half)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = lane % 4;
    if (KN) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(data + sm90_swizzle(32 * half + lane, warp))
                     : "memory");
        return;
    }
    const uint32_t from = data + (8 * warp + lane / 4) * 32 + 16 * half + 4 * q;
    const uint32_t keep = q & 1 ? 0x7531 : 0x6420, keep2 = q == 0 ? 0x6240 : q == 1 ? 0x2604 : q == 2 ? 0x7351 : 0x3715;
    const uint32_t low = q & 2 ? 0x1054 : 0x5410, high = q & 2 ? 0x3276 : 0x7632;
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[j]) : "r"(from + j * (COLS / 4) * 32) : "memory");
#pragma unroll
    for (int j = 0; j < 4; j += 2) { /* transposes of two rows in the quad */
        const uint32_t own = __byte_perm(x[j], x[j + 1], keep);
        const uint32_t got = __shfl_xor_sync(~0u, __byte_perm(x[j], x[j + 1], keep ^ 0x1111), 1);
        const uint32_t own2 = __byte_perm(own, got, keep2);
        const uint32_t got2 = __shfl_xor_sync(~0u, __byte_perm(own, got, keep2 ^ 0x1111), 2);
        w[j] = __byte_perm(own2, got2, low);
        w[j + 1] = __byte_perm(own2, got2, high);
    }
}

/* a of the wgmmas of half a step, [product][depth / 16], but for the scales. */
template <bool KN> static __device__ __forceinline__ void decode(uint32_t (&code)[2][2][4], const uint32_t (&w)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t pair[4];
        if (!KN) decode_word(pair, plain_values(), w[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (KN)
                code[j / 2][i / 2][i % 2 * 2 + j % 2] = decode_rows(w[i], j);
            else
                code[i / 2][j / 2][j % 2 * 2 + i % 2] = pair[j];
        }
    }
}

/* The scales of these, twice in a word: forward of the four rows of this thread, backward of the pairs of rows. mine:
 * bf16 of the lane's two scales. */
template <bool KN> static __device__ __forceinline__ void share_scales(uint32_t (&scale)[4], uint32_t mine, int half)
{
    const int lane = threadIdx.x % 32;
    const uint32_t given = KN ? mine : __byte_perm(mine, 0, half ? 0x3232 : 0x1010);
#pragma unroll
    for (int i = 0; i < 4; i++)
        scale[i] = __shfl_sync(~0u, given, KN ? 16 * half + 4 * i + lane % 4 : lane / 4 * 4 + i);
}
template <bool KN>
static __device__ __forceinline__ void apply_scales(uint32_t (&a)[2][2][4], const uint32_t (&code)[2][2][4],
                                                    const uint32_t (&scale)[4])
{
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int j = 0; j < 4; j++) a[t][k][j] = times(code[t][k][j], scale[KN ? 2 * k + j / 2 : 2 * t + j % 2]);
}

/* ---- products ---- */

/* Before wgmma_fence, so that the compiler computes no part of a later: it would wait for each wgmma in turn. */
template <int N> static __device__ __forceinline__ void computed(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
}

/* a of the adapter's factor lb for depth k .. k+15, both products. */
template <bool KN>
static __device__ __forceinline__ void load_factor(uint32_t (&a)[2][4], const struct grouped &g, const struct tile &t,
                                                   int k)
{
    const int lane = threadIdx.x % 32, r = (int)g.r, n_out = (int)g.n_out;
    const int n = t.n + threadIdx.x / 32 * 32 + lane / 4 * 4;
    const bf16 *lb = g.lb + (int64_t)t.e * n_out * r;
#pragma unroll
    for (int i = 0; i < 2; i++) { /* depth k + 8i + 2q, + 1 */
        const int at = k + 8 * i + lane % 4 * 2;
        const bool in_bounds = n < n_out && at < r;
        uint2 row[2] = {};
        for (int h = 0; h < 2 && KN; h++)
            if (in_bounds) row[h] = __ldg((const uint2 *)(lb + (int64_t)(at + h) * n_out + n));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t x = 0;
            if (KN)
                x = __byte_perm(j < 2 ? row[0].x : row[0].y, j < 2 ? row[1].x : row[1].y, j % 2 ? 0x7632 : 0x5410);
            else if (in_bounds)
                x = __ldg((const uint32_t *)(lb + (int64_t)(n + j) * r + at));
            a[j / 2][2 * i + j % 2] = x;
        }
    }
}

/* sums += scale * la lb_e, by mma.sync, whose sums are in the same registers as those of wgmma. It comes last: sums
 * that are scaled before the main product make the compiler serialise its wgmmas. */
template <int N, bool KN>
static __device__ __forceinline__ void multiply_thin(float (&sums)[2][N / 2], const struct grouped &g,
                                                     const struct tile &t)
{
    const int lane = threadIdx.x % 32, r = (int)g.r;
    for (int k = 0; k < r; k += 16) {
        uint32_t a[2][4];
        load_factor<KN>(a, g, t, k);
        const bf16 *la = g.la + k + lane % 4 * 2;
        const bool deep[2] = {k + lane % 4 * 2 < r, k + lane % 4 * 2 + 8 < r};
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const int row = 8 * j + lane / 4;
            uint32_t b[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (row < t.n_row && deep[i]) b[i] = __ldg((const uint32_t *)(la + (int64_t)(t.m + row) * r + 8 * i));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float c[4] = {};
                mma_bf16(c, a[i], b);
#pragma unroll
                for (int l = 0; l < 4; l++) sums[i][4 * j + l] += g.scale * c[l];
            }
        }
    }
}

/* sums of a tile of up to N rows. While the wgmmas of half a step run, the warp decodes a of the next half but for the
 * scales. The compiler makes wgmmas wait for each other when their registers are written
 * during earlier ones, and moves decoding behind the wait when no branch is between. */
template <int N, bool KN>
static __device__ __forceinline__ void multiply(float (&sums)[2][N / 2], struct ring *ring, const struct packed_args &p,
                                                const struct tile &t)
{
    const struct grouped &g = p.g;
    const int n_block = (int)(KN ? g.n_out : g.n_in) / SCALE_BLOCK;
    struct scales s = first_scales<KN>(p, t);
    uint32_t code[2][2][4], scale[4], mine = 0;
    int before = -1;
    const auto take = [&](int half) { /* code and scale of half a step */
                                      uint32_t w[4];
                                      load_words<KN>(w, stage_of(*ring) + TOKEN_BYTES, half);
                                      share_scales<KN>(scale, mine, half);
                                      decode<KN>(code, w);
                                      computed(code[0]);
                                      computed(code[1]);
    };
    const auto start = [&](int half,
                           bool first) { /* its products */
                                         const uint64_t b = sm90_descriptor(stage_of(*ring), 16, 1024) + half * 4;
                                         uint32_t a[2][2][4];
                                         wgmma_wait<0>();
                                         apply_scales<KN>(a, code, scale);
                                         computed(a[0]);
                                         computed(a[1]);
                                         wgmma_fence();
#pragma unroll
                                         for (int k = 0; k < 2; k++) {
                                             narrow<N>::multiply(sums[0], a[0][k], b + 2 * k, !first || k > 0);
                                             narrow<N>::multiply(sums[1], a[1][k], b + 2 * k, !first || k > 0);
                                         }
                                         wgmma_commit();
    };
    const auto enter = [&]() { /* the next stage */
                               mine = scale_bits(s.a) | scale_bits(s.b) << 16;
                               load_scales<KN>(&s, n_block);
                               mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
    };
    enter();
    take(0);
    for (int k = 0; k < (int)g.n_in; k += DEPTH) {
        start(0, k == 0);
        take(1);
        if (before >= 0) release(*ring, before); /* a branch; so is the wait in enter */
        start(1, false);
        before = ring->stage;
        ring_advance<STAGES>(ring);
        if (k + DEPTH >= (int)g.n_in) break;
        enter();
        take(0);
    }
    wgmma_wait<0>();
    wgmma_use(sums[0]);
    wgmma_use(sums[1]);
    release(*ring, before);
    if (g.r > 0) multiply_thin<N, KN>(sums, g, t);
}

/* Waits for and releases all stages of a tile in which this warpgroup has no columns. */
static __device__ __forceinline__ void skip_tile(struct ring *ring, int n_block)
{
    for (int i = 0; i < n_block; i++) {
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        release(*ring, ring->stage);
        ring_advance<STAGES>(ring);
    }
}

/* ---- epilogue: a thread has columns n .. n+3 of rows 8j + 2q and 8j + 2q + 1 of the tile ---- */

template <int N>
static __device__ __forceinline__ void columns_of(float v[4], const float (&sums)[2][N / 2], int j, int odd)
{
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = sums[c / 2][4 * j + c % 2 * 2 + odd];
}

template <int N, bool GLU>
static __device__ __forceinline__ void finish(const float (&sums)[2][N / 2], const struct grouped &g,
                                              const struct tile &t)
{
    const int n = t.n + threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4 * 4;
    if (n >= g.n_out) return;
    const struct glu_form form = glu_form_of(g.glu);
    float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (g.bias) bias = __ldg((const float4 *)(g.bias + t.e * g.n_out + n));
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int row = 8 * j + threadIdx.x % 4 * 2 + odd;
            float v[4];
            columns_of<N>(v, sums, j, odd);
            const uint2 w =
                make_uint2(bf16_pack(v[0] + bias.x, v[1] + bias.y), bf16_pack(v[2] + bias.z, v[3] + bias.w));
            if (row >= t.n_row) continue;
            store8(g.out + (t.m + row) * g.n_out + n, w);
            if (GLU)
                *(uint32_t *)(g.act + ((t.m + row) * g.n_out + n) / 2) = bf16_pack(
                    glu_value(form, bf16_low(w.x), bf16_high(w.x)), glu_value(form, bf16_low(w.y), bf16_high(w.y)));
        }
    }
}

/* GROUPED_GLU_BWD. weight: gates of the tile's rows; part: sums of h g of each warp of this warpgroup. */
struct glu_scratch {
    float weight[TOKENS], part[4][TOKENS];
};
static __device__ __forceinline__ void load_weights(struct glu_scratch *s, const struct grouped &g,
                                                    const struct tile &t)
{
    for (int i = threadIdx.x % 128; i < t.n_row; i += 128) s->weight[i] = __ldg(g.gate + __ldg(g.row_slot + t.m + i));
}

/* Gates and ups of four columns of a row. */
static __device__ __forceinline__ uint4 load_pre(const struct grouped &g, int64_t m, int n)
{
    const bf16 *from = g.pre + pre_start(g, m, n);
    if (g.glu.interleaved) return __ldg((const uint4 *)from);
    const uint2 gate = __ldg((const uint2 *)from), up = __ldg((const uint2 *)(from + g.n_out));
    return make_uint4(gate.x, gate.y, up.x, up.y);
}

/* Returns the sum of h * v over four columns of row m. */
static __device__ __forceinline__ float glu_bwd4(const struct grouped &g, const struct glu_form &form, int64_t m, int n,
                                                 const float v[4], float weight, uint4 pre)
{
    const uint32_t w[4] = {pre.x, pre.y, pre.z, pre.w};
    const bool pairs = g.glu.interleaved;
    bf16 *out = g.out + pre_start(g, m, n);
    float gate[4], up[4], h[4], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = i % 2 ? bf16_high(w[i / 2]) : bf16_low(w[i / 2]);
        const float y = i % 2 ? bf16_high(w[2 + i / 2]) : bf16_low(w[2 + i / 2]);
        h[i] = glu_gradient(form, pairs ? bf16_low(w[i]) : x, pairs ? bf16_high(w[i]) : y, weight * v[i], &gate[i],
                            &up[i]);
        sum += h[i] * v[i];
    }
    store8(g.act + m * g.n_out + n, make_uint2(bf16_pack(h[0], h[1]), bf16_pack(h[2], h[3])));
    if (pairs) {
        store16(out, make_uint4(bf16_pack(gate[0], up[0]), bf16_pack(gate[1], up[1]), bf16_pack(gate[2], up[2]),
                                bf16_pack(gate[3], up[3])));
    } else {
        store8(out, make_uint2(bf16_pack(gate[0], gate[1]), bf16_pack(gate[2], gate[3])));
        store8(out + g.n_out, make_uint2(bf16_pack(up[0], up[1]), bf16_pack(up[2], up[3])));
    }
    return sum;
}

template <int N>
static __device__ __forceinline__ void finish_glu_bwd(float (&sums)[2][N / 2], const struct grouped &g,
                                                      const struct tile &t, struct glu_scratch *s)
{
    enum { STEP = N % 32 ? 16 : 32 }; /* rows of a step; a loop that shifts the sums down fits the instruction cache */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    const int n = t.n + warp * 32 + lane / 4 * 4;
    const bool in_bounds = n < g.n_out;
    const struct glu_form form = glu_form_of(g.glu);
    warpgroup_barrier(1 + group); /* the weights are there */
#pragma unroll 1
    for (int i = 0; i < t.n_row; i += STEP) {
        uint4 pre[STEP / 4];
#pragma unroll
        for (int c = 0; c < STEP / 4; c++) {
            const int row = i + c / 2 * 8 + lane % 4 * 2 + c % 2;
            pre[c] = make_uint4(0, 0, 0, 0);
            if (in_bounds && row < t.n_row) pre[c] = load_pre(g, t.m + row, n);
        }
#pragma unroll
        for (int c = 0; c < STEP / 4; c++) {
            const int row = i + c / 2 * 8 + lane % 4 * 2 + c % 2;
            float v[4], sum = 0.0f;
            columns_of<N>(v, sums, c / 2, c % 2);
            if (in_bounds && row < t.n_row) sum = glu_bwd4(g, form, t.m + row, n, v, s->weight[row], pre[c]);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (lane < 4) s->part[warp % 4][row] = sum;
        }
#pragma unroll
        for (int c = 0; c + STEP / 2 < N / 2; c++) {
            sums[0][c] = sums[0][c + STEP / 2];
            sums[1][c] = sums[1][c + STEP / 2];
        }
    }
    warpgroup_barrier(1 + group);
    for (int i = threadIdx.x % 128; i < 2 * TOKENS; i += 128) {
        const int half = i / TOKENS, row = i % TOKENS, first = t.n + group * 128 + half * GROUPED_PART;
        if (row < t.n_row && first < g.n_out)
            g.dgate_part[(int64_t)(first / GROUPED_PART) * g.n_row + t.m + row] =
                s->part[2 * half][row] + s->part[2 * half + 1][row];
    }
}

template <int N, int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tile(const struct packed_args &p, struct ring *ring,
                                                     const struct tile &t, struct glu_scratch *scratch)
{
    float sums[2][N / 2] = {};
    if (EPILOGUE == GROUPED_GLU_BWD) load_weights(scratch, p.g, t);
    multiply<N, KN>(sums, ring, p, t);
    if constexpr (EPILOGUE == GROUPED_GLU_BWD)
        finish_glu_bwd<N>(sums, p.g, t, scratch);
    else
        finish<N, EPILOGUE == GROUPED_GLU>(sums, p.g, t);
}

template <int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct packed_args &p, const struct tiles *tiles,
                                                      struct ring ring, struct glu_scratch *scratch)
{
    const struct grouped &g = p.g;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col, n_block = ((int)g.n_in + DEPTH - 1) / DEPTH;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    scratch += EPILOGUE == GROUPED_GLU_BWD ? group : 0;
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, &e);
        if (t.n + group * 128 >= g.n_out) {
            skip_tile(&ring, n_block);
            continue;
        }
        /* A loop for every width, as sums are registers. Four widths or more do not fit: the compiler serialises. */
        if (t.n_row <= 48)
            multiply_tile<48, EPILOGUE, KN>(p, &ring, t, scratch);
        else if (t.n_row <= 96)
            multiply_tile<96, EPILOGUE, KN>(p, &ring, t, scratch);
        else
            multiply_tile<TOKENS, EPILOGUE, KN>(p, &ring, t, scratch);
    }
}
#endif

template <int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) grouped_packed_kernel(const __grid_constant__ struct packed_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ struct glu_scratch scratch[EPILOGUE == GROUPED_GLU_BWD ? 2 : 1];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    if (threadIdx.x < 32) count_tiles(&tiles, p.g);
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(sm90_shared(&full[i]), 1);
            mbarrier_init(sm90_shared(&empty[i]), CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const struct ring ring = {
        (sm90_shared(memory) + 1023) / 1024 * 1024, sm90_shared(full), sm90_shared(empty), 0, 0, 0};
    if (threadIdx.x >= CONSUMERS) {
        sm90_registers_less<LOADER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) load_tiles<KN>(p, &tiles, ring);
    } else {
        sm90_registers_more<CONSUMER_REGISTERS>();
        multiply_tiles<EPILOGUE, KN>(p, &tiles, ring, scratch);
    }
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

/* ---- host ---- */

/* Rows of n_col bf16, ld apart. */
static CUtensorMap token_map(const bf16 *base, int64_t n_row, int64_t n_col, int64_t ld)
{
    const int64_t size[3] = {n_col, n_row, 1}, stride[2] = {ld * 2, n_row * ld * 2}, box[3] = {DEPTH, UNIT, 1};
    return sm90_tensor_map(base, size, stride, box);
}

/* Bytes of four axes, the innermost first: sizes, strides of the outer three, boxes. */
struct byte_map {
    const void *base;
    cuuint64_t size[4], stride[3];
    cuuint32_t box[4];
    bool swizzled;
};
static CUtensorMap encode_bytes(const struct byte_map *m)
{
    const struct sm90_map map = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, m->base, m->size, m->stride, m->box, m->swizzled};
    return sm90_encode(&map);
}

/* The packed bytes. Backward: boxes of 64 rows by 256 columns, swizzled. Forward: boxes of 256 rows by 64 columns, in
 * which rows 4 apart follow each other. */
static CUtensorMap weight_map(const struct weight *w, bool kn)
{
    const cuuint64_t row = (cuuint64_t)w->n_in / 2, n_row = (cuuint64_t)w->n_out, n_exp = (cuuint64_t)w->n_exp;
    const struct byte_map backward = {
        w->data, {row, n_row, n_exp, 1}, {row, row * n_row, row * n_row * n_exp}, {COLS / 2, DEPTH, 1, 1}, true};
    const struct byte_map forward = {
        w->data, {row, n_row / 4, 4, n_exp}, {row * 4, row, row * n_row}, {DEPTH / 2, COLS / 4, 4, 1}, false};
    return encode_bytes(kn ? &backward : &forward);
}

template <int EPILOGUE, bool KN> static void launch(const struct grouped *g, const struct weight *w)
{
    static bool configured;
    struct packed_args p;
    memset(&p, 0, sizeof(p));
    p.g = *g;
    p.scale = w->scale;
    p.a = token_map(g->a, g->n_row, g->n_in, g->lda);
    p.w = weight_map(w, KN);
    if (!configured)
        CUDA_CHECK(cudaFuncSetAttribute(grouped_packed_kernel<EPILOGUE, KN>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, RING_BYTES));
    configured = true;
    grouped_packed_kernel<EPILOGUE, KN><<<cuda.n_sm, THREADS, RING_BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

bool cuda_grouped_packed_fits(const struct weight *w, int64_t n_row)
{
    return cuda.hopper && w->format == WF_MXFP4 && w->n_exp > 1 && w->n_exp <= MAX_EXPERTS &&
           n_row <= MOST_ROWS * w->n_exp && w->n_in % SCALE_BLOCK == 0 && w->n_in >= 64 && w->n_out >= 64 &&
           w->n_out % 8 == 0 && w->n_out * w->n_in <= INT32_MAX;
}

void cuda_grouped_packed(const struct grouped *g, const struct weight *w)
{
    const int64_t n_tile = (ceil_div(g->n_row, UNIT) + g->n_exp) * ceil_div(g->n_out, COLS);
    grouped_require(g);
    MT_REQUIRE(cuda_grouped_packed_fits(w, g->n_row) && !g->ids && !g->slot && g->first == 0 && g->count == w->n_exp &&
                   n_tile + cuda.n_sm <= INT32_MAX,
               "a product with packed experts of %lld x %lld", (long long)w->n_out, (long long)w->n_in);
    if (g->n_row == 0) return;
    if (g->n_row > FEW_ROWS * w->n_exp)
        cuda_grouped_decode(g, w);
    else if (g->epilogue == GROUPED_GLU_BWD && g->kn)
        launch<GROUPED_GLU_BWD, true>(g, w);
    else if (g->epilogue == GROUPED_GLU && !g->kn && g->glu.interleaved)
        launch<GROUPED_GLU, false>(g, w);
    else if (g->epilogue == GROUPED_STORE)
        g->kn ? launch<GROUPED_STORE, true>(g, w) : launch<GROUPED_STORE, false>(g, w);
    else
        MT_REQUIRE(false, "epilogue %d with%s kn", (int)g->epilogue, g->kn ? "" : "out");
}
