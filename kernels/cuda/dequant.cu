/* dequant.cu - decodes frozen weights of every format to bf16: a range of experts, one dense matrix, or a whole weight.
 *
 * Math:     out[e, i] = bf16(code[nibble(e, i)] * absmax(e, i / block)). Each product and sum is rounded to f32, the
 *           result to the nearest bf16: the bits of a rounded quant_value. MXFP4: block 32, absmax 2^(s - 127).
 * Shapes:   out [count, n_out, n_in] bf16; w as struct weight says.
 * Needs:    MXFP4: n_in a multiple of 32. decode_kernel needs matrices whose size and block are multiples of 8, in
 *           16-byte aligned memory; others use decode_any_kernel, one thread per element.
 * Grid:     decode_kernel: 256 threads, 8192 values of one expert; a thread decodes 4 x 8 values, so that the loads and
 *           16-byte stores of a warp are contiguous. The sixteen codes are in sixteen banks of shared memory: no bank
 *           conflicts. Blocks of experts without rows return at once. 32 registers, 64 bytes of shared memory, no
 *           spills (decode_any_kernel: 20 registers).
 * Moves:    per value 2 bytes out and 0.53 (MXFP4), 0.56 (NF4 of 64), 2 or 4 (dense) in -> memory bound.
 * Numerics: exact in the sense above; NaN gives NaN, with any payload.
 * Measured: H100 80GB HBM3, kernel of commit 1d28d06, kernel alone, MXFP4, 32 matrices [5760, 2880]: 0.461 ms,
 *   2.9 TB/s, 98 % of copy; [2880, 2880] 0.231 ms. bench dequant, kernels of commit cfa73e2: all experts of five
 *   models, every format, 93 .. 98 % of copy. 256 experts [1024, 2048], MXFP4, 0.471 ms; only the 8 experts of one
 *   token, 33.6 MB instead of 1074, 0.0465 ms (31 % of copy; two thirds of the time are the empty blocks of the 248
 *   others, 0.5 ns each); the 101 experts of 16 tokens 0.191 ms; the 221 of 64 tokens 0.408 ms; 512 tokens use all.
 * Tried and dropped: 64 blocks per SM that loop over an expert, which leaves fewer empty blocks: 0.0237 ms for those 8
 *   experts, but 2 .. 6 % more for all experts. */
#include <cuda_fp16.h>

#include "kernels/cuda/cuda.h"

enum { THREADS = 256, VECTOR = 8, UNROLL = 4 };

/* A weight and sizes derived from it. For MXFP4 w.block is 32. */
struct source {
    struct weight w;
    int64_t n, n_block, n_outer; /* per expert: values, absmax values, nested absmax values */
};

/* Code c of e2m1 (sign, two bits of exponent, one of mantissa): its bits at the same places of an f32 give the value
 * times 2^-126. */
static __device__ __forceinline__ float e2m1(uint32_t c)
{
    return __uint_as_float((c & 8) << 28 | (c & 7) << 22) * 0x1p126f;
}

static __device__ __forceinline__ float code_value(const struct source &s, uint32_t c)
{
    return s.w.format == WF_MXFP4 ? e2m1(c) : s.w.code[c];
}

static __device__ __forceinline__ float absmax_value(const struct source &s, enum weight_format f, int64_t e, int64_t b)
{
    const int64_t at = e * s.n_block + b;
    if (f == WF_MXFP4) {
        const uint32_t x = s.w.scale[at];
        return __uint_as_float(x == 0 ? 0x00400000 : x == 255 ? 0x7fc00000 : x << 23);
    }
    if (!s.w.scale) return s.w.absmax[at];
    const float outer = s.w.nested_absmax[e * s.n_outer + b / 256];
    return __fadd_rn(__fmul_rn(s.w.nested_map[s.w.scale[at]], outer), s.w.nested_offset[e]);
}

static __device__ __forceinline__ uint32_t pair_bits(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}

/* Values 8v .. 8v+7 of expert e, in 16 bytes. */
template <enum weight_format FORMAT>
static __device__ __forceinline__ uint4 decode8(const struct source &s, const float *code, int64_t e, uint32_t v)
{
    const int64_t at = e * s.n + (int64_t)v * VECTOR;
    float x[VECTOR];
    if (FORMAT == WF_BF16) return *(const uint4 *)((const bf16 *)s.w.data + at);
    if (FORMAT == WF_F32) {
        const float4 *p = (const float4 *)((const float *)s.w.data + at);
        const float4 a = p[0], b = p[1];
        return make_uint4(pair_bits(a.x, a.y), pair_bits(a.z, a.w), pair_bits(b.x, b.y), pair_bits(b.z, b.w));
    }
    if (FORMAT == WF_F16) {
        const uint4 raw = *(const uint4 *)((const __half *)s.w.data + at);
        const __half *h = (const __half *)&raw;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) x[j] = __half2float(h[j]);
    } else {
        const uint32_t nibbles = *(const uint32_t *)((const uint8_t *)s.w.data + at / 2);
        const uint32_t block = FORMAT == WF_MXFP4 ? v / 4 : v / (uint32_t)(s.w.block / VECTOR);
        const float absmax = absmax_value(s, FORMAT, e, block);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const int place = FORMAT == WF_MXFP4 ? j : j ^ 1; /* NF4, FP4: the high nibble comes first */
            x[j] = __fmul_rn(code[nibbles >> 4 * place & 15], absmax);
        }
    }
    return make_uint4(pair_bits(x[0], x[1]), pair_bits(x[2], x[3]), pair_bits(x[4], x[5]), pair_bits(x[6], x[7]));
}

static __device__ __forceinline__ bool has_rows(const int32_t *offs, int64_t e)
{
    return !offs || offs[e] < offs[e + 1];
}

/* FORMAT WF_NF4 also handles WF_FP4. */
template <enum weight_format FORMAT>
static __global__ void __launch_bounds__(THREADS)
    decode_kernel(bf16 *__restrict__ out, const struct source s, int64_t first, const int32_t *__restrict__ offs)
{
    __shared__ float code[16];
    const int64_t e = first + blockIdx.y;
    if (!has_rows(offs, e)) return;
    if (FORMAT == WF_MXFP4 || FORMAT == WF_NF4) {
        if (threadIdx.x < 16) code[threadIdx.x] = code_value(s, threadIdx.x);
        __syncthreads();
    }
    const uint32_t n_vector = (uint32_t)(s.n / VECTOR), v = blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    uint4 x[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) x[u] = decode8<FORMAT>(s, code, e, min(v + u * THREADS, n_vector - 1));
    uint4 *to = (uint4 *)(out + blockIdx.y * s.n);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (v + u * THREADS < n_vector) to[v + u * THREADS] = x[u];
}

/* Element i of expert e: the same value as quant_value. */
static __device__ float value(const struct source &s, int64_t e, int64_t i)
{
    const int64_t at = e * s.n + i;
    if (s.w.format == WF_F32) return ((const float *)s.w.data)[at];
    if (s.w.format == WF_BF16) return __bfloat162float(((const bf16 *)s.w.data)[at]);
    if (s.w.format == WF_F16) return __half2float(((const __half *)s.w.data)[at]);
    const bool low_first = s.w.format == WF_MXFP4;
    const uint8_t byte = ((const uint8_t *)s.w.data)[e * ((s.n + 1) / 2) + i / 2];
    const bool low = low_first == !(i & 1);
    return __fmul_rn(code_value(s, low ? byte & 15 : byte >> 4), absmax_value(s, s.w.format, e, i / s.w.block));
}

static __global__ void __launch_bounds__(THREADS)
    decode_any_kernel(bf16 *__restrict__ out, const struct source s, int64_t first, const int32_t *__restrict__ offs)
{
    const int64_t e = first + blockIdx.y, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (has_rows(offs, e) && i < s.n) out[blockIdx.y * s.n + i] = __float2bfloat16_rn(value(s, e, i));
}

extern "C" void cuda_dequant(bf16 *out, const struct weight *w, int64_t first, int64_t count, const int32_t *offs)
{
    struct source s = {*w, w->n_out * w->n_in, 0, 0};
    const bool packed = w->format == WF_MXFP4 || w->format == WF_NF4 || w->format == WF_FP4;
    MT_REQUIRE(first >= 0 && count >= 0 && first + count <= w->n_exp && count <= 65535, "experts %lld + %lld of %lld",
               (long long)first, (long long)count, (long long)w->n_exp);
    if (w->format == WF_MXFP4) {
        MT_REQUIRE(w->n_in % 32 == 0, "MXFP4 rows have %lld values: a multiple of 32 is needed", (long long)w->n_in);
        s.w.block = 32;
    }
    if (packed) {
        s.n_block = ceil_div(s.n, s.w.block);
        s.n_outer = ceil_div(s.n_block, 256);
    }
    if (!s.n || !count) return;
    const uintptr_t pointers = (uintptr_t)out | (uintptr_t)w->data;
    const bool vectors = s.n % VECTOR == 0 && (!packed || s.w.block % VECTOR == 0) && pointers % 16 == 0;
    const int64_t per_block = THREADS * (vectors ? VECTOR * UNROLL : 1);
    const dim3 grid(grid_x(ceil_div(s.n, per_block)), (unsigned)count);
    if (!vectors)
        decode_any_kernel<<<grid, THREADS, 0, cuda.stream>>>(out, s, first, offs);
    else if (w->format == WF_F32)
        decode_kernel<WF_F32><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, offs);
    else if (w->format == WF_BF16)
        decode_kernel<WF_BF16><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, offs);
    else if (w->format == WF_F16)
        decode_kernel<WF_F16><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, offs);
    else if (w->format == WF_MXFP4)
        decode_kernel<WF_MXFP4><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, offs);
    else
        decode_kernel<WF_NF4><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, offs);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_decode(struct device *dev, struct tensor y, const struct weight *w, struct tensor offs)
{
    if (!dev->dry_run) cuda_dequant(bf16_ptr(y), w, 0, w->n_exp, i32_ptr(offs));
}

struct tensor cuda_dense_bf16(struct device *dev, const struct weight *w)
{
    MT_REQUIRE(w->n_exp == 1, "a dense matrix has one expert, not %lld", (long long)w->n_exp);
    if (w->format == WF_BF16) return tensor_2d((void *)w->data, DT_BF16, w->n_out, w->n_in);
    const struct tensor out = arena_tensor_2d(&dev->work, DT_BF16, w->n_out, w->n_in);
    if (!dev->dry_run) cuda_dequant(bf16_ptr(out), w, 0, 1, NULL);
    return out;
}
