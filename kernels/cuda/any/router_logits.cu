/* router_logits.cu - logits of a router with weights in bf16, where router.cu does not leave them to cuBLASLt.
 * Math: logits = x W^T + bias.
 * Shapes: x [T, D] bf16 (a view), W [E, D] bf16, logits [T, E] f32.
 * Needs: D % 8 == 0, rows of x 16-byte aligned.
 * Grid: eight warps for 32 tokens by 32 experts share the summed index: each takes every eighth part of 64 and has
 *   separate sums, which are added in the order of the warps. 33 KiB of shared memory, two blocks per SM; 128
 *   registers. Where this leaves multiprocessors idle, a block has 16 tokens by 8 experts and loads three parts at
 *   once; the bits are the same.
 * Bound: 2 T D bytes per 32 experts: memory bound. With few tokens the time is that of a warp's loads, one part after
 *   the other.
 * Numerics: products of bf16 are exact; f32 sums, in the same order for all columns, so that equal rows of W give equal
 *   logits; 64 products are summed by the tensor cores, then added with one rounding. */
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { WARPS = 8, THREADS = WARPS * 32, DEPTH = 64 };

/* A block's tokens and experts. AHEAD: parts of the summed index that a warp loads at once. */
template <int N_TOKEN, int N_EXPERT, int N_AHEAD> struct tile {
    enum { TOKENS = N_TOKEN, EXPERTS = N_EXPERT, AHEAD = N_AHEAD, STRIDE = N_EXPERT + 1 };
    float sum[WARPS][N_TOKEN * STRIDE];
};
using MANY_TOKENS = struct tile<32, 32, 1>;
using FEW_TOKENS = struct tile<16, 8, 3>;

/* Loads columns col + 8q .. col + 8q + 7 of COUNT rows lane/4 + 8j, for lane 4i + q; zeros after column n_in. Rows
 * after the last one repeat it, and their results are not stored. x and W permute the summed index within 32 alike, so
 * that a lane's operands are contiguous: four columns for one mma, four for the next. */
template <int COUNT>
static __device__ __forceinline__ void fetch(uint4 to[COUNT], const bf16 *p, int ld, int last, int col, int n_in)
{
    const int row = (int)threadIdx.x % 32 / 4, at = col + (int)threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        to[j] = at < n_in ? load16(p + min(row + 8 * j, last) * ld + at) : make_uint4(0, 0, 0, 0);
}

/* sum [tiles of 16 tokens, of 8 experts] += x w^T over 64 columns */
template <int M, int N>
static __device__ __forceinline__ void add_part(float sum[M][N][4], const uint4 x[2][2 * M], const uint4 w[2][N])
{
#pragma unroll
    for (int tile = 0; tile < M * N; tile++) {
        const int m = tile / N, n = tile % N;
        float part[4] = {};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint4 u = x[k][2 * m], v = x[k][2 * m + 1];
            const uint32_t first[4] = {u.x, v.x, u.y, v.y}, second[4] = {u.z, v.z, u.w, v.w};
            const uint32_t b[4] = {w[k][n].x, w[k][n].y, w[k][n].z, w[k][n].w};
            mma_bf16(part, first, b);
            mma_bf16(part, second, b + 2);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sum[m][n][i] += part[i];
    }
}

template <typename TILE>
static __global__ void __launch_bounds__(THREADS, 2)
    logits_kernel(float *logits, int64_t ld, const bf16 *x, int64_t ldx, const struct weight w, const float *bias,
                  int64_t n_tok)
{
    enum { TOKENS = TILE::TOKENS, EXPERTS = TILE::EXPERTS, STRIDE = TILE::STRIDE, M = TOKENS / 16, N = EXPERTS / 8 };
    __shared__ TILE all;
    const int64_t first = (int64_t)blockIdx.x * TOKENS, first_exp = (int64_t)blockIdx.y * EXPERTS;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_in = (int)w.n_in;
    const bf16 *rows = x + first * ldx, *of_exp = (const bf16 *)w.data + first_exp * n_in;
    const int last_row = (int)MT_MIN(TOKENS, n_tok - first) - 1;
    const int last_exp = (int)MT_MIN(EXPERTS, w.n_out - first_exp) - 1;
    float sum[M][N][4] = {};
#pragma unroll TILE::AHEAD
    for (int col = warp * DEPTH; col < n_in; col += WARPS * DEPTH) {
        uint4 a[2][2 * M], b[2][N];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            fetch<2 * M>(a[k], rows, (int)ldx, last_row, col + 32 * k, n_in);
            fetch<N>(b[k], of_exp, n_in, last_exp, col + 32 * k, n_in);
        }
        add_part<M, N>(sum, a, b);
    }
#pragma unroll
    for (int i = 0; i < 4 * M * N; i++) {
        const int m = i / (4 * N), n = i / 4 % N, k = i % 4, row = 16 * m + lane / 4 + k / 2 * 8;
        all.sum[warp][row * STRIDE + 8 * n + lane % 4 * 2 + k % 2] = sum[m][n][k];
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < (last_row + 1) * EXPERTS; i += THREADS) {
        const int row = i / EXPERTS, e = i % EXPERTS;
        if (e > last_exp) continue;
        float v = all.sum[0][row * STRIDE + e];
#pragma unroll
        for (int k = 1; k < WARPS; k++) v += all.sum[k][row * STRIDE + e];
        logits[(first + row) * ld + first_exp + e] = v + (bias ? bias[first_exp + e] : 0);
    }
}

template <typename TILE>
static void launch(struct tensor logits, struct tensor x, const struct weight *w, const float *bias)
{
    const dim3 grid(grid_x(ceil_div(x.shape[0], TILE::TOKENS)), (unsigned)ceil_div(w->n_out, TILE::EXPERTS));
    MT_REQUIRE(x.ld <= INT32_MAX / TILE::TOKENS && w->n_in <= INT32_MAX / TILE::EXPERTS, "a router of %lld columns",
               (long long)x.ld);
    logits_kernel<TILE>
        <<<grid, THREADS, 0, cuda.stream>>>(f32_ptr(logits), logits.ld, bf16_ptr(x), x.ld, *w, bias, x.shape[0]);
    CUDA_CHECK_LAUNCH();
}

void cuda_router_logits(struct tensor logits, struct tensor x, const struct weight *w, const float *bias)
{
    const int64_t n_few = ceil_div(x.shape[0], FEW_TOKENS::TOKENS) * ceil_div(w->n_out, FEW_TOKENS::EXPERTS);
    n_few <= cuda.n_sm ? launch<FEW_TOKENS>(logits, x, w, bias) : launch<MANY_TOKENS>(logits, x, w, bias);
}
