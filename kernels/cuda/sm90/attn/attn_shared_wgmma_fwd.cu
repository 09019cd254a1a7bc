/* attn_shared_wgmma_fwd.cu - attention with shared keys on Hopper: forward. Groups of 64 heads of 512 columns.
 *
 * Math, shapes: as attn_shared.cu.
 * Grid: a block per SM, which takes a token and 64 heads at a time, tokens with the most entries first. All heads of a
 *   token see the same keys, so a tile has masked keys only after the token's last key. Two warpgroups share the 64 x
 *   512 sums, 256 columns each. Tiles of 64 keys in two slots of 64 KiB; with the queries and weights 209 KiB.
 * Schedule: the third warpgroup copies tiles, and the next token's queries as soon as all scores of this token are
 *   computed. The first issues the scores of tile i + 1, then weights times keys of tile i; while these run, it
 *   computes the weights of tile i + 1.
 * Bound: per tile, wgmma 2048 clocks per SM; copies from L2 64 KiB, 24 bytes per clock. Without entries, memory:
 *   4*T*H*A bytes.
 * Numerics: f32 sums; weights rounded to bf16. */
#include "kernels/cuda/sm90/attn/attn_shared_wgmma.cuh"

enum { KEYS = 64, TILE_BYTES = KEYS * SHARED_DIM * 2, WEIGHT_BYTES = SHARED_HEADS * PANEL_ROW, SLOTS = 2, COPIERS = 4 };
enum {
    SLOTS_AT = HEAD_TILE,
    WEIGHTS_AT = SLOTS_AT + SLOTS * TILE_BYTES,
    MORE = 232, /* registers of a thread that computes, and of one that loads */
    LESS = 40,
    FWD_BYTES = WEIGHTS_AT + 2 * WEIGHT_BYTES + 1024
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct online {
    float max[2], sum[2], factor[2];
};

/* Scores become weights 2^(c (s - max)), c = scale / ln 2; keys from `live` on have weight 0. max grows only when a
 * score exceeds it by more than `slack`: weights stay below 2^8, and sums are rarely rescaled. */
static __device__ __forceinline__ void weigh_scores(float (&s)[32], struct online *x, float c, float slack, int live)
{
    const int column = threadIdx.x % 4 * 2;
    if (live < KEYS) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (8 * (i / 4) + column + i % 2 >= live) s[i] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = s[2 * h], total = 0.0f;
#pragma unroll
        for (int i = 2 * h; i < 32; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const bool grown = top > x->max[h] + slack;
        top = grown ? top : x->max[h];
        x->factor[h] = grown ? exp2_approx((x->max[h] - top) * c) : 1.0f;
        x->max[h] = top;
        const float shift = top == -INFINITY ? 0.0f : top * c;
#pragma unroll
        for (int i = 2 * h; i < 32; i += 4) {
            s[i] = exp2_approx(s[i] * c - shift);
            s[i + 1] = exp2_approx(s[i + 1] * c - shift);
            total += s[i] + s[i + 1];
        }
        x->sum[h] = x->sum[h] * x->factor[h] + total;
    }
}

/* Weights as bf16, the A operand of the sums: 64 rows of 64 keys. */
static __device__ __forceinline__ void put_weights(char *to, const float (&s)[32])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        char *p = to + sm90_swizzle(row, n) + lane % 4 * 4;
        *(uint32_t *)p = pack2(s[4 * n], s[4 * n + 1]);
        *(uint32_t *)(p + 8 * PANEL_ROW) = pack2(s[4 * n + 2], s[4 * n + 3]);
    }
}

static __device__ __forceinline__ void add_tile(float (&o)[128], uint32_t weights, uint32_t tile, int half)
{
    const uint32_t a = low_word(weights, 16);
    const uint32_t b = low_word(tile + half * 4 * KEYS * PANEL_ROW, KEYS * PANEL_ROW);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) wgmma<true>(o, descriptor_at(a, 32 * k), descriptor_at(b, 2048 * k), true);
    wgmma_commit();
}

static __device__ __forceinline__ void dot_tile(float (&s)[32], uint32_t q, uint32_t tile)
{
    uint32_t a = low_word(q, 16), b = low_word(tile, 16);
    asm volatile("" : "+r"(a)); /* otherwise the descriptors of queries stay in registers, which spill */
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < SHARED_DIM / 16; k++)
        wgmma<false>(s, descriptor_at(a, k / 4 * HEAD_PANEL + k % 4 * 32),
                     descriptor_at(b, k / 4 * KEYS * PANEL_ROW + k % 4 * 32), k > 0);
    wgmma_commit();
}

/* mbarriers: a slot is full, or empty; the queries and n_key have arrived, or are no longer needed. */
enum { FULL, EMPTY = FULL + SLOTS, HEADS = EMPTY + SLOTS, FREE, FWD_BARRIERS };
enum { BOTH_GROUPS = 1 };

struct fwd_told {
    int n_key;                      /* of the token whose queries have arrived */
    float factors[2][SHARED_HEADS]; /* of the sums before a tile is added; by the tile's parity */
    float sums[SHARED_HEADS];
};
/* Shared memory of a block: the queries, the slots, two stages of weights. `place` counts the tiles of all tokens. */
struct fwd_room {
    char *smem;
    uint32_t base, bars; /* addresses of smem and of the mbarriers */
    struct fwd_told *told;

    __device__ uint32_t bar(int i) const { return bars + 8 * i; }
    __device__ int slot_at(uint32_t place) const { return SLOTS_AT + place % SLOTS * TILE_BYTES; }
    __device__ uint32_t slot(uint32_t place) const { return base + slot_at(place); }
    __device__ int weights_at(uint32_t place) const { return WEIGHTS_AT + place % 2 * WEIGHT_BYTES; }
    __device__ uint32_t full(uint32_t place) const { return bar(FULL + place % SLOTS); }
    __device__ uint32_t empty(uint32_t place) const { return bar(EMPTY + place % SLOTS); }
    __device__ void wait_full(uint32_t place) const { mbarrier_wait(full(place), place / SLOTS & 1); }
    __device__ void wait_empty(uint32_t place) const { mbarrier_wait(empty(place), (place / SLOTS & 1) ^ 1); }
};

/* A job: a token and 64 heads. The last token, which sees the most keys, is first. */
struct fwd_job {
    int t, head0;
};
static __device__ __forceinline__ struct fwd_job fwd_job_of(const struct shared_args &a, int job)
{
    const int n_group = a.n_head / SHARED_HEADS;
    return {a.n_tok - 1 - job / n_group, job % n_group * SHARED_HEADS};
}

/* COPIERS warps: load the queries and copy the tiles of all jobs. */
static __device__ __forceinline__ void copy_jobs(const struct fwd_room &m, const struct shared_args &a,
                                                 const CUtensorMap *q)
{
    const int n_job = a.n_tok * (a.n_head / SHARED_HEADS), warp = __shfl_sync(~0u, (threadIdx.x - PAIR) / 32, 0);
    uint32_t place = 0, turn = 0;
    for (int job = blockIdx.x; job < n_job; job += gridDim.x, turn++) {
        const struct fwd_job j = fwd_job_of(a, job);
        const struct sight sight = sight_of(a, j.t);
        const int n = count_keys(a, sight);
        if (threadIdx.x == PAIR) {
            mbarrier_wait(m.bar(FREE), (turn & 1) ^ 1);
            m.told->n_key = n;
            mbarrier_arrive_expect(m.bar(HEADS), HEAD_TILE);
            load_panels(m.base, m.bar(HEADS), q, 0, 8, j.head0, j.t);
            if (job + (int)gridDim.x < n_job) {
                const struct fwd_job next = fwd_job_of(a, job + (int)gridDim.x);
                prefetch_l2(a.q + next.t * a.ld_q + (int64_t)next.head0 * SHARED_DIM, HEAD_TILE);
            }
        }
        __syncwarp();
        for (int k0 = 0; k0 < n; k0 += KEYS, place++) {
            const bf16 *found = find_key<KEYS, COPIERS>(a, sight, k0, n, warp);
            m.wait_empty(place);
            copy_keys<KEYS, COPIERS>(m.slot(place), found, k0, n, warp);
            cp_async_arrive(m.full(place));
        }
    }
}

/* The first warpgroup: writes the weights of the scores s, and the factors for the sums so far. */
static __device__ __forceinline__ void tell_weights(const struct fwd_room &m, float (&s)[32], struct online *x, float c,
                                                    int live, uint32_t place)
{
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    weigh_scores(s, x, c, 8.0f / c, live);
    put_weights(m.smem + m.weights_at(place), s);
    float *factors = m.told->factors[place % 2];
    if (threadIdx.x % 4 == 0) factors[row] = x->factor[0], factors[row + 8] = x->factor[1];
    fence_proxy_async();
}

/* The first warpgroup: the sum of a row's weights and of its sink, and lse. */
static __device__ __forceinline__ void tell_sums(const struct fwd_room &m, const struct shared_args &a,
                                                 const struct online &x, const struct fwd_job &j, float c)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h, head = j.head0 + row;
        float total = x.sum[h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (a.sinks) total += exp2_approx((a.sinks[head] / a.scale - x.max[h]) * c);
        if (threadIdx.x % 4 == 0) {
            m.told->sums[row] = total;
            a.lse[j.t * a.ld_lse + head] = x.max[h] * a.scale + logf(total);
        }
    }
}

/* Multiplies this thread's rows of the sums by factors, most of which are 1. */
static __device__ __forceinline__ void scale_sums(float (&o)[128], const float f[2])
{
    if (!__any_sync(~0u, f[0] != 1.0f || f[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i++) o[i] *= f[i / 2 % 2];
}
/* Divides the sums of a warpgroup by the sums of the weights, and stores them through the last tile's slot. */
static __device__ __forceinline__ void store_sums(const struct fwd_room &m, const struct shared_args &a,
                                                  const struct fwd_job &j, const float (&o)[128], uint32_t place,
                                                  int wg)
{
    const int warp = threadIdx.x % 128 / 32, row = warp * 16 + threadIdx.x % 32 / 4;
    named_sync_apart(BOTH_GROUPS, PAIR); /* the sums are complete; no product reads the last tile any more */
    const float inverse[2] = {1.0f / m.told->sums[row], 1.0f / m.told->sums[row + 8]};
    store_heads(a.o + j.t * a.ld_o + (int64_t)(j.head0 + warp * 16) * SHARED_DIM + wg * SHARED_COLUMNS, o, inverse,
                m.smem + m.slot_at(place) + (wg * 4 + warp) * 4096);
    arrive_warp(m.empty(place));
}

/* The first warpgroup: scores, weights and columns 0 .. 255 of the sums. */
static __device__ __forceinline__ void weigh_jobs(const struct fwd_room &m, const struct shared_args &a)
{
    const int n_job = a.n_tok * (a.n_head / SHARED_HEADS), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    const float c = a.scale * LOG2_E;
    uint32_t place = 0, turn = 0;
    for (int job = blockIdx.x; job < n_job; job += gridDim.x, place++, turn++) {
        const struct fwd_job j = fwd_job_of(a, job);
        float s[32], o[128] = {};
        struct online x;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            x.max[h] = a.sinks ? a.sinks[j.head0 + row + 8 * h] / a.scale : -INFINITY;
            x.sum[h] = 0.0f;
            x.factor[h] = 1.0f;
        }
        mbarrier_wait(m.bar(HEADS), turn & 1);
        int live = __shfl_sync(~0u, m.told->n_key, 0); /* keys from this tile on */
        m.wait_full(place);
        fence_proxy_async();
        dot_tile(s, m.base, m.slot(place));
        wgmma_wait<0>();
        wgmma_use(s);
        tell_weights(m, s, &x, c, live, place);
        for (; live > KEYS; live -= KEYS, place++) {
            named_sync_apart(BOTH_GROUPS, PAIR); /* the weights are complete; nothing reads those of the tile before */
            scale_sums(o, x.factor);
            m.wait_full(place + 1);
            fence_proxy_async();
            dot_tile(s, m.base, m.slot(place + 1));
            add_tile(o, m.base + m.weights_at(place), m.slot(place), 0);
            wgmma_wait<1>(); /* the scores */
            wgmma_use(s);
            tell_weights(m, s, &x, c, live - KEYS, place + 1);
            wgmma_wait<0>();
            wgmma_use(o);
            arrive_warp(m.empty(place));
        }
        arrive_warp(m.bar(FREE));
        named_sync_apart(BOTH_GROUPS, PAIR);
        scale_sums(o, x.factor);
        add_tile(o, m.base + m.weights_at(place), m.slot(place), 0);
        tell_sums(m, a, x, j, c);
        wgmma_wait<0>();
        wgmma_use(o);
        store_sums(m, a, j, o, place, 0);
    }
}

/* The second warpgroup: columns 256 .. 511 of the sums. */
static __device__ __forceinline__ void add_jobs(const struct fwd_room &m, const struct shared_args &a)
{
    const int n_job = a.n_tok * (a.n_head / SHARED_HEADS), row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    uint32_t place = 0, turn = 0;
    for (int job = blockIdx.x; job < n_job; job += gridDim.x, place++, turn++) {
        float o[128] = {};
        mbarrier_wait(m.bar(HEADS), turn & 1);
        int live = __shfl_sync(~0u, m.told->n_key, 0);
        arrive_warp(m.bar(FREE));
        for (;; live -= KEYS, place++) {
            m.wait_full(place);
            fence_proxy_async();
            named_sync_apart(BOTH_GROUPS, PAIR);
            const float *factors = m.told->factors[place % 2];
            const float f[2] = {factors[row], factors[row + 8]};
            scale_sums(o, f);
            add_tile(o, m.base + m.weights_at(place), m.slot(place), 1);
            wgmma_wait<0>();
            wgmma_use(o);
            if (live <= KEYS) break;
            arrive_warp(m.empty(place));
        }
        store_sums(m, a, fwd_job_of(a, job), o, place, 1);
    }
}
#endif

static __global__ void __launch_bounds__(THREADS, 1)
    shared_fwd_wgmma_kernel(const struct shared_args a, const __grid_constant__ CUtensorMap q)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct fwd_told told;
    __shared__ uint64_t bars[FWD_BARRIERS];
    char *smem = aligned_shared(bytes);
    const struct fwd_room m = {smem, sm90_shared(smem), sm90_shared(bars), &told};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            mbarrier_init(m.bar(FULL + i), COPIERS * 32);
            mbarrier_init(m.bar(EMPTY + i), PAIR / 32);
        }
        mbarrier_init(m.bar(HEADS), 1);
        mbarrier_init(m.bar(FREE), PAIR / 32);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (wg == 2) {
        sm90_registers_less<LESS>();
        copy_jobs(m, a, &q);
    } else {
        sm90_registers_more<MORE>();
        if (wg == 0)
            weigh_jobs(m, a);
        else
            add_jobs(m, a);
    }
#else
    __trap();
#endif
}

void shared_fwd_wgmma(const struct shared_args *a)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_fwd_wgmma_kernel, FWD_BYTES);
    ready = true;
    const unsigned grid = grid_x(MT_MIN((int64_t)a->n_tok * (a->n_head / SHARED_HEADS), a->n_sm));
    shared_fwd_wgmma_kernel<<<grid, THREADS, FWD_BYTES, cuda.stream>>>(*a, map_heads(a, a->q, a->ld_q));
    CUDA_CHECK_LAUNCH();
}
