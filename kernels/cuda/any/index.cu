/* index.cu - the indexer of compressed attention: for every token the K entries with the largest scores. An entry sums
 * up `ratio` tokens (compress.cu).
 * Math: score(t, e) = sum_h w[t,h] max(0, <q[t,h], k[e]>) of the entries e < n = (t + 1) / ratio of t's sequence.
 *   Tokens with n <= K take them all. Larger scores are taken first, of equal scores the lower entry; written in
 *   ascending order, then -1.
 * Shapes: q [T, H*A], k [N, A], w [T, H] bf16 (views), idx [T, K] i32, cu [S+1] i32. T may be 0.
 * Needs: fast: A 128, H a multiple of 8 up to 64, 16-byte aligned rows; on Hopper and with 64 heads index_wgmma.cu
 *   computes the scores. Otherwise a thread computes a score by itself.
 * Scores: into scratch of at most 64 MiB, a chunk of tokens at a time. A block has 256 entries and 16 tokens; each of
 *   its 4 warps keeps the rows of 64 entries in registers as operands of mma.sync (m16n8k16) and multiplies them by the
 *   heads of one token after the other, which arrive in shared memory by cp.async, 2 x 16 KiB. A lane adds up its
 *   heads, four lanes their sums. Entries that no token of the block sees are skipped.
 * Choice: a block per token, of 64 threads up to 4096 entries, of 256 beyond. Scores become integers with the same
 *   order, in shared memory when n is at most 11008. A histogram with a bin per thread finds the bin of the K-th
 *   largest; at most 512 scores in it are ranked pair by pair, of more bisection finds the threshold. Then a warp
 *   counts the chosen in its range of entries, and writes them after those of earlier warps.
 * Bound: 2 T H A bytes of q per 256 entries, mostly from L2; 2 H A FLOPs per token and entry: compute bound.
 * Numerics: f32 sums in a fixed order; only integer atomics, whose order does not change the result. */
#include "kernels/cuda/parts/index.cuh"
#include "kernels/cuda/parts/pages.cuh"

enum { TILES = 4, WARPS = INDEX_ENTRIES / TILES / 16, CHUNKS = INDEX_DIM / 8 };
enum { ANY = 256, KEYS = 11008, FEW = 4096, LIST = 512 };

/* ---- scores ---- */

struct __align__(128) stage
{
    unsigned char q[INDEX_HEADS * INDEX_DIM * 2]; /* tile_offset<CHUNKS> */
    bf16 w[INDEX_HEADS];
};

/* copy_token starts the copy of a token's heads and weights into stage s; the threads copy eight heads at a time. */
struct token {
    const bf16 *q, *w; /* at this thread's first piece */
};
static __device__ inline void copy_token(const struct stage *s, const struct token &from, int n_head)
{
    static_assert(WARPS * 32 == 8 * CHUNKS, "a thread per piece of eight heads");
    const uint32_t to = shared_address(s->q) + tile_offset<CHUNKS>(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
#pragma unroll
    for (int head = 0; head < INDEX_HEADS; head += 8)
        if (head < n_head) copy_async16(to + head * CHUNKS * 16, from.q + head * INDEX_DIM, 16);
    if (threadIdx.x < n_head / 8) copy_async16(shared_address(s->w + threadIdx.x * 8), from.w, 16);
}

/* sum [tile]: this lane's part of the scores of the warp's entries: heads 2 (lane % 4) and + 1 of every eight. */
static __device__ inline void score_token(float sum[TILES][2], const uint32_t a[TILES][INDEX_STEPS][4],
                                          const struct stage *s, int n_head)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < TILES; m++) sum[m][0] = sum[m][1] = 0;
#pragma unroll 2
    for (int head = 0; head < n_head; head += 8) {
        uint32_t b[INDEX_STEPS / 2][4];
        float c[TILES][4] = {};
#pragma unroll
        for (int i = 0; i < INDEX_STEPS / 2; i++)
            load_matrix4(b[i], shared_address(s->q) + tile_offset<CHUNKS>(head + lane % 8, 4 * i + lane / 8));
#pragma unroll
        for (int k = 0; k < INDEX_STEPS; k++)
#pragma unroll
            for (int m = 0; m < TILES; m++) mma_bf16(c[m], a[m][k], &b[k / 2][k % 2 * 2]);
        const uint32_t w = *(const uint32_t *)(s->w + head + lane % 4 * 2);
#pragma unroll
        for (int m = 0; m < TILES; m++) index_add(sum[m], c[m], w);
    }
}

/* The scores of a block's entries, from `first` on, for tokens begin .. end - 1 of the sequence that begins at start.
 */
static __device__ inline void score_tokens(struct stage stages[2], const struct index_job &job, int64_t start,
                                           int first, int64_t begin, int64_t end)
{
    uint32_t a[TILES][INDEX_STEPS][4];
    const int own = first + threadIdx.x / 32 * TILES * 16, n_tok = (int)(end - begin);
    /* The first token, counted from `begin`, that sees an entry of this warp. */
    const int64_t seen = start + ((int64_t)own + 1) * job.ratio - 1 - begin;
    float *out = index_out(job, begin, own);
    struct token next = {job.q + begin * job.ld_q + threadIdx.x * 8, job.w + begin * job.ld_w + threadIdx.x * 8};
    copy_token(&stages[0], next, job.n_head);
    copy_commit();
#pragma unroll
    for (int m = 0; m < TILES; m++) index_rows(a[m], job, start / job.ratio + own + m * 16);
    for (int t = 0; t < n_tok; t++, out += job.ld_score) {
        next.q += job.ld_q;
        next.w += job.ld_w;
        if (t + 1 < n_tok) copy_token(&stages[(t + 1) % 2], next, job.n_head);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        if (t >= seen) { /* the whole warp */
            float sum[TILES][2];
            score_token(sum, a, &stages[t % 2], job.n_head);
#pragma unroll
            for (int m = 0; m < TILES; m++) index_write(out + m * 16, sum[m], m);
        }
        __syncthreads();
    }
}

static_assert(TILES == 4, "each of four lanes writes one tile");

static __global__ void __launch_bounds__(WARPS * 32, 2) index_scores(const struct index_job job)
{
    __shared__ struct stage stages[2];
    index_walk(job, [&](int64_t start, int first, int64_t begin, int64_t end) {
        score_tokens(stages, job, start, first, begin, end);
    });
}

static __device__ inline float index_score(const struct index_job &job, int64_t t, const bf16 *q, const bf16 *k)
{
    float score = 0;
    for (int h = 0; h < job.n_head; h++) {
        float dot = 0;
        for (int c = 0; c < job.dim; c++) dot = fmaf(__bfloat162float(q[h * job.dim + c]), __bfloat162float(k[c]), dot);
        score = fmaf(__bfloat162float(job.w[t * job.ld_w + h]), fmaxf(dot, 0), score);
    }
    return score;
}

/* Any sizes: a block per token, a thread per entry. */
static __global__ void __launch_bounds__(ANY) index_scores_any(const struct index_job job)
{
    const int64_t t = job.first + blockIdx.x, start = job.cu[sequence_at(job.cu, job.n_seq, t)];
    const int n = (int)((t - start + 1) / job.ratio);
    if (n <= job.n_top) return;
    for (int e = threadIdx.x; e < n; e += ANY)
        job.score[blockIdx.x * job.ld_score + e] =
            index_score(job, t, job.q + t * job.ld_q, job.k + (start / job.ratio + e) * job.ld_k);
}

/* Decoding: the scores of entries in pages, a block per token and ANY entries. */
static __global__ void __launch_bounds__(ANY)
    index_scores_pages(const struct index_job job, const struct page_table pages)
{
    const int64_t t = job.first + blockIdx.x;
    const int e = (int)(blockIdx.y * ANY + threadIdx.x), n = index_visible(job, t);
    if (n <= job.n_top || e >= n) return;
    const bf16 *q = job.q + t * job.ld_q, *k = page_row(pages, sequence_at(job.cu, job.n_seq, t), e);
    job.score[blockIdx.x * job.ld_score + e] = index_score(job, t, q, k);
}

/* ---- choice ---- */

/* A score as an integer with the same order; -0 and 0 are equal. */
static __device__ inline uint32_t key_of(float score)
{
    const uint32_t u = __float_as_uint(score + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static __device__ inline float score_of(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
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

/* Values that the warps of a block exchange. The first index alternates between 0 and 1, so that one barrier per
 * exchange suffices. */
template <int BLOCK> struct exchange {
    uint32_t of_warp[2][BLOCK / 32][2];
};

template <int BLOCK>
static __device__ inline void range(uint32_t *low, uint32_t *high, const struct keys &k, int n,
                                    struct exchange<BLOCK> *x)
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

/* The bin of a score among BINS equal parts of low .. high: does not decrease with the score. */
template <int BINS> static __device__ inline int bin_of(uint32_t key, float low, float scale)
{
    return min(BINS - 1, (int)((score_of(key) - low) * scale));
}

/* Keys of one bin; a thread has one of the bins. */
template <int BLOCK> struct bins {
    int count[BLOCK], of_warp[BLOCK / 32], chosen, rank, n_list;
    uint32_t list[LIST], limit;
};

/* chosen = the bin of the n_top-th largest key, rank = its rank among the keys of that bin, from 1 on. */
template <int BLOCK>
static __device__ inline void find_bin(struct bins<BLOCK> *b, const struct keys &k, int n, int n_top, float low,
                                       float scale)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = BLOCK - 1 - (int)threadIdx.x;
    b->count[threadIdx.x] = 0;
    if (threadIdx.x == 0) b->n_list = 0;
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += BLOCK) atomicAdd(&b->count[bin_of<BLOCK>(key_at(k, e), low, scale)], 1);
    __syncthreads();
    const int count = b->count[own];
    int sum = count; /* of this thread's bin and those above it */
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31) b->of_warp[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += b->of_warp[w];
    if (sum >= n_top && sum - count < n_top) {
        b->chosen = own;
        b->rank = n_top - (sum - count);
    }
    __syncthreads();
}

/* *limit = the n_top-th largest of n keys between low and high, low < high. False: its bin has more than LIST keys. */
template <int BLOCK>
static __device__ inline bool threshold_by_bins(uint32_t *limit, struct bins<BLOCK> *b, const struct keys &k, int n,
                                                int n_top, uint32_t low, uint32_t high)
{
    const float least = score_of(low), scale = BLOCK / (score_of(high) - least);
    find_bin(b, k, n, n_top, least, scale);
    const int n_list = b->count[b->chosen];
    if (n_list > LIST) return false;
    for (int e = threadIdx.x; e < n; e += BLOCK) {
        const uint32_t key = key_at(k, e);
        if (bin_of<BLOCK>(key, least, scale) == b->chosen) b->list[atomicAdd(&b->n_list, 1)] = key;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_list; i += BLOCK) {
        int above = 0, equal = 0;
        for (int j = 0; j < n_list; j++) {
            above += b->list[j] > b->list[i];
            equal += b->list[j] == b->list[i];
        }
        if (above < b->rank && b->rank <= above + equal) b->limit = b->list[i]; /* all that write store one value */
    }
    __syncthreads();
    *limit = b->limit;
    return true;
}

/* The n_top-th largest of n keys between low and high, by bisection; or a smaller key that exactly n_top keys reach. */
template <int BLOCK>
static __device__ inline uint32_t threshold_by_bisection(const struct keys &k, int n, int n_top, uint32_t low,
                                                         uint32_t high, struct exchange<BLOCK> *x)
{
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

template <int BLOCK> static __device__ inline uint32_t threshold(const struct keys &k, int n, int n_top)
{
    __shared__ struct exchange<BLOCK> x;
    __shared__ struct bins<BLOCK> b;
    uint32_t low, high, limit;
    range(&low, &high, k, n, &x);
    if (low == high || threshold_by_bins(&limit, &b, k, n, n_top, low, high)) return low == high ? low : limit;
    return threshold_by_bisection(k, n, n_top, low, high, &x);
}

/* Writes the entries above the threshold, and the first of those at it, in ascending order. */
template <int BLOCK>
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

template <int BLOCK> static __global__ void __launch_bounds__(BLOCK) index_choose(const struct index_job job)
{
    extern __shared__ uint32_t room[]; /* keys of job.most entries; above KEYS none */
    const int64_t t = job.first + blockIdx.x;
    const int n = index_visible(job, t);
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
    write_chosen<BLOCK>(out, k, n, job.n_top, threshold<BLOCK>(k, n, job.n_top));
}

/* ---- the op */

static void scores_by_tiles(const struct index_job *job)
{
    index_scores<<<index_grid(job), WARPS * 32, 0, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
}
static void scores_of_any(const struct index_job *job)
{
    index_scores_any<<<grid_x(job->end - job->first), ANY, 0, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
}

/* Kernels of the scores. variant_of takes the first row that runs on this GPU and accepts the number of heads. */
static const struct index_variant {
    unsigned archs;
    bool tiles; /* heads of INDEX_DIM, at most INDEX_HEADS, a multiple of 8; aligned rows */
    int least_heads;
    void (*run)(const struct index_job *job);
} variants[] = {{ARCH_BIT(CUDA_SM90), true, INDEX_HEADS, index_scores_wgmma},
                {EVERY_ARCH, true, 0, scores_by_tiles},
                {EVERY_ARCH, false, 0, scores_of_any}};

static const struct index_variant *variant_of(bool tiles, int n_head)
{
    const struct index_variant *v = variants;
    while (!cuda_runs(v->archs) || (v->tiles && !tiles) || n_head < v->least_heads) v++;
    return v;
}

static struct index_job job_of(const struct scratch_index *s, struct tensor idx, struct tensor q, struct tensor w,
                               const struct seqs *seqs, int64_t ratio)
{
    struct index_job job = {};
    job.score = s->score;
    job.q = bf16_ptr(q);
    job.w = bf16_ptr(w);
    job.idx = i32_ptr(idx);
    job.cu = i32_ptr(seqs->cu);
    job.ld_q = q.ld;
    job.ld_w = w.ld;
    job.ld_score = s->ld;
    job.ld_idx = idx.ld;
    job.n_seq = (int)seqs->n_seq;
    job.n_head = (int)w.shape[1];
    job.n_top = (int)idx.shape[1];
    job.ratio = (int)ratio;
    job.most = (int)s->most;
    return job;
}

/* Scores by `score`, and choices, chunk by chunk. */
template <typename SCORE>
static void index_all(const struct scratch_index *s, struct index_job *job, int64_t n_tok, const SCORE &score)
{
    const size_t room = s->scored && s->most <= KEYS ? (size_t)s->most * sizeof(uint32_t) : 0;
    for (job->first = 0; job->first < n_tok; job->first = job->end) {
        job->end = MT_MIN(job->first + s->chunk, n_tok);
        const int64_t n = job->end - job->first;
        if (s->scored) score();
        if (s->most <= FEW)
            index_choose<64><<<grid_x(n), 64, room, cuda.stream>>>(*job);
        else
            index_choose<256><<<grid_x(n), 256, room, cuda.stream>>>(*job);
        CUDA_CHECK_LAUNCH();
    }
}

extern "C" void cuda_index_topk(struct device *dev, struct tensor idx, struct tensor q, struct tensor k,
                                struct tensor w, const struct seqs *seqs, int64_t ratio)
{
    const struct scratch_index s = scratch_index_topk(dev, idx, q, seqs, ratio);
    struct index_job job = job_of(&s, idx, q, w, seqs, ratio);
    job.k = bf16_ptr(k);
    job.ld_k = k.ld;
    job.n_row = k.shape[0];
    job.dim = (int)k.shape[1];
    const bool tiles = job.dim == INDEX_DIM && job.n_head % 8 == 0 && job.n_head <= INDEX_HEADS && rows_aligned(q) &&
                       rows_aligned(k) && rows_aligned(w);
    index_all(&s, &job, q.shape[0], [&] { variant_of(tiles, job.n_head)->run(&job); });
}

extern "C" void cuda_index_decode(struct device *dev, struct tensor idx, struct tensor q, struct tensor w,
                                  const struct past *past, int64_t ratio)
{
    const struct scratch_index s = scratch_index_topk(dev, idx, q, past->seqs, ratio);
    const struct page_table pages = table_of(past->pages);
    struct index_job job = job_of(&s, idx, q, w, past->seqs, ratio);
    job.pos = i32_ptr(past->pos);
    job.dim = (int)past->pages->rows.shape[1];
    const int64_t parts = ceil_div(MT_MAX(s.most, 1), ANY);
    MT_REQUIRE(parts <= 65535, "%lld entries of a sequence", (long long)s.most);
    index_all(&s, &job, q.shape[0], [&] {
        index_scores_pages<<<dim3(grid_x(job.end - job.first), (unsigned)parts), ANY, 0, cuda.stream>>>(job, pages);
        CUDA_CHECK_LAUNCH();
    });
}
