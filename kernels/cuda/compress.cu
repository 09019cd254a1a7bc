/* compress.cu - one entry per `ratio` tokens: a softmax over the tokens of every column.
 * Math: y = sum_j p_j value_j, p = softmax_j(gate_j + bias_j), column by column; dvalue_j = p_j dy, dgate_j = p_j dy
 *   (value_j - y). With overlap an entry also has the tokens of the entry before, whose columns a it reads.
 * Shapes: kg [T, 2W] bf16: value | gate, with overlap [T, 4W]: value a | value b | gate a | gate b; bias [ratio, W or
 *   2W] f32; y, dy [N, W] bf16, pos [N] i32, cu [S+1] i32; dkg like kg. T may be 0; N >= 1.
 * Needs: fast: W a multiple of 8, 16-byte aligned rows. Otherwise a thread has one column instead of eight.
 * Grid: up to 16 tokens per entry: a thread has 8 columns of one entry. More: a block has 64 columns of one entry; 32
 *   groups of 8 threads share its tokens and merge their sums in 25 KiB of shared memory. Each token and column
 *   belongs to one entry, so the backward needs no atomics. Its last S items write the zeros of tokens of no entry.
 * Moves: fwd bytes of kg, y, bias; bwd kg twice (the second time from L1 or L2), dkg, dy: memory bound.
 * Numerics: f32, online softmax in a fixed order, one rounding at the end. */
#include "kernels/cuda/rows.cuh"

enum { BLOCK = 256, LANES = 8, GROUPS = BLOCK / LANES, FEW = 16, BATCH = 4 };

struct compress_job {
    bf16 *y, *dkg; /* forward, backward */
    const bf16 *kg, *dy;
    const float *bias;
    int32_t *pos;
    const int32_t *cu;
    int64_t ld_y, ld_kg, ld_dy, ld_dkg, ld_bias;
    int64_t n_row; /* N */
    int n_seq, ratio, width, n_part;
};

/* An entry: tokens first + j, j from begin to ratio - 1; negative ones are those of the entry before. */
struct entry {
    int64_t row, first;
    int begin, pos;
    bool found;
};

static __device__ inline struct entry find(const struct compress_job &job, int64_t row)
{
    int low = 0, high = job.n_seq; /* the first sequence whose entries end after the row */
    while (low < high) {
        const int middle = (low + high) / 2, start = job.cu[middle];
        if (start / job.ratio + (job.cu[middle + 1] - start) / job.ratio > row)
            high = middle;
        else
            low = middle + 1;
    }
    struct entry e = {row, 0, 0, 0, false};
    if (low == job.n_seq || job.cu[low] / job.ratio > row) return e;
    e.found = true;
    e.pos = ((int)row - job.cu[low] / job.ratio) * job.ratio;
    e.first = job.cu[low] + e.pos;
    e.begin = job.n_part == 2 && e.pos > 0 ? -job.ratio : 0;
    return e;
}

/* VEC adjacent columns of bf16 as floats, 8 or 1. */
template <int VEC> struct raw {
    uint4 u;
};
template <> struct raw<1> {
    bf16 u;
};
template <int VEC> static __device__ inline void load(struct raw<VEC> *r, const bf16 *p)
{
    if constexpr (VEC == 8)
        r->u = load16(p);
    else
        r->u = *p;
}
template <int VEC> static __device__ inline void unpack(float v[VEC], const struct raw<VEC> &r)
{
    if constexpr (VEC == 8)
        unpack8(v, r.u);
    else
        v[0] = __bfloat162float(r.u);
}
template <int VEC> static __device__ inline void store(bf16 *p, const float v[VEC])
{
    if constexpr (VEC == 8)
        store16(p, pack8(v));
    else
        *p = __float2bfloat16_rn(v[0]);
}
template <int VEC> static __device__ inline void add_bias(float v[VEC], const float *p)
{
    if constexpr (VEC == 8) {
        float b[8];
        load_f32x8(b, p);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += b[k];
    } else {
        v[0] += *p;
    }
}

/* Columns of a token in kg: of its values; its gates are n_part * W columns further. */
static __device__ inline int64_t column(const struct compress_job &job, int j, int col)
{
    return (job.n_part == 2 && j >= 0 ? job.width : 0) + col;
}
static __device__ inline const float *bias_of(const struct compress_job &job, int j, int col)
{
    return job.bias + (j < 0 ? j + job.ratio : j) * job.ld_bias + column(job, j, col);
}

/* Softmax in progress: largest gate, sum of e^(gate - top), and of that times the value. */
template <int VEC> struct state {
    float top[VEC], sum[VEC], y[VEC];
};

/* e^(x - top); 0 where x is that of no tokens. */
static __device__ inline float power(float x, float top) { return x == -INFINITY ? 0 : expf(x - top); }

/* Tokens begin, begin + step, ... of an entry. */
template <int VEC>
static __device__ inline void gather(struct state<VEC> *s, const struct compress_job &job, const struct entry &e,
                                     int begin, int step, int col)
{
    const int64_t gate = (int64_t)job.n_part * job.width;
#pragma unroll
    for (int k = 0; k < VEC; k++) s->top[k] = -INFINITY, s->sum[k] = s->y[k] = 0;
    for (int base = begin; base < job.ratio; base += BATCH * step) {
        struct raw<VEC> value[BATCH], z[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int j = base + i * step;
            if (j >= job.ratio) break;
            const bf16 *p = job.kg + (e.first + j) * job.ld_kg + column(job, j, col);
            load(&value[i], p);
            load(&z[i], p + gate);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int j = base + i * step;
            if (j >= job.ratio) break;
            float v[VEC], x[VEC];
            unpack(v, value[i]);
            unpack(x, z[i]);
            add_bias<VEC>(x, bias_of(job, j, col));
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const float top = fmaxf(s->top[k], x[k]), old = power(s->top[k], top), p = power(x[k], top);
                s->sum[k] = s->sum[k] * old + p;
                s->y[k] = s->y[k] * old + p * v[k];
                s->top[k] = top;
            }
        }
    }
}

/* Writes the gradients of tokens begin, begin + step, ...; s is complete, its y divided by the sum. */
template <int VEC>
static __device__ inline void scatter(const struct state<VEC> &s, const struct compress_job &job, const struct entry &e,
                                      int begin, int step, int col)
{
    const int64_t gate = (int64_t)job.n_part * job.width;
    struct raw<VEC> r;
    float dy[VEC];
    load(&r, job.dy + e.row * job.ld_dy + col);
    unpack(dy, r);
#pragma unroll
    for (int k = 0; k < VEC; k++) dy[k] /= s.sum[k];
#pragma unroll 4
    for (int j = begin; j < job.ratio; j += step) {
        const int64_t at = column(job, j, col);
        const bf16 *p = job.kg + (e.first + j) * job.ld_kg + at;
        bf16 *d = job.dkg + (e.first + j) * job.ld_dkg + at;
        float v[VEC], x[VEC];
        load(&r, p);
        unpack(v, r);
        load(&r, p + gate);
        unpack(x, r);
        add_bias<VEC>(x, bias_of(job, j, col));
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            x[k] = expf(x[k] - s.top[k]) * dy[k];
            v[k] = x[k] * (v[k] - s.y[k]);
        }
        store<VEC>(d, x);
        store<VEC>(d + gate, v);
    }
}

/* Zeros in the gradients of the tokens of sequence seq that belong to no entry: those after its last entry, and the
 * columns a of its last entry's tokens. The caller's share: every step-th token from the begin-th on. */
template <int VEC>
static __device__ inline void clear(const struct compress_job &job, int seq, int begin, int step, int col)
{
    const int first = job.cu[seq], end = job.cu[seq + 1], tail = first + (end - first) / job.ratio * job.ratio;
    const int start = job.n_part == 2 && tail > first ? tail - job.ratio : tail;
    const float zero[VEC] = {};
    for (int t = start + begin; t < end; t += step) {
        bf16 *d = job.dkg + (int64_t)t * job.ld_dkg + col;
        for (int part = 0; part < 2 * job.n_part; part++)
            if (t >= tail || part % 2 == 0) store<VEC>(d + (int64_t)part * job.width, zero);
    }
}

template <int VEC>
static __device__ inline void write(const struct state<VEC> &s, const struct compress_job &job, const struct entry &e,
                                    int col)
{
    float y[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) y[k] = e.found ? s.y[k] / s.sum[k] : 0;
    store<VEC>(job.y + e.row * job.ld_y + col, y);
    if (col == 0) job.pos[e.row] = e.pos;
}

/* Few tokens per entry. Items: N entries; backward: then S sequences. */
template <int VEC, bool BACKWARD>
static __global__ void __launch_bounds__(BLOCK) compress_few(const struct compress_job job)
{
    const int n_col = job.width / VEC;
    const int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x, item = i / n_col;
    const int col = (int)(i % n_col) * VEC;
    if (item >= job.n_row) {
        if (BACKWARD && item < job.n_row + job.n_seq) clear<VEC>(job, (int)(item - job.n_row), 0, 1, col);
        return;
    }
    const struct entry e = find(job, item);
    struct state<VEC> s;
    if (e.found) gather<VEC>(&s, job, e, e.begin, 1, col);
    if (!BACKWARD) {
        write<VEC>(s, job, e, col);
    } else if (e.found) {
#pragma unroll
        for (int k = 0; k < VEC; k++) s.y[k] /= s.sum[k];
        scatter<VEC>(s, job, e, e.begin, 1, col);
    }
}

/* Merges the sums of the groups; all have the result. */
template <int VEC> static __device__ inline void merge(struct state<VEC> *s)
{
    __shared__ float part[3][GROUPS][LANES * VEC + 1];
    __shared__ float whole[3][LANES * VEC];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        part[0][group][lane * VEC + k] = s->top[k];
        part[1][group][lane * VEC + k] = s->sum[k];
        part[2][group][lane * VEC + k] = s->y[k];
    }
    __syncthreads();
    if (threadIdx.x < LANES * VEC) {
        const int c = threadIdx.x;
        float top = -INFINITY, sum = 0, y = 0;
        for (int g = 0; g < GROUPS; g++) top = fmaxf(top, part[0][g][c]);
        for (int g = 0; g < GROUPS; g++) {
            const float p = power(part[0][g][c], top);
            sum += part[1][g][c] * p;
            y += part[2][g][c] * p;
        }
        whole[0][c] = top;
        whole[1][c] = sum;
        whole[2][c] = y;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        s->top[k] = whole[0][lane * VEC + k];
        s->sum[k] = whole[1][lane * VEC + k];
        s->y[k] = whole[2][lane * VEC + k];
    }
}

/* Many tokens per entry. Blocks: items x columns / (8 VEC). */
template <int VEC, bool BACKWARD>
static __global__ void __launch_bounds__(BLOCK) compress_many(const struct compress_job job)
{
    const int n_block = (job.width + LANES * VEC - 1) / (LANES * VEC);
    const int64_t item = blockIdx.x / n_block;
    const int col = (int)(blockIdx.x % n_block * LANES + threadIdx.x % LANES) * VEC, group = threadIdx.x / LANES;
    const bool inside = col < job.width;
    if (item >= job.n_row) {
        if (BACKWARD && inside) clear<VEC>(job, (int)(item - job.n_row), group, GROUPS, col);
        return;
    }
    const struct entry e = find(job, item);
    struct state<VEC> s;
    if (e.found) { /* all threads of the block */
        gather<VEC>(&s, job, e, inside ? e.begin + group : job.ratio, GROUPS, col);
        merge<VEC>(&s);
    }
    if (!BACKWARD) {
        if (inside && group == 0) write<VEC>(s, job, e, col);
    } else if (e.found && inside) {
#pragma unroll
        for (int k = 0; k < VEC; k++) s.y[k] /= s.sum[k];
        scatter<VEC>(s, job, e, e.begin + group, GROUPS, col);
    }
}

static struct compress_job job_of(struct tensor kg, struct tensor bias, int64_t n_row, const struct seqs *seqs,
                                  const struct compress_shape *s)
{
    struct compress_job job = {};
    job.kg = bf16_ptr(kg);
    job.bias = f32_ptr(bias);
    job.cu = i32_ptr(seqs->cu);
    job.ld_kg = kg.ld;
    job.ld_bias = bias.ld;
    job.n_row = n_row;
    job.n_seq = (int)seqs->n_seq;
    job.ratio = (int)s->ratio;
    job.width = (int)s->width;
    job.n_part = s->overlap ? 2 : 1;
    return job;
}

template <int VEC, bool BACKWARD> static void launch(const struct compress_job &job)
{
    const int64_t items = job.n_row + (BACKWARD ? job.n_seq : 0);
    if (job.ratio * job.n_part <= FEW)
        compress_few<VEC, BACKWARD><<<grid_x(ceil_div(items * (job.width / VEC), BLOCK)), BLOCK, 0, cuda.stream>>>(job);
    else
        compress_many<VEC, BACKWARD><<<grid_x(items * ceil_div(job.width, LANES * VEC)), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

static bool eights(struct tensor kg, struct tensor y, struct tensor bias, int64_t width)
{
    return width % 8 == 0 && rows_aligned(kg) && rows_aligned(y) && rows_aligned(bias);
}

extern "C" void cuda_compress_fwd(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg,
                                  struct tensor bias, const struct seqs *seqs, const struct compress_shape *shape)
{
    if (dev->dry_run) return;
    struct compress_job job = job_of(kg, bias, y.shape[0], seqs, shape);
    job.y = bf16_ptr(y);
    job.ld_y = y.ld;
    job.pos = i32_ptr(pos);
    if (eights(kg, y, bias, shape->width))
        launch<8, false>(job);
    else
        launch<1, false>(job);
}

extern "C" void cuda_compress_bwd(struct device *dev, struct tensor dkg, struct tensor dy, struct tensor kg,
                                  struct tensor bias, const struct seqs *seqs, const struct compress_shape *shape)
{
    if (dev->dry_run || kg.shape[0] == 0) return;
    struct compress_job job = job_of(kg, bias, dy.shape[0], seqs, shape);
    job.dy = bf16_ptr(dy);
    job.ld_dy = dy.ld;
    job.dkg = bf16_ptr(dkg);
    job.ld_dkg = dkg.ld;
    if (eights(kg, dy, bias, shape->width) && rows_aligned(dkg))
        launch<8, true>(job);
    else
        launch<1, true>(job);
}
