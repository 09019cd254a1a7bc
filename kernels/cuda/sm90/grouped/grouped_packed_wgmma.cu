/* grouped_packed_wgmma.cu - the grouped GEMM of grouped.h on Hopper with experts in MXFP4, for few rows per expert: no
 * decoded copy of an expert exists in global memory. A warpgroup decodes its columns of a step into shared memory
 * while its products of the step before run. grouped_decode_wgmma.cu: for many rows.
 * Math: as in grouped_wgmma.cu, with exact decoded weights; only the order of the f32 sums differs. Operands are
 *   exchanged: columns of the output are the 64 rows of a wgmma, rows of the experts its N columns, rounded up to 16.
 *   Decoding: a multiplication and two masks move the four bits of a code to where they are the bits of a bf16, the
 *   code's value times 2^-126; its product with the scale times 2^126 is exact. In the backward, the halves of a word
 *   are two weights that are four apart. In the forward, prmt makes them neighbours, and even rows of w are read first.
 * Needs: sm_90a; n_in of w a multiple of 32, n_out of 8; fewer than 2^31 weights per expert; grouped_require; at most
 *   512 experts.
 * Grid: persistent, one block per SM: a loading thread and consumer warpgroups of 128 columns. LARGE_TILES: two of
 *   them, up to 160 rows, 5 stages and two buffers of decoded weights each, 218 KiB. SMALL_TILES: three, up to 96 rows,
 *   4 stages, 222 KiB. A thread has two adjacent columns, as rows i and i + 8 of a product, i = lane / 4, and two
 *   blocks of 32 weights in a step.
 * Bound: shared memory: a step of 96 rows by 256 columns moves 141 KB in 1,100 clocks: packed weights 16 KB, rows 12,
 *   decoded weights 2 x 32, and the rows again for every 64 columns, 49. The products take 768 clocks. w is read once
 *   per 160 (96) rows of its expert, 0.53 bytes a weight; rows once per 256 (384) columns, from L2.
 * Numerics: f32 sums in one fixed order. */
#include <string.h>

#include "kernels/cuda/format/mxfp4_words.cuh"
#include "kernels/cuda/sm90/product_wgmma.cuh"
#include "kernels/cuda/sm90/grouped/sm90_narrow.cuh"

enum {
    BLOCKS = 2,      /* blocks of columns of a consumer warpgroup */
    BLOCK_COLS = 64, /* columns of a block: rows of a wgmma */
    OWN = BLOCKS * BLOCK_COLS,
    UNIT = 16,    /* tiles have a multiple of UNIT rows, except for the last tile of an expert */
    BOX = 32,     /* rows of a TMA box */
    BLOCK = 32,   /* weights with one scale: 16 bytes; in a step a thread decodes one for each block of columns */
    STRIPE = 256, /* columns in a row of 128 bytes of packed weights, backward */
    BLOCK_BYTES = BLOCK_COLS * DEPTH * 2, /* decoded */
    OWN_BYTES = BLOCKS * BLOCK_BYTES,
    OWN_BUFFERS = 2,
    SUM_STRIDE = BLOCK_COLS + 4 /* floats from row to row of sums in shared memory: few bank conflicts */
};
static_assert(BLOCK_COLS * DEPTH == 128 * BLOCK, "a block of a thread");
static_assert((int)BLOCK_COLS == (int)GROUPED_PART, "a block of columns is a part");

/* Tiles of up to N_ROW rows by N_GROUP warpgroups' columns. */
template <int N_GROUP, int N_ROW, int N_STAGE> struct shape {
    enum {
        GROUPS = N_GROUP, /* consumer warpgroups */
        ROWS = N_ROW,
        PASS = N_ROW > 112 ? 112 : N_ROW, /* rows whose sums are in shared memory at a time */
        STAGES = N_STAGE,
        COLS = GROUPS * OWN,
        MULTIPLIERS = GROUPS * 128,
        TOKEN_BYTES = ROWS * DEPTH * 2,
        WEIGHT_BYTES = COLS * DEPTH / 2,
        STAGE_BYTES = TOKEN_BYTES + (COLS + STRIPE - 1) / STRIPE * STRIPE * DEPTH / 2,
        RING_BYTES = STAGES * STAGE_BYTES + GROUPS * OWN_BUFFERS * OWN_BYTES + 1024, /* 1024: alignment */
        /* registers of a loading and a multiplying thread: no more than at launch */
        AHEAD = GROUPS == 2 ? 2 : 1, /* a thread loads pre of this many times 16 rows ahead */
        LOADER = GROUPS == 2 ? 40 : 24,
        MULTIPLIER = GROUPS == 2 ? 232 : 160
    };
    static_assert(PASS % 16 == 0 && PASS * SUM_STRIDE * 4 <= OWN_BUFFERS * OWN_BYTES, "sums of a pass");
};
using LARGE_TILES = struct shape<2, 160, 5>;
using SMALL_TILES = struct shape<3, 96, 4>;

struct packed_args {
    CUtensorMap a, la, w; /* a, la: boxes of BOX rows by 64 of depth; zeroed when unused */
    struct grouped g;
    const uint8_t *scale; /* [E, rows of w, columns of w / 32] e8m0 */
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename S> static __device__ __forceinline__ uint32_t stage_of(const struct ring &ring)
{
    return ring.data + ring.stage * S::STAGE_BYTES;
}
static __device__ __forceinline__ int count_thin(const struct grouped &g) { return ((int)g.r + DEPTH - 1) / DEPTH; }
static __device__ __forceinline__ int count_steps(const struct grouped &g) { return ((int)g.n_in + DEPTH - 1) / DEPTH; }

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

/* One thread loads: first the rows of la; then, for every step, packed weights (in the forward those of even columns
 * first) and rows of a. */
template <typename S, bool KN>
static __device__ __forceinline__ void load_tiles(const struct packed_args &p, const struct tiles *tiles,
                                                  struct ring ring)
{
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col;
    const int n_thin = count_thin(p.g), n_step = count_steps(p.g);
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at<S::ROWS, UNIT, S::COLS>(tiles, at, &e);
        const int n_box = (t.n_row + BOX - 1) / BOX, expert = tiles->place[t.e];
        for (int i = -n_thin; i < n_step; i++) {
            const uint32_t to = stage_of<S>(ring), full = ring.full + 8 * ring.stage;
            const int k = (i < 0 ? i + n_thin : i) * DEPTH;
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            const int weights = i < 0 ? 0 : KN ? S::STAGE_BYTES - S::TOKEN_BYTES : S::WEIGHT_BYTES;
            mbarrier_arrive_expect(full, n_box * BOX * DEPTH * 2 + weights);
            if (!KN && i >= 0) tma_load_4d(to + S::TOKEN_BYTES, &p.w, full, k / 2, t.n / 2, 0, expert);
            for (int n = 0; KN && i >= 0 && n < S::COLS; n += STRIPE)
                tma_load_4d(to + S::TOKEN_BYTES + n * DEPTH / 2, &p.w, full, (t.n + n) / 2, k, expert, 0);
            for (int j = 0; j < n_box; j++)
                tma_load(to + j * BOX * DEPTH * 2, i < 0 ? &p.la : &p.a, full, k, t.m + j * BOX, 0);
            ring_advance<S::STAGES>(&ring);
        }
    }
}

/* ---- decoding ----
 * In a step, a block of columns has 64 rows of 128 bytes in shared memory. A row of the forward is one column at 64
 * inner indices, a row of the backward 64 columns at one inner index. A thread has half of a row of each block of its
 * warpgroup. */

/* The column of w that is row i = 0 .. 7 of a wgmma; row i + 8 is the next column. In the backward, four bytes of
 * packed weights are decoded in the order 0, 2, 1, 3. */
template <bool KN> static __device__ __forceinline__ int column_of_row(int i)
{
    return 2 * (KN ? (i & 4) | (i & 1) << 1 | (i >> 1 & 1) : i);
}

struct half_row {
    const uint8_t *scale[BLOCKS]; /* of the next step to load, e8m0 */
    int64_t next;                 /* from step to step */
    int left;                     /* steps in which the half is in bounds; beyond the edges of w weights are 0 */
    int row, side;                /* side: the first or second half of the row */
    int column;                   /* in block 0: of the row, or backward the first of the half */
    uint32_t from;                /* bytes from a stage */
    uint32_t to[4];               /* chunks, bytes from a block of decoded weights */
};

template <typename S, bool KN>
static __device__ __forceinline__ struct half_row find_half(const struct packed_args &p, const struct tile &t)
{
    const int n_in = (int)p.g.n_in, n_out = (int)p.g.n_out, per_row = (KN ? n_out : n_in) / BLOCK;
    const int thread = threadIdx.x % 128, first = threadIdx.x / 128 * OWN;
    struct half_row h;
    h.row = KN ? thread / 16 * 8 + thread % 8 : thread / 2; /* no bank conflicts */
    h.side = KN ? thread / 8 % 2 : thread % 2;
    h.column = first + (KN ? h.side * BLOCK : (h.row & 48) + column_of_row<false>(h.row & 7) + (h.row >> 3 & 1));
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const int n = MT_MIN(t.n + h.column + j * BLOCK_COLS, n_out - 1);
        h.scale[j] = p.scale + t.e * ((int64_t)per_row * (KN ? n_in : n_out)) +
                     (KN ? h.row * per_row + n / BLOCK : n * per_row + h.side);
    }
    h.next = KN ? DEPTH * per_row : DEPTH / BLOCK;
    h.left = (n_in - (KN ? h.row : h.side * BLOCK) + DEPTH - 1) / DEPTH;
    const int place = h.column % 2 * (S::COLS / 2) + h.column / 2, stripe = h.column / STRIPE * (STRIPE * DEPTH / 2);
    h.from = S::TOKEN_BYTES +
             (KN ? stripe + sm90_swizzle(h.row, h.column % STRIPE / BLOCK) : place * (DEPTH / 2) + h.side * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) h.to[i] = sm90_swizzle(h.row, h.side * 4 + i);
    return h;
}

/* Loads the scales of the next step into x. The addresses depend on the old x, so that these loads begin after the
 * previous ones. Otherwise ptxas gives both the same scoreboard, and a use of old scales also waits for the new
 * ones. */
static __device__ __forceinline__ void load_scales(uint32_t (&x)[BLOCKS], struct half_row *h)
{
    const bool in_bounds = h->left-- > 0;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const uint8_t *from = h->scale[j] + (x[j] >> 8);
        if (in_bounds) asm volatile("ld.global.nc.L2::256B.u8 %0, [%1];" : "=r"(x[j]) : "l"(from));
        h->scale[j] += h->next;
    }
}

static __device__ __forceinline__ void load_chunk(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void store_chunk(uint32_t to, const uint32_t (&x)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/* Two weights without their scale, times 2^-126, from the low or the high nibbles of bytes 0 and 2 of x. The sign of a
 * nibble becomes bit 15 of a bf16, its two bits of exponent and one of fraction bits 8 .. 6. */
static __device__ __forceinline__ uint32_t low_nibbles(uint32_t x) { return (x & 0x000f000f) * 0x1040 & 0x81c081c0; }
static __device__ __forceinline__ uint32_t high_nibbles(uint32_t x) { return (x & 0x00f000f0) * 0x0104 & 0x81c081c0; }

/* Factors of decoded weights, each twice in a word: 2^126 times the scale. bf16 cannot hold that for a scale above 2:
 * if a lane of the warp has one, `large` is set, and the factors are the scales. */
struct factors {
    uint32_t by[BLOCKS];
    bool large;
};
static __device__ __forceinline__ struct factors factors_of(const uint32_t (&scale)[BLOCKS])
{
    struct factors f;
    f.large = __any_sync(~0u, MT_MAX(scale[0], scale[1]) > 128);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) /* else (scale + 126) << 7 */
        f.by[j] = f.large ? scale_bits(scale[j]) * 0x10001 : scale[j] * 0x00800080 + 0x3f003f00;
    return f;
}

/* Decodes 32 weights with one scale into four chunks of 8. A chunk of the forward is 8 neighbours along the inner
 * dimension, one of the backward the even or the odd of 16 columns. */
template <bool KN, bool LARGE>
static __device__ __forceinline__ void decode_block(uint32_t to, const uint32_t (&chunk)[4], const uint32_t (&c)[4],
                                                    uint32_t by)
{
    const auto scaled = [&](uint32_t x) { return times(LARGE ? times(x, 0x7e807e80) : x, by); }; /* 2^126 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t w = c[KN ? i / 2 * 2 + j / 2 : i], bytes = KN ? w >> j % 2 * 8 : 0;
            if (KN)
                x[j] = scaled(i % 2 ? high_nibbles(bytes) : low_nibbles(bytes));
            else
                x[j] = scaled(high_nibbles(__byte_perm(w << 4, w, j * 0x1111 + 0x4400)));
        }
        store_chunk(to + chunk[i], x);
    }
}

template <bool KN>
static __device__ __forceinline__ void load_packed(uint32_t (&c)[BLOCKS][4], uint32_t stage, const struct half_row &h)
{
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) /* backward, block 1 is two chunks further: an xor, as bit 1 of the chunk is 0 */
        load_chunk(c[j], stage + (KN ? h.from ^ j << 5 : h.from + j * (BLOCK_COLS / 2 * (DEPTH / 2))));
}
/* Decodes this thread's packed weights c of a step to `to`, in shared memory. */
template <bool KN>
static __device__ __forceinline__ void decode_step(uint32_t to, const uint32_t (&c)[BLOCKS][4],
                                                   const struct half_row &h, const struct factors &f)
{
#pragma unroll
    for (int j = 0; j < BLOCKS && !f.large; j++) decode_block<KN, false>(to + j * BLOCK_BYTES, h.to, c[j], f.by[j]);
#pragma unroll
    for (int j = 0; j < BLOCKS && f.large; j++) decode_block<KN, true>(to + j * BLOCK_BYTES, h.to, c[j], f.by[j]);
    fence_proxy_async();
}

/* Writes 64 of depth, from k on, of the adapter's factor lb into the place of decoded weights. */
template <bool KN>
static __device__ __forceinline__ void store_factor(uint32_t to, const struct grouped &g, const struct tile &t,
                                                    const struct half_row &h, int k)
{
    const int r = (int)g.r, n_out = (int)g.n_out;
    const bf16 *lb = g.lb + (int64_t)t.e * n_out * r;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++, to += BLOCK_BYTES) {
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = t.n + h.column + j * BLOCK_COLS + (KN ? 8 * i : 0);
            const int at = k + (KN ? h.row : h.side * BLOCK + 8 * i);
            x[i] = make_uint4(0, 0, 0, 0);
            if (n < n_out && at < r)
                x[i] = __ldg((const uint4 *)(lb + (KN ? (int64_t)at * n_out + n : (int64_t)n * r + at)));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 y = x[i / 2 * 2], z = x[i / 2 * 2 + 1];
            const uint32_t select = i % 2 ? 0x7632 : 0x5410; /* backward the odd or even columns of 16 */
            const uint32_t all[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            const uint32_t apart[4] = {__byte_perm(y.x, y.z, select), __byte_perm(y.y, y.w, select),
                                       __byte_perm(z.x, z.z, select), __byte_perm(z.y, z.w, select)};
            store_chunk(to + h.to[i], KN ? apart : all);
        }
    }
    fence_proxy_async();
}

/* ---- products ---- */

/* A warpgroup's part of a tile. */
struct part {
    struct tile t;
    struct half_row half;
    uint32_t decoded; /* OWN_BUFFERS buffers of decoded weights */
    int group;
};

/* sums[j] (+)= block j of the weights a times the rows b, for 16 of depth. */
template <int N, bool KN, int M>
static __device__ __forceinline__ void multiply_16(float (&sums)[BLOCKS][M], uint64_t a, uint64_t b, int k,
                                                   bool accumulate)
{
#pragma unroll
    for (int j = 0; j < BLOCKS; j++)
        narrow<N>::template multiply<KN>(sums[j], a + (j * BLOCK_BYTES / 16) + b_step<KN>(k), b + k_major(k),
                                         accumulate);
}

/* sums = scale * la lb. */
template <typename S, int N, bool KN>
static __device__ __forceinline__ void multiply_thin(float (&sums)[BLOCKS][S::ROWS / 2], struct ring *ring,
                                                     const struct grouped &g, const struct part &part)
{
    int k0 = 0;
    do {
        const int k = k0 % DEPTH;
        if (k == 0) {
            store_factor<KN>(part.decoded, g, part.t, part.half, k0);
            mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
            warpgroup_barrier(1 + part.group);
        }
        wgmma_fence();
        multiply_16<N, KN>(sums, sm90_descriptor(part.decoded, 16, 1024), sm90_descriptor(stage_of<S>(*ring), 16, 1024),
                           k, k0 > 0);
        wgmma_commit();
        wgmma_wait<0>();
        k0 += 16;
        if (k0 % DEPTH && k0 < (int)g.r) continue;
        release(*ring, ring->stage);
        ring_advance<S::STAGES>(ring);
        warpgroup_barrier(1 + part.group);
    } while (k0 < (int)g.r);
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        wgmma_use(sums[j]);
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[j][i] *= g.scale;
    }
}

/* sums = scale * la lb + a w for up to N rows. While the products of a step run, a thread decodes its packed weights of
 * the next step from registers and loads those of the step after that. */
template <typename S, int N, bool KN>
static __device__ __forceinline__ void multiply(float (&sums)[BLOCKS][S::ROWS / 2], struct ring *ring,
                                                const struct grouped &g, const struct part &part)
{
    const int n_step = count_steps(g);
    struct half_row half = part.half;
    uint32_t buffer = 0, c[BLOCKS][4];
    uint32_t scale[BLOCKS] = {};
    load_scales(scale, &half);
    warpgroup_barrier(1 + part.group); /* no products of the tile before read decoded weights */
    if (g.r > 0) multiply_thin<S, N, KN>(sums, ring, g, part);
    struct ring ahead = *ring;
    mbarrier_wait(ahead.full + 8 * ahead.stage, ahead.parity);
    load_packed<KN>(c, stage_of<S>(ahead), half);
    decode_step<KN>(part.decoded, c, half, factors_of(scale));
    load_scales(scale, &half);
    ring_advance<S::STAGES>(&ahead);
    if (n_step > 1) {
        mbarrier_wait(ahead.full + 8 * ahead.stage, ahead.parity);
        load_packed<KN>(c, stage_of<S>(ahead), half);
    }
    const uint64_t a = sm90_descriptor(part.decoded, 16, 1024), b = sm90_descriptor(ring->data, 16, 1024);
#pragma unroll 1
    for (int i = 0; i < n_step; i++) {
        warpgroup_barrier(1 + part.group); /* the step is decoded */
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16)
            multiply_16<N, KN>(sums, a + buffer / 16, b + ring->stage * (S::STAGE_BYTES / 16), k,
                               g.r > 0 || i > 0 || k > 0);
        wgmma_commit();
        buffer ^= OWN_BYTES;
        if (i + 1 < n_step) {
            const struct factors f = factors_of(scale);
            load_scales(scale, &half);
            decode_step<KN>(part.decoded + buffer, c, half, f);
            ring_advance<S::STAGES>(&ahead);
            if (i + 2 < n_step) {
                mbarrier_wait(ahead.full + 8 * ahead.stage, ahead.parity);
                load_packed<KN>(c, stage_of<S>(ahead), half);
            }
        }
        wgmma_wait<0>();
        release(*ring, ring->stage);
        ring_advance<S::STAGES>(ring);
    }
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) wgmma_use(sums[j]);
}

/* Waits for and releases all stages of a tile in which this warpgroup has no columns. */
template <typename S> static __device__ __forceinline__ void skip_tile(struct ring *ring, int n_step)
{
    for (int i = 0; i < n_step; i++) {
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        release(*ring, ring->stage);
        ring_advance<S::STAGES>(ring);
    }
}

/* A loop for each number of rows N: sums are registers, whose indices must be constants. */
template <typename S, bool KN>
static __device__ __forceinline__ void multiply_part(float (&sums)[BLOCKS][S::ROWS / 2], struct ring *ring,
                                                     const struct grouped &g, const struct part &part)
{
    const int n_row = part.t.n_row;
    if constexpr (S::ROWS == 160) {
        if (n_row > 144) return multiply<S, 160, KN>(sums, ring, g, part);
        if (n_row > 128) return multiply<S, 144, KN>(sums, ring, g, part);
        if (n_row > 112) return multiply<S, 128, KN>(sums, ring, g, part);
        if (n_row > 96) return multiply<S, 112, KN>(sums, ring, g, part);
    }
    if (n_row > 80)
        multiply<S, 96, KN>(sums, ring, g, part);
    else if (n_row > 64)
        multiply<S, 80, KN>(sums, ring, g, part);
    else if (n_row > 48)
        multiply<S, 64, KN>(sums, ring, g, part);
    else if (n_row > 32)
        multiply<S, 48, KN>(sums, ring, g, part);
    else
        multiply<S, 32, KN>(sums, ring, g, part);
}

/* ---- epilogue ----
 * A thread's sums are two columns of rows 8j + 2q and 8j + 2q + 1, q = lane % 4. Shared memory, that of the decoded
 * weights, rearranges them into eight columns of one row per thread. */

/* The first of the two adjacent columns of this thread's sums in a block. */
template <bool KN> static __device__ __forceinline__ int column_of_thread(void)
{
    return threadIdx.x % 128 / 32 * 16 + column_of_row<KN>(threadIdx.x % 32 / 4);
}

/* Writes the sums of N rows of a block of columns, from row `first` of the tile on. */
template <int N, bool KN, int M>
static __device__ __forceinline__ void store_sums(float *to, const float (&sums)[M], int first, int n_row, float2 bias)
{
    to += threadIdx.x % 4 * 2 * SUM_STRIDE + column_of_thread<KN>();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const float *x = sums + first / 2 + 4 * j;
        if (first + 8 * j >= 2 * M /* rows of sums */ || first + 8 * j >= n_row) break;
        *(float2 *)(to + 8 * j * SUM_STRIDE) = make_float2(x[0] + bias.x, x[2] + bias.y);
        *(float2 *)(to + (8 * j + 1) * SUM_STRIDE) = make_float2(x[1] + bias.x, x[3] + bias.y);
    }
}

/* Gates of the tile's rows. */
static __device__ __forceinline__ void load_weights(float *weight, const struct grouped &g, const struct tile &t)
{
    for (int i = threadIdx.x % 128; i < t.n_row; i += 128) weight[i] = __ldg(g.gate + __ldg(g.row_slot + t.m + i));
}

static __device__ __forceinline__ void load_row(float v[8], const float *sums)
{
    const float4 x = *(const float4 *)sums, y = *(const float4 *)(sums + 4);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w, v[4] = y.x, v[5] = y.y, v[6] = y.z, v[7] = y.w;
}

/* Stores n_row rows of sums from shared memory, from row m in expert order and column n on. Eight lanes share a row. */
template <int EPILOGUE>
static __device__ __forceinline__ void finish_rows(const float *sums, const struct grouped &g, int64_t m, int n_row,
                                                   int n)
{
    const int first = threadIdx.x % 128 / 8, column = threadIdx.x % 8 * 8;
    const int n_live = n + column < g.n_out ? n_row : 0;
    sums += first * SUM_STRIDE + column;
#pragma unroll 1
    for (int row = first; row < n_live; row += 16, sums += 16 * SUM_STRIDE) {
        float v[8];
        load_row(v, sums);
        grouped_store8<EPILOGUE>(g, m + row, n + column, bf16_pack8(v));
    }
}

/* finish_rows for a GLU's backward. weight: gates of the rows. pre of AHEAD times 16 rows is loaded ahead. */
template <int LAYOUT, int AHEAD>
static __device__ __forceinline__ void finish_glu_rows(const float *sums, const struct grouped &g, int64_t m, int n_row,
                                                       int n, const float *weight)
{
    constexpr bool pairs = LAYOUT == GLU_PAIRS;
    const int first = threadIdx.x % 128 / 8, column = n + threadIdx.x % 8 * 8, n_out = (int)g.n_out;
    const int n_live = column < n_out ? n_row : 0, skipped = pairs ? 0 : column;
    int64_t at = (m + first) * n_out + column; /* in act; 2 at - skipped in pre and out */
    struct pre8 pre[AHEAD] = {};
    const auto load = [&](struct pre8 *p, int row, int64_t at) {
        const bf16 *from = g.pre + (2 * at - skipped);
        if (row < n_live) *p = {*(const uint4 *)from, *(const uint4 *)(from + (pairs ? 8 : n_out))};
    };
#pragma unroll
    for (int j = 0; j < AHEAD; j++) load(&pre[j], first + 16 * j, at + 16 * j * n_out);
    sums += first * SUM_STRIDE + threadIdx.x % 8 * 8;
#pragma unroll 1
    for (int i = first; i - first < n_row; i += 16 * AHEAD, sums += 16 * AHEAD * SUM_STRIDE) {
        float sum[AHEAD] = {};
#pragma unroll
        for (int j = 0; j < AHEAD; j++, at += 16 * n_out) {
            const int row = i + 16 * j;
            float v[8];
            load_row(v, sums + 16 * j * SUM_STRIDE);
            if (row < n_live)
                sum[j] =
                    grouped_glu_bwd8<false, LAYOUT>(g, g.out + (2 * at - skipped), g.act + at, v, weight[row], pre[j]);
            load(&pre[j], row + 16 * AHEAD, at + 16 * AHEAD * n_out);
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2)
#pragma unroll
            for (int j = 0; j < AHEAD; j++) sum[j] += __shfl_xor_sync(~0u, sum[j], lanes);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (threadIdx.x % 8 == 0 && i + 16 * j < n_row)
                g.dgate_part[n / GROUPED_PART * g.n_row + m + i + 16 * j] = sum[j];
    }
}

template <typename S, int EPILOGUE, bool KN>
static __device__ __forceinline__ void finish_block(float *shared, const float (&sums)[S::ROWS / 2],
                                                    const struct grouped &g, const struct tile &t, float2 bias,
                                                    const float *weight)
{
#pragma unroll
    for (int first = 0; first < S::ROWS; first += S::PASS) {
        if (first >= t.n_row) break;
        const int n_row = MT_MIN(t.n_row - first, (int)S::PASS);
        store_sums<S::PASS, KN>(shared, sums, first, t.n_row, bias);
        warpgroup_barrier(1 + threadIdx.x / 128); /* the sums are there */
        if constexpr (is_glu_bwd(EPILOGUE))
            finish_glu_rows<layout_of(EPILOGUE), S::AHEAD>(shared, g, t.m + first, n_row, t.n, weight + first);
        else
            finish_rows<EPILOGUE>(shared, g, t.m + first, n_row, t.n);
        warpgroup_barrier(1 + threadIdx.x / 128); /* before other sums come here */
    }
}

template <typename S, int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct packed_args &p, const struct tiles *tiles,
                                                      struct ring ring, unsigned char *decoded, float *weight)
{
    const struct grouped &g = p.g;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col, n_step = count_thin(g) + count_steps(g);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    float sums[BLOCKS][S::ROWS / 2];
    asm volatile("" : "+r"(ring.full), "+r"(ring.empty));
    weight += is_glu_bwd(EPILOGUE) ? group * S::ROWS : 0;
    decoded += group * (OWN_BUFFERS * OWN_BYTES);
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        struct tile t = tile_at<S::ROWS, UNIT, S::COLS>(tiles, at, &e);
        t.e = tiles->place[t.e];
        if (t.n + group * OWN >= g.n_out) {
            skip_tile<S>(&ring, n_step);
            continue;
        }
        float2 bias[BLOCKS] = {};
#pragma unroll
        for (int j = 0; j < BLOCKS && g.bias; j++) {
            const int n = t.n + group * OWN + j * BLOCK_COLS + column_of_thread<KN>();
            if (n < g.n_out) bias[j] = __ldg((const float2 *)(g.bias + t.e * g.n_out + n));
        }
        if (is_glu_bwd(EPILOGUE)) load_weights(weight, g, t);
        multiply_part<S, KN>(sums, &ring, g, {t, find_half<S, KN>(p, t), sm90_shared(decoded), group});
        t.n += group * OWN;
        warpgroup_barrier(1 + group); /* no products read decoded weights */
#pragma unroll
        for (int j = 0; j < BLOCKS; j++, t.n += BLOCK_COLS)
            if (t.n < g.n_out) finish_block<S, EPILOGUE, KN>((float *)decoded, sums[j], g, t, bias[j], weight);
    }
}
#endif

template <typename S, int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(S::MULTIPLIERS + LOADERS, 1)
    grouped_packed_wgmma_kernel(const __grid_constant__ struct packed_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ float weight[is_glu_bwd(EPILOGUE) ? S::GROUPS * S::ROWS : 1]; /* gates of rows */
    __shared__ uint64_t full[S::STAGES], empty[S::STAGES];
    if (threadIdx.x < 32) count_tiles<S::ROWS, S::COLS>(&tiles, p.g);
    if (threadIdx.x == 32) {
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(sm90_shared(&full[i]), 1);
            mbarrier_init(sm90_shared(&empty[i]), S::MULTIPLIERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    unsigned char *decoded = memory + (-sm90_shared(memory) & 1023);
    const struct ring ring = {
        sm90_shared(decoded) + S::GROUPS * OWN_BUFFERS * OWN_BYTES, sm90_shared(full), sm90_shared(empty), 0, 0, 0};
    if (threadIdx.x >= S::MULTIPLIERS) {
        sm90_registers_less<S::LOADER>();
        if (threadIdx.x == S::MULTIPLIERS) load_tiles<S, KN>(p, &tiles, ring);
    } else {
        sm90_registers_more<S::MULTIPLIER>();
        multiply_tiles<S, EPILOGUE, KN>(p, &tiles, ring, decoded, weight);
    }
#else
    __trap();
#endif
}

/* ---- host ---- */

/* Bytes of four axes, the innermost first: sizes, strides of the outer three, boxes. */
struct byte_map {
    cuuint64_t size[4], stride[3];
    cuuint32_t box[4];
};

/* The tensor map of the packed bytes. Its boxes are, in the backward, 64 rows by 256 columns, swizzled; in the forward,
 * n_col rows by 64 columns, even rows first. */
static CUtensorMap weight_map(const struct weight *w, bool kn, int n_col)
{
    const cuuint64_t row = (cuuint64_t)w->n_in / 2, n_row = (cuuint64_t)w->n_out, n_exp = (cuuint64_t)w->n_exp;
    const struct byte_map backward = {
        {row, n_row, n_exp, 1}, {row, row * n_row, row * n_row * n_exp}, {STRIPE / 2, DEPTH, 1, 1}};
    const struct byte_map forward = {
        {row, n_row / 2, 2, n_exp}, {row * 2, row, row * n_row}, {DEPTH / 2, (cuuint32_t)n_col / 2, 2, 1}};
    const struct byte_map *m = kn ? &backward : &forward;
    const struct sm90_map map = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, w->data, m->size, m->stride, m->box, kn};
    return sm90_encode(&map);
}

template <typename S, int EPILOGUE, bool KN> static void launch(const struct grouped *g, const struct weight *w)
{
    static bool configured;
    struct packed_args p;
    memset(&p, 0, sizeof(p));
    p.g = *g;
    p.scale = w->scale;
    p.a = tensor_map(g->a, 1, g->n_row, g->n_in, g->lda, BOX);
    if (g->r > 0) p.la = tensor_map(g->la, 1, g->n_row, g->r, g->r, BOX);
    p.w = weight_map(w, KN, S::COLS);
    if (!configured)
        CUDA_CHECK(cudaFuncSetAttribute(grouped_packed_wgmma_kernel<S, EPILOGUE, KN>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, S::RING_BYTES));
    configured = true;
    grouped_packed_wgmma_kernel<S, EPILOGUE, KN>
        <<<cuda.n_sm, S::MULTIPLIERS + LOADERS, S::RING_BYTES, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}
template <typename S> static void launch_tiles(const struct grouped *g, const struct weight *w)
{
    if (g->epilogue == GROUPED_GLU_BWD && g->kn)
        g->glu.interleaved ? launch<S, GROUPED_GLU_BWD, true>(g, w) : launch<S, HALVES_BWD, true>(g, w);
    else if (g->epilogue == GROUPED_GLU && !g->kn && g->glu.interleaved)
        launch<S, GROUPED_GLU, false>(g, w);
    else if (g->epilogue == GROUPED_STORE)
        g->kn ? launch<S, GROUPED_STORE, true>(g, w) : launch<S, GROUPED_STORE, false>(g, w);
    else
        MT_REQUIRE(false, "epilogue %d with%s kn", (int)g->epilogue, g->kn ? "" : "out");
}

void cuda_grouped_packed(const struct grouped *g, const struct weight *w, enum grouped_way way)
{
    const int64_t n_tile = (ceil_div(g->n_row, UNIT) + g->n_exp) * ceil_div(g->n_out, (int64_t)OWN);
    grouped_require(g);
    MT_REQUIRE(choice_grouped_fits(way, w) && !g->ids && !g->slot && g->first == 0 && g->count == w->n_exp &&
                   n_tile + cuda.n_sm <= INT32_MAX,
               "a product with packed experts of %lld x %lld", (long long)w->n_out, (long long)w->n_in);
    if (g->n_row == 0) return;
    if (way == GROUPED_DECODE)
        cuda_grouped_decode(g, w);
    else if (way == GROUPED_PACKED_160)
        launch_tiles<LARGE_TILES>(g, w);
    else
        launch_tiles<SMALL_TILES>(g, w);
}
