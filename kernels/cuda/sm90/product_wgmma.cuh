/* product_wgmma.cuh - what the grouped GEMMs on Hopper (grouped_wgmma.cu in bf16, grouped_wgmma_fp8.cu) and
 * dense_wgmma.cu share: tiles and their scheduler, the stages between producer and consumers, the epilogues. In e4m3
 * two consumer warpgroups share a tile, in bf16 they take tiles in turns (pingpong.cuh). grouped_packed_wgmma.cu uses
 * only the tiles. A row of 128 bytes of shared memory is 64 of the inner dimension in bf16, 128 in e4m3. */
#ifndef MT_CUDA_PRODUCT_WGMMA_H
#define MT_CUDA_PRODUCT_WGMMA_H

#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/sm90/ring_wgmma.cuh"

enum {
    ROWS = 128,
    COLS = 192,
    DEPTH = 64, /* 128 bytes of bf16: one row of the swizzle */
    A_BYTES = ROWS * DEPTH * 2,
    STAGE_BYTES = A_BYTES + COLS * DEPTH * 2, /* of the pipeline */
    CHUNK_BYTES = DEPTH * 128,                /* b with kn: 64 columns of one depth step */
    BAND = 16,                                /* row tiles per band (tile_at) */
    MAX_EXPERTS = GROUPED_EXPERTS,
    LOADERS = 128,
    CONSUMERS = 2 * 128,
    THREADS = CONSUMERS + LOADERS,
    /* GLUs with gates and ups in separate halves; GROUPED_GLU and GROUPED_GLU_BWD themselves are interleaved */
    SWIGLU = GROUPED_EPILOGUES, /* plain SwiGLU: a tile has COLS / 2 columns of each; no bias */
    SWIGLU_BWD,                 /* of plain SwiGLU */
    HALVES_BWD,                 /* of another */
    HALVES_BWD_QUANT
};
static __device__ __host__ constexpr bool is_quant_bwd(int epilogue)
{
    return epilogue == GROUPED_GLU_BWD_QUANT || epilogue == HALVES_BWD_QUANT;
}
static __device__ __host__ constexpr bool is_glu_bwd(int epilogue)
{
    return epilogue == GROUPED_GLU_BWD || epilogue == SWIGLU_BWD || epilogue == HALVES_BWD || is_quant_bwd(epilogue);
}
static __device__ __host__ constexpr int layout_of(int epilogue)
{
    return epilogue == SWIGLU_BWD                                   ? GLU_PLAIN_HALVES
           : epilogue == HALVES_BWD || epilogue == HALVES_BWD_QUANT ? GLU_HALVES
                                                                    : GLU_PAIRS;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- tile scheduler ---- */

struct tiles {                      /* of experts in the order of their tiles */
    int32_t first[MAX_EXPERTS + 1]; /* row tiles before expert i */
    int32_t row[MAX_EXPERTS];       /* first row of expert i */
    int32_t end[MAX_EXPERTS];       /* the row after the last of expert i */
    uint16_t place[MAX_EXPERTS];    /* of expert i in the launch */
    int32_t n_exp, n_col;           /* experts; column tiles */
};
struct tile {
    int32_t e, m, n, n_row; /* expert in the order of the tiles, first row and column, rows */
};

/* Tile number `at` of the launch. *e: index of the expert of an earlier tile, 0 at first. Order: expert by expert,
 * bands of BAND row tiles, column by column in a band. Concurrent tiles thus cover about as many rows as columns. The
 * rows of an expert are in the fewest tiles of at most TILE_ROWS; all but the last have the same number, a multiple of
 * UNIT. */
template <int TILE_ROWS = ROWS, int UNIT = 64, int TILE_COLS = COLS>
static __device__ __forceinline__ struct tile tile_at(const struct tiles *tiles, int at, int *e)
{
    while (at >= tiles->first[*e + 1] * tiles->n_col) (*e)++;
    const int n_row_tile = tiles->first[*e + 1] - tiles->first[*e], end = tiles->end[*e];
    const int in_expert = at - tiles->first[*e] * tiles->n_col, band = in_expert / (BAND * tiles->n_col);
    const int in_band = in_expert - band * BAND * tiles->n_col, height = MT_MIN(BAND, n_row_tile - band * BAND);
    const int even = ((end - tiles->row[*e] + n_row_tile - 1) / n_row_tile + UNIT - 1) / UNIT * UNIT;
    const int each = TILE_ROWS == 128 ? 128 : even; /* of two tiles of at most 128, even the smaller has more than 64 */
    struct tile t;
    t.e = *e;
    t.m = tiles->row[*e] + (band * BAND + in_band % height) * each;
    t.n = in_band / height * TILE_COLS;
    t.n_row = MT_MIN(each, end - t.m);
    return t;
}

/* The sum over lanes 0 .. this one. (With a ballot of lanes instead, ptxas keeps sums of grouped_decode_wgmma.cu in
 * local memory.) */
static __device__ __forceinline__ int sum_upto_lane(int sum)
{
    const int lane = threadIdx.x & 31;
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    return sum;
}

/* Sets the order of the experts: that of the launch if all tiles have one size. Otherwise experts with the largest
 * tiles come first, so that blocks, which take tiles at a fixed stride, have about the same work. */
template <int TILE_ROWS>
static __device__ __forceinline__ void order_experts(struct tiles *tiles, const int32_t *offs, int n_exp)
{
    const int lane = threadIdx.x & 31;
    const int largest = TILE_ROWS == ROWS ? 0 : (TILE_ROWS + 63) / 64; /* sizes of tiles, in units of 64 rows */
    int n = 0;
    for (int size = largest; size >= 0; size--) {
        for (int base = 0; base < n_exp; base += 32) {
            const int e = MT_MIN(base + lane, n_exp - 1), n_row = offs[e + 1] - offs[e];
            const bool next = TILE_ROWS == ROWS || (MT_MIN(n_row, TILE_ROWS) + 63) / 64 == size;
            const int upto = sum_upto_lane(next && base + lane < n_exp);
            if (next && base + lane < n_exp) tiles->place[n + upto - 1] = (uint16_t)e;
            n += __shfl_sync(~0u, upto, 31);
        }
    }
    __syncwarp();
}

/* One warp fills `tiles`: the order of the experts, and a prefix sum of their row tiles. */
template <int TILE_ROWS = ROWS, int TILE_COLS = COLS>
static __device__ __forceinline__ void count_tiles(struct tiles *tiles, const struct grouped &g)
{
    const int lane = threadIdx.x & 31, n_exp = (int)g.count;
    const int32_t *offs = g.offs + g.first;
    int before = 0;
    order_experts<TILE_ROWS>(tiles, offs, n_exp);
    for (int base = 0; base < n_exp; base += 32) {
        const int i = MT_MIN(base + lane, n_exp - 1), e = tiles->place[i], start = offs[e], end = offs[e + 1];
        const int n_tile = base + lane < n_exp ? (end - start + TILE_ROWS - 1) / TILE_ROWS : 0;
        const int sum = sum_upto_lane(n_tile);
        tiles->row[i] = start;
        tiles->end[i] = end;
        if (base + lane < n_exp) tiles->first[i + 1] = before + sum;
        before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) {
        tiles->first[0] = 0;
        tiles->n_exp = n_exp;
        tiles->n_col = (int)((g.n_out + TILE_COLS - 1) / TILE_COLS);
    }
}

/* ---- loading ---- */

/* Loads b's part of a stage. half: 0, or for a tile of gates and ups the first column of the ups. */
template <bool KN>
static __device__ __forceinline__ void load_b(uint32_t to, const CUtensorMap *map, uint32_t full, int k, int n, int e,
                                              int half)
{
    if (!KN && half) {
        tma_load(to, map, full, k, n / 2, e);
        tma_load(to + COLS / 2 * DEPTH * 2, map, full, k, half + n / 2, e);
    } else if (!KN) {
        tma_load(to, map, full, k, n, e);
    }
#pragma unroll
    for (int i = 0; KN && i < COLS / 64; i++) tma_load(to + i * CHUNK_BYTES, map, full, n + 64 * i, k, e);
}

/* ---- products ---- */

/* Descriptor offsets of depth k, in units of 16 bytes: 2 bytes per k in a row, or with kn a row of 128 bytes per k. */
static __device__ __forceinline__ uint64_t k_major(int k) { return (uint64_t)(k * 2 / 16); }
template <bool KN> static __device__ __forceinline__ uint64_t b_step(int k) { return KN ? k * 128 / 16 : k_major(k); }

/* ---- epilogue ----
 * Its inputs are prefetched: the bias through shared memory; pre into L2 during the products, and from there into
 * registers one step ahead. Steps of 64 columns are a loop that shifts the sums down, since unrolled code would not fit
 * the instruction cache. */

/* A thread's rows of the tile are row and row + 8. */
static __device__ __forceinline__ int row_of_thread(void) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

static __device__ __forceinline__ void shift_down(float (&sums)[COLS / 2])
{
#pragma unroll
    for (int j = 0; j + 32 < COLS / 2; j++) sums[j] = sums[j + 32];
}
/* v: row `half` of this thread, 32 columns of the sums from column 2 * first on. */
static __device__ __forceinline__ void row_of_sums(float v[4][2], const float (&sums)[COLS / 2], int first, int half)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[j][0] = sums[first + 4 * j + 2 * half];
        v[j][1] = sums[first + 4 * j + 2 * half + 1];
    }
}

/* Two columns of the tile's bias; the first COLS / 2 threads of a warpgroup cover the tile. */
static __device__ __forceinline__ float2 load_bias(const struct grouped &g, const struct tile &t)
{
    const int64_t n = t.n + threadIdx.x % 128 * 2;
    if (!g.bias || n >= g.n_out) return make_float2(0.0f, 0.0f);
    return __ldg((const float2 *)(g.bias + grouped_expert(g, g.first + t.e) * g.n_out + n));
}

template <int EPILOGUE>
static __device__ __forceinline__ void finish(float (&sums)[COLS / 2], const struct grouped &g, const struct tile &t,
                                              const float *bias)
{
    constexpr bool straight = EPILOGUE == GROUPED_STORE;
    const int row = row_of_thread(), pair = threadIdx.x % 4 * 2;
#pragma unroll(straight ? COLS / 64 : 1)
    for (int i = 0; i < COLS; i += 64) {
        if (t.n + i >= g.n_out) break;
#pragma unroll
        for (int c = 0; c < 64; c += 32) {
            float v[4][2], b[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 x = *(const float2 *)(bias + i + c + 8 * j + pair);
                b[j][0] = x.x;
                b[j][1] = x.y;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                row_of_sums(v, sums, (straight ? i / 2 : 0) + c / 2, half);
                grouped_finish<EPILOGUE>(g, t.m + row + 8 * half, t.n + i + c, row + 8 * half < t.n_row, v, b);
            }
        }
        if (!straight) shift_down(sums);
    }
}

/* GROUPED_GLU_BWD: prefetched values of this thread's two rows: index in g.gate; the router's gate; 8 of 32 columns of
 * pre. */
struct two_rows {
    int slot[2];
    float weight[2];
    struct pre8 pre[2];
};
template <int LAYOUT>
static __device__ __forceinline__ void load_pre(struct two_rows *rows, const struct grouped &g, const struct tile &t)
{
    constexpr int wide = LAYOUT == GLU_PAIRS ? 2 : 1; /* elements of pre for a column, next to each other */
    const int n_out = (int)g.n_out, first = t.n + glu_column<LAYOUT>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of_thread() + 8 * half;
        rows->pre[half] = load_columns<LAYOUT>(g.pre + (int64_t)(t.m + row) * 2 * n_out + wide * first, n_out,
                                               row < t.n_row ? n_out - first : 0);
    }
}

/* AHEAD_COLS: columns by which pre is prefetched into L2 ahead; 0: the caller has prefetched the tile. */
template <bool QUANT, int LAYOUT, int AHEAD_COLS = 0>
static __device__ __forceinline__ void finish_glu_bwd(float (&sums)[COLS / 2], const struct grouped &g,
                                                      const struct tile &t, struct two_rows *rows)
{
    constexpr bool pairs = LAYOUT == GLU_PAIRS;
    constexpr int wide = pairs ? 2 : 1, SECOND = pairs ? 16 : 4; /* where a lane's second four columns begin */
    const int row = row_of_thread(), first = t.n + glu_column<LAYOUT>(), n_out = (int)g.n_out;
    const int64_t from_out = g.pre - g.out;
    bf16 *out[2], *act[2];
    int cols[2]; /* for each row, columns from this thread's first on to n_out; 0: no such row */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t m = t.m + row + 8 * half;
        cols[half] = row + 8 * half < t.n_row ? n_out - first : 0;
        act[half] = g.act + m * n_out + first;
        out[half] = g.out + m * 2 * n_out + wide * first;
    }
#pragma unroll 1
    for (int i = 0; i < COLS && t.n + i < n_out; i += GROUPED_PART) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < GROUPED_PART; c += 32) {
            const struct pre8 pre[2] = {rows->pre[0], rows->pre[1]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bf16 *next = out[half] + from_out + wide * (c + 32);
                if (AHEAD_COLS && i + c + AHEAD_COLS < COLS && c + AHEAD_COLS < cols[half]) {
                    prefetch_line(next + wide * (AHEAD_COLS - 32));
                    if (!pairs) prefetch_line(next + AHEAD_COLS - 32 + n_out);
                }
                rows->pre[half] = load_columns<LAYOUT>(next, n_out, i + c + 32 < COLS ? cols[half] - c - 32 : 0);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[4][2], x[8];
                row_of_sums(v, sums, c / 2, half);
                glu_columns<LAYOUT>(x, v);
                if (c < cols[half])
                    sum[half] += grouped_glu_bwd8<QUANT, LAYOUT, SECOND>(g, out[half] + wide * c, act[half] + c, x,
                                                                         rows->weight[half], pre[half],
                                                                         !pairs || c + SECOND < cols[half]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float all = quad_sum(sum[half]);
            if (threadIdx.x % 4 == 0 && row + 8 * half < t.n_row)
                g.dgate_part[(t.n + i) / GROUPED_PART * g.n_row + t.m + row + 8 * half] = all;
            act[half] += GROUPED_PART;
            out[half] += wide * GROUPED_PART;
            cols[half] -= GROUPED_PART;
        }
        shift_down(sums);
    }
}

#endif
/* ---- host ---- */

/* n_mat matrices [n_row, n_col] bf16, rows ld apart, in boxes of box_rows x 64. */
static CUtensorMap tensor_map(const bf16 *base, int64_t n_mat, int64_t n_row, int64_t n_col, int64_t ld, int box_rows)
{
    const int64_t size[3] = {n_col, n_row, n_mat}, stride[2] = {ld * 2, n_row * ld * 2}, box[3] = {64, box_rows, 1};
    return sm90_tensor_map(base, size, stride, box);
}

#endif
