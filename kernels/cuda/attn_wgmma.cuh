/* attn_wgmma.cuh - what Hopper's attention kernels share, forward and backward, heads of 64.
 *
 * The query heads of one kv head go together: head g of the group at query i is row i * group + g of a tile, and one
 * tile of keys and values serves them all. A tensor map sees a matrix [T, heads * 64] as [T, heads, 64], so that a box
 * of `group` heads and some queries lands in shared memory in just that order, rows of 128 bytes, swizzled. Boxes reach
 * over the end of a sequence into the next one. Such rows may hold NaN or infinity, and 0 times those is NaN. Before a
 * product sums over the rows of a tile, clear_rows therefore sets those beyond the end to zero: values (o), keys and
 * values (dq), queries and dout (dk, dv). Only the last tile of an item can reach over the end. Rows that no product
 * sums over stay as they are and are not stored.
 *
 * One warpgroup loads, the others multiply. Every warp that is done with a buffer arrives on its `empty` barrier. */
#ifndef MT_CUDA_ATTN_WGMMA_H
#define MT_CUDA_ATTN_WGMMA_H

#include <string.h>

#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/sm90.cuh"

enum {
    HEAD = 64, /* elements of a head: one row of the swizzle */
    ROW_BYTES = 128,
    KEYS = 96, /* keys of a tile that queries walk over */
    KEY_BYTES = KEYS * ROW_BYTES,
    LOADER = 128 /* threads of the loading warpgroup; it keeps few registers */
};

struct attn_wgmma_args {
    CUtensorMap q, dout; /* boxes of n_query queries and the heads of a group */
    CUtensorMap kv;      /* the same matrix as q: some rows of one head */
    struct attn_args a;
    int group, n_query;
    uint32_t inverse; /* 2^16 / group, rounded up */
    int n_item;
};

/* Query of a row of a tile, counted from the tile's first; n_query and more for the rows left over. Exact for row *
 * group < 2^16. */
__host__ __device__ static inline int query_of(int row, uint32_t inverse) { return (int)(row * inverse >> 16); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* A buffer of a ring, and the parity of its use. */
struct place {
    int stage;
    uint32_t parity;
};
template <int STAGES> __device__ static __forceinline__ struct place next_place(struct place p)
{
    p.stage++;
    if (p.stage == STAGES) {
        p.stage = 0;
        p.parity ^= 1;
    }
    return p;
}

/* This warp is done with what `empty` guards. */
__device__ static __forceinline__ void give_back(uint32_t empty)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

/* Rows from `live` on of a tile of n rows become zeros. All threads of a warpgroup call; rows_cleared must follow
 * before they multiply by the tile. Warpgroups that share a tile each clear it: they write the same. */
__device__ static __forceinline__ void clear_rows(char *tile, int live, int n)
{
    for (int i = live * 8 + threadIdx.x % 128; i < n * 8; i += 128) ((uint4 *)tile)[i] = make_uint4(0, 0, 0, 0);
}
__device__ static __forceinline__ void rows_cleared(int barrier)
{
    fence_proxy_async(); /* before wgmma reads there and the copy engine writes there again */
    warpgroup_barrier(barrier);
}

/* Before the wait that follows, `never` is known, and with it all that it is made of. Left alone, the compiler puts the
 * wait first and the arithmetic that should run beside the products behind it. */
__device__ static __forceinline__ void before_wait(bool never)
{
    if (never) asm volatile("nanosleep.u32 1;" ::: "memory");
}

/* Which warpgroup this is; the compiler sees that it is one number in a warp. */
__device__ static __forceinline__ int warpgroup_index() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

/* A tile of n_query queries of all heads of a group, and the keys they see: n_tile tiles from begin on. */
struct item {
    int64_t first; /* row of the batch where the sequence begins */
    int len, q0, kv, begin, n_tile;
};
/* Block b of a grid takes items b, 2n-1-b, 2n+b, ..: the longest come first, and to and fro all get the same work.
 * False: nothing there. */
__device__ static __forceinline__ bool item_at(struct item *item, const struct attn_wgmma_args &p, int round)
{
    const int b = blockIdx.x, i = round * gridDim.x + (round % 2 ? gridDim.x - 1 - b : b);
    if (i >= p.n_item) return false;
    const struct seq_block seq = find_block(p.a, i / p.a.n_kv, p.n_query);
    item->first = seq.first;
    item->len = seq.len;
    item->q0 = (seq.n_block - 1 - seq.block) * p.n_query;
    item->kv = i % p.a.n_kv;
    item->begin = max(0, item->q0 - p.a.window + 1);
    item->n_tile = (min(item->q0 + p.n_query, seq.len) - item->begin + KEYS - 1) / KEYS;
    return item->q0 >= 0;
}
__device__ static __forceinline__ int n_round(const struct attn_wgmma_args &p)
{
    return (p.n_item + gridDim.x - 1) / gridDim.x;
}

/* Whether the query sees the key of element i of scores; d[h]: query of row 8 h of this thread less its first key. */
__device__ static __forceinline__ bool sees_key(const int d[2], int i, int window)
{
    return (unsigned)(d[i / 2 % 2] - 8 * (i / 4) - i % 2) < (unsigned)window;
}

/* s = a b^T over a head: a of 64 rows and b of N rows, both swizzled tiles. */
template <int N> __device__ static __forceinline__ void dot_heads(float (&s)[N], uint32_t a, uint32_t b)
{
    const uint64_t a_desc = sm90_descriptor(a, 16, 1024), b_desc = sm90_descriptor(b, 16, 1024);
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) wgmma<false>(s, a_desc + 2 * k, b_desc + 2 * k, k > 0);
}
/* The same with a in registers. */
__device__ static __forceinline__ void dot_held_heads(float (&s)[32], const uint32_t (&a)[HEAD / 16][4], uint32_t b)
{
    const uint64_t b_desc = sm90_descriptor(b, 16, 1024);
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) wgmma<false>(s, a[k], b_desc + 2 * k, k > 0);
}
/* acc += w b: w [64, 16 STEPS] in registers, b of 16 STEPS rows. */
template <int STEPS>
__device__ static __forceinline__ void add_rows(float (&acc)[32], const uint32_t (&w)[STEPS][4], uint32_t b)
{
    const uint64_t b_desc = sm90_descriptor(b, 16, 1024);
#pragma unroll
    for (int k = 0; k < STEPS; k++) wgmma<true>(acc, w[k], b_desc + 128 * k, true);
}

/* An accumulator, rounded, as a first operand. */
template <int STEPS>
__device__ static __forceinline__ void pack_rows(uint32_t (&w)[STEPS][4], const float (&s)[8 * STEPS])
{
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[k][i] = pack2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
}

/* For before_wait(): a condition on all of s, hardly ever true. */
template <int N> __device__ static __forceinline__ bool is_odd_one(const float (&s)[N])
{
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < N; i++) all ^= __float_as_uint(s[i]);
    return all == 0x7fc17fc1;
}

/* A warp's 16 rows of acc, times factor[h] and rounded, into its 16 rows of a swizzled tile; the warp alone uses them.
 */
__device__ static __forceinline__ void stage_rows(char *tile, const float (&acc)[32], const float factor[2])
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) {
        char *to = tile + sm90_swizzle(lane / 4, n) + lane % 4 * 4;
        *(uint32_t *)to = pack2(factor[0] * acc[4 * n], factor[0] * acc[4 * n + 1]);
        *(uint32_t *)(to + 8 * ROW_BYTES) = pack2(factor[1] * acc[4 * n + 2], factor[1] * acc[4 * n + 3]);
    }
    __syncwarp();
}
/* Those 16 rows, rows row .. of an item's tile, to a matrix whose row 0 is the item's first query and first head. */
__device__ static __forceinline__ void store_queries(bf16 *dst, int64_t ld, const char *tile, int row,
                                                     const struct attn_wgmma_args &p, int n_live)
{
    const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int r = lane / 8; r < 16; r += 4) {
        const int query = query_of(row + r, p.inverse), g = row + r - query * p.group;
        if (query < n_live) store16(dst + query * ld + g * HEAD + chunk * 8, load16(tile + sm90_swizzle(r, chunk)));
    }
}

#endif

/* ---- host ---- */

/* [n_tok, n_head, 64] bf16, rows ld apart, in boxes of box_rows x box_heads x 64. */
static inline CUtensorMap heads_map(const bf16 *base, int64_t n_head, int64_t n_tok, int64_t ld, int box_heads,
                                    int box_rows)
{
    const int64_t size[3] = {HEAD, n_head, n_tok}, stride[2] = {ROW_BYTES, ld * 2};
    const int64_t box[3] = {HEAD, box_heads, box_rows};
    return sm90_tensor_map(base, size, stride, box);
}

/* For tiles of `rows` rows of queries, and boxes of `keys` keys. */
static inline struct attn_wgmma_args wgmma_args_of(const struct attn_args *a, int rows, int keys)
{
    struct attn_wgmma_args p;
    const int64_t n_col = a->n_head + 2 * a->n_kv;
    memset(&p, 0, sizeof(p));
    p.a = *a;
    p.group = a->n_head / a->n_kv;
    p.n_query = rows / p.group;
    p.inverse = (65536 + p.group - 1) / p.group;
    p.n_item = (int)attn_grid(a, p.n_query, a->n_kv);
    p.q = heads_map(a->qkv, n_col, a->n_tok, a->ld_qkv, p.group, p.n_query);
    p.kv = heads_map(a->qkv, n_col, a->n_tok, a->ld_qkv, 1, keys);
    if (a->dout) p.dout = heads_map(a->dout, a->n_head, a->n_tok, a->ld_dout, p.group, p.n_query);
    return p;
}

#endif
