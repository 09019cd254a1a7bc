/* dequant.cu - decodes frozen weights of every format to bf16: a range of experts, one dense matrix, or a whole weight.
 *
 * Math:     out[e, i] = bf16(code[nibble(e, i)] * absmax(e, i / block)). Each product and sum is rounded to f32, the
 *           result to the nearest bf16: the bits of a rounded quant_value. MXFP4: block 32, absmax 2^(s - 127).
 *           NVFP4: block 16, absmax = e4m3 scale * (or /) the row's global scale. FP8: e4m3(byte) * the scale of the
 *           row's block of columns.
 * Shapes:   out [count, n_out, n_in] bf16; w as struct weight says.
 * Needs:    MXFP4: n_in a multiple of 32; NVFP4: of 16. decode_kernel needs weight_loads8 and an aligned out; other
 *           weights use decode_any_kernel, one thread per element.
 * Grid:     decode_kernel: 256 threads, 8192 values of one expert; a thread decodes 4 x 8 values, so that the loads and
 *           16-byte stores of a warp are contiguous. The sixteen codes are in sixteen banks of shared memory: no bank
 *           conflicts. Blocks of experts without rows return at once.
 * Bound:    per value 2 bytes out and 0.53 (MXFP4), 0.56 (NF4 of 64, NVFP4), 1 (FP8), 2 or 4 (dense) in: memory bound.
 * Numerics: exact in the sense above; NaN gives NaN, with any payload. */
#include "kernels/cuda/format/formats.cuh"

enum { THREADS = 256, VECTOR = 8, UNROLL = 4 };

/* Values 8v .. 8v+7 of expert e, rounded to bf16. bf16_pack8 instead of pack8: with the instructions of pack8, nvcc
 * makes one loop for scales in f32 and for nested scales, which is 4 to 6 % slower (NF4, NVFP4 on an H200). */
template <typename FORMAT>
static __device__ __forceinline__ uint4 decode8(const struct source &s, const float *code, int64_t e, uint32_t v)
{
    float x[VECTOR];
    FORMAT::values8(x, s, code, e, v);
    return bf16_pack8(x);
}
template <>
__device__ __forceinline__ uint4 decode8<device_bf16>(const struct source &s, const float *, int64_t e, uint32_t v)
{
    return load16((const bf16 *)s.w.data + e * s.n + (int64_t)v * VECTOR);
}

template <typename FORMAT>
static __global__ void __launch_bounds__(THREADS)
    decode_kernel(bf16 *__restrict__ out, const struct source s, int64_t first, const int32_t *__restrict__ ids,
                  const int32_t *__restrict__ offs)
{
    __shared__ float code[16];
    __shared__ int64_t expert; /* in shared memory, as MXFP4 would otherwise take 40 registers instead of 32 */
    const int64_t place = first + blockIdx.y;
    if (!has_rows(offs, place)) return;
    if (threadIdx.x == 0) expert = expert_at(ids, place);
    if constexpr (FORMAT::coded)
        if (threadIdx.x < 16) code[threadIdx.x] = FORMAT::code(s, threadIdx.x);
    __syncthreads();
    const int64_t e = expert;
    const uint32_t n_vector = (uint32_t)(s.n / VECTOR), v = blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    uint4 x[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) x[u] = decode8<FORMAT>(s, code, e, min(v + u * THREADS, n_vector - 1));
    uint4 *to = (uint4 *)(out + blockIdx.y * s.n);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (v + u * THREADS < n_vector) to[v + u * THREADS] = x[u];
}

template <typename FORMAT>
static __global__ void __launch_bounds__(THREADS)
    decode_any_kernel(bf16 *__restrict__ out, const struct source s, int64_t first, const int32_t *__restrict__ ids,
                      const int32_t *__restrict__ offs)
{
    const int64_t place = first + blockIdx.y, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= s.n || !has_rows(offs, place)) return;
    out[blockIdx.y * s.n + i] = __float2bfloat16_rn(FORMAT::value(s, expert_at(ids, place), i));
}

extern "C" void cuda_dequant(bf16 *out, const struct weight *w, int64_t first, int64_t count, const int32_t *ids,
                             const int32_t *offs)
{
    const struct source s = source_of(w);
    MT_REQUIRE(first >= 0 && count >= 0 && first + count <= w->n_exp && count <= 65535, "experts %lld + %lld of %lld",
               (long long)first, (long long)count, (long long)w->n_exp);
    if (!s.n || !count) return;
    const bool vectors = weight_loads8(w) && (uintptr_t)out % 16 == 0;
    const dim3 grid(grid_x(ceil_div(s.n, THREADS * (vectors ? VECTOR * UNROLL : 1))), (unsigned)count);
    with_decoder(w->format, [&](auto decoder) {
        const auto kernel = vectors ? decode_kernel<decltype(decoder)> : decode_any_kernel<decltype(decoder)>;
        kernel<<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    });
    CUDA_CHECK_LAUNCH();
}

void cuda_fill_matrices(struct tensor matrices, const struct weight *w)
{
    if (matrices.data != w->data) cuda_dequant(bf16_ptr(matrices), w, 0, w->n_exp, NULL, NULL);
}
