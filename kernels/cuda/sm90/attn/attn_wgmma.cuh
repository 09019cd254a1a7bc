/* attn_wgmma.cuh - shared by the Hopper attention kernels, forward and backward.
 *
 * The query heads of one kv head (a group) share its tiles of keys and values: row i * group + g of a query tile is
 * head g of the group at query i. A tensor map describes a matrix [T, heads * A] as [T, heads, A], so a TMA box of
 * `group` heads and some queries has this order in shared memory. A tile of N rows is A / 64 panels, one after the
 * other. A panel has 64 elements of each row: N rows of 128 bytes, swizzled.
 *
 * Boxes extend over the end of a sequence into the next one, whose rows may hold NaN or infinity; 0 times those is NaN.
 * Therefore clear_rows zeroes the rows beyond the end before a product sums over the rows of a tile: values (o), keys
 * and values (dq), queries and dout (dk, dv). Only the last tile of an item (struct item) can extend over the end. Rows
 * that no product sums over are not cleared and not stored.
 *
 * One producer warpgroup loads, the others are consumers. Every consumer warp arrives on the `empty` barrier of a stage
 * that it no longer reads. */
#ifndef MT_CUDA_ATTN_WGMMA_H
#define MT_CUDA_ATTN_WGMMA_H

#include <string.h>

#include "kernels/cuda/parts/attn.cuh"
#include "kernels/cuda/sm90/sm90.cuh"

enum {
    PANEL = 64,                      /* elements of a row of a panel: one row of the swizzle */
    ROW_BYTES = 128,                 /* of a panel */
    LOADER = 128,                    /* threads of the producer warpgroup */
    NEAR_HEADS = 8,                  /* kv heads that are processed at about the same time, at most */
    SHARED_LIMIT = 227 * 1024 - 256, /* bytes of a block, less its barriers */

    PAIR_CONSUMERS = 2 * 128, /* a block of two consumer warpgroups */
    PAIR_THREADS = PAIR_CONSUMERS + LOADER,
    PAIR_LOADER_REGISTERS = 24, /* 24 + 2 * 240 = 3 * 168, the registers of the block at launch */
    PAIR_REGISTERS = 240,
    WHOLE = 4 /* named barrier WHOLE + g: the threads of warpgroup g */
};

struct attn_wgmma_args {
    CUtensorMap q, dout; /* boxes of n_query queries and the heads of a group */
    CUtensorMap k, v;    /* boxes of some rows of one head */
    struct attn_args a;
    int group, n_query;
    int n_near;       /* kv heads that are processed at about the same time */
    uint32_t inverse; /* 2^16 / group, rounded up */
    int n_item;
    int keys_from, keys_end; /* the launch computes sequences whose attn_mean_keys is keys_from .. keys_end - 1 */
};

/* Index in the tile of the query of a row: row / group. n_query or more for unused rows. Exact for row * group < 2^16.
 */
__host__ __device__ static inline int query_of(int row, uint32_t inverse) { return (int)(row * inverse >> 16); }

/* The queue of a kernel's items (take_item). It is zero again after every kernel. */
struct item_queue {
    uint32_t taken, finished; /* items that blocks have taken, blocks that found no more */
};
static __device__ struct item_queue queue;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A stage of a pipeline, and the parity of its mbarrier phase. */
struct stage_at {
    int stage;
    uint32_t parity;
};
template <int STAGES> __device__ static __forceinline__ struct stage_at next_stage(struct stage_at p)
{
    p.stage++;
    if (p.stage == STAGES) {
        p.stage = 0;
        p.parity ^= 1;
    }
    return p;
}

/* This warp no longer reads the stage of barrier `empty`. */
__device__ static __forceinline__ void release_stage(uint32_t empty)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

/* Loads a box into a tile of WIDTH / 64 panels of ROWS rows. */
template <int WIDTH, int ROWS>
__device__ static __forceinline__ void load_panels(uint32_t tile, const CUtensorMap *map, uint32_t bar, int head,
                                                   int row)
{
#pragma unroll
    for (int c = 0; c < WIDTH / PANEL; c++) tma_load(tile + c * ROWS * ROW_BYTES, map, bar, c * PANEL, head, row);
}

/* Zeroes the rows of a tile from row `live` on. All threads of a warpgroup call it, then rows_cleared before a product
 * reads the tile. Warpgroups that share a tile all clear it. */
template <int WIDTH, int ROWS> __device__ static __forceinline__ void clear_rows(char *tile, int live)
{
    for (int c = 0; c < WIDTH / PANEL; c++, tile += ROWS * ROW_BYTES)
        for (int i = live * 8 + threadIdx.x % 128; i < ROWS * 8; i += 128) ((uint4 *)tile)[i] = make_uint4(0, 0, 0, 0);
}
__device__ static __forceinline__ void rows_cleared(int barrier)
{
    fence_proxy_async(); /* before wgmma reads and TMA rewrites the tile */
    warpgroup_barrier(barrier);
}

/* Keeps the arithmetic that computes `never`, which is always false, before the wait that follows, so that it overlaps
 * with the products. Otherwise the compiler moves the wait before the arithmetic. */
__device__ static __forceinline__ void before_wait(bool never)
{
    if (never) asm volatile("nanosleep.u32 1;" ::: "memory");
}

/* Warpgroup of this thread; the shuffle tells the compiler that it is uniform in a warp. */
__device__ static __forceinline__ int warpgroup_index() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

/* The block of queries, as a slot of find_block, and the kv head of item i of n. All items of n_near kv heads come
 * before those of the next n_near heads. So blocks that run at about the same time read the same rows, from L2. */
struct slot {
    int slot, kv;
};
__device__ static __forceinline__ struct slot slot_at(const struct attn_wgmma_args &p, int i, int n)
{
    const int n_slot = n / p.a.n_kv, first = i / (p.n_near * n_slot) * p.n_near;
    const int n_head = min(p.n_near, p.a.n_kv - first), rest = i - first * n_slot;
    return {rest / n_head, first + rest % n_head};
}

/* An item: a tile of n_query queries of all heads of a group, and the keys that they attend to, n_tile tiles from key
 * `begin` on. The producer takes items and passes them in shared memory; n_tile 0: there are no more. */
struct item {
    int64_t first; /* row of the batch where the sequence begins */
    int len, q0, kv, begin, n_tile;
};
/* Item i; false: an unused slot, or a sequence that another launch computes. */
template <int KEYS>
__device__ static __forceinline__ bool item_at(struct item *item, const struct attn_wgmma_args &p, int i)
{
    const struct slot at = slot_at(p, i, p.n_item);
    const struct seq_block seq = find_block(p.a, at.slot, p.n_query);
    item->first = seq.first;
    item->len = seq.len;
    item->q0 = (seq.n_block - 1 - seq.block) * p.n_query; /* queries with the most keys first */
    item->kv = at.kv;
    item->begin = max(0, item->q0 - p.a.window + 1);
    item->n_tile = (min(item->q0 + p.n_query, seq.len) - item->begin + KEYS - 1) / KEYS;
    const int keys = attn_mean_keys(p.a, seq.len);
    return item->q0 >= 0 && keys >= p.keys_from && keys < p.keys_end;
}

/* One thread of a block takes the next item from the queue, so that no block idles while others have work. False when
 * there are no more; not called again then. */
template <int KEYS> __device__ static __forceinline__ bool take_item(struct item *item, const struct attn_wgmma_args &p)
{
    for (;;) {
        const uint32_t i = atomicAdd(&queue.taken, 1);
        if (i >= (uint32_t)p.n_item) break;
        if (item_at<KEYS>(item, p, (int)i)) return true;
    }
    if (atomicAdd(&queue.finished, 1) == gridDim.x - 1) queue = {};
    return false;
}

/* Whether the query attends to the key of element i of the scores. d[h]: query of this thread's row 8 h - its first
 * key. */
__device__ static __forceinline__ bool attends_to(const int d[2], int i, int window)
{
    return (unsigned)(d[i / 2 % 2] - 8 * (i / 4) - i % 2) < (unsigned)window;
}

/* Sets the scores s [keys, 64 queries] to -inf where the query does not attend to the key. distance: the
 * first query of the tile - the first key of this thread. */
__device__ static __forceinline__ void mask_queries(float (&s)[32], int distance, uint32_t inverse, int window)
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int column = 8 * (i / 4) + threadIdx.x % 4 * 2 + i % 2;
        const int d = distance + query_of(column, inverse) - 8 * (i / 2 % 2);
        if ((unsigned)d >= (unsigned)window) s[i] = -INFINITY;
    }
}

/* s = a b^T over WIDTH elements: 64 rows of a tile of A_ROWS, and a tile of 2 N rows. Descriptors count 16 bytes. */
template <int WIDTH, int A_ROWS, int N>
__device__ static __forceinline__ void dot_heads(float (&s)[N], uint32_t a, uint32_t b)
{
    const uint64_t a_desc = sm90_descriptor(a, 16, 1024), b_desc = sm90_descriptor(b, 16, 1024);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
        wgmma<false>(s, a_desc + k / 4 * A_ROWS * 8 + k % 4 * 2, b_desc + k / 4 * 2 * N * 8 + k % 4 * 2, k > 0);
}
/* dot_heads with a in registers, for rows of one panel. */
__device__ static __forceinline__ void dot_register_heads(float (&s)[32], const uint32_t (&a)[PANEL / 16][4],
                                                          uint32_t b)
{
    const uint64_t b_desc = sm90_descriptor(b, 16, 1024);
#pragma unroll
    for (int k = 0; k < PANEL / 16; k++) wgmma<false>(s, a[k], b_desc + 2 * k, k > 0);
}
/* acc += w b: w [64, 16 STEPS] in registers, b a tile of 16 STEPS rows, 2 N elements wide. */
template <int N, int STEPS>
__device__ static __forceinline__ void add_rows(float (&acc)[N], const uint32_t (&w)[STEPS][4], uint32_t b)
{
    const uint64_t b_desc = sm90_descriptor(b, 16 * STEPS * ROW_BYTES, 1024);
#pragma unroll
    for (int k = 0; k < STEPS; k++) wgmma<true>(acc, w[k], b_desc + 128 * k, true);
}

/* Rounds an accumulator to bf16, in the layout of an A operand. */
template <int STEPS>
__device__ static __forceinline__ void pack_rows(uint32_t (&w)[STEPS][4], const float (&s)[8 * STEPS])
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[k][i] = pack2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
}

/* For before_wait: a condition that depends on every element of s and is practically never true. */
template <int N> __device__ static __forceinline__ bool practically_never(const float (&s)[N])
{
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < N; i++) all ^= __float_as_uint(s[i]);
    return all == 0x7fc17fc1;
}

/* Writes a warp's 16 rows of acc, times factor[h], as bf16 into its 16 rows of a tile of ROWS. No other warp may use
 * these rows. */
template <int ROWS, int N>
__device__ static __forceinline__ void stage_rows(char *tile, const float (&acc)[N], const float factor[2])
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        char *to = tile + n / 8 * ROWS * ROW_BYTES + sm90_swizzle(lane / 4, n % 8) + lane % 4 * 4;
        *(uint32_t *)to = pack2(factor[0] * acc[4 * n], factor[0] * acc[4 * n + 1]);
        *(uint32_t *)(to + 8 * ROW_BYTES) = pack2(factor[1] * acc[4 * n + 2], factor[1] * acc[4 * n + 3]);
    }
    __syncwarp();
}
/* Stores 16 rows of a panel, from row `row` of a tile of queries on. dst: the tile's first query and first head. */
template <int WIDTH>
__device__ static __forceinline__ void store_panel(bf16 *dst, int64_t ld, const char *rows, int row,
                                                   const struct attn_wgmma_args &p, int n_live)
{
    const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
        const int query = query_of(row + r, p.inverse), g = row + r - query * p.group;
        if (query < n_live) store16(dst + query * ld + g * WIDTH + chunk * 8, load16(rows + sm90_swizzle(r, chunk)));
    }
}
template <int WIDTH, int ROWS>
__device__ static __forceinline__ void store_queries(bf16 *dst, int64_t ld, const char *tile, int row,
                                                     const struct attn_wgmma_args &p, int n_live)
{
#pragma unroll
    for (int c = 0; c < WIDTH / PANEL; c++)
        store_panel<WIDTH>(dst + c * PANEL, ld, tile + c * ROWS * ROW_BYTES, row, p, n_live);
}
/* Stores the first n of a warp's 16 rows of a tile. dst: the first row. */
template <int WIDTH, int ROWS>
__device__ static __forceinline__ void store_keys(bf16 *dst, int64_t ld, const char *tile, int n)
{
    const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
        if (r >= n) continue;
#pragma unroll
        for (int c = 0; c < WIDTH / PANEL; c++)
            store16(dst + r * ld + c * PANEL + chunk * 8, load16(tile + c * ROWS * ROW_BYTES + sm90_swizzle(r, chunk)));
    }
}

#endif

/* ---- host ---- */

/* [n_tok, n_head, width] bf16, rows ld apart, in boxes of box_rows x box_heads x 64. */
static inline CUtensorMap heads_map(const bf16 *base, int64_t n_head, int64_t width, int64_t n_tok, int64_t ld,
                                    int box_heads, int box_rows)
{
    const int64_t size[3] = {width, n_head, n_tok}, stride[2] = {width * 2, ld * 2};
    const int64_t box[3] = {PANEL, box_heads, box_rows};
    return sm90_tensor_map(base, size, stride, box);
}

/* The arguments of kernels with tiles of `rows` rows of queries, and boxes of `keys` keys. */
static inline struct attn_wgmma_args wgmma_args_of(const struct attn_args *a, int rows, int keys)
{
    struct attn_wgmma_args p;
    memset(&p, 0, sizeof(p));
    p.a = *a;
    p.keys_end = INT32_MAX;
    p.group = a->n_head / a->n_kv;
    const int n_turn = (a->n_kv + NEAR_HEADS - 1) / NEAR_HEADS;
    p.n_near = (a->n_kv + n_turn - 1) / n_turn;
    p.n_query = rows / p.group;
    p.inverse = (65536 + p.group - 1) / p.group;
    p.n_item = (int)attn_grid(a, p.n_query, a->n_kv);
    p.q = heads_map(a->qkv, a->n_head, a->dim, a->n_tok, a->ld_qkv, p.group, p.n_query);
    p.k = heads_map(a->qkv + (int64_t)a->n_head * a->dim, a->n_kv, a->dim, a->n_tok, a->ld_qkv, 1, keys);
    p.v = heads_map(a->qkv + value_col(*a, 0), a->n_kv, a->dim_v, a->n_tok, a->ld_qkv, 1, keys);
    if (a->dout) p.dout = heads_map(a->dout, a->n_head, a->dim_v, a->n_tok, a->ld_dout, p.group, p.n_query);
    return p;
}

#endif
