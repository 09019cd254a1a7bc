/* attn_shared.cuh - shared by the kernels of attention whose heads share one key, which is the value too: arguments,
 * and the keys that a token sees.
 *
 * The keys of a token are numbered: first those of its window, in order, then its entries, in order (with idx: those
 * that the list names). An entry sums up `ratio` tokens (compress.cu). */
#ifndef MT_CUDA_ATTN_SHARED_H
#define MT_CUDA_ATTN_SHARED_H

#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rows.cuh"

#define LOG2_E 1.44269504f

/* Passed by value to every kernel. */
struct shared_args {
    const int32_t *cu;
    int n_seq, n_tok, n_head, dim, window;
    int n_sm;           /* of the GPU */
    int ratio, n_entry; /* ratio 0: no entries; rows of `entry` */
    float scale;
    const bf16 *q, *kv, *entry;
    int64_t ld_q, ld_kv, ld_entry;
    const int32_t *idx; /* [T, top] or NULL */
    int64_t ld_idx;
    int top;
    const float *sinks; /* [H] or NULL; forward only */
    bf16 *o;
    int64_t ld_o;
    float *lse;
    int64_t ld_lse;
    const bf16 *dout; /* this and the fields below: backward only */
    int64_t ld_dout;
    bf16 *dq, *dkv, *dentry;
    int64_t ld_dq, ld_dkv, ld_dentry;
};

/* What a token sees. */
struct sight {
    int first, end;         /* rows of its sequence */
    int first_key, n_near;  /* its window: rows of kv */
    int first_entry, n_far; /* row of entry 0 of its sequence; its visible entries, before a list selects some */
    const int32_t *list;    /* of entries, or NULL: all */
};
__device__ static inline struct sight sight_of(const struct shared_args &a, int t)
{
    int low = 0, high = a.n_seq - 1; /* the last sequence that begins at row t or before */
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (a.cu[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    const int first = a.cu[low], i = t - first;
    struct sight s;
    s.first = first;
    s.end = a.cu[low + 1];
    s.n_near = min(i + 1, a.window);
    s.first_key = t - s.n_near + 1;
    s.first_entry = a.ratio ? first / a.ratio : 0;
    s.n_far = a.ratio ? (i + 1) / a.ratio : 0;
    s.list = a.idx ? a.idx + t * a.ld_idx : NULL;
    return s;
}
/* Whether element p of the list is a visible entry. Lists ascend and end with -1. */
__device__ static inline bool listed(const struct sight &s, int p) { return s.list[p] >= 0 && s.list[p] < s.n_far; }

/* Number of keys of a token. A warp calls it; each step divides what is left of the list by 32. */
__device__ static inline int count_keys(const struct shared_args &a, const struct sight &s)
{
    if (!s.list) return s.n_near + s.n_far;
    int low = 0, high = a.top; /* elements before low are visible, those from high on are not */
    while (low < high) {
        const int step = (high - low + 31) / 32, last = low + (threadIdx.x % 32 + 1) * step - 1;
        low += step * __popc(__ballot_sync(~0u, last < high && listed(s, last)));
        high = min(high, low + step - 1);
    }
    return s.n_near + low;
}

/* 2^x with an error of at most 2 ulp; 0 for -inf. */
__device__ static inline float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- kernels for 64, 128, ... heads of 512 columns */

enum { SHARED_COLUMNS = 256 }; /* columns of an item (struct shared_item) */

/* The backward processes the tokens in chunks. A chunk and its scratch; slot i of a token is its i-th key. */
struct shared_chunk {
    int first, n;        /* tokens */
    int n_slot;          /* slots of a token */
    int n_window, n_far; /* blocks of kv, and of the entries, that an item's tokens may see */
    bf16 *p, *ds;        /* [n, H / 64, n_slot, 64]: weights, and scale ds */
    float *part;         /* [n / 32, n_window + n_far, 2, 192, 256]: sums over the tokens of an item */
    float *dkv, *dentry; /* [T, 512], [N, 512]: sums so far, of rows that later tokens see too */
};
/* An item of the gradients of keys: the terms of tokens first .. first + n - 1 for 192 rows, in the 256 columns from
 * 256 half on. Row r is row near + r of kv while r < split, then row far + r - split of the entries: the windows of 32
 * tokens leave rows for the first entries that these tokens see. */
struct shared_item {
    int first, n, half, near, split, far;
    bool seen; /* a token may see a row; otherwise the item is not computed */
};

/* Rows of the entries that tokens first .. last see, at most: [x, y). */
__device__ static inline int2 far_range(const struct shared_args &a, int first, int last)
{
    const struct sight s = sight_of(a, last);
    return make_int2(sight_of(a, first).first_entry, s.first_entry + s.n_far);
}
/* Rows of kv that the windows of an item's tokens cover; rows of their n_window blocks that are free for entries. */
__device__ static inline int near_rows(const struct shared_args &a) { return a.window + SHARED_TOKENS - 1; }
__device__ static inline int spare_rows(const struct shared_args &a, const struct shared_chunk &x)
{
    return x.n_window * SHARED_BLOCK - near_rows(a);
}
__device__ static inline struct shared_item item_of(const struct shared_args &a, const struct shared_chunk &x,
                                                    int index)
{
    const int n_block = x.n_window + x.n_far, block = index / 2 % n_block;
    const int at = index / 2 / n_block * SHARED_TOKENS;
    struct shared_item m;
    m.first = x.first + at;
    m.n = min((int)SHARED_TOKENS, x.n - at);
    m.half = index % 2;
    const int2 range = far_range(a, m.first, m.first + m.n - 1);
    if (block < x.n_window) {
        m.near = m.first - a.window + 1 + block * SHARED_BLOCK; /* may be negative */
        m.split = min((int)SHARED_BLOCK, near_rows(a) - block * SHARED_BLOCK);
        m.far = range.x;
        m.seen = true;
    } else {
        m.near = m.split = 0;
        m.far = range.x + spare_rows(a, x) + (block - x.n_window) * SHARED_BLOCK; /* after entries in window blocks */
        m.seen = m.far < range.y;
    }
    return m;
}

/* The tokens of an item that see one of its rows. */
struct shared_live {
    int n, token[SHARED_TOKENS]; /* the tokens that see a row: index in the item */
    int bits[SHARED_TOKENS];     /* of each token of the item. Bit i: the token sees one of rows 64 i .. 64 i + 63 */
    int4 owned[SHARED_TOKENS];   /* first and end row in kv, and in the entries, of the token's sequence */
};

/* map[r] = which key of token t (struct shared_chunk) row base + r of an item is; -1: t does not see it. Returns t's
 * element of shared_live.bits. A warp calls it. */
template <int ROWS>
__device__ static inline int map_token(int *map, const struct shared_args &a, int t, const struct shared_item &m,
                                       int base)
{
    const int lane = threadIdx.x % 32;
    const struct sight s = sight_of(a, t);
    int found = 0;
    for (int r = lane; r < ROWS; r += 32) {
        const int row = base + r;
        const bool entry = row >= m.split;
        const int slot = entry ? m.far + row - m.split - s.first_entry : m.near + row - s.first_key;
        const bool seen = slot >= 0 && slot < (entry ? s.n_far : s.n_near) && !(entry && s.list);
        map[r] = seen ? slot + (entry ? s.n_near : 0) : -1;
        if (seen) found |= 1 << (r / 64);
    }
    const int end = m.far + SHARED_BLOCK - m.split; /* of the entries */
    if (s.list && end > s.first_entry && m.far < s.first_entry + s.n_far) {
        __syncwarp();
        for (int p = lane; p < a.top; p += 32) {
            const int row = s.list[p] + s.first_entry - m.far + m.split, r = row - base;
            if (!listed(s, p) || row < m.split || r < 0 || r >= ROWS) continue;
            map[r] = s.n_near + p;
            found |= 1 << (r / 64);
        }
    }
    return __reduce_or_sync(~0u, found);
}
/* Whether row `row` of an item is one of a sequence. owned: an element of shared_live.owned. */
__device__ static inline bool owns(const struct shared_item &m, int4 owned, int row)
{
    const int x = row < m.split ? m.near + row : m.far + row - m.split;
    return row < m.split ? x >= owned.x && x < owned.y : x >= owned.z && x < owned.w;
}
/* Fills map [32, ROWS] and live for an item's rows from `base` on. All warps of a block call it; it ends with a
 * barrier. */
template <int ROWS>
__device__ static inline void map_item(int *map, struct shared_live *live, const struct shared_args &a,
                                       const struct shared_item &m, int base)
{
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < SHARED_TOKENS; i += blockDim.x / 32) {
        const int bits = i < m.n ? map_token<ROWS>(map + i * ROWS, a, m.first + i, m, base) : 0;
        if (lane) continue;
        const struct sight s = sight_of(a, m.first + min(i, m.n - 1));
        live->bits[i] = bits;
        live->owned[i] =
            make_int4(s.first, s.end, s.first_entry, s.first_entry + (a.ratio ? (s.end - s.first) / a.ratio : 0));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const bool any = live->bits[lane];
        const uint32_t all = __ballot_sync(~0u, any);
        if (any) live->token[__popc(all & ((1u << lane) - 1))] = lane;
        if (lane == 0) live->n = __popc(all);
    }
    __syncthreads();
}

/* shared_fwd_*: o and lse. shared_dq_*: dq, p and ds of a chunk. shared_dkey_*: the parts of its items. */
typedef void shared_fwd_run(const struct shared_args *a);
typedef void shared_bwd_run(const struct shared_args *a, const struct shared_chunk *x);
shared_fwd_run shared_fwd_wgmma, shared_fwd_mma;
shared_bwd_run shared_dq_wgmma, shared_dq_mma, shared_dkey_wgmma, shared_dkey_mma;

#endif
