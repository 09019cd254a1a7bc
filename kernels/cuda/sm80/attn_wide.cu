/* attn_wide.cu - causal grouped-query attention for heads of more than 256 columns: forward and backward. attn_fwd.cu
 * and attn_bwd.cu have the mathematics and call these kernels; prefixes are as in attn.cuh.
 * Math, needs: as attn_fwd.cu and attn_bwd.cu.
 * Shapes: as attn_fwd.cu and attn_bwd.cu; A or B from 264 to 512 (Gemma-4: both 512).
 * Grid: heads are padded with zeros to 512 columns. A block has 32 queries (dkv: keys) and 4 warps: warp w has rows 16
 *   (w % 2) .. + 15 and columns 256 (w / 2) .. + 255 of the sums, so that these stay in registers. Two warps compute
 *   the same scores. One stage of 16 keys (queries); another block computes while it is loaded. Forward 64 KiB of
 *   shared memory, dq and dk 96 KiB, dv 64 KiB, available on every GPU since sm_80.
 * Bound: compute; scores are computed twice: 6*A*H*pairs FLOP forward, 20*A*H*pairs backward.
 * Numerics: as attn_fwd.cu and attn_bwd.cu; the order of sums depends on the sequence alone. */
#include "kernels/cuda/parts/attn.cuh"

enum { DIM = 512, HALF = 256, ROWS = 32, STAGE = 16, TILE = STAGE * DIM * 2 /* bytes */, OWN = ROWS * DIM * 2 };
enum grads { DK, DV };

/* The place of a warp: its 16 rows of the block, and its half of the columns. */
struct place {
    int row, half;
};
__device__ static inline struct place place_of(void)
{
    const int warp = threadIdx.x / 32;
    return {warp % 2 * 16, warp / 2};
}

/* Scores of a warp's 16 rows and the rows of a stage. */
__device__ static inline void scores(float p[1][STAGE / 8][4], uint32_t rows, uint32_t tile)
{
    dot_rows<1, STAGE / 8, DIM>(p, rows, lane_cols<DIM>(tile));
}

/* acc += p b for the warp's half of the columns of b. */
__device__ static inline void add_half(float acc[1][HALF / 8][4], const float p[1][STAGE / 8][4], uint32_t tile,
                                       int half)
{
    const uint32_t b = lane_rows<DIM>(tile) ^ ((uint32_t)half << 9); /* 256 columns are 512 bytes */
#pragma unroll
    for (int n = 0; n < STAGE / 8; n += 2) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = pack2(p[0][n + i / 2][i % 2 * 2], p[0][n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int step = 0; step < HALF / 16; step++) {
            uint32_t f[4];
            load_matrix4_trans(f, (b ^ (step << 5)) + n * 8 * DIM * 2);
            mma_bf16(acc[0][2 * step], a, f);
            mma_bf16(acc[0][2 * step + 1], a, f + 2);
        }
    }
}

/* Stores the warp's rows of its half of the columns, times factor; with PREFIX it adds them to dst. No warp may still
 * use shared memory. dst: column 0 of the head in the warp's first row. */
template <bool PREFIX>
__device__ static inline void store_half(bf16 *dst, int64_t ld, int n_row, int dim, float acc[1][HALF / 8][4],
                                         float factor, int half, char *smem)
{
    bf16 *to = dst + half * HALF;
    if (PREFIX) add_stored<1, HALF>(acc, factor, to, ld, n_row, dim - half * HALF);
    store_rows<1, HALF>(to, ld, n_row, dim - half * HALF, acc, PREFIX ? 1 : factor,
                        smem + threadIdx.x / 32 * 16 * HALF * 2);
}

/* ---- forward */

/* A softmax in progress, of rows i and i + 8 of a warp, i = lane / 4; as in attn_fwd.cu. */
struct progress {
    float max[2], sum[2];
};

/* Scores become weights; acc is rescaled to the new maxima. */
__device__ static inline void weigh(float p[1][STAGE / 8][4], struct progress *s, float acc[1][HALF / 8][4], float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = s->max[r], total = 0;
#pragma unroll
        for (int n = 0; n < STAGE / 8; n++) top = fmaxf(top, fmaxf(p[0][n][2 * r], p[0][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shift = top == -INFINITY ? 0 : top * c;
        const float factor = top == s->max[r] ? 1 : exp2_fast((s->max[r] - top) * c);
        s->max[r] = top;
#pragma unroll
        for (int n = 0; n < STAGE / 8; n++) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                p[0][n][e] = exp2_fast(p[0][n][e] * c - shift);
                total += p[0][n][e];
            }
        }
        s->sum[r] = s->sum[r] * factor + total;
        if (__all_sync(~0u, factor == 1)) continue;
#pragma unroll
        for (int n = 0; n < HALF / 8; n++) acc[0][n][2 * r] *= factor, acc[0][n][2 * r + 1] *= factor;
    }
}

/* Continues the softmax from o and lse of the warp's rows. The first is row t of the batch; n_row of them exist. */
__device__ static inline void resume(float acc[1][HALF / 8][4], struct progress *s, const struct attn_args &a,
                                     int64_t t, int n_row, int head, int half)
{
    const int lane = threadIdx.x % 32;
    add_stored<1, HALF>(acc, 1, a.o + t * a.ld_o + head * a.dim_v + half * HALF, a.ld_o, n_row, a.dim_v - half * HALF);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = lane / 4 + 8 * r;
        if (row >= n_row) continue;
        s->max[r] = a.lse[(t + row) * a.ld_lse + head] / a.scale;
        s->sum[r] = lane % 4 == 0; /* 1 in one of a row's four lanes, which are summed at the end */
    }
}

template <bool PREFIX>
__device__ static inline void finish(float acc[1][HALF / 8][4], const struct progress *s, const struct attn_args &a,
                                     const struct seq_block &seq, int first, int head, int half, float sink, char *smem)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = first + lane / 4 + 8 * r;
        float total = s->sum[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (a.sinks) total += exp2_fast((sink - s->max[r]) * a.scale_log2);
#pragma unroll
        for (int n = 0; n < HALF / 8; n++) acc[0][n][2 * r] *= 1 / total, acc[0][n][2 * r + 1] *= 1 / total;
        if (row < seq.len && lane % 4 == 0 && half == 0)
            a.lse[(seq.first + row) * a.ld_lse + head] = s->max[r] * a.scale + logf(total);
    }
    __syncthreads(); /* with PREFIX both halves of the columns have read lse; tiles are free */
    store_half<false>(a.o + (seq.first + first) * a.ld_o + head * a.dim_v, a.ld_o, seq.len - first, a.dim_v, acc, 1,
                      half, smem);
}

template <bool PREFIX>
static __global__ void __launch_bounds__(ATTN_THREADS, 2) wide_fwd(const __grid_constant__ struct attn_args a)
{
    extern __shared__ __align__(1024) char smem[];
    const int head = blockIdx.x % a.n_head, group = a.n_head / a.n_kv;
    const struct seq_block seq = find_block(a, blockIdx.x / a.n_head, ROWS);
    const int q0 = (seq.n_block - 1 - seq.block) * ROWS; /* queries with the most keys first */
    if (q0 < 0) return;
    const struct attn_keys keys = keys_of<PREFIX>(a, seq);
    const int end = PREFIX ? keys.n : min(q0 + ROWS, seq.len),
              begin = max(0, q0 + keys.shift - a.window + 1) / STAGE * STAGE;
    if (PREFIX && begin >= end) return;
    const bf16 *k = a.qkv + keys.first * a.ld_qkv + (a.n_head + head / group) * a.dim;
    const bf16 *v = a.qkv + keys.first * a.ld_qkv + value_col(a, head / group);
    const uint32_t q_tile = shared_address(smem), k_tile = q_tile + OWN, v_tile = k_tile + TILE;
    load_tile<ROWS, DIM>(q_tile, a.qkv + seq.first * a.ld_qkv + head * a.dim, a.ld_qkv, q0, seq.len, a.dim);

    const struct place own = place_of();
    const int p0 = q0 + own.row + keys.shift; /* position of the warp's first query */
    const uint32_t q_rows = lane_rows<DIM>(q_tile + own.row * DIM * 2);
    const float sink = a.sinks ? a.sinks[head] / a.scale : -INFINITY;
    float acc[1][HALF / 8][4] = {};
    struct progress s = {{sink, sink}, {0, 0}};
    if (PREFIX) resume(acc, &s, a, seq.first + q0 + own.row, seq.len - q0 - own.row, head, own.half);
    for (int k0 = begin; k0 < end; k0 += STAGE) {
        __syncthreads(); /* all warps have finished with the stage */
        load_tile<STAGE, DIM>(k_tile, k, a.ld_qkv, k0, keys.n, a.dim);
        load_tile<STAGE, DIM>(v_tile, v, a.ld_qkv, k0, keys.n, a.dim_v);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        if (all_masked(p0, 16, k0, STAGE, a.window)) continue;
        float p[1][STAGE / 8][4] = {};
        scores(p, q_rows, k_tile);
        if (!none_masked(p0, 16, k0, STAGE, a.window)) apply_mask<1, STAGE / 8>(p, p0 - k0, 1, a.window);
        if (PREFIX && k0 + STAGE > end) mask_beyond<1, STAGE / 8>(p, end - k0, 1);
        weigh(p, &s, acc, a.scale_log2);
        add_half(acc, p, v_tile, own.half);
    }
    finish<PREFIX>(acc, &s, a, seq, q0 + own.row, head, own.half, sink, smem);
}

/* ---- backward */

/* stat of a head and row t of the batch. Groups in stat have several heads only with PREFIX. */
template <bool PREFIX> __device__ static inline float2 stat_of(const struct attn_args &a, int head, int64_t t)
{
    const int g = PREFIX ? head % a.stat_group : 0;
    return a.stat[(int64_t)(head - g) * a.n_tok + (PREFIX ? t * a.stat_group + g : t)];
}

/* dk or dv of a block of keys: as attn_dkv_kernel, [keys, queries]. */
template <int GRADS, bool PREFIX>
static __global__ void __launch_bounds__(ATTN_THREADS, 2) wide_dkv(const __grid_constant__ struct attn_args a)
{
    extern __shared__ __align__(1024) char smem[];
    const int kv = blockIdx.x % a.n_kv, group = a.n_head / a.n_kv, lane = threadIdx.x % 32;
    const struct seq_block seq = find_longest(a, blockIdx.x / a.n_kv, ROWS);
    if (seq.block >= seq.n_block) return;
    const int k0 = seq.block * ROWS;
    struct attn_queries of = queries_of<PREFIX>(a, seq, k0, ROWS, seq.seq);
    if (PREFIX && !of.end) return;
    const uint32_t k_tile = shared_address(smem), v_tile = k_tile + OWN;
    const uint32_t q_tile = GRADS == DK ? v_tile + OWN : v_tile, d_tile = q_tile + TILE;
    load_tile<ROWS, DIM>(k_tile, a.qkv + seq.first * a.ld_qkv + (a.n_head + kv) * a.dim, a.ld_qkv, k0, seq.len, a.dim);
    if (GRADS == DK)
        load_tile<ROWS, DIM>(v_tile, a.qkv + seq.first * a.ld_qkv + value_col(a, kv), a.ld_qkv, k0, seq.len, a.dim_v);

    const struct place own = place_of();
    const int w0 = k0 + own.row; /* first key of the warp */
    const uint32_t k_rows = lane_rows<DIM>(k_tile + own.row * DIM * 2);
    const uint32_t v_rows = lane_rows<DIM>(v_tile + own.row * DIM * 2);
    float acc[1][HALF / 8][4] = {};
    while (of.end) {
        for (int i = 0; i < group; i++) {
            const int head = kv * group + i;
            const bf16 *q = a.qkv + of.first * a.ld_qkv + head * a.dim;
            const bf16 *dout = a.dout + of.first * a.ld_dout + head * a.dim_v;
            for (int row = of.begin / STAGE * STAGE; row < of.end; row += STAGE) {
                const int q0 = row + of.shift; /* position of query `row` */
                __syncthreads();               /* all warps have finished with the stage */
                load_tile<STAGE, DIM>(q_tile, q, a.ld_qkv, row, of.len, a.dim);
                load_tile<STAGE, DIM>(d_tile, dout, a.ld_dout, row, of.len, a.dim_v);
                copy_commit();
                copy_wait<0>();
                __syncthreads();
                if (all_masked(q0, STAGE, w0, 16, a.window)) continue;
                float p[1][STAGE / 8][4] = {}, ds[1][STAGE / 8][4] = {};
                scores(p, k_rows, q_tile);
                if (GRADS == DK) scores(ds, v_rows, d_tile);
                if (!none_masked(q0, STAGE, w0, 16, a.window)) apply_mask<1, STAGE / 8>(p, q0 - w0, -1, a.window);
                if (PREFIX && w0 + 16 > of.n_key) mask_beyond<1, STAGE / 8>(p, of.n_key - w0, -1);
#pragma unroll
                for (int n = 0; n < STAGE / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) { /* e % 2: which of the lane's two queries */
                        const int t = row + 8 * n + lane % 4 * 2 + e % 2;
                        const float2 stat =
                            t < of.len ? stat_of<PREFIX>(a, head, of.first + t) : make_float2(INFINITY, 0);
                        p[0][n][e] = exp2_fast(p[0][n][e] * a.scale_log2 - stat.x);
                        ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - stat.y);
                    }
                }
                add_half(acc, GRADS == DK ? ds : p, GRADS == DK ? q_tile : d_tile, own.half);
            }
        }
        if (!PREFIX) break;
        of = queries_of<PREFIX>(a, seq, k0, ROWS, of.seq);
    }
    __syncthreads(); /* tiles are free */
    bf16 *out = a.dqkv + (seq.first + w0) * a.ld_dqkv;
    if (GRADS == DK)
        store_half<PREFIX>(out + (a.n_head + kv) * a.dim, a.ld_dqkv, seq.len - w0, a.dim, acc, a.scale, own.half, smem);
    else
        store_half<PREFIX>(out + value_col(a, kv), a.ld_dqkv, seq.len - w0, a.dim_v, acc, 1, own.half, smem);
}

/* dq of a block of queries of one head. */
template <bool PREFIX>
static __global__ void __launch_bounds__(ATTN_THREADS, 2) wide_dq(const __grid_constant__ struct attn_args a)
{
    extern __shared__ __align__(1024) char smem[];
    const int head = blockIdx.x % a.n_head, group = a.n_head / a.n_kv, lane = threadIdx.x % 32;
    const struct seq_block seq = find_block(a, blockIdx.x / a.n_head, ROWS);
    const int q0 = (seq.n_block - 1 - seq.block) * ROWS; /* queries with the most keys first */
    if (q0 < 0) return;
    const struct attn_keys keys = keys_of<PREFIX>(a, seq);
    const int end = PREFIX ? keys.n : min(q0 + ROWS, seq.len),
              begin = max(0, q0 + keys.shift - a.window + 1) / STAGE * STAGE;
    if (PREFIX && begin >= end) return;
    const bf16 *k = a.qkv + keys.first * a.ld_qkv + (a.n_head + head / group) * a.dim;
    const bf16 *v = a.qkv + keys.first * a.ld_qkv + value_col(a, head / group);
    const uint32_t q_tile = shared_address(smem), d_tile = q_tile + OWN, k_tile = d_tile + OWN, v_tile = k_tile + TILE;
    load_tile<ROWS, DIM>(q_tile, a.qkv + seq.first * a.ld_qkv + head * a.dim, a.ld_qkv, q0, seq.len, a.dim);
    load_tile<ROWS, DIM>(d_tile, a.dout + seq.first * a.ld_dout + head * a.dim_v, a.ld_dout, q0, seq.len, a.dim_v);

    const struct place own = place_of();
    const int w0 = q0 + own.row, p0 = w0 + keys.shift; /* the warp's first query, and its position */
    const uint32_t q_rows = lane_rows<DIM>(q_tile + own.row * DIM * 2);
    const uint32_t d_rows = lane_rows<DIM>(d_tile + own.row * DIM * 2);
    float acc[1][HALF / 8][4] = {};
    float2 stat[2]; /* of rows lane / 4 and lane / 4 + 8 */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = w0 + lane / 4 + 8 * r;
        stat[r] = row < seq.len ? stat_of<PREFIX>(a, head, seq.first + row) : make_float2(0, 0);
    }
    for (int k0 = begin; k0 < end; k0 += STAGE) {
        __syncthreads(); /* all warps have finished with the stage */
        load_tile<STAGE, DIM>(k_tile, k, a.ld_qkv, k0, keys.n, a.dim);
        load_tile<STAGE, DIM>(v_tile, v, a.ld_qkv, k0, keys.n, a.dim_v);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        if (all_masked(p0, 16, k0, STAGE, a.window)) continue;
        float p[1][STAGE / 8][4] = {}, ds[1][STAGE / 8][4] = {};
        scores(p, q_rows, k_tile);
        scores(ds, d_rows, v_tile);
        if (!none_masked(p0, 16, k0, STAGE, a.window)) apply_mask<1, STAGE / 8>(p, p0 - k0, 1, a.window);
        if (PREFIX && k0 + STAGE > end) mask_beyond<1, STAGE / 8>(p, end - k0, 1);
#pragma unroll
        for (int n = 0; n < STAGE / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 of = stat[e / 2];
                ds[0][n][e] = exp2_fast(p[0][n][e] * a.scale_log2 - of.x) * (ds[0][n][e] - of.y);
            }
        }
        add_half(acc, ds, k_tile, own.half);
    }
    __syncthreads(); /* tiles are free */
    store_half<PREFIX>(a.dqkv + (seq.first + w0) * a.ld_dqkv + head * a.dim, a.ld_dqkv, seq.len - w0, a.dim, acc,
                       a.scale, own.half, smem);
}

/* ---- host ---- */

template <typename KERNEL> static void launch(const struct attn_args *a, const KERNEL kernel, int bytes, int n_head)
{
    kernel<<<attn_grid(a, ROWS, n_head), ATTN_THREADS, bytes, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

template <bool PREFIX> static void fwd(const struct attn_args *a)
{
    allow_shared<wide_fwd<PREFIX>>(OWN + 2 * TILE);
    launch(a, wide_fwd<PREFIX>, OWN + 2 * TILE, a->n_head);
}

template <bool PREFIX> static void bwd(const struct attn_args *a)
{
    allow_shared<wide_dkv<DK, PREFIX>>(2 * OWN + 2 * TILE);
    allow_shared<wide_dkv<DV, PREFIX>>(OWN + 2 * TILE);
    allow_shared<wide_dq<PREFIX>>(2 * OWN + 2 * TILE);
    launch(a, wide_dkv<DK, PREFIX>, 2 * OWN + 2 * TILE, a->n_kv);
    launch(a, wide_dkv<DV, PREFIX>, OWN + 2 * TILE, a->n_kv);
    launch(a, wide_dq<PREFIX>, 2 * OWN + 2 * TILE, a->n_head);
}

void attn_wide_fwd(const struct attn_args *a, bool prefix) { prefix ? fwd<true>(a) : fwd<false>(a); }
void attn_wide_bwd(const struct attn_args *a, bool prefix) { prefix ? bwd<true>(a) : bwd<false>(a); }
