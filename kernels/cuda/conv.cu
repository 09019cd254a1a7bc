/* conv.cu - short causal convolution of every column, then SiLU. Math: y = silu(u), u[t] = sum_j w[j] x[t - (J-1) + j]
 * inside a sequence; dpre = dy silu'(u), dx[t] = sum_j w[j] dpre[t + (J-1) - j].
 * Shapes: x, y, dx, dy [T, C] bf16 (views), w [C, J] f32, J <= 8. T may be 0.
 * Needs: C a multiple of 8, 16-byte aligned rows.
 * Grid: a thread has 8 columns of STRIP tokens and keeps the last J rows of x in registers; blocks of 128 threads. The
 * backward computes u again, also of the J - 1 tokens after the strip.
 * Moves: fwd 4 T C bytes, bwd 6 T C: memory bound.     Numerics: f32 sums in a fixed order, one rounding at the end.
 * Measured: not yet. */
#include "kernels/cuda/rows.cuh"

enum { BLOCK = 128, STRIP = 32 };

struct conv_job {
    int64_t n_tok, ldx, ldy, lddx;
    int n_col, n_tap, n_seq;
    const int32_t *cu;
    const bf16 *x, *dy; /* dy: backward */
    const float *w;
    bf16 *y, *dx;
};

/* The sequence of a row, followed from row to row. */
struct place {
    int seq;
    int64_t start, end;
};

static __device__ inline void advance(struct place *p, const struct conv_job *job, int64_t t)
{
    while (t >= p->end) {
        p->start = job->cu[++p->seq];
        p->end = job->cu[p->seq + 1];
    }
}

static __device__ inline struct place find(const struct conv_job *job, int64_t t)
{
    int low = 0, high = job->n_seq - 1; /* the last sequence that begins at t or before, and is not empty */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (job->cu[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    struct place p = {low, job->cu[low], job->cu[low + 1]};
    return p;
}

/* Row a of `row` is token t - (TAPS-1) + a; absent taps are zero weights. */
template <int TAPS> struct window {
    float row[TAPS][8];
};

template <int TAPS> static __device__ inline void window_push(struct window<TAPS> *x, const float v[8])
{
#pragma unroll
    for (int a = 0; a + 1 < TAPS; a++)
#pragma unroll
        for (int c = 0; c < 8; c++) x->row[a][c] = x->row[a + 1][c];
#pragma unroll
    for (int c = 0; c < 8; c++) x->row[TAPS - 1][c] = v[c];
}

template <int TAPS> static __device__ inline void load_taps(float w[TAPS][8], const struct conv_job *job, int col)
{
#pragma unroll
    for (int a = 0; a < TAPS; a++) {
        const int j = a - (TAPS - job->n_tap);
#pragma unroll
        for (int c = 0; c < 8; c++) w[a][c] = j >= 0 ? job->w[(int64_t)(col + c) * job->n_tap + j] : 0;
    }
}

/* The rows of x before token t, zero before the sequence. */
template <int TAPS>
static __device__ inline void window_init(struct window<TAPS> *x, const struct conv_job *job, const struct place *p,
                                          int64_t t, int col)
{
    for (int a = TAPS - 1; a > 0; a--) {
        float v[8] = {0};
        if (t - a >= p->start) unpack8(v, load16(job->x + (t - a) * job->ldx + col));
        window_push(x, v);
    }
}

/* u of token t, which enters the window. */
template <int TAPS>
static __device__ inline void step(float u[8], struct window<TAPS> *x, const float w[TAPS][8],
                                   const struct conv_job *job, const struct place *p, int64_t t, int col)
{
    float v[8];
    unpack8(v, load16(job->x + t * job->ldx + col));
    if (t == p->start)
#pragma unroll
        for (int a = 0; a < TAPS; a++)
#pragma unroll
            for (int c = 0; c < 8; c++) x->row[a][c] = 0;
    window_push(x, v);
#pragma unroll
    for (int c = 0; c < 8; c++) {
        u[c] = 0;
#pragma unroll
        for (int a = 0; a < TAPS; a++) u[c] += w[a][c] * x->row[a][c];
    }
}

template <int TAPS> static __global__ void __launch_bounds__(BLOCK) conv_fwd(const struct conv_job job)
{
    const int col = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x);
    const int64_t first = (int64_t)blockIdx.y * STRIP, last = MT_MIN(first + STRIP, job.n_tok);
    struct window<TAPS> x = {
    };
    float w[TAPS][8], u[8];
    if (col >= job.n_col) return;
    struct place p = find(&job, first);
    load_taps<TAPS>(w, &job, col);
    window_init(&x, &job, &p, first, col);
    for (int64_t t = first; t < last; t++) {
        advance(&p, &job, t);
        step<TAPS>(u, &x, w, &job, &p, t, col);
#pragma unroll
        for (int c = 0; c < 8; c++) u[c] /= 1 + expf(-u[c]);
        store16(job.y + t * job.ldy + col, pack8(u));
    }
}

/* sum.row[a] is the gradient of token t - (TAPS-1) + a so far. */
template <int TAPS> static __global__ void __launch_bounds__(BLOCK) conv_bwd(const struct conv_job job)
{
    const int col = 8 * (int)(blockIdx.x * BLOCK + threadIdx.x);
    const int64_t first = (int64_t)blockIdx.y * STRIP, last = MT_MIN(first + STRIP, job.n_tok);
    const float zero[8] = {0};
    struct window<TAPS> x = {}, sum = {
    };
    float w[TAPS][8], u[8], d[8];
    if (col >= job.n_col) return;
    struct place p = find(&job, first);
    load_taps<TAPS>(w, &job, col);
    window_init(&x, &job, &p, first, col);
    for (int64_t t = first; t < last + TAPS - 1; t++) {
        window_push(&sum, zero);
        if (t < job.n_tok) {
            advance(&p, &job, t);
            step<TAPS>(u, &x, w, &job, &p, t, col);
            unpack8(d, load16(job.dy + t * job.ldy + col));
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float s = 1 / (1 + expf(-u[c]));
                d[c] *= s * (1 + u[c] * (1 - s));
            }
#pragma unroll
            for (int a = 0; a < TAPS; a++)
#pragma unroll
                for (int c = 0; c < 8; c++)
                    if (t - (TAPS - 1) + a >= p.start) sum.row[a][c] += w[a][c] * d[c];
        }
        const int64_t row = t - (TAPS - 1);
        if (row >= first) store16(job.dx + row * job.lddx + col, pack8(sum.row[0]));
    }
}

static struct conv_job job_of(struct tensor x, struct tensor w, const struct seqs *seqs)
{
    struct conv_job job = {};
    job.n_tok = x.shape[0];
    job.n_col = (int)x.shape[1];
    job.n_tap = (int)w.shape[1];
    job.n_seq = (int)seqs->n_seq;
    job.cu = i32_ptr(seqs->cu);
    job.x = bf16_ptr(x);
    job.ldx = x.ld;
    job.w = f32_ptr(w);
    return job;
}

static void require_aligned(struct tensor a, struct tensor b, struct tensor c)
{
    MT_REQUIRE(a.shape[1] % 8 == 0 && rows_aligned(a) && rows_aligned(b) && rows_aligned(c),
               "a convolution of %lld columns: a multiple of 8 and 16-byte aligned rows are needed",
               (long long)a.shape[1]);
}

static dim3 grid_of(const struct conv_job *job)
{
    const int64_t strips = ceil_div(job->n_tok, STRIP);
    MT_REQUIRE(strips <= 65535, "a convolution of %lld tokens", (long long)job->n_tok);
    return dim3(grid_x(ceil_div(job->n_col, 8 * BLOCK)), (unsigned)strips);
}

extern "C" void cuda_conv_silu_fwd(struct device *dev, struct tensor y, struct tensor x, struct tensor w,
                                   const struct seqs *seqs)
{
    if (dev->dry_run || x.shape[0] == 0) return;
    require_aligned(x, y, y);
    struct conv_job job = job_of(x, w, seqs);
    job.y = bf16_ptr(y);
    job.ldy = y.ld;
    if (job.n_tap <= 4)
        conv_fwd<4><<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    else
        conv_fwd<MT_MAX_TAPS><<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_conv_silu_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                   struct tensor w, const struct seqs *seqs)
{
    if (dev->dry_run || x.shape[0] == 0) return;
    require_aligned(x, dx, dy);
    struct conv_job job = job_of(x, w, seqs);
    job.dx = bf16_ptr(dx);
    job.lddx = dx.ld;
    job.dy = bf16_ptr(dy);
    job.ldy = dy.ld;
    if (job.n_tap <= 4)
        conv_bwd<4><<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    else
        conv_bwd<MT_MAX_TAPS><<<grid_of(&job), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
