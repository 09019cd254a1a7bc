/* attn_wgmma_512_bwd.cu - attention backward on Hopper, heads of 512: the function of attn_bwd.cu with wgmma and TMA.
 *
 * Math: as attn_bwd.cu, five products. weights: p and ds from q, k, dout and v. sums: dq = ds k, dk = ds^T q and dv =
 *   p^T dout.
 * Shapes: as attn_bwd.cu; stat [K, T, H/K]; scratch of struct scratch_attn_bwd: weights, f32 sums of dk and dv.
 * Needs: sm_90a, A and B 512, at most 64 query heads to a kv head, rows aligned to 16 bytes.
 * Grid: as attn_wgmma_512.cuh. 209 KiB.
 * Bound: in clocks per SM for a stage: wgmma 1024; copies from L2 48 KiB, 48 bytes per clock, so L2 is the limit.
 * Numerics: as attn_bwd.cu; ds from p rounded to bf16. The order of sums depends on the sequence alone: chunks continue
 *   sums in f32. Rows beyond the end of a sequence are cleared, as in attn_wgmma.cuh. */
#include "kernels/cuda/sm90/attn/attn_wgmma_512.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- weights */

static __device__ __forceinline__ void load_stat(float2 (&stat)[2], const struct attn_wgmma_args &p,
                                                 const struct wide_item &x, const struct wide_rows &r, int wg)
{
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float2 *from = p.a.stat + (x.kv * (int64_t)p.a.n_tok + x.first + x.at + wg * p.n_query) * p.group + row;
#pragma unroll
    for (int h = 0; h < 2; h++) stat[h] = r.live[h] ? from[8 * h] : make_float2(INFINITY, 0.0f);
}
/* Scores become p. */
static __device__ __forceinline__ void weigh_scores(uint32_t (&w)[64], const float (&s)[128], const float2 (&stat)[2],
                                                    float scale_log2)
{
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        const float lse = stat[i / 2 % 2].x;
        w[i / 2] = pack2(exp2_fast(s[i] * scale_log2 - lse), exp2_fast(s[i + 1] * scale_log2 - lse));
    }
}
/* Replaces p in w by ds. dp of a masked key may be NaN, from the rows of another sequence. */
static __device__ __forceinline__ void weigh_dp(uint32_t (&w)[64], const float (&dp)[128], const float2 (&stat)[2],
                                                bool inside)
{
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        asm volatile("" : "+r"(w[i / 2])); /* otherwise p is unpacked before the products, and spills */
        const float low = __uint_as_float(w[i / 2] << 16), high = __uint_as_float(w[i / 2] & 0xffff0000u);
        const float x = low * (dp[i] - stat[i / 2 % 2].y), y = high * (dp[i + 1] - stat[i / 2 % 2].y);
        w[i / 2] = pack2(inside || low != 0.0f ? x : 0.0f, inside || high != 0.0f ? y : 0.0f);
    }
}

static __device__ __forceinline__ void compute_weights(const struct wide_memory &m, const struct wide_args &c)
{
    const int wg = warpgroup_index(), warp = threadIdx.x % 128 / 32;
    struct stage_at at = {0, 0}, place = {0, 0};
    for (;;) {
        const struct wide_item item = next_item(m, &place);
        if (item.kind == NONE) break;
        const struct wide_rows r = rows_of(c.p, item, wg);
        const int64_t to = (item.scratch + wg) * BLOCK_VALUES + warp * 16 * KEYS;
        float2 stat[2];
        float s[128];
        uint32_t w[64];
        load_stat(stat, c.p, item, r, wg);
        dot_stages(s, m, wg, &at);
        mask_scores(s, r, c.p.a.window);
        weigh_scores(w, s, stat, c.p.a.scale_log2);
        store_weights(c.weights + to, w, m.slice(), item.n);
        dot_stages(s, m, wg, &at);
        weigh_dp(w, s, stat, r.inside);
        store_weights(c.ds + to, w, m.slice(), item.n);
    }
}

/* ---- sums */

/* The items of a chunk: n_key of dk and dv, for blocks of 128 keys from slot `slot` of find_block on, and n_query of
 * dq. The kind whose items take longer comes first: an item of dk or dv loops over at most all queries of the chunk, an
 * item of dq over the keys. */
struct sum_items {
    int slot, n_key, n_query;
    bool keys_first;
};
static __device__ __forceinline__ struct sum_items count_items(const struct wide_args &c)
{
    const struct attn_args &a = c.p.a;
    const int size = 2 * c.p.n_query;
    const struct seq_block low = find_block(a, c.first, size), high = find_block(a, c.first + c.n - 1, size);
    const int from = max(0, min(low.block * size, low.len) - a.window + 1);
    const int to = max(0, min((high.block + 1) * size, high.len) - 1);
    const int slot = (int)low.first / (2 * KEYS) + low.seq + from / (2 * KEYS);
    const int end = (int)high.first / (2 * KEYS) + high.seq + to / (2 * KEYS) + 1;
    return {slot, (end - slot) * a.n_kv * 4, c.n * a.n_kv * 2, 2 * c.n >= c.n_block};
}

static __device__ __forceinline__ bool dkv_at(struct wide_item *item, const struct wide_args &c, int i, int slot)
{
    const int nq = c.p.n_query, rest = i % (4 * c.p.a.n_kv);
    const struct seq_block seq = find_block(c.p.a, slot + i / (4 * c.p.a.n_kv), 2 * KEYS);
    if (seq.block >= seq.n_block) return false;
    const int own = (int)seq.first / (2 * nq) + seq.seq; /* slot of the sequence's first pair */
    const int begin = max(0, c.first - own), end = c.first + c.n - own, k0 = seq.block * 2 * KEYS;
    const int first = k0 / nq, last = (min(seq.len, k0 + 2 * KEYS - 1 + c.p.a.window) - 1) / nq; /* blocks of queries */
    item->kind = rest % 2 ? DK : DV;
    item->half = rest / 2 % 2;
    item->kv = rest / 4;
    item->first = seq.first;
    item->len = seq.len;
    item->at = k0;
    item->scratch = scratch_at(c, own, item->kv);
    item->from = max(first, 2 * begin);
    item->n = min(last + 1, 2 * end) - item->from;
    item->resumed = first < 2 * begin;
    item->continued = last >= 2 * end;
    return item->n > 0;
}

/* Index in scratch of the weights of a block of queries and a block of keys; -1: all are masked, and not stored. */
static __device__ __forceinline__ int64_t block_at(const struct wide_args &c, const struct wide_item &x, int queries,
                                                   int keys)
{
    const int2 seen = blocks_seen(c.p, queries / 2 * 2 * c.p.n_query, x.len);
    if (keys < seen.x || keys >= seen.y) return -1;
    return x.scratch + ((int64_t)(queries / 2) * c.p.a.n_kv * c.n_block + keys - seen.x) * 2 + queries % 2;
}

/* Loads step t of dk and dv: weights of a block of queries and two blocks of keys; q or dout of these queries. */
static __device__ __forceinline__ void load_queries(const struct wide_memory &m, const struct wide_args &c,
                                                    const struct wide_item &x, int t, struct stage_at at)
{
    const bf16 *weights = x.kind == DK ? c.ds : c.weights;
    const CUtensorMap *rows = x.kind == DK ? &c.p.q : &c.p.dout;
    const int n_row = c.p.n_query * c.p.group, queries = x.from + t;
    const int64_t left[2] = {block_at(c, x, queries, x.at / KEYS), block_at(c, x, queries, x.at / KEYS + 1)};
    const int n_left = (left[0] >= 0) + (left[1] >= 0);
    const uint32_t bar = begin_stage(m, at, n_left * BLOCK_BYTES + n_row * COLUMNS * 2);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (left[i] >= 0)
            bulk_load(m.left(at.stage) + i * BLOCK_BYTES, (const float *)(weights + left[i] * BLOCK_VALUES),
                      BLOCK_BYTES, bar);
#pragma unroll
    for (int i = 0; i < COLUMNS / PANEL; i++)
        tma_load(m.right(at.stage) + i * PANEL_BYTES, rows, bar, x.half * COLUMNS + i * PANEL, x.kv * c.p.group,
                 (int)x.first + queries * c.p.n_query);
}
static __device__ __forceinline__ bool sums_at(struct wide_item *item, const struct wide_args &c,
                                               const struct sum_items &all, int i)
{
    const int first = all.keys_first ? all.n_key : all.n_query, rest = i < first ? i : i - first;
    if ((i < first) == all.keys_first) return dkv_at(item, c, rest, all.slot);
    item->kind = DQ;
    item->half = rest % 2;
    return pair_at(item, c, rest / 2);
}
static __device__ __forceinline__ void load_sums(const struct wide_memory &m, const struct wide_args &c)
{
    const struct sum_items all = count_items(c);
    const uint32_t n = all.n_key + all.n_query;
    struct stage_at at = {0, 0}, place = {0, 0};
    struct wide_item item = {};
    for (uint32_t i = atomicAdd(&queue.taken, 1); i < n; i = atomicAdd(&queue.taken, 1)) {
        if (!sums_at(&item, c, all, (int)i)) continue;
        pass_item(m, item, &place);
#pragma unroll 1
        for (int t = 0; t < item.n; t++) {
            if (item.kind == DQ)
                load_keys(m, c.ds, &c.p.k, item, t, at);
            else
                load_queries(m, c, item, t, at);
            at = next_stage<STAGES>(at);
        }
    }
    item.kind = NONE;
    pass_item(m, item, &place);
}

/* sum += the products of steps from .. to - 1 of an item. */
template <bool OF_DQ>
static __device__ __forceinline__ void add_steps(float (&sum)[128], const struct wide_memory &m,
                                                 const struct wide_args &c, const struct wide_item &x, int from, int to,
                                                 int wg, struct stage_at *at)
{
#pragma unroll 1
    for (int t = from; t < to; t++) {
        const int left = x.len - (x.from + t) * (OF_DQ ? (int)KEYS : c.p.n_query);
        wait_rows(m, *at, OF_DQ ? left : min(left, c.p.n_query) * c.p.group, wg);
        multiply_stage<!OF_DQ, true>(sum, m.left(at->stage) + wg * BLOCK_BYTES, m.right(at->stage));
        wgmma_wait<1>();
        if (t > from) release_before(m, *at);
        *at = next_stage<STAGES>(*at);
    }
    wgmma_wait<0>();
    wgmma_use(sum);
    if (to > from) release_before(m, *at);
}
static __device__ __forceinline__ void skip_steps(const struct wide_memory &m, int n, struct stage_at *at)
{
    for (int i = 0; i < n; i++) {
        mbarrier_wait(m.full(at->stage), at->parity);
        release_stage(m.empty(at->stage));
        *at = next_stage<STAGES>(*at);
    }
}

/* This thread's part of the f32 sums of dk or dv: rows `row` and row + 8 of its warpgroup. */
static __device__ __forceinline__ float *sums_of(const struct wide_args &c, const struct wide_item &x, int key)
{
    const int64_t row = ((x.kind == DV ? c.p.a.n_kv : 0) + x.kv) * (int64_t)c.p.a.n_tok + x.first + key;
    return c.sum + row * WIDTH + x.half * COLUMNS + threadIdx.x % 4 * 2;
}
static __device__ __forceinline__ void resume_sums(float (&sum)[128], const struct wide_args &c,
                                                   const struct wide_item &x, int key)
{
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        const int h = i / 2 % 2;
        float2 y = make_float2(0.0f, 0.0f);
        if (x.resumed && key + 8 * h < x.len) y = *(const float2 *)(sums_of(c, x, key) + 8 * h * WIDTH + i / 4 * 8);
        sum[i] = y.x;
        sum[i + 1] = y.y;
    }
}
static __device__ __forceinline__ void keep_sums(const float (&sum)[128], const struct wide_args &c,
                                                 const struct wide_item &x, int key)
{
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        const int h = i / 2 % 2;
        if (key + 8 * h < x.len)
            *(float2 *)(sums_of(c, x, key) + 8 * h * WIDTH + i / 4 * 8) = make_float2(sum[i], sum[i + 1]);
    }
}

static __device__ __forceinline__ void store_gradients(const float (&sum)[128], const float factor[2],
                                                       const struct wide_memory &m, const struct wide_args &c,
                                                       const struct wide_item &x, int wg)
{
    const struct attn_args &a = c.p.a;
    const int key = x.at + wg * KEYS + threadIdx.x % 128 / 32 * 16;
    bf16 *to = a.dqkv + (x.first + key) * a.ld_dqkv + x.half * COLUMNS +
               (int64_t)(a.n_head + (x.kind == DV ? a.n_kv : 0) + x.kv) * WIDTH;
#pragma unroll
    for (int i = 0; i < COLUMNS / PANEL; i++) {
        stage_rows<16>(m.slice(), (const float(&)[32])sum[32 * i], factor);
        store_keys<PANEL, 16>(to + i * PANEL, a.ld_dqkv, m.slice(), x.len - key);
    }
}

/* dk or dv of an item: sums of 64 keys per warpgroup. */
static __device__ __forceinline__ void add_queries(float (&sum)[128], const struct wide_memory &m,
                                                   const struct wide_args &c, const struct wide_item &x, int wg,
                                                   struct stage_at *at)
{
    const int keys = x.at / KEYS + wg;
    int from = 0, to = x.n; /* the steps whose weights are stored */
    while (from < to && block_at(c, x, x.from + from, keys) == -1) from++;
    while (to > from && block_at(c, x, x.from + to - 1, keys) == -1) to--;
    skip_steps(m, from, at);
    add_steps<false>(sum, m, c, x, from, to, wg, at);
    skip_steps(m, x.n - to, at);
}

static __device__ __forceinline__ void compute_sums(const struct wide_memory &m, const struct wide_args &c)
{
    const int wg = warpgroup_index(), row = wg * KEYS + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    struct stage_at at = {0, 0}, place = {0, 0};
    for (;;) {
        const struct wide_item item = next_item(m, &place);
        if (item.kind == NONE) break;
        const float scale = item.kind == DV ? 1.0f : c.p.a.scale, factor[2] = {scale, scale};
        float sum[128];
        if (item.kind == DQ) {
            clear_sums(sum);
            add_steps<true>(sum, m, c, item, 0, item.n, wg, &at);
            store_rows_of(c.p.a.dqkv, c.p.a.ld_dqkv, sum, factor, m, c, item, wg);
            continue;
        }
        resume_sums(sum, c, item, item.at + row);
        add_queries(sum, m, c, item, wg, &at);
        if (item.continued)
            keep_sums(sum, c, item, item.at + row);
        else
            store_gradients(sum, factor, m, c, item, wg);
    }
}
#endif

/* Registers of a consumer, and of a thread of the producer's warpgroup. */
template <bool SUMS> struct registers {
    static constexpr int MORE = SUMS ? 224 : 232, LESS = 3 * 168 - 2 * MORE;
};

template <bool SUMS>
static __global__ void __launch_bounds__(PAIR_THREADS, 1)
    attn_bwd_512_kernel(const __grid_constant__ struct wide_args c)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char bytes[];
    __shared__ struct wide_shared shared;
    const struct wide_memory m = start_wide(bytes, &shared);
    if (threadIdx.x >= PAIR_CONSUMERS) {
        sm90_registers_less<registers<SUMS>::LESS>();
        if (threadIdx.x > PAIR_CONSUMERS) return;
        SUMS ? load_sums(m, c) : load_weights<true>(m, c);
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
    allow_shared<attn_bwd_512_kernel<SUMS>>(BYTES);
    attn_bwd_512_kernel<SUMS><<<(unsigned)cuda.n_sm, PAIR_THREADS, BYTES, cuda.stream>>>(c);
    CUDA_CHECK_LAUNCH();
}

void attn_bwd_wgmma_512(const struct attn_args *a)
{
    struct wide_args c = {};
    c.weights = (bf16 *)a->pairs.data;
    c.ds = c.weights + pair_values(a);
    c.sum = a->dq_sum;
    for_chunks(a, c, [](const struct wide_args &weights, const struct wide_args &sums) {
        launch<false>(weights);
        launch<true>(sums);
    });
}
