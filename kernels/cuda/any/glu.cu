/* glu.cu - the activation of dense feed-forward networks, with a gate per token or without; that of experts, where the
 * product has no epilogue for it; y += x.
 * Math: act = gate glu(pre); dpre = glu'(pre) gate dact, dgate = <glu(pre), dact> (ops.h has the formulas).
 * Shapes: pre, dpre [T, U], act, dact [T, F] bf16, gate, dgate [T, 1] f32; x, y [T, D] bf16; all may be views.
 * Needs: F, D % 8 == 0, 16-byte aligned rows. T may be 0.
 * Grid: blocks of 256; a thread handles 8 columns of a row. The backward has a warp per row up to F = 2048, above it
 *   256 threads. Registers on sm_90a: forward 32, backward 48; without gates 24 and 48.
 * Bound: forward 6*T*F bytes, backward 10*T*F, sum 6*T*D: memory bound. Without gates forward 4*T*F, backward 6*T*F, of
 *   experts 8*T*F.
 * Numerics: f32, one rounding at the end; the sum of dgate in an order that depends on F alone. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { THREADS = 256 };

/* Eight gates and eight ups from column `col` of the activation on. */
static __device__ inline void load_pairs(float gate[8], float up[8], const bf16 *row, int64_t col, int64_t width,
                                         bool interleaved)
{
    if (!interleaved) {
        unpack8(gate, load16(row + col));
        unpack8(up, load16(row + width + col));
        return;
    }
    float v[16];
    unpack8(v, load16(row + 2 * col));
    unpack8(v + 8, load16(row + 2 * col + 8));
#pragma unroll
    for (int i = 0; i < 8; i++) gate[i] = v[2 * i], up[i] = v[2 * i + 1];
}

static __device__ inline void store_pairs(bf16 *row, const float gate[8], const float up[8], int64_t col, int64_t width,
                                          bool interleaved)
{
    if (!interleaved) {
        store16(row + col, pack8(gate));
        store16(row + width + col, pack8(up));
        return;
    }
    float v[16];
#pragma unroll
    for (int i = 0; i < 8; i++) v[2 * i] = gate[i], v[2 * i + 1] = up[i];
    store16(row + 2 * col, pack8(v));
    store16(row + 2 * col + 8, pack8(v + 8));
}

/* The eight columns of this thread. */
struct octet {
    int64_t row, col;
};
static __device__ inline struct octet find_octet(int64_t n_col)
{
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x, per_row = (uint32_t)(n_col / 8), row = i / per_row;
    return {row, 8 * (int64_t)(i - row * per_row)};
}

static __global__ void __launch_bounds__(THREADS)
    glu_fwd(bf16 *act, int64_t ld_act, const bf16 *pre, int64_t ld_pre, const float *gate, int64_t ld_gate,
            int64_t n_tok, int64_t width, struct glu glu)
{
    const struct octet o = find_octet(width);
    const int64_t t = o.row, col = o.col;
    const struct glu_form form = glu_form_of(glu);
    float g[8], u[8];
    if (t >= n_tok) return;
    const float scale = gate ? gate[t * ld_gate] : 1.0f;
    load_pairs(g, u, pre + t * ld_pre, col, width, glu.interleaved);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = scale * glu_value(form, g[i], u[i]);
    store16(act + t * ld_act + col, pack8(g));
}

/* The sum over the TEAM threads of a row; all threads of the block call it. */
template <int TEAM> static __device__ inline float row_sum(float sum)
{
    __shared__ float of_warp[THREADS / 32];
    sum = warp_sum(sum);
    if (TEAM == 32) return sum;
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += of_warp[i];
    return sum;
}

/* TEAM threads per row. */
template <int TEAM>
static __global__ void __launch_bounds__(THREADS)
    glu_bwd(bf16 *dpre, int64_t ld_dpre, float *dgate, int64_t ld_dgate, const bf16 *dact, int64_t ld_dact,
            const bf16 *pre, int64_t ld_pre, const float *gate, int64_t ld_gate, int64_t n_tok, int64_t width,
            struct glu glu)
{
    const int64_t t = (int64_t)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const struct glu_form form = glu_form_of(glu);
    const float scale = gate && t < n_tok ? gate[t * ld_gate] : 1.0f;
    float sum = 0;
    for (int64_t col = 8 * (int64_t)(threadIdx.x % TEAM); col < width && t < n_tok; col += 8 * TEAM) {
        float g[8], u[8], d[8];
        load_pairs(g, u, pre + t * ld_pre, col, width, glu.interleaved);
        unpack8(d, load16(dact + t * ld_dact + col));
#pragma unroll
        for (int i = 0; i < 8; i++) sum += d[i] * glu_gradient(form, g[i], u[i], scale * d[i], &g[i], &u[i]);
        store_pairs(dpre + t * ld_dpre, g, u, col, width, glu.interleaved);
    }
    if (!dgate) return;
    sum = row_sum<TEAM>(sum);
    if (threadIdx.x % TEAM == 0 && t < n_tok) dgate[t * ld_dgate] = sum;
}

/* The same without gates: GLU_RELU2. */
static __global__ void __launch_bounds__(THREADS)
    relu2_fwd(bf16 *act, int64_t ld_act, const bf16 *pre, int64_t ld_pre, const float *gate, int64_t ld_gate,
              int64_t n_tok, int64_t width)
{
    const struct octet o = find_octet(width);
    const int64_t t = o.row;
    float u[8];
    if (t >= n_tok) return;
    const float scale = gate ? gate[t * ld_gate] : 1.0f;
    unpack8(u, load16(pre + t * ld_pre + o.col));
#pragma unroll
    for (int i = 0; i < 8; i++) u[i] = max_nan(u[i], 0.0f), u[i] = scale * (u[i] * u[i]);
    store16(act + t * ld_act + o.col, pack8(u));
}

template <int TEAM>
static __global__ void __launch_bounds__(THREADS) relu2_bwd(const __grid_constant__ struct relu2_rows r)
{
    const int64_t t = (int64_t)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const bool live = t < r.n_row;
    const float scale = r.gate && live ? r.gate[r.row_slot ? r.row_slot[t] : t * r.ld_gate] : 1.0f;
    float sum = 0;
    for (int64_t col = 8 * (int64_t)(threadIdx.x % TEAM); col < r.width && live; col += 8 * TEAM) {
        float u[8], d[8], h[8];
        unpack8(u, load16(r.pre + t * r.ld_pre + col));
        unpack8(d, load16(r.dact + t * r.ld_dact + col));
#pragma unroll
        for (int i = 0; i < 8; i++) u[i] = max_nan(u[i], 0.0f), h[i] = u[i] * u[i];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u[i] *= 2 * scale * d[i];
            if (r.in_amax && !(__bfloat162float(__float2bfloat16_rn(h[i])) <= *r.in_amax)) u[i] = 0;
        }
        if (r.in_amax) unpack8(h, load16(r.act + t * r.width + col));
#pragma unroll
        for (int i = 0; i < 8; i++) sum += h[i] * d[i];
        if (r.act && !r.in_amax) store16(r.act + t * r.width + col, pack8(h));
        store16(r.dpre + t * r.ld_dpre + col, pack8(u));
    }
    if (!r.dgate) return;
    sum = row_sum<TEAM>(sum);
    if (threadIdx.x % TEAM == 0 && live) r.dgate[t * r.ld_dgate] = sum;
}

static __global__ void __launch_bounds__(THREADS)
    add(bf16 *y, int64_t ldy, const bf16 *x, int64_t ldx, int64_t n_row, int64_t n_col)
{
    const struct octet o = find_octet(n_col);
    const int64_t t = o.row, col = o.col;
    float a[8], b[8];
    if (t >= n_row) return;
    unpack8(a, load16(y + t * ldy + col));
    unpack8(b, load16(x + t * ldx + col));
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] += b[i];
    store16(y + t * ldy + col, pack8(a));
}

static unsigned eights(int64_t n_row, int64_t n_col)
{
    MT_REQUIRE(n_row * (n_col / 8) < INT32_MAX, "%lld rows of %lld", (long long)n_row, (long long)n_col);
    return grid_x(ceil_div(n_row * (n_col / 8), THREADS));
}

extern "C" void cuda_glu_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor gate,
                             const struct glu *glu)
{
    const int64_t n_tok = act.shape[0], width = act.shape[1];
    if (dev->dry_run || n_tok == 0) return;
    MT_REQUIRE(width % 8 == 0 && rows_aligned(act) && rows_aligned(pre), "an activation of %lld columns",
               (long long)width);
    const float *scale = gate.ndim ? f32_ptr(gate) : NULL;
    if (glu_gated(glu))
        glu_fwd<<<eights(n_tok, width), THREADS, 0, cuda.stream>>>(bf16_ptr(act), act.ld, bf16_ptr(pre), pre.ld, scale,
                                                                   gate.ld, n_tok, width, *glu);
    else
        relu2_fwd<<<eights(n_tok, width), THREADS, 0, cuda.stream>>>(bf16_ptr(act), act.ld, bf16_ptr(pre), pre.ld,
                                                                     scale, gate.ld, n_tok, width);
    CUDA_CHECK_LAUNCH();
}

static bool narrow(int64_t width) { return width <= 2048; }
/* Of a kernel with a team of threads per row. */
static unsigned teams(int64_t n_row, int64_t width)
{
    return grid_x(ceil_div(n_row, narrow(width) ? THREADS / 32 : 1));
}

void cuda_relu2_bwd(const struct relu2_rows *r)
{
    (narrow(r->width) ? relu2_bwd<32> : relu2_bwd<THREADS>)<<<teams(r->n_row, r->width), THREADS, 0, cuda.stream>>>(*r);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_glu_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor dact,
                             struct tensor pre, struct tensor gate, const struct glu *glu)
{
    const int64_t n_tok = dact.shape[0], width = dact.shape[1];
    if (dev->dry_run || n_tok == 0) return;
    MT_REQUIRE(width % 8 == 0 && rows_aligned(dpre) && rows_aligned(dact) && rows_aligned(pre),
               "the gradient of an activation of %lld columns", (long long)width);
    float *of_gate = dgate.ndim ? f32_ptr(dgate) : NULL;
    const float *scale = gate.ndim ? f32_ptr(gate) : NULL;
    const struct relu2_rows rows = {.n_row = n_tok,
                                    .width = width,
                                    .pre = bf16_ptr(pre),
                                    .ld_pre = pre.ld,
                                    .dact = bf16_ptr(dact),
                                    .ld_dact = dact.ld,
                                    .dpre = bf16_ptr(dpre),
                                    .ld_dpre = dpre.ld,
                                    .gate = scale,
                                    .ld_gate = gate.ld,
                                    .dgate = of_gate,
                                    .ld_dgate = dgate.ld};
    if (!glu_gated(glu)) return cuda_relu2_bwd(&rows);
    (narrow(width) ? glu_bwd<32> : glu_bwd<THREADS>)<<<teams(n_tok, width), THREADS, 0, cuda.stream>>>(
        bf16_ptr(dpre), dpre.ld, of_gate, dgate.ld, bf16_ptr(dact), dact.ld, bf16_ptr(pre), pre.ld, scale, gate.ld,
        n_tok, width, *glu);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_add(struct device *dev, struct tensor y, struct tensor x)
{
    if (dev->dry_run || y.shape[0] == 0) return;
    MT_REQUIRE(y.shape[1] % 8 == 0 && rows_aligned(y) && rows_aligned(x), "a sum of rows of %lld",
               (long long)y.shape[1]);
    add<<<eights(y.shape[0], y.shape[1]), THREADS, 0, cuda.stream>>>(bf16_ptr(y), y.ld, bf16_ptr(x), x.ld, y.shape[0],
                                                                     y.shape[1]);
    CUDA_CHECK_LAUNCH();
}
