/* attn_bwd.cu - causal grouped-query attention inside packed sequences, with window and sink: backward.
 * FlashAttention-2, arXiv 2307.08691. On Hopper, attn_wgmma_bwd.cu, attn_wgmma_dkv.cuh and attn_wgmma_dq.cuh replace
 * dkv and dq for the widths of attn_widths.cu, except with PREFIX (attn.cuh); they use the stat kernel of this file.
 * Math: p_ij = exp(scale <q_i, k_j> - lse_i), ds_ij = p_ij (<dout_i, v_j> - <dout_i, o_i>); dv_j = sum_i p_ij dout_i,
 *   dk_j = scale sum_i ds_ij q_i (both over the heads of the group), dq_i = scale sum_j ds_ij k_j. lse includes the
 *   sink.
 * Shapes: dqkv, qkv [T, (H+K)*A+K*B] bf16, dout, o [T, H*B] bf16, lse [T, H] f32, cu [S+1] i32; T may be 0. B, the
 *   width of values, is A in most models.
 * Needs: A and B multiples of 8 up to 512, T < 2^29, scale > 0, rows of the four bf16 matrices aligned to 16 bytes;
 *   8*T*H bytes of scratch. Above 256 attn_wide.cu computes dk, dv and dq.
 * Grid: a head is padded with zeros to 64, 128 or 256 columns. stat: a block per row. dkv: 4 warps per 128 (width 128,
 *   256: 64) keys of a sequence and kv head, which loop over the heads of the group and the queries that attend to
 *   these keys. dq: 4 warps per 128 (256: 64) queries of a sequence and head. Two cp.async stages of 32 rows; tiles
 *   that are masked for the whole block are not loaded. Width 256 holds keys (dq: queries) in registers, since a warp
 *   of 16 rows would read them again for every two products, and takes two launches, dk and dv. Shared memory of 48.5,
 *   96 and 96.5 KiB: two blocks per SM of 228 KiB (9.0, 10.0); of 100 KiB (8.6, 8.9, 12.0) two of width 64, else one.
 * Bound: compute: 14*A*H*pairs FLOP, 4 of the 14 to recompute p and ds (width 256: 6 of 16), the price of sums in a
 *   fixed order without atomics; 2*T*(7*H+6*K)*A + 28*T*H bytes; each block reads its tiles again, from L2.
 * Numerics: f32 sums; p and ds rounded to bf16 before the last products. Rows beyond the end of a sequence are loaded
 *   as zeros, so NaN and infinity stay in their sequence. */
#include "kernels/cuda/parts/attn.cuh"

enum grads { DK = 1, DV = 2 }; /* what a launch of dkv computes: both, or one where registers hold only one of them */

enum { STAGE_ROWS = 32 };
/* sub_rows: rows of a stage that a warp processes at a time. dkv_rows: keys of a block of dkv, 32 or 16 for each of 4
 * warps. dq_rows: queries of a block of dq. */
template <int DIM> __host__ __device__ constexpr int sub_rows(void) { return DIM == 256 ? 16 : 32; }
template <int DIM> __host__ __device__ constexpr int dkv_rows(void) { return DIM == 64 ? 128 : 64; }
template <int DIM> __host__ __device__ constexpr int dq_rows(void) { return 64 * query_tiles<DIM>(); }
template <int DIM, int GRADS> __host__ __device__ constexpr int dkv_bytes(void)
{
    const int tiles = DIM < 256 ? 2 : GRADS & DK ? 1 : 0;
    return (tiles * dkv_rows<DIM>() + 4 * STAGE_ROWS) * DIM * 2 + 2 * STAGE_ROWS * (int)sizeof(float2);
}
template <int DIM> __host__ __device__ constexpr int dq_bytes(void)
{
    return ((DIM < 256 ? 2 : 1) * dq_rows<DIM>() + 4 * STAGE_ROWS) * DIM * 2;
}
/* The driver adds 1 KiB to each block. */
static_assert(2 * (dkv_bytes<64, DK | DV>() + 1024) <= 100 * 1024 && 2 * (dq_bytes<64>() + 1024) <= 100 * 1024,
              "two blocks of width 64 fit the SM of 8.6, 8.9 and 12.0");

__device__ static inline void copy_async8(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/* stat: one block per row; `lanes` lanes per head: dim_v / 8 rounded up to a power of two, at most 32. */
__global__ void __launch_bounds__(ATTN_THREADS) attn_stat_kernel(const struct attn_args a, int lanes)
{
    const int64_t t = blockIdx.x;
    const int n = a.n_head * lanes, group = a.stat_group;
    if (t == 0 && threadIdx.x == 0) a.stat[(int64_t)a.n_head * a.n_tok] = make_float2(INFINITY, 0);
    for (int i = threadIdx.x; i - (int)threadIdx.x < n; i += ATTN_THREADS) {
        const int head = i / lanes, first = i % lanes * 8;
        float o[8], d[8], sum = 0;
        for (int col = first; i < n && col < a.dim_v; col += 8 * lanes) {
            unpack8(o, load16(a.o + t * a.ld_o + head * a.dim_v + col));
            unpack8(d, load16(a.dout + t * a.ld_dout + head * a.dim_v + col));
#pragma unroll
            for (int e = 0; e < 8; e++) sum += o[e] * d[e];
        }
        sum = warp_sum(sum, lanes);
        if (i < n && first == 0)
            a.stat[(head / group * (int64_t)a.n_tok + t) * group + head % group] =
                make_float2(a.lse[t * a.ld_lse + head] * LOG2_E, sum);
    }
}

/* The distance in stat to head g of the same group, t rows further. Groups in stat have several heads only with PREFIX.
 */
template <bool PREFIX> __device__ static inline int64_t stat_step(const struct attn_args &a, int g, int64_t t)
{
    return PREFIX && a.stat_group > 1 ? t * a.stat_group + g : (int64_t)g * a.n_tok + t;
}
template <bool PREFIX> __device__ static inline const float2 *stat_at(const struct attn_args &a, int head, int64_t t)
{
    const int g = PREFIX && a.stat_group > 1 ? head % a.stat_group : 0;
    return a.stat + (int64_t)(head - g) * a.n_tok + stat_step<PREFIX>(a, g, t);
}

/* Scores p and products ds = dout V^T of keys (rows) and queries become p and ds. stat: of the queries. */
template <int MT, int NT>
__device__ static inline void weigh_queries(float p[MT][NT][4], float ds[MT][NT][4], const char *stat, float scale_log2)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float4 s = ((const float4 *)stat)[n * 4 + threadIdx.x % 4]; /* of two adjacent queries */
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[m][n][e] = exp2_fast(p[m][n][e] * scale_log2 - (e % 2 ? s.z : s.x));
                ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 ? s.w : s.y));
            }
        }
    }
}

template <int MT, int DIM, bool PREFIX>
__device__ static inline void store_sums(bf16 *dst, int64_t ld, int n_row, int dim, float acc[MT][DIM / 8][4],
                                         float factor, char *tile)
{
    if (PREFIX) add_stored<MT, DIM>(acc, factor, dst, ld, n_row, dim);
    store_rows<MT, DIM>(dst, ld, n_row, dim, acc, PREFIX ? 1 : factor, tile);
}

/* dk and dv of a block of keys. Queries are loaded in stages, head by head of the group; a warp keeps the sums of its
 * keys in registers. Scores and dp are [keys, queries], so that weights and ds are in the layout of the A operand.
 * Queries beyond the end of their sequence are loaded as zeros, as is dout, and add nothing. */
template <int DIM, int GRADS, bool PREFIX>
__global__ void __launch_bounds__(ATTN_THREADS, 2) attn_dkv_kernel(const struct attn_args a)
{
    extern __shared__ __align__(1024) char smem[];
    constexpr int K_ROWS = dkv_rows<DIM>(), MT = K_ROWS / 64, Q_ROWS = STAGE_ROWS, SUB = sub_rows<DIM>();
    const int k_bytes = K_ROWS * DIM * 2, q_bytes = Q_ROWS * DIM * 2, warp_bytes = MT * 16 * DIM * 2;
    const int kv = blockIdx.x % a.n_kv, group = a.n_head / a.n_kv;
    const struct seq_block seq = find_longest(a, blockIdx.x / a.n_kv, K_ROWS);
    if (seq.block >= seq.n_block) return;
    const int k0 = seq.block * K_ROWS;
    struct attn_queries of = queries_of<PREFIX>(a, seq, k0, K_ROWS, seq.seq);
    if (PREFIX && !of.end) return;

    const bf16 *q = a.qkv + of.first * a.ld_qkv + kv * group * a.dim;
    const bf16 *k = a.qkv + seq.first * a.ld_qkv + (a.n_head + kv) * a.dim;
    const bf16 *v = a.qkv + seq.first * a.ld_qkv + value_col(a, kv);
    const bf16 *dout = a.dout + of.first * a.ld_dout + kv * group * a.dim_v;
    const float2 *stat = stat_at<PREFIX>(a, kv * group, of.first);
    /* Tiles: keys, values, two stages. HELD: keys are loaded to registers through the second stage. */
    constexpr bool HELD = DIM == 256;
    const uint32_t start = shared_address(smem), v_tile = HELD ? start : start + k_bytes;
    const uint32_t stages = HELD && !(GRADS & DK) ? start : v_tile + k_bytes, stats = stages + 4 * q_bytes;
    const uint32_t k_tile = HELD ? stages + 2 * q_bytes : start;
    const auto fetch = [&](int g, int row, int stage) {
        const uint32_t tile = stages + stage * 2 * q_bytes;
        load_tile<Q_ROWS, DIM>(tile, q + g * a.dim, a.ld_qkv, row, of.len, a.dim);
        load_tile<Q_ROWS, DIM>(tile + q_bytes, dout + g * a.dim_v, a.ld_dout, row, of.len, a.dim_v);
        if (threadIdx.x < Q_ROWS) {
            const int i = row + threadIdx.x;
            copy_async8(stats + (stage * Q_ROWS + threadIdx.x) * sizeof(float2),
                        stat + stat_step<PREFIX>(a, g, min(i, of.len - 1)), i < of.len ? 8 : 0);
        }
        copy_commit();
    };
    load_tile<K_ROWS, DIM>(k_tile, k, a.ld_qkv, k0, seq.len, a.dim);
    if (GRADS & DK) load_tile<K_ROWS, DIM>(v_tile, v, a.ld_qkv, k0, seq.len, a.dim_v);
    fetch(0, of.begin, 0);

    const int warp = threadIdx.x / 32, w0 = k0 + warp * MT * 16; /* first key of this warp */
    const uint32_t k_rows = lane_rows<DIM>(k_tile + warp * warp_bytes);
    const uint32_t v_rows = lane_rows<DIM>(v_tile + warp * warp_bytes);
    float dk[MT][DIM / 8][4] = {}, dv[MT][DIM / 8][4] = {};
    uint32_t k_regs[DIM / 16][MT][4]; /* keys as A operands */
    if (HELD) {
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) load_rows<MT, DIM>(k_regs[step], k_rows, step);
    }
    for (int g = 0, row = of.begin, stage = 0; g < group; stage ^= 1) {
        const bool last = row + Q_ROWS >= of.end;
        const int next_g = g + last, next_row = last ? of.begin : row + Q_ROWS;
        copy_wait<0>();
        __syncthreads(); /* this stage is loaded, and all warps have finished reading the other */
        if (next_g < group) fetch(next_g, next_row, stage ^ 1);
#pragma unroll 1
        for (int sub = 0; sub < Q_ROWS; sub += SUB) {
            const int q0 = row + sub + of.shift; /* position of the first query */
            if (all_masked(q0, SUB, w0, MT * 16, a.window)) continue;
            const uint32_t q_tile = stages + stage * 2 * q_bytes + sub * DIM * 2;
            const char *sub_stat = smem + (stats - start) + (stage * Q_ROWS + sub) * sizeof(float2);
            float p[MT][SUB / 8][4] = {}, ds[MT][SUB / 8][4] = {};
            if (HELD)
                dot_registers<MT, SUB / 8, DIM>(p, k_regs, lane_cols<DIM>(q_tile));
            else
                dot_rows<MT, SUB / 8, DIM>(p, k_rows, lane_cols<DIM>(q_tile));
            if (GRADS & DK) dot_rows<MT, SUB / 8, DIM>(ds, v_rows, lane_cols<DIM>(q_tile + q_bytes));
            if (!none_masked(q0, SUB, w0, MT * 16, a.window)) apply_mask<MT, SUB / 8>(p, q0 - w0, -1, a.window);
            if (PREFIX && w0 + MT * 16 > of.n_key) mask_beyond<MT, SUB / 8>(p, of.n_key - w0, -1);
            weigh_queries<MT, SUB / 8>(p, ds, sub_stat, a.scale_log2);
            if (GRADS & DV) add_product<MT, SUB / 8, DIM>(dv, p, lane_rows<DIM>(q_tile + q_bytes));
            if (GRADS & DK) add_product<MT, SUB / 8, DIM>(dk, ds, lane_rows<DIM>(q_tile));
        }
        g = next_g;
        row = next_row;
        if (PREFIX && g == group) {
            const int64_t before = of.first;
            of = queries_of<PREFIX>(a, seq, k0, K_ROWS, of.seq);
            if (!of.end) break;
            q += (of.first - before) * a.ld_qkv;
            dout += (of.first - before) * a.ld_dout;
            stat += stat_step<PREFIX>(a, 0, of.first - before);
            g = 0, row = of.begin;
            fetch(g, row, stage ^ 1); /* all warps have finished reading it */
        }
    }

    bf16 *out = a.dqkv + (seq.first + w0) * a.ld_dqkv;
    if (HELD) __syncthreads(); /* rows are arranged in a stage */
    if (GRADS & DK)
        store_sums<MT, DIM, PREFIX>(out + (a.n_head + kv) * a.dim, a.ld_dqkv, seq.len - w0, a.dim, dk, a.scale,
                                    smem + warp * warp_bytes);
    if (GRADS & DV)
        store_sums<MT, DIM, PREFIX>(out + value_col(a, kv), a.ld_dqkv, seq.len - w0, a.dim_v, dv, 1,
                                    smem + (HELD ? 0 : k_bytes) + warp * warp_bytes);
}

/* dq of a block of queries of one head. As in the forward, keys and values are loaded in stages. */
template <int DIM, bool PREFIX>
__global__ void __launch_bounds__(ATTN_THREADS, 2) attn_dq_kernel(const struct attn_args a)
{
    extern __shared__ __align__(1024) char smem[];
    constexpr int MT = query_tiles<DIM>(), ROWS = 16 * MT, DQ_ROWS = dq_rows<DIM>();
    constexpr int K_ROWS = STAGE_ROWS, SUB = sub_rows<DIM>();
    const int q_bytes = DQ_ROWS * DIM * 2, k_bytes = K_ROWS * DIM * 2;
    const int head = blockIdx.x % a.n_head, group = a.n_head / a.n_kv;
    const struct seq_block seq = find_block(a, blockIdx.x / a.n_head, DQ_ROWS);
    const int q0 = (seq.n_block - 1 - seq.block) * DQ_ROWS; /* queries with the most keys first */
    if (q0 < 0) return;
    const struct attn_keys keys = keys_of<PREFIX>(a, seq);
    const int end = PREFIX ? keys.n : min(q0 + DQ_ROWS, seq.len),
              begin = max(0, q0 + keys.shift - a.window + 1) / K_ROWS * K_ROWS;
    if (PREFIX && begin >= end) return;

    const bf16 *k = a.qkv + keys.first * a.ld_qkv + (a.n_head + head / group) * a.dim;
    const bf16 *v = a.qkv + keys.first * a.ld_qkv + value_col(a, head / group);
    constexpr bool HELD = DIM == 256; /* queries are in registers, as keys in attn_dkv_kernel */
    const uint32_t start = shared_address(smem), d_tile = HELD ? start : start + q_bytes, stages = d_tile + q_bytes;
    const uint32_t q_tile = HELD ? stages + 2 * k_bytes : start;
    const auto fetch = [&](int row, int stage) {
        const uint32_t tile = stages + stage * 2 * k_bytes;
        load_tile<K_ROWS, DIM>(tile, k, a.ld_qkv, row, keys.n, a.dim);
        load_tile<K_ROWS, DIM>(tile + k_bytes, v, a.ld_qkv, row, keys.n, a.dim_v);
        copy_commit();
    };
    load_tile<DQ_ROWS, DIM>(q_tile, a.qkv + seq.first * a.ld_qkv + head * a.dim, a.ld_qkv, q0, seq.len, a.dim);
    load_tile<DQ_ROWS, DIM>(d_tile, a.dout + seq.first * a.ld_dout + head * a.dim_v, a.ld_dout, q0, seq.len, a.dim_v);
    fetch(begin, 0);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, w0 = q0 + warp * ROWS; /* first query of this warp */
    const int p0 = w0 + keys.shift;                                                    /* position of this query */
    const uint32_t q_rows = lane_rows<DIM>(q_tile + warp * ROWS * DIM * 2);
    const uint32_t d_rows = lane_rows<DIM>(d_tile + warp * ROWS * DIM * 2);
    float dq[MT][DIM / 8][4] = {};
    float2 stat[2 * MT]; /* of this thread's rows */
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const int row = w0 + 16 * (r / 2) + lane / 4 + 8 * (r % 2);
        stat[r] = row < seq.len ? *stat_at<PREFIX>(a, head, seq.first + row) : make_float2(0, 0);
    }
    uint32_t q_regs[DIM / 16][MT][4]; /* queries as A operands */
    if (DIM != 128) {
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) load_rows<MT, DIM>(q_regs[step], q_rows, step);
    }
    for (int k0 = begin, stage = 0; k0 < end; k0 += K_ROWS, stage ^= 1) {
        copy_wait<0>();
        __syncthreads(); /* this stage is loaded, and all warps have finished reading the other */
        if (k0 + K_ROWS < end) fetch(k0 + K_ROWS, stage ^ 1);
#pragma unroll 1
        for (int sub = 0; sub < K_ROWS; sub += SUB) {
            if (all_masked(p0, ROWS, k0 + sub, SUB, a.window)) continue;
            const uint32_t k_tile = stages + stage * 2 * k_bytes + sub * DIM * 2;
            float p[MT][SUB / 8][4] = {}, ds[MT][SUB / 8][4] = {};
            if (DIM != 128)
                dot_registers<MT, SUB / 8, DIM>(p, q_regs, lane_cols<DIM>(k_tile));
            else
                dot_rows<MT, SUB / 8, DIM>(p, q_rows, lane_cols<DIM>(k_tile));
            dot_rows<MT, SUB / 8, DIM>(ds, d_rows, lane_cols<DIM>(k_tile + k_bytes));
            if (!none_masked(p0, ROWS, k0 + sub, SUB, a.window)) apply_mask<MT, SUB / 8>(p, p0 - k0 - sub, 1, a.window);
            if (PREFIX && k0 + sub + SUB > end) mask_beyond<MT, SUB / 8>(p, end - k0 - sub, 1);
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int n = 0; n < SUB / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float2 s = stat[2 * m + e / 2];
                        ds[m][n][e] = exp2_fast(p[m][n][e] * a.scale_log2 - s.x) * (ds[m][n][e] - s.y);
                    }
                }
            }
            add_product<MT, SUB / 8, DIM>(dq, ds, lane_rows<DIM>(k_tile));
        }
    }

    bf16 *out = a.dqkv + (seq.first + w0) * a.ld_dqkv + head * a.dim;
    store_sums<MT, DIM, PREFIX>(out, a.ld_dqkv, seq.len - w0, a.dim, dq, a.scale, smem + warp * ROWS * DIM * 2);
}

template <int DIM, int GRADS, bool PREFIX> static void attn_dkv(const struct attn_args *a)
{
    const int bytes = dkv_bytes<DIM, GRADS>();
    allow_shared<attn_dkv_kernel<DIM, GRADS, PREFIX>>(bytes);
    attn_dkv_kernel<DIM, GRADS, PREFIX>
        <<<attn_grid(a, dkv_rows<DIM>(), a->n_kv), ATTN_THREADS, bytes, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

template <int DIM, bool PREFIX> static void attn_dq(const struct attn_args *a)
{
    const int bytes = dq_bytes<DIM>();
    allow_shared<attn_dq_kernel<DIM, PREFIX>>(bytes);
    attn_dq_kernel<DIM, PREFIX><<<attn_grid(a, dq_rows<DIM>(), a->n_head), ATTN_THREADS, bytes, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

/* The stat kernel must have been launched. */
template <bool PREFIX> static void bwd_of_width(const struct attn_args *a)
{
    const int widest = MT_MAX(a->dim, a->dim_v);
    if (widest <= 64) {
        attn_dkv<64, DK | DV, PREFIX>(a);
        attn_dq<64, PREFIX>(a);
    } else if (widest <= 128) {
        attn_dkv<128, DK | DV, PREFIX>(a);
        attn_dq<128, PREFIX>(a);
    } else if (widest > 256) {
        attn_wide_bwd(a, PREFIX);
    } else {
        attn_dkv<256, DK, PREFIX>(a);
        attn_dkv<256, DV, PREFIX>(a);
        attn_dq<256, PREFIX>(a);
    }
}

extern "C" void cuda_attn_bwd(struct device *dev, struct tensor dqkv, struct tensor dout, struct tensor o,
                              struct tensor lse, struct tensor qkv, const struct seqs *seqs,
                              const struct attn_shape *shape)
{
    const struct scratch_attn_bwd s = scratch_attn_bwd(dev, qkv, seqs, shape);
    const struct attn_variant *own = attn_variant_of(shape);
    const int64_t n_tok = qkv.shape[0], turn_bytes = tensor_bytes(s.turn);
    if (!n_tok) return;
    struct attn_args a = attn_args_of(o, lse, qkv, seqs, shape);
    MT_REQUIRE(rows_aligned(dout) && rows_aligned(dqkv), "rows of dout and dqkv must be aligned to 16 bytes");
    a.dout = bf16_ptr(dout);
    a.ld_dout = dout.ld;
    a.dqkv = bf16_ptr(dqkv);
    a.ld_dqkv = dqkv.ld;
    a.stat = (float2 *)s.stat.data;
    a.dq_sum = (float *)s.sum.data;
    a.turn = (uint32_t *)s.turn.data;
    a.ticket = a.turn + n_tok * shape->n_kv;
    a.pairs = s.pairs;
    if (turn_bytes) CUDA_CHECK(cudaMemsetAsync(s.turn.data, 0, (size_t)turn_bytes, cuda.stream));
    a.stat_group = own ? a.n_head / a.n_kv : 1;
    int lanes = 1;
    while (lanes * 8 < a.dim_v && lanes < 32) lanes *= 2;
    attn_stat_kernel<<<grid_x(n_tok), ATTN_THREADS, 0, cuda.stream>>>(a, lanes);
    CUDA_CHECK_LAUNCH();
    if (own)
        own->bwd(&a);
    else
        bwd_of_width<false>(&a);
    if (a.prefix) bwd_of_width<true>(&a);
}
