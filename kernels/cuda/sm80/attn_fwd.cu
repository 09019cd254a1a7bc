/* attn_fwd.cu - causal grouped-query attention inside packed sequences, with window and sink: forward.
 * FlashAttention-2, arXiv 2307.08691.
 * Math: o_i = sum_j p_ij v_j, p_ij = exp(scale <q_i, k_j> - lse_i) over keys 0 <= i - j < window of the same sequence;
 *   lse_i = log(sum_j exp(scale <q_i, k_j>) + exp(sink)). Online softmax: the running maximum starts at the sink; a
 *   tile of keys that raises it rescales the sums.
 * Shapes: qkv [T, (H+K)*A+K*B] bf16, o [T, H*B] bf16, lse [T, H] f32 saved, cu [S+1] i32; T may be 0. B, the width of
 *   values, is A in most models.
 * Needs: A and B multiples of 8 up to 512, T < 2^29, scale > 0, rows of qkv and o aligned to 16 bytes. Above 256
 *   attn_wide.cu computes. The Hopper kernels take scratch (scratch_attn_fwd).
 * Grid: a head is padded with zeros to a tile width of 64, 128 or 256, for the wider of A and B. One block of 4 warps
 *   per 128 (width 256: 64) queries of a sequence and head, 32 (16) per warp. Two cp.async stages of 64 (width 128,
 *   256: 32) keys and values; tiles that are masked for the whole block are not loaded. Shared memory of 48, 64 and 96
 *   KiB for widths 64, 128 and 256: two blocks per SM of 228 KiB (9.0, 10.0); with 100 KiB (8.6, 8.9, 12.0) two
 *   blocks of width 64, else one.
 * Bound: 2*T*(2*H+2*K)*A + 4*T*H bytes; each block reads its keys and values again, from L2; 4*A*H*pairs FLOP ->
 *   compute bound; memory bound with a narrow window.
 * Numerics: f32 sums; weights rounded to bf16 before the product with v; 2^x by the special function unit. Keys, values
 *   and queries beyond the end of a sequence are loaded as zeros, so NaN and infinity stay in their sequence.
 * On Hopper, attn_wgmma_fwd.cuh replaces this kernel for the widths of attn_widths.cu, but not PREFIX (attn.cuh). */
#include "kernels/cuda/parts/attn.cuh"

/* Queries of a block, and keys of a stage; fewer for wide heads, so that all accumulators stay in registers. */
template <int DIM> __host__ __device__ constexpr int query_rows(void) { return 64 * query_tiles<DIM>(); }
template <int DIM> __host__ __device__ constexpr int key_rows(void) { return DIM == 64 ? 64 : 32; }

/* Scores become weights p = 2^(c (s - max)), c = scale / ln 2, with max the maximum so far. Updates max and sum (over
 * this thread's columns only). The caller multiplies earlier sums by `factor`. A row without a key so far has max =
 * -inf and weights 0. Row r of a thread is row 16 (r / 2) + lane / 4 + 8 (r % 2) of the warp. */
template <int MT, int NT>
__device__ static inline void online_softmax(float p[MT][NT][4], float max[2 * MT], float sum[2 * MT],
                                             float factor[2 * MT], float c)
{
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        float top = max[r];
#pragma unroll
        for (int n = 0; n < NT; n++) top = fmaxf(top, fmaxf(p[r / 2][n][r % 2 * 2], p[r / 2][n][r % 2 * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        const float shift = top == -INFINITY ? 0 : top * c;
        factor[r] = top == max[r] ? 1 : exp2_fast((max[r] - top) * c);
        max[r] = top;
        float total = 0;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++) {
                p[r / 2][n][e] = exp2_fast(p[r / 2][n][e] * c - shift);
                total += p[r / 2][n][e];
            }
        }
        sum[r] = sum[r] * factor[r] + total;
    }
}

/* Rescales the sums to the new maxima. Skipped when no row of the warp has a new maximum, the usual case. */
template <int MT, int NT> __device__ static inline void rescale(float acc[MT][NT][4], const float factor[2 * MT])
{
    bool same = true;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) same = same && factor[r] == 1;
    if (__all_sync(0xffffffff, same)) return;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) acc[m][n][e] *= factor[2 * m + e / 2];
        }
    }
}

/* Continues the softmax from o and lse of a warp's rows. The first is row t of the batch; n_row of them exist. */
template <int MT, int DIM>
__device__ static inline void resume(float acc[MT][DIM / 8][4], float max[2 * MT], float sum[2 * MT],
                                     const struct attn_args &a, int64_t t, int n_row, int head)
{
    const int lane = threadIdx.x % 32;
    add_stored<MT, DIM>(acc, 1, a.o + t * a.ld_o + head * a.dim_v, a.ld_o, n_row, a.dim_v);
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const int row = 16 * (r / 2) + lane / 4 + 8 * (r % 2);
        if (row >= n_row) continue;
        max[r] = a.lse[(t + row) * a.ld_lse + head] / a.scale;
        sum[r] = lane % 4 == 0; /* 1 in one of a row's four lanes, which are summed at the end */
    }
}

template <int DIM, bool PREFIX>
__global__ void __launch_bounds__(ATTN_THREADS, 2) attn_fwd_kernel(const struct attn_args a)
{
    extern __shared__ __align__(1024) char smem[];
    constexpr int MT = query_tiles<DIM>(), Q_ROWS = query_rows<DIM>(), K_ROWS = key_rows<DIM>(), ROWS = 16 * MT;
    const int k_bytes = K_ROWS * DIM * 2, stage_bytes = 2 * k_bytes; /* a stage: keys, then values */
    const int head = blockIdx.x % a.n_head, group = a.n_head / a.n_kv;
    const struct seq_block seq = find_block(a, blockIdx.x / a.n_head, Q_ROWS);
    const int q0 = (seq.n_block - 1 - seq.block) * Q_ROWS; /* queries with the most keys first */
    if (q0 < 0) return;
    const struct attn_keys keys = keys_of<PREFIX>(a, seq);
    const int end = PREFIX ? keys.n : min(q0 + Q_ROWS, seq.len),
              begin = max(0, q0 + keys.shift - a.window + 1) / K_ROWS * K_ROWS;
    if (PREFIX && begin >= end) return;

    const bf16 *q = a.qkv + seq.first * a.ld_qkv + head * a.dim;
    const bf16 *k = a.qkv + keys.first * a.ld_qkv + (a.n_head + head / group) * a.dim;
    const bf16 *v = a.qkv + keys.first * a.ld_qkv + value_col(a, head / group);
    const uint32_t q_tile = shared_address(smem), stages = q_tile + Q_ROWS * DIM * 2;
    load_tile<Q_ROWS, DIM>(q_tile, q, a.ld_qkv, q0, seq.len, a.dim);
    load_tile<K_ROWS, DIM>(stages, k, a.ld_qkv, begin, keys.n, a.dim);
    load_tile<K_ROWS, DIM>(stages + k_bytes, v, a.ld_qkv, begin, keys.n, a.dim_v);
    copy_commit();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, w0 = q0 + warp * ROWS; /* first query of this warp */
    const int p0 = w0 + keys.shift;                                                    /* position of this query */
    const uint32_t q_rows = lane_rows<DIM>(q_tile + warp * ROWS * DIM * 2);
    uint32_t q_regs[DIM / 16][MT][4]; /* queries as A operands, DIM 64 only */
    float acc[MT][DIM / 8][4] = {}, max[2 * MT], sum[2 * MT] = {};
    const float sink = a.sinks ? a.sinks[head] / a.scale : -INFINITY;
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) max[r] = sink;
    if (PREFIX) resume<MT, DIM>(acc, max, sum, a, seq.first + w0, seq.len - w0, head);
    if (DIM == 64) {
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DIM / 16; step++) load_rows<MT, DIM>(q_regs[step], q_rows, step);
    }

    for (int k0 = begin, stage = 0; k0 < end; k0 += K_ROWS, stage ^= 1) {
        const uint32_t k_tile = stages + stage * stage_bytes;
        copy_wait<0>();
        __syncthreads(); /* this stage is loaded, and all warps have finished reading the other */
        if (k0 + K_ROWS < end) {
            const uint32_t next = stages + (stage ^ 1) * stage_bytes;
            load_tile<K_ROWS, DIM>(next, k, a.ld_qkv, k0 + K_ROWS, keys.n, a.dim);
            load_tile<K_ROWS, DIM>(next + k_bytes, v, a.ld_qkv, k0 + K_ROWS, keys.n, a.dim_v);
            copy_commit();
        }
        if (all_masked(p0, ROWS, k0, K_ROWS, a.window)) continue;

        float p[MT][K_ROWS / 8][4] = {}, factor[2 * MT];
        if (DIM == 64)
            dot_registers<MT, K_ROWS / 8, DIM>(p, q_regs, lane_cols<DIM>(k_tile));
        else
            dot_rows<MT, K_ROWS / 8, DIM>(p, q_rows, lane_cols<DIM>(k_tile));
        if (!none_masked(p0, ROWS, k0, K_ROWS, a.window)) apply_mask<MT, K_ROWS / 8>(p, p0 - k0, 1, a.window);
        if (PREFIX && k0 + K_ROWS > end) mask_beyond<MT, K_ROWS / 8>(p, end - k0, 1);
        online_softmax<MT, K_ROWS / 8>(p, max, sum, factor, a.scale_log2);
        rescale<MT, DIM / 8>(acc, factor);
        add_product<MT, K_ROWS / 8, DIM>(acc, p, lane_rows<DIM>(k_tile + k_bytes));
    }

#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        const int row = w0 + 16 * (r / 2) + lane / 4 + 8 * (r % 2);
        float total = sum[r];
        total += __shfl_xor_sync(0xffffffff, total, 1);
        total += __shfl_xor_sync(0xffffffff, total, 2);
        if (a.sinks) total += exp2_fast((sink - max[r]) * a.scale_log2);
        const float inverse = 1 / total;
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
            acc[r / 2][n][r % 2 * 2] *= inverse;
            acc[r / 2][n][r % 2 * 2 + 1] *= inverse;
        }
        if (row < seq.len && lane % 4 == 0) a.lse[(seq.first + row) * a.ld_lse + head] = max[r] * a.scale + logf(total);
    }
    store_rows<MT, DIM>(a.o + (seq.first + w0) * a.ld_o + head * a.dim_v, a.ld_o, seq.len - w0, a.dim_v, acc, 1,
                        smem + warp * ROWS * DIM * 2);
}

template <int DIM, bool PREFIX> static void attn_fwd(const struct attn_args *a)
{
    const int bytes = (query_rows<DIM>() + 4 * key_rows<DIM>()) * DIM * 2;
    allow_shared<attn_fwd_kernel<DIM, PREFIX>>(bytes);
    attn_fwd_kernel<DIM, PREFIX><<<attn_grid(a, query_rows<DIM>(), a->n_head), ATTN_THREADS, bytes, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}

template <bool PREFIX> static void fwd_of_width(const struct attn_args *a)
{
    const int widest = MT_MAX(a->dim, a->dim_v);
    if (widest <= 64)
        attn_fwd<64, PREFIX>(a);
    else if (widest <= 128)
        attn_fwd<128, PREFIX>(a);
    else if (widest <= 256)
        attn_fwd<256, PREFIX>(a);
    else
        attn_wide_fwd(a, PREFIX);
}

extern "C" void cuda_attn_fwd(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv,
                              struct tensor sinks, const struct seqs *seqs, const struct attn_shape *shape)
{
    const struct scratch_attn_fwd s = scratch_attn_fwd(dev, qkv, seqs, shape);
    const struct attn_variant *own = attn_variant_of(shape);
    if (!qkv.shape[0]) return;
    struct attn_args a = attn_args_of(o, lse, qkv, seqs, shape);
    a.sinks = sinks.ndim ? f32_ptr(sinks) : NULL;
    if (tensor_count(s.norm)) a.key_norm = (uint32_t *)s.norm.data;
    a.pairs = s.pairs;
    if (own)
        own->fwd(&a);
    else
        fwd_of_width<false>(&a);
    a.sinks = NULL; /* lse includes them */
    if (a.prefix) fwd_of_width<true>(&a);
}
