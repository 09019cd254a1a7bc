/* attn_wgmma_512.cuh - shared by the Hopper attention kernels for heads of 512, forward and backward.
 *
 * dk and dv of 64 keys are 256 KiB in f32, all registers of an SM, and q, dout, k and v of 64 rows and keys 256 KiB,
 * more than its shared memory. So queries are processed in chunks whose weights fit into scratch: a first kernel
 * computes the weights of 128 rows (queries of all heads of a group) and 256 keys, a second the sums, in items of 128
 * rows (keys) and 256 columns. Weights in scratch cost 12 bytes of memory traffic per row and key in the backward, 6 in
 * the forward. Without them the backward would have eight products instead of five, and both passes would read 64 bytes
 * per clock from L2.
 *
 * Kernels are persistent, a block per SM: two consumer warpgroups of 64 rows (keys) by 256 columns, 128 sums per
 * thread, and a producer thread, which takes items from a queue. 4 stages of 48 KiB: 64 of the inner dimension for 128
 * rows and 256 columns. Weights are stored in the swizzle of wgmma, a block of 64 rows and 64 keys is 8 KiB. */
#ifndef MT_CUDA_ATTN_WGMMA_512_H
#define MT_CUDA_ATTN_WGMMA_512_H

#include "kernels/cuda/sm90/attn/attn_wgmma.cuh"

enum {
    WIDTH = 512,
    COLUMNS = ATTN_WEIGHT_TILE, /* of an item of sums, and keys of an item of weights */
    ROWS = ATTN_WEIGHT_BLOCK,
    KEYS = ATTN_WEIGHT_BLOCK,
    TILE_BLOCKS = COLUMNS / KEYS,
    BLOCK_VALUES = ROWS * KEYS,
    BLOCK_BYTES = BLOCK_VALUES * 2,
    LEFT_BYTES = 2 * BLOCK_BYTES,
    PANEL_BYTES = ROWS * ROW_BYTES, /* 64 columns of 64 rows */
    STAGES = 4,
    STAGE_BYTES = LEFT_BYTES + COLUMNS * ROW_BYTES,
    ITEMS = 2,                    /* items that the producer may take before the consumers finish one */
    SLICE_BYTES = 16 * ROW_BYTES, /* of a warp, to rearrange 64 columns of its rows */
    BYTES = STAGES * STAGE_BYTES + PAIR_CONSUMERS / 32 * SLICE_BYTES + 1024
};

/* A pair is two neighbouring blocks of n_query queries; the first query of a pair is a multiple of 2 n_query in its
 * sequence. find_block numbers the pairs as slots. */
struct wide_args {
    struct attn_wgmma_args p; /* k, v: boxes of COLUMNS keys for weights, of KEYS for sums */
    int first, n;             /* slots of the chunk */
    int n_block;              /* blocks of keys of a slot in scratch */
    bf16 *weights, *ds;       /* [n, K, n_block, 2, 64, 64] swizzled: p and ds of two blocks of queries */
    float *sum;               /* backward: [2, K, T, 512]: dk and dv so far */
    float2 *part; /* forward: [n, K, n_block / 4, 128]: of a row and 256 keys, u of the weights 2^(c s - u) and the sum
                   * of these */
};
__host__ __device__ static inline int tiles_of(const struct wide_args &c)
{
    return (c.n_block + TILE_BLOCKS - 1) / TILE_BLOCKS;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- items and stages */

/* WEIGHTS: weights of the pair that begins at query `at`, for blocks from .. from + n - 1 of keys. Other kinds: n
 * steps, over blocks of keys (O, DQ) or of queries (DK, DV) from number `from` on; `at`: the first query of the pair
 * (O, DQ) or the first key (DK, DV). */
enum kind { NONE, WEIGHTS, O, DQ, DK, DV };
struct wide_item {
    int64_t first;   /* row of the batch where the sequence begins */
    int64_t scratch; /* the item's first block in scratch; DK, DV: block 0 of the pair of query 0, maybe negative */
    int64_t part;    /* WEIGHTS, O: row of the pair in wide_args.part */
    int len, kv, at, from, n;
    enum kind kind;
    int half;                /* columns 256 half .. */
    bool resumed, continued; /* sums of earlier chunks; later chunks add to them */
};
struct wide_shared {
    uint64_t full[STAGES], empty[STAGES], item_full[ITEMS], item_empty[ITEMS];
    struct wide_item item[ITEMS];
};
struct wide_memory {
    struct wide_shared *s;
    char *bytes; /* stages, then slices */
    uint32_t base;

    __device__ uint32_t full(int i) const { return sm90_shared(s->full + i); }
    __device__ uint32_t empty(int i) const { return sm90_shared(s->empty + i); }
    __device__ uint32_t left(int i) const { return base + i * STAGE_BYTES; }
    __device__ uint32_t right(int i) const { return left(i) + LEFT_BYTES; }
    __device__ char *slice() const { return bytes + STAGES * STAGE_BYTES + threadIdx.x / 32 * SLICE_BYTES; }
};

static __device__ __forceinline__ struct wide_memory start_wide(char *bytes, struct wide_shared *s)
{
    const uint32_t start = (sm90_shared(bytes) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(sm90_shared(s->full + i), 1);
            mbarrier_init(sm90_shared(s->empty + i), PAIR_CONSUMERS / 32);
        }
        for (int i = 0; i < ITEMS; i++) {
            mbarrier_init(sm90_shared(s->item_full + i), 1);
            mbarrier_init(sm90_shared(s->item_empty + i), PAIR_CONSUMERS / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    return {s, bytes + (start - sm90_shared(bytes)), start};
}

/* The producer passes an item; NONE: there are no more. */
static __device__ __forceinline__ void pass_item(const struct wide_memory &m, const struct wide_item &item,
                                                 struct stage_at *at)
{
    mbarrier_wait(sm90_shared(m.s->item_empty + at->stage), at->parity ^ 1);
    m.s->item[at->stage] = item;
    mbarrier_arrive(sm90_shared(m.s->item_full + at->stage));
    *at = next_stage<ITEMS>(*at);
}
static __device__ __forceinline__ struct wide_item next_item(const struct wide_memory &m, struct stage_at *at)
{
    mbarrier_wait(sm90_shared(m.s->item_full + at->stage), at->parity);
    const struct wide_item item = m.s->item[at->stage];
    release_stage(sm90_shared(m.s->item_empty + at->stage));
    *at = next_stage<ITEMS>(*at);
    return item;
}
/* Waits for a stage and announces the bytes of its copies. Returns their barrier. */
static __device__ __forceinline__ uint32_t begin_stage(const struct wide_memory &m, struct stage_at at, int bytes)
{
    mbarrier_wait(m.empty(at.stage), at.parity ^ 1);
    mbarrier_arrive_expect(m.full(at.stage), bytes);
    return m.full(at.stage);
}
/* The stage before this one is no longer read. */
static __device__ __forceinline__ void release_before(const struct wide_memory &m, struct stage_at at)
{
    release_stage(m.empty((at.stage + STAGES - 1) % STAGES));
}

/* Blocks of keys that the pair of query q0 of a sequence has in scratch: x .. y - 1. */
static __device__ __forceinline__ int2 blocks_seen(const struct attn_wgmma_args &p, int q0, int len)
{
    return make_int2(max(0, q0 - p.a.window + 1) / KEYS, (min(q0 + 2 * p.n_query, len) + KEYS - 1) / KEYS);
}
/* The index in scratch of block 0 of a pair. */
static __device__ __forceinline__ int64_t scratch_at(const struct wide_args &c, int slot, int kv)
{
    return ((int64_t)(slot - c.first) * c.p.a.n_kv + kv) * c.n_block * 2;
}
/* Pair `pair` of the chunk, latest first, and its blocks of keys. False: an unused slot. */
static __device__ __forceinline__ bool pair_at(struct wide_item *item, const struct wide_args &c, int pair)
{
    const int slot = c.first + c.n - 1 - pair / c.p.a.n_kv, kv = pair % c.p.a.n_kv;
    const struct seq_block seq = find_block(c.p.a, slot, 2 * c.p.n_query);
    item->first = seq.first;
    item->len = seq.len;
    item->kv = kv;
    item->at = seq.block * 2 * c.p.n_query;
    const int2 seen = blocks_seen(c.p, item->at, seq.len);
    item->from = seen.x;
    item->n = seen.y - seen.x;
    item->scratch = scratch_at(c, slot, kv);
    item->part = ((int64_t)(slot - c.first) * c.p.a.n_kv + kv) * tiles_of(c) * 2 * ROWS;
    return seq.block < seq.n_block;
}

/* ---- products */

static __device__ __forceinline__ void clear_sums(float (&sum)[128])
{
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i] = 0.0f;
}
/* sum += the product of a stage, 64 of the inner dimension. a: 64 rows; with TRANS_A 64 columns. Rows of b are columns
 * of the product; with TRANS_B they are inner indices, in panels of 64 columns. */
template <bool TRANS_A, bool TRANS_B>
static __device__ __forceinline__ void multiply_stage(float (&sum)[128], uint32_t a, uint32_t b)
{
    const uint64_t left = sm90_descriptor(a, 16, 1024), right = sm90_descriptor(b, TRANS_B ? PANEL_BYTES : 16, 1024);
    constexpr int A_STEP = TRANS_A ? 128 : 2, B_STEP = TRANS_B ? 128 : 2; /* 16 of the inner dimension */
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<TRANS_B, TRANS_A>(sum, left + k * A_STEP, right + k * B_STEP, true);
    wgmma_commit();
}

/* Waits for a stage whose right operand has `live` rows of the sequence, and clears the rows after them. */
static __device__ __forceinline__ void wait_rows(const struct wide_memory &m, struct stage_at at, int live, int wg)
{
    mbarrier_wait(m.full(at.stage), at.parity);
    if (live >= ROWS) return;
    clear_rows<COLUMNS, ROWS>(m.bytes + at.stage * STAGE_BYTES + LEFT_BYTES, live);
    rows_cleared(WHOLE + wg);
}

/* Loads step t of o or dq: weights of the pair and a block of keys, and COLUMNS columns of these keys. */
static __device__ __forceinline__ void load_keys(const struct wide_memory &m, const bf16 *weights,
                                                 const CUtensorMap *keys, const struct wide_item &x, int t,
                                                 struct stage_at at)
{
    const uint32_t bar = begin_stage(m, at, STAGE_BYTES);
    bulk_load(m.left(at.stage), (const float *)(weights + (x.scratch + t * 2) * BLOCK_VALUES), LEFT_BYTES, bar);
#pragma unroll
    for (int i = 0; i < COLUMNS / PANEL; i++)
        tma_load(m.right(at.stage) + i * PANEL_BYTES, keys, bar, x.half * COLUMNS + i * PANEL, x.kv,
                 (int)x.first + (x.from + t) * KEYS);
}

/* Stores COLUMNS columns of a warp's 16 rows of a pair, times factor. to: the first head's first column. */
static __device__ __forceinline__ void store_rows_of(bf16 *to, int64_t ld, const float (&sum)[128],
                                                     const float factor[2], const struct wide_memory &m,
                                                     const struct wide_args &c, const struct wide_item &x, int wg)
{
    const int q0 = x.at + wg * c.p.n_query, n_live = min(c.p.n_query, x.len - q0);
    bf16 *dst = to + (x.first + q0) * ld + (int64_t)x.kv * c.p.group * WIDTH + x.half * COLUMNS;
#pragma unroll
    for (int i = 0; i < COLUMNS / PANEL; i++) {
        stage_rows<16>(m.slice(), (const float(&)[32])sum[32 * i], factor);
        store_panel<WIDTH>(dst + i * PANEL, ld, m.slice(), threadIdx.x % 128 / 32 * 16, c.p, n_live);
    }
}

/* ---- weights */

/* Item i: a pair of the chunk and COLUMNS keys. False: the item has no keys. */
static __device__ __forceinline__ bool weights_at(struct wide_item *item, const struct wide_args &c, int i)
{
    const int tile = i % tiles_of(c);
    if (!pair_at(item, c, i / tiles_of(c))) return false;
    item->kind = WEIGHTS;
    item->from += tile * TILE_BLOCKS;
    item->n = min(item->n - tile * TILE_BLOCKS, (int)TILE_BLOCKS);
    item->scratch += tile * TILE_BLOCKS * 2;
    item->part += tile * 2 * ROWS;
    return item->n > 0;
}

/* Loads 64 columns of 128 rows of q or dout, and of COLUMNS keys or values. */
static __device__ __forceinline__ void load_columns(const struct wide_memory &m, const struct wide_args &c,
                                                    const CUtensorMap *rows, const CUtensorMap *keys,
                                                    const struct wide_item &x, int column, struct stage_at at)
{
    const int row = (int)x.first + x.at, head = x.kv * c.p.group;
    const uint32_t bar = begin_stage(m, at, 2 * c.p.n_query * c.p.group * ROW_BYTES + COLUMNS * ROW_BYTES);
    tma_load(m.left(at.stage), rows, bar, column, head, row);
    tma_load(m.left(at.stage) + BLOCK_BYTES, rows, bar, column, head, row + c.p.n_query);
    tma_load(m.right(at.stage), keys, bar, column, x.kv, (int)x.first + x.from * KEYS);
}
/* The producer: q and keys, then with DP dout and values. */
template <bool DP>
static __device__ __forceinline__ void load_weights(const struct wide_memory &m, const struct wide_args &c)
{
    const uint32_t n = c.n * c.p.a.n_kv * tiles_of(c);
    struct stage_at at = {0, 0}, place = {0, 0};
    struct wide_item item = {};
    for (uint32_t i = atomicAdd(&queue.taken, 1); i < n; i = atomicAdd(&queue.taken, 1)) {
        if (!weights_at(&item, c, (int)i)) continue;
        pass_item(m, item, &place);
#pragma unroll 1
        for (int step = 0; step < (DP ? 2 : 1) * WIDTH / PANEL; step++) {
            const bool scores = step < WIDTH / PANEL;
            load_columns(m, c, scores ? &c.p.q : &c.p.dout, scores ? &c.p.k : &c.p.v, item, step * PANEL % WIDTH, at);
            at = next_stage<STAGES>(at);
        }
    }
    item.kind = NONE;
    pass_item(m, item, &place);
}

/* s = the products of 64 rows and COLUMNS keys over all columns. */
static __device__ __forceinline__ void dot_stages(float (&s)[128], const struct wide_memory &m, int wg,
                                                  struct stage_at *at)
{
    clear_sums(s);
#pragma unroll 1
    for (int i = 0; i < WIDTH / PANEL; i++) {
        mbarrier_wait(m.full(at->stage), at->parity);
        multiply_stage<false, false>(s, m.left(at->stage) + wg * BLOCK_BYTES, m.right(at->stage));
        wgmma_wait<1>();
        if (i > 0) release_before(m, *at);
        *at = next_stage<STAGES>(*at);
    }
    wgmma_wait<0>();
    wgmma_use(s);
    release_before(m, *at);
}

/* Stores a warp's 16 rows of the item's blocks. w[2 n], w[2 n + 1] of lane 4 g + q: rows g and g + 8 of keys 8 n + 2 q,
 * + 1. to: the warp's rows of the first block. */
static __device__ __forceinline__ void store_weights(bf16 *to, const uint32_t (&w)[64], char *slice, int n)
{
    const int lane = threadIdx.x % 32;
    const uint32_t from = sm90_shared(slice);
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; b++) {
        if (b >= n) break;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t x[4] = {w[16 * b + 4 * i], w[16 * b + 4 * i + 1], w[16 * b + 4 * i + 2],
                                   w[16 * b + 4 * i + 3]};
            store_matrix4(from + sm90_swizzle(lane % 16, 2 * i + lane / 16), x);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SLICE_BYTES; i += 512)
            store16(to + b * 2 * BLOCK_VALUES + (i + lane * 16) / 2, load16(slice + i + lane * 16));
    }
}

/* This thread's rows of an item: query, relative to the item's first key. inside: no weight is masked. */
struct wide_rows {
    int d[2];
    bool live[2], inside;
};
static __device__ __forceinline__ struct wide_rows rows_of(const struct attn_wgmma_args &p, const struct wide_item &x,
                                                           int wg)
{
    const int q0 = x.at + wg * p.n_query, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    struct wide_rows r;
    r.inside = p.n_query * p.group == ROWS && q0 + p.n_query <= x.len &&
               none_masked(q0, p.n_query, x.from * KEYS, COLUMNS, p.a.window);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = query_of(row + 8 * h, p.inverse);
        r.live[h] = i < p.n_query && q0 + i < x.len;
        r.d[h] = q0 + i - x.from * KEYS - threadIdx.x % 4 * 2;
    }
    return r;
}
static __device__ __forceinline__ void mask_scores(float (&s)[128], const struct wide_rows &r, int window)
{
    if (r.inside) return;
#pragma unroll
    for (int i = 0; i < 128; i++)
        if (!r.live[i / 2 % 2] || !attends_to(r.d, i, window)) s[i] = -INFINITY;
}

#endif

/* ---- host */

/* Calls launch for each chunk of pairs, all chunks of about the same size, with the arguments of the first kernel
 * (weights) and of the second (sums), which differ only in p. */
template <typename LAUNCH>
static inline void for_chunks(const struct attn_args *a, struct wide_args weights, const LAUNCH &launch)
{
    weights.p = wgmma_args_of(a, ROWS, COLUMNS);
    weights.n_block = (int)a->pairs.n_block;
    struct wide_args sums = weights;
    sums.p = wgmma_args_of(a, ROWS, KEYS);
    const int64_t n_slot = a->n_tok / (2 * weights.p.n_query) + a->n_seq;
    const int64_t most = ceil_div(n_slot, ceil_div(n_slot, a->pairs.n_pair));
    for (int64_t first = 0; first < n_slot; first += most) {
        weights.first = sums.first = (int)first;
        weights.n = sums.n = (int)MT_MIN(most, n_slot - first);
        launch(weights, sums);
    }
}
/* Values of the weights of a chunk, at most. */
static inline int64_t pair_values(const struct attn_args *a)
{
    return a->pairs.n_pair * a->n_kv * a->pairs.n_block * 2 * BLOCK_VALUES;
}

#endif
