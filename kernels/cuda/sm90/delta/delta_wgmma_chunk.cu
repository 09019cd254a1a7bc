/* delta_wgmma_chunk.cu - gated delta rule on Hopper: factors of rows, T and M of every chunk (math: delta_wgmma.cuh).
 *
 * Shapes: qkv [T,C], ba [T,2N] bf16; T and M [T,N*64] bf16, a row of 64 per token and value head; factors and gates
 *   [N,T] of four f32.
 * Needs: sm_90a, rows of qkv aligned to 16 bytes.
 * Grid: a block of 4 warps per chunk and key head. <k, k> and <q, k> by mma.sync, a warp for 16 rows, stay in registers
 *   for all value heads of the key head. Two value heads at a time: two warps invert I + L in f32, in place: two blocks
 *   of 32 by substitution, a lane for a column, and the block below them by products, each the sum of three products of
 *   bf16 (split_pair). 53 KiB, four blocks per SM.
 * Bound: 2 T (2 * key heads * 128 + 2 N 64) + 32 T N bytes: memory bound; the inverse is 40 k multiply-adds per chunk
 *   and value head.
 * Numerics: products of bf16 are exact in f32; the inverse is f32 until T is rounded to bf16. G, the running sum of g,
 *   is f32: a difference of two is off by at most 64 roundings of the chunk's largest |G|. */
#include "kernels/cuda/sm90/delta/delta_wgmma.cuh"
#include "kernels/cuda/parts/mma.cuh"

enum {
    THREADS = 128,
    HEADS = 2,   /* value heads at a time, two warps each for the inverse */
    STRIDE = 72, /* floats of a row of L: rows of a quarter warp lie in different banks */
    BLOCK = 8,   /* rows of a step of the inverse */
    HALF = DELTA_ROWS / 2,
    WIDE = DELTA_DIM / 8 /* 16-byte chunks of a row of q and k */
};

struct chunk_memory {
    union {
        struct {
            char q[DELTA_ROWS * DELTA_DIM * 2], k[DELTA_ROWS * DELTA_DIM * 2];
        };
        float l[HEADS][DELTA_ROWS * STRIDE]; /* L, then its inverse */
    };
    char m[HEADS][DELTA_TILE];
    float rq[DELTA_ROWS], rk[DELTA_ROWS];
    float g[HEADS][DELTA_ROWS], beta[HEADS][DELTA_ROWS];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* q and k of the chunk, zero beyond its end, and 1 / norm of every row (of q times A^-1/2). */
static __device__ __forceinline__ void load_vectors(struct chunk_memory *s, const struct delta_wgmma_args &p,
                                                    const struct delta_chunk &c, int key)
{
    const int half = (int)threadIdx.x / 16, lane = (int)threadIdx.x % 16;
    uint4 v[2][DELTA_ROWS / 8];
#pragma unroll
    for (int i = 0; i < DELTA_ROWS / 8; i++) {
        const int row = 8 * i + half;
        const bf16 *from = p.qkv_rows + (c.row + row) * p.ld_qkv + key * DELTA_DIM + lane * 8;
#pragma unroll
        for (int of_k = 0; of_k < 2; of_k++)
            v[of_k][i] = row < c.n ? load16(from + of_k * p.n_key * DELTA_DIM) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int of_k = 0; of_k < 2; of_k++) {
#pragma unroll
        for (int i = 0; i < DELTA_ROWS / 8; i++) {
            const int row = 8 * i + half;
            float x[8], sum = 0;
            unpack8(x, v[of_k][i]);
#pragma unroll
            for (int e = 0; e < 8; e++) sum += x[e] * x[e];
            sum = warp_sum(sum, 16);
            *(uint4 *)((of_k ? s->k : s->q) + tile_offset<WIDE>(row, lane)) = v[of_k][i];
            if (lane == 0) (of_k ? s->rk : s->rq)[row] = (of_k ? 1.0f : rsqrtf((float)DELTA_DIM)) / sqrtf(sum + 1e-6f);
        }
    }
}

/* acc[of q, of k] = rows 16 warp .. of q and k times all k up to the diagonal. */
static __device__ __forceinline__ void dot_vectors(float (&acc)[2][DELTA_ROWS / 8][4], const struct chunk_memory *s,
                                                   int warp)
{
    const int lane = (int)threadIdx.x % 32;
    const uint32_t k0 = shared_address(s->k);
#pragma unroll
    for (int step = 0; step < DELTA_DIM / 16; step++) {
        uint32_t a[2][4];
        const uint32_t at = tile_offset<WIDE>(16 * warp + lane % 16, 2 * step + lane / 16);
        load_matrix4(a[0], shared_address(s->q) + at);
        load_matrix4(a[1], k0 + at);
#pragma unroll
        for (int j = 0; j < DELTA_ROWS / 16; j++) {
            if (j > warp) continue;
            uint32_t b[4]; /* rows of k 16 j .., then the next 8 */
            load_matrix4(b, k0 + tile_offset<WIDE>(16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
            for (int of_k = 0; of_k < 2; of_k++) {
                mma_bf16(acc[of_k][2 * j], a[of_k], b);
                mma_bf16(acc[of_k][2 * j + 1], a[of_k], b + 2);
            }
        }
    }
}

/* The gates of a value head, by one warp, a lane for two rows. Rows beyond the chunk have beta 0, and G of its last
 * row. */
static __device__ __forceinline__ void head_gates(struct chunk_memory *s, const struct delta_wgmma_args &p,
                                                  const struct delta_chunk &c, int n, int slot)
{
    const int lane = (int)threadIdx.x % 32;
    const float decay = expf(p.a_log[n]), dt = p.dt_bias[n];
    float g[2], beta[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 2 * lane + i;
        g[i] = beta[i] = 0;
        if (row >= c.n) continue;
        const bf16 *ba = p.ba + (c.row + row) * p.ld_ba;
        const float a = __bfloat162float(ba[p.n_value + n]) + dt;
        beta[i] = 1 / (1 + expf(-__bfloat162float(ba[n])));
        g[i] = -decay * (fmaxf(a, 0) + log1pf(expf(-fabsf(a)))) * 1.44269504f;
    }
    float sum = g[0] + g[1];
    for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    const float last = __shfl_sync(~0u, sum, 31), before = __shfl_up_sync(~0u, sum, 1);
    g[0] += lane ? before : 0;
    g[1] = sum;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 2 * lane + i;
        s->g[slot][row] = g[i];
        s->beta[slot][row] = beta[i];
        if (row >= c.n) continue;
        const float up = exp2f(g[i]), rk = s->rk[row], rq = s->rq[row];
        const int64_t at = n * (int64_t)p.n_tok + c.row + row;
        ((float4 *)p.factors)[at] = make_float4(rk * up, rk * exp2f(last - g[i]), rq * up, up);
        ((float4 *)p.gates)[at] = make_float4(g[i], beta[i], rq, rk);
    }
}

/* L to s->l, M to s->m, of value head `slot`; dots as from dot_vectors. */
static __device__ __forceinline__ void decay_dots(struct chunk_memory *s, const float (&dots)[2][DELTA_ROWS / 8][4],
                                                  int slot, int warp)
{
    const int lane = (int)threadIdx.x % 32;
    float *l = s->l[slot];
    char *m = s->m[slot];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = 16 * warp + lane / 4 + 8 * h;
        const float g = s->g[slot][i], of_l = s->beta[slot][i] * s->rk[i], of_m = s->rq[i];
#pragma unroll
        for (int b = 0; b < DELTA_ROWS / 8; b++) {
            const int j = 8 * b + lane % 4 * 2;
            float lv[2] = {0, 0}, mv[2] = {0, 0};
            if (b <= 2 * warp + 1) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float d = j + e <= i ? delta_exp2(g - s->g[slot][j + e]) * s->rk[j + e] : 0;
                    lv[e] = j + e < i ? of_l * d * dots[1][b][2 * h + e] : 0;
                    mv[e] = of_m * d * dots[0][b][2 * h + e];
                }
            }
            *(float2 *)(l + i * STRIDE + j) = make_float2(lv[0], lv[1]);
            *(uint32_t *)(m + sm90_swizzle(i, b) + lane % 4 * 4) = pack2(mv[0], mv[1]);
        }
    }
}

/* l = (I + l)^-1 of a block of 32 rows and columns, in place, by a warp, a lane for a column: t_i = [i is the column] -
 * sum of l_ik t_k over k < i, in steps of BLOCK rows. */
static __device__ __forceinline__ void invert_block(float *l)
{
    const int column = (int)threadIdx.x % 32;
    for (int at = 0; at < HALF; at += BLOCK) {
        float t[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i++) t[i] = at + i == column;
        for (int k = 0; k < at; k += 4) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] = l[(k + e) * STRIDE + column];
#pragma unroll
            for (int i = 0; i < BLOCK; i++) {
                const float4 v = *(const float4 *)(l + (at + i) * STRIDE + k);
                t[i] -= v.x * x[0] + v.y * x[1] + (v.z * x[2] + v.w * x[3]);
            }
        }
#pragma unroll
        for (int i = 1; i < BLOCK; i++) {
            const float4 v[2] = {*(const float4 *)(l + (at + i) * STRIDE + at),
                                 *(const float4 *)(l + (at + i) * STRIDE + at + 4)};
            const float row[BLOCK] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
            for (int k = 0; k < i; k++) t[i] -= row[k] * t[k];
        }
        __syncwarp(); /* no lane reads these rows of l any more */
#pragma unroll
        for (int i = 0; i < BLOCK; i++) l[(at + i) * STRIDE + column] = t[i];
    }
}

/* Splits x and y: *high has them rounded to bf16, *low the rest. Three products of these parts give a product with 16
 * bits. */
static __device__ __forceinline__ void split_pair(uint32_t *high, uint32_t *low, float x, float y)
{
    *high = pack2(x, y);
    *low = pack2(x - low_half(*high), y - high_half(*high));
}
/* acc = a b of 32 columns and rows: 16 rows of a, 32 columns of b, by a warp. */
static __device__ __forceinline__ void multiply(float (&acc)[4][4], const float *a, const float *b)
{
    const int row = (int)threadIdx.x % 32 / 4, col = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = 0;
    }
#pragma unroll
    for (int k = 0; k < HALF; k += 16) {
        uint32_t ah[4], al[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = *(const float2 *)(a + (row + i % 2 * 8) * STRIDE + k + i / 2 * 8 + col);
            split_pair(&ah[i], &al[i], v.x, v.y);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t bh[2], bl[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float *at = b + (k + i * 8 + col) * STRIDE + 8 * n + row;
                split_pair(&bh[i], &bl[i], at[0], at[STRIDE]);
            }
            mma_bf16(acc[n], al, bh);
            mma_bf16(acc[n], ah, bl);
            mma_bf16(acc[n], ah, bh);
        }
    }
}
static __device__ __forceinline__ void put_product(float *to, const float (&acc)[4][4], float sign)
{
    to += (int)threadIdx.x % 32 / 4 * STRIDE + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(float2 *)(to + 8 * h * STRIDE + 8 * n) = make_float2(sign * acc[n][2 * h], sign * acc[n][2 * h + 1]);
    }
}
/* l = (I + l)^-1, in place, by two warps. With blocks of 32, the inverse of [A, 0; C, B] is [A', 0; -B' C A', B']. */
static __device__ __forceinline__ void invert(float *l, int warp, int barrier)
{
    float *lower = l + HALF * STRIDE, *rows = lower + 16 * warp * STRIDE, acc[4][4];
    invert_block(l + warp * HALF * (STRIDE + 1));
    named_sync(barrier, 64);
    multiply(acc, rows, l);
    named_sync(barrier, 64);
    put_product(rows, acc, 1);
    named_sync(barrier, 64);
    multiply(acc, rows + HALF, lower);
    named_sync(barrier, 64);
    put_product(rows, acc, -1);
}

static __device__ __forceinline__ void store_matrices(const struct chunk_memory *s, const struct delta_wgmma_args &p,
                                                      const struct delta_chunk &c, int n, int slot, int thread)
{
    const int chunk = thread % 8;
    float beta[8];
    load_f32x8(beta, s->beta[slot] + chunk * 8);
    for (int row = thread / 8; row < c.n; row += 8) {
        const int64_t to = ((int64_t)(c.row + row) * p.n_value + n) * DELTA_ROWS + chunk * 8;
        float t[8];
        load_f32x8(t, s->l[slot] + row * STRIDE + chunk * 8);
#pragma unroll
        for (int e = 0; e < 8; e++) t[e] *= beta[e];
        store16(p.inverse_rows + to, pack8(t));
        store16(p.m_rows + to, load16(s->m[slot] + sm90_swizzle(row, chunk)));
    }
}
#endif

static __global__ void __launch_bounds__(THREADS, 4)
    delta_chunk_kernel(const __grid_constant__ struct delta_wgmma_args p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char bytes[];
    struct chunk_memory *s = (struct chunk_memory *)bytes;
    const struct delta_chunk c = delta_find_chunk(p, (int)blockIdx.x / p.n_key);
    const int key = (int)blockIdx.x % p.n_key, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (c.n <= 0) return;
    load_vectors(s, p, c, key);
    __syncthreads();
    float dots[2][DELTA_ROWS / 8][4] = {};
    dot_vectors(dots, s, warp);
    for (int v = 0; v < p.group; v += HEADS) {
        const int n = key * p.group + v, heads = min(HEADS, p.group - v);
        __syncthreads(); /* q and k, or the matrices of the heads before, are no longer read */
        if (warp < heads) head_gates(s, p, c, n + warp, warp);
        __syncthreads();
        for (int i = 0; i < heads; i++) decay_dots(s, dots, i, warp);
        __syncthreads();
        const int slot = warp / 2, thread = (int)threadIdx.x % 64;
        if (slot >= heads) continue;
        invert(s->l[slot], warp % 2, 1 + slot);
        named_sync(1 + slot, 64);
        store_matrices(s, p, c, n + slot, slot, thread);
    }
#else
    __trap();
#endif
}

void delta_wgmma_chunks(const struct delta_wgmma_args *p)
{
    allow_shared<delta_chunk_kernel>((int)sizeof(struct chunk_memory));
    delta_chunk_kernel<<<delta_slots(p, p->n_key), THREADS, sizeof(struct chunk_memory), cuda.stream>>>(*p);
    CUDA_CHECK_LAUNCH();
}
