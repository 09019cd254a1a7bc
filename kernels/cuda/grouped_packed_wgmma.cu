/* grouped_packed_wgmma.cu - the grouped GEMM of grouped.h on Hopper with experts in MXFP4, decoded between shared
 * memory and the tensor cores: no decoded copy of an expert exists. For few rows per expert; grouped_decode_wgmma.cu:
 * for many.
 *
 * Math: as in grouped_wgmma.cu. A decoded weight is the exact bf16 value that dequant.cu writes, so the products are
 *   the same, and only the order of the f32 sums differs.
 * Operands change places: columns of the output are the 64 rows of a wgmma, whose a is in registers; rows of the
 *   experts (tokens) are its N columns, whose b is in shared memory. The rows of an expert are cut into the fewest
 *   equal tiles of at most 128; N is 48, 96 or 128.
 * Tiles: 256 columns of the output, 64 of each consumer warpgroup. A thread has two adjacent ones, as rows i and i + 8
 *   of a product, i = lane / 4.
 * Decoding: a warpgroup decodes 64 of depth, multiplies, and waits for the products; the three others decode or
 *   multiply meanwhile. Forward, a thread needs byte q = lane % 4 of every word of eight weights in its columns. The
 *   lanes of a quad load a word each and transpose their bytes in two exchanges; prmt looks up both bytes of a bf16.
 *   Backward, neighbours in depth are rows of w: a transposing ldmatrix puts four columns of two rows into one word;
 *   shifts move the three low bits of a code to bits 6 .. 8 of a half, where they are the value times 2^-126. Either
 *   way the product in bf16 with the scale, a power of two, is exact.
 * Needs: sm_90a; n_in of w a multiple of 32, n_out of 8; grouped_require; at most 512 experts.
 * Grid: persistent, one block per SM: a producer warpgroup, four consumer warpgroups, 8 pipeline stages: 193 KiB. 96
 *   registers at launch, then 24 and 112; at most 20 bytes of spills.
 * Moves: w is read once per 128 rows of its expert, 0.53 bytes a weight; rows once per 256 columns, from L2.
 * Numerics: f32 sums in one fixed order, no atomics: bitwise repeatable.
 *
 * Bound: instructions. A microbenchmark on an H200 issues at most 0.25 PRMT, LOP3 or HMUL2 per clock and scheduler
 *   while the tensor cores are busy, 0.5 otherwise, and one SHFL in 16 clocks. A step takes about 150 instructions per
 *   warp forward and 175 backward, for 256 clocks of products at 128 rows. A warp does not pass its own wgmmas: it
 *   issues the next instruction when the last of them has begun. So other warps have to fill the time.
 * Measured: tests/RESULTS.md, "Experts decoded inside the products".
 * Tried and dropped, not in the history: two consumer warpgroups of 128 columns, which decode the next half of a step
 *   while their wgmmas run (the kernel of 0e2ce98). H200, forward and backward of the experts of a layer with adapters
 *   by `bench lora`, gpt-oss-20b, 16, 64 and 96 rows per expert, ms: 0.413 and 0.470, 0.477 and 0.522, 0.539 and
 *   0.573. That with named barriers that give the tensor cores to the warpgroups in turns: 10 % slower. Three consumer
 *   warpgroups of 64 columns and tiles of 144 rows: 0.464 and 0.605 at 64 rows on an H100, four 0.428 and 0.458; in
 *   turns by named barriers no faster. ptxas makes all wgmmas wait for each other where registers that they read are
 *   written while others run (C7513). */
#include <string.h>

#include "kernels/cuda/grouped_epilogue.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/mxfp4_words.cuh"
#include "kernels/cuda/ring_wgmma.cuh"
#include "kernels/cuda/sm90_narrow.cuh"

enum {
    GROUPS = 4, /* consumer warpgroups */
    OWN = 64,   /* columns of one */
    COLS = GROUPS * OWN,
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
    CONSUMERS = GROUPS * 128,
    THREADS = CONSUMERS + LOADERS,
    LOADER_REGISTERS = 24, /* (24 + 4 * 112) * 128 = 59 Ki; at launch 5 * 128 * 96 = 60 Ki */
    CONSUMER_REGISTERS = 112,
    SCALE_BLOCK = 32,
    FEW_ROWS = 104, /* per expert; with more, grouped_decode_wgmma.cu is faster */
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
                tma_load_4d(to + TOKEN_BYTES, &p.w, full, k / 2, t.n / 2, 0, t.e);
            for (int i = 0; i < n_unit; i++) tma_load(to + i * UNIT * 128, &p.a, full, k, t.m + i * UNIT, 0);
            ring_advance<STAGES>(&ring);
        }
    }
}

/* ---- decoding ---- */

/* Columns of this thread: n and n + 1 as rows i and i + 8 of a product, i = lane / 4. Forward a warp has 16 adjacent
 * columns. Backward two warps have 32, in turns two of four: the scales of a block. */
template <bool KN> static __device__ __forceinline__ int column_of(const struct tile &t)
{
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 / 4;
    return t.n + (KN ? warp / 2 * 32 + 4 * i + warp % 2 * 2 : warp * 16 + 2 * i);
}

/* Both nibbles of the bytes in the halves of u, without their scales, times 2^-126. u: a byte twice in each half. */
static __device__ __forceinline__ void decode_bytes(uint32_t *low, uint32_t *high, uint32_t u)
{
    *low = (u << 6 & 0x01c001c0) | (u << 12 & 0x80008000);
    *high = (u << 2 & 0x01c001c0) | (u & 0x80008000);
}

/* Scales of this lane for each step of depth. Forward: of column lane / 2 of the warp's 16, block lane % 2 of the step.
 * Backward: rows 2 lane and 2 lane + 1 of the step, the block of the warp's columns. */
struct scales {
    const uint8_t *from; /* of the next step */
    int left;            /* forward blocks, backward rows, from there to the end */
    uint32_t a, b;       /* bytes of a step; 0 out of bounds */
};
template <bool KN> static __device__ __forceinline__ void load_scales(struct scales *s, int n_block)
{
    s->a = s->b = 0;
    if (s->left > 0) s->a = __ldg(s->from);
    if (KN && s->left > 1) s->b = __ldg(s->from + n_block);
    s->from += KN ? DEPTH * n_block : DEPTH / SCALE_BLOCK;
    s->left -= KN ? DEPTH : DEPTH / SCALE_BLOCK;
}
template <bool KN>
static __device__ __forceinline__ struct scales first_scales(const struct packed_args &p, const struct tile &t)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n_row = (int)(KN ? p.g.n_in : p.g.n_out), n_block = (int)(KN ? p.g.n_out : p.g.n_in) / SCALE_BLOCK;
    const int row = KN ? 2 * lane : t.n + warp * 16 + lane / 2;
    const int block = KN ? t.n / SCALE_BLOCK + warp / 2 : lane % 2;
    struct scales s = {p.scale + ((int64_t)t.e * n_row + row) * n_block + block, 0, 0, 0};
    if (row < n_row && block < n_block) s.left = KN ? n_row - row : n_block - block;
    load_scales<KN>(&s, n_block);
    return s;
}

/* Forward: w[2h + r] = byte q of the four words of column r of this thread's two, half h of the step: a word of each
 * lane of the quad, transposed in two exchanges. */
static __device__ __forceinline__ void load_words(uint32_t (&w)[4], uint32_t data)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, q = lane % 4;
    const uint32_t from = data + (8 * warp + lane / 4) * 32 + 4 * q;
    const uint32_t keep = q & 1 ? 0x7531 : 0x6420, keep2 = q == 0 ? 0x6240 : q == 1 ? 0x2604 : q == 2 ? 0x7351 : 0x3715;
    const uint32_t low = q & 2 ? 0x1054 : 0x5410, high = q & 2 ? 0x3276 : 0x7632;
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(x[j])
                     : "r"(from + j / 2 * 16 + j % 2 * (COLS / 2) * 32)
                     : "memory");
#pragma unroll
    for (int j = 0; j < 4; j += 2) { /* transposes of two columns in the quad */
        const uint32_t own = __byte_perm(x[j], x[j + 1], keep);
        const uint32_t got = __shfl_xor_sync(~0u, __byte_perm(x[j], x[j + 1], keep ^ 0x1111), 1);
        const uint32_t own2 = __byte_perm(own, got, keep2);
        const uint32_t got2 = __shfl_xor_sync(~0u, __byte_perm(own, got, keep2 ^ 0x1111), 2);
        w[j] = __byte_perm(own2, got2, low);
        w[j + 1] = __byte_perm(own2, got2, high);
    }
}

/* a of a step, [depth / 16]. mine: the lane's scale. */
static __device__ __forceinline__ void decode_forward(uint32_t (&a)[4][4], uint32_t data, const struct values &v,
                                                      uint32_t mine)
{
    uint32_t w[4];
    load_words(w, data);
    mine = scale_bits(mine) * 0x10001;
#pragma unroll
    for (int j = 0; j < 4; j++) { /* half j / 2, column j % 2 */
        const uint32_t scale = __shfl_sync(~0u, mine, threadIdx.x % 32 / 4 * 4 + j % 2 * 2 + j / 2);
        uint32_t pair[4];
        decode_word(pair, v, w[j]);
#pragma unroll
        for (int i = 0; i < 4; i++) a[j / 2 * 2 + i / 2][i % 2 * 2 + j % 2] = times(pair[i], scale);
    }
}
/* Neighbours in depth are rows of w: a transposing ldmatrix puts four columns of two rows into one word. mine: the
 * lane's two scales. */
static __device__ __forceinline__ void decode_backward(uint32_t (&a)[4][4], uint32_t data, uint32_t mine)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t select = warp % 2 ? 0x3311 : 0x2200;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t w[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(data + sm90_swizzle(32 * half + lane, warp / 2))
                     : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t *to = a[2 * half + i / 2] + i % 2 * 2;
            decode_bytes(&to[0], &to[1], __byte_perm(w[i], 0, select));
        }
    }
    if (__any_sync(~0u, (mine + 0x007f007f) & 0x01000100)) { /* a scale above 2 */
#pragma unroll
        for (int i = 0; i < 16; i++) a[i / 4][i % 4] = times(a[i / 4][i % 4], 0x7e807e80); /* 2^126 */
        mine = scale_bits(mine & 0xff) | scale_bits(mine >> 16) << 16;
    } else {
        mine = (mine << 7) + 0x3f003f00; /* times 2^126 */
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t scale = __shfl_sync(~0u, mine, 4 * i + lane % 4);
        uint32_t *to = a[i / 2] + i % 2 * 2;
        to[0] = times(to[0], scale);
        to[1] = times(to[1], scale);
    }
}

/* ---- products ---- */

/* a of the adapter's factor lb for depth k .. k+15. */
template <bool KN>
static __device__ __forceinline__ void load_factor(uint32_t (&a)[4], const struct grouped &g, const struct tile &t,
                                                   int k)
{
    const int r = (int)g.r, n_out = (int)g.n_out, n = column_of<KN>(t);
    const bf16 *lb = g.lb + (int64_t)t.e * n_out * r;
#pragma unroll
    for (int i = 0; i < 2; i++) { /* depth k + 8i + 2q, + 1 */
        const int at = k + 8 * i + threadIdx.x % 4 * 2;
        const bool in_bounds = n < n_out && at < r;
        uint32_t x[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 2; j++) /* forward columns, backward depth */
            if (in_bounds)
                x[j] = __ldg((const uint32_t *)(lb + (KN ? (int64_t)(at + j) * n_out + n : (int64_t)(n + j) * r + at)));
        a[2 * i] = KN ? __byte_perm(x[0], x[1], 0x5410) : x[0];
        a[2 * i + 1] = KN ? __byte_perm(x[0], x[1], 0x7632) : x[1];
    }
}

/* sums += scale * la lb_e, by mma.sync, whose sums are in the same registers as those of wgmma. */
template <int N, bool KN>
static __device__ __forceinline__ void multiply_thin(float (&sums)[N / 2], const struct grouped &g,
                                                     const struct tile &t)
{
    const int lane = threadIdx.x % 32, r = (int)g.r;
    for (int k = 0; k < r; k += 16) {
        uint32_t a[4];
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
            float c[4] = {};
            mma_bf16(c, a, b);
#pragma unroll
            for (int l = 0; l < 4; l++) sums[4 * j + l] += g.scale * c[l];
        }
    }
}

/* Reads shared memory so that the compiler does not know the value: what prmt looks up then stays in registers.
 * Constants it moves into registers for each use. */
static __device__ __forceinline__ uint32_t load_known(const uint32_t *p)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(sm90_shared(p)));
    return x;
}

/* sums of a tile of up to N rows. A warpgroup decodes a step, then multiplies it: the others multiply or decode
 * meanwhile. known: plain_values() in shared memory. */
template <int N, bool KN>
static __device__ __forceinline__ void multiply(float (&sums)[N / 2], struct ring *ring, const struct packed_args &p,
                                                const struct tile &t, const struct values *known)
{
    const struct grouped &g = p.g;
    const int n_block = (int)(KN ? g.n_out : g.n_in) / SCALE_BLOCK;
    struct scales s = first_scales<KN>(p, t);
    struct values v = plain_values();
    v.low[0] = load_known(&known->low[0]);
    v.high[0] = load_known(&known->high[0]);
#pragma unroll 1
    for (int k = 0; k < (int)g.n_in; k += DEPTH) {
        const uint32_t data = stage_of(*ring) + TOKEN_BYTES;
        const uint64_t b = sm90_descriptor(stage_of(*ring), 16, 1024);
        const uint32_t scales = s.a | s.b << 16;
        uint32_t a[DEPTH / 16][4];
        load_scales<KN>(&s, n_block);
        mbarrier_wait(ring->full + 8 * ring->stage, ring->parity);
        if (KN)
            decode_backward(a, data, scales);
        else
            decode_forward(a, data, v, scales);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) narrow<N>::multiply(sums, a[i], b + 2 * i, true);
        wgmma_commit();
        wgmma_wait<0>();
        release(*ring, ring->stage);
        ring_advance<STAGES>(ring);
    }
    wgmma_use(sums);
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

/* ---- epilogue: a thread has its two columns of rows 8j + 2q and 8j + 2q + 1 of the tile ---- */

template <int N, bool GLU, bool KN>
static __device__ __forceinline__ void finish(const float (&sums)[N / 2], const struct grouped &g, const struct tile &t)
{
    const int n = column_of<KN>(t), odd_lane = threadIdx.x / 4 & 1, pair = n - (KN ? 0 : 2 * odd_lane);
    const struct glu_form form = glu_form_of(g.glu);
    const bool in_bounds = n < g.n_out;
    float2 bias = make_float2(0.0f, 0.0f);
    if (g.bias && in_bounds) bias = __ldg((const float2 *)(g.bias + t.e * g.n_out + n));
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int row = 8 * j + threadIdx.x % 4 * 2;
        uint32_t w[2];
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
            w[odd] = bf16_pack(sums[4 * j + odd] + bias.x, sums[4 * j + 2 + odd] + bias.y);
        if (KN) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++)
                if (in_bounds && row + odd < t.n_row) *(uint32_t *)(g.out + (t.m + row + odd) * g.n_out + n) = w[odd];
            continue;
        }
        const uint32_t got = __shfl_xor_sync(~0u, w[odd_lane ^ 1], 4); /* four columns of one row */
        const uint2 x = odd_lane ? make_uint2(got, w[1]) : make_uint2(w[0], got);
        const int64_t m = t.m + row + odd_lane;
        if (!in_bounds || row + odd_lane >= t.n_row) continue;
        store8(g.out + m * g.n_out + pair, x);
        if (GLU)
            *(uint32_t *)(g.act + (m * g.n_out + pair) / 2) = bf16_pack(glu_value(form, bf16_low(x.x), bf16_high(x.x)),
                                                                        glu_value(form, bf16_low(x.y), bf16_high(x.y)));
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

/* Gates and ups of two columns of a row. */
static __device__ __forceinline__ uint2 load_pre(const struct grouped &g, int64_t m, int n)
{
    const bf16 *from = g.pre + pre_start(g, m, n);
    if (g.glu.interleaved) return __ldg((const uint2 *)from);
    return make_uint2(__ldg((const uint32_t *)from), __ldg((const uint32_t *)(from + g.n_out)));
}

/* Returns the sum of h * v over two columns of row m. */
static __device__ __forceinline__ float glu_bwd2(const struct grouped &g, const struct glu_form &form, int64_t m, int n,
                                                 const float v[2], float weight, uint2 pre)
{
    const bool pairs = g.glu.interleaved;
    const float x[2] = {bf16_low(pre.x), pairs ? bf16_low(pre.y) : bf16_high(pre.x)};
    const float y[2] = {pairs ? bf16_high(pre.x) : bf16_low(pre.y), bf16_high(pre.y)};
    bf16 *out = g.out + pre_start(g, m, n);
    float gate[2], up[2], h[2];
#pragma unroll
    for (int i = 0; i < 2; i++) h[i] = glu_gradient(form, x[i], y[i], weight * v[i], &gate[i], &up[i]);
    *(uint32_t *)(g.act + m * g.n_out + n) = bf16_pack(h[0], h[1]);
    if (pairs) {
        store8(out, make_uint2(bf16_pack(gate[0], up[0]), bf16_pack(gate[1], up[1])));
    } else {
        *(uint32_t *)out = bf16_pack(gate[0], gate[1]);
        *(uint32_t *)(out + g.n_out) = bf16_pack(up[0], up[1]);
    }
    return h[0] * v[0] + h[1] * v[1];
}

template <int N>
static __device__ __forceinline__ void finish_glu_bwd(float (&sums)[N / 2], const struct grouped &g,
                                                      const struct tile &t, struct glu_scratch *s)
{
    enum { STEP = N % 32 ? 16 : 32 }; /* rows of a step; a loop that shifts the sums down fits the instruction cache */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4, n = column_of<true>(t);
    const bool in_bounds = n < g.n_out;
    const struct glu_form form = glu_form_of(g.glu);
    warpgroup_barrier(1 + group); /* the weights are there */
#pragma unroll 1
    for (int i = 0; i < t.n_row; i += STEP) {
        uint2 pre[STEP / 4];
#pragma unroll
        for (int c = 0; c < STEP / 4; c++) {
            const int row = i + c / 2 * 8 + lane % 4 * 2 + c % 2;
            pre[c] = make_uint2(0, 0);
            if (in_bounds && row < t.n_row) pre[c] = load_pre(g, t.m + row, n);
        }
#pragma unroll
        for (int c = 0; c < STEP / 4; c++) {
            const int row = i + c / 2 * 8 + lane % 4 * 2 + c % 2;
            const float v[2] = {sums[c / 2 * 4 + c % 2], sums[c / 2 * 4 + 2 + c % 2]};
            float sum = 0.0f;
            if (in_bounds && row < t.n_row) sum = glu_bwd2(g, form, t.m + row, n, v, s->weight[row], pre[c]);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (lane < 4) s->part[warp % 4][row] = sum;
        }
#pragma unroll
        for (int c = 0; c + STEP / 2 < N / 2; c++) sums[c] = sums[c + STEP / 2];
    }
    warpgroup_barrier(1 + group);
    const int first = t.n + group * OWN;
    for (int row = threadIdx.x % 128; row < t.n_row; row += 128)
        g.dgate_part[(int64_t)(first / GROUPED_PART) * g.n_row + t.m + row] =
            (s->part[0][row] + s->part[1][row]) + (s->part[2][row] + s->part[3][row]);
}
static_assert((int)OWN == (int)GROUPED_PART, "a warpgroup has the columns of a part");

template <int N, int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tile(const struct packed_args &p, struct ring *ring,
                                                     const struct tile &t, struct glu_scratch *scratch,
                                                     const struct values *known)
{
    float sums[N / 2] = {};
    if (EPILOGUE == GROUPED_GLU_BWD) load_weights(scratch, p.g, t);
    multiply<N, KN>(sums, ring, p, t, known);
    if constexpr (EPILOGUE == GROUPED_GLU_BWD)
        finish_glu_bwd<N>(sums, p.g, t, scratch);
    else
        finish<N, EPILOGUE == GROUPED_GLU, KN>(sums, p.g, t);
}

template <int EPILOGUE, bool KN>
static __device__ __forceinline__ void multiply_tiles(const struct packed_args &p, const struct tiles *tiles,
                                                      struct ring ring, struct glu_scratch *scratch,
                                                      const struct values *known)
{
    const struct grouped &g = p.g;
    const int n_tile = tiles->first[tiles->n_exp] * tiles->n_col, n_block = ((int)g.n_in + DEPTH - 1) / DEPTH;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0); /* the shuffle tells the compiler that it is uniform */
    asm volatile("" : "+r"(ring.full), "+r"(ring.empty));
    scratch += EPILOGUE == GROUPED_GLU_BWD ? group : 0;
    for (int at = blockIdx.x, e = 0; at < n_tile; at += gridDim.x) {
        const struct tile t = tile_at(tiles, at, &e);
        if (t.n + group * OWN >= g.n_out) {
            skip_tile(&ring, n_block);
            continue;
        }
        /* A loop for every width, as sums are registers. Four widths or more do not fit: the compiler serialises. */
        if (t.n_row <= 48)
            multiply_tile<48, EPILOGUE, KN>(p, &ring, t, scratch, known);
        else if (t.n_row <= 96)
            multiply_tile<96, EPILOGUE, KN>(p, &ring, t, scratch, known);
        else
            multiply_tile<TOKENS, EPILOGUE, KN>(p, &ring, t, scratch, known);
    }
}
#endif

template <int EPILOGUE, bool KN>
static __global__ void __launch_bounds__(THREADS, 1) grouped_packed_kernel(const __grid_constant__ struct packed_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char memory[];
    __shared__ struct tiles tiles;
    __shared__ struct glu_scratch scratch[EPILOGUE == GROUPED_GLU_BWD ? GROUPS : 1];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    __shared__ struct values known;
    if (threadIdx.x < 32) count_tiles(&tiles, p.g);
    if (threadIdx.x == 32) {
        known = plain_values();
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
        multiply_tiles<EPILOGUE, KN>(p, &tiles, ring, scratch, &known);
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
        w->data, {row, n_row / 2, 2, n_exp}, {row * 2, row, row * n_row}, {DEPTH / 2, COLS / 2, 2, 1}, false};
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
