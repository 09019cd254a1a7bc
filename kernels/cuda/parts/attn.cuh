/* attn.cuh - shared by the forward and backward attention kernels: the causal and window mask, and the rows of each
 * block of the grid. Tiles: tiles.cuh. */
#ifndef MT_CUDA_ATTN_H
#define MT_CUDA_ATTN_H

#include "kernels/cuda/parts/seqs.cuh"
#include "kernels/cuda/parts/tiles.cuh"

enum { ATTN_THREADS = TILE_THREADS, NO_WINDOW = 1 << 29 };

/* Passed by value to every kernel. Pointers are at row 0 of the batch. */
struct attn_args {
    const int32_t *cu;
    int n_seq, n_tok, n_head, n_kv;
    int dim;     /* head width, a multiple of 8, at most DIM; the rest of a tile's row is zeros and is not stored */
    int dim_v;   /* likewise, of values and outputs */
    int window;  /* keys that a query attends to, itself included; NO_WINDOW: all before it */
    int max_len; /* no sequence is longer */
    float scale, scale_log2;
    const bf16 *qkv;
    int64_t ld_qkv;
    const float *sinks; /* [H] or NULL; forward only */
    bf16 *o;
    int64_t ld_o;
    float *lse;
    int64_t ld_lse;
    uint32_t *key_norm; /* forward on Hopper: attn_norm_at; NULL: not known */
    const bf16 *dout;   /* this and the fields below: backward only */
    int64_t ld_dout;
    bf16 *dqkv;
    int64_t ld_dqkv;
    float2 *stat;   /* [H / stat_group, T, stat_group]: lse / ln 2 and <dout, o>; then one entry that makes p = 0 */
    int stat_group; /* number of adjacent heads in stat */
    struct scratch_pairs pairs; /* Hopper, heads of 512: weights */
    float *dq_sum;  /* f32 sums on Hopper: of dk and dv (heads of 512); of dq, where blocks of keys add to it */
    uint32_t *turn; /* with sums of dq: [K, T], 0 at launch; counts the blocks of keys that have added to the tile that
                     * begins at a token */
    uint32_t *ticket;      /* with sums of dq: a counter, 0 at launch */
    const int32_t *prefix; /* of struct seqs, or NULL; read by kernels with PREFIX alone */
};

/* The mean number of keys that a query of a sequence attends to. Tiles are chosen by it, so that the bits of a sequence
 * do not depend on other sequences of the batch. */
__host__ __device__ static inline int attn_mean_keys(const struct attn_args &a, int len)
{
    return MT_MIN((len + 1) / 2, a.window);
}

/* Whether the forward on Hopper bounds the scores of a sequence by the norms of its keys. For each BOUNDED_LEN rows of
 * the batch and each kv head, key_norm has the bits of the largest |k|^2. */
__host__ __device__ static inline bool attn_bounded(const struct attn_args &a, int len)
{
    return (int64_t)attn_mean_keys(a, len) * (a.n_head / a.n_kv) >= BOUNDED_KEYS;
}
/* The index in key_norm of kv head 0 of the sequence that begins at row `first`. key_norm has attn_norm_at(a, n_tok) +
 * n_kv entries. */
__host__ __device__ static inline int64_t attn_norm_at(const struct attn_args &a, int64_t first)
{
    return first / BOUNDED_LEN(a.n_head / a.n_kv) * a.n_kv;
}

/* ---- which rows ---- */

/* The block of `size` rows of grid slot `slot` (struct seq_block). */
__device__ static inline struct seq_block find_block(const struct attn_args &a, int slot, int size)
{
    return find_seq_block(a.cu, a.n_seq, slot, size);
}
__device__ static inline int blocks_of(const struct attn_args &a, int s, int size)
{
    return s < a.n_seq ? (a.cu[s + 1] - a.cu[s] + size - 1) / size : 0;
}
/* Number of blocks that are at least the n-th from the end of their sequence. All lanes of a warp call it. */
__device__ static inline int blocks_behind(const struct attn_args &a, int n, int size)
{
    int sum = 0;
    for (int s = threadIdx.x % 32; s < a.n_seq; s += 32) sum += max(blocks_of(a, s, size) + 1 - n, 0);
    return __reduce_add_sync(~0u, sum);
}
/* find_block in another order, for kernels whose blocks hold keys: blocks with the most later blocks in their sequence
 * come first. These have the most queries, and so the most work. All lanes of a warp call it. */
__device__ static inline struct seq_block find_longest(const struct attn_args &a, int slot, int size)
{
    enum { MOST = 256 }; /* counting the blocks of more sequences takes too long */
    if (a.n_seq > MOST || a.window != NO_WINDOW) return find_block(a, slot, size);
    int low = 0, high = a.n_tok / size + 2; /* blocks_behind(high) <= slot; blocks_behind(low) > slot where low > 0 */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (blocks_behind(a, middle, size) > slot ? low : high) = middle;
    }
    int rest = slot - blocks_behind(a, high, size); /* index among the sequences with at least `low` blocks */
    for (int first = 0; low && first < a.n_seq; first += 32) {
        uint32_t having = __ballot_sync(~0u, blocks_of(a, first + threadIdx.x % 32, size) >= low);
        if (rest >= __popc(having)) {
            rest -= __popc(having);
            continue;
        }
        for (; rest > 0; rest--) having &= having - 1;
        const int s = first + __ffs((int)having) - 1, n = blocks_of(a, s, size);
        return {a.cu[s], a.cu[s + 1] - a.cu[s], n - low, n, s};
    }
    return {0, 0, 0, 0, 0}; /* an unused slot */
}
static inline unsigned attn_grid(const struct attn_args *a, int size, int n_head)
{
    return grid_x(((int64_t)a->n_tok / size + a->n_seq) * n_head);
}

/* ---- prefixes (struct seqs)
 *
 * A sequence may continue the first rows (prefix) of an earlier sequence, its base. An op first computes all sequences
 * as if they had no prefix, on Hopper with the Hopper kernels. Then kernels with PREFIX, if there are prefixes, add
 * their keys. The forward continues the softmax from o and lse, which already include the sink and the sequence's own
 * keys. The backward needs only the final lse and o, and adds to dqkv. So o, and the gradients of queries and of a
 * base, are rounded to bf16 once more. */

/* Keys are numbered by their position. Query i of the sequence is at position i + shift. */
struct attn_keys {
    int64_t first; /* row of key 0 */
    int n, shift;
};
/* Keys of a sequence's queries: its own, or its prefix. */
template <bool PREFIX>
__device__ static inline struct attn_keys keys_of(const struct attn_args &a, const struct seq_block &b)
{
    if (PREFIX) {
        int base = b.seq;
        while (a.prefix[base] > 0) base--;
        return {a.cu[base], a.prefix[b.seq], a.prefix[b.seq]};
    }
    return {b.first, b.len, 0};
}

/* Queries begin .. end - 1 of a sequence attend to keys of a block, but to no key from n_key on. */
struct attn_queries {
    int64_t first; /* row of query 0 */
    int len, begin, end, shift, n_key;
    int seq;
};
/* The queries that attend to keys k0 .. k0 + n - 1 of sequence b: those of b or, with PREFIX, of the first sequence
 * after number `seq` that continues b and sees one of these keys. end 0: there is none. */
template <bool PREFIX>
__device__ static inline struct attn_queries queries_of(const struct attn_args &a, const struct seq_block &b, int k0,
                                                        int n, int seq)
{
    if (PREFIX) {
        for (int s = seq + 1; a.prefix[b.seq] == 0 && s < a.n_seq && a.prefix[s] > 0; s++) {
            const int prefix = a.prefix[s], last = min(k0 + n, prefix) - 1, len = a.cu[s + 1] - a.cu[s];
            const int end = min(len, last - prefix + a.window);
            if (last >= k0 && end > 0) return {a.cu[s], len, 0, end, prefix, prefix, s};
        }
        return {0, 0, 0, 0, 0, 0, 0};
    }
    return {b.first, b.len, k0, min(b.len, k0 + n - 1 + a.window), 0, b.len, b.seq};
}

/* Query i attends to key j when 0 <= i - j < window. For nq queries from q on and nk keys from k on: */
__device__ static inline bool all_masked(int q, int nq, int k, int nk, int window)
{
    return q + nq - 1 < k || q - (k + nk - 1) >= window;
}
__device__ static inline bool none_masked(int q, int nq, int k, int nk, int window)
{
    return q >= k + nk - 1 && q + nq - 1 - k < window;
}

/* c = -inf where the query does not attend to the key. distance: query - key of row 0 and column 0. sign 1: rows are
 * queries; -1: rows are keys. */
template <int MT, int NT>
__device__ static inline void apply_mask(float c[MT][NT][4], int distance, int sign, int window)
{
    const int lane = threadIdx.x % 32, corner = distance + sign * (lane / 4 - lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int d = corner + sign * (16 * m + 8 * (e / 2) - 8 * n - e % 2);
                if ((unsigned)d >= (unsigned)window) c[m][n][e] = -INFINITY;
            }
        }
    }
}

/* c = -inf for keys from number n on. Keys are columns, or with sign -1 rows. */
template <int MT, int NT> __device__ static inline void mask_beyond(float c[MT][NT][4], int n, int sign)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < NT; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = sign > 0 ? 8 * i + lane % 4 * 2 + e % 2 : 16 * m + lane / 4 + 8 * (e / 2);
                if (key >= n) c[m][i][e] = -INFINITY;
            }
        }
    }
}

/* ---- tiles ---- */

/* DIM is 64, 128 or 256, the smallest that holds a head. The number of 16-row tiles of queries per warp: fewer for wide
 * heads, so that the accumulators stay in registers. */
template <int DIM> __host__ __device__ constexpr int query_tiles(void) { return DIM == 256 ? 1 : 2; }

/* Values of kv head `kv` of a row of q | k | v: the column where they begin. */
__host__ __device__ static inline int64_t value_col(const struct attn_args &a, int kv)
{
    return (int64_t)(a.n_head + a.n_kv) * a.dim + kv * a.dim_v;
}

/* ---- host ---- */

/* The kernels of choice_attn; their backward needs stat_group = query heads per kv head. attn_variant_of returns NULL
 * for ATTN_ANY. */
struct attn_variant {
    void (*fwd)(struct attn_args *a), (*bwd)(const struct attn_args *a);
};
const struct attn_variant *attn_variant_of(const struct attn_shape *s);
/* Heads of more than 256 columns (sm80/attn_wide.cu); prefix: the kernels with PREFIX. */
void attn_wide_fwd(const struct attn_args *a, bool prefix);
void attn_wide_bwd(const struct attn_args *a, bool prefix);

static inline struct attn_args attn_args_of(struct tensor o, struct tensor lse, struct tensor qkv,
                                            const struct seqs *seqs, const struct attn_shape *s)
{
    const int64_t n_tok = qkv.shape[0], dim_v = attn_value_dim(s);
    struct attn_args a = {};
    MT_REQUIRE(s->head_dim >= 8 && s->head_dim <= 512 && s->head_dim % 8 == 0 && dim_v >= 8 && dim_v <= 512 &&
                   dim_v % 8 == 0,
               "head_dim %lld, values of %lld: the CUDA kernels take multiples of 8 up to 512", (long long)s->head_dim,
               (long long)dim_v);
    MT_REQUIRE(n_tok < NO_WINDOW && seqs->n_seq <= NO_WINDOW && s->scale > 0, "%lld rows, %lld sequences, scale %g",
               (long long)n_tok, (long long)seqs->n_seq, (double)s->scale);
    MT_REQUIRE(rows_aligned(qkv) && rows_aligned(o), "rows of qkv and o must be aligned to 16 bytes");
    a.cu = i32_ptr(seqs->cu);
    a.prefix = i32_ptr(seqs->prefix);
    a.n_seq = (int)seqs->n_seq;
    a.n_tok = (int)n_tok;
    a.n_head = (int)s->n_head;
    a.n_kv = (int)s->n_kv;
    a.dim = (int)s->head_dim;
    a.dim_v = (int)dim_v;
    a.window = s->window && s->window < NO_WINDOW ? (int)s->window : (int)NO_WINDOW;
    a.max_len = (int)MT_MIN(seqs->max_len, n_tok);
    a.scale = s->scale;
    a.scale_log2 = s->scale * LOG2_E;
    a.qkv = bf16_ptr(qkv);
    a.ld_qkv = qkv.ld;
    a.o = bf16_ptr(o);
    a.ld_o = o.ld;
    a.lse = f32_ptr(lse);
    a.ld_lse = lse.ld;
    return a;
}

#endif
