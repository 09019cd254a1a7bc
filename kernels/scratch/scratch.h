/* scratch.h - the scratch of the CUDA kernels of an op, as host C: for the CUDA backend, and for dry runs for a GPU,
 * which need neither CUDA nor a GPU. So every build can plan for GPUs, exact to the byte.
 *
 * A function takes the scratch of an op from dev->work and releases it at once. The op's kernels may still use it: ops
 * that get this memory later run after them on the stream. Sizes depend on shapes, formats and the architecture alone,
 * and fewer rows never take more, so a dry run of the largest batch bounds all. Letters of shapes are those of ops.h. A
 * chunk whose size is not given is as many rows as the scratch holds. */
#ifndef MT_SCRATCH_H
#define MT_SCRATCH_H

#include "kernels/choice.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline bool rows_aligned(struct tensor x)
{
    return (uintptr_t)x.data % 16 == 0 && x.ld * dtype_size(x.dtype) % 16 == 0;
}

/* ---- dense products: scratch_dense.c */

/* w in bf16, [n_exp * n_out, n_in]: its own memory if w is bf16 and not fake-quantised, else scratch that the caller
 * fills. */
struct tensor scratch_matrices(struct device *dev, const struct weight *w, bool quantised);

struct scratch_linear {
    struct tensor dense; /* scratch_matrices of W; absent in a backward without dx */
    struct tensor
        kept;          /* [T, in] bf16: scratch for x after dropout, which the caller fills; without dropout x itself */
    struct tensor dxa; /* backward: [T, n_seg * R] bf16; absent without an adapter */
    void *partial;     /* backward: partial sums of grouped_pass */
};
struct scratch_linear scratch_linear_fwd(struct device *dev, struct tensor x, const struct proj *proj);
struct scratch_linear scratch_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                         const struct proj *proj);

/* Gradients of adapters are sums over rows, which are divided into parts whose partial sums are added at the end
 * (grouped_parts.cuh). A tile of the gradient is WGRAD_WIDE x scratch_wgrad_thin(r). */
enum { WGRAD_WIDE = 128, WGRAD_SHARE = 256 }; /* WGRAD_SHARE: the fewest rows of a part */
int64_t scratch_wgrad_thin(int64_t r);
int64_t scratch_wgrad_tiles(int64_t n_wide, int64_t r);
/* Number of tiles that partial sums take; only experts with several parts have them. It never falls as n_row grows. */
int64_t scratch_wgrad_partial(int64_t n_row, int64_t tiles);
/* For the gradient of B in one pass with the product dy B (choice_one_pass): columns of dy that a block reads. */
enum { PASS_ROWS = 128, PASS_PER_SM = 4 }; /* blocks per multiprocessor, of which two run at a time */
static inline int64_t scratch_pass_columns(int64_t r) { return r == 8 ? 4 * WGRAD_WIDE : 3 * WGRAD_WIDE; }
int64_t scratch_pass_partial(int64_t n_row, int64_t n_slab);
/* Bytes of partial sums. */
int64_t scratch_wgrad_bytes(int64_t n_row, int64_t n_wide, int64_t r);
int64_t scratch_pass_bytes(int64_t n_row, int64_t n_wide, int64_t r);

/* ---- routers and experts: scratch_experts.c */

enum { ROUTE_SLOTS = 512, STAT_TOKENS = 128, ROUTER_PARTS = 3 /* 24 bits in bf16 */ };
struct scratch_route_sort {
    int64_t n_part;     /* parts of ROUTE_SLOTS rows; at least one, which writes offs even without rows */
    int *count, *total; /* [E, n_part], [E] */
};
struct scratch_route_sort scratch_route_sort(struct device *dev, const struct route *r, int64_t n_exp);

struct scratch_aux_stats {
    struct tensor prob, count; /* [parts of STAT_TOKENS, E] f32, i32 */
};
struct scratch_aux_stats scratch_aux_stats(struct device *dev, struct tensor logits);

/* The gradient dl of a router's logits: in f32 for the chosen experts only; for all experts, each value as the sum of
 * ROUTER_PARTS bf16 numbers, for a product by cuBLASLt; in f32 for all experts, for router_tile.cu. */
enum dl_kind { DL_OF_CHOSEN, DL_IN_PARTS, DL_IN_F32 };
struct scratch_router_bwd {
    enum dl_kind kind;
    int64_t n_row;          /* E rounded up to 8 */
    struct tensor dl, rows; /* rows: DL_IN_PARTS: ROUTER_PARTS copies of W [n_row, D] */
};
struct scratch_router_bwd scratch_router_bwd(struct device *dev, struct tensor dgate, struct tensor logits,
                                             const struct weight *w, const struct aux *aux,
                                             const struct router *router);

/* The experts that a product reads; a launch decodes `count` of them. */
struct scratch_experts {
    enum grouped_way way;
    struct tensor data; /* [count, out, in] bf16; GROUPED_AHEAD: [AHEAD_SLOTS, out, in]; absent: products read w */
    int64_t n_place;    /* number of experts, or min(E, M) if they are decoded */
    int64_t count;      /* experts of one launch */
    int32_t *ids;       /* [n_place] list of the experts that have rows; NULL: no list, M >= E */
    int32_t *offs;      /* [n_place + 1] first row of each expert of the list */
};
/* The rows of an FP8 product as e4m3 codes with steps or, without FP8 kernels, as bf16 values; absent for other
 * products. */
struct scratch_fp8_rows {
    uint8_t *codes;       /* [M, in] e4m3 */
    float *step;          /* [M], with codes */
    struct tensor values; /* [M, in] bf16 */
};
struct scratch_moe_fwd {
    bool few; /* choice_few_rows: all other members are empty */
    struct tensor
        copy; /* [M, in] bf16, the rows of x in expert order, which products read by TMA; absent: they gather */
    struct scratch_experts experts;
    struct scratch_fp8_rows rows;
};
struct scratch_moe_fwd scratch_moe_up_fwd(struct device *dev, struct tensor x, const struct route *r,
                                          const struct proj *up);
struct scratch_moe_fwd scratch_moe_down_fwd(struct device *dev, struct tensor y, struct tensor act,
                                            const struct route *r, const struct proj *down);

enum { GROUPED_PART = 64 }; /* columns of one partial sum of dgate */
struct scratch_moe_bwd {
    struct scratch_moe_fwd fwd; /* of the product with dy; its copy is of dout */
    struct tensor db;           /* [M, R] bf16 */
    struct tensor gated, ha;    /* down: db and ha times the gates, [M, R] bf16 */
    struct tensor part, dact;   /* down: parts of dgate [n_part, M] f32; dact: act, or a separate [M, F] bf16 */
    struct tensor out;          /* up: dx in expert order, [M, D] bf16 */
    void *of_a, *of_b;          /* partial sums of the gradients of A and B; may share memory with other members */
};
/* choice_one_pass, if B is trained. */
bool scratch_one_pass(const struct device *dev, const struct proj *proj);
struct scratch_moe_bwd scratch_moe_down_bwd(struct device *dev, struct tensor dpre, struct tensor act,
                                            struct tensor dout, const struct route *r, const struct proj *down,
                                            const struct glu *glu);
struct scratch_moe_bwd scratch_moe_up_bwd(struct device *dev, struct tensor dpre, struct tensor x,
                                          const struct route *r, const struct proj *up);

/* ---- mixers: scratch_mixers.c */

/* kv_b for the decoding of latent attention, [H(N+B), L] bf16. */
struct tensor scratch_latent(struct device *dev, const struct proj *kv_b);

/* Attention's forward on Hopper can use an upper bound of the scores instead of the maximum of every tile of keys. The
 * bound needs the norm of the longest key of each sequence and kv head. It saves time for heads of at most
 * BOUNDED_WIDTH columns where the query heads of a kv head together read at least BOUNDED_KEYS keys per token, on
 * average over the sequence. Such a sequence has at least BOUNDED_LEN(query heads of a kv head) rows, so no two of them
 * begin in the same BOUNDED_LEN rows of the batch: one norm per BOUNDED_LEN rows and kv head is enough. */
enum { BOUNDED_WIDTH = 128, BOUNDED_KEYS = 8000 };
#define BOUNDED_LEN(group) (2 * ((BOUNDED_KEYS + (group)-1) / (group)) - 1)
/* Attention on Hopper with heads of 512 columns: the attention weights of a chunk of queries, in blocks of 64 rows x 64
 * keys. A pair is two neighbouring blocks of rows, of all kv heads. */
enum { ATTN_WEIGHT_BLOCK = 64, ATTN_WEIGHT_TILE = 256 /* keys whose weights a block computes at a time */ };
struct scratch_pairs {
    void *data;
    int64_t n_pair, n_block; /* pairs of a chunk, blocks of keys of a pair; 0: other kernels */
};
struct scratch_attn_fwd {
    struct tensor norm;         /* [T / BOUNDED_LEN + 1, K] i32, the bits of squared key norms; empty: no such bound */
    struct scratch_pairs pairs; /* weights [n_pair, K, n_block, 2, 64, 64] bf16; then two f32 per row and 256 keys */
};
struct scratch_attn_fwd scratch_attn_fwd(struct device *dev, struct tensor qkv, const struct seqs *seqs,
                                         const struct attn_shape *shape);
/* Decoding in tiles of 16 heads and splits of DECODE_SPLIT keys. */
enum { DECODE_SPLIT = 256, DECODE_HEADS = 16 };
struct scratch_attn_decode {
    bool tiles; /* a head has 64, 128 or 256 columns, of key and of value */
    int64_t n_split;
    struct tensor part; /* [T, K * tiles of heads, n_split, DECODE_HEADS, A + 2] f32; absent with one split */
};
struct scratch_attn_decode scratch_attn_decode(struct device *dev, struct tensor q, const struct pages *pages,
                                               const struct attn_shape *shape);
struct scratch_attn_bwd {
    struct tensor stat; /* [H * T + 1, 2] f32 */
    /* if blocks add to dq in turns [T * H * A] f32, [T * K + 1] i32; with pairs [2, K, T, A] f32; else empty */
    struct tensor sum, turn;
    struct scratch_pairs pairs; /* weights, gradients of scores: 2 x [n_pair, K, n_block, 2, 64, 64] bf16 */
};
struct scratch_attn_bwd scratch_attn_bwd(struct device *dev, struct tensor qkv, const struct seqs *seqs,
                                         const struct attn_shape *shape);

/* Attention with one shared key, by tiles: 64, 128, ... heads of SHARED_DIM columns. In the backward an item is the
 * gradients of keys from SHARED_TOKENS tokens, in blocks of SHARED_BLOCK keys; a chunk is the items that fit into
 * scratch. */
enum {
    SHARED_HEADS = 64,  /* heads of a group */
    SHARED_DIM = 512,   /* columns of a head */
    SHARED_TOKENS = 32, /* tokens of an item */
    SHARED_BLOCK = 192, /* keys of a block */
    SHARED_ITEMS = 128, /* items of a chunk, at most */
    SHARED_WIDEST = 512 /* head_dim of the kernels without tiles */
};
struct scratch_shared_bwd {
    bool tiles;
    int64_t n_item;            /* of a chunk */
    int64_t n_slot;            /* keys of a token, at most */
    int64_t n_window, n_far;   /* blocks of kv, and of the entries, that an item's tokens may see */
    int64_t weights;           /* attention weights of an item; as many gradients of scores */
    void *items;               /* of a chunk: weights, gradients of scores, gradients of keys */
    struct tensor dkv, dentry; /* [T, 512], [N, 512] f32 */
    struct tensor delta;       /* without tiles: [T, H] f32 */
};
bool scratch_shared_tiles(const struct shared_attn_shape *shape);
struct scratch_shared_bwd scratch_shared_attn_bwd(struct device *dev, struct tensor q, struct tensor entry,
                                                  struct tensor idx, const struct seqs *seqs,
                                                  const struct shared_attn_shape *shape);

enum { INDEX_ENTRIES = 256, INDEX_SCRATCH = 64 << 20 }; /* entries of a block; bytes of scores, at least a row */
struct scratch_index {
    int64_t most, ld, chunk; /* entries of a token, at most; columns of scores; tokens of a chunk */
    bool scored;             /* a token may have more entries than are chosen */
    float *score;            /* [chunk, ld] */
};
struct scratch_index scratch_index_topk(struct device *dev, struct tensor idx, struct tensor q, const struct seqs *seqs,
                                        int64_t ratio);

/* Gated delta rule. chunks: the kernels for Hopper, in chunks of DELTA_ROWS rows, for heads of DELTA_DIM columns. */
enum { DELTA_DIM = 128, DELTA_ROWS = MT_DELTA_CHUNK };
struct scratch_delta {
    bool chunks;
    struct tensor inverse, m;                 /* [T, N * DELTA_ROWS] bf16 */
    struct tensor factors, gates;             /* [N * T, 4] f32 */
    struct tensor x;                          /* backward: [T, N * DELTA_DIM] bf16 */
    struct tensor err, dd, dq, dk_in, dk_out; /* without chunks, backward: [T, N * A] or [T, N * K] f32 */
    struct tensor dbeta, dg;                  /* without chunks, backward: [T, N] f32 */
    /* States, [n * N * DELTA_DIM, DELTA_DIM] bf16: n = n_slot of struct segments, in the backward T / DELTA_ROWS more,
     * which come first. Without chunks: [n_slot * N, A * K] f32. grads: their gradients, in the backward */
    struct tensor states, grads;
    struct tensor sums; /* without chunks, backward: [n_slot * N] f32 */
};
/* In the forward, values and written are both o; in the backward they are dout and dqkv. */
struct scratch_delta scratch_delta(struct device *dev, struct tensor qkv, struct tensor values, struct tensor written,
                                   const struct seqs *seqs, const struct delta_shape *shape, bool backward);

/* Mamba-2 in chunks of MT_MAMBA_CHUNK rows and blocks of MAMBA_COLS columns. */
enum { MAMBA_COLS = 64 };
struct scratch_mamba {
    struct tensor gates; /* [N * T, 2] f32 */
    /* [(T / MT_MAMBA_CHUNK + n_slot of struct segments) * N * blocks * A, MAMBA_COLS] bf16; grads: backward */
    struct tensor states, grads;
};
struct scratch_mamba scratch_mamba(struct device *dev, struct tensor xbc, const struct seqs *seqs,
                                   const struct mamba *m, bool backward);

enum { HYPER_SPLITS = 8, HYPER_COEFS = MT_MAX_STREAMS + MT_MAX_STREAMS * MT_MAX_STREAMS, HYPER_FACTORS = 32 };
/* Columns of partial sums of op_hyper_pre_fwd: fn x, in one or three tiles of 8, and the sum of squares of x. */
static inline int64_t scratch_hyper_width(const struct hyper *h) { return hyper_values(h) <= 8 ? 9 : 25; }
float *scratch_hyper_pre_fwd(struct device *dev, struct tensor x, const struct hyper *h); /* [SPLITS * T, width] */
float *scratch_hyper_pre_bwd(struct device *dev, struct tensor x);                        /* [T, FACTORS] */
struct scratch_hyper_post {
    float *coef, *dots; /* [T, COEFS]; dots: backward */
};
struct scratch_hyper_post scratch_hyper_post(struct device *dev, struct tensor x, bool backward);

/* ---- the loss head, the update: scratch_head.c */

/* For a row of a tile of logits: the largest one, the sum of e^(logit - max), the first column that has the largest. */
struct tile_sums {
    float max, sum;
    int32_t id;
};
struct square_sum {
    double sum;
    int64_t n_bad; /* not finite */
};
enum { HEAD_VECTOR = 8, HEAD_THREADS = 512, SQUARES_CHUNK = 65536 };
struct scratch_head {
    struct tensor dense;  /* scratch_matrices of W */
    int64_t chunk;        /* rows of a chunk, at most */
    struct tensor part;   /* [chunk, D] bf16 */
    struct tensor logits; /* [chunk, V rounded up to 8] f32, or exponentials (choice_exponentials) [chunk, V] bf16 */
    struct tensor own;    /* exponentials: logits of the labels, [chunk] f32 */
    struct tile_sums *tile_sums; /* exponentials: [chunk, V / DENSE_COLS]; NULL: logits */
    struct tensor of_teacher;    /* linear_kl: [chunk, V rounded up] or [chunk, K] f32 */
};
struct scratch_head scratch_linear_ce(struct device *dev, const struct weight *w, float cap, struct tensor rows,
                                      int64_t chunk);
struct scratch_head scratch_linear_kl(struct device *dev, const struct weight *w, struct tensor rows,
                                      const struct teacher *t, int64_t chunk);
/* The scratch of linear_topk and of linear_policy. */
struct scratch_head scratch_linear_topk(struct device *dev, const struct weight *w, struct tensor rows, int64_t chunk);
struct square_sum *scratch_sumsq(struct device *dev, struct tensor g); /* one per SQUARES_CHUNK values */

#ifdef __cplusplus
}
#endif
#endif
