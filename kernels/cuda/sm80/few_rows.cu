/* few_rows.cu - products with few rows (few_rows.h): a weight is read once and decoded in registers.
 * Math: few_rows.h. Columns of the output are the 16 rows of a mma, rows of the experts its 8 columns. A lane has 32
 *   neighbouring values of two rows of W in a step of 128 of the depth; W and a have the same permutation of the depth
 *   inside a step. The rounding of decoded weights is that of dequant.cu.
 * Shapes: few_rows.h. Rows beyond 8 NT of an expert are another pass over its weights.
 * Needs: n_in a multiple of 32, n_out of 8; columns of an adapter's part begin and end at multiples of 16, or at n_out.
 *   Any GPU since sm_80.
 * Grid: (columns / (16 MT), experts with rows, at most n_row) blocks of 8 warps, which share the columns: warp d has
 *   steps d, d + 8, ... (4 warps and d + 4 for one matrix of more than 8192 columns). A thread copies the weights that
 *   it decodes to shared memory by cp.async, up to eight tiles ahead: 64 KiB; the sums pass through 4 MT NT KiB. MT 1
 *   (bf16) or 2, NT 1 or 2. 128 registers, in other formats than bf16 16 to 160 bytes of spills.
 * Bound: bytes of W; about 2.4 instructions per value of MXFP4 and 4 of NF4, whose codes are looked up in shared
 *   memory. Rows of a are read by every block, from L1 and L2.
 * Numerics: f32 sums over the steps of a warp, then over the warps in order, then the adapter, bias and residual; one
 *   rounding. */
#include "kernels/cuda/parts/few_rows.h"

#include <type_traits>

#include "kernels/cuda/format/formats.cuh"
#include "kernels/cuda/format/mxfp4_words.cuh"
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/mma.cuh"

enum { WARPS = 8, THREADS = 32 * WARPS, COLS = FEW_COLS, OWN = FEW_DEPTH, STEP = 4 * OWN };

/* ---- 32 values of a row of W in a step: CHUNKS of 16 bytes, and scales; values 8 i .. 8 i + 7 of lane q of a quad are
 * at place(q, i) of the step. decode makes four pairs of bf16 of values 8 i .. 8 i + 7. ---- */

template <typename FORMAT> struct own_values {
    enum { CHUNKS = 1 };
    float scale[2]; /* of each 16 */
    static __device__ __forceinline__ int place(int q, int i) { return OWN * q + 8 * i; }
    static __device__ __forceinline__ const void *chunk(const struct source &s, int64_t e, int at, int)
    {
        return (const uint8_t *)s.w.data + e * (s.n / 2) + (at + place(threadIdx.x % 4, 0)) / 2;
    }
    __device__ __forceinline__ void load_scales(const struct source &s, int64_t e, int at, bool live)
    {
        const uint32_t block = FORMAT::block ? FORMAT::block : s.w.block;
        const uint32_t b = (uint32_t)(at + place(threadIdx.x % 4, 0)) / block;
        scale[0] = live ? FORMAT::scale(s, e, b) : 0;
        scale[1] = live && block == 16 ? FORMAT::scale(s, e, b + 1) : scale[0];
    }
    struct table {
        float scale[2];
    };
    __device__ __forceinline__ struct table table_of() const { return {{scale[0], scale[1]}}; }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct table &t, const uint4 *chunks, int i,
                                                  const float *code)
    {
        const uint32_t word = ((const uint32_t *)chunks)[i];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t byte = word >> 8 * k & 255;
            const float low = code[byte & 15] * t.scale[i / 2], high = code[byte >> 4] * t.scale[i / 2];
            pair[k] = FORMAT::high_first ? bf16_pack(high, low) : bf16_pack(low, high);
        }
    }
};

template <> struct own_values<device_mxfp4> {
    enum { CHUNKS = 1 };
    uint32_t scale;
    static __device__ __forceinline__ int place(int q, int i) { return OWN * q + 8 * i; }
    static __device__ __forceinline__ const void *chunk(const struct source &s, int64_t e, int at, int)
    {
        return (const uint8_t *)s.w.data + e * (s.n / 2) + (at + place(threadIdx.x % 4, 0)) / 2;
    }
    __device__ __forceinline__ void load_scales(const struct source &s, int64_t e, int at, bool live)
    {
        scale = live ? (s.w.scale + e * s.n_block)[at / 32 + (int)threadIdx.x % 4] : 0;
    }
    using table = struct values;
    __device__ __forceinline__ struct values table_of() const { return scaled_values(scale); }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct values &v, const uint4 *chunks, int i,
                                                  const float *)
    {
        decode_word(pair, v, ((const uint32_t *)chunks)[i]);
    }
};

template <> struct own_values<device_bf16> {
    enum { CHUNKS = 4 };
    static __device__ __forceinline__ int place(int q, int i) { return OWN * i + 8 * q; }
    static __device__ __forceinline__ const void *chunk(const struct source &s, int64_t e, int at, int i)
    {
        return (const bf16 *)s.w.data + e * s.n + (at + place(threadIdx.x % 4, i));
    }
    __device__ __forceinline__ void load_scales(const struct source &, int64_t, int, bool) {}
    struct table {
    };
    __device__ __forceinline__ struct table table_of() const { return {}; }
    static __device__ __forceinline__ void decode(uint32_t pair[4], const struct table &, const uint4 *chunks, int i,
                                                  const float *)
    {
        pair[0] = chunks[i].x, pair[1] = chunks[i].y, pair[2] = chunks[i].z, pair[3] = chunks[i].w;
    }
};

/* ---- the products of a warp ---- */

struct few_args {
    struct few_rows f;
    struct source s;
    int depth; /* warps that share columns */
};

/* The expert with rows that is number `place`; -1: there are fewer. All lanes call it. */
static __device__ __forceinline__ int find_expert(const int32_t *offs, int n_exp, int place)
{
    const int lane = threadIdx.x % 32;
    for (int first = 0, before = 0; first < n_exp; first += 32) {
        const int e = first + lane;
        const bool own = e < n_exp && __ldg(offs + e) < __ldg(offs + e + 1);
        const uint32_t has = __ballot_sync(~0u, own);
        const uint32_t found = __ballot_sync(~0u, own && before + __popc(has & ((1u << lane) - 1)) == place);
        if (found) return first + __ffs(found) - 1;
        before += __popc(has);
    }
    return -1;
}

/* The rows of a that a lane reads: row 8 t + lane / 4 of the pass; NULL beyond the last. */
template <int NT>
static __device__ __forceinline__ void find_rows(const bf16 *x[NT], const struct few_rows &f, int first, int end)
{
#pragma unroll
    for (int t = 0; t < NT; t++) {
        const int m = first + 8 * t + threadIdx.x % 32 / 4;
        x[t] = m < end ? f.a + (f.slot ? quotient_of(f.token, __ldg(f.slot + m)) : m) * f.lda : NULL;
    }
}

/* The rows of a in a step: values 8 i .. 8 i + 7 of the lane. */
template <typename FORMAT, int NT>
static __device__ __forceinline__ void load_rows(uint4 b[NT][4], const bf16 *const x[NT], int step, int n_in)
{
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = step + own_values<FORMAT>::place(threadIdx.x % 4, i);
            b[t][i] = x[t] && at < n_in ? __ldg((const uint4 *)(x[t] + at)) : make_uint4(0, 0, 0, 0);
        }
}

/* acc += the product of a step with 16 columns; low and high: of columns lane / 4 and lane / 4 + 8. */
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

/* The weights that a warp reads: MT times 16 columns from `col` on in each of its steps; those beyond the last are
 * zero. A thread copies the chunks that it decodes into its places of a ring in shared memory, TILES tiles ahead. */
template <typename FORMAT, int MT> struct weight_ring {
    using own = own_values<FORMAT>;
    enum { CHUNKS = own::CHUNKS, TILES = 8 / CHUNKS, BYTES = TILES * 2 * CHUNKS * THREADS * 16 };
    const struct source *s;
    uint4 *ring; /* [TILES][2][CHUNKS][THREADS] */
    int64_t e, col;
    int step, stride; /* first step; distance */

    /* The first value of a row, and whether the lane's values of a step are there. */
    __device__ __forceinline__ int row(int m, int high) const
    {
        return ((int)col + COLS * m + 8 * high + (int)threadIdx.x % 32 / 4) * (int)s->w.n_in;
    }
    __device__ __forceinline__ bool is_live(int row, int at, int i) const
    {
        return at + own::place(threadIdx.x % 4, i) < (int)s->w.n_in && row < (int)s->n;
    }
    __device__ __forceinline__ uint4 *place(int tile, int high, int i) const
    {
        return ring + ((tile % TILES * 2 + high) * CHUNKS + i) * THREADS + threadIdx.x;
    }
    __device__ __forceinline__ void copy(int tile) const
    {
        const int at = step + tile / MT * stride;
#pragma unroll
        for (int k = 0; k < 2 * CHUNKS; k++) {
            const int i = k % CHUNKS, from = row(tile % MT, k / CHUNKS);
            const bool live = is_live(from, at, i);
            copy_async16(shared_address(place(tile, k / CHUNKS, i)), live ? own::chunk(*s, e, from + at, i) : s->w.data,
                         live ? 16 : 0);
        }
        copy_commit();
    }
    /* Of row k % 2 of tile k / 2 of a step. */
    __device__ __forceinline__ void load_scales(own &to, int k, int at) const
    {
        const int from = row(k / 2, k % 2);
        to.load_scales(*s, e, from + at, is_live(from, at, 0));
    }
};

/* The steps of a warp. */
template <typename FORMAT, int NT, int MT>
static __device__ __forceinline__ void base_product(float acc[MT][NT][4], const struct weight_ring<FORMAT, MT> &w,
                                                    const float *code, const bf16 *const x[NT])
{
    using own = own_values<FORMAT>;
    enum { TILES = weight_ring<FORMAT, MT>::TILES, CHUNKS = own::CHUNKS };
    const int n_in = (int)w.s->w.n_in;
    own next[MT][2];
#pragma unroll
    for (int i = 0; i < TILES - 1; i++) w.copy(i);
#pragma unroll
    for (int k = 0; k < 2 * MT; k++) w.load_scales(next[k / 2][k % 2], k, w.step);
    for (int step = w.step, tile = 0; step < n_in; step += w.stride) {
        uint4 b[NT][4];
        own now[MT][2];
        load_rows<FORMAT, NT>(b, x, step, n_in);
#pragma unroll
        for (int k = 0; k < 2 * MT; k++) {
            now[k / 2][k % 2] = next[k / 2][k % 2];
            w.load_scales(next[k / 2][k % 2], k, step + w.stride);
        }
#pragma unroll
        for (int m = 0; m < MT; m++, tile++) {
            uint4 low[CHUNKS], high[CHUNKS];
            const auto of_low = now[m][0].table_of(), of_high = now[m][1].table_of();
            w.copy(tile + TILES - 1);
            copy_wait<TILES - 1>();
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) low[i] = *w.place(tile, 0, i), high[i] = *w.place(tile, 1, i);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t low_pair[4], high_pair[4];
                own::decode(low_pair, of_low, low, i, code);
                own::decode(high_pair, of_high, high, i, code);
                multiply<NT>(acc[m], low_pair, high_pair, b, i);
            }
        }
    }
    copy_wait<0>();
}

/* acc += scale la lb: the adapter of the part that has columns col .. col + 15. */
template <int NT>
static __device__ __forceinline__ void add_adapter(float acc[NT][4], const struct few_rows &f, int64_t e, int64_t col,
                                                   int first, int end)
{
    const int i = threadIdx.x % 32 / 4, q = threadIdx.x % 4, r = (int)f.r;
    int p = 0, n_b = 0;
    while (p < f.n_part && (col < f.part[p].first || col >= f.part[p].end)) p++;
    if (p == f.n_part) return;
    for (int j = 0; j < f.n_part; j++) n_b += f.part[j].end - f.part[j].first;
    const struct dense_part &part = f.part[p];
    const bf16 *b = f.lb + ((e * n_b + part.lb + col - part.first) + i) * r + 2 * q;
    const int next = col + 8 < f.w.n_out ? 8 * r : 0;
    float sum[NT][4] = {};
    for (int k = 0; k < r; k += 8) {
        const uint32_t a[2] = {*(const uint32_t *)(b + k), *(const uint32_t *)(b + next + k)};
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const int m = first + 8 * t + i;
            const uint32_t x[1] = {m < end ? *(const uint32_t *)(f.la + m * f.ld_la + part.la + k + 2 * q) : 0};
            mma_bf16_k8(sum[t], a, x);
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[t][j] += part.scale * sum[t][j];
}

/* ---- the sums of a block ---- */

/* Two columns of a row: bias, residual, rounding, activation. */
static __device__ __forceinline__ void store_pair(const struct few_rows &f, float2 v, int64_t e, int64_t m, int64_t col)
{
    if (f.bias) {
        const float2 bias = *(const float2 *)(f.bias + e * f.w.n_out + col);
        v.x += bias.x, v.y += bias.y;
    }
    if (f.res) {
        const uint32_t res = *(const uint32_t *)(f.res + m * f.ld_res + col);
        v.x += bf16_low(res), v.y += bf16_high(res);
    }
    const uint32_t pair = bf16_pack(v.x, v.y);
    *(uint32_t *)(f.out + m * f.ld_out + col) = pair;
    if (f.act)
        f.act[m * (f.w.n_out / 2) + col / 2] = __float2bfloat16_rn(glu_value(f.form, bf16_low(pair), bf16_high(pair)));
}

/* sums [WARPS][MT][8 NT][COLS]: of each warp. */
template <int NT, int MT>
static __device__ __forceinline__ void store_block(const float *sums, const struct few_args &args, int64_t e,
                                                   int64_t col, int first, int n_row)
{
    enum { TILE = 8 * NT * COLS, ROW_PAIRS = COLS / 2 };
    const int depth = args.depth, n_tile = WARPS / depth * MT;
    for (int i = (int)threadIdx.x; i < n_row * n_tile * ROW_PAIRS; i += THREADS) {
        const int c = i % ROW_PAIRS * 2, tile = i / ROW_PAIRS % n_tile, row = i / (ROW_PAIRS * n_tile);
        const int64_t at = col + tile * COLS + c;
        const float *from = sums + (tile / MT * depth * MT + tile % MT) * TILE + row * COLS + c;
        float2 v = {0, 0};
        if (at >= args.s.w.n_out) continue;
        for (int d = 0; d < depth; d++) v.x += from[d * MT * TILE], v.y += from[d * MT * TILE + 1];
        store_pair(args.f, v, e, first + row, at);
    }
}

template <typename FORMAT, int NT, int MT>
static __global__ void __launch_bounds__(THREADS, 2) few_kernel(const __grid_constant__ struct few_args args)
{
    enum { TILE = 8 * NT * COLS };
    extern __shared__ uint4 ring[];
    __shared__ float sums[WARPS * MT * TILE], code[16];
    const struct few_rows &f = args.f;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % args.depth, side = WARPS / args.depth;
    const int64_t block_col = (int64_t)blockIdx.x * side * MT * COLS, col = block_col + warp / args.depth * MT * COLS;
    const int e = f.offs ? find_expert(f.offs, (int)args.s.w.n_exp, blockIdx.y) : 0;
    if (e < 0) return;
    if constexpr (FORMAT::coded)
        if (threadIdx.x < 16) code[threadIdx.x] = FORMAT::code(args.s, threadIdx.x);
    const int begin = f.offs ? f.offs[e] : 0, end = f.offs ? f.offs[e + 1] : (int)f.n_row;
    for (int first = begin; first < end; first += 8 * NT) {
        float acc[MT][NT][4] = {};
        const bf16 *x[NT];
        __syncthreads();
        find_rows<NT>(x, f, first, end);
        const struct weight_ring<FORMAT, MT> w = {
            &args.s, ring, e, col, part *STEP, args.depth *STEP
        };
        if (col < args.s.w.n_out) base_product<FORMAT, NT, MT>(acc, w, code, x);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (part == 0 && f.r && col + m * COLS < args.s.w.n_out)
                add_adapter<NT>(acc[m], f, e, col + m * COLS, first, end);
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sums[(warp * MT + m) * TILE + (8 * t + lane % 4 * 2 + j % 2) * COLS + lane / 4 + j / 2 * 8] =
                        acc[m][t][j];
        }
        __syncthreads();
        store_block<NT, MT>(sums, args, e, block_col, first, min(end - first, 8 * NT));
    }
}

/* ---- host ---- */

static bool is_aligned(const struct few_rows *f)
{
    return ((uintptr_t)f->w.data | (uintptr_t)f->a) % 16 == 0 && f->lda % 8 == 0 &&
           ((uintptr_t)f->la | (uintptr_t)f->res | (uintptr_t)f->out) % 4 == 0 &&
           (f->ld_la | f->ld_res | f->ld_out) % 2 == 0;
}

/* Warps side by side that share no columns, and times 16 columns of each: of packed weights four, which share the rows
 * of a; not by the number of rows, since the order of the sums follows. */
template <typename FORMAT, int NT> static void launch(const struct few_rows *f)
{
    constexpr int MT = FORMAT::coded ? 2 : 1;
    const bool wide = !f->offs && f->w.n_out > 8192;
    const struct few_args args = {*f, source_of(&f->w), wide ? WARPS / 2 : WARPS};
    const dim3 grid(grid_x(ceil_div(f->w.n_out, WARPS / args.depth * MT * COLS)),
                    (unsigned)(f->offs ? MT_MIN(f->n_row, f->w.n_exp) : 1));
    constexpr int bytes = weight_ring<FORMAT, MT>::BYTES;
    allow_shared<few_kernel<FORMAT, NT, MT>>(bytes);
    few_kernel<FORMAT, NT, MT><<<grid, THREADS, bytes, cuda.stream>>>(args);
    CUDA_CHECK_LAUNCH();
}

/* The rows of a pass: those of one matrix; for experts about twice the mean. */
template <typename FORMAT> static void launch_rows(const struct few_rows *f)
{
    const int64_t n = f->offs ? 2 * ceil_div(f->n_row, f->w.n_exp) : f->n_row;
    if (n <= 8)
        launch<FORMAT, 1>(f);
    else
        launch<FORMAT, 2>(f);
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
