/* fakequant.cu - fake quantisation of all experts in one launch, its packed form and its gradient.
 *
 * Math:     kernels/format/fakequant.h, element by element: the results have the bits of the CPU. y = Q(x); codes and
 *           scales of Q(x); dx = |x| <= amax ? dy : 0.
 * Shapes:   x, y, dx, dy [E, out, in] bf16, f16 or f32; amax [E] or [1] f32; codes [E, out, in or in/2] u8; scales
 *           [E, out, in / block]; top [E] f32, an expert's factor (put_top). E, out, in may be 0; E at most 65535.
 * Needs:    in a multiple of 8 and 16-byte aligned tensors for the kernels that move eight values at a time; other
 *           tensors take a thread per block, or per byte of codes if there are no blocks.
 * Grid:     [ceil(out * in / 8192), E] blocks of 256 threads; a thread loads 4 times 8 values first; then one thread of
 *           the block computes what depends on the expert alone. The lanes of a block of 16, 32 or 128 values are
 *           neighbours, find its largest magnitude by shuffles and share the work on the scales.
 * Bound:    fake_quant: each value read and written once; pack: read once, codes and scales written -> memory bound. At
 *           the 4.1 TB/s of a copy on an H200 there is time for about 27 instructions per bf16 value; NVFP4 has 19.
 * Numerics: fp32, nearest even, no fused operation but in quotients, where it makes them exact; denormals are kept. */
#include "kernels/cuda/parts/vec8.cuh"
#include "kernels/format/fakequant.h"

enum { THREADS = 256, VECTOR = 8, UNROLL = 4, PER_BLOCK = THREADS * VECTOR * UNROLL };

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

/* Stores the factor of expert e; one thread of the grid does it. */
static __device__ void put_top(const struct fakequant &f, const struct job &j, int64_t e, float top)
{
    if (!j.top || blockIdx.x || threadIdx.x) return;
    const struct fakequant_scale s = fakequant_scale(&f, top, 0);
    j.top[e] = f.kind == FQ_NVFP4 ? top : fakequant_multiplier(&f, &s);
}

/* Stores the scale s of the block that begins at element `at` of the whole tensor. */
static __device__ __forceinline__ void put_scale(const struct fakequant &f, const struct job &j, int64_t at,
                                                 const struct fakequant_scale &s)
{
    if (f.kind == FQ_INT)
        ((float *)j.scales)[at / f.block] = fakequant_multiplier(&f, &s);
    else
        ((uint8_t *)j.scales)[at / f.block] = (uint8_t)s.byte;
}

/* ---- eight values per thread */

/* What the blocks of expert e need, computed by one thread. */
struct whole {
    float top;
    struct fakequant_scale scale; /* of a format without blocks */
    float six, by_six;            /* FQ_NVFP4: 6 * top, and its fl_inverse */
};

static __device__ __forceinline__ void set_whole(struct whole *w, const struct fakequant &f, const struct job &j,
                                                 int64_t e)
{
    w->top = top_of(f, j, e);
    w->six = fl_mul(6, w->top);
    if (f.kind == FQ_NVFP4)
        w->by_six = fl_inverse(w->six);
    else
        w->scale = fakequant_scale(&f, w->top, 0);
}

static __device__ __forceinline__ float larger_of_lanes(float keep, float send, int step)
{
    return fmaxf(keep, __shfl_xor_sync(0xffffffffu, send, step));
}

/* The scale of a block of NVFP4. Between the limits of bmax below, fl_by_inverse is exactly fl_div. */
static __device__ __forceinline__ struct fakequant_scale nvfp4_scale(const struct fakequant &f, const struct whole &w,
                                                                     float bmax)
{
    float r = 0;
    if (w.by_six > 0 && bmax >= 0x1p-29f && bmax <= 0x1p30f)
        r = fl_by_inverse(bmax, w.six, w.by_six);
    else if (w.top > 0)
        r = fl_div(bmax, w.six);
    return fakequant_scale_nvfp4_of(&f, w.top, r);
}

/* Scales of UNROLL blocks that `lanes` neighbouring lanes share. most: the largest magnitudes of this lane's values.
 * The lanes divide the blocks among them and exchange the scales. All lanes of the warp call it. */
template <enum fakequant_kind KIND, bool PACK>
static __device__ __forceinline__ void block_scales(struct fakequant_scale s[UNROLL], const struct fakequant &f,
                                                    const struct whole &w, const float most[UNROLL], int lanes)
{
    static_assert(UNROLL == 4, "a lane keeps one or two of four blocks");
    const bool odd = threadIdx.x & 1;
    if constexpr (KIND == FQ_NVFP4) { /* two lanes: the even one keeps blocks 0 and 2 */
#pragma unroll
        for (int u = 0; u < UNROLL; u += 2) {
            const float bmax = larger_of_lanes(odd ? most[u + 1] : most[u], odd ? most[u] : most[u + 1], 1);
            const struct fakequant_scale mine = nvfp4_scale(f, w, bmax);
            struct fakequant_scale other = mine;
            other.up = __shfl_xor_sync(0xffffffffu, mine.up, 1);
            other.inverse = __shfl_xor_sync(0xffffffffu, mine.inverse, 1);
            if (PACK) other.byte = __shfl_xor_sync(0xffffffffu, mine.byte, 1);
            other.down = other.up;
            s[u] = odd ? other : mine;
            s[u + 1] = odd ? mine : other;
        }
    } else if constexpr (KIND == FQ_INT) { /* four or 16 lanes: lane i keeps block i % 4 */
        const bool high = threadIdx.x & 2;
        const float a = larger_of_lanes(high ? most[2] : most[0], high ? most[0] : most[2], 2);
        const float b = larger_of_lanes(high ? most[3] : most[1], high ? most[1] : most[3], 2);
        float bmax = larger_of_lanes(odd ? b : a, odd ? a : b, 1);
        for (int step = 4; step < lanes; step *= 2) bmax = larger_of_lanes(bmax, bmax, step);
        const struct fakequant_scale mine = fakequant_scale(&f, 0, bmax);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            s[u].up = __shfl_sync(0xffffffffu, mine.up, u, 4);
            s[u].inverse = __shfl_sync(0xffffffffu, mine.inverse, u, 4);
            s[u].down = s[u].up > 0 ? s[u].up : 1;
        }
    } else {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) { /* cheaper than an exchange */
            float bmax = most[u];
            for (int step = lanes / 2; step; step /= 2) bmax = larger_of_lanes(bmax, bmax, step);
            s[u] = fakequant_scale(&f, w.top, bmax);
        }
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

/* Rounds q to the values of the codes. Tests `inverse` here, so that fakequant_round need not test it for each
 * value. */
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

/* What the codes decode to. */
static __device__ __forceinline__ void decode8(const struct fakequant &f, const struct fakequant_scale &s, float q[8])
{
    if (s.inverse > 0) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) q[i] = fakequant_value(&f, &s, q[i]);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) q[i] = fakequant_value(&f, &s, q[i]);
    }
}

/* fakequant_round and fakequant_value of two values of NVFP4, rounded to bf16; s.inverse is above 0. limit: bf16 of 6
 * times the scale, in both halves. Rounding and scaling are monotonic, so the clamp to the largest value comes last, in
 * one instruction for both values; then their signs are restored. The rounding adds 1.5 times a power of two: the sum
 * has the same ulp for both signs. */
static __device__ __forceinline__ uint32_t nvfp4_pair(uint32_t word, const struct fakequant_scale &s, uint32_t limit)
{
    float v[2] = {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float q = short_quotient(v[i], s.up, s.inverse);
        const int own = (int)(__float_as_uint(q) & 0x7f800000u), to_shift = 22 << 23 | 0x400000, one = 127 << 23;
        const float shift = __int_as_float(__viaddmax_s32(own, to_shift, one + to_shift));
        v[i] = fl_mul(fl_add(fl_add(q, shift), -shift), s.down);
    }
    return smaller2(magnitudes2(pack2(v[0], v[1])), limit) | (word & 0x80008000u);
}

/* Q of eight values with one scale, for every format and dtype. */
template <enum fakequant_kind KIND, typename T>
static __device__ __forceinline__ struct vec8<T> quantise_any8(struct vec8<T> x, const struct fakequant &f,
                                                               const struct fakequant_scale &s) {
    float q[VECTOR];
    x.get(q);
    round8(f, s, q);
    decode8(f, s, q);
    x.put(q);
    return x;
}

/* Not inlined, so that the divisions for scales without an inverse take no room in the instruction cache. */
template <enum fakequant_kind KIND, typename T>
static __device__ __noinline__ struct vec8<T> quantise_rare8(struct vec8<T> x, struct fakequant f,
                                                             struct fakequant_scale s) {
    return quantise_any8<KIND>(x, f, s);
}

template <enum fakequant_kind KIND, typename T>
static __device__ __forceinline__ struct vec8<T> quantise_vec8(struct vec8<T> x, const struct fakequant &f,
                                                               const struct fakequant_scale &s) {
    if constexpr (KIND == FQ_NVFP4 && vec8<T>::is_bf16) {
        if (!(s.inverse > 0)) return quantise_rare8<KIND>(x, f, s);
        const float most = fl_mul(6, s.down);
        const uint32_t limit = pack2(most, most);
        x.u = make_uint4(nvfp4_pair(x.u.x, s, limit), nvfp4_pair(x.u.y, s, limit), nvfp4_pair(x.u.z, s, limit),
                         nvfp4_pair(x.u.w, s, limit));
        return x;
    } else if constexpr (KIND == FQ_INT) {
        return s.inverse > 0 ? quantise_any8<KIND>(x, f, s) : quantise_rare8<KIND>(x, f, s);
    } else {
        return quantise_any8<KIND>(x, f, s);
    }
}

template <enum fakequant_kind KIND, typename T, bool PACK>
static __global__ void __launch_bounds__(THREADS) quantise8(const T *x, const struct job j)
{
    __shared__ struct whole shared;
    const struct fakequant f = format_of<KIND>(j);
    const int64_t e = blockIdx.y, first = e * j.n;
    const uint32_t n_vector = (uint32_t)(j.n / VECTOR), start = blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    const int lanes = f.block / VECTOR;
    const T *from = x + first;
    T *to = (T *)j.y + first + (int64_t)start * VECTOR;
    struct fakequant_scale of_block[UNROLL];
    struct vec8<T> in[UNROLL];
    float most[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) in[u].load(from + (int64_t)min(start + u * THREADS, n_vector - 1) * VECTOR);
    if (j.amax && threadIdx.x == 0) set_whole(&shared, f, j, e);
    __syncthreads();
    if (PACK) put_top(f, j, e, shared.top);
    if (lanes) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) most[u] = in[u].largest();
        block_scales<KIND, PACK>(of_block, f, shared, most, lanes);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const uint32_t v = start + u * THREADS;
        const struct fakequant_scale s = lanes ? of_block[u] : shared.scale;
        if (PACK) {
            float q[VECTOR];
            in[u].get(q);
            round8(f, s, q);
            if (v >= n_vector) continue;
            const int64_t at = first + (int64_t)v * VECTOR;
            put_codes8(f, j.codes, at, q);
            if (lanes && v % lanes == 0) put_scale(f, j, at, s);
        } else {
            in[u] = quantise_vec8<KIND>(in[u], f, s);
            if (v < n_vector) in[u].store(to + u * THREADS * VECTOR);
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
    for (int64_t k = 0; k < unit; k++) bmax = fmaxf(bmax, fabsf(get_one(x + first + k)));
    const struct fakequant_scale s = fakequant_scale(&f, top, bmax);
    if (!j.y && f.block) put_scale(f, j, first, s);
    for (int64_t k = 0; k < unit; k++) {
        const float q = fakequant_round(&f, &s, get_one(x + first + k));
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

static dim3 grid_of(int64_t n, int64_t per_block, int64_t n_exp)
{
    MT_REQUIRE(n_exp <= 65535, "%lld experts", (long long)n_exp);
    return dim3(grid_x(ceil_div(MT_MAX(n, 1), per_block)), (unsigned)n_exp);
}

template <enum fakequant_kind KIND, typename T> static void launch(struct tensor x, const T *from, const struct job &j)
{
    const int64_t n_exp = x.shape[0], unit = j.f.block ? j.f.block : 8 / j.f.bits;
    const bool vectors = j.n && j.n / VECTOR < INT32_MAX && x.shape[2] % VECTOR == 0 && aligned(x.data) &&
                         (j.y ? aligned(j.y) : aligned(j.codes) && aligned(j.scales));
    const auto kernel = !vectors ? quantise_any<KIND, T> : j.y ? quantise8<KIND, T, false> : quantise8<KIND, T, true>;
    kernel<<<grid_of(j.n, vectors ? PER_BLOCK : THREADS * unit, n_exp), THREADS, 0, cuda.stream>>>(from, j);
    CUDA_CHECK_LAUNCH();
}

template <typename T> static void launch_kind(struct tensor x, const T *from, const struct job &j)
{
    switch (j.f.kind) {
    case FQ_INT: launch<FQ_INT>(x, from, j); return;
    case FQ_FP8: launch<FQ_FP8>(x, from, j); return;
    case FQ_FP8_STORED: launch<FQ_FP8_STORED>(x, from, j); return;
    case FQ_NVFP4: launch<FQ_NVFP4>(x, from, j); return;
    case FQ_MXFP4: launch<FQ_MXFP4>(x, from, j); return;
    }
}

static void quantise(struct device *dev, struct tensor x, struct tensor amax, struct job j)
{
    if (!x.shape[0]) return;
    j.n = x.shape[1] * x.shape[2];
    j.amax = fakequant_reads_amax(&j.f) ? f32_ptr(amax) : NULL;
    j.one_amax = amax.shape[0] == 1;
    with_values(x, [&](const auto *from) { launch_kind(x, from, j); });
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

/* ---- the gradient and the largest magnitudes: eight values at a time (VECTORS), or one */

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
            struct vec8<T> a, b;
            float v[VECTOR], d[VECTOR];
            a.load(x + first + i * VECTOR);
            b.load(dy + first + i * VECTOR);
            a.get(v);
            b.get(d);
#pragma unroll
            for (int k = 0; k < VECTOR; k++) d[k] = fakequant_passes(v[k], most) ? d[k] : 0;
            b.put(d);
            b.store(dx + first + i * VECTOR);
        }
        if (!VECTORS && i < n)
            put_one(dx + first + i, fakequant_passes(get_one(x + first + i), most) ? get_one(dy + first + i) : 0);
    }
}

template <typename T>
static void launch_pass(struct tensor dx, struct tensor dy, struct tensor x, const T *from, struct tensor amax)
{
    const int64_t n = x.shape[1] * x.shape[2], n_exp = x.shape[0];
    const bool one_amax = amax.shape[0] == 1;
    const bool vectors = n % VECTOR == 0 && aligned(dx.data) && aligned(dy.data) && aligned(x.data);
    (vectors
         ? pass_kernel<T, true>
         : pass_kernel<T,
                       false>)<<<grid_of(n, vectors ? PER_BLOCK : THREADS * UNROLL, n_exp), THREADS, 0, cuda.stream>>>(
        (T *)dx.data, (const T *)dy.data, from, f32_ptr(amax), one_amax, n);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_fake_quant_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                    struct tensor amax)
{
    if (!tensor_count(x)) return;
    with_values(x, [&](const auto *from) { launch_pass(dx, dy, x, from, amax); });
}
