/* tiles.cuh - tiles of bf16 in shared memory, and the products of a warp (mma.sync).
 *
 * A tile is some rows of one head, DIM bf16 each, in chunks of 16 bytes. Chunk c of row r is stored at c ^ (r & 7), so
 * that ldmatrix, which reads the same chunk of 8 rows, has no bank conflicts. Tiles are aligned to 512 bytes: the next
 * chunk is then an xor of the address, the next 16 rows an addition.
 *
 * Layout of a warp's accumulator c[MT][NT][4]: element e of lane 4g + t is row 16 m + g + 8 (e / 2), column
 * 8 n + 2 t + e % 2. Two adjacent n, rounded to bf16, are the A operand of a product that sums over the columns, so
 * weights never pass through shared memory. */
#ifndef MT_CUDA_TILES_H
#define MT_CUDA_TILES_H

#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { TILE_THREADS = 128 }; /* of a block, unless a kernel says otherwise */

/* All THREADS of a block load rows row .. row+ROWS-1 of a matrix [n_row, dim]; zeros beyond its end. */
template <int ROWS, int DIM, int THREADS = TILE_THREADS>
__device__ static inline void load_tile(uint32_t tile, const bf16 *src, int64_t ld, int row, int n_row, int dim)
{
    const int chunks = DIM / 8, step = THREADS / chunks;
    const int r = threadIdx.x / chunks, c = threadIdx.x % chunks;
    const uint32_t dst = tile + tile_offset<DIM / 8>(r, c);
    static_assert(step % 8 == 0 || step == 4 || step == 2,
                  "the swizzled position of chunk c repeats after a few steps");
#pragma unroll
    for (int i = 0; i < ROWS; i += step) {
        const bool present = row + r + i < n_row && c * 8 < dim;
        copy_async16((dst ^ ((i % 8) << 4)) + i * DIM * 2, src + (present ? (row + r + i) * ld + c * 8 : 0),
                     present ? 16 : 0);
    }
}

/* ldmatrix address of this lane in a tile. lane_rows: for the A operand, or B transposed. lane_cols: for the B operand,
 * or A transposed. An operand is transposed where the product sums over the rows of its tile. */
template <int DIM> __device__ static inline uint32_t lane_rows(uint32_t tile)
{
    const int lane = threadIdx.x % 32, r = lane % 16, c = lane / 16;
    return tile + tile_offset<DIM / 8>(r, c);
}
template <int DIM> __device__ static inline uint32_t lane_cols(uint32_t tile)
{
    const int lane = threadIdx.x % 32, r = lane % 8 + lane / 16 * 8, c = lane / 8 % 2;
    return tile + tile_offset<DIM / 8>(r, c);
}

/* A operand: elements 16 step .. 16 step + 15 of 16 MT rows. */
template <int MT, int DIM> __device__ static inline void load_rows(uint32_t a[MT][4], uint32_t rows, int step)
{
#pragma unroll
    for (int m = 0; m < MT; m++) load_matrix4(a[m], (rows ^ (step << 5)) + m * 16 * DIM * 2);
}

/* c += a b^T over 16 elements of a row; b: 8 NT rows, address from lane_cols. */
template <int MT, int NT, int DIM>
__device__ static inline void dot_step(float c[MT][NT][4], const uint32_t a[MT][4], uint32_t b, int step)
{
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        uint32_t f[4];
        load_matrix4(f, (b ^ (step << 5)) + n * 8 * DIM * 2);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            mma_bf16(c[m][n], a[m], f);
            mma_bf16(c[m][n + 1], a[m], f + 2);
        }
    }
}

/* c += a b^T over all DIM elements; a: 16 MT rows, address from lane_rows. */
template <int MT, int NT, int DIM> __device__ static inline void dot_rows(float c[MT][NT][4], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        uint32_t f[MT][4];
        load_rows<MT, DIM>(f, a, step);
        dot_step<MT, NT, DIM>(c, f, b, step);
    }
}

/* dot_rows with a in registers, for an operand that is the same for all tiles and is read once. */
template <int MT, int NT, int DIM>
__device__ static inline void dot_registers(float c[MT][NT][4], const uint32_t a[DIM / 16][MT][4], uint32_t b)
{
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) dot_step<MT, NT, DIM>(c, a[step], b, step);
}

/* acc += a b over rows 16 step .. 16 step + 15 of b, address from lane_rows. */
template <int MT, int DIM>
__device__ static inline void add_step(float acc[MT][DIM / 8][4], const uint32_t a[MT][4], uint32_t b, int step)
{
#pragma unroll
    for (int n = 0; n < DIM / 8; n += 2) {
        uint32_t f[4];
        load_matrix4_trans(f, (b ^ (n << 4)) + step * 16 * DIM * 2);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            mma_bf16(acc[m][n], a[m], f);
            mma_bf16(acc[m][n + 1], a[m], f + 2);
        }
    }
}

/* acc += p b. p [16 MT, 8 NT]: an accumulator, rounded to bf16 here; b: 8 NT rows, address from lane_rows. */
template <int MT, int NT, int DIM>
__device__ static inline void add_product(float acc[MT][DIM / 8][4], const float p[MT][NT][4], uint32_t b)
{
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = pack2(p[m][n + i / 2][i % 2 * 2], p[m][n + i / 2][i % 2 * 2 + 1]);
        }
        add_step<MT, DIM>(acc, a, b, n / 2);
    }
}

/* Stores the first n_row of a warp's 16 MT rows of dim elements, times factor, as bf16. tile: shared memory for 16 MT
 * rows, free for this warp; rearranging rows there makes every store 16 bytes wide. */
template <int MT, int DIM>
__device__ static inline void store_rows(bf16 *dst, int64_t ld, int n_row, int dim, const float acc[MT][DIM / 8][4],
                                         float factor, char *tile)
{
    const int lane = threadIdx.x % 32, chunks = DIM / 8;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
            char *p = tile + (16 * m + lane / 4) * DIM * 2 + ((n ^ (lane / 4)) << 4) + lane % 4 * 4;
            *(uint32_t *)p = pack2(factor * acc[m][n][0], factor * acc[m][n][1]);
            *(uint32_t *)(p + 8 * DIM * 2) = pack2(factor * acc[m][n][2], factor * acc[m][n][3]);
        }
    }
    __syncwarp();
    const int c = lane % chunks;
    for (int r = lane / chunks; r < MT * 16 && r < n_row && c * 8 < dim; r += 32 / chunks)
        *(uint4 *)(dst + r * ld + c * 8) = *(const uint4 *)(tile + tile_offset<DIM / 8>(r, c));
}

/* acc = factor * acc + a warp's rows of dim elements, of which n_row exist. */
template <int MT, int DIM>
__device__ static inline void add_stored(float acc[MT][DIM / 8][4], float factor, const bf16 *src, int64_t ld,
                                         int n_row, int dim)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int r = 16 * m + lane / 4 + 4 * e;
                uint32_t x = 0;
                if (r < n_row && 8 * n < dim) x = *(const uint32_t *)(src + r * ld + 8 * n + lane % 4 * 2);
                acc[m][n][e] = factor * acc[m][n][e] + __uint_as_float(x << 16);
                acc[m][n][e + 1] = factor * acc[m][n][e + 1] + __uint_as_float(x & 0xffff0000);
            }
        }
    }
}

#endif
