/* adapters.cu - DoRA of a dense projection (struct dora): norms of the rows of W + scale B A, the product scaled by
 * m / norm, and its gradient. "Rows" below: the adapters of several sequences, added to a product that has no adapter
 * (struct lora_rows).
 *
 * Math:     norm[i] = |W_i + scale * sum over r of B[i, r] A[r, :]|; y = g y + bias + res, g = m / norm;
 *           z = g dy, dm += sum over rows of dy z / norm. Rows: y[m] += scale (x[m] A^T) B^T, A and B of row m.
 * Shapes:   norm, m, dm [rows of B] f32; A [R, in], B [rows, R] f32; y, z, dy, res [T, out] bf16, bias [out] f32.
 *           Rows: x, xa, A, B bf16, stacked by expert.
 * Needs:    in a multiple of 8, weight_loads8. Rows: R a multiple of 8, 16-byte aligned rows.
 * Grid:     norms: blocks of 8 warps; a warp has ROWS rows, of which a lane reads 8 columns at a time. fwd: a thread
 *           per value. bwd: 32 columns and 8 rows at a time, a block for all rows of its columns. Rows: x A^T has a
 *           warp per value of xa, the other product a thread per value of y; blocks of rows without an adapter end at
 *           once.
 * Bound:    norms: 2 in out R FLOPs outside the tensor cores, A from L1; fwd and bwd 4 to 6 T out bytes: memory bound.
 *           Rows: 2 R (in + out) bytes of A and B for each row, from L2 where rows share adapter and expert.
 * Numerics: f32, norms f64; sums over a row or over all T in an order that depends only on the sizes. Rows: xa is
 *           rounded to bf16, as in products with one adapter; y is rounded once more than in those. */
#include "kernels/cuda/format/formats.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    ROWS = 4,
    BAND = WARPS * ROWS,
    VECTOR = 8,
    WIDTH = 32,
    DEPTH = THREADS / WIDTH
};

struct part {
    int64_t first, count, b_row; /* columns; the first row of B */
};
struct parts {
    struct part of[3];
    int n;
};

static struct parts parts_of(const struct lora *l)
{
    struct parts p = {};
    int64_t row = 0;
    for (int s = 0; s < l->n_seg; row += l->seg_cols[s++]) p.of[p.n++] = {l->seg_first[s], l->seg_cols[s], row};
    return p;
}

/* The row of B of an output column, or -1. */
static __device__ __forceinline__ int64_t row_of(const struct parts &p, int64_t col)
{
    for (int s = 0; s < p.n; s++)
        if (col >= p.of[s].first && col < p.of[s].first + p.of[s].count) return p.of[s].b_row + col - p.of[s].first;
    return -1;
}

static __device__ __forceinline__ float gain(const float *m, const float *norm, int64_t row)
{
    if (row < 0) return 1;
    return norm[row] > 0 ? m[row] / norm[row] : 0;
}

/* The norms of the rows of one segment: a [r, n_in], b [n_row, r]; `first`: its first row in w. */
template <typename FORMAT>
static __global__ void __launch_bounds__(THREADS)
    row_norms(float *__restrict__ norm, const struct source s, const float *__restrict__ a, const float *__restrict__ b,
              int r, float scale, int64_t first, int64_t n_row)
{
    __shared__ float code[16];
    const int lane = threadIdx.x % 32;
    const int64_t n_in = s.w.n_in, row = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    if constexpr (FORMAT::coded)
        if (threadIdx.x < 16) code[threadIdx.x] = FORMAT::code(s, threadIdx.x);
    __syncthreads();
    double sum[ROWS] = {};
    for (int64_t c = lane * VECTOR; c < n_in; c += 32 * VECTOR) {
        float acc[ROWS][VECTOR] = {};
        for (int k = 0; k < r; k++) {
            const float4 lo = *(const float4 *)(a + k * n_in + c), hi = *(const float4 *)(a + k * n_in + c + 4);
            const float at[VECTOR] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float bk = row + i < n_row ? b[(row + i) * r + k] : 0;
#pragma unroll
                for (int j = 0; j < VECTOR; j++) acc[i][j] = __fmaf_rn(bk, at[j], acc[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (row + i >= n_row) break;
            float x[VECTOR], squares = 0;
            FORMAT::values8(x, s, code, 0, (uint32_t)(((first + row + i) * n_in + c) / VECTOR));
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                x[j] = __fmaf_rn(scale, acc[i][j], x[j]);
                squares = __fmaf_rn(x[j], x[j], squares);
            }
            sum[i] += (double)squares;
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const double whole = warp_sum(sum[i]);
        if (!lane && row + i < n_row) norm[row + i] = (float)sqrt(whole);
    }
}

extern "C" void cuda_row_norm(struct device *dev, struct tensor norm, const struct proj *proj)
{
    const struct lora *l = &proj->lora;
    const struct source s = source_of(&proj->w);
    const struct parts p = parts_of(l);
    MT_REQUIRE(weight_loads8(&proj->w), "norms of rows of %lld %s", (long long)proj->w.n_in,
               weight_format_name(proj->w.format));
    for (int i = 0; i < p.n; i++) {
        const struct part *q = &p.of[i];
        if (!q->count) continue;
        with_decoder(s.w.format, [&](auto decoder) {
            row_norms<decltype(decoder)><<<grid_x(ceil_div(q->count, BAND)), THREADS, 0, cuda.stream>>>(
                f32_ptr(norm) + q->b_row, s, f32_ptr(l->master_a) + i * l->r * s.w.n_in,
                f32_ptr(l->master_b) + q->b_row * l->r, (int)l->r, l->scale[i], q->first, q->count);
        });
        CUDA_CHECK_LAUNCH();
    }
}

static __global__ void __launch_bounds__(THREADS)
    scale_columns(row_view<> y, int64_t n_row, int64_t n_col, const struct parts p, const float *m, const float *norm,
                  const float *bias, row_view<> res)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, t = i / n_col, c = i - t * n_col;
    if (t >= n_row) return;
    float v = gain(m, norm, row_of(p, c)) * __bfloat162float(y.at(t)[c]);
    if (bias) v += bias[c];
    if (res.p) v += __bfloat162float(res.at(t)[c]);
    y.at(t)[c] = __float2bfloat16_rn(v);
}

extern "C" void cuda_dora_fwd(struct device *dev, struct tensor y, const struct proj *proj, struct tensor res)
{
    const struct dora *d = &proj->dora;
    const int64_t n = tensor_count(y);
    if (!n) return;
    scale_columns<<<grid_x(ceil_div(n, THREADS)), THREADS, 0, cuda.stream>>>(
        rows_of(y), y.shape[0], y.shape[1], parts_of(&proj->lora), f32_ptr(d->m), f32_ptr(d->norm), f32_ptr(proj->bias),
        rows_of(res));
    CUDA_CHECK_LAUNCH();
}

static __global__ void __launch_bounds__(THREADS)
    scale_gradient(row_view<> z, row_view<> dy, int64_t n_row, int64_t n_col, const struct parts p, const float *m,
                   const float *norm, float *grad)
{
    __shared__ float part[DEPTH][WIDTH];
    const int x = threadIdx.x % WIDTH, first = threadIdx.x / WIDTH;
    const int64_t c = (int64_t)blockIdx.x * WIDTH + x, row = c < n_col ? row_of(p, c) : -1;
    const float g = gain(m, norm, row);
    float sum = 0;
#pragma unroll 4
    for (int64_t t = first; t < n_row && c < n_col; t += DEPTH) {
        const float d = __bfloat162float(dy.at(t)[c]);
        sum = __fmaf_rn(d, __bfloat162float(z.at(t)[c]), sum);
        z.at(t)[c] = __float2bfloat16_rn(g * d);
    }
    part[first][x] = sum;
    __syncthreads();
    if (first || row < 0 || !grad || !(norm[row] > 0)) return;
    for (int i = 1; i < DEPTH; i++) sum += part[i][x];
    grad[row] += sum / norm[row];
}

extern "C" void cuda_dora_bwd(struct device *dev, struct tensor z, struct tensor dy, const struct proj *proj)
{
    const struct dora *d = &proj->dora;
    if (!tensor_count(z)) return;
    scale_gradient<<<grid_x(ceil_div(z.shape[1], WIDTH)), THREADS, 0, cuda.stream>>>(
        rows_of(z), rows_of(dy), z.shape[0], z.shape[1], parts_of(&proj->lora), f32_ptr(d->m), f32_ptr(d->norm),
        f32_ptr(d->grad));
    CUDA_CHECK_LAUNCH();
}

/* ---- adapters of several sequences ---- */

struct member {
    const bf16 *a, *b;
    int64_t a_step, b_step; /* from an expert to the next */
    int r, n_seg, first[3], cols[3];
    float scale[3];
};
struct job {
    row_view<> y, xa, x;
    const int32_t *group, *row_slot, *idx; /* row_slot NULL: rows are tokens */
    int top_k, n, n_in;
    bool by_token;
    struct member of[LORA_SET];
};

/* The adapter of row m, its token and its expert. NULL: the row has no adapter. */
static __device__ __forceinline__ const struct member *member_of(const struct job &job, int64_t m, int64_t *token,
                                                                 int64_t *expert)
{
    const int slot = job.row_slot ? job.row_slot[m] : (int)m;
    *token = job.row_slot ? slot / job.top_k : m;
    *expert = job.row_slot ? job.idx[slot] : 0;
    const int g = job.group[*token];
    return g < job.n && job.of[g].r ? &job.of[g] : NULL;
}

static __global__ void __launch_bounds__(THREADS) thin(const __grid_constant__ struct job job)
{
    const int64_t m = blockIdx.x;
    const int k = (int)(blockIdx.y * WARPS + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    int64_t t, e;
    const struct member *l = member_of(job, m, &t, &e);
    if (!l || k >= l->n_seg * l->r) return;
    const bf16 *x = job.x.at(job.by_token ? t : m), *a = l->a + e * l->a_step + (int64_t)k * job.n_in;
    float sum = 0, v[8], w[8];
    for (int i = 8 * lane; i < job.n_in; i += 256) {
        unpack8(v, load16(x + i));
        unpack8(w, load16(a + i));
#pragma unroll
        for (int c = 0; c < 8; c++) sum += v[c] * w[c];
    }
    sum = warp_sum(sum);
    if (lane == 0) job.xa.at(m)[k] = __float2bfloat16_rn(sum);
}

static __global__ void __launch_bounds__(THREADS) wide(const __grid_constant__ struct job job)
{
    const int64_t m = blockIdx.x;
    int row = (int)(blockIdx.y * THREADS + threadIdx.x), s = 0;
    int64_t t, e;
    const struct member *l = member_of(job, m, &t, &e);
    if (!l) return;
    const bf16 *b = l->b + e * l->b_step + (int64_t)row * l->r;
    while (s < l->n_seg && row >= l->cols[s]) row -= l->cols[s++];
    if (s == l->n_seg) return;
    const bf16 *xa = job.xa.at(m) + s * l->r;
    float sum = 0, v[8], w[8];
    for (int k = 0; k < l->r; k += 8) {
        unpack8(v, load16(xa + k));
        unpack8(w, load16(b + k));
#pragma unroll
        for (int c = 0; c < 8; c++) sum += v[c] * w[c];
    }
    bf16 *y = job.y.at(m) + l->first[s] + row;
    *y = __float2bfloat16_rn(__bfloat162float(*y) + l->scale[s] * sum);
}

static struct member member_from(const struct lora *l, int64_t n_in)
{
    struct member m = {};
    if (!l->r) return m;
    MT_REQUIRE(l->r % 8 == 0 && n_in % 8 == 0 && rows_aligned(l->a) && rows_aligned(l->b) && l->a.ld == n_in &&
                   l->b.ld == l->r,
               "an adapter of rank %lld, %lld inputs, in a set", (long long)l->r, (long long)n_in);
    m.a = (const bf16 *)l->a.data, m.b = (const bf16 *)l->b.data;
    m.a_step = l->a.shape[l->a.ndim - 2] * l->a.ld, m.b_step = l->b.shape[l->b.ndim - 2] * l->b.ld;
    m.r = (int)l->r, m.n_seg = l->n_seg;
    for (int s = 0; s < l->n_seg; s++)
        m.first[s] = (int)l->seg_first[s], m.cols[s] = (int)l->seg_cols[s], m.scale[s] = l->scale[s];
    return m;
}

extern "C" void cuda_lora_rows(struct device *, struct tensor y, struct tensor xa, struct tensor x,
                               const struct proj *proj, const struct route *r, bool by_token)
{
    const struct lora_set *set = proj->rows.set;
    struct job job = {};
    int64_t most_k = 0, most_rows = 0;
    job.y = rows_of(y), job.xa = aligned_rows(xa, "a set of adapters"), job.x = aligned_rows(x, "a set of adapters");
    job.group = i32_ptr(proj->rows.group);
    if (r) job.row_slot = i32_ptr(r->row_slot), job.idx = i32_ptr(r->idx), job.top_k = (int)r->idx.shape[1];
    job.n = set->n, job.n_in = (int)proj->w.n_in, job.by_token = by_token;
    for (int g = 0; g < set->n; g++) {
        const struct member m = job.of[g] = member_from(&set->of[g], proj->w.n_in);
        most_k = MT_MAX(most_k, (int64_t)m.n_seg * m.r);
        most_rows = MT_MAX(most_rows, (int64_t)m.cols[0] + m.cols[1] + m.cols[2]);
    }
    if (y.shape[0] == 0 || most_k == 0) return;
    thin<<<dim3(grid_x(y.shape[0]), (unsigned)ceil_div(most_k, WARPS)), THREADS, 0, cuda.stream>>>(job);
    wide<<<dim3(grid_x(y.shape[0]), (unsigned)ceil_div(most_rows, THREADS)), THREADS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
