/* attn_decode.cu - decoding: stores rows of tokens (keys and values) in pages; attention to them.
 * Math: o = sum_j p_j v_j, p = softmax(scale q k_j, sink) over the keys j of the window; in compressed attention also
 *   over entries, which each sum up several tokens: all visible ones, or those that idx lists.
 * Shapes: q [T, H*A], o [T, H*B], rows [pages * 64, K*(A+B)] bf16: k | v; table [S, P], pos [T], cu [S+1] i32; sinks
 *   [H] f32. Stored rows x [T, C] bf16. S and T may be 0. Where values are columns of keys: rows [.., K*A], k, whose
 *   first B columns are v. Entries [.., A], idx [T, I] i32.
 * Needs: A, B at most 576. A position below 0 or a page that does not exist traps.
 * Grid: one block per query and head. Its warp w has the keys first + w, first + w + WARPS, ...; lane i has columns i,
 *   i + 32, ... of key and value. Stored rows: one block per token.
 * Bound: bytes of the keys and values, read by each of the H/K heads that share them: from L2 after the first.
 * Numerics: f32, online softmax per warp in the order of keys, warps merged in their order, the sink last; one rounding
 *   at the end. The bits depend neither on other sequences nor on the pages' order. */
#include "kernels/cuda/parts/decode.h"
#include "kernels/cuda/parts/pages.cuh"

enum { WARPS = 8, NARROW = 256, WIDE = 576 };

/* ---- rows of tokens ---- */

static __global__ void store(const struct page_table pages, const bf16 *x, int64_t ld, int n_col, const int32_t *pos,
                             const int32_t *cu, int n_seq)
{
    const int64_t t = blockIdx.x;
    const int s = sequence_at(cu, n_seq, t), p = pos[t];
    if (pos[cu[s + 1] - 1] - p >= pages.n_of_seq * MT_PAGE) return; /* a later token of this pass takes the same row */
    bf16 *row = page_row(pages, s, p);
    for (int c = (int)threadIdx.x; c < n_col; c += (int)blockDim.x) row[c] = x[t * ld + c];
}

extern "C" void cuda_page_store(struct device *dev, const struct pages *pages, struct tensor x, struct tensor pos,
                                const struct seqs *seqs)
{
    if (x.shape[0] == 0) return;
    store<<<grid_x(x.shape[0]), 128, 0, cuda.stream>>>(table_of(pages), bf16_ptr(x), x.ld, (int)x.shape[1],
                                                       i32_ptr(pos), i32_ptr(seqs->cu), (int)seqs->n_seq);
    CUDA_CHECK_LAUNCH();
}

/* ---- attention ---- */

struct decode_job {
    bf16 *o;
    const bf16 *q;
    struct page_table pages, entries;
    struct pass_tokens at;
    const float *sinks;
    const int32_t *idx; /* of entries; NULL: all visible ones */
    int64_t ld_o, ld_q, ld_idx;
    int n_head, n_kv, dim, value_dim, window;
    int ratio, n_top; /* ratio 0: no entries */
    bool shared;      /* values are columns of keys */
    float scale;
};

/* A softmax in progress: m = the largest score, the sum of e^(score - m), and the sum of e^(score - m) times the lane's
 * columns of the values. */
template <int WIDTH> struct state {
    float m, l, acc[WIDTH / 32];
};

template <int WIDTH>
static __device__ inline void see_key(struct state<WIDTH> *w, const struct decode_job &job, const float *q,
                                      const bf16 *key, const bf16 *value)
{
    const int lane = (int)(threadIdx.x % 32);
    float score = 0;
    for (int c = lane; c < job.dim; c += 32) score += q[c] * __bfloat162float(key[c]);
    score = warp_sum(score);
    const float m = fmaxf(w->m, score), factor = expf(w->m - m), p = expf(score - m);
#pragma unroll
    for (int i = 0; i < WIDTH / 32; i++) {
        const int c = lane + 32 * i;
        if (c < job.value_dim) w->acc[i] = w->acc[i] * factor + p * __bfloat162float(value[c]);
    }
    w->l = w->l * factor + p;
    w->m = m;
}

/* Adds keys first + warp, first + warp + WARPS, ... of the window of a query at pos, then every WARPS-th entry. */
template <int WIDTH>
static __device__ inline void see_all(struct state<WIDTH> *w, const struct decode_job &job, int64_t t, int pos, int kv,
                                      const float *q)
{
    const int warp = (int)threadIdx.x / 32, s = sequence_at(job.at.cu, job.at.n_seq, t);
    const int first = job.window ? max(0, pos - job.window + 1) : 0;
    const int n_visible = job.ratio ? (pos + 1) / job.ratio : 0,
              n_far = job.idx ? min(n_visible, job.n_top) : n_visible;
    for (int j = first + warp; j <= pos; j += WARPS) {
        const bf16 *row = page_row(job.pages, s, j), *key = row + kv * job.dim;
        see_key<WIDTH>(w, job, q, key, job.shared ? key : row + job.n_kv * job.dim + kv * job.value_dim);
    }
    for (int k = warp; k < n_far; k += WARPS) {
        const int e = job.idx ? job.idx[t * job.ld_idx + k] : k;
        if (e < 0) break;
        const bf16 *row = page_row(job.entries, s, e);
        see_key<WIDTH>(w, job, q, row, row);
    }
}

template <int WIDTH> static __global__ void __launch_bounds__(32 * WARPS) decode(const struct decode_job job)
{
    __shared__ float q[WIDTH], m[WARPS], l[WARPS], acc[WARPS][WIDTH];
    const int64_t t = blockIdx.x / job.n_head;
    const int head = (int)(blockIdx.x % job.n_head), warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    struct state<WIDTH> w = {
    };
    w.m = -INFINITY;
    for (int c = (int)threadIdx.x; c < job.dim; c += 32 * WARPS)
        q[c] = job.scale * __bfloat162float(job.q[t * job.ld_q + head * job.dim + c]);
    __syncthreads();
    see_all<WIDTH>(&w, job, t, job.at.pos[t], head / (job.n_head / job.n_kv), q);
#pragma unroll
    for (int i = 0; i < WIDTH / 32; i++) acc[warp][lane + 32 * i] = w.acc[i];
    if (lane == 0) m[warp] = w.m, l[warp] = w.l;
    __syncthreads();
    float top = job.sinks ? job.sinks[head] : -INFINITY, sum = 0;
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, m[i]);
    for (int i = 0; i < WARPS; i++) sum += l[i] * expf(m[i] - top);
    if (job.sinks) sum += expf(job.sinks[head] - top);
    for (int c = (int)threadIdx.x; c < job.value_dim; c += 32 * WARPS) {
        float y = 0;
        for (int i = 0; i < WARPS; i++) y += acc[i][c] * expf(m[i] - top);
        job.o[t * job.ld_o + head * job.value_dim + c] = __float2bfloat16_rn(y / sum);
    }
}

static struct decode_job job_of(struct tensor o, struct tensor q, const struct past *past, struct tensor sinks)
{
    struct decode_job job = {};
    job.o = bf16_ptr(o), job.q = bf16_ptr(q);
    job.ld_o = o.ld, job.ld_q = q.ld;
    job.pages = table_of(past->pages);
    job.at = tokens_of(past);
    job.sinks = f32_ptr(sinks);
    return job;
}

static void launch(const struct decode_job &job, int64_t n_tok)
{
    const bool narrow = job.dim <= NARROW && job.value_dim <= NARROW;
    MT_REQUIRE(job.dim <= WIDE && job.value_dim <= WIDE, "heads of %d, values of %d; at most %d", job.dim,
               job.value_dim, WIDE);
    (narrow ? decode<NARROW> : decode<WIDE>)<<<grid_x(n_tok * job.n_head), 32 * WARPS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_attn_decode(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                                 struct tensor sinks, struct tensor pos, const struct seqs *seqs,
                                 const struct attn_shape *shape)
{
    const struct past past = {pages, pos, seqs};
    if (q.shape[0] == 0) return;
    if (cuda_attn_decode_mma(dev, o, q, pages, sinks, pos, seqs, shape)) return;
    struct decode_job job = job_of(o, q, &past, sinks);
    job.n_head = (int)shape->n_head, job.n_kv = (int)shape->n_kv;
    job.dim = (int)shape->head_dim, job.value_dim = (int)attn_value_dim(shape);
    job.window = (int)shape->window;
    job.shared = pages->rows.shape[1] == shape->n_kv * shape->head_dim;
    job.scale = shape->scale;
    launch(job, q.shape[0]);
}

extern "C" void cuda_shared_attn_decode(struct device *dev, struct tensor o, struct tensor q, const struct past *past,
                                        const struct pages *entries, struct tensor idx, struct tensor sinks,
                                        const struct shared_attn_shape *shape)
{
    if (q.shape[0] == 0) return;
    struct decode_job job = job_of(o, q, past, sinks);
    job.n_head = (int)shape->n_head, job.n_kv = 1;
    job.dim = job.value_dim = (int)shape->head_dim;
    job.window = (int)shape->window;
    job.shared = true;
    job.scale = shape->scale;
    if (entries) {
        job.entries = table_of(entries);
        job.ratio = (int)shape->ratio;
        job.idx = i32_ptr(idx);
        job.ld_idx = idx.ld;
        job.n_top = idx.ndim ? (int)idx.shape[1] : 0;
    }
    launch(job, q.shape[0]);
}
