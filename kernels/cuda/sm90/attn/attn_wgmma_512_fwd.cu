/* attn_wgmma_512_fwd.cu - attention forward on Hopper, heads of 512: the function of attn_fwd.cu with wgmma and TMA.
 *
 * Math: as attn_fwd.cu. The first kernel computes, for 128 rows and 256 keys, the weights 2^(c s - u) of the scores s
 *   and their sum; c = scale / ln 2, u is c times the largest score of the row, rounded up. The second computes o = sum
 *   of 2^(u - U) weights v / total; U is the largest u.
 * Shapes: as attn_fwd.cu; scratch of struct scratch_attn_fwd.
 * Needs: as attn_wgmma_512_bwd.cu.
 * Grid: as attn_wgmma_512.cuh. In the second kernel weights are A operands in registers, times 2^(u - U), which is
 *   exact. 209 KiB.
 * Bound: in clocks per SM for a stage wgmma 1024; copies from L2 48 KiB, 48 bytes per clock, so L2 is the limit.
 * Numerics: as attn_fwd.cu; the order of sums depends on the sequence alone. Values beyond the end of a sequence are
 *   cleared, as in attn_wgmma.cuh. */
#include "kernels/cuda/sm90/attn/attn_wgmma_512.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- weights */

/* Scores become weights. part: u and the sum of the weights of this thread's two rows. */
static __device__ __forceinline__ void weigh_scores(uint32_t (&w)[64], const float (&s)[128], float2 (&part)[2],
                                                    float scale_log2)
{
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 2 * h; i < 128; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        part[h] = make_float2(ceilf(quad_max(top) * scale_log2), 0.0f);
        shift[h] = part[h].x == -INFINITY ? 0.0f : part[h].x;
    }
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        const int h = i / 2 % 2;
        const float x = exp2_fast(s[i] * scale_log2 - shift[h]), y = exp2_fast(s[i + 1] * scale_log2 - shift[h]);
        part[h].y += x + y;
        w[i / 2] = pack2(x, y);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) part[h].y = quad_sum(part[h].y);
}

static __device__ __forceinline__ void compute_weights(const struct wide_memory &m, const struct wide_args &c)
{
    const int wg = warpgroup_index(), warp_row = threadIdx.x % 128 / 32 * 16, lane = threadIdx.x % 32;
    struct stage_at at = {0, 0}, place = {0, 0};
    for (;;) {
        const struct wide_item item = next_item(m, &place);
        if (item.kind == NONE) break;
        float s[128];
        float2 part[2];
        uint32_t w[64];
        dot_stages(s, m, wg, &at);
        mask_scores(s, rows_of(c.p, item, wg), c.p.a.window);
        weigh_scores(w, s, part, c.p.a.scale_log2);
        store_weights(c.weights + (item.scratch + wg) * BLOCK_VALUES + warp_row * KEYS, w, m.slice(), item.n);
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (lane % 4 == 0) c.part[item.part + wg * ROWS + warp_row + lane / 4 + 8 * h] = part[h];
    }
}

/* ---- sums */

static __device__ __forceinline__ void load_sums(const struct wide_memory &m, const struct wide_args &c)
{
    const uint32_t n = c.n * c.p.a.n_kv * 2;
    struct stage_at at = {0, 0}, place = {0, 0};
    struct wide_item item = {};
    for (uint32_t i = atomicAdd(&queue.taken, 1); i < n; i = atomicAdd(&queue.taken, 1)) {
        item.kind = O;
        item.half = (int)i % 2;
        if (!pair_at(&item, c, (int)i / 2)) continue;
        pass_item(m, item, &place);
#pragma unroll 1
        for (int t = 0; t < item.n; t++) {
            load_keys(m, c.weights, &c.p.v, item, t, at);
            at = next_stage<STAGES>(at);
        }
    }
    item.kind = NONE;
    pass_item(m, item, &place);
}

/* This thread's two rows: wide_args.part of their first tile; query and head in the block, and whether they exist; U
 * (the head of this file) and 2^-U times the sum of all weights. */
struct softmax {
    const float2 *part;
    int query[2], head[2];
    bool live[2];
    float unit[2], total[2];
};
/* The lanes of a quad have the same rows, and divide the tiles of these rows among them. */
static __device__ __forceinline__ struct softmax finish_softmax(const struct wide_args &c, const struct wide_item &x,
                                                                int wg)
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, q0 = x.at + wg * c.p.n_query;
    const int n_tile = (x.n + TILE_BLOCKS - 1) / TILE_BLOCKS;
    struct softmax r;
    r.part = c.part + x.part + wg * ROWS + row;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float2 *part = r.part + 8 * h;
        const int i = query_of(row + 8 * h, c.p.inverse);
        r.query[h] = q0 + i;
        r.head[h] = x.kv * c.p.group + row + 8 * h - i * c.p.group;
        r.live[h] = i < c.p.n_query && r.query[h] < x.len;
        const float sink = c.p.a.sinks && r.live[h] ? c.p.a.sinks[r.head[h]] * LOG2_E : -INFINITY;
        float unit = -INFINITY, total = 0.0f;
        for (int t = threadIdx.x % 4; t < n_tile; t += 4) unit = fmaxf(unit, part[t * 2 * ROWS].x);
        unit = fmaxf(quad_max(unit), ceilf(sink));
        for (int t = threadIdx.x % 4; t < n_tile; t += 4)
            total += part[t * 2 * ROWS].y * exp2_fast(part[t * 2 * ROWS].x - unit);
        r.unit[h] = unit;
        r.total[h] = quad_sum(total) + exp2_fast(sink - unit);
    }
    return r;
}

/* 2^x as a pair of bf16; x: an integer, at most 0, or -inf. 0 below the normal range. */
static __device__ __forceinline__ uint32_t power_pair(float x)
{
    const uint32_t high = (uint32_t)(max((int)x, -127) + 127) << 23;
    return high | high >> 16;
}
static __device__ __forceinline__ uint32_t scale_pair(uint32_t x, uint32_t factor)
{
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(factor), "r"(0x80008000u)); /* x factor - 0 */
    return y;
}
/* A warp's 16 rows of a block of weights, times factor, as A operands. */
static __device__ __forceinline__ void load_operands(uint32_t (&w)[4][4], uint32_t block, const uint32_t factor[2])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        load_matrix4(w[k], block + sm90_swizzle(row, 2 * k + lane / 16));
#pragma unroll
        for (int i = 0; i < 4; i++) w[k][i] = scale_pair(w[k][i], factor[i % 2]);
    }
}

/* sum += weights v. The units of the next tile (wide_args.part) are loaded while this tile is computed. */
static __device__ __forceinline__ void add_values(float (&sum)[128], const struct wide_memory &m,
                                                  const struct wide_item &x, const struct softmax &r, int wg,
                                                  struct stage_at *at)
{
    const int last = (x.n - 1) / TILE_BLOCKS;
    float next[2] = {r.part[0].x, r.part[8].x};
    uint32_t factor[2], w[4][4];
#pragma unroll 1
    for (int t = 0; t < x.n; t++) {
        if (t % TILE_BLOCKS == 0) {
            const float2 *part = r.part + min(t / TILE_BLOCKS + 1, last) * 2 * ROWS;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                factor[h] = power_pair(next[h] - r.unit[h]);
                next[h] = part[8 * h].x;
            }
        }
        wait_rows(m, *at, x.len - (x.from + t) * KEYS, wg);
        wgmma_wait<0>(); /* of the step before, which reads w */
        if (t > 0) release_before(m, *at);
        load_operands(w, m.left(at->stage) + wg * BLOCK_BYTES, factor);
        wgmma_fence();
        add_rows(sum, w, m.right(at->stage));
        wgmma_commit();
        *at = next_stage<STAGES>(*at);
    }
    wgmma_wait<0>();
    wgmma_use(sum);
    release_before(m, *at);
}

static __device__ __forceinline__ void compute_sums(const struct wide_memory &m, const struct wide_args &c)
{
    const int wg = warpgroup_index();
    const struct attn_args &a = c.p.a;
    struct stage_at at = {0, 0}, place = {0, 0};
    for (;;) {
        const struct wide_item item = next_item(m, &place);
        if (item.kind == NONE) break;
        const struct softmax r = finish_softmax(c, item, wg);
        const float factor[2] = {1.0f / r.total[0], 1.0f / r.total[1]};
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (item.half == 0 && threadIdx.x % 4 == 0 && r.live[h])
                a.lse[(item.first + r.query[h]) * a.ld_lse + r.head[h]] = r.unit[h] / LOG2_E + logf(r.total[h]);
        float sum[128];
        clear_sums(sum);
        add_values(sum, m, item, r, wg, &at);
        store_rows_of(a.o, a.ld_o, sum, factor, m, c, item, wg);
    }
}
#endif

/* Registers of a consumer, and of a thread of the producer's warpgroup. */
template <bool SUMS> struct registers {
    static constexpr int MORE = SUMS ? 224 : 232, LESS = 3 * 168 - 2 * MORE;
};

template <bool SUMS>
static __global__ void __launch_bounds__(PAIR_THREADS, 1)
    attn_fwd_512_kernel(const __grid_constant__ struct wide_args c)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct wide_shared shared;
    const struct wide_memory m = start_wide(bytes, &shared);
    if (threadIdx.x >= PAIR_CONSUMERS) {
        sm90_registers_less<registers<SUMS>::LESS>();
        if (threadIdx.x > PAIR_CONSUMERS) return;
        SUMS ? load_sums(m, c) : load_weights<false>(m, c);
        if (atomicAdd(&queue.finished, 1) == gridDim.x - 1) queue = {};
    } else {
        sm90_registers_more<registers<SUMS>::MORE>();
        SUMS ? compute_sums(m, c) : compute_weights(m, c);
    }
#else
    __trap();
#endif
}

template <bool SUMS> static void launch(const struct wide_args &c)
{
    allow_shared<attn_fwd_512_kernel<SUMS>>(BYTES);
    attn_fwd_512_kernel<SUMS><<<(unsigned)cuda.n_sm, PAIR_THREADS, BYTES, cuda.stream>>>(c);
    CUDA_CHECK_LAUNCH();
}

void attn_fwd_wgmma_512(struct attn_args *a)
{
    struct wide_args c = {};
    c.weights = (bf16 *)a->pairs.data;
    c.part = (float2 *)(c.weights + pair_values(a));
    for_chunks(a, c, [](const struct wide_args &weights, const struct wide_args &sums) {
        launch<false>(weights);
        launch<true>(sums);
    });
}
