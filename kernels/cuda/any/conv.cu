/* conv.cu - short causal convolution of every column, then SiLU; further below, LFM2's convolution between two gates.
 * Math: y = silu(u), u[t] = bias + sum_j w[j] x[t - (J-1) + j] inside a sequence; dpre = dy silu'(u), dx[t] = sum_j
 *   w[j] dpre[t + (J-1) - j]. w and bias are frozen: no gradient.
 * Shapes: x, y, dx, dy [T, C] bf16 (views), w [C, J], bias [C] f32 or absent, J <= 8. T may be 0. Decoding: tails
 *   [slots, (J-1) C] bf16, the last J - 1 rows of x of each sequence.
 * Needs: C a multiple of 8, 16-byte aligned rows.
 * Grid: a thread has 8 columns of a strip of 16, 32 or 64 tokens, the longest with enough blocks for the GPU; blocks of
 *   128 threads. It copies its columns of the next eight rows into shared memory, which no other thread reads, and
 *   keeps the J - 1 rows before them in registers. The backward computes u again, also of the J - 1 tokens after the
 *   strip. Sequences may end at any row; all threads of a block take the same branch there. Shared memory: 16 KiB
 *   forward, 32 KiB backward.
 * Bound: fwd 4 T C bytes, bwd 6 T C: memory bound, if 40 KiB of loads are in flight per multiprocessor.
 * Numerics: f32 sums in a fixed order, which does not depend on the strip, one rounding at the end; e^x and the
 *   quotient of the sigmoid by the approximate instructions, within 2^-17. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"

enum { BLOCK = 128, AHEAD = 8 };

struct conv_job {
    int n_tok, n_col, n_tap, n_seq, strip;
    const int32_t *cu;
    row_view<> x, y, dx, dy; /* y: forward; dx, dy: backward */
    const float *w, *bias;   /* bias: NULL without */
};

/* The sequence of a row, followed from row to row. */
struct place {
    int seq, start, end;
};

/* Moves p from the end of a sequence to the next sequence that is not empty. */
static __device__ inline void advance(struct place *p, const struct conv_job *job)
{
    const int t = p->end;
    while (t >= p->end) {
        p->start = job->cu[++p->seq];
        p->end = job->cu[p->seq + 1];
    }
}

static __device__ inline struct place find(const struct conv_job *job, int t)
{
    const int seq = sequence_at(job->cu, job->n_seq, t); /* not an empty one */
    return {seq, job->cu[seq], job->cu[seq + 1]};
}

/* The rows before token t: row a is token t - (TAPS-1) + a, zero before the sequence. */
template <int TAPS> struct window {
    float row[TAPS - 1][8];
};

template <int TAPS> static __device__ inline void window_push(struct window<TAPS> *x, const float v[8])
{
#pragma unroll
    for (int a = 0; a + 2 < TAPS; a++)
#pragma unroll
        for (int c = 0; c < 8; c++) x->row[a][c] = x->row[a + 1][c];
#pragma unroll
    for (int c = 0; c < 8; c++) x->row[TAPS - 2][c] = v[c];
}

template <int TAPS> static __device__ inline void window_clear(struct window<TAPS> *x)
{
#pragma unroll
    for (int a = 0; a + 1 < TAPS; a++)
#pragma unroll
        for (int c = 0; c < 8; c++) x->row[a][c] = 0;
}

/* Absent taps have zero weights. */
template <int TAPS> static __device__ inline void load_taps(float w[TAPS][8], const struct conv_job *job, int col)
{
#pragma unroll
    for (int a = 0; a < TAPS; a++) {
        const int j = a - (TAPS - job->n_tap);
#pragma unroll
        for (int c = 0; c < 8; c++) w[a][c] = j >= 0 ? job->w[(int64_t)(col + c) * job->n_tap + j] : 0;
    }
}

template <int TAPS>
static __device__ inline void window_init(struct window<TAPS> *x, const struct conv_job *job, const struct place *p,
                                          int t, int col)
{
#pragma unroll
    for (int a = 0; a + 1 < TAPS; a++) {
        const int from = t - (TAPS - 1) + a;
        unpack8(x->row[a], from >= p->start ? load16(job->x.at(from) + col) : make_uint4(0, 0, 0, 0));
    }
}

template <bool BIAS> static __device__ inline void load_bias(float bias[8], const struct conv_job *job, int col)
{
#pragma unroll
    for (int c = 0; c < 8; c++) bias[c] = BIAS ? job->bias[col + c] : 0;
}

/* u of the token with row v, which then enters the window. */
template <int TAPS, bool BIAS>
static __device__ inline void convolve(float u[8], struct window<TAPS> *x, const float w[TAPS][8], const float bias[8],
                                       const float v[8])
{
#pragma unroll
    for (int c = 0; c < 8; c++) {
        u[c] = w[TAPS - 1][c] * v[c];
        if (BIAS) u[c] += bias[c];
#pragma unroll
        for (int a = TAPS - 2; a >= 0; a--) u[c] += w[a][c] * x->row[a][c];
    }
    window_push(x, v);
}

/* Starts the copy of a thread's eight columns of row t into shared memory; beyond n_tok the last row again. */
static __device__ inline void fetch(uint4 *slot, const row_view<> &x, int col, int t, int n_tok)
{
    copy_async16(shared_address(slot), x.at(min(t, n_tok - 1)) + col, 16);
}

template <int TAPS, bool BIAS>
static __global__ void __launch_bounds__(BLOCK, TAPS <= 4 ? 5 : 1) conv_fwd(const struct conv_job job)
{
    __shared__ __align__(16) uint4 ring[AHEAD][BLOCK];
    const int col = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x), first = (int)blockIdx.y * job.strip;
    const int last = min(first + job.strip, job.n_tok);
    struct window<TAPS> x;
    float w[TAPS][8], bias[8], u[8], v[8];
    if (col >= job.n_col) return;
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        fetch(&ring[k][threadIdx.x], job.x, col, first + k, job.n_tok);
        copy_commit();
    }
    struct place p = find(&job, first);
    load_taps<TAPS>(w, &job, col);
    load_bias<BIAS>(bias, &job, col);
    window_init(&x, &job, &p, first, col);
    for (int t = first; t < last; t += AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (t + k >= last) return;
            if (t + k == p.end) {
                advance(&p, &job);
                window_clear(&x);
            }
            copy_wait<AHEAD - 1>();
            unpack8(v, ring[k][threadIdx.x]);
            convolve<TAPS, BIAS>(u, &x, w, bias, v);
            if (t + k + AHEAD < last) fetch(&ring[k][threadIdx.x], job.x, col, t + k + AHEAD, job.n_tok);
            copy_commit();
#pragma unroll
            for (int c = 0; c < 8; c++) u[c] *= fast_sigmoid(u[c]);
            store16(job.y.at(t + k) + col, pack8(u));
        }
    }
}

/* The gradient of row t - (TAPS-1), whose last term comes from token t. sum.row[a] is the gradient of row t - (TAPS-1)
 * + a so far. `before`: how many tokens of the sequence come before t. */
template <int TAPS>
static __device__ inline void complete(float out[8], struct window<TAPS> *sum, const float w[TAPS][8], const float d[8],
                                       int before)
{
    float next[8];
#pragma unroll
    for (int c = 0; c < 8; c++) next[c] = w[TAPS - 1][c] * d[c];
#pragma unroll
    for (int a = 0; a + 1 < TAPS; a++)
        if (before >= TAPS - 1 - a)
#pragma unroll
            for (int c = 0; c < 8; c++) sum->row[a][c] += w[a][c] * d[c];
#pragma unroll
    for (int c = 0; c < 8; c++) out[c] = sum->row[0][c];
    window_push(sum, next);
}

template <int TAPS, bool BIAS>
static __global__ void __launch_bounds__(BLOCK, TAPS <= 4 ? 4 : 1) conv_bwd(const struct conv_job job)
{
    __shared__ __align__(16) uint4 ring[AHEAD][2][BLOCK]; /* x, dy */
    const int col = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x), first = (int)blockIdx.y * job.strip;
    const int last = min(first + job.strip, job.n_tok) + TAPS - 1;
    struct window<TAPS> x, sum;
    float w[TAPS][8], bias[8], u[8], d[8], v[8];
    if (col >= job.n_col) return;
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        fetch(&ring[k][0][threadIdx.x], job.x, col, first + k, job.n_tok);
        fetch(&ring[k][1][threadIdx.x], job.dy, col, first + k, job.n_tok);
        copy_commit();
    }
    struct place p = find(&job, first);
    load_taps<TAPS>(w, &job, col);
    load_bias<BIAS>(bias, &job, col);
    window_init(&x, &job, &p, first, col);
    window_clear(&sum);
    for (int t = first; t < last; t += AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (t + k >= last) return;
            if (t + k == p.end && t + k < job.n_tok) {
                advance(&p, &job);
                window_clear(&x);
            }
            copy_wait<AHEAD - 1>();
            unpack8(v, ring[k][0][threadIdx.x]);
            unpack8(d, ring[k][1][threadIdx.x]);
            convolve<TAPS, BIAS>(u, &x, w, bias, v);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float s = fast_sigmoid(u[c]);
                d[c] *= s * (1 + u[c] * (1 - s));
            }
            if (t + k + AHEAD < last) {
                fetch(&ring[k][0][threadIdx.x], job.x, col, t + k + AHEAD, job.n_tok);
                fetch(&ring[k][1][threadIdx.x], job.dy, col, t + k + AHEAD, job.n_tok);
            }
            copy_commit();
            complete(v, &sum, w, d, t + k < job.n_tok ? t + k - p.start : 0);
            const int row = t + k - (TAPS - 1);
            if (row >= first) store16(job.dx.at(row) + col, pack8(v));
        }
    }
}

static struct conv_job job_of(struct tensor x, struct tensor w, struct tensor bias, const struct seqs *seqs)
{
    struct conv_job job = {};
    MT_REQUIRE(x.shape[1] % 8 == 0, "a convolution of %lld columns: a multiple of 8 is needed", (long long)x.shape[1]);
    job.n_tok = (int)x.shape[0];
    job.n_col = (int)x.shape[1];
    job.n_tap = (int)w.shape[1];
    job.n_seq = (int)seqs->n_seq;
    job.cu = i32_ptr(seqs->cu);
    job.x = aligned_rows(x, "a convolution");
    job.w = f32_ptr(w);
    job.bias = bias.ndim ? f32_ptr(bias) : NULL;
    return job;
}

/* The longest strip with which every multiprocessor gets eight blocks; at least 16 tokens. */
static int strip_of(int64_t n_tok, int64_t n_band)
{
    int strip = 64;
    while (strip > 16 && ceil_div(n_tok, strip) * n_band < 8 * (int64_t)cuda.n_sm) strip /= 2;
    return strip;
}

static dim3 grid_of(struct conv_job *job)
{
    const int64_t n_band = ceil_div(job->n_col, 8 * BLOCK);
    job->strip = strip_of(job->n_tok, n_band);
    const int64_t strips = ceil_div(job->n_tok, job->strip);
    MT_REQUIRE(strips <= 65535, "a convolution of %lld tokens", (long long)job->n_tok);
    return dim3(grid_x(n_band), (unsigned)strips);
}

/* ---- prefixes (struct seqs): the kernels above take each sequence alone. Then those below recompute the rows that
 * have neighbours in another sequence: the first J - 1 rows of a sequence that continues the prefix of another one, its
 * base, and, backward, the last J - 1 rows of the prefix. A thread per row and column; sums in the order of the
 * sequences and of the taps. GATED: LFM2's convolution. */

struct branch_job {
    int n_col, n_tap, n_seq;
    const int32_t *cu, *prefix;
    row_view<> x, y, dy, dx;
    const float *w, *bias; /* bias: NULL without */
};

/* A sequence: its rows, the rows of its base that it continues. */
struct branch {
    int first, len, base, prefix;
};
static __device__ inline struct branch find_branch(const struct branch_job &job, int seq)
{
    int base = seq;
    while (job.prefix[base] > 0) base--;
    return {job.cu[seq], job.cu[seq + 1] - job.cu[seq], job.cu[base], job.prefix[seq]};
}
static __device__ inline int branch_row(const struct branch &b, int p)
{
    return p < b.prefix ? b.base + p : b.first + p - b.prefix;
}

template <bool GATED>
static __device__ inline float branch_u(const struct branch_job &job, const struct branch &b, int p, int c)
{
    float u = job.bias ? job.bias[c] : 0;
    for (int j = max(0, job.n_tap - 1 - p); j < job.n_tap; j++) {
        const bf16 *row = job.x.at(branch_row(b, p - (job.n_tap - 1) + j)) + c;
        const float v = __bfloat162float(row[0]);
        u = fmaf(job.w[(int64_t)c * job.n_tap + j], GATED ? v * __bfloat162float(row[2 * job.n_col]) : v, u);
    }
    return u;
}

template <bool GATED>
static __device__ inline float branch_du(const struct branch_job &job, const struct branch &b, int p, int c)
{
    const int row = branch_row(b, p);
    const float d = __bfloat162float(job.dy.at(row)[c]);
    if (GATED) return d * __bfloat162float(job.x.at(row)[job.n_col + c]);
    const float u = branch_u<false>(job, b, p, c), s = fast_sigmoid(u);
    return d * s * (1 + u * (1 - s));
}

/* The gradient at position p of the input, by the outputs of the sequence itself. */
template <bool GATED>
static __device__ inline float branch_dv(const struct branch_job &job, const struct branch &b, int p, int c)
{
    float sum = 0;
    for (int at = max(p, b.prefix); at < min(p + job.n_tap, b.prefix + b.len); at++)
        sum = fmaf(job.w[(int64_t)c * job.n_tap + job.n_tap - 1 - (at - p)], branch_du<GATED>(job, b, at, c), sum);
    return sum;
}

template <bool GATED> static __device__ inline void branch_store(const struct branch_job &job, int row, int c, float dv)
{
    bf16 *out = job.dx.at(row) + c;
    const bf16 *in = job.x.at(row) + c;
    out[0] = __float2bfloat16_rn(GATED ? dv * __bfloat162float(in[2 * job.n_col]) : dv);
    if (GATED) out[2 * job.n_col] = __float2bfloat16_rn(dv * __bfloat162float(in[0]));
}

template <bool GATED> static __global__ void __launch_bounds__(BLOCK) branch_fwd(const struct branch_job job)
{
    const int seq = (int)blockIdx.x / (job.n_tap - 1), i = (int)blockIdx.x % (job.n_tap - 1);
    const int c = (int)(blockIdx.y * BLOCK + threadIdx.x);
    const struct branch b = find_branch(job, seq);
    if (c >= job.n_col || b.prefix == 0 || i >= b.len) return;
    const float u = branch_u<GATED>(job, b, b.prefix + i, c);
    const float factor = GATED ? __bfloat162float(job.x.at(b.first + i)[job.n_col + c]) : fast_sigmoid(u);
    job.y.at(b.first + i)[c] = __float2bfloat16_rn(u * factor);
}

/* Own rows of the sequences. */
template <bool GATED> static __global__ void __launch_bounds__(BLOCK) branch_bwd(const struct branch_job job)
{
    const int seq = (int)blockIdx.x / (job.n_tap - 1), i = (int)blockIdx.x % (job.n_tap - 1);
    const int c = (int)(blockIdx.y * BLOCK + threadIdx.x);
    const struct branch b = find_branch(job, seq);
    if (c >= job.n_col || b.prefix == 0 || i >= b.len) return;
    branch_store<GATED>(job, b.first + i, c, branch_dv<GATED>(job, b, b.prefix + i, c));
    if (GATED)
        job.dx.at(b.first + i)[job.n_col + c] =
            __float2bfloat16_rn(__bfloat162float(job.dy.at(b.first + i)[c]) * branch_u<GATED>(job, b, b.prefix + i, c));
}

/* Rows of the base. A row near the ends of several prefixes is left to the first of their sequences. */
template <bool GATED> static __global__ void __launch_bounds__(BLOCK) branch_base(const struct branch_job job)
{
    const int seq = (int)blockIdx.x / (job.n_tap - 1), p = job.prefix[seq] - 1 - (int)blockIdx.x % (job.n_tap - 1);
    const int c = (int)(blockIdx.y * BLOCK + threadIdx.x);
    int q = seq;
    if (c >= job.n_col || p < 0) return;
    while (job.prefix[q - 1] > 0) {
        q--;
        if (job.prefix[q] > p && job.prefix[q] < p + job.n_tap) return;
    }
    float dv = branch_dv<GATED>(job, find_branch(job, q - 1), p, c);
    for (; q < job.n_seq && job.prefix[q] > 0; q++)
        if (job.prefix[q] > p) dv += branch_dv<GATED>(job, find_branch(job, q), p, c);
    branch_store<GATED>(job, branch_row(find_branch(job, seq), p), c, dv);
}

/* x, y, dx, dy: absent where the direction has none. */
template <bool GATED>
static void run_branches(struct tensor x, struct tensor y, struct tensor dx, struct tensor dy, struct tensor w,
                         struct tensor bias, const struct seqs *seqs)
{
    struct branch_job job = {(int)w.shape[0], (int)w.shape[1], (int)seqs->n_seq};
    if (!seqs->prefix.ndim || job.n_tap == 1) return;
    job.cu = i32_ptr(seqs->cu), job.prefix = i32_ptr(seqs->prefix);
    job.w = f32_ptr(w), job.bias = bias.ndim ? f32_ptr(bias) : NULL;
    job.x = rows_of(x);
    const dim3 grid(grid_x(seqs->n_seq * (job.n_tap - 1)), (unsigned)ceil_div(job.n_col, BLOCK));
    if (y.ndim) {
        job.y = rows_of(y);
        branch_fwd<GATED><<<grid, BLOCK, 0, cuda.stream>>>(job);
    } else {
        job.dx = rows_of(dx), job.dy = rows_of(dy);
        branch_bwd<GATED><<<grid, BLOCK, 0, cuda.stream>>>(job);
        CUDA_CHECK_LAUNCH();
        branch_base<GATED><<<grid, BLOCK, 0, cuda.stream>>>(job);
    }
    CUDA_CHECK_LAUNCH();
}

static const struct tensor absent = {};

extern "C" void cuda_conv_silu_fwd(struct device *dev, struct tensor y, struct tensor x, struct tensor w,
                                   struct tensor bias, const struct seqs *seqs)
{
    if (x.shape[0] == 0) return;
    struct conv_job job = job_of(x, w, bias, seqs);
    job.y = aligned_rows(y, "a convolution");
    const dim3 grid = grid_of(&job);
    if (job.bias)
        (job.n_tap <= 4 ? conv_fwd<4, true> : conv_fwd<MT_MAX_TAPS, true>)<<<grid, BLOCK, 0, cuda.stream>>>(job);
    else
        (job.n_tap <= 4 ? conv_fwd<4, false> : conv_fwd<MT_MAX_TAPS, false>)<<<grid, BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    run_branches<false>(x, y, absent, absent, w, bias, seqs);
}

extern "C" void cuda_conv_silu_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                   struct tensor w, struct tensor bias, const struct seqs *seqs)
{
    if (x.shape[0] == 0) return;
    struct conv_job job = job_of(x, w, bias, seqs);
    job.dx = aligned_rows(dx, "a convolution");
    job.dy = aligned_rows(dy, "a convolution");
    const dim3 grid = grid_of(&job);
    if (job.bias)
        (job.n_tap <= 4 ? conv_bwd<4, true> : conv_bwd<MT_MAX_TAPS, true>)<<<grid, BLOCK, 0, cuda.stream>>>(job);
    else
        (job.n_tap <= 4 ? conv_bwd<4, false> : conv_bwd<MT_MAX_TAPS, false>)<<<grid, BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    run_branches<false>(x, absent, dx, dy, w, bias, seqs);
}

/* ---- decoding: a thread per token and column; then a thread per sequence and column reads a tail, then replaces it
 */

struct conv_decode_job {
    int n_col, n_tap, n_seq;
    const int32_t *cu;
    row_view<> x, y;
    struct state_view<bf16> tail;
    const float *w, *bias;
};

/* Column c of row t of sequence s; rows -(J-1) .. -1 are in the tail. */
static __device__ inline bf16 row_value(const struct conv_decode_job &job, const bf16 *before, int s, int t, int c)
{
    if (t >= 0) return job.x.at(job.cu[s] + t)[c];
    return before ? before[(int64_t)(job.n_tap - 1 + t) * job.n_col + c] : __float2bfloat16_rn(0);
}

static __global__ void __launch_bounds__(BLOCK) conv_after(const struct conv_decode_job job)
{
    const int64_t row = blockIdx.x;
    const int c = (int)(blockIdx.y * BLOCK + threadIdx.x), s = sequence_at(job.cu, job.n_seq, row);
    const int t = (int)(row - job.cu[s]);
    const bf16 *before = state_before(job.tail, job.cu, s);
    if (c >= job.n_col) return;
    float u = job.bias ? job.bias[c] : 0;
    for (int j = job.n_tap - 1; j >= 0; j--)
        u +=
            job.w[(int64_t)c * job.n_tap + j] * __bfloat162float(row_value(job, before, s, t - (job.n_tap - 1) + j, c));
    job.y.at(row)[c] = __float2bfloat16_rn(u * fast_sigmoid(u));
}

static __global__ void __launch_bounds__(BLOCK) keep_tail(const struct conv_decode_job job)
{
    const int c = (int)(blockIdx.y * BLOCK + threadIdx.x), s = (int)blockIdx.x, len = job.cu[s + 1] - job.cu[s];
    if (c >= job.n_col || len == 0) return;
    const bf16 *before = state_before(job.tail, job.cu, s);
    bf16 *after = state_row(job.tail, s);
    for (int i = 0; i < job.n_tap - 1; i++)
        after[(int64_t)i * job.n_col + c] = row_value(job, before, s, len - (job.n_tap - 1) + i, c);
}

extern "C" void cuda_conv_decode(struct device *dev, struct tensor y, struct tensor x, struct tensor w,
                                 struct tensor bias, const struct states *tail)
{
    const int64_t n_tok = x.shape[0], n_seq = tail->seqs->n_seq;
    if (n_tok == 0) return;
    const struct conv_decode_job job = {(int)x.shape[1],         (int)w.shape[1], (int)n_seq,
                                        i32_ptr(tail->seqs->cu), rows_of(x),      rows_of(y),
                                        states_of<bf16>(tail),   f32_ptr(w),      bias.ndim ? f32_ptr(bias) : NULL};
    const int64_t bands = ceil_div(job.n_col, BLOCK);
    MT_REQUIRE(bands <= 65535, "a convolution of %d columns", job.n_col);
    conv_after<<<dim3(grid_x(n_tok), (unsigned)bands), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    if (job.n_tap == 1) return;
    keep_tail<<<dim3(grid_x(n_seq), (unsigned)bands), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* ---- the gated short convolution.
 * Math: y[t] = C[t] u[t], u[t] = bias + sum_j w[j] v[t - (J-1) + j] inside a sequence, v = B x. Backward: dC = dy u,
 *   dv[t] = sum_j w[j] (dy C)[t + (J-1) - j], dB = dv x, dx = dv B.
 * Shapes: bcx [T, 3D] bf16, y, dy [T, D] bf16 (views), w [D, J] f32, J <= 32. Decoding: tails [slots, (J-1) D] f32, the
 *   last J - 1 rows of v.
 * Needs: D a multiple of 8, 16-byte aligned rows.
 * Grid: a thread has 8 columns of a strip of 16 tokens, blocks of 128 threads. J - 1 of a token's J rows are in L1: the
 *   same thread has just read them.
 * Bound: fwd 8 T D bytes, bwd 14 T D: memory bound.
 * Numerics: f32 sums in the order of the taps; v and dy C are exact products of bf16; one rounding at the end. */
enum { SHORT_STRIP = 16 };

struct short_job {
    int n_tok, n_col, n_tap, n_seq;
    const int32_t *cu;
    row_view<> bcx, y, dy, dbcx;
    const float *w, *bias; /* bias: NULL without */
};

/* Eight columns of a product of two rows, element by element: B x, or dy C. */
static __device__ inline void product8(float out[8], const bf16 *a, const bf16 *b)
{
    float x[8];
    unpack8(out, load16(a));
    unpack8(x, load16(b));
#pragma unroll
    for (int c = 0; c < 8; c++) out[c] *= x[c];
}

/* out += w[j] v */
static __device__ inline void add_tap(float out[8], const struct short_job &job, int col, int j, const float v[8])
{
#pragma unroll
    for (int c = 0; c < 8; c++) out[c] = fmaf(job.w[(int64_t)(col + c) * job.n_tap + j], v[c], out[c]);
}

/* u of token t of a sequence that begins at start. */
static __device__ inline void short_convolve(float u[8], const struct short_job &job, int col, int t, int start)
{
    float v[8];
#pragma unroll
    for (int c = 0; c < 8; c++) u[c] = job.bias ? job.bias[col + c] : 0;
    for (int j = max(0, job.n_tap - 1 - (t - start)); j < job.n_tap; j++) {
        const bf16 *row = job.bcx.at(t - (job.n_tap - 1) + j) + col;
        product8(v, row, row + 2 * job.n_col);
        add_tap(u, job, col, j, v);
    }
}

static __global__ void __launch_bounds__(BLOCK) short_fwd(const struct short_job job)
{
    const int col = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x), first = (int)blockIdx.y * SHORT_STRIP;
    const int last = min(first + SHORT_STRIP, job.n_tok);
    float u[8], gate[8];
    if (col >= job.n_col) return;
    for (int t = first; t < last; t++) {
        const int start = job.cu[sequence_at(job.cu, job.n_seq, t)];
        short_convolve(u, job, col, t, start);
        unpack8(gate, load16(job.bcx.at(t) + job.n_col + col));
#pragma unroll
        for (int c = 0; c < 8; c++) u[c] *= gate[c];
        store16(job.y.at(t) + col, pack8(u));
    }
}

static __global__ void __launch_bounds__(BLOCK) short_bwd(const struct short_job job)
{
    const int col = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x), first = (int)blockIdx.y * SHORT_STRIP;
    const int last = min(first + SHORT_STRIP, job.n_tok);
    float u[8], v[8], dv[8], b[8];
    if (col >= job.n_col) return;
    for (int t = first; t < last; t++) {
        const int seq = sequence_at(job.cu, job.n_seq, t), end = job.cu[seq + 1];
        const bf16 *row = job.bcx.at(t) + col;
        bf16 *out = job.dbcx.at(t) + col;
        short_convolve(u, job, col, t, job.cu[seq]);
        unpack8(v, load16(job.dy.at(t) + col));
#pragma unroll
        for (int c = 0; c < 8; c++) u[c] *= v[c], dv[c] = 0;
        store16(out + job.n_col, pack8(u));
        for (int j = job.n_tap - 1; j >= 0 && t + job.n_tap - 1 - j < end; j--) {
            const int later = t + job.n_tap - 1 - j;
            product8(v, job.dy.at(later) + col, job.bcx.at(later) + job.n_col + col);
            add_tap(dv, job, col, j, v);
        }
        unpack8(b, load16(row));
        unpack8(v, load16(row + 2 * job.n_col));
#pragma unroll
        for (int c = 0; c < 8; c++) v[c] *= dv[c], b[c] *= dv[c];
        store16(out, pack8(v));
        store16(out + 2 * job.n_col, pack8(b));
    }
}

static struct short_job short_of(struct tensor bcx, struct tensor w, struct tensor bias, const struct seqs *seqs)
{
    struct short_job job = {};
    MT_REQUIRE(w.shape[0] % 8 == 0, "a short convolution of %lld columns: a multiple of 8 is needed",
               (long long)w.shape[0]);
    job.n_tok = (int)bcx.shape[0];
    job.n_col = (int)w.shape[0];
    job.n_tap = (int)w.shape[1];
    job.n_seq = (int)seqs->n_seq;
    job.cu = i32_ptr(seqs->cu);
    job.bcx = aligned_rows(bcx, "a short convolution");
    job.w = f32_ptr(w);
    job.bias = bias.ndim ? f32_ptr(bias) : NULL;
    return job;
}

static dim3 short_grid(const struct short_job &job)
{
    const int64_t strips = ceil_div(job.n_tok, SHORT_STRIP);
    MT_REQUIRE(strips <= 65535, "a short convolution of %d tokens", job.n_tok);
    return dim3(grid_x(ceil_div(job.n_col, 8 * BLOCK)), (unsigned)strips);
}

extern "C" void cuda_short_conv_fwd(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w,
                                    struct tensor bias, const struct seqs *seqs)
{
    if (y.shape[0] == 0) return;
    struct short_job job = short_of(bcx, w, bias, seqs);
    job.y = aligned_rows(y, "a short convolution");
    short_fwd<<<short_grid(job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    run_branches<true>(bcx, y, absent, absent, w, bias, seqs);
}

extern "C" void cuda_short_conv_bwd(struct device *dev, struct tensor dbcx, struct tensor dy, struct tensor bcx,
                                    struct tensor w, struct tensor bias, const struct seqs *seqs)
{
    if (dy.shape[0] == 0) return;
    struct short_job job = short_of(bcx, w, bias, seqs);
    job.dy = aligned_rows(dy, "a short convolution");
    job.dbcx = aligned_rows(dbcx, "a short convolution");
    short_bwd<<<short_grid(job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    run_branches<true>(bcx, absent, dbcx, dy, w, bias, seqs);
}

struct short_decode_job {
    struct short_job s;
    struct state_view<float> tail;
};

/* v of row t of sequence seq in column c; rows -(J-1) .. -1 are in the tail. */
static __device__ inline float short_value(const struct short_job &job, const float *before, int seq, int t, int c)
{
    if (t < 0) return before ? before[(int64_t)(job.n_tap - 1 + t) * job.n_col + c] : 0;
    const bf16 *row = job.bcx.at(job.cu[seq] + t) + c;
    return __bfloat162float(row[0]) * __bfloat162float(row[2 * job.n_col]);
}

static __global__ void __launch_bounds__(BLOCK) short_after(const struct short_decode_job job)
{
    const struct short_job &s = job.s;
    const int row = (int)blockIdx.x, c = (int)(blockIdx.y * BLOCK + threadIdx.x);
    const int seq = sequence_at(s.cu, s.n_seq, row), t = row - s.cu[seq];
    if (c >= s.n_col) return;
    const float *before = state_before(job.tail, s.cu, seq);
    float u = s.bias ? s.bias[c] : 0;
    for (int j = before ? 0 : max(0, s.n_tap - 1 - t); j < s.n_tap; j++)
        u = fmaf(s.w[(int64_t)c * s.n_tap + j], short_value(s, before, seq, t - (s.n_tap - 1) + j, c), u);
    s.y.at(row)[c] = __float2bfloat16_rn(u * __bfloat162float(s.bcx.at(row)[s.n_col + c]));
}

static __global__ void __launch_bounds__(BLOCK) short_tail(const struct short_decode_job job)
{
    const struct short_job &s = job.s;
    const int c = (int)(blockIdx.y * BLOCK + threadIdx.x), seq = (int)blockIdx.x, len = s.cu[seq + 1] - s.cu[seq];
    if (c >= s.n_col || len == 0) return;
    const float *before = state_before(job.tail, s.cu, seq);
    float *after = state_row(job.tail, seq);
    for (int i = 0; i < s.n_tap - 1; i++)
        after[(int64_t)i * s.n_col + c] = short_value(s, before, seq, len - (s.n_tap - 1) + i, c);
}

extern "C" void cuda_short_conv_decode(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w,
                                       struct tensor bias, const struct states *tail)
{
    if (y.shape[0] == 0) return;
    struct short_decode_job job = {short_of(bcx, w, bias, tail->seqs), states_of<float>(tail)};
    job.s.y = rows_of(y);
    const int64_t bands = ceil_div(job.s.n_col, BLOCK);
    MT_REQUIRE(bands <= 65535, "a short convolution of %d columns", job.s.n_col);
    short_after<<<dim3(grid_x(y.shape[0]), (unsigned)bands), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    if (job.s.n_tap == 1) return;
    short_tail<<<dim3(grid_x(tail->seqs->n_seq), (unsigned)bands), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
