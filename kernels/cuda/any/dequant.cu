/* dequant.cu - decodes frozen weights of every format to bf16: a range of experts, one dense matrix, or a whole weight.
 *
 * Math:     out[e, i] = bf16(code[nibble(e, i)] * absmax(e, i / block)). Each product and sum is rounded to f32, the
 *           result to the nearest bf16: the bits of a rounded quant_value. MXFP4: block 32, absmax 2^(s - 127).
 *           NVFP4: block 16, absmax = e4m3 scale * (or /) the row's global scale. FP8: e4m3(byte) * the scale of the
 *           row's block of columns.
 * Shapes:   out [count, n_out, n_in] bf16; w as struct weight says.
 * Needs:    MXFP4: n_in a multiple of 32; NVFP4: of 16. decode_kernel needs matrices whose size (FP8: rows) and block
 *           are multiples of 8, in 16-byte aligned memory; others use decode_any_kernel, one thread per element.
 * Grid:     decode_kernel: 256 threads, 8192 values of one expert; a thread decodes 4 x 8 values, so that the loads and
 *           16-byte stores of a warp are contiguous. The sixteen codes are in sixteen banks of shared memory: no bank
 *           conflicts. Blocks of experts without rows return at once; products with fewer rows than experts pass a
 *           list of the experts that have rows (moe.cu), which leaves few such blocks. 32 registers (FP8: 40), 72 bytes
 *           of shared memory, no spills (decode_any_kernel: 30 registers).
 * Bound:    per value 2 bytes out and 0.53 (MXFP4), 0.56 (NF4 of 64, NVFP4), 1 (FP8), 2 or 4 (dense) in: memory bound.
 * Numerics: exact in the sense above; NaN gives NaN, with any payload. */
#include "kernels/cuda/format/dequant.cuh"

enum { THREADS = 256, UNROLL = 4 };

/* FORMAT WF_NF4 also handles WF_FP4. */
template <enum weight_format FORMAT>
static __global__ void __launch_bounds__(THREADS)
    decode_kernel(bf16 *__restrict__ out, const struct source s, int64_t first, const int32_t *__restrict__ ids,
                  const int32_t *__restrict__ offs)
{
    __shared__ float code[16];
    __shared__ int64_t expert; /* in shared memory, as MXFP4 would otherwise take 40 registers instead of 32 */
    const int64_t place = first + blockIdx.y;
    if (!has_rows(offs, place)) return;
    if (threadIdx.x == 0) expert = expert_at(ids, place);
    if (has_codes(FORMAT) && threadIdx.x < 16) code[threadIdx.x] = code_value(s, threadIdx.x);
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

/* Element i of expert e: the same value as quant_value. */
static __device__ float value(const struct source &s, int64_t e, int64_t i)
{
    const int64_t at = e * s.n + i;
    if (s.w.format == WF_F32) return ((const float *)s.w.data)[at];
    if (s.w.format == WF_BF16) return __bfloat162float(((const bf16 *)s.w.data)[at]);
    if (s.w.format == WF_F16) return __half2float(((const __half *)s.w.data)[at]);
    if (s.w.format == WF_FP8) {
        const int64_t row = i / s.w.n_in, block = i % s.w.n_in / s.w.block;
        return __fmul_rn(e4m3_value(((const uint8_t *)s.w.data)[at]),
                         s.w.scale2[(e * s.w.n_out + row) * s.row_blocks + block]);
    }
    const uint8_t byte = ((const uint8_t *)s.w.data)[e * ((s.n + 1) / 2) + i / 2];
    const bool low = is_e2m1(s.w.format) == !(i & 1);
    return __fmul_rn(code_value(s, low ? byte & 15 : byte >> 4), absmax_value(s, s.w.format, e, i / s.w.block));
}

static __global__ void __launch_bounds__(THREADS)
    decode_any_kernel(bf16 *__restrict__ out, const struct source s, int64_t first, const int32_t *__restrict__ ids,
                      const int32_t *__restrict__ offs)
{
    const int64_t place = first + blockIdx.y, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= s.n || !has_rows(offs, place)) return;
    out[blockIdx.y * s.n + i] = __float2bfloat16_rn(value(s, expert_at(ids, place), i));
}

extern "C" void cuda_dequant(bf16 *out, const struct weight *w, int64_t first, int64_t count, const int32_t *ids,
                             const int32_t *offs)
{
    const struct source s = source_of(w);
    MT_REQUIRE(first >= 0 && count >= 0 && first + count <= w->n_exp && count <= 65535, "experts %lld + %lld of %lld",
               (long long)first, (long long)count, (long long)w->n_exp);
    if (!s.n || !count) return;
    const uintptr_t pointers = (uintptr_t)out | (uintptr_t)w->data;
    const int64_t whole = w->format == WF_FP8 ? w->n_in : s.n; /* eight values have one scale */
    const bool vectors =
        whole % VECTOR == 0 && (!is_packed(w->format) || s.w.block % VECTOR == 0) && pointers % 16 == 0;
    const int64_t per_block = THREADS * (vectors ? VECTOR * UNROLL : 1);
    const dim3 grid(grid_x(ceil_div(s.n, per_block)), (unsigned)count);
    if (!vectors)
        decode_any_kernel<<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else if (w->format == WF_F32)
        decode_kernel<WF_F32><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else if (w->format == WF_BF16)
        decode_kernel<WF_BF16><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else if (w->format == WF_F16)
        decode_kernel<WF_F16><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else if (w->format == WF_MXFP4)
        decode_kernel<WF_MXFP4><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else if (w->format == WF_NVFP4)
        decode_kernel<WF_NVFP4><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else if (w->format == WF_FP8)
        decode_kernel<WF_FP8><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    else
        decode_kernel<WF_NF4><<<grid, THREADS, 0, cuda.stream>>>(out, s, first, ids, offs);
    CUDA_CHECK_LAUNCH();
}

struct tensor cuda_dense_bf16(struct device *dev, const struct weight *w)
{
    MT_REQUIRE(w->n_exp == 1, "a dense matrix has one expert, not %lld", (long long)w->n_exp);
    if (w->format == WF_BF16) return tensor_2d((void *)w->data, DT_BF16, w->n_out, w->n_in);
    const struct tensor out = arena_tensor_2d(&dev->work, DT_BF16, w->n_out, w->n_in);
    if (!dev->dry_run) cuda_dequant(bf16_ptr(out), w, 0, 1, NULL, NULL);
    return out;
}
