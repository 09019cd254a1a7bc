/* attn_shared_wgmma_fwd.cu - attention with shared keys on Hopper: forward. Groups of 64 heads of 512 columns.
 *
 * Math, shapes: as attn_shared.cu.
 * Grid: a block per token and 64 heads, tokens with the most entries first. All heads of a token see the same keys, so
 * a tile has no masked key but after the last. Two warpgroups share the 64 x 512 sums: 256 columns each, 128 registers.
 *   Tiles of 64 keys, two stages of 64 KiB; with the queries and weights 201 KiB of shared memory.
 * Schedule, per tile: the first warpgroup computes scores and weights while the second copies the next tile; then both
 *   add weights times keys.
 * Bound: per tile wgmma 2048 clocks per SM; copies from L2 64 KiB, 24 bytes per clock. With a window alone, memory:
 *   4*T*H*A bytes.
 * Numerics: f32 sums; weights rounded to bf16; no atomics, bitwise repeatable.
 * Measured: tests/RESULTS.md, "Attention with shared keys". */
#include "kernels/cuda/attn_shared_wgmma.cuh"

enum { KEYS = 64, TILE_BYTES = KEYS * SHARED_DIM * 2, WEIGHT_BYTES = SHARED_HEADS * PANEL_ROW };
enum { FWD_BYTES = HEAD_TILE + 2 * TILE_BYTES + WEIGHT_BYTES + 1024 };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Online softmax of this thread's two rows. */
struct online {
    float max[2], sum[2], factor[2];
};

/* Scores become weights 2^(c (s - max)), c = scale / ln 2; keys from `live` on have weight 0. max grows only when a
 * score exceeds it by more than `slack`: weights stay below 2^8, and sums rarely change. */
static __device__ __forceinline__ void weigh_scores(float (&s)[32], struct online *x, float c, float slack, int live)
{
    const int column = threadIdx.x % 4 * 2;
    if (live < KEYS) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (8 * (i / 4) + column + i % 2 >= live) s[i] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = s[2 * h], total = 0.0f;
#pragma unroll
        for (int i = 2 * h; i < 32; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const bool grown = top > x->max[h] + slack;
        top = grown ? top : x->max[h];
        x->factor[h] = grown ? exp2_approx((x->max[h] - top) * c) : 1.0f;
        x->max[h] = top;
        const float shift = top == -INFINITY ? 0.0f : top * c;
#pragma unroll
        for (int i = 2 * h; i < 32; i += 4) {
            s[i] = exp2_approx(s[i] * c - shift);
            s[i + 1] = exp2_approx(s[i + 1] * c - shift);
            total += s[i] + s[i + 1];
        }
        x->sum[h] = x->sum[h] * x->factor[h] + total;
    }
}

/* Weights as bf16, the A operand of the sums: 64 rows of 64 keys. */
static __device__ __forceinline__ void put_weights(char *to, const float (&s)[32])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        char *p = to + sm90_swizzle(row, n) + lane % 4 * 4;
        *(uint32_t *)p = pack2(s[4 * n], s[4 * n + 1]);
        *(uint32_t *)(p + 8 * PANEL_ROW) = pack2(s[4 * n + 2], s[4 * n + 3]);
    }
}

static __device__ __forceinline__ void add_tile(float (&o)[128], uint32_t weights, uint32_t tile, int half)
{
    const uint32_t a = low_word(weights, 16);
    const uint32_t b = low_word(tile + half * 4 * KEYS * PANEL_ROW, KEYS * PANEL_ROW);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) wgmma<true>(o, descriptor_at(a, 32 * k), descriptor_at(b, 2048 * k), true);
    wgmma_commit();
}

static __device__ __forceinline__ void dot_tile(float (&s)[32], uint32_t q, uint32_t tile)
{
    const uint32_t a = low_word(q, 16), b = low_word(tile, 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < SHARED_DIM / 16; k++)
        wgmma<false>(s, descriptor_at(a, k / 4 * HEAD_PANEL + k % 4 * 32),
                     descriptor_at(b, k / 4 * KEYS * PANEL_ROW + k % 4 * 32), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_use(s);
}
#endif

static __global__ void __launch_bounds__(PAIR, 1) shared_fwd_wgmma_kernel(const struct shared_args a)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ float factors[SHARED_HEADS], sums[SHARED_HEADS];
    char *smem = aligned_shared(bytes), *weights = smem + HEAD_TILE + 2 * TILE_BYTES;
    const uint32_t q = sm90_shared(smem), tiles = q + HEAD_TILE, w = tiles + 2 * TILE_BYTES;
    const int n_group = a.n_head / SHARED_HEADS, t = a.n_tok - 1 - blockIdx.x / n_group;
    const int head0 = blockIdx.x % n_group * SHARED_HEADS, warp = threadIdx.x / 32;
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; /* this thread's rows: row, row + 8 */
    const struct sight sight = sight_of(a, t);
    const int n = __shfl_sync(~0u, count_keys(a, sight), 0), n_tile = (n + KEYS - 1) / KEYS;
    copy_heads<8>(q, a.q + t * a.ld_q + (int64_t)head0 * SHARED_DIM, warp);
    copy_keys<KEYS, 8>(tiles, find_key<KEYS, 8>(a, sight, 0, n, warp), 0, n, warp);
    copy_commit();

    const float c = a.scale * LOG2_E, slack = 8.0f / c;
    float o[128] = {};
    struct online x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        x.max[h] = a.sinks ? a.sinks[head0 + row + 8 * h] / a.scale : -INFINITY;
        x.sum[h] = 0.0f;
        x.factor[h] = 1.0f;
    }
    for (int i = 0; i < n_tile; i++) {
        const uint32_t tile = tiles + i % 2 * TILE_BYTES;
        copy_wait<0>();
        fence_proxy_async();
        __syncthreads(); /* this tile is complete; no product reads the other any more */
        if (i == 0 && threadIdx.x == PAIR - 1) prefetch_heads(a, a.q, a.ld_q, a.n_tok, blockIdx.x + a.n_sm);
        if (wg == 0) {
            float s[32];
            dot_tile(s, q, tile);
            weigh_scores(s, &x, c, slack, n - i * KEYS);
            put_weights(weights, s);
            if (threadIdx.x % 4 == 0) factors[row] = x.factor[0], factors[row + 8] = x.factor[1];
            fence_proxy_async();
        } else if (i + 1 < n_tile) {
            const int k0 = (i + 1) * KEYS;
            copy_keys<KEYS, 4>(tiles + (i + 1) % 2 * TILE_BYTES, find_key<KEYS, 4>(a, sight, k0, n, warp - 4), k0, n,
                               warp - 4);
            copy_commit();
        }
        __syncthreads(); /* the weights are complete */
        if (wg == 1) x.factor[0] = factors[row], x.factor[1] = factors[row + 8];
        if (__any_sync(~0u, x.factor[0] != 1.0f || x.factor[1] != 1.0f)) {
#pragma unroll
            for (int j = 0; j < 128; j++) o[j] *= x.factor[j / 2 % 2];
        }
        add_tile(o, w, tile, wg);
        wgmma_wait<0>();
        wgmma_use(o);
    }

    if (wg == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = x.sum[h];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int head = row + 8 * h;
            if (a.sinks) total += exp2_approx((a.sinks[head0 + head] / a.scale - x.max[h]) * c);
            if (threadIdx.x % 4 == 0) {
                sums[head] = total;
                a.lse[t * a.ld_lse + head0 + head] = x.max[h] * a.scale + logf(total);
            }
        }
    }
    __syncthreads();
    const float inverse[2] = {1.0f / sums[row], 1.0f / sums[row + 8]};
    store_heads(a.o + t * a.ld_o + (int64_t)(head0 + warp % 4 * 16) * SHARED_DIM + wg * SHARED_COLUMNS, o, inverse,
                smem + warp * 4096);
#else
    __trap(); /* cuda.hopper is true only when this was compiled for sm_90a */
#endif
}

void shared_fwd_wgmma(const struct shared_args *a)
{
    static bool ready;
    if (!ready) allow_shared_bytes((const void *)shared_fwd_wgmma_kernel, FWD_BYTES);
    ready = true;
    const unsigned grid = grid_x((int64_t)a->n_tok * (a->n_head / SHARED_HEADS));
    shared_fwd_wgmma_kernel<<<grid, PAIR, FWD_BYTES, cuda.stream>>>(*a);
    CUDA_CHECK_LAUNCH();
}
