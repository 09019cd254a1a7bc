/* attn_decode.cu - decoding: rows of tokens in pages, and attention to them.
 * Math: o = sum_j p_j v_j, p = softmax(scale q k_j, sink) over the keys j of the window.
 * Shapes: q [T, H*A], o [T, H*B], rows [pages * 64, K*(A+B)] bf16: k | v; table [S, P], pos [T], cu [S+1] i32; sinks
 *   [H] f32. Stored rows x [T, C] bf16. S and T may be 0.
 * Needs: A, B at most 256. A position below 0 or a page that does not exist traps.
 * Grid: one block per query and head. Its warp w has the keys first + w, first + w + WARPS, ...; lane i has columns i,
 *   i + 32, ... of key and value. Stored rows: one block per token.
 * Bound: bytes of the keys and values, read by each of the H/K heads that share them: from L2 after the first.
 * Numerics: f32, online softmax per warp in the order of keys, warps merged in their order, the sink last; one rounding
 *   at the end. The bits depend neither on other sequences nor on the pages' order. */
#include <stdio.h>

#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"

enum { WARPS = 8, WIDE = 256, LANE_COLS = WIDE / 32 };

struct page_table {
    bf16 *rows;
    const int32_t *table;
    int64_t ld, ld_table, n_page;
    int n_of_seq; /* P */
};

static struct page_table table_of(const struct pages *p)
{
    return {bf16_ptr(p->rows), i32_ptr(p->table),          p->rows.ld,
            p->table.ld,       p->rows.shape[0] / MT_PAGE, (int)p->table.shape[1]};
}

/* The row of the token at position p of sequence s. */
static __device__ inline bf16 *page_row(const struct page_table &t, int64_t s, int p)
{
    const int page = p < 0 ? -1 : t.table[s * t.ld_table + p / MT_PAGE % t.n_of_seq];
    if (page < 0 || page >= t.n_page) {
        printf("position %d, page %d of %lld\n", p, page, (long long)t.n_page);
        __trap();
    }
    return t.rows + ((int64_t)page * MT_PAGE + p % MT_PAGE) * t.ld;
}

/* ---- rows of tokens ---- */

static __global__ void store(const struct page_table pages, const bf16 *x, int64_t ld, int n_col, const int32_t *pos,
                             const int32_t *cu, int n_seq)
{
    const int64_t t = blockIdx.x;
    const int s = sequence_at(cu, n_seq, t), p = pos[t];
    if (pos[cu[s + 1] - 1] - p >= pages.n_of_seq * MT_PAGE) return; /* a later token has its row */
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
    struct page_table pages;
    const float *sinks;
    const int32_t *pos, *cu;
    int64_t ld_o, ld_q;
    int n_seq, n_head, n_kv, dim, value_dim, window;
    float scale;
};

/* A softmax in progress: largest score, sum of e^(score - m), of that times the lane's columns of values. */
struct state {
    float m, l, acc[LANE_COLS];
};

/* Keys first, first + WARPS, ... up to the last. */
static __device__ inline void see_keys(struct state *w, const struct decode_job &job, int64_t s, int kv, const float *q,
                                       int first, int last)
{
    const int lane = (int)(threadIdx.x % 32);
    for (int j = first; j <= last; j += WARPS) {
        const bf16 *row = page_row(job.pages, s, j), *key = row + kv * job.dim;
        const bf16 *value = row + job.n_kv * job.dim + kv * job.value_dim;
        float score = 0;
        for (int c = lane; c < job.dim; c += 32) score += q[c] * __bfloat162float(key[c]);
        score = warp_sum(score);
        const float m = fmaxf(w->m, score), factor = expf(w->m - m), p = expf(score - m);
#pragma unroll
        for (int i = 0; i < LANE_COLS; i++) {
            const int c = lane + 32 * i;
            if (c < job.value_dim) w->acc[i] = w->acc[i] * factor + p * __bfloat162float(value[c]);
        }
        w->l = w->l * factor + p;
        w->m = m;
    }
}

static __global__ void __launch_bounds__(32 * WARPS) decode(const struct decode_job job)
{
    __shared__ float q[WIDE], m[WARPS], l[WARPS], acc[WARPS][WIDE];
    const int64_t t = blockIdx.x / job.n_head;
    const int head = (int)(blockIdx.x % job.n_head), warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int s = sequence_at(job.cu, job.n_seq, t), pos = job.pos[t],
              first = job.window ? max(0, pos - job.window + 1) : 0;
    struct state w = {-INFINITY, 0, {}};
    for (int c = (int)threadIdx.x; c < job.dim; c += 32 * WARPS)
        q[c] = job.scale * __bfloat162float(job.q[t * job.ld_q + head * job.dim + c]);
    __syncthreads();
    see_keys(&w, job, s, head / (job.n_head / job.n_kv), q, first + warp, pos);
#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) acc[warp][lane + 32 * i] = w.acc[i];
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

extern "C" void cuda_attn_decode(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                                 struct tensor sinks, struct tensor pos, const struct seqs *seqs,
                                 const struct attn_shape *shape)
{
    const int64_t value_dim = attn_value_dim(shape);
    if (q.shape[0] == 0) return;
    MT_REQUIRE(shape->head_dim <= WIDE && value_dim <= WIDE, "heads of %lld, values of %lld; at most %d",
               (long long)shape->head_dim, (long long)value_dim, WIDE);
    const struct decode_job job = {bf16_ptr(o),
                                   bf16_ptr(q),
                                   table_of(pages),
                                   f32_ptr(sinks),
                                   i32_ptr(pos),
                                   i32_ptr(seqs->cu),
                                   o.ld,
                                   q.ld,
                                   (int)seqs->n_seq,
                                   (int)shape->n_head,
                                   (int)shape->n_kv,
                                   (int)shape->head_dim,
                                   (int)value_dim,
                                   (int)shape->window,
                                   shape->scale};
    decode<<<grid_x(q.shape[0] * shape->n_head), 32 * WARPS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}
