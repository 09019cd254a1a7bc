/* glu.cu - the activation of dense layers, with or without a gate per token, and of experts if the product has no
 * epilogue for it; y += x; x *= factor.
 * Math: act = gate glu(pre); dpre = glu'(pre) gate dact, dgate = <glu(pre), dact> (ops.h has the formulas).
 * Shapes: pre, dpre [T, 2F] (GLU_RELU2: [T, F]), act, dact [T, F] bf16, gate, dgate [T, 1] f32; x, y [T, D] bf16; all
 *   may be views.
 * Needs: F, D % 8 == 0, 16-byte aligned rows. T may be 0.
 * Grid: blocks of 256; a thread handles 8 columns of a row. The backward has a warp per row up to F = 2048, above it
 *   256 threads.
 * Bound: forward 6*T*F bytes, backward 10*T*F, sum 6*T*D: memory bound. GLU_RELU2: forward 4*T*F, backward 6*T*F, of
 *   experts 8*T*F.
 * Numerics: f32, one rounding at the end; the sum of dgate in an order that depends on F alone. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { THREADS = OCTET_THREADS };

static __global__ void __launch_bounds__(THREADS)
    glu_fwd(row_view<> act, row_view<> pre, row_view<float> gate, int64_t n_tok, int64_t width, struct glu glu)
{
    const struct octet o = find_octet(width);
    const int64_t t = o.row, col = o.col;
    const struct glu_form form = glu_form_of(glu);
    float g[8], u[8];
    if (t >= n_tok) return;
    const float scale = gate.p ? *gate.at(t) : 1.0f;
    load_pairs(g, u, pre.at(t), col, width, glu.interleaved);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = scale * glu_value(form, g[i], u[i]);
    store16(act.at(t) + col, pack8(g));
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
    glu_bwd(row_view<> dpre, row_view<float> dgate, row_view<> dact, row_view<> pre, row_view<float> gate,
            int64_t n_tok, int64_t width, struct glu glu)
{
    const int64_t t = (int64_t)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const struct glu_form form = glu_form_of(glu);
    const float scale = gate.p && t < n_tok ? *gate.at(t) : 1.0f;
    float sum = 0;
    for (int64_t col = 8 * (int64_t)(threadIdx.x % TEAM); col < width && t < n_tok; col += 8 * TEAM) {
        float g[8], u[8], d[8];
        load_pairs(g, u, pre.at(t), col, width, glu.interleaved);
        unpack8(d, load16(dact.at(t) + col));
#pragma unroll
        for (int i = 0; i < 8; i++) sum += d[i] * glu_gradient(form, g[i], u[i], scale * d[i], &g[i], &u[i]);
        store_pairs(dpre.at(t), g, u, col, width, glu.interleaved);
    }
    if (!dgate.p) return;
    sum = row_sum<TEAM>(sum);
    if (threadIdx.x % TEAM == 0 && t < n_tok) *dgate.at(t) = sum;
}

static __global__ void __launch_bounds__(THREADS)
    relu2_fwd(row_view<> act, row_view<> pre, row_view<float> gate, int64_t n_tok, int64_t width)
{
    const struct octet o = find_octet(width);
    const int64_t t = o.row;
    float u[8];
    if (t >= n_tok) return;
    const float scale = gate.p ? *gate.at(t) : 1.0f;
    unpack8(u, load16(pre.at(t) + o.col));
#pragma unroll
    for (int i = 0; i < 8; i++) u[i] = max_nan(u[i], 0.0f), u[i] = scale * (u[i] * u[i]);
    store16(act.at(t) + o.col, pack8(u));
}

template <int TEAM>
static __global__ void __launch_bounds__(THREADS) relu2_bwd(const __grid_constant__ struct relu2_rows r)
{
    const int64_t t = (int64_t)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const bool live = t < r.n_row;
    const float scale = r.gate.p && live ? *r.gate.at(r.row_slot ? r.row_slot[t] : t) : 1.0f;
    float sum = 0;
    for (int64_t col = 8 * (int64_t)(threadIdx.x % TEAM); col < r.width && live; col += 8 * TEAM) {
        float u[8], d[8], h[8];
        unpack8(u, load16(r.pre.at(t) + col));
        unpack8(d, load16(r.dact.at(t) + col));
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
        store16(r.dpre.at(t) + col, pack8(u));
    }
    if (!r.dgate.p) return;
    sum = row_sum<TEAM>(sum);
    if (threadIdx.x % TEAM == 0 && live) *r.dgate.at(t) = sum;
}

static __global__ void __launch_bounds__(THREADS) add(row_view<> y, row_view<> x, int64_t n_row, int64_t n_col)
{
    const struct octet o = find_octet(n_col);
    const int64_t t = o.row, col = o.col;
    float a[8], b[8];
    if (t >= n_row) return;
    unpack8(a, load16(y.at(t) + col));
    unpack8(b, load16(x.at(t) + col));
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] += b[i];
    store16(y.at(t) + col, pack8(a));
}

static __global__ void __launch_bounds__(THREADS) scale(row_view<> x, float factor, int64_t n_row, int64_t n_col)
{
    const struct octet o = find_octet(n_col);
    float v[8];
    if (o.row >= n_row) return;
    unpack8(v, load16(x.at(o.row) + o.col));
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= factor;
    store16(x.at(o.row) + o.col, pack8(v));
}

extern "C" void cuda_glu_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor gate,
                             const struct glu *glu)
{
    const int64_t n_tok = act.shape[0], width = act.shape[1];
    if (n_tok == 0) return;
    MT_REQUIRE(width % 8 == 0, "an activation of %lld columns", (long long)width);
    const row_view<> to = aligned_rows(act, "an activation"), from = aligned_rows(pre, "an activation");
    const row_view<float> scale = rows_of<float>(gate);
    if (glu_gated(glu))
        glu_fwd<<<octet_grid(n_tok, width), THREADS, 0, cuda.stream>>>(to, from, scale, n_tok, width, *glu);
    else
        relu2_fwd<<<octet_grid(n_tok, width), THREADS, 0, cuda.stream>>>(to, from, scale, n_tok, width);
    CUDA_CHECK_LAUNCH();
}

static bool narrow(int64_t width) { return width <= 2048; }
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
    if (n_tok == 0) return;
    MT_REQUIRE(width % 8 == 0, "the gradient of an activation of %lld columns", (long long)width);
    const struct relu2_rows r = {.n_row = n_tok,
                                 .width = width,
                                 .pre = aligned_rows(pre, "an activation"),
                                 .dact = aligned_rows(dact, "an activation"),
                                 .dpre = aligned_rows(dpre, "an activation"),
                                 .gate = rows_of<float>(gate),
                                 .dgate = rows_of<float>(dgate)};
    if (!glu_gated(glu)) return cuda_relu2_bwd(&r);
    (narrow(width) ? glu_bwd<32> : glu_bwd<THREADS>)<<<teams(n_tok, width), THREADS, 0, cuda.stream>>>(
        r.dpre, r.dgate, r.dact, r.pre, r.gate, n_tok, width, *glu);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_add(struct device *dev, struct tensor y, struct tensor x)
{
    if (y.shape[0] == 0) return;
    MT_REQUIRE(y.shape[1] % 8 == 0, "a sum of rows of %lld", (long long)y.shape[1]);
    add<<<octet_grid(y.shape[0], y.shape[1]), THREADS, 0, cuda.stream>>>(
        aligned_rows(y, "a sum"), aligned_rows(x, "a sum"), y.shape[0], y.shape[1]);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_scale(struct device *dev, struct tensor x, float factor)
{
    if (x.shape[0] == 0) return;
    MT_REQUIRE(x.shape[1] % 8 == 0, "a product of rows of %lld", (long long)x.shape[1]);
    scale<<<octet_grid(x.shape[0], x.shape[1]), THREADS, 0, cuda.stream>>>(aligned_rows(x, "a product"), factor,
                                                                           x.shape[0], x.shape[1]);
    CUDA_CHECK_LAUNCH();
}
