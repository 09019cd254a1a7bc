/* mamba_mma.cuh - Mamba-2 in chunks of 64 tokens with mma.sync: what its kernels share (math: kernels/cpu/mamba.c).
 *
 * For a head and a chunk of a sequence, with s the sum of the logarithms of the decays in the chunk, C its last token:
 *   states   S = e^(s_C) S + (e^(s_C - s) step B)^T X, from the first chunk on, S [A, B]
 *            E = e^(s_C) E + (e^s C)^T dY, from the last chunk on: the gradient of the state after the chunk before
 *   outputs  Y = M (step X) + e^s (C S) + D X,  M_ij = e^(s_i - s_j) <c_i, b_j> for j <= i
 *   grads    dV = M^T dY + e^(s_C - s) (B E);  dX = step dV + D dY;  K_ij = e^(s_i - s_j) step_j <dY_i, x_j> for j <= i
 *            dC = K B + e^s (dY S^T);  dB = K^T C + (e^(s_C - s) step X) E^T, both summed over the heads of a group
 *            dstep_i = <dV_i, x_i> - exp(A_log) (the sum over rows from i on of ds, + e^(s_C) <S, E> + the sum of q)
 *            ds = r - q + the sum of K_ij <c_i, b_j> over a row, less that over a column, without the diagonal;
 *            r_i = <e^(s_i) (dY S^T)_i, c_i>, q_j = <e^(s_C - s_j) step_j (B E)_j, x_j>
 * No exponent is positive. M, and K summed over heads, are rounded to bf16 for products; sums and states are f32.
 *
 * An item is a block of up to 64 columns of a head. A head wider than 64 has two, which do not depend on each other. */
#ifndef MT_CUDA_MAMBA_MMA_H
#define MT_CUDA_MAMBA_MMA_H

#include "kernels/cuda/parts/mamba.cuh"
#include "kernels/cuda/parts/tiles.cuh"

enum {
    ROWS = MT_MAMBA_CHUNK,
    COLS = MAMBA_COLS,
    WIDTH = 128,                 /* columns of a tile of b or c */
    ROW_TILE = ROWS * COLS * 2,  /* bytes of a tile of x, y or dy */
    WIDE_TILE = ROWS * WIDTH * 2 /* bytes of a tile of b or c, and of a state [WIDTH, COLS] */
};

struct item {
    int head, half, col, width; /* col: the first in y */
};
static __device__ __forceinline__ int items_of(const struct mamba_job &job) { return (job.head_dim + COLS - 1) / COLS; }
static __device__ __forceinline__ struct item find_item(const struct mamba_job &job, int i)
{
    const int head = i / items_of(job), half = i % items_of(job);
    return {head, half, head * job.head_dim + half * COLS, min((int)COLS, job.head_dim - half * COLS)};
}

/* Slots of states [A, COLS]: the state before a chunk that is not the first of its segment is in slot row / ROWS - 1,
 * where row is the chunk's first row in the batch: no two such chunks have the same slot. Then come the slots of
 * segments (struct segments). */
static __device__ __forceinline__ int chunk_slot(int64_t row) { return (int)(row / ROWS) - 1; }
static __device__ __forceinline__ int segment_slot(const struct mamba_job &job, int slot)
{
    return slot < 0 ? -1 : (int)(job.n_tok / ROWS) + slot;
}
/* A link of segment i (SEGMENT_*); -1 without prefixes. */
static __device__ __forceinline__ int link_of(const struct mamba_job &job, int i, int link)
{
    return job.links ? job.links[i * SEGMENT_LINKS + link] : -1;
}

struct chunk {
    int64_t row;       /* of the batch */
    int n;             /* rows; at most 0: an unused slot */
    int before, after; /* slots of the state before the chunk, and of the gradient of the state after it; -1: zero */
};
static __device__ inline struct chunk find_chunk(const struct mamba_job &job, int slot)
{
    const struct seq_block b = find_seq_block(job.cu, job.n_seq, slot, ROWS);
    const int64_t row = b.first + b.block * ROWS;
    return {row, min((int)ROWS, b.len - b.block * ROWS),
            b.block > 0 ? chunk_slot(row) : segment_slot(job, link_of(job, b.seq, SEGMENT_IN)),
            b.block + 1 < b.n_block ? chunk_slot(row + ROWS) : segment_slot(job, link_of(job, b.seq, SEGMENT_OUT))};
}

static __device__ __forceinline__ bf16 *state_at(const struct mamba_job &job, bf16 *states, int64_t slot, int item)
{
    const int64_t n = (int64_t)job.n_head * items_of(job);
    return states + (slot * n + item) * job.state * COLS;
}

/* load_tile, also of rows that are not aligned. */
template <int TALL, int DIM, int THREADS = TILE_THREADS>
static __device__ __forceinline__ void fetch(char *tile, const bf16 *src, int64_t ld, int n_row, int dim, bool aligned)
{
    if (aligned) {
        load_tile<TALL, DIM, THREADS>(shared_address(tile), src, ld, 0, n_row, dim);
        return;
    }
    for (int i = (int)threadIdx.x; i < TALL * DIM; i += THREADS) {
        const int r = i / DIM, c = i % DIM;
        const bf16 v = r < n_row && c < dim ? src[r * ld + c] : __float2bfloat16_rn(0);
        *(bf16 *)(tile + tile_offset<DIM / 8>(r, c / 8) + c % 8 * 2) = v;
    }
}
/* store_rows of a warp's 16 rows, also of rows that are not aligned. */
template <int DIM>
static __device__ __forceinline__ void put_rows(bf16 *dst, int64_t ld, int n_row, int dim,
                                                const float acc[1][DIM / 8][4], char *tile, bool aligned)
{
    if (aligned) {
        store_rows<1, DIM>(dst, ld, n_row, dim, acc, 1, tile);
        return;
    }
#pragma unroll
    for (int k = 0; k < DIM / 2; k++) {
        const int r = (int)threadIdx.x % 32 / 4 + k % 4 / 2 * 8, c = k / 4 * 8 + (int)threadIdx.x % 4 * 2 + k % 2;
        if (r < n_row && c < dim) dst[r * ld + c] = __float2bfloat16_rn(acc[0][k / 4][k % 4]);
    }
}

/* s / ln 2 and the step of a row of a chunk. Rows beyond its end have s of its last row, and step 0. */
static __device__ __forceinline__ float2 load_gate(const struct mamba_job &job, int head, int64_t row, int n)
{
    const int i = (int)threadIdx.x;
    float2 gate = job.gates[head * job.n_tok + row + min(i, n - 1)];
    if (i >= n) gate.y = 0;
    return gate;
}

static __device__ __forceinline__ float low_half(uint32_t w) { return __uint_as_float(w << 16); }
static __device__ __forceinline__ float high_half(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

/* Two bf16 times a factor each. */
static __device__ __forceinline__ uint32_t scale2(uint32_t w, float low, float high)
{
    return bf16_pack(low * low_half(w), high * high_half(w));
}

/* out = dot products of rows lane / 4 and lane / 4 + 8 of a warp's accumulator with the same rows of a tile. */
template <int NT>
static __device__ __forceinline__ void dot_tile(float out[2], const float acc[NT][4], const char *tile)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint32_t w = *(const uint32_t *)(tile + tile_offset<NT>(lane / 4 + 8 * h, n) + lane % 4 * 4);
            sum += acc[n][2 * h] * low_half(w) + acc[n][2 * h + 1] * high_half(w);
        }
        out[h] = warp_sum(sum, 4);
    }
}
/* acc += factor * the warp's rows of a tile. */
template <int NT> static __device__ __forceinline__ void add_tile(float acc[NT][4], float factor, const char *tile)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 2 * NT; k++) {
        const int n = k / 2, h = k % 2;
        const uint32_t w = *(const uint32_t *)(tile + tile_offset<NT>(lane / 4 + 8 * h, n) + lane % 4 * 4);
        acc[n][2 * h] += factor * low_half(w);
        acc[n][2 * h + 1] += factor * high_half(w);
    }
}
template <int NT> static __device__ __forceinline__ void scale_rows(float acc[NT][4], float upper, float lower)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        acc[n][0] *= upper, acc[n][1] *= upper;
        acc[n][2] *= lower, acc[n][3] *= lower;
    }
}

/* acc += a b: 16 rows of a, DIM wide, by a state [DIM, COLS]. */
template <int DIM>
static __device__ __forceinline__ void add_state(float acc[1][COLS / 8][4], uint32_t a_rows, uint32_t b_rows)
{
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        uint32_t a[1][4];
        load_rows<1, DIM>(a, a_rows, step);
        add_step<1, COLS>(acc, a, b_rows, step);
    }
}

/* Blocks of a kernel with one per chunk. */
static inline int64_t chunk_slots(const struct mamba_job *job) { return job->n_tok / ROWS + job->n_seq; }

/* mamba_mma.cu: gates and states; both directions of states if `back` */
void mamba_states_mma(const struct mamba_job *job, bool back);
/* mamba_mma_grad.cu */
void mamba_grads_mma(const struct mamba_job *job);

#endif
