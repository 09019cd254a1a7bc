/* index.cu - the indexer of compressed attention: the K entries of every token with the largest scores.
 * Math: score(t, e) = sum_h w[t,h] max(0, <q[t,h], k[e]>) of the entries e < n = (t + 1) / ratio of t's sequence.
 * Tokens with n <= K take them all. Larger scores first, of equal ones the lower entry; written in ascending order,
 * then -1. Shapes: q [T, H*A], k [N, A], w [T, H] bf16 (views), idx [T, K] i32, cu [S+1] i32. T may be 0. Needs: fast:
 * A 128, H a multiple of 8 up to 64, 16-byte aligned rows. Otherwise a thread computes a score by itself. Scores: into
 * scratch of at most 64 MiB, a chunk of tokens at a time. A block has 256 entries and 16 tokens; its warps keep the
 * rows of their 64 entries in registers as operands of mma.sync (m16n8k16) and multiply them by the heads of one token
 * after the other, which arrive in shared memory by cp.async, 2 x 16 KiB. A lane adds up its heads, four lanes their
 * sums. 4 warps; entries that no token of the block sees are skipped. Choice: a block of 256 threads per token. Scores
 * become integers in the same order, in shared memory when n is at most 11264. Bisection finds the largest threshold
 * that K of them reach; then every warp has a range of entries, counts those it takes, and writes them after those of
 * earlier warps. Moves: 2 T H A bytes of q per 256 entries, mostly from L2; 2 H A FLOPs per token and entry: compute
 * bound. Numerics: f32 sums in a fixed order. */
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/rows.cuh"

enum { DIM = 128, MAX_HEADS = 64, TOKENS = 16, TILES = 4, WARPS = 4, ENTRIES = WARPS * TILES * 16 };
enum { BLOCK = 256, KEYS = 11264 };
static const int64_t SCRATCH = (int64_t)64 << 20;

struct index_job {
    const bf16 *q, *k, *w;
    float *score; /* [chunk, ld_score], row 0 of token `first` */
    int32_t *idx;
    const int32_t *cu;
    int64_t ld_q, ld_k, ld_w, ld_score, ld_idx, n_row, first, end;
    int n_seq, n_head, dim, n_top, ratio, most;
};

/* The sequence of token t. */
static __device__ inline int find(const struct index_job &job, int64_t t)
{
    int low = 0, high = job.n_seq - 1; /* the last sequence that begins at t or before */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (job.cu[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* ---- scores ---- */

/* The heads and weights of one token. */
struct __align__(128) stage
{
    unsigned char q[MAX_HEADS * DIM * 2]; /* tile_offset<DIM / 8> */
    bf16 w[MAX_HEADS];
};

static __device__ inline void copy_token(struct stage *s, const struct index_job &job, int64_t t)
{
    const bf16 *q = job.q + t * job.ld_q, *w = job.w + t * job.ld_w;
    for (int i = threadIdx.x; i < job.n_head * (DIM / 8); i += WARPS * 32)
        copy_async16(shared_address(s->q) + tile_offset<DIM / 8>(i / (DIM / 8), i % (DIM / 8)), q + i * 8, 16);
    if (threadIdx.x < job.n_head / 8) copy_async16(shared_address(s->w + threadIdx.x * 8), w + threadIdx.x * 8, 16);
}

/* The rows of this warp's entries; row: of its first one. Rows beyond the last entry are copies of it. */
static __device__ inline void load_entries(uint32_t a[TILES][DIM / 16][4], const struct index_job &job, int64_t row)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t r = min(row + m * 16 + half * 8 + lane / 4, job.n_row - 1);
            const bf16 *p = job.k + r * job.ld_k + lane % 4 * 2;
#pragma unroll
            for (int s = 0; s < DIM / 16; s++) {
                a[m][s][half] = *(const uint32_t *)(p + s * 16);
                a[m][s][half + 2] = *(const uint32_t *)(p + s * 16 + 8);
            }
        }
}

/* sum [tile][half]: of this warp's entries lane / 4 and lane / 4 + 8 of every tile, the part of the heads of this lane:
 * 2 (lane % 4) and the next of every eight. */
static __device__ inline void score_token(float sum[TILES][2], const uint32_t a[TILES][DIM / 16][4],
                                          const struct stage *s, int n_head)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; m++) sum[m][0] = sum[m][1] = 0;
#pragma unroll 2
    for (int head = 0; head < n_head; head += 8) {
        uint32_t b[DIM / 32][4];
        float c[TILES][4] = {};
#pragma unroll
        for (int i = 0; i < DIM / 32; i++)
            load_matrix4(b[i], shared_address(s->q) + tile_offset<DIM / 8>(head + lane % 8, 4 * i + lane / 8));
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
#pragma unroll
            for (int m = 0; m < TILES; m++) mma_bf16(c[m], a[m][k], &b[k / 2][k % 2 * 2]);
        const uint32_t w = *(const uint32_t *)(s->w + head + lane % 4 * 2);
        const float w0 = __uint_as_float(w << 16), w1 = __uint_as_float(w & 0xffff0000u);
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                sum[m][half] = fmaf(w0, fmaxf(c[m][2 * half], 0), sum[m][half]);
                sum[m][half] = fmaf(w1, fmaxf(c[m][2 * half + 1], 0), sum[m][half]);
            }
    }
}

/* The scores of entries first .. first + ENTRIES - 1 of a sequence for its tokens begin .. end - 1. */
static __device__ inline void score_tokens(struct stage stages[2], const struct index_job &job, int64_t start,
                                           int first, int64_t begin, int64_t end)
{
    uint32_t a[TILES][DIM / 16][4];
    const int lane = threadIdx.x % 32, own = first + threadIdx.x / 32 * TILES * 16;
    copy_token(&stages[0], job, begin);
    copy_commit();
    load_entries(a, job, start / job.ratio + own);
    for (int64_t t = begin; t < end; t++) {
        const struct stage *s = &stages[(t - begin) % 2];
        if (t + 1 < end) copy_token(&stages[(t + 1 - begin) % 2], job, t + 1);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        if (own < (t - start + 1) / job.ratio) { /* the whole warp */
            float sum[TILES][2];
            float *out = job.score + (t - job.first) * job.ld_score + own + lane / 4;
            score_token(sum, a, s, job.n_head);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const float low = warp_sum(sum[m][0], 4), high = warp_sum(sum[m][1], 4);
                if (lane % 4 == m) {
                    out[m * 16] = low;
                    out[m * 16 + 8] = high;
                }
            }
        }
        __syncthreads();
    }
}

static_assert(TILES == 4, "each of four lanes writes one tile");

/* Blocks: tokens from the last on, which see the most entries; of the same tokens all entries one after the other. */
static __global__ void __launch_bounds__(WARPS * 32, 2) index_scores(const struct index_job job)
{
    __shared__ struct stage stages[2];
    const int n_part = (job.most + ENTRIES - 1) / ENTRIES, first = (int)(blockIdx.x % n_part) * ENTRIES;
    const int64_t tile = gridDim.x / n_part - 1 - blockIdx.x / n_part;
    const int64_t stop = min(job.first + (tile + 1) * TOKENS, job.end);
    for (int64_t t = job.first + tile * TOKENS, end; t < stop; t = end) {
        const int seq = find(job, t);
        const int64_t start = job.cu[seq];
        end = min(stop, (int64_t)job.cu[seq + 1]);
        /* The first token that sees more than `first` and more than K entries. */
        const int64_t begin = max(t, start + ((int64_t)max(first, job.n_top) + 1) * job.ratio - 1);
        if (begin < end) score_tokens(stages, job, start, first, begin, end);
    }
}

/* Any sizes: a block per token, a thread per entry. */
static __global__ void __launch_bounds__(BLOCK) index_scores_any(const struct index_job job)
{
    const int64_t t = job.first + blockIdx.x, start = job.cu[find(job, t)];
    const int n = (int)((t - start + 1) / job.ratio);
    if (n <= job.n_top) return;
    const bf16 *q = job.q + t * job.ld_q;
    for (int e = threadIdx.x; e < n; e += BLOCK) {
        const bf16 *k = job.k + (start / job.ratio + e) * job.ld_k;
        float score = 0;
        for (int h = 0; h < job.n_head; h++) {
            float dot = 0;
            for (int c = 0; c < job.dim; c++)
                dot = fmaf(__bfloat162float(q[h * job.dim + c]), __bfloat162float(k[c]), dot);
            score = fmaf(__bfloat162float(job.w[t * job.ld_w + h]), fmaxf(dot, 0), score);
        }
        job.score[blockIdx.x * job.ld_score + e] = score;
    }
}

/* ---- choice ---- */

/* A score as an integer in the same order; -0 and 0 are equal. */
static __device__ inline uint32_t key_of(float score)
{
    const uint32_t u = __float_as_uint(score + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The n keys of a token, in shared memory or computed again from its scores. */
struct keys {
    const uint32_t *stored; /* or NULL */
    const float *score;
};
static __device__ inline uint32_t key_at(const struct keys &k, int e)
{
    return k.stored ? k.stored[e] : key_of(k.score[e]);
}

/* What the warps of a block tell each other; index: 0 or 1 in turns, so that one barrier per exchange suffices. */
struct exchange {
    uint32_t of_warp[2][BLOCK / 32][2];
};

/* The least and the greatest key. */
static __device__ inline void range(uint32_t *low, uint32_t *high, const struct keys &k, int n, struct exchange *x)
{
    uint32_t least = 0xffffffffu, most = 0;
    for (int e = threadIdx.x; e < n; e += BLOCK) {
        const uint32_t key = key_at(k, e);
        least = min(least, key);
        most = max(most, key);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) {
        x->of_warp[1][threadIdx.x / 32][0] = least;
        x->of_warp[1][threadIdx.x / 32][1] = most;
    }
    __syncthreads();
    *low = x->of_warp[1][0][0];
    *high = x->of_warp[1][0][1];
    for (int w = 1; w < BLOCK / 32; w++) {
        *low = min(*low, x->of_warp[1][w][0]);
        *high = max(*high, x->of_warp[1][w][1]);
    }
}

/* The largest threshold that at least n_top of the n keys reach, or one that exactly n_top reach. */
static __device__ inline uint32_t threshold(const struct keys &k, int n, int n_top, struct exchange *x)
{
    uint32_t low, high;
    range(&low, &high, k, n, x);
    for (int turn = 0; low < high; turn ^= 1) {
        const uint32_t middle = low + (high - low) / 2 + 1;
        int reach = 0;
        for (int e = threadIdx.x; e < n; e += BLOCK) reach += key_at(k, e) >= middle;
        reach = __reduce_add_sync(0xffffffffu, reach);
        if (threadIdx.x % 32 == 0) x->of_warp[turn][threadIdx.x / 32][0] = reach;
        __syncthreads();
        reach = 0;
        for (int w = 0; w < BLOCK / 32; w++) reach += x->of_warp[turn][w][0];
        if (reach >= n_top)
            low = middle;
        else
            high = middle - 1;
        if (reach == n_top) break;
    }
    return low;
}

/* Writes the entries above the threshold, and the first of those at it, in ascending order. */
static __device__ inline void write_chosen(int32_t *out, const struct keys &k, int n, int n_top, uint32_t limit)
{
    __shared__ int counts[BLOCK / 32][2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = (n / (BLOCK / 32) / 32 + 1) * 32;
    const int begin = min(warp * share, n), end = min(begin + share, n);
    int above = 0, equal = 0, n_above = 0;
    for (int e = begin + lane; e < end; e += 32) {
        const uint32_t key = key_at(k, e);
        above += key > limit;
        equal += key == limit;
    }
    above = __reduce_add_sync(0xffffffffu, above);
    equal = __reduce_add_sync(0xffffffffu, equal);
    if (lane == 0) {
        counts[warp][0] = above;
        counts[warp][1] = equal;
    }
    __syncthreads();
    above = equal = 0; /* of the warps before */
    for (int w = 0; w < BLOCK / 32; w++) {
        n_above += counts[w][0];
        above += w < warp ? counts[w][0] : 0;
        equal += w < warp ? counts[w][1] : 0;
    }
    const int wanted = n_top - n_above; /* of those at the threshold */
    for (int base = begin; base < end; base += 32) {
        const int e = base + lane;
        const uint32_t key = e < end ? key_at(k, e) : 0, before = (1u << lane) - 1;
        const uint32_t over = __ballot_sync(0xffffffffu, e < end && key > limit);
        const uint32_t same = __ballot_sync(0xffffffffu, e < end && key == limit);
        const int rank = equal + __popc(same & before);
        const bool taken = over >> lane & 1 || (same >> lane & 1 && rank < wanted);
        if (taken) out[above + __popc(over & before) + min(rank, wanted)] = e;
        above += __popc(over);
        equal += __popc(same);
    }
}

static __global__ void __launch_bounds__(BLOCK) index_choose(const struct index_job job)
{
    extern __shared__ uint32_t room[]; /* [most], or none */
    __shared__ struct exchange x;
    const int64_t t = job.first + blockIdx.x;
    const int n = (int)((t - job.cu[find(job, t)] + 1) / job.ratio);
    int32_t *out = job.idx + t * job.ld_idx;
    if (n <= job.n_top) {
        for (int i = threadIdx.x; i < job.n_top; i += BLOCK) out[i] = i < n ? i : -1;
        return;
    }
    const float *score = job.score + blockIdx.x * job.ld_score;
    if (job.most <= KEYS) {
        for (int e = threadIdx.x; e < n; e += BLOCK) room[e] = key_of(score[e]);
        __syncthreads();
    }
    const struct keys k = {job.most <= KEYS ? room : NULL, score};
    write_chosen(out, k, n, job.n_top, threshold(k, n, job.n_top, &x));
}

extern "C" void cuda_index_topk(struct device *dev, struct tensor idx, struct tensor q, struct tensor k,
                                struct tensor w, const struct seqs *seqs, int64_t ratio)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = q.shape[0], most = seqs->max_len / ratio;
    const int64_t ld = ceil_div(most, ENTRIES) * ENTRIES, row_bytes = ld * (int64_t)sizeof(float);
    const bool scored = most > idx.shape[1];
    /* The size grows with T and with most, so that a dry run of the largest batch bounds all. */
    const int64_t bytes = scored ? MT_MIN(n_tok * row_bytes, MT_MAX(SCRATCH, TOKENS * row_bytes)) : 0;
    struct index_job job = {};
    job.score = (float *)arena_push(&dev->work, bytes);
    const int64_t chunk = scored ? MT_MAX(1, bytes / row_bytes) : MT_MAX(1, n_tok);
    job.q = bf16_ptr(q);
    job.k = bf16_ptr(k);
    job.w = bf16_ptr(w);
    job.idx = i32_ptr(idx);
    job.cu = i32_ptr(seqs->cu);
    job.ld_q = q.ld;
    job.ld_k = k.ld;
    job.ld_w = w.ld;
    job.ld_score = ld;
    job.ld_idx = idx.ld;
    job.n_row = k.shape[0];
    job.n_seq = (int)seqs->n_seq;
    job.n_head = (int)w.shape[1];
    job.dim = (int)k.shape[1];
    job.n_top = (int)idx.shape[1];
    job.ratio = (int)ratio;
    job.most = (int)most;
    const bool fast = job.dim == DIM && job.n_head % 8 == 0 && job.n_head <= MAX_HEADS && rows_aligned(q) &&
                      rows_aligned(k) && rows_aligned(w);
    const size_t room = scored && most <= KEYS ? (size_t)most * sizeof(uint32_t) : 0;
    for (job.first = 0; job.first < n_tok && !dev->dry_run; job.first = job.end) {
        job.end = MT_MIN(job.first + chunk, n_tok);
        const int64_t n = job.end - job.first;
        if (scored && fast)
            index_scores<<<grid_x(ceil_div(n, TOKENS) * (ld / ENTRIES)), WARPS * 32, 0, cuda.stream>>>(job);
        else if (scored)
            index_scores_any<<<grid_x(n), BLOCK, 0, cuda.stream>>>(job);
        index_choose<<<grid_x(n), BLOCK, room, cuda.stream>>>(job);
        CUDA_CHECK_LAUNCH();
    }
    arena_release(&dev->work, mark);
}
