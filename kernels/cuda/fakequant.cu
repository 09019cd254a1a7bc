/* fakequant.cu - fake quantisation of all experts in one launch, its packed form and its gradient; largest magnitudes.
 *
 * Math:     kernels/fakequant.h, element by element; the same functions as on the CPU, so the results are equal in
 *           every bit. y = Q(x); codes and scales of the same; dx = |x| <= amax ? dy : 0; amax = max |x|.
 * Shapes:   x, y, dx, dy [E, out, in] bf16, f16 or f32; amax [E] or [1] f32; codes [E, out, in or in/2] u8; scales
 *           [E, out, in / block]; top [E] f32. E, out, in may be 0; E at most 65535.
 * Needs:    in a multiple of 8 and 16-byte aligned tensors for the kernels that move eight values at a time; others
 *           take a thread per block, or per byte of codes where there are no blocks.
 * Grid:     [ceil(out * in / 8192), E] blocks of 256 threads; a thread has 8 values in flight 4 times. The lanes of a
 *           block of 16, 32 or 128 values are neighbours and find its largest magnitude by shuffles.
 * Moves:    fake_quant: each value read and written once; pack: read once, codes and scales written; amax: read once
 *           -> memory bound. At 4.1 TB/s and bf16 about 27 instructions per value fit into the time of a copy; NVFP4
 *           has some 20, as a quotient takes three (e2m1_quotient), and its block's scale two divisions.
 * Numerics: fp32, nearest even, no fused operation but in fl_by, which is exact; denormals are kept. amax: maximum of
 *           integers and sum of whole numbers, so the order of the blocks does not matter.
 * Measured: `moetrain bench quant`; tests/RESULTS.md. */
#include <cuda_fp16.h>

#include "kernels/cuda/rows.cuh"
#include "kernels/fakequant.h"

enum { THREADS = 256, VECTOR = 8, UNROLL = 4, PER_BLOCK = THREADS * VECTOR * UNROLL };

/* ---- eight values at a time, as fp32 */

template <typename T> struct eight; /* as loaded: one or two times 16 bytes */
template <> struct eight<bf16> {
    uint4 u;
    __device__ void load(const bf16 *p) { u = load16(p); }
    __device__ void get(float v[8]) const { unpack8(v, u); }
    static __device__ void put(bf16 *p, const float v[8]) { store16(p, pack8(v)); }
};
template <> struct eight<__half> {
    uint4 u;
    __device__ void load(const __half *p) { u = load16(p); }
    __device__ void get(float v[8]) const
    {
        const uint32_t word[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = __half2float(__ushort_as_half((unsigned short)(word[i / 2] >> 16 * (i & 1))));
    }
    static __device__ void put(__half *p, const float v[8])
    {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            word[i] = (uint32_t)__half_as_ushort(__float2half_rn(v[2 * i + 1])) << 16 |
                      __half_as_ushort(__float2half_rn(v[2 * i]));
        store16(p, make_uint4(word[0], word[1], word[2], word[3]));
    }
};
template <> struct eight<float> {
    uint4 u[2];
    __device__ void load(const float *p) { u[0] = load16(p), u[1] = load16(p + 4); }
    __device__ void get(float v[8]) const
    {
        const uint32_t word[8] = {u[0].x, u[0].y, u[0].z, u[0].w, u[1].x, u[1].y, u[1].z, u[1].w};
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __uint_as_float(word[i]);
    }
    static __device__ void put(float *p, const float v[8])
    {
        uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = __float_as_uint(v[i]);
        store16(p, make_uint4(w[0], w[1], w[2], w[3]));
        store16(p + 4, make_uint4(w[4], w[5], w[6], w[7]));
    }
};

static __device__ __forceinline__ float one(const bf16 *p) { return __bfloat162float(*p); }
static __device__ __forceinline__ float one(const __half *p) { return __half2float(*p); }
static __device__ __forceinline__ float one(const float *p) { return *p; }
static __device__ __forceinline__ void put_one(bf16 *p, float v) { *p = __float2bfloat16_rn(v); }
static __device__ __forceinline__ void put_one(__half *p, float v) { *p = __float2half_rn(v); }
static __device__ __forceinline__ void put_one(float *p, float v) { *p = v; }

/* ---- one job: values, or their packed form */

struct job {
    struct fakequant f;
    const float *amax; /* [1] or [E]; NULL: the format does not read it */
    bool one_amax;
    int64_t n; /* values of an expert */
    void *y;   /* values; NULL: codes */
    uint8_t *codes;
    void *scales; /* u8, or f32 for FQ_INT */
    float *top;
};

/* The format with its kind known to the compiler. */
template <enum fakequant_kind KIND> static __device__ __forceinline__ struct fakequant format_of(const struct job &j)
{
    struct fakequant f = j.f;
    f.kind = KIND;
    return f;
}

static __device__ __forceinline__ float top_of(const struct fakequant &f, const struct job &j, int64_t e)
{
    const float amax = j.amax ? j.amax[j.one_amax ? 0 : e] : 0;
    return f.kind == FQ_NVFP4 ? fakequant_global(&f, amax) : amax;
}

/* The factor of expert e, once. */
static __device__ void put_top(const struct fakequant &f, const struct job &j, int64_t e, float top)
{
    if (!j.top || blockIdx.x || threadIdx.x) return;
    const struct fakequant_scale s = fakequant_scale(&f, top, 0);
    j.top[e] = f.kind == FQ_NVFP4 ? top : fakequant_multiplier(&f, &s);
}

/* Of the block that begins at element `at` of the whole tensor. */
static __device__ __forceinline__ void put_scale(const struct fakequant &f, const struct job &j, int64_t at,
                                                 const struct fakequant_scale &s)
{
    if (f.kind == FQ_INT)
        ((float *)j.scales)[at / f.block] = fakequant_multiplier(&f, &s);
    else
        ((uint8_t *)j.scales)[at / f.block] = (uint8_t)s.byte;
}

/* ---- eight values per thread */

static __device__ __forceinline__ float larger_of_lanes(float keep, float send, int step)
{
    return fmaxf(keep, __shfl_xor_sync(0xffffffffu, send, step));
}

static __device__ __forceinline__ float largest(const float v[VECTOR])
{
    float most = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < VECTOR; i++) most = fmaxf(most, fabsf(v[i]));
    return most;
}

/* The largest magnitude of the `lanes` neighbouring lanes that share a block. All lanes of the warp call. */
static __device__ __forceinline__ float block_max(const float v[VECTOR], int lanes)
{
    float most = largest(v);
    for (int step = lanes / 2; step; step /= 2) most = larger_of_lanes(most, most, step);
    return most;
}

/* FQ_INT: scales of four blocks that 4 or 16 neighbouring lanes share; most: of this lane's values. Each lane computes
 * one scale, which takes two divisions, and four lanes exchange them. All lanes of the warp call. */
static __device__ __forceinline__ void integer_scales(struct fakequant_scale s[UNROLL], const struct fakequant &f,
                                                      const float most[UNROLL], int lanes)
{
    static_assert(UNROLL == 4, "a lane keeps one of four blocks");
    const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
    const float a = larger_of_lanes(high ? most[2] : most[0], high ? most[0] : most[2], 2);
    const float b = larger_of_lanes(high ? most[3] : most[1], high ? most[1] : most[3], 2);
    float bmax = larger_of_lanes(odd ? b : a, odd ? a : b, 1); /* of block threadIdx.x % 4 */
    for (int step = 4; step < lanes; step *= 2) bmax = larger_of_lanes(bmax, bmax, step);
    const struct fakequant_scale mine = fakequant_scale(&f, 0, bmax);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        s[u].up = __shfl_sync(0xffffffffu, mine.up, u, 4);
        s[u].inverse = __shfl_sync(0xffffffffu, mine.inverse, u, 4);
        s[u].down = s[u].up > 0 ? s[u].up : 1;
    }
}

static __device__ __forceinline__ void put_codes8(const struct fakequant &f, uint8_t *codes, int64_t at,
                                                  const float q[VECTOR])
{
    uint32_t low = 0, high = 0;
    if (f.bits == 4) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) low |= fakequant_code(&f, q[i]) << 4 * i;
        *(uint32_t *)(codes + at / 2) = low;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low |= fakequant_code(&f, q[i]) << 8 * i;
        high |= fakequant_code(&f, q[4 + i]) << 8 * i;
    }
    *(uint2 *)(codes + at) = make_uint2(low, high);
}

/* q becomes the values of its codes, or what these decode to. The test of `inverse` that fl_by has is made once. */
static __device__ __forceinline__ void round8(const struct fakequant &f, const struct fakequant_scale &s, float q[8])
{
    if (s.inverse > 0) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) q[i] = fakequant_round(&f, &s, q[i]);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) q[i] = fakequant_round(&f, &s, q[i]);
    }
}
static __device__ __forceinline__ void value8(const struct fakequant &f, const struct fakequant_scale &s, float q[8])
{
    if (s.inverse > 0) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) q[i] = fakequant_value(&f, &s, q[i]);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) q[i] = fakequant_value(&f, &s, q[i]);
    }
}

template <enum fakequant_kind KIND, typename T, bool PACK>
static __global__ void __launch_bounds__(THREADS) quantise8(const T *x, const struct job j)
{
    const struct fakequant f = format_of<KIND>(j);
    const int64_t e = blockIdx.y, first = e * j.n, n_vector = j.n / VECTOR;
    const int64_t start = (int64_t)blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    const int lanes = f.block / VECTOR;
    const float top = top_of(f, j, e);
    const struct fakequant_scale whole = fakequant_scale(&f, top, 0); /* without blocks */
    struct fakequant_scale of_block[UNROLL];
    struct eight<T> in[UNROLL];
    float q[VECTOR], most[UNROLL];
    if (PACK) put_top(f, j, e, top);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) in[u].load(x + first + min(start + u * THREADS, n_vector - 1) * VECTOR);
    if (KIND == FQ_INT && lanes) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) in[u].get(q), most[u] = largest(q);
        integer_scales(of_block, f, most, lanes);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int64_t v = start + u * THREADS, at = first + v * VECTOR;
        in[u].get(q);
        const struct fakequant_scale s = !lanes           ? whole
                                         : KIND == FQ_INT ? of_block[u]
                                                          : fakequant_scale(&f, top, block_max(q, lanes));
        round8(f, s, q);
        if (v >= n_vector) continue;
        if (PACK) {
            put_codes8(f, j.codes, at, q);
            if (lanes && v % lanes == 0) put_scale(f, j, at, s);
        } else {
            value8(f, s, q);
            eight<T>::put((T *)j.y + at, q);
        }
    }
}

/* ---- any size and alignment: a thread has a whole block, or the elements of a byte of codes */

template <enum fakequant_kind KIND, typename T>
static __global__ void __launch_bounds__(THREADS) quantise_any(const T *x, const struct job j)
{
    const struct fakequant f = format_of<KIND>(j);
    const int64_t e = blockIdx.y, unit = f.block ? f.block : 8 / f.bits;
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * unit, first = e * j.n + i;
    const float top = top_of(f, j, e);
    if (!j.y) put_top(f, j, e, top);
    if (i >= j.n) return;
    float bmax = 0;
    for (int64_t k = 0; k < unit; k++) bmax = fmaxf(bmax, fabsf(one(x + first + k)));
    const struct fakequant_scale s = fakequant_scale(&f, top, bmax);
    if (!j.y && f.block) put_scale(f, j, first, s);
    for (int64_t k = 0; k < unit; k++) {
        const float q = fakequant_round(&f, &s, one(x + first + k));
        if (j.y) {
            put_one((T *)j.y + first + k, fakequant_value(&f, &s, q));
        } else {
            const uint32_t code = fakequant_code(&f, q);
            if (f.bits == 8)
                j.codes[first + k] = (uint8_t)code;
            else if (k % 2 == 0)
                j.codes[(first + k) / 2] = (uint8_t)code;
            else
                j.codes[(first + k) / 2] |= (uint8_t)(code << 4);
        }
    }
}

/* ---- launches */

static bool aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/* A grid of one column per expert. */
static dim3 grid_of(int64_t n, int64_t per_block, int64_t n_exp)
{
    MT_REQUIRE(n_exp <= 65535, "%lld experts", (long long)n_exp);
    return dim3(grid_x(ceil_div(MT_MAX(n, 1), per_block)), (unsigned)n_exp);
}

template <enum fakequant_kind KIND, typename T> static void launch(struct tensor x, const struct job &j)
{
    const T *from = (const T *)x.data;
    const int64_t n_exp = x.shape[0], unit = j.f.block ? j.f.block : 8 / j.f.bits;
    const bool vectors = j.n && x.shape[2] % VECTOR == 0 && aligned(x.data) &&
                         (j.y ? aligned(j.y) : aligned(j.codes) && aligned(j.scales));
    if (!vectors)
        quantise_any<KIND, T><<<grid_of(j.n, THREADS * unit, n_exp), THREADS, 0, cuda.stream>>>(from, j);
    else if (j.y)
        quantise8<KIND, T, false><<<grid_of(j.n, PER_BLOCK, n_exp), THREADS, 0, cuda.stream>>>(from, j);
    else
        quantise8<KIND, T, true><<<grid_of(j.n, PER_BLOCK, n_exp), THREADS, 0, cuda.stream>>>(from, j);
    CUDA_CHECK_LAUNCH();
}

template <typename T> static void launch_kind(struct tensor x, const struct job &j)
{
    switch (j.f.kind) {
    case FQ_INT: launch<FQ_INT, T>(x, j); return;
    case FQ_FP8: launch<FQ_FP8, T>(x, j); return;
    case FQ_FP8_STORED: launch<FQ_FP8_STORED, T>(x, j); return;
    case FQ_NVFP4: launch<FQ_NVFP4, T>(x, j); return;
    case FQ_MXFP4: launch<FQ_MXFP4, T>(x, j); return;
    }
}

static void quantise(struct device *dev, struct tensor x, struct tensor amax, struct job j)
{
    if (dev->dry_run || !x.shape[0]) return;
    j.n = x.shape[1] * x.shape[2];
    j.amax = fakequant_reads_amax(&j.f) ? f32_ptr(amax) : NULL;
    j.one_amax = amax.shape[0] == 1;
    if (x.dtype == DT_BF16)
        launch_kind<bf16>(x, j);
    else if (x.dtype == DT_F16)
        launch_kind<__half>(x, j);
    else
        launch_kind<float>(x, j);
}

extern "C" void cuda_fake_quant(struct device *dev, struct tensor y, struct tensor x, struct tensor amax,
                                const struct fakequant *f)
{
    struct job j = {*f};
    j.y = y.data;
    quantise(dev, x, amax, j);
}

extern "C" void cuda_quant_pack(struct device *dev, struct tensor codes, struct tensor scales, struct tensor top,
                                struct tensor x, struct tensor amax, const struct fakequant *f)
{
    struct job j = {*f};
    j.codes = (uint8_t *)codes.data;
    j.scales = scales.data;
    j.top = fakequant_reads_amax(f) ? f32_ptr(top) : NULL;
    quantise(dev, x, amax, j);
}

/* ---- the gradient and the largest magnitudes: VECTORS, or a value at a time */

template <typename T, bool VECTORS>
static __global__ void __launch_bounds__(THREADS)
    pass_kernel(T *dx, const T *dy, const T *x, const float *amax, bool one_amax, int64_t n)
{
    const int64_t e = blockIdx.y, first = e * n;
    const float most = amax[one_amax ? 0 : e];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int64_t i = (int64_t)blockIdx.x * (THREADS * UNROLL) + u * THREADS + threadIdx.x;
        if (VECTORS && i < n / VECTOR) {
            struct eight<T> a, b;
            float v[VECTOR], d[VECTOR];
            a.load(x + first + i * VECTOR);
            b.load(dy + first + i * VECTOR);
            a.get(v);
            b.get(d);
#pragma unroll
            for (int k = 0; k < VECTOR; k++) d[k] = fakequant_passes(v[k], most) ? d[k] : 0;
            eight<T>::put(dx + first + i * VECTOR, d);
        }
        if (!VECTORS && i < n)
            put_one(dx + first + i, fakequant_passes(one(x + first + i), most) ? one(dy + first + i) : 0);
    }
}

template <typename T> static void launch_pass(struct tensor dx, struct tensor dy, struct tensor x, struct tensor amax)
{
    const int64_t n = x.shape[1] * x.shape[2], n_exp = x.shape[0];
    const bool one_amax = amax.shape[0] == 1;
    T *to = (T *)dx.data;
    const T *from = (const T *)dy.data, *at = (const T *)x.data;
    if (n % VECTOR == 0 && aligned(dx.data) && aligned(dy.data) && aligned(x.data))
        pass_kernel<T, true>
            <<<grid_of(n, PER_BLOCK, n_exp), THREADS, 0, cuda.stream>>>(to, from, at, f32_ptr(amax), one_amax, n);
    else
        pass_kernel<T, false><<<grid_of(n, THREADS * UNROLL, n_exp), THREADS, 0, cuda.stream>>>(
            to, from, at, f32_ptr(amax), one_amax, n);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_fake_quant_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                    struct tensor amax)
{
    if (dev->dry_run || !tensor_count(x)) return;
    if (x.dtype == DT_BF16)
        launch_pass<bf16>(dx, dy, x, amax);
    else if (x.dtype == DT_F16)
        launch_pass<__half>(dx, dy, x, amax);
    else
        launch_pass<float>(dx, dy, x, amax);
}

static __device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

/* The largest magnitude of v among the finite ones; the others are rare and counted. */
template <int N> static __device__ __forceinline__ void see(const float v[N], uint32_t &most, uint32_t &bad)
{
    uint32_t here = 0;
#pragma unroll
    for (int k = 0; k < N; k++) here = max(here, magnitude_bits(v[k]));
    if (here >= 0x7f800000u) {
        here = 0;
#pragma unroll
        for (int k = 0; k < N; k++) {
            const uint32_t bits = magnitude_bits(v[k]);
            bad += bits >= 0x7f800000u;
            here = max(here, bits < 0x7f800000u ? bits : 0u);
        }
    }
    most = max(most, here);
}

/* amax and n_bad are zero before. The bits of positive floats compare like integers. */
template <typename T, bool VECTORS>
static __global__ void __launch_bounds__(THREADS)
    amax_kernel(uint32_t *amax, double *n_bad, const T *x, bool one_amax, int64_t n)
{
    __shared__ uint32_t all[2];
    const int64_t e = blockIdx.y, first = e * n, out = one_amax ? 0 : e;
    uint32_t most = 0, bad = 0;
    if (threadIdx.x < 2) all[threadIdx.x] = 0;
    __syncthreads();
    const int64_t start = (int64_t)blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    if (VECTORS) {
        struct eight<T> in[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) in[u].load(x + first + min(start + u * THREADS, n / VECTOR - 1) * VECTOR);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float v[VECTOR];
            in[u].get(v);
            if (start + u * THREADS < n / VECTOR) see<VECTOR>(v, most, bad);
        }
    } else {
        for (int64_t i = start; i < min(start + UNROLL * THREADS, n); i += THREADS) {
            const float v = one(x + first + i);
            see<1>(&v, most, bad);
        }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    bad = __reduce_add_sync(0xffffffffu, bad);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&all[0], most);
        if (bad) atomicAdd(&all[1], bad);
    }
    __syncthreads();
    if (threadIdx.x) return;
    atomicMax(&amax[out], all[0]);
    if (all[1]) atomicAdd(&n_bad[out], (double)all[1]); /* exact in any order */
}

template <typename T> static void launch_amax(struct tensor amax, struct tensor n_bad, struct tensor x)
{
    const int64_t n = x.shape[1] * x.shape[2], n_exp = x.shape[0];
    const bool one_amax = amax.shape[0] == 1;
    uint32_t *most = (uint32_t *)amax.data;
    if (n % VECTOR == 0 && aligned(x.data))
        amax_kernel<T, true><<<grid_of(n, PER_BLOCK, n_exp), THREADS, 0, cuda.stream>>>(most, (double *)n_bad.data,
                                                                                        (const T *)x.data, one_amax, n);
    else
        amax_kernel<T, false><<<grid_of(n, THREADS * UNROLL, n_exp), THREADS, 0, cuda.stream>>>(
            most, (double *)n_bad.data, (const T *)x.data, one_amax, n);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_amax(struct device *dev, struct tensor amax, struct tensor n_bad, struct tensor x)
{
    if (dev->dry_run || !amax.shape[0]) return;
    CUDA_CHECK(cudaMemsetAsync(amax.data, 0, (size_t)tensor_bytes(amax), cuda.stream));
    CUDA_CHECK(cudaMemsetAsync(n_bad.data, 0, (size_t)tensor_bytes(n_bad), cuda.stream));
    if (!tensor_count(x)) return;
    if (x.dtype == DT_BF16)
        launch_amax<bf16>(amax, n_bad, x);
    else if (x.dtype == DT_F16)
        launch_amax<__half>(amax, n_bad, x);
    else
        launch_amax<float>(amax, n_bad, x);
}
