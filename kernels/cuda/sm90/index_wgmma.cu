/* index_wgmma.cu - the scores of the indexer on Hopper, 64 heads of 128. Contract, entries and scratch: index.cu.
 * Grid: a block per 256 entries and 16 tokens. The entries stay in shared memory (64 KiB) as operand a of wgmma; the
 *   heads of two tokens at a time are operand b (m64n128k16). A warpgroup loads entries and heads by TMA, the heads
 *   into a ring of three stages of 32 KiB. Each of four warpgroups has 64 entries: the sums of one overlap with
 *   products of the others.
 * Numerics: f32 sums in a fixed order. */
#include "kernels/cuda/parts/index.cuh"
#include "kernels/cuda/sm90/sm90.cuh"

enum { GROUPS = INDEX_ENTRIES / 64, PAIR = 2, STAGES = 3, THREADS = (GROUPS + 1) * 128 };
/* Bytes of 64 columns of all entries, and of the heads of a pair of tokens. Columns 64 .. 127 follow. */
enum { HALF_K = INDEX_ENTRIES * 128, HALF_Q = PAIR * INDEX_HEADS * 128, STAGE = 2 * HALF_Q };
enum { BARS = 2 * HALF_K + STAGES * STAGE, BYTES = BARS + (1 + 2 * STAGES) * 8, ROOM = BYTES + 1024 };
enum { PART_DONE = 1 }; /* named barrier */
static_assert(INDEX_DIM == 128, "two halves of 64 columns");
/* Registers of a thread: at launch, then of a warpgroup that multiplies, and of the one that loads. */
enum { REGISTERS = 96, MORE = 104, LESS = 40 };
static_assert((int)GROUPS * MORE + LESS <= (GROUPS + 1) * REGISTERS, "a block may only share out its own registers");

struct index_maps {
    CUtensorMap q, k;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Addresses in shared memory. Barriers: the entries have arrived; then a full and an empty one per stage. */
struct ring {
    uint32_t base;
    __device__ uint32_t entries(int half) const { return base + half * HALF_K; }
    __device__ uint32_t heads(int stage, int half) const { return base + 2 * HALF_K + stage * STAGE + half * HALF_Q; }
    __device__ uint32_t loaded() const { return base + BARS; }
    __device__ uint32_t full(int stage) const { return base + BARS + 8 + stage * 16; }
    __device__ uint32_t empty(int stage) const { return base + BARS + 16 + stage * 16; }
};

/* The stage of step n of a block, and how often the ring was used before. */
struct place {
    int stage, turn;
};
static __device__ inline struct place place_of(int n) { return (struct place){n % STAGES, n / STAGES}; }

/* Loads the entries from `row` on, then the pairs of tokens begin .. end - 1; step: number of the first one. */
static __device__ inline void load(const struct ring &r, const struct index_maps &maps, int row, int begin, int end,
                                   int step)
{
    mbarrier_arrive_expect(r.loaded(), 2 * HALF_K);
    for (int half = 0; half < 2; half++) tma_load(r.entries(half), &maps.k, r.loaded(), half * 64, row, 0);
    for (int t = begin; t < end; t += PAIR, step++) {
        const struct place p = place_of(step);
        mbarrier_wait(r.empty(p.stage), (p.turn & 1) ^ 1);
        mbarrier_arrive_expect(r.full(p.stage), STAGE);
        for (int half = 0; half < 2; half++)
            tma_load(r.heads(p.stage, half), &maps.q, r.full(p.stage), half * 64, 0, t);
    }
}

/* sum = this lane's part of the scores of 64 entries for the tokens of a stage: the sum over its heads, whose weights
 * are w. a, b: descriptors of the entries and of the stage. */
static __device__ inline void score_pair(float sum[PAIR][2], uint64_t a, uint64_t b, uint32_t empty,
                                         const uint32_t w[PAIR][INDEX_HEADS / 8])
{
    float d[PAIR * INDEX_HEADS / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < INDEX_STEPS; k++) /* a descriptor counts in units of 16 bytes */
        wgmma<false>(d, a + (k / 4 * HALF_K + k % 4 * 32) / 16, b + (k / 4 * HALF_Q + k % 4 * 32) / 16, k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(d);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
#pragma unroll
    for (int p = 0; p < PAIR; p++) {
        sum[p][0] = sum[p][1] = 0;
#pragma unroll
        for (int i = 0; i < INDEX_HEADS / 8; i++) index_add(sum[p], d + 4 * (p * INDEX_HEADS / 8 + i), w[p][i]);
    }
}

/* The scores of a warpgroup's 64 entries for tokens begin .. end - 1 of the sequence that begins at start. */
static __device__ inline void score_tokens(const struct ring &r, const struct index_job &job, int64_t start, int first,
                                           int64_t begin, int64_t end, int step)
{
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), own = first + group * 64;
    const int n_tok = (int)(end - begin), row = threadIdx.x % 128 / 32 * 16;
    /* The first token, counted from `begin`, that sees an entry of this warpgroup. */
    const int64_t seen = start + ((int64_t)own + 1) * job.ratio - 1 - begin;
    const uint64_t a = sm90_descriptor(r.entries(0) + group * 64 * 128, 16, 1024);
    const bf16 *weights = job.w + begin * job.ld_w + threadIdx.x % 4 * 2;
    float *out = index_out(job, begin, own + row);
    for (int t = 0; t < n_tok; t += PAIR, step++, weights += PAIR * job.ld_w, out += PAIR * job.ld_score) {
        const struct place p = place_of(step);
        const bool both = t + 1 < n_tok;
        uint32_t w[PAIR][INDEX_HEADS / 8];
        float sum[PAIR][2];
        const uint32_t *of_token[PAIR] = {(const uint32_t *)weights,
                                          (const uint32_t *)(weights + (both ? job.ld_w : 0))};
#pragma unroll
        for (int i = 0; i < PAIR; i++)
#pragma unroll
            for (int k = 0; k < INDEX_HEADS / 8; k++) w[i][k] = of_token[i][k * 4];
        mbarrier_wait(r.full(p.stage), p.turn & 1);
        if (t + both < seen) { /* the whole warpgroup */
            if (threadIdx.x % 32 == 0) mbarrier_arrive(r.empty(p.stage));
            continue;
        }
        score_pair(sum, a, sm90_descriptor(r.heads(p.stage, 0), 16, 1024), r.empty(p.stage), w);
        index_write(out, sum[0], 0);
        if (both) index_write(out + job.ld_score, sum[1], 1);
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1)
    index_scores_wgmma_kernel(const struct index_job job, const __grid_constant__ struct index_maps maps)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    const struct ring r = {__shfl_sync(0xffffffffu, (sm90_shared(bytes) + 1023) & ~1023u, 0)};
    int step = 0, part = 0;
    if (threadIdx.x == 0) {
        mbarrier_init(r.loaded(), 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(r.full(i), 1);
            mbarrier_init(r.empty(i), GROUPS * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    /* After each sequence of a walk (PART_DONE) the memory of its entries is free for the next. */
    if (threadIdx.x < GROUPS * 128) {
        sm90_registers_more<MORE>();
        index_walk(job, [&](int64_t start, int first, int64_t begin, int64_t end) {
            mbarrier_wait(r.loaded(), part++ & 1);
            score_tokens(r, job, start, first, begin, end, step);
            step += (int)(end - begin + PAIR - 1) / PAIR;
            named_sync_apart(PART_DONE, THREADS);
        });
    } else {
        sm90_registers_less<LESS>();
        index_walk(job, [&](int64_t start, int first, int64_t begin, int64_t end) {
            if (threadIdx.x == GROUPS * 128)
                load(r, maps, (int)(start / job.ratio) + first, (int)begin, (int)end, step);
            step += (int)(end - begin + PAIR - 1) / PAIR;
            __syncwarp();
            named_sync_apart(PART_DONE, THREADS);
        });
    }
#else
    __trap();
#endif
}

void index_scores_wgmma(const struct index_job *job)
{
    const int64_t of_q[3] = {INDEX_DIM, INDEX_HEADS, job->end}, box_q[3] = {64, INDEX_HEADS, PAIR};
    const int64_t of_k[3] = {INDEX_DIM, job->n_row, 1}, box_k[3] = {64, INDEX_ENTRIES, 1};
    const int64_t step_q[2] = {INDEX_DIM * 2, job->ld_q * 2}, step_k[2] = {job->ld_k * 2, job->n_row * job->ld_k * 2};
    const struct index_maps maps = {sm90_tensor_map(job->q, of_q, step_q, box_q),
                                    sm90_tensor_map(job->k, of_k, step_k, box_k)};
    allow_shared<index_scores_wgmma_kernel>(ROOM);
    index_scores_wgmma_kernel<<<index_grid(job), THREADS, ROOM, cuda.stream>>>(*job, maps);
    CUDA_CHECK_LAUNCH();
}
