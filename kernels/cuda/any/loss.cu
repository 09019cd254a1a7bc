/* loss.cu - fused linear cross-entropy over the labelled rows, in chunks.
 * Math: logits = x[rows] W^T; nll = log(sum exp(logit - max)) + (max - logit[id]); hit = id is the arg max, ties to the
 *   lowest id; dlogits = scale * (softmax - onehot); dx[rows] = dlogits W, other rows 0. With logits: cuBLASLt writes
 *   them, loss_kernel reads them twice and overwrites them with dlogits in bf16. With exponentials (Hopper, V a
 *   multiple of 8): the epilogue of dense_wgmma.cu writes exp(logit - max) of each row in a tile of 192 columns, with
 *   maximum and sum (tiles); gradient_kernel scales the exponentials in place by these: 6 bytes per logit instead of
 *   14. dense_wgmma.cu multiplies dlogits by W where its tiles occupy the GPU, otherwise cuBLASLt. A cap needs logits;
 *   cap_kernel writes them before loss_kernel reads them: 8*N*V bytes more.
 * Shapes: x, dx [T,D] bf16; W [V,D] any format (any but bf16 is decoded once per call); rows, ids, hit [N] i32; nll
 *   [N] f32. Scratch: x and then dx of the chunk [chunk, D] bf16; logits [chunk, V] f32, dlogits from the start of the
 *   same rows; or exponentials [chunk, V] bf16 and tiles [chunk, V / 192].
 * Needs: D a multiple of 8, rows of x and dx 16-byte aligned; any V; N may be 0. A label outside the vocabulary gives
 *   a NaN loss.
 * Grid: loss_kernel, gradient_kernel: 512 threads per row; a pass for maximum, arg max and sum (gradient_kernel: over
 *   tiles), one for the gradient. move_kernel: 128 threads copy a row.
 * Bound: memory: loss_kernel reads 4*N*V bytes for the loss, reads 4*N*V and writes 2*N*V for the gradient;
 *   gradient_kernel reads and writes 2*N*V.
 * Numerics: f32 logits and sums in a fixed order; loss and arg max from them. dlogits rounded to bf16; with
 *   exponentials twice, but the label's once, from its f32 logit. A NaN stays in its row. */
#include <math.h>

#include "kernels/cuda/parts/dense.h"
#include "kernels/cuda/parts/loss.cuh"

/* Of some logits: maximum, its first index, and the sum of exp(logit - max). */
struct row_sums {
    float max, sum;
    int id;
};

static __device__ __forceinline__ struct row_sums merge(struct row_sums a, struct row_sums b)
{
    struct row_sums c;
    c.max = fmaxf(a.max, b.max);
    c.sum = a.sum * exp2f((a.max - c.max) * LOG2_E) + b.sum * exp2f((b.max - c.max) * LOG2_E);
    c.id = a.max > b.max ? a.id : b.max > a.max ? b.id : min(a.id, b.id);
    return c;
}

/* The sums of a row; every thread of the block gets it. */
static __device__ __forceinline__ struct row_sums sum_row(const float *row, int n)
{
    struct row_sums all = {-FLT_MAX, 0, INT32_MAX}; /* finite: exp(-inf - max) is 0 from the start */
    for (int g = threadIdx.x; g < (n + VECTOR - 1) / VECTOR; g += THREADS) {
        float v[VECTOR], max = all.max;
        load_group(v, row, g, n);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            if (v[j] > max) all.id = g * VECTOR + j;
            max = fmaxf(max, v[j]);
        }
        all.sum *= exp2f((all.max - max) * LOG2_E);
        all.max = max;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) all.sum += exp2f((v[j] - max) * LOG2_E);
    }
    return merge_block(all, merge);
}

/* In place: n logits become scale * (softmax - onehot) in bf16, at the start of their row. Each step reads its groups,
 * synchronises, then writes. As bf16 takes half the space, it overwrites only logits that have been read. */
static __device__ __forceinline__ void write_gradient(float *row, int n, int id, const struct row_sums *all,
                                                      float scale, float inv_cap)
{
    const float factor = scale / all->sum;
    const int n_group = (n + VECTOR - 1) / VECTOR;
    uint4 *out = (uint4 *)row;
    for (int first = 0; first < n_group; first += THREADS) {
        const int g = first + threadIdx.x;
        uint4 words;
        if (g < n_group) {
            float v[VECTOR];
            load_group(v, row, g, n);
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const float slope = cap_slope(v[j], inv_cap);
                v[j] = exp2f((v[j] - all->max) * LOG2_E) * factor;
                if (g * VECTOR + j == id) v[j] -= scale;
                v[j] *= slope;
            }
            words = bf16_pack8(v);
        }
        __syncthreads();
        if (g < n_group) out[g] = words;
    }
}

static __global__ void __launch_bounds__(THREADS)
    loss_kernel(float *nll, int32_t *hit, float *logits, int64_t ld, int n, const int32_t *ids, float scale,
                float inv_cap, bool gradient)
{
    float *row = logits + blockIdx.x * ld;
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && id < n;
    const float own = known && threadIdx.x == 0 ? row[id] : NAN;
    const struct row_sums all = sum_row(row, n);
    if (threadIdx.x == 0) {
        nll[blockIdx.x] = logf(all.sum) + (all.max - own); /* max - own first: both may be large */
        hit[blockIdx.x] = known && all.id == id;
    }
    if (gradient) write_gradient(row, n, id, &all, scale, inv_cap);
}

/* In place: a row of n exponentials, each relative to the largest logit of its tile of columns, becomes scale *
 * (softmax - onehot). tile: maximum and sum of each tile of the row; of_id: the result at the label. */
static __device__ __forceinline__ void scale_row(bf16 *row, int n, int id, float of_id, const struct tile_sums *tile,
                                                 const struct row_sums &all, float scale)
{
    const float factor = scale / all.sum;
#pragma unroll 4
    for (int g = threadIdx.x; g < n / VECTOR; g += THREADS) {
        const float own = exp2f((tile[g / (DENSE_COLS / VECTOR)].max - all.max) * LOG2_E) * factor;
        const uint4 x = ((const uint4 *)row)[g];
        uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float low = __uint_as_float(words[j] << 16) * own, high = __uint_as_float(words[j] & 0xffff0000) * own;
            if (g * VECTOR + 2 * j == id) low = of_id;
            if (g * VECTOR + 2 * j + 1 == id) high = of_id;
            words[j] = bf16_pack(low, high);
        }
        ((uint4 *)row)[g] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* own [N]: the logits of the labels; n: a multiple of 8. */
static __global__ void __launch_bounds__(THREADS)
    gradient_kernel(float *nll, int32_t *hit, bf16 *rows, int n, const struct tile_sums *tiles, const float *own,
                    const int32_t *ids, float scale, bool gradient)
{
    const int n_tile = (n + DENSE_COLS - 1) / DENSE_COLS, id = ids[blockIdx.x];
    const struct tile_sums *tile = tiles + (int64_t)blockIdx.x * n_tile;
    const float logit = id >= 0 && id < n ? own[blockIdx.x] : NAN;
    struct row_sums all = {-FLT_MAX, 0, INT32_MAX};
    for (int i = threadIdx.x; i < n_tile; i += THREADS) all = merge(all, {tile[i].max, tile[i].sum, tile[i].id});
    all = merge_block(all, merge);
    if (threadIdx.x == 0) {
        nll[blockIdx.x] = logf(all.sum) + (all.max - logit); /* max - logit first: both may be large */
        hit[blockIdx.x] = id >= 0 && id < n && all.id == id;
    }
    const float of_id = scale * (exp2f((logit - all.max) * LOG2_E) / all.sum - 1);
    if (gradient) scale_row(rows + (int64_t)blockIdx.x * n, n, id, of_id, tile, all, scale);
}

/* ---- host ---- */

struct chunk {
    struct tensor nll, hit, rows, ids;
    struct tensor part;          /* [rows, D] bf16: x, then dx */
    struct tensor logits;        /* [rows, V padded] f32; with exponentials [rows, V] bf16 */
    struct tensor own;           /* with exponentials: [rows] f32 */
    struct tile_sums *tile_sums; /* with exponentials: [rows, V / 192] */
};

/* The chunk with logits instead of exponentials. Returns dlogits, which are in the first half of every row of
 * logits. */
static struct tensor loss_from_logits(const struct device *dev, const struct chunk *c, struct tensor w, float cap,
                                      float scale, bool gradient)
{
    const int64_t n = c->rows.shape[0], n_vocab = w.shape[0];
    struct tensor dlogits = tensor_2d(c->logits.data, DT_BF16, n, n_vocab);
    dlogits.ld = 2 * c->logits.ld;
    cuda_gemm_rows(dev, tensor_cols(c->logits, 0, n_vocab), c->part, w, 1, 0);
    cap_logits(tensor_cols(c->logits, 0, n_vocab), cap);
    loss_kernel<<<grid_x(n), THREADS, 0, cuda.stream>>>(f32_ptr(c->nll), i32_ptr(c->hit), f32_ptr(c->logits),
                                                        c->logits.ld, (int)n_vocab, i32_ptr(c->ids), scale,
                                                        inverse_cap(cap), gradient);
    CUDA_CHECK_LAUNCH();
    return dlogits;
}

static struct dense product_of(struct tensor out, struct tensor a, struct tensor b, bool kn)
{
    struct dense d = {};
    d.n_row = out.shape[0], d.n_out = out.shape[1], d.n_in = a.shape[1];
    d.a = bf16_ptr(a), d.lda = a.ld;
    d.b = bf16_ptr(b), d.kn = kn;
    d.out = bf16_ptr(out), d.ld_out = out.ld;
    return d;
}

/* The chunk with exponentials, which become dlogits in place. */
static void loss_from_exponentials(const struct chunk *c, struct tensor w, float scale, bool gradient)
{
    struct dense d = product_of(c->logits, c->part, w, false);
    d.tile_sums = c->tile_sums;
    d.label = i32_ptr(c->ids);
    d.own = f32_ptr(c->own);
    cuda_dense_wgmma(&d);
    gradient_kernel<<<grid_x(d.n_row), THREADS, 0, cuda.stream>>>(f32_ptr(c->nll), i32_ptr(c->hit), d.out, (int)d.n_out,
                                                                  c->tile_sums, f32_ptr(c->own), i32_ptr(c->ids), scale,
                                                                  gradient);
    CUDA_CHECK_LAUNCH();
}

/* part = dlogits W */
static void gradient_of_hidden(struct tensor part, struct tensor dlogits, struct tensor w)
{
    const struct dense d = product_of(part, dlogits, w, true);
    if (choice_fused_head(cuda.arch, d.n_row, d.n_out) && cuda_dense_takes(&d))
        cuda_dense_wgmma(&d);
    else
        cuda_gemm(part, dlogits, false, w, false, 1, 0);
}

static void loss_of_chunk(const struct device *dev, const struct chunk *c, struct tensor dx, struct tensor x,
                          struct tensor w, float cap, float scale)
{
    const int64_t n = c->rows.shape[0];
    const int32_t *row = i32_ptr(c->rows);
    struct tensor dlogits = c->logits;
    move_rows(c->part, NULL, x, row, n);
    if (c->tile_sums)
        loss_from_exponentials(c, w, scale, dx.ndim > 0);
    else
        dlogits = loss_from_logits(dev, c, w, cap, scale, dx.ndim > 0);
    if (!dx.ndim) return;
    gradient_of_hidden(c->part, dlogits, w);
    move_rows(dx, row, c->part, NULL, n);
}

extern "C" void cuda_linear_ce(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx,
                               struct tensor x, const struct weight *w, float cap, struct tensor rows,
                               struct tensor ids, float scale, int64_t chunk)
{
    const struct scratch_head s = scratch_linear_ce(dev, w, cap, rows, chunk);
    const int64_t n_label = rows.shape[0];
    want_rows(x);
    if (dx.ndim) want_rows(dx), zero_rows(dx);
    cuda_fill_matrices(s.dense, w);
    for (int64_t first = 0, n; first < n_label; first += n) {
        struct chunk c = {};
        n = MT_MIN(s.chunk, n_label - first);
        c.own = s.own, c.tile_sums = s.tile_sums;
        c.nll = tensor_rows(nll, first, n), c.hit = tensor_rows(hit, first, n);
        c.rows = tensor_rows(rows, first, n), c.ids = tensor_rows(ids, first, n);
        c.part = tensor_rows(s.part, 0, n), c.logits = tensor_rows(s.logits, 0, n);
        loss_of_chunk(dev, &c, dx, x, s.dense, cap, scale);
    }
}
