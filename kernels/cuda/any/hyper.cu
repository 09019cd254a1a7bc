/* hyper.cu - hyper-connections: sums of residual streams with weights that follow from the streams, and their backward.
 * Math: kernels/ops/ops.h. Backward of a normalisation o = c / den along a line: dc = (do - sum of do * o) / den; of
 *   the softmax P: dz = P (dC - row sum of dC * P); dx += rstd (fn^T dm) - x rstd^2 / (N D) <dm, m>.
 * Shapes: x, out, dx, dout [T, N*D], y, f, dy, df [T, D] bf16 (views); m, dm [T, V], rstd [T] f32, V = (2 + N) N or N;
 *   fn [V, N*D], base [V], scale [3] f32. T may be 0.
 * Needs: D % 8 == 0, 16-byte aligned rows, N <= 4. Scratch on dev->work: at most 800 bytes per token.
 * Kernels: pre forward: `values`, mma.sync over 64 tokens and an eighth of the columns; x is exact in bf16, and fn is
 *   the sum of three bf16, so the products are those of f32. `pre_sum`, a block per token, then reads x again.
 *   Post forward: `mix`, 16 threads per token, an element of C each; `post_sum`, a block per token.
 *   Post backward: `mix`; `unmix`, a block per token: df, dx, the N (N + 1) dot products; `mix_bwd`.
 *   Pre backward: `pre_dots`, a block per token; `values_bwd`, mma.sync: a warp keeps 32 columns of fn in registers and
 *   walks over 128 tokens. Both factors are sums of two bf16, whose error (2^-16) is below the rounding of dx.
 * Bound at N = 4, in rows of D bf16 moved per token: pre forward 5, and x a second time; post forward 9; post backward
 *   14; pre backward 13, and x and dy a second time: memory bound.
 * Numerics: f32, one rounding at the end; sums in a fixed order. */
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum {
    TOKENS = 64,           /* of a block of values */
    WALK = 128,            /* of a block of values_bwd */
    SPLITS = HYPER_SPLITS, /* blocks over the columns of values */
    VALUES = 24,           /* largest V */
    PER_TOKEN = 128        /* threads of a block per token */
};
enum { N_MAX = MT_MAX_STREAMS, COEFS = HYPER_COEFS }; /* what mix writes: post, C in rows of N_MAX */
static_assert(VALUES == (2 + N_MAX) * N_MAX && N_MAX == 4, "16 threads per matrix");

static row_view<> streams_of(struct tensor x) { return aligned_rows(x, "hyper-connections"); }

struct hyper_job {
    int n_stream, n_value, n_iter;
    int64_t n_tok, dim, n_col;
    float eps, norm_eps;
    const float *fn, *base, *scale;
    int64_t ld_fn;
};
static struct hyper_job job_of(struct tensor x, const struct hyper *h)
{
    return (struct hyper_job){
        (int)h->n_stream, (int)hyper_values(h), h->n_iter,      x.shape[0],       x.shape[1] / h->n_stream, x.shape[1],
        h->eps,           h->norm_eps,          f32_ptr(h->fn), f32_ptr(h->base), f32_ptr(h->scale),        h->fn.ld};
}

static __device__ inline float raw_pre(const struct hyper_job &j, const float *m, int i)
{
    return sigmoid(m[i] * j.scale[0] + j.base[i]);
}

/* ---- m and rstd */

static __device__ inline float cut(float v) { return __uint_as_float(__float_as_uint(v) & 0xffff0000u); }
/* The upper halves of two floats as a pair of bf16; `low` is in the lower half of the word. */
static __device__ inline uint32_t upper2(float low, float high)
{
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
/* Eight floats as the sum of three bf16 each, in pairs: 8 of the 24 bits of a float in each. */
static __device__ inline void split3(uint32_t part[3][4], const float v[8])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = v[2 * i], high = v[2 * i + 1];
#pragma unroll
        for (int p = 0; p < 3; p++) {
            part[p][i] = upper2(low, high);
            low -= cut(low);
            high -= cut(high);
        }
    }
}

static __device__ inline float square_sum(uint4 u)
{
    float v[8], sum = 0;
    unpack8(v, u);
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    return sum;
}

/* part [SPLITS, T, 8 TILES + 1] =: fn x and the sum of squares over a range of columns. A warp has 32 tokens and every
 * fourth group of 32 columns. x and fn permute the columns of a group alike, so that a lane has 8 consecutive ones. */
template <int TILES>
static __global__ __launch_bounds__(256) void values(float *part, row_view<> x, const struct hyper_job j, int per_split)
{
    enum { WIDTH = 8 * TILES + 1 };
    __shared__ float sums[8][32][WIDTH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int64_t first = (int64_t)blockIdx.x * TOKENS + warp % 2 * 32;
    const int end = (int)MT_MIN((int64_t)(blockIdx.y + 1) * per_split, j.n_col);
    float acc[2][TILES][4] = {}, square[4] = {};
#pragma unroll 2
    for (int col = blockIdx.y * per_split + warp / 2 * 32 + 8 * quad; col - 8 * quad < end; col += 128) {
        uint4 a[4];
        const bool inside = col < end;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t t = first + 8 * i + row;
            a[i] = inside && t < j.n_tok ? load16(x.at(t) + col) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float w[8] = {};
            uint32_t b[3][4];
            if (inside && 8 * n + row < j.n_value) load_f32x8(w, j.fn + (8 * n + row) * j.ld_fn + col);
            split3(b, w);
#pragma unroll
            for (int p = 0; p < 3; p++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t low[4] = {a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y};
                    const uint32_t high[4] = {a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w};
                    mma_bf16(acc[i][n], low, b[p]);
                    mma_bf16(acc[i][n], high, b[p] + 2);
                }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) square[i] += square_sum(a[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int k = 0; k < 2; k++) sums[warp][8 * i + row][8 * n + 2 * quad + k] = acc[i / 2][n][i % 2 * 2 + k];
        square[i] = warp_sum(square[i], 4);
        if (quad == 0) sums[warp][8 * i + row][8 * TILES] = square[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TOKENS * WIDTH; i += blockDim.x) {
        const int token = i / WIDTH, v = i % WIDTH, half = token / 32;
        const int64_t t = (int64_t)blockIdx.x * TOKENS + token;
        float sum = 0;
        for (int k = 0; k < 4; k++) sum += sums[2 * k + half][token % 32][v];
        if (t < j.n_tok) part[(blockIdx.y * j.n_tok + t) * WIDTH + v] = sum;
    }
}

/* y, m, rstd of a token. width: columns of part */
template <int N>
static __global__ __launch_bounds__(PER_TOKEN) void pre_sum(row_view<> y, float *m, float *rstd, row_view<> x,
                                                            const float *part, int width, const struct hyper_job j)
{
    __shared__ float value[VALUES + 1], pre[N];
    const int64_t t = blockIdx.x;
    const int v = threadIdx.x;
    if (v < width) {
        float sum = 0;
        for (int s = 0; s < SPLITS; s++) sum += part[(s * j.n_tok + t) * width + v];
        value[v] = sum;
    }
    __syncthreads();
    const float r = 1 / sqrtf(value[width - 1] / (float)j.n_col + j.norm_eps);
    if (v < j.n_value) {
        m[t * j.n_value + v] = r * value[v];
        if (v < N) pre[v] = sigmoid(r * value[v] * j.scale[0] + j.base[v]) + j.eps;
        if (v == 0) rstd[t] = r;
    }
    __syncthreads();
    for (int64_t col = 8 * v; col < j.dim; col += 8 * PER_TOKEN) {
        float sum[8] = {};
#pragma unroll
        for (int i = 0; i < N; i++) {
            float u[8];
            unpack8(u, load16(x.at(t) + i * j.dim + col));
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] += pre[i] * u[k];
        }
        store16(y.at(t) + col, pack8(sum));
    }
}

/* ---- post and C: 16 lanes per token; lane 4 j + k has element (j, k) */

struct element {
    int64_t t;
    int row, col;
    bool on; /* inside N x N; other elements stay 0 */
    float soft, c;
};

static __device__ inline float line_sum(float v, bool rows)
{
    v += __shfl_xor_sync(0xffffffffu, v, rows ? 1 : 4);
    return v + __shfl_xor_sync(0xffffffffu, v, rows ? 2 : 8);
}
static __device__ inline float divisor(const struct element &e, float c, bool rows, float eps)
{
    const float sum = line_sum(c, rows);
    return e.on ? sum + eps : 1;
}

static __device__ inline struct element soft_of(const float *m, const struct hyper_job &j)
{
    const int lane = threadIdx.x % 16, n = j.n_stream;
    struct element e = {((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 16, lane / 4, lane % 4};
    const int v = 2 * n + n * e.row + e.col;
    e.on = e.row < n && e.col < n;
    const float z = e.on ? m[MT_MIN(e.t, j.n_tok - 1) * j.n_value + v] * j.scale[2] + j.base[v] : -INFINITY;
    float top = fmaxf(z, __shfl_xor_sync(0xffffffffu, z, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float power = e.on ? expf(z - top) : 0, sum = line_sum(power, true);
    e.soft = e.on ? power / sum : 0;
    e.c = e.on ? e.soft + j.eps : 0;
    return e;
}

/* coef [T, COEFS] =: post, C */
static __global__ void mix(float *coef, const float *m, const struct hyper_job j)
{
    const int lane = threadIdx.x % 16, n = j.n_stream;
    struct element e = soft_of(m, j);
    for (int s = 0; s < 2 * j.n_iter - 1; s++) e.c /= divisor(e, e.c, s % 2, j.eps);
    if (e.t >= j.n_tok) return;
    coef[e.t * COEFS + N_MAX + lane] = e.c;
    if (lane < N_MAX)
        coef[e.t * COEFS + lane] =
            lane < n ? 2 * sigmoid(m[e.t * j.n_value + n + lane] * j.scale[1] + j.base[n + lane]) : 0;
}

/* dm [T, V] from dots [T, COEFS], the gradients of post and of C */
static __global__ void mix_bwd(float *dm, const float *dots, const float *m, const struct hyper_job j)
{
    const int lane = threadIdx.x % 16, n = j.n_stream;
    struct element e = soft_of(m, j);
    float step[2 * MT_MAX_SINKHORN - 1]; /* input of every normalisation */
    for (int s = 0; s < 2 * j.n_iter - 1; s++) {
        step[s] = e.c;
        e.c /= divisor(e, e.c, s % 2, j.eps);
    }
    float d = dots[MT_MIN(e.t, j.n_tok - 1) * COEFS + N_MAX + lane];
    for (int s = 2 * j.n_iter - 2; s >= 0; s--) {
        const float den = divisor(e, step[s], s % 2, j.eps), dot = line_sum(d * (step[s] / den), s % 2);
        d = e.on ? (d - dot) / den : 0;
    }
    const float dot = line_sum(d * e.soft, true);
    if (e.t >= j.n_tok) return;
    if (e.on) dm[e.t * j.n_value + 2 * n + n * e.row + e.col] = e.soft * (d - dot) * j.scale[2];
    if (lane < n) {
        const float s = sigmoid(m[e.t * j.n_value + n + lane] * j.scale[1] + j.base[n + lane]);
        dm[e.t * j.n_value + lane] = 0;
        dm[e.t * j.n_value + n + lane] = 2 * dots[e.t * COEFS + lane] * s * (1 - s) * j.scale[1];
    }
}

struct coefs {
    float post[N_MAX], c[N_MAX][N_MAX];
};
static __device__ inline struct coefs load_coefs(const float *coef)
{
    struct coefs a;
    const float *at = coef + (int64_t)blockIdx.x * COEFS;
#pragma unroll
    for (int k = 0; k < N_MAX; k++) {
        a.post[k] = at[k];
#pragma unroll
        for (int i = 0; i < N_MAX; i++) a.c[k][i] = at[N_MAX + N_MAX * k + i];
    }
    return a;
}

template <int N>
static __global__ __launch_bounds__(PER_TOKEN) void post_sum(row_view<> out, row_view<> x, row_view<> f,
                                                             const float *coef, int64_t dim)
{
    const struct coefs a = load_coefs(coef);
    const int64_t t = blockIdx.x;
    for (int64_t col = 8 * threadIdx.x; col < dim; col += 8 * PER_TOKEN) {
        float u[N][8], v[8];
#pragma unroll
        for (int i = 0; i < N; i++) unpack8(u[i], load16(x.at(t) + i * dim + col));
        unpack8(v, load16(f.at(t) + col));
#pragma unroll
        for (int k = 0; k < N; k++) {
            float sum[8];
#pragma unroll
            for (int e = 0; e < 8; e++) {
                sum[e] = a.post[k] * v[e];
#pragma unroll
                for (int i = 0; i < N; i++) sum[e] += a.c[i][k] * u[i][e];
            }
            store16(out.at(t) + k * dim + col, pack8(sum));
        }
    }
}

/* Sums each of n values over a block of PER_TOKEN threads. Value v goes to to[v], in shared memory. */
template <int n> static __device__ inline void block_sums(float *to, const float v[n])
{
    __shared__ float sums[PER_TOKEN / 32][n];
#pragma unroll
    for (int i = 0; i < n; i++) {
        const float sum = warp_sum(v[i]);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
    if (threadIdx.x < n) {
        float sum = 0;
        for (int w = 0; w < PER_TOKEN / 32; w++) sum += sums[w][threadIdx.x];
        to[threadIdx.x] = sum;
    }
    __syncthreads();
}

/* df, dx, and dots [T, COEFS] for mix_bwd. dx may be dout: a thread reads its columns of all streams first. */
template <int N>
static __global__ __launch_bounds__(PER_TOKEN) void unmix(row_view<> df, row_view<> dx, float *dots, row_view<> dout,
                                                          row_view<> x, row_view<> f, const float *coef, int64_t dim)
{
    __shared__ float total[N + N * N];
    const struct coefs a = load_coefs(coef);
    const int64_t t = blockIdx.x;
    float dot[N + N * N] = {};
    for (int64_t col = 8 * threadIdx.x; col < dim; col += 8 * PER_TOKEN) {
        float d[N][8], v[8], sum[8];
#pragma unroll
        for (int k = 0; k < N; k++) unpack8(d[k], load16(dout.at(t) + k * dim + col));
        unpack8(v, load16(f.at(t) + col));
#pragma unroll
        for (int e = 0; e < 8; e++) {
            sum[e] = 0;
#pragma unroll
            for (int k = 0; k < N; k++) {
                dot[k] += d[k][e] * v[e];
                sum[e] += a.post[k] * d[k][e];
            }
        }
        store16(df.at(t) + col, pack8(sum));
#pragma unroll
        for (int i = 0; i < N; i++) {
            unpack8(v, load16(x.at(t) + i * dim + col));
#pragma unroll
            for (int e = 0; e < 8; e++) {
                sum[e] = 0;
#pragma unroll
                for (int k = 0; k < N; k++) {
                    dot[N + N * i + k] += v[e] * d[k][e];
                    sum[e] += a.c[i][k] * d[k][e];
                }
            }
            store16(dx.at(t) + i * dim + col, pack8(sum));
        }
    }
    block_sums<N + N * N>(total, dot);
    if (threadIdx.x < COEFS) {
        const int i = ((int)threadIdx.x - N_MAX) / N_MAX, k = threadIdx.x % N_MAX;
        const bool post = threadIdx.x < N_MAX, on = k < N && (post || i < N);
        dots[t * COEFS + threadIdx.x] = on ? total[post ? k : N + N * i + k] : 0;
    }
}

/* ---- backward of m */

/* What values_bwd needs of a token, in 32-bit words: rstd dm, each value as a sum of two bf16, the pairs of larger
 * terms before those of smaller ones; -rstd^2 / (N D) <dm, m>; pre. */
enum { LOWER = VALUES / 2, OF_X = VALUES, OF_PRE = VALUES + N_MAX, FACTORS = HYPER_FACTORS, STRIDE = FACTORS + 4 };

struct split2 {
    uint32_t upper, lower;
};
static __device__ inline struct split2 split2(float low, float high)
{
    struct split2 s;
    s.upper = pack2(low, high);
    s.lower = pack2(low - __uint_as_float(s.upper << 16), high - __uint_as_float(s.upper & 0xffff0000u));
    return s;
}

template <int N>
static __global__ __launch_bounds__(PER_TOKEN) void pre_dots(float *factor, const float *dm, row_view<> dy,
                                                             row_view<> x, const float *m, const float *rstd,
                                                             const struct hyper_job j)
{
    __shared__ float total[N];
    const int64_t t = blockIdx.x;
    const int v = threadIdx.x;
    float dot[N] = {};
    for (int64_t col = 8 * v; col < j.dim; col += 8 * PER_TOKEN) {
        float d[8], u[8];
        unpack8(d, load16(dy.at(t) + col));
#pragma unroll
        for (int i = 0; i < N; i++) {
            unpack8(u, load16(x.at(t) + i * j.dim + col));
#pragma unroll
            for (int e = 0; e < 8; e++) dot[i] += d[e] * u[e];
        }
    }
    block_sums<N>(total, dot);
    if (v >= FACTORS) return;
    const float *own = m + t * j.n_value;
    const float s = v < N ? raw_pre(j, own, v) : 0, r = rstd[t];
    float d = dm && v < j.n_value ? dm[t * j.n_value + v] : 0;
    if (v < N) d += total[v] * s * (1 - s) * j.scale[0];
    const float sum = warp_sum(v < j.n_value ? d * own[v] : 0);
    const struct split2 pair = split2(r * d, r * __shfl_down_sync(0xffffffffu, d, 1));
    float *to = factor + t * FACTORS;
    if (v < VALUES && v % 2 == 0) {
        to[v / 2] = __uint_as_float(pair.upper);
        to[LOWER + v / 2] = __uint_as_float(pair.lower);
    }
    if (v == OF_X) to[v] = -r * r / (float)j.n_col * sum;
    if (v < N) to[OF_PRE + v] = s + j.eps;
}

/* c [16, 8] += dm fn over 24 values, without the product of the lower parts. a: of 16 tokens, k 0..15, then 16..23. */
static __device__ inline void add_product(float c[4], const uint32_t a[2][6], const uint32_t w[2][3])
{
#pragma unroll
    for (int p = 0; p < 3; p++) {
        const uint32_t *of_a = a[p == 1], *of_w = w[p == 2];
        mma_bf16(c, of_a, of_w);
        mma_bf16_k8(c, of_a + 4, of_w + 2);
    }
}

/* Adds to eight columns of dx of one token. at: the factors of the token; c: the product of rstd dm and fn, two columns
 * per tile.
 */
static __device__ inline void finish8(bf16 *dx, const float *at, int64_t stream, uint4 had, uint4 dy, uint4 x,
                                      const float c[4][4], int half)
{
    float sum[8], d[8], u[8];
    unpack8(sum, had);
    unpack8(d, dy);
    unpack8(u, x);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += at[OF_PRE + stream] * d[i] + at[OF_X] * u[i] + c[i / 2][2 * half + i % 2];
    store16(dx, pack8(sum));
}

/* Adds to dx of WALK tokens. A warp has 32 columns, whose fn it keeps in registers. Column 2 i + k of its tile j is
 * column 8 i + 2 j + k of the 32, so that a lane has eight adjacent ones. */
static __global__ __launch_bounds__(256) void values_bwd(row_view<> dx, const float *factor, row_view<> dy,
                                                         row_view<> x, const struct hyper_job j)
{
    __shared__ float shared[WALK][STRIDE];
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int64_t first = (int64_t)blockIdx.y * WALK, n = MT_MIN((int64_t)WALK, j.n_tok - first);
    const int64_t from = ((int64_t)blockIdx.x * 8 + threadIdx.x / 32) * 32, col = from + 8 * quad;
    const int64_t stream = MT_MIN(col, j.n_col - 8) / j.dim, in = col % j.dim;
    uint32_t w[4][2][3];
    for (int i = threadIdx.x; i < WALK * FACTORS; i += 256)
        shared[i / FACTORS][i % FACTORS] = i / FACTORS < n ? factor[first * FACTORS + i] : 0;
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int64_t at = from + row / 2 * 8 + 2 * t + row % 2;
            const int v = 8 * i + 2 * quad;
            const float *fn = j.fn + v * j.ld_fn + at;
            const struct split2 pair =
                split2(at < j.n_col && v < j.n_value ? fn[0] : 0, at < j.n_col && v + 1 < j.n_value ? fn[j.ld_fn] : 0);
            w[t][0][i] = pair.upper;
            w[t][1][i] = pair.lower;
        }
    __syncthreads();
#pragma unroll 2
    for (int i = row; i - row < n; i += 16) {
        uint4 had[2], d[2], u[2];
        uint32_t a[2][6];
        float c[4][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t t = first + i + 8 * h;
            if (i + 8 * h >= n || col >= j.n_col) continue;
            had[h] = load16(dx.at(t) + col);
            d[h] = load16(dy.at(t) + in);
            u[h] = load16(x.at(t) + col);
        }
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
            for (int k = 0; k < 6; k++) a[p][k] = __float_as_uint(shared[i + k % 2 * 8][p * LOWER + k / 2 * 4 + quad]);
#pragma unroll
        for (int t = 0; t < 4; t++) add_product(c[t], a, w[t]);
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (i + 8 * h < n && col < j.n_col)
                finish8(dx.at(first + i + 8 * h) + col, shared[i + 8 * h], stream, had[h], d[h], u[h], c, h);
    }
}

/* ---- the ops */

#define FOR_STREAMS(n, kernel, ...)                                                                                    \
    do {                                                                                                               \
        const unsigned grid = grid_x(job.n_tok);                                                                       \
        if ((n) == 1) kernel<1><<<grid, PER_TOKEN, 0, cuda.stream>>>(__VA_ARGS__);                                     \
        if ((n) == 2) kernel<2><<<grid, PER_TOKEN, 0, cuda.stream>>>(__VA_ARGS__);                                     \
        if ((n) == 3) kernel<3><<<grid, PER_TOKEN, 0, cuda.stream>>>(__VA_ARGS__);                                     \
        if ((n) == 4) kernel<4><<<grid, PER_TOKEN, 0, cuda.stream>>>(__VA_ARGS__);                                     \
        CUDA_CHECK_LAUNCH();                                                                                           \
    } while (0)

extern "C" void cuda_hyper_pre_fwd(struct device *dev, struct tensor y, struct tensor m, struct tensor rstd,
                                   struct tensor x, const struct hyper *h)
{
    const int width = (int)scratch_hyper_width(h), tiles = width / 8;
    const int64_t n_tok = x.shape[0];
    float *part = scratch_hyper_pre_fwd(dev, x, h);
    if (!n_tok) return;
    const struct hyper_job job = job_of(x, h);
    const row_view<> from = streams_of(x);
    const int per_split = (int)(ceil_div(job.n_col, SPLITS * 32) * 32);
    const dim3 grid(grid_x(ceil_div(n_tok, TOKENS)), SPLITS);
    if (tiles == 1) values<1><<<grid, 256, 0, cuda.stream>>>(part, from, job, per_split);
    if (tiles == 3) values<3><<<grid, 256, 0, cuda.stream>>>(part, from, job, per_split);
    CUDA_CHECK_LAUNCH();
    FOR_STREAMS(job.n_stream, pre_sum, streams_of(y), f32_ptr(m), f32_ptr(rstd), from, part, width, job);
}

static void launch_mix(float *coef, struct tensor m, const struct hyper_job &job)
{
    mix<<<grid_x(ceil_div(16 * job.n_tok, 128)), 128, 0, cuda.stream>>>(coef, f32_ptr(m), job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_hyper_post_fwd(struct device *dev, struct tensor out, struct tensor x, struct tensor f,
                                    struct tensor m, const struct hyper *h)
{
    const struct scratch_hyper_post s = scratch_hyper_post(dev, x, false);
    const struct hyper_job job = job_of(x, h);
    if (!job.n_tok) return;
    launch_mix(s.coef, m, job);
    FOR_STREAMS(job.n_stream, post_sum, streams_of(out), streams_of(x), streams_of(f), s.coef, job.dim);
}

extern "C" void cuda_hyper_post_bwd(struct device *dev, struct tensor df, struct tensor dx, struct tensor dm,
                                    struct tensor dout, struct tensor x, struct tensor f, struct tensor m,
                                    const struct hyper *h)
{
    const struct scratch_hyper_post s = scratch_hyper_post(dev, x, true);
    const struct hyper_job job = job_of(x, h);
    if (!job.n_tok) return;
    launch_mix(s.coef, m, job);
    FOR_STREAMS(job.n_stream, unmix, streams_of(df), streams_of(dx), s.dots, streams_of(dout), streams_of(x),
                streams_of(f), s.coef, job.dim);
    mix_bwd<<<grid_x(ceil_div(16 * job.n_tok, 128)), 128, 0, cuda.stream>>>(f32_ptr(dm), s.dots, f32_ptr(m), job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_hyper_pre_bwd(struct device *dev, struct tensor dx, struct tensor dm, struct tensor dy,
                                   struct tensor x, struct tensor m, struct tensor rstd, const struct hyper *h)
{
    float *factor = scratch_hyper_pre_bwd(dev, x);
    const struct hyper_job job = job_of(x, h);
    if (!job.n_tok) return;
    const dim3 grid(grid_x(ceil_div(job.n_col, 256)), grid_x(ceil_div(job.n_tok, WALK)));
    FOR_STREAMS(job.n_stream, pre_dots, factor, f32_ptr(dm), streams_of(dy), streams_of(x), f32_ptr(m), f32_ptr(rstd),
                job);
    values_bwd<<<grid, 256, 0, cuda.stream>>>(streams_of(dx), factor, streams_of(dy), streams_of(x), job);
    CUDA_CHECK_LAUNCH();
}
