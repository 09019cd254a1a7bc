/* attn_decode_mma.cu - attn_decode with tensor cores, for heads of 64, 128 and 256: the query heads of a kv head share
 * the keys and values that a warp reads.
 * Math: as attn_decode.cu. Heads are the 16 rows of a mma, keys the 8 columns of q k^T, and the depth of p v. The order
 *   of columns inside a product is chosen so that a lane reads 16 neighbouring bytes of a row, of keys and of values.
 * Shapes: attn_decode.cu, A = B. Partial sums [T, K * tiles of heads, splits, 16, A + 2] f32.
 * Needs: any GPU since sm_80.
 * Grid: (T, kv heads * tiles of 16 heads, splits of SPLIT keys) blocks of 4 warps; blocks beyond the last key return at
 *   once. A warp has every fourth (A = 256: second) tile of 16 keys; with A = 256 two warps share a tile's keys, and
 *   each has half of the values. A second kernel merges the splits, one block per query and head.
 * Bound: bytes of keys and values, each read once.
 * Numerics: f32, p rounded to bf16 for p v, online softmax per warp, warps and splits merged in their order, the sink
 *   last. Splits begin at the first key of the window, so the bits of a query depend on its position alone. */
#include "kernels/cuda/parts/decode.h"
#include "kernels/cuda/parts/grouped_epilogue.cuh"
#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/pages.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS, HEADS = 16, KEYS = 16, SPLIT = DECODE_SPLIT };

struct split_job {
    bf16 *o;
    const bf16 *q;
    struct page_table pages;
    const float *sinks;
    const int32_t *pos, *cu;
    float *part; /* NULL: one split, which writes o */
    int64_t ld_o, ld_q;
    int n_seq, n_head, group, n_tile, n_split, window; /* group: heads of a kv head; n_tile: tiles of them */
    float scale;                                       /* times log2(e) */
};

/* ---- one warp: keys of a split ---- */

/* Columns of q, k and v. VALUES: those of v that a warp has. */
template <int DIM> struct widths {
    enum { BLOCKS = DIM / 32, HALVES = DIM > 128 ? 2 : 1, VALUES = DIM / HALVES, SIXTY4 = VALUES / 64 };
};

template <int DIM> struct softmax {
    float m[2], l[2]; /* of heads i and i + 8 of the tile, i = lane / 4 */
    float o[widths<DIM>::SIXTY4][8][4];
};

/* q of heads i and i + 8: columns 32 b + 8 (lane % 4) .. + 7 of each block b. */
template <int DIM>
static __device__ __forceinline__ void load_queries(uint4 q[widths<DIM>::BLOCKS][2], const struct split_job &job,
                                                    int64_t t, int kv, int tile)
{
#pragma unroll
    for (int high = 0; high < 2; high++) {
        const int own = tile * HEADS + 8 * high + threadIdx.x % 32 / 4;
        const bf16 *row = job.q + t * job.ld_q + (kv * job.group + own) * DIM + 8 * (threadIdx.x % 4);
#pragma unroll
        for (int b = 0; b < widths<DIM>::BLOCKS; b++)
            q[b][high] = own < job.group ? *(const uint4 *)(row + 32 * b) : make_uint4(0, 0, 0, 0);
    }
}

/* Scores of 8 keys: c[0], c[1] of head i with keys 2 q, 2 q + 1; c[2], c[3] of head i + 8. k: the row of key i. */
template <int DIM>
static __device__ __forceinline__ void score(float c[4], const uint4 q[widths<DIM>::BLOCKS][2], const bf16 *k)
{
#pragma unroll
    for (int b = 0; b < widths<DIM>::BLOCKS; b++) {
        const uint4 x = k ? __ldg((const uint4 *)(k + 32 * b + 8 * (threadIdx.x % 4))) : make_uint4(0, 0, 0, 0);
        const uint32_t a0[4] = {q[b][0].x, q[b][1].x, q[b][0].y, q[b][1].y};
        const uint32_t a1[4] = {q[b][0].z, q[b][1].z, q[b][0].w, q[b][1].w};
        const uint32_t b0[2] = {x.x, x.y}, b1[2] = {x.z, x.w};
        mma_bf16(c, a0, b0);
        mma_bf16(c, a1, b1);
    }
}

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

/* Turns scores into weights 2^(score - m); updates m and l, and rescales o. p: the operand of p v. */
template <int DIM> static __device__ __forceinline__ void weigh(struct softmax<DIM> *s, uint32_t p[4], float c[2][4])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float most = quad_max(fmaxf(fmaxf(c[0][2 * h], c[0][2 * h + 1]), fmaxf(c[1][2 * h], c[1][2 * h + 1])));
        const float m = fmaxf(s->m[h], most), base = m == -INFINITY ? 0 : m, factor = exp2f(s->m[h] - base);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float low = exp2f(c[n][2 * h] - base), high = exp2f(c[n][2 * h + 1] - base);
            sum += low + high;
            p[2 * n + h] = bf16_pack(low, high);
        }
        s->l[h] = s->l[h] * factor + quad_sum(sum);
        s->m[h] = m;
#pragma unroll
        for (int d = 0; d < widths<DIM>::SIXTY4; d++)
#pragma unroll
            for (int j = 0; j < 8; j++) s->o[d][j][2 * h] *= factor, s->o[d][j][2 * h + 1] *= factor;
    }
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* o += p v. Lane 4 i + q reads columns 8 i .. 8 i + 7 of every 64, of keys 2 q, 2 q + 1, 2 q + 8, 2 q + 9: v[0..3],
 * NULL where the query does not see the key. Column 8 i + j is column i of product j. */
template <int DIM>
static __device__ __forceinline__ void add_values(struct softmax<DIM> *s, const uint32_t p[4], const bf16 *const v[4])
{
#pragma unroll
    for (int d = 0; d < widths<DIM>::SIXTY4; d++) {
        uint4 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            x[k] = v[k] ? __ldg((const uint4 *)(v[k] + 64 * d + 8 * (threadIdx.x % 32 / 4))) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t pick = j % 2 ? 0x7632 : 0x5410;
            const uint32_t b[2] = {__byte_perm(word_of(x[0], j / 2), word_of(x[1], j / 2), pick),
                                   __byte_perm(word_of(x[2], j / 2), word_of(x[3], j / 2), pick)};
            mma_bf16(s->o[d][j], p, b);
        }
    }
}

/* Keys first .. last of the split, in tiles of 16 from `begin` on, a multiple of 16: tile `own` and every step-th. */
template <int DIM>
static __device__ __forceinline__ void see_keys(struct softmax<DIM> *s, const struct split_job &job, int seq, int kv,
                                                const uint4 q[widths<DIM>::BLOCKS][2], int begin, int first, int last,
                                                int own, int step, int half)
{
    const int i = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    for (int at = begin + own * KEYS; at <= last; at += step * KEYS) {
        const bf16 *rows = page_row(job.pages, seq, at);
        const bf16 *key = rows + kv * DIM,
                   *value = rows + (job.n_head / job.group + kv) * DIM + half * widths<DIM>::VALUES;
        float c[2][4] = {};
        uint32_t p[4];
        const bf16 *v[4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int k = at + 8 * n + i;
            score<DIM>(c[n], q, k >= first && k <= last ? key + (8 * n + i) * job.pages.ld : NULL);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int own_key = 8 * n + 2 * quad + h;
                const bool seen = at + own_key >= first && at + own_key <= last;
                v[2 * n + h] = seen ? value + own_key * job.pages.ld : NULL;
                c[n][h] = seen ? c[n][h] * job.scale : -INFINITY;
                c[n][2 + h] = seen ? c[n][2 + h] * job.scale : -INFINITY;
            }
        }
        weigh<DIM>(s, p, c);
        add_values<DIM>(s, p, v);
    }
}

/* ---- a block: the warps of a split ---- */

template <int DIM> struct merged {
    float m[WARPS][HEADS], l[WARPS][HEADS], o[WARPS][HEADS][widths<DIM>::VALUES];
};

/* Writes a warp's softmax to shared memory. o[.][j][x] of lane q of a quad is column 16 q + 8 (x % 2) + j of every
 * 64. */
template <int DIM>
static __device__ __forceinline__ void share(struct merged<DIM> *to, const struct softmax<DIM> *s, int warp)
{
    const int i = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const int head = i + 8 * (x / 2);
        if (quad == 0 && x % 2 == 0) to->m[warp][head] = s->m[x / 2], to->l[warp][head] = s->l[x / 2];
#pragma unroll
        for (int d = 0; d < widths<DIM>::SIXTY4; d++)
#pragma unroll
            for (int j = 0; j < 8; j++) to->o[warp][head][64 * d + 16 * quad + 8 * (x % 2) + j] = s->o[d][j][x];
    }
}

static __device__ __forceinline__ float *part_at(const struct split_job &job, int64_t t, int kv_tile, int split,
                                                 int head, int dim)
{
    return job.part + (((t * gridDim.y + kv_tile) * job.n_split + split) * HEADS + head) * (dim + 2);
}

template <int DIM> static __global__ void __launch_bounds__(THREADS) split_kernel(const struct split_job job)
{
    enum { HALVES = widths<DIM>::HALVES, VALUES = widths<DIM>::VALUES, SHARERS = WARPS / HALVES };
    extern __shared__ float memory[];
    struct merged<DIM> *all = (struct merged<DIM> *)memory;
    const int64_t t = blockIdx.x;
    const int kv = blockIdx.y / job.n_tile, tile = blockIdx.y % job.n_tile, warp = threadIdx.x / 32;
    const int seq = sequence_at(job.cu, job.n_seq, t), pos = job.pos[t];
    const int first = job.window ? max(0, pos - job.window + 1) : 0;
    const int begin = first / KEYS * KEYS + (int)blockIdx.z * SPLIT, last = min(pos, begin + SPLIT - 1);
    if (begin > pos) return;
    uint4 q[widths<DIM>::BLOCKS][2];
    struct softmax<DIM> s = {
        {-INFINITY, -INFINITY}, {0, 0}, {}
    };
    load_queries<DIM>(q, job, t, kv, tile);
    see_keys<DIM>(&s, job, seq, kv, q, begin, first, last, warp / HALVES, SHARERS, warp % HALVES);
    share<DIM>(all, &s, warp);
    __syncthreads();
    for (int x = threadIdx.x; x < HEADS * DIM; x += THREADS) {
        const int head = x / DIM, col = x % DIM, half = col / VALUES, own = tile * HEADS + head;
        if (own >= job.group) continue;
        const int n = kv * job.group + own;
        const float sink = !job.part && job.sinks ? job.sinks[n] * 1.44269504f : -INFINITY;
        float m = sink, l = 0, o = 0;
        for (int w = half; w < WARPS; w += HALVES) m = fmaxf(m, all->m[w][head]);
        for (int w = half; w < WARPS; w += HALVES) {
            const float factor = exp2f(all->m[w][head] - m);
            l += all->l[w][head] * factor;
            o += all->o[w][head][col % VALUES] * factor;
        }
        if (!job.part) {
            job.o[t * job.ld_o + n * DIM + col] = __float2bfloat16_rn(o / (l + exp2f(sink - m)));
            continue;
        }
        float *to = part_at(job, t, blockIdx.y, blockIdx.z, head, DIM);
        to[2 + col] = o;
        if (col == 0) to[0] = m, to[1] = l;
    }
}

/* ---- the splits of a query and head ---- */

template <int DIM> static __global__ void __launch_bounds__(DIM) merge_kernel(const struct split_job job)
{
    const int64_t t = blockIdx.x;
    const int kv = blockIdx.y / job.n_tile, tile = blockIdx.y % job.n_tile, own = tile * HEADS + blockIdx.z;
    const int pos = job.pos[t], first = job.window ? max(0, pos - job.window + 1) : 0;
    const int n = (pos - first / KEYS * KEYS) / SPLIT + 1, col = threadIdx.x, head = kv * job.group + own;
    if (own >= job.group) return;
    const float sink = job.sinks ? job.sinks[head] * 1.44269504f : -INFINITY;
    float m = sink, l = 0, o = 0;
    for (int i = 0; i < n; i++) m = fmaxf(m, part_at(job, t, blockIdx.y, i, blockIdx.z, DIM)[0]);
    for (int i = 0; i < n; i++) {
        const float *part = part_at(job, t, blockIdx.y, i, blockIdx.z, DIM), factor = exp2f(part[0] - m);
        l += part[1] * factor;
        o += part[2 + col] * factor;
    }
    job.o[t * job.ld_o + head * DIM + col] = __float2bfloat16_rn(o / (l + exp2f(sink - m)));
}

/* ---- host ---- */

template <int DIM> static void launch(const struct split_job &job, int64_t n_tok, int64_t n_kv)
{
    constexpr int bytes = sizeof(struct merged<DIM>);
    const dim3 grid(grid_x(n_tok), (unsigned)(n_kv * job.n_tile), (unsigned)job.n_split);
    allow_shared<split_kernel<DIM>>(bytes);
    split_kernel<DIM><<<grid, THREADS, bytes, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    if (!job.part) return;
    merge_kernel<DIM><<<dim3(grid.x, grid.y, HEADS), DIM, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

bool cuda_attn_decode_mma(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                          struct tensor sinks, struct tensor pos, const struct seqs *seqs,
                          const struct attn_shape *shape)
{
    const struct scratch_attn_decode s = scratch_attn_decode(dev, q, pages, shape);
    const int group = (int)(shape->n_head / shape->n_kv);
    if (!s.tiles) return false;
    const struct split_job job = {bf16_ptr(o),
                                  bf16_ptr(q),
                                  table_of(pages),
                                  f32_ptr(sinks),
                                  i32_ptr(pos),
                                  i32_ptr(seqs->cu),
                                  f32_ptr(s.part),
                                  o.ld,
                                  q.ld,
                                  (int)seqs->n_seq,
                                  (int)shape->n_head,
                                  group,
                                  (group + HEADS - 1) / HEADS,
                                  (int)s.n_split,
                                  (int)shape->window,
                                  shape->scale * 1.44269504f};
    switch (shape->head_dim) {
    case 64: launch<64>(job, q.shape[0], shape->n_kv); break;
    case 128: launch<128>(job, q.shape[0], shape->n_kv); break;
    default: launch<256>(job, q.shape[0], shape->n_kv);
    }
    return true;
}
