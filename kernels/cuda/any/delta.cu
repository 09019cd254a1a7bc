/* delta.cu - gated delta rule, forward and backward, token by token (math: kernels/ops/ops.h, kernels/cpu/delta.c).
 *
 * The columns of a state S [A, B] do not depend on each other, given k; its rows do not, given the deltas. So a thread
 * holds one column or one row in registers, and no thread waits for another. S' = e^g S, E is the gradient of S:
 *   columns   forward    err = v - S'^T k, delta = beta err, S = S' + k delta^T; o = S^T q
 *             backward   E += q do^T, dd = E^T k, dmem = -beta dd, E = e^g (E + k dmem^T); dv = beta dd
 *   rows      forward    dk_in = S' dmem, S as in columns; dq = S do
 *             backward   E += q do^T, dk_out = E delta, E = e^g (E + k dmem^T)
 *   tokens    dk = dk_in + dk_out, sums over the value heads of a key head, norms of q and k; dbeta = <dd, err>, dG =
 *             <q, dq> + <k, dk_in> - <k, dk_out>; dg = the sum of dG over the tokens after, inside the sequence
 * The forward is the first line, the backward runs all of them. Where segments (struct segments) continue others, each
 * level has a launch: columns store the state after a segment, or the gradient before it; so do the sums of dG.
 * Shapes: as in ops.h, bf16; err, dd [T, N*B] and dq, dk_in, dk_out [T, N*A] f32 in scratch. T may be 0.
 * Needs: A and B at most 128, T N < 2^31.
 * Grid: a block per sequence and value head, a thread per column (row), TILE tokens at a time through shared memory (at
 * most 40 KiB); tokens: a warp per token and key head; gates: a block per sequence and value head.
 * Bound: instruction issue: per token a thread has 4 A operations in f32 for a column, 5 B for a row; and N S blocks,
 * too few for few sequences and heads. Bytes: fwd 2 T (C + N B) bytes; bwd about 4 T N (7 B + 7 A).
 * Numerics: f32 sums in a fixed order. On Hopper, delta_wgmma.cu replaces these kernels for heads of 128. */
#include "kernels/cuda/sm90/delta/delta_wgmma.cuh"
#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"
#include "kernels/cuda/parts/state_rows.cuh"

enum { TILE = 16, MAX_DIM = 128, SCAN = 256 };

struct delta_job {
    struct delta_shape s;
    int64_t n_tok;
    const int32_t *cu, *links; /* of segments; links NULL: of sequences, without prefixes */
    int n_seq, n_level, level;
    row_view<> qkv, ba, o, dout, dqkv, dba;
    const float *a_log, *dt_bias;
    float *err, *dd;                 /* [T, N*B] */
    float *dq, *dk_in, *dk_out;      /* [T, N*A] */
    float *dbeta, *dg;               /* [T, N]; dg: dG */
    struct state_view<float> states; /* decoding: [slots, N*A*B] */
    float *ends, *grads, *sums;      /* of segments: [slots, N, A*B]; sums of dG [slots, N] */
};

/* A link of the block's segment (SEGMENT_*); -1 without prefixes. */
static __device__ inline int link_of(const struct delta_job *job, int link)
{
    return job->links ? job->links[blockIdx.x * SEGMENT_LINKS + link] : -1;
}
static __device__ inline bool other_level(const struct delta_job *job, bool back)
{
    return job->links && link_of(job, SEGMENT_LEVEL) != (back ? job->n_level - 1 - job->level : job->level);
}
/* The state of value head n in a slot; NULL without a slot. */
static __device__ inline float *slot_at(const struct delta_job *job, float *slots, int slot, int n)
{
    return slot < 0 ? NULL : slots + (slot * job->s.n_value + n) * job->s.key_dim * job->s.value_dim;
}

struct head {
    int64_t first, len;
    int n, q_col, k_col, v_col;
};

static __device__ inline struct head find_head(const struct delta_job *job)
{
    const int n = (int)blockIdx.y, key = n / (int)(job->s.n_value / job->s.n_key), a = (int)job->s.key_dim;
    const int64_t first = job->cu[blockIdx.x];
    const int width = (int)job->s.n_key * a;
    struct head h = {first,           job->cu[blockIdx.x + 1] - first,      n, key * a,
                     width + key * a, 2 * width + n * (int)job->s.value_dim};
    return h;
}

/* beta and e^g of a token. */
static __device__ inline void gates(float *beta, float *decay, const struct delta_job *job, int64_t t, int n)
{
    const bf16 *row = job->ba.at(t);
    const float a = __bfloat162float(row[job->s.n_value + n]) + job->dt_bias[n];
    *beta = sigmoid(__bfloat162float(row[n]));
    *decay = expf(-expf(job->a_log[n]) * softplus(a));
}

/* out[i] = factor * x / |x| of n tokens from t on, zero beyond their dim columns. A warp computes a token. */
template <int DIM>
static __device__ inline void load_units(float (*out)[DIM], const row_view<> &x, int col, int64_t t, int n, int dim,
                                         float factor)
{
    const int lane = (int)threadIdx.x % 32;
    for (int i = (int)threadIdx.x / 32; i < n; i += (int)blockDim.x / 32) {
        float v[DIM / 32], sum = 0;
#pragma unroll
        for (int e = 0; e < DIM / 32; e++) {
            const int c = lane + 32 * e;
            v[e] = c < dim ? __bfloat162float(x.at(t + i)[col + c]) : 0;
            sum += v[e] * v[e];
        }
        const float r = factor / sqrtf(warp_sum(sum) + 1e-6f);
#pragma unroll
        for (int e = 0; e < DIM / 32; e++) out[i][lane + 32 * e] = r * v[e];
    }
}

static __device__ inline void load_gates(float *beta, float *decay, const struct delta_job *job, const struct head *h,
                                         int64_t t, int n)
{
    const int i = (int)threadIdx.x;
    if (i < n) gates(&beta[i], &decay[i], job, t + i, h->n);
}

/* s += this thread's row or column of a state: n values, `step` apart. from NULL: none. */
template <int DIM>
static __device__ inline void add_state(float s[DIM], const float *from, int64_t first, int n, int step)
{
    if (from == NULL) return;
#pragma unroll
    for (int r = 0; r < DIM; r++)
        if (r < n) s[r] += from[first + (int64_t)r * step];
}
/* add_state of the gradients of the segments that continue this one. */
template <int DIM>
static __device__ inline void add_grads(float s[DIM], const struct delta_job &job, int head, int64_t first, int n,
                                        int step)
{
    for (int i = 0; i < link_of(&job, SEGMENT_N_OUT); i++)
        add_state<DIM>(s, slot_at(&job, job.grads, link_of(&job, SEGMENT_OUT) + i, head), first, n, step);
}
template <int DIM> static __device__ inline void store_column(const float s[DIM], float *to, int a, int b)
{
    const int c = (int)threadIdx.x;
    if (to == NULL || c >= b) return;
#pragma unroll
    for (int r = 0; r < DIM; r++)
        if (r < a) to[(int64_t)r * b + c] = s[r];
}

/* The state before the block's tokens, and where that after them is stored; NULL: zero, not stored. */
template <bool DECODE> static __device__ inline const float *state_in(const struct delta_job &job, const struct head &h)
{
    if (!DECODE) return slot_at(&job, job.ends, link_of(&job, SEGMENT_IN), h.n);
    const float *from = state_before(job.states, job.cu, (int)blockIdx.x);
    return from ? from + h.n * job.s.key_dim * job.s.value_dim : NULL;
}
template <bool DECODE> static __device__ inline float *state_out(const struct delta_job &job, const struct head &h)
{
    if (!DECODE) return slot_at(&job, job.ends, link_of(&job, SEGMENT_OUT), h.n);
    return h.len ? state_row(job.states, (int)blockIdx.x) + h.n * job.s.key_dim * job.s.value_dim : NULL;
}

/* What the kernel computes: o; err, for the backward; or in decoding o from the states of slots, which it updates. */
enum columns { COLUMNS_O, COLUMNS_ERR, COLUMNS_DECODE };
template <int DIM, enum columns WHAT>
static __global__ void __launch_bounds__(MAX_DIM) columns_fwd(const struct delta_job job)
{
    constexpr bool ERR = WHAT == COLUMNS_ERR;
    __shared__ __align__(16) float q[TILE][DIM], k[TILE][DIM], v[TILE][DIM];
    __shared__ float beta[TILE], decay[TILE];
    const struct head h = find_head(&job);
    const int c = (int)threadIdx.x, a = (int)job.s.key_dim, b = (int)job.s.value_dim;
    float s[DIM] = {0};
    if (other_level(&job, false)) return;
    if (c < b) add_state<DIM>(s, state_in<WHAT == COLUMNS_DECODE>(job, h), c, a, b);
    for (int64_t at = 0; at < h.len; at += TILE) {
        const int64_t t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        if (!ERR) load_units<DIM>(q, job.qkv, h.q_col, t, n, a, rsqrtf((float)a));
        load_units<DIM>(k, job.qkv, h.k_col, t, n, a, 1);
        load_rows<DIM>(v, job.qkv.p + h.v_col, job.qkv.ld, t, n, b, (const float *)NULL);
        load_gates(beta, decay, &job, &h, t, n);
        __syncthreads();
        if (c >= b) continue;
        for (int i = 0; i < n; i++) {
            const float err = v[i][c] - decay[i] * dot<DIM>(s, k[i]);
            update<DIM>(s, decay[i], k[i], beta[i] * err);
            if (ERR)
                job.err[((t + i) * job.s.n_value + h.n) * b + c] = err;
            else
                job.o.at(t + i)[h.n * b + c] = __float2bfloat16_rn(dot<DIM>(s, q[i]));
        }
    }
    store_column<DIM>(s, state_out<WHAT == COLUMNS_DECODE>(job, h), a, b);
}

/* dd and dv. */
template <int DIM> static __global__ void __launch_bounds__(MAX_DIM) columns_bwd(const struct delta_job job)
{
    __shared__ __align__(16) float q[TILE][DIM], k[TILE][DIM], dout[TILE][DIM];
    __shared__ float beta[TILE], decay[TILE];
    const struct head h = find_head(&job);
    const int c = (int)threadIdx.x, a = (int)job.s.key_dim, b = (int)job.s.value_dim;
    float e[DIM] = {0};
    if (other_level(&job, true)) return;
    if (c < b) add_grads<DIM>(e, job, h.n, c, a, b);
    for (int64_t at = (h.len - 1) / TILE * TILE; at >= 0 && h.len > 0; at -= TILE) {
        const int64_t t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        load_units<DIM>(q, job.qkv, h.q_col, t, n, a, rsqrtf((float)a));
        load_units<DIM>(k, job.qkv, h.k_col, t, n, a, 1);
        load_rows<DIM>(dout, job.dout.p + h.n * b, job.dout.ld, t, n, b, (const float *)NULL);
        load_gates(beta, decay, &job, &h, t, n);
        __syncthreads();
        if (c >= b) continue;
        for (int i = n - 1; i >= 0; i--) {
            update<DIM>(e, 1, q[i], dout[i][c]);
            const float dd = dot<DIM>(e, k[i]);
            update<DIM>(e, decay[i], k[i], -decay[i] * beta[i] * dd);
            job.dd[((t + i) * job.s.n_value + h.n) * b + c] = dd;
            job.dqkv.at(t + i)[h.v_col + c] = __float2bfloat16_rn(beta[i] * dd);
        }
    }
    store_column<DIM>(e, slot_at(&job, job.grads, link_of(&job, SEGMENT_OWN), h.n), a, b);
}

/* Loads what both kernels of rows read: dout, delta = beta err, dmem = -beta dd. */
template <int DIM>
static __device__ inline void load_deltas(float (*dout)[DIM], float (*delta)[DIM], float (*dmem)[DIM], float *beta,
                                          float *minus, const struct delta_job *job, const struct head *h, int64_t t,
                                          int n)
{
    const int b = (int)job->s.value_dim;
    const int64_t ld = job->s.n_value * b;
    if ((int)threadIdx.x < n) minus[threadIdx.x] = -beta[threadIdx.x];
    __syncthreads();
    load_rows<DIM>(dout, job->dout.p + h->n * b, job->dout.ld, t, n, b, (const float *)NULL);
    load_rows<DIM>(delta, (const float *)job->err + h->n * b, ld, t, n, b, (const float *)beta);
    load_rows<DIM>(dmem, (const float *)job->dd + h->n * b, ld, t, n, b, (const float *)minus);
}

/* dk_in and dq. */
template <int DIM> static __global__ void __launch_bounds__(MAX_DIM) rows_fwd(const struct delta_job job)
{
    __shared__ __align__(16) float k[TILE][DIM], dout[TILE][DIM], delta[TILE][DIM], dmem[TILE][DIM];
    __shared__ float beta[TILE], decay[TILE], minus[TILE];
    const struct head h = find_head(&job);
    const int r = (int)threadIdx.x, a = (int)job.s.key_dim, b = (int)job.s.value_dim;
    float s[DIM] = {0};
    if (r < a) add_state<DIM>(s, state_in<false>(job, h), (int64_t)r * b, b, 1);
    for (int64_t at = 0; at < h.len; at += TILE) {
        const int64_t t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        load_gates(beta, decay, &job, &h, t, n);
        load_units<DIM>(k, job.qkv, h.k_col, t, n, a, 1);
        load_deltas<DIM>(dout, delta, dmem, beta, minus, &job, &h, t, n);
        __syncthreads();
        if (r >= a) continue;
        for (int i = 0; i < n; i++) {
            const int64_t out = ((t + i) * job.s.n_value + h.n) * a + r;
            job.dk_in[out] = decay[i] * dot<DIM>(s, dmem[i]);
            update<DIM>(s, decay[i], delta[i], k[i][r]);
            job.dq[out] = dot<DIM>(s, dout[i]);
        }
    }
}

/* dk_out. */
template <int DIM> static __global__ void __launch_bounds__(MAX_DIM) rows_bwd(const struct delta_job job)
{
    __shared__ __align__(16) float q[TILE][DIM], k[TILE][DIM], dout[TILE][DIM], delta[TILE][DIM], dmem[TILE][DIM];
    __shared__ float beta[TILE], decay[TILE], minus[TILE];
    const struct head h = find_head(&job);
    const int r = (int)threadIdx.x, a = (int)job.s.key_dim, b = (int)job.s.value_dim;
    float e[DIM] = {0};
    if (r < a) add_grads<DIM>(e, job, h.n, (int64_t)r * b, b, 1);
    for (int64_t at = (h.len - 1) / TILE * TILE; at >= 0 && h.len > 0; at -= TILE) {
        const int64_t t = h.first + at;
        const int n = (int)MT_MIN((int64_t)TILE, h.len - at);
        __syncthreads();
        load_gates(beta, decay, &job, &h, t, n);
        load_units<DIM>(q, job.qkv, h.q_col, t, n, a, rsqrtf((float)a));
        load_units<DIM>(k, job.qkv, h.k_col, t, n, a, 1);
        load_deltas<DIM>(dout, delta, dmem, beta, minus, &job, &h, t, n);
        __syncthreads();
        if (r >= a) continue;
        for (int i = n - 1; i >= 0; i--) {
            update<DIM>(e, 1, dout[i], q[i][r]);
            job.dk_out[((t + i) * job.s.n_value + h.n) * a + r] = dot<DIM>(e, delta[i]);
            update<DIM>(e, decay[i], dmem[i], decay[i] * k[i][r]);
        }
    }
}

/* ---- tokens ---- */

/* out = factor r (dy - y <dy, y>), y = x r */
template <int DIM>
static __device__ inline void write_unit_grad(bf16 *out, const float dy[DIM / 32], const float y[DIM / 32], float r,
                                              int dim)
{
    const float along = lane_dot<DIM / 32>(dy, y);
#pragma unroll
    for (int e = 0; e < DIM / 32; e++) {
        const int c = (int)(threadIdx.x % 32) + 32 * e;
        if (c < dim) out[c] = __float2bfloat16_rn(r * (dy[e] - y[e] * along));
    }
}

/* A warp per token and key head: dq and dk of the op, and dbeta, dG of the value heads. */
template <int DIM> static __global__ void __launch_bounds__(128) tokens(const struct delta_job job)
{
    const int64_t i = (int64_t)blockIdx.x * 4 + threadIdx.x / 32, t = i / job.s.n_key;
    const int key = (int)(i % job.s.n_key), group = (int)(job.s.n_value / job.s.n_key);
    const int a = (int)job.s.key_dim, b = (int)job.s.value_dim, q_col = key * a, k_col = (int)job.s.n_key * a + q_col;
    const float scale = rsqrtf((float)a);
    float q[DIM / 32], k[DIM / 32], sum_q[DIM / 32] = {0}, sum_k[DIM / 32] = {0}, x[DIM / 32], y[DIM / 32];
    if (t >= job.n_tok) return;
    lane_load<DIM>(q, job.qkv.at(t) + q_col, a);
    lane_load<DIM>(k, job.qkv.at(t) + k_col, a);
    const float rq = 1 / sqrtf(lane_dot<DIM / 32>(q, q) + 1e-6f), rk = 1 / sqrtf(lane_dot<DIM / 32>(k, k) + 1e-6f);
#pragma unroll
    for (int e = 0; e < DIM / 32; e++) q[e] *= rq, k[e] *= rk;
    for (int n = key * group; n < (key + 1) * group; n++) {
        const int64_t head = t * job.s.n_value + n;
        float dg;
        lane_load<DIM>(x, job.dq + head * a, a);
        dg = scale * lane_dot<DIM / 32>(q, x);
#pragma unroll
        for (int e = 0; e < DIM / 32; e++) sum_q[e] += x[e];
        lane_load<DIM>(x, job.dk_in + head * a, a);
        lane_load<DIM>(y, job.dk_out + head * a, a);
#pragma unroll
        for (int e = 0; e < DIM / 32; e++) {
            sum_k[e] += x[e] + y[e];
            x[e] -= y[e];
        }
        dg += lane_dot<DIM / 32>(k, x);
        lane_load<DIM>(x, job.err + head * b, b);
        lane_load<DIM>(y, job.dd + head * b, b);
        const float dbeta = lane_dot<DIM / 32>(x, y);
        if (threadIdx.x % 32 == 0) job.dg[head] = dg, job.dbeta[head] = dbeta;
    }
    write_unit_grad<DIM>(job.dqkv.at(t) + q_col, sum_q, q, scale * rq, a);
    write_unit_grad<DIM>(job.dqkv.at(t) + k_col, sum_k, k, rk, a);
}

/* A block per sequence and value head, from the last token to the first: dg = the sum of dG from the token on, also in
 * the segments that continue this one. */
static __global__ void __launch_bounds__(SCAN) gates_bwd(const struct delta_job job)
{
    __shared__ float part[SCAN / 32];
    const struct head h = find_head(&job);
    float carry = 0;
    if (other_level(&job, true)) return;
    for (int i = 0; i < link_of(&job, SEGMENT_N_OUT); i++)
        carry += job.sums[(link_of(&job, SEGMENT_OUT) + i) * job.s.n_value + h.n];
    for (int64_t end = h.len; end > 0; end -= SCAN) {
        const int64_t at = end - 1 - (int64_t)threadIdx.x, t = h.first + at;
        const float sum = sum_before<SCAN>(at >= 0 ? job.dg[t * job.s.n_value + h.n] : 0, part, &carry);
        if (at < 0) continue;
        const bf16 *row = job.ba.at(t);
        const float a = __bfloat162float(row[job.s.n_value + h.n]) + job.dt_bias[h.n];
        const float beta = sigmoid(__bfloat162float(row[h.n]));
        bf16 *out = job.dba.at(t);
        out[h.n] = __float2bfloat16_rn(job.dbeta[t * job.s.n_value + h.n] * beta * (1 - beta));
        out[job.s.n_value + h.n] = __float2bfloat16_rn(-sum * expf(job.a_log[h.n]) * sigmoid(a));
    }
    if (threadIdx.x == 0 && link_of(&job, SEGMENT_OWN) >= 0)
        job.sums[link_of(&job, SEGMENT_OWN) * job.s.n_value + h.n] = carry;
}

/* ---- ops ---- */

static struct delta_job job_of(struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                               const struct seqs *seqs, const struct delta_shape *shape)
{
    struct delta_job job = {};
    job.s = *shape;
    job.n_tok = qkv.shape[0];
    job.qkv = rows_of(qkv);
    job.ba = rows_of(ba);
    job.a_log = f32_ptr(a_log);
    job.dt_bias = f32_ptr(dt_bias);
    const struct segments *cut = seqs->segments.n ? &seqs->segments : NULL;
    job.cu = i32_ptr(cut ? cut->cu : seqs->cu);
    job.links = cut ? i32_ptr(cut->links) : NULL;
    job.n_seq = (int)(cut ? cut->n : seqs->n_seq);
    job.n_level = cut ? (int)cut->n_level : 1;
    MT_REQUIRE(shape->key_dim <= MAX_DIM && shape->value_dim <= MAX_DIM && shape->n_value <= 65535,
               "gated delta rule: heads of %lld and %lld; the CUDA kernels take up to %d", (long long)shape->key_dim,
               (long long)shape->value_dim, MAX_DIM);
    return job;
}

/* The smallest instance whose threads can hold a row and a column of the state. */
#define LAUNCH(kernel, job, grid, threads)                                                                             \
    do {                                                                                                               \
        const int64_t delta_dim = MT_MAX((job).s.key_dim, (job).s.value_dim);                                          \
        if (delta_dim <= 32)                                                                                           \
            kernel(32)<<<grid, threads, 0, cuda.stream>>>(job);                                                        \
        else if (delta_dim <= 64)                                                                                      \
            kernel(64)<<<grid, threads, 0, cuda.stream>>>(job);                                                        \
        else                                                                                                           \
            kernel(128)<<<grid, threads, 0, cuda.stream>>>(job);                                                       \
        CUDA_CHECK_LAUNCH();                                                                                           \
    } while (0)
#define OUTPUTS(dim)  columns_fwd<dim, COLUMNS_O>
#define DECODE(dim)   columns_fwd<dim, COLUMNS_DECODE>
#define ERRORS(dim)   columns_fwd<dim, COLUMNS_ERR>
#define COLUMNS(dim)  columns_bwd<dim>
#define ROWS(dim)     rows_fwd<dim>
#define ROWS_BWD(dim) rows_bwd<dim>
#define TOKENS(dim)   tokens<dim>

static unsigned threads_of(int64_t dim) { return (unsigned)(ceil_div(dim, 32) * 32); }

static void fwd_any(const struct scratch_delta *s, struct tensor o, struct tensor qkv, struct tensor ba,
                    struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                    const struct delta_shape *shape)
{
    if (qkv.shape[0] == 0) return;
    struct delta_job job = job_of(qkv, ba, a_log, dt_bias, seqs, shape);
    const dim3 grid(grid_x(job.n_seq), (unsigned)shape->n_value);
    job.o = rows_of(o);
    job.ends = f32_ptr(s->states);
    for (; job.level < job.n_level; job.level++) LAUNCH(OUTPUTS, job, grid, threads_of(shape->value_dim));
}

static void bwd_any(const struct scratch_delta *s, struct tensor dqkv, struct tensor dba, struct tensor dout,
                    struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                    const struct seqs *seqs, const struct delta_shape *shape)
{
    const int64_t n_tok = qkv.shape[0];
    struct delta_job job = job_of(qkv, ba, a_log, dt_bias, seqs, shape);
    if (n_tok == 0) return;
    const dim3 grid(grid_x(job.n_seq), (unsigned)shape->n_value);
    job.err = f32_ptr(s->err), job.dd = f32_ptr(s->dd);
    job.dq = f32_ptr(s->dq), job.dk_in = f32_ptr(s->dk_in), job.dk_out = f32_ptr(s->dk_out);
    job.dbeta = f32_ptr(s->dbeta), job.dg = f32_ptr(s->dg);
    job.dqkv = rows_of(dqkv);
    job.dba = rows_of(dba);
    job.dout = rows_of(dout);
    job.ends = f32_ptr(s->states), job.grads = f32_ptr(s->grads), job.sums = f32_ptr(s->sums);
    for (job.level = 0; job.level < job.n_level; job.level++) {
        LAUNCH(ERRORS, job, grid, threads_of(shape->value_dim));
        LAUNCH(COLUMNS, job, grid, threads_of(shape->value_dim));
    }
    LAUNCH(ROWS, job, grid, threads_of(shape->key_dim));
    LAUNCH(ROWS_BWD, job, grid, threads_of(shape->key_dim));
    LAUNCH(TOKENS, job, grid_x(ceil_div(n_tok * shape->n_key, 4)), 128);
    for (job.level = 0; job.level < job.n_level; job.level++) {
        gates_bwd<<<grid, SCAN, 0, cuda.stream>>>(job);
        CUDA_CHECK_LAUNCH();
    }
}

extern "C" void cuda_delta_fwd(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba,
                               struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                               const struct delta_shape *shape)
{
    const struct scratch_delta s = scratch_delta(dev, qkv, o, o, seqs, shape, false);
    (s.chunks ? delta_fwd_wgmma : fwd_any)(&s, o, qkv, ba, a_log, dt_bias, seqs, shape);
}

extern "C" void cuda_delta_bwd(struct device *dev, struct tensor dqkv, struct tensor dba, struct tensor dout,
                               struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                               const struct seqs *seqs, const struct delta_shape *shape)
{
    const struct scratch_delta s = scratch_delta(dev, qkv, dout, dqkv, seqs, shape, true);
    (s.chunks ? delta_bwd_wgmma : bwd_any)(&s, dqkv, dba, dout, qkv, ba, a_log, dt_bias, seqs, shape);
}

extern "C" void cuda_delta_decode(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba,
                                  struct tensor a_log, struct tensor dt_bias, const struct states *states,
                                  const struct delta_shape *shape)
{
    if (qkv.shape[0] == 0) return;
    struct delta_job job = job_of(qkv, ba, a_log, dt_bias, states->seqs, shape);
    const dim3 grid(grid_x(states->seqs->n_seq), (unsigned)shape->n_value);
    job.o = rows_of(o);
    job.states = states_of<float>(states);
    LAUNCH(DECODE, job, grid, threads_of(shape->value_dim));
}
