/* fp8.cu - FP8 products of experts (struct proj_fp8): the rows that they read, and the experts' codes.
 *
 * Math: kernels/ops/ops.h. Row m: s = e4m3_row_step(max |x|), codes e4m3(x / s), to nearest even. A row of a token is
 *   written once for each of its J experts.
 * Needs: rows of a multiple of 8 elements, 16-byte aligned; MXFP4 for the experts' codes.
 * Grid: rows: one block of 128 threads per row, which holds up to 3072 or 6144 columns in registers; codes: blocks of
 *   32 x 32 elements, transposed through shared memory, once, while the model is loaded.
 * Bound: rows of tokens of width D 2*T*D + T*J*(D + 4) bytes, rows in expert order 3*M*D + 4*M: memory bound.
 * Numerics: the bits of kernels/format/minifloat.h. */
#include <cuda_fp8.h>

#include "kernels/cuda/format/dense_words.cuh"
#include "kernels/cuda/parts/grouped_fp8.h"
#include "kernels/format/minifloat.h"

enum {
    THREADS = 128, /* of a row */
    NARROW = 3,    /* parts of eight columns that a thread holds: rows of 3072 columns, or of 6144 */
    WIDE = 6,
    WARP = 32,
    TILE = 32,
    BLOCK = 32,
    RANGE_THREADS = 256
};

/* ---- rows ---- */

/* The largest magnitude of eight values, as the bits of an f32: the bits of a NaN are above those of all numbers. */
static __device__ __forceinline__ uint32_t most_of(uint4 v)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) most = max(most, max(w[i] << 16 & 0x7fffffffu, w[i] & 0x7fff0000u));
    return most;
}

static __device__ __forceinline__ uint32_t codes4(const float x[4], float inverse)
{
    const float2 low = {x[0] * inverse, x[1] * inverse}, high = {x[2] * inverse, x[3] * inverse};
    return (uint32_t)__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
           (uint32_t)__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3) << 16;
}

/* The expert of row m. */
static __device__ __forceinline__ int expert_of(const struct fp8_source &from, int64_t m)
{
    int low = 0, high = (int)from.n_exp - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (from.offs[middle + 1] <= m)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static __device__ __forceinline__ uint32_t row_most(uint32_t most)
{
    __shared__ uint32_t warps[THREADS / WARP];
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) most = max(most, warps[i]);
    return most;
}

/* Columns from `first` on of a row: this thread's parts of eight. */
template <int HOLD>
static __device__ __forceinline__ void load_span(uint4 (&held)[HOLD], const bf16 *row, int first, int n_in)
{
#pragma unroll
    for (int i = 0; i < HOLD; i++) {
        const int col = first + (i * THREADS + (int)threadIdx.x) * 8;
        held[i] = col < n_in ? __ldg((const uint4 *)(row + col)) : make_uint4(0, 0, 0, 0);
    }
}

/* Writes row m for products in bf16: rounded to e4m3 if the expert has FP8 products (expert_step > 0), else
 * unchanged. */
template <int HOLD>
static __device__ __forceinline__ void write_values(const struct fp8_rows &to, const struct fp8_source &from, int64_t m,
                                                    const uint4 (&held)[HOLD], int first, float step)
{
    const bool exact = from.expert_step[expert_of(from, m)] > 0.0f;
#pragma unroll
    for (int i = 0; i < HOLD; i++) {
        const int col = first + (i * THREADS + (int)threadIdx.x) * 8;
        float x[8];
        if (col >= from.n_in) break;
        unpack8(x, held[i]);
        if (exact)
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] = e4m3_row_value(x[j], step);
        *(uint4 *)(to.values + m * from.n_in + col) = pack8(x);
    }
}

template <int HOLD>
static __device__ __forceinline__ void write_codes(const struct fp8_rows &to, const struct fp8_source &from, int64_t m,
                                                   const uint2 (&codes)[HOLD], int first)
{
#pragma unroll
    for (int i = 0; i < HOLD; i++) {
        const int col = first + (i * THREADS + (int)threadIdx.x) * 8;
        if (col < from.n_in) *(uint2 *)(to.codes + m * from.n_in + col) = codes[i];
    }
}

/* One block per row of the source. Rows of more than HOLD * THREADS * 8 columns are read twice. */
template <bool CODES, int HOLD>
static __global__ void __launch_bounds__(THREADS) rows_kernel(struct fp8_rows to, struct fp8_source from)
{
    const int64_t at = blockIdx.x;
    const int n_in = (int)from.n_in, span = HOLD * THREADS * 8, n_copy = from.slot_row ? (int)from.top_k : 1;
    const bf16 *row = from.x + at * from.ld;
    uint4 held[HOLD];
    uint32_t most = 0;
    for (int first = 0; first < n_in; first += span) {
        load_span(held, row, first, n_in);
#pragma unroll
        for (int i = 0; i < HOLD; i++) most = max(most, most_of(held[i]));
    }
    const float step = e4m3_row_step(__uint_as_float(row_most(most)));
    const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(step));
    for (int first = 0; first < n_in; first += span) {
        uint2 codes[HOLD];
        if (n_in > span) load_span(held, row, first, n_in);
#pragma unroll
        for (int i = 0; i < HOLD && CODES; i++) {
            float x[8];
            unpack8(x, held[i]);
            codes[i] = make_uint2(codes4(x, inverse), codes4(x + 4, inverse));
        }
        for (int j = 0; j < n_copy; j++) {
            const int64_t m = from.slot_row ? from.slot_row[at * n_copy + j] : at;
            if (!CODES) write_values(to, from, m, held, first, step);
            if (CODES) write_codes(to, from, m, codes, first);
            if (CODES && first == 0 && threadIdx.x == 0) to.step[m] = step;
        }
    }
}

template <bool CODES> static void launch_rows(const struct fp8_rows *to, const struct fp8_source *from)
{
    const int64_t n = from->slot_row ? from->n_tok : from->n_row;
    if (from->n_in <= NARROW * THREADS * 8)
        rows_kernel<CODES, NARROW><<<grid_x(n), THREADS, 0, cuda.stream>>>(*to, *from);
    else
        rows_kernel<CODES, WIDE><<<grid_x(n), THREADS, 0, cuda.stream>>>(*to, *from);
    CUDA_CHECK_LAUNCH();
}

void cuda_fp8_rows(const struct fp8_rows *to, const struct fp8_source *from)
{
    MT_REQUIRE(from->n_in % 8 == 0 && from->n_in < INT32_MAX / 2 && from->ld % 8 == 0 && grouped_aligned(from->x),
               "rows of %lld, %lld apart", (long long)from->n_in, (long long)from->ld);
    if (from->n_row == 0) return;
    to->codes ? launch_rows<true>(to, from) : launch_rows<false>(to, from);
}

/* ---- experts ---- */

static __global__ void range_start_kernel(int32_t *range, int n_exp)
{
    const int e = blockIdx.x * RANGE_THREADS + threadIdx.x;
    if (e < n_exp) range[2 * e] = 255, range[2 * e + 1] = -1;
}

/* Integers: the order of the atomics does not matter. */
static __global__ void __launch_bounds__(RANGE_THREADS)
    range_kernel(int32_t *range, const uint8_t *nibbles, const uint8_t *scale, int64_t n_block)
{
    const int64_t e = blockIdx.y;
    int low = 255, high = -1;
    for (int64_t b = (int64_t)blockIdx.x * RANGE_THREADS + threadIdx.x; b < n_block;
         b += (int64_t)gridDim.x * RANGE_THREADS) {
        const uint4 v = *(const uint4 *)(nibbles + (e * n_block + b) * (BLOCK / 2));
        const int byte = scale[e * n_block + b];
        if (!((v.x | v.y | v.z | v.w) & 0x77777777u)) continue;
        low = min(low, byte);
        high = max(high, byte);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (threadIdx.x % WARP == 0) {
        atomicMin(range + 2 * e, low);
        atomicMax(range + 2 * e + 1, high);
    }
}

extern "C" void cuda_mx_range(struct device *dev, struct tensor range, const struct weight *w)
{
    const int64_t n_block = w->n_out * w->n_in / BLOCK;
    MT_REQUIRE(w->n_exp <= UINT16_MAX && grouped_aligned(w->data), "%lld experts", (long long)w->n_exp);
    range_start_kernel<<<grid_x(ceil_div(w->n_exp, RANGE_THREADS)), RANGE_THREADS, 0, cuda.stream>>>(
        (int32_t *)range.data, (int)w->n_exp);
    CUDA_CHECK_LAUNCH();
    range_kernel<<<dim3(32, (unsigned)w->n_exp), RANGE_THREADS, 0, cuda.stream>>>(
        (int32_t *)range.data, (const uint8_t *)w->data, w->scale, n_block);
    CUDA_CHECK_LAUNCH();
}

/* A block has TILE x TILE elements of an expert. each: bytes of an expert in y: 2 n_out n_in for codes and their
 * transpose (bf16 values where step is 0), or n_out n_in for the transpose alone. */
static __global__ void __launch_bounds__(TILE *TILE / 4)
    codes_kernel(uint8_t *y, const uint8_t *nibbles, const uint8_t *scale, const float *step, int64_t n_out,
                 int64_t n_in, int64_t each)
{
    __shared__ uint8_t tile[TILE][TILE + 4];
    const int64_t e = blockIdx.z, n = n_out * n_in, col = (int64_t)blockIdx.x * TILE + threadIdx.x;
    const int64_t first = (int64_t)blockIdx.y * TILE;
    const bool both = each > n;
    uint8_t *codes = y + e * each, *transposed = codes + each - n;
    const float s = step[e], inverse = __uint_as_float(0x7f000000u - __float_as_uint(s));
    for (int i = threadIdx.y; i < TILE; i += TILE / 4) {
        const int64_t row = first + i, at = row * n_in + col;
        if (row >= n_out || col >= n_in) continue;
        const uint32_t pair = nibbles[(e * n + at) / 2], byte = scale[(e * n + at) / BLOCK];
        const float x = e2m1_value(at % 2 ? pair >> 4 : pair & 15) * e8m0_scale(byte);
        const uint8_t code = (uint8_t)__nv_cvt_float_to_fp8(x * inverse, __NV_SATFINITE, __NV_E4M3);
        tile[i][threadIdx.x] = code;
        if (both && s > 0.0f)
            codes[at] = code;
        else if (both)
            ((bf16 *)codes)[at] = __float2bfloat16_rn(x);
    }
    __syncthreads();
    for (int i = threadIdx.y; i < TILE && s > 0.0f; i += TILE / 4) {
        const int64_t row = (int64_t)blockIdx.x * TILE + i, at = first + threadIdx.x; /* of the transpose */
        if (row < n_in && at < n_out) transposed[row * n_out + at] = tile[threadIdx.x][i];
    }
}

extern "C" void cuda_expert_codes(struct device *dev, struct tensor y, const struct weight *w, struct tensor step)
{
    const int64_t rows = ceil_div(w->n_out, TILE);
    MT_REQUIRE(rows <= UINT16_MAX && w->n_exp <= UINT16_MAX, "%lld experts of %lld rows", (long long)w->n_exp,
               (long long)w->n_out);
    codes_kernel<<<dim3(grid_x(ceil_div(w->n_in, TILE)), (unsigned)rows, (unsigned)w->n_exp), dim3(TILE, TILE / 4), 0,
                   cuda.stream>>>((uint8_t *)y.data, (const uint8_t *)w->data, w->scale, (const float *)step.data,
                                  w->n_out, w->n_in, tensor_count(y) / w->n_exp);
    CUDA_CHECK_LAUNCH();
}
