/* few_rows.cu - products with few rows (few_rows.h): a weight is read once and decoded in registers.
 * Math: few_rows.h. Columns of the output are the 16 rows of a mma, rows of the experts its 8 columns. In a step of 128
 *   of the depth, a lane has 32 neighbouring values of two rows of W; W and a permute the depth alike inside a step.
 *   Decoded weights are rounded as in dequant.cu.
 * Shapes: few_rows.h. An expert with more than 8 NT rows has several passes over its weights.
 * Needs: n_in a multiple of 32, n_out of 8; columns of an adapter's part begin and end at multiples of 16, or at n_out.
 *   Any GPU since sm_80.
 * Grid: a block per multiprocessor (two without rows in shared memory), which computes an equal share of the tiles of
 *   16 MT columns of all experts with rows. A team of 8 warps computes a tile: warp d has steps d, d + 8, ... (for one
 *   matrix of more than 8192 columns, 4 warps have the same columns, and warp d of them has steps d, d + 4, ...). A
 *   thread copies the weights that it decodes to shared memory by cp.async, some tiles ahead. Packed experts: two
 *   teams, which share the rows of a in shared memory. MT 1 (bf16) or 2, NT 1 or 2.
 * Bound: bytes of W; about 2.4 instructions per value of MXFP4 and 4 of NF4. Codes of NF4 are looked up in registers,
 *   those of NVFP4 in shared memory.
 * Numerics: f32 sums over the steps of a warp, then over the warps in order, bias and residual; the last warp's sum
 *   begins with the adapter's product; one rounding. */
#include "kernels/cuda/parts/few_rows.h"

#include <type_traits>

#include "kernels/cuda/format/formats.cuh"
#include "kernels/cuda/format/mxfp4_words.cuh"
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/mma.cuh"

enum { COLS = FEW_COLS, OWN = FEW_DEPTH, STEP = 4 * OWN };

/* An expert of W, and its first value and block. */
struct expert {
    int64_t e, value, block;
};

/* ---- formats: in a step a lane has 32 values of a row of W, in CHUNKS of 16 bytes, and their scales. The i-th eight
 * values of lane q of a quad are at place(q, i) of the step. `decode` turns these eight into four pairs of bf16,
 * `pairs` puts the corresponding values of a in the same order. ---- */

/* Formats whose words have eight codes of 4 bits: pair j has nibbles j and j + 4. */
template <typename FORMAT> struct own_codes {
    enum { CHUNKS = 1 };
    static __device__ __forceinline__ int place(int q, int i) { return OWN * q + 8 * i; }
    static __device__ __forceinline__ const void *chunk(const struct source &s, const struct expert &e, int at, int)
    {
        return (const uint8_t *)s.w.data + e.value / 2 + (at + place(threadIdx.x % 4, 0)) / 2;
    }
    static __device__ __forceinline__ uint4 pairs(uint4 a)
    {
        const uint4 x = {__byte_perm(a.x, a.z, 0x5410), __byte_perm(a.x, a.z, 0x7632), __byte_perm(a.y, a.w, 0x5410),
                         __byte_perm(a.y, a.w, 0x7632)};
        return FORMAT::high_first ? make_uint4(x.y, x.x, x.w, x.z) : x;
    }
};

template <typename FORMAT> struct own_values : own_codes<FORMAT> {
    float scale[2]; /* of each 16 values */
    __device__ __forceinline__ void load_scales(const struct source &s, const struct expert &e, int at, bool live)
    {
        const uint32_t block = FORMAT::block ? FORMAT::block : s.w.block;
        const uint32_t b = (uint32_t)(at + own_values::place(threadIdx.x % 4, 0)) / block;
        scale[0] = live ? FORMAT::scale(s, e.e, b) : 0;
        scale[1] = live && block == 16 ? FORMAT::scale(s, e.e, b + 1) : scale[0];
    }
    struct table {
        float scale[2];
    };
    __device__ __forceinline__ struct table table_of(const float *) const { return {{scale[0], scale[1]}}; }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct table &t, const uint4 *chunks, int i,
                                                  const float *code)
    {
        const uint32_t word = ((const uint32_t *)chunks)[i];
#pragma unroll
        for (int k = 0; k < 4; k++)
            pair[k] =
                bf16_pack(code[word >> 4 * k & 15] * t.scale[i / 2], code[word >> (4 * k + 16) & 15] * t.scale[i / 2]);
    }
};

/* NF4 and FP4: pair j has nibbles 2 j + 1 and 2 j. The table has the bf16 values of code times scale. */
template <> struct own_values<device_nf4> : own_codes<device_nf4> {
    float scale;
    struct table {
        uint32_t low[4], high[4]; /* bytes of the values of codes 0 .. 15 */
    };
    static __device__ __forceinline__ uint4 pairs(uint4 a) { return a; }
    __device__ __forceinline__ void load_scales(const struct source &s, const struct expert &e, int at, bool live)
    {
        scale = live ? device_nf4::scale(s, e.e, (uint32_t)(at + place(threadIdx.x % 4, 0)) / s.w.block) : 0;
    }
    __device__ __forceinline__ struct table table_of(const float *code) const
    {
        struct table t;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 v = ((const float4 *)code)[i];
            const uint32_t a = bf16_pack(v.x * scale, v.y * scale), b = bf16_pack(v.z * scale, v.w * scale);
            t.low[i] = __byte_perm(a, b, 0x6420), t.high[i] = __byte_perm(a, b, 0x7531);
        }
        return t;
    }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct table &t, const uint4 *chunks, int i,
                                                  const float *)
    {
        nibble_pairs(pair, t.low, t.high, ((const uint32_t *)chunks)[i]);
    }
};

template <> struct own_values<device_mxfp4> : own_codes<device_mxfp4> {
    uint32_t scale; /* e8m0 */
    __device__ __forceinline__ void load_scales(const struct source &s, const struct expert &e, int at, bool live)
    {
        scale = live ? (s.w.scale + e.block)[at / 32 + (int)threadIdx.x % 4] : 0;
    }
    using table = struct mxfp4_factors;
    __device__ __forceinline__ struct mxfp4_factors table_of(const float *) const { return mxfp4_factors_of(scale); }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct mxfp4_factors &f, const uint4 *chunks,
                                                  int i, const float *)
    {
        mxfp4_pairs(pair, f, ((const uint32_t *)chunks)[i]);
    }
};

template <> struct own_values<device_bf16> {
    enum { CHUNKS = 4 };
    static __device__ __forceinline__ int place(int q, int i) { return OWN * i + 8 * q; }
    static __device__ __forceinline__ const void *chunk(const struct source &s, const struct expert &e, int at, int i)
    {
        return (const bf16 *)s.w.data + e.value + (at + place(threadIdx.x % 4, i));
    }
    static __device__ __forceinline__ uint4 pairs(uint4 a) { return a; }
    __device__ __forceinline__ void load_scales(const struct source &, const struct expert &, int, bool) {}
    struct table {
    };
    __device__ __forceinline__ struct table table_of(const float *) const { return {}; }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct table &, const uint4 *chunks, int i,
                                                  const float *)
    {
        pair[0] = chunks[i].x, pair[1] = chunks[i].y, pair[2] = chunks[i].z, pair[3] = chunks[i].w;
    }
};

/* ---- what a block computes ---- */

/* A team is eight warps that compute a tile; groups of `depth` warps have the same columns and divide the depth. */
enum { TEAM_WARPS = 8, TEAM = 32 * TEAM_WARPS, TEAMS = 2 /* at most */ };

struct few_args {
    struct few_rows f;
    struct source s;
    int depth;
    int n_tile; /* of columns */
};

/* Rows of a pass: of one expert, at most 8 NT. */
struct pass {
    int e, first, end;
};

/* Sets *p to pass number `place` of all experts; returns the number of passes. A whole warp calls it. */
template <int NT>
static __device__ __forceinline__ int find_pass(struct pass *p, const struct few_args &args, int place)
{
    enum { ROWS = 8 * NT };
    const int lane = threadIdx.x % 32, n_exp = (int)args.s.w.n_exp, n_row = (int)args.f.n_row;
    const int32_t *offs = args.f.offs;
    int before = 0;
    for (int first = 0; first < n_exp; first += 32) {
        const int e = first + lane;
        const int begin = e >= n_exp ? 0 : offs ? __ldg(offs + e) : 0;
        const int end = e >= n_exp ? 0 : offs ? __ldg(offs + e + 1) : n_row;
        const int own = (end - begin + ROWS - 1) / ROWS;
        int sum = own;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_up_sync(~0u, sum, i);
            if (lane >= i) sum += other;
        }
        const int at = place - before - (sum - own); /* of the passes of this expert */
        const uint32_t found = __ballot_sync(~0u, at >= 0 && at < own);
        if (found) {
            const int from = __ffs(found) - 1, row = begin + at * ROWS;
            p->e = first + from;
            p->first = __shfl_sync(~0u, row, from);
            p->end = __shfl_sync(~0u, min(end, row + ROWS), from);
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return before;
}

/* Row m of a. */
static __device__ __forceinline__ const bf16 *row_of(const struct few_rows &f, int m)
{
    return f.a + (f.slot ? quotient_of(f.token, __ldg(f.slot + m)) : m) * f.lda;
}

/* The rows that a lane multiplies: row 8 t + lane / 4 of the pass; NULL beyond the last. */
template <int NT>
static __device__ __forceinline__ void find_rows(const bf16 *x[NT], const struct few_rows &f, const struct pass &p)
{
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int m = p.first + 8 * t + threadIdx.x % 32 / 4;
        x[t] = m < p.end ? row_of(f, m) : NULL;
    }
}

/* Values 8 i .. 8 i + 7 of lane q in a step of a row, paired as those of W. */
template <typename FORMAT>
static __device__ __forceinline__ uint4 row_values(const bf16 *x, int step, int q, int i, int n_in)
{
    const int at = step + own_values<FORMAT>::place(q, i);
    return own_values<FORMAT>::pairs(x && at < n_in ? __ldg((const uint4 *)(x + at)) : make_uint4(0, 0, 0, 0));
}

/* The rows of a pass in shared memory, as the lanes read them: [steps][4][NT][32] of 16 bytes. All threads. */
template <typename FORMAT, int NT>
static __device__ __forceinline__ void copy_rows(uint4 *rows, const struct few_args &args, const struct pass &p)
{
    const int n_in = (int)args.s.w.n_in, n_piece = (n_in + STEP - 1) / STEP * 4 * NT * 32;
    for (int i = (int)threadIdx.x; i < n_piece; i += (int)blockDim.x) {
        const int lane = i % 32, t = i / 32 % NT, k = i / (32 * NT) % 4, m = p.first + 8 * t + lane / 4;
        const bf16 *x = m < p.end ? row_of(args.f, m) : NULL;
        rows[i] = row_values<FORMAT>(x, i / (128 * NT) * STEP, lane % 4, k, n_in);
    }
}

/* ---- the products of a warp ---- */

/* acc += the products of every lane's values 8 i .. 8 i + 7 in a step, for 16 columns. low, high: weights of columns
 * lane / 4 and lane / 4 + 8. */
template <int NT>
static __device__ __forceinline__ void multiply(float acc[NT][4], const uint32_t low[4], const uint32_t high[4],
                                                const uint4 b[NT][4], int i)
{
    const uint32_t a0[4] = {low[0], high[0], low[1], high[1]}, a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const uint32_t b0[2] = {b[t][i].x, b[t][i].y}, b1[2] = {b[t][i].z, b[t][i].w};
        mma_bf16(acc[t], a0, b0);
        mma_bf16(acc[t], a1, b1);
    }
}

/* The weights that a warp reads: MT times 16 columns of each of its tiles, in each of its steps; zeros beyond the last
 * column. A thread copies the chunks that it decodes into its part of a ring in shared memory, ahead of their use and
 * across tiles. */
template <typename FORMAT, int MT> struct weight_ring {
    using own = own_values<FORMAT>;
    enum { CHUNKS = own::CHUNKS, UNITS = CHUNKS == 1 ? 4 : 2, BYTES = UNITS * 2 * CHUNKS * TEAM * 16 };
    const struct source *s;
    uint4 *ring; /* [UNITS][2][CHUNKS][TEAM] */
    struct expert e;
    int col, width;                         /* the warp's first column in tile 0; columns of a tile */
    int step, stride;                       /* the warp's first step; distance of its steps */
    int tile, end, n_team;                  /* the team's first tile; end of all tiles; distance of the team's tiles */
    int next_tile, next_step, next_m, unit; /* what `copy` copies next, and to which unit of the ring */

    /* The first value of a row of W. */
    __device__ __forceinline__ int row(int of_tile, int m, int high) const
    {
        return (col + of_tile * width + COLS * m + 8 * high + (int)threadIdx.x % 32 / 4) * (int)s->w.n_in;
    }
    __device__ __forceinline__ bool is_live(int row, int at, int i) const
    {
        return at + own::place(threadIdx.x % 4, i) < (int)s->w.n_in && row < (int)s->n;
    }
    __device__ __forceinline__ uint4 *place(int of_unit, int high, int i) const
    {
        return ring + ((of_unit % UNITS * 2 + high) * CHUNKS + i) * TEAM + threadIdx.x % TEAM;
    }
    __device__ __forceinline__ void copy(void)
    {
        if (next_tile < end) {
#pragma unroll
            for (int k = 0; k < 2 * CHUNKS; k++) {
                const int i = k % CHUNKS, from = row(next_tile, next_m, k / CHUNKS);
                const bool live = is_live(from, next_step, i);
                copy_async16(shared_address(place(unit, k / CHUNKS, i)),
                             live ? own::chunk(*s, e, from + next_step, i) : s->w.data, live ? 16 : 0);
            }
            if (++next_m == MT) next_m = 0, next_step += stride;
            if (next_step >= (int)s->w.n_in) next_step = step, next_tile += n_team;
        }
        unit++;
        copy_commit();
    }
    __device__ __forceinline__ void begin(void)
    {
        next_tile = step < (int)s->w.n_in ? tile : end;
        next_step = step;
        next_m = unit = 0;
#pragma unroll
        for (int i = 0; i < UNITS - 1; i++) copy();
    }
    /* Loads the scales of the lane's row k % 2 of W, in group k / 2 of the warp's groups of 16. */
    __device__ __forceinline__ void load_scales(own &to, int of_tile, int k, int at) const
    {
        const int from = row(of_tile, k / 2, k % 2);
        to.load_scales(*s, e, from + at, of_tile < end && is_live(from, at, 0));
    }
};

/* Scales of the next step, which are loaded while the step before is computed. */
template <typename FORMAT, int MT> struct scales_ahead {
    own_values<FORMAT> of[MT][2];
    __device__ __forceinline__ void load(const struct weight_ring<FORMAT, MT> &w, int tile, int at)
    {
#pragma unroll
        for (int k = 0; k < 2 * MT; k++) w.load_scales(of[k / 2][k % 2], tile, k, at);
    }
};

/* acc += the products of the warp's steps of a tile. rows: the rows of a in shared memory (copy_rows); NULL: they are
 * in global memory, at x. used: how many of the ring's UNITS have been multiplied so far, over all tiles. */
template <typename FORMAT, int NT, int MT>
static __device__ __forceinline__ void base_product(float acc[MT][NT][4], struct weight_ring<FORMAT, MT> &w,
                                                    struct scales_ahead<FORMAT, MT> &next, int tile, int &used,
                                                    const float *code, const uint4 *rows, const bf16 *const x[NT])
{
    using own = own_values<FORMAT>;
    enum { UNITS = weight_ring<FORMAT, MT>::UNITS, CHUNKS = own::CHUNKS };
    const int n_in = (int)w.s->w.n_in, lane = threadIdx.x % 32;
    for (int step = w.step; step < n_in; step += w.stride) {
        const struct scales_ahead<FORMAT, MT> now = next;
        const bool last = step + w.stride >= n_in;
        uint4 b[NT][4];
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                b[t][i] = rows ? rows[((step / STEP * 4 + i) * NT + t) * 32 + lane]
                               : row_values<FORMAT>(x[t], step, lane % 4, i, n_in);
        next.load(w, last ? tile + w.n_team : tile, last ? w.step : step + w.stride);
#pragma unroll
        for (int m = 0; m < MT; m++, used++) {
            uint4 low[CHUNKS], high[CHUNKS];
            const auto of_low = now.of[m][0].table_of(code), of_high = now.of[m][1].table_of(code);
            w.copy();
            copy_wait<UNITS - 1>();
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) low[i] = *w.place(used, 0, i), high[i] = *w.place(used, 1, i);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t low_pair[4], high_pair[4];
                own::decode(low_pair, of_low, low, i, code);
                own::decode(high_pair, of_high, high, i, code);
                multiply<NT>(acc[m], low_pair, high_pair, b, i);
            }
        }
    }
}

/* acc += scale la lb: the adapter of the part that has columns col .. col + 15. */
template <int NT>
static __device__ __forceinline__ void add_adapter(float acc[NT][4], const struct few_rows &f, const struct pass &pass,
                                                   int col)
{
    const int i = threadIdx.x % 32 / 4, q = threadIdx.x % 4, r = (int)f.r;
    int p = 0, n_b = 0;
    while (p < f.n_part && (col < f.part[p].first || col >= f.part[p].end)) p++;
    if (p == f.n_part) return;
    for (int j = 0; j < f.n_part; j++) n_b += f.part[j].end - f.part[j].first;
    const struct dense_part &part = f.part[p];
    const bf16 *b = f.lb + (((int64_t)pass.e * n_b + part.lb + col - part.first) + i) * r + 2 * q;
    const int next = col + 8 < f.w.n_out ? 8 * r : 0;
    float sum[NT][4] = {};
    for (int k = 0; k < r; k += 8) {
        const uint32_t a[2] = {*(const uint32_t *)(b + k), *(const uint32_t *)(b + next + k)};
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const int m = pass.first + 8 * t + i;
            const uint32_t x[1] = {m < pass.end ? *(const uint32_t *)(f.la + m * f.ld_la + part.la + k + 2 * q) : 0};
            mma_bf16_k8(sum[t], a, x);
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[t][j] += part.scale * sum[t][j];
}

/* ---- the sums of a team ---- */

/* Index in shared memory of the sum of a row and a column: permuted inside 8 rows of COLS, so that the lanes of a warp
 * store into different banks. */
static __device__ __forceinline__ int sum_place(int row, int col)
{
    return (row & ~7 | row >> 1 & 3 | (row & 1) << 2) * COLS + (col ^ (row & 4) << 1);
}

/* Two columns of a row: bias, residual, rounding, activation. */
static __device__ __forceinline__ void store_pair(const struct few_rows &f, float2 v, float2 bias, int64_t m,
                                                  int64_t col)
{
    v.x += bias.x, v.y += bias.y;
    if (f.res) {
        const uint32_t res = *(const uint32_t *)(f.res + m * f.ld_res + col);
        v.x += bf16_low(res), v.y += bf16_high(res);
    }
    const uint32_t pair = bf16_pack(v.x, v.y);
    *(uint32_t *)(f.out + m * f.ld_out + col) = pair;
    if (f.act)
        f.act[m * (f.w.n_out / 2) + col / 2] = __float2bfloat16_rn(glu_value(f.form, bf16_low(pair), bf16_high(pair)));
}

/* The columns of a tile that a thread stores: two in every row. */
template <int MT> struct own_columns {
    int part;   /* which of the tile's groups of 16 columns has the two columns */
    int c;      /* the first of the two, counted from the first column of its group */
    int n_part; /* groups of the tile */
    __device__ __forceinline__ own_columns(int depth)
        : part((int)threadIdx.x % TEAM / (COLS / 2) % (TEAM_WARPS / depth * MT)), c((int)threadIdx.x % (COLS / 2) * 2),
          n_part(TEAM_WARPS / depth * MT)
    {
    }
    __device__ __forceinline__ int first_row(void) const { return (int)threadIdx.x % TEAM / (COLS / 2 * n_part); }
    __device__ __forceinline__ int rows(void) const { return TEAM / (COLS / 2 * n_part); }
};

/* Adds the sums of the warps with the same columns and stores them. sums [TEAM_WARPS][MT][8 NT][COLS]. */
template <int NT, int MT>
static __device__ __forceinline__ void store_tile(const float *sums, const struct few_args &args, const struct pass &p,
                                                  int64_t col, float2 bias, const struct own_columns<MT> &own)
{
    enum { TILE = 8 * NT * COLS };
    const int depth = args.depth;
    const float *of_part = sums + (own.part / MT * depth * MT + own.part % MT) * TILE;
    if (col >= args.s.w.n_out) return;
    for (int row = own.first_row(); row < p.end - p.first; row += own.rows()) {
        float2 v = {0, 0};
        for (int d = 0; d < depth; d++) {
            const float2 w = *(const float2 *)(of_part + d * MT * TILE + sum_place(row, own.c));
            v.x += w.x, v.y += w.y;
        }
        store_pair(args.f, v, bias, p.first + row, col);
    }
}

static __device__ __forceinline__ void team_barrier(int team)
{
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"((int)TEAM) : "memory");
}

template <typename FORMAT, int NT, int MT> struct team_memory {
    enum { RING = weight_ring<FORMAT, MT>::BYTES, SUMS = TEAM_WARPS * MT * 8 * NT * COLS, BYTES = RING + 2 * SUMS * 4 };
};

template <typename FORMAT, int NT, int MT, bool STAGED>
static __device__ __forceinline__ void run_pass(const struct few_args &args, const struct pass &p, int first, int end,
                                                uint4 *shared, const float *code)
{
    enum { TILE = 8 * NT * COLS };
    const struct few_rows &f = args.f;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % TEAM / 32, part = warp % args.depth,
              team = (int)threadIdx.x / TEAM, n_team = (int)blockDim.x / TEAM, n_out = (int)args.s.w.n_out;
    uint4 *const ring = shared + team * (team_memory<FORMAT, NT, MT>::BYTES / 16);
    float *const sums = (float *)(ring + weight_ring<FORMAT, MT>::BYTES / 16);
    uint4 *const rows = STAGED ? shared + n_team * (team_memory<FORMAT, NT, MT>::BYTES / 16) : NULL;
    const struct own_columns<MT> own(args.depth);
    const int width = own.n_part * COLS, side = warp / args.depth * MT * COLS;
    const struct expert e = {p.e, p.e * args.s.n, p.e * args.s.n_block};
    struct weight_ring<FORMAT, MT> w = {
        &args.s, ring, e, side, width, part *STEP, args.depth *STEP, first + team, end, n_team, 0, 0, 0, 0
    };
    struct scales_ahead<FORMAT, MT> scales;
    const bf16 *x[NT] = {};
    int used = 0;
    w.begin();
    scales.load(w, first + team, part * STEP);
    __syncthreads(); /* the rows of the pass before have been read */
    if constexpr (STAGED) copy_rows<FORMAT, NT>(rows, args, p);
    if constexpr (!STAGED) find_rows<NT>(x, f, p);
    __syncthreads();
    for (int tile = first + team, k = 0; tile < end; tile += n_team, k ^= 1) {
        float acc[MT][NT][4] = {};
        float *const to = sums + k * (TEAM_WARPS * MT * TILE);
        const int stored = tile * width + own.part * COLS + own.c;
        const bool has_bias = f.bias && stored < n_out;
        const float2 bias = has_bias ? *(const float2 *)(f.bias + (int64_t)p.e * n_out + stored) : make_float2(0, 0);
#pragma unroll
        for (int m = 0; m < MT; m++) { /* by the warp with the fewest steps */
            const int col = tile * width + side + m * COLS;
            if (part == args.depth - 1 && f.r && col < n_out) add_adapter<NT>(acc[m], f, p, col);
        }
        base_product<FORMAT, NT, MT>(acc, w, scales, tile, used, code, rows, x);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    to[(warp * MT + m) * TILE + sum_place(8 * t + lane % 4 * 2 + j % 2, lane / 4 + j / 2 * 8)] =
                        acc[m][t][j];
        team_barrier(team);
        store_tile<NT, MT>(to, args, p, stored, bias, own);
    }
    copy_wait<0>();
}

/* A block computes an equal share of the tiles of all passes, each of at most 8 NT rows of an expert. STAGED: it first
 * copies the rows of a pass to shared memory and has at most 512 threads, else 256. */
template <typename FORMAT, int NT, int MT, bool STAGED>
static __global__ void __launch_bounds__(STAGED ? TEAMS *TEAM : TEAM, STAGED ? 1 : 2)
    few_kernel(const __grid_constant__ struct few_args args)
{
    extern __shared__ uint4 shared[];
    __shared__ __align__(16) float code[16];
    struct pass p = {};
    if constexpr (FORMAT::coded)
        if (threadIdx.x < 16) code[threadIdx.x] = FORMAT::code(args.s, threadIdx.x);
    const int64_t n = (int64_t)find_pass<NT>(&p, args, 0) * args.n_tile;
    const int end = (int)(n * (blockIdx.x + 1) / gridDim.x);
    for (int at = (int)(n * blockIdx.x / gridDim.x); at < end;) {
        const int first = at % args.n_tile, some = min(end - at, args.n_tile - first);
        find_pass<NT>(&p, args, at / args.n_tile);
        run_pass<FORMAT, NT, MT, STAGED>(args, p, first, first + some, shared, code);
        at += some;
    }
}

/* ---- host ---- */

static bool is_aligned(const struct few_rows *f)
{
    return ((uintptr_t)f->w.data | (uintptr_t)f->a) % 16 == 0 && f->lda % 8 == 0 &&
           ((uintptr_t)f->la | (uintptr_t)f->res | (uintptr_t)f->out) % 4 == 0 &&
           (f->ld_la | f->ld_res | f->ld_out) % 2 == 0;
}

static int shared_most(void)
{
    static int bytes;
    if (!bytes) CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda.index));
    return bytes;
}

template <typename FORMAT, int NT, int MT, bool STAGED>
static void launch(const struct few_args *args, int n_team, int64_t row_bytes)
{
    const int bytes = n_team * team_memory<FORMAT, NT, MT>::BYTES + (int)(STAGED ? row_bytes : 0);
    const struct few_rows *f = &args->f;
    const int64_t passes = f->offs ? MT_MIN(f->n_row, f->w.n_exp + f->n_row / (8 * NT)) : ceil_div(f->n_row, 8 * NT);
    const int64_t most = (int64_t)cuda.n_sm * (STAGED ? 1 : 2);
    allow_shared<few_kernel<FORMAT, NT, MT, STAGED>>(STAGED ? shared_most() - 1024 : bytes);
    few_kernel<FORMAT, NT, MT, STAGED>
        <<<grid_x(MT_MIN(passes * args->n_tile, most)), n_team * TEAM, bytes, cuda.stream>>>(*args);
    CUDA_CHECK_LAUNCH();
}

/* Launches the kernel that keeps rows in shared memory: for packed experts with many columns, if the rows fit. False:
 * nothing was launched. The bits of the result are the same with both kernels. */
template <typename FORMAT, int NT, int MT> static bool launch_staged(const struct few_args *args)
{
    enum { LEAST = 4 /* tiles */ };
    if constexpr (FORMAT::coded) {
        const int64_t row_bytes = ceil_div(args->f.w.n_in, STEP) * 4 * NT * 512, most = shared_most() - 1024;
        for (int n_team = TEAMS; n_team && args->f.offs && args->n_tile >= LEAST; n_team--) {
            if (n_team * team_memory<FORMAT, NT, MT>::BYTES + row_bytes > most) continue;
            launch<FORMAT, NT, MT, true>(args, n_team, row_bytes);
            return true;
        }
    }
    return false;
}

/* Chooses the tiles. depth: warps with the same columns. MT: groups of 16 columns of a warp, two for packed weights,
 * which share the rows of a. depth and MT, and so the order of the sums, do not depend on the number of rows. A pass
 * has 8 rows if one matrix has at most 8 rows, or an expert at most 4 on average; otherwise 16, or 8 if shared memory
 * holds only 8. */
template <typename FORMAT> static void launch_rows(const struct few_rows *f)
{
    constexpr int MT = FORMAT::coded ? 2 : 1;
    const bool wide = !f->offs && f->w.n_out > 8192;
    struct few_args args = {*f, source_of(&f->w), wide ? TEAM_WARPS / 2 : TEAM_WARPS};
    args.n_tile = (int)ceil_div(f->w.n_out, TEAM_WARPS / args.depth * MT * COLS);
    const bool few = (f->offs ? 2 * ceil_div(f->n_row, f->w.n_exp) : f->n_row) <= 8;
    if (!few && launch_staged<FORMAT, 2, MT>(&args)) return;
    if (launch_staged<FORMAT, 1, MT>(&args)) return;
    if (few)
        launch<FORMAT, 1, MT, false>(&args, 1, 0);
    else
        launch<FORMAT, 2, MT, false>(&args, 1, 0);
}

void cuda_few_rows(const struct few_rows *f)
{
    if (f->n_row == 0) return;
    MT_REQUIRE(is_aligned(f), "a product with few rows of %lld x %lld: rows are not aligned", (long long)f->w.n_out,
               (long long)f->w.n_in);
    with_decoder(f->w.format, [&](auto format) {
        using FORMAT = decltype(format);
        if constexpr (FORMAT::bits == 4 || std::is_same_v<FORMAT, device_bf16>) launch_rows<FORMAT>(f);
    });
}
