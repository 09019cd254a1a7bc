/* delta_wgmma.cuh - shared by the chunked gated delta rule on Hopper, key and value heads of 128.
 * Math: kernels/cpu/delta.c; its form in chunks is below. Kernels: factors, T and M of all chunks; the recurrence over
 *   the chunks of a sequence, forward (O, or X and states) and backward (Y and E); the gradients of all chunks.
 * Grid: the recurrence holds S^T and E^T, 64 value columns by 128, in the accumulators of one warpgroup: an operand of
 *   the next product is then an accumulator rounded to bf16, in registers, and no warp waits for another. Tiles are
 *   loaded by TMA as 64 rows of 64 columns. The last chunk of a sequence extends into the next one, whose rows may hold
 *   NaN or infinity: these rows are zeroed in shared memory before a product reads them.
 * Shapes: scratch is addressed by token, so that its size does not depend on the sequences. The state before a chunk
 *   that is not the first of its sequence, and E there, are in slot row / 64 - 1, where row is the chunk's first row in
 *   the micro-batch: no two of these chunks have the same slot. With prefixes, segments (struct segments) replace
 *   sequences; their slots come after these, and the recurrence has a launch for each SEGMENT_LEVEL. */
#ifndef MT_CUDA_DELTA_WGMMA_H
#define MT_CUDA_DELTA_WGMMA_H

#include <string.h>

#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"
#include "kernels/cuda/sm90/sm90.cuh"

/* The norms of q and k, the gates and the decay inside a chunk are factors of rows: vectors stay as they are in qkv.
 * "Into" row i: k_i reads the state; "out of" it: k_i is written to the state. With r the factor 1 / |k| (of q: A^-1/2
 * / |q|), G the sum of g in the chunk, n its last row, u = e^G, D_ij = e^(G_i - G_j):
 *
 *   L_ij = beta_i D_ij r_i r_j <k_i, k_j> for j < i;  T = (I + L)^-1 diag(beta)
 *   M_ij = D_ij r_i r_j <q_i, k_j> for j <= i
 *   X = T (V - (r u K) S);  O = (r u Q) S + M X;  S = u_n S + K^T (r D_n X)
 *
 * and backward, with E the gradient of the state after the chunk and Y the gradient of V:
 *
 *   dX = (r D_n K) E + M^T dO;  Y = T^T dX;  E = u_n E + Q^T (r u dO) - K^T (r u Y)
 *   dq_i = u_i S dO_i + sum_j D_ij <dO_i, X_j> k_j
 *   dk_i = - u_i S Y_i - sum_j D_ij <Y_i, X_j> k_j                                       into row i of the chunk
 *          + D_ni E X_i + sum_j D_ji <dO_j, X_i> q_j - sum_j D_ji <Y_j, X_i> k_j         out of row i
 *   db_i = <Y_i, X_i> (1 - beta_i) / beta_i
 *   dG_i = <q_i, dq_i> + <k_i, dk_i into> - <k_i, dk_i out of>
 *   dg_i = sum of dG over the rows from i on + <S after the chunk, E> */

enum {
    DELTA_TILE = DELTA_ROWS * 128 /* bytes of a tile of 64 columns */
};

/* Factors of a row, for one value head; r, u and D as above. */
struct delta_factors {
    float into, out, query, up; /* r u and r D_n of k; r u of q; u */
};
struct delta_gates {
    float g, beta, query, key; /* G / ln 2, beta; r of q and of k */
};

struct delta_wgmma_args {
    CUtensorMap qkv, inverse, m, x, dout, dv; /* boxes of a tile; [T, columns / 64, 64] */
    CUtensorMap states, grads;                /* boxes of 128 rows of 64 columns; [rows, 2, 64] */
    int n_key, n_value, group, n_tok, n_seq;
    int n_item; /* slots times key heads */
    int64_t ld_qkv, ld_ba, ld_o, ld_dqkv, ld_dba;
    const int32_t *cu, *links;        /* of segments; links NULL: of sequences, without prefixes */
    int n_level, level, segment_slot; /* segment_slot: the first slot of segments */
    const bf16 *qkv_rows, *ba;
    const float *a_log, *dt_bias;
    bf16 *o, *dqkv, *dba;
    bf16 *inverse_rows, *m_rows;   /* [T, N * 64]: T and M */
    struct delta_factors *factors; /* [N, T] */
    struct delta_gates *gates;     /* [N, T] */
    bf16 *x_rows;                  /* [T, N * 128] */
    bf16 *state_rows, *grad_rows;  /* [slots, N, value column, 128]: S^T and E^T */
};

/* delta_wgmma.cu: the ops, where scratch_delta.chunks */
void delta_fwd_wgmma(const struct scratch_delta *s, struct tensor o, struct tensor qkv, struct tensor ba,
                     struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                     const struct delta_shape *shape);
void delta_bwd_wgmma(const struct scratch_delta *s, struct tensor dqkv, struct tensor dba, struct tensor dout,
                     struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                     const struct seqs *seqs, const struct delta_shape *shape);
/* delta_wgmma_chunk.cu: factors, T and M */
void delta_wgmma_chunks(const struct delta_wgmma_args *p);
/* delta_wgmma_scan.cu: O; X and the states; Y and E */
void delta_wgmma_outputs(const struct delta_wgmma_args *p);
void delta_wgmma_states(const struct delta_wgmma_args *p);
void delta_wgmma_back(const struct delta_wgmma_args *p);
/* delta_wgmma_grad.cu: gradients of q, k, b and a */
void delta_wgmma_grads(const struct delta_wgmma_args *p);

/* The slot of the state at the start of a chunk that is not the first of its sequence. */
__host__ __device__ static inline int delta_state_slot(int row) { return row / DELTA_ROWS - 1; }
/* The slot of a link of segment i (SEGMENT_*); -1: none. */
static __device__ inline int delta_segment_slot(const struct delta_wgmma_args &p, int i, int link)
{
    const int slot = p.links ? p.links[i * SEGMENT_LINKS + link] : -1;
    return slot < 0 ? -1 : p.segment_slot + slot;
}

/* A chunk of a sequence. before, after: the slots of the state before it and of E after it; -1: zero. */
struct delta_chunk {
    int row, n, before, after; /* first row of the micro-batch, rows; n <= 0: an unused slot */
};
/* Slots of sequence s begin at cu[s] / 64 + s: an upper bound of the chunks before it. */
static __device__ inline struct delta_chunk delta_find_chunk(const struct delta_wgmma_args &p, int slot)
{
    const int s = last_index(p.n_seq, [&](int i) { return p.cu[i] / DELTA_ROWS + i <= slot; });
    const int first = p.cu[s], len = p.cu[s + 1] - first, index = slot - first / DELTA_ROWS - s;
    const int row = first + index * DELTA_ROWS;
    const bool last = (index + 1) * DELTA_ROWS >= len;
    struct delta_chunk c = {row, min(DELTA_ROWS, len - index * DELTA_ROWS),
                            index > 0 ? delta_state_slot(row) : delta_segment_slot(p, s, SEGMENT_IN),
                            last ? delta_segment_slot(p, s, SEGMENT_OUT) : delta_state_slot(row + DELTA_ROWS)};
    return c;
}
/* A grid of `heads` blocks per slot. */
static inline unsigned delta_slots(const struct delta_wgmma_args *p, int heads)
{
    return grid_x(((int64_t)p->n_tok / DELTA_ROWS + p->n_seq) * heads);
}

/* 2^x by the special function unit: relative error 2^-22. */
static __device__ __forceinline__ float delta_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Loads four 8x8 matrices, transposed or not; lanes 8i .. 8i+7 have the addresses of the rows of matrix i. */
template <bool TRANS> __device__ static __forceinline__ void load_tiles(uint32_t (&x)[4], uint32_t shared)
{
    if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(shared)
                     : "memory");
}

/* This lane's address in a tile [token][64 columns] for load_tiles<true> and store_matrix4<true>, which transpose a
 * block of 16 x 16: columns from 16 warp on, tokens from 16 step on. */
__device__ static __forceinline__ uint32_t columns_at(uint32_t tile, int warp, int step)
{
    const int lane = threadIdx.x % 32;
    return tile + sm90_swizzle(16 * step + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
}
/* This lane's address in a tile for load_tiles<false> and store_matrix4<false>: the warp's 16 rows by 16 columns from
 * 16 step on. */
__device__ static __forceinline__ uint32_t rows_at(uint32_t tile, int warp, int step)
{
    const int lane = threadIdx.x % 32;
    return tile + sm90_swizzle(16 * warp + lane / 8 % 2 * 8 + lane % 8, 2 * step + lane / 16);
}

/* Zeroes rows n .. 63 of `tiles` adjacent tiles, by `threads` threads. The caller then needs fence_proxy_async and a
 * barrier. */
__device__ static __forceinline__ void delta_clear(uint32_t tile, int tiles, int n, int thread, int threads)
{
    const int each = (DELTA_ROWS - n) * 8;
    for (int i = thread; i < each * tiles; i += threads)
        asm volatile(
            "st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(tile + i / each * DELTA_TILE + n * 128 + i % each * 16),
            "r"(0)
            : "memory");
}

/* acc (+)= a b over 16 STEPS columns of a, which is in registers. The rows of tile b are columns of acc (K-major) or,
 * with TRANS, columns of a. */
template <bool TRANS, int STEPS, int FIRST = 0, int OF>
__device__ static __forceinline__ void delta_dot(float (&acc)[32], const uint32_t (&a)[OF][4], uint32_t b,
                                                 bool accumulate)
{
    const uint64_t desc = sm90_descriptor(b, 16, 1024);
#pragma unroll
    for (int k = 0; k < STEPS; k++) wgmma<TRANS>(acc, a[FIRST + k], desc + (TRANS ? 128 : 2) * k, accumulate || k > 0);
}

/* Rounds an accumulator to bf16 as an operand, steps FIRST .. FIRST + 3. */
template <int FIRST = 0, int OF>
__device__ static __forceinline__ void delta_pack(uint32_t (&a)[OF][4], const float (&x)[32])
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[FIRST + k][i] = pack2(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
    }
}
/* The two bf16 of a word. */
__device__ static __forceinline__ float low_half(uint32_t w) { return __uint_as_float(w << 16); }
__device__ static __forceinline__ float high_half(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

#endif
#endif
