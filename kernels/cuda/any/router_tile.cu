/* router_tile.cu - the products of a router whose weights are not in bf16, in tiles.
 * Math: logits = x W^T + bias; dx += dl W.
 * Shapes: x, dx [T, D] bf16 (views), W [E, D], logits [T, E] f32, dl [T, ..] f32 with zeros from E to a multiple of 8.
 * Needs: weight_loads8; 16-byte aligned rows.
 * Grid: tiles of 64 tokens by 64 columns (32 for E <= 32), 128 threads, 40 (30) KiB of shared memory.
 * Numerics: products in TF32 on tensor cores. x, of 8 significant bits (TF32: 11), is exact; W and dl are split into
 *   two TF32 numbers, which is as accurate as f32. Sums in f32, in the same order for all columns, so that equal rows
 *   of W give equal logits; each 64 products are added with one rounding. */
#include <type_traits>

#include "kernels/cuda/format/formats.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { TOKENS = 64, DEPTH = 64, STRIDE = 80, THREADS = 128 };

/* ---- tile products. A row of a tile has DEPTH floats of the summed index. Rows are STRIDE floats apart, so that
 * 16-byte reads of eight lanes, four in each of two rows, have no bank conflicts. */

/* The 11 leading bits of v; minus(v, leading(v)) is the rest. */
static __device__ inline float4 leading(float4 v)
{
    return make_float4(
        __uint_as_float(__float_as_uint(v.x) & 0xffffe000u), __uint_as_float(__float_as_uint(v.y) & 0xffffe000u),
        __uint_as_float(__float_as_uint(v.z) & 0xffffe000u), __uint_as_float(__float_as_uint(v.w) & 0xffffe000u));
}
static __device__ inline float4 minus(float4 v, float4 u)
{
    return make_float4(v.x - u.x, v.y - u.y, v.z - u.z, v.w - u.w);
}

static __device__ inline void mma_tf32(float c[4], float a0, float a1, float a2, float a3, float b0, float b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
                   "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/* c += a b^T over 16 of the summed index, for lane 4g + t; a: rows g and g+8. A lane's four values are columns t and
 * t+4 of two steps of 8; a and b have the same order. */
static __device__ inline void mma_16(float c[4], const float4 a[2], float4 b)
{
    mma_tf32(c, a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
    mma_tf32(c, a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
}

/* sum += a b^T over the first `depth` columns of tiles a [64] and b [COLS]; each of the four warps computes 32 rows and
 * COLS/2 columns. Lane 4g + t: sum[i][j] holds rows 16i + g and +8, columns 8j + 2t and +1. */
template <int COLS, bool SPLIT_A, bool SPLIT_B>
static __device__ inline void tile_product(float sum[2][COLS / 16][4], const float *a, const float *b, int depth)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    float part[2][COLS / 16][4] = {};
    a += (warp % 2 * 32 + lane / 4) * STRIDE + lane % 4 * 4;
    b += (warp / 2 * (COLS / 2) + lane / 4) * STRIDE + lane % 4 * 4;
#pragma unroll 2
    for (int k = 0; k < depth; k += 16) {
        float4 of_a[2][2], rest_a[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 v = *(const float4 *)(a + 8 * i * STRIDE + k);
            of_a[i / 2][i % 2] = SPLIT_A ? leading(v) : v;
            if (SPLIT_A) rest_a[i / 2][i % 2] = minus(v, leading(v));
        }
#pragma unroll
        for (int j = 0; j < COLS / 16; j++) {
            const float4 v = *(const float4 *)(b + 8 * j * STRIDE + k), of_b = SPLIT_B ? leading(v) : v;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (SPLIT_A) mma_16(part[i][j], rest_a[i], of_b);
                if (SPLIT_B) mma_16(part[i][j], of_a[i], minus(v, of_b));
                mma_16(part[i][j], of_a[i], of_b);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < COLS / 16; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) sum[i][j][k] += part[i][j][k];
        }
    }
}

/* Row and column in the block's tile of sum[i][j][k] of this thread. */
static __device__ inline int sum_row(int i, int k)
{
    return (int)threadIdx.x / 32 % 2 * 32 + 16 * i + (int)threadIdx.x % 32 / 4 + k / 2 * 8;
}
static __device__ inline int sum_col(int cols, int j, int k)
{
    return (int)threadIdx.x / 64 * (cols / 2) + 8 * j + (int)threadIdx.x % 4 * 2 + k % 2;
}

/* Threads fill tiles in pieces of eight columns: row and column of a thread's piece i. */
static __device__ inline int piece_row(int i) { return ((int)threadIdx.x + THREADS * i) / (DEPTH / 8); }
static __device__ inline int piece_col() { return (int)threadIdx.x % (DEPTH / 8) * 8; }

/* As with_decoder, for all formats but bf16, for which router_logits.cu and cuBLASLt compute the products. */
template <typename LAUNCH> static void with_tile_decoder(enum weight_format f, const LAUNCH &launch)
{
    with_decoder(f, [&](auto decoder) {
        if constexpr (!std::is_same_v<decltype(decoder), device_bf16>) launch(decoder);
    });
}

/* ---- forward */

/* Loads the thread's pieces of a tile: rows from `first` on, columns from `col` on; zeros outside [n_row, dim]. */
template <int N>
static __device__ inline void fetch(uint4 piece[N], const bf16 *p, int64_t ld, int64_t first, int64_t n_row,
                                    int64_t col, int64_t dim)
{
    col += piece_col();
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int64_t row = first + piece_row(i);
        piece[i] = row < n_row && col < dim ? load16(p + row * ld + col) : make_uint4(0, 0, 0, 0);
    }
}

/* logits of 64 tokens and COLS experts, of any format but bf16: decoded at use and split into two TF32 numbers. */
template <typename FORMAT, int COLS>
static __global__ void __launch_bounds__(THREADS) logits_kernel(float *logits, int64_t ld, const bf16 *x, int64_t ldx,
                                                                const struct source s, const float *bias, int64_t n_tok)
{
    const struct weight &w = s.w;
    __shared__ __align__(16) float a[TOKENS * STRIDE], b[COLS * STRIDE];
    const int64_t first = (int64_t)blockIdx.x * TOKENS, first_exp = (int64_t)blockIdx.y * COLS;
    float sum[2][COLS / 16][4] = {};
    uint4 of_x[4];
    fetch<4>(of_x, x, ldx, first, n_tok, 0, w.n_in);
    for (int64_t col = 0; col < w.n_in; col += DEPTH) {
#pragma unroll
        for (int i = 0; i < COLS / 16; i++) {
            const int64_t e = first_exp + piece_row(i), at = col + piece_col();
            float v[8] = {};
            if (e < w.n_out && at < w.n_in) weight_load8<FORMAT>(v, s, e * w.n_in + at);
            store_f32x8(b + piece_row(i) * STRIDE + piece_col(), v);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v[8];
            unpack8(v, of_x[i]);
            store_f32x8(a + piece_row(i) * STRIDE + piece_col(), v);
        }
        __syncthreads(); /* the loads of the next step overlap with the product */
        fetch<4>(of_x, x, ldx, first, n_tok, col + DEPTH, w.n_in);
        tile_product<COLS, false, true>(sum, a, b, DEPTH);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < COLS / 16; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int64_t t = first + sum_row(i, k), e = first_exp + sum_col(COLS, j, k);
                if (t < n_tok && e < w.n_out) logits[t * ld + e] = sum[i][j][k] + (bias ? bias[e] : 0);
            }
        }
    }
}

void cuda_router_logits_tile(struct tensor logits, struct tensor x, const struct weight *w, const float *bias)
{
    const int cols = w->n_out <= 32 ? 32 : 64;
    const dim3 grid(grid_x(ceil_div(x.shape[0], TOKENS)), (unsigned)ceil_div(w->n_out, cols));
    with_tile_decoder(w->format, [&](auto decoder) {
        const auto kernel = cols == 32 ? logits_kernel<decltype(decoder), 32> : logits_kernel<decltype(decoder), 64>;
        kernel<<<grid, THREADS, 0, cuda.stream>>>(f32_ptr(logits), logits.ld, bf16_ptr(x), x.ld, source_of(w), bias,
                                                  x.shape[0]);
    });
    CUDA_CHECK_LAUNCH();
}

/* ---- backward */

/* dx += dl W for 64 tokens and 64 columns, of any format but bf16. */
template <typename FORMAT>
static __global__ void __launch_bounds__(THREADS)
    dx_kernel(bf16 *dx, int64_t lddx, const float *dl, int64_t ld_dl, const struct source s, int64_t n_tok)
{
    const struct weight &w = s.w;
    __shared__ __align__(16) float a[TOKENS * STRIDE], b[64 * STRIDE];
    const int64_t first = (int64_t)blockIdx.x * TOKENS, first_col = (int64_t)blockIdx.y * 64;
    const int n_exp = (int)w.n_out;
    float sum[2][4][4] = {}, v[8];
    uint4 old[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t t = first + piece_row(i), col = first_col + piece_col();
        old[i] = t < n_tok && col < w.n_in ? load16(dx + t * lddx + col) : make_uint4(0, 0, 0, 0);
    }
    for (int e = 0; e < n_exp; e += DEPTH) {
        const int depth = min(DEPTH, (n_exp - e + 15) / 16 * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t t = first + piece_row(i);
            const int at = e + piece_col();
            for (int k = 0; k < 8; k++) v[k] = 0;
            if (t < n_tok && at < ld_dl) load_f32x8(v, dl + t * ld_dl + at);
            store_f32x8(a + piece_row(i) * STRIDE + piece_col(), v);
        }
#pragma unroll 2
        for (int i = 0; i < 4; i++) { /* transposed: eight columns of one expert become eight rows */
            const int k = (int)threadIdx.x % 64, row = ((int)threadIdx.x / 64 + 2 * i) * 8;
            const int64_t at = (e + k) * w.n_in + first_col + row;
            const bool in = e + k < n_exp && first_col + row < w.n_in;
            for (int n = 0; n < 8; n++) v[n] = 0;
            if (in) weight_load8<FORMAT>(v, s, at);
#pragma unroll
            for (int n = 0; n < 8; n++) b[(row + n) * STRIDE + k] = v[n];
        }
        __syncthreads();
        tile_product<64, true, true>(sum, a, b, depth);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) a[sum_row(i, k) * STRIDE + sum_col(64, j, k)] = sum[i][j][k];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t t = first + piece_row(i), col = first_col + piece_col();
        float u[8];
        if (t >= n_tok || col >= w.n_in) continue;
        unpack8(v, old[i]);
        load_f32x8(u, a + piece_row(i) * STRIDE + piece_col());
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += u[k];
        store16(dx + t * lddx + col, pack8(v));
    }
}

void cuda_router_dx_tile(struct tensor dx, struct tensor dl, const struct weight *w)
{
    const dim3 grid(grid_x(ceil_div(dx.shape[0], TOKENS)), (unsigned)ceil_div(w->n_in, 64));
    with_tile_decoder(w->format, [&](auto decoder) {
        dx_kernel<decltype(decoder)>
            <<<grid, THREADS, 0, cuda.stream>>>(bf16_ptr(dx), dx.ld, f32_ptr(dl), dl.ld, source_of(w), dx.shape[0]);
    });
    CUDA_CHECK_LAUNCH();
}
