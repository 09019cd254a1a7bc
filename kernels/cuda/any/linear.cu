/* linear.cu - a frozen dense projection with bias, residual and an adapter of up to three segments.
 * Math: y = x W^T + res + bias + scale * (drop(x) A^T) B^T; dx = dy W + drop(dxa A), dxa = scale * dy B; dA += dxa^T
 *   drop(x), dB += scale * dy^T xa. cuBLASLt computes xa, dA, dxa and dB; on Hopper with r 8 or 16
 *   grouped_pass_wgmma.cu computes dxa and dB in one pass over dy. On Hopper, where the tiles of dense_wgmma.cu occupy
 *   the GPU, it computes the products with W and with B or A, bias and residual in one pass. Otherwise cuBLASLt
 *   multiplies by W, and addend_kernel adds the product with B, bias and residual in one pass over y: before the
 *   product with W if there is no residual, otherwise after it, as a residual may be thousands of times larger than the
 *   rest. A residual without bias and adapter is copied, and the product added.
 * Shapes: x, dx [T,in], y, res, dy [T,out], xa, dxa [T, n_seg*r] bf16; bias [out] f32; gradients f32.
 * Needs: in and r multiples of 8, segments in ascending order, rows of x and xa 16-byte aligned; any width of out and
 *   the segments; T may be 0. W in any format; any but bf16 is first decoded into scratch.
 * Grid: addend_kernel: 8 warps, 128 rows x 64 columns of y; mma.sync over r, operands from global memory (xa and B are
 *   small and stay in the caches): 78 registers, 126 where it adds to y or a residual, which a thread loads before the
 *   products. Another instance stores column by column, for widths that are not multiples of 8. drop_kernel: a thread
 *   per 8 columns.
 * Bound: memory: addend writes 2*T*out bytes and reads twice as many with a residual; drop 4*T*in.
 * Numerics: f32 sums. Rounded to bf16: xa, dxa; by dense_wgmma.cu y and dx once; otherwise bias + adapter, then y; with
 *   a residual x W^T, then y, so that only one rounding has the magnitude of the residual; drop(dxa A), dx. Dropout
 *   keeps or clears elements exactly; its factor 1 / (1 - p) and scale are applied in f32. */
#include "kernels/cuda/parts/dense.h"
#include "kernels/cuda/parts/few_rows.h"
#include "kernels/cuda/parts/grouped.h"
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rng.cuh"

enum { VECTOR = 8, THREADS = 256, ROWS = 128, COLS = 64, GROUP = 32, MAX_PARTS = 7 };

/* Columns first .. end-1 of y: one segment, or a range without adapter (seg < 0). */
struct part {
    int first, end, n_tile;
    int seg, b_row; /* row of b for column `first` */
    float scale;
};

struct addend {
    bf16 *y;
    bool to_y;                /* add to y instead of overwriting it */
    const bf16 *res, *xa, *b; /* res and xa, b: or NULL */
    const float *bias;        /* or NULL */
    int64_t ld_y, ld_res, ld_xa, n_row;
    int ld_b, r;
    struct part part[MAX_PARTS];
};

/* The adapter's product for one warp: rows row and row+8 of the lane times two groups of 32 columns from col. The
 * summed index and the columns are permuted so that a lane's operands and results are contiguous: lane 4i+q has values
 * 4q .. 4q+3 of 16 along r, and columns 8q .. 8q+7 of a group, a pair from each of four tiles. */
static __device__ __forceinline__ void adapter_product(float acc[8][4], const struct addend &p, const struct part &part,
                                                       int64_t row, int col)
{
    const int lane = threadIdx.x % 32, i = lane / 4, q = lane % 4;
    const bf16 *a0 = p.xa + min(row, p.n_row - 1) * p.ld_xa + part.seg * p.r;
    const bf16 *a1 = p.xa + min(row + 8, p.n_row - 1) * p.ld_xa + part.seg * p.r;
    int b[8]; /* offsets in p.b */
#pragma unroll
    for (int t = 0; t < 8; t++) {
        const int c = min(col + t / 4 * GROUP + 8 * (i / 2) + 2 * (t % 4) + i % 2, part.end - 1);
        b[t] = (part.b_row + c - part.first) * p.ld_b;
    }
    int k = 0;
#pragma unroll 1
    for (; k + 16 <= p.r; k += 16) {
        const uint2 x0 = *(const uint2 *)(a0 + k + 4 * q), x1 = *(const uint2 *)(a1 + k + 4 * q);
        const uint32_t a[4] = {x0.x, x1.x, x0.y, x1.y};
#pragma unroll
        for (int t = 0; t < 8; t++) {
            const uint2 y = *(const uint2 *)(p.b + b[t] + k + 4 * q);
            const uint32_t pair[2] = {y.x, y.y};
            mma_bf16(acc[t], a, pair);
        }
    }
    if (k == p.r) return;
    const uint32_t a[4] = {*(const uint32_t *)(a0 + k + 2 * q), *(const uint32_t *)(a1 + k + 2 * q), 0, 0};
#pragma unroll
    for (int t = 0; t < 8; t++) {
        const uint32_t pair[2] = {*(const uint32_t *)(p.b + b[t] + k + 2 * q), 0};
        mma_bf16(acc[t], a, pair);
    }
}

static __device__ __forceinline__ void add_bf16x8(float v[8], uint4 x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        v[2 * j] += __uint_as_float(words[j] << 16);
        v[2 * j + 1] += __uint_as_float(words[j] & 0xffff0000);
    }
}

static __device__ __forceinline__ uint4 round_bf16x8(const float v[8])
{
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
        words[j] = *(const uint32_t *)&pair;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* What eight columns of a row are added to; loaded before the adapter's product, all at once. */
struct terms {
    uint4 y, res;
};
static __device__ __forceinline__ struct terms load_terms(const struct addend &p, int64_t row, int col)
{
    struct terms t = {};
    if (p.to_y) t.y = *(const uint4 *)(p.y + row * p.ld_y + col);
    if (p.res) t.res = *(const uint4 *)(p.res + row * p.ld_res + col);
    return t;
}

/* Stores eight columns of one row of y; v: the adapter's product. The residual may be by far the largest term, so it is
 * added last. */
static __device__ __forceinline__ void store_addend(const struct addend &p, float scale, int64_t row, int col,
                                                    float v[8], const struct terms &t)
{
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= scale;
    if (p.bias) {
        const float4 lo = *(const float4 *)(p.bias + col), hi = *(const float4 *)(p.bias + col + 4);
        const float bias[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += bias[j];
    }
    if (p.to_y) add_bf16x8(v, t.y);
    if (p.res) add_bf16x8(v, t.res);
    *(uint4 *)(p.y + row * p.ld_y + col) = round_bf16x8(v);
}

/* store_addend for columns col .. end-1, at most eight, one by one. */
static __device__ __forceinline__ void store_addend_columns(const struct addend &p, float scale, int64_t row, int col,
                                                            int end, const float v[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        bf16 *y = p.y + row * p.ld_y + col + j;
        float sum = v[j] * scale;
        if (col + j >= end) return;
        if (p.bias) sum += p.bias[col + j];
        if (p.to_y) sum += __bfloat162float(*y);
        if (p.res) sum += __bfloat162float(p.res[row * p.ld_res + col + j]);
        *y = __float2bfloat16_rn(sum);
    }
}

/* EIGHTS: bounds of the parts and distances of the rows are multiples of 8, and rows are 16-byte aligned. ADDS: to_y or
 * a residual. */
template <bool EIGHTS, bool ADDS>
static __global__ void __launch_bounds__(THREADS, EIGHTS &&ADDS ? 2 : 3)
    addend_kernel(const __grid_constant__ struct addend p)
{
    int tile = blockIdx.x, s = 0;
    while (tile >= p.part[s].n_tile) tile -= p.part[s++].n_tile;
    const struct part part = p.part[s];
    const int lane = threadIdx.x % 32, col = part.first + tile * COLS;
    const int64_t row = (int64_t)blockIdx.y * ROWS + threadIdx.x / 32 * 16 + lane / 4;
    float acc[8][4] = {};
    struct terms terms[2][2] = {};
#pragma unroll
    for (int i = 0; EIGHTS && ADDS && i < 4; i++) {
        const int c = col + i % 2 * GROUP + lane % 4 * VECTOR;
        if (row + i / 2 * 8 < p.n_row && c < part.end) terms[i / 2][i % 2] = load_terms(p, row + i / 2 * 8, c);
    }
    if (part.seg >= 0) adapter_product(acc, p, part, row, col);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int group = 0; group < 2; group++) {
            const int c = col + group * GROUP + lane % 4 * VECTOR;
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = acc[4 * group + j / 2][2 * half + j % 2];
            if (row + 8 * half >= p.n_row || c >= part.end) continue;
            if (EIGHTS)
                store_addend(p, part.scale, row + 8 * half, c, v, terms[half][group]);
            else
                store_addend_columns(p, part.scale, row + 8 * half, c, part.end, v);
        }
    }
}

/* dst = src where kept, else 0; dst may be src. The random counter of element (t, i) is t * n_in + i. */
static __global__ void __launch_bounds__(THREADS)
    drop_kernel(bf16 *dst, int64_t ld_dst, const bf16 *src, int64_t ld_src, int64_t n_row, int64_t n_in, uint64_t key,
                uint64_t threshold)
{
    const int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (at >= n_row * n_in) return;
    const int64_t t = at / n_in, i = at - t * n_in;
    const uint4 x = *(const uint4 *)(src + t * ld_src + i);
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint64_t counter = (uint64_t)(at + 2 * j);
        if (!rng_at_least(key, counter, threshold)) words[j] &= 0xffff0000;
        if (!rng_at_least(key, counter + 1, threshold)) words[j] &= 0xffff;
    }
    *(uint4 *)(dst + t * ld_dst + i) = make_uint4(words[0], words[1], words[2], words[3]);
}

/* ---- host ---- */

static void drop(struct tensor dst, struct tensor src, const struct lora *lora)
{
    const int64_t n = tensor_count(src);
    if (!n) return;
    drop_kernel<<<grid_x(ceil_div(n, THREADS * VECTOR)), THREADS, 0, cuda.stream>>>(
        bf16_ptr(dst), dst.ld, bf16_ptr(src), src.ld, src.shape[0], src.shape[1], lora->dropout_key,
        rng_threshold((double)lora->dropout));
    CUDA_CHECK_LAUNCH();
}

/* The adapter that products add: none where it is merged into the matrix. */
static const struct lora *added_adapter(const struct lora *lora)
{
    static const struct lora none = {};
    return lora->merged ? &none : lora;
}

static float keep_factor(const struct lora *lora) { return lora->dropout > 0 ? 1 / (1 - lora->dropout) : 1; }

/* Rows of b, and of its gradient, that belong to segment s. */
static struct tensor segment_rows(struct tensor b, const struct lora *lora, int s)
{
    int64_t first = 0;
    for (int i = 0; i < s; i++) first += lora->seg_cols[i];
    return tensor_rows(b, first, lora->seg_cols[s]);
}

static bool is_aligned(struct tensor x)
{
    return !x.ndim || ((uintptr_t)x.data % 16 == 0 && (x.ndim < 2 || x.ld % VECTOR == 0));
}

static void want_aligned(const char *name, struct tensor x)
{
    MT_REQUIRE(is_aligned(x), "%s: rows of %lld, the first at %p: not 16-byte aligned", name, (long long)x.ld, x.data);
}

/* Divides the columns of y at the segments; returns the number of tiles. */
static int64_t cut_columns(struct part part[MAX_PARTS], int64_t n_out, const struct lora *lora)
{
    int64_t n = 0, n_tile = 0, b_row = 0, at = 0;
    const int n_seg = lora->r ? lora->n_seg : 0;
    for (int s = 0; s <= n_seg; s++) {
        const int64_t first = s < n_seg ? lora->seg_first[s] : n_out, cols = s < n_seg ? lora->seg_cols[s] : 0;
        const struct part between = {(int)at, (int)first, (int)ceil_div(first - at, COLS), -1, 0, 0};
        const struct part segment = {(int)first, (int)(first + cols), (int)ceil_div(cols, COLS),
                                     s,          (int)b_row,          cols ? lora->scale[s] : 0};
        if (between.n_tile) part[n++] = between;
        if (segment.n_tile) part[n++] = segment;
        n_tile += between.n_tile + segment.n_tile;
        b_row += cols;
        at = first + cols;
    }
    return n_tile;
}

static bool in_eights(const struct part *part, int64_t n_tile)
{
    for (; n_tile > 0; n_tile -= part++->n_tile)
        if (part->first % VECTOR || part->end % VECTOR) return false;
    return true;
}

/* y = (to_y: +=) res + bias + adapter */
static void write_addend(struct tensor y, bool to_y, struct tensor xa, struct tensor bias, struct tensor res,
                         const struct lora *lora)
{
    struct addend p = {};
    p.y = bf16_ptr(y), p.ld_y = y.ld, p.n_row = y.shape[0];
    p.to_y = to_y;
    p.bias = f32_ptr(bias);
    p.res = bf16_ptr(res), p.ld_res = res.ld;
    p.r = (int)lora->r;
    if (lora->r) p.xa = bf16_ptr(xa), p.ld_xa = xa.ld, p.b = bf16_ptr(lora->b), p.ld_b = (int)lora->b.ld;
    const int64_t n_tile = cut_columns(p.part, y.shape[1], lora), n_band = ceil_div(y.shape[0], ROWS);
    MT_REQUIRE(n_band <= 65535, "%lld rows", (long long)y.shape[0]);
    const bool eights = in_eights(p.part, n_tile) && is_aligned(y) && is_aligned(res) && is_aligned(bias);
    const bool adds = to_y || res.ndim;
    const auto kernel = !eights ? addend_kernel<false, true>
                        : adds  ? addend_kernel<true, true>
                                : addend_kernel<true, false>;
    kernel<<<dim3(grid_x(n_tile), (unsigned)n_band), THREADS, 0, cuda.stream>>>(p);
    CUDA_CHECK_LAUNCH();
}

/* ---- on Hopper: one product, with the adapter in its accumulators; false: the kernel does not take it */

static bool fused_product(const struct device *dev, struct dense *d, struct tensor out, struct tensor a,
                          struct tensor dense)
{
    d->n_row = out.shape[0];
    d->n_out = out.shape[1];
    d->n_in = a.shape[1];
    d->a = bf16_ptr(a);
    d->lda = a.ld;
    d->b = bf16_ptr(dense);
    d->out = bf16_ptr(out);
    d->ld_out = out.ld;
    if (!choice_fused_dense(cuda.arch, choice_rows(dev, d->n_row), d->n_out) || !cuda_dense_takes(d)) return false;
    cuda_dense_wgmma(d);
    return true;
}

/* y = x W^T + bias + adapter + res */
static bool fused_fwd(const struct device *dev, struct tensor y, struct tensor xa, struct tensor x, struct tensor dense,
                      struct tensor bias, struct tensor res, const struct lora *lora)
{
    struct dense d = {};
    int64_t row = 0;
    d.bias = f32_ptr(bias);
    d.res = bf16_ptr(res), d.ld_res = res.ld;
    if (lora->r) d.r = lora->r, d.la = bf16_ptr(xa), d.ld_la = xa.ld, d.lb = bf16_ptr(lora->b), d.n_part = lora->n_seg;
    for (int s = 0; s < d.n_part; row += lora->seg_cols[s++]) {
        const int64_t first = lora->seg_first[s];
        d.part[s] = {(int)first, (int)(first + lora->seg_cols[s]), (int)(s * lora->r), (int)row, lora->scale[s]};
    }
    return fused_product(dev, &d, y, x, dense);
}

/* dx = dy W + dxa A */
static bool fused_bwd(const struct device *dev, struct tensor dx, struct tensor dy, struct tensor dxa,
                      struct tensor dense, const struct lora *lora)
{
    struct dense d = {};
    if (!lora->r || lora->dropout > 0) return false;
    d.kn = true;
    d.r = lora->n_seg * lora->r;
    d.la = bf16_ptr(dxa);
    d.ld_la = dxa.ld;
    d.lb = bf16_ptr(lora->a);
    d.n_part = 1;
    d.part[0] = {0, (int)dx.shape[1], 0, 0, 1};
    return fused_product(dev, &d, dx, dy, dense);
}

/* ---- ops */

static void product_and_addend(const struct device *dev, struct tensor y, struct tensor xa, struct tensor x,
                               struct tensor dense, struct tensor bias, struct tensor res, const struct lora *added)
{
    const bool small = added->r || bias.ndim, last = small && res.ndim, first = !last && (small || res.ndim);
    if (first) write_addend(y, false, xa, bias, res, added);
    cuda_gemm_rows(dev, y, x, dense, 1, first);
    if (last) write_addend(y, true, xa, bias, res, added);
}

/* ---- few rows: W, A and B are read once, in their formats */

static void few_product(struct tensor y, struct tensor xa, struct tensor x, const struct weight *w, struct tensor bias,
                        struct tensor res, const struct lora *lora)
{
    struct few_rows f = {.w = *w, .n_row = y.shape[0]};
    int64_t row = 0;
    f.a = bf16_ptr(x), f.lda = x.ld;
    f.out = bf16_ptr(y), f.ld_out = y.ld;
    f.bias = f32_ptr(bias);
    f.res = bf16_ptr(res), f.ld_res = res.ld;
    if (lora->r) f.r = lora->r, f.la = bf16_ptr(xa), f.ld_la = xa.ld, f.lb = bf16_ptr(lora->b), f.n_part = lora->n_seg;
    for (int s = 0; s < f.n_part; row += lora->seg_cols[s++]) {
        const int64_t first = lora->seg_first[s];
        f.part[s] = {(int)first, (int)(first + lora->seg_cols[s]), (int)(s * lora->r), (int)row, lora->scale[s]};
    }
    cuda_few_rows(&f);
}

static void few_fwd(struct tensor y, struct tensor xa, struct tensor x, const struct proj *proj, struct tensor res)
{
    const struct lora *lora = &proj->lora, none = {};
    const struct tensor absent = {};
    struct weight a = {.format = WF_BF16, .n_exp = 1, .n_out = lora->n_seg * lora->r, .n_in = proj->w.n_in};
    a.data = lora->a.data;
    if (lora->r) few_product(xa, absent, x, &a, absent, absent, &none);
    few_product(y, xa, x, &proj->w, proj->bias, res, added_adapter(lora));
}

extern "C" void cuda_linear_fwd(struct device *dev, struct tensor y, struct tensor xa, struct tensor x,
                                const struct proj *proj, struct tensor res)
{
    const struct lora *lora = &proj->lora, *added = added_adapter(lora);
    const struct tensor bias = proj->bias;
    const struct scratch_linear s = scratch_linear_fwd(dev, x, proj);
    if (!tensor_count(y)) return;
    if (choice_few_rows(dev, proj, y.shape[0])) return few_fwd(y, xa, x, proj, res);
    cuda_fill_dense(s.dense, proj);
    if (s.kept.data != x.data) drop(s.kept, x, lora);
    const bool fusable = added->r || res.ndim;
    if (lora->r) want_aligned("x", x), want_aligned("xa", xa), want_aligned("b", lora->b);
    if (lora->r) cuda_gemm_rows(dev, xa, s.kept, lora->a, keep_factor(lora), 0);
    if (!fusable || !fused_fwd(dev, y, xa, x, s.dense, bias, res, added))
        product_and_addend(dev, y, xa, x, s.dense, bias, res, added);
}

/* dx = dy W + drop(dxa A) */
static void input_gradient(const struct device *dev, struct tensor dx, struct tensor dy, struct tensor dxa,
                           struct tensor dense, const struct lora *lora)
{
    if (fused_bwd(dev, dx, dy, dxa, dense, lora)) return;
    if (lora->r) cuda_gemm(dx, dxa, false, lora->a, false, keep_factor(lora), 0);
    if (lora->r && lora->dropout > 0) drop(dx, dx, lora);
    cuda_gemm(dx, dy, false, dense, false, 1, lora->r > 0);
}

/* dxa = scale dy B, dB += scale dy^T xa */
static void two_passes(struct tensor dxa, struct tensor dy, struct tensor xa, const struct proj *proj)
{
    const struct lora *lora = &proj->lora;
    for (int s = 0; s < lora->n_seg; s++) {
        const struct tensor of_dy = tensor_cols(dy, lora->seg_first[s], lora->seg_cols[s]);
        cuda_gemm(tensor_cols(dxa, s * lora->r, lora->r), of_dy, false, segment_rows(lora->b, lora, s), false,
                  lora->scale[s], 0);
        cuda_gemm(segment_rows(proj->grad.b, lora, s), of_dy, true, tensor_cols(xa, s * lora->r, lora->r), false,
                  lora->scale[s], 1);
    }
}

/* dxa and the gradient of B in one pass over dy; false: the kernel does not take these sizes. */
static bool one_pass(struct tensor dxa, struct tensor dy, struct tensor xa, const struct proj *proj, void *partial)
{
    const struct lora *lora = &proj->lora;
    struct grouped_wgrad pass[GROUPED_PASSES] = {};
    bool takes =
        choice_one_pass(cuda.arch, lora->r) && lora->n_seg <= GROUPED_PASSES && is_aligned(dy) && is_aligned(xa);
    for (int s = 0; takes && s < lora->n_seg; s++) {
        struct grouped_wgrad *g = &pass[s];
        takes = lora->seg_first[s] % VECTOR == 0 && lora->seg_cols[s] % VECTOR == 0 && lora->seg_cols[s] > 0;
        g->n_row = dy.shape[0];
        g->n_exp = 1;
        g->n_wide = lora->seg_cols[s];
        g->r = lora->r;
        g->wide = bf16_ptr(dy) + lora->seg_first[s];
        g->ld_wide = dy.ld;
        g->thin = bf16_ptr(xa) + s * lora->r;
        g->ld_thin = xa.ld;
        g->scale = g->product_scale = lora->scale[s];
        g->out = f32_ptr(segment_rows(proj->grad.b, lora, s));
        g->partial = partial;
        g->b = bf16_ptr(segment_rows(lora->b, lora, s));
        g->product = bf16_ptr(dxa) + s * lora->r;
        g->ld_product = dxa.ld;
    }
    if (takes) cuda_grouped_pass(pass, lora->n_seg);
    return takes;
}

extern "C" void cuda_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                struct tensor xa, const struct proj *proj)
{
    const struct lora *lora = &proj->lora;
    const struct scratch_linear s = scratch_linear_bwd(dev, dx, dy, x, proj);
    if (!dy.shape[0]) return;
    if (dx.ndim) cuda_fill_dense(s.dense, proj);
    if (s.kept.data != x.data) drop(s.kept, x, lora);
    want_aligned("dx", dx), want_aligned("x", x);
    if (lora->r && !one_pass(s.dxa, dy, xa, proj, s.partial)) two_passes(s.dxa, dy, xa, proj);
    if (dx.ndim) input_gradient(dev, dx, dy, s.dxa, s.dense, added_adapter(lora));
    if (lora->r) cuda_gemm(proj->grad.a, s.dxa, true, s.kept, false, keep_factor(lora), 1);
}

/* ---- a block-diagonal product: the columns of every group times its own frozen matrix, one product of cuBLASLt per
 * group. Packed weights are decoded to bf16 first, all groups in one launch. Bound: 2 T G (I + O) + 2 G O I bytes;
 * 2 T G I O FLOPs: compute bound from a few hundred tokens on. */

/* All matrices of w as bf16 [G*O, I]. */
static struct tensor all_matrices(struct device *dev, const struct weight *w)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor out = scratch_matrices(dev, w, false);
    arena_release(&dev->work, mark);
    cuda_fill_matrices(out, w);
    return out;
}

extern "C" void cuda_group_linear_fwd(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    const struct tensor all = all_matrices(dev, w);
    for (int64_t g = 0; g < w->n_exp; g++)
        cuda_gemm_rows(dev, tensor_cols(y, g * w->n_out, w->n_out), tensor_cols(x, g * w->n_in, w->n_in),
                       tensor_rows(all, g * w->n_out, w->n_out), 1, 0);
}

extern "C" void cuda_group_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w)
{
    const struct tensor all = all_matrices(dev, w);
    for (int64_t g = 0; g < w->n_exp; g++)
        cuda_gemm(tensor_cols(dx, g * w->n_in, w->n_in), tensor_cols(dy, g * w->n_out, w->n_out), false,
                  tensor_rows(all, g * w->n_out, w->n_out), false, 1, 0);
}
