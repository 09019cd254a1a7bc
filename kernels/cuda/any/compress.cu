/* compress.cu - the entries of compressed attention, one per `ratio` tokens: in every column a sum of the tokens'
 * values, weighted by the softmax of their gates.
 * Math: y = sum_j p_j value_j, p = softmax_j(gate_j + bias_j), column by column; dvalue_j = p_j dy, dgate_j = p_j dy
 *   (value_j - y). With overlap an entry also sums columns a of the tokens of the entry before it.
 * Shapes: kg [T, 2W] bf16: value | gate, with overlap [T, 4W]: value a | value b | gate a | gate b; bias [ratio, W or
 *   2W] f32; y, dy [N, W] bf16, pos [N] i32, cu [S+1] i32; dkg like kg. T may be 0; N >= 1.
 * Needs: fast: W a multiple of 4, 16-byte aligned rows. Otherwise a thread has one column instead of four.
 * Grid: up to 16 tokens per entry: a thread has 4 columns of one entry. More: a block has 64 columns of one entry; 16
 *   groups of 16 threads share its tokens and merge their sums. A thread loads four tokens at a time; the backward
 *   keeps them in registers if an entry has no more. Each token and column belongs to one entry, so the backward needs
 *   no atomics. S more items of the backward (compress_kernel) write zeros for tokens without an entry. Decoding: a
 *   block per entry that the pass completes, a thread per column.
 * Bound: fwd bytes of kg, y, bias; bwd of kg, dkg, dy, bias: memory bound.
 * Numerics: f32, online softmax in a fixed order, e^x by the approximate instruction, one rounding at the end. */
#include "kernels/cuda/parts/pages.cuh"

enum { BLOCK = 256, LANES = 16, FEW = 16, BATCH = 4 };

struct compress_job {
    row_view<> y, kg, dy, dkg; /* y: forward; dy, dkg: backward */
    row_view<float> bias;
    int32_t *pos;
    const int32_t *cu;
    int64_t n_row; /* N */
    int n_tok, n_seq, ratio, width, n_part;
};

/* An entry: tokens first + j, j from begin to ratio - 1; a negative j is a token of the entry before. */
struct entry {
    int64_t first;
    int begin, pos;
    bool found;
};

/* The entry of output row `row`. A single sequence needs no loads. */
static __device__ inline struct entry find(const struct compress_job &job, int64_t row)
{
    const bool single = job.n_seq == 1;
    int low = 0, high = single ? 0 : job.n_seq; /* the first sequence whose entries end after the row */
    while (low < high) {
        const int middle = (low + high) / 2, start = job.cu[middle];
        if (start / job.ratio + (job.cu[middle + 1] - start) / job.ratio > row)
            high = middle;
        else
            low = middle + 1;
    }
    struct entry e = {0, 0, 0, false};
    if (single ? row >= job.n_tok / job.ratio : low == job.n_seq || job.cu[low] / job.ratio > row) return e;
    const int start = single ? 0 : job.cu[low];
    e.found = true;
    e.pos = ((int)row - start / job.ratio) * job.ratio;
    e.first = start + e.pos;
    e.begin = job.n_part == 2 && e.pos > 0 ? -job.ratio : 0;
    return e;
}

/* VEC adjacent columns, 4 or 1: as stored, and as floats. */
template <int VEC> struct raw {
    uint2 u;
};
template <> struct raw<1> {
    bf16 u;
};
template <int VEC> static __device__ inline void load(struct raw<VEC> *r, const bf16 *p)
{
    if constexpr (VEC == 4)
        r->u = *(const uint2 *)p;
    else
        r->u = *p;
}
template <int VEC> static __device__ inline void unpack(float v[VEC], const struct raw<VEC> &r)
{
    if constexpr (VEC == 4) {
        v[0] = __uint_as_float(r.u.x << 16);
        v[1] = __uint_as_float(r.u.x & 0xffff0000u);
        v[2] = __uint_as_float(r.u.y << 16);
        v[3] = __uint_as_float(r.u.y & 0xffff0000u);
    } else {
        v[0] = __bfloat162float(r.u);
    }
}
template <int VEC> static __device__ inline void store(bf16 *p, const float v[VEC])
{
    if constexpr (VEC == 4)
        *(uint2 *)p = make_uint2(pack2(v[0], v[1]), pack2(v[2], v[3]));
    else
        *p = __float2bfloat16_rn(v[0]);
}
template <int VEC> static __device__ inline void add_bias(float v[VEC], const float *p)
{
    if constexpr (VEC == 4) {
        const float4 b = *(const float4 *)p;
        v[0] += b.x, v[1] += b.y, v[2] += b.z, v[3] += b.w;
    } else {
        v[0] += *p;
    }
}

/* The column in kg of column `col` of a token's values; its gates are n_part * W columns further. */
static __device__ inline int64_t column(const struct compress_job &job, int j, int col)
{
    return (job.n_part == 2 && j >= 0 ? job.width : 0) + col;
}
static __device__ inline const float *bias_of(const struct compress_job &job, int j, int col)
{
    return job.bias.at(j < 0 ? j + job.ratio : j) + column(job, j, col);
}

/* A softmax in progress: top = the largest gate, the sum of e^(gate - top), and the sum of e^(gate - top) times the
 * value. */
template <int VEC> struct state {
    float top[VEC], sum[VEC], y[VEC];
};

/* e^(x - top); 0 for x = -inf, the maximum over no tokens. */
static __device__ inline float power(float x, float top) { return x == -INFINITY ? 0 : __expf(x - top); }

/* Up to BATCH tokens of an entry: base, base + step, ... */
template <int VEC> struct batch {
    struct raw<VEC> value[BATCH], gate[BATCH];
};
template <int VEC>
static __device__ inline void load_batch(struct batch<VEC> *b, const struct compress_job &job, const struct entry &e,
                                         int base, int step, int col)
{
    const int64_t gate = (int64_t)job.n_part * job.width;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int j = base + i * step;
        if (j >= job.ratio) break;
        const bf16 *p = job.kg.at(e.first + j) + column(job, j, col);
        load(&b->value[i], p);
        load(&b->gate[i], p + gate);
    }
}

template <int VEC>
static __device__ inline void add_batch(struct state<VEC> *s, const struct batch<VEC> &b,
                                        const struct compress_job &job, int base, int step, int col)
{
    float x[VEC], top[VEC]; /* x of one token: sums of all tokens would spill */
#pragma unroll
    for (int k = 0; k < VEC; k++) top[k] = s->top[k];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (base + i * step >= job.ratio) break;
        unpack(x, b.gate[i]);
        add_bias<VEC>(x, bias_of(job, base + i * step, col));
#pragma unroll
        for (int k = 0; k < VEC; k++) top[k] = fmaxf(top[k], x[k]);
    }
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        const float old = power(s->top[k], top[k]);
        s->top[k] = top[k];
        s->sum[k] *= old;
        s->y[k] *= old;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (base + i * step >= job.ratio) break;
        float v[VEC];
        unpack(v, b.value[i]);
        unpack(x, b.gate[i]);
        add_bias<VEC>(x, bias_of(job, base + i * step, col));
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float p = __expf(x[k] - top[k]);
            s->sum[k] += p;
            s->y[k] += p * v[k];
        }
    }
}

/* Writes the gradients of a batch. s: the complete softmax; dy: dLoss/dy divided by the sum of the softmax. */
template <int VEC>
static __device__ inline void write_batch(const struct state<VEC> &s, const float dy[VEC], const struct batch<VEC> &b,
                                          const struct compress_job &job, const struct entry &e, int base, int step,
                                          int col)
{
    const int64_t gate = (int64_t)job.n_part * job.width;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int j = base + i * step;
        if (j >= job.ratio) break;
        bf16 *d = job.dkg.at(e.first + j) + column(job, j, col);
        float v[VEC], x[VEC];
        unpack(v, b.value[i]);
        unpack(x, b.gate[i]);
        add_bias<VEC>(x, bias_of(job, j, col));
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            x[k] = __expf(x[k] - s.top[k]) * dy[k];
            v[k] = x[k] * (v[k] - s.y[k]);
        }
        store<VEC>(d, x);
        store<VEC>(d + gate, v);
    }
}

/* Writes zeros for what belongs to no entry of sequence seq: the gradients of the tokens after its last entry and, with
 * overlap, of columns a of the last entry's tokens. Of these tokens it takes every step-th from the begin-th on. */
template <int VEC>
static __device__ inline void clear(const struct compress_job &job, int seq, int begin, int step, int col)
{
    const int first = job.cu[seq], end = job.cu[seq + 1], tail = first + (end - first) / job.ratio * job.ratio;
    const int start = job.n_part == 2 && tail > first ? tail - job.ratio : tail;
    const float zero[VEC] = {};
    for (int t = start + begin; t < end; t += step) {
        bf16 *d = job.dkg.at(t) + col;
        for (int part = 0; part < 2 * job.n_part; part++)
            if (t >= tail || part % 2 == 0) store<VEC>(d + (int64_t)part * job.width, zero);
    }
}

/* Adds up the sums of the groups; all threads get the result. */
template <int VEC> static __device__ inline void merge(struct state<VEC> *s)
{
    __shared__ float part[3][BLOCK / 32][LANES * VEC];
    __shared__ float whole[3][LANES * VEC];
    const int at = threadIdx.x % LANES * VEC, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < VEC; k++) { /* the two groups of a warp */
        const float top = fmaxf(s->top[k], __shfl_xor_sync(0xffffffffu, s->top[k], LANES));
        const float old = power(s->top[k], top), sum = s->sum[k] * old, y = s->y[k] * old;
        part[0][warp][at + k] = top;
        part[1][warp][at + k] = sum + __shfl_xor_sync(0xffffffffu, sum, LANES);
        part[2][warp][at + k] = y + __shfl_xor_sync(0xffffffffu, y, LANES);
    }
    __syncthreads();
    if (threadIdx.x < LANES * VEC) {
        const int c = threadIdx.x;
        float top = -INFINITY, sum = 0, y = 0;
#pragma unroll
        for (int w = 0; w < BLOCK / 32; w++) top = fmaxf(top, part[0][w][c]);
#pragma unroll
        for (int w = 0; w < BLOCK / 32; w++) {
            const float p = power(part[0][w][c], top);
            sum += part[1][w][c] * p;
            y += part[2][w][c] * p;
        }
        whole[0][c] = top;
        whole[1][c] = sum;
        whole[2][c] = y;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        s->top[k] = whole[0][at + k];
        s->sum[k] = whole[1][at + k];
        s->y[k] = whole[2][at + k];
    }
}

/* The items are N entries and, in the backward, then S sequences, whose tokens without an entry get zeros. GROUPS 1: a
 * thread per item and VEC columns. Otherwise a block per item and LANES * VEC columns; its groups of threads divide the
 * tokens. */
template <int VEC, int GROUPS, bool BACKWARD>
static __global__ void __launch_bounds__(BLOCK, 4) compress_kernel(const struct compress_job job)
{
    const bool split = GROUPS > 1;
    const int n_col = split ? (job.width + LANES * VEC - 1) / (LANES * VEC) : job.width / VEC;
    const int64_t i = split ? blockIdx.x : (int64_t)blockIdx.x * BLOCK + threadIdx.x, item = i / n_col;
    const int group = split ? threadIdx.x / LANES : 0;
    const int col = ((int)(i % n_col) * (split ? LANES : 1) + (split ? threadIdx.x % LANES : 0)) * VEC;
    const bool inside = col < job.width;
    if (item >= job.n_row) {
        if (BACKWARD && inside && item < job.n_row + job.n_seq)
            clear<VEC>(job, (int)(item - job.n_row), group, GROUPS, col);
        return;
    }
    const struct entry e = find(job, item);
    const int begin = inside ? e.begin + group : job.ratio;
    struct state<VEC> s;
    struct batch<VEC> b;
    float dy[VEC];
#pragma unroll
    for (int k = 0; k < VEC; k++) s.top[k] = -INFINITY, s.sum[k] = s.y[k] = 0;
    if (e.found) { /* the same for all threads of an item */
        for (int base = begin; base < job.ratio; base += BATCH * GROUPS) {
            load_batch(&b, job, e, base, GROUPS, col);
            add_batch(&s, b, job, base, GROUPS, col);
        }
        if (split) merge(&s);
#pragma unroll
        for (int k = 0; k < VEC; k++) s.y[k] /= s.sum[k];
    }
    if (!BACKWARD && inside && group == 0) {
        store<VEC>(job.y.at(item) + col, s.y);
        if (col == 0) job.pos[item] = e.pos;
    }
    if (!BACKWARD || !e.found || !inside) return;
    struct raw<VEC> r;
    load(&r, job.dy.at(item) + col);
    unpack(dy, r);
#pragma unroll
    for (int k = 0; k < VEC; k++) dy[k] /= s.sum[k];
    for (int base = begin; base < job.ratio; base += BATCH * GROUPS) {
        if (begin + BATCH * GROUPS < job.ratio) load_batch(&b, job, e, base, GROUPS, col);
        write_batch(s, dy, b, job, e, base, GROUPS, col);
    }
}

static struct compress_job job_of(struct tensor kg, struct tensor bias, int64_t n_row, const struct seqs *seqs,
                                  const struct compress_shape *s)
{
    struct compress_job job = {};
    job.kg = rows_of(kg);
    job.bias = rows_of<float>(bias);
    job.cu = i32_ptr(seqs->cu);
    job.n_row = n_row;
    job.n_tok = (int)kg.shape[0];
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
        compress_kernel<VEC, 1, BACKWARD>
            <<<grid_x(ceil_div(items * (job.width / VEC), BLOCK)), BLOCK, 0, cuda.stream>>>(job);
    else
        compress_kernel<VEC, BLOCK / LANES, BACKWARD>
            <<<grid_x(items * ceil_div(job.width, LANES * VEC)), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* Whether every four columns are aligned. */
static bool fours(struct tensor kg, struct tensor y, struct tensor bias, int64_t width)
{
    return width % 4 == 0 && rows_aligned(kg) && rows_aligned(y) && rows_aligned(bias);
}

extern "C" void cuda_compress_fwd(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg,
                                  struct tensor bias, const struct seqs *seqs, const struct compress_shape *shape)
{
    struct compress_job job = job_of(kg, bias, y.shape[0], seqs, shape);
    job.y = rows_of(y);
    job.pos = i32_ptr(pos);
    if (fours(kg, y, bias, shape->width))
        launch<4, false>(job);
    else
        launch<1, false>(job);
}

extern "C" void cuda_compress_bwd(struct device *dev, struct tensor dkg, struct tensor dy, struct tensor kg,
                                  struct tensor bias, const struct seqs *seqs, const struct compress_shape *shape)
{
    if (kg.shape[0] == 0) return;
    struct compress_job job = job_of(kg, bias, dy.shape[0], seqs, shape);
    job.dy = rows_of(dy);
    job.dkg = rows_of(dkg);
    if (fours(kg, dy, bias, shape->width) && rows_aligned(dkg))
        launch<4, true>(job);
    else
        launch<1, true>(job);
}

/* ---- decoding */

struct compress_decode_job {
    row_view<> y, kg;
    row_view<float> bias;
    struct page_table pages;
    struct pass_tokens at;
    int32_t *pos;
    int ratio, width, n_part;
};

/* Values and gates of the token at position p of sequence seq. kg has the tokens from position `first` on, from row
 * `start` on; the pages have earlier ones. */
static __device__ inline const bf16 *pair_at(const struct compress_decode_job &job, int seq, int p, int start,
                                             int first)
{
    return p >= first ? job.kg.at(start + p - first) : page_row(job.pages, seq, p);
}

static __global__ void __launch_bounds__(BLOCK) compress_complete(const struct compress_decode_job job)
{
    const int64_t row = blockIdx.x;
    const struct complete_entry x = complete_at(job.at, job.ratio, row);
    const int start = job.at.cu[x.seq], pos = x.e * job.ratio, begin = job.n_part == 2 && pos > 0 ? -job.ratio : 0;
    const int first = x.found ? job.at.pos[start] : 0, gates = job.n_part * job.width;
    if (threadIdx.x == 0) job.pos[row] = x.found ? pos : 0;
    for (int c = (int)threadIdx.x; c < job.width; c += BLOCK) {
        float top = -INFINITY, sum = 0, y = 0;
        for (int turn = 0; turn < 2 && x.found; turn++)
            for (int j = begin; j < job.ratio; j++) {
                const int at = job.n_part == 2 && j >= 0 ? job.width + c : c;
                const bf16 *pair = pair_at(job, x.seq, pos + j, start, first) + at;
                const float gate = __bfloat162float(pair[gates]) + job.bias.at(j < 0 ? j + job.ratio : j)[at];
                const float p = turn ? __expf(gate - top) : 0;
                if (!turn) top = fmaxf(top, gate);
                sum += p;
                y += p * __bfloat162float(pair[0]);
            }
        job.y.at(row)[c] = __float2bfloat16_rn(x.found ? y / sum : 0);
    }
}

extern "C" void cuda_compress_decode(struct device *dev, struct tensor y, struct tensor pos, struct tensor kg,
                                     struct tensor bias, const struct past *past, const struct compress_shape *shape)
{
    if (y.shape[0] == 0) return;
    const struct compress_decode_job job = {
        rows_of(y),   rows_of(kg),       rows_of<float>(bias), table_of(past->pages), tokens_of(past),
        i32_ptr(pos), (int)shape->ratio, (int)shape->width,    shape->overlap ? 2 : 1};
    compress_complete<<<grid_x(y.shape[0]), BLOCK, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

static __global__ void __launch_bounds__(BLOCK)
    store_complete(const struct page_table pages, const struct pass_tokens at, const row_view<> x, int n_col, int ratio)
{
    const struct complete_entry e = complete_at(at, ratio, blockIdx.x);
    if (!e.found) return;
    bf16 *row = page_row(pages, e.seq, e.e);
    for (int c = (int)threadIdx.x; c < n_col; c += BLOCK) row[c] = x.at(blockIdx.x)[c];
}

extern "C" void cuda_entry_store(struct device *dev, struct tensor x, const struct past *past, int64_t ratio)
{
    if (x.shape[0] == 0) return;
    store_complete<<<grid_x(x.shape[0]), BLOCK, 0, cuda.stream>>>(table_of(past->pages), tokens_of(past), rows_of(x),
                                                                  (int)x.shape[1], (int)ratio);
    CUDA_CHECK_LAUNCH();
}
